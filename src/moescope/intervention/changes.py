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

from torch import Tensor

from moescope.decoder.model import LabModel
from moescope.errors import BadInput, unknown_name
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.lab_models import lab_blocks
from moescope.intervention import expert_changes, router_changes
from moescope.intervention.editing import Context, Edit, Options
from moescope.intervention.expert_changes import mean_outputs
from moescope.intervention.router_changes import VIEWS, experts_per_token, has_logits

Value = float | int | str | bool
MANY = 2**31
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
    apply: Callable[[Edit, Sequence[int], Options, Context], None]
    settings: tuple[Setting, ...] = ()
    experts: tuple[int, int] = (1, MANY)  # how many experts a change names, at least and at most
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
            wanted = f"{least} or more" if most == MANY else str(least) if least == most else f"up to {most}"
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
        raise BadInput(
            f"change {text!r} names {len(names)} interventions; write it as 'layer=1 expert=3 ablate', "
            f"with one of {', '.join(known)}"
        )
    places: dict[str, tuple[int, ...]] = {}
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word == names[0]:
            continue
        if word in ("layer", "expert"):
            raise BadInput(f"change {text!r}: {word} has no number; write {word}=3, without spaces")
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
    prepared(changes, Context(blocks, None, 0))


def prepared(changes: Sequence[Change], context: Context) -> dict[int, Edit]:
    """Return layer -> what changes there; raise where that is impossible."""
    blocks = context.blocks
    edits: dict[int, Edit] = {}
    for at, change in enumerate(changes):
        for other in changes[:at]:
            check_pair(other, change, blocks)
        for layer in change.layers_of(blocks):
            if layer not in blocks:
                raise BadInput(f"{change.label}: no MoE layer {layer}; MoE layers: {listed(sorted(blocks))}")
            check_block(change, blocks[layer])
            edit = edits.setdefault(layer, Edit(blocks[layer]))
            change.record.apply(edit, change.experts, change.options, context)
    return edits


def check_block(change: Change, block: Block) -> None:
    for expert in change.experts:
        if expert >= block.n_experts:
            raise BadInput(
                f"{change.label}: layer {block.layer} has experts 0 to {block.n_experts - 1}, "
                f"not {expert}; give one of them"
            )
    has = {
        "logits": has_logits(block),
        "rows": block.rows_ED is not None,
        "top_k": experts_per_token(block) is not None,
    }
    for need in change.record.needs:
        if not has[need]:
            raise BadInput(
                f"{change.label}: the router of layer {block.layer} has no {NEEDS[need]}, so {change.name} "
                "cannot be applied to it; use another intervention"
            )


