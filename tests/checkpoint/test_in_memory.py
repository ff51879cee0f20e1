"""A running model in the place of files."""

from __future__ import annotations

import torch

from families.tiny_models import tiny_model
from moescope.checkpoint.source import in_memory


def test_a_model_in_memory_reads_as_copies_that_the_model_cannot_change():
    model = tiny_model("qwen3_moe").model
    weights = in_memory(model, "the model")
    name = "model.layers.1.mlp.gate.weight"
    whole, row = weights.read(name), weights.read(name, 1)
    assert torch.equal(whole[1], row)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.zero_()
    assert whole.abs().sum() > 0
    assert row.abs().sum() > 0
