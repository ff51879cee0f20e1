"""Checkpoints of transformers models whose routers were replaced, which transformers alone can run.

Where the new router is a linear top-k that the family has itself, the checkpoint is an ordinary one of the
family. Otherwise the router's source lies beside the weights, and transformers loads it with
`trust_remote_code`; moescope uses its own classes instead and never runs that copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moescope import __version__
from moescope.checkpoint.writing import plan_tensor, write_checkpoint
from moescope.decoder.config import ModelConfig
from moescope.decoder.model import check_model
from moescope.decoder.replacement import KEY, Replaced, ReplacedRouters, install_routers
from moescope.decoder.routers import Router, RouterInput, router_class
from moescope.decoder.saving import FACTS
from moescope.errors import one_line, reject_if
from moescope.execution.adapters import Apart, Ask, Asked, Decision, RouterReads, find_blocks

# --- routers of the lab asked about single tokens, as they are or with other tensors


@torch.no_grad()
def ask(router: Router, reads: RouterReads) -> Asked:
    """Return the router's answer about single tokens: all are real, with id 0 where none is known."""
    x_TD = reads.x_TD
    real_T = torch.ones(len(x_TD), dtype=torch.bool, device=x_TD.device)
    ids_T = torch.zeros_like(real_T, dtype=torch.long) if reads.ids_T is None else reads.ids_T
    routed = router(RouterInput(x_TD.float(), ids_T, real_T, router.layer, reads.carried_TR))
    return Asked(Decision(x_TD, routed.chosen_TK, routed.gates_TK), routed.logits_TE, routed.selection_TE)


def with_router(router: Router, tensors: Mapping[str, Tensor], n_experts: int, top_k: int | None) -> Ask:
    """Return a router of the same class and options with these tensors, for `n_experts` experts."""
    config = replace(router.config, experts=n_experts, top_k=top_k or router.config.top_k)
    with torch.random.fork_rng(devices=[]):  # its initial weights are discarded
        changed = type(router)(config, router.layer, router.shared)
    changed.load_state_dict(dict(tensors))
    device = next((tensor.device for tensor in router.state_dict().values()), None)
    return partial(ask, changed.to(device).eval())


def apart(experts: nn.Module, router: Router) -> Apart:
    return Apart(experts, partial(ask, router), partial(with_router, router), router.linear_view())


# --- checkpoints with replaced routers

# What the routers need, in the order of their imports.
SOURCES = (
    *("errors", "types", "decoder.config", "decoder.ranks", "decoder.routers.contract"),
    *("decoder.routers.capacity", "decoder.routers.topk", "decoder.routers.dense", "decoder.routers.hash"),
    *("decoder.routers.expert_choice", "decoder.routers.loss_free", "decoder.routers.some"),
    *("decoder.routers.spectra", "decoder.routers", "decoder.replacement"),
)
SOFTMAX_TOP_K = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # a linear map, softmax and top-k
OURS = re.compile(r"^(\s*)from moescope\.([\w.]+) import", re.MULTILINE)
FILE = "modeling_moescope"
MODELLING = '''"""{family} with the router {router} in the place of its own. Written by moescope {version}.

Load it with AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).
"""

from transformers import {config}, {model}

from .{replacement} import ReplacedRouters


class Moescope{config}({config}):
    model_type = "{key}"


class Moescope{model}(ReplacedRouters, {model}):
    config_class = Moescope{config}
'''


def flat_name(module: str) -> str:
    return f"moescope_{module.replace('.', '_')}"


