"""Hooks that see each MoE layer's decision as it is carried out, and hand it on as a `Routing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from moescope.errors import BadInput
from moescope.execution.adapters import (
    Block,
    Decision,
    adapter_of,
    find_blocks,
    hands_out_routing,
    relative_error,
    router_logits,
)
from moescope.execution.scoring import find_scoring
from moescope.types import Routing, Tokens

OLDEST_TRANSFORMERS = (5, 6)
CHECKED_TOKENS = 256  # of the first batch; each costs one more pass through its experts
TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 1e-3,
}  # relative error of a block's output; half precision gets the default
HALF_TOLERANCE = 0.05


def check_transformers() -> None:
    """Refuse versions before 5.6, where what was called router logits were probabilities."""
    try:
        from importlib.metadata import version

        found = version("transformers")
    except ImportError:
        raise BadInput(
            "transformers is not installed; install moescope with its extra: pip install 'moescope[hf]'"
        ) from None
    check_version(found)


def check_version(found: str) -> None:
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_TRANSFORMERS:
        raise BadInput(
            f"transformers {found}: its router_logits are probabilities; moescope needs "
            "transformers 5.6 or newer"
        )


class Capture:
    """Hooks on every MoE block of a model while it is open; `consume` is called with each layer's routing as
    it happens.

        with Capture(model, consume) as capture:
            capture.tokens = tokens   # what the next forward pass is about; None: every token counts
            model(input_ids=...)

    The first pass is checked: every layer must fire, and gates times expert outputs, plus shared experts,
    must give the
    block's output. Passes that autograd makes to recompute activations are not seen. A model that hands out
    its routing itself
    (`hands_out_routing`) is asked for it instead, and there is nothing to check.
    """

    def __init__(
        self,
        model: nn.Module,
        consume: Callable[[Routing], None],
        check: bool = True,
        runner: nn.Module | None = None,  # the part that will be called, where that is not the model itself
    ):
        self.hands_out = hands_out_routing(model)
        if not self.hands_out:
            check_transformers()
        self.model = runner or model
        self.consume = consume
        self.blocks = find_blocks(model)
        self.tokens: Tokens | None = None
        self.check = check
        self.busy = False  # the check itself runs experts, which must not be counted
        self.hooks: list[Any] = []
        self.check_hooks: list[Any] = []  # taken off when there is nothing left to check
        self.pending: Decision | None = None  # what the block under way decided, until its output is checked

    def __enter__(self) -> Capture:
        if self.hands_out:
            self.hooks.append(self.model.register_forward_pre_hook(self.ask, with_kwargs=True))
        for block in [] if self.hands_out else self.blocks:
            self.hook_router(block)
            self.hooks.append(block.experts.register_forward_hook(self.experts_ran(block), with_kwargs=True))
            if self.check and not block.checked:
                self.check_hooks += [
                    child.register_forward_hook(self.part_ran(block, name))
                    for name, child in block.module.named_children()
                    if child is not block.experts and block.router not in child.modules()
                ]
                self.check_hooks.append(block.module.register_forward_hook(self.block_ran(block)))
        if self.check and not all(block.calls for block in self.blocks):
            self.check_hooks.append(self.model.register_forward_hook(self.model_ran))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.take_off(self.hooks)
        self.take_off(self.check_hooks)

    def hook_router(self, block: Block) -> None:
        self.hooks.append(block.router.register_forward_hook(self.router_ran(block), with_kwargs=True))

    def take_off(self, hooks: list[Any]) -> None:
        for hook in hooks:
            hook.remove()
        hooks.clear()

    def unseen(self) -> bool:
        """Whether this call is not the model's own forward pass.

        The check's, or autograd recomputing activations.
        """
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
                block.router_input = tensors_in((*args, *kwargs.values()))[0].detach()
                block.router_outputs = tuple(part.detach() for part in tensors_in(output))

        return hook

    def experts_ran(self, block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            if self.unseen():
                return
            with torch.no_grad():
                given = tuple(part.detach() for part in tensors_in((*args, *kwargs.values())))
                decision = adapter_of(block).decide(block, given)
                logits_TE = router_logits(block)
                if block.scoring is None:
                    block.scoring = find_scoring(
                        logits_TE,
                        *decision[1:],
                        block.correction_bias_E,
                        block.groups,
                        block.expected_scoring,
                    )
                if self.check and not block.checked:
                    self.pending = decision
                block.calls += 1
                self.consume(
                    Routing(
                        block.layer,
                        block.name,
                        block.n_experts,
                        decision.chosen_TK,
                        decision.gates_TK,
                        self.tokens,
                        logits_TE,
                        *block.scoring.judged(logits_TE),
                        dropped_T=(decision.chosen_TK < 0).sum(-1),
                        x_TD=decision.x_TD,
                    )
                )
                block.router_input, block.router_outputs = None, ()

        return hook

    # --- the check of the first pass

    def part_ran(self, block: Block, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not block.checked and not self.unseen() and isinstance(output, Tensor) and args:
                block.beside[name] = (
                    args[0].detach(),
                    output.detach().clone(),
                )  # Llama 4 adds to it in place

        return hook

    def block_ran(self, block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if block.checked or self.unseen() or self.pending is None:
                return
            decision = self.pending
            whole_TD = before_last_norm(block, tensors_in(output)[0].detach()).reshape(decision.x_TD.shape)
            few = slice(0, CHECKED_TOKENS)
            self.busy = True
            try:
                with torch.no_grad():
                    mixed_TD = adapter_of(block).mix(block, Decision(*(part[few] for part in decision)))
            finally:
                self.busy = False
            errors = [
                relative_error(mixed_TD + rest_TD, whole_TD[few])
                for rest_TD in shared_parts(block.beside, mixed_TD, few)
            ]
            mixed_precision = torch.is_autocast_enabled(
                whole_TD.device.type
            )  # the output is then wider than what it was made in
            tolerance = HALF_TOLERANCE if mixed_precision else TOLERANCE.get(whole_TD.dtype, HALF_TOLERANCE)
            if not min(errors) <= tolerance:
                raise BadInput(
                    f"model type {block.model_type!r}: gates times expert outputs do not give "
                    f"the output of {block.where()} "
                    f"(off by {min(errors):.1%}), so its routing cannot be read; "
                    f"{KNOWN_FAULTS.get(block.model_type, ADVICE)}"
                )
            block.checked = True
            block.beside.clear()
            self.pending = None

        return hook

    def model_ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.unseen():
            return
        silent = [block for block in self.blocks if not block.calls]
        if silent:
            raise BadInput(
                f"model type {silent[0].model_type!r}: {silent[0].where()} did not run in a forward pass; "
                "moescope cannot trace this model"
            )
        if all(block.checked for block in self.blocks):
            self.take_off(self.check_hooks)


ADVICE = "moescope has no adapter for this kind of block"
KNOWN_FAULTS = {
    "nllb-moe": (
        "this version of transformers takes the router's mask for expert numbers and runs experts 0 "
        "and 1 only; "
        "use one that runs the experts chosen"
    ),
}


def before_last_norm(block: Block, output: Tensor) -> Tensor:
    """The block's output, or what its last part was given where that part's output is the block's.

    A norm at the end.
    """
    for name, (given, gave) in block.beside.items():
        if gave.shape == output.shape == given.shape and torch.equal(gave, output):
            del block.beside[name]
            return given
    return output


def shared_parts(beside: dict[str, tuple[Tensor, Tensor]], mixed_TD: Tensor, few: slice) -> list[Tensor]:
    """What may have been added to the routed experts: nothing, a shared expert, or one behind its gate."""
    rows = [gave.reshape(-1, gave.shape[-1])[few].float() for _, gave in beside.values()]
    wide = [part for part in rows if part.shape == mixed_TD.shape]
    fronts = [part for part in rows if part.shape[-1] == 1]
    return [torch.zeros_like(mixed_TD), *wide, *(front.sigmoid() * part for part in wide for front in fronts)]


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    parts = value if isinstance(value, tuple | list) else (value,)
    return tuple(part for part in parts if isinstance(part, Tensor))
