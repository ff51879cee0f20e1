"""Figures of routing: drawn from a real trace, handed to plotly's validator.

What they derive held to simulation and exact cases.
"""

import re

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from moescope.plotting.style import GREY, ratio_heatmap, ratio_range, values_of
from moescope.routing.expert_maps import (
    Cloud,
    coactivation_profiles,
    expected_pairs,
    fill_diagonal,
    lift_over_chance,
    plane_of_noise,
    principal_plane,
)
from moescope.routing.figures_experts import MAPS, coactivation_order, strongest_pair
from moescope.routing.figures_load import load_heatmap, tokens_by_layer, usage_by_rank, usages
from moescope.routing.figures_steps import (
    FIGURES,
    MONITOR_FIGURES,
    OVER_STEPS,
    saturation_curves,
    shares_by_step,
    usage_area,
)
from moescope.routing.metrics import METRICS
from moescope.routing.report_views import load_trace, routing_views
from moescope.routing.tables import COLUMNS
from moescope.tables import SHARED

ROUTING = [spec for spec in FIGURES if spec not in (*MAPS, *OVER_STEPS)]


@pytest.fixture(scope="module")
def trace(traced_run):
    return load_trace(traced_run)


@pytest.fixture(scope="module")
def views(trace):
    return routing_views(trace)


@pytest.fixture(scope="module")
def tables(views):
    return next(view for view in views if view.main and view.step == 200).tables


def validate(figure):
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    assert 0 < len(figure.title.split()) <= 8, figure.title
    assert len(figure.caption.split()) <= 36, figure.caption
    assert "nan" not in figure.caption
    assert set(figure.columns) <= {*COLUMNS, *METRICS, *SHARED}
    assert figure.layout["xaxis"]["title"]["text"]
    assert figure.layout["yaxis"]["title"]["text"]
    if figure.slider:
        assert len(figure.data) == len(figure.slider.values) * figure.slider.per_value
        assert len(figure.slider.captions) == len(figure.slider.values)
        assert figure.caption == figure.slider.captions[figure.slider.start]


def test_a_metric_and_a_column_never_share_a_name():
    assert not set(METRICS) & {*COLUMNS, *SHARED}


def test_every_figure_is_drawn_from_a_trace_with_domains_and_tokens(tables):
    for spec in ROUTING:
        assert spec.can_draw(tables), spec.name
        validate(spec.draw({name: tables[name] for name in (*spec.needs, "domains")}))


def test_every_figure_over_steps_is_drawn(trace):
    for spec in OVER_STEPS:
        assert spec.can_draw(trace.in_main_phase())
        validate(spec.draw(trace.in_main_phase()))


def test_a_decode_view_draws_load_and_decisions_and_nothing_it_does_not_hold(views):
    decode = next(view for view in views if view.phase == "decode")
    drawn = [spec.name for spec in ROUTING if spec.can_draw(decode.tables)]
    for spec in ROUTING:
        if spec.name in drawn:
            validate(spec.draw(decode.tables))
    assert {"load_heatmap", "cv_by_layer", "routing_entropy_by_layer"} <= set(drawn)
    assert not {"coactivation_heatmap", "affinity_heatmap"} & set(drawn)


def test_without_domains_logits_or_gates_the_rest_is_still_drawn(tables):
    held = ("cv", "max_violation", "max_over_mean", "gini", "unused", "min_max_ratio", "load_entropy_share")
    rows = tables["routing_layers"]
    bare = {
        "load": tables["load"].assign(domain="text", gate_weight=None).drop_duplicates(["layer", "expert"]),
        "routing_layers": rows[rows["metric"].isin(held) & (rows["domain"] == "")],
    }
    drawn = [spec for spec in ROUTING if spec.can_draw(bare)]
    assert [spec.name for spec in drawn] == [
        "load_heatmap",
        "usage_by_expert",
        "usage_by_expert_log",
        "usage_by_rank",
        "cv_by_layer",
        "max_violation_by_layer",
        "load_entropy_by_layer",
        "gini_by_layer",
    ]
    for spec in drawn:
        validate(spec.draw(bare))


def test_a_line_draws_the_tables_numbers_with_chance_and_collapse_in_grey(tables):
    figure = next(spec for spec in ROUTING if spec.name == "cv_by_layer").draw(tables)
    rows = values_of(tables, "cv")
    np.testing.assert_array_equal(figure.data[0]["y"], rows["value"])
    corrected = figure.data[1]
    np.testing.assert_array_equal(
        corrected["y"][rows["corrected"] > 0.01], rows["corrected"][rows["corrected"] > 0.01]
    )
    np.testing.assert_allclose(corrected["y"] + corrected["error_y"]["array"], rows["high"])
    assert "error_y" not in figure.data[0], "an interval around a number that it does not belong to"
    grey = {trace["name"]: trace for trace in figure.data if trace["line"]["color"] == GREY}
    np.testing.assert_array_equal(grey["random routing"]["y"], rows["chance"])
    np.testing.assert_array_equal(grey["collapse"]["y"], rows["collapse"])
    weighted = {trace["name"]: trace for trace in figure.data if "by gate weight" in trace["name"]}
    level = weighted["random routing, by gate weight"]
    np.testing.assert_array_equal(level["y"], values_of(tables, "gate_weight_cv")["chance"])
    assert level["line"]["color"] == weighted["by gate weight"]["line"]["color"]


