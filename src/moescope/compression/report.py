"""The report of a compression: damage next to the original and random controls, and the experts removed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from moescope.comparison.figures import EXPERT_DISTANCE
from moescope.comparison.tables import TABLES as DISTANCE_TABLES
from moescope.compression.figures import (
    DAMAGE,
    GROUPS,
    SALIENCY,
    cut_by_score,
    error_column,
    layer_rows,
    model_rows,
    of_controls,
    of_plan,
    score_column,
    verdict,
    worst_layer,
)
from moescope.compression.tables import TABLES
from moescope.plotting.style import byte_size, counted, number, span
from moescope.reporting.pack import plain, table_payload
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.statistics import FEWEST_DOCUMENTS
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

ERRORS = {"measured_error": "Measured", "predicted_error": "Predicted"}
ROUTER_CHANGES = {  # what the plan does to the router -> a sentence
    "slice": "The router's parameters of dropped experts are removed.",
    "fold": "Router rows are fitted again, one per merged expert.",
    "join": "A merged expert keeps its dominant member's part of the router.",
    "tie": "Every old router row is kept and points at the merged expert, which no file format can hold.",
}


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings, each with the original's value and the random controls'."""
    tables = all_rows(run, Selection())
    return Summary(coverage(run), findings(run, tables), key_numbers(tables))


def coverage(run: Run) -> list[str]:
    item, facts = run.info["coverage"][0], run.info["setup"]
    lines = [Coverage(**{**item, "experts_per_layer": tuple(item["experts_per_layer"])}).line()]
    if facts.get("calibration_tokens"):
        judged = facts.get("judged_tokens")
        lines.append(
            f"calibrated on {counted(facts['calibration_tokens'], 'token')} of "
            f"{counted(facts['calibration_documents'], 'document')}"
            + (f", judged on {counted(judged, 'held-out token')}" if judged else "")
        )
    if run.info.get("applied"):
        lines.append(f"written: {run.info['applied']}")
    return lines


def key_numbers(tables: Tables) -> list[KeyNumber]:
    model = model_rows(tables)
    plan, controls = of_plan(tables, model).iloc[0], of_controls(tables, model)
    clusters = tables["clusters"]
    left = clusters[clusters["kept"].astype(bool)].groupby("layer")["cluster"].nunique()
    compared = verdict(controls).removeprefix("; ")
    numbers = [  # name, value, level of the controls, unit, word, end of the bar
        ("Perplexity", plan["perplexity"], controls["perplexity"].mean(), "", compared, None),
        ("Perplexity of the original", plan["perplexity_original"], None, "", "", None),
        ("JS divergence", plan["js_divergence"], controls["js_divergence"].mean(), "nats", "", math.log(2)),
        ("Share of the original's bytes", plan["bytes"] / plan["bytes_original"], None, "", "", 1.0),
    ]
    if column := error_column(tables):
        layer, value, random = worst_layer(tables, column)
        word = f"layer {layer}"
        numbers.append((f"{ERRORS[column]} error, worst layer", value, random.mean(), "", word, None))
    experts = len(clusters)
    unit = f"of {experts:,}"
    numbers.append(("Experts left", left.sum(), None, unit, "", float(experts)))
    return [
        KeyNumber(
            name,
            float(value),
            None if chance is None or pd.isna(chance) else float(chance),
            unit,
            word,
            "mean of random controls",
            most,
        )
        for name, value, chance, unit, word, most in numbers
        if pd.notna(value)
    ]


# --- findings


