"""Figures of compression from a real run, dendrograms and group sizes by hand; columns against recounts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure
from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import pdist, squareform

from moescope.compression.figures import DAMAGE, GROUPS, SALIENCY, dendrogram, leaf_order, links
from moescope.compression.merging import average_linkage
from moescope.compression.rows import alone_by_chance, beside_controls, group_size_rows, merge_pair_rows
from moescope.compression.tables import PER_LAYER
from moescope.compression.verb import VERB


@pytest.fixture(scope="module")
def tables(compressed_run):
    return {name: compressed_run.table(name) for name in compressed_run.tables}


def validate(figure):
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert 0 < len(figure.title.split()) <= 8
    for caption in (figure.caption, *(figure.slider.captions if figure.slider else ())):
        assert 0 < len(caption.split()) <= 25, caption
        assert "nan" not in caption
    if figure.slider:
        assert len(figure.data) == len(figure.slider.values) * figure.slider.per_value
    assert set(figure.columns) <= {key for table in VERB.tables.values() for key in table.glossary}


def drawn(run_tables, name):
    """The traces of the page that a figure, or an earlier one, opens with."""
    figure = VERB.figure(name).draw(run_tables)
    if figure.slider is None:
        return figure.data
    first = figure.slider.start * figure.slider.per_value
    return [trace for trace in figure.data[first : first + figure.slider.per_value] if trace["name"]]


def test_every_figure_is_drawn_from_a_judged_run_or_a_merge(tables, merged):
    for specs, given in (([*DAMAGE, *SALIENCY], tables), (GROUPS, merged)):
        for spec in specs:
            assert spec.can_draw(given), spec.name
            validate(spec.draw(given))


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


def test_columns_of_the_controls_are_their_mean_and_range_and_who_is_better():
    damage = pd.DataFrame(
        {
            "method": ["reap"] * 2 + ["a"] * 2 + ["b"] * 2 + ["c"] * 2,
            "role": ["plan"] * 2 + ["control"] * 6,
            "layer": pd.array([0, None] * 4, "Int64"),
            **{name: [0.5, None, 0.2, None, 0.6, None, None, None] for name in PER_LAYER},
            "loss_above_plan": [None, None, None, 0.2, None, 0.0, None, -0.2],
            "loss_above_plan_low": [None, None, None, 0.1, None, -0.2, None, -0.3],
            "loss_above_plan_high": [None, None, None, 0.3, None, None, None, -0.1],
            **{"bytes": [None, 6] * 4, "bytes_original": [None, 8] * 4},
        }
    )
    ends = ("", "_low", "_high")
    floats = [*PER_LAYER, *(f"loss_above_plan{end}" for end in ends)]
    damage = damage.astype(dict.fromkeys(floats, float))
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


# --- dendrograms and group sizes: by hand, and against scipy's own layout


def tables_of(features: dict[int, np.ndarray], keep: int) -> dict[str, pd.DataFrame]:
    """Average linkage of each layer's features, cut to so many groups."""
    from moescope.compression.rows import cluster_rows, merge_rows
    from moescope.types import LayerPlan, Plan

    names = {layer: f"layers.{layer}" for layer in features}
    groupings = {
        layer: replace(average_linkage(squareform(pdist(own)), keep, min), unrelated=2.0)
        for layer, own in features.items()
    }
    layers = tuple(
        LayerPlan(
            layer, own.n_experts, own.groups, own.dominants, tuple((1 / len(g),) * len(g) for g in own.groups)
        )
        for layer, own in groupings.items()
    )
    plan = Plan("hc_smoe", {}, layers, "none", "fold", None, {})
    clusters = cluster_rows(plan, names)
    sizes = group_size_rows(clusters)
    return {"merges": merge_rows("hc_smoe", groupings, names), "clusters": clusters, "group_sizes": sizes}


@pytest.fixture(scope="module")
def merged():
    rng = np.random.default_rng(0)
    return tables_of({0: rng.normal(size=(10, 4)), 3: rng.normal(size=(10, 4))}, keep=6)


def test_links_meet_at_the_corners_of_scipy_s_own_dendrogram():
    features = np.random.default_rng(1).normal(size=(9, 3))
    steps = tables_of({0: features}, keep=4)["merges"]
    order = leaf_order(steps, list(range(9)))
    across, up = links(steps, order).transpose(1, 0, 2)
    theirs = scipy_dendrogram(linkage(features, "average"), no_plot=True)
    ours = sorted(
        (round(row[1] * 2.0, 9), round(abs(x[2] - x[0]), 9)) for x, row in zip(across, up, strict=True)
    )
    corners = sorted(
        (round(d[1], 9), round((i[2] - i[0]) / 10, 9))
        for i, d in zip(theirs["icoord"], theirs["dcoord"], strict=True)
    )
    assert [height for height, _ in ours] == pytest.approx([height for height, _ in corners])
    assert sorted(order) == list(range(9))
    assert min(width for _, width in ours) > 0


