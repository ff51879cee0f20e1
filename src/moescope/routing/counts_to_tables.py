"""Counts of one layer -> rows of the tables, every metric with its chance level, bounds and interval."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moescope.routing.expert_maps import DRAWN_FROM, coactivation_order, expert_maps, map_facts
from moescope.routing.load_balance import (
    FEWEST_EXPECTED,
    NEARLY_UNUSED,
    Setting,
    balancing_loss,
    balancing_loss_interval,
    busiest_quantile,
    divide,
    gate_relative_std,
    load_entropy,
    load_noise,
    lorenz,
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
    row,
)
from moescope.routing.separation import (
    chance_lift,
    coactivation,
    expected_pairs,
    largest_pair,
    pair_cosines,
    pair_p,
)
from moescope.routing.specialisation import (
    PERMUTATIONS,
    affinity,
    affinity_interval,
    affinity_z,
    domain_shares,
    information,
    permuted_tables,
    purity,
)
from moescope.routing.tables import TABLES
from moescope.routing.token_sample import Contexts, Probe, TokenText
from moescope.routing.vocabulary import Measured, Vocabulary
from moescope.spectral.lapack import one_blas_thread
from moescope.statistics import (
    FEWEST_DOCUMENTS,
    LEVEL,
    NOT_AVAILABLE,
    ROUNDING,
    Interval,
    clip_share,
    holm,
    jackknife_interval,
)
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

    from moescope.routing.counts import LayerCounts

PHASES = ("prefill", "decode")
FEW = 0.1  # of the median layer's tokens: a layer with fewer is not compared with the others
OUTSIDE = 1.96  # standard deviations: outside its null interval an expert is grouped with its domain
FEWEST_LAYERS = 3  # whose values by chance have a spread
THREADS = 4  # of the vocabulary; each holds a few arrays of the sample's choices
Row = dict[str, Any]
STEP_TABLES = (
    "load",
    "load_totals",
    "routing_layers",
    "coactivation",
    "domains",
    "specialisation",
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

        found: dict[str, list[Row]] = {name: [] for name in STEP_TABLES}  # rows, or columns of layers

        def add(table: str, counts: LayerCounts, contents: Iterable[Row]) -> None:
            place = {"step": step, "layer": counts.layer, "layer_name": self.layer_names[counts.layer]}
            found[table] += [{**place, **content} for content in contents]

        def frame(table: str) -> pd.DataFrame:
            parts = found[table]
            columns = any(isinstance(value, np.ndarray) for value in parts[0].values()) if parts else False
            return pd.DataFrame(join_columns(parts) if columns else parts, columns=[*TABLES[table].columns])

        main = self.main()
        phases = [[counts for counts in self.counts if counts.phase == phase] for phase in PHASES]
        domains = {
            (counts.phase, counts.layer): told
            for layers in phases
            for counts, told in zip(layers, domain_statistics(layers, self.corpus, seed), strict=True)
        }
        experts, pairs_read = experts_and_pairs(main)
        # small matrices: threads of BLAS would only wait for each other
        with one_blas_thread("numpy"), ThreadPoolExecutor(THREADS) as pool:
            words = []
            if self.probe is not None:  # in threads, beside all other tables
                vocabulary = Vocabulary(self.probe, seed)
                words = [
                    (layer, pool.submit(vocabulary.layer, layer.layer, layer.n_experts)) for layer in main
                ]
            for counts in self.counts:
                add("load", counts, [load_columns(counts, self.corpus, self.has_gates)])
                if counts.tokens:
                    add("load_totals", counts, [load_total_columns(counts, self.has_gates, experts)])
                known = self.has_gates, self.has_logits, self.has_tokens, self.has_slots
                add("routing_layers", counts, metric_rows(counts, self.corpus, *known, layers=len(main)))
                if self.has_tokens:
                    add("routing_layers", counts, separation_rows(counts, self.routers.get(counts.layer)))
                add("routing_layers", counts, domains[counts.phase, counts.layer].rows)
            contexts = self.context_rows()
            for counts in main:
                if len(self.corpus.domains) > 1:
                    told = domains[counts.phase, counts.layer]
                    add("domains", counts, [domain_columns(counts, self.corpus, told.p_ME)])
                    if len(null_PE := told.null_PE):
                        columns = specialisation_columns(counts, self.corpus.domains, null_PE)
                        add("specialisation", counts, [columns])
                add("contexts", counts, contexts.get(counts.layer, []))
                for of, vectors in (("router", self.routers), ("outputs", self.outputs)):
                    if counts.layer in vectors:
                        add("expert_cosines", counts, [expert_cosine_columns(of, vectors[counts.layer])])
                if counts.k > 1 and self.has_tokens:
                    add("coactivation", counts, [coactivation_columns(counts, pairs_read)])
            pairs = {name: frame(name) for name in ("coactivation", "expert_cosines")}
            found["maps"] = expert_maps(pairs, maps)
            by_chance = extreme_of_layers([made.result()[0] for _, made in words])
            for counts, made in words:
                measured, parts = made.result()
                columns = join_columns(parts)
                layer = layer_columns(counts, tokens=len(vocabulary.probe.ids_T))
                bounds = {"token_information": {**by_chance, "largest": float(load_entropy(counts.load_E))}}
                lines = ({**layer, **row(*metric), **bounds.get(metric[0], {})} for metric in measured)
                add("routing_layers", counts, lines)
                ids, places = np.unique(columns["token_id"], return_inverse=True)
                texts = np.array([self.text.of(token) for token in ids.tolist()], dtype=object)
                add("vocabulary", counts, [{**columns, "token": texts[places]}])
        frames = {name: pairs[name] if name in pairs else frame(name) for name in STEP_TABLES}
        frames["routing_layers"] = mark_few(frames["routing_layers"])
        frames["load_totals"] = load_totals(found["load_totals"])
        frames["maps"] = map_facts(frames, self.main_phase)
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
        few: dict[tuple[str, int], list[str]] = {}
        for counts in self.counts if not lines else ():
            if (filled := sum(self.corpus.documents_of(counts))) < FEWEST_DOCUMENTS:
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
        unknown = [str(layer) for layer, words in self.scoring.items() if "not reproduced" in words]
        if unknown:
            lines.append(
                f"selection_margin not available in layers {', '.join(unknown)}: the scoring function was "
                "not recognised"
            )
        if self.probe is not None and self.probe.share < 1:
            lines.append(
                f"vocabulary and stability are of a sample: {len(self.probe.ids_T):,} tokens, "
                f"{self.probe.share:.1%} of the text's windows"
            )
        return lines


# --- metrics made of counts


def experts_and_pairs(layers: Sequence[LayerCounts]) -> tuple[int, int]:
    """Return how many experts and unordered pairs of experts of a layer are read: the most extreme leads."""
    sizes = [counts.n_experts for counts in layers]
    return sum(sizes), sum(n * (n - 1) // 2 for n in sizes)


def join_columns(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join columns of several layers; a single value stands for as many as the layer has rows."""
    lengths = [next(len(one) for one in part.values() if isinstance(one, np.ndarray)) for part in parts]
    return {
        name: np.concatenate([part[name] for part in parts])
        if isinstance(value, np.ndarray)
        else np.repeat(np.array([part[name] for part in parts]), lengths)
        for name, value in (parts[0].items() if parts else ())
    }


