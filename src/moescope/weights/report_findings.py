"""Views of scan runs (step, matrix, router), and findings in sentences made from their tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import bdtrc

from moescope.errors import BadInput
from moescope.plotting.style import capital, chance_words, counted, from_to, listed, named_layers, number
from moescope.run import Run
from moescope.spectral.alignment import TIE
from moescope.spectral.decompose import random_rank
from moescope.spectral.pairing import ALPHA, IDENTIFYING_ACCURACY, false_call_rate
from moescope.spectral.subspaces import COLLAPSED, REDUNDANT
from moescope.statistics import false_discovery_rates
from moescope.types import SIGNIFICAND_BITS, Coverage
from moescope.verb import FigureSpec, Finding, Tables
from moescope.weights.figures_identification import (
    FEWEST_TESTED,
    experts_by_layer,
    ranked_layers,
    verdict_sentence,
)
from moescope.weights.figures_redundancy import d_model_by_layer, share_above
from moescope.weights.tables import TABLES, VIEW

NAMED_AT_MOST = 5  # examples spelled out in one sentence
LARGE_COMMON_PART = 0.25  # of a router row's squared norm


# --- views


@dataclass(frozen=True)
class View:
    """One step, matrix and router variant of one run: its tables, and a label unique in the report."""

    run: Run
    keys: dict[str, Any]
    label: str
    tables: Tables

    def setup(self, layer: int) -> dict[str, Any]:
        """How the layer was analysed, from run.json."""
        for setup in self.run.info["setup"]:
            if setup["step"] == self.keys["step"] and setup["layer"] == layer:
                return dict(setup)
        raise BadInput(
            f"{self.run.path}: run.json has no setup of layer {layer}; scan again with --overwrite"
        )

    def n_experts(self, layer: int) -> int:
        """Number of the layer's experts that took part."""
        return int(experts_by_layer(self.tables)[layer])

    def facts(self, layer: int) -> dict[str, Any]:
        """Facts from run.json: another order, if one fits."""
        facts: dict[str, Any] = self.setup(layer)["matrices"][self.keys["matrix"]]["routers"][
            self.keys["router"]
        ]
        return facts

    @property
    def has_rows(self) -> bool:
        """Whether the router has rows to compare with the experts."""
        return "alignment_tests" in self.tables

    @property
    def layers(self) -> list[int]:
        return sorted(int(layer) for layer in self.tables["spectra"]["layer"].unique())

    def drawable(self, specs: Iterable[FigureSpec]) -> list[FigureSpec]:
        """The figures whose tables this view has."""
        return [spec for spec in specs if set(spec.needs) <= set(self.tables)]

    def by_layer(self) -> Iterator[tuple[int, Tables]]:
        """Each layer with its rows of every table, grouped once: filtering 48 times is slow on large runs."""
        groups = {name: dict(tuple(frame.groupby("layer"))) for name, frame in self.tables.items()}
        for layer in self.layers:
            yield layer, {name: rows.get(layer, self.tables[name].iloc[:0]) for name, rows in groups.items()}


def views(run: Run) -> list[View]:
    """All views of a scan, in the order of its options."""
    tables = {name: run.table(name) for name in run.tables}
    if missing := [name for name in expected_tables(run) if name not in tables]:
        raise BadInput(f"{run.path}: table {', '.join(missing)} is missing; scan again with --overwrite")
    order = run.info["arguments"]
    if "alignment_tests" in tables:
        keys = tables["alignment_tests"][["step", *VIEW]].drop_duplicates().to_dict("records")
    else:
        keys = tables["spectra"][["step", "matrix"]].drop_duplicates().to_dict("records")
        keys = [{**key, "router": None, "fold_norm": order["fold_norm"]} for key in keys]
    matrices, routers = order["matrix"], [None, *order["router"]]
    keys.sort(key=lambda k: (k["step"], matrices.index(k["matrix"]), routers.index(k["router"])))
    several = len({key["step"] for key in keys}) > 1
    return [
        View(
            run,
            key,
            (f"step {key['step']} · " if several else "") + view_words(key),
            {name: select_rows(frame, key) for name, frame in tables.items()},
        )
        for key in keys
    ]


