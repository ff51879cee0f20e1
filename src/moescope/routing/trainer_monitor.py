"""moescope.Monitor: the Monitor as a callback of transformers' Trainer, or in two lines of any loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moescope.errors import BadInput, reason
from moescope.routing.monitor import LoopMonitor, Scan, Thresholds, logger
from moescope.run import Run

try:
    from transformers import TrainerCallback
except ImportError:  # a plain loop needs no transformers
    TrainerCallback = object  # type: ignore[misc,assignment]

# the Trainer's name in its log -> our column
LOGGED = {"loss": "train_loss", "grad_norm": "gradient_norm", "learning_rate": "learning_rate"}


class Monitor(LoopMonitor, TrainerCallback):
    """Monitor the routing of a model in training.

        Trainer(..., callbacks=[moescope.Monitor()])         # transformers

        monitor = moescope.Monitor().watch(model)            # or any loop
        monitor.step()                                       # after each optimiser step

    Its numbers join the Trainer's own log, so every tracker that `report_to` names receives them.

    Parameters
    ----------
    out : path
        Run folder; default moescope-1 in the Trainer's output folder, or runs/monitor-MODEL-N.
    every : int
        Steps between tables; alerts are raised then.
    decisions_every, gradients_every : int
        Steps between measurements of router logits, and of gradients into routers (0: never).
    scan_every : int
        Steps between scans of the weights by `scan` (0: never), on the first rank while the others wait.
    scan : callable
        Model and step -> tables, such as moescope.scan_model.
    coactivation : bool
        Also count pairs of experts.
    dead_steps, max_load, max_unused, min_entropy, max_cv : number
        Alert thresholds. Steps without a token for an expert; for as many steps, load of the busiest expert
        (0: even, 1: every token chooses it) and share of experts under a hundredth of the mean load; routing
        entropy in nats; CV of the loads over that of collapse, sqrt(n/k - 1), in two windows in a row.
    overwrite : bool
        Replace what the run folder holds.

    Examples
    --------
    >>> monitor = moescope.Monitor(scan_every=1000, scan=moescope.scan_model)  # doctest: +SKIP
    """

    log_numbers: dict[str, float]

    def __init__(
        self,
        out: str | Path | None = None,
        every: int = 100,
        decisions_every: int = 10,
        gradients_every: int = 500,
        scan_every: int = 0,
        scan: Scan | None = None,
        coactivation: bool = False,
        dead_steps: int = Thresholds.dead_steps,
        max_load: float = Thresholds.max_load,
        max_unused: float = Thresholds.max_unused,
        min_entropy: float = Thresholds.min_entropy,
        overwrite: bool = False,
        max_cv: float = Thresholds.max_cv,
    ):
        thresholds = Thresholds(dead_steps, max_load, max_unused, min_entropy, max_cv)
        steps = (every, decisions_every, gradients_every, scan_every)
        super().__init__(out, *steps, scan, coactivation, thresholds, overwrite)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            raise BadInput(
                f"{args.n_gpu} GPUs in one process (DataParallel): Monitor cannot count over copies of the "
                "model; start with torchrun, or show one GPU with CUDA_VISIBLE_DEVICES"
            )
        self.log_numbers = {}
        self.ranks_add_up = bool(getattr(args, "average_tokens_across_devices", False))
        move_before_trackers(self)
        self.watch(model, state.global_step, Path(args.output_dir), "moescope")

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.write()  # tables of the step before, which now hold its log and its evaluation

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.end_step(state.global_step)
        if self.now % self.every == 0:
            self.close_window()  # first: its alerts are among the numbers
        if control.should_log:
            self.log_numbers = self.numbers()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if control.should_log and self.logged < self.now:
            self.log_numbers = self.numbers()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        if self.capture is None or logs is None or "loss" not in logs:
            return
        numbers, self.log_numbers = self.log_numbers, {}
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)
        self.add_facts(state.global_step, **{ours: logs.get(theirs) for theirs, ours in LOGGED.items()})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **more: Any
    ) -> None:
        if self.capture is not None and metrics and "eval_loss" in metrics:
            self.add_facts(state.global_step, validation_loss=metrics["eval_loss"])

    def add_facts(self, step: int, **facts: Any) -> None:
        """Add values to this step's row of the steps table, or to a new row."""
        if self.run is None:
            return
        rows = self.buffer.setdefault("steps", [])
        if not rows or rows[-1]["step"] != step:
            rows.append({"step": step})
        rows[-1].update({name: float(value) for name, value in facts.items() if value is not None})

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.capture is not None:
            self.settle()  # a training resumed from this checkpoint then has complete tables

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.close()

    def close(self) -> Run | None:
        """Write the rest and remove the hooks; a run that cannot be written is said and marked failed."""
        try:
            return super().close()
        except Exception as error:  # a full disk: what the user does after the training must go on
            logger.warning("moescope: the run is not complete: %s", reason(error))
            return None


def move_before_trackers(monitor: Any) -> None:
    """Move the callback right behind the Trainer's own: trackers take a log as it is when their turn comes.

    A callback does not know its caller, so the caller is searched on the stack.
    """
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        logger.warning("moescope: not called by a Trainer; trackers may not receive the numbers")
        return
    handler = frame.f_locals["self"]
    others = [callback for callback in handler.callbacks if callback is not monitor]
    flow = sum(isinstance(callback, DefaultFlowCallback) for callback in others[:1])
    handler.callbacks = [*others[:flow], monitor, *others[flow:]]
