"""The Monitor of a plain PyTorch loop: counts a model's routing while it is trained, into a run folder."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from moescope.errors import BadInput
from moescope.routing.counts import LayerCounts, is_distributed
from moescope.routing.counts_to_tables import (
    Corpus,
    Row,
    coactivation_columns,
    experts_and_pairs,
    join_columns,
    layer_columns,
    load_columns,
    load_total_columns,
    load_totals,
    mark_few,
    metric_rows,
    separation_rows,
)
from moescope.routing.load_balance import (
    NEARLY_UNUSED,
    cv,
    divide,
    load_entropy_share,
    max_over_mean,
    unused,
)
from moescope.routing.monitor_capture import RouterGradients, StepCounts, TrainingCapture, Window, losses_of
from moescope.routing.tables import TABLES
from moescope.run import Run, RunWriter, jsonable, open_run, read_run_json, remove_tasks, write_table
from moescope.tables import read_parquet
from moescope.types import Array, Integers, Routing
from moescope.verbs import load_verb

if TYPE_CHECKING:
    import pandas as pd

    from moescope.verb import Verb

Scan = Callable[[nn.Module, int], dict[str, "pd.DataFrame"]]
logger = logging.getLogger("moescope")
NO_GRADIENTS = "moescope: router gradients cannot be measured here: %s"
# of torch: before, a backward pass through FSDP besides the training's own ends the process
FSDP_GRADIENTS = "2.12"
Rows = dict[str, list[Any]]  # table -> rows, or frames
Key = tuple[int, int | None, str]  # layer, expert, kind of alert
Alert = tuple[int | None, str, float | None, float | None, str]  # expert, kind, value, threshold, sentence
STAGES = ("gradients", "scan", "judge", "tables", "write")
LONG = ("load", "load_totals", "routing_layers", "coactivation")
ALWAYS = (
    "load",
    "load_totals",
    "routing_layers",
    "steps",
    "router_gradients",
    "alerts",
)  # written even without rows
FEWEST_LOAD = 10  # expected tokens per expert below which loads raise no alert: some are unused by chance
COLLAPSED = "collapsed"
COLLAPSED_WINDOWS = 2  # in a row: while a training warms up, single windows can be as uneven
DOMAIN = "train"
PERCENTILES = {
    "cv": (50, 90),
    "max_over_mean": (50, 90),
    "unused": (90,),
    "load_entropy_share": (10, 50),
    "routing_entropy": (10, 50),
    "lm_gradient_norm": (10,),
}
PREFIX = "moescope/"


# --- alerts


@dataclass(frozen=True)
class Thresholds:
    """Values beyond which an alert is raised.

    Loads are judged against their maximum, which n experts and k per token set: the busiest expert has at
    most n/k times the mean load, when every token chooses it, and the CV of the loads is at most
    sqrt(n/k - 1), when all tokens choose the same k experts.
    """

    dead_steps: int = 500  # steps without a token for an expert; also how long the next two must last
    max_load: float = 0.95  # load of the busiest expert, from 0 (the mean) to 1 (n/k times the mean)
    max_unused: float = 0.3  # share of experts with less than a hundredth of the mean load
    min_entropy: float = 0.1  # routing entropy in nats
    max_cv: float = 0.95  # CV of the loads over that of collapse, in two windows in a row

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise BadInput(f"{name} {value}: must be a number from 0")
        for name in ("max_load", "max_unused", "max_cv"):
            if (value := getattr(self, name)) > 1:
                raise BadInput(f"{name} {value}: must be a share, at most 1 (of the maximum)")
        if self.dead_steps < 1:
            raise BadInput(f"dead_steps {self.dead_steps}: must be at least 1")


class AlertState:
    """When each expert was last used, since when a layer's load is uneven, and the active alerts."""

    def __init__(
        self,
        thresholds: Thresholds,
        layers: list[int],
        n_experts: list[int],
        step: int,
        certain: Iterable[int] = (),
    ):
        self.thresholds, self.layers = thresholds, layers
        self.certain = set(certain)  # layers whose routers have low entropy by design
        self.last_used_LE: Integers = np.full((len(layers), max(n_experts)), step)
        self.active: set[Key] = set()
        self.judged_at = step
        # layer and kind -> windows in a row beyond the threshold, and the step before the first of them
        self.streaks: dict[tuple[int, str], tuple[int, int]] = {}

    def state(self) -> dict[str, Any]:
        active = sorted(self.active, key=lambda key: (key[0], -1 if key[1] is None else key[1], key[2]))
        streaks = [[*key, *streak] for key, streak in sorted(self.streaks.items())]
        return {"last_used": self.last_used_LE.tolist(), "standing": active, "streaks": streaks}

    def restore(self, state: dict[str, Any]) -> None:
        self.last_used_LE = np.array(state["last_used"])
        self.active = {(layer, expert, kind) for layer, expert, kind in state["standing"]}
        self.streaks = {
            (layer, kind): (count, since) for layer, kind, count, since in state.get("streaks", [])
        }

    def new_alerts(self, window: Window, step: int) -> list[Row]:
        """Alerts that start in this window; an active one is repeated only after a window without it."""
        current: dict[Key, Row] = {}
        for counts in window.layers:
            place = {"step": step, "layer": counts.layer, "layer_name": counts.layer_name}
            for expert, kind, value, threshold, sentence in self.layer_alerts(counts, step):
                levels = {"expert": expert, "kind": kind, "value": value, "threshold": threshold}
                message = f"step {step}, layer {counts.layer}: {sentence}"
                current[counts.layer, expert, kind] = {**place, **levels, "message": message}
        new = [row for key, row in current.items() if key not in self.active]
        self.active, self.judged_at = set(current), step
        return new

    @property
    def collapsed(self) -> int:
        """Layers whose load is collapsed now."""
        return sum(kind == COLLAPSED for _, _, kind in self.active)

    def layer_alerts(self, counts: LayerCounts, step: int) -> Iterator[Alert]:
        limits, n, load_E = self.thresholds, counts.n_experts, counts.load_E
        last_used_E = self.last_used_LE[self.layers.index(counts.layer), :n]
        last_used_E[load_E > 0] = step
        if not counts.tokens:
            return
        idle_E = step - last_used_E
        for expert in np.flatnonzero(idle_E >= limits.dead_steps).tolist():
            sentence = f"no token has chosen expert {expert} for {idle_E[expert]:.0f} steps"
            yield expert, "dead", float(idle_E[expert]), float(limits.dead_steps), sentence
        if load_E.sum() / n >= FEWEST_LOAD:
            yield from self.load_alerts(counts.layer, load_E, float(load_E.sum()) / counts.tokens, step)
        entropy = mean_entropy(counts)
        # a single expert has entropy 0
        if entropy < (limit := limits.min_entropy) and n > 1 and counts.layer not in self.certain:
            sentence = f"routing entropy is {entropy:.3g} nats (limit {limit}), near certainty"
            yield None, "entropy", entropy, limit, sentence
        if np.isnan(counts.gate_weight_MBE).any() or (counts.sums("decided").any() and np.isnan(entropy)):
            yield None, "nan", None, None, "gates or logits are not numbers"

    def load_alerts(self, layer: int, load_E: Array, k: float, step: int) -> Iterator[Alert]:
        """Alerts about a load that has been uneven for long enough; k counts no empty slots."""
        limits, n, mean = self.thresholds, len(load_E), load_E.mean()
        most = n / k  # times the mean load, for an expert that every token chooses
        if most <= 1:
            return
        spread, largest = float(cv(load_E)), (most - 1) ** 0.5
        busiest, share = float(load_E.max() / mean), float((load_E < NEARLY_UNUSED * mean).mean())
        onto = f"collapsed onto {k:.3g} of {n} experts, its load CV is {spread:.3g} of at most"
        most_load = f"the busiest expert has {busiest:.3g} of at most {most:.3g} times the mean load"
        few = f"{share:.0%} of its experts have under {NEARLY_UNUSED:.0%} of the mean load"
        for kind, value, limit, sentence in (
            (COLLAPSED, spread, limits.max_cv * largest, f"{onto} {largest:.3g}"),
            ("max_load", busiest, 1 + limits.max_load * (most - 1), most_load),
            ("unused", share, limits.max_unused, few),
        ):
            windows, since = self.streaks.pop((layer, kind), (0, self.judged_at))
            if value <= limit:
                continue
            self.streaks[layer, kind] = windows + 1, since
            if kind == COLLAPSED and windows + 1 >= COLLAPSED_WINDOWS:
                yield None, kind, value, limit, sentence
            elif kind != COLLAPSED and step - since >= limits.dead_steps:
                yield None, kind, value, limit, f"{sentence} for {step - since} steps"


