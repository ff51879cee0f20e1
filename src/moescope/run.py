"""A run folder: run.json and one parquet file per table. A run is flushed task by task, so it can resume."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from moescope.errors import BadInput, reason, unknown_name
from moescope.processor import machine
from moescope.storage import (
    REPORT,
    atomic_file,
    atomic_folder,
    check_disk,
    is_leftover,
    only_writer,
    remove,
    remove_leftovers,
    sync,
)
from moescope.tables import (
    SCHEMA_VERSION,
    Table,
    arrow_schema,
    conform,
    damaged_field,
    opened_parquet,
    read_parquet,
    shape_of,
)
from moescope.verb import Drawable, Figure, Selection, Verb
from moescope.verbs import load_verb

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from plotly.graph_objects import Figure as PlotlyFigure

Frames = dict[str, "pd.DataFrame"]
RUN_JSON = "run.json"
MOST_JSON = 10**8  # bytes
SHAPE = "fields"  # in run.json: the kinds of all other fields
STREAMED = "streamed"  # folder of what a streamed run needs to continue at the layer it had reached
OWN_FILES = (RUN_JSON, REPORT, STREAMED)  # and the tables and files of the verb
TRAIN_LOCK = ".train.lock"  # of a training with its scan and trace, which the lock of one run does not cover
OF_RESULTS = "`moescope report STUDY --results FILE` draws it, see studies/*/results.toml"
REPLACED = {  # earlier figures that are no page of another one -> what to use instead
    "ambiguity_against_confidence": "too few layers for a claim; see the tables ambiguity and routing_layers",
    "ambiguity_against_cv": "too few layers for a claim; see the tables ambiguity and routing_layers",
    "ambiguity_against_routing_entropy": "too few layers for a claim; see ambiguity and routing_layers",
    "effect_predictors_by_layer": "use effect_predictors, of all layers together",
    "expert_maps": OF_RESULTS,
    "expert_usage_histogram": "draw Bars of the table key_histogram",
    "key_map": "draw a Scatter of the table key_map",
    "largest_changes": "`moescope report RUN RUN` shows the changes between two runs",
    "quota_loads": OF_RESULTS,
    "usage_areas": OF_RESULTS,
}


class DamagedRun(BadInput):
    """A run.json that cannot be parsed; `--overwrite` may replace it."""


class OtherRun(BadInput):
    """A folder that holds a run with other arguments or of another version; `--overwrite` may replace it."""


@dataclass
class Run:
    """A run folder, to be read.

    `run.table("alignment")` is a pandas frame, `run.figure("alignment_by_k", layer=3)` a plotly Figure,
    `run.info` is run.json.
    """

    path: Path
    info: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """Open a run folder; an unfinished run and one of another schema version are errors."""
        path = Path(folder)
        if (info := read_run_json(path)) is None:
            where = "no such folder" if not path.exists() else "no run.json in it"
            raise BadInput(f"{path}: {where}; give a folder that a moescope command has written")
        run = cls(path, info)
        if info.get("schema_version") != SCHEMA_VERSION:
            command = f": {info['command']}" if info.get("command") else ""
            raise BadInput(
                f"{path}: schema version {info.get('schema_version')}, this moescope uses {SCHEMA_VERSION}; "
                f"make it again with --overwrite{command}"
            )
        if info.get("status") != "done" and not run.verb.grows:
            raise BadInput(f"{path}: this run is {info.get('status')}; give its command again to finish it")
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def verb(self) -> Verb:
        """The record of the verb that made the run."""
        try:
            return load_verb(self.info["verb"])
        except BadInput as error:
            raise BadInput(f"{self.path}: {error}") from None

    @property
    def tables(self) -> list[str]:
        return [name for name in self.verb.tables if self.files(name)]

    @property
    def parts(self) -> dict[str, Run]:
        """The runs inside this one, by the name of their folder: a training's scan and trace, for example."""
        found = {}
        for file in sorted(self.path.glob("*/run.json")):
            with suppress(BadInput):  # damaged, of another tool, or of another version: not shown
                part = Run.load(file.parent)
                if part.info.get("status") == "done" and not is_leftover(part.path):
                    found[part.name] = part
        return found

    def files(self, name: str) -> list[Path]:
        """Return the files of a table: one, or one per finished task in a run that is still growing."""
        joined = self.path / f"{name}.parquet"
        return [joined] if joined.exists() else task_files(self.path, name)

    def intact_files(self, name: str) -> list[Path]:
        """Return the files of a table; without as many rows as were written, an error before any is read."""
        files, found = self.files(name), 0
        for file in files:
            with opened_parquet(file) as opened:
                found += opened.metadata.num_rows
        written = self.info.get("rows", {}).get(name)
        if self.info.get("status") == "done" and written not in (None, found):
            lost = f"{found:,} rows, {written:,} were written"
            raise BadInput(f"{files[0]}: {lost}; run its command again with --overwrite")
        return files

    def identity(self, role: str) -> dict[str, Any]:
        """Return what tells this run, as the input of another one, from a damaged or a newer one."""
        digest = hashlib.sha256()
        for file in (file for name in self.tables for file in self.files(name)):
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        return {"role": role, "path": str(self.path.resolve()), "content": digest.hexdigest()}

    def table(self, name: str) -> pd.DataFrame:
        """Return a table as a pandas frame, keys first."""
        if name not in self.tables:
            raise unknown_name(f"table in {self.path}", name, self.tables)
        import pandas as pd

        frames = [read_parquet(str(file), self.verb.tables[name]) for file in self.intact_files(name)]
        return frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)

    def tidy(self) -> None:
        """Remove what a process left that was stopped after its run was done."""
        names = (".lock", "*.tmp", "*/*.tmp", "parts/*/*.parquet")
        left = [path for name in names for path in self.path.glob(name)]
        if self.info.get("status") == "done" and left:
            with suppress(BadInput), only_writer(self.path, self.path / ".lock", "this run", "wait"):
                remove_leftovers(self.path)
                remove_tasks(self.path, self.verb)

    def figures(self) -> dict[str, str]:
        """Return the figures that this run can draw: name -> one line on what it shows."""
        tables = self.verb.select(self, Selection())
        return {spec.name: spec.line for spec in self.verb.figures if spec.can_draw(tables)}

    def figure(self, figure: str | Drawable, **selection: Any) -> PlotlyFigure:
        """Draw a figure as a plotly Figure, of the rows selected: `run.figure("alignment_by_k", layer=3)`."""
        return self.draw(figure, **selection).to_plotly()

    def draw(self, figure: str | Drawable, **selection: Any) -> Figure:
        """Draw a figure as the report holds it, with its title and caption.

        `figure` is the name of one, or a mark: `run.draw(Lines("balance", "routing_layers", y="cv"))`.
        `quantity` selects the page of a figure with one page per column.
        """
        # also of the runs inside: a comparison draws its scans
        known = {
            name: table for run in (*self.parts.values(), self) for name, table in run.verb.tables.items()
        }
        spec = self.verb.figure(figure) if isinstance(figure, str) else figure.bound(known)
        if spec is None:
            if instead := REPLACED.get(str(figure)):
                raise BadInput(f"figure {figure} was removed; {instead}")
            raise unknown_name(f"figure of {self.path}", figure, list(self.figures()))
        if page := selection.pop("quantity", ""):
            spec = replace(cast(Any, spec), opens=page)
        columns = {column for name in spec.needs if name in known for column in known[name].columns}
        if unknown := [key for key in selection if key not in columns]:
            raise unknown_name(f"column to select by in figure {spec.name}", unknown[0], sorted(columns))
        tables = self.verb.select(self, Selection(selection))
        if not spec.can_draw(tables):
            of = ", ".join(f"{key}={value!r}" for key, value in selection.items()) or "this run"
            raise BadInput(f"{self.path}: nothing to draw in figure {spec.name} of {of}; see run.figures()")
        return spec.draw(tables)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.info['verb']}, tables: {', '.join(self.tables)})"

    def _repr_html_(self) -> str:
        """Return key numbers, findings and links, for a notebook."""
        from html import escape

        if self.verb.summary is None:
            return escape(repr(self))
        summary = self.verb.summary(self)
        numbers = "".join(
            f"<tr><th>{escape(key.name)}</th><td>{key.value:.3g} {escape(key.unit)}</td>"
            f"<td>{'' if key.chance is None else f'{key.reference} {key.chance:.3g}'}</td></tr>"
            for key in summary.key_numbers
        )
        findings = "".join(f"<li>{escape(line)}</li>" for line in summary.findings)
        report = self.path / REPORT
        link = f'<a href="{escape(str(report))}">report</a>'
        link = link if report.exists() else "no report yet: moescope.report(run)"
        tables = ", ".join(f"<code>{escape(name)}</code>" for name in self.tables)
        return (
            f"<strong>{escape(self.info['verb'])}</strong> <code>{escape(str(self.path))}</code> ({link})"
            f"<table>{numbers}</table><ul>{findings}</ul><p>Tables: {tables}</p>"
        )


