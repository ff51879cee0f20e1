"""Datasets of the hub as text, through the real library.

Against a server on this machine that answers like the hub.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint.servers import COMMITS, serving
from moescope.errors import BadInput
from moescope.execution.texts import choose_column, find_hub_text
from moescope.run import Run
from routing.tiny_text import save_model, texts

ROWS = texts(600, seed=5)
ASKED = {
    "plain": "hf://datasets/own/plain",
    "test split": "hf://datasets/own/plain@main:test#text",
    "a number": "hf://datasets/own/plain#n",
    "no such split": "hf://datasets/own/plain:valid",
    "only split": "hf://datasets/own/one",
    "no split named": "hf://datasets/own/two",
    "no such column": "hf://datasets/own/plain#words",
    "no such dataset": "hf://datasets/own/nothing",
    "no such revision": "hf://datasets/own/plain@v2",
    "no config named": "hf://datasets/own/tongues",
    "no such config": "hf://datasets/own/tongues/fr",
    "no text column": "hf://datasets/own/tongues/de",
    "named column": "hf://datasets/own/tongues/de#sentence",
    "broken": "hf://datasets/own/broken",
}
READ_EACH = """
import itertools, json, os, sys, urllib.request
import moescope
from moescope.errors import BadInput
from moescope.execution.texts import sources
model, out = sys.argv[2:]
domain, options = ["web=hf://datasets/own/plain"], {"device": "cpu", "quiet": True}
moescope.trace(model, domain=domain, max_tokens=400, out=out, **options)
sent = json.load(urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/sent"))
found = {"files of the trace": list(sent)}
for name, address in json.loads(sys.argv[1]).items():
    try:
        source = sources([address], [], None)[0]
        rows = list(itertools.islice(source.read(), 3))
        found[name] = {"identity": source.identity, "rows": rows, "again": next(source.read())}
    except BadInput as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def lines(file: Path, rows: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    plain, tongues = folder / "own" / "plain" / "data", folder / "own" / "tongues"
    half = len(ROWS) // 2
    lines(
        plain / "train-00000-of-00002.jsonl", [{"text": text, "n": n} for n, text in enumerate(ROWS[:half])]
    )
    lines(
        plain / "train-00001-of-00002.jsonl", [{"text": text, "n": n} for n, text in enumerate(ROWS[half:])]
    )
    lines(plain / "test-00000-of-00001.jsonl", [{"text": "held out", "n": 0}])
    for tongue in ("en", "de"):
        lines(tongues / tongue / "all.jsonl", [{"sentence": f"in {tongue}", "label": 1}])
    configs = "".join(f"- config_name: {tongue}\n  data_files: {tongue}/*.jsonl\n" for tongue in ("en", "de"))
    (tongues / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name, splits in (("one", ["validation"]), ("two", ["test", "validation"])):
        for split in splits:
            lines(folder / "own" / name / f"{split}.jsonl", [{"text": split}])
    (folder / "own" / "broken").mkdir()
    (folder / "own" / "broken" / "train.jsonl").write_text('{"text": "one"\n')
    with serving(folder, {f"own/{place.name}": place for place in (folder / "own").iterdir()}) as server:
        yield server


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


AT_THE_HUB = pytest.mark.slow  # a process that imports datasets and traces a model


@pytest.fixture(scope="module")
def found(hub, place):
    """What a process finds with the hub's address set, which the library reads when it is imported."""
    hub_is = {"HF_ENDPOINT": hub.url, "HF_HOME": str(place / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    words = [READ_EACH, json.dumps(ASKED), str(save_model(place / "model")), str(place / "run")]
    command = [sys.executable, "-W", "error", "-c", *words]
    done = subprocess.run(
        command, env={**os.environ, **hub_is}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@AT_THE_HUB
def test_rows_come_in_order_from_the_training_split_and_can_be_read_again(found):
    assert found["plain"]["rows"] == ROWS[:3]
    assert found["plain"]["again"] == ROWS[0]


@AT_THE_HUB
def test_a_run_holds_on_to_commit_config_split_and_column(found):
    assert found["plain"]["identity"] == [[f"hf://datasets/own/plain@{COMMITS['main']}/default:train#text"]]
    assert found["named column"] == {
        "identity": [[f"hf://datasets/own/tongues@{COMMITS['main']}/de:train#sentence"]],
        "rows": ["in de"],
        "again": "in de",
    }
    assert found["test split"]["rows"] == ["held out"]
    assert found["only split"]["rows"] == ["validation"]


@AT_THE_HUB
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a number", ["column 'n'", "int"]),
        ("no such split", ["'valid'", "train, test"]),
        ("no split named", [":SPLIT", "test", "validation"]),
        ("no such column", ["'words'", "text, n"]),
        ("no such dataset", ["no such dataset", "hf auth login"]),
        ("no such revision", ["own/plain@v2", "revision"]),
        ("no config named", ["/CONFIG", "en, de"]),
        ("no such config", ["'fr'", "en, de"]),
        ("no text column", ["#COLUMN", "sentence, label"]),
    ],
)
def test_what_is_missing_is_said_in_one_line_that_lists_what_there_is(found, name, words):
    assert all(word in found[name] for word in words), found[name]
    assert "\n" not in found[name]


@AT_THE_HUB
def test_trace_streams_a_dataset_and_leaves_what_it_does_not_need_on_the_hub(found, place):
    coverage = Run.load(place / "run").info["coverage"][0]
    assert coverage["tokens"] == {"web": 400}
    needed, words = 0, 0
    while words < 400:  # 20 documents of 20 words fill the quota; shorter ones need others beside them
        words += min(len(ROWS[needed].split()), 20)
        needed += 1
    assert coverage["domains"] == {"web": needed}
    assert found["files of the trace"] == ["train-00000-of-00002.jsonl"]


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        BadInput, match=r"the package datasets is not installed; .* pip install 'moescope\[hf\]'"
    ):
        find_hub_text("hf://datasets/own/plain")


def test_messages_are_text_and_a_first_row_without_text_does_not_hide_its_column():
    assert (
        choose_column("it", {"id": 1, "messages": [{"role": "user", "content": "hello"}]}, None) == "messages"
    )
    assert choose_column("it", {"text": None, "id": 1}, None) == "text"
