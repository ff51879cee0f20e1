"""Quantised checkpoints: stored tensors to logical ones, from headers. One file per scheme; SCHEMES."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.quantised.fp8 import fp8
from moescope.checkpoint.quantised.int_packed import int_packed
from moescope.checkpoint.quantised.mxfp4 import mxfp4
from moescope.checkpoint.quantised.packed import Packed, Scheme, find_quantisation, rejected
from moescope.checkpoint.quantised.unsupported import nvfp4, reject_unsupported

if TYPE_CHECKING:
    from moescope.checkpoint.files import TensorInfo

# No two schemes claim the same tensor, so their order does not matter.
SCHEMES: list[Scheme] = [nvfp4, mxfp4, int_packed, fp8]

__all__ = ["SCHEMES", "Packed", "logical_tensors"]


def logical_tensors(
    stored: Mapping[str, TensorInfo], config: Mapping[str, Any] | None
) -> tuple[dict[str, TensorInfo], dict[str, Packed]]:
    """Return the tensors as the model has them, and how to read those that are quantised.

    A logical tensor has the model's name and shape, and the scheme as dtype; scales are not listed. A tensor
    with missing or wrongly shaped parts is listed and raises when it is read; a scheme whose tensors have no
    known logical form raises here.
    """
    quantisation = find_quantisation(config)
    reject_unsupported(stored, quantisation)
    left = dict(stored)
    packed: dict[str, Packed] = {}
    logical: dict[str, TensorInfo] = {}
    for scheme in SCHEMES:
        for info, how in list(scheme(left, quantisation)):
            for part in how.parts:
                left.pop(part, None)
            if info.name in left or info.name in logical:
                why = "is stored twice, in two formats"
                how = rejected(how.scheme, info, how.parts, why, "keep one of the two")
                left.pop(info.name, None)
            logical[info.name], packed[info.name] = info, how
    return {**left, **logical}, packed
