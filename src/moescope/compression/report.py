"""The report of a compression: damage next to the original and random controls, and the experts removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from moescope.comparison.figures import DISTANCES
from moescope.comparison.tables import OF_PAIRS
from moescope.compression.figures import DAMAGE, GROUPS, SALIENCY
from moescope.compression.tables import PER_LAYER, TABLES
from moescope.plotting.style import byte_size, counted, number, span
from moescope.reporting.findings import Number, Said, key_numbers, say_all, verdict_of
from moescope.reporting.pack import plain
from moescope.reporting.untrusted import plot_words
from moescope.reporting.views import drawable, shown_table
from moescope.run import Run
from moescope.types import Coverage
from moescope.verb import Finding, LayerCards, Measure, Payload, Section, Selection, Summary, Tables, all_rows

ROUTER_CHANGES = {  # what the plan does to the router -> a sentence
    "slice": "The router's parameters of dropped experts are removed.",
    "fold": "Router rows are fitted again, one per merged expert.",
    "join": "A merged expert keeps its dominant member's part of the router.",
    "tie": "Every old router row is kept and points at the merged expert, which no file format can hold.",
}
PLAN, LAYERS = "role == 'plan'", "role == 'plan' and layer.notna()"
NOT_MEASURED = f"{LAYERS} and measured_error.isna()"
CONTROLS = "role == 'control'"
JUDGED = f"{CONTROLS} and plan_better.notna()"  # the intervals of the differences are known
RANKED = "cut.notna() and rank_low.notna()"
ERROR = "error of the routed output: largest in {place}, {value} ({chance})"
# fmt: off
NUMBERS = [
    Number("damage", "loss_increase", where=PLAN, name="Loss above the original"),
    Number("damage", "perplexity", where=PLAN, name="Perplexity"),
    Number("damage", "loss_above_plan", where=JUDGED, only="plan_better", name="Random controls beaten", of="random controls"),
    Number("damage", "bytes_share", where=PLAN, name="Share of the original's bytes"),
    Number("damage", "measured_error", where=LAYERS, name="Measured error, worst layer"),
    Number("damage", "predicted_error", where=NOT_MEASURED, name="Predicted error, worst layer"),
    Number("clusters", "members", only="dominant", name="Experts left", of="experts"),
]
VERDICT = [
    Said("damage", "loss_increase", where=f"{PLAN} and loss_increase.notna()", text="It costs {value}{interval} nats per token: perplexity {perplexity_original} becomes {perplexity}.", figure="damage_by_model"),
    Said("damage", "loss_above_plan", where=f"{CONTROLS} and p_random.notna()", only="beyond_random", pick="smallest", text="That is less than a random plan (p {p_random}).", otherwise="That is not distinguishable from a random plan (p {p_random}).", figure="damage_by_model"),
    Said("damage", "predicted_error", where=NOT_MEASURED, text="Not judged on held-out text: the error is only predicted, at most {value} in {place} ({chance}).", figure="damage_by_layer"),
]
FINDINGS = [
    Said("damage", "loss_increase", where=f"{PLAN} and loss_increase_low.notna() and loss_increase_high.notna()", text="Loss above the original's: {value} nats per token{interval} (95 % interval over {judged_documents} held-out documents).", figure="damage_by_model"),
    Said("damage", "loss_increase", where=f"{PLAN} and (loss_increase_low.isna() or loss_increase_high.isna())", text="Loss above the original's: {value} nats per token; {judged_documents} held-out documents are too few for intervals, so no claim follows.", figure="damage_by_model"),
    Said("damage", "loss_above_plan", where=JUDGED, only="plan_better", pick="smallest", text="Random controls: the plan beats {count_of_total}; their loss is {span} nats per token above the plan's.", otherwise="Random controls: the plan beats none of {total}; their loss is {span} nats per token above the plan's.", figure="damage_by_model"),
    Said("damage", "p_random", where=f"{JUDGED} and p_random.notna()", only="beyond_random", text="The plan is better than random draws: another draw does as well with p {p_random} (t over {total} draws and the documents).", otherwise="The plan is not distinguishable from a random draw: another one does as well with p {p_random} (t over {total} draws and the documents).", figure="damage_by_model"),
    Said("damage", "loss_above_plan", where=JUDGED, only="plan_worse", pick="smallest", text="Random controls that beat the plan: {count} of {total}.", figure="damage_by_model"),
    Said("damage", "perplexity", where=PLAN, text="Perplexity on held-out text: {value} ({chance}).", figure="damage_by_model"),
    Said("damage", "perplexity", where=CONTROLS, text="Perplexity of random controls ({total}): {span} (original: {perplexity_original}).", figure="damage_by_model"),
    Said("damage", "js_divergence", where=PLAN, text="Next-token JS divergence from the original: {value}{interval} of at most 0.693 nats.", figure="damage_by_model"),
    Said("damage", "js_divergence", where=CONTROLS, text="JS divergence of random controls ({total}): {span} nats.", figure="damage_by_model"),
    Said("damage", "measured_error", where=LAYERS, text=f"Measured {ERROR}.", figure="damage_by_layer"),
    Said("damage", "predicted_error", where=NOT_MEASURED, text=f"Predicted {ERROR}.", figure="damage_by_layer"),
    Said("saliency", "rank", where=RANKED, only="undecided", text="Pruning cut: {count} of {total} keep/drop decisions could flip on other text (95 % interval of the rank; uninformative score: all).", otherwise="Pruning cut: none of {total} keep/drop decisions could flip on other text (95 % interval of the rank).", figure="rank_intervals"),
    Said("group_sizes", "largest", pick="largest", text="Largest group: {largest} members, {place}.", figure="group_sizes"),
]
# fmt: on


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings, each with the original's value and the random controls'."""
    tables = all_rows(run, Selection())
    done = what_was_done(run, tables)
    found = [*done, *say_all(FINDINGS, tables, TABLES)]
    verdict = verdict_of(VERDICT, tables, TABLES)
    verdict = Finding(" ".join(filter(None, (plan_words(run, tables), verdict))), **verdict.place)
    lead = [Section("lead", "", figures=drawable([*DAMAGE, *SALIENCY], tables)[:1])]
    numbers = key_numbers(NUMBERS, tables, TABLES)
    return Summary(coverage(run), found, numbers, verdict=verdict, lead=lead)