def open(path: str | Path) -> Run:  # as moescope.open
    """Open a run folder.

    >>> run = moescope.open("runs/scan-mixtral-1")  # doctest: +SKIP
    >>> run.figures()  # doctest: +SKIP
    """
    return Run.load(path)


@dataclass
class RunWriter:
    """A run being written: each task is flushed to parts/ completely or not at all; `finish` joins them."""

    path: Path
    verb: Verb
    info: dict[str, Any]
    timings: dict[str, float] = field(default_factory=dict)

    def done_tasks(self) -> set[str]:
        return {task.name for task in self.path.glob("parts/*") if not is_leftover(task)}

    def flush_task(
        self,
        task: str,
        frames: Frames,
        setup: dict[str, Any],
        arrays: dict[str, NDArray[Any]] | None = None,
        files: dict[str, Path] | None = None,
    ) -> None:
        """Write one task's tables and its setup record under parts/<task>, atomically.

        `arrays` are stored with them for later tasks; `files` (name -> where it was written) are moved in.
        """
        import numpy as np

        with atomic_folder(self.path / "parts" / task) as partial:
            for name, frame in frames.items():
                write_table(self.verb.tables[name], frame, partial / f"{name}.parquet")
            for name, array in (arrays or {}).items():
                check_disk(partial, array.nbytes)
                with atomic_file(partial / f"{name}.npy") as path, path.open("wb") as stream:
                    np.save(stream, array)
            for name, file in (files or {}).items():
                sync(file)
                file.replace(partial / name)
            write_json(partial / "setup.json", setup)

    def remove_joined(self) -> None:
        """Remove joined tables of a run that is not done: a killed or failed attempt left them."""
        for name in self.verb.tables:
            remove(self.path / f"{name}.parquet", self.path)

    def remove_tasks(self, tasks: Iterable[str]) -> None:
        for task in tasks:
            remove(self.path / "parts" / task, self.path)

    def has(self, name: str) -> bool:
        """Return whether some task has rows of that table."""
        return bool(task_files(self.path, name))

    def joined(self, name: str) -> pd.DataFrame:
        """Return one table, joined from all tasks flushed so far."""
        import pandas as pd

        return pd.concat([read_parquet(str(file)) for file in task_files(self.path, name)], ignore_index=True)

    def join_streamed(self, name: str) -> None:
        """Join a table that is too large for memory, one row group at a time."""
        import pyarrow.parquet as pq

        with (
            atomic_file(self.path / f"{name}.parquet") as partial,
            pq.ParquetWriter(partial, arrow_schema(self.verb.tables[name]), compression="zstd") as writer,
        ):
            for file in task_files(self.path, name):
                part = pq.ParquetFile(file.absolute())
                for group in range(part.num_row_groups):
                    rows = part.read_row_group(group)
                    check_disk(self.path, rows.nbytes)
                    writer.write_table(rows)

    def array(self, task: str, name: str) -> NDArray[Any]:
        """Return an array stored with a task, memory-mapped."""
        import numpy as np

        return np.load(self.path / "parts" / task / f"{name}.npy", mmap_mode="r")

    def setups(self) -> list[dict[str, Any]]:
        files = [self.path / "parts" / task / "setup.json" for task in sorted(self.done_tasks())]
        return [json.loads(file.read_text()) for file in files]

    def timed(self, stage: str) -> AbstractContextManager[None]:
        return timed(self.timings, stage)

    def add_timings(self, timings: dict[str, float]) -> None:
        """Add the seconds that a task took per stage, wherever it ran."""
        for stage, seconds in timings.items():
            self.timings[stage] = self.timings.get(stage, 0.0) + seconds

    def save_info(self, **changes: Any) -> None:
        self.info.update(changes)
        if changes.get("status") == "done":
            import pyarrow.parquet as pq

            files = {name: self.path.absolute() / f"{name}.parquet" for name in self.verb.tables}
            rows = {name: pq.read_metadata(file).num_rows for name, file in files.items() if file.exists()}
            self.info["rows"] = rows
        self.info["timings"] = {stage: round(seconds, 4) for stage, seconds in self.timings.items()}
        write_json(self.path / "run.json", self.info)

    def finish(self, frames: Frames) -> Run:
        """Write the joined tables, mark the run done, then delete the tasks: a crash loses nothing."""
        for name, frame in frames.items():
            table = self.verb.tables[name]
            ordered = frame.sort_values(list(table.keys), ignore_index=True)
            write_table(table, ordered, self.path / f"{name}.parquet")
        self.save_info(status="done", finished=now())
        remove_tasks(self.path, self.verb)
        return Run(self.path, jsonable(self.info))


