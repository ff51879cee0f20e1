"""Compression of a model that is run layer by layer: the tables of a resident run."""

from __future__ import annotations

from pathlib import Path

import pytest

import moescope
from moescope.errors import BadInput
from moescope.execution.hidden_states import FileStates
from moescope.execution.streamed import load_streamed
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    save_model(folder / "model", "qwen3_moe")
    write_jsonl(folder / "text.jsonl", texts(40, seed=0))
    return folder


@pytest.fixture(scope="module")
def too_little(place) -> str:
    """Memory for the layers and nothing else."""
    return str(load_streamed(str(place / "model"), "auto", "cpu").expect(0).memory_bytes)


def compress(place: Path, out: Path, **options):
    given = {"method": "reap", "keep": 0.5, "text": place / "text.jsonl", "controls": 1, **options}
    apply = None if given.get("router") == "tie" else out.with_name(f"{out.name}-small")
    return moescope.compress(place / "model", apply=apply, out=out, device="cpu", quiet=True, **given)


def equal_tables(run, other) -> None:
    assert run.tables == other.tables
    for name in run.tables:
        assert run.table(name).equals(other.table(name)), name


@pytest.mark.parametrize("method", ["reap", pytest.param("hc_smoe", marks=pytest.mark.slow)])
def test_calibration_plan_and_judgement_are_those_of_a_resident_run(place, tmp_path, method, too_little):
    """Hidden states are in files; pruned and merged experts are judged by predicted and measured damage."""
    options = {"streamed": {"memory": too_little}, "resident": {}}
    streamed, resident = (
        compress(place, tmp_path / way, method=method, execution=way, **more) for way, more in options.items()
    )
    equal_tables(streamed, resident)
    assert resident.table("damage")["perplexity"].notna().any()
    assert {entry["way"] for entry in streamed.info["execution"]} == {"streamed"}
    assert any(entry["disk_bytes"] for entry in streamed.info["execution"])
    files = [tmp_path / f"{way}-small" / "model.safetensors" for way in options]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_interrupted_calibration_resumes_at_its_layer(place, tmp_path, too_little, monkeypatch):
    own, written = FileStates.put, []

    def interrupted(states, batch, value):
        if states.part == 2:
            raise KeyboardInterrupt
        own(states, batch, value)

    def counted(states, batch, value):
        written.append(states.part)
        own(states, batch, value)

    options = {"execution": "streamed", "memory": too_little, "judge": False}
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(FileStates, "put", interrupted)
        compress(place, tmp_path / "run", **options)
    monkeypatch.setattr(FileStates, "put", counted)
    run = compress(place, tmp_path / "run", **options)
    assert min(written) == 2
    equal_tables(run, compress(place, tmp_path / "other", judge=False, execution="resident"))


@pytest.mark.parametrize(
    "options", [{"sequential": True}, {"router": "tie"}], ids=["sequential", "router tie"]
)
def test_what_changes_the_running_model_is_rejected(place, tmp_path, options):
    with pytest.raises(BadInput, match="--execution resident"):
        compress(place, tmp_path / "run", method="hc_smoe", execution="streamed", **options)
    assert not (tmp_path / "run").exists()


def test_layers_larger_than_the_memory_are_rejected_before_calibration(place, tmp_path):
    with pytest.raises(BadInput, match=r"needs at least .* give --memory \d+MB"):
        compress(place, tmp_path / "run", execution="streamed", memory="10KB")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "run-small").exists()
