"""inspect: describe a checkpoint from its headers, without reading tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.source import Checkpoint
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import duration
from moescope.types import LayerWeights
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
    revision : REVISION, default main
        Branch, tag or commit of a hub id.

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
        "shared_d_ff": one_or_all([shared_width(weights) for weights in layers]),
        "dtypes": dict(Counter(info.dtype for info in checkpoint.tensors.values()).most_common()),
        "quantisation": quantisation(checkpoint),
        "bytes": checkpoint.bytes(),
        "files": len(checkpoint.file_names()),
        "parameters": count_parameters(moe),
        "coverage": asdict(moe.coverage),
        "coverage_line": moe.coverage.line(),
        "scan_estimate": scan_estimate(moe),
        "scan_lacks": moe.coverage.without_rows(),
    }


def quantisation(checkpoint: Checkpoint) -> str | None:
    """Return the quantisation schemes, the most common first; None if there are none."""
    schemes = Counter(packed.scheme for packed in checkpoint.packed.values())
    return ", ".join(scheme for scheme, _ in schemes.most_common()) or None


def one_or_all(values: list[Any]) -> Any:
    """Return the value that all layers share, or the list."""
    return values[0] if len(set(values)) == 1 else values


def shared_width(weights: LayerWeights) -> int | None:
    return weights.shared.gate_FD.shape[0] if weights.shared else None


def count_parameters(moe: MoeCheckpoint) -> dict[str, int | None]:
    """Count total, routed, shared and active parameters (per token: top_k routed experts and the rest)."""
    routed = shared = used = 0
    for weights in moe.layers.values():
        stacks = [
            stack for stack in (weights.gate_EFD, weights.up_EFD, weights.down_EDF) if stack is not None
        ]
        in_layer = sum(stack.shape[0] * stack.shape[1] * stack.shape[2] for stack in stacks)
        routed += in_layer
        used += in_layer * (weights.top_k or 0) // weights.n_experts
        if weights.shared:
            parts = (weights.shared.gate_FD, weights.shared.up_FD, weights.shared.down_DF)
            shared += sum(part.shape[0] * part.shape[1] for part in parts if part is not None)
    total = moe.coverage.parameters_total
    known = all(weights.top_k for weights in moe.layers.values())
    return {
        "total": total,
        "routed": routed,
        "shared": shared,
        "active": total - routed + used if known else None,
    }


def scan_estimate(moe: MoeCheckpoint) -> dict[str, float]:
    """Estimate time and memory of a gate scan on this machine's processor, from a short trial.

    Memory: the leading vectors of every expert, and two experts at once in fp64.
    """
    from moescope.spectral.trial import START, decomposition_flops, run_trial

    shapes = [(weights.n_experts, weights.d_ff, weights.d_model) for weights in moe.layers.values()]
    trial = run_trial(*max(shapes, key=lambda shape: shape[0] * decomposition_flops(*shape[1:])))
    seconds, read, largest = START, 0.0, 0
    for weights, (n_experts, d_ff, d_model) in zip(moe.layers.values(), shapes, strict=True):
        small, each = min(d_model, d_ff), d_model * d_ff
        seconds += trial.layer_seconds(n_experts, d_ff, d_model)
        read += n_experts * each * BYTES.get(weights.gate_EFD.dtype, 2)
        vectors = n_experts * d_model * 64 * 8
        largest = max(largest, vectors + 8 * (3 * each + 2 * small**2))
    return {
        "seconds": round(seconds + read / READ_BYTES, 1),
        "memory_bytes": largest,
        "read_bytes": int(read),
    }


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
    files = "file" if facts["files"] == 1 else "files"
    lacks = f"; {facts['scan_lacks']}" if facts["scan_lacks"] else ""
    return [
        facts["model"] + (f", commit {facts['revision']}" if facts["revision"] else ""),
        f"  family       {facts['family']} ({facts['layout']} layout){router}, scoring {facts['scoring']}, "
        f"activation {facts['activation'] or 'not stated'}",
        f"  MoE layers   {len(facts['moe_layers'])} of {facts['layers'] or 'an unknown number of'} layers",
        f"  experts      {facts['experts']} per layer, top {facts['top_k'] or 'not stated'}, "
        f"d_model {facts['d_model']}, d_ff {facts['d_ff']}{shared}",
        f"  parameters   {', '.join(counts)}",
        f"  on disk      {size(facts['bytes'])} in {facts['files']} {files}, {dtypes}{quantised}",
        f"  coverage     {facts['coverage_line']}",
        f"  gate scan    about {duration(estimate['seconds'])} on this processor, "
        f"{size(estimate['memory_bytes'])} of memory, {size(estimate['read_bytes'])} read{lacks}",
    ]


def short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def size(count: float) -> str:
    for unit, bytes_each in (("GB", 1e9), ("MB", 1e6)):
        if count >= bytes_each:
            return f"{count / bytes_each:,.3g} {unit}"
    return f"{count / 1e3:,.3g} kB"


VERB = Verb("inspect", inspect, lines=lines)
