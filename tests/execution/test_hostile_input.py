"""Input that would take endless time or memory, or show a password: one line each, before any work."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import moescope
from checkpoint.servers import serving
from checkpoints import tiny_checkpoint
from decoder.tiny_lab import tiny
from deployment.deployment_runs import write_trace
from moescope.checkpoint import location, open_checkpoint
from moescope.decoder.model import LabModel
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes, load_vocabulary
from moescope.errors import BadInput
from moescope.execution.models import load_tokenizer
from moescope.execution.recorded import Shape, read_trace
from moescope.execution.texts import check_not_empty, sources
from moescope.lab.config import read_toml
from moescope.run import Run, read_run_json
from routing.tiny_text import save_model as save_text_model
from routing.tiny_text import texts, write_jsonl


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", ["expanded", "nested"])
def test_a_tensor_larger_than_the_bin_file_that_holds_it_is_rejected(tmp_path, what):
    tensors = {
        "expanded": torch.ones(1).expand(10**10),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    torch.save({"a": torch.ones(2), "b": tensors[what]}, tmp_path / "pytorch_model.bin")
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 10_000
    with pytest.raises(BadInput, match=r"pytorch_model\.bin: tensor b "):
        open_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_a_recorded_trace_is_rejected(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2, dtype=torch.int64), torch.ones(3, dtype=torch.int64)])
    torch.save({"logical_count": nested}, tmp_path / "a.pt")
    with pytest.raises(BadInput, match="logical_count is no tensor of whole numbers"):
        list(read_trace(tmp_path / "a.pt", "sglang", Shape(4)))


def replace_by(file: Path, kind: str) -> None:
    file.unlink()
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:  # sparse: no disk space
        with file.open("wb") as large:
            large.truncate(10**9)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a large file"])
def test_only_a_regular_config_of_some_megabytes_is_read(tmp_path, kind):
    save_model(LabModel(tiny("topk", vocabulary=258)), Bytes(), tmp_path / "lab")
    (tmp_path / "text").write_text("text")
    for folder in (tiny_checkpoint(tmp_path / "model"), tmp_path / "lab"):
        replace_by(folder / "config.json", kind)
        with pytest.raises(BadInput, match=r"config\.json: "):
            open_checkpoint(folder)
        with pytest.raises(BadInput):
            moescope.trace(folder, text=tmp_path / "text", out=tmp_path / "run", quiet=True)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a large file"])
def test_a_toml_file_and_run_json_are_read_from_regular_files(tmp_path, kind):
    for name, read in (("a.toml", read_toml), ("run.json", lambda file: read_run_json(file.parent))):
        (tmp_path / name).touch()
        replace_by(tmp_path / name, kind)
        if name == "a.toml" or kind == "a large file":
            with pytest.raises(BadInput, match=name):
                read(tmp_path / name)
        else:
            assert read(tmp_path / name) is None  # no run


@pytest.mark.parametrize("kind", ["rows", "lists"])
def test_a_table_of_a_hundred_million_equal_values_is_not_read(tmp_path, kind):
    folder = write_trace(tmp_path / "run", np.array([[[0, 1], [1, 0]]]), [0, 0], 2).path
    file = folder / "tokens.parquet"
    row = pq.read_table(file).slice(0, 1)
    group = pa.concat_tables([row] * 100_000).combine_chunks()
    if kind == "lists":
        place = row.schema.get_field_index("experts")
        group = row.set_column(place, row.schema.field(place), pa.array([[1] * 10**6], pa.list_(pa.int32())))
    with pq.ParquetWriter(file, group.schema, compression="zstd") as writer:
        for _ in range(100):
            writer.write_table(group)
    assert file.stat().st_size < 1e6
    reads = [
        lambda: Run.load(folder).table("tokens"),
        lambda: moescope.deploy(folder, out=tmp_path / "deployed", quiet=True),
        lambda: list(read_trace(file, "table", Shape(4))),
    ]
    for read in reads:
        with pytest.raises(BadInput, match=r"tokens\.parquet: .* values in a file of few bytes"):
            read()


def test_a_packed_text_of_zeros_is_not_unpacked_to_its_end(tmp_path):
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        for _ in range(100):
            file.write(b" " * 2**20)
    with pytest.raises(BadInput, match=r"a\.txt\.gz: cannot be read .*200 times"):
        check_not_empty(sources([tmp_path / "a.txt.gz"], [], None))


@pytest.fixture
def model(tmp_path) -> Path:
    return save_text_model(tmp_path / "model", chat_template=True)


def test_a_tokenizer_that_makes_thousands_of_characters_of_one_is_rejected(model):
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    rule = {"type": "Replace", "pattern": {"String": " "}, "content": " " * 100}
    content["normalizer"] = {"type": "Sequence", "normalizers": [rule, rule]}
    file.write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"tokenizer\.json: its normalizer makes up to 1e\+04 characters"):
        load_tokenizer(str(model), {})


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a large file"])
def test_a_tokenizer_is_read_from_regular_files(model, kind):
    replace_by(model / "tokenizer.json", kind)
    with pytest.raises(BadInput, match=r"tokenizer\.json: a pipe or device, or over"):
        load_tokenizer(str(model), {})
    with pytest.raises(BadInput, match=r"tokenizer\.json: not a tokenizer of the lab"):
        load_vocabulary(model)


@pytest.mark.parametrize("changed", ["tokenizer.json", "chat_template.jinja"])
def test_another_tokenizer_or_chat_template_is_another_run(model, tmp_path, changed):
    text = write_jsonl(tmp_path / "a.jsonl", texts(25))
    given = {"text": text, "out": tmp_path / "run", "device": "cpu", "quiet": True}
    run = moescope.trace(model, **given)
    file = model / changed
    file.write_text(file.read_text() + "\n" if file.exists() else "{{ messages }}")
    with pytest.raises(BadInput, match="tokenizer"):
        moescope.trace(model, **given)
    assert moescope.trace(model, **given, overwrite=True).info["checkpoints"] != run.info["checkpoints"]


def test_a_name_that_is_not_utf_8_is_one_line(tmp_path):
    folder = tmp_path / os.fsdecode(b"a\xff")
    tiny_checkpoint(folder)
    with pytest.raises(BadInput, match="its name is not UTF-8; rename it"):
        moescope.scan(folder, out=tmp_path / "run", quiet=True)
    trace = tmp_path / os.fsdecode(b"\xff.csv")
    trace.write_text("0,1\n")
    for verb in (
        lambda: moescope.scan(tiny_checkpoint(tmp_path / "model"), out=tmp_path / "\udcff", quiet=True),
        lambda: moescope.trace(recorded=trace, format="llamacpp", experts=4, out=tmp_path / "run"),
        lambda: moescope.trace(tmp_path / "model", text=[tmp_path / "a", trace], out=tmp_path / "run"),
    ):
        with pytest.raises(BadInput, match="its name is not UTF-8; rename it"):
            verb()
    shutil.move(folder / "model.safetensors", tmp_path / os.fsdecode(b"b\xff.safetensors"))
    assert len(open_checkpoint(tmp_path).header_hash()) == 64


@pytest.mark.parametrize("url", ["http://[x]/y", "http://me:secret@[x]/y", "simplecache::http://[x]/y"])
def test_an_address_that_is_none_is_one_line_without_its_password(url):
    with pytest.raises(BadInput) as caught:
        open_checkpoint(url)
    assert "[x]/y" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_no_password_of_any_address_is_stored_or_shown(tmp_path):
    tiny_checkpoint(tmp_path / "files" / "moe")
    with serving(tmp_path / "files") as server:
        secret = server.url.replace("http://", "http://me:secret@")
        run = moescope.scan(f"simplecache::{secret}/moe", out=tmp_path / "run", quiet=True)
    assert "secret" not in (run.path / "run.json").read_text()
    for verb in (
        lambda: moescope.trace(tmp_path / "files" / "moe", text=f"{secret}/a.txt", out=tmp_path / "other"),
        lambda: moescope.train({"train": {"steps": 1}}, base=f"{secret}/moe", out=tmp_path / "other"),
    ):
        with pytest.raises(BadInput) as caught:
            verb()
        assert "127.0.0.1" in str(caught.value)
        assert "secret" not in str(caught.value)


def test_a_silent_server_is_asked_once_more_and_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(location, "SILENCE", 0.2)
    with serving(tmp_path) as server:
        server.silent = True
        with pytest.raises(BadInput, match=r"config\.json: .*no answer within 0\.2 seconds"):
            open_checkpoint(f"{server.url}/moe")
        assert len(server.requests) == 2 * location.SILENT_ATTEMPTS  # the size is asked for in two ways
    (line,) = caplog.messages
    assert f"{server.url}/moe/config.json" in line
