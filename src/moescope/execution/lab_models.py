"""A lab model in the form of transformers' models: input_ids, attention_mask, cache in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moescope.decoder.model import Consume, LabModel, MoE, parameter_counts
from moescope.decoder.saving import (
    config_json,
    is_lab_checkpoint,
    is_own_layout,
    layout_of,
    load_config,
    load_model,
)
from moescope.decoder.vocabulary import Vocabulary
from moescope.errors import BadInput
from moescope.execution.adapters import Apart, Block, find_blocks
from moescope.execution.model_names import checked_checkpoint
from moescope.execution.models import (
    MOST_GROWTH,
    TracedModel,
    check_finite,
    find_model,
    loading,
    runner_of,
    with_tokenizer,
)
from moescope.execution.routers_alone import ask, with_router
from moescope.execution.streamed import load_streamed
from moescope.execution.ways import Execution, Expected, choose_way, expect_whole, sharded_placement
from moescope.processor import avoid_broken_amx
from moescope.types import Routing


@dataclass(frozen=True)
class TraceableConfig:
    """The parts of a config that tracing uses."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    pad_token_id: int
    is_encoder_decoder: bool = False
    stored: dict[str, Any] = field(default_factory=dict)  # config.json

    def to_dict(self) -> dict[str, Any]:
        return self.stored

    def get_text_config(self) -> TraceableConfig:
        return self


class Traceable(nn.Module):
    """The model behind the call signature of transformers; its Routing stays the same."""

    def __init__(self, model: LabModel, vocabulary: Vocabulary):
        super().__init__()
        self.model = model
        shape = model.config
        self.config = TraceableConfig(
            layout_of(shape),
            shape.vocabulary,
            model.trained_length,
            vocabulary.pad,
            stored=config_json(model),
        )

    def routing_blocks(self) -> list[tuple[int, str, nn.Module, int]]:
        return self.model.routing_blocks()

    def expert_blocks(self) -> dict[int, Apart]:
        return expert_blocks(self.model)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        use_cache: bool = False,
        past_key_values: Any = None,
        consume: Consume | None = None,
    ) -> SimpleNamespace:
        cache = (past_key_values or self.model.new_cache()) if use_cache else None
        mask_BL = attention_mask[:, -input_ids.shape[1] :].bool()
        if consume is None:
            output = self.model(input_ids, mask_BL=mask_BL, cache=cache)
        else:
            with experts_inputs(self.model) as inputs:
                consume_with_inputs = partial(with_inputs, consume, inputs)
                output = self.model(input_ids, mask_BL=mask_BL, consume=consume_with_inputs, cache=cache)
        return SimpleNamespace(logits=output.logits_BLV, past_key_values=cache)


def expert_blocks(model: LabModel) -> dict[int, Apart]:
    """Return layer -> its experts, its router for single tokens, and one with other tensors."""
    parts = {}
    for layer, block in enumerate(model.blocks):
        router = block.mlp.router
        calls = partial(ask, router), partial(with_router, router)
        parts[layer] = Apart(block.mlp.experts, *calls, router.linear_view())
    return parts


def lab_blocks(model: LabModel) -> list[Block]:
    """Return the MoE blocks of a lab model, as `find_blocks` returns those of a traceable one."""
    return find_blocks(
        SimpleNamespace(routing_blocks=model.routing_blocks, expert_blocks=partial(expert_blocks, model))
    )


@contextmanager
def experts_inputs(model: LabModel) -> Iterator[dict[int, tuple[Tensor, Tensor | None]]]:
    """Yield layer -> inputs of its experts in the current pass, and what the router got from above."""
    inputs: dict[int, tuple[Tensor, Tensor | None]] = {}

    def store_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, MoE)
        x_TD, _, _, carried_TR, *_ = args
        inputs[module.layer] = x_TD.detach(), None if carried_TR is None else carried_TR.detach()

    hooks = [block.mlp.register_forward_pre_hook(store_inputs) for block in model.blocks]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def with_inputs(consume: Consume, inputs: dict[int, tuple[Tensor, Tensor | None]], routing: Routing) -> None:
    if routing.layer not in inputs:  # its block did not run: a stored output took its place
        return
    x_TD, carried_TR = inputs.pop(routing.layer)
    consume(replace(routing, x_TD=x_TD, carried_TR=carried_TR))


@dataclass(frozen=True)
class TraceableVocabulary:
    """The vocabulary with a tokenizer's call signature."""

    vocabulary: Vocabulary
    chat_template: None = None

    @property
    def pad_token_id(self) -> int:
        return self.vocabulary.pad

    def __call__(self, text: str, **ignored: Any) -> dict[str, list[int]]:
        return {"input_ids": self.vocabulary.encode(text).tolist()}

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.vocabulary.decode([token])


