"""Merge at random: the control of the merging methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moescope.compression.grouping import (
    ChooseDominant,
    Grouping,
    keep_per_section,
    most_used,
    ordered_grouping,
    routing_sections,
)
from moescope.compression.merging import LayerEvidence, merge_by
from moescope.compression.method import Evidence


def random_groups(
    n_experts: int,
    sizes: Sequence[int],
    generator: np.random.Generator,
    choose: ChooseDominant,
    n_groups: int = 1,
) -> Grouping:
    """Permute the experts into groups of these sizes; with routing groups, sizes of each in turn."""
    groups: list[list[int]] = []
    remaining = list(sizes)
    for section in routing_sections(n_experts, n_groups):
        permuted = [int(expert) for expert in generator.permutation(section)]
        while permuted:
            if not remaining or remaining[0] > len(permuted):
                raise ValueError(
                    f"sizes {list(sizes)} do not fill {n_groups} routing groups of {len(section)} experts"
                )
            size = remaining.pop(0)
            groups.append(permuted[:size])
            permuted = permuted[size:]
    return ordered_grouping(n_experts, groups, choose)


def group_at_random(evidence: Evidence, layer: LayerEvidence) -> Grouping:
    """Groups of the sizes of the plan this is a control of, or of random sizes."""
    n_experts = layer.weights.n_experts
    generator = np.random.default_rng((layer.settings.seed, layer.number, 7))
    choose = most_used(np.zeros(n_experts) if layer.usage_E is None else layer.usage_E)
    sizes: list[int] = []
    if layer.control_of is not None and not layer.control_of.dropped:
        sizes = [len(group) for group in layer.control_of.groups]
    else:
        sections = routing_sections(n_experts, layer.n_groups)
        count = keep_per_section(layer.keep, sections)
        for section in sections:
            extra = generator.multinomial(len(section) - count, np.full(count, 1 / count))
            sizes += [1 + int(more) for more in extra]
    return random_groups(n_experts, sizes, generator, choose, layer.n_groups)


METHOD = merge_by(
    group_at_random,
    "random_merge",
    "merges experts at random with neurons matched: the control",
    matched=True,
    needs_text=False,
)
