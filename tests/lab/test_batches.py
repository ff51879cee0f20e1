"""Batches: every row once an epoch, the same at every step whatever came before, targets one token on."""

from __future__ import annotations

import numpy as np
import pytest

from moescope.decoder.vocabulary import Bytes
from moescope.lab.batches import IGNORED, TokenRows, unigram_loss

TEXTS = {"a": ["abcdefghij" * 7, "klm"], "b": ["nopqrstuv" * 5]}


def rows(layout: str = "packed", length: int = 8) -> TokenRows:
    return TokenRows.of(TEXTS, Bytes(), length, layout)


def test_targets_are_the_next_token_wherever_they_count():
    batch = rows().batch(np.arange(rows().rows))
    inner = batch.targets_BL[:, :-1] != IGNORED
    follows = batch.mask_BL[:, 1:]
    assert np.array_equal(batch.targets_BL[:, :-1][follows], batch.ids_BL[:, 1:][follows])
    assert np.array_equal(batch.targets_BL != IGNORED, batch.mask_BL)
    assert inner.any()


def test_packed_rows_hold_the_whole_stream_but_for_a_rest_and_no_padding():
    packed = rows()
    batch = packed.batch(np.arange(packed.rows))
    assert batch.mask_BL.all()
    stream = np.concatenate([Bytes().encode(TEXTS["a"][0]), [256], Bytes().encode("klm"), [256]])
    kept = batch.ids_BL[batch.domain_B == 0].reshape(-1)
    assert np.array_equal(kept, stream[: len(kept)])
    assert len(stream) - len(kept) <= 8


def test_document_rows_begin_documents_and_pad_the_rest():
    separate = rows("documents")
    batch = separate.batch(np.arange(separate.rows))
    assert separate.rows == 3
    assert bytes(batch.ids_BL[1][:3].tolist()) == b"klm"
    assert (batch.ids_BL[1][3:] == Bytes().pad).all()
    assert batch.targets_BL[1].tolist() == [ord("l"), ord("m"), Bytes().end, *[IGNORED] * 5]
    assert batch.mask_BL[1].tolist() == [True] * 3 + [False] * 5


def test_padded_rows_are_document_rows_whose_pads_are_targets():
    padded, separate = rows("padded"), rows("documents")
    every = np.arange(separate.rows)
    one, other = padded.batch(every), separate.batch(every)
    assert np.array_equal(one.ids_BL, other.ids_BL)
    assert np.array_equal(one.mask_BL, other.mask_BL)
    pad = Bytes().pad
    assert one.targets_BL[1].tolist() == [ord("l"), ord("m"), Bytes().end, *[pad] * 5]
    assert padded.sample(2).pad_targets


def test_every_row_comes_once_an_epoch_and_epochs_differ():
    packed = rows()
    n = packed.rows
    first = [packed.of_step(step, 1, seed=3).ids_BL.tobytes() for step in range(n)]
    second = [packed.of_step(step, 1, seed=3).ids_BL.tobytes() for step in range(n, 2 * n)]
    assert (
        sorted(first)
        == sorted(second)
        == sorted(packed.batch(np.array([i])).ids_BL.tobytes() for i in range(n))
    )
    assert first != second


def test_a_step_does_not_depend_on_the_steps_before_and_does_on_the_seed():
    packed = rows()
    straight = [packed.of_step(step, 3, seed=1).ids_BL for step in range(20)][19]
    assert np.array_equal(straight, rows().of_step(19, 3, seed=1).ids_BL)
    assert not np.array_equal(straight, packed.of_step(19, 3, seed=2).ids_BL)


def test_a_batch_of_a_step_is_the_batches_of_its_parts():
    packed = rows()
    whole = packed.of_step(2, 4, seed=0).ids_BL
    parts = np.concatenate([packed.of_step(step, 2, seed=0).ids_BL for step in (4, 5)])
    assert np.array_equal(whole, parts)


def test_unigram_loss_of_a_hand_worked_case():
    train = TokenRows.of({"x": ["aab"]}, Bytes(), 8)  # targets a, b, end
    validation = TokenRows.of({"x": ["ba"]}, Bytes(), 8)  # targets a, end
    expected = -np.log(2 / (3 + 258))  # both were seen once
    assert unigram_loss(train, validation, 258) == pytest.approx({"": expected, "x": expected})
