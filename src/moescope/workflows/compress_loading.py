"""A model to be calibrated on or judged: by transformers, or by the lab where the checkpoint lies in the lab's own layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moescope.errors import BadInput
from moescope.families import MoeCheckpoint

if TYPE_CHECKING:
    from moescope.routing.models import TracedModel


def load_to_compress(name: str, dtype: str, device: str) -> TracedModel:
    """The model with its tokenizer. Lab checkpoints that transformers loads are run by it, as any other's user would."""
    from moescope.lab.saving import is_own_layout
    from moescope.lab.tracing import load_traced
    from moescope.routing.models import load_model

    return (load_traced if is_own_layout(name) else load_model)(name, dtype, device)


def lab_router(moe: MoeCheckpoint) -> str | None:
    """The router of a lab checkpoint; None for every other model."""
    lab = (moe.checkpoint.config or {}).get("moescope_lab")
    return str(lab.get("router")) if isinstance(lab, dict) else None


def check_lab_router(moe: MoeCheckpoint, merges: bool) -> None:
    """Refuse lab checkpoints that cannot be made smaller: of one expert, or merged where a router keeps more of an expert than a row
    and a bias, which could not be told of a merged one without training."""
    router = lab_router(moe)
    if router is None:
        return
    from moescope.lab.routers import ROUTERS, router_class

    if router == "dense":
        raise BadInput(f"{moe.checkpoint.shown}: a dense model of the lab has one expert a layer, nothing to take away")
    if merges and not router_class(router).rows_alone:
        possible = ", ".join(name for name, kind in ROUTERS.items() if kind.rows_alone)
        raise BadInput(
            f"{moe.checkpoint.shown}: its router, {router}, keeps more of each expert than a row, so experts cannot be merged "
            f"(of the lab's, those of {possible} can); use a method that prunes, such as reap"
        )
