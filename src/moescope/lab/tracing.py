"""A lab model in the form that tracing expects of one: called with input_ids and attention_mask, a cache handed back and forth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moescope.lab.model import Consume, LabModel, MoE
from moescope.lab.routers import RouterInput
from moescope.lab.saving import layout_of, load_model
from moescope.lab.vocabulary import Vocabulary
from moescope.routing.adapters import Decision
from moescope.routing.models import TracedModel
from moescope.types import Routing


@dataclass(frozen=True)
class TraceableConfig:
    """The few facts that tracing asks of a config."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    pad_token_id: int
    is_encoder_decoder: bool = False

    def get_text_config(self) -> TraceableConfig:
        return self


class Traceable(nn.Module):
    """The model behind another way of calling it; what it hands out stays the same."""

    def __init__(self, model: LabModel, vocabulary: Vocabulary):
        super().__init__()
        self.model = model
        shape = model.config
        self.config = TraceableConfig(layout_of(shape), shape.vocabulary, shape.max_positions, vocabulary.pad)

    def routing_blocks(self) -> list[tuple[int, str, nn.Module, int]]:
        return self.model.routing_blocks()

    def expert_blocks(self) -> dict[int, tuple[nn.Module, Callable[[Tensor], Decision]]]:
        """Every layer's experts, and its router asked about states alone: for routers that look at nothing else."""
        return {layer: (block.mlp.experts, partial(decide, block.mlp)) for layer, block in enumerate(self.model.blocks)}

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
            with experts_inputs(self.model) as given:
                handed = partial(with_inputs, consume, given)
                output = self.model(input_ids, mask_BL=mask_BL, consume=handed, cache=cache)
        return SimpleNamespace(logits=output.logits_BLV, past_key_values=cache)


@contextmanager
def experts_inputs(model: LabModel) -> Iterator[dict[int, Tensor]]:
    """Layer -> what its experts were given in the pass under way, until it is taken."""
    given: dict[int, Tensor] = {}

    def seen(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, MoE)
        given[module.layer] = args[0].detach()

    hooks = [block.mlp.register_forward_pre_hook(seen) for block in model.blocks]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def with_inputs(consume: Consume, given: dict[int, Tensor], routing: Routing) -> None:
    consume(replace(routing, x_TD=given.pop(routing.layer)))


def decide(mlp: MoE, x_TD: Tensor) -> Decision:
    """The router's decision for states of no text: every token is real, and all have the id 0."""
    ids_T = torch.zeros(len(x_TD), dtype=torch.long, device=x_TD.device)
    routed = mlp.router(RouterInput(x_TD.float(), ids_T, torch.ones_like(ids_T, dtype=torch.bool), mlp.layer))
    return Decision(x_TD, routed.chosen_TK, routed.gates_TK)


@dataclass(frozen=True)
class TraceableVocabulary:
    """The vocabulary as tracing calls a tokenizer."""

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
    """A lab checkpoint ready to be traced by the lab's own model; transformers is not needed."""
    model, vocabulary = load_model(name, device)
    if dtype not in ("auto", "float32"):
        model.cast(getattr(torch, dtype))
    whole = Traceable(model, vocabulary).eval()
    return TracedModel(str(name), whole, whole, TraceableVocabulary(vocabulary), device)
