"""Parameters and operations a token, against counts of models that were really built and run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from decoder.routers.builders import small_config
from decoder.tiny_lab import text, tiny
from moescope.decoder.model import LabModel, MoE, looped_product
from moescope.decoder.routers import ROUTERS, router_class
from moescope.errors import BadInput
from moescope.lab.cost import (
    Clock,
    FlopCount,
    active_parameters,
    flops_per_token,
    overhead,
    parts_of,
    router_flops,
)
from moescope.lab.tables import TABLES
from moescope.tables import conform

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


# --- the overhead table

T, D, E, K, F, R = 48, 16, 4, 2, 8, 64


def config_of(router: str):
    fixed = router_class(router).fixed_top_k
    return small_config(router, top_k=K if fixed is None else fixed)


@pytest.fixture(scope="module")
def rows():
    configs = {name: config_of(name) for name in ROUTERS}
    configs["spectra -GRU"] = replace(configs["spectra"], router_options={"gru": False})
    return overhead(configs, tokens=T, repeats=2)


def test_every_router_has_rows_that_fit_the_table(rows):
    assert set(rows["router"]) == {*ROUTERS, "spectra -GRU"}
    assert conform(TABLES["overhead"], rows).num_rows == len(rows)
    assert (rows["milliseconds"] >= 0).all()


def test_shares_of_a_router_add_up_to_one(rows):
    sums = rows.groupby("router")["share"].sum()
    assert (sums - 1).abs().max() < 1e-9


def test_spectra_is_taken_apart_and_a_plain_router_is_one_piece(rows):
    by_router = rows.groupby("router")["component"].apply(list)
    asked = {"gru", "projection", "gram", "similarity", "sinkhorn", "quota", "top_k", "experts"}
    assert asked <= set(by_router["spectra"])
    assert by_router["top2"] == ["routing", "experts"]


def operations(rows, router: str, component: str) -> int:
    return int(rows.set_index(["router", "component"]).loc[(router, component), "flops"])


def test_operations_are_those_of_the_formulas(rows):
    cell = 2 * T * 3 * R * (D + R)
    expand = 2 * T * R * E * R
    assert 0 < operations(rows, "spectra", "gru") - cell < 20 * T * R  # the gates of the cell
    assert operations(rows, "spectra -GRU", "gru") == 2 * T * D * R
    assert operations(rows, "spectra", "expansion") == expand
    assert operations(rows, "spectra", "projection") == 2 * T * D * E * R
    assert operations(rows, "some", "query") >= 2 * T * D * 2 * D * 2
    assert operations(rows, "some", "similarity") == 2 * T * D * E + E * D  # and the strengths of the keys
    experts = 2 * T * K * 3 * D * F
    assert experts <= operations(rows, "top2", "experts") < 1.5 * experts
    assert operations(rows, "spectra", "top_k") == 0


def test_of_a_router_that_names_its_parts_nothing_is_counted_twice(rows):
    block = MoE(config_of("spectra"), 0, router_class("spectra").shared_parts(config_of("spectra")))
    assert set(parts_of(block)) - {"routing"} == set(rows[rows["router"] == "spectra"]["component"]) - {
        "rest"
    }
    rest = operations(rows, "spectra", "rest")
    assert 0 <= rest < operations(rows, "spectra", "similarity")


def test_measuring_leaves_the_modules_methods_alone():
    from moescope.lab.cost import counting, watching

    block = MoE(config_of("some"), 0, None)
    parts = parts_of(block)
    with pytest.raises(RuntimeError, match="in the middle"), watching(parts, partial(counting, {})):
        assert "forward" in vars(block.router)
        raise RuntimeError("in the middle")
    assert "forward" not in vars(block.router)
    assert "query" not in vars(block.router)


def test_a_clock_adds_up_calls_of_one_name():
    clock = Clock("cpu")
    for _ in range(2):
        with clock.timing("nap"):
            pass
    assert [name for name, _, _ in clock.marks] == ["nap", "nap"]
    clock.marks = [("nap", 0.0, 0.5), ("other", 0.5, 0.75), ("nap", 1.0, 1.25)]
    assert clock.read() == {"nap": 750.0, "other": 250.0}


def test_the_same_seed_counts_the_same_operations(rows):
    again = overhead({"spectra": config_of("spectra")}, tokens=T, repeats=1)
    first = rows[rows["router"] == "spectra"]
    assert again.set_index("component")["flops"].to_dict() == first.set_index("component")["flops"].to_dict()


def test_experts_may_run_in_another_type():
    found = overhead({"top2": config_of("top2")}, tokens=T, repeats=1, dtype=torch.bfloat16)
    assert list(found["component"]) == ["routing", "experts"]


@pytest.mark.gpu
def test_events_time_a_gpu():
    found = overhead(
        {"spectra": config_of("spectra")}, tokens=T, repeats=2, device="cuda", dtype=torch.bfloat16
    )
    assert (found["milliseconds"] > 0).any()


def test_no_tokens_are_refused():
    with pytest.raises(BadInput, match="tokens 0, repeats 10"):
        overhead({}, tokens=0)
