"""How long the trainings of a study were, and how their options were chosen: what limits its claims."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from moescope.lab.results import (
    BASELINE,
    METHOD,
    NOT_RUN,
    RATE,
    SPACING,
    WIDE_BASELINE,
    Results,
    arms_by_size,
    by_seed,
    compared_arms,
    setting,
    settings_of,
    study_name,
    trainings,
)
from moescope.lab.results import counted as counted_tables
from moescope.lab.study_statistics import MIN_SEEDS
from moescope.plotting.style import counted, listed
from moescope.reporting.untrusted import plot_words
from moescope.verb import Tables

STALLED = "stalled"
LEARNED = 0.95  # of the unigram baseline: a final loss above it has learned hardly anything
FAR = 3.0  # median distances to the median that a mean may be away from it


def settings(info: dict[str, Any]) -> pd.DataFrame:
    """Return arm, name, value: steps, tokens per step, checkpoints, learning rate, width, options of the
    router, and whether padding is to be predicted.
    """
    rows = []
    base = info.get("base", {})
    for arm in info.get("arms", []):
        over = arm.get("overrides", {})
        train = {**base.get("train", {}), **over.get("train", {})}
        model = {**base.get("model", {}), **over.get("model", {})}
        values = {name: train.get(name) for name in ("steps", "sequence_length", RATE, SPACING)} | (
            model.get("router_options") or {}
        )
        values["d_model"] = model.get("d_model")
        values["tokens_per_step"] = train.get("batch_size", 1) * train.get("sequence_length", 1)
        data = {**base.get("data", {}), **over.get("data", {})}
        values["pad_targets"] = int(data.get("layout") == "padded")
        rows += [
            {"arm": plot_words(arm["name"]), "name": name, "value": float(value)}
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
    return pd.DataFrame(rows, columns=["arm", "name", "value"])


def wide_title(tables: Tables, arm: str) -> str:
    """Return "width 512 with 64 experts"."""
    experts, width = by_seed(tables, arm, "n_experts"), setting(tables, arm, "d_model")
    return f"width {width:g}" + (f" with {experts.iloc[0]:g} experts" if len(experts) else "")


def wide_and_worse(results: Results) -> list[str]:
    """Return the arms of the wide study that predict worse than a smaller model of the same kind."""
    found = []
    for arm, router in ((METHOD, METHOD), (WIDE_BASELINE, BASELINE)):
        loss, active = (
            by_seed(results.wide, arm, column).mean() for column in ("validation_loss", "parameters_active")
        )
        smaller = [
            by_seed(results.sizes, one, "validation_loss").mean()
            for one in arms_by_size(results.sizes, router)
            if by_seed(results.sizes, one, "parameters_active").mean() < active
        ]
        found += [arm] if smaller and loss > min(smaller) else []
    return found


# --- trainings that count less


def without_stalled(tables: Tables) -> Tables:
    """Return the tables without the rows of trainings that learned hardly more than token frequencies."""
    runs = trainings(tables)
    if "unigram_loss" not in runs:
        return tables
    stalled = (runs["status"] == "done") & (runs["validation_loss"] > LEARNED * runs["unigram_loss"])
    return counted_tables({**tables, "study_runs": runs.assign(status=runs["status"].mask(stalled, STALLED))})


def stalled_text(tables: Tables, *arms: str) -> str:
    """Return "1 of 2": stalled trainings of the arms, of those that ended; empty if none stalled."""
    runs = without_stalled(tables)["study_runs"]
    status = runs.loc[runs["arm"].isin(arms) & ~runs["status"].isin([NOT_RUN, "failed"]), "status"]
    stalled = int((status == STALLED).sum())
    return f"{stalled} of {len(status)}" if stalled else ""


def outlier_text(values: pd.Series) -> str:
    """Return the median where a seed far from the others moves the mean, else nothing."""
    values = values.dropna()
    away = (values - values.median()).abs()
    if len(values) < MIN_SEEDS or not abs(values.mean() - values.median()) > FAR * away.median():
        return ""
    far = int(away.idxmax())
    return f"median {values.median():.3f}; seed {far}: {values[far]:.3f}".replace("-", "−")


# --- length and tuning


@dataclass
class Tuning:
    """What was tried for one router: option -> values, and each training's settings."""

    tried: dict[str, set[float]] = field(default_factory=dict)
    trained: list[dict[str, float]] = field(default_factory=list)

    @property
    def values(self) -> int:
        return sum(map(len, self.tried.values()))