def load_columns(counts: LayerCounts, corpus: Corpus, gates: bool = True) -> dict[str, Any]:
    """Return the columns of the load table: every expert in each domain that has tokens."""
    there_M = counts.sums("tokens").sum(1) > 0
    tokens_ME, weight_ME = (part[there_M].sum(1) for part in (counts.counts_MBE, counts.gate_weight_MBE))
    return {
        "phase": counts.phase,
        "domain": np.repeat(np.array(corpus.domains, dtype=object)[there_M], counts.n_experts),
        "expert": np.tile(np.arange(counts.n_experts), len(tokens_ME)),
        "tokens": tokens_ME.reshape(-1),
        "gate_weight": weight_ME.reshape(-1) if gates else None,
        "even": np.repeat(tokens_ME.mean(1), counts.n_experts),
    }


def load_total_columns(counts: LayerCounts, gates: bool = True, experts: int | None = None) -> dict[str, Any]:
    """Return the columns of the load_totals table: every expert against an even share, all domains together.

    `p` is of a load that differs from it; `load_totals` judges it. `experts` is the number of experts of all
    layers, by default this layer's.
    """
    load_E, n = counts.load_E, counts.n_experts
    cells_CE = counts.counts_MBE.reshape(-1, n).astype(float)
    labels_C = np.repeat(np.arange(len(counts.counts_MBE)), counts.counts_MBE.shape[1])
    even = load_E.mean()
    noise_E, p_E = load_noise(cells_CE, labels_C, counts.tokens)
    rank_E = np.argsort(np.argsort(-load_E, kind="stable"), kind="stable")
    setting = Setting(counts.tokens, n, counts.mean_k)
    draws = setting.draws if even else np.zeros((1, n))
    curves_DE = lorenz(draws)
    low_E, high_E = np.quantile(curves_DE, [0.025, 0.975], axis=0)
    looks = (experts or n) / n
    weight_E = counts.gate_weight_MBE.sum((0, 1))
    return {
        "phase": counts.phase,
        "expert": np.arange(n),
        "tokens": load_E.astype(np.int64),
        "gate_weight": weight_E if gates else None,
        "even": even,
        "times_even": divide(load_E, even),
        "times_even_noise": noise_E,
        "gate_times_even": divide(weight_E, weight_E.mean()) if gates else None,
        "rank_share": (rank_E + 1) / n,
        "load_share": lorenz(load_E)[rank_E],
        "load_share_chance": curves_DE.mean(0)[rank_E],
        "load_share_low": low_E[rank_E],
        "load_share_high": high_E[rank_E],
        "reference": rank_E == (n - 1) // 2,
        "unused": load_E == 0,
        "dead": (load_E < NEARLY_UNUSED * even) & (even >= FEWEST_EXPECTED),
        "few": bool(even < FEWEST_EXPECTED),
        "load_at_collapse": n / setting.k_at_collapse,
        "busiest_by_chance": busiest_quantile(setting, 0.5 ** (1 / looks)),
        "busiest_limit": busiest_quantile(setting, (1 - LEVEL) ** (1 / looks)),
        "p": p_E,
    }


