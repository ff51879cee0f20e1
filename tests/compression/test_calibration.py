"""Calibration: the model's own choices and gates, its experts' own outputs, in sums that add up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compression.tiny_plans import documents, traced
from families.tiny_models import own_experts, tiny_model
from moescope.compression.calibration import (
    SUM_NAMES,
    RoutedSums,
    StateSample,
    add_sums,
    calibrate,
    find_gating,
    load_sums,
    outputs_of_chosen,
    save_sums,
    states_from_arrays,
    states_to_arrays,
)
from moescope.execution.documents import Document, Window

KINDS = ["mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text", "dbrx"]


class Everything:
    """A collector that keeps all it is shown."""

    def __init__(self, with_outputs: bool = False):
        self.seen: list = []
        self.with_outputs = with_outputs

    def consume(self, routing, block):
        outputs = list(outputs_of_chosen(routing, block)) if self.with_outputs else []
        self.seen.append((routing, block, outputs))

    def sums(self):
        return {}


def by_hand(kind: str, texts: list[Document]) -> dict[int, dict[str, np.ndarray]]:
    """The pruning sums from the model's own calls, seen by plain hooks.

    One document at a time and every expert run dense.
    """
    tiny = tiny_model(kind)
    found: dict[int, dict[str, np.ndarray]] = {}
    for index, seen in enumerate(tiny.blocks):
        own = found.setdefault(index, {name: np.zeros((256, 4)) for name in SUM_NAMES})
        experts = own_experts(seen.experts)

        def hook(module, args, kwargs, output, own=own, experts=experts):
            x, chosen, gates = (*args, *kwargs.values())
            for token in range(len(x)):
                for slot in range(chosen.shape[1]):
                    expert = int(chosen[token, slot])
                    hidden = torch.nn.functional.silu(experts["gate"][expert] @ x[token]) * (
                        experts["up"][expert] @ x[token]
                    )
                    norm, gate = float((experts["down"][expert] @ hidden).norm()), float(gates[token, slot])
                    for name, value in zip(SUM_NAMES, (1, gate, norm, gate * norm), strict=True):
                        own[name][bucket, expert] += value

        seen.experts.register_forward_hook(hook, with_kwargs=True)
    for document in texts:
        whole = Window(0, 0, 0, document.ids, -1, 0, 0.0)
        from moescope.execution.documents import fingerprint

        bucket = (fingerprint(whole.ids) >> 1) % 256
        with torch.no_grad():
            tiny.model(input_ids=torch.from_numpy(document.ids)[None])
    return found


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_pruning_sums_equal_those_of_a_dense_run_by_hand_document_by_document(kind):
    texts = documents(6, longest=12)
    collector = RoutedSums()
    calibrate(traced(tiny_model(kind).model), texts, [collector], batch_size=4)
    expected = by_hand(kind, texts)
    for index, layer in enumerate(sorted(collector.layers)):
        for name in SUM_NAMES:
            np.testing.assert_allclose(
                collector.layers[layer][name].numpy(), expected[index][name], rtol=2e-4, atol=1e-6
            )


@pytest.mark.parametrize("kind", KINDS)
def test_gates_times_ungated_outputs_give_what_the_experts_gave(kind):
    """One expert at a time, weights of 1.

    Put together with the model's own gates they are the module's own output.
    """
    keeper = Everything(with_outputs=True)
    outputs: list[torch.Tensor] = []
    model = traced(tiny_model(kind).model)
    for block in (seen for seen in model.model.modules() if type(seen).__name__.endswith("Experts")):
        block.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    calibrate(model, documents(1), [keeper])
    first = {}
    for routing, block, parts in keeper.seen:
        first.setdefault(routing.layer, (routing, block, parts))
    for routing, block, parts in first.values():
        mixed = torch.zeros_like(routing.x_TD)
        for _, at, gates, out in parts:  # a token may be there twice, with two of its experts
            mixed.index_add_(0, at, gates[:, None].to(out.dtype) * out)
        if kind == "llama4_text":  # the gate stands before the expert there: compare with gates of 1
            own = own_experts(block.experts)
            for expert, at, out in (
                (e, a, o) for es, ats, _, outs in parts for e, a, o in zip(es, ats, outs, strict=True)
            ):
                x = routing.x_TD[at]
                hidden = torch.nn.functional.silu(own["gate"][expert] @ x) * (own["up"][expert] @ x)
                torch.testing.assert_close(out, own["down"][expert] @ hidden, rtol=1e-4, atol=1e-4)
            continue
        assert any(
            given.numel() == mixed.numel()
            and torch.allclose(given.reshape(mixed.shape), mixed, rtol=1e-3, atol=1e-3)
            for given in outputs
        ), f"{kind}, layer {routing.layer}"


def test_sums_of_two_texts_added_are_the_sums_over_both(tmp_path):
    first, second = documents(12, seed=1), documents(9, seed=2)
    found = []
    for texts in (first, second, [*first, *second]):
        collector = RoutedSums()
        calibrate(traced(tiny_model("deepseek_v3").model), texts, [collector])
        found.append(collector.sums())
    save_sums(tmp_path / "a.safetensors", found[0], {"documents": 12})
    ours, facts = load_sums(tmp_path / "a.safetensors")
    assert facts == {"documents": 12}
    both = add_sums(ours, found[1])
    assert set(both) == set(found[2])
    for name, tensor in found[2].items():
        if name.endswith("tokens_BE"):
            assert torch.equal(both[name], tensor)
            assert tensor.sum() > 0
        else:
            torch.testing.assert_close(both[name], tensor, rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """The most elements any tensor had that was made while it was on."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("kind", ["mixtral", "llama4_text", "gpt_oss"])
