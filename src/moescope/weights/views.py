"""Choices that change an answer: expert matrix, router variant, norm folded in or not."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from moescope.arguments import names
from moescope.errors import BadInput, UnusableExpert, unknown_name

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.types import ExpertStack, LayerWeights

MATRICES = ("gate", "up", "gate_up", "down")
ROUTERS = ("raw", "centered")
AUTO = "auto"
REMEDY = "fix the checkpoint, or pass --keep-going to skip this expert"


def norm_scale(weights: LayerWeights) -> Tensor:
    """[D] factor by which the norm before the block scales its output."""
    if weights.norm_D is None:
        raise BadInput(
            f"{weights.layer_name}: the checkpoint has no norm before this block; scan without --fold-norm"
        )
    return weights.norm_D.read().double() + weights.norm_offset


def router_rows(weights: LayerWeights, fold_norm: bool) -> Tensor | None:
    """[E, D] router rows in fp64, scaled by the norm if `fold_norm`; None if the router has no rows."""
    scale_D = norm_scale(weights) if fold_norm else None
    if weights.router_ED is None:
        return None
    rows = weights.router_ED.read().double()
    return rows if scale_D is None else rows * scale_D


def choose_routers(
    router: str | Iterable[str], layers: Iterable[LayerWeights]
) -> tuple[tuple[str, ...], list[str]]:
    """Return the router variants to analyse, the headline first, and a warning where one is dropped.

    auto: centered, then raw, where a softmax ignores what all rows share; raw alone for other routers.
    """
    chosen = names("router", router, (*ROUTERS, AUTO))
    wanted = ("centered", "raw") if AUTO in chosen else chosen
    reasons = (
        (not_centered(weights, weights.n_experts) for weights in layers) if {*wanted} == {*ROUTERS} else ()
    )
    if reason := next(filter(None, reasons), None):
        return ("raw",), [] if AUTO in chosen else [f"router rows are not centered: {reason}"]
    return wanted, []


def not_centered(weights: LayerWeights, rows: int) -> str | None:
    """Why centering so many router rows of the layer says nothing; None where it does."""
    for wrong, reason in (
        (weights.router_ED is None, "its router has no row for each expert, so none can be centered"),
        (
            weights.scoring != "softmax",
            f"centering assumes a softmax router, this one's scoring is {weights.scoring}",
        ),
        (rows < 3, f"centered rows of {rows} experts are opposite vectors"),
    ):
        if wrong:
            return f"{weights.layer_name}: {reason}"
    return None


def stand_in_rows(weights: LayerWeights) -> Tensor:
    """[E, D] fixed random unit rows for a layer whose router has no rows.

    The decomposition checks its accuracy on as many directions as there are experts; the results are dropped.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(weights.n_experts, weights.d_model, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(rows)


def defect(tensor: Tensor) -> str | None:
    """Why nothing can be computed from the tensor; None if it is usable."""
    if not bool(tensor.isfinite().all()):
        return "holds NaN or Inf"
    return None if bool(tensor.any()) else "is all zeros"


def unusable_rows(weights: LayerWeights, rows_ED: Tensor) -> dict[int, UnusableExpert]:
    """Expert -> why its router row cannot be normalised."""
    router = weights.router_ED
    assert router is not None
    return {
        expert: UnusableExpert(
            f"{router.file}: row {expert} of router {router.name} {reason}; {REMEDY}", expert
        )
        for expert, row in enumerate(rows_ED)
        if (reason := defect(row))
    }


def normalised_rows(weights: LayerWeights, rows_ED: Tensor, router: str) -> Tensor:
    """[E, D] unit rows: as stored (raw), or minus their mean (centered), which a softmax router ignores."""
    if router not in ROUTERS:
        raise unknown_name("router", router, list(ROUTERS))
    if router == "centered":
        raw_ED, rows_ED = rows_ED, rows_ED - rows_ED.mean(0)
        no_rest = rows_ED.norm(dim=1) <= 1e-12 * raw_ED.norm(dim=1)
        reason = not_centered(weights, len(rows_ED))
        if not reason and bool(no_rest.any()):
            reason = f"{weights.layer_name}: a centered router row is zero (it equals the mean row)"
        if reason:
            raise BadInput(f"{reason}; use --router raw")
    return rows_ED / rows_ED.norm(dim=1, keepdim=True)


def centered_share(rows_ED: Tensor, skipped: Collection[int] = ()) -> dict[int, float]:
    """Expert -> ||r_i - mean|| / ||r_i||: the part of its row that is not common to all."""
    experts = [expert for expert in range(len(rows_ED)) if expert not in skipped]
    rows = rows_ED[experts]
    shares = (rows - rows.mean(0)).norm(dim=1) / rows.norm(dim=1)
    return {expert: float(share) for expert, share in zip(experts, shares, strict=True)}


def check_matrix(weights: LayerWeights, matrix: str) -> None:
    """Raise an error if the layer's experts lack the matrix."""
    if matrix not in MATRICES:
        raise unknown_name("matrix", matrix, list(MATRICES))
    if matrix in ("up", "gate_up") and weights.up_EFD is None:
        raise BadInput(f"{weights.layer_name}: these experts have no up matrix; use --matrix gate or down")


def expert_matrix(
    weights: LayerWeights, matrix: str, expert: int, scale_D: Tensor | None, device: str = "cpu"
) -> Tensor:
    """[F, D] the expert's matrix with d_model along its rows, in the checkpoint's precision unless scaled.

    down is transposed, so that its left singular vectors become right ones; the norm is not folded into it,
    because its vectors live on the output side. gate_up stacks both halves, each with unit Frobenius norm.
    """
    import torch

    parts = [read_expert(stack, expert, device) for stack in stacks_of(weights, matrix)]
    if matrix == "down":
        return parts[0].T
    if scale_D is not None:
        parts = [part.double() * scale_D for part in parts]
    if len(parts) == 1:
        return parts[0]
    halves = [part.double() for part in parts]
    return torch.cat([half / half.norm() for half in halves])


def stacks_of(weights: LayerWeights, matrix: str) -> list[ExpertStack]:
    """Return the projections that the matrix is made of."""
    check_matrix(weights, matrix)
    return [weights.projections[name] for name in matrix.split("_")]


def stored_bits(weights: LayerWeights, matrix: str) -> int:
    """Significand bits of the stored weights that the matrix is made of; the fewer, where gate and up
    differ."""
    return min(stack.significand_bits for stack in stacks_of(weights, matrix))


def read_expert(stack: ExpertStack, expert: int, device: str = "cpu") -> Tensor:
    """The expert's tensor on the device, checked there; an unusable one is rejected with an error."""
    read = stack.read(expert).to(device)
    if reason := defect(read):
        where = f"{stack.files[expert]}: tensor {stack.names[expert]}"
        raise UnusableExpert(f"{where} {reason}; {REMEDY}", expert)
    return read
