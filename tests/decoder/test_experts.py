"""Experts by sorting and grouped products, against one expert after another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from decoder.tiny_lab import TINY
from moescope.decoder.model import (
    Experts,
    GELUExperts,
    RowsOfExperts,
    SwiGLUExperts,
    default_output_scale,
    fill_experts,
    grouped_mm_runs,
    looped_product,
    one_product,
    output_scale,
)

TOKENS, E = 40, 6
BOTH = pytest.mark.parametrize("kind", [SwiGLUExperts, GELUExperts])


def experts_of(kind: type[Experts], width: int = 32, d_ff: int = 16, **changes: object) -> Experts:
    torch.manual_seed(0)
    block = "modern" if kind is SwiGLUExperts else "some"
    made = kind(replace(TINY, d_model=width, block=block, **changes), E, d_ff)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape) / 4)
    return made


def decided(k: int = 3, empty: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Different experts for every token, some slots empty, expert 2 with no token at all."""
    draws = torch.Generator().manual_seed(1)
    order = torch.rand(TOKENS, E, generator=draws)
    order[:, 2] = 2
    chosen = order.argsort(-1)[:, :k]
    chosen = chosen.masked_fill(torch.rand(TOKENS, k, generator=draws) < empty, -1)
    return chosen, torch.rand(TOKENS, k, generator=draws).masked_fill(chosen < 0, 0)


