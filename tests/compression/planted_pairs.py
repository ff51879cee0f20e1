"""A tiny Mixtral trained until its experts matter, some of them then made disguised copies of others: the
truth is known.

The language has six dialects over the same eight words, each with words of its own spelling and a table of
its own that says which word
follows two others. Six experts are taught a dialect each (a nudge on the router beside the language-model
loss); two are left over. After
training those two become copies of experts 0 and 1: neurons in another order, up and down turned around for
half of them, noise on all,
and the router row of what they copy, a little lower, above all in other dialects: rarer twins that share
their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DIALECTS, WORDS, EXPERTS = 6, 8, 8
PAIRS = ((0, 6), (1, 7))
IN_TURN = (
    0,
    2,
    3,
    4,
    5,
    1,
    2,
    3,
    4,
    5,
)  # the dialects of documents: those that have two experts in the end are half as frequent
STEPS = 150
NOISE = 0.02
SECOND = (2, 3, 0, 1, 5, 4)  # the dialect whose expert is to come second
FIRST_SHARE = 0.95
LOWER, ELSEWHERE = 0.5, 3.0  # how much lower a twin's logits lie: in its own dialect, and in others


def texts(seed: int, count: int, length: int = 32) -> tuple[Tensor, Tensor]:
    """The dialect of each document and its tokens; one word in ten is drawn at random."""
    rules = torch.randint(0, WORDS, (DIALECTS, WORDS, WORDS), generator=torch.Generator().manual_seed(1234))
    generator = torch.Generator().manual_seed(seed)
    dialect = torch.tensor(IN_TURN)[torch.arange(count) % len(IN_TURN)]
    ids = torch.randint(0, WORDS, (count, length), generator=generator)
    follows = torch.rand(count, length, generator=generator) < 0.9
    for place in range(2, length):
        said = rules[dialect, ids[:, place - 2], ids[:, place - 1]]
        ids[:, place] = torch.where(follows[:, place], said, ids[:, place])
    return dialect, ids + dialect[:, None] * WORDS


def trained(seed: int) -> Any:
    """A model of two layers that has learnt the dialects; about two seconds."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=DIALECTS * WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    model = MixtralForCausalLM(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    wanted = torch.zeros(DIALECTS, EXPERTS)
    wanted[range(DIALECTS), range(DIALECTS)], wanted[range(DIALECTS), SECOND] = FIRST_SHARE, 1 - FIRST_SHARE
    logits: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, given, gave: logits.append(gave[0]))
        for layer in model.model.layers
    ]
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / STEPS)
        dialect, ids = texts(1000 * (seed + 10) + step, 40)
        logits.clear()
        loss = model(input_ids=ids, labels=ids).loss
        teacher = wanted[dialect].repeat_interleave(ids.shape[1], 0)
        loss = loss + 0.05 * sum(torch.nn.functional.cross_entropy(part, teacher) for part in logits)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for hook in hooks:
        hook.remove()
    return model.eval()


@dataclass(frozen=True)
class Disguise:
    """What was done to a copy's neurons.

    Place p of the copy holds neuron order[p] of the original, times sign[p].
    """

    order_F: Tensor
    sign_F: Tensor


def plant(model: Any, seed: int, noise: float = NOISE) -> dict[tuple[int, int], Disguise]:
    """Make the spare experts copies; returns (layer, copy) -> its disguise."""
    generator = torch.Generator().manual_seed(seed)
    states: dict[int, Tensor] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(
            lambda _, given, gave, number=number: states.update({number: given[0].flatten(0, -2)})
        )
        for number, layer in enumerate(model.model.layers)
    ]
    dialect, ids = texts(seed + 77, 60)
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()

    def noisy(matrix: Tensor) -> Tensor:
        return matrix + noise * matrix.std() * torch.randn(matrix.shape, generator=generator)

    done = {}
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            experts, rows = layer.mlp.experts, layer.mlp.gate.weight
            neurons = experts.down_proj.shape[2]
            for original, copy in PAIRS:
                order = torch.randperm(neurons, generator=generator)
                sign = torch.where(torch.rand(neurons, generator=generator) < 0.5, -1.0, 1.0)
                gate, up = noisy(experts.gate_up_proj[original]).chunk(2, dim=0)
                experts.gate_up_proj[copy] = torch.cat([gate[order], up[order] * sign[:, None]])
                experts.down_proj[copy] = noisy(experts.down_proj[original])[:, order] * sign
                own = dialect.repeat_interleave(ids.shape[1]) == original
                lower = torch.where(own, LOWER, ELSEWHERE)[:, None]
                rows[copy] = noisy(rows[original]) - torch.linalg.lstsq(states[number], lower).solution[:, 0]
                done[number, copy] = Disguise(order, sign)
    return done


def perplexity(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        said = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return float(said.gather(-1, ids[:, 1:, None]).mean().neg().exp())


@dataclass(frozen=True)
class Planted:
    folder: Path
    disguises: dict[tuple[int, int], Disguise]
    token_ids: Path
    held_out: Tensor
    perplexity: float  # of the planted model on the held-out text


def write_planted_pairs(folder: Path, seed: int) -> Planted:
    """The planted model as a checkpoint, and a text as token ids."""
    model = trained(seed)
    disguises = plant(model, seed)
    model.save_pretrained(folder / "model")
    np.save(folder / "text.npy", texts(seed + 5, 150)[1].numpy())
    held_out = texts(seed + 6, 120)[1]
    return Planted(folder / "model", disguises, folder / "text.npy", held_out, perplexity(model, held_out))
