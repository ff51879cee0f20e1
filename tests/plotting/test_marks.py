"""Marks: what they take from columns, and the rule that colour starts where chance ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from moescope.errors import BadInput
from moescope.plotting.marks import (
    QUANTITY,
    Bars,
    Distribution,
    Dots,
    Grid,
    Lines,
    Mark,
    Matrix,
    Scatter,
    define_figures,
)
from moescope.plotting.style import CATEGORICAL, GREY
from moescope.tables import Column, Table, define_tables

KEYS = {
    "step": Column("int", ""),
    "k": Column("int", ""),
    "policy": Column("text", "", names={"b": "B", "a": "A"}),
}
RATIO = {"chance": "one", "chance_label": "even share", "noise": "sd", "scale": "ratio", "few": "few"}
TABLES = define_tables(
    {
        **KEYS,
        "times": Column("float", "", label="load", **RATIO),
        "z": Column("float", "", chance=0, noise=1),
        "share": Column(
            "float", "", unit="of all", least=0, most=1, chance="level", interval=("low", "high")
        ),
        "plain": Column("float", "", scale="log", better="higher"),
        **{
            name: Column("float", "")
            for name in ("one", "sd", "level", "low", "high", "left", "right", "density")
        },
        "few": Column("bool", ""),
        "marked": Column("bool", ""),
        "metric": Column("text", ""),
        "value": Column("float", ""),
        "place_a": Column("int", ""),
        "place_b": Column("int", ""),
    },
    Table(
        "cells",
        "",
        ("layer", "expert"),
        ("times", "z", "one", "sd", "few", "marked", "share", "level", "plain"),
    ),
    Table(
        "curves",
        "",
        ("layer", "k", "policy"),
        ("share", "level", "low", "high", "plain", "z"),
        whole={"layer": None},
    ),
    Table(
        "long",
        "",
        ("layer", "metric"),
        ("value", "level"),
        terms={"cv": Column("float", "", label="CV", chance="level")},
    ),
    Table("pairs", "", ("layer", "expert_a", "expert_b"), ("z", "place_a", "place_b")),
    Table("nulls", "", ("layer",), ("left", "right", "density", "z")),
)


def figure(mark: Mark, frame: pd.DataFrame):
    (bound,) = define_figures(TABLES, mark)
    assert bound.can_draw({mark.table: frame})
    return bound.draw({mark.table: frame})


@pytest.fixture
def cells():
    """24 layers of 64 experts whose loads are binomial: independent tokens, even routing."""
    draws = np.random.default_rng(0)
    frame = pd.MultiIndex.from_product([range(24), range(64)], names=["layer", "expert"]).to_frame(
        index=False
    )
    even, share = 8_000 * 2 / 64, 2 / 64
    loads = draws.binomial(8_000, share, len(frame)) / even
    spread = np.sqrt(even * (1 - share)) / even
    return frame.assign(
        times=loads, one=1.0, sd=spread, few=frame["layer"] == 23, z=draws.standard_normal(len(frame))
    )


@pytest.mark.parametrize("column", ["times", "z"])
def test_of_random_cells_one_in_twenty_is_coloured_and_faintly(cells, column):
    drawn = figure(Grid("map", "cells", z=column), cells)
    z = drawn.data[0]["z"]
    known = np.isfinite(z)
    if column == "times":
        assert not known[23].any()  # too little data: hatched
        assert len(drawn.data[1]["x"]) == 64
    coloured = (z[known] != 0).mean()
    assert stats.binom(known.sum(), 0.05).cdf(round(coloured * known.sum())) < 0.999
    assert coloured <= 0.06
    assert np.nanmax(np.abs(z)) < 0.8 * drawn.data[0]["zmax"]
    assert f"{known.sum():,} beyond chance (expected: {0.05 * known.sum():.3g})" in drawn.caption


def test_all_cells_of_a_planted_expert_are_coloured(cells):
    planted = cells.assign(times=np.where(cells["expert"] == 7, 3.0, cells["times"]))
    z = figure(Grid("map", "cells", z="times"), planted).data[0]["z"][:23]
    assert (z[:, 7] > 0).all()
    assert (np.delete(z, 7, axis=1) != 0).mean() <= 0.06


def test_a_ratio_is_coloured_from_the_end_of_its_own_interval_in_doublings(cells):
    rows = cells[cells["layer"] < 3].assign(sd=0.2)
    rows["times"] = rows["layer"].map({0: 4.0, 1: 1.25, 2: 1 + 0.99 * 1.96 * 0.2})
    z = figure(Grid("map", "cells", z="times"), rows).data[0]["z"]
    assert z[0] == pytest.approx([2 - np.log2(1 + 1.96 * 0.2)] * 64)
    assert not z[1:].any()


def test_values_stand_beside_the_colours_and_flags_are_marked(cells):
    frame = cells[cells["layer"] < 2].assign(marked=lambda f: f["expert"] == 5)
    drawn = figure(Grid("map", "cells", z="times", ring="marked"), frame)
    assert drawn.data[0]["customdata"][1, 3] == frame.set_index(["layer", "expert"]).loc[(1, 3), "times"]
    assert (drawn.data[1]["name"], drawn.data[1]["x"]) == ("marked", ["5", "5"])


def test_a_ring_lies_beside_the_digits_of_its_cell_where_there_are_some(cells):
    frame = cells.assign(marked=lambda f: f["expert"] == 5)
    few = figure(Grid("map", "cells", z="z", ring="marked"), frame[frame["expert"] < 8].query("layer < 4"))
    many = figure(Grid("map", "cells", z="z", ring="marked"), frame)
    assert "text" in few.data[0]
    assert few.data[1]["marker"]["standoff"] > few.data[1]["marker"]["size"] + 10
    assert "standoff" not in many.data[-1]["marker"]


@pytest.fixture
def curves():
    rows = [
        {
            "layer": layer,
            "k": k,
            "policy": policy,
            "share": 0.1 * k,
            "level": 0.05 * k,
            "low": 0.08 * k,
            "high": 0.12 * k,
        }
        for layer in (*range(3), None)
        for k in (1, 2, 4, 8)
        for policy in "ab"
    ]
    return pd.DataFrame(rows).assign(plain=lambda f: 10.0 ** f["k"], z=1.0)


def test_lines_take_label_chance_bounds_interval_and_names_from_the_column(curves):
    drawn = figure(Lines("one", "curves", y="share", x="k", by="policy"), curves)
    assert [trace["name"] for trace in drawn.data if trace["name"]] == [
        "B",
        "A",
        "chance",
    ]  # in the order of names
    assert drawn.layout["yaxis"]["title"]["text"] == "share (of all)"
    assert drawn.layout["yaxis"]["range"] == pytest.approx([-0.04, 1.04])
    line = next(trace for trace in drawn.data if trace["name"] == "A")
    assert line["y"].tolist() == pytest.approx([0.1, 0.2, 0.4, 0.8])  # rows of all layers together
    assert drawn.caption == "Share: 0.1 (A) to 0.8 (A) (chance: 0.05 to 0.4)."


def test_several_columns_of_one_unit_name_it_on_the_axis():
    columns = {
        name: Column("float", "", label=f"{name} loss", unit="nats per token") for name in ("first", "second")
    }
    tables = define_tables(
        {**columns, "third": Column("float", "", label="share")},
        Table("losses", "", ("step",), ("first", "second", "third")),
    )
    frame = pd.DataFrame({"step": [1, 2], "first": [3.0, 2.0], "second": [3.5, 2.5], "third": [0.1, 0.2]})
    titles = {}
    for names in (("first", "second"), ("first", "third")):
        (mark,) = define_figures(tables, Lines("losses", "losses", y=names, x="step"))
        titles[names] = mark.draw({"losses": frame}).layout["yaxis"]["title"]["text"]
    assert list(titles.values()) == ["loss (nats per token)", "first loss, share"]


def test_stacked_lines_are_areas_of_any_number_without_chance():
    frame = pd.DataFrame(
        [{"layer": n, "k": k, "policy": "a", "plain": n + k} for n in range(14) for k in (1, 2)]
    )
    drawn = figure(Lines("areas", "curves", y="plain", x="k", by="layer", stacked=True), frame)
    assert {(trace["stackgroup"], trace["mode"]) for trace in drawn.data} == {("all", "lines")}
    assert sum(trace["y"] for trace in drawn.data).tolist() == [sum(range(1, 15)), sum(range(2, 16))]
    assert drawn.caption == "At k 2, plain: 2 (layer 0) to 15 (layer 13)."


def test_rows_for_all_together_are_drawn_only_where_their_key_is_on_no_axis(curves):
    drawn = figure(Lines("one", "curves", y="share", by="policy", where="k == 2"), curves)
    line = next(trace for trace in drawn.data if trace["name"] == "A")
    assert line["x"].tolist() == [0, 1, 2]


def test_over_twelve_lines_become_a_grid_with_the_same_values():
    frame = pd.DataFrame(
        [{"layer": n, "k": k, "policy": "a", "plain": n + k} for n in range(14) for k in (1, 2)]
    )
    mark = Lines("many", "curves", y="plain", x="k", by="layer")
    assert [trace["type"] for trace in figure(mark, frame[frame["layer"] < 12]).data] == ["scatter"] * 12
    (grid,) = figure(mark, frame).data
    assert grid["customdata"][13].tolist() == [14, 15]
    np.testing.assert_allclose(grid["z"][13], np.log10([14, 15]))


def test_a_curve_of_one_point_is_not_drawn(curves):
    (mark,) = define_figures(TABLES, Lines("one", "curves", y="share", x="k", by="policy"))
    assert not mark.can_draw({"curves": curves[curves["k"] == 1]})
    assert not mark.can_draw({"curves": curves.assign(share=np.nan)})
    assert not mark.can_draw({})


def test_each_quantity_has_a_page_with_its_own_axis_and_caption(curves):
    mark = Lines(
        "both", "curves", y=("share", "plain"), x="k", by="policy", pages=QUANTITY, was={"old": "plain"}
    )
    drawn = figure(mark, curves)
    slider = drawn.slider
    assert slider.values == ["share", "plain"]
    assert [layout["yaxis"].get("type") for layout in slider.layouts] == [None, "log"]
    assert slider.captions[1].startswith("Plain: 10 ")
    assert len(drawn.data) == 2 * slider.per_value
    assert (
        figure(
            Lines("both", "curves", y=("share", "plain"), x="k", pages=QUANTITY, opens="plain"),
            curves[curves["policy"] == "a"],
        ).slider.start
        == 1
    )


def test_a_figure_opens_with_the_page_furthest_from_chance(cells):
    frame = cells[cells["layer"] < 4].assign(z=lambda f: np.where(f["layer"] == 2, 9, f["z"]))
    drawn = figure(Grid("map", "cells", z="z", y="layer", x="expert", pages="layer"), frame)
    assert drawn.slider.values[drawn.slider.start] == "2"


def test_terms_of_a_long_table_are_columns():
    frame = pd.DataFrame(
        {"layer": [0, 1, 0], "metric": ["cv", "cv", "gini"], "value": [0.1, 0.2, 0.9], "level": 0.05}
    )
    drawn = figure(Lines("cv", "long", y="cv"), frame)
    assert drawn.title == "CV by layer"
    assert drawn.data[0]["y"].tolist() == [0.1, 0.2]
    assert drawn.caption == "CV: 0.1 (layer 0) to 0.2 (layer 1) (chance: 0.05)."


def test_a_pair_fills_both_cells_of_a_matrix_and_related_ones_lie_together():
    n = 40
    rows = [
        {"layer": 0, "expert_a": a, "expert_b": b, "z": a + b, "place_a": n - a, "place_b": n - b}
        for a in range(n)
        for b in range(a + 1, n)
    ]
    (trace,) = figure(Matrix("pairs", "pairs", z="z", order="place_a"), pd.DataFrame(rows)).data
    assert trace["x"] == trace["y"] == [str(n - 1 - place) for place in range(n)]
    values = trace["customdata"]
    assert np.isnan(np.diag(values)).all()
    assert np.array_equal(values, values.T, equal_nan=True)


def test_a_small_matrix_shows_its_values_and_can_be_ordered():
    rows = [
        {"layer": layer, "expert_a": a, "expert_b": b, "z": a + b, "place_a": 5 - a, "place_b": 5 - b}
        for layer in range(2)
        for a in range(5)
        for b in range(a + 1, 5)
    ]
    drawn = figure(Matrix("pairs", "pairs", z="z", order="place_a", pages="layer"), pd.DataFrame(rows))
    assert drawn.data[0]["x"] == ["0", "1", "2", "3", "4"]
    assert drawn.slider.orders == [["4", "3", "2", "1", "0"]] * 2
    assert drawn.data[0]["text"][1] == ["1.00", "", "3.00", "4.00", "5.00"]


def test_a_small_figure_is_low_and_has_neither_digits_nor_a_title_of_its_scale(cells):
    drawn = figure(Grid("map", "cells", z="z", small=True), cells[cells["expert"] < 8])
    assert drawn.height < 300
    assert "text" not in drawn.data[0]
    assert drawn.data[0]["colorbar"]["title"]["text"] == ""


def test_a_large_map_is_rounded_to_the_digits_it_shows(cells):
    trace = figure(Grid("map", "cells", z="z"), cells).data[0]
    values = cells.pivot(index="layer", columns="expert", values="z").to_numpy()[:23]
    np.testing.assert_allclose(trace["customdata"][:23], values, rtol=5e-4)
    assert len(np.unique(trace["z"][np.isfinite(trace["z"])])) <= 251
    assert trace["meta"]["noise"] == 1


def test_a_figure_opens_with_the_page_of_its_best_rows(cells):
    columns = {"best": Column("bool", ""), "z": Column("float", "", chance=0, noise=1)}
    tables = define_tables(columns, Table("cells", "", ("layer", "expert"), ("z", "best")))
    (mark,) = define_figures(tables, Bars("bars", "cells", y="z", x="expert", pages="layer"))
    drawn = mark.draw({"cells": cells[["layer", "expert", "z"]].assign(best=cells["layer"] == 5)})
    assert drawn.slider.values[drawn.slider.start] == "5"


def test_nothing_lies_below_an_interval_that_reaches_zero(cells):
    rows = cells[cells["layer"] < 2].assign(sd=0.6, times=lambda f: np.where(f["layer"] == 0, 1e-9, 4.0))
    drawn = figure(Grid("map", "cells", z="times"), rows)
    assert not drawn.data[0]["z"][0].any()
    assert (drawn.data[0]["z"][1] > 0).all()
    assert "64 of 128 beyond chance" in drawn.caption


def test_stacked_columns_are_summed_in_axis_and_caption():
    guided = Column("float", "", label="a", guides={0.7: "high"})
    columns = {"a": guided, "b": Column("float", "")}
    tables = define_tables(columns, Table("parts", "", ("layer",), ("a", "b")))
    (mark,) = define_figures(tables, Bars("parts", "parts", y=("a", "b"), stacked=True))
    drawn = mark.draw({"parts": pd.DataFrame({"layer": [0, 1], "a": [0.1, 0.2], "b": [0.5, 0.3]})})
    assert drawn.layout["yaxis"]["title"]["text"] == "a + b"
    assert drawn.caption == "The sum: 0.5 (layer 1) to 0.6 (layer 0)."
    guide = drawn.data[-1]
    assert (guide["name"], list(guide["y"])) == ("high", [0.7, 0.7])


def test_bars_stack_or_lie_and_mark_chance(curves):
    drawn = figure(Bars("bars", "curves", y="share", x="policy", where="k == 2"), curves)
    bar, tick = drawn.data
    assert (bar["orientation"], bar["y"], bar["x"].tolist()) == ("h", ["A", "B"], [0.2, 0.2])
    assert (tick["marker"]["symbol"], tick["x"].tolist()) == ("line-ns-open", [0.1, 0.1])
    stacked = figure(Bars("bars", "curves", y="share", x="k", by="policy", stacked=True), curves)
    assert stacked.layout["barmode"] == "stack"
    assert stacked.data[-1]["y"].tolist() == pytest.approx([0.1, 0.2, 0.4, 0.8])  # of both bars


def test_dots_are_ordered_by_what_is_better(curves):
    frame = curves[curves["k"] <= 2].assign(plain=lambda f: np.where(f["policy"] == "a", 3.0, 7.0))
    drawn = figure(Dots("dots", "curves", x="plain", y="policy", where="k == 1"), frame)
    assert drawn.layout["yaxis"]["categoryarray"] == ["A", "B"]  # the last is on top


def test_a_histogram_counts_rows_and_a_stored_null_is_a_ridge(cells):
    drawn = figure(Distribution("hist", "cells", x="z"), cells)
    assert drawn.data[0]["y"].sum() == len(cells)
    below = int((cells["z"] <= 0).sum())
    assert drawn.caption == f"{below} of {len(cells)} at or below 0 (chance)."
    edges = np.linspace(0, 1, 11)
    null = pd.DataFrame({"layer": 4, "left": edges[:-1], "right": edges[1:], "density": 1.0, "z": 0.7})
    ridge, at = figure(
        Distribution("null", "nulls", x="z", by="layer", bins=("left", "right", "density")), null
    ).data
    assert (at["x"], ridge["fill"]) == ((0.7,), "toself")


def test_a_histogram_of_a_logarithmic_column_has_four_bins_per_decade_and_one_for_zero(cells):
    values = [0.0] * 5 + [1.0, 3.0, 10.0, 99.0, 100.0]
    frame = cells.iloc[: len(values)].assign(plain=values)
    bars, rug = figure(Distribution("hist", "cells", x="plain"), frame).data
    assert bars["y"].sum() == len(values)
    occupied = {round(float(x), 3): int(y) for x, y in zip(bars["x"], bars["y"], strict=True) if y}
    assert occupied == {-0.125: 5, 0.125: 1, 0.375: 1, 1.125: 1, 1.875: 1, 2.125: 1}
    assert rug["customdata"].tolist() == values
    axis = figure(Distribution("hist", "cells", x="plain"), frame).layout["xaxis"]
    assert dict(zip(axis["tickvals"], axis["ticktext"], strict=True)) == {
        -0.125: "0",
        0: "1",
        1: "10",
        2: "100",
    }


def test_a_value_without_a_word_is_grey_and_named_by_its_column():
    names = {"yes": "confirmed", "": "check"}
    columns = {
        "z": Column("float", ""),
        "verdict": Column("text", "", names=names),
        "name": Column("text", ""),
    }
    tables = define_tables(columns, Table("t", "", ("name",), ("z", "verdict")))
    (mark,) = define_figures(tables, Dots("d", "t", x="z", y="name", by="verdict"))
    frame = pd.DataFrame({"name": ["a", "b"], "z": [1.0, 2.0], "verdict": ["", "yes"]})
    looks = {trace["name"]: trace["marker"]["color"] for trace in mark.draw({"t": frame}).data}
    assert looks == {"check": GREY, "confirmed": CATEGORICAL[0]}


def test_points_have_their_size_and_text(cells):
    frame = cells[cells["layer"] == 0].iloc[:8].assign(plain=2.0)
    (trace, _) = figure(
        Scatter("points", "cells", y="z", x="times", size="plain", label="expert"), frame
    ).data
    assert trace["mode"] == "markers+text"
    assert trace["marker"]["size"] == pytest.approx([11 * 2**0.5] * 8)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (Lines("x", "curves", y="shere"), "column of curves 'shere'; did you mean 'share'"),
        (Lines("x", "curvs", y="share"), "table 'curvs'; did you mean 'curves'"),
        (Grid("x", "cells", z="z", x="exprt"), "'exprt'; did you mean 'expert'"),
        (Grid("x", "cells", z="z", ring="markd"), "'markd'; did you mean 'marked'"),
    ],
)
def test_an_unknown_column_or_table_is_one_line_with_the_nearest_name(mark, words):
    with pytest.raises(BadInput, match=words):
        define_figures(TABLES, mark)


def test_of_several_columns_and_values_colour_says_the_value_and_dash_the_column(curves):
    drawn = figure(Lines("both", "curves", y=("share", "z"), x="k", by="policy"), curves)
    lines = [trace for trace in drawn.data if trace["mode"] == "lines+markers"]
    assert [(trace["name"], trace["line"]["dash"], trace["showlegend"]) for trace in lines] == [
        ("B", "solid", True),
        ("A", "solid", True),
        ("B", "dash", False),
        ("A", "dash", False),
    ]
    colors = [trace["line"]["color"] for trace in lines]
    assert colors[:2] == colors[2:]
    assert drawn.layout["yaxis"]["title"]["text"] == "share (solid), z (dashed)"


def test_the_range_of_values_at_chance_is_a_grey_band(curves):
    meanings = {
        **TABLES["curves"].meanings,
        "plain": Column("float", "", chance="level", chance_range=("low", "high")),
    }
    table = replace(TABLES["curves"], meanings=meanings)
    (mark,) = define_figures({"curves": table}, Lines("one", "curves", y="plain", x="k", by="policy"))
    drawn = mark.draw({"curves": curves.assign(level=5.0, low=4.0, high=7.0)})
    (band,) = [trace for trace in drawn.data if trace.get("fill")]
    assert set(band["y"]) == {4.0, 7.0}
    assert band["fillcolor"].startswith("rgba(138,144,153")


def test_a_row_of_dots_has_its_own_null_interval_and_bound():
    frame = pd.DataFrame({"layer": [0, 1], "z": [5.0, 0.3], "top": [0.9, 0.8]})
    column = Column("float", "", chance=0, noise=1, chance_label="none", most="top", most_label="ceiling")
    tables = define_tables(
        {"z": column, "top": Column("float", "")}, Table("t", "", ("layer",), ("z", "top"))
    )
    (dots,) = define_figures(tables, Dots("d", "t", x="z", y="layer"))
    ticks, bound = dots.draw({"t": frame}).data[1:3]
    assert (ticks["name"], bound["name"]) == ("none, 95 %", "ceiling")
    assert sorted(ticks["x"]) == pytest.approx([-1.96, -1.96, 1.96, 1.96])
    assert dict(zip(bound["y"], bound["x"], strict=True)) == {"0": 0.9, "1": 0.8}


def test_names_on_a_grid_stand_as_the_table_has_them_and_numbers_in_order():
    frame = pd.DataFrame({"layer": [10, 2], "policy": ["b", "a"], "z": [1.0, 2.0]})
    grid = figure(Grid("g", "curves", z="z", x="layer", y="policy"), frame.assign(k=1))
    assert (grid.data[0]["x"], grid.data[0]["y"]) == (["2", "10"], ["B", "A"])


def test_no_effect_without_noise_is_at_chance_and_no_hole():
    frame = pd.DataFrame({"layer": 0, "expert": range(3), "z": [0.0, 4.0, 1.0], "sd": [0.0, 1.0, 1.0]})
    columns = {"z": Column("float", "", chance=0, noise="sd"), "sd": Column("float", "")}
    tables = define_tables(columns, Table("t", "", ("layer", "expert"), ("z", "sd")))
    (grid,) = define_figures(tables, Grid("g", "t", z="z"))
    assert grid.draw({"t": frame}).data[0]["z"].tolist() == [[0.0, pytest.approx(4 - 1.96), 0.0]]


def test_points_of_many_layers_have_a_scale_in_place_of_a_legend():
    frame = pd.DataFrame({"layer": range(13), "expert": 0, "z": 1.0, "plain": np.arange(13.0)})
    many = figure(Scatter("s", "cells", y="z", x="plain", by="layer"), frame)
    assert not any(trace.get("showlegend", True) for trace in many.data[:13])
    assert many.data[13]["marker"]["showscale"]
    few = figure(Scatter("s", "cells", y="z", x="plain", by="layer"), frame.head(3))
    assert [trace["name"] for trace in few.data[:3]] == ["layer 0", "layer 1", "layer 2"]
