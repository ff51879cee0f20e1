"""Tasks of lm-eval (the extra `tasks`), for a base model and its trained result, and for studies."""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput, reason
from moescope.lab.config import MODEL, TrainConfig
from moescope.lab.tables import TRAIN_TABLES
from moescope.run import Run, write_json, write_table

if TYPE_CHECKING:
    from moescope.decoder.model import LabModel
    from moescope.decoder.vocabulary import Vocabulary

LOGGERS = ("lm_eval", "huggingface_hub", "datasets")  # they repeat at length what an error says
FEWSHOT_SEED = 1234  # lm-eval's own
NO_FILTER = "none"  # lm-eval's name for answers as they are
STUDY_OPTION = "tasks ="
ACCURACIES = ("acc", "acc_norm")  # of choices: chance is one over their number


@contextmanager
def without_messages(quiet: bool) -> Iterator[None]:
    """Keep the libraries' log messages back; where quiet, their progress bars too."""
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()) if quiet else nullcontext():
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def task_names(listed: str) -> list[str]:
    return [*dict.fromkeys(part.strip() for part in listed.split(",") if part.strip())]


def load_tasks(listed: str, option: str = "--tasks") -> dict[str, Any]:
    """Return lm-eval's tasks and groups with their data, so that a missing one is known before a training.

    `listed` are, separated by commas, names of lm-eval, YAML files of tasks, and folders of such files.
    """
    names = task_names(listed)
    if not names:
        raise BadInput(f"{option} {listed!r} names no task; give one, such as hellaswag")
    if find_spec("lm_eval") is None:
        raise BadInput(f"{option} needs lm-eval; pip install 'moescope[tasks]'")
    from lm_eval.tasks import TaskManager

    with without_messages(quiet=True):
        folders = {
            name: TaskManager(include_path=name, include_defaults=False)
            for name in names
            if Path(name).is_dir()
        }
        files = [name for name in names if Path(name).is_file()]
        manager = TaskManager(include_defaults=len(folders) + len(files) < len(names))
        loaded: list[Any] = []
        for name in names:
            source = folders.get(name, manager)
            if name in folders and not source.all_subtasks:
                raise BadInput(f"{option} {name}: no task's YAML file in this folder; name another")
            for task in folder_tasks(source, name, option) if name in folders else [name]:
                loaded += load_task(source, task, option)
        try:
            tasks: dict[str, Any] = manager.load(loaded)
        except ValueError as error:
            raise BadInput(f"{option} {listed}: {reason(error)}; name it once") from None
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return tasks


def run_harness(model: Any, tasks: dict[str, Any], quiet: bool) -> Any:
    """Return lm-eval's results; every model gets the same examples in its prompts."""
    import lm_eval

    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    with without_messages(quiet):
        return lm_eval.evaluate(lm=model, task_dict=tasks)


def folder_tasks(manager: Any, folder: str, option: str) -> list[str]:
    """Return the groups of a folder, and its tasks that no group holds."""
    with loading_errors(folder, option):
        groups = manager.load(manager.all_groups)["groups"] if manager.all_groups else {}
    grouped = {name for group in groups.values() for name in group.child_names}
    return [name for name in (*manager.all_groups, *manager.all_subtasks) if name not in grouped]


@contextmanager
def loading_errors(name: str, option: str) -> Iterator[None]:
    """Raise what goes wrong inside as one line."""
    try:
        yield
    except Exception as error:  # data, YAML and code of a task: each library has its own errors
        raise BadInput(
            f"{option} {name}: the task or its data cannot be loaded ({reason(error)[:200]}); load it "
            "once where the network is, into this HF_HOME, or remove the task"
        ) from None


