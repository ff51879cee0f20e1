"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) on what is trained, through peft.

Every matrix W that would be trained is frozen and becomes W + 2 B A with trained B and A of a low rank, per
expert where experts lie in one tensor. B starts at 0, so the model starts as it was.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from moescope.errors import BadInput
from moescope.lab.tuning import ChosenRows, masked
from moescope.storage import remove, whole_folder

SCALE = 2  # lora_alpha / rank


def add_adapters(model: Any, rank: int, partly: list[ChosenRows]) -> Any:
    """Put adapters of that rank on the matrices that are to be trained; return peft's model around it.

    Embeddings, the output head, norms and biases are frozen. Routers that moescope put in are new, so they
    are trained in full. `partly` are the tensors of which only some experts are trained.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.layer import ParamWrapper

    new = [*getattr(model, "routers_instead", ()), getattr(model, "moescope_shared_router", None)]
    in_full = [weight for module in new if module is not None for weight in module.parameters()]
    in_full = [weight for weight in in_full if weight.requires_grad]
    matrices = adaptable(model, {id(weight) for weight in in_full})
    if not matrices:
        raise BadInput(
            f"[base] lora = {rank}: nothing that is trained can have an adapter (new routers are trained in "
            "full); train more, or remove lora"
        )
    largest = max(min(weight.shape[-2:]) for weight in matrices.values())
    if rank >= largest:
        raise BadInput(
            f"[base] lora = {rank}: the matrices that are trained have at most rank {largest}; lower it, or "
            "remove lora"
        )
    # as parameters, also those of linear maps: peft takes names such as up_proj for those of routed experts
    settings = LoraConfig(
        r=rank, lora_alpha=SCALE * rank, target_modules=[], target_parameters=sorted(matrices)
    )
    around = get_peft_model(model, settings)
    for weight in in_full:
        weight.requires_grad_(True)
    rows_of = {id(part.weight): part.rows for part in partly}
    for wrapper in model.modules():
        if isinstance(wrapper, ParamWrapper) and (rows := rows_of.get(id(wrapper.get_param()))) is not None:
            # B's columns are rank x experts; where B stays 0, so does the expert's change
            (adapter,) = wrapper.lora_B.values()
            adapter.weight.register_hook(partial(masked, rows.repeat(rank)))
    return around


def adaptable(model: Any, without: set[int]) -> dict[str, nn.Parameter]:
    """Return name -> trained matrix, or stack of them, without embeddings, output head and `without`."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    ends += [model.get_output_embeddings()]
    without = without | {id(weight) for module in ends for weight in module.parameters()}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.dim() in (2, 3) and id(weight) not in without
    }


def merge_adapters(around: Any, folder: Path | None) -> None:
    """Add the adapters to the model's own tensors; write them into the folder before, if there is one."""
    if folder is not None:
        if folder.exists():
            remove(folder)
        with whole_folder(folder) as partial_folder:
            around.save_pretrained(partial_folder, save_embedding_layers=False)
    around.merge_and_unload()
