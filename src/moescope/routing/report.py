"""A trace's part of the report: summary, findings and sections of figures, tables, layers and text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import RANDOM, UNIFORM, counted, listed, named_layers, number, span, values_of
from moescope.reporting.pack import plain_table, table_payload
from moescope.routing.expert_maps import expected_pairs
from moescope.routing.figures_experts import (
    DOMAINS,
    MAPS,
    NAMED_FROM,
    SEPARATION,
    missing_maps,
    strongest_pair,
)
from moescope.routing.figures_load import LOAD, busiest, usages, with_enough_tokens
from moescope.routing.figures_metrics import (
    DECISIONS,
    INDEPENDENT,
    PERMUTED_TOKENS,
    VOCABULARY,
    comparable,
    layer_range,
    references,
)
from moescope.routing.figures_steps import OVER_STEPS, rows_of
from moescope.routing.report_map import view_measures
from moescope.routing.report_views import (
    TraceTables,
    View,
    layer_sections,
    load_trace,
    missing_interval,
    read_excerpt,
    routing_views,
    select_rows,
    skipped_steps,
    text_payload,
)
from moescope.routing.tables import TRACE_TABLES
from moescope.run import Run
from moescope.verb import FigureSpec, Finding, KeyNumber, Payload, Section, Selection, Summary, Tables

STEPS_NAMED = 6
DOMAINS_NAMED = 5
EXPERTS_NAMED = 2  # per domain
UNIFORM_SHARE = 0.99  # of a uniform router's entropy, above which routing is called uniform
ROWS_SHOWN = 2000  # of a folded table; the run folder has all

# --- findings


def with_interval(row: pd.Series) -> str:
    """ "0.31 [0.28, 0.34]", "0.31 (corrected for few documents 0.27 [0.24, 0.3])", or the value alone."""
    ends = f" [{number(row['low'])}, {number(row['high'])}]" if pd.notna(row["low"]) else ""
    if pd.notna(row["corrected"]):
        return f"{number(row['value'])} (corrected for few documents: {number(row['corrected'])}{ends})"
    return f"{number(row['value'])}{ends}"


def highest(rows: pd.DataFrame) -> pd.Series:
    """The row of the layer with the largest value, of those with enough tokens."""
    rows = comparable(rows)
    return rows.loc[rows["value"].idxmax()]


def few_tokens(rows: pd.DataFrame) -> str:
    """ " Not compared: layer 47, with at most 1 token."; empty where all layers have enough."""
    few = rows.drop(comparable(rows).index)
    most = counted(int(few["tokens"].max()), "token") if len(few) else ""
    return f" Not compared: {named_layers(few['layer'])}, with at most {most}." if len(few) else ""


def routing_findings(view: View) -> list[str]:
    """The view's findings, most important first; what a trace does not hold is skipped."""
    tables = view.tables
    findings = load_findings(view)
    findings[1:1] = domain_findings(view)
    if len(rows := values_of(tables, "routing_entropy")):
        line = f"Routing entropy (nats) {layer_range(rows)}; {references(rows, UNIFORM)}."
        if len(top := values_of(tables, "confidence")):
            line += f" Mean top-1 probability: {span(top['value'])} ({UNIFORM}: {span(top['chance'])})."
        findings.append(Finding(line, figure="routing_entropy_by_layer"))
    findings += pair_findings(view)
    if len(rows := values_of(tables, "domain_information")):
        limits = f"permuted labels: 0, at most {number(np.log(tables['load']['domain'].nunique()))}"
        top = highest(specialised_layers(rows))
        text = f"highest in layer {top['layer']}, I(expert; domain) = {with_interval(top)} nats ({limits})."
        place: dict[str, Any] = {"layer": int(top["layer"])}
        if rows["low"].notna().any() and not top["low"] > 0:
            text = (
                f"no layer is distinguishable from chance, I(expert; domain) = {span(rows['value'])} nats, "
                f"and no interval lies above 0 ({limits})."
            )
            place = {}
        figure = "domain_information_by_layer"
        findings.append(Finding(f"Domain specialisation: {text}", figure=figure, **place))
    if len(rows := values_of(tables, "token_information")):
        top = highest(rows)
        findings.append(
            Finding(
                f"Token specialisation: highest in layer {top['layer']}, I(expert; token) = "
                f"{number(top['value'])} nats ({PERMUTED_TOKENS}: {number(top['chance'])}).",
                figure="token_information_by_layer",
                layer=int(top["layer"]),
            )
        )
    if len(rows := values_of(tables, "sequential_consistency")):
        top = highest(rows)
        findings.append(
            Finding(
                f"Adjacent tokens share their top expert most often in layer {top['layer']}: "
                f"{with_interval(top)}; {references(rows[rows['layer'] == top['layer']], INDEPENDENT)}.",
                figure="sequence_by_layer",
                layer=int(top["layer"]),
            )
        )
    return findings


