"""What capture hands on is what the model's experts were really given, for every family.

And nothing is counted twice.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from families import tiny_models
from families.tiny_models import Seen, TinyModel, tiny_model
from moescope.errors import BadInput
from moescope.execution import capture as capturing
from moescope.execution.adapters import find_blocks, router_logits
from moescope.execution.capture import Capture
from moescope.types import Routing

KINDS = [kind for kind in tiny_models.KINDS if kind != "nllb-moe"]  # which has its own test below
tiny = functools.cache(tiny_model)


def probe(rows: int = 1, length: int = 12) -> Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def run(model: nn.Module, ids: Tensor, **more) -> dict[int, Routing]:
    """One forward pass under capture: layer -> its routing."""
    if model.config.is_encoder_decoder:
        more["decoder_input_ids"] = ids.flip(1)
    found: list[Routing] = []
    with Capture(model, found.append), torch.no_grad():
        model(input_ids=ids, **more)
    assert len({routing.layer for routing in found}) == len(found)
    return {routing.layer: routing for routing in found}


def dense(routing: Routing) -> Tensor:
    """Gates as a T x E matrix, 0 where not chosen."""
    full = torch.zeros(len(routing.chosen_TK), routing.n_experts)
    for token, (experts, gates) in enumerate(
        zip(routing.chosen_TK.tolist(), routing.gates_TK.tolist(), strict=True)
    ):
        for expert, gate in zip(experts, gates, strict=True):
            if expert >= 0:
                assert full[token, expert] == 0, "an expert chosen twice"
                full[token, expert] = gate
    return full


def own_gates(model: TinyModel, seen: Seen) -> Tensor:
    """The same matrix from what the experts module was handed, read apart from moescope."""
    if model.kind.startswith("llama4"):  # token times score, for every expert
        handed = seen.inputs[0].reshape(4, 12, -1)
        assert seen.x_TD is not None
        return (handed.norm(dim=-1) / seen.x_TD.reshape(12, -1).norm(dim=-1)).T
    _, index, weights = seen.inputs[:3]
    if model.kind == "switch_transformers":
        return index[:, 0].float() * weights
    full = torch.zeros(len(index), 4)
    for token in range(len(index)):
        for slot in range(index.shape[1]):
            full[token, index[token, slot]] += weights[token, slot]
    return full


@pytest.mark.parametrize("kind", KINDS)
def test_gates_are_those_the_experts_were_handed_and_logits_are_weight_times_input(kind):
    model = tiny(kind)
    routings = run(model.model, probe())
    assert len(routings) == len(model.blocks)
    for seen, (_, routing) in zip(model.blocks, sorted(routings.items()), strict=True):
        torch.testing.assert_close(dense(routing), own_gates(model, seen), rtol=1e-4, atol=1e-5)
        assert seen.path.startswith(routing.layer_name)
        assert seen.x_TD is not None
        weights = [
            module
            for name, module in seen.block.named_modules()
            if "expert" not in name and getattr(module, "weight", torch.zeros(1)).dim() == 2
        ]
        (router,) = (module for module in weights if module.weight.shape[0] == 4)
        naive = seen.x_TD.reshape(12, -1) @ router.weight.T
        if getattr(router, "bias", None) is not None:
            naive = naive + router.bias
        torch.testing.assert_close(routing.logits_TE, naive.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(routing.scores_TE.sum(-1), torch.ones(12))
        assert routing.selection_TE is not None
        best = routing.selection_TE.topk(routing.chosen_TK.shape[1]).indices.sort(-1).values
        assert torch.equal(best, routing.chosen_TK.sort(-1).values)


@pytest.mark.parametrize(
    "kind", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "jamba", "gpt_oss"]
)
def test_counts_equal_a_naive_recomputation_from_output_router_logits(kind):
    model = tiny(kind).model
    with torch.no_grad():
        given = model(input_ids=probe(2), output_router_logits=True).router_logits
    routings = run(model, probe(2))
    assert len(given) == len(routings)
    for logits, routing in zip(given, routings.values(), strict=True):
        chosen = logits.topk(2, dim=-1).indices
        assert torch.equal(
            chosen.flatten().bincount(minlength=4), routing.chosen_TK.flatten().bincount(minlength=4)
        )
        torch.testing.assert_close(logits.reshape(24, 4).float(), routing.logits_TE)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 2)])
def test_logits_are_found_wherever_the_router_puts_them_and_recomputed_where_it_does_not(order):
    (block, *_) = find_blocks(tiny("mixtral").model)
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    logits = (x @ block.weight_ED.T).detach()
    parts = (logits, logits.softmax(-1), logits.topk(2).values)
    block.router_input, block.router_outputs = x, tuple(parts[index] for index in order)
    torch.testing.assert_close(router_logits(block), logits)
    assert block.logits_at == (order.index(0) if 0 in order else -1)
    torch.testing.assert_close(router_logits(block), logits)


def test_scoring_is_found_for_softmax_and_sigmoid_with_and_without_bias():
    words = {}
    for kind in ("mixtral", "deepseek_v3", "llama4_text", "ernie4_5_moe", "phimoe"):
        with Capture(tiny(kind).model, lambda routing: None) as capture, torch.no_grad():
            tiny(kind).model(input_ids=probe())
        words[kind] = capture.blocks[0].scoring.words()
    assert words == {
        "mixtral": "softmax",
        "deepseek_v3": "sigmoid, bias for choosing",
        "llama4_text": "sigmoid",
        "ernie4_5_moe": "softmax, bias for choosing",
        "phimoe": "softmax",
    }


# --- NLLB: transformers runs other experts than its router chose


def right_nllb(self, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """NLLB's mixing as its paper has it: each expert with a gate above 0, times that gate."""
    out = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):
        out += (
            router_probs[:, expert, None]
            * self[f"expert_{expert}"](hidden_states)
            * (1 - self.moe_token_dropout)
        )
    return out


