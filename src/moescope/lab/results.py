"""Numbers of the routing paper's results section, from the tables of one study or of several.

Every number is a mean over seeds with a 95 % t interval, paired by seed where two arms are compared. An arm
that was not trained gives None, never a number of another arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moescope.lab.study_statistics import (
    LEVEL,
    MIN_SEEDS,
    ROUNDING,
    doubling_slopes,
    enters_comparisons,
    hedges_factor,
    holm,
)
from moescope.statistics import split_half_ceiling
from moescope.verb import Tables

METHOD, BASELINE, WIDE_BASELINE = "spectra", "top2", "topk"  # arms; the last of the study of a wide model
DENSE_ACTIVE, DENSE_TOTAL = "dense", "dense_total"
FIXED_CHOICES = "hash"  # choices that do not depend on the context
ROUTERS = [  # row of the published tables, arm
    ("Switch Top-1", "switch_top1"),
    ("Switch Top-2", BASELINE),
    ("Expert Choice", "expert_choice"),
    ("Hash", "hash"),
    ("SPECTRA", METHOD),
]
VARIANTS = [  # row, arm, whether the hypothesis on components names it
    ("SPECTRA-Full", METHOD, False),
    ("-Expression", f"{METHOD}-Expression", True),
    ("-GRU", f"{METHOD}-GRU", True),
    ("-SpecialityPenalty", f"{METHOD}-SpecialityPenalty", True),
    ("-OrthoConstraint", f"{METHOD}-Ortho", True),
    ("-Repulsion", f"{METHOD}-Repulsion", False),
    ("-Quota", f"{METHOD}-Quota", False),
    ("-All", f"{METHOD}-All", False),
]
EFFECT, GIVEN_LOAD = "effect_", "_given_load"  # metrics of study_layers
PREDICTORS = {"alignment": 1, "ambiguity": -1}  # sign of the expected correlation
EQUAL_FLOPS = f"{BASELINE}_flops"
AT_BASELINE_RATE, AT_METHOD_RATE = (
    f"{METHOD} at the rate of {BASELINE}",
    f"{BASELINE} at the rate of {METHOD}",
)
NEW_ROWS = f"{BASELINE}, new rows"  # in a model that exists: as untrained as the method's router
LONGER = " x4"  # ends the names of arms of four times the steps
ARM_CLAIMS = {  # subject -> claim, the arm that is better by it, the other
    "Hash routing": [
        ("A hash of the token beats a learned top-two router", "hash", BASELINE),
        ("It does so after four times the steps", f"hash{LONGER}", f"{BASELINE}{LONGER}"),
        ("A hash of the previous token is worse", "hash", "hash_previous"),
        ("Random experts per occurrence are worse", "hash", "hash_random"),
        ("Top-two gains if it reads the token's embedding", f"{BASELINE}_token", BASELINE),
    ],
    "SoME": [
        ("SoME gains from eight times the experts", "B3", "A4"),
        ("Keys that organise themselves beat frozen ones", "A4", "A4 frozen keys"),
        ("Frozen random experts contribute", "A4", "A4 zero experts"),
        ("SoME beats a dense model of its active size", "A4", "A4 dense"),
        ("Training the experts helps", "A4 trained experts", "A4"),
    ],
}
WHOSE = {  # subject -> who claims it
    "SPECTRA": "Claims of the routing paper, tested with our own implementation of its router. Where paper "
    "and code disagree, we chose one reading; the code's own was not trained. The arm top2 is Switch Top-2.",
    "Hash routing": "Our own claims; no paper's.",
    "SoME": "The claims on the number of experts and on keys are the SoME paper's; the others are our own.",
    "Removing experts": "Our own claims; no paper's.",
}
PAIRS = [(arm, other) for claims in ARM_CLAIMS.values() for _, arm, other in claims]
LEAST_SHARE, MOST_VIOLATION = 0.01, 0.5  # beyond them a layer has collapsed
SPECIALISED = ("code", "math", "medicine", "science", "headers", "arithmetic")  # domains
SIMILAR_COST = 1.1  # times that of the baseline

CONFIRMED, REFUTED = "confirmed", "refuted"
UNDECIDED = "undecided"  # tested, but not distinguishable
UNFINISHED = "unfinished"  # trainings of the study are still to come
NOT_TESTABLE = "not testable"  # not run, or too few seeds
VERDICTS = (CONFIRMED, REFUTED, UNDECIDED, UNFINISHED, NOT_TESTABLE)
NOT_RUN = "not run"
SET_ASIDE = "set aside"  # status of a training whose seed other arms of an unfinished study lack
RATE, SPACING = "learning_rate", "checkpoint_every"  # settings
TUNING = "tuning"  # the names of studies that only choose values begin so


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `half` is half the width of its 95 % interval, NaN for one seed."""

    mean: float
    half: float
    seeds: int
    chance: float = math.nan
    p_value: float = math.nan  # of a mean without effect, two-sided
    p_adjusted: float = math.nan  # by Holm, for all tests of the page
    hedges_g: float = math.nan
    unfinished: str = ""  # how far the study is, if trainings of it are still to come
    failed: int = 0  # trainings of the arms that are compared, and those no better than the unigram baseline
    failed_others: int = 0  # of all arms but the first, which the claim is about

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def significant(self) -> bool:
        return self.p_adjusted <= LEVEL


