"""Damaged checkpoints given to every verb that reads or runs one: one line, no traceback, nothing left."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import edit_json, shard_name, write_checkpoint
from moescope.compression.verb import compress
from moescope.errors import BadInput, shortened
from moescope.families.inspect import inspect
from moescope.families.inspect import lines as inspect_lines
from moescope.routing.trace import trace
from moescope.weights.verb import scan
from routing.tiny_text import save_model, save_tokenizer, texts, write_jsonl

ONE = "model.safetensors"
SECOND = shard_name(1, 2)
KINDS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
BLOCK = "model.layers.1.block_sparse_moe"
ROUTER = f"{BLOCK}.gate.weight"
EXPERT = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    """Whole models: one file per kind, and a Mixtral in two shards; and a text."""
    folder = tmp_path_factory.mktemp("whole")
    models = {kind: save_model(folder / kind, kind) for kind in KINDS}
    config = json.loads((models["mixtral"] / "config.json").read_text())
    sharded = write_checkpoint(folder / "sharded", load_file(models["mixtral"] / ONE), config, shards=2)
    save_tokenizer(sharded)
    return {**models, "sharded": sharded, "text": write_jsonl(folder / "text.jsonl", texts(6))}


def verdicts(model: Path, text: Path, skip: tuple[str, ...] = ()) -> dict[str, str]:
    """Verb -> its error line, or "" where it succeeds. Any other exception fails the test."""
    out = model.parent / "run"
    verbs: dict[str, Callable[[], Any]] = {
        "inspect": lambda: inspect_lines(inspect(model)),
        "scan": lambda: scan(model, out=out, quiet=True),
        "trace": lambda: trace(model, text=text, out=out, device="cpu", quiet=True),
        "compress": lambda: compress(
            model, keep=0.5, text=text, out=out, device="cpu", judge=False, quiet=True
        ),
    }
    found = {}
    for name, verb in verbs.items():
        if name in skip:
            continue
        before = sorted(model.parent.rglob("*"))
        try:
            verb()
            found[name] = ""
            shutil.rmtree(out, ignore_errors=True)
        except BadInput as error:
            found[name] = str(error)
            assert len(found[name].splitlines()) == 1
            assert len(shortened(found[name])) <= 400
            assert re.search("; | must be | exceeds ", found[name]), f"{name} names no remedy: {error}"
        assert sorted(model.parent.rglob("*")) == before, f"{name} left something behind"
    return found


def damaged(
    whole: dict[str, Path], kind: str, folder: Path, damage: Damage, skip: tuple[str, ...] = ()
) -> dict[str, str]:
    model = folder / "model"
    shutil.copytree(whole[kind], model)
    damage(model)
    return verdicts(model, whole["text"], skip)


def test_the_whole_models_are_read_by_every_verb(whole, tmp_path):
    for kind in ("mixtral", "sharded"):
        assert set(damaged(whole, kind, tmp_path / kind, lambda model: None).values()) == {""}


# --- files and tensors


def rewrite(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_shape(name: str, *shape: int) -> Damage:
    return lambda m: rewrite(m / ONE, lambda tensors: tensors.update({name: torch.ones(shape)}))


def drop(*names: str) -> Damage:
    return lambda m: rewrite(m / ONE, lambda tensors: [tensors.pop(name) for name in names])


# (kind, damage, verbs that need not notice)
TENSOR_DAMAGES: dict[str, tuple[str, Damage, set[str]]] = {
    "no router": ("mixtral", drop(ROUTER), set()),
    "no expert": (
        "mixtral",
        drop(*(f"{BLOCK}.experts.2.{part}.weight" for part in ("w1", "w2", "w3"))),
        set(),
    ),
    "no matrix of an expert": ("mixtral", drop(f"{BLOCK}.experts.2.w2.weight"), set()),
    "no fused experts": ("gpt_oss", drop("model.layers.1.mlp.experts.down_proj"), set()),
    "no attention": ("mixtral", drop("model.layers.0.self_attn.q_proj.weight"), {"inspect", "scan"}),
    "router of another width": ("mixtral", change_shape(ROUTER, 4, 15), set()),
    "router without rows": ("mixtral", change_shape(ROUTER, 0, 16), set()),
    "an expert of another width": ("mixtral", change_shape(f"{BLOCK}.experts.2.w1.weight", 24, 17), set()),
    "fused experts of another number": (
        "gpt_oss",
        change_shape("model.layers.1.mlp.experts.gate_up_proj", 3, 16, 32),
        set(),
    ),
    "attention of another shape": (
        "mixtral",
        change_shape("model.layers.0.self_attn.q_proj.weight", 3, 5),
        {"inspect", "scan"},
    ),
    "norm of another shape": ("qwen3_moe", change_shape("model.norm.weight", 99), {"inspect", "scan"}),
}


@pytest.mark.parametrize("name", TENSOR_DAMAGES)
def test_missing_and_misshapen_tensors_are_one_line(name, whole, tmp_path):
    kind, damage, unaware = TENSOR_DAMAGES[name]
    found = damaged(whole, kind, tmp_path, damage)
    assert {verb for verb, line in found.items() if not line} <= unaware, found
    assert all("model" in line for line in found.values() if line)


# --- numbers of the config


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("value", [0, -1, 99, 1e12, 1.5, "2", {}, True], ids=repr)
def test_an_impossible_top_k_is_named_with_its_value(kind, value, whole, tmp_path):
    found = damaged(whole, kind, tmp_path, lambda m: edit_json(m / "config.json", num_experts_per_tok=value))
    for line in found.values():
        assert "config.json" in line
        assert "num_experts_per_tok" in line
        assert repr(value)[:20] in line


ABSURD = {
    "intermediate_size": 10**6,
    "hidden_size": 10**6,
    "vocab_size": 10**9,
    "num_hidden_layers": 50_000,
    "num_local_experts": 10**6,
    "num_attention_heads": 10**6,
    "head_dim": 10**7,
}


@pytest.mark.parametrize("field", ABSURD)
def test_absurd_sizes_are_found_before_memory_is_taken(field, whole, tmp_path):
    """Of this process, not of torch's allocator alone: the peak may not grow by 500 MB."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damage = lambda m: edit_json(m / "config.json", **{field: ABSURD[field]})  # noqa: E731
    found = damaged(whole, "mixtral", tmp_path, damage, skip=("inspect", "scan"))
    assert found["trace"]
    assert "config.json" in found["trace"]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 500_000


