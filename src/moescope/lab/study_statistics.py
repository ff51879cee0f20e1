"""Compare a study's arms with their reference, blocked by seed and Holm-corrected for the number of arms.

The model is loss = arm + seed + residual. Seeds are blocks: a seed fixes initial weights and text order and
shifts all arms together, so arms are compared within seeds. Evaluation noise (other documents) enters no
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
SPREAD_LEVEL = 0.1  # of the equal-variance check: lenient, since a missed noisy arm makes false claims
MIN_SEEDS = 5  # with fewer, numbers are reported and nothing is claimed
RANKS_FROM = 8  # seeds; with 5 the smallest p of the signed-rank test is 0.0625
POWER = 0.8
DRAWS = 20_000
ROUNDING = 1e-12  # relative to the losses: smaller spread is rounding

BLOCKED, PAIRED, SHARED = "blocked", "paired t", "paired t, shared seeds"
BETTER, WORSE, ALIKE = "better", "worse", "not distinguishable"
TOO_FEW, NO_SPREAD = "too few seeds to say", "no spread over seeds"
NOT_RUN, FAILED, REFERENCE = "not run", "failed", "reference"


@dataclass(frozen=True)
class Difference:
    """Arm minus reference over shared seeds: mean, standard error (NaN for one seed), degrees of freedom."""

    value: float
    error: float
    degrees: int
    seeds: int
    test: str
    flat: bool  # every seed gave the same difference, to rounding

    @property
    def statistic(self) -> float:
        return self.value / self.error if self.error > 0 and not self.flat else np.nan

    @property
    def p_value(self) -> float:
        """Two-sided p; 1 for arms equal in every seed, NaN if all seeds give the same nonzero difference."""
        if self.degrees < 1:
            return np.nan
        if self.flat:
            return 1.0 if self.value == 0 else np.nan
        return float(2 * stats.t.sf(abs(self.statistic), self.degrees))

    @property
    def hedges_g(self) -> float:
        """J(df) d/s: the difference in units of one training's spread within its seed (Hedges 1981).

        s is the residual standard deviation, of a pair sd(differences)/√2, so that t = d/(s √(2/S)) in both.
        Unbiased for normal residuals. Spread between seeds is excluded: it is common to both arms.
        """
        return hedges_factor(self.degrees) * self.statistic * np.sqrt(2 / max(self.seeds, 1))

    def interval(self) -> tuple[float, float]:
        if self.degrees < 1:
            return np.nan, np.nan
        half = float(stats.t.ppf(1 - LEVEL / 2, self.degrees)) * self.error
        return self.value - half, self.value + half


def compare(runs: pd.DataFrame, reference: str, references: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the table `study_comparisons`: one row per question and arm, including the reference.

    `references` names another reference for single questions, such as the complete router for its ablations.
    Each question is its own family of tests. Arms with every seed of the reference are compared by `blocked`
    differences; an arm that lacks some by a paired t on shared seeds, which favours an arm that fails where
    it does badly: read `study_runs.status` with it.
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
    failed = set(runs.loc[runs["status"] == "failed", "arm"])
    rows: list[dict[str, Any]] = []
    for question, named in chosen.items():
        arms = [arm for arm in dict.fromkeys(runs.loc[runs["question"] == question, "arm"]) if arm != named]
        rows += question_rows(question, named, arms, losses, failed)
    frame = pd.DataFrame(rows)
    return frame.astype({"seeds": "int64", "degrees_of_freedom": "Int64"})


def loss_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return losses by arm and seed; NaN where a training is not done or has no finite loss."""
    losses = runs.get("validation_loss", runs["seed"] * np.nan).astype(float)  # absent if nothing ran
    counted = runs.assign(validation_loss=losses.where((runs["status"] == "done") & np.isfinite(losses)))
    return counted.pivot(index="arm", columns="seed", values="validation_loss")


