"""train --base --tasks: tasks of lm-eval (the extra `tasks`) on the base and on the trained model."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moescope.checkpoint.files import first_line
from moescope.errors import BadInput
from moescope.lab.config import TrainConfig
from moescope.lab.existing import MODEL, load_base
from moescope.lab.tables import TRAIN_TABLES
from moescope.run import Run, write_json, write_table

LOGGERS = ("lm_eval", "huggingface_hub", "datasets")  # they repeat at length what an error says
FEWSHOT_SEED = 1234  # lm-eval's own
NO_FILTER = "none"  # lm-eval's name for answers as they are


@contextmanager
def without_messages(quiet: bool) -> Iterator[None]:
    """Keep the libraries' log messages back; where quiet, their progress bars too."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()) if quiet else nullcontext():
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def load_tasks(given: str) -> dict[str, Any]:
    """Return lm-eval's tasks and groups with their data, so that a missing one is known before a training.

    `given` are, separated by commas, names of lm-eval, YAML files of tasks, and folders of such files.
    """
    names = [*dict.fromkeys(part.strip() for part in given.split(",") if part.strip())]
    if not names:
        raise BadInput(f"--tasks {given!r} names no task; give one, such as hellaswag")
    if find_spec("lm_eval") is None:
        raise BadInput("--tasks needs lm-eval; pip install 'moescope[tasks]'")
    from lm_eval.tasks import TaskManager

    with without_messages(quiet=True):
        folders = [name for name in names if Path(name).is_dir()]
        in_folders = {name: TaskManager(include_path=name, include_defaults=False) for name in folders}
        others = [name for name in names if name not in folders]
        manager = TaskManager(include_defaults=not all(Path(name).is_file() for name in others))
        loaded: list[Any] = []
        for name in names:
            found = in_folders.get(name, manager)
            if name in folders and not found.all_subtasks:
                raise BadInput(f"--tasks {name}: no task's YAML file in this folder; name another")
            for task in found.all_subtasks if name in folders else [name]:
                loaded += load_task(found, task)
        try:
            tasks: dict[str, Any] = manager.load(loaded)
        except ValueError as error:
            raise BadInput(f"--tasks {given}: {first_line(error)}; name it once") from None
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return tasks


def load_task(manager: Any, name: str) -> list[Any]:
    """Return one task, or group with its tasks, with data."""
    if name not in manager.task_index and not Path(name).is_file():
        close = get_close_matches(name, manager.all_tasks, 3)
        advice = f"near: {', '.join(close)}" if close else "`lm-eval ls tasks` lists all"
        raise BadInput(f"--tasks {name}: neither a task of lm-eval nor a YAML file or folder; {advice}")
    try:
        found = manager.load([name])
    except Exception as error:  # data, YAML and code of a task: each library has its own errors
        raise BadInput(
            f"--tasks {name}: the task or its data cannot be loaded ({first_line(error)[:200]}); load it "
            "once where the network is, into this HF_HOME, or remove the task"
        ) from None
    for task in found["tasks"].values():
        if getattr(task, "UNSAFE_CODE", False):
            raise BadInput(f"--tasks {name}: it runs code that the model writes; remove the task")
    grouped = {task for group in found["groups"].values() for task in group.child_names}
    return [one for key, one in (found["tasks"] | found["groups"]).items() if key not in grouped]


def evaluate(name: str, tasks: dict[str, Any], train: TrainConfig, device: str, quiet: bool) -> Any:
    """Return lm-eval's results of one checkpoint."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

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
        return lm_eval.evaluate(lm=model, task_dict=tasks)


def task_rows(base: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return rows of the table task_results: every task and metric of the trained model and of its base."""
    rows = []
    for task, values in result["results"].items():
        for key, value in values.items():
            metric, _, answers = key.partition(",")
            if not answers or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error, before = values.get(f"{metric}_stderr,{answers}"), base["results"][task][key]
            first, second = (document_values(one, task, metric, answers) for one in (base, result))
            rows.append(
                {
                    "task": task,
                    "metric": metric if answers == NO_FILTER else f"{metric} ({answers})",
                    "documents": result["n-samples"].get(task, {}).get("effective"),
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, int | float) else np.nan,
                    "base_value": float(before),
                    "difference": float(value) - float(before),
                    "difference_error": paired_error(first, second, (before, value)),
                }
            )
    return rows


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
    run: Run, base: str, given: str, tasks: dict[str, Any], train: TrainConfig, device: str, quiet: bool
) -> None:
    """Write the table task_results of a finished training, unless it has the results of these tasks."""
    if "task_results" in run.tables and run.info.get("tasks") == given:
        return
    models = (base, str((run.path / MODEL).resolve()))
    before, after = (evaluate(name, tasks, train, device, quiet) for name in models)
    frame = pd.DataFrame(task_rows(before, after))
    write_table(TRAIN_TABLES["task_results"], frame, run.path / "task_results.parquet")
    write_json(run.path / "run.json", {**run.info, "tasks": given})
