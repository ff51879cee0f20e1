"""Perplexity and divergence against transformers' own loss and scipy's Jensen-Shannon distance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from compression.tiny_plans import documents, traced
from families.tiny_models import tiny_model
from moescope.compression import judging
from moescope.compression.calibration_text import first_tokens, is_held_out, split_document
from moescope.compression.judging import check_judgeable, js_divergence, judge, judge_original
from moescope.errors import BadInput
from moescope.execution.documents import Document


def test_perplexity_is_that_of_transformers_own_loss_document_by_document():
    texts = documents(12)
    tiny = tiny_model("mixtral")
    lost, tokens = 0.0, 0
    for document in texts:
        ids = torch.from_numpy(document.ids)[None]
        if ids.shape[1] > 1:
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(
                    tiny.model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum"
                )
            lost, tokens = lost + float(loss), tokens + ids.shape[1] - 1
    reference = judge_original(traced(tiny.model), texts, batch_size=4)
    assert reference.tokens == tokens == reference.compared
    assert reference.perplexity == pytest.approx(math.exp(lost / tokens), rel=1e-4)


def test_divergence_is_scipy_s_squared():
    generator = torch.Generator().manual_seed(0)
    first, second = (3 * torch.randn(9, 20, generator=generator) for _ in range(2))
    p, q = first.double().softmax(-1).numpy(), second.double().softmax(-1).numpy()
    expected = sum(jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True))
    assert js_divergence(first, second) == pytest.approx(expected, rel=1e-6)
    assert js_divergence(first, first) == pytest.approx(0, abs=1e-12)
    apart = torch.tensor([[100.0, -100.0]])
    assert js_divergence(apart, -apart) == pytest.approx(math.log(2))


def test_a_model_beside_itself_does_not_diverge_and_another_one_does_by_what_scipy_says():
    texts = documents(10)
    first, second = tiny_model("mixtral").model, tiny_model("mixtral").model
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    reference = judge_original(traced(first), texts)
    same = judge(traced(first), texts, reference)
    assert same.perplexity == pytest.approx(reference.perplexity, rel=1e-12)
    assert same.js_divergence == pytest.approx(0, abs=1e-12)
    other = judge(traced(second), texts, reference)
    expected = []
    for document in texts:
        ids = torch.from_numpy(document.ids)[None]
        with torch.no_grad():
            both = [
                model(input_ids=ids).logits[0, :-1].double().softmax(-1).numpy() for model in (first, second)
            ]
        expected += [jensenshannon(p, q) ** 2 for p, q in zip(*both, strict=True)]
    assert other.js_divergence == pytest.approx(np.mean(expected), rel=1e-3)


def test_only_so_many_positions_are_compared_and_all_are_judged(monkeypatch):
    texts = documents(12)
    model = traced(tiny_model("mixtral").model)
    whole = judge_original(model, texts, batch_size=2)
    monkeypatch.setattr(judging, "COMPARED_TOKENS", 30)
    bounded = judge_original(model, texts, batch_size=2)
    assert bounded.compared == 30 < whole.compared
    assert bounded.tokens == whole.tokens
    assert judge(model, texts, bounded, batch_size=2).js_divergence == pytest.approx(0, abs=1e-12)
    monkeypatch.setattr(judging, "COMPARED_BYTES", 10 * 64 * 4)
    assert judge_original(model, texts, batch_size=2).compared == 10


def test_one_document_in_five_is_held_out_whatever_its_number_and_place():
    texts = documents(2000, longest=40)
    held = [is_held_out(document) for document in texts]
    assert 0.17 < np.mean(held) < 0.23
    moved = [is_held_out(Document(document.number + 7, 1, document.ids)) for document in texts]
    assert moved == held


def test_a_document_in_two_parts_is_whole_again_and_the_judged_part_is_bounded():
    document = Document(0, 0, np.arange(23))
    first, second = split_document(document)
    assert [*first.ids, *second.ids] == list(range(23))
    assert len(second.ids) == 4
    assert sum(len(part.ids) for part in first_tokens(documents(50), 100)) == 100
    assert first_tokens(documents(3), 10**6)[1].ids.tolist() == documents(3)[1].ids.tolist()


def test_texts_and_models_that_predict_nothing_are_rejected():
    with pytest.raises(BadInput, match="no token to predict"):
        judge_original(traced(tiny_model("mixtral").model), [Document(0, 0, np.array([5]))])
    with pytest.raises(BadInput, match="cannot be judged; give --no-judge"):
        check_judgeable(traced(tiny_model("switch_transformers").model), documents(3))
