"""INTERVENTIONS: every way to change a running model, one record each; how a change is written and checked.

A change is one setting, as `--set` gives it: "layer=12 expert=3 ablate". Layers and experts are numbers,
lists (0,2) or ranges (0-3); without a layer every MoE layer is changed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moescope.arguments import number_ranges
from moescope.decoder.model import LabModel
from moescope.errors import BadInput, unknown_name
from moescope.execution.adapters import Block, find_blocks
from moescope.execution.lab_models import lab_blocks
from moescope.intervention import kinds
from moescope.intervention.editing import Context, Edit

Value = float | int | str | bool
MANY = 2**31
WORDS = {"yes": True, "true": True, "no": False, "false": False}
NAMED = {bool: "yes or no", int: "a whole number", float: "a number", str: "a word"}


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

    def read(self, value: Any, where: str) -> Value:
        """Return the value in the setting's type; raise where it is none of that type or out of range."""
        kind = self.kind if self.default is None else type(self.default)
        try:
            read: Any = WORDS[str(value).lower()] if kind is bool else kind(value)
        except (KeyError, ValueError, OverflowError):
            read = math.nan
        if kind is int and isinstance(value, float) and value != read:
            read = math.nan
        if not isinstance(read, str) and not (self.least <= read <= self.most and abs(read) < math.inf):
            least = f" at least {self.least:g}" if self.least > -math.inf else ""
            most = f" at most {self.most:g}" if self.most < math.inf else ""
            raise BadInput(f"{where}: {self.name} is {value!r}; give {NAMED[kind]}{least}{most}")
        if self.choices and read not in self.choices:
            raise unknown_name(f"{self.name} of {where}", read, list(self.choices))
        return read


@dataclass(frozen=True)
class Intervention:
    """One way to change a block."""

    name: str
    changes: str  # what changes, in one line
    reference: str
    apply: kinds.Apply
    settings: tuple[Setting, ...] = ()
    experts: tuple[int, int] = (1, MANY)  # how many experts a change names, at least and at most
    needs: tuple[str, ...] = ()  # what a block must have, of NEEDS
    needs_calibration: bool = False  # `means` must be given
    excludes: tuple[str, ...] = ()  # that cannot be done in the same layer


@dataclass(frozen=True)
class Change:
    """One setting: an intervention with its layers, experts and options; defaults are filled in."""

    name: str
    layers: tuple[int, ...] = ()  # empty: every MoE layer
    experts: tuple[int, ...] = ()  # empty: every expert, where the intervention allows it
    options: Mapping[str, Value] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        settings = {setting.name: setting for setting in self.record.settings}
        values: dict[str, Value] = {}
        if unknown := [name for name in self.options if name not in settings]:
            raise BadInput(
                f"{self.name} has no option {unknown[0]!r}; its options: {', '.join(settings) or 'none'}"
            )
        for name, setting in settings.items():
            value = self.options.get(name, setting.default)
            if value is None:
                raise BadInput(f"{self.name}: give {name}=, {setting.meaning}")
            values[name] = setting.read(value, self.name)
        object.__setattr__(self, "options", values)
        for name, numbers in (("layer", self.layers), ("expert", self.experts)):
            if len(set(numbers)) < len(numbers):
                raise BadInput(f"{self.name}: {name} {listed(numbers)} names one twice; name each once")
        least, most = self.record.experts
        if not least <= len(self.experts) <= most:
            wanted = f"{least} or more" if most == MANY else str(least) if least == most else f"up to {most}"
            raise BadInput(
                f"{self.name} names {wanted} experts, this change names {len(self.experts)}; "
                + ("remove expert=" if most == 0 else "give expert=NUMBER")
            )

    @property
    def record(self) -> Intervention:
        records = {record.name: record for record in INTERVENTIONS}
        if self.name not in records:
            raise unknown_name("intervention", self.name, list(records))
        return records[self.name]

    @property
    def label(self) -> str:
        """The change as text; `parse_change` gives the change back."""
        places = [("layer", self.layers), ("expert", self.experts)]
        words = [f"{name}={listed(numbers)}" for name, numbers in places if numbers]
        options = [
            shlex.quote(f"{setting.name}={'yes' if value is True else value}")
            for setting in self.record.settings
            if (value := self.options[setting.name]) != setting.default
        ]
        return " ".join([*words, self.name, *options])

    def layers_of(self, blocks: Mapping[int, Block]) -> list[int]:
        return list(self.layers or blocks)


def listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def parse_change(text: str) -> Change:
    """Return the change that a text such as "layer=0 expert=1 project_out k=4 strength=10" describes."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"change {text!r}: {error}") from None
    known = [record.name for record in INTERVENTIONS]
    names = [word for word in words if word in known]
    if len(names) != 1:
        if not names and (plain := [word for word in words if "=" not in word]):
            raise unknown_name("intervention", plain[0], known)
        raise BadInput(
            f"change {text!r} names {len(names)} interventions; write it as 'layer=1 expert=3 ablate', "
            f"with one of {', '.join(known)}"
        )
    places: dict[str, tuple[int, ...]] = {"layer": (), "expert": ()}
    options: dict[str, Value] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word in places:
            raise BadInput(f"change {text!r}: {word} has no number; write {word}=3, without spaces")
        if key in places:
            places[key] = () if value == "all" else tuple(number_ranges(value, f"change {text!r}: {key}"))
        elif word != names[0]:
            options[key] = value if equals else "yes"  # a bare word switches an option on
    return Change(names[0], places["layer"], places["expert"], options)


# --- checks

NEEDS = {  # of a router -> what it is called, and whether a block's has it
    "logits": ("logits", kinds.has_logits),
    "rows": ("row per expert", lambda block: block.rows_ED is not None),
    "top_k": (
        "number of experts per token that can change",
        lambda block: kinds.experts_per_token(block) is not None,
    ),
}


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
            edits.setdefault(layer, Edit(blocks[layer]))
            change.record.apply(edits[layer], change.experts, change.options, context)
    return edits


def check_block(change: Change, block: Block) -> None:
    if unknown := [expert for expert in change.experts if expert >= block.n_experts]:
        raise BadInput(
            f"{change.label}: layer {block.layer} has experts 0 to {block.n_experts - 1}, "
            f"not {unknown[0]}; give one of them"
        )
    for name, has in (NEEDS[need] for need in change.record.needs):
        if not has(block):
            raise BadInput(
                f"{change.label}: the router of layer {block.layer} has no {name}, so {change.name} "
                "cannot be applied to it; use another intervention"
            )


def check_pair(first: Change, second: Change, blocks: Mapping[int, Block]) -> None:
    """Raise where two changes of one layer exclude each other."""
    shared = sorted(set(first.layers_of(blocks)) & set(second.layers_of(blocks)))
    excluded = second.name in first.record.excludes or first.name in second.record.excludes
    apart = first.experts and second.experts and not set(first.experts) & set(second.experts)
    if shared and excluded and not apart:
        raise BadInput(
            f"{first.label!r} and {second.label!r} exclude each other in layer {shared[0]}; give one of them"
        )


def need_means(changes: Iterable[Change], blocks: Mapping[int, Block]) -> list[tuple[int, int]]:
    """Return layer and number of the experts whose mean output replaces them."""
    return sorted(
        {
            (layer, expert)
            for change in changes
            if change.record.needs_calibration
            for layer in change.layers_of(blocks)
            for expert in change.experts
        }
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
    find = lab_blocks if isinstance(model, LabModel) else find_blocks
    blocks = {block.layer: block for block in find(model)}
    check_changes(changes, blocks)
    outputs = kinds.MeanOutputs(need_means(changes, blocks))
    if outputs.counts:
        edits = {layer: Edit(blocks[layer], see=outputs.see) for layer, _ in outputs.counts}
        with carried_out(edits), torch.no_grad():
            for ids in text:
                model(ids.reshape(1, -1))
    means = {key: mean_D for key, mean_D in outputs.means.items() if outputs.counts[key]}
    with changed(blocks, changes, means=means, seed=seed):
        yield


# --- the interventions

NO_EXPERTS = (0, 0)
VIEW = Setting("view", "expert matrix whose right singular vectors are used", "gate", choices=kinds.VIEWS)
K = Setting("k", "number of leading right singular vectors", 1, least=1)
STRENGTH = Setting(
    "strength", "s: 1 removes the component, 2 reverses it, the published Mixtral runs used 10", 1.0
)
RESTORE = Setting("restore_norm", "give the row its old norm again", False)
DRAW = Setting("draw", "number of the random draw", 0, least=0)
OF_ROWS = ("project_out", "project_onto", "random_direction", "other_expert", "replace", "hijack")
MATCH = Setting("match", "what the control has in common", "rank", choices=("rank", "change"))
STEP = Setting("step", "distance to the other expert: number i uses i + step", 1, least=1)
# of all experts, unless some are named
row_change = partial(Intervention, experts=(0, MANY), needs=("rows",))

INTERVENTIONS: tuple[Intervention, ...] = (
    Intervention(
        "ablate", "the expert's output is zero; the other gates stay", "causal ablation", kinds.ablate
    ),
    Intervention(
        "mean",
        "the expert's output is its mean over the calibration tokens that choose it, times the gate",
        "MoNE",
        kinds.mean,
        needs_calibration=True,
        excludes=("ablate",),
    ),
    Intervention(
        "skip",
        "the expert is masked before top-k; the model's gate rule is applied to what remains",
        "route-around",
        kinds.skip,
        needs=("logits",),
    ),
    Intervention(
        "force",
        "the expert's logit is just above the largest, or just below the smallest with off; where the "
        "model has a bias for choosing, that bias is, and gates stay",
        "SteerMoE",
        kinds.force,
        (Setting("off", "below all others instead of above", False),),
        needs=("logits",),
        excludes=("force", "skip", "bias"),
    ),
    Intervention(
        "bias",
        "the score that selects the expert is shifted: the logit, and gates follow; where the model has "
        "a bias for choosing, that bias, and gates stay",
        "SteerMoE, heretic",
        kinds.bias,
        (Setting("by", "what is added to the score", kind=float),),
        needs=("logits",),
    ),
    Intervention(
        "swap",
        "two experts change places; the router's rows stay",
        "sanity check",
        kinds.swap,
        experts=(2, 2),
    ),
    Intervention(
        "transplant",
        "the expert, its router row or both are those of another expert, layer or checkpoint",
        "GaleMoE",
        kinds.transplant,
        (
            Setting("part", "what is replaced", "expert", choices=("expert", "row", "both")),
            Setting("from_layer", "layer of the other expert; -1: the same", -1, least=-1),
            Setting("from_expert", "number of the other expert; -1: the same", -1, least=-1),
            Setting("checkpoint", "where the other expert is; empty: in the same model", ""),
        ),
    ),
    row_change(
        "project_out",
        "r <- r - s (component of r in the span of its expert's k leading directions)",
        "GaleMoE",
        kinds.project_out,
        (K, STRENGTH, VIEW, RESTORE),
    ),
    row_change(
        "project_onto",
        "only the component of r in the span of its expert's k leading directions stays",
        "complement of project_out",
        kinds.project_onto,
        (K, VIEW, RESTORE),
    ),
    row_change(
        "random_direction",
        "control of project_out: a random k-dimensional subspace (match=rank), or a random direction "
        "with the same length of change (match=change)",
        "GaleMoE (equal rank only)",
        kinds.random_direction,
        (K, STRENGTH, VIEW, RESTORE, MATCH, DRAW),
    ),
    row_change(
        "other_expert",
        "control of project_out: with the subspace of another expert of the layer",
        "control",
        kinds.other_expert,
        (K, STRENGTH, VIEW, RESTORE, STEP),
    ),
    row_change(
        "replace",
        "r is the unit sum of sign_j v_j / j over its expert's k leading directions, sign_j that of the "
        "row's component, orthogonal to the rows before, with its old norm",
        "GaleMoE",
        kinds.replace_rows,
        (K, VIEW),
    ),
    row_change(
        "hijack",
        "the expert's row loses its component; all other rows gain strength times their norm times the "
        "expert's v_1, oriented along its row",
        "GaleMoE",
        kinds.hijack,
        (K, Setting("strength", "S", 1.0), VIEW),
        experts=(1, 1),
    ),
    row_change(
        "zero_router",
        "all rows are zero: equal logits, so every token gets the same experts",
        "GaleMoE",
        kinds.zero_router,
        experts=NO_EXPERTS,
        excludes=(*OF_ROWS, "permute_rows", "uniform_router", "transplant", "zero_router"),
    ),
    Intervention(
        "uniform_router",
        "each token's logits are permuted at random: uniform choices; gates keep their size where the router "
        "has no groups of experts",
        "control: what zero_router is often taken for",
        kinds.uniform_router,
        (DRAW,),
        experts=NO_EXPERTS,
        needs=("logits", "top_k"),
        excludes=("skip", "force", "bias", "uniform_router"),
    ),
    row_change(
        "permute_rows",
        "the rows of a layer change places at random, or in a given order",
        "GaleMoE (shuffle)",
        kinds.permute_rows,
        (Setting("order", "numbers of the rows, such as 1,0,2; empty: at random", ""), DRAW),
        experts=NO_EXPERTS,
    ),
    Intervention(
        "top_k",
        "fewer or more experts per token, gates by the model's rule",
        "llama.cpp users",
        kinds.top_k,
        (Setting("k", "experts per token", least=1),),
        experts=NO_EXPERTS,
        needs=("top_k",),
        excludes=("top_k",),
    ),
    Intervention(
        "temperature",
        "logits are divided by t",
        "standard",
        kinds.temperature,
        (Setting("t", "temperature", kind=float, least=1e-6),),
        experts=NO_EXPERTS,
        needs=("logits",),
    ),
)
