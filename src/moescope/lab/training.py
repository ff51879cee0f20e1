"""The training loop, its optimiser, and the check for NaN.

The losses are the same step for step whether it runs through, is killed and resumed, or is shared by ranks.
"""

from __future__ import annotations

import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moescope.decoder.model import LabModel, Output
from moescope.decoder.ranks import ALONE, Ranks
from moescope.errors import BadInput
from moescope.lab.batches import IGNORED, TokenRows
from moescope.lab.config import LabConfig, TrainConfig
from moescope.lab.evaluation import evaluate
from moescope.lab.training_state import (
    TrainingState,
    average_replicated,
    is_sharded,
    local_part,
    replicated_parameters,
    save_state,
    shard_model,
    unsharded_model,
)
from moescope.routing.monitor import LoopMonitor
from moescope.types import Routing

LOG_EVERY = 10  # steps; more often where evaluations or checkpoints come more often
BETAS = (0.9, 0.95)
WARM_STEPS = 3  # before one is captured: libraries set themselves up in the first
Advance = Callable[[str, int], None]
logger = logging.getLogger("moescope")


@dataclass(frozen=True)
class Data:
    """Rows to train on, and rows to evaluate on."""

    train: TokenRows
    validation: TokenRows


@dataclass
class Training:
    """One training of one model. `run` starts at `step`, which `restore` sets."""

    config: LabConfig
    model: LabModel
    data: Data
    device: str = "cpu"
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    unigram: dict[str, float] = field(default_factory=dict)  # the baseline's loss by domain; "": all

    def __post_init__(self) -> None:
        if self.device.startswith("cuda:"):  # for streams, random numbers and peak memory
            torch.cuda.set_device(self.device)
        self.sharded = self.config.train.parallel == "fsdp" and self.ranks.world > 1
        if self.sharded:
            shard_model(self.model, self.device, self.ranks)
        self.optimiser = make_optimiser(self.model, self.config.train, self.device)
        self.logged: list[Tensor] = []  # per step since the last log: LM loss, auxiliary loss, gradient norm
        self.rate = torch.zeros((), device=self.device) if self.device.startswith("cuda") else None
        self.graph: StepGraph | None = None
        train, dtype = self.config.train, getattr(torch, self.config.train.dtype)
        self.capturable = (
            self.rate is not None
            and self.ranks.world * train.micro_batches == 1
            and not any(block.mlp.experts.waits(dtype) for block in self.model.blocks)
        )
        self.warm = 0  # steps that could have been captured
        self.parallel: nn.Module = self.model
        for router in self.model.routers:
            router.ranks = self.ranks
        if self.ranks.world > 1 and not self.sharded:
            self.parallel = distributed(self.model, self.device)

    def restore(self, state: TrainingState) -> None:
        state.restore(self.model, self.optimiser, self.ranks)
        self.step, self.evaluations = state.step, list(state.evaluations)

    # --- one step

    def one_step(self, watch: FiniteWatch, monitor: LoopMonitor | None = None) -> None:
        """Train on this rank's share of every micro-batch: one step of the optimiser and of the routers."""
        train = self.config.train
        self.set_rate(learning_rate(self.step, train))
        batch = self.data.train.of_step(self.step, train.batch_size, train.seed)
        targets = int((batch.targets_BL != IGNORED).sum())
        micro_batches = []
        for micro in range(train.micro_batches):
            rows = self.share(micro)
            parts = (batch.ids_BL[rows], batch.mask_BL[rows], batch.targets_BL[rows])
            share = int((parts[2] != IGNORED).sum()) / max(targets, 1)
            micro_batches.append((tuple(self.to_device(part) for part in parts), share))
        # gradients into routers need a backward pass of their own
        graph = None if monitor is None or monitor.gradients else self.captured(micro_batches[0][0], watch)
        if graph is not None and monitor is not None:
            losses, norms_P = graph.run(micro_batches[0][0], watch, monitor)
        else:
            losses, norms_P = self.update(micro_batches, self.parallel)
        self.step += 1
        norm = torch.linalg.vector_norm(norms_P) / self.ranks.world
        self.logged.append(torch.cat([losses, norm[None]]))
        watch.step_ended(self.step, losses[0], norms_P)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate; on a GPU where a captured step reads it."""
        if self.rate is not None:
            self.rate.fill_(rate)
        for group in self.optimiser.param_groups:
            group["lr"] = rate if self.rate is None else self.rate

    def update(
        self, micro_batches: Sequence[tuple[tuple[Tensor, ...], float]], forward: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Compute gradients and change the weights; return both losses, and the norm of each gradient."""
        train = self.config.train
        losses = torch.zeros(2, device=self.device)
        for number, ((ids, mask, wanted), share) in enumerate(micro_batches, 1):
            with self.no_sync() if number < len(micro_batches) else nullcontext():
                bf16 = train.dtype == "bfloat16"
                with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=bf16):
                    output = forward(ids, mask_BL=mask, targets_BL=wanted)
                # Every target of the step has the same weight; DDP averages over ranks, hence the world.
                loss = output.lm_loss * (share * self.ranks.world) + output.aux_loss / train.micro_batches
                loss.backward()
            aux_loss = output.aux_loss.detach() / (train.micro_batches * self.ranks.world)
            losses += torch.stack([output.lm_loss.detach() * share, aux_loss])
        if self.sharded:
            average_replicated(self.model, self.ranks)
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norms_P = clip_gradients(gradients, train.clip, self.ranks)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.model.after_step()
        return losses, norms_P

    def captured(self, batch: tuple[Tensor, ...], watch: FiniteWatch) -> StepGraph | None:
        """Return the step as a CUDA graph, once it has run a few times; None where it cannot be one."""
        self.warm += self.capturable
        if self.graph is None and self.warm > WARM_STEPS:
            try:
                self.graph = StepGraph(self.model, self.update, batch, watch)
            except RuntimeError as error:  # nothing was computed: the step can still be launched
                reason = str(error).splitlines()[0]
                logger.warning("moescope: steps run without a CUDA graph: %s", reason)
                self.capturable, self.warm = False, 0
                self.optimiser.zero_grad()
                watch.sums = []
                for router in self.model.routers:
                    router.accumulated.clear()
        return self.graph

    def share(self, micro: int) -> slice:
        """Return this rank's rows of a micro-batch; together the ranks take the rows of a single process."""
        train = self.config.train
        size = train.batch_size // train.micro_batches
        share = size // self.ranks.world
        first = micro * size + self.ranks.rank * share
        return slice(first, first + share)

    def to_device(self, part: NDArray[Any]) -> Tensor:
        """Copy to the device from pinned memory, so that nothing waits for the copy."""
        tensor = torch.from_numpy(part)
        if not self.device.startswith("cuda"):
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def no_sync(self) -> AbstractContextManager[Any]:
        if isinstance(self.parallel, nn.parallel.DistributedDataParallel):
            return self.parallel.no_sync()
        return nullcontext()

    # --- all steps

    def run(
        self,
        monitor: LoopMonitor,
        folder: Path,
        save: Callable[[LabModel, int], None],
        advance: Advance = lambda label, amount: None,
    ) -> None:
        """Train to the last step. `save` writes checkpoints; `folder` gets the state to resume from."""
        train = self.config.train
        self.model.train()
        watch = FiniteWatch(self.model)
        every = min(LOG_EVERY, train.evaluate_every, train.checkpoint_every)
        try:
            if self.step == 0 and not self.evaluations:
                self.evaluate(monitor)
                monitor.keep("steps", [{"step": 0, **validation_columns(self.evaluations)}])
            while self.step < train.steps:
                self.one_step(watch, monitor)
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
                    model = unsharded_model(self.model, self.ranks.first) if self.sharded else self.model
                    if monitor.run is not None and model is not None:
                        save(model, self.step)
                    save_state(folder, self.step, self.model, self.optimiser, self.evaluations, self.ranks)
        finally:
            watch.close()

    def evaluate(self, monitor: LoopMonitor) -> None:
        """Evaluate on the first rank (on all where weights are sharded), excluded from the steps' time."""
        if not self.ranks.first and not self.sharded:
            return
        began = time.perf_counter()
        size = max(self.config.train.batch_size // self.config.train.micro_batches, 1)
        rows, dtype = self.data.validation, self.config.train.dtype
        self.evaluations.append(asdict(evaluate(self.model, rows, self.step, size, self.device, dtype)))
        monitor.keep("evaluations", self.evaluation_rows())
        monitor.since += time.perf_counter() - began

    def evaluation_rows(self) -> list[dict[str, Any]]:
        """Return the last evaluation as rows of the table, all domains together first."""
        last, uniform = self.evaluations[-1], math.log(self.config.model.vocabulary)
        losses = {"": last["loss"], **last["domains"]}
        return [
            {
                "step": last["step"],
                "domain": domain,
                "loss": loss,
                "unigram_loss": self.unigram.get(domain),
                "uniform_loss": uniform,
            }
            for domain, loss in losses.items()
        ]

    def log(self, monitor: LoopMonitor, evaluated: bool) -> str:
        """Write a row of the steps table over the steps since the last; return the progress bar's text."""
        summed = self.ranks.sum(torch.stack(self.logged).double()).cpu()
        self.logged = []
        lm_loss, aux_loss, norm = summed.mean(0).tolist()
        row: dict[str, Any] = {
            "train_loss": lm_loss + aux_loss,
            "lm_loss": lm_loss,
            "aux_loss": aux_loss,
            "gradient_norm": norm,
            "gradient_clip": self.config.train.clip or None,
            "learning_rate": learning_rate(self.step - 1, self.config.train),
            **(validation_columns(self.evaluations) if evaluated else {}),
        }
        if not self.device.startswith("cuda"):
            row["peak_memory_bytes"] = process_peak()
        began, tokens = monitor.since, monitor.tokens
        metrics = monitor.numbers(**row)
        speed = (monitor.tokens - tokens) / max(time.perf_counter() - began, 1e-9)
        busiest = metrics.get("moescope/max_over_mean_p50")  # busiest expert over the mean, median of layers
        load = "" if busiest is None else f", load {busiest:.1f}x"
        return f"loss {lm_loss:.3f}{load}, {speed:,.0f} tokens/s"


def process_peak() -> int | None:
    """Return the peak memory of this process in bytes; None on Windows."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, Linux kilobytes


def distributed(model: LabModel, device: str) -> nn.Module:
    """Return the model under DDP without syncing buffers: routers compute theirs from sums over ranks."""
    kind: Any = nn.parallel.DistributedDataParallel
    newer = "forward_sync_buffers" in signature(kind).parameters  # torch's newer name of the option
    places = [torch.device(device)] if device.startswith("cuda") else None
    option = "forward_sync_buffers" if newer else "broadcast_buffers"
    parallel: nn.Module = kind(model, device_ids=places, **{option: False})
    return parallel


def validation_columns(evaluations: list[dict[str, Any]]) -> dict[str, float | None]:
    if not evaluations:
        return {}
    return {
        "validation_loss": evaluations[-1]["loss"],
        "validation_loss_published": evaluations[-1]["published"],
    }


# --- a step without the host


class StepGraph:
    """One step on a GPU as a CUDA graph: a thousand small kernels in one launch.

    Small models train several times as fast: their kernels are shorter than the host takes to start them.
    Replaying runs no Python, so what hooks would have seen is handed on afterwards.
    """

    def __init__(
        self, model: LabModel, update: Callable[..., Any], batch: tuple[Tensor, ...], watch: FiniteWatch
    ):
        before = torch.cuda.current_stream()
        free, _ = torch.cuda.mem_get_info()
        if 2 * torch.cuda.max_memory_reserved() > free:  # its memory is its own
            raise RuntimeError(f"only {free / 1e9:.1f} GB of GPU memory are free")
        self.model, self.batch = model, tuple(part.clone() for part in batch)
        self.routings: list[Routing] = []
        self.graph = torch.cuda.CUDAGraph()
        gc.collect()  # an older graph must not end while this one is captured
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            # thread_local: another thread makes the Monitor's tables meanwhile
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self.losses, self.norms_P = update([(self.batch, 1.0)], self.forward)
        finally:
            torch.cuda.set_stream(before)
        self.sums, watch.sums = watch.sums, []

    def forward(self, ids_BL: Tensor, **given: Any) -> Output:
        """Run the model without the Monitor's hooks, and keep what they would have seen."""
        output = self.model.forward(ids_BL, consume=self.routings.append, **given)
        self.seen = [part.detach() for part in (output.loss, output.aux_loss) if part is not None]
        return output

    def run(
        self, batch: tuple[Tensor, ...], watch: FiniteWatch, monitor: LoopMonitor
    ) -> tuple[Tensor, Tensor]:
        """Train on the batch; return copies of the losses and gradient norms."""
        for place, part in zip(self.batch, batch, strict=True):
            place.copy_(part)
        self.graph.replay()
        watch.sums = list(self.sums)
        ids, mask, _ = self.batch
        loss, aux_loss = (part.clone() for part in self.seen)
        monitor.add_pass((ids,), {"mask_BL": mask}, self.routings, Output(loss=loss, aux_loss=aux_loss))
        return self.losses.clone(), self.norms_P.clone()


# --- optimiser


def make_optimiser(model: LabModel, train: TrainConfig, device: str) -> torch.optim.AdamW:
    """Return AdamW (Loshchilov, Hutter 2019) over the trained weights; norms and biases do not decay."""
    # One kernel updates a group, and takes sharded or unsharded tensors but no mixture.
    replicated = (
        {id(weight) for weight in replicated_parameters(model)} if train.parallel == "fsdp" else set()
    )
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            # by name too: experts' biases are stacked and have two dimensions like a matrix
            decay = 0.0 if weight.dim() <= 1 or name.endswith("bias") else train.weight_decay
            groups.setdefault((id(weight) in replicated, decay), []).append(weight)
    parameters = [{"params": weights, "weight_decay": decay} for (_, decay), weights in groups.items()]
    on_gpu = device.startswith("cuda")
    return torch.optim.AdamW(parameters, lr=train.learning_rate, betas=BETAS, fused=on_gpu, capturable=on_gpu)


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of step 0, 1, ...: linear over the warm-up, then half a cosine to the final rate."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    after = max(train.steps - train.warmup - 1, 1)
    share = min((step - train.warmup) / after, 1.0)
    low = min(train.final_learning_rate, train.learning_rate)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2


def clip_gradients(gradients: list[Tensor], most: float, ranks: Ranks = ALONE) -> Tensor:
    """Scale all gradients to a total norm of at most `most` (0: never), in place; return each norm before.

    The norm of a sharded gradient is that of all its shards.
    """
    parts = [local_part(gradient) for gradient in gradients]
    norms_P = torch.stack(torch._foreach_norm([part.float() for part in parts]))
    if any(is_sharded(gradient) for gradient in gradients):
        sharded_P = torch.tensor([is_sharded(gradient) for gradient in gradients], device=norms_P.device)
        norms_P = torch.where(sharded_P, ranks.sum(norms_P.square()).sqrt(), norms_P)
    if most > 0:
        scale = (most / (torch.linalg.vector_norm(norms_P) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(parts, scale)
    return norms_P


# --- divergence


class Diverged(BadInput):
    """A training that cannot continue."""


class FiniteWatch:
    """Finds the first NaN or infinity of a training, without a host sync until `check`.

    Keeps the sum of each layer's output per step on the device: it is not finite when any output is not (or
    when the sum overflows float32, which is as bad).
    """

    def __init__(self, model: LabModel):
        self.names = [f"layer {at} (layers.{at})" for at in range(len(model.blocks))]
        self.parameters = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self.sums: list[Tensor] = []
        self.hooks = [block.register_forward_hook(self.ran) for block in model.blocks]
        self.steps: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def ran(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self.sums.append(output[0].detach().float().sum())

    def step_ended(self, step: int, loss: Tensor, norms_P: Tensor) -> None:
        """Store the step's loss, its layers' sums over micro-batches, and the norm of every gradient."""
        sums_L = torch.stack(self.sums).view(-1, len(self.names)).sum(0)
        self.sums = []
        self.steps.append((step, loss.detach(), sums_L, norms_P))

    def check(self) -> None:
        """Raise for the first non-finite step since the last check. Collective: every rank must call it."""
        steps, self.steps = self.steps, []
        if not steps:
            return
        table = torch.stack(
            [
                torch.cat([part.view(-1).double() for part in (loss, sums_L, norms)])
                for _, loss, sums_L, norms in steps
            ]
        )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)  # not finite on one rank: the sum is not either
        if bool(table.isfinite().all()):
            return
        finite = table.isfinite().cpu()
        row = int((~finite).any(1).nonzero()[0])
        number = steps[row][0]
        layers, gradients = finite[row, 1 : 1 + len(self.names)], finite[row, 1 + len(self.names) :]
        if not bool(layers.all()):
            where = f"the output of {self.names[int((~layers).nonzero()[0])]} is not finite"
        elif not bool(finite[row, 0]):
            where = "the loss is not finite, though every layer's output is: the head (lm_head)"
        else:
            # gradients flow from the last layer to the first: the last bad one is where it began
            where = f"the gradient of {self.parameters[int((~gradients).nonzero()[-1])]} is not finite"
        raise Diverged(
            f"step {number}: {where}; training stopped. Lower learning_rate or raise warmup; saved "
            "checkpoints are from before this step"
        )

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
