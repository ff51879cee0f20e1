"""Tables and figures of the results section that results.toml cannot say, with their numbers there."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import paper_results as numbers
from paper_cases import failures_section, spans_section
from paper_cells import (
    TAB,
    Heads,
    absent,
    arm_cell,
    cell,
    p_text,
    percent,
    reasons,
    section,
)
from paper_conditions import conditions, documents_text, tunings
from paper_figures import ENTROPY_CURVES, EXPERT_MAPS, LOSS_CURVES, QUOTA, USAGE
from paper_results import (
    BASELINE,
    DENSE_ACTIVE,
    DENSE_TOTAL,
    EQUAL_FLOPS,
    METHOD,
    NEW_ROWS,
    NOT_RUN,
    ROUTERS,
    VARIANTS,
    Estimate,
    Results,
)
from paper_scaling import experts_section, sizes_section, sweep_section
from paper_some import some_section

from moescope.lab.study_statistics import of_question
from moescope.plotting.style import capital, counted, listed, number
from moescope.reporting.pack import plain_table
from moescope.verb import Drawable, Payload, Section, Tables

PARTS = {  # component of the overhead table -> row of the published one
    "gru": "GRU forward",
    "projection": "Expression projection",
    "gram": "Gram matrix",
    "similarity": "Cosine similarity",
    "top_k": "Top-k selection",
    "experts": "Expert execution",
}
KEPT_ROUTER = "Top-2 continues the base's own trained router, SPECTRA starts untrained"
BOTH_NEW = "both routers start untrained"
EXISTING_MOE = "existing MoE"
BASES = ("dense small, upcycled", "dense medium, upcycled", EXISTING_MOE)
NO_HARNESS = "Tasks of lm-eval: not run, as no study on this page names tasks."
MANY_COLLAPSED = 0.1  # of an arm's layers
START = "From a fifth of the steps on."
FFN = {  # metrics of study_layers
    "ffn_rms": "FFN output, RMS",
    "ffn_kurtosis": "FFN output, kurtosis",
    "ffn_peak": "FFN output, max/RMS",
    "ffn_sparsity": "FFN output, share below 1 % of RMS",
}
NO_BASES = "Not run: no study on this page trains routers of existing models."
NO_FFN = "Statistics of FFN outputs: not measured. "


def sections(studies: dict[str, Tables], judged: pd.DataFrame) -> list[Section]:
    """Return tables and figures in the paper's order, as the page shows them below the claims."""
    return all_sections(Results.of(studies, judged))


def all_sections(results: Results) -> list[Section]:
    return [
        significance_section(results),
        performance_section(results),
        variants_section(results.ablation),
        *figure_sections(results),
        overhead_section(results),
        bases_section(results.bases),
        experts_section(results.experts),
        sizes_section(results),
        sweep_section(results.sweep),
        stability_section(results.main),
        spans_section(results.main),
        failures_section(results.main),
        effects_section(results),
        some_section(results),
        section("conditions", "Studies", f"{sources(results)} {conditions(results)}".strip()),
    ]


def effects_section(results: Results) -> Section:
    tables = results.effects
    pairs = numbers.predicted_effects(tables)
    arms = list(dict.fromkeys(arm for arm, _ in pairs))
    heads: Heads = [("predictor", "predictor", "text"), *((arm, arm, "text") for arm in arms)]
    rows = [
        [
            predictor_title(metric),
            *(
                cell(numbers.layer_value(tables, arm, metric), 2, chance=False)
                if (arm, metric) in pairs
                else "no rows"
                for arm in arms
            ),
        ]
        for metric in dict.fromkeys(metric for _, metric in pairs)
    ]
    ceilings = [numbers.effect_ceiling(tables, arm) for arm in arms]
    if rows:
        rows.append(
            ["ceiling", *(f"{one:.2f}" if math.isfinite(one) else "not measured" for one in ceilings)]
        )
    title = "Rank correlation with the effect, by router"
    by_router = [plain_table("results_predictors", title, heads, rows)] if rows else []
    text = "Ceiling: the largest correlation that the noise of the effects allows." if rows else "Not run."
    return section("effects", title, text, *by_router)


def predictor_title(metric: str) -> str:
    """Return "alignment given load" of "effect_alignment_given_load"."""
    return metric.removeprefix(numbers.EFFECT).replace("_", " ")


