"""Figures of deploy: every one with the optimum and the chance level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    base_layout,
    byte_size,
    capital,
    category_style,
    counted,
    grey_line,
    layer_axis,
    number,
    step_axis,
)
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

POLICY_STYLES: dict[str, dict[str, Any]] = {
    "lru": {"name": "LRU", "color": CATEGORICAL[0], "dash": "solid"},
    "lru_split": {"name": "LRU, split over layers", "color": CATEGORICAL[5], "dash": "dot"},
    "lfu": {"name": "LFU", "color": CATEGORICAL[3], "dash": "dashdot"},
    "static": {"name": "static list", "color": CATEGORICAL[1], "dash": "solid"},
    "static_in_sample": {"name": "static list in sample", "color": CATEGORICAL[4], "dash": "dot"},
    "belady": {"name": "optimum (Belady)", "color": CATEGORICAL[2], "dash": "dash"},  # drawn on top
}
RANDOM_LRU = "LRU, random routing"
PRELOADED = (
    "The optimum starts empty; static lists are loaded before the first token, so they may lie above it, "
    "by at most the compulsory misses."
)
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


def with_whiskers(line: Trace, rows: pd.DataFrame, column: str) -> Trace:
    """Add the intervals over documents, where there are any."""
    if rows["low"].notna().any():
        high, low = rows["high"] - rows[column], rows[column] - rows["low"]
        bars = {"array": high.to_numpy(float), "arrayminus": low.to_numpy(float)}
        line["error_y"] = {"type": "data", "symmetric": False, "thickness": 1, "width": 3, **bars}
    return line


# --- expert caches


def lead_slots(rows: pd.DataFrame) -> int:
    """The number of slots that findings name first: the one nearest to half of the experts."""
    half = int(rows["n_experts"].max()) / 2
    return min((int(size) for size in sorted(rows["slots"].unique())), key=lambda size: abs(size - half))


def slots_axis(sizes: pd.Series) -> dict[str, Any]:
    """A logarithmic axis with a tick at every size that was replayed, at most 10."""
    return {"type": "log", **step_axis(sorted(sizes.unique()))}


def policy_rate(rows: pd.DataFrame, policy: str, slots: int, column: str = "hit_rate") -> float:
    """A number of one policy and size, of all layers together."""
    found = together(rows)
    found = found[(found["policy"] == policy) & (found["slots"] == slots)]
    return float(found[column].iloc[0])


def rate_words(rows: pd.DataFrame, policy: str, slots: int) -> str:
    """ "80.0 % [78.1, 81.9]": the hit rate and, where there is one, its interval over documents."""
    rate, low, high = (policy_rate(rows, policy, slots, column) for column in ("hit_rate", "low", "high"))
    return percent(rate) + (f" [{100 * low:.1f}, {100 * high:.1f}]" if np.isfinite(low) else "")


def size_words(rows: pd.DataFrame) -> str:
    """ "; 19.6 % with 2 slots to 46.5 % with 4": LRU over the sizes, where there are several."""
    sizes = sorted(int(size) for size in rows["slots"].unique())
    ends = [f"{percent(policy_rate(rows, 'lru', size))} with {size}" for size in (sizes[0], sizes[-1])]
    return f" LRU over sizes: {ends[0]} to {ends[1]} slots." if len(sizes) > 1 else ""


def chance_line(rows: pd.DataFrame, x: str, name: str = RANDOM_LRU, dash: str = "dash") -> Trace:
    """The chance level of one policy in grey, with a marker where it is a single point."""
    line = grey_line(rows[x].to_numpy(), rows["chance"].to_numpy(float), name, dash)
    return marked(line)


def marked(line: Trace) -> Trace:
    """Show a line of one point."""
    if len(line["x"]) > 1:
        return line
    return {**line, "mode": "lines+markers", "marker": {"size": 5, "color": line["line"]["color"]}}


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
        data.append(with_whiskers(line, group, "hit_rate"))
    data.append(chance_line(whole[whole["policy"] == "lru"], "slots"))
    data.append(chance_line(whole[whole["policy"] == "static"], "slots", "random list", "dot"))
    slots = lead_slots(rows)
    return Figure(
        "cache_curve",
        "Hit rate of expert caches",
        f"{slots} slots per layer hold {rate_words(rows, 'lru', slots)} of choices with LRU, "
        f"{rate_words(rows, 'belady', slots)} at the optimum (random routing: "
        f"{percent(policy_rate(rows, 'lru', slots, 'chance'))} with LRU).",
        ("hit_rate", "policy", "slots", "residency.optimum", "residency.chance", "compulsory"),
        data,
        base_layout("slots per layer", "hit rate", xaxis=slots_axis(whole["slots"]), yaxis=SHARE_AXIS),
        height=400,
        details=f"{PRELOADED}{size_words(rows)} All layers together. Whiskers: 95 % intervals over "
        "documents, where there are 20 or more. "
        "Grey: LRU on random routing, and a list of random experts. Of a single "
        "document, the static list and the split are tested on its second half only.",
    )


def cache_layers(tables: Tables) -> Figure:
    """Hit rate per layer, one view per number of slots."""
    rows = tables["residency"]
    layers = rows[rows["layer"].notna()].sort_values("layer")
    sizes = sorted(int(size) for size in rows["slots"].unique())
    # a split gives layers other numbers of slots: it is compared over all layers only
    of_layers = {policy: style for policy, style in POLICY_STYLES.items() if policy != "lru_split"}
    data, captions = [], []
    for slots in sizes:
        of_size = layers[layers["slots"] == slots]
        for policy, style in of_layers.items():
            group = of_size[of_size["policy"] == policy]
            data.append(styled_line(group["layer"], group["hit_rate"], style))
            data[-1]["hovertemplate"] = f"layer %{{x}}<br>{style['name']} %{{y:.1%}}<extra></extra>"
        group = of_size[of_size["policy"] == "lru"]
        data.append(chance_line(group, "layer"))
        worst, best = (group.loc[pick] for pick in (group["hit_rate"].idxmin(), group["hit_rate"].idxmax()))
        captions.append(
            f"{slots} slots, LRU: {percent(worst['hit_rate'])} in layer {int(worst['layer'])} to "
            f"{percent(best['hit_rate'])} in layer {int(best['layer'])} (random routing: "
            f"{percent(group['chance'].mean())})."
        )
    start = sizes.index(lead_slots(rows))
    per = len(of_layers) + 1
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
        details=PRELOADED,
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
    data.append(marked(grey_line(chance["slots"].to_numpy(), random, RANDOM_LRU)))
    slots = lead_slots(rows)
    return Figure(
        "cache_loading",
        "Loading per token",
        f"{slots} slots: {loading_words(rows, 'lru', slots)} per token with LRU, "
        f"{loading_words(rows, 'belady', slots)} at the optimum.",
        (column, "policy", "slots"),
        data,
        base_layout(
            "slots per layer", label, xaxis=slots_axis(whole["slots"]), yaxis={"rangemode": "tozero"}
        ),
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


# --- prefetching

PREDICTOR_STYLES: dict[str, dict[str, Any]] = {
    "next_router": {"name": "next router, one layer early", "color": CATEGORICAL[2], "dash": "solid"},
    "previous_layer": {"name": "previous layer", "color": CATEGORICAL[0], "dash": "solid"},
    "previous_token": {"name": "previous tokens", "color": CATEGORICAL[3], "dash": "solid"},
    "static": {"name": "static list", "color": CATEGORICAL[1], "dash": "solid"},
    "static_in_sample": {"name": "static list in sample", "color": CATEGORICAL[4], "dash": "dot"},
}


def prefetch_curve(tables: Tables) -> Figure:
    """Recall of every predictor against its budget, all layers together."""
    rows = together(tables["prefetch"]).sort_values("budget")
    data = [
        with_whiskers(styled_line(group["budget"], group["recall"], style, of="named"), group, "recall")
        for predictor, style in PREDICTOR_STYLES.items()
        if len(group := rows[rows["predictor"] == predictor])
    ]
    chance = rows[rows["predictor"] == "static_in_sample"]
    budgets = chance["budget"].to_numpy()
    data.append(grey_line(budgets, chance["optimum"].to_numpy(float), "optimum: foresight", "dot"))
    data.append(chance_line(chance, "budget", "random experts"))
    return Figure(
        "prefetch_curve",
        "Recall of predicted experts",
        prefetch_words(rows, int(budgets[0])),
        ("recall", "predictor", "budget", "prefetch.chance"),
        data,
        base_layout(
            "experts named per layer", "recall", xaxis=slots_axis(chance["budget"]), yaxis=SHARE_AXIS
        ),
        height=400,
        details="All layers together. Whiskers: 95 % intervals over documents, where there are 20 or more.",
    )


def prefetch_words(rows: pd.DataFrame, budget: int) -> str:
    """Recall of each predictor at one budget, best first, and the chance level."""
    of_budget = rows[(rows["budget"] == budget) & (rows["predictor"] != "static_in_sample")]
    ranked = of_budget.sort_values("recall", ascending=False)
    parts = [
        f"{PREDICTOR_STYLES[str(row.predictor)]['name']} {percent(float(row.recall))}"
        for row in ranked.itertuples()
    ]
    return f"{budget} experts named: {', '.join(parts)} (random: {percent(float(ranked['chance'].iloc[0]))})."


def prefetch_layers(tables: Tables) -> Figure:
    """Recall per layer at each budget."""
    rows = tables["prefetch"]
    layers = rows[rows["layer"].notna()].sort_values("layer")
    budgets = sorted(int(budget) for budget in rows["budget"].unique())
    data, captions = [], []
    numbers = np.array(sorted(layers["layer"].unique()))
    styles = {name: style for name, style in PREDICTOR_STYLES.items() if name in set(rows["predictor"])}
    for budget in budgets:
        of_budget = layers[layers["budget"] == budget]
        for predictor, style in styles.items():
            group = of_budget[of_budget["predictor"] == predictor]
            line = styled_line(group["layer"], group["recall"], style)
            line["hovertemplate"] = f"layer %{{x}}<br>{style['name']} %{{y:.1%}}<extra></extra>"
            data.append(line)
        group = of_budget[of_budget["predictor"] == "static_in_sample"]
        data.append(grey_line(numbers, np.ones(len(numbers)), "optimum: foresight", "dot"))
        data.append(grey_line(numbers, group["chance"].to_numpy(float), "random experts"))
        captions.append(prefetch_words(together(rows), budget))
    return Figure(
        "prefetch_layers",
        "Recall of predicted experts per layer",
        captions[0],
        ("recall", "predictor", "budget", "prefetch.chance"),
        data,
        base_layout("layer", "recall", xaxis=layer_axis(numbers), yaxis=SHARE_AXIS),
        Slider("experts named", [str(b) for b in budgets], 0, len(styles) + 2, captions),
        height=400,
    )


PREFETCH = [
    FigureSpec("prefetch_curve", ("prefetch",), prefetch_curve),
    FigureSpec("prefetch_layers", ("prefetch",), prefetch_layers),
]


# --- placement

METHOD_STYLES: dict[str, dict[str, Any]] = {
    "balanced": {"name": "balanced", "color": CATEGORICAL[0], "dash": "solid"},
    "coactivation": {"name": "co-activation", "color": CATEGORICAL[2], "dash": "solid"},
    "contiguous": {"name": "contiguous (default)", "color": CATEGORICAL[1], "dash": "solid"},
}


def one_each(tables: Tables) -> bool:
    """Whether every device holds one expert, so that there is nothing to place."""
    rows = tables["placement"]
    return bool(rows["devices"].iloc[0] >= tables["residency"]["n_experts"].max())


def placement_balance(tables: Tables) -> Figure:
    """Balancedness of devices per layer, over all tokens and per batch."""
    rows = tables["placement"]
    layers = rows[rows["layer"].notna()].sort_values("layer")
    numbers = np.array(sorted(layers["layer"].unique()))
    data, captions = [], []
    for column, what in (("balancedness", "all tokens"), ("batch_balancedness", "batches")):
        for method, style in METHOD_STYLES.items():
            group = layers[layers["method"] == method]
            line = styled_line(group["layer"], group[column], style)
            line["hovertemplate"] = f"layer %{{x}}<br>{style['name']} %{{y:.3f}}<extra></extra>"
            data.append(with_whiskers(line, group, column) if column == "balancedness" else line)
        group = layers[layers["method"] == "random"]
        data.append(grey_line(numbers, np.ones(len(numbers)), "optimum: 1", "dot"))
        data.append(grey_line(group["layer"].to_numpy(), group[column].to_numpy(float), "random placement"))
        captions.append(f"{what.capitalize()}: {method_words(rows, column)}.")
    tokens = int(rows["batch_tokens"].iloc[0])
    return Figure(
        "placement_balance",
        "Balance of devices per layer",
        captions[0],
        ("balancedness", "batch_balancedness", "method", "devices"),
        data,
        base_layout("layer", "mean load/max load", xaxis=layer_axis(numbers), yaxis={"range": [0, 1.05]}),
        Slider("over", ["all tokens", f"batches of {tokens:,}"], 0, len(METHOD_STYLES) + 2, captions),
        height=400,
        details="1: every device has the same load. Tested on other documents than those learned from.",
    )


def method_words(rows: pd.DataFrame, column: str) -> str:
    """ "balanced 0.95, co-activation 0.9, contiguous 0.7 (random: 0.7; optimum: 1)"; traffic per layer."""
    whole = together(rows).set_index("method")[column]
    least = float(together(rows)["cross_device_least"].iloc[0])
    if column in ("cross_device", "cross_node"):
        layers = rows["layer"].nunique()
        whole, least = whole / layers, least / layers
    parts = [f"{style['name']} {number(float(whole[name]))}" for name, style in METHOD_STYLES.items()]
    best = {"cross_node": 0.0, "cross_device": least}.get(column, 1)
    return f"{', '.join(parts)} (random: {number(float(whole['random']))}; optimum: {number(best)})"


def placement_traffic(tables: Tables) -> Figure:
    """Remote devices and nodes per token and layer, per method."""
    rows = together(tables["placement"]).set_index("method")
    layers = tables["placement"]["layer"].nunique()
    names = [style["name"].removesuffix(" (default)") for style in METHOD_STYLES.values()]
    kinds = [("cross_device", "devices", CATEGORICAL[0])]
    if rows["nodes"].iloc[0] > 1:
        kinds.append(("cross_node", "nodes", CATEGORICAL[1]))
    data: list[Trace] = []
    for column, what, color in kinds:
        values = [float(rows.loc[method, column]) / layers for method in METHOD_STYLES]
        data.append(
            {
                "type": "bar",
                "name": f"remote {what}",
                "x": names,
                "y": values,
                "marker": {"color": color, "opacity": 0.6},  # the lines of chance and optimum cross it
            }
        )
        chance = float(rows.loc["random", column]) / layers
        data.append(grey_line(names, [chance] * len(names), f"random placement, {what}"))
    least = float(rows["cross_device_least"].iloc[0]) / layers
    data.append(grey_line(names, [least] * len(names), "fewest devices possible", "dot"))
    return Figure(
        "placement_traffic",
        "Remote devices per token and layer",
        f"{capital(method_words(tables['placement'], 'cross_device'))}.",
        ("cross_device", "cross_node", "cross_device_least", "method"),
        data,
        base_layout(
            "placement", "per token and layer", yaxis={"rangemode": "tozero"}, barmode="group", bargap=0.5
        ),
        height=400,
        details="A token is sent to every device that holds one of its experts, its own (any) excepted.",
    )


PLACEMENT = [
    FigureSpec("placement_balance", ("placement",), placement_balance),
    FigureSpec("placement_traffic", ("placement",), placement_traffic),
]


# --- coverage


def coverage_documents(tables: Tables) -> Figure:
    """Experts below the minimum against the number of documents, extrapolated beyond those of the trace."""
    rows = tables["coverage_curve"].sort_values("documents")
    data: list[Trace] = []
    for index, (domain, group) in enumerate(rows.groupby("domain", sort=True)):
        style = {"name": domain or "all documents", **category_style(index)}
        solid = group[~group["extrapolated"].astype(bool)]
        beyond = group[group["documents"] >= solid["documents"].max()]
        named = "solid" if len(solid) > 1 else "dot"
        for part, dash in ((solid, "solid"), (beyond, "dot")):
            line = styled_line(part["documents"], part["below"], {**style, "dash": dash}, "%{y:.4g} experts")
            line["hovertemplate"] = "%{x} documents<br>%{y:.4g} experts<extra></extra>"
            line["showlegend"] = dash == named
            data.append(with_whiskers(line, part, "below"))
    ends = [int(rows["documents"].min()), int(rows["documents"].max())]
    data.append(grey_line(ends, [0, 0], "optimum: 0", "dot"))
    experts = int(rows["experts"].iloc[0])
    data.append(grey_line(ends, [experts, experts], f"all {experts:,} experts"))
    return Figure(
        "coverage_documents",
        "Experts below the minimum by documents",
        coverage_words(rows),
        ("coverage_curve.below", "coverage_curve.documents", "needed", "minimum"),
        data,
        base_layout(
            "documents", "experts below the minimum", xaxis=log_axis(ends), yaxis={"tickformat": ",d"}
        ),
        height=400,
        details="Solid: subsamples of the documents. Dotted: extrapolated at each expert's mean rate. "
        "Whiskers: 2.5th to 97.5th percentile.",
    )


MOST_TICKS = 6  # of a logarithmic axis: labels such as 50,000 fit side by side at 390 pixels


def log_axis(ends: Sequence[float], zero: float | None = None) -> dict[str, Any]:
    """A logarithmic axis with a tick per power of ten, also at 2 and 5 where those are few; 0 at `zero`."""
    low, high = (int(np.floor(np.log10(ends[0]))), int(np.ceil(np.log10(ends[1]))))
    tens = [10**power for power in range(low, high + 1)]
    fine = [step * ten for ten in tens for step in (1, 2, 5)]
    within, shown = ([value for value in ticks if ends[0] <= value <= ends[1]] for ticks in (tens, fine))
    shown = within if len(shown) > MOST_TICKS else shown
    zeros = [zero] if zero is not None else []
    return {
        "type": "log",
        "tickvals": [*zeros, *shown],
        "ticktext": [*("0" for _ in zeros), *(f"{value:,}" for value in shown)],
    }


def coverage_words(rows: pd.DataFrame) -> str:
    """How many experts lack tokens, and the documents that would change it."""
    whole = (
        rows[(rows["domain"] == "") & ~rows["extrapolated"].astype(bool)].sort_values("documents").iloc[-1]
    )
    below, experts, minimum = int(whole["below"]), int(whole["experts"]), int(whole["minimum"])
    words = f"{below:,} of {experts:,} experts have fewer than {minimum} tokens"
    if not below:
        return f"All {experts:,} experts have at least {minimum} tokens."
    if np.isfinite(whole["needed"]):
        ends = ""
        if np.isfinite(whole["needed_low"]):
            high = f"{whole['needed_high']:,.0f}" if np.isfinite(whole["needed_high"]) else "no bound"
            ends = f" [{whole['needed_low']:,.0f}, {high}]"
        return f"{words}; about {whole['needed']:,.0f}{ends} documents like these would reach all."
    return f"{words}, {int(whole['unused']):,} have none: no estimate of the documents that would reach them."


def coverage_experts(tables: Tables) -> Figure:
    """Tokens per expert, sorted, one line per domain and all layers together."""
    rows = tables["coverage"]
    data: list[Trace] = []
    for index, (domain, group) in enumerate(rows.groupby("domain", sort=True)):
        tokens = np.sort(group["tokens"].to_numpy(float))
        share = (np.arange(len(tokens)) + 0.5) / len(tokens)
        style = {"name": domain or "all documents", **category_style(index)}
        line = styled_line(pd.Series(share), pd.Series(np.maximum(tokens, 0.5)), style)
        line |= {
            "mode": "lines",
            "hovertemplate": "%{x:.1%} of experts have at most %{y:,.0f}<extra></extra>",
        }
        data.append(line)
    whole = rows[rows["domain"] == ""]
    minimum, chance = float(rows["minimum"].iloc[0]), float(whole["chance"].mean())
    data.append(grey_line([0, 1], [minimum, minimum], f"minimum: {minimum:g}", "dot"))
    data.append(grey_line([0, 1], [chance, chance], "all experts alike"))
    least = whole.loc[whole["tokens"].idxmin()]
    fewest = (
        f"Fewest: {int(least['tokens']):,} tokens, layer {int(least['layer'])}, expert {int(least['expert'])}"
    )
    if not least["tokens"]:
        fewest = f"{int((whole['tokens'] == 0).sum()):,} of {counted(len(whole), 'expert')} have no token"
    return Figure(
        "coverage_experts",
        "Tokens per expert, sorted",
        f"{fewest} (all alike: {number(chance)}; minimum: {minimum:g}).",
        ("coverage.tokens", "minimum", "coverage.chance"),
        data,
        base_layout(
            "share of experts",
            "tokens",
            xaxis={"tickformat": ".0%", "range": [0, 1.03], "dtick": 0.25},
            yaxis=log_axis([1, max(minimum, float(rows["tokens"].max()))], zero=0.5),
        ),
        height=400,
        details="Experts of all layers; those without a token stand at 0, below 1 on the logarithmic axis.",
    )


COVERAGE = [
    FigureSpec("coverage_experts", ("coverage",), coverage_experts),
    FigureSpec("coverage_documents", ("coverage_curve",), coverage_documents),
]
FIGURES = [*RESIDENCY, *PREFETCH, *PLACEMENT, *COVERAGE]
