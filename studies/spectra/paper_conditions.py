"""How long the trainings of a study were, and how their options were chosen: what limits its claims."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pandas as pd
from paper_results import (
    AT_BASELINE_RATE,
    BASELINE,
    METHOD,
    NOT_RUN,
    RATE,
    WIDE_BASELINE,
    Results,
    arm_at,
    arms_by_size,
    axis_values,
    by_seed,
    compared_arms,
    finished_arms,
    on_axis,
    progress,
    setting,
    settings_of,
    study_name,
    trainings,
)
from paper_results import counted as counted_tables

from moescope.lab.study_statistics import MIN_SEEDS
from moescope.plotting.style import counted, listed
from moescope.verb import Tables

STALLED = "stalled"
LEARNED = 0.95  # of the unigram baseline: a final loss above it has learned hardly anything
FAR = 3.0  # median distances to the median that a mean may be away from it


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


# --- learning rates of sizes, documents of a measure


def documents_text(tables: Tables) -> str:
    """Return " for tokens of N documents", where N is stored, else nothing; of the arm that has fewer."""
    fewest = fewest_documents(tables)
    return f" for tokens of {counted(int(fewest), 'document')}" if fewest < math.inf else ""


def fewest_documents(tables: Tables) -> float:
    """Return how many documents outputs are compared on, of both routers the fewer; inf if not stored."""
    counts = pd.concat([by_seed(tables, arm, "output_documents") for arm in (METHOD, BASELINE)])
    return float(counts.min()) if len(counts) else math.inf


def size_rates_text(tables: Tables) -> str:
    """Return the learning rates of both routers by size, the smallest first, where they differ."""
    rates = {
        router: [rate for arm in arms_by_size(tables, router) if (rate := setting(tables, arm, RATE))]
        for router in (METHOD, BASELINE)
    }
    if not all(rates.values()) or rates[METHOD] == rates[BASELINE]:
        return ""
    words = [f"{router} {', '.join(f'{rate:g}' for rate in found)}" for router, found in rates.items()]
    return f"learning rates, the smallest model first: {' and '.join(words)}"


Arm = tuple[Tables, str]


def at_baseline_rates(results: Results) -> list[tuple[str, Arm, Arm]]:
    """Return size and arms of both routers at the learning rate of the baseline, of finished studies.

    The controls are of the size that has as many active parameters, trained for as many steps.
    """
    found: list[tuple[str, Arm, Arm]] = []
    others, of_controls = (
        {} if one and progress(one, 0) else one for one in (results.size_rates, results.controls)
    )
    controls = [(of_controls, arm) for arm in (AT_BASELINE_RATE, BASELINE)]
    for size in axis_values(results.sizes, "size"):
        baseline = results.sizes, arm_at(results.sizes, BASELINE, "size", size) or ""
        pairs = equal_rates([results.sizes, others], size)
        same_size = [
            (by_seed(*arm, "parameters_active").mean(), setting(*arm, "steps"))
            for arm in (baseline, controls[1])
        ]
        if same_size[0] == same_size[1]:
            pairs.append((setting(*controls[1], RATE) or 0.0, controls[0], controls[1]))
        same = [(one, other) for rate, one, other in pairs if rate == setting(*baseline, RATE)]
        found += [(size, *both) for both in same[:1]]
    return found


def equal_rates(studies: list[Tables], size: str) -> list[tuple[float, Arm, Arm]]:
    """Return rate and arms of both routers of that size which share a learning rate, highest first."""
    rates = [
        ((tables, arm), setting(tables, arm, RATE))
        for tables in studies
        for arm, label in on_axis(tables, "size")[["arm", "label"]].itertuples(index=False)
        if label == size and arm in finished_arms(tables)
    ]
    pairs = [
        (rate, one, other)
        for one, rate in rates
        for other, same in rates
        if rate and rate == same and [arm.split(" ")[0] for _, arm in (one, other)] == [METHOD, BASELINE]
    ]
    return sorted(pairs, key=lambda pair: -pair[0])
