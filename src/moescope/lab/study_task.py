"""One training of a study: train or resume it, measure it, and return rows of the study's tables."""

from __future__ import annotations

import gc
import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.lab.config import STATE, load_function
from moescope.lab.study_statistics import FAILED, NOT_RUN, final_slope, long_rows
from moescope.lab.train import Job, checkpoint_folders, lock_training, run_training, saved_checkpoints
from moescope.processor import avoid_broken_amx
from moescope.progress import unsaid_alerts
from moescope.run import Run, finished_run, jsonable, read_run_json, write_json
from moescope.storage import atomic_folder, check_disk, remove, sync
from moescope.types import Integers

if TYPE_CHECKING:
    from moescope.decoder.model import LabModel
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.config import LabConfig
    from moescope.lab.corpus import Corpus
    from moescope.lab.evaluation import DocumentSample
    from moescope.lab.training import Data

DONE = "done"
TRAININGS, TEXT_FOLDER, IDS_FOLDER = "trainings", "text", "ids"
# column of study_runs -> the Monitor's metric whose mean over layers it is
LOAD = {
    "load_cv": "cv",
    "max_over_mean": "max_over_mean",
    "routing_entropy": "routing_entropy",
    "unused_share": "unused",
    "dropped_share": "dropped",
}
MOST_COMPILED = 4096  # versions of a function: a process trains many arms
CURVES = ("load_cv", "routing_entropy", "unused_share")  # with the chance levels that the Monitor states


@dataclass(frozen=True)
class TrainingTask:
    """What to train, and where; small, so that it can be sent to another process."""

    study: Path
    name: str
    arm: str
    seed: int
    question: str
    config: LabConfig
    corpus: str  # its identity
    tasks: str = ""  # of lm-eval
    probe: str = ""  # FILE.py:FUNCTION

    @property
    def folder(self) -> Path:
        return self.study / TRAININGS / self.name

    @property
    def keys(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed}


@dataclass(frozen=True)
class TaskResult:
    """One training's rows of the study's tables."""

    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    status: str = DONE  # NOT_RUN: out of memory; to be repeated
    message: str = ""  # of a training that was not run


def run_task(device: str, task: TrainingTask, tick: Callable[[], None]) -> TaskResult:
    """Train to the end, from the last checkpoint if there is one, and measure; then free the memory.

    A training that diverges has failed. One that runs out of memory was not run: there may be room another
    time. Every other error is raised: it would also stop the next training.
    """
    import torch

    from moescope.decoder.ranks import Ranks
    from moescope.lab.training import Diverged

    avoid_broken_amx(device, task.config.train.dtype == "bfloat16")  # in a worker on another machine
    text = load_text(task.study, task.corpus, task.config)
    identity = {"arguments": {**jsonable(asdict(task.config)), "from": None}, "corpus": task.corpus}
    sources = (task.config, text.corpus, text.vocabulary, identity, None)
    command = shlex.join(["moescope", "study", "--resume", "--out", str(task.study.resolve())])
    job = Job(task.folder, *sources, device, Ranks(), True, command, text.data, tick)
    run = finished_run(task.folder, identity)
    if run is not None:
        for _ in range(task.config.train.steps):
            tick()
    elif device.startswith("cuda"):
        torch.cuda.init()  # type: ignore[no-untyped-call] # a process without a GPU context has nothing to reset
        torch.cuda.reset_peak_memory_stats()
    if task.config.train.compile:
        # by default a function is no longer compiled after eight sizes and sets of options
        limits = torch._dynamo.config
        limits.recompile_limit = limits.accumulated_recompile_limit = MOST_COMPILED
    row: dict[str, Any] = {"question": task.question, "status": DONE, **costs(task.config)}
    frames: dict[str, pd.DataFrame] = {}
    try:
        # Alerts are in each training's table; printed, they would not name their training.
        with unsaid_alerts(), lock_training(task.folder):
            run = run or run_training(job)
        assert run is not None
        free_memory()  # the model is loaded from its checkpoint
        values, frames = measure(run, task, text, device)
        row |= values
    except torch.OutOfMemoryError as error:
        return TaskResult(status=NOT_RUN, message=memory_message(error))
    except Diverged as error:
        row |= {"status": FAILED, "message": str(error).splitlines()[0]}
        run = Run.load(task.folder) if read_run_json(task.folder) else None
    finally:
        free_memory()
    if run is not None and "steps" in run.tables:
        frames["study_curves"] = curves_of(run)
    frames = {name: frame.assign(**task.keys) for name, frame in frames.items() if len(frame)}
    return TaskResult({"study_runs": pd.DataFrame([{**task.keys, **row}]), **frames}, row["status"])