def test_the_number_of_tokens_is_a_column(tables, traced_run):
    tokens = sum(traced_run.info["coverage"][1]["tokens"].values())
    assert tokens_by_layer(tables).to_dict() == dict.fromkeys(range(3), tokens)


def test_the_band_about_an_even_share_is_two_standard_deviations_of_random_routing():
    generator = np.random.default_rng(0)
    tokens, n, k = 2000, 8, 3
    counts = np.stack(
        [
            np.bincount(generator.random((tokens, n)).argsort(1)[:, :k].ravel(), minlength=n)
            for _ in range(150)
        ]
    )
    load = pd.DataFrame({"layer": 0, "domain": "", "expert": range(n), "tokens": counts[0]})
    rows = pd.DataFrame({"layer": [0], "domain": "", "tokens": tokens})
    (usage,) = usages({"load": load, "routing_layers": rows})
    assert usage.even == tokens * k / n
    assert usage.stray == pytest.approx(2 * counts.std(), rel=0.06)


def pair_rows(chosen: np.ndarray, k: int) -> pd.DataFrame:
    """One layer's pairs, from a matrix tokens x experts of 0 and 1."""
    tokens, n = chosen.shape
    both, loads = chosen.T @ chosen, chosen.sum(axis=0)
    a, b = np.nonzero(~np.eye(n, dtype=bool))
    lift = tokens * both[a, b] / (loads[a] * loads[b])
    chance = n * (k - 1) / (k * (n - 1))
    counts = {"tokens": both[a, b], "tokens_a": loads[a], "tokens_b": loads[b], "layer_tokens": tokens}
    pairs = {"expert_a": a, "expert_b": b, "lift": lift, "chance_lift": chance}
    return expected_pairs(pd.DataFrame({**pairs, **counts}))


def random_choices(generator, tokens: int, n: int, k: int, lean: float = 0.0) -> np.ndarray:
    chosen = np.zeros((tokens, n))
    scores = generator.gumbel(size=(tokens, n)) - lean * np.arange(n)
    np.put_along_axis(chosen, scores.argsort(1)[:, -k:], 1, axis=1)
    return chosen


def test_expected_pairs_and_their_largest_are_those_of_random_routing():
    generator = np.random.default_rng(1)
    runs = [pair_rows(random_choices(generator, 3000, 10, 3), 3) for _ in range(40)]
    counts = np.mean([rows["tokens"] for rows in runs], axis=0)
    np.testing.assert_allclose(np.mean([rows["expected"] for rows in runs], axis=0), counts, rtol=0.04)
    found = [strongest_pair(rows) for rows in runs]
    assert np.mean([pair.at_chance for pair in found]) - 1 == pytest.approx(
        np.mean([pair.over for pair in found]) - 1, rel=0.2
    )


def test_pairs_of_experts_that_are_hardly_used_are_neither_named_nor_drawn():
    chosen = random_choices(np.random.default_rng(2), 2000, 8, 2, lean=1.2)
    chosen[0] = [0, 0, 0, 0, 0, 0, 1, 1]  # once together, where chance gives almost nothing: an enormous lift
    rows = pair_rows(chosen, 2)
    last = rows[(rows["expert_a"] == 6) & (rows["expert_b"] == 7)].iloc[0]
    assert last["lift"] > 20
    assert 7 not in strongest_pair(rows)[:2]
    assert np.isnan(lift_over_chance(rows).loc[6, 7])
    assert strongest_pair(pair_rows(random_choices(np.random.default_rng(3), 40, 8, 2), 2)) is None


def twins(n=8):
    """Chance everywhere, but experts 2 and 5 always together."""
    over = np.ones((n, n))
    over[2, 5] = over[5, 2] = 6.0
    np.fill_diagonal(over, np.nan)
    return over


def test_co_activated_experts_are_adjacent_and_near_on_the_map():
    order = coactivation_order(twins())
    assert abs(order.index(2) - order.index(5)) == 1
    at, _ = principal_plane(Cloud.of_rows(coactivation_profiles(twins())))
    distance = np.linalg.norm(at[:, None] - at[None], axis=-1)
    assert distance[2, 5] == pytest.approx(0, abs=1e-7)
    assert distance[2, 0] > 1


def test_the_plane_is_that_of_the_covariances_leading_eigenvectors():
    profile = np.random.default_rng(2).normal(size=(12, 12))
    at, share = principal_plane(Cloud.of_rows(profile))
    values = np.linalg.eigvalsh(np.cov(profile.T))[::-1]
    np.testing.assert_allclose(share, values[:2] / values.sum())
    np.testing.assert_allclose(at.var(axis=0, ddof=1), values[:2])


