"""One quantity has one chance level: in tables, figures, strips of the map, key numbers and findings."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from moescope.plotting.style import GREY, number, values_of
from moescope.routing.figures_steps import FIGURES as ROUTING
from moescope.routing.report_views import load_trace, routing_views
from moescope.verb import Figure, Tables
from moescope.weights.figures import ACROSS_LAYERS, ACROSS_VIEWS
from moescope.weights.report import layer_table
from moescope.weights.report import stack as side_by_side
from moescope.weights.report_findings import findings, views

SCAN = {  # quantity -> its chance level in the tables, figures that draw it, key number, how that is pooled
    "best_accuracy": ("alignment_tests", "chance_accuracy", ["compare_accuracy"], "best argmax accuracy"),
    "absolute_score": (
        "ambiguity",
        "absolute_chance",
        ["compare_ambiguity", "absolute_ambiguity_by_layer"],
        "absolute ambiguity",
    ),
}


def dashed(figure: Figure) -> list[dict]:
    """Return the grey dashed lines of a figure: its chance levels."""
    lines = [trace for trace in figure.data if str(trace.get("mode", "")).startswith("lines")]
    return [
        line for line in lines if line["line"].get("color") == GREY and line["line"].get("dash") == "dash"
    ]


def drawn_levels(name: str, tables: Tables) -> pd.Series:
    """Return layer -> the first chance level of a figure across layers."""
    spec = next(spec for spec in (*ACROSS_LAYERS, *ACROSS_VIEWS) if spec.name == name)
    line = dashed(spec.draw(tables))[0]
    return pd.Series(np.asarray(line["y"], float), index=np.asarray(line["x"]))


@pytest.mark.parametrize("quantity", SCAN)
def test_a_scan_states_one_level_everywhere(planted_run, quantity):
    table, column, figures, words = SCAN[quantity]
    view = views(planted_run)[0]
    level = view.tables[table].set_index("layer")[column].sort_index()
    stacked = side_by_side([view])
    for name in figures:
        pd.testing.assert_series_equal(
            drawn_levels(name, stacked), level, check_names=False, check_index_type=False
        )
    (strip,) = [
        strip
        for strip in planted_run.verb.strips(planted_run)
        if strip.name == quantity and strip.view == view.label
    ]
    assert strip.frame.set_index("layer")["chance"].sort_index().tolist() == level.tolist()
    summary = planted_run.verb.summary(planted_run)
    (key,) = [key for key in summary.key_numbers if words in key.name]
    assert key.chance in (pytest.approx(level.mean()), pytest.approx(level.median()))
    shown = layer_table(view)
    place = [head["name"] for head in shown["columns"]].index(column)
    assert [row[place] for row in shown["rows"]] == pytest.approx(level.tolist(), rel=1e-5)
    if quantity != "best_accuracy":
        (sentence,) = [line for line in findings(view) if line.startswith("Ambiguity")]
        assert f"a layer at chance: {number(level.mean())}" in sentence


def test_a_trace_states_one_level_everywhere(traced_run):
    """Every figure of a metric by layer, the strips and the key numbers against `routing_layers`."""
    view = routing_views(load_trace(traced_run))[-1]
    compared = 0
    for spec in ROUTING:
        if not (spec.name.endswith("_by_layer") and spec.metrics and spec.can_draw(view.tables)):
            continue
        rows = values_of(view.tables, spec.metrics[0]).set_index("layer")
        if rows["chance"].isna().all():
            continue
        line = dashed(spec.draw(view.tables))[0]
        assert list(line["x"]) == rows.index.tolist()
        np.testing.assert_allclose(line["y"], rows["chance"], err_msg=spec.name)
        compared += 1
    assert compared >= 10
    for strip in traced_run.verb.strips(traced_run):
        if strip.view == view.label:
            rows = values_of(view.tables, strip.name)
            assert strip.frame["chance"].tolist() == rows["chance"].tolist()
    metrics = {"load CV": "cv", "Busiest": "max_over_mean", "expert; token": "token_information"}
    for key in traced_run.verb.summary(traced_run).key_numbers:
        for words, metric in metrics.items():
            if words in key.name:
                assert key.chance in values_of(view.tables, metric)["chance"].tolist()
