"""Write the text of the studies: six domains, split into training, tuning and test documents.

    python studies/data.py FOLDER [--out studies/text]

FOLDER holds the five English files that studies/README.md names; code is the standard library of this Python.
An article (a country, a medical condition, a package) lies on one side of the split. Text that repeats itself
over articles is removed first: labels before the last one of a line and lines that several countries share,
sentences that several conditions share. Prints how many 8-grams of the test text the training text contains,
with and without these two measures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from continuations import write_tasks

from moescope.lab.corpus import code, place

SIDES = {"test": 0.1, "tune": 0.2, "train": 1.0}  # upper ends of the intervals that hold an article's hash
MOST_BYTES = 5_000_000  # per domain
GRAM = 8  # words
SHORTEST = 100  # characters of a document
UNSEEN = "tinystories_ru"  # a domain that no training of the six reads
STORY_ROWS = {"test": (0, 2000), "train": (2000, 12_000)}
QUESTION = re.compile(
    r"^Q: (?:What is \(are\)|What are the (?:symptoms|treatments|complications|stages) (?:of|for)|"
    r"What are the genetic changes related to|What is the outlook for|What causes|"
    r"How to (?:diagnose|prevent)|Who is at risk for|Is|How many people are affected by|What to do for|"
    r"Do you have information about|What research \(or clinical trials\) is being done for)\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Text:
    """A document and its article."""

    article: str
    text: str


def documents(folder: Path, domain: str) -> list[str]:
    with gzip.open(folder / f"{domain}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def countries(texts: Iterable[str]) -> Iterator[Text]:
    """Profiles are cut into consecutive pieces; the first piece of a country begins with its introduction."""
    country = 0
    for text in texts:
        country += text.startswith("Introduction -")
        yield Text(f"country {country}", text)


def conditions(texts: Iterable[str]) -> Iterator[Text]:
    for text in texts:
        question = QUESTION.sub("", text.split("\n")[0].rstrip(" ?"))
        yield Text(re.sub(r"\s+inherited$", "", question).lower(), text)


def sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.:?!])\s+|\n+|\s+-\s{2,}|\s{4,}", text)
    return [" ".join(part.split()) for part in parts if part.strip()]


def labelled_lines(text: str) -> list[str]:
    return [re.sub(r"^(?:[^:\n]* - )", "", line) for line in text.split("\n") if line.strip()]


def without_repeats(texts: list[Text], split: Callable[[str], list[str]]) -> list[Text]:
    """Remove passages of five words or more that occur in more than one article."""
    articles = defaultdict(set)
    for text in texts:
        for passage in split(text.text):
            articles[passage].add(text.article)
    return [
        replace(
            text,
            text="\n".join(
                passage
                for passage in split(text.text)
                if len(passage.split()) < 5 or len(articles[passage]) == 1
            ),
        )
        for text in texts
    ]


def package(name: str) -> str:
    return name.split(".")[0]


def all_texts(folder: Path) -> dict[str, tuple[list[Text], list[Text]]]:
    """Return every domain's texts as they come, each its own article, and as they are used."""
    raw = {name: documents(folder, name) for name in ("drama", "math", "stories", "encyclopedia", "medicine")}
    plain = {name: [Text(text, text) for text in texts] for name, texts in raw.items()}
    modules = list(code())
    plain["code"] = [Text(module.text, module.text) for module in modules]
    used = {
        **plain,
        "encyclopedia": without_repeats(list(countries(raw["encyclopedia"])), labelled_lines),
        "medicine": without_repeats(list(conditions(raw["medicine"])), sentences),
        "code": [Text(package(module.group), module.text) for module in modules],
    }
    return {name: (limited(plain[name]), limited(used[name])) for name in sorted(used)}


def limited(texts: list[Text]) -> list[Text]:
    """Return whole articles, in the order of a hash, up to MOST_BYTES, without very short documents."""
    ordered = sorted(texts, key=lambda text: place(f"order {text.article}"))
    chosen, size, last = [], 0, ""
    for text in ordered:
        if size > MOST_BYTES and text.article != last:
            break
        if len(text.text) >= SHORTEST:
            chosen.append(text)
            size += len(text.text.encode())
        last = text.article
    return chosen


def sides(texts: list[Text]) -> dict[str, list[str]]:
    split: dict[str, list[str]] = {side: [] for side in SIDES}
    for text in texts:
        side = next(side for side, end in SIDES.items() if place(text.article) < end)
        split[side].append(text.text)
    return split


def grams(text: str) -> Iterator[tuple[str, ...]]:
    words = text.split()
    return zip(*(words[at:] for at in range(GRAM)), strict=False)


def share_seen(split: dict[str, list[str]]) -> float:
    """Return the share of the test text's 8-grams that the training text contains."""
    known = {gram for text in split["train"] for gram in grams(text)}
    tested = [gram in known for text in split["test"] for gram in grams(text)]
    return sum(tested) / max(len(tested), 1)


def write(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    path.write_bytes(gzip.compress(lines.encode(), mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "text")
    given = parser.parse_args()
    print("| domain | training documents | MB | tune | test | 8-grams seen, by document | as used |")
    print("|---|---|---|---|---|---|---|")
    held_out = {}
    for domain, (plain, used) in all_texts(given.folder).items():
        split = sides(used)
        held_out[domain] = split["test"]
        for side, texts in split.items():
            write(given.out / side / f"{domain}.jsonl.gz", texts)
        size = sum(len(text.encode()) for text in split["train"]) / 1e6
        seen = f"{share_seen(sides(plain)):.1%} | {share_seen(split):.1%}"
        numbers = f"{len(split['train']):,} | {size:.2f} | {len(split['tune'])} | {len(split['test'])}"
        print(f"| {domain} | {numbers} | {seen} |", flush=True)
    write_tasks(given.out / "tasks", held_out)
    unseen = sides([Text(text, text) for text in documents(given.folder, UNSEEN)])
    write(given.out / "unseen" / f"{UNSEEN}.jsonl.gz", unseen["test"])
    stories = sorted(set(documents(given.folder, UNSEEN)), key=place)  # what the studies of SoME train on
    for side, (first, last) in STORY_ROWS.items():
        write(given.out / "some" / side / f"{UNSEEN}.jsonl.gz", stories[first:last])


if __name__ == "__main__":
    main()
