"""Figures of SoME's keys: drawn, validated, with what chance gives beside them."""

from __future__ import annotations

import pandas as pd
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.lab.figures_keys import key_places, usage_by_decade

TABLES = {
    "key_histogram": pd.DataFrame(
        {"left": [0, 1, 10], "right": [1, 10, 100], "experts": [1, 5, 2], "expected": [0.0, 1.5, 6.5]}
    ),
    "key_map": pd.DataFrame(
        {"expert": [0, 1], "x": [0.0, 1.0], "y": [0.5, -0.5], "tokens": [3, 9], "strength": [1.0, 0.9]}
    ),
    "key_shares": pd.DataFrame([{"shown": 0.8, "by_chance": 0.3}]),
}


def test_usage_stands_beside_random_routing():
    figure = usage_by_decade(TABLES)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert (
        figure.title
        == "Most experts, 5 of 8, have 1 to 10 tokens; with random routing most would have 10 to 100"
    )
    assert list(figure.data[1]["y"]) == [0.0, 1.5, 6.5]


def test_the_map_says_what_random_keys_would_show():
    figure = key_places(TABLES)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert figure.title == "Two axes show 80 % of how keys differ; of random keys they show 30 %"
