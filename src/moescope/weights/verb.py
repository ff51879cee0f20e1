"""scan: analyse the weights of a checkpoint, layer by layer, and write the tables to a run folder."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moescope import arguments
from moescope.checkpoint import open_checkpoint
from moescope.engine import Engine, EngineName, check_engine, open_engine
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter, open_run, place_run
from moescope.verb import Verb
from moescope.weights.figures import FIGURES
from moescope.weights.layer import LayerTask, ScanSettings, analyse_elsewhere, analyse_here, compare_layers
from moescope.weights.report import experts, guide, measures, overlay, sections, select, strips, summary
from moescope.weights.tables import TABLES
from moescope.weights.views import (
    AUTO,
    MATRICES,
    ROUTERS,
    check_matrix,
    choose_routers,
    normalised_rows,
    router_rows,
    unusable_rows,
)

if TYPE_CHECKING:
    import pandas as pd

Precision = Literal["fast", "exact"]


@dataclass(frozen=True)
class Step:
    """One checkpoint of the run, and the step number of its rows."""

    number: int
    moe: MoeCheckpoint
    layers: list[int]

    @property
    def location(self) -> str:
        """Where any process, on any machine that shares the files, finds the checkpoint."""
        checkpoint = self.moe.checkpoint
        if checkpoint.revision:
            return f"{checkpoint.address}@{checkpoint.revision}"
        return checkpoint.location if "://" in checkpoint.location else checkpoint.address


def scan(
    *models: str | Path,
    out: str | Path | None = None,
    layers: int | str | Iterable[int] | None = None,
    matrix: str | Iterable[str] = "gate",
    router: str | Iterable[str] = "auto",
    k: int | str | Iterable[int] = (),
    fold_norm: bool = False,
    device: str = "auto",
    revision: str | None = None,
    precision: Precision = "fast",
    engine: EngineName = "local",
    address: str | None = None,
    keep_going: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Measure router-expert alignment, identification of experts, redundancy and ambiguity in the weights.

    Give the same command again to resume an interrupted scan at the layer it had reached.

    Parameters
    ----------
    *models : MODEL
        Checkpoint: folder, file, hub id (owner/name, owner/name@revision) or URL. Several are the steps of
        one run.
    matrix : NAMES
        Expert matrices: gate, up, gate_up, down.
    router : NAMES
        Router rows: auto (centered and raw for a softmax router, else raw), raw (as stored), centered (minus
        their mean).
    k : NUMBERS
        Values of k in addition to the grid 1, 2, 4, ...: 3,100.
    fold_norm : bool
        Multiply the weight of the norm before the block into router and experts.

    Other Parameters
    ----------------
    precision : PRECISION
        fast allows errors of align up to 1e-6, exact 1e-9.
    keep_going : bool
        Skip experts that hold NaN, Inf or only zeros.

    Examples
    --------
    >>> run = moescope.scan("mistralai/Mixtral-8x7B-v0.1")  # doctest: +SKIP
    >>> run.table("alignment_tests")[["layer", "verdict", "p_value"]]  # doctest: +SKIP
    """
    given = VERB.settle(locals())
    matrices, ks = arguments.names("matrix", matrix, MATRICES), arguments.numbers("k", k)
    arguments.names("router", router, (*ROUTERS, AUTO))  # a mistyped name should not wait for the checkpoint
    check_engine(engine, address, device)
    steps = open_steps(models, revision, layers)
    scanned = [step.moe.layers[layer] for step in steps for layer in step.layers]
    routers, warnings_of_routers = choose_routers(router, scanned)
    settings = ScanSettings(matrices, routers, fold_norm, ks, precision, seed)
    warnings_of_device = arguments.device_warnings(device)
    if engine == "local":  # on Ray the cluster's devices count
        device = arguments.choose_device(device)  # a mistyped path should not wait for torch
    check_layers(steps, settings, keep_going)

    parsed = {"layers": None if layers is None else [step.layers for step in steps], **asdict(settings)}
    identity = {
        "arguments": VERB.identity(given, **parsed),
        "checkpoints": [
            {
                "step": step.number,
                "path": step.moe.checkpoint.address,
                "revision": step.moe.checkpoint.revision,
                "header_hash": step.moe.checkpoint.header_hash(),
            }
            for step in steps
        ],
    }
    folder, done = place_run(VERB, out, steps[0].moe.checkpoint.name, identity, overwrite)
    if done:
        return done
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        writer.save_info(keep_going=keep_going, coverage=[asdict(step.moe.coverage) for step in steps])
        scan_layers(writer, steps, settings, open_engine(engine, address, device), keep_going, quiet)
        with writer.timed("join"):
            frames = {name: writer.joined(name) for name in TABLES if writer.has(name)}
            compare_layers(frames)
        setups = sorted(writer.setups(), key=lambda setup: (setup["step"], setup["layer"]))
        warnings = setting_warnings(setups, frames["ambiguity"], settings) if "ambiguity" in frames else []
        warnings += [
            *warnings_of_routers,
            *warnings_of_device,
            *(line for setup in setups for line in setup.pop("warnings")),
        ]
        fallbacks = sum(of["fallbacks"] for setup in setups for of in setup["matrices"].values())
        writer.save_info(setup=setups, warnings=warnings, fallbacks=fallbacks)
        return writer.finish(frames)