# --- the run folder


def task_name(step: int, more: bool = False) -> str:
    """Name of a step's task, in the order of steps; `more` for rows that follow its tables."""
    return f"step{step:010d}" + ("-more" if more else "")


def step_of(task: str) -> int:
    return int(task.removeprefix("step").removesuffix("-more"))


def choose_folder(out: str | Path | None, base: Path, stem: str, step: int, overwrite: bool) -> Path:
    """The run folder: `out`, or the next free number; a training resumed at `step` takes the newest."""
    if out is not None:
        if step == 0 and not overwrite and read_run_json(Path(out)) is not None:
            raise BadInput(f"{out}: holds a run already; give another out, or overwrite=True to replace it")
        return Path(out)
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
        # all keys now: two threads use the dictionary
        self.writer.timings = {**dict.fromkeys(STAGES, 0.0), **self.writer.timings}
        # rows of later steps are trained again
        self.writer.remove_tasks(task for task in self.writer.done_tasks() if step_of(task) > step)
        self.state: dict[str, Any] | None = next(reversed(self.writer.setups()), None)
        # a disk takes longer than a step may wait
        self.disk = ThreadPoolExecutor(max_workers=1, thread_name_prefix="moescope")
        self.writing: Future[None] | None = None
        self.writing_thread = 0

    def flush(
        self, step: int, rows: Rows, setup: dict[str, Any], deferred: Sequence[Callable[[], Rows]] = ()
    ) -> None:
        """Start writing the rows since the last flush, and those that `deferred` makes."""
        self.wait()
        self.writing = self.disk.submit(self.write, step, rows, setup, deferred)

    def wait(self) -> None:
        """Wait until flushed rows are on disk, where a crash cannot lose them."""
        writing, self.writing = self.writing, None
        try:
            if writing is not None:
                writing.result()
        except Exception as error:  # a full disk, or tables that cannot be made: training must go on
            kind = "" if isinstance(error, BadInput | OSError) else f"{type(error).__name__}: "
            lost = f"tables could not be written and are lost: {kind}{error}"
            logger.warning("moescope: %s", lost)
            self.warn(lost)

    def warn(self, line: str) -> None:
        self.writer.info["warnings"] = sorted({*self.writer.info.get("warnings", []), line})

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
            made = [part for part in parts if not isinstance(part, dict)]
            frame = pd.concat([*made, pd.DataFrame(plain)] if plain else made, ignore_index=True)
            frames[name] = frame.sort_values(list(self.writer.verb.tables[name].keys), ignore_index=True)
        task = task_name(step, more=task_name(step) in self.writer.done_tasks())
        self.writer.flush_task(task, frames, jsonable({"step": step, **setup}))
        self.writer.save_info()

    def finish(self) -> Run:
        """Join the tasks, long tables in bounded memory; their states stay in parts/ for later training."""
        self.wait()
        self.disk.shutdown()
        try:
            for name, table in self.writer.verb.tables.items():
                filled = self.writer.has(name)
                if filled and name not in LONG:
                    write_table(table, self.writer.joined(name), self.writer.path / f"{name}.parquet")
                elif filled or name in ALWAYS:
                    self.writer.join_streamed(name)
            self.writer.save_info(status="done")
        except BaseException:  # a full disk: the tasks stay, and there is room to say so in run.json
            self.writer.remove_joined()
            raise
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