def test_no_link_crosses_another_since_what_is_merged_stands_side_by_side(merged):
    steps = merged["merges"].query("layer == 0")
    order = leaf_order(steps, list(range(10)))
    under = {expert: [place] for place, expert in enumerate(order)}
    for number, step in enumerate(steps.itertuples()):
        both = under[step.left] + under[step.right]
        assert max(both) - min(both) == len(both) - 1
        under[10 + number] = both


def test_a_forest_keeps_experts_that_never_meet_in_their_own_order():
    steps = pd.DataFrame({"left": [1, 4], "right": [3, 5], "height": [0.2, 0.5], "chance_height": [1.0, 1.0]})
    assert leaf_order(steps, [0, 1, 2, 3, 4, 5]) == [0, 1, 3, 2, 4, 5]
    across, up = links(steps, [0, 1, 3, 2, 4, 5]).transpose(1, 0, 2)
    assert across[0][:4].tolist() == [1, 1, 2, 2]
    assert up[1][:4].tolist() == [0, 0.5, 0.5, 0]


def test_similarity_and_coactivation_stand_beside_the_dendrogram_in_its_order(merged):
    """Experts 2 and 7 are chosen together, by all others at random; similarity is 1 - distance/2."""
    generator = np.random.default_rng(0)
    features = generator.normal(size=(10, 4))
    grouping = replace(average_linkage(squareform(pdist(features)), 6, min), unrelated=2.0)
    chosen = generator.random((2000, 10)).argsort(1)[:, :2]
    chosen[:200] = [2, 7]
    pairs = merge_pair_rows({0: grouping}, {0: chosen}, {0: "layers.0"})
    one = pairs.set_index(["expert_a", "expert_b"])
    assert one.loc[(2, 7), "similarity"] == pytest.approx(1 - np.linalg.norm(features[2] - features[7]) / 2)
    random = merge_pair_rows({0: grouping}, {0: chosen[200:]}, {0: "layers.0"})
    z = (random["coactivation"] - 1) / random["coactivation_noise"]
    assert abs(random["coactivation"].mean() - 1) < 0.02
    assert (z.abs() > 1.96).mean() <= 0.1
    assert (one.loc[(2, 7), "coactivation"] - 1) / one.loc[(2, 7), "coactivation_noise"] > 10
    figure = dendrogram({**merged, "merge_pairs": pairs})
    similar, together = figure.data[4:6]
    names = [int(name) for name in figure.slider.layouts[0]["yaxis"]["ticktext"]]
    a, b = names.index(2), names.index(7)
    assert similar["customdata"][a, b] == similar["customdata"][b, a] == one.loc[(2, 7), "similarity"]
    assert together["z"][a, b] == np.nanmax(together["z"]) > 0
    assert np.isnan(similar["z"][a, a])
    validate(figure)


def test_sizes_add_up_to_the_experts_left_and_chance_is_beside_them(merged):
    figure = GROUPS[1].draw(merged)
    bars = [trace for trace in figure.data if trace["type"] == "bar"]
    assert np.sum([trace["y"] for trace in bars], axis=0).tolist() == [6, 6]
    (chance,) = [trace for trace in figure.data if trace["name"] == "alone if joined at random"]
    assert chance["y"].tolist() == pytest.approx([6 * (5 / 6) ** 4] * 2)
    sizes = merged["clusters"].groupby(["layer", "cluster"]).size()
    alone = (sizes == 1).groupby("layer").sum()
    assert bars[0]["name"] == "alone"
    assert bars[0]["y"].tolist() == alone.tolist()
    largest = merged["group_sizes"].groupby("layer")["largest"].first()
    assert largest.tolist() == sizes.groupby("layer").max().tolist()


def test_alone_by_chance_is_what_dealing_gives():
    rng = np.random.default_rng(0)
    alone = [np.sum(np.bincount(rng.integers(0, 5, 7), minlength=5) == 0) for _ in range(20_000)]
    assert alone_by_chance(12, 5) == pytest.approx(np.mean(alone), rel=0.02)


def test_groups_of_five_and_more_share_a_size_and_those_alone_are_counted_where_there_are_none():
    members = {0: [2, 2, 7], 1: [1, 4, 6]}
    rows = [
        {"layer": layer, "layer_name": "x", "expert": expert, "dominant": place == 0, "members": size}
        for layer, sizes in members.items()
        for expert, (size, place) in enumerate((size, place) for size in sizes for place in range(size))
    ]
    clusters = pd.DataFrame(rows).assign(kept=True, chance_alone=0.5)
    table = group_size_rows(clusters).set_index(["layer", "size"])
    found = table["groups"].unstack().to_dict("index")
    assert found == {0: {"1": 0, "2": 2, "4": 0, "5+": 1}, 1: {"1": 1, "2": 0, "4": 1, "5+": 1}}
    assert table["groups_chance"].dropna().index.tolist() == [(0, "1"), (1, "1")]
    assert table["largest"].groupby("layer").first().tolist() == [7, 6]
    assert group_size_rows(clusters.assign(members=1)) is None
