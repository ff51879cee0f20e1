"""Expert caches: how often each policy and size holds the chosen expert, and what loading the rest costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moescope.deployment.caches import (
    Depths,
    Replay,
    belady,
    count_depths,
    held,
    lfu,
    recency,
    split_budget,
    spread,
    stack_depths,
)
from moescope.deployment.tokens import Mask, Split, TokenTrace, counts_by, hottest_first, map_parts, usage
from moescope.statistics import clip_share, jackknife_interval
from moescope.types import Array, Integers

# --- chance level of expert caches: the same policy on random routing, replayed

ENOUGH_CHOICES = 2**15  # of all repetitions together: a standard error of about 0.3 %
MOST_REPETITIONS = 256


def random_choices(filled_TK: NDArray[np.bool_], n_experts: int, generator: np.random.Generator) -> Integers:
    """Draw different experts per token, all equally likely; -1 where a slot is empty."""
    tokens, k = filled_TK.shape
    chosen_TK = np.empty((tokens, k), dtype=np.int64)
    sorted_TK = np.empty((tokens, 0), dtype=np.int64)
    for slot in range(k):
        # a number among the experts that are left, then past each smaller one that is taken
        chosen_T: Integers = generator.integers(0, max(n_experts - slot, 1), (tokens,))
        for taken_T in sorted_TK.T:
            chosen_T = chosen_T + (chosen_T >= taken_T)
        chosen_TK[:, slot] = chosen_T
        sorted_TK = np.sort(chosen_TK[:, : slot + 1], axis=1)
    return np.where(filled_TK, chosen_TK, -1)


def random_rates(layer: TokenTrace, test_T: Mask, most: int, cold: bool, seed: int) -> dict[str, Array]:
    """Return the hit rate of every policy on random routing, for 0 to `most` slots (LRU and lists: to n).

    `layer` is a trace of one layer. Short traces are drawn repeatedly, each with caches of its own.
    """
    n, filled_TK = layer.n_experts[0], layer.chosen_LTK[0] >= 0
    repetitions = min(-(-ENOUGH_CHOICES // max(int(filled_TK.sum()), 1)), MOST_REPETITIONS)
    repetition_T = np.repeat(np.arange(repetitions), len(filled_TK))
    starts = layer.n_documents if cold else 1  # of a cache, in one repetition
    start_T = repetition_T * starts + (np.tile(layer.document_T, repetitions) if cold else 0)
    chosen_TK = random_choices(np.tile(filled_TK, (repetitions, 1)), n, np.random.default_rng(seed))
    drawn = replace(
        layer,
        chosen_LTK=chosen_TK[None].astype(np.int16),
        document_T=start_T,
        domain_D=[""] * (repetitions * starts),
    )
    test_T = np.tile(test_T, repetitions)
    (replayed,) = replay_layers(drawn, most, [Split(test_T, test_T)], cold=True)
    use_RE = counts_by(chosen_TK[test_T], repetition_T[test_T], repetitions, n)
    held_E = np.sort(use_RE, axis=1)[:, ::-1].sum(0) / max(int(use_RE.sum()), 1)
    return {
        "static": np.arange(n + 1) / n,
        "static_in_sample": np.concatenate([[0.0], np.cumsum(held_E)]),
        **{policy: hit_rates(replayed.policies[policy]) for policy in ("lru", "lfu", "belady")},
    }


def hit_rates(counts_XGD: Integers) -> Array:
    """Share of choices that caches of 0 slots to all that were replayed hold."""
    counts_D = counts_XGD[0].sum(0)
    return np.cumsum([0, *counts_D[:-1]]) / max(counts_D.sum(), 1)


# --- replays of a trace

POLICIES = ("static", "static_in_sample", "lru", "lru_split", "lfu", "belady")
ENOUGH = (0.8, 0.9, 0.95)  # shares of the choices, for the slots that are needed
DEPTH = 32  # slots with which all policies are replayed at least, where there are as many experts
CHOICES_AT_ONCE = 2**23  # of all layers that are replayed together: bounds memory, 90 bytes per choice


class LayerReplays(NamedTuple):
    """Counts of depths in one layer by policy; of LRU also each split's learned and tested part."""

    policies: dict[str, Integers]  # all on the same tokens
    lru_empty: Integers  # of LRU from an empty cache at the first of them
    learned: list[Integers]
    tested: list[Integers]
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
    slots = list(slots)
    most, count = max(*slots, min(max(trace.n_experts), DEPTH)), len(trace.layers)
    at_once = min(max(CHOICES_AT_ONCE // max(trace.chosen_LTK[0].size, 1), 1), -(-count // jobs))
    parts = [trace.part(begin, begin + at_once) for begin in range(0, count, at_once)]
    work = partial(replay_layers, most=most, splits=splits, cold=cold)
    batches = map_parts(work, parts, jobs, lambda done: advance(done * at_once))
    layers = [layer for batch in batches for layer in batch]
    sizes_L = np.ones(len(layers)) if expert_bytes is None else expert_bytes
    chance = chance_curves(trace, tested_tokens(splits), most, cold, seed)
    rows = []
    for size in slots:
        for policy in POLICIES:
            if policy == "lru_split":
                rows += split_rows(trace, layers, size, sizes_L, chance["lru"])
                continue
            sums = [layer_sums(layer.policies[policy], size) for layer in layers]
            known = {
                "optimum": [share_of(layer_sums(layer.policies["belady"], size)) for layer in layers],
                "compulsory": [layer.compulsory for layer in layers],
            }
            if policy == "lru":
                known["from_empty"] = [share_of(layer_sums(layer.lru_empty, size)) for layer in layers]
            layer_slots = [float(min(size, n)) for n in trace.n_experts]
            of_size = rate_rows(trace, sums, layer_slots, chance[policy], known)
            rows += [{**row, "policy": policy, "slots": size} for row in of_size]
    frame = pd.DataFrame(rows)
    frame["loads_chance"] = frame["choices"] / frame["tokens"] * (1 - frame["chance"])
    bytes_by_layer = {} if expert_bytes is None else dict(zip(trace.layers, expert_bytes, strict=True))
    for loads, kind in (("loads_per_token", "per_token"), ("loads_chance", "chance")):
        bytes_R = frame[loads] * frame["layer"].map(bytes_by_layer)
        totals = bytes_R.groupby([frame["policy"], frame["slots"]]).transform("sum", min_count=1)
        frame[f"bytes_{kind}"] = bytes_R.where(frame["layer"].notna(), totals)
        frame[f"ms_{kind}"] = frame[f"bytes_{kind}"] / (bandwidth * 1e6) if bandwidth else np.nan
    resident = frame["layer_slots"] * frame["layer"].map(bytes_by_layer)
    whole = resident.groupby([frame["policy"], frame["slots"]]).transform("sum", min_count=1)
    frame["resident_bytes"] = resident.where(frame["layer"].notna(), whole)
    half = max(trace.n_experts) / 2
    frame["lead"] = frame["slots"] == min(sorted(slots), key=lambda size: abs(size - half))
    return {"residency": frame, "slots_needed": needed_table(trace, layers, chance)}


def needed_table(
    trace: TokenTrace, layers: list[LayerReplays], chance: dict[str, list[Array]]
) -> pd.DataFrame:
    """Return the fewest slots with which each policy holds enough of the choices."""
    rows = []
    for policy, random_curves in chance.items():
        choices_L = np.array([layer.policies[policy][0].sum() for layer in layers], dtype=float)
        curves = [hit_rates(layer.policies[policy]) for layer in layers]
        both = [[*each, mean_curve(each, choices_L)] for each in (curves, random_curves)]
        for at, (curve, random_curve) in enumerate(zip(*both, strict=True)):
            for share in ENOUGH:
                needed = first_reaching(curve, share, trace.k)
                row = {"policy": policy, "share": share, "slots": needed, "replayed": len(curve) - 1}
                row |= {"hit_rate": np.nan if needed is None else curve[needed]}
                rows.append(row | {"chance": first_reaching(random_curve, share, trace.k), **trace.place(at)})
    return pd.DataFrame(rows)


def mean_curve(curves: list[Array], choices_L: Array) -> Array:
    """Mean over layers by choices; one with fewer experts stays at its last rate."""
    longest = max(map(len, curves))
    padded = [np.pad(curve, (0, longest - len(curve)), mode="edge") for curve in curves]
    return choices_L / max(choices_L.sum(), 1) @ np.stack(padded)


def first_reaching(curve_S: Array, share: float, k: int) -> int | None:
    """The fewest slots, from k on, with that share of the choices; None where all replayed are too few."""
    reached = np.flatnonzero(curve_S >= share - 1e-12)
    return max(int(reached[0]), k) if len(reached) else None


def tested_tokens(splits: list[Split]) -> Mask:
    """Tokens on which every policy is scored: all; the second half of a single document."""
    return np.any([split.test_T for split in splits], axis=0)


def chance_curves(
    trace: TokenTrace, test_T: Mask, most: int, cold: bool, seed: int
) -> dict[str, list[Array]]:
    """Hit rates on random routing by number of slots, per policy and layer; equal layers are drawn once."""
    drawn: dict[tuple[int, bytes], dict[str, Array]] = {}
    layers = []
    for at, n in enumerate(trace.n_experts):
        key = (n, np.packbits(trace.chosen_LTK[at] >= 0).tobytes())
        if key not in drawn:
            drawn[key] = random_rates(trace.part(at, at + 1), test_T, most, cold, seed)
        layers.append(drawn[key])
    return {policy: [rates[policy] for rates in layers] for policy in layers[0]}


def replay_layers(trace: TokenTrace, most: int, splits: list[Split], cold: bool) -> list[LayerReplays]:
    """Replay all policies in every layer, all caches side by side.

    They see all tokens, and are scored on the tested ones: a single document's first half fills the caches.
    """
    groups, first_T = trace.n_groups, trace.starts()[trace.document_T] if cold else None
    test_T = tested_tokens(splits)
    test_part = slice(None) if test_T.all() else test_T  # a slice copies nothing
    group_T = trace.group_T[test_part]
    replays: list[Replay] = []
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        document_T = trace.document_T if cold else None
        seen, scored = (tokens_as_sequence(chosen_TK, document_T, part) for part in (slice(None), test_part))
        replays.append(lfu(seen[0], n, seen[1]))
        replays.append(belady(scored[0], n, scored[1], replays[-1].known if test_T.all() else None))
    depths = iter(stack_depths(replays, most))
    replayed = []
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        by_use_TK = spread(next(depths), chosen_TK >= 0)[test_part]
        optimum_TK = spread(next(depths), chosen_TK[test_part] >= 0)
        in_sample_TK = listed_places(chosen_TK, n, Split(test_T, test_T))
        static = [
            count_depths(listed_places(chosen_TK, n, split), trace.group_T[split.test_T], groups, n)
            for split in splits
        ]
        lru_TK = empty_TK = recency(chosen_TK, n, first_T)[1]
        if len(splits) == 1:
            empty_TK = recency(chosen_TK, n, np.full(len(test_T), test_T.argmax()))[1]
        # a token of a split is learned from or tested on: both are counted in one go
        halves = [
            count_depths(lru_TK, trace.group_T + groups * split.test_T, 2 * groups, n) for split in splits
        ]
        learned, tested = [counts[:, :groups] for counts in halves], [counts[:, groups:] for counts in halves]
        lru = np.sum(tested, axis=0)
        policies = {
            "lru": lru,
            "lfu": count_depths(by_use_TK, group_T, groups, most),
            "belady": count_depths(optimum_TK, group_T, groups, most),
            "static_in_sample": count_depths(in_sample_TK, group_T, groups, n),
            "static": np.sum(static, axis=0),
        }
        lru_empty = count_depths(empty_TK[test_part], group_T, groups, n)
        first = float(lru[0, :, n].sum() / max(lru[0].sum(), 1))
        replayed.append(LayerReplays(policies, lru_empty, learned, tested, first))
    return replayed


def tokens_as_sequence(
    chosen_TK: NDArray[np.integer], document_T: Integers | None, part: Mask | slice
) -> tuple[NDArray[np.integer], Integers | None]:
    """Choices of some tokens, one after the other, and their documents where caches start anew in each."""
    part_TK = chosen_TK[part]
    filled_TK = part_TK >= 0
    return part_TK[filled_TK], None if document_T is None else document_T[part].repeat(filled_TK.sum(1))


def listed_places(chosen_TK: NDArray[np.integer], n: int, split: Split) -> Depths:
    """Place of every tested choice in the list of the experts used most where was learned."""
    place_E = np.empty(n, dtype=np.int16)
    place_E[hottest_first(usage(chosen_TK[split.learn_T], n))] = np.arange(n)
    tested_TK = chosen_TK[split.test_T]
    return np.where(tested_TK < 0, np.int16(-1), place_E[tested_TK])


# --- rows


def layer_sums(counts_XGD: Integers, slots: int) -> Integers:
    """Hits, choices, tokens with hits only, and tokens, per group of documents."""
    return np.stack([held(counts_XGD, slots), counts_XGD.sum(2)], axis=1).reshape(4, -1).T


def share_of(sums_GX: Integers) -> float:
    hits, choices = sums_GX.sum(0)[:2]
    return float(hits / choices) if choices else np.nan


def rate_rows(
    trace: TokenTrace,
    sums: list[Integers],
    layer_slots: list[float],
    chance: list[Array],
    known: dict[str, list[float]],
    first: int = 0,
) -> list[dict[str, Any]]:
    """Rates with intervals per layer, and of all layers together from the `first` on.

    Rates that are `known` per layer are averaged over layers by choices, as is chance.
    """
    at_slots = zip(layer_slots, chance, strict=True)
    chance_L = [float(np.interp(size, np.arange(len(rates)), rates)) for size, rates in at_slots]
    facts = {"chance": chance_L, **known}
    choices_L = np.array([sums_GX[:, 1].sum() for sums_GX in sums[first:]])
    share_L = choices_L / max(choices_L.sum(), 1)
    means = {name: float(share_L @ np.where(choices_L > 0, each[first:], 0)) for name, each in facts.items()}
    by_layer = [dict(zip(facts, values, strict=True)) for values in zip(*facts.values(), strict=True)]
    all_sums = zip([*sums, np.sum(sums[first:], axis=0)], [*by_layer, means], strict=True)
    rows = [
        rate_row(trace, sums_GX) | rates | trace.place(at) for at, (sums_GX, rates) in enumerate(all_sums)
    ]
    for row, size in zip(rows, [*layer_slots, float(np.mean(layer_slots))], strict=True):
        row["layer_slots"] = size
    loads = sum(row["loads_per_token"] for row in rows[first:-1])
    rows[-1] |= {"loads_per_token": loads, "tokens": max(row["tokens"] for row in rows[first:-1])}
    return rows


def rate_row(trace: TokenTrace, sums_GX: Integers) -> dict[str, Any]:
    hits, choices, whole, tokens = sums_GX.sum(0).tolist()
    parts, documents = sums_GX[:, :2].astype(float), trace.n_documents if choices else 0
    interval = clip_share(jackknife_interval(parts, lambda part: part[..., 0] / part[..., 1], documents))
    return {
        "tokens": tokens,
        "choices": choices,
        "hit_rate": share_of(sums_GX),
        "low": interval.low,
        "high": interval.high,
        "token_hit_rate": whole / tokens if tokens else np.nan,
        "loads_per_token": (choices - hits) / tokens if tokens else np.nan,
    }


def split_rows(
    trace: TokenTrace, layers: list[LayerReplays], slots: int, sizes_L: Array, chance: list[Array]
) -> list[dict[str, Any]]:
    """LRU with the same bytes in all, split over layers by what the learned part's curves gain."""
    most, halves = min(trace.n_experts), len(layers[0].learned)
    split, even = np.zeros((2, len(layers), trace.n_groups, 4), dtype=np.int64)
    shares = np.zeros(len(layers))
    for number in range(halves):
        curves = [layer.learned[number][0].sum(0)[:most] for layer in layers]
        hits_LS = np.array([np.cumsum([0, *curve]) for curve in curves], dtype=float)
        chosen_L = split_budget(hits_LS, min(trace.k, most), min(slots, most), sizes_L)
        shares += chosen_L / halves
        for at, layer in enumerate(layers):
            split[at] += layer_sums(layer.tested[number], int(chosen_L[at]))
            even[at] += layer_sums(layer.tested[number], slots)
    known = {"compulsory": [layer.compulsory for layer in layers], "uniform": list(map(share_of, even))}
    rows = rate_rows(trace, [*split], shares.tolist(), chance, known)
    return [{**row, "policy": "lru_split", "slots": slots} for row in rows]
