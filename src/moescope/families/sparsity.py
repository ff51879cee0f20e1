"""Which layers a config says are MoE: one rule a way of saying it."""

from __future__ import annotations

from collections.abc import Callable

from moescope.families.layout import Config


def every_layer(config: Config) -> set[int]:
    return set(range(config["num_hidden_layers"]))


def by_step(config: Config) -> set[int]:
    """Qwen: every `decoder_sparse_step`-th layer but those listed as dense."""
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    return {layer for layer in every_layer(config) if layer not in dense and (layer + 1) % step == 0}


def every_block(config: Config) -> set[int]:
    """DBRX counts its layers under another name."""
    return set(range(config["n_layers"]))


def after_dense(unless_told: int) -> Callable[[Config], set[int]]:
    """All but the first few.

    Newer configs list each layer's kind, older ones count the dense layers at the start.
    """

    def rule(config: Config) -> set[int]:
        kinds = config.get("mlp_layer_types")
        if kinds:
            return {layer for layer, kind in enumerate(kinds) if kind == "sparse"}
        counts = [config.get(name) for name in ("first_k_dense_replace", "num_dense_layers")]
        dense = next((count for count in counts if count is not None), unless_told)
        every: int = config.get("moe_layer_freq") or 1
        return {layer for layer in every_layer(config) if layer >= dense and layer % every == 0}

    return rule


def in_window(config: Config) -> set[int]:
    """ERNIE: from a first to a last layer, every so many."""
    last = config.get("moe_layer_end_index", -1)
    last = config["num_hidden_layers"] - 1 if last in (None, -1) else last
    first, every = config.get("moe_layer_start_index", 0), config.get("moe_layer_interval", 1)
    return {layer for layer in every_layer(config) if first <= layer <= last and (layer + 1) % every == 0}


def interleaved(config: Config) -> set[int]:
    """Llama 4: listed, or every so many."""
    if config.get("moe_layers"):
        return set(config["moe_layers"])
    every = config.get("interleave_moe_layer_step", 1)
    return {layer for layer in every_layer(config) if (layer + 1) % every == 0}


def by_period(config: Config) -> set[int]:
    """Jamba: a period and an offset."""
    period, offset = config["expert_layer_period"], config["expert_layer_offset"]
    return {layer for layer in every_layer(config) if layer % period == offset}


def nllb(config: Config) -> set[int]:
    """NLLB: every so many layers of each half; decoder layers are numbered after the encoder's."""
    encoder, decoder = config["encoder_layers"], config["decoder_layers"]
    steps = (config.get("encoder_sparse_step", 4), config.get("decoder_sparse_step", 4))
    return stacks((encoder, steps[0]), (decoder, steps[1]), last=True)


def switch(config: Config) -> set[int]:
    """Switch: so many layers of each half, spread evenly; decoder layers are numbered after the encoder's."""
    encoder = config["num_layers"]
    decoder = config.get("num_decoder_layers") or encoder
    sparse = (config.get("num_sparse_encoder_layers", 3), config.get("num_sparse_decoder_layers", 3))
    steps = [
        count // wanted if wanted else count for count, wanted in zip((encoder, decoder), sparse, strict=True)
    ]
    return stacks((encoder, steps[0]), (decoder, steps[1]), last=False)


def stacks(*halves: tuple[int, int], last: bool) -> set[int]:
    """Of each (count, step): the last layer of every step, or its second; a step of 0 has none."""
    found, start = set(), 0
    for count, step in halves:
        place = (step - 1 if last else 1 % step) if step > 0 else None
        found |= {start + layer for layer in range(count) if step > 0 and layer % step == place}
        start += count
    return found
