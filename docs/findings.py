"""Numbers of docs/findings.md: its expressions, evaluated against studies/*/results.parquet.

A study that was not run has no results.parquet: its numbers are "not run", its verdicts "not testable".
Claims that a test over seeds decides are Holm-corrected together.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, StrictUndefined

from moescope.lab.results import (
    CONFIRMED,
    LEAST_SHARE,
    MOST_VIOLATION,
    NOT_RUN,
    NOT_TESTABLE,
    REFUTED,
    SIMILAR_COST,
    SPECIALISED,
    Estimate,
    over_seeds,
)
from moescope.lab.study_statistics import LEVEL, MIN_SEEDS, holm

STUDIES = Path(__file__).parent.parent / "studies"
COLUMNS = ["study", "question", "arm", "seed", "status", "metric", "layer", "domain", "value", "chance"]
TARGET_CV = 0.1
UNTUNED = (
    "Routers are compared in the study `untuned` (default options, one learning rate for all): the tuned "
    "comparison was not run."
)
UNSEEN = ("tinystories_ru",)  # domains that no study trains on
WIDTH, ROW, LEFT = 480, 22, 165  # of the plot of differences, in pixels


def read_results(folder: Path = STUDIES) -> pd.DataFrame:
    """Return the results of every study that was run, one row per number."""
    frames = [pd.read_parquet(path) for path in sorted(folder.glob("*/results.parquet"))]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=COLUMNS)


@dataclass
class Findings:
    """What the page's expressions may call; each returns text."""

    results: pd.DataFrame
    tests: dict[tuple[Any, ...], float] = field(default_factory=dict)  # p of every tested claim
    adjusted: dict[tuple[Any, ...], float] = field(default_factory=dict)

    # --- values by seed

    def by_seed(self, study: str, arm: str, metric: str, domain: str = "") -> pd.Series:
        """Return the metric by seed, mean over layers, of trainings that beat the unigram baseline."""
        rows = self.results
        rows = rows[(rows["study"] == study) & (rows["arm"] == arm) & (rows["status"] == "done")]
        of_metric = rows[(rows["metric"] == metric) & (rows["domain"] == domain)]
        overall = of_metric[of_metric["layer"].isna()]
        values = (overall if len(overall) else of_metric).groupby("seed")["value"].mean().dropna()
        losses, baseline = (
            rows[(rows["metric"] == name) & (rows["domain"] == "")].groupby("seed")["value"].mean()
            for name in ("validation_loss", "unigram_loss")
        )
        beaten = losses >= baseline.reindex(losses.index).fillna(math.inf)
        return values.drop(beaten.index[beaten], errors="ignore")

    def gains(self, study: str, arm: str, other: str, metric: str, domain: str) -> Estimate | None:
        """Return arm minus other under the same seeds."""
        first, second = (self.by_seed(study, name, metric, domain) for name in (arm, other))
        return over_seeds((first - second).dropna())

    # --- text

    def mean(self, study: str, arm: str, metric: str, domain: str = "") -> str:
        return estimate_text(over_seeds(self.by_seed(study, arm, metric, domain)))

    def chance(self, study: str, arm: str, metric: str) -> str:
        rows = self.results
        rows = rows[(rows["study"] == study) & (rows["arm"] == arm) & (rows["metric"] == metric)]
        level = rows.loc[rows["domain"] == "", "chance"].astype(float).mean()
        return f"{level:.3g}" if math.isfinite(level) else NOT_RUN

    def difference(self, study: str, arm: str, other: str, metric: str, domain: str = "") -> str:
        return estimate_text(self.gains(study, arm, other, metric, domain))

    def ratio(self, study: str, arm: str, other: str, metric: str) -> str:
        first, second = (self.by_seed(study, name, metric) for name in (arm, other))
        return estimate_text(over_seeds((first / second).dropna()))

    def seeds(self, study: str, arm: str) -> str:
        count = len(self.by_seed(study, arm, "validation_loss"))
        return f"{count} seeds" if count else NOT_RUN

    def p(self, *claim: str) -> str:
        found = self.adjusted.get(claim, math.nan)
        return (f"p = {found:.2g}" if found >= 1e-4 else "p < 0.0001") if math.isfinite(found) else NOT_RUN

    def collapse(self, study: str, arm: str) -> str:
        """Return the share of seeds and layers that have collapsed."""
        rows = self.results
        rows = rows[(rows["study"] == study) & (rows["arm"] == arm) & (rows["domain"] == "")]
        wide = rows[rows["layer"].notna()].pivot_table(
            index=["seed", "layer"], columns="metric", values="value"
        )
        if not {"min_over_mean", "max_violation"} <= set(wide):
            return NOT_RUN
        n, k = (self.by_seed(study, arm, name).iloc[0] for name in ("n_experts", "top_k"))
        worst = (wide["min_over_mean"] < LEAST_SHARE) | (wide["max_violation"] / (n / k - 1) > MOST_VIOLATION)
        return f"{int(worst.sum())} of {len(worst)}"

    def below_target(self, study: str) -> str:
        """Return how many arms have a CV below the target in their worst layer, in evaluation."""
        rows = self.results
        rows = rows[(rows["study"] == study) & (rows["metric"] == "cv") & (rows["domain"] == "")]
        if rows.empty:
            return NOT_RUN
        worst = rows.groupby(["arm", "seed"])["value"].max().groupby(level="arm").mean()
        return f"{int((worst < TARGET_CV).sum())} of {len(worst)} settings (lowest {worst.min():.3g})"

    def verdict(self, study: str, arm: str, other: str, metric: str, sign: str = "above") -> str:
        """Judge the claim that arm minus other is above (or below) 0; from five seeds on, Holm-corrected."""
        return self.judge((study, arm, other, metric), self.gains(study, arm, other, metric, ""), sign)

    def judge(self, claim: tuple[Any, ...], found: Estimate | None, sign: str) -> str:
        if found is None:
            return NOT_TESTABLE
        self.tests[claim] = found.p_value
        p = self.adjusted.get(claim, math.nan)
        if found.seeds < MIN_SEEDS or not math.isfinite(p) or p > LEVEL:
            return NOT_TESTABLE
        return CONFIRMED if (found.mean > 0) == (sign == "above") else REFUTED

    def cost_verdict(self, study: str, arm: str, other: str) -> str:
        """Judge the claim that training takes at most a tenth longer, by the interval over seeds."""
        times = (self.by_seed(study, name, "tokens_per_second") for name in (other, arm))
        first, second = times
        longer = over_seeds((first / second - 1).dropna())
        if longer is None or longer.seeds < MIN_SEEDS or longer.low <= SIMILAR_COST < longer.high:
            return NOT_TESTABLE
        return CONFIRMED if longer.high <= SIMILAR_COST else REFUTED

    def size_slopes(self, study: str, arm: str, other: str, sizes: tuple[str, ...]) -> Estimate | None:
        """Return the gain of arm over other per doubling of active parameters, a slope per seed."""
        gains, doublings = [], []
        for size in sizes:
            losses = [self.by_seed(study, f"{name} {size}", "validation_loss") for name in (other, arm)]
            active = self.by_seed(study, f"{other} {size}", "parameters_active")
            if active.empty:
                return None
            gains.append(losses[0] - losses[1])
            doublings.append(math.log2(active.iloc[0]))
        rows = pd.concat(gains, axis=1).dropna().to_numpy(float)
        return over_seeds(np.polyfit(doublings, rows.T, 1)[0]) if len(rows) else None

    def size_trend(self, study: str, arm: str, other: str, *sizes: str) -> str:
        return estimate_text(self.size_slopes(study, arm, other, sizes))

    def size_verdict(self, study: str, arm: str, other: str, *sizes: str) -> str:
        found = self.size_slopes(study, arm, other, sizes)
        return self.judge((study, arm, other, "size"), found, "above")

    def domain_contrast(self, study: str, arm: str, other: str) -> Estimate | None:
        """Return the gain in specialised minus that in other domains, without those never trained on."""
        rows = self.results[(self.results["study"] == study) & (self.results["domain"] != "")]
        trained = [name for name in dict.fromkeys(rows["domain"]) if name not in UNSEEN]
        gains: dict[bool, list[pd.Series]] = {True: [], False: []}
        for domain in trained:
            losses = [self.by_seed(study, name, "validation_loss", domain) for name in (other, arm)]
            gain = losses[0] - losses[1]
            if gain.notna().any():
                gains[domain in SPECIALISED].append(gain)
        if not gains[True] or not gains[False]:
            return None
        special, others = (pd.concat(gains[kind], axis=1).mean(axis=1) for kind in (True, False))
        return over_seeds((special - others).dropna())

    def domain_difference(self, study: str, arm: str, other: str) -> str:
        return estimate_text(self.domain_contrast(study, arm, other))

    def domain_verdict(self, study: str, arm: str, other: str) -> str:
        found = self.domain_contrast(study, arm, other)
        return self.judge((study, arm, other, "domain"), found, "above")

    def forest(self, study: str, reference: str) -> str:
        """Return a plot of each arm's loss minus the reference's, with its 95 % interval, as SVG."""
        rows = self.results[self.results["study"] == study]
        arms = [arm for arm in dict.fromkeys(rows["arm"]) if arm != reference]
        found = {arm: self.gains(study, arm, reference, "validation_loss", "") for arm in arms}
        known = sorted(((arm, one) for arm, one in found.items() if one), key=lambda pair: pair[1].mean)
        return forest_svg(known, reference) if known else f"*Figure: {NOT_RUN}.*"


