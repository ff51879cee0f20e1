"""What a study's trainings say: every arm against one reference, blocked by seed, with the number of arms
paid for.

The model is loss = arm + seed + residual. Seeds are blocks: a seed fixes first weights and order of the text,
and moves all arms together, so arms are compared within seeds. Noise of the evaluation (documents drawn anew)
has no part in any test: it says how well one model was measured, not how another training of it would come
out.
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
SPREAD_LEVEL = (
    0.1  # of the check for equal variances: lenient, since a noisy arm that it misses makes false claims
)
FEWEST_SEEDS = 5  # below that numbers are given and nothing is claimed
RANKS_FROM = 8  # seeds; with 5 the smallest p of the signed-rank test is 0.0625
POWER = 0.8
DRAWS = 20_000
ROUNDING = 1e-12  # of the losses' size: spread below it is that of floating-point sums

BLOCKED, PAIRED, SHARED = "blocked", "paired t", "paired t, shared seeds"
BETTER, WORSE, ALIKE = "better", "worse", "not distinguishable"
TOO_FEW, NO_SPREAD, NOT_RUN, REFERENCE = (
    "too few seeds to say",
    "no spread over seeds",
    "not run",
    "reference",
)
FAILED = "failed"  # no result, though it was tried


@dataclass(frozen=True)
class Difference:
    """An arm less the reference, over the seeds both have.

    The mean, its standard error (NaN for one seed) and its degrees of freedom.
    """

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
        """Two-sided.

        1 for arms that agree in every seed, undefined where seeds make no difference to one that is there.
        """
        if self.degrees < 1:
            return np.nan
        if self.flat:
            return 1.0 if self.value == 0 else np.nan
        return float(2 * stats.t.sf(abs(self.statistic), self.degrees))

    @property
    def hedges_g(self) -> float:
        """J(df) d/s: the difference in units of one training's spread within its seed; E[g] is the true
        ratio, exactly, for normal residuals.

        s is the residual standard deviation, of a pair sd(differences)/√2, so that t = d/(s √(2/S)) in both.
        Hedges 1981. Spread over seeds themselves is left out: it is common to both arms.
        """
        return hedges_factor(self.degrees) * self.statistic * np.sqrt(2 / max(self.seeds, 1))

    def interval(self) -> tuple[float, float]:
        if self.degrees < 1:
            return np.nan, np.nan
        half = float(stats.t.ppf(1 - LEVEL / 2, self.degrees)) * self.error
        return self.value - half, self.value + half


def compare(runs: pd.DataFrame, reference: str, references: Mapping[str, str] | None = None) -> pd.DataFrame:
    """The table `study_comparisons` from `study_runs`: a row a question and arm, the reference's own among
    them.

    `references` names another reference for single questions, such as the whole router for its ablations.
    Each question is a family of its own. Arms that have every seed of the reference are compared by `blocked`
    differences; one that lacks some by a paired t on those it shares, which is kind to an arm that fails
    where it does badly: read `study_runs.status` beside it.
    """
    import pandas as pd

    known = list(dict.fromkeys(runs["arm"]))
    chosen = {
        str(question): (references or {}).get(str(question), reference)
        for question in dict.fromkeys(runs["question"])
    }
    for name in (reference, *chosen.values()):
        if name not in known:
            raise unknown_name("reference arm", name, [str(arm) for arm in known])
    if runs.duplicated(["arm", "seed"]).any():
        raise BadInput("study_runs: two rows of one arm and seed; give each arm another name")
    losses = loss_table(runs)
    failed = set(runs.loc[runs["status"] == "failed", "arm"])
    rows: list[dict[str, Any]] = []
    for question, named in chosen.items():
        arms = [arm for arm in dict.fromkeys(runs.loc[runs["question"] == question, "arm"]) if arm != named]
        rows += question_rows(question, named, arms, losses, failed)
    frame = pd.DataFrame(rows)
    return frame.astype({"seeds": "int64", "degrees_of_freedom": "Int64"})


def loss_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Arms by seeds; empty where a training is not done, or ended without a finite loss."""
    # no such column where nothing ran
    losses = runs.get("validation_loss", runs["seed"] * np.nan).astype(float)
    counted = runs.assign(validation_loss=losses.where((runs["status"] == "done") & np.isfinite(losses)))
    return counted.pivot(index="arm", columns="seed", values="validation_loss")