def test_no_tensor_of_experts_times_tokens_times_width_is_made_for_pruning(kind):
    """2,000 tokens of width 16 and 4 experts.

    Weights are small beside them, so the largest tensor made is of tokens.
    """
    keeper = Everything()
    calibrate(traced(tiny_model(kind).model), documents(1), [keeper])
    routing, block, _ = keeper.seen[-1]
    tokens, width = 2000, routing.x_TD.shape[1]
    copies = tokens // len(routing.x_TD) + 1
    from dataclasses import replace

    large = replace(
        routing,
        x_TD=routing.x_TD.repeat(copies, 1),
        chosen_TK=routing.chosen_TK.repeat(copies, 1),
        gates_TK=routing.gates_TK.repeat(copies, 1),
        tokens=None,
    )
    rows = len(large.x_TD)
    collector = RoutedSums()
    with torch.no_grad(), Largest() as largest:
        collector.consume(large, block)
    assert collector.layers[routing.layer]["tokens_BE"].sum() == rows * routing.chosen_TK.shape[1]
    widest = max(
        part.shape[-1] for part in block.experts.parameters()
    )  # gate and up together, in some layouts
    assert largest.elements <= rows * max(2 * width, widest, 48) < routing.n_experts * rows * max(width, 48)


def test_gates_and_choices_are_those_the_experts_were_handed_not_recomputed():
    """A router that is overruled on its way to the experts: what counts is what they were handed."""
    model = traced(tiny_model("mixtral").model)

    def overrule(module, args):
        x, chosen, gates = args
        if chosen.shape[1] == 1:  # not the block's call but calibration's, of one expert
            return args
        return x, torch.zeros_like(chosen) + torch.tensor([3, 1]), torch.full_like(gates, 0.5)

    for module in model.model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(overrule)
    collector = RoutedSums()
    calibrate(model, documents(5), [collector])
    for own in collector.layers.values():
        tokens = own["tokens_BE"].sum(0)
        assert tokens[[0, 2]].tolist() == [0, 0]
        assert tokens[1] == tokens[3] > 0
        assert own["gate_sums_BE"].sum(0)[1] == pytest.approx(0.5 * float(tokens[1]))


def test_parts_hold_whole_experts_and_no_more_rows_than_asked_but_for_one_large_expert():
    from moescope.compression.calibration import split_by_expert

    assert list(split_by_expert([3, 0, 4, 2, 9, 1, 0, 0], 7)) == [(0, 7), (7, 9), (9, 18), (18, 19)]
    assert list(split_by_expert([0, 0], 5)) == []
    assert list(split_by_expert([5], 5)) == [(0, 5)]


