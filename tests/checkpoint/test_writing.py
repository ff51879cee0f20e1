"""Checkpoints as they are written.

What safetensors and huggingface_hub say of them, and what is left when writing stops midway.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import INDEX, tiny_checkpoint, tiny_tensors
from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.writing import PlannedTensor, StoredBytes, plan_tensor, write_checkpoint
from moescope.errors import BadInput
from moescope.storage import PARTIAL_ENDING


def plan(tensors: dict[str, torch.Tensor]) -> list[PlannedTensor]:
    return [plan_tensor(name, tensor) for name, tensor in tensors.items()]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


EVERY_DTYPE = {
    f"a tensor of {dtype} α": torch.randint(
        0, 2 if dtype is torch.bool else 256, (5, 3 * dtype.itemsize), dtype=torch.uint8
    ).view(dtype)
    for dtype in (
        *(torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.bfloat16, torch.float16),
        *(torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8),
    )
}
ODD_SHAPES = {"none": torch.ones(0, 4), "one": torch.tensor(3.5), "turned": torch.arange(6.0).reshape(2, 3).T}


# --- what safetensors reads back


def test_tensors_of_every_dtype_and_shape_come_back_bit_for_bit(tmp_path):
    given = {**EVERY_DTYPE, **ODD_SHAPES}
    written = write_checkpoint(tmp_path / "out", plan(given))
    found = stored(tmp_path / "out")
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor), name
    assert written.total_bytes == sum(tensor.nbytes for tensor in given.values())


def test_a_copy_is_bit_for_bit_whatever_the_dtype(tmp_path):
    given = {
        **EVERY_DTYPE,
        "scale": torch.randint(0, 256, (7,), dtype=torch.uint8).view(torch.float8_e8m0fnu),
    }
    (tmp_path / "source").mkdir()
    save_file(given, tmp_path / "source" / "model.safetensors")
    source = StoredBytes(open_checkpoint(tmp_path / "source"))
    write_checkpoint(tmp_path / "out", [source.copy(name) for name in given])
    found = stored(tmp_path / "out")
    assert {name: (tensor.dtype, raw(tensor)) for name, tensor in found.items()} == {
        name: (tensor.dtype, raw(tensor)) for name, tensor in given.items()
    }


def test_a_tensor_larger_than_a_piece_is_copied_whole_and_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.checkpoint.writing.CHUNK_BYTES", 64)
    source = StoredBytes(open_checkpoint(tiny_checkpoint(tmp_path / "source")))
    name = "model.embed_tokens.weight"
    whole = raw(tiny_tensors()[name])
    pieces = [bytes(piece) for piece in source.chunks(name)]
    assert len(pieces) == len(whole) / 64 > 4
    assert b"".join(pieces) == whole
    assert b"".join(map(bytes, source.chunks(name, 100, 150))) == whole[100:250]


def test_every_tensor_starts_at_a_multiple_of_its_width(tmp_path):
    write_checkpoint(tmp_path / "out", plan(EVERY_DTYPE))
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in EVERY_DTYPE.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


# --- shards


def test_shards_are_cut_and_named_as_huggingface_hub_cuts_them(tmp_path):
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = tiny_tensors()
    theirs = split_torch_state_dict_into_shards(
        tensors, max_shard_size=4000, filename_pattern="model{suffix}.safetensors"
    )
    written = write_checkpoint(tmp_path / "out", plan(tensors), max_shard_bytes=4000)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert len(written.shards) > 9
    assert index == {
        "metadata": {"total_size": theirs.metadata["total_size"]},
        "weight_map": theirs.tensor_to_filename,
    }
    assert set(written.shards) == set(index["weight_map"].values()) == names(tmp_path / "out") - {INDEX}
    found = stored(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert open_checkpoint(tmp_path / "out").tensors.keys() == tensors.keys()


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path):
    tensors = {"small": torch.ones(2), "large": torch.ones(100), "next": torch.ones(2)}
    written = write_checkpoint(tmp_path / "out", plan(tensors), max_shard_bytes=16)
    assert len(written.shards) == 3
    assert all(torch.equal(stored(tmp_path / "out")[name], tensor) for name, tensor in tensors.items())


# --- the files beside the weights


def test_small_files_come_along_and_weights_and_indices_do_not(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", shards=2)
    kept = ["tokenizer.json", "tokenizer.model", "generation_config.json", "chat_template.jinja"]
    kept += ["merges.txt", "modeling_x.py", "LICENSE"]
    left = ["pytorch_model.bin", "pytorch_model.bin.index.json", "optimizer.pt", "model.gguf", "tf_model.h5"]
    left += ["trainer_state.json", ".gitattributes", "consolidated.safetensors"]
    for name in (*kept, *left):
        (source / name).write_text(name)
    for folder in ("additional_chat_templates", "original"):
        (source / folder).mkdir()
        (source / folder / "tools.jinja").write_text("tools")
    write_checkpoint(tmp_path / "out", plan(tiny_tensors()), {"num_local_experts": 3, "ü": 1}, source)
    assert names(tmp_path / "out") == {*kept, "config.json", "model.safetensors", "additional_chat_templates"}
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "tokenizer.model"
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"num_local_experts": 3, "ü": 1}
    write_checkpoint(tmp_path / "same", plan(tiny_tensors()), None, source)
    assert (tmp_path / "same" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_files_behind_the_links_of_a_hub_s_cache_are_copied_as_files(tmp_path):
    source = tiny_checkpoint(tmp_path / "models--a--b" / "snapshots" / "commit")
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "1").write_text("words")
    (source / "vocab.json").symlink_to("../../blobs/1")
    (source / "merges.txt").symlink_to("vocab.json")
    write_checkpoint(tmp_path / "out", plan(tiny_tensors()), None, source)
    for name in ("vocab.json", "merges.txt"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).read_text() == "words"


def test_a_link_that_leaves_the_source_is_not_followed(tmp_path):
    source = tiny_checkpoint(tmp_path / "source")
    (tmp_path / "private").write_text("secret")
    (source / "LICENSE").symlink_to(tmp_path / "private")
    write_checkpoint(tmp_path / "out", plan(tiny_tensors()), None, source)
    assert not (tmp_path / "out" / "LICENSE").exists()


# --- whole or not at all


def endless() -> PlannedTensor:
    """More than any disk holds, and not to be asked for."""

    def never():
        pytest.fail("data were read before the disk was checked")

    return PlannedTensor("huge", "U8", (2**60,), 2**60, never)


def test_a_disk_too_small_is_refused_before_anything_is_read_and_leaves_nothing(tmp_path):
    with pytest.raises(
        BadInput, match=r"MB of disk left, .* MB needed; free some space, or give a folder on another disk"
    ):
        write_checkpoint(tmp_path / "new" / "out", [endless()])
    assert names(tmp_path) == set()


FULL = """
    import resource, sys, torch
    from moescope.checkpoint.writing import plan_tensor, write_checkpoint
    from moescope.errors import BadInput
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        write_checkpoint(sys.argv[1], [plan_tensor(name, torch.ones(20_000)) for name in "ab"])
    except BadInput as error:
        print(error)
