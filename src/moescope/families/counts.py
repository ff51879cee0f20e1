"""Expert counts: whether a model can route with another number of experts, and its changed config."""

import copy
from collections.abc import Collection, Iterator
from typing import Any

from moescope.errors import BadInput
from moescope.families.layout import Config
from moescope.families.reading import MoeCheckpoint, config_value, text_config, text_configs

GROUPS, CHOSEN_GROUPS = ("n_group", "num_expert_group"), ("topk_group",)
# Some configs repeat a number under a second name; transformers reads either.
COUNT_ALIASES = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "moescope_lab.experts",  # what a model of the lab was trained with
)
TOP_K_ALIASES = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
EXTRA_HEADS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


def check_counts(moe: MoeCheckpoint, counts: dict[int, int], top_k: int | None) -> None:
    """Raise for expert counts too small for top-k or not divisible into the router's groups."""
    where = moe.checkpoint.shown
    for layer, count in counts.items():
        chosen = moe.layers[layer].top_k if top_k is None else top_k
        if count < 1:
            raise BadInput(f"{where}: layer {layer} would have no experts; keep at least one")
        if chosen is not None and not 1 <= chosen <= count:
            raise BadInput(
                f"{where}: layer {layer} would have {count} experts, but top_k is {chosen}; keep at least "
                f"{chosen}, or give a top_k from 1 to {count}"
            )
        if count != moe.layers[layer].n_experts:
            check_groups(moe, layer, count, chosen)


def check_groups(moe: MoeCheckpoint, layer: int, count: int, top_k: int | None) -> None:
    """DeepSeek's grouped routing: groups of equal size, ranked by their best two experts."""
    config = text_config(moe.checkpoint.config)
    groups = config_value(config, GROUPS, layer)
    if not isinstance(groups, int) or groups < 1:
        return
    chosen = config_value(config, CHOSEN_GROUPS, layer) or groups
    least = max(2, -(-(top_k or 1) // chosen))  # experts per group
    possible = range(least * groups, max(count, moe.layers[layer].n_experts) + 1, groups)
    if count not in possible:
        nearest = [number for number in possible if number < count][-1:]
        nearest += [number for number in possible if number > count][:1]
        raise BadInput(
            f"{moe.checkpoint.shown}: {count} experts in layer {layer} cannot be routed in {groups} groups "
            f"({chosen} of them chosen, top_k {top_k}); nearest possible: "
            f"{' or '.join(map(str, nearest)) or 'none'}"
        )


def changed_config(
    moe: MoeCheckpoint, counts: dict[int, int], top_k: int | None, drop_heads: bool
) -> Config | None:
    """Return the config with other expert counts (and top-k); None if nothing changes.

    Every field that counts experts is changed wherever it occurs; a list has one entry per layer.
    """
    checkpoint = moe.checkpoint
    changed = {layer for layer, count in counts.items() if count != moe.layers[layer].n_experts}
    if not changed and top_k is None:
        return None
    if checkpoint.config is None:
        raise BadInput(
            f"{checkpoint.shown}: no config.json, so the number of experts cannot be changed; add it"
        )
    if moe.model is None:
        raise BadInput(
            f"{checkpoint.shown}: model_type {checkpoint.config.get('model_type')} is not known, so the "
            "config field that counts experts is not either; use a known model_type, or keep the number"
        )
    config: Config = copy.deepcopy(checkpoint.config)
    if changed:
        set_counts(moe, config, counts)
    if top_k is not None:
        if isinstance(moe.model.top_k, int):
            raise BadInput(
                f"{checkpoint.shown}: this model always chooses {moe.model.top_k} experts; remove top_k"
            )
        chosen = {weights.top_k for weights in moe.layers.values()}
        for holder, field in fields(config, moe.model.top_k, TOP_K_ALIASES, chosen):
            value = holder[field]
            holder[field] = [top_k] * len(value) if isinstance(value, list) else top_k
    for holder, field in fields(config, EXTRA_HEADS) if drop_heads else ():
        holder[field] = 0
    return config


def set_counts(moe: MoeCheckpoint, config: Config, counts: dict[int, int]) -> None:
    assert moe.model is not None
    if not any(fields(config, moe.model.experts)):
        raise BadInput(
            f"{moe.checkpoint.files.label('config.json')}: none of {', '.join(moe.model.experts)} in it; add "
            "the number of experts"
        )
    fewest, most = (pick(counts, key=counts.__getitem__) for pick in (min, max))
    before = {weights.n_experts for weights in moe.layers.values()}
    for holder, field in fields(config, moe.model.experts, COUNT_ALIASES, before):
        value = holder[field]
        if not isinstance(value, list) and counts[fewest] < counts[most]:
            raise BadInput(
                f"{moe.checkpoint.shown}: layer {fewest} would have {counts[fewest]} experts and layer "
                f"{most} {counts[most]}, but config.json holds one number for all ({field}); give every MoE "
                "layer the same number"
            )
        holder[field] = (
            [counts.get(layer, old) for layer, old in enumerate(value)]
            if isinstance(value, list)
            else counts[most]
        )


def fields(
    config: Config, paths: tuple[str, ...], aliases: tuple[str, ...] = (), values: Collection[int | None] = ()
) -> Iterator[tuple[Config, str]]:
    """Yield (object, name) of each of these fields in the config, and of aliases with one of the values."""
    for place in text_configs(config):
        for path in dict.fromkeys((*paths, *aliases)):
            *outer, field = path.split(".")
            holder: Any = place
            for name in outer:
                holder = holder.get(name) if isinstance(holder, dict) else None
            value = holder.get(field) if isinstance(holder, dict) else None
            if value is not None and (path in paths or (isinstance(value, int) and value in values)):
                yield holder, field
