"""Study `causal`: do alignment and ambiguity predict the effect of removing an expert?

Every training is followed by `moescope scan` and `moescope intervene --sweep experts` of its last checkpoint,
on held-out documents. A router without rows (spectra) has no alignment: of it only load is tested.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

import moescope
from moescope.intervention.predictors import LOAD, correlate, expert_scores, held
from moescope.intervention.report import alignment_of
from moescope.lab import study as lab_study
from moescope.lab import study_task
from moescope.lab.study_task import DONE, TaskResult, TrainingTask
from moescope.lab.train import saved_checkpoints
from moescope.run import Run

ROWS = 60  # of held-out text, four fifths of them judged
BATCH = 32


def run_task(device: str, task: TrainingTask, tick: Callable[[], None]) -> TaskResult:
    """Train and measure as every study does, then remove every expert in turn."""
    result = study_task.run_task(device, task, tick)
    if result.status != DONE:
        return result
    tokens = ROWS * task.config.train.sequence_length
    checkpoint = Path(saved_checkpoints(task.folder / "checkpoints")[-1]["path"])
    scores = measure_effects(checkpoint, task.folder / "validation", tokens, device)
    layers = [result.frames["study_layers"], correlation_rows(scores)]
    names = dict(zip(layers[0]["layer"], layers[0]["layer_name"], strict=True))
    effects = scores.rename(columns={"loss_difference": "effect"}).assign(
        layer_name=scores["layer"].map(names)
    )
    layers[1]["layer_name"] = layers[1]["layer"].map(names)
    frames = {
        "study_layers": pd.concat([part.assign(**task.keys) for part in layers], ignore_index=True),
        "study_effects": effects.assign(**task.keys),
    }
    return TaskResult({**result.frames, **frames}, result.status)


def measure_effects(checkpoint: Path, texts: Path, tokens: int, device: str) -> pd.DataFrame:
    """Return one row per layer and expert: effect of its removal, load, and alignment if it has a row."""
    work = Path(tempfile.mkdtemp(prefix="causal-"))
    try:
        scan = moescope.scan(checkpoint, out=work / "scan", device="cpu", quiet=True)
        effects = moescope.intervene(
            checkpoint,
            sweep="experts",
            domain=[f"{file.stem}={file}" for file in sorted(texts.glob("*.jsonl"))],
            max_tokens=tokens,
            batch_size=BATCH,
            device=device,
            out=work / "intervene",
            quiet=True,
        )
        tables = {"intervention_experts": effects.table("intervention_experts")}
        alignment = alignment_of(effects, [scan])
        return expert_scores(tables if alignment is None else {**tables, "alignment": alignment})
    finally:
        shutil.rmtree(work, ignore_errors=True)


def correlation_rows(scores: pd.DataFrame) -> pd.DataFrame:
    """Return Spearman's correlations with the effect within each layer, plain and given load."""
    rows = []
    for name in held(scores):
        for given, suffix in ((None, ""), (LOAD, "_given_load"))[: 1 if name == LOAD else 2]:
            found = correlate(scores, name, given)
            for layer, value in zip(found.layers, found.by_layer, strict=True):
                metric = f"effect_{name}{suffix}"
                rows.append({"layer": layer, "metric": metric, "domain": "", "value": value, "chance": 0.0})
    return pd.DataFrame(rows, columns=["layer", "metric", "domain", "value", "chance"])


def study(**options: Any) -> Run:
    lab_study.run_task = run_task  # in place of a study's own
    return moescope.study(**options)
