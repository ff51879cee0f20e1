"""What is damaged: for every verb the undamaged input, and the command that reads a damaged copy of it."""

from __future__ import annotations

import base64
import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from faults.damage import VALUES, copy_folder, damage_cells, damage_file
from lab.tiny_training import TOML
from moescope.verbs import load_verb
from routing.tiny_text import save_tokenizer, texts, write_jsonl

# of options: where to write, what takes long because it was asked for, and what needs a network or a cluster
UNTRIED = {
    *("out", "apply", "quiet", "overwrite", "controls", "max_new_tokens", "jobs"),
    *("address", "engine", "revision", "device", "trust_remote_code"),
}
STUDY = """
preset = "nano"
reference = "top2"
seeds = 2
[base.model]
d_model = 32
layers = 2
heads = 2
d_ff = 32
experts = 4
max_positions = 64
[base.train]
steps = 12
batch_size = 8
sequence_length = 32
[arms.top2.model]
router = "top2"
[arms.hash.model]
router = "hash"
[axes]
"train.learning_rate" = [0.001, 0.002]
"""


def save_checkpoint(folder: Path, seed: int) -> Path:
    """Write a Mixtral of one layer in four files, with a tokenizer and a chat template."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    MixtralForCausalLM(config).save_pretrained(folder, max_shard_size="3KB")
    save_tokenizer(folder, chat_template=True)
    return folder


@dataclass(frozen=True)
class Bases:
    """The undamaged input, made once."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Bases:
        from moescope.compression.verb import compress
        from moescope.deployment.verb import deploy
        from moescope.lab.train import train
        from moescope.routing.trace import trace
        from moescope.weights.verb import scan

        model, other = (save_checkpoint(folder / name, seed) for seed, name in enumerate(("model", "other")))
        text = write_jsonl(folder / "text.jsonl", texts(3))
        (folder / "plain.txt").write_text("\n".join(texts(3)))
        (folder / "ids.jsonl").write_text("[1, 2, 3]\n[4, 5, 6, 7]\n")
        np.save(folder / "ids.npy", np.arange(12).reshape(2, 6))
        (folder / "train.toml").write_text(TOML.format(steps=2))
        (folder / "study.toml").write_text(STUDY)
        runs = folder / "runs"
        scan(model, out=runs / "scan", quiet=True)
        traced = trace(model, text=text, out=runs / "trace", save_tokens=True, quiet=True)
        deploy(traced, out=runs / "deploy", quiet=True)
        for router in ("fold", "slice"):
            method = {"fold": "hc_smoe", "slice": "reap"}[router]
            place = runs / f"compress-{router}"
            compress(model, method=method, keep=0.5, text=text, out=place, judge=False, quiet=True)
        train(folder / "train.toml", out=runs / "train", router="top2", device="cpu", quiet=True)
        recorded = folder / "recorded"
        recorded.mkdir()
        shutil.copy(traced.path / "tokens.parquet", recorded / "moescope.parquet")
        chosen = np.random.default_rng(0).random((9, 3, 4)).argsort(-1)[..., :2].astype(np.int32)
        write_recorded(recorded, chosen)
        assert other.is_dir()
        return cls(folder)


def write_recorded(folder: Path, chosen: np.ndarray) -> None:
    """Write one trace in every format."""
    buffer = io.BytesIO()
    np.save(buffer, chosen)
    (folder / "vllm.npy").write_bytes(buffer.getvalue())
    encoded = base64.b64encode(buffer.getvalue()).decode()
    answers = [
        {"choices": [{"routed_experts": encoded}], "usage": {"prompt_tokens": 3}},
        {
            "prompt_routed_experts": chosen[:3].tolist(),
            "choices": [{"routed_experts": chosen[3:].tolist()}] * 2,
        },
    ]
    (folder / "vllm.jsonl").write_text("\n".join(map(json.dumps, answers)))
    flat = base64.b64encode(chosen[:, :1].tobytes()).decode()  # as many layers as the model has
    answers = [{"meta_info": {"routed_experts": flat, "prompt_tokens": 4}}] * 2
    (folder / "sglang.jsonl").write_text("\n".join(map(json.dumps, answers)))
    rows = [f"{layer},{expert}" for layer in range(3) for expert in chosen[:, layer].reshape(-1)]
    (folder / "llamacpp.csv").write_text("layer,expert\n" + "\n".join(rows))
    choices = [
        f"{token // 5},{token // 8},{token % 5},{layer},{slot},{chosen[token, layer, slot]},{0.75 - slot / 2}"
        for token, layer, slot in np.ndindex(chosen.shape)
    ]
    head = (
        "# route_trace v1\n# n_layer=3 n_expert=4 n_expert_used=2\nturn,phase,step,layer,slot,expert,weight\n"
    )
    (folder / "route.csv").write_text(head + "\n".join(choices))
    rows = [
        f"{token // 5},{token % 5},{layer},{' '.join(map(str, chosen[token, layer]))},0.6 0.4"
        for token, layer in np.ndindex(chosen.shape[:2])
    ]
    table = "document,position,layer,experts,gates\n" + "\n".join(rows)
    (folder / "table.csv.gz").write_bytes(gzip.compress(table.encode()))
    frame = pd.DataFrame(list(np.ndindex(chosen.shape)), columns=["position", "layer", "slot"])
    frame.assign(document=0, expert=chosen.reshape(-1)).to_parquet(folder / "table.parquet")
    layers = torch.from_numpy(chosen.transpose(1, 0, 2).copy())
    record = {
        "input_ids": list(range(9)),
        "positions": [0, 1, 2, 3, 4, 0, 1, 2, 3],
        "extend_seq_lens": [5, 4],
        "forward_mode": 1,
        "topk_ids_of_layer": layers,
    }
    decode = record | {"extend_seq_lens": None, "forward_mode": 2}
    physical = torch.arange(4).repeat(3, 1)
    content = {"records": [record, decode], "last_physical_to_logical_map": physical}
    torch.save(content, folder / "sglang-tokens.pt")
    counts = torch.ones(2, 1, 4, dtype=torch.int32)
    torch.save({"rank": 0, "logical_count": counts}, folder / "sglang-counts.pt")


