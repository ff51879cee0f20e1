"""HC-SMoE's groups: average linkage on mean outputs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.cluster.hierarchy import fcluster, linkage

from moescope.compression.hc_smoe import hc_smoe


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
