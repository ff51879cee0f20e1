"""How often a trace claims what is not there: random routing, and effects of stated size that are there.

Counts go through `Counts` and `Traced.tables` as a model's do; sentences and key numbers are the report's.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

from moescope.reporting.findings import Number, beyond, judged, key_numbers, say_all
from moescope.routing.counts import Counts
from moescope.routing.counts_to_tables import Corpus, Traced
from moescope.routing.figures import FIGURES
from moescope.routing.report import FINDINGS, NUMBERS
from moescope.routing.tables import TABLES
from moescope.types import Routing, Tokens
from moescope.verb import Tables

LAYERS, EXPERTS, K, DOMAINS, DOCUMENTS, LENGTH = 4, 8, 2, 3, 24, 40
TRACES = 200
MOST_FALSE = 16  # of 200: at a true rate of 5 %, 17 or more happen once in 40 times


def traced(scores_LTE: np.ndarray) -> Tables:
    """Tables of 24 documents in 3 domains, whose tokens choose the experts with the highest scores."""
    chosen_LTK = (-scores_LTE).argsort(-1)[..., :K].copy()
    document_T = np.arange(DOCUMENTS).repeat(LENGTH)
    return counted(
        chosen_LTK, EXPERTS, document_T, document_T % DOMAINS, np.tile(np.arange(LENGTH), DOCUMENTS)
    )


def counted(
    chosen_LTK: np.ndarray, experts: int, document_T: np.ndarray, domain_T: np.ndarray, position_T: np.ndarray
) -> Tables:
    """Tables of tokens that chose these experts."""
    n, k = chosen_LTK.shape[1:]
    documents = torch.from_numpy(document_T)
    of_domain = pd.Series(document_T).groupby(domain_T).nunique().tolist()
    tokens = Tokens(
        sum(of_domain),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.bool),
        documents,
        torch.tensor(position_T),
        torch.tensor(domain_T),
        documents,
        "prefill",
    )
    gates_TK = torch.linspace(0.6, 0.4, k).expand(n, k)
    counts = Counts((len(of_domain), sum(of_domain)))
    for layer, chosen_TK in enumerate(chosen_LTK):
        routing = Routing(layer, f"layer {layer}", experts, torch.from_numpy(chosen_TK), gates_TK, tokens)
        counts.consume(routing)
    corpus = Corpus([f"domain {number}" for number in range(len(of_domain))], of_domain)
    names = {layer: f"layer {layer}" for layer in range(len(chosen_LTK))}
    return Traced(corpus, counts.layers(), "prefill", names, has_logits=False).tables(0, 0)


def claims(tables: Tables) -> set[str]:
    """What the report says of it beyond chance: key numbers, and sentences that name a place."""
    numbers = key_numbers(NUMBERS, tables, TABLES)
    found = {key.name for key in numbers if not key.word.startswith("at chance")}
    sentences = [spec for spec in FINDINGS if spec.only in ("beyond", "claimed")]
    for spec in sentences:
        counted, _ = spec.found(tables, TABLES)
        if len(counted):
            found.add(f"{spec.table}.{spec.column}")
    for metric in ("cv", "max_over_mean", "domain_information", "sequential_consistency"):
        specs = (spec for spec in (*NUMBERS, *FINDINGS) if spec.column == metric)
        rows = next(specs, Number("routing_layers", metric, name=metric)).found(tables, TABLES)[0]
        if len(rows) and judged(rows.iloc[:1]).iloc[0] and beyond(rows.iloc[:1]).iloc[0]:
            found.add(f"extreme {metric}")
    assert say_all(FINDINGS, tables, TABLES)
    return found


def rates(scores, seeds: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(seeds):
        found.update(claims(traced(scores(np.random.default_rng(seed)))))
    print({name: f"{count} of {seeds}" for name, count in sorted(found.items())})
    return found


def uniform(generator: np.random.Generator) -> np.ndarray:
    return generator.random((LAYERS, DOCUMENTS * LENGTH, EXPERTS))


def tastes(generator: np.random.Generator) -> np.ndarray:
    """Documents have tastes of their own, whatever their domain."""
    own = 0.3 * generator.standard_normal((LAYERS, DOCUMENTS, EXPERTS))
    return uniform(generator) + np.repeat(own, LENGTH, axis=1)


def domain_expert(generator: np.random.Generator) -> np.ndarray:
    """Tokens of code prefer expert 5 of layer 2: about twice the mean domain's use."""
    scores = uniform(generator)
    scores[2, np.repeat(np.arange(DOCUMENTS) % DOMAINS == 0, LENGTH), 5] += 0.5
    return scores


def busy_expert(generator: np.random.Generator) -> np.ndarray:
    """All tokens prefer expert 3 of layer 1: about 1.4 times an even share."""
    scores = uniform(generator)
    scores[1, :, 3] += 0.12
    return scores


