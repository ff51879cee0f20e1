"""What runs show together: distances of all series, and sections that a verb makes from several runs."""

from __future__ import annotations

import pandas as pd

from moescope.run import Run
from moescope.verb import Section


def joint_sections(runs: list[Run]) -> list[Section]:
    """Return what runs say together: distances of all series, and what each verb makes of all runs."""
    verbs = {run.verb.name: run.verb for run in runs}
    return [*distance_sections(runs), *(section for verb in verbs.values() for section in verb.joint(runs))]


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
