"""Dendrograms and group sizes: by hand, against scipy's own layout, and valid for plotly."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure
from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram
from scipy.cluster.hierarchy import linkage

from moescope.compression.figures import GROUPS, dendrogram, leaf_order, links
from moescope.compression.rows import alone_by_chance, group_size_rows
from moescope.compression.verb import VERB


def tables_of(features: dict[int, np.ndarray], keep: int) -> dict[str, pd.DataFrame]:
    """Average linkage of each layer's features, cut to so many groups."""
    from dataclasses import replace

    from scipy.spatial.distance import pdist, squareform

    from moescope.compression.merging import average_linkage
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
def tables():
    rng = np.random.default_rng(0)
    return tables_of({0: rng.normal(size=(10, 4)), 3: rng.normal(size=(10, 4))}, keep=6)


def test_every_figure_is_valid_and_speaks_of_known_columns(tables):
    for spec in GROUPS:
        figure = spec.draw(tables)
        PlotlyFigure({"data": figure.data, "layout": figure.layout})
        assert set(figure.columns) <= {key for table in VERB.tables.values() for key in table.glossary}
        assert len(figure.title.split()) <= 8
        assert "nan" not in figure.caption
        if figure.slider:
            assert len(figure.data) == len(figure.slider.values) * figure.slider.per_value
            assert len(figure.slider.captions) == len(figure.slider.values)
            assert max(len(caption.split()) for caption in figure.slider.captions) <= 25


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


def test_no_link_crosses_another_since_what_is_merged_stands_side_by_side(tables):
    steps = tables["merges"].query("layer == 0")
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


def test_carried_out_links_are_blue_the_others_grey_and_unrelated_experts_a_line_at_one(tables):
    figure = dendrogram(tables)
    chance, merged, above = figure.data[:3]
    assert set(chance["y"]) == {1.0}
    steps = tables["merges"].query("layer == 0")
    assert np.nanmax(merged["y"]) == pytest.approx(steps[steps["done"]]["height"].max() / 2)
    assert np.nanmax(above["y"]) == pytest.approx(steps["height"].max() / 2)
    assert (merged["name"], above["name"]) == ("merged", "above the cut")
    assert np.isnan(merged["y"]).sum() == steps["done"].sum()


def test_dominant_members_of_groups_are_marked_and_every_expert_is_named_below(tables):
    figure = dendrogram(tables)
    leaders = figure.data[3]
    rows = tables["clusters"].query("layer == 0")
    sizes = rows.groupby("cluster").size()
    wanted = {str(row.expert) for row in rows.itertuples() if row.dominant and sizes[row.cluster] > 1}
    assert set(leaders["text"]) == wanted
    names = figure.slider.layouts[0]["xaxis"]["ticktext"]
    assert [names[int(place)] for place in leaders["x"]] == leaders["text"]
    assert sorted(names, key=int) == [str(expert) for expert in range(10)]


def test_sizes_add_up_to_the_experts_left_and_chance_is_beside_them(tables):
    figure = GROUPS[1].draw(tables)
    bars = [trace for trace in figure.data if trace["type"] == "bar"]
    assert np.sum([trace["y"] for trace in bars], axis=0).tolist() == [6, 6]
    (chance,) = [trace for trace in figure.data if trace["name"] == "alone if joined at random"]
    assert chance["y"].tolist() == pytest.approx([6 * (5 / 6) ** 4] * 2)
    sizes = tables["clusters"].groupby(["layer", "cluster"]).size()
    alone = (sizes == 1).groupby("layer").sum()
    assert bars[0]["name"] == "alone"
    assert bars[0]["y"].tolist() == alone.tolist()
    largest = tables["group_sizes"].groupby("layer")["largest"].first()
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
