from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moescope.spectral.alignment import AlignmentMatrix, argmax_accuracy, diagonal, margins
from moescope.weights.ambiguity import ambiguity_ranking, chance_at_k_star, choose_k_star, level

GOLDEN = Path(__file__).parent.parent / "golden"
MIXTRAL_D_MODEL = 4096


@pytest.fixture
def mixtral() -> pd.DataFrame:
    layers = pd.read_csv(GOLDEN / "mixtral_alignment.csv")
    return layers.assign(degenerate=layers["k"] >= MIXTRAL_D_MODEL)


def layer_rows(
    layer: int, margins: dict[int, float], accuracy: float = 0.5, z: float = 1.0, d_model: int = 1024
) -> pd.DataFrame:
    """Rows of alignment_layers of one layer of five experts: k -> margin, the rest equal at every k."""
    return pd.DataFrame(
        {
            "layer": layer,
            "k": list(margins),
            "align": 0.5,
            "argmax_accuracy": accuracy,
            "alignment_margin": list(margins.values()),
            "z_vs_shuffle": z,
            "z_ceiling": 2.0,
            "n_experts": 5,
            "degenerate": [k >= d_model for k in margins],
        }
    )


def layers_of(*frames: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True)


# --- the published ranking


def test_the_golden_ranking_comes_out_to_its_printed_digits(mixtral):
    printed = pd.read_csv(GOLDEN / "mixtral_ambiguity.csv", dtype=str)
    ranking = ambiguity_ranking(mixtral, allow_full_rank=True)
    assert len(ranking) == len(printed) == 6
    for name in printed.columns:
        for ours, theirs in zip(ranking[name], printed[name], strict=True):
            decimals = len(theirs.partition(".")[2])
            assert abs(float(ours) - float(theirs)) <= 0.5 * 10**-decimals + 1e-9, (name, ours, theirs)


def test_without_full_rank_the_first_layer_is_judged_at_a_k_below_the_width(mixtral):
    ranking = ambiguity_ranking(mixtral).set_index("layer")
    assert ranking.loc[0, "k_star"] == 1  # the largest margin but for the zero at k = 4096
    assert ranking.loc[0, "alignment_margin"] == pytest.approx(-0.001939)
    assert (ranking["k_star"] < MIXTRAL_D_MODEL).all()


def test_without_full_rank_other_layers_keep_their_k(mixtral):
    free, strict = (
        ambiguity_ranking(mixtral, allow_full_rank=allowed).set_index("layer")["k_star"]
        for allowed in (True, False)
    )
    assert free.drop(0).sort_index().equals(strict.drop(0).sort_index())


# --- choosing k*


def test_max_margin_takes_the_k_of_the_largest_margin_and_the_smallest_of_equals():
    assert choose_k_star(layer_rows(0, {1: 0.1, 2: 0.3, 4: 0.3, 8: 0.2})) == 2


def test_a_degenerate_k_is_chosen_only_where_allowed():
    rows = layer_rows(0, {1: -0.2, 1024: 0.0})
    assert choose_k_star(rows) == 1
    assert choose_k_star(rows, allow_full_rank=True) == 1024


def test_no_k_is_chosen_where_all_are_degenerate():
    assert choose_k_star(layer_rows(0, {8: 0.0}, d_model=8)) is None


def test_a_layer_without_a_usable_k_is_listed_without_values():
    layers = layers_of(
        layer_rows(0, {8: 0.0}, d_model=8),
        layer_rows(1, {8: 0.1}, z=0.5),
        layer_rows(2, {8: 0.3}, z=0.7, accuracy=1.0),
    )
    ranking = ambiguity_ranking(layers)
    assert ranking["layer"].tolist() == [1, 2, 0]
    assert ranking.loc[2, ["rank", "ambiguity_score", "k_star", "level"]].isna().all()
    assert ranking["ambiguity_score"][:2].notna().all()


# --- the score


def test_the_score_and_its_terms_worked_by_hand():
    layers = layers_of(
        layer_rows(4, {8: 0.1}, accuracy=0.25, z=0.5),
        layer_rows(5, {8: 0.2}, accuracy=0.5, z=2.0),
        layer_rows(6, {8: 0.5}, accuracy=1.0, z=1.0),
    )
    ranking = ambiguity_ranking(layers).set_index("layer")
    assert ranking.loc[4, ["accuracy_term", "margin_term", "z_term"]].tolist() == pytest.approx(
        [0.3, 0.3, 0.3]
    )
    assert ranking.loc[5, ["accuracy_term", "margin_term", "z_term"]].tolist() == pytest.approx(
        [0.2, 0.225, 0.0]
    )
    assert ranking.loc[6, ["accuracy_term", "margin_term", "z_term"]].tolist() == pytest.approx(
        [0.0, 0.0, 0.2]
    )
    assert ranking["ambiguity_score"].to_dict() == pytest.approx({4: 0.9, 5: 0.425, 6: 0.2})
    assert ranking["rank"].to_dict() == {4: 1, 5: 2, 6: 3}
    assert ranking["level"].to_dict() == {4: "high", 5: "medium", 6: "low"}


