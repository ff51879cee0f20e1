"""What the Monitor sees of a training: routing, router gradients, losses, router diagnostics.

With as little work per pass as possible: inputs are held, and counted for all layers and passes together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moescope.execution.adapters import CONTRACT, Block, adapter_of, router_logits, tensors_in
from moescope.execution.capture import Capture, after, before
from moescope.routing.counts import DECISIONS, Counts, LayerCounts, Totals, decided, is_distributed
from moescope.routing.counts import MOST_WAITING as MOST_LOGITS
from moescope.routing.metrics import row
from moescope.types import Array, Diagnostic, Routing

MOST_WAITING = 2**24  # expert slots held for counting; 60 layers and a large batch stay below 400 MB
MOST_HELD = 2**21  # expert slots held for counting: 25 MB, and a few times that while they are counted
Cell = tuple[int, str]  # a layer, a diagnostic's name
Slot = tuple[int, str, int]  # and its part: value, chance or collapse


# --- counts since the last tables


class DiagnosticTally:
    """The diagnostics of all layers since the last `take`, on their device: two kernels per pass."""

    def __init__(self) -> None:
        self.sums: dict[tuple[Slot, ...], Tensor] = {}
        self.passes = Counter[tuple[Slot, ...]]()
        self.fixed: dict[Slot, float] = {}  # references that are equal in every pass stay off the device

    def add(self, diagnosed: list[tuple[int, dict[str, Diagnostic]]]) -> None:
        """Add the diagnostics of one pass, by layer."""
        numbers: dict[Slot, Tensor] = {}
        for layer, diagnostics in diagnosed:
            for name, diagnostic in diagnostics.items():
                for part, number in enumerate(diagnostic):
                    held: dict[Slot, Any] = numbers if isinstance(number, Tensor) else self.fixed
                    held[layer, name, part] = number
        if numbers:
            stacked = torch.stack([*numbers.values()])
            if (key := tuple(numbers)) not in self.sums:
                self.sums[key] = torch.zeros_like(stacked, dtype=torch.float64)
            self.sums[key] += stacked
            self.passes[key] += 1

    def flat(self, device: torch.device) -> Tensor:
        """Passes and sums as one vector, to be summed over ranks: all have the same diagnostics."""
        passes = torch.tensor([self.passes[key] for key in self.sums], dtype=torch.float64, device=device)
        return torch.cat([passes, *(sums.to(device) for sums in self.sums.values())])

    def take(self, flat: Array) -> dict[Cell, Array]:
        """Return passes, then sums of the fields of Diagnostic, by cell; and start again at 0."""
        total: dict[Cell, Array] = {}
        at = len(self.sums)
        for key, passes in zip(self.sums, flat[:at], strict=True):
            numbers = dict(zip(key, flat[at : (at := at + len(key))].tolist(), strict=True))
            for cell in dict.fromkeys(slot[:2] for slot in key):
                slots = [(*cell, part) for part in range(len(Diagnostic._fields))]
                parts = [numbers.get(slot, passes * self.fixed.get(slot, np.nan)) for slot in slots]
                total[cell] = total.get(cell, 0) + np.array([passes, *parts])
        self.sums, self.passes = {}, Counter()
        return total


@dataclass
class Window:
    """Counts over some steps, off the device."""

    layers: list[LayerCounts] = field(default_factory=list)
    losses: Array = field(default_factory=lambda: np.zeros(3))  # passes, loss, auxiliary loss: sums
    diagnostics: dict[Cell, Array] = field(default_factory=dict)  # as DiagnosticTally.take returns them

    def add(self, other: Window) -> None:
        pairs = zip(self.layers, other.layers, strict=True) if self.layers else ()
        self.layers = [a + b for a, b in pairs] or other.layers
        self.losses = self.losses + other.losses
        for cell, sums in other.diagnostics.items():
            self.diagnostics[cell] = self.diagnostics.get(cell, 0) + sums

    def diagnostic_rows(self, layer: int) -> Iterator[dict[str, Any]]:
        """Rows of routing_layers of one layer's diagnostics: means over passes."""
        for (at, name), sums in self.diagnostics.items():
            if at == layer:
                *levels, spread = (sums[1:] / sums[0]).tolist()
                yield {**row(name, *levels), "chance_spread": spread}


class Handed(NamedTuple):
    """Inputs of one layer's experts in one pass; `real_T` is None where no token is padding."""

    layer: int
    n_experts: int
    chosen_TK: Tensor
    gates_TK: Tensor
    real_T: Tensor | None
    logits_TE: Tensor | None = None  # of the router, where they are looked at

    def alike(self) -> tuple[Any, ...]:
        """Return what neighbouring layers must share to be copied together."""
        return self.n_experts, self.chosen_TK.shape, self.chosen_TK.device, id(self.real_T)


