"""compare: what changed between two checkpoints of one architecture, or in the routing of one text."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moescope.arguments import choose_device, device_warnings, names, ranges
from moescope.checkpoint import open_checkpoint
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
from moescope.comparison.tables import AGREEMENT, OF_PAIRS, TABLES
from moescope.engine import open_engine
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter, open_run, place_run
from moescope.verb import Verb, canonical
from moescope.weights.verb import choose_layers, scan

if TYPE_CHECKING:
    import pandas as pd

MATRICES = ("gate", "up", "down", "router")
SKIPPABLE = ("sv", "scan")
NAME_LENGTH = 18  # letters of each checkpoint in the name of their comparison
MatchBy = Literal["signed", "unsigned", "held_out"]
SUFFIX = {"signed": "_permuted", "unsigned": "_permuted_unsigned", "held_out": "_held_out"}
Pair = tuple[MoeCheckpoint, MoeCheckpoint]
OF_CHECKPOINTS = ("layers", "matrix", "series", "matched", "match_by", "skip")  # options


@dataclass(frozen=True)
class CompareSettings:
    """The options that change a number."""

    matrix: tuple[str, ...]
    series: str
    matched: bool
    match_by: str
    skip: tuple[str, ...]
    seed: int


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
    """Compare two checkpoints of one architecture expert by expert, or two traces of one text token by token.

    Checkpoints: distances, singular vectors, router drift, change in alignment and ambiguity. Two traces with
    --save-tokens: the agreement of their experts. The same command resumes an interrupted comparison.

    Parameters
    ----------
    a : A
        Checkpoint (folder, file, hub id or URL), or the run folder of a trace.
    b : B
        Checkpoint of the same architecture, or a trace of the same text.
    matrix : NAMES, default all
        What to compare: gate, up, down, router.
    matched : bool
        Add a series in which B's neurons are first permuted and flipped to fit A's.
    skip : NAMES
        Skip what takes longest: sv (SV alignment), scan (change in alignment and ambiguity).
    series : NAME, default A_to_B
        Name of the comparison in tables and figures; by default from the checkpoints' names.

    Other Parameters
    ----------------
    match_by : HOW
        For --matched: order and signs, order alone, or by gate and up with down held out.

    Examples
    --------
    >>> moescope.compare("base-model", "tuned-model", matched=True)  # doctest: +SKIP
    """
    given = VERB.settle(locals())
    from moescope.geometry.pairs import expert_changes, series_means

    matrix = names("matrix", matrix, MATRICES)
    if isinstance(a, Run) or isinstance(b, Run) or is_run(a) or is_run(b):
        return compare_traces(a, b, {**given, "matrix": matrix})
    if series is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", series):
        raise BadInput(f"series {series!r}: give at most 40 letters, digits, points, dashes or underscores")
    if match_by != "signed" and not matched:
        raise BadInput(f"match_by {match_by}: says how neurons are matched; give --matched with it")
    opened = read_moe(open_checkpoint(a)), read_moe(open_checkpoint(b))
    check_same_architecture(*opened)
    chosen = choose_layers(layers, opened[0])
    settings = CompareSettings(
        matrix=available_matrices(opened, chosen, matrix),
        series=series or default_series(*opened),
        matched=matched,
        match_by=match_by,
        skip=names("skip", skip, SKIPPABLE) if skip else (),
        seed=seed,
    )
    warnings, place = device_warnings(device), choose_device(device)
    named = None if layers is None else chosen
    identity = {
        "arguments": {"of": "checkpoints", **VERB.identity(given, layers=named, **asdict(settings))},
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
        compare_layers(writer, opened, chosen, settings, place, quiet)
        warnings += scan_both(writer, (a, b), opened, chosen, settings, place, overwrite, quiet)
        with writer.timed("join"):
            geometry, of_layers = (writer.joined(name) for name in OF_PAIRS)
            frames = {"geometry": geometry, "geometry_layers": of_layers}
            frames |= {"geometry_series": series_means(geometry, of_layers)}
            frames |= {"expert_changes": expert_changes(geometry)}
        setups = sorted(writer.setups(), key=lambda setup: setup["layer"])
        writer.save_info(warnings=warnings + [warning for setup in setups for warning in setup["warnings"]])
        return writer.finish(frames)


# --- two checkpoints


def compare_layers(
    writer: RunWriter, opened: Pair, layers: list[int], settings: CompareSettings, device: str, quiet: bool
) -> None:
    """Compare every layer that no earlier attempt finished, and write each as soon as it is done."""
    finished = writer.done_tasks()
    remaining = [layer for layer in layers if f"layer{layer}" not in finished]
    experts = {layer: opened[0].layers[layer].n_experts for layer in layers}
    done = sum(count for layer, count in experts.items() if layer not in remaining)
    with (
        progress(sum(experts.values()), done, "experts", quiet) as advance,
        open_engine("local", None, device) as workers,
    ):
        work = partial(compare_layer, opened, settings, device)
        compared = workers.run(work, remaining, lambda layer: advance(f"layer {layer}"))
        for layer, (frames, seconds, warnings) in compared:
            writer.add_timings({"compare": seconds})
            with writer.timed("write"):
                setup = {"layer": layer, "seconds": seconds, "warnings": warnings}
                writer.flush_task(f"layer{layer}", frames, setup)
                writer.save_info()


def compare_layer(
    opened: Pair, settings: CompareSettings, device: str, layer: int, tick: Callable[[], None]
) -> tuple[dict[str, pd.DataFrame], float, list[str]]:
    """One layer's distances, expert by expert and router row by row; the seconds they took; and warnings."""
    import pandas as pd

    from moescope.geometry.pairs import layer_geometry, router_drift

    start = time.perf_counter()
    a, b = (moe.layers[layer] for moe in opened)
    projections = [name for name in settings.matrix if name != "router"]
    parts = []
    try:
        if projections:
            matched = {settings.series + SUFFIX[settings.match_by]: settings.match_by}
            series = {settings.series: "none", **(matched if settings.matched else {})}
            pairs, sv = [(expert, expert) for expert in range(a.n_experts)], "sv" not in settings.skip
            parts.append(layer_geometry(a, b, pairs, series, projections, sv, device, settings.seed, tick))
        if "router" in settings.matrix:
            parts.append(router_drift(a, b, settings.series, settings.seed))
    finally:
        for moe in opened:
            moe.checkpoint.release()
    frames = {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in OF_PAIRS}
    zero = frames["geometry"][frames["geometry"]["relative_l2"].isna()]
    warnings = [
        f"layer {row.layer}, expert {row.expert_a}, {row.matrix}: all zeros in one checkpoint, no distance"
        for row in zero.itertuples()
    ]
    return frames, round(time.perf_counter() - start, 4), warnings


