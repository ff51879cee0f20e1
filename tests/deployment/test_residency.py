"""Rates of expert caches: held-out lists, intervals, bytes, the split of a budget."""

from __future__ import annotations

import numpy as np
import pytest

from deployment.deployment_runs import token_trace
from deployment.plain_caches import random_tokens, replay_belady, replay_lfu, replay_lru
from moescope.deployment.residency import POLICIES, residency_tables
from moescope.deployment.tokens import split_tokens


def table_of(trace, slots, expert_bytes=None, bandwidth=None, cold=False, seed=0):
    splits = split_tokens(trace.document_T, seed)
    arguments = (trace, slots, splits, expert_bytes, bandwidth, cold, lambda count: None)
    return residency_tables(*arguments)["residency"].set_index(["policy", "slots", "layer"]).sort_index()


def own_experts(layers, documents, n, k, generator):
    """Documents of 6 tokens; in every layer each uses k experts of its own choice only."""
    sets = [[generator.permutation(n)[:k] for _ in range(documents)] for _ in range(layers)]
    return token_trace(np.repeat(sets, 6, axis=1), np.repeat(np.arange(documents), 6), n)


def test_a_list_learned_on_the_same_document_is_perfect_and_learned_elsewhere_it_is_at_chance():
    generator = np.random.default_rng(0)
    alone = table_of(own_experts(1, 1, 16, 4, generator), [4])
    assert alone.loc[("static_in_sample", 4, 0.0), "hit_rate"] == 1
    rows = table_of(own_experts(200, 2, 16, 4, generator), [4])  # each list is learned on the other document
    # overlap of two random sets of 4 of 16: mean 1/4, variance of the share 9/320
    rates = rows.xs(("static", 4))["hit_rate"].iloc[:-1]
    assert rates.mean() == pytest.approx(0.25, abs=4 * np.sqrt(9 / 320 / 200))


def test_one_document_is_learned_from_its_first_half_only():
    chosen_TK = np.array([[0, 1]] * 10 + [[2, 3]] * 10)
    rows = table_of(token_trace([chosen_TK], np.zeros(20, int), 8), [2])
    assert rows.loc[("static", 2, 0.0), ["hit_rate", "tokens"]].tolist() == [0, 10]
    assert rows["low"].isna().all()


