"""Importance matrices of llama.cpp (llama-imatrix, GGUF): how many tokens each expert got."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from moescope.errors import BadInput
from moescope.types import Array, Integers

COUNTS = re.compile(r"blk\.(\d{1,3})\.(.+)\.weight\.counts")
MOST_EXPERTS = 4096


def read_imatrix(file: Path) -> tuple[dict[int, Integers], int | None]:
    """Return tokens per expert of every MoE layer, and the experts per token where the file tells them.

    Tensors `blk.N.ffn_*_exps.weight.counts` hold one count per expert; those of a layer's projections are
    equal. The counts of its other tensors are the tokens that it saw, else chunks times tokens per chunk.
    """
    layers: dict[int, Integers] = {}
    seen: dict[int, int] = {}
    tensors, chunk_tokens = read_counts(file)
    for name, values in tensors.items():
        found = COUNTS.fullmatch(name)
        if found is None:
            continue
        layer = int(found[1])
        if not np.isfinite(values).all() or (values < 0).any() or (values >= 2**40).any():
            raise BadInput(f"{file}: tensor {name} holds no counts; make the importance matrix again")
        counts = np.round(values).astype(np.int64)
        if re.fullmatch(r"ffn_\w+_exps", found[2]):
            before = layers.get(layer, counts)
            if len(before) != len(counts) or len(counts) > MOST_EXPERTS:
                raise BadInput(
                    f"{file}: tensor {name} has {len(counts)} counts; expected one per expert, as many in "
                    f"all projections of the layer and at most {MOST_EXPERTS}"
                )
            layers[layer] = np.maximum(before, counts)
        elif len(counts) == 1:
            seen[layer] = max(seen.get(layer, 0), int(counts[0]))
    if not layers:
        raise BadInput(
            f"{file}: no tensor blk.N.ffn_*_exps.weight.counts in it; give what llama-imatrix wrote for a "
            "Mixture-of-Experts model"
        )
    shares = {
        int(counts_E.sum()) / tokens
        for layer, counts_E in layers.items()
        if (tokens := seen.get(layer) or chunk_tokens) and counts_E.any()
    }
    k = round(next(iter(shares))) if shares else 0
    known = k > 0 and all(abs(share - k) < 0.01 * k for share in shares)
    return dict(sorted(layers.items())), k if known else None


def read_counts(file: Path) -> tuple[dict[str, Array], int]:
    """Return the tensors of counts by name, and the tokens that the matrix was made from (0: unknown)."""
    if file.suffix == ".dat":
        raise BadInput(
            f"{file}: an importance matrix in the old format, without counts per expert; convert or make it "
            "with llama-imatrix --output-format gguf"
        )
    try:
        import gguf
    except ImportError:
        raise BadInput(
            f"{file}: GGUF files are read with the package gguf; pip install 'moescope[formats]'"
        ) from None
    try:
        reader = gguf.GGUFReader(file)
        with np.errstate(invalid="ignore"):  # damaged numbers are named by the caller
            tensors = {
                tensor.name: np.array(tensor.data, dtype=np.float64).reshape(-1)
                for tensor in reader.tensors
                if tensor.name.endswith(".counts") and tensor.tensor_type == gguf.GGMLQuantizationType.F32
            }
        chunks = [field_number(reader, f"imatrix.chunk_{what}") for what in ("count", "size")]
    except Exception as error:  # the reader documents none, and raises whatever a damaged header leads to
        why = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise BadInput(f"{file}: no valid GGUF file ({why}); make the importance matrix again") from None
    return tensors, chunks[0] * chunks[1]


def field_number(reader: Any, name: str) -> int:
    field = reader.fields.get(name)
    return 0 if field is None else int(field.parts[field.data[0]][0])
