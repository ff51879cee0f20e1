"""Report on two compared checkpoints (distances, drift, alignment) or two compared runs (changes)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moescope.comparison.figures import (
    AGREED,
    DRIFT,
    EXPERT_DISTANCE,
    LARGEST_CHANGES,
    PROJECTIONS,
    UNRELATED_L2,
    agreement_words,
    largest_change,
    layer_range,
    unmatched,
)
from moescope.comparison.tables import AGREEMENT, TABLES
from moescope.plotting.style import capital, counted, number, span
from moescope.reporting.joint import series_of_runs
from moescope.reporting.pack import plain, plain_table, table_payload
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.types import Coverage
from moescope.verb import (
    FigureSpec,
    Finding,
    KeyNumber,
    LayerCards,
    Measure,
    Payload,
    Section,
    Selection,
    Summary,
    Tables,
    all_rows,
)
from moescope.weights.figures_identification import ACROSS_VIEWS
from moescope.weights.report import VERDICT_NAMES

MOST_CHANGED = 20  # rows of the table of experts
NAMED_COLUMNS = 6  # in the findings on two runs
LEADING = {  # metrics of two traces that come first
    "cv": "Load CV",
    "domain_information": "Domain information",
    "routing_entropy": "Routing entropy",
}
ALIGNMENT_FIGURES = [
    spec for spec in ACROSS_VIEWS if spec.name in ("compare_accuracy", "compare_margin", "compare_ambiguity")
]


def of_runs(run: Run) -> bool:
    """Whether two runs were compared, not two checkpoints."""
    return bool(run.info["arguments"]["of"] == "runs")


def title(run: Run) -> str:
    """The names of two compared runs, with the folders above where the names are equal."""
    if not of_runs(run):
        return ""
    places = [Path(item["path"]).parts for item in run.info["runs"]]
    depth = 1
    while depth < max(map(len, places)) and places[0][-depth:] == places[1][-depth:]:
        depth += 1
    return " and ".join("/".join(parts[-depth:]) for parts in places)


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings, each with the level of unrelated experts."""
    if of_runs(run):
        verb = run.info["arguments"]["verb"]
        coverage = [f"{item['role'].upper()}: {item['path']}, a run of {verb}" for item in run.info["runs"]]
        changes = compared_columns(run)
        changed = sum(change["changed"] > 0 for change in changes)
        unit = f"of {len(changes)}"
        keys = [KeyNumber("Columns changed", changed, unit=unit, most=max(len(changes), 1))]
        if (largest := ranked(changes)) and np.isfinite(in_spreads(largest[0])):
            top = largest[0]
            name = f"Largest change: {label_of(top)}"
            keys.append(KeyNumber(name, in_spreads(top), unit="× spread over rows", word=place_of(top)))
        agreed_keys, agreed = agreement_summary(run)
        leading_keys, leading = leading_changes(changes)
        findings = [*leading, *agreed, *change_findings(changes)]
        return Summary(coverage, findings, [*leading_keys, *agreed_keys, *keys])
    coverage = [
        f"{role}: {Coverage(**{**item, 'experts_per_layer': tuple(item['experts_per_layer'])}).line()}"
        for role, item in zip("AB", run.info["coverage"], strict=True)
    ]
    geometry, layers = run.table("geometry"), run.table("geometry_layers")
    if (geometry["relative_l2"] == 0).all():
        return Summary(coverage, [equality_finding(geometry)], key_numbers(geometry))
    experts = layers[layers["matrix"].isin(PROJECTIONS)]
    matched = geometry.groupby("series")["matched"].any()
    findings = [
        finding
        for series, rows in experts.groupby("series", sort=False)
        for finding in distance_findings(str(series), rows, bool(matched[series]))
    ]
    findings += router_findings(geometry)
    findings += change_finding(geometry)
    return Summary(coverage, findings + alignment_findings(run), key_numbers(geometry))


