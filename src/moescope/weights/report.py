"""Report on a scan: views of its runs, key numbers, findings, sections, the map and the expert pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.marks import chosen, standard_rows
from moescope.plotting.style import capital, chance_words, counted, listed, named_layers, number, span
from moescope.reporting.findings import Number, Said, key_numbers, say, say_all
from moescope.reporting.pack import plain_table, table_payload
from moescope.reporting.page import run_names
from moescope.reporting.untrusted import plot_words
from moescope.reporting.views import drawable, shown_table
from moescope.run import Run
from moescope.types import Coverage
from moescope.verb import (
    Finding,
    KeyNumber,
    LayerCards,
    Measure,
    Payload,
    Section,
    Selection,
    Strip,
    Summary,
    Tables,
)
from moescope.weights.figures import (
    ACROSS_VIEWS,
    ALIGNMENT,
    COMPLETE,
    MORE,
    NAMED,
    OF_LAYER,
    SIMILARITY,
    STEPS,
    SUBSPACES,
)
from moescope.weights.tables import TABLES, VIEW

NAMED_AT_MOST = 5  # examples spelled out in one sentence
NEAREST = 3  # experts on the page of one
FEWEST_TESTED = 4  # experts: 3 have 6 pairings, so that no p can be below 1/6
VERDICTS = TABLES["alignment_tests"].column("verdict").names
ONE_DIRECTION = "k == 1 and (cosine > 0.7 or cosine < -0.7)"
COLLAPSED = 0.7  # least overlap of the leading subspaces over all k
FINDS = ("finds its own expert", "does not find its own expert")
# fmt: off
SMALL_K = "verdict == 'identifying' and last_good_k <= last_k / 4 and last_accuracy < 0.5"
COMMON = "router == 'raw' and common_share > 0.25 and common_share > 2 * common_share_chance"
OF_PAIRING = [
    Number("alignment_tests", "best_accuracy", pick="median", name="Accuracy at best k, median layer"),
]
OF_COSINES = [Number("orthogonality", "mean_abs", where="k == 1", pick="median", name="Mean |cos| of experts, median layer")]
OF_RANKS = [Number("spectra_layers", "effective_rank_median", pick="median", name="Effective rank, median layer")]
COMMON_VECTOR = Said("alignment_tests", "common_share", where=COMMON, pick="largest", text="Router rows share a vector in {rows}: {span} of a row's squared norm (random rows: {common_share_chance}). Softmax ignores it; --router auto removes it.", figure="identification_by_k")
OF_ROWS = [
    Said("alignment_tests", "last_accuracy", where=SMALL_K, pick="smallest", text="Experts are identified at small k only in {rows}; {place}: up to k = {last_good_k}, at k = {last_k} accuracy is {value}.", figure="identification_by_k"),
    Said("alignment_tests", "q_lower", where="q_lower <= 0.05", pick="smallest", text="Router rows avoid their own experts in {rows}; {place}: most at k = {lowest_k}, lower-tail p = {p_lower} (corrected for layers: {value}).", figure="alignment_by_k"),
    Said("alignment_tests", "hub_rows", where="hub_p <= 0.05", pick="largest", text="An expert is the best match of more router rows than chance allows in {rows}: expert {hub_expert} of {place}, {hub_rows} rows (one is expected; corrected p = {hub_p}). A direction common to all rows has the same effect; the centered view removes it.", figure="pair_matrix"),
]
AMBIGUITY = Said("ambiguity", "absolute_score", only="beats_chance", pick="largest", text="Ambiguity, absolute score: highest in {place}, {value} ({chance}); {count} of {total} layers beat chance and are ranked.", otherwise="Ambiguity: no layer is ranked, none beats chance ({chance}).", figure="identification_by_layer")
RANKS = Said("spectra_layers", "effective_rank_median", pick="smallest", text="Effective rank of the {matrix} matrices, median per layer: {span}, lowest in {place}; largest rank {rank}.", figure="ranks_by_layer")
DEFICIENT = Said("spectra", "rank", only="deficient", pick="smallest", text="Rank-deficient experts: {count} of {total}; lowest {place}, rank {rank} (random matrices: {random_rank}).", tab="overview", colour="effective_rank")
OF_LAYERS = {  # columns of the table of layers
    "alignment_tests": ("verdict", "p_value", "best_k", "best_accuracy", "chance_accuracy", "p_accuracy", "q_value"),
    "ambiguity": ("absolute_score", "absolute_chance"),
    "orthogonality": ("mean_abs", "chance", "max_abs", "n_pairs_above_0_7"),
    "spectra_layers": ("effective_rank_median", "stable_rank_median", "rank"),
}
ACROSS = {
    "alignment_tests": "Tests and verdicts of every layer", "ambiguity": "Ambiguity of every layer",
    "orthogonality": "Redundancy of experts over k", "alignment_layers": "Every layer and k",
}
NOT_BY_K = {"step", "layer", "layer_name", *VIEW, "cos_squared", "n_experts", "d_model", "reference", "accuracy_chance", "random_spread", "random_std", "delta_std", "accuracy_std", "z_std"}
EXPERT_TABLE = ("expert", "align", "random_expectation", "shuffle_mean", "delta_vs_shuffle", "z_vs_shuffle", "margin", "identified")
SPECTRA_TABLE = ("expert", "effective_rank", "stable_rank", "rank", "spectral_norm", "frobenius", "condition")
THEMES = (
    ("alignment", "Router-expert alignment", ALIGNMENT),
    ("similarity", "Expert similarity", SIMILARITY),
    ("spectra", "Spectra and subspaces", SUBSPACES),
)
# fmt: on


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

    def other_order(self, layer: int) -> dict[str, Any] | None:
        """Another order of the experts that fits, if one does, from run.json."""
        of_matrix = self.setup(layer)["matrices"][self.keys["matrix"]]
        order: dict[str, Any] | None = of_matrix["routers"][self.keys["router"]]["other_order"]
        return order

    @property
    def has_rows(self) -> bool:
        """Whether the router has rows to compare with the experts."""
        return "alignment_tests" in self.tables

    @property
    def layers(self) -> list[int]:
        return sorted(int(layer) for layer in self.tables["spectra"]["layer"].unique())

    @property
    def first_cosines(self) -> pd.DataFrame:
        """Statistics of the cosines between top singular vectors; empty with one expert per layer."""
        frame = self.tables.get("orthogonality", pd.DataFrame({"k": []}))
        return frame[frame["k"] == 1]

    def verdicts(self, shown: bool = False) -> dict[str, list[int]]:
        """Verdict -> its layers; as shown "untested", where too few experts make every layer look random."""
        if not self.has_rows:
            return {}
        tests = self.tables["alignment_tests"].sort_values("layer")
        counts = self.tables["alignment_layers"].groupby("layer")["n_experts"].first()
        few = (tests["layer"].map(counts) < FEWEST_TESTED) & (tests["verdict"] == "chance")
        verdicts = tests["verdict"].mask(few, "untested") if shown else tests["verdict"]
        groups = tests.groupby(verdicts)["layer"]
        return {str(verdict): [int(layer) for layer in layers] for verdict, layers in groups}

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
        return [name for name in TABLES if name not in ("spectra_layers", "spectrum")]  # newer than the rest
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


def chosen_views(run: Run, selection: Selection) -> list[View]:
    """The views with the selected step, matrix and router; None selects all values of a key."""
    wanted = {key: value for key, value in selection.values.items() if value is not None}
    return [
        view
        for view in views(run)
        if all(view.keys.get(key, value) == value for key, value in wanted.items())
    ]


def select(run: Run, selection: Selection) -> Tables:
    """Tables of the first view with the selected values, or of all of them where a value is None."""
    found = chosen_views(run, selection)
    tables = stack(found) if None in selection.values.values() else found[0].tables if found else {}
    layer = Selection({key: value for key, value in selection.values.items() if key == "layer"})
    return {name: layer.rows(frame) for name, frame in tables.items()}


def stack(parts: list[View], labels: list[str] | None = None) -> Tables:
    """The tables that all of several views have, with a column `view`: its label.

    Views that differ in the router alone share tables without it: these stand there once, router unnamed.
    """
    stacked = {}
    for name, table in TABLES.items():
        frames: dict[Any, pd.DataFrame] = {}
        for view, label in zip(parts, labels or [view.label for view in parts], strict=True):
            key: Any = label
            if "router" not in table.keys:
                key = (view.run.path, view.keys["step"], view.keys["matrix"])
                label = label.replace(f", {view.keys['router']} router", "")
            if name in view.tables and key not in frames:
                frames[key] = view.tables[name].assign(view=label)
        if frames and all(name in view.tables for view in parts):
            stacked[name] = pd.concat(frames.values(), ignore_index=True)
    return stacked


# --- the summary


def summary(run: Run) -> Summary:
    """Verdict, key numbers and findings of a scan, and its table of layers per view."""
    all_views = views(run)
    found = {view.label: findings(view) for view in all_views}
    others = {
        view.label: Summary(
            [], found[view.label], numbers_of(view), verdict=verdict(view), lead=lead(view), view=view.label
        )
        for view in all_views[1:]
    }
    details = {
        "views": [
            {
                "view": view.label,
                "verdicts": view.verdicts(),
                "findings": found[view.label],
                "most_ambiguous": most_ambiguous(view),
                "collapsed_pairs": collapsed_pairs(view),
            }
            for view in all_views
        ],
        "fallbacks": run.info.get("fallbacks", 0),
    }
    tables = [
        Section(
            "layer-table",
            "Layers",
            tables=[layer_table(view)],
            view=view.label,
            findings=found[view.label] if index else [],
        )
        for index, view in enumerate(all_views)
    ]
    several = len(run.info["checkpoints"]) > 1
    coverage = [
        item.line() + (f" (step {checkpoint['step']})" if several else "")
        for item, checkpoint in zip(coverages(run), run.info["checkpoints"], strict=True)
    ]
    return Summary(
        coverage,
        headline(all_views, found[all_views[0].label]),
        numbers_of(all_views[0]),
        tables,
        details=details,
        verdict=verdict(all_views[0]),
        lead=lead(all_views[0]),
        view=all_views[0].label if others else "",
        views=others,
    )


def verdict(view: View) -> Finding:
    """Whether router rows match their own experts, and in how many layers."""
    if not view.has_rows:
        missing = next(words for item in coverages(view.run) if (words := item.without_rows()))
        return Finding(capital(f"{missing}."), figure="ranks_by_layer")
    shown, (count, level, _) = view.verdicts(shown=True), claims(view)
    layers, place = counted(len(view.layers), "layer"), "identification_by_k"
    if set(shown) == {"untested"}:
        text = "Too few experts to test whether routers match them: 3 experts have 6 pairings."
    elif not count:
        text = f"Routers look random: 0 of {layers} above chance."
    else:
        chance = "" if np.isnan(level) else f" (any by chance: p ≤ {number(level)})"
        pairs = named_layers(shown["identifying"]) if "identifying" in shown else "no layer"
        text = f"Routers match their experts in {count} of {layers}, one-to-one in {pairs}{chance}."
        if "permuted" in shown:
            text += f" Experts are stored in another order in {named_layers(shown['permuted'])}."
            place = "pair_matrix"
    return Finding(text, figure=place)


def lead(view: View) -> list[Section]:
    """Return the pairing of the first layer whose experts are stored in another order; else the map leads."""
    permuted = view.verdicts().get("permuted", [])[:1] if view.has_rows else []
    figures = drawable([NAMED["pair_matrix"]], dict(view.by_layer())[permuted[0]]) if permuted else []
    return [Section("lead", "", figures=figures)] if figures else []


def coverages(run: Run) -> list[Coverage]:
    return [
        Coverage(**{**item, "experts_per_layer": tuple(item["experts_per_layer"])})
        for item in run.info["coverage"]
    ]


def numbers_of(view: View) -> list[KeyNumber]:
    """The numbers that lead the overview, with their chance levels."""
    numbers = []
    if view.has_rows:
        found, n, (count, level, word) = view.verdicts(), len(view.layers), claims(view)
        identifying, permuted = (len(found.get(name, [])) for name in ("identifying", "permuted"))
        unit = f"of {n}, {identifying} identifying"
        unit += f", {permuted} in another order" if permuted else ""
        chance = None if np.isnan(level) else level
        named = "Layers above chance"
        numbers = [KeyNumber(named, count, chance, unit, word, "chance of one or more, at most", n)]
    numbers += key_numbers([*OF_PAIRING, *OF_COSINES], view.tables, TABLES)
    if len(cosines := view.first_cosines):
        collapsed = len(collapsed_pairs(view))
        expected, pairs = (cosines[name].sum() for name in ("expected_above_0_7", "n_pairs"))
        of, word = (f"of {pairs:,.0f}" if pairs else ""), "redundant" if collapsed else "distinct"
        chance = float(expected) if pairs else None
        numbers.append(KeyNumber("Collapsed expert pairs", collapsed, chance, of, word))
    return [*numbers, *key_numbers(OF_RANKS, view.tables, TABLES)]


def claims(view: View) -> tuple[int, float, str]:
    """Layers above chance; the largest probability of any where rows are random; a word for their number."""
    found = view.verdicts()
    count = sum(len(layers) for verdict, layers in found.items() if verdict != "chance")
    level = float(view.tables["alignment_tests"]["false_calls"].max())
    if 2 * len(found.get("identifying", [])) > len(view.layers):
        return count, level, "aligned"
    return count, level, "beyond chance" if count else "at chance"


def most_ambiguous(view: View) -> list[dict[str, Any]]:
    """The three most ambiguous of the layers that beat chance, by the absolute score."""
    if not view.has_rows:
        return []
    rows = view.tables["ambiguity"]
    ranked = rows[rows["beats_chance"].eq(True)].sort_values(
        ["absolute_score", "layer"], ascending=[False, True]
    )
    ranked = ranked.head(3)[["layer", "absolute_score", "ambiguity_score", "level"]].astype(object)
    found: list[dict[str, Any]] = ranked.where(ranked.notna(), None).to_dict("records")
    return found


def layer_table(view: View) -> Payload:
    """One row per layer that links to its section, every number with its chance level."""
    tables = {**view.tables, "orthogonality": view.first_cosines}
    skipped = "spectra_layers" if view.has_rows else ""
    shown = {
        name: columns for name, columns in OF_LAYERS.items() if len(tables.get(name, ())) and name != skipped
    }
    parts = [tables[name].set_index("layer")[list(columns)] for name, columns in shown.items()]
    cells = pd.concat(parts, axis=1).sort_index().astype(object)
    for verdict, layers in view.verdicts(shown=True).items():
        cells.loc[layers, "verdict"] = VERDICTS[verdict]
        if verdict == "permuted":
            cells.loc[layers, "p_value"] = tables["alignment_tests"].set_index("layer")["p_order"]
    heads = [("layer", "layer", "int")]
    for name, columns in shown.items():
        table = TABLES[name]
        heads += [(table.key(column), table.label(column), table.column(column).kind) for column in columns]
    rows = [[layer, *row] for layer, row in zip(cells.index, cells.to_numpy().tolist(), strict=True)]
    return plain_table("layers_at_a_glance", "Layers at a glance", heads, rows)


# --- findings


def headline(all_views: list[View], of_first: list[str]) -> list[str]:
    """The first view's findings, and where other views of the run differ from it significantly.

    The view of the same matrix with other router rows stands right after the first finding.
    """
    first, *rest = all_views
    sentences, judged = list(of_first), rest if first.has_rows else []
    if judged:
        text = f"{capital(first.label)}: {lower(sentences[0])}"
        sentences[0] = Finding(text, figure="identification_by_k")
    tests = {view.label: view.tables["alignment_tests"] for view in all_views if first.has_rows}
    differing = {view.label: differing_layers(tests[first.label], tests[view.label]) for view in judged}
    others = [view for view in judged if differing[view.label]]
    for view in others[:NAMED_AT_MOST]:
        text = f"{capital(view.label)} differs in {named_layers(differing[view.label])}: "
        text += lower(verdict(view))
        same_matrix = all(view.keys[key] == first.keys[key] for key in ("step", "matrix"))
        if same_matrix:
            text += " A softmax ignores a vector common to all router rows: the centered view counts."
        finding = Finding(text, figure="identification_by_k", scan=view.label)
        sentences.insert(1 if same_matrix else len(sentences), finding)
    for view in {view.keys["matrix"]: view for view in reversed(rest)}.values():
        found = redundancy_finding(view) if "similarity" in view.tables else say(RANKS, view.tables, TABLES)
        if found and view.keys["matrix"] != first.keys["matrix"]:
            text = f"{capital(view.keys['matrix'])} matrices: {lower(found)}"
            sentences.append(Finding(text, **found.place, scan=view.label))
    counts = (len(judged) - len(others), "no verdict differs significantly from " + first.label)
    more = (len(others) - NAMED_AT_MOST, "other verdicts; see Side by side")
    for count, words in (counts, more):
        if count > 0:
            text = f"{counted(count, 'other view')}: {words}."
            sentences.append(Finding(text, figure="identification_by_layer"))
    return sentences


def differing_layers(one: pd.DataFrame, other: pd.DataFrame) -> list[int]:
    """Layers with a claim in one view where the other, even before the correction, suggests none.

    Both are alignment_tests of a view. Two claims differ if one of them is that of another order.
    """
    a, b = (tests.set_index("layer").sort_index() for tests in (one, other))
    claimed_a, claimed_b = a["verdict"] != "chance", b["verdict"] != "chance"
    suggested_a, suggested_b = (tests["suggested"].fillna(True).astype(bool) for tests in (a, b))
    alone = (claimed_a & ~suggested_b) | (claimed_b & ~suggested_a)
    orders = claimed_a & claimed_b & ((a["verdict"] == "permuted") != (b["verdict"] == "permuted"))
    return [int(layer) for layer in a.index[alone | orders]]


def lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def examples(items: list[str], most: int = NAMED_AT_MOST) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(items[:most])}{more}"


def findings(view: View) -> list[str]:
    """The view's findings, most important first, each with its chance level."""
    tables = view.tables
    alike = [redundancy_finding(view)] if "similarity" in tables else []
    if not view.has_rows:
        missing = next(words for item in coverages(view.run) if (words := item.without_rows()))
        return [capital(f"{missing}."), *alike, *say_all([RANKS, DEFICIENT], tables, TABLES)]
    hint = [] if "centered" in view.run.info["arguments"]["router"] else [COMMON_VECTOR]
    return [
        Finding(verdict_sentence(view), figure="identification_by_k"),
        *say_all(hint, tables, TABLES),
        *order_findings(view),
        *say_all(OF_ROWS, tables, TABLES),
        *alike,
        *say_all([AMBIGUITY, DEFICIENT], tables, TABLES),
    ]


