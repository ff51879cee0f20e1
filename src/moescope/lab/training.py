"""The training loop, its optimiser, and the check for NaN.

The losses are the same step for step whether it runs through, is killed and resumed, or is shared by ranks.
"""

from __future__ import annotations

import gc
import logging
import math
import pickle
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moescope.decoder.model import LabModel, Output, seeded_by_part, unseeded
from moescope.decoder.ranks import Ranks
from moescope.decoder.routers import router_class
from moescope.decoder.saving import load_model, save_model
from moescope.decoder.vocabulary import Vocabulary
from moescope.errors import BadInput
from moescope.lab.batches import IGNORED, TokenRows, unigram_loss
from moescope.lab.config import STATE, ExistingConfig, LabConfig, TrainConfig
from moescope.lab.corpus import Corpus, text_warnings
from moescope.lab.evaluation import Evaluation, evaluate
from moescope.routing.monitor import LoopMonitor
from moescope.storage import atomic_file, check_disk, sync
from moescope.types import Routing

if TYPE_CHECKING:
    from moescope.lab.train import Job

LOG_EVERY = 10  # steps; more often where evaluations or checkpoints come more often
BETAS = (0.9, 0.95)
WINDOWS = 20  # of the Monitor per training, about
WARM_STEPS = 3  # before one is captured: libraries set themselves up in the first
KERNELS = ("fused", "capturable", "foreach")  # options of AdamW that fit a device, not a training
UNREADABLE = (OSError, RuntimeError, TypeError, EOFError, LookupError, ValueError, pickle.UnpicklingError)
Advance = Callable[[str, int], None]
logger = logging.getLogger("moescope")


