"""Texts in every form users have them, and one line for each that cannot be read."""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import pytest

from moescope.errors import BadInput
from moescope.execution import texts
from moescope.execution.texts import read_ids, sources


def all_of(**ways) -> dict[str, list]:
    given = {"text": [], "domain": [], "token_ids": None, **ways}
    return {source.domain: list(source.read()) for source in sources(**given)}


def test_a_file_is_one_document_and_a_folder_all_of_its_files_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.md").write_text("first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    assert all_of(text=[tmp_path / "b.txt"]) == {"text": ["second"]}
    assert all_of(text=[tmp_path]) == {"text": ["first", "second"]}


def test_each_line_of_a_jsonl_file_is_a_document_packed_or_not(tmp_path):
    lines = (
        '{"text": "one"}\n\n"two"\n{"content": "three"}\n{"messages": [{"role": "user", "content": '
        '"four"}]}\n'
    )
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(lines)
    expected = ["one", "two", "three", [{"role": "user", "content": "four"}]]
    assert all_of(text=[tmp_path / "a.jsonl"]) == all_of(text=[tmp_path / "b.jsonl.gz"]) == {"text": expected}


def test_half_a_letter_of_two_halves_becomes_a_question_mark_and_whole_ones_stay(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "cut \\ud83d"}\n{"text": "\\uD83D\\uDE42 \\\\ud83d"}\n{"messages": '
        '[{"content": "\\uDE42"}]}\n'
    )
    assert all_of(text=[tmp_path / "a.jsonl"]) == {"text": ["cut ?", "🙂 \\ud83d", [{"content": "?"}]]}


@pytest.mark.parametrize("line", ["a line of words\n", "ünbroken"])
def test_a_long_file_is_read_in_pieces_that_together_are_the_file(tmp_path, monkeypatch, line):
    monkeypatch.setattr(texts, "CHUNK", 100)
    whole = line * 40
    (tmp_path / "long.txt").write_text(whole)
    if "\n" not in line:
        assert all_of(text=[tmp_path / "long.txt"]) == {"text": [whole]}  # nowhere to cut
        return
    parts = all_of(text=[tmp_path / "long.txt"])["text"]
    assert "".join(parts) == whole
    assert len(parts) > 3
    assert all(len(part) < 200 and part.endswith("\n") for part in parts)
    np.save(tmp_path / "ids.npy", np.arange(250))
    assert [len(part) for part in read_ids(tmp_path / "ids.npy")] == [100, 100, 50]


def test_a_domain_may_be_named_several_times(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    found = all_of(domain=[f"x={tmp_path / 'a'}", f"y={tmp_path / 'b'}", f"x={tmp_path / 'c'}"])
    assert found == {"x": ["a", "c"], "y": ["b"]}


def test_standard_input_can_be_read_again(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("größer".encode())))
    (source,) = sources(["-"], [], None)
    assert list(source.read()) == list(source.read()) == ["größer"]


def test_token_ids_come_from_arrays_and_from_lines(tmp_path):
    np.save(tmp_path / "one.npy", np.array([1, 2, 3], dtype=np.uint16))
    np.save(tmp_path / "rows.npy", np.array([[1, 2], [3, 4]]))
    (tmp_path / "ids.jsonl").write_text('[1, 2, 3]\n{"input_ids": [4]}\n')
    assert all_of(token_ids=tmp_path / "one.npy") == {"text": [[1, 2, 3]]}
    assert all_of(token_ids=tmp_path / "rows.npy") == {"text": [[1, 2], [3, 4]]}
    assert list(read_ids(tmp_path / "ids.jsonl")) == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("ways", "words"),
    [
        ({}, "no text given; give one of --text"),
        ({"text": ["a"], "domain": ["b=c"]}, "--text and --domain given"),
        ({"text": ["nowhere.txt"]}, "nowhere.txt: no such file or folder"),
        ({"domain": ["code"]}, "domain 'code': write it as NAME=PATH"),
        ({"domain": ["=x"]}, "domain '=x': write it as NAME=PATH"),
        ({"token_ids": "nowhere.npy"}, "nowhere.npy: no such file"),
    ],
)
def test_what_was_not_understood_is_said(ways, words):
    with pytest.raises(BadInput, match=words):
        all_of(**ways)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe\xfa", "a.txt: not UTF-8 text at byte 0"),
        ("a.jsonl", b"{not json}\n", "a.jsonl, line 1: not valid JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x"}\n', 'a.jsonl, line 2: no "text"'),
        ("a.jsonl", b'{"text": "x"}\n\xff\n', "a.jsonl, line 2: not UTF-8"),
        ("a.jsonl.gz", b"not packed", "a.jsonl.gz: cannot be read"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=words) as caught:
        all_of(text=[tmp_path / name])
    assert "\n" not in str(caught.value)


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(BadInput, match="no text files in this folder"):
        all_of(text=[tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", b"nothing", "not a .npy array"),
        ("a.jsonl", b"[1, 2.5]\n", "line 1: not a list of token ids"),
        ("a.jsonl", b"[1]\n[true]\n", "line 2: not a list of token ids"),
        ("a.jsonl", b"hello\n", "line 1: not a list of token ids"),
    ],
)
def test_token_ids_that_are_none_are_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=words):
        list(read_ids(tmp_path / name))


def test_an_array_of_fractions_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4)))
    with pytest.raises(BadInput, match=r"shape \[2, 3, 4\] of float64"):
        list(read_ids(tmp_path / "a.npy"))


def test_identity_changes_with_the_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps("one"))
    (before,) = sources([file], [], None)
    file.write_text(json.dumps("another"))
    (after,) = sources([file], [], None)
    assert before.identity != after.identity
