"""Studies: arms to train under the same seeds, read from TOML and checked before any training."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from moescope.decoder.config import unknown_key
from moescope.decoder.layers import uses_qk_norm
from moescope.decoder.routers import ROUTERS
from moescope.decoder.vocabulary import check_vocabulary
from moescope.errors import BadInput, unknown_name
from moescope.lab.config import LabConfig, config_from, preset_config, read_toml

KEYS = ("preset", "reference", "references", "seeds", "base", "arms", "axes", "ablations", "keep", "tasks")
ARM_KEYS = ("model", "data", "train", "question", "axes")
QUESTIONS = ("main", "ablation", "sweep", "scaling")
KEEP = ("last", "all", "none")
SEEDS = 5
MOST = 10_000  # seeds, and arms of a grid
MAX_NAME = 200  # letters of an arm's name: a folder's name, of which file systems allow 255 bytes
PAIRED = "all arms of a seed start from the same weights, else seeds would not be blocks; remove it"
MIN_SEEDS_FOR_CLAIMS = 5
SIZES = ("experts", "d_model", "layers", "heads", "d_ff", "top_k")  # of [model]: axes of scaling

# What all arms must share for their losses to be of the same text and tokens.
SHARED: dict[str, Callable[[LabConfig], Any]] = {
    "[data]": lambda config: config.data,
    "[model] vocabulary": lambda config: config.model.vocabulary,
    "[train] sequence_length": lambda config: config.train.sequence_length,
    "[train] evaluation_rows": lambda config: config.train.evaluation_rows,
}

Overrides = dict[str, Any]  # as in a training's config: {"model": {...}, "train": {...}}


@dataclass(frozen=True)
class Arm:
    """One setting, trained under every seed. `axes` is its position on the grid, by axis name."""

    name: str
    question: str
    overrides: Overrides
    config: LabConfig  # of the first seed
    axes: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9._=+-]+", "_", self.name)

    def of_seed(self, seed: int) -> LabConfig:
        """Return the config under that seed, which is also the seed of the router's own draws."""
        model = self.config.model
        drawn = dict.fromkeys(ROUTERS[model.router].seed_options, seed)
        model = replace(model, router_options={**drawn, **model.router_options})
        return replace(self.config, model=model, train=replace(self.config.train, seed=seed))

    def training_name(self, seed: int) -> str:
        return f"{self.folder}-seed-{seed}"


