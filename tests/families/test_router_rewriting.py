"""Lab checkpoints with fewer experts.

Against the original model whose router is told by hand that the others are not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoder.tiny_lab import run, text, tiny, trained
from moescope.checkpoint import open_checkpoint
from moescope.decoder.model import LabModel
from moescope.decoder.routers import Routed, RouterInput
from moescope.decoder.saving import load_model, save_model
from moescope.decoder.vocabulary import Bytes
from moescope.families import read_moe
from moescope.families.writing import NewLayer, plan_moe, remap_hash_table, write_moe

KEPT = {0: [1, 4, 6, 7], 1: [0, 2, 3, 5], 2: [0, 1, 6, 7]}  # other experts in every layer


def saved(folder: Path, router: str, **changes: object) -> tuple[Path, LabModel]:
    """Trained a little, its experts made so strong that nobody can overlook one."""
    model = trained(tiny(router, vocabulary=258, **changes)).eval()
    for name, weight in model.named_parameters():
        if ".experts." in name and "bias" not in name:
            weight.data.mul_(4)
    save_model(model, Bytes(), folder)
    return folder, model


def pruned(folder: Path, source: Path) -> tuple[LabModel, int]:
    """The checkpoint of the kept experts as the lab loads it, and the bytes that were foretold for it."""
    moe = read_moe(open_checkpoint(source))
    layers = {layer: NewLayer(kept) for layer, kept in KEPT.items()}
    planned = plan_moe(moe, layers).total_bytes
    assert write_moe(moe, folder, layers).total_bytes == planned
    return load_model(folder)[0], planned


class ByHand(nn.Module):
    """A router of the original model that looks at the kept experts alone."""

    def __init__(self, router: Any, rule: Callable[[Any, RouterInput, Tensor], Routed], kept: list[int]):
        super().__init__()
        self.own, self.rule = router, rule
        self.gone_E = torch.ones(router.config.experts, dtype=torch.bool)
        self.gone_E[kept] = False

    def forward(self, given: RouterInput) -> Routed:
        return self.rule(self.own, given, self.gone_E)


def restricted(model: LabModel, rule: Callable[[Any, RouterInput, Tensor], Routed]) -> LabModel:
    for layer, kept in KEPT.items():
        model.blocks[layer].mlp.router = ByHand(model.blocks[layer].mlp.router, rule, kept)  # type: ignore[assignment]
    return model


def softmax_of_some(logits_TE: Tensor, chosen_TK: Tensor) -> Tensor:
    """Gates: a softmax over a token's choices, one by one."""
    weights = [[logits[int(e)].exp() for e in row] for logits, row in zip(logits_TE, chosen_TK, strict=True)]
    return torch.stack([torch.stack([w / sum(row) for w in row]) for row in weights])


def thresholds(router: Any, given: RouterInput, gone_E: Tensor) -> Routed:
    """Expert choice: probabilities over the experts there are, thresholds as they were."""
    weights_TE = (given.x_TD @ router.weight.T).exp() * ~gone_E
    p_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    taken_TE = (p_TE >= router.threshold_E) & ~gone_E
    return Routed(torch.where(taken_TE, torch.arange(len(gone_E)), -1), torch.where(taken_TE, p_TE, 0))


def keys(router: Any, given: RouterInput, gone_E: Tensor) -> Routed:
    """SoME: the best keys of those there are."""
    hidden = nn.functional.gelu(given.x_TD @ router.wide.weight.T + router.wide.bias)
    q_TD = hidden @ router.narrow.weight.T + router.narrow.bias
    q_TD = q_TD / q_TD.norm(dim=-1, keepdim=True)
    scores_TE = q_TD @ (router.direction_ED * router.strength_E[:, None]).T
    chosen_TK = scores_TE.masked_fill(gone_E, -9).topk(router.config.top_k).indices
    return Routed(chosen_TK, softmax_of_some(scores_TE / router.options["temperature"], chosen_TK))


