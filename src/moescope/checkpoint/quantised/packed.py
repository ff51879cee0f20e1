"""What a quantised tensor is to the rest.

One logical tensor, made from several stored ones when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.checkpoint.headers import TensorInfo

Index = int | slice | None  # of a tensor's first axis; None is all of it
ReadPart = Callable[[str, Index], "Tensor"]  # reads a stored tensor, or a part of its first axis
Stored = Mapping[str, "TensorInfo"]
Claim = tuple["TensorInfo", "Packed"]  # a logical tensor, and how it is read
Scheme = Callable[[Stored, "Quantisation"], Iterator[Claim]]

READ_INSTEAD = "give a checkpoint in BF16, FP8, MXFP4 or compressed-tensors INT4"
E8M0_NAN = 255


@dataclass(frozen=True)
class Packed:
    """One logical tensor of a quantised checkpoint: what it is made of, and how.

    It comes out as float32. bfloat16 would round: an e4m3 value times a float32 scale needs up to 28 bits, an
    int4 value times
    a bfloat16 scale 12. MXFP4 and INT4 are exact in float32, FP8 is rounded once, as transformers rounds it.
    """

    scheme: str  # as `inspect` shows it
    parts: tuple[
        str, ...
    ]  # stored tensors that are no tensors of their own, those that need not be read among them
    decode: Callable[[ReadPart, Index], Tensor] | None  # None where there is a problem
    problem: str = (
        ""  # why it cannot be read: said when it is asked for, since what nobody asks for may be in any form
    )

    def check(self) -> None:
        if self.problem or self.decode is None:
            raise BadInput(self.problem)

    def read(self, read_part: ReadPart, index: Index = None) -> Tensor:
        """The decoded tensor, or part of its first axis.

        Of a fused tensor no other expert's data are read.
        """
        self.check()
        assert self.decode is not None
        return self.decode(read_part, index)


def unreadable(
    scheme: str, info: TensorInfo, parts: tuple[str, ...], why: str, remedy: str = READ_INSTEAD
) -> Packed:
    return Packed(scheme, parts, None, f"{info.file}: tensor {info.name} {why}; {remedy}")


def incomplete(scheme: str, info: TensorInfo, parts: tuple[str, ...], missing: str) -> Packed:
    remedy = f"download the shard that holds it; if none does, {READ_INSTEAD}"
    return unreadable(scheme, info, parts, f"is {scheme}, but {missing} is missing", remedy)


def misshapen(
    scheme: str, info: TensorInfo, parts: tuple[str, ...], part: TensorInfo, expected: str
) -> Packed:
    why = (
        f"is {scheme} of shape {list(info.shape)}, but {part.name} has shape {list(part.shape)}, "
        f"expected {expected}"
    )
    return unreadable(scheme, info, parts, why, "check how it was saved")


def present(stored: Stored, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in stored)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(s - 127) of bytes s, as float32: the scales of the microscaling formats (e8m0), of which 255 is not
    a number.

    From a table, since a power function may round 2^-127, which float32 holds only as a subnormal, to zero.
    """
    import torch

    table = torch.tensor([2.0 ** (s - 127) for s in range(E8M0_NAN)] + [float("nan")], dtype=torch.float32)
    return table[exponents.view(torch.uint8).int()]


@dataclass(frozen=True)
class Quantisation:
    """What the config says of quantisation; empty where it says nothing."""

    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> Any:
        return self.said.get("quant_method")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that share a scale.

        128 x 128, as all released models have it, where the config is silent.
        """
        stated = self.said.get("weight_block_size")
        if stated is None:
            return (128, 128)
        if isinstance(stated, list | tuple) and len(stated) == 2 and all(is_count(side) for side in stated):
            return (stated[0], stated[1])
        raise BadInput(
            f"config.json: quantization_config.weight_block_size is {stated!r}, expected two "
            "whole numbers; download it again"
        )


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def stated(config: Mapping[str, Any] | None) -> Quantisation:
    """The config's own part on quantisation, which may stand inside that of the text model."""
    for place in (config, (config or {}).get("text_config")):
        if isinstance(place, dict):
            for name in ("quantization_config", "compression_config"):
                if isinstance(place.get(name), dict):
                    return Quantisation(place[name])
    return Quantisation()
