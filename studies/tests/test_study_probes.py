"""Probes of trained models, against direct passes of the same small models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from paper_probes import all_outputs, mean_cosines, plane, probe, switching_documents

from moescope.decoder.config import ModelConfig
from moescope.decoder.model import LabModel
from moescope.decoder.vocabulary import make_vocabulary
from moescope.lab.batches import TokenRows
from moescope.lab.config import TrainConfig

LENGTH = 8
TRAIN = TrainConfig(batch_size=3, micro_batches=1, dtype="float32")
TEXTS = {
    "upper": ["ABCDEFGHIJKLMNOPQRSTUVWXY"],
    "lower": ["abcdefghijklmnopqrstuvwxy"],
    "one": ["0123456789"],
}


def rows_and_vocabulary():
    vocabulary = make_vocabulary("bytes", 260, [])
    return TokenRows.of(TEXTS, vocabulary, LENGTH), vocabulary


def small_model(router: str, **options) -> LabModel:
    torch.manual_seed(1)
    config = ModelConfig(d_model=16, layers=2, heads=2, d_ff=16, experts=4, router=router, max_positions=32)
    config = ModelConfig(**{**vars(config), "router_options": options})
    model = LabModel(config)
    for parameter in model.parameters():  # far from uniform routing
        parameter.data.mul_(3)
    return model.eval()


def test_a_document_switches_to_the_second_half_of_another_domains_row():
    rows, vocabulary = rows_and_vocabulary()
    swaps = switching_documents(rows, 10)
    # "one" has a single full row, so no other text of its domain: it is in no document
    assert [(swap.first_domain, swap.domain) for swap in swaps] == [
        ("upper", "lower"),
        ("lower", "upper"),
        ("upper", "lower"),
        ("lower", "upper"),
    ]
    texts = [vocabulary.decode(part) for part in (swaps[0].own, swaps[0].same, swaps[0].other)]
    assert texts == ["abcdefghi", "ijklefghi", "ABCDefghi"]
    assert len(switching_documents(rows, 3)) == 3


def test_one_domain_has_no_document_that_switches():
    vocabulary = make_vocabulary("bytes", 260, [])
    assert switching_documents(TokenRows.of({"upper": TEXTS["upper"]}, vocabulary, LENGTH), 10) == []


@pytest.mark.parametrize("router", ["top2", "spectra", "hash", "expert_choice", "some"])
def test_losses_and_kept_choices_are_those_of_single_passes(router: str):
    rows, vocabulary = rows_and_vocabulary()
    model = small_model(router)
    mixed = probe(model, rows, vocabulary, TRAIN)["study_mixed"]
    swap = switching_documents(rows, 10)[2]

    def alone(tokens):
        chosen = []
        ids = torch.from_numpy(tokens)[None]
        with torch.no_grad():
            logits = model(ids[:, :-1], consume=lambda routing: chosen.append(routing.chosen_TK)).logits_BLV
        losses = torch.nn.functional.cross_entropy(logits[0, 4:], ids[0, 5:])
        return float(losses), [[set(slots) - {-1} for slots in layer[4:].tolist()] for layer in chosen]

    (loss, own), (loss_other, other) = alone(swap.own), alone(swap.other)
    kept = sum(len(a & b) for x, y in zip(own, other, strict=True) for a, b in zip(x, y, strict=True))
    row = mixed.iloc[2]
    assert (row["domain"], row["tokens"]) == ("lower", 4)
    assert row["loss_own"] == pytest.approx(loss, rel=1e-5)
    assert row["loss_other"] == pytest.approx(loss_other, rel=1e-5)
    total = sum(len(slots) for layer in own for slots in layer)
    assert row["kept_other"] == pytest.approx(kept / total if total else math.nan, nan_ok=True)


def test_a_hash_keeps_all_its_choices_in_any_context():
    rows, vocabulary = rows_and_vocabulary()
    mixed = probe(small_model("hash"), rows, vocabulary, TRAIN)["study_mixed"]
    assert (mixed["kept_other"] == 1).all()
    assert mixed["entropy_own"].isna().all()


@pytest.mark.parametrize("router", ["top2", "some"])
def test_every_expert_is_run_on_every_token(router: str):
    model = small_model(router)
    experts = model.blocks[0].mlp.experts
    x_TD = torch.randn(5, 16)
    with torch.no_grad():
        outputs = all_outputs(experts, x_TD)
        for expert in range(4):
            chosen = torch.full((5, 1), expert)
            assert torch.allclose(outputs[expert], experts(x_TD, chosen, torch.ones(5, 1)), atol=1e-6)


def test_cosines_are_of_two_experts_for_the_same_token():
    first = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    second = torch.tensor([[3.0, 0.0], [5.0, 0.0]])  # equal for token 0, orthogonal for token 1
    assert np.allclose(mean_cosines(torch.stack([first, second])), [[1, 0.5], [0.5, 1]])


def test_the_map_keeps_the_distances_of_experts_that_lie_in_a_plane():
    angles = np.array([0.0, 0.4, 1.1, 2.0])
    points = np.column_stack([np.cos(angles), np.sin(angles)])
    at, shares = plane(points @ points.T)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    assert np.allclose(np.linalg.norm(at[:, None] - at[None], axis=-1), distances)
    assert shares.sum() == pytest.approx(1)


def test_the_quota_cuts_what_stands_above_it_and_nothing_else():
    rows, vocabulary = rows_and_vocabulary()
    experts = probe(small_model("spectra", capacity_factor=1.0), rows, vocabulary, TRAIN)["study_experts"]
    for _, layer in experts.groupby("layer"):
        before, after = layer["before_quota"].to_numpy(), layer["after_quota"].to_numpy()
        assert before.sum() == pytest.approx(1)
        assert before.max() > 0.25
        # ceil(1.0 · N k/n) of N k slots: a quarter of them, as 3 rows of 8 tokens and 2 slots divide by 4
        assert np.allclose(after, np.minimum(before, 0.25))
    unlimited = probe(small_model("spectra", quota=False), rows, vocabulary, TRAIN)
    assert unlimited["study_experts"]["before_quota"].isna().all()


def test_a_dense_model_has_nothing_to_probe():
    rows, vocabulary = rows_and_vocabulary()
    assert probe(small_model("dense"), rows, vocabulary, TRAIN) == {}


def test_spans_cover_the_document_and_name_the_domain_on_either_side_of_the_switch():
    rows, vocabulary = rows_and_vocabulary()
    spans = probe(small_model("top2"), rows, vocabulary, TRAIN)["study_spans"]
    one = spans[spans["document"] == 0].drop_duplicates("first")
    assert one["first"].tolist() == list(range(8))
    assert (one["last"] == one["first"]).all()
    assert one["domain"].tolist() == ["upper"] * 4 + ["lower"] * 4
    assert "".join(one["text"]) == "ABCDefgh"
    assert (spans.groupby(["document", "first"])["share"].sum() <= 1 + 1e-9).all()
    assert set(spans["layer"]) == {1}
