"""Expert caches: how often each policy and size holds the chosen expert, and what loading the rest costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moescope.deployment.caches import (
    DepthCounts,
    Replay,
    belady,
    count_depths,
    lfu,
    neighbours,
    recency,
    split_budget,
    spread,
    stack_depths,
)
from moescope.deployment.chance import random_rates
from moescope.deployment.tokens import Split, TokenTrace, hottest_first, map_parts, usage
from moescope.statistics import clip_share, jackknife_interval
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

POLICIES = ("static", "static_in_sample", "lru", "lru_split", "lfu", "belady")
ENOUGH = 0.8  # of the choices, for the slots that are needed
DEPTH = 32  # slots with which all policies are replayed at least, where there are as many experts
CHOICES_AT_ONCE = 2**23  # of all layers that are replayed together: bounds memory, 90 bytes per choice


class Replayed(NamedTuple):
    """One policy in one layer: depths of the tested choices, and those of the optimum from the same start."""

    counts: DepthCounts
    optimum: DepthCounts | None


class LayerReplays(NamedTuple):
    """All policies in one layer; of LRU also each split's learned and tested part."""

    policies: dict[str, Replayed]
    learned: list[DepthCounts]
    tested: list[DepthCounts]
    compulsory: float  # share of choices that are an expert's first


