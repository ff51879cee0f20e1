"""Compare a study's arms with their reference: a paired t per arm, Holm-corrected for the number of arms.

A seed fixes initial weights and text order and shifts all arms together, so arms are compared within seeds.
Each arm is tested by its own differences: one variance for all arms makes false claims where arms scatter
differently, and five seeds are too few to check that first. Evaluation noise (other documents) enters no
test: it says how precisely one model was measured, not how another training of it would end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from moescope.errors import BadInput, unknown_name

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]

LEVEL = 0.05
MIN_SEEDS = 5  # with fewer, numbers are reported and nothing is claimed
RANKS_FROM = 8  # seeds; with 5 the smallest p of the signed-rank test is 0.0625
POWER = 0.8
ROUNDING = 1e-12  # relative to the losses: smaller spread is rounding

BETTER, WORSE, ALIKE = "better", "worse", "not distinguishable"
TOO_FEW, NO_SPREAD = "too few seeds to say", "no spread over seeds"
NOT_RUN, FAILED, REFERENCE = "not run", "failed", "reference"
UNTRAINED = "does not beat the unigram baseline"


@dataclass(frozen=True)
class Differences:
    """Arms minus the reference over the seeds they share; leading axes are studies."""

    value: Array  # mean; NaN without a shared seed
    spread: Array  # standard deviation over seeds, ddof 1; NaN for one seed
    seeds: NDArray[np.int64]
    flat: NDArray[np.bool_]  # every seed gave the same difference, to rounding

    @property
    def degrees(self) -> NDArray[np.int64]:
        return np.maximum(self.seeds - 1, 0)

    @property
    def error(self) -> Array:
        return np.asarray(self.spread / np.sqrt(np.maximum(self.seeds, 1)))

    @property
    def statistic(self) -> Array:
        return np.divide(self.value, self.error, out=np.full(self.value.shape, np.nan), where=~self.flat)

    @property
    def p_value(self) -> Array:
        """Two-sided p; 1 for arms equal in every seed, NaN if all seeds give the same nonzero difference."""
        p = 2 * stats.t.sf(np.abs(self.statistic), self.degrees)
        return np.where(self.flat & (self.value == 0), 1.0, p)

    @property
    def hedges_g(self) -> Array:
        """J(df) d/s: the difference in units of one training's spread within its seed (Hedges 1981).

        s is sd(differences)/√2, so that t = d/(s √(2/S)). Unbiased for normal differences. Spread between
        seeds is excluded: it is common to both arms.
        """
        return np.asarray(
            hedges_factor(self.degrees) * self.statistic * np.sqrt(2 / np.maximum(self.seeds, 1))
        )

    def interval(self) -> tuple[Array, Array]:
        half = stats.t.ppf(1 - LEVEL / 2, self.degrees) * self.error
        return self.value - half, self.value + half


def compare(runs: pd.DataFrame, reference: str, references: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the table `study_comparisons`: one row per question and arm, including the reference.

    `references` names another reference for single questions, such as the complete router for its ablations.
    Each question is its own family of tests. An arm that lacks seeds of the reference is compared on those
    they share, which favours an arm that fails where it does badly: read `study_runs.status` with it.
    """
    import pandas as pd

    names = list(dict.fromkeys(runs["arm"]))
    chosen = {
        str(question): (references or {}).get(str(question), reference)
        for question in dict.fromkeys(runs["question"])
    }
    for name in (reference, *chosen.values()):
        if name not in names:
            raise unknown_name("reference arm", name, [str(arm) for arm in names])
    if runs.duplicated(["arm", "seed"]).any():
        raise BadInput("study_runs: two rows of one arm and seed; give each arm its own name")
    losses = loss_table(runs)
    # why an arm has no result, if it has none
    reasons = dict.fromkeys(runs.loc[runs["status"] == "done", "arm"], UNTRAINED)
    reasons |= dict.fromkeys(runs.loc[runs["status"] == "failed", "arm"], FAILED)
    rows: list[dict[str, Any]] = []
    for question, named in chosen.items():
        arms = [arm for arm in dict.fromkeys(runs.loc[runs["question"] == question, "arm"]) if arm != named]
        rows += question_rows(question, named, arms, losses, reasons)
    frame = pd.DataFrame(rows)
    return frame.astype({"seeds": "int64", "degrees_of_freedom": "Int64"})


