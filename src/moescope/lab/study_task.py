"""One training of a study: train or resume it, measure it, and return rows of the study's tables."""

from __future__ import annotations

import gc
import json
import math
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.lab.train import STATE, Job, lock_training, run_training, saved_checkpoints
from moescope.processor import avoid_broken_amx
from moescope.progress import unsaid_alerts
from moescope.run import Run, finished_run, jsonable, read_run_json, write_json
from moescope.storage import atomic_folder, check_disk, sync_file

if TYPE_CHECKING:
    import pandas as pd

    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.config import LabConfig
    from moescope.lab.corpus import Corpus
    from moescope.lab.evaluation import DocumentSample
    from moescope.lab.training import Data

DONE, FAILED, NOT_RUN = "done", "failed", "not run"
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
    """Train to the end, from the last checkpoint if there is one, and measure; then free the memory."""
    try:
        return train_and_measure(device, task, tick)
    finally:
        free_memory()


def free_memory() -> None:
    """Free models that nothing uses any more, and what torch keeps of a GPU that other processes may share.

    A model, its optimizer and its monitor refer to each other, so they stay until Python collects garbage,
    and a full GPU does not make it do so.
    """
    import torch

    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def train_and_measure(device: str, task: TrainingTask, tick: Callable[[], None]) -> TaskResult:
    """Return the task's rows.

    A training that diverges has failed. One that runs out of memory was not run: there may be room another
    time. Every other error is raised: it would also stop the next training.
    """
    import pandas as pd
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
    row = {**task.keys, "question": task.question, **costs(task.config), **routing_size(task.config)}
    try:
        # Alerts are in each training's table; printed, they would not name their training.
        with unsaid_alerts(), lock_training(task.folder):
            run = run or run_training(job)
        assert run is not None
        free_memory()  # the model is loaded from its checkpoint
        values, tables = measure(run, task, text, device)
    except torch.OutOfMemoryError as error:
        return TaskResult(status=NOT_RUN, message=memory_message(error))
    except Diverged as error:
        row |= {"status": FAILED, "message": str(error).splitlines()[0]}
        frames = {"study_runs": pd.DataFrame([row])}
        curves = curves_of(Run.load(task.folder), task) if read_run_json(task.folder) else None
        return TaskResult(frames if curves is None else {**frames, "study_curves": curves}, FAILED)
    frames = {
        "study_runs": pd.DataFrame([{**row, "status": DONE, **values}]),
        **{name: frame.assign(**task.keys) for name, frame in tables.items() if len(frame)},
    }
    curves = curves_of(run, task)
    frames |= {} if curves is None else {"study_curves": curves}
    return TaskResult(frames | probe_model(run, task, text, device))


def memory_message(error: Exception) -> str:
    """Return the first three sentences of torch's paragraph."""
    return ". ".join(str(error).split("\n")[0].split(". ")[:3]).rstrip(".")


_COSTS: dict[str, dict[str, int]] = {}  # by config: the tables are written again after every training


def costs(config: LabConfig) -> dict[str, int]:
    """Count parameters and FLOPs, which are known before training."""
    from moescope.decoder.model import parameter_counts
    from moescope.lab.cost import active_parameters, flops_per_token

    key = repr((config.model, config.train.sequence_length))
    if key not in _COSTS:
        counts = parameter_counts(config.model)
        _COSTS[key] = {
            "parameters_total": counts.total,
            "parameters_trainable": counts.trainable,
            "parameters_active": active_parameters(config.model),
            "flops_per_token": round(flops_per_token(config.model, config.train.sequence_length)),
        }
    return _COSTS[key]


def routing_size(config: LabConfig) -> dict[str, int | None]:
    """Return experts and top-k of the arm's router, if it routes, and tokens per step."""
    from moescope.decoder.routers import router_class

    model, train = config.model, config.train
    facts = router_class(model.router).facts(model)
    return {
        "n_experts": model.experts if facts["routes"] else None,
        "top_k": (facts["fixed_top_k"] or model.top_k) if facts["routes"] else None,
        "tokens_per_step": train.batch_size * train.sequence_length,
    }


