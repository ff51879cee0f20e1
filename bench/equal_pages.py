"""Whether the reports of two versions of moescope show the same: every payload of every page.

    python bench/equal_pages.py OLD NEW [--only trace deploy]

OLD and NEW are folders of `equal_tables.py save`. Sections, figures, tables, key numbers, measures and expert
cards are matched by name. One that vanished is an error, and so is a number that differs by more than the
last of the six digits that a page holds, also one inside a sentence. Sentences whose words differ are listed;
they are no error. `intended.toml` names what is to differ: REPORT:PLACE, with * and ? as in a shell.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
from equal_tables import IGNORED as IGNORED_COLUMNS
from equal_tables import Comparison, read_intended

LAST_DIGIT = 1.1e-5  # relative: pages hold six digits
NOISE = 1e-12  # absolute, as tables may differ
NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
SCRIPT = re.compile(r'<script type="[a-z/]*" id="(data|p-[^"]*)">(.*?)</script>', re.DOTALL)
IGNORED = {"info", "glossary", "guide", "plotly", "id", "entry", "time"}  # info: machine, time, command
TIMES = {"overhead_shares", "training_by_step", "relative_speed"}  # figures, columns
# What tells the items of a list apart.
NAMES = ("verb", "view", "label", "layer", "domain", "name", "title", "head")
REFERENCES = ("payload", "map")


def read_page(file: Path) -> Any:
    """Return the page's data with every payload in its place, and tables by column."""
    scripts = dict(SCRIPT.findall(file.read_text()))
    data = json.loads(scripts.pop("data"))

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "bdata" in value:
            array = np.frombuffer(base64.b64decode(value["bdata"]), np.dtype(value["dtype"]))
            return array.tolist()
        if value.get("name") in TIMES:
            return {"name": value["name"]}
        if "rows" in value and "columns" in value:
            value = {"columns": by_column(value)}
        content = {key: filled(item) for key, item in value.items() if key not in IGNORED | set(REFERENCES)}
        for key in REFERENCES:
            if isinstance(value.get(key), str) and f"p-{value[key]}" in scripts:
                packed = scripts[f"p-{value[key]}"]
                payload = filled(json.loads(gzip.decompress(base64.b64decode(packed))))
                content |= payload if isinstance(payload, dict) else {key: payload}
        return content

    return filled(data)


def by_column(table: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the columns of a table but those of times, speeds and memory."""
    found: dict[str, list[Any]] = {}
    for number, head in enumerate(table["columns"]):
        name = head["name"] or head["title"]
        if not {name.rpartition(".")[2], f"{table.get('name')}.{name}"} & (IGNORED_COLUMNS | TIMES):
            found[unused(name, found)] = [row[number] for row in table["rows"]]
    return found


class Pages(Comparison):
    """Two pages, and what was found so far; `worded` lists sentences that differ."""

    worded: dict[str, list[str]]  # sentences without their numbers -> where they differ
    numbers: int = 0

    def without_folders(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.without_folders(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.without_folders(item) for item in value]
        return self.without_folder(value)

    def compare(self, place: str, old: Any, new: Any) -> None:
        if isinstance(old, dict) and isinstance(new, dict):
            self.parts(place, old, new)
        elif isinstance(old, list) and isinstance(new, list):
            if any(isinstance(item, dict) for item in (*old, *new)):
                self.parts(place, by_name(old), by_name(new))
            elif all(isinstance(item, str) for item in (*old, *new)):
                self.parts(place, by_words(old), by_words(new))
            elif len(old) != len(new):
                self.complain("DIFFERS", place, f"{len(old)} values -> {len(new)}")
            else:
                for number, pair in enumerate(zip(old, new, strict=True)):
                    self.compare(f"{place}/{number}", *pair)
        elif isinstance(old, str) and isinstance(new, str):
            self.sentence(place, old, new)
        elif is_number(old) and is_number(new):
            self.numbers += 1
            if abs(old - new) > max(NOISE, LAST_DIGIT * abs(old)):
                gap = abs(old - new) / max(1.0, abs(old))
                self.complain("DIFFERS", place, f"{old} -> {new}", gap)
        elif old != new:
            self.complain("DIFFERS", place, f"{shown(old)} -> {shown(new)}")

    def parts(self, place: str, old: dict[str, Any], new: dict[str, Any]) -> None:
        for name in old:
            if name in new:
                self.compare(f"{place}/{name}", old[name], new[name])
            elif is_sentence(old[name]):
                self.word(place, f"only in the old one: {shown(old[name])}")
            elif old[name] not in (None, "", [], {}):
                self.complain("MISSING", f"{place}/{name}", shown(old[name]))
        for name in new:
            if name not in old and is_sentence(new[name]):
                self.word(place, f"only in the new one: {shown(new[name])}")
            elif name not in old and new[name] not in (None, "", [], {}):
                self.added.append(f"{place}/{name}")

    def sentence(self, place: str, old: str, new: str) -> None:
        numbers = [NUMBER.findall(text) for text in (old, new)]
        self.numbers += len(numbers[0])
        if old == new:
            return
        if skeleton(old) == skeleton(new) and numbers[0] != numbers[1]:
            self.complain("DIFFERS", place, f"{shown(old)} -> {shown(new)}")
        else:
            same = (before == after for before, after in zip(old, new, strict=False))
            start = max(0, next((at for at, one in enumerate(same) if not one), 0) - 30)
            self.word(place, f"{shown(old[start:])} -> {shown(new[start:])}")

    def word(self, place: str, change: str) -> None:
        self.worded.setdefault(skeleton(change), []).append(f"{change}  ({place})")


def by_name(items: list[Any]) -> dict[str, Any]:
    """Return the items by what names them; equal names are numbered."""
    named: dict[str, Any] = {}
    for item in items:
        known = item if isinstance(item, dict) else {"text": item}
        words = [str(known[key]) for key in NAMES if known.get(key) not in (None, "")]
        named[unused(" ".join(words or [skeleton(str(known.get("text", "")))]), named)] = item
    return named


def by_words(items: list[str]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for item in items:
        named[unused(skeleton(item), named)] = item
    return named


def unused(name: str, names: dict[str, Any]) -> str:
    count = 1
    while (numbered := name if count == 1 else f"{name} #{count}") in names:
        count += 1
    return numbered


def skeleton(text: str) -> str:
    return NUMBER.sub("0", text)


def is_sentence(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and set(value) <= {"text", "place"})


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def main() -> int:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN", help="names, or their beginnings")
    given = parser.parse_args()
    old, new = given.old.resolve(), given.new.resolve()
    pages = Pages(old, new, read_intended())
    pages.worded = {}
    found = [
        {str(file.relative_to(side)) for file in side.rglob("report.html") if "models" not in file.parts}
        for side in (old, new)
    ]
    if given.only:
        found = [{name for name in side if name.startswith(tuple(given.only))} for side in found]
    pages.missing("page", *found)
    for name in sorted(found[0] & found[1]):
        before = pages.numbers
        sides = [pages.without_folders(read_page(side / name)) for side in (old, new)]
        pages.compare(f"{name.removesuffix('/report.html')}:", *sides)
        print(f"{name:50} {pages.numbers - before:8} numbers")
    words = [f"{len(places)} times: {places[0]}" for places in pages.worded.values()]
    return pages.conclude([("words that differ", words)], bool(pages.numbers))


if __name__ == "__main__":
    sys.exit(main())
