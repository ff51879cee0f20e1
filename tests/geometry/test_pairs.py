"""Series of pairs -> rows, on layers read from real files.

Against distances taken by hand, planted copies, and the published shape.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from checkpoints import expert_name, tiny_checkpoint, tiny_config, tiny_tensors, write_checkpoint
from geometry.experts import random_expert, shuffled
from moescope.checkpoint import open_checkpoint
from moescope.comparison.tables import TABLES
from moescope.errors import BadInput
from moescope.families import read_moe
from moescope.geometry.distances import distance, polar_factor, sv_alignment
from moescope.geometry.matching import PROJECTIONS, match_neurons, matched_chance
from moescope.geometry.pairs import bootstrap, layer_geometry, layer_means
from moescope.tables import conform

GOLDEN = (Path(__file__).parents[1] / "golden" / "merge_chart.csv").read_text()
PUBLISHED = {row["series"]: row for row in csv.DictReader(GOLDEN.splitlines())}
SIZES = {"layers": 2, "experts": 6, "d_model": 96, "d_ff": 64}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("base") / "base", **SIZES)
    return read_moe(open_checkpoint(folder)).layers


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The same model after a training that matched later layers more.

    Noise of 5 % in the first layer, 10 % in the last.
    """
    generator = torch.Generator().manual_seed(7)
    tensors = tiny_tensors(**SIZES)
    for name, tensor in tensors.items():
        if "experts" in name:
            share = 0.05 if ".0." in name[:16] else 0.10
            tensors[name] = tensor + share * torch.randn(tensor.shape, generator=generator)
    folder = write_checkpoint(tmp_path_factory.mktemp("tuned") / "tuned", tensors, tiny_config(2, 6))
    return read_moe(open_checkpoint(folder)).layers


