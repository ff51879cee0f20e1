"""A training's part of the page: its sentences, its sections, and the runs it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from moescope.reporting.page import page_content
from moescope.reporting.training_section import TRAINING, findings, sections
from moescope.run import Run


@pytest.fixture
def run(trained_run: Run) -> Run:
    return trained_run


def test_the_first_sentence_gives_the_loss_and_both_models_without_skill(run: Run):
    first = findings(run)[0]
    told = run.info["references"]
    for value in (
        run.info["evaluations"][-1]["loss"],
        run.info["evaluations"][0]["loss"],
        told["unigram"][""],
        told["uniform"],
    ):
        assert f"{value:.3g}" in first


def test_domains_no_better_than_frequencies_are_named(run: Run):
    worse = {**run.info["references"], "unigram": dict.fromkeys(run.info["references"]["unigram"], 0.0)}
    assert "No better than token frequencies alone" in findings(Run(run.path, {**run.info, "references": worse}))[1]


def test_load_is_told_beside_random_routing(run: Run):
    assert any("CV" in sentence and "random routing gives" in sentence for sentence in findings(run))


def test_every_section_is_drawn_and_the_page_holds_scan_and_trace_too(run: Run):
    assert [section.anchor for section in sections(run)] == ["losses", "load", "routers", "course"]
    page = page_content([run])
    assert len(page["told"]) == 4
    assert page["title"] == f"{run.name}: a training with top2"
    assert page["readings"]
    assert page["views"]
    assert all(entry["figures"] for entry in page["told"])


def test_the_command_makes_the_run_again(run: Run):
    config = run.path.parent / "tiny.toml"
    assert TRAINING.command(run) == f"moescope train {config} --router top2"


def test_words_of_the_users_domains_do_not_act_in_figures(run: Run):
    name = "<b>%{x}"
    evaluations = [{**one, "domains": {name: 1.0}} for one in run.info["evaluations"]]
    unigram = {**run.info["references"]["unigram"], name: 2.0}
    told = Run(
        run.path, {**run.info, "evaluations": evaluations, "references": {**run.info["references"], "unigram": unigram}}
    )
    losses = sections(told)[0]
    figures = [spec.draw(tables) for spec, tables in losses.figures]
    assert all("<b>" not in figure.title and "%{x}" not in figure.title for figure in figures)


def test_a_run_without_its_parts_is_told_all_the_same(run: Run, tmp_path: Path):
    import shutil

    shutil.copytree(run.path, tmp_path / "copy")
    for part in ("scan", "trace"):
        shutil.rmtree(tmp_path / "copy" / part)
    page = page_content([Run.load(tmp_path / "copy")])
    assert len(page["told"]) == 4
    assert not page["readings"]
