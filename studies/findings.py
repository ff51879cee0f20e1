"""Pages made of the results of studies: findings.md, results.md and routers.md.

Their expressions are evaluated when the site is built. Claims and their verdicts are those of
studies/*/results.toml, judged together; tables are read from studies/*/run. A study that was not run has no
results: its numbers are
"not run".
"""

from __future__ import annotations

import html
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined

STUDIES = Path(__file__).parent
sys.path[:0] = [str(STUDIES / "spectra"), str(STUDIES)]

import paper_results as numbers  # noqa: E402
from findings_figures import chart  # noqa: E402
from paper_cells import cell as estimate_text  # noqa: E402
from paper_cells import p_text  # noqa: E402
from paper_conditions import (  # noqa: E402
    at_baseline_rates,
    conditions,
    size_rates_text,
    stalled_text,
)
from paper_page import all_sections, baseline_cells, sources  # noqa: E402
from paper_results import BASELINE, LONGER, METHOD, NOT_RUN, Estimate, Results  # noqa: E402
from paper_some import RUNS, as_published, some_studies, steps_to_learn  # noqa: E402

from moescope.lab.claims import CONFIRMED, REFUTED, UNDECIDED, ClaimsFile, judge, read_claims  # noqa: E402
from moescope.lab.report_claims import verdict_counts  # noqa: E402
from moescope.lab.report_study import TARGET_CV, described, study_tables  # noqa: E402
from moescope.lab.study_statistics import MIN_SEEDS  # noqa: E402
from moescope.plotting.style import counted, listed, number  # noqa: E402
from moescope.run import Run  # noqa: E402
from moescope.statistics import LEVEL  # noqa: E402
from moescope.verb import Payload, Tables  # noqa: E402

FILES = tuple(STUDIES / name / "results.toml" for name in ("spectra", "hash", "some"))
CLOSE = 1.25  # times the level, or its inverse
PAGES = ("findings.md", "results.md", "routers.md")
METHODS = "conditions"  # the section that the pages show at their end
HYPOTHESES = "Hypotheses"


@cache
def read_results(folder: Path = STUDIES) -> dict[str, Tables]:
    """Return the tables of every study that was run."""
    runs = {file.parent.parent.name: Run.load(file.parent) for file in sorted(folder.glob("*/run/run.json"))}
    return {name: described(study_tables(run), run) for name, run in runs.items()}


@cache
def claims_files() -> list[ClaimsFile]:
    return [read_claims(file) for file in FILES]


def judged_results(studies: dict[str, Tables]) -> Results:
    return Results.of(studies, judge(claims_files(), studies))


def render(template: str, studies: dict[str, Tables]) -> str:
    """Return the page."""
    results = judged_results(studies)
    calls: dict[str, Callable[..., str]] = {
        "headline": lambda: headline(results),
        "claims": lambda group: claims_table(results, group),
        "moving": lambda: moving_choices(results),
        "close": lambda: close_claims(results),
        "unfinished": lambda: unfinished_words(studies),
        "stalled": lambda: stalled_words(results),
        "plateau": lambda: plateau_words(results),
        "published": lambda: published_words(results),
        "checks": lambda: checks_table(results),
        "counts": lambda: counts_table(results),
        "whose": whose,
        "chart": lambda anchor: chart(anchor, results),
        "sections": lambda: "\n\n".join(
            section_text(one, results)
            for one in all_sections(results)
            if one.anchor.removeprefix("results-") != METHODS
        ),
        "conditions": lambda: cell(conditions(results)),
        "routers": lambda: routers_table(results),
        "sources": lambda: sources(results).strip() or "No study was run.",
    }
    # the template is ours, and the page is Markdown: nothing to escape
    page = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    return page.from_string(template).render(**calls)


def whose(group: str) -> str:
    """Return whose claims a group has, from its file."""
    file = next(one for one in claims_files() if group == one.title or group in one.groups)
    return file.text if group == file.title else file.groups[group]


def of_group(results: Results, group: str) -> pd.DataFrame:
    rows = results.judged
    return rows[(rows["group"] == group) & (rows["check"] == "")]


