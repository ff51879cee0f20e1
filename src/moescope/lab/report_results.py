"""The page "Results": the tables of the routing paper's results section, filled from studies."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pandas as pd

from moescope.lab import results as numbers
from moescope.lab.figures_results import EXPERT_MAPS, QUOTA, USAGE
from moescope.lab.figures_study_curves import CURVE_FIGURES
from moescope.lab.results import (
    BASELINE,
    DENSE_ACTIVE,
    DENSE_TOTAL,
    METHOD,
    NOT_RUN,
    ROUTERS,
    VARIANTS,
    Estimate,
    Results,
    finished_arms,
)
from moescope.lab.study_statistics import UNTRAINED
from moescope.plotting.style import capital, listed, number
from moescope.reporting.pack import plain_table
from moescope.verb import FigureSpec, Payload, Section, Tables

TAB = "results"
PARTS = {  # component of the overhead table -> row of the published one
    "gru": "GRU forward",
    "projection": "Expression projection",
    "gram": "Gram matrix",
    "similarity": "Cosine similarity",
    "top_k": "Top-k selection",
    "experts": "Expert execution",
}
BASES = ("dense small, upcycled", "dense medium, upcycled", "existing MoE")
NO_HARNESS = (
    "Tasks of lm-eval: not run. Their data are not on a machine without network; the loss on held-out text "
    "stands for them."
)
SPANS_OF = 2  # documents
Heads = list[tuple[str, str, str]]


def results_sections(studies: list[Tables]) -> list[Section]:
    """Return the sections of the page: the answers, then tables and figures in the paper's order.

    Studies without the paper's method have no such page.
    """
    if not any(METHOD in finished_arms(tables) for tables in studies):
        return []
    results = Results.of(studies)
    return [
        hypotheses_section(results),
        significance_section(results),
        performance_section(results.main),
        variants_section(results.ablation),
        *figure_sections(results),
        overhead_section(results),
        bases_section(results.bases),
        experts_section(results.experts),
        stability_section(results.main),
        spans_section(results.main),
        failures_section(results.main),
    ]


def section(anchor: str, title: str, text: str, *tables: Payload, **more: Any) -> Section:
    return Section(f"results-{anchor}", title, text, tables=list(tables), tab=TAB, **more)


# --- cells


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


# --- answers


def hypotheses_section(results: Results) -> Section:
    found = numbers.hypotheses(results)
    heads: Heads = [
        ("hypothesis", "hypothesis", "sentence"),
        ("verdict", "verdict", "text"),
        ("number", "number that decides", "text"),
        ("study_comparisons.p_adjusted", "p, Holm", "text"),
        ("seeds", "seeds", "int"),
        ("measure", "what it is", "sentence"),
    ]
    rows = [
        [
            f"{one.name}: {one.claim}",
            one.verdict,
            cell(one.number, 4, chance=False),
            p_text(one.p_adjusted),
            (one.number.seeds or None) if one.number else None,
            one.measure + (f"; {one.why}" if one.why else ""),
        ]
        for one in found
    ]
    counts = Counter(one.verdict for one in found)
    verdicts = [f"{counts[name]} {name}" for name in ("confirmed", "refuted", "not testable") if counts[name]]
    text = (
        f"Of seven published hypotheses here: {listed(verdicts)}. Numbers are means over seeds with 95 % "
        "intervals; no effect: 0. H1 to H3, H6 and H7 are Holm-corrected together. Above 0 favours the "
        f"hypothesis, except for H4.{sources(results)}"
    )
    return section(
        "answers", "Hypotheses", text, plain_table("results_hypotheses", "6.10 Hypotheses", heads, rows)
    )


def sources(results: Results) -> str:
    """Say which study each part is from, where a page has several."""
    parts = {
        "routers": results.main,
        "ablations": results.ablation,
        "number of experts": results.experts,
        "sizes": results.sizes,
        "base models": results.bases,
    }
    named = [f"{part} {tables['study_name']['name'].iloc[0]}" for part, tables in parts.items() if tables]
    return f" Studies: {', '.join(named)}." if named else ""


def p_text(p: float) -> str:
    if not math.isfinite(p):
        return ""
    return f"{p:.2g}" if p >= 1e-4 else "< 0.0001"


def significance_section(results: Results) -> Section:
    heads: Heads = [
        ("comparison", "comparison", "text"),
        ("difference", "loss of the other minus SPECTRA ± 95 %", "text"),
        ("study_comparisons.p_value", "p", "text"),
        ("study_comparisons.p_adjusted", "p, Holm", "text"),
        ("significant", "significant", "text"),
        ("hedges_g", "Hedges' g", "float"),
        ("gap_closure", "gap closure", "text"),
        ("seeds", "seeds", "int"),
    ]
    found = numbers.comparisons(results)
    closure = numbers.gap_closure(results.main, METHOD)
    dense = "SPECTRA vs. Dense (active size)"
    gap = "no gap" if no_gap(results.main).startswith("No gap") else NOT_RUN
    rows = []
    for one in found:
        difference = one.difference
        rows.append(
            [
                one.title,
                cell(difference, 4, chance=False),
                p_text(difference.p_value) if difference else NOT_RUN,
                p_text(one.p_adjusted) if difference else NOT_RUN,
                one.stars,
                one.hedges_g if difference else None,
                (cell(closure, 2, chance=False) if closure else gap) if one.title == dense else "",
                difference.seeds if difference else None,
            ]
        )
    text = (
        "Above 0 SPECTRA is better. Paired t tests over seeds, Holm-corrected for all rows; *** p < 0.001, "
        "** p < 0.01, * p < 0.05. Gap closure: 0 is the dense model of active size, 1 that of total size."
    )
    why = [no_gap(results.main)] if closure is None else []
    lacking = [one.title for one in found if one.difference is None]
    if lacking:
        why.append(f"Not run: {listed(lacking)}.")
    table = plain_table("results_significance", "Table 13: significance", heads, rows)
    return section("significance", "Significance", " ".join([text, *why]), table)


def no_gap(tables: Tables) -> str:
    if {DENSE_ACTIVE, DENSE_TOTAL} <= numbers.finished_arms(tables):
        return (
            "No gap closure: the dense models of active and total size do not differ beyond their interval."
        )
    return "Gap closure: not run; it needs dense models of active and of total size."


# --- task performance, variants


def performance_section(tables: Tables) -> Section:
    domains = numbers.trained_domains(tables)
    outside = numbers.unseen(tables)
    runs = tables["study_runs"] if tables else pd.DataFrame(columns=["arm", "question"])
    runs = runs[runs["question"] == "main"] if (runs["question"] == "main").any() else runs
    arms = [(arm, arm) for arm in dict.fromkeys(runs["arm"])]
    gap = "no gap" if no_gap(tables).startswith("No gap") else NOT_RUN
    rows = []
    for title, arm in arms:
        losses = numbers.domain_losses(tables, arm)
        overall = numbers.run_value(tables, arm, "validation_loss")
        closure = numbers.gap_closure(tables, arm)
        row = [title, arm_cell(tables, arm, overall, 4, chance=False), perplexity(overall)]
        row.append(cell(closure, 2, chance=False) if closure else absent(tables, arm) or gap)
        for domain in (*domains, *outside):
            found = numbers.over_seeds(losses[domain]) if domain in losses else None
            row += [arm_cell(tables, arm, found, 3, chance=False), perplexity(found)]
        rows.append(row)
    if "unigram_loss" in runs and runs["unigram_loss"].notna().any():
        level = Estimate(float(runs["unigram_loss"].mean()), math.nan, 1)
        blank = [""] * 2 * (len(domains) + len(outside))
        rows.append(["unigram baseline", cell(level, 4), perplexity(level), "", *blank])
    heads: Heads = [
        ("arm", "router", "text"),
        ("study_runs.validation_loss", "loss ± 95 %", "text"),
        ("perplexity", "perplexity", "text"),
        ("gap_closure", "gap closure", "text"),
    ]
    for domain in (*domains, *outside):
        name = f"{domain}, not trained on" if domain in outside else domain
        heads += [("study_documents.loss", name, "text"), ("perplexity", "perplexity", "text")]
    text = (
        "Validation loss in nats per token and perplexity, means over seeds, overall and by domain. "
        "Gap closure: 0 is the dense model of active size, 1 that of total size. "
        f"{NO_HARNESS} {reasons(tables, arms)}"
    )
    if tables and numbers.gap_closure(tables, METHOD) is None:
        text += f" {no_gap(tables)}"
    table = plain_table("results_performance", "6.1 Task performance", heads, rows)
    return section("performance", "Task performance", text.strip(), table)


def perplexity(found: Estimate | None) -> str:
    return f"{math.exp(found.mean):,.2f}" if found else ""


def variants_section(tables: Tables) -> Section:
    heads: Heads = [
        ("variant", "variant", "text"),
        ("load_entropy", "expert entropy ± 95 % (balanced)", "text"),
        ("expert_overlap", "expert overlap, % (chance)", "text"),
        ("output_orthogonality", "Gram orthogonality × 100 (chance)", "text"),
        ("collapse_rate", "collapse rate", "text"),
    ]
    rows = []
    for title, arm, _ in VARIANTS:
        collapse = numbers.collapse_rate(tables, arm)
        rate = f"{percent(collapse.rate, 0)} ({collapse.collapsed} of {collapse.layers})" if collapse else ""
        rows.append(
            [
                title,
                *(
                    arm_cell(tables, arm, numbers.layer_value(tables, arm, metric), decimals, scale)
                    for metric, decimals, scale in (
                        ("load_entropy", 3, 1.0),
                        ("expert_overlap", 1, 100.0),
                        ("output_orthogonality", 1, 100.0),
                    )
                ),
                absent(tables, arm) or rate or "not measured",
            ]
        )
    text = (
        "Means over layers and seeds, in evaluation on held-out text; chance in brackets. Orthogonality is "
        "that of the outputs for the same tokens; overlap is nearly fixed by k. A layer has collapsed "
        "if an expert is below 1 % of the mean load or MaxVio/(n/k − 1) is above 0.5; counted over seeds and "
        "layers. "
        f"{reasons(tables, [(title, arm) for title, arm, _ in VARIANTS])}"
    )
    table = plain_table("results_variants", "Table 7: ablations, expert specialisation", heads, rows)
    return section("variants", "Ablations", text.strip(), table)


# --- figures


def figure_sections(results: Results) -> list[Section]:
    """Return figures 2 to 5 and the load around the quota; of those that cannot be drawn, why."""
    curves = {spec.name: spec for spec in CURVE_FIGURES}
    variants = of_question(results.ablation, "ablation")
    routers = of_question(results.main, "main")
    wanted: list[tuple[str, FigureSpec, Tables, str]] = [
        ("Figure 2: expert maps", EXPERT_MAPS, results.main, f"{BASELINE} and {METHOD}"),
        ("Figure 3: loss", curves["arms_validation_loss_by_step"], variants, "the ablations"),
        ("Figure 4: expert usage", USAGE, results.ablation or results.main, "the ablations"),
        ("Figure 5: routing entropy", curves["arms_routing_entropy_by_step"], routers, "several routers"),
        ("Load before and after the quota", QUOTA, results.main or results.ablation, METHOD),
    ]
    parts = []
    for title, spec, tables, what in wanted:
        drawable = bool(tables) and spec.can_draw(tables)
        figures = [(spec, tables)] if drawable else []
        text = "" if drawable else f"Not run: no study on this page has finished trainings of {what}."
        anchor = f"figure-{spec.name.replace('_', '-')}"
        parts.append(Section(f"results-{anchor}", title, text, figures, tab=TAB))
    return parts


def of_question(tables: Tables, question: str) -> Tables:
    """Return the tables of one question's arms and its reference."""
    if not tables:
        return {}
    rows = tables["study_comparisons"]
    rows = rows[rows["question"] == question]
    if rows.empty:
        return {}
    arms = set(rows["arm"]) | set(rows["reference"])
    others = {name: frame[frame["arm"].isin(arms)] for name, frame in tables.items() if "arm" in frame}
    return {**others, "study_comparisons": rows}


