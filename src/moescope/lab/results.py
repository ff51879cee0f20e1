"""Numbers of the routing paper's results section, from the tables of one study or of several.

Every number is a mean over seeds with a 95 % t interval, paired by seed where two arms are compared. An arm
that was not trained gives None, never a number of another arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from moescope.lab.study_statistics import LEVEL, MIN_SEEDS, enters_comparisons, holm, loss_table
from moescope.lab.study_statistics import differences as seed_differences
from moescope.verb import Tables

METHOD, BASELINE = "spectra", "top2"  # arms
DENSE_ACTIVE, DENSE_TOTAL = "dense", "dense_total"
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
LEAST_SHARE, MOST_VIOLATION = 0.01, 0.5  # beyond them a layer has collapsed
RARE = 0.1  # of the mean load
SPECIALISED = ("code", "math", "medicine", "science", "headers", "arithmetic")  # domains
SIMILAR_COST = 0.1  # of the baseline's block
EARLY = 0.1  # of the steps

CONFIRMED, REFUTED, NOT_TESTABLE = "confirmed", "refuted", "not testable"
NOT_RUN = "not run"


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `half` is half the width of its 95 % interval, NaN for one seed."""

    mean: float
    half: float
    seeds: int
    chance: float = math.nan
    p_value: float = math.nan  # of a mean of 0, two-sided

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def over_seeds(values: Iterable[float], chance: float = math.nan) -> Estimate | None:
    """Return mean and t interval of one value per seed; None without any."""
    found = np.asarray([value for value in values if np.isfinite(value)], dtype=float)
    n = len(found)
    if not n:
        return None
    error = found.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    half = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error if n > 1 else math.nan
    p = 2 * float(stats.t.sf(abs(found.mean()) / error, n - 1)) if n > 1 and error > 0 else math.nan
    return Estimate(float(found.mean()), half, n, chance, p)


# --- which study answers what


@dataclass(frozen=True)
class Results:
    """The tables of each part of the results section; an empty part was not run."""

    main: Tables
    ablation: Tables
    experts: Tables
    sizes: Tables
    bases: Tables

    @classmethod
    def of(cls, studies: Sequence[Tables]) -> Results:
        """Give each part the study that has most of its arms."""
        routers = {arm for _, arm in ROUTERS}
        variants = {arm for _, arm, _ in VARIANTS} - routers
        return cls(
            most(studies, lambda tables: len(routers & finished_arms(tables))),
            most(studies, lambda tables: len(variants & finished_arms(tables))),
            most(studies, lambda tables: len(axis_values(tables, "experts"))),
            most(studies, lambda tables: len(axis_values(tables, "size"))),
            most(studies, lambda tables: sum(": " in arm for arm in finished_arms(tables))),
        )


def most(studies: Sequence[Tables], count: Any) -> Tables:
    best = max(studies, key=count, default={})
    return best if best and count(best) else {}


def finished(tables: Tables) -> pd.DataFrame:
    """Return the trainings that count: done, and better than the unigram baseline where it is known."""
    runs = tables.get("study_runs")
    if runs is None:
        return pd.DataFrame(columns=["arm", "seed", "status", "validation_loss"])
    return runs[enters_comparisons(runs)]


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
    rows = tables.get("study_axes")
    if rows is None:
        return pd.DataFrame(columns=["arm", "axis", "value", "label"])
    return rows[rows["axis"].str.split(".").str[-1] == axis]


def arm_at(tables: Tables, router: str, axis: str, place: Any) -> str | None:
    """Return the arm of the router at that value or name of the axis."""
    rows = on_axis(tables, axis)
    there = set(rows.loc[(rows["value"] == place) | (rows["label"] == place), "arm"])
    routers = on_axis(tables, "router")
    of_router = set(routers.loc[routers["label"] == router, "arm"])
    of_router |= {arm for arm in there if arm.split(" ")[0] == router}
    return next(iter(sorted(there & of_router)), None)


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


def layer_value(tables: Tables, arm: str | None, metric: str) -> Estimate | None:
    """Return the mean over layers of a metric, with its chance level."""
    rows = layer_values(tables, arm, metric)
    return over_seeds(rows.groupby("seed")["value"].mean(), float(rows["chance"].astype(float).mean()))


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


def paired(first: pd.Series, second: pd.Series) -> Estimate | None:
    """Return first minus second over the seeds they share."""
    return over_seeds((first - second).dropna())


# --- comparisons


