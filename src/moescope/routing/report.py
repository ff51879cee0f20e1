"""A trace's part of the report: findings, sections of figures and tables, and its command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    RANDOM,
    UNIFORM,
    FigureSpec,
    Tables,
    between,
    can_draw,
    counted,
    listed,
    number,
    values_of,
)
from moescope.reporting.pack import plain, table_payload
from moescope.routing.figures_decisions import DECISIONS, PERMUTED_TOKENS, VOCABULARY, references, span
from moescope.routing.figures_experts import (
    DOMAINS,
    MAPS,
    SEPARATION,
    drawable_maps,
    layer_pairs,
    strongest_pair,
)
from moescope.routing.figures_load import LOAD, usages
from moescope.routing.figures_steps import OVER_STEPS, rows_of
from moescope.routing.report_views import (
    TraceTables,
    View,
    layer_payloads,
    load_trace,
    read_excerpt,
    routing_views,
    text_payload,
)
from moescope.run import Run
from moescope.tables import TABLES
from moescope.weights.report_layer import drawn

Keep = Callable[[str, Any], str]

STEPS_NAMED = 6
ROWS_SHOWN = 2000  # of a folded table; the run folder has all

# --- findings


def with_interval(row: pd.Series) -> str:
    """ "0.31 [0.28, 0.34]", or the value alone."""
    ends = f" [{number(row['low'])}, {number(row['high'])}]" if pd.notna(row["low"]) else ""
    return f"{number(row['value'])}{ends}"


def highest(rows: pd.DataFrame) -> pd.Series:
    return rows.loc[rows["value"].idxmax()]


def routing_findings(view: View) -> list[str]:
    """The view's findings, most important first; what a trace does not hold is skipped."""
    tables = view.tables
    findings = load_findings(view)
    if len(rows := values_of(tables, "routing_entropy")):
        line = f"Routing entropy (nats) {span(rows)}; {references(rows, UNIFORM)}."
        if len(top := values_of(tables, "confidence")):
            line += f" Mean top-1 probability: {between(top['value'])} ({UNIFORM}: {between(top['chance'])})."
        findings.append(line)
    findings += pair_findings(view)
    if len(rows := values_of(tables, "domain_information")):
        top = highest(rows)
        findings.append(
            f"Domain specialisation: highest in layer {top['layer']}, I(expert; domain) = "
            f"{with_interval(top)} nats (permuted labels: 0, at most "
            f"{number(np.log(tables['load']['domain'].nunique()))})."
        )
    if len(rows := values_of(tables, "token_information")):
        top = highest(rows)
        findings.append(
            f"Token specialisation: highest in layer {top['layer']}, I(expert; token) = "
            f"{number(top['value'])} nats ({PERMUTED_TOKENS}: {number(top['chance'])})."
        )
    if len(rows := values_of(tables, "sequential_consistency")):
        top = highest(rows)
        findings.append(
            f"Adjacent tokens share their top expert most often in layer {top['layer']}: "
            f"{with_interval(top)}; {references(rows[rows['layer'] == top['layer']], RANDOM)}."
        )
    return findings


def load_findings(view: View) -> list[str]:
    tables, findings = view.tables, []
    if len(rows := values_of(tables, "cv")):
        top = highest(rows)
        findings.append(
            f"Load balance: worst in layer {top['layer']}, CV {with_interval(top)}; "
            f"{references(rows[rows['layer'] == top['layer']], RANDOM)}. "
            f"All layers: {between(rows['value'])}."
        )
    if loads := [usage for usage in usages(tables) if usage.even]:
        busy = max(loads, key=lambda usage: float(usage.times.max()))
        chance = values_of(tables, "max_over_mean").set_index("layer")["chance"].get(busy.layer)
        findings.append(
            f"The busiest expert is {busy.experts[busy.counts.argmax()]} of layer {busy.layer}, with "
            f"{number(busy.times.max())} times an even share"
            + ("." if chance is None else f" ({RANDOM}: {number(chance)}).")
        )
        unused = {usage.layer: int((usage.counts == 0).sum()) for usage in loads}
        chance = f"{RANDOM}: {number(100 * values_of(tables, 'unused')['chance'].max())} %"
        total = sum(len(usage.counts) for usage in loads)
        worst = max(unused, key=lambda layer: unused[layer])
        findings.append(
            f"{counted(sum(unused.values()), 'expert')} of {total:,} got no token, most in layer {worst} "
            f"({unused[worst]}; {chance})."
            if any(unused.values())
            else f"All {total:,} experts got tokens (unused at {chance})."
        )
    if len(rows := values_of(tables, "dropped")) and rows["value"].max() > 0:
        top = highest(rows)
        findings.append(
            f"Expert capacity was exceeded: in layer {top['layer']} {number(100 * top['value'])} % of the "
            "expert slots are empty (0 without capacity)."
        )
    return findings


