"""scan: what the weights of a checkpoint say, layer by layer, into a run folder."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput, unknown_name
from moescope.families import MoeCheckpoint, read_moe
from moescope.run import Run, RunWriter, default_folder, open_run
from moescope.spectral.ambiguity import ambiguity_ranking, check_settings
from moescope.spectral.decompose import TOLERANCE
from moescope.spectral.layer import ScanSettings, analyse_layer
from moescope.spectral.pairing import benjamini_hochberg
from moescope.spectral.readings import MATRICES, ROUTERS, check_matrix, normalised_rows, router_rows, unusable_rows
from moescope.tables import READING, SCHEMA_VERSION, TABLES
from moescope.workflows.progress import progress

if TYPE_CHECKING:
    import pandas as pd

NULLS = ("closed", "shuffle")
SCAN_TABLES = [name for name in TABLES if name != "ambiguity"]  # those a single layer can write


@dataclass(frozen=True)
class Step:
    """One checkpoint of the run, and the number its rows carry."""

    number: int
    moe: MoeCheckpoint
    layers: list[int]


def scan(
    *models: str | Path,
    out: str | Path | None = None,
    layers: str | Iterable[int] | None = None,
    matrix: str | Iterable[str] = "gate",
    router: str | Iterable[str] = "raw",
    k: str | Iterable[int] = (),
    fold_norm: bool = False,
    precision: str = "fast",
    null: str = "closed",
    n_shuffles: int = 200,
    seed: int = 0,
    k_star: str | int = "max_margin",
    allow_full_rank: bool = False,
    ambiguity_weights: Sequence[float] = (0.4, 0.3, 0.3),
    device: str = "auto",
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
        ambiguity_weights=tuple(ambiguity_weights),  # type: ignore[arg-type]  # its length is checked on the next line
    )
    check_settings(settings.k_star, settings.ambiguity_weights)
    if n_shuffles < 1:
        raise BadInput(f"n_shuffles {n_shuffles} must be at least 1")
    steps = open_steps(models, layers)
    place = choose_device(device)  # after the headers: a mistyped path should not wait for torch
    check_layers(steps, settings, keep_going)

    identity = {
        "arguments": {"layers": None if layers is None else [step.layers for step in steps], **asdict(settings)},
        "checkpoints": [
            {
                "step": step.number,
                "path": str(step.moe.checkpoint.path.resolve()),
                "revision": None,
                "header_hash": step.moe.checkpoint.header_hash(),
            }
            for step in steps
        ],
    }
    folder = Path(out) if out is not None else default_folder("scan", steps[0].moe.checkpoint.name, identity)
    if not overwrite and (done := finished_run(folder, identity)):
        return done
    with open_run(folder, "scan", identity, overwrite) as writer:
        writer.save_info(device=place, keep_going=keep_going, coverage=[asdict(step.moe.coverage) for step in steps])
        scan_layers(writer, steps, settings, place, keep_going, quiet)
        with writer.timed("join"):
            frames = {name: writer.joined(name) for name in SCAN_TABLES}
            frames["alignment_tests"]["q_value"] = q_values(frames["alignment_tests"])
            frames["ambiguity"] = rank_layers(frames["alignment_layers"], settings)
        setups = sorted(writer.setups(), key=lambda setup: (setup["step"], setup["layer"]))
        warnings = [*unused_ks(setups, settings), *undefined_ambiguity(frames["ambiguity"])]
        warnings += [warning for setup in setups for warning in setup.pop("warnings")]
        fallbacks = sum(of["fallbacks"] for setup in setups for of in setup["matrices"].values())
        writer.save_info(setup=setups, warnings=warnings, fallbacks=fallbacks)
        return writer.finish(frames)


def scan_layers(
    writer: RunWriter, steps: list[Step], settings: ScanSettings, device: str, keep_going: bool, quiet: bool
) -> None:
    """Analyse every layer that no earlier attempt finished; each is on disk before the next begins."""
    import time

    finished = writer.done_pieces()
    work = [(step, layer, f"step{step.number}-layer{layer}") for step in steps for layer in step.layers]
    per_layer = {piece: step.moe.layers[layer].n_experts * len(settings.matrix) for step, layer, piece in work}
    done = sum(count for piece, count in per_layer.items() if piece in finished)
    with progress(sum(per_layer.values()), done, "experts", quiet) as advance:
        for step, layer, piece in work:
            if piece in finished:
                continue
            label = f"layer {layer}" + (f", step {step.number}" if len(steps) > 1 else "")
            start = time.perf_counter()
            result = analyse_layer(
                step.moe.layers[layer], settings, device, keep_going, writer.timed, functools.partial(advance, label)
            )
            for frame in result.frames.values():
                frame.insert(0, "step", step.number)
            step.moe.checkpoint.release()
            seconds = round(time.perf_counter() - start, 4)
            with writer.timed("write"):
                setup = {"step": step.number, **result.setup, "seconds": seconds, "warnings": result.warnings}
                writer.flush_piece(piece, result.frames, setup)
                writer.save_info()


def rank_layers(layers: pd.DataFrame, settings: ScanSettings) -> pd.DataFrame:
    """The ambiguity table: layers ranked within each step, matrix and router reading."""
    import pandas as pd

    ranked = []
    for keys, rows in layers.groupby(["step", *READING], sort=True):
        ranking = ambiguity_ranking(rows, settings.k_star, settings.allow_full_rank, settings.ambiguity_weights)
        ranked.append(ranking.assign(**dict(zip(["step", *READING], keys, strict=True))))
    return pd.concat(ranked, ignore_index=True)


def q_values(tests: pd.DataFrame) -> pd.Series:
    """Benjamini-Hochberg over the layers of one step, matrix and router reading."""
    return tests.groupby(["step", *READING])["p_value"].transform(lambda p: benjamini_hochberg(p.to_numpy()))


def unused_ks(setups: list[dict[str, Any]], settings: ScanSettings) -> list[str]:
    largest = max(max(of["k"]) for setup in setups for of in setup["matrices"].values())
    beyond = [k for k in settings.k if k > largest]
    return [f"k = {', '.join(map(str, beyond))} left out: no matrix has a rank above {largest}"] if beyond else []


def undefined_ambiguity(ambiguity: pd.DataFrame) -> list[str]:
    if ambiguity["ambiguity_score"].notna().any():
        return []
    return ["ambiguity_score is undefined: it compares layers, and there is one only, or all have equal margin or z"]


# --- reading the arguments


def open_steps(models: Sequence[str | Path], layers: str | Iterable[int] | None) -> list[Step]:
    if not models:
        raise BadInput("no model given; give a checkpoint's folder or .safetensors file")
    opened = [read_moe(open_checkpoint(model)) for model in models]
    steps = [
        Step(number, moe, choose_layers(layers, moe)) for number, moe in zip(step_numbers(opened), opened, strict=True)
    ]
    for step in steps[1:]:
        if step.layers != steps[0].layers:
            raise BadInput(
                f"{step.moe.checkpoint.path}: other MoE layers than {steps[0].moe.checkpoint.path}; scan them apart"
            )
    return steps


def step_numbers(opened: list[MoeCheckpoint]) -> list[int]:
    """The training steps that the folders' names end in (checkpoint-500, step1000), if all do and rise; else 0, 1, 2, ..."""
    endings = [re.search(r"(\d+)$", moe.checkpoint.name) for moe in opened]
    found = [int(ending[1]) for ending in endings if ending]
    rising = len(found) == len(opened) and all(a < b for a, b in itertools.pairwise(found))
    return found if rising and len(opened) > 1 else list(range(len(opened)))