def plan_words(run: Run, tables: Tables) -> str:
    """ "reap leaves 4 of 8 experts per layer, 42 % fewer bytes."."""
    clusters = tables["clusters"]
    before, after = (
        span(clusters.groupby("layer")[name].agg(how))
        for name, how in (("expert", "nunique"), ("dominant", "sum"))
    )
    shares = tables["damage"].query(PLAN)["bytes_share"].dropna()
    size = f", {number(100 * (1 - shares.iloc[0]))} % fewer bytes" if len(shares) else ""
    return f"{clusters['method'].iloc[0]} leaves {after} of {before} experts per layer{size}."


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


def what_was_done(run: Run, tables: Tables) -> list[str]:
    """Experts before and after, and the size of the tensors."""
    clusters = tables["clusters"]
    before = clusters.groupby("layer")["expert"].nunique()
    after = clusters.groupby("layer")["dominant"].sum()
    dropped, merged = int((~clusters["kept"]).sum()), clusters[clusters["members"] > 1]
    parts = [f"{counted(dropped, 'expert')} dropped"] if dropped else []
    if len(merged):
        groups, alone = int(merged["dominant"].sum()), int((clusters["members"] == 1).sum())
        kept = f"{groups} merged from {counted(len(merged), 'expert')}, {alone} unchanged"
        parts.append(f"{counted(groups + alone, 'group')}: {kept}")
    text = (
        f"Compression by {clusters['method'].iloc[0]}: {span(before)} experts per layer become "
        f"{span(after)} in {counted(len(before), 'layer')} ({', '.join(parts) or 'nothing changes'})."
    )
    found: list[str] = [Finding(text, section="experts")]
    damage = tables["damage"]
    sizes = damage[damage["layer"].isna()][["bytes", "bytes_original"]].dropna()
    if len(sizes):
        after_bytes, original = sizes.iloc[0]
        text = (
            f"Size of the tensors{'' if run.info.get('applied') else ' as planned'}: {byte_size(after_bytes)}, "
            f"{number(100 * (1 - after_bytes / original))} % less than the original's {byte_size(original)}."
        )
        found.append(Finding(text, section="damage"))
    return found