def expected_tables(run: Run) -> list[str]:
    """Tables a scan must have: fewer without router rows, only spectra with one expert per layer."""
    coverage = run.info.get("coverage", [])
    if not any(item.get("rowless_router") for item in coverage):
        return list(TABLES)
    alone = all(item["experts_per_layer"] == [1] for item in coverage)
    return ["spectra"] if alone else ["similarity", "orthogonality", "spectra"]


def select_rows(frame: pd.DataFrame, keys: dict[str, Any]) -> pd.DataFrame:
    """Rows with those keys; tables without a router (spectra, similarity) belong to every router's view."""
    mask = pd.Series(True, index=frame.index)
    for key, value in keys.items():
        if key in frame.columns:
            mask &= frame[key] == value
    return frame if mask.all() else frame[mask]


def view_words(keys: dict[str, Any]) -> str:
    """ "gate, raw router"; without router rows "gate matrices"."""
    words = f"{keys['matrix']}, {keys['router']} router" if keys["router"] else f"{keys['matrix']} matrices"
    return words + (", norm folded in" if keys["fold_norm"] else "")


# --- findings


def coverages(run: Run) -> list[Coverage]:
    return [
        Coverage(**{**item, "experts_per_layer": tuple(item["experts_per_layer"])})
        for item in run.info["coverage"]
    ]


def headline(all_views: list[View], of_first: list[str]) -> list[str]:
    """The first view's findings, and where other views of the run differ.

    Where raw and centered rows differ, that and the next view's verdicts stand right after the first finding.
    """
    first, *rest = all_views
    sentences = list(of_first)
    if rest and first.has_rows:
        sentences[0] = Finding(f"{capital(first.label)}: {lower(sentences[0])}", figure="accuracy_by_k")
    same = [view for view in rest if first.has_rows and verdict_layers(view) == verdict_layers(first)]
    others = [view for view in rest if first.has_rows and verdict_layers(view) != verdict_layers(first)]
    alternatives = []
    for other in others[:NAMED_AT_MOST]:
        text = f"{capital(other.label)}: {lower(verdict_sentence(other.tables))}. {strength(other)}"
        alternatives.append(Finding(text, figure="accuracy_by_k", scan=other.label))
    if contrast := centering_finding(all_views):
        sentences[1:1] = [contrast, *alternatives[:1]]
        alternatives = alternatives[1:]
    sentences += alternatives
    seen = {first.keys["matrix"]}
    for view in rest:
        if (matrix := view.keys["matrix"]) not in seen:
            seen.add(matrix)
            pairs = "similarity" in view.tables
            found = redundancy_finding(view) if pairs else rank_sentence(view)
            text = f"{capital(matrix)} matrices: {lower(found)}" if pairs else str(found)
            sentences.append(Finding(text, **found.place, scan=view.label))
    if same:
        who = f"{len(same)} other views" if len(same) > 1 else same[0].label
        text = f"{capital(who)}: same verdicts as {first.label}."
        sentences.append(Finding(text, figure="compare_accuracy"))
    if len(others) > NAMED_AT_MOST:
        text = f"{len(others) - NAMED_AT_MOST} more views have other verdicts; see Side by side."
        sentences.append(Finding(text, figure="compare_accuracy"))
    return sentences


def centering_finding(all_views: list[View]) -> Finding | None:
    """Layers whose verdict differs between raw and centered rows; a scan centers softmax routers only."""
    named, label = [], ""
    groups: dict[tuple[Any, ...], dict[str, View]] = {}
    for view in all_views:
        if view.has_rows:
            key = (view.keys["step"], view.keys["matrix"])
            groups.setdefault(key, {})[view.keys["router"]] = view
    for (_, matrix), pair in groups.items():
        if {"raw", "centered"} <= set(pair):
            raw, centered = (
                pair[name].tables["alignment_tests"].set_index("layer")["verdict"].sort_index()
                for name in ("raw", "centered")
            )
            if differing := raw.index[raw != centered].tolist():
                step = pair["centered"].label.rpartition(" · ")[0]
                where = ", ".join([*([step] if step else []), f"{matrix} matrices"])
                named.append(named_layers(differing) + (f" ({where})" if len(groups) > 1 else ""))
                label = label or pair["centered"].label
    if not named:
        return None
    text = (
        f"Raw and centered router rows get different verdicts in {examples(named)}. These routers use a "
        "softmax, which ignores a vector common to all rows: the centered view is the one that matters."
    )
    return Finding(text, figure="compare_accuracy", scan=label)


def lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def verdict_layers(view: View) -> dict[str, list[int]]:
    if not view.has_rows:
        return {}
    tests = view.tables["alignment_tests"].groupby("verdict")
    return {str(verdict): sorted(int(layer) for layer in rows["layer"]) for verdict, rows in tests}


def findings(view: View) -> list[str]:
    """The view's findings, most important first, each with its chance level."""
    if not view.has_rows:
        missing = next(words for item in coverages(view.run) if (words := item.without_rows()))
        alike = [redundancy_finding(view)] if "similarity" in view.tables else []
        return [capital(f"{missing}."), *alike, rank_sentence(view), *rank_findings(view)]
    return [
        verdict_finding(view),
        *common_vector_findings(view),
        *other_order_findings(view),
        *small_k_findings(view),
        *avoidance_findings(view),
        *hub_findings(view),
        redundancy_finding(view),
        *ambiguity_finding(view),
        *rank_findings(view),
    ]


def verdict_finding(view: View) -> Finding:
    counts = [view.n_experts(layer) for layer in view.layers]
    tested = sum(n >= FEWEST_TESTED for n in counts)
    start = f"{verdict_sentence(view.tables)}. "
    if not tested:
        text = f"{start}3 experts have only 6 pairings, so no p can be below 1/6."
        return Finding(text, figure="accuracy_by_k")
    level = number(false_positives(view))
    text = f"{start}{strength(view)} False positives expected among {tested} random layers: at most {level}."
    return Finding(text, figure="accuracy_by_k")


def strength(view: View) -> str:
    """Best accuracy and p of the layers that beat chance, or of all layers where none does."""
    tests = view.tables["alignment_tests"]
    beat = tests[tests["verdict"].isin(["identifying", "non_random"])]
    rows = tests if beat.empty else beat
    level = span(rows["chance_accuracy"])  # unknown in older runs
    chance = "" if rows["chance_accuracy"].isna().any() else f" (chance: {level})"
    ps = rows["p_value"]
    p = f"p at least {number(ps.min())}" if beat.empty else f"p at most {number(ps.max())}"
    counts = rows["n_pairings"].unique()
    count = f"{counts[0]:,} " if len(counts) == 1 else ""
    against = f"{'all' if rows['exact'].all() else 'sampled'} {count}pairings"
    who = "" if beat.empty or len(beat) == len(tests) else f" of {named_layers(sorted(beat['layer']))}"
    return f"Best accuracy{who}: {span(rows['best_accuracy'])}{chance}, {p} against {against}."


def span(values: pd.Series) -> str:
    """ "0.5 to 0.875", or one number where both ends are written alike."""
    low, high = number(values.min()), number(values.max())
    return low if low == high else f"{low} to {high}"


def false_positives(view: View) -> float:
    """Most layers that get another verdict than chance where every layer is random."""
    layers = view.tables["alignment_layers"]
    ks = layers[~layers["degenerate"].astype(bool)].groupby("layer")["k"].nunique()
    return sum(false_call_rate(view.n_experts(layer), int(ks.get(layer, 0))) for layer in view.layers)


def common_vector_findings(view: View) -> list[str]:
    """Layers of a softmax router whose rows have a large part in common, where only raw rows were scanned."""
    if "centered" in view.run.info["arguments"]["router"]:
        return []
    large: dict[int, tuple[float, float]] = {}  # part of a row's squared norm, and that of random rows
    for layer in view.layers:
        setup = view.setup(layer)
        shares = list(setup["centered_share"].values())
        if setup["scoring"] == "softmax" and len(shares) > 2:  # others cannot be centered
            common, random = 1 - float(np.median(shares)) ** 2, 1 / len(shares)
            if common > max(LARGE_COMMON_PART, 2 * random):
                large[layer] = common, random
    if not large:
        return []
    found, chance = (span(pd.Series(values)) for values in zip(*large.values(), strict=True))
    text = (
        f"Router rows share a vector in {named_layers(list(large))}: {found} of a row's squared norm (random "
        f"rows: {chance}). Softmax ignores it; --router raw,centered removes it."
    )
    return [Finding(text, figure="accuracy_by_k", layer=next(iter(large)))]


