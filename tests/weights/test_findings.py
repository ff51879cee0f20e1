"""The planted truth, found in words; and nothing found where nothing was planted."""

import dataclasses
import json

import numpy as np
import pytest

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.reporting.page import glance_table
from moescope.weights import report as words
from moescope.weights.report_layer import layer_entry
from moescope.weights.report_views import readings
from moescope.weights.verb import scan


@pytest.fixture(scope="module")
def raw(planted_run):
    return readings([planted_run])[0]


def test_each_planted_fact_is_found(raw):
    assert words.verdict_layers(raw) == {
        "chance": [0],
        "identifying": [1, 2],
        "non_random": [3],
        "permuted": [4],
    }
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
        *words.other_order_findings(raw),
        *words.small_k_findings(raw),
        *words.avoidance_findings(raw),
        *words.hub_findings(raw),
        words.redundancy_finding(raw),
    ]
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
    tensors["model.layers.0.block_sparse_moe.experts.6.w1.weight"][:, 0] *= (
        40  # ... which expert 6 hears best
    )
    (sentence,) = words.hub_findings(scanned(tmp_path, tensors, layers=1, experts=8))
    assert "expert 6 of layer 0 (8 of 8 routers)" in sentence


def test_random_checkpoints_have_no_hubs_and_no_hidden_order(tmp_path):
    tensors = tiny_tensors(layers=6, experts=8, d_model=32, d_ff=48)
    reading = scanned(tmp_path, tensors, layers=6, experts=8)
    assert (
        words.hub_findings(reading)
        == words.other_order_findings(reading)
        == words.small_k_findings(reading)
        == []
    )


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


def test_a_permuted_layer_of_many_experts_tells_its_order(tmp_path):
    tensors = tiny_tensors(layers=1, experts=40, d_model=64, d_ff=64)
    for router in range(40):
        weight = (
            tensors[f"model.layers.0.block_sparse_moe.experts.{(router + 7) % 40}.w1.weight"].double().numpy()
        )
        leading = np.linalg.svd(weight)[2][:6]
        row = leading.T @ np.random.default_rng(router).standard_normal(6)
        tensors["model.layers.0.block_sparse_moe.gate.weight"][router] = tensors[
            "model.embed_tokens.weight"
        ].new_tensor(row)
    reading = scanned(tmp_path, tensors, layers=1, experts=40)
    (sentence,) = words.other_order_findings(reading)
    assert "router 0 fits expert 7" in sentence
    assert "and 35 more" in sentence


def test_chance_counts_only_the_experts_that_took_part(tmp_path):
    tensors = tiny_tensors(layers=1, experts=5)
    tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"][0, 0] = float("nan")
    path = write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=1, experts=5))
    run = scan(path, out=tmp_path / "run", keep_going=True, quiet=True)
    reading = readings([run])[0]
    assert reading.n_experts(0) == 4
    assert "Chance accuracy at one k is 1/4" in words.verdict_finding(reading)
    (warning,) = [text for text in run.info["warnings"] if "left out" in text]
    assert warning.endswith("holds NaN or Inf")


def test_a_pairing_that_is_proven_but_tells_no_expert_is_not_passed_over(tmp_path):
    """Each router holds its expert's own direction, and more of one common to all.

    Which expert 0 alone hears.
    """
    tensors = tiny_tensors(layers=1, experts=8, d_model=64, d_ff=64)
    common = np.random.default_rng(5).standard_normal(64)
    common /= np.linalg.norm(common)
    for expert in range(8):
        weight = tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"]
        own = np.random.default_rng(expert).standard_normal(64)
        own -= (own @ common) * common
        own /= np.linalg.norm(own)
        weight += 100 * weight.new_tensor(np.outer(np.ones(64) / 8, own))
        if expert == 0:
            weight += 400 * weight.new_tensor(np.outer(np.r_[np.ones(32), -np.ones(32)] / 8, common))
        else:
            weight -= weight @ weight.new_tensor(np.outer(common, common))
        tensors["model.layers.0.block_sparse_moe.gate.weight"][expert] = weight.new_tensor(3 * common + own)
    reading = scanned(tmp_path, tensors, layers=1, experts=8)
    test = reading.tables["alignment_tests"].iloc[0]
    assert (test["verdict"], test["best_accuracy"]) == ("chance", 1 / 8)
    (sentence,) = words.quiet_pairing_findings(reading)
    assert sentence.startswith("In layer 0 the pairing is not random all the same")
    assert "right for up to 100 % of the routers" in sentence


def test_avoidance_is_told_with_its_own_p_and_only_beyond_chance_over_all_layers(raw):
    (sentence,) = words.avoidance_findings(raw)
    assert sentence.startswith("In layer 2 routers avoid their own experts at k = 128")
    assert sentence.endswith("(lower-tail p = 2.5 × 10⁻⁵).")
    tests = raw.tables["alignment_tests"].sort_values("layer").assign(p_lower=[0.5, 0.6, 0.04, 0.7, 0.8])
    weak = dataclasses.replace(raw, tables={**raw.tables, "alignment_tests": tests})
    assert words.avoidance_findings(weak) == []  # 0.04 is the smallest of five


def test_the_verdicts_say_how_many_chance_would_give(raw):
    assert "up to 0.25 of 5 would still be called something else" in words.verdict_finding(raw)


def test_three_experts_are_said_to_be_too_few_and_nothing_else(tmp_path):
    reading = scanned(tmp_path, tiny_tensors(experts=3), experts=3)
    assert words.findings(reading)[0] == (
        "Layers 0 and 1 have too few experts to be tested. Chance accuracy at one k is 1/3; 3 "
        "experts have 6 pairings only, so no p can be below 1/6."
    )
    assert "distinguishable" not in " ".join(words.findings(reading))
    entry, payload = layer_entry(reading, 0, dict(reading.by_layer())[0])
    assert entry["verdict_name"] == "too few experts"
    assert payload["verdict"][0].startswith("Layer 0 has too few experts to be tested.")
    assert {row[1] for row in glance_table(reading)["rows"]} == {"too few experts"}


def test_redundancy_is_counted_beside_what_random_directions_give(tmp_path):
    sentence = words.redundancy_finding(scanned(tmp_path, tiny_tensors(layers=2, experts=8), experts=8))
    # 56 pairs at d = 16: cos √15 / √(1 − cos²) follows t with 15 degrees of freedom, so P(|cos| > 0.3) =
    # 0.242
    assert "of 56 pairs are above 0.3, where random directions give 13.6" in sentence


def test_other_matrices_of_a_run_speak_for_themselves(tmp_path):
    tensors = tiny_tensors(layers=1, experts=4)
    tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"] = tensors[
        "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    ].clone()
    path = write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=1, experts=4))
    sentences = words.summary(scan(path, out=tmp_path / "run", matrix="gate,down", quiet=True))["findings"]
    assert any(
        text.startswith("Of the down matrices: collapsed experts") and "1 and 3 of layer 0 (1)" in text
        for text in sentences
    )