def measures(run: Run) -> list[Measure]:
    """The plan's saliency scores with the experts it drops crossed out; else which experts it keeps."""
    clusters = run.table("clusters") if "clusters" in run.tables else pd.DataFrame()
    if clusters.empty:
        return []
    place = ["layer", "expert"]
    clusters = clusters.assign(mark=clusters["members"] == 0)
    crossed = " Crossed out: dropped." if clusters["mark"].any() else ""
    frame = clusters[[*place, "cluster", "mark"]].assign(value=clusters["members"])
    caption = f"Experts in the group that each expert joins; 1: kept alone.{crossed}"
    groups = [Measure("cluster_size", "Group size", frame, "experts", caption)]
    if "saliency" not in run.tables:
        return groups
    saliency = run.table("saliency")
    rows = saliency[place].assign(mark=saliency["dropped"])
    by = saliency["score"].iloc[0]
    score = TABLES["saliency"].column("score").names.get(by, "")
    found = (
        groups if (clusters["members"] > 1).any() else []
    )  # a merge shows its groups, a pruning its scores
    scores = [
        (by, "times_mean", f"Saliency ({score})"),
        ("tokens", "tokens_times_mean", "Calibration tokens"),
    ]
    for name, column, title in scores if isinstance(by, str) else ():
        frame = rows.assign(value=saliency[column], chance=1.0)
        caption = f"{title} of each expert, as a multiple of the layer's mean.{crossed}"
        found.append(Measure(name, title, frame, "× layer mean", caption, 1.0, True, (0.25, 4.0)))
    if saliency["rank_low"].notna().any():
        ends = {"value": saliency["rank"], "low": saliency["rank_low"], "high": saliency["rank_high"]}
        caption = (
            f"Rank of each expert by {score} in its layer, 1: highest, with its 95 % interval over "
            f"documents.{crossed}"
        )
        found.append(Measure("rank", "Saliency rank", rows.assign(**ends), "", caption))
    return found


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
    if "saliency" in tables:
        parts.append(saliency_section(tables, facts))
    parts.append(experts_section(tables, facts))
    if "geometry_layers" in tables:
        parts.append(distance_section(tables))
    return parts


def damage_section(tables: Tables, facts: dict[str, Any]) -> Section:
    table, rows = TABLES["damage"], tables["damage"]
    of_layers = [name for name in table.values if name.startswith(PER_LAYER)]
    of_model = [name for name in table.values if name not in of_layers]
    whole = rows["layer"].isna()
    payloads = []
    if rows[["bytes", "perplexity"]].notna().any(axis=None):
        payloads = [shown_table(table, rows[whole], ["method", *of_model], "Whole model, with controls")]
    if rows[list(PER_LAYER)].notna().any(axis=None):
        columns = ["method", "role", "layer", *of_layers]
        payloads.append(shown_table(table, rows[~whole], columns, "Every layer, with controls"))
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
    table, rows = TABLES["saliency"], tables["saliency"]
    tokens = counted(facts["calibration_tokens"], "token")
    score = table.column("score").names.get(rows["score"].iloc[0], "")
    text = (
        f"Tokens, gate weights and output norms of each expert on {tokens} of "
        f"{counted(facts['calibration_documents'], 'document')}; ranked by {score}."
        f"{' Crosses: dropped experts.' if rows['dropped'].eq(True).any() else ''}"
    )
    columns = [name for name in table.columns if name not in ("layer_name", "dropped")]
    shown = [shown_table(table, rows, columns, "Scores of every expert")]
    return Section("saliency", "Expert saliency", text, drawable(SALIENCY, tables), shown)


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
    sizes = clusters[clusters["dominant"]]["members"]
    if (merged := sizes > 1).any():
        alone = counted(int((sizes == 1).sum()), "expert")
        text += f" {counted(int(merged.sum()), 'group')} of {span(sizes[merged])} members, {alone} alone."
    values = TABLES["clusters"].values if merged.any() else ("kept",)  # the others are of groups
    payloads = [
        shown_table(TABLES[name], tables[name], columns, title)
        for name, title, columns in (
            ("clusters", "Every expert", ["layer", "expert", *values]),
            ("merges", "Every merge", ["layer", "merge", *TABLES["merges"].values]),
        )
        if name in tables
    ]
    return Section("experts", "Merged and dropped experts", text, drawable(GROUPS, tables), payloads)


def distance_section(tables: Tables) -> Section:
    table = OF_PAIRS["geometry_layers"]
    columns = [name for name in table.columns if name not in ("layer_name", "matched_l2", "matched_sv")]
    text = (
        "Dominant member against each other member, in stored order and with neurons matched. Grey: "
        "unrelated experts, and random ones after matching."
    )
    shown = [shown_table(table, tables[table.name], columns, "Every layer")]
    title = "Distances within merged groups"
    return Section("distances", title, text, drawable(DISTANCES, tables), shown)


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
