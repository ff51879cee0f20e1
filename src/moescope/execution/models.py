"""Models loaded by transformers, ready to be run over documents."""

from __future__ import annotations

import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.capture import check_transformers
from moescope.execution.chat_templates import ChatTemplate
from moescope.execution.documents import WINDOW
from moescope.processor import avoid_broken_amx
from moescope.types import Integers

HALF = (torch.bfloat16, torch.float16)
TRUST = "read it, and pass --trust-remote-code if you trust it"
CODE_NEEDED = f"is defined by Python code inside the checkpoint, which moescope does not run; {TRUST}"
GIVE_IDS = "give token ids with --token-ids FILE"
HEAD_TOKENS = 1024  # positions whose logits over the vocabulary exist at once


@dataclass
class TracedModel:
    """A model ready to be run, with its tokenizer if it has one."""

    name: str
    model: Any
    runner: Any  # the part with every MoE block but no head: logits over the vocabulary are large
    tokenizer: Any
    device: str
    no_tokenizer: str = f"the model has no tokenizer; {GIVE_IDS}"  # why there is none, and what to do

    @property
    def config(self) -> Any:
        return self.model.config

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.name, self.tokenizer)

    @property
    def two_stacks(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def window(self) -> int:
        """Tokens per window: as many as the model has positions for, 4,096 at most."""
        text = self.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
        return min(WINDOW, int(longest or WINDOW))

    @property
    def padding(self) -> int:
        """The id to pad with; its value does not matter, since padding is masked."""
        padding = getattr(self.tokenizer, "pad_token_id", None)
        if padding is None:
            padding = getattr(self.config.get_text_config(), "pad_token_id", None)
        return int(padding or 0)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)


def load_model(name: str, dtype: str, device: str, trust_remote_code: bool = False) -> TracedModel:
    """Load the model and tokenizer of a folder or hub id (owner/name, owner/name@revision).

    Python inside the checkpoint runs only with `trust_remote_code`.
    """
    check_transformers()
    from transformers import AutoConfig

    path, _, revision = name.partition("@") if not name.startswith((".", "/")) else (name, "", "")
    more: dict[str, Any] = {"revision": revision} if revision else {}
    more["trust_remote_code"] = trust_remote_code
    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(path, **more)
            if not trust_remote_code:
                check_no_hub_code(name, config)
            model, info = model_class(config, trust_remote_code).from_pretrained(
                path,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                **more,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            if needs_code(error):
                raise BadInput(f"{name}: the model {CODE_NEEDED}") from None
            raise BadInput(
                f"{name}: transformers cannot load it ({first_line(error)}); give a model folder or hub id"
            ) from None
        absent = sorted(info["missing_keys"])
        if absent:
            raise BadInput(
                f"{name}: {len(absent)} weights are missing, such as {absent[0]}; they would be random, so "
                "nothing was traced"
            )
    avoid_broken_amx(device, any(weight.dtype in HALF for weight in model.parameters()))
    model = model.to(device).eval()
    traced = TracedModel(name, model, runner_of(model), None, device)
    try:
        traced.tokenizer = load_tokenizer(path, more)
    except BadInput as error:
        traced.no_tokenizer = f"{error}, or {GIVE_IDS}"
    return traced


def needs_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def check_no_hub_code(name: str, config: Any) -> None:
    """Reject a config that names kernels of the hub: transformers would download and run them."""
    for key in ("_attn_implementation", "_experts_implementation"):
        for part in (config, config.get_text_config()):
            if "/" in str(getattr(part, key, None)):
                raise BadInput(f"{name}: config.json names code of the hub ({getattr(part, key)}); {TRUST}")


def load_tokenizer(path: str, more: dict[str, Any]) -> Any:
    """Return the model's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **more)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            if needs_code(error):
                raise BadInput(f"the tokenizer {CODE_NEEDED}") from None
            return None
    # transformers makes an empty tokenizer where a folder holds none
    return tokenizer if tokenizer("a b c 1 2 3")["input_ids"] else None


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    from transformers.models.auto import modeling_auto as auto

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ()):
        return auto.AutoModelForCausalLM
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
    raise BadInput(f"model type {config.model_type!r}: transformers has no text model of it")


def runner_of(model: nn.Module) -> Any:
    """Return the smallest part of the model that holds all its MoE blocks: the stack without the head."""
    n_blocks = len(find_blocks(model))
    candidates = [] if model.config.is_encoder_decoder else [getattr(model, "get_decoder", lambda: None)()]  # type: ignore[union-attr]
    for part in (*candidates, getattr(model, "base_model", None)):
        if isinstance(part, nn.Module) and part is not model and count_experts_modules(part) == n_blocks:
            return part
    return model


def count_experts_modules(part: nn.Module) -> int:
    return sum(
        type(module).__name__.endswith("Experts") and hasattr(module, "num_experts")
        for module in part.modules()
    )


def predicted_tokens(traced: TracedModel, output: Any, at: Integers) -> Integers:
    """Return the most likely next token at those positions of a pass; -1 for models without a head."""
    where = torch.from_numpy(at).to(traced.device)
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits.reshape(-1, logits.shape[-1])[where].argmax(-1).cpu().numpy()
    head = traced.model.get_output_embeddings() if hasattr(traced.model, "get_output_embeddings") else None
    if head is None:
        return np.full(len(at), -1)
    hidden = output.last_hidden_state
    states = hidden.reshape(-1, hidden.shape[-1])[where]
    # Scaling or capping logits does not change the largest.
    best = [head(part.to(head.weight.dtype)).argmax(-1) for part in states.split(HEAD_TOKENS)]
    return torch.cat(best).cpu().numpy() if best else np.zeros(0, dtype=np.int64)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and notices; moescope says what the user needs to know."""
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