@dataclass(frozen=True)
class Data:
    """Rows to train on, and rows to evaluate on."""

    train: TokenRows
    validation: TokenRows

    @classmethod
    def of(cls, config: LabConfig | ExistingConfig, corpus: Corpus, vocabulary: Vocabulary) -> Data:
        """Return the corpus as rows: all training rows, and the validation rows for evaluations."""
        shape = vocabulary, config.train.sequence_length, config.data.layout
        train, held_out = (TokenRows.of(texts, *shape) for texts in (corpus.train, corpus.validation))
        return cls(train, held_out.sample(config.train.evaluation_rows))


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
        self.optimiser = make_optimiser(self.model, self.config.train, self.device)
        self.logged: list[Tensor] = []  # per step since the last log: LM loss, auxiliary loss, gradient norm
        self.rate = torch.zeros((), device=self.device) if self.device.startswith("cuda") else None
        self.graph: StepGraph | None = None
        dtype = getattr(torch, self.config.train.dtype)
        self.capturable = (
            self.rate is not None
            and self.ranks.world * self.config.train.micro_batches == 1
            and not any(block.mlp.experts.waits(dtype) for block in self.model.blocks)
        )
        self.warm = 0  # steps that could have been captured
        for router in self.model.routers:
            router.ranks = self.ranks
        self.parallel: Any = distributed(self.model, self.device) if self.ranks.world > 1 else self.model

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the state's step; with its random state if there are as many ranks."""
        self.model.load_state_dict(state["model"])
        groups = [  # the moments on any device, with this device's kernels
            {**saved, **{flag: here[flag] for flag in KERNELS}}
            for saved, here in zip(
                state["optimiser"]["param_groups"], self.optimiser.param_groups, strict=True
            )
        ]
        self.optimiser.load_state_dict({**state["optimiser"], "param_groups": groups})
        if len(state["generators"]) == self.ranks.world:
            generators, size = state["generators"][self.ranks.rank], len(torch.get_rng_state())
            torch.set_rng_state(generators[:size].contiguous())
            if torch.cuda.is_available() and len(generators) > size:
                torch.cuda.set_rng_state(generators[size:].contiguous())
        self.step, self.evaluations = state["step"], list(state["evaluations"])

    # --- one step

    def one_step(self, watch: FiniteWatch, monitor: LoopMonitor | None = None) -> None:
        """Train on this rank's share of every micro-batch: one step of the optimiser and of the routers."""
        train = self.config.train
        rate = learning_rate(self.step, train)
        if self.rate is not None:  # on a GPU, where a captured step reads it
            self.rate.fill_(rate)
        for group in self.optimiser.param_groups:
            group["lr"] = rate if self.rate is None else self.rate
        batch = self.data.train.of_step(self.step, train.batch_size, train.seed)
        targets = int((batch.targets_BL != IGNORED).sum())
        micro_batches = []
        size = train.batch_size // train.micro_batches
        share = size // self.ranks.world  # together the ranks take the rows of a single process
        for first in range(self.ranks.rank * share, train.batch_size, size):
            rows = slice(first, first + share)
            parts = (batch.ids_BL[rows], batch.mask_BL[rows], batch.targets_BL[rows])
            weight = int((parts[2] != IGNORED).sum()) / max(targets, 1)
            micro_batches.append((tuple(self.to_device(part) for part in parts), weight))
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

    def update(
        self, micro_batches: Sequence[tuple[tuple[Tensor, ...], float]], forward: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Compute gradients and change the weights; return both losses, and the norm of each gradient."""
        train = self.config.train
        losses = torch.zeros(2, device=self.device)
        for number, ((ids, mask, wanted), share) in enumerate(micro_batches, 1):
            more = self.ranks.world > 1 and number < len(micro_batches)
            with self.parallel.no_sync() if more else nullcontext():
                bf16 = train.dtype == "bfloat16"
                with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=bf16):
                    output = forward(ids, mask_BL=mask, targets_BL=wanted)
                # Every target of the step has the same weight; DDP averages over ranks, hence the world.
                loss = output.lm_loss * (share * self.ranks.world) + output.aux_loss / train.micro_batches
                loss.backward()
            aux_loss = output.aux_loss.detach() / (train.micro_batches * self.ranks.world)
            losses += torch.stack([output.lm_loss.detach() * share, aux_loss])
        gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        norms_P = clip_gradients(gradients, train.clip)
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

    def to_device(self, part: NDArray[Any]) -> Tensor:
        """Copy to the device from pinned memory, so that nothing waits for the copy."""
        tensor = torch.from_numpy(part)
        return tensor if self.rate is None else tensor.pin_memory().to(self.device, non_blocking=True)

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
        every, label = min(LOG_EVERY, train.evaluate_every, train.checkpoint_every), "first steps"
        try:
            if self.step == 0 and not self.evaluations:
                self.evaluate(monitor)
                monitor.keep("steps", [{"step": 0, **self.validation_columns()}])
            while self.step < train.steps:
                self.one_step(watch, monitor)
                monitor.end_step(self.step)
                if self.step % monitor.every == 0:
                    monitor.close_window()  # before the log: its alerts are among the numbers
                last = self.step == train.steps
                evaluating = last or self.step % train.evaluate_every == 0
                saving = last or self.step % train.checkpoint_every == 0
                if self.step % every == 0 or evaluating or saving:
                    watch.check()
                    if evaluating:
                        self.evaluate(monitor)
                    label = self.log(monitor, evaluating)
                if self.step % monitor.every == 0:
                    monitor.write()
                advance(label, 1)
                if saving:
                    monitor.flush()
                    if monitor.run is not None:
                        save(self.model, self.step)
                    self.save_state(folder)
        finally:
            watch.close()

    def evaluate(self, monitor: LoopMonitor) -> None:
        train, vocabulary = self.config.train, self.config.model.vocabulary
        found = add_evaluation(
            monitor, self.model, self.data, self.step, train, self.device, self.unigram, vocabulary
        )
        self.evaluations += [asdict(found)] if found else []

    def validation_columns(self) -> dict[str, float | None]:
        """Return the last evaluation with its baselines, as a row of steps has them."""
        columns = {"validation_loss": "loss", "validation_loss_published": "published"}
        found = {column: last[key] for last in self.evaluations[-1:] for column, key in columns.items()}
        return found and {**found, **baselines(self.unigram.get(""), self.config.model.vocabulary)}

    def log(self, monitor: LoopMonitor, evaluated: bool) -> str:
        """Write a row of the steps table over the steps since the last; return the progress bar's text."""
        summed = self.ranks.sum(torch.stack(self.logged).double()).cpu()
        self.logged = []
        lm_loss, aux_loss, norm = summed.mean(0).tolist()
        row = {
            "train_loss": lm_loss + aux_loss,
            "lm_loss": lm_loss,
            "aux_loss": aux_loss,
            "gradient_norm": norm,
            "gradient_clip": self.config.train.clip or None,
            "learning_rate": learning_rate(self.step - 1, self.config.train),
            **(self.validation_columns() if evaluated else {}),
            **({"peak_memory_bytes": process_peak()} if self.rate is None else {}),
        }
        monitor.pull()
        began, tokens = monitor.since, monitor.since_log.layers[0].tokens
        metrics = monitor.numbers(**row)
        speed = tokens / max(time.perf_counter() - began, 1e-9)
        busiest = metrics.get("moescope/max_over_mean_p50")  # busiest expert over the mean, median of layers
        load = "" if busiest is None else f", load {busiest:.1f}x"
        return f"loss {lm_loss:.3f}{load}, {speed:,.0f} tokens/s"

    def save_state(self, folder: Path) -> None:
        """Replace the saved state atomically. Collective: every rank must call it.

        Frozen weights are left to the checkpoint of the same step, where there is one.
        """
        generators = [generator_state()]
        if self.ranks.world > 1:
            generators = [torch.empty(0)] * self.ranks.world
            torch.distributed.all_gather_object(generators, generator_state())
        if not self.ranks.first:
            return
        saved = checkpoint_of(folder, self.step).is_dir()
        frozen = [name for name, one in self.model.named_parameters() if saved and not one.requires_grad]
        weights = {name: tensor for name, tensor in self.model.state_dict().items() if name not in frozen}
        moments = self.optimiser.state_dict()
        parts = (*weights.values(), *(part for one in moments["state"].values() for part in one.values()))
        folder.mkdir(parents=True, exist_ok=True)
        check_disk(folder, sum(part.nbytes for part in parts if isinstance(part, Tensor)))
        state = {
            "step": self.step,  # it alone determines which data come next
            "model": weights,  # and buffers (keys, biases and moving averages of routers)
            "optimiser": moments,
            "generators": generators,  # torch's random state of every rank
            "evaluations": self.evaluations,
            "frozen": frozen,
        }
        with atomic_file(folder / STATE) as partial:
            torch.save(state, partial)
        sync(folder)


def add_evaluation(
    monitor: LoopMonitor,
    model: nn.Module,
    data: Data,
    step: int,
    train: TrainConfig,
    device: str,
    unigram: dict[str, float],
    vocabulary: int,
) -> Evaluation | None:
    """Evaluate on the first rank, excluded from the steps' time; losses by domain, "" being all together."""
    if monitor.run is None:
        return None
    began = time.perf_counter()
    size = train.batch_size // train.micro_batches
    found = evaluate(model, data.validation, step, size, device, train.dtype)
    for domain, loss in {"": found.loss, **found.domains}.items():
        known = baselines(unigram.get(domain), vocabulary)
        gain = None if known["unigram_loss"] is None else known["unigram_loss"] - loss
        monitor.keep("evaluations", [{"step": step, "domain": domain, "loss": loss, **known, "gain": gain}])
    monitor.since += time.perf_counter() - began
    return found


def process_peak() -> int:
    """Return the peak memory of this process in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # macOS counts bytes, Linux kilobytes


def distributed(model: LabModel, device: str) -> Any:
    """Return the model under DDP without syncing buffers: routers compute theirs from sums over ranks."""
    kind: Any = nn.parallel.DistributedDataParallel
    newer = "forward_sync_buffers"  # torch's newer name of the option
    option = newer if newer in signature(kind).parameters else "broadcast_buffers"
    places = [torch.device(device)] if device.startswith("cuda") else None
    return kind(model, device_ids=places, **{option: False})


def baselines(unigram: float | None, vocabulary: int) -> dict[str, float | None]:
    return {"unigram_loss": unigram, "uniform_loss": math.log(vocabulary)}


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
    groups: dict[float, list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            # by name too: experts' biases are stacked and have two dimensions like a matrix
            decay = 0.0 if weight.dim() <= 1 or name.endswith("bias") else train.weight_decay
            groups.setdefault(decay, []).append(weight)
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()],
        lr=train.learning_rate,
        betas=BETAS,
        fused=device.startswith("cuda"),
        capturable=device.startswith("cuda"),
    )


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of step 0, 1, ...: linear over the warm-up, then half a cosine to the final rate."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    after = max(train.steps - train.warmup - 1, 1)
    share = min((step - train.warmup) / after, 1.0)
    low = min(train.final_learning_rate, train.learning_rate)
    return low + (train.learning_rate - low) * (1 + math.cos(math.pi * share)) / 2


def clip_gradients(gradients: list[Tensor], most: float) -> Tensor:
    """Scale all gradients to a total norm of at most `most` (0: never), in place; return each norm before."""
    norms_P = torch.stack(torch._foreach_norm([gradient.float() for gradient in gradients]))
    if most > 0:
        scale = (most / (torch.linalg.vector_norm(norms_P) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, scale)
    return norms_P


# --- the state to resume from, in one file written atomically


def generator_state() -> Tensor:
    """Return the state of the CPU's and the current GPU's generator as one row of bytes."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_available() else state


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def load_state(folder: Path) -> dict[str, Any] | None:
    """Return the last saved state; None where there is none."""
    path = folder / STATE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        if frozen := state["frozen"]:
            weights = load_model(checkpoint_of(folder, state["step"]), "cpu")[0].state_dict()
            state["model"] |= {name: weights[name] for name in frozen}
    except BadInput as error:
        raise BadInput(
            f"{path}: its frozen weights are missing ({error}); start over with --overwrite"
        ) from None
    except UNREADABLE as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path}: cannot be read ({line}); start over with --overwrite") from None
    return state