def window_tables(window: Window, routers: dict[int, Tensor | None], step: int) -> Rows:
    """Return load, routing_layers and, where pairs are counted, coactivation of the steps up to this one."""
    import pandas as pd

    rows: list[Row] = []
    totals: list[Row] = []
    columns: dict[str, list[Row]] = {"load": [], "coactivation": []}
    corpus = Corpus([DOMAIN], [0])
    experts, pairs = experts_and_pairs(window.layers)
    for counts in window.layers:
        place = {"step": step, "layer": counts.layer, "layer_name": counts.layer_name}
        columns["load"].append({**place, **load_columns(counts, corpus)})
        totals += [{**place, **load_total_columns(counts, experts=experts)}] if counts.tokens else []
        if counts.pairs_EE is not None and counts.k > 1:
            columns["coactivation"].append({**place, **coactivation_columns(counts, pairs)})
        rows_ED = routers[counts.layer]
        decided, layers = bool(counts.sums("decided").sum()), len(window.layers)
        lines = (
            *metric_rows(counts, corpus, decisions=decided, order=False, layers=layers),
            *separation_rows(counts, None if rows_ED is None else rows_ED.double().cpu().numpy()),
            *window.diagnostic_rows(counts.layer),
        )
        rows += [{**place, **layer_columns(counts), **line} for line in lines]
    frames = {name: pd.DataFrame(join_columns(parts)) for name, parts in columns.items() if parts}
    metrics = pd.DataFrame(rows, columns=[*TABLES["routing_layers"].columns])
    frames |= {"load_totals": load_totals(totals), "routing_layers": mark_few(metrics)}
    return {name: [frame] for name, frame in frames.items()}