def pair(generator: np.random.Generator) -> np.ndarray:
    """Experts 0 and 1 of layer 3 are chosen together about twice as often as by chance."""
    scores = uniform(generator)
    together = generator.random(DOCUMENTS * LENGTH) < 0.05
    scores[3, together, :2] += 1
    return scores


@pytest.mark.slow
def test_random_routing_makes_each_claim_in_at_most_8_percent_of_traces():
    found = rates(uniform, TRACES)
    assert not {name: count for name, count in found.items() if count > MOST_FALSE}


@pytest.mark.slow
def test_tastes_of_documents_are_no_domain_experts():
    """40 traces: at a true rate of 5 %, more than 5 happen once in 70 times."""
    found = rates(tastes, 40)
    assert max(found["domains.affinity"], found["routing_layers.domain_information"]) <= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "claims"),
    [
        (domain_expert, ("domains.affinity", "routing_layers.domain_information")),
        (busy_expert, ("extreme cv", "load_totals.times_even")),
        (pair, ("coactivation.over",)),
    ],
)
def test_planted_effects_are_found_in_nine_of_ten_traces(scores, claims):
    found = rates(scores, 20)
    assert min(found[claim] for claim in claims) >= 18


MAPS = ("load_map", "affinity_heatmap", "specialisation_map", "coactivation_heatmap")


def coloured(figure: str, tables: Tables) -> np.ndarray:
    """Whether each cell of a map's pages has a colour, without empty cells and those of too little data."""
    drawn = next(spec for spec in FIGURES if spec.name == figure).draw(tables)
    cells = np.concatenate([np.ravel(trace["z"]) for trace in drawn.data if trace["type"] == "heatmap"])
    cells = cells[~np.isnan(cells)]
    return cells % 1 > 0.0011 if figure == "specialisation_map" else cells != 0


def test_of_traces_with_experts_permuted_per_document_at_most_6_percent_of_cells_are_coloured(traced_run):
    """Of a model's trace the experts are renamed at random per document: tastes stay, loads are even."""
    rows = traced_run.table("tokens").query("step == step.max() and phase == 'prefill'")
    layers, experts = sorted(rows["layer"].unique()), int(traced_run.table("load")["expert"].max()) + 1
    shortest = rows.groupby("document")["position"].max().min()  # documents are rows of equal length here
    rows = rows[rows["position"] <= shortest].sort_values(["document", "position"])
    chosen_LTK = np.stack([np.stack(rows.loc[rows["layer"] == layer, "experts"]) for layer in layers])
    first = rows[rows["layer"] == layers[0]]
    document_T, domain_T = pd.factorize(first["document"])[0], pd.factorize(first["domain"])[0]
    generator = np.random.default_rng(0)
    # pairs keep company within a document, whatever their names: their noise is of independent tokens
    found: dict[str, list[np.ndarray]] = {name: [] for name in MAPS if name != "coactivation_heatmap"}
    for _ in range(20):
        shape = (len(layers), document_T.max() + 1, experts)
        names_LDE = generator.permuted(np.broadcast_to(np.arange(experts), shape), axis=-1)
        permuted_LTK = np.take_along_axis(names_LDE[:, document_T], chosen_LTK, axis=-1)
        tables = counted(permuted_LTK, experts, document_T, domain_T, first["position"].to_numpy())
        for name, cells in found.items():
            cells.append(coloured(name, tables))
    rates = {name: float(np.concatenate(cells).mean()) for name, cells in found.items()}
    print(rates)
    assert max(rates.values()) <= 0.06
    assert min(rates.values()) > 0


@pytest.mark.slow
def test_of_random_traces_at_most_6_percent_of_cells_are_coloured():
    rates = {name: [] for name in MAPS}
    for seed in range(20):
        tables = traced(uniform(np.random.default_rng(seed)))
        for name, cells in rates.items():
            cells.append(coloured(name, tables).mean())
    print({name: np.mean(cells) for name, cells in rates.items()})
    assert max(map(np.mean, rates.values())) <= 0.06


@pytest.mark.parametrize(
    ("scores", "figure", "planted"),
    [
        (domain_expert, "affinity_heatmap", "layer == 2 and expert == 5"),
        (domain_expert, "specialisation_map", "layer == 2 and expert == 5"),
        (busy_expert, "load_map", "layer == 1 and expert == 3"),
        (pair, "coactivation_heatmap", "layer == 3 and expert_a < 2 and expert_b < 2"),
    ],
)
def test_planted_cells_are_coloured(scores, figure, planted):
    tables = traced(scores(np.random.default_rng(0)))
    spec = next(spec for spec in FIGURES if spec.name == figure)
    rows = tables[spec.table].query(planted)
    assert len(rows)
    assert coloured(figure, {**tables, spec.table: rows}).any()
    if figure == "specialisation_map":
        assert rows["main_domain"].tolist() == ["domain 0"]
        assert rows["group_place"].tolist() == [0]