def verdict_sentence(view: View) -> str:
    """Which layers are above chance, and how strongly."""
    shown = view.verdicts(shown=True)
    parts = [f"{words}: {named_layers(shown[name])}" for name, words in VERDICTS.items() if name in shown]
    which = capital("; ".join(parts))
    if set(shown) == {"untested"}:
        return f"{which}. 3 experts have only 6 pairings, so no p can be below 1/6."
    return f"{which}. {strength(view)}"


def strength(view: View) -> str:
    """Best accuracy and p of the layers that beat chance, or of all layers where none does."""
    tests = view.tables["alignment_tests"]
    beat = tests[tests["verdict"].isin(["identifying", "non_random"])]
    rows = tests if beat.empty else beat
    level = rows["chance_accuracy"]  # unknown in older runs
    chance = "" if level.isna().any() else f" (chance: {span(level)})"
    ps = rows["p_value"]
    p = f"p at least {number(ps.min())}" if beat.empty else f"p at most {number(ps.max())}"
    who = "" if beat.empty or len(beat) == len(tests) else f" of {named_layers(sorted(beat['layer']))}"
    return f"Best accuracy{who}: {span(rows['best_accuracy'])}{chance}, {p} against {null_words(rows)}."


def null_words(tests: pd.DataFrame) -> str:
    """ "all 40,320 pairings"."""
    counts = tests["n_pairings"].unique()
    count = f"{counts[0]:,} " if len(counts) == 1 else ""
    return f"{'all' if tests['exact'].all() else 'sampled'} {count}pairings"


