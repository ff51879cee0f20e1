"""Merge at random: the control of the merging methods."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moescope.compression.merging import (
    ChooseDominant,
    Grouping,
    LayerEvidence,
    keep_per_section,
    merge_by,
    most_used,
    ordered_grouping,
    routing_sections,
)


def random_groups(
    n_experts: int,
    sizes: Sequence[int],
    generator: np.random.Generator,
    choose: ChooseDominant,
    n_groups: int = 1,
) -> Grouping:
    """Permute the experts into groups of these sizes; with routing groups, sizes of each in turn."""
    sections = routing_sections(n_experts, n_groups)
    ends = np.cumsum(sizes).tolist()
    if not {section[-1] + 1 for section in sections} <= set(ends):
        raise ValueError(
            f"sizes {list(sizes)} do not fill {n_groups} routing groups of {len(sections[0])} experts"
        )
    permuted = np.concatenate([generator.permutation(section) for section in sections])
    groups = [group.tolist() for group in np.split(permuted, ends[:-1])]
    return ordered_grouping(n_experts, groups, choose)


def group_at_random(layer: LayerEvidence) -> Grouping:
    """Groups of the sizes of the plan this is a control of, or of random sizes."""
    n_experts = layer.weights.n_experts
    generator = np.random.default_rng((layer.settings.seed, layer.weights.layer, 7))
    choose = most_used(np.zeros(n_experts) if layer.usage_E is None else layer.usage_E)
    if layer.control_of is not None and not layer.control_of.dropped:
        sizes = [len(group) for group in layer.control_of.groups]
    else:
        sections = routing_sections(n_experts, layer.n_groups)
        count = keep_per_section(layer.keep, sections)
        extra = [generator.multinomial(len(part) - count, np.full(count, 1 / count)) for part in sections]
        sizes = (1 + np.concatenate(extra)).tolist()
    return random_groups(n_experts, sizes, generator, choose, layer.n_groups)


METHOD = merge_by(
    group_at_random,
    "random_merge",
    "merges experts at random with neurons matched: the control",
    matched=True,
    needs_text=False,
)