def headline(results: Results) -> str:
    """Return what came out, one line per answer."""
    lines, tables = [], results.main
    if not tables:
        return "No study was run."
    arms = [arm for arm in numbers.compared_arms(tables) if arm in numbers.finished_arms(tables)]
    losses = {arm: numbers.run_value(tables, arm, "validation_loss") for arm in arms}
    known = {arm: one.mean for arm, one in losses.items() if one}
    best = min(known, key=lambda arm: known[arm], default="")
    if best and BASELINE in known:
        words = f"**Lowest loss:** `{best}`, {known[best]:.3f} nats per token"
        if best != BASELINE:
            found = numbers.above_baseline(results, best)
            words += f", against {known[BASELINE]:.3f} of `{BASELINE}`"
            words += tested_words(found)
        lines.append(f"{words}.{longer_words(results, best)}")
    claims = of_group(results, HYPOTHESES).set_index("claim")
    found = results.tests.get((numbers.PARTS["main"], METHOD, BASELINE))
    if found:
        ways = {
            CONFIRMED: "predicts better than",
            REFUTED: "predicts worse than",
            UNDECIDED: "is not distinguishable from",
        }
        verdict = claims.loc["H1", "verdict"]
        cost = [
            f"{name} {ratio:.2f} times" for name in COSTS if (ratio := claims.loc[name, "estimate"]) == ratio
        ]
        lines.append(
            f"**SPECTRA** {ways.get(verdict, f'({verdict}) against')} `{BASELINE}`{tested_words(found)}"
            + larger_words(results)
            + (f" Cost over `{BASELINE}`: {', '.join(cost)}." if cost else "")
        )
    counts = verdict_counts(claims[claims.index.str.fullmatch(r"H\d")])
    lines.append(f"**Hypotheses of the routing paper:** {counts}.")
    return "\n".join(f"- {line}" for line in lines)


COSTS = ("FLOPs", "block time")  # claims that H4 rests on


def larger_words(results: Results) -> str:
    """Return how SPECTRA compares in models larger than the smallest: at its own rates, and at equal ones."""
    sizes = numbers.axis_values(results.sizes, "size")[1:]
    own = {}
    for size in sizes:
        arms = (numbers.arm_at(results.sizes, router, "size", size) for router in (METHOD, BASELINE))
        own[size] = losses_apart(*((results.sizes, arm) for arm in arms))
    known = {size: one for size, one in own.items() if one and abs(one.mean) > one.half}
    if not known:
        return "."
    rates = size_rates_text(results.sizes)
    where = "In larger models" + (", at learning rates tuned at the smallest," if rates else "")
    text = f". {where} it is {by_size(known)}"
    found = {size: losses_apart(one, other) for size, one, other in at_baseline_rates(results)}
    equal = {size: one for size in sizes if (one := found.get(size)) and one.seeds >= MIN_SEEDS}
    if not rates or not equal:
        return f"{text} (not corrected)."
    apart = any(abs(one.mean) > one.half for one in equal.values())
    differences = listed(
        [f"{estimate_text(one, 3, chance=False)} (size {size})" for size, one in equal.items()]
    )
    end = "" if apart else ": not distinguishable"
    return (
        f"{text}; at those of `{BASELINE}` for both its loss differs by {differences}{end} (not corrected)."
    )


def losses_apart(arm: tuple[Tables, str | None], other: tuple[Tables, str | None]) -> Estimate | None:
    """Return the arm's loss minus that of the other."""
    return numbers.paired(*(numbers.by_seed(*one, "validation_loss") for one in (arm, other)))


def by_size(found: dict[str, Estimate]) -> str:
    return listed([f"{difference_words(one)} (size {size})" for size, one in found.items()])


def longer_words(results: Results, arm: str) -> str:
    """Return how the arm compares with the baseline in the studies that train both four times as long."""
    rows = results.judged
    rows = rows[
        (rows["check"] == "") & (rows["arm"] == f"{arm}{LONGER}") & (rows["than"] == f"{BASELINE}{LONGER}")
    ]
    words = [
        f"{difference_words(results.tests[one.study, one.arm, one.than])} in `{one.study}` ({one.verdict})"
        for one in rows.itertuples()
        if (one.study, one.arm, one.than) in results.tests
    ]
    return f" After four times the steps, on repeated text, it is {listed(words)}." if words else ""


def moving_choices(results: Results) -> str:
    """Return how many of its choices the baseline keeps between checkpoints, also in longer trainings."""
    words = []
    for tables in results.others:
        kept = [numbers.run_value(tables, arm, "consistency") for arm in (BASELINE, f"{BASELINE}{LONGER}")]
        shares = [f"{100 * one.mean:.0f} %" for one in kept if one]
        if len(shares) == len(kept):
            words.append(
                f"{shares[0]}, after four times the steps {shares[1]} (`{numbers.study_name(tables)}`)"
            )
    return "; ".join(words) or NOT_RUN


