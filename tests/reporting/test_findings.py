"""The planted truth, found in words; and nothing found where nothing was planted."""

import json

import numpy as np
import pytest

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.reporting import findings as words
from moescope.reporting.readings import readings
from moescope.workflows.scan import scan


@pytest.fixture(scope="module")
def raw(planted_run):
    return readings([planted_run])[0]


def test_each_planted_fact_is_found(raw):
    assert words.verdict_layers(raw) == {"chance": [0], "identifying": [1, 2], "non_random": [3], "permuted": [4]}
    text = "\n".join(words.findings(raw))
    assert "Layer 2 identifies its experts at small k only: up to k = 16" in text
    assert "2 and 5 of layer 3" in text
    assert "In layer 4 routers and experts fit one to one, but not in the stored order" in text
    assert "router 0 fits expert 3" in text
    assert "router 7 fits expert 2" in text


def test_the_other_order_is_the_planted_one_with_its_p(raw):
    order = raw.facts(4)["other_order"]
    assert dict(zip(order["routers"], order["experts"], strict=True)) == {
        router: (router + 3) % 8 for router in range(8)
    }
    assert order["p"] == pytest.approx(8 * 1.554e-4, rel=1e-3)
    assert raw.facts(0)["other_order"] is None


def test_nothing_is_found_in_the_random_layer(raw):
    specific = [
        *words.other_order_findings(raw), *words.small_k_findings(raw), *words.avoidance_findings(raw), *words.hub_findings(raw),
        words.redundancy_finding(raw),
    ]  # fmt: skip
    assert not [sentence for sentence in specific if "layer 0" in sentence.lower()]


def test_the_collapsed_pair_is_the_only_one(raw):
    (pair,) = words.collapsed_pairs(raw)
    assert (pair["layer"], pair["expert_a"], pair["expert_b"]) == (3, 2, 5)
    assert abs(pair["cosine"]) > 0.95


def test_the_summary_is_json_and_names_every_reading(planted_run):
    summary = json.loads(json.dumps(words.summary(planted_run)))
    assert [item["reading"] for item in summary["readings"]] == ["gate, raw router", "gate, centered router"]
    assert summary["coverage"][0].startswith("mixtral: 5 MoE layers of 5 expected, 8 experts a layer")
    assert summary["readings"][0]["most_ambiguous"][0]["layer"] in (0, 4)


def scanned(folder, tensors, **config):
    path = write_checkpoint(folder / "model", tensors, tiny_config(**config))
    return readings([scan(path, out=folder / "run", quiet=True)])[0]


def test_an_expert_that_attracts_every_router_is_named(tmp_path):
    tensors = tiny_tensors(layers=1, experts=8, d_model=32, d_ff=32)
    direction = np.zeros(32)
    direction[0] = 1
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[:, 0] += 30  # all routers share one direction ...
    tensors["model.layers.0.block_sparse_moe.experts.6.w1.weight"][:, 0] *= 40  # ... which expert 6 hears best
    (sentence,) = words.hub_findings(scanned(tmp_path, tensors, layers=1, experts=8))
    assert "expert 6 of layer 0 (8 of 8 routers)" in sentence


def test_random_checkpoints_have_no_hubs_and_no_hidden_order(tmp_path):
    tensors = tiny_tensors(layers=6, experts=8, d_model=32, d_ff=48)
    reading = scanned(tmp_path, tensors, layers=6, experts=8)
    assert words.hub_findings(reading) == words.other_order_findings(reading) == words.small_k_findings(reading) == []


def test_rank_deficient_experts_are_named(tmp_path):
    tensors = tiny_tensors(layers=1, experts=4, d_model=16, d_ff=24)
    weight = tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    weight[:] = weight[:1].clone()  # every row the same: rank one whatever the rounding
    (sentence,) = words.rank_findings(scanned(tmp_path, tensors, layers=1, experts=4))
    assert sentence == "1 rank-deficient matrices: expert 1 of layer 0 (rank 1)."


def test_routers_that_avoid_their_experts_are_named(tmp_path):
    tensors = tiny_tensors(layers=1, experts=8, d_model=64, d_ff=64)
    for expert in range(8):
        weight = tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"].double().numpy()
        smallest = np.linalg.svd(weight)[2][-8:]
        row = smallest.T @ np.random.default_rng(expert).standard_normal(8)
        tensors["model.layers.0.block_sparse_moe.gate.weight"][expert] = tensors[
            "model.embed_tokens.weight"
        ].new_tensor(row)
    (sentence,) = words.avoidance_findings(scanned(tmp_path, tensors, layers=1, experts=8))
    assert sentence.startswith("In layer 0 routers avoid their own experts at k = ")