def tunings(results: Results) -> dict[str, Tuning]:
    """Return router -> what was tried; arms of a tuning are named "ROUTER OPTION=VALUE"."""
    found: dict[str, Tuning] = {}
    for tables in results.tuning:
        for arm in dict.fromkeys(trainings(tables)["arm"]):
            router, _, change = str(arm).partition(" ")
            option, _, value = change.partition("=")
            if not is_number(value):
                continue  # an arm that varies no number
            of_router = found.setdefault(router, Tuning())
            of_router.tried.setdefault(option, set()).add(float(value))
            of_router.trained.append(settings_of(tables, arm))
    return found


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def at_edge(results: Results) -> dict[str, dict[str, float]]:
    """Return router -> option -> value of the main study that is the least or greatest that was tried."""
    found: dict[str, dict[str, float]] = {}
    for router, tuning in tunings(results).items():
        chosen = settings_of(results.main, router)
        for option, values in tuning.tried.items():
            value = chosen.get(option)
            if value is not None and (value <= min(values) or value >= max(values)):
                found.setdefault(router, {})[option] = value
    return found


def untrained_combinations(results: Results) -> list[str]:
    """Return the routers whose chosen values were never trained together in the tuning.

    A chosen value that the tuning never set is the default, which the other trainings had.
    """
    found = []
    for router, tuning in tunings(results).items():
        chosen = settings_of(results.main, router)
        picked = {name: chosen[name] for name, values in tuning.tried.items() if chosen.get(name) in values}
        if not any(picked.items() <= one.items() for one in tuning.trained):
            found.append(router)
    return sorted(found)


def conditions(results: Results) -> str:
    """Return one paragraph on the length of trainings and on tuning; empty if nothing is known."""
    parts = (length(results.main), other_lengths(results), tuned(results))
    return " ".join(part for part in parts if part)


def length(tables: Tables) -> str:
    arms = compared_arms(tables)
    lengths = {(setting(tables, arm, "steps"), setting(tables, arm, "tokens_per_step")) for arm in arms}
    lengths = {one for one in lengths if all(one)}  # a training by epochs has 0 steps
    if not lengths:
        return ""
    words = listed([f"{steps:,.0f} steps of {tokens:,.0f} tokens" for steps, tokens in sorted(lengths)])
    text = (
        f"Each training of {study_name(tables)} has {words}"
        if study_name(tables)
        else f"Trainings have {words}"
    )
    slopes = [float(-by_seed(tables, arm, "loss_slope").mean()) for arm in arms]
    slopes = sorted(slope for slope in slopes if slope == slope)
    if slopes and slopes[0] > 0:
        text += (
            f". At their end losses still fall by {slopes[0]:.2f} to {slopes[-1]:.2f} nats per 1,000 steps, "
            "so these are short trainings, and the order of routers may change in longer ones"
        )
    return f"{text}."


def other_lengths(results: Results) -> str:
    """Name the studies whose trainings have other numbers of steps than those of the main one."""
    own = steps_of(results.main)
    parts = (results.ablation, results.experts, results.sizes, results.wide, results.bases, results.sweep)
    others = {
        study_name(one): steps_of(one)
        for one in (*parts, results.effects, results.tasks, *results.others)
        if one and steps_of(one) != own
    }
    words = [
        f"{name} {listed([f'{steps:,.0f}' for steps in found])}"
        for name, found in others.items()
        if name and found
    ]
    return f"Steps of other studies: {', '.join(words)}." if words else ""


def steps_of(tables: Tables) -> list[float]:
    arms = dict.fromkeys(trainings(tables)["arm"])
    return sorted({steps for arm in arms if (steps := setting(tables, arm, "steps"))}, reverse=True)


def tuned(results: Results) -> str:
    found = tunings(results)
    if not found:
        return ""
    seeds = sorted({int(trainings(one)["seed"].nunique()) for one in results.tuning})
    steps = sorted({one["steps"] for of in found.values() for one in of.trained if "steps" in one})
    values = sorted(of.values for of in found.values())
    text = (
        f"Learning rates and one option per router were tuned with {counted(seeds[-1], 'seed')}"
        + (f" of {steps[-1]:,.0f} steps" if steps else "")
        + f" per value, {values[0]} to {values[-1]} values per router (more where an edge of its grid won), "
        "one factor at a time"
    )
    combined = untrained_combinations(results)
    if combined:
        text += f"; the chosen values of {listed(combined)} were not trained together in the tuning"
    edges = [
        f"{router} {name} {value:g}" for router, of in at_edge(results).items() for name, value in of.items()
    ]
    if edges:
        text += f". Still at the edge of what was tried: {listed(sorted(edges))}"
    return f"{text}."
