"""The most extreme of several layers, experts or pairs by chance, and words that follow a value's size."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import brentq

from moescope.routing.counts_to_tables import Corpus, domain_columns, domain_statistics
from moescope.routing.load_balance import Setting, random_loads
from moescope.routing.metrics import METRICS
from moescope.routing.report import summary
from moescope.routing.specialisation import information
from moescope.routing.tables import TABLES
from moescope.routing.trace import trace
from routing.counted import counted

LAYERS = 6


@pytest.mark.parametrize(("tokens", "n", "k"), [(28, 128, 6), (300, 8, 2), (5000, 64, 8)])
@pytest.mark.parametrize("name", ["cv", "max_over_mean", "unused"])
def test_the_worst_of_six_layers_lies_beyond_its_limit_in_five_percent_of_random_routings(name, tokens, n, k):
    """2,000 draws of six layers: three binomial standard deviations of 5 % are 1.5 %, of a half 3.4 %."""
    metric, setting = METRICS[name], Setting(tokens, n, k, layers=LAYERS)
    worst = metric.function(random_loads(tokens, n, k, LAYERS * 2000, seed=7).reshape(-1, LAYERS, n)).max(1)
    row = metric.row(setting, float(worst[0]))
    assert (worst > row["extreme_limit"] + 1e-12).mean() <= 0.065
    assert (worst > row["extreme_chance"] + 1e-12).mean() <= 0.5 + 0.034
    # of few tokens, unused experts vary less than independent ones, of which the level is
    assert name == "unused" or (worst < row["extreme_chance"] - 1e-12).mean() <= 0.5 + 0.034
    assert name == "unused" or (worst > metric.chance(setting)).mean() > 0.9, "one layer's level misleads"


def test_the_level_of_one_layer_is_that_of_a_single_draw():
    alone, many = (METRICS["cv"].row(Setting(500, 16, 2, layers=layers), 0.1) for layers in (1, 48))
    assert alone["extreme_chance"] == pytest.approx(alone["chance"], rel=0.05)
    assert alone["extreme_limit"] < many["extreme_limit"]


# --- domains


def texts(favour: float, seed: int, layers: int = 3) -> list:
    """24 documents of two domains with tastes of their own; domain b favours expert 2 of layer 1."""
    generator, made = np.random.default_rng(seed), []
    for layer in range(layers):
        score_MBE = 0.3 * generator.standard_normal((2, 12, 8))
        score_MBE[1, :, 2] += favour * (layer == 1)
        share_MBE = np.exp(score_MBE) / np.exp(score_MBE).sum(-1, keepdims=True)
        made.append(counted(generator.multinomial(80, share_MBE), tokens=24 * 80, layer=layer))
    return made


def test_an_affinity_is_claimed_where_no_permutation_of_labels_has_one_as_large_anywhere():
    corpus, layers = Corpus(["a", "b"], [12, 12]), texts(favour=0.8, seed=1)
    told = domain_statistics(layers, corpus, seed=0)
    found = [domain_columns(counts, corpus, one.p_ME) for counts, one in zip(layers, told, strict=True)]
    claims = {
        (layer, int(expert), str(domain))
        for layer, columns in enumerate(found)
        for expert, domain, claimed in zip(
            *(columns[name] for name in ("expert", "domain", "claimed")), strict=True
        )
        if claimed
    }
    assert claims == {(1, 2, "a"), (1, 2, "b")}
    assert min(one.p_ME.min() for one in told) == pytest.approx(1 / 201)
    assert told[1].rows[0]["value"] > told[1].rows[0]["extreme_limit"] > told[0].rows[0]["value"]


def test_tastes_of_documents_are_no_claims_about_their_domains():
    """60 texts of three layers: a true rate of 5 % gives more than 7 in one case of 70."""
    corpus = Corpus(["a", "b"], [12, 12])
    told = [domain_statistics(texts(0.0, seed), corpus, 0) for seed in range(60)]
    assert sum(min(one.p_ME.min() for one in layers) < 0.05 for layers in told) <= 7


def test_without_a_second_document_in_any_domain_nothing_is_judged():
    one = texts(0.8, 1, layers=1)[0]
    told = domain_statistics([one], Corpus(["a", "b"], [1, 1]), 0)[0]
    assert told.rows == []
    assert told.p_ME is None
    assert set(domain_columns(one, Corpus(["a", "b"], [1, 1]))["claimed"]) == {None}


# --- words


def between_even_and_collapsed(share: float, n: int = 8, k: int = 2) -> np.ndarray:
    """Loads whose cv, Gini and busiest expert are this share of the way from even loads to collapse."""
    return (1 - share) * np.full(n, 1 / n) + share * np.where(np.arange(n) < k, 1 / k, 0)


@pytest.mark.parametrize("name", ["cv", "gini", "max_over_mean"])
@pytest.mark.parametrize(
    ("share", "word"),
    [(0.04, "even"), (0.06, "slightly uneven"), (0.19, "slightly uneven"), (0.21, "uneven"),
     (0.79, "uneven"), (0.81, "collapsed"), (1.0, "collapsed")],
)  # fmt: skip
def test_loads_are_called_by_their_share_of_collapse(name, share, word):
    metric = METRICS[name]
    value = metric.value(between_even_and_collapsed(share))
    assert metric.column.share(value, metric.collapse(Setting(1000, 8, 2))) == pytest.approx(share)
    assert metric.column.size(value, metric.collapse(Setting(1000, 8, 2))) == word


def test_an_expert_s_load_is_called_by_its_way_from_an_even_share_to_collapse():
    column = TABLES["load_totals"].column("times_even")
    assert [column.size(times, 4.0) for times in (1.0, 1.1, 1.17, 1.7, 3.5)] == [
        *("even", "even", "slightly uneven", "uneven", "collapsed")
    ]


@pytest.mark.parametrize(
    ("share", "word"),
    [(0.0014 / 0.69, "negligible"), (0.019, "negligible"), (0.021, "weak"), (0.099, "weak"),
     (0.101, "clear"), (0.299, "clear"), (0.301, "strong"), (1.0, "strong")],
)  # fmt: skip
def test_dependence_is_called_by_its_share_of_the_largest_possible(share, word):
    """Two domains that each prefer one of two experts, so much that the information is this share."""

    def joint(preference: float) -> np.ndarray:
        return np.array([[1 + preference, 1 - preference], [1 - preference, 1 + preference]]) / 4

    most = np.log(2)
    preference = 1.0 if share == 1 else brentq(lambda t: information(joint(t)) / most - share, 1e-6, 1)
    column = METRICS["domain_information"].column
    assert column.size(float(information(joint(preference))), most) == word
    assert column.size(0.5, float("nan")) == ""


def test_four_tokens_are_too_few_for_any_finding(tmp_path):
    lines = [f"0,{token},{layer},{token} {token + 4}" for token in range(4) for layer in (0, 1)]
    (tmp_path / "t.csv").write_text("\n".join(["document,position,layer,experts", *lines]))
    told = summary(trace(recorded=tmp_path / "t.csv", experts=8, out=tmp_path / "run", quiet=True))
    (finding,) = told.findings
    assert "Too few tokens to judge: layers 0 and 1, with at most 4 tokens" in finding
    assert told.key_numbers == []
