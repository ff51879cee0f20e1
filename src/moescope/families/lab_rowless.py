"""Lab checkpoints whose router has no row for each expert (hash, SPECTRA, dense): their experts are read, their router is only named."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moescope.checkpoint import Checkpoint
from moescope.errors import BadInput
from moescope.families.experts import either, fused_gate_up
from moescope.families.lab import DOWN, GATE_UP, UP, gelu_biases, up_and_down
from moescope.families.layout import LayerTensors, Stacks
from moescope.types import Coverage

EXPERTS = either((GATE_UP, fused_gate_up(GATE_UP, DOWN)), (UP, up_and_down))
EXPERT_TENSOR = re.compile(r"(?P<P>.*?)\.?(?P<L>\d{1,9})\.mlp\.experts\.(?:gate_up|up)")
ROW_ROUTERS = (".mlp.router.weight", ".mlp.router.direction_ED")


@dataclass(frozen=True)
class RowlessLab:
    """What of such a checkpoint headers and config tell."""

    checkpoint: Checkpoint
    router: str  # as the lab calls it
    experts: dict[int, Stacks]  # by layer
    top_k: int | None
    coverage: Coverage

    def why_no_scan(self) -> str:
        return no_rows(self.router)


def no_rows(router: str) -> str:
    """Why its weights alone cannot be scanned, and what to do instead."""
    return (
        f"its router, {router}, has no row for each expert, so there are no rows to hold against the experts' weights; "
        "`moescope trace` shows what it does with text"
    )


def rowless_router(checkpoint: Checkpoint) -> str | None:
    """The router's name in a lab checkpoint that has no rows to read; None for every other checkpoint."""
    said = (checkpoint.config or {}).get("moescope_lab")
    if not isinstance(said, dict) or (checkpoint.config or {}).get("model_type") != "moescope_lab":
        return None
    return None if any(name.endswith(ROW_ROUTERS) for name in checkpoint.tensors) else str(said.get("router"))


def read_rowless(checkpoint: Checkpoint) -> RowlessLab | None:
    """The experts of a lab checkpoint without router rows, from headers alone; None where it is another kind of checkpoint."""
    router = rowless_router(checkpoint)
    if router is None:
        return None
    config = checkpoint.config or {}
    width, count, depth, top_k = (
        whole_number(checkpoint, name)
        for name in ("hidden_size", "num_experts", "num_hidden_layers", "num_experts_per_tok")
    )
    matches = [match for name in checkpoint.tensors if (match := EXPERT_TENSOR.fullmatch(name))]
    found = {int(match["L"]): match["P"] for match in matches}
    absent = [layer for layer in range(min(depth, 100_000)) if layer not in found]
    if not found or (absent and not checkpoint.one_file):
        raise BadInput(
            f"{checkpoint.shown}: config.json says layers {absent[:9]} are MoE, but no tensor {GATE_UP} or {UP} for them; copy the "
            "checkpoint again"
        )
    taken: set[str] = set()
    experts: dict[int, Stacks] = {}
    for layer in sorted(found):
        tensors = LayerTensors(checkpoint, found[layer], layer, "", count, width, taken=taken)
        experts[layer] = EXPERTS(tensors)
        gelu_biases(tensors)
    routers = {name for name in checkpoint.tensors if ".mlp.router." in name or name.startswith("shared_router.")}
    skipped = {
        f"the {router} router's, which has no row for each expert": len(routers),
        "not part of an MoE block": len(checkpoint.tensors) - len(taken | routers),
    }
    coverage = Coverage(
        family=str(config["model_type"]),
        layers_found=len(experts),
        layers_expected=depth,
        experts_per_layer=(count,),
        parameters_understood=sum(checkpoint.tensors[name].parameters for name in taken),
        parameters_total=sum(info.parameters for info in checkpoint.tensors.values()),
        skipped={why: tensors for why, tensors in skipped.items() if tensors},
    )
    return RowlessLab(checkpoint, router, experts, min(top_k, count), coverage)


def whole_number(checkpoint: Checkpoint, field: str) -> int:
    value = (checkpoint.config or {}).get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(
            f"{checkpoint.files.label('config.json')}: {field} is {value!r}, not a whole number above 0; copy the checkpoint again"
        )
    return value
