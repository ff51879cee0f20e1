"""Load balance: how evenly experts are used, and what ideal random balanced routing gives.

The metrics take loads over the last axis: tokens per expert, or gate weight per expert. Under random balanced
routing every token chooses k of n experts, all subsets alike, independently. Tokens of real text are
correlated, so even a balanced router lies above these chance levels on text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from moescope.statistics import TAILS, Interval, Jackknife, jackknife, jackknife_ratio
from moescope.types import Array, Integers

DRAWS = 200
EQUAL_GATES = 1e-9  # relative variance of gates below which they are equal
# Estimates by the other documents' order vary more than the plain value. Chosen by simulation: with 1, Gini's
# interval covers 0.88 for one busy expert of 64, with 1.3 0.92 for even loads, with sqrt 2 at least 0.93.
WIDER = np.sqrt(2)
NEARLY_UNUSED = 0.01  # load over the mean below which an expert counts as unused in alerts, or as dead
FEWEST_EXPECTED = 5.0  # expected tokens below which a count is not judged


def cv(load_E: Array) -> Array:
    """Coefficient of variation: std(c, ddof 0) / mean(c)."""
    return np.asarray(divide(load_E.std(-1), load_E.mean(-1)))


def max_violation(load_E: Array) -> Array:
    """Excess of the busiest expert over the mean load: (max c - mean c) / mean c."""
    return np.asarray(max_over_mean(load_E) - 1)


def max_over_mean(load_E: Array) -> Array:
    """Load of the busiest expert over the mean: max_violation + 1, as other tools print it."""
    return np.asarray(divide(load_E.max(-1), load_E.mean(-1)))


def gini(load_E: Array) -> Array:
    """Gini coefficient: (n + 1 - 2 sum of cumulative shares) / n, loads ascending; 0 when all are equal."""
    n = load_E.shape[-1]
    cumulative = np.cumsum(np.sort(load_E, -1), -1)
    return np.asarray((n + 1 - 2 * divide(cumulative.sum(-1), cumulative[..., -1])) / n)


def unused(load_E: Array) -> Array:
    """Share of experts without load."""
    return np.asarray((load_E == 0).mean(-1))


def min_max_ratio(load_E: Array) -> Array:
    """Load of the least busy expert over that of the busiest."""
    return np.asarray(divide(load_E.min(-1), load_E.max(-1)))


def load_entropy(load_E: Array) -> Array:
    """Entropy of the load shares in nats: -sum q log q."""
    shares = divide(load_E, load_E.sum(-1, keepdims=True))
    return np.asarray(-np.sum(shares * np.log(np.where(shares > 0, shares, 1.0)), -1))


def load_entropy_bits(load_E: Array) -> Array:
    """Entropy of the load shares in bits."""
    return np.asarray(load_entropy(load_E) / np.log(2))


def load_entropy_share(load_E: Array) -> Array:
    """Entropy of the load shares over its maximum, log n."""
    n = load_E.shape[-1]
    return np.asarray(load_entropy(load_E) / np.log(n)) if n > 1 else np.ones(load_E.shape[:-1])


def balancing_loss(load_E: Array, probability_E: Array) -> float:
    """n sum f P, f the shares of the load and P the mean probabilities: the loss of the Switch Transformer.

    Fedus et al. 2021, arXiv:2101.03961. transformers' load_balancing_loss_func is k times this.
    """
    products_E = divide(load_E, load_E.sum()) * divide(probability_E, probability_E.sum())
    return float(len(load_E) * products_E.sum())


def divide(top: Array, bottom: Array) -> Array:
    """Return top / bottom, NaN where the bottom is 0: without tokens there is no value."""
    return np.asarray(
        np.divide(top, bottom, out=np.full(np.broadcast(top, bottom).shape, np.nan), where=bottom > 0)
    )


# --- intervals over documents; x_BE holds the loads of groups of documents
#
# The plain metrics are biased, because noise in the loads looks like imbalance: upward for cv, Gini and the
# busiest expert, downward for entropy. The bias comes from products of a document's load with itself.


def product_of_shares(x_BE: Array, y_BE: Array) -> Jackknife:
    """n times the sum over experts of the shares of x times those of y, from different documents only.

    n sum_i (X_i Y_i - sum_d x_di y_di)/(X Y - sum_d X_d Y_d), jackknifed: it has no bias.
    """
    n = x_BE.shape[1]

    def statistic(sums: Array) -> Array:
        x, y, same, all_same = np.split(sums, [n, 2 * n, 2 * n + 1], axis=-1)
        pairs = x.sum(-1) * y.sum(-1) - all_same[..., 0]
        return n * divide((x * y).sum(-1) - same[..., 0], pairs)

    same_B, all_same_B = (x_BE * y_BE).sum(1), x_BE.sum(1) * y_BE.sum(1)
    return jackknife(np.column_stack([x_BE, y_BE, same_B, all_same_B]), statistic)


def balancing_loss_interval(x_BE: Array, p_BE: Array) -> Interval:
    """Interval of the load-balancing loss from loads and sums of probabilities."""
    value, _, half = product_of_shares(x_BE, p_BE)
    return Interval(value - half, value + half, value)


def cv_interval(x_BE: Array) -> Interval:
    """Interval of cv from products of different documents only, jackknifed.

    cv^2 = n sum_i (T_i^2 - sum_d x_di^2)/(N^2 - sum_d N_d^2) - 1 has no bias, so it may be negative: its
    limits are cut at 0 before the root is taken.
    """
    product, _, half = product_of_shares(x_BE, x_BE)
    return Interval(*np.sqrt(np.maximum(np.array([-half, half, 0]) + product - 1, 0)).tolist())


def entropy_interval(entropy: Callable[[Array], Array]) -> Callable[[Array], Interval]:
    """Interval of an entropy around its jackknife-corrected value, cut at 0 and at that of even loads."""

    def interval(x_BE: Array) -> Interval:
        _, corrected, half = jackknife(x_BE, entropy)
        most = entropy(np.ones(x_BE.shape[1]))
        return Interval(*np.clip([corrected - half, corrected + half, corrected], 0, most).tolist())

    return interval


def gini_interval(x_BE: Array) -> Interval:
    """Interval of Gini between two estimates, of which one is biased downward and one upward.

    The first weights the experts of each document by their ranks in all others, (2 rank - n - 1)/n: its mean
    is 0 for even loads. The second is jackknife-corrected, which halves the bias at even loads. The estimate
    is their mean.
    """
    import pandas as pd

    n, ranks_BE = x_BE.shape[1], pd.DataFrame(x_BE.sum(0) - x_BE).rank(axis=1).to_numpy()
    below = float(((2 * ranks_BE - n - 1) * x_BE).sum() / (n * x_BE.sum()))
    _, above, half = jackknife(x_BE, gini)
    limits = below - WIDER * half, above + half, (below + above) / 2
    return Interval(*np.clip(limits, 0, 1).tolist())


def max_interval(even: float) -> Callable[[Array], Interval]:
    """Interval of max_over_mean (`even` = 1) or max_violation (0), which holds the value itself.

    Its lower end belongs to n times the load that documents give to the busiest expert of all others, which
    is biased downward, its upper end to the value, which is biased upward.
    """

    def interval(x_BE: Array) -> Interval:
        others_BE = x_BE.sum(0) - x_BE
        busiest_BE = others_BE == others_BE.max(1, keepdims=True)
        below = x_BE.shape[1] * float(
            (x_BE * busiest_BE / busiest_BE.sum(1, keepdims=True)).sum() / x_BE.sum()
        )
        above, _, half = jackknife(x_BE, max_over_mean)
        return Interval(max(below - WIDER * half, 1.0) + even - 1, above + half + even - 1)

    return interval


def lorenz(load_E: Array) -> Array:
    """Share of the load of the busiest expert, of the two busiest, ... of all."""
    return np.cumsum(-np.sort(-load_E, -1), -1) / np.maximum(load_E.sum(-1, keepdims=True), 1)


def load_noise(cells_CE: Array, labels_C: Integers, tokens: int) -> tuple[Array, Array]:
    """Return the noise of each expert's load over an even share, and p that its load is even.

    Tokens of a document are alike, so loads vary more than those of independent tokens. The noise is the
    jackknife error of an expert's share over groups of documents, within domains; Student's quantile over the
    normal one makes 1.96 of it half a 95 % interval. It is at least the layer's root mean square and that of
    random routing, and p at least that of a binomial count. Both are NaN where no domain has two groups: a
    document is not told from chance.

    Parameters
    ----------
    cells_CE
        Loads of groups of documents.
    labels_C
        The domain of each group.
    tokens
        Tokens of all groups.
    """
    size_C, load_E = cells_CE.sum(1), cells_CE.sum(0)
    if (size_C > 0).sum() <= len(np.unique(labels_C[size_C > 0])):
        return np.full(len(load_E), np.nan), np.full(len(load_E), np.nan)
    from scipy.special import bdtr, bdtrc, ndtri, stdtr, stdtrit

    even = load_E.mean()
    share = min(even / tokens, 1.0)
    tails = bdtr(load_E, tokens, share), np.where(load_E > 0, bdtrc(load_E - 1, tokens, share), 1.0)
    ratio = jackknife_ratio(cells_CE.T, size_C, labels_C)
    # even loads vary alike: a small own error may be luck, and would call an expert uneven
    error_E = len(load_E) * np.maximum(ratio.error, np.sqrt((ratio.error**2).mean()))
    student = stdtrit(ratio.degrees, TAILS[1]) / ndtri(TAILS[1])
    z_E = divide(np.abs(load_E / even - 1), error_E)
    p_E = np.fmax(2 * stdtr(ratio.degrees, -z_E), np.minimum(2 * np.minimum(*tails), 1.0))
    return np.maximum(np.sqrt((1 - share) / even), student * error_E), p_E


# --- chance levels


@dataclass(frozen=True)
class Setting:
    """What chance levels depend on. k is the mean number of experts per token: empty slots do not count.

    `relative_std` is the standard deviation of one expert's load under random routing, over the mean load.
    """

    tokens: int
    n_experts: int
    k: float
    gate_std: float | None = None  # relative_std where the load is gate weight
    pairs: float | None = None  # mean of k (k - 1) over tokens; None: all tokens have k experts
    choices: float = float("nan")  # mean number of experts of the tokens that have one
    d_model: int = 0
    same_first: float = float("nan")  # probability that two independent tokens have the same first choice
    neighbours: float = float("nan")  # pairs of adjacent tokens
    layers: int = 1  # layers that are read: the most extreme of them leads

    @property
    def k_at_collapse(self) -> float:
        """At least 1: tokens that lost their only expert do not make the others' load less even."""
        return max(self.k, 1.0)

    @property
    def relative_std(self) -> float:
        if self.gate_std is not None:
            return self.gate_std
        variance = max(self.n_experts - self.k, 0) / (self.tokens * self.k) if self.tokens else np.nan
        return float(np.sqrt(variance))

    @cached_property
    def draws(self) -> Array:
        """Loads of 200 random routings, seeded: exact for counts at any N.

        Where k is no whole number, some tokens choose one expert more than others. For gate weight the
        choices of these routings have gates of a gamma distribution with the variance that gives `gate_std`.
        """
        least = int(self.k)
        more = round(self.tokens * (self.k - least))
        loads = random_loads(self.tokens - more, self.n_experts, least)
        if more:
            loads = loads + random_loads(more, self.n_experts, least + 1, seed=1)
        if self.gate_std is None:
            return loads
        choices, equal = self.tokens * self.k, replace(self, gate_std=None)
        variance = (self.gate_std**2 - equal.relative_std**2) * choices / max(self.n_experts - 1, 1)
        if not variance > EQUAL_GATES:
            return loads
        return np.random.default_rng(2).gamma(loads / variance) * variance

    def mean_draw(self, metric: Callable[[Array], Array]) -> float:
        """Mean of a metric over random routings."""
        return float(metric(self.draws).mean())


