"""scan: what the weights of a checkpoint say, layer by layer, into a run folder."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import (
    choose_device,
    device_warnings,
    names,
    number_ranges,
    numbers,
    one_of,
    ranges,
    step_numbers,
    weights,
)
from moescope.checkpoint import open_checkpoint
from moescope.engine import Engine, check_engine, open_engine
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter, default_folder, open_run
from moescope.spectral.decompose import TOLERANCE
from moescope.tables import SCAN_TABLES, SCHEMA_VERSION, VIEW
from moescope.weights.ambiguity import ambiguity_ranking, check_settings
from moescope.weights.layer import ScanSettings
from moescope.weights.task import LayerTask, analyse_elsewhere, analyse_here
from moescope.weights.views import (
    MATRICES,
    ROUTERS,
    check_matrix,
    normalised_rows,
    router_rows,
    unusable_rows,
)

if TYPE_CHECKING:
    import pandas as pd

NULLS = ("closed", "shuffle")
LAYER_TABLES = [name for name in SCAN_TABLES if name != "ambiguity"]  # those a single layer can write


@dataclass(frozen=True)
class Step:
    """One checkpoint of the run, and the number its rows carry."""

    number: int
    moe: MoeCheckpoint
    layers: list[int]

    @property
    def location(self) -> str:
        """Where any process on any machine that shares the files finds the checkpoint."""
        checkpoint = self.moe.checkpoint
        if checkpoint.revision:
            return f"{checkpoint.address}@{checkpoint.revision}"
        return checkpoint.location if "://" in checkpoint.location else checkpoint.address


def scan(
    *models: str | Path,
    out: str | Path | None = None,
    revision: str | None = None,
    layers: int | str | Iterable[int] | None = None,
    matrix: str | Iterable[str] = "gate",
    router: str | Iterable[str] = "raw",
    k: int | str | Iterable[int] = (),
    fold_norm: bool = False,
    precision: str = "fast",
    null: str = "closed",
    n_shuffles: int = 200,
    seed: int = 0,
    k_star: str | int = "max_margin",
    allow_full_rank: bool = False,
    ambiguity_weights: str | Sequence[float] = (0.4, 0.3, 0.3),
    device: str = "auto",
    engine: str = "local",
    address: str | None = None,
    keep_going: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Scan one checkpoint, or several as the steps of one run, and return the run with all its tables."""
    settings = ScanSettings(
        matrix=names("matrix", matrix, MATRICES),
        router=names("router", router, ROUTERS),
        k=numbers("k", k),
        fold_norm=fold_norm,
        precision=one_of("precision", precision, tuple(TOLERANCE)),
        null=one_of("null", null, NULLS),
        n_shuffles=n_shuffles,
        seed=seed,
        k_star=int(k_star) if str(k_star).isdecimal() else k_star,
        allow_full_rank=allow_full_rank,
        # its length is checked on the next line
        ambiguity_weights=weights(ambiguity_weights),  # type: ignore[arg-type]
    )
    check_settings(settings.k_star, settings.ambiguity_weights)
    if n_shuffles < 1 or seed < 0:
        raise BadInput(f"n_shuffles {n_shuffles} must be at least 1, seed {seed} at least 0")
    check_engine(engine, address, device)
    steps = open_steps(models, revision, layers)
    on_device = device_warnings(device)
    if engine == "local":  # on Ray the cluster's devices count, not this machine's
        device = choose_device(device)  # after the headers: a mistyped path should not wait for torch
    check_layers(steps, settings, keep_going)

    identity = {
        "arguments": {
            "layers": None if layers is None else [step.layers for step in steps],
            **asdict(settings),
        },
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
    folder = Path(out) if out is not None else default_folder("scan", steps[0].moe.checkpoint.name, identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "scan", identity, overwrite) as writer:
        writer.save_info(keep_going=keep_going, coverage=[asdict(step.moe.coverage) for step in steps])
        scan_layers(writer, steps, settings, open_engine(engine, address, device), keep_going, quiet)
        with writer.timed("join"):
            frames = {name: writer.joined(name) for name in LAYER_TABLES if writer.has(name)}
            if "alignment_tests" in frames:
                frames["alignment_tests"]["q_value"] = q_values(frames["alignment_tests"])
                frames["ambiguity"] = rank_layers(frames["alignment_layers"], settings)
        setups = sorted(writer.setups(), key=lambda setup: (setup["step"], setup["layer"]))
        warnings: list[str] = []
        if "ambiguity" in frames:
            warnings += unused_ks(setups, settings) + unreached_k_star(frames["ambiguity"], settings)
            warnings += undefined_ambiguity(frames["ambiguity"])
        warnings += on_device
        warnings += [warning for setup in setups for warning in setup.pop("warnings")]
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
    """Analyse every layer that no earlier attempt finished.

    Each is on disk as soon as it is done, written by this process alone.
    """
    hashes = {step.number: step.moe.checkpoint.header_hash() for step in steps}
    pieces = [
        LayerTask(step.number, layer, step.location, hashes[step.number], settings, keep_going)
        for step in steps
        for layer in step.layers
    ]
    opened = {step.number: step.moe for step in steps}
    experts = {
        piece: opened[piece.step].layers[piece.layer].n_experts * len(settings.matrix) for piece in pieces
    }
    finished = writer.done_tasks()
    left = [piece for piece in pieces if piece.name not in finished]
    if not left:
        return
    done = sum(count for piece, count in experts.items() if piece.name in finished)
    with progress(sum(experts.values()), done, "experts", quiet) as advance, engine as workers:
        writer.save_info(engine=workers.name, device=workers.device)
        analyse = analyse_elsewhere if workers.remote else functools.partial(analyse_here, opened)
        work = functools.partial(analyse, workers.device)
        for piece, analysed in workers.run(work, left, lambda piece: advance(piece.label(len(steps)))):
            for frame in analysed.frames.values():
                frame.insert(0, "step", piece.step)
            writer.add_timings(analysed.timings)
            with writer.timed("write"):
                setup = {
                    "step": piece.step,
                    **analysed.setup,
                    "seconds": analysed.seconds,
                    "warnings": analysed.warnings,
                }
                writer.flush_task(piece.name, analysed.frames, setup)
                writer.save_info()


def rank_layers(layers: pd.DataFrame, settings: ScanSettings) -> pd.DataFrame:
    """The ambiguity table: layers ranked within each step, matrix and router reading."""
    import pandas as pd

    ranked = []
    for keys, rows in layers.groupby(["step", *VIEW], sort=True):
        ranking = ambiguity_ranking(
            rows, settings.k_star, settings.allow_full_rank, settings.ambiguity_weights
        )
        ranked.append(ranking.assign(**dict(zip(["step", *VIEW], keys, strict=True))))
    return pd.concat(ranked, ignore_index=True)


def q_values(tests: pd.DataFrame) -> pd.Series:
    """Benjamini-Hochberg over the layers of one step, matrix and router reading."""
    from scipy.stats import false_discovery_control

    groups = tests.groupby(["step", *VIEW])["p_value"]
    return groups.transform(lambda p: false_discovery_control(p.to_numpy()))


def unused_ks(setups: list[dict[str, Any]], settings: ScanSettings) -> list[str]:
    largest = max(max(of["k"]) for setup in setups for of in setup["matrices"].values())
    beyond = [k for k in settings.k if k > largest]
    return (
        [f"k = {', '.join(map(str, beyond))} left out: no matrix has a rank above {largest}"]
        if beyond
        else []
    )


def unreached_k_star(ambiguity: pd.DataFrame, settings: ScanSettings) -> list[str]:
    others = sorted(int(k) for k in ambiguity["k_star"].dropna().unique() if k != settings.k_star)
    if settings.k_star == "max_margin" or not others:
        return []
    return [
        (
            f"k* = {settings.k_star} is not on every ladder: the largest k below it was taken, "
            f"{', '.join(map(str, others))}"
        )
    ]


def undefined_ambiguity(ambiguity: pd.DataFrame) -> list[str]:
    undefined = ambiguity[ambiguity["ambiguity_score"].isna()]
    readings = undefined[["step", "matrix", "router"]].drop_duplicates().itertuples(index=False)
    named = [f"step {step} {matrix} {router}" for step, matrix, router in readings]
    why = "it compares layers, and there is one only, or all have equal margin or z"
    return [f"ambiguity_score is undefined ({', '.join(named)}): {why}"] if named else []


# --- reading the arguments


def open_steps(
    models: Sequence[str | Path], revision: str | None, layers: int | str | Iterable[int] | None
) -> list[Step]:
    """The checkpoints to scan. Several are training steps of one model, so they must have one shape."""
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
                f"{opened[0].checkpoint.shown}, so not a step of "
                "the same run; scan each alone, then `moescope report RUN RUN` compares them"
            )
    found = zip(step_numbers([moe.checkpoint.name for moe in opened]), opened, strict=True)
    return sorted(
        (Step(number, moe, choose_layers(layers, moe)) for number, moe in found), key=lambda step: step.number
    )


