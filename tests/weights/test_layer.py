import numpy as np
import pandas as pd
import pytest

from moescope.errors import BadInput
from moescope.spectral.pairing import pairing_test
from moescope.tables import conform
from moescope.weights.ambiguity import choose_k_star
from moescope.weights.layer import NULL_BINS, ScanSettings, analyse_layer, nulls_frame, pairs_frame
from moescope.weights.tables import TABLES
from planted import COLLAPSED_PAIR, planted_layer
from spectral.builders import expert_with_spectrum, lapack_align, layer_weights, matrix_of, random_weights


def frames_of(weights, keep_going=False, **settings) -> dict[str, pd.DataFrame]:
    return analyse_layer(weights, ScanSettings(**settings), keep_going=keep_going).frames


def align_table(weights, **settings) -> np.ndarray:
    return frames_of(weights, **settings)["pairs"]["align"].to_numpy()


def spoiled(seed: int, bad: int, value: float = np.nan, part: str = "gates", **sizes) -> tuple:
    """(a layer one of whose experts holds NaN, the same layer without that expert)."""
    whole = random_weights(seed, **sizes)
    stacks = {"gates": whole.gate_EFD, "ups": whole.up_EFD, "downs": whole.down_EDF}
    parts = {
        name: [stack.read(e).numpy().copy() for e in range(whole.n_experts)] for name, stack in stacks.items()
    }
    router = whole.router_ED.read().numpy().copy()
    rest = [expert for expert in range(whole.n_experts) if expert != bad]
    without = layer_weights(
        router[rest], **{name: [matrices[e] for e in rest] for name, matrices in parts.items()}
    )
    if part == "router":
        router[bad] = value
    else:
        parts[part][bad][2, 1] = value
    return layer_weights(router, **parts), without


# --- M(k) and what is read off it


@pytest.mark.parametrize("matrix", ["gate", "up", "gate_up", "down"])
@pytest.mark.parametrize(("hidden", "width"), [(20, 12), (8, 12)])
def test_every_entry_of_m_is_the_alignment_of_that_router_with_that_expert(matrix, hidden, width):
    weights = random_weights(0, n=4, hidden=hidden, width=width)
    router = weights.router_ED.read().numpy()
    rows = router / np.linalg.norm(router, axis=1, keepdims=True)
    pairs = frames_of(weights, matrix=(matrix,), precision="exact")["pairs"].set_index(
        ["k", "router_index", "expert"]
    )["align"]
    assert len(pairs) == pairs.index.get_level_values("k").nunique() * 16
    for expert in range(4):
        gate, up, down = (
            stack.read(expert).numpy() for stack in (weights.gate_EFD, weights.up_EFD, weights.down_EDF)
        )
        stacked = np.concatenate([gate / np.linalg.norm(gate), up / np.linalg.norm(up)])
        W = {"gate": gate, "up": up, "gate_up": stacked, "down": down.T}[matrix]
        for k in pairs.index.get_level_values("k").unique():
            np.testing.assert_allclose(pairs[k, :, expert], lapack_align(W, rows, k), atol=1e-9)


def test_alignment_columns_follow_from_m_as_defined():
    frames = frames_of(random_weights(1, n=5), precision="exact")
    for k, cells in frames["pairs"].groupby("k"):
        M = cells.pivot(index="router_index", columns="expert", values="align").to_numpy()
        rows = frames["alignment"].query("k == @k").sort_values("expert")
        own, others = M.diagonal(), np.where(np.eye(5, dtype=bool), -1, M).max(axis=1)
        np.testing.assert_allclose(rows["align"], own)
        np.testing.assert_allclose(rows["random_expectation"], k / 12)
        np.testing.assert_allclose(rows["effect_over_random"], own - k / 12)
        np.testing.assert_allclose(rows["shuffle_mean"], M.mean())
        np.testing.assert_allclose(rows["shuffle_std"], M.std(), atol=1e-12)
        np.testing.assert_allclose(rows["delta_vs_shuffle"], own - M.mean(), atol=1e-12)
        np.testing.assert_allclose(rows["margin"], own - others, atol=1e-12)
        assert rows["identified"].tolist() == (own > others + 1e-6).tolist()
        if k < 12:
            np.testing.assert_allclose(rows["z_vs_shuffle"], (own - M.mean()) / M.std())
        else:
            assert (rows["z_vs_shuffle"] == 0).all()


