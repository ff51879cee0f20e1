"""Counts of one layer -> rows of the tables, every metric with its chance level, bounds and interval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.routing.contexts import Contexts, TokenText
from moescope.routing.expert_maps import expert_maps
from moescope.routing.load_balance import (
    Setting,
    balancing_loss,
    balancing_loss_interval,
    divide,
    gate_relative_std,
)
from moescope.routing.metrics import (
    BALANCING_LOSS,
    DECISION,
    DROPPED,
    GATE_WEIGHT,
    LOAD,
    OVERLAP,
    ROUTER,
    SEQUENCE,
    Metric,
)
from moescope.routing.separation import chance_lift, coactivation, pair_cosines
from moescope.routing.specialisation import (
    affinity,
    affinity_interval,
    by_domain,
    domain_information,
    domain_shares,
    information,
    permuted_tables,
    purity,
)
from moescope.routing.tables import TABLES
from moescope.routing.token_sample import Probe
from moescope.routing.vocabulary import Vocabulary
from moescope.spectral.lapack import one_blas_thread
from moescope.statistics import FEWEST_DOCUMENTS, NOT_AVAILABLE, Interval, clip_share, jackknife_interval
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

    from moescope.routing.tally import LayerCounts

THREADS = 4  # of the vocabulary; each holds a few arrays of the sample's choices
Row = dict[str, Any]
STEP_TABLES = (
    "load",
    "routing_layers",
    "coactivation",
    "domains",
    "vocabulary",
    "contexts",
    "expert_cosines",
    "maps",
)


@dataclass(frozen=True)
class Corpus:
    """What was read: the domains' names, and the number of documents of each."""

    domains: list[str]
    documents: list[int]

    @property
    def single_documents(self) -> bool:
        """Whether no domain has two documents, so that domain and document cannot be told apart."""
        return max(self.documents, default=0) < 2

    def documents_of(self, counts: LayerCounts) -> list[int]:
        """Return the number of documents of each domain that have tokens in this phase and layer."""
        return self.documents if counts.documents_M is None else counts.documents_M