def test_the_absolute_score_worked_by_hand():
    """margin / align = 0.1 / 0.5 and z / ceiling = 1 / 2."""
    ranking = ambiguity_ranking(layer_rows(0, {8: 0.1}, accuracy=0.75, z=1.0))
    assert ranking["absolute_score"].tolist() == pytest.approx([0.4 * 0.25 + 0.3 * 0.8 + 0.3 * 0.5])


def test_the_absolute_score_clips_negative_margins_and_z_and_does_not_look_at_other_layers():
    hopeless = layer_rows(0, {8: -0.4}, accuracy=0.0, z=-3.0)
    perfect = layer_rows(1, {8: 0.5}, accuracy=1.0, z=2.0)
    both = ambiguity_ranking(layers_of(hopeless, perfect)).set_index("layer")["absolute_score"]
    assert both.to_dict() == pytest.approx({0: 1.0, 1: 0.0})
    assert ambiguity_ranking(perfect)["absolute_score"].tolist() == pytest.approx([0.0])


def random_layer(n: int, ks: list[int], seed: int = 0) -> AlignmentMatrix:
    """Alignments that grow with k, as sums of squares do; the width is the last k."""
    steps = np.random.default_rng(seed).random((len(ks), n, n)) / len(ks)
    return AlignmentMatrix(ks, steps.cumsum(axis=0), np.full(n, 64.0), d_model=ks[-1])


def rows_of(matrix: AlignmentMatrix) -> pd.DataFrame:
    """alignment_layers of one layer in its stored pairing, by the definitions of its columns."""
    M, n = matrix.align_KEE, matrix.n_experts
    return pd.DataFrame(
        {
            "layer": 0,
            "k": matrix.ks,
            "align": diagonal(M).mean(axis=1),
            "argmax_accuracy": argmax_accuracy(M),
            "alignment_margin": margins(M).mean(axis=1),
            "z_vs_shuffle": (diagonal(M).mean(axis=1) - M.mean(axis=(1, 2))) / M.std(axis=(1, 2)),
            "z_ceiling": np.sqrt(n - 1),
            "n_experts": n,
            "degenerate": np.array(matrix.ks) >= matrix.d_model,
        }
    )


def test_chance_at_k_star_is_the_mean_over_all_pairings_each_ranked_by_itself():
    layer = random_layer(5, [1, 16, 128, 200])
    scores = []
    for order in permutations(range(5)):
        paired = replace(layer, align_KEE=layer.align_KEE[:, :, list(order)])
        scores.append(ambiguity_ranking(rows_of(paired)).iloc[0])
    means = pd.DataFrame(scores)[["absolute_score", "argmax_accuracy", "alignment_margin", "z_score"]].mean()
    assert list(chance_at_k_star(layer).values()) == pytest.approx(means.tolist())


@pytest.mark.slow
def test_sampled_pairings_of_many_experts_agree_with_other_random_ones():
    """500 fresh pairings; a mean may differ by five standard errors."""
    layer = random_layer(16, [1, 8, 64, 128])
    generator = np.random.default_rng(1)
    orders = [generator.permutation(16) for _ in range(500)]
    rows = [
        ambiguity_ranking(rows_of(replace(layer, align_KEE=layer.align_KEE[:, :, order]))).iloc[0]
        for order in orders
    ]
    drawn = pd.DataFrame(rows)[["absolute_score", "argmax_accuracy", "alignment_margin", "z_score"]]
    drawn = drawn.astype(float)
    errors = 5 * drawn.std().to_numpy() * np.sqrt(1 / 500 + 1 / 2000)
    expected = np.array(list(chance_at_k_star(layer).values()))
    assert (np.abs(drawn.mean().to_numpy() - expected) <= errors).all()


def test_a_layer_without_a_usable_k_has_no_chance_level():
    layer = random_layer(4, [64])
    assert np.isnan(list(chance_at_k_star(layer).values())).all()


def test_one_layer_alone_has_no_score_rank_or_level_but_an_absolute_score():
    ranking = ambiguity_ranking(layer_rows(7, {8: 0.1}))
    assert ranking[["ambiguity_score", "rank", "level", "margin_term", "z_term"]].isna().all(axis=None)
    assert ranking["absolute_score"].notna().all()
    assert ranking["accuracy_term"].notna().all()


@pytest.mark.parametrize("equal", ["margin", "z"])
def test_equal_margins_or_equal_z_leave_the_score_undefined(equal):
    margins, z = ((0.1, 0.1), (0.5, 0.9)) if equal == "margin" else ((0.1, 0.2), (0.5, 0.5))
    ranking = ambiguity_ranking(
        layers_of(*(layer_rows(layer, {8: margins[layer]}, z=z[layer]) for layer in (0, 1)))
    )
    assert ranking["ambiguity_score"].isna().all()
    assert ranking[f"{equal}_term"].isna().all()
    assert ranking["z_term" if equal == "margin" else "margin_term"].notna().all()


@pytest.mark.parametrize(
    ("score", "expected"), [(0.71, "high"), (0.7, "medium"), (0.4, "medium"), (0.39, "low"), (np.nan, None)]
)
def test_levels_change_at_their_thresholds(score, expected):
    assert level(score) == expected
