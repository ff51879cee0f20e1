"""Mean outputs of experts.

Those of experts run by hand, of the documents meant, and nothing else changed by looking.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families.tiny_models import tiny_model
from moescope.execution.capture import Capture
from moescope.execution.documents import Document
from moescope.execution.models import TracedModel, runner_of
from moescope.routing import collectors
from moescope.routing.collectors import trace_model
from moescope.routing.counts_to_tables import expert_cosine_columns


def documents(count: int = 40) -> list[Document]:
    generator = np.random.default_rng(0)
    return [Document(n, n % 2, generator.integers(3, 60, generator.integers(4, 24))) for n in range(count)]


def traced(kind: str, batch_size: int = 4, phases: tuple[str, ...] = ("prefill",)):
    model = tiny_model(kind).model.eval()
    return trace_model(
        TracedModel("tiny", model, runner_of(model), None, "cpu"),
        ["a", "b"],
        documents(),
        phases,
        batch_size,
    )


def by_hand(kind: str, few: list[Document]) -> dict[int, np.ndarray]:
    """Every token of these documents through every expert it chose, one at a time.

    Mixtral's formula written out.
    """
    model = tiny_model(kind).model.eval()
    sums: dict[int, np.ndarray] = {}
    counts: dict[int, np.ndarray] = {}

    def consume(routing) -> None:
        experts = dict(model.named_modules())[f"{routing.layer_name}.experts"]
        n, d = routing.n_experts, routing.x_TD.shape[1]
        total, count = (
            sums.setdefault(routing.layer, np.zeros((n, d))),
            counts.setdefault(routing.layer, np.zeros(n)),
        )
        for x, chosen in zip(routing.x_TD, routing.chosen_TK.tolist(), strict=True):
            for expert in chosen:
                gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
                out = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                total[expert] += out.detach().double().numpy()
                count[expert] += 1

    with Capture(model, consume) as capture, torch.no_grad():
        for document in few:
            capture.tokens = None
            model(input_ids=torch.from_numpy(document.ids)[None])
    return {layer: total / counts[layer][:, None] for layer, total in sums.items()}


@pytest.mark.parametrize("batch_size", [1, 7])
def test_means_are_those_of_experts_run_one_by_one_on_the_first_documents_of_each_domain(batch_size):
    found = traced("mixtral", batch_size).outputs
    expected = by_hand("mixtral", documents()[:16])  # eight of each of two domains
    for layer, means in expected.items():
        np.testing.assert_allclose(found[layer], means, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["mixtral", "llama4", "switch_transformers", "gpt_oss", "dbrx"])
def test_looking_at_outputs_changes_no_count_in_any_kind_of_block(kind, monkeypatch):
    seen = traced(kind)
    assert all(np.isfinite(seen.outputs[counts.layer]).any() for counts in seen.main())
    monkeypatch.setattr(collectors, "OUTPUT_DOCUMENTS", 0)
    monkeypatch.setattr(collectors, "OUTPUT_TOKENS", 0)
    blind = traced(kind)
    assert blind.outputs == {}
    for ours, theirs in zip(seen.counts, blind.counts, strict=True):
        np.testing.assert_array_equal(ours.counts_MBE, theirs.counts_MBE)
        np.testing.assert_allclose(ours.gate_weight_MBE, theirs.gate_weight_MBE)


def test_reading_token_by_token_gives_the_same_means():
    whole, one_by_one = traced("mixtral"), traced("mixtral", phases=("decode",))
    np.testing.assert_allclose(one_by_one.outputs[1], whole.outputs[1], rtol=1e-3, atol=1e-6)


def test_cosines_are_of_every_pair_and_an_unknown_vector_has_none():
    rows = np.array([[3.0, 0.0], [0.0, 2.0], [1.0, 1.0], [np.nan, np.nan]])
    columns = expert_cosine_columns("outputs", rows)
    found = dict(
        zip(
            zip(columns["expert_a"].tolist(), columns["expert_b"].tolist(), strict=True),
            columns["cosine"],
            strict=True,
        )
    )
    assert found[0, 1] == pytest.approx(0)
    assert found[0, 2] == pytest.approx(np.sqrt(0.5))
    assert all(np.isnan(found[a, 3]) for a in range(3))
    assert columns["chance"][0] == pytest.approx(np.sqrt(2 / (np.pi * 2)))
