"""Claims about arms of studies, read from results.toml and judged together.

A claim names its study, arms and column: nothing is guessed. A number is estimated per seed, paired by seed
where two arms are compared, and new minus reference; its interval is a t interval over seeds. All numbers
that the claims of all files test are one family, corrected by Holm (1979).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd

from moescope.arguments import one_of
from moescope.decoder.config import check_table
from moescope.errors import BadInput
from moescope.lab.config import read_toml, reject_first
from moescope.lab.study_statistics import MIN_SEEDS, NOT_RUN, enters_comparisons
from moescope.lab.tables import TABLES
from moescope.plotting.style import counted, listed
from moescope.statistics import LEVEL, holm, t_test
from moescope.verb import Tables

CONFIRMED, REFUTED = "confirmed", "refuted"
UNDECIDED = "undecided"  # tested, but not distinguishable, or a guard forbids a verdict
UNFINISHED = "unfinished"  # trainings of the study are still to come
NOT_TESTABLE = "not testable"  # not run, or too few seeds
VERDICTS = (CONFIRMED, REFUTED, UNDECIDED, UNFINISHED, NOT_TESTABLE)
ESTIMANDS = ("difference", "ratio", "slope_per_doubling", "contrast", "least")
EXPECTED = {"lower": -1, "higher": 1}
OPERATORS: dict[str, Callable[[Any, float], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
LEARNED = 0.95  # of the unigram baseline: a final loss above it has learned hardly anything
FAR = 3.0  # median distances to the median that a mean may be away from it
DIFFERENT = 1.05  # ratio of parameters from which a comparison says so
LOSS, RATE, TASK = "validation_loss", "learning_rate", "task:"
LOWEST = "lowest validation_loss"  # on the way, on the rows that are evaluated during training

Studies = Mapping[str, Tables]
Place = tuple[str, str]  # a study and one of its arms


# --- what is written in the file


@dataclass(frozen=True)
class Quantity:
    """What is estimated, by seed. Lists of arms: their mean, or the points of a slope."""

    study: tuple[str, ...]
    arm: tuple[str, ...]
    column: str = LOSS  # of study_runs, a metric of study_layers, task:NAME METRIC, or a column of overhead
    than: tuple[str, ...] = ()
    than_study: tuple[str, ...] = ()  # by default the study of the arm
    estimand: str = "difference"  # without `than`: the value itself
    domain: str = ""  # a loss on the documents of one domain
    domains: tuple[str, ...] = ()  # of a contrast: their mean minus that of the other trained domains
    layer: int | None = None  # by default the mean over layers
    worst_layer: bool = False  # instead of that mean the largest value
    axis: str = "parameters_active"  # of a slope: a column of study_runs, of the reference's arms
    beyond_chance: bool = False  # (value - chance)/(1 - chance)

    @property
    def new(self) -> list[Place]:
        return pairs(self.study, self.arm)

    @property
    def reference(self) -> list[Place]:
        return pairs(self.than_study or self.study, self.than)

    @property
    def places(self) -> list[Place]:
        return [*self.new, *self.reference]

    @property
    def studies(self) -> list[str]:
        return [*dict.fromkeys((*self.study, *self.than_study))]


def pairs(studies: tuple[str, ...], arms: tuple[str, ...]) -> list[Place]:
    return list(zip(studies if len(studies) > 1 else studies * len(arms), arms, strict=True))


@dataclass(frozen=True)
class Claim:
    """A claim, what it estimates, and what would confirm it."""

    id: str
    text: str
    group: str = ""
    quantity: Quantity | None = None  # None of a claim about other claims
    expect: str = "lower"
    at_most: float | None = None  # of a ratio: confirmed by an interval below, refuted by one above it
    of: tuple[str, ...] = ()  # of "least": the claims whose weakest number it is
    require: dict[str, Any] = field(default_factory=dict)  # column -> condition, of every training
    registered: bool = True  # false: chosen after a look at the data, so it decides nothing
    note: str = ""  # why it was chosen then

    @property
    def sign(self) -> int:
        return EXPECTED[self.expect]


@dataclass(frozen=True)
class Check:
    """The number of a claim elsewhere: untested, shown beside the claim."""

    of: str
    title: str
    quantity: Quantity
    veto: bool = False  # the opposite sign, both beyond their intervals, leaves the claim undecided


@dataclass(frozen=True)
class ClaimsFile:
    """A results.toml: claims and checks, and the tables, figures and sections of its page."""

    path: Path
    title: str
    text: str
    groups: dict[str, str]  # name of a group of claims -> its text
    claims: tuple[Claim, ...]
    checks: tuple[Check, ...]
    tables: tuple[dict[str, Any], ...] = ()
    figures: tuple[dict[str, Any], ...] = ()
    sections: str = ""  # FILE.py:FUNCTION, called with studies and judged claims: sections TOML cannot say


# keys of the file's tables -> what they hold; one text stands for a list of one
OF_QUANTITY = {
    name: str | kind if kind == tuple[str, ...] else kind for name, kind in get_type_hints(Quantity).items()
}
OF_CLAIM = {
    **{name: kind for name, kind in get_type_hints(Claim).items() if name not in ("quantity", "of")},
    **OF_QUANTITY,
    "claims": str | tuple[str, ...],
}
OF_CHECK = {"of": str | tuple[str, ...], "title": str, "veto": bool, **OF_QUANTITY}
LISTED = tuple[dict[str, Any], ...]
OF_FILE = {
    **{"title": str, "text": str, "groups": dict[str, str], "sections": str, "defaults": dict[str, Any]},
    **dict.fromkeys(("claim", "check", "table", "figure"), LISTED),
}


def read_claims(path: str | Path) -> ClaimsFile:
    """Read and check a results.toml. A claim with a list of studies, or of `than`, stands for one of each."""
    path, content = Path(path), check_table(read_toml(path), OF_FILE, f"{path}")
    defaults = check_table(content.get("defaults", {}), OF_CLAIM, f"{path}: defaults")
    claims: list[Claim] = []
    for place, entry in enumerate(content.get("claim", ()), 1):
        where = f"{path}: claim {entry.get('id', place)}"
        every = expanded({**defaults, **check_table(entry, OF_CLAIM, where)})
        claims += [claim_from(one, where) for one in every]
    names = [claim.id for claim in claims]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{path}: two claims have the id {name!r}; rename one")
    quantities = {claim.id: claim.quantity for claim in claims if claim.quantity}
    for claim in claims:
        for name in claim.of:
            one_of(f"claim in {path}", name, quantities)
    checks = []
    for entry in content.get("check", ()):
        where = f"{path}: check {entry.get('title', '')!r}"
        check_table(entry, OF_CHECK, where)
        if not entry.get("of"):
            raise BadInput(f'{where}: no claim; name the one it checks: of = "H1"')
        for name in words(entry["of"]):
            before = quantities[one_of(f"claim in {where}", name, quantities)]
            quantity = changed(before, {key: entry[key] for key in OF_QUANTITY if key in entry}, where)
            title = entry.get("title", ", ".join(quantity.study))
            checks.append(Check(name, title, quantity, entry.get("veto", False)))
    return ClaimsFile(
        path,
        content.get("title", path.parent.name),
        content.get("text", ""),
        content.get("groups", {}),
        tuple(claims),
        tuple(checks),
        content.get("table", ()),
        content.get("figure", ()),
        content.get("sections", ""),
    )


def expanded(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per study and per reference, if lists of them are given; not of a slope's points."""
    if entry.get("estimand") == "slope_per_doubling":
        return [entry]
    found = []
    for study in words(entry.get("study", "")) or [""]:
        for than in words(entry.get("than", "")) or [""]:
            several = {"study": study, "than": than}
            more = [name for key, name in several.items() if isinstance(entry.get(key), tuple)]
            text = entry.get("text", "").replace("{study}", study).replace("{than}", than)
            found.append({**entry, "id": ": ".join([entry.get("id", ""), *more]), "text": text, **several})
    return found


