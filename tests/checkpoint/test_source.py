"""Reading checkpoints: what is whole is read bit for bit, what is not is refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import (
    INDEX,
    edit_json,
    expert_name,
    shard_name,
    tiny_checkpoint,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from families.tiny_models import tiny_model
from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.source import in_memory
from moescope.errors import BadInput

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NAME = expert_name(0, 0, "gate")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def header_of(file: Path) -> tuple[dict, bytes]:
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(file: Path, header: object, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


# --- whole checkpoints


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_of_a_folder_is_read_bit_for_bit(tmp_path, dtype, shards):
    tensors = tiny_tensors(dtype=dtype)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", tensors, tiny_config(), shards))
    assert set(checkpoint.tensors) == set(tensors)
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == dtype
        assert read.shape == tensor.shape == checkpoint.tensors[name].shape
        assert torch.equal(bits(read), bits(tensor))


def test_nan_payloads_and_signed_zeros_survive_reading(tmp_path):
    odd = torch.tensor([0x7FC1, 0xFFC1, 0x8000, 0x0001, 0x7F80, 0xFF80], dtype=torch.uint16).view(
        torch.bfloat16
    )
    save_file({"odd": odd}, tmp_path / "model.safetensors")
    assert torch.equal(bits(open_checkpoint(tmp_path).read("odd")), bits(odd))


def test_a_single_file_is_a_checkpoint_with_the_config_beside_it(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", shards=2)
    checkpoint = open_checkpoint(folder / shard_name(0, 2))
    assert checkpoint.config == tiny_config()
    assert checkpoint.name == "model-00001-of-00002"
    assert {info.file_name for info in checkpoint.tensors.values()} == {shard_name(0, 2)}


def test_a_single_file_without_a_config_is_a_checkpoint_too(tmp_path):
    save_file(tiny_tensors(), tmp_path / "weights.safetensors")
    checkpoint = open_checkpoint(tmp_path / "weights.safetensors")
    assert checkpoint.config is None
    assert checkpoint.name == "weights"


def test_several_files_without_an_index_are_one_checkpoint(tmp_path):
    tensors = tiny_tensors()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, tmp_path / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, tmp_path / "b.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(tensors)


def test_a_second_copy_beside_model_safetensors_is_left_alone(tmp_path):
    tiny_checkpoint(tmp_path)
    save_file({"layers.0.feed_forward.gate.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    assert {info.file_name for info in open_checkpoint(tmp_path).tensors.values()} == {"model.safetensors"}


def test_a_read_tensor_is_a_copy_that_outlives_its_file(tmp_path):
    tensors = tiny_tensors()
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, tensors))
    read = checkpoint.read(NAME)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (tmp_path / "model.safetensors").stat().st_size)
    assert torch.equal(read, tensors[NAME])


def test_a_copy_has_the_same_header_hash_and_an_edited_checkpoint_another(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", shards=2)
    before = open_checkpoint(model).header_hash()
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copy)
    os.utime(copy / shard_name(0, 2), (1, 1))
    assert open_checkpoint(copy).header_hash() == before

    shard = copy / shard_name(1, 2)
    content = shard.read_bytes()
    shapes, dtypes = content.replace(b"[24,16]", b"[16,24]", 1), content.replace(b"F32", b"I32", 1)
    hashes = {before}
    for edited in (content[:-4] + b"\0\0\0\1", shapes, dtypes):
        assert len(edited) == len(content)
        shard.write_bytes(edited)
        hashes.add(open_checkpoint(copy).header_hash())
    shard.write_bytes(content)
    edit_json(copy / "config.json", num_experts_per_tok=1)
    hashes.add(open_checkpoint(copy).header_hash())
    assert len(hashes) == 5
    assert open_checkpoint(tiny_checkpoint(tmp_path / "other", shards=2, seed=1)).header_hash() not in hashes


@pytest.mark.parametrize("whole", [64 * 2**20, 4096], ids=["a small file", "a file that is sampled"])
def test_any_byte_of_a_small_tensor_belongs_to_the_identity(whole, tmp_path, monkeypatch):
    """A router that was trained alone makes another checkpoint."""
    monkeypatch.setattr("moescope.checkpoint.local.HASHED_WHOLE", whole)
    tensors = tiny_tensors()
    model = write_checkpoint(tmp_path / "model", tensors)
    before = open_checkpoint(model).header_hash()
    routers = [name for name in tensors if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        row, column = (int(size) // 3 for size in tensors[name].shape)
        edited = {**tensors, name: tensors[name].clone()}
        edited[name][row, column] += 1
        other = write_checkpoint(tmp_path / "other", edited)
        assert open_checkpoint(other).header_hash() != before, name


def test_of_a_large_tensor_both_ends_and_the_middle_belong_to_the_identity(tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.checkpoint.local.HASHED_WHOLE", 100)
    monkeypatch.setattr("moescope.checkpoint.local.SAMPLE_BYTES", 16)
    weights = torch.zeros(1000)
    hashes = set()
    for place in (None, 0, 501, 999):
        edited = weights.clone()
        if place is not None:
            edited[place] = 1
        save_file({"weight": edited}, tmp_path / "model.safetensors")
        hashes.add(open_checkpoint(tmp_path).header_hash())
    assert len(hashes) == 4


# --- bad input


def test_a_pipe_is_not_called_missing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="pipe: a pipe or device; give a folder"):
        open_checkpoint(tmp_path / "pipe")


def refusal(model: Path | str) -> str:
    """The one line that refuses the checkpoint, whether on opening it or on reading its tensors."""
    with pytest.raises(BadInput) as caught:
        checkpoint = open_checkpoint(model)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    message = str(caught.value)
    assert message == message.strip()
    assert len(message.splitlines()) == 1
    return message


def edit_header(file: Path, **changes: object) -> None:
    """Change the entry of one tensor in the file's header."""
    header, data = header_of(file)
    header[NAME].update(changes)
    write_header(file, header, data)