# --- NaN in the weights


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (EXPERT, float("inf")),
        (ROUTER, float("nan")),
        ("model.embed_tokens.weight", float("inf")),
        ("model.layers.0.self_attn.q_proj.weight", float("nan")),
    ],
)
def test_nan_is_named_by_the_tensor_on_disk(name, value, whole, tmp_path):
    def plant(model: Path) -> None:
        rewrite(model / ONE, lambda tensors: tensors[name].view(-1)[5:6].fill_(value))

    found = damaged(whole, "mixtral", tmp_path, plant)
    scanned = ["scan"] if name in (EXPERT, ROUTER) else []
    for verb in ("trace", "compress", *scanned):
        assert str(tmp_path / "model" / ONE) in found[verb], verb
        assert name in found[verb]
        assert "NaN or Inf" in found[verb]


@pytest.mark.parametrize("method", ["weights", "random_merge"])
def test_nan_is_named_where_experts_are_merged_without_a_text(method, whole, tmp_path):
    name = f"{BLOCK}.experts.2.w3.weight"
    shutil.copytree(whole["mixtral"], tmp_path / "model")
    rewrite(tmp_path / "model" / ONE, lambda tensors: tensors[name].view(-1)[5:6].fill_(float("nan")))
    with pytest.raises(BadInput, match=f"{name} holds NaN or Inf"):
        compress(tmp_path / "model", keep=0.5, method=method, out=tmp_path / "run", quiet=True)


def test_quantised_weights_are_not_searched_for_nan_and_half_precision_is(tmp_path):
    from moescope.execution.models import check_finite

    model = torch.nn.Module()
    packed = (torch.ones(4, dtype=torch.float8_e4m3fn), torch.ones(4, dtype=torch.uint8), torch.ones(0))
    for number, weight in enumerate(packed):
        model.register_parameter(f"part_{number}", torch.nn.Parameter(weight, requires_grad=False))
    check_finite(model, "model")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for value in (float("nan"), float("-inf")):
            model.scale = torch.nn.Parameter(torch.tensor([1, value, 2], dtype=dtype), requires_grad=False)
            with pytest.raises(BadInput, match="scale holds NaN or Inf"):
                check_finite(model, str(save_model(tmp_path / "whole", tokenizer=False)))


def test_nan_in_a_lab_model_is_named_too(trained_run, whole, tmp_path):
    (checkpoint, *_) = (trained_run.path / "checkpoints").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / "model")
    name = sorted(name for name in load_file(tmp_path / "model" / ONE) if ".experts." in name)[3]
    rewrite(tmp_path / "model" / ONE, lambda tensors: tensors[name].view(-1)[5:6].fill_(float("nan")))
    with pytest.raises(BadInput, match="holds NaN or Inf") as caught:
        trace(tmp_path / "model", text=whole["text"], out=tmp_path / "run", device="cpu", quiet=True)
    assert name in str(caught.value)