def key_numbers(geometry: pd.DataFrame) -> list[KeyNumber]:
    rows = unmatched({"geometry": geometry})
    experts, routers = rows[rows["matrix"] != "router"], rows[rows["matrix"] == "router"]
    changed = int((expert_changes(geometry)["relative_l2"] > 0).sum())
    values = [  # name, value, level of unrelated experts, value of equal ones
        ("Mean relative L2 of experts", experts["relative_l2"].mean(), UNRELATED_L2, 0.0),
        ("Mean SV alignment R", experts["sv_alignment"].mean(), 0.0, 1.0),
        ("Median cosine of router rows", routers["cosine"].median(), 0.0, 1.0),
    ]
    keys = [
        KeyNumber(
            name,
            float(value),
            chance,
            word="unchanged" if np.isclose(value, equal, atol=1e-6) else "changed",
            reference="unrelated",
            most=max(chance, equal),
        )
        for name, value, chance, equal in values
        if np.isfinite(value)
    ]
    count = len(expert_changes(geometry))
    return [*keys, KeyNumber("Experts that changed", changed, unit=f"of {count:,}", most=max(count, 1))]


# --- findings on two checkpoints


def equality_finding(geometry: pd.DataFrame) -> Finding:
    routers = int((unmatched({"geometry": geometry})["matrix"] == "router").sum())
    rows = f" and {counted(routers, 'router row')}" if routers else ""
    experts = counted(len(expert_changes(geometry)), "expert")
    what = "Nothing changed" if routers else "No expert changed (routers were not compared)"
    text = f"{what}: relative L2 is 0 for all {experts}{rows} that were compared."
    return Finding(text, tab="overview", colour="change")


def distance_findings(series: str, rows: pd.DataFrame, matched: bool) -> list[str]:
    """Range of L2 and R over layers; of a series with down held out from the matching, that of down."""
    if series.endswith("_held_out") and "down" in set(rows["matrix"]):
        rows = rows[rows["matrix"] == "down"]
        series = f"{series}, down (held out from the matching)"
    columns = ["relative_l2_mean", "sv_alignment_mean", "null_l2_matched", "null_sv_matched"]
    by_layer = rows.groupby("layer", as_index=False)[columns].mean()
    known = by_layer[by_layer["relative_l2_mean"].notna()]
    if known.empty:
        return [Finding(f"Expert distance, {series}: none, all matrices are zero in one checkpoint.")]
    chance_l2, chance_r = f"unrelated experts: {number(UNRELATED_L2)}", "unrelated experts: 0"
    if matched:
        chance_l2 = f"matched rotated experts: {number(known['null_l2_matched'].mean())}"
        chance_r = f"matched rotated experts: {number(known['null_sv_matched'].mean())}"
    figure = f"expert_distance_{rows['matrix'].iloc[-1]}"
    l2 = layer_range(known, "relative_l2_mean")
    text = f"Expert distance, mean over experts and matrices, {series}: relative L2 {l2} ({chance_l2})."
    findings: list[str] = [Finding(text, figure=figure)]
    if known["sv_alignment_mean"].notna().any():
        r = layer_range(known, "sv_alignment_mean")
        text = f"Singular directions, {series}: R {r} (unchanged: 1; {chance_r})."
        findings.append(Finding(text, figure=figure))
    return findings


def router_findings(geometry: pd.DataFrame) -> list[str]:
    rows = geometry[(geometry["matrix"] == "router") & geometry["cosine"].notna()]
    if rows.empty:
        return []
    low = rows.loc[rows["cosine"].idxmin()]
    text = (
        f"Router drift: median cosine {number(rows['cosine'].median())}, lowest {number(low['cosine'])} in "
        f"layer {low['layer']}, expert {low['expert_a']} (unchanged: 1; unrelated: 0); norm in B over "
        f"norm in A {span(rows['norm_ratio'])} (unchanged: 1)."
    )
    place = {"layer": int(low["layer"]), "expert": int(low["expert_a"])}
    return [Finding(text, tab="overview", colour="router_change", **place)]


def expert_changes(geometry: pd.DataFrame) -> pd.DataFrame:
    """One row per expert, largest change first: mean relative L2 over projections in stored order, and its
    ratio to the medians of its layer and of all experts."""
    rows = unmatched({"geometry": geometry})
    rows = rows[rows["matrix"] != "router"]
    experts = rows.groupby(["layer", "expert_a"], as_index=False)["relative_l2"].mean().dropna()
    experts["of_layer"] = experts["relative_l2"] / experts.groupby("layer")["relative_l2"].transform("median")
    experts["of_all"] = experts["relative_l2"] / experts["relative_l2"].median()
    return experts.sort_values("relative_l2", ascending=False, ignore_index=True)


