"""What a report's page holds: its data, read back out of its HTML, and the figures of its sections."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable
from typing import Any

from moescope.verb import FigureSpec, Section


def payloads(html: str) -> dict[str, Any]:
    """Return every payload of the page by name."""
    found = re.findall(r'<script type="text/plain" id="p-([^"]+)">(.*?)</script>', html, re.DOTALL)
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def page_data(html: str) -> dict[str, Any]:
    """Return what the page knows from the start: runs, tabs with their sections, findings."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def page_text(html: str) -> str:
    """Return every text that the page holds, packed or not."""
    return json.dumps([page_data(html), payloads(html)], ensure_ascii=False)


def page_sections(html: str, tab: str = "") -> list[dict[str, Any]]:
    """Return the sections of a tab, or of all tabs."""
    return [
        entry for item in page_data(html)["tabs"] if tab in ("", item["name"]) for entry in item["sections"]
    ]


def page_figures(html: str, tab: str = "") -> list[str]:
    """Return the name of every figure of a tab or of all tabs, once per place."""
    held = payloads(html)

    def names(entry: dict[str, Any]) -> list[str]:
        content = held[entry["payload"]] if entry.get("payload") else entry
        inner = [name for section in content["sections"] for name in names(section)]
        return [*(figure["name"] for figure in content["figures"]), *inner]

    return [name for entry in page_sections(html, tab) for name in names(entry)]


def glossary_terms(html: str) -> set[str]:
    """Return the keys of the page's glossary."""
    return {entry["key"] for section in payloads(html)["glossary"] for entry in section["entries"]}


def figures_in(sections: Iterable[Section]) -> list[FigureSpec]:
    """Return the figures of sections and of the sections inside them."""
    return [
        spec
        for section in sections
        for spec in (*(spec for spec, _ in section.figures), *figures_in(section.sections))
    ]
