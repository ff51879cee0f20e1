"""One training of a study: trained or taken up, then measured.

What it found comes back as rows of the study's tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moescope.lab.study_text import StudyText, study_text
from moescope.lab.train import STATE, Job, held, saved_checkpoints, train_in
from moescope.lab.train_settings import as_plain
from moescope.progress import unsaid_alerts
from moescope.run import Run, jsonable, read_run_json, write_json
from moescope.weights.verb import finished_run

if TYPE_CHECKING:
    import pandas as pd

    from moescope.lab.config import LabConfig

DONE, FAILED, NOT_RUN = "done", "failed", "not run"
TRAININGS = "trainings"
# columns of study_runs, by the Monitor's metrics that they are means over layers of
LOAD = {
    "load_cv": "cv",
    "max_over_mean": "max_over_mean",
    "routing_entropy": "routing_entropy",
    "unused_share": "unused",
    "dropped_share": "dropped",
}
CURVES = ("load_cv", "routing_entropy", "unused_share")


@dataclass(frozen=True)
class TrainingPiece:
    """What is to be trained, and where; small, so that it can be sent to another process."""

    study: Path
    name: str
    arm: str
    seed: int
    question: str
    config: LabConfig
    corpus: str  # its identity

    @property
    def folder(self) -> Path:
        return self.study / TRAININGS / self.name

    @property
    def keys(self) -> dict[str, Any]:
        return {"arm": self.arm, "seed": self.seed}


@dataclass(frozen=True)
class Measured:
    """Rows of the study's tables from one training."""

    frames: dict[str, pd.DataFrame] = field(default_factory=dict)
    status: str = DONE


def train_piece(device: str, piece: TrainingPiece, tick: Callable[[], None]) -> Measured:
    """Train to the end, from the last checkpoint if there is one, and measure. A training that diverges, or
    does not fit, has failed.

    Everything else that goes wrong is raised: it would go wrong with the next training too.
    """
    import pandas as pd
    import torch

    from moescope.decoder.ranks import Ranks
    from moescope.lab.divergence import Diverged

    text = study_text(piece.study, piece.corpus, piece.config)
    identity = {"arguments": {**jsonable(as_plain(piece.config)), "from": None}, "corpus": piece.corpus}
    job = Job(
        piece.folder,
        piece.config,
        text.corpus,
        text.vocabulary,
        identity,
        None,
        device,
        Ranks(),
        True,
        text.data,
        tick,
    )
    run = finished_run(piece.folder, identity)
    if run is not None:
        for _ in range(piece.config.train.steps):
            tick()
    elif device.startswith("cuda"):
        # a process that has not yet used its GPU has nothing to reset
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()
    row = {**piece.keys, "question": piece.question, **costs(piece.config)}
    try:
        # Alerts are kept in each training's table; printed, nobody could tell whose they are.
        with unsaid_alerts(), held(piece.folder):
            run = run or train_in(job, {"study": str(piece.study.resolve()), **piece.keys}, overwrite=False)
        assert run is not None
        more, documents = measures(run, piece, text, device)
    except (Diverged, torch.OutOfMemoryError) as error:
        failed = {**row, "status": FAILED, "message": str(error).splitlines()[0]}
        curves = curves_of(Run.load(piece.folder), piece) if read_run_json(piece.folder) else None
        frames = {"study_runs": pd.DataFrame([failed])}
        return Measured(frames if curves is None else {**frames, "study_curves": curves}, FAILED)
    return Measured(
        {
            "study_runs": pd.DataFrame([{**row, "status": DONE, **more}]),
            "study_documents": documents.assign(**piece.keys),
            "study_curves": curves_of(run, piece),
        }
    )


_COSTS: dict[
    str, dict[str, int]
] = {}  # counted once: every row of a table that is written again and again has them


def costs(config: LabConfig) -> dict[str, int]:
    """Parameters and operations, which are known before anything is trained."""
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


def measures(
    run: Run, piece: TrainingPiece, text: StudyText, device: str
) -> tuple[dict[str, float | None], pd.DataFrame]:
    """Values of study_runs from the finished training, and the losses of its validation documents."""
    from moescope.decoder.saving import load_model
    from moescope.lab.checkpoint_stability import checkpoint_stability
    from moescope.lab.document_losses import document_losses, evaluation_noise, mean_loss

    train = piece.config.train
    checkpoints = [(item["step"], Path(item["path"])) for item in saved_checkpoints(run.path / "checkpoints")]
    model, _ = load_model(checkpoints[-1][1], device)
    size = max(train.batch_size // train.micro_batches, 1)
    documents = document_losses(model, text.documents, size, device, train.dtype)
    del model
    noise = evaluation_noise(documents)
    stability = checkpoint_stability(checkpoints, text.data.validation, device)
    last = load_over_steps(run)
    found: dict[str, float | None] = {"validation_loss": mean_loss(documents)}
    found |= dict(zip(("noise_low", "noise_high"), noise or (None, None), strict=True))
    found |= {column: last[column].iloc[-1] for column in LOAD if len(last) and column in last}
    if stability is not None:
        found |= {
            "consistency": stability.consistency,
            "usage_sigma": stability.usage_sigma,
            "kendall_tau": stability.kendall_tau,
        }
    return {**found, **speed(run)}, documents


def load_over_steps(run: Run) -> pd.DataFrame:
    """step, and the columns of LOAD: means over layers of the Monitor's metrics.

    Of a dense model nothing: its one expert has no load to share.
    """
    import pandas as pd

    facts = run.info["router_facts"]
    if "routing_layers" not in run.tables or not facts["routes"]:
        return pd.DataFrame(columns=["step"])
    rows = run.table("routing_layers")
    names = {metric: column for column, metric in LOAD.items()}
    rows = rows[rows["metric"].isin(list(names)) & (rows["domain"] == "")]
    if facts["experts_choose"]:  # a slot per token and expert, most of them empty by design
        rows = rows[rows["metric"] != "dropped"]
    wide = rows.pivot_table(index="step", columns="metric", values="value", aggfunc="mean")
    return wide.rename(columns=names).reset_index().rename_axis(None, axis=1)


def curves_of(run: Run, piece: TrainingPiece) -> pd.DataFrame | None:
    """Rows of study_curves; None where nothing was logged before the training stopped."""
    if "steps" not in run.tables:
        return None
    steps = run.table("steps")[["step", "train_loss", "validation_loss"]]
    load = load_over_steps(run)
    wanted = ["step", *(column for column in CURVES if column in load)]
    joined = steps.merge(load[wanted], on="step", how="outer").sort_values("step", ignore_index=True)
    return joined.assign(**piece.keys)


def speed(run: Run) -> dict[str, float | None]:
    """Tokens a second over all steps, evaluations left out; peak memory of a GPU; seconds of all attempts
    together.

    A CPU's peak is that of the process, which trainings share, so it says nothing of one of them.
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
    """Remove of a measured training what takes most room.

    The state it would go on from, and all checkpoints but those to be kept.
    """
    info = read_run_json(folder)
    if keep == "all" or info is None:
        return
    states = folder / "checkpoints"
    saved = saved_checkpoints(states)
    gone = saved[:-1] if keep == "last" else saved
    for item in gone:
        shutil.rmtree(item["path"], ignore_errors=True)
    (states / STATE).unlink(missing_ok=True)
    if gone:
        write_json(folder / "run.json", {**info, "checkpoints": saved_checkpoints(states)})
