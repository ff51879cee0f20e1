"""What each part of a router costs beside the experts it serves: the rows of the `overhead` table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moescope.decoder.model import MoE
from moescope.decoder.routers import Router, router_class
from moescope.errors import BadInput
from moescope.lab.flops import FlopCount

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
    """One row a router and component: milliseconds (median), floating-point operations, share of the block's
    time.

    One MoE block of each config, in training mode, on the same random tokens; forward passes, and the update
    after a step. Experts run in `dtype`, routers in float32 as they always do. Components are disjoint and
    add up to the block: "rest" is what the router does beside those it names, "routing" the whole of one that
    names none. With few tokens on a GPU the times are those of launching kernels, not of arithmetic.
    """
    import pandas as pd

    if tokens < 1 or repeats < 1:
        raise BadInput(f"overhead of {tokens} tokens, {repeats} times: give at least 1 of both")
    rows = []
    for label, config in configs.items():
        found = block_overhead(config, tokens, device, dtype, repeats, seed)
        whole = sum(milliseconds for milliseconds, _ in found.values())
        rows += [
            {"router": label, "component": component, "milliseconds": ms, "flops": flops, "share": ms / whole}
            for component, (ms, flops) in found.items()
        ]
    return pd.DataFrame(rows)


def block_overhead(
    config: ModelConfig, tokens: int, device: str, dtype: torch.dtype, repeats: int, seed: int
) -> dict[str, tuple[float, int]]:
    """Component -> milliseconds, operations; of one block."""
    torch.manual_seed(seed)
    shared = router_class(config.router).shared_parts(config)
    block = MoE(config, 0, shared if shared is None else shared.to(device)).to(device)
    x_TD, ids_T = (
        torch.randn(tokens, config.d_model).to(device),
        torch.randint(config.vocabulary, (tokens,)).to(device),
    )
    mask_T = torch.ones_like(ids_T, dtype=torch.bool)
    router = block.router
    parts = parts_of(block)

    def once(watched: Watched) -> None:
        with (
            watching(parts, watched),
            torch.no_grad(),
            torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32),
        ):
            block(x_TD, ids_T, mask_T)
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
    """What is timed.

    The router as a whole, the components it names, its update after a step, and the experts.
    """
    router = block.router
    parts: dict[str, Part] = {"routing": (router, "forward")}
    parts |= {component: (router, method) for component, method in components(router).items()}
    if type(router).after_step is not Router.after_step:
        parts["update"] = (router, "after_step")
    return parts | {"experts": (block.experts, "forward")}


def components(router: Router) -> dict[str, str]:
    return getattr(router, "components", {})


def without_overlap(found: Mapping[str, float], router: Router) -> dict[str, float]:
    """The same, the router as a whole replaced by what it does beside its components, where it names any."""
    named = {component: found[component] for component in components(router) if component in found}
    if not named:
        return dict(found)
    rest = {"rest": found["routing"] - sum(named.values())}
    return (
        named
        | rest
        | {name: value for name, value in found.items() if name not in named and name != "routing"}
    )


@contextmanager
def watching(parts: dict[str, Part], watched: Watched) -> Iterator[None]:
    """Puts a watched version in front of each method, on the instance alone, and takes it away again."""
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
    """Times functions without making them wait for each other.

    Events on a GPU, the processor's clock elsewhere.
    """

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
        """Milliseconds by name; of something called twice, both together."""
        if self.cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for name, start, end in self.marks:
            spent = start.elapsed_time(end) if self.cuda else 1000 * (end - start)
            found[name] = found.get(name, 0.0) + spent
        return found
