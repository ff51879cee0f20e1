"""SoME's runs on the page "Results", beside the published ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import paper_results as numbers
from paper_cells import Heads, arm_cell, cell, section
from paper_conditions import LEARNED, STALLED, outlier_text, stalled_text, without_stalled
from paper_results import NOT_RUN, Results, setting

from moescope.reporting.pack import plain_table
from moescope.verb import Section, Tables

FIRST = "A4"
NONE = "–"  # a router without keys, a row without pads, a run that was not published
NOT_MEASURED = "not measured"
PUBLISHED_LENGTH = 768  # tokens per row; pads among them count in the published loss


@dataclass(frozen=True)
class Published:
    """A published run: experts, and by epoch validation loss, Gini and entropy of the load in bits."""

    experts: int
    losses: tuple[float, ...]
    gini: tuple[float, ...]
    bits: tuple[float, ...]
    used: int  # experts with any token at the end


RUNS = {
    "A4": Published(
        64, (0.8527, 0.7586, 0.7197, 0.7126), (0.872, 0.842, 0.864, 0.851), (3.396, 3.658, 3.336, 3.413), 64
    ),
    "B1": Published(
        128, (0.9990, 0.8270, 0.7709, 0.7602), (0.941, 0.923, 0.912, 0.914), (3.272, 3.413, 3.635, 3.427), 128
    ),
    "B2": Published(
        256, (0.8658, 0.7663, 0.7254, 0.7174), (0.948, 0.959, 0.956, 0.952), (4.094, 3.513, 3.719, 3.725), 256
    ),
    "B3": Published(
        512, (0.8652, 0.7638, 0.7231, 0.7155), (0.979, 0.972, 0.971, 0.972), (3.565, 3.744, 3.841, 3.767), 497
    ),
}


def some_studies(results: Results) -> list[Tables]:
    """Return the studies that have SoME's runs without stalled trainings, those trained on pads first."""
    found = [tables for tables in results.others if FIRST in set(numbers.trainings(tables)["arm"])]
    return sorted(map(without_stalled, found), key=lambda tables: not as_published(tables))


def as_published(tables: Tables) -> bool:
    length, pads = (setting(tables, FIRST, name) for name in ("sequence_length", "pad_targets"))
    return length == PUBLISHED_LENGTH and bool(pads)


def some_section(results: Results) -> Section:
    heads: Heads = [
        ("study", "study", "text"),
        ("arm", "run", "text"),
        ("experts", "experts", "int"),
        ("stalled", STALLED, "text"),
        ("study_runs.validation_loss", "loss without pads ± 95 %", "text"),
        ("study_runs.loss_slope", "final slope, per 1,000 steps", "text"),
        ("validation_loss_published", "loss with pads ± 95 %", "text"),
        ("published", "published loss", "text"),
        ("gini", "Gini (balanced)", "text"),
        ("published", "published Gini", "text"),
        ("load_entropy_bits", "load entropy, bits (balanced)", "text"),
        ("published", "published entropy", "text"),
        ("used", "experts used, % (balanced)", "text"),
        ("published", "published use, %", "text"),
        ("cosine", "mean cosine of keys (random keys)", "text"),
    ]
    rows: list[list[Any]] = []
    outliers = ""
    for tables in some_studies(results):
        for arm in dict.fromkeys(numbers.trainings(tables)["arm"]):
            rows.append([numbers.study_name(tables), arm, *run_cells(tables, arm)])
            if far := outlier_text(numbers.by_seed(tables, arm, "validation_loss")):
                outliers += f"Loss of {arm} in {numbers.study_name(tables)}: {far}. "
    text = (
        "Stories in another language than the published ones: compare curves, use and order, not losses. Use "
        "and keys are of the middle layer, use in the last window of training. Published losses count pads "
        f"of rows of {PUBLISHED_LENGTH} tokens, so they stand beside trainings on such rows only; the "
        "published use of experts, pads included, stands beside all. Stalled: a final loss less than a "
        "twentieth below the unigram baseline; the other columns exclude such trainings. How the published "
        "share of used experts was counted is not known to us. "
    )
    text += outliers
    if not rows:
        text += "Not run: no study on this page has these arms."
        rows = [
            [NOT_RUN, run, one.experts, *[NOT_RUN] * 4, *published_cells(one)] for run, one in RUNS.items()
        ]
    table = plain_table("results_some_runs", "SoME's runs", heads, rows)
    return section("some-runs", "SoME's runs", text.strip(), table)


