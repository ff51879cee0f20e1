"""The model against transformers' Mixtral and Qwen3-MoE, against torch's own attention, and counted."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from decoder.tiny_lab import TINY, padding, run, text, tiny
from moescope.decoder.model import LabModel, parameter_counts
from moescope.errors import BadInput
from moescope.lab.config import PRESETS

SHARED = {
    "vocab_size": TINY.vocabulary,
    "hidden_size": TINY.d_model,
    "num_hidden_layers": TINY.layers,
    "num_attention_heads": TINY.heads,
    "num_key_value_heads": TINY.heads,
    "head_dim": TINY.d_model // TINY.heads,
    "max_position_embeddings": TINY.max_positions,
    "rms_norm_eps": TINY.norm_epsilon,
    "tie_word_embeddings": False,
    "num_local_experts": TINY.experts,
    "num_experts": TINY.experts,
    "rope_parameters": {"rope_type": "default", "rope_theta": TINY.rope_base},
}


def renamed(model: LabModel) -> dict[str, torch.Tensor]:
    """The state dict under the names both models have in memory."""
    names = {
        "mlp.router.weight": "mlp.gate.weight",
        "experts.gate_up": "experts.gate_up_proj",
        "experts.down": "experts.down_proj",
    }
    found = {}
    for name, value in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name if name.startswith("lm_head") else f"model.{name}"] = value
    return found


def theirs_of(model: LabModel) -> nn.Module:
    if model.config.top_k > 1 and model.config.qk_norm is not True:
        config = MixtralConfig(intermediate_size=TINY.d_ff, num_experts_per_tok=model.config.top_k, **SHARED)
        made: nn.Module = MixtralForCausalLM(config)
    else:
        made = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                moe_intermediate_size=TINY.d_ff,
                num_experts_per_tok=model.config.top_k,
                norm_topk_prob=model.config.top_k > 1,
                **SHARED,
            )
        )
    made.load_state_dict(renamed(model))  # strict: nothing missing, nothing left over
    return made.eval()


@pytest.mark.parametrize(
    ("router", "changes"),
    [("top2", {}), ("topk", {"top_k": 3}), ("switch_top1", {}), ("topk", {"top_k": 3, "qk_norm": True})],
)
def test_logits_and_gradients_are_those_of_transformers_own_model(router, changes):
    torch.manual_seed(0)
    model = LabModel(tiny(router, **changes)).eval()
    with torch.no_grad():  # norms that are not all ones, routers that are sure
        for name, weight in model.named_parameters():
            weight.add_(torch.randn_like(weight) * (0.3 if "norm" in name else 0.1))
    theirs, ids = theirs_of(model), text(3, 16)
    assert type(theirs).__name__ == (
        "Qwen3MoeForCausalLM" if model.blocks[0].self_attn.q_norm else "MixtralForCausalLM"
    )
    expected = theirs(input_ids=ids).logits
    torch.testing.assert_close(run(model, ids).logits, expected.detach(), rtol=1e-4, atol=1e-5)
    model(ids[:, :-1], targets_BL=ids[:, 1:]).lm_loss.backward()
    theirs(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    model_gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name, value in renamed(as_if(model, model_gradients)).items():
        torch.testing.assert_close(
            value, gradients[name], rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def as_if(model: LabModel, values: dict[str, torch.Tensor]) -> LabModel:
    """A model whose state dict is these values, so that they are renamed alike."""
    made = LabModel(model.config)
    made.load_state_dict(values)
    return made


def test_queries_and_keys_are_normed_only_where_the_layout_needs_it_or_the_config_says_so():
    def normed(**changes: object) -> bool:
        return LabModel(tiny(**changes)).blocks[0].self_attn.q_norm is not None

    assert not normed(router="top2")
    assert not normed(router="loss_free")
    assert normed(router="switch_top1")
    assert normed(router="top2", router_options={"renormalise": False})
    assert normed(router="top2", qk_norm=True)
    assert not normed(router="switch_top1", qk_norm=False)


def test_the_some_block_is_torchs_own_attention_and_layer_norms_around_the_experts():
    """Written out with nn.MultiheadAttention, experts one by one, positions by their formula."""
    torch.manual_seed(0)
    config = tiny("topk", block="some")
    model = LabModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    ids = text(1, 12)
    made = run(model, ids)
    D, state = config.d_model, model.state_dict()
    position, pair = torch.arange(12.0)[:, None], torch.arange(D // 2)
    angle = position / 10_000 ** (2 * pair / D)
    x = state["embed_tokens.weight"][ids] * math.sqrt(D)
    x[..., 0::2] += angle.sin()
    x[..., 1::2] += angle.cos()
    for layer in range(config.layers):
        own = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in state.items()
            if f"layers.{layer}." in name
        }
        attention = nn.MultiheadAttention(D, config.heads, batch_first=True).eval()
        attention.load_state_dict(
            {
                "in_proj_weight": torch.cat([own[f"self_attn.{p}_proj.weight"] for p in "qkv"]),
                "in_proj_bias": torch.cat([own[f"self_attn.{p}_proj.bias"] for p in "qkv"]),
                "out_proj.weight": own["self_attn.o_proj.weight"],
                "out_proj.bias": own["self_attn.o_proj.bias"],
            }
        )
        unseen = torch.ones(12, 12, dtype=torch.bool).triu(1)
        with torch.no_grad():
            x = x + attention(x, x, x, attn_mask=unseen, need_weights=False)[0]
        x = functional.layer_norm(x, (D,), own["input_layernorm.weight"], own["input_layernorm.bias"])
        routing, added = made.layers[layer], torch.zeros_like(x)
        for t in range(12):
            for e, gate in zip(routing.chosen_TK[t].tolist(), routing.gates_TK[t], strict=True):
                hidden = functional.gelu(own["mlp.experts.up"][e] @ x[0, t] + own["mlp.experts.up_bias"][e])
                added[0, t] += gate * (own["mlp.experts.down"][e] @ hidden + own["mlp.experts.down_bias"][e])
        x = functional.layer_norm(
            x + added, (D,), own["post_attention_layernorm.weight"], own["post_attention_layernorm.bias"]
        )
    expected = x @ state["lm_head.weight"].T + state["lm_head.bias"]
    torch.testing.assert_close(made.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", ["modern", "some"])
def test_reading_on_in_pieces_of_any_length_equals_the_full_pass(block):
    torch.manual_seed(0)
    model, ids = LabModel(tiny("topk", block=block)).eval(), text(2, 20)
    cache = model.new_cache()
    pieces = [run(model, ids[:, start:end], cache=cache).logits for start, end in ((0, 7), (7, 8), (8, 20))]
    assert cache.length == 20
    torch.testing.assert_close(torch.cat(pieces, 1), run(model, ids).logits, rtol=0, atol=1e-5)


def test_the_loss_is_the_mean_over_targets_and_the_routers_losses_are_added():
    torch.manual_seed(0)
    model, ids, mask = LabModel(tiny("top2")).train(), text(6, 16), padding(6, 16)
    targets = torch.where(mask, text(6, 16, seed=1), -100)
    out = model(ids, mask, targets)
    logits = model(ids, mask).logits_BLV
    expected = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    torch.testing.assert_close(out.lm_loss, expected)
    torch.testing.assert_close(out.loss, out.lm_loss + out.aux_loss)
    torch.testing.assert_close(out.aux_loss, out.losses["balance"] + out.losses["z"])
    assert out.losses["balance"].item() == pytest.approx(
        0.01 * TINY.layers, rel=0.2
    )  # each layer's is 1 when balanced
    assert (out.token_losses_BL[~mask] == 0).all()
    torch.testing.assert_close(out.token_losses_BL.sum() / mask.sum(), out.lm_loss.detach())


def test_a_batch_without_any_target_has_a_loss_of_zero():
    model = LabModel(tiny("dense"))
    assert model(text(2, 8), targets_BL=torch.full((2, 8), -100)).loss.item() == 0


def test_more_tokens_than_positions_are_refused_also_through_the_cache():
    model = LabModel(tiny("dense")).eval()
    with pytest.raises(BadInput, match="65 tokens exceed the model's 64 positions"):
        model(text(1, 65))
    cache = model.new_cache()
    run(model, text(1, 64), cache=cache)
    with pytest.raises(BadInput, match="65 tokens"):
        run(model, text(1, 1), cache=cache)


def test_the_depth_state_of_spectra_goes_from_each_layer_to_the_next():
    torch.manual_seed(0)
    model, seen = LabModel(tiny("spectra")).eval(), []
    for router in model.routers:
        router.register_forward_hook(
            lambda _, given, routed: seen.append((given[0].carried_TR, routed.carried_TR))
        )
    run(model, text(2, 8))
    assert len(seen) == TINY.layers > 1
    assert seen[0][0] is None
    for (_, left), (found, _) in pairwise(seen):
        assert torch.equal(found, left)


def test_what_adds_to_the_stream_begins_smaller_by_the_root_of_twice_the_layers():
    torch.manual_seed(0)
    model = LabModel(tiny("topk", layers=8, d_model=64, d_ff=64))
    for block in model.blocks:
        for adding, other in (
            (block.self_attn.o_proj.weight, block.self_attn.v_proj.weight),
            (block.mlp.experts.down, block.mlp.experts.gate_up),
        ):
            assert other.std().item() == pytest.approx(0.02, rel=0.05)
            assert adding.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_tied_embeddings_are_one_tensor_and_counted_once():
    tied = tiny("top2", tie_embeddings=True)
    assert parameter_counts(TINY).total - parameter_counts(tied).total == TINY.vocabulary * TINY.d_model
    model = LabModel(tied)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_cast_model_keeps_its_routers_in_float32_and_still_trains():
    torch.manual_seed(0)
    model, ids = LabModel(tiny("loss_free")).cast(torch.bfloat16).train(), text(4, 16)
    for name, weight in model.named_parameters():
        assert weight.dtype == (torch.float32 if ".router." in name else torch.bfloat16)
    model(ids[:, :-1], targets_BL=ids[:, 1:]).loss.backward()
    assert all(weight.grad is not None and torch.isfinite(weight.grad).all() for weight in model.parameters())


# --- parameters, as printed


@pytest.mark.parametrize(
    ("name", "total"),
    [("some_a4", "701.50"), ("some_b1", "1373.57"), ("some_b2", "2717.71"), ("some_b3", "5406.00")],
)
def test_some_models_have_the_published_numbers_of_parameters(name, total):
    counts = parameter_counts(PRESETS[name].model)
    assert f"{counts.total / 1e6:.2f}" == total
    assert f"{counts.trainable / 1e6:.2f}" == "29.42"


@pytest.mark.parametrize(
    ("name", "total"), [("nano", 887_872), ("small", 41_446_656), ("medium", 1_025_845_760)]
)
def test_other_presets_have_the_documented_numbers_of_parameters(name, total):
    """By hand.

    V D at both ends, in each layer 4 D^2 of attention, 2 D of norms, E D of router and 3 E F D of experts,
    and D at the end.
    """
    config = PRESETS[name].model
    V, D, E, F = config.vocabulary, config.d_model, config.experts, config.d_ff
    assert 2 * V * D + config.layers * (4 * D * D + 2 * D + E * D + 3 * E * F * D) + D == total
    counts = parameter_counts(config)
    assert counts.total == counts.trainable == total


def test_counting_is_what_a_real_model_has():
    for config in (
        TINY,
        tiny("loss_free"),
        tiny("topk", block="some"),
        replace(TINY, block="some", frozen_experts=True),
    ):
        model, counts = LabModel(config), parameter_counts(config)
        assert counts.total == sum(weight.numel() for weight in model.parameters())
        assert counts.trainable == sum(
            weight.numel() for weight in model.parameters() if weight.requires_grad
        )
