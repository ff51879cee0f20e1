"""Files for servers and trainers: placements, hot lists and expert lists, in the formats that these read."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from moescope.deployment.placement import Cluster, all_places
from moescope.deployment.tokens import TokenTrace, hottest_first, usage
from moescope.run import write_json
from moescope.types import Integers

LONGEST_NAME = 80  # characters of a domain in a file's name; file systems take 255 bytes
FOLDER = "exports"
PLACEMENTS = ("balanced", "coactivation")


def in_file_names(domain: str) -> str:
    """Return a domain's name as part of a file's: without odd letters, and not too long."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", domain) or "text"
    if len(safe) <= LONGEST_NAME:
        return safe
    return f"{safe[:LONGEST_NAME]}-{hashlib.blake2b(domain.encode(), digest_size=4).hexdigest()}"


def write_exports(
    folder: Path, trace: TokenTrace, cluster: Cluster, hidden_layers: int | None, esft_share: float, seed: int
) -> list[str]:
    """Write every export, learned on all documents; return the names of the files."""
    counts = [usage(chosen_TK, n) for chosen_TK, n in zip(trace.chosen_LTK, trace.n_experts, strict=True)]
    places: dict[str, list[Integers]] = {name: [] for name in PLACEMENTS}
    for chosen_TK, n in zip(trace.chosen_LTK, trace.n_experts, strict=True):
        learned = dict(all_places(chosen_TK, n, cluster, seed))
        for name, kept in places.items():
            kept.append(learned[name])
    files: dict[str, Any] = {"hot_experts.json": hot_lists(trace.layers, counts)}
    if len(set(trace.n_experts)) == 1:  # these formats have one number of experts for all layers
        for name, kept in places.items():
            files[f"sglang_{name}.json"] = sglang_mapping(
                trace.layers, kept, trace.n_experts[0], hidden_layers
            )
            files[f"vllm_experimental_{name}.json"] = [place.tolist() for place in kept]
            files[f"vllm_ascend_{name}.json"] = ascend_mapping(trace.layers, kept, cluster.devices)
    for domain in dict.fromkeys(trace.domain_D):
        member_T = np.array([name == domain for name in trace.domain_D])[trace.document_T]
        parts = zip(trace.chosen_LTK, trace.n_experts, strict=True)
        chosen = [esft_experts(usage(chosen_TK[member_T], n), esft_share) for chosen_TK, n in parts]
        lists = {str(layer): experts for layer, experts in zip(trace.layers, chosen, strict=True)}
        files[f"esft_{in_file_names(domain)}.json"] = esft_config(lists)
    return write_files(folder, files)


def write_lists(folder: Path, counts: dict[int, Integers], esft_share: float) -> list[str]:
    """Write what needs no single tokens: hot lists, and experts for fine-tuning."""
    lists = {str(layer): esft_experts(counts_E, esft_share) for layer, counts_E in counts.items()}
    hot = hot_lists(list(counts), list(counts.values()))
    return write_files(folder, {"hot_experts.json": hot, "esft_text.json": esft_config(lists)})


def esft_config(lists: dict[str, list[int]]) -> dict[str, Any]:
    return {"experts": lists, "shared_experts": False, "non_expert_modules": False}


def write_files(folder: Path, files: dict[str, Any]) -> list[str]:
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, content in files.items():
        write_json(folder / FOLDER / name, content)
    return sorted(files)


def sglang_mapping(
    layers: list[int], places: list[Integers], n: int, hidden_layers: int | None
) -> dict[str, Any]:
    """SGLang's --init-expert-location: the expert of every place, one row per hidden layer.

    Dense layers have a row too, experts in order; its device is column // (columns/devices). No other key:
    SGLang passes all of them on.
    """
    in_order = [place % n for place in range(len(places[0]))]
    rows = [in_order] * max(hidden_layers or 0, layers[-1] + 1)
    for layer, place in zip(layers, places, strict=True):
        rows[layer] = place.tolist()
    return {"physical_to_logical_map": rows}


def ascend_mapping(layers: list[int], places: list[Integers], devices: int) -> dict[str, Any]:
    """vllm-ascend's expert_map_path: one entry per MoE layer, with the experts of every device."""
    return {
        "moe_layer_count": len(layers),
        "layer_list": [
            {
                "layer_id": number,
                "device_count": devices,
                "device_list": [
                    {"device_id": device, "device_expert": experts.tolist()}
                    for device, experts in enumerate(np.split(place, devices))
                ],
            }
            for number, place in enumerate(places)
        ],
    }


def hot_lists(layers: list[int], counts: list[Integers]) -> dict[str, Any]:
    """Experts per layer by falling use, with their tokens: the first are those to keep in fast memory."""
    return {
        "layers": {
            str(layer): {
                "experts": (order := hottest_first(counts_E)).tolist(),
                "tokens": counts_E[order].tolist(),
            }
            for layer, counts_E in zip(layers, counts, strict=True)
        }
    }


def esft_experts(counts_E: Integers, share: float) -> list[int]:
    """Return the experts with the highest shares of the choices, until their sum reaches the threshold (ESFT,
    Wang et al. 2024, arXiv 2407.01906).

    As there, shares are rounded to four digits first; of equal ones the lower number comes first.
    """
    shares_E = np.round(counts_E / max(int(counts_E.sum()), 1), 4)
    order = hottest_first(shares_E)[: int((counts_E > 0).sum())]
    missing = np.cumsum(shares_E[order]) < share - 1e-12
    return order[: int(missing.sum()) + 1].tolist()