Words = list[str | Path]
Make = Callable[[random.Random, Bases, Path], Words]


@dataclass(frozen=True)
class Target:
    """A damaged input, the command that reads it, and the function of that command which reads it."""

    name: str
    make: Make  # writes a damaged copy into a folder and returns the command
    reader: str  # module:function
    cases: int  # of 5,000
    reached: float  # least share of cases that get to the reader


def damaged_checkpoint(chance: random.Random, bases: Bases, folder: Path, tokenizer: bool = False) -> Path:
    model = copy_folder(bases.folder / "model", folder / "model")
    files = sorted(model.iterdir())
    names = ("tokenizer", "chat_template") if tokenizer else ("config", "model")
    damage_file(chance, chance.choice([file for file in files if file.name.startswith(names)]))
    return model


def run_in(folder: Path, *words: str | Path) -> Words:
    """Return the command that makes a run, without a report, in the folder of the case."""
    return [*words, "--out", folder / "out", "--quiet", "--no-report"]


def damaged_config(chance: random.Random, bases: Bases, folder: Path, verb: str) -> Words:
    file = Path(shutil.copy(bases.folder / f"{verb}.toml", folder / f"{verb}.toml"))
    damage_file(chance, file)
    return [verb, file, "--dry-run"]


def inspect(chance: random.Random, bases: Bases, folder: Path) -> Words:
    return ["inspect", damaged_checkpoint(chance, bases, folder)]


def scan(chance: random.Random, bases: Bases, folder: Path) -> Words:
    return run_in(folder, "scan", damaged_checkpoint(chance, bases, folder))


def compare(chance: random.Random, bases: Bases, folder: Path) -> Words:
    models = [damaged_checkpoint(chance, bases, folder), bases.folder / "other"]
    chance.shuffle(models)
    return run_in(folder, "compare", *models)


def trace(chance: random.Random, bases: Bases, folder: Path) -> Words:
    model, text = damaged_checkpoint(chance, bases, folder), bases.folder / "text.jsonl"
    return run_in(folder, "trace", model, "--text", text, "--max-tokens", "30")


def compress(chance: random.Random, bases: Bases, folder: Path) -> Words:
    model, text = damaged_checkpoint(chance, bases, folder), bases.folder / "text.jsonl"
    method = ["--method", chance.choice(["reap", "hc_smoe"]), "--keep", "2", "--no-judge"]
    return run_in(folder, "compress", model, "--text", text, "--max-tokens", "30", *method)


def compress_plan(chance: random.Random, bases: Bases, folder: Path) -> Words:
    source = bases.folder / "runs" / chance.choice(["compress-fold", "compress-slice"])
    plan = copy_folder(source, folder / "plan")
    damage_file(chance, chance.choice(sorted(plan.glob("plan.*"))))
    model = bases.folder / "model"
    return run_in(folder, "compress", model, "--plan", plan, "--apply", folder / "small")


def report(chance: random.Random, bases: Bases, folder: Path) -> Words:
    kind = chance.choice(["scan", "trace", "compress-fold", "train", "deploy"])
    run = copy_folder(bases.folder / "runs" / kind, folder / kind)
    files = [run / "run.json"] if chance.random() < 0.5 else sorted(run.rglob("*.parquet"))
    damage_file(chance, chance.choice(files))
    return ["report", run, "--out", folder / "report.html"]


