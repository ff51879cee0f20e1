"""What follows a training's last step: parts that are its own are made anew where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moescope.errors import BadInput
from moescope.lab.train import make_part
from moescope.run import Run, open_run
from moescope.verbs import load_verb


def damage(part: Path, how: str) -> None:
    """What an older version, other arguments or a kill may have left of a training's scan or trace."""
    info = json.loads((part / "run.json").read_text())
    if how == "other arguments":
        info["arguments"]["seed"] = 7
    elif how == "older version":
        info |= {"schema_version": 0, "status": "running"}
    (part / "run.json").write_text(json.dumps(info) if how != "cut short" else "{")
    if how == "killed while it was cleared":
        (part / "run.json").unlink()


def made_in(folder: Path) -> Run:
    def make(out: Path, overwrite: bool) -> Run:
        with open_run(out, load_verb("scan"), {"arguments": {"seed": 0}}, overwrite) as writer:
            return writer.finish({})

    return make_part(folder, load_verb("scan"), make)


@pytest.mark.parametrize(
    "how", ["other arguments", "older version", "cut short", "killed while it was cleared"]
)
def test_a_part_that_does_not_fit_is_made_anew(how: str, tmp_path: Path):
    made_in(tmp_path)
    (tmp_path / "report.html").write_text("of the part before")
    damage(tmp_path, how)
    again = made_in(tmp_path)
    assert again.info["arguments"] == {"seed": 0}
    assert again.info["status"] == "done"
    assert not (tmp_path / "report.html").exists()


def test_a_part_that_fits_stays_and_so_do_other_peoples_files(tmp_path: Path):
    made_in(tmp_path)
    (tmp_path / "report.html").write_text("kept")
    (tmp_path / "mine.txt").write_text("kept")
    made_in(tmp_path)
    assert (tmp_path / "report.html").exists()
    damage(tmp_path, "other arguments")
    made_in(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(BadInput, match="not a run folder"):
        made_in(tmp_path)