def log_scalars(window: Window, alerts: int, collapsed: int, gradients: list[Row]) -> dict[str, float]:
    """At most twelve numbers: percentiles over layers, alerts so far, layers collapsed now.

    Numbers that were not measured since the last log are missing.
    """
    loads = [counts.load_E for counts in window.layers if counts.load_E.sum()]
    values = {
        metric.__name__: [float(metric(load_E)) for load_E in loads]
        for metric in (cv, max_over_mean, unused, load_entropy_share)
    }
    decided = [counts for counts in window.layers if counts.sums("decided").any()]
    values["routing_entropy"] = [mean_entropy(counts) for counts in decided]
    values["lm_gradient_norm"] = [row["lm_gradient_norm"] for row in gradients]
    scalars = {
        f"{PREFIX}{name}_p{rank}": float(np.percentile(known, rank))
        for name, ranks in PERCENTILES.items()
        if (known := [value for value in values[name] if value is not None])
        for rank in ranks
    }
    return {**scalars, f"{PREFIX}alerts": float(alerts), f"{PREFIX}{COLLAPSED}": float(collapsed)}


def mean_entropy(counts: LayerCounts) -> float:
    """Return the mean routing entropy; NaN where no logits were looked at."""
    return float(divide(counts.sums("routing_entropy").sum(), counts.sums("decided").sum()))


# --- the Monitor


