"""The interventions of a run: one joint change, or the family of changes that a sweep tries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from moescope.arguments import ranges
from moescope.errors import BadInput
from moescope.execution.adapters import Block
from moescope.intervention.changes import Change, parse_change
from moescope.intervention.expert_changes import block_weights
from moescope.intervention.passes import place_of, touched
from moescope.intervention.router_changes import experts_per_token
from moescope.intervention.tables import PLAN_COLUMNS
from moescope.types import Array

DEFAULTS = {"experts": "ablate", "k": "project_out", "top_k": "top_k"}  # sweep -> change where none is set
VARIED = {"experts": "expert", "layers": "layer", "k": "k", "top_k": "k"}  # sweep -> option that it varies


@dataclass(frozen=True)
class Planned:
    """One intervention: its changes, applied together, and its place in a sweep."""

    changes: tuple[Change, ...]
    role: str = "change"
    of: int | None = None  # the intervention that it is a control of

    @property
    def label(self) -> str:
        return "; ".join(change.label for change in self.changes)

    def option(self, name: str) -> int | None:
        """Return an option of the change, where it is the only one and has it."""
        value = self.changes[0].options.get(name) if len(self.changes) == 1 else None
        return None if value is None else int(value)

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys(change.name for change in self.changes))


@dataclass(frozen=True)
class Request:
    """What the user wants to be changed: changes that apply together, or one that a sweep varies."""

    changes: tuple[Change, ...]
    sweep: str | None = None
    layers: tuple[int, ...] = ()
    controls: int = 4
    seed: int = 0

    @classmethod
    def of(cls, settings: Sequence[str], sweep: str | None, layers: Sequence[int], **more: Any) -> Request:
        """Parse the settings; reject what cannot be meant, before a model is loaded."""
        if sweep is None:
            if not settings:
                raise BadInput('nothing to change; give --set "layer=0 expert=1 ablate", or --sweep experts')
            if layers:
                raise BadInput("--layers chooses the layers of a --sweep; in --set write layer=0")
            return cls(tuple(map(parse_change, settings)), **more)
        if len(settings) > 1:
            raise BadInput(f"--sweep {sweep} varies one change, not {len(settings)}; give one --set")
        if not settings and sweep not in DEFAULTS:
            raise BadInput(f'--sweep {sweep} needs a change; give --set "expert=1 ablate"')
        setting = settings[0] if settings else DEFAULTS[sweep]
        varied = VARIED[sweep]
        if re.search(rf"(^|\s){varied}=", setting):
            raise BadInput(f"--sweep {sweep} varies {varied}=; remove it from --set {setting!r}")
        if layers and re.search(r"(^|\s)layer=", setting):
            raise BadInput(f"--layers and layer= in --set {setting!r}; give one of them")
        if sweep in ("k", "top_k") and DEFAULTS[sweep] not in setting.split():
            raise BadInput(f"--sweep {sweep} varies {DEFAULTS[sweep]}; remove --set {setting!r}")
        template = parse_change(setting if sweep == "layers" else f"{setting} {varied}=1")
        return cls((template,), sweep, tuple(layers) or template.layers, **more)

    def plan(self, blocks: Mapping[int, Block]) -> list[Planned]:
        """Return the interventions in their order."""
        if self.sweep is None:
            return [Planned(self.changes)]
        (change,), layers = self.changes, self.layers or tuple(blocks)
        if unknown := [layer for layer in layers if layer not in blocks]:
            known = ranges(sorted(blocks))
            raise BadInput(f"layer {unknown[0]}: not an MoE layer of this model; its MoE layers are {known}")
        if self.sweep == "experts":
            return [
                Planned((replace(change, layers=(layer,), experts=(expert,)),))
                for layer in layers
                for expert in range(blocks[layer].n_experts)
            ]
        if self.sweep == "k":
            return self.projections(change, [blocks[layer] for layer in layers])
        if self.sweep == "top_k":
            most = max(experts_per_token(blocks[layer]) or 0 for layer in layers)
            fewest = min(blocks[layer].n_experts for layer in layers)
            changes = [varied(change, self.layers, k=k) for k in range(1, min(2 * most, fewest) + 1)]
            return [Planned((each,)) for each in changes or [change]]
        return [Planned((replace(change, layers=(layer,)),)) for layer in layers]

    def projections(self, change: Change, blocks: Sequence[Block]) -> list[Planned]:
        """Return project_out per layer and k = 1, 2, 4, ... to half of the rank, each with its controls."""
        plan: list[Planned] = []
        for block in blocks:
            weights = block_weights(block)[0]
            k, rank = 1, min(weights.d_ff, weights.d_model)
            while k <= max(rank // 2, 1):
                own = varied(change, (block.layer,), k=k)
                number = len(plan)
                plan.append(Planned((own,)))
                for draw in range(self.controls):
                    for role, match in (("random subspace", "rank"), ("random direction", "change")):
                        control = varied(own, own.layers, "random_direction", match=match, draw=draw)
                        plan.append(Planned((control,), role, number))
                plan.append(Planned((varied(own, own.layers, "other_expert"),), "other expert", number))
                k *= 2
        return plan


def varied(change: Change, layers: tuple[int, ...], name: str = "", **options: int | str) -> Change:
    """Return the change in other layers, under another name, with other options."""
    return replace(change, name=name or change.name, layers=layers, options={**change.options, **options})


def plan_frame(
    plan: Sequence[Planned], blocks: Mapping[int, Block], names: Mapping[int, str], loads: Mapping[int, Array]
) -> pd.DataFrame:
    """Return one row per intervention: where it acts, its role, the calibration load of its expert."""
    rows = []
    for number, planned in enumerate(plan):
        first, expert = place_of(planned.changes, blocks)
        layer = first if len(touched(planned.changes, blocks)) == 1 else None
        load = None if expert is None or first not in loads else float(loads[first][expert])
        facts = (planned.label, planned.name, layer, None if layer is None else names[layer], expert)
        draw = planned.option("draw") if planned.of is not None else None
        rows.append((number, *facts, planned.option("k"), draw, planned.role, planned.of, load))
    frame = pd.DataFrame(rows, columns=list(PLAN_COLUMNS))
    return frame.astype(dict.fromkeys(("layer", "expert", "k", "draw", "of"), "Int64"))
