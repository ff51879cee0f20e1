"""Report on two compared checkpoints (distances, drift, alignment) or two traces (agreement)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd

from moescope.comparison.figures import AGREED, DISTANCES, DRIFT
from moescope.comparison.tables import AGREEMENT, TABLES, UNRELATED_L2
from moescope.plotting.marks import Lines, Mark
from moescope.plotting.style import counted, number
from moescope.reporting.findings import Number, Said, key_numbers, say_all, verdict_of
from moescope.reporting.joint import series_of_runs
from moescope.reporting.pack import plain
from moescope.reporting.untrusted import plot_words
from moescope.reporting.views import drawable, shown_table
from moescope.run import Run
from moescope.types import Coverage
from moescope.verb import Finding, LayerCards, Measure, Payload, Section, Selection, Summary, Tables, all_rows
from moescope.weights.figures import NAMED
from moescope.weights.report import VERDICTS

MOST_CHANGED = 20  # rows of the table of experts
ALIGNMENT_FIGURES = [NAMED["identification_by_layer"]]
STORED, ROUTER = "matrix == '' and not matched", "matrix == 'router'"
MATCHED = "matrix == '' and matched and not series.str.endswith('_held_out')"
HELD_OUT = "matrix == 'down' and series.str.endswith('_held_out')"
FURTHEST = "relative_l2 == relative_l2.max()"
COMPARED = "tokens > 0"
MOVED = cast(Mark, replace(cast(Lines, DISTANCES[0]), y="relative_l2_mean"))
# fmt: off
NUMBERS = [
    Number("geometry_series", "relative_l2", where=STORED, name="Mean relative L2 of experts"),
    Number("geometry_series", "sv_alignment", where=STORED, name="Mean SV alignment R"),
    Number("geometry_series", "cosine_median", where=ROUTER, name="Median cosine of router rows"),
    Number("expert_changes", "relative_l2", only="changed", name="Experts that changed", of="experts"),
    Number("agreement", "equal_sets", where=COMPARED, name="Tokens with the same experts, worst layer"),
    Number("agreement", "overlap", where=COMPARED, name="Overlap of experts, worst layer"),
    Number("agreement", "same_so_far", where=COMPARED, pick="last", name="Same experts in all layers"),
]
DISTANCE = "mean relative L2 {value}, layers {l2_least} to {l2_most}"
DIRECTIONS = "mean R {value}, layers {sv_least} to {sv_most}"
VERDICT = [
    Said("geometry_series", "relative_l2", where=f"{STORED} and relative_l2 > 0.9 * l2_chance", text="The experts of A and B are unrelated in their stored order: distance {value} ({chance}).", figure="expert_distance"),
    Said("geometry_series", "relative_l2", where=f"{STORED} and 0 < relative_l2 <= 0.9 * l2_chance", text="Experts moved {percent} of their norm (unrelated: 141 %).", figure="expert_distance"),
    Said("expert_changes", "relative_l2", only="changed", text="Most: {place}, {percent}.", figure="drift_heatmap"),
    Said("geometry_series", "relative_l2", where=f"{ROUTER} and 0 < relative_l2 <= 0.9 * l2_chance", text="Router rows moved {percent}.", figure="drift_heatmap"),
    Said("agreement", "same_so_far", where=COMPARED, pick="last", text="{percent} of tokens are routed alike in all layers.", figure="agreement_layers"),
    Said("agreement", "equal_sets", where=COMPARED, text="Least in {place}: {percent} ({chance_percent}).", figure="agreement_layers"),
]
FINDINGS = [
    Said("geometry_series", "pairs", where=f"{STORED} and pairs == 0", text="Expert distance, {series}: none, all matrices are zero in one checkpoint."),
    *(said for name, where, chance in (("{series}", STORED, "unrelated experts"), ("{series}, neurons matched", MATCHED, "matched rotated experts"), ("{series}, down (held out from the matching)", HELD_OUT, "matched rotated experts"))
      for said in (
        Said("geometry_series", "relative_l2", where=where, text=f"Expert distance, {name}: {DISTANCE} ({chance}: {{l2_chance}}).", figure="expert_distance"),
        Said("geometry_series", "sv_alignment", where=where, text=f"Singular directions, {name}: {DIRECTIONS} (unchanged: 1; {chance}: {{sv_chance}}).", figure="expert_distance"))),
    Said("geometry_series", "cosine_median", where=ROUTER, text="Router drift: median cosine {value} (unchanged: 1; {chance}); norm in B over norm in A {norm_ratio_least} to {norm_ratio_most} (unchanged: 1).", figure="drift_heatmap"),
    Said("expert_changes", "router_cosine", pick="smallest", text="Router row that turned most: {place}, cosine {value} (unchanged: 1; {chance}).", figure="drift_heatmap"),
    Said("expert_changes", "relative_l2", where=f"{FURTHEST} and with_layer", only="changed", text="Largest change: layer {layer} as a whole; most in expert {expert}, relative L2 {value}, {of_all} times the median of all experts ({chance}).", figure="drift_heatmap"),
    Said("expert_changes", "relative_l2", where=f"{FURTHEST} and not with_layer", only="changed", text="Largest change: {place}, relative L2 {value}, {of_layer} times the median of its layer, {of_all} times that of all experts ({chance}).", figure="drift_heatmap"),
    Said("agreement", "equal_sets", where=COMPARED, text="Agreement of experts: least in {place}: {value} of tokens have the same experts ({chance}); overlap {overlap} (random tokens: {overlap_chance}).", figure="agreement_layers"),
    Said("agreement", "same_so_far", where=COMPARED, pick="last", text="Tokens with the same experts in all layers: {value} of all.", figure="agreement_divergence"),
    Said("agreement", "lost_gate", pick="largest", text="Differences: the experts that changed had {span} of their token's gate weight ({chance}).", figure="agreement_layers"),
    Said("agreement", "flips_at_small_margin", pick="largest", text="Selection margin: of tokens with other experts, a share of {span} is among those with the smallest margin ({chance}).", figure="agreement_divergence"),
]
NOTHING_CHANGED = [
    Said("expert_changes", "relative_l2", text="No expert changed: relative L2 is 0 for all {total} experts that were compared.", figure="drift_heatmap"),
    Said("geometry_series", "pairs", where=ROUTER, text="No router row changed: relative L2 is 0 for all {pairs} rows that were compared.", figure="drift_heatmap"),
]
# fmt: on


def title(run: Run) -> str:
    """The names of two compared traces, with the folders above where the names are equal."""
    if "agreement" not in run.tables:
        return ""
    places = [Path(item["path"]).parts for item in run.info["runs"]]
    depth = 1
    while depth < max(map(len, places)) and places[0][-depth:] == places[1][-depth:]:
        depth += 1
    return " and ".join("/".join(parts[-depth:]) for parts in places)


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings, each with its chance level."""
    tables = all_rows(run, Selection())
    schema = TABLES | AGREEMENT
    numbers = key_numbers(NUMBERS, tables, schema)
    if "agreement" in tables:
        coverage = [f"{item['role'].upper()}: {item['path']}, a trace" for item in run.info["runs"]]
        agreed = verdict_of(VERDICT, tables, schema)
        lead = [Section("lead", "", figures=drawable(AGREED[:1], tables))]
        return Summary(coverage, say_all(FINDINGS, tables, schema), numbers, verdict=agreed, lead=lead)
    names = [plot_words(Path(item["path"]).name) for item in run.info["checkpoints"]]
    same = bool((tables["geometry"]["relative_l2"] == 0).all())
    said = verdict_of(NOTHING_CHANGED if same else VERDICT, tables, schema)
    verdict = f"{' → '.join(names)}: {said[:1].lower()}{said[1:]}" if said else ""
    coverage = [
        f"{role}: {Coverage(**{**item, 'experts_per_layer': tuple(item['experts_per_layer'])}).line()}"
        for role, item in zip("AB", run.info["coverage"], strict=True)
    ]
    findings = say_all(NOTHING_CHANGED if same else FINDINGS, tables, schema)
    findings += [] if same else alignment_findings(run)
    lead = [Section("lead", "", figures=drawable([MOVED], tables))]
    return Summary(coverage, findings, numbers, verdict=Finding(verdict, **said.place), lead=lead)


