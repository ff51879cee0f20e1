"""The house style: scales name whole layers, and sizes are said as people say them."""

from __future__ import annotations

import math
from itertools import pairwise

import pandas as pd
import pytest

from moescope.plotting.style import (
    SEQUENTIAL,
    base_layout,
    byte_size,
    layer_colorbar,
    layer_colors,
    lines_or_map,
)
from moescope.routing.figures_load import usage_by_rank
from moescope.verb import Figure
from moescope.weights.figures_alignment import align_against_delta


@pytest.mark.parametrize("layers", [range(2), range(11), range(3, 48), [5]])
def test_a_colour_bar_names_whole_layers_at_even_steps_from_the_first(layers):
    marker = layer_colorbar(list(layers))["marker"]
    named = marker["colorbar"]["tickvals"]
    assert set(named) <= set(layers)
    assert named[0] == min(layers)
    assert len({after - before for before, after in pairwise(named)}) <= 1
    assert min(len(layers), 5) <= len(named) <= 8
    assert marker["cmin"] < named[0]  # so that the last name is clear of the title
    assert marker["cmax"] > named[-1]


def test_a_colour_bar_has_every_end_layer_in_its_own_colour():
    marker, colors = layer_colorbar(range(12))["marker"], layer_colors(range(12))
    places = {color: place for place, color in marker["colorscale"][1:-1]}
    for layer in (0, 11):
        assert places[colors[layer]] == pytest.approx(
            (layer - marker["cmin"]) / (marker["cmax"] - marker["cmin"])
        )
    assert [marker["colorscale"][0][1], marker["colorscale"][-1][1]] == [SEQUENTIAL[0], SEQUENTIAL[-1]]


@pytest.mark.parametrize(("layers", "legend"), [(2, True), (10, True), (11, False)])
def test_few_layers_are_named_in_a_legend_and_many_by_a_colour_bar(layers: int, legend: bool):
    rows = [
        {
            "layer": layer,
            "expert": expert,
            "k": 1,
            "align": 0.1 * expert + 0.01 * layer,
            "delta_vs_shuffle": expert - 1.0,
        }
        for layer in range(layers)
        for expert in range(3)
    ]
    tables = {
        "alignment": pd.DataFrame(rows),
        "alignment_layers": pd.DataFrame({"k": [1], "degenerate": [False]}),
    }
    figure = align_against_delta(tables)
    assert [trace["name"] for trace in figure.data if trace.get("showlegend")] == [
        f"layer {at}" for at in range(layers)
    ] * legend
    assert any("colorbar" in trace.get("marker", {}) for trace in figure.data) != legend
    assert (
        sum(len(trace["x"]) for trace in figure.data if trace.get("mode") == "markers" and "name" in trace)
        == 3 * layers
    )


@pytest.mark.parametrize(("experts", "every"), [(3, 1), (10, 1), (64, None)])
def test_experts_by_load_are_counted_in_whole_ones(experts: int, every: int | None):
    load = pd.DataFrame({"layer": 0, "expert": range(experts), "tokens": range(1, experts + 1)})
    rows = pd.DataFrame({"layer": [0], "domain": "", "tokens": 9})
    assert usage_by_rank({"load": load, "routing_layers": rows}).layout["xaxis"].get("dtick") == every


@pytest.mark.parametrize(
    ("low", "reference", "middle"), [(-1.0, 0.0, True), (0.0, 0.0, False), (-1.0, 0.5, False)]
)
def test_a_map_of_differences_diverges_from_its_reference_at_zero(low, reference, middle):
    lines = [{"mode": "lines", "meta": {"layer": layer}, "x": [1, 2], "y": [low, 0.4]} for layer in range(13)]
    level = {"mode": "lines", "name": "chance", "x": [1, 2], "y": [reference] * 2}
    figure = Figure("f", "t", "c", (), [*lines, level], base_layout("k", "difference"))
    (trace,) = lines_or_map(figure).data
    assert ((trace.get("zmin"), trace.get("zmax")) == (-1, 1)) is middle


def test_a_ceiling_does_not_stretch_the_scale_of_a_map():
    lines = [
        {"mode": "lines", "meta": {"layer": layer}, "x": [1, 2], "y": [-0.2, 0.4]} for layer in range(13)
    ]
    levels = [
        {"mode": "lines", "name": name, "x": [1, 2], "y": [value] * 2}
        for name, value in (("ceiling", 11.0), ("chance", 0.0))
    ]
    figure = Figure("f", "t", "c", (), [*lines, *levels], base_layout("k", "mean z"))
    (trace,) = lines_or_map(figure).data
    assert (trace["zmin"], trace["zmax"]) == (-0.4, 0.4)
    assert trace["z"].max() == 11


@pytest.mark.parametrize("count", [math.inf, -math.inf, math.nan])
def test_a_size_that_is_no_number_is_undefined(count: float):
    assert byte_size(count) == "undefined"