def family_classes(family: str) -> tuple[Any, Any]:
    """Return the config class and the causal language model of a model type in transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    reject_if(
        family not in CONFIG_MAPPING or CONFIG_MAPPING[family] not in MODEL_FOR_CAUSAL_LM_MAPPING,
        f"model type {family!r}: transformers has no causal language model of it",
    )
    config = CONFIG_MAPPING[family]
    return config, MODEL_FOR_CAUSAL_LM_MAPPING[config]


def replaced_classes(path: str, stored: dict[str, Any]) -> tuple[Any, Any]:
    """Return the config and the model class of a checkpoint with replaced routers, both of moescope."""
    damaged = f"{path}: config.json: {KEY} is damaged"
    with one_line(damaged, "copy the checkpoint again", (KeyError, TypeError, ValueError)):
        replaced = Replaced.of(stored[KEY])
        router_class(replaced.model.router)
    config_class, model_class = family_classes(replaced.family)
    own_config: Any = type(f"Moescope{config_class.__name__}", (config_class,), {"model_type": KEY})
    parts = {"config_class": own_config, "routing_blocks": routing_blocks, "expert_blocks": expert_blocks}
    own_model = type(f"Moescope{model_class.__name__}", (ReplacedRouters, model_class), parts)
    return own_config.from_pretrained(path), own_model


def replace_routers(model: Any, config: ModelConfig) -> Replaced:
    """Put new routers into a model of transformers; they start with the old rows where they have any.

    `config` gives the router, its options and top_k; 0: as many experts per token as before. The model then
    hands out its routing itself.
    """
    blocks = find_blocks(model)
    text = model.config.get_text_config()
    before = Replaced.of(getattr(model.config, KEY)) if hasattr(model.config, KEY) else None
    for block in blocks if before is None else ():
        reject_if(
            not block.name.endswith(".mlp") or block.router is not getattr(block.module, "gate", None),
            f"model type {block.model_type!r}: its router is not mlp.gate ({block.where()}), so it "
            "cannot be replaced; keep it",
        )
    sizes = {block.n_experts for block in blocks}
    reject_if(
        len(sizes) > 1,
        f"model type {blocks[0].model_type!r}: layers differ in experts {sorted(sizes)}; keep them",
    )
    kind = router_class(config.router)
    chosen = before.model.top_k if before else int(text.num_experts_per_tok)
    options = dict(config.router_options)
    if "renormalise" in kind.OPTIONS and hasattr(text, "norm_topk_prob"):
        options.setdefault("renormalise", bool(text.norm_topk_prob))
    shape: dict[str, Any] = {
        "vocabulary": int(text.vocab_size),
        "d_model": int(text.hidden_size),
        "experts": sizes.pop(),
    }
    top_k = kind.fixed_top_k or config.top_k or chosen
    settled = replace(config, **shape, top_k=top_k, router_options=options)
    check_model(replace(settled, heads=1))
    places = tuple((block.layer, block.name) for block in blocks)
    scale = float(getattr(text, "routed_scaling_factor", None) or 1.0)
    replaced = Replaced(str(model.config.model_type), settled, places, scale)
    if before:
        replaced = replace(replaced, family=before.family, scale=before.scale)
    if getattr(text, "output_router_logits", False):  # the family looks for its own routers
        text.output_router_logits = False
    rows = [block.rows_ED for block in blocks]
    model.routers_instead = tuple(install_routers(model, replaced))
    for instead, rows_ED in zip(model.routers_instead, rows, strict=True):
        weight = getattr(instead.router, "weight", None)
        if isinstance(weight, nn.Parameter) and rows_ED is not None and weight.shape == rows_ED.shape:
            weight.data.copy_(rows_ED.detach().float())
    model.to(blocks[0].device)
    model.routing_blocks, model.expert_blocks = partial(routing_blocks, model), partial(expert_blocks, model)
    return replaced


def routing_blocks(model: Any) -> list[tuple[int, str, nn.Module, int]]:
    """Return number, name, router and number of experts of every block whose router was replaced."""
    return [
        (one.number, one.block_name, one.router, one.router.config.experts) for one in model.routers_instead
    ]


def expert_blocks(model: Any) -> dict[int, Apart]:
    """Return layer -> its experts, its router for single tokens, and one with other tensors."""
    return {
        one.number: apart(model.get_submodule(one.block_name).experts, one.router)
        for one in model.routers_instead
    }


def save_replaced(model: Any, replaced: Replaced, family_routers: Sequence[Any], folder: Path) -> None:
    """Write a model with replaced routers; `family_routers` are the family's own, if it has any.

    A linear top-k becomes the family's own router, and the checkpoint an ordinary one of the family.
    """
    if not is_plain(replaced) or not family_routers:
        save_with_code(model, replaced, folder)
        return
    kind, text = router_class(replaced.model.router), model.config.get_text_config()
    text.num_experts_per_tok = replaced.model.top_k
    if hasattr(text, "norm_topk_prob"):
        text.norm_topk_prob = kind.renormalises(replaced.model)
    blocks = [model.get_submodule(name) for _, name in replaced.blocks]
    instead = [block.gate for block in blocks]
    try:
        for block, new, old in zip(blocks, instead, family_routers, strict=True):
            old.weight.data.copy_(new.router.weight.detach())
            block.gate = old
        model.save_pretrained(folder)
    finally:
        for block, new in zip(blocks, instead, strict=True):
            block.gate = new


def is_plain(replaced: Replaced) -> bool:
    """Return whether the family's own router can compute what the new one does in evaluation."""
    kind = router_class(replaced.model.router)
    if not kind.is_plain(replaced.model) or replaced.family not in SOFTMAX_TOP_K:
        return False
    return replaced.family != "mixtral" or kind.renormalises(replaced.model)  # Mixtral always does


def save_with_code(model: Any, replaced: Replaced, folder: Path) -> None:
    """Write weights under the names they have in memory, and the sources of the routers."""
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    tensors = [
        plan_tensor(name, tensor)
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    ]
    write_checkpoint(folder, tensors, config_with_code(model.config.to_dict(), replaced))
    write_sources(replaced, folder)


def config_with_code(config: dict[str, Any], replaced: Replaced) -> dict[str, Any]:
    """Return config.json of a checkpoint with replaced routers, from that of its family."""
    config_class, model_class = family_classes(replaced.family)
    classes = {"AutoConfig": config_class, "AutoModelForCausalLM": model_class}
    return {
        **config,
        "model_type": KEY,
        "architectures": [f"Moescope{model_class.__name__}"],
        "auto_map": {auto: f"{FILE}.Moescope{part.__name__}" for auto, part in classes.items()},
        KEY: replaced.as_dict(),
        FACTS: router_class(replaced.model.router).facts(replaced.model),
    }


def write_sources(replaced: Replaced, folder: Path) -> None:
    """Write the modelling file and the modules it needs."""
    for module in SOURCES:
        text = Path(str(import_module(f"moescope.{module}").__file__)).read_text(encoding="utf-8")
        ours = OURS.sub(lambda found: f"{found[1]}from .{flat_name(found[2])} import", text)
        (folder / f"{flat_name(module)}.py").write_text(ours, encoding="utf-8")
    config, model = (part.__name__ for part in family_classes(replaced.family))
    words = {"family": replaced.family, "router": replaced.model.router, "version": __version__, "key": KEY}
    words |= {"config": config, "model": model, "replacement": flat_name("decoder.replacement")}
    (folder / f"{FILE}.py").write_text(MODELLING.format(**words), encoding="utf-8")
