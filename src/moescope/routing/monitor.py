"""The Monitor of a plain PyTorch loop: counts a model's routing while it is trained, into a run folder."""

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
from moescope.routing.monitor_capture import RouterGradients, TrainingCapture, losses_of
from moescope.routing.monitor_run import (
    AlertState,
    Thresholds,
    TrainingRun,
    choose_folder,
    log_scalars,
    window_tables,
)
from moescope.routing.monitor_tally import Place, StepTally, Window, is_distributed
from moescope.run import Run
from moescope.types import Routing
from moescope.verbs import load_verb

if TYPE_CHECKING:
    import pandas as pd

    from moescope.verb import Verb

Scan = Callable[[nn.Module, int], dict[str, "pd.DataFrame"]]
logger = logging.getLogger("moescope")
FSDP_GRADIENTS = (
    "2.12"  # of torch: before, a backward pass through FSDP besides the training's own ends the process
)


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
        for name, value, least in (
            ("every", every, 1),
            ("decisions_every", decisions_every, 1),
            ("gradients_every", gradients_every, 0),
            ("scan_every", scan_every, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise BadInput(f"{name} {value}: must be a whole number from {least}")
        if scan_every and scan is None:
            raise BadInput(f"scan_every {scan_every}: no scan function; pass scan=moescope.scan_model")
        self.out, self.overwrite = out, overwrite
        self.every, self.decisions_every = every, decisions_every
        self.gradients_every, self.scan_every, self.scan = gradients_every, scan_every, scan
        self.coactivation = coactivation
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
        capture = TrainingCapture(model, lambda blocks: StepTally(blocks, self.coactivation))
        self.blocks, self.tally, self.model = capture.blocks, capture.tally, model
        self.check_sharded()
        layers, n_experts = zip(*((block.layer, block.n_experts) for block in self.blocks), strict=True)
        shape = {"layers": list(layers), "n_experts": list(n_experts)}
        self.now = self.flushed = self.logged = step
        self.pulled = -1
        self.tokens, self.alerts = 0, 0
        certain = [
            block.layer for block in self.blocks if getattr(block.router, "expects_low_entropy", False)
        ]
        self.alert_state = AlertState.start(
            self.thresholds, shape["layers"], shape["n_experts"], step, certain
        )
        if is_first_rank():
            kind = self.blocks[0].model_type
            options = ("every", "decisions_every", "gradients_every", "scan_every", "coactivation")
            arguments = {**{name: getattr(self, name) for name in options}, **asdict(self.thresholds)}
            self.folder = choose_folder(self.out, base, stem or f"monitor-{kind}", step, self.overwrite)
            self.run = TrainingRun(
                self.folder,
                verb or load_verb("monitor"),
                identity or {"arguments": arguments, "model_type": kind, **shape},
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
                warnings.append(
                    f"layers {capture.unchecked}: not checked, because dropout makes experts random"
                )
            if step and not self.run.state:
                warnings.append(f"{self.folder} has no tables of the steps up to {step}")
            self.run.writer.save_info(warnings=warnings, low_entropy_expected=certain)
        self.since_tables, self.since_log = self.window(), self.window()
        self.buffer: dict[str, list[Any]] = {}
        self.deferred: list[Callable[[], dict[str, list[Any]]]] = []  # tables that the writing thread makes
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
        routers = any(is_sharded(weight) for block in self.blocks for weight in block.router.parameters())
        crashes = torch.__version__ < FSDP_GRADIENTS and any(map(is_sharded, self.model.parameters()))
        if not routers and not crashes:
            return
        if self.scan_every and routers:
            raise BadInput(
                f"scan_every {self.scan_every}: the weights are sharded; scan the checkpoints that you save"
            )
        if self.gradients_every and is_first_rank():
            why = "the weights are sharded" if routers else f"FSDP with torch before {FSDP_GRADIENTS} crashes"
            logger.warning("moescope: router gradients cannot be measured here: %s", why)
        self.gradients_every = 0

    def window(self) -> Window:
        return Window.empty(self.tally.n_layers, self.tally.n_experts, self.coactivation)

    def prepare(self) -> None:
        """Set up what the next step measures besides counts."""
        assert self.capture is not None
        coming = self.now + 1
        self.capture.deciding = coming % self.decisions_every == 0 or coming % self.every == 0
        measuring = self.gradients_every and coming % self.gradients_every == 0
        self.gradients = RouterGradients(self.blocks) if measuring else None

    # --- a pass, a step

    def pass_ended(self, output: Any, inputs: dict[str, Any]) -> None:
        losses = losses_of(output, getattr(self.model, "config", None)) if self.gradients else None
        self.losses_add_up = inputs.get("num_items_in_batch") is not None
        if isinstance(loss := getattr(output, "loss", None), Tensor):
            aux = getattr(output, "aux_loss", None)
            aux = aux.detach() if isinstance(aux, Tensor) else None
            self.tally.losses.append((loss.detach().clone(), aux))  # a Trainer may scale it in place
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
        start = time.perf_counter()
        try:
            self.gradients.add(lm_loss, aux_loss, already_scaled)
        except RuntimeError as error:  # reentrant checkpointing: training must go on
            reason = str(error).splitlines()[0]
            logger.warning("moescope: router gradients cannot be measured here: %s", reason)
            self.gradients, self.gradients_every = None, 0
        self.took("gradients", start)

    def step(self, **facts: float | None) -> dict[str, float]:
        """Call after each optimiser step; returns numbers for a tracker every `every` steps, else nothing.

        `facts` may be columns of the steps table: learning_rate, gradient_norm, validation_loss ...
        """
        self.end_step(self.now + 1)
        if self.now % self.every:
            return {}
        numbers = self.numbers(**facts)
        self.close_window()
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
            start = time.perf_counter()
            for name, frame in self.scan(self.model, step).items():
                self.keep(name, [frame])
            self.took("scan", start)
        self.prepare()

    def keep(self, table: str, rows: list[Any]) -> None:
        if self.run is not None:  # the first rank writes for all
            self.buffer.setdefault(table, []).extend(rows)

    def took(self, stage: str, start: float) -> None:
        if self.run is not None:
            timings = self.run.writer.timings
            timings[stage] = timings.get(stage, 0.0) + time.perf_counter() - start

    # --- numbers and tables

    def pull(self) -> None:
        """Fetch the counts from all ranks' devices, once per step: the only time anything waits for them."""
        if self.pulled == self.now:
            return
        self.pulled = self.now
        window = self.tally.take(next(self.model.parameters()).device)
        self.since_tables.add(window)
        self.since_log.add(window)
        self.tokens += int(window.tokens_L[0])

    def numbers(self, **facts: Any) -> dict[str, float]:
        """Return the numbers since the last call, and add a row to the steps table. Collective."""
        self.pull()
        window, seconds = self.since_log, time.perf_counter() - self.since
        steps = max(self.now - self.logged, 1)
        world = torch.distributed.get_world_size() if is_distributed() else 1
        passes, loss, aux = window.losses
        row: dict[str, Any] = {"step": self.now, "tokens": self.tokens, "step_seconds": seconds / steps}
        row["tokens_per_second"] = float(window.tokens_L[0]) / seconds
        if passes:
            per_pass = passes / world
            coefficient = getattr(getattr(self.model, "config", None), "router_aux_loss_coef", None) or 0.0
            coefficient = 1.0 if self.blocks[0].hands_out else coefficient  # weighs its losses itself
            over = steps if self.losses_add_up else per_pass
            over *= 1 if self.losses_add_up and self.ranks_add_up else world
            row |= {"train_loss": loss / over, "lm_loss": (loss - coefficient * aux) / over}
            row["aux_loss"] = aux / passes if aux else None
        if torch.cuda.is_available() and next(self.model.parameters()).is_cuda:
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        self.keep("steps", [row | {name: value for name, value in facts.items() if value is not None}])
        numbers = log_scalars(window, self.blocks, self.alerts, self.recent_gradients)
        self.since_log, self.logged, self.since = self.window(), self.now, time.perf_counter()
        self.recent_gradients = []
        return numbers

    def close_window(self) -> None:
        """Raise the alerts of the steps since the last tables, which a thread then makes. Collective."""
        if self.now == self.flushed:
            return
        start = time.perf_counter()
        self.pull()
        window, self.since_tables = self.since_tables, self.window()
        self.flushed = self.now
        # copies: routers as they are now, not when the thread comes to it
        routers = [
            None if (rows_ED := block.rows_ED) is None else whole_copy(rows_ED) for block in self.blocks
        ]
        if self.run is None:
            return
        names = {block.layer: block.name for block in self.blocks}
        for alert in self.alert_state.new_alerts(window, self.now, self.tally.k_L):
            self.alerts += 1
            logger.warning("moescope: %s", alert["message"])
            self.keep("alerts", [{**alert, "layer_name": names[alert["layer"]]}])
        places = [Place(block.layer, block.name, block.n_experts) for block in self.blocks]
        self.deferred.append(
            partial(window_tables, window, places, routers, list(self.tally.k_L), self.now, self.coactivation)
        )
        self.took("judge", start)

    def write(self, closing: bool = False) -> None:
        """Write the tables collected so far, while training goes on."""
        ready = self.deferred or (closing and self.buffer)
        if self.run is None or not ready:
            return
        start = time.perf_counter()
        assert self.capture is not None
        if self.capture.misfits:
            warning = (
                f"layers {sorted(self.capture.misfits)}: the attention mask does not fit their tokens, so "
                "padding may be counted"
            )
            self.run.writer.info["warnings"] = sorted({*self.run.writer.info["warnings"], warning})
        state = {"tokens": self.tokens, "alerts": self.alerts, **self.alert_state.state()}
        self.run.flush(self.flushed, self.buffer, state, self.deferred)
        self.buffer, self.deferred = {}, []
        self.took("write", start)

    def flush(self) -> None:
        """Write the tables up to this step now, for example when a checkpoint is saved."""
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
        if self.capture is None:
            return None
        self.flush()
        self.capture.__exit__(None, None, None)
        self.capture = None
        if self.run is None:
            return None
        run, self.run = self.run, None
        try:
            return run.finish()
        except BaseException as error:
            run.abandon(str(error) or type(error).__name__)
            raise

    def stop(self, error: str | None = None) -> None:
        """Remove the hooks, leave the run unfinished; with an error, write the counts and mark it failed."""
        if self.capture is None:
            return
        if error is not None:
            self.flush()
        self.capture.__exit__(None, None, None)
        self.capture = None
        if self.run is not None:
            run, self.run = self.run, None
            run.abandon(error)


def is_first_rank() -> bool:
    return not is_distributed() or torch.distributed.get_rank() == 0


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if type(model).__name__ == "DistributedDataParallel":
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_sharded(weight: Tensor) -> bool:
    """Whether each rank holds a part of the weight only (a DTensor, as FSDP2 makes them)."""
    return hasattr(weight, "full_tensor")


def whole_copy(weight: Tensor) -> Tensor:
    """Copy a weight; collective where it is sharded."""
    whole: Any = weight.detach()
    return whole.full_tensor() if is_sharded(weight) else whole.clone()