def measures(run: Run) -> list[Measure]:
    """How far each expert and each router row moved."""
    if "geometry" not in run.tables or of_runs(run):
        return []
    geometry = run.table("geometry")
    found = []
    experts = expert_changes(geometry).rename(columns={"expert_a": "expert", "relative_l2": "value"})
    if len(experts):
        caption = (
            "Relative L2 distance of each expert between the checkpoints, mean over its matrices "
            f"(0: unchanged, mean of all {number(experts['value'].mean())}, unrelated experts: √2)."
        )
        frame = experts[["layer", "expert", "value"]]
        found.append(Measure("change", "Change of experts", frame, "", caption))
    rows = unmatched({"geometry": geometry})
    rows = rows[rows["matrix"] == "router"].rename(columns={"expert_a": "expert", "relative_l2": "value"})
    if len(rows):
        caption = "Relative L2 distance of each router row between the checkpoints (0: unchanged)."
        frame = rows[["layer", "expert", "value"]]
        found.append(Measure("router_change", "Change of router rows", frame, "", caption))
    return found


def experts(run: Run) -> Iterator[LayerCards]:
    """Relative L2 of each expert's matrices and of its router row between the checkpoints."""
    if "geometry" not in run.tables or of_runs(run):
        return
    rows = unmatched({"geometry": run.table("geometry")})
    for layer, of_layer in rows[rows["relative_l2"].notna()].groupby("layer"):
        cards: dict[int, list[Payload]] = {}
        for expert, of_expert in of_layer.groupby("expert_a"):
            distances = of_expert[["matrix", "relative_l2"]].to_numpy(object).tolist()
            block = {"kind": "bars", "title": "Relative L2 per matrix (unrelated: 1.41)"}
            cards[int(expert)] = [{**block, "rows": plain(distances), "middle": UNRELATED_L2}]
        yield LayerCards(int(layer), cards)


def change_finding(geometry: pd.DataFrame) -> list[str]:
    experts = expert_changes(geometry)
    if experts.empty:
        return []
    mean = float(experts["relative_l2"].mean())
    if experts["relative_l2"].iloc[0] == 0:
        text = f"Largest change: none, relative L2 is 0 for all {len(experts):,} experts."
        return [Finding(text, tab="overview", colour="change")]
    where, words = largest_change(experts)
    text = f"Largest change, mean over matrices: {words} (all {len(experts):,} experts: {number(mean)})."
    return [Finding(text, tab="overview", colour="change", **where)]


def alignment_findings(run: Run) -> list[str]:
    """Change of router-expert alignment and ambiguity, from the scans of both checkpoints."""
    scans = scans_of(run)
    if not scans:
        return []
    keys = ["layer", "matrix", "router", "fold_norm"]
    tests, scores = (
        scans[0].table(name).merge(scans[1].table(name), on=keys, suffixes=("_a", "_b"))
        for name in ("alignment_tests", "ambiguity")
    )
    changed = tests[tests["verdict_a"] != tests["verdict_b"]]
    names = [
        f"layer {row.layer} from “{VERDICT_NAMES[row.verdict_a]}” (p {number(row.p_value_a)}) to "
        f"“{VERDICT_NAMES[row.verdict_b]}” (p {number(row.p_value_b)})"
        for row in changed.head(4).itertuples()
    ]
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    what = f": {', '.join(names)}{more}" if names else ""
    text = f"Alignment verdict: changed in {len(changed)} of {counted(len(tests), 'layer')}{what}."
    if names:
        text += " A p-value that crosses the threshold is no test of a difference between the checkpoints."
    layer = {"layer": int(changed["layer"].iloc[0])} if len(changed) else {}
    findings: list[str] = [Finding(text, figure="compare_accuracy", **layer)]
    change = (scores["absolute_score_b"] - scores["absolute_score_a"]).to_numpy(float)
    if np.isfinite(change).any() and not np.nanmax(np.abs(change)):
        text = f"Absolute ambiguity: unchanged in {counted(len(scores), 'layer')}."
        findings.append(Finding(text, figure="compare_ambiguity"))
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
        findings.append(Finding(text, figure="compare_ambiguity", layer=int(top["layer"])))
    return findings


