"""What runs show together: distances of all series, and sections that a verb makes from several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from moescope.run import Run
from moescope.verb import Section


def joint_sections(runs: list[Run]) -> list[Section]:
    """Return what runs say together: distances of all series, and what each verb makes of all runs."""
    verbs = {run.verb.name: run.verb for run in runs}
    return [*distance_sections(runs), *(section for verb in verbs.values() for section in verb.joint(runs))]


def expert_base(run: Run) -> str:
    """Return what numbers the run's experts: of runs with one base expert j is the same expert.

    Checkpoints of one training share it, and a training shares it with the model it started from. The experts
    of two other models do not correspond, whatever their shapes.
    """
    info = run.info
    checkpoints = info.get("checkpoints") or []
    if run.verb.name == "train" or not checkpoints:
        return origin_of(run.path.resolve(), info)
    return base_of_checkpoint(str(checkpoints[0]["path"]))


def base_of_checkpoint(path: str, steps: int = 20) -> str:
    """Return the folder of the training that wrote a checkpoint, the model it started from, or the path."""
    folder = Path(path).parents[1] if Path(path).parent.name == "checkpoints" else None
    if folder is None or not steps or not (folder / "run.json").is_file():
        return path
    return origin_of(folder, Run.load(folder).info, steps - 1)


def origin_of(folder: Path, info: dict[str, Any], steps: int = 20) -> str:
    """Return the base of the model that a training started from; without one the training's folder."""
    bases = [item["path"] for item in info.get("bases") or []]
    origin = next(filter(None, [info.get("arguments", {}).get("from"), *bases]), None)
    return base_of_checkpoint(str(origin), steps) if origin else str(folder)


def distance_sections(runs: list[Run]) -> list[Section]:
    """Return the expert distances of runs of several verbs in one chart."""
    holders = [run for run in runs if "geometry_layers" in run.tables]
    rows = series_of_runs(holders)
    if rows is None or len({run.verb.name for run in holders}) < 2:
        return []
    tables, spec = {"geometry_layers": rows}, holders[0].verb.figure("expert_distance")
    if spec is None or not spec.can_draw(tables):
        return []
    title = "Distances between experts, all runs"
    return [Section("distances", title, "", [(spec, tables)], tab="weights")]


def series_of_runs(runs: list[Run]) -> pd.DataFrame | None:
    """Return `geometry_layers` of several runs; None for one run or different layers.

    A series that several runs have is named after its run.
    """
    frames = [(run, run.table("geometry_layers")) for run in runs if "geometry_layers" in run.tables]
    if len(frames) < 2 or len({tuple(sorted(set(rows["layer"]))) for _, rows in frames}) > 1:
        return None
    times = pd.Series([name for _, rows in frames for name in rows["series"].unique()]).value_counts()
    parts = [
        rows.assign(series=[f"{name} ({run.name})" if times[name] > 1 else name for name in rows["series"]])
        for run, rows in frames
    ]
    return pd.concat(parts, ignore_index=True)