def order_findings(view: View) -> list[str]:
    """Layers whose router rows and experts fit one to one in another order."""
    return [
        Finding(order_words(layer, view.other_order(layer) or {}), figure="pair_matrix", layer=layer)
        for layer in view.verdicts().get("permuted", [])
    ]


def order_words(layer: int, order: dict[str, Any], most: int = 8) -> str:
    """Which router rows fit which other experts; beyond `most`, a few of them."""
    pairs = zip(order["routers"], order["experts"], strict=True)
    moved = [f"router row {row} fits expert {expert}" for row, expert in pairs if expert not in (None, row)]
    shown = listed(moved) if len(moved) <= most else examples(moved)
    return (
        f"Layer {layer}: router rows and experts fit one to one, but not in the stored order; at "
        f"k = {order['k']}, {shown} (p ≤ {number(order['p'])})."
    )


def close_pairs(tables: Tables) -> list[dict[str, Any]]:
    """Pairs that share their leading direction (|cos| above 0.7), the closest first.

    `overlap` is the least over all k; `collapsed` where it is high too: one direction makes no equal experts.
    """
    if "similarity" not in tables:
        return []
    keys = {"layer": int, "expert_a": int, "expert_b": int}
    close = tables["similarity"].query(ONE_DIRECTION).sort_values("cosine", key=lambda c: -c.abs())
    least = tables["similarity"].merge(close[[*keys]]).groupby([*keys])["overlap"].min().rename("least")
    close = close.join(least, on=[*keys])
    kinds = {**keys, "cosine": float, "least": float}
    pairs = [{name: kind(row[name]) for name, kind in kinds.items()} for _, row in close.iterrows()]
    return [{**pair, "collapsed": not pair["least"] <= COLLAPSED} for pair in pairs]


