"""train --base: train the routers or experts of a model that exists, and compare it with the untouched model.

transformers' Trainer trains, with moescope's Monitor as its callback. A dense model is upcycled first.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.checkpoint import open_checkpoint
from moescope.decoder.config import ModelConfig, Option, check_numbers, override, unknown_key
from moescope.decoder.replacement import KEY, Replaced
from moescope.decoder.saving import FACTS, LAB
from moescope.errors import BadInput, unknown_name
from moescope.execution.model_names import checkpoint_identity
from moescope.lab.base_memory import BaseSize, base_size, check_memory, read_expert_list
from moescope.lab.config import DataConfig, TrainConfig, check_data, read_toml, settings_warnings
from moescope.lab.corpus import Corpus, save_validation
from moescope.lab.upcycling import is_dense, target_of, upcycle
from moescope.progress import progress
from moescope.run import (
    Run,
    check_folder,
    jsonable,
    mark_unfinished,
    now,
    open_run,
    read_run_json,
)
from moescope.storage import remove, whole_folder

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from moescope.decoder.ranks import Ranks
    from moescope.execution.models import TracedModel
    from moescope.lab.batches import TokenRows
    from moescope.lab.training import Data

TRAINED = ("routers", "routers+experts", "experts", "everything")
MODEL, ADAPTER, UPCYCLED, TRAINER, CONTROL = "model", "adapter", "upcycled", "trainer", "control"  # folders
UNTOUCHED, TRAINED_MODEL, KEPT = "untouched", "trained", "kept"
ONLY_LAB = {"data": ("vocabulary",), "train": ("compile", "paired_weights", "parallel")}


@dataclass(frozen=True)
class BaseConfig:
    """What becomes of the base model."""

    router: str = KEPT  # or a router of the lab, which replaces the model's own
    router_options: dict[str, Option] = field(default_factory=dict)
    trained: str = ""  # one of TRAINED; empty: routers, of a dense base routers+experts
    expert_list: str = ""  # with trained = "experts": a JSON file as moescope deploy writes it (esft_*.json)
    lora: int = 0  # rank of the adapters through which that is trained; 0: none
    balance: float = 0.01  # weight of the family's own balance loss, where it has one
    experts: int = 8  # of a dense base: copies of every feed-forward block
    top_k: int = 0  # experts per token; 0: as the base has it, 2 for a dense one
    noise: float = 0.0  # of a dense base: added to every copy, as a multiple of its standard deviation
    controls: bool = False  # also train the dense base, and the kept router, as long on the same text


@dataclass(frozen=True)
class ExistingConfig:
    base: BaseConfig = field(default_factory=BaseConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            sequence_length=512,
            learning_rate=1e-4,
            final_learning_rate=1e-5,
            weight_decay=0.0,
            evaluate_every=100,
        )
    )


def existing_config(
    config: str | Path | dict[str, Any] | None,
    router: str | None,
    seed: int | None,
    where: str = "config",
) -> ExistingConfig:
    """Return the checked config of a TOML file, or of a dictionary such as it holds."""
    if config is not None and not isinstance(config, dict):
        where = str(config)
    tables = {} if config is None else config if isinstance(config, dict) else read_toml(config)
    parts = ("base", "data", "train")
    for key in tables:
        if key not in parts:
            raise unknown_key(f"{where}: unknown table", key, list(parts))
    for part, keys in ONLY_LAB.items():
        for key in keys:
            if key in tables.get(part, {}):
                raise BadInput(f"{where}: [{part}] {key} is for models of the lab; remove it, or --base")
    default = ExistingConfig()
    settled = ExistingConfig(
        *(override(getattr(default, part), tables.get(part, {}), f"{where}: [{part}]") for part in parts)
    )
    if router is not None:
        settled = replace(settled, base=replace(settled.base, router=router))
    if seed is not None:
        settled = replace(settled, train=replace(settled.train, seed=seed))
    check_existing(settled, where)
    return settled


def check_existing(config: ExistingConfig, where: str) -> None:
    base, train = config.base, config.train
    check_numbers("train", train, where)
    check_data(config.data, where)
    if config.data.layout == "padded":
        raise BadInput(f"{where}: [data] layout = 'padded' is for models of the lab; use 'documents'")
    if base.trained and base.trained not in TRAINED:
        raise unknown_name("trained", base.trained, list(TRAINED))
    if train.epochs or train.steps < 1:
        raise BadInput(
            f"{where}: [train] steps = {train.steps}, epochs = {train.epochs}; give steps, above 0"
        )
    if train.batch_size % train.micro_batches:
        raise BadInput(
            f"{where}: [train] batch_size {train.batch_size} must be a multiple of micro_batches, "
            f"{train.micro_batches}"
        )
    if not 0 <= train.seed < 2**32:
        raise BadInput(f"{where}: [train] seed must be 0 or more, and less than 2**32, not {train.seed}")
    if base.router != KEPT:
        from moescope.decoder.routers import router_class

        if not router_class(base.router).routes:
            raise BadInput(
                f"{where}: [base] router {base.router} has no experts to choose from; name another"
            )
    elif base.router_options:
        raise BadInput(f"{where}: [base] router_options are of a new router; name it with [base] router")
    if base.lora < 0:
        raise BadInput(f"{where}: [base] lora is a rank, 1 or more (0: no adapters), not {base.lora}")
    if base.lora and find_spec("peft") is None:
        raise BadInput(f"{where}: [base] lora needs peft; pip install 'moescope[tune]'")
    if not 0 <= base.balance < float("inf"):
        raise BadInput(f"{where}: [base] balance must be 0 or more, not {base.balance}")
    if (base.trained == "experts") != bool(base.expert_list):
        raise BadInput(
            f'{where}: [base] trained = "experts" and expert_list belong together; give both, or neither'
        )


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
        end = tokenizer.eos_token_id
        if end is None:
            raise BadInput(f"{traced.name}: its tokenizer has no end-of-text token; set eos_token in it")
        pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cls(tokenizer, traced.vocabulary, int(end), int(pad))

    def encode(self, text: str) -> NDArray[np.int64]:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


# --- held-out loss


def held_out(model: Any, job: ExistingJob, vocabulary: TokenizerVocabulary) -> pd.DataFrame:
    """Return document, domain, tokens and mean loss of held-out documents, the same for every model."""
    from moescope.lab.evaluation import DocumentSample, document_losses

    train = job.config.train
    sample = DocumentSample.of(job.corpus.validation, vocabulary, train.sequence_length)
    size = max(train.batch_size // train.micro_batches, 1)
    return document_losses(model, sample, size, job.device, train.dtype)


def compared_losses(losses: dict[str, pd.DataFrame], seed: int) -> list[dict[str, Any]]:
    """Return rows of the table base_losses: every model and domain, against the untouched model.

    Differences are of sums over tokens, paired by document, with 95 % intervals over documents: from the
    untouched model, and of the trained model from this one.
    """
    from moescope.statistics import bootstrap_interval

    reference, trained = losses[UNTOUCHED], losses[TRAINED_MODEL]
    rows = []
    for name, frame in losses.items():
        for domain in ("", *dict.fromkeys(reference["domain"])):
            part = np.ones(len(frame), dtype=bool) if domain == "" else (frame["domain"] == domain).to_numpy()
            tokens = frame["tokens"].to_numpy(float)[part]
            loss, before, after = (each["loss"].to_numpy(float)[part] for each in (frame, reference, trained))
            sums = np.stack([tokens * loss, tokens * (loss - before), tokens * (after - loss), tokens], -1)
            strata = np.unique(frame["domain"].to_numpy()[part], return_inverse=True)[1]
            low, high = bootstrap_interval(sums, per_token, strata, seed)
            value = per_token(sums.sum(0))
            row = {"model": name, "domain": domain, "documents": int(part.sum()), "tokens": int(tokens.sum())}
            row |= {"loss": value[0]}
            for at, column, itself in ((1, "difference", UNTOUCHED), (2, "trained_minus", TRAINED_MODEL)):
                ends = (low[at], high[at]) if name != itself else (np.nan, np.nan)
                row |= {column: value[at], f"{column}_low": ends[0], f"{column}_high": ends[1]}
            rows.append(row)
    return rows


def per_token(sums_X: NDArray[Any]) -> NDArray[Any]:
    """Sums over documents, divided by the tokens, which come last."""
    return sums_X[..., :-1] / sums_X[..., -1:]


# --- the training


@dataclass(frozen=True)
class ExistingJob:
    """One training of a model that exists, with all its settings."""

    folder: Path
    name: str  # of the base, as the user gave it
    config: ExistingConfig
    corpus: Corpus
    identity: dict[str, Any]
    device: str
    ranks: Ranks
    quiet: bool
    memory: str  # line about the memory that it needs


def existing_identity(name: str, config: ExistingConfig, corpus: Corpus) -> dict[str, Any]:
    """Return what makes two such trainings the same."""
    arguments = {**jsonable(asdict(config)), "model": {"base": open_checkpoint(name).name}}
    # not as checkpoints: those of a finished training are its results
    return {"arguments": arguments, "bases": [checkpoint_identity(name)], "corpus": corpus.identity}


def settle_trained(name: str, config: ExistingConfig) -> ExistingConfig:
    """Return the config with what is trained where it does not say: routers, of a dense base experts too."""
    dense = is_dense(open_checkpoint(name).config)
    trained = config.base.trained or ("routers+experts" if dense else "routers")
    return replace(config, base=replace(config.base, trained=trained))


def check_base(name: str, config: ExistingConfig, device: str, processes: int = 1) -> tuple[BaseSize, str]:
    """Return the size of the training and a line about its memory; raise where the base cannot be trained.

    Only headers are read.
    """
    checkpoint, base = open_checkpoint(name), config.base
    if checkpoint.packed:
        raise BadInput(
            f"{checkpoint.shown}: tensor {next(iter(checkpoint.packed))} is quantised; train the unquantised "
            "model"
        )
    if is_dense(checkpoint.config):
        target_of(checkpoint, base.experts, base.top_k or 2, base.noise)
        if base.expert_list:
            raise BadInput(
                f"[base] expert_list: {checkpoint.shown} is dense, so no list is of its experts; upcycle it "
                "first, then train experts of the result"
            )
        if not base.noise and base.trained == "routers":
            raise BadInput(
                '[base] trained = "routers": all experts of this base are equal copies, so its routers have '
                'nothing to learn; set trained = "routers+experts", or noise'
            )
        if base.controls and base.trained == "routers":
            raise BadInput(
                '[base] controls = true: a dense base has no routers; set trained = "routers+experts"'
            )
    elif base.noise or base.experts != BaseConfig.experts:
        raise BadInput(
            f"[base] experts = {base.experts}, noise = {base.noise}: {checkpoint.shown} has experts already, "
            "and these are of a dense base; remove them"
        )
    elif base.controls and base.router == KEPT:
        raise BadInput("[base] controls = true: the control is the kept router; name a new [base] router")
    size = base_size(checkpoint, base)
    return size, check_memory(size, device, processes)


def existing_size(name: str, config: ExistingConfig, device: str) -> dict[str, Any]:
    """Return what --dry-run tells about such a training, from the base's headers."""
    size, memory = check_base(name, config, device)
    train = config.train
    tokens_per_step = train.batch_size * train.sequence_length
    return {
        "base": name,
        "router": config.base.router,
        "trained": config.base.trained,
        "parameters_total": size.total,
        "memory": memory,
        "warnings": settings_warnings(train),
        "steps": train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": train.steps * tokens_per_step,
        "config": jsonable(asdict(config)),
    }


