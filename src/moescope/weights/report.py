"""What the report shows of a scan: summary, sections across layers, one section per layer, several views."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from moescope.plotting.style import chance_words, counted, listed, number
from moescope.reporting.pack import plain_table, table_payload
from moescope.reporting.page import run_names
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.spectral.subspaces import COLLAPSED
from moescope.verb import KeyNumber, Payload, Section, Selection, Summary, Tables
from moescope.weights.figures import ACROSS_LAYERS, ONE_LAYER
from moescope.weights.figures_identification import (
    ACROSS_STEPS,
    ACROSS_VIEWS,
    VERDICT_WORDS,
    ranked_layers,
    shown_verdict,
)
from moescope.weights.figures_layer import COMPLETE_VIEW
from moescope.weights.figures_redundancy import d_model_by_layer, share_above
from moescope.weights.report_findings import (
    View,
    collapsed_pairs,
    coverages,
    false_positives,
    findings,
    headline,
    layer_ranks,
    verdict_layers,
    view_words,
    views,
)
from moescope.weights.tables import TABLES, VIEW

NOT_BY_K = {"cos_squared", "n_experts", "d_model"}
K_TABLE = ["k", *(name for name in TABLES["alignment_layers"].values if name not in NOT_BY_K)]
EXPERT_TABLE = ["expert", "align", "random_expectation", "shuffle_mean", "delta_vs_shuffle", "z_vs_shuffle"]
EXPERT_TABLE += ["margin", "identified"]
SPECTRA_TABLE = ["expert", "effective_rank", "stable_rank", "rank", "spectral_norm", "frobenius", "condition"]
ACROSS_TABLES = {
    "alignment_tests": "Tests and verdicts of every layer",
    "ambiguity": "Ambiguity of every layer",
    "orthogonality": "Redundancy of experts over k",
    "alignment_layers": "Every layer and k",
}
PAIRING_HEADS = [
    ("layer", "layer", "int"),
    ("verdict", "verdict", "text"),
    ("p_value", "verdict p", "float"),
    ("best_k", "best k", "int"),
    ("best_accuracy", "accuracy", "float"),
    ("chance_accuracy", "chance", "float"),
    ("p_accuracy", "accuracy p", "float"),
    ("q_value", "q", "float"),
    ("absolute_score", "ambiguity", "float"),
    ("absolute_chance", "chance", "float"),
    ("mean_abs", "mean |cos|", "float"),
    ("chance", "chance", "float"),
    ("n_pairs_above_0_7", "collapsed", "int"),
]
EXPERT_HEADS = [
    ("layer", "layer", "int"),
    ("mean_abs", "mean |cos|", "float"),
    ("chance", "chance", "float"),
    ("max_abs", "largest |cos|", "float"),
    ("n_pairs_above_0_7", "collapsed", "int"),
    ("effective_rank", "effective rank", "float"),
    ("stable_rank", "stable rank", "float"),
    ("spectra.rank", "rank", "int"),
]
OF_PAIRS = ("mean_abs", "chance", "max_abs", "n_pairs_above_0_7")  # undefined for a single expert
VERDICT_NAMES = {
    "identifying": "identifies its experts",
    "non_random": "beats chance",
    "permuted": "another order",
    "chance": "at chance",
    "untested": "too few experts",
}


# --- the summary


def summary(run: Run) -> Summary:
    """Key numbers and findings of a scan, and its table of layers per view."""
    all_views = views(run)
    found = {view.label: findings(view) for view in all_views}
    details = {
        "views": [
            {
                "view": view.label,
                "verdicts": verdict_layers(view),
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
    return Summary(
        coverage_lines(run),
        headline(all_views, found[all_views[0].label]),
        key_numbers(all_views[0]),
        tables,
        details=details,
        views={view.label: (key_numbers(view), found[view.label]) for view in all_views[1:]},
    )


def coverage_lines(run: Run) -> list[str]:
    checkpoints = run.info["checkpoints"]
    several = len(checkpoints) > 1
    return [
        coverage.line() + (f" (step {checkpoint['step']})" if several else "")
        for coverage, checkpoint in zip(coverages(run), checkpoints, strict=True)
    ]


def key_numbers(view: View) -> list[KeyNumber]:
    """The numbers that lead the overview, with their chance levels."""
    numbers = []
    if view.has_rows:
        tests, layers = view.tables["alignment_tests"], view.layers
        verdicts = verdict_layers(view)
        identifying, permuted = (len(verdicts.get(name, [])) for name in ("identifying", "permuted"))
        ambiguity, word = view.tables["ambiguity"], alignment_word(view)
        accuracy, chance = tests["best_accuracy"].median(), tests["chance_accuracy"].median()
        numbers = [
            KeyNumber(
                "Layers that fit beyond chance",
                len(layers) - len(verdicts.get("chance", [])),
                false_positives(view),
                f"of {len(layers)}, {identifying} identifying"
                + (f", {permuted} in another order" if permuted else ""),
                word=word,
                reference="by chance at most",
                most=len(layers),
            ),
            KeyNumber(
                "Median best argmax accuracy",
                accuracy,
                chance,
                word="at chance" if accuracy <= chance else word,  # older runs have no chance level
                most=1.0,
            ),
            KeyNumber(
                "Mean absolute ambiguity",
                ambiguity["absolute_score"].mean(),
                ambiguity["absolute_chance"].mean(),
                word="at chance" if word == "at chance" else "below chance",
                most=1.0,
            ),
        ]
    cosines = first_cosines(view.tables)
    if len(cosines):
        pairs = view.tables["similarity"].query("k == 1").groupby("layer").size()
        widths = d_model_by_layer(view.tables)
        expected = sum(count * share_above(COLLAPSED, widths[layer]) for layer, count in pairs.items())
        collapsed = int(cosines["n_pairs_above_0_7"].sum())
        word = "redundant" if collapsed else "distinct"
        mean, chance = cosines["mean_abs"].mean(), cosines["chance"].mean()
        numbers += [
            KeyNumber("Mean |cos| between experts", mean, chance, most=1.0),
            KeyNumber("Collapsed expert pairs", collapsed, expected, f"of {pairs.sum():,}", word),
        ]
    ranks = layer_ranks(view)
    median, full = ranks["effective_rank"].median(), float(ranks["rank"].max())
    rank = KeyNumber("Median effective rank", median, unit=f"of {number(full)}", most=full)
    return [*numbers, rank]


def alignment_word(view: View) -> str:
    """One word for the layers' verdicts: aligned where most of them identify their experts.

    At chance where no more layers beat it than random layers would.
    """
    layers = verdict_layers(view)
    if sum(len(found) for verdict, found in layers.items() if verdict != "chance") <= false_positives(view):
        return "at chance"
    if 2 * len(layers.get("identifying", [])) > len(view.layers):
        return "aligned"
    return "beyond chance" if set(layers) - {"chance"} else "at chance"


def most_ambiguous(view: View) -> list[dict[str, Any]]:
    if not view.has_rows:
        return []
    columns = ["layer", "absolute_score", "ambiguity_score", "level"]
    ranked = ranked_layers(view.tables).head(3)[columns].astype(object)
    rows: list[dict[str, Any]] = ranked.where(ranked.notna(), None).to_dict("records")
    return rows


def layer_table(view: View) -> Payload:
    """One row per layer that links to its section, every number with its chance level."""
    cosines, ranks = first_cosines(view.tables), layer_ranks(view)
    if view.has_rows:
        heads = PAIRING_HEADS
        ambiguity = view.tables["ambiguity"].set_index("layer")[["absolute_score", "absolute_chance"]]
        tests = view.tables["alignment_tests"].set_index("layer")
    else:
        heads = [head for head in EXPERT_HEADS if len(cosines) or head[0] not in OF_PAIRS]
    rows = []
    for layer in view.layers:
        cells = {**ranks.loc[layer], "spectra.rank": ranks.loc[layer, "rank"]}
        cells |= dict(cosines.loc[layer]) if len(cosines) else {}
        if view.has_rows:
            facts = view.facts(layer)
            cells |= {**tests.loc[layer], **ambiguity.loc[layer], **facts}
            cells["verdict"] = verdict_name(view, layer, cells["verdict"])
            if order := facts["other_order"]:
                cells["p_value"] = order["p"]
        rows.append([layer, *(cells[name] for name, _, _ in heads[1:])])
    return plain_table("layers_at_a_glance", "Layers at a glance", heads, rows)


def first_cosines(tables: Tables) -> pd.DataFrame:
    """Layer -> statistics of the cosines between top singular vectors; empty with one expert per layer."""
    if "orthogonality" not in tables:
        return pd.DataFrame()
    return tables["orthogonality"].query("k == 1").set_index("layer")


# --- sections

THEMES = (  # anchor, title, figures; what is in none stands under "More"
    (
        "alignment",
        "Router-expert alignment",
        ("accuracy_by_k", "margin_by_k", "delta_by_k", "absolute_ambiguity_by_layer", "null_density"),
    ),
    ("similarity", "Expert similarity", ("cosine_heatmap", "orthogonality_by_layer")),
    ("spectra", "Spectra", ("spectra_by_layer", "ranks_by_layer")),
)


def sections(run: Run, selection: Selection) -> list[Section]:
    """Per view: figures across layers by theme, one section per layer, then further figures and tables."""
    parts = []
    for view in chosen_views(run, selection):
        shown = {spec.name: (spec, view.tables) for spec in view.drawable(ACROSS_LAYERS)}
        for anchor, title, names in THEMES:
            if figures := [shown.pop(name) for name in names if name in shown]:
                parts.append(Section(anchor, title, "", figures, view=view.label))
        parts += [
            layer_section(view, layer, tables)
            for layer, tables in view.by_layer()
            if selection.values.get("layer", layer) == layer
        ]
        tables = [across_table(view, name) for name in ACROSS_TABLES if name in view.tables]
        line = f"{counted(len(shown), 'figure')} and {counted(len(tables), 'table')} on all layers"
        parts.append(
            Section("more", "More", "", list(shown.values()), tables, view=view.label, folded=True, line=line)
        )
    return parts


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
    chosen = chosen_views(run, selection)
    chosen = chosen if None in selection.values.values() else chosen[:1]
    layer = Selection({key: value for key, value in selection.values.items() if key == "layer"})
    return {name: layer.rows(frame) for name, frame in stack(chosen).items()}


def stack(parts: list[View], labels: list[str] | None = None, names: Iterable[str] = tuple(TABLES)) -> Tables:
    """The named tables of several views in one, with columns `view` (its label) and `run`."""
    labels = labels or [view.label for view in parts]
    names = [name for name in names if parts and all(name in view.tables for view in parts)]
    return {
        name: pd.concat(
            [
                view.tables[name].assign(view=label, run=str(view.run.path))
                for view, label in zip(parts, labels, strict=True)
            ],
            ignore_index=True,
        )
        for name in names
    }


def across_table(view: View, name: str) -> Payload:
    frame = view.tables[name]
    columns = [column for column in TABLES[name].columns if column not in {"step", "layer_name", *VIEW}]
    if name == "ambiguity":  # the absolute score leads
        frame = frame.sort_values(["absolute_score", "layer"], ascending=[False, True])
        first = ("layer", "absolute_score", "absolute_chance")
        columns = [*first, *(column for column in columns if column not in first)]
    return table_payload(TABLES[name], frame, columns, ACROSS_TABLES[name])


def overlay(runs: list[Run]) -> list[Section]:
    """All views of all scans side by side, and each view with several steps over its steps."""
    names = run_names(runs)
    all_views = [(run, view) for run in runs for view in views(run)]
    prefix = {run.path: f"{plot_words(names[run.path])} · " if len(runs) > 1 else "" for run in runs}
    parts: list[Section] = []
    groups: dict[tuple[Any, ...], list[View]] = {}
    for run, view in all_views:
        groups.setdefault((run.path, *(view.keys[key] for key in VIEW)), []).append(view)
    for (path, *_), group in groups.items():
        specs = group[0].drawable(ACROSS_STEPS) if len(group) > 1 else []
        if figures := [(spec, stack(group, names=spec.needs)) for spec in specs]:
            title = f"Over steps: {prefix[path]}{view_words(group[0].keys)}"
            parts.append(Section(f"steps-{len(parts)}", title, "", figures))
    figures = []
    for spec in ACROSS_VIEWS:
        alike = [(run, view) for run, view in all_views if view.drawable([spec])]
        if len(alike) > 1:
            labels = [f"{prefix[run.path]}{view.label}" for run, view in alike]
            figures.append((spec, stack([view for _, view in alike], labels, spec.needs)))
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


# --- one layer


def layer_section(view: View, layer: int, tables: Tables) -> Section:
    """A layer's section: verdict, setup, tables and figures, folded to one line."""
    line, badge, words, shown = (pairing_parts if view.has_rows else expert_parts)(view, layer, tables)
    complete = [(spec, tables) for spec in view.drawable(COMPLETE_VIEW)]
    return Section(
        f"layer-{layer}",
        f"Layer {layer}",
        "\n".join(words),
        [(spec, tables) for spec in view.drawable(ONE_LAYER)],
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
    test = tables["alignment_tests"].iloc[0].to_dict()
    facts = view.facts(layer)
    best = tables["alignment"][tables["alignment"]["k"] == test["best_k"]]
    if order := facts["other_order"]:
        line = f"fits in another order at k = {order['k']}, p ≤ {number(order['p'])}"
    else:
        line = (
            f"best accuracy {number(test['best_accuracy'])} at k = {test['best_k']}"
            f"{chance_words(test['chance_accuracy'])}, p = {number(test['p_accuracy'])}"
        )
    shown = [
        table_payload(
            TABLES["alignment_layers"], tables["alignment_layers"], K_TABLE, "Every k (means over experts)"
        ),
        table_payload(TABLES["alignment"], best, EXPERT_TABLE, f"Every expert at k = {test['best_k']}"),
    ]
    badge = (test["verdict"], verdict_name(view, layer, test["verdict"]))
    return line, badge, verdict_words(view, layer, test, tables), shown


def verdict_name(view: View, layer: int, verdict: str) -> str:
    return VERDICT_NAMES[shown_verdict(verdict, view.n_experts(layer))]


def verdict_words(view: View, layer: int, test: dict[str, Any], tables: Tables) -> list[str]:
    """The identification verdict of one layer in words, with the chance level of every number."""
    n, facts = view.n_experts(layer), view.facts(layer)
    pairings = f"{'all' if test['exact'] else 'sampled'} {test['n_pairings']:,} pairings"
    chance = chance_words(test["chance_accuracy"], "random pairings, each at its best k")
    words = [
        f"Layer {layer} {VERDICT_WORDS[shown_verdict(test['verdict'], n)][0]}. Best argmax accuracy: "
        f"{number(test['best_accuracy'])} at k = {test['best_k']}{chance}; "
        f"p = {number(test['p_accuracy'])}.",
        f"Mean alignment over all k: p = {number(test['p_value'])} against {pairings} "
        f"(q = {number(test['q_value'])} over the layers scanned); lower tail p = {number(test['p_lower'])}.",
    ]
    if order := facts["other_order"]:
        pairs = zip(order["routers"], order["experts"], strict=True)
        mapped = ", ".join(f"{router} → {'?' if expert is None else expert}" for router, expert in pairs)
        words.append(
            f"Another order fits at k = {order['k']} (router row → expert, p ≤ {number(order['p'])}): "
            f"{mapped}."
        )
    return words + collapsed_words(tables)


def expert_parts(view: View, layer: int, tables: Tables) -> Parts:
    """Parts of a layer whose router has no rows."""
    ranks, cosines = layer_ranks(view).loc[layer], first_cosines(tables)
    line = f"effective rank {number(ranks['effective_rank'])} of {number(ranks['rank'])}"
    words = [f"Layer {layer} has one block: its spectrum is all there is to show."]
    if len(cosines):
        first = cosines.loc[layer]
        mean, chance = number(first["mean_abs"]), number(first["chance"])
        collapsed = counted(int(first["n_pairs_above_0_7"]), "collapsed pair")
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
    """One sentence on the layer's collapsed pairs, at most eight; nothing if there are none."""
    pairs = tables["similarity"]
    close = pairs[(pairs["k"] == 1) & (pairs["cosine"].abs() > COLLAPSED)].head(8)
    named = [f"{row.expert_a} and {row.expert_b} ({number(abs(row.cosine))})" for row in close.itertuples()]
    return [f"Collapsed pairs, by |cos| of their top singular vectors: {listed(named)}."] if named else []


def setup_facts(view: View, layer: int, tables: Tables) -> dict[str, str]:
    """How the layer's numbers were made."""
    setup, info = view.setup(layer), view.run.info
    of_matrix = setup["matrices"][view.keys["matrix"]]
    model = next(item for item in info["checkpoints"] if item["step"] == view.keys["step"])
    folded = ", norm folded in" if view.keys["fold_norm"] else ""
    routed: dict[str, str] = {}
    if view.has_rows:
        test = tables["alignment_tests"].iloc[0]
        share = pd.Series(setup["centered_share"], dtype=float)
        shuffles = f"{setup['n_shuffles']} sampled shuffles"
        routed = {
            "k grid": ", ".join(map(str, of_matrix["k"])),
            "shuffle null": "closed form" if setup["null"] == "closed" else shuffles,
            "pairing null": f"{test['n_pairings']:,} pairings, {'all' if test['exact'] else 'sampled'}",
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
