"""transformers' Trainer for a model whose routers or chosen experts are trained, with moescope's Monitor."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.trainer_utils import get_last_checkpoint

from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.lab.batches import IGNORED, TokenRows
from moescope.lab.config import TrainConfig
from moescope.routing.trainer_monitor import Monitor

NUMBERED = re.compile(r"(\d+)\.")  # a parameter of one expert among modules of experts
WEIGHTS = "weights.safetensors"  # in a state of the Trainer
SETTLED = "tables-settled"  # in a state of the Trainer up to which all tables are on disk
STATE = "trainer_state.json"  # what the Trainer writes last
UNLIMITED = 1e30  # gradient norm
AUTOCAST = "grouped_mm_autocast"  # name of our way to compute fused experts
WINDOWS = 20  # of the Monitor per training, about


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens as the Trainer takes them; the model itself shifts the labels."""

    def __init__(self, rows: TokenRows):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.rows.batch(np.array([index]))
        ids, real = torch.from_numpy(batch.ids_BL[0]), torch.from_numpy(batch.mask_BL[0])
        labels = torch.where(real, ids, IGNORED)
        return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


# --- what is trained


@dataclass(frozen=True)
class ChosenRows:
    """A fused tensor of all experts of a layer, of which only some are trained."""

    weight: nn.Parameter
    rows: Tensor  # bool, one per expert

    @property
    def shape(self) -> tuple[int, ...]:
        return (-1, *[1] * (self.weight.dim() - 1))


def choose_trained(model: nn.Module, trained: str, chosen: dict[int, list[int]]) -> list[ChosenRows]:
    """Freeze what is not trained; return the fused tensors that are trained in part.

    `trained` is routers, routers+experts, experts (those of `chosen`, by layer) or everything.
    """
    if trained == "everything":
        return []
    for weight in model.parameters():
        weight.requires_grad_(False)
    shared = getattr(model, "moescope_shared_router", None)
    for weight in shared.parameters() if shared is not None and trained != "experts" else ():
        weight.requires_grad_(True)
    partly = []
    for block in find_blocks(model):
        modules = {
            "routers": [block.router],
            "routers+experts": [block.router, block.experts],
            "experts": [],
        }[trained]
        for weight in (weight for module in modules for weight in module.parameters()):
            weight.requires_grad_(True)
        if trained == "experts" and (experts := chosen.get(block.layer)):
            partly += choose_experts(block.experts, block.n_experts, experts, block.where())
    if not any(weight.requires_grad for weight in model.parameters()):
        raise BadInput(
            f'[base] trained = "{trained}": this router has no weights to train; train experts too'
        )
    return partly


def choose_experts(experts: nn.Module, count: int, chosen: list[int], where: str) -> list[ChosenRows]:
    """Make chosen experts of one layer trainable, in fused tensors or in modules of their own."""
    partly = []
    for name, weight in experts.named_parameters():
        if match := NUMBERED.match(name):
            weight.requires_grad_(int(match[1]) in chosen)
        elif weight.dim() and weight.shape[0] == count:
            rows = torch.zeros(count, dtype=torch.bool, device=weight.device)
            rows[chosen] = True
            weight.requires_grad_(True)
            partly.append(ChosenRows(weight, rows))
        else:
            raise BadInput(
                f"{where}: {name} has no axis of {count} experts, so single experts cannot be trained"
            )
    return partly


def mask_gradients(partly: Iterable[ChosenRows]) -> None:
    """Set the gradients of experts that are not trained to zero, before they are clipped or averaged."""
    for part in partly:
        keep = part.rows.view(part.shape)
        hook = partial(masked, keep)
        part.weight.register_hook(hook)  # type: ignore[no-untyped-call]


def masked(keep: Tensor, gradient: Tensor) -> Tensor:
    return gradient * keep.to(gradient.dtype)


def mask_updates(optimiser: torch.optim.Optimizer, partly: list[ChosenRows]) -> None:
    """Let AdamW change chosen experts only, bit for bit, its weight decay included.

    With a zero gradient both moments stay zero, and so does the step; only the decay p <- p (1 - lr wd) would
    move the others. Fused tensors get a group without decay, and their chosen experts decay before each step.
    """
    by_id = {id(part.weight): part for part in partly}
    decays: dict[int, float] = {}
    for group in list(optimiser.param_groups):
        fused = [weight for weight in group["params"] if id(weight) in by_id]
        if not fused:
            continue
        group["params"] = [weight for weight in group["params"] if id(weight) not in by_id]
        rest = {name: value for name, value in group.items() if name != "params"}
        optimiser.add_param_group({**rest, "params": fused, "weight_decay": 0.0})
        decays |= {id(weight): group["weight_decay"] for weight in fused}

    @torch.no_grad()
    def decay(stepping: torch.optim.Optimizer, *_: Any) -> None:
        for group in stepping.param_groups:  # looked up anew: loading a state replaces all groups
            for part in (by_id[id(weight)] for weight in group["params"] if id(weight) in by_id):
                factor = 1 - group["lr"] * decays[id(part.weight)]
                part.weight.mul_(torch.where(part.rows.view(part.shape), factor, 1.0).to(part.weight.dtype))

    optimiser.register_step_pre_hook(decay)


