"""Every reference line stands where an independent formula puts it, and captions name chance."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.plotting.style import GREY, number
from moescope.weights.figures import ACROSS_LAYERS, ONE_LAYER
from moescope.weights.figures_alignment import density_caption, discoveries, random_std_of_mean
from moescope.weights.figures_identification import ACROSS_STEPS, ACROSS_VIEWS
from moescope.weights.figures_layer import COMPLETE_VIEW
from moescope.weights.figures_redundancy import closest_by_chance, d_model_by_layer, share_above
from moescope.weights.report import layer_table, overlay, stack
from moescope.weights.report_findings import views
from moescope.weights.verb import scan

D, N = 256, 8  # of the planted checkpoint
KS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
RAMP, FLAT = KS / D, np.zeros(9)
SPREAD = np.array(
    [stats.beta(k / 2, (D - k) / 2).std() if k < D else 0.0 for k in KS]
)  # of a random direction's alignment


def grey(figure) -> dict[str, np.ndarray]:
    lines = [
        trace
        for trace in figure.data
        if (trace.get("line") or {}).get("color") == GREY and trace["mode"] == "lines"
    ]
    return {
        trace["name"]: np.asarray(trace["y"], float) for trace in lines if trace["name"] != "random pairings"
    }


ACROSS = {
    "accuracy_by_k": {"chance 1/8": np.full(9, 1 / N)},
    "margin_by_k": {"no preference": FLAT},
    "align_by_k": {"random direction": RAMP},
    "z_by_k": {"ceiling √(n−1)": np.full(9, math.sqrt(N - 1)), "chance": FLAT},
    "effect_by_k": {"random direction": FLAT},
    "delta_by_k": {"chance": FLAT},
    "cos_squared_by_layer": {"chance 1/d": np.full(5, 1 / D)},
    "shuffle_mean_by_k": {"random direction": RAMP},
    "shuffle_std_by_k": {"random directions": SPREAD},
    "shuffle_log_std_by_k": {"random directions": SPREAD[:-1]},
    "overlap_by_k": {"chance k/d": np.ones(7)},
    "orthogonality_by_layer": {
        "chance √(2/(πd))": np.full(5, math.sqrt(2 / (math.pi * D))),
        "redundancy 0.3": np.full(2, 0.3),
        "collapse 0.7": np.full(2, 0.7),
    },
    "ambiguity_by_layer": {"high above 0.7": np.full(2, 0.7), "medium above 0.4": np.full(2, 0.4)},
    "ranks_by_layer": {"rank": np.full(5, D)},
}
OF_A_LAYER = {
    "expert_cos_squared": {"chance 1/d": np.full(2, 1 / D)},
    "overlap_over_k": {"chance k/d": KS[:7] / D},
    "panel_align": {"random direction": RAMP},
    "panel_z_vs_shuffle": {"ceiling √(n−1)": np.full(9, math.sqrt(N - 1)), "chance": FLAT},
    "panel_effect_over_random": {"random direction": FLAT},
    "panel_delta_vs_shuffle": {"chance": FLAT},
    "panel_shuffle_mean": {"random direction": RAMP},
    "panel_shuffle_std": {"random directions": SPREAD},
    "panel_expert_cos_squared": {"random direction": np.full(2, 1 / D)},
    "panel_expert_align": {"random direction": np.full(2, 128 / D)},
    "panel_expert_z_vs_shuffle": {"chance": np.zeros(2)},
}


@pytest.fixture(scope="module")
def raw(planted_run):
    return views(planted_run)[0]


def check(figure, expected):
    lines = grey(figure)
    for name, y in expected.items():
        np.testing.assert_allclose(lines[name], y, atol=1e-12, err_msg=f"{figure.name}: {name}")


@pytest.mark.parametrize("name", ACROSS)
def test_reference_lines_across_layers_are_where_the_formula_says(name, raw):
    spec = next(spec for spec in ACROSS_LAYERS if spec.name == name)
    check(spec.draw(raw.tables), ACROSS[name])


@pytest.mark.parametrize("name", OF_A_LAYER)
def test_reference_lines_of_a_layer_are_where_the_formula_says(name, raw):
    spec = next(spec for spec in (*ONE_LAYER, *COMPLETE_VIEW) if spec.name == name)
    check(spec.draw(dict(raw.by_layer())[3]), OF_A_LAYER[name])


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


COMPARED = {
    "compare_orthogonality": (math.sqrt(2 / (math.pi * 16)), math.sqrt(2 / (math.pi * 32))),
    "compare_effective_rank": (16, 32),
}


@pytest.mark.parametrize("name", COMPARED)
def test_models_that_differ_are_compared_each_with_its_own_reference(name, two_models):
    spec, tables = two_models[name]
    lines = grey(spec.draw(tables))
    assert len(lines) == 2
    for (label, y), level, run in zip(lines.items(), COMPARED[name], ("few-run", "many-run"), strict=True):
        assert run in label
        np.testing.assert_allclose(y, level)


def test_views_with_one_reference_share_its_line(planted_run):
    spec = next(spec for spec in ACROSS_VIEWS if spec.name == "compare_orthogonality")
    assert len(grey(spec.draw(stack(views(planted_run))))) == 1


CHANCE_COLUMNS = {
    "compare_accuracy": ("alignment_tests", "chance_accuracy"),
    "compare_margin": ("ambiguity", "margin_chance"),
    "compare_ambiguity": ("ambiguity", "absolute_chance"),
    "compare_z": ("ambiguity", "z_chance"),
}


@pytest.mark.parametrize("name", CHANCE_COLUMNS)
def test_the_chance_of_a_chosen_k_is_the_tables_in_line_and_caption(name, planted_run):
    spec = next(spec for spec in ACROSS_VIEWS if spec.name == name)
    figure = spec.draw(stack(views(planted_run)))
    table, column = CHANCE_COLUMNS[name]
    rows = planted_run.table(table).sort_values("layer")
    for router, line in zip(("raw", "centered"), grey(figure).values(), strict=True):
        values = rows.loc[rows["router"] == router, column]
        np.testing.assert_allclose(line, values)
        assert f"({number(values.mean())})" in figure.caption


def test_steps_are_drawn_with_their_reference(tmp_path):
    models = [write_checkpoint(tmp_path / f"step{s}", tiny_tensors(seed=s), tiny_config()) for s in (1, 2)]
    run = scan(*models, out=tmp_path / "run", quiet=True)
    found, ambiguity = views(run), run.table("ambiguity")
    levels = {
        "accuracy": run.table("alignment_tests")["chance_accuracy"].mean(),
        "margin": ambiguity["margin_chance"].mean(),
        "ambiguity": ambiguity["absolute_chance"].mean(),
        "orthogonality": math.sqrt(2 / (math.pi * 16)),
    }
    for spec in ACROSS_STEPS:
        (y,) = grey(spec.draw(stack(found))).values()
        np.testing.assert_allclose(y, levels[spec.name.removeprefix("steps_")])


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
        expected = raw.facts(4)["other_order"]["p"] if layer == 4 else test["p_value"]
        assert cells["p_value"] == pytest.approx(expected, rel=1e-5)
        assert cells["n_pairs_above_0_7"] == (1 if layer == 3 else 0)


def test_the_share_of_random_pairs_above_a_cosine_agrees_with_simulation():
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((40_000, 2, 64))
    cosines = np.abs(
        (rows[:, 0] * rows[:, 1]).sum(1)
        / np.linalg.norm(rows[:, 0], axis=1)
        / np.linalg.norm(rows[:, 1], axis=1)
    )
    assert (cosines > 0.3).mean() == pytest.approx(share_above(0.3, 64), abs=0.002)
    assert share_above(0.3, 64) == pytest.approx(0.0152, abs=2e-4)


def test_the_width_is_the_models(raw):
    assert set(d_model_by_layer(raw.tables)) == {D}


def test_the_closest_pair_by_chance_agrees_with_simulation():
    generator = np.random.default_rng(0)
    closest = []
    for _ in range(400):
        rows = generator.standard_normal((N, D))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        closest.append(np.abs(rows @ rows.T - np.eye(N)).max())
    assert closest_by_chance(N * (N - 1) // 2, D) == pytest.approx(np.median(closest), rel=0.05)


def test_the_spread_of_a_mean_alignment_agrees_with_simulation():
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((4000, N, 64))
    align = (rows[..., :16] ** 2).sum(-1) / (rows**2).sum(-1)
    row = pd.Series({"random_expectation": 16 / 64, "n_experts": N, "d_model": 64})
    assert random_std_of_mean(row) == pytest.approx(align.mean(1).std(), rel=0.05)


def test_density_captions_say_how_many_layers_chance_puts_outside():
    caption = density_caption(32, [1, 2], [4], 50)
    assert ": layers 1 and 2;" in caption
    assert ": layer 4 (chance: 0.5 of 50 layers each" in caption
    assert "no layer (chance: 0.5 of 50 layers each" in density_caption(32, [1], [], 50)
    none = density_caption(32, [], [], 50)
    assert "within the middle 98 %" in none
    assert "(chance: 1 of 50 layers outside" in none


def test_captions_of_a_random_model_claim_nothing_and_name_chance(tmp_path):
    tensors = tiny_tensors(layers=8, experts=8, d_model=32, d_ff=48, seed=4)
    model = write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=8, experts=8))
    view = views(scan(model, out=tmp_path / "run", quiet=True))[0]
    captions = {spec.name: spec.draw(view.tables).caption for spec in ACROSS_LAYERS}
    assert captions["accuracy_by_k"].startswith("At chance: layers 0 to 7")
    assert captions["delta_by_k"].startswith("In no layer")
    assert "Random router rows: 0 ± " in captions["effect_by_k"]
    assert "random router rows: 1 ± 1)" in captions["cos_squared_by_layer"]
    assert "(chance: about half)" in captions["delta_by_expert"]
    for _, tables in view.by_layer():
        drawn = {spec.name: spec.draw(tables).caption for spec in ONE_LAYER}
        assert "(chance: 1)" in drawn["pair_matrix"]
        assert "(chance: 7)" in drawn["margin_histogram"]
        assert "0.0125)" in drawn["expert_cos_squared"]


def test_discoveries_are_those_of_scipy():
    from scipy.stats import false_discovery_control

    generator = np.random.default_rng(0)
    for _ in range(50):
        p = pd.Series(generator.uniform(size=12) ** 4, index=range(100, 112))
        assert sorted(discoveries(p)) == list(p.index[false_discovery_control(p) <= 0.05])


def test_the_score_at_chance_follows_the_runs_own_weights(tmp_path):
    model = write_checkpoint(tmp_path / "model", tiny_tensors(), tiny_config())
    run = scan(model, ambiguity_weights=(0.6, 0.2, 0.2), out=tmp_path / "run", quiet=True)
    spec = next(spec for spec in ACROSS_LAYERS if spec.name == "absolute_ambiguity_by_layer")
    levels = run.table("ambiguity").sort_values("layer")
    check(spec.draw(views(run)[0].tables), {"a layer at chance": levels["absolute_chance"]})
    # at a given k every term but that of accuracy is at its worst; choosing k lowers all three
    assert (levels["absolute_chance"] < 0.6 * 3 / 4 + 0.4).all()
    default = scan(model, out=tmp_path / "default", quiet=True).table("ambiguity").sort_values("layer")
    assert (levels["absolute_chance"] < default["absolute_chance"]).all()
    np.testing.assert_allclose(levels["accuracy_chance"], default["accuracy_chance"])


def test_the_density_ridge_rises_from_its_layer_and_the_diamond_stands_at_the_observed_value(raw):
    nulls = raw.tables["nulls"]
    figure = next(spec for spec in ACROSS_LAYERS if spec.name == "null_density").draw(raw.tables)
    ridge, diamonds = figure.data[2:4]  # at k = 128
    rows = ridge["y"][np.isfinite(ridge["y"])]
    assert rows.min() == 0
    assert 4 < rows.max() < 5  # the first layer on top, above its own line
    observed = nulls[nulls["k"] == 128].groupby("layer")["observed"].first()
    assert dict(zip(diamonds["customdata"], diamonds["x"], strict=True)) == pytest.approx(observed.to_dict())


def test_margins_that_are_negative_are_counted_as_such(raw):
    figure = next(spec for spec in ONE_LAYER if spec.name == "margin_histogram").draw(dict(raw.by_layer())[3])
    assert figure.caption == "1 of 8 margins are negative (chance: 7)."