def other_order_findings(view: View) -> list[str]:
    sentences: list[str] = []
    for layer in verdict_layers(view).get("permuted", []):
        order = view.facts(layer)["other_order"]
        pairs = zip(order["routers"], order["experts"], strict=True)
        permuted = [
            f"router row {router} fits expert {expert}"
            for router, expert in pairs
            if expert not in (None, router)
        ]
        shown = listed(permuted) if len(permuted) <= 8 else examples(permuted)
        text = (
            f"Layer {layer}: router rows and experts fit one to one, but not in the stored order; at "
            f"k = {order['k']}, {shown} (p ≤ {number(order['p'])})."
        )
        sentences.append(Finding(text, figure="pair_matrix", layer=int(layer)))
    return sentences


def small_k_findings(view: View) -> list[str]:
    """Layers that identify their experts at small k only, far below the end of the k grid."""
    sentences: list[str] = []
    layers = view.tables["alignment_layers"]
    for layer in verdict_layers(view).get("identifying", []):
        rows = layers[(layers["layer"] == layer) & ~layers["degenerate"].astype(bool)].sort_values("k")
        last_good = int(rows.loc[rows["argmax_accuracy"] >= IDENTIFYING_ACCURACY, "k"].max())
        last = rows.iloc[-1]
        if last_good <= last["k"] / 4 and last["argmax_accuracy"] < 0.5:
            text = (
                f"Layer {layer} identifies its experts at small k only: up to k = {last_good}; at "
                f"k = {last['k']:.0f} accuracy is {number(last['argmax_accuracy'])}."
            )
            sentences.append(Finding(text, figure="accuracy_by_k", layer=int(layer)))
    return sentences


def avoidance_findings(view: View) -> list[str]:
    tests = view.tables["alignment_tests"].sort_values("layer")
    q = false_discovery_rates(tests["p_lower"].to_numpy(float))
    layers = view.tables["alignment_layers"]
    sentences: list[str] = []
    for layer, p in tests.loc[q <= ALPHA, ["layer", "p_lower"]].itertuples(index=False):
        rows = layers[(layers["layer"] == layer) & ~layers["degenerate"].astype(bool)]
        lowest = rows.loc[rows["perm_z"].idxmin()]
        text = (
            f"Layer {layer}: router rows avoid their own experts at k = {lowest['k']:.0f}, alignment "
            f"{number(lowest['align'])} (average pair: {number(lowest['shuffle_mean'])}; lower-tail "
            f"p = {number(p)})."
        )
        sentences.append(Finding(text, figure="delta_by_k", layer=int(layer)))
    return sentences


def hub_findings(view: View) -> list[str]:
    """Experts that are the best match of more router rows than chance allows, at the layer's best k.

    Chance: n router rows choose among n experts at random; Bonferroni-corrected over experts, ks and layers.
    """
    hubs, layers = [], []
    best = view.tables["alignment_tests"].set_index("layer")["best_k"]
    looks = view.tables["alignment_layers"].groupby("layer")["k"].nunique().sum()
    for layer, rows in view.tables["pairs"].groupby("layer"):
        grid = rows[rows["k"] == best[layer]].pivot(index="router_index", columns="expert", values="align")
        M, n = grid.to_numpy(float), len(grid)
        second, first = np.partition(M, -2, axis=1)[:, -2:].T
        wins = np.bincount(M.argmax(axis=1)[first - second > TIE], minlength=n)
        if looks * n * bdtrc(wins.max() - 1, n, 1 / n) <= ALPHA:
            hubs.append(f"expert {grid.columns[wins.argmax()]} of layer {layer} ({wins.max()} of {n})")
            layers.append(int(layer))
    if not hubs:
        return []
    text = (
        f"Experts that are the best match of more router rows than chance allows: {examples(hubs)}; one each "
        "is expected. A direction common to all rows has the same effect; the centered view removes it."
    )
    return [Finding(text, figure="pair_matrix", layer=layers[0])]


def examples(items: list[str], most: int = NAMED_AT_MOST) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"


def collapsed_pairs(view: View) -> list[dict[str, Any]]:
    if "similarity" not in view.tables:
        return []
    pairs = view.tables["similarity"]
    close = pairs[(pairs["k"] == 1) & (pairs["cosine"].abs() > COLLAPSED)]
    close = close.reindex(close["cosine"].abs().sort_values(ascending=False).index)
    kinds = {"layer": int, "expert_a": int, "expert_b": int, "cosine": float}
    return [{name: kind(row[name]) for name, kind in kinds.items()} for _, row in close.iterrows()]