def stalled_words(results: Results) -> str:
    """Return how many trainings of SoME's runs stalled, by study and arm."""
    words = []
    for tables in some_studies(results):
        counts = {arm: stalled_text(tables, arm) for arm in dict.fromkeys(numbers.trainings(tables)["arm"])}
        found = ", ".join(f"{arm} {text}" for arm, text in counts.items() if text)
        words.append(f"{found or 'none'} in `{numbers.study_name(tables)}`")
    return "; ".join(words) or NOT_RUN


def published_words(results: Results) -> str:
    """Return the final losses of the published runs, where they stand beside ours."""
    if not some_studies(results):
        return NOT_RUN
    return ", ".join(f"{run} {one.losses[-1]:.4f}" for run, one in RUNS.items())


def plateau_words(results: Results) -> str:
    """Return after how many steps each arm has learned more than frequencies, trained without pads."""
    for tables in some_studies(results):
        steps = {} if as_published(tables) else steps_to_learn(tables)
        if steps:
            words = "; ".join(f"{arm} {text}" for arm, text in steps.items())
            return f"{words} (`{numbers.study_name(tables)}`)"
    return NOT_RUN


def unfinished_words(studies: dict[str, Tables]) -> str:
    """Return what holds while trainings are still to come; empty if all were run."""
    if not any(numbers.progress(tables, 0) for tables in studies.values()):
        return ""
    return (
        "A study of which trainings are still to come gives no verdict, and its tables show the seeds that "
        "all its arms have; once it is finished its tests join the correction, so a verdict close to the "
        "limit may still change. "
    )


def tested_words(found: Estimate | None) -> str:
    """Return the estimate, its corrected p and seeds, in brackets."""
    if found is None:
        return ""
    p = f", p (Holm) {p_text(found.p_adjusted)}" if math.isfinite(found.p_adjusted) else ""
    return f" ({difference_words(found)}{p}, {counted(found.seeds, 'seed')})"


def difference_words(found: Estimate) -> str:
    size = estimate_text(replace(found, mean=abs(found.mean)), 3, chance=False)
    return f"{'better' if found.mean < 0 else 'worse'} by {size}"


# --- tables

DECIMALS = 4


def claims_table(results: Results, group: str) -> str:
    """Return each claim with its verdict, number, p, seeds and reasons."""
    rows = []
    for one in of_group(results, group).to_dict("records"):
        known = one["estimate"] == one["estimate"]
        words = f", p (Holm) {p_text(one['p_holm'])}" if math.isfinite(one["p_holm"]) else ""
        words += f", {counted(one['seeds'], 'seed')}" if known else ""
        evidence = cell(f"{words}: {measure(one)}" + (f"; {one['why']}" if one["why"] else ""))
        amount = f"**{range_text(one)}**" if known else "no number"
        rows.append((cell(f"{one['claim']}: {one['text']}"), one["verdict"], f"{amount}{evidence}"))
    return table(("claim", "verdict", "evidence"), rows)


def range_text(row: dict[str, Any]) -> str:
    return estimate_text(Estimate(row["estimate"], (row["high"] - row["low"]) / 2, row["seeds"]), DECIMALS)


def measure(row: dict[str, Any]) -> str:
    """Return what a claim estimates, and in which study."""
    if row["estimand"] == "least":
        return f"weakest of {row['column']}"
    kind = "" if row["estimand"] == "difference" else f", {row['estimand'].replace('_', ' ')}"
    pair = f"{row['arm']} minus {row['than']}" if row["than"] else row["arm"]
    return f"{row['column'].replace('_', ' ')}{kind}, {pair} ({row['study']})"


def checks_table(results: Results) -> str:
    """Return the numbers of H1 to H3 elsewhere, one row per place."""
    rows = results.judged
    rows = rows[(rows["check"] != "") & rows["claim"].isin(["H1", "H2", "H3"])]
    wide = {
        place: {
            one["claim"]: range_text(one)
            for one in of.to_dict("records")
            if one["estimate"] == one["estimate"]
        }
        for place, of in rows.groupby("check", sort=False)
    }
    names = ("H1", "H2", "H3")
    heads = (
        "where",
        "H1: loss, nats per token",
        "H2: orthogonality of outputs",
        "H3: consistency beyond chance",
    )
    body = [
        (cell(place), *(of.get(name, "not compared") for name in names)) for place, of in wide.items() if of
    ]
    return f"**H1 to H3 elsewhere: SPECTRA minus Top-2 ± 95 %, not corrected**\n\n{table(heads, body)}"


