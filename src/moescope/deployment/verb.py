"""deploy: what serving a model costs, from a token-level trace; no model is run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moescope.checkpoint import open_checkpoint
from moescope.deployment.figures import FIGURES
from moescope.deployment.report import guide, sections, summary, title
from moescope.deployment.tables import TABLES
from moescope.errors import BadInput
from moescope.families import read_moe
from moescope.families.inspect import BYTES
from moescope.progress import progress
from moescope.run import Run, open_run, place_run, read_run_json
from moescope.statistics import FEWEST_DOCUMENTS
from moescope.verb import Verb

if TYPE_CHECKING:
    from moescope.deployment.placement import Cluster
    from moescope.deployment.tokens import TokenTrace
    from moescope.types import Array

Phase = Literal["prefill", "decode"]


def deploy(
    trace: str | Path | Run,
    *,
    model: str | Path | None = None,
    slots: float | str | Iterable[float] = (),
    bandwidth: float | None = None,
    gpus: int | None = None,
    nodes: int = 1,
    redundant: int = 0,
    min_tokens: int = 64,
    out: str | Path | None = None,
    expert_bytes: int | None = None,
    batch_tokens: int = 256,
    esft_share: float = 0.2,
    cold: bool = False,
    phase: Phase | None = None,
    jobs: int = 1,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Measure what serving a model costs, from a trace of its tokens.

    Replays expert caches beside Belady's optimum, measures how well a token's experts can be predicted,
    places experts on devices, and tells whether the text reached every expert. Writes placements and expert
    lists for servers and trainers. No model is run. What is learned is tested on other documents.

    Parameters
    ----------
    trace : TRACE
        Run folder that moescope trace MODEL --text FILE --save-tokens has written.
    model : MODEL
        Checkpoint whose headers give the bytes per expert.
    slots : LIST, default a sixteenth to all of the experts
        Experts per layer that a cache holds: whole numbers (8,16,32), or shares with a decimal point
        (0.25,0.5; 1.0 is all experts).
    bandwidth : GB/S > 0, < inf
        Speed of loading experts; adds milliseconds per token.
    gpus : GPUS >= 1, <= 4096, default up to 8 with two experts each
        Devices that share the experts of every layer.
    nodes : NODES >= 1, <= 4096
        Nodes that hold the devices.
    redundant : COPIES >= 0, <= 4096
        Copies of experts per layer beyond one each.
    min_tokens : TOKENS >= 1, <= 1e15
        Tokens that a calibration text should give every expert.

    Other Parameters
    ----------------
    expert_bytes : BYTES >= 1, <= 1e15
        Bytes per expert, where no model is given.
    batch_tokens : TOKENS >= 1, <= 1e9
        Tokens per batch, for the balance of single batches.
    esft_share : SHARE > 0, <= 1
        Share of choices that the experts listed for fine-tuning reach.
    cold : bool
        Empty the caches at the start of every document.
    phase : PHASE, default decode where the trace has it
        Which tokens to replay.
    jobs : JOBS >= 1, <= 1024
        Processes to compute in, for long traces; changes no number.

    Examples
    --------
    >>> run = moescope.deploy("runs/trace-MODEL-1", slots="16,32", bandwidth=7.0)  # doctest: +SKIP
    >>> run.table("residency")  # doctest: +SKIP
    """
    given = VERB.settle(locals())
    given_sizes = sizes_or_shares(slots) if slots else ()
    if model is not None and expert_bytes is not None:
        raise BadInput("--expert-bytes replaces --model; give one of them")
    if bandwidth is not None and model is None and expert_bytes is None:
        raise BadInput(
            f"--bandwidth {bandwidth:g}: give --model or --expert-bytes too, the size of an expert"
        )
    traced = trace if isinstance(trace, Run) else open_trace(trace)
    given["trace"] = traced.path
    moe = None if model is None else read_moe(open_checkpoint(model))
    identity = {
        "arguments": VERB.identity(
            given, slots=",".join(map(str, given_sizes)), model=moe and moe.checkpoint.header_hash()
        ),
        "checkpoints": traced.info.get("checkpoints", []),
        "runs": [traced.identity("trace")],
    }
    folder, done = place_run(VERB, out, traced.name.removeprefix("trace-"), identity, overwrite)
    if folder.resolve() == traced.path.resolve():
        raise BadInput(f"{folder}: the trace itself; give another --out")
    if done:
        return done
    if traced.info.get("counts_only"):
        return deploy_counts(traced, folder, identity, given)
    from moescope.deployment.placement import write_exports
    from moescope.deployment.tokens import read_tokens

    tokens = read_tokens(traced, phase)
    sizes = choose_slots(given_sizes, tokens)
    bytes_L = sizes_of_experts(tokens, moe, expert_bytes)
    cluster = choose_cluster(tokens, given)
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        tasks = table_tasks(tokens, given, sizes, bytes_L, cluster)
        waiting = [name for name in tasks if name not in writer.done_tasks()]
        with progress(len(tokens.layers) * len(tasks), 0, "layers", quiet) as advance:
            for name in waiting:
                with writer.timed(name):
                    frames = tasks[name](partial(advance, name))
                writer.flush_task(name, frames, {})
        with writer.timed("exports"):
            config = (moe.checkpoint.config or {}) if moe else {}
            hidden_layers = config.get("text_config", config).get("num_hidden_layers")
            exports = write_exports(writer.path, tokens, cluster, hidden_layers, esft_share, seed)
        notes = warnings_on(tokens)
        if moe is None and len(set(tokens.n_experts)) == 1:
            notes.append(
                f"exports for SGLang have {tokens.layers[-1] + 1} rows, up to the last MoE layer of the "
                "trace; give --model for all hidden layers"
            )
        documents, layers = tokens.n_documents, len(tokens.layers)
        facts = {"tokens": tokens.chosen_LTK.shape[1], "documents": documents, "layers": layers}
        facts |= {"k": tokens.k, "phase": tokens.phase, "step": tokens.step}
        writer.save_info(
            tokens=facts, exports=exports, warnings=notes, coverage=traced.info.get("coverage", [])
        )
        return writer.finish({name: writer.joined(name) for name in TABLES})


