"""Placement: experts and redundant copies on devices and nodes; balance and traffic on other documents.

Also the files for servers and trainers: placements, hot lists and expert lists, in the formats they read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from moescope.deployment.prefetch import count_pairs
from moescope.deployment.tokens import Split, TokenTrace, counts_by, hottest_first, map_parts, usage
from moescope.errors import BadInput
from moescope.run import write_json
from moescope.statistics import clip_share, jackknife_interval
from moescope.types import Array, Integers

LONGEST_NAME = 80  # characters of a domain in a file's name; file systems take 255 bytes
PLACEMENTS = ("balanced", "coactivation")  # that are exported
METHODS = ("contiguous", "balanced", "coactivation")
RANDOM = "random"  # placements of the chance level
CHANCE = ("balancedness", "batch_balancedness", "cross_device", "cross_node")
MEANS = ["batch_balancedness", "balancedness_chance", "batch_balancedness_chance"]
TRAFFIC = ["cross_device", "cross_node", "cross_device_chance", "cross_node_chance", "cross_device_least"]
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
    return generator.permutation(np.concatenate([np.arange(n), *rounds])[: n + cluster.redundant])


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
        *_, device = min(
            (len(own) == room, expert in own, load, number)
            for number, (own, load) in enumerate(zip(held, loads.tolist(), strict=True))
        )
        held[device].append(expert)
        loads[device] += weight[at]
    return np.array([expert for own in held for expert in sorted(own)])


def place_together(start: Integers, load_E: Array, pairs_EE: Array, cluster: Cluster) -> Integers:
    """From a balanced placement, swap experts between devices while that brings together more of the pairs
    that tokens choose, and no device exceeds 1.1 times the mean load (or the most it had at the start).
    """
    copies_E = np.bincount(start, minlength=len(load_E))
    place, weight = start, (load_E / copies_E)[start]
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
        order = np.arange(len(start))
        order[[first, second]] = second, first
        place, weight, pairs_PP = place[order], weight[order], pairs_PP[order][:, order]
    return place


# --- what a placement does


def device_shares(place: Integers, n: int, devices: int) -> Array:
    """Share of every expert's load that each device carries: copies share it equally."""
    device = np.arange(len(place)) // (len(place) // devices)
    shares_ED = np.bincount(place * devices + device, minlength=n * devices).reshape(n, devices)
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


def placement_table(
    trace: TokenTrace,
    splits: list[Split],
    cluster: Cluster,
    seed: int,
    advance: Callable[[int], None],
    jobs: int = 1,
) -> pd.DataFrame:
    """Return one row per method and layer; layer null: all layers together."""
    parts = [trace.part(at, at + 1) for at in range(len(trace.layers))]
    work = partial(layer_rows, splits=splits, cluster=cluster, seed=seed)
    rows = [row for layer in map_parts(work, parts, jobs, advance) for row in layer]
    frame = pd.DataFrame(rows)
    by_method = frame.groupby("method")
    sums = ["mean_load", "max_load", *TRAFFIC]  # loads and traffic add up: layers run one after the other
    totals = by_method[MEANS].mean().join(by_method[sums].sum()).loc[list(METHODS)]
    totals["balancedness"] = totals["mean_load"] / totals["max_load"]
    frame = pd.concat([frame, totals.reset_index()], ignore_index=True)
    values = {"devices": cluster.devices, "nodes": cluster.nodes, "redundant": cluster.redundant}
    return frame.drop(columns=sums[:2]).assign(**values, batch_tokens=cluster.batch_tokens)


def layer_rows(trace: TokenTrace, splits: list[Split], cluster: Cluster, seed: int) -> list[dict[str, Any]]:
    """Return one row per method, of the trace's only layer."""
    n, chosen_TK = trace.n_experts[0], trace.chosen_LTK[0]
    measured: dict[str, list[Any]] = {name: [] for name in (*METHODS, RANDOM)}
    nodes_DN = (cluster.node_of()[:, None] == np.arange(cluster.nodes)).astype(float)
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
            shares_ED = device_shares(place, n, cluster.devices)
            traffic = [remote_parts(sample_TK, shares) for shares in (shares_ED, shares_ED @ nodes_DN)]
            measured[name].append((counts_GE @ shares_ED, balancedness(counts_BE @ shares_ED), *traffic))
    rows = {name: layer_row(name, parts, trace) for name, parts in measured.items() if parts}
    random = rows.pop(RANDOM, {})
    chance = {f"{key}_chance": random[key] for key in CHANCE if random}
    least = -(-trace.k // ((n + cluster.redundant) // cluster.devices)) * (1 - 1 / cluster.devices)
    layer = {"layer": trace.layers[0], "layer_name": trace.layer_names[0]}
    return [{**row, **layer, "cross_device_least": least, **chance} for row in rows.values()]


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
        *((RANDOM, place_random(n, cluster, generator)) for _ in range(RANDOM_DRAWS)),
        ("balanced", balanced),
        ("coactivation", place_together(balanced, load_E, pairs_EE, cluster)),
    ]


