"""What follows a training's last step: parts that are its own are made anew where they do not fit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from moescope.decoder.config import ModelConfig
from moescope.errors import BadInput
from moescope.lab.config import LabConfig
from moescope.lab.train_parts import is_routed, own_part, report_is_behind
from moescope.run import Run, open_run


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
    def make(overwrite: bool) -> Run:
        with open_run(folder, "scan", {"arguments": {"seed": 0}}, overwrite) as writer:
            return writer.finish({})

    return own_part(folder, make)


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


def test_a_report_older_than_a_part_is_behind(tmp_path: Path):
    assert report_is_behind(tmp_path)
    made_in(tmp_path / "scan")
    (tmp_path / "report.html").write_text("page")
    assert not report_is_behind(tmp_path)
    later = (tmp_path / "report.html").stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "scan" / "run.json", ns=(later, later))
    assert report_is_behind(tmp_path)


@pytest.mark.parametrize(
    ("router", "experts", "routed"), [("topk", 4, True), ("topk", 1, False), ("dense", 4, False)]
)
def test_with_one_expert_nothing_is_routed(router: str, experts: int, routed: bool):
    assert is_routed(LabConfig(ModelConfig(router=router, experts=experts, top_k=1))) == routed
