"""Placement: experts and redundant copies on devices and nodes; balance and traffic on other documents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moescope.deployment.prefetch import count_pairs
from moescope.deployment.tokens import Split, TokenTrace, map_parts, usage
from moescope.errors import BadInput
from moescope.statistics import clip_share, jackknife_interval
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("contiguous", "random", "balanced", "coactivation")
RANDOM_DRAWS = 8  # placements whose mean is the chance level
TRAFFIC_TOKENS = 2**16  # per layer and half, evenly spaced
SLACK = 1.1  # load over the mean up to which experts that act together may share a device
MOST_SWAPS = 500


class Cluster(NamedTuple):
    """Devices on nodes, and the copies of experts beyond one each."""

    devices: int
    nodes: int
    redundant: int
    batch_tokens: int

    def node_of(self) -> Integers:
        return np.arange(self.devices) // (self.devices // self.nodes)


def check_cluster(cluster: Cluster, n_experts: list[int]) -> None:
    for n in sorted(set(n_experts)):
        if (n + cluster.redundant) % cluster.devices:
            raise BadInput(
                f"gpus {cluster.devices}: {n} experts and {cluster.redundant} redundant copies do not fill "
                f"them evenly; give --redundant {-n % cluster.devices} or a number of GPUs that divides "
                f"{n + cluster.redundant}"
            )
    if cluster.devices % cluster.nodes:
        raise BadInput(f"nodes {cluster.nodes}: {cluster.devices} GPUs do not fill them evenly")


# --- where experts go: the expert of every place, device after device


def place_contiguous(n: int, cluster: Cluster) -> Integers:
    """Experts in order, then again from 0: what servers do without a placement."""
    return np.arange(n + cluster.redundant) % n


def place_random(n: int, cluster: Cluster, generator: np.random.Generator) -> Integers:
    """Experts in random order; redundant copies are of random experts."""
    rounds = [generator.permutation(n) for _ in range(cluster.redundant // n + 1)]
    copies = np.concatenate([np.arange(n), *rounds])[: n + cluster.redundant]
    return generator.permutation(copies)


def place_balanced(load_E: Array, cluster: Cluster) -> Integers:
    """Copies go to the experts with the highest load per copy, then each, heaviest first, to the least loaded
    device with room (as DeepSeek's EPLB does without expert groups). A second copy of an expert avoids the
    device of the first where another has room.
    """
    copies_E = np.ones(len(load_E), dtype=np.int64)
    for _ in range(cluster.redundant):
        copies_E[np.argmax(load_E / copies_E)] += 1
    experts = np.repeat(np.arange(len(load_E)), copies_E)
    weight = (load_E / copies_E)[experts]
    room = len(experts) // cluster.devices
    held: list[list[int]] = [[] for _ in range(cluster.devices)]
    loads = np.zeros(cluster.devices)
    for at in np.argsort(-weight, kind="stable"):
        expert = int(experts[at])
        costs = [
            (len(own) == room, expert in own, load, number)
            for number, (own, load) in enumerate(zip(held, loads.tolist(), strict=True))
        ]
        device = min(costs)[-1]
        held[device].append(expert)
        loads[device] += weight[at]
    return np.array([expert for own in held for expert in sorted(own)])


def place_together(start: Integers, load_E: Array, pairs_EE: Array, cluster: Cluster) -> Integers:
    """From a balanced placement, swap experts between devices while that brings together more of the pairs
    that tokens choose, and no device exceeds 1.1 times the mean load (or the most it had at the start).
    """
    copies_E = np.bincount(start, minlength=len(load_E))
    place, weight = start.copy(), (load_E / copies_E)[start]
    share_E = 1 / copies_E
    pairs_PP = (pairs_EE * share_E[:, None] * share_E)[np.ix_(start, start)].astype(float)
    pairs_PP[start[:, None] == start] = 0  # copies of one expert serve different tokens
    room = len(start) // cluster.devices
    device_P = np.arange(len(start)) // room
    node_D = cluster.node_of()
    near_DD = np.eye(cluster.devices)
    if cluster.nodes > 1:
        near_DD += node_D[:, None] == node_D
    most = max(SLACK * weight.sum() / cluster.devices, np.bincount(device_P, weight).max()) * (1 + 1e-12)
    for _ in range(MOST_SWAPS):
        near_PD = pairs_PP @ near_DD[device_P]
        own_P = near_PD[np.arange(len(start)), device_P]
        there_PP = near_PD[:, device_P]
        between_PP = near_DD[device_P][:, device_P]
        gain_PP = there_PP + there_PP.T - own_P[:, None] - own_P - 2 * pairs_PP * (near_DD[0, 0] - between_PP)
        load_D = np.bincount(device_P, weight, minlength=cluster.devices)
        moved_PP = load_D[device_P][:, None] - weight[:, None] + weight
        allowed = (moved_PP <= most) & (most >= moved_PP.T) & (device_P[:, None] != device_P)
        gain_PP[~allowed] = 0
        first, second = np.unravel_index(int(np.argmax(gain_PP)), gain_PP.shape)
        if gain_PP[first, second] <= 1e-9 * max(float(pairs_PP.sum()), 1.0):
            break
        for values in (place, weight):
            values[[first, second]] = values[[second, first]]
        order = np.arange(len(start))
        order[[first, second]] = second, first
        pairs_PP = pairs_PP[order][:, order]
    return place


# --- what a placement does


def device_shares(place: Integers, n: int, devices: int) -> Array:
    """Share of every expert's load that each device carries: copies share it equally."""
    device = np.arange(len(place)) // (len(place) // devices)
    shares_ED = np.zeros((n, devices))
    np.add.at(shares_ED, (place, device), 1.0)
    return shares_ED / shares_ED.sum(1, keepdims=True)


def balancedness(load_D: Array) -> Array:
    """Mean over max load of the devices, over leading axes; 1 where there is none."""
    most = load_D.max(-1)
    return np.where(most > 0, load_D.mean(-1) / np.where(most > 0, most, 1), 1.0)


def remote_parts(chosen_TK: NDArray[np.integer], shares_ED: Array) -> float:
    """Mean number of distinct remote devices per token, its origin uniform and copies picked at random.

    A device takes part unless each of the token's experts is served elsewhere: 1 - prod (1 - share).
    """
    parts = shares_ED.shape[1]
    avoided_ED = np.concatenate([1 - shares_ED, np.ones((1, parts))])  # the last row is an empty slot
    total = 0.0
    for begin in range(0, len(chosen_TK), 4096):
        total += float((1 - avoided_ED[chosen_TK[begin : begin + 4096]].prod(1)).sum())
    return (1 - 1 / parts) * total / max(len(chosen_TK), 1)


class Measured(NamedTuple):
    """One placement on tested tokens."""

    load_GD: Array  # per group of documents and device
    batches: Array  # balancedness of every batch
    cross_device: float
    cross_node: float


def measure(
    place: Integers, n: int, cluster: Cluster, counts_GE: Integers, counts_BE: Integers, sample_TK: Any
) -> Measured:
    shares_ED = device_shares(place, n, cluster.devices)
    nodes_DN = (cluster.node_of()[:, None] == np.arange(cluster.nodes)).astype(float)
    return Measured(
        counts_GE @ shares_ED,
        balancedness(counts_BE @ shares_ED),
        remote_parts(sample_TK, shares_ED),
        remote_parts(sample_TK, shares_ED @ nodes_DN),
    )


def counts_by(chosen_TK: NDArray[np.integer], part_T: Integers, parts: int, n: int) -> Integers:
    """Tokens per part and expert."""
    filled = chosen_TK >= 0
    flat = (part_T[:, None] * n + chosen_TK)[filled]
    return np.bincount(flat, minlength=parts * n).reshape(parts, n)


def placement_table(
    trace: TokenTrace,
    splits: list[Split],
    cluster: Cluster,
    seed: int,
    advance: Callable[[int], None],
    jobs: int = 1,
) -> pd.DataFrame:
    """Return one row per method and layer; layer null: all layers together."""
    import pandas as pd

    parts = [trace.part(at, at + 1) for at in range(len(trace.layers))]
    work = partial(layer_rows, splits=splits, cluster=cluster, seed=seed)
    rows = [row for layer in map_parts(work, parts, jobs, advance) for row in layer]
    rows += [of_all(name, [row for row in rows if row["method"] == name]) for name in METHODS]
    frame = pd.DataFrame(rows).drop(columns=["mean_load", "max_load"])
    values = {"devices": cluster.devices, "nodes": cluster.nodes, "redundant": cluster.redundant}
    return frame.assign(**values, batch_tokens=cluster.batch_tokens)


def layer_rows(trace: TokenTrace, splits: list[Split], cluster: Cluster, seed: int) -> list[dict[str, Any]]:
    """Return one row per method, of the trace's only layer."""
    n, chosen_TK = trace.n_experts[0], trace.chosen_LTK[0]
    found: dict[str, list[Measured]] = {name: [] for name in METHODS}
    for split in splits:
        used_T = split.test_T & (chosen_TK >= 0).any(1)
        tested_TK = chosen_TK[used_T]
        if not len(tested_TK):
            continue
        batch_T = np.arange(len(tested_TK)) // cluster.batch_tokens
        batches = max(len(tested_TK) // cluster.batch_tokens, 1)  # an incomplete one only if it is alone
        whole_T = batch_T < batches
        counts_GE = counts_by(tested_TK, trace.group_T[used_T], trace.n_groups, n)
        counts_BE = counts_by(tested_TK[whole_T], batch_T[whole_T], batches, n)
        sample_TK = tested_TK[:: -(-len(tested_TK) // TRAFFIC_TOKENS)].astype(np.int64)
        for name, place in all_places(chosen_TK[split.learn_T], n, cluster, seed):
            found[name].append(measure(place, n, cluster, counts_GE, counts_BE, sample_TK))
    rows = [layer_row(name, parts, trace) for name, parts in found.items() if parts]
    random = next((row for row in rows if row["method"] == "random"), {})
    chance = {f"{key}_chance": random[key] for key in CHANCE if random}
    least = -(-trace.k // ((n + cluster.redundant) // cluster.devices)) * (1 - 1 / cluster.devices)
    layer = {"layer": trace.layers[0], "layer_name": trace.layer_names[0]}
    return [{**row, **layer, "cross_device_least": least, **chance} for row in rows]


CHANCE = ("balancedness", "batch_balancedness", "cross_device", "cross_node")


def all_places(
    learn_TK: NDArray[np.integer], n: int, cluster: Cluster, seed: int
) -> list[tuple[str, Integers]]:
    """Every method's placement, learned on these tokens."""
    load_E = usage(learn_TK, n).astype(float)
    pairs_EE = count_pairs(learn_TK, learn_TK, n, n).astype(float)
    generator = np.random.default_rng(seed)
    balanced = place_balanced(load_E, cluster)
    return [
        ("contiguous", place_contiguous(n, cluster)),
        *(("random", place_random(n, cluster, generator)) for _ in range(RANDOM_DRAWS)),
        ("balanced", balanced),
        ("coactivation", place_together(balanced, load_E, pairs_EE, cluster)),
    ]


def layer_row(method: str, parts: list[Measured], trace: TokenTrace) -> dict[str, Any]:
    """One layer's numbers: loads of the halves lie beside each other, as their placements differ."""
    values = [float(balancedness(part.load_GD.sum(0))) for part in parts]
    loads = [part.load_GD.sum(0) for part in parts]
    low, high = np.nan, np.nan
    if method != "random":

        def statistic(load_X: Array) -> Array:
            halves = np.split(load_X, len(parts), axis=-1)
            return np.sum([half.mean(-1) for half in halves], axis=0) / np.sum(
                [half.max(-1) for half in halves], axis=0
            )

        stacked = np.concatenate([part.load_GD for part in parts], axis=1)
        low, high, _ = clip_share(jackknife_interval(stacked, statistic, trace.n_documents))
    mean_load, max_load = (sum(float(pick(load)) for load in loads) for pick in (np.mean, np.max))
    return {
        "method": method,
        "balancedness": mean_load / max_load if method != "random" else float(np.mean(values)),
        "low": low,
        "high": high,
        "batch_balancedness": float(np.mean(np.concatenate([part.batches for part in parts]))),
        "cross_device": float(np.mean([part.cross_device for part in parts])),
        "cross_node": float(np.mean([part.cross_node for part in parts])),
        "mean_load": mean_load,
        "max_load": max_load,
    }


def of_all(method: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All layers: loads add up, as layers run one after the other; traffic adds up too."""
    total: dict[str, Any] = {"method": method, "layer": None}
    total["balancedness"] = sum(row["mean_load"] for row in rows) / sum(row["max_load"] for row in rows)
    total["batch_balancedness"] = float(np.mean([row["batch_balancedness"] for row in rows]))
    for name in ("balancedness_chance", "batch_balancedness_chance"):
        total[name] = float(np.mean([row[name] for row in rows]))
    for name in (
        "cross_device",
        "cross_node",
        "cross_device_chance",
        "cross_node_chance",
        "cross_device_least",
    ):
        total[name] = float(np.sum([row[name] for row in rows]))
    return total