def layer_row(method: str, parts: list[Any], trace: TokenTrace) -> dict[str, Any]:
    """One layer's numbers: loads of the halves lie beside each other, as their placements differ."""
    load_PGD, batches, cross_device, cross_node = (list(values) for values in zip(*parts, strict=True))
    load_PD = np.array([load_GD.sum(0) for load_GD in load_PGD])
    mean_load, max_load = float(load_PD.mean(1).sum()), float(load_PD.max(1).sum())
    row = {"method": method, "mean_load": mean_load, "max_load": max_load}
    row |= {"balancedness": float(balancedness(load_PD).mean()), "low": np.nan, "high": np.nan}
    if method != RANDOM:

        def statistic(load_X: Array) -> Array:
            load_XPD = load_X.reshape(*load_X.shape[:-1], len(parts), -1)
            return load_XPD.mean(-1).sum(-1) / load_XPD.max(-1).sum(-1)

        interval = jackknife_interval(np.concatenate(load_PGD, axis=1), statistic, trace.n_documents)
        row["balancedness"], row["low"], row["high"] = mean_load / max_load, *clip_share(interval)[:2]
    row |= {"cross_device": float(np.mean(cross_device)), "cross_node": float(np.mean(cross_node))}
    return row | {"batch_balancedness": float(np.mean(np.concatenate(batches)))}


# --- files for servers and trainers


def write_exports(
    folder: Path, trace: TokenTrace, cluster: Cluster, hidden_layers: int | None, esft_share: float, seed: int
) -> list[str]:
    """Write every export, learned on all documents; return the names of the files."""
    layers = [*zip(trace.layers, trace.chosen_LTK, trace.n_experts, strict=True)]
    files: dict[str, Any] = {
        "hot_experts.json": hot_lists({layer: usage(chosen_TK, n) for layer, chosen_TK, n in layers})
    }
    if len(set(trace.n_experts)) == 1:  # these formats have one number of experts for all layers
        learned = [dict(all_places(chosen_TK, n, cluster, seed)) for _, chosen_TK, n in layers]
        for name in PLACEMENTS:
            lists = (places[name].tolist() for places in learned)
            places = dict(zip(trace.layers, lists, strict=True))
            files[f"sglang_{name}.json"] = sglang_mapping(places, trace.n_experts[0], hidden_layers)
            files[f"vllm_experimental_{name}.json"] = list(places.values())
    for domain in dict.fromkeys(trace.domain_D):
        member_T = np.array([name == domain for name in trace.domain_D])[trace.document_T]
        counts = {layer: usage(chosen_TK[member_T], n) for layer, chosen_TK, n in layers}
        files[f"esft_{in_file_names(domain)}.json"] = esft_config(counts, esft_share)
    return write_files(folder, files)


def in_file_names(domain: str) -> str:
    """Return a domain as part of a file name: without odd letters, not too long, and of no other domain."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", domain)[:LONGEST_NAME]
    if safe == domain != "":
        return domain
    return f"{safe}-{hashlib.blake2b(domain.encode(), digest_size=4).hexdigest()}"


def write_files(folder: Path, files: dict[str, Any]) -> list[str]:
    (folder / "exports").mkdir(exist_ok=True)
    for name, content in files.items():
        write_json(folder / "exports" / name, content)
    return sorted(files)


def sglang_mapping(places: dict[int, list[int]], n: int, hidden_layers: int | None) -> dict[str, Any]:
    """SGLang's --init-expert-location: the expert of every place, one row per hidden layer.

    Dense layers have a row too, experts in order; its device is column // (columns/devices). No other key:
    SGLang passes all of them on.
    """
    in_order = [place % n for place in range(len(next(iter(places.values()))))]
    rows = max(hidden_layers or 0, max(places) + 1)
    return {"physical_to_logical_map": [places.get(layer, in_order) for layer in range(rows)]}


def hot_lists(counts: dict[int, Integers]) -> dict[str, Any]:
    """Experts per layer by falling use, with their tokens: the first are those to keep in fast memory."""
    layers = {}
    for layer, counts_E in counts.items():
        order = hottest_first(counts_E)
        layers[str(layer)] = {"experts": order.tolist(), "tokens": counts_E[order].tolist()}
    return {"layers": layers}


def esft_config(counts: dict[int, Integers], share: float) -> dict[str, Any]:
    """Experts for fine-tuning per layer (ESFT)."""
    lists = {str(layer): esft_experts(counts_E, share) for layer, counts_E in counts.items()}
    return {"experts": lists, "shared_experts": False, "non_expert_modules": False}


def esft_experts(counts_E: Integers, share: float) -> list[int]:
    """Return the experts with the highest shares of the choices, until their sum reaches the threshold (ESFT,
    Wang et al. 2024, arXiv 2407.01906).

    As there, shares are rounded to four digits first; of equal ones the lower number comes first.
    """
    shares_E = np.round(counts_E / max(int(counts_E.sum()), 1), 4)
    order = hottest_first(shares_E)[: int((counts_E > 0).sum())]
    missing = np.cumsum(shares_E[order]) < share - 1e-12
    return order[: int(missing.sum()) + 1].tolist()
