"""What the Monitor writes: its run folder, tables of a window of steps, alerts, and numbers for a tracker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.errors import BadInput
from moescope.routing.counts_to_tables import (
    Corpus,
    Row,
    coactivation_columns,
    layer_columns,
    load_rows,
    metric_rows,
    separation_rows,
)
from moescope.routing.load_balance import cv, load_entropy_share, max_over_mean, unused
from moescope.routing.metrics import DECISION
from moescope.routing.monitor_tally import Place, Window
from moescope.run import Run, RunWriter, jsonable, open_run, read_run_json, remove_tasks, write_table
from moescope.tables import read_parquet
from moescope.types import Array, Integers

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.execution.adapters import Block
    from moescope.verb import Verb

Rows = dict[str, list[Any]]  # table -> rows, or frames
Key = tuple[int, int | None, str]  # layer, expert, kind of alert
logger = logging.getLogger("moescope")
STAGES = ("gradients", "scan", "judge", "tables", "write")
LONG = ("load", "routing_layers", "coactivation")
ALWAYS = ("load", "routing_layers", "steps", "router_gradients", "alerts")  # written even without rows
ENTROPY = [metric.name for metric in DECISION].index("routing_entropy")
FEWEST_LOAD = 10  # expected tokens per expert below which loads raise no alert: some are unused by chance
DOMAIN = "train"
PERCENTILES = {
    "cv": (50, 90),
    "max_over_mean": (50, 90),
    "unused": (50, 90),
    "load_entropy_share": (10, 50),
    "routing_entropy": (10, 50),
}
PREFIX = "moescope/"

# --- the run folder


def task_name(step: int, more: bool = False) -> str:
    """Name of a step's task, in the order of steps; `more` for rows that follow its tables."""
    return f"step{step:010d}" + ("-more" if more else "")


def step_of(task: str) -> int:
    return int(task.removeprefix("step").removesuffix("-more"))


def choose_folder(out: str | Path | None, base: Path, stem: str, step: int, overwrite: bool) -> Path:
    """The run folder: `out`, or the next free number; a training resumed at `step` takes the newest."""
    if out is not None:
        folder = Path(out)
        if step == 0 and not overwrite and read_run_json(folder) is not None:
            raise BadInput(
                f"{folder}: holds a run already; give another out, or overwrite=True to replace it"
            )
        return folder
    names = [path.name[len(stem) + 1 :] for path in base.glob(f"{stem}-*")]
    number = max((int(name) for name in names if name.isdecimal()), default=0)
    return base / f"{stem}-{number if step and number else number + 1}"


