"""What `capture` sees, in training.

Evaluation passes left out, padding known, and as little done in each pass as can be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moescope.execution.adapters import CONTRACT, Block, adapter_of, router_logits
from moescope.execution.capture import Capture, tensors_in
from moescope.routing.metrics import DECISION
from moescope.routing.step_tally import Handed, StepTally
from moescope.routing.tally import MOST_WAITING as MOST_LOGITS
from moescope.routing.tally import decisions
from moescope.types import Diagnostic, Routing

MOST_WAITING = (
    2**24
)  # expert slots kept for counting together; a model of 60 layers and a large batch stays below 400 MB


class Undecided(NamedTuple):
    """A layer's decision whose logits are still to be looked at, together with those of others."""

    block: Block
    chosen_TK: Tensor
    gates_TK: Tensor
    logits_TE: Tensor

    def alike(self) -> tuple[Any, ...]:
        """What layers must share to be looked at together: sizes, and how logits become a choice.

        A bias is a layer's own.
        """
        scoring, block = self.block.scoring, self.block
        assert scoring is not None
        way = (scoring.function, scoring.groups, scoring.group_score, scoring.explains)
        own = block.layer if scoring.bias_E is not None else None
        return (block.n_experts, self.chosen_TK.shape, self.gates_TK.dtype, self.logits_TE.dtype, *way, own)