def costs(router: Any, given: RouterInput, gone_E: Tensor) -> Routed:
    """SPECTRA: who is not there wants no token, so nobody is repelled by it.

    The state goes through the same GRU.
    """
    x_TD, options, n = given.x_TD, router.options, len(gone_E)
    if options["plain"]:
        logits_TE = x_TD @ router.linear.weight.T
        chosen_TK = logits_TE.masked_fill(gone_E, -99).topk(router.config.top_k).indices
        return Routed(chosen_TK, softmax_of_some(logits_TE, chosen_TK))
    carried = router.shared(x_TD, given.carried_TR) if options["gru"] else None
    state_TR = carried if options["gru"] else router.state(x_TD)
    h_TER = (state_TR @ router.expand.weight.T + router.expand.bias).view(len(x_TD), n, -1)
    v_TER = (x_TD @ router.express.weight.T + router.express.bias).view(
        len(x_TD), n if options["expression"] else 1, -1
    )
    s_TE = nn.functional.cosine_similarity(h_TER, v_TER.expand_as(h_TER), dim=-1)
    p_TE = (s_TE / options["epsilon"]).exp() * ~gone_E
    p_TE = p_TE / p_TE.sum(-1, keepdim=True)
    m_ER = nn.functional.normalize(router.direction_ER, dim=-1)
    cost_TE = (
        -s_TE + options["saturation_weight"] * (s_TE.abs() - options["saturation_start"]).clamp(min=0) ** 2
    )
    there = [expert for expert in range(n) if not gone_E[expert]]
    for i in there:
        for j in there:
            if i != j:
                square = float(m_ER[i] @ m_ER[j]) ** 2
                shared = (
                    s_TE[:, i].abs() / (len(there) - 1) if options["repulsion"] == "published" else p_TE[:, j]
                )
                cost_TE[:, i] += options["repulsion_weight"] * square * shared
    logits_TE = -cost_TE / options["epsilon"]
    chosen_TK = (logits_TE + router.potential_E).masked_fill(gone_E, -999).topk(router.config.top_k).indices
    return Routed(chosen_TK, softmax_of_some(logits_TE, chosen_TK), carried_TR=carried)


def same_logits(small: LabModel, original: LabModel) -> None:
    ids = text(5, 20, seed=3)
    ours, theirs = run(small, ids), run(original, ids)
    assert ours.layers[0].n_experts == 4
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
    for layer, kept in KEPT.items():
        number_E = torch.tensor([*kept, -1])
        mine = number_E[ours.layers[layer].chosen_TK].sort(-1).values
        other = theirs.layers[layer].chosen_TK.sort(-1).values
        assert torch.equal(mine[:, -other.shape[1] :], other[:, -mine.shape[1] :])


@pytest.mark.parametrize(
    ("router", "changes", "rule"),
    [
        ("expert_choice", {}, thresholds),
        ("expert_choice", {"block": "some"}, thresholds),
        ("some", {}, keys),
        ("some", {"block": "modern"}, keys),
        ("spectra", {}, costs),
        ("spectra", {"router_options": {"gru": False, "repulsion": "published"}}, costs),
        ("spectra", {"router_options": {"expression": False}, "block": "some"}, costs),
        ("spectra", {"router_options": {"plain": True}}, costs),
    ],
)
def test_a_pruned_checkpoint_is_the_original_with_its_router_restricted_to_the_kept_experts(
    tmp_path: Path, router: str, changes: dict[str, Any], rule: Any
):
    source, model = saved(tmp_path / "source", router, **changes)
    if router == "some":
        strengths = [block.mlp.router.strength_E for block in model.blocks]
        for at, strength_E in enumerate(strengths):  # as after a long training
            strength_E.copy_(torch.linspace(0.4, 1, 8).roll(at))
        save_model(model, Bytes(), source)
    if router == "spectra" and not changes.get("router_options", {}).get("plain"):
        for at, block in enumerate(model.blocks):
            block.mlp.router.potential_E.copy_(torch.linspace(-3, 3, 8).roll(3 * at))
        save_model(model, Bytes(), source)
    small, planned = pruned(tmp_path / "small", source)
    assert not torch.allclose(
        run(small, text(5, 20, seed=3)).logits, run(model, text(5, 20, seed=3)).logits, atol=1e-3
    )
    same_logits(small, restricted(model, rule))
    tensors = [*small.state_dict().values()]
    assert planned == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("router", ["expert_choice", "some", "spectra", "hash"])