# --- cost, bases, experts, stability


def overhead_section(results: Results) -> Section:
    tables = next(
        (one for one in (results.main, results.ablation) if numbers.block_milliseconds(one, METHOD)), {}
    )
    heads: Heads = [
        ("component", "component", "text"),
        ("milliseconds", "time, ms", "float"),
        ("flops", "FLOPs × 10⁶", "float"),
        ("overhead.share", "% of total", "text"),
    ]
    rows: list[list[Any]] = [[title, None, None, NOT_RUN] for title in (*PARTS.values(), "Total")]
    text = "Not run: no study on this page has timed the router."
    if tables:
        timed = tables["overhead"]
        timed = timed[timed["router"] == METHOD].set_index("component")
        named = [(part, title) for part, title in PARTS.items() if part in timed.index]
        others = [(part, capital(part.replace("_", " "))) for part in timed.index if part not in PARTS]
        total = timed[["milliseconds", "flops"]].sum()
        rows = [
            [
                title,
                timed.loc[part, "milliseconds"],
                timed.loc[part, "flops"] / 1e6,
                percent(timed.loc[part, "milliseconds"] / total["milliseconds"]),
            ]
            for part, title in (*named, *others)
        ]
        rows.append(["Total", total["milliseconds"], total["flops"] / 1e6, "100 %"])
        baseline = numbers.block_milliseconds(tables, BASELINE)
        text = "One block, forward pass in training mode and the update after a step, median of ten."
        if baseline:
            rows.append(["Total, Switch Top-2", baseline, None, percent(baseline / total["milliseconds"])])
            text += f" The block of SPECTRA takes {number(total['milliseconds'] / baseline)} times as long."
    table = plain_table("results_overhead", "Table 9: routing overhead", heads, rows)
    return section("overhead", "Overhead", text, table)


