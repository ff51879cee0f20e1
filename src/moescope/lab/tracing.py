"""A lab model in the form that tracing expects of one: called with input_ids and attention_mask, a cache handed back and forth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moescope.lab.model import Consume, LabModel
from moescope.lab.saving import layout_of, load_model
from moescope.lab.vocabulary import Vocabulary
from moescope.routing.models import TracedModel


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
        output = self.model(input_ids, mask_BL=mask_BL, consume=consume, cache=cache)
        return SimpleNamespace(logits=output.logits_BLV, past_key_values=cache)


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
