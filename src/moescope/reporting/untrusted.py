"""Words that come from texts and file names, made fit to be shown.

Nothing in them may act, hide, or turn the line around.
"""

from __future__ import annotations

import unicodedata
from typing import Any

SPELLED = {"\n": "⏎\n", "\t": "⇥"}
# invisible, or with a power over what stands beside them: controls, bidirectional marks, separators, what is
# not assigned
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str) -> str:
    """The text with every invisible character spelled out, as [U+202E]; a line end is shown and kept."""
    if text.isprintable():  # nearly all, and long ones
        return text
    return "".join(
        SPELLED.get(letter)
        or (f"[U+{ord(letter):04X}]" if unicodedata.category(letter) in UNSEEN else letter)
        for letter in text
    )


def token_words(token: Any, token_id: int) -> str:
    """A token as a reader sees it; its number where there is no tokenizer."""
    return visible(token) if isinstance(token, str) and token else f"#{token_id}"


def plot_words(text: str) -> str:
    """For names inside figures.

    Plotly reads some HTML and entities there, and %{...} as a place to fill in.
    """
    safe = visible(text).replace("\n", "")
    return safe.replace("<", "‹").replace(">", "›").replace("&", "＆").replace("%{", "％{")
