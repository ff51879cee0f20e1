"""A quantised tensor: one logical tensor, decoded from several stored ones when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.checkpoint.files import Index, TensorInfo

ReadPart = Callable[[str, "Index"], "Tensor"]  # reads a stored tensor, or a part of its first axis
Stored = Mapping[str, "TensorInfo"]
Claim = tuple["TensorInfo", "Packed"]  # a logical tensor, and how to read it
Quantisation = Mapping[str, Any]  # the quantization_config of config.json
Scheme = Callable[[Stored, Quantisation], Iterator[Claim]]

USE_INSTEAD = "give a checkpoint in BF16, FP8, MXFP4 or compressed-tensors INT4"
E8M0_NAN = 255
EXPONENTS = ("U8", "F8_E8M0")  # dtypes of scales stored as exponents of two
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Packed:
    """How to read one logical tensor of a quantised checkpoint.

    Decoded to float32; bfloat16 would round: an e4m3 value times a float32 scale needs up to 28 bits, an int4
    value times a bfloat16 scale 12. MXFP4 and INT4 are exact in float32, FP8 is rounded once, as in
    transformers.
    """

    scheme: str  # as `inspect` shows it
    parts: tuple[str, ...]  # the stored tensors it consists of, including those that are not needed
    decode: Callable[[ReadPart, Index], Tensor] | None  # None if there is a problem
    problem: str = ""  # raised only when the tensor is requested: unused tensors may be in any format

    def read(self, read_part: ReadPart, index: Index = None) -> Tensor:
        """Decode the tensor, or a part of its first axis without reading the rest."""
        if self.decode is None:
            raise BadInput(self.problem)
        return self.decode(read_part, index)


def rejected(
    scheme: str, info: TensorInfo, parts: tuple[str, ...], why: str, remedy: str = USE_INSTEAD
) -> Packed:
    return Packed(scheme, parts, None, f"{info.file}: tensor {info.name} {why}; {remedy}")


def incomplete(scheme: str, info: TensorInfo, parts: tuple[str, ...], missing: str) -> Packed:
    remedy = f"download the shard that holds it; if none does, {USE_INSTEAD}"
    return rejected(scheme, info, parts, f"is {scheme}, but {missing} is missing", remedy)


def misshapen(
    scheme: str, info: TensorInfo, parts: tuple[str, ...], part: TensorInfo, expected: str
) -> Packed:
    why = (
        f"is {scheme} of shape {list(info.shape)}, but {part.name} has shape {list(part.shape)}, expected "
        f"{expected}"
    )
    return rejected(scheme, info, parts, why, "check how it was saved")


def present(stored: Stored, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in stored)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2^(s - 127) of bytes s as float32: microscaling's e8m0 scales; 255 is NaN.

    From a table: a power function may round 2^-127, a subnormal in float32, to zero.
    """
    import torch

    table = torch.tensor([2.0 ** (s - 127) for s in range(E8M0_NAN)] + [float("nan")], dtype=torch.float32)
    return table[exponents.view(torch.uint8).int()]


def is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def find_quantisation(config: Mapping[str, Any] | None) -> Quantisation:
    """Return the quantisation part of a config or of its text model's config; empty if there is none."""
    for place in (config, (config or {}).get("text_config")):
        for name in ("quantization_config", "compression_config"):
            if isinstance(place, dict) and isinstance(place.get(name), dict):
                return place[name]
    return {}
