"""compressed-tensors `pack-quantized`: integers of a few bits in 32-bit words, one scale per column group.

`X.weight_packed` int32 [rows, columns * bits / 32], lowest bits first, each value stored plus 2^(bits - 1);
`X.weight_scale` [rows, groups]; `X.weight_shape`, the logical shape, as data; for asymmetric quantisation
`X.weight_zero_point`, packed along the rows. Bits and group size are in the config only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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
    logical: TensorInfo
    scale: TensorInfo
    zero_point: TensorInfo | None
    bits: int
    group_size: int  # all columns if a row has one scale

    def __call__(self, read_part: ReadPart, index: Index) -> Tensor:
        """Return (value - zero point) * group scale; exact in float32 for 16-bit scales."""
        import torch

        name = self.logical.name
        *experts, height, width = self.logical.shape
        # the header gives columns only up to the padding of the last word
        shape = read_part(f"{name}_shape", None).flatten().tolist()
        if shape != [*experts, height, width]:
            raise BadInput(
                f"{self.logical.file}: tensor {name}_shape says {shape}, but {name}_packed and its scales "
                f"hold {[*experts, height, width]}; columns that do not fill whole words of {WORD} bits "
                f"cannot be read, {USE_INSTEAD}"
            )
        values = unpack(read_part(f"{name}_packed", index), self.bits)[..., :width].float()
        group = torch.arange(width) // self.group_size
        if self.zero_point:
            # packed along the rows, so single rows cannot be read
            words = read_part(self.zero_point.name, index if experts else None).transpose(-1, -2).contiguous()
            zero = unpack(words, self.bits)[..., :height].transpose(-1, -2)
            values -= (zero if experts or index is None else zero[index]).float()[..., group]
        if self.scale.shape in ((), (1,)):
            return values.mul_(read_part(self.scale.name, None).float().reshape(()))
        return values.mul_(read_part(self.scale.name, index).float()[..., group])


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the signed integers packed in the words of the last axis, lowest bits first."""
    import torch

    # sign extension is masked out below
    values = words.to(torch.int32)[..., None] >> torch.arange(0, WORD, bits, dtype=torch.int32)
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
    """Return the claim with the column count that groups and words agree on."""
    name, bits = packed.name.removesuffix("_packed"), settings.bits
    scheme, columns = f"INT{bits}", packed.shape[-1] * WORD // bits
    *rows, _ = packed.shape
    names = [f"{name}_{part}" for part in ("scale", "shape", "zero_point", "g_idx")]
    parts = present(stored, packed.name, *names)
    logical = replace(packed, name=name, shape=(*rows, columns), dtype=scheme)
    if bits not in BITS:
        return logical, rejected(scheme, logical, parts, f"is packed in {bits} bits, which is not supported")
    if names[3] in stored:
        why = "has its columns grouped by activation (weight_g_idx), which is not supported"
        return logical, rejected(scheme, logical, parts, why)
    for part in names[: 2 if settings.symmetric else 3]:
        if part not in stored:
            return logical, incomplete(scheme, logical, parts, part)
    scale, zero_point = stored[names[0]], stored.get(names[2])
    if settings.symmetric and zero_point:
        why = f"is symmetric by config.json, and yet {zero_point.name} is there"
        return logical, rejected(scheme, logical, parts, why, "check that they belong together")
    one_scale = scale.shape in ((), (1,))
    size = settings.group_size or columns
    groups = -(-columns // size)
    if settings.group_size and scale.shape[:-1] == tuple(rows):
        grouped = scale.shape[-1] * size  # columns in all groups, if the last word is not full
        if -(-grouped * bits // WORD) == packed.shape[-1]:
            columns, groups = grouped, scale.shape[-1]
            logical = replace(logical, shape=(*rows, columns))
    fits = scale.shape == (*rows, groups) or (one_scale and not settings.group_size)
    if scale.dtype not in FLOATS or not fits:
        wanted = f"{[*rows, groups]} of floats, one for {size} columns"
        return logical, misshapen(scheme, logical, parts, scale, wanted)
    if zero_point is not None:
        packed_rows = (*rows[:-1], -(-rows[-1] * bits // WORD), groups)
        if zero_point.dtype != "I32" or zero_point.shape != packed_rows:
            return logical, misshapen(scheme, logical, parts, zero_point, f"{list(packed_rows)} of int32")
    one = "with one scale" if one_scale else "with one scale per row"
    described = f"in groups of {size}" if settings.group_size else one
    return logical, Packed(f"{scheme} {described}", parts, IntPacked(logical, scale, zero_point, bits, size))


def weight_settings(quantisation: Quantisation) -> list[WeightSettings]:
    """Return the integer weight settings of each config group."""
    groups = quantisation.get("config_groups")
    settings = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("type", "int") != "int":
            continue
        bits, size, targets = weights.get("num_bits"), weights.get("group_size"), group.get("targets")
        if is_count(bits):
            names = tuple(t for t in targets if isinstance(t, str)) if isinstance(targets, list) else ()
            group_size = size if is_count(size) else None  # -1 means one scale per row
            symmetric = weights.get("symmetric", True) is not False
            settings.append(WeightSettings(names, bits, group_size, symmetric))
    return settings


def settings_of(module: str, groups: list[WeightSettings]) -> WeightSettings | None:
    """Return the group that targets the module by name, else the first that targets a class (`Linear`)."""
    named = [group for group in groups if any(matches(target, module) for target in group.targets)]
    classes = [group for group in groups if any(target.isidentifier() for target in group.targets)]
    return next(iter([*named, *classes] if len(groups) != 1 else groups), None)


def matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target == module
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False
