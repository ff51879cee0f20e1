"""compare: what changed between two checkpoints of one architecture, or between two runs of one verb."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from moescope.arguments import choose_device, device_warnings, names, one_of, ranges
from moescope.checkpoint import open_checkpoint
from moescope.comparison.changes import table_changes
from moescope.comparison.figures import FIGURES
from moescope.comparison.report import (
    ALIGNMENT_FIGURES,
    experts,
    guide,
    measures,
    overlay,
    sections,
    select,
    summary,
    title,
)
from moescope.comparison.tables import AGREEMENT, TABLES
from moescope.engine import open_engine
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter, open_run, place_run
from moescope.types import LayerWeights
from moescope.verb import Verb, canonical
from moescope.weights.verb import choose_layers, scan

if TYPE_CHECKING:
    import pandas as pd

MATRICES = ("gate", "up", "down", "router")
SKIPPABLE = ("sv", "scan")
NAME_LENGTH = 18  # letters of each checkpoint in the name of their comparison
MatchBy = Literal["signed", "unsigned", "held_out"]
SUFFIX = {"signed": "_permuted", "unsigned": "_permuted_unsigned", "held_out": "_held_out"}
OF_CHECKPOINTS = ("layers", "matrix", "series", "matched", "match_by", "skip")  # options
# Rows without a fixed identity (tokens, ids, places in the text), and maps, whose axes have no meaning.
NOT_COMPARED = ("tokens", "token_text", "vocabulary", "contexts", "maps")


@dataclass(frozen=True)
class CompareSettings:
    """The options that change a number."""

    matrix: tuple[str, ...]
    series: str
    matched: bool
    match_by: str
    skip: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class ComparedLayer:
    """One layer's tables, the seconds they took, and warnings."""

    frames: dict[str, pd.DataFrame]
    seconds: float
    warnings: list[str]