def load_totals(layers: list[Row]) -> pd.DataFrame:
    """Return the load_totals table from its layers, with which loads differ from an even share.

    Holm's correction is over all experts of a step and phase that have enough tokens.
    """
    import pandas as pd

    rows = pd.DataFrame(join_columns(layers), columns=[*TABLES["load_totals"].columns, "p"])
    p = rows.pop("p").where(~rows["few"].astype(bool)).astype(float)
    q = p.groupby([rows["step"], rows["phase"]]).transform(lambda values: holm(values.to_numpy()))
    return rows.assign(claimed=(q < LEVEL).astype(object).where(q.notna(), None))


def mark_few(rows: pd.DataFrame) -> pd.DataFrame:
    """Mark the layers with too few tokens: under five per expert, or under a tenth of the median layer's.

    Loads are uneven there by chance. A prefill may end with a single token in the last layer.
    """
    keys = [rows[name] for name in ("phase", "domain", "metric")]
    fewest = FEW * rows["tokens"].groupby(keys).transform("median")
    expected = rows["tokens"] * rows["top_k"] / rows["n_experts"]
    return rows.assign(few=(rows["tokens"] < fewest) | (expected < FEWEST_EXPECTED))


def metric_rows(
    counts: LayerCounts,
    corpus: Corpus,
    gates: bool = True,
    decisions: bool = True,
    order: bool = True,
    slots: bool = True,
    layers: int = 1,
) -> Iterator[Row]:
    """Yield the metrics of all domains together, and of each where there are several.

    `gates`, `decisions`, `order` (of the tokens) and (empty) `slots` say which were counted, `layers` of how
    many the most extreme leads.
    """
    documents_M = corpus.documents_of(counts)
    scopes = [("", slice(None), sum(documents_M))]
    if len(corpus.domains) > 1:
        each = zip(corpus.domains, documents_M, strict=True)
        scopes += [(name, slice(at, at + 1), documents) for at, (name, documents) in enumerate(each)]
    for domain, where, documents in scopes:
        if counts.sums("tokens")[where].sum():
            scope = Scope(counts, domain, where, documents, layers)
            yield from scope.load()
            yield from scope.means([DROPPED] if slots and scope.loses_slots else [])
            yield from scope.means(SEQUENCE if order else [])
            yield from scope.gate_weight() if gates else ()
            yield from scope.means(DECISION if decisions else [])
            yield from scope.balancing_loss() if decisions else ()


