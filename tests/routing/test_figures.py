"""Figures of routing: drawn from a real trace, handed to plotly's validator.

The columns that they read are held to simulation and exact cases.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure
from scipy.stats import binom

from moescope.routing.counts_to_tables import (
    coactivation_columns,
    expert_cosine_columns,
    join_columns,
    load_total_columns,
    load_totals,
    mark_few,
)
from moescope.routing.expert_maps import (
    Cloud,
    coactivation_order,
    coactivation_profiles,
    expert_maps,
    fill_diagonal,
    lift_over_chance,
    map_facts,
    plane_of_noise,
)
from moescope.routing.figures import FIGURES, MAPS, MONITORED, STEPS
from moescope.routing.load_balance import load_noise
from moescope.routing.metrics import DIAGNOSTICS, METRICS
from moescope.routing.report_views import load_trace, routing_views
from moescope.routing.tables import COLUMNS, TABLES
from moescope.tables import SHARED
from moescope.verb import Verb
from routing.counted import counted

OF_VIEW = [spec for spec in FIGURES if spec not in (*MAPS, *STEPS)]


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
    assert set(figure.columns) <= {*COLUMNS, *METRICS, *DIAGNOSTICS, *SHARED}
    assert figure.layout["xaxis"]["title"]["text"]
    assert figure.layout["yaxis"]["title"]["text"]


def test_a_metric_and_a_column_never_share_a_name():
    assert not set(METRICS) & {*COLUMNS, *SHARED}


def test_every_figure_is_drawn_from_a_trace_with_domains_and_tokens(tables):
    for spec in OF_VIEW:
        assert spec.can_draw(tables), spec.name
        validate(spec.draw(tables))


def test_every_figure_over_steps_is_drawn(trace):
    """Two checkpoints leave one point of agreement with the last: no curve of saturation."""
    tables = trace.in_main_phase()
    drawn = [spec for spec in STEPS if spec.can_draw(tables)]
    assert [spec.name for spec in STEPS if spec not in drawn] == ["saturation_curves"]
    for spec in drawn:
        validate(spec.draw(tables))


def test_a_decode_view_draws_load_and_decisions_and_nothing_it_does_not_hold(views):
    decode = next(view for view in views if view.phase == "decode")
    drawn = {spec.name for spec in OF_VIEW if spec.can_draw(decode.tables)}
    for spec in OF_VIEW:
        if spec.name in drawn:
            validate(spec.draw(decode.tables))
    assert {"load_map", "balance_by_layer", "decisions_by_layer"} <= drawn
    assert not {"coactivation_heatmap", "affinity_heatmap"} & drawn


def test_without_domains_logits_or_gates_the_rest_is_still_drawn(tables):
    held = ("cv", "max_violation", "max_over_mean", "gini", "unused", "min_max_ratio", "load_entropy_share")
    rows = tables["routing_layers"]
    bare = {
        "load": tables["load"].assign(domain="text", gate_weight=None).drop_duplicates(["layer", "expert"]),
        "load_totals": tables["load_totals"].assign(gate_weight=None, gate_times_even=None),
        "routing_layers": rows[rows["metric"].isin(held) & (rows["domain"] == "")],
    }
    drawn = [spec for spec in OF_VIEW if spec.can_draw(bare)]
    assert [spec.name for spec in drawn] == ["load_map", "usage_by_expert", "lorenz", "balance_by_layer"]
    for spec in drawn:
        validate(spec.draw(bare))
    pages = ["CV", "max violation", "Gini", "load entropy, share", "unused experts"]
    assert drawn[-1].draw(bare).slider.values == pages


@pytest.mark.parametrize(("name", "metric"), (METRICS | DIAGNOSTICS).items())
def test_a_metric_is_a_column_with_its_references(name, metric):
    column = TABLES["routing_layers"].quantity(name)
    assert (column.chance, column.interval, column.few) == ("chance", ("low", "high"), "few")
    assert column.chance_label
    assert column.label == metric.title


# --- load


def documents_of(tokens: int, documents: int, n: int, alike: float, generator) -> np.ndarray:
    """Loads (documents, experts) of an even router with k = 1 whose documents prefer some experts."""
    shares = generator.dirichlet(np.full(n, alike), documents)
    return np.stack([generator.multinomial(tokens, share) for share in shares]).astype(float)


@pytest.mark.parametrize(("alike", "most"), [(1.0, 0.07), (50.0, 0.06)])
def test_of_even_loads_one_in_twenty_is_outside_its_noise_and_claims_are_corrected(alike, most):
    generator = np.random.default_rng(0)
    outside, claims = [], []
    for _ in range(300):
        loads = documents_of(50, 40, 8, alike, generator)
        noise, p = load_noise(loads, np.zeros(40, int), 2000)
        times = loads.sum(0) / 250
        outside.append(np.abs(times - 1) > 1.96 * noise)
        claims.append((p < 0.05 / 8).any())
        random = np.sqrt(7 / 2000)  # of independent tokens: too small where documents are alike
        assert (noise >= random).all()
        assert alike != 1 or noise.mean() > 1.5 * random
    assert np.mean(outside) <= most
    assert np.mean(claims) <= 0.075


def test_without_a_second_document_loads_have_no_noise_and_random_routing_is_the_least():
    one = np.array([[90.0, 10.0, 0.0, 0.0]])
    assert np.isnan(load_noise(one, np.zeros(1, int), 100)).all()
    assert np.isnan(load_noise(np.vstack([one, one]), np.arange(2), 200)).all()  # one per domain
    noise, p = load_noise(np.repeat(one, 20, axis=0), np.zeros(20, int), 2000)
    np.testing.assert_allclose(noise, np.sqrt(0.75 / 500))  # documents are all equal
    np.testing.assert_allclose(p[1], 2 * binom.cdf(200, 2000, 0.25), rtol=1e-9)


def test_totals_over_domains_are_shares_of_an_even_load(traced_run):
    load, totals = traced_run.table("load"), traced_run.table("load_totals")
    keys = ["step", "layer", "phase", "expert"]
    summed = load.groupby(keys)[["tokens", "gate_weight"]].sum()
    np.testing.assert_array_equal(totals.set_index(keys)["tokens"], summed["tokens"])
    np.testing.assert_allclose(totals.set_index(keys)["gate_weight"], summed["gate_weight"])
    assert (
        load.groupby(["step", "layer", "phase", "domain"])["tokens"].transform("mean") == load["even"]
    ).all()
    for _, rows in totals.groupby(["step", "layer", "phase"]):
        tokens, ordered = rows["tokens"].to_numpy(), np.sort(rows["tokens"])[::-1]
        np.testing.assert_allclose(rows["times_even"], tokens / tokens.mean())
        np.testing.assert_allclose(rows["gate_times_even"], rows["gate_weight"] / rows["gate_weight"].mean())
        curve = rows.sort_values("rank_share")
        np.testing.assert_allclose(curve["load_share"], np.cumsum(ordered) / ordered.sum())
        np.testing.assert_allclose(curve["rank_share"], [0.25, 0.5, 0.75, 1])
        assert (curve["load_share_chance"].to_numpy() >= curve["rank_share"].to_numpy() - 1e-12).all()
        assert curve["reference"].tolist() == [False, True, False, False]


def test_unused_experts_are_marked_and_layers_with_few_tokens_are_not_judged():
    counts = counted(np.array([[[90, 10, 0, 0]] * 30]), tokens=3000)
    small = counted(np.array([[[1, 1, 0, 0]]]), tokens=2, layer=1)
    layers = [{"step": 0, "layer": part.layer, "layer_name": "moe"} for part in (counts, small)]
    rows = load_totals(
        [{**layers[0], **load_total_columns(counts)}, {**layers[1], **load_total_columns(small)}]
    )
    assert rows["unused"].tolist() == [False, False, True, True] * 2
    assert rows["few"].tolist() == [False] * 4 + [True] * 4
    assert rows["claimed"].tolist() == [True] * 4 + [None] * 4
    layers = pd.DataFrame({"phase": "prefill", "domain": "", "metric": "cv", "tokens": [100, 100, 9]})
    layers = layers.assign(top_k=2, n_experts=2)
    assert mark_few(layers)["few"].tolist() == [False, False, True]
    # 99 tokens with 2 experts each are under five per expert of 40
    assert mark_few(layers.assign(tokens=[100, 99, 99], n_experts=40))["few"].tolist() == [False, True, True]


# --- co-activation


def pair_rows(chosen: np.ndarray, k: int) -> pd.DataFrame:
    """One layer's pairs, from a matrix tokens x experts of 0 and 1."""
    loads = chosen.sum(axis=0).astype(int)
    counts = counted(loads[None, None], tokens=len(chosen), k=k, pairs_EE=chosen.T @ chosen)
    return pd.DataFrame(coactivation_columns(counts))