def load_traced(name: str | Path, dtype: str, device: str) -> TracedModel:
    """Load a lab checkpoint ready to be run by the lab's own model, without transformers."""
    check_lab_sizes(str(name))
    model, vocabulary = load_model(name, device)
    check_finite(model, str(name))
    if dtype not in ("auto", "float32"):
        avoid_broken_amx(device, True)
        model.cast(getattr(torch, dtype))
    traceable = Traceable(model, vocabulary).eval()
    return TracedModel(str(name), traceable, traceable, TraceableVocabulary(vocabulary), device)


def check_lab_sizes(name: str) -> None:
    """Check files and headers, and that the config describes no larger model than the files hold."""
    checkpoint = checked_checkpoint(name)
    if checkpoint is None:
        return
    needed = parameter_counts(load_config(Path(name))).total
    held = sum(info.parameters for info in checkpoint.tensors.values())
    if needed > MOST_GROWTH * held:
        raise BadInput(
            f"{checkpoint.files.label('config.json')}: describes {needed:,} parameters, but the files hold "
            f"{held:,}; correct the config, or copy the checkpoint again"
        )


def load_any_model(
    name: str,
    dtype: str,
    device: str,
    prefer_transformers: bool = False,
    trust_remote_code: bool = False,
    execution: Execution | None = None,
) -> TracedModel:
    """Load a lab checkpoint with the lab's decoder, any other model with transformers.

    With `prefer_transformers`, lab checkpoints in a layout that transformers supports are loaded with it too.
    `execution` says how the model is to be run; without it, it is loaded whole onto the device.
    """
    from moescope.execution.models import load_model as load_transformers_model

    how = execution or Execution()
    if execution is None and not runs_in_lab(name, prefer_transformers, how):
        return load_transformers_model(name, dtype, device, trust_remote_code)
    way, expected = expect_way(name, dtype, device, prefer_transformers, how)
    if way == "streamed":
        return load_streamed(name, dtype, device, trust_remote_code, how)
    how.announce(expected)
    if runs_in_lab(name, prefer_transformers, how):
        return load_traced(name, dtype, device)
    place = sharded_placement(name, device, how.limit) if way == "sharded" else None
    return load_transformers_model(name, dtype, device, trust_remote_code, place)


def runs_in_lab(name: str, prefer_transformers: bool, how: Execution) -> bool:
    """Return whether the lab's decoder runs the model, which is never spread or streamed."""
    in_lab = is_own_layout(name) if prefer_transformers else is_lab_checkpoint(name)
    if in_lab and how.way not in ("auto", "resident"):
        raise BadInput(f"{name}: models of the lab run resident; omit --execution {how.way}")
    return in_lab


def expect_way(
    name: str, dtype: str, device: str, prefer_transformers: bool, how: Execution
) -> tuple[str, Expected]:
    """Return the way to run a model, and what it takes if it is not streamed."""
    in_lab, checkpoint = runs_in_lab(name, prefer_transformers, how), checked_checkpoint(name)
    way = "resident" if in_lab else choose_way(checkpoint, dtype, device, how)
    return way, expect_whole(name, way, checkpoint, dtype, device)


def expect_run(
    name: str,
    dtype: str,
    device: str,
    prefer_transformers: bool,
    trust_remote_code: bool,
    execution: Execution,
    tokens: int,
) -> Expected:
    """Return what a run over so many tokens, padding included, takes; no weight is loaded."""
    way, expected = expect_way(name, dtype, device, prefer_transformers, execution)
    if way == "streamed":
        return load_streamed(name, dtype, device, trust_remote_code, execution).expect(tokens)
    return expected


def load_skeleton(
    name: str, dtype: str, prefer_transformers: bool = False, trust_remote_code: bool = False
) -> TracedModel:
    """Return a model without weights (a lab model whole): enough to read documents and name its blocks."""
    if runs_in_lab(name, prefer_transformers, Execution()):
        return load_traced(name, dtype, "cpu")
    source = find_model(name, trust_remote_code)
    with loading(name), torch.device("meta"):
        if hasattr(source.kind, "get_init_context"):
            model = source.kind(source.config)
        else:  # an auto class: Python code of the checkpoint
            model = source.kind.from_config(source.config, trust_remote_code=trust_remote_code)
    return with_tokenizer(TracedModel(name, model, runner_of(model), None, "cpu"), source)