class TrainingCapture(Capture):
    """Hooks on every MoE block of a model that is trained; everything lands in `tally`.

    A pass counts when the model is in training mode, so evaluation and generation do not, nor does autograd
    recomputing
    activations. What experts are handed is only kept as the pass goes by, and counted for all layers together
    at its end: a few
    kernels a pass instead of dozens a layer. `deciding` makes the router's logits count too, which costs
    more.
    """

    def __init__(self, model: nn.Module, tally: Callable[[list[Block]], StepTally]):
        super().__init__(model, self.decide)
        self.tally = tally(self.blocks)
        self.row = {block.layer: row for row, block in enumerate(self.blocks)}
        self.decides = False
        self.router_hooks: list[Any] = []
        self.unchecked = [block.layer for block in self.blocks if has_dropout(block.module)]
        self.decoders = {block.layer for block in self.blocks if "decoder" in block.name.split(".")}
        self.masks: dict[str, Tensor] = {}
        self.misfits: set[int] = set()  # layers whose tokens the mask does not fit
        self.waiting: list[Handed] = []
        self.slots = 0
        self.undecided: list[Undecided] = []
        self.numbers = 0  # that these hold
        self.diagnosed: list[
            tuple[int, dict[str, Diagnostic]]
        ] = []  # what routers said of themselves in this pass
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
        """Not here.

        What a router was given and gave is wanted in few steps, and in the others a hook would cost for
        nothing.
        """

    @property
    def deciding(self) -> bool:
        """Whether the coming passes' logits count."""
        return self.decides

    @deciding.setter
    def deciding(self, wanted: bool) -> None:
        self.decides = wanted
        self.take_off(self.router_hooks)
        unknown = [
            block for block in self.blocks if not self.hands_out and (wanted or self.needs_router(block))
        ]
        for block in unknown if self.hooks else ():
            self.router_hooks.append(
                block.router.register_forward_hook(self.router_ran(block), with_kwargs=True)
            )

    def needs_router(self, block: Block) -> bool:
        return block.scoring is None or not block.checked or adapter_of(block) is not CONTRACT

    def unseen(self) -> bool:
        return not self.model.training or super().unseen()

    def pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.unseen():
            self.waiting, self.undecided, self.slots, self.numbers = [], [], 0, 0  # of a pass that broke off
            self.diagnosed = []
            given = {**dict(zip(argument_names(module), args, strict=False)), **kwargs}
            masks = {name: given.get(name) for name in ("attention_mask", "decoder_attention_mask")}
            if self.hands_out:
                masks["attention_mask"] = given.get("mask_BL")
            self.masks = {
                name: mask.reshape(-1)
                for name, mask in masks.items()
                if isinstance(mask, Tensor) and mask.dim() == 2
            }  # masks of more sides say who may look at whom, not what is padding

    def pass_ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self.unseen():
            self.count()
            self.masks = {}
            self.after_pass(output, kwargs)

    def experts_ran(self, block: Block) -> Callable[..., None]:
        """A hook that keeps what the experts were handed and computes nothing.

        Each kernel would cost as much as all that is here.
        """
        whole_hook = super().experts_ran(block)
        adapter = adapter_of(block)
        contract = adapter is CONTRACT

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            if block.scoring is None or not block.checked:
                whole_hook(module, args, kwargs, output)
                return
            if contract and len(args) == 3:  # the first pass has shown that it fits
                _, chosen_TK, gates_TK = args
            else:
                given = tensors_in((*args, *kwargs.values()))
                with torch.no_grad():
                    _, chosen_TK, gates_TK = given if contract else adapter.decide(block, given)
            block.calls += 1
            self.wait(block, chosen_TK, gates_TK)
            if self.decides:
                at = block.logits_at
                with torch.no_grad():
                    logits = block.router_outputs[at] if at is not None and at >= 0 else router_logits(block)
                self.keep_undecided(block, chosen_TK, gates_TK, logits)
            block.router_input, block.router_outputs = None, ()

        return hook

    def decide(self, routing: Routing) -> None:
        """Of a first pass, or of a model that hands out its routing: what capture itself found."""
        block = self.blocks[self.row[routing.layer]]
        if routing.diagnostics:
            self.diagnosed.append((self.row[block.layer], routing.diagnostics))
        self.wait(block, routing.chosen_TK, routing.gates_TK)
        if not self.decides:
            return
        if self.hands_out:
            if routing.scores_TE is not None:  # a hash, for one, has none
                values_MT = torch.stack([value.float() for value in decisions(routing)])
                self.tally.decide(
                    (self.row[block.layer],), values_MT[:, None], self.real(block, values_MT.shape[1])
                )
            return
        assert routing.logits_TE is not None
        self.keep_undecided(block, routing.chosen_TK, routing.gates_TK, routing.logits_TE)

    def keep_undecided(self, block: Block, chosen_TK: Tensor, gates_TK: Tensor, logits: Tensor) -> None:
        self.undecided.append(Undecided(block, chosen_TK, gates_TK, logits.reshape(-1, block.n_experts)))
        self.numbers += logits.numel()
        if self.numbers > MOST_LOGITS:
            self.look()

    @torch.no_grad()
    def look(self) -> None:
        """The decision metrics of the layers kept for it, those that are alike together."""
        undecided, self.undecided, self.numbers = self.undecided, [], 0
        groups: dict[tuple[Any, ...], list[Undecided]] = {}
        for one in undecided:
            groups.setdefault((*one.alike(), id(self.real(one.block, len(one.chosen_TK)))), []).append(one)
        for several in groups.values():
            block, scoring = several[0].block, several[0].block.scoring
            assert scoring is not None
            if scoring.bias_E is not None:  # it is trained too
                scoring = replace(scoring, bias_E=block.correction_bias_E)
            chosen_TK = torch.cat([one.chosen_TK for one in several])
            logits_TE = torch.cat([one.logits_TE for one in several]).float()
            routing = Routing(
                block.layer,
                block.name,
                block.n_experts,
                torch.where(chosen_TK < block.n_experts, chosen_TK, -1),  # beyond are experts of other ranks
                torch.cat([one.gates_TK for one in several]),
                None,
                logits_TE,
                *scoring.judged(logits_TE),
            )
            values = torch.stack([value.float() for value in decisions(routing)])
            assert len(values) == len(DECISION)
            rows = tuple(self.row[one.block.layer] for one in several)
            tokens = len(chosen_TK) // len(several)
            self.tally.decide(
                rows, values.view(len(DECISION), len(several), tokens), self.real(block, tokens)
            )

    def wait(self, block: Block, chosen_TK: Tensor, gates_TK: Tensor) -> None:
        real_T = self.real(block, len(chosen_TK))
        self.waiting.append(Handed(self.row[block.layer], block.n_experts, chosen_TK, gates_TK, real_T))
        self.slots += chosen_TK.numel()
        if self.slots > MOST_WAITING:
            self.count()

    @torch.no_grad()
    def count(self) -> None:
        self.look()
        self.tally.add(self.waiting)
        self.tally.diagnostics.add(self.diagnosed)
        self.waiting, self.slots, self.diagnosed = [], 0, []

    def real(self, block: Block, tokens: int) -> Tensor | None:
        """The block's mask of real tokens, None where all are."""
        if not self.masks:
            return None
        of_decoder = block.layer in self.decoders and "decoder_attention_mask" in self.masks
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
