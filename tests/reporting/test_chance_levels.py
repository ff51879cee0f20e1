"""One quantity has one chance level: in tables, figures, strips of the map, key numbers and findings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moescope.plotting.style import GREY, number, values_of
from moescope.routing.figures import FIGURES as ROUTING
from moescope.routing.report_views import load_trace, routing_views
from moescope.verb import Figure
from moescope.weights.report import findings, layer_table, views

SCAN = {  # quantity -> its chance level in the tables, key number
    "best_accuracy": ("alignment_tests", "chance_accuracy", "Accuracy at best k"),
    "absolute_score": (
        "ambiguity",
        "absolute_chance",
        "Absolute ambiguity",
    ),
}


def dashed(figure: Figure) -> list[dict]:
    """Return the grey dashed lines of a figure: its chance levels."""
    lines = [trace for trace in figure.data if str(trace.get("mode", "")).startswith("lines")]
    return [
        line for line in lines if line["line"].get("color") == GREY and line["line"].get("dash") == "dash"
    ]


@pytest.mark.parametrize("quantity", SCAN)
def test_a_scan_states_one_level_everywhere(planted_run, quantity):
    table, column, words = SCAN[quantity]
    view = views(planted_run)[0]
    level = view.tables[table].set_index("layer")[column].sort_index()
    if quantity == "absolute_score":
        drawn = planted_run.draw("absolute_ambiguity_by_layer")
        start, per = drawn.slider.start, drawn.slider.per_value
        (line,) = dashed(replace(drawn, data=drawn.data[start * per : (start + 1) * per]))
        assert list(line["y"]) == level.tolist()
    (strip,) = [
        strip
        for strip in planted_run.verb.strips(planted_run)
        if strip.name == quantity and strip.view == view.label
    ]
    assert strip.frame.set_index("layer")["chance"].sort_index().tolist() == level.tolist()
    summary = planted_run.verb.summary(planted_run)
    rows = view.tables[table].set_index("layer")
    keys = [key for key in summary.key_numbers if words in key.name]
    assert len(keys) == (quantity == "best_accuracy")  # five key numbers at most
    for key in keys:
        layer = int(key.word.removeprefix("layer "))  # the median layer, with its own level
        assert (key.value, key.chance) == (rows.loc[layer, quantity], level[layer])
        assert key.value == pytest.approx(rows[quantity].median())
    shown = layer_table(view)
    place = [head["name"] for head in shown["columns"]].index(column)
    assert [row[place] for row in shown["rows"]] == pytest.approx(level.tolist(), rel=1e-5)
    if quantity != "best_accuracy":
        (sentence,) = [line for line in findings(view) if line.startswith("Ambiguity")]
        top = view.tables[table].query("beats_chance").set_index("layer")["absolute_score"].idxmax()
        assert f"a layer at chance: {number(level[top])}" in sentence


def test_a_trace_states_one_level_everywhere(traced_run):
    """Every figure of a metric by layer, the strips and the key numbers against `routing_layers`."""
    view = routing_views(load_trace(traced_run))[-1]
    compared = 0
    for spec in ROUTING:
        if not (spec.name.endswith("_by_layer") and spec.can_draw(view.tables)):
            continue
        for metric, part in spec.rows(view.tables).items():
            rows = values_of(view.tables, metric).set_index("layer")
            if rows["chance"].isna().all():
                continue
            page = spec.page({metric: part}, spec.described)
            line = next(trace for trace in page.traces if (trace.get("line") or {}).get("dash") == "dash")
            assert list(line["x"]) == rows.index.tolist()
            np.testing.assert_allclose(line["y"], rows["chance"], err_msg=metric)
            compared += 1
    assert compared >= 20
    for strip in traced_run.verb.strips(traced_run):
        if strip.view == view.label:
            rows = values_of(view.tables, strip.name)
            assert strip.frame["chance"].tolist() == rows["chance"].tolist()
    metrics = {"load CV": "cv", "Busiest": "max_over_mean", "expert; token": "token_information"}
    for key in traced_run.verb.summary(traced_run).key_numbers:
        for words, metric in metrics.items():
            if words in key.name:
                rows = values_of(view.tables, metric)
                assert key.chance in rows["extreme_chance"].tolist(), "of the most extreme layer"
                assert key.chance >= rows["chance"].min()
