"""Schemes that cannot be read.

Each refused by its name in one line with the remedy, never mistaken for a missing tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import (
    Tensors,
    edit_json,
    expert_name,
    tiny_checkpoint,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe

NAME = expert_name(0, 0, "gate")


def instead(parts: dict[str, torch.Tensor]) -> Tensors:
    """A tiny model with its experts' tensors `X.weight` replaced by `X.<part>`, each."""
    tensors = {}
    for name, tensor in tiny_tensors(d_model=32, d_ff=32).items():
        if ".experts." in name:
            tensors |= {name.removesuffix("weight") + part: stored.clone() for part, stored in parts.items()}
        else:
            tensors[name] = tensor
    return tensors


def refused(folder: Path, *parts: str) -> None:
    """In one line that begins with the file, holds all the parts, and ends in what to do."""
    with pytest.raises(BadInput) as caught:
        read_moe(open_checkpoint(folder))
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(f"{folder / 'model.safetensors'}: ")
    for part in (*parts, "give a checkpoint in BF16, FP8, MXFP4 or compressed-tensors INT4"):
        assert part in message


def config(**quantization_config: Any) -> dict[str, Any]:
    return tiny_config(**({"quantization_config": quantization_config} if quantization_config else {}))


GPTQ = {
    "qweight": torch.ones(4, 32, dtype=torch.int32),
    "qzeros": torch.ones(1, 4, dtype=torch.int32),
    "scales": torch.ones(1, 32),
}
AWQ = {
    "qweight": torch.ones(32, 4, dtype=torch.int32),
    "qzeros": torch.ones(1, 4, dtype=torch.int32),
    "scales": torch.ones(1, 32),
}
NF4 = {
    "weight": torch.ones(512, 1, dtype=torch.uint8),
    "weight.absmax": torch.ones(16, dtype=torch.uint8),
    "weight.quant_map": torch.ones(16),
    "weight.quant_state.bitsandbytes__nf4": torch.ones(80, dtype=torch.uint8),
}
LLM_INT8 = {"weight": torch.ones(32, 32, dtype=torch.int8), "SCB": torch.ones(32)}


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (GPTQ, "qweight is quantised by GPTQ"),
        ({**AWQ, "g_idx": torch.zeros(32, dtype=torch.int32)}, "qweight is quantised by GPTQ"),
        (AWQ, "qweight is quantised by AWQ"),
        ({"qweight": torch.ones(4, 32, dtype=torch.int32)}, "qweight is quantised by GPTQ or AWQ"),
        (NF4, "is quantised by bitsandbytes"),
        (LLM_INT8, "is quantised by bitsandbytes"),
    ],
    ids=["GPTQ", "GPTQ by g_idx", "AWQ", "either", "bitsandbytes nf4", "bitsandbytes int8"],
)
def test_a_scheme_is_known_by_its_tensors_where_no_config_names_it(tmp_path, parts, named):
    refused(write_checkpoint(tmp_path, instead(parts), config()), named, "experts.")


@pytest.mark.parametrize(("method", "named"), [("gptq", "GPTQ"), ("awq", "AWQ")])
def test_the_config_tells_gptq_from_awq(tmp_path, method, named):
    parts = {"qweight": torch.ones(4, 32, dtype=torch.int32)}
    refused(
        write_checkpoint(tmp_path, instead(parts), config(quant_method=method)),
        f"is quantised by {named}, which",
    )


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("gptq", "GPTQ"),
        ("awq", "AWQ"),
        ("bitsandbytes", "bitsandbytes"),
        ("gguf", "GGUF"),
        ("hqq", "unknown"),
        (7, "unknown"),
        (["a"], "unknown"),
    ],
    ids=str,
)
def test_a_method_that_only_the_config_names_is_refused_with_what_to_do_if_the_weights_are_plain(
    tmp_path, method, named
):
    folder = tiny_checkpoint(tmp_path)
    edit_json(folder / "config.json", quantization_config={"quant_method": method})
    refused(folder, f"quant_method {str(method)!r} ({named})", "remove quantization_config from config.json")
    edit_json(folder / "config.json", quantization_config=None)
    assert len(read_moe(open_checkpoint(folder)).layers) == 2


@pytest.mark.parametrize("said", ["nonsense", [], 3, {}, {"quant_method": None}], ids=str)
def test_a_config_that_names_no_method_refuses_nothing(tmp_path, said):
    folder = tiny_checkpoint(tmp_path)
    edit_json(folder / "config.json", quantization_config=said)
    assert len(read_moe(open_checkpoint(folder)).layers) == 2


@pytest.mark.parametrize("method", ["fp8", "mxfp4", "compressed-tensors"])
def test_a_model_whose_weights_were_made_plain_again_is_read_whatever_its_config_still_says(tmp_path, method):
    folder = tiny_checkpoint(tmp_path)
    edit_json(folder / "config.json", quantization_config={"quant_method": method})
    assert read_moe(open_checkpoint(folder)).layers[0].gate_EFD.dtype == "F32"


# --- NVFP4


def nvfp4_parts(packed: str, overall: str) -> dict[str, torch.Tensor]:
    return {
        packed: torch.ones(32, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(32, 2).to(torch.float8_e4m3fn),
        overall: torch.ones(1),
    }


@pytest.mark.parametrize(
    ("packed", "overall"),
    [("weight_packed", "weight_global_scale"), ("weight", "weight_scale_2")],
    ids=["compressed-tensors", "modelopt"],
)
def test_nvfp4_is_refused_by_name_with_its_global_scale_and_without(tmp_path, packed, overall):
    parts = nvfp4_parts(packed, overall)
    whole = write_checkpoint(tmp_path / "whole", instead(parts), config())
    refused(whole, f"tensor {NAME} is quantised as NVFP4, which is not supported")
    del parts[overall]
    lacking = write_checkpoint(tmp_path / "lacking", instead(parts), config())
    missing = NAME.removesuffix("weight") + overall
    refused(lacking, f"tensor {NAME} is NVFP4, but its global scale {missing} is missing")


# --- GGUF


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "folder"])
def test_gguf_is_refused_by_name(tmp_path, as_file):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF" + bytes(60))
    given = file if as_file else tmp_path
    with pytest.raises(BadInput) as caught:
        open_checkpoint(given)
    assert str(caught.value).startswith(
        f"{given}: GGUF files are not supported; give the folder of a checkpoint"
    )


def test_a_gguf_copy_beside_the_safetensors_is_left_alone(tmp_path):
    tiny_checkpoint(tmp_path)
    (tmp_path / "copy.gguf").write_bytes(b"GGUF")
    assert len(read_moe(open_checkpoint(tmp_path)).layers) == 2
