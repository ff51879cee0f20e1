"""Report on traces: key numbers, findings, sections, the map and the expert pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from moescope.plotting.marks import flags
from moescope.plotting.style import capital, counted, listed, named_layers, number, values_of
from moescope.reporting.findings import Number, Said, key_numbers, say_all, verdict_of
from moescope.reporting.pack import plain_table
from moescope.reporting.views import drawable, shown_table
from moescope.routing.figures import DECISION, LOAD, MAPS, RIBBON, SEPARATION, SPECIALISED, STEPS
from moescope.routing.report_views import (
    COACTIVATED,
    CONTEXTS,
    CONTEXTS_OF_MANY,
    LARGE,
    TraceTables,
    View,
    contexts_by_expert,
    layer_sections,
    load_trace,
    missing_interval,
    routing_views,
    rows_by,
    select_rows,
    skipped_steps,
    text_payload,
    tokens_by_expert,
)
from moescope.routing.tables import TABLES
from moescope.run import Run
from moescope.verb import (
    Drawable,
    Finding,
    LayerCards,
    Measure,
    Payload,
    Section,
    Selection,
    Strip,
    Summary,
    Tables,
)

STEPS_NAMED = 6
ROWS_SHOWN = 2000  # of a folded table; the run folder has all
ENDS = "step_a == step_a.min() and step_b == step_b.max()"
LAST_TWO = "step_a == step_a.max() and step_a > step_a.min()"
METRICS, STABILITY = "routing_layers", "stability"
# fmt: off
NUMBERS = [
    Number(METRICS, "cv", name="Worst load CV"),
    Number(METRICS, "unused", name="Unused experts, worst layer"),
    Number(METRICS, "routing_entropy", pick="smallest", name="Lowest routing entropy"),
    Number(METRICS, "domain_information", name="I(expert; domain)"),
    Number(METRICS, "token_information", name="I(expert; token)"),
]
VERDICT = [
    Said(METRICS, "cv", only="beyond", text="Load is {degree}, worst in {place}.", otherwise="Load is as even as random routing.", figure="balance_by_layer"),
    Said(METRICS, "domain_information", only="beyond", pick="largest", text="Specialisation on domains is {degree}, most in {place}.", otherwise="Experts do not specialise on domains beyond permuted labels.", figure="specialisation_by_layer"),
]
FINDINGS = [
    Said(METRICS, "cv", text="Load balance: CV {span}, worst in {place}{interval} ({chance}).", figure="balance_by_layer"),
    Said("domains", "affinity", where="affinity_p == affinity_p and affinity >= 1", only="claimed", pick="largest", group="domain", text="Domain experts (use relative to the mean domain; chance 1): {groups}; {count} of {total} uses above it are beyond chance.", otherwise="Domain experts: no expert prefers a domain beyond chance (0 of {total} uses above the mean domain's, corrected over all; uncorrected, one of 20 is).", tab="overview", colour="domain_affinity"),
    Said("load_totals", "times_even", where="times_even_noise != times_even_noise", pick="largest", text="Busiest expert: {place}, {value} times an even share ({chance}; without documents not judged).", tab="overview", colour="load"),
    Said("load_totals", "times_even", where="times_even_noise == times_even_noise", only="claimed", pick="largest", text="Load per expert: {count} of {total} differ from an even share beyond chance, most {place}, {value} times it ({chance}).", otherwise="Load per expert: none of {total} differs from an even share beyond chance ({span} times it).", tab="overview", colour="load"),
    Said("load_totals", "tokens", only="unused", text="Unused experts: {count} of {total} got no token: {rows}.", otherwise="All {total} experts got tokens.", tab="overview", colour="load"),
    Said(METRICS, "dropped", where="value > 0", text="Expert capacity was exceeded: in {place} a share of {value} of the expert slots is empty ({chance}).", figure="balance_by_layer"),
    Said(METRICS, "routing_entropy", pick="smallest", text="Routing entropy: {span} nats, lowest in {place} ({chance}).", figure="decisions_by_layer"),
    Said(METRICS, "confidence", pick="largest", text="Mean top-1 probability: {span}, highest in {place} ({chance}).", figure="decisions_by_layer"),
    Said("coactivation", "over", where="expert_a < expert_b", only="claimed", pick="largest", text="Most co-activated: {place}, {value} times chance (most co-activated of all pairs by chance: about {largest_by_chance}); {count} of {total} pairs are beyond it.", otherwise="Co-activation: none of {total} pairs is beyond chance (at most {most} times chance).", figure="coactivation_heatmap"),
    Said(METRICS, "domain_information", only="beyond", pick="largest", text="Domain specialisation: {size}highest in {place}, I(expert; domain) = {value}{interval} nats ({chance}).", otherwise="Domain specialisation: no layer is distinguishable from chance, I(expert; domain) = {span} nats ({chance}).", figure="specialisation_by_layer"),
    Said(METRICS, "token_information", text="Token specialisation: {size}highest in {place}, I(expert; token) = {value} nats ({chance}).", figure="specialisation_by_layer"),
    Said(METRICS, "sequential_consistency", only="beyond", pick="largest", text="Adjacent tokens share their top expert most often in {place}: {value}{interval} ({chance}).", otherwise="Adjacent tokens: no layer gives them the same top expert more often than chance ({span}; {chance}).", figure="sequence_by_layer"),
]
OVER_STEPS = [
    Said(METRICS, "cv", pick="last", text="Load balance over steps: mean CV {first} to {last} ({chance}).", figure="balance_by_step"),
    Said(STABILITY, "routing_consistency_corrected", where=ENDS, pick="smallest", text="Routing consistency of steps {step_a} and {step_b}: {span} beyond chance, lowest in {place} ({chance}).", figure="consistency_matrix"),
    Said(STABILITY, "routing_consistency_corrected", where=LAST_TWO, pick="smallest", text="Routing consistency of the last two steps, {step_a} and {step_b}: {span} beyond chance, lowest in {place} ({chance}).", figure="consistency_matrix"),
    Said(STABILITY, "kendall_tau", where=ENDS, only="tau_is_noise", text="In {count} of {total} layers loads are so even that the order of experts by usage is noise.", figure="consistency_matrix"),
]
# fmt: on


def few_tokens(view: View) -> list[str]:
    """Which layers have too few tokens to be judged."""
    rows = values_of(view.tables, "cv")
    few = rows[flags(rows["few"])] if len(rows) else rows
    if few.empty:
        return []
    most = counted(int(few["tokens"].max()), "token")
    return [
        Finding(f"Too few tokens to judge: {named_layers(few['layer'])}, with at most {most}.", tab="routing")
    ]


def routing_findings(view: View) -> list[str]:
    """The view's findings, most important first; what a trace does not hold is skipped."""
    findings = say_all(FINDINGS, view.tables, TABLES)
    return [*findings[:1], *few_tokens(view), *findings[1:]]


