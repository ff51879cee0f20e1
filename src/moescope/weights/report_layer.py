"""One layer's part of the report: the line it shows closed, and what is drawn when it is opened."""

from __future__ import annotations

from typing import Any

import pandas as pd

from moescope.figures import COMPLETE_VIEW, ONE_LAYER, FigureSpec
from moescope.plotting.style import Tables, listed, number
from moescope.reporting.pack import figure_payload, table_payload
from moescope.weights.figures_identification import VERDICT_WORDS, told_verdict
from moescope.weights.report_experts import alone_entry, close_pairs
from moescope.weights.report_views import Reading

K_TABLE = [
    "k",
    "align",
    "random_expectation",
    "effect_over_random",
    "shuffle_mean",
    "shuffle_std",
    "delta_vs_shuffle",
    "z_vs_shuffle",
    "z_ceiling",
    "argmax_accuracy",
    "assignment_accuracy",
    "alignment_margin",
    "positive_margin_share",
    "perm_z",
    "p_adjusted",
    "degenerate",
]
EXPERT_TABLE = [
    "expert",
    "align",
    "random_expectation",
    "shuffle_mean",
    "delta_vs_shuffle",
    "z_vs_shuffle",
    "margin",
    "identified",
]
VERDICT_NAMES = {
    "identifying": "identifies its experts",
    "non_random": "beats chance",
    "permuted": "another order",
    "chance": "at chance",
    "untested": "too few experts",
}


def drawn(spec: FigureSpec, tables: Tables, where: str) -> dict[str, Any]:
    """The figure as data; one that cannot be drawn fails the report, with its name and place."""
    try:
        return figure_payload(spec.draw(tables), spec.wide)
    except Exception as error:
        raise RuntimeError(
            f"figure {spec.name} of {where} cannot be drawn: {type(error).__name__}: {error}"
        ) from error


