"""Figures of deploy: every one with the optimum and the chance level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    base_layout,
    byte_size,
    grey_line,
    k_axis,
    layer_axis,
    number,
)
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

POLICY_STYLES: dict[str, dict[str, Any]] = {
    "belady": {"name": "optimum (Belady)", "color": CATEGORICAL[2], "dash": "dash"},
    "lru": {"name": "LRU", "color": CATEGORICAL[0], "dash": "solid"},
    "lru_split": {"name": "LRU, split over layers", "color": CATEGORICAL[5], "dash": "dot"},
    "lfu": {"name": "LFU", "color": CATEGORICAL[3], "dash": "solid"},
    "static": {"name": "static list, held out", "color": CATEGORICAL[1], "dash": "solid"},
    "static_in_sample": {"name": "static list, in sample", "color": CATEGORICAL[4], "dash": "dot"},
}
SHARE_AXIS = {"tickformat": ".0%", "range": [0, 1.02]}


def percent(share: float) -> str:
    """ "80.0 %"."""
    return "undefined" if share is None or not np.isfinite(share) else f"{100 * share:.1f} %"


def together(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of all layers together."""
    return rows[rows["layer"].isna()]


def styled_line(x: Any, y: Any, style: dict[str, Any], unit: str = "%{y:.1%}", of: str = "slots") -> Trace:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": style["name"],
        "x": x.to_numpy(),
        "y": y.to_numpy(float),
        "line": {"color": style["color"], "dash": style["dash"], "width": 2},
        "marker": {"size": 5},
        "hovertemplate": f"{style['name']}<br>%{{x}} {of}<br>{unit}<extra></extra>",
    }


# --- expert caches