def pair_findings(view: View) -> list[str]:
    if not len(view.tables.get("coactivation", ())) or not len(values_of(view.tables, "expert_overlap")):
        return []
    layers = view.tables["coactivation"]["layer"].unique()
    strongest = {layer: pair for layer in layers if (pair := strongest_pair(layer_pairs(view.tables, layer)))}
    if not strongest:
        return []
    layer = max(strongest, key=lambda layer: strongest[layer].over)
    top = strongest[layer]
    return [
        f"Most co-activated: experts {top.a} and {top.b} of layer {layer}, {number(top.over)} times chance "
        f"(the largest of a layer's pairs reaches about {number(top.at_chance)} at chance)."
    ]


def step_findings(trace: TraceTables) -> list[str]:
    """Changes over the steps: load balance and consistency of routing; empty for one step."""
    stability, steps = trace.tables["stability"], trace.steps
    if len(steps) < 2:
        return []
    means = rows_of(trace.in_main_phase(), "cv").groupby("step")[["value", "chance"]].mean()
    findings = [
        f"Load balance from step {steps[0]} to step {steps[-1]}: mean CV {number(means['value'].iloc[0])} to "
        f"{number(means['value'].iloc[-1])} ({RANDOM}: {number(means['chance'].mean())})."
    ]
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
    findings.append(f"{line}.")
    if noisy := int(first["tau_is_noise"].astype(bool).sum()):
        findings.append(
            f"In {counted(noisy, 'layer')} loads are so even that the order of experts by usage is noise."
        )
    return findings


def between_steps(stability: pd.DataFrame, a: int, b: int) -> pd.DataFrame:
    return stability[(stability["step_a"] == a) & (stability["step_b"] == b)]


def consistency(rows: pd.DataFrame) -> str:
    share, beyond = (rows[name].mean() for name in ("routing_consistency", "routing_consistency_corrected"))
    return f"{number(100 * share)} % of the experts, {number(beyond)} beyond chance"


def trace_findings(trace: TraceTables) -> list[str]:
    """Changes over the steps, then the findings of the last step in the main phase."""
    views = [view for view in routing_views([trace], {trace.run.path: ""}) if view.main]
    return [*step_findings(trace), *routing_findings(max(views, key=lambda view: view.step))]


def which_findings(trace: TraceTables) -> str:
    """ "step 200, the last of 0, 100 and 200; prefill"; empty for one step and phase."""
    steps, words = trace.steps, []
    if len(steps) > 1:
        some = steps if len(steps) <= STEPS_NAMED else [*steps[: STEPS_NAMED - 2], "…", steps[-1]]
        words.append(f"step {steps[-1]}, the last of {listed([str(step) for step in some])}")
    if len(trace.phases) > 1:
        words.append(trace.phases[0])
    return "; ".join(words)


def trace_summary(run: Run) -> dict[str, Any]:
    """The trace's summary for the terminal and --json, as plain data."""
    trace = load_trace(run)
    of = which_findings(trace)
    return {
        "run": str(run.path),
        "verb": run.info["verb"],
        "status": run.info["status"],
        "checkpoints": run.info["checkpoints"],
        "coverage": trace_coverage(run),
        "findings": [*([f"Findings of {of}:"] if of else []), *trace_findings(trace)],
        "warnings": run.info.get("warnings", []),
        "timings": run.info["timings"],
        "tables": run.tables,
    }


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
        "domain. Axes have no unit, and layers cannot be compared. PCA preserves large distances, UMAP and "
        "t-SNE neighbourhoods; gaps between their groups mean little.",
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
GLANCE = [  # metric, title, whether its chance level follows
    ("cv", "cv", True),
    ("max_over_mean", "max/mean", True),
    ("unused", "unused", True),
    ("routing_entropy", "entropy", True),
    ("confidence", "confidence", True),
    ("domain_information", "I(domain)", False),
    ("token_information", "I(token)", True),
]