# --- a training of the verb


def initial_model(config: LabConfig, origin: str | None, device: str) -> LabModel:
    """Return the model before its first step: from the seed, or from a checkpoint."""
    train = config.train
    torch.manual_seed(train.seed)
    if origin is not None:
        model = load_model(origin, device, train.compile)[0]
        model.trained_length = max(model.trained_length, train.sequence_length)
        return model
    before = seeded_by_part(train.seed) if train.paired_weights else unseeded
    with torch.device(device):
        model = LabModel(config.model, compile=train.compile, before=before)
    model.trained_length = train.sequence_length
    if train.paired_weights:  # draws in training must not depend on the draws for the weights
        torch.manual_seed(train.seed)
    return model


def window_length(train: TrainConfig) -> int:
    """Return the steps per window of the Monitor: about 1/20 of the training, a divisor of checkpoint_every.

    Tables end at every checkpoint so that a training can resume there; other windows would be cut short.
    """
    wanted = max(train.steps / WINDOWS, 1.0)
    every = train.checkpoint_every
    small = [n for n in range(1, math.isqrt(every) + 1) if every % n == 0]
    return min(sorted({*small, *(every // n for n in small)}), key=lambda n: abs(math.log(n / wanted)))


def prepare(
    job: Job[LabConfig], watching: dict[str, Any], overwrite: bool, resume: bool
) -> tuple[LoopMonitor, dict[str, Any], Callable[[Advance], None]]:
    """Return the Monitor that writes the run, facts for run.json, and what trains to the end.

    It starts from the last saved state, if there is one.
    """
    config, states, vocabulary = job.config, job.states, job.vocabulary
    state = None if overwrite else load_state(states)
    if resume and state is None:
        raise BadInput(
            f"{job.folder}: stopped before its first checkpoint, so there is nothing to resume; repeat the "
            "first command"
        )
    data = job.data or Data.of(config, job.corpus, vocabulary)
    unigram = unigram_loss(data.train, data.validation, vocabulary.size)
    model = initial_model(config, job.origin, job.device)
    training = Training(config, model, data, job.device, job.ranks, unigram=unigram)
    if state is not None:
        training.restore(state)
    # Gradient norms need a second backward pass, which compiled graphs do not allow.
    gradients_every = 0 if config.train.compile else config.train.evaluate_every
    every = window_length(config.train)
    monitor = LoopMonitor(job.folder, every, gradients_every=gradients_every, overwrite=state is None)
    facts = {
        "router_facts": router_class(config.model.router).facts(config.model),
        "vocabulary_size": vocabulary.size,
        "warnings": text_warnings(config, job.corpus, vocabulary),
        "checkpoints": job.checkpoints,
    }

    def train(advance: Advance) -> None:
        began = time.perf_counter()

        def save(model: LabModel, step: int) -> None:
            nonlocal began
            save_model(model, vocabulary, checkpoint_of(states, step))
            assert monitor.run is not None
            seconds, began = time.perf_counter() - began, time.perf_counter()
            monitor.run.writer.add_timings(
                {"train": seconds}
            )  # no concurrent writer: tables were just flushed
            monitor.run.writer.save_info(checkpoints=job.checkpoints)

        def show(label: str, amount: int) -> None:
            advance(label, amount)
            job.on_step()

        for _ in range(training.step):
            job.on_step()
        training.run(monitor, states, save, show)

    monitor.watch(model, training.step, **watching)
    return monitor, facts, train


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
        table = torch.stack([torch.cat([part.view(-1).double() for part in parts]) for _, *parts in steps])
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