def redundancy_finding(view: View) -> Finding:
    statistics = view.tables["orthogonality"].query("k == 1")
    pairs = view.tables["similarity"].query("k == 1").groupby("layer").size()
    widths = d_model_by_layer(view.tables)
    expected = sum(count * share_above(REDUNDANT, widths[layer]) for layer, count in pairs.items())
    close = collapsed_pairs(view)
    named = [
        f"{pair['expert_a']} and {pair['expert_b']} of layer {pair['layer']} ({number(abs(pair['cosine']))})"
        for pair in close
    ]
    place = {"figure": "orthogonality_by_layer"}
    if close:
        place = {"figure": "cosine_heatmap", "layer": close[0]["layer"]}
    start = f"Collapsed experts (|cos| above {COLLAPSED}): {examples(named, 2) if named else 'none'}"
    text = (
        f"{start}; {statistics['n_pairs_above_0_3'].sum():,} of {pairs.sum():,} pairs are above {REDUNDANT} "
        f"(expected of random directions: {number(expected)} pairs)."
    )
    return Finding(text, **place)


def ambiguity_finding(view: View) -> list[str]:
    """The most ambiguous of the layers that beat chance, by the absolute score."""
    table, ranked = view.tables["ambiguity"], ranked_layers(view.tables)
    if table["absolute_score"].isna().all():
        return []
    others = sorted(set(table["layer"]) - set(ranked["layer"]))
    rest = f" Not ranked, since they do not beat chance: {named_layers(others)}." if others else ""
    level = table["absolute_chance"].mean()
    if ranked.empty:
        chance = chance_words(level, "absolute score of a layer at chance")
        text = f"Ambiguity: no layer is ranked, none beats chance{chance}."
        return [Finding(text, figure="absolute_ambiguity_by_layer")]
    named = [
        f"layer {row.layer} ({number(row.absolute_score)}"
        + ("" if pd.isna(row.ambiguity_score) else f"; relative {number(row.ambiguity_score)}")
        + ")"
        for row in ranked.head(NAMED_AT_MOST).itertuples()
    ]
    chance = chance_words(level, "a layer at chance")
    text = f"Ambiguity, absolute score: highest in {', '.join(named)}{chance}.{rest}"
    return [Finding(text, figure="absolute_ambiguity_by_layer", layer=int(ranked["layer"].iloc[0]))]


def layer_ranks(view: View) -> pd.DataFrame:
    """Layer -> medians over its experts, largest rank, number of experts."""
    spectra = view.tables["spectra"]
    spectra = spectra[spectra["rank"].notna()].astype({"rank": float})
    return spectra.groupby("layer").agg(
        {"effective_rank": "median", "stable_rank": "median", "rank": "max", "expert": "count"}
    )


def rank_sentence(view: View) -> Finding:
    ranks = layer_ranks(view)
    middle = ranks["effective_rank"]
    span = from_to(middle.min(), f"layer {middle.idxmin()}", middle.max(), f"layer {middle.idxmax()}")
    median = ", median per layer," if (ranks["expert"] > 1).any() else ""
    text = (
        f"Effective rank of the {view.keys['matrix']} matrices{median} {span}; largest rank "
        f"{number(ranks['rank'].max())}."
    )
    return Finding(text, figure="ranks_by_layer")


def rank_findings(view: View) -> list[str]:
    """Experts that miss more directions than a random matrix of their shape and dtype, by three deviations of
    a Poisson count."""
    spectra = view.tables["spectra"]
    halves = 2 if view.keys["matrix"] == "gate_up" else 1
    named, cells = [], []
    for layer, rows in spectra[spectra["rank"].notna()].groupby("layer"):
        setup = view.setup(layer)
        shape = (halves * setup["d_ff"], setup["d_model"])
        random = random_rank(shape, SIGNIFICAND_BITS[setup["dtype"]])
        lost = min(shape) - random
        for _, row in rows[min(shape) - rows["rank"].astype(float) > lost + 3 * lost**0.5].iterrows():
            facts = f"rank {row['rank']:.0f}, random matrices {number(random)}"
            named.append(f"expert {row['expert']} of layer {layer} ({facts})")
            cells.append((int(layer), int(row["expert"])))
    if not named:
        return []
    text = f"{capital(counted(len(named), 'rank-deficient expert'))}: {examples(named)}."
    layer, expert = cells[0]
    return [Finding(text, tab="overview", colour="effective_rank", layer=layer, expert=expert)]
