"""Capture of routing and of router gradients in training, with as little work per pass as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moescope.execution.adapters import CONTRACT, Block, adapter_of, router_logits
from moescope.execution.capture import Capture, after, before, tensors_in
from moescope.routing.metrics import DECISION
from moescope.routing.monitor_tally import Handed, StepTally, is_distributed
from moescope.routing.tally import MOST_WAITING as MOST_LOGITS
from moescope.routing.tally import decisions
from moescope.types import Diagnostic, Routing

MOST_WAITING = 2**24  # expert slots held for counting; 60 layers and a large batch stay below 400 MB


class Undecided(NamedTuple):
    """A layer's decision whose metrics are computed later, together with those of other layers."""

    block: Block
    chosen_TK: Tensor
    gates_TK: Tensor
    logits_TE: Tensor

    def alike(self) -> tuple[Any, ...]:
        """What layers must share to be computed together: sizes and scoring; each bias stands alone."""
        scoring, block = self.block.scoring, self.block
        assert scoring is not None
        way = (scoring.function, scoring.groups, scoring.group_score, scoring.explains)
        own = block.layer if scoring.bias_E is not None else None
        return (block.n_experts, self.chosen_TK.shape, self.gates_TK.dtype, self.logits_TE.dtype, *way, own)


class TrainingCapture(Capture):
    """Hooks on every MoE block of a model in training, which add to `tally`.

    Only passes in training mode count: not evaluation, generation, or autograd recomputing activations. The
    experts' inputs are held during a pass and counted for all layers together at its end: a few kernels per
    pass instead of dozens per layer. `deciding` adds the router's logits, which costs more.
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
        self.numbers = 0  # logits in them
        self.diagnosed: list[tuple[int, dict[str, Diagnostic]]] = []  # router diagnostics of this pass
        self.after_pass: Callable[[Any, dict[str, Any]], None] = lambda output, given: None

    def __enter__(self) -> TrainingCapture:
        for block in self.blocks:  # with dropout a second run of the experts differs
            block.checked = block.checked or block.layer in self.unchecked
        super().__enter__()
        self.hooks += [before(self.model, self.pass_begins), after(self.model, self.pass_ends)]
        self.deciding = self.decides
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.take_off(self.router_hooks)

    def hook_router(self, block: Block) -> None:
        """Do nothing: routers are hooked in the few steps that need them (`deciding`)."""

    @property
    def deciding(self) -> bool:
        """Whether the logits of the next passes count."""
        return self.decides

    @deciding.setter
    def deciding(self, deciding: bool) -> None:
        self.decides = deciding
        self.take_off(self.router_hooks)
        hooked = [
            block for block in self.blocks if not self.hands_out and (deciding or self.needs_router(block))
        ]
        for block in hooked if self.hooks else ():
            self.router_hooks.append(after(block.router, self.router_ran(block)))

    def needs_router(self, block: Block) -> bool:
        return block.scoring is None or not block.checked or adapter_of(block) is not CONTRACT

    def unseen(self) -> bool:
        return not self.model.training or super().unseen()

    def pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.unseen():
            self.waiting, self.undecided, self.slots, self.numbers = [], [], 0, 0  # of a pass that failed
            self.diagnosed = []
            inputs = {**dict(zip(argument_names(module), args, strict=False)), **kwargs}
            masks = {name: inputs.get(name) for name in ("attention_mask", "decoder_attention_mask")}
            if self.hands_out:
                masks["attention_mask"] = inputs.get("mask_BL", masks["attention_mask"])
            self.masks = {
                name: mask.reshape(-1)
                for name, mask in masks.items()
                if isinstance(mask, Tensor) and mask.dim() == 2
            }  # masks with more dimensions say which tokens attend to which, not what is padding

    def pass_ends(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not self.unseen():
            self.count()
            self.masks = {}
            self.after_pass(output, kwargs)

    def experts_ran(self, block: Block) -> Callable[..., None]:
        """A hook that holds the experts' inputs and computes nothing: one kernel would cost as much."""
        full_hook = super().experts_ran(block)
        adapter = adapter_of(block)
        contract = adapter is CONTRACT

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            if block.scoring is None or not block.checked:
                full_hook(module, args, kwargs, output)
                return
            if contract and len(args) == 3:  # checked in the first pass
                _, chosen_TK, gates_TK = args
            else:
                inputs = tensors_in((*args, *kwargs.values()))
                with torch.no_grad():
                    _, chosen_TK, gates_TK = inputs if contract else adapter.decide(block, inputs)
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
        """Add the routing of a first pass, or of a model that returns its routing."""
        block = self.blocks[self.row[routing.layer]]
        if routing.diagnostics:
            self.diagnosed.append((self.row[block.layer], routing.diagnostics))
        self.wait(block, routing.chosen_TK, routing.gates_TK)
        if not self.decides:
            return
        if self.hands_out:
            if routing.scores_TE is not None:  # a hash router has none
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
            self.compute_decisions()

    @torch.no_grad()
    def compute_decisions(self) -> None:
        """Compute the decision metrics of the held layers, those with equal sizes together."""
        undecided, self.undecided, self.numbers = self.undecided, [], 0
        groups: dict[tuple[Any, ...], list[Undecided]] = {}
        for one in undecided:
            groups.setdefault((*one.alike(), id(self.real(one.block, len(one.chosen_TK)))), []).append(one)
        for several in groups.values():
            block, scoring = several[0].block, several[0].block.scoring
            assert scoring is not None
            if scoring.bias_E is not None:  # it changes in training
                scoring = replace(scoring, bias_E=block.correction_bias_E)
            chosen_TK = torch.cat([one.chosen_TK for one in several])
            logits_TE = torch.cat([one.logits_TE for one in several]).float()
            routing = Routing(
                block.layer,
                block.name,
                block.n_experts,
                torch.where(chosen_TK < block.n_experts, chosen_TK, -1),  # others are on other ranks
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
        self.compute_decisions()
        self.tally.add(self.waiting)
        self.tally.diagnostics.add(self.diagnosed)
        self.waiting, self.slots, self.diagnosed = [], 0, []

    def real(self, block: Block, tokens: int) -> Tensor | None:
        """The block's mask of real tokens; None where no token is padding."""
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


# --- gradients into routers


class RouterGradients:
    """Gradients of one step's losses into every router, summed over micro-batches, averaged over ranks.

    A router learns from the text only through its gates. Where gates are renormalised and k = 1, the gate is
    always 1 and no gradient reaches the router; the auxiliary loss still does, which hides it.
    Each loss costs one more backward pass, so only sampled steps are measured.
    """

    def __init__(self, blocks: list[Block]):
        self.blocks = blocks
        self.passes = 0
        self.already_scaled = False  # whether losses are divided by the step's tokens, so that they sum up
        self.sums: dict[str, list[Tensor | None]] = {"lm": [None] * len(blocks), "aux": [None] * len(blocks)}

    def add(self, lm_loss: Tensor, aux_loss: Tensor | None, already_scaled: bool = False) -> None:
        """Add the gradients of one micro-batch; its graph is kept for the training's own backward pass."""
        self.passes += 1
        self.already_scaled = already_scaled
        for name, loss in (("lm", lm_loss), ("aux", aux_loss)):
            pairs = [(row, weight) for row, block in enumerate(self.blocks) for weight in block.trained]
            if loss is None or not loss.requires_grad or not pairs:
                continue
            weights = [weight for _, weight in pairs]
            gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise RuntimeError(f"the {name} loss reaches no router (reentrant checkpointing hides it)")
            for row in dict.fromkeys(row for row, _ in pairs):
                parts = [
                    g.detach().float().flatten()
                    for (of_row, _), g in zip(pairs, gradients, strict=True)
                    if of_row == row and g is not None
                ]
                before = self.sums[name][row]
                if parts:  # an unreached router has no gradient, which differs from a gradient of 0
                    gradient = torch.cat(parts)
                    self.sums[name][row] = gradient if before is None else before + gradient

    def rows(self, step: int, ranks_add_up: bool = False) -> list[dict[str, Any]]:
        """Rows of router_gradients of this step; null where a loss does not exist."""
        scale = 1.0 if self.already_scaled else 1.0 / max(self.passes, 1)
        world = torch.distributed.get_world_size() if is_distributed() else 1
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
    """The language-model loss and the auxiliary loss times its coefficient, from a model's output.

    Lab models return both; transformers models return their sum, and the auxiliary loss without coefficient.
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