def findings(run: Run, tables: Tables) -> list[str]:
    """What was done, and the damage."""
    model = model_rows(tables)
    plan, controls = of_plan(tables, model).iloc[0], of_controls(tables, model)
    sentences: list[str] = [compression_finding(tables)]
    if pd.notna(plan["bytes"]):
        saved = 100 * (1 - plan["bytes"] / plan["bytes_original"])
        planned = "" if run.info.get("applied") else " as planned"
        text = (
            f"Size of the tensors{planned}: {byte_size(plan['bytes'])}, "
            f"{number(saved)} % less than the original's {byte_size(plan['bytes_original'])}."
        )
        sentences.append(Finding(text, section="damage"))
    if pd.notna(plan["perplexity"]):
        text = (
            f"Perplexity on held-out text: {number(plan['perplexity'])}, original "
            f"{number(plan['perplexity_original'])}{control_range(controls['perplexity'])}."
        )
        sentences.append(Finding(text, figure="perplexities"))
        sentences.append(Finding(judgement_finding(plan, controls), figure="perplexities"))
        text = (
            f"Next-token JS divergence from the original: {number(plan['js_divergence'])} of at most "
            f"{number(math.log(2))} nats{control_range(controls['js_divergence'])}."
        )
        sentences.append(Finding(text, figure="divergences"))
    if column := error_column(tables):
        layer, value, random = worst_layer(tables, column)
        text = (
            f"{ERRORS[column]} error of the routed output: largest in layer {layer}, {number(value)}"
            f"{control_range(random)}."
        )
        sentences.append(Finding(text, figure="errors_by_layer", layer=layer))
    if ranks := rank_finding(tables):
        sentences.append(Finding(ranks, figure="rank_intervals"))
    return sentences


def judgement_finding(plan: pd.Series, controls: pd.DataFrame) -> str:
    """Loss against original and controls; nothing is claimed where a limit of an interval is unknown."""
    documents = counted(int(plan["judged_documents"]), "held-out document")
    if plan[["loss_increase_low", "loss_increase_high"]].isna().any():
        needed = f"give about {5 * FEWEST_DOCUMENTS} documents: one in five is held out"
        return f"No claim about original or random controls: {documents} give no interval; {needed}."
    low, high = number(plan["loss_increase_low"]), number(plan["loss_increase_high"])
    sentence = (
        f"Loss above the original's: {number(plan['loss_increase'])} nats per token [{low}, {high}] "
        f"(95 % interval over {documents})"
    )
    return f"{sentence}{verdict(controls)}."


def compression_finding(tables: Tables) -> Finding:
    clusters = tables["clusters"]
    kept = clusters["kept"].astype(bool)
    after = clusters[kept].groupby("layer")["cluster"].nunique()
    before = clusters.groupby("layer")["expert"].nunique()
    sizes = group_sizes(clusters)
    merged = sizes[sizes > 1]
    parts = [f"{counted(int((~kept).sum()), 'expert')} dropped"] if not kept.all() else []
    if len(merged):
        parts.append(f"{counted(int(merged.sum()), 'expert')} merged into {len(merged)}")
    text = (
        f"Compression by {clusters['method'].iloc[0]}: {span(before)} experts per layer become "
        f"{span(after)} in {counted(len(before), 'layer')} ({', '.join(parts) or 'nothing changes'})."
    )
    return Finding(text, section="experts")


def group_sizes(clusters: pd.DataFrame) -> pd.Series:
    return clusters[clusters["cluster"].notna()].groupby(["layer", "cluster"]).size()


def control_range(controls: pd.Series) -> str:
    """The range of the random controls in parentheses; "" without them."""
    known = controls.dropna()
    return "" if known.empty else f" (random controls: {span(known)})"


def rank_finding(tables: Tables) -> str | None:
    """How many experts could be on the other side of the cut with other documents."""
    if not cut_by_score(tables) or "saliency" not in tables or tables["saliency"]["rank_low"].isna().all():
        return None
    rows = tables["saliency"].merge(tables["clusters"], on=["layer", "expert"])
    kept = rows.groupby("layer")["kept"].transform("sum")
    if (kept == rows.groupby("layer")["kept"].transform("size")).all():
        return None
    unsure = (rows["rank_low"] < kept + 0.5) & (rows["rank_high"] > kept + 0.5)
    score = score_column(tables).replace("_", " ")
    return (
        f"Pruning cut: {int(unsure.sum())} of {len(rows)} experts could be on either side with other "
        f"documents, by the 95 % interval of their {score} rank (uninformative score: all)."
    )


# --- sections