def words(value: str | Sequence[str]) -> list[str]:
    return [value] * bool(value) if isinstance(value, str) else list(value)


def claim_from(entry: dict[str, Any], where: str) -> Claim:
    least = entry.get("estimand") == "least"
    one_of(f"value of expect in {where}", entry.get("expect", "lower"), EXPECTED)
    reject_first(
        where,
        (not entry.get("id"), 'no id; give each claim a short name: id = "H1"'),
        (least and not entry.get("claims"), "least needs the claims it is about: claims = [...]"),
    )
    of_quantity = {key: entry[key] for key in OF_QUANTITY if key in entry}
    quantity = None if least else changed(None, of_quantity, where)
    for name, condition in entry.get("require", {}).items():
        condition_of(condition, f"{where}: require {name}")
    given = {"text": "", **{key: entry[key] for key in OF_CLAIM if key in entry and key not in of_quantity}}
    return Claim(of=tuple(words(given.pop("claims", ()))), quantity=quantity, **given)


def changed(before: Quantity | None, change: dict[str, Any], where: str) -> Quantity:
    """Return a quantity, or another one that differs in what is given."""
    several = {name for name, kind in get_type_hints(Quantity).items() if kind == tuple[str, ...]}
    values: dict[str, Any] = {
        key: tuple(words(value)) if key in several else value for key, value in change.items()
    }
    quantity = replace(before or Quantity((), ()), **values)
    reject_first(
        where, *((not getattr(quantity, key), f"no {key}; name it: {key} = ...") for key in ("study", "arm"))
    )
    estimand = one_of(f"estimand in {where}", quantity.estimand, ESTIMANDS)
    reject_first(
        where,
        (estimand == "ratio" and not quantity.than, "a ratio to nothing; name the reference: than = ..."),
        (
            estimand == "contrast" and not quantity.domains,
            "a contrast of no domains; name them: domains = [...]",
        ),
        *(
            (
                len(studies) > 1 and len(studies) != len(names),
                f"{len(studies)} studies for {len(names)} arms of {key}; name one per arm",
            )
            for key, studies, names in (
                ("arm", quantity.study, quantity.arm),
                ("than", quantity.than_study or quantity.study, quantity.than),
            )
        ),
        (
            estimand == "slope_per_doubling" and len(quantity.arm) != len(quantity.than),
            f"{len(quantity.arm)} arms and {len(quantity.than)} references; pair them",
        ),
    )
    return quantity