def bases_section(tables: Tables) -> Section:
    """Losses of existing models with each router; arms are named "BASE: router"."""
    heads: Heads = [
        ("base", "base model", "text"),
        ("untouched", "untouched, loss", "text"),
        (BASELINE, "Switch Top-2, loss", "text"),
        (METHOD, "SPECTRA, loss", "text"),
        ("improvement", "improvement over Top-2, %", "text"),
    ]
    arms = numbers.finished_arms(tables)
    bases = list(dict.fromkeys(arm.rsplit(": ", 1)[0] for arm in sorted(arms) if ": " in arm)) or list(BASES)
    rows = []
    for base in bases:
        names = [f"{base}: {router}" for router in ("untouched", BASELINE, METHOD)]
        losses = [numbers.by_seed(tables, name, "validation_loss") for name in names]
        gain = numbers.over_seeds(((losses[1] - losses[2]) / losses[1]).dropna())
        cells = [cell(numbers.over_seeds(values), 4) for values in losses]
        rows.append([base, *cells, cell(gain, 2, 100.0, chance=False)])
    text = "Loss on held-out text in nats per token, after training the router. "
    text += "" if arms else "Not run: no study on this page trains routers of existing models."
    table = plain_table("results_bases", "Table 10: base models", heads, rows)
    return section("bases", "Base models", text, table)