@dataclass(frozen=True)
class Comparison:
    """One row of the significance table: other minus method, in nats; above 0 the method is better."""

    title: str
    difference: Estimate | None
    p_adjusted: float = math.nan
    hedges_g: float = math.nan

    @property
    def stars(self) -> str:
        """Return yes with its stars, no, or why nothing is claimed."""
        if self.difference is None:
            return NOT_RUN
        if self.difference.seeds < MIN_SEEDS:
            return "too few seeds"
        if not math.isfinite(self.p_adjusted):
            return "no test: no spread over seeds"
        levels = [("***", 0.001), ("**", 0.01), ("*", LEVEL)]
        found = next((stars for stars, level in levels if self.p_adjusted < level), "")
        return f"yes ({found})" if found else "no"


def comparisons(results: Results) -> list[Comparison]:
    """Return the method against each router and each variant, Holm-corrected as one family."""
    routers = [*(row for row in ROUTERS if row[1] != METHOD), ("Dense (active size)", DENSE_ACTIVE)]
    tests = [(f"SPECTRA vs. {title}", results.main, arm) for title, arm in routers]
    tests += [
        (f"SPECTRA-Full vs. {title}", results.ablation, arm) for title, arm, _ in VARIANTS if arm != METHOD
    ]
    tests.append(("SPECTRA vs. Top-2 of equal FLOPs", results.ablation, f"{BASELINE}_flops"))
    rows, p_values = [], []
    for title, tables, arm in tests:
        row, p = compare_losses(title, tables, arm)
        rows.append(row)
        p_values.append(p)
    adjusted = holm(np.array(p_values))
    return [replace(row, p_adjusted=float(p)) for row, p in zip(rows, adjusted, strict=True)]


def compare_losses(title: str, tables: Tables, arm: str) -> tuple[Comparison, float]:
    """Return the comparison without correction, and its p."""
    losses = loss_table(tables["study_runs"]) if tables else pd.DataFrame()
    if not {METHOD, arm} <= set(losses.index):
        return Comparison(title, None), math.nan
    found = seed_differences(losses.loc[[METHOD, arm]].to_numpy(float))
    if not found.seeds[0]:
        return Comparison(title, None), math.nan
    low, high = (float(end[0]) for end in found.interval())
    value, seeds = float(found.value[0]), int(found.seeds[0])
    p = float(found.p_value[0])
    difference = Estimate(value, (high - low) / 2, seeds, 0.0, p)
    return Comparison(title, difference, hedges_g=float(found.hedges_g[0])), p


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


def mixed_documents(tables: Tables, arm: str) -> tuple[Estimate, Estimate, Estimate] | None:
    """Return for documents that switch domain: share that lose, nats lost, and change of the choices kept.

    All against the same tokens after another text of their own domain.
    """
    rows = tables.get("study_mixed")
    rows = None if rows is None else rows[rows["arm"] == arm]
    if rows is None or rows.empty:
        return None
    lost = rows["loss_other"] - rows["loss_same"]
    kept = rows["kept_other"] - rows["kept_same"]
    found = [
        over_seeds(values.groupby(rows["seed"]).mean(), level)
        for values, level in (((lost > 0).astype(float), 0.5), (lost, 0.0), (kept, 0.0))
    ]
    first, second, third = (one or Estimate(math.nan, math.nan, 0) for one in found)
    return first, second, third


def turnover(tables: Tables, arm: str) -> pd.DataFrame | None:
    """Return per seed: the change of usage between logged steps, early and late, mean over layers.

    Change: half the sum over experts of |share − share before|. Early is the first tenth of the steps, at
    least two logged ones; late the last half.
    """
    rows = tables.get("study_usage")
    rows = None if rows is None else rows[rows["arm"] == arm]
    if rows is None or rows.empty:
        return None
    wide = rows.pivot_table(index=["seed", "layer", "step"], columns="expert", values="share")
    moved = wide.groupby(level=["seed", "layer"]).diff().abs().sum(axis=1, min_count=1).dropna() / 2
    by_step = moved.groupby(level=["seed", "step"]).mean().unstack("seed")
    if len(by_step) < 4:
        return None
    last = int(rows["step"].max())
    early = by_step[(by_step.index <= EARLY * last) | (by_step.index <= by_step.index[1])]
    return pd.DataFrame({"early": early.mean(), "late": by_step[by_step.index > last / 2].mean()})


