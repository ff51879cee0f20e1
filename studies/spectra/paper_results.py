"""Numbers of the routing paper's results section, from the tables of one study or of several.

Every number is a mean over seeds with a 95 % t interval, paired by seed where two arms are compared. An arm
that was not trained gives None, never a number of another arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moescope.lab.study_statistics import MIN_SEEDS, enters_comparisons, probe_tables
from moescope.statistics import LEVEL, split_half_ceiling, t_test
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
EFFECT = "effect_"  # begins metrics of study_layers
EQUAL_FLOPS = f"{BASELINE}_flops"
AT_BASELINE_RATE, AT_METHOD_RATE = (
    f"{METHOD} at the rate of {BASELINE}",
    f"{BASELINE} at the rate of {METHOD}",
)
NEW_ROWS = f"{BASELINE}, new rows"  # in a model that exists: as untrained as the method's router
LONGER = " x4"  # ends the names of arms of four times the steps
LEAST_SHARE, MOST_VIOLATION = 0.01, 0.5  # beyond them a layer has collapsed
NOT_RUN, UNFINISHED = "not run", "unfinished"
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
    failed: int = 0  # trainings of the arms, and those no better than the unigram baseline

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
    found = t_test(np.asarray([value for value in values if np.isfinite(value)], dtype=float))
    if not found.count:
        return None
    half = float(found.interval()[1] - found.value)
    return Estimate(
        float(found.value),
        half,
        int(found.count),
        chance,
        float(found.p_value),
        hedges_g=float(found.hedges_g),
    )


Tests = dict[tuple[str, str, str], Estimate]  # of study, arm and reference

PARTS = {  # of the results section -> the study that it is from
    "main": "main",
    "ablation": "ablation",
    "experts": "scaling_experts",
    "sizes": "scaling_size",
    "bases": "existing",
    "sweep": "sweep",
    "effects": "causal",
    "tasks": "tasks",
    "controls": "controls",
    "wide": "scaling_large",
    "size_rates": "scaling_rate",
}
PROBED = ("main", "ablation")  # studies whose probe tables are shown
OTHERS = ("hash_bpe", "hash_bytes", "main", "some", "some_published")  # of claims about pairs of arms


@dataclass(frozen=True)
class Results:
    """The tables of each part of the results section, empty where it was not run, and the judged claims."""

    judged: pd.DataFrame
    main: Tables = field(default_factory=dict)
    ablation: Tables = field(default_factory=dict)
    experts: Tables = field(default_factory=dict)
    sizes: Tables = field(default_factory=dict)
    bases: Tables = field(default_factory=dict)
    sweep: Tables = field(default_factory=dict)
    effects: Tables = field(default_factory=dict)
    tasks: Tables = field(default_factory=dict)
    controls: Tables = field(default_factory=dict)  # routers at one learning rate
    wide: Tables = field(default_factory=dict)  # one model, wider than those of `sizes`
    size_rates: Tables = field(default_factory=dict)  # sizes at other learning rates
    others: tuple[Tables, ...] = ()
    tuning: tuple[Tables, ...] = ()

    @classmethod
    def of(cls, studies: Mapping[str, Tables], judged: pd.DataFrame) -> Results:
        kept = {
            name: counted(
                {**tables, **probe_tables(tables["study_probes"])}
                if name in PROBED and "study_probes" in tables
                else tables
            )
            for name, tables in studies.items()
        }
        parts = {part: kept.get(name, {}) for part, name in PARTS.items()}
        others = tuple(kept[name] for name in OTHERS if name in kept)
        return cls(
            judged, **parts, others=others, tuning=tuple(kept[n] for n in kept if n.startswith(TUNING))
        )

    @cached_property
    def tests(self) -> Tests:
        """Each tested difference of losses, arm minus reference, as the claims have it."""
        rows = self.judged[(self.judged["check"] == "") & (self.judged["column"] == "validation_loss")]
        rows = rows[(rows["estimand"] == "difference") & rows["estimate"].notna()]
        return {
            (one["study"], one["arm"], one["than"]): Estimate(
                one["estimate"],
                (one["high"] - one["low"]) / 2,
                one["seeds"],
                p_value=one["p"],
                p_adjusted=one["p_holm"],
                hedges_g=one["hedges_g"],
                unfinished=one["verdict"] if one["verdict"].startswith("unfinished") else "",
                failed=one["failed"],
            )
            for one in rows.to_dict("records")
        }


def counted(tables: Tables) -> Tables:
    """Return the tables without the rows of trainings that do not count."""
    kept = pd.MultiIndex.from_frame(finished(tables)[["arm", "seed"]])
    return {
        name: frame[pd.MultiIndex.from_frame(frame[["arm", "seed"]]).isin(kept)]
        if name != "study_runs" and {"arm", "seed"} <= set(frame)
        else frame
        for name, frame in tables.items()
    }


def study_name(tables: Tables) -> str:
    return str(tables["study_name"]["name"].iloc[0]) if "study_name" in tables else ""


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
    runs = trainings(tables)
    runs = runs[(runs["arm"] == arm) & (runs["status"] != NOT_RUN)]
    return int((~enters_comparisons(runs)).sum())


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


def reversed_sign(found: Estimate) -> Estimate:
    return replace(found, mean=-found.mean, hedges_g=-found.hedges_g)


def above_baseline(results: Results, arm: str) -> Estimate | None:
    """Return the arm's loss minus that of the baseline, as it was tested."""
    return results.tests.get((PARTS["main"], arm, BASELINE))


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


def effect_ceiling(tables: Tables, arm: str) -> float:
    """Return the largest correlation that the noise of the effects allows, by two halves of the documents."""
    rows = tables.get("study_effects")
    rows = None if rows is None else rows[(rows["arm"] == arm) & rows["half_a"].notna()]
    if rows is None or rows.empty:
        return math.nan
    halves = rows.groupby(["seed", "layer"])[["half_a", "half_b"]]
    return split_half_ceiling(halves.apply(lambda one: one["half_a"].corr(one["half_b"], "spearman")))


def loss_gain(tables: Tables, arm: str, other: str) -> pd.Series:
    """Return the loss of the other arm minus that of the first by seed, in nats per token."""
    return by_seed(tables, other, "validation_loss") - by_seed(tables, arm, "validation_loss")


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


def block_milliseconds(tables: Tables, router: str) -> float | None:
    rows = tables.get("overhead")
    rows = None if rows is None else rows[rows["router"] == router]
    return None if rows is None or rows.empty else float(rows["milliseconds"].sum())


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
