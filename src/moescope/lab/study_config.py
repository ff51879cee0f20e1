"""Studies: arms to train under the same seeds, read from TOML and checked before any training."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

from moescope.arguments import one_of
from moescope.decoder.config import check_table
from moescope.decoder.layers import uses_qk_norm
from moescope.decoder.routers import ROUTERS
from moescope.decoder.vocabulary import check_vocabulary
from moescope.errors import BadInput
from moescope.lab.config import LabConfig, config_from, preset_config, read_toml, reject_first, split_place
from moescope.lab.study_statistics import MIN_SEEDS

# What a study's file may hold: key -> (kind, default, meaning).
KEYS: dict[str, tuple[Any, str, str]] = {
    "preset": (str, "nano", "Preset of the base."),
    "reference": (str, "required", "The arm that the others are compared with."),
    "references": (
        dict[str, str],
        "",
        'References of single questions: `references = { scaling = "top2 experts=4" }`; that of ablations '
        "is the complete router.",
    ),
    "seeds": (Any, "5", "A number from 2, or a list. Below five no significance is claimed."),
    "base": (
        dict[str, Any],
        "",
        "What all arms share: `base.model`, `base.data`, `base.train`, as in a training's config.",
    ),
    "arms": (
        dict[str, dict[str, Any]],
        "",
        "Name -> `model` and `train` as changes to the base, `question`, and `axes = { experts = 4 }` to "
        "say where on a figure's axis the arm lies.",
    ),
    "axes": (
        dict[str, Any],
        "",
        "Dotted keys with lists of values, or names with tables of named changes: `[axes.size]` with "
        "`S = { model = { d_model = 64 } }`. One arm per combination.",
    ),
    "ablations": (str, "", "`spectra` or `some`: the complete router, and one arm per removed part."),
    "keep": (str, "last", "Which checkpoints of a measured training remain: `last`, `all` or `none`."),
    "tasks": (
        str,
        "",
        "Tasks of lm-eval that score every training, as `train --base --tasks` takes them (extra `tasks`): "
        "choices and perplexities; a lab model generates no text.",
    ),
    "probe": (
        str,
        "",
        "`FILE.py:FUNCTION` beside the study's file, called after each training with the model, the "
        "validation rows, the vocabulary and `[train]`; the tables it returns are rows of `study_probes`.",
    ),
}
CHANGES = {"model": dict[str, Any], "train": dict[str, Any]}
OF_ARM = {**CHANGES, "data": dict[str, Any], "question": str, "axes": dict[str, Any]}
QUESTIONS = ("main", "ablation", "sweep", "scaling")
KEEP = ("last", "all", "none")
SEEDS = 5
MOST = 10_000  # seeds, and arms of a grid
MAX_NAME = 200  # letters of an arm's name: a folder's name, of which file systems allow 255 bytes
PAIRED = "all arms of a seed start from the same weights, else seeds would not be blocks; remove it"
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
    probe: str = ""  # FILE.py:FUNCTION, called with each trained model; no part of what the study is

    @property
    def trainings(self) -> list[tuple[Arm, int]]:
        """Arms and seeds, seed by seed, so that an interrupted study is balanced over the arms."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]

    @property
    def claims(self) -> bool:
        """Whether there are enough seeds to claim significance."""
        return len(self.seeds) >= MIN_SEEDS

    def as_dict(self) -> dict[str, Any]:
        """Return the study as JSON-compatible data; `study_from` restores it."""
        return {
            **({"tasks": self.tasks} if self.tasks else {}),
            "reference": self.reference,
            "references": self.references,
            "seeds": list(self.seeds),
            "keep": self.keep,
            "base": asdict(self.base),
            "arms": {
                arm.name: {"question": arm.question, "axes": arm.axes, **arm.overrides} for arm in self.arms
            },
        }


def read_study(path: str | Path) -> Study:
    """Read a study from a TOML file."""
    return study_from(read_toml(path), str(path), Path(path).parent)


