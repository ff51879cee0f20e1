"""inspect: describe a checkpoint from its headers, without reading tensors."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from moescope.checkpoint import open_checkpoint
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import duration
from moescope.verb import Verb

# Bytes per stored number with its share of a scale: MXFP4 has one byte per 32, INT4 usually two.
BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "INT8": 1, "MXFP4": 17 / 32,
    "INT4": 18 / 32, "INT2": 10 / 32,
}  # fmt: skip
READ_BYTES = 500e6  # per second, from a disk


def inspect(model: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Show what a checkpoint is, from its headers alone: family, shape, parameters, coverage, cost of a scan.

    Parameters
    ----------
    model : MODEL
        Checkpoint: folder, file, hub id (owner/name, owner/name@revision) or URL.

    Examples
    --------
    >>> moescope.inspect("mistralai/Mixtral-8x7B-v0.1")["family"]  # doctest: +SKIP
    'mixtral'
    """
    moe = read_moe(open_checkpoint(model, revision))
    checkpoint, layers = moe.checkpoint, list(moe.layers.values())
    first = layers[0]
    config = checkpoint.config or {}
    lab = config.get("moescope_lab")
    schemes = Counter(packed.scheme for packed in checkpoint.packed.values())
    return {
        "model": checkpoint.shown,
        "revision": checkpoint.revision,
        "family": moe.coverage.family,
        "layout": moe.family.name,
        "lab_router": lab.get("router") if isinstance(lab, dict) else None,
        "moe_layers": list(moe.layers),
        "layers": config.get("num_hidden_layers"),
        "experts": one_or_all([weights.n_experts for weights in layers]),
        "top_k": one_or_all([weights.top_k for weights in layers]),
        "scoring": first.scoring,
        "activation": first.activation,
        "d_model": first.d_model,
        "d_ff": one_or_all([weights.d_ff for weights in layers]),
        "shared_d_ff": one_or_all(
            [weights.shared.gate_FD.shape[0] if weights.shared else None for weights in layers]
        ),
        "dtypes": dict(Counter(info.dtype for info in checkpoint.tensors.values()).most_common()),
        "quantisation": ", ".join(scheme for scheme, _ in schemes.most_common()) or None,  # if there is one
        "bytes": checkpoint.bytes(),
        "files": len(checkpoint.file_names()),
        "parameters": count_parameters(moe),
        "coverage": asdict(moe.coverage),
        "coverage_line": moe.coverage.line(),
        "scan_estimate": scan_estimate(moe),
        "scan_lacks": moe.coverage.without_rows(),
    }


def one_or_all(values: list[Any]) -> Any:
    """Return the value that all layers share, or the list."""
    return values[0] if len(set(values)) == 1 else values


def count_parameters(moe: MoeCheckpoint) -> dict[str, int | None]:
    """Count total, routed, shared and active parameters (per token: top_k routed experts and the rest)."""
    routed = shared = used = 0
    for weights in moe.layers.values():
        stacks = (weights.gate_EFD, weights.up_EFD, weights.down_EDF)
        in_layer = sum(prod(stack.shape) for stack in stacks if stack is not None)
        routed += in_layer
        used += in_layer * (weights.top_k or 0) // weights.n_experts
        if weights.shared:
            parts = (weights.shared.gate_FD, weights.shared.up_FD, weights.shared.down_DF)
            shared += sum(prod(part.shape) for part in parts if part is not None)
    total = moe.coverage.parameters_total
    active = total - routed + used if all(weights.top_k for weights in moe.layers.values()) else None
    return {"total": total, "routed": routed, "shared": shared, "active": active}


def scan_estimate(moe: MoeCheckpoint) -> dict[str, float]:
    """Estimate time and memory of a gate scan on this machine's processor, from a short trial.

    Memory: the leading vectors of every expert, and two experts at once in fp64.
    """
    shapes = [(weights.n_experts, weights.d_ff, weights.d_model) for weights in moe.layers.values()]
    trial = run_trial(*max(shapes, key=lambda shape: shape[0] * decomposition_flops(*shape[1:])))
    seconds, read, largest = START, 0.0, 0
    for weights, (n_experts, d_ff, d_model) in zip(moe.layers.values(), shapes, strict=True):
        small, each = min(d_model, d_ff), d_model * d_ff
        seconds += trial.layer_seconds(n_experts, d_ff, d_model)
        read += n_experts * each * BYTES.get(weights.gate_EFD.dtype, 2)
        largest = max(largest, 8 * (n_experts * d_model * 64 + 3 * each + 2 * small**2))
    seconds += read / READ_BYTES
    return {"seconds": round(seconds, 1), "memory_bytes": largest, "read_bytes": int(read)}