def measures(run: Run) -> list[Measure]:
    """How far each expert and each router row moved."""
    if "expert_changes" not in run.tables:
        return []
    rows = run.table("expert_changes")
    found = []
    for name, column, title, of in (
        (
            "change",
            "relative_l2",
            "Change of experts",
            "expert between the checkpoints, mean over its matrices",
        ),
        ("router_change", "router_l2", "Change of router rows", "router row between the checkpoints"),
    ):
        frame = rows[["layer", "expert"]].assign(value=rows[column]).dropna()
        caption = (
            f"Relative L2 distance of each {of} (0: unchanged, mean of all {number(frame['value'].mean())}, "
            "unrelated: √2)."
        )
        found += [Measure(name, title, frame, "", caption)] if len(frame) else []
    return found


def experts(run: Run) -> Iterator[LayerCards]:
    """Relative L2 of each expert's matrices and of its router row between the checkpoints."""
    if "expert_changes" not in run.tables:
        return
    columns = {f"{name}_l2": name for name in ("gate", "up", "down", "router")}
    block = {"kind": "bars", "title": f"Relative L2 per matrix (unrelated: {number(UNRELATED_L2)})"}
    for layer, rows in run.table("expert_changes").groupby("layer"):
        cards: dict[int, list[Payload]] = {}
        for expert, row in rows.set_index("expert")[[*columns]].rename(columns=columns).iterrows():
            if len(known := row.dropna()):
                bars = [list(item) for item in known.items()]
                cards[int(expert)] = [{**block, "rows": plain(bars), "middle": UNRELATED_L2}]
        yield LayerCards(int(layer), cards)