def specialised_layers(rows: pd.DataFrame) -> pd.DataFrame:
    """The layers whose I(expert; domain) has an interval above 0; all layers if there is none."""
    return rows[rows["low"] > 0] if (rows["low"] > 0).any() else rows


def domain_findings(view: View) -> list[str]:
    """One sentence: the experts of highest affinity of the domains that have the highest."""
    rows = view.tables.get("domains", pd.DataFrame())
    if rows.empty or rows["domain"].nunique() < 2:
        return []
    known = bool(rows["low"].notna().any())
    enough = rows["low"] > 1 if known else rows["tokens"] >= NAMED_FROM * rows["affinity"]
    ranked = rows[enough & rows["affinity"].notna()].sort_values("affinity", ascending=False, kind="stable")
    domains = [*ranked["domain"].unique()]
    domains += [name for name in rows["domain"].unique() if name not in domains]
    parts = []
    for domain in domains[:DOMAINS_NAMED]:
        experts = [
            f"L{row.layer} E{row.expert} {number(row.affinity)}"
            + (f" [{number(row.low)}, {number(row.high)}]" if known else "")
            for row in ranked[ranked["domain"] == domain].head(EXPERTS_NAMED).itertuples()
        ]
        nobody = "none beyond chance" if known else "too few tokens"
        parts.append(f"{domain} {listed(experts) if experts else nobody}")
    if len(domains) > DOMAINS_NAMED:
        parts.append(f"{counted(len(domains) - DOMAINS_NAMED, 'more domain')} on the map")
    doubt = "one of 40 intervals lies above 1 by chance" if known else missing_interval(view)
    place = {"domain": domains[0]}
    if len(ranked):
        place |= {"layer": int(ranked["layer"].iloc[0]), "expert": int(ranked["expert"].iloc[0])}
    text = (
        f"Experts by domain: {'; '.join(parts)}; times the mean domain's use (1 if a domain uses an expert "
        f"like the others; {doubt})."
    )
    return [Finding(text, tab="overview", colour="domain_affinity", **place)]


def load_findings(view: View) -> list[str]:
    tables = view.tables
    findings: list[str] = []
    if len(rows := values_of(tables, "cv")):
        top = highest(rows)
        findings.append(
            Finding(
                f"Load balance: worst in layer {top['layer']}, CV {with_interval(top)}; "
                f"{references(rows[rows['layer'] == top['layer']], RANDOM)}. "
                f"All layers: {span(comparable(rows)['value'])}.{few_tokens(rows)}",
                figure="cv_by_layer",
                layer=int(top["layer"]),
            )
        )
    if loads := [usage for usage in usages(tables) if usage.even]:
        busy = busiest(loads)
        chance = values_of(tables, "max_over_mean").set_index("layer")["chance"].get(busy.layer)
        findings.append(
            Finding(
                f"The busiest expert is {busy.experts[busy.counts.argmax()]} of layer {busy.layer}, with "
                f"{number(busy.times.max())} times an even share"
                + ("." if chance is None else f" ({RANDOM}: {number(chance)})."),
                tab="overview",
                layer=busy.layer,
                expert=int(busy.experts[busy.counts.argmax()]),
                colour="load",
            )
        )
        unused = {usage.layer: int((usage.counts == 0).sum()) for usage in loads}
        worst = max((usage.layer for usage in with_enough_tokens(loads)), key=lambda layer: unused[layer])
        at_chance = values_of(tables, "unused").set_index("layer")["chance"].get(worst, np.nan)
        chance = f"{RANDOM}: {small_share(at_chance)}"
        total = sum(len(usage.counts) for usage in loads)
        text = f"All {total:,} experts got tokens (unused with {chance})."
        place: dict[str, Any] = {"tab": "overview", "colour": "load"}
        if any(unused.values()):
            text = (
                f"{counted(sum(unused.values()), 'expert')} of {total:,} got no token, most in layer {worst} "
                f"({unused[worst]}; {chance})."
            )
            place["layer"] = int(worst)
        findings.append(Finding(text, **place))
    if len(rows := values_of(tables, "dropped")) and rows["value"].max() > 0:
        top = highest(rows)
        findings.append(
            Finding(
                f"Expert capacity was exceeded: in layer {top['layer']} {number(100 * top['value'])} % of "
                "the expert slots are empty (0 without capacity).",
                section="load",
                layer=int(top["layer"]),
            )
        )
    return findings


