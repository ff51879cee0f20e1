"""What the report shows of a scan: summary, table of layers, and each layer's part."""

from __future__ import annotations

from typing import Any

import pandas as pd

from moescope.figures import COMPLETE_VIEW, ONE_LAYER
from moescope.plotting.style import FigureSpec, Tables, counted, listed, number
from moescope.reporting.pack import figure_payload, glance_payload, table_payload
from moescope.run import Run
from moescope.spectral.subspaces import COLLAPSED
from moescope.weights.figures_identification import VERDICT_WORDS, shown_verdict
from moescope.weights.report_findings import (
    View,
    collapsed_pairs,
    coverages,
    findings,
    headline,
    layer_ranks,
    verdict_layers,
    views,
)

K_TABLE = [
    "k", "align", "random_expectation", "effect_over_random", "shuffle_mean", "shuffle_std",
    "delta_vs_shuffle", "z_vs_shuffle", "z_ceiling", "argmax_accuracy", "assignment_accuracy",
    "alignment_margin", "positive_margin_share", "perm_z", "p_adjusted", "degenerate",
]  # fmt: skip
EXPERT_TABLE = [
    "expert", "align", "random_expectation", "shuffle_mean", "delta_vs_shuffle", "z_vs_shuffle", "margin",
    "identified",
]  # fmt: skip
SPECTRA_TABLE = ["expert", "effective_rank", "stable_rank", "rank", "spectral_norm", "frobenius", "condition"]
GLANCE = [
    ("layer", "layer", "int"),
    ("mean_abs", "mean |cos|", "float"),
    ("chance", "chance", "float"),
    ("max_abs", "largest |cos|", "float"),
    ("n_pairs_above_0_7", "collapsed", "int"),
    ("effective_rank", "effective rank", "float"),
    ("stable_rank", "stable rank", "float"),
    ("rank", "full rank", "int"),
]
OF_PAIRS = ("mean_abs", "chance", "max_abs", "n_pairs_above_0_7")  # undefined for a single expert
VERDICT_NAMES = {
    "identifying": "identifies its experts",
    "non_random": "beats chance",
    "permuted": "another order",
    "chance": "at chance",
    "untested": "too few experts",
}


def summary(run: Run) -> dict[str, Any]:
    """Key numbers and findings of a run, as plain data."""
    found = views([run])
    return {
        "run": str(run.path),
        "verb": run.info["verb"],
        "status": run.info["status"],
        "checkpoints": run.info["checkpoints"],
        "coverage": coverage_lines(run),
        "views": [
            {
                "view": view.label,
                "verdicts": verdict_layers(view),
                "findings": findings(view),
                "most_ambiguous": most_ambiguous(view),
                "collapsed_pairs": collapsed_pairs(view),
            }
            for view in found
        ],
        "findings": headline(found),
        "warnings": run.info.get("warnings", []),
        "fallbacks": run.info.get("fallbacks", 0),
        "timings": run.info["timings"],
        "tables": run.tables,
    }


def coverage_lines(run: Run) -> list[str]:
    checkpoints = run.info["checkpoints"]
    several = len(checkpoints) > 1
    return [
        coverage.line() + (f" (step {checkpoint['step']})" if several else "")
        for coverage, checkpoint in zip(coverages(run), checkpoints, strict=True)
    ]


def most_ambiguous(view: View) -> list[dict[str, Any]]:
    if not view.has_rows:
        return []
    columns = ["layer", "ambiguity_score", "absolute_score", "level"]
    ranked = view.tables["ambiguity"].sort_values("rank").head(3)[columns].astype(object)
    rows: list[dict[str, Any]] = ranked.where(ranked.notna(), None).to_dict("records")
    return rows


# --- the table of layers


def experts_glance(view: View) -> dict[str, Any]:
    """Table of layers of a router without rows: cosines with chance, ranks with the full rank."""
    cosines, ranks = first_cosines(view.tables), layer_ranks(view)
    heads = [head for head in GLANCE if len(cosines) or head[0] not in OF_PAIRS]
    rows = []
    for layer in view.layers:
        cells = {"layer": layer, **ranks.loc[layer], **(cosines.loc[layer] if len(cosines) else {})}
        rows.append([cells[name] for name, _, _ in heads])
    return glance_payload(heads, rows)


