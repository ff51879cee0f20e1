"""The steps between matrix products.

Each a pure function, so that torch.compile can fuse it into one kernel where that helps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean x^2 + epsilon) times weight, inside in float32. Zhang and Sennrich 2019."""
    return functional.rms_norm(x, weight.shape, weight.to(x.dtype), epsilon)


def rotate(x_BHLd: Tensor, cos_Ld: Tensor, sin_Ld: Tensor) -> Tensor:
    """Rotary positions, halves paired as in Llama and Mixtral. Su et al. 2021."""
    first, second = x_BHLd.chunk(2, -1)
    return x_BHLd * cos_Ld + torch.cat((-second, first), -1) * sin_Ld


def swiglu(gate_up_SF: Tensor) -> Tensor:
    """silu(gate) * up. Shazeer 2020."""
    gate_SF, up_SF = gate_up_SF.chunk(2, -1)
    return functional.silu(gate_SF) * up_SF


def mix(y_SD: Tensor, weights_TK: Tensor, row_TK: Tensor) -> Tensor:
    """sum_k weight_k y[row_k]: gather, multiply and add in one kernel, added up in float32."""
    weights_TK = weights_TK.to(y_SD.dtype)
    return functional.embedding_bag(row_TK, y_SD.contiguous(), mode="sum", per_sample_weights=weights_TK)


def token_losses(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Cross-entropy of each token in nats, float32; 0 where the target is -100."""
    return functional.cross_entropy(logits_TV.float(), targets_T, ignore_index=-100, reduction="none")


@dataclass(frozen=True)
class Elementwise:
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    swiglu: Callable[[Tensor], Tensor] = swiglu
    token_losses: Callable[[Tensor, Tensor], Tensor] = token_losses


EAGER = Elementwise()


@cache
def compiled() -> Elementwise:
    """The same functions through torch.compile, made once a process.

    Compiling itself happens at their first use.
    """
    made = {name: torch.compile(function) for name, function in vars(EAGER).items()}
    return Elementwise(**made)
