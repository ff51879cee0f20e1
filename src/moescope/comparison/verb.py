"""compare: what changed between two checkpoints of one architecture, layer by layer, into a run folder.

Or between two runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.arguments import choose_device, device_warnings, names, one_of, ranges
from moescope.checkpoint import open_checkpoint
from moescope.engine import open_engine
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.progress import progress
from moescope.run import Run, RunWriter, default_folder, open_run
from moescope.tables import GEOMETRY_TABLES
from moescope.types import LayerWeights
from moescope.weights.verb import choose_layers, finished_run, scan

if TYPE_CHECKING:
    import pandas as pd

MATRICES = ("gate", "up", "down", "router")
SKIPPABLE = ("sv", "scan")
SERIES = "base_to_ift"
SUFFIX = {
    "signed": "_permuted",
    "unsigned": "_permuted_unsigned",
    "held_out": "_held_out",
}  # of the matched series' name
SCANS = "scans"  # folder in the run folder; a and b in it are runs of their own


@dataclass(frozen=True)
class CompareSettings:
    """What changes a run's numbers."""

    matrix: tuple[str, ...]
    series: str
    matched: bool
    match_by: str
    skip: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class ComparedLayer:
    """One layer's tables, how long they took, and what a reader must know of them."""

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
    series: str = SERIES,
    matched: bool = False,
    match_by: str = "signed",
    skip: str | Iterable[str] = (),
    device: str = "auto",
    seed: int = 0,
    overwrite: bool = False,
    quiet: bool = False,
) -> Run:
    """Compare two checkpoints of one architecture, expert by expert, or two runs of one kind, row by row;
    return the run.

    `matched` adds a second series, in which neurons of b's experts are first brought into the order and signs
    of a's; `match_by` "unsigned" leaves signs
    alone, as published charts do, "held_out" matches by gate and up, so that down is a check. `skip` leaves
    out what takes
    longest: "sv" the SV alignment, "scan" the change in alignment and ambiguity.
    """
    matrix = names("matrix", matrix, MATRICES)
    if is_run(a) or is_run(b):
        from moescope.comparison.runs import compare_runs

        given = {"layers": layers is not None, "matrix": matrix != MATRICES, "series": series != SERIES}
        given |= {"matched": matched, "match-by": match_by != "signed", "skip": bool(skip)}
        return compare_runs(a, b, out, [name for name, here in given.items() if here], overwrite)
    assert not isinstance(a, Run)
    assert not isinstance(b, Run)
    settings = CompareSettings(
        matrix=matrix,
        series=series_name(series),
        matched=matched,
        match_by=one_of("match_by", match_by, tuple(SUFFIX)),
        skip=names("skip", skip, SKIPPABLE) if skip else (),
        seed=seed,
    )
    if match_by != "signed" and not matched:
        raise BadInput(f"match_by {match_by}: says how neurons are matched; give --matched with it")
    if seed < 0:
        raise BadInput(f"seed {seed}: must be at least 0")
    opened = read_moe(open_checkpoint(a)), read_moe(open_checkpoint(b))
    check_same_architecture(*opened)
    chosen = choose_layers(layers, opened[0])
    settings = settings_for(opened, chosen, settings, named=matrix != MATRICES)
    on_device = device_warnings(device)
    place = choose_device(device)
    identity = {
        "arguments": {"of": "checkpoints", "layers": None if layers is None else chosen, **asdict(settings)},
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
    folder = Path(out) if out is not None else default_folder("compare", opened[0].checkpoint.name, identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "compare", identity, overwrite) as writer:
        writer.save_info(coverage=[asdict(moe.coverage) for moe in opened], device=place)
        compare_layers(writer, *opened, chosen, settings, place, quiet)
        warnings = [*on_device, *scan_both(writer, (a, b), opened, chosen, settings, place, overwrite, quiet)]
        with writer.timed("join"):
            frames = {name: writer.joined(name) for name in GEOMETRY_TABLES}
        setups = sorted(writer.setups(), key=lambda setup: setup["layer"])
        warnings += [warning for setup in setups for warning in setup["warnings"]]
        writer.save_info(warnings=warnings)
        return writer.finish(frames)


# --- the work


def compare_layers(
    writer: RunWriter,
    a: MoeCheckpoint,
    b: MoeCheckpoint,
    layers: list[int],
    settings: CompareSettings,
    device: str,
    quiet: bool,
) -> None:
    """Compare every layer that no earlier attempt finished; each is on disk as soon as it is done."""
    finished = writer.done_tasks()
    left = [layer for layer in layers if f"layer{layer}" not in finished]
    experts = {layer: a.layers[layer].n_experts for layer in layers}
    done = sum(count for layer, count in experts.items() if layer not in left)
    with (
        progress(sum(experts.values()), done, "experts", quiet) as advance,
        open_engine("local", None, device) as workers,
    ):
        work = partial(compare_layer, a, b, settings, device)
        for layer, compared in workers.run(work, left, lambda layer: advance(f"layer {layer}")):
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
    """One layer's distances, expert by expert and router row by row."""
    import pandas as pd

    from moescope.geometry.pairs import layer_geometry, router_drift

    start = time.perf_counter()
    of_a, of_b = a.layers[layer], b.layers[layer]
    projections = [name for name in settings.matrix if name != "router"]
    parts = []
    try:
        if projections:
            series = {settings.series: "none"}
            if settings.matched:
                series[settings.series + SUFFIX[settings.match_by]] = settings.match_by
            pairs = [(expert, expert) for expert in range(of_a.n_experts)]
            sv = "sv" not in settings.skip
            parts.append(
                layer_geometry(of_a, of_b, pairs, series, projections, sv, device, settings.seed, tick)
            )
        if "router" in settings.matrix:
            parts.append(router_drift(of_a, of_b, settings.series, settings.seed))
    finally:
        a.checkpoint.release()
        b.checkpoint.release()
    frames = {name: pd.concat([part[name] for part in parts], ignore_index=True) for name in GEOMETRY_TABLES}
    return ComparedLayer(frames, round(time.perf_counter() - start, 4), without_direction(frames["geometry"]))


def without_direction(geometry: pd.DataFrame) -> list[str]:
    """What to say of matrices that are all zeros, which have no distance."""
    zero = geometry[geometry["relative_l2"].isna()]
    return [
        (
            f"layer {row.layer}, expert {row.expert_a}, {row.matrix}: all zeros in one of the two, "
            "so it has no distance"
        )
        for row in zero.itertuples()
    ]


def scan_both(
    writer: RunWriter,
    given: tuple[str | Path, str | Path],
    opened: tuple[MoeCheckpoint, MoeCheckpoint],
    layers: list[int],
    settings: CompareSettings,
    device: str,
    overwrite: bool,
    quiet: bool,
) -> list[str]:
    """Scan both checkpoints into the run folder, for the change in alignment and ambiguity.

    What to say if that cannot be done.
    """
    if (rowless := without_rows(opened)) is not None:
        router = rowless.coverage.rowless_router
        return [
            (
                f"router drift, and the change in alignment and ambiguity, left out: router {router} "
                "has no row for each expert"
            )
        ]
    if "scan" in settings.skip:
        return []
    matrix = next((name for name in settings.matrix if name != "router"), "gate")
    with writer.timed("scan"):
        try:
            for role, model, moe in zip("ab", given, opened, strict=True):
                # the commit its revision names now, not what it may name by then
                name = (
                    f"{moe.checkpoint.address}@{moe.checkpoint.revision}"
                    if moe.checkpoint.revision
                    else model
                )
                scan(
                    name,
                    out=writer.path / SCANS / role,
                    layers=layers,
                    matrix=matrix,
                    keep_going=True,
                    seed=settings.seed,
                    device=device,
                    overwrite=overwrite,
                    quiet=quiet,
                )
        except BadInput as error:
            return [f"change in alignment and ambiguity left out: {error}"]
    writer.save_info(scanned=True)
    return []


# --- reading the arguments


def is_run(given: str | Path | Run) -> bool:
    return isinstance(given, Run) or (Path(given) / "run.json").is_file()


def series_name(series: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", series):
        raise BadInput(f"series {series!r}: give at most 40 letters, digits, points, dashes or underscores")
    return series


def settings_for(
    opened: tuple[MoeCheckpoint, MoeCheckpoint], layers: list[int], settings: CompareSettings, named: bool
) -> CompareSettings:
    """The settings without what these layers do not have; refused where the user named it."""
    lacking = {}
    if any(opened[0].layers[layer].up_EFD is None for layer in layers):
        lacking["up"] = f"{opened[0].checkpoint.shown}: its experts have no up matrix"
    if rowless := without_rows(opened):
        lacking["router"] = f"{rowless.checkpoint.shown}: its router has no row for each expert"
    for name, why in lacking.items():
        if named and name in settings.matrix:
            raise BadInput(f"{why}; leave {name} out of --matrix")
    return replace(settings, matrix=tuple(name for name in settings.matrix if name not in lacking))


def without_rows(opened: tuple[MoeCheckpoint, MoeCheckpoint]) -> MoeCheckpoint | None:
    """The first of the two whose router has no row for each expert."""
    return next((moe for moe in opened if moe.coverage.rowless_router is not None), None)


def check_same_architecture(a: MoeCheckpoint, b: MoeCheckpoint) -> None:
    """Refuse two checkpoints whose experts do not correspond, naming the first difference.

    Layout and precision may differ.
    """
    remedy = "give two checkpoints of one architecture"
    if list(a.layers) != list(b.layers):
        raise BadInput(
            f"{b.checkpoint.shown} has MoE layers {ranges(list(b.layers))}, {a.checkpoint.shown} "
            f"{ranges(list(a.layers))}; {remedy}"
        )
    for layer in a.layers:
        in_a, in_b = facts(a.layers[layer]), facts(b.layers[layer])
        for what, value in in_a.items():
            if value != in_b[what]:
                raise BadInput(
                    f"layer {layer} of {b.checkpoint.shown} has {what} {in_b[what]}, of "
                    f"{a.checkpoint.shown} {value}; {remedy}"
                )


def facts(layer: LayerWeights) -> dict[str, Any]:
    """What must be equal for experts to be compared."""
    return {
        "number of experts": layer.n_experts,
        "model width": layer.d_model,
        "expert width": layer.d_ff,
        "gated experts:": "yes" if layer.up_EFD is not None else "no",
    }