def task_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a run's table, one per finished task that has rows of it."""
    return sorted(file for file in folder.glob(f"parts/*/{name}.parquet") if not is_leftover(file.parent))


@contextmanager
def timed(timings: dict[str, float], stage: str) -> Iterator[None]:
    """Add the seconds spent inside to those of the stage."""
    start = time.perf_counter()
    try:
        yield
    finally:
        timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start


@contextmanager
def open_run(
    folder: Path,
    verb: Verb,
    identity: dict[str, Any],
    overwrite: bool = False,
    command: str = "",
    reopen: Callable[[RunWriter], None] | None = None,
) -> Iterator[RunWriter]:
    """Open the writer of a run folder, under its lock.

    `identity` is what must be equal for an unfinished run to be resumed. `reopen` makes tasks of the joined
    tables of a finished run that is continued; only those of a finished run are complete, so they are removed
    once the run is marked running. On the way out a run that was not finished is marked interrupted or
    failed; one that failed before its first task leaves nothing behind.
    """
    created = check_folder(folder, identity, overwrite)
    with only_writer(folder, folder / ".lock", "this run", "give another --out"):
        writer = None
        try:
            remove_leftovers(folder)
            if overwrite:
                clear_run(folder, verb)
            before = None if overwrite else read_run_json(folder)
            if before is None:
                before = {
                    "schema_version": SCHEMA_VERSION,
                    "verb": verb.name,
                    **identity,
                    "command": command,
                    "versions": versions(),
                    "machine": machine(),
                    "package_commit": package_commit(),
                    "git_commit": git_commit(),
                    "started": now(),
                }
            before.pop("error", None)  # that of an earlier attempt
            writer = RunWriter(folder, verb, before, dict(before.get("timings", {})))
            if before.get("status") == "done":
                remove_tasks(folder, verb)
                if reopen is not None:
                    reopen(writer)
            writer.save_info(status="running", process=os.getpid(), tasks_resumed=len(writer.done_tasks()))
            writer.remove_joined()
            yield writer
        except BaseException as error:
            if writer is not None and writer.info.get("status") != "done":
                if created and not writer.done_tasks() and not (folder / STREAMED).exists():
                    clear_run(folder, verb)
                if created and {file.name for file in folder.iterdir()} <= {RUN_JSON, ".lock", TRAIN_LOCK}:
                    remove(folder / RUN_JSON, folder)
                else:
                    status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                    with suppress(BadInput):  # the disk may be full
                        writer.save_info(status=status, error=f"{type(error).__name__}: {error}")
            raise


def place_run(
    verb: Verb, out: str | Path | None, model_name: str, identity: dict[str, Any], overwrite: bool
) -> tuple[Path, Run | None]:
    """Return the folder of a run, and the run itself if it is already there, complete."""
    folder = Path(out) if out is not None else default_folder(verb.name, model_name, identity)
    return folder, None if overwrite else finished_run(folder, identity)


def finished_run(folder: Path, identity: dict[str, Any]) -> Run | None:
    """Return the run in the folder if it is complete and has this identity."""
    info = read_run_json(folder) or {}
    complete = info.get("status") == "done" and info.get("schema_version") == SCHEMA_VERSION
    if not complete or different_keys(info, identity):
        return None
    run = Run(folder, info)
    run.tidy()
    return run


def check_folder(folder: Path, identity: dict[str, Any], overwrite: bool) -> bool:
    """Raise an error if the folder holds something else; return whether it holds no run yet."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder}: a file is in the way; give another --out")
    files = folder.iterdir() if folder.exists() else ()
    if not any(file.name not in (".lock", TRAIN_LOCK) and not is_leftover(file) for file in files):
        return True
    try:
        info = read_run_json(folder)
    except DamagedRun:
        if overwrite:
            return True
        raise
    if info is None:
        raise BadInput(f"{folder}: not empty and not a run folder; give another --out")
    different = different_keys(info, identity)
    if not overwrite and (different or info.get("schema_version") != SCHEMA_VERSION):
        what = " and ".join(different) or "schema version"
        if different == ["arguments"]:
            old, new = info.get("arguments") or {}, jsonable(identity["arguments"])
            names = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
            what = f"arguments ({', '.join(names)})"
        raise OtherRun(
            f"{folder}: holds a run with other {what}; give another --out, or --overwrite to replace it"
        )
    return overwrite


def different_keys(info: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Return the keys in which a run differs from an identity; a copy of a checkpoint is the same one."""
    wanted = jsonable(identity)
    return [key for key in wanted if without_places(info.get(key)) != without_places(wanted[key])]


