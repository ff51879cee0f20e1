"""The tables of merged experts.

The steps by which they were grouped, and how far members are from their dominant one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from moescope.compression.grouping import Grouping
    from moescope.families import MoeCheckpoint
    from moescope.types import Plan

MOST_PAIRS = 32  # compared a layer: matching and decomposing more would take longer than planning


def merge_rows(
    method: str, groupings: Mapping[int, Grouping], layer_names: Mapping[int, str]
) -> pd.DataFrame | None:
    """The table `merges`; None where no steps led to the groups."""
    import pandas as pd

    rows = [
        {
            "method": method,
            "layer": layer,
            "layer_name": layer_names[layer],
            "merge": number,
            "left": step.left,
            "right": step.right,
            "height": step.height,
            "chance_height": grouping.unrelated,
            "size": step.size,
            "done": step.done,
        }
        for layer, grouping in groupings.items()
        for number, step in enumerate(grouping.merges)
    ]
    return pd.DataFrame(rows) if rows else None


def cluster_pairs(plan: Plan, seed: int) -> dict[int, list[tuple[int, int]]]:
    """Layer -> (dominant, other member) of every group of two or more, 32 of them at most.

    Drawn at random.
    """
    import numpy as np

    found = {}
    for layer in plan.layers:
        pairs = [
            (dominant, member)
            for group, dominant in zip(layer.groups, layer.dominants, strict=True)
            for member in group
            if member != dominant
        ]
        if len(pairs) > MOST_PAIRS:
            kept = np.random.default_rng((seed, layer.layer)).choice(len(pairs), MOST_PAIRS, replace=False)
            pairs = [pairs[place] for place in sorted(kept)]
        if pairs:
            found[layer.layer] = pairs
    return found


def cluster_geometry(moe: MoeCheckpoint, plan: Plan, device: str, seed: int) -> dict[str, pd.DataFrame]:
    """The tables of the expert-distance chart for a plan's groups.

    As the experts lie and with neurons matched; empty without groups.
    """
    import pandas as pd

    from moescope.geometry.pairs import layer_geometry

    base = plan.method.removesuffix("_permuted")
    series = {base: "none", f"{base}_permuted": "unsigned" if plan.matching == "unsigned" else "signed"}
    parts: dict[str, list[pd.DataFrame]] = {"geometry": [], "geometry_layers": []}
    for layer, pairs in cluster_pairs(plan, seed).items():
        weights = moe.layers[layer]
        for name, frame in layer_geometry(weights, weights, pairs, series, device=device, seed=seed).items():
            parts[name].append(frame)
    return {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items() if frames}