@dataclass
class Traced:
    """The result of tracing one model or one recorded trace: everything its tables are made of."""

    corpus: Corpus
    counts: list[LayerCounts]
    main_phase: str  # of the tables without a phase
    layer_names: dict[int, str]
    probe: Probe | None = None
    routers: dict[int, Array] = field(default_factory=dict)  # router rows by layer
    scoring: dict[int, str] = field(default_factory=dict)
    text: TokenText = field(default_factory=TokenText)
    contexts: Contexts | None = None
    outputs: dict[int, Array] = field(default_factory=dict)  # mean output of each expert, by layer
    seen: Integers | None = None  # token ids in the tokens table
    model_type: str = "unknown"
    window: int | None = None
    has_gates: bool = True
    has_logits: bool = True
    has_tokens: bool = True  # not only counts: order of tokens and pairs of experts
    has_slots: bool = True  # also empty ones: servers name the chosen experts only

    def main(self) -> list[LayerCounts]:
        return [counts for counts in self.counts if counts.phase == self.main_phase]

    def tables(self, step: int, seed: int, maps: Sequence[str] = ("pca",)) -> dict[str, pd.DataFrame]:
        """Return the tables of one step, with maps of experts by these methods."""
        import pandas as pd

        rows: dict[str, list[Row]] = {name: [] for name in STEP_TABLES}
        columns_of: dict[str, list[Row]] = {name: [] for name in STEP_TABLES}

        def add(table: str, counts: LayerCounts, content: Any) -> None:
            key = {"step": step, "layer": counts.layer, "layer_name": self.layer_names[counts.layer]}
            if isinstance(content, dict):
                columns_of[table].append({**key, **content})
            else:
                rows[table] += [{**key, **row} for row in content]

        def frame(table: str) -> pd.DataFrame:  # of rows, then of layers whose rows are columns already
            parts = [pd.DataFrame(rows[table]), *map(pd.DataFrame, columns_of[table])]
            parts = [part for part in parts if len(part)] or [pd.DataFrame(columns=[*TABLES[table].columns])]
            return pd.concat(parts, ignore_index=True) if len(parts) > 1 else parts[0]

        main = self.main()
        # small matrices: threads of BLAS would only wait for each other
        with one_blas_thread("numpy"), ThreadPoolExecutor(THREADS) as pool:
            words = []
            if self.probe is not None:  # in threads, beside all other tables
                vocabulary = Vocabulary(self.probe, seed)
                words = [
                    (layer, pool.submit(vocabulary.layer, layer.layer, layer.n_experts)) for layer in main
                ]
            for counts in self.counts:
                add("load", counts, load_rows(counts, self.corpus, self.has_gates))
                known = self.has_gates, self.has_logits, self.has_tokens, self.has_slots
                add("routing_layers", counts, metric_rows(counts, self.corpus, *known))
                if self.has_tokens:
                    add("routing_layers", counts, separation_rows(counts, self.routers.get(counts.layer)))
                add("routing_layers", counts, domain_metric_rows(counts, self.corpus, seed))
            contexts = self.context_rows()
            for counts in main:
                add("domains", counts, domain_rows(counts, self.corpus))
                add("contexts", counts, contexts.get(counts.layer, []))
                for of, vectors in (("router", self.routers), ("outputs", self.outputs)):
                    if counts.layer in vectors:
                        add("expert_cosines", counts, expert_cosine_columns(of, vectors[counts.layer]))
                if counts.k > 1 and self.has_tokens:
                    add("coactivation", counts, coactivation_columns(counts))
            frames = {name: frame(name) for name in ("coactivation", "expert_cosines")}
            frames["maps"] = expert_maps(frames, maps)
            for counts, made in words:
                measured, columns = made.result()
                layer = layer_columns(counts, tokens=len(vocabulary.probe.ids_T))
                add("routing_layers", counts, ({**layer, **row(*metric)} for metric in measured))
                ids, places = np.unique(columns["token_id"], return_inverse=True)
                texts = np.array([self.text.of(token) for token in ids.tolist()], dtype=object)
                add("vocabulary", counts, {**columns, "token": texts[places]})
        frames = {name: frames[name] if name in frames else frame(name) for name in STEP_TABLES}
        if self.seen is not None:
            seen = {"token_id": self.seen, "token": [self.text.of(int(token)) for token in self.seen]}
            frames["token_text"] = pd.DataFrame(seen)
        return frames

    def context_rows(self) -> dict[int, list[Row]]:
        """Return layer -> its rows of the contexts table, as text."""
        rows: dict[int, list[Row]] = {}
        if self.contexts is not None and self.probe is not None:
            for layer, place in self.contexts.rows(self.probe.share):
                before, token, after = self.text.around(place["before"], place["token_id"], place["after"])
                text = {"token": token, "before": before, "after": after}
                domain = self.corpus.domains[place["domain"]]
                rows.setdefault(layer, []).append({**place, "domain": domain, **text})
        return rows

    def facts(self) -> dict[str, Any]:
        """Return what run.json says about this step; `mean_k` where tokens have fewer than k experts."""
        main = self.main()
        chosen = sum(int(counts.counts_MBE.sum()) for counts in main)
        tokens = sum(counts.tokens for counts in main)
        unfilled = chosen < tokens * min((counts.k for counts in main), default=0)
        return {
            "coverage": {
                "model_type": self.model_type,
                "layers": len(main),
                "experts_per_layer": sorted({counts.n_experts for counts in main}),
                "k": sorted({counts.k for counts in main}),
                **({"mean_k": chosen / tokens} if unfilled else {}),
                "domains": dict(zip(self.corpus.domains, self.corpus.documents, strict=True)),
                "tokens": {
                    name: int(main[0].sums("tokens")[index].sum()) if main else 0
                    for index, name in enumerate(self.corpus.domains)
                },
            },
            "window": self.window,
            "layers": [counts.layer for counts in main],
            "n_experts": [counts.n_experts for counts in main],
            "scoring": [self.scoring.get(counts.layer) for counts in main],
            "sample_tokens": 0 if self.probe is None else len(self.probe.ids_T),
            "sample_share": None if self.probe is None else self.probe.share,
        }

    def arrays(self) -> dict[str, Any]:
        """Return what comparing steps needs: the sample's tokens and every layer's choices for them."""
        if self.probe is None:
            return {}
        return {"chosen": self.probe.chosen_LTK, "ids": self.probe.ids_T, "documents": self.probe.document_T}

    def warnings(self) -> list[str]:
        lines = []
        documents = sum(self.corpus.documents)
        if documents < FEWEST_DOCUMENTS:
            lines.append(f"no intervals: {FEWEST_DOCUMENTS} documents are needed, {documents} given")
        else:
            few: dict[tuple[str, int], list[str]] = {}
            for counts in self.counts:
                filled = sum(self.corpus.documents_of(counts))
                if filled < FEWEST_DOCUMENTS:
                    few.setdefault((counts.phase, filled), []).append(str(counts.layer))
            lines += [
                f"no intervals of {phase} in layers {', '.join(layers)}: {FEWEST_DOCUMENTS} documents are "
                f"needed, {filled} of {documents} have tokens there"
                for (phase, filled), layers in few.items()
            ]
        if len(self.corpus.domains) > 1 and self.corpus.single_documents:
            lines.append(
                "domain_information and purity not available: with one document per domain, domain and "
                "document cannot be told apart"
            )
        unknown = [layer for layer, words in self.scoring.items() if "not reproduced" in words]
        if unknown:
            lines.append(
                f"selection_margin not available in layers {', '.join(map(str, unknown))}: the scoring "
                "function was not recognised"
            )
        if self.probe is not None and self.probe.share < 1:
            lines.append(
                f"vocabulary and stability are of a sample: {len(self.probe.ids_T):,} tokens, "
                f"{self.probe.share:.1%} of the text's windows"
            )
        return lines


