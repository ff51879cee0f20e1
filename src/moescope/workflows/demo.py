"""demo: a checkpoint with planted structure, scanned and reported: the whole tool in one command."""

from __future__ import annotations

from pathlib import Path

from moescope.run import Run
from moescope.workflows.report import report
from moescope.workflows.scan import scan


def demo(out: str | Path = "runs/demo", seed: int = 0, overwrite: bool = False, quiet: bool = False) -> Run:
    """Write the planted checkpoint beside the run, scan it and build the report; returns the run."""
    from moescope.planted import write_planted

    folder = Path(out)
    checkpoint = folder.parent / f"planted-mixtral-seed{seed}"
    if not (checkpoint / "config.json").exists():  # the config is written last: with it, the checkpoint is whole
        write_planted(checkpoint, seed)
    run = scan(checkpoint, out=folder, router="raw,centered", overwrite=overwrite, quiet=quiet)
    report(run, quiet=quiet)
    return run