def run_cells(tables: Tables, arm: str) -> list[Any]:
    """Return the cells of one arm, the published ones beside them where there are any."""
    runs = numbers.trainings(tables)
    runs = runs[runs["arm"] == arm]
    experts = runs["n_experts"].dropna() if "n_experts" in runs else runs["seed"][:0]
    loss, padded = (
        numbers.run_value(tables, arm, name) for name in ("validation_loss", "validation_loss_published")
    )
    padded_rows, same = as_published(tables), RUNS.get(arm)
    found = [
        numbers.layer_value(tables, arm, f"key_{name}") for name in ("gini", "load_entropy_bits", "used")
    ]
    beside = (
        [NONE] * 4
        if same is None
        else [
            f"{same.losses[-1]:.4f}" if padded_rows else NONE,
            *(f"{same.gini[-1]:.3f}", f"{same.bits[-1]:.3f}", used_text(same)),
        ]
    )
    scales = (1.0, 1.0, 100.0)
    use = [
        part
        for one, scale, other in zip(found, scales, beside[1:], strict=True)
        for part in (cell(one, 3 if scale == 1.0 else 1, scale) if one else NONE, other)
    ]
    cosine = numbers.layer_value(tables, arm, "key_cosine")
    slope = numbers.run_value(tables, arm, "loss_slope")
    known = "unigram_loss" in runs and runs["unigram_loss"].notna().any()
    only_stalled = STALLED in set(runs["status"]) and loss is None
    return [
        int(experts.iloc[0]) if len(experts) else None,
        stalled_text(tables, arm) or ("none" if known else NOT_MEASURED),
        STALLED if only_stalled else arm_cell(tables, arm, loss, 4, chance=False),
        cell(slope, 2, chance=False) if slope else NONE,
        cell(padded, 4, chance=False) if padded and padded_rows else NONE,  # else pads were not learned
        beside[0],
        *use,
        cell(cosine) if cosine else NONE,
    ]


def steps_to_learn(tables: Tables) -> dict[str, str]:
    """Return the steps until trainings of an arm have learned more than frequencies: median and range."""
    curves, runs = tables.get("study_curves"), numbers.trainings(tables)
    if curves is None or "unigram_loss" not in runs:
        return {}
    runs = runs[runs["unigram_loss"].notna()]
    levels = runs.set_index(["arm", "seed"])["unigram_loss"] * LEARNED
    rows = curves.join(levels.rename("level"), on=["arm", "seed"])
    first = rows[rows["train_loss"] < rows["level"]].groupby(["arm", "seed"], sort=False)["step"].min()
    found = {}
    for arm, planned in runs.groupby("arm", sort=False):
        steps = first[first.index.get_level_values("arm") == arm]
        never = len(planned) - len(steps)
        words = [f"{steps.min():g} to {steps.max():g}"] if len(steps) > 1 else []
        words += [f"{never} never"] if never else []
        median = f"{steps.median():g}" if len(steps) else "none"
        found[str(arm)] = median + (f" ({', '.join(words)})" if words else "")
    return found


def published_cells(one: Published) -> list[str]:
    return [
        *(f"{one.losses[-1]:.4f}", NOT_RUN, f"{one.gini[-1]:.3f}", NOT_RUN, f"{one.bits[-1]:.3f}"),
        *(NOT_RUN, used_text(one), NOT_RUN),
    ]


def used_text(one: Published) -> str:
    return f"{100 * one.used / one.experts:.1f}"


def epoch_losses(tables: Tables, arm: str) -> list[tuple[float, float]]:
    """Return epoch and median loss at its end, with pads if they were learned; there are four epochs."""
    rows = tables.get("study_curves")
    column = "validation_loss_published" if as_published(tables) else "validation_loss"
    if rows is None or column not in rows:
        return []
    middle = rows[rows["arm"] == arm].groupby("step")[column].median().dropna()
    last = float(middle.index.max()) if len(middle) else math.nan
    epochs = len(RUNS[FIRST].losses)
    return [(epochs * float(step) / last, float(value)) for step, value in middle.items() if step > 0]
