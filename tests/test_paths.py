"""Folders whose names look like URLs."""

from pathlib import Path

import pytest

from moescope.deployment.verb import deploy
from moescope.reporting.verb import report
from moescope.routing.trace import trace
from moescope.run import Run
from routing.tiny_text import save_model, texts, write_jsonl


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("made")
    return save_model(folder / "model"), write_jsonl(folder / "text.jsonl", texts(6))


@pytest.mark.parametrize("name", ["model:tag", "s3:x"])
def test_a_relative_folder_with_a_colon_is_a_folder(
    name: str, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, text = made
    monkeypatch.chdir(tmp_path)
    traced = trace(model, text=text, out=f"{name}/trace", save_tokens=True, quiet=True)
    assert isinstance(traced, Run)
    for run in (traced, deploy(f"{name}/trace", out=f"{name}/deploy", quiet=True)):
        assert isinstance(run, Run)
        report(run)
        assert (tmp_path / run.path / "report.html").exists()
    assert len(Run.load(f"{name}/trace").table("tokens"))
