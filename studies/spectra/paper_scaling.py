"""Losses by number of experts, by size and by option of SPECTRA, on the page "Results"."""

from __future__ import annotations

import math
from typing import Any

import paper_results as numbers
from paper_cells import Heads, absent, arm_cell, cell, minus, section
from paper_conditions import at_baseline_rates, wide_and_worse, wide_title
from paper_results import BASELINE, METHOD, NOT_RUN, Results, setting

from moescope.lab.report_study import TARGET_CV
from moescope.reporting.pack import plain_table
from moescope.verb import Section, Tables


def experts_section(tables: Tables) -> Section:
    heads: Heads = [
        ("n_experts", "experts", "text"),
        (BASELINE, "Switch Top-2, loss ± 95 %", "text"),
        (METHOD, "SPECTRA, loss ± 95 %", "text"),
        ("load_entropy", "expert entropy of SPECTRA (balanced)", "text"),
        ("output_orthogonality", "orthogonality of outputs × 100 (chance)", "text"),
        ("study_runs.parameters_active", "active parameters (millions), Top-2 and SPECTRA", "text"),
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
                " and ".join(
                    f"{active.mean() / 1e6:.1f}"
                    for arm in arms.values()
                    if len(active := numbers.by_seed(tables, arm, "parameters_active"))
                ),
            ]
        )
    trends = [trend_text(values) for values in points.values()]
    rows.append(["change per doubling", *trends, "", "", ""])
    text = "Loss by number of experts; the last row is the slope of a line through the means, not tested. "
    text += "" if counts else "Not run: no study on this page varies the number of experts."
    table = plain_table("results_experts", "Table 11: number of experts", heads, rows)
    return section("experts", "Number of experts", text.strip(), table)


def sizes_section(results: Results) -> Section:
    heads: Heads = [
        ("arm", "model", "text"),
        ("study_runs.parameters_active", "active parameters (millions)", "text"),
        ("learning_rate", "learning rate", "text"),
        ("study_runs.validation_loss", "loss ± 95 %", "text"),
        ("study_runs.loss_slope", "final slope, per 1,000 steps", "text"),
    ]
    sizes, wide = results.sizes, results.wide
    routers = (BASELINE, METHOD, numbers.DENSE_ACTIVE)
    counting = {arm for router in routers for arm in numbers.arms_by_size(sizes, router)}
    rows = [
        size_row(sizes, arm, f"{arm} *" if arm in counting else arm)
        for arm in numbers.on_axis(sizes, "size")["arm"]
    ]
    rows += [
        size_row(*one, f"{one[1]} (size {size})")
        for size, one, _ in at_baseline_rates(results)
        if one[0] is not sizes
    ]
    rows += [
        size_row(wide, arm, f"{arm}, {wide_title(wide, arm)}")
        for arm in (numbers.WIDE_BASELINE, METHOD)
        if wide
    ]
    text = (
        "H6 tests the arms marked *: of several of a router and size in the study of sizes, that of the "
        "lowest learning rate. "
    )
    worse = numbers.worse_than_smaller(sizes) if sizes else []
    worse += [f"{arm}, {wide_title(wide, arm)}" for arm in wide_and_worse(results)]
    if worse:
        text += f"Worse than a smaller model: {'; '.join(worse)}. "
    if not rows:
        text, rows = "Not run: no study on this page varies the size.", [[NOT_RUN] * len(heads)]
    table = plain_table("results_sizes", "Sizes", heads, rows)
    return section("sizes", "Sizes", text.strip(), table)


def size_row(tables: Tables, arm: str, title: str) -> list[str]:
    active, rate = numbers.by_seed(tables, arm, "parameters_active"), setting(tables, arm, "learning_rate")
    return [
        title,
        f"{active.mean() / 1e6:.1f}" if len(active) else "",
        f"{rate:g}" if rate else "",
        arm_cell(tables, arm, numbers.run_value(tables, arm, "validation_loss"), 4),
        arm_cell(tables, arm, numbers.run_value(tables, arm, "loss_slope"), 2),
    ]


def sweep_section(tables: Tables) -> Section:
    heads: Heads = [
        ("arm", "setting", "text"),
        ("cv", "CV of the worst layer (chance)", "text"),
        ("reaches", f"CV < {TARGET_CV:g}", "text"),
        ("study_runs.validation_loss", "loss ± 95 %", "text"),
        ("seeds", "seeds", "int"),
    ]
    runs = numbers.trainings(tables)
    rows = []
    for arm in dict.fromkeys(runs.loc[runs["question"] == "sweep", "arm"]):
        worst = numbers.worst_cv(tables, arm)
        reaches = absent(tables, arm) or (("yes" if worst.mean < TARGET_CV else "no") if worst else "")
        loss = arm_cell(tables, arm, numbers.run_value(tables, arm, "validation_loss"), 4)
        rows.append([arm, arm_cell(tables, arm, worst), reaches, loss, worst.seeds if worst else None])
    text = "One option at a time, in evaluation, where no quota acts; means over seeds, no test. "
    done, planned = numbers.completed(tables) if tables else (0, 0)
    if done < planned:
        text += f"Unfinished: {done} of {planned} trainings; only seeds that all settings have are shown. "
    if not rows:
        rows, text = (
            [["SPECTRA", NOT_RUN, NOT_RUN, NOT_RUN, None]],
            text + "Not run: no study on this page has a sweep.",
        )
    table = plain_table("results_sweep", "Options of SPECTRA and load balance", heads, rows)
    return section("sweep", "Option sweep", text.strip(), table)


def trend_text(points: list[tuple[float, float]]) -> str:
    """Return the least-squares slope through the points."""
    if len(points) < 2:
        return NOT_RUN
    x = [place for place, _ in points]
    y = [value for _, value in points]
    middle = sum(x) / len(x)
    spread = sum((place - middle) ** 2 for place in x)
    slope = sum((place - middle) * value for place, value in zip(x, y, strict=True)) / spread
    return minus(f"{slope:+.4f}")
