"""Continue prompts with the most likely token, with and without a change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import pandas as pd
import torch

from moescope.errors import BadInput
from moescope.execution.models import TracedModel, named_failures


def tokenize_prompts(traced: TracedModel, prompts: Sequence[str], chat_template: bool) -> list[list[int]]:
    """Return the prompts as token ids; raise where one has none, or leaves no room."""
    if prompts and traced.tokenizer is None:
        raise BadInput(f"{traced.name}: --generate needs a tokenizer, and the model has none; omit it")
    found = []
    for prompt in prompts:
        messages = [{"role": "user", "content": prompt}]
        ids = traced.chat_template.tokenize(messages) if chat_template else traced.encode(prompt)
        if not 0 < len(ids) < traced.window:
            raise BadInput(
                f"--generate {prompt[:40]!r}: {len(ids)} tokens; give 1 to {traced.window - 1} tokens"
            )
        found.append(list(ids))
    return found


@torch.no_grad()
def continuation(traced: TracedModel, prompt: Sequence[int], count: int) -> list[int]:
    """Return the most likely next tokens, one after the other, up to `count` or the end of the text."""
    ids, cache, ends = list(prompt), None, end_tokens(traced)
    device: Any = traced.device
    while len(ids) < min(len(prompt) + count, traced.window) and not (set(ids[len(prompt) :]) & ends):
        unread = ids if cache is None else ids[-1:]
        inputs = {"input_ids": torch.tensor([unread], device=device), "use_cache": True}
        inputs |= {"attention_mask": torch.ones(1, len(ids), dtype=torch.long, device=device)}
        with named_failures(traced):
            output = traced.model(**inputs, past_key_values=cache)
        cache = getattr(output, "past_key_values", None)
        ids.append(int(output.logits[0, -1].argmax()))
    return ids[len(prompt) :]


def end_tokens(traced: TracedModel) -> set[int]:
    """Return the tokens that end a text."""
    config = getattr(traced.model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    if ends is None:
        ends = getattr(traced.tokenizer, "eos_token_id", None)
    return set(ends) if isinstance(ends, list) else set() if ends is None else {ends}


def text_frame(
    number: int, traced: TracedModel, prompts: Sequence[str], before: list[list[int]], after: list[list[int]]
) -> pd.DataFrame:
    """Return one row per prompt and position: the token without and with the change."""
    rows = [
        (
            number,
            prompt,
            position,
            *(None if token is None else traced.tokenizer.decode([token]) for token in both),
        )
        for prompt, first, second in zip(prompts, before, after, strict=True)
        for position, both in enumerate(zip_longest(first, second))
    ]
    return pd.DataFrame(rows, columns=["intervention", "prompt", "position", "token", "token_changed"])
