"""INTERVENTIONS: every way to change a running model, one record each; how a change is written and checked.

A change is one setting, as `--set` gives it: "layer=12 expert=3 ablate". Layers and experts are numbers,
lists (0,2) or ranges (0-3); without a layer every MoE layer is changed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moescope.decoder.model import LabModel
from moescope.errors import BadInput, unknown_name
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.lab_models import lab_blocks
from moescope.intervention.editing import FAR, Edit, top_k_owners

Value = float | int | str | bool
WORDS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True)
class Setting:
    """An option of an intervention. Its type is that of the default, or `kind` where it must be given."""

    name: str
    meaning: str
    default: Value | None = None
    kind: type = int
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()

    @property
    def type(self) -> type:
        return self.kind if self.default is None else type(self.default)

    def read(self, value: Any, where: str) -> Value:
        """Return the value in the setting's type; raise where it is none of that type or out of range."""
        read: Any = WORDS.get(str(value).lower()) if self.type is bool else value
        try:
            read = self.type(read) if read is not None else None
        except ValueError:
            read = None
        if self.type is int and isinstance(value, float) and value != read:
            read = None
        number = isinstance(read, int | float) and self.type is not bool
        if read is None or (number and not (math.isfinite(read) and self.least <= read <= self.most)):
            raise BadInput(f"{where}: {self.name} is {value!r}; give {self.valid()}")
        if self.choices and read not in self.choices:
            raise unknown_name(f"{self.name} of {where}", read, list(self.choices))
        return read

    def valid(self) -> str:
        if self.type is bool:
            return "yes or no"
        words = "a whole number" if self.type is int else "a number" if self.type is float else "a word"
        limits = [f"at least {self.least:g}"] if self.least > -math.inf else []
        return " ".join([words, *limits, *([f"at most {self.most:g}"] if self.most < math.inf else [])])


@dataclass(frozen=True)
class Intervention:
    """One way to change a block."""

    name: str
    changes: str  # what changes, in one line
    reference: str
    apply: Callable[[Edit, Change, Context], None]
    settings: tuple[Setting, ...] = ()
    experts: tuple[int, int] = (1, 2**31)  # how many experts a change names, at least and at most
    # what a block must have: "rows" (one router row per expert), "logits", "top_k" (a number of experts)
    needs: tuple[str, ...] = ()
    needs_calibration: bool = False  # `means` must be given
    excludes: tuple[str, ...] = ()  # that cannot be done in the same layer

    def setting(self, name: str) -> Setting:
        for setting in self.settings:
            if setting.name == name:
                return setting
        known = ", ".join(setting.name for setting in self.settings) or "none"
        raise BadInput(f"{self.name} has no option {name!r}; its options: {known}")


@dataclass(frozen=True)
class Change:
    """One setting: an intervention with its layers, experts and options; defaults are filled in."""

    name: str
    layers: tuple[int, ...] = ()  # empty: every MoE layer
    experts: tuple[int, ...] = ()  # empty: every expert, where the intervention allows it
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        record = self.record
        for name in self.options:
            record.setting(name)
        values = {}
        for setting in record.settings:
            value = self.options.get(setting.name, setting.default)
            if value is None:
                raise BadInput(f"{self.name}: give {setting.name}=, {setting.meaning}")
            values[setting.name] = setting.read(value, self.name)
        object.__setattr__(self, "options", values)
        for name, numbers in (("layer", self.layers), ("expert", self.experts)):
            if len(set(numbers)) < len(numbers):
                raise BadInput(f"{self.name}: {name} {listed(numbers)} names one twice; name each once")
        least, most = record.experts
        if not least <= len(self.experts) <= most:
            wanted = f"{least} or more" if most == 2**31 else str(least) if least == most else f"up to {most}"
            raise BadInput(
                f"{self.name} names {wanted} experts, this change names {len(self.experts)}; "
                + ("remove expert=" if most == 0 else "give expert=NUMBER")
            )

    @property
    def record(self) -> Intervention:
        for record in INTERVENTIONS:
            if record.name == self.name:
                return record
        raise unknown_name("intervention", self.name, [record.name for record in INTERVENTIONS])

    @property
    def label(self) -> str:
        """The change as text; `parse_change` gives the change back."""
        parts = [f"layer={listed(self.layers)}"] if self.layers else []
        parts += [f"expert={listed(self.experts)}"] if self.experts else []
        parts.append(self.name)
        for setting in self.record.settings:
            value = self.options[setting.name]
            if value != setting.default:
                parts.append(shlex.quote(f"{setting.name}={'yes' if value is True else written(value)}"))
        return " ".join(parts)

    def layers_of(self, blocks: Mapping[int, Block]) -> list[int]:
        return list(self.layers or blocks)

    def experts_of(self, block: Block) -> list[int]:
        return list(self.experts or range(block.n_experts))


