"""A model in which one expert alone carries one domain: the verb finds it, in that domain, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moescope
from routing.tiny_text import save_tokenizer, write_jsonl

EXPERTS, PLANTED, WIDTH = 8, 5, 64


def planted_checkpoint(folder: Path) -> None:
    """Mixtral without attention; tokens from 32 on choose expert 5, which alone writes the next token.

    Tokens below 32 choose the other experts, which write a little noise, and are followed by any token.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "head_dim": WIDTH}
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": 64, "num_local_experts": EXPERTS}
    config = MixtralConfig(**heads, **sizes, num_experts_per_tok=2, max_position_embeddings=64)
    model = MixtralForCausalLM(config).float().eval()
    (layer,) = model.model.layers
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(8 * torch.eye(64))
        model.lm_head.weight.copy_(torch.eye(64))
        layer.self_attn.o_proj.weight.zero_()
        rows = 0.3 * torch.randn(EXPERTS, WIDTH)
        rows[PLANTED] = torch.where(torch.arange(64) < 32, -5.0, 5.0)
        layer.mlp.gate.weight.copy_(rows)
        layer.mlp.experts.down_proj.mul_(0.1)
        following = torch.zeros(64, 64)
        following[torch.arange(32, 64).roll(-1), torch.arange(32, 64)] = 1.0
        layer.mlp.experts.gate_up_proj[PLANTED] = torch.cat([torch.eye(64), torch.eye(64)])
        layer.mlp.experts.down_proj[PLANTED] = following  # silu(8) * 8 along the next token
    model.save_pretrained(folder)


def documents(tokenizer: Any, planted: bool) -> list[str]:
    """Texts in words that the tokenizer takes for the ids wanted: a count upwards, or anything below 32."""
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    known = np.array(sorted(index for index, word in words.items() if word.startswith("word")))
    draw, made = np.random.default_rng(int(planted)), []
    for _ in range(30):
        length = int(draw.integers(12, 30))
        high = 32 + (int(draw.integers(32)) + np.arange(length)) % 32
        ids = high[np.isin(high, known)] if planted else draw.choice(known[known < 32], length)
        made.append(" ".join(words[int(index)] for index in ids))
    return made


@pytest.mark.parametrize("change", ["ablate", "skip"])
def test_the_verb_finds_the_expert_that_carries_a_domain_and_no_other(change, tmp_path):
    from transformers import AutoTokenizer

    planted_checkpoint(tmp_path / "model")
    save_tokenizer(tmp_path / "model", False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", documents(tokenizer, name == "counts"))
        for name in ("counts", "noise")
    ]
    run = moescope.intervene(
        tmp_path / "model",
        sweep="experts",
        set=change,
        domain=[f"{file.stem}={file}" for file in files],
        out=tmp_path / "run",
        device="cpu",
        quiet=True,
    )
    rows = run.table("interventions").set_index(["expert", "domain"])
    assert sorted(rows.index[rows["claimed"]]) == [(PLANTED, "all"), (PLANTED, "counts")]
    assert rows.loc[(PLANTED, "counts"), "loss_difference"] > 1
    assert rows.loc[(PLANTED, "noise"), ["loss_difference", "kl", "predictions_changed"]].tolist() == [
        0,
        0,
        0,
    ]
    others = [expert for expert in range(EXPERTS) if expert != PLANTED]
    assert (rows.loc[(others, "noise"), "kl"] > 0).all()
    words = [str(line) for line in run.verb.summary(run).findings]
    assert any(line.startswith(f"Domain counts needs layer 0, expert {PLANTED} most") for line in words)
    assert not any(line.startswith("Domain noise") for line in words)