# --- sections on two checkpoints


def sections(run: Run, selection: Selection) -> list[Section]:
    if of_runs(run):
        figures = drawable([LARGEST_CHANGES], {"changes": change_rows(run)})
        first = [Section("overview", "Changes", figures=figures, tab="overview")] if figures else []
        return [*agreement_sections(run), *first, change_section(compared_columns(run))]
    tables = {name: selection.rows(run.table(name)) for name in TABLES}
    parts = [chart_section(tables), drift_section(tables), *alignment_sections(run, selection)]
    return [section for section in parts if section.figures or section.tables]


def select(run: Run, selection: Selection) -> Tables:
    """Return every table of the run; of two checkpoints, those of their scans that figures need, and of two
    runs the changes per column."""
    more = {"changes": change_rows(run)} if of_runs(run) else scan_tables(run, selection)
    return {**all_rows(run, selection), **more}


def drawable(specs: Sequence[FigureSpec], tables: Tables) -> list[tuple[FigureSpec, Tables]]:
    return [(spec, tables) for spec in specs if spec.can_draw(tables)]


def chart_section(tables: Tables, anchor: str = "distances") -> Section:
    """The distances of all series in `geometry_layers`."""
    layers = tables["geometry_layers"]
    return Section(
        anchor,
        "Distances between experts",
        "Distance of each series' pairs per layer and projection. Grey: chance level, for unrelated "
        "experts in stored order and, for matched series, after matching the neurons of random ones.",
        drawable(EXPERT_DISTANCE, {"geometry_layers": layers}),
        [
            table_payload(
                TABLES["geometry_layers"],
                layers,
                [name for name in TABLES["geometry_layers"].columns if name != "layer_name"],
                "Every layer",
            )
        ],
    )


def overlay(runs: list[Run]) -> list[Section]:
    """The series of several runs in one chart; nothing for one run, or for runs of different layers."""
    rows = series_of_runs(runs)
    if rows is None:
        return []
    section = chart_section({"geometry_layers": rows}, "distances-of-all")
    return [replace(section, title="Distances between experts, all runs")]


def drift_section(tables: Tables) -> Section:
    geometry = tables["geometry"]
    return Section(
        "drift",
        "Drift of experts and router rows",
        "Every expert and router row compared with itself in the other checkpoint. Reference: the median "
        "over all experts.",
        drawable(DRIFT, {"geometry": geometry}),
        [changed_experts_table(geometry)] if geometry["matrix"].isin(PROJECTIONS).any() else [],
    )


def changed_experts_table(geometry: pd.DataFrame) -> dict[str, Any]:
    """The experts that changed most: distance per projection, with the median and the level of unrelated
    experts."""
    rows = unmatched({"geometry": geometry})
    by_matrix = rows.pivot_table(index=["layer", "expert_a"], columns="matrix", values="relative_l2")
    lowest_r = rows.groupby(["layer", "expert_a"])["sv_alignment"].min()
    cosine = rows[rows["matrix"] == "router"].set_index(["layer", "expert_a"])["cosine"]
    projections = [name for name in PROJECTIONS if name in by_matrix]
    heads = [
        ("layer", "layer", "int"),
        ("expert", "expert", "int"),
        ("relative_l2", "relative L2, mean", "float"),
        ("relative_l2", "times the median of all", "float"),
        ("relative_l2", "times the median of its layer", "float"),
        ("null_l2", "unrelated", "float"),
        *(("relative_l2", f"L2 of {name}", "float") for name in projections),
        ("sv_alignment", "lowest R", "float"),
        ("geometry.cosine", "cosine of its router row", "float"),
    ]
    body = []
    for row in expert_changes(geometry).head(MOST_CHANGED).itertuples():
        place = (row.layer, row.expert_a)
        body.append(
            [row.layer, row.expert_a, row.relative_l2, row.of_all, row.of_layer, UNRELATED_L2]
            + [by_matrix.loc[place, name] for name in projections]
            + [lowest_r.get(place), cosine.get(place)]
        )
    return plain_table("changed_experts", "Experts that changed most", heads, body)


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
                    scan.table(name).assign(view=label, run=label)
                    for scan, label in zip(scans, labels, strict=True)
                ],
                ignore_index=True,
            )
        )
        for name in dict.fromkeys(name for spec in ALIGNMENT_FIGURES for name in spec.needs)
    }


