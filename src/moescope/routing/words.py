"""Token ids as words, the way they stand in a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WORD_START = "▁"  # SentencePiece's blank before a word, which decoding a single token takes away


@dataclass
class Words:
    """A tokenizer's words, each looked up once; None for all of them without a tokenizer."""

    tokenizer: Any = None
    known: dict[int, str | None] = field(default_factory=dict)

    def of(self, token: int) -> str | None:
        """One token's text, with the blank before it where it begins a word."""
        if token not in self.known:
            self.known[token] = None if self.tokenizer is None else self.spelled(token)
        return self.known[token]

    def spelled(self, token: int) -> str:
        text = str(self.tokenizer.decode([token]))
        piece = self.tokenizer.convert_ids_to_tokens(token)
        begins_word = isinstance(piece, str) and piece.startswith(WORD_START) and not text.startswith(" ")
        return f" {text}" if begins_word else text

    def around(
        self, before: Sequence[int], token: int, after: Sequence[int]
    ) -> tuple[str | None, str | None, str | None]:
        """(what stands before, the token, what follows) as the text reads when decoded together.

        Where a token is part of a letter, decoding together gives other letters; then each of the three is
        decoded alone.
        """
        if self.tokenizer is None:
            return None, None, None
        start, middle, whole = (
            str(self.tokenizer.decode(ids)) if ids else ""
            for ids in ([*before], [*before, token], [*before, token, *after])
        )
        if middle.startswith(start) and whole.startswith(middle):
            return start, middle[len(start) :], whole[len(middle) :]
        return start, self.of(token), str(self.tokenizer.decode([*after])) if after else ""
