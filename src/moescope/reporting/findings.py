"""What a run says, in sentences made from its tables; the same for the terminal, --json and the report's first page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import bdtrc

from moescope.figures.identification import verdict_sentence
from moescope.figures.style import capital, listed, named_layers, number
from moescope.reporting.readings import Reading, readings
from moescope.run import Run
from moescope.spectral.alignment import TIE, AlignmentMatrix
from moescope.spectral.pairing import ALPHA, IDENTIFYING_ACCURACY, benjamini_hochberg, hidden_order
from moescope.spectral.subspaces import COLLAPSED, REDUNDANT
from moescope.types import Coverage

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
    if len(found) > 1:
        sentences[0] = f"Read from {found[0].label}: {sentences[0][:1].lower()}{sentences[0][1:]}"
    first = verdict_layers(found[0])
    for other in found[1:]:
        words = verdict_sentence(other.tables)
        same = verdict_layers(other) == first
        sentences.append(
            f"Read from {other.label}: {'the same verdict in every layer' if same else words[:1].lower() + words[1:]}."
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
    tests = reading.tables["alignment_tests"]
    return {str(verdict): sorted(int(layer) for layer in rows["layer"]) for verdict, rows in tests.groupby("verdict")}


def findings(reading: Reading) -> list[str]:
    """The reading's findings, most important first; each names its chance level."""
    return [
        verdict_finding(reading),
        *hidden_order_findings(reading),
        *small_k_findings(reading),
        *avoidance_findings(reading),
        *hub_findings(reading),
        redundancy_finding(reading),
        *ambiguity_finding(reading),
        *rank_findings(reading),
    ]


def verdict_finding(reading: Reading) -> str:
    tests = reading.tables["alignment_tests"]
    n = n_experts(reading)
    expected = ALPHA * len(tests)
    return (
        f"{verdict_sentence(reading.tables)}. Chance accuracy is 1/{n}; if every layer were random, {number(expected)} of "
        f"{len(tests)} would still be called non-random at p ≤ {ALPHA}."
    )


def n_experts(reading: Reading) -> int:
    return round(float(reading.tables["alignment_layers"]["z_ceiling"].max()) ** 2 + 1)


def hidden_order_findings(reading: Reading) -> list[str]:
    sentences = []
    for layer in verdict_layers(reading).get("permuted", []):
        found = stored_hidden_order(reading, layer)
        if found is None:
            continue
        k, order = found
        moved = [
            f"router {router} fits expert {expert}" for router, expert in order.items() if expert not in (None, router)
        ]
        shown = (
            listed(moved)
            if len(moved) <= 8
            else f"{', '.join(moved[:NAMED_AT_MOST])} and {len(moved) - NAMED_AT_MOST} more"
        )
        sentences.append(
            f"In layer {layer} routers and experts fit one to one, but not in the stored order: at k = {k}, {shown}."
        )
    return sentences


def stored_hidden_order(reading: Reading, layer: int) -> tuple[int, dict[int, int | None]] | None:
    """(k, router -> expert) of a permuted layer, found again from the pairs table."""
    pairs = reading.tables["pairs"]
    pairs = pairs[pairs["layer"] == layer]
    ks = sorted(int(k) for k in pairs["k"].unique())
    grids = [pairs[pairs["k"] == k].pivot(index="router_index", columns="expert", values="align") for k in ks]
    experts = [int(expert) for expert in grids[0].columns]
    matrix = AlignmentMatrix(
        ks, np.stack([grid.to_numpy(float) for grid in grids]), np.zeros(len(experts)), reading.setup(layer)["d_model"]
    )
    found = hidden_order(matrix)
    if found is None:
        return None
    return found[0], {experts[router]: experts[place] if place >= 0 else None for router, place in enumerate(found[1])}


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
    tests = reading.tables["alignment_tests"].sort_values("layer")
    q = benjamini_hochberg(tests["p_lower"].to_numpy(float))
    layers = reading.tables["alignment_layers"]
    sentences = []
    for layer, p in tests.loc[q <= ALPHA, ["layer", "p_lower"]].itertuples(index=False):
        rungs = layers[(layers["layer"] == layer) & ~layers["degenerate"].astype(bool)]
        lowest = rungs.loc[rungs["perm_z"].idxmin()]
        sentences.append(
            f"In layer {layer} routers avoid their own experts at k = {lowest['k']:.0f}: alignment {number(lowest['align'])} "
            f"against {number(lowest['shuffle_mean'])} for an average pair (lower-tail p = {number(p)})."
        )
    return sentences


def hub_findings(reading: Reading) -> list[str]:
    """Experts that are the best match of more routers than chance allows, at the layer's best k.

    Chance: n routers choosing among n experts at random; the likeliest expert's count, all experts, ks and layers paid for.
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
            found.append(f"expert {grid.columns[wins.argmax()]} of layer {layer} ({wins.max()} of {n} routers)")
    if not found:
        return []
    return [
        f"Experts that attract more routers than chance allows: {', '.join(found[:NAMED_AT_MOST])}{more(found)}; "
        "by chance each is the best match of one."
    ]


def more(found: list[Any]) -> str:
    return f" and {len(found) - NAMED_AT_MOST} more" if len(found) > NAMED_AT_MOST else ""


def collapsed_pairs(reading: Reading) -> list[dict[str, Any]]:
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
    chance = number(float(statistics["chance"].mean()))
    collapsed = collapsed_pairs(reading)
    redundant = int(statistics["n_pairs_above_0_3"].sum())
    if collapsed:
        named = [
            f"{pair['expert_a']} and {pair['expert_b']} of layer {pair['layer']} ({number(abs(pair['cosine']))})"
            for pair in collapsed[:NAMED_AT_MOST]
        ]
        start = (
            f"Collapsed experts (|cos| of their top directions above {COLLAPSED}): {', '.join(named)}{more(collapsed)}"
        )
    else:
        start = f"No two experts have collapsed (none above {COLLAPSED})"
    return (
        f"{start}; {redundant:,} {'pair is' if redundant == 1 else 'pairs are'} above {REDUNDANT}; chance is {chance}."
    )


def most_ambiguous(reading: Reading) -> list[dict[str, Any]]:
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
    ranked = table.sort_values("rank").head(3)
    named = [
        f"layer {row['layer']} ({number(row['ambiguity_score'])}, {row['level']}; absolute {number(row['absolute_score'])})"
        for _, row in ranked.iterrows()
    ]
    return [f"Most ambiguous among {named_layers(table['layer'])}: {', '.join(named)}."]


def rank_findings(reading: Reading) -> list[str]:
    spectra = reading.tables["spectra"]
    full = [
        min(reading.setup(int(layer))["d_model"], stacked_height(reading, int(layer))) for layer in spectra["layer"]
    ]
    deficient = spectra[spectra["rank"].notna() & (spectra["rank"].astype(float) < np.array(full))]
    if deficient.empty:
        return []
    named = [
        f"expert {row['expert']} of layer {row['layer']} (rank {row['rank']:.0f})"
        for _, row in deficient.head(NAMED_AT_MOST).iterrows()
    ]
    return [capital(f"{len(deficient)} rank-deficient matrices: {', '.join(named)}{more(list(deficient.index))}.")]


def stacked_height(reading: Reading, layer: int) -> int:
    d_ff = int(reading.setup(layer)["d_ff"])
    return 2 * d_ff if reading.keys["matrix"] == "gate_up" else d_ff
