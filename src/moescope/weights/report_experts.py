"""What a scan says of experts whose router has no row for each of them.

How alike they are and how full their ranks, without a word on pairing.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from moescope.plotting.style import capital, counted, from_to, listed, number
from moescope.reporting.pack import glance_payload, table_payload
from moescope.spectral.subspaces import COLLAPSED
from moescope.types import Coverage
from moescope.weights.report_views import Reading

SPECTRA_TABLE = ["expert", "effective_rank", "stable_rank", "rank", "spectral_norm", "frobenius", "condition"]
HEADS = [
    ("layer", "layer", "int"),
    ("mean_abs", "mean |cos|", "float"),
    ("chance", "by chance", "float"),
    ("max_abs", "largest |cos|", "float"),
    ("n_pairs_above_0_7", "collapsed", "int"),
    ("effective_rank", "effective rank", "float"),
    ("stable_rank", "stable rank", "float"),
    ("rank", "full rank", "int"),
]
PAIRED = ("mean_abs", "chance", "max_abs", "n_pairs_above_0_7")  # what one expert alone does not have


def why_alone(reading: Reading) -> str:
    """The sentence that stands before all others: what is missing, and why."""
    found = [
        Coverage(**{**item, "experts_per_layer": tuple(item["experts_per_layer"])}).without_rows()
        for item in reading.run.info["coverage"]
    ]
    return capital(f"{next(words for words in found if words)}.")


def rank_sentence(reading: Reading) -> str:
    """Effective ranks over layers, beside the full one."""
    by_layer = layer_ranks(reading)
    middle = by_layer["effective_rank"]
    span = from_to(middle.min(), f"layer {middle.idxmin()}", middle.max(), f"layer {middle.idxmax()}")
    of = ", median of a layer," if (by_layer["expert"] > 1).any() else ""
    return (
        f"Effective rank of the {reading.keys['matrix']} matrices{of} {span}; full rank is "
        f"{number(by_layer['rank'].max())}."
    )


def layer_ranks(reading: Reading) -> pd.DataFrame:
    """Layer -> medians over its experts, and the largest rank."""
    spectra = reading.tables["spectra"]
    spectra = spectra[spectra["rank"].notna()].astype({"rank": float})
    return spectra.groupby("layer").agg(
        {"effective_rank": "median", "stable_rank": "median", "rank": "max", "expert": "count"}
    )


def first_cosines(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Layer -> statistics of the cosines between top directions; empty where there is one expert a layer."""
    if "orthogonality" not in tables:
        return pd.DataFrame()
    return tables["orthogonality"].query("k == 1").set_index("layer")


def experts_glance(reading: Reading) -> dict[str, Any]:
    """The one table of the summary: a row a layer, every number with chance or the full rank beside it."""
    cosines, ranks = first_cosines(reading.tables), layer_ranks(reading)
    heads = [head for head in HEADS if len(cosines) or head[0] not in PAIRED]
    rows = []
    for layer in reading.layers:
        told = {
            "layer": layer,
            **ranks.loc[layer].to_dict(),
            **(cosines.loc[layer].to_dict() if len(cosines) else {}),
        }
        rows.append([told[name] for name, _, _ in heads])
    return glance_payload(heads, rows)


def alone_entry(
    reading: Reading, layer: int, tables: dict[str, pd.DataFrame]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the layer's closed line says, its words and table); figures and setup are those of any layer."""
    ranks = layer_ranks(reading).loc[layer]
    cosines = first_cosines(tables)
    of_rank = f"effective rank {number(ranks['effective_rank'])} of {number(ranks['rank'])}"
    if len(cosines):
        first = cosines.loc[layer]
        collapsed = counted(int(first["n_pairs_above_0_7"]), "collapsed pair")
        line = (
            f"mean |cos| {number(first['mean_abs'])} ({number(first['chance'])} by chance), "
            f"{collapsed}, {of_rank}"
        )
        words = [
            (
                f"The top directions of two experts of layer {layer} have |cos| "
                f"{number(first['mean_abs'])} on average, {number(first['max_abs'])} at the most; "
                "random "
                f"directions {number(first['chance'])} on average."
            )
        ]
        close = close_pairs(tables)
        words += [f"Collapsed pairs, by |cos| of their top directions: {listed(close)}."] if close else []
    else:
        line, words = (
            of_rank,
            [f"Layer {layer} has one block, so there is its spectrum and nothing to compare it with."],
        )
    entry = {"layer": layer, "verdict": "", "verdict_name": "", "line": line}
    shown = tables["spectra"].sort_values("expert")
    title = "Every expert" if len(cosines) else "Its spectrum in numbers"
    return entry, {"verdict": words, "tables": [table_payload("spectra", shown, SPECTRA_TABLE, title)]}


def close_pairs(tables: dict[str, pd.DataFrame]) -> list[str]:
    """Collapsed pairs of one layer in words, eight at the most."""
    pairs = tables["similarity"]
    close = pairs[(pairs["k"] == 1) & (pairs["cosine"].abs() > COLLAPSED)]
    return [
        f"{row.expert_a} and {row.expert_b} ({number(abs(row.cosine))})" for row in close.head(8).itertuples()
    ]