def view_entry(view: View, index: int, keep: Keep) -> dict[str, Any]:
    """One view: its sections of figures, its layers, and its text where tokens were saved."""
    sections = {}
    for name, _, specs, _, missing in SECTIONS:
        usable = [spec for spec in specs if can_draw(spec, view.tables)]
        why = missing if view.main else "recorded for the other phase only"
        words = "" if specs[0] in usable else f"Not available: {why}."
        if name == "maps" and view.main:
            usable, sentences = drawable_maps(view.tables, view.last)
            words = " ".join(sentences)
        sections[name] = {
            "figures": [
                keep(f"v{index}-{spec.name}", drawn(spec, view.tables, view.label)) for spec in usable
            ],
            "missing": words,
            "tables": folded_tables(name, view.tables, f"v{index}", keep) if usable else [],
        }
    excerpt = read_excerpt(view)
    why = "trace again with --save-tokens" if view.main else "recorded for the other phase only"
    return {
        "label": view.label,
        "findings": routing_findings(view),
        "glance": keep(f"v{index}-glance", glance_table(view, index)),
        "sections": sections,
        "layers": [
            {**entry, "payload": keep(f"v{index}-l{entry['layer']}", {"view": index, **payload})}
            for entry, payload in layer_payloads(view)
        ],
        "text": keep(f"v{index}-text", text_payload(excerpt, view)) if excerpt is not None else "",
        "text_missing": "" if excerpt is not None else f"No single tokens: {why}.",
        "excerpt": excerpt,
    }


def folded_tables(section: str, tables: Tables, prefix: str, keep: Keep) -> list[str]:
    """The section's table below its figures, largest values first, at most 2,000 rows."""
    if section not in FOLDED:
        return []
    name, title, largest = FOLDED[section]
    rows = tables.get(name, pd.DataFrame())
    if rows.empty:
        return []
    few = rows.sort_values(largest, ascending=False, kind="stable").head(ROWS_SHOWN)
    title += f" (the {ROWS_SHOWN:,} largest of {len(rows):,})" if len(few) < len(rows) else ""
    columns = [column for column in TABLES[name].columns if column not in ("step", "layer_name", "phase")]
    return [keep(f"{prefix}-t-{name}", table_payload(name, few, columns, title))]


def glance_table(view: View, index: int) -> dict[str, Any]:
    """One row per layer: load, decisions, domains and tokens with chance levels, without empty columns."""
    columns = [{"name": "layer", "title": "layer", "kind": "int"}]
    values: list[pd.Series] = []
    for metric, title, with_chance in GLANCE:
        rows = values_of(view.tables, metric).set_index("layer")
        heads = [("value", metric, title), *([("chance", "chance", "chance")] if with_chance else [])]
        for column, name, head in heads:
            if rows[column].notna().any():
                values.append(rows[column])
                columns.append({"name": name, "title": head, "kind": "float"})
    rows = [[layer, *(column.get(layer, float("nan")) for column in values)] for layer in view.layers]
    return {
        "name": "routing_at_a_glance",
        "title": "Routing at a glance",
        "columns": columns,
        "rows": plain(rows),
        "links": f"v{index}-layer-",
    }