def question_rows(
    question: str, reference: str, arms: list[str], losses: pd.DataFrame, failed: set[str]
) -> list[dict[str, Any]]:
    """The rows of one family of comparisons, the reference first.

    `failed` are arms of which some training failed.
    """
    losses_RS = losses.loc[[reference, *arms]].to_numpy(float)
    found, equal_p = differences(losses_RS)
    p_R = holm(np.array([one.p_value for one in found]))
    rank_R = holm(np.array([signed_rank_p(row - losses_RS[0]) for row in losses_RS[1:]]))
    tests = int(np.isfinite([one.p_value for one in found]).sum())
    rows = [
        {
            **means(question, reference, reference, losses_RS[0]),
            "verdict": REFERENCE if there(losses_RS[0]) else without_result(reference, failed),
            "seeds": there(losses_RS[0]),
        }
    ]
    for arm, one, adjusted, rank_p, own in zip(arms, found, p_R, rank_R, losses_RS[1:], strict=True):
        low, high = one.interval()
        rows.append(
            {
                **means(question, arm, reference, own),
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
                "detectable_difference": detectable(one.degrees, max(tests, 1)) * one.error
                if one.degrees > 0 and not one.flat
                else np.nan,
                "verdict": verdict(one, adjusted) if there(own) else without_result(arm, failed),
            }
        )
    return rows


def means(question: str, arm: str, reference: str, own_S: Array) -> dict[str, Any]:
    """The arm by itself: mean over its seeds and the t interval of that mean."""
    own = own_S[np.isfinite(own_S)]
    mean = float(own.mean()) if len(own) else np.nan
    half = (
        stats.t.ppf(1 - LEVEL / 2, len(own) - 1) * own.std(ddof=1) / np.sqrt(len(own))
        if len(own) > 1
        else np.nan
    )
    return {
        "question": question,
        "arm": arm,
        "reference": reference,
        "mean": mean,
        "low": mean - half,
        "high": mean + half,
    }


def there(losses_S: Array) -> int:
    return int(np.isfinite(losses_S).sum())


def without_result(arm: str, failed: set[str]) -> str:
    return FAILED if arm in failed else NOT_RUN


def verdict(one: Difference, adjusted: float) -> str:
    if one.seeds < FEWEST_SEEDS:
        return TOO_FEW
    if not np.isfinite(adjusted):
        return NO_SPREAD
    if adjusted > LEVEL:
        return ALIKE
    return BETTER if one.value < 0 else WORSE


# --- differences


def differences(losses_RS: Array) -> tuple[list[Difference], float]:
    """(every arm less the first row, the p of equal variances). NaN where there is no loss.

    Blocked: s² = Σ residual²/((S−1)(R−1)), standard error √(2 s²/S), over the arms that have all of the
    reference's seeds. That one s² serves all arms only if they scatter alike; where `equal_variances_p` says
    they do not, each arm is paired with the reference by itself.
    """
    seeds = np.isfinite(losses_RS[0])
    whole_R: NDArray[np.bool_] = np.isfinite(losses_RS[:, seeds]).all(1) & seeds.any()
    block_RS = losses_RS[whole_R][:, seeds]
    equal_p = equal_variances_p(block_RS)
    together = len(block_RS) > 2 and not equal_p < SPREAD_LEVEL
    found = []
    for row, whole in zip(losses_RS[1:], whole_R[1:], strict=True):
        pair_2S = np.stack([losses_RS[0], row])
        pair_2S = pair_2S[:, np.isfinite(pair_2S).all(0)]
        test = SHARED if not whole else BLOCKED if together else PAIRED
        found.append(difference(pair_2S, block_RS if whole and together else pair_2S, test))
    return found, equal_p


def difference(pair_2S: Array, block_RS: Array, test: str) -> Difference:
    """The second row less the first, its error from the residuals of the block.

    Which for the pair alone is the paired t.
    """
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
    """What is left of losses when arm and seed are taken out; leading axes are studies."""
    centred = losses_RS - losses_RS.mean(-1, keepdims=True)
    return np.asarray(centred - centred.mean(-2, keepdims=True))


# --- equal variances


