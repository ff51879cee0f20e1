"""MXFP4.

Each code, each exponent and each place by hand, and whole models as transformers dequantises them.
"""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint.quantised.builders import (
    compress,
    compressed_config,
    decompress,
    gpt_oss_checkpoint,
    qwen,
    repack,
    scheme_of,
)
from checkpoints import expert_name
from families.tiny_models import own_experts
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def read(folder, blocks, scales, index=None):
    save_file({"x_blocks": blocks, "x_scales": scales}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    return checkpoint.read("x") if index is None else checkpoint.read("x", index)


def test_all_sixteen_codes_have_their_value_low_half_first(tmp_path):
    low_first = [code | (15 - code) << 4 for code in range(16)]  # codes 0 and 15, 1 and 14, ...
    blocks = torch.tensor(low_first, dtype=torch.uint8).reshape(1, 1, 1, 16)
    got = read(tmp_path, blocks, torch.full((1, 1, 1), 127, dtype=torch.uint8))
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = positive + [-value for value in positive]
    expected = torch.tensor([value for code in range(16) for value in (values[code], values[15 - code])])
    assert got.dtype == torch.float32
    assert torch.equal(got, expected.reshape(1, 1, 32))
    assert torch.signbit(got[0, 0, 16]), "code 8 is minus zero"


def test_every_exponent_is_a_power_of_two_and_the_last_is_not_a_number(tmp_path):
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1)
    blocks = torch.full((1, 256, 1, 16), 0x22, dtype=torch.uint8)  # all ones
    got = read(tmp_path, blocks, scales)[0, :, 0]
    for exponent in range(255):
        assert got[exponent].item() == math.ldexp(1.0, exponent - 127)
    assert got[255].isnan()


def test_a_scale_belongs_to_its_own_thirty_two_columns(tmp_path):
    blocks = torch.full((1, 2, 2, 16), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[[127, 128], [129, 130]]], dtype=torch.uint8)
    got = read(tmp_path, blocks, scales)[0]
    assert torch.equal(got, torch.tensor([[1.0, 2.0], [4.0, 8.0]]).repeat_interleave(32, 1))


@pytest.mark.parametrize("d_ff", [64, 96], ids=["square", "wide"])
def test_experts_are_bit_equal_to_the_model_that_transformers_loads(tmp_path, d_ff):
    from transformers import AutoModelForCausalLM

    gpt_oss_checkpoint(tmp_path, d_ff=d_ff)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # on a processor it dequantises, to bfloat16
    moe = read_moe(open_checkpoint(tmp_path))
    assert set(moe.layers) == {0, 1}
    for number, weights in moe.layers.items():
        own = own_experts(model.model.layers[number].mlp.experts)
        for part, stack in {"gate": weights.gate_EFD, "up": weights.up_EFD, "down": weights.down_EDF}.items():
            assert stack.dtype == "MXFP4"
            for expert in range(3):
                assert torch.equal(stack.read(expert), own[part][expert].float()), (number, part, expert)
        assert weights.gate_EFD.read(0).unique().numel() > 50, "equal zeros would prove nothing"
        assert torch.equal(weights.up_bias_EF.read(1).float(), own["up_bias"][1].float())
    assert moe.checkpoint.tensors[GATE_UP].shape == (3, 2 * d_ff, 64)
    assert moe.coverage.parameters_total == sum(parameter.numel() for parameter in model.parameters())


def test_the_whole_tensor_is_what_transformers_own_function_gives_but_for_its_turn(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored = gpt_oss_checkpoint(tmp_path, d_ff=96)
    theirs = convert_moe_packed_tensors(
        stored[f"{GATE_UP}_blocks"], stored[f"{GATE_UP}_scales"], dtype=torch.float32
    )
    assert torch.equal(open_checkpoint(tmp_path).read(GATE_UP), theirs.transpose(1, 2))


@pytest.mark.parametrize("index", [0, 2, -1, slice(1, 3), slice(0, 1), None], ids=str)
def test_an_expert_is_decoded_from_its_own_blocks_and_scales_alone(tmp_path, index):
    gpt_oss_checkpoint(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    asked = []

    def read_part(name, index):
        asked.append((name, index))
        return checkpoint.read_stored(name, index)

    whole = checkpoint.read(GATE_UP)
    got = checkpoint.packed[GATE_UP].read(read_part, index)
    assert torch.equal(got, whole if index is None else whole[index])
    assert asked == [(f"{GATE_UP}_blocks", index), (f"{GATE_UP}_scales", index)]


def test_compressed_tensors_packing_of_the_same_format_is_read_too(tmp_path):
    scheme = scheme_of(kind="float", form="mxfp4-pack-quantized", scale_dtype="torch.uint8")

    def packed(name, tensor):
        return compress(name, tensor, scheme)

    stored = repack(qwen(tmp_path), packed, compressed_config(scheme))
    name = expert_name(1, 2, "down", "qwen3_moe")
    assert stored[f"{name}_packed"].dtype == stored[f"{name}_scale"].dtype == torch.uint8
    weights = read_moe(open_checkpoint(tmp_path)).layers[1]
    theirs = decompress(name, stored, scheme)
    assert weights.down_EDF.dtype == "MXFP4"
    assert torch.equal(weights.down_EDF.read(2), theirs.float())
    assert theirs.unique().numel() > 10
    assert torch.equal(open_checkpoint(tmp_path).read(name, slice(3, 7)), theirs.float()[3:7])


# --- what is not whole


def changed(folder, **changes):
    """The checkpoint with some tensors replaced, or left out where None is given."""
    file = folder / "model.safetensors"
    tensors = {**load_file(file), **{f"{GATE_UP}_{part}": tensor for part, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return folder


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scales": None}, f"tensor {GATE_UP} is MXFP4, but {GATE_UP}_scales is missing; download"),
        (
            {"scales": torch.ones(2, 128, 2, dtype=torch.uint8)},
            f"{GATE_UP}_scales has shape [2, 128, 2], expected [3, 128, 2]",
        ),
        (
            {"blocks": torch.ones(3, 128, 2, 15, dtype=torch.uint8)},
            f"{GATE_UP}_blocks has shape [3, 128, 2, 15], expected [..., 16]",
        ),
        ({"blocks": None}, f"tensor {GATE_UP} is missing; download"),
    ],
    ids=str,
)
def test_what_is_not_whole_is_refused_by_name_before_any_tensor_is_read(tmp_path, changes, said):
    gpt_oss_checkpoint(tmp_path)
    with pytest.raises(BadInput) as caught:
        read_moe(open_checkpoint(changed(tmp_path, **changes)))
    assert str(caught.value).startswith(str(tmp_path))
    assert said in str(caught.value)


def test_a_tensor_stored_both_plain_and_packed_is_refused(tmp_path):
    gpt_oss_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), GATE_UP: torch.ones(3, 64, 128)}, file)
    with pytest.raises(BadInput, match="is stored twice, in two formats; keep one of the two"):
        read_moe(open_checkpoint(tmp_path))