class StepCounts(Counts):
    """The counts of all layers since the last `take`, on the device of the first pass.

    Counts are summed over micro-batches, steps and ranks before any ratio is made from them.
    """

    def __init__(self, blocks: list[Block], pairs: bool = False):
        super().__init__(pairs=pairs, probabilities=False, order=False)
        self.places = {block.layer: (block.name, block.n_experts, 0) for block in blocks}
        self.losses: list[tuple[Tensor, Tensor | None]] = []
        # copies of passes (choices, gates, real tokens) by what may be counted together
        self.held: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor | None]]] = {}
        self.slots = 0  # that these hold
        self.diagnostics = DiagnosticTally()

    def sums(self, device: torch.device) -> Totals:
        """Return the sums, made on this device if there are none: of all layers, as on every other rank."""
        if not self.totals:
            self.totals_of("prefill", device, self.places)
        (totals,) = self.totals.values()
        return totals

    def hold(self, inputs: list[Handed]) -> None:
        """Copy the inputs of a pass, layers with equal sizes in one; counted when there are enough."""
        for _, group in groupby(inputs, Handed.alike):
            alike = list(group)
            first, layers = alike[0], tuple(one.layer for one in alike)
            device, real_T = self.sums(first.chosen_TK.device).device, first.real_T
            key = (layers, first.n_experts, first.chosen_TK.shape, first.gates_TK.dtype, real_T is None)
            chosen_LTK = torch.stack([one.chosen_TK for one in alike]).to(device)
            gates_LTK = torch.stack([one.gates_TK for one in alike]).to(device)
            real_T = None if real_T is None else real_T.to(device) != 0
            self.held.setdefault(key, []).append((chosen_LTK, gates_LTK, real_T))
            self.slots += chosen_LTK.numel()
        if self.slots > MOST_HELD:
            self.count()

    def count(self) -> None:
        """Count what is held, passes with equal sizes together."""
        held, self.held, self.slots = self.held, {}, 0
        for (layers, n_experts, (tokens, k), *_), passes in held.items():  # L: layers of all passes in turn
            (totals,) = self.totals.values()
            totals.layers |= {layer: (*totals.layers[layer][:2], k) for layer in layers}
            chosen, gates, real = zip(*passes, strict=True)
            real_LT = None
            if real[0] is not None:
                real_LT = torch.stack(real)[:, None].expand(-1, len(layers), -1).reshape(-1, tokens)
            rows_L = totals.rows(layers * len(passes))
            choices = torch.cat(chosen), torch.cat(gates), real_LT
            self.add_sums(totals, rows_L, "tokens", self.add_choices(totals, rows_L, n_experts, *choices))

    def decide(self, layers: tuple[int, ...], values_MLT: Tensor, real_T: Tensor | None) -> None:
        """Add the decision metrics of a pass's tokens, of layers with equal sizes."""
        totals = self.sums(values_MLT.device)
        values_MLT = values_MLT.to(totals.device)
        decided_LT = torch.ones_like(values_MLT[0])
        if real_T is not None:
            decided_LT = real_T.to(totals.device, torch.bool).expand_as(decided_LT)
            values_MLT = torch.where(decided_LT, values_MLT, 0.0)
        self.add_sums(totals, totals.rows(layers), "decided", [decided_LT, *values_MLT])

    @torch.no_grad()
    def take(self, device: torch.device) -> Window:
        """Return the counts since the last call, summed over ranks, and start again at 0. Collective."""
        totals = self.sums(device)
        self.count()
        losses = torch.zeros(3, dtype=torch.float64, device=totals.device)
        losses[0] = len(self.losses)
        for at, parts in enumerate(zip(*self.losses, strict=True), 1):
            if known := [part.to(totals.device) for part in parts if part is not None]:
                losses[at] = torch.stack(known).double().sum()
        self.losses = []
        sums = torch.cat([losses, self.diagnostics.flat(totals.device)])
        self.reduce()
        if is_distributed():
            torch.distributed.all_reduce(sums)
        numbers, layers = sums.cpu().numpy(), self.layers()
        for tensor in totals.tensors.values():
            tensor.zero_()
        return Window(layers, numbers[:3], self.diagnostics.take(numbers[3:]))


# --- capture