def random_choices(generator, tokens: int, n: int, k: int, lean: float = 0.0) -> np.ndarray:
    chosen = np.zeros((tokens, n))
    scores = generator.gumbel(size=(tokens, n)) - lean * np.arange(n)
    np.put_along_axis(chosen, scores.argsort(1)[:, -k:], 1, axis=1)
    return chosen


def strongest(rows: pd.DataFrame) -> pd.Series:
    return rows.loc[rows["over"].where(~rows["few"]).idxmax()]


def test_expected_pairs_and_their_largest_are_those_of_random_routing():
    generator = np.random.default_rng(1)
    runs = [pair_rows(random_choices(generator, 3000, 10, 3), 3) for _ in range(40)]
    counts = np.mean([rows["tokens"] for rows in runs], axis=0)
    np.testing.assert_allclose(np.mean([rows["expected"] for rows in runs], axis=0), counts, rtol=0.04)
    spread = np.std([rows["tokens"] / rows["expected"] for rows in runs], axis=0)
    assert np.mean([rows["over_noise"] for rows in runs]) == pytest.approx(spread.mean(), rel=0.1)
    found = [strongest(rows) for rows in runs]
    at_chance = np.mean([pair["largest_by_chance"] for pair in found])
    assert at_chance - 1 == pytest.approx(np.mean([pair["over"] for pair in found]) - 1, rel=0.2)