def split_tables(writer: RunWriter) -> None:
    """Give the joined tables of a finished run back to its tasks: each has the rows up to its step."""
    tasks = sorted(writer.done_tasks())
    steps = [step_of(task) for task in tasks]
    for name, table in writer.verb.tables.items():
        joined = writer.path / f"{name}.parquet"
        if tasks and joined.exists():
            frame = read_parquet(str(joined))
            task_of_row = np.searchsorted(steps, frame["step"]).clip(max=len(tasks) - 1)
            for number, rows in frame.groupby(task_of_row):
                write_table(table, rows, writer.path / "parts" / tasks[number] / joined.name)


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
        opened = open_run(folder, verb, identity, overwrite, command, split_tables)
        self.writer: RunWriter = self.stack.enter_context(opened)
        stages = (*STAGES, *self.writer.timings)  # all keys now: two threads use the dictionary
        self.writer.timings = {stage: self.writer.timings.get(stage, 0.0) for stage in stages}
        self.state = self.resume(step)
        # a disk takes longer than a step may wait
        self.disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moescope")
        self.writing: Future[None] | None = None
        self.writing_thread = 0

    def resume(self, step: int) -> dict[str, Any] | None:
        """Return the state at that step; rows of later steps are deleted, because they are trained again."""
        self.writer.remove_tasks(task for task in self.writer.done_tasks() if step_of(task) > step)
        states = self.writer.setups()
        return dict(states[-1]) if states else None

    def flush(
        self, step: int, rows: Rows, setup: dict[str, Any], deferred: Sequence[Callable[[], Rows]] = ()
    ) -> None:
        """Start writing the rows since the last flush, and those that `deferred` makes."""
        self.wait()
        self.writing = self.disk.submit(self.write, step, rows, setup, deferred)

    def wait(self) -> None:
        """Wait until flushed rows are on disk, where a crash cannot lose them."""
        if self.writing is None:
            return
        writing, self.writing = self.writing, None
        try:
            writing.result()
        except Exception as error:  # a full disk, or tables that cannot be made: training must go on
            kind = "" if isinstance(error, BadInput | OSError) else f"{type(error).__name__}: "
            lost = f"tables could not be written and are lost: {kind}{error}"
            logger.warning("moescope: %s", lost)
            self.writer.info["warnings"] = sorted({*self.writer.info.get("warnings", []), lost})

    def write(
        self, step: int, rows: Rows, setup: dict[str, Any], deferred: Sequence[Callable[[], Rows]]
    ) -> None:
        import pandas as pd

        self.writing_thread = threading.get_ident()
        with self.writer.timed("tables"):
            for make in deferred:
                for name, more in make().items():
                    rows.setdefault(name, []).extend(more)
        frames = {}
        for name, parts in rows.items():
            plain = [part for part in parts if isinstance(part, dict)]
            frame_parts = [part for part in parts if not isinstance(part, dict)]
            frame = pd.concat([*frame_parts, *([pd.DataFrame(plain)] if plain else [])], ignore_index=True)
            frames[name] = frame.sort_values(list(self.writer.verb.tables[name].keys), ignore_index=True)
        task = task_name(step, more=task_name(step) in self.writer.done_tasks())
        self.writer.flush_task(task, frames, jsonable({"step": step, **setup}))
        self.writer.save_info()

    def finish(self) -> Run:
        """Join the tasks, long tables in bounded memory; their states stay in parts/ for later training."""
        import pandas as pd

        self.wait()
        self.disk.shutdown()
        for name, table in self.writer.verb.tables.items():
            if name in LONG and (name in ALWAYS or self.writer.has(name)):
                self.writer.join_streamed(name)
            elif self.writer.has(name):
                write_table(table, self.writer.joined(name), self.writer.path / f"{name}.parquet")
            elif name in ALWAYS:
                empty = pd.DataFrame(columns=list(table.columns))
                write_table(table, empty, self.writer.path / f"{name}.parquet")
        self.writer.save_info(status="done")
        remove_tasks(self.writer.path, self.writer.verb)
        self.stack.close()
        return Run(self.writer.path, jsonable(self.writer.info))

    def abandon(self, error: str | None = None) -> None:
        """Leave the run as it is: interrupted, or failed with an error."""
        # The garbage collector calls this too, in any thread. Joining the writing thread can deadlock there:
        # a thread that is being started holds the lock that join needs. So wait for the write instead.
        if self.writing is not None and threading.get_ident() != self.writing_thread:
            wait_for([self.writing])
        self.disk.shutdown(wait=False)
        if self.writing is not None and self.writing.done():
            self.wait()
        with suppress(OSError, BadInput):  # the folder may be gone, the disk full
            if self.writer.info.get("status") == "running":
                changes = {"status": "failed", "error": error} if error else {"status": "interrupted"}
                self.writer.save_info(**changes)
        self.stack.close()


# --- tables of a window of steps


def window_tables(
    window: Window,
    places: list[Place],
    routers_LED: list[Tensor | None],
    k_L: list[int],
    step: int,
    pairs: bool = False,
) -> dict[str, list[Row]]:
    """Rows of load, routing_layers and (with `pairs`) coactivation of the steps that end with this one."""
    tables: dict[str, list[Row]] = {"load": [], "routing_layers": []}
    corpus = Corpus([DOMAIN], [0])
    for row, block in enumerate(places):
        counts = window.layer(row, block, k_L[row])
        place = {"step": step, "layer": block.layer, "layer_name": block.name}
        tables["load"] += [{**place, **line} for line in load_rows(counts, corpus)]
        metrics = metric_rows(counts, corpus, decisions=bool(window.decided_L[row]), order=False)
        rows_ED = routers_LED[row]
        router_ED = None if rows_ED is None else rows_ED.double().cpu().numpy()
        separation = (  # overlap is computed from pairs
            line for line in separation_rows(counts, router_ED) if pairs or line["metric"] != "expert_overlap"
        )
        tables["routing_layers"] += [
            {**place, **layer_columns(counts), **line}
            for line in (*metrics, *separation, *window.diagnostics.rows(row))
        ]
        if pairs and counts.k > 1:
            columns = coactivation_columns(counts)
            tables.setdefault("coactivation", []).extend({**place, **line} for line in as_rows(columns))
    return tables


def as_rows(columns: dict[str, Any]) -> Iterator[Row]:
    length = max(len(column) for column in columns.values() if isinstance(column, np.ndarray))
    for at in range(length):
        yield {
            name: column[at] if isinstance(column, np.ndarray) else column for name, column in columns.items()
        }


def log_scalars(window: Window, blocks: list[Block], alerts: int, gradients: list[Row]) -> dict[str, float]:
    """At most twelve numbers: percentiles over layers, alerts so far, a low percentile of LM gradient norms.

    Numbers that were not measured since the last log are missing.
    """
    values: dict[str, list[float]] = {name: [] for name in PERCENTILES}
    for row, block in enumerate(blocks):
        load_E: Array = window.counts_LE[row, : block.n_experts].astype(float)
        if load_E.sum():
            for metric in (cv, max_over_mean, unused, load_entropy_share):
                values[metric.__name__].append(float(metric(load_E)))
        if window.decided_L[row]:
            values["routing_entropy"].append(float(window.decisions_LM[row, ENTROPY] / window.decided_L[row]))
    scalars = {
        f"{PREFIX}{name}_p{rank}": float(np.percentile(values[name], rank))
        for name, ranks in PERCENTILES.items()
        for rank in ranks
        if values[name]
    }
    norms = [row["lm_gradient_norm"] for row in gradients if row["lm_gradient_norm"] is not None]
    if norms:
        scalars[f"{PREFIX}lm_gradient_norm_p10"] = float(np.percentile(norms, 10))
    return {**scalars, f"{PREFIX}alerts": float(alerts)}


