"""A scan's part of the overview map and of the expert pages: alignment, margin, redundancy, spectrum."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pandas as pd

from moescope.plotting.style import number
from moescope.run import Run
from moescope.verb import LayerCards, Measure, Payload, Strip, Tables
from moescope.weights.figures_redundancy import (
    closest_by_chance,
    cosine_matrix,
    d_model_by_layer,
    similarity_order,
)
from moescope.weights.report_findings import View, views

NEAREST = 3
SPECTRUM_POINTS = 48
FINDS = ("finds its own expert", "does not find its own expert")


def measures(run: Run) -> list[Measure]:
    """Alignment first, then margin, redundancy and effective rank, for every view."""
    return [measure for view in views(run) for measure in view_measures(view)]


def view_measures(view: View) -> Iterator[Measure]:
    if view.has_rows:
        rows = at_best_k(view.tables)
        largest = float(rows["delta_vs_shuffle"].abs().max()) or 1.0
        yield Measure(
            "alignment",
            "Alignment above random pairing",
            frame_of(
                rows,
                "delta_vs_shuffle",
                chance=0.0,
                noise=rows["shuffle_std"],
                beyond=rows["identified"].astype(bool),
            ),
            "",
            "Alignment of a router row with its own expert, minus the mean over all pairings, at the layer's "
            "best k. Of random rows, 1 in n finds its own expert at one k.",
            0.0,
            False,
            (-largest, largest),
            view.label,
            outline=FINDS,
        )
        widest = float(rows["margin"].abs().max()) or 1.0
        yield Measure(
            "margin",
            "Alignment margin",
            frame_of(rows, "margin", beyond=rows["margin"] > 0),
            "",
            "Alignment with its own expert, minus the highest with another; positive: the row finds its own.",
            0.0,
            False,
            (-widest, widest),
            view.label,
            outline=FINDS,
        )
    if "similarity" in view.tables and len(view.tables["similarity"]):
        yield redundancy(view)
    spectra = view.tables["spectra"]
    yield Measure(
        "effective_rank",
        "Effective rank",
        frame_of(spectra, "effective_rank"),
        f"of {number(spectra['rank'].max())}",
        "How many directions carry the expert's matrix: exp of the entropy of its squared singular values.",
        view=view.label,
    )


def frame_of(rows: pd.DataFrame, column: str, **more: object) -> pd.DataFrame:
    return rows[["layer", "expert"]].assign(value=rows[column], **more)


def at_best_k(tables: Tables) -> pd.DataFrame:
    best = tables["alignment_tests"][["layer", "best_k"]]
    rows = tables["alignment"].merge(best, on="layer")
    return rows[rows["k"] == rows["best_k"]]


def both_directions(pairs: pd.DataFrame) -> pd.DataFrame:
    """Rows (layer, expert, other, cosine >= 0) of the pairs at k = 1, each pair from both sides."""
    pairs = pairs[pairs["k"] == 1]
    pairs = pairs[["layer", "expert_a", "expert_b", "cosine"]].assign(cosine=pairs["cosine"].abs())
    names = (["layer", "expert", "other", "cosine"], ["layer", "other", "expert", "cosine"])
    return pd.concat([pairs.set_axis(columns, axis=1) for columns in names])


def redundancy(view: View) -> Measure:
    pairs, widths = both_directions(view.tables["similarity"]), d_model_by_layer(view.tables)
    closest = pairs.groupby(["layer", "expert"])["cosine"].max().reset_index()
    others = pairs.groupby("layer")["expert"].nunique() - 1
    chance = {layer: closest_by_chance(int(others[layer]), int(widths[layer])) for layer in others.index}
    looks = 20 * len(closest)  # the largest cell of a random model exceeds the bound in 3.4 % of cases
    every = {layer: closest_by_chance(int(others[layer] * looks), int(widths[layer])) for layer in chance}
    return Measure(
        "redundancy",
        "Similarity to the nearest expert",
        frame_of(
            closest.rename(columns={"cosine": "value"}),
            "value",
            chance=closest["layer"].map(chance),
            noise=closest["layer"].map({layer: widths[layer] ** -0.5 for layer in chance}),
            cluster=clusters(view.tables["similarity"])
            .reindex(pd.MultiIndex.from_frame(closest[["layer", "expert"]]))
            .to_numpy(),
            beyond=closest["cosine"] > closest["layer"].map(every),
        ),
        "|cos|",
        "Largest |cosine| of an expert's top singular vector with another expert's; random directions reach "
        f"about {number(max(chance.values()))}. Above 0.7: severe redundancy.",
        limits=(0.0, 1.0),
        view=view.label,
    )


def clusters(pairs: pd.DataFrame) -> pd.Series:
    """Place of every expert in its layer's order by similarity."""
    places: dict[tuple[int, int], int] = {}
    for layer, rows in pairs.groupby("layer"):
        matrix, experts = cosine_matrix(rows)
        order = similarity_order(matrix)
        places |= {(int(layer), int(experts[expert])): place for place, expert in enumerate(order)}
    return pd.Series(places, dtype=float)


