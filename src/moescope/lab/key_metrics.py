"""How SoME's keys have organised themselves: usage of the middle layer, and where its keys lie.

Each beside what chance gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moescope.routing.load_balance import Setting
from moescope.routing.metrics import METRICS
from moescope.types import Array

if TYPE_CHECKING:
    import pandas as pd

BINS_A_DECADE = 4
DRAWS = 20  # random sets of keys, for what two axes hold of them


def middle_layer(layers: int) -> int:
    """The layer that SoME's figures are of: half the way down, the upper one of two."""
    return layers // 2


def usage_metrics(counts_E: Array, tokens: int, top_k: int) -> pd.DataFrame:
    """gini, load_entropy_bits and used (the share of experts with any token): value, chance (random balanced
    routing) and collapse.

    `counts_E`: tokens each expert got of `tokens` that chose `top_k` each.
    """
    import pandas as pd

    setting = Setting(tokens, len(counts_E), top_k)
    rows = [
        {
            "metric": name,
            "value": float(METRICS[name].function(counts_E)),
            "chance": METRICS[name].chance(setting),
            "collapse": METRICS[name].collapse(setting),
        }
        for name in ("gini", "load_entropy_bits", "unused")
    ]
    unused = rows.pop()
    used = {column: 1 - float(unused[column]) for column in ("value", "chance", "collapse")}
    return pd.DataFrame([*rows, {"metric": "used", **used}])


def usage_histogram(counts_E: Array, tokens: int, top_k: int) -> pd.DataFrame:
    """How many experts have how many tokens, in four bins a decade: left, right, experts, expected.

    `expected` is the mean over 200 random balanced routings of the same tokens. Experts without a token stand
    in the first row,
    from 0 to 1, since a count of 0 has no logarithm.
    """
    import pandas as pd

    draws = Setting(tokens, len(counts_E), top_k).draws
    highest = max(float(counts_E.max()), float(draws.max()), 1.0)
    bins = int(np.floor(np.log10(highest) * BINS_A_DECADE)) + 1
    edges = np.concatenate([[0.0], 10 ** (np.arange(bins + 1) / BINS_A_DECADE)])
    experts, _ = np.histogram(counts_E, edges)
    expected, _ = np.histogram(draws, edges)
    return pd.DataFrame(
        {"left": edges[:-1], "right": edges[1:], "experts": experts, "expected": expected / len(draws)}
    )


def key_cosine(keys_ED: Array) -> tuple[float, float]:
    """The mean cosine between two keys, and how far from 0 that mean strays for random keys (its standard
    deviation).

    (|sum of unit keys|^2 - n) / (n (n - 1)); for random directions the mean is 0 and the deviation sqrt(2 /
    (n (n - 1) D)). Near 1 all
    keys are one, and which expert a token gets is left to rounding.
    """
    n, width = keys_ED.shape
    if n < 2:
        return float("nan"), float("nan")
    total_D = unit(keys_ED).sum(0)
    return float((total_D @ total_D - n) / (n * (n - 1))), float(np.sqrt(2 / (n * (n - 1) * width)))


def key_map(keys_ED: Array, counts_E: Array) -> tuple[pd.DataFrame, float, float]:
    """A map of the keys' directions: expert, x, y, tokens, strength; the share of variance it shows, and that
    of random keys.

    The first two principal components of the unit keys. A map of random keys shows some share too, the more
    the fewer the keys.
    """
    import pandas as pd

    n, width = keys_ED.shape
    xy_E2, shown = two_components(unit(keys_ED))
    generator = np.random.default_rng(0)
    by_chance = [two_components(unit(generator.standard_normal((n, width))))[1] for _ in range(DRAWS)]
    frame = pd.DataFrame(
        {
            "expert": np.arange(n),
            "x": xy_E2[:, 0],
            "y": xy_E2[:, 1],
            "tokens": np.asarray(counts_E, dtype=np.int64),
            "strength": np.linalg.norm(keys_ED, axis=1),
        }
    )
    return frame, shown, float(np.mean(by_chance))


def unit(keys_ED: Array) -> Array:
    keys_ED = np.asarray(keys_ED, dtype=np.float64)
    return np.asarray(keys_ED / np.linalg.norm(keys_ED, axis=1, keepdims=True))


def two_components(points_ED: Array) -> tuple[Array, float]:
    """Places on the first two principal axes, each axis turned so that its largest entry is positive.

    And their share of variance.
    """
    centred_ED = points_ED - points_ED.mean(0)
    left, singular, _ = np.linalg.svd(centred_ED, full_matrices=False)
    places = np.zeros((len(points_ED), 2))
    axes = min(2, len(singular))
    places[:, :axes] = left[:, :axes] * singular[:axes]
    largest = places[np.abs(places).argmax(0), [0, 1]]
    variance = singular**2
    return places * np.where(largest < 0, -1, 1), float(variance[:2].sum() / max(variance.sum(), 1e-300))