def shape(moe: MoeCheckpoint) -> tuple[Any, ...]:
    """What all steps of one run have in common."""
    kind = moe.coverage.family, moe.coverage.rowless_router
    return *kind, tuple((number, weights.gate_EFD.shape) for number, weights in moe.layers.items())


def choose_layers(layers: int | str | Iterable[int] | None, moe: MoeCheckpoint) -> list[int]:
    known = list(moe.layers)
    if layers is None:
        return known
    wanted = sorted(set(number_ranges(layers)))
    absent = [layer for layer in wanted if layer not in moe.layers]
    if absent or not wanted:
        raise BadInput(
            f"{moe.checkpoint.shown}: no MoE layer {', '.join(map(str, absent))}; it has {ranges(known)}"
        )
    return wanted


def check_layers(steps: list[Step], settings: ScanSettings, keep_going: bool) -> None:
    """Look for matrices not there and at every router before any long work.

    A bad one should not be found an hour in.
    """
    for step in steps:
        for layer in step.layers:
            weights = step.moe.layers[layer]
            for matrix in settings.matrix:
                check_matrix(weights, matrix)
            rows = router_rows(weights, settings.fold_norm)
            if rows is None:
                if settings.router != ("raw",):
                    raise BadInput(
                        f"{weights.layer_name}: its router has no row for each expert, so none "
                        "can be centered; leave --router out"
                    )
                continue
            bad = unusable_rows(weights, rows)
            if bad and not keep_going:
                raise next(iter(bad.values()))
            usable = rows[[expert for expert in range(len(rows)) if expert not in bad]]
            for reading in settings.router:
                normalised_rows(weights, usable, reading)
        step.moe.checkpoint.release()


def finished_run(folder: Path, identity: dict[str, Any]) -> Run | None:
    """The run already in the folder, if it is this very work, done."""
    from moescope.run import jsonable, read_run_json

    info = read_run_json(folder)
    same_version = info is not None and info.get("schema_version") == SCHEMA_VERSION
    if (
        info
        and same_version
        and info.get("status") == "done"
        and all(info.get(key) == jsonable(identity[key]) for key in identity)
    ):
        return Run(folder, info)
    return None