# --- the sample of states


def sampled(texts: list[Document], most: int, seed: int = 0, batch_size: int = 8) -> StateSample:
    sample = StateSample(seed, most)
    calibrate(traced(tiny_model("mixtral").model), texts, [sample], batch_size=batch_size)
    return sample


def test_a_sample_is_bounded_the_same_in_every_layer_and_in_any_order_and_differs_by_seed():
    texts = documents(30)
    found = sampled(texts, 40).states
    turned = sampled(list(reversed(texts)), 40, batch_size=3).states
    other = sampled(texts, 40, seed=1).states
    assert len(found) > 1
    draws = {layer: set(states.draw_T.tolist()) for layer, states in found.items()}
    for layer, states in found.items():
        assert len(states) == len(draws[layer]) == 40
        assert draws[layer] == draws[min(draws)] == set(turned[layer].draw_T.tolist())
        ours, theirs = (part.x_TD[part.draw_T.argsort()] for part in (states, turned[layer]))
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert not draws[min(draws)] & set(other[min(draws)].draw_T.tolist())


def test_samples_of_two_texts_make_the_sample_of_both():
    first, second = documents(15, seed=3), documents(15, seed=4)
    joined, both = sampled(first, 30), sampled([*first, *second], 30)
    joined.join(sampled(second, 30))
    assert len(both.states) > 1
    for layer, states in both.states.items():
        assert set(joined.states[layer].draw_T.tolist()) == set(states.draw_T.tolist())


def test_a_sample_is_spread_evenly_over_positions():
    texts = [Document(n, 0, np.random.default_rng(n).integers(3, 64, 60)) for n in range(40)]
    keeper = Everything()
    calibrate(traced(tiny_model("mixtral").model), texts, [keeper])
    from moescope.compression.calibration import draws

    picked = []
    for routing, _, _ in keeper.seen:
        if routing.layer == keeper.seen[0][0].layer:
            chosen = draws(routing.tokens, 0) < 0  # half of a symmetric range
            picked += routing.tokens.position_T[chosen].tolist()
    share = np.bincount(np.array(picked) // 20, minlength=3) / 800
    np.testing.assert_allclose(share, 0.5, atol=0.06)


def test_states_hold_the_router_s_own_logits_choices_and_gates_and_survive_a_file():
    states = sampled(documents(20), 64).states
    arrays = states_to_arrays(states)
    back = states_from_arrays(arrays)
    model = tiny_model("mixtral")
    for (layer, own), seen in zip(back.items(), model.blocks, strict=True):
        assert torch.equal(own.x_TD, states[layer].x_TD)
        logits = own.x_TD @ seen.block.gate.weight.detach().T
        torch.testing.assert_close(own.logits_TE, logits, rtol=1e-4, atol=1e-4)
        top = logits.softmax(-1).topk(2)
        assert torch.equal(top.indices.sort().values, own.chosen_TK.sort().values)


@pytest.mark.parametrize(
    ("kind", "normalised", "scale"),
    [
        ("mixtral", True, 1.0),
        ("olmoe", False, 1.0),
        ("deepseek_v3", True, 2.5),
        ("gpt_oss", True, 1.0),
        ("granitemoe", True, 1.0),
    ],
)
def test_how_gates_are_made_is_found_from_the_sample_and_routes_it_as_the_model_did(kind, normalised, scale):
    sample = StateSample()
    found = calibrate(traced(tiny_model(kind).model), documents(20), [sample])
    for layer, states in sample.states.items():
        gating = find_gating(states, found.blocks[layer].scoring)
        assert gating.explains
        assert (gating.normalised, gating.scale) == (normalised, pytest.approx(scale, rel=1e-3))
        chosen, gates = gating.route(states.logits_TE)
        ours, theirs = (
            torch.zeros(len(states), 4).scatter(1, c.long(), g.float())
            for c, g in ((chosen, gates), (states.chosen_TK, states.gates_TK))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