def scan_layers(
    writer: RunWriter,
    steps: list[Step],
    settings: ScanSettings,
    engine: AbstractContextManager[Engine],
    keep_going: bool,
    quiet: bool,
) -> None:
    """Analyse every layer that no earlier attempt finished; this process writes each one as it is done."""
    opened = {step.number: step.moe for step in steps}
    hashes = {number: moe.checkpoint.header_hash() for number, moe in opened.items()}
    tasks = [
        LayerTask(step.number, layer, step.location, hashes[step.number], settings, keep_going)
        for step in steps
        for layer in step.layers
    ]
    experts = {task: opened[task.step].layers[task.layer].n_experts * len(settings.matrix) for task in tasks}
    finished = writer.done_tasks()
    remaining = [task for task in tasks if task.name not in finished]
    if not remaining:
        return
    done = sum(count for task, count in experts.items() if task.name in finished)
    with progress(sum(experts.values()), done, "experts", quiet) as advance, engine as workers:
        writer.save_info(engine=workers.name, device=workers.device)
        analyse = analyse_elsewhere if workers.remote else functools.partial(analyse_here, opened)
        work = functools.partial(analyse, workers.device)
        for task, analysed in workers.run(work, remaining, lambda task: advance(task.label(len(steps)))):
            for frame in analysed.frames.values():
                frame.insert(0, "step", task.step)
            writer.add_timings(analysed.timings)
            with writer.timed("write"):
                writer.flush_task(task.name, analysed.frames, {"step": task.step, **analysed.setup})
                writer.save_info()


def setting_warnings(
    setups: list[dict[str, Any]], ambiguity: pd.DataFrame, settings: ScanSettings
) -> list[str]:
    """Settings that could not be followed: ks beyond every rank, an undefined score."""
    warnings = []
    largest = max(max(of["k"]) for setup in setups for of in setup["matrices"].values())
    if beyond := [str(k) for k in settings.k if k > largest]:
        warnings.append(f"k = {', '.join(beyond)} skipped: no matrix has a rank above {largest}")
    undefined = ambiguity.loc[ambiguity["ambiguity_score"].isna(), ["step", "matrix", "router"]]
    views = undefined.drop_duplicates().itertuples(index=False)
    if named := [f"step {step} {matrix} {router}" for step, matrix, router in views]:
        warnings.append(
            f"ambiguity_score is undefined ({', '.join(named)}): it compares layers, and there is only one, "
            "or all have equal margin or z"
        )
    return warnings


# --- arguments


def open_steps(
    models: Sequence[str | Path], revision: str | None, layers: int | str | Iterable[int] | None
) -> list[Step]:
    """Open the checkpoints to scan; several must have one shape, since they are steps of one model."""
    if not models:
        raise BadInput("no model given; give a checkpoint's folder, file, hub id or URL")
    opened = [read_moe(open_checkpoint(model, revision)) for model in models]
    places = [(moe.checkpoint.address, moe.checkpoint.revision) for moe in opened]
    for index, moe in enumerate(opened[1:], start=1):
        if places[index] in places[:index]:
            raise BadInput(f"{moe.checkpoint.shown}: given twice; give each step once")
        if shape(moe) != shape(opened[0]):
            raise BadInput(
                f"{moe.checkpoint.shown}: another family, shape or number of experts than "
                f"{opened[0].checkpoint.shown}, so not a step of the same run; scan each alone, then "
                "`moescope report RUN RUN` compares them"
            )
    numbers = arguments.step_numbers([moe.checkpoint.name for moe in opened])
    numbered = sorted(zip(numbers, opened, strict=True), key=lambda pair: pair[0])
    return [Step(number, moe, choose_layers(layers, moe)) for number, moe in numbered]


def shape(moe: MoeCheckpoint) -> tuple[Any, ...]:
    """What all steps of one run have in common."""
    kind = moe.coverage.family, moe.coverage.rowless_router
    return *kind, tuple((number, weights.gate_EFD.shape) for number, weights in moe.layers.items())


def choose_layers(layers: int | str | Iterable[int] | None, moe: MoeCheckpoint) -> list[int]:
    known = list(moe.layers)
    wanted = known if layers is None else sorted(set(arguments.number_ranges(layers)))
    absent = ", ".join(str(layer) for layer in wanted if layer not in moe.layers)
    if absent or not wanted:
        raise BadInput(f"{moe.checkpoint.shown}: no MoE layer {absent}; it has {arguments.ranges(known)}")
    return wanted


def check_layers(steps: list[Step], settings: ScanSettings, keep_going: bool) -> None:
    """Check matrices and routers of all layers first: a bad one should not appear an hour into the scan."""
    for step in steps:
        for layer in step.layers:
            weights = step.moe.layers[layer]
            for matrix in settings.matrix:
                check_matrix(weights, matrix)
            rows = router_rows(weights, settings.fold_norm)
            if rows is None and settings.router != ("raw",):
                raise BadInput(
                    f"{weights.layer_name}: its router has no row for each expert, so none can be centered; "
                    "remove --router"
                )
            if rows is None:
                continue
            bad = unusable_rows(weights, rows)
            if bad and not keep_going:
                raise next(iter(bad.values()))
            usable = rows[[expert for expert in range(len(rows)) if expert not in bad]]
            for router in settings.router:
                normalised_rows(weights, usable, router)
        step.moe.checkpoint.release()


VERB = Verb(
    "scan",
    scan,
    TABLES,
    FIGURES,
    summary,
    sections,
    select,
    overlay=overlay,
    guide=guide,
    tab="weights",
    measures=measures,
    strips=strips,
    experts=experts,
    incidental=frozenset({"revision", "keep_going"}),
)
