"""Tiny trainings: the same documents through a real Trainer or a plain loop, and an oracle that counts by
itself.

    python tiny_training.py FOLDER '{"max_steps": 4}' '{"every": 2}'

trains as a process of its own, which torchrun can start twice and a test can kill.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import moescope
from families.tiny_models import tiny_model
from moescope.run import Run

LENGTH = 12


def documents(count: int = 32, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Documents of 8 to 12 tokens, padded to 12, the padding masked and without labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, 60, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < LENGTH - number % 5).long()
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)})
    return rows


def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def model_of(kind: str = "mixtral") -> nn.Module:
    model = tiny_model(kind).model
    model.config.output_router_logits = True
    return model.train()


def handed_out(model: nn.Module, rows: list[dict[str, torch.Tensor]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and gate weight [layer, expert], from what experts modules are handed one document at a time.

    Without padding.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    modules = [module for module in model.modules() if type(module).__name__.endswith("Experts")]
    hooks = [
        module.register_forward_pre_hook(lambda module, args: found.append(args[1:])) for module in modules
    ]
    counts, mass = np.zeros((len(modules), 4), dtype=int), np.zeros((len(modules), 4))
    for row in rows:
        found.clear()
        with torch.no_grad():
            model(input_ids=row["input_ids"][None, : int(row["attention_mask"].sum())])
        for layer, (chosen, gates) in enumerate(found):
            for expert, gate in zip(chosen.flatten().tolist(), gates.flatten().tolist(), strict=True):
                counts[layer, expert] += 1
                mass[layer, expert] += gate
    for hook in hooks:
        hook.remove()
    return counts, mass


def load(run: Run, column: str = "tokens") -> np.ndarray:
    """A column of the load table summed over steps: [layer, expert]."""
    return (
        run.table("load")
        .pivot_table(index="layer", columns="expert", values=column, aggfunc="sum")
        .to_numpy()
    )


def trainer(
    folder: Path,
    kind: str = "mixtral",
    monitor: dict[str, Any] | None = None,
    model: Any = None,
    **arguments: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    chosen = {
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "learning_rate": 0.0,
        "seed": 3,
        **arguments,
    }
    callbacks = [] if monitor is None else [moescope.Monitor(**monitor)]
    return Trainer(
        model or model_of(kind),
        TrainingArguments(output_dir=str(folder), **chosen),
        train_dataset=documents(),
        eval_dataset=documents(8, seed=9),
        callbacks=callbacks,
    )


if __name__ == "__main__":
    trainer(Path(sys.argv[1]), monitor=json.loads(sys.argv[3]), **json.loads(sys.argv[2])).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter
