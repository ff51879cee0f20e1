"""The run folder of a training.

Pieces as training goes on, taken up again where a checkpoint was, joined at the end.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.errors import BadInput
from moescope.run import Run, RunWriter, jsonable, open_run, read_run_json, write_table
from moescope.tables import read_parquet
from moescope.verb import Verb

if TYPE_CHECKING:
    import pandas as pd

Rows = dict[str, list[Any]]  # of tables, by their names: rows, or whole frames
logger = logging.getLogger("moescope")
STAGES = ("gradients", "scan", "judge", "tables", "write")
LONG = ("load", "routing_layers", "coactivation")
ALWAYS = (
    "load",
    "routing_layers",
    "steps",
    "router_gradients",
    "alerts",
)  # written even when they have no row


def task_name(step: int, more: bool = False) -> str:
    """So that their order by name is that of the steps.

    `more` for what is known of a step after its tables were written.
    """
    return f"step{step:010d}" + ("-more" if more else "")


def step_of(piece: str) -> int:
    return int(piece.removeprefix("step").removesuffix("-more"))


def choose_folder(out: str | Path | None, base: Path, stem: str, step: int, overwrite: bool) -> Path:
    """Where to write: `out`, or the next free number.

    For a training that goes on from a step, the newest there is.
    """
    if out is not None:
        folder = Path(out)
        if step == 0 and not overwrite and read_run_json(folder) is not None:
            raise BadInput(
                f"{folder}: holds a run already; give another out, or overwrite=True to replace it"
            )
        return folder
    numbers = [
        int(path.name[len(stem) + 1 :])
        for path in base.glob(f"{stem}-*")
        if path.name[len(stem) + 1 :].isdigit()
    ]
    number = max(numbers, default=0)
    return base / f"{stem}-{number if step and number else number + 1}"


class TrainingRun:
    """The one writer of a training's run folder, under its lock."""

    def __init__(
        self,
        folder: Path,
        verb: Verb,
        identity: dict[str, Any],
        step: int,
        overwrite: bool,
        command: str = "",
    ):
        self.stack = ExitStack()
        self.writer: RunWriter = self.stack.enter_context(
            open_run(folder, verb, identity, overwrite, command)
        )
        self.writer.timings = {
            stage: self.writer.timings.get(stage, 0.0) for stage in (*STAGES, *self.writer.timings)
        }  # its keys stay: two threads use it
        self.state = self.take_up(step)
        self.disk = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="moescope"
        )  # a disk takes longer than a step may wait
        self.writing: Future[None] | None = None

    def take_up(self, step: int) -> dict[str, Any] | None:
        """What was known at that step.

        What an earlier attempt wrote of later steps is dropped, for they are trained again.
        """
        path, kept = self.writer.path, None
        whole = {
            name: path / f"{name}.parquet"
            for name in self.writer.verb.tables
            if (path / f"{name}.parquet").exists()
        }
        frames = {name: upto(file, step) for name, file in whole.items()}
        for piece in sorted(self.writer.done_tasks()):
            if step_of(piece) > step:
                shutil.rmtree(path / "parts" / piece)
            else:
                kept = piece
        if kept is None:
            for file in whole.values():
                file.unlink()
            return None
        setup = self.writer.setups()[-1]
        if whole:  # a finished run: its tables become the first piece again
            self.writer.flush_task(f"{kept}.joined", frames, setup)
            shutil.rmtree(path / "parts" / kept)
            (path / "parts" / f"{kept}.joined").rename(path / "parts" / kept)
            for file in whole.values():
                file.unlink()
        return dict(setup)

    def flush(
        self, step: int, rows: Rows, setup: dict[str, Any], unmade: Sequence[Callable[[], Rows]] = ()
    ) -> None:
        """Begin to write all rows gathered since the last flush, which must be on disk by now.

        `unmade` gives more of them.
        """
        self.wait()
        self.writing = self.disk.submit(self.write, step, rows, setup, unmade)

    def wait(self) -> None:
        """Until what was flushed is on disk: from then on a crash cannot take it back."""
        if self.writing is not None:
            writing, self.writing = self.writing, None
            try:
                writing.result()
            except (
                Exception
            ) as error:  # a full disk, or tables that cannot be made: no reason to end a training
                kind = "" if isinstance(error, BadInput | OSError) else f"{type(error).__name__}: "
                lost = f"tables could not be written and are lost: {kind}{error}"
                logger.warning("moescope: %s", lost)
                self.writer.info["warnings"] = sorted({*self.writer.info.get("warnings", []), lost})

    def write(
        self, step: int, rows: Rows, setup: dict[str, Any], unmade: Sequence[Callable[[], Rows]]
    ) -> None:
        import pandas as pd

        with self.writer.timed("tables"):
            for make in unmade:
                for name, more in make().items():
                    rows.setdefault(name, []).extend(more)
        frames = {}
        for name, parts in rows.items():
            plain = [part for part in parts if isinstance(part, dict)]
            made = [part for part in parts if not isinstance(part, dict)]
            frame = pd.concat([*made, pd.DataFrame(plain)] if plain else made, ignore_index=True)
            frames[name] = frame.sort_values(list(self.writer.verb.tables[name].keys), ignore_index=True)
        there = task_name(step) in self.writer.done_tasks()
        self.writer.flush_task(task_name(step, there), frames, jsonable({"step": step, **setup}))
        self.writer.save_info()

    def finish(self) -> Run:
        """Join the pieces, long tables in bounded memory.

        What later training needs of each step stays in parts/.
        """
        import pandas as pd

        self.wait()
        self.disk.shutdown()
        parts = self.writer.path / "parts"
        tables = self.writer.verb.tables
        names = [name for name in tables if name in ALWAYS or any(parts.glob(f"*/{name}.parquet"))]
        for name in names:
            if name in LONG:
                self.writer.join_streamed(name)
            else:
                empty = not any(parts.glob(f"*/{name}.parquet"))
                frame = (
                    pd.DataFrame(columns=list(tables[name].columns)) if empty else self.writer.joined(name)
                )
                write_table(tables[name], frame, self.writer.path / f"{name}.parquet")
        self.writer.save_info(status="done")
        for file in parts.glob("*/*.parquet"):
            file.unlink()
        self.stack.close()
        return Run(self.writer.path, jsonable(self.writer.info))

    def abandon(self, error: str | None = None) -> None:
        """Leave the run as it is, interrupted, or failed where there is an error to tell."""
        with suppress(
            RuntimeError
        ):  # a forgotten Monitor may be thrown away by the writing thread, which cannot wait for itself
            self.disk.shutdown()
        if self.writing is not None and self.writing.done():
            self.wait()
        with suppress(OSError):  # the folder may be gone by now
            if self.writer.info.get("status") == "running":
                self.writer.save_info(
                    **({"status": "failed", "error": error} if error else {"status": "interrupted"})
                )
        self.stack.close()


def upto(file: Path, step: int) -> pd.DataFrame:
    frame = read_parquet(str(file))
    return frame[frame["step"] <= step]