def rare_experts(tables: Tables, arm: str) -> tuple[Estimate, Estimate] | None:
    """Return the share of experts below a tenth of the mean load, and the share of choices they get."""
    rows = tables.get("study_loads")
    rows = None if rows is None else rows[(rows["arm"] == arm) & ~rows["domain"].isin(unseen(tables))]
    if rows is None or rows.empty:
        return None
    loads = rows.groupby(["seed", "layer", "expert"])["tokens"].sum()
    mean = loads.groupby(level=["seed", "layer"]).transform("mean")
    rare = loads < RARE * mean
    share = rare.groupby(level="seed").mean()
    choices = loads.where(rare, 0).groupby(level="seed").sum() / loads.groupby(level="seed").sum()
    first, second = over_seeds(share, 0.0), over_seeds(choices, 0.0)
    return (first, second) if first and second else None


def unseen(tables: Tables) -> list[str]:
    """Return the domains that were evaluated and not trained on; the reader of a run names them."""
    return list(tables["unseen_domains"]["domain"]) if "unseen_domains" in tables else []


def unseen_losses(tables: Tables, arm: str) -> dict[str, Estimate]:
    """Return the arm's loss on each unseen domain minus that of the dense model, under the same seeds."""
    losses, dense = domain_losses(tables, arm), domain_losses(tables, DENSE_ACTIVE)
    both = [name for name in unseen(tables) if name in losses and name in dense]
    found = {name: paired(losses[name], dense[name]) for name in both}
    return {name: one for name, one in found.items() if one}


# --- hypotheses


@dataclass(frozen=True)
class Hypothesis:
    """A published hypothesis, its verdict and the number that decides it."""

    name: str
    claim: str
    measure: str  # what the number is
    number: Estimate | None
    verdict: str = NOT_TESTABLE
    why: str = ""
    p_adjusted: float = math.nan


def hypotheses(results: Results) -> list[Hypothesis]:
    """Return H1 to H7. Those decided by a test over seeds are Holm-corrected as one family."""
    tested = [h1(results), h2(results), h3(results), h6(results), h7(results)]
    p_values = np.array([one.number.p_value if one.number else math.nan for one in tested])
    judged = [judge(one, float(p)) for one, p in zip(tested, holm(p_values), strict=True)]
    first, second, third, sixth, seventh = judged
    return [first, second, third, h4(results), h5(results), sixth, seventh]


def judge(hypothesis: Hypothesis, p: float) -> Hypothesis:
    """Confirm or refute by the sign of a number whose Holm-corrected p is at most 0.05, from five seeds."""
    found = hypothesis.number
    if found is None:
        return hypothesis
    if found.seeds < MIN_SEEDS:
        why = f"{found.seeds} seeds are too few to claim anything"
        return replace(hypothesis, why=why, p_adjusted=p)
    if not math.isfinite(p) or p > LEVEL:
        return replace(hypothesis, why="not distinguishable from 0 with these seeds", p_adjusted=p)
    verdict = CONFIRMED if found.mean > 0 else REFUTED
    return replace(hypothesis, verdict=verdict, why="", p_adjusted=p)


def missing(*arms: str) -> str:
    return f"needs finished trainings of {' and '.join(arms)}"


def h1(results: Results) -> Hypothesis:
    gain = compare_losses("", results.main, BASELINE)[0].difference
    measure = "loss of Switch Top-2 minus SPECTRA (nats per token)"
    why = missing(METHOD, BASELINE)
    return Hypothesis("H1", "SPECTRA predicts better than Switch routing", measure, gain, why=why)


def layer_difference(tables: Tables, metric: str) -> Estimate | None:
    first, second = (
        layer_values(tables, arm, metric).groupby("seed")["value"].mean() for arm in (METHOD, BASELINE)
    )
    return paired(first.astype(float), second.astype(float))


def h2(results: Results) -> Hypothesis:
    found = layer_difference(results.main, "output_orthogonality")
    measure = "orthogonality of expert outputs, SPECTRA minus Switch Top-2 (overlap is nearly fixed by k)"
    why = missing(METHOD, BASELINE)
    return Hypothesis("H2", "Experts of SPECTRA are more distinct", measure, found, why=why)


def h3(results: Results) -> Hypothesis:
    found = paired(*(by_seed(results.main, arm, "consistency") for arm in (METHOD, BASELINE)))
    measure = "routing consistency between checkpoints, SPECTRA minus Switch Top-2"
    why = missing(METHOD, BASELINE) + ", with several checkpoints"
    return Hypothesis("H3", "SPECTRA routes more consistently", measure, found, why=why)


def block_milliseconds(tables: Tables, router: str) -> float | None:
    rows = tables.get("overhead")
    rows = None if rows is None else rows[rows["router"] == router]
    return None if rows is None or rows.empty else float(rows["milliseconds"].sum())


