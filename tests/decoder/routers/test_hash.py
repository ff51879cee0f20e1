"""Hash routing, its controls (the token before, a draw per occurrence, a learned router), and dense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.tiny_lab import TINY, run, text, tiny, trained
from moescope.decoder.model import LabModel, parameter_counts
from moescope.decoder.routers import RouterInput, hash
from moescope.decoder.routers.hash import Hash
from moescope.decoder.saving import layout_of, load_model, save_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput

CONTROLS = [
    ("hash", {"of": "previous"}),
    ("hash", {"of": "occurrence"}),
    ("top2", {"reads": "embedding"}),
]
EVERY = pytest.mark.parametrize(("router", "options"), CONTROLS)


def model_of(router: str, options: dict[str, str]) -> LabModel:
    return trained(tiny(router, router_options=options)).eval()


def sets_of(model: LabModel, ids: torch.Tensor, **more) -> torch.Tensor:
    return run(model, ids, **more).sets()


@EVERY
def test_alike_alone_in_a_batch_and_token_by_token(router, options):
    model, ids = model_of(router, options), text(5, 12)
    full, cache = sets_of(model, ids), model.new_cache()
    steps = [sets_of(model, ids[:, at : at + 1], cache=cache) for at in range(12)]
    assert torch.equal(torch.cat(steps, 2), full)
    for row in range(5):
        assert torch.equal(sets_of(model, ids[row : row + 1]), full[:, row : row + 1])


@EVERY
def test_saved_and_loaded_it_gives_the_same_logits(router, options, tmp_path: Path):
    model, ids = model_of(router, options), text(2, 9)
    save_model(model, Bytes(), tmp_path / "model")
    loaded, _ = load_model(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits_BLV, model(ids).logits_BLV)
    assert layout_of(model.config) == "moescope_lab"  # transformers' layouts cannot hold it


def test_the_previous_token_chooses():
    model, ids = model_of("hash", {"of": "previous"}), text(3, 10)
    tables = [router.table_VK for router in model.routers]
    for layer, sets in enumerate(sets_of(model, ids)):
        for row in range(3):
            for at in range(10):
                chosen = set(tables[layer][ids[row, max(at - 1, 0)]].tolist())
                assert set(np.flatnonzero(sets[row, at].numpy())) == chosen


def test_a_token_meets_other_experts_at_other_positions_and_loads_stay_even():
    model = model_of("hash", {"of": "occurrence"})
    ids = torch.full((1, 60), 7)
    sets = sets_of(model, ids)[0, 0]
    pairs = {tuple(np.flatnonzero(row.numpy())) for row in sets}
    assert len(pairs) > 14  # of the 28 pairs of 8 experts, in 60 draws
    counts = sets.float().sum(0)
    # 60 draws of 2 of 8: mean 15, σ √(60 · 1/4 · 3/4) = 3.4
    assert (counts - 15).abs().max() < 4 * 3.4


def test_a_router_of_embeddings_sees_the_token_alone_and_learns_from_the_text():
    config = tiny("top2", router_options={"reads": "embedding"})
    model = trained(config).eval()
    ids = text(4, 12)
    sets, other = sets_of(model, ids), sets_of(model, ids.flip(1)).flip(2)
    assert torch.equal(sets, other)
    hidden = trained(tiny("top2")).eval()
    assert not torch.equal(sets_of(hidden, ids), sets_of(hidden, ids.flip(1)).flip(2))
    model.train().zero_grad()
    output = model(ids[:, :-1], targets_BL=ids[:, 1:])
    output.lm_loss.backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in model.routers)


@EVERY
def test_outside_the_lab_s_model_it_says_what_is_missing(router, options):
    inner = model_of(router, options).routers[0]
    ids = torch.zeros(3, dtype=torch.long)
    with pytest.raises(BadInput, match="only a training of the lab"):
        inner(RouterInput(torch.zeros(3, TINY.d_model), ids, torch.ones(3, dtype=torch.bool), 0))


# --- hash routing itself, and the dense control


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