def collapsed_pairs(view: View) -> list[dict[str, Any]]:
    return [pair for pair in close_pairs(view.tables) if pair["collapsed"]]


def pair_words(pair: dict[str, Any]) -> str:
    cosine, overlap = number(abs(pair["cosine"])), number(pair["least"])
    experts = f"L{pair['layer']} E{pair['expert_a']} and E{pair['expert_b']}"
    return f"{experts} (|cos| {cosine}, overlap from {overlap})"


def redundancy_finding(view: View) -> Finding:
    rows, close = view.first_cosines, close_pairs(view.tables)
    collapsed, sharing = (
        [pair_words(pair) for pair in close if pair["collapsed"] == same] for same in (True, False)
    )
    place = {"figure": "cosine_heatmap", "layer": close[0]["layer"]} if close else {}
    redundant, pairs, expected = (
        rows[name].sum() for name in ("n_pairs_above_0_3", "n_pairs", "expected_above_0_3")
    )
    start = f"Collapsed experts: {examples(collapsed, 2) if collapsed else 'none'}"
    if sharing:
        start += f"; sharing only the leading direction: {counted(len(sharing), 'pair')}, most {sharing[0]}"
    text = f"{start}; |cos| is above 0.3 in {int(redundant):,} of {int(pairs):,} pairs (random directions: "
    text += f"{number(expected)} pairs)." if pairs else "unknown)."
    return Finding(text, **{"figure": "orthogonality_by_layer", **place})