def free_memory() -> None:
    """Free models that nothing uses any more, and what torch keeps of a GPU that other processes may share.

    A model, its optimizer and its monitor refer to each other, so they stay until Python collects garbage,
    and a full GPU does not make it do so.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def memory_message(error: Exception) -> str:
    """Return the first three sentences of torch's paragraph."""
    return ". ".join(str(error).split("\n")[0].split(". ")[:3]).rstrip(".")


_COSTS: dict[str, dict[str, Any]] = {}  # by config: the tables are written again after every training


def costs(config: LabConfig) -> dict[str, Any]:
    """Count parameters, FLOPs, experts and top-k if the router routes, and tokens: known before training."""
    from moescope.decoder.model import parameter_counts
    from moescope.decoder.routers import router_class
    from moescope.lab.cost import active_parameters, flops_per_token

    model, train = config.model, config.train
    key = repr((model, train.sequence_length, train.batch_size))
    if key not in _COSTS:
        counts, facts = parameter_counts(model), router_class(model.router).facts(model)
        _COSTS[key] = {
            "parameters_total": counts.total,
            "parameters_trainable": counts.trainable,
            "parameters_active": active_parameters(model),
            "flops_per_token": round(flops_per_token(model, train.sequence_length)),
            "n_experts": model.experts if facts["routes"] else None,
            "top_k": (facts["fixed_top_k"] or model.top_k) if facts["routes"] else None,
            "tokens_per_step": train.batch_size * train.sequence_length,
        }
    return _COSTS[key]


