"""train --base: train the routers or experts of a model that exists, and compare it with the untouched model.

transformers' Trainer trains, with moescope's Monitor as its callback. A dense model is upcycled first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.trainer_utils import get_last_checkpoint

from moescope.checkpoint import open_checkpoint
from moescope.decoder.config import ModelConfig
from moescope.decoder.ranks import Ranks
from moescope.decoder.replacement import KEY, Replaced
from moescope.decoder.routers import router_class
from moescope.decoder.saving import FACTS, LAB
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.capture import Capture
from moescope.execution.model_names import checkpoint_identity
from moescope.execution.models import (
    TracedModel,
    find_model,
    load_weights,
    quiet_transformers,
    with_tokenizer,
)
from moescope.execution.replaced import replace_routers, save_replaced
from moescope.lab.batches import IGNORED, TokenRows, unigram_loss
from moescope.lab.config import CONTROL, KEPT, MODEL, TRAINER, UPCYCLED, ExistingConfig, TrainConfig
from moescope.lab.evaluation import DocumentSample, Evaluation, document_losses
from moescope.lab.existing import is_dense, upcycle
from moescope.lab.training import WINDOWS, Data, add_evaluation
from moescope.routing.trainer_monitor import Monitor
from moescope.run import open_run, read_run_json
from moescope.statistics import bootstrap_interval, ratios
from moescope.storage import remove, whole_folder
from moescope.types import Routing

if TYPE_CHECKING:
    from moescope.lab.train import Job

UNTOUCHED, TRAINED_MODEL = "untouched", "trained"  # in base_losses
WEIGHTS = "weights.safetensors"  # in a state of the Trainer
SETTLED = "tables-settled"  # in a state of the Trainer up to which all tables are on disk
STATE = "trainer_state.json"  # what the Trainer writes last
UNLIMITED = 1e30  # gradient norm
AUTOCAST = "grouped_mm_autocast"  # name of our way to compute fused experts


# --- the model


@dataclass(frozen=True)
class TokenizerVocabulary:
    """A tokenizer of transformers as the lab's vocabulary."""

    tokenizer: Any
    size: int
    end: int
    pad: int

    @classmethod
    def of(cls, traced: TracedModel) -> TokenizerVocabulary:
        tokenizer = traced.tokenizer
        if tokenizer is None:
            raise BadInput(
                f"{traced.name}: has no tokenizer, so no text can be read; add its tokenizer files"
            )
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if end is None:
            raise BadInput(f"{traced.name}: its tokenizer has no end-of-text token; set eos_token in it")
        return cls(tokenizer, traced.vocabulary, int(end), int(end if pad is None else pad))

    def encode(self, text: str) -> NDArray[np.int64]:
        return np.array(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def load_base(name: str, device: str, train: TrainConfig) -> tuple[TracedModel, TokenizerVocabulary]:
    """Load a model in float32 with its tokenizer; raise where rows of that length do not fit."""
    source = find_model(name)
    model = load_weights(source, "float32", device)
    for key in (LAB, FACTS):  # of a lab checkpoint: the result is one of transformers
        if hasattr(model.config, key):
            delattr(model.config, key)
    traced = with_tokenizer(TracedModel(name, model, model, None, device), source)
    if train.dtype == "bfloat16":
        use_autocast_experts(model)
    length = train.sequence_length
    longest = getattr(traced.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise BadInput(f"[train] sequence_length {length}: {name} has {longest} positions; lower it")
    return traced, TokenizerVocabulary.of(traced)


# --- held-out loss


def held_out(model: Any, job: Job[ExistingConfig], vocabulary: TokenizerVocabulary) -> pd.DataFrame:
    """Return document, domain, tokens and mean loss of held-out documents, the same for every model."""
    train = job.config.train
    sample = DocumentSample.of(job.corpus.validation, vocabulary, train.sequence_length)
    size = train.batch_size // train.micro_batches
    return document_losses(model, sample, size, job.device, train.dtype)


def compared_losses(losses: dict[str, pd.DataFrame], seed: int) -> list[dict[str, Any]]:
    """Return rows of the table base_losses: every model and domain, against the untouched model.

    Differences are of sums over tokens, paired by document, with 95 % intervals over documents: from the
    untouched model, and of the trained model from this one.
    """
    reference, trained = losses[UNTOUCHED], losses[TRAINED_MODEL]
    rows = []
    for name, frame in losses.items():
        for domain in ("", *dict.fromkeys(reference["domain"])):
            part = ((frame["domain"] == domain) | (domain == "")).to_numpy()
            tokens = frame["tokens"].to_numpy(float)[part]
            loss, before, after = (each["loss"].to_numpy(float)[part] for each in (frame, reference, trained))
            sums = np.stack([tokens * loss, tokens * (loss - before), tokens * (after - loss), tokens], -1)
            strata = np.unique(frame["domain"].to_numpy()[part], return_inverse=True)[1]
            low, high = bootstrap_interval(sums, ratios, strata, seed)
            value = ratios(sums.sum(0))
            row = {"model": name, "domain": domain, "documents": int(part.sum()), "tokens": int(tokens.sum())}
            for at, column, itself in ((1, "difference", UNTOUCHED), (2, "trained_minus", TRAINED_MODEL)):
                ends = (low[at], high[at]) if name != itself else (np.nan, np.nan)
                row |= {column: value[at], f"{column}_low": ends[0], f"{column}_high": ends[1]}
            rows.append(row | {"loss": value[0]})
    return rows


# --- what is trained


def choose_trained(model: nn.Module, trained: str) -> None:
    """Freeze what is not trained: all but routers, or routers and experts; of everything nothing."""
    if trained == "everything":
        return
    for weight in model.parameters():
        weight.requires_grad_(False)
    for block in find_blocks(model):
        for module in [block.router, block.experts][: 1 + (trained == "routers+experts")]:
            module.requires_grad_(True)
    if (shared := getattr(model, "moescope_shared_router", None)) is not None:
        shared.requires_grad_(True)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise BadInput(
            f'[base] trained = "{trained}": this router has no weights to train; train experts too'
        )


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
    place = hidden_states.device.type
    if not torch.is_autocast_enabled(place):
        return grouped_mm_experts_forward(experts, hidden_states, *routing)
    dtype = torch.get_autocast_dtype(place)
    inside: Any = InDtype(experts, dtype)
    return grouped_mm_experts_forward(inside, hidden_states.to(dtype), *routing).to(hidden_states.dtype)


def use_autocast_experts(model: Any) -> None:
    """Let fused experts of a model with weights in fp32 compute in bf16 within autocast."""
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        ExpertsInterface.register(AUTOCAST, autocast_experts)
        model.set_experts_implementation(AUTOCAST)


# --- training


@dataclass
class Rows(Dataset[dict[str, Tensor]]):
    """Rows of tokens as the Trainer takes them; the model itself shifts the labels."""

    rows: TokenRows

    def __len__(self) -> int:
        return self.rows.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.rows.batch(np.array([index]))
        ids, real = torch.from_numpy(batch.ids_BL[0]), torch.from_numpy(batch.mask_BL[0])
        labels = torch.where(real, ids, IGNORED)
        return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}


class PartTrainer(Trainer):
    """A Trainer that adds the losses of replaced routers."""

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


def make_trainer(model: Any, arguments: TrainingArguments, rows: TokenRows, *callbacks: Any) -> PartTrainer:
    """Return a Trainer that prints nothing: progress and numbers are shown and stored by moescope."""
    trainer = PartTrainer(model, arguments, train_dataset=Rows(rows), callbacks=list(callbacks))
    trainer.remove_callback(PrinterCallback)
    return trainer


def release(trainer: PartTrainer) -> None:
    """Free the memory of the model, its gradients and AdamW's moments, for a control."""
    for optimiser in filter(None, (trainer.optimizer, getattr(trainer.optimizer, "optimizer", None))):
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
        overwrite: bool,
        evaluate: Callable[[TrainingMonitor, nn.Module, int], Evaluation | None],
    ):
        every = min(train.checkpoint_every, max(train.steps // WINDOWS, 1))
        super().__init__(out=folder, every=every, gradients_every=0, overwrite=overwrite)
        self.train_config, self.evaluate = train, evaluate
        self.advance: Callable[[str, int], None] = lambda label, amount: None
        self.label = "first steps"

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Begin after the steps of the saved state: `prepare` has let it watch the model already."""
        self.log_numbers, self.ranks_add_up = {}, bool(args.average_tokens_across_devices)
        self.since = time.perf_counter()
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
        found = self.evaluate(self, model, step)
        if found and any(row["step"] == step for row in self.buffer.get("steps", [])[-1:]):
            self.add_facts(step, validation_loss=found.loss)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """The verb closes the run, after the model is saved."""


def training_arguments(train: TrainConfig, folder: Path, device: str, world: int) -> TrainingArguments:
    """The Trainer's arguments: AdamW, linear warm-up, cosine decay to the final learning rate."""
    every = min(train.evaluate_every, train.checkpoint_every, 10)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=train.steps,
        per_device_train_batch_size=train.batch_size // train.micro_batches // world,
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
    if plain:  # put into the base by an earlier training
        for router in plain:
            router.options["balance"] = weight
        return True
    if not hasattr(config, "router_aux_loss_coef") or not hasattr(model, "router_aux_loss_coef"):
        return False
    config.output_router_logits = bool(weight)
    config.router_aux_loss_coef = model.router_aux_loss_coef = weight
    return True


# --- a training of the verb


def share_ranks(model: Any, ranks: Ranks) -> None:
    """Let routers of the lab see the loads of all ranks."""
    for one in getattr(model, "routers_instead", ()):
        one.router.ranks = ranks


def chosen_by_layer(model: Any, ids_BL: Any, real_BL: Any) -> dict[int, Any]:
    """Return layer -> chosen experts of every real token, -1 in empty slots."""
    chosen: dict[int, Any] = {}

    def consume(routing: Routing) -> None:
        chosen[routing.layer] = routing.chosen_TK[real_BL.reshape(-1)].cpu()

    model.eval()
    with Capture(model, consume), torch.no_grad():
        model(input_ids=ids_BL, attention_mask=real_BL.long(), use_cache=False)
    return chosen


def agreement(before: dict[int, Any], after: dict[int, Any]) -> dict[str, float]:
    """Return layer -> mean share of a token's old experts that the new router chooses too."""
    shares = {}
    for layer, old_TK in before.items():
        same = (old_TK[:, :, None] == after[layer][:, None, :]).any(-1) & (old_TK >= 0)
        shares[str(layer)] = float(same.float().sum() / (old_TK >= 0).sum())
    return shares


def put_router(
    job: Job[ExistingConfig], traced: TracedModel, rows: TokenRows, dense: bool
) -> tuple[list[Any], Replaced | None, dict[str, float] | None]:
    """Replace the model's routers where asked; their agreement is measured on some of the rows.

    Returns the family's own routers, what replaced them, and the routing agreement before training, which a
    dense base does not have.
    """
    base, model = job.config.base, traced.model
    if base.router == KEPT:
        stored = getattr(traced.config, KEY, None)  # its routers are not of its family
        share_ranks(model, job.ranks)
        return [], Replaced.of(stored) if stored else None, None
    family_routers = [block.module.gate for block in find_blocks(model) if hasattr(block.module, "gate")]
    batch = rows.batch(np.arange(min(rows.rows, 16)))
    sample = [torch.from_numpy(part).to(job.device) for part in (batch.ids_BL, batch.mask_BL)]
    before = {} if dense else chosen_by_layer(model, *sample)
    config = ModelConfig(router=base.router, top_k=base.top_k, router_options=base.router_options)
    replaced = replace_routers(model, config)
    share_ranks(model, job.ranks)
    shares = None if dense else agreement(before, chosen_by_layer(model, *sample))
    return family_routers, replaced, shares


def prepare(
    job: Job[ExistingConfig], watching: dict[str, Any]
) -> tuple[TrainingMonitor, dict[str, Any], Callable[[Callable[..., None]], None]]:
    """Return the Monitor that writes the run, facts for run.json, and what trains to the end.

    It starts from the last saved state, if there is one.
    """
    config, train, base, ranks = job.config, job.config.train, job.config.base, job.ranks
    name, losses = str(job.origin), {}
    checkpoint = open_checkpoint(name)
    if dense := is_dense(checkpoint.config):
        target = job.folder / UPCYCLED
        if ranks.first:
            traced, vocabulary = load_base(name, job.device, train)
            losses[UNTOUCHED] = held_out(traced.model, job, vocabulary)
            del traced
            if not target.exists():  # it appears when complete
                if read_run_json(job.folder) is None:  # so that the folder is known as this run's
                    with open_run(job.folder, **watching) as writer:
                        writer.save_info(status="interrupted")
                upcycle(checkpoint, target, base.experts, base.top_k or 2, base.noise, train.seed)
        ranks.wait()
        name = str(target)
    torch.manual_seed(train.seed)
    traced, vocabulary = load_base(name, job.device, train)
    model = traced.model
    if ranks.first:
        losses["upcycled" if dense else UNTOUCHED] = held_out(model, job, vocabulary)
    data = Data.of(config, job.corpus, vocabulary)
    family_routers, replaced, agreed = put_router(job, traced, data.validation, dense)
    balanced = base.router == KEPT and use_balance_loss(model, base.balance)
    choose_trained(model, base.trained)
    unigram = unigram_loss(data.train, data.validation, vocabulary.size)

    def evaluate(monitor: TrainingMonitor, model: nn.Module, step: int) -> Evaluation | None:
        return add_evaluation(monitor, model, data, step, train, job.device, unigram, vocabulary.size)

    state, step = last_state(job.folder / TRAINER)
    blocks, weights = find_blocks(model), list(model.parameters())
    loss = f"balance loss weighted {base.balance:g}" if balanced and base.balance else "no balance loss"
    loss = loss if base.router == KEPT else "the new router's own losses"
    top_k = getattr(traced.config.get_text_config(), "num_experts_per_tok", None) or 1
    router_facts = {"routes": True, "experts_choose": False}
    if replaced is not None:
        top_k, kind = replaced.model.top_k, router_class(replaced.model.router)
        router_facts |= kind.facts(replaced.model)
    facts = {
        "parameters_total": sum(weight.numel() for weight in weights),
        "parameters_trainable": sum(weight.numel() for weight in weights if weight.requires_grad),
        "frozen": f"trained: {base.trained.replace('+', ' and ')}; {loss}",
        "model": {
            "router": base.router,
            "upcycled": dense,
            "experts": max(block.n_experts for block in blocks),
            "layers": len(blocks),
            "top_k": int(top_k),
            "vocabulary": traced.vocabulary,
        },
        "router_facts": router_facts,
        "vocabulary_size": traced.vocabulary,
        "routing_agreement": agreed,
    }
    monitor = TrainingMonitor(job.folder, train, state is None, evaluate)
    monitor.watch(model, step, **watching)  # first: it claims the folder, in which the Trainer makes its own
    arguments = training_arguments(train, job.folder / TRAINER, job.device, ranks.world)
    trainer = make_trainer(model, arguments, data.train, monitor)

    def train_all(advance: Callable[..., None]) -> None:
        monitor.advance = advance
        trainer.train_from(state)
        if ranks.first:
            save_result(job, model, vocabulary, replaced, family_routers)
            losses[TRAINED_MODEL] = held_out(model, job, vocabulary)
        if base.controls:  # as long, on the same text
            release(trainer)
            if dense:
                losses["dense, trained on"] = control_loss(
                    job, str(job.origin), job.folder / CONTROL / "dense"
                )
            if base.router != KEPT:
                losses["kept router, trained"] = control_loss(job, name, job.folder / CONTROL / KEPT)
        if monitor.run is not None:
            monitor.keep("base_losses", compared_losses(losses, train.seed))
            saved = checkpoint_identity(str((job.folder / MODEL).resolve()))
            monitor.run.writer.info["checkpoints"] = [{"step": train.steps, **saved}]

    return monitor, facts, train_all


def save_result(
    job: Job[ExistingConfig],
    model: Any,
    vocabulary: TokenizerVocabulary,
    replaced: Replaced | None,
    family_routers: list[Any],
) -> None:
    """Write the trained model: as an ordinary checkpoint of its family where that has the router."""
    remove(job.folder / MODEL, job.folder)
    config = model.config.get_text_config()
    if asked := getattr(config, "output_router_logits", False):
        config.output_router_logits = False  # it would cost every user of the model time
    with whole_folder(job.folder / MODEL) as partial_folder, quiet_transformers():
        if replaced is None:
            model.save_pretrained(partial_folder)
        else:
            save_replaced(model, replaced, family_routers, partial_folder)
        vocabulary.save(partial_folder)
    if asked:
        config.output_router_logits = True


def control_loss(job: Job[ExistingConfig], name: str, folder: Path) -> pd.DataFrame:
    """Train one control, from its last saved state if there is one; return its losses.

    Of a dense model the feed-forward blocks are trained, or everything where everything is.
    """
    train, base = job.config.train, job.config.base
    torch.manual_seed(train.seed)
    traced, vocabulary = load_base(name, job.device, train)
    model = traced.model
    if not is_dense(open_checkpoint(name).config):
        share_ranks(model, job.ranks)
        use_balance_loss(model, base.balance)
        choose_trained(model, base.trained)
    elif base.trained != "everything":
        for part, weight in model.named_parameters():
            weight.requires_grad_(".mlp." in part)
    rows = Data.of(job.config, job.corpus, vocabulary).train
    trainer = make_trainer(model, training_arguments(train, folder, job.device, job.ranks.world), rows)
    trainer.train_from(last_state(folder, STATE)[0])
    losses = held_out(model, job, vocabulary)
    release(trainer)
    return losses
