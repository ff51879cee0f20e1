"""What routers say of themselves, drawn.

References from the table, titles from the numbers, nothing drawn that never moved.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.plotting.style import GREY, Figure, Tables
from moescope.routing.figures_diagnostics import PANELS, in_words, legend, told_and_drawn
from moescope.routing.figures_monitor import USAGE_BY_STEP
from moescope.routing.metrics import DIAGNOSTICS

BY_METRIC = {panel.metric: panel for panel in PANELS}


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


def test_every_note_of_the_glossary_has_a_panel():
    assert list(BY_METRIC) == list(DIAGNOSTICS)


@pytest.mark.parametrize("metric", list(DIAGNOSTICS))
def test_a_note_is_a_line_a_layer_beside_its_reference(metric):
    figure = drawn(metric, {"routing_layers": diagnosed(metric, [0.8, 0.4], 0.5, 1.0)})
    lines = [list(trace["y"]) for trace in figure.data if trace["line"]["color"] != GREY]
    np.testing.assert_allclose(lines, [[0.8, 0.4], [0.88, 0.44]])
    assert grey(figure)[legend(BY_METRIC[metric].chance)] == [0.5, 0.5]
    assert "goes from 0.84 (step 10) to 0.42 (step 20); 0.5" in figure.title
    assert figure.columns[0] == metric


def test_references_that_change_are_told_as_they_are_at_the_last_step():
    rows = diagnosed("column_error", [0.8, 0.4], 2.0, 7.0)
    rows.loc[rows["step"] == 20, "chance"] = 3.0
    figure = drawn("column_error", {"routing_layers": rows})
    assert figure.title.endswith("; 3 without Sinkhorn, 7 when one expert has all")
    assert grey(figure) == {"without Sinkhorn": [2.0, 3.0]}


def test_what_the_bias_is_compared_with_is_drawn_too():
    figure = drawn("bias_spread", {"routing_layers": diagnosed("bias_spread", [0.01, 0.02], 0.0, 0.2)})
    assert grey(figure) == {"even scores": [0.0, 0.0], "a token's own scores": [0.2, 0.2]}


def test_random_keys_have_their_spread_where_the_model_s_shape_is_known():
    tables = {"routing_layers": diagnosed("key_cosine", [0.1, 0.4], 0.0, 1.0)}
    assert "; 0 for random keys, 1 when all are one" in drawn("key_cosine", tables).title
    tables["shape"] = pd.DataFrame([{"experts": 5, "d_model": 40}])
    figure = drawn("key_cosine", tables)  # sqrt(2 / (5 x 4 x 40)) = 0.05
    assert "; 0 ± 0.05 for random keys, 1 when all are one" in figure.title
    assert [list(trace["y"]) for trace in figure.data[-2:]] == [
        pytest.approx([0.1] * 2),
        pytest.approx([-0.1] * 2),
    ]
    assert (
        "±"
        not in drawn("key_strength", {**tables, "routing_layers": diagnosed("key_strength", [1, 0.9])}).title
    )


def test_a_note_that_never_leaves_its_reference_is_told_and_not_drawn():
    still = diagnosed("key_strength", [1.0, 1.0], 1.0)
    still["value"] = 1.0
    tables = {"routing_layers": pd.concat([still, diagnosed("key_cosine", [0.1, 0.2], 0.0)])}
    told, moving = told_and_drawn(tables)
    assert [panel.metric for panel in told] == ["key_strength"]
    assert [panel.metric for panel in moving] == ["key_cosine"]
    assert in_words(told[0], tables) == "key strength 1 (1 before the decay)"


def test_a_single_step_is_no_course():
    assert told_and_drawn({"routing_layers": diagnosed("bias_spread", [0.1], 0.0)})[1] == []


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
    figure = USAGE_BY_STEP[2].draw({"routing_layers": rows})
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert list(figure.data[0]["y"]) == pytest.approx([1 - 0.3, 1 - 0.4])  # layer 2 of 0 to 3
    assert figure.title == (
        "Share of experts used in layer 2, the middle one, goes from 0.7 (step 10) to 0.6 (step "
        "20); 0.98 with random routing, 0.25 at collapse"
    )
    assert grey(figure) == {
        "random routing": pytest.approx([0.98] * 2),
        "collapse": pytest.approx([0.25] * 2),
    }