def layer_entry(reading: Reading, layer: int, tables: Tables) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the closed line says, the payload drawn when it is opened)."""
    if not reading.has_rows:
        entry, payload = alone_entry(reading, layer, tables)
        figures = [
            drawn(spec, tables, f"layer {layer}, {reading.label}") for spec in reading.drawable(ONE_LAYER)
        ]
        return entry, {
            **payload,
            "setup": setup_rows(reading, layer, tables),
            "figures": figures,
            "complete": [],
        }
    test = tables["alignment_tests"].iloc[0].to_dict()
    best = tables["alignment"][tables["alignment"]["k"] == test["best_k"]]
    where = f"layer {layer}, {reading.label}"
    payload = {
        "verdict": verdict_words(reading, layer, test, tables),
        "setup": setup_rows(reading, layer, tables),
        "tables": [
            table_payload(
                "alignment_layers", tables["alignment_layers"], K_TABLE, "Every k (means over experts)"
            ),
            table_payload("alignment", best, EXPERT_TABLE, f"Every expert at k = {test['best_k']}"),
        ],
        "figures": [drawn(spec, tables, where) for spec in ONE_LAYER],
        "complete": [drawn(spec, tables, where) for spec in COMPLETE_VIEW],
    }
    order = reading.facts(layer)["other_order"]
    by_chance = number(reading.facts(layer)["chance_accuracy"])
    line = (
        f"fits in another order at k = {order['k']}, p ≤ {number(order['p'])}"
        if order
        else (
            f"best accuracy {number(test['best_accuracy'])} at k = {test['best_k']} ({by_chance} by "
            f"chance), p = {number(test['p_accuracy'])}"
        )
    )
    entry = {
        "layer": layer,
        "verdict": test["verdict"],
        "verdict_name": verdict_name(reading, layer, test["verdict"]),
        "line": line,
    }
    return entry, payload


def verdict_name(reading: Reading, layer: int, verdict: str) -> str:
    return VERDICT_NAMES[told_verdict(verdict, reading.n_experts(layer))]


def verdict_words(reading: Reading, layer: int, test: dict[str, Any], tables: Tables) -> list[str]:
    """The identification verdict of one layer in words, with chance beside every number."""
    n, facts = reading.n_experts(layer), reading.facts(layer)
    against = (
        f"all {test['n_pairings']:,} pairings" if test["exact"] else f"{test['n_pairings']:,} drawn pairings"
    )
    words = [
        (
            f"Layer {layer} {VERDICT_WORDS[told_verdict(test['verdict'], n)][0]}. Its best argmax "
            f"accuracy is {number(test['best_accuracy'])}, at k = {test['best_k']}; "
            f"chance is 1/{n} at a given k, and {number(facts['chance_accuracy'])} for a random "
            "pairing at its own best k. "
            f"A random pairing does as well with p = {number(test['p_accuracy'])}."
        ),
        f"Mean alignment over all k: p = {number(test['p_value'])} against {against} "
        f"(q = {number(test['q_value'])} over the layers scanned); lower tail p = {number(test['p_lower'])}.",
    ]
    if order := facts["other_order"]:
        fitting = zip(order["routers"], order["experts"], strict=True)
        mapped = ", ".join(f"{router} → {'?' if expert is None else expert}" for router, expert in fitting)
        words.append(
            f"They do fit in another order, at k = {order['k']} (router → expert, p ≤ "
            f"{number(order['p'])}): {mapped}."
        )
    if named := close_pairs(tables):
        words.append(f"Collapsed pairs, by |cos| of their top directions: {listed(named)}.")
    return words


def setup_rows(reading: Reading, layer: int, tables: Tables) -> list[list[str]]:
    """How the layer's numbers were made; never empty."""
    setup, info = reading.setup(layer), reading.run.info
    of_matrix = setup["matrices"][reading.keys["matrix"]]
    model = next(item for item in info["checkpoints"] if item["step"] == reading.keys["step"])
    folded = ", norm folded in" if reading.keys["fold_norm"] else ""
    routed = pairing_rows(reading, layer, tables) if reading.has_rows else {}
    router = f", {setup['router_dtype']} router" if reading.has_rows else ""
    rows = {
        "model": model["path"],
        "block": setup["layer_name"],
        "step": reading.keys["step"],
        "matrix": reading.keys["matrix"] + ("" if reading.has_rows else folded),
        **({"router reading": reading.keys["router"] + folded} if reading.has_rows else {}),
        "dtype": f"{setup['dtype']} experts{router}; fp64 from the Gram matrix on",
        "d_model": setup["d_model"],
        "d_ff": setup["d_ff"],
        "experts (n)": setup["n_experts"],
        "top_k, scoring": f"{setup['top_k'] or 'not stated'}, {setup['scoring']}",
        **routed,
        "seed": setup["seed"],
        "precision": (
            f"{info['arguments']['precision']}; {of_matrix['fallbacks']} of {setup['n_experts']} "
            "experts fell back to SVD"
        ),
        "experts left out": ", ".join(map(str, of_matrix["experts_left_out"])) or "none",
        "time": f"{number(setup['seconds'])} s on {info['device']}",
    }
    return [[name, str(value)] for name, value in rows.items()]


def pairing_rows(reading: Reading, layer: int, tables: Tables) -> dict[str, str]:
    """What of a layer's setup is about router rows."""
    setup, test = reading.setup(layer), tables["alignment_tests"].iloc[0]
    own = pd.Series(setup["centered_share"], dtype=float)
    return {
        "k ladder": ", ".join(map(str, setup["matrices"][reading.keys["matrix"]]["k"])),
        "shuffle null": "closed form"
        if setup["null"] == "closed"
        else f"{setup['n_shuffles']} sampled shuffles",
        "pairing null": f"{test['n_pairings']:,} pairings, {'all there are' if test['exact'] else 'drawn'}",
        "row share not common to all": f"{number(own.min())} to {number(own.max())} (‖rᵢ − mean‖/‖rᵢ‖)",
    }