def test_noise_leaves_the_stated_share_on_two_axes():
    generator = np.random.default_rng(3)
    noise = generator.normal(size=(30, 16, 16))
    again = [principal_plane(Cloud.of_rows(fill_diagonal(matrix + matrix.T)))[1].sum() for matrix in noise]
    assert plane_of_noise(16) == pytest.approx(np.mean(again), abs=0.03)


def test_the_lift_matrix_is_the_tables(tables):
    pairs = expected_pairs(tables["coactivation"][tables["coactivation"]["layer"] == 1])
    matrix = lift_over_chance(pairs)
    row = pairs[(pairs["expert_a"] == 2) & (pairs["expert_b"] == 0)].iloc[0]
    assert matrix.loc[2, 0] == row["lift"] / row["chance_lift"]
    assert np.isnan(np.diag(matrix)).all()


def test_heatmaps_of_ratios_are_white_at_one_and_reach_as_far_as_needed():
    trace = ratio_heatmap(
        np.array([[1.0, 2.0, 0.0, np.nan, 64.0]]), list("abcde"), ["0"], ("x", "y"), "", "", 4.0
    )
    np.testing.assert_array_equal(trace["z"], [[0, 1, -2, np.nan, 2]])
    assert trace["zmin"] == -trace["zmax"] == -2
    assert trace["colorbar"]["ticktext"][-1] == "≥ 4"
    spread = np.linspace(1, 1.5, 100)
    assert [
        ratio_range([spread]),
        ratio_range([spread**2]),
        ratio_range([1 / spread**6]),
        ratio_range([np.array([np.nan])]),
    ] == [
        2,
        4,
        8,
        8,
    ]


def test_unused_experts_are_named_and_have_no_point_on_a_logarithmic_axis():
    load = pd.DataFrame({"layer": 0, "domain": "", "expert": range(4), "tokens": [90, 10, 0, 0]})
    rows = pd.DataFrame({"layer": [0], "domain": "", "tokens": 100})
    found = {"load": load, "routing_layers": rows}
    assert "unused experts in layer 0" in load_heatmap(found).caption
    figure = usage_by_rank(found)
    assert re.findall(r"\d+", figure.caption) == ["1", "4", "0", "2", "2"]
    assert np.isnan(figure.data[0]["y"][2:]).all()


def test_areas_over_steps_hold_the_whole_load(trace):
    tables = trace.in_main_phase()
    figure = usage_area(tables)
    for position in range(len(figure.slider.values)):
        own = figure.data[position * figure.slider.per_value : (position + 1) * figure.slider.per_value]
        np.testing.assert_allclose(sum(band["y"] for band in own), 1)
    assert shares_by_step(tables, 0).columns.tolist() == [100, 200]


def test_many_experts_share_an_area():
    load = pd.DataFrame(
        [
            {"layer": 0, "step": step, "expert": expert, "tokens": expert + step}
            for step in (1, 2)
            for expert in range(40)
        ]
    )
    figure = usage_area({"load": load})
    assert len(figure.data) == 13
    assert figure.data[-1]["name"] == "other 28"
    np.testing.assert_allclose(sum(band["y"] for band in figure.data), 1)


def test_saturation_is_drawn_by_all_choices_and_by_the_first_each_beside_its_chance():
    rows = [
        {
            "layer": layer,
            "step_a": step,
            "step_b": 3,
            "routing_consistency_chance": 0.5,
            "top1_chance": 0.25,
            "saturation_topk": o,
            "saturation_top1": one,
        }
        for layer, step, o, one in ((0, 1, 0.6, 0.3), (1, 1, 0.7, 0.5), (0, 2, 0.8, 0.6), (1, 2, 0.9, 0.8))
    ]
    figure = saturation_curves({"stability": pd.DataFrame(rows)})
    drawn = {trace["name"]: trace["y"] for trace in figure.data}
    np.testing.assert_allclose(drawn["layer 0"], [0.6, 0.8])
    np.testing.assert_allclose(drawn["top-k, usage alone"], [0.5, 0.5])
    np.testing.assert_allclose(drawn["top-1, mean"], [0.4, 0.7])
    np.testing.assert_allclose(drawn["top-1, usage alone"], [0.25, 0.25])
    assert figure.caption.endswith("(usage alone: 0.5); top-1 40 % (usage alone: 25 %).")


def test_figures_have_unique_names_and_a_description():
    specs = [*FIGURES, *MONITOR_FIGURES]
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    assert all(spec.line.endswith(".") for spec in specs)


def test_a_run_draws_every_figure_it_lists_and_narrows_it_to_a_selection(traced_run):
    names = traced_run.figures()
    assert {"cv_by_layer", "cv_by_step", "saturation_curves", "expert_map_router_pca"} <= set(names)
    for name in names:
        validate(traced_run.draw(name))
    assert list(traced_run.draw("cv_by_layer", layer=1).data[0]["x"]) == [1]
    assert list(traced_run.draw("cv_by_step").data[0]["x"]) == [100, 200]
    early = traced_run.draw("cv_by_layer", step=100).data[0]["y"]
    rows = traced_run.table("routing_layers").query(
        "step == 100 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    np.testing.assert_array_equal(early, rows.sort_values("layer")["value"])