def middle_slots(rows: pd.DataFrame) -> int:
    """The number of slots that findings name: a quarter of the experts where it was replayed."""
    sizes = sorted(int(size) for size in rows["slots"].unique())
    quarter = int(rows["n_experts"].max()) // 4
    return quarter if quarter in sizes else sizes[len(sizes) // 2]


def policy_rate(rows: pd.DataFrame, policy: str, slots: int, column: str = "hit_rate") -> float:
    """A number of one policy and size, of all layers together."""
    found = together(rows)
    found = found[(found["policy"] == policy) & (found["slots"] == slots)]
    return float(found[column].iloc[0])


def cache_curve(tables: Tables) -> Figure:
    """Hit rate of every policy against the number of slots, all layers together."""
    rows = tables["residency"]
    whole = together(rows).sort_values("slots")
    data = []
    for policy, style in POLICY_STYLES.items():
        group = whole[whole["policy"] == policy]
        if group.empty:
            continue
        line = styled_line(group["slots"], group["hit_rate"], style)
        if group["low"].notna().any():
            high, low = group["high"] - group["hit_rate"], group["hit_rate"] - group["low"]
            bars = {"array": high.to_numpy(float), "arrayminus": low.to_numpy(float)}
            line["error_y"] = {"type": "data", "symmetric": False, "thickness": 1, "width": 3, **bars}
        data.append(line)
    chance = whole[whole["policy"] == "lru"]
    data.append(grey_line(chance["slots"].to_numpy(), chance["chance"].to_numpy(float), "random list"))
    slots = middle_slots(rows)
    return Figure(
        "cache_curve",
        "Hit rate of expert caches",
        f"{slots} slots per layer hold {percent(policy_rate(rows, 'lru', slots))} of choices with LRU, "
        f"{percent(policy_rate(rows, 'belady', slots))} at the optimum (random list: "
        f"{percent(policy_rate(rows, 'lru', slots, 'chance'))}).",
        ("hit_rate", "policy", "slots", "residency.optimum", "residency.chance", "compulsory"),
        data,
        base_layout("slots per layer", "hit rate", xaxis=k_axis(whole["slots"]), yaxis=SHARE_AXIS),
        height=400,
        details="All layers together. Whiskers: 95 % intervals over documents, where there are 20 or more. "
        "The optimum starts empty; a preloaded list can beat it by its compulsory misses.",
    )


def cache_layers(tables: Tables) -> Figure:
    """Hit rate per layer, one view per number of slots."""
    rows = tables["residency"]
    layers = rows[rows["layer"].notna()].sort_values("layer")
    sizes = sorted(int(size) for size in rows["slots"].unique())
    data, captions = [], []
    for slots in sizes:
        of_size = layers[layers["slots"] == slots]
        for policy, style in POLICY_STYLES.items():
            group = of_size[of_size["policy"] == policy]
            data.append(styled_line(group["layer"], group["hit_rate"], style, of="th layer"))
            data[-1]["hovertemplate"] = f"layer %{{x}}<br>{style['name']} %{{y:.1%}}<extra></extra>"
        group = of_size[of_size["policy"] == "lru"]
        data.append(grey_line(group["layer"].to_numpy(), group["chance"].to_numpy(float), "random list"))
        worst, best = (group.loc[pick] for pick in (group["hit_rate"].idxmin(), group["hit_rate"].idxmax()))
        captions.append(
            f"{slots} slots, LRU: {percent(worst['hit_rate'])} in layer {int(worst['layer'])} to "
            f"{percent(best['hit_rate'])} in layer {int(best['layer'])} (random list: "
            f"{percent(group['chance'].mean())})."
        )
    start = sizes.index(middle_slots(rows))
    per = len(POLICY_STYLES) + 1
    return Figure(
        "cache_layers",
        "Cache hit rate per layer",
        captions[start],
        ("hit_rate", "policy", "slots", "residency.optimum", "residency.chance"),
        data,
        base_layout(
            "layer", "hit rate", xaxis=layer_axis(sorted(layers["layer"].unique())), yaxis=SHARE_AXIS
        ),
        Slider("slots", [str(slots) for slots in sizes], start, per, captions),
        height=400,
    )


def cache_loading(tables: Tables) -> Figure:
    """Experts, bytes or milliseconds per token spent on loading, against the number of slots."""
    rows = tables["residency"]
    column = loading_column(rows)
    label = {
        "ms_per_token": "ms per token",
        "bytes_per_token": "bytes per token",
        "loads_per_token": "experts loaded per token",
    }[column]
    whole = together(rows).sort_values("slots")
    data = []
    for policy, style in POLICY_STYLES.items():
        group = whole[whole["policy"] == policy]
        data.append(styled_line(group["slots"], group[column], style, f"%{{y:.4g}} {label}"))
    chance = whole[whole["policy"] == "lru"]
    every = chance[column] / (1 - chance["hit_rate"])  # of loading every choice
    random = (every * (1 - chance["chance"])).to_numpy(float)
    data.append(grey_line(chance["slots"].to_numpy(), random, "random list"))
    slots = middle_slots(rows)
    return Figure(
        "cache_loading",
        "Loading per token",
        f"{slots} slots: {loading_words(rows, 'lru', slots)} per token with LRU, "
        f"{loading_words(rows, 'belady', slots)} at the optimum.",
        (column, "policy", "slots"),
        data,
        base_layout("slots per layer", label, xaxis=k_axis(whole["slots"]), yaxis={"rangemode": "tozero"}),
        height=400,
        details="All layers added up, every miss loaded once, nothing overlapped with computation.",
    )


def loading_column(rows: pd.DataFrame) -> str:
    """The most telling column that the run has: time, bytes, or experts."""
    known = (name for name in ("ms_per_token", "bytes_per_token") if rows[name].notna().any())
    return next(known, "loads_per_token")


def loading_words(rows: pd.DataFrame, policy: str, slots: int) -> str:
    column = loading_column(rows)
    value = policy_rate(rows, policy, slots, column)
    if column == "bytes_per_token":
        return byte_size(value)
    return f"{number(value)} {'ms' if column == 'ms_per_token' else 'experts'}"


RESIDENCY = [
    FigureSpec("cache_curve", ("residency",), cache_curve),
    FigureSpec("cache_loading", ("residency",), cache_loading),
    FigureSpec("cache_layers", ("residency",), cache_layers, wide=True),
]
FIGURES = [*RESIDENCY]
