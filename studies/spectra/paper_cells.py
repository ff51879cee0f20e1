"""Cells of the page "Results": numbers with their intervals, or why there is none."""

from __future__ import annotations

import math
from typing import Any

import paper_results as numbers
from paper_results import NOT_RUN, Estimate

from moescope.lab.study_statistics import UNTRAINED
from moescope.plotting.style import listed
from moescope.verb import Payload, Section, Tables

TAB = "results"
Heads = list[tuple[str, str, str]]


def section(anchor: str, title: str, text: str, *tables: Payload, **more: Any) -> Section:
    return Section(f"results-{anchor}", title, text, tables=list(tables), tab=TAB, **more)


def cell(found: Estimate | None, decimals: int = 3, scale: float = 1.0, chance: bool = True) -> str:
    """Return "mean ± half (chance)"; a number without seeds is not run."""
    if found is None:
        return NOT_RUN
    text = minus(f"{scale * found.mean:.{decimals}f}")
    if math.isfinite(found.half):
        text += f" ± {scale * found.half:.{decimals}f}"
    if chance and math.isfinite(found.chance):
        text += f" ({minus(f'{scale * found.chance:.{decimals}f}')})"
    return text


def minus(text: str) -> str:
    return text.replace("-", "−")


def percent(value: float, decimals: int = 1) -> str:
    return minus(f"{100 * value:.{decimals}f} %")


def absent(tables: Tables, arm: str) -> str:
    """Return why an arm has no number: failed, or not run; empty if it has some."""
    if arm in numbers.finished_arms(tables):
        return ""
    runs = tables.get("study_runs")
    status = [] if runs is None else list(runs.loc[runs["arm"] == arm, "status"])
    if "failed" in status:
        return "failed"
    return UNTRAINED if "done" in status else NOT_RUN


def arm_cell(tables: Tables, arm: str, found: Estimate | None, *format_: Any, **more: Any) -> str:
    return absent(tables, arm) or ("not measured" if found is None else cell(found, *format_, **more))


def reasons(tables: Tables, rows: list[tuple[str, str]]) -> str:
    """Say which rows have no numbers and why; empty if all have."""
    known = set(tables["study_runs"]["arm"]) if tables else set()
    by_reason: dict[str, list[str]] = {}
    for title, arm in rows:
        why = absent(tables, arm)
        if why == NOT_RUN and arm not in known:
            why = f"not run, as no study on this page has an arm {arm!r}"
        elif why == NOT_RUN:
            why = "not run, as the study is not finished"
        if why:
            by_reason.setdefault(why, []).append(title)
    if not known and rows:
        return "Not run: no study on this page has these arms."
    # one sentence per reason; arms without a study have a reason each
    lacking = [titles[0] for why, titles in by_reason.items() if "has an arm" in why]
    others = [f"{listed(titles)}: {why}." for why, titles in by_reason.items() if "has an arm" not in why]
    start = f"Not run: {listed(lacking)}; no study on this page has such an arm. " if lacking else ""
    return f"{start}{' '.join(others)}".strip()


def p_text(p: float) -> str:
    if not math.isfinite(p):
        return ""
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"
