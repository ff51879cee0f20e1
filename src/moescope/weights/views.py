"""The choices that change an answer.

Which matrix of an expert, which reading of the router, norm folded in or not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from moescope.errors import BadInput, UnusableExpert, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.types import ExpertStack, LayerWeights

MATRICES = ("gate", "up", "gate_up", "down")
ROUTERS = ("raw", "centered")


def norm_scale(weights: LayerWeights) -> Tensor:
    """[D] what the norm in front of the block multiplies by."""
    import torch

    if weights.norm_D is None:
        raise BadInput(
            f"{weights.layer_name}: no norm in front of this block in the checkpoint; scan "
            "without --fold-norm"
        )
    return weights.norm_D.read().to(torch.float64) + weights.norm_offset


def router_rows(weights: LayerWeights, fold_norm: bool) -> Tensor | None:
    """[E, D] the router's rows in fp64, the norm's weight multiplied in where asked.

    None where the router has none.
    """
    import torch

    scale_D = norm_scale(weights) if fold_norm else None
    if weights.router_ED is None:
        return None
    rows = weights.router_ED.read().to(torch.float64)
    return rows if scale_D is None else rows * scale_D


def stand_in_rows(weights: LayerWeights) -> Tensor:
    """[E, D] random directions, always the same, for a layer whose router has no rows.

    A decomposition is trusted by how exactly it places directions, and does its work on as many of them as
    there are experts; of these
    nothing is kept.
    """
    import torch

    drawn = torch.Generator().manual_seed(0)
    rows = torch.randn(weights.n_experts, weights.d_model, generator=drawn, dtype=torch.float64)
    return rows / rows.norm(dim=1, keepdim=True)


def unusable_rows(weights: LayerWeights, rows_ED: Tensor) -> dict[int, UnusableExpert]:
    """Expert -> why its router row cannot be normalised."""
    assert weights.router_ED is not None
    found = {}
    for expert, row in enumerate(rows_ED):
        reason = (
            "holds NaN or Inf"
            if not bool(row.isfinite().all())
            else "is all zeros"
            if not bool(row.any())
            else None
        )
        if reason:
            message = f"{weights.router_ED.file}: row {expert} of router {weights.router_ED.name} {reason}"
            found[expert] = UnusableExpert(
                f"{message}; mend the checkpoint, or mark this expert and go on: --keep-going", expert
            )
    return found


def normalised_rows(weights: LayerWeights, rows_ED: Tensor, reading: str) -> Tensor:
    """[E, D] unit rows: as stored (raw), or less their mean (centered.

    The reading a softmax cannot tell from raw).
    """
    if reading not in ROUTERS:
        raise unknown_name("router reading", reading, list(ROUTERS))
    if reading == "centered":
        if weights.scoring != "softmax":
            raise BadInput(
                f"{weights.layer_name}: centering assumes a softmax router, this one's scoring "
                f"is {weights.scoring}; use --router raw"
            )
        if len(rows_ED) < 3:
            raise BadInput(
                f"{weights.layer_name}: centered rows of {len(rows_ED)} experts are each other's "
                "opposite; use --router raw"
            )
        centered = rows_ED - rows_ED.mean(0)
        if bool((centered.norm(dim=1) <= 1e-12 * rows_ED.norm(dim=1)).any()):
            raise BadInput(
                f"{weights.layer_name}: a centered router row is zero (it equals the mean row); "
                "use --router raw"
            )
        rows_ED = centered
    return rows_ED / rows_ED.norm(dim=1, keepdim=True)


def centered_share(rows_ED: Tensor, left_out: Collection[int] = ()) -> dict[int, float]:
    """Expert -> ||r_i - mean|| / ||r_i||: how much of its row is its own, not common to all."""
    experts = [expert for expert in range(len(rows_ED)) if expert not in left_out]
    rows = rows_ED[experts]
    shares = (rows - rows.mean(0)).norm(dim=1) / rows.norm(dim=1)
    return {expert: float(share) for expert, share in zip(experts, shares, strict=True)}


def check_matrix(weights: LayerWeights, matrix: str) -> None:
    """Refuse a matrix that the layer's experts do not have."""
    if matrix not in MATRICES:
        raise unknown_name("matrix", matrix, list(MATRICES))
    if matrix in ("up", "gate_up") and weights.up_EFD is None:
        raise BadInput(f"{weights.layer_name}: these experts have no up matrix; use --matrix gate or down")


def expert_matrix(
    weights: LayerWeights, matrix: str, expert: int, scale_D: Tensor | None, device: str = "cpu"
) -> Tensor:
    """[F, D] the expert's matrix with d_model along its rows, in the checkpoint's precision unless something
    is multiplied in.

    down is transposed, so that its left singular vectors come out as right ones; the norm is not folded into
    it, since
    its vectors live on the output side. gate_up stacks both halves, each of unit Frobenius norm.
    """
    import torch

    check_matrix(weights, matrix)
    if matrix == "down":
        return read_expert(weights.down_EDF, expert, device).T
    stack = weights.gate_EFD if matrix == "gate" else weights.up_EFD
    assert stack is not None  # said by check_matrix
    read = read_expert(stack, expert, device)
    if scale_D is not None:
        read = read.to(torch.float64) * scale_D
    if matrix == "gate_up":
        gate = read_expert(weights.gate_EFD, expert, device).to(torch.float64)
        halves = [gate if scale_D is None else gate * scale_D, read.to(torch.float64)]
        read = torch.cat([half / half.norm() for half in halves])
    return read


def read_expert(stack: ExpertStack, expert: int, device: str = "cpu") -> Tensor:
    """The expert's tensor, refused where nothing can be said of it."""
    read = stack.read(expert).to(device)  # and looked at there, where that is quick
    reason = (
        "holds NaN or Inf"
        if not bool(read.isfinite().all())
        else "is all zeros (rank 0)"
        if not bool(read.any())
        else None
    )
    if reason:
        message = f"{stack.files[expert]}: tensor {stack.names[expert]} {reason}"
        raise UnusableExpert(
            f"{message}; mend the checkpoint, or mark this expert and go on: --keep-going", expert
        )
    return read
