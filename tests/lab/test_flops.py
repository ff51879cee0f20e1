"""Floating-point operations, counted by hand and by torch's own counter of matrix products."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from moescope.lab.flops import FlopCount

A, B = torch.randn(6, 4), torch.randn(4, 5)


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
    product = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    x, weights, ends = torch.randn(12, 8), torch.randn(3, 8, 16), torch.tensor([5, 5, 12], dtype=torch.int32)
    with FlopCount() as count:
        product(x, weights, offs=ends)
    assert count.flops == 2 * 12 * 8 * 16


def test_counts_nest():
    with FlopCount() as outer:
        with FlopCount() as inner:
            _ = A @ B
        _ = A + 1
    assert (outer.flops, inner.flops) == (240 + 24, 240)
