"""The estimators of all subjects: intervals over documents and t tests over seeds, never over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy  # its parts are imported when they are used: they are slow to import
from numpy.typing import NDArray

from moescope.tables import FEWEST_DOCUMENTS as FEWEST_DOCUMENTS
from moescope.types import Array, Integers

BUCKETS = 256  # documents are hashed into this many groups, so that memory does not grow with their number
FEWEST_PAIRED = 10  # documents of an interval of a ratio
CONFIDENCE = 0.95
LEVEL = 0.05
TAILS = (0.025, 0.975)
RESAMPLES = 2000
RESAMPLES_AT_ONCE = 250  # bounds memory: one weight per document and resample
PERMUTATIONS = 1999
RANKS_FROM = 8  # pairs; with 5 the smallest p of the signed-rank test is 0.0625
POWER = 0.8
ROUNDING = 1e-12  # relative to the values: smaller spread is rounding


class Interval(NamedTuple):
    """A 95 % interval; `corrected` is the estimate that it belongs to, where that is not the plain value."""

    low: float = float("nan")
    high: float = float("nan")
    corrected: float = float("nan")


NOT_AVAILABLE = Interval()


class Jackknife(NamedTuple):
    """A statistic, its value with the bias of order 1/B removed, and half the width of a 95 % interval."""

    value: float
    corrected: float
    half: float


def clip_share(interval: Interval) -> Interval:
    """The interval of a share, cut at 0 and 1."""
    return Interval(*np.clip(interval, 0, 1).tolist())


def jackknife(parts: Array, statistic: Callable[[Array], Array]) -> Jackknife:
    """Return statistic(sum of parts) with its bias and its spread from leaving out one part at a time.

    Variance is (B - 1)/B times the sum of squared deviations of the B leave-one-out values, the correction
    B value - (B - 1) mean of those values; the quantile is Student's. Parts without content do not count.
    `half` and `corrected` are NaN for fewer than two parts.

    Parameters
    ----------
    parts : array
        Groups of documents along the first axis.
    statistic : callable
        Must work over leading axes.
    """
    total = parts.sum(0)
    value = float(statistic(total[None])[0])
    used = parts.reshape(len(parts), -1).any(1)
    n = int(used.sum())
    if n < 2:
        return Jackknife(value, float("nan"), float("nan"))
    left_out = statistic(total[None] - parts[used])
    spread = np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum())
    half = float(scipy.special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2) * spread)
    return Jackknife(value, n * value - (n - 1) * float(left_out.mean()), half)


def jackknife_interval(
    parts: Array, statistic: Callable[[Array], Array], documents: int, centre: float | None = None
) -> Interval:
    """Return a 95 % interval of statistic(sum of parts); not available (NaN) under 20 documents.

    `centre` replaces the statistic's value where that is corrected for bias in another way.
    """
    if documents < FEWEST_DOCUMENTS:  # first of all: Monitor asks for hundreds of unavailable intervals
        return NOT_AVAILABLE
    value, _, half = jackknife(parts, statistic)
    value = value if centre is None else centre
    return Interval(value - half, value + half)


@dataclass(frozen=True)
class Ratio:
    """Ratios of sums over documents, one per row: value, standard error, degrees of freedom."""

    value: Array
    error: Array
    degrees: Array | float
    documents: int

    def known_error(self) -> Array:
        """The standard error; NaN under 10 documents."""
        return self.error if self.documents >= FEWEST_PAIRED else np.full_like(self.value, np.nan)

    def interval(self) -> tuple[Array, Array]:
        """95 % limits; NaN under 10 documents."""
        half = scipy.special.stdtrit(self.degrees, 1 - LEVEL / 2) * self.known_error()
        return self.value - half, self.value + half

    def one_sided_p(self) -> Array:
        """P of a value as large, if the truth were 0: 1 without value and error, NaN under 10 documents."""
        with np.errstate(divide="ignore", invalid="ignore"):
            statistic = self.value / self.known_error()
        statistic = np.where((self.value == 0) & (self.error == 0), -np.inf, statistic)
        return np.asarray(scipy.special.stdtr(self.degrees, -statistic))


def jackknife_ratio(sums_XD: Array, tokens_D: Array, domain_D: Integers | None = None) -> Ratio:
    """Return sum of `sums` / sum of tokens per row, and its error from leaving out one document at a time.

    Which domains are judged is chosen, which documents is chance: of a domain with m documents, the m - 1
    that are left count m/(m - 1) times (stratified jackknife, Rust and Rao 1996). The variance is the sum
    over domains of (m - 1)/m times the squared deviations of the domain's leave-one-out ratios from their
    mean. Domains of one document count as one domain; a document without a second one deviates from the whole
    ratio. Student's t has the degrees of freedom of effective documents, (Σ tokens)²/Σ tokens² (Kish 1965),
    minus 1, summed over domains: where few long documents hold most tokens, their number would make intervals
    too short.

    In 4,000 simulated paired differences with normal or heavy tails (t with 4 degrees of freedom) 95 %
    intervals cover the truth in 94 to 96 %: from 10 documents on, in one domain or 2 documents in each of
    ten, with equal lengths or lengths over two orders of magnitude. Skewed differences are covered less:
    exponential ones in 0.89 to 0.94, lognormal ones in 0.84 to 0.92, with 10 to 100 documents; with skew to
    the left `one_sided_p` of no effect is below 0.05 in 0.07 to 0.15 and 0.11 to 0.21. Bootstrap-t and Hall's
    transformation are no better where lengths vary, and worse where differences are normal.
    """
    used = tokens_D > 0
    sums, tokens = sums_XD[:, used], tokens_D[used]
    n, total, sum_X = int(used.sum()), tokens.sum(), sums.sum(1, keepdims=True)
    if n < 2:
        value = sum_X[:, 0] / total if n else np.full(len(sums_XD), np.nan)
        return Ratio(value, np.full(len(value), np.nan), 0.0, n)
    labels = np.zeros(n, int) if domain_D is None else np.unique(domain_D[used], return_inverse=True)[1]
    labels[np.bincount(labels)[labels] == 1] = -1
    variance_X, degrees = np.zeros(len(sums)), 0.0
    for label in np.unique(labels):
        own_XM, tokens_M = sums[:, labels == label], tokens[labels == label]
        m = len(tokens_M)
        # documents of this domain that are left stand for those left out
        weight, share = (m / (m - 1), (m - 1) / m) if m > 1 else (1.0, 1.0)
        removed_XM = own_XM.sum(1, keepdims=True) - weight * (own_XM.sum(1, keepdims=True) - own_XM)
        removed_M = tokens_M.sum() - weight * (tokens_M.sum() - tokens_M)
        left_out_XM = (sum_X - removed_XM) / (total - removed_M)
        centre_X = left_out_XM.mean(1, keepdims=True) if m > 1 else sum_X / total
        variance_X += share * ((left_out_XM - centre_X) ** 2).sum(1)
        degrees += float(tokens_M.sum() ** 2 / (tokens_M**2).sum()) - 1
    return Ratio(sum_X[:, 0] / total, np.sqrt(variance_X), max(degrees, 1.0), n)


def ratios(sums_X: Array) -> Array:
    """Return sums divided by the number of tokens, which comes last."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums_X[..., :-1] / sums_X[..., -1:]