def test_nllb_is_refused_by_name_where_its_experts_are_not_those_chosen():
    with pytest.raises(
        BadInput, match=r"'nllb-moe': .* layer 1 \(model\.encoder\.layers\.1\.ffn\).* experts 0 and 1 only"
    ):
        run(tiny("nllb-moe").model, probe())


def test_nllb_is_read_where_its_experts_are_those_chosen(monkeypatch):
    model = tiny_model("nllb-moe").model
    monkeypatch.setattr(type(model.model.encoder.layers[1].ffn.experts), "forward", right_nllb)
    given: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module.register_forward_hook(lambda module, args, output: given.append(args[2]))
    routings = run(model, probe())
    assert sorted(routings) == [1, 3, 5, 7]
    gates = [part for part in given if len(part) == 12]
    for number, routing in enumerate(routings.values()):
        assert torch.equal(dense(routing), gates[number])
        assert int(routing.dropped_T.sum()) == 2 * 12 - int((gates[number] > 0).sum())


# --- what must not be counted


def test_activations_recomputed_in_the_backward_pass_are_not_counted_twice():
    from transformers import MixtralForCausalLM

    source = tiny("mixtral").model
    for reentrant in (False, True):
        model = MixtralForCausalLM(source.config)
        model.load_state_dict(source.state_dict())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        seen: list[Routing] = []
        runs = []
        model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda *parts, runs=runs: runs.append(1))
        with Capture(model, seen.append, check=False):
            ids = probe(2)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert len(runs) == 2, "nothing was recomputed, so nothing was tested"
        assert len(seen) == 3


