"""Maps of experts: PCA held to the SVD, all methods to planted groups."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.decomposition import PCA

from moescope.errors import BadInput
from moescope.routing import expert_maps as plane
from moescope.routing.expert_maps import (
    METHODS,
    Cloud,
    coactivation_points,
    map_methods,
    plane_of_directions,
    preserved_neighbours,
    tsne,
)


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
    at, share = cloud.plane
    np.testing.assert_allclose(np.abs(at), np.abs(theirs.transform(x)), atol=1e-8)
    np.testing.assert_allclose(share, theirs.explained_variance_ratio_, atol=1e-12)
    assert all(at[np.abs(at[:, column]).argmax(), column] > 0 for column in (0, 1))


def test_principal_components_are_those_of_numpys_svd():
    x = rows(30, 12, seed=4)
    u, singular, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    at, share = Cloud.of_rows(x).plane
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
    at = place(Cloud.of_rows(x))
    assert at.shape == (30, 2)
    apart = squareform(pdist(at))
    np.fill_diagonal(apart, np.inf)
    assert (group[apart.argmin(axis=1)] == group).all()
    np.testing.assert_array_equal(at, place(Cloud.of_rows(x)))
    assert place(Cloud.of_rows(x[:8])).shape == (8, 2)  # as few as are drawn


def test_tsne_places_two_planted_groups_apart():
    generator = np.random.default_rng(5)
    group = np.arange(64) % 2
    x = 4 * generator.standard_normal((2, 32))[group] + generator.standard_normal((64, 32))
    at = tsne(Cloud.of_rows(x))
    centres = np.stack([at[group == one].mean(axis=0) for one in (0, 1)])
    widest = max(np.linalg.norm(at[group == one] - centres[one], axis=1).max() for one in (0, 1))
    assert np.linalg.norm(centres[0] - centres[1]) > 2 * widest


def test_tsne_and_umap_are_made_on_request_and_need_their_packages(monkeypatch):
    assert map_methods("tsne") == ("pca", "tsne")
    assert map_methods("umap") == ("pca", "tsne", "umap")
    monkeypatch.setattr(plane, "find_spec", lambda name: None)
    assert map_methods("pca") == ("pca",)
    for method in ("tsne", "umap"):
        with pytest.raises(BadInput, match=rf"--maps {method}: .*moescope\[maps\]"):
            map_methods(method)


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
            "expected": tokens[a] * tokens[b] / 100,
            "over": 1.5,
        }
        for a in tokens
        for b in tokens
        if a != b
    ]
    experts, cloud, _ = coactivation_points(pd.DataFrame(rows))
    assert experts.tolist() == [0, 1, 2]
    assert cloud.gram.shape == (3, 3)
