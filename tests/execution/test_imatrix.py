"""trace --recorded with an importance matrix of llama.cpp, written with gguf's own writer."""

from __future__ import annotations

import json

import numpy as np
import pytest

import moescope
from moescope.errors import BadInput

gguf = pytest.importorskip("gguf")

COUNTS = {1: np.array([30, 0, 50, 20]), 3: np.array([25, 25, 49, 1])}  # 50 tokens, two experts each


def write_imatrix(path, counts=None, dense=True, chunks=(5, 10)):
    """Write the tensors that llama-imatrix writes: sums of squares and counts per matrix."""
    writer = gguf.GGUFWriter(path, arch="")
    writer.add_key_value("general.type", "imatrix", gguf.GGUFValueType.STRING)
    for what, value in zip(("count", "size"), chunks, strict=True):
        writer.add_uint32(f"imatrix.chunk_{what}", value)
    writer.add_array("imatrix.datasets", ["text.txt"])
    tensors = {}
    for layer, counts_E in (COUNTS if counts is None else counts).items():
        for name, width in (("gate", 8), ("up", 8), ("down", 6)):
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = (
                np.ones((len(counts_E), width)),
                counts_E[:, None],
            )
        if dense:
            tensors[f"blk.{layer}.attn_q.weight"] = (np.ones((1, 8)), np.array([[counts_E.sum() // 2]]))
    for name, (sums, tokens) in tensors.items():
        writer.add_tensor(f"{name}.in_sum2", sums.astype(np.float32))
        writer.add_tensor(f"{name}.counts", tokens.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("dense", [True, False])  # without other tensors: chunks times tokens per chunk
def test_counts_become_loads_with_the_experts_per_token(tmp_path, dense):
    file = write_imatrix(tmp_path / "imatrix.gguf", dense=dense)
    run = moescope.trace(recorded=file, out=tmp_path / "run", quiet=True)
    load = run.table("load").sort_values(["layer", "expert"])
    for layer, counts_E in COUNTS.items():
        assert load.loc[load["layer"] == layer, "tokens"].tolist() == counts_E.tolist()
    assert run.info["coverage"][0]["k"] == [2]
    layers = run.table("routing_layers").set_index(["metric", "layer"])
    mean, spread = COUNTS[1].mean(), COUNTS[1].std()
    assert layers.loc[("cv", 1), "value"] == pytest.approx(spread / mean)


def test_deploy_gives_coverage_and_lists_and_says_what_counts_cannot_show(tmp_path):
    trace = moescope.trace(recorded=write_imatrix(tmp_path / "i.gguf"), out=tmp_path / "run", quiet=True)
    run = moescope.deploy(trace, min_tokens=21, out=tmp_path / "served", quiet=True)
    assert sorted(run.tables) == ["coverage", "coverage_curve"]
    rows = run.table("coverage").set_index(["layer", "expert"])
    assert rows["tokens"].tolist() == [30, 0, 50, 20, 25, 25, 49, 1]
    assert rows["below"].tolist() == [False, True, False, True, False, False, False, True]
    (warning,) = run.info["warnings"]
    assert "order of tokens" in warning
    assert "\n" not in warning
    lists = json.loads((run.path / "exports" / "hot_experts.json").read_text())["layers"]
    assert lists["1"]["experts"] == [2, 0, 3, 1]
    assert json.loads((run.path / "exports" / "esft_text.json").read_text())["experts"]["3"] == [2]
    assert moescope.report(run).exists()


def test_files_without_experts_or_of_other_sizes_are_rejected(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(write_imatrix(tmp_path / "i.gguf").read_bytes()[:200])
    cases = [
        (broken, {}, "no valid GGUF"),
        (tmp_path / "i.gguf", {"experts": 2}, "--experts"),
        (tmp_path / "i.gguf", {"save_tokens": True}, "--save-tokens"),
        (write_imatrix(tmp_path / "k.gguf", dense=False, chunks=(0, 0)), {}, "experts per token"),
        (write_imatrix(tmp_path / "d.gguf", {}), {"experts": 4}, "ffn_.*_exps"),
    ]
    (tmp_path / "old.dat").write_bytes(b"\0" * 64)
    cases.append((tmp_path / "old.dat", {"format": "imatrix", "experts": 4}, "--output-format gguf"))
    for number, (file, options, words) in enumerate(cases):
        with pytest.raises(BadInput, match=words) as error:
            moescope.trace(recorded=file, out=tmp_path / f"run{number}", quiet=True, **options)
        assert "\n" not in str(error.value)
