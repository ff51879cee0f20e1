"""Figures of compression, drawn from a real run; the columns behind them against independent computations."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.compression.figures import DAMAGE, SALIENCY
from moescope.compression.rows import beside_controls
from moescope.compression.tables import PER_LAYER
from moescope.compression.verb import VERB
from moescope.plotting.style import GREY


@pytest.fixture(scope="module")
def tables(compressed_run):
    return {name: compressed_run.table(name) for name in compressed_run.tables}


def validate(figure):
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert 0 < len(figure.title.split()) <= 8
    for caption in (figure.caption, *(figure.slider.captions if figure.slider else ())):
        assert 0 < len(caption.split()) <= 25, caption
        assert "nan" not in caption
    assert set(figure.columns) <= {key for table in VERB.tables.values() for key in table.glossary}


def drawn(run_tables, name):
    """The traces of the page that a figure, or an earlier one, opens with."""
    figure = VERB.figure(name).draw(run_tables)
    if figure.slider is None:
        return figure.data
    first = figure.slider.start * figure.slider.per_value
    return [trace for trace in figure.data[first : first + figure.slider.per_value] if trace["name"]]


def test_every_figure_is_drawn_from_a_judged_run(tables):
    for spec in (*DAMAGE, *SALIENCY):
        assert spec.can_draw(tables), spec.name
        validate(spec.draw(tables))


def planned_only(tables):
    judged = ("perplexity", "loss_increase", "loss_above_plan", "js_divergence", "measured_error")
    return {**tables, "damage": tables["damage"].assign(**dict.fromkeys(judged, np.nan))}


def test_a_plan_that_was_not_applied_shows_predictions_only(tables):
    given = planned_only(tables)
    assert [spec.name for spec in DAMAGE if spec.can_draw(given)] == ["damage_by_layer"]
    figure = DAMAGE[1].draw(given)
    validate(figure)
    assert figure.slider.values == ["predicted error", "router KL"]


def test_without_text_controls_or_intervals_what_is_left_is_drawn(tables):
    bare = {"clusters": tables["clusters"], "damage": planned_only(tables)["damage"]}
    bare["damage"] = bare["damage"].assign(predicted_error=np.nan, router_kl=np.nan)
    assert not any(spec.can_draw(bare) for spec in (*DAMAGE, *SALIENCY))
    alone = tables["damage"].query("role == 'plan'").drop(columns="loss_above_plan")
    few = {"damage": alone, "saliency": tables["saliency"].assign(rank_low=np.nan, rank_high=np.nan)}
    assert [spec.can_draw(few) for spec in (*DAMAGE, *SALIENCY)] == [True, True, True, False]
    older = {"damage": tables["damage"].assign(role=None)}
    assert not any(spec.can_draw(older) for spec in DAMAGE)


@pytest.mark.parametrize(
    ("name", "column", "level"),
    [
        ("perplexities", "perplexity", "perplexity_original"),
        ("loss_differences", "loss_increase", None),
        ("divergences", "js_divergence", None),
    ],
)
def test_the_plan_stands_beside_every_control_and_the_original(tables, name, column, level):
    whole = tables["damage"][tables["damage"]["layer"].isna()].set_index("method")
    traces = {trace["name"]: trace for trace in drawn(tables, name)}
    assert list(traces["plan"]["x"]) == [whole.loc["reap", column]]
    controls = traces["random control"]
    assert dict(zip(controls["y"], controls["x"], strict=True)) == whole.drop("reap")[column].to_dict()
    if column != "js_divergence":
        expected = whole[level].iloc[0] if level else 0
        assert set(traces["original"]["x"]) == {expected}
    if f"{column}_low" in whole:
        bars, row = traces["plan"]["error_x"], whole.loc["reap"]
        assert row[column] - bars["arrayminus"][0] == pytest.approx(row[f"{column}_low"])
        assert row[column] + bars["array"][0] == pytest.approx(row[f"{column}_high"])


@pytest.mark.parametrize(
    ("name", "column"), [("errors_by_layer", "measured_error"), ("router_kl_by_layer", "router_kl")]
)
def test_the_range_of_the_controls_is_shaded_and_their_mean_dashed(tables, name, column):
    damage = tables["damage"]
    random = damage[damage["layer"].notna() & (damage["method"] != "reap")].groupby("layer")[column]
    figure = VERB.figure(name).draw(tables)
    first = figure.slider.start * figure.slider.per_value
    traces = figure.data[first : first + figure.slider.per_value]
    (band,) = [trace for trace in traces if trace.get("fill")]
    np.testing.assert_allclose(band["y"], [*random.max(), *random.min()[::-1]])
    (mean,) = [trace for trace in traces if trace["name"] == "random controls"]
    np.testing.assert_allclose(mean["y"], random.mean())
    assert mean["line"]["color"] == GREY


def test_columns_of_the_controls_are_their_mean_and_range_and_who_is_better():
    damage = pd.DataFrame(
        {
            "method": ["reap"] * 2 + ["a"] * 2 + ["b"] * 2 + ["c"] * 2,
            "role": ["plan"] * 2 + ["control"] * 6,
            "layer": pd.array([0, None] * 4, "Int64"),
            **{name: [0.5, None, 0.2, None, 0.6, None, None, None] for name in PER_LAYER},
            "loss_above_plan_low": [None, None, None, 0.1, None, -0.2, None, -0.3],
            "loss_above_plan_high": [None, None, None, 0.3, None, None, None, -0.1],
            **{"bytes": [None, 6] * 4, "bytes_original": [None, 8] * 4},
        }
    ).astype({"loss_above_plan_low": float, "loss_above_plan_high": float, **dict.fromkeys(PER_LAYER, float)})
    found = beside_controls(damage).set_index(["method", damage["layer"].isna()])
    row = found.loc[("reap", False)]
    for name in PER_LAYER:
        assert row[f"{name}_controls"] == pytest.approx(0.4)
        assert (row[f"{name}_controls_low"], row[f"{name}_controls_high"]) == (0.2, 0.6)
    assert found.loc["a", "router_kl_controls"].isna().all()
    better = {name: found.loc[(name, True), "plan_better"] for name in "abc"}
    worse = {name: found.loc[(name, True), "plan_worse"] for name in "abc"}
    assert (better["a"], better["c"], worse["a"], worse["c"]) == (True, False, False, True)
    assert pd.isna(better["b"])  # one end of its interval is unknown
    assert found.loc[("reap", True), "bytes_share"] == 0.75


def test_saliency_is_over_its_layer_s_mean_and_crosses_are_the_dropped(tables):
    figure = SALIENCY[0].draw(tables)
    grid = tables["saliency"].pivot(index="layer", columns="expert", values="reap").to_numpy()
    np.testing.assert_allclose(figure.data[0]["customdata"], grid / grid.mean(1, keepdims=True))
    dropped = tables["clusters"].query("not kept")
    crosses = next(trace for trace in figure.data if trace.get("name") == "dropped")
    assert sorted(zip(crosses["y"], crosses["x"], strict=True)) == sorted(
        (str(row.layer), str(row.expert)) for row in dropped.itertuples()
    )
    tokens = tables["saliency"].pivot(index="layer", columns="expert", values="tokens").to_numpy()
    found = tables["saliency"].pivot(index="layer", columns="expert", values="tokens_times_mean")
    np.testing.assert_allclose(found, tokens / tokens.mean(1, keepdims=True))


def test_ranks_have_their_intervals_and_the_best_is_on_top():
    frame = pd.DataFrame({"layer": 0, "expert": [2, 0, 1, 3], "rank": [1.0, 2.0, 3.0, 4.0]})
    frame = frame.assign(rank_low=[1, 1, 2, 4], rank_high=[1, 3, 3, 4], fate=["kept"] * 2 + ["dropped"] * 2)
    figure = SALIENCY[1].draw({"saliency": frame})
    kept, dropped = (trace for trace in figure.data if "error_x" in trace)
    assert (kept["name"], kept["y"], dropped["y"]) == ("kept", ["2", "0"], ["1", "3"])
    assert list(kept["error_x"]["array"]) == [0, 1]
    assert list(dropped["error_x"]["arrayminus"]) == [1, 0]
    assert figure.layout["yaxis"]["categoryarray"] == ["3", "1", "0", "2"]
