"""The one exception that users see."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

LONGEST_LINE = 400  # characters of an error on the terminal
REMEDY = 140  # of them at its end
LISTED = 12  # names that an error lists at most
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


def unknown_name(kind: str, given: object, known: Sequence[str], where: str = "") -> BadInput:
    """Return the error for a name that is not in a list: it quotes the name and says the nearest known one.

    The known names follow where they are few, or where none is near: then the first of them.
    """
    more = len(known) - LISTED
    near = [f"did you mean {name!r}?" for name in difflib.get_close_matches(str(given), known, 1)]
    listed = f"known: {', '.join(known[:LISTED])}{f' and {more} more' if more > 0 else ''}"
    remedy = " ".join(near if near and more > 0 else [*near, listed])
    return BadInput(f"{f'{where}: ' if where else ''}unknown {kind} {str(given)!r}; {remedy}")


def reject_if(condition: object, message: str) -> None:
    """Raise an error with the message if the condition holds."""
    if condition:
        raise BadInput(message)


@contextmanager
def one_line(
    what: str, remedy: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Turn errors of those kinds into `what (reason); remedy`; a BadInput stays as it is."""
    try:
        yield
    except BadInput:
        raise
    except kinds as error:
        raise BadInput(f"{what} ({reason(error)}); {remedy}") from None


def reason(error: BaseException) -> str:
    """Return the system's words for a failed file, else the error's kind and first lines."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}".removesuffix(": ")[:200]
