"""Vocabularies.

What they encode they decode, and what they save is loaded by transformers to the same numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moescope.decoder.vocabulary import Bytes, Pairs, Vocabulary, load_vocabulary, make_vocabulary
from moescope.errors import BadInput

TEXT = "def f(x):\n\treturn 'naïve' + \"日本\"  # ∑\r\n\x00\x7f 🙂"
LEARNED_FROM = ["the cat sat on the mat, the cat sat on the hat\n" * 20, TEXT]


@pytest.fixture(params=["bytes", "bpe"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return make_vocabulary(request.param, 300, LEARNED_FROM)


def test_text_comes_back_whole(vocabulary: Vocabulary):
    assert vocabulary.decode(vocabulary.encode(TEXT).tolist()) == TEXT


def test_marks_lie_inside_the_size_and_are_never_encoded(vocabulary: Vocabulary):
    ids = vocabulary.encode(TEXT).tolist()
    assert vocabulary.end != vocabulary.pad
    assert {vocabulary.end, vocabulary.pad} <= set(range(vocabulary.size))
    assert not {vocabulary.end, vocabulary.pad} & set(ids)
    assert max(ids) < vocabulary.size


def test_a_text_that_spells_a_mark_holds_letters_and_no_mark(vocabulary: Vocabulary, tmp_path: Path):
    text = "padded with <pad> up to <end>"
    vocabulary.save(tmp_path)
    for one in (vocabulary, load_vocabulary(tmp_path)):
        ids = one.encode(text).tolist()
        assert not {one.end, one.pad} & set(ids)
        assert one.decode(ids) == text


def test_transformers_loads_what_was_saved_and_gives_the_same_numbers(vocabulary: Vocabulary, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    vocabulary.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(TEXT)["input_ids"] == vocabulary.encode(TEXT).tolist()
    assert theirs.decode(theirs(TEXT)["input_ids"]) == TEXT
    assert (theirs.eos_token_id, theirs.pad_token_id) == (vocabulary.end, vocabulary.pad)


def test_a_saved_vocabulary_is_loaded_as_what_it_was(vocabulary: Vocabulary, tmp_path: Path):
    vocabulary.save(tmp_path)
    loaded = load_vocabulary(tmp_path)
    assert type(loaded) is type(vocabulary)
    assert loaded.size == vocabulary.size
    assert loaded.encode(TEXT).tolist() == vocabulary.encode(TEXT).tolist()


def test_a_byte_is_its_own_number():
    assert Bytes().encode("aé").tolist() == [0x61, 0xC3, 0xA9]


def test_pairs_are_fewer_tokens_than_bytes_and_learned_the_same_twice():
    pairs = Pairs.learned(LEARNED_FROM, 300)
    assert len(pairs.encode(LEARNED_FROM[0])) < len(LEARNED_FROM[0]) / 2
    assert pairs.size <= 300
    assert Pairs.learned(LEARNED_FROM, 300).tokenizer.to_str() == pairs.tokenizer.to_str()


def test_unknown_and_impossible_vocabularies_are_refused(tmp_path: Path):
    with pytest.raises(BadInput, match="'words'; known: bytes, bpe"):
        make_vocabulary("words", 300, [])
    with pytest.raises(BadInput, match="bpe needs at least 258"):
        make_vocabulary("bpe", 100, LEARNED_FROM)
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        load_vocabulary(tmp_path)


def test_byte_counts_of_a_text_s_tokens_add_up_to_its_bytes(vocabulary: Vocabulary, tmp_path: Path):
    vocabulary.save(tmp_path)
    loaded = load_vocabulary(tmp_path)
    counts = loaded.byte_counts()
    assert counts[loaded.encode(TEXT)].sum() == len(TEXT.encode())
    assert counts[[loaded.end, loaded.pad]].tolist() == [0, 0]
