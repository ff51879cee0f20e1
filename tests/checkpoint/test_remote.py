"""Checkpoints on a server: the same tensors as from the disk, and no more bytes than were asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from checkpoint.servers import COMMITS, FileServer, serving
from checkpoints import expert_name, shard_name, tiny_checkpoint
from moescope.checkpoint import location as remote_module
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe
from moescope.weights.verb import scan

LAYERS = 12


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint(
        tmp_path / "files" / "moe", shards=3, layers=LAYERS, experts=8, d_model=64, d_ff=128
    )


@pytest.fixture
def server(folder, monkeypatch):
    # as small against these files as 64 KiB are against real ones
    monkeypatch.setattr(remote_module, "FIRST_BYTES", 4096)
    with serving(folder.parent) as running:
        yield running


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(remote_module.time, "sleep", lambda seconds: None)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_every_tensor_on_a_server_equals_the_one_on_disk(folder, server):
    near, far = open_checkpoint(folder), open_checkpoint(f"{server.url}/moe")
    assert far.config == near.config
    assert far.name == near.name
    assert list(far.tensors) == list(near.tensors)
    for name, info in near.tensors.items():
        assert far.tensors[name].shape == info.shape
        assert far.tensors[name].dtype == info.dtype
        assert torch.equal(far.read(name), near.read(name))


@pytest.mark.parametrize("index", [0, 7, slice(2, 5), slice(0, 1), slice(60, 64)], ids=str)
def test_a_part_of_the_first_axis_equals_the_part_of_the_whole(folder, server, index):
    far = open_checkpoint(f"{server.url}/moe")
    name = expert_name(3, 1, "down")
    whole = open_checkpoint(folder).read(name)
    before = server.sent
    assert torch.equal(far.read(name, index), whole[index])
    assert server.sent - before == whole[index].numel() * whole.element_size()


def test_a_single_file_by_its_url_has_the_config_beside_it(folder, server):
    far = open_checkpoint(f"{server.url}/moe/{shard_name(1, 3)}")
    assert far.one_file
    assert far.config == json.loads((folder / "config.json").read_text())
    assert {info.file for info in far.tensors.values()} == {f"{server.url}/moe/{shard_name(1, 3)}"}


def test_scanning_one_layer_of_twelve_transfers_less_than_12_percent_of_the_bytes(tmp_path, folder, server):
    run = scan(f"{server.url}/moe", layers=5, matrix=("gate", "up", "down"), out=tmp_path / "far", quiet=True)
    share = server.sent / weight_bytes(folder)
    assert 1 / LAYERS < share < 0.12, f"{share:.1%} of the bytes"
    same = scan(folder, layers=5, matrix=("gate", "up", "down"), out=tmp_path / "near", quiet=True)
    assert run.tables == same.tables
    for table in run.tables:
        assert run.table(table).equals(same.table(table)), table


def test_headers_alone_are_fetched_to_look_at_a_model(folder, server):
    read_moe(open_checkpoint(f"{server.url}/moe"))
    small = sum(file.stat().st_size for file in folder.glob("*.json"))
    headers = sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors")
    )
    assert headers + small <= server.sent <= 3 * 4096 + headers + small


def test_a_dropped_connection_is_made_again(folder, server):
    far = open_checkpoint(f"{server.url}/moe")
    server.drop_next = 2
    name = expert_name(0, 0, "gate")
    assert torch.equal(far.read(name), open_checkpoint(folder).read(name))
    assert server.drop_next == 0


def refusal(model: str) -> str:
    with pytest.raises(BadInput) as caught:
        open_checkpoint(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_forbids_is_named_with_the_remedy(server, status):
    server.status = status
    assert "no permission; log in" in refusal(f"{server.url}/moe")


def test_a_folder_that_is_not_there_is_refused(server):
    assert refusal(f"{server.url}/nowhere").startswith(
        f"{server.url}/nowhere: no index and no model.safetensors at this address"
    )


def test_a_missing_shard_is_named(folder, server):
    (folder / shard_name(2, 3)).unlink()
    assert f"{server.url}/moe/{shard_name(2, 3)}: 1 of 3 shards missing" in refusal(f"{server.url}/moe")


def test_a_server_that_gives_whole_files_only_is_refused(folder, server):
    far = open_checkpoint(f"{server.url}/moe")
    server.ranges = False
    name = expert_name(3, 1, "down")
    with pytest.raises(
        BadInput,
        match=r"model-0000\d-of-00003.safetensors: the server does not serve byte ranges",
    ):
        far.read(name)


def damaged(folder: Path, way: str) -> None:
    file = folder / shard_name(0, 3)
    raw = file.read_bytes()
    if way == "cut":
        file.write_bytes(raw[:-100])
    elif way == "length":
        file.write_bytes((2**40).to_bytes(8, "little") + raw[8:])
    elif way == "header":
        file.write_bytes(raw[:8] + b"x" * 50 + raw[58:])
    elif way == "empty":
        file.write_bytes(b"")


@pytest.mark.parametrize("way", ["cut", "length", "header", "empty"])
def test_a_damaged_file_on_a_server_is_refused_by_its_url(folder, server, way):
    damaged(folder, way)
    assert refusal(f"{server.url}/moe").startswith(f"{server.url}/moe/{shard_name(0, 3)}: ")


def test_a_file_that_changes_on_the_server_changes_the_identity(folder, server):
    before = open_checkpoint(f"{server.url}/moe").header_hash()
    assert open_checkpoint(f"{server.url}/moe").header_hash() == before
    os.utime(folder / shard_name(0, 3), ns=(1, 1))
    assert open_checkpoint(f"{server.url}/moe").header_hash() != before


def test_a_file_that_changes_on_the_server_during_a_scan_is_refused_after_the_layer(folder, server):
    far = open_checkpoint(f"{server.url}/moe")
    name = expert_name(0, 0, "gate")
    far.read(name)
    far.release()
    far.read(name)
    os.utime(folder / far.tensors[name].file_name, ns=(1, 1))
    with pytest.raises(BadInput, match="has changed on the server since its header was read"):
        far.release()


def test_name_password_and_query_work_and_are_never_shown(folder, server):
    url = server.url.replace("http://", "http://me:secret@") + "/moe?signature=abc"
    far = open_checkpoint(url)
    assert torch.equal(
        far.read(expert_name(1, 1, "up")), open_checkpoint(folder).read(expert_name(1, 1, "up"))
    )
    assert all("?signature=abc" in request for request in server.requests if "/moe/" in request)
    for text in (
        far.address,
        far.shown,
        repr(far),
        next(iter(far.tensors.values())).file,
        refusal(url.replace("/moe", "/nowhere")),
    ):
        assert "secret" not in text
        assert "signature" not in text
    server.status = 500
    message = refusal(url)
    assert "secret" not in message
    assert "signature" not in message


@pytest.mark.parametrize("url", ["github://x", "reference://x", "dir://x", "tar://x::/etc/passwd", "http://"])
def test_a_url_that_its_file_system_cannot_open_is_one_line(url):
    assert refusal(url)


def test_a_bin_file_on_a_server_is_refused(server, folder):
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "only safetensors" in refusal(f"{server.url}/moe/pytorch_model.bin")


# --- the hub


@pytest.fixture
def ask_hub(monkeypatch, tmp_path):
    """A function that puts a stand-in in the place of the hub, with a cache of its own."""
    from huggingface_hub import HfFileSystem, constants

    def at(server: FileServer) -> Path:
        cache = tmp_path / "home" / "hub"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        HfFileSystem.clear_instance_cache()
        return cache

    yield at
    HfFileSystem.clear_instance_cache()


@pytest.fixture
def hub(folder, ask_hub):
    with serving(folder, {"tiny/moe": folder}) as running:
        ask_hub(running)
        yield running


@pytest.mark.parametrize(
    ("model", "revision", "commit"),
    [
        ("tiny/moe", None, "main"),
        ("tiny/moe@step1000", None, "step1000"),
        ("tiny/moe", "step1000", "step1000"),
        ("hf://tiny/moe", None, "main"),
    ],
)
def test_a_hub_id_is_read_at_the_commit_its_revision_names(hub, model, revision, commit):
    moe = read_moe(open_checkpoint(model, revision))
    assert moe.checkpoint.revision == COMMITS[commit]
    assert {weights.n_experts for weights in moe.layers.values()} == {8}
    assert len(moe.layers) == LAYERS
    assert all("resolve/main" not in request for request in hub.requests)


def test_scanning_a_layer_from_the_hub_fetches_its_ranges_and_is_done_once(tmp_path, folder, hub):
    written = []
    for _ in range(2):
        run = scan("tiny/moe@step1000", layers=5, out=tmp_path / "run", quiet=True)
        written.append((run.path / "run.json").read_bytes())
        (checkpoint,) = run.info["checkpoints"]
        assert (checkpoint["path"], checkpoint["revision"]) == ("hf://tiny/moe", COMMITS["step1000"])
    assert hub.sent < 2 * (0.2 * weight_bytes(folder) + 4 * 65536)
    assert written[0] == written[1], "the second scan reads headers alone"


@pytest.mark.parametrize(
    ("model", "part"),
    [("tiny/other", "the hub has no such model"), ("tiny/moe@nowhere", "no such revision")],
)
def test_a_hub_id_that_leads_nowhere_is_one_line(hub, model, part):
    message = refusal(model)
    assert model in message
    assert part in message


def test_a_silent_hub_is_one_line(hub, monkeypatch):
    monkeypatch.setattr(remote_module, "SILENCE", 0.2)
    hub.silent = True
    assert "the hub cannot be reached" in refusal("tiny/moe")


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(tmp_path, folder, monkeypatch):
    monkeypatch.chdir(folder.parent.parent)  # files/moe is here
    assert "did you mean files/moe?" in refusal("files/mo")
    assert "did you mean files/moe?" in refusal("files/moe@main")
    assert "no such folder or file" in refusal("./nothing")


def test_two_different_revisions_are_refused(tmp_path):
    with pytest.raises(BadInput, match="two revisions, a and b"):
        open_checkpoint("tiny/moe@a", "b")


def test_a_revision_of_a_folder_is_refused(folder):
    with pytest.raises(BadInput, match=r"a revision .* needs a hub id"):
        open_checkpoint(folder, "main")


@pytest.mark.parametrize(
    "kept", [["model-00001-of-00003.safetensors"], ["config.json", "model-00001-of-00003.safetensors"]]
)
def test_a_part_of_a_model_in_the_hub_s_cache_does_not_pass_for_the_model(folder, hub, ask_hub, kept):
    snapshot = ask_hub(hub) / "models--tiny--moe" / "snapshots" / COMMITS["main"]
    snapshot.mkdir(parents=True)
    for name in kept:
        (snapshot / name).symlink_to(folder / name)
    assert len(read_moe(open_checkpoint("tiny/moe")).layers) == LAYERS


def test_a_model_in_the_hub_s_cache_is_read_from_there_without_the_hub(tmp_path, folder, ask_hub):
    commit = COMMITS["main"]
    with serving(tmp_path) as nothing:
        nothing.status = 503
        cache = ask_hub(nothing) / "models--tiny--moe"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text(commit)
        (cache / "snapshots").mkdir()
        (cache / "snapshots" / commit).symlink_to(folder)
        assert open_checkpoint("tiny/moe").revision == commit