# --- sections


def sections(run: Run, selection: Selection) -> list[Section]:
    """Per view: figures across layers by theme, one section per layer, then further figures and tables."""
    parts = []
    for view in chosen_views(run, selection):
        for anchor, title, specs in THEMES:
            if figures := drawable(specs, view.tables):
                parts.append(Section(anchor, title, "", figures, view=view.label))
        parts += [
            layer_section(view, layer, tables)
            for layer, tables in view.by_layer()
            if selection.values.get("layer", layer) == layer
        ]
        figures = drawable(MORE, view.tables)
        tables = [across_table(view, name) for name in ACROSS if name in view.tables]
        line = f"{counted(len(figures), 'figure')} and {counted(len(tables), 'table')} on all layers"
        parts.append(Section("more", "More", "", figures, tables, view=view.label, folded=True, line=line))
    return parts


def across_table(view: View, name: str) -> Payload:
    frame = view.tables[name]
    columns = [column for column in TABLES[name].columns if column not in {"step", "layer_name", *VIEW}]
    if name == "ambiguity":  # the absolute score leads
        frame = frame.sort_values(["absolute_score", "layer"], ascending=[False, True])
        columns = list(dict.fromkeys(["layer", "absolute_score", "absolute_chance", *columns]))
    return shown_table(TABLES[name], frame, columns, ACROSS[name])


