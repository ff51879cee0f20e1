"""Maps of experts: PCA held to the SVD, t-SNE to scikit-learn's divergence, both to planted groups."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.manifold._t_sne import _joint_probabilities

from moescope.errors import BadInput
from moescope.routing import expert_maps as plane
from moescope.routing.expert_maps import (
    METHODS,
    Cloud,
    coactivation_points,
    expected_pairs,
    map_methods,
    neighbour_probabilities,
    plane_of_directions,
    preserved_neighbours,
    principal_plane,
    tsne,
)
from moescope.routing.figures_experts import SUBJECTS, map_caption


def rows(n: int = 24, width: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, width)) * np.linspace(3, 1, width)


def three_groups() -> tuple[np.ndarray, np.ndarray]:
    """Thirty unit vectors around three directions."""
    generator = np.random.default_rng(1)
    group = np.repeat(np.arange(3), 10)
    found = np.eye(40)[group] + 0.08 * generator.standard_normal((30, 40))
    return found / np.linalg.norm(found, axis=1)[:, None], group


def test_distances_and_principal_components_from_inner_products_are_those_of_the_rows():
    x = rows()
    cloud = Cloud.of_rows(x)
    np.testing.assert_allclose(cloud.distances, squareform(pdist(x)), atol=1e-10)
    theirs = PCA(2, svd_solver="full").fit(x)
    at, share = principal_plane(cloud)
    np.testing.assert_allclose(np.abs(at), np.abs(theirs.transform(x)), atol=1e-8)
    np.testing.assert_allclose(share, theirs.explained_variance_ratio_, atol=1e-12)
    assert all(at[np.abs(at[:, column]).argmax(), column] > 0 for column in (0, 1))


def test_principal_components_are_those_of_numpys_svd():
    x = rows(30, 12, seed=4)
    u, singular, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    at, share = principal_plane(Cloud.of_rows(x))
    np.testing.assert_allclose(np.abs(at), np.abs(u[:, :2] * singular[:2]), atol=1e-8)
    np.testing.assert_allclose(share, singular[:2] ** 2 / (singular**2).sum(), atol=1e-12)


@pytest.mark.parametrize("name", ["pca", "tsne"])
def test_groups_stay_together_and_the_same_points_give_the_same_map(name):
    holds_groups_together(METHODS[name])


@pytest.mark.slow
def test_umap_does_too():
    """Apart from the others: umap-learn compiles itself for ten seconds first."""
    before = torch.get_num_threads()
    holds_groups_together(METHODS["umap"])
    assert torch.get_num_threads() == before, "what is computed after a map must round as before it"


def holds_groups_together(place) -> None:
    x, group = three_groups()
    [at] = place([Cloud.of_rows(x)])
    assert at.shape == (30, 2)
    apart = squareform(pdist(at))
    np.fill_diagonal(apart, np.inf)
    assert (group[apart.argmin(axis=1)] == group).all()
    np.testing.assert_array_equal(at, place([Cloud.of_rows(x)])[0])
    assert place([Cloud.of_rows(x[:8])])[0].shape == (8, 2)  # as few as are drawn


def test_tsne_places_two_planted_groups_apart():
    generator = np.random.default_rng(5)
    group = np.arange(64) % 2
    x = 4 * generator.standard_normal((2, 32))[group] + generator.standard_normal((64, 32))
    [at] = tsne([Cloud.of_rows(x)])
    centres = np.stack([at[group == one].mean(axis=0) for one in (0, 1)])
    widest = max(np.linalg.norm(at[group == one] - centres[one], axis=1).max() for one in (0, 1))
    assert np.linalg.norm(centres[0] - centres[1]) > 2 * widest


def test_clouds_that_step_together_end_where_each_ends_alone(monkeypatch):
    clouds = [Cloud.of_rows(rows(n, seed=seed)) for seed, n in enumerate((24, 17, 24, 64, 24))]
    alone = [tsne([cloud])[0] for cloud in clouds]
    for together in (2 * 24**2, 2**18):
        monkeypatch.setattr(plane, "TOGETHER", together)
        for at, other in zip(tsne(clouds), alone, strict=True):
            np.testing.assert_array_equal(at, other)


@pytest.mark.parametrize(("n", "groups"), [(16, 16), (64, 8), (64, 64)])
def test_tsne_reaches_the_divergence_of_scikit_learns_exact_method(n, groups):
    """Mean over four sets of points: single runs end in different local minima."""
    ours, theirs = [], []
    for seed in range(4):
        generator = np.random.default_rng(seed)
        x = 3 * generator.standard_normal((groups, 40))[np.arange(n) % groups]
        cloud = Cloud.of_rows(x + generator.standard_normal((n, 40)))
        squared, perplexity = cloud.distances**2, min(30, (n - 1) / 3)
        start = principal_plane(cloud)[0]
        start = (start / start[:, 0].std() * 1e-4).astype(np.float32)
        method = TSNE(perplexity=perplexity, metric="precomputed", init=start, method="exact", random_state=0)
        wanted = squareform(_joint_probabilities(squared, perplexity, verbose=0))
        np.testing.assert_allclose(neighbour_probabilities(squared, perplexity), wanted, atol=1e-6)
        theirs.append(divergence(wanted, method.fit_transform(squared)))
        ours.append(divergence(wanted, tsne([cloud])[0]))
    assert np.mean(ours) < 1.02 * np.mean(theirs)


def divergence(wanted: np.ndarray, at: np.ndarray) -> float:
    near = 1 / (1 + squareform(pdist(at, "sqeuclidean")))
    np.fill_diagonal(near, 0)
    held = ~np.eye(len(at), dtype=bool)
    return float((wanted[held] * np.log(wanted[held] / (near / near.sum())[held])).sum())


def test_umap_is_made_on_request_and_needs_its_package(monkeypatch):
    assert map_methods("tsne") == ("pca", "tsne")
    assert map_methods("umap") == ("pca", "tsne", "umap")
    monkeypatch.setattr(plane, "find_spec", lambda name: None)
    assert map_methods("tsne") == ("pca", "tsne")
    with pytest.raises(BadInput, match=r"moescope\[maps\]"):
        map_methods("umap")


def test_the_share_of_neighbours_kept_is_one_for_a_faithful_map_and_luck_for_a_random_one():
    x = rows(40, 2)
    assert preserved_neighbours(Cloud.of_rows(x), x) == (1.0, 5 / 39)
    generator = np.random.default_rng(3)
    found = [
        preserved_neighbours(Cloud.of_rows(x), generator.standard_normal((40, 2)))[0] for _ in range(200)
    ]
    assert np.mean(found) == pytest.approx(5 / 39, abs=0.01)
    assert preserved_neighbours(Cloud.of_rows(rows(4)), rows(4, 2))[1] == 1 / 3
    assert np.isnan(preserved_neighbours(Cloud.of_rows(rows(2)), rows(2, 2))[0])


def test_random_directions_leave_about_two_shares_of_many_on_two_axes():
    generator = np.random.default_rng(9)
    x = generator.standard_normal((16, 64))
    x /= np.linalg.norm(x, axis=1)[:, None]
    assert plane_of_directions(16, 64) == pytest.approx(
        PCA().fit(x).explained_variance_ratio_[:2].sum(), abs=0.04
    )
    assert plane_of_directions(16, 10_000) == pytest.approx(2 / 15, abs=0.01)  # all alike where there is room


def test_experts_without_a_likely_pair_have_no_place_by_co_activation():
    tokens = {0: 40, 1: 40, 2: 40, 3: 1}
    rows = [
        {
            "expert_a": a,
            "expert_b": b,
            "tokens_a": tokens[a],
            "tokens_b": tokens[b],
            "layer_tokens": 100,
            "lift": 1.5,
            "chance_lift": 1.0,
        }
        for a in tokens
        for b in tokens
        if a != b
    ]
    experts, cloud, _ = coactivation_points(expected_pairs(pd.DataFrame(rows)))
    assert experts.tolist() == [0, 1, 2]
    assert cloud.gram.shape == (3, 3)


def test_captions_say_which_maps_are_not_faithful():
    subject = SUBJECTS[1]
    rows = {share: pd.Series({"neighbours": share, "neighbours_chance": 0.08}) for share in (0.145, 0.6)}
    assert "Not faithful" in map_caption(subject, "tsne", 3, rows[0.145])
    assert "Not faithful" not in map_caption(subject, "tsne", 3, rows[0.6])
