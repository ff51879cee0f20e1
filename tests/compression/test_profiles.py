"""Sums for clustering: equal to what the whole text gives at once, and additive over texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compression.tiny_plans import documents, traced
from families.tiny_models import tiny_model
from moescope.compression import hc_smoe
from moescope.compression.calibration import calibrate
from moescope.compression.hc_smoe import ExpertMeans
from moescope.compression.m_smoe import LogitProfiles
from moescope.execution.adapters import Block
from moescope.types import Routing


class Everything:
    """Keeps every layer's states and logits, padding left out."""

    def __init__(self) -> None:
        self.x: dict[int, list[torch.Tensor]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def consume(self, routing: Routing, block: Block) -> None:
        assert routing.tokens is not None
        real = routing.tokens.real_T
        self.x.setdefault(routing.layer, []).append(routing.x_TD[real])
        self.logits.setdefault(routing.layer, []).append(routing.logits_TE[real])

    def sums(self) -> dict[str, torch.Tensor]:
        return {}


def test_profiles_and_means_are_those_of_all_tokens_at_once():
    model = traced(tiny_model("mixtral").model)
    kept, profiles, means = Everything(), LogitProfiles(), ExpertMeans()
    found = calibrate(model, documents(), [kept, profiles, means], batch_size=4)
    for layer, block in found.blocks.items():
        logits = torch.cat(kept.logits[layer]).double().numpy()
        centred = logits - logits.mean(1, keepdims=True)
        assert profiles.sums()[f"layer.{layer}.logit_gram_EE"].numpy() == pytest.approx(centred.T @ centred)
        x = torch.cat(kept.x[layer])
        experts = block.experts
        for expert in range(block.n_experts):  # by hand: SwiGLU of the fused tensors
            gate, up = torch.nn.functional.linear(x, experts.gate_up_proj[expert]).chunk(2, dim=-1)
            out = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, experts.down_proj[expert])
            ours = (
                means.sums()[f"layer.{layer}.output_sum_ED"][expert]
                / means.sums()[f"layer.{layer}.output_tokens"]
            )
            assert ours.numpy() == pytest.approx(out.detach().double().mean(0).numpy(), abs=1e-6)


def test_outputs_are_summed_a_few_thousand_tokens_at_a_time(monkeypatch):
    model = traced(tiny_model("mixtral").model)
    whole = ExpertMeans()
    calibrate(model, documents(), [whole])
    monkeypatch.setattr(hc_smoe, "CHUNK", 5)
    seen: list[int] = []
    plain = hc_smoe.ungated_output
    monkeypatch.setattr(
        hc_smoe, "ungated_output", lambda block, x, e: (seen.append(len(x)), plain(block, x, e))[1]
    )
    parts = ExpertMeans()
    calibrate(model, documents(), [parts])
    assert max(seen) == 5
    for name, value in whole.sums().items():
        assert parts.sums()[name].numpy() == pytest.approx(value.numpy(), rel=1e-5, abs=1e-5)
    assert np.isfinite(sum(float(value.sum()) for value in parts.sums().values()))