def small_share(share: float) -> str:
    """ "3.2 %"; what would round to nothing is "below 0.1 %"."""
    return f"{number(100 * share)} %" if share >= 0.001 or not share else "below 0.1 %"


def pair_findings(view: View) -> list[str]:
    if not len(view.tables.get("coactivation", ())) or not len(values_of(view.tables, "expert_overlap")):
        return []
    pairs = expected_pairs(view.tables["coactivation"]).groupby("layer")
    strongest = {layer: pair for layer, rows in pairs if (pair := strongest_pair(rows))}
    if not strongest:
        return []
    layer = max(strongest, key=lambda layer: strongest[layer].over)
    top = strongest[layer]
    text = (
        f"Most co-activated: experts {top.a} and {top.b} of layer {layer}, {number(top.over)} times chance "
        f"(the largest of a layer's pairs reaches about {number(top.at_chance)} at chance)."
    )
    return [Finding(text, figure="coactivation_heatmap", layer=int(layer))]


def step_findings(trace: TraceTables) -> list[str]:
    """Changes over the steps: load balance and consistency of routing; empty for one step."""
    stability, steps = trace.tables["stability"], trace.steps
    if len(steps) < 2:
        return []
    means = rows_of(trace.in_main_phase(), "cv").groupby("step")[["value", "chance"]].mean()
    text = (
        f"Load balance from step {steps[0]} to step {steps[-1]}: mean CV {number(means['value'].iloc[0])} to "
        f"{number(means['value'].iloc[-1])} ({RANDOM}: {number(means['chance'].mean())})."
    )
    findings: list[str] = [Finding(text, figure="cv_by_step")]
    if stability.empty:
        return findings
    first = between_steps(stability, steps[0], steps[-1])
    least = first.loc[first["routing_consistency_corrected"].idxmin()]
    line = (
        f"Routing consistency between steps {steps[0]} and {steps[-1]}: {consistency(first)} (0), lowest in "
        f"layer {least['layer']} ({number(least['routing_consistency_corrected'])})"
    )
    if len(steps) > 2:
        final = between_steps(stability, steps[-2], steps[-1])
        line += f"; between steps {steps[-2]} and {steps[-1]}: {consistency(final)}"
    findings.append(Finding(f"{line}.", figure="consistency_matrix", layer=int(least["layer"])))
    if noisy := int(first["tau_is_noise"].astype(bool).sum()):
        text = f"In {counted(noisy, 'layer')} loads are so even that the order of experts by usage is noise."
        findings.append(Finding(text, figure="consistency_matrix"))
    return findings


def between_steps(stability: pd.DataFrame, a: int, b: int) -> pd.DataFrame:
    return stability[(stability["step_a"] == a) & (stability["step_b"] == b)]


def consistency(rows: pd.DataFrame) -> str:
    share, beyond = (rows[name].mean() for name in ("routing_consistency", "routing_consistency_corrected"))
    return f"{number(100 * share)} % of the experts, {number(beyond)} beyond chance"


def trace_findings(trace: TraceTables) -> list[str]:
    """Changes over the steps, then the findings of the last step in the main phase."""
    return [*step_findings(trace), *routing_findings(routing_views(trace)[-1])]