def test_layer_rows_are_means_over_experts():
    frames = frames_of(random_weights(2))
    by_k = frames["alignment"].groupby("k")
    layers = frames["alignment_layers"].set_index("k")
    for name in ("align", "random_expectation", "effect_over_random", "delta_vs_shuffle", "z_vs_shuffle"):
        np.testing.assert_allclose(layers[name], by_k[name].mean(), atol=1e-12)
    np.testing.assert_allclose(layers["alignment_margin"], by_k["margin"].mean(), atol=1e-12)
    np.testing.assert_allclose(layers["positive_margin_share"], by_k["identified"].mean().astype(float))
    np.testing.assert_allclose(layers["z_ceiling"], 2)  # five experts


def test_cos_squared_is_align_at_k_one_and_null_elsewhere():
    frames = frames_of(random_weights(0))
    for name in ("alignment", "alignment_layers"):
        at_one, elsewhere = (frames[name][frames[name]["k"].eq(1) == one] for one in (True, False))
        assert len(elsewhere) > 0
        assert elsewhere["cos_squared"].isna().all()
        np.testing.assert_array_equal(at_one["cos_squared"], at_one["align"])


def test_only_k_equal_to_the_width_is_degenerate():
    tall = frames_of(random_weights(0, hidden=20, width=12))["alignment_layers"].set_index("k")
    assert tall.index.tolist() == [1, 2, 4, 8, 12]
    assert tall["degenerate"].tolist() == [False, False, False, False, True]
    assert (tall.loc[12, "align"], tall.loc[12, "argmax_accuracy"]) == pytest.approx((1, 1 / 5))
    wide = frames_of(random_weights(0, hidden=8, width=12))["alignment_layers"].set_index("k")
    assert wide.index.tolist() == [1, 2, 4, 8]
    assert not wide["degenerate"].any()
    assert wide.loc[8, "align"] < 1


def test_the_k_grid_ends_at_the_largest_rank_where_all_experts_are_deficient():
    generator = np.random.default_rng(0)
    experts = [expert_with_spectrum(generator, 20, 12, np.linspace(2, 1, rank)) for rank in (3, 5, 6)]
    frames = frames_of(layer_weights(generator.standard_normal((3, 12)), experts))
    assert frames["alignment_layers"]["k"].tolist() == [1, 2, 4, 6]
    assert frames["spectra"]["rank"].tolist() == [3, 5, 6]
    assert frames["spectra"]["fallback"].all()
    at_top = frames["alignment"].query("k == 6")
    np.testing.assert_allclose(at_top["random_expectation"], np.array([3, 5, 6]) / 12)


# --- the choices that change an answer


def test_a_vector_common_to_all_router_rows_changes_raw_and_not_centered():
    weights = random_weights(0)
    moved = random_weights(0, router=weights.router_ED.read().numpy() + np.linspace(1, 2, 12))
    np.testing.assert_allclose(
        align_table(weights, router=("centered",)), align_table(moved, router=("centered",)), atol=1e-10
    )
    assert np.abs(align_table(weights) - align_table(moved)).max() > 0.1


def test_both_readings_together_equal_each_alone():
    weights = random_weights(3)
    both = frames_of(weights, router=("raw", "centered"))
    for view in ("raw", "centered"):
        alone = frames_of(weights, router=(view,))
        for name in ("alignment", "alignment_layers", "alignment_tests", "pairs", "nulls"):
            rows = both[name].query("router == @view").reset_index(drop=True)
            pd.testing.assert_frame_equal(rows, alone[name], check_exact=False, rtol=1e-9)


@pytest.mark.parametrize("matrix", ["gate", "gate_up"])
def test_moving_scale_between_norm_router_and_experts_leaves_the_folded_reading_alone(matrix):
    weights = random_weights(4)
    scale = np.random.default_rng(5).uniform(0.2, 5, 12)
    moved = random_weights(
        4,
        router=weights.router_ED.read().numpy() / scale,
        gates=[weights.gate_EFD.read(expert).numpy() / scale for expert in range(5)],
        ups=[weights.up_EFD.read(expert).numpy() / scale for expert in range(5)],
        norm=weights.norm_D.read().numpy() * scale,
    )
    folded = [align_table(layer, matrix=(matrix,), fold_norm=True) for layer in (weights, moved)]
    np.testing.assert_allclose(*folded, atol=1e-10)
    unfolded = [align_table(layer, matrix=(matrix,)) for layer in (weights, moved)]
    assert np.abs(unfolded[0] - unfolded[1]).max() > 0.05


# --- experts that cannot be used