def close_claims(results: Results) -> str:
    """Return the claims whose corrected p is within a quarter of the level, on either side."""
    rows = results.judged[results.judged["check"] == ""]
    near = rows["p_holm"].between(LEVEL / CLOSE, LEVEL * CLOSE)
    close = [f"{one.claim}: {one.text} ({p_text(one.p_holm)})" for one in rows[near].itertuples()]
    return cell("; ".join(close) or "none")


def counts_table(results: Results) -> str:
    """Return published claims that a count decides, without a test."""
    routers = {arm: numbers.collapse_rate(results.main, arm) for arm in numbers.compared_arms(results.main)}
    collapse = [f"{arm} {one.collapsed} of {one.layers}" for arm, one in routers.items() if one]
    arms = numbers.finished_arms(results.sweep)
    worst = [one for arm in arms if (one := numbers.worst_cv(results.sweep, arm))]
    known = [one.mean for one in worst]
    reached = sum(value < TARGET_CV for value in known)
    balance = f"{reached} of {len(known)} below {TARGET_CV:g}; lowest {min(known):.3g}" if known else NOT_RUN
    if known and (unfinished := numbers.progress(results.sweep, min(one.seeds for one in worst))):
        balance += f" ({unfinished})"
    rows = [
        ("Experts do not collapse", f"collapsed layers over all seeds: {'; '.join(collapse) or NOT_RUN}"),
        (
            "SPECTRA balances the load in evaluation",
            f"load CV of the worst layer, by setting of SPECTRA: {balance}",
        ),
    ]
    return table(("claim", "evidence: a count, no test"), [(claim, cell(text)) for claim, text in rows])


def routers_table(results: Results) -> str:
    """Return every arm of the main study: loss, cost, and how it routes."""
    tables = results.main
    arms = numbers.compared_arms(tables)
    rows = []
    for arm in sorted(arms, key=lambda arm: numbers.by_seed(tables, arm, "validation_loss").mean()):
        cells = [
            estimate_text(numbers.run_value(tables, arm, "validation_loss"), 4),
            *baseline_cells(results, arm),
            *(millions(tables, arm, name) for name in ("flops_per_token", "parameters_active")),
            *(
                estimate_text(found, 3, chance=False)
                if (found := numbers.run_value(tables, arm, name))
                else ""
                for name in ("load_cv", "dropped_share")
            ),
            str(len(numbers.by_seed(tables, arm, "validation_loss"))),
            str(numbers.failures(tables, arm)),
        ]
        rows.append((cell(arm), *cells))
    heads = (
        *("router", "loss", f"minus `{BASELINE}`", "p, Holm", "MFLOPs per token"),
        *("active parameters (millions)", "load CV", "dropped", "seeds", "failed"),
    )
    return table(heads, rows or [("all routers", *[NOT_RUN] * 7, "", "")])


def millions(tables: Tables, arm: str, column: str) -> str:
    values = numbers.by_seed(tables, arm, column)
    return f"{values.mean() / 1e6:.2f}" if len(values) else ""


def section_text(section: Any, results: Results) -> str:
    """Return a section of the page Results: text, figure, tables."""
    anchor = section.anchor.removeprefix("results-")
    parts = [f"## {section.title}", cell(section.text), chart(anchor, results)]
    parts += [f"**{one['title']}**\n\n{payload_table(one)}" for one in section.tables]
    return "\n\n".join(parts)


def payload_table(payload: Payload) -> str:
    heads = tuple(cell(column["title"]) for column in payload["columns"])
    return table(heads, [tuple(cell(value_text(value)) for value in row) for row in payload["rows"]])


def value_text(value: Any) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in lines)
        .replace(" ± ", "\u00a0±\u00a0")
        .replace(" %", "\u00a0%")
    )


def cell(text: str) -> str:
    """Text as it may stand in a cell: no column borders, no HTML, no emphasis by accident."""
    escaped = html.escape(str(text), quote=False)
    return "".join(f"\\{letter}" if letter in "|*_[]`" else letter for letter in escaped).rstrip(".") + (
        "." if str(text).rstrip().endswith(".") else ""
    )