class Scope:
    """One layer's counts over some domains, by bucket."""

    def __init__(self, counts: LayerCounts, domain: str, where: slice, documents: int, layers: int):
        self.counts, self.domain, self.where, self.documents = counts, domain, where, documents
        self.load_BE = counts.counts_MBE[where].sum(0).astype(float)
        tokens, k = int(self.total("tokens")), self.total("assigned") / self.total("tokens")
        choices = same_first = float("nan")
        if counts.first_ME is not None:
            first_E = counts.first_ME[where].sum(0).astype(float)
            chosen = first_E.sum()
            choices = float(divide(np.asarray(self.total("assigned")), chosen))
            same_first = float(divide((first_E * (first_E - 1)).sum(), chosen * (chosen - 1)))
        self.setting = Setting(
            tokens,
            counts.n_experts,
            k,
            choices=choices,
            same_first=same_first,
            neighbours=self.total("neighbours"),
            layers=layers,
        )

    def sums(self, name: str) -> Array:
        return np.asarray(self.counts.sums(name)[self.where].sum(0))

    def total(self, name: str) -> float:
        return float(self.sums(name).sum())

    def load(self) -> Iterator[Row]:
        if self.load_BE.any():
            yield from self.balance(LOAD, self.load_BE, self.setting)

    def gate_weight(self) -> Iterator[Row]:
        if self.total("gates") > 0:
            sums = (self.total(name) for name in ("gates", "gates_squared", "token_gates_squared"))
            setting = replace(self.setting, gate_std=gate_relative_std(self.counts.n_experts, *sums))
            yield from self.balance(GATE_WEIGHT, self.counts.gate_weight_MBE[self.where].sum(0), setting)

    def balancing_loss(self) -> Iterator[Row]:
        if self.counts.probability_MBE is not None and self.load_BE.any():
            probability_BE = self.counts.probability_MBE[self.where].sum(0)
            few = self.documents < FEWEST_DOCUMENTS
            interval = NOT_AVAILABLE if few else balancing_loss_interval(self.load_BE, probability_BE)
            value = balancing_loss(self.load_BE.sum(0), probability_BE.sum(0))
            yield self.row(BALANCING_LOSS, value, interval, self.setting)

    def balance(self, metrics: list[Metric], load_BE: Array, setting: Setting) -> Iterator[Row]:
        for metric in metrics:
            interval = NOT_AVAILABLE
            if metric.interval is not None and self.documents >= FEWEST_DOCUMENTS:
                interval = metric.interval(load_BE)
            yield self.row(metric, metric.value(load_BE.sum(0)), interval, setting)

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
        layer = layer_columns(self.counts, self.domain, self.setting.tokens)
        return {**layer, **metric.row(setting, value, interval)}


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


# --- separation


def separation_rows(counts: LayerCounts, router_ED: Array | None) -> Iterator[Row]:
    """Yield the overlap of experts' token sets, and the similarity of their router rows."""
    metrics: list[tuple[Metric, Array]] = []
    if counts.tokens and counts.k > 1 and counts.pairs_EE is not None:
        metrics.append((OVERLAP, counts.pairs_EE))
    if router_ED is not None and len(router_ED) > 1:
        metrics += [(metric, router_ED) for metric in ROUTER]
    setting = Setting(counts.tokens, counts.n_experts, counts.mean_k, pairs=counts.mean_pairs)
    if router_ED is not None:
        setting = replace(setting, d_model=router_ED.shape[1])
    for metric, values in metrics:
        yield {**layer_columns(counts), **metric.row(setting, metric.value(values))}


def coactivation_columns(counts: LayerCounts, pairs: int | None = None) -> dict[str, Any]:
    """Return the columns of the coactivation table: every ordered pair of different experts.

    `pairs` is the number of unordered pairs of all layers, by default this layer's.
    """
    n, tokens = counts.n_experts, counts.tokens
    assert counts.pairs_EE is not None
    a, b = np.nonzero(~np.eye(n, dtype=bool))
    share_EE, lift_EE = coactivation(counts.pairs_EE, tokens)
    tokens_E = np.diag(counts.pairs_EE).astype(np.int64)
    chance = chance_lift(n, counts.mean_k, counts.mean_pairs)
    expected_EE, noise_EE = expected_pairs(counts.pairs_EE, tokens)
    over_EE = divide(counts.pairs_EE, expected_EE)
    few_EE, pairs = ~(expected_EE >= FEWEST_EXPECTED), pairs or n * (n - 1) // 2
    p_EE = pair_p(counts.pairs_EE, expected_EE, noise_EE)
    place_E = np.argsort(coactivation_order(np.where(expected_EE >= DRAWN_FROM, over_EE, np.nan)))
    return {
        "expert_a": a,
        "expert_b": b,
        "tokens": counts.pairs_EE[a, b].astype(np.int64),
        "tokens_a": tokens_E[a],
        "tokens_b": tokens_E[b],
        "layer_tokens": tokens,
        "share_of_a": share_EE[a, b],
        "lift": lift_EE[a, b],
        "chance_lift": chance,
        "expected": expected_EE[a, b],
        "over": over_EE[a, b],
        "over_noise": noise_EE[a, b],
        "largest_by_chance": largest_pair(pairs, expected_EE[a, b], noise_EE[a, b]),
        "few": few_EE[a, b],
        "claimed": flags(p_EE[a, b] * pairs < LEVEL, ~few_EE[a, b]),
        "place_a": place_E[a],
        "place_b": place_E[b],
    }


