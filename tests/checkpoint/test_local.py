"""Files of this machine: `.bin` checkpoints, read without running what they hold."""

from __future__ import annotations

import json

import pytest
import torch

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