def condition_of(condition: Any, where: str) -> tuple[Callable[[Any, float], Any], float]:
    """Return the comparison and the limit of a condition such as ">=20"."""
    found = re.fullmatch(
        r"([<>]=?|==) *(-?\d+(?:\.\d+)?(?:e-?\d+)?)", "==1" if condition is True else str(condition)
    )
    if found is None:
        raise BadInput(f'{where}: {condition!r} is no condition; write one such as ">=5" or "==0"')
    return OPERATORS[found[1]], float(found[2])


# --- numbers


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (NaN for one seed), and the p of no effect."""

    value: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    hedges_g: float = math.nan
    seeds: tuple[int, ...] = ()
    chance: float = math.nan

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def rows_of(studies: Studies, name: str, place: Place) -> pd.DataFrame:
    """Return the rows of an arm; none of a table that is missing."""
    study, arm = place
    rows = studies.get(study, {}).get(name, NO_ROWS)
    return rows[rows["arm"] == arm]


NO_ROWS = pd.DataFrame(
    columns=["arm", "seed", "status", LOSS, "layer", "metric", "domain", "task", "name", "value"]
)


def finished(studies: Studies, place: Place) -> pd.DataFrame:
    """Return the arm's trainings that count: done, and better than the unigram baseline where it is known."""
    runs = rows_of(studies, "study_runs", place)
    return runs[enters_comparisons(runs)] if len(runs) else runs


