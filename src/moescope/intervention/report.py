"""Report on intervene: key numbers, findings, map, expert pages, sections of the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from moescope.errors import printable
from moescope.intervention.figures import CHANGES, DOMAINS, EXPERTS, GRIDS, PREDICTORS
from moescope.intervention.tables import ALL, TABLES
from moescope.plotting.style import counted, listed
from moescope.reporting.findings import Number, Said, key_numbers, say_all, verdict_of
from moescope.reporting.pack import plain
from moescope.reporting.views import drawable, shown_table
from moescope.run import Run
from moescope.verb import (
    Finding,
    LayerCards,
    Measure,
    Payload,
    Section,
    Selection,
    Summary,
    Tables,
    all_rows,
)

TAB = "interventions"
NATS = "nats per token"
NAMED = 3  # changes that findings name
SHOWN = 20  # rows of a table of experts
FOR_FIGURES = ("label", "single", "shown")  # columns
PROJECTED = "name == 'project_out' and controls.notna()"
TOP_K = "name == 'top_k' and role == 'change' and not single"
EXPERT = "{value}{interval} nats per token, {excess} [{excess_low}, {excess_high}] more than these"
# fmt: off
NUMBERS = [
    Number("interventions", "loss", where="intervention == intervention.min()", name="Loss of the untouched model"),
    Number("intervention_experts", "loss_difference", pick="largest", name="Largest loss without one expert"),
    Number("intervention_experts", "loss_difference", where="q.notna()", only="claimed", name="Experts above controls", of="experts"),
    Number("interventions", "loss_difference", where=f"{PROJECTED} and q.notna()", only="claimed", name="Projections above both controls", of="layers and k"),
    Number("interventions", "loss_difference", where="single", pick="largest", name="Largest loss difference"),
    Number("interventions", "predictions_changed", where="single", pick="largest", name="Changed predictions"),
]
VERDICT = [
    Said("intervention_experts", "loss_difference", where="q.notna()", only="claimed", pick="largest", text="{count} of {total} experts matter more than others of their layer; most {place}: {value}{interval} nats per token without it.", otherwise="No expert stands out: removing none of {total} costs more than removing others of its layer.", figure="effect_map"),
    Said("intervention_experts", "loss_difference", where="q.isna()", pick="largest", text="Most costs {place}: {value}{interval} nats per token without it; not tested against other experts.", figure="effect_map"),
    Said("interventions", "loss_difference", where="domain != 'all' and expert.notna() and role == 'change'", only="claimed", pick="largest", group="domain", text="By domain: {groups}."),
    Said("interventions", "loss_difference", where=f"{PROJECTED} and q.notna()", only="claimed", pick="largest", text="Router directions matter in {count} of {total} layers and k, beyond random ones; most in layer {layer}, k = {k}: {value}{interval} nats per token.", otherwise="Removing router directions costs no more than removing random ones.", figure="projection_curve"),
    Said("interventions", "loss_difference", where=TOP_K, pick="smallest", text="Loss is least with {k} experts per token: {value}{interval} nats per token against as configured.", figure="top_k_curve"),
    Said("interventions", "loss_difference", where="single", pick="largest", text="{change}: loss changes by {value}{interval} nats per token.", figure="effects_compared"),
]
FINDINGS = [
    Said("intervention_experts", "loss_difference", where="q.notna()", only="claimed", pick="largest", text=f"Experts that cost more than other experts of their layer (q < 0.05): {{count}} of {{total}}; most {{place}}, {EXPERT}.", otherwise="Experts that cost more than other experts of their layer (q < 0.05): none of {total}.", figure="effect_map"),
    Said("intervention_experts", "loss_difference", where="q.isna()", pick="largest", text="Largest loss without one expert: {place}, {value}{interval} nats per token; no test against controls.", figure="effect_map"),
    Said("interventions", "loss_difference", where=f"{PROJECTED} and q.notna()", only="claimed", pick="largest", text=f"Removing router directions costs more than both random controls (q < 0.05) in {{count}} of {{total}} layers and k; most layer {{layer}}, k = {{k}}: {EXPERT}.", otherwise="Removing router directions costs more than both random controls (q < 0.05) in none of {total} layers and k.", figure="projection_curve"),
    Said("interventions", "loss_difference", where=f"{PROJECTED} and q.isna()", pick="largest", text="Removing router directions costs most in layer {layer}, k = {k}: {value}{interval} nats per token; not tested.", figure="projection_curve"),
    Said("interventions", "loss_difference", where=TOP_K, pick="smallest", text="Experts per token: least loss with {k}, {value}{interval} nats per token against as configured.", figure="top_k_curve"),
    Said("interventions", "loss_difference", where=f"{TOP_K} and k == k.min()", text="Experts per token: with {k}, {value}{interval} nats per token more than as configured.", figure="top_k_curve"),
]
DOMAIN = Said("interventions", "loss_difference", pick="largest", text=f"Domain {{domain}} needs layer {{layer}}, expert {{expert}} most: {EXPERT} (q = {{q}}).".replace("these", "its controls"), figure="effect_by_domain")
CHANGE = Said("interventions", "loss_difference", text="Effect of {change}: loss {loss} changes by {value}{interval} nats per token; share of changed predictions {predictions_changed}")
LATER = ", of changed choices in later layers {choices_changed}"
KL = "; KL divergence {kl} [{kl_low}, {kl_high}]"
PREDICTED = [
    Said("predictors", "correlation", where="given == '' and q.isna()", pick="first", text="No claim about predictors: {layers} layers, 12 are needed."),
    Said("predictors", "correlation", where="q.notna() and given == ''", only="claimed", pick="furthest", group="predictor", text="The effect of removing an expert follows {count} of {total} scores beyond permuted experts (q < 0.05): {groups} (rank correlation; ceiling {ceiling}).", otherwise="The effect of removing an expert follows none of {total} scores beyond permuted experts (q < 0.05)."),
    Said("predictors", "correlation", where="given != '' and layers >= 12", pick="furthest", group="predictor", text="Given load (partial rank correlation, not tested): {groups}."),
]
# fmt: on


def summary(run: Run) -> Summary:
    """Key numbers and findings: experts, projections, experts per token, single changes, text."""
    tables, documents = all_rows(run, Selection()), int(run.info["setup"]["documents"])
    rows = tables["interventions"]
    asked = rows[(rows["role"] == "change") & (rows["domain"] == ALL)]
    coverage = [
        f"{counted(len(asked), 'intervention')} judged on {counted(int(asked['tokens'].iloc[0]), 'token')} "
        f"of {counted(documents, 'document')}"
    ]
    if asked["loss_difference_low"].isna().all():
        coverage.append(f"no intervals: they need 10 judged documents, not {documents}")
    findings = say_all(FINDINGS, tables, TABLES)
    findings[1:1] = domain_findings(tables)
    findings += [*change_findings(tables), *text_findings(tables)]
    verdict = verdict_of(VERDICT, tables, TABLES)
    several = rows["domain"].nunique() > 2
    figures = [*DOMAINS, *EXPERTS, *GRIDS, *CHANGES] if several else [*EXPERTS, *GRIDS, *CHANGES]
    lead = [Section("lead", "", figures=drawable(figures, tables)[:1])]
    return Summary(
        coverage,
        findings,
        key_numbers(NUMBERS, tables, TABLES),
        verdict=verdict,
        lead=lead,
        passages=passages(tables),
    )


def passages(tables: Tables) -> list[str]:
    """The first continuations without and with the change, for the terminal."""
    lines = []
    for pair in continuations(tables)[:NAMED]:
        sides = ("".join(token for token in pair[side] if token) for side in ("before", "after"))
        untouched, changed = (printable(side).strip() for side in sides)
        lines += [f"{printable(pair['prompt'])} ({pair['change']})"]
        lines += [f"  untouched: {untouched}", f"  changed:   {changed}"]
    return lines


def domain_findings(tables: Tables) -> list[str]:
    """The expert that each domain depends on most, of those beyond controls; domains without any, or a test."""
    rows = tables["interventions"]
    rows = rows[(rows["domain"] != ALL) & (rows["role"] == "change") & rows["expert"].notna()]
    if "intervention_experts" not in tables or rows["claimed"].isna().all():
        return []
    needing = rows.loc[rows["claimed"].eq(True), "domain"].unique()
    tests = rows.groupby("domain")["q"].count()
    silent = [name for name in tests.index[tests > 0] if name not in needing]
    about = "domain == {!r} and expert.notna() and claimed"
    found = say_all([replace(DOMAIN, where=about.format(name)) for name in sorted(needing)], tables, TABLES)
    if silent:
        text = f"No single expert stands out for {listed(silent)}: none costs more than controls (q < 0.05)."
        found.append(Finding(text, figure="effect_by_domain"))
    if untested := list(tests.index[tests == 0]):
        text = f"Not tested: {listed(untested)}, with fewer than 10 judged documents."
        found.append(Finding(text, figure="effect_by_domain"))
    return found


def change_findings(tables: Tables) -> list[str]:
    """What single changes do to loss, predictions and routing, largest first."""
    rows = tables["interventions"]
    rows = rows[rows["single"].eq(True) & (rows["domain"] == ALL)].nlargest(NAMED, "loss_difference")
    figure = next((spec.name for spec in CHANGES if spec.can_draw(tables)), "")
    said = []
    for row in rows.itertuples():
        text = CHANGE.text + LATER * pd.notna(row.choices_changed) + KL * pd.notna(row.kl_low)
        where = f"intervention == {row.intervention}"
        said.append(replace(CHANGE, where=where, text=f"{text}.", figure=figure))
    return say_all(said, tables, TABLES)


def text_findings(tables: Tables) -> list[str]:
    """Where continuations begin to differ."""
    rows = tables.get("intervention_text", pd.DataFrame())
    if rows.empty:
        return []
    prompts = rows.groupby(["intervention", "prompt"], sort=False)
    differs = rows["token"].fillna("") != rows["token_changed"].fillna("")
    first = rows[differs].groupby(["intervention", "prompt"], sort=False)["position"].min()
    words = f"{len(first)} of {counted(prompts.ngroups, 'continuation')} with a difference"
    words += f", the earliest at token {first.min()}" if len(first) else ""
    return [Finding(f"Generated text: {words}.", tab=TAB, section="continuations")]


# --- map and expert pages


def measures(run: Run) -> list[Measure]:
    """Loss when an expert is removed; outlined where it costs more than its controls."""
    if "intervention_experts" not in run.tables:
        return []
    rows = run.table("intervention_experts")
    names = {"loss_difference": "value", "loss_difference_low": "low", "loss_difference_high": "high"}
    frame = rows[["layer", "expert", *names]].rename(columns=names)
    beyond = rows["claimed"].astype(float).where(rows["q"].notna())
    reach = float(frame["value"].abs().max()) or 1.0
    return [
        Measure(
            "loss_when_removed",
            "Loss when removed",
            frame.assign(chance=0.0, beyond=beyond),
            NATS,
            "Loss with the expert changed minus loss without; 0: no effect. Above controls: more than other "
            "experts of the layer, q < 0.05.",
            0.0,
            limits=(-reach, reach),
            outline=("above controls", "not above controls"),
        )
    ]


def experts(run: Run) -> Iterator[LayerCards]:
    """The effect of every expert by domain."""
    if "intervention_experts" not in run.tables:
        return
    rows = run.table("interventions")
    rows = rows[(rows["role"] == "change") & (rows["domain"] != ALL) & rows["expert"].notna()]
    numbers = ["domain", *(f"loss_difference{end}" for end in ("", "_low", "_high"))]
    for layer, of_layer in rows.groupby("layer"):
        cards: dict[int, list[Payload]] = {}
        for expert, part in of_layer.groupby("expert"):
            bars = plain(part[numbers].to_numpy(object).tolist())
            note = f"{NATS}, with 95 % intervals over documents where there are 10; 0: no effect"
            title = "Loss when removed, by domain"
            cards[int(expert)] = [{"kind": "bars", "title": title, "rows": bars, "note": note}]
        yield LayerCards(int(layer), cards)


# --- sections


def sections(run: Run, selection: Selection) -> list[Section]:
    tables = all_rows(run, selection)
    rows = tables["interventions"]
    single = rows["intervention"].isin(rows.loc[rows["single"].eq(True), "intervention"])
    grid = rows[(rows["domain"] == ALL) & rows["k"].notna() & ~single]
    parts = [experts_section(tables)] if len(tables.get("intervention_experts", ())) else []
    if len(grid):
        text = "Directions removed from router rows, or experts per token."
        shown = [effects_table(grid, "Every k", "change")]
        parts.append(Section("grids", "Effect over k", text, drawable(GRIDS, tables), shown))
    if single.any():
        text = (
            "Loss, next-token distribution and routing with and without each change, on the same documents."
        )
        figures = drawable(CHANGES if parts else [*CHANGES, *DOMAINS], tables)
        hidden = ("layer", "expert", "k", "draw", "role")
        shown = [effects_table(rows[single], "Every change and domain", *hidden)]
        parts.append(Section("changes", "Effect of the changes", text, figures, shown))
    return [*parts, *text_sections(tables)]


def effects_table(rows: pd.DataFrame, title: str, *hidden: str) -> Payload:
    table, never = TABLES["interventions"], ("intervention", "layer_name", "name", "of", *FOR_FIGURES)
    columns = [name for name in table.columns if name not in (*never, *hidden)]
    return shown_table(table, rows, columns, title)


def experts_section(tables: Tables) -> Section:
    table, rows = TABLES["intervention_experts"], tables["intervention_experts"]
    columns = [name for name in table.columns if name != "layer_name"]
    top = rows.nlargest(SHOWN, "loss_difference")
    title = f"The {len(top)} experts with the largest loss difference"
    return Section(
        "experts",
        "Effect of each expert",
        "Every expert is changed alone. An ablation is never quite without effect, so an expert is compared, "
        "document by document, with the 4 experts of its layer nearest in load on other documents; in a "
        "layer of fewer than 16, with all others.",
        drawable([*EXPERTS, *DOMAINS], tables),
        [shown_table(table, top, columns, title)],
    )


def text_sections(tables: Tables) -> list[Section]:
    """Continuations with and without the change, side by side."""
    pairs = continuations(tables)
    if not pairs:
        return []
    text = "The most likely token is taken at every place. Marked: tokens that differ at their place."
    title = "Generated text before and after"
    return [Section("continuations", title, text, widget=("continuations", pairs))]


def continuations(tables: Tables) -> list[dict[str, Any]]:
    rows = tables.get("intervention_text", pd.DataFrame())
    if rows.empty:
        return []
    labels = tables["interventions"].drop_duplicates("intervention").set_index("intervention")["change"]
    pairs = []
    for (intervention, prompt), part in rows.groupby(["intervention", "prompt"], sort=False):
        ordered = part.sort_values("position")
        before, after = (
            [None if pd.isna(token) else str(token) for token in ordered[name]]
            for name in ("token", "token_changed")
        )
        pairs.append(
            {"change": str(labels[intervention]), "prompt": str(prompt), "before": before, "after": after}
        )
    return pairs


# --- with a scan and a compression of the same checkpoint


def joint(runs: list[Run]) -> list[Section]:
    """Return, per sweep of experts, how scores of the same checkpoint's scan and compression predict it."""
    sweeps = [run for run in runs if "intervention_experts" in run.tables]
    return [predictor_section(run, runs) for run in sweeps if len(run.table("intervention_experts"))]