def sources(results: Results) -> str:
    """Say which study each part is from, and how much of it was carried out."""
    parts = {
        "routers": results.main,
        "ablations": results.ablation,
        "number of experts": results.experts,
        "sizes": results.sizes,
        "a wide model": results.wide,
        "sizes at other learning rates": results.size_rates,
        "base models": results.bases,
        "sweep": results.sweep,
        "removed experts": results.effects,
        "tasks": results.tasks,
        "equal learning rates": results.controls,
    }
    named: dict[str, list[str]] = {}
    for part, tables in [*parts.items(), *(("pairs of arms", tables) for tables in results.others)]:
        if tables:
            done, planned = numbers.completed(tables)
            words = f"{numbers.study_name(tables)} ({done} of {planned} trainings: "
            named.setdefault(words, []).append(part)
    studies = [f"{words}{', '.join(found)})" for words, found in named.items()]
    return f" Studies: {'; '.join(studies)}." if studies else ""


def significance_section(results: Results) -> Section:
    heads: Heads = [
        ("comparison", "comparison", "text"),
        ("difference", "loss of SPECTRA minus the other ± 95 %", "text"),
        ("study_comparisons.p_value", "p", "text"),
        ("study_comparisons.p_adjusted", "p, Holm", "text"),
        ("significant", "significant", "text"),
        ("hedges_g", "Hedges' g", "float"),
        ("flops", "FLOPs over SPECTRA's", "float"),
        ("gap_closure", "gap closure", "text"),
        ("seeds", "seeds", "int"),
        ("failed", "failed trainings", "int"),
        ("note", "note", "sentence"),
    ]
    found = significance_rows(results)
    closure = numbers.gap_closure(results.main, METHOD)
    gap = "no gap" if no_gap(results.main).startswith("No gap") else NOT_RUN
    rows = []
    for title, arm, one in found:
        rows.append(
            [
                title,
                cell(one, 4, chance=False),
                p_text(one.p_value) if one else NOT_RUN,
                (p_text(one.p_adjusted) or "none") if one else NOT_RUN,
                numbers.stars(one),
                one.hedges_g if one else None,
                flops_ratio(results, arm) if one else None,
                (cell(closure, 2, chance=False) if closure else gap) if arm == DENSE_ACTIVE else "",
                one.seeds if one else None,
                one.failed if one else None,
                comparison_note(results, arm) if one else "",
            ]
        )
    text = (
        f"Below 0 SPECTRA is better. Paired t tests over seeds, corrected with all claims. *** p ≤ 0.001, "
        f"** p ≤ 0.01, * p ≤ 0.05. {gap_text(results)}"
    )
    why = [no_gap(results.main)] if closure is None else []
    lacking = [title for title, _, one in found if one is None]
    if lacking:
        why.append(f"Not run: {listed(lacking)}.")
    table = plain_table("results_significance", "Table 13: significance", heads, rows)
    return section("significance", "Significance", " ".join([text, *why]), table)


def significance_rows(results: Results) -> list[tuple[str, str, Estimate | None]]:
    """Return title, arm and loss of the method minus that of the arm."""
    main, ablation, bases = (numbers.PARTS[part] for part in ("main", "ablation", "bases"))
    names = {(main, METHOD, arm): f"SPECTRA vs. {title}" for title, arm in ROUTERS if arm != METHOD}
    names[main, METHOD, DENSE_ACTIVE] = "SPECTRA vs. Dense (active size)"
    names |= {
        (ablation, METHOD, arm): f"SPECTRA-Full vs. {title}" for title, arm, _ in VARIANTS if arm != METHOD
    }
    more = more_parameters(results.ablation)
    names[ablation, METHOD, EQUAL_FLOPS] = f"SPECTRA vs. Top-2 of equal FLOPs{more}"
    for base in numbers.base_models(results.bases):
        names[bases, f"{base}: {METHOD}", f"{base}: {BASELINE}"] = f"SPECTRA vs. Top-2, {base}"
        if (bases, f"{base}: {METHOD}", f"{base}: {NEW_ROWS}") in results.tests:
            names[bases, f"{base}: {METHOD}", f"{base}: {NEW_ROWS}"] = f"SPECTRA vs. Top-2, {base}, new rows"
    tests = results.tests | {
        (s, b, a): numbers.reversed_sign(one) for (s, a, b), one in results.tests.items()
    }
    return [(title, key[2], tests.get(key)) for key, title in names.items()]


def more_parameters(tables: Tables) -> str:
    """Say how many times the parameters the baseline of equal FLOPs has, for the title of its row."""
    wide, method = (numbers.by_seed(tables, arm, "parameters_total").mean() for arm in (EQUAL_FLOPS, METHOD))
    return f" ({wide / method:.3g} times the parameters)" if wide > 0 and method > 0 else ""


