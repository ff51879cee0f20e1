"""inspect and scan on quantised checkpoints.

What is shown, and the numbers of the weights as the libraries dequantise them.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoint.quantised.builders import (
    compressed_checkpoint,
    decompress,
    fp8_checkpoint,
    gpt_oss_checkpoint,
    scheme_of,
)
from moescope.checkpoint import Checkpoint
from moescope.cli import app
from moescope.errors import BadInput
from moescope.families.inspect import inspect
from moescope.weights.tables import TABLES
from moescope.weights.verb import scan

INT4 = scheme_of(4, 32)
BUILD = {
    "fp8": fp8_checkpoint,
    "mxfp4": gpt_oss_checkpoint,
    "int4": lambda folder: compressed_checkpoint(folder, INT4),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "count", "scheme", "bytes_each"),
    [
        ("fp8", "F8_E4M3", 36, "FP8 in blocks of 16 x 16", 1),
        ("mxfp4", "MXFP4", 4, "MXFP4 in blocks of 32", 17 / 32),
        ("int4", "INT4", 36, "INT4 in groups of 32", 18 / 32),
    ],
)
def test_inspect_shows_the_scheme_and_counts_logical_tensors(
    tmp_path, monkeypatch, kind, dtype, count, scheme, bytes_each
):
    BUILD[kind](tmp_path)
    monkeypatch.setattr(Checkpoint, "read_stored", lambda *_: pytest.fail("a tensor was read"))
    facts = inspect(tmp_path)
    assert facts["dtypes"][dtype] == count
    assert set(facts["dtypes"]) == {dtype, "BF16"}
    assert facts["quantisation"] == scheme
    experts, layers, width = (3, 2, 64) if kind == "mxfp4" else (4, 3, 32)
    assert facts["parameters"]["routed"] == layers * experts * 3 * 64 * width
    assert facts["scan_estimate"]["read_bytes"] == layers * experts * 64 * width * bytes_each
    assert facts["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    page = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert f"{count} {dtype}" in page
    assert scheme in page


def test_inspect_says_nothing_of_quantisation_where_there_is_none(tmp_path):
    from checkpoints import tiny_checkpoint

    tiny_checkpoint(tmp_path)
    assert inspect(tmp_path)["quantisation"] is None


def dequantised(kind, folder, stored):
    """The same checkpoint in plain float32, by transformers' and compressed-tensors' own functions."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = {}
    for name, tensor in stored.items():
        if kind == "fp8" and f"{name}_scale_inv" in stored:
            plain[name] = Fp8Dequantize(None)._dequantize_one(
                tensor, stored[f"{name}_scale_inv"], torch.float32
            )
        elif name.endswith("_blocks"):
            scales = stored[name.replace("_blocks", "_scales")]
            plain[name.removesuffix("_blocks")] = convert_moe_packed_tensors(
                tensor, scales, dtype=torch.float32
            )
        elif name.endswith("_packed"):
            wide = {
                part: value.float() if value.is_floating_point() else value
                for part, value in stored.items()
                if part.startswith(name.removesuffix("_packed"))
            }
            plain[name.removesuffix("_packed")] = decompress(name.removesuffix("_packed"), wide, INT4)
        elif not name.endswith(("_scales", "_scale", "_shape", "_scale_inv")):
            plain[name] = tensor
    folder.mkdir()
    save_file(plain, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", BUILD)
def test_a_scan_finds_what_it_finds_in_the_dequantised_weights(tmp_path, kind):
    stored = BUILD[kind](tmp_path / "packed")
    plain = dequantised(kind, tmp_path / "plain", stored)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    runs = [
        scan(path, out=tmp_path / f"{path.name}-run", matrix="gate,up,down", quiet=True)
        for path in (tmp_path / "packed", plain)
    ]
    for name in TABLES:
        ours, theirs = (run.table(name) for run in runs)
        assert len(ours)
        assert ours.equals(theirs), name
    assert {setup["dtype"] for setup in runs[0].info["setup"]} == {
        {"fp8": "F8_E4M3", "mxfp4": "MXFP4", "int4": "INT4"}[kind]
    }


def test_an_expert_whose_scale_is_not_a_number_is_named(tmp_path):
    gpt_oss_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"tensor model\.layers\.1\.mlp\.experts\.down_proj\[2\] holds NaN"):
        scan(tmp_path, out=tmp_path / "run", matrix="down", quiet=True)