# --- alerts


@dataclass(frozen=True)
class Thresholds:
    """Values beyond which an alert is raised."""

    dead_steps: int = 500  # steps without a token for an expert
    max_load: float = 5.0  # load of the busiest expert over the mean
    max_unused: float = 0.3  # share of experts without a token
    min_entropy: float = 0.1  # routing entropy in nats

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise BadInput(f"{name} {value}: must be a number from 0")
        if self.dead_steps < 1:
            raise BadInput(f"dead_steps {self.dead_steps}: must be at least 1")


@dataclass
class AlertState:
    """When each expert was last used, and the active alerts."""

    thresholds: Thresholds
    layers: list[int]
    n_experts: list[int]
    last_used_LE: Integers
    certain: set[int] = field(default_factory=set)  # layers whose routers have low entropy by design
    active: set[Key] = field(default_factory=set)

    @classmethod
    def start(
        cls,
        thresholds: Thresholds,
        layers: list[int],
        n_experts: list[int],
        step: int,
        certain: Iterable[int] = (),
    ) -> AlertState:
        last_used_LE = np.full((len(layers), max(n_experts)), step)
        return cls(thresholds, layers, n_experts, last_used_LE, set(certain))

    def state(self) -> dict[str, Any]:
        active = sorted(self.active, key=lambda key: (key[0], -1 if key[1] is None else key[1], key[2]))
        return {"last_used": self.last_used_LE.tolist(), "standing": active}

    def restore(self, state: dict[str, Any]) -> None:
        self.last_used_LE = np.array(state["last_used"])
        self.active = {(layer, expert, kind) for layer, expert, kind in state["standing"]}

    def new_alerts(self, window: Window, step: int, k_L: list[int]) -> list[Row]:
        """Alerts that start in this window; an active one is repeated only after a window without it."""
        self.last_used_LE[window.counts_LE > 0] = step
        current = {
            (layer, expert, kind): (value, threshold)
            for row, layer in enumerate(self.layers)
            for expert, kind, value, threshold in self.layer_alerts(window, row, step, k_L[row])
        }
        new = [key for key in current if key not in self.active]
        self.active = set(current)
        return [alert_row(step, *key, *current[key]) for key in new]

    def layer_alerts(
        self, window: Window, row: int, step: int, k: int
    ) -> Iterator[tuple[int | None, str, float | None, float | None]]:
        limits, n, tokens = self.thresholds, self.n_experts[row], int(window.tokens_L[row])
        if not tokens:
            return
        load_E = window.counts_LE[row, :n].astype(float)
        idle_E = step - self.last_used_LE[row, :n]
        for expert in np.flatnonzero(idle_E >= limits.dead_steps):
            yield int(expert), "dead", float(idle_E[expert]), float(limits.dead_steps)
        if tokens * k / n >= FEWEST_LOAD and load_E.sum():
            if (busiest := float(max_over_mean(load_E))) > limits.max_load:
                yield None, "max_load", busiest, limits.max_load
            if (share := float(unused(load_E))) > limits.max_unused:
                yield None, "unused", share, limits.max_unused
        decided = int(window.decided_L[row])
        entropy = window.decisions_LM[row, ENTROPY] / decided if decided else np.nan
        # a single expert has entropy 0
        if entropy < limits.min_entropy and n > 1 and self.layers[row] not in self.certain:
            yield None, "entropy", float(entropy), limits.min_entropy
        if np.isnan(window.gate_weight_LE[row, :n]).any() or (decided and np.isnan(entropy)):
            yield None, "nan", None, None


def alert_row(
    step: int, layer: int, expert: int | None, kind: str, value: float | None, threshold: float | None
) -> Row:
    """One row of the alerts table, without the block's name."""
    sentences = {
        "dead": f"no token has chosen expert {expert} for {value or 0:.0f} steps",
        "max_load": f"the busiest expert has {value or 0:.3g} times the mean load (limit {threshold})",
        "unused": f"{value or 0:.0%} of its experts have no token (limit {threshold or 0:.0%})",
        "entropy": f"routing entropy is {value or 0:.3g} nats (limit {threshold}), near certainty",
        "nan": "gates or logits are not numbers",
    }
    message = f"step {step}, layer {layer}: {sentences[kind]}"
    place = {"step": step, "layer": layer, "expert": expert, "kind": kind}
    return {**place, "value": value, "threshold": threshold, "message": message}