def over_seeds(values: Iterable[float], chance: float = math.nan) -> Estimate | None:
    """Return mean and t interval of one value per seed; None without any."""
    found = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    n = len(found)
    if not n:
        return None
    error = found.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error if n > 1 else math.nan
    p = 1.0 if n > 1 and not found.any() else math.nan
    effect = math.nan
    if n > 1 and error > ROUNDING * np.abs(found).max():
        statistic = float(found.mean() / error)
        p = 2 * float(stats.t.sf(abs(statistic), n - 1))
        effect = float(hedges_factor(np.array(n - 1))) * statistic * math.sqrt(2 / n)
    return Estimate(float(found.mean()), half, n, chance, p, hedges_g=effect)


Key = tuple[str, ...]  # a hypothesis, or what is compared
Tests = dict[Key, Estimate | None]


@dataclass(frozen=True)
class Tested:
    """A number by seed, and the study and arms that it compares."""

    values: pd.Series
    tables: Tables
    arms: tuple[str, ...]


# --- which study answers what


@dataclass(frozen=True)
class Results:
    """The tables of each part of the results section; an empty part was not run."""

    main: Tables
    ablation: Tables
    experts: Tables
    sizes: Tables
    bases: Tables
    sweep: Tables = field(default_factory=dict)
    others: tuple[Tables, ...] = ()  # of claims about pairs of arms
    effects: Tables = field(default_factory=dict)
    tuning: tuple[Tables, ...] = ()
    tasks: Tables = field(default_factory=dict)
    controls: Tables = field(default_factory=dict)  # routers at one learning rate
    wide: Tables = field(default_factory=dict)  # one model, wider than those of `sizes`
    size_rates: Tables = field(default_factory=dict)  # sizes at other learning rates

    @classmethod
    def of(cls, studies: Sequence[Tables]) -> Results:
        """Give each part the study that has most of its arms, then of trainings."""
        studies = [counted(tables) for tables in studies]
        routers = {arm for _, arm in ROUTERS}
        variants = {arm for _, arm, _ in VARIANTS} - routers
        controls = {arm for pair in PAIRS for arm in pair} - routers
        main = most(studies, lambda tables: len(routers & finished_arms(tables)))
        sizes = most(studies, lambda tables: len(axis_values(tables, "size")))
        return cls(
            main,
            most(studies, lambda tables: len(variants & finished_arms(tables))),
            most(studies, lambda tables: len(axis_values(tables, "experts"))),
            sizes,
            most(studies, lambda tables: len(base_models({"study_runs": finished(tables)}))),
            most(studies, lambda tables: int((finished(tables).get("question") == "sweep").sum())),
            tuple(one for one in studies if one is main or controls & finished_arms(one)),
            most(studies, lambda tables: len(predicted_effects(tables))),
            tuple(one for one in studies if study_name(one).startswith(TUNING)),
            most(studies, lambda tables: len(tables.get("study_tasks", ()))),
            most(studies, lambda tables: int(AT_BASELINE_RATE in finished_arms(tables))),
            most(studies, lambda tables: int(is_wide(tables, main))),
            most(
                [one for one in studies if one is not sizes],
                lambda tables: len(axis_values(tables, "size")),
            ),
        )

    @cached_property
    def tests(self) -> Tests:
        """The estimate of each number that is tested, Holm-corrected together.

        A test on fewer than five seeds or of an unfinished study claims nothing and is not in the family.
        """
        found: Tests = {}
        for key, one in tested_numbers(self).items():
            estimate = over_seeds(one.values)
            failed = [failures(one.tables, arm) for arm in one.arms]
            found[key] = estimate and replace(
                estimate,
                unfinished=progress(one.tables, estimate.seeds),
                failed=sum(failed),
                failed_others=sum(failed[1:]),
            )
        p = [
            one.p_value if one and one.seeds >= MIN_SEEDS and not one.unfinished else math.nan
            for one in found.values()
        ]
        adjusted = dict(zip(found, holm(np.array(p)), strict=True))
        return {key: one and replace(one, p_adjusted=float(adjusted[key])) for key, one in found.items()}


