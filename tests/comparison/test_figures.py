"""The merge chart and the drift figures: numbers from the tables, chance always drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.comparison.figures import DISTANCES
from moescope.comparison.verb import VERB
from moescope.plotting.style import GREY

PUBLISHED = {"base_to_ift": (0.05, 0.998), "m_smoe": (1.39, 0.0), "m_smoe_permuted": (1.36, 0.02)}


def layers_table(
    series: dict[str, tuple[float, float]], layers: int = 4, matrices: tuple[str, ...] = ("gate",)
) -> pd.DataFrame:
    """geometry_layers of series whose relative L2 and R are given, rising by 0.01 per layer."""
    rows = [
        {"series": name, "layer": layer, "matrix": matrix, "relative_l2_mean": l2 + 0.01 * layer}
        | {"relative_l2_low": l2 + 0.01 * layer - 0.02, "relative_l2_high": l2 + 0.01 * layer + 0.03}
        | {"sv_alignment_mean": r, "sv_alignment_low": r - 0.01, "sv_alignment_high": r + 0.01}
        | {"null_l2": 2**0.5, "null_l2_matched": 1.38, "null_sv_matched": 0.04}
        | ({"matched": True, "matched_l2": 1.38, "matched_sv": 0.04} if name.endswith("_permuted") else {})
        for name, (l2, r) in series.items()
        for layer in range(layers)
        for matrix in matrices
    ]
    return pd.DataFrame(rows).reindex(columns=list(VERB.tables["geometry_layers"].columns))


def chart(table: pd.DataFrame, page: str = "gate"):
    drawn = DISTANCES[0].draw({"geometry_layers": table})
    PlotlyFigure({"data": drawn.data, "layout": drawn.layout})
    if drawn.slider is None:
        return drawn.data
    start = drawn.slider.values.index(page) * drawn.slider.per_value
    return drawn.data[start : start + drawn.slider.per_value]


def lines_of(traces, dash: str) -> dict[str, dict]:
    return {
        trace["name"]: trace
        for trace in traces
        if trace["mode"] == "lines+markers" and trace["line"]["dash"] == dash
    }


def test_solid_is_r_dashed_is_l2_and_a_series_has_one_colour_and_one_name_in_the_legend():
    table = layers_table(PUBLISHED)
    traces = chart(table)
    solid, dashed = lines_of(traces, "solid"), lines_of(traces, "dash")
    assert list(solid) == list(dashed) == sorted(PUBLISHED)
    assert len({trace["line"]["color"] for trace in solid.values()}) == 3
    for name, rows in table.groupby("series"):
        np.testing.assert_array_equal(solid[name]["y"], rows["sv_alignment_mean"])
        np.testing.assert_array_equal(dashed[name]["y"], rows["relative_l2_mean"])
        np.testing.assert_array_equal(solid[name]["x"], rows["layer"])
        assert solid[name]["line"]["color"] == dashed[name]["line"]["color"]
    shown = [trace["name"] for trace in traces if trace.get("showlegend", True)]
    assert shown == [*sorted(PUBLISHED), "unrelated experts", "matched rotated experts"]


def levels(traces) -> dict[str, list[float]]:
    """Dash -> level of every grey line."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        if trace.get("line", {}).get("color") == GREY and trace["mode"] == "lines":
            found.setdefault(trace["line"]["dash"], []).append(round(float(trace["y"][0]), 6))
    return found


def test_unrelated_experts_are_always_drawn_and_matched_rotated_ones_where_a_series_is_matched():
    unrelated = [0.0, round(2**0.5, 6)]
    assert levels(chart(layers_table(PUBLISHED))) == {"dash": unrelated, "dot": [0.04, 1.38]}
    assert levels(chart(layers_table({"base_to_ift": (0.05, 0.998)}))) == {"dash": unrelated}


def test_without_r_the_chart_still_draws_l2():
    table = layers_table({"base_to_ift": (0.05, 0.998)}).assign(sv_alignment_mean=np.nan)
    (line,) = lines_of(chart(table), "solid").values()
    np.testing.assert_array_equal(line["y"], table["relative_l2_mean"])


def test_a_page_per_matrix_and_the_earlier_figures_open_theirs():
    table = layers_table(PUBLISHED, matrices=("gate", "down", "router"))
    drawn = DISTANCES[0].draw({"geometry_layers": table})
    assert drawn.slider.values == ["down", "gate", "router"]
    assert drawn.slider.start == 1
    for name in ("gate", "up", "down"):
        spec = VERB.figure(f"expert_distance_{name}")
        assert (spec.name, spec.opens) == ("expert_distance", name)
    assert VERB.figure("router_cosines").opens == "router"
