"""The report of a monitored training: what its tables hold, finished or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decoder.tiny_lab import text, tiny, train_step
from moescope.decoder.model import LabModel
from moescope.errors import BadInput
from moescope.reporting.verb import report
from moescope.routing.monitor import LoopMonitor, Thresholds
from moescope.routing.report_monitor import MONITOR
from moescope.run import Run
from moescope.verb import Selection
from report_payloads import glossary_terms, page_text
from routing.tiny_training import batch, documents, model_of


def train(folder, steps: int, **thresholds: float) -> LoopMonitor:
    model, limits = model_of(), Thresholds(**thresholds)
    monitor = LoopMonitor(folder, every=2, decisions_every=1, gradients_every=2, thresholds=limits)
    monitor.watch(model)
    for number in range(steps):
        model(**batch(documents()[4 * number : 4 * number + 4])).loss.backward()
        monitor.step()
    return monitor


def test_a_monitored_training_is_drawn_over_its_steps_finished_or_not(tmp_path):
    train(tmp_path / "done", 6).close()
    train(tmp_path / "stopped", 6).stop()
    for name, told in (("done", False), ("stopped", True)):
        run = Run.load(tmp_path / name)
        load, routers = MONITOR.sections(run, Selection())
        assert {"balance_by_step", "load_by_step"} == {spec.name for spec, _ in load.figures}
        assert [spec.name for spec, _ in routers.figures] == ["router_gradient_by_step"]
        page = report(run.path, out=tmp_path / f"{name}.html").read_text()
        assert "Load balance at the end of training: worst in layer" in page
        assert "3 MoE layers of 4 experts, monitored in training, up to step 6" in page
        assert ("This training is interrupted" in page) == told


def test_a_collapse_is_named_in_the_findings_and_on_the_card(tmp_path):
    run = train(tmp_path / "run", 4, max_cv=0.0, dead_steps=1000).close()
    summary = MONITOR.summary(run)
    (finding,) = [text for text in summary.findings if "collapsed" in text]
    assert "3 alerts; the first collapse: step 4, layer 0: collapsed onto 2 of 4 experts" in finding
    card = summary.key_numbers[-1]
    assert (card.name, card.value, card.word) == ("Alerts", 3, "3 layers collapsed")


def lab_run(router: str, folder: Path, **options: object) -> Run:
    """Six steps of a tiny lab model, three tables of two steps each."""
    torch.manual_seed(0)
    model = LabModel(tiny(router, router_options=options)).train()
    optimiser = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.5)
    monitor = LoopMonitor(folder, every=2, decisions_every=1, gradients_every=0).watch(model)
    for number in range(6):
        train_step(model, optimiser, text(6, 17, seed=number))
        monitor.step()
    run = monitor.close()
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("router", "drawn"),
    [
        ("spectra", ["column error", "overlap of directions"]),
        ("some", ["key cosine", "key strength", "weakened keys"]),
        ("expert_choice", ["tokens without an expert", "experts per token", "spread of experts per token"]),
        ("top2", []),
    ],
)
def test_router_diagnostics_are_drawn_over_steps_with_their_last_values(tmp_path, router, drawn):
    run = lab_run(router, tmp_path / "run")
    found = [section for section in MONITOR.sections(run, Selection()) if section.anchor == "diagnostics"]
    if not drawn:
        assert found == []
        return
    (section,) = found
    ((spec, tables),) = section.figures
    figure = spec.draw(tables)
    assert (figure.slider.values if figure.slider else [figure.columns[0].replace("_", " ")]) == (
        drawn if figure.slider else ["column error"]
    )
    assert list(section.facts) == [f"{name}, last step" for name in drawn]
    if router == "some":
        assert section.facts["key strength, last step"] == "1 (before the decay: 1)"
    page = report(run.path, out=tmp_path / "report.html").read_text()
    assert figure.caption in page_text(page)
    assert set(figure.columns) <= glossary_terms(page)


def balance(section) -> list[str]:
    """The pages of the figure of load balance."""
    spec, tables = section.figures[0]
    return spec.draw(tables).slider.values


def test_a_router_built_to_be_sure_is_said_to_raise_no_alert_about_it(tmp_path):
    load = MONITOR.sections(lab_run("spectra", tmp_path / "sure"), Selection())[0]
    assert "low routing entropy in layers 0 to 2 raises no alert" in load.text
    assert "empty expert slots" in balance(load), "the quota turned some away"
    load = MONITOR.sections(lab_run("spectra", tmp_path / "plain", plain=True), Selection())[0]
    assert "raises no alert" not in load.text
    assert "empty expert slots" not in balance(load)


def test_before_the_first_table_there_is_nothing_to_report(tmp_path):
    train(tmp_path / "young", 1).stop()
    with pytest.raises(
        BadInput, match=r"young: no table of this training is on disk yet; wait for its first 2 steps"
    ):
        report(tmp_path / "young")