def offsets(file: Path) -> list[int]:
    return header_of(file)[0][NAME]["data_offsets"]


def instead(file: Path, make: Callable[[Path], object]) -> None:
    file.unlink()
    make(file)


def change(edit: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(edit(file.read_bytes()))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "the data cut": change(lambda raw: raw[:-100]),
    "the data too long": change(lambda raw: raw + b"x" * 64),
    "the header cut": change(lambda raw: raw[:40]),
    "a header longer than the file": change(lambda raw: struct.pack("<Q", 10**6) + raw[8:]),
    "a header that is not JSON": change(lambda raw: struct.pack("<Q", 4) + b"\xff{}\x00"),
    "overlapping tensors": lambda file: edit_header(
        file, data_offsets=[offsets(file)[0] - 4, offsets(file)[1]]
    ),
    "offsets beyond the file": lambda file: edit_header(file, data_offsets=[0, 2**40]),
    "offsets reversed": lambda file: edit_header(file, data_offsets=offsets(file)[::-1]),
    "an unknown dtype": lambda file: edit_header(file, dtype="Q7"),
    "a dtype of half the size": lambda file: edit_header(file, dtype="BF16"),
    "a shape beyond its data": lambda file: edit_header(file, shape=[2**40, 2**40]),
    "no tensor at all": lambda file: save_file({}, file),
    "a folder": lambda file: instead(file, Path.mkdir),
    "a link that leads nowhere": lambda file: instead(file, lambda link: link.symlink_to("gone")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name_with_the_advice_to_download_it_again(tmp_path, damage):
    file = tiny_checkpoint(tmp_path) / "model.safetensors"
    DAMAGES[damage](file)
    message = refusal(tmp_path)
    assert message.startswith(f"{file}: ")
    assert "again" in message


def test_a_missing_shard_is_named(tmp_path):
    tiny_checkpoint(tmp_path, shards=3)
    (tmp_path / shard_name(1, 3)).unlink()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / shard_name(1, 3)}: ")
    assert f"download {shard_name(1, 3)}" in message


def moved(weight_map: dict[str, str]) -> dict[str, str]:
    """The same tensors, each in the other one of two shards."""
    other = dict(zip(sorted(set(weight_map.values())), sorted(set(weight_map.values()))[::-1], strict=True))
    return {name: other[shard] for name, shard in weight_map.items()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda whole: {**whole, "model.extra.weight": shard_name(1, 2)}, "model.extra.weight"),
        (lambda whole: {**whole, NAME: moved(whole)[NAME]}, NAME),
        (moved, "model."),
        (lambda whole: {"x": shard_name(0, 2), "y": shard_name(1, 2)}, "tensor x"),
        (lambda whole: {NAME: "absent.safetensors"}, "absent.safetensors"),
    ],
    ids=["an absent tensor", "another shard", "shards exchanged", "no tensor", "an absent file"],
)
def test_an_index_that_does_not_fit_its_files_is_refused_by_name(tmp_path, change, named):
    tiny_checkpoint(tmp_path, shards=2)
    edit_json(tmp_path / INDEX, weight_map=change(json.loads((tmp_path / INDEX).read_text())["weight_map"]))
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}/")
    assert named in message
    assert "download" in message