def step_findings(trace: TraceTables) -> list[str]:
    """Changes over the steps: load balance and consistency of routing; empty for one step."""
    return say_all(OVER_STEPS, trace.in_main_phase(), TABLES) if len(trace.steps) > 1 else []


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
    last = view_summary(views[-1])
    return replace(
        last,
        coverage=coverage,
        findings=[*step_findings(trace), *last.findings],
        sections=glance,
        notices=notices,
        views={view.label: view_summary(view) for view in views[:-1]},
    )


def view_summary(view: View) -> Summary:
    """Verdict, key numbers and findings of a view, and those of each domain of its text."""

    def of(tables: Tables, findings: list[str], domain: str = "", **more: Any) -> Summary:
        said = verdict_of(VERDICT, tables, TABLES)
        verdict = Finding(f"{domain}: {said[:1].lower()}{said[1:]}", **said.place) if domain else said
        return Summary([], findings, key_numbers(NUMBERS, tables, TABLES), verdict=verdict, **more)

    parts = {domain: of_domain(view.tables, domain) for domain in domains_of(view)}
    domains = {
        domain: of(tables, say_all(FINDINGS, tables, TABLES), domain) for domain, tables in parts.items()
    }
    figures = drawable([spec for spec in SPECIALISED if spec.name == "specialisation_map"], view.tables)
    lead = [Section("lead", "", figures=figures)] if figures else []
    return of(view.tables, routing_findings(view), view=view.label, domains=domains, lead=lead)