def layer_section(view: View, layer: int, tables: Tables) -> Section:
    """A layer's section: verdict, setup, tables and figures, folded to one line."""
    line, badge, words, shown = (pairing_parts if view.has_rows else expert_parts)(view, layer, tables)
    complete = drawable(COMPLETE, tables)
    return Section(
        f"layer-{layer}",
        f"Layer {layer}",
        "\n".join(words),
        drawable([*OF_LAYER, NAMED["overlap_by_k"]], tables),
        shown,
        facts=setup_facts(view, layer, tables),
        sections=[Section("complete", "Complete view", "", complete)] if complete else [],
        view=view.label,
        layer=layer,
        line=line,
        badge=badge,
    )


Parts = tuple[str, tuple[str, str] | None, list[str], list[Payload]]  # line, badge, words, tables


def pairing_parts(view: View, layer: int, tables: Tables) -> Parts:
    """The identification verdict of one layer in words, with the chance level of every number."""
    test = tables["alignment_tests"].iloc[0]
    verdict = next(name for name, layers in view.verdicts(shown=True).items() if layer in layers)
    accuracy = f"{number(test['best_accuracy'])} at k = {test['best_k']}"
    line = (
        f"best accuracy {accuracy}{chance_words(test['chance_accuracy'])}, p = {number(test['p_accuracy'])}"
    )
    chance = chance_words(test["chance_accuracy"], "random pairings, each at its best k")
    words = [
        f"Layer {layer}: {VERDICTS[verdict]}. Best argmax accuracy: {accuracy}{chance}; "
        f"p = {number(test['p_accuracy'])}.",
        f"Mean alignment over all k: p = {number(test['p_value'])} against "
        f"{null_words(tables['alignment_tests'])} (q = {number(test['q_value'])} over layers and views); "
        f"lower tail p = {number(test['p_lower'])}.",
    ]
    if test["verdict"] == "permuted" and (order := view.other_order(layer)):
        line = f"fits in another order at k = {order['k']}, p ≤ {number(order['p'])}"
        words.append(order_words(layer, order, most=len(order["routers"])))
    by_k, best = TABLES["alignment_layers"], tables["alignment"]
    best = best[best["k"] == test["best_k"]]
    shown = [
        table_payload(
            by_k,
            tables["alignment_layers"],
            [name for name in by_k.columns if name not in NOT_BY_K],
            "Every k (means over experts)",
        ),
        table_payload(TABLES["alignment"], best, EXPERT_TABLE, f"Every expert at k = {test['best_k']}"),
    ]
    return line, (test["verdict"], VERDICTS[verdict]), words + collapsed_words(tables), shown


def expert_parts(view: View, layer: int, tables: Tables) -> Parts:
    """Parts of a layer whose router has no rows."""
    ranks = tables.get("spectra_layers", pd.DataFrame())
    line = ""
    if len(ranks):
        row = ranks.iloc[0]
        line = f"effective rank {number(row['effective_rank_median'])} of {number(row['rank'])}"
    words = [f"Layer {layer} has one block: its spectrum is all there is to show."]
    cosines = view.first_cosines
    if len(cosines):
        first = cosines[cosines["layer"] == layer].iloc[0]
        mean, chance = number(first["mean_abs"]), number(first["chance"])
        collapsed = counted(sum(pair["collapsed"] for pair in close_pairs(tables)), "collapsed pair")
        line = f"mean |cos| {mean} (chance: {chance}), {collapsed}, {line}"
        words = [
            f"Top singular vectors of two experts of layer {layer}: mean |cos| {mean} (chance: {chance}), "
            f"largest {number(first['max_abs'])}.",
            *collapsed_words(tables),
        ]
    title = "Every expert" if len(cosines) else "Its spectrum in numbers"
    frame = tables["spectra"].sort_values("expert")
    return line, None, words, [table_payload(TABLES["spectra"], frame, SPECTRA_TABLE, title)]


def collapsed_words(tables: Tables) -> list[str]:
    """One sentence on the layer's closest pairs, at most eight; nothing if there are none."""
    pairs = close_pairs(tables)[:8]
    kinds = {True: "Collapsed pairs", False: "Pairs that share only their leading direction"}
    return [
        f"{words}: {listed(named)}."
        for same, words in kinds.items()
        if (named := [pair_words(pair) for pair in pairs if pair["collapsed"] == same])
    ]


