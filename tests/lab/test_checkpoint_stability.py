"""Routing over checkpoints: the same models give the same routing, other routers another, dense none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.tiny_training import tiny_config, tiny_corpus
from moescope.decoder.model import LabModel
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.lab.batches import TokenRows
from moescope.lab.trained_routing import checkpoint_stability, chosen_experts
from moescope.routing.stability import rank_correlation, routing_consistency, usage


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
