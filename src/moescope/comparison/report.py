"""The report's part on two checkpoints compared.

What moved, how far, beside what unrelated experts would show.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moescope.comparison.figures import DRIFT, L2_UNRELATED, PROJECTIONS, distance_charts, span
from moescope.comparison.report_runs import change_findings, change_sections
from moescope.plotting.style import FigureSpec, Tables, number
from moescope.reporting.pack import plain, table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.tables import GEOMETRY_TABLES
from moescope.types import Coverage
from moescope.weights.figures_identification import ACROSS_VIEWS
from moescope.weights.report import VERDICT_NAMES
from moescope.weights.report_findings import views

MOST_MOVED = 20
LAYER_COLUMNS = [
    "series",
    "layer",
    "matrix",
    "relative_l2_mean",
    "relative_l2_sd",
    "relative_l2_low",
    "relative_l2_high",
    "null_l2",
    "null_l2_matched",
    "sv_alignment_mean",
    "sv_alignment_sd",
    "sv_alignment_low",
    "sv_alignment_high",
    "null_sv_matched",
]
ALIGNMENT_FIGURES = [
    spec for spec in ACROSS_VIEWS if spec.name in ("compare_accuracy", "compare_margin", "compare_ambiguity")
]


# --- findings


def compare_findings(run: Run) -> list[str]:
    """What changed, most important first; each number with what unrelated experts would give."""
    if run.info["arguments"]["of"] == "runs":
        return change_findings(run)
    geometry, layers = run.table("geometry"), run.table("geometry_layers")
    found = []
    here = [name for name in PROJECTIONS if name in set(layers["matrix"])]
    matched = geometry.groupby("series")["matched"].any()
    for series in dict.fromkeys(layers["series"]):
        rows = layers[(layers["series"] == series) & layers["matrix"].isin(here)]
        if len(rows):
            found += distance_findings(series, rows, bool(matched[series]))
    found += router_findings(geometry)
    if most := most_moved(geometry[geometry["matrix"].isin(here)]):
        found.append(most)
    return found + alignment_findings(run)


def distance_findings(series: str, rows: pd.DataFrame, matched: bool) -> list[str]:
    """L2 and R over layers.

    Of a series matched by gate and up alone, only down is told: nothing else was held out.
    """
    held_out = series.endswith("_held_out") and "down" in set(rows["matrix"])
    rows = rows[rows["matrix"] == "down"] if held_out else rows
    what = f"{series}, down, which had no say in the matching" if held_out else series
    columns = ["relative_l2_mean", "sv_alignment_mean", "null_l2_matched", "null_sv_matched"]
    by_layer = rows.groupby("layer", as_index=False)[columns].mean()
    known = by_layer[by_layer["relative_l2_mean"].notna()]
    if known.empty:
        return [f"{what}: no distance, since all matrices are zeros in one of the two"]
    of_l2, of_r = f"unrelated experts {number(L2_UNRELATED)}", "unrelated experts 0"
    if matched:
        of_l2 = f"random experts of this shape {number(known['null_l2_matched'].mean())} after matching"
        of_r = f"random experts {number(known['null_sv_matched'].mean())} after matching"
    found = [f"{what}: relative L2, mean of a layer's experts, {span(known, 'relative_l2_mean')}; {of_l2}"]
    if known["sv_alignment_mean"].notna().any():
        found.append(f"{what}: SV alignment R {span(known, 'sv_alignment_mean')}; unmoved 1, {of_r}")
    return found


def router_findings(geometry: pd.DataFrame) -> list[str]:
    rows = geometry[(geometry["matrix"] == "router") & geometry["cosine"].notna()]
    if rows.empty:
        return []
    low = rows.loc[rows["cosine"].idxmin()]
    return [
        (
            f"router rows: median cosine {number(rows['cosine'].median())}, lowest "
            f"{number(low['cosine'])} (layer {low['layer']}, expert {low['expert_a']}); "
            f"unmoved 1, unrelated 0; norms {number(rows['norm_ratio'].min())} to "
            f"{number(rows['norm_ratio'].max())} times what they were"
        )
    ]


def moved(geometry: pd.DataFrame) -> pd.DataFrame:
    """One row an expert.

    Relative L2, mean over its projections as they lie, and how many times the median of all experts that is.
    """
    rows = geometry[~geometry["matched"].astype(bool) & (geometry["matrix"] != "router")]
    experts = rows.groupby(["layer", "expert_a"], as_index=False)["relative_l2"].mean().dropna()
    experts["of_layer"] = experts["relative_l2"] / experts.groupby("layer")["relative_l2"].transform("median")
    experts["of_all"] = experts["relative_l2"] / experts["relative_l2"].median()
    return experts.sort_values("relative_l2", ascending=False, ignore_index=True)


def most_moved(geometry: pd.DataFrame) -> str | None:
    experts = moved(geometry)
    if experts.empty:
        return None
    first, median = experts.iloc[0], float(experts["relative_l2"].median())
    if first["relative_l2"] == 0:
        return (
            f"no expert moved: relative L2 is 0 for all {len(experts):,}; unrelated experts "
            f"{number(L2_UNRELATED)}"
        )
    return (
        f"moved most: layer {int(first['layer'])}, expert {int(first['expert_a'])}, relative L2 "
        f"{number(first['relative_l2'])} (mean over its projections), "
        f"{number(first['of_all'])} times the median {number(median)} of {len(experts):,} experts"
    )


def alignment_findings(run: Run) -> list[str]:
    """How router-expert alignment and ambiguity changed, from the scans of both."""
    scans = held_scans(run)
    if not scans:
        return []
    keys = ["layer", "matrix", "router", "fold_norm"]
    tests = (
        scans[0]
        .table("alignment_tests")
        .merge(scans[1].table("alignment_tests"), on=keys, suffixes=("_a", "_b"))
    )
    scores = scans[0].table("ambiguity").merge(scans[1].table("ambiguity"), on=keys, suffixes=("_a", "_b"))
    other = tests[tests["verdict_a"] != tests["verdict_b"]]
    if other.empty:
        found = [f"the verdict of alignment is the same in all {len(tests)} layers"]
    else:
        named = [
            f"layer {row.layer} from “{VERDICT_NAMES[row.verdict_a]}” to “{VERDICT_NAMES[row.verdict_b]}”"
            for row in other.head(4).itertuples()
        ]
        more = f" and {len(other) - 4} more" if len(other) > 4 else ""
        found = [
            (
                f"the verdict of alignment changed in {len(other)} of {len(tests)} layers: "
                f"{', '.join(named)}{more}"
            )
        ]
    change = (scores["absolute_score_b"] - scores["absolute_score_a"]).to_numpy(float)
    if np.isfinite(change).any():
        top = scores.iloc[int(np.nanargmax(np.abs(change)))]
        at_chance = scans[0].table("ambiguity").set_index("layer").loc[top["layer"], "absolute_chance"]
        found.append(
            f"absolute ambiguity changed most in layer {top['layer']}: "
            f"{number(top['absolute_score_a'])} to {number(top['absolute_score_b'])}; "
            f"median change {number(float(np.nanmedian(np.abs(change))))}; told apart without "
            f"fail 0, at chance {number(at_chance)}"
        )
    return found


# --- sections


def compare_sections(run: Run) -> list[Section]:
    if run.info["arguments"]["of"] == "runs":
        return change_sections(run)
    tables = {name: run.table(name) for name in GEOMETRY_TABLES}
    sections = [chart_section(tables), drift_section(tables)]
    if aligned := alignment_section(run):
        sections.append(aligned)
    return [section for section in sections if section.figures or section.tables]


def chart_section(tables: Tables, anchor: str = "distances") -> Section:
    """The expert-distance chart of whatever series the tables hold."""
    return Section(
        anchor,
        "Distances between experts",
        (
            "How far each series' experts are apart, layer by layer, each projection alone. Grey is "
            "chance: experts that have nothing to do with each other, as they lie and after "
            "matching their neurons."
        ),
        [
            (spec, {"geometry_layers": tables["geometry_layers"]})
            for spec in distance_charts(tables["geometry_layers"])
        ],
        [table_payload("geometry_layers", tables["geometry_layers"], LAYER_COLUMNS, "Every layer")],
    )


def charts_together(runs: list[Run]) -> list[Section]:
    """The series of several runs in one chart: what tuning moved beside groups of this method and of that.

    Nothing for one run, or runs of other layers.
    """
    held = [(run, run.table("geometry_layers")) for run in runs if "geometry_layers" in run.tables]
    if len(held) < 2 or len({tuple(sorted(set(rows["layer"]))) for _, rows in held}) > 1:
        return []
    times = pd.Series([name for _, rows in held for name in rows["series"].unique()]).value_counts()
    parts = [
        rows.assign(series=[f"{name} ({run.name})" if times[name] > 1 else name for name in rows["series"]])
        for run, rows in held
    ]
    return [
        replace(
            chart_section({"geometry_layers": pd.concat(parts, ignore_index=True)}, "distances-of-all"),
            title="Distances between experts, of all runs",
        )
    ]


def drift_section(tables: Tables) -> Section:
    here = set(tables["geometry"]["matrix"])
    figures: list[tuple[FigureSpec, Tables]] = [
        (spec, {"geometry": tables["geometry"]})
        for spec in DRIFT
        if spec.name != "router_cosines" or "router" in here
    ]
    payloads = [most_moved_table(tables["geometry"])] if here & set(PROJECTIONS) else []
    return Section(
        "drift",
        "What moved",
        (
            "Every expert and router row against itself in the other checkpoint. The median over all "
            "experts is the reference: an expert far above it was changed more than the rest."
        ),
        figures,
        payloads,
    )


def most_moved_table(geometry: pd.DataFrame) -> dict[str, Any]:
    """The experts that moved most.

    Their distance by projection, beside the median and what unrelated experts show.
    """
    experts = moved(geometry).head(MOST_MOVED)
    rows = geometry[~geometry["matched"].astype(bool)]
    by_matrix = rows.pivot_table(index=["layer", "expert_a"], columns="matrix", values="relative_l2")
    lowest_r = rows.groupby(["layer", "expert_a"])["sv_alignment"].min()
    cosine = rows[rows["matrix"] == "router"].set_index(["layer", "expert_a"])["cosine"]
    here = [name for name in PROJECTIONS if name in by_matrix]
    heads = [
        ("layer", "layer", "int"),
        ("expert", "expert", "int"),
        ("relative_l2", "relative L2, mean", "float"),
        ("relative_l2", "times the median of all", "float"),
        ("relative_l2", "times the median of its layer", "float"),
        ("null_l2", "unrelated", "float"),
    ]
    heads += [("relative_l2", f"L2 of {name}", "float") for name in here]
    heads += [("sv_alignment", "lowest R", "float"), ("geometry.cosine", "cosine of its router row", "float")]
    body = []
    for row in experts.itertuples():
        place = (row.layer, row.expert_a)
        body.append(
            [row.layer, row.expert_a, row.relative_l2, row.of_all, row.of_layer, L2_UNRELATED]
            + [by_matrix.loc[place, name] for name in here]
            + [lowest_r.get(place), cosine.get(place)]
        )
    columns = [{"name": name, "title": title, "kind": kind} for name, title, kind in heads]
    return {
        "name": "experts_that_moved_most",
        "title": "Experts that moved most",
        "columns": columns,
        "rows": plain(body),
    }


def alignment_section(run: Run) -> Section | None:
    scans = held_scans(run)
    if not scans:
        return None
    found = [reading for scan in scans for reading in views([scan])]
    labels = [
        f"{role}: {plot_words(Path(item['path']).name)}"
        for role, item in zip("AB", run.info["checkpoints"], strict=True)
    ]
    figures: list[tuple[FigureSpec, Tables]] = []
    for spec in ALIGNMENT_FIGURES:
        together = {
            name: pd.concat(
                [
                    reading.tables[name].assign(view=label, run=label)
                    for reading, label in zip(found, labels, strict=True)
                ],
                ignore_index=True,
            )
            for name in spec.needs
        }
        figures.append((spec, together))
    matrix = scans[0].info["arguments"]["matrix"][0]
    words = (
        f"Whether router rows still fit their experts ({matrix}): the scans of both checkpoints "
        "side by side. They lie in the run folder under scans/a and scans/b; "
        "`moescope report` shows either whole."
    )
    return Section("alignment", "Alignment and ambiguity, before and after", words, figures)


def held_scans(run: Run) -> list[Run]:
    """The scans of both checkpoints; none where they were skipped or could not be made."""
    return [Run.load(run.path / "scans" / role) for role in "ab"] if run.info.get("scanned") else []


# --- how to do it again


def compare_command(run: Run) -> str:
    info = run.info
    arguments = info["arguments"]
    if arguments["of"] == "runs":
        return shlex.join(["moescope", "compare", *(item["path"] for item in info["runs"])])
    models = [
        item["path"] + (f"@{item['revision']}" if item.get("revision") else "")
        for item in info["checkpoints"]
    ]
    command = ["moescope", "compare", *models]
    if arguments["layers"]:
        command += ["--layers", ",".join(map(str, arguments["layers"]))]
    if arguments["matrix"] != ["gate", "up", "down", "router"]:
        command += ["--matrix", ",".join(arguments["matrix"])]
    command += ["--matched"] if arguments["matched"] else []
    command += ["--match-by", arguments["match_by"]] if arguments["match_by"] != "signed" else []
    command += ["--skip", ",".join(arguments["skip"])] if arguments["skip"] else []
    command += ["--series", arguments["series"]] if arguments["series"] != "base_to_ift" else []
    command += ["--seed", str(arguments["seed"])] if arguments["seed"] else []
    return shlex.join(command)


def compare_coverage(run: Run) -> list[str]:
    if run.info["arguments"]["of"] == "runs":
        verb = run.info["arguments"]["verb"]
        return [f"{item['role'].upper()}: {item['path']}, a run of {verb}" for item in run.info["runs"]]
    items = zip("AB", run.info["coverage"], strict=True)
    return [
        f"{role}: {Coverage(**{**item, 'experts_per_layer': tuple(item['experts_per_layer'])}).line()}"
        for role, item in items
    ]


VIEW = (
    "Two experts are compared matrix by matrix. Relative L2 looks at all entries, after scaling "
    "both matrices to norm 1: 0 is equal, √2 is unrelated. R looks at singular directions "
    "alone: 1 is the same, 0 is expected of unrelated ones. Neurons of an expert may stand in "
    "any order without changing what it computes, so two equal experts may look unrelated until "
    "their neurons are matched; and matching makes even random experts look a little alike, "
    "which is the grey band. Of two runs, every row that both have is compared instead, column "
    "by "
    "column; the reports of the two explain their columns."
)
COMPARE = RunKind(
    "compare", GEOMETRY_TABLES, compare_findings, compare_sections, compare_command, compare_coverage, VIEW
)