def setup_facts(view: View, layer: int, tables: Tables) -> dict[str, str]:
    """How the layer's numbers were made."""
    setup, info = view.setup(layer), view.run.info
    of_matrix = setup["matrices"][view.keys["matrix"]]
    model = next(item for item in info["checkpoints"] if item["step"] == view.keys["step"])
    folded = ", norm folded in" if view.keys["fold_norm"] else ""
    routed: dict[str, str] = {}
    if view.has_rows:
        share = pd.Series(setup["centered_share"], dtype=float)
        routed = {
            "k grid": ", ".join(map(str, of_matrix["k"])),
            "shuffle null": "closed form",
            "pairing null": null_words(tables["alignment_tests"]),
            "row share not common to all": f"{number(share.min())} to {number(share.max())} (‖rᵢ − "
            "mean‖/‖rᵢ‖)",
        }
    rows = {
        "model": model["path"],
        "block": setup["layer_name"],
        "step": view.keys["step"],
        "matrix": view.keys["matrix"] + ("" if view.has_rows else folded),
        **({"router rows": view.keys["router"] + folded} if view.has_rows else {}),
        "dtype": f"{setup['dtype']} experts"
        + (f", {setup['router_dtype']} router" if view.has_rows else "")
        + "; fp64 from the Gram matrix on",
        "d_model": setup["d_model"],
        "d_ff": setup["d_ff"],
        "experts (n)": setup["n_experts"],
        "top_k, scoring": f"{setup['top_k'] or 'not stated'}, {setup['scoring']}",
        **routed,
        "seed": setup["seed"],
        "precision": f"{info['arguments']['precision']}; SVD fallback for {of_matrix['fallbacks']} of "
        f"{setup['n_experts']} experts",
        "skipped experts": ", ".join(map(str, of_matrix["skipped_experts"])) or "none",
        "time": f"{number(setup['seconds'])} s on {info['device']}",
    }
    return {name: str(value) for name, value in rows.items()}


def overlay(runs: list[Run]) -> list[Section]:
    """All views of all scans side by side, and each view with several steps over its steps."""
    names = run_names(runs)
    all_views = [view for run in runs for view in views(run)]
    prefix = {run.path: f"{plot_words(names[run.path])} · " if len(runs) > 1 else "" for run in runs}
    parts: list[Section] = []
    groups: dict[tuple[Any, ...], list[View]] = {}
    for view in all_views:
        groups.setdefault((view.run.path, *(view.keys[key] for key in VIEW)), []).append(view)
    for (path, *_), group in groups.items():
        if figures := drawable(STEPS, stack(group)):
            title = f"Over steps: {prefix[path]}{view_words(group[0].keys)}"
            parts.append(Section(f"steps-{len(parts)}", title, "", figures))
    figures = []
    for spec in ACROSS_VIEWS:
        alike = [view for view in all_views if spec.can_draw(view.tables)]
        if len(alike) > 1:
            labels = [f"{prefix[view.run.path]}{view.label}" for view in alike]
            figures.append((spec, stack(alike, labels)))
    if figures:
        parts.append(Section("views", "Every view", "", figures))
    return [Section("side-by-side", "Side by side", sections=parts)] if parts else []


def guide(run: Run) -> list[str]:
    """How to read a scan."""
    if "alignment_tests" in run.tables:
        return [
            "A router row rᵢ decides when expert i is used; the expert's matrix Wᵢ decides which directions "
            "of its input it responds to. If training made them a pair, rᵢ lies in the leading singular "
            "directions of Wᵢ, more than in those of other experts. M(k)[i, j] is the share of rᵢ in the "
            "first k directions of Wⱼ; every alignment number follows from that matrix.",
            "Alignment grows with k for any weights, so it is shown with the level of a random direction. "
            "Router rows and experts of a layer share directions, so exceeding that level does not show a "
            "pairing: the pairing is tested against all other pairings of the layer, corrected for multiple "
            "k. z has a ceiling; judge by the p-value, not by z.",
        ]
    pairs = [
        "Experts are compared by the leading singular directions of their matrices: |cos| is of the first "
        "ones, overlap of the subspaces that the first k span. Two unrelated experts have |cos| near "
        "√(2/(πd)) and overlap near k/d."
    ]
    ranks = "An effective rank far below the rank means that few directions carry most of a matrix."
    return [*(pairs if "similarity" in run.tables else []), ranks]


# --- a scan's part of the overview map and of the expert pages: alignment, margin, redundancy, spectrum

# fmt: off
MAP: tuple[tuple[Any, ...], ...] = (  # name, title, table, column, rows, more columns of the map, what a row shows, limits
    ("alignment", "Alignment of router rows (z)", "alignment", "z_vs_shuffle", "best", {"beyond": "identified"}, FINDS, (-6.0, 6.0), "Alignment of a router row with its own expert at the layer's best k, in standard deviations over all pairs of the layer (chance: 0)."),
    ("margin", "Alignment margin", "alignment", "margin", "best", {"beyond": "identified"}, FINDS, None, "Alignment with its own expert, minus the highest with another; positive: the row finds its own."),
    ("redundancy", "Similarity to the nearest expert", "spectra", "nearest_cosine", "", {"beyond": "nearest_beyond", "cluster": "place"}, ("beyond chance", "within chance"), (0.0, 1.0), "Largest |cosine| of an expert's top singular vector with another expert's. Above 0.7: severe redundancy."),
    ("effective_rank", "Effective rank", "spectra", "effective_rank", "", {}, ("", ""), None, "How many directions carry the expert's matrix: exp of the entropy of its singular values."),
)
# fmt: on


