"""Reference lines stand where an independent formula puts them; chance levels agree with simulation."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.plotting.style import GREY
from moescope.spectral.decompose import random_rank
from moescope.spectral.subspaces import closest_by_chance, nearest_experts, overlap_std, share_above
from moescope.types import SIGNIFICAND_BITS
from moescope.weights.figures import NAMED
from moescope.weights.layer import random_spread
from moescope.weights.report import layer_table, overlay, stack, views
from moescope.weights.verb import scan

D, N = 256, 8  # of the planted checkpoint
KS = np.array([1, 2, 4, 8, 16, 32, 64, 128])  # below d
RAMP, FLAT = KS / D, np.zeros(8)
SPREAD = np.array([stats.beta(k / 2, (D - k) / 2).std() for k in KS])  # of a random direction's alignment


def page_of(figure):
    """The traces of the page that a figure opens with."""
    if figure.slider is None:
        return figure.data
    per, start = figure.slider.per_value, figure.slider.start
    return figure.data[start * per : (start + 1) * per]


def grey(figure) -> dict[str, np.ndarray]:
    """Name -> level of grey lines and of the grey ticks of bars."""
    found = {}
    for trace in page_of(figure):
        colors = {(trace.get(part) or {}).get("color") for part in ("line", "marker")}
        if GREY in colors and trace["name"] and trace["name"] != "at chance":
            found[trace["name"]] = np.asarray(trace["y"], float)
    return found


COSINE = {
    "random √(2/(πd)), mean |cos|": np.full(5, math.sqrt(2 / (math.pi * D))),
    "redundancy": np.full(5, 0.3),
    "shared direction": np.full(5, 0.7),
}
ACROSS = {
    "accuracy_by_k": {"chance 1/n": np.full(8, 1 / N)},
    "margin_by_k": {"no preference": FLAT},
    "align_by_k": {"random direction": RAMP},
    "z_by_k": {"ceiling √(n−1)": np.full(8, math.sqrt(N - 1)), "average pair": FLAT},
    "effect_by_k": {"random direction": FLAT},
    "delta_by_k": {"average pair": FLAT},
    "cos_squared_by_layer": {"random direction": np.full(5, 1 / D)},
    "shuffle_mean_by_k": {"random direction": RAMP},
    "shuffle_std_by_k": {"random directions": SPREAD},
    "overlap_by_k": {"chance k/d": KS[:7] / D},
    "orthogonality_by_layer": COSINE,
    "ambiguity_by_layer": {"high above 0.7": np.full(5, 0.7), "medium above 0.4": np.full(5, 0.4)},
    "ranks_by_layer": {"rank, effective rank": np.full(5, D)},
    "expert_cos_squared": {"random direction": np.full(N, 1 / D)},
    "panel_align": {"random direction": RAMP},
    "panel_z_vs_shuffle": {"ceiling √(n−1)": np.full(8, math.sqrt(N - 1)), "average pair": FLAT},
    "panel_shuffle_std": {"random directions": SPREAD},
}


@pytest.fixture(scope="module")
def raw(planted_run):
    return views(planted_run)[0]


@pytest.mark.parametrize("name", ACROSS)
def test_reference_lines_are_where_the_formula_says(name, planted_run):
    drawn = grey(planted_run.draw(name))
    for line, y in ACROSS[name].items():
        np.testing.assert_allclose(drawn[line], y, atol=1e-12, err_msg=f"{name}: {line}")


@pytest.fixture(scope="module")
def two_models(tmp_path_factory):
    """Random models of 4 experts at width 16 and 32 experts at width 32."""
    folder = tmp_path_factory.mktemp("two")
    runs = []
    for name, experts, width in (("few", 4, 16), ("many", 32, 32)):
        tensors = tiny_tensors(layers=2, experts=experts, d_model=width, d_ff=48)
        model = write_checkpoint(folder / name, tensors, tiny_config(layers=2, experts=experts))
        runs.append(scan(model, out=folder / f"{name}-run", quiet=True))
    (section,) = overlay(runs)
    return {spec.name: (spec, tables) for spec, tables in section.sections[-1].figures}


def test_models_that_differ_are_compared_within_the_range_of_their_levels(two_models):
    spec, tables = two_models["orthogonality_by_layer"]
    assert set(tables["orthogonality"]["view"]) == {"few-run · gate", "many-run · gate"}
    levels = [math.sqrt(2 / (math.pi * width)) for width in (16, 32)]
    (line,) = [y for name, y in grey(spec.draw(tables)).items() if name.startswith("random")]
    np.testing.assert_allclose(line, np.mean(levels))
    spec, tables = two_models["ranks_by_layer"]
    drawn = spec.draw(tables)
    lines = {(trace["name"], trace["line"].get("dash")) for trace in drawn.data if trace["name"]}
    assert {(f"{run}-run · gate", dash) for run in ("few", "many") for dash in ("solid", "dash")} <= lines
    assert drawn.layout["yaxis"]["title"]["text"] == "effective rank (solid), stable rank (dashed)"


def test_numbers_without_a_router_are_drawn_once_for_all_routers(planted_run):
    drawn = NAMED["orthogonality_by_layer"].draw(stack(views(planted_run)))
    lines = [trace for trace in drawn.data if trace["name"] == "gate"]
    assert [trace["line"]["dash"] for trace in lines] == ["solid", "dash"]


CHANCE_COLUMNS = {
    "argmax_accuracy": "accuracy_chance",
    "alignment_margin": "margin_chance",
    "absolute_score": "absolute_chance",
    "z_score": "z_chance",
}


@pytest.mark.parametrize("quantity", CHANCE_COLUMNS)
def test_the_chance_of_a_chosen_k_is_the_tables(quantity, planted_run):
    drawn = grey(planted_run.draw("identification_by_layer", quantity=quantity))
    (line,) = [y for name, y in drawn.items() if name in ("random pairings", "a layer at chance")]
    rows = planted_run.table("ambiguity").query("router == 'raw'").sort_values("layer")
    np.testing.assert_allclose(line, rows[CHANCE_COLUMNS[quantity]])


def test_the_table_of_layers_holds_the_tests_own_numbers_and_chance(raw, planted_run):
    table = layer_table(raw)
    names = [column["name"] for column in table["columns"]]
    tests = planted_run.table("alignment_tests").query("router == 'raw'").set_index("layer")
    for row in table["rows"]:
        cells = dict(zip(names, row, strict=True))
        layer = cells["layer"]
        test = tests.loc[layer]
        assert cells["best_accuracy"] == pytest.approx(test["best_accuracy"])
        assert cells["p_accuracy"] == pytest.approx(test["p_accuracy"], rel=1e-5)
        assert cells["q_value"] == pytest.approx(test["q_value"], rel=1e-5)
        assert 1 / 8 < cells["chance_accuracy"] < 0.45  # the best of eight ks
        assert cells["chance"] == pytest.approx(math.sqrt(2 / (math.pi * D)), rel=1e-5)
        expected = raw.other_order(4)["p"] if layer == 4 else test["p_value"]
        assert cells["p_value"] == pytest.approx(expected, rel=1e-5)
        assert cells["n_pairs_above_0_7"] == (1 if layer == 3 else 0)


# --- columns that say what chance gives


def random_cosines(n: int, d: int, draws: int) -> np.ndarray:
    """[draws, pairs] |cos| of n random directions."""
    rows = np.random.default_rng(0).standard_normal((draws, n, d))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    first, second = np.triu_indices(n, 1)
    return np.abs(np.einsum("dpi,dpi->dp", rows[:, first], rows[:, second]))


def test_the_share_of_random_pairs_above_a_cosine_agrees_with_simulation():
    cosines = random_cosines(2, 64, 40_000)
    assert (cosines > 0.3).mean() == pytest.approx(share_above(0.3, 64), abs=0.002)
    assert share_above(0.3, 64) == pytest.approx(0.0152, abs=2e-4)


def test_the_closest_pair_by_chance_agrees_with_simulation(planted_run):
    closest = random_cosines(N, D, 400).max(axis=1)
    assert closest_by_chance(N * (N - 1) // 2, D) == pytest.approx(np.median(closest), rel=0.05)
    rows = planted_run.table("orthogonality").query("k == 1")
    assert rows["max_abs_chance"].unique() == pytest.approx(np.median(closest), rel=0.05)
    pairs = planted_run.table("similarity").query("k == 1").groupby("layer").size()
    expected = 2 * stats.norm.sf(0.3 * 16) * 28  # nearly normal at d = 256
    assert rows["n_pairs"].tolist() == pairs.tolist() == [28] * 5
    assert rows["expected_above_0_3"].unique() == pytest.approx(expected, rel=0.5)
    exact = 28 * stats.beta(0.5, (D - 1) / 2).sf([0.09, 0.49])
    assert rows["expected_above_0_3"].unique() == pytest.approx(exact[0])
    assert rows["expected_above_0_7"].unique() == pytest.approx(exact[1])


def test_the_nearest_expert_by_chance_agrees_with_simulation():
    cosines = random_cosines(N, 64, 2000)
    of_first = cosines[:, :7].max(axis=1)  # pairs (0, 1) to (0, 7)
    found = nearest_experts(cosines[0], N, 64)
    assert found["nearest_chance"] == pytest.approx(np.median(of_first), rel=0.03)
    low, high = np.quantile(of_first, [0.1587, 0.8413])
    assert found["nearest_std"] == pytest.approx((high - low) / 2, rel=0.1)
    assert found["nearest_cosine"][0] == of_first[0]
    assert found["nearest_p"][0] == pytest.approx((of_first >= of_first[0]).mean(), abs=0.03)


def test_the_nearest_expert_is_the_tables_largest_cosine(planted_run):
    spectra = planted_run.table("spectra").set_index(["layer", "expert"])
    pairs = planted_run.table("similarity").query("k == 1")
    for (layer, expert), row in spectra.iterrows():
        of_expert = pairs[(pairs["layer"] == layer) & pairs[["expert_a", "expert_b"]].eq(expert).any(axis=1)]
        top = of_expert.loc[of_expert["cosine"].abs().idxmax()]
        assert row["nearest_cosine"] == pytest.approx(abs(top["cosine"]))
        assert {expert, row["nearest"]} == {top["expert_a"], top["expert_b"]}
    beyond = spectra.index[spectra["nearest_beyond"]].tolist()
    assert {(3, 2), (3, 5)} <= set(beyond)  # the planted copies
    places = spectra["place"].unstack()
    assert all(sorted(row) == list(range(N)) for row in places.to_numpy().tolist())
    assert abs(places.loc[3, 2] - places.loc[3, 5]) == 1


@pytest.mark.parametrize(("k", "d"), [(1, 16), (4, 16), (8, 32)])
def test_the_spread_of_random_overlaps_agrees_with_simulation(k, d):
    generator = np.random.default_rng(0)
    bases = np.linalg.qr(generator.standard_normal((4000, d, k)))[0]
    overlaps = (bases[:, :k] ** 2).sum(axis=(1, 2)) / k  # with the first k coordinates
    assert overlaps.mean() == pytest.approx(k / d, rel=0.05)
    assert overlap_std(k, d) == pytest.approx(overlaps.std(), rel=0.05)


def test_overlaps_at_one_vector_are_squared_cosines_with_chance_one_over_d(planted_run):
    row = planted_run.table("orthogonality").query("k == 1 and layer == 3").iloc[0]
    cosines = planted_run.table("similarity").query("k == 1 and layer == 3")["cosine"]
    assert row["overlap"] == pytest.approx((cosines**2).mean())
    assert (row["overlap_least"], row["overlap_most"]) == pytest.approx(
        ((cosines**2).min(), (cosines**2).max())
    )
    assert row["overlap_chance"] == 1 / D


def test_the_spread_of_a_random_alignment_and_of_its_mean_agree_with_simulation(planted_run):
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((4000, N, 64))
    align = (rows[..., :16] ** 2).sum(-1) / (rows**2).sum(-1)
    assert random_spread(np.array(16 / 64), 64) == pytest.approx(align.std(), rel=0.05)
    layers = planted_run.table("alignment_layers").query("k < 256")
    np.testing.assert_allclose(layers["random_std"], layers["random_spread"] / math.sqrt(N))
    assert random_spread(np.array(16 / 64), 64) / math.sqrt(N) == pytest.approx(align.mean(1).std(), rel=0.05)
    experts = planted_run.table("alignment").query("k < 256")
    np.testing.assert_allclose(experts["random_spread"], experts["k"].map(dict(zip(KS, SPREAD, strict=True))))
    pairs = planted_run.table("pairs").query("k < 256")
    np.testing.assert_allclose(pairs["random_spread"], pairs["k"].map(dict(zip(KS, SPREAD, strict=True))))
    np.testing.assert_allclose(pairs["random_expectation"], pairs["k"] / D)


def test_the_spread_of_means_over_random_pairs_agrees_with_simulation(planted_run):
    rows = planted_run.table("orthogonality").query("layer == 0").set_index("k")
    cosines = random_cosines(N, D, 2000)
    assert rows.loc[1, "mean_abs_std"] == pytest.approx(cosines.mean(axis=1).std(), rel=0.05)
    assert rows.loc[1, "overlap_std"] == pytest.approx((cosines**2).mean(axis=1).std(), rel=0.05)
    assert rows.loc[16, "overlap_std"] == pytest.approx(overlap_std(16, D) / math.sqrt(28))
    layers = planted_run.table("alignment_layers").query("not degenerate")
    hits = (np.random.default_rng(0).integers(N, size=(20_000, N)) == 0).mean(axis=1)
    assert layers["accuracy_std"].unique() == pytest.approx(hits.std(), rel=0.05)
    np.testing.assert_allclose(layers["z_std"], layers["delta_std"] / layers["shuffle_std"])


def test_the_spread_over_pairings_is_that_of_all_of_them(planted_run):
    """8! pairings of layer 3 at k = 16, one by one, and the share of them that match as well."""
    from itertools import permutations

    where = "layer == 3 and router == 'raw'"
    pairs = planted_run.table("pairs").query(f"{where} and k in (16, 32)")
    for k, rows in pairs.groupby("k"):
        M = rows.pivot(index="router_index", columns="expert", values="align").to_numpy()
        means = M[np.arange(N), np.array(list(permutations(range(N))))].mean(axis=1)
        layer = planted_run.table("alignment_layers").query(f"{where} and k == {k}").iloc[0]
        assert layer["delta_std"] == pytest.approx(means.std())
        assert layer["delta_vs_shuffle"] / layer["delta_std"] == pytest.approx(layer["perm_z"])
    null = planted_run.table("nulls").query(f"{where} and k == 32").iloc[0]
    assert (null["expected"], null["expected_std"]) == pytest.approx((means.mean(), means.std()))
    assert null["share_above"] == pytest.approx((means >= M.diagonal().mean() - 1e-12).mean())


def test_corrected_tests_of_layers_are_those_of_scipy(planted_run):
    tests = planted_run.table("alignment_tests")
    for q, p in (("q_lower", "p_lower"), ("q_value", "p_value"), ("q_order", "p_order")):
        np.testing.assert_allclose(tests[q], stats.false_discovery_control(tests[p]))
    looks = 2 * 5 * 9 * N  # views, layers, ks, experts
    expected = np.minimum(stats.binom(N, 1 / N).sf(tests["hub_rows"] - 1) * N, 1) * looks / N
    np.testing.assert_allclose(tests["hub_p"], np.minimum(expected, 1))


def test_what_is_unusual_about_a_layer_follows_from_its_rows(planted_run):
    tests = planted_run.table("alignment_tests").query("router == 'raw'").set_index("layer")
    layers = planted_run.table("alignment_layers").query("router == 'raw' and not degenerate")
    pairs = planted_run.table("pairs").query("router == 'raw' and best")
    for layer, rows in layers.groupby("layer"):
        test = tests.loc[layer]
        assert test["lowest_k"] == rows.loc[rows["perm_z"].idxmin(), "k"]
        good = rows.loc[rows["argmax_accuracy"] >= 0.9, "k"]
        assert test["last_good_k"] == good.max() if len(good) else pd.isna(test["last_good_k"])
        last = rows.loc[rows["k"].idxmax()]
        assert (test["last_k"], test["last_accuracy"]) == (last["k"], last["argmax_accuracy"])
        M = pairs[pairs["layer"] == layer].pivot(index="router_index", columns="expert", values="align")
        wins = M.idxmax(axis=1).value_counts()
        assert test["hub_rows"] == wins.max()
        assert wins[test["hub_expert"]] == wins.max()
        assert test["false_calls"] == pytest.approx(0.06)
    ambiguity = planted_run.table("ambiguity").query("router == 'raw'").set_index("layer")
    beats = tests["verdict"].isin(["identifying", "non_random"])
    assert ambiguity["beats_chance"].sort_index().tolist() == beats.sort_index().tolist()
    best = planted_run.table("alignment").query("router == 'raw' and best")
    assert best.groupby("layer")["k"].first().tolist() == tests["best_k"].tolist()
    compared = planted_run.table("alignment").query("reference")
    assert set(compared["k"]) == {128}
    assert set(planted_run.table("alignment_layers").query("reference")["k"]) == {128}


def test_ranks_of_layers_and_spectra_are_those_of_their_experts(planted_run):
    spectra = planted_run.table("spectra")
    layers = planted_run.table("spectra_layers").set_index("layer")
    for name in ("effective_rank", "stable_rank"):
        grouped = spectra.groupby("layer")[name]
        np.testing.assert_allclose(layers[f"{name}_median"], grouped.median())
        np.testing.assert_allclose(layers[f"{name}_least"], grouped.min())
        np.testing.assert_allclose(layers[f"{name}_most"], grouped.max())
    assert layers["rank"].tolist() == spectra.groupby("layer")["rank"].max().tolist()
    setup = planted_run.info["setup"][0]
    shape = (setup["d_ff"], setup["d_model"])
    assert set(spectra["random_rank"]) == {random_rank(shape, SIGNIFICAND_BITS[setup["dtype"]])}
    drawn = planted_run.table("spectrum").query("layer == 2 and expert == 5")
    values = spectra.query("layer == 2 and expert == 5")["singular_values"].iloc[0]
    places = drawn["place"].tolist()
    assert (places[0], places[-1]) == (1, len(values))
    assert len(places) <= 60
    np.testing.assert_array_equal(drawn["singular_value"], values[drawn["place"] - 1])


def test_captions_of_a_random_model_claim_nothing_and_name_chance(tmp_path):
    tensors = tiny_tensors(layers=4, experts=8, d_model=32, d_ff=48, seed=4)
    model = write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=4, experts=8))
    run = scan(model, out=tmp_path / "run", router="raw", quiet=True)
    assert "(chance 1/n: 0.125)" in run.draw("identification_by_k").caption
    for name in ("alignment_by_expert", "cosine_heatmap", "overlap_heatmap", "pair_matrix"):
        z = np.concatenate([np.ravel(trace["z"]) for trace in run.draw(name).data if "z" in trace])
        known = z[np.isfinite(z)]
        assert (known != 0).mean() <= 0.1, name
    assert "or below 0 (no preference)" in run.draw("margin_histogram").caption


def test_margins_that_are_negative_are_counted_as_such(raw):
    drawn = NAMED["margin_histogram"].draw(dict(raw.by_layer())[3])
    assert drawn.caption == "1 of 8 at or below 0 (no preference)."