def which_findings(trace: TraceTables) -> str:
    """ "step 200, the last of 0, 100 and 200; prefill"; empty for one step and phase."""
    steps, words = trace.steps, []
    if len(steps) > 1:
        some = steps if len(steps) <= STEPS_NAMED else [*steps[: STEPS_NAMED - 2], "…", steps[-1]]
        words.append(f"step {steps[-1]}, the last of {listed([str(step) for step in some])}")
    if len(trace.phases) > 1:
        words.append(trace.phases[0])
    return "; ".join(words)


# --- summary


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings of a trace; the table of layers of each view."""
    trace = load_trace(run)
    views = routing_views(trace)
    of = which_findings(trace)
    coverage = [*trace_coverage(run), *cut_documents(run), *skipped_steps(trace)]
    coverage += [f"Findings are of {of}."] if of else []
    glance = [
        Section("glance", "Routing at a glance", tables=[glance_table(view)], view=view.label)
        for view in views
    ]
    notices = [text_notice(trace)] if text_notice(trace) else []
    others = {view.label: (key_numbers(view), routing_findings(view)) for view in views[:-1]}
    return Summary(coverage, trace_findings(trace), key_numbers(views[-1]), glance, notices, views=others)


def key_numbers(view: View) -> list[KeyNumber]:
    """Largest value over layers with the chance level of that layer; entropy and confidence are means."""
    keys = []
    load = next(view_measures(view)).frame
    uneven = set(load.loc[load["beyond"].astype(bool), "layer"])
    for name, metric, unit in (
        ("Worst load CV", "cv", ""),
        ("Busiest expert", "max_over_mean", "× mean load"),
        ("Unused experts, worst layer", "unused", "of its experts"),
        ("I(expert; domain)", "domain_information", "nats"),
        ("I(expert; token)", "token_information", "nats"),
    ):
        if len(rows := values_of(view.tables, metric)):
            top = highest(specialised_layers(rows) if metric == "domain_information" else rows)
            chance, most = (
                float(top[end]) if np.isfinite(top[end]) else None for end in ("chance", "collapse")
            )
            if metric == "domain_information":
                most = float(np.log(view.tables["load"]["domain"].nunique()))
            word, where = metric_word(metric, top, uneven), f"layer {top['layer']}"
            word = word if word == "all used" else ", ".join(filter(None, [word, where]))
            keys.append(KeyNumber(name, float(top["value"]), chance, unit, word, most=most))
    if len(rows := values_of(view.tables, "routing_entropy")):
        mean, uniform = rows[["value", "chance"]].mean()
        word = "uniform" if mean > UNIFORM_SHARE * uniform else "selective"
        keys.insert(3, KeyNumber("Mean routing entropy", float(mean), float(uniform), "nats", word))
    return keys[:6]


def metric_word(metric: str, row: pd.Series, uneven: set[int]) -> str:
    """One word for a layer's value: of load by the map's test of every expert, else by its interval."""
    if metric in ("cv", "max_over_mean"):
        return "uneven" if row["layer"] in uneven else "balanced"
    if metric == "unused":
        return "all used" if row["value"] == 0 else "at chance" if row["value"] <= row["chance"] else "unused"
    chance = 0.0 if metric == "domain_information" else row["chance"]
    if pd.isna(row["low"]):
        return ""
    return "specialised" if row["low"] > chance else "at chance"


def text_notice(trace: TraceTables) -> str:
    """A privacy notice on what the report holds of the user's text; empty if nothing."""
    advice = "Share it only where you would share the text."
    words = trace.tables["vocabulary"]["token"].notna().any()
    if "tokens" in trace.run.tables and ("token_text" in trace.run.tables or words):
        return f"This report contains passages of the text, word for word. {advice}"
    if trace.tables["contexts"]["before"].notna().any():
        return f"This report contains short passages of the text (at most five per expert). {advice}"
    if words:
        return "This report contains single tokens of the text, which may include names or numbers."
    return ""


# --- sections