def measure(
    run: Run, task: TrainingTask, text: StudyText, device: str
) -> tuple[dict[str, float | None], dict[str, pd.DataFrame]]:
    """Return the training's values in study_runs, and its rows of tables that need the trained model."""
    import pandas as pd

    from moescope.decoder.saving import load_model
    from moescope.lab.evaluation import checkpoint_stability, document_losses, evaluation_noise, mean_loss
    from moescope.lab.some_keys import key_tables
    from moescope.lab.study_routing import measure_routing
    from moescope.lab.study_statistics import final_slope

    train = task.config.train
    checkpoints = [(item["step"], Path(item["path"])) for item in saved_checkpoints(run.path / "checkpoints")]
    model, _ = load_model(checkpoints[-1][1], device)
    size = max(train.batch_size // train.micro_batches, 1)
    documents = document_losses(model, text.documents, size, device, train.dtype)
    documents["bytes"] = text.document_bytes
    trained = text.corpus.domains
    layers, loads = measure_routing(model, text.documents, trained, size, device, train.dtype)
    routes = len(loads) > 0
    if model.routers[0].has_keys:
        keys = key_tables(run, model, train.steps)
        found = keys["key_metrics"].assign(metric="key_" + keys["key_metrics"]["metric"], domain="")
        layers = pd.concat([layers, found[list(layers)]], ignore_index=True)
        of_keys = {"study_keys": keys["key_map"].drop(columns=["step", "variance_share_chance"])}
    else:
        of_keys = {}
    del model
    tables = of_keys | {"study_documents": documents, "study_layers": layers, "study_loads": loads}
    tables["study_usage"] = usage_over_steps(run)
    documents = documents[documents["domain"].isin(trained)]  # others were never trained on
    noise = evaluation_noise(documents)
    stability = checkpoint_stability(checkpoints, text.data.validation, device)
    last = load_over_steps(run)
    values: dict[str, float | None] = {"validation_loss": mean_loss(documents)}
    published = run.table("steps")["validation_loss_published"].dropna()
    values["validation_loss_published"] = published.iloc[-1] if len(published) else None
    values |= {"unigram_loss": text.unigram_loss, "loss_slope": final_slope(run.table("steps"), train.steps)}
    values["output_documents"] = len(documents) if routes else None
    nats = float((documents["tokens"] * documents["loss"]).sum())
    values["bits_per_byte"] = nats / math.log(2) / max(int(documents["bytes"].sum()), 1)
    values |= dict(zip(("noise_low", "noise_high", "noise_std"), noise or (None, None, None), strict=True))
    named = (*LOAD, "load_cv_chance", "routing_entropy_chance")
    values |= {column: last[column].iloc[-1] for column in named if len(last) and column in last}
    if stability is not None:
        values |= {**asdict(stability), "consistency_estimated": 0}
    return {**values, **speed(run)}, tables


def usage_over_steps(run: Run) -> pd.DataFrame:
    """Return each expert's share of its layer's load since the previous row; empty for a dense model."""
    import pandas as pd

    if "load" not in run.tables or not run.info["router_facts"]["routes"]:
        return pd.DataFrame()
    load = (
        run.table("load").groupby(["step", "layer", "layer_name", "expert"], as_index=False)["tokens"].sum()
    )
    total = load.groupby(["step", "layer"])["tokens"].transform("sum")
    return load.assign(share=load["tokens"] / total.clip(lower=1)).drop(columns="tokens")


def probe_model(run: Run, task: TrainingTask, text: StudyText, device: str) -> dict[str, pd.DataFrame]:
    """Return what `study_probes` and the tasks of lm-eval find in the trained model."""
    from moescope.decoder.saving import load_model
    from moescope.lab.study_probes import probe

    train = task.config.train
    model, _ = load_model(Path(saved_checkpoints(run.path / "checkpoints")[-1]["path"]), device)
    size = max(train.batch_size // train.micro_batches, 1)
    frames = probe(model, text.data.validation, text.vocabulary, size, device, train.dtype)
    if task.tasks:
        from moescope.lab.tasks import score_tasks

        frames["study_tasks"] = score_tasks(task.tasks, model, text.vocabulary, size, device, train.dtype)
    return {name: frame.assign(**task.keys) for name, frame in frames.items()}


def load_over_steps(run: Run) -> pd.DataFrame:
    """Return step, the columns of LOAD and *_chance of each, means over layers; empty for a dense model."""
    import pandas as pd

    facts = run.info["router_facts"]
    if "routing_layers" not in run.tables or not facts["routes"]:
        return pd.DataFrame(columns=["step"])
    rows = run.table("routing_layers")
    names = {metric: column for column, metric in LOAD.items()}
    rows = rows[rows["metric"].isin(list(names)) & (rows["domain"] == "")]
    if facts["experts_choose"]:  # a slot per token and expert, most of them empty by design
        rows = rows[rows["metric"] != "dropped"]
    kinds = {"value": "", "chance": "_chance"}
    wide = rows.pivot_table(index="step", columns="metric", values=list(kinds), aggfunc="mean")
    wide.columns = pd.Index([f"{names[metric]}{kinds[kind]}" for kind, metric in wide.columns])
    return wide.reset_index()


def curves_of(run: Run, task: TrainingTask) -> pd.DataFrame | None:
    """Return rows of study_curves; None if nothing was logged before the training stopped."""
    if "steps" not in run.tables:
        return None
    steps = run.table("steps")[["step", "train_loss", "validation_loss", "validation_loss_published"]]
    load = load_over_steps(run)
    named = (name for column in CURVES for name in (column, f"{column}_chance"))
    columns = ["step", *(column for column in named if column in load)]
    joined = steps.merge(load[columns], on="step", how="outer").sort_values("step", ignore_index=True)
    return joined.assign(**task.keys)


def speed(run: Run) -> dict[str, float | None]:
    """Return tokens per second without evaluations, peak GPU memory, and seconds over all attempts.

    A CPU's peak memory is that of the process, which trainings share.
    """
    steps = run.table("steps").sort_values("step")
    steps = steps[steps["tokens_per_second"].notna()]
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
    saved = saved_checkpoints(states)
    removed = saved[:-1] if keep == "last" else saved
    for item in removed:
        shutil.rmtree(item["path"], ignore_errors=True)
    (states / STATE).unlink(missing_ok=True)
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
    document_bytes: list[int]  # that the predicted tokens of each document stand for
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
                sync_file(file)
    if not (target / IDS_FOLDER).exists():
        with atomic_folder(target / IDS_FOLDER) as partial:
            for side in SIDES:
                for at, texts in enumerate(getattr(corpus, side).values()):
                    ids = TokenIds.of(texts, vocabulary)
                    check_disk(folder, ids.stream.nbytes + ids.ends.nbytes)
                    ids.save(partial, f"{side}-{at}")
            for file in partial.iterdir():
                sync_file(file)


_TEXTS: dict[tuple[object, ...], StudyText] = {}  # of the study this process works for


def load_text(folder: Path, identity: str, config: LabConfig) -> StudyText:
    """Return the study's text, read and split into rows once per process; `identity` is the corpus's."""
    import numpy as np

    from moescope.decoder.vocabulary import load_vocabulary
    from moescope.lab.batches import TokenIds, TokenRows, unigram_log_probability
    from moescope.lab.corpus import Corpus
    from moescope.lab.evaluation import WINDOWS, DocumentSample
    from moescope.lab.training import Data

    train, layout = config.train, config.data.layout
    key = (folder, identity, train.sequence_length, train.evaluation_rows, layout)
    if key not in _TEXTS:
        content = json.loads((folder / TEXT_FOLDER / "corpus.json").read_text(encoding="utf-8"))
        corpus = Corpus(**{**content, **{name: tuple(content.get(name, ())) for name in ("domains", "cut")}})
        vocabulary = load_vocabulary(folder / TEXT_FOLDER)
        windows = WINDOWS if layout == "packed" else 1
        ids = {
            side: {
                domain: TokenIds.load(folder / TEXT_FOLDER / IDS_FOLDER, f"{side}-{at}")
                for at, domain in enumerate(getattr(corpus, side))
            }
            for side in SIDES
        }
        held_out = {**ids["validation"], **ids["unseen"]}
        documents = DocumentSample.of_ids(held_out, vocabulary.pad, train.sequence_length, windows)
        rows, held_out_rows = (
            TokenRows.of_ids(ids[side], vocabulary.pad, train.sequence_length, layout)
            for side in ("train", "validation")
        )
        data = Data(rows, held_out_rows.sample(train.evaluation_rows))
        log_p = unigram_log_probability(data.train, vocabulary.size)
        targets = [window.tokens[1:] for window in documents.windows]
        of_document = [window.document for window in documents.windows]
        sizes, count_bytes = [0] * len(documents.domains), vocabulary.byte_counts()
        for at, tokens in zip(of_document, targets, strict=True):
            sizes[at] += int(count_bytes[tokens].sum())
        counted = [
            log_p[tokens]
            for at, tokens in zip(of_document, targets, strict=True)
            if documents.domains[at] in corpus.domains
        ]
        unigram = -float(np.concatenate(counted).mean())
        _TEXTS.clear()
        _TEXTS[key] = StudyText(corpus, vocabulary, data, documents, sizes, unigram)
    return _TEXTS[key]