def measured(studies: Studies, place: Place, what: Quantity) -> tuple[str, pd.DataFrame]:
    """Return the table that holds the quantity, and seed, value and chance of finished trainings there."""
    runs, column = finished(studies, place), what.column
    if what.domain or what.domains:
        return "study_documents", domain_rows(studies, place, what, set(runs["seed"]))
    if column in runs:
        rows = pd.DataFrame({"seed": runs["seed"], "value": numbers_of(runs, column)})
        if what.beyond_chance:
            chance = numbers_of(runs, f"{column}_chance")
            rows["value"] = (rows["value"] - chance) / (1 - chance)
        elif f"{column}_chance" in runs:
            rows["chance"] = numbers_of(runs, f"{column}_chance")
        return "study_runs", rows[rows["value"].notna()]
    if column == LOWEST:
        lowest = rows_of(studies, "study_curves", place).groupby("seed")[LOSS].min().dropna()
        return "study_curves", lowest.rename("value").reset_index()
    if column in ("milliseconds", "flops"):  # of one block, timed once
        timed = studies.get(place[0], {}).get("overhead", pd.DataFrame(columns=["router", column]))
        parts = timed.loc[timed["router"] == place[1], column]
        return "overhead", pd.DataFrame({"seed": 0, "value": [float(parts.sum())] if len(parts) else []})
    if column.startswith(TASK):
        name, (task, _, metric) = "study_tasks", column.removeprefix(TASK).rpartition(" ")
        rows = rows_of(studies, name, place)
        rows = rows[(rows["task"] == task) & (rows["metric"] == metric)]
    else:
        name, rows = "study_layers", rows_of(studies, "study_layers", place)
        in_layer = True if what.layer is None else rows["layer"] == what.layer
        rows = rows[(rows["metric"] == column) & (rows["domain"] == "") & in_layer]
    return name, rows[rows["seed"].isin(runs["seed"]) & rows["value"].notna()]


