"""FP8 and plain INT8.

Blocks by hand, ragged ones too, and whole models as transformers and compressed-tensors read them.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.quantised.builders import (
    compress,
    compressed_config,
    decompress,
    fp8_checkpoint,
    quantise_fp8,
    qwen,
    repack,
    scheme_of,
)
from checkpoints import expert_name, saved_model
from families.tiny_models import own_experts
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe

NAME = expert_name(1, 2, "gate", "qwen3_moe")
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
E4M3 = torch.float8_e4m3fn


def stored(folder, tensors, block=None):
    save_file(tensors, folder / "model.safetensors")
    if block:
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
        (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def ones(*shape):
    return torch.ones(shape).to(E4M3)


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- by hand


def test_each_value_is_multiplied_by_the_scale_of_its_block_and_the_last_blocks_are_what_is_left(tmp_path):
    scale = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 11.0]])
    checkpoint = stored(tmp_path, {"x.weight": ones(5, 7), "x.weight_scale_inv": scale}, block=(3, 3))
    got = checkpoint.read("x.weight")
    assert got.dtype == torch.float32
    assert got.tolist() == [[1, 1, 1, 2, 2, 2, 3]] * 3 + [[5, 5, 5, 7, 7, 7, 11]] * 2


def test_every_code_of_e4m3_has_its_value(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    checkpoint = stored(
        tmp_path, {"x.weight": codes.view(E4M3), "x.weight_scale_inv": torch.full((1, 1), 0.5)}
    )
    got = checkpoint.read("x.weight").flatten()
    for code in range(256):
        sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert got[code].isnan()
            continue
        value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        assert got[code].item() == 0.5 * sign * value


def test_blocks_are_128_by_128_where_no_config_says(tmp_path):
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = stored(tmp_path, {"x.weight": ones(130, 200), "x.weight_scale_inv": scale}).read("x.weight")
    assert (got[127, 127], got[127, 128], got[128, 127], got[128, 128]) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (torch.tensor(3.0), [[3, 3], [3, 3]]),
        (torch.tensor([3.0]), [[3, 3], [3, 3]]),
        (torch.tensor([[3.0], [5.0]]), [[3, 3], [5, 5]]),
        (torch.tensor([3.0, 5.0]), [[3, 3], [5, 5]]),
    ],
    ids=["one", "one of one axis", "a row", "a row of one axis"],
)
@pytest.mark.parametrize("name", ["x.weight_scale_inv", "x.weight_scale", "x.scale", "x.qscale_weight"])
def test_one_scale_for_all_or_one_a_row_is_read_under_each_name(tmp_path, scale, expected, name):
    checkpoint = stored(tmp_path, {"x.weight": ones(2, 2), name: scale})
    assert checkpoint.read("x.weight").tolist() == expected
    assert set(checkpoint.tensors) == {"x.weight"}


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_scales_may_be_exponents_of_two(tmp_path, dtype):
    exponents = torch.tensor([[127, 128], [126, 0]], dtype=torch.uint8)
    scale = exponents if dtype == "U8" else exponents.view(torch.float8_e8m0fnu)
    checkpoint = stored(
        tmp_path, {"x.weight": ones(2, 64), "x.weight_scale": scale}
    )  # MXFP8: 32 columns a scale
    assert checkpoint.read("x.weight")[:, ::32].tolist() == [[1, 2], [0.5, 2.0**-127]]


@pytest.mark.parametrize(
    "scale", [torch.tensor([2.0, 3.0]), torch.tensor([[[2.0]], [[3.0]]])], ids=["[E]", "[E, 1, 1]"]
)
def test_an_expert_of_a_stack_may_have_one_scale(tmp_path, scale):
    checkpoint = stored(tmp_path, {"experts.up": ones(2, 3, 4), "experts.up_scale_inv": scale})
    assert checkpoint.read("experts.up", 1).unique().tolist() == [3]
    assert checkpoint.read("experts.up")[:, 0, 0].tolist() == [2, 3]


def test_transposed_experts_may_have_a_scale_a_column(tmp_path):
    scale = torch.arange(1.0, 9.0).reshape(2, 1, 4)  # as Llama 4 has it: [E, D, 2F] and [E, 1, 2F]
    checkpoint = stored(
        tmp_path, {"experts.gate_up_proj": ones(2, 3, 4), "experts.gate_up_proj_scale": scale}
    )
    assert checkpoint.read("experts.gate_up_proj", 1).tolist() == [[5, 6, 7, 8]] * 3
    assert checkpoint.packed["experts.gate_up_proj"].scheme == "FP8 with one scale per column"


def test_gate_and_up_that_were_scaled_apart_keep_their_own_scales_when_fused(tmp_path):
    scale = torch.tensor(
        [[[2.0], [3.0]]]
    )  # 2F = 12 rows fit one block of 16; transformers keeps a scale for either half
    checkpoint = stored(
        tmp_path,
        {"experts.gate_up_proj": ones(1, 12, 8), "experts.gate_up_proj_scale_inv": scale},
        block=(16, 16),
    )
    assert checkpoint.read("experts.gate_up_proj", 0)[:, 0].tolist() == [2] * 6 + [3] * 6


# --- transformers as the judge


def test_experts_are_those_of_the_model_that_transformers_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    tensors = fp8_checkpoint(tmp_path)
    assert tensors[NAME].dtype == E4M3
    assert tensors[f"{NAME}_scale_inv"].shape == (2, 4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # on a processor it dequantises, to bfloat16
    moe = read_moe(open_checkpoint(tmp_path))
    assert set(moe.layers) == {0, 1, 2}
    for number, weights in moe.layers.items():
        own = own_experts(model.model.layers[number].mlp.experts)
        for part, stack in {"gate": weights.gate_EFD, "up": weights.up_EFD, "down": weights.down_EDF}.items():
            assert stack.dtype == "F8_E4M3"
            for expert in range(4):
                # transformers rounds to the model's dtype what it, too, multiplies in float32
                assert torch.equal(stack.read(expert).bfloat16(), own[part][expert]), (number, part, expert)
    assert moe.coverage.parameters_total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", [(32, 48), (3, 32, 48)], ids=["one matrix", "a stack"])
@pytest.mark.parametrize("block", [(16, 16), (32, 16), None], ids=str)
def test_values_are_bit_equal_to_transformers_dequantising(tmp_path, shape, block):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    name = "x.weight" if len(shape) == 2 else "experts.gate_up_proj"
    tensors = quantise_fp8(name, drawn(*shape), block)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors[name], tensors[f"{name}_scale_inv"], torch.float32)
    assert torch.equal(stored(tmp_path, tensors, block).read(name), theirs)


@pytest.mark.parametrize("shape", [(200, 300), (2, 130, 257), (128, 384)], ids=str)
def test_ragged_blocks_are_bit_equal_to_transformers_own(tmp_path, shape):
    from transformers.integrations import finegrained_fp8

    if not hasattr(finegrained_fp8, "_dequantize_fp8_weight"):
        pytest.skip("transformers before 5.22 has no function for ragged blocks")
    weight = drawn(*shape).to(E4M3)
    scale = drawn(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)).abs()
    theirs = finegrained_fp8._dequantize_fp8_weight(weight, scale, [128, 128], torch.float32)
    assert torch.equal(
        stored(tmp_path, {"x.weight": weight, "x.weight_scale_inv": scale}).read("x.weight"), theirs
    )


def test_the_tensors_of_transformers_fused_experts_have_the_shapes_that_are_read(tmp_path):
    """What FP8Experts holds, and so saves.

    Both scales for gate_up even where one block would hold all its rows.
    """
    from transformers import Qwen3MoeConfig
    from transformers.integrations.finegrained_fp8 import FP8Experts

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=24, num_experts=4)
    for block in ((16, 16), (128, 128)):
        held = FP8Experts(config, block_size=block).state_dict()
        tensors = {
            f"model.layers.1.mlp.experts.{name}": tensor.float().fill_(1.0).to(tensor.dtype)
            for name, tensor in held.items()
        }
        checkpoint = stored(tmp_path, tensors, block)
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            FUSED: (4, 48, 64),
            FUSED.replace("gate_up", "down"): (4, 64, 24),
        }
        for name in checkpoint.tensors:
            assert checkpoint.read(name, 3).unique().tolist() == [1]


def test_fused_experts_are_read_as_the_same_experts_one_by_one(tmp_path):
    fp8_checkpoint(tmp_path / "each")
    each = read_moe(open_checkpoint(tmp_path / "each"))
    fp8_checkpoint(tmp_path / "fused")
    file = tmp_path / "fused" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [tensors.pop(f"{stem}.{e}.{part}") for e in range(4)]
            for matrix in ("gate", "up", "down")
            for part in (f"{matrix}_proj.weight", f"{matrix}_proj.weight_scale_inv")
        }
        for ending, fused in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            both = zip(parts[f"gate_proj.{ending}"], parts[f"up_proj.{ending}"], strict=True)
            tensors[f"{stem}.gate_up_proj{fused}"] = torch.stack([torch.cat(pair) for pair in both])
            tensors[f"{stem}.down_proj{fused}"] = torch.stack(parts[f"down_proj.{ending}"])
    save_file(tensors, file, metadata={"format": "pt"})
    fused_moe = read_moe(open_checkpoint(tmp_path / "fused"))
    for number, weights in fused_moe.layers.items():
        for stack, other in (
            (weights.gate_EFD, each.layers[number].gate_EFD),
            (weights.up_EFD, each.layers[number].up_EFD),
            (weights.down_EDF, each.layers[number].down_EDF),
        ):
            assert stack.names != other.names
            for expert in range(4):
                assert torch.equal(stack.read(expert), other.read(expert))
    assert fused_moe.coverage.parameters_total == each.coverage.parameters_total


@pytest.mark.parametrize("index", [0, -1, slice(1, 3), slice(2, None), None], ids=str)
def test_a_part_of_a_stack_is_read_from_its_own_values_and_scales_alone(tmp_path, index):
    tensors = quantise_fp8("experts.up", drawn(4, 32, 32), (16, 16))
    checkpoint = stored(tmp_path, tensors, (16, 16))
    asked = []

    def read_part(name, index):
        asked.append((name, index))
        return checkpoint.read_stored(name, index)

    whole = checkpoint.read("experts.up")
    got = checkpoint.packed["experts.up"].read(read_part, index)
    assert torch.equal(got, whole if index is None else whole[index])
    assert asked == [("experts.up", index), ("experts.up_scale_inv", index)]


@pytest.mark.parametrize("index", [0, 129, slice(100, 140), slice(128, 200)], ids=str)
def test_rows_of_a_matrix_keep_the_scales_of_their_own_blocks(tmp_path, index):
    tensors = {"x.weight": drawn(200, 150).to(E4M3), "x.weight_scale_inv": drawn(2, 2)}
    checkpoint = stored(tmp_path, tensors)
    assert torch.equal(checkpoint.read("x.weight", index), checkpoint.read("x.weight")[index])


# --- compressed-tensors as the judge


@pytest.mark.parametrize(
    ("kind", "strategy", "group_size", "symmetric"),
    [
        ("float", "channel", None, True),
        ("float", "tensor", None, True),
        ("int", "channel", None, True),
        ("int", "channel", None, False),
        ("int", "tensor", None, True),
        ("int", "group", 16, True),
    ],
)
def test_eight_bits_that_are_not_packed_are_what_compressed_tensors_makes_of_them(
    tmp_path, kind, strategy, group_size, symmetric
):
    form = "float-quantized" if kind == "float" else "int-quantized"
    scheme = scheme_of(8, group_size, symmetric, kind, form, strategy)
    tensors = repack(
        qwen(tmp_path), lambda name, tensor: compress(name, tensor, scheme), compressed_config(scheme)
    )
    assert tensors[NAME].dtype == (E4M3 if kind == "float" else torch.int8)
    assert (f"{NAME}_zero_point" in tensors) == (not symmetric)
    stack = read_moe(open_checkpoint(tmp_path)).layers[1].gate_EFD
    theirs = decompress(NAME, tensors, scheme)
    assert theirs.dtype == torch.bfloat16
    assert torch.equal(stack.read(2).bfloat16(), theirs)


# --- what is not whole


@pytest.mark.parametrize(
    ("scale", "said"),
    [
        (None, f"tensor {NAME} is FP8, but its scale {NAME}_scale_inv is missing; download"),
        (torch.ones(4, 2), f"{NAME}_scale_inv has shape [4, 2], expected [2, 4]"),
        (
            torch.ones(2, 4, dtype=torch.int64),
            f"{NAME}_scale_inv has shape [2, 4], expected [2, 4] of floats",
        ),
    ],
    ids=["no scale", "turned", "integers"],
)
def test_what_is_not_whole_is_refused_by_name_before_any_tensor_is_read(tmp_path, scale, said):
    tensors = fp8_checkpoint(tmp_path)
    tensors[f"{NAME}_scale_inv"] = scale
    file = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    with pytest.raises(BadInput) as caught:
        read_moe(open_checkpoint(tmp_path))
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


def test_a_quantised_tensor_that_no_layer_uses_may_be_in_any_form(tmp_path):
    tensors = fp8_checkpoint(tmp_path)
    tensors["vision.patch.weight"] = ones(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert len(read_moe(checkpoint).layers) == 3
    with pytest.raises(BadInput, match=r"tensor vision\.patch\.weight is FP8, but its scale"):
        checkpoint.read("vision.patch.weight")


def test_scales_for_activations_are_not_counted_as_parameters(tmp_path):
    tensors = {
        "x.weight": ones(2, 2),
        "x.weight_scale_inv": torch.ones(1, 1),
        "x.activation_scale": torch.ones(1),
        "x.input_scale": torch.ones(1),
    }
    assert set(stored(tmp_path, tensors).tensors) == {"x.weight"}


def test_a_plain_model_is_left_as_it_is(tmp_path):
    saved_model(tmp_path, "mixtral", max_shard_size="1GB")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.packed == {}
    assert checkpoint.tensors == checkpoint.stored