def test_pairs_of_experts_that_are_hardly_used_are_neither_named_nor_drawn():
    chosen = random_choices(np.random.default_rng(2), 2000, 8, 2, lean=1.2)
    chosen[0] = [0, 0, 0, 0, 0, 0, 1, 1]  # once together, where chance gives almost nothing: an enormous lift
    rows = pair_rows(chosen, 2)
    last = rows[(rows["expert_a"] == 6) & (rows["expert_b"] == 7)].iloc[0]
    assert last["lift"] > 20
    assert last["few"]
    assert np.isnan(lift_over_chance(rows).loc[6, 7])
    assert pair_rows(random_choices(np.random.default_rng(3), 40, 8, 2), 2)["few"].all()


def twins(n=8):
    """Chance everywhere, but experts 2 and 5 always together."""
    over = np.ones((n, n))
    over[2, 5] = over[5, 2] = 6.0
    np.fill_diagonal(over, np.nan)
    return over


def test_co_activated_experts_are_adjacent_and_near_on_the_map():
    order = coactivation_order(twins())
    assert abs(order.index(2) - order.index(5)) == 1
    at, _ = Cloud.of_rows(coactivation_profiles(twins())).plane
    distance = np.linalg.norm(at[:, None] - at[None], axis=-1)
    assert distance[2, 5] == pytest.approx(0, abs=1e-7)
    assert distance[2, 0] > 1


def test_places_are_those_of_the_order(tables):
    pairs = tables["coactivation"][tables["coactivation"]["layer"] == 1]
    order = coactivation_order(lift_over_chance(pairs).to_numpy())
    places = pairs.drop_duplicates("expert_a").set_index("expert_a")["place_a"]
    assert [order[place] for place in places.sort_index()] == list(range(4))
    assert (pairs.set_index("expert_b")["place_b"] == places.reindex(pairs["expert_b"])).all()


def test_the_plane_is_that_of_the_covariances_leading_eigenvectors():
    profile = np.random.default_rng(2).normal(size=(12, 12))
    at, share = Cloud.of_rows(profile).plane
    values = np.linalg.eigvalsh(np.cov(profile.T))[::-1]
    np.testing.assert_allclose(share, values[:2] / values.sum())
    np.testing.assert_allclose(at.var(axis=0, ddof=1), values[:2])


def test_noise_leaves_the_stated_share_on_two_axes():
    generator = np.random.default_rng(3)
    noise = generator.normal(size=(30, 16, 16))
    again = [Cloud.of_rows(fill_diagonal(matrix + matrix.T)).plane[1].sum() for matrix in noise]
    assert plane_of_noise(16) == pytest.approx(np.mean(again), abs=0.03)


