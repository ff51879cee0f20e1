"""What is read of a checkpoint: its layers, its words, and how much of it is understood."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import (
    edit_json,
    expert_name,
    router_name,
    saved_model,
    shard_name,
    tiny_checkpoint,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.types import ExpertStack

LAYOUTS = {"mixtral": "mixtral", "qwen3_moe": "mlp_experts"}


def read(folder: Path) -> MoeCheckpoint:
    return read_moe(open_checkpoint(folder))


def stacked(stack: ExpertStack | None) -> torch.Tensor:
    assert stack is not None
    return torch.stack([stack.read(expert) for expert in range(stack.shape[0])])


# Layers 0 and 2 of the last model are dense by the step, layer 3 by name.
SPARSE_STEP = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}


@pytest.mark.parametrize(
    ("family", "config", "dtype", "layers"),
    [
        ("mixtral", {}, torch.float16, {0, 1, 2}),
        ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1, 3]}, torch.bfloat16, {0, 2}),
        ("qwen3_moe", SPARSE_STEP, torch.float32, {1, 5}),
    ],
)
def test_a_model_in_shards_is_read_bit_for_bit_with_the_words_of_its_config(
    tmp_path, family, config, dtype, layers
):
    model = saved_model(tmp_path, family, dtype, **config)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "the checkpoint must be sharded"
    moe = read(tmp_path)
    assert set(moe.layers) == layers
    for layer, weights in moe.layers.items():
        block = model.model.layers[layer].mlp
        gate, up = block.experts.gate_up_proj.detach().chunk(2, dim=1)
        own = {
            "router": (weights.router_ED.read(), block.gate.weight),
            "gate": (stacked(weights.gate_EFD), gate),
            "up": (stacked(weights.up_EFD), up),
            "down": (stacked(weights.down_EDF), block.experts.down_proj),
            "norm": (weights.norm_D.read(), model.model.layers[layer].post_attention_layernorm.weight),
        }
        for what, (ours, theirs) in own.items():
            assert ours.dtype == theirs.dtype == dtype, what
            assert torch.equal(ours, theirs), f"{what} of layer {layer} differs"
        name = f"model.layers.{layer}.{'block_sparse_moe' if family == 'mixtral' else 'mlp'}"
        assert (weights.layer, weights.layer_name) == (layer, name)
        assert (weights.n_experts, weights.d_model) == (4, 16)
        assert weights.d_ff == (24 if family == "mixtral" else 20)
        assert (weights.top_k, weights.scoring, weights.activation) == (2, "softmax", "silu")
        assert weights.norm_offset == 0.0


# --- coverage


def test_coverage_of_a_tiny_mixtral_is_what_a_hand_counts(tmp_path):
    coverage = read(tiny_checkpoint(tmp_path)).coverage
    # A layer: router 4 x 16, norm 16, 4 experts x 3 matrices x 24 x 16. Besides: an embedding of 8 x 16.
    layer = 4 * 16 + 16 + 4 * 3 * 24 * 16
    assert (coverage.family, coverage.layers_found, coverage.layers_expected) == ("mixtral", 2, 2)
    assert coverage.experts_per_layer == (4,)
    assert coverage.parameters_understood == 2 * layer == 9376
    assert coverage.parameters_total == 9376 + 8 * 16
    assert coverage.skipped == {"not part of an MoE block": 1}
    assert coverage.line() == (
        "mixtral: 2 MoE layers of 2 expected, 4 experts per layer, 9,376 of 9,504 parameters "
        "in MoE blocks (98.7%); "
        "1 tensors skipped: not part of an MoE block"
    )


def test_coverage_of_a_real_model_counts_its_dense_layers_as_skipped(tmp_path):
    model = saved_model(tmp_path, "qwen3_moe", **SPARSE_STEP)
    coverage = read(tmp_path).coverage
    assert (coverage.layers_found, coverage.layers_expected) == (2, 2)
    assert coverage.parameters_total == sum(parameter.numel() for parameter in model.parameters())
    assert coverage.parameters_understood == 2 * (4 * 16 + 16 + 4 * 3 * 20 * 16)
    # Embedding, head, last norm; 6 x (q, k, v, o, q_norm, k_norm, input norm); 4 dense x (gate, up, down,
    # second norm).
    assert coverage.skipped == {"not part of an MoE block": 3 + 6 * 7 + 4 * 4}


def test_multi_token_prediction_layers_are_skipped_and_counted(tmp_path):
    tensors = tiny_tensors(family="qwen3_moe")
    extra = {f"mtp.layers.0.mlp.experts.{expert}.gate_proj.weight": torch.ones(24, 16) for expert in range(4)}
    extra["mtp.layers.0.mlp.gate.weight"] = torch.ones(4, 16)
    moe = read(write_checkpoint(tmp_path, {**tensors, **extra}, tiny_config(family="qwen3_moe")))
    assert set(moe.layers) == {0, 1}
    assert torch.equal(moe.layers[0].router_ED.read(), tensors[router_name(0, "qwen3_moe")])
    assert moe.coverage.skipped == {"not part of an MoE block": 1, "multi-token prediction": 5}


def test_a_layer_beyond_the_last_is_a_multi_token_prediction_head_not_a_layer(tmp_path):
    tensors = tiny_tensors(layers=3, family="qwen3_moe")
    config = tiny_config(family="qwen3_moe") | {"model_type": "deepseek_v3", "first_k_dense_replace": 0}
    moe = read(write_checkpoint(tmp_path, tensors, config))
    assert set(moe.layers) == {0, 1}
    assert moe.coverage.skipped == {"not part of an MoE block": 1, "multi-token prediction": 2 + 4 * 3}


def test_kimi_k2_is_read_as_the_deepseek_v3_it_is(tmp_path):
    config = tiny_config(family="qwen3_moe") | {"model_type": "kimi_k2", "first_k_dense_replace": 0}
    tensors = tiny_tensors(family="qwen3_moe")
    bias = torch.arange(4.0)
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = bias
    layers = read(write_checkpoint(tmp_path, tensors, config)).layers
    assert (layers[1].scoring, layers[1].top_k) == ("sigmoid", 2)
    assert layers[0].correction_bias_E is None
    assert torch.equal(layers[1].correction_bias_E.read(), bias)


def test_counts_may_be_lists_with_an_entry_a_layer(tmp_path):
    tensors = {
        name.replace("mlp.gate.weight", "mlp.gate.wg.weight"): tensor
        for name, tensor in tiny_tensors(family="qwen3_moe").items()
    }
    config = {
        "model_type": "hunyuan_v1_moe",
        "num_hidden_layers": 2,
        "num_experts": [4, 4],
        "moe_topk": [1, 2],
    }
    layers = read(write_checkpoint(tmp_path, tensors, config)).layers
    assert [weights.top_k for weights in layers.values()] == [1, 2]


def test_a_language_model_within_another_is_known_by_its_own_type(tmp_path):
    inner = tiny_config(family="qwen3_moe") | {"model_type": "deepseek_v3", "first_k_dense_replace": 0}
    folder = write_checkpoint(
        tmp_path, tiny_tensors(family="qwen3_moe"), {"model_type": "kimi_k25", "text_config": inner}
    )
    moe = read(folder)
    assert moe.layers[0].scoring == "sigmoid"
    assert (moe.coverage.family, moe.coverage.layers_expected) == ("kimi_k25", 2)


def fused(tensors: dict[str, torch.Tensor], transposed: bool) -> dict[str, torch.Tensor]:
    """The experts of tiny Qwen tensors in two tensors a layer.

    The released Qwen3-VL's way round or transformers'.
    """
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(2):
        gate, up, down = (
            torch.stack([tensors[expert_name(layer, expert, matrix, "qwen3_moe")] for expert in range(4)])
            for matrix in ("gate", "up", "down")
        )
        both = torch.cat([gate, up], 1)
        out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = both.mT.contiguous() if transposed else both
        out[f"model.layers.{layer}.mlp.experts.down_proj"] = down.mT.contiguous() if transposed else down
    return out


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "d_ff", [8, 16, 24, 32]
)  # with d_model 16: 2F = D, F = D, and F = 2D look most alike
def test_fused_experts_are_told_from_transposed_ones_by_both_shapes(tmp_path, d_ff, transposed):
    tensors = tiny_tensors(family="qwen3_moe", d_ff=d_ff)
    moe = read(write_checkpoint(tmp_path, fused(tensors, transposed), tiny_config(family="qwen3_moe")))
    for layer, weights in moe.layers.items():
        stacks = {"gate": weights.gate_EFD, "up": weights.up_EFD, "down": weights.down_EDF}
        for matrix, stack in stacks.items():
            for expert in range(4):
                assert torch.equal(
                    stack.read(expert), tensors[expert_name(layer, expert, matrix, "qwen3_moe")]
                )


def test_one_shard_alone_may_be_looked_at_and_coverage_says_how_little_it_is(tmp_path):
    tensors = tiny_tensors()
    folder = write_checkpoint(
        tmp_path, {name: tensor for name, tensor in tensors.items() if "layers.1" not in name}, tiny_config()
    )
    coverage = read(folder / "model.safetensors").coverage
    assert (coverage.layers_found, coverage.layers_expected) == (1, 2)
    assert "1 MoE layers of 2 expected" in coverage.line()


# --- names first, config second


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_checkpoint_without_a_config_is_read_from_its_names(tmp_path, family):
    moe = read(write_checkpoint(tmp_path, tiny_tensors(family=family)))
    assert moe.family.name == LAYOUTS[family]
    assert moe.coverage.family == f"{LAYOUTS[family]} layout"
    assert moe.coverage.layers_expected is None
    assert "an unknown number" in moe.coverage.line()
    assert (moe.layers[0].top_k, moe.layers[0].scoring, moe.layers[0].activation) == (None, "unknown", None)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_an_unknown_model_type_with_known_names_works_and_says_which_layout_it_took(tmp_path, family):
    folder = tiny_checkpoint(tmp_path, family=family)
    edit_json(folder / "config.json", model_type="newcomer", num_hidden_layers=40)
    moe = read(folder)
    assert moe.coverage.line().startswith(
        f"{LAYOUTS[family]} layout, model_type newcomer: 2 MoE layers of an unknown number expected"
    )
    assert moe.layers[0].scoring == "unknown", "nobody has said that a newcomer's router is a softmax"


def test_names_outweigh_a_config_that_claims_another_family(tmp_path):
    folder = tiny_checkpoint(tmp_path, family="qwen3_moe")
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    assert read(folder).family.name == "mlp_experts"


def test_layers_stand_in_the_order_of_their_numbers_not_of_their_names(tmp_path):
    assert list(read(tiny_checkpoint(tmp_path, layers=12, experts=2, d_model=4, d_ff=4)).layers) == list(
        range(12)
    )


def test_another_prefix_of_the_layers_is_found(tmp_path):
    tensors = {
        name.replace("model.layers", "model.language_model.layers"): tensor
        for name, tensor in tiny_tensors().items()
    }
    moe = read(write_checkpoint(tmp_path, tensors, tiny_config()))
    assert moe.layers[1].layer_name == "model.language_model.layers.1.block_sparse_moe"
    assert moe.layers[1].norm_D is not None


# --- laziness


def test_reading_the_layout_touches_no_tensor_data(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    raw = bytearray((folder / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    raw[header:] = b"\xff" * (len(raw) - header)  # every float a NaN
    (folder / "model.safetensors").write_bytes(raw)
    moe = read(folder)
    assert set(moe.layers) == {0, 1}
    assert moe.layers[0].router_ED.read().isnan().all()


def test_one_expert_is_read_without_the_shards_of_the_others(tmp_path):
    tensors = tiny_tensors()
    own = {name: tensor for name, tensor in tensors.items() if ".experts.1." not in name}
    others = {name: tensor for name, tensor in tensors.items() if ".experts.1." in name}
    save_file(own, tmp_path / shard_name(0, 2))
    save_file(others, tmp_path / shard_name(1, 2))
    gate = read(tmp_path).layers[0].gate_EFD
    (tmp_path / shard_name(1, 2)).unlink()
    assert torch.equal(gate.read(0), tensors[expert_name(0, 0, "gate")])
    with pytest.raises(BadInput, match="cannot read tensor"):
        gate.read(1)
