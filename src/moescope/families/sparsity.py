"""Which layers a config says are MoE: one rule a way of saying it."""

from __future__ import annotations

from moescope.families.layout import Config


def every_layer(config: Config) -> set[int]:
    return set(range(config["num_hidden_layers"]))


def by_step(config: Config) -> set[int]:
    """Qwen: every `decoder_sparse_step`-th layer but those listed as dense."""
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    return {layer for layer in every_layer(config) if layer not in dense and (layer + 1) % step == 0}


def after_dense(config: Config) -> set[int]:
    """DeepSeek, GLM: all but the first few."""
    return {layer for layer in every_layer(config) if layer >= config.get("first_k_dense_replace", 0)}


def listed_or_after_dense(config: Config) -> set[int]:
    """Newer configs list each layer's kind; older ones count the dense layers at the start."""
    kinds = config.get("mlp_layer_types")
    return {layer for layer, kind in enumerate(kinds) if kind == "sparse"} if kinds else after_dense(config)


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


def encoder_decoder(encoder: str, decoder: str, encoder_step: str, decoder_step: str, first: int):  # type: ignore[no-untyped-def]
    """NLLB, Switch: every so many layers of each half; decoder layers are numbered after the encoder's."""

    def rule(config: Config) -> set[int]:
        halves = ((config[encoder], config[encoder_step], 0), (config[decoder], config[decoder_step], config[encoder]))
        return {
            start + layer
            for count, step, start in halves
            if step
            for layer in range(count)
            if step == 1 or layer % step == first % step
        }

    return rule