@dataclass(frozen=True)
class Context:
    """What a change may need besides its block."""

    blocks: Mapping[int, Block]
    means: Mapping[tuple[int, int], Tensor]
    seed: int


def listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def written(value: Value) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def parse_change(text: str) -> Change:
    """Return the change that a text such as "layer=0 expert=1 project_out k=4 strength=10" describes."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"change {text!r}: {error}") from None
    known = [record.name for record in INTERVENTIONS]
    names = [word for word in words if word in known]
    if len(names) != 1:
        plain = [word for word in words if "=" not in word]
        if not names and plain:
            raise unknown_name("intervention", plain[0], known)
        raise BadInput(f"change {text!r} names {len(names)} interventions; name one of {', '.join(known)}")
    places: dict[str, tuple[int, ...]] = {}
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word == names[0]:
            continue
        if not equals:
            options[key] = "yes"  # a bare word switches an option on
        elif key in ("layer", "expert"):
            places[key] = numbers(value, f"change {text!r}: {key}")
        else:
            options[key] = value
    return Change(names[0], places.get("layer", ()), places.get("expert", ()), options)


def numbers(text: str, where: str) -> tuple[int, ...]:
    """Return the numbers of "3", "0,2" or "0-3"; of "all", none, which stands for all."""
    if text == "all":
        return ()
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(part) > 20:
            raise BadInput(f"{where} is {text!r}; give numbers such as 3, 0,2 or 0-3")
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(found)


# --- checks


def check_changes(changes: Sequence[Change], blocks: Mapping[int, Block]) -> None:
    """Raise where a change cannot be made in these blocks, or two exclude each other."""
    for change in changes:
        for layer in change.layers_of(blocks):
            if layer not in blocks:
                raise BadInput(f"{change.label}: no MoE layer {layer}; MoE layers: {listed(sorted(blocks))}")
            check_block(change, blocks[layer])
    for at, change in enumerate(changes):
        for other in changes[:at]:
            check_pair(other, change, blocks)


def check_block(change: Change, block: Block) -> None:
    for expert in change.experts:
        if expert >= block.n_experts:
            raise BadInput(
                f"{change.label}: layer {block.layer} has experts 0 to {block.n_experts - 1}, "
                f"not {expert}; give one of them"
            )
    for need in change.record.needs:
        if reason := NEEDS[need](block):
            raise BadInput(f"{change.label}: {reason}; {change.name} cannot be applied to it")
    if change.name == "skip" and (top_k := experts_per_token(block)) is not None:
        left = block.n_experts - len(change.experts)
        if left < top_k:
            raise BadInput(f"{change.label}: {left} experts are left, a token needs {top_k}; skip fewer")


def lacks_logits(block: Block) -> str:
    router: Any = block.router
    fine = router.has_logits if block.hands_out else True
    return "" if fine else f"the router of layer {block.layer} has no logits"


def lacks_rows(block: Block) -> str:
    return "" if block.rows_ED is not None else f"the router of layer {block.layer} has no row per expert"


def lacks_top_k(block: Block) -> str:
    return "" if experts_per_token(block) else f"the router of layer {block.layer} has no top-k to change"


NEEDS: dict[str, Callable[[Block], str]] = {
    "logits": lacks_logits,
    "rows": lacks_rows,
    "top_k": lacks_top_k,
}


def experts_per_token(block: Block) -> int | None:
    """Return the number of experts that a token chooses; None where the router has no such number."""
    if not block.hands_out:
        return next((module.top_k for module in top_k_owners(block)), None)
    router: Any = block.router
    return router.config.top_k if router.has_logits and not router.experts_choose else None


def check_pair(first: Change, second: Change, blocks: Mapping[int, Block]) -> None:
    """Raise where two changes of one layer exclude each other."""
    shared = sorted(set(first.layers_of(blocks)) & set(second.layers_of(blocks)))
    if not shared:
        return
    excluded = second.name in first.record.excludes or first.name in second.record.excludes
    on_experts = first.experts and second.experts
    if excluded and (not on_experts or set(first.experts) & set(second.experts)):
        raise BadInput(
            f"{first.label!r} and {second.label!r} exclude each other in layer {shared[0]}; give one of them"
        )


# --- making changes


@contextmanager
def changed(
    blocks: Mapping[int, Block],
    changes: Sequence[Change],
    *,
    means: Mapping[tuple[int, int], Tensor] | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Make the changes in these blocks until the end of the context; afterwards all is as before.

    `means` holds the mean output per layer and expert, which `mean` puts in the expert's place. `seed` is for
    the changes that draw at random.
    """
    check_changes(changes, blocks)
    context = Context(blocks, means or {}, seed)
    edits: dict[int, Edit] = {}
    for change in changes:
        for layer in change.layers_of(blocks):
            edit = edits.setdefault(layer, Edit(blocks[layer]))
            change.record.apply(edit, change, context)
    with ExitStack() as stack:
        for edit in edits.values():
            stack.enter_context(edit.carried_out())
        yield