def domains_of(view: View) -> list[str]:
    rows = view.tables.get("domains", pd.DataFrame())
    return sorted(map(str, rows["domain"].unique())) if len(rows) else []


def of_domain(tables: Tables, domain: str) -> Tables:
    """Return what one domain's text shows, as if no other had been read."""
    metrics, affinity = tables[METRICS], tables["domains"]
    return {
        METRICS: metrics[metrics["domain"] == domain].assign(domain=""),
        "domains": affinity[affinity["domain"] == domain],
    }


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

# anchor, heading, figures, introduction, why the first figure may be missing
SECTIONS: list[tuple[str, str, Sequence[Drawable], str, str]] = [
    (
        "load",
        "Load balance",
        LOAD,
        "Tokens per expert. The chance level is balanced random routing of as many tokens; text lies above "
        "it even for a balanced router, because adjacent tokens are alike. At collapse every token goes to "
        "the same k experts.",
        "under five tokens per expert are expected; trace a longer text",
    ),
    (
        "decisions",
        "Routing decisions",
        [*DECISION, *RIBBON],
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
    ("maps", "Maps of experts", MAPS, "Experts of a layer by router rows, co-activation and outputs.", ""),
    (
        "domains",
        "Specialisation",
        SPECIALISED,
        "Whether experts specialise on kinds of text or on single tokens. Chance levels come from permuted "
        "document labels and from tokens permuted within documents; they are not zero for few documents.",
        "the text was read as one domain; name several with --domain NAME=PATH",
    ),
]
# eight figures lead; the others stand under "More"
LEAD = {
    *("load_map", "lorenz", "balance_by_layer", "routing_ribbon", "coactivation_heatmap"),
    *("specialisation_map", "affinity_heatmap", "specialisation_by_layer"),
}
# section -> (table, its title, the column whose largest values come first)
FOLDED = {
    "load": ("load", "Load of every expert", "tokens"),
    "separation": ("coactivation", "Pairs of experts", "lift"),
    "domains": ("domains", "Domains of every expert", "affinity"),
}
GLANCE = (  # metrics; the chance level follows each
    *("cv", "max_over_mean", "unused", "routing_entropy"),
    *("confidence", "domain_information", "token_information"),
)
MISSING_MAPS = {
    "router": "No map of router rows: the router has no rows, or the trace is recorded.",
    "coactivation": "No map of co-activation: each token chooses one expert.",
    "outputs": "No map of mean outputs: a model of the lab and a recorded trace hold none.",
}


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
    more = []
    for name, title, specs, text, missing in SECTIONS:
        figures = drawable([spec for spec in specs if spec.name in LEAD], view.tables)
        rest = drawable([spec for spec in specs if spec.name not in LEAD], view.tables)
        why = missing if view.main else "recorded for the other phase only"
        words = "" if specs[0].can_draw(view.tables) else f" Not available: {why}."
        if name == "maps" and view.main:
            words = f" {' '.join(missing_maps(view.tables))}"
        if name == "domains" and view.main and values_of(view.tables, "token_information").empty:
            words += " No token specialisation: this trace holds no token ids."
        tables = folded_tables(name, view.tables) if figures or rest else []
        if rest or (tables and not figures):
            more.append(Section(f"more-{name}", title, "" if figures else text + words, rest, tables))
        if figures or not rest:
            shown = [] if rest else tables
            parts.append(Section(name, title, text + words, figures, shown, view=view.label))
    if more:
        count = counted(sum(len(section.figures) for section in more), "figure")
        names = ", ".join(section.title.lower() for section in more)
        line = f"{count}: {names}"
        parts.append(Section("more", "More", sections=more, folded=True, line=line, view=view.label))
    parts += layer_sections(view)
    if (payload := text_payload(view)) is not None:
        widget = ("text", payload)
        return [*parts, Section("text", "Text by expert", widget=widget, view=view.label, tab="text")]
    return parts


def missing_maps(tables: Tables) -> list[str]:
    """Sentences on the maps that a trace does not hold, and how to make them."""
    maps = tables["maps"]
    missing = [words for of, words in MISSING_MAPS.items() if of not in set(maps["of"])]
    if "umap" not in set(maps["method"]):
        missing.append("t-SNE and UMAP on request, drawn from 30 experts on: trace --maps umap.")
    return missing


def folded_tables(section: str, tables: Tables) -> list[Payload]:
    """The section's table below its figures, largest values first, at most 2,000 rows."""
    name, title, largest = FOLDED.get(section, ("", "", ""))
    rows = tables.get(name, pd.DataFrame())
    if rows.empty:
        return []
    few = rows.sort_values(largest, ascending=False, kind="stable").head(ROWS_SHOWN)
    title += f" (the {ROWS_SHOWN:,} largest of {len(rows):,})" if len(few) < len(rows) else ""
    columns = [column for column in rows if column not in ("step", "layer_name", "phase")]
    return [shown_table(TABLES[name], few, columns, title)]


def glance_table(view: View) -> Payload:
    """One row per layer: load, decisions, domains and tokens with chance levels, without empty columns."""
    heads, values = [("layer", "layer", "int")], []
    for metric in GLANCE:
        rows = values_of(view.tables, metric).set_index("layer")
        title = TABLES[METRICS].label(metric)
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
    table, rows = TABLES[STABILITY], tables[STABILITY].head(ROWS_SHOWN)
    columns = [column for column in table.columns if column != "layer_name"]
    folded = [shown_table(table, rows, columns, "Every two steps in every layer")] if len(rows) else []
    text = "All steps of the trace. Consistency compares two checkpoints on the same tokens."
    return [Section("steps", "Routing over steps", text, drawable(STEPS, tables), folded)]


def select(run: Run, selection: Selection) -> Tables:
    """The tables of one step and phase (by default the last step in the main phase), narrowed further.

    Figures over steps find the rows of all steps beside them.
    """
    trace = load_trace(run)
    step = selection.values.get("step", trace.steps[-1])
    phase = selection.values.get("phase", trace.phases[0])
    rest = Selection({key: value for key, value in selection.values.items() if key not in ("step", "phase")})
    tables = {name: rest.rows(select_rows(frame, step, phase)) for name, frame in trace.tables.items()}
    for name in ("load_totals", METRICS):
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


# --- the map

STRIPS = (  # metric, title, measure that it is about
    ("cv", "load CV", "load"),
    ("routing_entropy", "routing entropy", ""),
    ("domain_information", "I(domain)", "domain_affinity"),
)


def measures(run: Run) -> list[Measure]:
    """Load first, then gate weight, affinity per domain and the strongest co-activation, for every view."""
    return [measure for view in routing_views(load_trace(run)) for measure in view_measures(view)]


def view_measures(view: View) -> Iterator[Measure]:
    def measure(
        name: str, title: str, table: str, column: str, rows: pd.DataFrame, caption: str, domain: str = ""
    ) -> Measure:
        frame = rows.rename(columns={column: "value"}).assign(chance=1.0)
        known = ("layer", "expert", "value", "chance", "low", "high", "noise", "beyond", "cluster")
        unit = TABLES[table].quantity(column).unit
        columns = [name for name in known if name in frame]
        return Measure(name, title, frame[columns], unit, caption, 1.0, True, (0.25, 4.0), view.label, domain)

    load = view.tables["load_totals"]
    if len(load):
        rows = load.rename(columns={"times_even_noise": "noise", "claimed": "beyond"})
        if len(pairs := view.tables.get("coactivation", ())):
            places = pairs.drop_duplicates(["layer", "expert_a"]).set_index(["layer", "expert_a"])["place_a"]
            rows = rows.join(places.rename("cluster"), on=["layer", "expert"])
        caption = (
            "Tokens per expert, as multiples of an even share. Beyond chance: unlike an even share, beyond "
            "the noise over documents, Holm-corrected over all experts."
        )
        yield measure("load", "Load per expert", "load_totals", "times_even", rows, caption)
    if load["gate_times_even"].notna().any():
        caption = "Sum of an expert's gate weights, as a multiple of the layer's mean."
        yield measure(
            "gate_weight", "Share of routing weight", "load_totals", "gate_times_even", load, caption
        )
    domains = view.tables.get("domains", pd.DataFrame())
    for domain, rows in domains.groupby("domain") if len(domains) else ():
        rows = rows.rename(columns={"claimed": "beyond", "affinity_noise": "noise"})
        words = (
            "Beyond chance: corrected over all experts, layers and domains, with permuted document labels."
        )
        if rows["beyond"].isna().all():
            words = "Not judged: one document per domain."
        caption = f"How much more often {domain} uses an expert than the mean of all domains. {words}"
        title = f"Domain affinity: {domain}"
        yield measure("domain_affinity", title, "domains", "affinity", rows, caption, str(domain))
    if len(pairs := common_pairs(view.tables.get("coactivation"))):
        top = pairs.groupby(["layer", "expert_a"])["over"].max().rename_axis(["layer", "expert"])
        caption = "The most frequent partner of each expert, as a multiple of its expected count."
        yield measure(
            "coactivation", "Strongest co-activation", "coactivation", "over", top.reset_index(), caption
        )


def common_pairs(pairs: pd.DataFrame | None) -> pd.DataFrame:
    """The pairs of experts with enough expected tokens."""
    if pairs is None or pairs.empty:
        return pd.DataFrame()
    return pairs[~flags(pairs["few"]) & pairs["over"].notna()]


def strips(run: Run) -> list[Strip]:
    found = []
    for view in routing_views(load_trace(run)):
        for metric, title, measure in STRIPS:
            if len(rows := values_of(view.tables, metric)):
                ends = rows[["largest", "collapse", "chance"]].max()
                most = ends["largest"] if ends["largest"] > 0 else ends[["collapse", "chance"]].max()
                frame = rows[["layer", "value", "chance"]]
                found.append(Strip(metric, title, frame, view.label, measure, float(most)))
    return found


# --- expert pages


def experts(run: Run) -> Iterator[LayerCards]:
    """Domains, co-activated experts, tokens and contexts of every expert, layer by layer."""
    for view in routing_views(load_trace(run)):
        many = len(view.tables["load"][["layer", "expert"]].drop_duplicates()) >= LARGE
        grouped = {
            name: dict(tuple(frame.groupby("layer")))
            for name, frame in view.tables.items()
            if name in ("domains", "coactivation", "vocabulary", "contexts", "load")
        }
        for layer in view.layers:
            rows = {name: groups[layer] for name, groups in grouped.items() if layer in groups}
            cards = layer_cards(rows, CONTEXTS_OF_MANY if many else CONTEXTS, view)
            yield LayerCards(layer, cards, view.label)


def layer_cards(rows: dict[str, pd.DataFrame], most: int, view: View) -> dict[int, list[Payload]]:
    blocks: dict[int, list[Payload]] = {}

    def add(expert: int, kind: str, title: str, content: list[Any], **more: object) -> None:
        if content:
            blocks.setdefault(int(expert), []).append({"kind": kind, "title": title, "rows": content, **more})

    domains = rows.get("domains")
    if domains is not None and domains["domain"].nunique() > 1:
        columns = ["domain", "affinity", "low", "high"]
        ordered = domains.sort_values("affinity", ascending=False)
        for expert, cells in rows_by(ordered, ["expert"], columns).items():
            note = {"note": missing_interval(view)} if any(low is None for _, _, low, _ in cells) else {}
            add(expert, "bars", "Domain affinity", cells, middle=1, **note)
    if len(pairs := common_pairs(rows.get("coactivation"))):
        ordered = pairs.sort_values("over", ascending=False, kind="stable")
        partners = rows_by(ordered.groupby("expert_a").head(COACTIVATED), ["expert_a"], ["expert_b", "over"])
        for expert, cells in partners.items():
            add(expert, "experts", "Co-activated experts", cells, unit="× chance")
    if "vocabulary" in rows:
        for (expert, role), tokens in tokens_by_expert(rows["vocabulary"]).items():
            add(expert, "tokens", f"{capital(role)} tokens", tokens)
    if "contexts" in rows:
        for expert, places in contexts_by_expert(rows["contexts"], most).items():
            add(expert, "contexts", "Contexts with the largest gates", places)
    return blocks