NEEDS = {"logits": "logits", "rows": "row per expert", "top_k": "number of experts per token that can change"}


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

    `means` holds the mean output per layer and expert, which `mean` puts in the expert's place
    (`mean_outputs`). `seed` is for the changes that draw at random.
    """
    with carried_out(prepared(changes, Context(blocks, means or {}, seed))):
        yield


@contextmanager
def carried_out(edits: Mapping[int, Edit]) -> Iterator[None]:
    """Make prepared changes until the end of the context; they can be made again."""
    with ExitStack() as stack:
        for edit in edits.values():
            stack.enter_context(edit.carried_out())
        yield


@contextmanager
def modified(
    model: Any, *settings: str | Change, text: Sequence[Tensor] = (), seed: int = 0
) -> Iterator[None]:
    """Change a model in memory until the end of the context; afterwards it is as before, bit for bit.

    Parameters
    ----------
    model
        A model of transformers, or one of the lab.
    settings
        Changes such as "layer=3 expert=1 ablate" or "layer=0 project_out k=4 strength=10 view=gate".
    text
        Token ids of calibration documents, one tensor each, for `mean`.
    seed
        Seed of the changes that draw at random.

    Examples
    --------
    >>> with moescope.modified(model, "layer=3 expert=1 ablate"):
    ...     model.generate(**inputs)
    """
    changes = [parse_change(one) if isinstance(one, str) else one for one in settings]
    found = lab_blocks(model) if isinstance(model, LabModel) else find_blocks(model)
    blocks = {block.layer: block for block in found}
    check_changes(changes, blocks)
    wanted = [
        (layer, expert)
        for change in changes
        if change.record.needs_calibration
        for layer in change.layers_of(blocks)
        for expert in change.experts
    ]
    means = {}
    if wanted:
        means = mean_outputs(blocks, wanted, lambda: [model(ids.reshape(1, -1)) for ids in text])
    with changed(blocks, changes, means=means, seed=seed):
        yield


# --- the interventions

ANY_EXPERTS, NO_EXPERTS = (0, MANY), (0, 0)
VIEW = Setting("view", "expert matrix whose right singular vectors are used", "gate", choices=VIEWS)
K = Setting("k", "number of leading right singular vectors", 1, least=1)
STRENGTH = Setting(
    "strength", "s: 1 removes the component, 2 reverses it, the published Mixtral runs used 10", 1.0
)
RESTORE = Setting("restore_norm", "give the row its old norm again", False)
DRAW = Setting("draw", "number of the random draw", 0, least=0)
OF_ROWS = ("project_out", "project_onto", "random_direction", "other_expert", "replace", "hijack")

INTERVENTIONS: tuple[Intervention, ...] = (
    Intervention(
        name="ablate",
        changes="the expert's output is zero; the other gates stay",
        reference="causal ablation",
        apply=expert_changes.ablate,
    ),
    Intervention(
        name="mean",
        changes="the expert's output is its mean over the calibration tokens that choose it, times the gate",
        reference="MoNE",
        apply=expert_changes.mean,
        needs_calibration=True,
        excludes=("ablate",),
    ),
    Intervention(
        name="skip",
        changes="the expert is masked before top-k; the model's gate rule is applied to what remains",
        reference="route-around",
        apply=router_changes.skip,
        needs=("logits",),
    ),
    Intervention(
        name="force",
        changes=(
            "the expert's logit is just above the largest, or just below the smallest with off; where the "
            "model has a bias for choosing, that bias is, and gates stay"
        ),
        reference="SteerMoE",
        apply=router_changes.force,
        settings=(Setting("off", "below all others instead of above", False),),
        needs=("logits",),
        excludes=("force", "skip", "bias"),
    ),
    Intervention(
        name="bias",
        changes=(
            "the score that selects the expert is shifted: the logit, and gates follow; where the model has "
            "a bias for choosing, that bias, and gates stay"
        ),
        reference="SteerMoE, heretic",
        apply=router_changes.bias,
        settings=(Setting("by", "what is added to the score", kind=float),),
        needs=("logits",),
    ),
    Intervention(
        name="swap",
        changes="two experts change places; the router's rows stay",
        reference="sanity check",
        apply=expert_changes.swap,
        experts=(2, 2),
    ),
    Intervention(
        name="transplant",
        changes="the expert, its router row or both are those of another expert, layer or checkpoint",
        reference="GaleMoE",
        apply=expert_changes.transplant,
        settings=(
            Setting("part", "what is replaced", "expert", choices=("expert", "row", "both")),
            Setting("from_layer", "layer of the other expert; -1: the same", -1, least=-1),
            Setting("from_expert", "number of the other expert; -1: the same", -1, least=-1),
            Setting("checkpoint", "where the other expert is; empty: in the same model", ""),
        ),
    ),
    Intervention(
        name="project_out",
        changes="r <- r - s (component of r in the span of its expert's k leading directions)",
        reference="GaleMoE",
        apply=router_changes.project_out,
        settings=(K, STRENGTH, VIEW, RESTORE),
        experts=ANY_EXPERTS,
        needs=("rows",),
    ),
    Intervention(
        name="project_onto",
        changes="only the component of r in the span of its expert's k leading directions stays",
        reference="complement of project_out",
        apply=router_changes.project_onto,
        settings=(K, VIEW, RESTORE),
        experts=ANY_EXPERTS,
        needs=("rows",),
    ),
    Intervention(
        name="random_direction",
        changes=(
            "control of project_out: a random k-dimensional subspace (match=rank), or a random direction "
            "with the same length of change (match=change)"
        ),
        reference="GaleMoE (equal rank only)",
        apply=router_changes.random_direction,
        settings=(
            K,
            STRENGTH,
            VIEW,
            RESTORE,
            Setting("match", "what the control has in common", "rank", choices=("rank", "change")),
            DRAW,
        ),
        experts=ANY_EXPERTS,
        needs=("rows",),
    ),
    Intervention(
        name="other_expert",
        changes="control of project_out: with the subspace of another expert of the layer",
        reference="control",
        apply=router_changes.other_expert,
        settings=(
            K,
            STRENGTH,
            VIEW,
            RESTORE,
            Setting("step", "distance to the other expert: number i uses i + step", 1, least=1),
        ),
        experts=ANY_EXPERTS,
        needs=("rows",),
    ),
    Intervention(
        name="replace",
        changes=(
            "r is the unit sum of sign_j v_j / j over its expert's k leading directions, sign_j that of the "
            "row's component, orthogonal to the rows before, with its old norm"
        ),
        reference="GaleMoE",
        apply=router_changes.replace_rows,
        settings=(K, VIEW),
        experts=ANY_EXPERTS,
        needs=("rows",),
    ),
    Intervention(
        name="hijack",
        changes=(
            "the expert's row loses its component; all other rows gain strength times their norm times the "
            "expert's v_1, oriented along its row"
        ),
        reference="GaleMoE",
        apply=router_changes.hijack,
        settings=(K, Setting("strength", "S", 1.0), VIEW),
        experts=(1, 1),
        needs=("rows",),
    ),
    Intervention(
        name="zero_router",
        changes="all rows are zero: equal logits, so every token gets the same experts (`experts_taken`)",
        reference="GaleMoE",
        apply=router_changes.zero_router,
        experts=NO_EXPERTS,
        needs=("rows",),
        excludes=(*OF_ROWS, "permute_rows", "uniform_router", "transplant", "zero_router"),
    ),
    Intervention(
        name="uniform_router",
        changes="each token's logits are permuted at random: uniform choices, gates of unchanged size",
        reference="control: what zero_router is often taken for",
        apply=router_changes.uniform_router,
        settings=(DRAW,),
        experts=NO_EXPERTS,
        needs=("logits", "top_k"),
        excludes=("skip", "force", "bias", "uniform_router"),
    ),
    Intervention(
        name="permute_rows",
        changes="the rows of a layer change places at random, or in a given order",
        reference="GaleMoE (shuffle)",
        apply=router_changes.permute_rows,
        settings=(Setting("order", "numbers of the rows, such as 1,0,2; empty: at random", ""), DRAW),
        experts=NO_EXPERTS,
        needs=("rows",),
    ),
    Intervention(
        name="top_k",
        changes="fewer or more experts per token, gates by the model's rule",
        reference="llama.cpp users",
        apply=router_changes.top_k,
        settings=(Setting("k", "experts per token", least=1),),
        experts=NO_EXPERTS,
        needs=("top_k",),
        excludes=("top_k",),
    ),
    Intervention(
        name="temperature",
        changes="logits are divided by t",
        reference="standard",
        apply=router_changes.temperature,
        settings=(Setting("t", "temperature", kind=float, least=1e-6),),
        experts=NO_EXPERTS,
        needs=("logits",),
    ),
)