@dataclass(frozen=True)
class Study:
    """Arms, their reference, and the seeds that every arm is trained under."""

    arms: tuple[Arm, ...]
    reference: str
    seeds: tuple[int, ...]
    base: LabConfig
    references: dict[str, str] = field(default_factory=dict)  # by question, where it is another arm
    keep: str = "last"  # which checkpoints of a measured training remain
    tasks: str = ""  # of lm-eval, as `train --tasks` takes them

    @property
    def trainings(self) -> list[tuple[Arm, int]]:
        """Arms and seeds, seed by seed, so that an interrupted study is balanced over the arms."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]

    @property
    def claims(self) -> bool:
        """Whether there are enough seeds to claim significance."""
        return len(self.seeds) >= MIN_SEEDS_FOR_CLAIMS

    def as_dict(self) -> dict[str, Any]:
        """Return the study as JSON-compatible data; `study_from` restores it."""
        more = {"tasks": self.tasks} if self.tasks else {}
        return {
            **more,
            "reference": self.reference,
            "references": self.references,
            "seeds": list(self.seeds),
            "keep": self.keep,
            "base": asdict(self.base),
            "arms": {
                arm.name: {"question": arm.question, "axes": arm.axes, **arm.overrides} for arm in self.arms
            },
        }


@dataclass(frozen=True)
class Draft:
    """An arm as written in the file."""

    name: str
    overrides: Overrides
    question: str | None = None
    axes: dict[str, Any] = field(default_factory=dict)


def read_study(path: str | Path) -> Study:
    """Read a study from a TOML file."""
    return study_from(read_toml(path), str(path))


def study_from(content: dict[str, Any], where: str = "study") -> Study:
    """Return the checked study of a dictionary as in a TOML file: all arms can be built and are different."""
    for key in content:
        if key not in KEYS:
            raise unknown_key(f"{where}: unknown key", key, list(KEYS))
    base = base_config(content, where)
    drafts = [
        *listed_arms(content.get("arms", {}), where),
        *grid_arms(content.get("axes", {}), base, where),
        *ablation_arms(content.get("ablations"), where),
    ]
    arms = distinct([build_arm(draft, base, where) for draft in drafts], where)
    if len(arms) < 2:
        raise BadInput(
            f"{where}: {len(arms)} arm; a study compares at least two: give [arms], [axes] or ablations"
        )
    reference = check_reference(content.get("reference"), arms, where)
    references = question_references(content, arms, where)
    arms = share_attention(arms, drafts, base, reference, where)
    check_shared(arms, where)
    keep = content.get("keep", "last")
    if keep not in KEEP:
        raise unknown_name("keep", str(keep), list(KEEP))
    seeds = read_seeds(content.get("seeds", SEEDS), where)
    tasks = content.get("tasks", "")
    if not isinstance(tasks, str):
        raise BadInput(f"{where}: tasks must be text, names separated by commas, not {tasks!r}")
    return Study(tuple(arms), reference, seeds, base, references, keep, tasks)


def base_config(content: dict[str, Any], where: str) -> LabConfig:
    name = content.get("preset", "nano")
    if not isinstance(name, str):
        raise BadInput(f"{where}: preset must be text, not {name!r}")
    base = content.get("base", {})
    if not isinstance(base, dict):
        raise BadInput(f"{where}: [base] must be a table, not {base!r}")
    train = base["train"] if isinstance(base.get("train"), dict) else {}
    if "seed" in train and "paired_weights" not in train:  # a run writes both
        raise BadInput(
            f"{where}: [base.train] seed: give the study's seeds instead: seeds = [{train['seed']}, ...]"
        )
    if "preset" in base:
        raise BadInput(f"{where}: [base] preset: write preset at the top of the file")
    config = config_from(base, preset_config(name), f"{where}: base")
    if train.get("paired_weights") is False:
        raise BadInput(f"{where}: [base.train] paired_weights: {PAIRED}")
    check_vocabulary(config.data.vocabulary, config.model.vocabulary)
    return replace(config, train=replace(config.train, seed=0, paired_weights=True))


def read_seeds(value: Any, where: str) -> tuple[int, ...]:
    number = isinstance(value, int) and not isinstance(value, bool)
    seeds = list(range(max(min(value, MOST + 1), 0))) if number else value
    valid = isinstance(seeds, list) and all(
        isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 2**63 for s in seeds
    )
    if not valid or len(set(seeds)) != len(seeds) or not 2 <= len(seeds) <= MOST:
        raise BadInput(
            f"{where}: seeds must be a number from 2 to {MOST} or a list of at least two different whole "
            f"numbers, not {value!r:.100}"
        )
    return tuple(seeds)


def listed_arms(tables: Any, where: str) -> Iterator[Draft]:
    """Yield the arms of [arms], each with its changes to the base."""
    if not isinstance(tables, dict):
        raise BadInput(f"{where}: [arms] must be a table of arms, not {tables!r}")
    for name, changes in tables.items():
        if not isinstance(changes, dict):
            raise BadInput(f"{where}: [arms.{name}] must be a table, not {changes!r}")
        for key in changes:
            if key not in ARM_KEYS:
                raise unknown_key(f"{where}: [arms.{name}]: unknown key", key, list(ARM_KEYS))
        question = changes.get("question")
        if question is not None and question not in QUESTIONS:
            raise unknown_name("question", str(question), list(QUESTIONS))
        axes = changes.get("axes", {})
        if not isinstance(axes, dict):
            raise BadInput(f"{where}: [arms.{name}] axes must be a table of values, not {axes!r}")
        overrides = {key: value for key, value in changes.items() if key not in ("question", "axes")}
        yield Draft(name, overrides, question or "main", axes)


def grid_arms(lists: Any, base: LabConfig, where: str) -> Iterator[Draft]:
    """Yield an arm for every combination of the axes' values.

    An axis is a dotted key with a list of values, or a name with a table of named changes:
    [axes.size] S = {model = {...}}.
    """
    if not isinstance(lists, dict):
        raise BadInput(f"{where}: [axes] must be a table of lists, not {lists!r}")
    if not lists:
        return
    axes = [axis(key, values, where) for key, values in lists.items()]
    if math.prod(map(len, axes)) > MOST:
        sizes = " x ".join(str(len(values)) for values in axes)
        raise BadInput(f"{where}: [axes] {sizes} arms are more than {MOST}; give fewer values")
    ends = [key.split(".")[-1] for key in lists]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(lists, ends, strict=True)}
    for point in itertools.product(*axes):
        overrides: Overrides = {}
        for changes in sorted((change.overrides for change in point), key=names_router, reverse=True):
            overrides = merged(overrides, changes)
        labels = [
            str(at.value) if at.key == "model.router" or at.named else f"{short[at.key]}={at.value}"
            for at in point
        ]
        position = {short[at.key]: at.value for at in point if at.key}
        yield Draft(" ".join(labels), overrides, question_of(point), position)


@dataclass(frozen=True)
class Value:
    """One value of one axis, and its changes to the base."""

    key: str
    value: Any
    overrides: Overrides
    named: bool = False


def axis(key: str, values: Any, where: str) -> list[Value]:
    if isinstance(values, dict) and values:
        for name, changes in values.items():
            tables = isinstance(changes, dict) and all(isinstance(table, dict) for table in changes.values())
            if not tables or not set(changes) <= {"model", "train"}:
                raise BadInput(
                    f"{where}: [axes.{key}] {name} must be a table of changes to model and train, not "
                    f"{changes!r}"
                )
        return [Value(key, name, changes, named=True) for name, changes in values.items()]
    if not isinstance(values, list) or not values:
        raise BadInput(f"{where}: [axes] {key} must be a list of values, not {values!r}")
    parts = key.split(".")
    if parts[0] not in ("model", "data", "train") or len(parts) < 2:
        raise BadInput(
            f'{where}: [axes] {key!r}: include the table, such as "model.router" or "train.learning_rate"'
        )
    if len({repr(value) for value in values}) < len(values):
        raise BadInput(f"{where}: [axes] {key}: a value is given twice")
    return [Value(key, value, nested(parts, value)) for value in values]


def nested(parts: list[str], value: Any) -> Overrides:
    for part in reversed(parts):
        value = {part: value}
    overrides: Overrides = value
    return overrides


def names_router(overrides: Overrides) -> bool:
    return "router" in overrides.get("model", {})


def merged(one: Overrides, other: Overrides) -> Overrides:
    both = dict(one)
    for key, value in other.items():
        both[key] = (
            merged(both[key], value) if isinstance(value, dict) and isinstance(both.get(key), dict) else value
        )
    return both


def question_of(point: tuple[Value, ...]) -> str:
    """Return scaling if a size varies, sweep if another value does, main if only routers do."""
    changed = [(table, key) for at in point for table, changes in at.overrides.items() for key in changes]
    if any(table == "model" and key in SIZES for table, key in changed):
        return "scaling"
    return "sweep" if any((table, key) != ("model", "router") for table, key in changed) else "main"


def ablation_arms(router: Any, where: str) -> Iterator[Draft]:
    """Yield the complete router, and variants with one part removed."""
    if router is None:
        return
    if not isinstance(router, str) or router not in ABLATED:
        raise BadInput(f"{where}: ablations = {router!r}: give one of {', '.join(ABLATED)}")
    for name, model in ABLATED[router].items():
        yield Draft(f"{router}{name}", {"model": {"router": router, **model}}, "ablation")


ABLATED = {name: router.variants for name, router in ROUTERS.items() if router.variants}


def build_arm(draft: Draft, base: LabConfig, where: str) -> Arm:
    """Return the arm with its checked config."""
    place = f"{where}: arm {draft.name!r}"
    if not draft.name.strip() or "/" in draft.name or "\n" in draft.name:
        raise BadInput(f"{place}: give it a name of letters and digits, without / and line breaks")
    if len(draft.name) > MAX_NAME:
        raise BadInput(f"{place}: its name has {len(draft.name)} letters; the limit is {MAX_NAME}")
    train = draft.overrides.get("train", {})
    if isinstance(train, dict) and "seed" in train:
        raise BadInput(f"{place}: [train] seed: all arms are trained under the study's seeds; remove it")
    if isinstance(train, dict) and train.get("paired_weights") is False:
        raise BadInput(f"{place}: [train] paired_weights: {PAIRED}")
    try:
        config = config_from(draft.overrides, base, place)
    except BadInput as error:  # some errors do not name the arm
        raise error if str(error).startswith(place) else BadInput(f"{place}: {error}") from None
    check_vocabulary(config.data.vocabulary, config.model.vocabulary)
    return Arm(draft.name, draft.question or "main", draft.overrides, config, draft.axes)


def told_apart(arm: Arm, other: Arm) -> bool:
    """Whether two arms of equal settings differ on their axes: in what the study itself does with them."""
    return set(arm.axes) == set(other.axes) and arm.axes != other.axes


def distinct(arms: list[Arm], where: str) -> list[Arm]:
    """Return the arms without repetitions; raise for one name of two settings, and two names of one."""
    unique: dict[str, Arm] = {}
    for arm in arms:
        if arm.name in unique:
            if unique[arm.name].config != arm.config:
                raise BadInput(f"{where}: two different arms are called {arm.name!r}; rename one")
            continue
        same = [
            other for other in unique.values() if other.config == arm.config and not told_apart(arm, other)
        ]
        if same:
            raise BadInput(
                f"{where}: arms {same[0].name!r} and {arm.name!r} are the same training; remove one"
            )
        clash = [other for other in unique.values() if other.folder.lower() == arm.folder.lower()]
        if clash:
            raise BadInput(
                f"{where}: arms {clash[0].name!r} and {arm.name!r} would share a folder; rename one"
            )
        unique[arm.name] = arm
    return list(unique.values())


def check_reference(name: Any, arms: list[Arm], where: str) -> str:
    names = [arm.name for arm in arms]
    if name is None:
        raise BadInput(f"{where}: no reference; name the arm to compare with: reference = {names[0]!r}")
    if name not in names:
        raise unknown_name("reference", str(name), names)
    return str(name)


def question_references(content: dict[str, Any], arms: list[Arm], where: str) -> dict[str, str]:
    """Return the references of single questions; for ablations by default the complete router."""
    named = content.get("references", {})
    if not isinstance(named, dict):
        raise BadInput(f'{where}: references must be a table such as {{ablation = "spectra"}}, not {named!r}')
    default = {"ablation": content["ablations"]} if content.get("ablations") else {}
    for question, name in {**default, **named}.items():
        if question not in QUESTIONS:
            raise unknown_name("question", question, list(QUESTIONS))
        if name not in [arm.name for arm in arms]:
            raise unknown_name(f"reference of {question}", str(name), [arm.name for arm in arms])
    return {**default, **named}


def share_attention(
    arms: list[Arm], drafts: list[Draft], base: LabConfig, reference: str, where: str
) -> list[Arm]:
    """Give all arms the reference's choice of query and key norms, which by default follows the router.

    If the base or any arm sets qk_norm, all arms stay as they are.
    """
    if base.model.qk_norm is not None:
        return arms
    if any("qk_norm" in draft.overrides.get("model", {}) for draft in drafts):
        return arms
    norms = next(uses_qk_norm(arm.config.model) for arm in arms if arm.name == reference)
    shared = []
    for arm in arms:
        if arm.config.model.block == "modern":
            config = replace(arm.config, model=replace(arm.config.model, qk_norm=norms))
            arm = replace(arm, overrides=merged(arm.overrides, {"model": {"qk_norm": norms}}), config=config)
        shared.append(arm)
    return distinct(shared, where)


def check_shared(arms: list[Arm], where: str) -> None:
    first = arms[0]
    for what, of in SHARED.items():
        for arm in arms[1:]:
            if of(arm.config) != of(first.config):
                raise BadInput(
                    f"{where}: arms {first.name!r} and {arm.name!r} differ in {what}, so their losses are "
                    "not comparable; set it in [base]"
                )
