"""What a run says, in sentences made from its tables.

The same for the terminal, --json and the report's first page.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import bdtrc

from moescope.plotting.style import capital, listed, named_layers, number
from moescope.run import Run
from moescope.spectral.alignment import TIE
from moescope.spectral.pairing import ALPHA, IDENTIFYING_ACCURACY
from moescope.spectral.subspaces import COLLAPSED, REDUNDANT
from moescope.types import Coverage
from moescope.weights.figures_identification import FEWEST_TESTED, verdict_sentence
from moescope.weights.figures_redundancy import share_above, width_of
from moescope.weights.report_experts import rank_sentence, why_alone
from moescope.weights.report_views import Reading, readings

NAMED_AT_MOST = 5  # examples spelled out in one sentence


def summary(run: Run) -> dict[str, Any]:
    """Everything worth printing of a run, as plain data."""
    found = readings([run])
    return {
        "run": str(run.path),
        "verb": run.info["verb"],
        "status": run.info["status"],
        "checkpoints": run.info["checkpoints"],
        "coverage": coverage_lines(run),
        "readings": [
            {
                "reading": reading.label,
                "verdicts": verdict_layers(reading),
                "findings": findings(reading),
                "most_ambiguous": most_ambiguous(reading),
                "collapsed_pairs": collapsed_pairs(reading),
            }
            for reading in found
        ],
        "findings": headline(found),
        "warnings": run.info.get("warnings", []),
        "fallbacks": run.info.get("fallbacks", 0),
        "timings": run.info["timings"],
        "tables": run.tables,
    }


def headline(found: list[Reading]) -> list[str]:
    """The first reading's findings, and where another reading of the run comes to other verdicts."""
    sentences = findings(found[0])
    rows = found[0].has_rows
    if len(found) > 1 and rows:
        sentences[0] = f"Read from {found[0].label}: {sentences[0][:1].lower()}{sentences[0][1:]}"
    first = verdict_layers(found[0])
    others = [reading for reading in found[1:] if rows and verdict_layers(reading) != first]
    for other in others[:NAMED_AT_MOST]:
        words = verdict_sentence(other.tables)
        sentences.append(f"Read from {other.label}: {words[:1].lower()}{words[1:]}.")
    seen = {found[0].keys["matrix"]}
    for other in found[1:]:
        if other.keys["matrix"] not in seen:
            seen.add(other.keys["matrix"])
            if "similarity" in other.tables:
                words = redundancy_finding(other)
                sentences.append(f"Of the {other.keys['matrix']} matrices: {words[:1].lower()}{words[1:]}")
            else:
                sentences.append(rank_sentence(other))
    agreeing = [reading.label for reading in found[1:] if rows and verdict_layers(reading) == first]
    if agreeing:
        who = f"{len(agreeing)} other readings" if len(agreeing) > 1 else agreeing[0]
        sentences.append(f"Read from {who}: the same verdicts as from {found[0].label}.")
    if len(others) > NAMED_AT_MOST:
        sentences.append(
            f"{len(others) - NAMED_AT_MOST} more readings come to other verdicts; see Side by side."
        )
    return sentences


def coverage_lines(run: Run) -> list[str]:
    return [
        Coverage(**{**item, "experts_per_layer": tuple(item["experts_per_layer"])}).line() + where(run, index)
        for index, item in enumerate(run.info["coverage"])
    ]


def where(run: Run, index: int) -> str:
    checkpoints = run.info["checkpoints"]
    return f" (step {checkpoints[index]['step']})" if len(checkpoints) > 1 else ""


def verdict_layers(reading: Reading) -> dict[str, list[int]]:
    if not reading.has_rows:
        return {}
    tests = reading.tables["alignment_tests"]
    return {
        str(verdict): sorted(int(layer) for layer in rows["layer"])
        for verdict, rows in tests.groupby("verdict")
    }


def findings(reading: Reading) -> list[str]:
    """The reading's findings, most important first; each names its chance level."""
    if not reading.has_rows:
        alike = [redundancy_finding(reading)] if "similarity" in reading.tables else []
        return [why_alone(reading), *alike, rank_sentence(reading), *rank_findings(reading)]
    return [
        verdict_finding(reading),
        *quiet_pairing_findings(reading),
        *other_order_findings(reading),
        *small_k_findings(reading),
        *avoidance_findings(reading),
        *hub_findings(reading),
        redundancy_finding(reading),
        *ambiguity_finding(reading),
        *rank_findings(reading),
    ]


def verdict_finding(reading: Reading) -> str:
    counts = sorted({reading.n_experts(layer) for layer in reading.layers})
    chance = " or ".join(f"1/{n}" for n in counts)
    tested = sum(reading.n_experts(layer) >= FEWEST_TESTED for layer in reading.layers)
    start = f"{verdict_sentence(reading.tables)}. Chance accuracy at one k is {chance}; "
    if not tested:
        return f"{start}3 experts have 6 pairings only, so no p can be below 1/6."
    return (
        f"{start}if every layer were random, up to {number(ALPHA * tested)} of {tested} would still "
        "be called something else."
    )