class LoopMonitor:
    """Monitor of any training loop; `moescope.Monitor` adds the callback of transformers' Trainer.

        monitor = Monitor().watch(model)
        ...
        monitor.step()            # after each optimiser step

    Every `every` steps the tables of those steps are written, alerts are raised, and `step` returns at most
    twelve numbers for a tracker. Passes in evaluation mode are not counted. `close` joins the tables; without
    it they stay in parts, which can be read too.
    """

    def __init__(
        self,
        out: str | Path | None = None,
        every: int = 100,
        decisions_every: int = 10,
        gradients_every: int = 500,
        scan_every: int = 0,
        scan: Scan | None = None,
        coactivation: bool = False,
        thresholds: Thresholds | None = None,
        overwrite: bool = False,
    ):
        self.every, self.decisions_every = every, decisions_every
        self.gradients_every, self.scan_every = gradients_every, scan_every
        for name, least in (("every", 1), ("decisions_every", 1), ("gradients_every", 0), ("scan_every", 0)):
            if not isinstance(value := getattr(self, name), int) or value < least:
                raise BadInput(f"{name} {value}: must be a whole number from {least}")
        if scan_every and scan is None:
            raise BadInput(f"scan_every {scan_every}: no scan function; pass scan=moescope.scan_model")
        self.out, self.overwrite, self.scan, self.coactivation = out, overwrite, scan, coactivation
        self.thresholds = thresholds or Thresholds()
        self.capture: TrainingCapture | None = None
        self.run: TrainingRun | None = None
        self.folder: Path | None = None
        self.ranks_add_up = False  # whether losses are shares of a sum over ranks, too
        self.abandon: Callable[[], Any] | None = None

    # --- start

    def watch(
        self,
        model: nn.Module,
        step: int = 0,
        base: Path = Path("runs"),
        stem: str | None = None,
        verb: Verb | None = None,
        identity: dict[str, Any] | None = None,
        command: str = "",
    ) -> LoopMonitor:
        """Start counting, after `step` steps of earlier training, whose tables in the folder are kept.

        A verb that trains passes its record, its run's identity and its command.
        """
        if self.capture is not None:
            raise BadInput("this Monitor already watches a model; close() it first, or make another")
        model = unwrapped(model)
        capture = TrainingCapture(model, lambda blocks: StepCounts(blocks, self.coactivation))
        self.blocks, self.counts, self.model = capture.blocks, capture.counts, model
        self.check_sharded()
        layers, n_experts = [block.layer for block in self.blocks], [block.n_experts for block in self.blocks]
        self.now = self.flushed = self.logged = step
        self.pulled = -1
        self.tokens, self.alerts = 0, 0
        certain = [
            block.layer for block in self.blocks if getattr(block.router, "expects_low_entropy", False)
        ]
        self.alert_state = AlertState(self.thresholds, layers, n_experts, step, certain)
        if is_first_rank():
            kind = self.blocks[0].model_type
            options = ("every", "decisions_every", "gradients_every", "scan_every", "coactivation")
            arguments = {name: getattr(self, name) for name in options} | asdict(self.thresholds)
            self.folder = choose_folder(self.out, base, stem or f"monitor-{kind}", step, self.overwrite)
            self.run = TrainingRun(
                self.folder,
                verb or load_verb("monitor"),
                identity
                or {"arguments": arguments, "model_type": kind, "layers": layers, "n_experts": n_experts},
                step,
                self.overwrite,
                command or f"moescope.Monitor(out={str(self.folder)!r})",
            )
            self.abandon = weakref.finalize(self, self.run.abandon)
            if self.run.state:
                self.tokens, self.alerts = self.run.state["tokens"], self.run.state["alerts"]
                self.alert_state.restore(self.run.state)
            warnings = []
            if capture.unchecked:
                warnings = [f"layers {capture.unchecked}: not checked, because dropout makes experts random"]
            if step and not self.run.state:
                warnings.append(f"{self.folder} has no tables of the steps up to {step}")
            self.run.writer.save_info(warnings=warnings, low_entropy_expected=certain)
        self.since_tables, self.since_log = Window(), Window()
        self.buffer: Rows = {}
        self.deferred: list[Callable[[], Rows]] = []  # tables that the writing thread makes
        self.recent_gradients: list[dict[str, Any]] = []
        self.losses_add_up = False  # whether the passes of a step each return their share of its loss
        self.since = time.perf_counter()
        self.gradients: RouterGradients | None = None
        capture.after_pass = self.pass_ended
        self.capture = capture.__enter__()
        self.prepare()
        return self

    def check_sharded(self) -> None:
        """Turn off, or reject, what needs a whole weight where FSDP2 leaves each rank a part of it."""
        why = ""
        if any(is_sharded(weight) for block in self.blocks for weight in block.router.parameters()):
            why = "the weights are sharded"
            if self.scan_every:
                raise BadInput(f"scan_every {self.scan_every}: {why}; scan the checkpoints that you save")
        elif torch.__version__ < FSDP_GRADIENTS and any(map(is_sharded, self.model.parameters())):
            why = f"FSDP with torch before {FSDP_GRADIENTS} crashes"
        if why and self.gradients_every and is_first_rank():
            logger.warning(NO_GRADIENTS, why)
        self.gradients_every = 0 if why else self.gradients_every

    def prepare(self) -> None:
        """Set up what the next step measures besides counts."""
        assert self.capture is not None
        coming = self.now + 1
        self.capture.hook_routers(coming % self.decisions_every == 0 or coming % self.every == 0)
        measuring = self.gradients_every and coming % self.gradients_every == 0
        self.gradients = RouterGradients(self.blocks) if measuring else None

    # --- a pass, a step

    def pass_ended(self, output: Any, inputs: dict[str, Any]) -> None:
        self.losses_add_up = inputs.get("num_items_in_batch") is not None
        if isinstance(loss := getattr(output, "loss", None), Tensor):
            aux = getattr(output, "aux_loss", None)
            aux = aux.detach() if isinstance(aux, Tensor) else None
            self.counts.losses.append((loss.detach().clone(), aux))  # a Trainer may scale it in place
        losses = losses_of(output, getattr(self.model, "config", None)) if self.gradients else None
        if losses is not None and torch.is_grad_enabled():
            self.measure_gradients(*losses, already_scaled=self.losses_add_up)

    def add_pass(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], routings: list[Routing], output: Any
    ) -> None:
        """Count a pass of a model that hands out its routing, where it ran without hooks (a CUDA graph)."""
        assert self.capture is not None
        self.capture.pass_begins(self.model, args, kwargs)
        for routing in routings:
            self.capture.handed_out(routing)
        self.capture.pass_ends(self.model, args, kwargs, output)

    def measure_gradients(
        self, lm_loss: Tensor, aux_loss: Tensor | None = None, already_scaled: bool = False
    ) -> None:
        """Measure both losses' gradients into the routers, if this step is one of `gradients_every`.

        Called automatically where the model returns its loss; a loop that computes its own loss calls this
        before `backward`, with `aux_loss` times its coefficient.
        """
        if self.gradients is None:
            return
        try:
            with self.timed("gradients"):
                self.gradients.add(lm_loss, aux_loss, already_scaled)
        except RuntimeError as error:  # reentrant checkpointing: training must go on
            logger.warning(NO_GRADIENTS, str(error).splitlines()[0])
            self.gradients, self.gradients_every = None, 0

    def step(self, **facts: float | None) -> dict[str, float]:
        """Call after each optimiser step; returns numbers for a tracker every `every` steps, else nothing.

        `facts` may be columns of the steps table: learning_rate, gradient_norm, validation_loss ...
        """
        self.end_step(self.now + 1)
        if self.now % self.every:
            return {}
        self.close_window()  # first: its alerts are among the numbers
        numbers = self.numbers(**facts)
        self.write()
        return numbers

    def end_step(self, step: int) -> None:
        assert self.capture is not None, "watch(model) comes first"
        if self.capture.waiting:  # the model's parts were called, not the model
            self.capture.count()
        self.now = step
        if self.gradients is not None and self.gradients.passes:
            self.recent_gradients = self.gradients.rows(step, self.ranks_add_up)
            self.keep("router_gradients", self.recent_gradients)
        if self.scan is not None and self.scan_every and step % self.scan_every == 0 and is_first_rank():
            with self.timed("scan"):
                for name, frame in self.scan(self.model, step).items():
                    self.keep(name, [frame])
        self.prepare()

    def keep(self, table: str, rows: list[Any]) -> None:
        if self.run is not None:  # the first rank writes for all
            self.buffer.setdefault(table, []).extend(rows)

    def timed(self, stage: str) -> AbstractContextManager[None]:
        return nullcontext() if self.run is None else self.run.writer.timed(stage)

    # --- numbers and tables

    def pull(self) -> None:
        """Fetch the counts from all ranks' devices, once per step: the only time anything waits for them."""
        if self.pulled == self.now:
            return
        self.pulled = self.now
        window = self.counts.take(next(self.model.parameters()).device)
        self.since_tables.add(window)
        self.since_log.add(window)
        self.tokens += window.layers[0].tokens

    def numbers(self, **facts: Any) -> dict[str, float]:
        """Return the numbers since the last call, and add a row to the steps table. Collective."""
        self.pull()
        window, seconds = self.since_log, time.perf_counter() - self.since
        steps = max(self.now - self.logged, 1)
        world = torch.distributed.get_world_size() if is_distributed() else 1
        passes, loss, aux = window.losses
        row: dict[str, Any] = {"step": self.now, "tokens": self.tokens, "step_seconds": seconds / steps}
        row["tokens_per_second"] = window.layers[0].tokens / seconds
        if passes:
            coefficient = getattr(getattr(self.model, "config", None), "router_aux_loss_coef", None) or 0.0
            coefficient = 1.0 if self.blocks[0].hands_out else coefficient  # weighs its losses itself
            over = steps * (1 if self.ranks_add_up else world) if self.losses_add_up else passes
            row |= {"train_loss": loss / over, "lm_loss": (loss - coefficient * aux) / over}
            row["aux_loss"] = aux / passes if aux else None
        if torch.cuda.is_available() and next(self.model.parameters()).is_cuda:
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self.keep("steps", [row | {name: value for name, value in facts.items() if value is not None}])
        numbers = log_scalars(window, self.alerts, self.alert_state.collapsed, self.recent_gradients)
        self.since_log, self.logged, self.since = Window(), self.now, time.perf_counter()
        self.recent_gradients = []
        return numbers

    def close_window(self) -> None:
        """Raise the alerts of the steps since the last tables, which a thread then makes. Collective."""
        if self.now == self.flushed:
            return
        with self.timed("judge"):
            self.pull()
            window, self.since_tables = self.since_tables, Window()
            self.flushed = self.now
            # copies: routers as they are now, not when the thread comes to it
            routers = {
                block.layer: None if (rows_ED := block.rows_ED) is None else whole_copy(rows_ED)
                for block in self.blocks
            }
            if self.run is None:
                return
            for alert in self.alert_state.new_alerts(window, self.now):
                self.alerts += 1
                logger.warning("moescope: %s", alert["message"])
                self.keep("alerts", [alert])
            self.deferred.append(partial(window_tables, window, routers, self.now))

    def write(self, closing: bool = False) -> None:
        """Write the tables collected so far, while training goes on."""
        if self.run is None or not (self.deferred or (closing and self.buffer)):
            return
        assert self.capture is not None
        with self.timed("write"):
            if self.capture.misfits:
                self.run.warn(
                    f"layers {sorted(self.capture.misfits)}: the attention mask does not fit their tokens, "
                    "so padding may be counted"
                )
            state = {"tokens": self.tokens, "alerts": self.alerts, **self.alert_state.state()}
            self.run.flush(self.flushed, self.buffer, state, self.deferred)
            self.buffer, self.deferred = {}, []

    def flush(self) -> None:
        """Write the tables up to this step now, for example when a checkpoint is saved."""
        self.close_window()
        if self.logged < self.now:
            self.numbers()
        self.settle(closing=True)

    def settle(self, closing: bool = False) -> None:
        self.close_window()
        self.write(closing)
        if self.run is not None:
            self.run.wait()

    def close(self) -> Run | None:
        """Write the rest, join the tables and remove the hooks; returns the run on the first rank."""
        if self.capture is not None:
            self.flush()
        if (run := self.release()) is None:
            return None
        try:
            return run.finish()
        except BaseException as error:
            run.abandon(str(error) or type(error).__name__)
            raise

    def stop(self, error: str | None = None) -> None:
        """Remove the hooks, leave the run unfinished; with an error, write the counts and mark it failed."""
        if self.capture is not None and error is not None:
            self.flush()
        if (run := self.release()) is not None:
            run.abandon(error)

    def release(self) -> TrainingRun | None:
        """Remove the hooks; return the run that was written, once."""
        if self.capture is None:
            return None
        self.capture.__exit__(None, None, None)
        run, self.capture, self.run = self.run, None, None
        return run


def is_first_rank() -> bool:
    return not is_distributed() or torch.distributed.get_rank() == 0


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DistributedDataParallel's wrappers."""
    distributed = type(model).__name__ == "DistributedDataParallel"
    inner = getattr(model, "module" if distributed else "_orig_mod", None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def is_sharded(weight: Tensor) -> bool:
    """Whether each rank holds a part of the weight only (a DTensor, as FSDP2 makes them)."""
    return hasattr(weight, "full_tensor")


def whole_copy(weight: Tensor) -> Tensor:
    """Copy a weight; collective where it is sharded."""
    whole: Any = weight.detach()
    return whole.full_tensor() if is_sharded(weight) else whole.clone()
