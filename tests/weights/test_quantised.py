"""inspect and scan on quantised checkpoints.

What is shown, and the numbers of the weights as the libraries dequantise them.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from checkpoint.quantised.builders import (
    compress,
    compressed_checkpoint,
    decompress,
    fp8_checkpoint,
    gpt_oss_checkpoint,
    quantise_fp8,
    qwen,
    repack,
    scheme_of,
)
from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.checkpoint import Checkpoint, open_checkpoint
from moescope.cli import app
from moescope.errors import BadInput
from moescope.families import read_moe
from moescope.families.inspect import inspect
from moescope.geometry.pairs import layer_geometry
from moescope.spectral.decompose import decompose
from moescope.types import SIGNIFICAND_BITS
from moescope.weights.tables import TABLES
from moescope.weights.verb import scan
from spectral.builders import stored_low_rank

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


@pytest.mark.parametrize(
    "kind", ["mxfp4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fp8", "int4"))]
)
def test_a_scan_finds_what_it_finds_in_the_dequantised_weights(tmp_path, monkeypatch, kind):
    stored = BUILD[kind](tmp_path / "packed")
    plain = dequantised(kind, tmp_path / "plain", stored)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    dtype = {"fp8": "F8_E4M3", "mxfp4": "MXFP4", "int4": "INT4"}[kind]
    runs = []
    for path in (tmp_path / "packed", plain):
        runs.append(scan(path, out=tmp_path / f"{path.name}-run", matrix="gate,up,down", quiet=True))
        # float32 hides how the weights were stored, on which the rank depends
        monkeypatch.setitem(SIGNIFICAND_BITS, "F32", SIGNIFICAND_BITS[dtype])
    for name in TABLES:
        ours, theirs = (run.table(name) for run in runs)
        assert len(ours)
        assert ours.equals(theirs), name
    assert {setup["dtype"] for setup in runs[0].info["setup"]} == {dtype}


def to_mxfp4(matrix: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest e2m1 times a power of two per 32 columns, whose largest value becomes 4 to 6."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = matrix.unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2)
    nearest = (blocks.abs() / scale).unsqueeze(-1).sub(codes).abs().argmin(-1)
    return (codes[nearest] * blocks.sign() * scale).flatten(-2)


def to_integers(scheme):
    name = "x.weight"
    return lambda matrix: decompress(name, compress(name, matrix, scheme), scheme)


@pytest.mark.parametrize(
    ("dtype", "rounded"),
    [
        ("MXFP4", to_mxfp4),
        ("INT4", to_integers(scheme_of(4, 32))),
        ("INT4", to_integers(scheme_of(4, 128))),
        ("INT8", to_integers(scheme_of(8, 128))),
        ("INT8", to_integers(scheme_of(8, None))),
    ],
)
@pytest.mark.parametrize("shape", [(128, 512)], ids=str)
def test_quantising_does_not_fill_up_a_rank_nor_lower_a_full_one(dtype, rounded, shape):
    low = rounded(stored_low_rank(0, shape, 10, torch.float32)).double()
    full = rounded(torch.randn(shape, generator=torch.Generator().manual_seed(1))).double()
    rows = torch.eye(shape[1], dtype=torch.float64)[:3]
    found = [decompose(matrix, rows, [1], bits=SIGNIFICAND_BITS[dtype]).rank for matrix in (low, full)]
    assert found == [10, min(shape)]


def low_rank_fp8(folder):
    def change(name, tensor):
        return quantise_fp8(name, stored_low_rank(len(name), tuple(tensor.shape), 4, tensor.dtype), (16, 16))

    repack(qwen(folder), change, {"quant_method": "fp8", "weight_block_size": [16, 16]})


def low_rank_plain(dtype):
    def build(folder):
        tensors = tiny_tensors(d_model=64, d_ff=32, dtype=dtype)
        for number, (name, tensor) in enumerate(tensors.items()):
            if ".experts." in name:
                tensors[name] = stored_low_rank(number, tuple(tensor.shape), 4, dtype)
        write_checkpoint(folder, tensors, tiny_config())

    return build


@pytest.mark.parametrize(
    ("build", "precision"),
    [
        (low_rank_fp8, "fast"),
        (low_rank_plain(torch.bfloat16), "exact"),
        (low_rank_plain(torch.float32), "fast"),
    ],
    ids=["fp8", "bf16", "fp32"],
)
def test_a_scan_finds_the_rank_that_was_stored(tmp_path, build, precision):
    """In every matrix and way of computing; the k grid ends there. R of pairs is over the same directions."""
    build(tmp_path / "model")
    views = {"matrix": "gate,up,down,gate_up", "fold_norm": True, "router": "raw"}
    run = scan(tmp_path / "model", out=tmp_path / "run", precision=precision, quiet=True, **views)
    spectra = run.table("spectra")
    assert set(spectra["rank"][spectra["matrix"] != "gate_up"]) == {4}
    assert set(spectra["rank"][spectra["matrix"] == "gate_up"]) == {8}  # both halves stacked
    ks = run.table("alignment_layers").groupby("matrix")["k"].max()
    assert ks.to_dict() == {"gate": 4, "up": 4, "down": 4, "gate_up": 8}
    layer = read_moe(open_checkpoint(tmp_path / "model")).layers[0]
    rows = layer_geometry(layer, layer, [(0, 0), (0, 1)], {"same": "none"})["geometry"]
    np.testing.assert_allclose(rows["sv_alignment"][rows["expert_b"] == 0], 1, atol=1e-5)
    factors = [
        np.linalg.svd(layer.gate_EFD.read(expert).double().numpy(), full_matrices=False) for expert in (0, 1)
    ]
    (left, _, right), (other_left, _, other_right) = factors
    expected = ((left[:, :4] @ right[:4]) * (other_left[:, :4] @ other_right[:4])).sum() / 4
    found = rows[(rows["expert_b"] == 1) & (rows["matrix"] == "gate")]["sv_alignment"].item()
    assert found == pytest.approx(expected, abs=1e-5)


def test_an_expert_whose_scale_is_not_a_number_is_named(tmp_path):
    gpt_oss_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 0, 0] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"tensor model\.layers\.1\.mlp\.experts\.down_proj\[2\] holds NaN"):
        scan(tmp_path, out=tmp_path / "run", matrix="down", quiet=True)
