"""Statistics of a scan against those published for Mixtral-8x7B-v0.1 (digits: golden/figures.toml)."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq, least_squares

from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.pairing import pairing_test
from moescope.spectral.subspaces import orthogonality, similarities
from moescope.weights.figures import COMPLETE, NAMED
from moescope.weights.layer import alignment_frames

GOLDEN = Path(__file__).parents[1] / "golden"
LAYERS = pd.read_csv(GOLDEN / "mixtral_alignment.csv")
COSINES = pd.read_csv(GOLDEN / "mixtral_cos2_per_expert.csv")
ORTHOGONALITY = pd.read_csv(GOLDEN / "mixtral_orthogonality.csv").set_index("layer")
D_MODEL, N = 4096, 8


def published_matrix(layer: int) -> np.ndarray:
    """M(1) with the published diagonal, and others of which the mean and standard deviation of all 64 entries
    are those that the published delta and z imply."""
    row = LAYERS.query("layer == @layer and k == 1").iloc[0]
    own = COSINES.query("layer == @layer").sort_values("expert")["cos_squared"].to_numpy()
    mean, std = row["align"] - row["delta_vs_shuffle"], row["delta_vs_shuffle"] / row["z_vs_shuffle"]
    others = (N * N * mean - own.sum()) / (N * N - N)
    pattern = np.random.default_rng(0).exponential(size=(N, N))
    np.fill_diagonal(pattern, 0)
    away = ~np.eye(N, dtype=bool)
    pattern[away] -= pattern[away].mean()

    def filled(spread: float) -> np.ndarray:
        return np.where(away, others + spread * pattern, np.diag(own))

    if filled(0).std() >= std:
        return filled(0)
    return filled(brentq(lambda spread: filled(spread).std() - std, 0, 1))


@pytest.mark.parametrize("layer", sorted(ORTHOGONALITY.index))
def test_per_expert_cosines_give_the_published_means(layer):
    """Alignment at k = 1 is cos² and its mean over experts is that of the layer; so are effect, delta and z,
    but for the noise of 200 shuffles in the latter two."""
    matrix = AlignmentMatrix([1], published_matrix(layer)[None], np.full(N, float(D_MODEL)), D_MODEL)
    per_expert, per_layer = alignment_frames(matrix, pairing_test(matrix), list(range(N)), {})
    printed, found = LAYERS.query("layer == @layer and k == 1").iloc[0], per_layer.iloc[0]
    for name in ("align", "cos_squared", "effect_over_random"):
        assert found[name] == pytest.approx(printed[name], abs=1.1e-6), name
    assert abs(found["delta_vs_shuffle"] - printed["delta_vs_shuffle"]) <= 0.1 * found["shuffle_std"]
    assert abs(found["z_vs_shuffle"] - printed["z_vs_shuffle"]) <= 0.35
    expected = COSINES.query("layer == @layer").sort_values("expert")["cos_squared"]
    np.testing.assert_allclose(per_expert["cos_squared"], expected, atol=1e-12)


def test_the_complete_view_ends_with_cos_squared_alignment_and_z_of_every_expert_at_one_k():
    layer = 30
    matrix = AlignmentMatrix([1], published_matrix(layer)[None], np.full(N, float(D_MODEL)), D_MODEL)
    frames = alignment_frames(matrix, pairing_test(matrix), list(range(N)), {})
    tables = {
        name: frame.assign(layer=layer, reference=True)
        for name, frame in zip(("alignment", "alignment_layers"), frames, strict=True)
    }
    cosine, align, z = (spec.draw(tables) for spec in COMPLETE[-3:])
    expected = COSINES.query("layer == @layer").sort_values("expert")["cos_squared"].to_numpy()
    assert NAMED["expert_alignment"].was["expert_cos_squared"] == "1"
    for figure in (cosine, align, NAMED["expert_alignment"].draw(tables)):  # the last at k = 1
        bars, chance = figure.data
        assert list(bars["x"]) == list(range(N))
        np.testing.assert_allclose(bars["y"], expected, atol=1e-12)
        np.testing.assert_allclose(chance["y"], 1 / D_MODEL)
    entries = published_matrix(layer)
    np.testing.assert_allclose(z.data[0]["y"], (expected - entries.mean()) / entries.std(), rtol=1e-9)
    assert not np.any(z.data[1]["y"])
    assert len(COMPLETE) == 12


def vectors_with(statistics: pd.Series) -> np.ndarray:
    """[8, 8] unit vectors whose 28 cosines have these statistics, by least squares."""
    first, second = np.triu_indices(N, 1)
    square = statistics["mean"] ** 2 + statistics["std"] ** 2 * 27 / 28

    def unit(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(N, N)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    def residuals(x: np.ndarray) -> np.ndarray:
        cosines = (unit(x) @ unit(x).T)[first, second]
        means = [cosines.mean(), np.abs(cosines).mean(), (cosines**2).mean()]
        beyond = [np.maximum(cosines - statistics["max"], 0), np.maximum(statistics["min"] - cosines, 0)]
        ends = [cosines[0] - statistics["max"], cosines[-1] - statistics["min"]]
        return np.r_[np.subtract(means, [statistics["mean"], statistics["mean_abs"], square]), ends, *beyond]

    for seed in range(20):
        start = np.random.default_rng(seed).standard_normal(N * N) + 0.5 * np.sign(statistics["mean"])
        solution = least_squares(residuals, start)
        if solution.cost < 1e-11:
            return unit(solution.x)
    raise AssertionError("no vectors have these statistics")


@pytest.mark.parametrize("layer", sorted(ORTHOGONALITY.index))
def test_vectors_with_the_published_cosines_have_the_published_statistics(layer):
    """All five in the published orientation; in any other the mean of |cos|, the largest |cos| and the mean
    square, which are all that is comparable with a scan's own orientation."""
    printed = ORTHOGONALITY.loc[layer]
    rows = vectors_with(printed)
    (similarity,) = similarities([row[:, None] for row in rows], [1])
    found = orthogonality(similarity, D_MODEL)
    for name, value in printed.items():
        assert found[name] == pytest.approx(value, abs=6e-5), name
    signs = np.random.default_rng(layer).choice([-1.0, 1.0], N)
    (flipped,) = similarities([(sign * row)[:, None] for sign, row in zip(signs, rows, strict=True)], [1])
    other = orthogonality(flipped, D_MODEL)
    assert other["mean_abs"] == pytest.approx(printed["mean_abs"], abs=6e-5)
    assert other["max_abs"] == pytest.approx(max(printed["max"], -printed["min"]), abs=6e-5)
    square = printed["mean"] ** 2 + printed["std"] ** 2 * 27 / 28
    assert other["mean"] ** 2 + other["std"] ** 2 * 27 / 28 == pytest.approx(square, abs=1e-4)
    assert other["mean_abs"] > 20 * other["chance"]
