"""Counts over some training steps -> rows of tables, and the few numbers a training log has room for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from moescope.execution.adapters import Block
from moescope.routing.counts_to_tables import (
    Corpus,
    Row,
    coactivation_columns,
    layer_columns,
    load_rows,
    metric_rows,
    separation_rows,
)
from moescope.routing.load_balance import cv, load_entropy_share, max_over_mean, unused
from moescope.routing.metrics import DECISION
from moescope.routing.step_tally import Place, Window
from moescope.types import Array

DOMAIN = "train"
PERCENTILES = {
    "cv": (50, 90),
    "max_over_mean": (50, 90),
    "unused": (50, 90),
    "load_entropy_share": (10, 50),
    "routing_entropy": (10, 50),
}
PREFIX = "moescope/"


def window_tables(
    window: Window,
    places: list[Place],
    routers_LED: list[Tensor | None],
    k_L: list[int],
    step: int,
    pairs: bool = False,
) -> dict[str, list[Row]]:
    """Rows of load and routing_layers (and coactivation where pairs were counted) of the steps that end with
    this one.
    """
    tables: dict[str, list[Row]] = {"load": [], "routing_layers": []}
    corpus = Corpus([DOMAIN], [0])
    for row, block in enumerate(places):
        counts = window.layer(row, block, k_L[row])
        place = {"step": step, "layer": block.layer, "layer_name": block.name}
        tables["load"] += [{**place, **line} for line in load_rows(counts, corpus)]
        decided = bool(window.decided_L[row])
        metrics = metric_rows(counts, corpus, decisions=decided, order=False)
        rows_ED = routers_LED[row]
        router_ED = None if rows_ED is None else rows_ED.double().cpu().numpy()
        apart = (
            line for line in separation_rows(counts, router_ED) if pairs or line["metric"] != "expert_overlap"
        )  # which is made of pairs
        tables["routing_layers"] += [
            {**place, **layer_columns(counts), **line}
            for line in (*metrics, *apart, *window.diagnostics.rows(row))
        ]
        if pairs and counts.k > 1:
            columns = coactivation_columns(counts)
            tables.setdefault("coactivation", []).extend({**place, **line} for line in as_rows(columns))
    return tables


def as_rows(columns: dict[str, Any]) -> Iterator[Row]:
    length = max(len(column) for column in columns.values() if isinstance(column, np.ndarray))
    for at in range(length):
        yield {
            name: column[at] if isinstance(column, np.ndarray) else column for name, column in columns.items()
        }


def scalars(window: Window, blocks: list[Block], alerts: int, gradients: list[Row]) -> dict[str, float]:
    """At most twelve numbers: percentiles over layers, alerts so far, and the weakest pull of the text on a
    router.

    What was not measured since the last log is left out.
    """
    values: dict[str, list[float]] = {name: [] for name in PERCENTILES}
    entropy = [metric.name for metric in DECISION].index("routing_entropy")
    for row, block in enumerate(blocks):
        load_E: Array = window.counts_LE[row, : block.n_experts].astype(float)
        if load_E.sum():
            for metric in (cv, max_over_mean, unused, load_entropy_share):
                values[metric.__name__].append(float(metric(load_E)))
        if window.decided_L[row]:
            values["routing_entropy"].append(float(window.decisions_LM[row, entropy] / window.decided_L[row]))
    found = {
        f"{PREFIX}{name}_p{rank}": float(np.percentile(values[name], rank))
        for name, ranks in PERCENTILES.items()
        for rank in ranks
        if values[name]
    }
    pulls = [row["lm_gradient_norm"] for row in gradients if row["lm_gradient_norm"] is not None]
    if pulls:
        found[f"{PREFIX}lm_gradient_norm_p10"] = float(np.percentile(pulls, 10))
    found[f"{PREFIX}alerts"] = float(alerts)
    return found
