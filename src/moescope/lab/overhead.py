"""Time and FLOPs of each part of a router and of its experts: the `overhead` table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moescope.decoder.model import MoE
from moescope.decoder.routers import Router, TokenContext, router_class
from moescope.errors import BadInput
from moescope.lab.cost import FlopCount

if TYPE_CHECKING:
    import pandas as pd

    from moescope.decoder.config import ModelConfig

WARM_UP = 3

Part = tuple[nn.Module, str]  # a method of a module
Watched = Callable[[Callable[..., Any], str], Callable[..., Any]]


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

    def once(watched: Watched) -> None:
        with (
            watching(parts, watched),
            torch.no_grad(),
            torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32),
        ):
            block(x_TD, ids_T, mask_T, None, context)
            router.after_step()

    counts: dict[str, int] = {}
    once(counting(counts))
    for _ in range(WARM_UP):
        once(lambda function, _: function)
    times: list[dict[str, float]] = []
    for _ in range(repeats):
        clock = Clock(device)
        once(clock.timing)
        times.append(without_overlap(clock.read(), router))
    operations = without_overlap(counts, router)
    return {
        name: (max(median(one[name] for one in times), 0.0), int(operations[name])) for name in operations
    }


def parts_of(block: MoE) -> dict[str, Part]:
    """Return what is timed: the router, its named components, its update after a step, the experts."""
    router = block.router
    parts: dict[str, Part] = {"routing": (router, "forward")}
    parts |= {component: (router, method) for component, method in components(router).items()}
    if type(router).after_step is not Router.after_step:
        parts["update"] = (router, "after_step")
    return parts | {"experts": (block.experts, "forward")}


def components(router: Router) -> dict[str, str]:
    return getattr(router, "components", {})


def without_overlap(values: Mapping[str, float], router: Router) -> dict[str, float]:
    """Replace the router's total by what it does besides its named components, if it has any."""
    named = {part: values[part] for part in components(router) if part in values}
    if not named:
        return dict(values)
    others = {part: value for part, value in values.items() if part not in named and part != "routing"}
    return named | {"rest": values["routing"] - sum(named.values())} | others


@contextmanager
def watching(parts: dict[str, Part], watched: Watched) -> Iterator[None]:
    """Wrap each method, on the instance only, and remove the wrappers afterwards."""
    for name, (module, method) in parts.items():
        setattr(module, method, watched(getattr(module, method), name))
    try:
        yield
    finally:
        for module, method in parts.values():
            delattr(module, method)


def counting(counts: dict[str, int]) -> Watched:
    def watched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with FlopCount() as mode:
                result = function(*args, **kwargs)
            counts[name] = counts.get(name, 0) + mode.flops
            return result

        return counted

    return watched


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

    def timing(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.now()
            result = function(*args, **kwargs)
            self.marks.append((name, start, self.now()))
            return result

        return timed

    def read(self) -> dict[str, float]:
        """Return total milliseconds by name."""
        if self.cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for name, start, end in self.marks:
            spent = start.elapsed_time(end) if self.cuda else 1000 * (end - start)
            totals[name] = totals.get(name, 0.0) + spent
        return totals