@pytest.mark.parametrize(
    "place",
    [
        *("../../x.safetensors", "../outside/model.safetensors", "sub/x.safetensors", "absolute"),
        *("..", ".", "", 7, None, ["a"]),
    ],
    ids=str,
)
def test_an_index_may_only_name_files_beside_it(tmp_path, place):
    outside = tiny_checkpoint(tmp_path / "outside") / "model.safetensors"
    tiny_checkpoint(tmp_path / "model", shards=2)
    index = tmp_path / "model" / INDEX
    edit_json(index, weight_map={NAME: str(outside) if place == "absolute" else place})
    message = refusal(tmp_path / "model")
    assert message.startswith(f"{index}: ")
    assert NAME in message
    assert "download" in message


@pytest.mark.parametrize(
    "content",
    [b"{", b"", b"[" * 100_000, b'{"weight_map": ', b"\x00", b"\xff\xfe{}", b"[]", b"3", b'"x"', b"null"],
    ids=range(10),
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_is_no_object_of_json_is_refused_by_the_file_s_name(tmp_path, name, content):
    tiny_checkpoint(tmp_path, shards=2)
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / name}: ")
    assert "download" in message


@pytest.mark.parametrize("value", [None, {}, [], "x"])
def test_an_index_without_a_weight_map_is_refused(tmp_path, value):
    tiny_checkpoint(tmp_path, shards=2)
    edit_json(tmp_path / INDEX, weight_map=value)
    assert refusal(tmp_path).startswith(f"{tmp_path / INDEX}: no weight_map in it")


def test_a_config_that_is_a_folder_is_refused_by_name(tmp_path):
    tiny_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    assert str(tmp_path / "config.json") in refusal(tmp_path)


@pytest.mark.parametrize("indexed", [False, True])
def test_a_tensor_that_lies_in_two_files_is_refused_with_both_names(tmp_path, indexed):
    tensors = tiny_tensors()
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({NAME: tensors[NAME], "other": torch.ones(2)}, tmp_path / "b.safetensors")
    if indexed:
        weight_map = {**dict.fromkeys(tensors, "a.safetensors"), "other": "b.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'b.safetensors'}: tensor {NAME} is also in a.safetensors")
    assert "keep one" in message


def test_an_empty_folder_is_refused(tmp_path):
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: no .safetensors file (it is empty)")
    assert "give the folder of a safetensors checkpoint" in message


def test_a_run_folder_names_the_checkpoint_in_it(tmp_path):
    inside = tmp_path / "checkpoints" / "step-8"
    inside.mkdir(parents=True)
    for file in (tmp_path / "run.json", inside / "config.json"):
        file.write_text("{}")
    assert refusal(tmp_path).endswith(f"; give {inside}")


class Explosive:
    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.witness,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl"])
def test_a_pickle_is_refused_and_never_run(tmp_path, name):
    witness, model = tmp_path / "witness", tmp_path / "model"
    model.mkdir()
    (model / name).write_bytes(pickle.dumps(Explosive(witness)))
    (model / "config.json").write_text(json.dumps(tiny_config()))
    for given in (model, model / name):
        message = refusal(given)
        assert str(given) in message
        assert "safetensors" in message
    assert not witness.exists()
    pickle.loads((model / name).read_bytes())
    assert witness.exists(), "the trap itself must work, or this test proves nothing"