def quiet_pairing_findings(reading: Reading) -> list[str]:
    """Layers whose mean alignment beats random pairings though no router can tell its expert by its best
    match.
    """
    tests = reading.tables["alignment_tests"]
    sentences = []
    quiet = tests[(tests["verdict"] == "chance") & (tests["q_value"] <= ALPHA)]
    if len(quiet):
        layers = reading.tables["alignment_layers"]
        best = layers[layers["layer"].isin(quiet["layer"])].groupby("layer")["assignment_accuracy"].max()
        sentences.append(
            f"In {named_layers(quiet['layer'])} the pairing is not random all the same: mean "
            "alignment beats other pairings "
            f"(largest q {number(quiet['q_value'].max())}; best one-to-one assignment right for "
            f"up to {number(100 * best.max())} % of the routers), "
            "but a router's best match is not its own expert."
        )
    return sentences


def other_order_findings(reading: Reading) -> list[str]:
    sentences = []
    for layer in verdict_layers(reading).get("permuted", []):
        order = reading.facts(layer)["other_order"]
        pairs = zip(order["routers"], order["experts"], strict=True)
        moved = [
            f"router {router} fits expert {expert}"
            for router, expert in pairs
            if expert not in (None, router)
        ]
        shown = (
            listed(moved)
            if len(moved) <= 8
            else f"{', '.join(moved[:NAMED_AT_MOST])} and {len(moved) - NAMED_AT_MOST} more"
        )
        sentences.append(
            f"In layer {layer} routers and experts fit one to one, but not in the stored order: "
            f"at k = {order['k']}, {shown} "
            f"(p ≤ {number(order['p'])})."
        )
    return sentences


def small_k_findings(reading: Reading) -> list[str]:
    """Layers that identify their experts at small k and lose it far below the end of the ladder."""
    sentences = []
    layers = reading.tables["alignment_layers"]
    for layer in verdict_layers(reading).get("identifying", []):
        rungs = layers[(layers["layer"] == layer) & ~layers["degenerate"].astype(bool)].sort_values("k")
        good = rungs[rungs["argmax_accuracy"] >= IDENTIFYING_ACCURACY]
        last_good, last = int(good["k"].max()), rungs.iloc[-1]
        if last_good <= last["k"] / 4 and last["argmax_accuracy"] < 0.5:
            sentences.append(
                f"Layer {layer} identifies its experts at small k only: up to k = {last_good}; "
                f"at k = {last['k']:.0f} accuracy is {number(last['argmax_accuracy'])}."
            )
    return sentences


def avoidance_findings(reading: Reading) -> list[str]:
    from scipy.stats import false_discovery_control

    tests = reading.tables["alignment_tests"].sort_values("layer")
    q = false_discovery_control(tests["p_lower"].to_numpy(float))
    layers = reading.tables["alignment_layers"]
    sentences = []
    for layer, p in tests.loc[q <= ALPHA, ["layer", "p_lower"]].itertuples(index=False):
        rungs = layers[(layers["layer"] == layer) & ~layers["degenerate"].astype(bool)]
        lowest = rungs.loc[rungs["perm_z"].idxmin()]
        sentences.append(
            f"In layer {layer} routers avoid their own experts at k = {lowest['k']:.0f}: "
            f"alignment {number(lowest['align'])} "
            f"against {number(lowest['shuffle_mean'])} for an average pair (lower-tail p = "
            f"{number(p)})."
        )
    return sentences


def hub_findings(reading: Reading) -> list[str]:
    """Experts that are the best match of more routers than chance allows, at the layer's best k.

    Chance: n routers choosing among n experts at random; the likeliest expert's count, all experts, ks and
    layers paid for.
    """
    found = []
    best = reading.tables["alignment_tests"].set_index("layer")["best_k"]
    looked_at = reading.tables["alignment_layers"].groupby("layer")["k"].nunique().sum()
    for layer, rows in reading.tables["pairs"].groupby("layer"):
        grid = rows[rows["k"] == best[layer]].pivot(index="router_index", columns="expert", values="align")
        M, n = grid.to_numpy(float), len(grid)
        second, first = np.partition(M, -2, axis=1)[:, -2:].T
        wins = np.bincount(M.argmax(axis=1)[first - second > TIE], minlength=n)
        if looked_at * n * bdtrc(wins.max() - 1, n, 1 / n) <= ALPHA:
            found.append(
                f"expert {grid.columns[wins.argmax()]} of layer {layer} ({wins.max()} of {n} routers)"
            )
    if not found:
        return []
    return [
        (
            "Experts that attract more routers than independent router rows would: "
            f"{', '.join(found[:NAMED_AT_MOST])}{more(found)}; "
            "one each is expected. A direction common to all rows does this too; the centered "
            "reading leaves it out."
        )
    ]


