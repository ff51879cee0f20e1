"""Controls of hash routing: the token before, a draw per occurrence, a learned router of the token alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from decoder.tiny_lab import TINY, run, text, tiny, trained
from moescope.decoder.model import LabModel
from moescope.decoder.routers import RouterInput
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


@pytest.mark.parametrize(("router", "option"), [("hash", "of"), ("top2", "reads")])
def test_an_unknown_value_is_rejected_with_those_there_are(router, option):
    with pytest.raises(BadInput, match=f"unknown {option} of router {router} 'next'; known:"):
        LabModel(tiny(router, router_options={option: "next"}))
