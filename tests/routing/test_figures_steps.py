"""Figures of router diagnostics: references from the table, captions from the numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.plotting.style import GREY, Figure, Tables
from moescope.routing.figures_steps import (
    DIAGNOSTIC_PANELS,
    MIDDLE_LAYER,
    last_value,
    legend,
    router_gradient_by_step,
    split_diagnostics,
)
from moescope.routing.metrics import DIAGNOSTICS

BY_METRIC = {panel.metric: panel for panel in DIAGNOSTIC_PANELS}


def diagnosed(
    metric: str, values: list[float], chance: float = 0.5, collapse: float = np.nan
) -> pd.DataFrame:
    """Two layers, the second a tenth above the first, at steps 10, 20, ..."""
    return pd.DataFrame(
        [
            {
                "step": 10 * at + 10,
                "layer": layer,
                "domain": "",
                "metric": metric,
                "value": value * (1 + layer / 10),
                "chance": chance,
                "collapse": collapse,
            }
            for at, value in enumerate(values)
            for layer in (0, 1)
        ]
    )


def drawn(metric: str, tables: Tables) -> Figure:
    figure = BY_METRIC[metric].draw(tables)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    return figure


def grey(figure: Figure) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["y"]) for trace in figure.data if trace["line"]["color"] == GREY}


def test_every_diagnostic_of_the_glossary_has_a_panel():
    assert list(BY_METRIC) == list(DIAGNOSTICS)


@pytest.mark.parametrize("metric", list(DIAGNOSTICS))
def test_a_diagnostic_is_one_line_per_layer_with_its_chance_level(metric):
    figure = drawn(metric, {"routing_layers": diagnosed(metric, [0.8, 0.4], 0.5, 1.0)})
    lines = [list(trace["y"]) for trace in figure.data if trace["line"]["color"] != GREY]
    np.testing.assert_allclose(lines, [[0.8, 0.4], [0.88, 0.44]])
    assert grey(figure)[legend(BY_METRIC[metric].chance)] == [0.5, 0.5]
    assert "0.84 (step 10) to 0.42 (step 20); 0.5" in figure.caption
    assert figure.columns[0] == metric


def test_captions_quote_changing_references_at_the_last_step():
    rows = diagnosed("column_error", [0.8, 0.4], 2.0, 7.0)
    rows.loc[rows["step"] == 20, "chance"] = 3.0
    figure = drawn("column_error", {"routing_layers": rows})
    assert figure.caption.endswith("; 3 without Sinkhorn, 7 when one expert has all.")
    assert grey(figure) == {"without Sinkhorn": [2.0, 3.0]}


def test_what_the_bias_is_compared_with_is_drawn_too():
    figure = drawn("bias_spread", {"routing_layers": diagnosed("bias_spread", [0.01, 0.02], 0.0, 0.2)})
    assert grey(figure) == {"even scores": [0.0, 0.0], "token's own scores": [0.2, 0.2]}


def test_random_keys_have_their_spread_where_it_is_known():
    rows = diagnosed("key_cosine", [0.1, 0.4], 0.0, 1.0)
    for unknown in (rows, rows.assign(chance_spread=float("nan"))):
        assert "; 0 for random keys, 1 when" in drawn("key_cosine", {"routing_layers": unknown}).caption
    figure = drawn("key_cosine", {"routing_layers": rows.assign(chance_spread=0.05)})
    assert "; 0 ± 0.05 for random keys, 1 when" in figure.caption
    assert [list(trace["y"]) for trace in figure.data[-2:]] == [
        pytest.approx([0.1] * 2),
        pytest.approx([-0.1] * 2),
    ]


def test_a_diagnostic_that_stays_at_its_chance_level_is_a_sentence_and_no_figure():
    still = diagnosed("key_strength", [1.0, 1.0], 1.0)
    still["value"] = 1.0
    tables = {"routing_layers": pd.concat([still, diagnosed("key_cosine", [0.1, 0.2], 0.0)])}
    constant, varying = split_diagnostics(tables)
    assert [panel.metric for panel in constant] == ["key_strength"]
    assert [panel.metric for panel in varying] == ["key_cosine"]
    assert last_value(constant[0], tables) == "key strength 1 (1 before the decay)"


def test_a_single_step_is_no_course():
    assert split_diagnostics({"routing_layers": diagnosed("bias_spread", [0.1], 0.0)})[1] == []


def test_usage_of_some_is_the_middle_layer_s_beside_random_routing():
    rows = pd.DataFrame(
        [
            {
                "step": step,
                "layer": layer,
                "domain": "",
                "metric": "unused",
                "value": 0.1 * layer + step / 100,
                "chance": 0.02,
                "collapse": 0.75,
            }
            for step in (10, 20)
            for layer in range(4)
        ]
    )
    figure = MIDDLE_LAYER[2].draw({"routing_layers": rows})
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert list(figure.data[0]["y"]) == pytest.approx([1 - 0.3, 1 - 0.4])  # layer 2 of 0 to 3
    assert figure.caption == (
        "Layer 2: 0.7 (step 10) to 0.6 (step 20); 0.98 for random routing, 0.25 at collapse."
    )
    assert grey(figure) == {
        "random routing": pytest.approx([0.98] * 2),
        "collapse": pytest.approx([0.25] * 2),
    }


def gradients(weakest: float = 0.05) -> Tables:
    rows = {
        "step": [10, 10, 20, 20],
        "layer": [0, 1, 0, 1],
        "lm_gradient_norm": [0.1, 0.2, 0.3, weakest],
        "aux_gradient_norm": [0.01, 0.03, 0.02, 0.04],
    }
    return {"router_gradients": pd.DataFrame(rows)}


def test_the_weakest_router_gradient_is_named_with_the_auxiliary_mean():
    figure = router_gradient_by_step(gradients())
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert "layer 1, 0.05; auxiliary loss 0.03" in figure.caption
    assert figure.layout["yaxis"]["type"] == "log"
    assert "type" not in router_gradient_by_step(gradients(0.0)).layout["yaxis"]
