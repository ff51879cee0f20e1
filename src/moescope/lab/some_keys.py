"""Usage and map of SoME's keys in the middle layer, with their chance levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from moescope.routing.load_balance import Setting
from moescope.routing.metrics import METRICS
from moescope.run import Run
from moescope.types import Array

if TYPE_CHECKING:
    import pandas as pd

    from moescope.decoder.model import LabModel

BINS_PER_DECADE = 4
DRAWS = 20  # random key sets, for the chance level of the map's share of variance


def key_tables(run: Run, model: LabModel, step: int) -> dict[str, pd.DataFrame]:
    """Return the key tables of the middle layer: usage in the last window of training, and the final keys."""
    import pandas as pd

    layer, k = middle_layer(model.config.layers), model.config.top_k
    load = run.table("load")
    rows = load[(load["step"] == load["step"].max()) & (load["layer"] == layer)].sort_values("expert")
    counts_E = rows["tokens"].to_numpy(float)
    tokens = round(counts_E.sum() / k)
    keys_ED = cast(Any, model.routers[layer]).keys_ED.double().cpu().numpy()
    places, shown, by_chance = key_map(keys_ED, counts_E)
    cosine, spread = key_cosine(keys_ED)
    of_keys = {"metric": "cosine", "value": cosine, "chance": 0.0, "collapse": 1.0, "chance_spread": spread}
    tables = {
        "key_metrics": pd.DataFrame([*usage_metrics(counts_E, tokens, k).to_dict("records"), of_keys]),
        "key_histogram": usage_histogram(counts_E, tokens, k),
        "key_map": places.assign(variance_share=shown, variance_share_chance=by_chance),
    }
    place = {"step": step, "layer": layer, "layer_name": rows["layer_name"].iloc[0]}
    return {name: frame.assign(**place) for name, frame in tables.items()}


def middle_layer(layers: int) -> int:
    """Return the layer that SoME's figures show."""
    return layers // 2


def usage_metrics(counts_E: Array, tokens: int, top_k: int) -> pd.DataFrame:
    """Return value, chance (random balanced routing) and collapse of gini, load_entropy_bits and used.

    `used` is the share of experts with any token; `counts_E` the tokens per expert of `tokens` with `top_k`.
    """
    import pandas as pd

    setting = Setting(tokens, len(counts_E), top_k)
    rows = [
        {
            "metric": name,
            "value": float(cast(Any, METRICS[name].function)(counts_E)),
            "chance": METRICS[name].chance(setting),
            "collapse": METRICS[name].collapse(setting),
        }
        for name in ("gini", "load_entropy_bits", "unused")
    ]
    unused = rows.pop()
    used = {column: 1 - float(unused[column]) for column in ("value", "chance", "collapse")}
    return pd.DataFrame([*rows, {"metric": "used", **used}])


def usage_histogram(counts_E: Array, tokens: int, top_k: int) -> pd.DataFrame:
    """Return the histogram of tokens per expert in four bins per decade.

    `expected_experts` is the mean over 200 random balanced routings. The first row, 0 to 1, counts experts
    without a token.
    """
    import pandas as pd

    draws = Setting(tokens, len(counts_E), top_k).draws
    highest = max(float(counts_E.max()), float(draws.max()), 1.0)
    bins = int(np.floor(np.log10(highest) * BINS_PER_DECADE)) + 1
    edges = np.concatenate([[0.0], 10 ** (np.arange(bins + 1) / BINS_PER_DECADE)])
    experts, _ = np.histogram(counts_E, edges)
    expected, _ = np.histogram(draws, edges)
    return pd.DataFrame(
        {
            "bin_left": edges[:-1],
            "bin_right": edges[1:],
            "experts": experts,
            "expected_experts": expected / len(draws),
        }
    )


def key_cosine(keys_ED: Array) -> tuple[float, float]:
    """Return the mean cosine between two keys, and its standard deviation for random keys.

    (|sum of unit keys|^2 - n) / (n (n - 1)); for random directions the mean is 0 and the deviation sqrt(2 /
    (n (n - 1) D)). Near 1 all keys are equal, and rounding decides which expert a token gets.
    """
    n, width = keys_ED.shape
    if n < 2:
        return float("nan"), float("nan")
    total_D = unit(keys_ED).sum(0)
    return float((total_D @ total_D - n) / (n * (n - 1))), float(np.sqrt(2 / (n * (n - 1) * width)))


def key_map(keys_ED: Array, counts_E: Array) -> tuple[pd.DataFrame, float, float]:
    """Return a map of the unit keys by their first two principal components, and the share of variance shown.

    Columns: expert, x, y, tokens, strength. The third value is the share for random keys, larger for fewer
    keys.
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
    """Return coordinates on the first two principal axes and their share of variance.

    The sign of each axis makes its largest entry positive.
    """
    centred_ED = points_ED - points_ED.mean(0)
    left, singular, _ = np.linalg.svd(centred_ED, full_matrices=False)
    places = np.zeros((len(points_ED), 2))
    axes = min(2, len(singular))
    places[:, :axes] = left[:, :axes] * singular[:axes]
    largest = places[np.abs(places).argmax(0), [0, 1]]
    variance = singular**2
    return places * np.where(largest < 0, -1, 1), float(variance[:2].sum() / max(variance.sum(), 1e-300))