@pytest.mark.parametrize("part", ["gates", "router"])
def test_keep_going_marks_the_expert_with_nulls_and_analyses_the_rest_as_if_it_were_not_there(part):
    weights, without = spoiled(0, bad=2, part=part)
    result = analyse_layer(weights, ScanSettings(), keep_going=True)
    reference = frames_of(without)
    for name in ("alignment", "spectra"):
        frame = result.frames[name]
        assert sorted(frame["expert"].unique()) == [0, 1, 2, 3, 4]
        marked = frame[frame["expert"] == 2].drop(
            columns=["layer", "layer_name", "matrix", "router", "fold_norm", "k", "expert"], errors="ignore"
        )
        assert len(marked) == len(frame) / 5
        assert marked.isna().all(axis=None)
        rest = frame[frame["expert"] != 2].assign(
            expert=lambda rows: rows["expert"].map({0: 0, 1: 1, 3: 2, 4: 3})
        )
        pd.testing.assert_frame_equal(rest.reset_index(drop=True), reference[name], check_dtype=False)
    # a row of the router counts as long as it is a vector, whatever its expert is
    rows_of_all = ["common_share", "common_share_chance"] if part == "gates" else []
    for name in ("alignment_layers", "alignment_tests", "orthogonality", "nulls"):
        found, expected = (
            frames[name].drop(columns=rows_of_all, errors="ignore") for frames in (result.frames, reference)
        )
        pd.testing.assert_frame_equal(found, expected)
    assert (
        set(result.frames["pairs"]["expert"]) == set(result.frames["pairs"]["router_index"]) == {0, 1, 3, 4}
    )
    assert set(result.frames["similarity"]["expert_b"]) == {1, 3, 4}
    assert result.setup["matrices"]["gate"]["skipped_experts"] == [2]
    assert len(result.setup["warnings"]) == 1
    assert "layer 3: expert 2 skipped" in result.setup["warnings"][0]


@pytest.mark.parametrize("matrices", [("gate", "down"), ("down", "gate")])
def test_an_expert_is_left_out_of_the_matrix_it_fails_in_and_of_no_other(matrices):
    weights, _ = spoiled(0, bad=2, part="gates")
    result = analyse_layer(weights, ScanSettings(matrix=matrices), keep_going=True)
    left_out = {matrix: result.setup["matrices"][matrix]["skipped_experts"] for matrix in matrices}
    assert left_out == {"gate": [2], "down": []}
    assert result.frames["alignment"].query("matrix == 'down'")["align"].notna().all()
    assert len(result.setup["warnings"]) == 1


def test_frames_with_marked_experts_conform_to_their_schema():
    weights, _ = spoiled(0, bad=0)
    for name, frame in frames_of(weights, keep_going=True).items():
        arrow = conform(TABLES[name], frame.assign(step=0))
        assert arrow.num_rows == len(frame)
    values = conform(TABLES["spectra"], frames_of(weights, keep_going=True)["spectra"].assign(step=0)).column(
        "singular_values"
    )
    assert values.null_count == 1


def test_a_layer_of_one_expert_is_rejected():
    with pytest.raises(BadInput, match="one expert only"):
        frames_of(random_weights(0, n=1))


# --- tables


def test_setup_says_under_what_the_numbers_were_made():
    setup = analyse_layer(random_weights(0, hidden=8, width=12), ScanSettings(seed=4)).setup
    expected = {"layer": 3, "n_experts": 5, "d_model": 12, "d_ff": 8, "dtype": "F64", "seed": 4}
    assert {name: setup[name] for name in expected} == expected
    of_gate = setup["matrices"]["gate"]
    assert (of_gate["k"], of_gate["fallbacks"], of_gate["skipped_experts"]) == ([1, 2, 4, 8], 0, [])
    assert of_gate["routers"]["raw"]["other_order"] is None
    router = random_weights(0, hidden=8, width=12).router_ED.read().numpy()
    shares = np.linalg.norm(router - router.mean(axis=0), axis=1) / np.linalg.norm(router, axis=1)
    assert setup["centered_share"] == pytest.approx(dict(enumerate(shares)))


def random_matrix(n: int, ks: list[int]):
    return matrix_of(*np.random.default_rng(n).random((len(ks), n, n)), ks=ks)


def test_pairs_keep_every_k_up_to_32_experts():
    ks = [1, 2, 8, 16, 64, 128, 256]
    frame = pairs_frame(random_matrix(32, ks), list(range(32)), best_k=2, k_star=64)
    assert frame["k"].unique().tolist() == ks
    assert len(frame) == len(ks) * 32 * 32


def test_pairs_beyond_32_experts_keep_three_ks_and_the_chosen_two():
    matrix = random_matrix(33, [1, 2, 8, 16, 64, 128, 256])
    frame = pairs_frame(matrix, list(range(33)), best_k=2, k_star=64)
    assert frame["k"].unique().tolist() == [1, 2, 16, 64, 128]
    assert pairs_frame(matrix, list(range(33)), best_k=1, k_star=None)["k"].unique().tolist() == [1, 16, 128]
    cell = frame.query("k == 64 and router_index == 5 and expert == 30")["align"]
    assert cell.tolist() == [matrix.align_KEE[4, 5, 30]]