def predictor_section(run: Run, runs: list[Run]) -> Section:
    saliency = [other for other in runs if "saliency" in other.tables and same_model(run, other, 0)]
    more = {
        "alignment": alignment_of(run, runs),
        "saliency": saliency[0].table("saliency") if saliency else None,
    }
    known = {name: rows for name, rows in more.items() if rows is not None}
    if known or "predictors" not in run.tables:
        from moescope.intervention.predictors import predictor_tables

        tables = predictor_tables({"intervention_experts": run.table("intervention_experts"), **known})
    else:
        tables = {name: run.table(name) for name in ("expert_scores", "predictors")}
    commands = {"alignment": "`moescope scan`", "saliency": "`moescope compress`"}
    missing = [command for name, command in commands.items() if name not in known]
    text = "Scores of experts against the loss when each is removed, within layers."
    if missing:
        text += f" More scores: report this run with one of {' and '.join(missing)} of the same checkpoint."
    table = TABLES["predictors"]
    return Section(
        f"predictors-{run.name}",
        "What predicts the effect of an expert",
        text,
        drawable(PREDICTORS, tables),
        [shown_table(table, tables["predictors"], table.columns, "Every score")],
        findings=say_all(PREDICTED, tables, TABLES),
        tab=TAB,
    )


def same_model(run: Run, other: Run, step: int) -> bool:
    """Return whether a run's model has the weights of another's step: by header hash, by place without one."""

    def checkpoint(of: Run, at: int) -> dict[str, Any]:
        return next((item for item in of.info.get("checkpoints", []) if item.get("step") == at), {})

    one, its = checkpoint(run, 0), checkpoint(other, step)
    key = "header_hash" if one.get("header_hash") and its.get("header_hash") else "path"
    return bool(one and its) and bool(one[key] == its[key])


