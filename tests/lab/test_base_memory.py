"""train --base tells and checks the memory of weights, gradients and AdamW's moments before it loads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moescope
from lab.existing_models import SPARSE, ids, saved
from lab.test_existing import settings
from moescope.checkpoint import open_checkpoint
from moescope.errors import BadInput
from moescope.execution import models
from moescope.lab import cost, tuning
from moescope.lab.config import BaseConfig
from moescope.lab.existing import base_size, upcycle
from moescope.lab.train import size_lines


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moescope.lab.train.analyse_run", lambda *given: None)
    return tmp_path


def held_bytes(folder, trained):
    """Bytes of weights, gradients and moments after one step of the model on disk."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tuning.choose_trained(model, trained)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights)
    model(ids(), labels=ids()).loss.backward()
    optimiser.step()
    moments = [value for state in optimiser.state.values() for name, value in state.items() if name != "step"]
    held = [*model.state_dict().values(), *(weight.grad for weight in weights), *moments]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("trained", ["routers", "routers+experts", "everything"])
def test_the_memory_is_what_the_model_and_adamw_hold_after_a_step(family, trained, here):
    base = saved(family, here / "base")
    size = base_size(open_checkpoint(str(base)), BaseConfig(trained=trained))
    # all but 16 numbers: DeepSeek-V3's correction biases have no moments
    assert 0 <= size.memory - held_bytes(base, trained) <= 12 * 16


def test_the_memory_of_a_dense_base_is_that_of_its_copies(here):
    base = saved("llama", here / "base")
    size = base_size(open_checkpoint(str(base)), BaseConfig(trained="routers+experts", experts=3))
    upcycle(open_checkpoint(str(base)), here / "moe", experts=3, top_k=2)
    new_routers = 2 * 3 * 32
    assert size.memory == held_bytes(here / "moe", "routers+experts") - 16 * new_routers


def test_a_training_that_does_not_fit_is_rejected_before_anything_is_loaded(here, monkeypatch):
    base = saved("mixtral", here / "base")
    monkeypatch.setattr(models, "load_weights", None)
    needed = held_bytes(base, "routers+experts")
    monkeypatch.setattr(cost, "memory_of", lambda device: needed - 1)
    with pytest.raises(BadInput, match=r"needs at least .* GB of memory"):
        moescope.train(settings(trained="routers+experts"), base=base, out=here / "run", quiet=True)
    assert not (here / "run").exists()
    facts = moescope.count_parameters(settings(trained="routers"), base=base)
    assert any(line.startswith("memory: at least") for line in size_lines(facts))


def test_the_memory_is_one_line_on_stderr_and_quiet_prints_nothing(here, capfd):
    base = saved("mixtral", here / "base")
    capfd.readouterr()
    moescope.train(settings(steps=1), base=base, out=here / "run", quiet=True)
    assert capfd.readouterr() == ("", "")
    moescope.train(settings(steps=1), base=base, out=here / "second")
    lines = capfd.readouterr().err.splitlines()
    assert sum(line.startswith("memory: at least") for line in lines) == 1
    assert not any("shards" in line for line in lines)


@pytest.mark.parametrize("router", ["kept", "spectra"])
def test_a_base_in_fp8_is_rejected_before_training(router, here):
    base = saved("mixtral", here / "base")
    file, stored = base / "model.safetensors", {}
    for name, value in load_file(base / "model.safetensors").items():
        if "experts" in name:
            stored |= {name: value.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
        else:
            stored[name] = value
    save_file(stored, file, {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match="is quantised"):
        moescope.train(settings(router=router), base=base, out=here / "run", quiet=True)
    assert not (here / "run").exists()