def equal_variances_p(losses_RS: Array) -> float:
    """p of the hypothesis that all arms have one residual variance; NaN for two arms, one seed, or no
    residuals at all.

    Losses of an arm share their seeds with every other arm's, so Levene's and Bartlett's tests, which want
    independent groups, would test the seeds too. Residuals are free of arms and seeds, and any function of
    them that does not depend on their scale has one distribution under the hypothesis, whatever arms and
    seeds do: it is drawn, so p is exact for normal residuals, though those of a seed sum to 0. The function
    is Cochran's C, the noisiest arm's share of all squares: a noisy arm is what makes one s² too small for
    its own comparison, or for all where it is the reference. In simulations C finds it more often than
    Bartlett's or John's function. With five seeds and level 0.1 it finds 9 in 10 of arms that scatter four
    times as much as the eight others, 4 in 10 that scatter twice as much. For two arms residuals are mirror
    images, and the blocked test is the paired t.
    """
    arms, seeds = losses_RS.shape
    if arms < 3 or seeds < 2:
        return np.nan
    own = residuals(losses_RS)
    if np.abs(own).max() <= ROUNDING * np.abs(losses_RS).max():
        return np.nan
    drawn = largest_share_by_chance(arms, seeds)
    above = len(drawn) - np.searchsorted(drawn, largest_share(own), side="left")
    return float((1 + above) / (1 + len(drawn)))


def largest_share(residuals_RS: Array) -> Array:
    """Cochran's C; leading axes are studies."""
    squares = (residuals_RS**2).sum(-1)
    return np.asarray(squares.max(-1) / squares.sum(-1))


@lru_cache(maxsize=64)
def largest_share_by_chance(arms: int, seeds: int) -> Array:
    """Sorted, of drawn studies in which all variances are equal."""
    generator = np.random.default_rng(0)
    block = max(1, 2_000_000 // (arms * seeds))  # studies at a time, to bound memory
    counts = [min(block, DRAWS - start) for start in range(0, DRAWS, block)]
    drawn = [largest_share(residuals(generator.standard_normal((count, arms, seeds)))) for count in counts]
    return np.sort(np.concatenate(drawn))


# --- many arms, few degrees of freedom, ranks, power


def holm(p: Array) -> Array:
    """Holm's step-down: the i-th smallest of m times m − i + 1, never falling, at most 1.

    NaN is no test and stays. Holm 1979.
    """
    adjusted = np.full(len(p), np.nan)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]  # NaN sorts last
    if len(order):
        adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1)), 1.0)
    return adjusted


def hedges_factor(degrees: int) -> float:
    """J(df) = Γ(df/2)/(√(df/2) Γ((df−1)/2)), about 1 − 3/(4 df − 1).

    NaN below 2, where a mean of d/s does not exist.
    """
    if degrees < 2:
        return np.nan
    return float(
        np.exp(special.gammaln(degrees / 2) - special.gammaln((degrees - 1) / 2)) / np.sqrt(degrees / 2)
    )


def signed_rank_p(differences_S: Array) -> float:
    """Wilcoxon's signed-rank test, two-sided; NaN below eight pairs, 1 where all agree."""
    pairs = differences_S[np.isfinite(differences_S)]
    if len(pairs) < RANKS_FROM:
        return np.nan
    if not pairs.any():
        return 1.0
    return float(stats.wilcoxon(pairs).pvalue)


@lru_cache(maxsize=256)
def detectable(degrees: int, tests: int) -> float:
    """How many standard errors a true difference must be for a t of so many degrees to be found with
    probability 0.8 at level 0.05/tests.

    0.05/tests is Holm's first step: what the only arm with a difference has to pass.
    """
    critical = float(stats.t.ppf(1 - LEVEL / tests / 2, degrees))
    # over the quantiles of s/σ rather than by the noncentral t's series, which fails at few degrees and small
    # levels
    bar: Array = critical * np.sqrt(stats.chi2.ppf((np.arange(4000) + 0.5) / 4000, degrees) / degrees)

    def beyond(shift: float) -> float:
        return float((special.ndtr(shift - bar) + special.ndtr(-shift - bar)).mean()) - POWER

    return float(optimize.brentq(beyond, 0.0, 10 * critical + 10))
