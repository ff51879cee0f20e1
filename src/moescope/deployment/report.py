"""Report on deploy: key numbers, findings, sections of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd

from moescope.deployment.figures import COVERAGE, PLACEMENT, PREFETCH, RESIDENCY
from moescope.deployment.tables import TABLES
from moescope.plotting.marks import Lines, Mark
from moescope.plotting.style import capital, counted, listed
from moescope.reporting.findings import Number, Said, key_numbers, say_all
from moescope.reporting.pack import plain
from moescope.reporting.views import drawable, shown_table
from moescope.run import Run
from moescope.verb import Finding, Section, Selection, Summary, Tables, all_rows

NOTHING_TO_PLACE = "one expert per device: nothing to place"
LED = ("lru", "static", "belady")  # policies of the leading figure
SLIDER = ("hit_rate", "loads_per_token", "ms_per_token", "resident_bytes")
LEAST_USED = 20  # rows of the table of experts
LRU, STATIC, IN_SAMPLE, BEST, SPLIT = (
    f"policy == '{name}' and lead" for name in ("lru", "static", "static_in_sample", "belady", "lru_split")
)
LEARNED = "predictor != 'static_in_sample' and budget == budget.min()"
# fmt: off
NUMBERS = [
    Number("residency", "hit_rate", where=LRU, name="LRU hit rate, {slots} slots"),
    Number("prefetch", "recall", where=LEARNED, pick="best", name="Best prefetch recall: {predictor}"),
    Number("placement", "balancedness", where="method == 'balanced' and devices > 1", name="Mean/max load, {devices} devices"),
    Number("coverage", "tokens", where="domain == ''", only="below", name="Experts with fewer than {minimum} tokens", of="experts"),
]
FINDINGS = [
    Said("residency", "hit_rate", where=LRU, text="Expert cache: {slots} of {n_experts} experts per layer hold {value}{interval} of choices with LRU ({chance}; best possible: {optimum}).", figure="cache_curve"),
    Said("residency", "hit_rate", where=STATIC, text="Static list: the {slots} experts per layer used most on other text hold {value}{interval} of choices ({chance}).", figure="cache_curve"),
    Said("residency", "loads_per_token", where=LRU, text="Loading with {slots} slots and LRU: {value} experts per token ({chance}).", figure="cache_curve"),
    Said("residency", "hit_rate", where=SPLIT, text="Slots split over layers by what they gain hold {value}{interval} of choices, equal slots {uniform}.", figure="cache_curve"),
    Said("prefetch", "recall", where=LEARNED, pick="best", group="predictor", text="Prefetch recall, {budget} experts named: {groups} ({chance}).", figure="prefetch_curve"),
    Said("placement", "balancedness", where="devices > 1", pick="best", group="method", text="Placement on {devices} devices, mean over max load: {groups} ({chance}).", figure="placement_balance"),
    Said("placement", "cross_device", where="devices > 1", pick="best", group="method", text="Remote devices per token, all layers: {groups}.", figure="placement_traffic"),
    Said("coverage", "tokens", where="domain == ''", only="below", pick="smallest", text="Coverage: {count} of {total} experts have fewer than {minimum} tokens; fewest {place}, {value} ({chance}).", otherwise="Coverage: all {total} experts have at least {minimum} tokens.", figure="coverage_experts"),
]
# fmt: on


def title(run: Run) -> str:
    """The name of the trace."""
    return f"serving {Path(run.info['runs'][0]['path']).name}"


def summary(run: Run) -> Summary:
    """Coverage, key numbers and findings, each with its chance level."""
    info = run.info["tokens"]
    coverage = [
        f"{counted(info['tokens'], 'token')} of {info['phase']}, {counted(info['documents'], 'document')}, "
        f"{counted(info['layers'], 'MoE layer')}, {info['k']} experts per token"
    ]
    tables = all_rows(run, Selection())
    nothing: list[str] = []
    if one_each(tables):
        devices = int(tables.pop("placement")["devices"].iloc[0])
        nothing = [Finding(f"Placement on {devices} devices: {NOTHING_TO_PLACE}.", tab="deployment")]
    findings = [*say_all(FINDINGS, tables, TABLES), *nothing]
    text = needed_slots(tables) or findings[0]
    verdict = Finding(text, figure="cache_curve" if "residency" in tables else "coverage_experts")
    lead = lead_sections(tables) if "residency" in tables else []
    return Summary(coverage, findings, key_numbers(NUMBERS, tables, TABLES), verdict=verdict, lead=lead)


def lead_sections(tables: Tables) -> list[Section]:
    """Hit rate against slots, what a number of slots costs, and below it layers and prefetching."""
    curve = replace(cast(Lines, RESIDENCY[0]), y="hit_rate", pages="", where=f"policy in {LED}")
    rows = tables["residency"]
    lru = rows[rows["layer"].isna() & (rows["policy"] == "lru")].sort_values("slots")
    names = [name for name in SLIDER if lru[name].notna().any()]
    payload: dict[str, Any] = {"slots": lru["slots"].tolist(), "n": int(lru["n_experts"].max()), "rows": []}
    for name in names:
        column = TABLES["residency"].quantity(name)
        words = {"name": column.label, "unit": column.unit, "chance_label": column.chance_label}
        chance = plain(lru[column.chance].tolist()) if isinstance(column.chance, str) else None
        payload["rows"].append({**words, "values": plain(lru[name].tolist()), "chance": chance})
    first = Section("lead", "", figures=drawable([curve], tables), widget=("slots", payload))
    return [first, Section("lead-more", "", figures=drawable([RESIDENCY[1], PREFETCH[0]], tables))]


def one_each(tables: Tables) -> bool:
    """Return whether every device holds one expert."""
    if not {"placement", "residency"} <= set(tables):
        return False
    return bool(tables["placement"]["devices"].iloc[0] >= tables["residency"]["n_experts"].max())


def needed_slots(tables: Tables) -> str:
    """How many slots hold 80, 90 and 95 % of the choices: LRU, the best possible, and random routing."""
    rows = tables.get("slots_needed", pd.DataFrame())
    if rows.empty:
        return ""
    rows = rows[rows["layer"].isna()].sort_values("share")
    most = int(rows["n_experts"].max())

    def words(policy: str, column: str = "slots") -> str:
        mine = rows[rows["policy"] == policy]
        short = "none" if mine["replayed"].min() >= most else f"more than {int(mine['replayed'].min())}"
        return listed([short if pd.isna(value) else str(int(value)) for value in mine[column]])

    shares = listed([f"{100 * share:.0f}" for share in rows["share"].unique()])
    text = (
        f"{words('lru')} of {most} experts per layer must stay in fast memory for {shares} % hits with LRU "
        f"(random routing: {words('lru', 'chance')}; best possible: {words('belady')})."
    )
    lru = rows[rows["policy"] == "lru"]
    if (lru["slots"] >= lru["chance"]).all():
        text += " Random routing needs no more: this text gives a cache nothing to gain."
    return text


def sections(run: Run, selection: Selection) -> list[Section]:
    tables = all_rows(run, selection)
    parts = []
    if "residency" in tables:
        parts = [residency_section(tables), prefetch_section(tables), placement_section(tables)]
    return [*parts, coverage_section(tables), export_section(run)]


def residency_section(tables: Tables) -> Section:
    skipped = {"layer", "layer_name", "layer_slots", "n_experts", "tokens", "choices", "lead"}
    columns = [name for name in TABLES["residency"].columns if name not in skipped]
    text = (
        "One cache per layer, replayed choice by choice in the order of the trace. Lists are learned on other "
        "documents than those they are tested on."
    )
    return part("caches", "Expert caches", text, RESIDENCY, "residency", tables, columns)


def prefetch_section(tables: Tables) -> Section:
    columns = ["predictor", "budget", "tokens", "recall", "low", "high", "chance"]
    text = "How many of a token's experts can be named before the layer's router runs."
    return part("prefetch", "Prefetching", text, PREFETCH, "prefetch", tables, columns)


def placement_section(tables: Tables) -> Section:
    if one_each(tables):
        return Section("placement", "Placement on devices", f"{capital(NOTHING_TO_PLACE)}.")
    columns = ["method", "balancedness", "batch_balancedness", "cross_device", "cross_node"]
    text = (
        "Every layer's experts on devices: how evenly they share the load, and how many devices a token is "
        "sent to. Placements that learn are tested on other documents."
    )
    return part("placement", "Placement on devices", text, PLACEMENT, "placement", tables, columns)


def part(
    anchor: str, title: str, text: str, specs: list[Mark], name: str, tables: Tables, columns: list[str]
) -> Section:
    """Figures of a table, and its rows of all layers together."""
    rows = tables[name]
    whole = shown_table(TABLES[name], rows[rows["layer"].isna()], columns, "All layers together")
    return Section(anchor, title, text, drawable(specs, tables), [whole])


def coverage_section(tables: Tables) -> Section:
    least = tables["coverage"].sort_values(["tokens", "layer", "expert"]).head(LEAST_USED)
    columns = ["domain", "layer", "expert", "tokens", "documents"]
    return Section(
        "coverage",
        "Coverage of experts",
        "Whether the text reached every expert: an expert that few tokens chose is calibrated, quantised or "
        "pruned on little evidence.",
        drawable(COVERAGE, tables),
        [shown_table(TABLES["coverage"], least, columns, f"The {LEAST_USED} least used experts")],
    )


def export_section(run: Run) -> Section:
    """The files for servers and trainers, and who reads them."""
    known = {
        "sglang": "SGLang, --init-expert-location FILE",
        "vllm_experimental": "vLLM: experts per place and MoE layer; experimental, no release reads it",
        "hot": "offloading: experts per layer by falling use",
        "esft": "ESFT, expert configuration for fine-tuning",
    }
    facts = {
        f"exports/{name}": next((text for start, text in known.items() if name.startswith(start)), "")
        for name in run.info["exports"]
    }
    text = "Written into the run folder, learned on all documents."
    return Section("exports", "Files for servers and trainers", text, facts=facts)


def guide(run: Run) -> list[str]:
    return [
        "An expert cache holds some experts per layer in fast memory; a choice of another expert loads it. "
        "LRU evicts the least recently used expert, LFU the least often used one. Belady's rule starts "
        "with the experts needed first and leaves out the one needed last: it knows the future, and no policy "
        "with the same slots beats it.",
        "Whatever is learned is tested on other documents: each half of the documents (drawn by seed) is "
        "tested with what the other half taught. A single document is learned from its first half, which also "
        "fills the caches, and every policy is tested on its second.",
    ]