# --- experts in bf16


class InDtype:
    """A module of experts with its weights cast to another dtype where they are used."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype):
        self.experts, self.dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return value.to(self.dtype) if isinstance(value, nn.Parameter) else value


def autocast_experts(experts: nn.Module, hidden_states: Tensor, *routing: Tensor) -> Tensor:
    """Experts in the dtype of autocast, which torch's grouped_mm ignores: weights in fp32 would stay so."""
    place, used = hidden_states.device.type, experts
    before = hidden_states.dtype
    if torch.is_autocast_enabled(place):
        dtype = torch.get_autocast_dtype(place)
        used, hidden_states = InDtype(experts, dtype), hidden_states.to(dtype)  # type: ignore[assignment]
    output: Tensor = grouped_mm_experts_forward(used, hidden_states, *routing)
    return output.to(before)


def use_autocast_experts(model: Any) -> None:
    """Let fused experts of a model with weights in fp32 compute in bf16 within autocast."""
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        ExpertsInterface.register(AUTOCAST, autocast_experts)
        model.set_experts_implementation(AUTOCAST)


# --- training


class PartTrainer(Trainer):
    """A Trainer that changes chosen experts only, and adds the losses of replaced routers."""

    partly: list[ChosenRows]
    model: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Add the routers' own losses; where the Trainer sums micro-batches, each adds its share of them.

        transformers adds a family's balance loss in full to every micro-batch, times the processes: here it
        counts once per step too.
        """
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        summed = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        share = 1 / self.args.gradient_accumulation_steps if summed else 1
        routers = getattr(self.model, "routers_instead", ())
        parts = [value for one in routers for value in one.losses.values()]
        if parts:
            loss = loss + torch.stack(parts).sum() * share
        times = self.accelerator.num_processes if summed and self.args.average_tokens_across_devices else 1
        if times != share and (balance := getattr(outputs, "aux_loss", None)) is not None:
            loss = loss - (times - share) * self.model.router_aux_loss_coef * balance
        return (loss, outputs) if return_outputs else loss

    def train_from(self, folder: str | None) -> None:
        """Train, from a saved state if there is one; from the last one transformers would train on."""
        state = TrainerState.load_from_json(str(Path(folder) / STATE)) if folder else None
        if folder is None or state is None or state.global_step < self.args.max_steps:
            self.train(resume_from_checkpoint=folder)
            return
        self.state = state
        self._load_from_checkpoint(folder)
        self.callback_handler.on_train_begin(self.args, state, self.control)

    # transformers saves experts one by one and, going on from such a file, leaves fused experts as they were
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        save_model(self.model, str(folder / WEIGHTS))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.model, str(Path(resume_from_checkpoint) / WEIGHTS))

    def create_optimizer(self, *more: Any, **named: Any) -> Any:
        new = self.optimizer is None
        optimiser = super().create_optimizer(*more, **named)
        if new and self.partly:
            mask_updates(optimiser, self.partly)
        return optimiser


def make_trainer(
    model: Any, arguments: TrainingArguments, rows: TokenRows, partly: list[ChosenRows], *callbacks: Any
) -> PartTrainer:
    """Return a Trainer that prints nothing: progress and numbers are shown and stored by moescope."""
    trainer = PartTrainer(model, arguments, train_dataset=Rows(rows), callbacks=list(callbacks))
    trainer.partly = partly
    trainer.remove_callback(PrinterCallback)
    return trainer


def release(trainer: PartTrainer) -> None:
    """Free the memory of the model, its gradients and AdamW's moments, for a control."""
    for optimiser in (trainer.optimizer, getattr(trainer.optimizer, "optimizer", None)):
        if optimiser is not None:
            optimiser.state.clear()
    trainer.model.zero_grad()
    trainer.model.to("meta")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class TrainingMonitor(Monitor):
    """The Monitor as the writer of a training's run; it also evaluates."""

    def __init__(
        self,
        folder: Path,
        train: TrainConfig,
        watching: dict[str, Any],
        overwrite: bool,
        evaluate: Callable[[nn.Module, int], list[dict[str, Any]]],
        advance: Callable[..., None],
    ):
        every = min(train.checkpoint_every, max(train.steps // WINDOWS, 1))
        super().__init__(out=folder, every=every, gradients_every=0, overwrite=overwrite)
        self.train_config, self.watching = train, watching
        self.evaluate, self.advance = evaluate, advance
        self.facts: dict[str, Any] = {}  # for run.json
        self.label = "first steps"

    def watch(self, model: nn.Module, step: int = 0, *more: Any, **named: Any) -> Any:
        return super().watch(model, step, **self.watching)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        super().on_train_begin(args, state, control, model, **more)
        if self.run is not None:
            self.run.writer.save_info(**self.facts)
        if state.global_step == 0:
            self.add_evaluation(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        step = state.global_step
        super().on_step_end(args, state, control, model=model, **more)
        if step % self.train_config.evaluate_every == 0 or step == state.max_steps:
            self.add_evaluation(model, step)
        self.advance(self.label, 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        with torch.no_grad():
            for one in getattr(model, "routers_instead", ()):
                one.router.after_step()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        super().on_save(args, state, control, **more)
        if self.run is not None:  # only now can a training resume there with complete tables
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / SETTLED).touch()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        super().on_log(args, state, control, logs, **more)
        if logs and "loss" in logs:
            self.label = f"loss {float(logs['loss']):.3f}"

    def add_evaluation(self, model: nn.Module, step: int) -> None:
        if self.run is None:
            return
        began = time.perf_counter()
        rows = self.evaluate(model, step)
        self.keep("evaluations", rows)
        if any(row["step"] == step for row in self.buffer.get("steps", [])[-1:]):
            self.add_facts(step, validation_loss=rows[0]["loss"])
        self.since += time.perf_counter() - began

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The verb closes the run, after the model is saved."""


def training_arguments(train: TrainConfig, folder: Path, device: str, world: int) -> TrainingArguments:
    """The Trainer's arguments: AdamW, linear warm-up, cosine decay to the final learning rate."""
    size, rest = divmod(train.batch_size // train.micro_batches, world)
    if rest:
        raise BadInput(
            f"{world} processes cannot share {train.batch_size // train.micro_batches} rows; "
            f"make [train] batch_size / micro_batches a multiple of {world}"
        )
    every = min(train.evaluate_every, train.checkpoint_every, 10)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=train.micro_batches,
        learning_rate=train.learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": train.final_learning_rate},
        warmup_steps=train.warmup,
        weight_decay=train.weight_decay,
        max_grad_norm=train.clip or UNLIMITED,
        seed=train.seed,
        bf16=train.dtype == "bfloat16",
        use_cpu=device == "cpu",
        save_steps=train.checkpoint_every,
        save_total_limit=2,
        logging_steps=every,
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    if arguments.n_gpu > 1:  # of this process: nn.DataParallel would split batches; torchrun uses them all
        arguments._n_gpu = 1
    return arguments


def last_state(folder: Path, marker: str = SETTLED) -> tuple[str | None, int]:
    """Return the Trainer's newest checkpoint with that file in it, and its step; (None, 0) without one."""
    while folder.is_dir() and (newest := get_last_checkpoint(str(folder))) is not None:  # type: ignore[no-untyped-call]
        if (Path(newest) / marker).is_file():
            return newest, int(newest.rpartition("-")[2])
        with suppress(FileNotFoundError):  # killed while it was written
            Path(newest).rename(Path(newest).with_name(f"incomplete-{Path(newest).name}"))
    return None, 0


def use_balance_loss(model: Any, weight: float) -> bool:
    """Add the family's own balance loss to the model's loss; False where the family has none.

    Switch's loss n sum f_i P_i over all layers' tokens, as transformers computes it inside the model: the
    Trainer receives one loss, and its gradient reaches the routers.
    """
    config = model.config.get_text_config()
    plain = [one.router for one in getattr(model, "routers_instead", ()) if one.router.plain_top_k]
    if plain:  # of an upcycled GPT-2
        for router in plain:
            router.options["balance"] = weight
        return True
    if not hasattr(config, "router_aux_loss_coef") or not hasattr(model, "router_aux_loss_coef"):
        return False
    config.output_router_logits = bool(weight)
    config.router_aux_loss_coef = model.router_aux_loss_coef = weight
    return True