def choose_layers(layers: str | Iterable[int] | None, moe: MoeCheckpoint) -> list[int]:
    known = list(moe.layers)
    if layers is None:
        return known
    wanted = sorted(set(number_ranges(layers)))
    absent = [layer for layer in wanted if layer not in moe.layers]
    if absent or not wanted:
        raise BadInput(f"{moe.checkpoint.path}: no MoE layer {', '.join(map(str, absent))}; it has {ranges(known)}")
    return wanted


def check_layers(steps: list[Step], settings: ScanSettings, keep_going: bool) -> None:
    """Look for matrices not there and at every router before any long work: a bad one should not be found an hour in."""
    for step in steps:
        for layer in step.layers:
            weights = step.moe.layers[layer]
            for matrix in settings.matrix:
                check_matrix(weights, matrix)
            rows = router_rows(weights, settings.fold_norm)
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


def choose_device(device: str) -> str:
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise unknown_name("device", device, ["auto", "cpu", "cuda", "cuda:0"])
    if not torch.cuda.is_available():
        raise BadInput(f"device {device}: no CUDA device here; use --device cpu")
    if ":" in device and int(device.split(":")[1]) >= torch.cuda.device_count():
        raise BadInput(f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def one_of(kind: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise unknown_name(kind, value, list(known))
    return value


def names(kind: str, value: str | Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    given = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    chosen = tuple(dict.fromkeys(one_of(kind, part, known) for part in given))
    if not chosen:
        raise BadInput(f"no {kind} given; known: {', '.join(known)}")
    return chosen


def numbers(kind: str, value: str | Iterable[int]) -> tuple[int, ...]:
    try:
        given = (
            [int(part) for part in value.split(",") if part.strip()]
            if isinstance(value, str)
            else [int(part) for part in value]
        )
    except ValueError:
        raise BadInput(f"{kind} {value!r}: give whole numbers parted by commas, such as 1,2,4") from None
    if any(number < 1 for number in given):
        raise BadInput(f"{kind} {value!r}: numbers must be at least 1")
    return tuple(sorted(set(given)))


def number_ranges(value: str | Iterable[int]) -> list[int]:
    if not isinstance(value, str):
        return [int(part) for part in value]
    found: list[int] = []
    for part in value.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or (match[2] and not 0 <= int(match[2]) - int(match[1]) < 100_000):
            raise BadInput(f"layers {value!r}: cannot read {part.strip()!r}; write them as 0,5,9-12")
        found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def ranges(values: list[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
