"""Positions and the cache.

Attention as a whole is held against transformers' and torch's own in test_model.py.
"""

from __future__ import annotations

import math

import torch

from decoder.tiny_lab import TINY, text, tiny
from moescope.decoder.attention import Cache, rotary_tables, sinusoids
from moescope.decoder.elementwise import rotate
from moescope.decoder.model import LabModel


def test_rotated_products_depend_on_the_distance_alone_and_lengths_on_nothing():
    cos, sin = rotary_tables(TINY)
    q, k = torch.randn(2, 1, 1, 1, 16)
    at = {
        place: (rotate(q, cos[place], sin[place]), rotate(k, cos[place], sin[place]))
        for place in (0, 3, 20, 23)
    }
    torch.testing.assert_close((at[3][0] * at[0][1]).sum(), (at[23][0] * at[20][1]).sum())
    assert not torch.allclose((at[3][0] * at[0][1]).sum(), (at[20][0] * at[0][1]).sum())
    torch.testing.assert_close(at[23][0].norm(), q.norm())


def test_sinusoids_are_sines_and_cosines_of_slowing_clocks():
    table = sinusoids(TINY)
    assert table.shape == (TINY.max_positions, TINY.d_model)
    assert table[0].tolist() == [0.0, 1.0] * (TINY.d_model // 2)
    clock = 7 / 10_000 ** (4 / TINY.d_model)  # position 7, the third pair
    torch.testing.assert_close(table[7, 4:6], torch.tensor([math.sin(clock), math.cos(clock)]))


def test_a_cache_holds_every_layer_and_knows_how_far_it_is():
    model, cache = LabModel(tiny("dense")).eval(), Cache()
    assert cache.length == 0
    with torch.no_grad():
        model(text(2, 5), cache=cache)
        model(text(2, 3), cache=cache)
    assert cache.length == 8
    assert len(cache.held) == TINY.layers
