"""Routing counted on a real GPU, held to the same decisions counted on the CPU."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from families.tiny_models import tiny_model
from moescope.execution.capture import Capture
from moescope.routing.counts import Counts
from moescope.routing.monitor import LoopMonitor
from moescope.statistics import BUCKETS
from moescope.types import Routing, Tokens
from routing.tiny_training import batch, documents, load, model_of

pytestmark = pytest.mark.gpu


def on_cpu(value: Any) -> Any:
    """A routing or its tokens with every tensor moved."""
    moved = {
        field.name: part.cpu()
        for field in fields(value)
        if isinstance(part := getattr(value, field.name), torch.Tensor)
    }
    return replace(value, **moved)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_counts_are_those_of_the_same_decisions_counted_on_the_cpu(kind):
    model = tiny_model(kind).model.cuda().eval()
    generator = torch.Generator().manual_seed(0)
    here, there = Counts((2, BUCKETS)), Counts((2, BUCKETS))
    met: dict[
        int, Tokens
    ] = {}  # a pass's tokens, moved once: by them a counter knows which layers belong together

    def consume(routing: Routing) -> None:
        here.consume(routing)
        assert routing.tokens is not None
        moved = met.setdefault(id(routing.tokens), on_cpu(routing.tokens))
        there.consume(replace(on_cpu(routing), tokens=moved))

    passes = []
    with Capture(model, consume) as capture, torch.no_grad():
        for number in range(3):
            ids = torch.randint(3, 60, (4, 9 + number), generator=generator).cuda()
            real = torch.rand(ids.shape, generator=generator).cuda() > 0.2
            zeros = torch.zeros_like(ids.view(-1))
            domain, bucket = ids.view(-1) % 2, ids.view(-1) * 4
            capture.tokens = Tokens(4, ids.view(-1), real.view(-1), zeros, zeros, domain, bucket)
            passes.append(capture.tokens)
            model(input_ids=ids)
    for gpu, cpu in zip(here.layers(), there.layers(), strict=True):
        assert (gpu.layer, gpu.phase, gpu.k) == (cpu.layer, cpu.phase, cpu.k)
        assert cpu.counts_MBE.sum() > 0
        np.testing.assert_array_equal(gpu.counts_MBE, cpu.counts_MBE)
        np.testing.assert_array_equal(gpu.pairs_EE, cpu.pairs_EE)
        np.testing.assert_allclose(gpu.gate_weight_MBE, cpu.gate_weight_MBE, rtol=1e-12)
        np.testing.assert_allclose(gpu.sums_MBS, cpu.sums_MBS, rtol=1e-5, atol=1e-5)


def test_a_training_on_the_gpu_counts_what_its_experts_were_handed(tmp_path):
    model = model_of().cuda()
    counts: dict[int, torch.Tensor] = {}
    experts = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    rows = documents(16)

    def remember(layer: int) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            real = given["attention_mask"].reshape(-1).bool()
            chosen = args[1][real].flatten()
            counts[layer] = counts.get(layer, 0) + torch.bincount(chosen, minlength=module.num_experts)

        return hook

    monitor = LoopMonitor(tmp_path / "run", every=3, decisions_every=2).watch(model)
    for layer, module in enumerate(experts):
        module.register_forward_pre_hook(remember(layer))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for start in range(0, 16, 4):
        given = {name: part.cuda() for name, part in batch(rows[start : start + 4]).items()}
        if start == 0:  # so that the check of the first pass does not count
            model(**given)
            counts.clear()
            monitor.capture.counts.take(torch.device("cuda"))
        model(**given).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        monitor.step()
    run = monitor.close()
    np.testing.assert_array_equal(load(run), torch.stack([counts[layer] for layer in sorted(counts)]).cpu())
    entropy = run.table("routing_layers").query("metric == 'routing_entropy'")["value"]
    assert entropy.between(0, np.log(4) + 1e-6).all()
    assert len(entropy) > 0