def study_from(content: dict[str, Any], where: str = "study", folder: Path = Path()) -> Study:
    """Return the checked study of a dictionary as in a TOML file: all arms can be built and are different.

    A probe's file lies in `folder`.
    """
    check_table(content, {key: kind for key, (kind, *_) in KEYS.items()}, where)
    base = base_config(content, where)
    arms = [
        *listed_arms(content.get("arms", {}), base, where),
        *grid_arms(content.get("axes", {}), base, where),
        *ablation_arms(content.get("ablations"), base, where),
    ]
    names = [*dict.fromkeys(arm.name for arm in arms)]
    reject_first(
        where,
        (
            len(names) < 2,
            f"{len(names)} arm; a study compares at least two: give [arms], [axes] or ablations",
        ),
        (
            "reference" not in content,
            f"no reference; name the arm to compare with: reference = {str(names[:1])[1:-1]}",
        ),
    )
    reference = one_of("reference", content["reference"], names)
    references = content.get("references", {})
    if content.get("ablations"):  # by default the complete router
        references = {"ablation": content["ablations"], **references}
    for question, name in references.items():
        one_of("question", question, QUESTIONS)
        one_of(f"reference of {question}", name, names)
    if base.model.qk_norm is None and not any("qk_norm" in arm.overrides.get("model", {}) for arm in arms):
        # by default the choice follows the router: all arms get that of the reference
        norms = uses_qk_norm(next(arm.config.model for arm in arms if arm.name == reference))
        arms = [with_norms(arm, norms) if arm.config.model.block == "modern" else arm for arm in arms]
    keep = one_of("keep", content.get("keep", "last"), KEEP)
    seeds = read_seeds(content.get("seeds", SEEDS), where)
    tasks, probe = content.get("tasks", ""), content.get("probe", "")
    if "probe" in content:
        probe = ":".join(map(str, split_place(probe, folder, f"{where}: probe")))
    return Study(distinct(arms, where), reference, seeds, base, references, keep, tasks, probe)


def base_config(content: dict[str, Any], where: str) -> LabConfig:
    base = content.get("base", {})
    train = base["train"] if isinstance(base.get("train"), dict) else {}
    reject_first(
        where,
        (
            "seed" in train and "paired_weights" not in train,  # a run writes both
            f"[base.train] seed: give the study's seeds instead: seeds = [{train.get('seed')}, ...]",
        ),
        ("preset" in base, "[base] preset: write preset at the top of the file"),
        (train.get("paired_weights") is False, f"[base.train] paired_weights: {PAIRED}"),
    )
    config = config_from(base, preset_config(content.get("preset", "nano")), f"{where}: base")
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


def listed_arms(tables: dict[str, Any], base: LabConfig, where: str) -> Iterator[Arm]:
    """Yield the arms of [arms], each with its changes to the base."""
    for name, changes in tables.items():
        check_table(changes, OF_ARM, f"{where}: [arms.{name}]")
        question = one_of("question", changes.get("question", "main"), QUESTIONS)
        overrides = {key: value for key, value in changes.items() if key not in ("question", "axes")}
        yield build_arm(name, question, overrides, changes.get("axes", {}), base, where)


def grid_arms(lists: dict[str, Any], base: LabConfig, where: str) -> Iterator[Arm]:
    """Yield an arm for every combination of the axes' values.

    An axis is a dotted key with a list of values, or a name with a table of named changes:
    [axes.size] S = {model = {...}}.
    """
    if not lists:
        return
    axes = [axis(key, values, where) for key, values in lists.items()]
    if math.prod(map(len, axes)) > MOST:
        sizes = " x ".join(str(len(values)) for values in axes)
        raise BadInput(f"{where}: [axes] {sizes} arms are more than {MOST}; give fewer values")
    ends = [key.split(".")[-1] for key in lists]
    short = {key: end if ends.count(end) == 1 else key for key, end in zip(lists, ends, strict=True)}
    for point in itertools.product(*axes):
        values = dict(zip(lists, (value for value, _ in point), strict=True))
        # the router first: it sets what other changes may override
        changes = sorted((one for _, one in point), key=lambda one: "router" not in one.get("model", {}))
        labels = [
            str(value) if key == "model.router" or isinstance(lists[key], dict) else f"{short[key]}={value}"
            for key, value in values.items()
        ]
        overrides: Overrides = reduce(merged, changes, {})
        position = {short[key]: value for key, value in values.items() if key}
        yield build_arm(" ".join(labels), question_of(changes), overrides, position, base, where)


def axis(key: str, values: Any, where: str) -> list[tuple[Any, Overrides]]:
    """Return the values of an axis, each with its changes to the base."""
    if isinstance(values, dict) and values:
        for name, changes in values.items():
            check_table(changes, CHANGES, f"{where}: [axes.{key}] {name}")
        return list(values.items())
    parts = key.split(".")
    if not isinstance(values, list) or not values:
        raise BadInput(f"{where}: [axes] {key} must be a list of values, not {values!r}")
    reject_first(
        where,
        (
            parts[0] not in ("model", "data", "train") or len(parts) < 2,
            f'[axes] {key!r}: include the table, such as "model.router" or "train.learning_rate"',
        ),
        (len(set(map(repr, values))) < len(values), f"[axes] {key}: a value is given twice"),
    )
    return [(value, nested(parts, value)) for value in values]