def deploy(chance: random.Random, bases: Bases, folder: Path) -> Words:
    run = copy_folder(bases.folder / "runs" / "trace", folder / "trace")
    tokens, layers = run / "tokens.parquet", run / "routing_layers.parquet"
    if chance.random() < 0.7:  # a whole table that holds nonsense
        damage_cells(chance, chance.choice([tokens, tokens, layers]))
    else:
        damage_file(chance, chance.choice([tokens, layers, run / "run.json"]))
    return run_in(folder, "deploy", run)


def train(chance: random.Random, bases: Bases, folder: Path) -> Words:
    return damaged_config(chance, bases, folder, "train")


def study(chance: random.Random, bases: Bases, folder: Path) -> Words:
    return damaged_config(chance, bases, folder, "study")


def recorded(chance: random.Random, bases: Bases, folder: Path) -> Words:
    source = chance.choice(sorted((bases.folder / "recorded").iterdir()))
    file = Path(shutil.copy(source, folder / source.name))
    damage_file(chance, file)
    format = file.name.split(".")[0].split("-")[0]
    model = [bases.folder / "model"] if file.name in ("sglang.jsonl", "sglang-counts.pt") else []
    experts = [] if model else ["--experts", chance.choice(["4", "4", "40"])]
    return run_in(folder, "trace", *model, "--recorded", file, "--format", format, *experts)


def text(chance: random.Random, bases: Bases, folder: Path) -> Words:
    name = chance.choice(["text.jsonl", "plain.txt", "ids.jsonl", "ids.npy"])
    file = Path(shutil.copy(bases.folder / name, folder / name))
    damage_file(chance, file)
    option = "--token-ids" if name.startswith("ids") else "--text"
    return run_in(folder, "trace", bases.folder / "model", option, file, "--max-tokens", "30")


def tokenizer(chance: random.Random, bases: Bases, folder: Path) -> Words:
    model = damaged_checkpoint(chance, bases, folder, tokenizer=True)
    template = chance.choice([[], ["--chat-template"]])
    words = ["--text", bases.folder / "text.jsonl", "--max-tokens", "30", *template]
    return run_in(folder, "trace", model, *words)


def options(chance: random.Random, bases: Bases, folder: Path) -> Words:
    """One to three hostile values of options of a verb whose input is undamaged."""
    model, text = bases.folder / "model", ["--text", bases.folder / "text.jsonl", "--max-tokens", "30"]
    commands: list[Words] = [
        ["scan", model],
        ["compare", model, bases.folder / "other"],
        ["trace", model, *text],
        ["compress", model, "--method", "reap", "--keep", "2", "--no-judge", *text],
        ["intervene", model, "--sweep", "experts", *text],
        ["deploy", bases.folder / "runs" / "trace"],
    ]
    words = chance.choice(commands)
    return run_in(folder, *words, *hostile_options(chance, str(words[0])))


def hostile_options(chance: random.Random, verb: str) -> Words:
    known = [option for option in load_verb(verb).options if not option.positional]
    known = [option for option in known if option.name not in UNTRIED]
    words: Words = []
    for option in chance.sample(known, chance.choice([1, 1, 2, 3])):
        value = chance.choice([*VALUES, "1", "4", "0,0", "-1-3", "a=b", "9" * 400])
        words += [option.flag] if option.kind == "flag" else [f"{option.flag}={value}".replace("\0", "")]
    return words


TARGETS = [
    Target("inspect", inspect, "moescope.families:read_moe", 1400, 0.35),
    Target("scan", scan, "moescope.weights.verb:scan_layers", 200, 0.2),
    Target("compare", compare, "moescope.comparison.verb:check_same_architecture", 100, 0.2),
    Target("trace", trace, "moescope.execution.models:load_model", 150, 0.2),
    Target("compress", compress, "moescope.execution.models:load_model", 100, 0.2),
    Target("compress --plan", compress_plan, "moescope.compression.plan:read_plan", 300, 0.9),
    Target("report", report, "moescope.run:read_run_json", 150, 0.9),
    Target("deploy", deploy, "moescope.deployment.tokens:read_tokens", 200, 0.7),
    Target("train", train, "moescope.lab.config:config_from", 1000, 0.65),
    Target("study", study, "moescope.lab.study_config:study_from", 600, 0.6),
    Target("trace --recorded", recorded, "moescope.execution.recorded:read_trace", 900, 0.85),
    Target("trace --text", text, "moescope.execution.texts:sources", 150, 0.9),
    Target("options", options, "moescope.verb:check_utf8", 600, 0.4),
    Target("tokenizer", tokenizer, "moescope.execution.models:load_tokenizer", 60, 0.9),
]
