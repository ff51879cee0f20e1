"""Scores by hand, and intervals of ranks that know what they do not know."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from moescope.compression.calibration import SUM_NAMES
from moescope.compression.methods import method_named
from moescope.compression.pruning import ean, frequency, gate_weight, reap, score_experts
from moescope.compression.rows import rank_intervals, saliency_rows


def sums_of(tokens, gates, norms, gated, layer: int = 3) -> dict[str, torch.Tensor]:
    """Sums of a layer: rows are groups of documents."""
    values = dict(zip(SUM_NAMES, (tokens, gates, norms, gated), strict=True))
    return {
        f"layer.{layer}.{name}": torch.tensor(
            value, dtype=torch.int64 if name == "tokens_BE" else torch.float64
        )
        for name, value in values.items()
    }


# three tokens: the first two go to expert 0 (gates 0.5 and 0.25, norms 2 and 4), the third to expert 1 (1.0,
# 3); nobody to expert 2
HAND = sums_of(
    [[1, 1, 0], [1, 0, 0]],
    [[0.5, 1.0, 0], [0.25, 0, 0]],
    [[2.0, 3.0, 0], [4.0, 0, 0]],
    [[1.0, 3.0, 0], [1.0, 0, 0]],
)


@pytest.mark.parametrize(
    ("score", "expected"),
    [(frequency, [2, 1, 0]), (gate_weight, [0.75, 1.0, 0]), (ean, [6.0, 3.0, 0]), (reap, [1.0, 3.0, 0.0])],
)
def test_scores_of_three_tokens_by_hand(score, expected):
    assert score_experts(HAND, 3, score).tolist() == expected


def test_reap_divides_by_the_tokens_of_the_expert_and_not_by_all():
    """An expert that is rarely chosen but does much then stays; frequency would drop it."""
    rare = sums_of([[100, 1]], [[50.0, 0.9]], [[100.0, 5.0]], [[50.0, 4.5]])
    assert score_experts(rare, 3, reap).argmax() == 1
    assert score_experts(rare, 3, frequency).argmax() == 0


def drawn(experts: int = 6, groups: int = 60, spread: float = 3.0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Groups of documents whose tokens go to experts with chances that differ by `spread`."""
    generator = np.random.default_rng(seed)
    chance = np.geomspace(spread, 1, experts)
    tokens = generator.multinomial(200, chance / chance.sum(), size=groups)
    norms = tokens * generator.uniform(0.9, 1.1, tokens.shape)
    return sums_of(tokens.tolist(), (0.5 * tokens).tolist(), norms.tolist(), (0.5 * norms).tolist())


def test_rank_intervals_are_tight_where_experts_differ_and_wide_where_they_do_not():
    low, high = rank_intervals(drawn(spread=30), 3, frequency, 60, 0)
    assert low.tolist() == high.tolist() == [1, 2, 3, 4, 5, 6]
    low, high = rank_intervals(drawn(spread=1.0), 3, frequency, 60, 0)
    assert (high - low).mean() > 2


def test_rank_intervals_hold_the_true_rank_about_as_often_as_they_say():
    held = []
    for seed in range(60):
        low, high = rank_intervals(drawn(spread=1.3, seed=seed), 3, frequency, 60, seed)
        held += ((low <= np.arange(1, 7)) & (np.arange(1, 7) <= high)).tolist()
    assert 0.9 < np.mean(held) <= 1.0


def test_a_bootstrap_written_out_gives_the_same_quantiles():
    sums = drawn(spread=1.5)
    low, high = rank_intervals(sums, 3, reap, 60, 7)
    generator = np.random.default_rng(1)
    tokens, gated = (sums[f"layer.3.{name}"].numpy() for name in ("tokens_BE", "gated_norm_BE"))
    ranks = []
    for _ in range(2000):
        rows = generator.integers(0, 60, 60)
        ranks.append(stats.rankdata(-(gated[rows].sum(0) / tokens[rows].sum(0))))
    np.testing.assert_allclose(low, np.quantile(ranks, 0.025, axis=0), atol=1)
    np.testing.assert_allclose(high, np.quantile(ranks, 0.975, axis=0), atol=1)


def test_there_are_no_intervals_under_twenty_documents():
    low, high = rank_intervals(drawn(), 3, reap, 19, 0)
    assert np.isnan(low).all()
    assert np.isnan(high).all()


def test_the_table_has_every_score_and_the_interval_of_the_one_that_decides():
    sums = drawn(spread=30)
    kept = {3: (0, 1, 5)}
    frame = saliency_rows(sums, {3: "model.layers.3.mlp"}, method_named("frequency"), 60, 0, kept)
    assert frame["expert"].tolist() == list(range(6))
    assert set(frame["score"]) == {"frequency"}
    assert frame["rank"].tolist() == [1, 2, 3, 4, 5, 6]
    assert set(frame["cut"]) == {3.5}
    assert frame["fate"].tolist() == ["kept"] * 2 + ["dropped"] * 3 + ["kept"]
    assert frame["dropped"].tolist() == [False, False, True, True, True, False]
    tokens = frame["tokens"] / frame["tokens"].mean()
    assert (
        frame["times_mean"].tolist() == frame["tokens_times_mean"].tolist() == pytest.approx(tokens.tolist())
    )
    assert frame["rank_low"].tolist() == [1, 2, 3, 4, 5, 6]
    for name, score in (("tokens", frequency), ("gate_weight", gate_weight), ("ean", ean), ("reap", reap)):
        assert frame[name].tolist() == score_experts(sums, 3, score).tolist()


def test_a_decision_is_open_where_the_interval_of_the_rank_holds_the_cut():
    frame = saliency_rows(drawn(spread=1.2), {3: "x"}, method_named("reap"), 60, 0, {3: (0, 1, 2)})
    assert frame["undecided"].tolist() == (frame["rank_low"].lt(3.5) & frame["rank_high"].gt(3.5)).tolist()
    assert frame["undecided"].any()
    for method, kept in (
        ("random", (0, 1, 2)),
        ("reap", range(6)),
    ):  # no score made a cut; nothing is dropped
        frame = saliency_rows(drawn(spread=1.2), {3: "x"}, method_named(method), 60, 0, {3: kept})
        assert frame["cut"].isna().all()
        assert not frame["undecided"].any()
        assert set(frame["score"]) == {"reap"}


def test_a_layer_without_tokens_has_even_saliency():
    frame = saliency_rows(
        sums_of(*([[0, 0, 0]] * 2 for _ in range(4))), {3: "x"}, method_named("reap"), 60, 0, {3: (0,)}
    )
    assert frame["times_mean"].tolist() == [1, 1, 1]
