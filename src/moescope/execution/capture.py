"""Hooks that capture each MoE layer's decision as it is carried out, as a `Routing`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from moescope.errors import reject_if
from moescope.execution.adapters import (
    Block,
    Decision,
    adapter_of,
    find_blocks,
    hands_out_routing,
    logits_dtype,
    relative_error,
    router_logits,
    tensors_in,
)
from moescope.execution.scoring import find_scoring
from moescope.types import Routing, Tokens

OLDEST_TRANSFORMERS = (5, 6)
CHECKED_TOKENS = 256  # of the first batch; each costs one more pass through its experts
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative error of a block's output
HALF_TOLERANCE = 0.05
ADVICE = "moescope has no adapter for this kind of block"
KNOWN_FAULTS = {
    "nllb-moe": (
        "this version of transformers takes the router's mask for expert numbers and runs experts 0 and 1 "
        "only; use one that runs the chosen experts"
    ),
}


def check_transformers() -> None:
    """Reject versions before 5.6, whose router_logits were probabilities."""
    from importlib.metadata import version

    extra = "install moescope with its extra: pip install 'moescope[hf]'"
    reject_if(find_spec("transformers") is None, f"transformers is not installed; {extra}")
    installed = version("transformers")
    reject_if(
        tuple(int(part) for part in installed.split(".")[:2] if part.isdigit()) < OLDEST_TRANSFORMERS,
        f"transformers {installed}: its router_logits are probabilities; moescope needs "
        "transformers 5.20 or newer",
    )


class Capture:
    """Hooks on every MoE block of a model; `consume` is called with each layer's routing as it happens.

        with Capture(model, consume) as capture:
            capture.tokens = tokens   # of the next forward pass; None: every token counts
            model(input_ids=...)

    The first pass is checked: every layer must fire, and gates times expert outputs, plus shared experts,
    must give the block's output. Passes in which autograd recomputes activations are ignored. A model that
    hands out its routing itself (`hands_out_routing`) needs no hooks and no check.
    """

    def __init__(
        self,
        model: nn.Module,
        consume: Callable[[Routing], None],
        check: bool = True,
        runner: nn.Module | None = None,  # the part that is called, where it is not the model
    ):
        self.hands_out = hands_out_routing(model)
        if not self.hands_out:
            check_transformers()
        self.model = runner or model
        self.consume = consume
        self.blocks = find_blocks(model)
        self.tokens: Tokens | None = None
        self.check = check
        self.busy = False  # the check and collectors run experts, which must not be counted
        self.hooks: list[Any] = []
        self.check_hooks: list[Any] = []  # removed when all is checked
        self.pending: Decision | None = None  # the current block's decision, until its output is checked

    def __enter__(self) -> Capture:
        if self.hands_out:
            self.hooks.append(before(self.model, self.ask))
        for block in [] if self.hands_out else self.blocks:
            self.hook_router(block)
            self.hooks.append(after(block.experts, self.experts_ran(block)))
            if self.check and not block.checked:
                self.check_hooks += [
                    after(child, partial(self.part_ran, block, name))
                    for name, child in block.module.named_children()
                    if child is not block.experts and block.router not in child.modules()
                ]
                self.check_hooks.append(after(block.module, partial(self.block_ran, block)))
        if self.check and not all(block.calls for block in self.blocks):
            self.check_hooks.append(after(self.model, self.model_ran))
        return self

    def __exit__(self, *error: object) -> None:
        self.take_off(self.hooks)
        self.take_off(self.check_hooks)

    def hook_router(self, block: Block) -> None:
        self.hooks.append(after(block.router, self.router_ran(block)))

    def take_off(self, hooks: list[Any]) -> None:
        while hooks:
            hooks.pop().remove()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Ignore the experts that run in this context: they are not the model's own pass."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def unseen(self) -> bool:
        """Whether this call is the check's or recomputes activations, not the model's own forward pass."""
        return self.busy or torch._C._current_graph_task_id() != -1

    def ask(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "consume": self.handed_out}

    def handed_out(self, routing: Routing) -> None:
        if self.unseen():
            return
        block = next(block for block in self.blocks if block.layer == routing.layer)
        block.calls += 1
        with torch.no_grad():
            self.consume(replace(routing, tokens=self.tokens))

    def router_ran(self, block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not self.unseen():
                inputs = tensors_in((*args, *kwargs.values()))
                block.router_input, block.reads_more = inputs[0].detach(), len(inputs) > 1
                block.router_outputs = tuple(part.detach() for part in tensors_in(output))

        return hook

    def experts_ran(self, block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            with torch.no_grad():
                inputs = tuple(part.detach() for part in tensors_in((*args, *kwargs.values())))
                decision = adapter_of(block).decide(block, inputs)
                logits_TE = router_logits(block)
                if block.scoring is None:
                    bias_E, groups, expected = block.correction_bias_E, block.groups, block.expected_scoring
                    block.scoring = find_scoring(
                        logits_TE, *decision[1:], bias_E, groups, expected, logits_dtype(block)
                    )
                if self.check and not block.checked:
                    self.pending = decision
                block.calls += 1
                if self.tokens is not None:  # layers may be on several devices
                    self.tokens = self.tokens.to(decision.chosen_TK.device)
                place = block.layer, block.name, block.n_experts
                scores = logits_TE, *block.scoring.judged(logits_TE)
                dropped_T = (decision.chosen_TK < 0).sum(-1)
                self.consume(Routing(*place, *decision[1:], self.tokens, *scores, decision.x_TD, dropped_T))
                block.router_input, block.router_outputs = None, ()

        return hook

    # --- the check of the first pass

    def part_ran(
        self, block: Block, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if not block.checked and not self.unseen() and isinstance(output, Tensor) and args:
            # cloned, since Llama 4 adds to it in place
            block.other_parts[name] = (args[0].detach(), output.detach().clone())

    def block_ran(self, block: Block, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if block.checked or self.unseen() or self.pending is None:
            return
        decision = self.pending
        output_TD = before_last_norm(block, tensors_in(output)[0].detach()).reshape(decision.x_TD.shape)
        few = slice(0, CHECKED_TOKENS)
        with self.uncounted(), torch.no_grad():
            mixed_TD = adapter_of(block).mix(block, Decision(*(part[few] for part in decision)))
        errors = [
            relative_error(mixed_TD + rest_TD, output_TD[few])
            for rest_TD in shared_parts(block.other_parts, mixed_TD, few)
        ]
        autocast = torch.is_autocast_enabled(output_TD.device.type)  # wider than its computation
        tolerance = HALF_TOLERANCE if autocast else TOLERANCE.get(output_TD.dtype, HALF_TOLERANCE)
        reject_if(
            not min(errors) <= tolerance,
            f"model type {block.model_type!r}: gates times expert outputs do not give the output of "
            f"{block.where()} (off by {min(errors):.1%}), so its routing cannot be captured; "
            f"{KNOWN_FAULTS.get(block.model_type, ADVICE)}",
        )
        block.checked = True
        block.other_parts.clear()
        self.pending = None

    def model_ran(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.unseen():
            return
        for block in self.blocks:
            reject_if(
                not block.calls,
                f"model type {block.model_type!r}: {block.where()} did not run in a forward pass; "
                "moescope cannot trace this model",
            )
        if all(block.checked for block in self.blocks):
            self.take_off(self.check_hooks)


def after(module: nn.Module, hook: Callable[..., None]) -> Any:
    return module.register_forward_hook(untraced(hook), with_kwargs=True)


def before(module: nn.Module, hook: Callable[..., Any]) -> Any:
    return module.register_forward_pre_hook(untraced(hook), with_kwargs=True)


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that torch.compile does not trace: it runs in Python between two graphs.

    The compiler takes seconds to import. transformers imports it; without it nothing is compiled.
    """
    compiled = "torch._dynamo" in sys.modules
    return torch.compiler.disable(hook) if compiled else hook  # type: ignore[no-untyped-call]


def before_last_norm(block: Block, output: Tensor) -> Tensor:
    """Return the block's output; where a norm ends the block, the norm's input."""
    for name, (part_input, part_output) in block.other_parts.items():
        if part_output.shape == output.shape == part_input.shape and torch.equal(part_output, output):
            del block.other_parts[name]
            return part_input
    return output


def shared_parts(parts: dict[str, tuple[Tensor, Tensor]], mixed_TD: Tensor, few: slice) -> list[Tensor]:
    """Return what may be added to the routed experts: nothing, a shared expert, or a gated one."""
    rows = [output.reshape(-1, output.shape[-1])[few].float() for _, output in parts.values()]
    wide = [part for part in rows if part.shape == mixed_TD.shape]
    gates = [part for part in rows if part.shape[-1] == 1]
    return [torch.zeros_like(mixed_TD), *wide, *(gate.sigmoid() * part for part in wide for gate in gates)]