class TrainingCapture(Capture):
    """Hooks on every MoE block of a model in training, which add to `counts`.

    Only passes in training mode count: not evaluation, generation, or autograd recomputing activations. The
    experts' inputs are held during a pass and counted for all layers together at its end: a few kernels per
    pass instead of dozens per layer. `deciding` adds the router's logits, which costs more.
    """

    def __init__(self, model: nn.Module, counts: Callable[[list[Block]], StepCounts]):
        super().__init__(model, self.decide)
        self.counts = counts(self.blocks)
        self.block_of = {block.layer: block for block in self.blocks}
        self.deciding = False  # whether the logits of the next passes count
        self.router_hooks: list[Any] = []
        self.unchecked = [
            block.layer
            for block in self.blocks
            if any(isinstance(part, nn.Dropout) and part.p > 0 for part in block.module.modules())
        ]
        self.decoders = {block.layer for block in self.blocks if "decoder" in block.name.split(".")}
        self.masks: dict[str, Tensor] = {}
        self.misfits: set[int] = set()  # layers whose tokens the mask does not fit
        self.waiting: list[Handed] = []
        self.slots = self.numbers = 0  # slots of experts and logits in them
        self.diagnosed: list[tuple[int, dict[str, Diagnostic]]] = []  # router diagnostics of this pass
        self.after_pass: Callable[[Any, dict[str, Any]], None] = lambda output, given: None

    def __enter__(self) -> TrainingCapture:
        for block in self.blocks:  # with dropout a second run of the experts differs
            block.checked = block.checked or block.layer in self.unchecked
        super().__enter__()
        self.hooks += [before(self.model, self.pass_begins), after(self.model, self.pass_ends)]
        self.hook_routers(self.deciding)
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self.take_off(self.router_hooks)

    def hook_router(self, block: Block) -> None:
        """Do nothing: routers are hooked in the few steps that need them (`deciding`)."""

    def hook_routers(self, deciding: bool) -> None:
        """Say whether the logits of the next passes count."""
        self.deciding = deciding
        self.take_off(self.router_hooks)
        for block in self.blocks if self.hooks and not self.hands_out else ():
            if deciding or block.scoring is None or not block.checked or adapter_of(block) is not CONTRACT:
                self.router_hooks.append(after(block.router, self.router_ran(block)))

    def unseen(self) -> bool:
        return not self.model.training or super().unseen()

    def pass_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.unseen():
            self.waiting, self.diagnosed, self.slots, self.numbers = [], [], 0, 0  # of a pass that failed
            code = getattr(type(module).forward, "__code__", None)
            names = code.co_varnames[1 : code.co_argcount] if code else ()
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
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
        full_hook, adapter = super().experts_ran(block), adapter_of(block)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            if block.scoring is None or not block.checked:
                full_hook(module, args, kwargs, output)
                return
            if adapter is CONTRACT and len(args) == 3:  # checked in the first pass
                _, chosen_TK, gates_TK = args
            else:
                inputs = tensors_in((*args, *kwargs.values()))
                with torch.no_grad():
                    _, chosen_TK, gates_TK = inputs if adapter is CONTRACT else adapter.decide(block, inputs)
            block.calls += 1
            logits = None
            if self.deciding:
                at = block.logits_at
                with torch.no_grad():
                    logits = block.router_outputs[at] if at is not None and at >= 0 else router_logits(block)
            self.wait(block, chosen_TK, gates_TK, logits)
            block.router_input, block.router_outputs = None, ()

        return hook

    def decide(self, routing: Routing) -> None:
        """Add the routing of a first pass, or of a model that returns its routing."""
        block, deciding = self.block_of[routing.layer], self.deciding
        if routing.diagnostics:
            self.diagnosed.append((block.layer, routing.diagnostics))
        logits = routing.logits_TE if deciding and not self.hands_out else None
        self.wait(block, routing.chosen_TK, routing.gates_TK, logits)
        if deciding and self.hands_out and routing.scores_TE is not None:  # a hash router has none
            self.add_decisions((block.layer,), routing, self.real(block, len(routing.chosen_TK)))

    def wait(self, block: Block, chosen_TK: Tensor, gates_TK: Tensor, logits: Tensor | None) -> None:
        if logits is not None:
            logits = logits.reshape(-1, block.n_experts)
            self.numbers += logits.numel()
        real_T = self.real(block, len(chosen_TK))
        self.waiting.append(Handed(block.layer, block.n_experts, chosen_TK, gates_TK, real_T, logits))
        self.slots += chosen_TK.numel()
        if self.slots > MOST_WAITING or self.numbers > MOST_LOGITS:
            self.count()

    def compute_decisions(self) -> None:
        """Compute the decision metrics of the held layers, those with equal sizes and scoring together."""
        groups: dict[tuple[Any, ...], list[Handed]] = {}
        for one in self.waiting:
            if one.logits_TE is not None:
                scoring = self.block_of[one.layer].scoring
                assert scoring is not None
                way = scoring.function, scoring.groups, scoring.group_score, scoring.explains
                own = one.layer if scoring.bias_E is not None else None  # each bias stands alone
                key = (*one.alike(), one.gates_TK.dtype, one.logits_TE.dtype, *way, own)
                groups.setdefault(key, []).append(one)
        for several in groups.values():
            block, real_T = self.block_of[several[0].layer], several[0].real_T
            scoring = block.scoring
            assert scoring is not None
            if scoring.bias_E is not None:  # it changes in training
                scoring = replace(scoring, bias_E=block.correction_bias_E)
            chosen_TK = torch.cat([one.chosen_TK for one in several])
            chosen_TK = torch.where(chosen_TK < block.n_experts, chosen_TK, -1)  # others are on other ranks
            gates_TK = torch.cat([one.gates_TK for one in several])
            logits_TE = torch.cat([one.logits_TE for one in several if one.logits_TE is not None]).float()
            judged = None, logits_TE, *scoring.judged(logits_TE)
            routing = Routing(block.layer, block.name, block.n_experts, chosen_TK, gates_TK, *judged)
            self.add_decisions(tuple(one.layer for one in several), routing, real_T)

    def add_decisions(self, layers: tuple[int, ...], routing: Routing, real_T: Tensor | None) -> None:
        values = torch.stack([value.float() for value in decided(routing, DECISIONS)[1:]])
        tokens = values.shape[1] // len(layers)
        self.counts.decide(layers, values.view(len(values), len(layers), tokens), real_T)

    @torch.no_grad()
    def count(self) -> None:
        self.compute_decisions()
        self.counts.hold(self.waiting)
        self.counts.diagnostics.add(self.diagnosed)
        self.waiting, self.diagnosed, self.slots, self.numbers = [], [], 0, 0

    def real(self, block: Block, tokens: int) -> Tensor | None:
        """The block's mask of real tokens; None where no token is padding."""
        of_decoder = block.layer in self.decoders and "decoder_attention_mask" in self.masks
        mask = self.masks.get("decoder_attention_mask" if of_decoder else "attention_mask")
        if mask is not None and mask.numel() != tokens:
            self.misfits.add(block.layer)
            return None
        return mask


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
        self.sums: dict[str, dict[int, Tensor]] = {"lm": {}, "aux": {}}  # by number of the block

    def add(self, lm_loss: Tensor, aux_loss: Tensor | None, already_scaled: bool = False) -> None:
        """Add the gradients of one micro-batch; its graph is kept for the training's own backward pass."""
        self.passes += 1
        self.already_scaled = already_scaled
        weights = [weight for block in self.blocks for weight in block.trained]
        for name, loss in (("lm", lm_loss), ("aux", aux_loss)):
            if loss is None or not loss.requires_grad or not weights:
                continue
            gradients = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            if all(gradient is None for gradient in gradients):
                raise RuntimeError(f"the {name} loss reaches no router (reentrant checkpointing hides it)")
            left, sums = iter(gradients), self.sums[name]
            for at, block in enumerate(self.blocks):
                of_block = islice(left, len(block.trained))
                parts = [part.detach().float().flatten() for part in of_block if part is not None]
                if parts:  # an unreached router has no gradient, which differs from a gradient of 0
                    gradient = torch.cat(parts)
                    sums[at] = sums[at] + gradient if at in sums else gradient

    def rows(self, step: int, ranks_add_up: bool = False) -> list[dict[str, Any]]:
        """Rows of router_gradients of this step; null where a loss does not exist."""
        world = torch.distributed.get_world_size() if is_distributed() else 1
        over = 1 if self.already_scaled and ranks_add_up else world
        over *= 1 if self.already_scaled else max(self.passes, 1)
        norms: dict[tuple[str, int], float] = {}
        for name, gradients in self.sums.items():
            for at, gradient in sorted(gradients.items()):
                if world > 1:
                    torch.distributed.all_reduce(gradient)
                norms[name, at] = float(gradient.norm()) / over
        return [
            {
                "step": step,
                "layer": block.layer,
                "layer_name": block.name,
                "lm_gradient_norm": norms.get(("lm", at)),
                "aux_gradient_norm": norms.get(("aux", at)),
            }
            for at, block in enumerate(self.blocks)
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
