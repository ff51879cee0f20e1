"""The overhead table.

Its parts are disjoint, add up, cost what formulas say, and leave the router as it was.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from decoder.routers.builders import small_config
from moescope.decoder.model import MoE
from moescope.decoder.routers import ROUTERS, router_class
from moescope.errors import BadInput
from moescope.lab.cost import Clock, overhead, parts_of
from moescope.lab.tables import TABLES
from moescope.tables import conform

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
