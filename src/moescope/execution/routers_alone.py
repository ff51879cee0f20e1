"""Routers of the lab asked about single tokens, as they are or with other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moescope.decoder.routers import Router, RouterInput
from moescope.execution.adapters import Ask, Asked, Decision, RouterReads


@torch.no_grad()
def ask(router: Router, reads: RouterReads) -> Asked:
    """Return the router's answer about single tokens: all are real, with id 0 where none is known."""
    x_TD = reads.x_TD
    ids_T = (
        torch.zeros(len(x_TD), dtype=torch.long, device=x_TD.device) if reads.ids_T is None else reads.ids_T
    )
    real_T = torch.ones(len(x_TD), dtype=torch.bool, device=x_TD.device)
    routed = router(RouterInput(x_TD.float(), ids_T, real_T, router.layer, reads.carried_TR))
    return Asked(Decision(x_TD, routed.chosen_TK, routed.gates_TK), routed.logits_TE, routed.selection_TE)


def with_router(router: Router, tensors: Mapping[str, Tensor], n_experts: int, top_k: int | None) -> Ask:
    """Return a router of the same class and options with these tensors, for `n_experts` experts."""
    config = replace(router.config, experts=n_experts, top_k=top_k or router.config.top_k)
    with torch.random.fork_rng(devices=[]):  # its initial weights are discarded
        changed = type(router)(config, router.layer, router.shared)
    changed.load_state_dict(dict(tensors))
    device = next((tensor.device for tensor in router.state_dict().values()), None)
    return partial(ask, changed.to(device).eval())