def gate_relative_std(n_experts: int, gates: float, gates_squared: float, token_sums_squared: float) -> float:
    """Relative std of an expert's gate weight when each token assigns its gates to experts at random.

    With s the sum of a token's gates and q the sum of their squares: sqrt(sum(q/n - s^2/n^2)) / (sum(s)/n).
    Equal gates give sqrt((n - k)/(N k)), the chance level of counts.
    """
    variance = max(gates_squared / n_experts - token_sums_squared / n_experts**2, 0.0)
    return float(np.sqrt(variance) / (gates / n_experts)) if gates > 0 else np.nan


# --- quantiles under random routing, for the most extreme of several layers


def cv_quantile(setting: Setting, q: float) -> float:
    """Quantile of cv: (n - 1) cv^2 over its mean is chi-squared with n - 1 degrees of freedom."""
    from scipy.special import chdtri

    degrees = max(setting.n_experts - 1, 1)
    return float(setting.relative_std * np.sqrt(chdtri(degrees, 1 - q) / degrees))


def busiest_quantile(setting: Setting, q: float) -> float:
    """Quantile of max_over_mean, as if experts were independent, which is hardly too large.

    Their counts are binomial and negatively associated (Joag-Dev and Proschan 1983).
    """
    from scipy.special import bdtrik

    share = min(setting.k / setting.n_experts, 1.0)
    if not share * setting.tokens:
        return float("nan")
    most = bdtrik(q ** (1 / setting.n_experts), setting.tokens, share) if share < 1 else setting.tokens
    return float(np.ceil(most) / (share * setting.tokens))