# name, heading, figures, introduction, why the first figure may be missing
SECTIONS: list[tuple[str, str, list[FigureSpec], str, str]] = [
    (
        "load",
        "Load balance",
        LOAD,
        "Tokens per expert. The chance level is balanced random routing of as many tokens; text lies above "
        "it even for a balanced router, because adjacent tokens are alike. At collapse every token goes to "
        "the same k experts.",
        "",
    ),
    (
        "decisions",
        "Routing decisions",
        DECISIONS,
        "How certain the router is per token. A uniform router has entropy log n; a collapsed one gives "
        "every token the same answer.",
        "this trace holds no logits",
    ),
    (
        "separation",
        "Co-activation and router similarity",
        SEPARATION,
        "Which experts are chosen together, and whether router rows point apart. The chance lift of a pair "
        "is below 1, because the experts of one token differ.",
        "each token chooses one expert, and no router rows are known",
    ),
    (
        "maps",
        "Maps of experts",
        MAPS,
        "Experts of a layer by router rows, co-activation and mean outputs; sized by load, coloured by "
        "domain. Axes have no unit, and layers cannot be compared. PCA preserves large distances, t-SNE "
        "and UMAP neighbourhoods; gaps between their groups mean little.",
        "",
    ),
    (
        "domains",
        "Domain specialisation",
        DOMAINS,
        "Whether experts specialise on kinds of text. The chance level comes from permuted document labels; "
        "it is not zero for few documents.",
        "the text was read as one domain; name several with --domain NAME=PATH",
    ),
    (
        "vocabulary",
        "Token specialisation",
        VOCABULARY,
        "Whether the token itself decides: held-out information. The chance level comes from tokens permuted "
        "within documents.",
        "this trace holds no token ids",
    ),
]
# section -> (table, its title, the column whose largest values come first)
FOLDED = {
    "load": ("load", "Load of every expert", "tokens"),
    "separation": ("coactivation", "Pairs of experts", "lift"),
    "domains": ("domains", "Domains of every expert", "affinity"),
}
GLANCE = [  # metric, title; its chance level follows
    ("cv", "CV"),
    ("max_over_mean", "max/mean"),
    ("unused", "unused"),
    ("routing_entropy", "entropy"),
    ("confidence", "confidence"),
    ("domain_information", "I(domain)"),
    ("token_information", "I(token)"),
]


def sections(run: Run, selection: Selection) -> list[Section]:
    """The sections of every view, then the figures over steps; `selection` narrows steps and phases."""
    trace = load_trace(run)
    parts = []
    for view in routing_views(trace):
        place = {"step": view.step, "phase": view.phase}
        if all(selection.values.get(key, value) == value for key, value in place.items()):
            parts += view_sections(view)
    return [*parts, *step_sections(trace)]


def view_sections(view: View) -> list[Section]:
    """Figures and tables by theme, the layers with their experts, and the text where tokens were saved."""
    parts = []
    if not view.last or not view.main:  # the summary has those of the last step
        findings = routing_findings(view)
        parts.append(Section("findings", "Findings of this view", findings=findings, view=view.label))
    for name, title, specs, text, missing in SECTIONS:
        usable = [spec for spec in specs if spec.can_draw(view.tables)]
        why = missing if view.main else "recorded for the other phase only"
        words = "" if specs[0] in usable else f" Not available: {why}."
        if name == "maps" and view.main:
            words = "".join(f" {sentence}" for sentence in missing_maps(view.tables))
        figures = [(spec, view.tables) for spec in usable]
        tables = folded_tables(name, view.tables) if usable else []
        parts.append(Section(name, title, text + words, figures, tables, view=view.label))
    parts += layer_sections(view)
    excerpt = read_excerpt(view)
    if excerpt is not None:
        widget = ("text", text_payload(excerpt, view))
        return [*parts, Section("text", "Text by expert", widget=widget, view=view.label, tab="text")]
    return parts


def folded_tables(section: str, tables: Tables) -> list[Payload]:
    """The section's table below its figures, largest values first, at most 2,000 rows."""
    if section not in FOLDED:
        return []
    name, title, largest = FOLDED[section]
    rows = tables.get(name, pd.DataFrame())
    if rows.empty:
        return []
    few = rows.sort_values(largest, ascending=False, kind="stable").head(ROWS_SHOWN)
    title += f" (the {ROWS_SHOWN:,} largest of {len(rows):,})" if len(few) < len(rows) else ""
    table = TRACE_TABLES[name]
    columns = [column for column in table.columns if column not in ("step", "layer_name", "phase")]
    return [table_payload(table, few, columns, title)]


