"""The one exception a user is meant to see."""


def printable(text: str) -> str:
    """The text on one line, its control characters spelled out.

    Names from a checkpoint must not steer a terminal.
    """
    flat = " ".join(text.splitlines())
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in flat)


class BadInput(Exception):
    """Something the user gave cannot be used: one line that names the thing and the remedy.

    The command line prints the line and exits with code 2; anything else that escapes is our bug and keeps
    its traceback.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


class UnusableExpert(BadInput):
    """One expert's or router row's weights cannot be analysed.

    `--keep-going` marks that expert and goes on.
    """

    def __init__(self, message: str, expert: int | None = None):
        super().__init__(message)
        self.expert = expert


def unknown_name(kind: str, given: object, known: list[str]) -> BadInput:
    """The error for a name that is not in a list, quoting it and listing those that are."""
    return BadInput(f"unknown {kind} {str(given)!r}; known: {', '.join(known)}")