def flops_ratio(results: Results, arm: str) -> float | None:
    """Return the FLOPs per token of the arm over those of the method, in the study that compares them."""
    pairs = [
        (results.main, arm, METHOD),
        (results.ablation, arm, METHOD),
        (results.bases, arm, f"{arm.rpartition(': ')[0]}: {METHOD}"),
    ]
    for tables, other, method in pairs:
        flops = [numbers.by_seed(tables, name, "flops_per_token").mean() for name in (other, method)]
        if flops[0] > 0 and flops[1] > 0:
            return float(flops[0] / flops[1])
    return None


def comparison_note(results: Results, arm: str) -> str:
    """Say what else differs: a router that was trained before, or many layers that collapsed."""
    if arm.startswith(f"{EXISTING_MOE}: "):
        return BOTH_NEW if arm.endswith(NEW_ROWS) else KEPT_ROUTER
    found = numbers.collapse_rate(results.main, arm) or numbers.collapse_rate(results.ablation, arm)
    if found is None or found.rate < MANY_COLLAPSED:
        return ""
    return f"{found.collapsed} of {found.layers} layers of {arm} collapsed"


def gap_text(results: Results) -> str:
    """Define gap closure."""
    text = "Gap closure: 0 is the dense model of active size, 1 that of total size"
    active, total = (
        numbers.settings_of(results.main, arm).get("learning_rate") for arm in (DENSE_ACTIVE, DENSE_TOTAL)
    )
    if total is not None and total == active and DENSE_TOTAL not in tunings(results):
        text += f", which has the learning rate of the first ({total:g}), not one tuned for it"
    return f"{text}."


def no_gap(tables: Tables) -> str:
    if {DENSE_ACTIVE, DENSE_TOTAL} <= numbers.finished_arms(tables):
        return (
            "No gap closure: the dense models of active and total size do not differ beyond their interval."
        )
    return "Gap closure: not run; it needs dense models of active and of total size."


# --- task performance, variants


def performance_section(results: Results) -> Section:
    tables = results.main
    domains = numbers.trained_domains(tables)
    outside = numbers.unseen(tables)
    runs = tables["study_runs"] if tables else pd.DataFrame(columns=["arm", "question"])
    arms = [(arm, arm) for arm in numbers.compared_arms(tables)]
    gap = "no gap" if no_gap(tables).startswith("No gap") else NOT_RUN
    rows = []
    for title, arm in arms:
        losses = numbers.domain_losses(tables, arm)
        overall = numbers.run_value(tables, arm, "validation_loss")
        closure = numbers.gap_closure(tables, arm)
        row = [title, arm_cell(tables, arm, overall, 4, chance=False), perplexity(overall)]
        row.append(cell(closure, 2, chance=False) if closure else absent(tables, arm) or gap)
        row.append(arm_cell(tables, arm, numbers.run_value(tables, arm, "loss_slope"), 2))
        row += baseline_cells(results, arm)
        for domain in domains:
            found = numbers.over_seeds(losses[domain]) if domain in losses else None
            row += [arm_cell(tables, arm, found, 3, chance=False), perplexity(found)]
        bits = numbers.domain_bits(tables, arm)
        for domain in outside:
            found = numbers.over_seeds(bits[domain]) if domain in bits else None
            row.append(arm_cell(tables, arm, found, 3, chance=False))
        rows.append(row)
    if "unigram_loss" in runs and runs["unigram_loss"].notna().any():
        level = Estimate(float(runs["unigram_loss"].mean()), math.nan, 1)
        blank = [""] * (2 * len(domains) + len(outside))
        rows.append(["unigram baseline", cell(level, 4), perplexity(level), *[""] * 4, *blank])
    heads: Heads = [
        ("arm", "router", "text"),
        ("study_runs.validation_loss", "loss ± 95 %", "text"),
        ("perplexity", "perplexity", "text"),
        ("gap_closure", "gap closure", "text"),
        ("loss_slope", "final slope, per 1,000 steps", "text"),
        ("difference", f"minus {BASELINE} ± 95 %", "text"),
        ("study_comparisons.p_adjusted", "p, Holm", "text"),
    ]
    for domain in domains:
        heads += [("study_documents.loss", domain, "text"), ("perplexity", "perplexity", "text")]
    heads += [("bits_per_byte", f"{domain}, not trained on: bits per byte", "text") for domain in outside]
    text = (
        "Validation loss in nats per token and perplexity, means over seeds, overall and by domain. "
        f"{gap_text(results)} {reasons(tables, arms)}"
    )
    if tables and numbers.gap_closure(tables, METHOD) is None:
        text += f" {no_gap(tables)}"
    table = plain_table("results_performance", "6.1 Task performance", heads, rows)
    tasks = task_values(results.tasks)
    text += f" {tasks_text(results.tasks)}" if tasks else f" {NO_HARNESS}"
    return section("performance", "Task performance", text.strip(), table, tasks_table(tasks))