# --- a forward pass that fails


def test_a_failing_forward_pass_names_model_layer_and_cause(whole, tmp_path, monkeypatch):
    from transformers.models.mixtral import modeling_mixtral as mixtral

    really = mixtral.MixtralAttention.forward

    def fail(self, *args, **kwargs):
        if self.layer_idx == 1:
            raise RuntimeError("the size of tensor a (7) must match\nthe size of tensor b (9)")
        return really(self, *args, **kwargs)

    monkeypatch.setattr(mixtral.MixtralAttention, "forward", fail)
    found = damaged(whole, "mixtral", tmp_path, lambda model: None)
    assert (found["inspect"], found["scan"]) == ("", "")
    for verb in ("trace", "compress"):
        assert str(tmp_path / "model") in found[verb]
        assert "layers.1.self_attn " in found[verb]
        assert "the size of tensor a (7) must match" in found[verb]


def test_an_error_of_moescope_s_own_inside_a_forward_pass_is_not_blamed_on_the_model(
    whole, tmp_path, monkeypatch
):
    monkeypatch.setattr("moescope.execution.capture.router_logits", lambda block: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace(whole["mixtral"], text=whole["text"], out=tmp_path / "run", device="cpu", quiet=True)


def test_text_beyond_the_vocabulary_fails_in_the_embedding_in_one_line(whole, tmp_path):
    (tmp_path / "ids.jsonl").write_text("[1, 2, 1000000]\n")
    with pytest.raises(BadInput) as caught:
        trace(
            whole["mixtral"], token_ids=tmp_path / "ids.jsonl", out=tmp_path / "run", device="cpu", quiet=True
        )
    assert "1000000" in str(caught.value) or "embed_tokens" in str(caught.value)


@pytest.mark.slow
def test_a_whole_model_of_every_family_passes_the_checks_and_one_of_other_sizes_does_not(tmp_path):
    from execution.test_capture import KINDS
    from families.tiny_models import tiny_model
    from moescope.execution.lab_models import load_any_model

    for kind in KINDS:
        folder = save_model(tmp_path / kind, kind, tokenizer=False)
        load_any_model(str(folder), "auto", "cpu")
        text = tiny_model(kind).model.config.get_text_config()
        config = json.loads((folder / "config.json").read_text())
        nested = next((config[name] for name in ("text_config", "thinker_config") if name in config), config)
        nested = nested.get("text_config", nested)
        nested["vocab_size"] = 10**9 + text.vocab_size
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(BadInput, match=r"config\.json makes it \[1000000064|describes"):
            load_any_model(str(folder), "auto", "cpu")


# --- checkpoints of the lab, which moescope itself runs


def edit_lab(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", moescope_lab={**config["moescope_lab"], **changes})


LAB_DAMAGES: dict[str, Damage] = {
    "header cut": lambda m: (m / ONE).write_bytes((m / ONE).read_bytes()[:100]),
    "no expert": lambda m: rewrite(
        m / ONE, lambda tensors: tensors.pop(next(n for n in tensors if "expert" in n))
    ),
    "another shape": lambda m: rewrite(m / ONE, lambda t: t.update({"model.norm.weight": torch.ones(3)})),
    "config of the lab is a list": lambda m: edit_json(m / "config.json", moescope_lab=[]),
    "unknown router": lambda m: edit_lab(m, router="oracle"),
    "top_k 99": lambda m: edit_lab(m, top_k=99),
    "top_k as text": lambda m: edit_lab(m, top_k="2"),
    "d_ff 10^7": lambda m: edit_lab(m, d_ff=10**7),
    "layers 10^9": lambda m: edit_lab(m, layers=10**9),
    "heads 0": lambda m: edit_lab(m, heads=0),
    "experts outside the lab's part": lambda m: edit_json(m / "config.json", num_local_experts=10**9),
    "no top_k outside the lab's part": lambda m: edit_json(
        m / "config.json", num_local_experts=3, num_experts=3, num_experts_per_tok=None
    ),
}


@pytest.mark.parametrize("name", LAB_DAMAGES)
def test_a_damaged_lab_checkpoint_is_one_line(name, trained_run, whole, tmp_path):
    (checkpoint, *_) = (trained_run.path / "checkpoints").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / "model")
    LAB_DAMAGES[name](tmp_path / "model")
    found = verdicts(tmp_path / "model", whole["text"], skip=("scan",))
    assert found["trace"], found