def flags(values: NDArray[np.bool_], known: NDArray[np.bool_]) -> NDArray[Any]:
    """Return a bool column, null where it is not known."""
    return np.where(known, values.astype(object), np.array(None, dtype=object))


def expert_cosine_columns(of: str, rows_ED: Array) -> dict[str, Any]:
    """Return the columns of the expert_cosines table; mean |cos| of random directions: sqrt(2/(pi D))."""
    a, b = np.triu_indices(len(rows_ED), 1)
    chance = np.full(len(a), np.sqrt(2 / (np.pi * rows_ED.shape[1])))
    levels = {"cosine": pair_cosines(rows_ED), "chance": chance, "dimensions": rows_ED.shape[1]}
    return {"of": of, "expert_a": a, "expert_b": b, **levels}


# --- domains


@dataclass
class DomainStatistics:
    """Rows of purity and I(expert; domain), and p of every affinity; empty where documents tell nothing."""

    rows: list[Row] = field(default_factory=list)
    p_ME: Array | None = None
    z_ME: Array | None = None  # of the affinities, NaN where there are too few tokens
    null_PE: Array = field(default_factory=lambda: np.zeros((0, 0)))  # largest shares with permuted labels


def domain_statistics(layers: Sequence[LayerCounts], corpus: Corpus, seed: int) -> list[DomainStatistics]:
    """Return what each layer of a phase says of domains, corrected for all experts, layers and domains.

    Documents' labels are permuted alike in all layers. An affinity's p is the share of permutations whose
    largest |z| over all cells is at least its own (max statistic). Empty for one domain, or one document per
    domain.
    """
    told, most_information, most_z = [], np.full(PERMUTATIONS, -np.inf), np.full(PERMUTATIONS + 1, -np.inf)
    for counts in layers:
        if len(corpus.domains) < 2 or corpus.single_documents or not counts.sums("assigned").sum():
            told.append(DomainStatistics())
            continue
        filled_MB = counts.sums("tokens") > 0  # cells: groups of documents that stay together
        cells_CE, labels_C = counts.counts_MBE[filled_MB].astype(float), np.nonzero(filled_MB)[0]
        text_ME = counts.counts_MBE.sum(1).astype(float)
        permuted_PME = permuted_tables(cells_CE, labels_C, len(text_ME), seed)
        information_P = information(permuted_PME)
        z_PME = affinity_z(np.concatenate([text_ME[None], permuted_PME]))
        z_PME[..., too_few(counts)] = np.nan
        rows = domain_metric_rows(counts, corpus, permuted_PME, information_P)
        told.append(DomainStatistics(rows, z_ME=z_PME[0], null_PE=domain_shares(permuted_PME).max(1)))
        most_information = np.fmax(most_information, information_P - information_P.mean())
        most_z = np.fmax(most_z, np.fmax.reduce(z_PME, axis=(1, 2)))
    for one in told:
        if one.z_ME is not None:
            for name, q in (("extreme_chance", 0.5), ("extreme_limit", 1 - LEVEL)):
                one.rows[0][name] = float(np.quantile(most_information, q))
            reached_ME = (most_z[:, None, None] >= one.z_ME - ROUNDING).mean(0)
            one.p_ME = np.where(np.isnan(one.z_ME), np.nan, reached_ME)
    return told


def too_few(counts: LayerCounts) -> Array:
    """Whether experts have fewer tokens than five per domain."""
    return np.asarray(counts.load_E < FEWEST_EXPECTED * len(counts.counts_MBE))


