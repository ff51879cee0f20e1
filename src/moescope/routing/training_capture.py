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
from moescope.routing.tally import MOST_WAITING as MOST_LOGITS
from moescope.routing.tally import alike, decisions, together
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
        self.decides = False
        self.router_hooks: list[Any] = []
        self.unchecked = [block.layer for block in self.blocks if has_dropout(block.module)]
        self.masks: dict[str, Tensor] = {}
        self.misfits: set[int] = set()  # layers whose tokens the mask does not fit
        self.waiting: list[Handed] = []
        self.slots = 0
        self.undecided: list[Routing] = []  # whose logits are to be looked at together
        self.numbers = 0  # that these hold
        self.after_pass: Callable[[Any, dict[str, Any]], None] = lambda output, given: None

    def __enter__(self) -> TrainingCapture:
        for block in self.blocks:  # with dropout a second run of the experts gives something else
            block.checked = block.checked or block.layer in self.unchecked
        super().__enter__()
        self.hooks += [
            self.model.register_forward_pre_hook(self.pass_begins, with_kwargs=True),
            self.model.register_forward_hook(self.pass_ends, with_kwargs=True),
        ]
        self.deciding = self.decides
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.take_off(self.router_hooks)

    def hook_router(self, block: Block) -> None:
        """Not here: what a router was given and gave is wanted in few steps, and in the others a hook would cost for nothing."""

    @property
    def deciding(self) -> bool:
        """Whether the coming passes' logits count."""
        return self.decides

    @deciding.setter
    def deciding(self, wanted: bool) -> None:
        self.decides = wanted
        self.take_off(self.router_hooks)
        unknown = [block for block in self.blocks if wanted or self.needs_router(block)]
        for block in unknown if self.hooks else ():
            self.router_hooks.append(block.router.register_forward_hook(self.router_ran(block), with_kwargs=True))

    def needs_router(self, block: Block) -> bool:
        return block.scoring is None or not block.checked or adapter_of(block) is not CONTRACT

    def unseen(self) -> bool:
        return not self.model.training or super().unseen()

    def pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.unseen():
            self.waiting, self.undecided, self.slots, self.numbers = [], [], 0, 0  # of a pass that broke off
            given = {**dict(zip(argument_names(module), args, strict=False)), **kwargs}
            masks = {name: given.get(name) for name in ("attention_mask", "decoder_attention_mask")}
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
        contract = adapter is CONTRACT

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            if self.deciding or block.scoring is None or not block.checked:
                if block.scoring is not None and block.scoring.bias_E is not None:  # it is trained too
                    block.scoring = replace(block.scoring, bias_E=block.correction_bias_E)
                whole_hook(module, args, kwargs, output)
                return
            if contract and len(args) == 3:  # the first pass has shown that it fits
                _, chosen_TK, gates_TK = args
            else:
                given = tensors_in((*args, *kwargs.values()))
                with torch.no_grad():
                    _, chosen_TK, gates_TK = given if contract else adapter.decide(block, given)
            block.calls += 1
            block.router_input, block.router_outputs = None, ()
            self.wait(block, chosen_TK.detach(), gates_TK.detach())

        return hook

    def decide(self, routing: Routing) -> None:
        block = self.blocks[self.row[routing.layer]]
        self.wait(block, routing.chosen_TK, routing.gates_TK)
        if self.deciding:
            self.undecided.append(replace(routing, x_TD=None, dropped_T=None))
            assert routing.logits_TE is not None
            self.numbers += routing.logits_TE.numel()
            if self.numbers > MOST_LOGITS:
                self.look()

    def look(self) -> None:
        """The decision metrics of the layers kept for it, those that are alike together."""
        undecided, self.undecided, self.numbers = self.undecided, [], 0
        groups: dict[tuple[Any, ...], list[Routing]] = {}
        for routing in undecided:
            real_T = self.real(self.blocks[self.row[routing.layer]], len(routing.chosen_TK))
            groups.setdefault((*alike(routing), id(real_T)), []).append(routing)
        for routings in groups.values():
            rows = tuple(self.row[routing.layer] for routing in routings)
            values = [value.view(len(rows), -1) for value in decisions(together(routings))]
            assert len(values) == len(DECISION)
            real_T = self.real(self.blocks[rows[0]], values[0].shape[1])
            self.tally.decide(rows, torch.stack([value.float() for value in values]), real_T)

    def wait(self, block: Block, chosen_TK: Tensor, gates_TK: Tensor) -> None:
        real_T = self.real(block, len(chosen_TK))
        self.waiting.append(Handed(self.row[block.layer], block.n_experts, chosen_TK, gates_TK, real_T))
        self.slots += chosen_TK.numel()
        if self.slots > MOST_WAITING:
            self.count()

    def count(self) -> None:
        with torch.no_grad():
            self.look()
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
