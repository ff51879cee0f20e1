"""How a study's trainings went: loss and routing over the steps, one line an arm, the reference in grey."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from moescope.figures.study import ordered_arms, reference_of
from moescope.figures.style import (
    GREY,
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    category_style,
    grey_line,
    number,
)

BANDS_UP_TO = 5  # arms; more bands than that hide each other
CURVES = {  # column -> what the axis says, what stands in grey beside it
    "validation_loss": ("validation loss (nats a token)", ""),
    "routing_entropy": ("routing entropy (nats)", "log n: knows nothing"),
    "load_cv": ("load CV", "random routing"),
    "unused_share": ("share of experts unused", "random routing"),
}


def curves_of(column: str) -> FigureSpec:
    """The column over the steps: one line an arm, its mean over seeds; a band from the lowest seed to the highest where arms are few."""

    def draw(tables: Tables) -> Figure:
        return curves(tables, column)

    return FigureSpec(f"{column}_by_step", ("study_curves", "study_comparisons"), draw, wide=True)


def curves(tables: Tables, column: str) -> Figure:
    axis, beside = CURVES[column]
    comparisons = tables["study_comparisons"]
    reference = reference_of(comparisons)
    rows = tables["study_curves"]
    rows = rows[rows[column].notna()]
    arms = [arm for arm in ordered_arms(comparisons) if arm in set(rows["arm"])]
    ends: dict[str, float] = {}
    data: list[Trace] = []
    for index, arm in enumerate(arms):
        own = rows[rows["arm"] == arm].groupby("step")[column].agg(["mean", "min", "max"])
        ends[arm] = float(own["mean"].iloc[-1])
        style = {"color": GREY, "dash": "dash"} if arm == reference else category_style(index)
        if len(arms) <= BANDS_UP_TO:
            data += band(own, style["color"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{arm} (reference)" if arm == reference else arm,
                "x": own.index.to_numpy(),
                "y": own["mean"].to_numpy(float),
                "line": {**style, "width": 3 if arm == reference else 2},
                "hovertemplate": f"{arm}<br>step %{{x}}<br>%{{y:.4g}}<extra></extra>",
            }
        )
    floor = floors(tables, column)
    data += [
        grey_line(steps.to_numpy(), values.to_numpy(float), f"{beside}{suffix}", "dot")
        for suffix, (steps, values) in floor.items()
    ]
    low, high = min(ends, key=lambda arm: ends[arm]), max(ends, key=lambda arm: ends[arm])
    title = f"{axis[:1].upper()}{axis[1:].split(' (')[0]} ends between {number(ends[low])} ({low}) and {number(ends[high])} ({high})"
    if column == "validation_loss":
        title += (
            f"; {number(ends[reference])} for {reference}, the reference"
            if reference in ends and reference not in (low, high)
            else ""
        )
    elif floor:
        last = [float(values.iloc[-1]) for _, values in floor.values()]
        span = (
            number(min(last))
            if number(min(last)) == number(max(last))
            else f"{number(min(last))} to {number(max(last))}"
        )
        title += f"; {span} for {'a router that knows nothing' if column == 'routing_entropy' else 'random routing'}"
    caption = "Means over seeds" + ("; shaded: from the lowest seed to the highest." if len(arms) <= BANDS_UP_TO else ".") + " Grey: the reference arm"  # fmt: skip
    caption += "." if column == "validation_loss" else ", and dotted what routing gives that looks at nothing."
    columns = (column if column in ("load_cv", "unused_share") else f"study_curves.{column}",)
    layout = base_layout("step", axis, yaxis={} if column == "validation_loss" else {"rangemode": "tozero"})
    return Figure(f"{column}_by_step", title, caption, columns, data, layout, height=400 + 12 * max(len(arms) - 6, 0))


def band(own: pd.DataFrame, color: str) -> list[Trace]:
    edge: Trace = {"type": "scatter", "mode": "lines", "x": own.index.to_numpy(), "line": {"width": 0, "color": color}, "showlegend": False, "hoverinfo": "skip"}  # fmt: skip
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return [
        {**edge, "y": own["min"].to_numpy(float)},
        {**edge, "y": own["max"].to_numpy(float), "fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.16)"},
    ]


def floors(tables: Tables, column: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """What routing that looks at nothing gives at each step; one line for each pair of numbers of experts and choices among the arms.

    CV: √((n − k)/(N k)), N the tokens since the row before. Unused: (1 − k/n)^N. Entropy: log n.
    """
    if column == "validation_loss" or "study_arms" not in tables:
        return {}
    rows = tables["study_curves"]
    rows = rows[rows[column].notna()]
    arms = tables["study_arms"][tables["study_arms"]["arm"].isin(rows["arm"])]
    kinds = arms[["experts", "top_k", "tokens_a_step"]].drop_duplicates().sort_values(["experts", "top_k"])
    found = {}
    for kind in kinds.itertuples(index=False):
        named = arms[(arms[["experts", "top_k", "tokens_a_step"]] == kind).all(axis=1)]["arm"]
        steps = pd.Series(sorted(rows.loc[rows["arm"].isin(named), "step"].unique()))
        n, k = float(kind.experts), float(kind.top_k)
        seen = steps.diff().fillna(steps.iloc[0]).clip(lower=1) * kind.tokens_a_step
        value = {
            "routing_entropy": steps * 0 + math.log(n),
            "load_cv": np.sqrt((n - k) / (seen * k)),
            "unused_share": (1 - k / n) ** seen,
        }[column]
        found["" if len(kinds) == 1 else f", {k:.0f} of {n:.0f}"] = (steps, value)
    return found


COURSE = {column: curves_of(column) for column in CURVES}
