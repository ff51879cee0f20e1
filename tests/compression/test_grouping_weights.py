"""How much each member counts."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.compression.grouping import MERGE_WEIGHTS, Grouping, merge_weights
from moescope.errors import BadInput

GROUPING = Grouping(5, ((0, 3, 4), (1,), (2,)), (3, 1, 2))
USAGE = np.array([10.0, 0.0, 5.0, 30.0, 0.0])


def test_usage_weights_are_shares_of_the_group_s_tokens():
    assert merge_weights(GROUPING, "usage", USAGE) == ((0.25, 0.75, 0.0), (1.0,), (1.0,))


def test_members_that_no_token_chose_count_alike():
    assert merge_weights(GROUPING, "usage", np.zeros(5))[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_uniform_and_dominant_weights_by_hand():
    assert merge_weights(GROUPING, "uniform")[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert merge_weights(GROUPING, "dominant") == ((0.125, 0.75, 0.125), (1.0,), (1.0,))


def test_saliency_weights_follow_the_scores_given():
    scores = np.array([1.0, 1.0, 1.0, 1.0, 2.0])
    assert merge_weights(GROUPING, "saliency", USAGE, scores)[0] == (0.25, 0.25, 0.5)


@pytest.mark.parametrize("kind", MERGE_WEIGHTS)
def test_weights_of_every_kind_sum_to_one_in_every_group(kind):
    for weights in merge_weights(GROUPING, kind, USAGE, USAGE + 1):
        assert sum(weights) == pytest.approx(1)


def test_weights_that_need_text_are_rejected_without_it():
    with pytest.raises(BadInput, match="merge weights usage need text"):
        merge_weights(GROUPING, "usage")
    with pytest.raises(
        BadInput, match="unknown merge weights 'mean'; known: usage, uniform, dominant, saliency"
    ):
        merge_weights(GROUPING, "mean")
