"""Routing while a model is trained.

The same object for a plain PyTorch loop and for transformers' Trainer.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moescope.errors import BadInput
from moescope.routing.alerts import Thresholds, Watch
from moescope.routing.router_gradients import RouterGradients, losses_of
from moescope.routing.step_tally import Place, StepTally, Window, distributed
from moescope.routing.training_capture import TrainingCapture
from moescope.routing.training_run import TrainingRun, choose_folder
from moescope.routing.training_tables import scalars, window_tables
from moescope.run import Run
from moescope.verb import Verb
from moescope.verbs import load_verb

if TYPE_CHECKING:
    import pandas as pd

Scan = Callable[[nn.Module, int], dict[str, "pd.DataFrame"]]
logger = logging.getLogger("moescope")


class LoopMonitor:
    """Counts where tokens go while a model is trained, in two lines of any loop:

        monitor = Monitor().watch(model)
        ...
        monitor.step()            # after each optimiser step

    Every `every` steps the tables of those steps are written and judged, and `step` returns at most twelve
    numbers for a tracker.
    Passes in evaluation mode are not counted. Logits are looked at every `decisions_every` steps, gradients
    every
    `gradients_every` (0: never), weights every `scan_every`. `close` joins the tables; without it they stay
    in pieces, which can be
    read all the same.
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
        for name, value, least in (
            ("every", every, 1),
            ("decisions_every", decisions_every, 1),
            ("gradients_every", gradients_every, 0),
            ("scan_every", scan_every, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise BadInput(f"{name} {value}: must be a whole number from {least}")
        if scan_every and scan is None:
            raise BadInput(
                f"scan_every {scan_every}: no scan function given; use moescope.Monitor, which brings one"
            )
        self.out, self.overwrite = out, overwrite
        self.every, self.decisions_every = every, decisions_every
        self.gradients_every, self.scan_every, self.scan = gradients_every, scan_every, scan
        self.coactivation = coactivation
        self.thresholds = thresholds or Thresholds()
        self.capture: TrainingCapture | None = None
        self.run: TrainingRun | None = None
        self.folder: Path | None = None
        self.ranks_add_up = False  # whether such shares are of all ranks' losses, too
        self.abandon: Callable[[], Any] | None = None

    # --- beginning

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
        """Begin to count. `step` is how many steps the model has been trained already: those before it are
        kept in the folder.

        A verb that trains says in `identity` what its run is, and may be told apart from another by.
        """
        if self.capture is not None:
            raise BadInput("this Monitor already watches a model; close() it first, or make another")
        model = (
            getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
        )
        capture = TrainingCapture(model, lambda blocks: StepTally(blocks, self.coactivation))
        self.blocks, self.tally, self.model = capture.blocks, capture.tally, model
        shape = {
            "layers": [block.layer for block in self.blocks],
            "n_experts": [block.n_experts for block in self.blocks],
        }
        self.now = self.flushed = self.logged = step
        self.pulled = -1
        self.tokens, self.alerts = 0, 0
        sure = [block.layer for block in self.blocks if getattr(block.router, "expects_low_entropy", False)]
        self.watcher = Watch.begin(self.thresholds, shape["layers"], shape["n_experts"], step, sure)
        if first_rank():
            kind = self.blocks[0].model_type
            settings = {
                name: getattr(self, name)
                for name in ("every", "decisions_every", "gradients_every", "scan_every", "coactivation")
            }
            own: dict[str, Any] = {
                "arguments": {**settings, **asdict(self.thresholds)},
                "model_type": kind,
                **shape,
            }
            self.folder = choose_folder(self.out, base, stem or f"monitor-{kind}", step, self.overwrite)
            self.run = TrainingRun(
                self.folder, verb or load_verb("monitor"), identity or own, step, self.overwrite, command
            )
            self.abandon = weakref.finalize(self, self.run.abandon)
            if self.run.state:
                self.tokens, self.alerts = self.run.state["tokens"], self.run.state["alerts"]
                self.watcher.restore(self.run.state)
            warnings = (
                [f"layers {capture.unchecked}: not checked, for dropout makes experts random"]
                if capture.unchecked
                else []
            )
            if step and not self.run.state:
                warnings.append(
                    f"nothing is known of the steps up to {step}: no tables of them in {self.folder}"
                )
            self.run.writer.save_info(warnings=warnings, low_entropy_expected=sure)
        self.since_tables, self.since_log = self.window(), self.window()
        self.buffer: dict[str, list[Any]] = {}
        self.unmade: list[
            Callable[[], dict[str, list[Any]]]
        ] = []  # tables that the writing thread is to make
        self.recent_gradients: list[dict[str, Any]] = []
        self.losses_add_up = False  # whether the passes of a step each return their share of its loss
        self.since = time.perf_counter()
        self.gradients: RouterGradients | None = None
        capture.after_pass = self.pass_ended
        self.capture = capture.__enter__()
        self.prepare()
        return self

    def window(self) -> Window:
        return Window.empty(self.tally.n_layers, self.tally.n_experts, self.coactivation)

    def prepare(self) -> None:
        """Set up what the next step needs beyond counting."""
        assert self.capture is not None
        coming = self.now + 1
        self.capture.deciding = coming % self.decisions_every == 0 or coming % self.every == 0
        measuring = self.gradients_every and coming % self.gradients_every == 0
        self.gradients = RouterGradients(self.blocks) if measuring else None

    # --- a pass, a step

    def pass_ended(self, output: Any, given: dict[str, Any]) -> None:
        losses = losses_of(output, getattr(self.model, "config", None)) if self.gradients else None
        self.losses_add_up = given.get("num_items_in_batch") is not None
        if isinstance(loss := getattr(output, "loss", None), Tensor):
            aux = getattr(output, "aux_loss", None)
            self.tally.losses.append(
                (loss.detach().clone(), aux.detach() if isinstance(aux, Tensor) else None)
            )  # a Trainer may scale it in place
        if losses is not None and torch.is_grad_enabled():
            self.measure_gradients(*losses, already_scaled=self.losses_add_up)

    def measure_gradients(
        self, lm_loss: Tensor, aux_loss: Tensor | None = None, already_scaled: bool = False
    ) -> None:
        """Take both losses' gradients into the routers, if this is a step for it. Done by itself where the
        model returns its loss;
        a loop that makes its own calls this before `backward`, `aux_loss` times its coefficient."""
        if self.gradients is None:
            return
        start = time.perf_counter()
        try:
            self.gradients.add(lm_loss, aux_loss, already_scaled)
        except (
            RuntimeError
        ) as error:  # reentrant checkpointing and sharded weights do not allow it; training must go on
            logger.warning(
                "moescope: gradients into routers cannot be taken here: %s", str(error).splitlines()[0]
            )
            self.gradients, self.gradients_every = None, 0
        self.took("gradients", start)

    def step(self, **facts: float | None) -> dict[str, float]:
        """To be called after each optimiser step; returns new numbers for a tracker every `every` steps, else
        nothing.

        `facts` may be columns of the steps table: learning_rate, gradient_norm, validation_loss ...
        """
        self.end_step(self.now + 1)
        if self.now % self.every:
            return {}
        found = self.numbers(**facts)
        self.close_window()
        self.write()
        return found

    def end_step(self, step: int) -> None:
        assert self.capture is not None, "watch(model) comes first"
        if self.capture.waiting:  # the model's parts were called, not the model
            self.capture.count()
        self.now = step
        if self.gradients is not None and self.gradients.passes:
            self.recent_gradients = self.gradients.rows(step, self.ranks_add_up)
            self.keep("router_gradients", self.recent_gradients)
        if self.scan_every and step % self.scan_every == 0:
            self.scan_weights(step)
        self.prepare()

    def scan_weights(self, step: int) -> None:
        if not first_rank() or self.scan is None:
            return
        start = time.perf_counter()
        for name, frame in self.scan(self.model, step).items():
            self.keep(name, [frame])
        self.took("scan", start)

    def keep(self, table: str, rows: list[Any]) -> None:
        if self.run is not None:  # the first rank writes for all
            self.buffer.setdefault(table, []).extend(rows)

    def took(self, stage: str, start: float) -> None:
        if self.run is not None:
            timings = self.run.writer.timings
            timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start

    # --- numbers and tables

    def pull(self) -> None:
        """Fetch the counts from all ranks' devices, once a step: the only time anything waits for them."""
        if self.pulled == self.now:
            return
        self.pulled = self.now
        moved = self.tally.moved(next(self.model.parameters()).device)
        self.since_tables.add(moved)
        self.since_log.add(moved)
        self.tokens += int(moved.tokens_L[0])

    def numbers(self, **facts: Any) -> dict[str, float]:
        """The numbers since the last call, and a row of the steps table with them.

        Every rank must call it.
        """
        self.pull()
        window, seconds, steps = (
            self.since_log,
            time.perf_counter() - self.since,
            max(self.now - self.logged, 1),
        )
        world = torch.distributed.get_world_size() if distributed() else 1
        passes, loss, aux = window.losses
        row: dict[str, Any] = {"step": self.now, "tokens": self.tokens, "step_seconds": seconds / steps}
        row["tokens_per_second"] = float(window.tokens_L[0]) / seconds
        if passes:
            per_pass = passes / world
            coefficient = getattr(getattr(self.model, "config", None), "router_aux_loss_coef", None) or 0.0
            coefficient = 1.0 if self.blocks[0].hands_out else coefficient  # which weighs its losses itself
            over = steps if self.losses_add_up else per_pass
            over *= 1 if self.losses_add_up and self.ranks_add_up else world
            row |= {"train_loss": loss / over, "lm_loss": (loss - coefficient * aux) / over}
            row["aux_loss"] = aux / passes if aux else None
        if torch.cuda.is_available() and next(self.model.parameters()).is_cuda:
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self.keep("steps", [row | {name: value for name, value in facts.items() if value is not None}])
        found = scalars(window, self.blocks, self.alerts, self.recent_gradients)
        self.since_log, self.logged, self.since, self.recent_gradients = (
            self.window(),
            self.now,
            time.perf_counter(),
            [],
        )
        return found

    def close_window(self) -> None:
        """Judge the steps since the last tables, and leave their tables to be made beside training.

        Every rank must call it.
        """
        if self.now == self.flushed:
            return
        start = time.perf_counter()
        self.pull()
        window, self.since_tables = self.since_tables, self.window()
        self.flushed = self.now
        if self.run is None:
            return
        names = {block.layer: block.name for block in self.blocks}
        for alert in self.watcher.judge(window, self.now, self.tally.k_L):
            self.alerts += 1
            logger.warning("moescope: %s", alert["message"])
            self.keep("alerts", [{**alert, "layer_name": names[alert["layer"]]}])
        # Routers as they are now, not when the thread comes to it.
        routers = [
            None if (rows_ED := block.rows_ED) is None else rows_ED.detach().clone() for block in self.blocks
        ]
        places = [Place(block.layer, block.name, block.n_experts) for block in self.blocks]
        self.unmade.append(
            partial(window_tables, window, places, routers, list(self.tally.k_L), self.now, self.coactivation)
        )
        self.took("judge", start)

    def write(self, closing: bool = False) -> None:
        """Bring the tables made so far to disk, while training goes on."""
        ready = self.unmade or (closing and self.buffer)
        if self.run is None or not ready:
            return
        start = time.perf_counter()
        assert self.capture is not None
        if self.capture.misfits:
            note = (
                f"layers {sorted(self.capture.misfits)}: the attention mask does not fit their "
                "tokens, so padding may be counted"
            )
            self.run.writer.info["warnings"] = sorted({*self.run.writer.info["warnings"], note})
        state = {"tokens": self.tokens, "alerts": self.alerts, **self.watcher.state()}
        self.run.flush(self.flushed, self.buffer, state, self.unmade)
        self.buffer, self.unmade = {}, []
        self.took("write", start)

    def flush(self) -> None:
        """Write the tables up to this step now, for instance when a checkpoint is saved.

        A training resumed there loses none.
        """
        if self.logged < self.now:
            self.numbers()
        self.settle(closing=True)

    def settle(self, closing: bool = False) -> None:
        self.close_window()
        self.write(closing)
        if self.run is not None:
            self.run.wait()

    def close(self) -> Run | None:
        """Write what is left, join the tables and take the hooks off. Returns the run (on the first rank)."""
        if self.capture is None:
            return None
        self.flush()
        self.capture.__exit__(None, None, None)
        self.capture = None
        if self.run is None:
            return None
        finished, self.run = self.run.finish(), None
        return finished

    def stop(self, error: str | None = None) -> None:
        """Take the hooks off and leave the run unfinished.

        With an error, what was counted is written first and the run has failed.
        """
        if self.capture is None:
            return
        if error is not None:
            self.flush()
        self.capture.__exit__(None, None, None)
        self.capture = None
        if self.run is not None:
            run, self.run = self.run, None
            run.abandon(error)


def first_rank() -> bool:
    return not distributed() or torch.distributed.get_rank() == 0