def unused_quantile(setting: Setting, q: float) -> float:
    """Quantile of the share of unused experts, of independent experts."""
    from scipy.special import bdtrik

    n = setting.n_experts
    most = bdtrik(q, n, (1 - min(setting.k / n, 1.0)) ** setting.tokens)  # NaN where that is about 0
    return float(np.maximum(np.ceil(np.nan_to_num(most)), 0) / n)


def same_first_quantile(setting: Setting, q: float) -> float:
    """Quantile of the share of adjacent independent tokens with the same first choice."""
    from scipy.special import ndtri

    p = setting.same_first
    return float(p + ndtri(q) * np.sqrt(p * (1 - p) / max(setting.neighbours, 1)))


@lru_cache(maxsize=256)
def random_loads(tokens: int, n_experts: int, k: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """Counts [draws, n] of N tokens that each choose k of n experts at random.

    Exact at any N, in n k steps: experts are visited in turn, and of the tokens with r choices left each
    takes the expert with probability r over the experts left.
    """
    generator = np.random.default_rng(seed)
    left = np.zeros((k + 1, draws), dtype=np.int64)  # tokens by number of choices left
    left[k] = tokens
    loads = np.zeros((draws, n_experts))
    for expert in range(n_experts):
        for r in range(1, k + 1):
            taken = generator.binomial(left[r], min(r / (n_experts - expert), 1.0))
            loads[:, expert] += taken
            left[r] -= taken
            left[r - 1] += taken
    return loads


def jaccard_chance(n_experts: int, k: float) -> float:
    """Expected Jaccard index of two random subsets of n evenly used experts.

    Sum over j of P(j shared) j/(2k - j), hypergeometric. Where k is no whole number, some subsets have one
    expert more than others.
    """
    if not np.isfinite(k):
        return float("nan")
    more = k - int(k)
    sizes = [(int(k), 1 - more), (int(k) + 1, more)] if more else [(int(k), 1.0)]
    chance = 0.0
    for (a, share_a), (b, share_b) in product(sizes, sizes):
        for shared in range(min(a, b) + 1):
            ways = math.comb(a, shared) * math.comb(n_experts - a, b - shared)
            share = share_a * share_b * ways / math.comb(n_experts, b)
            chance += share * shared / max(a + b - shared, 1)
    return chance