def h4(results: Results) -> Hypothesis:
    method, baseline = (block_milliseconds(results.main, arm) for arm in (METHOD, BASELINE))
    if not method or not baseline:
        method, baseline = (block_milliseconds(results.ablation, arm) for arm in (METHOD, BASELINE))
    measure = (
        f"time of a block over that of Switch Top-2, minus 1 (similar: up to {SIMILAR_COST:g}); no test, "
        "one machine"
    )
    claim = "SPECTRA costs about as much as Switch routing"
    if not method or not baseline:
        return Hypothesis("H4", claim, measure, None, why="needs timings of both routers")
    more = method / baseline - 1
    verdict = CONFIRMED if more <= SIMILAR_COST else REFUTED
    return Hypothesis("H4", claim, measure, Estimate(more, math.nan, 0, 0.0), verdict)


def h5(results: Results) -> Hypothesis:
    """Each component that the hypothesis names: its removal makes the loss worse, Holm-corrected."""
    named = [(title, arm) for title, arm, component in VARIANTS if component]
    rows = [compare_losses(title, results.ablation, arm) for title, arm in named]
    adjusted = holm(np.array([p for _, p in rows]))
    measure = "smallest gain of a component: loss without it minus loss with it (nats per token)"
    claim = "Each component lowers the loss"
    known = [
        (row.difference, row.title, p) for (row, _), p in zip(rows, adjusted, strict=True) if row.difference
    ]
    if len(known) < len(named):
        lacking = ", ".join(row.title for row, _ in rows if row.difference is None)
        return Hypothesis("H5", claim, measure, None, why=f"not run: {lacking}")
    smallest, title, p = min(known, key=lambda one: one[0].mean)
    enough = all(one.seeds >= MIN_SEEDS for one, _, _ in known)
    worse = sum(one.mean > 0 and p <= LEVEL for one, _, p in known)
    why = f"{worse} of {len(known)} removals make it worse; smallest gain: {title}"
    verdict = NOT_TESTABLE
    if enough and any(one.mean < 0 and p <= LEVEL for one, _, p in known):
        verdict = REFUTED
    elif enough and worse == len(known):
        verdict = CONFIRMED
    elif not enough:
        why += "; too few seeds to claim anything"
    return Hypothesis("H5", claim, measure, smallest, verdict, why, float(p))


def gains_by_size(tables: Tables) -> pd.DataFrame:
    """Return log2 of active parameters and the gain over the baseline, per size and seed."""
    rows = []
    for size in axis_values(tables, "size"):
        method, baseline = (arm_at(tables, arm, "size", size) for arm in (METHOD, BASELINE))
        gain = by_seed(tables, baseline, "validation_loss") - by_seed(tables, method, "validation_loss")
        active = by_seed(tables, baseline, "parameters_active")
        rows += [
            {"size": size, "seed": seed, "doublings": math.log2(active.iloc[0]), "gain": value}
            for seed, value in gain.dropna().items()
        ]
    return pd.DataFrame(rows, columns=["size", "seed", "doublings", "gain"])


def h6(results: Results) -> Hypothesis:
    rows = gains_by_size(results.sizes)
    slopes = []
    for _, of_seed in rows.groupby("seed"):
        if of_seed["size"].nunique() == rows["size"].nunique() > 1:
            slopes.append(np.polyfit(of_seed["doublings"], of_seed["gain"], 1)[0])
    found = over_seeds(slopes)
    measure = "change of the gain over Switch Top-2 per doubling of active parameters (nats; lab sizes only)"
    why = "needs both routers at two sizes or more"
    return Hypothesis("H6", "The gain grows with the model", measure, found, why=why)


def h7(results: Results) -> Hypothesis:
    measure = "gain over Switch Top-2 in specialised minus other domains (nats per token)"
    claim = "The gain is larger in specialised domains"
    losses = [domain_losses(results.main, arm) for arm in (BASELINE, METHOD)]
    if any(frame.empty for frame in losses):
        return Hypothesis("H7", claim, measure, None, why=missing(METHOD, BASELINE))
    gains = (losses[0] - losses[1]).dropna(how="all")
    trained = [name for name in gains if name not in unseen(results.main)]
    special = [name for name in trained if name in SPECIALISED]
    others = [name for name in trained if name not in SPECIALISED]
    if not special or not others:
        why = f"needs domains of both kinds; specialised are {', '.join(SPECIALISED)}"
        return Hypothesis("H7", claim, measure, None, why=why)
    found = over_seeds(gains[special].mean(axis=1) - gains[others].mean(axis=1))
    return Hypothesis("H7", claim, measure, found, why=f"specialised: {', '.join(special)}")