# --- metrics made of counts


def load_rows(counts: LayerCounts, corpus: Corpus, gates: bool = True) -> Iterator[Row]:
    """Yield the load table: tokens and gate weight of every expert, of domains that have tokens."""
    for index, domain in enumerate(corpus.domains):
        if counts.sums("tokens")[index].sum():
            tokens_E, weight_E = counts.counts_MBE[index].sum(0), counts.gate_weight_MBE[index].sum(0)
            for expert in range(counts.n_experts):
                yield {
                    "phase": counts.phase,
                    "domain": domain,
                    "expert": expert,
                    "tokens": int(tokens_E[expert]),
                    "gate_weight": float(weight_E[expert]) if gates else None,
                }


def metric_rows(
    counts: LayerCounts,
    corpus: Corpus,
    gates: bool = True,
    decisions: bool = True,
    order: bool = True,
    slots: bool = True,
) -> Iterator[Row]:
    """Yield the metrics of all domains together, and of each where there are several.

    `gates`, `decisions`, `order` (of the tokens) and (empty) `slots` say which were counted.
    """
    documents_M = corpus.documents_of(counts)
    scopes = [("", slice(None), sum(documents_M))]
    if len(corpus.domains) > 1:
        scopes += [
            (name, slice(index, index + 1), documents_M[index]) for index, name in enumerate(corpus.domains)
        ]
    for domain, where, documents in scopes:
        if counts.sums("tokens")[where].sum():
            scope = Scope(counts, domain, where, documents)
            yield from scope.load()
            yield from scope.means([DROPPED] if slots and scope.loses_slots else [])
            yield from scope.means(SEQUENCE if order else [])
            yield from scope.gate_weight() if gates else ()
            yield from scope.means(DECISION if decisions else [])
            yield from scope.balancing_loss() if decisions else ()


