"""Report on deploy: key numbers, findings, sections of the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from moescope.deployment.figures import (
    COVERAGE,
    PLACEMENT,
    PREDICTOR_STYLES,
    PREFETCH,
    RESIDENCY,
    coverage_words,
    lead_slots,
    loading_words,
    method_words,
    one_each,
    percent,
    policy_rate,
    prefetch_words,
    rate_words,
    size_words,
    together,
)
from moescope.deployment.tables import TABLES
from moescope.plotting.style import capital, counted, number
from moescope.reporting.pack import table_payload
from moescope.run import Run
from moescope.verb import (
    FigureSpec,
    Finding,
    KeyNumber,
    Measure,
    Section,
    Selection,
    Summary,
    Tables,
    all_rows,
)

NOTHING_TO_PLACE = "one expert per device: nothing to place"
LEAST_USED = 20  # rows of the table of experts


def title(run: Run) -> str:
    """The name of the trace."""
    return f"{Path(run.info['runs'][0]['path']).name}: serving"


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings, each with the optimum and the chance level."""
    info = run.info["tokens"]
    coverage = [
        f"{counted(info['tokens'], 'token')} of {info['phase']}, {counted(info['documents'], 'document')}, "
        f"{counted(info['layers'], 'MoE layer')}, {info['k']} experts per token"
    ]
    keys: list[KeyNumber] = []
    findings: list[str] = []
    parts = (cache_summary, prefetch_summary, placement_summary) if "residency" in run.tables else ()
    for part in (*parts, coverage_summary):
        more_keys, more_findings = part(run)
        keys, findings = keys + more_keys, findings + more_findings
    return Summary(coverage, findings, keys)


def cache_summary(run: Run) -> tuple[list[KeyNumber], list[str]]:
    rows = run.table("residency")
    slots = lead_slots(rows)
    lru, chance, list_chance = (
        policy_rate(rows, policy, slots, column)
        for policy, column in (("lru", "hit_rate"), ("lru", "chance"), ("static", "chance"))
    )
    name, word = f"LRU hit rate, {slots} slots", f"optimum {rate_words(rows, 'belady', slots)}"
    keys = [KeyNumber(name, 100 * lru, 100 * chance, "%", word, "random routing", 100.0)]
    place = {"tab": "deployment"}
    of = f"{slots} of {int(rows['n_experts'].max())}"
    findings: list[str] = [
        Finding(
            f"Expert cache: {of} experts per layer hold {rate_words(rows, 'lru', slots)} of choices with "
            f"LRU; the optimum is {rate_words(rows, 'belady', slots)} (random routing: {percent(chance)} "
            f"with LRU).{size_words(rows)}",
            **place,
        ),
        Finding(
            f"Static list: the {of} experts per layer used most on other text hold "
            f"{rate_words(rows, 'static', slots)} of choices (random list: {percent(list_chance)}), those "
            f"used most on the same text {rate_words(rows, 'static_in_sample', slots)} (random routing: "
            f"{percent(policy_rate(rows, 'static_in_sample', slots, 'chance'))}).",
            **place,
        ),
        *needed_findings(run),
        Finding(
            f"Loading with {slots} slots: {loading_words(rows, 'lru', slots)} per token with LRU, "
            f"{loading_words(rows, 'belady', slots)} at the optimum.",
            **place,
        ),
    ]
    even = policy_rate(rows, "lru_split", slots, "uniform")
    findings.append(
        Finding(
            f"Split over layers: the bytes of {slots} slots placed where they gain most hold "
            f"{rate_words(rows, 'lru_split', slots)} of choices, equal slots in every layer {percent(even)}.",
            **place,
        )
    )
    return keys, findings