def experts_section(tables: Tables) -> Section:
    heads: Heads = [
        ("n_experts", "experts", "text"),
        (BASELINE, "Switch Top-2, loss ± 95 %", "text"),
        (METHOD, "SPECTRA, loss ± 95 %", "text"),
        ("load_entropy", "expert entropy of SPECTRA (balanced)", "text"),
        ("output_orthogonality", "Gram orthogonality × 100 (chance)", "text"),
    ]
    counts = numbers.axis_values(tables, "experts") if tables else []
    rows: list[list[Any]] = []
    points: dict[str, list[tuple[float, float]]] = {BASELINE: [], METHOD: []}
    for count in counts or (4, 8, 16, 32, 64):
        arms = {router: numbers.arm_at(tables, router, "experts", count) for router in points}
        losses = {router: numbers.run_value(tables, arm, "validation_loss") for router, arm in arms.items()}
        for router, found in losses.items():
            if found:
                points[router].append((math.log2(count), found.mean))
        method = arms[METHOD]
        rows.append(
            [
                f"{count:g}",
                *(cell(found, 4, chance=False) for found in losses.values()),
                cell(numbers.layer_value(tables, method, "load_entropy")),
                cell(numbers.layer_value(tables, method, "output_orthogonality"), 1, 100.0),
            ]
        )
    trends = [slope_text(values) for values in points.values()]
    rows.append(["change per doubling", *trends, "", ""])
    text = "Loss by number of experts; the last row is the slope of a line through the means, not tested. "
    text += "" if counts else "Not run: no study on this page varies the number of experts."
    table = plain_table("results_experts", "Table 11: number of experts", heads, rows)
    return section("experts", "Number of experts", text.strip(), table)


