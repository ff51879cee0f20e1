"""Perplexity and divergence against transformers' own loss and scipy's Jensen-Shannon distance."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.distance import jensenshannon

from compression.tiny_plans import documents, traced
from families.tiny_models import tiny_model
from moescope.compression import damage
from moescope.compression.calibration import save_sums
from moescope.compression.damage import judged_differences
from moescope.execution import evaluation
from moescope.execution.documents import Document
from moescope.execution.evaluation import (
    Evaluation,
    JudgedSample,
    is_held_out,
    js_divergence,
    per_document,
    split_document,
)


def test_every_domain_counts_alike_in_perplexity_and_divergence():
    """A domain of 2 documents and one of 20, against transformers' own loss and scipy's distance."""
    long, short = documents(20, longest=40), documents(2, seed=1, longest=6)
    texts = [*long, *(Document(20 + place, 1, document.ids) for place, document in enumerate(short))]
    first, second = tiny_model("mixtral").model, tiny_model("mixtral").model
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    losses, distances = ({0: [], 1: []} for _ in range(2))
    for document in texts:
        ids = torch.from_numpy(document.ids)[None]
        with torch.no_grad():
            before, after = (model(input_ids=ids).logits[0, :-1].double() for model in (first, second))
        losses[document.domain] += torch.nn.functional.cross_entropy(
            after, ids[0, 1:], reduction="none"
        ).tolist()
        both = zip(before.softmax(-1).numpy(), after.softmax(-1).numpy(), strict=True)
        distances[document.domain] += [jensenshannon(p, q) ** 2 for p, q in both]
    judged = per_document(traced(second), texts, per_document(traced(first), texts))
    expected = [np.mean([np.mean(values) for values in found.values()]) for found in (losses, distances)]
    assert np.log(judged.perplexity) == pytest.approx(expected[0], rel=1e-4)
    assert judged.js_divergence == pytest.approx(expected[1], rel=1e-3)
    pooled = np.mean([value for values in losses.values() for value in values])
    assert abs(pooled - expected[0]) > 0.01


def test_compared_positions_are_dealt_to_the_domains(monkeypatch):
    """12 positions for domains of 380 and 8: 6 each, though 2 % of the text is of the second."""
    sizes = [39] * 10 + [5, 5]
    texts = [Document(number, number // 10, np.arange(3, 3 + size)) for number, size in enumerate(sizes)]
    monkeypatch.setattr(evaluation, "COMPARED_TOKENS", 12)
    model = traced(tiny_model("mixtral").model)
    reference = per_document(model, texts, batch_size=3)
    assert reference.compared_D[:10].sum() == 6
    assert reference.compared_D[10:].tolist() == [3, 3]
    assert per_document(model, texts, reference, batch_size=3).js_divergence == pytest.approx(0, abs=1e-12)


def test_divergence_is_scipy_s_squared():
    generator = torch.Generator().manual_seed(0)
    first, second = (3 * torch.randn(9, 20, generator=generator) for _ in range(2))
    p, q = first.double().softmax(-1).numpy(), second.double().softmax(-1).numpy()
    expected = [jensenshannon(a, b) ** 2 for a, b in zip(p, q, strict=True)]
    assert js_divergence(first, second) == pytest.approx(expected, rel=1e-6)
    assert js_divergence(first, first) == pytest.approx([0] * 9, abs=1e-12)
    apart = torch.tensor([[100.0, -100.0]])
    assert js_divergence(apart, -apart) == pytest.approx([math.log(2)])


def test_only_so_many_positions_are_compared_and_all_are_judged(monkeypatch):
    texts = documents(12)
    model = traced(tiny_model("mixtral").model)
    whole = per_document(model, texts, batch_size=2)
    monkeypatch.setattr(evaluation, "COMPARED_TOKENS", 30)
    bounded = per_document(model, texts, batch_size=2)
    assert bounded.compared_D.sum() == 30 < whole.compared_D.sum()
    assert bounded.tokens_D.tolist() == whole.tokens_D.tolist()
    assert per_document(model, texts, bounded, batch_size=2).js_divergence == pytest.approx(0, abs=1e-12)
    monkeypatch.setattr(evaluation, "COMPARED_BYTES", 10 * 64 * 4)
    assert per_document(model, texts, batch_size=2).compared_D.sum() == 10


def test_one_document_in_five_is_held_out_whatever_its_number_and_place():
    texts = documents(2000, longest=40)
    held = [is_held_out(document) for document in texts]
    assert 0.17 < np.mean(held) < 0.23
    moved = [is_held_out(Document(document.number + 7, 1, document.ids)) for document in texts]
    assert moved == held


def test_a_document_in_two_parts_is_whole_again():
    document = Document(0, 0, np.arange(23))
    first, second = split_document(document)
    assert [*first.ids, *second.ids] == list(range(23))
    assert len(second.ids) == 4
    parts = [[len(part.ids) for part in split_document(Document(0, 0, np.arange(size)))] for size in range(6)]
    assert parts == [[0, 0], [1, 0], [2, 0], [3, 0], [2, 2], [3, 2]]  # a tail has a token to predict


def sampled(texts: list[Document], quota: int) -> list[Document]:
    sample = JudgedSample(quota)
    for document in texts:
        sample.add(document)
    return sample.documents()


def test_the_judged_sample_is_bounded_and_the_same_in_any_order():
    texts = documents(300, longest=200)
    chosen = sampled(texts, 3200)
    assert 2900 < sum(len(document.ids) for document in chosen) <= 3200
    assert len(chosen) >= 32
    moved = [Document(number, 0, document.ids) for number, document in enumerate(texts[::-1])]
    again = sampled(moved, 3200)
    assert [document.ids.tolist() for document in again] == [document.ids.tolist() for document in chosen]


def test_one_long_document_does_not_take_the_quota_of_the_others():
    texts = [Document(0, 0, np.arange(5000) % 61), *documents(40, longest=60)[1:]]
    lengths = {document.number: len(document.ids) for document in sampled(texts, 2000)}
    whole = sum(len(document.ids) for document in texts[1:])
    assert len(lengths) == 40
    assert lengths[0] == 2000 - whole
    assert [lengths[document.number] for document in texts[1:]] == [
        len(document.ids) for document in texts[1:]
    ]
    assert sum(len(document.ids) for document in sampled(documents(3), 10**6)) == sum(
        len(document.ids) for document in documents(3)
    )


def judged_by_hand(differences: list[float], tokens: list[int], domains: list[int]) -> dict:
    """Plan and one control; the control's loss per token exceeds the plan's by the differences."""
    count, sizes = len(tokens), np.array(tokens, float)

    def evaluation_of(loss_D: np.ndarray, divergence_D: np.ndarray) -> Evaluation:
        return Evaluation(loss_D, sizes, divergence_D, sizes, np.array(domains))

    reference = evaluation_of(np.zeros(count), np.zeros(count))
    plan = evaluation_of(0.5 * sizes, 0.1 * sizes)
    control = evaluation_of((0.5 + np.array(differences)) * sizes, 0.2 * sizes)
    return judged_differences(reference, [plan, control], 0)[1]


def test_differences_and_intervals_of_a_hand_worked_case():
    """Half of 20 documents of 4 tokens have a control worse by 1 nat: the mean is Bin(19, 1/2) / 19."""
    row = judged_by_hand([0.0, 1.0] * 10, [4] * 20, [0] * 20)
    assert row["loss_above_plan"] == pytest.approx(0.5)
    assert row["loss_increase"] == pytest.approx(1.0)
    assert row["perplexity"] == pytest.approx(math.e)
    # the percentiles of a normal distribution at Student's quantile of 19 degrees of freedom: 1.8 and 98.2 %
    low, high = stats.binom.ppf([0.0182, 0.9818], 19, 0.5) / 19
    assert (low, high) == (5 / 19, 14 / 19)
    assert (row["loss_above_plan_low"], row["loss_above_plan_high"]) == pytest.approx((low, high))
    assert [row[f"js_above_plan{end}"] for end in ("", "_low", "_high")] == pytest.approx([0.1] * 3)


def test_a_short_domain_weighs_as_much_as_a_long_one_in_differences_and_intervals():
    """Control worse by 1 nat in 20 documents of 600 tokens, and in half of 20 of 15: (1 + Bin(19)/19) / 2."""
    row = judged_by_hand([1.0] * 20 + [0.0, 1.0] * 10, [600] * 20 + [15] * 20, [3] * 20 + [7] * 20)
    assert row["loss_above_plan"] == pytest.approx(0.75)
    assert row["loss_increase"] == pytest.approx(1.25) == math.log(row["perplexity"])
    assert row["js_divergence"] == pytest.approx(0.2)
    tail = stats.norm.cdf(stats.t.ppf(0.025, 38))
    expected = (1 + stats.binom.ppf([tail, 1 - tail], 19, 0.5) / 19) / 2
    assert [row["loss_above_plan_low"], row["loss_above_plan_high"]] == pytest.approx(list(expected))


def test_long_documents_weigh_by_their_tokens_and_too_few_documents_have_no_interval():
    row = judged_by_hand([1.0] + [0.0] * 18, [18] + [1] * 18, [0] * 19)
    assert row["loss_above_plan"] == pytest.approx(0.5)
    assert row["loss_above_plan_low"] is row["loss_increase_high"] is row["js_divergence_low"] is None
    alone = judged_by_hand([1.0] * 25, [3] * 25, [0] * 24 + [1])
    assert alone["loss_above_plan_low"] is None


def test_what_a_pass_gives_is_what_is_stored_also_when_it_was_just_made(monkeypatch, tmp_path):
    """Of equal tensors at other addresses products may differ: a resumed run would end otherwise."""
    stored = {"loss": torch.tensor([2.0])}
    monkeypatch.setattr(damage, "save_sums", lambda file, tensors, facts: save_sums(file, stored, facts))
    (tmp_path / "parts").mkdir()
    done: set[str] = set()

    def flush_task(task: str, frames: dict, setup: dict, files: dict) -> None:
        (tmp_path / "parts" / task).mkdir()
        for name, file in files.items():
            file.rename(tmp_path / "parts" / task / name)
        done.add(task)

    writer = SimpleNamespace(path=tmp_path, done_tasks=lambda: done, flush_task=flush_task)
    for _ in range(2):
        assert damage.once(writer, "judged", lambda: {"loss": torch.tensor([1.0])})["loss"].item() == 2