def load_task(manager: Any, name: str, option: str) -> list[Any]:
    """Return one task, or group with its tasks, with data."""
    if name not in manager.task_index and not Path(name).is_file():
        close = get_close_matches(name, manager.all_tasks, 3)
        advice = f"near: {', '.join(close)}" if close else "`lm-eval ls tasks` lists all"
        raise BadInput(f"{option} {name}: neither a task of lm-eval nor a YAML file or folder; {advice}")
    with loading_errors(name, option):
        loaded = manager.load([name])
    for task in loaded["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise BadInput(f"{option} {name}: it runs code that the model writes; remove the task")
    grouped = {task for group in loaded["groups"].values() for task in group.child_names}
    return [one for key, one in (loaded["tasks"] | loaded["groups"]).items() if key not in grouped]


def evaluate(name: str, tasks: dict[str, Any], train: TrainConfig, device: str, quiet: bool) -> Any:
    """Return lm-eval's results of one checkpoint."""
    from lm_eval.models.huggingface import HFLM

    from moescope.lab.tuning import load_base

    traced, _ = load_base(name, device, train)
    size = max(train.batch_size // train.micro_batches, 1)
    precision = None if train.dtype == "float32" else train.dtype
    with without_messages(quiet):
        model = HFLM(
            traced.model,
            backend="causal",
            tokenizer=traced.tokenizer,
            batch_size=size,
            mixed_precision_dtype=precision,
        )
    return run_harness(model, tasks, quiet)


def task_rows(base: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of the table task_results: every task and metric of the trained model and of its base."""
    rows = []
    for key, row in metric_rows(result):
        task, (metric, _, answers) = row["task"], key.partition(",")
        before = base["results"][task][key]
        first, second = (document_values(one, task, metric, answers) for one in (base, result))
        row |= {"base_value": float(before), "difference": row["value"] - float(before)}
        rows.append({**row, "difference_error": paired_error(first, second, (before, row["value"]))})
    return rows


def metric_rows(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield lm-eval's key of every metric and its row: task, metric, documents, value, standard error."""
    for task, values in result["results"].items():
        for key, value in values.items():
            metric, _, answers = key.partition(",")
            if not answers or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{answers}")
            yield (
                key,
                {
                    "task": task,
                    "metric": metric if answers == NO_FILTER else f"{metric} ({answers})",
                    "documents": result["n-samples"].get(task, {}).get("effective"),
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, int | float) else np.nan,
                },
            )


def document_values(results: dict[str, Any], task: str, metric: str, answers: str) -> list[Any]:
    samples = results.get("samples", {}).get(task, [])
    return [one.get(metric) for one in samples if one.get("filter", NO_FILTER) == answers]


def paired_error(before: list[Any], after: list[Any], values: tuple[float, float]) -> float:
    """Return the standard error of the mean difference over documents; NaN where `values` are no means."""
    numeric = all(isinstance(one, int | float) for one in (*before, *after))
    if len(before) < 2 or len(before) != len(after) or not numeric:
        return float("nan")
    difference = np.array(after, float) - np.array(before, float)
    if not np.allclose([np.mean(before), np.mean(after)], values):
        return float("nan")
    return float(difference.std(ddof=1) / np.sqrt(len(difference)))


def add_task_results(
    run: Run, base: str, listed: str, tasks: dict[str, Any], train: TrainConfig, device: str, quiet: bool
) -> None:
    """Write the table task_results of a finished training, unless it has the results of these tasks."""
    if "task_results" in run.tables and run.info.get("tasks") == listed:
        return
    models = (base, str((run.path / MODEL).resolve()))
    before, after = (evaluate(name, tasks, train, device, quiet) for name in models)
    frame = pd.DataFrame(task_rows(before, after))
    write_table(TRAIN_TABLES["task_results"], frame, run.path / "task_results.parquet")
    write_json(run.path / "run.json", {**run.info, "tasks": listed})


# --- trainings of a study


@cache
def study_tasks(listed: str) -> dict[str, Any]:
    """Return the tasks of a study, loaded once per process."""
    tasks = load_tasks(listed, STUDY_OPTION)
    for name, task in tasks["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until":
            raise BadInput(f"{STUDY_OPTION} {name}: it generates text, which no lab model does; remove it")
    return tasks


def tasks_identity(listed: str) -> str:
    """Return a hash of the tasks' documents and prompts."""
    digest = hashlib.sha256()
    for name, task in sorted(study_tasks(listed)["tasks"].items()):
        digest.update(f"{name} {task.get_config('num_fewshot')}".encode())
        for document in task.eval_docs:
            content = [document, task.doc_to_text(document), task.doc_to_target(document)]
            digest.update(json.dumps(content, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def score_tasks(
    listed: str, model: LabModel, vocabulary: Vocabulary, size: int, device: str, dtype: str
) -> pd.DataFrame:
    """Return every task's metrics of a lab model, with the chance level of choices."""
    tasks = study_tasks(listed)
    result = run_harness(harness_model(model, vocabulary, size, device, dtype), tasks, quiet=True)
    levels = {name: chance_level(task) for name, task in tasks["tasks"].items()}
    groups = result.get("group_subtasks", {})

    def level(name: str) -> float:
        """Of a task; of a group that of its tasks, if they agree."""
        levels_of_parts = (
            {level(child) for child in groups[name]} if groups.get(name) else {levels.get(name, np.nan)}
        )
        return levels_of_parts.pop() if len(levels_of_parts) == 1 else np.nan

    rows = [row for _, row in metric_rows(result)]
    for row in rows:
        row["chance"] = level(row["task"]) if row["metric"] in ACCURACIES else np.nan
    return pd.DataFrame(rows)


def chance_level(task: Any) -> float:
    """Return the accuracy of a choice at random; NaN for tasks without choices."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return float("nan")
    return float(np.mean([1 / len(task.doc_to_choice(document)) for document in task.eval_docs]))


def harness_model(model: LabModel, vocabulary: Vocabulary, size: int, device: str, dtype: str) -> Any:
    """Return a lab model as lm-eval takes models. It scores text and generates none."""
    import torch
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    longest = model.trained_length  # later positions were never trained

    class LabHarness(TemplateLM):  # type: ignore[misc]
        eot_token_id = vocabulary.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return [int(token) for token in vocabulary.encode(string)]

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests: list[Any], **more: Any) -> list[tuple[float, bool]]:
            scores = []
            for first in range(0, len(requests), size):
                batch = [(context + text, len(text)) for _, context, text in requests[first : first + size]]
                batch = [(tokens[-longest - 1 :], count) for tokens, count in batch]
                width = max(len(tokens) for tokens, _ in batch) - 1
                ids_BL = torch.full((len(batch), width), vocabulary.pad)
                mask_BL = torch.zeros(len(batch), width, dtype=torch.bool)
                for at, (tokens, _) in enumerate(batch):
                    ids_BL[at, : len(tokens) - 1] = torch.tensor(tokens[:-1])
                    mask_BL[at, : len(tokens) - 1] = True
                with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16"):
                    logits_BLV = model(ids_BL.to(device), mask_BL=mask_BL.to(device)).logits_BLV
                for logits_LV, (tokens, count) in zip(logits_BLV, batch, strict=True):
                    count = min(count, len(tokens) - 1)
                    log_p = logits_LV[len(tokens) - 1 - count : len(tokens) - 1].double().log_softmax(-1)
                    targets = torch.tensor(tokens[len(tokens) - count :], device=log_p.device)
                    chosen = log_p.gather(1, targets[:, None])
                    scores.append((float(chosen.sum()), bool((log_p.argmax(-1) == targets).all())))
            return scores

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return [
                sum(
                    self._loglikelihood_tokens([(None, *make_disjoint_window(window))])[0][0]
                    for window in get_rolling_token_windows(
                        self.tok_encode(request.args[0]), vocabulary.end, longest, 1
                    )
                )
                for request in requests
            ]

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError  # study_tasks rejects such tasks

    model.eval()
    return LabHarness()
