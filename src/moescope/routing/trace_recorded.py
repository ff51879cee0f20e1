"""trace --recorded: a trace that another tool wrote, into the same tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import one_of
from moescope.errors import BadInput
from moescope.execution.texts import fact
from moescope.run import Run, default_folder, open_run
from moescope.weights.verb import finished_run

if TYPE_CHECKING:
    from moescope.families import MoeCheckpoint
    from moescope.routing.trace import TraceSettings

FORMATS = ("vllm", "sglang", "llamacpp", "moescope")


def trace_recorded(
    models: Sequence[str | Path],
    file: Path,
    format: str | None,
    experts: int | None,
    settings: TraceSettings,
    out: str | Path | None,
    overwrite: bool,
) -> Run:
    """The run of one imported trace.

    A model's folder, where given, tells layers, their names and k; it is not loaded.
    """
    if format is None:
        raise BadInput(f"--recorded {file}: give --format too; known: {', '.join(FORMATS)}")
    one_of("format", format, FORMATS)
    if experts is None or experts < 1:
        raise BadInput(
            f"--recorded {file}: give the experts per layer with --experts N; a trace does not tell it"
        )
    if len(models) > 1:
        raise BadInput("--recorded takes one model at most; import each trace into a run of its own")
    if not file.is_file():
        raise BadInput(f"{file}: no such file; give the trace to import")
    from moescope.checkpoint import open_checkpoint
    from moescope.families import read_moe

    moe = read_moe(open_checkpoint(models[0])) if models else None
    identity: dict[str, Any] = {
        "arguments": {"import": fact(file), "format": format, "experts": experts, "seed": settings.seed},
        "checkpoints": [checkpoint(moe)] if moe else [],
    }
    folder = (
        Path(out)
        if out is not None
        else default_folder("trace", moe.checkpoint.name if moe else file.stem, identity)
    )
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    from moescope.execution.recorded import read_trace
    from moescope.routing.compare_steps import stability_table
    from moescope.routing.import_tally import count_trace, renamed

    with open_run(folder, "trace", identity, overwrite) as writer:
        with writer.timed("trace"):
            traced = count_trace(read_trace(file, format, shape_of(moe, experts)), shape_of(moe, experts))
            if moe is not None:
                traced = renamed(traced, {number: layer.layer_name for number, layer in moe.layers.items()})
        if not traced.counts:
            raise BadInput(f"{file}: no token in it; give a trace that holds some")
        with writer.timed("tables"):
            frames = traced.tables(0, settings.seed)
            frames["stability"] = stability_table([0], [], lambda step, name: None, {})
        setup = {"step": 0, **traced.facts()}
        warnings = [*traced.warnings(), *what_is_missing(traced)]
        writer.save_info(
            device="cpu",
            setup=[setup],
            coverage=[setup["coverage"]],
            warnings=warnings,
            settings=asdict(settings),
        )
        return writer.finish(frames)


def what_is_missing(traced: Any) -> list[str]:
    absent = ["decision metrics (a trace holds no logits)"]
    absent += [] if traced.gates else ["gate weight"]
    absent += [] if traced.probe is not None else ["vocabulary"]
    return [f"not in this trace: {', '.join(absent)}"]


def checkpoint(moe: MoeCheckpoint) -> dict[str, Any]:
    return {
        "step": 0,
        "path": moe.checkpoint.address,
        "revision": moe.checkpoint.revision,
        "header_hash": moe.checkpoint.header_hash(),
    }


def shape_of(moe: MoeCheckpoint | None, experts: int) -> Any:
    """What the model tells of the trace's shape."""
    from moescope.execution.recorded import Shape

    if moe is None:
        return Shape(experts)
    known = {layer.n_experts for layer in moe.layers.values()}
    if experts not in known:
        raise BadInput(
            f"--experts {experts}: {moe.checkpoint.shown} has {', '.join(map(str, sorted(known)))}"
        )
    config = moe.checkpoint.config or {}
    text = config.get("text_config", config)
    return Shape(
        experts, text.get("num_hidden_layers"), next(iter(moe.layers.values())).top_k, tuple(moe.layers)
    )
