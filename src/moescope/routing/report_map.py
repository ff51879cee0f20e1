"""A trace's part of the overview map and of the expert pages: load, domains, tokens, contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import bdtr, bdtrik

from moescope.plotting.style import RANDOM, capital, number, values_of
from moescope.reporting.pack import plain
from moescope.routing.expert_maps import expected_pairs, lift_over_chance
from moescope.routing.figures_experts import NAMED_FROM, coactivation_order
from moescope.routing.report_views import (
    COACTIVATED,
    CONTEXTS,
    CONTEXTS_OF_MANY,
    LARGE,
    ROLES,
    View,
    contexts_by_expert,
    load_trace,
    missing_interval,
    ranked,
    routing_views,
    tokens_by_expert,
)
from moescope.run import Run
from moescope.verb import LayerCards, Measure, Payload, Strip

FAMILY_WISE = 0.05  # the share of maps of random routing with any cell beyond chance
ROLE_TITLES = {"input": "Input tokens", "next": "Next tokens", "predicted": "Predicted tokens"}
STRIPS = (  # metric, title, measure that it is about
    ("cv", "load CV", "load"),
    ("routing_entropy", "routing entropy", ""),
    ("domain_information", "I(domain)", "domain_affinity"),
)


def measures(run: Run) -> list[Measure]:
    """Load first, then gate weight, affinity per domain and the strongest co-activation, for every view."""
    return [measure for view in routing_views(load_trace(run)) for measure in view_measures(view)]


def view_measures(view: View) -> Iterator[Measure]:
    load = view.tables["load"].groupby(["layer", "expert"])[["tokens", "gate_weight"]].sum(min_count=1)
    by_layer = load.groupby("layer")
    n_experts = by_layer["tokens"].transform("size")
    choices = by_layer["tokens"].transform("sum")
    tokens = tokens_by_layer(view).reindex(load.index.get_level_values("layer")).to_numpy()
    even = choices / n_experts
    share = (even / np.maximum(tokens, 1)).clip(upper=1)
    times = load["tokens"] / even.where(even > 0)
    low, high = random_range(tokens, share.to_numpy(float), FAMILY_WISE / max(len(load), 1))
    outside = (load["tokens"] < low) | (load["tokens"] > high)
    spread = np.sqrt(even * (1 - share)) / even.clip(lower=1e-12)
    frame = pd.DataFrame({"value": times, "chance": 1.0, "noise": spread, "beyond": outside})
    least, most = ((counts / even)[even >= even.median() / 10] for counts in (low, high))
    if len(order := clusters(view)):
        frame["cluster"] = order.reindex(frame.index)
    yield Measure(
        "load",
        "Load per expert",
        frame.reset_index(),
        "× even share",
        f"Tokens per expert, as multiples of an even share. {RANDOM.capitalize()} stays within "
        f"{number(least.min())} to {number(most.max())} in all {len(least):,} cells"
        f"{' of layers with enough tokens' if len(least) < len(load) else ''}.",
        1.0,
        True,
        (0.25, 4.0),
        view.label,
    )
    if load["gate_weight"].notna().any():
        weight = load["gate_weight"] / by_layer["gate_weight"].transform("mean")
        yield Measure(
            "gate_weight",
            "Share of routing weight",
            pd.DataFrame({"value": weight, "chance": 1.0}).reset_index(),
            "× even share",
            "Sum of an expert's gate weights, as a multiple of the layer's mean.",
            1.0,
            True,
            (0.25, 4.0),
            view.label,
        )
    yield from domain_measures(view)
    yield from coactivation_measure(view)


def random_range(tokens: np.ndarray, share: np.ndarray, outside: float) -> tuple[np.ndarray, np.ndarray]:
    """Counts between which an expert stays under random routing, except with probability `outside`.

    Every token chooses the expert with probability `share`: quantiles of the binomial distribution.
    """
    ends = []
    for level in (outside / 2, 1 - outside / 2):
        count = np.ceil(np.nan_to_num(bdtrik(level, tokens, share)))  # nan: 0 is likely enough
        below = np.maximum(count - 1, 0)
        ends.append(np.where(bdtr(below, tokens, share) >= level, below, count))  # rounding
    return ends[0], ends[1]


def clusters(view: View) -> pd.Series:
    """Place of every expert in its layer's co-activation order; empty without co-activation."""
    pairs = view.tables.get("coactivation")
    if pairs is None or pairs.empty:
        return pd.Series(dtype=float)
    places: dict[tuple[int, int], int] = {}
    for layer, rows in expected_pairs(pairs).groupby("layer"):
        over = lift_over_chance(rows)
        order = coactivation_order(over.to_numpy(float))
        places |= {(int(layer), int(over.index[expert])): place for place, expert in enumerate(order)}
    return pd.Series(places, dtype=float)


