"""Count parameters and floating-point operations per token of a model; time the parts of a block."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import MoE, ParameterCounts, parameter_counts
from moescope.decoder.routers import Router, RouterInput, TokenContext, router_class
from moescope.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

WARM_UP = 3  # runs of a block before it is timed
PROBED = 256  # tokens for which a router's operations are counted
LAYER_BYTES = 50_000  # of a layer's Python objects, about
MOST_COUNTED = 10**14  # parameters; more are not counted exactly
# Operations over all elements that are not tagged as pointwise.
REDUCTIONS = {
    "_softmax", "_log_softmax", "logsumexp", "sum", "mean", "var", "std", "amax", "amin",
    "linalg_vector_norm", "cumsum", "native_layer_norm", "_thnn_fused_gru_cell",
}  # fmt: skip
# Tagged as pointwise, but they only move numbers.
MOVES = {
    "where", "masked_fill", "masked_fill_", "copy_", "fill_", "clone", "_to_copy", "zero_", "scalar_tensor",
}  # fmt: skip


def expert_parameters(config: ModelConfig) -> int:
    """Count one expert in one layer: three matrices in block `modern`, two with biases in `some`."""
    width = router_class(config.router).expert_shape(config)[1]
    if config.modern:
        return 3 * config.d_model * width
    return 2 * config.d_model * width + width + config.d_model


def active_parameters(config: ModelConfig) -> int:
    """Count all parameters minus those of experts that a token does not meet."""
    router = router_class(config.router)
    unmet = (router.expert_shape(config)[0] - router.slots_per_token(config)) * expert_parameters(config)
    return round(parameter_counts(config).total - unmet * config.layers)


def training_bytes(config: ModelConfig, tokens: int) -> int:
    """Return a lower bound of the memory of a training whose forward pass has so many tokens.

    Trained weights with gradient and AdamW's two moments in float32, frozen weights, tables of positions, and
    per token two bytes of each logit and of each layer's input.
    """
    counts = checked_counts(config)
    frozen = (counts.total - counts.trainable) * (2 if config.frozen_dtype == "bfloat16" else 4)
    weights = 16 * counts.trainable + frozen + LAYER_BYTES * config.layers
    positions = 4 * config.max_positions * config.d_model // (config.heads if config.modern else 1)
    return weights + positions + 2 * tokens * (config.vocabulary + config.layers * config.d_model)


def checked_counts(config: ModelConfig) -> ParameterCounts:
    """Return the parameters; of a model that torch cannot describe at least so many."""
    experts = router_class(config.router).expert_shape(config)[0]
    least = config.vocabulary * config.d_model + config.layers * experts * expert_parameters(config)
    trainable = config.vocabulary * config.d_model if config.frozen_experts else least
    if least > MOST_COUNTED:
        return ParameterCounts(least, trainable)
    try:
        return parameter_counts(config)
    except (RuntimeError, OverflowError, TypeError):  # such as a router option beyond 64 bits
        return ParameterCounts(MOST_COUNTED, MOST_COUNTED)


def memory_of(device: str) -> int:
    """Return the bytes of a device: of a GPU all of its memory, else all of the machine's."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Count floating-point operations per token of a forward pass in training, with rows of that length.

    Two per matrix weight that the token meets, attention over half the row on average, and everything a
    router does, elementwise arithmetic included; other norms, activations and rotations are excluded. A
    training step takes about three times as much.
    """
    D, router = config.d_model, router_class(config.router)
    attention = 8 * D * D + 4 * D * (length + 1) / 2
    matrices = (3 if config.modern else 2) * D * router.expert_shape(config)[1]
    experts = router.slots_per_token(config) * 2 * matrices
    return config.layers * (attention + experts + router_flops(config)) + 2 * D * config.vocabulary


def router_flops(config: ModelConfig) -> float:
    """Count one layer's router operations per token, on random tokens."""
    kind = router_class(config.router)
    probed = min(PROBED, max(2**24 // config.experts, 1))  # tokens x experts in little memory
    config = replace(config, vocabulary=min(config.vocabulary, 8))  # operations do not depend on it
    with torch.device("meta"):
        tensors = kind(config, 0, kind.shared_parts(config)).state_dict().values()
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed > memory_of("cpu") // 2:
        raise BadInput(
            f"the {config.router} router of one layer needs {needed / 1e9:,.1f} GB; lower [model] d_model "
            "or experts"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        router = kind(config, 0, kind.shared_parts(config)).train()
        x_TD, ids_T = torch.randn(probed, config.d_model), torch.randint(config.vocabulary, (probed,))
        context = TokenContext(ids_T, torch.zeros_like(ids_T), x_TD)
        inputs = RouterInput(x_TD, ids_T, torch.ones_like(ids_T, dtype=torch.bool), 0, context=context)
        with torch.no_grad(), FlopCount() as counted:
            router(inputs)
    return counted.flops / probed


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count 2 m n k per matrix product and 1 per element of other float arithmetic, in `flops`.

    One per element is a convention: a logarithm costs more than a sum. Sorting, comparing and moving numbers
    count nothing, so a component may take time without any operation here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    name = packet.__name__
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if name == "_grouped_mm":  # each row meets one expert's matrix
        return 2 * args[0].shape[0] * args[0].shape[1] * out.shape[1]
    if name in MOVES or not (torch.Tag.pointwise in func.tags or name in REDUCTIONS):
        return 0
    outputs = out if isinstance(out, tuple | list) else (out,)
    if not any(isinstance(one, Tensor) and one.is_floating_point() for one in outputs):
        return 0  # a comparison
    return max(one.numel() for one in (*args, *outputs) if isinstance(one, Tensor))


# --- time and FLOPs of each part of a router and of its experts: the table overhead

Part = tuple[nn.Module, str]  # a method of a module
Around = Callable[[str], AbstractContextManager[Any]]  # entered with the name of a part for each call of it


def overhead(
    configs: Mapping[str, ModelConfig],
    tokens: int = 4096,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    repeats: int = 10,
    seed: int = 0,
) -> pd.DataFrame:
    """Return one row per router and component: median milliseconds, FLOPs, share of the block's time.

    One MoE block per config, in training mode, on the same random tokens: forward pass and the update after a
    step. Experts run in `dtype`, as do products that a router rounds in training (`product_dtype`); other
    parts of routers run in float32. Components are disjoint and add up to the block: "rest" is what a router
    does besides its named components, "routing" all of a router that names none. With few tokens on a GPU the
    times are those of kernel launches.
    """
    import pandas as pd

    if tokens < 1 or repeats < 1:
        raise BadInput(f"overhead: tokens {tokens}, repeats {repeats}; both must be at least 1")
    rows = []
    for label, config in configs.items():
        parts = block_overhead(config, tokens, device, dtype, repeats, seed)
        total = sum(milliseconds for milliseconds, _ in parts.values())
        rows += [
            {"router": label, "component": component, "milliseconds": ms, "flops": flops, "share": ms / total}
            for component, (ms, flops) in parts.items()
        ]
    return pd.DataFrame(rows)


def block_overhead(
    config: ModelConfig, tokens: int, device: str, dtype: torch.dtype, repeats: int, seed: int
) -> dict[str, tuple[float, int]]:
    """Return component -> (milliseconds, operations) of one block."""
    torch.manual_seed(seed)
    shared = router_class(config.router).shared_parts(config)
    block = MoE(config, 0, shared if shared is None else shared.to(device)).to(device)
    x_TD = torch.randn(tokens, config.d_model).to(device)
    ids_T = torch.randint(config.vocabulary, (tokens,)).to(device)
    mask_T = torch.ones_like(ids_T, dtype=torch.bool)
    context = TokenContext(ids_T, torch.arange(tokens, device=ids_T.device), x_TD)
    router = block.router
    parts = parts_of(block)

    def once(around: Around) -> None:
        with (
            watching(parts, around),
            torch.no_grad(),
            torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32),
        ):
            block(x_TD, ids_T, mask_T, None, context)
            router.after_step()

    counts: dict[str, int] = {}
    once(partial(counting, counts))
    for _ in range(WARM_UP):
        once(nullcontext)
    times = []
    for _ in range(repeats):
        clock = Clock(device)
        once(clock.timing)
        times.append(without_overlap(clock.read(), router))
    return {
        name: (max(median(one[name] for one in times), 0.0), int(operations))
        for name, operations in without_overlap(counts, router).items()
    }


def parts_of(block: MoE) -> dict[str, Part]:
    """Return what is timed: the router, its named components, its update after a step, the experts."""
    router = block.router
    parts: dict[str, Part] = {"routing": (router, "forward")}
    parts |= {component: (router, method) for component, method in getattr(router, "components", {}).items()}
    if type(router).after_step is not Router.after_step:
        parts["update"] = (router, "after_step")
    return parts | {"experts": (block.experts, "forward")}


def without_overlap(values: Mapping[str, float], router: Router) -> dict[str, float]:
    """Replace the router's total by what it does besides its named components, if it has any."""
    named = {part: values[part] for part in getattr(router, "components", ()) if part in values}
    if not named:
        return dict(values)
    others = {part: value for part, value in values.items() if part not in named and part != "routing"}
    return named | {"rest": values["routing"] - sum(named.values())} | others


@contextmanager
def watching(parts: dict[str, Part], around: Around) -> Iterator[None]:
    """Enter `around` for each call of a method, on the instance only, until the end."""

    def watched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with around(name):
                return function(*args, **kwargs)

        return call

    for name, (module, method) in parts.items():
        setattr(module, method, watched(getattr(module, method), name))
    try:
        yield
    finally:
        for module, method in parts.values():
            delattr(module, method)


@contextmanager
def counting(counts: dict[str, int], name: str) -> Iterator[None]:
    """Add the operations inside to those of the name."""
    with FlopCount() as mode:
        yield
    counts[name] = counts.get(name, 0) + mode.flops


class Clock:
    """Timer that does not make functions wait for each other: events on a GPU, else the CPU clock."""

    def __init__(self, device: str):
        self.cuda = torch.device(device).type == "cuda"
        self.marks: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.marks.append((name, start, self.now()))

    def read(self) -> dict[str, float]:
        """Return total milliseconds by name."""
        if self.cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for name, start, end in self.marks:
            spent = start.elapsed_time(end) if self.cuda else 1000 * (end - start)
            totals[name] = totals.get(name, 0.0) + spent
        return totals
