"""Counts of one layer -> rows of the tables.

Every metric with its chance, its collapse value and its interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moescope.routing.chance import Setting, gate_relative_std
from moescope.routing.contexts import Contexts
from moescope.routing.decision import DECISION
from moescope.routing.domains import (
    affinity,
    by_domain,
    domain_information,
    domain_shares,
    information,
    permuted_tables,
    purity,
)
from moescope.routing.load import LOAD, divide
from moescope.routing.sample import Probe
from moescope.routing.separation import (
    SEPARATION,
    chance_lift,
    coactivation,
    gram_chance,
    gram_collapse,
    gram_orthogonality,
    router_similarity,
    similarity_floors,
)
from moescope.routing.stability import jaccard_chance
from moescope.routing.tally import LayerCounts
from moescope.routing.vocabulary import (
    shuffled_within,
    token_counts,
    token_information,
    top_tokens,
    vocabulary_specialisation,
)
from moescope.routing.words import Words
from moescope.statistics import NOT_AVAILABLE, interval
from moescope.types import Array, Integers

Row = dict[str, Any]
ROLES = ("input", "next", "predicted")


@dataclass(frozen=True)
class Corpus:
    """What was read: the domains' names, and how many documents each had."""

    domains: list[str]
    documents: list[int]

    @property
    def one_a_domain(self) -> bool:
        """Whether no domain has two documents, so that domain and document cannot be told apart."""
        return max(self.documents, default=0) < 2


def load_rows(counts: LayerCounts, corpus: Corpus, gates: bool = True) -> Iterator[Row]:
    """The load table: tokens and gate weight of every expert, by domain.

    Domains without a token have no rows.
    """
    for index, domain in enumerate(corpus.domains):
        if counts.sums("tokens")[index].sum():
            tokens_E, mass_E = counts.counts_MBE[index].sum(0), counts.mass_MBE[index].sum(0)
            for expert in range(counts.n_experts):
                mass = float(mass_E[expert]) if gates else None
                yield {
                    "phase": counts.phase,
                    "domain": domain,
                    "expert": expert,
                    "tokens": int(tokens_E[expert]),
                    "gate_weight": mass,
                }


def metric_rows(
    counts: LayerCounts, corpus: Corpus, gates: bool = True, decisions: bool = True, order: bool = True
) -> Iterator[Row]:
    """The metrics that are made of counts: of all domains together, and of each where there are several.

    Those of gates, of decisions and of the tokens' order are left out where they were not counted.
    """
    scopes = [("", slice(None), sum(corpus.documents))]
    if len(corpus.domains) > 1:
        scopes += [
            (name, slice(index, index + 1), corpus.documents[index])
            for index, name in enumerate(corpus.domains)
        ]
    for domain, where, documents in scopes:
        sums_BS = counts.sums_MBS[where].sum(0)
        if counts.sums("tokens")[where].sum():
            load_BE, mass_BE = counts.counts_MBE[where].sum(0).astype(float), counts.mass_MBE[where].sum(0)
            scope = Scope(counts, load_BE, mass_BE, sums_BS, documents)
            groups = [scope.load(), scope.dropped()]
            groups += [scope.sequence()] if order else []
            groups += [scope.gate_weight()] if gates else []
            groups += [scope.decision()] if decisions else []
            for group in groups:
                yield from ({"phase": counts.phase, "domain": domain, **row} for row in group)


@dataclass(frozen=True)
class Scope:
    """One layer's counts over some domains, by bucket."""

    counts: LayerCounts
    load_BE: Array
    mass_BE: Array
    sums_BS: Array
    documents: int

    def sums(self, name: str) -> Array:
        from moescope.routing.tally import SUMS

        return self.sums_BS[:, SUMS.index(name)]

    def total(self, name: str) -> float:
        return float(self.sums(name).sum())

    @property
    def setting(self) -> Setting:
        """N tokens, n experts, k as it came about: slots that went empty count as not chosen."""
        tokens = int(self.total("tokens"))
        return Setting(tokens, self.counts.n_experts, self.total("assigned") / tokens)

    def load(self) -> Iterator[Row]:
        if not self.total("assigned"):
            return
        setting = self.setting
        for metric in LOAD:
            value = float(metric.function(self.load_BE.sum(0)))
            ends = interval(self.load_BE, metric.function, self.documents)
            yield row(metric.name, value, metric.chance(setting), metric.collapse(setting), ends)

    def gate_weight(self) -> Iterator[Row]:
        if not self.total("gates") > 0:
            return
        plain = self.setting
        std = gate_relative_std(
            plain.n_experts,
            self.total("gates"),
            self.total("gates_squared"),
            self.total("token_gates_squared"),
        )
        setting = Setting(plain.tokens, plain.n_experts, plain.k, std)
        for metric in LOAD:
            if metric.name == "unused":  # the same experts, whether counted or weighed
                continue
            value = float(metric.function(self.mass_BE.sum(0)))
            ends = interval(self.mass_BE, metric.function, self.documents)
            yield row(
                f"gate_weight_{metric.name}", value, metric.chance(setting), metric.collapse(setting), ends
            )

    def decision(self) -> Iterator[Row]:
        setting = self.setting
        for metric in DECISION:
            yield self.mean(
                metric.name, metric.name, "tokens", metric.chance(setting), metric.collapse(setting)
            )

    def dropped(self) -> Iterator[Row]:
        if self.counts.k == self.counts.n_experts and self.total("dropped"):
            return  # a slot for every expert: experts choose tokens, and an empty slot is nobody's loss
        parts = np.stack([self.sums("dropped"), self.sums("tokens") * self.counts.k], -1)
        yield row("dropped", ratio(parts.sum(0)), 0.0, np.nan, interval(parts, ratio, self.documents))

    def sequence(self) -> Iterator[Row]:
        n, k = self.counts.n_experts, self.counts.k
        yield self.mean("sequential_consistency", "same_first", "neighbours", 1 / n, 1.0)
        yield self.mean("adjacent_jaccard", "jaccard", "neighbours", jaccard_chance(n, k), 1.0)

    def mean(self, name: str, top: str, bottom: str, chance: float, collapse: float) -> Row:
        parts = np.stack([self.sums(top), self.sums(bottom)], -1)
        return row(name, ratio(parts.sum(0)), chance, collapse, interval(parts, ratio, self.documents))


