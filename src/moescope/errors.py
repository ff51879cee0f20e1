"""The one exception that users see."""

import re

LONGEST_LINE = 400  # characters of an error on the terminal
REMEDY = 140  # of them at its end
CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")  # of a URL, also within another one


def printable(text: str) -> str:
    """Return the text on one line, control characters escaped: a name must not steer the terminal."""
    flat = " ".join(text.splitlines())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in flat)


def shortened(line: str) -> str:
    """Return the line with at most LONGEST_LINE characters: its beginning and its remedy, at the end."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE - REMEDY - 5]} ... {line[-REMEDY:]}"


class BadInput(Exception):
    """Unusable input: one line that names the thing, the value and the remedy, and no password of a URL.

    The command line prints the line and exits with code 2. Any other exception is a bug.
    """

    def __init__(self, message: str):
        super().__init__(CREDENTIALS.sub("", printable(message)))


class UnusableExpert(BadInput):
    """The weights of one expert or router row cannot be analysed; `--keep-going` skips that expert."""

    def __init__(self, message: str, expert: int | None = None):
        super().__init__(message)
        self.expert = expert


def unknown_name(kind: str, given: object, known: list[str]) -> BadInput:
    """Return the error for a name that is not in a list: it quotes the name and lists the known ones."""
    return BadInput(f"unknown {kind} {str(given)!r}; known: {', '.join(known)}")
