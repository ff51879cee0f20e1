"""Tables of merged experts: steps, and distances of members from their dominant one."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints import tiny_checkpoint
from moescope.checkpoint import open_checkpoint
from moescope.compression.merging import Grouping, Merge
from moescope.compression.rows import MOST_PAIRS, cluster_geometry, cluster_pairs, merge_rows
from moescope.compression.tables import TABLES
from moescope.families import read_moe
from moescope.geometry.distances import distance
from moescope.geometry.matching import match_neurons
from moescope.tables import conform
from moescope.types import LayerPlan, Plan


def plan_of(
    groups: tuple[tuple[int, ...], ...], dominants: tuple[int, ...], method: str = "m_smoe_permuted"
) -> Plan:
    weights = tuple((1 / len(group),) * len(group) for group in groups)
    n_experts = sum(map(len, groups))
    layers = tuple(LayerPlan(layer, n_experts, groups, dominants, weights) for layer in range(2))
    return Plan(method, {}, layers, "signed", "fold", None, {})


def test_steps_become_rows_with_the_height_of_unrelated_experts():
    grouping = Grouping(
        3, ((0, 2), (1,)), (2, 1), (Merge(0, 2, 0.25, 2, True), Merge(1, 3, 0.9, 3, False)), 1.5
    )
    frame = merge_rows("weights", {4: grouping}, {4: "layers.4"})
    assert frame is not None
    rows = conform(TABLES["merges"], frame).to_pandas()
    assert rows["merge"].tolist() == [0, 1]
    assert rows["done"].tolist() == [True, False]
    assert set(rows["chance_height"]) == {1.5}
    assert merge_rows("random_merge", {0: Grouping(2, ((0, 1),), (0,))}, {0: "x"}) is None


def test_pairs_are_dominant_and_other_members_singletons_left_out():
    pairs = cluster_pairs(plan_of(((0, 2, 3), (1,)), (2, 1)), seed=0)
    assert pairs == {0: [(2, 0), (2, 3)], 1: [(2, 0), (2, 3)]}
    assert cluster_pairs(plan_of(((0,), (1,)), (0, 1)), seed=0) == {}


def test_of_many_pairs_a_few_are_drawn_per_layer():
    pairs = cluster_pairs(plan_of((tuple(range(100)),), (0,)), seed=1)
    assert len(pairs[0]) == MOST_PAIRS
    assert pairs[0] != pairs[1]
    assert len(set(pairs[0])) == MOST_PAIRS
    assert pairs == cluster_pairs(plan_of((tuple(range(100)),), (0,)), seed=1)


def test_distances_are_those_of_the_pairs_as_stored_and_matched(tmp_path):
    moe = read_moe(open_checkpoint(tiny_checkpoint(tmp_path / "model")))
    frames = cluster_geometry(moe, plan_of(((0, 3), (1,), (2,)), (3, 1, 2)), "cpu", 0)
    rows = frames["geometry"].set_index(["series", "layer", "matrix"])
    assert set(frames["geometry"]["series"]) == {"m_smoe", "m_smoe_permuted"}
    dominant, member = moe.layers[1].expert(3), moe.layers[1].expert(0)
    moved = match_neurons(dominant, member).apply(member)
    assert rows.loc[("m_smoe", 1, "gate"), "relative_l2"] == pytest.approx(
        distance(dominant.gate_FD, member.gate_FD).relative_l2
    )
    assert rows.loc[("m_smoe_permuted", 1, "down"), "relative_l2"] == pytest.approx(
        distance(dominant.down_DF, moved.down_DF).relative_l2
    )
    layers = frames["geometry_layers"]
    assert np.allclose(layers["null_l2"], np.sqrt(2))
    assert layers["null_l2_matched"].notna().all()


def test_a_plan_that_merges_nothing_has_no_distances(tmp_path):
    moe = read_moe(open_checkpoint(tiny_checkpoint(tmp_path / "model")))
    assert cluster_geometry(moe, plan_of(((0,), (1,), (2,), (3,)), (0, 1, 2, 3)), "cpu", 0) == {}