def first_cosines(tables: Tables) -> pd.DataFrame:
    """Layer -> statistics of the cosines between top singular vectors; empty with one expert per layer."""
    if "orthogonality" not in tables:
        return pd.DataFrame()
    return tables["orthogonality"].query("k == 1").set_index("layer")


# --- one layer


def drawn(spec: FigureSpec, tables: Tables, where: str) -> dict[str, Any]:
    """The figure as data; one that cannot be drawn fails the report, with its name and place."""
    try:
        return figure_payload(spec.draw(tables), spec.wide)
    except Exception as error:
        raise RuntimeError(
            f"figure {spec.name} of {where} cannot be drawn: {type(error).__name__}: {error}"
        ) from error


def layer_entry(view: View, layer: int, tables: Tables) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the layer's closed line, the payload drawn when it is opened)."""
    entry, payload = (pairing_entry if view.has_rows else experts_entry)(view, layer, tables)
    where = f"layer {layer}, {view.label}"
    return {"layer": layer, **entry}, {
        **payload,
        "setup": setup_rows(view, layer, tables),
        "figures": [drawn(spec, tables, where) for spec in view.drawable(ONE_LAYER)],
        "complete": [drawn(spec, tables, where) for spec in view.drawable(COMPLETE_VIEW)],
    }


def pairing_entry(view: View, layer: int, tables: Tables) -> tuple[dict[str, Any], dict[str, Any]]:
    test = tables["alignment_tests"].iloc[0].to_dict()
    facts = view.facts(layer)
    best = tables["alignment"][tables["alignment"]["k"] == test["best_k"]]
    if order := facts["other_order"]:
        line = f"fits in another order at k = {order['k']}, p ≤ {number(order['p'])}"
    else:
        line = (
            f"best accuracy {number(test['best_accuracy'])} at k = {test['best_k']} "
            f"(chance: {number(facts['chance_accuracy'])}), p = {number(test['p_accuracy'])}"
        )
    entry = {
        "verdict": test["verdict"],
        "verdict_name": verdict_name(view, layer, test["verdict"]),
        "line": line,
    }
    shown = [
        table_payload(
            "alignment_layers", tables["alignment_layers"], K_TABLE, "Every k (means over experts)"
        ),
        table_payload("alignment", best, EXPERT_TABLE, f"Every expert at k = {test['best_k']}"),
    ]
    return entry, {"verdict": verdict_words(view, layer, test, tables), "tables": shown}


def verdict_name(view: View, layer: int, verdict: str) -> str:
    return VERDICT_NAMES[shown_verdict(verdict, view.n_experts(layer))]


def verdict_words(view: View, layer: int, test: dict[str, Any], tables: Tables) -> list[str]:
    """The identification verdict of one layer in words, with chance beside every number."""
    n, facts = view.n_experts(layer), view.facts(layer)
    pairings = f"{'all' if test['exact'] else 'sampled'} {test['n_pairings']:,} pairings"
    words = [
        f"Layer {layer} {VERDICT_WORDS[shown_verdict(test['verdict'], n)][0]}. Best argmax accuracy: "
        f"{number(test['best_accuracy'])} at k = {test['best_k']} (chance: 1/{n} at a given k, "
        f"{number(facts['chance_accuracy'])} at a random pairing's own best k); "
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


def experts_entry(view: View, layer: int, tables: Tables) -> tuple[dict[str, Any], dict[str, Any]]:
    """Entry of a layer whose router has no rows."""
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
    spectra = table_payload("spectra", tables["spectra"].sort_values("expert"), SPECTRA_TABLE, title)
    return {"verdict": "", "verdict_name": "", "line": line}, {"verdict": words, "tables": [spectra]}


def collapsed_words(tables: Tables) -> list[str]:
    """One sentence on the layer's collapsed pairs, at most eight; nothing if there are none."""
    pairs = tables["similarity"]
    close = pairs[(pairs["k"] == 1) & (pairs["cosine"].abs() > COLLAPSED)].head(8)
    named = [f"{row.expert_a} and {row.expert_b} ({number(abs(row.cosine))})" for row in close.itertuples()]
    return [f"Collapsed pairs, by |cos| of their top singular vectors: {listed(named)}."] if named else []


def setup_rows(view: View, layer: int, tables: Tables) -> list[list[str]]:
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
    return [[name, str(value)] for name, value in rows.items()]
