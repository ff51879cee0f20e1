"""Positions, the cache, and the elementwise steps, by their formulas.

Attention as a whole is held against transformers' and torch's own in test_model.py.
"""

from __future__ import annotations

import math

import pytest
import torch

from decoder.tiny_lab import TINY, text, tiny
from moescope.decoder.layers import (
    Cache,
    mix,
    rms_norm,
    rotary_tables,
    rotate,
    sinusoids,
    swiglu,
    token_losses,
)
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
    assert len(cache.entries) == TINY.layers


def test_the_norm_divides_by_the_root_mean_square_and_keeps_the_dtype_of_its_input():
    x, weight = torch.randn(5, 8), torch.randn(8)
    expected = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 0.1), expected)
    rounded = rms_norm(x.bfloat16(), weight, 0.1)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=0.02, atol=0.02)


def test_swiglu_takes_the_gate_from_the_first_half():
    gate, up = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(swiglu(torch.cat((gate, up), -1)), gate * gate.sigmoid() * up)


def test_mixing_sums_weighted_rows():
    y, weights, rows = torch.randn(6, 4), torch.rand(3, 2), torch.tensor([[5, 0], [1, 1], [2, 3]])
    expected = torch.stack(
        [sum(w * y[r] for w, r in zip(weights[t], rows[t], strict=True)) for t in range(3)]
    )
    torch.testing.assert_close(mix(y, weights, rows), expected)


def test_losses_are_in_nats_in_float32_and_zero_without_a_target():
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 1.0]], dtype=torch.bfloat16)
    found = token_losses(logits, torch.tensor([1, 0, -100]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([2.0, 1 + torch.e**-2, 1]).log())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("router", ["top2", "switch_top1", "expert_choice"])
def test_a_compiled_model_has_the_same_loss_and_gradients(router):
    ids, found = text(6, 17), []
    for compile in (False, True):
        torch.manual_seed(0)
        model = LabModel(tiny(router), compile=compile).train()
        loss = model(ids[:, :-1], targets_BL=ids[:, 1:]).loss
        loss.backward()
        found.append([loss.detach(), *(weight.grad for weight in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
