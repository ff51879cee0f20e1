"""Save and load a lab model as an ordinary checkpoint.

Three layouts: Mixtral's where the router is a plain linear top-k with renormalised gates; Qwen3-MoE's where
the model norms queries and keys; the lab's own for everything else. transformers loads the first two.
"""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from moescope.checkpoint.files import read_config
from moescope.checkpoint.local import LocalFiles
from moescope.checkpoint.writing import plan_tensor, write_checkpoint
from moescope.decoder.config import ModelConfig, override
from moescope.decoder.layers import uses_qk_norm
from moescope.decoder.model import LabModel, check_model
from moescope.decoder.routers import router_class
from moescope.decoder.vocabulary import Vocabulary, load_vocabulary
from moescope.errors import BadInput
from moescope.storage import remove

LAB = "moescope_lab"  # model type of the lab's own layout; key of the ModelConfig in every config.json
SIGMOID = f"{LAB}_sigmoid"  # the same with sigmoid scores: scoring is read from the model type
MOST_POSITIONS = 10**8  # of a checkpoint: no tensor says how many it has
FACTS = "moescope_router"  # key of the facts about the router
# the layouts of transformers: architecture, name of the block, names of gate, up and down
TRANSFORMERS = {
    "mixtral": ("MixtralForCausalLM", "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "mlp", ("gate_proj", "up_proj", "down_proj")),
}


def layout_of(config: ModelConfig) -> str:
    """Return the model type under which a model of this config is saved."""
    router = router_class(config.router)
    if config.modern and router.is_plain(config):
        if uses_qk_norm(config):
            return "qwen3_moe"
        if router.renormalises(config):
            return "mixtral"
    return SIGMOID if router.sigmoid_scores else LAB


def config_json(model: LabModel, dtype: str = "float32") -> dict[str, Any]:
    """Return config.json: what transformers and families read, the ModelConfig, and facts about the router.

    `dtype` is that of the stored weights. `max_position_embeddings` is the trained length, since positions
    that were never trained predict badly; the ModelConfig has the positions that the model can compute.
    """
    config = model.config
    layout, router = layout_of(config), router_class(config.router)
    experts, d_ff = router.expert_shape(config)
    common: dict[str, Any] = {
        "model_type": layout,
        "architectures": [TRANSFORMERS[layout][0] if layout in TRANSFORMERS else "LabModel"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.d_model // config.heads,
        "max_position_embeddings": model.trained_length,
        "hidden_act": "silu" if config.modern else "gelu",
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
        "tie_word_embeddings": config.tie_embeddings,
        "num_experts_per_tok": config.top_k,
        "dtype": dtype,
        LAB: asdict(config),
        FACTS: router.facts(config),
    }
    if layout == "mixtral":
        return {**common, "num_local_experts": experts, "intermediate_size": d_ff, "sliding_window": None}
    if layout == "qwen3_moe":
        common |= {"num_experts": experts, "moe_intermediate_size": d_ff, "intermediate_size": d_ff}
        common |= {"norm_topk_prob": router.renormalises(config), "decoder_sparse_step": 1}
        return {**common, "mlp_only_layers": [], "attention_bias": False, "use_sliding_window": False}
    return {**common, "num_experts": experts, "intermediate_size": d_ff}


def stored_tensors(model: LabModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its name in the layout. Experts are views of stacks, not copies."""
    layout, state = layout_of(model.config), model.state_dict()
    if layout not in TRANSFORMERS:
        yield from state.items()
        return
    _, mlp, (gate, up, down) = TRANSFORMERS[layout]
    for name, tensor in state.items():
        before, _, part = name.partition(".mlp.")
        block = f"model.{before}.{mlp}"
        if part == "experts.gate_up":
            for expert, (gate_FD, up_FD) in enumerate(weights.chunk(2) for weights in tensor):
                yield f"{block}.experts.{expert}.{gate}.weight", gate_FD
                yield f"{block}.experts.{expert}.{up}.weight", up_FD
        elif part == "experts.down":
            for expert, down_DF in enumerate(tensor):
                yield f"{block}.experts.{expert}.{down}.weight", down_DF
        elif part:
            assert part == "router.weight", name
            yield f"{block}.gate.weight", tensor
        elif name != "lm_head.weight":
            yield f"model.{name}", tensor
        elif not model.config.tie_embeddings:
            yield name, tensor


def save_model(model: LabModel, vocabulary: Vocabulary, folder: Path) -> None:
    """Write the checkpoint with its tokenizer atomically, replacing one of the same name."""
    remove(folder, folder.parent)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = [plan_tensor(name, tensor) for name, tensor in stored_tensors(model)]
    with tempfile.TemporaryDirectory() as extra:
        vocabulary.save(Path(extra))
        dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")  # frozen experts may differ
        write_checkpoint(folder, tensors, config_json(model, dtype), Path(extra))


def is_lab_checkpoint(folder: str | Path) -> bool:
    """Return whether the lab wrote that folder, in any layout."""
    return LAB in config_of(Path(folder))


def is_own_layout(folder: str | Path) -> bool:
    """Return whether only the lab can run the checkpoint; transformers runs its other layouts too."""
    return config_of(Path(folder)).get("model_type") in (LAB, SIGMOID)


def config_of(folder: Path) -> dict[str, Any]:
    """Return what config.json holds; empty where there is none or it is damaged."""
    with suppress(BadInput, OSError):
        return read_config(LocalFiles(folder)) or {}
    return {}


def load_config(folder: Path) -> ModelConfig:
    """Return the ModelConfig of a lab checkpoint.

    The number of experts comes from the rest of config.json, which compression changes.
    """
    content = config_of(folder)
    if LAB not in content:
        raise BadInput(f"{folder}: not a lab checkpoint; pass a folder that `moescope train` wrote")
    where = f"{folder / 'config.json'}: {LAB}"
    config = override(ModelConfig(), content[LAB], where)
    check_model(config, where)
    experts = content.get("num_local_experts", content.get("num_experts", config.experts))
    if router_class(config.router).expert_shape(config)[0] == experts:
        return config
    return replace(config, experts=experts, top_k=content["num_experts_per_tok"])


def trained_length(folder: Path, config: ModelConfig) -> int:
    """Return the length of text that a lab checkpoint was trained with."""
    length = config_of(folder).get("max_position_embeddings", config.max_positions)
    if type(length) is not int or not 0 < length <= config.max_positions:
        raise BadInput(
            f"{folder / 'config.json'}: max_position_embeddings is {length!r}, not a number from 1 to "
            f"max_positions, {config.max_positions}; copy the checkpoint again"
        )
    return length


def check_shapes(folder: Path, config: ModelConfig, stored: dict[str, Tensor]) -> None:
    """Reject a checkpoint whose tensors are not those of its config, before memory is taken for these."""
    if not any(f"layers.{config.layers - 1}." in name for name in stored):
        raise BadInput(f"{folder}: no tensor of layer {config.layers - 1} in it; copy the checkpoint again")
    try:
        if config.max_positions > MOST_POSITIONS:
            raise OverflowError
        with torch.device("meta"):
            model = LabModel(config)
    except (RuntimeError, OverflowError, TypeError):
        raise BadInput(
            f"{folder / 'config.json'}: its sizes are too large; copy the checkpoint again"
        ) from None
    for name, tensor in stored_tensors(model):
        if name not in stored:
            raise BadInput(f"{folder}: tensor {name} is missing; copy the checkpoint again")
        if stored[name].shape != tensor.shape:
            raise BadInput(
                f"{folder}: tensor {name} has shape {list(stored[name].shape)}, "
                f"expected {list(tensor.shape)}; copy the checkpoint again"
            )


def load_model(folder: str | Path, device: str = "cpu", compile: bool = False) -> tuple[LabModel, Vocabulary]:
    """Return model and vocabulary of a lab checkpoint, in evaluation mode."""
    place = Path(folder)
    config = load_config(place)
    stored: dict[str, Tensor] = {}
    for file in sorted(place.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            stored.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    check_shapes(place, config, stored)
    model = LabModel(config, compile=compile)
    model.trained_length = trained_length(place, config)
    with torch.no_grad():
        for name, tensor in stored_tensors(model):  # views: copying into them fills the model
            tensor.copy_(stored[name])
    return model.to(device).eval(), load_vocabulary(place)