def alignment_findings(run: Run) -> list[str]:
    """Change of router-expert alignment and ambiguity, from the scans of both checkpoints."""
    scans = scans_of(run)
    if not scans:
        return []
    keys = ["layer", "matrix", "router", "fold_norm"]
    tests, scores = (
        headline_rows(scans[0], name).merge(headline_rows(scans[1], name), on=keys, suffixes=("_a", "_b"))
        for name in ("alignment_tests", "ambiguity")
    )
    changed = tests[tests["verdict_a"] != tests["verdict_b"]]
    names = [
        f"layer {row.layer} from “{VERDICTS[row.verdict_a]}” (p {number(row.p_value_a)}) to "
        f"“{VERDICTS[row.verdict_b]}” (p {number(row.p_value_b)})"
        for row in changed.head(4).itertuples()
    ]
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    what = f": {', '.join(names)}{more}" if names else ""
    text = f"Alignment verdict: changed in {len(changed)} of {counted(len(tests), 'layer')}{what}."
    if names:
        text += " A p-value that crosses the threshold is no test of a difference between the checkpoints."
    layer = {"layer": int(changed["layer"].iloc[0])} if len(changed) else {}
    findings: list[str] = [Finding(text, figure="identification_by_layer", **layer)]
    change = (scores["absolute_score_b"] - scores["absolute_score_a"]).to_numpy(float)
    if np.isfinite(change).any() and not np.nanmax(np.abs(change)):
        text = f"Absolute ambiguity: unchanged in {counted(len(scores), 'layer')}."
        findings.append(Finding(text, figure="identification_by_layer"))
    elif np.isfinite(change).any():
        top = scores.iloc[int(np.nanargmax(np.abs(change)))]
        before, after = number(top["absolute_score_a"]), number(top["absolute_score_b"])
        from_to = f"{before} to {after}"
        if before == after:
            from_to = f"{number(float(np.nanmax(np.abs(change))))} at {before}"
        text = (
            f"Absolute ambiguity: largest change in layer {top['layer']}, {from_to}; median change "
            f"{number(float(np.nanmedian(np.abs(change))))} (at chance: {number(top['absolute_chance_a'])})."
        )
        findings.append(Finding(text, figure="identification_by_layer", layer=int(top["layer"])))
    return findings


# --- sections


def sections(run: Run, selection: Selection) -> list[Section]:
    tables = all_rows(run, selection)
    if "agreement" in tables:
        return [agreement_section(tables)]
    parts = [chart_section(tables), drift_section(tables), *alignment_sections(run, selection)]
    return [section for section in parts if section.figures or section.tables]


def select(run: Run, selection: Selection) -> Tables:
    """Return every table of the run and, of two checkpoints, those of their scans that figures need."""
    return {**all_rows(run, selection), **scan_tables(run, selection)}