def numbers_of(runs: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of study_runs as numbers."""
    try:
        return runs[name].astype(float)
    except (KeyError, TypeError, ValueError):
        problem = "holds no numbers" if name in runs else "is not there"
        raise BadInput(f"column {name} of study_runs {problem}; name another in results.toml") from None


def domain_rows(studies: Studies, place: Place, what: Quantity, seeds: set[int]) -> pd.DataFrame:
    """Return the loss on a domain by seed, or for a contrast the mean of some domains minus the others'."""
    rows = rows_of(studies, "study_documents", place)
    per = "tokens" if what.column == LOSS else "bytes"
    if per not in rows:
        return NO_ROWS
    rows = rows[rows["seed"].isin(seeds) & (rows[per] > 0)]
    sums = rows.assign(nats=rows["loss"] * rows["tokens"]).groupby(["seed", "domain"])[["nats", per]].sum()
    nats = sums["nats"] / (1.0 if per == "tokens" else math.log(2)) / sums[per]
    found = nats.astype(float).unstack("domain")
    unseen = set(studies[place[0]].get("unseen_domains", NO_ROWS)["domain"])
    wanted = {what.domain} if what.domain else {*what.domains}
    named = found[[name for name in found if name in wanted]]
    others = found[[name for name in found if name not in wanted | unseen]]
    values = named.mean(axis=1) - (0.0 if what.domain else others.mean(axis=1))
    return values.dropna().rename("value").reset_index()


def arm_values(studies: Studies, place: Place, what: Quantity) -> pd.Series:
    """Return the quantity by seed, of finished trainings; empty where it was not measured."""
    by_seed = measured(studies, place, what)[1].groupby("seed")["value"]
    return (by_seed.max() if what.worst_layer else by_seed.mean()).astype(float)


def mean_of(studies: Studies, places: list[Place], what: Quantity) -> pd.Series:
    """Return the mean over the arms by seed."""
    values = [arm_values(studies, place, what) for place in places]
    return values[0] if len(values) == 1 else pd.concat(values, axis=1).mean(axis=1)


def doubling_slopes(studies: Studies, what: Quantity) -> pd.Series:
    """Return the slope of a line per seed through the gains of all sizes, per doubling of the axis."""
    sizes, gains = [], []
    for new, old in zip(what.new, what.reference, strict=True):
        size = arm_values(studies, old, Quantity((), (), what.axis))
        gain = mean_of(studies, [new], what) - mean_of(studies, [old], what)
        if gain.notna().any() and len(size):
            sizes.append(float(size.iloc[0]))
            gains.append(gain)
    rows = pd.concat(gains, axis=1).dropna() if len(gains) > 1 else pd.DataFrame()
    slopes = np.polyfit(np.log2(sizes), rows.to_numpy(float).T, 1)[0] if len(rows) else []
    return pd.Series(slopes, rows.index, dtype=float)


def values_by_seed(studies: Studies, what: Quantity) -> tuple[pd.Series, pd.Series]:
    """Return what is compared by seed, over the seeds that both sides have: the new, and its reference."""
    slope = what.estimand == "slope_per_doubling"
    new_values = doubling_slopes(studies, what) if slope else mean_of(studies, what.new, what)
    if slope or not what.reference:
        return new_values, new_values * 0.0
    both = pd.concat([new_values, mean_of(studies, what.reference, what)], axis=1).dropna()
    new_values, old_values = both.iloc[:, 0], both.iloc[:, 1]
    if what.estimand == "ratio":
        return new_values / old_values, old_values * 0.0 + 1.0
    return new_values, old_values


def estimate(studies: Studies, what: Quantity) -> Estimate | None:
    """Return the number with its interval over seeds; None where nothing was measured."""
    new, old = values_by_seed(studies, what)
    if new.empty:
        return None
    found = t_test((new - old).to_numpy(float), np.maximum(new.abs(), old.abs()).to_numpy(float))
    shift, chance = 1.0 if what.estimand == "ratio" else 0.0, math.nan
    value, low, high = (float(part) + shift for part in (found.value, *found.interval()))
    if found.flat:
        low = high = value if len(new) > 1 else math.nan
    if not what.than and len(what.new) == 1:
        levels = measured(studies, what.new[0], what)[1].get("chance", pd.Series())
        chance = float(levels.astype(float).mean())
    seeds = tuple(int(seed) for seed in new.index)
    return Estimate(value, low, high, float(found.p_value), float(found.hedges_g), seeds, chance)


# --- verdicts


@dataclass(frozen=True)
class Judged:
    """A claim with its number and verdict."""

    claim: Claim
    number: Estimate | None
    verdict: str = NOT_TESTABLE
    why: tuple[str, ...] = ()
    failed: int = 0  # trainings of its arms that failed or are no better than the unigram baseline
    p_holm: float = math.nan

    def because(self, *reasons: str) -> Judged:
        return replace(self, why=(*self.why, *filter(None, reasons)))

    def undecided(self, *reasons: str) -> Judged:
        """Take a verdict away if there are reasons."""
        taken = any(reasons) and self.verdict in (CONFIRMED, REFUTED)
        return replace(self, verdict=UNDECIDED if taken else self.verdict).because(*reasons)


def judge(files: Sequence[ClaimsFile], studies: Studies) -> pd.DataFrame:
    """Return one row per claim and per check of these files.

    The p values of all claims are corrected together; a number that two claims test is one test. A test on
    fewer than five seeds or of an unfinished study claims nothing and is not in the family.
    """
    claims = [claim for file in files for claim in file.claims]
    numbers = {claim.quantity: estimate(studies, claim.quantity) for claim in claims if claim.quantity}
    tested = {}
    for claim in claims:
        if claim.quantity and claim.at_most is None and not unfinished(studies, claim.quantity):
            number = numbers[claim.quantity]
            if number and len(number.seeds) >= MIN_SEEDS:
                tested[claim.quantity] = number.p
    family = dict(zip(tested, holm(np.array([*tested.values()])), strict=True))
    rows: list[dict[str, Any]] = []
    for file in files:
        judged: dict[str, Judged] = {}
        found = [(check, estimate(studies, check.quantity)) for check in file.checks]
        checks = {claim.id: [pair for pair in found if pair[0].of == claim.id] for claim in file.claims}
        for claim in file.claims:
            if what := claim.quantity:
                p = math.nan if claim.at_most is not None else float(family.get(what, math.nan))
                one = verdict(claim, what, numbers[what], p, studies)
                one = vetoed(one, checks[claim.id])
                judged[claim.id] = one.because(*conditions(studies, what, one.number))
        for claim in file.claims:
            one = judged[claim.id] if claim.quantity else least(claim, [judged[name] for name in claim.of])
            rows.append(row(file, one, studies))
            for check, number in checks[claim.id]:
                other = Judged(replace(claim, quantity=check.quantity), number, "")
                names = {"check": check.title, "name": f"{claim.id}, {check.title}"}
                rows.append({**row(file, other, studies), **names})
    return pd.DataFrame(rows, columns=list(TABLES["study_claims"].columns))


def row(file: ClaimsFile, one: Judged, studies: Studies) -> dict[str, Any]:
    claim, number = one.claim, one.number or Estimate(math.nan)
    what = claim.quantity or Quantity((), (), ", ".join(claim.of), estimand="least")
    study = next((name for name in what.study if name in studies), "")
    return {
        "file": file.title,
        "claim": claim.id,
        "check": "",
        "group": claim.group,
        "text": claim.text,
        "study": listed(what.studies) if what.study else "",
        "arm": listed(what.arm) if what.arm else "",
        "than": listed(what.than) if what.than else "",
        "table": measured(studies, (study, what.arm[0]), what)[0] if what.arm else "",
        "column": what.column,
        "estimand": what.estimand,
        "expect": claim.expect if claim.at_most is None else f"at most {claim.at_most:g}",
        "estimate": number.value,
        "low": number.low,
        "high": number.high,
        "p": number.p,
        "p_holm": one.p_holm,
        "hedges_g": number.hedges_g,
        "seeds": len(number.seeds),
        "of_seeds": list(number.seeds),
        "failed": one.failed,
        "verdict": one.verdict,
        "why": "; ".join(one.why),
        "name": claim.id,
        "measure": quantity_words(what),
        "no_effect": 1.0 if what.estimand == "ratio" else 0.0,
    }


def quantity_words(what: Quantity) -> str:
    kind = "" if what.estimand == "difference" else f", {what.estimand.replace('_', ' ')}"
    return f"{what.column.replace('_', ' ')}{kind}"


def verdict(claim: Claim, what: Quantity, number: Estimate | None, p: float, studies: Studies) -> Judged:
    """Confirm or refute by the sign of a number whose Holm-corrected p is at most 0.05, from five seeds.

    An unfinished study decides nothing. Seeds that fail are missing from the mean, so arms with failed
    trainings confirm nothing, and refute nothing unless it is the claim's own arm that failed.
    """
    others, own = (failures(studies, places) for places in (what.reference, what.new))
    failed = others + own
    words = f"{counted(failed, 'training')} of these arms failed or did not beat the unigram baseline"
    one = Judged(claim, number, failed=failed, p_holm=p).because(words if failed else "")
    if number is None:
        return replace(one, why=(missing(studies, what),))
    if progress := unfinished(studies, what):
        return replace(one, verdict=progress)
    if claim.at_most is not None:  # a count, or a number whose interval is compared with a limit
        ends = [end if math.isfinite(end) else number.value for end in (number.low, number.high)]
        decided = CONFIRMED if ends[1] <= claim.at_most else REFUTED if ends[0] > claim.at_most else UNDECIDED
        return replace(one, verdict=decided).undecided(*unmet(claim, what, studies))
    if len(number.seeds) < MIN_SEEDS:
        if learned(studies, what):
            return replace(one, why=("too few seeds to claim anything", *one.why))
        return replace(one, number=None, why=("no pair of trainings is left without those that stalled",))
    if not p <= LEVEL:
        limits = f"95 % interval {number.low:.3f} to {number.high:.3f} (not corrected)".replace("-", "−")
        one = replace(one, verdict=UNDECIDED, why=(limits, *one.why))
    else:
        as_expected = claim.sign * number.value > 0
        blocked = failed if as_expected else others
        one = replace(one, verdict=UNDECIDED if blocked else CONFIRMED if as_expected else REFUTED)
    return one.undecided(*unmet(claim, what, studies), *rising(studies, what), *not_growing(studies, what))


def least(claim: Claim, parts: list[Judged]) -> Judged:
    """Return the claim that each of some claims holds: its number is the weakest of theirs.

    Confirmed if all are confirmed, refuted if the opposite of one is significant.
    """
    lacking = [one.claim.id for one in parts if one.number is None]
    if lacking:
        return Judged(claim, None, why=(f"not run: {listed(lacking)}",))
    weakest = min(parts, key=lambda one: one.claim.sign * one.number.value if one.number else math.inf)
    significant = sum(one.verdict == CONFIRMED for one in parts)
    why = (f"{significant} of {len(parts)} confirmed; weakest: {weakest.claim.id}",)
    kinds = dict.fromkeys(one.verdict for one in parts)  # in their order
    found = next((kind for kind in kinds if kind.startswith((UNFINISHED, NOT_TESTABLE))), UNDECIDED)
    if found == UNDECIDED:
        found = REFUTED if REFUTED in kinds else CONFIRMED if {*kinds} == {CONFIRMED} else UNDECIDED
    return Judged(claim, weakest.number, found, why, weakest.failed, weakest.p_holm)


def vetoed(one: Judged, checks: list[tuple[Check, Estimate | None]]) -> Judged:
    """Leave a claim undecided where a check has the other sign, both beyond their intervals."""
    own = one.number
    if own is None or not abs(own.value) > own.half:
        return one
    sign = math.copysign(1.0, own.value)
    places = [
        check.title
        for check, number in checks
        if check.veto and number and len(number.seeds) >= MIN_SEEDS and sign * number.value + number.half < 0
    ]
    return one.undecided(f"other sign elsewhere: {', '.join(places)}" if places else "")


# --- guards


def failures(studies: Studies, places: list[Place]) -> int:
    """Count the arms' trainings that failed or are no better than the unigram baseline."""
    parts = (rows_of(studies, "study_runs", place) for place in places)
    return sum(int((~enters_comparisons(runs[runs["status"] != NOT_RUN])).sum()) for runs in parts)


def missing(studies: Studies, what: Quantity) -> str:
    """Say why there is no number."""
    absent = [study for study in what.studies if study not in studies]
    if absent:
        return f"needs the study {listed(absent)}"
    lacking = dict.fromkeys(place[1] for place in what.places if finished(studies, place).empty)
    if lacking:
        return f"needs finished trainings of {listed([*lacking])}"
    return f"{what.column} was not measured, or in no seed of both arms"


def unfinished(studies: Studies, what: Quantity) -> str:
    """Say how far an unfinished study is; empty if all are finished."""
    for study in what.studies:
        status = studies.get(study, {}).get("study_runs", NO_ROWS)["status"]
        left = int((status == NOT_RUN).sum())
        if left:
            return f"{UNFINISHED}: {len(status) - left} of {len(status)} trainings"
    return ""


def learned(studies: Studies, what: Quantity) -> bool:
    """Whether a pair of trainings is left without those that learned hardly more than token frequencies."""
    there = dict(studies)
    for study in what.studies:
        runs = studies.get(study, {}).get("study_runs", NO_ROWS)
        if "unigram_loss" in runs:
            stalled = runs[LOSS].astype(float) > LEARNED * runs["unigram_loss"].astype(float)
            there[study] = {**studies[study], "study_runs": runs[~stalled]}
    return estimate(there, what) is not None


def unmet(claim: Claim, what: Quantity, studies: Studies) -> list[str]:
    """Return what forbids a verdict: a claim chosen later, requirements that a training does not meet."""
    later = ": ".join(filter(None, ("chosen after a look at the data", claim.note)))
    found = [] if claim.registered else [later]
    for column, condition in claim.require.items():
        compare, limit = condition_of(condition, claim.id)
        seeds = len(values_by_seed(studies, what)[0])
        if column == "seeds" and not compare(seeds, limit):
            found.append(f"{counted(seeds, 'seed')}, required are {condition}")
        if column in ("seeds", "finished"):  # five seeds and a finished study are required of every claim
            continue
        plain = replace(what, column=column, domain="", domains=(), beyond_chance=False)
        for place in what.places:
            values = arm_values(studies, place, plain)
            worst = [f"{value:g}" for value in values if not compare(value, limit)]
            if worst or values.empty:
                state = f"found {worst[0]}" if worst else f"not measured for {place[1]}"
                found.append(f"requires {column.replace('_', ' ')} {condition}, {state}")
                break
    return found


def rising(studies: Studies, what: Quantity) -> list[str]:
    """Name the arms whose loss rises at the end: where training stops then decides a claim on it.

    Adds the difference of the lowest losses on the way, on the rows that are evaluated during training.
    """
    if what.column != LOSS or not what.than or what.estimand == "slope_per_doubling":
        return []
    slopes = {arm: estimate(studies, Quantity((study,), (arm,), "loss_slope")) for study, arm in what.places}
    up = [f"{arm} by {interval(slope)}" for arm, slope in slopes.items() if slope and slope.low > 0]
    if not up:
        return []
    texts = [f"at the end losses rise per 1,000 steps: {listed(up)}"]
    lowest = estimate(studies, replace(what, column=LOWEST, estimand="difference", domain="", domains=()))
    return [*texts, f"difference of the lowest losses: {interval(lowest)}"] if lowest else texts


def not_growing(studies: Studies, what: Quantity) -> list[str]:
    """Name the arms of a slope that predict worse than a smaller one: they were not trained well."""
    if what.estimand != "slope_per_doubling" or what.column != LOSS:
        return []
    found: list[str] = []
    size = Quantity((), (), what.axis)
    for places in (what.new, what.reference):
        ordered = sorted(places, key=lambda place: mean_of(studies, [place], size).mean())
        losses = pd.Series([mean_of(studies, [place], what).mean() for place in ordered], dtype=float)
        found += [place[1] for place, worse in zip(ordered, losses > losses.cummin(), strict=True) if worse]
    return [f"worse than a smaller model: {listed(found)}"] if found else []


def conditions(studies: Studies, what: Quantity, number: Estimate | None) -> list[str]:
    """Say what else differs between the arms of a difference: learning rates, parameters, one far seed."""
    if number is None or not what.than:
        return []
    texts = [outlier_text(studies, what)]
    settings = {place[1]: rows_of(studies, "study_settings", place) for place in what.places}
    values = {arm: rows.loc[rows["name"] == RATE, "value"] for arm, rows in settings.items()}
    rates = {arm: float(of_arm.iloc[0]) for arm, of_arm in values.items() if len(of_arm)}
    known = [f"{arm} {rate:g}" for arm, rate in rates.items()]
    texts.append(f"learning rates: {listed(known)}" if len({*rates.values()}) > 1 else "")
    if what.estimand == "difference" and what.column == LOSS:
        for kind, column in (("active", "parameters_active"), ("trained", "parameters_trainable")):
            size = Quantity((), (), column)
            counts = {place[1]: mean_of(studies, [place], size).mean() for place in what.places}
            if max(counts.values()) > DIFFERENT * min(counts.values()):
                words = [f"{arm} {count / 1e6:.1f} M" for arm, count in counts.items()]
                texts.append(f"{kind} parameters: {listed(words)}")
    return [text for text in texts if text]


def outlier_text(studies: Studies, what: Quantity) -> str:
    """Return the median where a seed far from the others moves the mean, else nothing."""
    new, old = values_by_seed(studies, what)
    values = new - old
    away = (values - values.median()).abs()
    if len(values) < MIN_SEEDS or not abs(values.mean() - values.median()) > FAR * away.median():
        return ""
    far = int(away.idxmax())
    return f"median {values.median():.3f}; seed {far}: {values[far]:.3f}".replace("-", "−")


def interval(found: Estimate) -> str:
    """Return "mean ± half"."""
    half = f" ± {found.half:.3f}" if math.isfinite(found.half) else ""
    return f"{found.value:.3f}{half}".replace("-", "−")
