"""The report of a training that was only watched: what its tables hold, finished or not."""

from __future__ import annotations

import pytest

from moescope.errors import BadInput
from moescope.reporting.monitor_section import WATCHED
from moescope.routing.monitor import LoopMonitor
from moescope.run import Run
from moescope.workflows.report import report
from routing.tiny_training import batch, documents, model_of


def train(folder, steps: int) -> LoopMonitor:
    model = model_of()
    monitor = LoopMonitor(folder, every=2, decisions_every=1, gradients_every=2).watch(model)
    for number in range(steps):
        model(**batch(documents()[4 * number : 4 * number + 4])).loss.backward()
        monitor.step()
    return monitor


def test_a_watched_training_is_drawn_over_its_steps_finished_or_not(tmp_path):
    train(tmp_path / "done", 6).close()
    train(tmp_path / "stopped", 6).stop()
    for name, told in (("done", False), ("stopped", True)):
        run = Run.load(tmp_path / name)
        load, routers = WATCHED.sections(run)
        assert {"cv_by_step", "routing_entropy_by_step"} <= {spec.name for spec, _ in load.figures}
        assert [spec.name for spec, _ in routers.figures] == ["pull_on_routers"]
        page = report(run.path, out=tmp_path / f"{name}.html").read_text()
        assert "Load while it learned" in page
        assert "random routing gives" in page
        assert "3 MoE layers of 4 experts, watched in training, up to step 6" in page
        assert ("this training is interrupted" in page) == told


def test_before_the_first_table_there_is_nothing_to_report(tmp_path):
    train(tmp_path / "young", 1).stop()
    with pytest.raises(BadInput, match=r"young: no table of this training is on disk yet; wait for its first 2 steps"):
        report(tmp_path / "young")
