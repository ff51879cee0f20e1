"""Lab checkpoints whose router has no row for each expert.

What is read against the model that was saved, and what is refused.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder.tiny_lab import tiny
from moescope.checkpoint import open_checkpoint
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.families import MoeCheckpoint, read_moe
from moescope.families.writing import NewLayer, write_moe

ROWLESS = [name for name, router in ROUTERS.items() if not router.has_rows]
KINDS = [
    ("hash", "modern"),
    ("hash", "some"),
    ("spectra", "modern"),
    ("spectra", "some"),
    ("dense", "modern"),
]


def saved(folder: Path, router: str, block: str = "modern", **options: object) -> tuple[Path, LabModel]:
    torch.manual_seed(0)
    model = LabModel(tiny(router, vocabulary=258, block=block, router_options=options))
    save_model(model, Bytes(), folder)
    return folder, model


def read(folder: Path) -> MoeCheckpoint:
    return read_moe(open_checkpoint(folder))


@pytest.mark.parametrize(("router", "block"), KINDS)
def test_every_expert_is_bit_equal_to_the_saved_models(router: str, block: str, tmp_path: Path):
    folder, model = saved(tmp_path / "saved", router, block)
    with torch.no_grad():
        for parameter in model.parameters():  # biases begin as zeros, which would hide a swap
            parameter.copy_(torch.randn_like(parameter))
    save_model(model, Bytes(), folder)
    found = read(folder)
    assert list(found.layers) == [0, 1, 2]
    for layer, weights in found.layers.items():
        own = model.blocks[layer].mlp.experts.state_dict()
        assert weights.router_ED is None
        assert (weights.n_experts, weights.d_model) == (1 if router == "dense" else 8, 32)
        assert weights.top_k == (1 if router == "dense" else 2)
        for number in range(weights.n_experts):
            expert = weights.expert(number)
            if block == "modern":
                assert expert.up_FD is not None
                assert torch.cat([expert.gate_FD, expert.up_FD]).equal(own["gate_up"][number])
            else:
                assert expert.up_FD is None
                assert expert.gate_FD.equal(own["up"][number])
                assert expert.gate_bias_F is not None
                assert expert.down_bias_D is not None
                assert expert.gate_bias_F.equal(own["up_bias"][number])
                assert expert.down_bias_D.equal(own["down_bias"][number])
            assert expert.down_DF.equal(own["down"][number])
        if block == "modern":
            assert weights.norm_D is not None
            assert weights.norm_D.read().equal(model.blocks[layer].post_attention_layernorm.weight)
        else:
            assert weights.norm_D is None  # it stands behind the block


@pytest.mark.parametrize(("router", "block"), KINDS)
def test_every_tensor_is_understood_or_counted_with_its_reason(router: str, block: str, tmp_path: Path):
    folder, model = saved(tmp_path / "saved", router, block)
    coverage = read(folder).coverage
    tensors = model.state_dict()
    own = sum(".mlp.router." in name or name.startswith("shared_router.") for name in tensors)
    reason = f"of the {router} router, which has no row for each expert"
    assert coverage.skipped.get(reason, 0) == own == {"hash": 3, "spectra": 3 * 6 + 4, "dense": 0}[router]
    experts = [name for name in tensors if ".mlp.experts." in name]
    norms = 3 if block == "modern" else 0
    assert len(tensors) == sum(coverage.skipped.values()) + len(experts) + norms
    assert coverage.parameters_total == sum(tensor.numel() for tensor in tensors.values())
    assert coverage.parameters_understood == sum(tensors[name].numel() for name in experts) + norms * 32
    assert coverage.rowless_router == router


@pytest.mark.parametrize("router", ROUTERS)
def test_the_routers_said_to_have_no_rows_are_those_that_save_none(router: str, tmp_path: Path):
    found = read(saved(tmp_path / "saved", router)[0])
    assert all((weights.router_ED is None) == (router in ROWLESS) for weights in found.layers.values())
    assert found.coverage.rowless_router == (router if router in ROWLESS else None)
    assert (found.coverage.without_rows() is not None) == (router in ROWLESS)


@pytest.mark.parametrize("router", ROUTERS)
def test_checkpoints_without_saved_facts_get_those_of_the_routers_class(router: str, tmp_path: Path):
    folder, _ = saved(tmp_path / "saved", router)
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("moescope_router")["name"] == router
    (folder / "config.json").write_text(json.dumps(config))
    assert read(folder).coverage.rowless_router == (router if router in ROWLESS else None)


@pytest.mark.parametrize("block", ["modern", "some"])
def test_spectra_with_everything_taken_away_has_rows(block: str, tmp_path: Path):
    folder, model = saved(tmp_path / "saved", "spectra", block, plain=True)
    for layer, weights in read(folder).layers.items():
        assert weights.router_ED is not None
        assert weights.router_ED.read().equal(model.state_dict()[f"layers.{layer}.mlp.router.linear.weight"])
        assert (weights.norm_D is None) == (block == "some")


def test_rows_that_were_lost_are_not_taken_for_a_router_without_any(tmp_path: Path):
    folder, _ = saved(tmp_path / "saved", "expert_choice")
    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(file).items() if ".router." not in name}, file)
    with pytest.raises(BadInput, match="no MoE layer found"):
        read(folder)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("num_experts", "8", "holds 8 experts, but config.json says '8' experts"),
        ("num_experts", 7, "holds 8 experts, but config.json says 7 experts"),
        ("num_hidden_layers", 5, r"says layers \[3, 4\] are MoE"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(field: str, value: object, says: str, tmp_path: Path):
    folder, _ = saved(tmp_path / "saved", "hash")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(BadInput, match=says):
        read(folder)


def test_experts_are_not_added_where_no_router_could_be_told(tmp_path: Path):
    moe = read(saved(tmp_path / "saved", "dense")[0])
    with pytest.raises(BadInput, match=r"layers\.0\.mlp: its router has no row for each expert"):
        write_moe(moe, tmp_path / "larger", dict.fromkeys(moe.layers, NewLayer([0, 0])))
    assert not (tmp_path / "larger").exists()
    write_moe(moe, tmp_path / "same", dict.fromkeys(moe.layers, NewLayer([0])))
