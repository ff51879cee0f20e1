"""A lab model in the form of transformers' models: input_ids, attention_mask, cache in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from moescope.errors import reject_if
from moescope.execution.adapters import Apart, Block, find_blocks
from moescope.execution.model_names import checked_checkpoint
from moescope.execution.models import (
    TracedModel,
    check_finite,
    check_growth,
    find_model,
    loading,
    runner_of,
    with_tokenizer,
)
from moescope.execution.replaced import apart
from moescope.execution.streamed import load_streamed
from moescope.execution.ways import SLACK, Execution, Expected, choose_way, sharded_placement, weight_bytes
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
        facts = (layout_of(model.config), model.config.vocabulary, model.trained_length, vocabulary.pad)
        self.config = TraceableConfig(*facts, stored=config_json(model))
        self.routing_blocks, self.expert_blocks = model.routing_blocks, partial(expert_blocks, model)

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
            with with_inputs(self.model, consume) as consume_with_inputs:
                output = self.model(input_ids, mask_BL=mask_BL, consume=consume_with_inputs, cache=cache)
        return SimpleNamespace(logits=output.logits_BLV, past_key_values=cache)


def expert_blocks(model: LabModel) -> dict[int, Apart]:
    """Return layer -> its experts, its router for single tokens, and one with other tensors."""
    return {layer: apart(block.mlp.experts, block.mlp.router) for layer, block in enumerate(model.blocks)}


def lab_blocks(model: LabModel) -> list[Block]:
    """Return the MoE blocks of a lab model, as `find_blocks` returns those of a traceable one."""
    parts = {"routing_blocks": model.routing_blocks, "expert_blocks": partial(expert_blocks, model)}
    return find_blocks(SimpleNamespace(**parts))


@contextmanager
def with_inputs(model: LabModel, consume: Consume) -> Iterator[Consume]:
    """Yield `consume` of routing with the inputs of the experts, and what the router got from above."""
    inputs: dict[int, tuple[Tensor, Tensor | None]] = {}

    def store_inputs(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, MoE)
        x_TD, _, _, carried_TR, *_ = args
        inputs[module.layer] = x_TD.detach(), None if carried_TR is None else carried_TR.detach()

    def consume_with_inputs(routing: Routing) -> None:
        if routing.layer in inputs:  # else its block did not run: a stored output took its place
            x_TD, carried_TR = inputs.pop(routing.layer)
            consume(replace(routing, x_TD=x_TD, carried_TR=carried_TR))

    with ExitStack() as hooks:
        for block in model.blocks:
            hooks.callback(block.mlp.register_forward_pre_hook(store_inputs).remove)
        yield consume_with_inputs


@dataclass(frozen=True)
class TraceableVocabulary:
    """The vocabulary with a tokenizer's call signature."""

    vocabulary: Vocabulary

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
    checkpoint = checked_checkpoint(str(name))
    if checkpoint is not None:
        check_growth(checkpoint, parameter_counts(load_config(Path(name))).total)
    model, vocabulary = load_model(name, device)
    check_finite(model, str(name))
    if dtype not in ("auto", "float32"):
        avoid_broken_amx(device, True)
        model.cast(getattr(torch, dtype))
    traceable = Traceable(model, vocabulary).eval()
    return TracedModel(str(name), traceable, traceable, TraceableVocabulary(vocabulary), device)


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
    expected = expect_way(name, dtype, device, prefer_transformers, how)
    if expected.way == "streamed":
        return load_streamed(name, dtype, device, trust_remote_code, how)
    how.announce(expected)
    if runs_in_lab(name, prefer_transformers, how):
        return load_traced(name, dtype, device)
    place = sharded_placement(name, device, how.limit) if expected.way == "sharded" else None
    return load_transformers_model(name, dtype, device, trust_remote_code, place)


def runs_in_lab(name: str, prefer_transformers: bool, how: Execution) -> bool:
    """Return whether the lab's decoder runs the model, which is never spread or streamed."""
    in_lab = is_own_layout(name) if prefer_transformers else is_lab_checkpoint(name)
    reject_if(
        in_lab and how.way not in ("auto", "resident"),
        f"{name}: models of the lab run resident; omit --execution {how.way}",
    )
    return in_lab


def expect_way(name: str, dtype: str, device: str, prefer_transformers: bool, how: Execution) -> Expected:
    """Return the way to run a model, and what it takes if it is not streamed."""
    in_lab, checkpoint = runs_in_lab(name, prefer_transformers, how), checked_checkpoint(name)
    way = "resident" if in_lab else choose_way(checkpoint, dtype, device, how)
    memory = None if checkpoint is None else int(SLACK * weight_bytes(checkpoint, dtype, device))
    return Expected(name, way, memory)


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
    expected = expect_way(name, dtype, device, prefer_transformers, execution)
    if expected.way == "streamed":
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