def is_wide(tables: Tables, main: Tables) -> bool:
    """Return whether a study compares the method with top-k alone, in models wider than the main one's."""
    arms = set(trainings(tables)["arm"])
    both = [setting(one, METHOD, "d_model") or 0.0 for one in (tables, main)]
    return {METHOD, WIDE_BASELINE} <= arms and BASELINE not in arms and both[0] > both[1]


def most(studies: Sequence[Tables], count: Callable[[Tables], int]) -> Tables:
    best = max(studies, key=lambda tables: (count(tables), len(finished(tables))), default={})
    return best if best and count(best) else {}


def counted(tables: Tables) -> Tables:
    """Return the tables without the rows of trainings that do not count.

    Of an unfinished study only the seeds count that all its arms have, as far as there are any.
    """
    runs = trainings(tables)
    if len(runs):
        begun = runs[runs["arm"].isin(finished_arms(tables))]
        waiting = runs["seed"].isin(begun.loc[begun["status"] == NOT_RUN, "seed"])
        if not waiting.all():
            runs = runs.assign(status=runs["status"].mask(waiting & (runs["status"] == "done"), SET_ASIDE))
        tables = {**tables, "study_runs": runs}
    kept = pd.MultiIndex.from_frame(finished(tables)[["arm", "seed"]])
    return {
        name: frame[pd.MultiIndex.from_frame(frame[["arm", "seed"]]).isin(kept)]
        if name != "study_runs" and {"arm", "seed"} <= set(frame)
        else frame
        for name, frame in tables.items()
    }


def study_name(tables: Tables) -> str:
    return str(tables["study_name"]["name"].iloc[0]) if "study_name" in tables else ""


def from_long(results: pd.DataFrame) -> Tables:
    """Return the tables that claims rest on, from the long table of one study (results.parquet)."""
    keys = ["arm", "seed", "question", "status"]
    overall, whole = results["layer"].isna(), results["domain"] == ""
    runs = results[overall & whole].pivot(index=keys, columns="metric", values="value").reset_index()
    domains = results[overall & ~whole & results["metric"].isin(["validation_loss", "bits_per_byte"])]
    documents = domains.pivot(index=["arm", "seed", "domain"], columns="metric", values="value").reset_index()
    documents = documents.rename(columns={"validation_loss": "loss"}).assign(tokens=1)
    if "bits_per_byte" in documents:  # bytes per token
        documents["bytes"] = documents["loss"] / math.log(2) / documents["bits_per_byte"]
    return {
        "study_runs": runs,
        "study_layers": results[~overall],
        "study_documents": documents,
        "study_name": results[["study"]].head(1).rename(columns={"study": "name"}),
    }