def tokens_by_layer(view: View) -> pd.Series:
    """Return the number of tokens per layer, from the metrics' column, else the number of choices."""
    rows = view.tables["routing_layers"]
    rows = rows[(rows["domain"] == "") & rows["tokens"].notna()] if "tokens" in rows else rows.iloc[:0]
    if len(rows):
        return rows.groupby("layer")["tokens"].first()
    return view.tables["load"].groupby("layer")["tokens"].sum()


def domain_measures(view: View) -> Iterator[Measure]:
    rows = view.tables.get("domains")
    if rows is None or rows.empty or rows["domain"].nunique() < 2:
        return
    for domain, frame in rows.groupby("domain", sort=True):
        columns = {
            **{name: frame[name] for name in ("layer", "expert", "low", "high")},
            "value": frame["affinity"],
            "chance": 1.0,
            "beyond": ((frame["low"] > 1) | (frame["high"] < 1)).astype(float).where(frame["low"].notna()),
        }
        intervals = (
            "Beyond chance: the 95 % interval over documents misses 1, as one of 20 does by chance."
            if frame["low"].notna().any()
            else f"{capital(missing_interval(view))}."
        )
        yield Measure(
            "domain_affinity",
            f"Domain affinity: {domain}",
            pd.DataFrame(columns),
            "× mean domain",
            f"How much more often {domain} uses an expert than the mean of all domains. {intervals}",
            1.0,
            True,
            (0.25, 4.0),
            view.label,
            str(domain),
        )


def coactivation_measure(view: View) -> Iterator[Measure]:
    pairs = view.tables.get("coactivation")
    if pairs is None or pairs.empty or not len(values_of(view.tables, "expert_overlap")):
        return
    pairs = expected_pairs(pairs)
    pairs = pairs[pairs["expected"] >= NAMED_FROM]
    if pairs.empty:
        return
    both = pd.concat([pairs, pairs.rename(columns={"expert_a": "expert_b", "expert_b": "expert_a"})])
    top = both.groupby(["layer", "expert_a"])["over"].max().rename_axis(["layer", "expert"])
    yield Measure(
        "coactivation",
        "Strongest co-activation",
        pd.DataFrame({"value": top, "chance": 1.0}).reset_index(),
        "× chance",
        "The most frequent partner of each expert, as a multiple of its expected count.",
        1.0,
        True,
        (0.25, 4.0),
        view.label,
    )


def strips(run: Run) -> list[Strip]:
    found = []
    for view in routing_views(load_trace(run)):
        for metric, title, measure in STRIPS:
            if len(rows := values_of(view.tables, metric)):
                found.append(Strip(metric, title, rows[["layer", "value", "chance"]], view.label, measure))
    return found


# --- expert pages


def experts(run: Run) -> Iterator[LayerCards]:
    """Domains, co-activated experts, tokens and contexts of every expert, layer by layer."""
    for view in routing_views(load_trace(run)):
        many = len(view.tables["load"][["layer", "expert"]].drop_duplicates()) >= LARGE
        grouped = {
            name: dict(tuple(frame.groupby("layer")))
            for name, frame in view.tables.items()
            if name in ("domains", "coactivation", "vocabulary", "contexts", "load")
        }
        for layer in view.layers:
            rows = {name: groups[layer] for name, groups in grouped.items() if layer in groups}
            cards = layer_cards(rows, CONTEXTS_OF_MANY if many else CONTEXTS, view)
            yield LayerCards(layer, cards, view.label)


def layer_cards(rows: dict[str, pd.DataFrame], most: int, view: View) -> dict[int, list[Payload]]:
    blocks: dict[int, list[Payload]] = {}

    def add(expert: int, kind: str, title: str, content: list[Any], **more: object) -> None:
        if content:
            blocks.setdefault(int(expert), []).append({"kind": kind, "title": title, "rows": content, **more})

    domains = rows.get("domains")
    if domains is not None and domains["domain"].nunique() > 1:
        columns = ["domain", "affinity", "low", "high"]
        ordered = domains.sort_values("affinity", ascending=False)
        for expert, frame in ordered.groupby("expert"):
            note = {"note": missing_interval(view)} if frame["low"].isna().any() else {}
            cells = plain(frame[columns].to_numpy(object).tolist())
            add(expert, "bars", "Domain affinity", cells, middle=1, **note)
    pairs = rows.get("coactivation")
    if pairs is not None and len(pairs):
        pairs = expected_pairs(pairs)
        pairs = pairs[pairs["expected"] >= NAMED_FROM]
        for expert, partners in ranked(pairs, "expert_a", "expert_b", "over", COACTIVATED).items():
            add(expert, "experts", "Co-activated experts", partners, unit="× chance")
    for (expert, role), tokens in tokens_by_expert(rows.get("vocabulary")).items():
        if role in ROLES:
            add(expert, "tokens", ROLE_TITLES[role], tokens)
    for expert, places in contexts_by_expert(rows.get("contexts"), most).items():
        add(expert, "contexts", "Contexts with the largest gates", places)
    return blocks