def by_hand(experts: Experts, x: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Token by token and slot by slot."""
    rows = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token])
        for slot, e in enumerate(chosen[token].tolist()):
            if e < 0:
                continue
            if isinstance(experts, SwiGLUExperts):
                half = experts.down.shape[-1]
                gate, up = experts.gate_up[e, :half] @ x[token], experts.gate_up[e, half:] @ x[token]
                y = experts.down[e] @ (functional.silu(gate) * up)
            else:
                assert isinstance(experts, GELUExperts)
                y = (
                    experts.down[e] @ functional.gelu(experts.up[e] @ x[token] + experts.up_bias[e])
                    + experts.down_bias[e]
                )
            total = total + gates[token, slot] * y
        rows.append(total)
    return torch.stack(rows)


def outcome(
    compute, experts: Experts, chosen: torch.Tensor, gates: torch.Tensor, x: torch.Tensor
) -> list[torch.Tensor]:
    """Output, and the gradients of a weighted sum of it into input, gates and every weight."""
    x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    y = compute(x, chosen, gates)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    weights = [weight for weight in experts.parameters() if weight.requires_grad]
    gradients = torch.autograd.grad((y * direction).sum(), [x, gates, *weights])
    return [y, *gradients]


@BOTH
@pytest.mark.parametrize("at_most", [None, 100])
@pytest.mark.parametrize(
    "width", [32, 30]
)  # rows of 30 floats are not whole 16 bytes: the loop has to step in
def test_outputs_and_all_gradients_equal_those_of_single_tokens(kind, at_most, width):
    experts = experts_of(kind, width)
    chosen, gates = decided()
    assert (chosen >= 0).sum() < 100
    x = torch.randn(TOKENS, width)
    fast = outcome(lambda *given: experts(*given, at_most), experts, chosen, gates, x)
    slow = outcome(lambda *given: by_hand(experts, *given), experts, chosen, gates, x)
    slow[2] = slow[2].masked_fill(chosen < 0, 0)
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert fast[3][2].abs().max() == 0, "an expert without tokens has no gradient"


@pytest.mark.parametrize("n_experts", [1, 64])
def test_the_gradient_of_a_bias_in_bfloat16_is_exact_to_its_rounding(n_experts):
    """Added one after another in bfloat16, 10,240 rows of one expert are wrong by 12 %."""
    draws = torch.Generator().manual_seed(3)
    expert_S = torch.randint(n_experts, (10_240,), generator=draws).sort().values
    gradient_SF = torch.randn(len(expert_S), 32, generator=draws).bfloat16()
    bias_EF = torch.zeros(n_experts, 32, dtype=torch.bfloat16, requires_grad=True)
    RowsOfExperts.apply(bias_EF, expert_S).backward(gradient_SF)
    exact_EF = torch.zeros(n_experts, 32, dtype=torch.float64).index_add_(0, expert_S, gradient_SF.double())
    assert (bias_EF.grad.double() - exact_EF).norm() < 2**-8 * exact_EF.norm()
    on_a_gpu = one_product(gradient_SF, expert_S, n_experts)
    assert (on_a_gpu.double() - exact_EF).norm() < 2**-8 * exact_EF.norm()


def test_a_product_sums_rows_of_experts_and_ignores_what_empty_rows_hold():
    gradient_SF = torch.randn(6, 3, generator=torch.Generator().manual_seed(4))
    gradient_SF[5] = float("nan")
    sums_EF = one_product(gradient_SF, torch.tensor([0, 0, 2, 2, 2, 4]), 4)
    zeros_F = torch.zeros(3)
    torch.testing.assert_close(
        sums_EF, torch.stack([gradient_SF[:2].sum(0), zeros_F, gradient_SF[2:5].sum(0), zeros_F])
    )


@BOTH
def test_the_grouped_product_equals_the_loop(kind):
    experts, (chosen, gates), x = experts_of(kind), decided(), torch.randn(TOKENS, 32)
    assert grouped_mm_runs(x, torch.empty(E, 16, 32)), "then this compares the loop with itself"
    grouped = outcome(experts, experts, chosen, gates, x)
    experts.product = looped_product
    for one, other in zip(grouped, outcome(experts, experts, chosen, gates, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("at_most", [None, 100])
def test_rows_of_no_expert_reach_neither_output_nor_gradient_whatever_they_hold(kind, at_most):
    """A grouped product leaves them unwritten; here both ways through them are poisoned."""

    class Poisoned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, ends):
            ctx.save_for_backward(ends)
            return torch.where(torch.arange(len(y))[:, None] < ends[-1], y, float("nan"))

        @staticmethod
        def backward(ctx, gradient):
            (ends,) = ctx.saved_tensors
            return torch.where(torch.arange(len(gradient))[:, None] < ends[-1], gradient, float("nan")), None

    def poisoned(x, weight, ends):
        # Poisoned behind and in front: what comes out of the rows, and what flows back out of them.
        return Poisoned.apply(looped_product(Poisoned.apply(x, ends), weight, ends), ends)

    experts, (chosen, gates), x = experts_of(kind), decided(), torch.randn(TOKENS, 32)
    clean = outcome(lambda *given: experts(*given, at_most), experts, chosen, gates, x)
    experts.product = poisoned
    for one, other in zip(
        outcome(lambda *given: experts(*given, at_most), experts, chosen, gates, x), clean, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@BOTH
def test_a_pass_where_nobody_has_an_expert_gives_zeros(kind):
    chosen = torch.full((4, 2), -1)
    assert (experts_of(kind)(torch.randn(4, 32), chosen, torch.zeros(4, 2)) == 0).all()


@BOTH
def test_autocast_computes_in_bfloat16_and_hands_weights_their_gradient_in_float32(kind):
    experts, (chosen, gates), x = experts_of(kind), decided(), torch.randn(TOKENS, 32)
    exact = experts(x, chosen, gates)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = experts(x, chosen, gates)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05 * float(exact.detach().std()))
    rounded.float().square().sum().backward()
    assert all(
        weight.grad is not None and weight.grad.dtype == torch.float32 for weight in experts.parameters()
    )


@BOTH
def test_frozen_experts_have_no_gradient_and_their_input_has(kind):
    experts, (chosen, gates) = experts_of(kind, frozen_experts=True, frozen_dtype="bfloat16"), decided()
    x = torch.randn(TOKENS, 32, requires_grad=True)
    experts(x, chosen, gates).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
    assert all(weight.dtype == torch.bfloat16 and weight.grad is None for weight in experts.parameters())


# --- how frozen experts begin


def filled(init: str, match: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    up, down = torch.empty(3, 128, 64), torch.empty(3, 64, 128)
    fill_experts(up, down, init, match)
    return up, down


def test_default_experts_are_torchs_own_linear_maps():
    up, down = filled("default", match=False)
    assert 0.99 < float(up.abs().max() * 64**0.5) <= 1
    assert 0.99 < float(down.abs().max() * 128**0.5) <= 1
    assert output_scale(up[0], down[0]) == pytest.approx(default_output_scale(), rel=0.05)


def test_orthogonal_experts_have_orthonormal_columns_and_rows():
    up, down = filled("orthogonal", match=False)
    for e in range(3):
        torch.testing.assert_close(up[e].T @ up[e], torch.eye(64), atol=1e-5, rtol=0)
        torch.testing.assert_close(down[e] @ down[e].T, torch.eye(64), atol=1e-5, rtol=0)
    assert not torch.allclose(up[0], up[1])


def test_sparse_experts_have_nine_zeros_in_ten():
    up, _ = filled("sparse", match=False)
    assert float((up == 0).float().mean()) == pytest.approx(0.9, abs=0.01)


def test_zero_experts_add_nothing():
    up, down = filled("zero", match=True)
    assert (down == 0).all()
    assert (up != 0).any()


@pytest.mark.parametrize("init", ["default", "orthogonal", "sparse"])
def test_matched_experts_all_have_the_scale_of_the_default(init):
    up, down = filled(init, match=True)
    for e in range(3):
        # on inputs of its own, not the probes the scale was set by
        y = functional.gelu(torch.randn(2000, 64) @ up[e].T) @ down[e].T
        assert float(y.square().mean().sqrt()) == pytest.approx(default_output_scale(), rel=0.1)


def test_unmatched_sparse_experts_are_far_weaker_than_the_default():
    up, down = filled("sparse", match=False)
    assert output_scale(up[0], down[0]) < 0.1 * default_output_scale()