def alignment_of(run: Run, runs: list[Run]) -> pd.DataFrame | None:
    """Return every expert's alignment at its layer's k* in a scan of the run's checkpoint: the first view,
    of raw router rows where there are any."""
    for scan in runs:
        if not {"alignment", "ambiguity"} <= set(scan.tables):
            continue
        every = scan.table("ambiguity")
        for step in every["step"].unique():
            if same_model(run, scan, step):
                ambiguity = every[every["step"] == step]
                raw = ambiguity[ambiguity["router"] == "raw"]
                view = ["step", "matrix", "router", "fold_norm"]
                first = (raw if len(raw) else ambiguity).iloc[:1][view]
                return at_k_star(scan.table("alignment").merge(first), every.merge(first))
    return None


def at_k_star(alignment: pd.DataFrame, ambiguity: pd.DataFrame) -> pd.DataFrame:
    """Return the alignment of every expert at its layer's k*; both tables are of one view."""
    ks = ambiguity[["layer", "k_star"]].rename(columns={"k_star": "k"}).dropna()
    return alignment.merge(ks.astype({"k": "int64"}), on=["layer", "k"])


def guide(run: Run) -> list[str]:
    return [
        "Intervene changes a model in memory and compares it with the untouched one on the same documents. "
        "The loss difference is what the change costs per token; 0 is no effect. Its excess is what it costs "
        "beyond controls: other experts of the layer, or random directions. Claimed is what costs something "
        "and exceeds controls, corrected for the number of changes tried (q, Benjamini-Hochberg).",
    ]
