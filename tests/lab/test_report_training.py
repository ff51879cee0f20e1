"""A training's part of the page: its findings, its sections, and the runs it holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from moescope.decoder.routers import facts_of_model
from moescope.lab.report_training import sections, summary
from moescope.reporting.page import page_content
from moescope.run import Run
from moescope.verb import Selection


@pytest.fixture
def run(trained_run: Run) -> Run:
    return trained_run


def test_the_first_finding_gives_the_loss_and_both_baselines(run: Run):
    finding = summary(run).findings[0]
    rows = run.table("evaluations").query("domain == ''")
    first, last = rows.iloc[0], rows.iloc[-1]
    for value in (last["loss"], first["loss"], last["unigram_loss"], last["uniform_loss"]):
        assert f"{value:.3g}" in finding
    number = summary(run).key_numbers[0]
    assert (number.value, number.chance) == (last["loss"], last["unigram_loss"])


def with_tables(run: Run, monkeypatch: pytest.MonkeyPatch, **changed: pd.DataFrame) -> None:
    """Let the run have these tables instead of its own."""
    tables = {name: run.table(name) for name in run.tables} | changed
    monkeypatch.setattr(Run, "table", lambda self, name: tables[name].copy())


def test_domains_no_better_than_the_unigram_baseline_are_named(run: Run, monkeypatch: pytest.MonkeyPatch):
    with_tables(run, monkeypatch, evaluations=run.table("evaluations").assign(unigram_loss=0.0))
    assert all(domain in summary(run).findings[1] for domain in run.info["domains"])


def with_model(run: Run, **model: object) -> Run:
    """The run as if its model had been another."""
    changed = {**run.info["arguments"]["model"], **model}
    arguments = {**run.info["arguments"], "model": changed}
    return Run(run.path, {**run.info, "arguments": arguments, "router_facts": facts_of_model(changed)})


def test_load_that_cannot_be_uneven_is_not_called_least_even_anywhere(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    rows = run.table("routing_layers")
    even = rows.assign(value=rows["value"].where(rows["metric"] != "cv", 0.0))
    with_tables(run, monkeypatch, routing_layers=even)
    sentence = [
        said
        for said in summary(with_model(run, router="expert_choice")).findings
        if said.startswith("Load balance")
    ]
    assert "by construction" in sentence[0]
    assert "CV 0" in sentence[0]
    assert not any("Load balance" in said for said in summary(with_model(run, router="dense")).findings)
    assert not any("Load balance" in said for said in summary(with_model(run, experts=1)).findings)


def test_every_section_is_drawn_and_the_page_holds_scan_and_trace_too(run: Run):
    found = sections(run, Selection())
    assert [section.anchor for section in found] == ["losses", "load", "routers", "speed"]
    assert all(section.figures for section in found)
    assert set(run.parts) == {"scan", "trace"}
    page = page_content([run])
    assert page["title"] == f"mixtral, 2 layers × 4 experts, top 2: {run.name}, trained with top2"


def test_the_command_makes_the_run_again(run: Run):
    config = run.path.parent / "tiny.toml"
    expected = f"moescope train {config} --router top2 --out {run.path} --device cpu --quiet"
    assert run.info["command"] == expected


def test_words_of_the_users_domains_do_not_act_in_figures(run: Run, monkeypatch: pytest.MonkeyPatch):
    rows = run.table("evaluations")
    name = "<b>%{x}"
    with_tables(
        run,
        monkeypatch,
        evaluations=rows.assign(domain=rows["domain"].where(rows["domain"] == "", name)).drop_duplicates(
            ["step", "domain"]
        ),
    )
    figures = [spec.draw(tables) for spec, tables in sections(run, Selection())[0].figures]
    assert all("<b>" not in figure.caption and "%{x}" not in figure.caption for figure in figures)


def test_a_run_without_its_parts_is_reported_all_the_same(run: Run, tmp_path: Path):
    shutil.copytree(run.path, tmp_path / "copy")
    for part in ("scan", "trace"):
        shutil.rmtree(tmp_path / "copy" / part)
    alone = Run.load(tmp_path / "copy")
    assert not alone.parts
    page_content([alone])