def prepare_base(job: ExistingJob, watching: dict[str, Any]) -> str:
    """Return the model to load: the base, or the checkpoint upcycled from it in the run's folder."""
    checkpoint, base = open_checkpoint(job.name), job.config.base
    if not is_dense(checkpoint.config):
        return job.name
    target = job.folder / UPCYCLED
    if job.ranks.first and not target.exists():  # it appears when complete
        claim_folder(job, watching)
        upcycle(checkpoint, target, base.experts, base.top_k or 2, base.noise, job.config.train.seed)
    job.ranks.wait()
    return str(target)


def claim_folder(job: ExistingJob, watching: dict[str, Any]) -> None:
    """Write run.json before anything else, so that the folder is known as this run's."""
    if job.ranks.first and read_run_json(job.folder) is None:
        with open_run(job.folder, **watching):
            pass


def load_base(name: str, device: str, train: TrainConfig) -> tuple[TracedModel, TokenizerVocabulary]:
    """Load a model in float32 with its tokenizer; raise where rows of that length do not fit."""
    from moescope.execution.models import TracedModel, find_model, load_weights, with_tokenizer
    from moescope.lab.tuning import use_autocast_experts

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


def run_existing(job: ExistingJob, watching: dict[str, Any], overwrite: bool = False) -> Run | None:
    """Train to the end, from the last saved state if there is one; return the run on the first rank.

    `watching` are the verb, identity and command of the run that the Monitor writes.
    """
    import torch

    from moescope.lab import tuning
    from moescope.lab.batches import unigram_loss
    from moescope.lab.lora import add_adapters, merge_adapters

    config, train, ranks = job.config, job.config.train, job.ranks
    if ranks.first:
        check_folder(job.folder, job.identity, overwrite)
        if overwrite:
            clear_existing(job.folder)
        if not job.quiet:
            print(job.memory, file=sys.stderr, flush=True)
    ranks.wait()
    dense = is_dense(open_checkpoint(job.name).config)
    losses = {UNTOUCHED: dense_losses(job)} if dense and ranks.first else {}
    torch.manual_seed(train.seed)
    traced, vocabulary = load_base(prepare_base(job, watching), job.device, train)
    model = traced.model
    if ranks.first:
        losses["upcycled" if dense else UNTOUCHED] = held_out(model, job, vocabulary)
    data = rows_of(job.corpus, vocabulary, config)
    family_routers, replaced, agreement = put_router(job, traced, data.validation)
    balanced = config.base.router == KEPT and tuning.use_balance_loss(model, config.base.balance)
    partly = tuning.choose_trained(model, config.base.trained, chosen_experts(config.base, model))
    adapted = None
    if config.base.lora:
        adapted, partly = add_adapters(model, config.base.lora, partly), []
    tuning.mask_gradients(partly)
    claim_folder(job, watching)
    state, step = tuning.last_state(job.folder / TRAINER)
    arguments = tuning.training_arguments(train, job.folder / TRAINER, job.device, ranks.world)
    with progress(train.steps, step, "steps", job.quiet or not ranks.first, line_per_label=False) as advance:
        unigram = unigram_loss(data.train, data.validation, vocabulary.size)
        evaluate = partial(evaluation_rows, job, data.validation, unigram, math.log(vocabulary.size))
        monitor = tuning.TrainingMonitor(job.folder, train, watching, state is None, evaluate, advance)
        trainer = tuning.make_trainer(model, arguments, data.train, partly, monitor)
        monitor.facts = model_facts(job, traced, balanced, replaced) | {"routing_agreement": agreement}
        try:
            trainer.train_from(state)
            if adapted is not None:
                merge_adapters(adapted, job.folder / ADAPTER if ranks.first and replaced is None else None)
            if ranks.first:
                save_result(job, model, vocabulary, replaced, family_routers)
                losses[TRAINED_MODEL] = held_out(model, job, vocabulary)
            if config.base.controls:
                tuning.release(trainer)
                losses |= control_losses(job, dense)
            if monitor.run is not None:
                monitor.keep("base_losses", compared_losses(losses, train.seed))
                save_validation(job.folder / "validation", job.corpus)
                monitor.run.writer.info["checkpoints"] = [
                    {"step": train.steps, **checkpoint_identity(str((job.folder / MODEL).resolve()))}
                ]
                monitor.run.writer.info["finished"] = now()
                warnings = [*monitor.run.writer.info.get("warnings", []), *settings_warnings(train)]
                monitor.run.writer.info["warnings"] = warnings
            run = monitor.close()
            for part in (TRAINER, CONTROL) if ranks.first else ():  # AdamW's moments are twice the model
                if (job.folder / part).exists():
                    remove(job.folder / part)
            return run
        except BadInput as error:
            monitor.stop(str(error))
            raise
        finally:
            monitor.stop()