def completed(tables: Tables) -> tuple[int, int]:
    """Return how many of the planned trainings were carried out."""
    status = trainings(tables)["status"]
    return int((status != NOT_RUN).sum()), len(status)


def progress(tables: Tables, seeds: int) -> str:
    """Say how far an unfinished study is, for a number of that many seeds; empty for a finished study."""
    done, planned = completed(tables)
    if done == planned:
        return ""
    of_study = trainings(tables)["seed"].nunique()
    if seeds < of_study:
        return f"{UNFINISHED}: {seeds} of {of_study} seeds"
    return f"{UNFINISHED}: {done} of {planned} trainings"


def failures(tables: Tables, arm: str) -> int:
    """Count the arm's trainings that failed or are no better than the unigram baseline."""
    runs = with_aside(trainings(tables))
    runs = runs[(runs["arm"] == arm) & (runs["status"] != NOT_RUN)]
    return int((~enters_comparisons(runs)).sum())


def with_aside(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the trainings with those that are set aside as done."""
    return runs.assign(status=runs["status"].replace(SET_ASIDE, "done"))


def compared_arms(tables: Tables) -> list[str]:
    """Return the arms that are compared as routers."""
    runs = trainings(tables)
    main = runs[runs["question"] == "main"]
    return list(dict.fromkeys((main if len(main) else runs)["arm"]))


def finished(tables: Tables) -> pd.DataFrame:
    """Return the trainings that count: done, and better than the unigram baseline where it is known."""
    runs = trainings(tables)
    return runs[enters_comparisons(runs)] if len(runs) else runs


def trainings(tables: Tables) -> pd.DataFrame:
    columns = ["arm", "seed", "question", "status", "validation_loss"]
    return tables.get("study_runs", pd.DataFrame(columns=columns))


def finished_arms(tables: Tables) -> set[str]:
    return set(finished(tables)["arm"])


def axis_values(tables: Tables, axis: str) -> list[Any]:
    """Return the values or names on the axis whose name ends so, in order, of finished arms."""
    rows = on_axis(tables, axis)
    rows = rows[rows["arm"].isin(finished_arms(tables))]
    if rows["value"].notna().all():
        return sorted(rows["value"].unique())
    return list(dict.fromkeys(rows["label"]))


def on_axis(tables: Tables, axis: str) -> pd.DataFrame:
    """Return the rows of study_axes of the axis whose name ends so, small models first."""
    rows = tables.get("study_axes")
    if rows is None:
        return pd.DataFrame(columns=["arm", "axis", "value", "label"])
    rows = rows[rows["axis"].str.split(".").str[-1] == axis]
    runs = trainings(tables)
    if "parameters_active" not in runs:
        return rows
    active = runs.groupby("arm")["parameters_active"].mean()
    return rows.sort_values("arm", key=lambda arms: arms.map(active), kind="stable", na_position="last")


def arm_at(tables: Tables, router: str, axis: str, place: Any) -> str | None:
    """Return the arm of the router at that value or name of the axis; of several that of the lowest rate.

    Rates are tuned at one size, and larger models need lower ones. No loss chooses.
    """
    rows = on_axis(tables, axis)
    there = set(rows.loc[(rows["value"] == place) | (rows["label"] == place), "arm"])
    routers = on_axis(tables, "router")
    of_router = set(routers.loc[routers["label"] == router, "arm"])
    of_router |= {arm for arm in there if arm.split(" ")[0] == router}
    arms, trained = sorted(there & of_router), finished_arms(tables)
    rates = {arm: setting(tables, arm, RATE) or math.inf for arm in arms}
    return min(arms, key=lambda arm: (arm not in trained, rates[arm]), default=None)


def setting(tables: Tables, arm: str, name: str) -> float | None:
    return settings_of(tables, arm).get(name)


def settings_of(tables: Tables, arm: str) -> dict[str, float]:
    rows = tables.get("study_settings", pd.DataFrame(columns=["arm", "name", "value"]))
    rows = rows[rows["arm"] == arm]
    return dict(zip(rows["name"], rows["value"], strict=True))


# --- numbers of one arm


def by_seed(tables: Tables, arm: str | None, column: str) -> pd.Series:
    """Return a column of study_runs by seed, of finished trainings."""
    runs = finished(tables)
    if column not in runs:
        return pd.Series(dtype=float)
    return runs[runs["arm"] == arm].set_index("seed")[column].astype(float).dropna()


def run_value(tables: Tables, arm: str | None, column: str, chance: str = "") -> Estimate | None:
    level = by_seed(tables, arm, chance).mean() if chance else math.nan
    return over_seeds(by_seed(tables, arm, column), float(level))


def layer_values(tables: Tables, arm: str | None, metric: str, domain: str = "") -> pd.DataFrame:
    """Return layer, seed, value and chance of a metric in evaluation."""
    rows = tables.get("study_layers")
    if rows is None:
        return pd.DataFrame(columns=["layer", "seed", "value", "chance"])
    rows = rows[(rows["arm"] == arm) & (rows["metric"] == metric) & (rows["domain"] == domain)]
    return rows[rows["value"].notna()]


def layer_means(tables: Tables, arm: str | None, metric: str) -> pd.Series:
    return layer_values(tables, arm, metric).groupby("seed")["value"].mean().astype(float)


def layer_value(tables: Tables, arm: str | None, metric: str) -> Estimate | None:
    """Return the mean over layers of a metric, with its chance level."""
    chance = layer_values(tables, arm, metric)["chance"].astype(float).mean()
    return over_seeds(layer_means(tables, arm, metric), float(chance))


def worst_cv(tables: Tables, arm: str) -> Estimate | None:
    """Return the load CV of the worst layer, with the chance level of a layer."""
    rows = layer_values(tables, arm, "cv")
    return over_seeds(rows.groupby("seed")["value"].max(), float(rows["chance"].astype(float).mean()))


@dataclass(frozen=True)
class Collapse:
    """How many of all seeds and layers have collapsed."""

    collapsed: int
    layers: int

    @property
    def rate(self) -> float:
        return self.collapsed / self.layers


def collapse_rate(tables: Tables, arm: str | None) -> Collapse | None:
    """Count layers with an expert below 1 % of the mean load, or MaxVio/(n/k − 1) above 0.5."""
    least = layer_values(tables, arm, "min_over_mean").set_index(["seed", "layer"])["value"]
    violation = layer_values(tables, arm, "max_violation").set_index(["seed", "layer"])["value"]
    sizes = finished(tables)
    sizes = sizes[sizes["arm"] == arm]
    both = pd.DataFrame({"least": least, "violation": violation}).dropna()
    if both.empty or sizes.empty:
        return None
    worst = float(sizes["n_experts"].iloc[0]) / float(sizes["top_k"].iloc[0]) - 1
    relative = both["violation"] / worst if worst > 0 else both["violation"] * 0.0
    collapsed = (both["least"] < LEAST_SHARE) | (relative > MOST_VIOLATION)
    return Collapse(int(collapsed.sum()), len(both))


def trained_domains(tables: Tables) -> list[str]:
    rows = tables.get("study_documents")
    return (
        [] if rows is None else [name for name in dict.fromkeys(rows["domain"]) if name not in unseen(tables)]
    )


def domain_losses(tables: Tables, arm: str | None) -> pd.DataFrame:
    """Return seed by domain: the token-weighted mean loss on the domain's documents."""
    rows = tables.get("study_documents")
    if rows is None:
        return pd.DataFrame()
    rows = rows[rows["arm"] == arm]
    sums = rows.assign(nats=rows["loss"] * rows["tokens"]).groupby(["seed", "domain"])[["nats", "tokens"]]
    totals = sums.sum()
    return (totals["nats"] / totals["tokens"]).unstack("domain")


def domain_bits(tables: Tables, arm: str | None) -> pd.DataFrame:
    """Return seed by domain: bits per byte. Other than nats per token it does not depend on how many bytes
    a token has, which a vocabulary learned from other text makes few."""
    rows = tables.get("study_documents")
    if rows is None or "bytes" not in rows:
        return pd.DataFrame()
    rows = rows[(rows["arm"] == arm) & (rows["bytes"] > 0)]
    totals = rows.assign(nats=rows["loss"] * rows["tokens"]).groupby(["seed", "domain"])[["nats", "bytes"]]
    sums = totals.sum()
    return (sums["nats"] / math.log(2) / sums["bytes"]).astype(float).unstack("domain")


def paired(first: pd.Series, second: pd.Series) -> Estimate | None:
    """Return first minus second over the seeds they share."""
    return over_seeds((first - second).dropna())


# --- tests


def tested_numbers(results: Results) -> dict[Key, Tested]:
    """Return every number that is tested, by seed: the one family of tests."""
    main, both = results.main, (METHOD, BASELINE)
    routers = [arm for _, arm in ROUTERS if arm != METHOD] + [DENSE_ACTIVE]
    variants = [arm for _, arm, _ in VARIANTS if arm != METHOD] + [EQUAL_FLOPS]
    found: dict[Key, Tested] = {("main", arm): gain(main, METHOD, arm) for arm in routers}
    others = [arm for arm in compared_arms(main) if arm not in both and (arm, BASELINE) not in PAIRS]
    found |= {("routers", arm): gain(main, BASELINE, arm) for arm in others}
    found |= {("ablation", arm): gain(results.ablation, METHOD, arm) for arm in variants}
    found |= {
        ("bases", f"{base}: {router}"): gain(results.bases, f"{base}: {METHOD}", f"{base}: {router}")
        for base, routers in base_models(results.bases).items()
        for router in (BASELINE, NEW_ROWS)
        if router in routers
    }
    consistency = (consistency_beyond_chance(main, arm) for arm in both)
    sizes = tuple(arm for router in both for arm in arms_by_size(results.sizes, router))
    found |= {
        ("H2",): Tested(layer_difference(main, "output_orthogonality"), main, both),
        ("H3",): Tested(next(consistency) - next(consistency), main, both),
        ("H6",): Tested(size_slopes(results.sizes), results.sizes, sizes),
        ("H7",): Tested(domain_contrast(main), main, both),
    }
    for tables in results.others:
        name = study_name(tables)
        found |= {(name, arm, other): gain(tables, arm, other) for arm, other in PAIRS}
    for metric, arms in tested_predictors(results.effects).items():
        found["effect", metric] = Tested(
            predictor_correlation(results.effects, arms, metric), results.effects, tuple(arms)
        )
    return found


def gain(tables: Tables, arm: str, other: str) -> Tested:
    return Tested(loss_gain(tables, arm, other), tables, (arm, other))


def above_baseline(results: Results, arm: str) -> Estimate | None:
    """Return the arm's loss minus that of the baseline, as it was tested."""
    if ("routers", arm) in results.tests:
        return results.tests["routers", arm]
    key = ("main", BASELINE) if arm == METHOD else (study_name(results.main), arm, BASELINE)
    found = results.tests.get(key)
    return found and replace(found, mean=-found.mean, hedges_g=-found.hedges_g)


def base_models(tables: Tables) -> dict[str, list[str]]:
    """Return the models that existed before and their routers; arms are named "BASE: router"."""
    found: dict[str, list[str]] = {}
    for arm in dict.fromkeys(trainings(tables)["arm"]):
        base, colon, router = arm.rpartition(": ")
        if colon:
            found.setdefault(base, []).append(router)
    return found


def predicted_effects(tables: Tables) -> list[tuple[str, str]]:
    """Return arm and metric of each correlation with the effect of removing an expert."""
    rows = tables.get("study_layers", pd.DataFrame(columns=["arm", "metric"]))
    rows = rows.loc[rows["metric"].str.startswith(EFFECT), ["arm", "metric"]].drop_duplicates()
    return [(arm, metric) for metric, arm in sorted(zip(rows["metric"], rows["arm"], strict=True))]


def tested_predictors(tables: Tables) -> dict[str, list[str]]:
    """Return metric -> arms of the predictors that claims name. Load, their control, is not tested."""
    found: dict[str, list[str]] = {}
    for arm, metric in predicted_effects(tables):
        if metric.removeprefix(EFFECT).partition(GIVEN_LOAD)[0] in PREDICTORS:
            found.setdefault(metric, []).append(arm)
    return found


def predictor_correlation(tables: Tables, arms: list[str], metric: str) -> pd.Series:
    """Return the mean correlation over arms by seed, positive where it has the expected sign."""
    sign = PREDICTORS[metric.removeprefix(EFFECT).partition(GIVEN_LOAD)[0]]
    return sign * pd.concat([layer_means(tables, arm, metric) for arm in arms], axis=1).mean(axis=1)


def effect_ceiling(tables: Tables, arm: str) -> float:
    """Return the largest correlation that the noise of the effects allows, by two halves of the documents."""
    rows = tables.get("study_effects")
    rows = None if rows is None else rows[(rows["arm"] == arm) & rows["half_a"].notna()]
    if rows is None or rows.empty:
        return math.nan
    halves = rows.groupby(["seed", "layer"])[["half_a", "half_b"]]
    return split_half_ceiling(halves.apply(lambda one: one["half_a"].corr(one["half_b"], "spearman")))


def loss_gain(tables: Tables, arm: str, other: str) -> pd.Series:
    """Return the loss of the other arm minus that of the first by seed, in nats per token.

    Of an unfinished study every seed that both have: other arms do not matter here.
    """
    both = {**tables, "study_runs": with_aside(trainings(tables))}
    return by_seed(both, other, "validation_loss") - by_seed(both, arm, "validation_loss")


def stars(found: Estimate | None) -> str:
    """Return yes with its stars, no, or why nothing is claimed."""
    if found is None:
        return NOT_RUN
    if found.unfinished:
        return found.unfinished
    if found.seeds < MIN_SEEDS:
        return "too few seeds"
    if not math.isfinite(found.p_adjusted):
        return "no test: no spread over seeds"
    levels = [("***", 0.001), ("**", 0.01), ("*", LEVEL)]
    marks = next((marks for marks, level in levels if found.p_adjusted <= level), "")
    return f"yes ({marks})" if marks else "no"


def gap_closure(tables: Tables, arm: str) -> Estimate | None:
    """(dense of active size − x)/(dense of active size − dense of total size), of means over shared seeds.

    0: as the dense model of the same cost; 1: as the dense model of the same size. The interval is jackknifed
    over seeds. None where the two dense models do not differ beyond their interval: there is no gap then.
    """
    columns = [by_seed(tables, name, "validation_loss") for name in (DENSE_ACTIVE, arm, DENSE_TOTAL)]
    losses = pd.concat(columns, axis=1).dropna().to_numpy(float)
    n = len(losses)
    gap = over_seeds(losses[:, 0] - losses[:, 2]) if n else None
    if gap is None or not (n == 1 or gap.low > 0):
        return None

    def closure(rows: np.ndarray) -> float:
        active, x, total = rows.mean(0)
        return float((active - x) / (active - total))

    if n == 1:
        return Estimate(closure(losses), math.nan, 1, 0.0)
    without = np.array([closure(np.delete(losses, at, 0)) for at in range(n)])
    error = math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    return Estimate(closure(losses), float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error, n, 0.0)


# --- failure modes


def unseen(tables: Tables) -> list[str]:
    """Return the domains that were evaluated and not trained on; the reader of a run names them."""
    return list(tables["unseen_domains"]["domain"]) if "unseen_domains" in tables else []


def unseen_bits(tables: Tables, arm: str) -> dict[str, Estimate]:
    """Return the arm's bits per byte on each unseen domain minus those of the dense model, by seed."""
    bits, dense = domain_bits(tables, arm), domain_bits(tables, DENSE_ACTIVE)
    both = [name for name in unseen(tables) if name in bits and name in dense]
    found = {name: paired(bits[name], dense[name]) for name in both}
    return {name: one for name, one in found.items() if one}


# --- numbers that are tested


def layer_difference(tables: Tables, metric: str) -> pd.Series:
    """Return the method's mean over layers minus the baseline's, by seed."""
    return layer_means(tables, METHOD, metric) - layer_means(tables, BASELINE, metric)


def consistency_beyond_chance(tables: Tables, arm: str) -> pd.Series:
    """Return (c − e)/(1 − e) by seed: c the consistency, e that of independent choices with these loads.

    Uneven loads alone make choices agree.
    """
    same, chance = (by_seed(tables, arm, name) for name in ("consistency", "consistency_chance"))
    return ((same - chance) / (1 - chance)).dropna()


def block_milliseconds(tables: Tables, router: str) -> float | None:
    rows = tables.get("overhead")
    rows = None if rows is None else rows[rows["router"] == router]
    return None if rows is None or rows.empty else float(rows["milliseconds"].sum())


def size_slopes(tables: Tables) -> pd.Series:
    """Return the change of the gain over the baseline per doubling of active parameters, by seed."""
    gains = []
    for size in axis_values(tables, "size"):
        method, baseline = (arm_at(tables, arm, "size", size) or "" for arm in (METHOD, BASELINE))
        if (gain := loss_gain(tables, method, baseline)).notna().any():
            gains.append((by_seed(tables, baseline, "parameters_active").iloc[0], gain))
    return doubling_slopes(gains)


def arms_by_size(tables: Tables, router: str) -> list[str]:
    """Return the router's finished arms that count, one per size, the smallest model first."""
    places = (arm_at(tables, router, "size", size) for size in axis_values(tables, "size"))
    arms = [arm for arm in places if arm in finished_arms(tables)]
    return sorted(arms, key=lambda arm: by_seed(tables, arm, "parameters_active").mean())


def worse_than_smaller(tables: Tables) -> list[str]:
    """Return the arms of both routers that predict worse than a smaller one."""
    found = []
    for router in (METHOD, BASELINE):
        arms = arms_by_size(tables, router)
        losses = [by_seed(tables, arm, "validation_loss").mean() for arm in arms]
        found += [arm for at, arm in enumerate(arms) if at and losses[at] > min(losses[:at])]
    return found


def domain_contrast(tables: Tables) -> pd.Series:
    """Return the gain over the baseline in specialised minus that in other trained domains, by seed."""
    baseline, method = (domain_losses(tables, arm) for arm in (BASELINE, METHOD))
    trained = [name for name in baseline if name in method and name not in unseen(tables)]
    special = [name for name in trained if name in SPECIALISED]
    others = [name for name in trained if name not in SPECIALISED]
    if not special or not others:
        return pd.Series(dtype=float)
    gains = baseline - method
    return gains[special].mean(axis=1) - gains[others].mean(axis=1)