class Scope:
    """One layer's counts over some domains, by bucket."""

    def __init__(self, counts: LayerCounts, domain: str, where: slice, documents: int):
        self.counts, self.domain, self.where, self.documents = counts, domain, where, documents
        tokens = int(self.total("tokens"))
        assigned, choices, same_first = self.total("assigned"), float("nan"), float("nan")
        if counts.first_ME is not None:
            first_E = counts.first_ME[where].sum(0).astype(float)
            chosen = first_E.sum()
            choices = float(divide(np.asarray(assigned), chosen))
            same_first = float(divide((first_E * (first_E - 1)).sum(), chosen * (chosen - 1)))
        k = assigned / tokens
        self.setting = Setting(tokens, counts.n_experts, k, choices=choices, same_first=same_first)

    def sums(self, name: str) -> Array:
        if name == "slots":
            return self.sums("tokens") * self.counts.k
        return np.asarray(self.counts.sums(name)[self.where].sum(0))

    def total(self, name: str) -> float:
        return float(self.sums(name).sum())

    def load(self) -> Iterator[Row]:
        if self.total("assigned"):
            load_BE = self.counts.counts_MBE[self.where].sum(0).astype(float)
            yield from self.balance(LOAD, load_BE, self.setting)

    def gate_weight(self) -> Iterator[Row]:
        if self.total("gates") > 0:
            sums = (self.total(name) for name in ("gates", "gates_squared", "token_gates_squared"))
            tokens, n, k = self.setting.tokens, self.setting.n_experts, self.setting.k
            setting = Setting(tokens, n, k, gate_relative_std(n, *sums))
            yield from self.balance(GATE_WEIGHT, self.counts.gate_weight_MBE[self.where].sum(0), setting)

    def balancing_loss(self) -> Iterator[Row]:
        if self.counts.probability_MBE is not None and self.total("assigned"):
            load_BE = self.counts.counts_MBE[self.where].sum(0).astype(float)
            probability_BE = self.counts.probability_MBE[self.where].sum(0)
            value = balancing_loss(load_BE.sum(0), probability_BE.sum(0))
            enough = self.documents >= FEWEST_DOCUMENTS
            interval = balancing_loss_interval(load_BE, probability_BE) if enough else NOT_AVAILABLE
            yield self.row(BALANCING_LOSS, value, interval, self.setting)

    def balance(self, metrics: list[Metric], load_BE: Array, setting: Setting) -> Iterator[Row]:
        for metric in metrics:
            assert metric.function is not None
            value = float(metric.function(load_BE.sum(0)))
            interval = NOT_AVAILABLE
            if metric.interval is not None and self.documents >= FEWEST_DOCUMENTS:
                interval = metric.interval(load_BE)
            yield self.row(metric, value, interval, setting)

    @property
    def loses_slots(self) -> bool:
        """Not where each expert has a slot: experts choose tokens, and an empty slot is no loss."""
        return not (self.counts.k == self.counts.n_experts and self.total("dropped"))

    def means(self, metrics: list[Metric]) -> Iterator[Row]:
        for metric in metrics:
            parts = np.stack([self.sums(name) for name in metric.sums], -1)
            interval = jackknife_interval(parts, ratio, self.documents)
            interval = clip_share(interval) if metric.share else interval
            yield self.row(metric, ratio(parts.sum(0)), interval, self.setting)

    def row(self, metric: Metric, value: float, interval: Interval, setting: Setting) -> Row:
        levels = metric.chance(setting), metric.collapse(setting)
        return {
            **layer_columns(self.counts, self.domain, self.setting.tokens),
            **row(metric.name, value, *levels, interval),
        }


def ratio(parts: Array) -> Any:
    """Return a mean from its sum and count along the last axis; NaN without tokens."""
    return divide(parts[..., 0], parts[..., 1])[()]


def layer_columns(counts: LayerCounts, domain: str = "", tokens: int | None = None) -> Row:
    """Return the columns of routing_layers that do not depend on the metric."""
    return {
        "phase": counts.phase,
        "domain": domain,
        "n_experts": counts.n_experts,
        "top_k": counts.k,
        "tokens": counts.tokens if tokens is None else tokens,
    }


def row(metric: str, value: float, chance: float, collapse: float, interval: Interval = NOT_AVAILABLE) -> Row:
    return {
        "metric": metric,
        "value": value,
        "chance": chance,
        "collapse": collapse,
        **interval._asdict(),
    }


# --- separation


def separation_rows(counts: LayerCounts, router_ED: Array | None) -> Iterator[Row]:
    """Yield the overlap of experts' token sets, and the similarity of their router rows."""
    metrics: list[tuple[Metric, Array]] = []
    if counts.tokens and counts.k > 1:
        metrics.append((OVERLAP, counts.pairs_EE))
    if router_ED is not None and len(router_ED) > 1:
        metrics += [(metric, router_ED) for metric in ROUTER]
    d_model = 0 if router_ED is None else router_ED.shape[1]
    setting = Setting(
        counts.tokens, counts.n_experts, counts.mean_k, pairs=counts.mean_pairs, d_model=d_model
    )
    for metric, values in metrics:
        assert metric.function is not None
        levels = metric.chance(setting), metric.collapse(setting)
        yield {**layer_columns(counts), **row(metric.name, metric.function(values), *levels)}


