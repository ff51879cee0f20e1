"""Case studies and failure modes of the page "Results"."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import paper_results as numbers
from paper_cells import Heads, cell, percent, section
from paper_results import BASELINE, FIXED_CHOICES, METHOD, NOT_RUN, ROUTERS, Estimate, over_seeds

from moescope.plotting.style import listed
from moescope.reporting.pack import plain_table
from moescope.verb import Section, Tables

SPANS_OF = 2  # documents
AMBIGUOUS = "Ambiguous context"
RARE = 0.1  # of the mean load
EARLY = 0.1  # of the steps


def spans_section(tables: Tables) -> Section:
    heads: Heads = [
        ("study_spans.document", "document", "text"),
        ("study_spans.first", "tokens", "text"),
        ("study_spans.domain", "domain", "text"),
        ("study_spans.text", "text begins", "text"),
        ("study_spans.share", "Switch Top-2", "text"),
        ("study_spans.share", "SPECTRA", "text"),
    ]
    rows: list[list[Any]] = []
    spans = tables.get("study_spans", pd.DataFrame(columns=["arm", "seed", "document", "first"]))
    layer = ""
    if len(spans):
        spans = spans[spans["seed"] == spans["seed"].min()]
        layer = f" in layer {int(spans['layer'].iloc[0])}"
        for (document, first), group in spans[spans["document"] < SPANS_OF].groupby(["document", "first"]):
            one = group.iloc[0]
            switch = " ← switch" if switches_here(spans, document, first) else ""
            shares = [span_experts(group, arm) for arm in (BASELINE, METHOD)]
            place = f"{first + 1} to {int(one['last']) + 1}"
            rows.append([f"{document + 1}", place, f"{one['domain']}{switch}", one["text"], *shares])
    text = (
        f"Documents that switch domain in the middle: experts with their shares of each span's "
        f"choices{layer}, first seed (even loads: 1/n each). "
    )
    text += "" if rows else "Not run: no study on this page has stored spans; they need two domains."
    table = plain_table("results_spans", "6.7 Case studies", heads, rows)
    return section("spans", "Case studies", text.strip(), table)


def switches_here(spans: pd.DataFrame, document: Any, first: Any) -> bool:
    of_document = spans[spans["document"] == document].drop_duplicates("first").sort_values("first")
    domain = of_document.set_index("first")["domain"]
    changed = domain != domain.shift(fill_value=domain.iloc[0])
    return bool(changed.get(first, False))


def span_experts(group: pd.DataFrame, arm: str) -> str:
    rows = group[group["arm"] == arm].sort_values("share", ascending=False)
    return ", ".join(f"E{row.expert} {100 * row.share:.0f} %" for row in rows.itertuples()) or NOT_RUN


def failures_section(tables: Tables) -> Section:
    heads: Heads = [
        ("mode", "failure mode", "text"),
        ("arm", "router", "text"),
        ("frequency", "frequency (chance)", "sentence"),
        ("impact", "impact", "sentence"),
    ]
    rows: list[list[Any]] = []
    lacking: set[str] = set()
    for title, arm in (row for row in ROUTERS if row[1] in (METHOD, BASELINE, FIXED_CHOICES)):
        for mode, found in failure_modes(tables, arm).items():
            if arm == FIXED_CHOICES and (mode != AMBIGUOUS or found is None):
                continue
            rows.append([mode, title, *(found or (NOT_RUN, NOT_RUN))])
            if found is None:
                lacking.add(mode)
    rows.sort(key=lambda row: list(MODES).index(row[0]))
    text = "Means over seeds with 95 % intervals. " + " ".join(
        f"{mode}: {what}." for mode, what in MODES.items()
    )
    why = [f"{mode}: not run; {NEEDS[mode]}." for mode in MODES if mode in lacking]
    table = plain_table("results_failures", "6.8 Failure modes", heads, rows)
    return section("failures", "Failure modes", " ".join([text, *why]), table)


MODES = {
    AMBIGUOUS: "documents that switch domain, against the same tokens after another text of their domain; a "
    "hash of the token, whose choices cannot change, is the reference",
    "Out of distribution": "bits per byte on a domain that was not trained on, minus those of the dense "
    "model",
    "Early oscillation": "change of usage between logged steps in the first tenth of training over that in "
    "the last half (learning rates differ)",
    "Rare experts": "experts below a tenth of the mean load, and the choices they get",
}
NEEDS = {
    AMBIGUOUS: "it needs two domains",
    "Out of distribution": "it needs validation text of a domain without training text",
    "Early oscillation": "it needs usage at four logged steps or more",
    "Rare experts": "it needs loads in evaluation",
}


def failure_modes(tables: Tables, arm: str) -> dict[str, tuple[str, str] | None]:
    """Return mode -> (frequency, impact), None where nothing was measured."""
    ambiguous, distant, early, rare = MODES
    found: dict[str, tuple[str, str] | None] = dict.fromkeys(MODES)
    if mixed := mixed_documents(tables, arm):
        share, lost, kept = mixed
        found[ambiguous] = (
            f"{cell(share, 0, 100.0, chance=False)} % of documents lose",
            f"{cell(lost, 3, chance=False)} nats per token; choices kept "
            f"{cell(kept, 1, 100.0, chance=False)} points",
        )
    if outside := numbers.unseen_bits(tables, arm):
        words = [f"{name}: {cell(one, 3, chance=False)} bits per byte" for name, one in outside.items()]
        found[distant] = ("all tokens of " + listed(list(outside)), "; ".join(words))
    moved = turnover(tables, arm)
    if moved is not None and (ratio := numbers.over_seeds(moved["early"] / moved["late"])):
        found[early] = (
            f"{cell(ratio, 1, chance=False)} times the late change",
            f"{percent(float(moved['early'].mean()))} of the load moves per logged step, late "
            f"{percent(float(moved['late'].mean()))}",
        )
    if scarce := rare_experts(tables, arm):
        experts, choices = scarce
        found[rare] = (
            f"{cell(experts, 1, 100.0, chance=False)} % of experts (balanced: 0)",
            f"{cell(choices, 2, 100.0, chance=False)} % of choices",
        )
    return found


# --- numbers


def mixed_documents(tables: Tables, arm: str) -> tuple[Estimate, Estimate, Estimate] | None:
    """Return for documents that switch domain: share that lose, nats lost, and change of the choices kept.

    All against the same tokens after another text of their own domain.
    """
    rows = tables.get("study_mixed")
    rows = None if rows is None else rows[rows["arm"] == arm]
    if rows is None or rows.empty:
        return None
    lost = rows["loss_other"] - rows["loss_same"]
    kept = rows["kept_other"] - rows["kept_same"]
    found = [
        over_seeds(values.groupby(rows["seed"]).mean(), level)
        for values, level in (((lost > 0).astype(float), math.nan), (lost, 0.0), (kept, 0.0))
    ]
    first, second, third = (one or Estimate(math.nan, math.nan, 0) for one in found)
    return first, second, third


def turnover(tables: Tables, arm: str) -> pd.DataFrame | None:
    """Return per seed: the change of usage between logged steps, early and late, mean over layers.

    Change: half the sum over experts of |share − share before|. Early is the first tenth of the steps, at
    least the first change; late the last half.
    """
    rows = tables.get("study_usage")
    rows = None if rows is None else rows[rows["arm"] == arm]
    if rows is None or rows.empty:
        return None
    wide = rows.pivot_table(index=["seed", "layer", "step"], columns="expert", values="share")
    moved = wide.groupby(level=["seed", "layer"]).diff().abs().sum(axis=1, min_count=1).dropna() / 2
    by_step = moved.groupby(level=["seed", "step"]).mean().unstack("seed")
    if len(by_step) < 4:
        return None
    last = int(rows["step"].max())
    early = by_step[(by_step.index <= EARLY * last) | (by_step.index == by_step.index[0])]
    return pd.DataFrame({"early": early.mean(), "late": by_step[by_step.index > last / 2].mean()})


def rare_experts(tables: Tables, arm: str) -> tuple[Estimate, Estimate] | None:
    """Return the share of experts below a tenth of the mean load, and the share of choices they get."""
    rows = tables.get("study_loads")
    rows = None if rows is None else rows[(rows["arm"] == arm) & ~rows["domain"].isin(numbers.unseen(tables))]
    if rows is None or rows.empty:
        return None
    loads = rows.groupby(["seed", "layer", "expert"])["tokens"].sum()
    mean = loads.groupby(level=["seed", "layer"]).transform("mean")
    rare = loads < RARE * mean
    share = rare.groupby(level="seed").mean()
    choices = loads.where(rare, 0).groupby(level="seed").sum() / loads.groupby(level="seed").sum()
    first, second = over_seeds(share, 0.0), over_seeds(choices, 0.0)
    return (first, second) if first and second else None
