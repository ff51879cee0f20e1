"""The planted truth, found in words; and nothing found where nothing was planted."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from checkpoints import tiny_config, tiny_tensors, write_checkpoint
from moescope.plotting.style import number
from moescope.reporting.findings import say
from moescope.verb import Finding
from moescope.weights import report as words
from moescope.weights.layer import common_vector
from moescope.weights.report import (
    across_table,
    layer_section,
    layer_table,
    most_ambiguous,
    summary,
    views,
)
from moescope.weights.tables import TABLES
from moescope.weights.verb import scan

SMALL_K, AVOIDANCE, HUB = words.OF_ROWS


def said(spec, view) -> Finding | None:
    return say(spec, view.tables, TABLES)


@pytest.fixture(scope="module")
def raw(planted_run):
    return views(planted_run)[0]


def test_each_planted_fact_is_found(raw):
    assert raw.verdicts() == {
        "chance": [0],
        "identifying": [1, 2],
        "non_random": [3],
        "permuted": [4],
    }
    text = "\n".join(words.findings(raw))
    assert "identified at small k only in layer 2; layer 2: up to k = 16, at k = 128" in text
    assert "L3 E2 and E5" in text
    assert "Layer 4: router rows and experts fit one to one, but not in the stored order" in text
    assert "router row 0 fits expert 3" in text
    assert "router row 7 fits expert 2" in text


def test_the_other_order_is_the_planted_one_with_its_p(raw):
    order = raw.other_order(4)
    assert dict(zip(order["routers"], order["experts"], strict=True)) == {
        router: (router + 3) % 8 for router in range(8)
    }
    assert order["p"] == pytest.approx(8 * 1.554e-4, rel=1e-3)
    assert raw.other_order(0) is None


def test_nothing_is_found_in_the_random_layer(raw):
    specific = [
        *words.order_findings(raw),
        *(said(spec, raw) or "" for spec in words.OF_ROWS),
        words.redundancy_finding(raw),
    ]
    assert not [sentence for sentence in specific if "layer 0" in sentence.lower()]


def test_the_collapsed_pair_is_the_only_one(raw):
    (pair,) = words.collapsed_pairs(raw)
    assert (pair["layer"], pair["expert_a"], pair["expert_b"]) == (3, 2, 5)
    assert abs(pair["cosine"]) > 0.95
    assert pair["least"] > 0.9


def test_a_pair_that_shares_one_direction_only_is_not_called_collapsed(raw):
    similarity = raw.tables["similarity"]
    pair = (similarity["layer"] == 3) & (similarity["expert_a"] == 2) & (similarity["expert_b"] == 5)
    apart = similarity.assign(overlap=similarity["overlap"].mask(pair & (similarity["k"] == 8), 0.37))
    view = replace(raw, tables={**raw.tables, "similarity": apart})
    assert words.collapsed_pairs(view) == []
    text = words.redundancy_finding(view)
    assert text.startswith(
        "Collapsed experts: none; sharing only the leading direction: 1 pair, most L3 E2 and E5"
    )
    assert "overlap from 0.37" in text
    numbers = {key.name: key.value for key in words.numbers_of(view)}
    assert numbers["Collapsed expert pairs"] == 0


def test_layers_at_chance_are_not_ranked_by_ambiguity_and_the_absolute_score_leads(raw):
    """Layer 0 is random and layer 4 permuted: both score higher than the three that are ranked."""
    scores = raw.tables["ambiguity"].set_index("layer")["absolute_score"]
    assert scores[[0, 4]].min() > scores[[1, 2, 3]].max()
    sentence, top = said(words.AMBIGUITY, raw), scores[[1, 2, 3]].idxmax()
    assert f"highest in layer {top}, {number(scores[top])}" in sentence
    assert "3 of 5 layers" in sentence
    assert sentence.place["layer"] == top
    assert [row[0] for row in across_table(raw, "ambiguity")["rows"]] == scores.sort_values(
        ascending=False
    ).index.tolist()


def test_where_no_layer_beats_chance_none_is_ranked(tmp_path):
    view = scanned(tmp_path, tiny_tensors(layers=2, experts=3), layers=2, experts=3)
    assert "no layer is ranked" in said(words.AMBIGUITY, view)
    assert most_ambiguous(view) == []


def scanned(folder, tensors, **config):
    path = write_checkpoint(folder / "model", tensors, tiny_config(**config))
    return views(scan(path, out=folder / "run", router="raw", quiet=True))[0]


def test_an_expert_that_attracts_every_router_is_named(tmp_path):
    tensors = tiny_tensors(layers=1, experts=8, d_model=32, d_ff=32)
    direction = np.zeros(32)
    direction[0] = 1
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[:, 0] += 30  # all routers share one direction ...
    tensors["model.layers.0.block_sparse_moe.experts.6.w1.weight"][:, 0] *= (
        40  # ... which expert 6 hears best
    )
    sentence = said(HUB, scanned(tmp_path, tensors, layers=1, experts=8))
    assert "expert 6 of layer 0, 8 rows" in sentence


def test_random_checkpoints_have_no_hubs_and_no_hidden_order(tmp_path):
    tensors = tiny_tensors(layers=4, experts=6, d_model=32, d_ff=48)
    view = scanned(tmp_path, tensors, layers=4, experts=6)
    assert said(HUB, view) is said(SMALL_K, view) is None
    assert words.order_findings(view) == []


def test_rank_deficient_experts_are_named(tmp_path):
    tensors = tiny_tensors(layers=1, experts=4, d_model=16, d_ff=24)
    weight = tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
    weight[:] = weight[:1].clone()  # every row the same: rank one whatever the rounding
    sentence = said(words.DEFICIENT, scanned(tmp_path, tensors, layers=1, experts=4))
    assert "1 of 4; lowest layer 0, expert 1, rank 1 (random matrices: 16)" in sentence
    assert sentence.place == {"tab": "overview", "colour": "effective_rank", "layer": 0, "expert": 1}


def test_random_square_experts_in_bf16_are_not_called_rank_deficient(tmp_path):
    """A few lose a direction to rounding, as random matrices do."""
    tensors = tiny_tensors(layers=1, experts=8, d_model=256, d_ff=256, dtype=torch.bfloat16)
    view = scanned(tmp_path, tensors, layers=1, experts=8)
    assert view.tables["spectra"]["rank"].min() < 256
    assert said(words.DEFICIENT, view) is None


def test_routers_that_avoid_their_experts_are_named(tmp_path):
    tensors = tiny_tensors(layers=1, experts=8, d_model=64, d_ff=64)
    for expert in range(8):
        weight = tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"].double().numpy()
        smallest = np.linalg.svd(weight)[2][-8:]
        row = smallest.T @ np.random.default_rng(expert).standard_normal(8)
        tensors["model.layers.0.block_sparse_moe.gate.weight"][expert] = tensors[
            "model.embed_tokens.weight"
        ].new_tensor(row)
    sentence = said(AVOIDANCE, scanned(tmp_path, tensors, layers=1, experts=8))
    assert sentence.startswith("Router rows avoid their own experts in layer 0; layer 0: most at k = ")


@pytest.mark.slow
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
    view = scanned(tmp_path, tensors, layers=1, experts=40)
    (sentence,) = words.order_findings(view)
    assert "router row 0 fits expert 7" in sentence
    assert "and 35 more" in sentence


def test_chance_counts_only_the_experts_that_took_part(tmp_path):
    tensors = tiny_tensors(layers=1, experts=5)
    tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"][0, 0] = float("nan")
    path = write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=1, experts=5))
    run = scan(path, out=tmp_path / "run", router="raw", keep_going=True, quiet=True)
    view = views(run)[0]
    assert set(view.tables["alignment_layers"]["n_experts"]) == {4}
    assert "(chance 1/n: 0.25)" in run.draw("accuracy_by_k").caption
    (warning,) = [text for text in run.info["warnings"] if "skipped" in text]
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
    view = scanned(tmp_path, tensors, layers=1, experts=8)
    test = view.tables["alignment_tests"].iloc[0]
    assert (test["verdict"], test["best_accuracy"]) == ("non_random", 1 / 8)
    assert "etter than chance, not one-to-one: layer 0" in words.verdict_sentence(view)


def test_avoidance_is_said_with_its_own_p_and_only_beyond_chance_over_all_layers(raw):
    sentence = said(AVOIDANCE, raw)
    assert "layer 2: most at k = 128, lower-tail p = 2.5 × 10⁻⁵" in sentence
    assert sentence.place == {"figure": "alignment_by_k", "layer": 2}
    tests = raw.tables["alignment_tests"].assign(q_lower=0.06)
    assert say(AVOIDANCE, {"alignment_tests": tests}, TABLES) is None


def test_the_verdicts_say_how_many_chance_gives(raw, tmp_path):
    """5 % by the mean alignment, and 1 % by another order where that can be found: with six experts at the
    four ks of d = 16 that are not degenerate, not with four experts."""
    sentence = words.verdict(raw)
    assert "in 4 of 5 layers, one-to-one in layers 1 and 2 (any by chance: p ≤ 0.06)" in sentence
    assert "another order in layer 4" in sentence
    for experts, level in ((4, "0.05"), (6, "0.06")):
        view = scanned(tmp_path / str(experts), tiny_tensors(experts=experts), experts=experts)
        assert number(words.numbers_of(view)[0].chance) == level


def test_three_experts_are_said_to_be_too_few_and_nothing_else(tmp_path):
    view = scanned(tmp_path, tiny_tensors(experts=3), experts=3)
    assert words.findings(view)[0] == (
        "Too few experts: layers 0 and 1. 3 experts have only 6 pairings, so no p can be below 1/6."
    )
    section = layer_section(view, 0, dict(view.by_layer())[0])
    assert section.badge == ("chance", "too few experts")
    assert section.text.startswith("Layer 0: too few experts.")
    assert {row[1] for row in layer_table(view)["rows"]} == {"too few experts"}


def test_other_matrices_of_a_run_speak_for_themselves(tmp_path):
    tensors = tiny_tensors(layers=1, experts=4)
    tensors["model.layers.0.block_sparse_moe.experts.3.w2.weight"] = tensors[
        "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    ].clone()
    path = write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=1, experts=4))
    sentences = summary(scan(path, out=tmp_path / "run", matrix="gate,down", quiet=True)).findings
    assert any(
        text.startswith("Down matrices: collapsed experts")
        and "L0 E1 and E3 (|cos| 1, overlap from 1)" in text
        for text in sentences
    )


def shared_direction(folder, router="raw,centered"):
    """Two layers whose rows fit their experts; in layer 0 a vector common to all rows hides it."""
    tensors = tiny_tensors(layers=2, experts=6, d_model=64, d_ff=64)
    for layer in range(2):
        rows = tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
        for expert in range(6):
            weight = tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"]
            own = np.random.default_rng(10 * layer + expert).standard_normal(64)
            own /= np.linalg.norm(own)
            weight += 100 * weight.new_tensor(np.outer(np.ones(64) / 8, own))
            rows[expert] = rows.new_tensor(own)
        if layer == 0:
            rows += 40 * rows.new_tensor(np.random.default_rng(99).standard_normal(64))
    path = write_checkpoint(folder / "model", tensors, tiny_config(layers=2, experts=6))
    return scan(path, router=router, out=folder / "run", quiet=True)


def test_a_scan_of_raw_rows_points_to_the_centered_view_where_a_softmax_ignores_much_of_them(tmp_path):
    run = shared_direction(tmp_path, "raw")
    (hint,) = [text for text in summary(run).findings if "--router auto" in text]
    assert re.findall(r"layers? (\d+(?: and \d+)?)", hint) == ["0"]
    rows = load_file(tmp_path / "model" / "model.safetensors")[
        "model.layers.0.block_sparse_moe.gate.weight"
    ].double()
    common = 1 - ((rows - rows.mean(0)).norm(dim=1) / rows.norm(dim=1)).median() ** 2
    assert f"{float(common):.3g} of a row" in hint
    both = shared_direction(tmp_path / "both")
    assert not any("--router" in text for text in summary(both).findings)
    tests = run.table("alignment_tests").set_index("layer")
    assert tests.loc[0, "common_share"] == pytest.approx(float(common))
    assert set(tests["common_share_chance"]) == {1 / 6}
    setup = {**run.info["setup"][0], "scoring": "sigmoid"}  # which does not ignore it
    assert np.isnan(common_vector(setup)["common_share"])


def test_layers_whose_verdict_depends_on_a_vector_common_to_all_rows_are_named_among_the_first(tmp_path):
    run = shared_direction(tmp_path)
    raw, centered = views(run)
    assert raw.verdicts() == {"chance": [0], "identifying": [1]}
    assert centered.verdicts() == {"identifying": [0, 1]}
    shown = summary(run).findings
    answer = shown[1]
    assert "softmax" in answer
    assert answer.startswith("Gate, centered router differs in layer 0: ")
    assert answer.place["scan"] == centered.label


def test_the_verdict_is_given_with_accuracy_chance_and_the_largest_p_of_the_layers_that_beat_chance(raw):
    tests = raw.tables["alignment_tests"].set_index("layer").loc[[1, 2, 3]]
    text = words.verdict_sentence(raw)
    accuracy, chance = tests["best_accuracy"], tests["chance_accuracy"]
    assert accuracy.min() < accuracy.max()
    assert f"{number(accuracy.min())} to {number(accuracy.max())} (chance" in text
    levels = re.search(r"\(chance: ([\d.]+)(?: to ([\d.]+))?\)", text).groups()
    assert float(levels[0]) == pytest.approx(chance.min(), rel=5e-3)
    assert float(levels[1] or levels[0]) == pytest.approx(chance.max(), rel=5e-3)
    assert f"p at most {number(tests['p_value'].max())} against all 40,320 pairings" in text


def test_where_no_layer_beats_chance_the_smallest_p_is_given(tmp_path):
    view = scanned(tmp_path, tiny_tensors(layers=2, experts=5, seed=1), layers=2, experts=5)
    assert set(view.verdicts()) == {"chance"}
    smallest = view.tables["alignment_tests"]["p_value"].min()
    assert f"p at least {number(smallest)} against all 120 pairings" in words.verdict_sentence(view)


def test_only_a_test_against_chance_is_called_beyond_chance_on_the_map(planted_run):
    labels = {measure.name: measure.outline[0] for measure in planted_run.verb.measures(planted_run)}
    assert labels["alignment"] == labels["margin"] == "finds its own expert"
    assert labels["redundancy"] == "beyond chance"
