"""How strongly the language-model loss pulls on each router, apart from the auxiliary loss.

A router learns from the text only through its gates. Where gates are divided by their sum and one expert is
chosen, the gate is 1
whatever the router says, and nothing reaches it; the auxiliary loss still does, so the whole gradient does
not show it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moescope.execution.adapters import Block
from moescope.routing.step_tally import distributed


class RouterGradients:
    """Gradients of one step's losses into every router, summed over its micro-batches and averaged over
    ranks.

    Each loss costs one more backward pass, so this is for sampled steps.
    """

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.passes = 0
        self.already_scaled = (
            False  # whether losses were divided by the whole step's tokens, so that they add up to its mean
        )
        self.sums: dict[str, list[Tensor | None]] = {"lm": [None] * len(blocks), "aux": [None] * len(blocks)}

    def add(self, lm_loss: Tensor, aux_loss: Tensor | None, already_scaled: bool = False) -> None:
        """Take the gradients of one micro-batch, whose graph is kept for the training's own backward pass."""
        self.passes += 1
        self.already_scaled = already_scaled
        for name, loss in (("lm", lm_loss), ("aux", aux_loss)):
            pairs = [(row, weight) for row, block in enumerate(self.blocks) for weight in block.trained]
            if loss is None or not loss.requires_grad or not pairs:
                continue
            found = torch.autograd.grad(
                loss, [weight for _, weight in pairs], retain_graph=True, allow_unused=True
            )
            if all(gradient is None for gradient in found):
                raise RuntimeError(
                    f"no way leads from the {name} loss to a router (reentrant checkpointing hides it)"
                )
            for row in dict.fromkeys(row for row, _ in pairs):
                parts = [
                    g.detach().float().flatten()
                    for (own, _), g in zip(pairs, found, strict=True)
                    if own == row and g is not None
                ]
                before = self.sums[name][row]
                if parts:  # nothing is "no way there", which is not the same as a gradient of 0
                    whole = torch.cat(parts)
                    self.sums[name][row] = whole if before is None else before + whole

    def rows(self, step: int, ranks_add_up: bool = False) -> list[dict[str, Any]]:
        """The router_gradients table's rows of this step; null where a loss does not exist."""
        scale = 1.0 if self.already_scaled else 1.0 / max(self.passes, 1)
        world = torch.distributed.get_world_size() if distributed() else 1
        over = 1 if self.already_scaled and ranks_add_up else world
        norms: dict[str, list[float | None]] = {}
        for name, gradients in self.sums.items():
            norms[name] = []
            for gradient in gradients:
                if gradient is not None and world > 1:
                    torch.distributed.all_reduce(gradient)
                norms[name].append(None if gradient is None else float(gradient.norm()) * scale / over)
        return [
            {
                "step": step,
                "layer": block.layer,
                "layer_name": block.name,
                "lm_gradient_norm": lm,
                "aux_gradient_norm": aux,
            }
            for block, lm, aux in zip(self.blocks, norms["lm"], norms["aux"], strict=True)
        ]


def losses_of(output: Any, config: Any) -> tuple[Tensor, Tensor | None] | None:
    """The language-model loss and the auxiliary loss times its coefficient, from what a model returns.

    A model of the lab returns both apart; one of transformers their sum, and the auxiliary loss without its
    coefficient.
    """
    loss, aux = getattr(output, "loss", None), getattr(output, "aux_loss", None)
    if isinstance(lm_loss := getattr(output, "lm_loss", None), Tensor):
        return lm_loss, aux
    if not isinstance(loss, Tensor):
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    coefficient = getattr(text, "router_aux_loss_coef", None)
    if not isinstance(aux, Tensor) or coefficient is None:
        return loss, None
    scaled = coefficient * aux.to(loss.device)
    return loss - scaled, scaled