def test_experts_on_other_ranks_are_dropped():
    model = tiny_model("mixtral").model
    with torch.no_grad():
        before = run(model, probe())[0]

    def elsewhere(module, args, output):
        logits, gates, index = output
        gone = index == 3
        return logits, gates.masked_fill(gone, 0.0), index.masked_fill(gone, 4)

    block = model.model.layers[0].mlp
    block.gate.register_forward_hook(elsewhere)
    block.experts._is_expert_parallel = (
        True  # as transformers marks it; else rows of expert 4 hold old memory
    )
    after = run(model, probe())[0]
    assert (before.chosen_TK == 3).any()
    assert torch.equal(after.chosen_TK, before.chosen_TK.masked_fill(before.chosen_TK == 3, -1))
    assert torch.equal(dense(after)[:, :3], dense(before)[:, :3])


def test_tokens_beyond_an_expert_s_capacity_have_no_expert():
    model = tiny_model("switch_transformers").model
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersTop1Router":
            module.expert_capacity = 2
    for routing in run(model, probe()).values():
        assert torch.equal((routing.chosen_TK < 0).squeeze(-1).long(), routing.dropped_T)
        assert routing.chosen_TK[routing.chosen_TK >= 0].bincount().max() <= 2
    assert routing.dropped_T.sum() >= 4


# --- what is refused


def test_a_layer_that_does_not_run_is_named():
    model = tiny_model("mixtral").model
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    with pytest.raises(BadInput, match=r"'mixtral': layer 1 \(model\.layers\.1\.mlp\) did not run"):
        run(model, probe())


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "qwen2_moe", "llama4_text", "axk1", "dbrx"])
def test_a_block_whose_output_is_not_gates_times_experts_is_named(kind):
    model = tiny_model(kind)
    last = model.blocks[-1]
    last.block.register_forward_hook(
        lambda module, args, output: (output[0] if isinstance(output, tuple) else output) * 1.5
    )
    with pytest.raises(
        BadInput,
        match=rf"gates times expert outputs do not give the output of layer \d+ \({last.path[:-8]}\)",
    ):
        run(model.model, probe())


def test_a_model_without_experts_is_refused_by_name():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=64,
        pad_token_id=0,
    )
    with pytest.raises(BadInput, match="model type 'llama': no experts module"):
        Capture(LlamaForCausalLM(config), lambda routing: None)


def test_the_check_costs_nothing_after_the_first_pass():
    model = tiny_model("mixtral").model
    runs: list[int] = []
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *parts: runs.append(1))
    with Capture(model, lambda routing: None), torch.no_grad():
        model(input_ids=probe())
        first = len(runs)
        model(input_ids=probe())
    assert (first, len(runs)) == (3, 4)  # itself, and once for each of two slots
    assert capturing.CHECKED_TOKENS >= 12


# --- rounding: near ties of half-precision logits may fall either way


@functools.cache
def half_olmoe(experts: int = 64) -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        hidden_size=256,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        eos_token_id=1,
        num_experts=experts,
        num_experts_per_tok=8,
    )
    torch.manual_seed(0)
    return OlmoeForCausalLM(config).to(torch.bfloat16).eval()


def captured(model: nn.Module) -> tuple[list[Routing], Capture]:
    ids = torch.randint(0, 512, (4, 256), generator=torch.Generator().manual_seed(0))
    found: list[Routing] = []
    with Capture(model, found.append) as capture, torch.no_grad():
        model(input_ids=ids)
    return found, capture


def test_a_choice_in_bf16_is_recognised_in_every_layer():
    found, capture = captured(half_olmoe())
    assert [block.scoring.words() for block in capture.blocks] == ["softmax"] * 2
    for routing, block in zip(found, capture.blocks, strict=True):
        assert routing.logits_TE is not None
        # the logits are the model's own, from the first batch on: they order the chosen before all others
        own = routing.logits_TE
        assert torch.equal(own, own.bfloat16().float())
        chosen = torch.zeros_like(own, dtype=torch.bool).scatter(1, routing.chosen_TK, True)
        least = own.masked_fill(~chosen, float("inf")).amin(-1)
        assert (least >= own.masked_fill(chosen, float("-inf")).amax(-1)).all()
        assert block.logits_at == 0


