"""Unusable input and what libraries raise, as one line for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moescope.errors import BadInput


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
