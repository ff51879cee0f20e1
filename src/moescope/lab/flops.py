"""How many floating-point operations a piece of code does, counted while it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Operations that go through all elements without being tagged as pointwise.
REDUCTIONS = {
    "_softmax",
    "_log_softmax",
    "logsumexp",
    "sum",
    "mean",
    "var",
    "std",
    "amax",
    "amin",
    "linalg_vector_norm",
    "cumsum",
    "native_layer_norm",
    "_thnn_fused_gru_cell",
}
# Tagged as pointwise, but they move numbers and make none.
MOVES = {
    "where",
    "masked_fill",
    "masked_fill_",
    "copy_",
    "fill_",
    "clone",
    "_to_copy",
    "zero_",
    "scalar_tensor",
}


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `flops` grows by 2 m n k for every matrix product and by one an element for other arithmetic
    on floats.

    One an element is a convention: a logarithm costs more than a sum. Sorting, comparing and moving numbers
    count nothing, so that a component may cost time without a single operation here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, out)
        return out


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func._overloadpacket
    name = packet.__name__
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if name == "_grouped_mm":  # each row meets one expert's matrix
        return 2 * args[0].shape[0] * args[0].shape[1] * out.shape[1]
    if name in MOVES or not (torch.Tag.pointwise in func.tags or name in REDUCTIONS):
        return 0
    outputs = out if isinstance(out, tuple | list) else (out,)
    if not any(isinstance(one, Tensor) and one.is_floating_point() for one in outputs):
        return 0  # a comparison
    return max(one.numel() for one in (*args, *outputs) if isinstance(one, Tensor))