def test_a_choice_in_bf16_is_recognised_where_logits_must_be_recomputed(monkeypatch):
    """Rounding to bf16 reorders more than 2 % of the tokens here, none by more than it can."""
    model = half_olmoe(experts=128)
    for block in find_blocks(model):
        forward = block.router.forward
        monkeypatch.setattr(block.router, "forward", lambda x, own=forward: (x.new_zeros(1), *own(x)[1:]))
    found, capture = captured(model)
    assert [block.logits_at for block in capture.blocks] == [-1] * 2
    for routing in found:
        assert routing.logits_TE is not None
        best = routing.logits_TE.topk(8).indices.sort(-1).values
        flips = (best != routing.chosen_TK.sort(-1).values).any(-1).float().mean()
        assert flips > 0.02, "the case must be one in which rounding matters"
    assert [block.scoring.words() for block in capture.blocks] == ["softmax"] * 2


def choose_next(logits: Tensor) -> Tensor:
    """All but the best."""
    return logits.topk(9, dim=-1).indices[:, 1:]


def choose_with_hidden_bias(logits: Tensor) -> Tensor:
    drawn = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(5))
    return (logits + 0.1 * drawn).topk(8, dim=-1).indices


def choose_by_size(logits: Tensor) -> Tensor:
    return logits.abs().topk(8, dim=-1).indices


def choose_in_groups(logits: Tensor) -> Tensor:
    """The best of each eighth of the experts, which the config does not say."""
    per_group = logits.reshape(len(logits), 8, -1)
    return per_group.argmax(-1) + torch.arange(8) * per_group.shape[-1]


def choose_sampled(logits: Tensor) -> Tensor:
    """Gumbel noise: the k are drawn, not the best."""
    drawn = torch.rand(logits.shape, generator=torch.Generator().manual_seed(6)).clamp(min=1e-9)
    return (logits - drawn.log().neg().log()).topk(8, dim=-1).indices


@pytest.mark.parametrize(
    "rule", [choose_next, choose_with_hidden_bias, choose_by_size, choose_in_groups, choose_sampled]
)
@pytest.mark.parametrize("returns_logits", [True, False])
def test_another_rule_in_bf16_stays_unrecognised(rule, returns_logits, monkeypatch):
    model = half_olmoe()
    for block in find_blocks(model):

        def forward(x: Tensor, router: nn.Module = block.router) -> tuple[Tensor, ...]:
            logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
            chosen = rule(logits.float())
            gates = logits.float().softmax(-1).gather(1, chosen).to(logits.dtype)
            return (logits if returns_logits else logits.new_zeros(1)), gates, chosen

        monkeypatch.setattr(block.router, "forward", forward)
    _, capture = captured(model)
    assert [block.logits_at for block in capture.blocks] == [0 if returns_logits else -1] * 2
    assert not any(block.scoring.explains for block in capture.blocks)


def test_logits_of_a_router_with_an_adapter_of_peft_are_those_of_the_merged_router():
    from peft import LoraConfig, get_peft_model

    model = tiny_model("mixtral").model
    plain = [block.weight_ED.clone() for block in find_blocks(model)]
    names = [name for name, weight in model.named_parameters() if name.endswith("mlp.gate.weight")]
    settings = LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
    adapted = get_peft_model(model, settings).eval()
    ids = probe()

    def look() -> tuple[list[Tensor], list[Tensor]]:
        logits_TE = [routing.logits_TE.clone() for routing in run(model, ids).values()]
        return logits_TE, [block.weight_ED for block in find_blocks(model)]

    with_adapters = look()
    adapted.merge_and_unload()
    for ours, merged in zip(with_adapters, look(), strict=True):
        for one, other in zip(ours, merged, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(plain, with_adapters[1], strict=True))