def final_slope(rows: pd.DataFrame, steps: int) -> float | None:
    """Return the slope of the validation loss over the last fifth of the steps, in nats per 1,000 steps.

    Least squares over the evaluations of that part, or the last two; None if fewer followed the first step.
    """
    evaluated = rows[["step", "validation_loss"]].dropna().astype(float).sort_values("step")
    evaluated = evaluated[evaluated["step"] > 0]
    last = evaluated.tail(max(2, int((evaluated["step"] >= 0.8 * steps).sum())))
    if len(last) < 2:
        return None
    return 1000 * float(np.polyfit(last["step"], last["validation_loss"], 1)[0])


def doubling_slopes(gains: list[tuple[float, pd.Series]]) -> pd.Series:
    """Return the slope of a line per seed through the gains, per doubling of the active parameters."""
    import pandas as pd

    rows = pd.concat([gain for _, gain in gains], axis=1).dropna() if len(gains) > 1 else pd.DataFrame()
    found = (
        np.polyfit(np.log2([active for active, _ in gains]), rows.to_numpy(float).T, 1)[0]
        if len(rows)
        else []
    )
    return pd.Series(found, rows.index, dtype=float)


def enters_comparisons(runs: pd.DataFrame) -> pd.Series:
    """Return which trainings count: done, with a finite loss that beats the unigram baseline.

    Runs without a baseline, of an older version, count.
    """
    losses = runs.get("validation_loss", runs["seed"] * np.nan).astype(float)  # absent if nothing ran
    baseline = runs.get("unigram_loss", runs["seed"] * np.nan).astype(float).fillna(np.inf)
    return (runs["status"] == "done") & np.isfinite(losses) & (losses < baseline)


def loss_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return losses by arm and seed; NaN where a training does not count."""
    losses = runs.get("validation_loss", runs["seed"] * np.nan).astype(float)
    counted = runs.assign(validation_loss=losses.where(enters_comparisons(runs)))
    return counted.pivot(index="arm", columns="seed", values="validation_loss")


def question_rows(
    question: str, reference: str, arms: list[str], losses: pd.DataFrame, reasons: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the rows of one question, the reference first; `reasons` why an arm may have no result."""
    losses_RS = losses.loc[[reference, *arms]].to_numpy(float)
    compared = differences(losses_RS)
    p_R = compared.p_value
    tests = max(int(np.isfinite(p_R).sum()), 1)
    low_R, high_R = compared.interval()
    columns: dict[str, Any] = {
        "seeds": compared.seeds,
        "difference": compared.value,
        "difference_low": low_R,
        "difference_high": high_R,
        "difference_std": compared.spread,
        "statistic": compared.statistic,
        "degrees_of_freedom": [int(df) or None for df in compared.degrees],
        "p_value": p_R,
        "p_adjusted": holm(p_R),
        "hedges_g": compared.hedges_g,
        "rank_p": holm(np.array([signed_rank_p(row - losses_RS[0]) for row in losses_RS[1:]])),
        "detectable_difference": [
            detectable_errors(int(df), tests) * error if df > 0 and not flat else np.nan
            for df, error, flat in zip(compared.degrees, compared.error, compared.flat, strict=True)
        ],
    }
    rows = [
        {
            **means(question, reference, reference, losses_RS[0]),
            "verdict": REFERENCE if finite_count(losses_RS[0]) else reasons.get(reference, NOT_RUN),
            "seeds": finite_count(losses_RS[0]),
        }
    ]
    for place, (arm, losses_S) in enumerate(zip(arms, losses_RS[1:], strict=True)):
        row = {name: values[place] for name, values in columns.items()}
        judged = verdict(row) if finite_count(losses_S) else reasons.get(arm, NOT_RUN)
        rows.append({**means(question, arm, reference, losses_S), **row, "verdict": judged})
    return rows