def tasks_table(tasks: dict[str, dict[str, Estimate]]) -> Payload:
    """One row per arm, one column per task."""
    arms = dict.fromkeys(arm for values in tasks.values() for arm in values)
    heads: Heads = [("arm", "router", "text"), *(("study_tasks.value", name, "text") for name in tasks)]
    rows = [[arm, *(cell(values.get(arm)) for values in tasks.values())] for arm in arms]
    if not tasks:
        heads, rows = [("arm", "router", "text"), ("task", "task", "text")], [["all routers", NOT_RUN]]
    return plain_table("results_tasks", "6.1 Tasks of lm-eval", heads, rows)


def baseline_cells(results: Results, arm: str) -> list[str]:
    """Return the arm's loss minus that of the baseline, and its corrected p or why it has none."""
    if arm == BASELINE:
        return ["reference", "reference"]
    found = numbers.above_baseline(results, arm)
    if found is None:
        return [absent(results.main, arm) or NOT_RUN] * 2
    p = "" if found.unfinished else p_text(found.p_adjusted)
    return [cell(found, 4, chance=False), p or numbers.stars(found)]


def task_values(tables: Tables) -> dict[str, dict[str, Estimate]]:
    """Return "task, metric" -> arm -> value, groups of tasks first."""
    rows = tables.get("study_tasks")
    if rows is None:
        return {}
    groups = rows.assign(single=rows["documents"].notna())
    groups = groups.sort_values(["single", "task", "metric"], kind="stable")
    found: dict[str, dict[str, Estimate]] = {}
    for (task, metric, arm), of in groups.groupby(["task", "metric", "arm"], sort=False):
        value = numbers.over_seeds(of["value"], float(of["chance"].mean()))
        if value:
            found.setdefault(f"{task}, {metric}", {})[arm] = value
    return found


def tasks_text(tables: Tables) -> str:
    """Say which study the tasks are from, how large its models are, and what stands beside a value."""
    runs = numbers.finished(tables)
    size = sorted({f"{count / 1e6:.2f}" for count in runs["parameters_active"].astype(float)}, key=float)
    words = size[0] if len(size) == 1 else f"{size[0]} to {size[-1]}"
    documents = int(tables["study_tasks"]["documents"].min())
    return (
        f"Tasks of lm-eval: study {numbers.study_name(tables)}, {counted(runs['seed'].nunique(), 'seed')}, "
        f"models of {words} million active parameters, {documents:,} documents per task or more; in brackets "
        "the accuracy of a random choice. No test."
    )


def perplexity(found: Estimate | None) -> str:
    return f"{math.exp(found.mean):,.2f}" if found else ""


def variants_section(tables: Tables) -> Section:
    heads: Heads = [
        ("variant", "variant", "text"),
        ("load_entropy", "expert entropy ± 95 % (balanced)", "text"),
        ("expert_overlap", "expert overlap, % (chance)", "text"),
        ("output_orthogonality", "orthogonality of outputs × 100 (chance)", "text"),
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
        f"that of outputs{documents_text(tables)}; overlap is nearly fixed by k. A layer has collapsed "
        "if an expert is below 1 % of the mean load or MaxVio/(n/k − 1) is above 0.5; counted over seeds and "
        "layers. "
        f"{reasons(tables, [(title, arm) for title, arm, _ in VARIANTS])}"
    )
    done, planned = numbers.completed(tables)
    if done < planned:
        text += f" Unfinished ({done} of {planned} trainings): only seeds that all arms have."
    table = plain_table("results_variants", "Table 7: ablations, expert specialisation", heads, rows)
    return section("variants", "Ablations", text.strip(), table)


# --- figures