def without_places(value: Any) -> Any:
    """Return the value without where its checkpoints are, of those that are known by a hash."""
    if not isinstance(value, list):
        return value
    return [
        {key: part for key, part in item.items() if key not in ("path", "revision")}
        if isinstance(item, dict) and item.get("header_hash")
        else item
        for item in value
    ]


def remove_tasks(folder: Path, verb: Verb) -> None:
    """Remove the tasks of a finished run; of one that may be continued only their tables."""
    if not verb.continues:
        remove(folder / "parts", folder)
    for file in sorted(folder.glob("parts/*/*.parquet")):
        remove(file, folder)


def mark_unfinished(folder: Path) -> dict[str, Any] | None:
    """Make sure that nobody takes the run for a complete one while it is removed; return its run.json."""
    with suppress(DamagedRun):
        before = read_run_json(folder)
        if before and before.get("status") == "done":
            remove(folder / "parts", folder)
            write_json(folder / RUN_JSON, {**before, "status": "interrupted"})
        return before
    return None


def clear_run(folder: Path, verb: Verb) -> None:
    """Remove what moescope writes into a run folder, and nothing else; run.json stays, marked interrupted.

    A process killed meanwhile leaves a run that is complete, or one that is not done and has no tasks.
    """
    verbs = [verb]
    if before := mark_unfinished(folder):
        with suppress(BadInput):  # of an unknown verb
            verbs.append(load_verb(before["verb"]))
    remove(folder / "parts", folder)
    files = {file for of in verbs for file in (*of.files, *(f"{name}.parquet" for name in of.tables))}
    for name in sorted({*files, *OWN_FILES} - {RUN_JSON}):
        remove(folder / name, folder)
    remove_leftovers(folder)