def question_rows(
    question: str, reference: str, arms: list[str], losses: pd.DataFrame, failed: set[str]
) -> list[dict[str, Any]]:
    """Return the rows of one question, the reference first; of `failed` arms some training failed."""
    losses_RS = losses.loc[[reference, *arms]].to_numpy(float)
    compared, equal_p = differences(losses_RS)
    p_R = holm(np.array([one.p_value for one in compared]))
    rank_R = holm(np.array([signed_rank_p(row - losses_RS[0]) for row in losses_RS[1:]]))
    tests = int(np.isfinite([one.p_value for one in compared]).sum())
    rows = [
        {
            **means(question, reference, reference, losses_RS[0]),
            "verdict": REFERENCE if finite_count(losses_RS[0]) else without_result(reference, failed),
            "seeds": finite_count(losses_RS[0]),
        }
    ]
    for arm, one, adjusted, rank_p, losses_S in zip(arms, compared, p_R, rank_R, losses_RS[1:], strict=True):
        low, high = one.interval()
        rows.append(
            {
                **means(question, arm, reference, losses_S),
                "seeds": one.seeds,
                "difference": one.value,
                "difference_low": low,
                "difference_high": high,
                "statistic": one.statistic,
                "degrees_of_freedom": one.degrees if one.degrees > 0 else None,
                "p_value": one.p_value,
                "p_adjusted": adjusted,
                "test": one.test if one.degrees > 0 else None,
                "equal_variances_p": equal_p,
                "hedges_g": one.hedges_g,
                "rank_p": rank_p,
                "detectable_difference": detectable(one, max(tests, 1)),
                "verdict": verdict(one, adjusted) if finite_count(losses_S) else without_result(arm, failed),
            }
        )
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


def without_result(arm: str, failed: set[str]) -> str:
    return FAILED if arm in failed else NOT_RUN


def verdict(one: Difference, adjusted: float) -> str:
    if one.seeds < MIN_SEEDS:
        return TOO_FEW
    if not np.isfinite(adjusted):
        return NO_SPREAD
    if adjusted > LEVEL:
        return ALIKE
    return BETTER if one.value < 0 else WORSE


def differences(losses_RS: Array) -> tuple[list[Difference], float]:
    """Return (each arm minus the first row, p of equal variances); NaN marks missing losses.

    Blocked: s² = Σ residual²/((S−1)(R−1)), standard error √(2 s²/S), over the arms with all seeds of the
    reference. One s² serves all arms only if they scatter alike; where `equal_variances_p` rejects that, each
    arm is paired with the reference separately.
    """
    seeds = np.isfinite(losses_RS[0])
    complete_R: NDArray[np.bool_] = np.isfinite(losses_RS[:, seeds]).all(1) & seeds.any()
    block_RS = losses_RS[complete_R][:, seeds]
    equal_p = equal_variances_p(block_RS)
    pooled = len(block_RS) > 2 and not equal_p < SPREAD_LEVEL
    results = []
    for row, complete in zip(losses_RS[1:], complete_R[1:], strict=True):
        pair_2S = np.stack([losses_RS[0], row])
        pair_2S = pair_2S[:, np.isfinite(pair_2S).all(0)]
        test = SHARED if not complete else BLOCKED if pooled else PAIRED
        results.append(difference(pair_2S, block_RS if complete and pooled else pair_2S, test))
    return results, equal_p


def difference(pair_2S: Array, block_RS: Array, test: str) -> Difference:
    """Return second row minus first, its error from the block's residuals: of a pair, the paired t."""
    seeds = pair_2S.shape[1]
    if seeds == 0:
        return Difference(np.nan, np.nan, 0, 0, test, False)
    value = float((pair_2S[1] - pair_2S[0]).mean())
    rounding = ROUNDING * float(np.abs(block_RS).max())
    value = value if abs(value) > rounding else 0.0
    degrees = (seeds - 1) * (len(block_RS) - 1)
    if degrees < 1:
        return Difference(value, np.nan, 0, seeds, test, False)
    error = float(np.sqrt(2 * (residuals(block_RS) ** 2).sum() / degrees / seeds))
    return Difference(value, error, degrees, seeds, test, error <= rounding)


def residuals(losses_RS: Array) -> Array:
    """Return losses minus arm and seed effects; leading axes are studies."""
    centred = losses_RS - losses_RS.mean(-1, keepdims=True)
    return np.asarray(centred - centred.mean(-2, keepdims=True))


