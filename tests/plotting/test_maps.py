"""Layouts on a plane.

PCA held to scikit-learn's, groups kept together by all three, and what is said of them held to counting.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.decomposition import PCA

from moescope.plotting import maps as plane
from moescope.plotting.maps import LAYOUTS, Cloud, plane_of_directions, preserved_neighbours, principal_plane


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


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.name != "umap"], ids=lambda layout: layout.name
)
def test_groups_stay_together_and_the_same_points_give_the_same_map(layout):
    holds_groups_together(layout)


@pytest.mark.slow
def test_umap_does_too():
    """Apart from the others: umap-learn compiles itself for ten seconds first."""
    before = torch.get_num_threads()
    holds_groups_together(next(layout for layout in LAYOUTS if layout.name == "umap"))
    assert torch.get_num_threads() == before, "what is computed after a map must round as before it"


def holds_groups_together(layout) -> None:
    x, group = three_groups()
    at = layout.place(Cloud.of_rows(x))
    assert at.shape == (30, 2)
    apart = squareform(pdist(at))
    np.fill_diagonal(apart, np.inf)
    assert (group[apart.argmin(axis=1)] == group).all()
    np.testing.assert_array_equal(at, layout.place(Cloud.of_rows(x)))
    assert layout.place(Cloud.of_rows(x[:8])).shape == (8, 2)  # as few as are drawn


def test_the_setting_is_named_as_it_is_used():
    words = {layout.name: [layout.setting(n) for n in (8, 128)] for layout in LAYOUTS}
    assert words == {
        "pca": ["", ""],
        "umap": [" (7 neighbours, seed 0)", " (15 neighbours, seed 0)"],
        "tsne": [" (perplexity 2.33, seed 0)", " (perplexity 30, seed 0)"],
    }


def test_a_package_that_is_not_there_is_seen(monkeypatch):
    monkeypatch.setattr(plane, "find_spec", lambda name: None)
    assert [layout.installed for layout in LAYOUTS] == [True, False, False]


def test_the_share_of_neighbours_kept_is_one_for_a_faithful_map_and_luck_for_a_random_one():
    x = rows(40, 2)
    assert preserved_neighbours(Cloud.of_rows(x), x) == (1.0, 5 / 39, 5)
    generator = np.random.default_rng(3)
    found = [
        preserved_neighbours(Cloud.of_rows(x), generator.standard_normal((40, 2)))[0] for _ in range(200)
    ]
    assert np.mean(found) == pytest.approx(5 / 39, abs=0.01)
    assert preserved_neighbours(Cloud.of_rows(rows(4)), rows(4, 2))[1:] == (1 / 3, 1)
    assert np.isnan(preserved_neighbours(Cloud.of_rows(rows(2)), rows(2, 2))[0])


def test_random_directions_leave_about_two_shares_of_many_on_two_axes():
    generator = np.random.default_rng(9)
    x = generator.standard_normal((16, 64))
    x /= np.linalg.norm(x, axis=1)[:, None]
    assert plane_of_directions(16, 64) == pytest.approx(
        PCA().fit(x).explained_variance_ratio_[:2].sum(), abs=0.04
    )
    assert plane_of_directions(16, 10_000) == pytest.approx(2 / 15, abs=0.01)  # all alike where there is room