def scans_of(run: Run) -> list[Run]:
    """The scans of both checkpoints; none where they were skipped, failed or were removed."""
    if not run.info.get("scanned"):
        return []
    parts = run.parts
    names = [f"scan-{role}" for role in "ab"]
    return [parts[name] for name in names] if set(names) <= set(parts) else []


# --- two runs


def compared_columns(run: Run) -> list[dict[str, Any]]:
    return [change for change in run.info["changes"] if change["rows"]]


def label_of(change: dict[str, Any]) -> str:
    """ "CV of gate weight (routing layers)"; runs from before labels were stored: from the names."""
    label = change.get("label") or change["column"].replace("_", " ")
    return f"{label} ({change['table'].replace('_', ' ')})"


def leading_changes(changes: list[dict[str, Any]]) -> tuple[list[KeyNumber], list[str]]:
    """The means of two traces' main metrics over the rows that both have."""
    metrics = {change["column"]: change for change in changes if change["table"] == "routing_layers"}
    keys: list[KeyNumber] = []
    findings: list[str] = []
    for metric, name in LEADING.items():
        if "mean_a" not in (change := metrics.get(metric, {})):
            continue
        a, b = change["mean_a"], change["mean_b"]
        keys.append(KeyNumber(f"{name} in B, mean", b, a, reference="in A"))
        text = f"{name}: mean {number(a)} in A, {number(b)} in B over {counted(change['rows'], 'common row')}"
        if change["changed"]:
            text += f"; largest change at {place_of(change)}, {number(change['a'])} to {number(change['b'])}"
        findings.append(Finding(f"{text}.", section="changes"))
    return keys, findings


def change_findings(changes: list[dict[str, Any]]) -> list[str]:
    """How many columns changed, and those that changed most, in units of their spread over rows."""
    unchanged = sum(not change["changed"] for change in changes)
    text = f"Changes: {counted(len(changes), 'column')} compared, {unchanged} unchanged."
    findings: list[str] = [Finding(text, section="changes")]
    words = [change for change in changes if "largest" not in change and change["changed"]]
    sentences = [
        f"{capital(label_of(change))}: largest change at {place_of(change)}, {number(change['a'])} "
        f"to {number(change['b'])}; median change {number(change['median'])}, spread over rows "
        f"{number(change['spread'])}."
        for change in ranked(changes)[:NAMED_COLUMNS]
    ]
    sentences += [
        f"{capital(label_of(change))}: {change['changed']:,} of {counted(change['rows'], 'row')} "
        f"differ, such as {place_of(change)}: “{change['a']}” to “{change['b']}”."
        for change in words[:NAMED_COLUMNS]
    ]
    return [*findings, *(Finding(text, section="changes") for text in sentences)]


