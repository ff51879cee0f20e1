"""compressed-tensors `pack-quantized`: integers of a few bits in 32-bit words, one scale per column group.

`X.weight_packed` int32 [rows, columns * bits / 32], lowest bits first, each value stored plus 2^(bits - 1);
`X.weight_scale` [rows, groups]; `X.weight_shape`, the logical shape, as data; for asymmetric quantisation
`X.weight_zero_point`, packed along the rows. Bits and group size are in the config only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moescope.checkpoint.quantised.packed import (
    FLOATS,
    USE_INSTEAD,
    Claim,
    Packed,
    Quantisation,
    ReadPart,
    Stored,
    incomplete,
    is_count,
    misshapen,
    present,
    rejected,
)
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.checkpoint.files import Index, TensorInfo

WORD = 32
# those that never straddle two words; library releases pack the others differently
BITS = (2, 4, 8)


@dataclass(frozen=True)
class WeightSettings:
    """How one config group quantises the weights of its targets."""

    targets: tuple[str, ...]
    bits: int
    group_size: int | None  # None: one scale per row or per tensor
    symmetric: bool


@dataclass(frozen=True)
class IntPacked:
    packed: str
    scale: str
    zero_point: str | None
    shape_part: str
    file: str
    shape: tuple[int, ...]
    bits: int
    group_size: int  # all columns if a row has one scale
    one_scale: bool  # for all of the tensor

    def __call__(self, read_part: ReadPart, index: Index) -> Tensor:
        """Return (value - zero point) * group scale; exact in float32 for 16-bit scales."""
        import torch

        self.check_shape(read_part)
        *_, height, width = self.shape
        fused = len(self.shape) == 3
        values = unpack(read_part(self.packed, index), self.bits)[..., :width].float()
        group = torch.arange(width) // self.group_size
        if self.zero_point:
            # packed along the rows, so single rows cannot be read
            words = read_part(self.zero_point, index if fused else None).transpose(-1, -2).contiguous()
            zero = unpack(words, self.bits)[..., :height].transpose(-1, -2)
            values -= (zero if fused or index is None else zero[index]).float()[..., group]
        if self.one_scale:
            return values.mul_(read_part(self.scale, None).float().reshape(()))
        return values.mul_(read_part(self.scale, index).float()[..., group])

    def check_shape(self, read_part: ReadPart) -> None:
        """Compare with the stored shape: the header gives columns only up to the padding of the last word."""
        shape = read_part(self.shape_part, None).flatten().tolist()
        if shape != list(self.shape):
            raise BadInput(
                f"{self.file}: tensor {self.shape_part} says {shape}, but {self.packed} and its scales "
                f"hold {list(self.shape)}; columns that do not fill whole words of {WORD} bits cannot be "
                f"read, {USE_INSTEAD}"
            )


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the signed integers packed in the words of the last axis, lowest bits first."""
    import torch

    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    values = words.to(torch.int32)[..., None] >> shifts  # sign extension is masked out below
    return values.bitwise_and_(2**bits - 1).sub_(2 ** (bits - 1)).flatten(-2)


def int_packed(stored: Stored, quantisation: Quantisation) -> Iterator[Claim]:
    groups = weight_settings(quantisation)
    for name, info in stored.items():
        if name.endswith(".weight_packed") and info.dtype == "I32" and len(info.shape) in (2, 3):
            settings = settings_of(name.removesuffix(".weight_packed"), groups)
            if settings is None:
                raise BadInput(
                    f"{info.file}: tensor {name} is packed by compressed-tensors, and no group of "
                    "quantization_config in config.json gives its bits; add the checkpoint's config.json"
                )
            yield one_tensor(stored, info, settings)