@pytest.mark.parametrize("documents", [1, 6])
def test_all_policies_are_scored_on_the_same_tokens_and_none_beats_the_best_possible(documents):
    """Of a single document on the second half, with caches that the first one filled."""
    generator, n = np.random.default_rng(4), 12
    weight_TE = np.repeat(generator.dirichlet(np.full(n, 0.5), 4), 30, axis=0)  # changes with time
    chosen_TK = np.array([generator.choice(n, 3, replace=False, p=weight_E) for weight_E in weight_TE])
    trace = token_trace([chosen_TK], np.repeat(np.arange(documents), 120 // documents), n)
    tested = slice(180, None) if documents == 1 else slice(None)
    sequence, slots = chosen_TK.reshape(-1).tolist(), [3, 5, 8]
    for cold in (False, True):
        rows = table_of(trace, slots, cold=cold).xs(0.0, level="layer")
        assert rows["choices"].unique().tolist() == [len(sequence[tested])]
        policies = rows.drop("lru_split", level="policy")
        assert (policies["hit_rate"] <= policies["optimum"] + 1e-12).all()
        best = policies.xs("belady")["hit_rate"]
        assert all(row["optimum"] == best[size] for (_, size), row in policies.iterrows())
    rows = table_of(trace, slots).xs(0.0, level="layer")
    for size in slots:
        for policy, replay in (("lru", replay_lru), ("lfu", replay_lfu)):
            assert rows.loc[(policy, size), "hit_rate"] == pytest.approx(
                np.mean(replay(sequence, size)[tested])
            )
        anew = replay_lru(sequence[tested], size), replay_belady(sequence[tested], size)
        assert rows.loc[("lru", size), "from_empty"] == pytest.approx(np.mean(anew[0]))
        assert rows.loc[("belady", size), "hit_rate"] == pytest.approx(np.mean(anew[1]))


def test_rates_equal_those_of_plain_caches_and_every_policy_stays_below_its_optimum():
    generator = np.random.default_rng(1)
    chosen_LTK = [random_tokens(generator, 120, 3, 12) for _ in range(3)]
    trace = token_trace(chosen_LTK, np.repeat(np.arange(6), 20), 12)
    rows = table_of(trace, [3, 5, 8])
    for slots in (3, 5, 8):
        for layer, chosen_TK in enumerate(chosen_LTK):
            sequence = chosen_TK.reshape(-1).tolist()
            for policy, replay in (("lru", replay_lru), ("belady", replay_belady)):
                hits_TK = np.reshape(replay(sequence, slots), (-1, 3))
                row = rows.loc[(policy, slots, float(layer))]
                assert row["hit_rate"] == pytest.approx(hits_TK.mean())
                assert row["token_hit_rate"] == pytest.approx(hits_TK.all(1).mean())
                assert row["loads_per_token"] == pytest.approx((~hits_TK).sum(1).mean())
    bounded = rows[rows["optimum"].notna()]
    assert set(bounded.index.get_level_values("policy")) == set(POLICIES) - {"lru_split"}
    assert (bounded["hit_rate"] <= bounded["optimum"] + 1e-12).all()
    whole = rows.xs(("lru", 5), level=("policy", "slots"))
    of_all, layers = whole[whole.index.isna()].iloc[0], whole[whole.index.notna()]
    assert of_all["hit_rate"] == pytest.approx(layers["hit_rate"].mean())
    assert of_all["loads_per_token"] == pytest.approx(layers["loads_per_token"].sum())
    assert of_all["choices"] == 3 * 360


@pytest.mark.parametrize("share", [0.8, 0.9, 0.95])
def test_the_slots_needed_are_the_fewest_whose_plain_caches_hold_the_share(share):
    generator = np.random.default_rng(3)
    n, k, documents = 12, 2, 8
    weights = [1 / np.arange(1, n + 1) ** power for power in (0.5, 1.5)]
    chosen_LTK = [
        np.array([generator.choice(n, k, replace=False, p=weight / weight.sum()) for _ in range(320)])
        for weight in weights
    ]
    trace = token_trace(chosen_LTK, np.repeat(np.arange(documents), 40), n)
    splits = split_tokens(trace.document_T, 0)
    tables = residency_tables(trace, [2], splits, None, None, False, lambda count: None)
    found = tables["slots_needed"].query("share == @share").set_index(["policy", "layer"])

    def listed(chosen_TK, slots):
        """Hits of the experts used most in the other half of the documents."""
        hits = []
        for split in splits:
            uses = np.bincount(chosen_TK[split.learn_T].reshape(-1), minlength=n)
            hits.append(np.isin(chosen_TK[split.test_T], np.argsort(-uses, kind="stable")[:slots]))
        return np.concatenate(hits).mean()

    def replayed(replay):
        return lambda chosen_TK, slots: np.mean(replay(chosen_TK.reshape(-1).tolist(), slots))

    plain = {"static": listed, "lru": replayed(replay_lru), "belady": replayed(replay_belady)}
    for policy, rate in plain.items():
        rates_LS = np.array(
            [[rate(chosen_TK, slots) for slots in range(k, n + 1)] for chosen_TK in chosen_LTK]
        )
        for layer, rates_S in [(0, rates_LS[0]), (1, rates_LS[1]), (None, rates_LS.mean(0))]:
            rows = found.loc[policy]
            row = rows[rows.index.isna()].iloc[0] if layer is None else rows.loc[float(layer)]
            expected = k + int(np.flatnonzero(rates_S >= share)[0])
            assert row["slots"] == expected, (policy, layer)
            assert row["hit_rate"] == pytest.approx(rates_S[expected - k])
    assert tables["slots_needed"]["slots"].nunique() > 3
    assert found.loc["static", "chance"].tolist() == [int(np.ceil(share * 12))] * 3


def test_slots_that_no_cache_reaches_are_null():
    chosen_TK = np.arange(40).reshape(20, 2)  # every expert once: all misses are compulsory
    trace = token_trace([chosen_TK], np.repeat(np.arange(4), 5), 40)
    splits = split_tokens(trace.document_T, 0)
    tables = residency_tables(trace, [4], splits, None, None, False, lambda count: None)
    rows = tables["slots_needed"].set_index(["policy", "layer"])
    assert rows.loc[["lru", "lfu"], "slots"].isna().all()
    rows = rows.query("share == 0.8")
    assert rows.loc[["static", "belady"], "slots"].notna().all()  # a list of all experts


def test_a_preloaded_list_may_beat_lru_by_its_first_misses_and_is_then_the_best_possible():
    chosen_TK = np.tile([[0, 1]], (4, 1))
    rows = table_of(token_trace([chosen_TK], np.array([0, 0, 1, 1]), 4), [2]).xs((2, 0.0), level=(1, 2))
    assert rows.loc[["static", "lru", "belady"], "hit_rate"].tolist() == [1, 6 / 8, 1]
    assert rows.loc["lru", ["optimum", "compulsory"]].tolist() == [1, 2 / 8]


def test_bytes_and_milliseconds_follow_from_the_misses():
    chosen_LTK = [[[0, 1], [0, 2], [0, 1]], [[3, 2], [3, 2], [3, 2]]]
    trace = token_trace(chosen_LTK, np.arange(3), 4)
    rows = table_of(trace, [2], np.array([10e6, 1e6]), bandwidth=2.0)
    lru = rows.loc[("lru", 2)].sort_index()
    # layer 0 loads 0, 1, 2, then 1 again; layer 1 loads 3 and 2 once
    assert lru["loads_per_token"].tolist() == pytest.approx([4 / 3, 2 / 3, 2])
    assert lru["bytes_per_token"].tolist() == pytest.approx([40e6 / 3, 2e6 / 3, 14e6])
    assert lru["ms_per_token"].tolist()[-1] == pytest.approx(14e6 / 2e9 * 1000)
    chance = 2 * (1 - lru["chance"].to_numpy()[:2]) @ [10e6, 1e6]  # of two choices per token and layer
    assert lru["bytes_chance"].tolist()[-1] == pytest.approx(chance)
    assert lru["ms_chance"].tolist()[-1] == pytest.approx(chance / 2e9 * 1000)


def test_slots_go_to_the_layer_that_needs_them():
    generator = np.random.default_rng(2)
    easy_TK = np.tile([[0, 1]], (400, 1))  # two experts are enough
    hard_TK = random_tokens(generator, 400, 2, 8)
    trace = token_trace([easy_TK, hard_TK], np.repeat(np.arange(20), 20), 8)
    rows = table_of(trace, [4]).loc[("lru_split", 4)].sort_index()
    assert rows["layer_slots"].tolist()[:2] == [2, 6]
    assert rows["hit_rate"].iloc[-1] > rows["uniform"].iloc[-1] + 0.05
    even = table_of(trace, [4]).loc[("lru", 4)].sort_index()
    assert rows["uniform"].tolist() == pytest.approx(even["hit_rate"].tolist())


def test_a_cold_start_loads_every_document_anew():
    chosen_TK = np.tile([[0, 1]], (6, 1))
    trace = token_trace([chosen_TK], np.repeat([0, 1, 2], 2), 4)
    rows = table_of(trace, [2], cold=True).xs(0.0, level="layer")
    for policy, rate in (("lru", 0.5), ("lfu", 0.5), ("belady", 1)):
        assert rows.loc[(policy, 2), "hit_rate"] == rate
    assert table_of(trace, [2]).loc[("lru", 2, 0.0), "hit_rate"] == 10 / 12


def test_intervals_cover_the_rate_of_endless_text():
    """Documents with a hit rate of their own: 95 % intervals in 400 simulated layers, binomial tolerance."""
    generator = np.random.default_rng(3)
    share_LD = generator.uniform(0.2, 1.0, size=(400, 30))
    known_LT = generator.random((400, 600)) < np.repeat(share_LD, 20, axis=1)
    chosen_LT = np.where(known_LT, 0, generator.integers(1, 64, size=(400, 600)))
    rows = table_of(token_trace(chosen_LT[..., None], np.repeat(np.arange(30), 20), 64), [1])
    layers = rows.xs(("static_in_sample", 1)).iloc[:-1]
    covered = ((layers["low"] <= 0.6) & (layers["high"] >= 0.6)).mean()
    assert covered == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / 400))