def scan_both(
    writer: RunWriter,
    models: tuple[str | Path, str | Path],
    opened: Pair,
    layers: list[int],
    settings: CompareSettings,
    device: str,
    overwrite: bool,
    quiet: bool,
) -> list[str]:
    """Scan both checkpoints into the run folder, for the change in alignment and ambiguity: any warnings."""
    if (rowless := find_rowless(opened)) is not None:
        return [
            "router drift and the change in alignment and ambiguity are skipped: "
            f"router {rowless.coverage.rowless_router} has no row per expert"
        ]
    if "scan" in settings.skip:
        return []
    with writer.timed("scan"):
        try:
            for role, model, moe in zip("ab", models, opened, strict=True):
                # the commit that was compared, not what its revision may name by now
                commit = moe.checkpoint.revision
                scan(
                    f"{moe.checkpoint.address}@{commit}" if commit else model,
                    out=writer.path / f"scan-{role}",
                    layers=layers,
                    matrix=next((name for name in settings.matrix if name != "router"), "gate"),
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


# --- two traces


def compare_traces(a: str | Path | Run, b: str | Path | Run, given: dict[str, Any]) -> Run:
    """Compare two traces of one text token by token; any other pair of runs is for a report of both."""
    from moescope.comparison.agreement import agreement_table

    for place in (a, b):
        if not is_run(place):
            raise BadInput(
                f"{place}: not a run folder, but the other is one; give two checkpoints or two traces"
            )
    runs = [place if isinstance(place, Run) else Run.load(place) for place in (a, b)]
    if any(run.info["verb"] != "trace" or "tokens" not in run.tables for run in runs):
        raise BadInput(
            "compare takes two checkpoints, or two traces with --save-tokens; to see two runs side by side: "
            + shlex.join(["moescope", "report", *(str(run.path) for run in runs)])
        )
    for option in (option for option in VERB.options if option.name in OF_CHECKPOINTS):
        if canonical(given[option.name]) not in (canonical(option.default), ""):
            raise BadInput(f"{option.flag} applies to checkpoints; omit it when comparing traces")
    given |= {"a": runs[0].path, "b": runs[1].path}
    roles, overwrite = list(zip("ab", runs, strict=True)), given["overwrite"]
    identity = {
        "arguments": {"of": "traces", "seed": given["seed"]},
        "checkpoints": [
            {"role": role, **item} for role, run in roles for item in run.info.get("checkpoints", [])
        ],
        "runs": [run.identity(role) for role, run in roles],
    }
    folder, done = place_run(VERB, given["out"], runs[0].name, identity, overwrite)
    if folder.resolve() in [run.path.resolve() for run in runs]:
        raise BadInput(f"{folder}: one of the traces to compare; give another --out")
    if done:
        return done
    with open_run(folder, VERB, identity, overwrite, VERB.command(given)) as writer:
        with writer.timed("agreement"):
            agreement, warnings = agreement_table(runs, given["seed"])
        writer.save_info(warnings=warnings)
        return writer.finish({"agreement": agreement})


# --- arguments


def is_run(place: str | Path | Run) -> bool:
    return isinstance(place, Run) or (Path(place) / "run.json").is_file()


def default_series(a: MoeCheckpoint, b: MoeCheckpoint) -> str:
    """Return "base_to_tuned", from the checkpoints' names; of equal names from the folders they are in."""
    sources = (a.checkpoint, b.checkpoint)
    for pair in ([each.name for each in sources], [Path(each.address).parent.name for each in sources]):
        short = [re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_.-")[:NAME_LENGTH] for name in pair]
        if short[0] != short[1] and all(short):
            return "_to_".join(short)
    return "A_to_B"


def available_matrices(opened: Pair, layers: list[int], matrix: tuple[str, ...]) -> tuple[str, ...]:
    """Return the matrices that these layers have; an error if the user named one that they lack."""
    lacking = {}
    if any(opened[0].layers[layer].up_EFD is None for layer in layers):
        lacking["up"] = f"{opened[0].checkpoint.shown}: its experts have no up matrix"
    if rowless := find_rowless(opened):
        lacking["router"] = f"{rowless.checkpoint.shown}: its router has no row per expert"
    for name, why in lacking.items():
        if matrix != MATRICES and name in matrix:
            raise BadInput(f"{why}; remove {name} from --matrix")
    return tuple(name for name in matrix if name not in lacking)


def find_rowless(opened: Pair) -> MoeCheckpoint | None:
    """Return the first checkpoint whose router has no row per expert."""
    return next((moe for moe in opened if moe.coverage.rowless_router is not None), None)


def check_same_architecture(a: MoeCheckpoint, b: MoeCheckpoint) -> None:
    """Raise an error with the first difference if experts do not correspond; layout and dtype may differ."""
    remedy = "give two checkpoints of one architecture"
    if list(a.layers) != list(b.layers):
        raise BadInput(
            f"{b.checkpoint.shown} has MoE layers {ranges(list(b.layers))}, {a.checkpoint.shown} "
            f"{ranges(list(a.layers))}; {remedy}"
        )
    for layer, weights in a.layers.items():
        other = b.layers[layer]
        for what, ours, theirs in (
            ("number of experts", weights.n_experts, other.n_experts),
            ("model width", weights.d_model, other.d_model),
            ("expert width", weights.d_ff, other.d_ff),
            ("gated experts:", *("no" if each.up_EFD is None else "yes" for each in (weights, other))),
        ):
            if ours != theirs:
                raise BadInput(
                    f"layer {layer} of {b.checkpoint.shown} has {what} {theirs}, of {a.checkpoint.shown} "
                    f"{ours}; {remedy}"
                )


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