def slope_text(points: list[tuple[float, float]]) -> str:
    """Return the least-squares slope through the points."""
    if len(points) < 2:
        return NOT_RUN
    x = [place for place, _ in points]
    y = [value for _, value in points]
    middle = sum(x) / len(x)
    spread = sum((place - middle) ** 2 for place in x)
    slope = sum((place - middle) * value for place, value in zip(x, y, strict=True)) / spread
    return minus(f"{slope:+.4f}")


def stability_section(tables: Tables) -> Section:
    heads: Heads = [
        ("arm", "method", "text"),
        ("consistency", "routing consistency, % (chance)", "text"),
        ("study_runs.usage_sigma", "usage variance, σ", "text"),
        ("study_runs.kendall_tau", "rank correlation, Kendall τ (0)", "text"),
    ]
    rows = []
    for title, arm in ROUTERS:
        level = by_size(tables, arm)
        consistency = numbers.over_seeds(numbers.by_seed(tables, arm, "consistency"), level)
        rows.append(
            [
                title,
                arm_cell(tables, arm, consistency, 1, 100.0),
                arm_cell(tables, arm, numbers.run_value(tables, arm, "usage_sigma"), 4),
                arm_cell(tables, arm, numbers.run_value(tables, arm, "kendall_tau"), 2),
            ]
        )
    rows.append(["Ideal", "100", "0", "1"])
    text = (
        "Between the last checkpoints, means over layers and seeds. Chance of consistency: k/n, for even "
        "loads. With even loads the order of experts is noise, so a low τ is no defect. "
        f"{reasons(tables, ROUTERS)}"
    )
    table = plain_table("results_stability", "Table 12: stability over checkpoints", heads, rows)
    return section("stability", "Stability", text.strip(), table)


def by_size(tables: Tables, arm: str) -> float:
    """Return k/n of the arm."""
    k, n = (numbers.by_seed(tables, arm, name) for name in ("top_k", "n_experts"))
    return float(k.iloc[0] / n.iloc[0]) if len(k) and len(n) else math.nan


# --- case studies, failure modes


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
    for title, arm in (row for row in ROUTERS if row[1] in (METHOD, BASELINE)):
        for mode, found in failure_modes(tables, arm).items():
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
    "Ambiguous context": "documents that switch domain, against the same tokens after another text of "
    "their domain",
    "Out of distribution": "loss on a domain that was not trained on, minus that of the dense model",
    "Early oscillation": "change of usage between logged steps in the first tenth of training over that in "
    "the last half",
    "Rare experts": "experts below a tenth of the mean load, and the choices they get",
}
NEEDS = {
    "Ambiguous context": "it needs two domains",
    "Out of distribution": "it needs validation text of a domain without training text",
    "Early oscillation": "it needs usage at four logged steps or more",
    "Rare experts": "it needs loads in evaluation",
}


def failure_modes(tables: Tables, arm: str) -> dict[str, tuple[str, str] | None]:
    """Return mode -> (frequency, impact), None where nothing was measured."""
    ambiguous, distant, early, rare = MODES
    found: dict[str, tuple[str, str] | None] = dict.fromkeys(MODES)
    if mixed := numbers.mixed_documents(tables, arm):
        share, lost, kept = mixed
        found[ambiguous] = (
            f"{cell(share, 0, 100.0)} % of documents lose",
            f"{cell(lost, 3, chance=False)} nats per token; choices kept "
            f"{cell(kept, 1, 100.0, chance=False)} points",
        )
    if outside := numbers.unseen_losses(tables, arm):
        words = [f"{name}: {cell(one, 3, chance=False)} nats per token" for name, one in outside.items()]
        found[distant] = ("all tokens of " + listed(list(outside)), "; ".join(words))
    moved = numbers.turnover(tables, arm)
    if moved is not None and (ratio := numbers.over_seeds(moved["early"] / moved["late"])):
        found[early] = (
            f"{cell(ratio, 1, chance=False)} times the late change",
            f"{percent(float(moved['early'].mean()))} of the load moves per logged step, late "
            f"{percent(float(moved['late'].mean()))}",
        )
    if scarce := numbers.rare_experts(tables, arm):
        experts, choices = scarce
        found[rare] = (
            f"{cell(experts, 1, 100.0, chance=False)} % of experts (balanced: 0)",
            f"{cell(choices, 2, 100.0, chance=False)} % of choices",
        )
    return found
