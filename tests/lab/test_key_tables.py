"""SoME's figures, by hand, against scikit-free oracles, and at their chance levels."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.decoder.routers.some import key_cosine, key_map
from moescope.lab.trained_routing import usage_histogram, usage_metrics
from moescope.routing.load_balance import random_loads


def test_usage_of_a_case_worked_by_hand():
    found = usage_metrics(np.array([4.0, 4, 0, 0]), tokens=4, top_k=2).set_index("metric")["value"]
    assert found.to_dict() == pytest.approx({"gini": 0.5, "load_entropy_bits": 1.0, "used": 0.5})


def test_random_routing_lies_at_the_floor_and_collapse_at_collapse():
    loads = random_loads(3000, 16, 2, draws=100, seed=7)
    chance = usage_metrics(loads[0], 3000, 2).set_index("metric")
    means = {
        name: np.mean([usage_metrics(load, 3000, 2).set_index("metric").loc[name, "value"] for load in loads])
        for name in chance.index
    }
    assert means == pytest.approx(chance["chance"].to_dict(), rel=0.05)
    collapsed = usage_metrics(np.array([3000.0] * 2 + [0] * 14), 3000, 2)
    np.testing.assert_allclose(collapsed["value"], collapsed["collapse"])


def test_every_expert_stands_in_one_bin_and_the_unused_in_the_first():
    counts = np.array([0, 0, 1, 1, 5, 10, 99, 100, 1000, 3162])
    found = usage_histogram(counts, tokens=2200, top_k=2)
    assert found["experts"].sum() == len(counts)
    assert found["expected_experts"].sum() == pytest.approx(len(counts))
    assert found.iloc[0][["bin_left", "bin_right", "experts"]].tolist() == [0, 1, 2]
    ten = found[np.isclose(found["bin_left"], 10)].iloc[0]
    assert ten["experts"] == 1
    assert np.allclose(np.diff(np.log10(found["bin_right"])), 0.25)


def test_random_routing_fills_the_bins_that_are_expected():
    counts = random_loads(4000, 256, 4, draws=1, seed=3)[0]
    found = usage_histogram(counts, 4000, 4)
    assert np.abs(found["experts"] - found["expected_experts"]).sum() < 0.2 * 256


def test_mean_cosine_equals_the_mean_over_all_pairs_whatever_the_keys_lengths():
    keys = np.random.default_rng(0).standard_normal((7, 5)) * np.arange(1, 8)[:, None]
    directions = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    pairs = (directions @ directions.T)[np.triu_indices(7, 1)]
    assert key_cosine(keys)[0] == pytest.approx(pairs.mean())


def test_random_keys_stray_from_zero_as_far_as_is_said():
    generator = np.random.default_rng(1)
    means = [key_cosine(generator.standard_normal((12, 20)))[0] for _ in range(400)]
    assert np.std(means) == pytest.approx(key_cosine(np.eye(12, 20))[1], rel=0.15)
    assert abs(np.mean(means)) < 3 * np.std(means) / 20


def test_equal_keys_have_cosine_one_and_a_single_key_none():
    assert key_cosine(np.ones((4, 3)))[0] == pytest.approx(1)
    assert np.isnan(key_cosine(np.ones((1, 3)))[0])


def test_keys_in_a_plane_keep_their_distances_on_the_map():
    angles = np.linspace(0, 2 * np.pi, 9)[:-1]
    plane = np.linalg.qr(np.random.default_rng(0).standard_normal((10, 2)))[0]
    keys = np.stack([np.cos(angles), np.sin(angles)], 1) @ plane.T
    strength = np.linspace(0.3, 1, 8)
    found, shown, by_chance = key_map(keys * strength[:, None], np.arange(8))
    places = found[["x", "y"]].to_numpy()
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    np.testing.assert_allclose(distances, np.linalg.norm(keys[:, None] - keys, axis=-1), atol=1e-9)
    np.testing.assert_allclose(found["strength"], strength)
    assert found["tokens"].tolist() == list(range(8))
    assert shown == pytest.approx(1)
    assert 2 / 10 < by_chance < 0.8


def test_a_map_of_random_keys_shows_what_chance_shows():
    _, shown, by_chance = key_map(np.random.default_rng(5).standard_normal((30, 12)), np.ones(30))
    assert shown == pytest.approx(by_chance, rel=0.2)


def test_a_map_does_not_depend_on_how_the_keys_are_turned():
    generator = np.random.default_rng(2)
    keys = generator.standard_normal((6, 4))
    turn = np.linalg.qr(generator.standard_normal((4, 4)))[0]
    np.testing.assert_allclose(key_map(keys, np.ones(6))[0], key_map(keys @ turn, np.ones(6))[0], atol=1e-9)
