"""Agreement of two traces, token by token: engines, precisions or checkpoints that read the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moescope.deployment.tokens import TokenReader
from moescope.errors import BadInput
from moescope.run import Run
from moescope.statistics import BUCKETS, clip_share, jackknife_interval
from moescope.types import Array, Integers

if TYPE_CHECKING:
    import pandas as pd

AT_ONCE = 16384  # tokens
CLOSEST = 0.1  # share of tokens whose selection margin counts as small


def agreement_table(runs: list[Run], seed: int) -> tuple[pd.DataFrame, list[str]]:
    """Return one row per layer that both traces have, and warnings.

    Documents are matched by number, tokens by position, up to the first token id that differs.
    """
    import pandas as pd

    readers = common_phase(runs)
    both, *places = np.intersect1d(readers[0].keys_T, readers[1].keys_T, return_indices=True)
    ids = [reader.token_ids()[at] for reader, at in zip(readers, places, strict=True)]
    prefix_T = common_prefix(both >> 32, (ids[0] != ids[1]) & (ids[0] >= 0) & (ids[1] >= 0))
    total, common = max(len(reader.keys_T) for reader in readers), int(prefix_T.sum())
    warning = f"agreement: {common:,} of {total:,} tokens are in common prefixes of documents"
    layers = [layer for layer in readers[0].layers if layer in readers[1].layers]
    if not common or not layers:
        raise BadInput(
            f"{runs[0].path} and {runs[1].path} have no token of the same document, position and layer in "
            "common; trace the same text"
        )
    width = max(reader.width for reader in readers)
    rows = [[list(reader.layers).index(layer) for layer in layers] for reader in readers]
    tokens = [at[prefix_T] for at in places]
    choices = [
        reader.choices("experts", width)[of_layers][:, at]
        for reader, of_layers, at in zip(readers, rows, tokens, strict=True)
    ]
    gates = readers[0].lists("gates", np.nan, np.float32, width)[rows[0]][:, tokens[0]]
    margins = readers[0].numbers("margin")[rows[0]][:, tokens[0]]
    document_T = np.unique(both[prefix_T] >> 32, return_inverse=True)[1]
    generator = np.random.default_rng(seed)
    diverged_T = np.zeros(len(document_T), dtype=bool)
    found = []
    for layer, ours_TK, theirs_TK, gates_TK, margin_T in zip(layers, *choices, gates, margins, strict=True):
        row, different_T = layer_row(ours_TK, theirs_TK, gates_TK, document_T, generator)
        row |= flip_margins(margin_T, different_T)
        row["first_divergence"] = float((different_T & ~diverged_T).mean())
        diverged_T |= different_T
        row["same_so_far"] = float(1 - diverged_T.mean())
        keys = {"layer": layer, "layer_name": readers[0].layers[layer] or f"layer {layer}"}
        found.append({**keys, "phase": readers[0].phase, **row})
    return pd.DataFrame(found), [warning] if common < total else []


def common_phase(runs: list[Run]) -> list[TokenReader]:
    """Open both traces in a phase that both have, decode first."""
    for phase in ("decode", "prefill"):
        try:
            return [TokenReader(run, phase) for run in runs]
        except BadInput as error:
            if "no tokens of" not in str(error):
                raise
    raise BadInput(f"{runs[0].path} and {runs[1].path} have no phase in common; trace the same phase")


def common_prefix(document_T: Integers, differs_T: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tokens come before the first one of their document that differs."""
    seen_T = np.cumsum(differs_T)
    first = np.flatnonzero(np.diff(document_T, prepend=-1))
    before: Integers = (seen_T - differs_T)[first]
    return seen_T == np.repeat(before, np.diff(np.append(first, len(document_T))))


def layer_row(
    chosen_TK: NDArray[np.integer],
    other_TK: NDArray[np.integer],
    gates_TK: Array,
    document_T: Integers,
    generator: np.random.Generator,
) -> tuple[dict[str, Any], NDArray[np.bool_]]:
    """Compare one layer's choices; also return which tokens have different sets of experts."""
    size_T, other_size_T = (chosen_TK >= 0).sum(1), (other_TK >= 0).sum(1)
    there_T: NDArray[np.bool_] = (size_T > 0) & (other_size_T > 0)
    shared_T, lost_TK = overlap(chosen_TK, other_TK)
    equal_T = there_T & (shared_T == size_T) & (shared_T == other_size_T)
    tokens = int(there_T.sum())
    if not tokens:
        return {"tokens": 0}, there_T
    mean_size_T = (size_T + other_size_T) / 2
    group_T = document_T % BUCKETS
    weights = (there_T, there_T * shared_T / np.maximum(mean_size_T, 1))
    parts: Array = np.stack([np.bincount(group_T, weight) for weight in weights], axis=1).astype(float)
    documents = len(np.unique(document_T[there_T]))
    interval = clip_share(jackknife_interval(parts, lambda part: part[..., 1] / part[..., 0], documents))
    paired = np.flatnonzero(there_T)
    shuffled = generator.permutation(paired)
    by_chance_T, _ = overlap(chosen_TK[paired], other_TK[shuffled])
    sizes_T, shuffled_sizes_T = size_T[paired], other_size_T[shuffled]
    same_set_T = (by_chance_T == sizes_T) & (by_chance_T == shuffled_sizes_T)
    total_T = np.where(np.isfinite(gates_TK).any(1), np.nansum(gates_TK, axis=1), np.nan)
    lost = (gates_TK / total_T[:, None])[lost_TK & there_T[:, None]]
    same_order_T = (chosen_TK == other_TK).all(1)
    return {
        "tokens": tokens,
        "equal_sets": float(equal_T[there_T].mean()),
        "equal_sets_chance": float(same_set_T.mean()),
        "overlap": float(parts[:, 1].sum() / tokens),
        "low": interval.low,
        "high": interval.high,
        "overlap_chance": float((by_chance_T / ((sizes_T + shuffled_sizes_T) / 2)).mean()),
        "top1": float((chosen_TK[there_T, 0] == other_TK[there_T, 0]).mean()),
        "reordered": float((equal_T & ~same_order_T)[there_T].mean()),
        "lost_gate": float(lost.mean()) if len(lost) and np.isfinite(lost).all() else np.nan,
        "mean_gate": float(1 / size_T[there_T].mean()),
    }, there_T & ~equal_T


def flip_margins(margin_T: Array, different_T: NDArray[np.bool_]) -> dict[str, float]:
    """How many of the tokens with other experts had a small selection margin; chance: of all tokens."""
    known_T = np.isfinite(margin_T)
    if not (known_T & different_T).any():
        return {}
    threshold = float(np.quantile(margin_T[known_T], CLOSEST, method="inverted_cdf"))
    return {
        "small_margin": threshold,
        "flips_at_small_margin": float((margin_T[known_T & different_T] <= threshold).mean()),
        "flips_at_small_margin_chance": float((margin_T[known_T] <= threshold).mean()),
    }


def overlap(
    chosen_TK: NDArray[np.integer], other_TK: NDArray[np.integer]
) -> tuple[Integers, NDArray[np.bool_]]:
    """Return the experts that both choices of a token hold, and which of the first are not in the second."""
    found_TK = np.zeros(chosen_TK.shape, dtype=bool)
    for begin in range(0, len(chosen_TK), AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        found_TK[part] = (chosen_TK[part, :, None] == other_TK[part, None, :]).any(2)
    there_TK = chosen_TK >= 0
    return (found_TK & there_TK).sum(1), there_TK & ~found_TK
