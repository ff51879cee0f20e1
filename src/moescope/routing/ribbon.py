"""The routing ribbon: one document per domain, token by token, with each layer's first expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 300  # tokens of a document
KEYS = ["step", "document", "position"]
COLUMNS = [*KEYS, "layer", "layer_name", "token_id", "domain", "phase", "experts"]


def ribbon_rows(
    path: Path, setups: Sequence[dict[str, Any]], load_totals: pd.DataFrame, text: Mapping[int, str]
) -> pd.DataFrame:
    """Return the rows of the ribbon: the first document of every domain, at every step.

    Parameters
    ----------
    path
        The tokens table; only what holds these documents is read.
    setups
        What run.json says about each step: documents are numbered domain by domain.
    load_totals
        Loads of the experts, from which the chance level of shared experts follows.
    text
        Token id -> its text, where it is known.
    """
    import pandas as pd
    import pyarrow.parquet as pq

    counts = list(setups[0]["coverage"]["domains"].values())
    wanted = [int(start) for start, count in zip(np.cumsum([0, *counts]), counts, strict=False) if count]
    excerpt = [("document", "in", wanted), ("position", "<", LONGEST)]
    rows = pq.read_table(path.absolute(), columns=COLUMNS, filters=excerpt).to_pandas()
    rows = rows.sort_values(["step", "layer", "document", "position"], ignore_index=True)
    chosen = [set(experts) for experts in rows["experts"]]
    follows = rows.groupby(["step", "layer", "document"])["position"].diff() == 1
    pairs = zip(chosen, [set(), *chosen], strict=False)
    both = pd.Series([len(here & before) / max(len(here), 1) for here, before in pairs]).where(follows)
    rows["shared"] = both.groupby([rows[key] for key in KEYS]).transform("mean")
    rows["token"] = rows["token_id"].map(text)
    first = [experts[0] if len(experts) else None for experts in rows.pop("experts")]
    rows["expert"] = pd.array(first, dtype="Int64")
    load = load_totals[load_totals["phase"].isin(rows.pop("phase"))].groupby(["step", "layer"])["tokens"]
    same = (
        load.apply(lambda tokens: float((tokens**2).sum() / tokens.sum() ** 2)).rename("same").reset_index()
    )
    k = rows["layer"].map(pd.Series(map(len, chosen)).groupby(rows["layer"]).mean())
    level = rows[["step", "layer"]].merge(same, how="left")["same"].to_numpy() * k
    return rows.assign(shared_chance=level.groupby([rows[key] for key in KEYS]).transform("mean"))