def test_what_a_router_keeps_of_nobody_is_copied_and_of_everybody_changes_no_bit(tmp_path: Path, router: str):
    source, model = saved(tmp_path / "source", router)
    small, _ = pruned(tmp_path / "small", source)
    shared = {"some": ("steps", "wide.weight"), "expert_choice": ("steps",)}.get(router, ())
    for name in shared:
        for ours, theirs in zip(small.routers, model.routers, strict=True):
            assert torch.equal(ours.state_dict()[name], theirs.state_dict()[name])
            assert ours.state_dict()[name].any()
    for name, tensor in small.state_dict().items():
        if name.startswith("shared_router."):
            assert torch.equal(tensor, model.state_dict()[name])
    write_moe(read_moe(open_checkpoint(source)), tmp_path / "same", dict.fromkeys(KEPT, NewLayer(range(8))))
    ours, theirs = load_model(tmp_path / "same")[0].state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_pruned_table_leaves_kept_tokens_where_they_are_and_deals_the_others_evenly(tmp_path: Path):
    source, model = saved(tmp_path / "source", "hash")
    small, _ = pruned(tmp_path / "small", source)
    for layer, kept in KEPT.items():
        old, new = (of.blocks[layer].mlp.router.table_VK for of in (model, small))
        number = torch.tensor(kept)[new]  # in the source's numbers
        stays = torch.isin(old, torch.tensor(kept))
        assert torch.equal(number[stays], old[stays])
        assert (number[:, 0] != number[:, 1]).all()
        dealt = torch.bincount(new[~stays], minlength=4)
        assert dealt.sum() == (~stays).sum() > 200
        assert dealt.max() - dealt.min() <= 0.1 * dealt.sum()
        model.blocks[layer].mlp.router.table_VK.copy_(number)  # the original, told where these tokens go
    ids = text(5, 20, seed=3)
    torch.testing.assert_close(run(small, ids).logits, run(model, ids).logits, rtol=1e-5, atol=1e-6)


def test_tokens_of_experts_that_are_gone_are_dealt_in_turn_past_those_a_token_has():
    table_VK = torch.tensor([[0, 3], [3, 1], [3, 4], [2, 0], [4, 2], [3, 2]])
    # in turn: 0 is had already, so 1; 2; then 0 and 1; 2 is had, 0; 1
    dealt = remap_hash_table(table_VK, [(0,), (1,), (2,)])
    assert dealt.tolist() == [[0, 1], [2, 1], [0, 1], [2, 0], [0, 2], [1, 2]]
    assert dealt.dtype == torch.int64


def test_a_group_has_the_tokens_of_all_its_members():
    table_VK = torch.tensor([[0, 3], [1, 2], [3, 2]])
    assert remap_hash_table(table_VK, [(0, 3), (1,), (2,)]).tolist() == [[0, 0], [1, 2], [0, 2]]


def test_a_width_that_happens_to_be_the_number_of_experts_is_not_taken_for_one(tmp_path: Path):
    """SoME's query network is 2D x D: with as many experts as D is wide it must still be copied whole."""
    model = LabModel(replace(tiny("some", vocabulary=258), experts=32, layers=1)).eval()
    save_model(model, Bytes(), tmp_path / "source")
    moe = read_moe(open_checkpoint(tmp_path / "source"))
    write_moe(moe, tmp_path / "small", {0: NewLayer(range(16))})
    small = load_model(tmp_path / "small")[0].blocks[0].mlp.router.state_dict()
    assert torch.equal(small["wide.weight"], model.blocks[0].mlp.router.state_dict()["wide.weight"])
    assert small["direction_ED"].shape == (16, 32)