def nested(parts: list[str], value: Any) -> Any:
    return {parts[0]: nested(parts[1:], value)} if parts else value


def merged(one: Overrides, other: Overrides) -> Overrides:
    return one | {
        key: merged(one[key], value) if isinstance(value, dict) and isinstance(one.get(key), dict) else value
        for key, value in other.items()
    }


def question_of(changes: list[Overrides]) -> str:
    """Return scaling if a size varies, sweep if another value does, main if only routers do."""
    changed = {(table, key) for one in changes for table, values in one.items() for key in values}
    if changed & {("model", size) for size in SIZES}:
        return "scaling"
    return "main" if changed <= {("model", "router")} else "sweep"


def ablation_arms(router: str | None, base: LabConfig, where: str) -> Iterator[Arm]:
    """Yield the complete router, and variants with one part removed."""
    if router is None:
        return
    ablated = {name: kind.variants for name, kind in ROUTERS.items() if kind.variants}
    for name, model in ablated[one_of(f"router of ablations in {where}", router, ablated)].items():
        overrides = {"model": {"router": router, **model}}
        yield build_arm(f"{router}{name}", "ablation", overrides, {}, base, where)


def build_arm(
    name: str, question: str, overrides: Overrides, axes: dict[str, Any], base: LabConfig, where: str
) -> Arm:
    """Return the arm with its checked config."""
    place, train = f"{where}: arm {name!r}", overrides.get("train", {})
    reject_first(
        place,
        (
            not name.strip() or "/" in name or "\n" in name,
            "give it a name of letters and digits, without / and line breaks",
        ),
        (len(name) > MAX_NAME, f"its name has {len(name)} letters; the limit is {MAX_NAME}"),
        ("seed" in train, "[train] seed: all arms are trained under the study's seeds; remove it"),
        (train.get("paired_weights") is False, f"[train] paired_weights: {PAIRED}"),
    )
    try:
        config = config_from(overrides, base, place)
    except BadInput as error:  # some errors do not name the arm
        raise error if str(error).startswith(place) else BadInput(f"{place}: {error}") from None
    check_vocabulary(config.data.vocabulary, config.model.vocabulary)
    return Arm(name, question, overrides, config, axes)


def with_norms(arm: Arm, norms: bool) -> Arm:
    """Return the arm with that choice of query and key norms."""
    config = replace(arm.config, model=replace(arm.config.model, qk_norm=norms))
    return replace(arm, overrides=merged(arm.overrides, {"model": {"qk_norm": norms}}), config=config)


def distinct(arms: list[Arm], where: str) -> tuple[Arm, ...]:
    """Return the arms without repetitions.

    Raises for one name or folder of two settings, for two names of one, and for different texts. Arms of
    equal settings may differ on their axes: in what the study itself does with them.
    """
    unique: dict[str, Arm] = {}
    near: dict[str, list[Arm]] = {}  # arms of one folder, or of equal settings
    for arm in arms:
        if arm.name in unique and unique[arm.name].config == arm.config:
            continue
        keys = (arm.folder.lower(), repr(arm.config))
        first = itertools.islice(unique.values(), 1)
        for other in itertools.chain(first, *(near.get(key, []) for key in keys)):
            same_axes = set(arm.axes) != set(other.axes) or arm.axes == other.axes
            pair, folders = (
                f"arms {other.name!r} and {arm.name!r}",
                {arm.folder.lower(), other.folder.lower()},
            )
            reject_first(
                where,
                (other.name == arm.name, f"two different arms are called {arm.name!r}; rename one"),
                (other.config == arm.config and same_axes, f"{pair} are the same training; remove one"),
                (len(folders) == 1, f"{pair} would share a folder; rename one"),
                *(
                    (
                        of(arm.config) != of(other.config),
                        f"{pair} differ in {what}, so their losses are not comparable; set it in [base]",
                    )
                    for what, of in SHARED.items()
                ),
            )
        unique[arm.name] = arm
        for key in keys:
            near.setdefault(key, []).append(arm)
    return tuple(unique.values())
