"""Lab checkpoints without router rows: what headers tell, against the model that was saved, and what is refused."""

import json
from pathlib import Path

import pytest

from lab.tiny_lab import tiny
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.families import read_moe, read_rowless
from moescope.lab.model import LabModel
from moescope.lab.saving import save_model
from moescope.lab.vocabulary import Bytes


def saved(folder: Path, router: str, block: str = "modern") -> tuple[Path, LabModel]:
    model = LabModel(tiny(router, vocabulary=258, block=block))
    save_model(model, Bytes(), folder)
    return folder, model


@pytest.mark.parametrize(
    ("router", "block"), [("hash", "modern"), ("hash", "some"), ("spectra", "modern"), ("dense", "modern")]
)
def test_the_experts_are_those_of_the_saved_model(router: str, block: str, tmp_path: Path):
    folder, model = saved(tmp_path / "saved", router, block)
    found = read_rowless(open_checkpoint(folder))
    assert found is not None
    assert found.router == router
    assert list(found.experts) == [0, 1, 2]
    own = [parameter for layer in model.blocks for parameter in layer.mlp.experts.parameters()]
    assert found.coverage.parameters_understood == sum(parameter.numel() for parameter in own)
    assert found.coverage.parameters_total == sum(tensor.numel() for tensor in model.state_dict().values())
    assert len(open_checkpoint(folder).tensors) == len(own) + sum(found.coverage.skipped.values())
    for layer, (gate, up, down) in found.experts.items():
        experts = model.blocks[layer].mlp.experts.state_dict()
        both = experts["gate_up" if block == "modern" else "up"]
        assert (gate.shape[0], gate.shape[2]) == (both.shape[0], both.shape[2])
        assert gate.shape[1] * (2 if up is not None else 1) == both.shape[1]
        assert down.shape == tuple(experts["down"].shape)


@pytest.mark.parametrize("router", ["loss_free", "some", "top2"])
def test_checkpoints_with_rows_are_another_kind(router: str, tmp_path: Path):
    assert read_rowless(open_checkpoint(saved(tmp_path / "saved", router)[0])) is None


@pytest.mark.parametrize("router", ["hash", "spectra", "dense"])
def test_what_needs_rows_refuses_and_names_the_router_and_trace(router: str, tmp_path: Path):
    with pytest.raises(BadInput, match=f"its router, {router}, has no row for each expert.*moescope trace"):
        read_moe(open_checkpoint(saved(tmp_path / "saved", router)[0]))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_experts", "8", "num_experts is '8', not a whole number"),
        ("num_hidden_layers", 5, r"says layers \[3, 4\] are MoE"),
        ("hidden_size", 31, "do not fit d_model 31"),
        ("num_experts", 7, r"has shape \[8, 32, 32\], expected \[7, "),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(field: str, value: object, says: str, tmp_path: Path):
    folder, _ = saved(tmp_path / "saved", "hash")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(BadInput, match=says):
        read_rowless(open_checkpoint(folder))