def test_empty_slots_and_tokens_that_a_layer_did_not_see_do_not_count():
    whole = np.array([[0, 1], [2, 3], [0, 1]])
    ragged = np.array([[-1, -1], [2, -1], [2, 0]])
    rows = table_of(token_trace([whole, ragged], np.arange(3), 4), [2])
    assert rows.loc[("lru", 2, 1.0), ["tokens", "choices", "hit_rate"]].tolist() == [2, 3, 1 / 3]


def test_chance_of_every_policy_is_its_rate_on_random_routing():
    """1,000 tokens of a cycle, top 2 of 8, against plain caches on 20 random traces of that length."""
    tokens, n = 1000, 8
    cycle_TK = np.stack([np.arange(tokens) % n, (np.arange(tokens) + 1) % n], axis=1)
    documents = np.repeat(np.arange(20), tokens // 20)
    rows = table_of(token_trace([cycle_TK], documents, n), [2, 4])["chance"]
    generator = np.random.default_rng(7)
    drawn = [random_tokens(generator, tokens, 2, n) for _ in range(20)]
    plain = {"lru": replay_lru, "lfu": replay_lfu, "belady": replay_belady}
    for slots in (2, 4):
        assert rows[("static", slots, 0.0)] == slots / n
        rates = {
            policy: [np.mean(replay(chosen_TK.reshape(-1).tolist(), slots)) for chosen_TK in drawn]
            for policy, replay in plain.items()
        }
        counts = [np.sort(np.bincount(chosen_TK.reshape(-1), minlength=n)) for chosen_TK in drawn]
        rates["static_in_sample"] = [count[-slots:].sum() / count.sum() for count in counts]
        for policy, found in rates.items():
            spread = np.std(found, ddof=1) * np.sqrt(1 / 20 + 1 / 16)  # at least 16 repetitions are drawn
            assert rows[(policy, slots, 0.0)] == pytest.approx(np.mean(found), abs=4 * spread), policy
    # two slots by hand: the first choice finds the last token's pair, the second what is left of it
    assert rows[("lru", 2, 0.0)] == pytest.approx((2 / 8 + 1 / 7) / 2, abs=0.006)


def test_chance_with_cold_starts_and_empty_slots_is_that_of_such_a_trace():
    """One-token documents never hit; a document of two single choices hits with probability 1/n."""
    single = token_trace([np.tile([[0, 1]], (40, 1))], np.arange(40), 4)
    assert table_of(single, [2], cold=True).loc[("lru", 2, 0.0), "chance"] == 0
    ragged = np.tile([[0, -1]], (80, 1))
    pairs = table_of(token_trace([ragged], np.repeat(np.arange(40), 2), 4), [2], cold=True)
    draws = 256 * 40
    assert pairs.loc[("belady", 2, 0.0), "chance"] == 1  # both are in place at the start
    for policy in ("lru", "lfu"):
        found = pairs.loc[(policy, 2, 0.0), "chance"]
        assert found == pytest.approx(1 / 8, abs=4 * np.sqrt(0.25 * 0.75 / draws) / 2)
