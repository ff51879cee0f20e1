"""Carry out changes of one MoE block while its model runs.

No weight is written: the forward functions of the block, its router and its experts are replaced by functions
that change what passes through them, and are put back afterwards. Tensors are read when the block runs, so
that a layer may get its weights after the change was set up (streamed runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from moescope.errors import BadInput
from moescope.execution.adapters import Block, Decision, adapter_of, tensors_in

FAR = 1e4  # beyond every score and logit of a router, and finite in half precision
Options = Mapping[str, Any]  # of a change, by name; defaults are filled in
OnScores = Callable[[Tensor], Tensor]  # [..., E] -> [..., E]


@dataclass(frozen=True)
class Context:
    """What a change may need besides its block."""

    blocks: Mapping[int, Block]
    means: Mapping[tuple[int, int], Tensor] | None  # layer, expert -> mean output; None: not known yet
    seed: int


@dataclass
class Edit:
    """What changes in one block; everything empty: nothing."""

    block: Block
    rows: list[Callable[[Tensor], Tensor]] = field(default_factory=list)  # [E, D] in float64, on the CPU
    logits: list[OnScores] = field(default_factory=list)
    # Changes of the scores that select, where gates are made from other scores: of the bias for choosing [E],
    # or of the scores themselves [T, E] where the model is the lab's.
    selection: list[OnScores] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    top_k: int | None = None
    places: list[int] = field(default_factory=list)  # number in the router -> expert that runs
    outputs: dict[int, Tensor | None] = field(default_factory=dict)  # expert -> its output [D]; None: zero
    # contexts in which experts have other weights, entered whenever they run
    weights: list[Callable[[], AbstractContextManager[None]]] = field(default_factory=list)
    see: Callable[[Block, Decision], None] | None = None  # called with every decision; it may run experts
    seeing: bool = False
    adjusted: set[str] = field(default_factory=set)  # methods of a lab router that the current pass called
    changed_rows_ED: Tensor | None = None  # computed when the router first runs
    router_input: Tensor | None = None
    router_outputs: tuple[Tensor, ...] = ()

    @contextmanager
    def carried_out(self) -> Iterator[None]:
        """Change the block until the end of the context."""
        block, router = self.block, cast(Any, self.block.router)
        values: list[tuple[Any, str, Any]] = []
        for name, functions in self.adjusting.items():
            values.append((router, name, partial(self.adjust, name, functions)))
        if self.top_k is not None:
            values += [(module, "top_k", self.top_k) for module in top_k_owners(block)]
            if block.hands_out:
                values.append((router, "config", replace(router.config, top_k=self.top_k)))
        outputs = bool(self.outputs or self.see)
        forwards = [
            (block.module, self.run_block, self.selection and not block.hands_out),
            (block.router, self.run_router, self.rows or self.logits or self.adjusting or outputs),
            (block.experts, self.run_experts, self.places or self.weights or outputs),
        ]
        with ExitStack() as stack:
            for value in values:
                stack.enter_context(attribute(*value))
            for module, run, changes in forwards:
                if changes:
                    stack.enter_context(attribute(module, "forward", partial(run, module.forward)))
            yield

    @property
    def adjusting(self) -> dict[str, list[OnScores]]:
        """The methods of a lab router that are replaced, and by what."""
        replaced = {"adjust_logits": self.logits, "adjust_selection": self.selection}
        return {name: functions for name, functions in replaced.items() if functions and self.block.hands_out}

    def adjust(self, name: str, functions: list[OnScores], scores: Tensor) -> Tensor:
        self.adjusted.add(name)
        return run_all(functions, scores)

    def run_router(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The router's forward with other rows and logits."""
        logits = [] if self.block.hands_out else self.logits
        self.adjusted.clear()
        with ChangedLinear(self, logits) as mode:
            output = forward(*args, **kwargs)
        if ((self.rows or logits) and mode.calls != 1) or self.adjusted != set(self.adjusting):
            raise BadInput(
                f"model type {self.block.model_type!r}: the router of {self.block.where()} computes its "
                "logits in a way that moescope cannot change; change its experts instead (ablate)"
            )
        if (self.outputs or self.see) and not self.block.hands_out:
            self.router_input = tensors_in((*args, *kwargs.values()))[0]
            self.router_outputs = tensors_in(output)
        return output

    def run_block(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The block's forward with another bias for choosing."""
        assert self.block.correction_bias is not None
        module, name = self.block.correction_bias
        stored: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
        before = stored[name]
        if before.is_meta:
            raise BadInput(
                f"{self.block.where()}: its bias for choosing is not in memory between calls, so it cannot "
                "be changed; use --execution resident or streamed"
            )
        with torch.no_grad():
            value = run_all(self.selection, before.detach().clone())
        stored[name] = nn.Parameter(value, requires_grad=False) if stored is module._parameters else value
        try:
            return forward(*args, **kwargs)
        finally:
            stored[name] = before

    def run_experts(self, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """The experts' forward with other experts, or with other outputs."""
        if self.seeing:
            return forward(*args, **kwargs)
        block, adapter = self.block, adapter_of(self.block)
        values = [*args, *kwargs.values()]
        at = [index for index, value in enumerate(values) if isinstance(value, Tensor)]
        inputs = tuple(values[index] for index in at)
        rerouted = adapter.rerouted(block, inputs, list(self.outputs), self.places)
        for index, value in zip(at, rerouted, strict=True):
            values[index] = value
        with ExitStack() as stack:
            for written in self.weights:
                stack.enter_context(written())
            output = forward(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        replaced = {expert: output_D for expert, output_D in self.outputs.items() if output_D is not None}
        if replaced or self.see:
            seen = replace(block, router_input=self.router_input, router_outputs=self.router_outputs)
            decision = adapter.decide(seen, inputs)
            if self.see:
                self.seeing = True
                self.see(seen, decision)
                self.seeing = False
            for expert, output_D in replaced.items():
                gate_T = torch.where(decision.chosen_TK == expert, decision.gates_TK, 0).sum(-1)
                output_TD = output_D.to(decision.x_TD.device, output.dtype).expand(decision.x_TD.shape)
                output = adapter.add(output, gate_T[:, None].to(output.dtype) * output_TD, expert)
        return output


class ChangedLinear(TorchFunctionMode):
    """While a router runs: its linear map uses other rows, and what it returns is changed."""

    def __init__(self, edit: Edit, logits: list[OnScores]):
        super().__init__()
        self.edit, self.logits, self.calls = edit, logits, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.linear:
            return func(*args, **kwargs)
        values = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        weight = values["weight"]
        if weight.dim() != 2 or weight.shape[0] != self.edit.block.n_experts:
            return func(*args, **kwargs)
        self.calls += 1
        if self.edit.rows:
            if self.edit.changed_rows_ED is None:
                stored_ED = self.edit.block.weight_ED.detach()
                rows_ED = run_all(self.edit.rows, stored_ED.cpu().double())
                self.edit.changed_rows_ED = rows_ED.to(stored_ED.dtype).to(weight)  # as if they were stored
            values["weight"] = self.edit.changed_rows_ED
        return run_all(self.logits, func(**values))


def run_all(functions: list[Callable[[Tensor], Tensor]], value: Tensor) -> Tensor:
    return reduce(lambda changed, function: function(changed), functions, value)


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of this object alone; afterwards it is as before, absent where it was the class's."""
    present, before = name in vars(owner), vars(owner).get(name)
    object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        if present:
            object.__setattr__(owner, name, before)
        else:
            object.__delattr__(owner, name)


def top_k_owners(block: Block) -> list[Any]:
    """Return the modules of a block of transformers that hold its number of experts per token."""
    if block.hands_out:
        return []
    inside = set(block.experts.modules())
    modules = (module for module in block.module.modules() if module not in inside)
    return [module for module in modules if isinstance(vars(module).get("top_k"), int)]