def domain_metric_rows(
    counts: LayerCounts, corpus: Corpus, permuted_PME: Array, information_P: Array
) -> list[Row]:
    """Return I(expert; domain) and purity."""
    documents, layer = sum(corpus.documents_of(counts)), layer_columns(counts)
    by_bucket_BME = counts.counts_MBE.transpose(1, 0, 2).astype(float)
    table_ME = by_bucket_BME.sum(0)
    value = float(information(table_ME) - information_P.mean())
    interval = jackknife_interval(by_bucket_BME, information, documents, centre=value)
    largest = float(load_entropy(table_ME.sum(1)))
    told = {**layer, **row("domain_information", value, 0.0, 0.0, interval), "largest": largest}
    full = permuted_PME.sum(-1).all(-1)  # a domain without a token has no shares
    chance = float(purity(permuted_PME[full]).mean()) if full.any() else np.nan
    interval = clip_share(jackknife_interval(by_bucket_BME, purity, documents))
    levels = chance, 1 / len(table_ME), interval
    return [told, {**layer, **row("purity", float(purity(table_ME)), *levels)}]


def extreme_of_layers(measured: Sequence[Sequence[Measured]]) -> Row:
    """Return what the largest I(expert; token) of all layers reaches by chance; nothing under three layers.

    Each layer has one value with permuted tokens: the levels are the bounds of as many new ones, by Student's
    t.
    """
    from scipy.special import stdtrit

    chance = np.array([m[2] for layer in measured for m in layer if m[0] == "token_information"])
    if len(chance) < FEWEST_LAYERS:
        return {}
    spread = chance.std(ddof=1) * np.sqrt(1 + 1 / len(chance))
    each = {"extreme_chance": 0.5, "extreme_limit": 1 - LEVEL}
    quantiles = {name: stdtrit(len(chance) - 1, q ** (1 / len(chance))) for name, q in each.items()}
    return {name: float(chance.mean() + t * spread) for name, t in quantiles.items()}


def domain_columns(counts: LayerCounts, corpus: Corpus, p_ME: Array | None = None) -> dict[str, Any]:
    """Return the columns of the domains table; `p_ME` is corrected for all cells of all layers."""
    domains, n = len(corpus.domains), counts.n_experts
    table_ME = counts.counts_MBE.sum(1)
    limits = affinity_interval(counts.counts_MBE.astype(float), corpus.documents_of(counts))
    low_ME, high_ME, noise_ME = limits
    few_E = too_few(counts)
    p = np.full(n * domains, np.nan) if p_ME is None else p_ME.T.reshape(-1)
    return {
        "expert": np.repeat(np.arange(n), domains),
        "domain": np.tile(np.array(corpus.domains, dtype=object), n),
        "tokens": table_ME.T.reshape(-1),
        "affinity": affinity(table_ME.astype(float)).T.reshape(-1),
        "low": low_ME.T.reshape(-1),
        "high": high_ME.T.reshape(-1),
        "share": domain_shares(table_ME.astype(float)).T.reshape(-1),
        "share_chance": 1 / domains,
        "affinity_noise": noise_ME.T.reshape(-1),
        "few": np.repeat(few_E, domains),
        "affinity_p": p,
        "claimed": flags(p < LEVEL, ~np.isnan(p)),
    }


def specialisation_columns(counts: LayerCounts, domains: Sequence[str], null_PE: Array) -> dict[str, Any]:
    """Return the columns of the specialisation table; `null_PE`: the largest shares with permuted labels."""
    share_ME = domain_shares(counts.counts_MBE.sum(1).astype(float))
    domain_E, share_E = np.nan_to_num(share_ME).argmax(0), share_ME.max(0)
    null = np.ma.masked_invalid(null_PE)
    chance_E, noise_E = null.mean(0).filled(np.nan), null.std(0).filled(np.nan)
    few_E = too_few(counts)
    beyond_E = (share_E > chance_E + OUTSIDE * noise_E) & np.logical_not(few_E)
    by_name = np.argsort(np.argsort(np.array(domains, dtype=str)))
    order_E = np.lexsort((-share_E, np.where(beyond_E, by_name[domain_E], len(domains))))
    return {
        "expert": np.arange(counts.n_experts),
        "main_domain": np.array(domains, dtype=object)[domain_E],
        "dominant_share": share_E,
        "dominant_chance": chance_E,
        "dominant_noise": np.where(noise_E > ROUNDING, noise_E, np.nan),
        "few": few_E,
        "group_place": np.argsort(order_E),
    }