def deploy_counts(traced: Run, folder: Path, identity: dict[str, Any], given: dict[str, Any]) -> Run:
    """Write what a trace of counts alone can show: coverage, hot lists, experts for fine-tuning."""
    from moescope.deployment.coverage import count_tables
    from moescope.deployment.placement import esft_config, hot_lists, write_files

    with open_run(folder, VERB, identity, given["overwrite"], VERB.command(given)) as writer:
        frames, counts = count_tables(traced, given["min_tokens"], given["seed"])
        esft = esft_config(counts, given["esft_share"])
        exports = write_files(writer.path, {"hot_experts.json": hot_lists(counts), "esft_text.json": esft})
        setup = traced.info["setup"][0]["coverage"]
        facts = {"tokens": sum(setup["tokens"].values()), "documents": 1, "layers": len(counts)}
        facts |= {"k": setup["k"][0], "phase": "prefill", "step": 0}
        without = "the trace holds counts, no order of tokens: caches, prefetching and placement are skipped"
        writer.save_info(
            tokens=facts, exports=exports, warnings=[without], coverage=traced.info.get("coverage", [])
        )
        return writer.finish(frames)


def table_tasks(
    tokens: TokenTrace, given: dict[str, Any], slots: tuple[int, ...], bytes_L: Array | None, cluster: Cluster
) -> dict[str, Callable[[Callable[[int], None]], dict[str, Any]]]:
    """Return what makes each table: name -> function of a callback for progress."""
    from moescope.deployment.coverage import coverage_tables
    from moescope.deployment.placement import placement_table
    from moescope.deployment.prefetch import prefetch_table
    from moescope.deployment.residency import residency_tables
    from moescope.deployment.tokens import split_tokens

    splits = split_tokens(tokens.document_T, given["seed"])
    bandwidth, cold, jobs = given["bandwidth"], given["cold"], given["jobs"]
    return {
        "residency": lambda advance: residency_tables(
            tokens, slots, splits, bytes_L, bandwidth, cold, advance, jobs, given["seed"]
        ),
        "prefetch": lambda advance: {"prefetch": prefetch_table(tokens, splits, advance, jobs)},
        "placement": lambda advance: {
            "placement": placement_table(tokens, splits, cluster, given["seed"], advance, jobs)
        },
        "coverage": lambda advance: coverage_tables(tokens, given["min_tokens"], given["seed"], advance),
    }


# --- arguments


def open_trace(folder: str | Path) -> Run:
    """Open the run of a trace; a checkpoint and any other folder get the command that makes one."""
    path = Path(folder)
    if read_run_json(path) is not None:
        return Run.load(path)
    model, what = "MODEL", "no such folder" if not path.exists() else "no run.json in it"
    if (path / "config.json").exists():
        model, what = shlex.quote(str(folder)), "a checkpoint"
    raise BadInput(
        f"{folder}: {what}; deploy needs a trace, make it first: moescope trace {model} --text FILE "
        "--save-tokens"
    )


