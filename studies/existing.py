"""Study `existing`: routers of models that exist, kept, replaced or added by upcycling.

Arms are named "BASE: WAY". The lab trains each base with the settings of its arm `untouched`. `top2` and
`spectra` put that router into the base, as `moescope train --base` does (a dense base is upcycled), and train
routers and experts; `trained on` trains the base itself as long on the same text. top2 continues with the
rows of an MoE base; `top2, new rows` draws them anew first, as the router of spectra is.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

import moescope
from moescope.lab import study as lab_study
from moescope.lab.config import KEPT, ONLY_LAB, settle_existing
from moescope.lab.evaluation import mean_loss
from moescope.lab.existing import existing_identity
from moescope.lab.study_config import study_from
from moescope.lab.study_statistics import FAILED, NOT_RUN
from moescope.lab.study_task import (
    DONE,
    TaskResult,
    TrainingTask,
    costs,
    free_memory,
    load_text,
    memory_message,
)
from moescope.lab.train import Job, run_training, saved_checkpoints
from moescope.lab.tuning import TRAINED_MODEL, control_loss, held_out, load_base
from moescope.progress import unsaid_alerts
from moescope.run import Run, jsonable, read_run_json

if TYPE_CHECKING:
    from moescope.lab.config import LabConfig
    from moescope.lab.study_task import StudyText

UNTOUCHED, LONGER, NEW_ROWS = "untouched", "trained on", ", new rows"


def run_task(device: str, task: TrainingTask, tick: Callable[[], None]) -> TaskResult:
    """Train what the arm names from its base, which the first of its arms trains, and return the loss."""
    import torch

    from moescope.lab.training import Diverged

    text = load_text(task.study, task.corpus, task.config)
    row = {**task.keys, "question": task.question, **costs(task.config)}
    try:
        with unsaid_alerts():
            row |= {"status": DONE, "validation_loss": arm_loss(task, text, device)}
    except torch.OutOfMemoryError as error:
        return TaskResult(status=NOT_RUN, message=memory_message(error))
    except Diverged as error:
        row |= {"status": FAILED, "message": str(error).splitlines()[0]}
    finally:
        shutil.rmtree(task.folder, ignore_errors=True)
        free_memory()
    for _ in range(task.config.train.steps):
        tick()
    row |= {"unigram_loss": text.unigram_loss}
    return TaskResult({"study_runs": pd.DataFrame([row])}, row["status"])


def arm_loss(task: TrainingTask, text: StudyText, device: str) -> float:
    """Return the mean loss per token on the validation documents."""
    from moescope.decoder.ranks import Ranks

    way, model = task.arm.rsplit(": ", 1)[1], task.config.model
    base = str(trained_base(task, text, device))
    if way.endswith(NEW_ROWS):
        base = str(with_new_rows(Path(base), task.study / "bases" / task.folder.name, task.seed))
    config = existing_settings(task, base, KEPT if way in (UNTOUCHED, LONGER) else model.router)
    identity = existing_identity(base, config, text.corpus)
    sources = (config, text.corpus, None, identity, base)
    job = Job(task.folder, *sources, device, Ranks(), True, "")
    if way == UNTOUCHED:
        traced, vocabulary = load_base(base, device, config.train)
        return mean_loss(held_out(traced.model, job, vocabulary))
    if way == LONGER:
        return mean_loss(control_loss(job, base, task.folder))
    run = run_training(job)
    assert run is not None
    losses = run.table("base_losses").set_index(["model", "domain"])["loss"]
    return float(losses[TRAINED_MODEL, ""])


def existing_settings(task: TrainingTask, base: str, router: str) -> Any:
    """Return the arm's settings as `train --base` takes them."""
    train = {key: value for key, value in asdict(task.config.train).items() if ("train", key) not in ONLY_LAB}
    shape: dict[str, Any] = {"router": router, "trained": "routers+experts"}
    if read_config(base)["model_type"] == "llama":
        shape |= {"experts": task.config.model.experts, "top_k": 2}
    if router != KEPT:
        shape["router_options"] = task.config.model.router_options
    return settle_existing({"base": shape, "train": train}, None, task.seed)