def measures(run: Run) -> list[Measure]:
    """The plan's saliency scores with the experts it drops crossed out; else which experts it keeps."""
    clusters = run.table("clusters") if "clusters" in run.tables else pd.DataFrame()
    if clusters.empty:
        return []
    plan = clusters[clusters["method"] == clusters["method"].iloc[0]][["layer", "expert", "kept", "cluster"]]
    removed = plan.assign(mark=~plan["kept"].astype(bool))[["layer", "expert", "mark"]]
    crossed = " Crossed out: dropped." if removed["mark"].any() else ""
    sizes = plan.groupby(["layer", "cluster"])["expert"].transform("size").fillna(0)
    frame = plan[["layer", "expert", "cluster"]].assign(value=sizes, mark=removed["mark"])
    caption = f"Experts in the group that each expert joins; 1: kept alone.{crossed}"
    groups = [Measure("cluster_size", "Group size", frame, "experts", caption)]
    if "saliency" not in run.tables:
        return groups
    saliency = run.table("saliency").merge(removed, on=["layer", "expert"])
    measured = groups if (sizes > 1).any() else []  # a merge shows its groups, a pruning its scores
    for name, title in (("reap", "REAP saliency"), ("tokens", "Calibration tokens")):
        relative = saliency[name] / saliency.groupby("layer")[name].transform("mean")
        frame = saliency[["layer", "expert", "mark"]].assign(value=relative, chance=1.0)
        caption = f"{title} of each expert, as a multiple of the layer's mean.{crossed}"
        measured.append(Measure(name, title, frame, "× layer mean", caption, 1.0, True, (0.25, 4.0)))
    if saliency["rank_low"].notna().any():
        score = score_column({"clusters": clusters})
        ranks = saliency.groupby("layer")[score].rank(ascending=False, method="min")
        columns = {"value": ranks, "low": saliency["rank_low"], "high": saliency["rank_high"]}
        frame = saliency[["layer", "expert", "mark"]].assign(**columns)
        caption = (
            f"Rank of each expert's {score.replace('_', ' ')} in its layer, 1: highest, with its 95 % "
            f"interval over documents.{crossed}"
        )
        measured.append(Measure("rank", "Saliency rank", frame, "", caption))
    return measured


def experts(run: Run) -> Iterator[LayerCards]:
    """The experts that each expert is merged with, and their weights."""
    if "clusters" not in run.tables:
        return
    clusters = run.table("clusters")
    for layer, rows in clusters[clusters["cluster"].notna()].groupby("layer"):
        cards: dict[int, list[Payload]] = {}
        for _, group in rows.groupby("cluster"):
            members = {int(row.expert): float(row.weight) for row in group.itertuples()}
            for expert in members if len(members) > 1 else ():
                others = [[other, plain(weight)] for other, weight in members.items() if other != expert]
                block = {"kind": "experts", "title": "Merged with", "rows": others, "unit": "weight"}
                cards[expert] = [block]
        if cards:
            yield LayerCards(int(layer), cards)


def sections(run: Run, selection: Selection) -> list[Section]:
    tables, facts = all_rows(run, selection), run.info["setup"]
    parts = [damage_section(tables, facts)]
    if shown := parts[0].figures[:1]:
        parts.insert(0, Section("overview", "Damage", figures=shown, tab="overview"))
    if "saliency" in tables:
        parts.append(saliency_section(tables, facts))
    parts.append(experts_section(tables, facts))
    if "geometry_layers" in tables:
        parts.append(distance_section(tables))
    return parts


def drawable(specs: Sequence[FigureSpec], tables: Tables) -> list[tuple[FigureSpec, Tables]]:
    return [(spec, tables) for spec in specs if spec.can_draw(tables)]


