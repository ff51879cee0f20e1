"""Models of transformers.

Loaded whole, and fed batch by batch, at once (prefill) or token by token (decode).
"""

from __future__ import annotations

import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.capture import Capture, check_transformers
from moescope.execution.documents import WINDOW, Batch
from moescope.types import Integers

DTYPES = ("auto", "float32", "bfloat16", "float16")
HEAD_TOKENS = 1024  # positions whose logits over the vocabulary exist at once


@dataclass
class TracedModel:
    """A model ready to be traced, with its tokenizer if it has one."""

    name: str
    model: Any
    # the part that holds every MoE block and no head: logits over the vocabulary are large and rarely needed
    runner: Any
    tokenizer: Any
    device: str

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def two_stacks(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def window(self) -> int:
        """Tokens read at once: what the model has positions for, 4,096 at most."""
        text = self.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
        return min(WINDOW, int(longest or WINDOW))

    @property
    def padding(self) -> int:
        """The id to pad with; which one does not matter, since padding is never looked at."""
        own = getattr(self.tokenizer, "pad_token_id", None)
        return int(
            own if own is not None else getattr(self.config.get_text_config(), "pad_token_id", None) or 0
        )

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)


def load_model(name: str, dtype: str, device: str) -> TracedModel:
    """The model and tokenizer of a folder or hub id (owner/name, owner/name@revision).

    As transformers loads them.
    """
    check_transformers()
    from transformers import AutoConfig

    path, _, revision = name.partition("@") if not name.startswith((".", "/")) else (name, "", "")
    more = {"revision": revision} if revision else {}
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(path, **more)
            model, info = model_class(config).from_pretrained(
                path,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                **more,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise BadInput(
                f"{name}: transformers cannot load it ({first_line(error)}); give a model folder or hub id"
            ) from None
        absent = sorted(info["missing_keys"])
        if absent:
            raise BadInput(
                f"{name}: {len(absent)} weights are missing, such as {absent[0]}; they would be "
                "random, so nothing was traced"
            )
    model = model.to(device).eval()
    return TracedModel(name, model, runner_of(model), load_tokenizer(path, more), device)


def load_tokenizer(path: str, more: dict[str, str]) -> Any:
    """The model's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **more)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
            return None
    # transformers makes an empty tokenizer where a folder holds none; it would find no token in any text
    return tokenizer if tokenizer("a b c 1 2 3")["input_ids"] else None


def model_class(config: Any) -> Any:
    from transformers.models.auto import modeling_auto as auto

    nested = [auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] if hasattr(config, "text_config") else []
    mappings = [
        *nested,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_MAPPING,
    ]
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise BadInput(f"model type {config.model_type!r}: transformers has no model of it that reads text")


def runner_of(model: nn.Module) -> Any:
    """The smallest part of the model that reads text and holds all its MoE blocks.

    The stack without the head.
    """
    whole = len(find_blocks(model))
    candidates = [] if model.config.is_encoder_decoder else [getattr(model, "get_decoder", lambda: None)()]  # type: ignore[union-attr]
    for part in (*candidates, getattr(model, "base_model", None)):
        if isinstance(part, nn.Module) and part is not model and holds(part, whole):
            return part
    return model


def holds(part: nn.Module, blocks: int) -> bool:
    return (
        sum(
            type(module).__name__.endswith("Experts") and hasattr(module, "num_experts")
            for module in part.modules()
        )
        == blocks
    )


def passes(batch: Batch, phase: str) -> Iterator[tuple[int, int]]:
    """The columns of each forward pass: all at once, or one after the other."""
    length = batch.ids_BL.shape[1]
    if phase == "prefill":
        yield 0, length
    else:
        yield from ((column, column + 1) for column in range(length))


@torch.no_grad()
def run_batch(
    traced: TracedModel, capture: Capture, batch: Batch, phase: str
) -> Iterator[tuple[int, int, Any]]:
    """Feed a batch; after each pass its columns and the model's output.

    Capture has the pass's tokens meanwhile.
    """
    ids_BL = torch.from_numpy(batch.ids_BL).to(traced.device)
    mask_BL = torch.from_numpy(batch.real_BL).to(traced.device).long()
    cache = None
    for start, stop in passes(batch, phase):
        capture.tokens = batch.tokens(traced.device, phase, start, stop)
        given: dict[str, Any] = {"input_ids": ids_BL[:, start:stop], "attention_mask": mask_BL[:, :stop]}
        if traced.two_stacks:  # both stacks read the document
            given |= {
                "decoder_input_ids": given["input_ids"],
                "decoder_attention_mask": given["attention_mask"],
            }
        if phase == "decode":
            given |= {"use_cache": True, "past_key_values": cache}
        else:
            given |= {"use_cache": False}
        output = traced.runner(**given)
        cache = getattr(output, "past_key_values", None) if phase == "decode" else None
        if phase == "decode" and cache is None and stop < batch.ids_BL.shape[1]:
            raise BadInput(
                f"model type {traced.config.model_type!r} keeps no cache, so it has no decode "
                "phase; use --phase prefill"
            )
        yield start, stop, output


def predicted_tokens(traced: TracedModel, output: Any, at: Integers) -> Integers:
    """The likeliest next token at those positions of a pass; -1 for models without a head."""
    where = torch.from_numpy(at).to(traced.device)
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits.reshape(-1, logits.shape[-1])[where].argmax(-1).cpu().numpy()
    head = traced.model.get_output_embeddings() if hasattr(traced.model, "get_output_embeddings") else None
    if head is None:
        return np.full(len(at), -1)
    hidden = output.last_hidden_state
    states = hidden.reshape(-1, hidden.shape[-1])[where]
    best = [
        head(part.to(head.weight.dtype)).argmax(-1) for part in states.split(HEAD_TOKENS)
    ]  # scaling or capping logits keeps the largest
    return torch.cat(best).cpu().numpy() if best else np.zeros(0, dtype=np.int64)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers' bars and notices off: what the user needs to know is said by moescope."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(python_logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
