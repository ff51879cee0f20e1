"""Tiny random models of transformers' own, one a model_type, run once.

With all that their MoE blocks were seen to do.
"""

from __future__ import annotations

import copy
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from moescope.families import MODELS
from moescope.families.lab import LAB
from moescope.families.replaced import REPLACED

# transformers has no model of the name kimi_k2; it is a DeepSeek V3
KINDS = sorted(set(MODELS) - {"kimi_k2", *LAB.models, *REPLACED.models})
# For every set of names that blocks have in memory and not as saved, one model that has them.
OTHERWISE_IN_MEMORY = (
    *("afmoe", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4v_moe", "granitemoe", "hunyuan_v1_moe"),
    *("hy_v3", "jamba", "lfm2_moe", "mimo_v2_flash", "minimax_m2", "mixtral", "phimoe", "qwen2_moe"),
    *("qwen3_5_moe", "qwen3_moe", "solar_open"),
)
CASES = [(kind, "saved") for kind in KINDS] + [(kind, "memory") for kind in OTHERWISE_IN_MEMORY]

# by size, all names that configs have for it
NAMES: dict[Any, str] = {
    16: "hidden_size d_model",
    64: "vocab_size max_position_embeddings",
    28: "intermediate_size_mlp",
    24: "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim",
    20: "moe_intermediate_size",
    12: "shared_expert_intermediate_size shared_intermediate_size",
    8: "d_kv head_dim q_lora_rank kv_lora_rank v_head_dim index_head_dim linear_key_head_dim "
    "linear_value_head_dim",
    4: "num_layers num_decoder_layers encoder_layers decoder_layers qk_rope_head_dim qk_nope_head_dim "
    "index_topk num_experts num_local_experts n_routed_experts moe_num_experts",
    3: "num_hidden_layers",
    2: "n_layers num_attention_heads num_heads n_heads encoder_attention_heads decoder_attention_heads "
    "index_n_heads linear_num_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "eos_token_id",
    1: "num_key_value_heads linear_num_key_heads first_k_dense_replace num_dense_layers n_group topk_group "
    "num_expert_group n_shared_experts bos_token_id",
    0: "pad_token_id",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}
SIZES["tie_word_embeddings"] = False
OF_TEXT = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size", "num_experts_per_tok", "pad_token_id"),
)
TEXT = {name: SIZES[name] for name in OF_TEXT}
LINEAR_SIZES = {
    name: SIZES[name]
    for name in (
        *("shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim"),
    )
}
LATENT = {  # attention with as many key heads as heads; fewer are read otherwise once padding is masked
    **{name: SIZES[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")},
    **{"v_head_dim": 8, "head_dim": 4, "num_key_value_heads": 2},
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 16,
    "patch_size": 4,
}
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
QWEN_VL = {
    "text_config": {**TEXT, "num_experts": 4},
    "vision_config": {**VISION, "deepstack_visual_indexes": [0]},
}
# What a model_type needs beyond small sizes: dense layers, biases, shared experts, so that every tensor is
# there.
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "qwen2_moe": {"num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3_vl_moe": QWEN_VL,
    "qwen3_5_moe": {
        **QWEN_VL,
        "text_config": {
            **QWEN_VL["text_config"],
            **LINEAR_SIZES,
            "layer_types": LINEAR,
        },
    },
    "glm4v_moe": {
        "text_config": {
            **TEXT,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "rope_parameters": MROPE,
        },
        "vision_config": VISION,
    },
    "llama4": {
        "text_config": {
            **TEXT,
            "num_local_experts": 4,
            "intermediate_size_mlp": 28,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
    },
    "llama4_text": {"moe_layers": [0, 2]},
    "gpt_oss": {"intermediate_size": 16},  # square, as the released models are
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 1e4},
        "max_seq_len": 64,
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
    },
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "layer_types": ["mamba", "attention", "mamba"],
    },
    "ernie4_5_moe": {"num_hidden_layers": 5, "moe_layer_interval": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "router_bias": True},
    "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 4},
    # latent attention has as many key heads as heads; fewer are read otherwise once padding is masked
    "deepseek_v2": {"num_key_value_heads": 2},
    "deepseek_v3": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "head_dim": 4,
        "num_key_value_heads": 2,
    },
    "deepseek_v32": {"head_dim": 4, "num_key_value_heads": 2},
    "axk1": {"head_dim": 4, "num_key_value_heads": 2},
    "glm4_moe_lite": {"num_key_value_heads": 2},
    "mistral4": {
        "head_dim": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "kimi_k25": {
        "text_config": {
            **TEXT,
            "model_type": "deepseek_v3",
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            **LATENT,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
    },
    "glm_moe_dsa": {"head_dim": 4, "num_key_value_heads": 2},
    "glm4v_moe_text": {"rope_parameters": MROPE},
    "qwen3_next": {"layer_types": LINEAR},
    "qwen3_5_moe_text": {"layer_types": LINEAR},
    "bailing_hybrid": {"layer_types": LINEAR, "num_key_value_heads": 2},
    "kimi_linear": {"layer_types": LINEAR, "num_key_value_heads": 2},
}


@dataclass
class Seen:
    """One MoE block, and what it was given and gave when the model ran."""

    path: str
    block: nn.Module
    layer: nn.Module
    experts: nn.Module
    inputs: tuple[Tensor, ...] = ()  # of the experts module
    output: Tensor | None = None
    x_TD: Tensor | None = None  # what the block was given
    router_gave: tuple[Tensor, ...] = ()
    shared: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # what the shared expert and its gate were given, and gave


@dataclass
class TinyModel:
    kind: str
    model: Any
    blocks: list[Seen]
    norms: list[tuple[nn.Module, Tensor, Tensor]] = field(
        default_factory=list
    )  # each norm that ran, its input and output

    def save(self, folder: Path, form: str) -> Path:
        """As save_pretrained writes it, or as the model lies in memory."""
        if form == "saved":
            self.model.save_pretrained(folder)
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model.config.save_pretrained(folder)
        tensors = {name: tensor.contiguous().clone() for name, tensor in self.model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def config(self, folder: Path) -> dict[str, Any]:
        return json.loads((folder / "config.json").read_text())


def model_class(config: Any) -> Any:
    from transformers.models.auto import modeling_auto as auto

    nested = hasattr(config, "text_config")
    for mapping in (
        *([auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] if nested else []),
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    raise LookupError(f"no model class for {type(config).__name__}")


def tiny_model(kind: str) -> TinyModel:
    """The model of that type, perturbed so that no one or zero hides an error, after one forward pass.

    A copy of its own.
    """
    return copy.deepcopy(made_once(kind))


@functools.cache
def made_once(kind: str) -> TinyModel:
    from transformers import CONFIG_MAPPING
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config_class = CONFIG_MAPPING[kind]
    nested = "text_config" in MORE.get(kind, {})
    known = {} if nested else config_class().to_dict()
    config = config_class(
        **{name: size for name, size in SIZES.items() if name in known} | MORE.get(kind, {})
    )
    if kind == "llama4":
        config.pad_token_id = 0
    torch.manual_seed(0)
    model = model_class(config)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.4)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():
                buffer.add_(0.1 * torch.randn_like(buffer))
    tiny = TinyModel(kind, model, find_blocks(model))
    run(tiny)
    return tiny


def find_blocks(model: nn.Module) -> list[Seen]:
    """Every routed-experts module with the block around it and the layer around that."""
    modules = dict(model.named_modules())
    found = []
    for path, module in modules.items():
        if type(module).__name__.endswith("Experts"):
            block = path.rsplit(".", 1)[0]
            found.append(Seen(path, modules[block], modules[block.rsplit(".", 1)[0]], module))
    return found


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    parts = value if isinstance(value, tuple | list) else (value,)
    return tuple(part.detach().clone() for part in parts if isinstance(part, Tensor))


def output_of(model: Any) -> Tensor:
    """What the model says to twelve tokens: logits, or hidden states where it has no head."""
    tokens = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": tokens.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model(input_ids=tokens, **more)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def run(tiny: TinyModel) -> None:
    hooks = []
    for seen in tiny.blocks:

        def keep_experts(module, args, kwargs, output, seen=seen):
            seen.inputs, seen.output = tensors_in((*args, *kwargs.values())), output.detach().clone()

        def keep_block(module, args, kwargs, seen=seen):
            seen.x_TD = tensors_in((*args, *kwargs.values()))[0]

        def keep_router(module, args, output, seen=seen):
            seen.router_gave = tensors_in(output)

        hooks.append(seen.experts.register_forward_hook(keep_experts, with_kwargs=True))
        hooks.append(seen.block.register_forward_pre_hook(keep_block, with_kwargs=True))
        for part, module in shared_of(seen).items():

            def keep_shared(module, args, output, seen=seen, part=part):
                seen.shared[part] = tensors_in((args[0], output))

            hooks.append(module.register_forward_hook(keep_shared))
        owner, _ = router_of(seen)
        hooks.append(owner.register_forward_hook(keep_router))
    for module in tiny.model.modules():
        if "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None:
            hooks.append(
                module.register_forward_hook(
                    lambda module, args, output: tiny.norms.append((module, *tensors_in((args[0], output))))
                )
            )
    output_of(tiny.model)
    for hook in hooks:
        hook.remove()


# --- the model's own tensors, found without moescope


def router_of(seen: Seen) -> tuple[nn.Module, Tensor]:
    """The module that owns the router's weight, and the weight.

    The block's only [E, D] matrix outside its experts.
    """
    n_experts = own_experts(seen.experts)["gate"].shape[0]
    found = [
        (module, module.weight)
        for name, module in seen.block.named_modules()
        if "expert" not in name and isinstance(getattr(module, "weight", None), Tensor)
        if module.weight.dim() == 2 and module.weight.shape[0] == n_experts
    ]
    assert len(found) == 1
    return found[0]


def own_experts(experts: nn.Module) -> dict[str, Tensor]:
    """Every expert tensor as [E, out, in], by how each class of transformers multiplies with it."""
    name = type(experts).__name__
    if isinstance(experts, nn.ModuleDict):  # NLLB, Switch
        lower, upper = ("fc1", "fc2") if name.startswith("Nllb") else ("wi", "wo")
        linears = {
            part: [getattr(expert, part) for expert in experts.values() if hasattr(expert, part)]
            for part in (lower, upper)
        }
        found = {
            "gate": torch.stack([linear.weight for linear in linears[lower]]),
            "down": torch.stack([linear.weight for linear in linears[upper]]),
        }
        if name.startswith("Nllb"):
            found["gate_bias"] = torch.stack([linear.bias for linear in linears[lower]])
            found["down_bias"] = torch.stack([linear.bias for linear in linears[upper]])
    elif name.startswith("Dbrx"):
        gate, up, down = (
            weight.view(experts.num_experts, -1, experts.hidden_size)
            for weight in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2)
        )
        found = {"gate": gate, "up": up, "down": down.transpose(1, 2)}
    elif name.startswith("GptOss"):
        both, bias = experts.gate_up_proj.transpose(1, 2), experts.gate_up_proj_bias
        found = {
            "gate": both[:, 0::2],
            "up": both[:, 1::2],
            "down": experts.down_proj.transpose(1, 2),
            "gate_bias": bias[:, 0::2],
            "up_bias": bias[:, 1::2],
            "down_bias": experts.down_proj_bias,
        }
    elif name.startswith("Llama4"):
        gate, up = experts.gate_up_proj.transpose(1, 2).chunk(2, dim=1)
        found = {"gate": gate, "up": up, "down": experts.down_proj.transpose(1, 2)}
    else:
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        found = {"gate": gate, "up": up, "down": experts.down_proj}
    return {part: tensor.detach() for part, tensor in found.items()}


def shared_of(seen: Seen) -> dict[str, nn.Module]:
    """The shared expert's module and the gate in front of it; empty where there is none."""
    found: dict[str, nn.Module] = {}
    for name, module in seen.layer.named_modules():
        if "shared" in name and (hasattr(module, "output_linear") or hasattr(module, "down_proj")):
            found["expert"] = module
        elif name.endswith("shared_expert_gate"):
            found["front"] = module
    return found


def own_shared(seen: Seen) -> dict[str, Tensor]:
    """The shared expert's matrices and the gate in front of it; empty where there is none."""
    modules = shared_of(seen)
    expert: Any = modules.get("expert")
    found: dict[str, Tensor] = {}
    if hasattr(expert, "output_linear"):
        gate, up = expert.input_linear.weight.chunk(2)
        found = {"gate": gate, "up": up, "down": expert.output_linear.weight}
    elif expert is not None:
        found = {part: getattr(expert, f"{part}_proj").weight for part in ("gate", "up", "down")}
    if "front" in modules:
        found["front"] = modules["front"].weight
    return {part: tensor.detach() for part, tensor in found.items()}


def own_biases(seen: Seen) -> dict[str, Tensor]:
    """The router's bias and the bias for choosing, whatever the model calls them."""
    n_experts = own_experts(seen.experts)["gate"].shape[0]
    found = {}
    for name, tensor in (*seen.block.named_parameters(), *seen.block.named_buffers()):
        if name.endswith("bias") and tensor.numel() == n_experts and "experts." not in name:
            found["correction" if "correction" in name or "expert_bias" in name else "router"] = (
                tensor.detach().flatten()
            )
    return found