def coactivation_columns(counts: LayerCounts) -> dict[str, Any]:
    """Return the columns of the coactivation table: every ordered pair of different experts."""
    n, tokens = counts.n_experts, counts.tokens
    a, b = np.nonzero(~np.eye(n, dtype=bool))
    share_EE, lift_EE = coactivation(counts.pairs_EE, tokens)
    tokens_E = np.diag(counts.pairs_EE).astype(np.int64)
    return {
        "expert_a": a,
        "expert_b": b,
        "tokens": counts.pairs_EE[a, b].astype(np.int64),
        "tokens_a": tokens_E[a],
        "tokens_b": tokens_E[b],
        "layer_tokens": tokens,
        "share_of_a": share_EE[a, b],
        "lift": lift_EE[a, b],
        "chance_lift": chance_lift(n, counts.mean_k, counts.mean_pairs),
    }


def expert_cosine_columns(of: str, rows_ED: Array) -> dict[str, Any]:
    """Return the columns of the expert_cosines table; mean |cos| of random directions: sqrt(2/(pi D))."""
    a, b = np.triu_indices(len(rows_ED), 1)
    d = rows_ED.shape[1]
    chance = np.full(len(a), np.sqrt(2 / (np.pi * d)))
    cosine = pair_cosines(rows_ED)
    return {"of": of, "expert_a": a, "expert_b": b, "cosine": cosine, "chance": chance, "dimensions": d}


# --- domains


def domain_metric_rows(counts: LayerCounts, corpus: Corpus, seed: int) -> Iterator[Row]:
    """Yield purity and I(expert; domain); nothing for one domain, or one document per domain."""
    n_domains = len(corpus.domains)
    if n_domains < 2 or corpus.single_documents or not counts.sums("assigned").sum():
        return
    filled_MB = counts.sums("tokens") > 0  # cells: groups of documents that stay together in permutations
    cells_CE, labels_C = counts.counts_MBE[filled_MB].astype(float), np.nonzero(filled_MB)[0]
    permuted_PME = permuted_tables(cells_CE, labels_C, n_domains, seed)
    value = domain_information(cells_CE, labels_C, n_domains, seed)
    documents = sum(corpus.documents_of(counts))
    by_bucket_BME = counts.counts_MBE.transpose(1, 0, 2).astype(float)
    interval = jackknife_interval(by_bucket_BME, information, documents, centre=value)
    yield {**layer_columns(counts), **row("domain_information", value, 0.0, 0.0, interval)}
    table_ME = by_domain(cells_CE, labels_C, n_domains)
    full = permuted_PME.sum(-1).all(-1)  # a domain without a token has no shares
    chance = float(purity(permuted_PME[full]).mean()) if full.any() else np.nan
    interval = clip_share(jackknife_interval(by_bucket_BME, purity, documents))
    yield {**layer_columns(counts), **row("purity", float(purity(table_ME)), chance, 1 / n_domains, interval)}


def domain_rows(counts: LayerCounts, corpus: Corpus) -> Iterator[Row]:
    """Yield the domains table; empty for a single domain."""
    if len(corpus.domains) < 2:
        return
    table_ME = counts.counts_MBE.sum(1).astype(float)
    affinity_ME, shares_ME = affinity(table_ME), domain_shares(table_ME)
    low_ME, high_ME = affinity_interval(counts.counts_MBE.astype(float), corpus.documents_of(counts))
    for expert in range(counts.n_experts):
        for index, domain in enumerate(corpus.domains):
            yield {
                "expert": expert,
                "domain": domain,
                "tokens": int(table_ME[index, expert]),
                "affinity": affinity_ME[index, expert],
                "low": low_ME[index, expert],
                "high": high_ME[index, expert],
                "share": shares_ME[index, expert],
                "share_chance": 1 / len(corpus.domains),
            }