# --- maps


def wide(experts: int = 12, methods: tuple[str, ...] = ("pca", "tsne")) -> dict[str, pd.DataFrame]:
    """Two layers of experts whose router rows are three groups; expert 5 has no mean output."""
    generator = np.random.default_rng(0)
    frames, loads = [], []
    for layer in range(2):
        rows = np.eye(64)[np.arange(experts) % 3] + 0.05 * generator.standard_normal((experts, 64))
        outputs = np.where(np.arange(experts)[:, None] == 5, np.nan, generator.standard_normal((experts, 64)))
        for of, vectors in (("router", rows), ("outputs", outputs)):
            columns = expert_cosine_columns(of, vectors)
            frames.append(pd.DataFrame({"step": 0, "layer": layer, "layer_name": "moe", **columns}))
        times = np.arange(experts) / ((experts - 1) / 2)
        load = {"layer": layer, "phase": "prefill", "expert": range(experts), "times_even": times}
        loads.append(pd.DataFrame(load))
    pairs = pd.DataFrame(columns=[*TABLES["coactivation"].columns])
    columns = expert_maps({"expert_cosines": pd.concat(frames), "coactivation": pairs}, methods)
    domains = pd.DataFrame(
        [
            {"layer": layer, "expert": expert, "domain": domain, "affinity": affinity}
            for layer in range(2)
            for expert in range(experts)
            for domain, affinity in (
                ("code", 1.5 if expert > 5 else 0.5),
                ("prose", 0.5 if expert > 5 else 1.5),
            )
            if (layer, expert) != (0, 0)
        ]
    )
    maps = pd.DataFrame(join_columns(columns))
    made = {"maps": maps, "load_totals": pd.concat(loads, ignore_index=True), "domains": domains}
    return {**made, "maps": map_facts(made, "prefill")}


@pytest.mark.parametrize(("experts", "best"), [(12, "pca"), (32, "tsne")])
def test_a_slow_method_is_drawn_where_there_are_enough_experts(experts, best):
    maps = wide(experts)["maps"]
    assert set(maps["method"]) == {"pca", "tsne"}
    assert set(maps[maps["best"]]["method"]) == {best}


# --- steps, names


def test_maps_are_sized_by_load_and_coloured_by_the_domain_of_highest_affinity():
    tables = wide(methods=("pca",))
    figure = MAPS[0].draw(tables)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    per = figure.slider.per_value
    first = {trace["name"]: trace["text"] for trace in figure.data[:per]}
    assert first["no token"] == ["0"]
    assert first["code"] == [str(expert) for expert in range(6, 12)]
    assert first["prose"] == [str(expert) for expert in range(1, 6)]
    sizes = next(trace for trace in figure.data if trace["name"] == "code")["marker"]["size"]
    np.testing.assert_allclose(sizes, np.clip(11 * np.sqrt(np.arange(6, 12) / 5.5), 4, 40))
    rows = tables["maps"].query("of == 'router' and layer == 0")
    apart = np.hypot(*(rows[axis].to_numpy()[:, None] - rows[axis].to_numpy() for axis in "xy"))
    np.fill_diagonal(apart, np.inf)
    assert (apart.argmin(axis=1) % 3 == np.arange(12) % 3).all()
    share = rows["neighbours"].iloc[0]
    assert f"neighbours preserved: {share:.3g} (at random: 0.455)" in figure.slider.captions[0]
    assert set(tables["maps"].query("of == 'outputs'")["expert"]) == set(range(12)) - {5}


def test_earlier_names_of_figures_answer_at_their_page(traced_run):
    for name, page in {
        "cv_by_layer": "CV",
        "gini_by_layer": "Gini",
        "purity_bars": "purity",
        "cv_by_step": "CV",
        "routing_entropy_by_step": "routing entropy",
        "middle_unused_by_step": "unused experts",
    }.items():
        figure = traced_run.draw(name)
        assert figure.slider.values[figure.slider.start] == page, name
    assert traced_run.draw("usage_area").name == traced_run.draw("expert_by_step").name == "load_by_step"
    assert traced_run.draw("load_heatmap").name == "load_map"
    specs = [*FIGURES, *MONITORED]
    earlier = [name for spec in {spec.name: spec for spec in specs}.values() for name in spec.was]
    assert len(earlier) == len(set(earlier))
    assert all(Verb("v", figures=specs).figure(f"{name}_by_step") is not None for name in DIAGNOSTICS)


