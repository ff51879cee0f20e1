"""The two controls."""

from __future__ import annotations

import numpy as np
import torch

from decoder.tiny_lab import run, text, tiny
from moescope.decoder.model import LabModel, parameter_counts
from moescope.decoder.routers import hash
from moescope.decoder.routers.hash import Hash


def test_a_token_has_the_same_experts_wherever_it_stands_and_others_in_other_layers():
    model, ids = LabModel(tiny("hash")).eval(), text(6, 16)
    made = run(model, ids)
    for layer, routing in enumerate(made.layers):
        table = model.routers[layer].table_VK
        assert torch.equal(routing.chosen_TK, table[ids.flatten()])
        assert (routing.gates_TK == 0.5).all()
    assert not torch.equal(made.layers[0].chosen_TK, made.layers[1].chosen_TK)


def test_the_table_depends_on_seed_and_layer_alone_and_is_even_over_the_vocabulary():
    torch.manual_seed(1)
    one = Hash(tiny("hash", vocabulary=4000), 2)
    torch.manual_seed(2)
    assert torch.equal(one.table_VK, Hash(tiny("hash", vocabulary=4000), 2).table_VK)
    assert not torch.equal(
        one.table_VK, Hash(tiny("hash", vocabulary=4000, router_options={"seed": 1}), 2).table_VK
    )
    counts = torch.bincount(one.table_VK.flatten(), minlength=8)
    assert (counts - 1000).abs().max() < 150  # 5 standard deviations


def test_the_table_is_drawn_in_parts_with_equal_numbers(monkeypatch):
    monkeypatch.setattr(hash, "AT_ONCE", 50)
    config = tiny("hash", vocabulary=100)
    order = np.random.default_rng([0, 3]).random((100, config.experts)).argsort(axis=1)
    assert Hash(config, 3).table_VK.tolist() == order[:, : config.top_k].tolist()


def test_dense_has_one_expert_of_the_active_width_and_no_router():
    model = LabModel(tiny("dense"))
    assert model.blocks[0].mlp.experts.gate_up.shape == (1, 2 * 2 * 16, 32)
    active = (
        parameter_counts(tiny("topk", experts=2)).total - 3 * 2 * 32
    )  # all experts chosen, less the router rows
    assert parameter_counts(tiny("dense")).total == active
