"""Parameters and operations a token, against counts of models that were really built and run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from decoder.tiny_lab import text, tiny
from moescope.decoder.model import LabModel, looped_product
from moescope.decoder.routers import ROUTERS
from moescope.lab.cost import FlopCount, active_parameters, flops_per_token, router_flops

LENGTH = 32
A, B = torch.randn(6, 4), torch.randn(4, 5)


@pytest.mark.parametrize("router", ["top2", "switch_top1", "hash", "some", "dense"])
def test_active_parameters_are_all_but_those_of_experts_not_met(router):
    config = tiny(router)
    model = LabModel(config)
    experts = [parameter for block in model.blocks for parameter in block.mlp.experts.parameters()]
    others = sum(parameter.numel() for parameter in model.parameters()) - sum(p.numel() for p in experts)
    met = {"switch_top1": 1, "dense": 1}.get(router, 2)
    assert active_parameters(config) == others + sum(met * parameter[0].numel() for parameter in experts)


def test_expert_choice_meets_as_many_experts_as_its_capacity_lets_it_on_average():
    wide, narrow = (
        tiny("expert_choice", router_options={"capacity_factor": factor}) for factor in (2.0, 1.0)
    )
    expert = 3 * narrow.d_model * narrow.d_ff
    assert active_parameters(wide) - active_parameters(narrow) == 2 * expert * narrow.layers
    assert active_parameters(narrow) == active_parameters(tiny("top2"))


@pytest.mark.parametrize("router", ["top2", "dense", "loss_free"])
def test_operations_are_those_that_torch_counts_in_the_matrix_products_of_a_real_pass(router):
    """Its counter takes attention over the whole row, of which a causal one needs half.

    Routers' small change is left aside.
    """
    config = tiny(router)
    model = LabModel(config)
    for block in model.blocks:
        block.mlp.experts.product = looped_product  # whose products the counter knows
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(text(4, LENGTH), targets_BL=text(4, LENGTH))
    whole_rows = config.layers * 4 * config.d_model * (LENGTH - (LENGTH + 1) / 2)
    router_alone = config.layers * (
        router_flops(config) - (0 if router == "dense" else 2 * config.experts * config.d_model)
    )
    expected = counter.get_total_flops() / (4 * LENGTH)
    assert flops_per_token(config, LENGTH) + whole_rows - router_alone == pytest.approx(expected)


@pytest.mark.parametrize("router", list(ROUTERS))
def test_counting_a_router_leaves_torch_s_random_numbers_alone(router):
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    counted = router_flops(tiny(router))
    assert torch.equal(torch.rand(3), wanted)
    assert (counted > 3) == (router not in ("dense", "hash"))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: A @ B, 2 * 6 * 4 * 5),
        (lambda: functional.linear(A, B.T, torch.zeros(5)), 2 * 6 * 4 * 5),  # a bias rides along
        (lambda: A.exp() + 1, 24 + 24),
        (lambda: A.logsumexp(1), 24),  # counted by what is read, not by the six numbers it leaves
        (lambda: A.softmax(1), 24),
        (lambda: A.T.reshape(-1)[None].expand(3, -1), 0),
        (lambda: torch.where(A > 0, A, 0), 0),
        (lambda: A.sort(), 0),
        (lambda: A.topk(2), 0),
        (lambda: torch.arange(10) * 2, 0),
    ],
)
def test_operations_of_a_case_counted_by_hand(work, expected):
    with FlopCount() as count:
        work()
    assert count.flops == expected


def test_matrix_products_are_counted_as_torch_does():
    cell, x = nn.GRUCell(16, 8), torch.randn(10, 16)
    with FlopCounterMode(display=False) as reference, torch.no_grad():
        cell(x)
    with FlopCount() as count, torch.no_grad():
        cell(x)
    assert reference.get_total_flops() == 2 * 10 * 24 * (16 + 8)
    elementwise = count.flops - reference.get_total_flops()
    assert 5 * 80 <= elementwise <= 15 * 80  # some steps an element of the state


def test_a_grouped_product_counts_each_row_once():
    x, weights, ends = torch.randn(12, 8), torch.randn(3, 8, 16), torch.tensor([5, 5, 12], dtype=torch.int32)
    with FlopCount() as count:
        functional.grouped_mm(x, weights, offs=ends)
    assert count.flops == 2 * 12 * 8 * 16
