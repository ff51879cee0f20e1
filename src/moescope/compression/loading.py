"""A model to be calibrated on or judged.

By transformers, or by the lab where the checkpoint lies in the lab's own layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moescope.errors import BadInput
from moescope.families import MoeCheckpoint

if TYPE_CHECKING:
    from moescope.compression.method import Method
    from moescope.decoder.routers import Router
    from moescope.execution.models import TracedModel


def load_to_compress(name: str, dtype: str, device: str) -> TracedModel:
    """The model with its tokenizer.

    Lab checkpoints that transformers loads are run by it, as any other's user would.
    """
    from moescope.decoder.saving import is_own_layout
    from moescope.execution.lab_models import load_traced
    from moescope.execution.models import load_model

    return (load_traced if is_own_layout(name) else load_model)(name, dtype, device)


def lab_router(moe: MoeCheckpoint) -> type[Router] | None:
    """The router's class of a lab checkpoint; None for every other model."""
    from moescope.decoder.routers import router_class

    lab = (moe.checkpoint.config or {}).get("moescope_lab")
    return router_class(str(lab.get("router"))) if isinstance(lab, dict) else None


def check_lab_router(moe: MoeCheckpoint, method: Method | None = None, sequential: bool = False) -> None:
    """Refuse what a lab checkpoint cannot become.

    A model of one expert, or experts merged by what its router does not have.
    """
    router = lab_router(moe)
    if router is not None and not router.routes:
        raise BadInput(
            f"{moe.checkpoint.shown}: a dense model of the lab has one expert a layer, nothing to take away"
        )
    if method is None or not method.merges:
        return
    if router is not None and not router.has_logits and method.adapts:  # those methods go by router logits
        raise BadInput(
            f"{moe.checkpoint.shown}: its router, {router.name}, has no logits for {method.name}; "
            "merge with hc_smoe or weights, or prune with reap"
        )
    if sequential and router is not None and any(weights.router_state for weights in moe.layers.values()):
        raise BadInput(
            f"{moe.checkpoint.shown}: its router, {router.name}, keeps more of each expert than a "
            "row, and layers are not merged in sequence "
            "then; leave out --sequential"
        )