# --- bootstrap


def bootstrap_interval(
    parts: Array, statistic: Callable[[Array], Array], strata: Integers, seed: int = 0
) -> tuple[Array, Array]:
    """Return 95 % intervals of statistic(sum of parts), documents resampled with replacement within strata.

    Of the n documents of a stratum n - 1 are drawn and weighted by n / (n - 1): the variance of a sum is then
    unbiased (Rao and Wu 1988, JASA 83:231). The limits are the percentiles that a normal distribution has at
    Student's quantile, with as many degrees of freedom as documents minus strata (Hesterberg 2015, The
    American Statistician 69:371). A difference of two models over the same documents is paired when `parts`
    holds both. Not available (NaN) under 20 documents, and where a stratum has one document only. Of a mean
    per token over documents whose lengths vary a hundredfold it covers 0.92 with 20 documents, 0.94 with 200.

    Parameters
    ----------
    parts : array
        Documents along the first axis.
    statistic : callable
        Must work over leading axes.
    strata : array of int
        Stratum of every document, such as its domain.
    seed : int
        Seed of the resampling.
    """
    sizes = np.unique(strata, return_counts=True)[1]
    if len(parts) < FEWEST_DOCUMENTS or sizes.min() < 2:
        empty = np.full_like(statistic(parts.sum(0)[None])[0], np.nan)
        return empty, empty
    generator = np.random.default_rng(seed)
    flat = parts[np.argsort(strata, kind="stable")].reshape(len(parts), -1)
    count, values = RESAMPLES_AT_ONCE, []
    for _ in range(RESAMPLES // count):
        drawn = [generator.multinomial(n - 1, np.full(n, 1 / n), count) * (n / (n - 1)) for n in sizes]
        sums = np.concatenate(drawn, axis=1) @ flat
        values.append(statistic(sums.reshape(count, *parts.shape[1:])))
    low, high = np.quantile(np.concatenate(values), student_tails(len(parts) - len(sizes)), axis=0)
    return low, high


def student_tails(degrees: int) -> list[float]:
    """Return the two percentiles that a normal distribution has at Student's quantile."""
    tail = float(scipy.special.ndtr(scipy.special.stdtrit(degrees, 0.5 - CONFIDENCE / 2)))
    return [tail, 1 - tail]


def bootstrap_mean(values: Array, generator: np.random.Generator) -> tuple[float, float]:
    """Return a 95 % interval of a mean of few values, such as one per layer, drawn with replacement.

    The percentiles are those of `bootstrap_interval`, and of n values n - 1 are drawn.
    """
    n = len(values)
    means = values[generator.integers(n, size=(RESAMPLES, n - 1))].mean(1)
    low, high = np.quantile(means, student_tails(n - 1))
    return float(low), float(high)


def resampled_sums(
    parts: Sequence[Array | Integers],
    generator: np.random.Generator,
    resamples: int = RESAMPLES,
    strata: Integers | None = None,
) -> list[Array]:
    """Return sums [resamples, ...] over documents (the first axis), drawn with replacement within strata.

    The TAILS of a statistic of them are a percentile interval, which is too narrow with few documents.
    """
    strata = np.zeros(len(parts[0]), int) if strata is None else strata
    sums = [np.zeros((resamples, *part.shape[1:])) for part in parts]
    for stratum, n in zip(*np.unique(strata, return_counts=True), strict=True):
        weights = generator.multinomial(n, np.full(n, 1 / n), size=resamples)
        for total, part in zip(sums, parts, strict=True):
            total += weights @ part[strata == stratum]
    return sums


# --- permutations


def mean_correlation(
    pairs: Sequence[tuple[Array, Array]], fewest: int, seed: int = 0
) -> tuple[float, float, float, float, float]:
    """Return the mean of x·y over pairs of vectors of unit length, its interval, p, and chance level.

    Each y is permuted: the chance level is the largest size that 95 % of permutations stay below. Interval
    (pairs drawn with replacement) and p are NaN for fewer than `fewest` pairs.
    """
    generator = np.random.default_rng(seed)
    permuted = np.zeros(PERMUTATIONS)
    for x, y in pairs:
        permuted += generator.permuted(np.tile(y, (PERMUTATIONS, 1)), axis=1) @ x
    permuted = np.abs(permuted / len(pairs))
    by_pair = np.array([float(x @ y) for x, y in pairs])
    value, chance = float(by_pair.mean()), float(np.quantile(permuted, CONFIDENCE))
    if len(pairs) < fewest:
        return value, float("nan"), float("nan"), float("nan"), chance
    p = (1 + int((permuted >= abs(value) - 1e-12).sum())) / (PERMUTATIONS + 1)
    return value, *bootstrap_mean(by_pair, generator), p, chance


# --- t tests


@dataclass(frozen=True)
class TTest:
    """Means over the last axis and what a t test says of them; NaN is a missing value."""

    value: Array  # mean; NaN without a value
    spread: Array  # standard deviation, ddof 1; NaN for one value
    count: Integers
    flat: NDArray[np.bool_]  # all values are equal, to rounding

    @property
    def degrees(self) -> Integers:
        return np.maximum(self.count - 1, 0)

    @property
    def error(self) -> Array:
        return np.asarray(self.spread / np.sqrt(np.maximum(self.count, 1)))

    @property
    def statistic(self) -> Array:
        return np.divide(self.value, self.error, out=np.full(self.value.shape, np.nan), where=~self.flat)

    @property
    def p_value(self) -> Array:
        """Two-sided p; 1 if all values are 0, NaN if all are the same other value."""
        p = 2 * scipy.special.stdtr(self.degrees, -np.abs(self.statistic))
        return np.where(self.flat & (self.value == 0), 1.0, p)

    @property
    def hedges_g(self) -> Array:
        """J(df) d/s of paired differences d: in units of one training's spread within its seed (Hedges 1981).

        s is sd(differences)/√2, so that t = d/(s √(2/S)). Unbiased for normal differences. Spread between
        seeds is excluded: it is common to both arms.
        """
        return np.asarray(
            hedges_factor(self.degrees) * self.statistic * np.sqrt(2 / np.maximum(self.count, 1))
        )

    def interval(self) -> tuple[Array, Array]:
        half = scipy.special.stdtrit(self.degrees, 1 - LEVEL / 2) * self.error
        return self.value - half, self.value + half


def t_test(values: Array, size: Array | None = None) -> TTest:
    """Test the mean over the last axis against 0.

    Rounding is relative to `size`, such as the losses whose differences the values are; else to the values.
    """
    known = np.isfinite(values)
    count = known.sum(-1)
    rounding = ROUNDING * np.where(known, np.abs(values) if size is None else size, 0.0).max(-1, initial=0.0)
    value = np.where(count > 0, np.where(known, values, 0.0).sum(-1) / np.maximum(count, 1), np.nan)
    value = np.where(np.abs(value) <= rounding, 0.0, value)
    squares = np.where(known, values - value[..., None], 0.0) ** 2
    spread = np.where(count > 1, np.sqrt(squares.sum(-1) / np.maximum(count - 1, 1)), np.nan)
    return TTest(value, spread, count, spread <= rounding * np.sqrt(np.maximum(count, 1)))


def paired_t_test(values_RS: Array) -> TTest:
    """Test each row minus the first over the seeds that both have; leading axes are studies."""
    size = np.maximum(np.abs(values_RS[..., 1:, :]), np.abs(values_RS[..., :1, :]))
    return t_test(values_RS[..., 1:, :] - values_RS[..., :1, :], size)


def hedges_factor(degrees: Integers) -> Array:
    """Return J(df) = Γ(df/2)/(√(df/2) Γ((df−1)/2)), about 1 − 3/(4 df − 1); NaN below df 2."""
    df = np.where(np.asarray(degrees) < 2, np.nan, degrees)
    log_ratio = scipy.special.gammaln(df / 2) - scipy.special.gammaln((df - 1) / 2)
    return np.asarray(np.exp(log_ratio) / np.sqrt(df / 2))


def signed_rank_p(differences_S: Array) -> float:
    """Return p of Wilcoxon's two-sided signed-rank test; NaN below eight pairs, 1 if all agree."""
    pairs = differences_S[np.isfinite(differences_S)]
    if len(pairs) < RANKS_FROM:
        return np.nan
    return float(scipy.stats.wilcoxon(pairs).pvalue) if pairs.any() else 1.0


@lru_cache(maxsize=256)
def detectable_errors(degrees: int, tests: int) -> float:
    """Return how many standard errors a true difference needs for power POWER at level 0.05/tests.

    0.05/tests is Holm's first step: what a single arm with a difference must pass.
    """
    special, shares = scipy.special, (np.arange(4000) + 0.5) / 4000
    critical = float(special.stdtrit(degrees, 1 - LEVEL / tests / 2))
    # averaged over quantiles of s/σ: the noncentral t's series fails at few degrees and small levels
    bounds: Array = critical * np.sqrt(2 * special.gammaincinv(degrees / 2, shares) / degrees)

    def power_gap(shift: float) -> float:
        return float((special.ndtr(shift - bounds) + special.ndtr(-shift - bounds)).mean()) - POWER

    return float(scipy.optimize.brentq(power_gap, 0.0, 10 * critical + 10))


# --- several tests


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


def false_discovery_rates(p_values: Array) -> Array:
    """q values of Benjamini and Hochberg 1995: the smallest m p/rank of this and all larger p, at most 1.

    Written out because scipy.stats alone takes longer to import than a report's findings to compute.
    """
    order = np.argsort(p_values)[::-1]
    m = len(p_values)
    q_values = np.empty(m)
    q_values[order] = np.minimum.accumulate(p_values[order] * (m / np.arange(m, 0, -1))).clip(max=1.0)
    return q_values


def split_half_ceiling(halves: Sequence[float]) -> float:
    """Return the largest correlation that noise allows: √(2r/(1 + r)) (Spearman-Brown); NaN without any.

    r is the mean of the correlations between two halves of the data, at least 0.
    """
    r = max(float(np.mean(halves)), 0.0) if len(halves) else float("nan")
    return float(np.sqrt(2 * r / (1 + r)))
