"""MXFP4: blocks of 32 four-bit values (e2m1) that share one power of two (OCP Microscaling Formats, 2023).

GPT-OSS stores `X_blocks` [E, rows, columns / 32, 16] and `X_scales` [E, rows, columns / 32];
compressed-tensors stores `X.weight_packed` [rows, columns / 2] and `X.weight_scale` [rows, columns / 32]. All
are bytes; a byte holds two values, the first in its low half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moescope.checkpoint.quantised.packed import (
    EXPONENTS,
    Claim,
    Packed,
    Quantisation,
    ReadPart,
    Stored,
    incomplete,
    misshapen,
    powers_of_two,
    present,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.checkpoint.files import Index, TensorInfo

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32
BYTES = BLOCK // 2

SCHEME = "MXFP4 in blocks of 32"


@dataclass(frozen=True)
class Mxfp4:
    blocks: str
    scales: str

    def __call__(self, read_part: ReadPart, index: Index) -> Tensor:
        """Return e2m1(code) * 2^(s - 127), oriented as stored; transformers then transposes GPT-OSS."""
        blocks, scales = read_part(self.blocks, index), read_part(self.scales, index)
        return decode(blocks.reshape(*scales.shape, BYTES), scales)


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    import torch

    pairs = torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)], dtype=torch.float32)
    values = pairs[blocks.int()].flatten(-2)  # one look-up per byte
    return values.mul_(powers_of_two(scales)[..., None]).flatten(-2)


def mxfp4(stored: Stored, quantisation: Quantisation) -> Iterator[Claim]:
    for name, info in stored.items():
        if info.dtype != "U8":
            continue
        if name.endswith("_blocks") and len(info.shape) >= 3:
            *rows, count, width = info.shape
            stem, shape = name.removesuffix("_blocks"), (*rows, count * 2 * width)
            yield one_tensor(stored, info, stem, shape, f"{stem}_scales", width)
        elif name.endswith(".weight_packed") and len(info.shape) >= 2:
            *rows, width = info.shape
            stem, shape = name.removesuffix("_packed"), (*rows, 2 * width)
            scale = stored.get(f"{stem}_scale")
            if scale is not None and scale.dtype in EXPONENTS:
                yield one_tensor(stored, info, stem, shape, scale.name, BYTES)


def one_tensor(
    stored: Stored, blocks: TensorInfo, name: str, shape: tuple[int, ...], scales: str, width: int
) -> Claim:
    logical = replace(blocks, name=name, shape=shape, dtype="MXFP4")
    parts = present(stored, blocks.name, scales, name.removesuffix("weight") + "input_global_scale")
    if scales not in stored:
        return logical, incomplete("MXFP4", logical, parts, scales)
    if width != BYTES:
        return logical, misshapen("MXFP4", logical, parts, blocks, f"[..., {BYTES}]")
    expected, scale = (*shape[:-1], shape[-1] // BLOCK), stored[scales]
    if scale.shape != expected or shape[-1] % BLOCK or scale.dtype not in EXPONENTS:
        wanted = f"{list(expected)} of bytes, one for {BLOCK} columns"
        return logical, misshapen("MXFP4", logical, parts, scale, wanted)
    return logical, Packed(SCHEME, parts, Mxfp4(blocks.name, scales))
