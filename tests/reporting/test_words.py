"""The words of key numbers on planted data: they say what the verdicts and tests of the tables say."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moescope.lab.report_training import loss_differences, summary
from moescope.routing.figures import LOAD
from moescope.routing.report import glance_table
from moescope.routing.report_views import load_trace, routing_views
from moescope.routing.trace import trace
from moescope.run import Run
from moescope.weights.report import numbers_of, verdict, views

# planted: layer 0 at chance, 1 and 2 identify their experts, 3 beats chance, 4 fits in another order
OF_LAYERS = [
    ([0], "at chance"),
    ([0, 3], "beyond chance"),
    ([0, 1, 2], "aligned"),
    ([0, 1, 2, 3, 4], "beyond chance"),
]


@pytest.mark.parametrize(("layers", "word"), OF_LAYERS)
def test_words_of_a_scan_follow_the_verdicts_of_its_layers(planted_run, layers, word):
    view = views(planted_run)[0]
    tables = {name: frame[frame["layer"].isin(layers)] for name, frame in view.tables.items()}
    first, accuracy, *_ = numbers_of(replace(view, tables=tables))
    assert first.value == len({1, 2, 3, 4} & set(layers))
    assert first.word == word
    tests = tables["alignment_tests"].set_index("best_accuracy")
    assert accuracy.value in tests.index
    assert accuracy.chance in tests.loc[[accuracy.value], "chance_accuracy"].tolist()  # that of its own layer


def test_layers_are_at_chance_where_none_is_claimed_after_the_correction(planted_run):
    view = views(planted_run)[0]
    for layers, word, start in (
        ([0], "at chance", "Routers look random: 0 of 1 layer above chance."),
        ([0, 3], "beyond chance", "Routers match their experts in 1 of 2 layers"),
    ):
        tables = {name: frame[frame["layer"].isin(layers)] for name, frame in view.tables.items()}
        some = replace(view, tables=tables)
        assert (numbers_of(some)[0].value, numbers_of(some)[0].word) == (len(layers) - 1, word)
        assert verdict(some).startswith(start)


def recorded(folder, chosen) -> Run:
    """A trace of the chosen experts alone, (documents, tokens, layers, k): no logits, no token ids."""
    lines = [json.dumps({"choices": [{"routed_experts": document.tolist()}]}) for document in chosen]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return trace(recorded=folder / "a.jsonl", format="vllm", experts=8, out=folder / "run", quiet=True)


def routed(favour: float, unused: bool = False) -> np.ndarray:
    """Two of eight experts per token; `favour` raises the chance of expert 0 in layer 1 only."""
    scores = np.random.default_rng(0).random((30, 40, 2, 8))
    scores[:, :, 1, 0] += favour
    if unused:
        scores[:, :, 1, 7] -= 9
    return (-scores).argsort(-1)[..., :2]


def test_even_routing_is_balanced_and_a_favoured_expert_makes_its_layer_uneven(tmp_path):
    for name, chosen, words, start in (
        ("even", routed(0.0), {"Worst load CV": "at chance"}, "Load is as even as random routing."),
        (
            "uneven",
            routed(0.4),
            {"Worst load CV": "uneven (36 % of collapse), layer 1"},
            "Load is uneven (36 % of collapse), worst in layer 1.",
        ),
        ("unused", routed(0.0, True), {"Unused experts, worst layer": "beyond chance, layer 1"}, "Load is"),
    ):
        (tmp_path / name).mkdir()
        run = recorded(tmp_path / name, chosen)
        summary = run.verb.summary(run)
        assert summary.verdict.startswith(start)
        found = {key.name: key.word for key in summary.key_numbers}
        for number, word in words.items():
            assert found[number].startswith(word), (name, number, found[number])
        rows = run.table("load_totals").query("layer == 1").set_index("expert")["claimed"]
        assert rows[0] == (name != "even")


def few_in_the_last_layer(folder) -> Run:
    """20 documents of 20 tokens in layers 0 and 1, of which layer 1 favours expert 0; 1 token in layer 2."""
    chosen = routed(0.4).reshape(-1, 2, 2)[:400]
    rows = [(*divmod(token, 20), layer, *chosen[token, layer]) for token in range(400) for layer in (0, 1)]
    lines = [
        f"{document},{token},{layer},{a} {b}" for document, token, layer, a, b in [*rows, (19, 19, 2, 3, 4)]
    ]
    (folder / "t.csv").write_text("\n".join(["document,position,layer,experts", *lines]))
    return trace(recorded=folder / "t.csv", experts=8, save_tokens=True, out=folder / "run", quiet=True)


def test_a_layer_with_few_tokens_is_neither_named_worst_nor_beyond_chance(tmp_path):
    run = few_in_the_last_layer(tmp_path)
    summary = run.verb.summary(run)
    words = {key.name: key.word for key in summary.key_numbers}
    assert words["Worst load CV"].startswith("uneven")
    assert words["Worst load CV"].endswith("layer 1")
    worst, few, uneven, *_ = summary.findings
    assert worst.place["layer"] == uneven.place["layer"] == 1
    assert "layer 2, with at most 1 token" in few
    load = next(measure for measure in run.verb.measures(run) if measure.name == "load").frame
    assert not load.loc[load["layer"] == 2, "beyond"].any()
    assert load.loc[load["layer"] == 1, "beyond"].any()
    view = routing_views(load_trace(run))[-1]
    captions = [spec.draw(view.tables).caption for spec in LOAD if spec.can_draw(view.tables)]
    named = [caption for caption in captions if "layer 2" in caption]
    assert not named


def test_a_trace_without_token_ids_holds_no_text(tmp_path):
    run = few_in_the_last_layer(tmp_path)
    assert "tokens" in run.tables
    assert run.verb.summary(run).notices == []


def test_what_a_trace_does_not_hold_is_absent_and_not_zero(tmp_path):
    run = recorded(tmp_path, routed(0.0))
    summary = run.verb.summary(run)
    lacking = ("entropy", "token)", "domain", "Token specialisation", "Domain specialisation")
    assert not [text for text in (*summary.findings, *(key.name for key in summary.key_numbers))
                if any(word in text for word in lacking)]  # fmt: skip
    heads = [column["title"] for column in glance_table(routing_views(load_trace(run))[-1])["columns"]]
    assert not {"routing entropy", "confidence", "I(expert; domain)", "I(expert; token)"} & set(heads)
    assert {measure.name for measure in run.verb.measures(run)} <= {"load", "coactivation"}


def test_a_training_has_learned_where_it_beats_the_unigram_baseline(trained_run, monkeypatch):
    rows = trained_run.table("evaluations")
    original = Run.table
    for baseline, word in ((float(rows["loss"].max()) + 1, "learned"), (0.0, "no better")):
        changed = rows.assign(unigram_loss=baseline)
        monkeypatch.setattr(
            Run,
            "table",
            lambda self, name, t=changed: t.copy() if name == "evaluations" else original(self, name),
        )
        assert summary(trained_run).key_numbers[0].word == word


def test_a_training_that_ends_above_its_first_loss_has_not_learned(trained_run, monkeypatch):
    rows = trained_run.table("evaluations")
    rows["loss"] = 1.0 + rows["step"] / 1000  # rises, and stays under the baseline
    changed = rows.assign(unigram_loss=5.0)
    original = Run.table
    monkeypatch.setattr(
        Run, "table", lambda self, name: changed.copy() if name == "evaluations" else original(self, name)
    )
    found = summary(trained_run)
    assert found.key_numbers[0].word == "worse than at the start"
    assert "worse than at the start" in found.findings[0]


def losses(**last: tuple[float, float]) -> pd.DataFrame:
    """Evaluations of runs: name -> (final loss, unigram baseline)."""
    return pd.DataFrame(
        [
            {"run": run, "step": step, "domain": "", "loss": value, "unigram_loss": base, "uniform_loss": 5.5}
            for run, (loss, base) in last.items()
            for step, value in ((0, 5.5), (9, loss))
        ]
    )


def test_losses_on_different_text_are_not_compared():
    (same,) = loss_differences(losses(a=(2.5, 3.0), b=(2.25, 3.0)))
    assert "2.25 (b) vs 2.5 (a) nats per token" in same
    assert "no claim" in same
    (other,) = loss_differences(losses(a=(2.5, 3.0), b=(2.25, 3.4)))
    assert "not comparable" in other
    assert " vs " not in other