def clear_existing(folder: Path) -> None:
    """Remove the model, states and parts of an earlier training, and nothing else."""
    if (read_run_json(folder) or {}).get("verb") != "train":
        return
    mark_unfinished(folder)
    for part in (TRAINER, CONTROL, UPCYCLED, MODEL, ADAPTER, "scan", "trace", "validation"):
        if (folder / part).exists():
            remove(folder / part)


def chosen_experts(base: BaseConfig, model: Any) -> dict[int, list[int]]:
    """Return layer -> experts to train, of the list that the config names."""
    from moescope.execution.adapters import find_blocks

    layers = {block.layer: block.n_experts for block in find_blocks(model)}
    return read_expert_list(base.expert_list, layers) if base.expert_list else {}


def rows_of(corpus: Corpus, vocabulary: TokenizerVocabulary, config: ExistingConfig) -> Data:
    """Return the corpus as rows: all training rows, and the validation rows for evaluations."""
    from moescope.lab.batches import TokenRows
    from moescope.lab.training import Data

    length, layout = config.train.sequence_length, config.data.layout
    rows = [TokenRows.of(texts, vocabulary, length, layout) for texts in (corpus.train, corpus.validation)]
    return Data(rows[0], rows[1].sample(config.train.evaluation_rows))


def evaluation_rows(
    job: ExistingJob, rows: TokenRows, unigram: dict[str, float], uniform: float, model: Any, step: int
) -> list[dict[str, Any]]:
    """Return one evaluation as rows of the table, all domains together first."""
    from moescope.lab.evaluation import evaluate

    train = job.config.train
    size = max(train.batch_size // train.micro_batches, 1)
    found = evaluate(model, rows, step, size, job.device, train.dtype)
    return [
        {
            "step": step,
            "domain": domain,
            "loss": loss,
            "unigram_loss": unigram[domain],
            "uniform_loss": uniform,
        }
        for domain, loss in {"": found.loss, **found.domains}.items()
    ]


def put_router(
    job: ExistingJob, traced: TracedModel, rows: TokenRows
) -> tuple[list[Any], Replaced | None, dict[str, float] | None]:
    """Replace the model's routers where asked; their agreement is measured on some of the rows.

    Returns the family's own routers, what replaced them, and the routing agreement before training, which a
    dense base does not have.
    """
    base, dense = job.config.base, is_dense(open_checkpoint(job.name).config)
    if base.router == KEPT:
        if base.top_k and not dense:
            raise BadInput("[base] top_k is of a new router or a dense base; name a router, or remove it")
        stored = getattr(traced.config, KEY, None)  # its routers are not of its family
        share_ranks(traced.model, job.ranks)
        return [], Replaced.of(stored) if stored else None, None
    import torch

    from moescope.execution.adapters import find_blocks
    from moescope.execution.replaced import replace_routers

    family_routers = [
        block.module.gate for block in find_blocks(traced.model) if hasattr(block.module, "gate")
    ]
    batch = rows.batch(np.arange(min(rows.rows, 16)))
    sample = [torch.from_numpy(part).to(job.device) for part in (batch.ids_BL, batch.mask_BL)]
    before = {} if dense else chosen_by_layer(traced.model, *sample)
    config = ModelConfig(router=base.router, top_k=base.top_k, router_options=base.router_options)
    replaced = replace_routers(traced.model, config)
    share_ranks(traced.model, job.ranks)
    shares = None if dense else agreement(before, chosen_by_layer(traced.model, *sample))
    return family_routers, replaced, shares


def share_ranks(model: Any, ranks: Ranks) -> None:
    """Let routers of the lab see the loads of all ranks."""
    for one in getattr(model, "routers_instead", ()):
        one.router.ranks = ranks


def chosen_by_layer(model: Any, ids_BL: Any, real_BL: Any) -> dict[int, Any]:
    """Return layer -> chosen experts of every real token, -1 in empty slots."""
    import torch

    from moescope.execution.capture import Capture

    chosen: dict[int, Any] = {}

    def consume(routing: Any) -> None:
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


def model_facts(
    job: ExistingJob, traced: TracedModel, balanced: bool, replaced: Replaced | None
) -> dict[str, Any]:
    """Return run.json's facts: the model, what is trained, the text."""
    from moescope.decoder.routers import router_class
    from moescope.execution.adapters import find_blocks

    blocks, weights = find_blocks(traced.model), list(traced.model.named_parameters())
    text = traced.config.get_text_config()
    top_k = replaced.model.top_k if replaced else getattr(text, "num_experts_per_tok", None) or 1
    kind = None if replaced is None else router_class(replaced.model.router)
    return {
        "device": job.device,
        "processes": job.ranks.world,
        "parameters_total": sum(weight.numel() for name, weight in weights if ".lora_" not in name),
        "parameters_trainable": sum(weight.numel() for _, weight in weights if weight.requires_grad),
        "frozen": describe_trained(job.config.base, balanced),
        "model": {
            "router": job.config.base.router,
            "upcycled": is_dense(open_checkpoint(job.name).config),
            "experts": max(block.n_experts for block in blocks),
            "layers": len(blocks),
            "top_k": int(top_k),
            "vocabulary": traced.vocabulary,
        },
        "router_facts": {
            "routes": True,
            "experts_choose": False,
            **(kind.facts(replaced.model) if kind and replaced else {}),
        },
        "vocabulary_size": traced.vocabulary,
        "domains": job.corpus.sizes(),
    }


def describe_trained(base: BaseConfig, balanced: bool) -> str:
    what = {"experts": f"the experts of {base.expert_list}"}.get(base.trained, base.trained)
    loss = f"balance loss weighted {base.balance:g}" if balanced and base.balance else "no balance loss"
    loss = loss if base.router == KEPT else "the new router's own losses"
    through = f" through adapters of rank {base.lora}" if base.lora else ""
    return f"trained: {what.replace('+', ' and ')}{through}; {loss}"


def save_result(
    job: ExistingJob,
    model: Any,
    vocabulary: TokenizerVocabulary,
    replaced: Replaced | None,
    family_routers: list[Any],
) -> None:
    """Write the trained model: as an ordinary checkpoint of its family where that has the router."""
    from moescope.execution.models import quiet_transformers
    from moescope.execution.replaced import save_replaced

    if (job.folder / MODEL).exists():
        remove(job.folder / MODEL)
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


def dense_losses(job: ExistingJob) -> pd.DataFrame:
    """Return the dense base's losses on held-out documents."""
    traced, vocabulary = load_base(job.name, job.device, job.config.train)
    return held_out(traced.model, job, vocabulary)


def control_losses(job: ExistingJob, dense: bool) -> dict[str, pd.DataFrame]:
    """Train the controls as long, on the same text; return their losses on held-out documents."""
    losses = {}
    if dense:
        losses["dense, trained on"] = control_loss(job, job.name, job.folder / CONTROL / "dense")
    if job.config.base.router != KEPT:
        name = str(job.folder / UPCYCLED) if dense else job.name
        losses["kept router, trained"] = control_loss(job, name, job.folder / CONTROL / KEPT)
    return losses


def control_loss(job: ExistingJob, name: str, folder: Path) -> pd.DataFrame:
    """Train one control, from its last saved state if there is one; return its losses.

    Of a dense model the feed-forward blocks are trained, or everything where everything is.
    """
    import torch

    from moescope.lab import tuning
    from moescope.lab.lora import add_adapters

    train, base = job.config.train, job.config.base
    torch.manual_seed(train.seed)
    traced, vocabulary = load_base(name, job.device, train)
    model, partly = traced.model, []
    if not is_dense(open_checkpoint(name).config):
        share_ranks(model, job.ranks)
        tuning.use_balance_loss(model, base.balance)
        partly = tuning.choose_trained(model, base.trained, chosen_experts(base, model))
    elif base.trained != "everything":
        for part, weight in model.named_parameters():
            weight.requires_grad_(".mlp." in part)
    if base.lora:
        add_adapters(model, base.lora, partly)
        partly = []
    tuning.mask_gradients(partly)
    rows = rows_of(job.corpus, vocabulary, job.config).train
    arguments = tuning.training_arguments(train, folder, job.device, job.ranks.world)
    trainer = tuning.make_trainer(model, arguments, rows, partly)
    trainer.train_from(tuning.last_state(folder, tuning.STATE)[0])
    losses = held_out(model, job, vocabulary)
    tuning.release(trainer)
    return losses
