"""What `capture` sees, in training: evaluation passes left out, padding known, and as little done in each pass as can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moescope.routing.adapters import CONTRACT, Block, adapter_of
from moescope.routing.capture import Capture, tensors_in
from moescope.routing.decision import DECISION
from moescope.routing.step_tally import Handed, StepTally
from moescope.routing.tally import decisions
from moescope.types import Routing

MOST_WAITING = (
    2**24
)  # expert slots kept for counting together; a model of 60 layers and a large batch stays below 400 MB


class TrainingCapture(Capture):
    """Hooks on every MoE block of a model that is trained; everything lands in `tally`.

    A pass counts when the model is in training mode, so evaluation and generation do not, nor does autograd recomputing
    activations. What experts are handed is only kept as the pass goes by, and counted for all layers together at its end: a few
    kernels a pass instead of dozens a layer. `deciding` makes the router's logits count too, which costs more.
    """

    def __init__(self, model: nn.Module, tally: Callable[[list[Block]], StepTally]):
        super().__init__(model, self.decide)
        self.tally = tally(self.blocks)
        self.row = {block.layer: row for row, block in enumerate(self.blocks)}
        self.deciding = False
        self.unchecked = [block.layer for block in self.blocks if has_dropout(block.module)]
        self.masks: dict[str, Tensor] = {}
        self.misfits: set[int] = set()  # layers whose tokens the mask does not fit
        self.waiting: list[Handed] = []
        self.slots = 0
        self.after_pass: Callable[[Any, dict[str, Any]], None] = lambda output, given: None

    def __enter__(self) -> TrainingCapture:
        for block in self.blocks:  # with dropout a second run of the experts gives something else
            block.checked = block.checked or block.layer in self.unchecked
        super().__enter__()
        self.hooks += [
            self.model.register_forward_pre_hook(self.pass_begins, with_kwargs=True),
            self.model.register_forward_hook(self.pass_ends, with_kwargs=True),
        ]
        return self

    def unseen(self) -> bool:
        return not self.model.training or super().unseen()

    def pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.unseen():
            self.waiting, self.slots = [], 0  # of a pass that broke off
            given = {**dict(zip(argument_names(module), args, strict=False)), **kwargs}
            masks = {name: given.get(name) for name in ("attention_mask", "decoder_attention_mask")}
            if self.hands_out:
                masks["attention_mask"] = given.get("mask_BL")
            self.masks = {
                name: mask.reshape(-1) for name, mask in masks.items() if isinstance(mask, Tensor) and mask.dim() == 2
            }  # masks of more sides say who may look at whom, not what is padding

    def pass_ends(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self.unseen():
            self.count()
            self.masks = {}
            self.after_pass(output, kwargs)

    def experts_ran(self, block: Block) -> Callable[..., None]:
        whole_hook = super().experts_ran(block)
        adapter = adapter_of(block)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            if self.deciding or block.scoring is None or not block.checked:
                if block.scoring is not None and block.scoring.bias_E is not None:  # it is trained too
                    block.scoring = replace(block.scoring, bias_E=block.correction_bias_E)
                whole_hook(module, args, kwargs, output)
                return
            given = tuple(part.detach() for part in tensors_in((*args, *kwargs.values())))
            if adapter is CONTRACT:
                _, chosen_TK, gates_TK = given  # the first pass has shown that it fits
            else:
                with torch.no_grad():
                    _, chosen_TK, gates_TK = adapter.decide(block, given)
            block.calls += 1
            block.router_input, block.router_outputs = None, ()
            self.wait(block, chosen_TK, gates_TK)

        return hook

    def decide(self, routing: Routing) -> None:
        block = self.blocks[self.row[routing.layer]]
        self.wait(block, routing.chosen_TK, routing.gates_TK)
        if self.deciding and routing.scores_TE is not None:  # a hash, for one, has none
            values_MT = torch.stack([value.double() for value in decisions(routing)])
            assert len(values_MT) == len(DECISION)
            self.tally.decide(self.row[routing.layer], values_MT, self.real(block, values_MT.shape[1]))

    def wait(self, block: Block, chosen_TK: Tensor, gates_TK: Tensor) -> None:
        real_T = self.real(block, len(chosen_TK))
        self.waiting.append(Handed(self.row[block.layer], block.n_experts, chosen_TK, gates_TK, real_T))
        self.slots += chosen_TK.numel()
        if self.slots > MOST_WAITING:
            self.count()

    def count(self) -> None:
        with torch.no_grad():
            self.tally.add(self.waiting)
        self.waiting, self.slots = [], 0

    def real(self, block: Block, tokens: int) -> Tensor | None:
        """The block's mask of real tokens, None where all are."""
        of_decoder = "decoder" in block.name.split(".") and "decoder_attention_mask" in self.masks
        mask = self.masks.get("decoder_attention_mask" if of_decoder else "attention_mask")
        if mask is None:
            return None
        if mask.numel() != tokens:
            self.misfits.add(block.layer)
            return None
        return mask


def argument_names(module: nn.Module) -> list[str]:
    code = getattr(type(module).forward, "__code__", None)
    return list(code.co_varnames[1 : code.co_argcount]) if code else []


def has_dropout(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