def measure(
    run: Run, task: TrainingTask, text: StudyText, device: str
) -> tuple[dict[str, float | None], dict[str, pd.DataFrame]]:
    """Return the training's values in study_runs, and its rows of tables that need the trained model."""
    from moescope.decoder.saving import load_model
    from moescope.lab.evaluation import document_losses, evaluation_noise, mean_loss
    from moescope.lab.trained_routing import checkpoint_stability, key_tables, measure_routing

    train, steps = task.config.train, run.table("steps")
    checkpoints = [(item["step"], Path(item["path"])) for item in saved_checkpoints(run.path / "checkpoints")]
    model, _ = load_model(checkpoints[-1][1], device)
    size = max(train.batch_size // train.micro_batches, 1)
    documents = document_losses(model, text.documents, size, device, train.dtype)
    documents["bytes"] = text.document_bytes
    trained = text.corpus.domains
    layers, loads = measure_routing(model, text.documents, trained, size, device, train.dtype)
    tables = {"study_documents": documents, "study_loads": loads, "study_usage": usage_over_steps(run)}
    if model.routers[0].has_keys:
        keys = key_tables(run, model, train.steps)
        found = keys["key_metrics"].assign(metric="key_" + keys["key_metrics"]["metric"], domain="")
        layers = pd.concat([layers, found[list(layers)]], ignore_index=True)
        tables["study_keys"] = keys["key_map"].drop(columns=["step", "variance_share_chance"])
    tables |= {"study_layers": layers, **probe_model(model, task, text, size, device)}
    del model
    documents = documents[documents["domain"].isin(trained)]  # others were never trained on
    noise = evaluation_noise(documents) or (None, None, None)
    stability = checkpoint_stability(checkpoints, text.data.validation, device)
    last = load_over_steps(run).tail(1)
    published = steps["validation_loss_published"].dropna()
    nats = float((documents["tokens"] * documents["loss"]).sum())
    values = {
        "validation_loss": mean_loss(documents),
        "validation_loss_published": published.iloc[-1] if len(published) else None,
        "unigram_loss": text.unigram_loss,
        "loss_slope": final_slope(steps, train.steps),
        "output_documents": len(documents) if len(loads) else None,
        "bits_per_byte": nats / math.log(2) / max(int(documents["bytes"].sum()), 1),
        **dict(zip(("noise_low", "noise_high", "noise_std"), noise, strict=True)),
        **{
            column: last[column].iloc[0]
            for column in (*LOAD, "load_cv_chance", "routing_entropy_chance")
            if len(last) and column in last
        },
        **stability,
        "consistency_estimated": 0 if stability else None,
    }
    return {**values, **speed(run)}, tables


def usage_over_steps(run: Run) -> pd.DataFrame:
    """Return each expert's share of its layer's load since the previous row; empty for a dense model."""
    if "load" not in run.tables or not run.info["router_facts"]["routes"]:
        return pd.DataFrame()
    keys = ["step", "layer", "layer_name", "expert"]
    load = run.table("load").groupby(keys, as_index=False)["tokens"].sum()
    total = load.groupby(["step", "layer"])["tokens"].transform("sum")
    return load.assign(share=load["tokens"] / total.clip(lower=1)).drop(columns="tokens")


def probe_model(
    model: LabModel, task: TrainingTask, text: StudyText, size: int, device: str
) -> dict[str, pd.DataFrame]:
    """Return what the study's probe and the tasks of lm-eval find in the trained model."""
    import torch

    train, frames = task.config.train, {}
    if task.probe:
        function = load_function(task.probe, Path(), "probe")
        try:
            frames["study_probes"] = long_rows(function(model, text.data.validation, text.vocabulary, train))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise BadInput(f"probe {task.probe} failed on {task.folder.name} ({problem}); mend it") from error
    if task.tasks:
        from moescope.lab.tasks import score_tasks

        frames["study_tasks"] = score_tasks(task.tasks, model, text.vocabulary, size, device, train.dtype)
    return frames


def load_over_steps(run: Run) -> pd.DataFrame:
    """Return step, the columns of LOAD and *_chance of each, means over layers; empty for a dense model."""
    facts = run.info["router_facts"]
    if "routing_layers" not in run.tables or not facts["routes"]:
        return pd.DataFrame(columns=["step"])
    names = {metric: column for column, metric in LOAD.items()}
    if facts["experts_choose"]:  # a slot per token and expert, most of them empty by design
        del names["dropped"]
    rows = run.table("routing_layers")
    rows = rows[rows["metric"].isin([*names]) & (rows["domain"] == "")]
    wide = rows.pivot_table(index="step", columns="metric", values=["value", "chance"], aggfunc="mean")
    ends = {"value": "", "chance": "_chance"}
    return wide.set_axis([f"{names[metric]}{ends[kind]}" for kind, metric in wide], axis=1).reset_index()


def curves_of(run: Run) -> pd.DataFrame:
    """Return rows of study_curves."""
    steps = run.table("steps")[["step", "train_loss", "validation_loss", "validation_loss_published"]]
    named = (name for column in CURVES for name in (column, f"{column}_chance"))
    load = load_over_steps(run).filter(["step", *named])
    return steps.merge(load, on="step", how="outer").sort_values("step", ignore_index=True)


def speed(run: Run) -> dict[str, float | None]:
    """Return tokens per second without evaluations, peak GPU memory, and seconds over all attempts.

    A CPU's peak memory is that of the process, which trainings share.
    """
    steps = run.table("steps").sort_values("step").dropna(subset="tokens_per_second")
    tokens = steps["tokens"].diff().fillna(steps["tokens"])
    seconds = float((tokens / steps["tokens_per_second"]).sum())
    peak = steps["peak_memory_bytes"].max() if str(run.info["device"]).startswith("cuda") else None
    return {
        "tokens_per_second": float(tokens.sum()) / seconds if seconds else None,
        "peak_memory_bytes": peak,
        "seconds": run.info["timings"].get("train"),
    }


def prune(folder: Path, keep: str) -> None:
    """Remove a measured training's resume state and all checkpoints except those to keep."""
    info = read_run_json(folder)
    if keep == "all" or info is None:
        return
    states = folder / "checkpoints"
    saved = [*checkpoint_folders(states).values()]
    removed = saved[:-1] if keep == "last" else saved
    for path in (*removed, states / STATE):
        remove(path, folder)
    if removed:
        write_json(folder / "run.json", {**info, "checkpoints": saved_checkpoints(states)})


# --- the text, read and encoded once and stored in the study's folder: every training reads the same


@dataclass(frozen=True)
class StudyText:
    """What all trainings of a study share."""

    corpus: Corpus
    vocabulary: Vocabulary
    data: Data
    documents: DocumentSample
    document_bytes: Integers  # that the predicted tokens of each document stand for
    unigram_loss: float  # of the unigram baseline on the documents of trained domains


SIDES = ("train", "validation", "unseen")


def save_text(folder: Path, corpus: Corpus, vocabulary: Vocabulary) -> None:
    """Write corpus, tokenizer and token ids, each completely or not at all, unless the study has them."""
    from moescope.lab.batches import TokenIds

    target = folder / TEXT_FOLDER
    if not target.exists():
        content = json.dumps(asdict(corpus), ensure_ascii=False).encode()
        check_disk(folder, len(content))
        with atomic_folder(target) as partial:
            (partial / "corpus.json").write_bytes(content)
            vocabulary.save(partial)
            for file in partial.iterdir():
                sync(file)
    if not (target / IDS_FOLDER).exists():
        with atomic_folder(target / IDS_FOLDER) as partial:
            for side in SIDES:
                for at, texts in enumerate(getattr(corpus, side).values()):
                    ids = TokenIds.of(texts, vocabulary)
                    check_disk(folder, ids.stream.nbytes + ids.ends.nbytes)
                    ids.save(partial, f"{side}-{at}")
            for file in partial.iterdir():
                sync(file)


_TEXTS: dict[tuple[object, ...], StudyText] = {}  # of the study this process works for


def load_text(folder: Path, identity: str, config: LabConfig) -> StudyText:
    """Return the study's text, read and split into rows once per process; `identity` is the corpus's."""
    from moescope.decoder.vocabulary import load_vocabulary
    from moescope.lab.batches import TokenIds, TokenRows, unigram_log_probability
    from moescope.lab.corpus import Corpus
    from moescope.lab.evaluation import WINDOWS, DocumentSample
    from moescope.lab.training import Data

    train, layout = config.train, config.data.layout
    key = (folder, identity, train.sequence_length, train.evaluation_rows, layout)
    if key not in _TEXTS:
        stored = folder / TEXT_FOLDER
        content = json.loads((stored / "corpus.json").read_text(encoding="utf-8"))
        corpus = Corpus(**{**content, **{name: tuple(content.get(name, ())) for name in ("domains", "cut")}})
        vocabulary = load_vocabulary(stored)
        ids = {
            side: {
                domain: TokenIds.load(stored / IDS_FOLDER, f"{side}-{at}")
                for at, domain in enumerate(getattr(corpus, side))
            }
            for side in SIDES
        }
        rows, held_out_rows = (
            TokenRows.of_ids(ids[side], vocabulary.pad, train.sequence_length, layout)
            for side in ("train", "validation")
        )
        data = Data(rows, held_out_rows.sample(train.evaluation_rows))
        held_out, windows = {**ids["validation"], **ids["unseen"]}, WINDOWS if layout == "packed" else 1
        documents = DocumentSample.of_ids(held_out, vocabulary.pad, train.sequence_length, windows)
        targets_T = np.concatenate([window.tokens[1:] for window in documents.windows])
        lengths = [len(window.tokens) - 1 for window in documents.windows]
        document_T = np.repeat([window.document for window in documents.windows], lengths)
        sizes = np.bincount(document_T, vocabulary.byte_counts()[targets_T], len(documents.domains))
        in_loss_T = np.isin(documents.domains, corpus.domains)[document_T]
        unigram = -float(unigram_log_probability(data.train, vocabulary.size)[targets_T[in_loss_T]].mean())
        _TEXTS.clear()
        _TEXTS[key] = StudyText(corpus, vocabulary, data, documents, sizes.astype(int), unigram)
    return _TEXTS[key]