def step_sections(traces: list[TraceTables], names: dict[Any, str], keep: Keep) -> list[dict[str, Any]]:
    """Figures over steps of every trace with several steps, in its main phase."""
    sections = []
    for index, trace in enumerate(trace for trace in traces if len(trace.steps) > 1):
        tables = trace.in_main_phase()
        label = f"{names[trace.run.path]} · {trace.phases[0]}"
        specs = [spec for spec in OVER_STEPS if can_draw(spec, tables)]
        figures = [keep(f"o{index}-{spec.name}", drawn(spec, tables, label)) for spec in specs]
        stability = tables["stability"].head(ROWS_SHOWN)
        columns = [column for column in TABLES["stability"].columns if column != "layer_name"]
        payload = table_payload("stability", stability, columns, "Every two steps in every layer")
        folded = [keep(f"o{index}-t-stability", payload)] if len(stability) else []
        sections.append({"label": label if len(traces) > 1 else "", "figures": figures, "tables": folded})
    return sections


def text_notice(traces: list[TraceTables], excerpts: list[Any]) -> str:
    """A privacy notice on what the report holds of the user's text; empty if nothing."""
    advice = "Share it only where you would share the text."
    if any(excerpt is not None for excerpt in excerpts):
        return f"This report contains passages of the text, word for word. {advice}"
    if any(trace.tables["contexts"]["before"].notna().any() for trace in traces):
        return f"This report contains short passages of the text (at most five per expert). {advice}"
    if any(trace.tables["vocabulary"]["token"].notna().any() for trace in traces):
        return "This report contains single tokens of the text, which may include names or numbers."
    return ""


# --- coverage and command


def trace_coverage(run: Run) -> list[str]:
    """What was traced, in one line; one line per step where they differ."""
    lines = [coverage_line(item) for item in run.info["coverage"]]
    if len(set(lines)) == 1:
        return [lines[0] + (f" in each of {len(lines)} steps" if len(lines) > 1 else "")]
    return [f"{line} (step {setup['step']})" for line, setup in zip(lines, run.info["setup"], strict=True)]


def coverage_line(item: dict[str, Any]) -> str:
    experts, k = ("/".join(map(str, item[key])) for key in ("experts_per_layer", "k"))
    tokens, documents = sum(item["tokens"].values()), sum(item["domains"].values())
    by_domain = ", ".join(f"{name} {count:,}" for name, count in item["tokens"].items())
    chosen = f"up to {k}, {number(item['mean_k'])} on average" if "mean_k" in item else k
    return (
        f"{item['model_type']}: {item['layers']} MoE layers, {experts} experts, {chosen} per token; "
        f"{tokens:,} tokens in {documents:,} documents"
    ) + (f" ({by_domain})" if len(item["tokens"]) > 1 else "")


def trace_command(trace: TraceTables) -> str:
    """The command that made the run, from run.json."""
    info = trace.run.info
    arguments = info["arguments"]
    models = [
        item["path"] + (f"@{item['revision']}" if item.get("revision") else "")
        for item in info["checkpoints"]
    ]
    command = ["moescope", "trace", *models]
    if "import" in arguments:
        options = {
            "recorded": arguments["import"][0],
            **{key: arguments[key] for key in ("format", "experts")},
        }
        return shlex.join(
            [*command, *(word for key, value in options.items() for word in (f"--{key}", str(value)))]
        )
    without_words = trace.tables["vocabulary"]["token"].isna().all()
    for domain, files in arguments["text"]:
        for path in paths_of(files):
            if len(arguments["text"]) > 1 or domain != "text":
                command += ["--domain", f"{domain}={path}"]
            else:
                command += ["--token-ids" if without_words else "--text", path]
    defaults = {
        "max_tokens": None,
        "phase": "prefill",
        "save_tokens": False,
        "dtype": "auto",
        "batch_size": 8,
        "chat_template": False,
        "seed": 0,
    }
    for word, default in defaults.items():
        if arguments[word] != default:
            flag = f"--{word.replace('_', '-')}"
            command += [flag] if arguments[word] is True else [flag, str(arguments[word])]
    return shlex.join(command)


def paths_of(files: list[Any]) -> list[str]:
    """The text's paths as arguments: files, - for standard input, the common folder of many files."""
    places = [file[0] for file in files if isinstance(file, list)]
    piped = ["-"] if len(places) < len(files) else []
    hub = [path for path in places if path.startswith("hf://")]
    paths = [path for path in places if path not in hub]
    return piped + ([os.path.commonpath(paths)] if len(paths) > 8 else paths) + hub
