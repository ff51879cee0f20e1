"""Figures of the pages made of the results of studies: one per table of the page Results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import paper_results as numbers
from charts import Areas, Dots, Lines, Map, Panel, Shares, figure
from paper_cases import mixed_documents, rare_experts, turnover
from paper_conditions import at_baseline_rates, size_rates_text
from paper_figures import SETTLED, first_seed, middle_layer, variant_arms
from paper_page import (
    FFN,
    PARTS,
    predictor_title,
    significance_rows,
    task_values,
)
from paper_results import (
    BASELINE,
    DENSE_ACTIVE,
    FIXED_CHOICES,
    METHOD,
    ROUTERS,
    VARIANTS,
    Estimate,
    Results,
)
from paper_some import RUNS, as_published, epoch_losses, some_studies

from moescope.lab.report_study import TARGET_CV
from moescope.plotting.style import capital, counted
from moescope.verb import Tables

SHOWN = {METHOD: "SPECTRA", BASELINE: "Switch Top-2"}
Panels = list[Panel]
WIDE = 10.0  # times the median interval


def chart(anchor: str, results: Results) -> str:
    panels, caption = CHARTS[anchor]
    return figure(panels(results), caption)


def estimate_of(row: Any) -> Estimate:
    return Estimate(row.estimate, (row.high - row.low) / 2, row.seeds)


def hypotheses_panels(results: Results) -> Panels:
    """Every hypothesis in its own unit."""
    rows = results.judged
    rows = rows[(rows["group"] == "Hypotheses") & (rows["check"] == "") & rows["estimate"].notna()]
    rows = rows[~rows["estimand"].isin(["ratio", "least"])]
    return [
        Dots(f"{one.claim}: {one.text}", [(one.verdict, estimate_of(one))], 0.0) for one in rows.itertuples()
    ]


def pairs_panels(results: Results, group: str) -> Panels:
    """Differences with an interval; one far wider than the others has a scale of its own."""
    panels: Panels = []
    judged = results.judged
    judged = judged[(judged["group"] == group) & (judged["check"] == "")]
    for name, of_study in judged.groupby("study", sort=False):
        rows = [(f"{one.arm} minus {one.than}", estimate_of(one)) for one in of_study.itertuples()]
        known = [(title, one) for title, one in rows if math.isfinite(one.half)]
        limit = WIDE * float(np.median([one.half for _, one in known])) if known else 0.0
        for wide, ending in ((False, ""), (True, ", wide interval")):
            shown: list[tuple[str, Estimate | None]] = [row for row in known if (row[1].half > limit) == wide]
            panels.append(Dots(f"Loss in {name} (nats per token{ending})", shown, 0.0))
    return panels


def significance_panels(results: Results) -> Panels:
    groups: dict[str, list[tuple[str, Estimate | None]]] = {}
    for title, _, one in significance_rows(results):
        first, _, second = title.partition(" vs. ")
        kind = "base models" if second.startswith("Top-2, ") else "routers"
        kind = "ablations" if first != "SPECTRA" else kind
        name = second.split(" (")[0].removeprefix("Top-2, ")
        groups.setdefault(kind, []).append((name, one))
    closure = [(arm, numbers.gap_closure(results.main, arm)) for _, arm in ROUTERS]
    return [
        *(
            Dots(f"Loss of SPECTRA minus the other, {kind} (nats)", rows, 0.0)
            for kind, rows in groups.items()
        ),
        Dots("Gap closure (0: dense, 1: dense of total size)", closure),
    ]


def performance_panels(results: Results) -> Panels:
    tables = results.main
    arms = sorted(
        numbers.finished_arms(tables), key=lambda arm: numbers.by_seed(tables, arm, "validation_loss").mean()
    )
    losses = {arm: numbers.domain_losses(tables, arm) for arm in arms}
    overall = [(arm, numbers.run_value(tables, arm, "validation_loss")) for arm in arms]
    panels: Panels = [Dots("All trained domains: loss (nats per token)", overall)]
    outside = numbers.unseen(tables)
    for domain in numbers.trained_domains(tables):
        panels.append(Dots(f"{domain}: loss", domain_rows(losses, domain)))
    bits = {arm: numbers.domain_bits(tables, arm) for arm in arms}
    for domain in outside:
        panels.append(Dots(f"{domain}, not trained on: bits per byte", domain_rows(bits, domain)))
    tasks = task_values(results.tasks)
    return [*panels, *(Dots(task, list(of_arms.items())) for task, of_arms in tasks.items())]


def domain_rows(values: dict[str, pd.DataFrame], domain: str) -> list[tuple[str, Estimate | None]]:
    return [
        (arm, numbers.over_seeds(of_arm[domain]) if domain in of_arm else None)
        for arm, of_arm in values.items()
    ]


def curves_panels(
    tables: Tables, column: str, title: str, arms: list[tuple[str, str]], start: float = 0.0
) -> Panels:
    """Means over seeds by step, from that share of the steps on."""
    if "study_curves" not in tables:
        return []
    rows = tables["study_curves"]
    rows = rows[rows["step"] >= start * rows["step"].max()]
    means = rows.groupby(["arm", "step"])[column].mean().dropna()
    series = {
        name: [(float(step), Estimate(float(value), math.nan, 0)) for step, value in means[arm].items()]
        for name, arm in arms
        if arm in means.index.get_level_values("arm")
    }
    if not series:
        return []
    steps = [step for of in series.values() for step, _ in of]
    middle = (min(steps) + max(steps)) / 2
    labels = {step: f"{step:,.0f}" for step in (min(steps), middle, max(steps))}
    return [Lines(title, series, labels, marks=False)]


def variant_curves(results: Results) -> Panels:
    """The loss of each variant minus that of the full method at the same step and seed."""
    arms = [(title, arm) for title, arm, _ in VARIANTS if arm != METHOD]
    rows = results.ablation.get("study_curves")
    if rows is None or rows.empty:
        return []
    wide = rows.pivot_table(index=["step", "seed"], columns="arm", values="validation_loss")
    if METHOD not in wide:
        return []
    gaps = wide.sub(wide[METHOD], axis=0).drop(columns=METHOD).stack().rename("gap").reset_index()
    title = "Loss minus SPECTRA-Full (nats per token) by step"
    return curves_panels({"study_curves": gaps}, "gap", title, arms, SETTLED)


def entropy_curves(results: Results) -> Panels:
    return curves_panels(results.main, "routing_entropy", "Routing entropy (nats) by step", ROUTERS)


def map_panels(results: Results) -> Panels:
    rows = results.main.get("study_experts")
    if rows is None or rows.empty:
        return []
    rows = first_seed(rows[rows["arm"].isin(SHOWN)])
    rows = rows[rows["layer"] == middle_layer(rows)]
    limit = float(rows[["x", "y"]].abs().max().max())
    panels: Panels = []
    for arm, title in SHOWN.items():
        of = rows[rows["arm"] == arm]
        points = [(x, y, str(name)) for x, y, name in zip(of["x"], of["y"], of["expert"], strict=True)]
        panels.append(Map(f"{title}: outputs of experts", points, limit))
    return panels


def usage_panels(results: Results) -> Panels:
    rows = (results.ablation or results.main).get("study_usage")
    if rows is None or rows.empty:
        return []
    rows = first_seed(rows[rows["layer"] == middle_layer(rows)])
    panels: Panels = []
    for title, arm in variant_arms(rows):
        of = rows[rows["arm"] == arm]
        wide = of.pivot_table(index="step", columns="expert", values="share").dropna()
        wide = wide[wide.iloc[-1].sort_values(ascending=False).index]
        panels.append(Areas(f"{title}: share of the load", list(wide.index), wide.to_numpy().tolist()))
    return panels


def quota_panels(results: Results) -> Panels:
    rows = (results.main or results.ablation).get("study_experts")
    rows = None if rows is None else rows[(rows["arm"] == METHOD) & rows["before_quota"].notna()]
    if rows is None or rows.empty:
        return []
    rows = first_seed(rows)
    rows = rows[rows["layer"] == middle_layer(rows)].sort_values("before_quota", ascending=False)
    labels = {float(place): f"E{expert}" for place, expert in enumerate(rows["expert"])}
    shown = {place: name for place, name in labels.items() if place % max(len(labels) // 8, 1) == 0}
    series = {
        name: [
            (float(place), Estimate(float(share), math.nan, 0)) for place, share in enumerate(rows[column])
        ]
        for name, column in (("before", "before_quota"), ("after", "after_quota"))
    }
    even = Estimate(1 / len(rows), math.nan, 0)
    series["even load"] = [(0.0, even), (len(rows) - 1.0, even)]
    return [Lines("Share of slots per expert", series, shown | {len(rows) - 1.0: ""}, marks=False)]


def spans_panels(results: Results) -> Panels:
    spans = results.main.get("study_spans")
    if spans is None or spans.empty:
        return []
    spans = spans[(spans["seed"] == spans["seed"].min()) & (spans["document"] == 0)]
    panels: Panels = []
    for arm, title in SHOWN.items():
        rows = []
        for (first, last, domain), of in spans[spans["arm"] == arm].groupby(["first", "last", "domain"]):
            parts = [(f"E{expert}", share) for expert, share in zip(of["expert"], of["share"], strict=True)]
            rows.append((f"{first + 1} to {last + 1}, {domain}", sorted(parts, key=lambda part: -part[1])))
        panels.append(Shares(f"{title}: most used experts per span of tokens", rows))
    return panels


def layer_panel(
    title: str, tables: Tables, arms: list[tuple[str, str]], metric: str, scale: float = 1.0
) -> Dots:
    return Dots(
        title, [(name, numbers.layer_value(tables, arm, metric)) for name, arm in arms], math.nan, scale
    )


def variants_panels(results: Results) -> Panels:
    arms = [(title, arm) for title, arm, _ in VARIANTS]
    rates = [(title, numbers.collapse_rate(results.ablation, arm)) for title, arm in arms]
    rate_rows = [(title, Estimate(one.rate, math.nan, 0) if one else None) for title, one in rates]
    return [
        layer_panel("Expert entropy (nats)", results.ablation, arms, "load_entropy"),
        layer_panel("Expert overlap (%)", results.ablation, arms, "expert_overlap", 100.0),
        layer_panel("Orthogonality of outputs × 100", results.ablation, arms, "output_orthogonality", 100.0),
        Dots("Collapse rate (%)", rate_rows, 0.0, 100.0),
    ]


def overhead_panels(results: Results) -> Panels:
    timed = next(
        (one for one in (results.main, results.ablation) if numbers.block_milliseconds(one, METHOD)), {}
    )
    if not timed:
        return []
    parts = timed["overhead"]
    parts = parts[parts["router"] == METHOD].sort_values("milliseconds", ascending=False)
    names = [PARTS.get(part, capital(part.replace("_", " "))) for part in parts["component"]]
    rows = [(name, point(ms)) for name, ms in zip(names, parts["milliseconds"], strict=True)]
    totals = [(title, point(numbers.block_milliseconds(timed, arm))) for arm, title in SHOWN.items()]
    return [
        Dots("Parts of SPECTRA's block (ms)", rows, 0.0),
        Dots("One block (ms)", totals, 0.0),
    ]


def point(value: float | None) -> Estimate | None:
    return None if value is None else Estimate(float(value), math.nan, 0)


def bases_panels(results: Results) -> Panels:
    panels: Panels = []
    for base, routers in numbers.base_models(results.bases).items():
        arms = {router: f"{base}: {router}" for router in routers}
        gaps = [
            (router, numbers.over_seeds(numbers.loss_gain(results.bases, arms[BASELINE], arm).dropna()))
            for router, arm in arms.items()
            if router != BASELINE and BASELINE in arms
        ]
        panels.append(Dots(f"{base}: loss minus {BASELINE}", gaps, 0.0))
    return panels


def experts_panels(results: Results) -> Panels:
    tables = results.experts
    counts = numbers.axis_values(tables, "experts")
    labels = {math.log2(count): f"{count:g}" for count in counts}
    panels: Panels = []
    loss = {
        title: [
            (math.log2(count), one)
            for count in counts
            if (
                one := numbers.run_value(
                    tables, numbers.arm_at(tables, router, "experts", count), "validation_loss"
                )
            )
        ]
        for router, title in SHOWN.items()
    }
    panels.append(Lines("Loss (nats per token) by number of experts", loss, labels))
    arms = [
        (f"{count:g} experts", numbers.arm_at(tables, METHOD, "experts", count) or "") for count in counts
    ]
    panels.append(layer_panel("SPECTRA: expert entropy (nats)", tables, arms, "load_entropy"))
    panels.append(
        layer_panel("SPECTRA: orthogonality of outputs × 100", tables, arms, "output_orthogonality", 100.0)
    )
    return panels


def sizes_panels(results: Results) -> Panels:
    """The loss of each router by active parameters, of several arms of a size the one that counts."""
    tables, lines = results.sizes, {}
    labels: dict[float, str] = {}
    for router, title in {**SHOWN, DENSE_ACTIVE: "dense"}.items():
        points = []
        for size in numbers.axis_values(tables, "size"):
            arm = numbers.arm_at(tables, router, "size", size)
            loss = numbers.run_value(tables, arm, "validation_loss")
            if loss:
                place = math.log2(numbers.by_seed(tables, arm, "parameters_active").mean())
                labels.setdefault(place, size if router == DENSE_ACTIVE else "")
                points.append((place, loss))
        lines[title] = points
    lines[f"SPECTRA, rates of {BASELINE}"] = [
        (math.log2(numbers.by_seed(*one, "parameters_active").mean()), loss)
        for _, one, _ in at_baseline_rates(results)
        if size_rates_text(tables) and (loss := numbers.run_value(*one, "validation_loss"))
    ]
    lines = {title: points for title, points in lines.items() if points}
    return (
        [Lines("Loss (nats per token) by active parameters, log scale", lines, labels, apart=False)]
        if labels
        else []
    )


def sweep_panels(results: Results) -> Panels:
    arms = [(arm.removeprefix(f"{METHOD} "), arm) for arm in sorted(numbers.finished_arms(results.sweep))]
    worst = [(title, numbers.worst_cv(results.sweep, arm)) for title, arm in arms]
    losses = [(title, numbers.run_value(results.sweep, arm, "validation_loss")) for title, arm in arms]
    return [
        Dots("Load CV of the worst layer", worst, TARGET_CV),
        Dots("Loss (nats per token)", losses),
    ]


def stability_panels(results: Results) -> Panels:
    tables = results.main
    measures = {
        "consistency": ("Routing consistency (ideal: 1)", 1.0),
        "usage_sigma": ("Usage σ (ideal: 0)", 0.0),
        "kendall_tau": ("Kendall τ of usage (ideal: 1)", 1.0),
    }
    panels: Panels = [
        Dots(title, [(name, numbers.run_value(tables, arm, metric)) for name, arm in ROUTERS], ideal)
        for metric, (title, ideal) in measures.items()
    ]
    return [*panels, *(layer_panel(title, tables, ROUTERS, metric) for metric, title in FFN.items())]


def failures_panels(results: Results) -> Panels:
    tables = results.main
    mixed = {arm: mixed_documents(tables, arm) for arm in (*SHOWN, FIXED_CHOICES)}
    moved = {arm: turnover(tables, arm) for arm in SHOWN}
    rare = {arm: rare_experts(tables, arm) for arm in SHOWN}
    ratio = {
        arm: None if found is None else numbers.over_seeds(found["early"] / found["late"])
        for arm, found in moved.items()
    }
    outside = {arm: numbers.unseen_bits(tables, arm) for arm in SHOWN}
    domains = dict.fromkeys(domain for found in outside.values() for domain in found)
    return [
        Dots(
            "Ambiguous context: nats lost",
            [(SHOWN.get(arm, arm), one and one[1]) for arm, one in mixed.items()],
            0.0,
        ),
        *(
            Dots(
                f"{domain}: bits per byte minus {DENSE_ACTIVE}",
                [(SHOWN[arm], one.get(domain)) for arm, one in outside.items()],
                0.0,
            )
            for domain in domains
        ),
        Dots("Early over late change of usage", [(SHOWN[arm], one) for arm, one in ratio.items()], 1.0),
        Dots("Rare experts (%)", [(SHOWN[arm], one and one[0]) for arm, one in rare.items()], 0.0, 100.0),
    ]


def effects_panels(results: Results) -> Panels:
    rows = [
        (f"{predictor_title(metric)}, {arm}", numbers.layer_value(results.effects, arm, metric))
        for arm, metric in numbers.predicted_effects(results.effects)
    ]
    plain = [(name, one and replace(one, chance=math.nan)) for name, one in rows]
    return [Dots("Rank correlation with the effect", plain, 0.0)] if rows else []


def some_panels(results: Results) -> Panels:
    """The loss by epoch, here and as published (with pads), and maps of the keys of the first seed."""
    panels: Panels = []
    for tables in some_studies(results)[:1]:
        series = {
            f"{run}, {counted(len(seeds), 'seed')}": [
                (epoch, Estimate(loss, math.nan, 0)) for epoch, loss in epoch_losses(tables, run)
            ]
            for run in RUNS
            if len(seeds := numbers.by_seed(tables, run, "validation_loss"))
        }
        published = {
            run: [(epoch, Estimate(loss, math.nan, 0)) for epoch, loss in enumerate(one.losses, 1)]
            for run, one in RUNS.items()
        }
        labels = {float(epoch): str(epoch) for epoch in range(1, len(RUNS["A4"].losses) + 1)}
        known = {run: points for run, points in series.items() if points}
        pads = "with" if as_published(tables) else "without"
        titles = {f"Loss {pads} pads by epoch": known, "Published loss, with pads, by epoch": published}
        panels += [Lines(title, lines, labels, marks=False) for title, lines in titles.items() if known]
    keys = {run: found for run in RUNS if (found := keys_of(results, run)) and len(found[1])}
    limit = max((float(of[["x", "y"]].abs().max().max()) for _, of in keys.values()), default=1.0)
    for run, (name, of) in keys.items():
        points = [(x, y, "") for x, y in zip(of["x"], of["y"], strict=True)]
        panels.append(Map(f"{run}: keys ({name})", points, limit))
    return panels


def keys_of(results: Results, run: str) -> tuple[str, pd.DataFrame] | None:
    """Return study and seed, and keys, of the run's training of median loss, of the first study with one."""
    for tables in some_studies(results):
        keys = tables.get("study_keys", pd.DataFrame(columns=["arm", "seed"]))
        losses = numbers.by_seed(tables, run, "validation_loss").sort_values()
        if len(losses):
            seed = losses.index[len(losses) // 2]
            mine = keys[(keys["arm"] == run) & (keys["seed"] == seed)]
            return f"{numbers.study_name(tables)}, seed {seed}", mine
    return None


MEANS = "Means over seeds with intervals"
CHARTS: dict[str, tuple[Callable[[Results], Panels], str]] = {
    "answers": (
        hypotheses_panels,
        "Each hypothesis in its own unit, new minus reference, before the correction.",
    ),
    "hash": (
        partial(pairs_panels, group="Hash routing"),
        f"{MEANS}; left of the line the first arm is better.",
    ),
    "some": (partial(pairs_panels, group="SoME"), f"{MEANS}; left of the line the first arm is better."),
    "some-runs": (
        some_panels,
        "Medians over seeds, without stalled trainings; keys: two principal axes, training of median loss.",
    ),
    "significance": (
        significance_panels,
        f"{MEANS}, paired by seed; left of the line SPECTRA is better. Gap closure: more is better.",
    ),
    "performance": (
        performance_panels,
        f"{MEANS}; of losses less is better, of accuracies more; grey: chance. Rows by overall loss.",
    ),
    "variants": (
        variants_panels,
        "Means over layers and seeds with intervals; grey: chance, or balanced load.",
    ),
    "overhead": (overhead_panels, "Median time of a forward pass in training mode."),
    "bases": (bases_panels, f"{MEANS}, paired by seed; left of the line is better than {BASELINE}."),
    "experts": (experts_panels, f"{MEANS}; grey: chance, or balanced load."),
    "sizes": (
        sizes_panels,
        f"{MEANS}; learning rates tuned at S, divided as the width grows; dense: those of SPECTRA.",
    ),
    "sweep": (sweep_panels, f"{MEANS}; the line is the target, grey is balanced random routing."),
    "stability": (stability_panels, f"{MEANS}; lines: ideal."),
    "figure-arms-validation-loss-by-step": (
        variant_curves,
        "Means over seeds, from a fifth of the steps on; rows of held-out text, not the tables' documents.",
    ),
    "figure-arms-routing-entropy-by-step": (entropy_curves, "Means over seeds and layers, in training."),
    "figure-expert-maps": (map_panels, "Two principal axes; middle layer, first seed."),
    "figure-usage-areas": (
        usage_panels,
        "In training, by step; middle layer, first seed; experts from the bottom by their final share.",
    ),
    "figure-quota-loads": (
        quota_panels,
        "SPECTRA in training mode; middle layer, first seed, experts by load.",
    ),
    "spans": (spans_panels, "First document and first seed; a bar is the share of the span's choices."),
    "effects": (effects_panels, f"{MEANS}; right of the line: experts with a larger score matter more."),
    "failures": (failures_panels, f"{MEANS}; lines: no failure."),
}
