"""Coverage: whether the text reached every expert, and how much more of it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from moescope.deployment.tokens import TokenTrace, counts_by
from moescope.run import Run
from moescope.statistics import TAILS, resampled_sums
from moescope.types import Array, Integers

SUBSAMPLES = 50
RESAMPLES = 200
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # of the documents, as subsamples
FURTHER = (2, 4, 8, 16, 32, 64)  # times the documents, extrapolated


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
                "documents_needed": needed_documents(tokens_E, len(counts_DE), minimum),
            }
            experts.append(pd.DataFrame(facts | measured))
        curves += curve_rows(name, np.concatenate(own_LDE, axis=1), minimum, seed)
    frame = pd.concat(experts, ignore_index=True)
    frame["rank_share"] = frame.groupby("domain")["tokens"].rank("first", pct=True)
    return {"coverage": frame, "coverage_curve": pd.DataFrame(curves)}


def needed_documents(tokens_E: Array | Integers, documents: int, minimum: int) -> Array:
    """Documents like these until the expected tokens reach the minimum; NaN for an expert without a token."""
    return np.ceil(minimum * documents / np.where(tokens_E > 0, tokens_E, np.nan))


def curve_rows(domain: str, counts_DX: Integers, minimum: int, seed: int) -> list[dict[str, Any]]:
    """Experts below the minimum with fewer documents (subsamples) and with more (extrapolated).

    With more, each expert's tokens grow with the documents at its mean rate; intervals are percentiles over
    documents resampled with replacement. Experts without a token stay below: their rate is unknown.
    """
    generator = np.random.default_rng(seed)
    documents, experts = counts_DX.shape
    rows: list[dict[str, Any]] = []
    for size in sorted({max(round(share * documents), 1) for share in SHARES} - {documents}):
        drawn = [
            int((counts_DX[generator.permutation(documents)[:size]].sum(0) < minimum).sum())
            for _ in range(SUBSAMPLES)
        ]
        low, high = np.quantile(drawn, TAILS)
        rows.append({"documents": size, "below": np.mean(drawn), "low": low, "high": high})
    tokens_X = counts_DX.sum(0)
    rows.append({"documents": documents, "below": int((tokens_X < minimum).sum())})
    resampled_RX = resampled_sums([counts_DX], generator, RESAMPLES)[0] if documents > 1 else None
    for factor in FURTHER:
        row = {"documents": factor * documents, "below": int((factor * tokens_X < minimum).sum())}
        if resampled_RX is not None:
            row["low"], row["high"] = np.quantile((factor * resampled_RX < minimum).sum(1), TAILS)
        rows.append(row)
        if row["below"] == 0:
            break
    needed, low, high = np.nan, np.nan, np.nan
    if (tokens_X > 0).all():
        needed = float(needed_documents(tokens_X, documents, minimum).max())
        if resampled_RX is not None:
            ends = np.nanmax(needed_documents(resampled_RX, documents, minimum), axis=1)
            ends[(resampled_RX == 0).any(1)] = np.inf  # unknown
            ends = np.quantile(ends, TAILS, method="nearest")
            low, high = np.where(np.isfinite(ends), ends, np.nan)
    facts = {"domain": domain, "experts": experts, "unused": int((tokens_X == 0).sum()), "minimum": minimum}
    facts |= {"needed": needed, "needed_low": low, "needed_high": high}
    return [{**facts, **row, "extrapolated": row["documents"] > documents} for row in rows]