def one_tensor(stored: Stored, packed: TensorInfo, settings: WeightSettings) -> Claim:
    name = packed.name.removesuffix("_packed")
    scheme = f"INT{settings.bits}"
    *rows, words = packed.shape
    scale, shape, zero_point, order = (f"{name}_{part}" for part in ("scale", "shape", "zero_point", "g_idx"))
    parts = (packed.name, *present(stored, scale, shape, zero_point, order))
    logical = replace(packed, name=name, shape=(*rows, words * WORD // max(settings.bits, 1)), dtype=scheme)
    if settings.bits not in BITS:
        return logical, rejected(
            scheme, logical, parts, f"is packed in {settings.bits} bits, which is not supported"
        )
    if order in stored:
        why = "has its columns grouped by activation (weight_g_idx), which is not supported"
        return logical, rejected(scheme, logical, parts, why)
    needed = (scale, shape) if settings.symmetric else (scale, shape, zero_point)
    for part in needed:
        if part not in stored:
            return logical, incomplete(scheme, logical, parts, part)
    if settings.symmetric and zero_point in stored:
        why = f"is symmetric by config.json, and yet {zero_point} is there"
        return logical, rejected(scheme, logical, parts, why, "check that they belong together")
    return check_parts(stored, logical, packed, settings, parts)


def check_parts(
    stored: Stored, logical: TensorInfo, packed: TensorInfo, settings: WeightSettings, parts: tuple[str, ...]
) -> Claim:
    """Return the claim with the column count that groups and words agree on."""
    name, bits, scheme = logical.name, settings.bits, logical.dtype
    *rows, columns = logical.shape
    scale, zero_point = stored[f"{name}_scale"], stored.get(f"{name}_zero_point")
    one_scale = scale.shape in ((), (1,))
    size = settings.group_size or columns
    groups = -(-columns // size)
    if settings.group_size and scale.shape[:-1] == tuple(rows):
        grouped = scale.shape[-1] * size  # columns in all groups, if the last word is not full
        if -(-grouped * bits // WORD) == packed.shape[-1]:
            columns, groups = grouped, scale.shape[-1]
            logical = replace(logical, shape=(*rows, columns))
    if scale.dtype not in FLOATS or not (
        scale.shape == (*rows, groups) or (one_scale and not settings.group_size)
    ):
        wanted = f"{[*rows, groups]} of floats, one for {size} columns"
        return logical, misshapen(scheme, logical, parts, scale, wanted)
    if zero_point is not None:
        packed_rows = (*rows[:-1], -(-rows[-1] * bits // WORD), groups)
        if zero_point.dtype != "I32" or zero_point.shape != packed_rows:
            return logical, misshapen(scheme, logical, parts, zero_point, f"{list(packed_rows)} of int32")
    how = IntPacked(
        packed.name,
        scale.name,
        zero_point.name if zero_point else None,
        f"{name}_shape",
        logical.file,
        logical.shape,
        bits,
        size,
        one_scale,
    )
    described = (
        f"in groups of {size}"
        if settings.group_size
        else "with one scale"
        if one_scale
        else "with one scale per row"
    )
    return logical, Packed(f"{scheme} {described}", parts, how)


def weight_settings(quantisation: Quantisation) -> list[WeightSettings]:
    """Return the integer weight settings of each config group."""
    groups = quantisation.config.get("config_groups")
    settings = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("type", "int") != "int":
            continue
        bits: Any = weights.get("num_bits")
        size, targets = weights.get("group_size"), group.get("targets")
        if is_count(bits):
            names = tuple(t for t in targets if isinstance(t, str)) if isinstance(targets, list) else ()
            group_size = size if is_count(size) else None  # -1 means one scale per row
            symmetric = weights.get("symmetric", True) is not False
            settings.append(WeightSettings(names, bits, group_size, symmetric))
    return settings


def settings_of(module: str, groups: list[WeightSettings]) -> WeightSettings | None:
    """Return the group that targets the module by name, else the first that targets a class (`Linear`)."""
    if len(groups) == 1:
        return groups[0]
    for group in groups:
        if any(matches(target, module) for target in group.targets):
            return group
    return next((group for group in groups if any(target.isidentifier() for target in group.targets)), None)


def matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False
