"""compressed-tensors' packed integers: words by hand, and whole models as the library itself unpacks them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from checkpoint.quantised.builders import (
    compress,
    compressed_checkpoint,
    compressed_config,
    decompress,
    qwen,
    repack,
    scheme_of,
)
from checkpoints import edit_json, expert_name
from families.tiny_models import own_experts
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe

NAME = expert_name(1, 2, "gate", "qwen3_moe")


def stored(folder, tensors, **weights):
    save_file(tensors, folder / "model.safetensors")
    group = {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4, "symmetric": True, **weights}}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return open_checkpoint(folder)


def words(*rows):
    """Rows of hexadecimal words as int32, the sign bit included."""
    return torch.tensor(
        [[word - 2**32 if word >= 2**31 else word for word in row] for row in rows], dtype=torch.int32
    )


# --- by hand


def test_values_stand_lowest_bits_first_around_eight(tmp_path):
    tensors = {
        "x.weight_packed": words([0x76543210, 0xFEDCBA98]),
        "x.weight_scale": torch.tensor([[1.0, 10.0]]),
        "x.weight_shape": torch.tensor([1, 16]),
    }
    checkpoint = stored(tmp_path, tensors, group_size=8)
    assert checkpoint.tensors["x.weight"].shape == (1, 16)
    assert checkpoint.tensors["x.weight"].dtype == "INT4"
    assert set(checkpoint.tensors) == {"x.weight"}
    got = checkpoint.read("x.weight")
    assert got.dtype == torch.float32
    assert got.tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1, 0, 10, 20, 30, 40, 50, 60, 70]]


def test_zero_points_stand_in_words_along_the_rows(tmp_path):
    rows = [[0x88888888]] * 8  # all zeros
    tensors = {
        "x.weight_packed": words(*rows),
        "x.weight_scale": torch.ones(8, 1),
        "x.weight_shape": torch.tensor([8, 8]),
        "x.weight_zero_point": words([0xFEDCBA98]),  # 0, 1, 2, ... of the eight rows
    }
    got = stored(tmp_path, tensors, group_size=8, symmetric=False).read("x.weight")
    assert torch.equal(got, -torch.arange(8.0)[:, None].expand(8, 8))


def test_eight_bits_stand_four_to_a_word_around_128(tmp_path):
    tensors = {
        "x.weight_packed": words([0xFF_80_7F_00]),
        "x.weight_scale": torch.tensor([[2.0]]),
        "x.weight_shape": torch.tensor([1, 4]),
    }
    assert stored(tmp_path, tensors, num_bits=8).read("x.weight").tolist() == [[-256, -2, 0, 254]]


# --- the library as the judge

SCHEMES = {
    "int4 in 32s": scheme_of(4, 32),
    "int4 in 16s with zero points": scheme_of(4, 16, symmetric=False),
    "int4 a row": scheme_of(4, None),
    "int4 a row with zero points": scheme_of(4, None, symmetric=False),
    "int4 one scale": scheme_of(4, None, strategy="tensor"),
    "int8 in 32s": scheme_of(8, 32),
    "int8 in 32s with zero points": scheme_of(8, 32, symmetric=False),
    "int2 in 16s": scheme_of(2, 16),
}


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [*((name, torch.bfloat16) for name in SCHEMES), ("int4 in 32s", torch.float32)],
    ids=str,
)
def test_every_expert_is_what_compressed_tensors_makes_of_it(tmp_path, scheme, dtype):
    scheme = SCHEMES[scheme]
    tensors = compressed_checkpoint(tmp_path, scheme, dtype)
    checkpoint = open_checkpoint(tmp_path)
    for index in (0, 9, slice(3, 20)):
        assert torch.equal(checkpoint.read(NAME, index), checkpoint.read(NAME)[index])
    for number, weights in read_moe(checkpoint).layers.items():
        for part, stack in {"gate": weights.gate_EFD, "up": weights.up_EFD, "down": weights.down_EDF}.items():
            assert stack.dtype == f"INT{scheme.weights.num_bits}"
            for expert in range(4):
                theirs = decompress(expert_name(number, expert, part, "qwen3_moe"), tensors, scheme)
                assert theirs.dtype == dtype
                # the library multiplies in the scale's dtype; the product in float32 is exact, and rounds to
                # the same
                assert torch.equal(stack.read(expert).to(dtype), theirs), (number, part, expert)
                assert theirs.unique().numel() > 3


@pytest.mark.parametrize("scheme", [SCHEMES["int4 in 32s"], SCHEMES["int8 in 32s"]], ids=["int4", "int8"])
def test_experts_are_those_of_the_model_that_transformers_loads(tmp_path, scheme):
    from transformers import AutoModelForCausalLM

    compressed_checkpoint(tmp_path, scheme)
    edit = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    edit_json(tmp_path / "config.json", quantization_config={**edit, "dequantize": True})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    moe = read_moe(open_checkpoint(tmp_path))
    for number, weights in moe.layers.items():
        own = own_experts(model.model.layers[number].mlp.experts)
        for part, stack in {"gate": weights.gate_EFD, "up": weights.up_EFD, "down": weights.down_EDF}.items():
            for expert in range(4):
                assert torch.equal(stack.read(expert).bfloat16(), own[part][expert]), (number, part, expert)
    assert moe.coverage.parameters_total == sum(parameter.numel() for parameter in model.parameters())


def test_a_stack_of_experts_is_read_by_expert(tmp_path):
    scheme = scheme_of(4, 16, symmetric=False)
    each = [compress("x.weight", torch.randn(24, 32), scheme) for _ in range(3)]
    fused = {part: torch.stack([tensors[part] for tensors in each]) for part in each[0]}
    fused["x.weight_shape"] = torch.tensor([3, 24, 32])
    checkpoint = stored(tmp_path, fused, group_size=16, symmetric=False)
    assert checkpoint.tensors["x.weight"].shape == (3, 24, 32)
    for expert, tensors in enumerate(each):
        assert torch.equal(checkpoint.read("x.weight", expert), decompress("x.weight", tensors, scheme))
    assert torch.equal(checkpoint.read("x.weight")[1], checkpoint.read("x.weight", 1))


@pytest.mark.parametrize("first", [0, 1])
def test_each_tensor_is_read_by_the_group_of_the_config_that_names_it(tmp_path, first):
    four, eight = scheme_of(4, 32), scheme_of(8, 16)
    four.targets, eight.targets = ["Linear"], [r"re:.*experts\.\d+\.down_proj$"]

    def packed(name, tensor):
        return compress(name, tensor, eight if "down_proj" in name else four)

    groups = [four, eight] if first == 0 else [eight, four]
    tensors = repack(qwen(tmp_path), packed, compressed_config(*groups))
    weights = read_moe(open_checkpoint(tmp_path)).layers[1]
    assert (weights.gate_EFD.dtype, weights.down_EDF.dtype) == ("INT4", "INT8")
    down = expert_name(1, 2, "down", "qwen3_moe")
    assert torch.equal(weights.gate_EFD.read(2).bfloat16(), decompress(NAME, tensors, four))
    assert torch.equal(weights.down_EDF.read(2).bfloat16(), decompress(down, tensors, eight))


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
def test_the_config_may_stand_where_older_and_nested_models_have_it(tmp_path, place):
    compressed_checkpoint(tmp_path, scheme_of())
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    moved = {"text_config": {"quantization_config": said}} if place == "text_config" else {place: said}
    edit_json(tmp_path / "config.json", quantization_config=None, **moved)
    assert open_checkpoint(tmp_path).tensors[NAME].dtype == "INT4"


# --- what is not whole


def refusal(folder):
    with pytest.raises(BadInput) as caught:
        weights = read_moe(open_checkpoint(folder)).layers[1]
        weights.gate_EFD.read(2)
    assert str(caught.value).startswith(f"{folder / 'model.safetensors'}: tensor {NAME}")
    return str(caught.value)


@pytest.mark.parametrize(
    ("part", "tensor", "said"),
    [
        ("scale", None, f"is INT4, but {NAME}_scale is missing; download"),
        ("zero_point", None, f"is INT4, but {NAME}_zero_point is missing; download"),
        ("scale", torch.ones(4, 32), f"{NAME}_scale has shape [4, 32], expected [32, 4]"),
        (
            "zero_point",
            torch.ones(32, 4, dtype=torch.int32),
            f"{NAME}_zero_point has shape [32, 4], expected [4, 4] of int32",
        ),
        (
            "g_idx",
            torch.arange(64),
            "has its columns grouped by activation (weight_g_idx), which is not supported; give",
        ),
        ("shape", torch.tensor([32, 60]), "says [32, 60], but"),
    ],
    ids=str,
)
def test_what_is_not_whole_is_refused_by_name(tmp_path, part, tensor, said):
    tensors = compressed_checkpoint(tmp_path, scheme_of(4, 16, symmetric=False))
    tensors[f"{NAME}_{part}"] = tensor
    save_file(
        {name: kept for name, kept in tensors.items() if kept is not None}, tmp_path / "model.safetensors"
    )
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    "groups",
    [None, {}, [], {"group_0": None}, {"group_0": {"weights": None}}, {"g": {"weights": {"num_bits": "4"}}}],
    ids=str,
)
def test_without_a_config_that_tells_the_bits_packed_words_are_refused(tmp_path, groups):
    compressed_checkpoint(tmp_path, scheme_of())
    said = {"quant_method": "compressed-tensors", "config_groups": groups}
    edit_json(tmp_path / "config.json", quantization_config=said)
    with pytest.raises(BadInput, match=r"weight_packed is packed by compressed-tensors.*; add "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("columns", [60, 64])
def test_columns_that_the_header_cannot_tell_are_never_guessed(tmp_path, columns):
    """One scale a row: 60 columns and 64 have headers alike."""
    scheme = scheme_of(4, None)
    weight = torch.randn(8, columns)
    checkpoint = stored(tmp_path, compress("x.weight", weight, scheme))
    if columns == 64:
        assert checkpoint.read("x.weight").shape == (8, 64)
    else:
        with pytest.raises(BadInput, match=r"says \[8, 60\], but .* hold \[8, 64\]"):
            checkpoint.read("x.weight")
