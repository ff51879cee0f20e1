"""The training loop.

The same losses step for step whether it runs through, is killed and taken up, or is shared by several ranks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moescope.decoder.model import LabModel
from moescope.decoder.ranks import Ranks
from moescope.lab.batches import IGNORED, TokenRows
from moescope.lab.config import LabConfig
from moescope.lab.divergence import FiniteWatch
from moescope.lab.evaluation import Evaluation, evaluate
from moescope.lab.optimising import clip_gradients, learning_rate, make_optimiser
from moescope.lab.sharding import average_whole, share_out, whole_model
from moescope.lab.training_state import TrainingState, save_state
from moescope.routing.monitor_loop import LoopMonitor

LOG_EVERY = 10  # steps; more often where evaluations or checkpoints come more often
Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Data:
    """Rows to train on, and those that evaluation reads."""

    train: TokenRows
    validation: TokenRows


@dataclass
class Training:
    """One training of one model. `run` begins at `step`, which a restored state has moved on."""

    config: LabConfig
    model: LabModel
    data: Data
    device: str = "cpu"
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sharing_out = self.config.train.parallel == "fsdp" and self.ranks.world > 1
        if self.sharing_out:
            share_out(self.model, self.device, self.ranks)
        self.optimiser = make_optimiser(self.model, self.config.train, self.device)
        self.logged: list[
            Tensor
        ] = []  # of each step since the last log: language-model loss, auxiliary loss, gradient norm
        self.whole: nn.Module = self.model
        for router in self.model.routers:
            router.ranks = self.ranks
        if self.ranks.world > 1 and not self.sharing_out:
            self.whole = shared_by_ranks(self.model, self.device)

    def restore(self, state: TrainingState) -> None:
        state.restore(self.model, self.optimiser, self.ranks)
        self.step, self.evaluations = state.step, list(state.evaluations)

    # --- one step

    def one_step(self, watch: FiniteWatch) -> None:
        """Forward and backward over this rank's share of every micro-batch, one optimiser step.

        One step of the routers.
        """
        train = self.config.train
        rate = learning_rate(self.step, train)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        batch = self.data.train.of_step(self.step, train.batch_size, train.seed)
        targets = int((batch.targets_BL != IGNORED).sum())
        lm_loss, aux_loss = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for micro in range(train.micro_batches):
            rows = self.share(micro)
            ids, mask, wanted = (
                self.moved(part[rows]) for part in (batch.ids_BL, batch.mask_BL, batch.targets_BL)
            )
            share = int((batch.targets_BL[rows] != IGNORED).sum()) / max(targets, 1)
            last = micro == train.micro_batches - 1
            with self.no_sync() if not last else nullcontext():
                with torch.autocast(
                    self.device.split(":")[0], torch.bfloat16, enabled=train.dtype == "bfloat16"
                ):
                    output = self.whole(ids, mask_BL=mask, targets_BL=wanted)
                # Every target of the step counts alike, wherever it lies; ranks' gradients are averaged, so
                # their shares are scaled up.
                loss = output.lm_loss * (share * self.ranks.world) + output.aux_loss / train.micro_batches
                loss.backward()
            lm_loss += output.lm_loss.detach() * share
            aux_loss += output.aux_loss.detach() / (train.micro_batches * self.ranks.world)
        if self.sharing_out:
            average_whole(self.model, self.ranks)
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norms_P = clip_gradients(gradients, train.clip, self.ranks)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.model.after_step()
        self.step += 1
        self.logged.append(
            torch.stack([lm_loss, aux_loss, torch.linalg.vector_norm(norms_P) / self.ranks.world])
        )
        watch.step_ended(self.step, lm_loss, norms_P)

    def share(self, micro: int) -> slice:
        """This rank's rows of a micro-batch.

        All ranks' together are the rows that one process alone would take.
        """
        train = self.config.train
        size = train.batch_size // train.micro_batches
        own = size // self.ranks.world
        first = micro * size + self.ranks.rank * own
        return slice(first, first + own)

    def moved(self, part: NDArray[Any]) -> Tensor:
        """On the device; from pinned memory, so that nothing waits for the copy."""
        tensor = torch.from_numpy(part)
        return (
            tensor.pin_memory().to(self.device, non_blocking=True)
            if self.device.startswith("cuda")
            else tensor
        )

    def no_sync(self) -> AbstractContextManager[Any]:
        return (
            self.whole.no_sync()
            if isinstance(self.whole, nn.parallel.DistributedDataParallel)
            else nullcontext()
        )

    # --- all steps

    def run(
        self,
        monitor: LoopMonitor,
        folder: Path,
        save: Callable[[LabModel, int], None],
        advance: Advance = lambda label, amount: None,
    ) -> None:
        """Train to the last step. Checkpoints go through `save`; what is needed to go on lies in `folder`."""
        train = self.config.train
        self.model.train()
        watch = FiniteWatch(self.model)
        every = min(LOG_EVERY, train.evaluate_every, train.checkpoint_every)
        try:
            if self.step == 0 and not self.evaluations:
                self.evaluate(monitor)
                monitor.keep("steps", [{"step": 0, **validation_columns(self.evaluations)}])
            while self.step < train.steps:
                self.one_step(watch)
                monitor.end_step(self.step)
                last = self.step == train.steps
                evaluating = last or self.step % train.evaluate_every == 0
                saving = last or self.step % train.checkpoint_every == 0
                label = ""
                if self.step % every == 0 or evaluating or saving:
                    watch.check()
                    if evaluating:
                        self.evaluate(monitor)
                    label = self.log(monitor, evaluating)
                if self.step % monitor.every == 0:
                    monitor.close_window()
                    monitor.write()
                advance(label, 1)
                if saving:
                    monitor.flush()
                    model = whole_model(self.model, self.ranks.first) if self.sharing_out else self.model
                    if monitor.run is not None and model is not None:
                        save(model, self.step)
                    save_state(folder, self.step, self.model, self.optimiser, self.evaluations, self.ranks)
        finally:
            watch.close()

    def evaluate(self, monitor: LoopMonitor) -> None:
        """On the first rank, while the others wait; it does not count as time of the steps.

        Where each has a part of the weights, all take part.
        """
        if not self.ranks.first and not self.sharing_out:
            return
        began = time.perf_counter()
        size = max(self.config.train.batch_size // self.config.train.micro_batches, 1)
        found: Evaluation = evaluate(
            self.model, self.data.validation, self.step, size, self.device, self.config.train.dtype
        )
        self.evaluations.append(found.as_dict())
        if monitor.run is not None:
            monitor.run.wait()  # its thread writes run.json too
            monitor.run.writer.save_info(evaluations=self.evaluations)
        monitor.since += time.perf_counter() - began

    def log(self, monitor: LoopMonitor, evaluated: bool) -> str:
        """A row of the steps table over the steps since the last one; returns what a progress bar says."""
        summed = self.ranks.sum(torch.stack(self.logged).double()).cpu()
        self.logged = []
        lm_loss, aux_loss, norm = summed.mean(0).tolist()
        facts: dict[str, Any] = {
            "train_loss": lm_loss + aux_loss,
            "lm_loss": lm_loss,
            "aux_loss": aux_loss,
            "gradient_norm": norm,
            "learning_rate": learning_rate(self.step - 1, self.config.train),
            **(validation_columns(self.evaluations) if evaluated else {}),
        }
        if not self.device.startswith("cuda"):
            facts["peak_memory_bytes"] = process_peak()
        began, tokens = monitor.since, monitor.tokens
        found = monitor.numbers(**facts)
        speed = (monitor.tokens - tokens) / max(time.perf_counter() - began, 1e-9)
        busiest = found.get("moescope/max_over_mean_p50")
        load = (
            f", load {busiest:.1f}x" if busiest is not None else ""
        )  # of the busiest expert over the mean, median of layers
        return f"loss {lm_loss:.3f}{load}, {speed:,.0f} tokens/s"


def process_peak() -> int | None:
    """The most memory this process has held, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # which counts in bytes, Linux in kilobytes


def shared_by_ranks(model: LabModel, device: str) -> nn.Module:
    """The model under DDP.

    Buffers are left alone: routers make theirs from sums over ranks, so they are equal everywhere.
    """
    kind: Any = nn.parallel.DistributedDataParallel
    newer = "forward_sync_buffers" in signature(kind).parameters  # torch's second name for the same thing
    places = [torch.device(device)] if device.startswith("cuda") else None
    made: nn.Module = kind(
        model, device_ids=places, **{"forward_sync_buffers" if newer else "broadcast_buffers": False}
    )
    return made


def validation_columns(evaluations: list[dict[str, Any]]) -> dict[str, float | None]:
    if not evaluations:
        return {}
    return {
        "validation_loss": evaluations[-1]["loss"],
        "validation_loss_published": evaluations[-1]["published"],
    }