def test_a_pickle_that_torch_itself_wrote_is_refused_and_never_run(tmp_path):
    witness, file = tmp_path / "witness", tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(2), "trap": Explosive(witness)}, file)
    assert refusal(tmp_path).startswith(f"{file}: cannot be read as plain tensors")
    assert not witness.exists()
    torch.load(file, weights_only=False)
    assert witness.exists(), "the trap itself must work, or this test proves nothing"


def test_a_pickle_named_like_a_safetensors_file_is_refused_and_never_run(tmp_path):
    witness, file = tmp_path / "witness", tmp_path / "model.safetensors"
    file.write_bytes(pickle.dumps(Explosive(witness)))
    assert refusal(tmp_path).startswith(f"{file}: not a complete safetensors file")
    assert not witness.exists()


@pytest.mark.parametrize(
    "model",
    ["no/such/folder", "nowhere", "/no/such/file.safetensors", "~no-such-user/model", "x" * 5000, "a\0b"],
)
def test_a_path_that_does_not_exist_is_refused(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    message = refusal(model)
    assert "no such folder or file" in message
    assert "check the path" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool], ids=str)
def test_a_dtype_that_cannot_be_read_is_refused_by_name_when_asked_for_and_only_then(tmp_path, dtype):
    save_file({"odd": torch.ones(4, 4).to(dtype), "plain": torch.ones(2)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("plain"), torch.ones(2))
    with pytest.raises(BadInput) as caught:
        checkpoint.read("odd")
    message = str(caught.value)
    assert message.startswith(
        f"{tmp_path / 'model.safetensors'}: tensor odd has dtype {checkpoint.tensors['odd'].dtype}"
    )
    assert "give a checkpoint in BF16, F16, F32, F64" in message


def test_a_file_that_shrinks_after_it_was_opened_is_refused_on_reading(tmp_path):
    tiny_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    DAMAGES["the data cut"](tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=r"model\.safetensors: cannot read tensor .*; download the file again"):
        checkpoint.read(NAME)


def test_a_tensor_name_with_line_breaks_does_not_break_the_message(tmp_path):
    save_file({"a\nb": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    refusal(tmp_path)


AS_NOBODY = """
import os, sys
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
open_checkpoint(sys.argv[-1])  # imports all it needs while it still may
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for model in sys.argv[1:]:
    try:
        open_checkpoint(model)
        print("read")
    except BadInput as error:
        print(error)
"""


def test_files_that_may_not_be_read_are_refused_by_name():
    with tempfile.TemporaryDirectory() as base:  # pytest's own folders are closed to other users
        os.chmod(base, 0o755)
        locked = {}
        for name in ("model.safetensors", "config.json", INDEX, "."):
            folder = tiny_checkpoint(Path(base) / f"locked-{len(locked)}", shards=2 if name == INDEX else 1)
            locked[folder] = folder / name
            (folder / name).chmod(0)
        whole = tiny_checkpoint(Path(base) / "whole")
        for file in whole.iterdir():
            file.chmod(0o644)
        command = [sys.executable, "-c", AS_NOBODY, *map(str, locked), str(whole)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        for path in locked.values():
            path.chmod(0o755)
    lines = shown.stdout.splitlines()
    assert len(lines) == len(locked) + 1
    for line, path in zip(lines, locked.values(), strict=False):
        assert line.startswith(f"{path}"), line
        assert "no permission to read; change the file's mode or owner" in line
    assert lines[-1] == "read"


# --- a running model in the place of files


def test_a_model_in_memory_reads_as_copies_that_the_model_cannot_change():
    model = tiny_model("qwen3_moe").model
    weights = in_memory(model, "the model")
    name = "model.layers.1.mlp.gate.weight"
    whole, row = weights.read(name), weights.read(name, 1)
    assert torch.equal(whole[1], row)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.zero_()
    assert whole.abs().sum() > 0
    assert row.abs().sum() > 0
