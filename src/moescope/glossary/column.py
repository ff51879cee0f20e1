"""What is said of a column."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column's kind (int, float, bool, text, floats.

    Ints) and everything a reader needs to judge a number in it.
    """

    kind: str
    meaning: str
    formula: str = ""
    worst: str = ""
    chance: str = ""
    best: str = ""
    misleads: str = ""
    title: str = ""  # how figures and tables spell it; the column's name where empty