def test_a_whole_layer_of_33_experts_keeps_the_pairs_of_its_best_k_and_k_star():
    frames = frames_of(random_weights(0, n=33, hidden=40, width=48))
    best_k = frames["alignment_tests"]["best_k"].item()
    k_star = choose_k_star(frames["alignment_layers"])
    assert set(frames["pairs"]["k"]) == {1, 16, best_k, k_star}
    assert frames["similarity"]["k"].unique().tolist() == [1, 16]
    assert not frames["alignment_tests"]["exact"].item()


def test_null_bins_hold_the_whole_null_and_its_mean():
    weights = random_weights(0, n=5, hidden=80, width=64)
    frames = frames_of(weights)
    nulls = frames["nulls"]
    assert set(nulls["k"]) == {32}
    assert nulls["bin"].tolist() == list(range(NULL_BINS))
    widths, centers = nulls["right"] - nulls["left"], (nulls["right"] + nulls["left"]) / 2
    assert (nulls["density"] * widths).sum() == pytest.approx(1)
    at_32 = frames["alignment_layers"].set_index("k").loc[32]
    assert (nulls["density"] * widths * centers).sum() == pytest.approx(
        at_32["shuffle_mean"], abs=widths.max() / 2
    )
    np.testing.assert_allclose(nulls["observed"], at_32["align"])


def test_the_mean_of_the_exact_null_is_the_mean_of_m():
    matrix = random_matrix(6, [1, 2, 4])
    np.testing.assert_allclose(
        pairing_test(matrix).null_means_KP.mean(axis=1), matrix.align_KEE.mean(axis=(1, 2))
    )


def test_nulls_are_kept_at_the_ks_of_the_density_figure_or_else_at_the_largest_usable_k():
    for ks, expected in (
        ([1, 16, 32, 64, 128, 256], [32, 128]),
        ([1, 4, 16], [16]),
        ([1, 4, 1000], [4]),
        ([1000], []),
    ):
        matrix = random_matrix(4, ks)  # d = 1000
        assert nulls_frame(matrix, pairing_test(matrix))["k"].unique().tolist() == expected


def test_the_null_of_routers_all_alike_is_one_value():
    """Pairings then differ by rounding only."""
    weights = random_weights(0, n=6, router=np.tile(np.linspace(1, 2, 12), (6, 1)))
    frames = frames_of(weights)
    nulls = frames["nulls"]
    assert (nulls["density"] > 0).sum() == 1
    assert frames["alignment_tests"][["p_value", "p_lower", "p_accuracy"]].eq(1).all(axis=None)
    usable = frames["alignment_layers"].query("not degenerate")
    np.testing.assert_allclose(usable["assignment_accuracy"], 1 / 6)


def test_copies_of_one_expert_are_chance_whatever_their_routers():
    """A dense model made into experts by copying, before any training."""
    weights = random_weights(0, n=6)
    copies = random_weights(0, n=6, gates=[weights.gate_EFD.read(0).numpy()] * 6)
    frames = frames_of(copies)
    np.testing.assert_allclose(frames["alignment_layers"]["argmax_accuracy"], 1 / 6)
    np.testing.assert_allclose(frames["alignment_layers"]["assignment_accuracy"], 1 / 6)
    assert frames["alignment_tests"]["verdict"].tolist() == ["chance"]
    assert frames["orthogonality"].set_index("k").loc[1, "n_pairs_above_0_7"] == 15


def test_similarity_rows_name_each_pair_once():
    frame = frames_of(random_weights(0, n=5))["similarity"]
    assert (frame["expert_a"] < frame["expert_b"]).all()
    assert (frame.groupby("k").size() == 10).all()
    assert frame["k"].unique().tolist() == [1, 2, 4, 8]
    assert frame["cosine"].isna().eq(frame["k"] > 1).all()


# --- layers whose truth is known

VERDICTS = {
    "random": "chance",
    "aligned": "identifying",
    "small_k": "identifying",
    "collapsed": "identifying",
    "permuted": "permuted",
}


@pytest.mark.parametrize(("kind", "verdict"), VERDICTS.items())
def test_planted_layers_are_called_what_they_are(kind, verdict):
    frames = frames_of(layer_weights(*planted_layer(kind, np.random.default_rng(0))))
    assert frames["alignment_tests"]["verdict"].tolist() == [verdict]
    collapsed = frames["similarity"].query("k == 1 and abs(cosine) > 0.7")[["expert_a", "expert_b"]]
    assert collapsed.to_numpy().tolist() == ([list(COLLAPSED_PAIR)] if kind == "collapsed" else [])
    if kind == "small_k":
        assert frames["alignment_tests"]["best_k"].tolist() == [1]