def ratio(parts: Array) -> Any:
    """A mean from its sum and count along the last axis; NaN without tokens."""
    return divide(parts[..., 0], parts[..., 1])[()]


def row(
    metric: str, value: float, chance: float, collapse: float, ends: tuple[float, float] = NOT_AVAILABLE
) -> Row:
    return {
        "metric": metric,
        "value": value,
        "chance": chance,
        "collapse": collapse,
        "low": ends[0],
        "high": ends[1],
    }


# --- separation


def separation_rows(counts: LayerCounts, router_ED: Array | None) -> Iterator[Row]:
    """Overlap of experts' token sets, and how alike their router rows are: of all domains together."""
    common = {"phase": counts.phase, "domain": ""}
    tokens, assigned = counts.sums("tokens").sum(), counts.sums("assigned").sum()
    if tokens and counts.k > 1:
        setting = Setting(int(tokens), counts.n_experts, assigned / tokens)
        for metric in SEPARATION:
            yield {
                **common,
                **row(
                    metric.name,
                    metric.function(counts.pairs_EE),
                    metric.chance(setting),
                    metric.collapse(setting),
                ),
            }
    if router_ED is not None and len(router_ED) > 1:
        n, d = router_ED.shape
        yield {
            **common,
            **row("gram_orthogonality", gram_orthogonality(router_ED), gram_chance(n, d), gram_collapse(n)),
        }
        chances = similarity_floors(n, d)
        for name, value in router_similarity(router_ED).items():
            yield {**common, **row(name, value, chances[name], 1.0)}


def coactivation_columns(counts: LayerCounts) -> dict[str, Any]:
    """The coactivation table's columns: every ordered pair of different experts."""
    n = counts.n_experts
    tokens, assigned = int(counts.sums("tokens").sum()), counts.sums("assigned").sum()
    a, b = np.nonzero(~np.eye(n, dtype=bool))
    share_EE, lift_EE = coactivation(counts.pairs_EE, tokens)
    return {
        "expert_a": a,
        "expert_b": b,
        "tokens": counts.pairs_EE[a, b].astype(np.int64),
        "share_of_a": share_EE[a, b],
        "lift": lift_EE[a, b],
        "chance_lift": chance_lift(n, assigned / tokens if tokens and assigned else np.nan),
    }


# --- domains


def domain_cells(counts: LayerCounts) -> tuple[Array, Integers]:
    """Counts of every cell that holds tokens, with its domain.

    Groups of documents that stay together when labels are dealt.
    """
    filled_MB = counts.sums("tokens") > 0
    return counts.counts_MBE[filled_MB].astype(float), np.nonzero(filled_MB)[0]


def domain_metric_rows(counts: LayerCounts, corpus: Corpus, seed: int) -> Iterator[Row]:
    """Purity and I(expert; domain): nothing where there is one domain, or one document a domain."""
    n_domains = len(corpus.domains)
    if n_domains < 2 or corpus.one_a_domain or not counts.sums("assigned").sum():
        return
    common = {"phase": counts.phase, "domain": ""}
    cells_CE, labels_C = domain_cells(counts)
    dealt_PME = permuted_tables(cells_CE, labels_C, n_domains, seed)
    value = domain_information(cells_CE, labels_C, n_domains, seed)
    documents = sum(corpus.documents)
    by_bucket_BME = counts.counts_MBE.transpose(1, 0, 2).astype(float)
    ends = interval(by_bucket_BME, information, documents, centre=value)
    yield {**common, **row("domain_information", value, 0.0, 0.0, ends)}
    table_ME = by_domain(cells_CE, labels_C, n_domains)
    full = dealt_PME.sum(-1).all(-1)  # a domain without a token has no shares
    chance = float(purity(dealt_PME[full]).mean()) if full.any() else np.nan
    ends = interval(by_bucket_BME, purity, documents)
    yield {**common, **row("purity", float(purity(table_ME)), chance, 1 / n_domains, ends)}


