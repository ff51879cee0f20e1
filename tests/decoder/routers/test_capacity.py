"""Lines before experts, against counting by hand."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as draw

from moescope.decoder.routers.capacity import capacity_of, place_in_line, within_capacity


def test_capacity_is_rounded_up_from_real_tokens_and_at_least_one():
    mask = torch.tensor([True] * 10 + [False] * 6)
    assert int(capacity_of(mask, 1.25, 2, 8)) == 4  # 3.125
    assert int(capacity_of(mask, 0.8, 2, 8)) == 2  # 2 exactly
    assert int(capacity_of(mask, 0.01, 1, 8)) == 1
    assert int(capacity_of(torch.ones(24_576, dtype=torch.bool), 1.1, 4, 64)) == 1690  # 1689.6
    assert (
        int(capacity_of(torch.ones(30_000, dtype=torch.bool), 1.1, 1, 3)) == 11_000
    )  # though 1.1 is a little more than 1.1


@settings(max_examples=60, deadline=None)
@given(draw.data())
def test_place_in_line_counts_those_ahead(data):
    tokens, k, n = (
        data.draw(draw.integers(1, 12)),
        data.draw(draw.integers(1, 3)),
        data.draw(draw.integers(3, 5)),
    )
    slots = tokens * k
    chosen = torch.tensor(data.draw(draw.lists(draw.integers(-1, n - 1), min_size=slots, max_size=slots)))
    priority = torch.tensor(
        data.draw(draw.lists(draw.integers(0, 3), min_size=slots, max_size=slots))
    ).float()
    found = place_in_line(chosen.view(tokens, k), priority.view(tokens, k)).flatten()
    for slot in range(slots):
        ahead = [
            other
            for other in range(slots)
            if chosen[other] == chosen[slot] and (-priority[other], other) < (-priority[slot], slot)
        ]
        assert found[slot] == len(ahead)


def test_empty_slots_are_never_within_capacity():
    chosen = torch.tensor([[0, -1], [0, -1]])
    assert within_capacity(chosen, torch.ones(2, 2), 1).tolist() == [[True, False], [False, False]]
