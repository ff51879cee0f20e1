"""Makes what `moescope demo` shows: trains the model of the recipe and keeps of it what is shipped.

`make demo-model` runs this file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from moescope.demo.verb import SHIPPED
from moescope.errors import BadInput
from moescope.lab.train import train
from moescope.run import Run, write_json, write_table

STORED = "bfloat16"  # half the size; what it costs in loss is told when the model is made
LEFT_OUT = ("checkpoints", "process", "tasks_resumed")  # of this machine, or told anew by each demo


def make_demo_model(work: str | Path = "runs/demo-model", shipped: Path = SHIPPED) -> Run:
    """Train by the recipe (minutes on one core), and replace what is shipped. Returns the training's run."""
    run = train(shipped / "recipe.toml", out=work, device="cpu")
    assert isinstance(run, Run)
    keep_training(run, shipped / "training")
    keep_model(Path(run.info["checkpoints"][-1]["path"]), shipped / "model")
    return run


def keep_training(run: Run, folder: Path) -> None:
    """The training's tables and run.json, without what holds for this machine only."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in run.tables:
        write_table(name, run.table(name), folder / f"{name}.parquet")
    kept = {key: value for key, value in run.info.items() if key not in LEFT_OUT}
    asked = {"config": "src/moescope/demo/shipped/recipe.toml"}
    write_json(folder / "run.json", {**kept, "git_commit": None, "asked": asked})


def keep_model(checkpoint: Path, folder: Path) -> None:
    """The checkpoint with half the bytes a weight."""
    import torch

    from moescope.decoder.saving import load_model, save_model

    model, vocabulary = load_model(checkpoint)
    save_model(model.to(getattr(torch, STORED)), vocabulary, folder)


if __name__ == "__main__":
    try:
        make_demo_model(sys.argv[1] if len(sys.argv) > 1 else "runs/demo-model")
    except BadInput as error:  # a folder of an earlier recipe, for one
        sys.exit(f"moescope: {error}")