def read_config(folder: str | Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return content


# --- bases


def trained_base(task: TrainingTask, text: StudyText, device: str) -> Path:
    """Return the base of this arm and seed, a checkpoint of transformers.

    While another process trains it, this one trains bases of other arms and seeds that nobody trains yet.
    """
    plan = study_from((read_run_json(task.study) or {})["arguments"])
    own = f"{task.arm.rsplit(': ', 1)[0]}: {UNTOUCHED}", task.seed
    bases = {(arm.name, seed): arm for arm, seed in plan.trainings if arm.name.endswith(f": {UNTOUCHED}")}
    folder = task.study / "bases"
    folder.mkdir(exist_ok=True)
    target = folder / bases[own].training_name(task.seed)
    for at, key in enumerate((own, *bases, own)):
        arm, seed = bases[key], key[1]
        if target.exists():
            break
        with (folder / f"{arm.training_name(seed)}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if at > len(bases) else fcntl.LOCK_NB))
            except BlockingIOError:
                continue
            train_base(arm.of_seed(seed), folder / arm.training_name(seed), task.corpus, text, device)
    return target


def with_new_rows(base: Path, target: Path, seed: int) -> Path:
    """Copy a checkpoint, its routers' rows drawn anew as the family draws them, and return the copy."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    rows = [weight for name, weight in model.named_parameters() if name.endswith(".gate.weight")]
    assert len(rows) == model.config.num_hidden_layers
    for weight in rows:
        torch.nn.init.normal_(weight, std=model.config.initializer_range, generator=generator)
    shutil.copytree(base, target, dirs_exist_ok=True)
    model.save_pretrained(target)
    return target


def train_base(config: LabConfig, target: Path, corpus: str, text: StudyText, device: str) -> None:
    """Train a base and write it as transformers reads it, unless it is there."""
    from moescope.decoder.ranks import Ranks

    if target.exists():
        return
    training, partial = target.with_suffix(".training"), target.with_suffix(".partial")
    identity = {"arguments": jsonable(asdict(config)), "corpus": corpus}
    sources = (config, text.corpus, text.vocabulary, identity, None)
    run_training(Job(training, *sources, device, Ranks(), True, "", text.data, lambda: None))
    shutil.rmtree(partial, ignore_errors=True)
    write_for_transformers(Path(saved_checkpoints(training / "checkpoints")[-1]["path"]), partial)
    partial.rename(target)
    shutil.rmtree(training)


def write_for_transformers(checkpoint: Path, folder: Path) -> None:
    """Copy a lab checkpoint; a dense one, of the lab's own layout, becomes a Llama."""
    from safetensors.torch import save_file

    from moescope.decoder.saving import FACTS, LAB, config_json, load_model

    shutil.copytree(checkpoint, folder)
    if read_config(folder)["model_type"] != LAB:
        return
    model, _ = load_model(checkpoint, "cpu")
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer = name.partition(".mlp.")[0]
        if name.endswith("experts.gate_up"):
            gate, up = tensor[0].chunk(2)
            tensors[f"model.{layer}.mlp.gate_proj.weight"] = gate.contiguous()
            tensors[f"model.{layer}.mlp.up_proj.weight"] = up.contiguous()
        elif name.endswith("experts.down"):
            tensors[f"model.{layer}.mlp.down_proj.weight"] = tensor[0].contiguous()
        elif name == "lm_head.weight":
            tensors[name] = tensor.contiguous()
        else:
            tensors[f"model.{name}"] = tensor.contiguous()
    if model.config.tie_embeddings:
        del tensors["lm_head.weight"]
    width = len(tensors["model.layers.0.mlp.gate_proj.weight"])
    config = {key: value for key, value in config_json(model).items() if key not in (FACTS, LAB)}
    for key in ("num_experts", "num_experts_per_tok"):
        del config[key]
    config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": width}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def study(**options: Any) -> Run:
    lab_study.run_task = run_task  # in place of a study's own
    return moescope.study(**options)