def estimate_text(found: Estimate | None) -> str:
    """Return "0.012 [0.001, 0.023]": the mean over seeds and its 95 % interval."""
    if found is None:
        return NOT_RUN
    text = f"{found.mean:.3g}"
    if math.isfinite(found.half):
        text += f" [{found.low:.3g}, {found.high:.3g}]"
    return text.replace("-", "−")


def forest_svg(rows: list[tuple[str, Estimate]], reference: str) -> str:
    ends = [value for _, one in rows for value in (one.mean, one.low, one.high) if math.isfinite(value)]
    low, high = min(0.0, *ends), max(0.0, *ends)
    span = high - low or 1.0

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * (value - low) / span

    height = ROW * (len(rows) + 2)
    style = "fill='currentColor' font-size='12' font-family='sans-serif'"
    parts = [
        f"<svg viewBox='0 0 {WIDTH} {height}' role='img' width='100%' style='max-width:560px'>",
        f"<line x1='{x(0):.1f}' x2='{x(0):.1f}' y1='0' y2='{height - ROW}' stroke='gray'/>",
    ]
    for place, (arm, one) in enumerate(rows):
        y = ROW * (place + 0.7)
        half = one.half if math.isfinite(one.half) else 0.0
        ends_of = f"x1='{x(one.mean - half):.1f}' x2='{x(one.mean + half):.1f}'"
        parts += [
            f"<text x='0' y='{y + 4:.1f}' {style}>{html.escape(arm)}</text>",
            f"<line {ends_of} y1='{y:.1f}' y2='{y:.1f}' stroke='#0072B2' stroke-width='2'/>",
            f"<circle cx='{x(one.mean):.1f}' cy='{y:.1f}' r='4' fill='#0072B2'/>",
        ]
    ends_in_words = f"{low:.3g} to {high:.3g}".replace("-", "−")
    words = f"loss minus {reference} (nats per token), {ends_in_words}; line: 0"
    parts.append(f"<text x='0' y='{height - 6}' {style}>{html.escape(words)}</text>")
    return "".join([*parts, "</svg>"])


def render(template: str, results: pd.DataFrame) -> str:
    """Return the page; the first pass finds the tests, between the passes their p values are corrected."""
    untuned = "main" not in set(results["study"]) and "untuned" in set(results["study"])
    if untuned:
        results = results.replace({"study": {"untuned": "main"}})
    findings = Findings(results)
    names = [
        *("mean", "chance", "difference", "ratio", "seeds", "p", "collapse", "below_target", "verdict"),
        *("cost_verdict", "size_trend", "size_verdict", "domain_difference", "domain_verdict", "forest"),
    ]
    calls: dict[str, Callable[..., str]] = {name: getattr(findings, name) for name in names}
    # the template is ours, and the page is Markdown: nothing to escape
    page = Environment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    compiled = page.from_string(template)
    values = {"target_cv": f"{TARGET_CV:g}" if len(results) else "the target"}
    values["routers_compared"] = UNTUNED if untuned else ""
    compiled.render(**calls, **values)
    claims = list(findings.tests)
    corrected = holm(np.array([findings.tests[claim] for claim in claims])) if claims else []
    findings.adjusted = {claim: float(p) for claim, p in zip(claims, corrected, strict=True)}
    return compiled.render(**calls, **values)