def compare(
    a: str | Path | Run,
    b: str | Path | Run,
    *,
    out: str | Path | None = None,
    layers: int | str | Iterable[int] | None = None,
    matrix: str | Iterable[str] = MATRICES,
    matched: bool = False,
    skip: str | Iterable[str] = (),
    series: str | None = None,
    device: str = "auto",
    match_by: MatchBy = "signed",
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Compare two checkpoints of one architecture, expert by expert, or two runs of one verb, row by row.

    Checkpoints: distances, singular vectors, router drift, change in alignment and ambiguity. Two traces of
    the same text with --save-tokens: also their agreement, token by token. The same command resumes an
    interrupted comparison.

    Parameters
    ----------
    a : A
        Checkpoint (folder, file, hub id or URL), or a run folder.
    b : B
        Checkpoint of the same architecture, or a run of the same verb.
    out : DIR, default runs/compare-A-N
        Run folder to write.
    layers : LAYERS, default all
        Layers to compare: 0,5,9-12.
    matrix : NAMES, default all
        What to compare: gate, up, down, router.
    matched : bool
        Add a series in which B's neurons are first permuted and flipped to fit A's.
    skip : NAMES
        Skip what takes longest: sv (SV alignment), scan (change in alignment and ambiguity).
    series : NAME, default A_to_B
        Name of the comparison in tables and figures; by default from the checkpoints' names.
    device : DEVICE
        auto, cpu, cuda or cuda:0; mps means cpu.

    Other Parameters
    ----------------
    match_by : HOW
        For --matched: order and signs, order alone, or by gate and up with down held out.
    seed : SEED
        Seed of the bootstrap and of the random rotations.
    overwrite : bool
        Replace a run that is in the folder.
    quiet : bool
        Print nothing but errors.

    Examples
    --------
    >>> moescope.compare("base-model", "tuned-model", matched=True)  # doctest: +SKIP
    """
    given = dict(locals())
    matrix = names("matrix", matrix, MATRICES)
    if is_run(a) or is_run(b):
        return compare_runs(a, b, {**given, "matrix": matrix})
    assert not isinstance(a, Run)
    assert not isinstance(b, Run)
    settings = CompareSettings(
        matrix=matrix,
        series="" if series is None else series_name(series),
        matched=matched,
        match_by=one_of("match_by", match_by, get_args(MatchBy)),
        skip=names("skip", skip, SKIPPABLE) if skip else (),
        seed=seed,
    )
    if match_by != "signed" and not matched:
        raise BadInput(f"match_by {match_by}: says how neurons are matched; give --matched with it")
    if seed < 0:
        raise BadInput(f"seed {seed}: must be at least 0")
    opened = read_moe(open_checkpoint(a)), read_moe(open_checkpoint(b))
    check_same_architecture(*opened)
    settings = replace(settings, series=settings.series or default_series(*opened))
    chosen = choose_layers(layers, opened[0])
    settings = available_settings(opened, chosen, settings, named=matrix != MATRICES)
    warnings = device_warnings(device)
    place = choose_device(device)
    parsed = {"layers": None if layers is None else chosen, **asdict(settings)}
    identity = {
        "arguments": {"of": "checkpoints", **VERB.identity(given, **parsed)},
        "checkpoints": [
            {
                "role": role,
                "path": moe.checkpoint.address,
                "revision": moe.checkpoint.revision,
                "header_hash": moe.checkpoint.header_hash(),
            }
            for role, moe in zip("ab", opened, strict=True)
        ],
    }
    folder, done = place_run(VERB, out, opened[0].checkpoint.name, identity, overwrite)
    if done:
        return done
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        writer.save_info(coverage=[asdict(moe.coverage) for moe in opened], device=place)
        compare_layers(writer, *opened, chosen, settings, place, quiet)
        warnings += scan_both(writer, (a, b), opened, chosen, settings, place, overwrite, quiet)
        with writer.timed("join"):
            frames = {name: writer.joined(name) for name in TABLES}
        setups = sorted(writer.setups(), key=lambda setup: setup["layer"])
        warnings += [warning for setup in setups for warning in setup["warnings"]]
        writer.save_info(warnings=warnings)
        return writer.finish(frames)


# --- two checkpoints


def compare_layers(
    writer: RunWriter,
    a: MoeCheckpoint,
    b: MoeCheckpoint,
    layers: list[int],
    settings: CompareSettings,
    device: str,
    quiet: bool,
) -> None:
    """Compare every layer that no earlier attempt finished, and write each as soon as it is done."""
    finished = writer.done_tasks()
    remaining = [layer for layer in layers if f"layer{layer}" not in finished]
    experts = {layer: a.layers[layer].n_experts for layer in layers}
    done = sum(count for layer, count in experts.items() if layer not in remaining)
    with (
        progress(sum(experts.values()), done, "experts", quiet) as advance,
        open_engine("local", None, device) as workers,
    ):
        work = partial(compare_layer, a, b, settings, device)
        for layer, compared in workers.run(work, remaining, lambda layer: advance(f"layer {layer}")):
            writer.add_timings({"compare": compared.seconds})
            with writer.timed("write"):
                setup = {"layer": layer, "seconds": compared.seconds, "warnings": compared.warnings}
                writer.flush_task(f"layer{layer}", compared.frames, setup)
                writer.save_info()


def compare_layer(
    a: MoeCheckpoint,
    b: MoeCheckpoint,
    settings: CompareSettings,
    device: str,
    layer: int,
    tick: Callable[[], None],
) -> ComparedLayer:
    """Return one layer's distances, expert by expert and router row by row."""
    import pandas as pd

    from moescope.geometry.pairs import layer_geometry, router_drift

    start = time.perf_counter()
    layer_a, layer_b = a.layers[layer], b.layers[layer]
    projections = [name for name in settings.matrix if name != "router"]
    parts = []
    try:
        if projections:
            series = {settings.series: "none"}
            if settings.matched:
                series[settings.series + SUFFIX[settings.match_by]] = settings.match_by
            pairs = [(expert, expert) for expert in range(layer_a.n_experts)]
            sv = "sv" not in settings.skip
            parts.append(
                layer_geometry(layer_a, layer_b, pairs, series, projections, sv, device, settings.seed, tick)
            )
        if "router" in settings.matrix:
            parts.append(router_drift(layer_a, layer_b, settings.series, settings.seed))
    finally:
        a.checkpoint.release()
        b.checkpoint.release()
    frames = {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in TABLES}
    zero = frames["geometry"][frames["geometry"]["relative_l2"].isna()]
    warnings = [
        f"layer {row.layer}, expert {row.expert_a}, {row.matrix}: all zeros in one checkpoint, no distance"
        for row in zero.itertuples()
    ]
    return ComparedLayer(frames, round(time.perf_counter() - start, 4), warnings)


def scan_both(
    writer: RunWriter,
    models: tuple[str | Path, str | Path],
    opened: tuple[MoeCheckpoint, MoeCheckpoint],
    layers: list[int],
    settings: CompareSettings,
    device: str,
    overwrite: bool,
    quiet: bool,
) -> list[str]:
    """Scan both checkpoints into the run folder, for the change in alignment and ambiguity; return
    warnings."""
    if (rowless := find_rowless(opened)) is not None:
        router = rowless.coverage.rowless_router
        return [
            "router drift and the change in alignment and ambiguity are skipped: "
            f"router {router} has no row per expert"
        ]
    if "scan" in settings.skip:
        return []
    matrix = next((name for name in settings.matrix if name != "router"), "gate")
    with writer.timed("scan"):
        try:
            for role, model, moe in zip("ab", models, opened, strict=True):
                # the commit that was compared, not what its revision may name by now
                commit = moe.checkpoint.revision
                scan(
                    f"{moe.checkpoint.address}@{commit}" if commit else model,
                    out=writer.path / f"scan-{role}",
                    layers=layers,
                    matrix=matrix,
                    keep_going=True,
                    seed=settings.seed,
                    device=device,
                    overwrite=overwrite,
                    quiet=quiet,
                )
        except BadInput as error:
            return [f"the change in alignment and ambiguity is skipped: {error}"]
    writer.save_info(scanned=True)
    return []


# --- two runs


def compare_runs(a: str | Path | Run, b: str | Path | Run, given: dict[str, Any]) -> Run:
    """Compare two runs of one verb; the changes of every column go to run.json."""
    for place in (a, b):
        if not is_run(place):
            raise BadInput(
                f"{place}: not a run folder, but the other is one; give two checkpoints or two runs"
            )
    for option in VERB.options:
        if option.name not in OF_CHECKPOINTS:
            continue
        if canonical(given[option.name]) not in (canonical(option.default), ""):
            raise BadInput(f"{option.flag} applies to checkpoints; omit it when comparing runs")
    runs = [place if isinstance(place, Run) else Run.load(place) for place in (a, b)]
    given |= {"a": runs[0].path, "b": runs[1].path}
    paths = f"{runs[0].path} and {runs[1].path}"
    verbs = [run.info["verb"] for run in runs]
    if verbs[0] != verbs[1]:
        raise BadInput(
            f"{runs[1].path} is a run of {verbs[1]}, {runs[0].path} of {verbs[0]}; give two runs of one verb"
        )
    common = [name for name in runs[0].tables if name in runs[1].tables and name not in NOT_COMPARED]
    if not common:
        raise BadInput(f"{paths} have no table in common; give two runs of one verb")
    roles = list(zip("ab", runs, strict=True))
    identity = {
        "arguments": {"of": "runs", "verb": verbs[0]},
        "checkpoints": [
            {"role": role, **item} for role, run in roles for item in run.info.get("checkpoints", [])
        ],
        "runs": [
            {"role": role, "path": str(run.path.resolve()), "finished": run.info.get("finished")}
            for role, run in roles
        ],
    }
    overwrite = given["overwrite"]
    folder, done = place_run(VERB, given["out"], runs[0].name, identity, overwrite)
    if folder.resolve() in [run.path.resolve() for run in runs]:
        raise BadInput(f"{folder}: one of the runs to compare; give another --out")
    if done:
        return done
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        with writer.timed("compare"):
            changes = [
                change
                for name in common
                for change in table_changes(runs[0].verb.tables[name], *(run.table(name) for run in runs))
            ]
        if not any(change["rows"] for change in changes):
            raise BadInput(
                f"{paths} have no row in common: other layers, matrices or domains; give runs of the same "
                "things"
            )
        frames, warnings = {}, missing_rows(runs, changes)
        if verbs[0] == "trace" and all("tokens" in run.tables for run in runs):
            from moescope.comparison.agreement import agreement_table

            with writer.timed("agreement"):
                try:
                    frames["agreement"], more = agreement_table(runs, given["seed"])
                except BadInput as error:
                    more = [f"agreement token by token is skipped: {error}"]
            warnings += more
        writer.save_info(changes=changes, warnings=warnings)
        return writer.finish(frames)


def missing_rows(runs: list[Run], changes: list[dict[str, Any]]) -> list[str]:
    """Say which tables and rows are not part of the comparison."""
    warnings = []
    for one, other in (runs, runs[::-1]):
        if only := [name for name in one.tables if name not in other.tables]:
            warnings.append(f"only {one.path} has {', '.join(only)}")
    if skipped := [name for name in NOT_COMPARED if all(name in run.tables for run in runs)]:
        warnings.append(f"not compared row by row: {', '.join(skipped)}")
    uneven = {change["table"]: change for change in changes if change["only_a"] or change["only_b"]}
    warnings += [
        f"{name}: {change['only_a']} rows are in the first run only, {change['only_b']} in the second only"
        for name, change in uneven.items()
    ]
    return warnings


# --- arguments


def is_run(place: str | Path | Run) -> bool:
    return isinstance(place, Run) or (Path(place) / "run.json").is_file()


def default_series(a: MoeCheckpoint, b: MoeCheckpoint) -> str:
    """Return "base_to_tuned", from the checkpoints' names; of equal names from the folders they are in."""
    for pair in (
        [moe.checkpoint.name for moe in (a, b)],
        [Path(moe.checkpoint.address).parent.name for moe in (a, b)],
    ):
        short = [re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_.-")[:NAME_LENGTH] for name in pair]
        if short[0] != short[1] and all(short):
            return "_to_".join(short)
    return "A_to_B"


def series_name(series: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", series):
        raise BadInput(f"series {series!r}: give at most 40 letters, digits, points, dashes or underscores")
    return series


def available_settings(
    opened: tuple[MoeCheckpoint, MoeCheckpoint], layers: list[int], settings: CompareSettings, named: bool
) -> CompareSettings:
    """Return the settings without matrices that these layers lack; an error if the user named one."""
    lacking = {}
    if any(opened[0].layers[layer].up_EFD is None for layer in layers):
        lacking["up"] = f"{opened[0].checkpoint.shown}: its experts have no up matrix"
    if rowless := find_rowless(opened):
        lacking["router"] = f"{rowless.checkpoint.shown}: its router has no row per expert"
    for name, why in lacking.items():
        if named and name in settings.matrix:
            raise BadInput(f"{why}; remove {name} from --matrix")
    return replace(settings, matrix=tuple(name for name in settings.matrix if name not in lacking))


def find_rowless(opened: tuple[MoeCheckpoint, MoeCheckpoint]) -> MoeCheckpoint | None:
    """Return the first checkpoint whose router has no row per expert."""
    return next((moe for moe in opened if moe.coverage.rowless_router is not None), None)


def check_same_architecture(a: MoeCheckpoint, b: MoeCheckpoint) -> None:
    """Raise an error with the first difference if experts do not correspond; layout and precision may
    differ."""
    remedy = "give two checkpoints of one architecture"
    if list(a.layers) != list(b.layers):
        raise BadInput(
            f"{b.checkpoint.shown} has MoE layers {ranges(list(b.layers))}, {a.checkpoint.shown} "
            f"{ranges(list(a.layers))}; {remedy}"
        )
    for layer in a.layers:
        shape_a, shape_b = layer_shape(a.layers[layer]), layer_shape(b.layers[layer])
        for what, value in shape_a.items():
            if value != shape_b[what]:
                raise BadInput(
                    f"layer {layer} of {b.checkpoint.shown} has {what} {shape_b[what]}, of "
                    f"{a.checkpoint.shown} {value}; {remedy}"
                )


def layer_shape(layer: LayerWeights) -> dict[str, Any]:
    """What must be equal for experts to be compared."""
    return {
        "number of experts": layer.n_experts,
        "model width": layer.d_model,
        "expert width": layer.d_ff,
        "gated experts:": "yes" if layer.up_EFD is not None else "no",
    }


VERB = Verb(
    "compare",
    compare,
    tables=TABLES | AGREEMENT,
    figures=[*FIGURES, *ALIGNMENT_FIGURES],
    summary=summary,
    sections=sections,
    select=select,
    overlay=overlay,
    guide=guide,
    tab="weights",
    measures=measures,
    experts=experts,
    title=title,
)