def row_of(frame: pd.DataFrame, **keys: object) -> pd.Series:
    for key, value in keys.items():
        frame = frame[frame[key] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_rows_are_the_distances_of_the_pairs_named(base, tuned):
    frames = layer_geometry(base[1], tuned[1], [(0, 0), (2, 5)], {"drift": "none"})
    geometry = frames["geometry"]
    assert set(geometry["layer"]) == {1}
    assert set(geometry["matrix"]) == set(PROJECTIONS)
    assert not geometry["matched"].any()
    a, b = base[1].expert(2).down_DF, tuned[1].expert(5).down_DF
    found, expected = row_of(geometry, matrix="down", expert_a=2, expert_b=5), distance(a, b)
    assert found["relative_l2"] == pytest.approx(expected.relative_l2)
    assert found["cosine"] == pytest.approx(expected.cosine)
    assert found["norm_ratio"] == pytest.approx(expected.norm_ratio)
    assert found["sv_alignment"] == pytest.approx(sv_alignment(polar_factor(a), polar_factor(b)), abs=1e-6)


def test_a_matched_series_is_the_distance_after_matching(base):
    series = {"cluster": "none", "cluster_permuted": "signed", "plain": "unsigned"}
    geometry = layer_geometry(base[0], base[0], [(1, 3)], series)["geometry"]
    dominant, member = base[0].expert(1), base[0].expert(3)
    for name, signed in (("cluster_permuted", True), ("plain", False)):
        matched = match_neurons(dominant, member, signed).apply(member)
        found = row_of(geometry, series=name, matrix="up")
        assert found["matched"]
        assert found["relative_l2"] == pytest.approx(distance(dominant.up_FD, matched.up_FD).relative_l2)
        expected = sv_alignment(polar_factor(dominant.up_FD), polar_factor(matched.up_FD))
        assert found["sv_alignment"] == pytest.approx(expected, abs=1e-5)
    apart = {name: row_of(geometry, series=name, matrix="up")["relative_l2"] for name in series}
    assert apart["cluster_permuted"] < apart["plain"] < apart["cluster"]


def test_a_dominant_expert_is_read_once_for_all_its_members(base):
    read = []
    layer = base[0]
    counted = {
        name: dataclasses.replace(
            getattr(layer, name),
            read=lambda e, name=name: (read.append((name, e)), getattr(layer, name).read(e))[1],
        )
        for name in ("gate_EFD", "up_EFD", "down_EDF")
    }
    counting = dataclasses.replace(layer, **counted)
    layer_geometry(
        counting, counting, [(0, 1), (0, 2), (0, 3)], {"cluster": "none"}, matrices=("gate", "down")
    )
    compared = [(name, e) for name in ("gate_EFD", "down_EDF") for e in range(4)]
    for_chance = [("up_EFD", 0), ("up_EFD", 1)]  # of the first pair, whose matching is the chance level
    assert sorted(read) == sorted(compared + for_chance)


def test_drift_and_clusters_have_the_published_distances(base, tuned):
    """Drift small and rising with the layer, R near 1; clusters of unrelated experts at chance.

    Matching moves them to the random band, no further.
    """
    same = [(expert, expert) for expert in range(6)]
    clusters = [(0, 1), (0, 2), (3, 4), (3, 5)]
    layers = []
    for number in (0, 1):
        layers.append(
            layer_geometry(base[number], tuned[number], same, {"base_to_ift": "none"})["geometry_layers"]
        )
        series = {"m_smoe": "none", "m_smoe_permuted": "unsigned"}
        layers.append(layer_geometry(base[number], base[number], clusters, series)["geometry_layers"])
    table = pd.concat(layers, ignore_index=True)
    conform(TABLES["geometry_layers"], table)
    means = table.groupby(["series", "layer"])[["relative_l2_mean", "sv_alignment_mean"]].mean()
    for layer, column in ((0, "relative_l2_first_layer"), (1, "relative_l2_last_layer")):
        drift = means.loc[("base_to_ift", layer)]
        assert drift["relative_l2_mean"] == pytest.approx(float(PUBLISHED["base_to_ift"][column]), abs=0.01)
        assert drift["sv_alignment_mean"] == pytest.approx(
            float(PUBLISHED["base_to_ift"]["sv_alignment"]), abs=0.02
        )
        cluster = means.loc[("m_smoe", layer)]
        assert cluster["relative_l2_mean"] == pytest.approx(float(PUBLISHED["m_smoe"][column]), abs=0.02)
        assert cluster["sv_alignment_mean"] == pytest.approx(
            float(PUBLISHED["m_smoe"]["sv_alignment"]), abs=0.02
        )
        rows = table[(table["series"] == "m_smoe_permuted") & (table["layer"] == layer)]
        assert (rows["relative_l2_mean"] - rows["null_l2_matched"]).abs().max() < 0.02
        assert (rows["sv_alignment_mean"] - rows["null_sv_matched"]).abs().max() < 0.03
        assert (rows["null_l2_matched"] < 1.36).all()
    assert np.allclose(table["null_l2"], 2**0.5)


def test_a_permuted_copy_is_restored_by_matching_and_down_even_when_held_out(base):
    copy, _, _ = shuffled(base[0].expert(0), 3, flip=True)
    pretended = dataclasses.replace(base[0])
    object.__setattr__(pretended, "expert", lambda number: base[0].expert(0) if number == 0 else copy)
    series = {"stored_order": "none", "signed": "signed", "held_out": "held_out"}
    geometry = layer_geometry(pretended, pretended, [(0, 1)], series)["geometry"]
    for matrix in PROJECTIONS:
        assert row_of(geometry, series="stored_order", matrix=matrix)["relative_l2"] > 1.2
        for name in ("signed", "held_out"):
            assert row_of(geometry, series=name, matrix=matrix)["relative_l2"] == pytest.approx(0, abs=1e-6)
            assert row_of(geometry, series=name, matrix=matrix)["sv_alignment"] == pytest.approx(1, abs=1e-5)


def test_random_experts_gain_nothing_on_what_was_held_out(base):
    table = layer_geometry(base[0], base[0], [(a, a + 1) for a in range(5)], {"check": "held_out"})[
        "geometry_layers"
    ]
    down, gate = (row_of(table, matrix=matrix) for matrix in ("down", "gate"))
    assert down["relative_l2_mean"] == pytest.approx(2**0.5, abs=0.01)
    assert down["null_l2_matched"] == pytest.approx(2**0.5)
    assert gate["relative_l2_mean"] == pytest.approx(gate["null_l2_matched"], abs=0.02)
    assert gate["null_l2_matched"] < 1.35


def test_without_sv_nothing_is_decomposed_and_r_is_null(base, monkeypatch):
    monkeypatch.setattr("moescope.geometry.pairs.polar_factor", None)
    frames = layer_geometry(base[0], base[0], [(0, 1), (2, 3)], {"cluster": "none"}, sv=False)
    assert frames["geometry"]["sv_alignment"].isna().all()
    assert frames["geometry_layers"]["sv_alignment_low"].isna().all()
    assert frames["geometry_layers"]["relative_l2_low"].notna().all()


def test_no_pairs_are_no_rows(base):
    frames = layer_geometry(base[0], base[0], [], {"singletons": "none"})
    assert all(frame.empty for frame in frames.values())


def test_bad_names_and_weights_are_rejected(base, tmp_path):
    with pytest.raises(BadInput, match="unknown matching 'loose'; known: none, signed"):
        layer_geometry(base[0], base[0], [(0, 1)], {"x": "loose"})
    tensors = tiny_tensors(**SIZES)
    tensors[expert_name(1, 4, "up")][0, 0] = float("inf")
    broken = read_moe(
        open_checkpoint(write_checkpoint(tmp_path / "broken", tensors, tiny_config(2, 6)))
    ).layers
    with pytest.raises(BadInput, match=r"experts\.4\.w3\.weight.*layer 1 holds NaN"):
        layer_geometry(base[1], broken[1], [(4, 4)], {"x": "none"})


# --- the interval


def test_the_interval_is_that_of_a_bootstrap_over_units():
    """Against scipy's percentile bootstrap, where every pair is its own unit."""
    from scipy.stats import bootstrap as scipy_bootstrap

    values = np.random.default_rng(1).gamma(2, size=40)
    found = bootstrap(values, np.arange(40))
    oracle = scipy_bootstrap(
        (values,), np.mean, method="percentile", n_resamples=9999, random_state=0
    ).confidence_interval
    assert found["mean"] == pytest.approx(values.mean())
    assert found["sd"] == pytest.approx(np.std(values, ddof=1))
    assert found["low"] == pytest.approx(oracle.low, abs=0.03)
    assert found["high"] == pytest.approx(oracle.high, abs=0.03)


def test_pairs_that_share_their_dominant_count_as_one():
    values = np.repeat([1.0, 2.0, 3.0, 4.0], 10)
    apart, together = bootstrap(values, np.arange(40)), bootstrap(values, np.repeat(np.arange(4), 10))
    assert together["high"] - together["low"] > 2 * (apart["high"] - apart["low"])
    assert apart["mean"] == together["mean"] == 2.5


def test_one_pair_has_no_interval_and_missing_values_do_not_count():
    alone = bootstrap(np.array([0.5]), np.array([0]))
    assert alone["mean"] == 0.5
    assert all(np.isnan(alone[part]) for part in ("sd", "low", "high"))
    assert bootstrap(np.array([1.0, np.nan, 3.0]), np.arange(3))["mean"] == 2
    assert np.isnan(bootstrap(np.array([np.nan]), np.array([0]))["mean"])


def test_means_have_the_chance_level_of_their_series():
    rows = [
        {
            "series": name,
            "layer": 0,
            "layer_name": "b",
            "matrix": "gate",
            "expert_a": e,
            "expert_b": e,
            "relative_l2": 1.0,
            "sv_alignment": 0.0,
            "norm_ratio": 1.0,
            "matched": name == "x",
        }
        for name in ("x", "y")
        for e in range(3)
    ]
    pair = random_expert(0, 64, 96), random_expert(1, 64, 96)
    chance = {"x": matched_chance(*pair, True), "y": matched_chance(*pair, False)}
    table = layer_means(pd.DataFrame(rows), chance)
    assert row_of(table, series="x")["null_l2_matched"] == chance["x"]["gate"].relative_l2
    assert row_of(table, series="y")["null_l2_matched"] == chance["y"]["gate"].relative_l2
    assert chance["x"]["gate"].relative_l2 < chance["y"]["gate"].relative_l2
    assert row_of(table, series="x")["matched_l2"] == chance["x"]["gate"].relative_l2
    assert np.isnan(row_of(table, series="y")["matched_l2"])  # it is compared in stored order


def test_biased_experts_have_the_chance_level_of_unsigned_matching(base):
    """GPT-OSS's experts have biases: a flip would be another function, so chance must not use one."""

    def gate_chance(layer, matching):
        table = layer_geometry(layer, layer, [(0, 1)], {"x": matching})["geometry_layers"]
        return row_of(table, matrix="gate")["null_l2_matched"]

    read = base[0].gate_EFD.read
    biases = dataclasses.replace(base[0].gate_EFD, read=lambda expert: read(expert)[:, 0])
    biased = dataclasses.replace(base[0], gate_bias_EF=biases)
    assert gate_chance(biased, "signed") == gate_chance(base[0], "unsigned")
    assert gate_chance(biased, "signed") > gate_chance(base[0], "signed")


def test_chance_does_not_need_projections_that_are_not_compared(tmp_path):
    tensors = tiny_tensors(**SIZES)
    tensors[expert_name(0, 1, "up")][0, 0] = float("nan")
    layer = read_moe(open_checkpoint(write_checkpoint(tmp_path / "m", tensors, tiny_config(2, 6)))).layers[0]
    table = layer_geometry(layer, layer, [(0, 1)], {"x": "none"}, matrices=("gate",))["geometry_layers"]
    assert table["relative_l2_mean"].notna().all()
    assert table["null_l2_matched"].isna().all()