def ranked(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Numeric columns that changed, by their largest change in units of the column's spread; columns without
    spread, whose changes have no such size, come last."""

    def order(change: dict[str, Any]) -> tuple[bool, float]:
        return not np.isfinite(in_spreads(change)), -in_spreads(change)

    return sorted((change for change in changes if change.get("largest")), key=order)


def change_rows(run: Run) -> pd.DataFrame:
    """The numeric columns that changed, with where and by how many spreads."""
    return pd.DataFrame(
        [
            {**change, "name": label_of(change), "spreads": in_spreads(change), "where": place_of(change)}
            for change in ranked(compared_columns(run))
        ]
    )


def in_spreads(change: dict[str, Any]) -> float:
    size, spread = abs(float(change["largest"])), float(change["spread"])
    return size / spread if spread > 0 else (float("inf") if size else 0.0)


def place_of(change: dict[str, Any]) -> str:
    """ "layer 3, matrix gate"."""
    words = [f"{key.replace('_', ' ')} {value}" for key, value in change["where"].items()]
    return ", ".join(words) or "the only row"


def agreement_summary(run: Run) -> tuple[list[KeyNumber], list[str]]:
    """Agreement of two traces token by token, where both hold tokens."""
    if "agreement" not in run.tables:
        return [], []
    rows = run.table("agreement")
    rows = rows[rows["tokens"] > 0]
    if rows.empty:
        return [], []
    place = {"tab": "routing", "section": "agreement"}
    mean, chance = float(rows["overlap"].mean()), float(rows["overlap_chance"].mean())
    never = 1 - float(rows["first_divergence"].sum())
    findings: list[str] = [
        Finding(f"Agreement of experts: {agreement_words(rows)}", **place),
        Finding(
            f"Tokens with the same experts in all {counted(len(rows), 'layer')}: {100 * never:.1f} %.",
            **place,
        ),
    ]
    lost = rows.dropna(subset=["lost_gate"])
    if len(lost):
        text = (
            f"Differences: the experts that changed had {number(lost['lost_gate'].mean())} of their token's "
            f"gate weight (mean of a chosen expert: {number(lost['mean_gate'].mean())})."
        )
        findings.append(Finding(text, **place))
    close = rows.dropna(subset=["flips_at_small_margin"])
    if len(close):
        found, chance_found = (
            100 * float(close[name].mean())
            for name in ("flips_at_small_margin", "flips_at_small_margin_chance")
        )
        text = (
            f"Selection margin: {found:.1f} % of the tokens with other experts are among those with the "
            f"smallest margin (all tokens: {chance_found:.1f} %)."
        )
        findings.append(Finding(text, **place))
    return [KeyNumber("Mean overlap of experts", mean, chance, most=1.0)], findings


def agreement_sections(run: Run) -> list[Section]:
    if "agreement" not in run.tables:
        return []
    rows = run.table("agreement")
    table = AGREEMENT["agreement"]
    columns = [name for name in table.columns if name != "layer_name" and rows[name].notna().any()]
    text = "The same tokens in both traces, layer by layer. Chance: tokens of a layer paired at random."
    figures = drawable(AGREED, {"agreement": rows[rows["tokens"] > 0]})
    shown = [table_payload(table, rows, columns, "Every layer")]
    return [Section("agreement", "Agreement token by token", text, figures, shown, tab="routing")]


def change_section(changes: list[dict[str, Any]]) -> Section:
    heads = [
        ("column", "column (table)", "text"),
        ("rows", "rows", "int"),
        ("changed", "differ", "int"),
        ("where", "largest at", "text"),
        ("a", "in A", "text"),
        ("b", "in B", "text"),
        ("median", "median change", "float"),
        ("spread", "spread over rows of A", "float"),
        ("spreads", "largest, in spreads", "float"),
    ]
    rows = [
        [
            label_of(change),
            *(change[name] for name in ("rows", "changed")),
            place_of(change) if "where" in change else "",
            *(shown_value(change.get(role)) for role in "ab"),
            *(change.get(name) for name in ("median", "spread")),
            in_spreads(change) if "largest" in change else None,
        ]
        for change in [*ranked(changes), *(change for change in changes if not change.get("largest"))]
    ]
    text = (
        "Every row that both runs have, column by column. Compare a change with the column's median change "
        "and with its spread over the rows of the first run."
    )
    return Section(
        "changes", "Changes per column", text, [], [plain_table("changes", "Every column", heads, rows)]
    )


def shown_value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(float(value))
    return "" if value is None else str(value)


# --- how to read it


def guide(run: Run) -> list[str]:
    if of_runs(run):
        return [
            "Every row that both runs have is compared, column by column; their own reports explain the "
            "columns."
        ]
    return [
        "Two experts are compared matrix by matrix. Relative L2 compares all entries after scaling both "
        "matrices to norm 1: 0 is equal, √2 is unrelated. R compares singular directions only: 1 is equal, "
        "0 is expected of unrelated ones.",
        "The order of an expert's neurons is arbitrary, so equal experts may look unrelated until their "
        "neurons are matched. Matching makes even unrelated experts look slightly similar: the grey band, "
        "from the same experts after random rotations.",
    ]
