"""A training's part of the page: its sentences, its sections, and the runs it holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from moescope.decoder.routers import facts_of_model
from moescope.lab.report_training import TRAINING, coverage, findings, sections
from moescope.reporting.page import page_content
from moescope.run import Run


@pytest.fixture
def run(trained_run: Run) -> Run:
    return trained_run


def test_the_first_finding_gives_the_loss_and_both_baselines(run: Run):
    first = findings(run)[0]
    baselines = run.info["references"]
    for value in (
        run.info["evaluations"][-1]["loss"],
        run.info["evaluations"][0]["loss"],
        baselines["unigram"][""],
        baselines["uniform"],
    ):
        assert f"{value:.3g}" in first


def test_domains_no_better_than_frequencies_are_named(run: Run):
    worse = {**run.info["references"], "unigram": dict.fromkeys(run.info["references"]["unigram"], 0.0)}
    sentence = findings(Run(run.path, {**run.info, "references": worse}))[1]
    assert all(domain in sentence for domain in run.info["domains"])


def test_load_is_told_beside_random_routing(run: Run):
    assert any("CV" in sentence and "random routing:" in sentence for sentence in findings(run))


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
    tables = {name: run.table(name) for name in run.tables} | {"routing_layers": even}
    monkeypatch.setattr(Run, "table", lambda self, name: tables[name])
    sentence = [
        said for said in findings(with_model(run, router="expert_choice")) if said.startswith("Load balance")
    ]
    assert "CV 0 in every layer, by construction" in sentence[0]
    assert not any("Load balance" in said for said in findings(with_model(run, router="dense")))
    assert not any("Load balance" in said for said in findings(with_model(run, experts=1)))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"layers": 1, "experts": 1}, "top2 router, 1 layer of 1 expert; "),
        (
            {"router": "dense"},
            "dense router, 2 layers of one block as wide as 2 experts; ",
        ),
        ({}, "top2 router, 2 layers of 4 experts; "),
    ],
)
def test_one_of_a_thing_is_not_many(model: dict[str, object], words: str, run: Run):
    assert coverage(with_model(run, **model))[0].startswith(words)


def test_a_small_text_is_told_in_bytes_and_the_head_beside_the_vocabulary(run: Run):
    sizes = {"text": {"train_bytes": 851}}
    last = coverage(Run(run.path, {**run.info, "domains": sizes}))[-1]
    assert last.startswith(
        "text: text, 851 bytes for training; 258 tokens in the vocabulary, 260 entries in the model's head;"
    )


def test_what_is_frozen_and_where_it_began_is_said(run: Run):
    told = Run(
        run.path, {**run.info, "frozen": "frozen: x", "arguments": {**run.info["arguments"], "from": "there"}}
    )
    assert coverage(told)[1:3] == ["starts from there with its model and vocabulary", "frozen: x"]


def test_every_section_is_drawn_and_the_page_holds_scan_and_trace_too(run: Run):
    assert [section.anchor for section in sections(run)] == ["losses", "load", "routers", "speed"]
    page = page_content([run])
    assert len(page["told"]) == 4
    assert page["title"] == f"{run.name}: training with top2"
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
        run.path,
        {
            **run.info,
            "evaluations": evaluations,
            "references": {**run.info["references"], "unigram": unigram},
        },
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
