"""The expert-distance chart and the drift figures: numbers from the tables, chance always drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.comparison.figures import DRIFT, EXPERT_DISTANCE
from moescope.comparison.tables import TABLES
from moescope.plotting.style import GREY


def layers_table(
    series: dict[str, tuple[float, float]], layers: int = 4, matrices: tuple[str, ...] = ("gate",)
) -> pd.DataFrame:
    """geometry_layers of series whose relative L2 and R are given, rising by 0.01 per layer."""
    return pd.DataFrame(
        [
            {
                "series": name,
                "layer": layer,
                "matrix": matrix,
                "relative_l2_mean": l2 + 0.01 * layer,
                "relative_l2_low": l2 + 0.01 * layer - 0.02,
                "relative_l2_high": l2 + 0.01 * layer + 0.03,
                "sv_alignment_mean": r,
                "sv_alignment_low": r - 0.01,
                "sv_alignment_high": r + 0.01,
                "null_l2": 2**0.5,
                "null_l2_matched": 1.38 if name != "x_unsigned" else 1.39,
                "null_sv_matched": 0.04 if name != "x_unsigned" else 0.03,
            }
            for name, (l2, r) in series.items()
            for layer in range(layers)
            for matrix in matrices
        ]
    )


PUBLISHED = {"base_to_ift": (0.05, 0.998), "m_smoe": (1.39, 0.0), "m_smoe_permuted": (1.36, 0.02)}


def chart(table: pd.DataFrame, matrix: str = "gate"):
    spec = next(spec for spec in EXPERT_DISTANCE if spec.name == f"expert_distance_{matrix}")
    return spec.draw({"geometry_layers": table})


def drift_table() -> pd.DataFrame:
    rows = []
    for matrix in ("gate", "up", "down", "router"):
        for layer in (0, 3):
            for expert in range(3):
                far = (layer, expert) == (3, 1)
                l2 = 0.5 if far else 0.1
                rows.append(
                    {
                        "series": "base_to_ift",
                        "layer": layer,
                        "matrix": matrix,
                        "expert_a": expert,
                        "expert_b": expert,
                        "relative_l2": l2,
                        "cosine": 1 - l2**2 / 2,
                        "norm_ratio": 1.2 if far else 1.0,
                        "sv_alignment": np.nan if matrix == "router" else 0.9,
                        "matched": False,
                    }
                )
    return pd.DataFrame(rows)


def lines_of(figure, color: str, dash: str) -> list[dict]:
    return [
        trace
        for trace in figure.data
        if trace["mode"] != "lines"
        and trace["line"].get("color") == color
        and trace["line"].get("dash") == dash
    ]


def test_solid_is_r_dashed_is_l2_and_a_series_has_one_colour():
    table = layers_table(PUBLISHED)
    figure = chart(table)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    entries = [trace for trace in figure.data if trace.get("legend") == "legend2"]
    assert [entry["name"] for entry in entries] == list(PUBLISHED)
    assert len({entry["line"]["color"] for entry in entries}) == 3
    for entry in entries:
        rows = table[table["series"] == entry["name"]]
        (solid,) = lines_of(figure, entry["line"]["color"], "solid")
        (dashed,) = lines_of(figure, entry["line"]["color"], "dash")
        np.testing.assert_array_equal(solid["y"], rows["sv_alignment_mean"])
        np.testing.assert_array_equal(dashed["y"], rows["relative_l2_mean"])
        np.testing.assert_array_equal(solid["x"], rows["layer"])


def test_the_other_legend_names_the_quantities_and_what_grey_means():
    figure = chart(layers_table(PUBLISHED))
    named = [trace["name"] for trace in figure.data if trace.get("legend") == "legend"]
    assert named == ["unrelated experts: R 0, relative L2 √2", "matched rotated experts"]
    assert figure.layout["legend2"]["title"]["text"] == "series"
    shown = [trace for trace in figure.data if trace.get("showlegend", True)]
    assert len(shown) == 2 + 3


def filled(figure, rgb: str) -> list[tuple[list[float], list[float]]]:
    """The bands of a colour: (lower edge, upper edge)."""
    return [
        (list(below["y"]), list(above["y"]))
        for below, above in zip(figure.data, figure.data[1:], strict=False)
        if above.get("fill") == "tonexty" and above["fillcolor"].startswith(f"rgba({rgb}")
    ]


GREY_RGB = ",".join(str(int(GREY[place : place + 2], 16)) for place in (1, 3, 5))


def test_chance_is_always_drawn_unrelated_dotted_and_matched_random_shaded():
    figure = chart(layers_table({"x_permuted": (0.05, 0.998), "x_unsigned": (1.39, 0.03)}))
    dotted = [
        trace
        for trace in figure.data
        if trace["line"].get("dash") == "dot" and trace.get("showlegend") is False
    ]
    assert sorted(round(float(trace["y"][0]), 6) for trace in dotted) == [0, round(2**0.5, 6)]
    bands = filled(figure, GREY_RGB)
    assert len(bands) == 2
    np.testing.assert_allclose(bands[0], [[1.38] * 4, [2**0.5] * 4])  # the widest of the series' own
    np.testing.assert_allclose(bands[1], [[0] * 4, [0.04] * 4])
    assert filled(chart(layers_table({"base_to_ift": (0.05, 0.998)})), GREY_RGB) == []  # nothing is matched


def test_r_and_l2_have_a_panel_each():
    figure = chart(layers_table({"x_permuted": (0.05, 0.998)}))
    panels = {trace["name"]: trace.get("yaxis", "y") for trace in figure.data if trace["mode"] != "lines"}
    assert panels == {"x_permuted, R": "y", "x_permuted, relative L2": "y2"}
    assert figure.layout["yaxis2"]["domain"][1] < figure.layout["yaxis"]["domain"][0]
    below = [trace.get("yaxis") for trace in figure.data if trace.get("fill") == "tonexty"]
    assert sorted(map(str, below)) == ["None", "None", "y2", "y2"]


def test_intervals_are_shaded_in_the_series_colour_and_absent_ones_are_not():
    table = layers_table({"base_to_ift": (0.05, 0.998)})
    figure = chart(table)
    bands = filled(figure, "0,114,178")
    assert len(bands) == 2
    np.testing.assert_allclose(bands[1][0], table["relative_l2_low"])
    np.testing.assert_allclose(bands[1][1], table["relative_l2_high"])
    for column in ("relative_l2_low", "relative_l2_high", "sv_alignment_low", "sv_alignment_high"):
        table[column] = np.nan
    assert filled(chart(table), "0,114,178") == []


def test_captions_state_the_range_of_one_series_and_the_means_of_several():
    one = chart(layers_table({"base_to_ift": (0.05, 0.998)})).caption
    for words in ("0.05 (layer 0) to 0.08 (layer 3)", "R 0.998 ", "1.41 and 0)"):
        assert words in one
    several = chart(layers_table(PUBLISHED)).caption
    assert "base_to_ift 0.065 and 0.998, m_smoe 1.41 and 0, m_smoe_permuted 1.38 and 0.02" in several


def test_without_r_the_chart_still_draws_l2():
    table = layers_table({"base_to_ift": (0.05, 0.998)}).assign(
        sv_alignment_mean=np.nan, sv_alignment_low=np.nan, sv_alignment_high=np.nan
    )
    figure = chart(table)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert "R skipped" in figure.caption


def test_one_panel_per_projection_of_the_table():
    table = layers_table(PUBLISHED, matrices=("gate", "down", "router"))
    names = [spec.name for spec in EXPERT_DISTANCE if spec.can_draw({"geometry_layers": table})]
    assert names == ["expert_distance_gate", "expert_distance_down"]


@pytest.mark.parametrize("spec", DRIFT, ids=lambda spec: spec.name)
def test_drift_figures_are_valid_and_name_the_largest_change_and_chance(spec):
    figure = spec.draw({"geometry": drift_table()})
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert set(figure.columns) <= set(TABLES["geometry"].glossary)
    expected = {
        "drift_heatmap": (
            "layer 3, expert 1, relative L2 0.5",
            "mean of all 0.167",
            "unrelated experts: 1.41",
        ),
        "router_cosines": ("layer 3, expert 1: 0.875", "median 0.995", "unrelated rows: 0"),
        "norm_ratios": ("gate 1 to 1.2", "router 1 to 1.2", "unchanged: 1"),
    }[spec.name]
    for words in expected:
        assert words in figure.caption


def test_the_heatmap_slides_through_matrices_and_holds_every_expert():
    figure = DRIFT[0].draw({"geometry": drift_table()})
    assert figure.slider.values == ["gate", "up", "down", "router"]
    assert len(figure.data) == len(figure.slider.captions) == 4
    assert figure.data[3]["z"][1, 1] == 0.5
    assert figure.data[0]["z"].shape == (2, 3)
    assert figure.data[0]["y"] == ["0", "3"]
    assert "router row" in figure.slider.captions[3]


def test_whiskers_of_norm_ratios_stand_side_by_side():
    figure = DRIFT[2].draw({"geometry": drift_table()})
    places = np.array([trace["x"] for trace in figure.data if "error_y" in trace])
    layers = np.array([trace["customdata"] for trace in figure.data if "error_y" in trace])
    assert np.abs(places - layers).max() < 0.5
    assert all(len(set(column)) == len(column) > 1 for column in places.T)


def test_matched_rows_do_not_enter_the_drift():
    table = drift_table()
    matched = table[table["matrix"] != "router"].assign(
        series="base_to_ift_permuted", matched=True, relative_l2=0.0
    )
    figure = DRIFT[0].draw({"geometry": pd.concat([table, matched], ignore_index=True)})
    assert figure.data[0]["z"][1, 1] == 0.5
