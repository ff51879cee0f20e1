"""What ideal random balanced routing gives: every token chooses k of n experts, all subsets alike,
independently.

Tokens of real text are correlated, so even a balanced router lies above these chances on text.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from moescope.types import Array

DRAWS = 200


@dataclass(frozen=True)
class Setting:
    """What chance depends on: N tokens, n experts, k chosen a token, and for gate weight how uneven the gates
    are.

    `relative_std` is the standard deviation of one expert's load under random routing, over the mean load.
    """

    tokens: int
    n_experts: int
    k: float
    gate_std: float | None = None  # relative_std where the load is gate weight

    @property
    def relative_std(self) -> float:
        if self.gate_std is not None:
            return self.gate_std
        return (
            float(np.sqrt(max(self.n_experts - self.k, 0) / (self.tokens * self.k)))
            if self.tokens
            else np.nan
        )

    @cached_property
    def draws(self) -> Array:
        """Loads of 200 random routings, seeded: exact for counts, normal for gate weight."""
        if self.gate_std is not None:
            return normal_loads(self.n_experts, self.gate_std)
        return random_loads(self.tokens, self.n_experts, min(max(round(self.k), 1), self.n_experts))


def gate_relative_std(n_experts: int, gates: float, gates_squared: float, token_sums_squared: float) -> float:
    """Relative std of an expert's gate weight when each token hands its gates to experts at random.

    With s the sum of a token's gates and q the sum of their squares: sqrt(sum(q/n - s^2/n^2)) / (sum(s)/n).
    Equal gates give
    sqrt((n - k)/(N k)), the chance of counts.
    """
    variance = max(gates_squared / n_experts - token_sums_squared / n_experts**2, 0.0)
    return float(np.sqrt(variance) / (gates / n_experts)) if gates > 0 else np.nan


@lru_cache(maxsize=256)
def random_loads(tokens: int, n_experts: int, k: int, draws: int = DRAWS, seed: int = 0) -> Array:
    """Counts [draws, n] of N tokens that each choose k of n experts at random.

    Exact at any N, in n k steps: experts are visited in turn, and of the tokens with r choices left each
    takes the expert
    with probability r over the experts left.
    """
    generator = np.random.default_rng(seed)
    left = np.zeros((k + 1, draws), dtype=np.int64)  # tokens by how many choices they have left
    left[k] = tokens
    loads = np.zeros((draws, n_experts))
    for expert in range(n_experts):
        remaining = n_experts - expert
        for r in range(1, k + 1):
            taken = generator.binomial(left[r], min(r / remaining, 1.0))
            loads[:, expert] += taken
            left[r] -= taken
            left[r - 1] += taken
    return loads


@lru_cache(maxsize=256)
def normal_loads(n_experts: int, relative_std: float, draws: int = DRAWS, seed: int = 0) -> Array:
    """Loads of mean 1 that vary by that much and sum to n.

    What gate weight does once an expert has some dozens of tokens.
    """
    noise = np.random.default_rng(seed).standard_normal((draws, n_experts))
    noise -= noise.mean(-1, keepdims=True)
    return np.maximum(1 + relative_std * noise * np.sqrt(n_experts / max(n_experts - 1, 1)), 0.0)