def test_a_run_draws_every_figure_it_lists_and_narrows_it_to_a_selection(traced_run):
    names = traced_run.figures()
    assert {"balance_by_layer", "balance_by_step", "load_by_step", "expert_map_router"} <= set(names)
    for name in names:
        validate(traced_run.draw(name))

    def line(name: str, **selection):
        return next(t for t in traced_run.draw(name, **selection).data if t.get("mode") == "lines+markers")

    assert list(line("cv_by_layer", layer=1)["x"]) == [1]
    assert list(line("cv_by_step")["x"]) == [100, 200]
    rows = traced_run.table("routing_layers").query(
        "step == 100 and phase == 'prefill' and domain == '' and metric == 'cv'"
    )
    np.testing.assert_array_equal(line("cv_by_layer", step=100)["y"], rows.sort_values("layer")["value"])


# --- Lorenz curve, load over training


def totals_of(loads_E, step=0, layer=0, tokens=1000, k=2):
    columns = load_total_columns(counted(np.asarray(loads_E, float)[None, None], tokens, layer, k))
    return {"step": step, "layer": layer, "layer_name": f"layer {layer}", **columns}


def test_of_random_routing_the_lorenz_curve_lies_in_its_band_and_uneven_loads_above_it():
    generator, outside = np.random.default_rng(0), []
    for _ in range(100):
        chosen = generator.random((1000, 16)).argsort(1)[:, :2]
        one = totals_of(np.bincount(chosen.ravel(), minlength=16))
        inside = (one["load_share_low"] <= one["load_share"]) & (one["load_share"] <= one["load_share_high"])
        outside.append(~inside[one["rank_share"] < 1])
    assert 0.01 < np.mean(outside) <= 0.08  # 200 draws make the ends
    rows = load_totals([totals_of([260, *[116] * 15])])
    figure = next(spec for spec in FIGURES if spec.name == "lorenz").draw({"load_totals": rows})
    band = next(trace for trace in figure.data if trace.get("fill") == "toself")
    curve = next(trace for trace in figure.data if trace["name"] == "layer 0")
    upper = dict(zip(band["x"][16:], band["y"][16:], strict=True))
    above = [share > upper[rank] for rank, share in zip(curve["x"], curve["y"], strict=True)]
    assert all(above[:8])
    assert not above[-1]


def test_load_over_training_is_a_small_map_per_layer_with_deaths_and_births_marked():
    """Expert 5 of layer 1 gets nothing in steps 30 to 50, and one token of 1,000 in step 60 is no birth."""
    generator, rows = np.random.default_rng(0), []
    for step in range(10, 110, 10):
        for layer in range(3):
            loads = generator.multinomial(8000, [1 / 8] * 8).astype(float)
            if layer == 1 and 30 <= step <= 60:
                loads[5] = step == 60
            rows.append(totals_of(loads, step, layer, 4000))
    totals = load_totals(rows)
    spec = next(spec for spec in STEPS if spec.name == "load_by_step")
    figure = spec.draw({"load_totals": totals})
    validate(figure)
    maps = [trace for trace in figure.data if trace["type"] == "heatmap"]
    assert [trace["name"] for trace in maps] == ["layer 0", "layer 1", "layer 2"]
    assert [trace["xaxis"] for trace in maps] == ["x", "x2", "x3"]
    assert len({(trace["zmin"], trace["zmax"]) for trace in maps}) == 1
    marks = {trace["name"]: trace for trace in figure.data if trace["type"] == "scatter"}
    assert {name: (mark["x"], mark["y"], mark["xaxis"]) for name, mark in marks.items()} == {
        "dies": (["30"], ["5"], "x2"),
        "comes back": (["70"], ["5"], "x2"),
    }
    np.testing.assert_allclose(
        maps[1]["customdata"][5], totals.query("layer == 1 and expert == 5")["times_even"]
    )
    assert [note["text"] for note in figure.layout["annotations"]] == ["layer 0", "layer 1", "layer 2"]


def test_an_expert_of_few_expected_tokens_is_not_called_dead():
    assert not totals_of([0, 6, 6, 4], tokens=8)["dead"].any()
    assert totals_of([0, 90, 90, 60], tokens=120)["dead"].tolist() == [True, False, False, False]
