"""Training steps of the router lab against transformers' Mixtral of the same size, for every router.

    PYTHONPATH=src python bench/lab.py                        small, in float32 on the CPU: a minute or two
    PYTHONPATH=src python bench/lab.py --device cuda          d 512, 10 layers, 64 experts, top-4, batch 32 x
    768, and some_b3's memory

A step is forward, backward, AdamW and the routers' own updates, on random tokens without padding (which the
lab's experts would skip). On a GPU every model has
bfloat16 weights (the lab's routers float32), which is the fastest that transformers' grouped_mm experts run;
rows marked `mixed` keep
float32 weights under autocast, as `moescope train` does. transformers is measured with and without its
auxiliary loss,
and ratios are to the faster. `waits` says whether a step of a GPU waited for the device, by torch's own
check.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel, SwiGLUExperts, grouped_product, looped_product
from moescope.decoder.routers import ROUTERS
from moescope.lab.config import PRESETS, LabConfig, with_router

Step = Callable[[], None]
COMPILED = "compiled"


@dataclass(frozen=True)
class Row:
    name: str
    tokens_per_second: float
    step_ms: float
    peak_gb: float  # of the device; 0 on a CPU
    waits: str
    error: str = ""


@dataclass(frozen=True)
class Size:
    model: ModelConfig
    batch: int
    length: int


SIZES = {
    "cpu": Size(PRESETS["nano"].model, 16, 128),
    "cuda": Size(PRESETS["medium"].model, 32, 768),
}
SMALL_SOME = replace(PRESETS["nano"].model, block="some", router="some", frozen_experts=True)


def tokens_of(size: Size, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and what follows each."""
    ids = torch.randint(0, size.model.vocabulary, (size.batch, size.length + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def optimiser_of(model: torch.nn.Module, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=device == "cuda"
    )


def lab_step(config: ModelConfig, size: Size, device: str, mixed: bool, compile: bool) -> Step:
    torch.manual_seed(0)
    with torch.device(device):
        model = LabModel(config, compile=compile).train()
    if device == "cuda" and not mixed:
        model.cast(torch.bfloat16)
    optimiser = optimiser_of(model, device)
    ids, targets = tokens_of(size, device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=mixed and device == "cuda"):
            loss = model(ids, targets_BL=targets).loss
        assert loss is not None
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        model.after_step()

    return step


def transformers_step(size: Size, device: str, auxiliary: bool) -> Step:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = size.model
    torch.manual_seed(0)
    with torch.device(device):
        model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=config.vocabulary,
                hidden_size=config.d_model,
                intermediate_size=config.d_ff,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.heads,
                num_local_experts=config.experts,
                num_experts_per_tok=config.top_k,
                max_position_embeddings=config.max_positions,
                output_router_logits=auxiliary,
                use_cache=False,
            )
        ).train()
    model.set_experts_implementation("grouped_mm")
    assert model.config._experts_implementation == "grouped_mm"
    if device == "cuda":
        model.to(torch.bfloat16)
    optimiser = optimiser_of(model, device)
    ids, _ = tokens_of(size, device)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def measured(name: str, make: Callable[[], Step], size: Size, given: argparse.Namespace) -> Row:
    """One model built, warmed up, timed and let go."""
    cuda = given.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = make()
        for _ in range(given.warmup):
            step()
        times = []
        for _ in range(given.rounds):
            times.append(seconds(step, given.steps, cuda))
        waits = waiting(step) if cuda else "-"
    except (
        RuntimeError,
        ValueError,
        AttributeError,
        ImportError,
    ) as error:  # one that fails must not cost the others' figures
        return Row(name, 0, 0, 0, "-", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    finally:
        step = lambda: None  # noqa: E731  lets the model go
        gc.collect()
    took = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    return Row(name, size.batch * size.length / took, 1000 * took, peak, waits)


def seconds(step: Step, steps: int, cuda: bool) -> float:
    """Of one step. On a CPU the process's own time, so that what else the machine does does not count."""
    clock = time.perf_counter if cuda else time.process_time
    if cuda:
        torch.cuda.synchronize()
    start = clock()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (clock() - start) / steps


def waiting(step: Step) -> str:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return f"yes: {str(error).splitlines()[0][:80]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "no"


def check_kernel(device: str) -> str:
    """Grouped products against the loop in one number: outputs and all gradients, with empty slots and an
    expert nobody chose.

    Memory is filled with NaN first and given back, since what a kernel leaves unwritten would otherwise pass
    by luck.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config, tokens = (SIZES["cuda"].model, 4096) if device == "cuda" else (SIZES["cpu"].model, 256)
    with torch.device(device):
        experts = SwiGLUExperts(config, config.experts, config.d_ff).to(dtype)
        x = torch.randn(tokens, config.d_model, dtype=dtype)
        wishes = torch.rand(tokens, config.experts)
        wishes[:, 2] = -1
        chosen = wishes.topk(config.top_k, dim=-1).indices
        chosen[::3, 0] = -1
        gates = torch.rand(chosen.shape).masked_fill(chosen < 0, 0)
        direction = torch.randn(tokens, config.d_model)
    found = []
    for product in (looped_product, grouped_product):
        experts.product = product
        for shape in (
            (tokens * config.top_k, 2 * config.d_ff),
            (tokens * config.top_k, config.d_model),
            experts.gate_up.shape,
        ):
            torch.full(shape, float("nan"), dtype=dtype, device=device)
        given = [one.clone().requires_grad_() for one in (x, gates)]
        y = experts(given[0], chosen, given[1])
        found.append(
            [y.detach(), *torch.autograd.grad((y * direction).sum(), [*given, *experts.parameters()])]
        )
    errors = [float((one - other).abs().max() / other.abs().max()) for other, one in zip(*found, strict=True)]
    names = ("output", "input", "gates", "gate_up", "down")
    return ", ".join(f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True))


def contestants(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Name, and what builds it. Routers whose k is fixed run with it."""
    size, device = SIZES[given.device], given.device

    def lab(config: ModelConfig, mixed: bool = False) -> Callable[[], Step]:
        return partial(lab_step, config, size, device, mixed, given.compile)

    yield "transformers", partial(transformers_step, size, device, auxiliary=False)
    yield "transformers, auxiliary loss", partial(transformers_step, size, device, auxiliary=True)
    reference = with_mixtral_attention(size, "topk" if device == "cuda" else "top2")
    yield reference.router, partial(lab_step, reference, size, device, mixed=False, compile=False)
    if given.compile:
        yield f"{reference.router}, {COMPILED}", lab(reference)
    if device == "cuda":
        yield f"{reference.router}, mixed", lab(reference, mixed=True)
    for router in given.routers:
        if router not in (reference.router, "some"):
            yield router, lab(with_mixtral_attention(size, router))
    if "some" in given.routers:
        some = PRESETS["some_a4"].model if device == "cuda" else SMALL_SOME
        yield "some", lab(some)
        yield "some, trained experts", lab(replace(some, frozen_experts=False))
    if given.b3:
        yield "some_b3, mixed", lab(PRESETS["some_b3"].model, mixed=True)


def with_mixtral_attention(size: Size, router: str) -> ModelConfig:
    """That router, and queries and keys as in Mixtral for everybody.

    So that routers differ in nothing else.
    """
    return replace(with_router(LabConfig(size.model), router).model, qk_norm=False)


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--routers", default=",".join(ROUTERS), help="which routers, comma-separated")
    arguments.add_argument("--steps", type=int, help="of a round")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--warmup", type=int, help="steps before a model is timed")
    arguments.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile for what lies between matrix products",
    )
    arguments.add_argument(
        "--b3", action=argparse.BooleanOptionalAction, help="some_b3 too, whose peak memory matters"
    )
    arguments.add_argument("--json", help="a file for the figures")
    given = arguments.parse_args()
    given.routers = [name for name in given.routers.split(",") if name]
    cuda = given.device == "cuda"
    given.steps = given.steps or (20 if cuda else 3)
    given.warmup = given.warmup or (12 if cuda else 3)  # compiling goes on for some steps after the first
    given.compile, given.b3 = (cuda if flag is None else flag for flag in (given.compile, given.b3))

    size = SIZES[given.device]
    machine = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{machine}, torch {torch.__version__}: width {size.model.d_model}, {size.model.layers} "
        f"layers, {size.model.experts} experts of {size.model.d_ff}, {size.model.top_k} per token, "
        f"batch {size.batch} x {size.length}; medians of {given.rounds} rounds of {given.steps} "
        "steps"
    )
    print(
        "grouped products against the loop, largest difference over largest value: "
        f"{check_kernel(given.device)}"
    )
    print(
        f"{'':30}{'tokens/s':>12}{'ms per step':>13}{'to transformers':>17}{'peak GB':>9}  waits", flush=True
    )
    rows: list[Row] = []
    for name, make in contestants(given):
        row = measured(name, make, size, given)
        rows.append(row)
        if row.error and name.endswith(COMPILED):
            given.compile = False  # the routers that follow run without
        theirs = max(
            (one.tokens_per_second for one in rows if one.name.startswith("transformers")), default=0
        )
        ratio = f"{row.tokens_per_second / theirs:.2f}" if theirs else "-"
        print(
            (
                f"{row.name:30}{row.tokens_per_second:12,.0f}{row.step_ms:13.1f}{ratio:>17}"
                f"{row.peak_gb:9.1f}  {row.error or row.waits}"
            ),
            flush=True,
        )
    if given.json:
        with open(given.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