def measures(run: Run) -> list[Measure]:
    """Alignment first, then margin, redundancy and effective rank, for every view."""
    return [measure for view in views(run) for measure in view_measures(view)]


def view_measures(view: View) -> Iterator[Measure]:
    for name, title, table, column, where, more, outline, limits, caption in MAP:
        if table not in view.tables:
            continue
        schema = TABLES[table]
        rows = standard_rows(chosen(view.tables[table], where, schema), schema, column)
        if rows.empty:
            continue
        known = {"value": rows["_value"]}
        if rows["_noise"].notna().any():  # a margin of 0 is no preference, not what chance gives
            known |= {"chance": rows["_chance"], "noise": rows["_noise"]}
        known |= {word: rows[source].astype(float) for word, source in more.items()}
        known = {word: values for word, values in known.items() if values.notna().any()}
        frame = rows[["layer", "expert"]].assign(**known)
        signed = column in ("z_vs_shuffle", "margin")
        if signed and limits is None:
            widest = float(rows["_value"].abs().max()) or 1.0
            limits = (-widest, widest)
        unit = f"of {number(rows['rank'].max())}" if name == "effective_rank" else ""
        middle = 0.0 if signed else None
        yield Measure(name, title, frame, unit, caption, middle, False, limits, view.label, outline=outline)


def strips(run: Run) -> list[Strip]:
    """Accuracy at the best k and ambiguity of every layer beside the map."""
    found = []
    for view in views(run):
        for table, column, title in (
            ("alignment_tests", "best_accuracy", "accuracy"),
            ("ambiguity", "absolute_score", "ambiguity"),
        ):
            if table in view.tables:
                rows = standard_rows(view.tables[table], TABLES[table], column)
                frame = rows[["layer"]].assign(value=rows["_value"], chance=rows["_chance"])
                if "verdict" in rows:
                    frame["word"] = rows["verdict"].str.replace("_", " ")
                most = TABLES[table].quantity(column).most
                found.append(
                    Strip(
                        column, title, frame, view.label, most=most if isinstance(most, int | float) else None
                    )
                )
    return found


def experts(run: Run) -> Iterator[LayerCards]:
    """Alignment over k with the null band, nearest experts and spectrum of every expert, layer by layer."""
    for view in views(run):
        for layer, tables in view.by_layer():
            yield LayerCards(layer, layer_cards(tables), view.label)


def layer_cards(tables: Tables) -> dict[int, list[Payload]]:
    blocks: dict[int, list[Payload]] = {}

    def add(frame: pd.DataFrame, block: dict[str, Any], **columns: np.ndarray) -> None:
        for expert, at in frame.groupby("expert").indices.items():
            of_expert = {name: values[at].tolist() for name, values in columns.items()}
            blocks.setdefault(int(expert), []).append({**block, **of_expert})

    if "alignment" in tables:
        rows = tables["alignment"].sort_values("k")
        mean, spread = rows["shuffle_mean"].to_numpy(float), rows["shuffle_std"].to_numpy(float)
        low, high = (np.clip(mean + side * spread, 0, 1) for side in (-2, 2))
        curve = {"kind": "curve", "title": "Alignment over k", "logarithmic": True}
        words = {"labels": ["k", "alignment"], "band": "random pairings, mean ± 2 sd"}
        x, y = rows["k"].to_numpy(), rows["align"].to_numpy()
        add(rows, {**curve, **words}, x=x, y=y, low=low, high=high)
    if "similarity" in tables and len(tables["similarity"]):
        pairs = tables["similarity"].query("k == 1")
        pairs = pairs[["expert_a", "expert_b"]].assign(cosine=pairs["cosine"].abs())
        sides = (["expert", "other", "cosine"], ["other", "expert", "cosine"])  # each pair from both
        both = pd.concat([pairs.set_axis(names, axis=1) for names in sides])
        both = both.sort_values("cosine", ascending=False, kind="stable").groupby("expert").head(NEAREST)
        nearest = both[["other", "cosine"]].astype(object).to_numpy()
        add(both, {"kind": "experts", "title": "Nearest experts", "unit": "|cos|"}, rows=nearest)
    if "spectrum" in tables:
        rows = tables["spectrum"].sort_values("place")
        curve = {"kind": "curve", "title": "Singular values", "logarithmic": True}
        words = {"labels": ["index", "singular value"]}
        add(rows, {**curve, **words}, x=rows["place"].to_numpy(), y=rows["singular_value"].to_numpy())
    return blocks