def domain_rows(counts: LayerCounts, corpus: Corpus) -> Iterator[Row]:
    """The domains table; empty for a single domain."""
    if len(corpus.domains) < 2:
        return
    table_ME = counts.counts_MBE.sum(1).astype(float)
    affinity_ME, shares_ME = affinity(table_ME), domain_shares(table_ME)
    for expert in range(counts.n_experts):
        for index, domain in enumerate(corpus.domains):
            yield {
                "expert": expert,
                "domain": domain,
                "tokens": int(table_ME[index, expert]),
                "affinity": affinity_ME[index, expert],
                "share": shares_ME[index, expert],
                "share_chance": 1 / len(corpus.domains),
            }


# --- vocabulary


def vocabulary_metric_rows(probe: Probe, layer: int, n_experts: int, phase: str, seed: int) -> Iterator[Row]:
    """Held-out information of tokens about experts, and specialisation by input, next and predicted token."""
    chosen_TK = probe.chosen_LTK[probe.layers.index(layer)].astype(np.int64)
    if not len(chosen_TK):
        return
    common = {"phase": phase, "domain": ""}
    dealt_T = shuffled_within(probe.ids_T, probe.document_T, seed)
    value = token_information(probe.ids_T, chosen_TK, probe.half_T, n_experts)
    null = token_information(dealt_T, chosen_TK, probe.half_T, n_experts)
    yield {**common, **row("token_information", value, null, 0.0)}
    for role, ids_T in roles(probe).items():
        dealt_T = shuffled_within(ids_T, probe.document_T, seed)
        value, null = (vocabulary_specialisation(ids, chosen_TK, n_experts) for ids in (ids_T, dealt_T))
        yield {**common, **row(f"vocabulary_specialisation_{role}", value, null, 1.0)}


def roles(probe: Probe) -> dict[str, Integers]:
    """Which token ids are looked at: the input, the one that follows, the one predicted.

    Those that are not known are left out.
    """
    every = dict(zip(ROLES, (probe.ids_T, probe.next_T, probe.predicted_T), strict=True))
    return {role: ids_T for role, ids_T in every.items() if (ids_T >= 0).any()}


def vocabulary_columns(
    probe: Probe, layer: int, n_experts: int, token_text: Callable[[int], str | None]
) -> dict[str, list[Any]]:
    """The vocabulary table's columns: the 50 tokens that set each expert apart, in each role."""
    chosen_TK = probe.chosen_LTK[probe.layers.index(layer)].astype(np.int64)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("expert", "role", "token_id", "token", "count", "share", "lift")
    }
    for role, ids_T in roles(probe).items():
        counts_VE = token_counts(ids_T, chosen_TK, int(ids_T.max()) + 1, n_experts)
        for expert, (ids, count, share, lift) in enumerate(top_tokens(counts_VE)):
            columns["expert"] += [expert] * len(ids)
            columns["role"] += [role] * len(ids)
            columns["token_id"] += ids.tolist()
            columns["token"] += [token_text(int(token)) for token in ids]
            columns["count"] += [int(number) for number in count]
            columns["share"] += share.tolist()
            columns["lift"] += lift.tolist()
    return columns


def context_rows(
    contexts: Contexts | None, probe: Probe | None, corpus: Corpus, words: Words
) -> dict[int, list[Row]]:
    """layer -> its rows of the contexts table, in words."""
    found: dict[int, list[Row]] = {}
    if contexts is None or probe is None:
        return found
    for layer, place in contexts.rows(probe.share):
        before, token, after = words.around(place["before"], place["token_id"], place["after"])
        own = {"domain": corpus.domains[place["domain"]], "token": token, "before": before, "after": after}
        found.setdefault(layer, []).append({**place, **own})
    return found


def expert_cosine_columns(of: str, rows_ED: Array) -> dict[str, Any]:
    """The expert_cosines table's columns.

    Cosines of every two experts' vectors, and the mean |cos| of random directions, sqrt(2/(pi D)).
    """
    a, b = np.triu_indices(len(rows_ED), 1)
    lengths_E = np.linalg.norm(rows_ED, axis=1)
    unit_ED = divide(rows_ED, lengths_E[:, None])
    return {
        "of": of,
        "expert_a": a,
        "expert_b": b,
        "cosine": (unit_ED @ unit_ED.T)[a, b],
        "chance": np.full(len(a), np.sqrt(2 / (np.pi * rows_ED.shape[1]))),
    }
