"""How much each member counts."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.compression.merging import Grouping, merge_weights

GROUPING = Grouping(5, ((0, 3, 4), (1,), (2,)), (3, 1, 2))
USAGE = np.array([10.0, 0.0, 5.0, 30.0, 0.0])


def test_usage_weights_are_shares_of_the_group_s_tokens():
    assert merge_weights(GROUPING, USAGE) == ((0.25, 0.75, 0.0), (1.0,), (1.0,))


@pytest.mark.parametrize("usage", [None, np.zeros(5)])
def test_members_of_no_or_unknown_use_count_alike(usage):
    assert merge_weights(GROUPING, usage)[0] == pytest.approx((1 / 3, 1 / 3, 1 / 3))
