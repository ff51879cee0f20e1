"""Every family against transformers' own model of it.

The same tensors bit for bit, and the same numbers computed from them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from families.tiny_models import (
    CASES,
    TinyModel,
    own_biases,
    own_experts,
    own_shared,
    router_of,
    tiny_model,
)
from moescope.checkpoint import open_checkpoint
from moescope.families import read_moe
from moescope.types import ExpertStack, LayerWeights


def together(stack: ExpertStack | None) -> Tensor:
    assert stack is not None
    tensor = torch.stack([stack.read(expert) for expert in range(stack.shape[0])])
    assert tensor.shape == stack.shape
    return tensor


def read(kind: str, form: str, folder) -> list[LayerWeights]:
    moe = read_moe(open_checkpoint(tiny_model(kind).save(folder, form)))
    assert moe.coverage.layers_found == moe.coverage.layers_expected == len(tiny_model(kind).blocks)
    return list(moe.layers.values())


# --- the same bits


def check_bits(weights: LayerWeights, model: TinyModel, number: int) -> None:
    seen = model.blocks[number]
    ours = {
        "gate": weights.gate_EFD,
        "up": weights.up_EFD,
        "down": weights.down_EDF,
        "gate_bias": weights.gate_bias_EF,
        "up_bias": weights.up_bias_EF,
        "down_bias": weights.down_bias_ED,
    }
    same({part: together(stack) for part, stack in ours.items() if stack}, own_experts(seen.experts))
    same({"router": weights.router_ED.read()}, {"router": router_of(seen)[1].detach()})
    biases = {"router": weights.router_bias_E, "correction": weights.correction_bias_E}
    same({name: lazy.read() for name, lazy in biases.items() if lazy}, own_biases(seen))
    shared = weights.shared
    parts = (
        {"gate": shared.gate_FD, "up": shared.up_FD, "down": shared.down_DF, "front": shared.gate_D}
        if shared
        else {}
    )
    for lazy in filter(None, parts.values()):
        assert lazy.read().shape == lazy.shape
    same({name: lazy.read() for name, lazy in parts.items() if lazy}, own_shared(seen))


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for part, tensor in theirs.items():
        assert torch.equal(ours[part], tensor), f"{part} differs"


# --- the same numbers


def activation(name: str | None):
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def expert_output(weights: LayerWeights, expert: int, x_TD: Tensor) -> Tensor:
    def bias(stack: ExpertStack | None) -> Tensor | float:
        return stack.read(expert) if stack else 0.0

    gate = x_TD @ weights.gate_EFD.read(expert).T + bias(weights.gate_bias_EF)
    if weights.up_EFD is None:
        hidden = activation(weights.activation)(gate)
    else:
        up = x_TD @ weights.up_EFD.read(expert).T + bias(weights.up_bias_EF)
        if weights.activation == "clamped_swiglu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        else:
            hidden = activation(weights.activation)(gate) * up
    return hidden @ weights.down_EDF.read(expert).T + bias(weights.down_bias_ED)


def scores_of(weights: LayerWeights, logits_TE: Tensor) -> Tensor:
    return logits_TE.sigmoid() if weights.scoring == "sigmoid" else logits_TE.softmax(-1)


def check_numbers(weights: LayerWeights, model: TinyModel, number: int) -> None:
    seen = model.blocks[number]
    assert seen.x_TD is not None
    assert seen.output is not None
    x_TD = seen.x_TD.reshape(-1, weights.d_model)
    logits_TE = x_TD @ weights.router_ED.read().T
    if weights.router_bias_E:
        logits_TE = logits_TE + weights.router_bias_E.read()
    check_logits(weights, logits_TE, seen.router_gave)
    outputs_ETD = torch.stack([expert_output(weights, expert, x_TD) for expert in range(weights.n_experts)])
    if model.kind.startswith("llama4"):
        check_llama4(weights, logits_TE, x_TD, seen)
    elif (
        weights.up_EFD is None
    ):  # NLLB's own mixing has a mask among its indices; the experts alone are what is asked here
        for expert in range(weights.n_experts):
            with torch.no_grad():
                close(outputs_ETD[expert], seen.experts[f"expert_{expert}"](x_TD))
    else:
        given_TD, chosen_TK, gates_TK = (part.reshape(len(x_TD), -1) for part in seen.inputs[:3])
        close(given_TD, x_TD)
        rows = torch.arange(len(x_TD))[:, None]
        mixed_TD = (gates_TK[..., None] * outputs_ETD[chosen_TK, rows]).sum(1)
        close(mixed_TD, seen.output.reshape(mixed_TD.shape))
        check_scoring(weights, logits_TE, chosen_TK, gates_TK)
    check_shared(weights, seen)
    check_norm(weights, model, x_TD)


def check_shared(weights: LayerWeights, seen) -> None:
    """The shared expert gives what its module gave, and so does the gate in front of it."""
    shared = weights.shared
    assert (shared is None) == ("expert" not in seen.shared)
    if shared is None:
        return
    x_TD, output_TD = seen.shared["expert"]
    gate, up = x_TD @ shared.gate_FD.read().T, x_TD @ shared.up_FD.read().T
    close((activation(weights.activation)(gate) * up) @ shared.down_DF.read().T, output_TD)
    assert (shared.gate_D is None) == ("front" not in seen.shared)
    if shared.gate_D:
        given, gave = seen.shared["front"]
        close(given @ shared.gate_D.read().T, gave)


def check_logits(weights: LayerWeights, logits_TE: Tensor, gave: tuple[Tensor, ...]) -> None:
    """Among what the router gave are its logits; some give the scores made of them instead."""
    wide = [part.reshape(logits_TE.shape) for part in gave if part.numel() == logits_TE.numel()]
    wanted = (logits_TE, scores_of(weights, logits_TE))
    assert any(torch.allclose(part.float(), like, rtol=1e-3, atol=1e-4) for part in wide for like in wanted)


def check_scoring(weights: LayerWeights, logits_TE: Tensor, chosen_TK: Tensor, gates_TK: Tensor) -> None:
    """The chosen are those of the highest scores and bias.

    And their gates stand in the ratio of their scores.
    """
    if weights.scoring == "sparsemixer":
        return
    assert chosen_TK.shape[1] == weights.top_k
    scores_TE = scores_of(weights, logits_TE)
    bias = weights.correction_bias_E.read() if weights.correction_bias_E else 0.0
    best = (scores_TE + bias).topk(chosen_TK.shape[1]).indices
    assert torch.equal(best.sort(-1).values, chosen_TK.sort(-1).values)
    mine = scores_TE.gather(1, chosen_TK)
    close(mine / mine.sum(-1, keepdim=True), gates_TK / gates_TK.sum(-1, keepdim=True))


def check_llama4(weights: LayerWeights, logits_TE: Tensor, x_TD: Tensor, seen) -> None:
    """Its experts are all given all tokens, each multiplied by its score: zero but for the chosen."""
    kept = logits_TE.topk(weights.top_k).indices
    scores_TE = torch.zeros_like(logits_TE).scatter(1, kept, scores_of(weights, logits_TE).gather(1, kept))
    given_ETD = x_TD * scores_TE.T[..., None]
    close(given_ETD.reshape(-1, weights.d_model), seen.inputs[0])
    out = [expert_output(weights, expert, given_ETD[expert]) for expert in range(weights.n_experts)]
    close(torch.cat(out), seen.output)


def check_norm(weights: LayerWeights, model: TinyModel, x_TD: Tensor) -> None:
    """The norm read is that of the module whose output the block was given.

    And multiplies by its weight and the offset.
    """
    mine = [
        (module, before)
        for module, before, after in model.norms
        if after.shape[-1] == weights.d_model
        and after.numel() == x_TD.numel()
        and torch.equal(after.reshape(x_TD.shape), x_TD)
    ]
    if not mine:
        assert weights.norm_D is None
        return
    module, before = mine[0]
    assert weights.norm_D is not None
    assert torch.equal(weights.norm_D.read(), module.weight)
    before = before.reshape(x_TD.shape)
    if isinstance(module, torch.nn.LayerNorm):
        before = before - before.mean(-1, keepdim=True)
    unit = before * before.pow(2).mean(-1, keepdim=True).rsqrt()
    bias = getattr(module, "bias", None)
    scaled = unit * (weights.norm_D.read() + weights.norm_offset) + (bias if bias is not None else 0.0)
    torch.testing.assert_close(scaled, x_TD, rtol=1e-2, atol=1e-2)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_every_block_has_the_model_s_tensors_and_computes_what_transformers_computes(tmp_path, kind, form):
    """Names and shapes alone decide the layout, so without a config the tensors are the same."""
    model, layers = tiny_model(kind), read(kind, form, tmp_path)
    (tmp_path / "config.json").unlink()
    from_names = read_moe(open_checkpoint(tmp_path)).layers.values()
    for number, (weights, without_config) in enumerate(zip(layers, from_names, strict=True)):
        check_bits(weights, model, number)
        check_bits(without_config, model, number)
        output = model.blocks[number].output
        assert output is not None
        assert output.isfinite().all()
        assert output.abs().mean() > 1e-3, "nothing came out, and nothing equals nothing"
        check_numbers(weights, model, number)


# --- the check itself can fail


def shuffled(stack: ExpertStack) -> ExpertStack:
    return replace(stack, read=lambda expert: stack.read((expert + 1) % stack.shape[0]))


def turned(stack: ExpertStack) -> ExpertStack:
    """Another orientation, in the shape that was asked for.

    What a reader gets who mistakes [in, out] for [out, in].
    """
    return replace(stack, read=lambda expert: stack.read(expert).T.reshape(stack.shape[1:]))


def halves(weights: LayerWeights) -> LayerWeights:
    """Interleaved rows taken for halves."""

    def both(expert: int) -> Tensor:
        return torch.stack([weights.gate_EFD.read(expert), weights.up_EFD.read(expert)], 1).flatten(0, 1)

    size = weights.d_ff
    return replace(
        weights,
        gate_EFD=replace(weights.gate_EFD, read=lambda expert: both(expert)[:size]),
        up_EFD=replace(weights.up_EFD, read=lambda expert: both(expert)[size:]),
    )


MUTATIONS = {
    "gate and up swapped": lambda w: replace(w, gate_EFD=w.up_EFD, up_EFD=w.gate_EFD),
    "gate transposed": lambda w: replace(w, gate_EFD=turned(w.gate_EFD)),
    "up transposed": lambda w: replace(w, up_EFD=turned(w.up_EFD)),
    "down transposed": lambda w: replace(w, down_EDF=turned(w.down_EDF)),
    "halves for interleaved": halves,
    "experts shifted": lambda w: replace(w, gate_EFD=shuffled(w.gate_EFD)),
    "router rows turned about": lambda w: replace(
        w, router_ED=replace(w.router_ED, read=lambda: w.router_ED.read().flip(0))
    ),
    "another scoring": lambda w: replace(w, scoring="softmax" if w.scoring == "sigmoid" else "sigmoid"),
    "another activation": lambda w: replace(w, activation="gelu"),
    "shared gate and up swapped": lambda w: replace(
        w, shared=replace(w.shared, gate_FD=w.shared.up_FD, up_FD=w.shared.gate_FD)
    ),
    "norm lost": lambda w: replace(w, norm_D=None),
    "norm offset": lambda w: replace(w, norm_offset=1.0 - w.norm_offset),
}


WITH_SHARED = ("llama4_text", "deepseek_v3", "qwen3_next")
MUTATED = ("mixtral", "gpt_oss", "dbrx", *WITH_SHARED)


@pytest.mark.parametrize(
    ("kind", "mutation"),
    [
        (kind, mutation)
        for mutation in MUTATIONS
        for kind in (WITH_SHARED if "shared" in mutation else MUTATED)
    ],
)
def test_the_parity_check_sees_each_mistake(tmp_path, kind, mutation):
    weights, model = read(kind, "saved", tmp_path)[0], tiny_model(kind)
    check_numbers(weights, model, 0)
    with pytest.raises(AssertionError):
        check_numbers(MUTATIONS[mutation](weights), model, 0)