def damage_section(tables: Tables, facts: dict[str, Any]) -> Section:
    damage, model, layers = TABLES["damage"], model_rows(tables), layer_rows(tables)
    errors = ["predicted_error", "measured_error", "router_kl"]
    of_model = [name for name in damage.values if name not in errors]
    payloads = []
    if model[["bytes", "perplexity"]].notna().any(axis=None):
        payloads.append(table_payload(damage, model, ["method", *of_model], "Whole model, with controls"))
    if layers[errors].notna().any(axis=None):
        columns = ["method", "layer", *errors]
        payloads.append(table_payload(damage, layers, columns, "Every layer, with controls"))
    if facts.get("judged_tokens"):
        by_domain = facts.get("judged_tokens_by_domain", {})
        tokens = ", ".join(f"{name}: {count:,}" for name, count in by_domain.items())
        text = (
            f"Judged on {counted(facts['judged_tokens'], 'token')} of "
            f"{counted(facts['judged_documents'], 'held-out document')}; distributions compared at "
            f"{counted(facts['compared_tokens'], 'position')}."
        )
        if len(by_domain) > 1:
            text += (
                f" Tokens per domain: {tokens}. Every domain counts alike: numbers are means of domain means."
            )
    else:
        text = "Not judged: errors are predicted on the calibration text, the size is computed from headers."
    if gating := sorted(set(facts.get("gating", {}).values())):
        text += f" Recognised gating: {plot_words('; '.join(gating))}."
    return Section("damage", "Damage", text, drawable(DAMAGE, tables), payloads)


def saliency_section(tables: Tables, facts: dict[str, Any]) -> Section:
    tokens = counted(facts["calibration_tokens"], "token")
    documents = counted(facts["calibration_documents"], "document")
    columns = [name for name in TABLES["saliency"].columns if name != "layer_name"]
    return Section(
        "saliency",
        "Expert saliency",
        f"Tokens, gate weights and output norms of each expert on {tokens} of {documents}.",
        drawable(SALIENCY, tables),
        [table_payload(TABLES["saliency"], tables["saliency"], columns, "Scores of every expert")],
    )


def experts_section(tables: Tables, facts: dict[str, Any]) -> Section:
    """What becomes of experts and router."""
    clusters, router = tables["clusters"], facts["router"]
    text = ROUTER_CHANGES[router]
    special = facts.get("router_effects", {}).get(router)  # of a lab router
    if special is not None:
        text = special if router == "join" else f"{text} {special}"
    text += fitting_text(facts.get("plan_settings", {}))
    before, after = facts.get("top_k_before"), facts.get("top_k")
    if after is not None and after != before:
        text += f" A token is routed to {after} experts instead of {before}."
    sizes = group_sizes(clusters)
    if len(merged := sizes[sizes > 1]):
        alone = counted(int((sizes == 1).sum()), "expert")
        text += f" {counted(len(merged), 'group')} of {span(merged)} members, {alone} alone."
    values = TABLES["clusters"].values if len(merged) else ("kept",)  # the others are of groups
    payloads = [
        table_payload(TABLES[name], tables[name], columns, title)
        for name, title, columns in (
            ("clusters", "Every expert", ["layer", "expert", *values]),
            ("merges", "Every merge", ["layer", "merge", *TABLES["merges"].values]),
        )
        if name in tables
    ]
    return Section("experts", "Merged and dropped experts", text, drawable(GROUPS, tables), payloads)


def distance_section(tables: Tables) -> Section:
    table = DISTANCE_TABLES["geometry_layers"]
    columns = [name for name in table.columns if name != "layer_name"]
    return Section(
        "distances",
        "Distances within merged groups",
        "Dominant member against each other member, in stored order and with neurons matched. Grey: "
        "unrelated experts, and random ones after matching.",
        drawable(EXPERT_DISTANCE, tables),
        [table_payload(table, tables[table.name], columns, "Every layer")],
    )


def fitting_text(settings: dict[str, Any]) -> str:
    """The divergence of the fitted router rows, next to that of the members' mean rows."""
    if settings.get("router_kl_of_mean_rows") is None:
        return ""
    mean, fitted = number(settings["router_kl_of_mean_rows"]), number(settings["router_kl"])
    held_out = settings.get("router_kl_held_out")
    extra = "" if held_out is None else f", {number(held_out)} on held-out states"
    return (
        f" Mean KL from the groups' probabilities over layers: {mean} nats for the members' mean rows, "
        f"{fitted} for the fitted rows{extra}."
    )


def guide(run: Run) -> list[str]:
    return [
        "Compare a compression with two references: the original, and random controls that drop or merge as "
        "many experts. The difference to the controls is the value of the method. Perplexity and divergence "
        "are measured on held-out text."
    ]
