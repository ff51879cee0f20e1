"""Routing of held-out documents: loads and metrics recomputed token by token, outputs expert by expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from decoder.tiny_lab import TINY, tiny, trained
from lab.tiny_training import tiny_config, tiny_corpus
from moescope.decoder.model import LabModel
from moescope.decoder.routers.some import key_cosine, key_map
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.lab import trained_routing
from moescope.lab.batches import TokenRows
from moescope.lab.evaluation import DocumentSample
from moescope.lab.trained_routing import (
    Activations,
    checkpoint_stability,
    chosen_experts,
    measure_routing,
    output_orthogonality,
    usage_histogram,
    usage_metrics,
)
from moescope.routing.load_balance import random_loads
from moescope.routing.stability import rank_correlation, routing_consistency, usage

TEXTS = {
    "a": ["a document", "x" * 31 + "and a longer one " * 5],
    "b": ["1 + 2 = 3\n" * 9],
    "new": ["zz top " * 8],
}


def model_of(router: str) -> LabModel:
    return trained(tiny(router, vocabulary=258))


def test_loads_and_metrics_are_those_of_every_window_read_alone():
    model = model_of("top2")
    sample = DocumentSample.of(TEXTS, Bytes(), 16)
    layers, loads = measure_routing(model, sample, ("a", "b"), 3, "cpu", "float32")
    counts = {domain: np.zeros((TINY.layers, TINY.experts)) for domain in TEXTS}
    sets: list[set[int]] = []
    for window in sample.windows:
        domain = sample.domains[window.document]
        ids = torch.from_numpy(window.tokens[:-1])[None]

        def consume(routing, domain=domain):
            for chosen in routing.chosen_TK.tolist():
                counts[domain][routing.layer][chosen] += 1
                if routing.layer == 0 and domain != "new":
                    sets.append(set(chosen))

        with torch.no_grad():
            model.eval()(ids, consume=consume)
    for domain, of_layers in counts.items():
        for layer, of_experts in enumerate(of_layers):
            rows = loads[(loads["domain"] == domain) & (loads["layer"] == layer)].sort_values("expert")
            assert rows["tokens"].tolist() == of_experts.tolist()
    found = layers[(layers["layer"] == 0) & (layers["domain"] == "")].set_index("metric")["value"]
    load = counts["a"][0] + counts["b"][0]
    assert found["cv"] == pytest.approx(load.std() / load.mean())
    assert found["max_violation"] == pytest.approx(load.max() / load.mean() - 1)
    assert found["min_over_mean"] == pytest.approx(load.min() / load.mean())
    weighted, weights = 0.0, 0.0
    for i in range(TINY.experts):
        for j in range(i):
            one, other = ({at for at, chosen in enumerate(sets) if e in chosen} for e in (i, j))
            weight = len(one) * len(other)
            weighted += weight * len(one & other) / max(len(one | other), 1)
            weights += weight
    assert found["expert_overlap"] == pytest.approx(weighted / weights)


def test_entropy_is_given_by_domain_also_where_nothing_was_trained_on():
    model = model_of("top2")
    sample = DocumentSample.of(TEXTS, Bytes(), 16)
    layers, _ = measure_routing(model, sample, ("a", "b"), 4, "cpu", "float32")
    rows = layers[layers["metric"] == "routing_entropy"].pivot(
        index="layer", columns="domain", values="value"
    )
    tokens = {
        domain: sum(len(w.tokens) - 1 for w in sample.windows if sample.domains[w.document] == domain)
        for domain in TEXTS
    }
    mean = (rows["a"] * tokens["a"] + rows["b"] * tokens["b"]) / (tokens["a"] + tokens["b"])
    assert rows[""].to_numpy() == pytest.approx(mean.to_numpy(), rel=1e-5)
    assert (rows["new"] > 0).all()


@pytest.mark.parametrize("router", ["dense", "top2", "spectra"])
def test_activation_statistics_are_those_of_every_window_read_alone(router: str):
    model = model_of(router)
    sample = DocumentSample.of(TEXTS, Bytes(), 16)
    layers, _ = measure_routing(model, sample, ("a", "b"), 3, "cpu", "float32")
    captured: dict[int, list[np.ndarray]] = {}
    for block in model.eval().blocks:
        block.mlp.register_forward_hook(
            lambda block, _, output: captured.setdefault(block.layer, []).append(output[0].double().numpy())
        )
    for window in sample.windows:
        if sample.domains[window.document] != "new":
            with torch.no_grad():
                model(torch.from_numpy(window.tokens[:-1])[None])
    assert set(layers["layer"]) == set(captured)
    for layer, parts in captured.items():
        values = np.concatenate(parts).ravel()
        found = layers[(layers["layer"] == layer) & (layers["domain"] == "")].set_index("metric")
        rms = np.sqrt(np.mean(values**2))
        assert found["value"]["ffn_rms"] == pytest.approx(rms, rel=1e-5)
        expected = scipy.stats.kurtosis(values, fisher=False)
        assert found["value"]["ffn_kurtosis"] == pytest.approx(expected, rel=1e-4)
        assert found["value"]["ffn_peak"] == pytest.approx(np.abs(values).max() / rms, rel=1e-5)
        near = [(np.abs(values) < factor * rms).mean() for factor in (0.0099, 0.0101)]
        assert near[0] <= found["value"]["ffn_sparsity"] <= near[1]


def test_gaussian_activations_have_their_chance_levels():
    draw = torch.Generator().manual_seed(0)
    activations = Activations()
    for _ in range(2):
        activations.add(0, 0.37 * torch.randn(4000, 500, generator=draw))
    rows = {row["metric"]: row for row in activations.rows(0)}
    assert rows["ffn_rms"]["value"] == pytest.approx(0.37, rel=0.002)
    assert rows["ffn_kurtosis"]["value"] == pytest.approx(rows["ffn_kurtosis"]["chance"], abs=0.01)
    assert rows["ffn_peak"]["value"] == pytest.approx(rows["ffn_peak"]["chance"], rel=0.1)
    expected = 2 * scipy.stats.norm.cdf(0.01) - 1
    assert rows["ffn_sparsity"]["chance"] == pytest.approx(expected)
    deviation = np.sqrt(expected / 4_000_000)
    assert abs(rows["ffn_sparsity"]["value"] - expected) < 4 * deviation


def test_a_dense_model_has_only_activation_statistics():
    layers, loads = measure_routing(
        model_of("dense"), DocumentSample.of(TEXTS, Bytes(), 16), ("a",), 4, "cpu", "float32"
    )
    assert set(layers["metric"]) == {"ffn_rms", "ffn_kurtosis", "ffn_peak", "ffn_sparsity"}
    assert len(loads) == 0


def test_a_router_without_probabilities_has_loads_and_no_entropy():
    layers, loads = measure_routing(
        model_of("hash"), DocumentSample.of(TEXTS, Bytes(), 16), ("a", "b"), 4, "cpu", "float32"
    )
    values = layers.groupby("metric")["value"]
    assert values.get_group("routing_entropy").isna().all()
    assert "gram_orthogonality" not in values.groups
    assert values.get_group("output_orthogonality").between(0, 1).all()
    assert loads["tokens"].sum() > 0


def test_output_orthogonality_by_hand():
    block = model_of("top2").eval().blocks[1].mlp
    x = torch.randn(7, TINY.d_model, generator=torch.Generator().manual_seed(0))
    gate_up, down = block.experts.gate_up.detach(), block.experts.down.detach()
    outputs = []
    for expert in range(TINY.experts):
        gate, up = (x @ gate_up[expert].T).chunk(2, dim=1)
        outputs.append((gate * torch.sigmoid(gate) * up @ down[expert].T).double().numpy())
    squares = 0.0
    for i in range(TINY.experts):
        for j in range(TINY.experts):
            if i != j:
                cosines = [
                    a @ b / np.linalg.norm(a) / np.linalg.norm(b)
                    for a, b in zip(outputs[i], outputs[j], strict=True)
                ]
                squares += np.mean(np.square(cosines))
    with torch.no_grad():
        found = output_orthogonality(block, x)
    assert found == pytest.approx(1 - np.sqrt(squares) / (TINY.experts * np.sqrt(2)), abs=1e-5)


def test_outputs_are_compared_for_tokens_of_all_documents_of_trained_domains(monkeypatch):
    monkeypatch.setattr(trained_routing, "OUTPUT_TOKENS", 27)  # two of each of the windows
    model = model_of("top2").eval()
    sample = DocumentSample.of(TEXTS, Bytes(), 16)
    assert 27 // len(sample.windows) == 2
    layers, _ = measure_routing(model, sample, ("a", "b"), 3, "cpu", "float32")
    found = layers[layers["metric"] == "output_orthogonality"].set_index("layer")["value"]
    for block in (one.mlp for one in model.blocks):
        inputs = []
        hook = block.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
        with torch.no_grad():
            for window in sample.windows:
                if sample.domains[window.document] != "new":
                    model(torch.from_numpy(window.tokens[:-1])[None])
            kept = [x[[len(x) // 4, 3 * len(x) // 4]] for x in inputs]
            expected = output_orthogonality(block, torch.cat(kept))
        hook.remove()
        assert found[block.layer] == pytest.approx(expected, abs=1e-6)


def test_equal_experts_score_what_equal_rows_score():
    block = model_of("top2").eval().blocks[0].mlp
    with torch.no_grad():
        for weight in block.experts.parameters():
            weight.copy_(weight[:1].expand_as(weight).clone())
        found = output_orthogonality(block, torch.randn(5, TINY.d_model))
    assert found == pytest.approx(1 - np.sqrt(7 / 16))


def test_counts_are_exact_where_the_model_computes_in_bfloat16():
    """More than 256 tokens per pass: sums of ones in bfloat16 would be rounded."""
    sample = DocumentSample.of({"a": ["an ordinary text " * 40] * 20}, Bytes(), 64)
    _, loads = measure_routing(model_of("top2"), sample, ("a",), 64, "cpu", "bfloat16")
    tokens = sum(len(window.tokens) - 1 for window in sample.windows)
    assert (loads.groupby("layer")["tokens"].sum() == 2 * tokens).all()


# --- routing over checkpoints: the same models give the same routing, other routers another, dense none


@pytest.fixture
def rows() -> TokenRows:
    return TokenRows.of(tiny_corpus().validation, Bytes(), 32).sample(10)


def checkpoint(folder: Path, seed: int, router: str = "top2") -> Path:
    torch.manual_seed(seed)
    model = LabModel(replace(tiny_config(router).model, experts=8))
    save_model(model, Bytes(), folder)
    return folder


def test_equal_checkpoints_are_wholly_stable(rows, tmp_path):
    saved = [(step, checkpoint(tmp_path / f"step-{step}", seed=0)) for step in (10, 20, 30)]
    found = checkpoint_stability(saved, rows, "cpu")
    assert (found["consistency"], found["usage_sigma"], found["kendall_tau"]) == pytest.approx(
        (1.0, 0.0, 1.0)
    )


def test_values_are_means_over_layers_and_neighbouring_checkpoints(rows, tmp_path):
    saved = [(step, checkpoint(tmp_path / f"step-{step}", seed=step)) for step in (30, 10, 20)]
    layers = {step: chosen_experts(folder, rows, "cpu") for step, folder in saved}
    same, chance, tau, sigma = [], [], [], []
    for layer in range(2):
        chosen = {step: layers[step][layer][0] for step in layers}
        for a, b in ((10, 20), (20, 30)):
            same.append(routing_consistency(chosen[a], chosen[b]))
            shares = [usage(chosen[step], 8) / usage(chosen[step], 8).sum() for step in (a, b)]
            chance.append(2 * (shares[0] * shares[1]).sum())  # two experts per token
            tau.append(rank_correlation(usage(chosen[a], 8).astype(float), usage(chosen[b], 8).astype(float)))
        shares = np.stack([usage(chosen[step], 8) / usage(chosen[step], 8).sum() for step in chosen])
        sigma.append(shares.std(0).mean())
    found = checkpoint_stability(saved, rows, "cpu")
    assert found["consistency"] == pytest.approx(np.mean(same))
    assert found["consistency_chance"] == pytest.approx(np.mean(chance))
    assert found["usage_sigma"] == pytest.approx(np.mean(sigma))
    assert found["kendall_tau"] == pytest.approx(np.mean(tau))
    assert found["consistency"] < 0.6, "other first weights route otherwise"


def test_only_the_last_four_count(rows, tmp_path):
    saved = [
        (step, checkpoint(tmp_path / f"step-{step}", seed=9 if step == 1 else 0)) for step in (1, 2, 3, 4, 5)
    ]
    found = checkpoint_stability(saved, rows, "cpu")
    assert found["consistency"] == 1.0


def test_one_checkpoint_or_no_routing_has_no_stability(rows, tmp_path):
    assert checkpoint_stability([(1, checkpoint(tmp_path / "step-1", 0))], rows, "cpu") == {}
    dense = [(step, checkpoint(tmp_path / f"dense-{step}", step, "dense")) for step in (1, 2)]
    assert checkpoint_stability(dense, rows, "cpu") == {}


# --- soME's figures, by hand, against scikit-free oracles, and at their chance levels


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
