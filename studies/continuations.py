"""Tasks for lm-eval: which of four texts continues this one? One task per domain of held-out documents.

The three others continue other places of the same domain, drawn by a fixed seed. `studies/data.py` writes the
tasks of the six domains, `studies/run.py --smoke` those of the embedded corpus.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ITEMS = 200  # per domain
CONTEXT_WORDS, CHOICE_WORDS = 40, 8
CHOICES = 4
GROUP = "continuation"


def write_tasks(folder: Path, texts: dict[str, list[str]]) -> None:
    """Write data and YAML of each domain's task, and of their group."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for domain, documents in texts.items():
        data = folder / f"{domain}.jsonl"
        lines = items(documents, random.Random(f"{GROUP} {domain}"))
        data.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        names.append(f"{GROUP}_{domain}")
        task = {
            "task": names[-1],
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"validation": str(data)}, "cache_dir": str(folder / "cache")},
            "output_type": "multiple_choice",
            "validation_split": "validation",
            "doc_to_text": "{{context}}",
            "target_delimiter": " ",
            "doc_to_choice": "choices",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (folder / f"{names[-1]}.yaml").write_text(json.dumps(task, indent=2))  # JSON is YAML
    group = {"group": GROUP, "task": names, "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / f"{GROUP}.yaml").write_text(json.dumps(group, indent=2))


def items(documents: list[str], draw: random.Random) -> list[dict[str, Any]]:
    """Return contexts with their choices; `label` is the place of the text that follows."""
    words = [text.split() for text in documents]
    words = [text for text in words if len(text) > CONTEXT_WORDS + CHOICE_WORDS]

    def passage() -> tuple[str, str]:
        text = draw.choice(words)
        first = draw.randrange(len(text) - CONTEXT_WORDS - CHOICE_WORDS)
        middle = first + CONTEXT_WORDS
        return " ".join(text[first:middle]), " ".join(text[middle : middle + CHOICE_WORDS])

    found = []
    while len(found) < ITEMS:
        context, right = passage()
        choices = [right, *(passage()[1] for _ in range(CHOICES - 1))]
        if len(set(choices)) == CHOICES:
            draw.shuffle(choices)
            found.append({"context": context, "choices": choices, "label": choices.index(right)})
    return found