def needed_findings(run: Run) -> list[str]:
    """The fewest slots with enough of the choices: of a list learned on other text, LRU and the optimum."""
    if "slots_needed" not in run.tables:  # older runs
        return []
    rows = together(run.table("slots_needed")).set_index("policy")
    most, share = int(rows["n_experts"].max()), float(rows["share"].iloc[0])

    def words(policy: str, random: str) -> str:
        row = rows.loc[policy]
        too_few = f"more than {int(row['replayed'])}" if row["replayed"] < most else "none suffices"
        found, chance = (
            too_few if pd.isna(row[name]) else str(int(row[name])) for name in ("slots", "chance")
        )
        return f"{found} ({random}: {chance})"

    text = (
        f"Slots per layer for {100 * share:.0f} % of choices, of {most} experts: list learned on other text "
        f"{words('static', 'random list')}; LRU {words('lru', 'random routing')}; optimum from an empty "
        f"cache {words('belady', 'random routing')}."
    )
    return [Finding(text, tab="deployment")]


def prefetch_summary(run: Run) -> tuple[list[KeyNumber], list[str]]:
    rows = together(run.table("prefetch"))
    least = rows[rows["budget"] == rows["budget"].min()].set_index("predictor")
    best = least.drop(index="static_in_sample").sort_values("recall").iloc[-1]
    name = PREDICTOR_STYLES[str(best.name)]["name"]
    recall, chance = 100 * float(best["recall"]), 100 * float(best["chance"])
    key = KeyNumber("Best prefetch recall", recall, chance, "%", name, "random", 100.0)
    words = prefetch_words(rows, int(best["budget"]))
    return [key], [Finding(f"Prefetch recall, {words}", tab="deployment")]


def placement_summary(run: Run) -> tuple[list[KeyNumber], list[str]]:
    rows = run.table("placement")
    whole = together(rows).set_index("method")
    devices, copies = int(rows["devices"].iloc[0]), int(rows["redundant"].iloc[0])
    if devices == 1:
        return [], []
    if one_each({name: run.table(name) for name in ("placement", "residency")}):
        return [], [Finding(f"Placement on {devices} devices: {NOTHING_TO_PLACE}.", tab="deployment")]
    balanced, default, random = (
        float(whole.loc[method, "balancedness"]) for method in ("balanced", "contiguous", "random")
    )
    key = KeyNumber(
        f"Mean/max load, {devices} devices", balanced, random, "", "balanced placement", "random", 1.0
    )
    where = f"{devices} devices" + (f", {copies} redundant per layer" if copies else "")
    findings: list[str] = [
        Finding(
            f"Placement on {where}: mean over max load {number(balanced)}, {number(default)} with experts in "
            f"order (random: {number(random)}; optimum: 1).",
            tab="deployment",
        ),
        Finding(
            f"Remote devices per token and layer: {method_words(rows, 'cross_device')}.",
            tab="deployment",
        ),
    ]
    return [key], findings


def coverage_summary(run: Run) -> tuple[list[KeyNumber], list[str]]:
    rows = run.table("coverage_curve")
    whole = (
        rows[(rows["domain"] == "") & ~rows["extrapolated"].astype(bool)].sort_values("documents").iloc[-1]
    )
    experts, name = int(whole["experts"]), f"Experts with {int(whole['minimum'])} tokens"
    key = KeyNumber(name, experts - int(whole["below"]), unit=f"of {experts:,}", most=float(experts))
    return [key], [Finding(f"Coverage: {coverage_words(rows)}", tab="deployment", colour="coverage")]


def measures(run: Run) -> list[Measure]:
    """Tokens per expert; experts below the minimum are crossed out where they are the exception."""
    rows = run.table("coverage")
    rows = rows[rows["domain"] == ""]
    frame = rows.rename(columns={"tokens": "value", "below": "mark"})
    minimum, chance = int(rows["minimum"].iloc[0]), number(float(rows["chance"].mean()))
    few = rows["below"].mean() < 0.5
    crossed = f"; crossed out below {minimum}" if few else f"; most have fewer than {minimum}"
    caption = f"Tokens per expert{crossed} (all experts alike: {chance})."
    frame = frame[["layer", "expert", "value", "chance", *(["mark"] if few else [])]]
    return [Measure("coverage", "Tokens per expert", frame, "tokens", caption)]


