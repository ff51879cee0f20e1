"""Passes from stored hidden states, against plain forward passes of a model whose weights are edited."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from compression.tiny_plans import traced
from families.tiny_models import KINDS, tiny_model
from moescope.execution.documents import Document
from moescope.execution.evaluation import Predictions, kl_divergence
from moescope.intervention.changes import parse_change
from moescope.intervention.passes import Passes

QUICK = {"deepseek_v3", "gpt_oss", "jamba", "qwen3_next"}
WITHOUT_HEAD = {"glm4v_moe_text", "qwen3_vl_moe_text", "nllb-moe", "switch_transformers"}


def documents(count: int = 14, seed: int = 0) -> list[Document]:
    """Of different lengths, so that most batches have padding."""
    draw = np.random.default_rng(seed)
    return [Document(3 * at, at % 2, draw.integers(3, 64, draw.integers(2, 40))) for at in range(count)]


def decoder_calls(model, layers) -> list[int]:
    """Count the calls of every decoder layer from now on."""
    counts = [0] * len(layers)

    def count(at):
        def hook(*_):
            counts[at] += 1

        return hook

    for at, layer in enumerate(layers):
        layer.self_attn.register_forward_pre_hook(count(at), with_kwargs=True)
    return counts


def plain(model, document: Document) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(document.ids)[None]).logits[0].double()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_an_ablation_is_what_transformers_gives_with_the_expert_s_output_weights_zero(kind):
    """In float64, so that batches of other shapes round alike."""
    model, texts = copy.deepcopy(tiny_model(kind).model).double(), documents()
    model.set_experts_implementation("eager")  # grouped products have no float64
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited.model.layers[1].mlp.experts.down_proj[2] = 0
    with Passes(traced(model), texts, 4) as passes:
        passes.run_untouched(1)
        effect = passes.judge([[parse_change("layer=1 expert=2 ablate")]])[0]
    for place, document in enumerate(texts):
        after = torch.from_numpy(document.ids[1:])
        before, changed = (plain(each, document)[:-1] for each in (model, edited))
        p, q = before.log_softmax(-1), changed.log_softmax(-1)
        n = max(len(after), 1)
        rows = torch.arange(len(after))
        assert passes.tokens_D[place] == len(after)
        assert passes.loss_D[place] / n == pytest.approx(-p[rows, after].sum().item() / n, abs=1e-6)
        assert effect.loss_D[place] / n == pytest.approx(-q[rows, after].sum().item() / n, abs=1e-6)
        kl = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
        assert effect.kl_D[place] / n == pytest.approx(kl / n, abs=1e-6)
        assert effect.predictions_D[place] == (before.argmax(-1) != changed.argmax(-1)).sum()
    assert effect.kl_D.sum() > 0.1


def test_an_untouched_suffix_gives_the_logits_of_the_whole_pass_bit_for_bit():
    model = tiny_model("mixtral").model
    for first in (0, 1, 2):
        with Passes(traced(model), documents(), 4) as passes:
            passes.run_untouched(first)
            for number in range(len(passes.batches)):
                whole = passes.run(number)
                suffix = passes.run(number, first, passes.inputs[number])
                head = passes.run(number, 3, passes.final[number])
                assert torch.equal(whole, suffix)
                assert torch.equal(whole, head)
            effect = passes.judge([[parse_change(f"layer={first} expert=0 bias by=0")]])[0]
            assert (effect.loss_D == passes.loss_D).all()
            assert not effect.kl_D.any()
            assert not effect.predictions_D.any()
            assert not effect.choices_changed_D.any()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow])
        for kind in sorted(set(KINDS) - WITHOUT_HEAD)
    ],
)
def test_stored_states_are_exact_in_every_family(kind):
    with Passes(traced(tiny_model(kind).model), documents(6), 4) as passes:
        layer = max(passes.blocks)
        passes.run_untouched(passes.position[layer])
        for number in range(len(passes.batches)):
            suffix = passes.run(number, passes.first, passes.inputs[number])
            assert torch.equal(passes.run(number), suffix)
        assert passes.judge([[parse_change(f"layer={layer} expert=1 ablate")]])[0].kl_D.sum() > 0


def test_a_sweep_runs_the_prefix_once_and_per_expert_the_suffix_only():
    model = tiny_model("mixtral").model
    counts = decoder_calls(model, model.model.layers)
    with Passes(traced(model), documents(), 4) as passes:
        passes.run_untouched(1)
        assert passes.is_exact()  # layers 1 and 2 on one batch
        for expert in range(4):
            passes.judge([[parse_change(f"layer=1 expert={expert} ablate")]])
        passes.move_to(2)
        for expert in range(4):
            passes.judge([[parse_change(f"layer=2 expert={expert} ablate")]])
        n = len(passes.batches)
        # untouched once everywhere; layer 1 also to reach layer 2
        assert counts == [n, n * (1 + 4 + 1) + 1, n * (1 + 4 + 4) + 1]
        assert sum(counts) == passes.calls([1] * 4 + [2] * 4)[0]
        assert passes.calls([1] * 4 + [2] * 4)[1] == n * 3 * 9


def test_stored_inputs_moved_to_a_later_layer_are_those_of_a_whole_pass():
    model = tiny_model("mixtral").model
    change = parse_change("layer=2 expert=1 ablate")
    effects = []
    for first in (0, 2):
        with Passes(traced(model), documents(), 4) as passes:
            passes.run_untouched(first)
            passes.move_to(2)
            effects.append(passes.judge([[change]])[0])
    for name in ("loss_D", "kl_D", "predictions_D"):
        assert (getattr(effects[0], name) == getattr(effects[1], name)).all()


def test_routing_is_counted_as_plain_hooks_see_it():
    """Load, entropy and CV of layer 1, and changed choices in layer 2, document by document."""
    model, texts = tiny_model("mixtral").model, documents()
    edited = copy.deepcopy(model)
    with torch.no_grad():
        edited.model.layers[1].mlp.experts.down_proj[2] = 0
    with Passes(traced(model), texts, 4) as passes:
        passes.run_untouched(1)
        effect = passes.judge([[parse_change("layer=1 expert=2 ablate")]])[0]
    seen = {}
    for name, each in (("before", model), ("after", edited)):
        for layer in (1, 2):
            each.model.layers[layer].mlp.gate.register_forward_hook(
                lambda module, args, output, key=(name, layer): seen.setdefault(key, []).append(
                    torch.nn.functional.linear(args[0].reshape(-1, 16), module.weight)
                )
            )
    for document in texts:
        plain(model, document)
        plain(edited, document)
    logits = torch.cat(seen["before", 1])
    counts = torch.bincount(logits.topk(2).indices.flatten(), minlength=4).double()
    probabilities = logits.double().softmax(-1)
    entropy = -(probabilities * probabilities.log()).sum(-1).mean().item()
    facts = effect.routing
    assert facts["load"] == pytest.approx((counts[2] / counts.sum()).item())
    assert facts["load_changed"] == facts["load"]
    assert facts["cv"] == pytest.approx((counts.std(correction=0) / counts.mean()).item())
    assert facts["entropy"] == pytest.approx(entropy, abs=1e-6)
    for place in range(len(texts)):
        both = [seen[name, 2][place].topk(2).indices.tolist() for name in ("before", "after")]
        changed = sum(len(set(after) - set(before)) for before, after in zip(*both, strict=True))
        assert effect.choices_D[place] == 2 * len(texts[place].ids)
        assert effect.choices_changed_D[place] == changed
    assert effect.choices_changed_D.sum() > 0


def test_divergence_is_scipy_s():
    from scipy.stats import entropy

    generator = torch.Generator().manual_seed(0)
    before, after = (3 * torch.randn(9, 20, generator=generator) for _ in range(2))
    following = torch.arange(9)
    first, second = (
        Predictions(logits, following, np.zeros(len(following), int)) for logits in (before, after)
    )
    loss, kl, differs = second.loss_N, kl_divergence(first, second), first.top_N != second.top_N
    p, q = (part.double().softmax(-1).numpy() for part in (before, after))
    assert kl.numpy() == pytest.approx([entropy(a, b) for a, b in zip(p, q, strict=True)], rel=1e-9)
    assert loss.numpy() == pytest.approx(-np.log(q[np.arange(9), np.arange(9)]), rel=1e-9)
    assert (differs.numpy() == (p.argmax(-1) != q.argmax(-1))).all()


def test_afterwards_layers_have_their_own_forward_again():
    model = tiny_model("mixtral").model
    with Passes(traced(model), documents(3), 4):
        assert all("forward" in vars(layer) for layer in model.model.layers)
    assert not any("forward" in vars(layer) for layer in model.model.layers)


@pytest.mark.parametrize("router", ["spectra", "some", "expert_choice"])
def test_a_lab_model_with_its_own_decoder_is_judged_from_stored_states(router, tmp_path):
    """Against the same model with the expert's last matrix set to zero, run as a whole."""
    from execution.test_lab_models import saved
    from moescope.execution.lab_models import load_traced

    folder = saved(router, tmp_path / "model")
    model, edited = (load_traced(folder, "auto", "cpu") for _ in range(2))
    layer = len(model.model.model.blocks) - 1
    with torch.no_grad():
        for name, weight in edited.model.model.blocks[layer].mlp.experts.named_parameters():
            if name.startswith("down"):
                weight[1] = 0
    with Passes(model, documents(), 4) as passes:
        passes.run_untouched(layer)
        assert passes.is_exact()
        effect = passes.judge([[parse_change(f"layer={layer} expert=1 ablate")]])[0]
    with Passes(edited, documents(), 4) as whole:
        whole.run_untouched(0)
    assert effect.loss_D == pytest.approx(whole.loss_D, abs=1e-4)
    assert effect.kl_D.sum() > 0
    assert effect.routing["load"] > 0


@pytest.mark.parametrize("layer", [1, 2])
def test_a_replaced_router_that_carries_a_state_is_judged_from_stored_states(layer):
    """SPECTRA in the place of Mixtral's routers, against whole passes with the expert's last matrix zero."""
    from moescope.decoder.config import ModelConfig
    from moescope.execution.replaced import replace_routers

    model = tiny_model("mixtral").model
    replace_routers(model, ModelConfig(router="spectra", top_k=0))
    model.eval()
    with Passes(traced(model), documents(), 4) as passes:
        passes.run_untouched(1)
        assert passes.is_exact()
        passes.move_to(layer)
        for number in range(len(passes.batches)):
            suffix = passes.run(number, layer, passes.inputs[number])
            assert torch.equal(passes.run(number), suffix)
        effect = passes.judge([[parse_change(f"layer={layer} expert=1 ablate")]])[0]
    with torch.no_grad():
        model.model.layers[layer].mlp.experts.down_proj[1] = 0
    with Passes(traced(model), documents(), 4) as whole:
        whole.run_untouched(0)
    assert effect.loss_D == pytest.approx(whole.loss_D, abs=1e-4)
    assert effect.kl_D.sum() > 0
