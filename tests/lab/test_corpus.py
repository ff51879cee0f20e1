"""The corpus: what it is made of, how it is parted, and that it is the same every time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from moescope.errors import BadInput
from moescope.lab.config import DataConfig, config_from
from moescope.lab.corpus import (
    Document,
    calculation,
    corpus_of,
    embedded_corpus,
    place,
    read_corpus,
    split,
    topic_groups,
)

SMALL = 40_000


def test_embedded_corpus_has_both_sides_of_every_domain_and_keeps_to_its_size():
    corpus = embedded_corpus(SMALL)
    assert {"code", "prose", "arithmetic", "records"} <= set(corpus.domains)
    for domain, size in corpus.sizes().items():
        assert size["train_documents"] >= 1
        assert size["validation_documents"] >= 1
        assert SMALL <= size["train_bytes"] + size["validation_bytes"] < SMALL + 2**18, domain
    assert "def " in "".join(corpus.train["code"])


def test_embedded_corpus_is_equal_in_another_process_with_other_hash_seeds():
    script = f"from moescope.lab.corpus import embedded_corpus; print(embedded_corpus({SMALL}).identity)"
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {embedded_corpus(SMALL).identity}


def test_a_share_of_about_a_tenth_is_held_back_in_generated_domains():
    size = embedded_corpus(200_000).sizes()["arithmetic"]
    share = size["validation_documents"] / (size["train_documents"] + size["validation_documents"])
    assert 0.05 < share < 0.16  # 380 documents: six standard errors


def test_a_module_and_its_docstrings_are_on_the_same_side():
    documents = [
        Document(domain, f"module {i}", f"{domain} {i}") for i in range(200) for domain in ("code", "prose")
    ]
    corpus = split(documents, 0.3)
    sides = {d: {text.split()[1] for text in corpus.validation[d]} for d in ("code", "prose")}
    assert sides["code"] == sides["prose"]
    assert 30 < len(sides["code"]) < 90


def test_topics_that_repeat_each_other_are_one_group_held_back_only_if_each_would_be():
    own = [f"line {i} of a manual that is long enough to be told apart" for i in range(9)]
    topics = {
        "whole": "\n".join(own),
        "section": "\n".join(own[2:5]),
        "other section": "\n".join([*own[6:8], "and a line of its own, of forty characters or more"]),
        "one line alone": f"{own[0]}\nand something else that nobody says besides, at some length",
        "short": "yes\nno\nyes\nno",
        "short too": "yes\nno\nyes\nno",
    }
    groups = topic_groups(topics)
    together = {groups[name] for name in ("whole", "section", "other section")}
    assert len(together) == 1
    assert place(together.pop()) == max(
        place(f"topic {name}") for name in ("whole", "section", "other section")
    )
    assert {groups[name] for name in ("one line alone", "short", "short too")} == {
        "topic one line alone",
        "topic short",
        "topic short too",
    }


def test_hardly_a_passage_of_validation_is_read_in_training():
    """Two long lines that follow one another, of any domain; licences and the like are in many files."""
    corpus = embedded_corpus()
    sides = []
    for side in (corpus.train, corpus.validation):
        texts = [text for domain in corpus.domains for text in side[domain]]
        lines = [[line for line in map(str.strip, text.splitlines()) if len(line) >= 40] for text in texts]
        sides.append([passage for one in lines for passage in pairwise(one)])
    trained = set(sides[0])
    assert len(sides[1]) > 500
    assert sum(passage in trained for passage in sides[1]) < 0.01 * len(sides[1])


def test_equal_texts_are_never_on_both_sides():
    texts = [f"text {i % 20}" for i in range(100)]
    corpus = corpus_of({"a": texts}, 0.4)
    assert not set(corpus.train["a"]) & set(corpus.validation["a"])
    assert len(corpus.train["a"]) + len(corpus.validation["a"]) == 100


def test_the_order_of_files_changes_nothing():
    texts = [f"text {i}" for i in range(50)]
    assert corpus_of({"a": texts}) == corpus_of({"a": reversed(texts)})


def test_identity_changes_with_one_letter():
    texts = [f"text {i}" for i in range(50)]
    assert corpus_of({"a": texts}).identity != corpus_of({"a": [*texts[:-1], "text 4x"]}).identity


def test_a_domain_of_one_text_is_cut_at_a_line_near_its_end():
    text = "".join(f"line {i}\n" for i in range(100))
    corpus = corpus_of({"a": [text]}, 0.1)
    assert corpus.train["a"][0] + corpus.validation["a"][0] == text
    assert corpus.train["a"][0].endswith("\n")
    assert 0.08 < len(corpus.validation["a"][0]) / len(text) < 0.13


@pytest.mark.parametrize("texts", [[], ["  \n"], ["x"]])
def test_a_domain_without_enough_text_is_refused_by_name(texts: list[str]):
    with pytest.raises(BadInput, match="'empty'"):
        corpus_of({"empty": texts})


def test_arithmetic_is_right():
    import random

    for seed in range(200):
        left, right = calculation(random.Random(seed)).split(" = ")
        assert eval(left) == int(right)


def test_validation_files_are_the_validation_text_and_nothing_of_them_is_trained_on(tmp_path):
    texts = {"train": ["one", "two", "shared"], "held_out": ["three", "shared"], "other": ["four"]}
    for name, documents in texts.items():
        lines = [json.dumps({"text": text}) for text in documents]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    paths = {"a": str(tmp_path / "held_out.jsonl"), "new": str(tmp_path / "other.jsonl")}
    data = DataConfig(domains={"a": str(tmp_path / "train.jsonl")}, validation=paths)
    corpus = read_corpus(data)
    assert corpus.domains == ("a",)
    assert sorted(corpus.train["a"]) == ["one", "two"]
    assert sorted(corpus.validation["a"]) == ["shared", "three"]
    assert corpus.unseen == {"new": ["four"]}
    without = read_corpus(replace(data, validation={"a": paths["a"]}))
    assert without.identity != corpus.identity


def test_every_domain_needs_its_validation_text():
    tables = {"data": {"domains": {"a": "x", "b": "y"}, "validation": {"a": "z"}}}
    with pytest.raises(BadInput, match="validation has no 'b'"):
        config_from(tables)
