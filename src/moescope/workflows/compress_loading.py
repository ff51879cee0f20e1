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


def check_lab_router(moe: MoeCheckpoint) -> None:
    """Refuse lab checkpoints whose router keeps more of an expert than a row and a bias: the rest could not be told without training."""
    lab = (moe.checkpoint.config or {}).get("moescope_lab")
    if not isinstance(lab, dict):
        return
    from moescope.lab.routers import ROUTERS, router_class

    router = str(lab.get("router"))
    if not router_class(router).rows_alone:
        possible = ", ".join(name for name, kind in ROUTERS.items() if kind.rows_alone)
        raise BadInput(
            f"{moe.checkpoint.shown}: its router, {router}, keeps a state of each expert beside its row, so experts cannot be taken "
            f"from it; of the lab's, {possible} can be compressed"
        )