def strips(run: Run) -> list[Strip]:
    found = []
    for view in views(run):
        if view.has_rows:
            tests = view.tables["alignment_tests"]
            accuracy = pd.DataFrame(
                {
                    "layer": tests["layer"],
                    "value": tests["best_accuracy"],
                    "chance": tests["chance_accuracy"],
                    "word": tests["verdict"].str.replace("_", " "),
                }
            )
            found.append(Strip("best_accuracy", "accuracy", accuracy, view.label))
            score = view.tables["ambiguity"]
            score = pd.DataFrame(
                {
                    "layer": score["layer"],
                    "value": score["absolute_score"],
                    "chance": score["absolute_chance"],
                }
            )
            found.append(Strip("absolute_score", "ambiguity", score, view.label))
    return found


def experts(run: Run) -> Iterator[LayerCards]:
    """Alignment over k with the null band, nearest experts and spectrum of every expert, layer by layer."""
    for view in views(run):
        for layer, tables in view.by_layer():
            yield LayerCards(layer, layer_cards(tables), view.label)


def layer_cards(tables: Tables) -> dict[int, list[Payload]]:
    blocks: dict[int, list[Payload]] = {}
    if "alignment" in tables:
        rows = tables["alignment"].sort_values(["expert", "k"])
        mean, spread = rows["shuffle_mean"].to_numpy(float), rows["shuffle_std"].to_numpy(float)
        ks, align = rows["k"].tolist(), rows["align"].tolist()
        low, high = (np.clip(mean + side * spread, 0, 1).tolist() for side in (-2, 2))
        for expert, part in stretches(rows["expert"].to_numpy()):
            curve: Payload = {
                "kind": "curve",
                "title": "Alignment over k",
                "x": ks[part],
                "y": align[part],
                "low": low[part],
                "high": high[part],
                "logarithmic": True,
                "labels": ["k", "alignment"],
                "band": "random pairings, mean ± 2 sd",
            }
            blocks.setdefault(expert, []).append(curve)
    if "similarity" in tables and len(tables["similarity"]):
        pairs = both_directions(tables["similarity"]).sort_values("cosine", ascending=False, kind="stable")
        pairs = pairs.groupby("expert").head(NEAREST).sort_values("expert", kind="stable")
        nearest = list(map(list, zip(pairs["other"].tolist(), pairs["cosine"].tolist(), strict=True)))
        for expert, part in stretches(pairs["expert"].to_numpy()):
            block: Payload = {
                "kind": "experts",
                "title": "Nearest experts",
                "rows": nearest[part],
                "unit": "|cos|",
            }
            blocks.setdefault(expert, []).append(block)
    for expert, values in zip(tables["spectra"]["expert"], tables["spectra"]["singular_values"], strict=True):
        places = spectrum_places(len(values))
        block = {
            "kind": "curve",
            "title": "Singular values",
            "x": (places + 1).tolist(),
            "y": np.asarray(values, float)[places].tolist(),
            "logarithmic": True,
            "labels": ["index", "singular value"],
        }
        blocks.setdefault(int(expert), []).append(block)
    return blocks


def stretches(experts: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each expert of a sorted column, and where its rows are."""
    edges = [0, *(np.flatnonzero(np.diff(experts)) + 1).tolist(), len(experts)]
    for begin, end in pairwise(edges):
        if begin < end:
            yield int(experts[begin]), slice(begin, end)


@lru_cache
def spectrum_places(length: int) -> np.ndarray:
    """Which singular values are drawn: evenly spaced on a logarithmic axis."""
    return np.unique(np.geomspace(1, length, SPECTRUM_POINTS).round().astype(int)) - 1
