"""Train the shipped demo model by its recipe and store what is shipped; `make demo-model` runs this file."""

from __future__ import annotations

import sys
from pathlib import Path

from moescope.demo.verb import SHIPPED
from moescope.errors import BadInput
from moescope.lab.train import train
from moescope.run import Run, write_json, write_table
from moescope.storage import remove

STORED = "bfloat16"  # half the size
EXCLUDED = ("checkpoints", "process", "tasks_resumed", "asked")  # of one machine, or set by each demo


def make_demo_model(work: str | Path = "runs/demo-model", shipped: Path = SHIPPED) -> Run:
    """Train by the recipe (minutes on one core), replace what is shipped, and return the training's run."""
    run = train(shipped / "recipe.toml", out=work, device="cpu")
    assert isinstance(run, Run)
    store_training(run, shipped / "training")
    store_model(Path(run.info["checkpoints"][-1]["path"]), shipped / "model")
    return run


def store_training(run: Run, folder: Path) -> None:
    """Store the training's tables and run.json without machine-specific entries."""
    remove(folder, folder.parent)
    folder.mkdir(parents=True)
    for name in run.tables:
        write_table(run.verb.tables[name], run.table(name), folder / f"{name}.parquet")
    info = {key: value for key, value in run.info.items() if key not in EXCLUDED}
    command = "moescope train src/moescope/demo/shipped/recipe.toml --device cpu"
    write_json(folder / "run.json", {**info, "git_commit": None, "command": command})


def store_model(checkpoint: Path, folder: Path) -> None:
    """Store the checkpoint in half precision."""
    import torch

    from moescope.decoder.saving import load_model, save_model

    model, vocabulary = load_model(checkpoint)
    save_model(model.to(getattr(torch, STORED)), vocabulary, folder)


if __name__ == "__main__":
    try:
        make_demo_model(sys.argv[1] if len(sys.argv) > 1 else "runs/demo-model")
    except BadInput as error:  # such as a folder of an earlier recipe
        sys.exit(f"moescope: {error}")
