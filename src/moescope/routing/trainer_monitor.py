"""The monitor as a callback of transformers' Trainer.

Its numbers join the Trainer's own log, its tables the output folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.routing.monitor_loop import LoopMonitor, logger

try:
    from transformers import TrainerCallback
except ImportError:  # the plain loop does without
    TrainerCallback = object  # type: ignore[misc,assignment]

LOGGED = {
    "loss": "train_loss",
    "grad_norm": "gradient_norm",
    "learning_rate": "learning_rate",
}  # Trainer's word: ours


class TrainerMonitor(LoopMonitor, TrainerCallback):
    """`callbacks=[Monitor()]`.

    Its numbers stand in every training log, so whatever `report_to` names gets them.
    """

    log_numbers: dict[str, float]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        if getattr(args, "n_gpu", 1) > 1:
            raise BadInput(
                f"{args.n_gpu} GPUs in one process (DataParallel): Monitor cannot count over its "
                "copies of the model; "
                "start with torchrun, or show one GPU with CUDA_VISIBLE_DEVICES"
            )
        self.log_numbers = {}
        self.ranks_add_up = bool(getattr(args, "average_tokens_across_devices", False))
        move_before_trackers(self)
        self.watch(model, state.global_step, Path(args.output_dir), "moescope")

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.write()  # tables of the step before, now that its log and its evaluation are in them

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.end_step(state.global_step)
        if control.should_log:
            self.log_numbers = self.numbers()
        if self.now % self.every == 0:
            self.close_window()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if control.should_log and self.logged < self.now:
            self.log_numbers = self.numbers()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any
    ) -> None:
        if self.capture is None or logs is None or "loss" not in logs:
            return
        numbers, self.log_numbers = self.log_numbers, {}
        logs.update(numbers)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(numbers)
        self.note(state.global_step, **{ours: logs.get(theirs) for theirs, ours in LOGGED.items()})

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **given: Any
    ) -> None:
        if self.capture is not None and metrics and "eval_loss" in metrics:
            self.note(state.global_step, validation_loss=metrics["eval_loss"])

    def note(self, step: int, **facts: Any) -> None:
        """Add to this step's row of the steps table; one that has none yet gets it."""
        if self.run is None:
            return
        rows = self.buffer.setdefault("steps", [])
        if not rows or rows[-1]["step"] != step:
            rows.append({"step": step})
        rows[-1].update({name: float(value) for name, value in facts.items() if value is not None})

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.capture is not None:
            self.settle()  # so that a training resumed from this checkpoint goes on with whole tables

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()


def move_before_trackers(monitor: Any) -> None:
    """Put the callback right behind the Trainer's own: trackers take a log as it is when their turn comes.

    A callback is not told who calls it, so the caller is looked for on the stack.
    """
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        logger.warning(
            "moescope: not called by a Trainer's callback handler; trackers may not get the numbers"
        )
        return
    handler = frame.f_locals["self"]
    others = [callback for callback in handler.callbacks if callback is not monitor]
    own = sum(isinstance(callback, DefaultFlowCallback) for callback in others[:1])
    handler.callbacks = [*others[:own], monitor, *others[own:]]