def figure_sections(results: Results) -> list[Section]:
    """Return figures 2 to 5 and the load around the quota; of those that cannot be drawn, why."""
    variants = of_question(results.ablation, "ablation")
    routers = of_question(results.main, "main")
    wanted: list[tuple[str, Drawable, Tables, str]] = [
        ("Figure 2: expert maps", EXPERT_MAPS, results.main, f"{BASELINE} and {METHOD}"),
        ("Figure 3: loss", LOSS_CURVES, variants, "the ablations"),
        ("Figure 4: expert usage", USAGE, results.ablation or results.main, "the ablations"),
        ("Figure 5: routing entropy", ENTROPY_CURVES, routers, "several routers"),
        ("Load before and after the quota", QUOTA, results.main or results.ablation, METHOD),
    ]
    parts = []
    for title, spec, tables, what in wanted:
        drawable = bool(tables) and spec.can_draw(tables)
        figures = [(spec, tables)] if drawable else []
        text = START if "loss" in title else ""
        text = text if drawable else f"Not run: no study on this page has finished trainings of {what}."
        anchor = f"figure-{spec.name.replace('_', '-')}"
        parts.append(Section(f"results-{anchor}", title, text, figures, tab=TAB))
    return parts


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
            flops = tables["overhead"].loc[tables["overhead"]["router"] == BASELINE, "flops"].sum() / 1e6
            rows.append(["Total, Switch Top-2", baseline, flops, percent(baseline / total["milliseconds"])])
            text += f" The block of SPECTRA takes {number(total['milliseconds'] / baseline)} times as long."
    table = plain_table("results_overhead", "Table 9: routing overhead", heads, rows)
    return section("overhead", "Overhead", text, table)


def bases_section(tables: Tables) -> Section:
    """Losses of existing models with each router; arms are named "BASE: router"."""
    bases = numbers.base_models(tables)
    named = {"untouched": "untouched", BASELINE: "Switch Top-2", METHOD: "SPECTRA"}
    named |= {router: router for routers in bases.values() for router in routers if router not in named}
    heads: Heads = [("base", "base model", "text")]
    heads += [(router, f"{title}, loss", "text") for router, title in named.items()]
    heads.append(("improvement", "improvement over Top-2, %", "text"))
    rows, arms = [], [(f"{base}: {router}",) * 2 for base in bases for router in named if router != NEW_ROWS]
    for base in bases or BASES:
        losses = {name: numbers.by_seed(tables, f"{base}: {name}", "validation_loss") for name in named}
        gain = numbers.over_seeds((losses[BASELINE] - losses[METHOD]) / losses[BASELINE])
        cells = [
            arm_cell(tables, f"{base}: {name}", numbers.over_seeds(of_seeds), 4)
            if name != NEW_ROWS or name in bases[base]
            else "as Top-2"
            for name, of_seeds in losses.items()
        ]
        rows.append([base, *cells, cell(gain, 2, 100.0, chance=False)])
    lacking = reasons(tables, arms) if bases else NO_BASES
    text = (
        "Loss on held-out text in nats per token, after training routers and experts; trained on: the base "
        f"itself, trained as long. In an existing MoE {KEPT_ROUTER}"
        + (f", as {NEW_ROWS!r} does" if NEW_ROWS in named else "")
        + f". {lacking}"
    )
    table = plain_table("results_bases", "Table 10: base models", heads, rows)
    return section("bases", "Base models", text.strip(), table)


def stability_section(tables: Tables) -> Section:
    heads: Heads = [
        ("arm", "method", "text"),
        ("consistency", "routing consistency, % (chance)", "text"),
        ("study_runs.usage_sigma", "usage variance, σ", "text"),
        ("study_runs.kendall_tau", "rank correlation, Kendall τ (0)", "text"),
    ]
    metrics = set(tables["study_layers"]["metric"]) if "study_layers" in tables else set()
    measured = [name for name in FFN if name in metrics]
    heads += [("study_layers.metric", FFN[name], "text") for name in measured]
    rows = []
    for title, arm in ROUTERS:
        consistency = arm_cell(
            tables, arm, numbers.run_value(tables, arm, "consistency", "consistency_chance"), 1, 100.0
        )
        if numbers.by_seed(tables, arm, "consistency_estimated").any():
            consistency = consistency.replace("(", "(≈ ")
        rows.append(
            [
                title,
                consistency,
                arm_cell(tables, arm, numbers.run_value(tables, arm, "usage_sigma"), 4),
                arm_cell(tables, arm, numbers.run_value(tables, arm, "kendall_tau"), 2),
                *(arm_cell(tables, arm, numbers.layer_value(tables, arm, name)) for name in measured),
            ]
        )
    rows.append(["Ideal", "100", "0", "1", *[""] * len(measured)])
    text = (
        "Between the last checkpoints, means over layers and seeds. Chance of consistency: independent "
        "choices with the same loads (≈: with those of the last checkpoint). With even loads the order of "
        "experts is noise: a low τ is no defect. "
        + (
            "FFN outputs: mean over layers in evaluation, brackets: of Gaussian outputs. "
            if measured
            else NO_FFN
        )
        + reasons(tables, ROUTERS)
    )
    table = plain_table("results_stability", "Table 12: stability over checkpoints", heads, rows)
    return section("stability", "Stability", text.strip(), table)
