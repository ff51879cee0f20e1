"""Quantised checkpoints: stored tensors in, logical ones out, from headers alone.

One file a scheme, and the list of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.quantised.int_packed import int_packed
from moescope.checkpoint.quantised.mxfp4 import mxfp4
from moescope.checkpoint.quantised.packed import Packed, Scheme, stated, unreadable
from moescope.checkpoint.quantised.refused import nvfp4, refuse_unreadable
from moescope.checkpoint.quantised.scaled import scaled

if TYPE_CHECKING:
    from moescope.checkpoint.headers import TensorInfo

# No two claim the same tensor, so their order does not matter.
SCHEMES: list[Scheme] = [nvfp4, mxfp4, int_packed, scaled]

__all__ = ["SCHEMES", "Packed", "unpacked"]


def unpacked(
    stored: Mapping[str, TensorInfo], config: Mapping[str, Any] | None
) -> tuple[dict[str, TensorInfo], dict[str, Packed]]:
    """The tensors as the model has them, and how those are read that are stored quantised.

    A logical tensor has its own name and shape, and the scheme as its dtype; scales are no tensors of their
    own. One that
    cannot be read (parts missing, of the wrong shape) is there too, and refused when it is asked for; a
    scheme whose
    tensors have no known logical form is refused here.
    """
    quantisation = stated(config)
    refuse_unreadable(stored, quantisation)
    left = dict(stored)
    packed: dict[str, Packed] = {}
    logical: dict[str, TensorInfo] = {}
    for scheme in SCHEMES:
        for info, how in list(scheme(left, quantisation)):
            for part in how.parts:
                left.pop(part, None)
            if info.name in left or info.name in logical:
                how = unreadable(
                    how.scheme, info, how.parts, "is stored twice, in two forms", "keep one of the two"
                )
                left.pop(info.name, None)
            logical[info.name], packed[info.name] = info, how
    return {**left, **logical}, packed