"""


def test_a_file_that_the_system_cuts_short_is_one_line_and_leaves_nothing(tmp_path):
    target = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(FULL), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{target}: cannot be written (File too large); give another folder\n"
    assert names(tmp_path) == set()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, BadInput])
def test_whatever_stops_the_writing_leaves_nothing(tmp_path, error):
    def broken():
        yield memoryview(bytes(8))
        raise error("midway")

    tensors = [*plan(tiny_tensors()), PlannedTensor("last", "F32", (4,), 16, broken)]
    with pytest.raises(error, match="midway"):
        write_checkpoint(tmp_path / "out", tensors)
    assert names(tmp_path) == set()


def test_a_source_cut_short_after_it_was_opened_is_named_and_leaves_nothing(tmp_path):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "source"))
    source = StoredBytes(checkpoint)
    file = tmp_path / "source" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(
        BadInput, match=r"model.safetensors: cannot read tensor .* too early\); download the file again"
    ):
        write_checkpoint(tmp_path / "out", [source.copy(name) for name in checkpoint.tensors])
    assert names(tmp_path) == {"source"}


SLOW = """
    import sys, time, torch
    from moescope.checkpoint.writing import PlannedTensor, plan_tensor, write_checkpoint
    def slow():
        yield memoryview(bytes(4_000_000))
        print("midway", flush=True)
        time.sleep(600)
    planned = PlannedTensor("slow", "U8", (8_000_000,), 8_000_000, slow)
    tensors = [plan_tensor("first", torch.ones(10)), planned]
    write_checkpoint(sys.argv[1], tensors, {"a": 1}, max_shard_bytes=100)
"""


def test_a_process_killed_midway_leaves_no_target_and_the_next_clears_what_it_left(tmp_path):
    target = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW), str(target)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "midway\n"
        assert not target.exists()
        partial = tmp_path / f"out{PARTIAL_ENDING}"
        assert "model-00001-of-00002.safetensors" in names(partial)
        with pytest.raises(
            BadInput, match="another moescope process is writing it; wait for it, or give another folder"
        ):
            write_checkpoint(target, plan(tiny_tensors()))
        assert "model-00001-of-00002.safetensors" in names(partial), "the other's work is left alone"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert not target.exists()
    assert partial.exists(), "nothing was left behind, so nothing is shown to be cleared"
    write_checkpoint(target, plan(tiny_tensors()))
    assert names(tmp_path) == {"out"}
    assert names(target) == {"model.safetensors"}
    assert stored(target).keys() == tiny_tensors().keys()


def test_a_folder_filled_by_another_while_we_write_stays_the_other_s(tmp_path):
    def meanwhile():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine.txt").write_text("mine")
        return [memoryview(bytes(4))]

    with pytest.raises(BadInput, match=r"out: cannot be written .*; give another folder"):
        write_checkpoint(tmp_path / "out", [PlannedTensor("late", "U8", (4,), 4, meanwhile)])
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"mine.txt"}


def test_an_empty_folder_and_a_link_to_one_are_filled(tmp_path):
    for name in ("empty", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    for name in ("empty", "link"):
        write_checkpoint(tmp_path / name, plan(tiny_tensors()))
        assert names(tmp_path / name) == {"model.safetensors"}
    assert names(tmp_path) == {"empty", "link", "linked"}
