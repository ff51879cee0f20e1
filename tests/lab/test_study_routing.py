"""Routing of held-out documents: loads and metrics recomputed token by token, outputs expert by expert."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from decoder.tiny_lab import TINY, tiny, trained
from moescope.decoder.model import LabModel
from moescope.decoder.vocabulary import Bytes
from moescope.lab import trained_routing
from moescope.lab.evaluation import DocumentSample
from moescope.lab.trained_routing import Activations, measure_routing, output_orthogonality

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