def chart_section(tables: Tables, anchor: str = "distances", title: str = "") -> Section:
    """The distances of all series in `geometry_layers`."""
    table, rows = TABLES["geometry_layers"], tables["geometry_layers"]
    text = (
        "Distance of each series' pairs per layer and matrix. Grey: unrelated experts in stored order and, for "
        "matched series, after matching the neurons of randomly rotated ones."
    )
    columns = [name for name in table.columns if name not in ("layer_name", "matched_l2", "matched_sv")]
    every = shown_table(table, rows, columns, "Every layer")
    title = title or "Distances between experts"
    return Section(anchor, title, text, drawable(DISTANCES, {"geometry_layers": rows}), [every])


def overlay(runs: list[Run]) -> list[Section]:
    """The series of several runs in one chart; nothing for one run, or for runs of different layers."""
    rows = series_of_runs(runs)
    title = "Distances between experts, all runs"
    return [] if rows is None else [chart_section({"geometry_layers": rows}, "distances-of-all", title)]


def drift_section(tables: Tables) -> Section:
    table, rows = TABLES["expert_changes"], tables.get("expert_changes", pd.DataFrame())
    shown = []
    if "relative_l2" in rows and rows["relative_l2"].notna().any():
        first = rows.sort_values("relative_l2", ascending=False, kind="stable").head(MOST_CHANGED)
        columns = ["layer", "expert", *table.values[:-2]]
        shown = [shown_table(table, first, columns, "Experts that changed most")]
    text = (
        "Every expert and router row compared with itself in the other checkpoint. Reference: the median over "
        "all experts."
    )
    return Section("drift", "Drift of experts and router rows", text, drawable(DRIFT, tables), shown)


def alignment_sections(run: Run, selection: Selection) -> list[Section]:
    scans = scans_of(run)
    if not scans:
        return []
    figures = drawable(ALIGNMENT_FIGURES, scan_tables(run, selection))
    matrix = scans[0].info["arguments"]["matrix"][0]
    text = (
        f"Fit of router rows to their experts ({matrix}) before and after, from the scans in scan-a and "
        "scan-b of the run folder; `moescope report` shows each completely."
    )
    return [Section("alignment", "Alignment and ambiguity", text, figures)]


def scan_tables(run: Run, selection: Selection) -> Tables:
    """Return the tables of both scans that the figures of alignment need, one view per checkpoint."""
    scans = scans_of(run)
    if not scans:
        return {}
    labels = [
        f"{role}: {plot_words(Path(item['path']).name)}"
        for role, item in zip("AB", run.info["checkpoints"], strict=True)
    ]
    return {
        name: selection.rows(
            pd.concat(
                [
                    headline_rows(scan, name).assign(view=label)
                    for scan, label in zip(scans, labels, strict=True)
                ],
                ignore_index=True,
            )
        )
        for name in dict.fromkeys(name for spec in ALIGNMENT_FIGURES for name in spec.needs)
    }


def headline_rows(scan: Run, name: str) -> pd.DataFrame:
    """Return the table's rows of the scan's first router variant: centered where the router is a softmax."""
    rows = scan.table(name)
    return rows[rows["router"] == scan.info["arguments"]["router"][0]] if "router" in rows else rows


def scans_of(run: Run) -> list[Run]:
    """The scans of both checkpoints; none where they were skipped, failed or were removed."""
    if not run.info.get("scanned"):
        return []
    parts = run.parts
    names = [f"scan-{role}" for role in "ab"]
    return [parts[name] for name in names] if set(names) <= set(parts) else []


def agreement_section(tables: Tables) -> Section:
    table = AGREEMENT["agreement"]
    columns = [name for name in table.columns if name != "layer_name"]
    text = "The same tokens in both traces, layer by layer. Chance: tokens of a layer paired at random."
    shown = [shown_table(table, tables["agreement"], columns, "Every layer")]
    return Section(
        "agreement", "Agreement token by token", text, drawable(AGREED, tables), shown, tab="routing"
    )


def guide(run: Run) -> list[str]:
    if "agreement" in run.tables:
        return []
    return [
        "Two experts are compared matrix by matrix. Relative L2 compares all entries after scaling both "
        "matrices to norm 1: 0 is equal, √2 is unrelated. R compares singular directions only: 1 is equal, "
        "0 is expected of unrelated ones.",
        "The order of an expert's neurons is arbitrary, so equal experts may look unrelated until their "
        "neurons are matched. Matching makes even unrelated experts look slightly similar: the dotted level, "
        "from the same experts after random rotations.",
    ]