def equal_variances_p(losses_RS: Array) -> float:
    """Return p of the hypothesis of one residual variance for all arms; NaN for two arms or one seed.

    Arms share seeds, so Levene's and Bartlett's tests, which need independent groups, would also test the
    seeds. Residuals are free of arms and seeds, and any scale-free function of them has one distribution
    under the hypothesis, which is simulated: p is exact for normal residuals. The function is Cochran's C,
    the noisiest arm's share of all squares: a noisy arm makes one s² too small for its own comparison, or for
    all if it is the reference. In simulations C detects it more often than Bartlett's or John's function:
    with five seeds and level 0.1, 9 in 10 arms that scatter four times as much as eight others, 4 in 10 that
    scatter twice as much. For two arms residuals are mirror images, and the blocked test is the paired t.
    """
    arms, seeds = losses_RS.shape
    if arms < 3 or seeds < 2:
        return np.nan
    residuals_RS = residuals(losses_RS)
    if np.abs(residuals_RS).max() <= ROUNDING * np.abs(losses_RS).max():
        return np.nan
    drawn = null_shares(arms, seeds)
    above = len(drawn) - np.searchsorted(drawn, largest_share(residuals_RS), side="left")
    return float((1 + above) / (1 + len(drawn)))


def largest_share(residuals_RS: Array) -> Array:
    """Return Cochran's C; leading axes are studies."""
    squares = (residuals_RS**2).sum(-1)
    return np.asarray(squares.max(-1) / squares.sum(-1))


@lru_cache(maxsize=64)
def null_shares(arms: int, seeds: int) -> Array:
    """Return sorted C of simulated studies with equal variances."""
    generator = np.random.default_rng(0)
    block = max(1, 2_000_000 // (arms * seeds))  # studies at a time, to bound memory
    counts = [min(block, DRAWS - start) for start in range(0, DRAWS, block)]
    drawn = [largest_share(residuals(generator.standard_normal((count, arms, seeds)))) for count in counts]
    return np.sort(np.concatenate(drawn))


def holm(p: Array) -> Array:
    """Return Holm's (1979) step-down p: the i-th smallest of m times m − i + 1, monotone, at most 1."""
    adjusted = np.full(len(p), np.nan)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]  # NaN sorts last
    if len(order):
        adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def hedges_factor(degrees: int) -> float:
    """Return J(df) = Γ(df/2)/(√(df/2) Γ((df−1)/2)), about 1 − 3/(4 df − 1); NaN below df 2."""
    if degrees < 2:
        return np.nan
    ratio = np.exp(special.gammaln(degrees / 2) - special.gammaln((degrees - 1) / 2))
    return float(ratio / np.sqrt(degrees / 2))


def signed_rank_p(differences_S: Array) -> float:
    """Return p of Wilcoxon's two-sided signed-rank test; NaN below eight pairs, 1 if all agree."""
    pairs = differences_S[np.isfinite(differences_S)]
    if len(pairs) < RANKS_FROM:
        return np.nan
    if not pairs.any():
        return 1.0
    return float(stats.wilcoxon(pairs).pvalue)


def detectable(one: Difference, tests: int) -> float:
    """Return the true difference that this comparison finds with probability POWER."""
    return detectable_errors(one.degrees, tests) * one.error if one.degrees > 0 and not one.flat else np.nan


@lru_cache(maxsize=256)
def detectable_errors(degrees: int, tests: int) -> float:
    """Return how many standard errors a difference needs to be found with probability POWER at 0.05/tests.

    0.05/tests is Holm's first step: what a single arm with a difference must pass.
    """
    critical = float(stats.t.ppf(1 - LEVEL / tests / 2, degrees))
    # averaged over quantiles of s/σ: the noncentral t's series fails at few degrees and small levels
    bounds: Array = critical * np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, degrees) / degrees)

    def power_gap(shift: float) -> float:
        return float((special.ndtr(shift - bounds) + special.ndtr(-shift - bounds)).mean()) - POWER

    return float(optimize.brentq(power_gap, 0.0, 10 * critical + 10))
