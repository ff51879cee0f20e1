"""Dense checkpoints built by transformers become Mixture-of-Experts checkpoints that transformers loads."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.lab.existing import upcycle

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
DENSE = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied-rope": LlamaConfig(**SMALL, tie_word_embeddings=True, rope_parameters=LLAMA3, head_dim=16),
    "mistral-window": MistralConfig(**SMALL, sliding_window=8),
    "qwen3": Qwen3Config(**SMALL, head_dim=16, rms_norm_eps=1e-5),
    "qwen3-bias": Qwen3Config(**SMALL, head_dim=8, attention_bias=True, tie_word_embeddings=True),
}


def save_dense(folder, config, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms too: a lost one must show
            weight.add_(0.2 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model.eval()


def ids(rows=2, length=24):
    return torch.randint(0, 97, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", DENSE)
def test_copies_without_noise_give_the_dense_model_s_logits(name, tmp_path):
    dense = save_dense(tmp_path / "dense", DENSE[name])
    upcycle(open_checkpoint(tmp_path / "dense"), tmp_path / "moe", experts=4, top_k=2)
    moe, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert moe.config.model_type == {"q": "qwen3_moe"}.get(name[0], "mixtral")
    with torch.no_grad():
        before, after = dense(ids()).logits, moe.eval()(ids()).logits
    assert float((before - after).abs().max()) < 1e-5 * float(before.abs().max())
    assert float(before.std()) > 0.1


def test_noise_is_seeded_and_differs_between_experts(tmp_path):
    save_dense(tmp_path / "dense", DENSE["llama"])
    checkpoint = open_checkpoint(tmp_path / "dense")
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        upcycle(checkpoint, tmp_path / folder, experts=2, top_k=1, noise=0.1, seed=seed)
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    read = {part: open_checkpoint(tmp_path / part).read for part in "abc"}
    assert torch.equal(read["a"](name.format(0)), read["b"](name.format(0)))
    assert not torch.equal(read["a"](name.format(0)), read["c"](name.format(0)))
    dense = checkpoint.read("model.layers.1.mlp.up_proj.weight")
    for expert in (0, 1):
        change = read["a"](name.format(expert)) - dense
        assert float(change.std() / dense.std()) == pytest.approx(0.1, rel=0.1)
    assert not torch.equal(read["a"](name.format(0)), read["a"](name.format(1)))
    gate = "model.layers.{}.block_sparse_moe.gate.weight"
    assert not torch.equal(read["a"](gate.format(0)), read["a"](gate.format(1)))


def test_half_precision_is_copied_bit_for_bit(tmp_path):
    dense = save_dense(tmp_path / "dense", DENSE["qwen3"], torch.bfloat16)
    upcycle(open_checkpoint(tmp_path / "dense"), tmp_path / "moe", experts=3, top_k=3)
    written = open_checkpoint(tmp_path / "moe")
    for expert in range(3):
        copy = written.read(f"model.layers.2.mlp.experts.{expert}.down_proj.weight")
        assert torch.equal(copy, dense.model.layers[2].mlp.down_proj.weight)
    assert written.tensors["model.layers.0.mlp.gate.weight"].dtype == "BF16"


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"experts": 1, "top_k": 1}, "experts = 1"),
        ({"experts": 4, "top_k": 5}, "top_k = 5"),
        ({"experts": 4, "top_k": 2, "noise": -1.0}, "noise = -1.0"),
    ],
)
def test_bad_numbers_are_named_and_nothing_is_written(numbers, said, tmp_path):
    save_dense(tmp_path / "dense", DENSE["llama"])
    with pytest.raises(BadInput, match=said):
        upcycle(open_checkpoint(tmp_path / "dense"), tmp_path / "moe", **numbers)
    assert not (tmp_path / "moe").exists()


def test_what_the_target_family_lacks_is_refused(tmp_path):
    save_dense(tmp_path / "dense", LlamaConfig(**SMALL, attention_bias=True))
    with pytest.raises(BadInput, match=r"attention_bias is True.*mixtral does not have"):
        upcycle(open_checkpoint(tmp_path / "dense"), tmp_path / "moe", experts=4, top_k=2)
