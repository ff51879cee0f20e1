"""Texts in every form users have them, and one line for each that cannot be read."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from moescope.errors import BadInput
from moescope.execution import texts
from moescope.execution.texts import check_not_empty, read_ids, sources


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


@pytest.mark.parametrize("name", ["long.txt", "long.txt.gz", "long.jsonl", "-"])
@pytest.mark.parametrize("line", ["a line of words\n", "ünbroken€🙂", "🙂", "ü"])
@pytest.mark.parametrize("shift", range(4))
def test_a_long_text_is_read_in_pieces_that_together_are_the_text(tmp_path, monkeypatch, name, line, shift):
    monkeypatch.setattr(texts, "CHUNK", 100)
    whole = "x" * shift + line * 500
    content = json.dumps(whole) if name.endswith(".jsonl") else whole
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    file = tmp_path / name
    file.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    parts = all_of(text=["-" if name == "-" else file])["text"]
    assert "".join(parts) == whole
    assert len(parts) > 3
    assert all(len(part) <= 200 and part.endswith("\n" if "\n" in line else "") for part in parts)


def test_long_lists_of_token_ids_are_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK", 100)
    np.save(tmp_path / "ids.npy", np.arange(250))
    (tmp_path / "ids.jsonl").write_text(json.dumps(list(range(250))))
    for name in ("ids.npy", "ids.jsonl"):
        assert [len(part) for part in read_ids(tmp_path / name)] == [100, 100, 50]


def test_files_are_read_in_turn_in_an_order_that_does_not_depend_on_where_they_lie(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "OPEN_FILES", 3)
    for place in ("here", "there"):
        for number in range(6):
            file = tmp_path / place / "data" / f"{number}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(f'"{number}-{line}"\n' for line in range(number)))
    (here, there) = (sources([tmp_path / place / "data"], [], None)[0] for place in ("here", "there"))
    found = list(here.read_in_turn())
    assert found == list(there.read_in_turn()) == list(here.read_in_turn())
    assert sorted(found) == sorted(here.read())
    assert len({document[0] for document in found[:3]}) == 3
    mixed = [f"a={tmp_path / 'here' / 'data' / f'{number}.jsonl'}" for number in range(6)]
    orders = [sources([], order, None)[0].read_in_turn() for order in (mixed, mixed[::-1])]
    assert list(orders[0]) == list(orders[1])


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
        ({"domain": ["a\x1b[2Jb=x"]}, "give at most 100, all printable"),
        ({"token_ids": "/dev"}, "/dev: a folder; give one file"),
        ({"text": ["a" * 300]}, "File name too long"),
        ({"text": ["a\udcff"]}, "its name is not UTF-8"),
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
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], "a.txt.gz: cannot be read"),
        ("a.jsonl", b'{"text": [99999999999999999999]}', "a.jsonl, line 1: token id 9"),
        ("a.jsonl", b'"x"\n"' + b"y" * 5000 + b'"\n', "a.jsonl, line 2: over"),
        ("a.jsonl", b'{"messages": [{"content": "' + b"y" * 900 + b'"}]}', "a chat of over a million"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, monkeypatch, name, content, words):
    monkeypatch.setattr(texts, "LONGEST_LINE", 4000 if content[0] != ord("[") else 10**6)
    monkeypatch.setattr(texts, "CHUNK", 400)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=words) as caught:
        all_of(text=[tmp_path / name])
    assert "\n" not in str(caught.value)


def test_a_file_inside_a_folder_may_have_any_name(tmp_path):
    names = [b"\xff\xfe.txt", b"new\nline.txt", b"x" * 250 + b".txt", "ü.txt".encode()]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_text(repr(name))
    (source,) = sources([tmp_path], [], None)
    assert sorted(source.read_in_turn()) == sorted(map(repr, names))
    json.dumps(source.identity, ensure_ascii=False).encode()


def test_the_byte_that_is_no_text_is_counted_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK", 100)
    (tmp_path / "a.txt").write_bytes(b"x" * 730 + b"\xff" + b"x" * 500)
    with pytest.raises(BadInput, match="not UTF-8 text at byte 730;"):
        all_of(text=[tmp_path / "a.txt"])


def test_an_unreadable_file_inside_a_folder_is_named_and_a_pipe_is_skipped(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    assert all_of(text=[tmp_path]) == {"text": ["text"]}
    with pytest.raises(BadInput, match="pipe: a pipe or device"):
        all_of(text=[tmp_path / "pipe"])
    (tmp_path / "memory").symlink_to("/proc/self/mem")  # a regular file whose reading fails
    with pytest.raises(BadInput, match="memory: cannot be read"):
        all_of(text=[tmp_path])


def test_a_domain_without_text_is_found_without_a_model(tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "full").write_text("text")
    with pytest.raises(BadInput, match="the text holds no token"):
        check_not_empty(sources([tmp_path / "empty"], [], None))
    with pytest.raises(BadInput, match="domain 'b' holds no token"):
        check_not_empty(sources([], [f"a={tmp_path / 'full'}", f"b={tmp_path / 'empty'}"], None))
    check_not_empty(sources([tmp_path / "empty", tmp_path / "full"], [], None))
    np.save(tmp_path / "none.npy", np.zeros((3, 0), dtype=int))
    (tmp_path / "none.jsonl").write_text('[]\n{"input_ids": []}\n\n')
    for name in ("none.npy", "none.jsonl"):
        with pytest.raises(BadInput, match="the text holds no token"):
            check_not_empty(sources([], [], tmp_path / name))


def test_a_folder_without_text_is_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\0")
    with pytest.raises(BadInput, match="no text files in this folder"):
        all_of(text=[tmp_path])


def header(shape: str, kind: str = "<i8") -> bytes:
    """A .npy file of that shape and kind, with 16 bytes of data."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + bytes(16)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"[1, 2.5]\n", "line 1: not a list of token ids"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1: not a list of token ids"),
        ("a.jsonl", b"[1]\n[99999999999999999999]\n", "line 2: token id 9"),
        ("a.npy", header("(1000000000000,)"), "no .npy array"),
        ("a.npy", header("(3,)", "|O"), "Python objects"),
        ("a.npy", header("(2,)", "<f8"), "shape .2. of float64"),
        ("a.npy", header("(2,)", "<u8")[:-16] + b"\xff" * 16, "token id 18446744073709551615"),
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


def test_a_folder_of_many_files_is_identified_by_their_number_a_hash_and_the_first_ten(tmp_path):
    for number in range(500):
        (tmp_path / f"{number:03d}.txt").write_text(f"document {number}")
    (first,) = sources([str(tmp_path)], [], None)
    assert len(first.identity) == 1
    assert first.identity[0]["files"] == 500
    assert [Path(file[0]).name for file in first.identity[0]["first"]] == [f"{n:03d}.txt" for n in range(10)]
    assert len(json.dumps(first.identity)) < 3000
    assert sources([str(tmp_path)], [], None)[0].identity == first.identity
    (tmp_path / "400.txt").write_text("another document")  # not among those listed
    assert sources([str(tmp_path)], [], None)[0].identity != first.identity