def means(question: str, arm: str, reference: str, losses_S: Array) -> dict[str, Any]:
    """Return the arm's mean over its seeds and the t interval of that mean."""
    finite = losses_S[np.isfinite(losses_S)]
    n = len(finite)
    mean = float(finite.mean()) if n else np.nan
    half = stats.t.ppf(1 - LEVEL / 2, n - 1) * finite.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    names = {"question": question, "arm": arm, "reference": reference}
    return {**names, "mean": mean, "low": mean - half, "high": mean + half}


def finite_count(losses_S: Array) -> int:
    return int(np.isfinite(losses_S).sum())


def verdict(row: dict[str, Any]) -> str:
    if row["seeds"] < MIN_SEEDS:
        return TOO_FEW
    if not np.isfinite(row["p_adjusted"]):
        return NO_SPREAD
    if row["p_adjusted"] > LEVEL:
        return ALIKE
    return BETTER if row["difference"] < 0 else WORSE


def differences(losses_RS: Array) -> Differences:
    """Return each arm minus the first row; NaN marks missing losses, leading axes are studies."""
    by_seed = losses_RS[..., 1:, :] - losses_RS[..., :1, :]
    shared = np.isfinite(by_seed)
    seeds = shared.sum(-1)
    size = np.maximum(np.abs(losses_RS[..., 1:, :]), np.abs(losses_RS[..., :1, :]))
    rounding = ROUNDING * np.where(shared, size, 0.0).max(-1)
    value = np.where(seeds > 0, np.where(shared, by_seed, 0.0).sum(-1) / np.maximum(seeds, 1), np.nan)
    value = np.where(np.abs(value) <= rounding, 0.0, value)
    squares = np.where(shared, by_seed - value[..., None], 0.0) ** 2
    spread = np.where(seeds > 1, np.sqrt(squares.sum(-1) / np.maximum(seeds - 1, 1)), np.nan)
    return Differences(value, spread, seeds, spread <= rounding * np.sqrt(np.maximum(seeds, 1)))


def holm(p: Array) -> Array:
    """Return Holm's (1979) step-down p: the i-th smallest of m times m − i + 1, monotone, at most 1.

    The last axis is the family; NaN is no test.
    """
    order = np.argsort(p, axis=-1)  # NaN last
    left = np.isfinite(p).sum(-1, keepdims=True) - np.arange(p.shape[-1])
    steps = np.maximum.accumulate(np.take_along_axis(p, order, -1) * left, axis=-1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(steps, 1.0), -1)
    return adjusted


def hedges_factor(degrees: NDArray[np.int64]) -> Array:
    """Return J(df) = Γ(df/2)/(√(df/2) Γ((df−1)/2)), about 1 − 3/(4 df − 1); NaN below df 2."""
    df = np.where(np.asarray(degrees) < 2, np.nan, degrees)
    return np.asarray(np.exp(special.gammaln(df / 2) - special.gammaln((df - 1) / 2)) / np.sqrt(df / 2))


def signed_rank_p(differences_S: Array) -> float:
    """Return p of Wilcoxon's two-sided signed-rank test; NaN below eight pairs, 1 if all agree."""
    pairs = differences_S[np.isfinite(differences_S)]
    if len(pairs) < RANKS_FROM:
        return np.nan
    if not pairs.any():
        return 1.0
    return float(stats.wilcoxon(pairs).pvalue)


@lru_cache(maxsize=256)
def detectable_errors(degrees: int, tests: int) -> float:
    """Return how many standard errors a true difference needs for power POWER at level 0.05/tests.

    0.05/tests is Holm's first step: what a single arm with a difference must pass.
    """
    critical = float(stats.t.ppf(1 - LEVEL / tests / 2, degrees))
    # averaged over quantiles of s/σ: the noncentral t's series fails at few degrees and small levels
    bounds: Array = critical * np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, degrees) / degrees)

    def power_gap(shift: float) -> float:
        return float((special.ndtr(shift - bounds) + special.ndtr(-shift - bounds)).mean()) - POWER

    return float(optimize.brentq(power_gap, 0.0, 10 * critical + 10))
