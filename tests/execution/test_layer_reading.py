"""Layers are read in large pieces, so that reading leaves the interpreter to the layer that computes."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from moescope.checkpoint import open_checkpoint
from moescope.execution.layer_weights import BulkReader, CountedFiles
from moescope.execution.streamed import load_streamed
from routing.tiny_text import save_model


def test_tensors_side_by_side_are_one_request(tmp_path, monkeypatch):
    folder = save_model(tmp_path, "qwen3_moe", tokenizer=False)
    model = load_streamed(str(folder), "auto", "cpu")
    requests, own = [], os.preadv

    def counted(*words):
        requests.append(words)
        return own(*words)

    monkeypatch.setattr(os, "preadv", counted)
    model.weights.load(1)
    assert 0 < len(requests) <= len(model.weights.names[1]) / 2
    stored = load_file(folder / "model.safetensors")
    for name, weight in model.weights.layers[1].module.named_parameters():
        if f"model.layers.1.{name}" in stored:
            assert torch.equal(weight, stored[f"model.layers.1.{name}"]), name


@pytest.mark.parametrize("piece", [7 * 8, 1000, 10**9])
@pytest.mark.parametrize("staged", [False, True])
def test_tensors_read_in_pieces_of_any_size_are_those_of_safetensors(tmp_path, piece, staged):
    """Staged through a buffer, as for a GPU, or straight into memory."""
    torch.manual_seed(0)
    tensors = {
        "whole": torch.randn(31, 17),
        "half": torch.randn(9, 3).bfloat16(),
        "empty": torch.empty(0, 4),
        "skipped": torch.randn(50),
        "one": torch.randn(1),
        "twice": torch.randn(5, 6, 7, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    object.__setattr__(checkpoint, "files", CountedFiles(checkpoint.files))
    reader = BulkReader(checkpoint, "cpu", None, piece)
    reader.staged = staged
    names = [name for name in tensors if name != "skipped"]
    found = reader.read(names)
    assert set(found) == set(names)
    for name, tensor in found.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name]), name
    assert checkpoint.files.bytes_read == sum(tensors[name].nbytes for name in names)
