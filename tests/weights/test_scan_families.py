"""scan over layouts that differ in what they hold.

Experts without a gate, two stacks of layers, fused experts.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from families.tiny_models import tiny_model
from moescope import scan
from moescope.errors import BadInput
from moescope.weights.tables import TABLES

# Four encoder blocks with two sparse ones (1, 3), four decoder blocks with one (1), which is numbered after
# them: 5.
SWITCH = {
    1: "encoder.block.1.layer.1.mlp",
    3: "encoder.block.3.layer.1.mlp",
    5: "decoder.block.1.layer.2.mlp",
}


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    return tiny_model("switch_transformers").save(tmp_path_factory.mktemp("switch"), "saved")


def test_experts_without_a_gate_are_scanned_by_their_first_and_last_matrix(tmp_path, switch):
    run = scan(switch, out=tmp_path / "run", matrix="gate,down", quiet=True)
    for name in TABLES:
        if {"layer", "layer_name", "matrix"} <= set(TABLES[name].columns):
            rows = run.table(name)
            assert dict(zip(rows["layer"], rows["layer_name"], strict=True)) == SWITCH, name
            assert set(rows["matrix"]) == {"gate", "down"}, name
    assert [(setup["layer"], setup["layer_name"]) for setup in run.info["setup"]] == list(SWITCH.items())
    assert {setup["top_k"] for setup in run.info["setup"]} == {1}
    assert run.info["coverage"][0]["layers_expected"] == 3


@pytest.mark.parametrize("matrix", ["up", "gate_up", "gate,up"])
def test_a_matrix_that_the_experts_lack_is_rejected_before_any_work(tmp_path, switch, matrix):
    with pytest.raises(BadInput) as caught:
        scan(switch, out=tmp_path / "run", matrix=matrix, quiet=True)
    assert str(caught.value) == f"{SWITCH[1]}: these experts have no up matrix; use --matrix gate or down"
    assert not (tmp_path / "run").exists()


def test_a_decoder_layer_is_chosen_by_its_number_after_the_encoder_s(tmp_path, switch):
    run = scan(switch, out=tmp_path / "run", layers="5", quiet=True)
    assert set(run.table("alignment_layers")["layer_name"]) == {SWITCH[5]}


def test_two_stacks_are_distinguished_without_a_config(tmp_path, switch):
    for file in switch.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    run = scan(tmp_path, out=tmp_path / "run", quiet=True)
    rows = run.table("alignment_layers")
    assert dict(zip(rows["layer"], rows["layer_name"], strict=True)) == SWITCH


def test_the_two_forms_of_one_model_give_the_same_numbers(tmp_path):
    model = tiny_model("mixtral")
    runs = []
    for form in ("saved", "memory"):
        folder = tmp_path / form
        folder.mkdir()
        runs.append(
            scan(model.save(folder, form), out=tmp_path / f"{form}-run", matrix="gate,up,down", quiet=True)
        )
    for name in TABLES:
        ours, theirs = (run.table(name).drop(columns="layer_name", errors="ignore") for run in runs)
        assert ours.equals(theirs), name


def test_a_bad_expert_of_a_fused_tensor_is_named_with_its_number(tmp_path):
    folder = tiny_model("gpt_oss").save(tmp_path, "saved")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.down_proj"][2, 0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"tensor model\.layers\.1\.mlp\.experts\.down_proj\[2\] holds NaN"):
        scan(folder, out=tmp_path / "run", matrix="down", quiet=True)