def more(found: list[Any]) -> str:
    return f" and {len(found) - NAMED_AT_MOST} more" if len(found) > NAMED_AT_MOST else ""


def collapsed_pairs(reading: Reading) -> list[dict[str, Any]]:
    if "similarity" not in reading.tables:
        return []
    pairs = reading.tables["similarity"]
    close = pairs[(pairs["k"] == 1) & (pairs["cosine"].abs() > COLLAPSED)]
    close = close.reindex(close["cosine"].abs().sort_values(ascending=False).index)
    return [
        {
            "layer": int(row["layer"]),
            "expert_a": int(row["expert_a"]),
            "expert_b": int(row["expert_b"]),
            "cosine": float(row["cosine"]),
        }
        for _, row in close.iterrows()
    ]


def redundancy_finding(reading: Reading) -> str:
    statistics = reading.tables["orthogonality"]
    statistics = statistics[statistics["k"] == 1]
    collapsed = collapsed_pairs(reading)
    redundant = int(statistics["n_pairs_above_0_3"].sum())
    pairs = reading.tables["similarity"].query("k == 1").groupby("layer").size()
    by_chance = sum(
        count * share_above(REDUNDANT, width_of(reading.tables, layer)) for layer, count in pairs.items()
    )
    if collapsed:
        named = [
            (
                f"{pair['expert_a']} and {pair['expert_b']} of layer {pair['layer']} "
                f"({number(abs(pair['cosine']))})"
            )
            for pair in collapsed[:NAMED_AT_MOST]
        ]
        start = (
            f"Collapsed experts (|cos| of their top directions above {COLLAPSED}): "
            f"{', '.join(named)}{more(collapsed)}"
        )
    else:
        start = f"No two experts have collapsed (none above {COLLAPSED})"
    return (
        f"{start}; {redundant:,} of {pairs.sum():,} pairs are above {REDUNDANT}, "
        f"where random directions give {number(by_chance)}."
    )


def most_ambiguous(reading: Reading) -> list[dict[str, Any]]:
    if not reading.has_rows:
        return []
    ranked = reading.tables["ambiguity"].sort_values("rank").head(3)
    return [
        {
            "layer": int(row["layer"]),
            "ambiguity_score": optional(row["ambiguity_score"]),
            "absolute_score": optional(row["absolute_score"]),
            "level": row["level"] if isinstance(row["level"], str) else None,
        }
        for _, row in ranked.iterrows()
    ]


def optional(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def ambiguity_finding(reading: Reading) -> list[str]:
    table = reading.tables["ambiguity"]
    if table["ambiguity_score"].isna().all():
        return []
    ranked = table[table["level"].isin(["high", "medium"])].sort_values("rank").head(NAMED_AT_MOST)
    weights = reading.run.info["arguments"]["ambiguity_weights"]
    if ranked.empty:
        return [f"No layer is ambiguous, compared with the others of {named_layers(table['layer'])}."]
    accuracy, rest = weights[0], weights[1] + weights[2]
    at_chance = accuracy * (1 - 1 / reading.n_experts(int(ranked["layer"].iloc[0]))) + rest
    named = [
        (
            f"layer {row['layer']} ({number(row['ambiguity_score'])}, {row['level']}; absolute "
            f"{number(row['absolute_score'])})"
        )
        for _, row in ranked.iterrows()
    ]
    return [
        (
            f"Most ambiguous among {named_layers(table['layer'])}: {', '.join(named)}. The score is "
            "relative to these layers; "
            f"at a given k, a layer at chance has an absolute score of {number(at_chance)}."
        )
    ]


def rank_findings(reading: Reading) -> list[str]:
    spectra = reading.tables["spectra"]
    full = [
        min(reading.setup(int(layer))["d_model"], stacked_height(reading, int(layer)))
        for layer in spectra["layer"]
    ]
    deficient = spectra[spectra["rank"].notna() & (spectra["rank"].astype(float) < np.array(full))]
    if deficient.empty:
        return []
    named = [
        f"expert {row['expert']} of layer {row['layer']} (rank {row['rank']:.0f})"
        for _, row in deficient.head(NAMED_AT_MOST).iterrows()
    ]
    return [
        capital(f"{len(deficient)} rank-deficient matrices: {', '.join(named)}{more(list(deficient.index))}.")
    ]


def stacked_height(reading: Reading, layer: int) -> int:
    d_ff = int(reading.setup(layer)["d_ff"])
    return 2 * d_ff if reading.keys["matrix"] == "gate_up" else d_ff
