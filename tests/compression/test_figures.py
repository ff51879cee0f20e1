"""Figures of compression, drawn from a real run."""

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.compression.figures import (
    DAMAGE,
    SALIENCY,
    divergences,
    errors_by_layer,
    loss_differences,
    perplexities,
    rank_intervals,
    saliency_heatmap,
)
from moescope.compression.verb import VERB
from moescope.plotting.style import CATEGORICAL, GREY


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
    assert figure.layout["xaxis"]["title"]["text"]
    assert figure.layout["yaxis"]["title"]["text"]
    if figure.slider:
        assert len(figure.data) == len(figure.slider.values) * figure.slider.per_value
        assert len(figure.slider.captions) == len(figure.slider.values)


def test_every_figure_is_drawn_from_a_judged_run(tables):
    for spec in (*DAMAGE, *SALIENCY):
        assert spec.can_draw(tables), spec.name
        validate(spec.draw(tables))


def planned_only(tables):
    damage = tables["damage"].assign(
        perplexity=np.nan,
        perplexity_original=np.nan,
        loss_increase=np.nan,
        js_divergence=np.nan,
        measured_error=np.nan,
    )
    return {**tables, "damage": damage}


def test_a_plan_that_was_not_applied_shows_predictions_only(tables):
    given = planned_only(tables)
    drawn = [spec.name for spec in DAMAGE if spec.can_draw(given)]
    assert drawn == ["errors_by_layer", "router_kl_by_layer"]
    figure = errors_by_layer(given)
    validate(figure)
    assert not any("measured" in trace.get("name", "") for trace in figure.data)


def test_without_text_controls_or_intervals_what_is_left_is_drawn(tables):
    bare = {
        "clusters": tables["clusters"],
        "damage": planned_only(tables)["damage"].assign(predicted_error=np.nan, router_kl=np.nan),
    }
    assert not any(spec.can_draw(bare) for spec in (*DAMAGE, *SALIENCY))
    alone = {**tables, "damage": tables["damage"].query("method == 'reap'")}
    few = {**alone, "saliency": tables["saliency"].assign(rank_low=np.nan, rank_high=np.nan)}
    assert [spec.name for spec in (*DAMAGE, *SALIENCY) if spec.can_draw(few)] == [
        spec.name for spec in (*DAMAGE, *SALIENCY)
    ][:-1]
    for spec in (*DAMAGE, SALIENCY[0]):
        validate(spec.draw(few))


def test_perplexity_stands_between_the_original_and_every_control_in_grey(tables):
    figure = perplexities(tables)
    whole = tables["damage"][tables["damage"]["layer"].isna()].set_index("method")
    own = [trace for trace in figure.data if trace.get("marker", {}).get("color") == CATEGORICAL[0]]
    assert [list(trace["y"]) for trace in own] == [[whole.loc["reap", "perplexity"]]]
    grey = [float(trace["y"][0]) for trace in figure.data if trace.get("marker", {}).get("color") == GREY]
    assert sorted(grey) == sorted([whole["perplexity_original"].iloc[0], *whole.drop("reap")["perplexity"]])
    assert f"the original's {whole['perplexity_original'].iloc[0]:.3g}" in figure.caption
    assert f"random controls: {whole.drop('reap')['perplexity'].mean():.3g}" in figure.caption


def test_loss_differences_have_their_intervals_and_a_line_at_zero(tables):
    figure = loss_differences(tables)
    whole = tables["damage"][tables["damage"]["layer"].isna()].set_index("method")
    for trace in figure.data[1:]:
        row = whole.loc[trace["name"].split("<br>")[0]]
        column = "loss_increase" if row.name == "reap" else "loss_above_plan"
        (value,), bars = trace["x"], trace["error_x"]
        ends = [value, value - bars["arrayminus"][0], value + bars["array"][0]]
        assert ends == pytest.approx([row[f"{column}{end}"] for end in ("", "_low", "_high")])
    assert len(figure.data) == 1 + len(whole)
    assert figure.data[0]["x"] == [0] * len(whole)
    assert figure.data[0]["y"] == [trace["y"][0] for trace in figure.data[1:]]  # decides the order
    few = tables["damage"].assign(**{name: np.nan for name in whole if name.endswith(("_low", "_high"))})
    bare = loss_differences({**tables, "damage": few})
    validate(bare)
    assert "too few" in bare.caption
    assert "random" not in bare.caption


def test_divergence_names_its_bound_and_draws_it(tables):
    figure = divergences(tables)
    assert "0.693" in figure.caption
    assert figure.data[0]["y"] == [np.log(2)] * 2


def test_errors_shade_the_span_of_the_controls(tables):
    figure = errors_by_layer(tables)
    damage = tables["damage"]
    random = damage[damage["layer"].notna() & (damage["method"] != "reap")].groupby("layer")["measured_error"]
    np.testing.assert_allclose(figure.data[0]["y"], random.min())
    np.testing.assert_allclose(figure.data[1]["y"], random.max())
    np.testing.assert_allclose(figure.data[2]["y"], random.mean())


def test_scores_are_drawn_over_their_layer_s_mean_and_crosses_are_the_dropped(tables):
    figure = saliency_heatmap(tables)
    grid = tables["saliency"].pivot(index="layer", columns="expert", values="reap").to_numpy()
    np.testing.assert_allclose(figure.data[0]["customdata"], np.round(grid / grid.mean(1, keepdims=True), 4))
    dropped = tables["clusters"].query("not kept")
    assert sorted(zip(figure.data[1]["y"], figure.data[1]["x"], strict=True)) == sorted(
        (str(row.layer), str(row.expert)) for row in dropped.itertuples()
    )


def test_ranks_count_the_experts_that_could_be_on_either_side_of_the_cut():
    saliency = pd.DataFrame(
        {
            "layer": 0,
            "expert": range(4),
            "tokens": 1,
            "gate_weight": 1.0,
            "ean": 1.0,
            "reap": [4.0, 3.0, 2.0, 1.0],
            "rank_low": [1.0, 1.0, 2.0, 4.0],
            "rank_high": [1.0, 3.0, 3.0, 4.0],
        }
    )
    clusters = pd.DataFrame(
        {"method": "reap", "layer": 0, "expert": range(4), "kept": [True, True, False, False]}
    )
    figure = rank_intervals({"saliency": saliency, "clusters": clusters})
    assert "2 of 4 experts" in figure.caption
    line, kept, dropped = figure.data
    assert (line["x"], set(line["y"])) == (["0", "1", "2", "3"], {2.5})
    assert (kept["x"], dropped["x"]) == (["0", "1"], ["2", "3"])
    assert list(kept["error_y"]["array"]) == [0, 1]
    assert list(dropped["error_y"]["arrayminus"]) == [1, 0]
    at_random = rank_intervals({"saliency": saliency, "clusters": clusters.assign(method="random")})
    assert "0.75 of 4 ranks" in at_random.caption
    assert np.isnan(at_random.data[0]["y"]).all(), "no score made a cut"
    assert [trace["showlegend"] for trace in at_random.data] == [False, True, True]
    everyone = rank_intervals({"saliency": saliency, "clusters": clusters.assign(kept=True)})
    assert "0.75 of 4 ranks" in everyone.caption
