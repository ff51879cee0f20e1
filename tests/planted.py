"""A small Mixtral checkpoint of known structure per layer: `python tests/planted.py FOLDER` writes it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

D_MODEL, D_FF, EXPERTS, VOCABULARY = 256, 512, 8, 64


@dataclass(frozen=True)
class PlantedLayer:
    """The structure of a layer, in words that a report should find."""

    kind: str
    truth: str


LAYERS = (
    PlantedLayer("random", "router rows are unrelated to their experts"),
    PlantedLayer("aligned", "every router row is in the span of its expert's leading directions"),
    PlantedLayer(
        "small_k", "every router row holds its expert's top direction, the rest at the end of the spectrum"
    ),
    PlantedLayer("collapsed", "experts 2 and 5 are nearly the same"),
    PlantedLayer("permuted", "as aligned, but router row i points at expert (i + 3) mod 8"),
)
COLLAPSED_PAIR = (2, 5)
SHIFT = 3


def orthogonal(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    q, r = np.linalg.qr(generator.standard_normal((rows, columns)))
    return np.asarray(q * np.sign(np.diag(r)))


def unit(vector: np.ndarray) -> np.ndarray:
    return np.asarray(vector / np.linalg.norm(vector))


def planted_layer(kind: str, generator: np.random.Generator) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return (router [E, D], gate matrices [F, D] per expert) with the structure of that kind.

    Spectra follow power laws, as in trained experts, with a scale and an exponent per expert.
    """
    ranks = np.arange(1, D_MODEL + 1)
    steepness = generator.uniform(0.25, 0.55)
    values = [
        generator.uniform(0.8, 1.25) * ranks ** -(steepness + generator.uniform(-0.05, 0.05))
        for _ in range(EXPERTS)
    ]
    bases = [orthogonal(generator, D_MODEL, D_MODEL) for _ in range(EXPERTS)]
    lefts = [orthogonal(generator, D_FF, D_MODEL) for _ in range(EXPERTS)]
    if kind == "collapsed":
        original, copy = COLLAPSED_PAIR
        drift = bases[original] + 0.01 * generator.standard_normal((D_MODEL, D_MODEL))
        q, r = np.linalg.qr(drift)
        bases[copy], lefts[copy], values[copy] = q * np.sign(np.diag(r)), lefts[original], values[original]
    gates = [(left * scale) @ basis.T for left, scale, basis in zip(lefts, values, bases, strict=True)]

    def mixed(expert: int, strength: float, first: int, last: int) -> np.ndarray:
        """Return a unit row with `strength` of it in singular directions first..last, the rest anywhere."""
        inside = unit(bases[expert][:, first:last] @ generator.standard_normal(last - first))
        return np.asarray(
            strength * inside + np.sqrt(1 - strength**2) * unit(generator.standard_normal(D_MODEL))
        )

    if kind == "random":
        rows = [unit(generator.standard_normal(D_MODEL)) for _ in range(EXPERTS)]
    elif kind == "small_k":
        tails = [unit(basis[:, D_MODEL // 2 :] @ generator.standard_normal(D_MODEL // 2)) for basis in bases]
        rows = [
            0.4 * basis[:, 0] + np.sqrt(1 - 0.16) * tail for basis, tail in zip(bases, tails, strict=True)
        ]
    else:
        shift = SHIFT if kind == "permuted" else 0
        rows = [mixed((router + shift) % EXPERTS, 0.7, 0, 16) for router in range(EXPERTS)]
    return np.stack(rows), gates


def write_planted(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint: bf16, two shards with an index, loadable by transformers."""
    generator = np.random.default_rng(seed)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]

    def put(name: str, array: np.ndarray, shard: int) -> None:
        shards[shard][name] = torch.from_numpy(np.ascontiguousarray(array)).to(torch.bfloat16)

    put("model.embed_tokens.weight", 0.02 * generator.standard_normal((VOCABULARY, D_MODEL)), 0)
    put("lm_head.weight", 0.02 * generator.standard_normal((VOCABULARY, D_MODEL)), 1)
    put("model.norm.weight", np.ones(D_MODEL), 1)
    for layer, planted in enumerate(LAYERS):
        shard = 0 if layer < 2 else 1
        prefix = f"model.layers.{layer}"
        router, gates = planted_layer(planted.kind, generator)
        put(f"{prefix}.block_sparse_moe.gate.weight", router, shard)
        for expert, gate in enumerate(gates):
            where = f"{prefix}.block_sparse_moe.experts.{expert}"
            put(f"{where}.w1.weight", gate, shard)
            put(f"{where}.w3.weight", 0.05 * generator.standard_normal((D_FF, D_MODEL)), shard)
            put(f"{where}.w2.weight", 0.05 * generator.standard_normal((D_MODEL, D_FF)), shard)
        for projection, rows in {"q": D_MODEL, "k": D_MODEL // 2, "v": D_MODEL // 2, "o": D_MODEL}.items():
            weight = 0.05 * generator.standard_normal((rows, D_MODEL))
            put(f"{prefix}.self_attn.{projection}_proj.weight", weight, shard)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(f"{prefix}.{norm}.weight", np.ones(D_MODEL), shard)

    folder.mkdir(parents=True, exist_ok=True)
    files = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    for file, tensors in zip(files, shards, strict=True):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in sorted(tensors)}
    size = sum(tensor.numel() * 2 for tensors in shards for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": D_MODEL,
        "intermediate_size": D_FF,
        "num_hidden_layers": len(LAYERS),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    write_planted(Path(sys.argv[1]))