def residency_tables(
    trace: TokenTrace,
    slots: Iterable[int],
    splits: list[Split],
    expert_bytes: Array | None,
    bandwidth: float | None,
    cold: bool,
    advance: Callable[[int], None],
    jobs: int = 1,
    seed: int = 0,
) -> dict[str, pd.DataFrame]:
    """Return residency, one row per policy, number of slots and layer, and slots_needed, one per policy and
    layer; layer null: all layers together."""
    import pandas as pd

    slots = list(slots)
    most = max(*slots, min(max(trace.n_experts), DEPTH))
    count = len(trace.layers)
    at_once = min(max(CHOICES_AT_ONCE // max(trace.chosen_LTK[0].size, 1), 1), -(-count // jobs))
    parts = [trace.part(begin, begin + at_once) for begin in range(0, count, at_once)]
    work = partial(replay_layers, most=most, splits=splits, cold=cold)
    batches = map_parts(work, parts, jobs, lambda done: advance(done * at_once))
    layers = [layer for batch in batches for layer in batch]
    sizes_L = np.ones(len(layers)) if expert_bytes is None else expert_bytes
    chance = chance_curves(trace, most, cold, seed)
    rows = []
    for size in slots:
        for policy in POLICIES:
            if policy == "lru_split":
                rows += split_rows(trace, layers, size, sizes_L, chance["lru"])
            else:
                caches = [
                    Part(size, *layer.policies[policy], min(size, n))
                    for layer, n in zip(layers, trace.n_experts, strict=True)
                ]
                rows += policy_rows(trace, policy, size, caches, layers, chance[policy])
    frame = pd.DataFrame(rows)
    frame["bytes_per_token"] = np.nan
    if expert_bytes is not None:
        by_layer = dict(zip(trace.layers, expert_bytes, strict=True))
        frame["bytes_per_token"] = frame["loads_per_token"] * frame["layer"].map(by_layer)
        keys = ["policy", "slots"]
        totals = frame.groupby(keys)["bytes_per_token"].sum()
        everywhere = frame["layer"].isna()
        frame.loc[everywhere, "bytes_per_token"] = [
            totals[row] for row in frame.loc[everywhere, keys].itertuples(index=False, name=None)
        ]
    frame["ms_per_token"] = frame["bytes_per_token"] / (bandwidth * 1e6) if bandwidth else np.nan
    return {"residency": frame, "slots_needed": needed_table(trace, layers, chance)}


def needed_table(
    trace: TokenTrace, layers: list[LayerReplays], chance: dict[str, list[Array]]
) -> pd.DataFrame:
    """Return the fewest slots with which each policy holds enough of the choices."""
    import pandas as pd

    rows = []
    for policy, random_curves in chance.items():
        counts = [layer.policies[policy].counts.choices_GD.sum(0) for layer in layers]
        curves = [
            np.concatenate([[0], np.cumsum(count_D[:-1])]) / max(count_D.sum(), 1) for count_D in counts
        ]
        choices_L = np.array([count_D.sum() for count_D in counts], dtype=float)
        weights_L = choices_L / max(choices_L.sum(), 1)
        curves.append(mean_curve(curves, weights_L))
        random = [*random_curves, mean_curve(random_curves, weights_L)]
        for at, curve in enumerate(curves):
            row: dict[str, Any] = {"policy": policy, "layer": None, "n_experts": max(trace.n_experts)}
            if at < len(trace.layers):
                row |= {"layer": trace.layers[at], "layer_name": trace.layer_names[at]}
                row |= {"n_experts": trace.n_experts[at]}
            needed = first_reaching(curve, trace.k)
            row |= {"share": ENOUGH, "slots": needed, "hit_rate": np.nan if needed is None else curve[needed]}
            rows.append(row | {"chance": first_reaching(random[at], trace.k), "replayed": len(curve) - 1})
    return pd.DataFrame(rows)


def mean_curve(curves: list[Array], weights_L: Array) -> Array:
    """Mean over layers; one with fewer experts stays at its last rate."""
    longest = max(map(len, curves))
    return weights_L @ np.stack([np.pad(curve, (0, longest - len(curve)), mode="edge") for curve in curves])


def first_reaching(curve_S: Array, k: int) -> int | None:
    """The fewest slots, from k on, with enough of the choices; None where all replayed are too few."""
    reached = np.flatnonzero(curve_S >= ENOUGH - 1e-12)
    return max(int(reached[0]), k) if len(reached) else None


def chance_curves(trace: TokenTrace, most: int, cold: bool, seed: int) -> dict[str, list[Array]]:
    """Hit rates on random routing by number of slots, per policy and layer; equal layers are drawn once."""
    drawn: dict[tuple[int, bytes], dict[str, Array]] = {}
    curves: dict[str, list[Array]] = {policy: [] for policy in POLICIES if policy != "lru_split"}
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        filled_TK = chosen_TK >= 0
        key = (n, np.packbits(filled_TK).tobytes())
        if key not in drawn:
            drawn[key] = random_rates(filled_TK, trace.document_T if cold else None, n, most, seed)
        for policy, layers in curves.items():
            layers.append(drawn[key][policy])
    return curves


def replay_layers(trace: TokenTrace, most: int, splits: list[Split], cold: bool) -> list[LayerReplays]:
    """Replay all policies in every layer, all caches side by side."""
    group_T, groups = trace.group_T, trace.n_groups
    first_T = trace.starts()[trace.document_T] if cold else None
    everything = Split(np.ones(len(group_T), dtype=bool), np.ones(len(group_T), dtype=bool))
    replays: list[Replay] = []
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        filled_TK = chosen_TK >= 0
        document_S = np.repeat(trace.document_T, filled_TK.sum(1)) if cold else None
        sequence_S = chosen_TK[filled_TK]
        known = neighbours(sequence_S, document_S)
        replays.append(lfu(sequence_S, n, document_S, known))
        nothing, list_E = np.zeros(0, dtype=np.int64), hottest_first(usage(chosen_TK, n))
        replays.append(belady(sequence_S, n, [nothing] if cold else [nothing, list_E], document_S, known))
        for split in [] if cold else splits:
            tested_TK = chosen_TK[split.test_T]
            list_E = hottest_first(usage(chosen_TK[split.learn_T], n))
            replays.append(belady(tested_TK[tested_TK >= 0], n, [list_E]))
    depths = iter(stack_depths(replays, most))
    found = []
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        filled_TK = chosen_TK >= 0
        by_use, optimum = (count_depths(spread(next(depths), filled_TK), group_T, groups, most) for _ in "ab")
        static = []
        for split in [everything, *splits]:
            rank_E = np.empty(n, dtype=np.int16)
            rank_E[hottest_first(usage(chosen_TK[split.learn_T], n))] = np.arange(n)
            tested_TK, tested_group_T = chosen_TK[split.test_T], group_T[split.test_T]
            ranks_TK = np.where(tested_TK < 0, np.int16(-1), rank_E[tested_TK])
            best = None
            if not cold:
                best_TK = spread(next(depths), tested_TK >= 0)
                best = count_depths(best_TK, tested_group_T, groups, most)
            static.append(Replayed(count_depths(ranks_TK, tested_group_T, groups, n), best))
        lru_TK = recency(chosen_TK, n, first_T)[1]
        # a token of a split is learned from or tested on: both are counted in one go
        learned, tested = [], []
        for split in splits:
            apart = count_depths(lru_TK, group_T + groups * split.test_T, 2 * groups, n)
            learned.append(DepthCounts(*(counts_GD[:groups] for counts_GD in apart)))
            tested.append(DepthCounts(*(counts_GD[groups:] for counts_GD in apart)))
        counts = added([learned[0], tested[0]])
        policies = {
            "static": joined(static[1:]),
            "static_in_sample": static[0],
            "lru": Replayed(counts, optimum),
            "lfu": Replayed(by_use, optimum),
            "belady": Replayed(optimum, optimum),
        }
        first = float(counts.choices_GD[:, n].sum() / max(counts.choices_GD.sum(), 1))
        found.append(LayerReplays(policies, learned, tested, first))
    return found


def joined(parts: list[Replayed]) -> Replayed:
    """Add up the tested parts of all splits."""
    optima = [part.optimum for part in parts if part.optimum is not None]
    return Replayed(added([part.counts for part in parts]), added(optima) if optima else None)


def added(counts: list[DepthCounts]) -> DepthCounts:
    choices = np.sum([part.choices_GD for part in counts], axis=0)
    return DepthCounts(choices, np.sum([part.tokens_GD for part in counts], axis=0))


# --- rows


class Part(NamedTuple):
    """What a row is made of: depths in one layer, the optimum's, and the slots that the layer has."""

    slots: int
    counts: DepthCounts
    optimum: DepthCounts | None
    layer_slots: float


def policy_rows(
    trace: TokenTrace,
    policy: str,
    slots: int,
    parts: list[Part],
    layers: list[LayerReplays],
    chance: list[Array],
) -> list[dict[str, Any]]:
    """Return the rows of one policy and size: every layer, then all together."""
    sums = [layer_sums(part.counts, part.slots) for part in parts]
    best = [
        np.nan if part.optimum is None else share_of(layer_sums(part.optimum, part.slots)) for part in parts
    ]
    first = [layer.compulsory for layer in layers]
    return [
        {**row, "policy": policy, "slots": slots}
        for row in rate_rows(trace, sums, best, first, [part.layer_slots for part in parts], chance)
    ]


def layer_sums(counts: DepthCounts, slots: int) -> Integers:
    """Hits, choices, tokens with hits only, and tokens, per group of documents."""
    hits_G, whole_G = counts.hits_G(slots), counts.hits_G(slots, tokens=True)
    return np.stack([hits_G, counts.choices_GD.sum(1), whole_G, counts.tokens_GD.sum(1)], axis=1)


def share_of(sums_GX: Integers) -> float:
    hits, choices = sums_GX.sum(0)[:2]
    return float(hits / choices) if choices else np.nan


def rate_rows(
    trace: TokenTrace,
    sums: list[Integers],
    best: list[float],
    first: list[float],
    layer_slots: list[float],
    chance: list[Array],
) -> list[dict[str, Any]]:
    """Rates with intervals, per layer and of all layers together (weighted by choices)."""
    choices_L = np.array([sums_GX[:, 1].sum() for sums_GX in sums], dtype=float)
    weights_L = choices_L / max(choices_L.sum(), 1)
    chance_L = np.array(
        [
            np.interp(size, np.arange(len(rates)), rates)
            for size, rates in zip(layer_slots, chance, strict=True)
        ]
    )
    rows = []
    for at, number in enumerate(trace.layers):
        row = rate_row(trace, sums[at], best[at], first[at], float(chance_L[at]))
        row |= {"layer": number, "layer_name": trace.layer_names[at], "n_experts": trace.n_experts[at]}
        rows.append(row | {"layer_slots": layer_slots[at]})
    together = rate_row(
        trace,
        np.sum(sums, axis=0),
        float(weights_L @ np.array(best)),
        float(weights_L @ np.array(first)),
        float(weights_L @ chance_L),
    )
    loads = sum(row["loads_per_token"] for row in rows)
    tokens = max(row["tokens"] for row in rows)
    together |= {"layer": None, "n_experts": max(trace.n_experts), "loads_per_token": loads, "tokens": tokens}
    return [*rows, together | {"layer_slots": float(np.mean(layer_slots))}]


def rate_row(
    trace: TokenTrace, sums_GX: Integers, best: float, first: float, chance: float
) -> dict[str, Any]:
    hits, choices, whole, tokens = (int(value) for value in sums_GX.sum(0))
    parts = sums_GX[:, :2].astype(float)
    documents = trace.n_documents if choices else 0
    interval = clip_share(jackknife_interval(parts, lambda part: part[..., 0] / part[..., 1], documents))
    return {
        "tokens": tokens,
        "choices": choices,
        "hit_rate": hits / choices if choices else np.nan,
        "low": interval.low,
        "high": interval.high,
        "token_hit_rate": whole / tokens if tokens else np.nan,
        "optimum": best,
        "chance": chance,
        "compulsory": first,
        "loads_per_token": (choices - hits) / tokens if tokens else np.nan,
    }


def split_rows(
    trace: TokenTrace, layers: list[LayerReplays], slots: int, sizes_L: Array, chance: list[Array]
) -> list[dict[str, Any]]:
    """LRU with the same bytes in all, split over layers by what the learned part's curves gain."""
    most, halves = min(trace.n_experts), len(layers[0].learned)
    split = [np.zeros((trace.n_groups, 4), dtype=np.int64) for _ in layers]
    even = [sums_GX.copy() for sums_GX in split]
    shares = np.zeros(len(layers))
    for number in range(halves):
        curves = [layer.learned[number].choices_GD.sum(0)[:most] for layer in layers]
        hits_LS = np.stack([np.concatenate([[0], np.cumsum(curve)]) for curve in curves]).astype(float)
        chosen_L = split_budget(hits_LS, min(trace.k, most), min(slots, most), sizes_L)
        shares += chosen_L / halves
        for at, layer in enumerate(layers):
            split[at] += layer_sums(layer.tested[number], int(chosen_L[at]))
            even[at] += layer_sums(layer.tested[number], slots)
    first = [layer.compulsory for layer in layers]
    rows = rate_rows(trace, split, [np.nan] * len(layers), first, shares.tolist(), chance)
    uniform = [*map(share_of, even), share_of(np.sum(even, axis=0))]
    return [
        {**row, "policy": "lru_split", "slots": slots, "uniform": rate}
        for row, rate in zip(rows, uniform, strict=True)
    ]
