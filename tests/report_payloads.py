"""What a report's page holds: its data, read back out of its HTML, and the figures of its sections."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from moescope.verb import FigureSpec, Section


def payloads(html: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="p-([^"]+)">(.*?)</script>', html, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


def figures_in(sections: Iterable[Section]) -> list[FigureSpec]:
    """Return the figures of sections and of the sections inside them."""
    return [
        spec
        for section in sections
        for spec in (*(spec for spec, _ in section.figures), *figures_in(section.sections))
    ]
