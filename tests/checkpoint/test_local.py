"""Files of this machine: `.bin` checkpoints, read without running what they hold."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import expert_name, tiny_checkpoint, tiny_config, tiny_tensors
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe


def bin_checkpoint(folder, shards: int = 1):
    """The tiny checkpoint as torch.save writes it."""
    folder.mkdir()
    tensors = tiny_tensors(dtype=torch.bfloat16)
    names = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)]
    names = names if shards > 1 else ["pytorch_model.bin"]
    where = {tensor: names[place % shards] for place, tensor in enumerate(tensors)}
    for name in names:
        torch.save({tensor: tensors[tensor] for tensor in tensors if where[tensor] == name}, folder / name)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    return tensors


@pytest.mark.parametrize("shards", [1, 3])
def test_a_bin_checkpoint_is_read_bit_for_bit(tmp_path, shards):
    tensors = bin_checkpoint(tmp_path / "model", shards)
    moe = read_moe(open_checkpoint(tmp_path / "model"))
    for name, tensor in tensors.items():
        read = moe.checkpoint.read(name)
        assert read.dtype == torch.bfloat16
        assert moe.checkpoint.tensors[name].dtype == "BF16"
        assert torch.equal(read, tensor)
    assert torch.equal(moe.layers[1].gate_EFD.read(2), tensors[expert_name(1, 2, "gate")])


def test_a_single_bin_file_is_a_checkpoint(tmp_path):
    tensors = bin_checkpoint(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model" / "pytorch_model.bin")
    assert set(checkpoint.tensors) == set(tensors)


def test_safetensors_come_before_bin_files(tmp_path):
    bin_checkpoint(tmp_path / "model")
    tiny_checkpoint(tmp_path / "model")
    assert open_checkpoint(tmp_path / "model").file_names() == ["model.safetensors"]


def test_the_trainer_s_own_pickle_beside_the_weights_is_left_alone(tmp_path):
    bin_checkpoint(tmp_path / "model", shards=2)
    (tmp_path / "model" / "pytorch_model.bin.index.json").unlink()
    (tmp_path / "model" / "training_args.bin").write_bytes(b"not for reading")
    assert len(open_checkpoint(tmp_path / "model").file_names()) == 2


@pytest.mark.parametrize(
    "content", [[torch.ones(2)], {"a": 1}, {"model": {"a": torch.ones(1)}}, {}, {1: torch.ones(1)}]
)
def test_a_bin_file_of_another_kind_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model\.bin: not a plain table of names and tensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_bin_file_that_is_cut_is_refused(tmp_path, keep):
    bin_checkpoint(tmp_path / "model")
    file = tmp_path / "model" / "pytorch_model.bin"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    with pytest.raises(BadInput, match=r"pytorch_model\.bin: cannot be read as plain tensors"):
        open_checkpoint(tmp_path / "model")


def test_an_old_bin_file_that_cannot_be_mapped_is_refused(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(BadInput, match="give a checkpoint saved as safetensors"):
        open_checkpoint(tmp_path)


def test_a_bin_file_of_parameters_is_read_and_one_of_hollow_tensors_refused(tmp_path):
    torch.save({"a": torch.nn.Parameter(torch.ones(2))}, tmp_path / "pytorch_model.bin")
    assert not open_checkpoint(tmp_path).read("a").requires_grad
    torch.save({"a": torch.ones(2, device="meta")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput, match="tensor a "):
        open_checkpoint(tmp_path)


# --- files that change, and things that are no files


def swapped(folder, first: float, second: float) -> None:
    save_file({"a": torch.tensor([first]), "b": torch.tensor([second])}, folder / "model.safetensors")


@pytest.mark.parametrize("released", [True, False])
def test_a_file_that_is_written_anew_after_its_header_was_read_is_refused(tmp_path, released):
    swapped(tmp_path, 1.0, 2.0)
    checkpoint = open_checkpoint(tmp_path)
    if released:
        checkpoint.read("a")
        checkpoint.release()
    swapped(tmp_path, 3.0, 4.0)
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with pytest.raises(BadInput, match="the file has changed since its header was read"):
        checkpoint.read("a")


def test_a_pipe_beside_the_weights_is_not_waited_for(tmp_path):
    swapped(tmp_path, 1.0, 2.0)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadInput, match=r"config\.json: a pipe or device"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3)])
def test_a_part_of_a_tensor_without_parts_is_refused(tmp_path, shape):
    save_file({"a": torch.zeros(shape)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("a").shape == shape
    with pytest.raises(BadInput, match="has no parts"):
        checkpoint.read("a", 0)


def test_a_header_whose_entries_are_lists_is_refused(tmp_path):
    header = b'{"a":["F32",[2],[0,8]]}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BadInput, match="not a complete safetensors file"):
        open_checkpoint(tmp_path)


def test_a_git_lfs_pointer_is_named_with_the_command_that_helps(tmp_path):
    (tmp_path / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(BadInput, match=r"a Git LFS pointer.*git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_file_with_a_backslash_in_its_name_is_a_file_like_any_other(tmp_path):
    swapped(tmp_path, 1.0, 2.0)
    (tmp_path / "model.safetensors").rename(tmp_path / "x\\y.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert float(checkpoint.read("b")) == 2.0
    assert checkpoint.header_hash()