def sections(run: Run, selection: Selection) -> list[Section]:
    tables = all_rows(run, selection)
    parts = []
    if "residency" in tables:
        parts = [residency_section(tables), prefetch_section(tables), placement_section(tables)]
    return [*parts, coverage_section(tables), export_section(run)]


def drawable(specs: Sequence[FigureSpec], tables: Tables) -> list[tuple[FigureSpec, Tables]]:
    return [(spec, tables) for spec in specs if spec.can_draw(tables)]


def residency_section(tables: Tables) -> Section:
    rows = tables["residency"]
    skipped = {"layer", "layer_name", "layer_slots", "n_experts", "tokens", "choices"}
    columns = [
        name
        for name in TABLES["residency"].columns
        if name not in skipped and together(rows)[name].notna().any()
    ]
    return Section(
        "caches",
        "Expert caches",
        "One cache per layer, replayed choice by choice in the order of the trace. Lists are learned on "
        "other documents than those they are tested on.",
        drawable(RESIDENCY, {"residency": rows}),
        [table_payload(TABLES["residency"], together(rows), columns, "All layers together")],
    )


def prefetch_section(tables: Tables) -> Section:
    rows = tables["prefetch"]
    columns = ["predictor", "budget", "tokens", "recall", "low", "high", "chance"]
    columns = [name for name in columns if rows[name].notna().any()]
    return Section(
        "prefetch",
        "Prefetching",
        "How many of a token's experts can be named before the layer's router runs.",
        drawable(PREFETCH, {"prefetch": rows}),
        [table_payload(TABLES["prefetch"], together(rows), columns, "All layers together")],
    )


def placement_section(tables: Tables) -> Section:
    rows = tables["placement"]
    columns = ["method", "balancedness", "batch_balancedness", "cross_device", "cross_node"]
    if one_each(tables):
        return Section("placement", "Placement on devices", f"{capital(NOTHING_TO_PLACE)}.")
    return Section(
        "placement",
        "Placement on devices",
        "Every layer's experts on devices: how evenly they share the load, and how many devices a token is "
        "sent to. Placements that learn are tested on other documents.",
        drawable(PLACEMENT, {"placement": rows}),
        [table_payload(TABLES["placement"], together(rows), columns, "All layers together")],
    )


def coverage_section(tables: Tables) -> Section:
    least = tables["coverage"].sort_values(["tokens", "layer", "expert"]).head(LEAST_USED)
    columns = ["domain", "layer", "expert", "tokens", "documents", "documents_needed"]
    return Section(
        "coverage",
        "Coverage of experts",
        "Whether the text reached every expert: an expert that few tokens chose is calibrated, quantised or "
        "pruned on little evidence.",
        drawable(COVERAGE, tables),
        [table_payload(TABLES["coverage"], least, columns, f"The {LEAST_USED} least used experts")],
    )


def export_section(run: Run) -> Section:
    """The files for servers and trainers, and who reads them."""
    known = {
        "sglang": "SGLang, --init-expert-location FILE",
        "vllm_experimental": "vLLM: experts per place and MoE layer; experimental, no release reads it",
        "vllm_ascend": "vllm-ascend, expert_map_path",
        "hot": "offloading: experts per layer by falling use",
        "esft": "ESFT, expert configuration for fine-tuning",
    }
    facts = {
        f"exports/{name}": next(text for start, text in known.items() if name.startswith(start))
        for name in run.info["exports"]
    }
    text = "Written into the run folder, learned on all documents."
    return Section("exports", "Files for servers and trainers", text, facts=facts)


def guide(run: Run) -> list[str]:
    return [
        "An expert cache holds some experts per layer in fast memory; a choice of another expert loads it. "
        "LRU evicts the least recently used expert, LFU the least often used one. Belady's rule evicts the "
        "expert that is needed last: it knows the future, and no policy with the same start beats it.",
        "Whatever is learned is tested on other documents: each half of the documents (drawn by seed) is "
        "tested with what the other half taught. A single document is learned from its first half and tested "
        "on its second.",
    ]
