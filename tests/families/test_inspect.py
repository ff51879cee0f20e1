"""What a checkpoint is, from headers alone, against counts made by hand and by transformers."""

import json

import pytest
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM
from typer.testing import CliRunner

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from decoder.tiny_lab import tiny as tiny_lab
from moescope.checkpoint.local import LocalFiles
from moescope.cli import app
from moescope.decoder.model import LabModel
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.families.inspect import inspect, short
from moescope.progress import duration


@pytest.fixture
def model(tmp_path):
    return write_checkpoint(
        tmp_path / "model", tiny_tensors(layers=2, experts=4, d_model=16, d_ff=24), tiny_config()
    )


def test_the_facts_are_those_of_the_checkpoint(model):
    facts = inspect(model)
    assert (facts["family"], facts["layout"], facts["scoring"]) == ("mixtral", "mixtral", "softmax")
    assert (facts["moe_layers"], facts["experts"], facts["top_k"], facts["d_model"], facts["d_ff"]) == (
        [0, 1],
        4,
        2,
        16,
        24,
    )
    routed = 2 * 4 * 3 * 16 * 24
    rest = 8 * 16 + 2 * (4 * 16 + 16)
    assert facts["parameters"] == {
        "total": routed + rest,
        "routed": routed,
        "shared": 0,
        "active": rest + routed // 2,
    }
    assert facts["bytes"] == (model / "model.safetensors").stat().st_size


def test_no_tensor_is_read(model, monkeypatch):
    def refuse(self, file):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(LocalFiles, "handle", refuse)
    assert inspect(model)["experts"] == 4


def test_shared_experts_are_counted_apart(tmp_path):
    config = Qwen2MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=2,
        vocab_size=50,
        mlp_only_layers=[1],
    )
    model = Qwen2MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "qwen")
    facts = inspect(tmp_path / "qwen")
    assert facts["parameters"]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert facts["parameters"]["shared"] == 2 * 3 * 32 * 40
    assert facts["parameters"]["routed"] == 2 * 6 * 3 * 32 * 24
    assert facts["moe_layers"] == [0, 2]
    assert facts["shared_d_ff"] == 40


def test_experts_fused_into_one_tensor_are_counted_too(tmp_path):
    config = GraniteMoeConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        vocab_size=50,
    )
    GraniteMoeForCausalLM(config).save_pretrained(tmp_path / "granite")
    facts = inspect(tmp_path / "granite")
    assert facts["parameters"]["routed"] == 2 * 6 * 3 * 32 * 24
    assert facts["scan_estimate"]["read_bytes"] == 2 * 6 * 32 * 24 * 4
    assert (facts["experts"], facts["top_k"], facts["d_ff"]) == (6, 2, 24)


def test_the_command_prints_a_page_or_json(model):
    page = CliRunner().invoke(app, ["inspect", str(model)])
    assert page.exit_code == 0
    assert "4 per layer, top 2, d_model 16, d_ff 24" in page.output
    facts = json.loads(CliRunner().invoke(app, ["inspect", str(model), "--json"]).output)
    assert facts["coverage"]["layers_found"] == 2


def test_without_a_config_what_is_not_known_is_said(tmp_path):
    path = write_checkpoint(tmp_path / "model", tiny_tensors(), None)
    facts = inspect(path)
    assert facts["parameters"]["active"] is None
    assert facts["top_k"] is None
    assert "active unknown" in CliRunner().invoke(app, ["inspect", str(path)]).output


def test_counts_and_durations_are_written_as_people_do():
    assert [short(count) for count in (12, 4_100, 46_700_000_000)] == ["12", "4.1 k", "46.7 B"]
    assert [duration(seconds) for seconds in (0.01, 42, 600, 7200)] == ["1 s", "42 s", "10 min", "2.0 h"]


@pytest.mark.parametrize("router", ["hash", "spectra", "dense"])
def test_a_lab_checkpoint_without_router_rows_is_told_with_what_its_scan_will_lack(
    router, tmp_path, monkeypatch
):
    lab = LabModel(tiny_lab(router, vocabulary=258))
    save_model(lab, Bytes(), tmp_path / "lab")
    monkeypatch.setattr(LocalFiles, "handle", lambda self, file: pytest.fail("a tensor was read"))
    facts = inspect(tmp_path / "lab")
    experts, d_ff, top_k = (1, 32, 1) if router == "dense" else (8, 16, 2)
    assert (facts["family"], facts["layout"], facts["lab_router"]) == ("moescope_lab", "lab_rowless", router)
    assert (facts["moe_layers"], facts["experts"], facts["top_k"]) == ([0, 1, 2], experts, top_k)
    assert (facts["d_model"], facts["d_ff"]) == (32, d_ff)
    total, routed = sum(tensor.numel() for tensor in lab.state_dict().values()), 3 * experts * 3 * 32 * d_ff
    active = total - routed + routed * top_k // experts
    assert facts["parameters"] == {"total": total, "routed": routed, "shared": 0, "active": active}
    page = CliRunner().invoke(app, ["inspect", str(tmp_path / "lab")])
    assert page.exit_code == 0
    assert f"lab router {router}" in page.output
    lacks = (
        "nothing is routed (router dense)"
        if router == "dense"
        else f"router {router} has no row for each expert"
    )
    assert f"read; {lacks}" in page.output
    assert facts["scan_estimate"]["read_bytes"] == 3 * experts * 32 * d_ff * 4


def test_a_lab_checkpoint_with_rows_names_its_router_and_has_an_estimate(tmp_path):
    save_model(LabModel(tiny_lab("loss_free", vocabulary=258)), Bytes(), tmp_path / "lab")
    facts = inspect(tmp_path / "lab")
    assert (facts["lab_router"], facts["scoring"], facts["scan_lacks"]) == ("loss_free", "sigmoid", None)
    assert facts["scan_estimate"]["read_bytes"] == 3 * 8 * 32 * 16 * 4