def lines(facts: dict[str, Any]) -> list[str]:
    """Format the facts for the terminal."""
    parameters, estimate = facts["parameters"], facts["scan_estimate"]
    counts = [f"{short(parameters['total'])} total", f"{short(parameters['routed'])} in routed experts"]
    counts += [f"{short(parameters['shared'])} in shared experts"] if parameters["shared"] else []
    active = parameters["active"]
    counts.append(f"{short(active)} active per token" if active else "active unknown (no top_k in config)")
    router = f", lab router {facts['lab_router']}" if facts["lab_router"] else ""
    shared = f", shared d_ff {facts['shared_d_ff']}" if facts["shared_d_ff"] else ""
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in facts["dtypes"].items())
    quantised = f"; {facts['quantisation']}" if facts["quantisation"] else ""
    lacks = f"; {facts['scan_lacks']}" if facts["scan_lacks"] else ""
    return [
        facts["model"] + (f", commit {facts['revision']}" if facts["revision"] else ""),
        f"  family       {facts['family']} ({facts['layout']} layout){router}, scoring {facts['scoring']}, "
        f"activation {facts['activation'] or 'not stated'}",
        f"  MoE layers   {len(facts['moe_layers'])} of {facts['layers'] or 'an unknown number of'} layers",
        f"  experts      {facts['experts']} per layer, top {facts['top_k'] or 'not stated'}, "
        f"d_model {facts['d_model']}, d_ff {facts['d_ff']}{shared}",
        f"  parameters   {', '.join(counts)}",
        f"  on disk      {short(facts['bytes'], SIZES)} in {facts['files']} "
        f"file{'s' * (facts['files'] != 1)}, {dtypes}{quantised}",
        f"  coverage     {facts['coverage_line']}",
        f"  gate scan    about {duration(estimate['seconds'])} on this processor, "
        f"{short(estimate['memory_bytes'], SIZES)} of memory, "
        f"{short(estimate['read_bytes'], SIZES)} read{lacks}",
    ]


COUNTS = (("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1))
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def short(count: float, units: tuple[tuple[str, float], ...] = COUNTS) -> str:
    """Return the number with 3 digits, in the largest unit below it."""
    unit, each = next((one for one in units if count >= one[1]), units[-1])
    return f"{count / each:.3g} {unit}".strip()


# --- how long the analysis of a layer takes on this machine, from a trial of a fraction of a second

TRIAL_FLOPS = 5e8  # per expert: smaller matrices would run at another speed than those of a model
MOST_ROWS = 4096  # of anything in a trial, so that a damaged header cannot ask for much
PAIRED = 12  # experts of which all pairs are compared
TESTED = 128  # experts of the permutation test
START = 2.5  # seconds: imports, headers, joining the tables
LAYER = 0.3  # seconds: tables of one layer


def decomposition_flops(d_ff: int, d_model: int) -> float:
    """Gram matrix D F min(D, F), tridiagonal form 4/3 min(D, F)^3."""
    small = min(d_ff, d_model)
    return float(d_ff) * d_model * small + 4 / 3 * float(small) ** 3


@dataclass(frozen=True)
class Trial:
    """Measured seconds per flop of a decomposition, pair of experts, and expert of a permutation test."""

    flop: float
    pair: float
    tested: float

    def layer_seconds(self, n_experts: int, d_ff: int, d_model: int) -> float:
        """Estimated seconds of one layer's analysis: decompositions, pairs of experts, test and tables."""
        decompositions = n_experts * decomposition_flops(d_ff, d_model) * self.flop
        return decompositions + n_experts * (n_experts - 1) / 2 * self.pair + n_experts * self.tested + LAYER


def run_trial(n_experts: int, d_ff: int, d_model: int) -> Trial:
    """Time random experts in the proportions of a layer's, as many at once as a scan takes."""
    import numpy as np
    import torch

    from moescope.spectral.alignment import AlignmentMatrix
    from moescope.spectral.decompose import LEADING_VECTORS, make_k_grid
    from moescope.spectral.pairing import pairing_test
    from moescope.spectral.parallel import count_threads, decompose_each
    from moescope.spectral.subspaces import make_subspace_grid, similarities

    generator = np.random.default_rng(0)
    shrink = min(1.0, (TRIAL_FLOPS / max(decomposition_flops(d_ff, d_model), 1.0)) ** (1 / 3))
    rows, hidden, width = (
        int(min(max(round(size * shrink), 2), MOST_ROWS)) for size in (n_experts, d_ff, d_model)
    )
    count = 2 * count_threads()
    matrices = torch.from_numpy(generator.standard_normal((hidden, width), dtype=np.float32))
    routers = torch.nn.functional.normalize(torch.from_numpy(generator.standard_normal((rows, width))))

    def decompose_some(number: int) -> None:
        experts = ((expert, matrices) for expert in range(number))
        list(
            decompose_each(
                experts, number, routers, make_k_grid(min(hidden, width)), "fast", 24, "cpu", nullcontext
            )
        )

    decompose_some(1)  # imports and bindings
    decomposing = seconds(lambda: decompose_some(count)) / count
    compared, D = min(n_experts, PAIRED), min(d_model, MOST_ROWS)
    subspaces = make_subspace_grid(n_experts, min(d_ff, D), D) or [1]
    leading = [generator.standard_normal((D, LEADING_VECTORS)) for _ in range(max(compared, 2))]
    pairs = len(leading) * (len(leading) - 1) / 2
    paired = seconds(lambda: similarities(leading, subspaces)) / pairs * d_model / D
    tested, grid = min(max(n_experts, 2), TESTED), make_k_grid(min(d_ff, d_model, MOST_ROWS))
    align_KEE = np.sort(generator.random((len(grid), tested, tested)), axis=0)
    matrix = AlignmentMatrix(grid, align_KEE, np.full(tested, max(grid)), max(d_model, max(grid)))
    testing = seconds(lambda: pairing_test(matrix)) / tested
    return Trial(decomposing / decomposition_flops(hidden, width), paired, testing)


def seconds(work: Callable[[], object]) -> float:
    """The shortest of three times, of the clock or of the processor: other programs may hold it meanwhile."""
    spent = []
    for _ in range(3):
        start, used = time.perf_counter(), time.process_time()
        work()
        spent += [time.perf_counter() - start, time.process_time() - used]
    return min(spent)


VERB = Verb("inspect", inspect, lines=lines)