def default_folder(verb: str, model_name: str, identity: dict[str, Any], base: Path = Path("runs")) -> Path:
    """Return runs/<verb>-<model>-<number>: the newest if it is this run, unfinished, else the next."""
    stem = f"{verb}-{re.sub(r'[^A-Za-z0-9._-]+', '_', model_name) or 'model'}-"
    endings = [path.name.removeprefix(stem) for path in base.glob(f"{stem}*")]
    number = max((int(ending) for ending in endings if ending.isdecimal()), default=0)
    with suppress(BadInput):  # damaged, or not a run: skipped
        info = read_run_json(newest := base / f"{stem}{number}")
        if info and info.get("status") != "done" and not different_keys(info, identity):
            return newest
    return base / f"{stem}{number + 1}"


def read_run_json(folder: Path) -> dict[str, Any] | None:
    path = folder / RUN_JSON
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MOST_JSON:
            raise ValueError
        info = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({reason(error)}); give another folder") from None
    except (ValueError, RecursionError):
        raise DamagedRun(f"{path}: not valid JSON; repeat the command of this run with --overwrite") from None
    if not isinstance(info, dict) or not {"verb", SHAPE} & info.keys():
        raise BadInput(f"{path}: not written by moescope; give another folder")
    if damage := damaged_field(info, info.pop(SHAPE, "any")) or damaged_field(info, {"verb": "text"}):
        raise DamagedRun(f"{path}: field {damage}; repeat the command of this run with --overwrite")
    return info


def write_table(table: Table, frame: pd.DataFrame, path: Path) -> None:
    """Write one table, atomically."""
    import pyarrow.parquet as pq

    arrow = conform(table, frame)
    check_disk(path.parent, arrow.nbytes)
    with atomic_file(path) as partial:
        pq.write_table(arrow, partial, compression="zstd")


def write_json(path: Path, value: Any) -> None:
    content = jsonable(value)
    if path.name == RUN_JSON:
        content[SHAPE] = shape_of(content)
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def jsonable(value: Any) -> Any:
    """Return the value as JSON gives it back, so that a stored and a requested value compare equal."""
    return json.loads(json.dumps(value, default=str))


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that numbers depend on."""
    installed = {"python": platform.python_version()}
    names = "moescope torch triton transformers tokenizers numpy scipy safetensors pandas pyarrow plotly ray"
    for package in names.split():
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def git_output(*words: str) -> str | None:
    """Return what git prints; None where it fails or prints nothing."""
    try:
        shown = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return shown.stdout.strip() or None if shown.returncode == 0 else None


def git_commit() -> str | None:
    """Return the commit of the working folder, if it is a git checkout."""
    return git_output("rev-parse", "HEAD")


@cache  # unlike the working folder's commit, that of the code that runs
def package_commit() -> str | None:
    """Return the last commit of this package's source, if it runs from a git checkout of it."""
    return git_output("-C", str(Path(__file__).parent), "log", "-1", "--format=%H", "--", ".")


def run_to_resume(
    folder: Path | None, verb: str, called: str, others_given: bool
) -> tuple[Path, dict[str, Any]]:
    """Return the run to resume and its run.json: that in the folder, or the newest unfinished one."""
    if others_given:
        raise BadInput(
            "--resume takes its options from the run; give --out alone, or the same command without --resume"
        )
    if folder is None:
        folders = [file.parent for file in Path("runs").glob(f"{verb}-*/run.json")]
        unfinished = [place for place in folders if (read_run_json(place) or {}).get("status") != "done"]
        if not unfinished:
            raise BadInput(f"--resume: no unfinished {called} in runs/; give its folder with --out")
        folder = max(unfinished, key=lambda place: (place / "run.json").stat().st_mtime)
    info = read_run_json(folder)
    if info is None or info["verb"] != verb:
        raise BadInput(f"{folder}: no {called} to resume there; give the folder of one with --out")
    return folder, info
