"""What a trace says, in sentences made from its tables.

Each with its chance level and what collapse would give.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.style import counted, number
from moescope.routing.figures_load import usages
from moescope.routing.figures_metrics import KNOWS_NOTHING, RANDOM, between, references, span, values_of
from moescope.routing.figures_separation import strongest_pair
from moescope.routing.report_views import TraceTables, View


def with_interval(row: pd.Series) -> str:
    """ "0.31 (0.28 to 0.34)", or the value alone."""
    ends = f" ({number(row['low'])} to {number(row['high'])})" if pd.notna(row["low"]) else ""
    return f"{number(row['value'])}{ends}"


def highest(rows: pd.DataFrame) -> pd.Series:
    found: pd.Series = rows.loc[rows["value"].idxmax()]
    return found


def routing_findings(view: View) -> list[str]:
    """The view's findings, most important first; what a trace cannot tell is left out."""
    tables = view.tables
    found = [*load_findings(view)]
    if len(rows := values_of(tables, "routing_entropy")):
        line = f"Routing entropy in nats {span(rows)}; {references(rows, KNOWS_NOTHING)}."
        if len(sure := values_of(tables, "confidence")):
            line += (
                f" The first choice has probability {between(sure['value'])} on average "
                f"({between(sure['chance'])} for {KNOWS_NOTHING})."
            )
        found.append(line)
    found += pair_findings(view)
    if len(rows := values_of(tables, "domain_information")):
        top = highest(rows)
        found.append(
            f"Experts tell domains apart best in layer {top['layer']}: I(expert; domain) is "
            f"{with_interval(top)} nats; "
            "0 with documents' labels dealt anew, "
            f"{number(np.log(tables['load']['domain'].nunique()))} at most."
        )
    if len(rows := values_of(tables, "token_information")):
        top = highest(rows)
        found.append(
            f"The token itself tells most about its experts in layer {top['layer']}: "
            f"{number(top['value'])} nats; "
            f"{number(top['chance'])} with tokens shuffled within documents."
        )
    if len(rows := values_of(tables, "sequential_consistency")):
        top = highest(rows)
        found.append(
            f"Neighbouring tokens share their first expert most often in layer {top['layer']}: "
            f"{with_interval(top)}; {references(rows[rows['layer'] == top['layer']], RANDOM)}."
        )
    return found


def load_findings(view: View) -> list[str]:
    tables, found = view.tables, []
    if len(rows := values_of(tables, "cv")):
        top = highest(rows)
        found.append(
            f"Load is most uneven in layer {top['layer']}: cv {with_interval(top)}; "
            f"{references(rows[rows['layer'] == top['layer']], RANDOM)}. "
            f"Over all layers cv is {between(rows['value'])}."
        )
    loads = [usage for usage in usages(tables) if usage.even]
    if loads:
        busy = max(loads, key=lambda usage: float(usage.counts.max() / usage.even))
        chances = values_of(tables, "max_over_mean").set_index("layer")["chance"]
        chance = (
            f" (random routing's busiest: {number(chances[busy.layer])})"
            if busy.layer in chances.index
            else ""
        )
        found.append(
            f"The busiest expert is {busy.experts[busy.counts.argmax()]} of layer {busy.layer}, "
            f"with {number(busy.counts.max() / busy.even)} times an even share{chance}."
        )
        idle = {usage.layer: int((usage.counts == 0).sum()) for usage in loads}
        expected = values_of(tables, "unused")["chance"].max()
        total = sum(len(usage.counts) for usage in loads)
        if any(idle.values()):
            worst = max(idle, key=lambda layer: idle[layer])
            found.append(
                f"{counted(sum(idle.values()), 'expert')} of {total:,} got no token, most in "
                f"layer {worst} ({idle[worst]}); "
                f"random routing leaves {number(100 * expected)} % unused."
            )
        else:
            found.append(
                f"All {total:,} experts got tokens; random routing leaves {number(100 * expected)} % unused."
            )
    if len(rows := values_of(tables, "dropped")) and rows["value"].max() > 0:
        top = highest(rows)
        found.append(
            f"Capacity was spent: in layer {top['layer']} {number(100 * top['value'])} % of the "
            "expert slots went empty (0 without capacity)."
        )
    return found


def pair_findings(view: View) -> list[str]:
    pairs = view.tables.get("coactivation", pd.DataFrame())
    pairs = pairs[pairs["lift"].notna()] if len(pairs) else pairs
    if not len(pairs) or not len(values_of(view.tables, "expert_overlap")):
        return []
    found = {
        layer: pair for layer, own in pairs.groupby("layer") if (pair := strongest_pair(own)) is not None
    }
    if not found:
        return []
    layer = max(found, key=lambda layer: found[layer].over)
    top = found[layer]
    return [
        (
            f"The pair most often chosen together is experts {top.a} and {top.b} of layer {layer}: "
            f"{number(top.over)} times chance; "
            f"the largest of so many pairs would reach about {number(top.by_chance)} in a layer by "
            "luck."
        )
    ]


def step_findings(trace: TraceTables) -> list[str]:
    """What changed over the steps: how even the load became, how much of the routing was kept.

    Nothing for one step.
    """
    stability, steps = trace.tables["stability"], trace.steps
    if len(steps) < 2:
        return []
    rows = trace.in_main_phase()["routing_layers"]
    rows = rows[(rows["metric"] == "cv") & (rows["domain"] == "") & rows["value"].notna()]
    means = rows.groupby("step")[["value", "chance"]].mean()
    found = [
        (
            f"From step {steps[0]} to step {steps[-1]} the load's cv, mean over layers, goes from "
            f"{number(means['value'].iloc[0])} to "
            f"{number(means['value'].iloc[-1])}; {number(means['chance'].mean())} for {RANDOM}."
        )
    ]
    if stability.empty:
        return found
    first = between_steps(stability, steps[0], steps[-1])
    least = first.loc[first["routing_consistency_corrected"].idxmin()]
    line = (
        f"{kept_routing(first, steps[0], steps[-1])}, least in layer {least['layer']} "
        f"({number(least['routing_consistency_corrected'])})"
    )
    if len(steps) > 2:
        before = between_steps(stability, steps[-2], steps[-1])
        line += f"; {kept_routing(before, steps[-2], steps[-1], short=True)}"
    found.append(f"{line}.")
    if first["tau_is_noise"].astype(bool).any():
        noisy = int(first["tau_is_noise"].astype(bool).sum())
        found.append(
            f"In {counted(noisy, 'layer')} loads are so even that the order of experts by usage is noise."
        )
    return found


def between_steps(stability: pd.DataFrame, a: int, b: int) -> pd.DataFrame:
    return stability[(stability["step_a"] == a) & (stability["step_b"] == b)]


def kept_routing(rows: pd.DataFrame, a: int, b: int, short: bool = False) -> str:
    share, beyond = (rows[name].mean() for name in ("routing_consistency", "routing_consistency_corrected"))
    if short:
        return f"between steps {a} and {b} {number(100 * share)} %, {number(beyond)} beyond chance"
    return (
        f"Between steps {a} and {b} tokens keep {number(100 * share)} % of their experts, "
        f"{number(beyond)} beyond chance (0)"
    )
