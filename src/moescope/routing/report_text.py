"""A piece of the text that was read, token by token with the experts each one chose.

From traces that kept their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from moescope.reporting.pack import pack_array
from moescope.reporting.untrusted import plot_words, token_words
from moescope.routing.report_views import View

DOCUMENTS = 12
TOKENS_EACH = 300
CHOICES = 600_000  # tokens x layers x k that a page may hold
COLUMNS = ["document", "position", "layer", "token_id", "domain", "phase", "experts", "gates", "entropy"]


@dataclass(frozen=True)
class Excerpt:
    """Tokens of some documents in reading order, and every layer's choices for them.

    -1 and NaN where there is none.
    """

    words: list[str]
    document: np.ndarray  # of each token
    domains: dict[int, str]  # document -> domain
    experts: dict[int, np.ndarray]  # layer -> tokens x k, by falling gate
    gates: dict[int, np.ndarray]


def chosen_documents(documents: dict[str, int]) -> list[int]:
    """Numbers of the documents to show.

    Documents are numbered domain after domain, and each domain gets its share.
    """
    each = max(1, DOCUMENTS // max(len(documents), 1))
    chosen, start = [], 0
    for count in documents.values():
        chosen += list(range(start, start + min(each, count)))
        start += count
    return chosen[:DOCUMENTS]


def read_excerpt(view: View) -> Excerpt | None:
    """The first tokens of some documents of every domain; None where the trace kept none.

    Reads only the parts of the file it needs.
    """
    if "tokens" not in view.run.tables or not view.main:
        return None
    import pyarrow.parquet as pq

    coverage = view.setup["coverage"]
    wanted = chosen_documents(coverage["domains"])
    most = max(int(CHOICES / (len(view.layers) * max(coverage["k"]) * max(len(wanted), 1))), 20)
    filters = [
        ("step", "=", view.step),
        ("document", "in", wanted),
        ("position", "<", min(TOKENS_EACH, most)),
    ]
    frame = pq.read_table(view.run.path / "tokens.parquet", columns=COLUMNS, filters=filters).to_pandas()
    frame = frame[frame["phase"] == view.phase].sort_values(["document", "position", "layer"])
    if frame.empty:
        return None
    first = frame[frame["layer"] == frame["layer"].min()]
    k = max(int(frame["experts"].map(len).max()), 1)
    known = known_words(view)
    by_layer = {int(layer): rows for layer, rows in frame.groupby("layer")}
    return Excerpt(
        [token_words(known.get(token_id), token_id) for token_id in first["token_id"].tolist()],
        first["document"].to_numpy(),
        {
            int(document): plot_words(str(domain))
            for document, domain in first.groupby("document")["domain"].first().items()
        },
        {layer: padded(rows["experts"], k, -1) for layer, rows in by_layer.items()},
        {layer: padded(rows["gates"], k, np.nan) for layer, rows in by_layer.items()},
    )


def known_words(view: View) -> dict[int, str]:
    """token id -> its text: the tokens table holds ids alone.

    Traces without pieces know the vocabulary table's tokens only.
    """
    listed = view.run.table("token_text") if "token_text" in view.run.tables else view.tables["vocabulary"]
    rows = listed.dropna(subset=["token"]).drop_duplicates("token_id")
    return dict(zip(rows["token_id"].tolist(), rows["token"].tolist(), strict=True))


def padded(lists: pd.Series, k: int, filler: float) -> np.ndarray:
    whole = np.full((len(lists), k), float(filler))
    for row, values in zip(whole, lists, strict=True):
        if values is not None:
            row[: len(values)] = values
    return whole


def text_payload(excerpt: Excerpt, view: View) -> dict[str, Any]:
    """What the page colours: the tokens once, and each layer's experts and gates."""
    n_experts = view.tables["load"].groupby("layer")["expert"].max() + 1
    return {
        "words": excerpt.words,
        "unnamed": sum(word.startswith("#") and word[1:].isdigit() for word in excerpt.words),
        "documents": [
            {
                "number": number,
                "domain": domain,
                "from": int(np.flatnonzero(excerpt.document == number)[0]),
                "to": int(np.flatnonzero(excerpt.document == number)[-1]) + 1,
            }
            for number, domain in excerpt.domains.items()
        ],
        "layers": [
            {
                "layer": layer,
                "n": int(n_experts[layer]),
                "experts": pack_array(np.where(experts >= 0, experts, np.nan)),
                "gates": pack_array(excerpt.gates[layer]),
                **agreement(excerpt, layer),
            }
            for layer, experts in sorted(excerpt.experts.items())
        ],
    }


def agreement(excerpt: Excerpt, layer: int) -> dict[str, float | None]:
    """How often a token's first expert is that of the token before it, in this excerpt, within documents."""
    first = excerpt.experts[layer][:, 0]
    inside = (excerpt.document[1:] == excerpt.document[:-1]) & (first[1:] >= 0) & (first[:-1] >= 0)
    same = (first[1:] == first[:-1])[inside]
    return {"same": float(f"{same.mean():.4g}") if len(same) else None}