@contextmanager
def modified(model: Any, *settings: str | Change, seed: int = 0) -> Iterator[None]:
    """Change a model in memory until the end of the context.

    Parameters
    ----------
    model
        A model of transformers, or one of the lab.
    settings
        Changes such as "layer=3 expert=1 ablate"; see `INTERVENTIONS`.
    seed
        Seed of the changes that draw at random.

    Examples
    --------
    >>> with moescope.modified(model, "layer=3 expert=1 ablate"):
    ...     model.generate(**inputs)
    """
    changes = [parse_change(one) if isinstance(one, str) else one for one in settings]
    blocks = lab_blocks(model) if isinstance(model, LabModel) else find_blocks(model)
    with changed({block.layer: block for block in blocks}, changes, seed=seed):
        yield


# --- the interventions


def gates_follow(block: Block) -> bool:
    """Whether gates are made from the scores that select; not where a bias is for choosing only."""
    if block.hands_out:
        router: Any = block.router
        return bool(router.gates_follow)
    return block.correction_bias is None


def ablate(edit: Edit, change: Change, context: Context) -> None:
    edit.outputs |= dict.fromkeys(change.experts)


def skip(edit: Edit, change: Change, context: Context) -> None:
    def masked(scores: Tensor) -> Tensor:
        return scores.index_fill(-1, torch.tensor(change.experts, device=scores.device), -FAR)

    edit.logits.append(masked)
    edit.selection += [] if gates_follow(edit.block) else [masked]


def bias(edit: Edit, change: Change, context: Context) -> None:
    def shifted(scores: Tensor) -> Tensor:
        shift_E = torch.zeros(scores.shape[-1], dtype=scores.dtype, device=scores.device)
        shift_E[list(change.experts)] = float(change.options["by"])
        return scores + shift_E

    (edit.logits if gates_follow(edit.block) else edit.selection).append(shifted)


INTERVENTIONS: tuple[Intervention, ...] = (
    Intervention(
        name="ablate",
        changes="the expert's output is zero; the other gates stay",
        reference="causal ablation",
        apply=ablate,
    ),
    Intervention(
        name="skip",
        changes="the expert is masked before top-k; the model's gate rule is applied to what remains",
        reference="route-around",
        apply=skip,
        needs=("logits",),
        excludes=("force",),
    ),
    Intervention(
        name="bias",
        changes=(
            "the score that selects the expert is shifted: the logit, and gates follow; where the model has "
            "a bias for choosing, that bias, and gates stay"
        ),
        reference="SteerMoE, heretic",
        apply=bias,
        settings=(Setting("by", "what is added to the score", kind=float),),
        needs=("logits",),
    ),
)
