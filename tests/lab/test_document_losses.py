"""Losses by document.

Every stretch read alone, every token counted once, noise that is of documents and nothing else.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from lab.tiny_training import TINY
from moescope.decoder.model import LabModel
from moescope.decoder.vocabulary import Bytes
from moescope.lab.evaluation import DocumentSample, document_losses, evaluation_noise, mean_loss, spread
from moescope.statistics import FEWEST_DOCUMENTS


def test_a_document_s_loss_is_the_mean_over_its_stretches_read_one_by_one():
    torch.manual_seed(0)
    model = LabModel(TINY.model).train()
    texts = {"a": ["short", "x" * 31 + "and a longer one " * 9], "b": ["1 + 2 = 3\n" * 20]}
    sample = DocumentSample.of(texts, Bytes(), 16)
    found = document_losses(model, sample, 3, "cpu")
    assert model.training
    assert found["domain"].tolist() == ["a", "a", "b"]
    assert found["tokens"].tolist() == [5, 64, 64]
    model.eval()
    for document in range(3):
        losses = []
        for piece in (window for window in sample.windows if window.document == document):
            ids = torch.from_numpy(piece.tokens)[None]
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits_BLV
            losses += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="none").tolist()
        assert found["loss"][document] == pytest.approx(np.mean(losses), rel=1e-5)
    every = (found["tokens"] * found["loss"]).sum() / 133
    assert mean_loss(found) == pytest.approx(every)


def test_stretches_lie_evenly_over_a_document_and_never_overlap_a_prediction():
    tokens = np.arange(161)
    found = list(spread(tokens, 16, 4))
    assert [part[0] for part in found] == [0, 48, 96, 144]
    assert all(len(part) == 17 for part in found)
    assert [part.tolist() for part in spread(np.arange(5), 16, 4)] == [[0, 1, 2, 3, 4]]
    assert len(list(spread(tokens, 16, 99))) == 10


def test_at_most_forty_documents_of_a_domain_are_read():
    sample = DocumentSample.of({"a": ["text"] * 50, "b": ["more"]}, Bytes(), 16)
    assert (sample.domains.count("a"), sample.domains.count("b")) == (40, 1)


def documents(losses: np.ndarray, domain: str = "a", tokens: int = 10) -> pd.DataFrame:
    return pd.DataFrame({"domain": domain, "tokens": tokens, "loss": losses})


def test_noise_is_the_t_free_interval_of_a_mean_of_documents():
    """With documents of equal length the bootstrap's interval is mean +- 1.96 sd/sqrt n, to its own noise."""
    losses = np.random.default_rng(1).normal(3.0, 0.5, 400)
    low, high, std = evaluation_noise(documents(losses))
    half = 1.96 * losses.std() / np.sqrt(400)
    assert low == pytest.approx(losses.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(losses.mean() + half, abs=0.1 * half)
    assert std == pytest.approx(half / 1.96, rel=0.05)


def test_domains_that_differ_are_no_noise():
    both = pd.concat([documents(np.full(30, 1.0)), documents(np.full(30, 9.0), "b")])
    assert evaluation_noise(both) == pytest.approx((5.0, 5.0, 0.0))


def test_long_documents_weigh_more():
    both = pd.concat([documents(np.full(15, 1.0), tokens=30), documents(np.full(15, 2.0), tokens=10)])
    assert mean_loss(both) == pytest.approx(1.25)
    low, high, _ = evaluation_noise(both)
    assert low < 1.25 < high < 1.5


def test_few_documents_have_no_interval():
    assert evaluation_noise(documents(np.arange(FEWEST_DOCUMENTS - 1.0))) is None
    assert evaluation_noise(documents(np.arange(FEWEST_DOCUMENTS + 0.0))) is not None
