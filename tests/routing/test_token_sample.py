"""Windows, batches and the sample: bounded, and the same whatever the order of the documents."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.execution import documents as documents_module
from moescope.execution.documents import Batch, Document, Window, batches, fingerprint, windows
from moescope.routing import token_sample as sample_module
from moescope.routing.token_sample import Sample, TokenText


def some_documents(count: int = 60, seed: int = 0) -> list[Document]:
    generator = np.random.default_rng(seed)
    return [
        Document(number, 0, generator.integers(0, 99, generator.integers(1, 50))) for number in range(count)
    ]


def filled(parts: list[Window]) -> Sample:
    sample = Sample([0, 1])
    for window in parts:
        chosen = np.tile(window.ids[None, :, None] % 7, (2, 1, 3)).astype(np.int16)
        sample.add(window, chosen, window.ids + 1, window.ids + 2)
    return sample


def test_windows_hold_every_token_once_and_what_follows_it():
    for document in some_documents():
        parts = list(windows([document], 16))
        assert np.concatenate([part.ids for part in parts]).tolist() == document.ids.tolist()
        assert [part.start for part in parts] == list(range(0, len(document.ids), 16))
        assert [part.next_id for part in parts] == [*(int(part.ids[0]) for part in parts[1:]), -1]


def test_bucket_and_draw_depend_on_the_content_alone():
    ids = np.arange(30)
    (a,), (b,) = (list(windows([Document(number, domain, ids)], 64)) for number, domain in ((0, 0), (9, 1)))
    assert (a.bucket, a.draw, a.document) == (b.bucket, b.draw, b.document)
    assert fingerprint(ids) == fingerprint(ids.astype(np.int32)) != fingerprint(ids[::-1])
    assert fingerprint(np.array([1, 2, 3])) == 18026647500791537826  # the same on every machine


def test_documents_spread_over_all_buckets_and_halves():
    parts = list(windows(some_documents(5000), 64))
    distinct = {part.document: part for part in parts}.values()
    per_bucket = np.bincount([part.bucket for part in distinct], minlength=256)
    assert per_bucket.min() > 0
    assert per_bucket.max() < 45
    assert np.mean([part.draw for part in parts]) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_batches_hold_every_window_once_and_keep_to_their_limits(monkeypatch, batch_size):
    monkeypatch.setattr(documents_module, "TOKENS_PER_PASS", 100)
    parts = list(windows(some_documents(), 40))
    dealt = list(batches(iter(parts), batch_size))
    key = lambda part: (part.number, part.start)  # noqa: E731
    assert sorted(map(key, (part for rows in dealt for part in rows))) == sorted(map(key, parts))
    for rows in dealt:
        assert 1 <= len(rows) <= batch_size
        assert len(rows) == 1 or len(rows) * max(len(row.ids) for row in rows) <= 100


def test_a_batch_pads_on_the_right_and_marks_what_is_real():
    rows = list(windows([Document(0, 0, np.array([5, 6, 7])), Document(1, 1, np.array([8]))], 64))
    batch = Batch.of(rows, padding=9)
    assert batch.ids_BL.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.real_BL.tolist() == [[True] * 3, [True, False, False]]
    assert batch.next_BL.tolist() == [[6, 7, -1], [-1, -1, -1]]
    tokens = batch.tokens("cpu", "decode", 1, 2)
    assert tokens.ids_T.tolist() == [6, 9]
    assert tokens.real_T.tolist() == [True, False]
    assert tokens.position_T.tolist() == [1, 1]
    assert tokens.domain_T.tolist() == [0, 1]
    assert (tokens.phase, tokens.continues) == ("decode", True)


def test_a_text_below_the_limit_is_kept_whole():
    parts = list(windows(some_documents(), 16))
    probe = filled(parts).probe()
    assert len(probe.ids_T) == sum(len(part.ids) for part in parts)
    assert probe.share == 1
    assert (probe.chosen_LTK[1, :, 2] == probe.ids_T % 7).all()
    assert (probe.next_T == probe.ids_T + 1).all()
    assert (probe.predicted_T == probe.ids_T + 2).all()


def test_a_longer_one_is_sampled_within_the_limit_and_alike_in_any_order(monkeypatch):
    monkeypatch.setattr(sample_module, "MOST_TOKENS", 300)
    parts = list(windows(some_documents(200), 16))
    one, other = filled(parts).probe(), filled(parts[::-1]).probe()
    assert 100 < len(one.ids_T) <= 300
    assert one.share == other.share < 1
    assert np.array_equal(one.ids_T, other.ids_T)
    assert np.array_equal(one.document_T, other.document_T)


def test_many_layers_lower_the_limit(monkeypatch):
    monkeypatch.setattr(sample_module, "MOST_BYTES", 2400)
    assert Sample([0, 1], k=3).most == 200
    assert Sample(list(range(20)), k=3).most == 20
    assert Sample([0]).most == 1200


# --- token ids as words

TEXT = "Das Café von früher, 東京 und ein 🙂 am Ende"


def byte_level():
    """Every byte a token: the letters beyond ASCII are several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_pieces():
    """Words with SentencePiece's blank in front, which a decoder takes from the first of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "▁once", "▁upon", "▁a", "▁time", "ly"]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def test_a_word_s_blank_is_kept_and_a_piece_within_a_word_has_none():
    words = TokenText(sentence_pieces())
    assert [words.of(token) for token in (2, 4, 5)] == [" upon", " time", "ly"]


def test_before_token_and_after_read_together_as_the_text_does():
    assert TokenText(sentence_pieces()).around([1, 2], 3, [4, 5]) == ("once upon", " a", " timely")
    assert TokenText(sentence_pieces()).around([], 1, []) == ("", "once", "")


@pytest.mark.parametrize("at", range(0, 48, 3))
def test_letters_of_several_tokens_make_no_error_and_plain_ones_stay_the_text(at):
    tokenizer = byte_level()
    ids = tokenizer(TEXT)["input_ids"]
    before, token, after = TokenText(tokenizer).around(ids[:at], ids[at], ids[at + 1 :])
    if at < 7:  # ASCII only up to here
        assert before + token + after == TEXT
    assert token


def test_without_a_tokenizer_there_are_no_words():
    assert TokenText().of(5) is None
    assert TokenText().around([1], 2, [3]) == (None, None, None)
