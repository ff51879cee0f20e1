"""trace --probe-next: each router's answer about the state of the layer before."""

from __future__ import annotations

import pytest
import torch

import moescope
from families.tiny_models import tiny_model
from lab.tiny_training import tiny_config
from moescope.decoder.model import LabModel
from moescope.decoder.saving import save_model as save_lab_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from routing.tiny_text import save_model, texts, write_jsonl


def probed_run(folder, model, count=6, **options):
    text = write_jsonl(folder / "text.jsonl", texts(count))
    return moescope.trace(
        model, text=text, save_tokens=True, probe_next=True, out=folder / "run", quiet=True, **options
    )


def routers_of(model):
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def answers_by_hand(model, ids, width):
    """Run the model alone; return per layer the top k that the next router itself names, and all by logit."""
    inputs = []
    hooks = [
        router.register_forward_pre_hook(
            lambda module, args: inputs.append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for router in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
        for hook in hooks:
            hook.remove()
        named = []
        for x, router in zip(inputs[:-1], routers_of(model)[1:], strict=True):
            own = next(part for part in router(x) if not part.is_floating_point())
            logits = torch.nn.functional.linear(x.float(), router.weight.float())
            named.append((own.tolist(), logits.argsort(-1, descending=True)[:, :width].tolist()))
    return named


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_every_probed_expert_is_the_one_that_the_next_router_names(tmp_path, phase):
    place = save_model(tmp_path / "model", "qwen3_moe")
    run = probed_run(tmp_path, place, phase=phase)
    tokens = run.table("tokens")
    layers = sorted(tokens["layer"].unique())
    assert tokens.loc[tokens["layer"] == layers[0], "probed"].isna().all()
    model = type(tiny_model("qwen3_moe").model).from_pretrained(place, dtype="float32").eval()
    width, compared = min(4 * len(tokens["experts"].iloc[0]), model.config.num_experts), 0
    for _, rows in tokens.groupby("document"):
        first = rows[rows["layer"] == layers[0]].sort_values("position")
        expected = answers_by_hand(model, first["token_id"].tolist(), width)
        for layer, (own, ranked) in zip(layers[1:], expected, strict=True):
            found = rows[rows["layer"] == layer].sort_values("position")["probed"]
            assert [list(experts) for experts in found] == ranked
            assert [list(experts[: len(own[0])]) for experts in found] == own
            compared += len(found)
    assert compared > 50


def test_where_layers_add_nothing_the_next_router_is_predicted_exactly(tmp_path):
    """Attention and experts give zeros, so that every router gets the same state: recall 100 % at k."""
    from transformers import AutoModelForCausalLM

    place = save_model(tmp_path / "model", "qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
            if "layernorm" in name:
                parameter.fill_(1)
    model.save_pretrained(place)
    run = probed_run(tmp_path, place, count=24)
    rows = moescope.deploy(run, out=tmp_path / "deployed", quiet=True).table("prefetch")
    k = len(run.table("tokens")["experts"].iloc[0])
    probe = rows[(rows["predictor"] == "next_router") & (rows["budget"] == k)]
    assert len(probe) >= 2
    assert probe["recall"].tolist() == [1.0] * len(probe)
    assert probe["chance"].tolist() == [k / probe["n_experts"].iloc[0]] * len(probe)
    other = rows[(rows["predictor"] == "previous_token") & (rows["budget"] == k)]
    assert other["recall"].max() < 0.9


def test_what_cannot_be_probed_is_one_line(tmp_path):
    place = save_model(tmp_path / "model", "mixtral")
    text = write_jsonl(tmp_path / "text.jsonl", texts(2))
    with pytest.raises(BadInput, match="--save-tokens"):
        moescope.trace(place, text=text, probe_next=True, out=tmp_path / "a", quiet=True)
    with pytest.raises(BadInput, match="--execution resident"):
        probed_run(tmp_path, place, execution="streamed")
    with pytest.raises(BadInput, match="--recorded"):
        moescope.trace(
            recorded=text, format="vllm", experts=4, probe_next=True, out=tmp_path / "b", quiet=True
        )


@pytest.mark.parametrize(("router", "possible"), [("top2", True), ("loss_free", True), ("hash", False)])
def test_a_lab_model_is_probed_unless_its_router_reads_more_than_states(tmp_path, router, possible):
    torch.manual_seed(3)
    model = LabModel(tiny_config(router).model)
    save_lab_model(model, Bytes(), tmp_path / "model")
    write_jsonl(tmp_path / "text.jsonl", texts(4))
    if not possible:
        with pytest.raises(BadInput, match="--probe-next"):
            probed_run(tmp_path, tmp_path / "model")
        return
    tokens = probed_run(tmp_path, tmp_path / "model").table("tokens")
    later = tokens[tokens["layer"] > tokens["layer"].min()]
    assert len(later)
    assert all(len(set(named)) == len(named) >= 2 for named in later["probed"])