def sizes_or_shares(slots: float | str | Iterable[float]) -> tuple[float, ...]:
    """Return numbers of slots (int) and shares of the experts (float), given as one, a list, or in text.

    A decimal point tells a share from a number: 1.0 is all experts, 1 is one expert.
    """
    given = [slots] if isinstance(slots, int | float) else slots
    parts = given.split(",") if isinstance(given, str) else map(str, given)
    try:
        texts = dict.fromkeys(part.strip() for part in parts)
        sizes = [int(text) if text.isdecimal() else float(text) for text in texts if text]
    except ValueError:
        sizes = [0]
    if not all(size >= 1 if isinstance(size, int) else 0 < size <= 1 for size in sizes):
        raise BadInput(
            f"slots {slots!r}: give whole numbers from 1, such as 8,16, or shares of the experts with a "
            "decimal point, such as 0.5 or 1.0"
        )
    return tuple(sorted(sizes))


def choose_slots(given: tuple[float, ...], tokens: TokenTrace) -> tuple[int, ...]:
    """Return numbers of slots, shares rounded down to whole experts.

    By default a sixteenth, an eighth, a quarter and so on to all experts, those that hold a token's experts.
    """
    most, k = max(tokens.n_experts), tokens.k
    if not given:
        sizes = {most * part // 16 for part in (1, 2, 4, 6, 8, 10, 12, 14, 16)}
        return tuple(size for size in sorted(sizes) if size >= k)
    slots = sorted({size if isinstance(size, int) else int(size * most + 1e-9) for size in given})
    if slots[0] < k:
        raise BadInput(f"slots {slots[0]}: a token chooses {k} experts per layer; give at least {k}")
    if slots[-1] > most:
        raise BadInput(f"slots {slots[-1]}: a layer has {most} experts; give fewer")
    return tuple(slots)


def choose_cluster(tokens: TokenTrace, given: dict[str, Any]) -> Cluster:
    """Return the devices as given; by default the most up to 8 that hold two experts each or more, evenly."""
    from moescope.deployment.placement import Cluster, check_cluster

    nodes, redundant = given["nodes"], given["redundant"]
    counts = [n + redundant for n in tokens.n_experts]
    even = [
        number
        for number in range(1, 9)
        if not any(count % number for count in counts) and number % nodes == 0 and 2 * number <= min(counts)
    ]
    cluster = Cluster(given["gpus"] or max(even, default=nodes), nodes, redundant, given["batch_tokens"])
    check_cluster(cluster, tokens.n_experts)
    return cluster


def sizes_of_experts(tokens: TokenTrace, moe: Any, expert_bytes: int | None) -> Array | None:
    """Return bytes per expert of every layer, from the checkpoint's headers or as given."""
    import numpy as np

    if moe is None:
        return None if expert_bytes is None else np.full(len(tokens.layers), float(expert_bytes))
    sizes = []
    for layer, n in zip(tokens.layers, tokens.n_experts, strict=True):
        weights = moe.layers.get(layer)
        if weights is None or weights.n_experts != n:
            held = "no such MoE layer" if weights is None else f"{weights.n_experts} experts"
            raise BadInput(
                f"{moe.checkpoint.shown}: layer {layer} of the trace has {n} experts, the model {held}; "
                "give the model that was traced"
            )
        stacks = weights.projections.values()
        sizes.append(sum(stack.shape[1] * stack.shape[2] * BYTES.get(stack.dtype, 2) for stack in stacks))
    return np.array(sizes)


# --- what run.json says


def warnings_on(tokens: TokenTrace) -> list[str]:
    """Say what this trace cannot show."""
    notes = []
    if tokens.phase == "prefill":
        notes.append(
            "the trace holds prefill only: caches are replayed in reading order, as if the text were decoded"
        )
    if tokens.n_documents == 1:
        notes.append(
            "one document: its first half teaches and fills caches, its second is tested, no intervals"
        )
    elif tokens.n_documents < FEWEST_DOCUMENTS:
        notes.append(f"{tokens.n_documents} documents: no intervals, which need 20")
    return notes


VERB = Verb(
    "deploy",
    deploy,
    TABLES,
    FIGURES,
    summary,
    sections,
    guide=guide,
    tab="deployment",
    title=title,
    files=("exports",),
)
