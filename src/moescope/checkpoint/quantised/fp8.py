"""FP8 and plain INT8: eight-bit values times a scale per block, per row or per tensor.

DeepSeek stores `X.weight` in e4m3 and `X.weight_scale_inv`, one scale per 128 x 128 block (the last blocks
may be smaller). Despite its name the scale is multiplied. transformers 5 stores fused experts as `X`
[E, rows, columns] and `X_scale_inv` [E, ...]. compressed-tensors calls the scale `X.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from moescope.checkpoint.quantised.int_packed import weight_settings
from moescope.checkpoint.quantised.packed import (
    EXPONENTS,
    FLOATS,
    Claim,
    Packed,
    Quantisation,
    ReadPart,
    Stored,
    incomplete,
    is_count,
    misshapen,
    powers_of_two,
    present,
)
from moescope.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.checkpoint.files import Index, TensorInfo

FP8 = ("F8_E4M3", "F8_E5M2")
SCALES = (*FLOATS, *EXPONENTS)
MX_BLOCK = (1, 32)


@dataclass(frozen=True)
class Grid:
    """One scale per `rows` x `columns` values, counted separately in each of `stacked` parts."""

    rows: int
    columns: int
    stacked: int = 1  # 2 if gate and up were scaled separately, then concatenated

    def shape(self, height: int, width: int) -> tuple[int, int]:
        return self.stacked * -(-(height // self.stacked) // self.rows), -(-width // self.columns)

    def of_rows(self, height: int) -> Tensor:
        """Return the grid row of each row of the matrix."""
        import torch

        part = height // self.stacked
        row = torch.arange(height)
        return row // part * -(-part // self.rows) + row % part // self.rows


@dataclass(frozen=True)
class ScaledValues:
    weight: TensorInfo
    scale: TensorInfo
    zero_point: TensorInfo | None
    grid: Grid

    def __call__(self, read_part: ReadPart, index: Index) -> Tensor:
        """Return (value - zero point) * scale, the product rounded once, to float32."""
        values = read_part(self.weight.name, index).float()
        if self.zero_point:
            values -= self.spread(read_part, self.zero_point, index, exponents=False)
        return values.mul_(self.spread(read_part, self.scale, index, self.scale.dtype in EXPONENTS))

    def spread(self, read_part: ReadPart, scale: TensorInfo, index: Index, exponents: bool) -> Tensor:
        """Return one scale per value at that index; `exponents` are stored of powers of two."""
        *experts, height, width = self.weight.shape
        stack = experts and prod(scale.shape) > 1  # read only the scales of these experts
        part = read_part(scale.name, index if stack else None)
        lead = part.shape[:1] if stack and not isinstance(index, int) else ()
        grid = (powers_of_two(part) if exponents else part.float()).reshape(
            *lead, *self.grid.shape(height, width)
        )
        rows = self.grid.of_rows(height)
        if not experts and index is not None:
            rows = rows[index]
        return grid[..., rows, :].repeat_interleave(min(self.grid.columns, width), dim=-1)[..., :width]


def fp8(stored: Stored, quantisation: Quantisation) -> Iterator[Claim]:
    block = quantisation.get("weight_block_size")
    block = (128, 128) if block is None else block  # as in all released models
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(map(is_count, block))):
        raise BadInput(
            f"config.json: quantization_config.weight_block_size is {block!r}, expected two whole numbers; "
            "download it again"
        )
    sizes = {settings.group_size for settings in weight_settings(quantisation)}
    group = sizes.pop() if len(sizes) == 1 else None  # columns of INT8 that share a scale
    by_compressed_tensors = quantisation.get("quant_method") == "compressed-tensors"  # others differ in int8
    for name, info in stored.items():
        is_fp8 = info.dtype in FP8
        if not (is_fp8 or (info.dtype == "I8" and by_compressed_tensors and name.endswith(".weight"))):
            continue
        if len(info.shape) in (2, 3) and not name.endswith(("_scale", ".scale", "_scale_inv", "_zero_point")):
            yield info, with_scale(stored, info, (block[0], block[1]), group, "FP8" if is_fp8 else "INT8")


def with_scale(
    stored: Stored, info: TensorInfo, block: tuple[int, int], group: int | None, scheme: str
) -> Packed:
    name, module = info.name, info.name.removesuffix("weight")
    unused = (f"{module}{part}" for part in ("input_scale", "activation_scale", "qscale_act"))
    names = (f"{name}_scale_inv", f"{name}_scale", f"{module}scale", f"{module}qscale_weight")
    scales = present(stored, *(names if name.endswith(".weight") else names[:2]))
    parts = present(stored, name, *scales, *unused, f"{name}_activation_scale", f"{name}_zero_point")
    if not scales:
        return incomplete(scheme, info, parts, f"its scale {names[0] if scheme == 'FP8' else names[1]}")
    scale = stored[scales[0]]
    grid = find_grid(info.shape, scale.shape, block, group, halves="gate_up" in name)
    if not grid or scale.dtype not in SCALES:
        wanted = [*info.shape[:-2], *Grid(*block).shape(*info.shape[-2:])]
        expected = f"{wanted} of floats for blocks of {block[0]} x {block[1]}"
        return misshapen(scheme, info, parts, scale, expected)
    zero_point = stored.get(f"{name}_zero_point")
    if zero_point and zero_point.shape != scale.shape:
        return misshapen(scheme, info, parts, zero_point, str(list(scale.shape)))
    return Packed(
        f"{scheme} {describe(grid, info.shape)}", parts, ScaledValues(info, scale, zero_point, grid)
    )


def find_grid(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int], group: int | None, halves: bool
) -> Grid | None:
    """Return the grid with as many rows and columns as there are scales; None if none or several fit.

    The configured block comes first. Llama 4's transposed experts have a scale per column.
    """
    *stack, height, width = shape
    if 0 in shape:
        return None
    if prod(scale) == 1:
        return Grid(height, width)
    if scale[: len(stack)] != tuple(stack):
        return None
    rest = scale[len(stack) :]
    # one scale per expert or per row may be stored without the axes of length 1
    grid = (*rest, *(1,) * (2 - len(rest)))
    whole, half = Grid(*block), Grid(*block, stacked=2)
    tried = [whole, *([half] if halves else []), Grid(1, width), Grid(height, 1), Grid(height, width)]
    tried += [Grid(*MX_BLOCK), *([Grid(1, group)] if group else [])]
    fitting = [way for way in tried if height % way.stacked == 0 and way.shape(height, width) == grid]
    if {whole, half} <= set(fitting) and (height // 2) % block[0]:
        # gate and up scaled together or separately: equally many scales at other positions, undecidable
        return None
    return fitting[0] if fitting else None


def describe(grid: Grid, shape: tuple[int, ...]) -> str:
    height, width = shape[-2:]
    full_rows, full_columns = grid.columns >= width, grid.rows >= height
    if full_rows and full_columns:
        return "with one scale"
    if full_rows and grid.rows == 1:
        return "with one scale per row"
    if full_columns and grid.columns == 1:
        return "with one scale per column"
    return f"in blocks of {grid.rows} x {grid.columns}"
