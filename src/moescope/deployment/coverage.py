"""Coverage: whether the text reached every expert, and how much more of it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from moescope.deployment.tokens import TokenTrace
from moescope.run import Run
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

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
    import pandas as pd

    domains = list(dict.fromkeys(trace.domain_D))
    parts = ["", *(name for name in domains if name and len(domains) > 1)]
    member_MD = np.array([[part in ("", domain) for domain in trace.domain_D] for part in parts])
    counts_DX = []  # documents x experts, layer after layer
    for n, chosen_TK in zip(trace.n_experts, trace.chosen_LTK, strict=True):
        filled = chosen_TK >= 0
        flat = (trace.document_T[:, None] * n + chosen_TK)[filled]
        counts = np.bincount(flat, minlength=trace.n_documents * n).reshape(-1, n)
        counts_DX.append(counts.astype(np.int32))
        advance(1)
    all_DX = np.concatenate(counts_DX, axis=1)
    edges = np.cumsum([0, *trace.n_experts])
    experts: list[pd.DataFrame] = []
    curves: list[dict[str, Any]] = []
    for name, member_D in zip(parts, member_MD, strict=True):
        counts = all_DX[member_D]
        for at, layer in enumerate(trace.layers):
            own = counts[:, edges[at] : edges[at + 1]]
            experts.append(expert_rows(name, layer, trace.layer_names[at], own, minimum))
        curves += curve_rows(name, counts, minimum, seed)
    return {"coverage": pd.concat(experts, ignore_index=True), "coverage_curve": pd.DataFrame(curves)}


def count_tables(run: Run, minimum: int, seed: int) -> tuple[dict[str, pd.DataFrame], dict[int, Integers]]:
    """Return the same of a trace that holds counts only, as one document; also tokens per expert."""
    import pandas as pd

    load = run.table("load").sort_values(["layer", "expert"])
    counts = {int(layer): rows["tokens"].to_numpy(np.int64) for layer, rows in load.groupby("layer")}
    names = dict(zip(load["layer"], load["layer_name"], strict=True))
    experts = [expert_rows("", layer, names[layer], own[None], minimum) for layer, own in counts.items()]
    curve = curve_rows("", np.concatenate(list(counts.values()))[None], minimum, seed)
    tables = {"coverage": pd.concat(experts, ignore_index=True), "coverage_curve": pd.DataFrame(curve)}
    return tables, counts


def expert_rows(domain: str, layer: int, layer_name: str, counts_DE: Integers, minimum: int) -> pd.DataFrame:
    import pandas as pd

    documents, n = counts_DE.shape
    tokens_E = counts_DE.sum(0)
    return pd.DataFrame(
        {
            "domain": domain,
            "layer": layer,
            "layer_name": layer_name,
            "expert": np.arange(n),
            "tokens": tokens_E,
            "chance": tokens_E.sum() / n,
            "minimum": minimum,
            "below": tokens_E < minimum,
            "documents": (counts_DE > 0).sum(0),
            "documents_needed": needed_documents(tokens_E, documents, minimum),
        }
    )


def needed_documents(tokens_E: Integers, documents: int, minimum: int) -> Array:
    """Documents like these until the expected tokens reach the minimum; NaN for an expert without a token."""
    tokens = np.where(tokens_E > 0, tokens_E, np.nan).astype(float)
    return np.ceil(minimum * documents / tokens)


def curve_rows(domain: str, counts_DX: Integers, minimum: int, seed: int) -> list[dict[str, Any]]:
    """Experts below the minimum with fewer documents (subsamples) and with more (extrapolated).

    With more, each expert's tokens grow with the documents at its mean rate; intervals are percentiles over
    documents resampled with replacement. Experts without a token stay below: their rate is unknown.
    """
    generator = np.random.default_rng(seed)
    documents, experts = counts_DX.shape
    rows = []
    for size in sorted({max(round(share * documents), 1) for share in SHARES} - {documents}):
        drawn = [
            int((counts_DX[generator.permutation(documents)[:size]].sum(0) < minimum).sum())
            for _ in range(SUBSAMPLES)
        ]
        low, high = np.percentile(drawn, [2.5, 97.5])
        rows.append({"documents": size, "below": np.mean(drawn), "low": low, "high": high})
    tokens_X = counts_DX.sum(0)
    rows.append({"documents": documents, "below": int((tokens_X < minimum).sum())})
    weights = generator.multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES)
    resampled_RX = weights @ counts_DX if documents > 1 else None
    for factor in FURTHER:
        row: dict[str, Any] = {
            "documents": factor * documents,
            "below": int((factor * tokens_X < minimum).sum()),
        }
        if resampled_RX is not None:
            below_R = (factor * resampled_RX < minimum).sum(1)
            row["low"], row["high"] = np.percentile(below_R, [2.5, 97.5])
        rows.append(row)
        if row["below"] == 0:
            break
    needed, low, high = np.nan, np.nan, np.nan
    if (tokens_X > 0).all():
        needed = float(needed_documents(tokens_X, documents, minimum).max())
        if resampled_RX is not None:
            ends = np.nanmax(needed_documents(resampled_RX, documents, minimum), axis=1)
            unknown_R = (resampled_RX == 0).any(1)
            low, high = np.percentile(np.where(unknown_R, np.inf, ends), [2.5, 97.5], method="nearest")
            high = high if np.isfinite(high) else np.nan
            low = low if np.isfinite(low) else np.nan
    facts = {
        "domain": domain,
        "experts": experts,
        "unused": int((tokens_X == 0).sum()),
        "minimum": minimum,
        "needed": needed,
        "needed_low": low,
        "needed_high": high,
    }
    return [{**facts, **row, "extrapolated": row["documents"] > documents} for row in rows]
