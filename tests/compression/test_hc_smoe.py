"""HC-SMoE's groups: average linkage on mean outputs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from moescope.compression.hc_smoe import hc_smoe
from moescope.errors import BadInput


@pytest.mark.parametrize("measure", ["euclidean", "cosine"])
def test_groups_are_those_scipy_makes_of_the_features(measure):
    features = np.random.default_rng(0).normal(size=(12, 7))
    labels = fcluster(linkage(features, "average", measure), 5, "maxclust")
    theirs = {tuple(int(e) for e in np.flatnonzero(labels == label)) for label in np.unique(labels)}
    ours = hc_smoe(features, np.ones(12), 5, measure)
    assert set(ours.groups) == theirs
    assert [merge.height for merge in ours.merges] == pytest.approx(
        linkage(features, "average", measure)[:, 2]
    )


def test_cosine_ignores_the_size_of_an_output_and_the_default_does_not():
    features = np.array([[1.0, 0.0], [8.0, 0.1], [0.0, 1.0]])
    assert hc_smoe(features, np.ones(3), 2).groups == ((0, 2), (1,))
    assert hc_smoe(features, np.ones(3), 2, "cosine").groups == ((0, 1), (2,))


def test_the_most_used_member_leads_and_an_expert_without_output_is_no_error():
    features = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 0.0]])
    assert hc_smoe(features, np.array([1.0, 5.0, 0.0]), 2, "cosine").dominants == (1, 2)


def test_an_unknown_measure_is_rejected_with_the_known_ones():
    with pytest.raises(BadInput, match="unknown measure 'l1'; known: euclidean, cosine"):
        hc_smoe(np.ones((2, 2)), np.ones(2), 1, "l1")


def test_the_dominant_member_is_the_most_used_or_the_one_nearest_to_the_centre():
    """Mean of the first group: (1, 0); nearest to it is 1, most used 0. A pair is equally near: most used."""
    features = np.array([[0.0, 0.0], [1.1, 0.0], [1.9, 0.0], [50.0, 3.0], [50.0, 3.7]])
    usage = np.array([9.0, 1.0, 2.0, 3.0, 4.0])
    by_usage, by_centre = (hc_smoe(features, usage, 2, dominant=how) for how in ("usage", "centre"))
    assert by_usage.groups == by_centre.groups == ((0, 1, 2), (3, 4))
    assert by_usage.dominants == (0, 4)
    assert by_centre.dominants == (1, 4)
    assert hc_smoe(features, usage, 2).dominants == by_usage.dominants