def glance_table(view: View) -> Payload:
    """One row per layer: load, decisions, domains and tokens with chance levels, without empty columns."""
    heads, values = [("layer", "layer", "int")], []
    for metric, title in GLANCE:
        rows = values_of(view.tables, metric).set_index("layer")
        for column, entry, head in (("value", metric, title), ("chance", "routing_layers.chance", "chance")):
            if rows[column].notna().any():
                values.append(rows[column])
                heads.append((entry, head, "float"))
    cells = [[layer, *(column.get(layer, float("nan")) for column in values)] for layer in view.layers]
    return plain_table("routing_at_a_glance", "Routing at a glance", heads, cells)


def step_sections(trace: TraceTables) -> list[Section]:
    """Figures over steps in the main phase, of a trace with several steps."""
    if len(trace.steps) < 2:
        return []
    tables = trace.in_main_phase()
    table, rows = TRACE_TABLES["stability"], tables["stability"].head(ROWS_SHOWN)
    columns = [column for column in table.columns if column != "layer_name"]
    folded = [table_payload(table, rows, columns, "Every two steps in every layer")] if len(rows) else []
    figures = [(spec, tables) for spec in OVER_STEPS if spec.can_draw(tables)]
    text = "All steps of the trace. Consistency compares two checkpoints on the same tokens."
    return [Section("steps", "Routing over steps", text, figures, folded)]


def select(run: Run, selection: Selection) -> Tables:
    """The tables of one step and phase (by default the last step in the main phase), narrowed further.

    Figures over steps find the rows of all steps beside them.
    """
    trace = load_trace(run)
    step = selection.values.get("step", trace.steps[-1])
    phase = selection.values.get("phase", trace.phases[0])
    rest = Selection({key: value for key, value in selection.values.items() if key not in ("step", "phase")})
    tables = {name: rest.rows(select_rows(frame, step, phase)) for name, frame in trace.tables.items()}
    for name in ("load", "routing_layers"):
        rows = trace.tables[name]
        tables[f"{name} of all steps"] = rest.rows(rows[rows["phase"] == phase])
    return tables


def guide(run: Run) -> list[str]:
    return [
        "Every routing metric is shown with its chance level (balanced random routing, a uniform router, or "
        "permuted labels and tokens) and its value at collapse: every token chooses the same k experts.",
        "Intervals are 95 % jackknife intervals over documents; they need at least 20 documents. Those of "
        "CV, Gini and load entropy belong to a value corrected for the bias of few documents, which stands "
        "beside the plain one.",
    ]


# --- coverage


def trace_coverage(run: Run) -> list[str]:
    """What was traced, in one line; one line per step where they differ."""
    lines = [coverage_line(item) for item in run.info["coverage"]]
    if len(set(lines)) == 1:
        return [lines[0] + (f" in each of {len(lines)} steps" if len(lines) > 1 else "")]
    return [f"{line} (step {setup['step']})" for line, setup in zip(lines, run.info["setup"], strict=True)]


def coverage_line(item: dict[str, Any]) -> str:
    experts, k = ("/".join(map(str, item[key])) for key in ("experts_per_layer", "k"))
    tokens, documents = sum(item["tokens"].values()), sum(item["domains"].values())
    by_domain = "; ".join(
        f"{name} {counted(item['domains'][name], 'document')}, {counted(count, 'token')}"
        for name, count in item["tokens"].items()
    )
    chosen = f"up to {k}, {number(item['mean_k'])} on average" if "mean_k" in item else k
    return (
        f"{item['model_type']}: {item['layers']} MoE layers, {experts} experts, {chosen} per token; "
        f"{counted(tokens, 'token')} in {counted(documents, 'document')}"
    ) + (f" ({by_domain})" if len(item["tokens"]) > 1 else "")


def cut_documents(run: Run) -> list[str]:
    """How many tokens of a document were read at most, where the text is longer than max_tokens."""
    lines = []
    for longest in (item["longest"] for item in run.info["coverage"] if "longest" in item):
        named = [f"{count:,} ({name})" for name, count in longest.items()]
        tokens = listed(named) if len(named) > 1 else f"{max(longest.values()):,}"
        lines.append(
            f"Cut by --max-tokens {run.info['arguments']['max_tokens']:,}: at most the first {tokens} tokens "
            "of each document were read, and no further documents."
        )
    return list(dict.fromkeys(lines))
