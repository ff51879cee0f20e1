"""Coverage: whether the text reached every expert, and how many experts fewer documents reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from moescope.deployment.tokens import TokenTrace, counts_by
from moescope.run import Run
from moescope.statistics import TAILS
from moescope.types import Integers

SUBSAMPLES = 50
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the documents, as subsamples


def coverage_tables(
    trace: TokenTrace, minimum: int, seed: int, advance: Callable[[int], None]
) -> dict[str, pd.DataFrame]:
    """Return tokens per expert, and experts below the minimum by number of documents; by domain.

    The empty domain is all documents together.
    """
    counts_LDE: list[Any] = []
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        counts_LDE.append(counts_by(chosen_TK, trace.document_T, trace.n_documents, n).astype(np.int32))
        advance(1)
    layers = dict(zip(trace.layers, trace.layer_names, strict=True))
    return tables_of_counts(layers, counts_LDE, trace.domain_D, minimum, seed)


def count_tables(run: Run, minimum: int, seed: int) -> tuple[dict[str, pd.DataFrame], dict[int, Integers]]:
    """Return the same of a trace that holds counts only, as one document; also tokens per expert."""
    load = run.table("load").sort_values(["layer", "expert"])
    counts = {int(layer): rows["tokens"].to_numpy(np.int64) for layer, rows in load.groupby("layer")}
    names = dict(zip(load["layer"], load["layer_name"], strict=True))
    counts_LDE = [counts_E[None] for counts_E in counts.values()]
    return tables_of_counts(names, counts_LDE, [""], minimum, seed), counts


def tables_of_counts(
    layers: dict[int, str], counts_LDE: list[Integers], domain_D: list[str], minimum: int, seed: int
) -> dict[str, pd.DataFrame]:
    """Return the tables of these counts per layer, document and expert."""
    experts, curves = [], []
    for name in dict.fromkeys(["", *(domain_D if len(set(domain_D)) > 1 else [])]):
        member_D = np.array([name in ("", domain) for domain in domain_D])
        own_LDE = [counts_DE[member_D] for counts_DE in counts_LDE]
        for (layer, layer_name), counts_DE in zip(layers.items(), own_LDE, strict=True):
            tokens_E = counts_DE.sum(0)
            facts = {"domain": name, "layer": layer, "layer_name": layer_name}
            measured = {
                "expert": np.arange(len(tokens_E)),
                "tokens": tokens_E,
                "chance": tokens_E.mean(),
                "minimum": minimum,
                "below": tokens_E < minimum,
                "documents": (counts_DE > 0).sum(0),
            }
            experts.append(pd.DataFrame(facts | measured))
        curves += curve_rows(name, np.concatenate(own_LDE, axis=1), minimum, seed)
    frame = pd.concat(experts, ignore_index=True)
    frame["rank_share"] = frame.groupby("domain")["tokens"].rank("first", pct=True)
    return {"coverage": frame, "coverage_curve": pd.DataFrame(curves)}


def curve_rows(domain: str, counts_DX: Integers, minimum: int, seed: int) -> list[dict[str, Any]]:
    """Experts below the minimum in all documents, and in subsamples of fewer.

    More documents are not extrapolated: the least used of many experts looks rarer than it is, so that the
    documents it seems to need are too many: 37 for a true 24 in the mean of 300 simulated texts (256 experts,
    40 bursty documents).
    """
    generator = np.random.default_rng(seed)
    documents, experts = counts_DX.shape
    tokens_X = counts_DX.sum(0)
    rows: list[dict[str, Any]] = [{"documents": documents, "below": int((tokens_X < minimum).sum())}]
    for size in sorted({max(round(share * documents), 1) for share in SHARES} - {documents}):
        drawn = [
            int((counts_DX[generator.permutation(documents)[:size]].sum(0) < minimum).sum())
            for _ in range(SUBSAMPLES)
        ]
        low, high = np.quantile(drawn, TAILS)
        rows.append({"documents": size, "below": np.mean(drawn), "low": low, "high": high})
    facts = {"domain": domain, "experts": experts, "unused": int((tokens_X == 0).sum()), "minimum": minimum}
    return [{**facts, **row} for row in rows]
