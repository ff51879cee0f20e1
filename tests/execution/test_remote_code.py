"""A checkpoint's Python runs only where the user says so, never because of what standard input answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moescope import cli
from moescope.errors import BadInput
from moescope.run import Run
from routing.tiny_text import save_model, texts, write_jsonl

PYTHON = """
from pathlib import Path
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedTokenizerFast

Path({mark!r}).write_text("ran")


class OwnConfig(GptOssConfig):
    model_type = "own_moe"


class OwnModel(GptOssForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def change(file: Path, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def mark(tmp_path) -> Path:
    """The file that a checkpoint's Python writes when it runs."""
    return tmp_path / "ran"


@pytest.fixture
def model(tmp_path, mark, monkeypatch) -> Path:
    """A GPT-OSS under a name of its own, whose config and model are in the checkpoint."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = save_model(tmp_path / "model", kind="gpt_oss")
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    change(folder / "config.json", model_type="own_moe", auto_map=names)
    (folder / "own_code.py").write_text(PYTHON.format(mark=str(mark)))
    write_jsonl(tmp_path / "text.jsonl", texts(30))
    return folder


VERBS = [["trace"], ["compress", "--keep", "2", "--no-judge"]]


def run(verb: list[str], folder: Path, *more: str):
    name, *options = verb
    arguments = [name, str(folder), "--text", str(folder.parent / "text.jsonl"), *options, *more]
    return CliRunner().invoke(cli.app, [*arguments, "--out", str(folder.parent / "run")], input="y\n" * 20)


@pytest.mark.parametrize("verb", VERBS, ids=["trace", "compress"])
def test_yes_on_standard_input_runs_no_code_of_a_config_or_model(verb, model, mark):
    done = run(verb, model)
    assert not mark.exists()
    assert isinstance(done.exception, BadInput)
    assert "--trust-remote-code" in str(done.exception)
    assert not (model.parent / "run").exists()


def test_yes_on_standard_input_runs_no_code_of_a_tokenizer(model, mark):
    save_model(model, kind="gpt_oss")  # no version of transformers has a tokenizer class of its own for it
    change(
        model / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
    )
    done = run(["trace"], model)
    assert not mark.exists()
    assert isinstance(done.exception, BadInput)
    assert "the tokenizer is defined by Python code" in str(done.exception)
    assert "--trust-remote-code" in str(done.exception)
    assert run(["trace"], model, "--trust-remote-code").exit_code == 0
    assert mark.exists()


def test_who_trusts_a_checkpoint_runs_its_code_and_the_run_says_so(model, mark):
    done = run(["trace"], model, "--trust-remote-code")
    assert done.exit_code == 0, done.exception
    assert mark.read_text() == "ran"
    info = Run.load(model.parent / "run").info
    assert info["arguments"]["trust_remote_code"] is True
    assert "--trust-remote-code" in info["command"]


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_code_of_the_hub_that_a_config_names_is_not_fetched(key, model):
    change(model / "config.json", model_type="gpt_oss", auto_map={}, **{key: "owner/kernels"})
    done = run(["trace"], model)
    assert isinstance(done.exception, BadInput)
    assert "owner/kernels" in str(done.exception)
