"""How a study's trainings went: loss and routing over the steps, one line an arm, the reference in grey."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd

from moescope.lab.figures_study import loss_words, ordered_arms, reference_of
from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    capital,
    category_style,
    grey_line,
    number,
)

BANDS_UP_TO = 5  # arms; more bands than that hide each other
NAMED_UP_TO = 10  # arms; of more, those that stand out have names and colours
BEST, WORST = 4, 2  # how many stand out, by loss
CURVES = {  # column -> what the axis says, what stands in grey beside it
    "validation_loss": ("validation loss (nats a token)", ""),
    "routing_entropy": ("routing entropy (nats)", "log n: knows nothing"),
    "load_cv": ("load CV", "random routing"),
    "unused_share": ("share of experts unused", "random routing"),
}


def curves_of(column: str) -> FigureSpec:
    """The column over the steps, drawn by `curves`."""

    def draw(tables: Tables) -> Figure:
        return curves(tables, column)

    return FigureSpec(f"{column}_by_step", ("study_curves", "study_comparisons"), draw, wide=True)


def finished(tables: Tables, column: str) -> pd.DataFrame:
    """Rows with that number, of trainings that were finished.

    A mean over seeds must not change because one of them stopped.
    """
    runs, rows = tables["study_runs"], tables["study_curves"]
    done = runs.loc[runs["status"] == "done", ["arm", "seed"]]
    return rows[rows[column].notna()].merge(done, on=["arm", "seed"])


def mean_lines(
    rows: pd.DataFrame, column: str, arms: list[str], reference: str
) -> tuple[list[Trace], dict[str, float]]:
    """(one line an arm, its mean over seeds.

    With a band from the lowest seed to the highest where arms are few; where each line ends).
    """
    ends: dict[str, float] = {}
    data: list[Trace] = []
    # An arm has one colour in all figures, whether or not the others have this number.
    colours = {
        arm: category_style(place) for place, arm in enumerate(arm for arm in arms if arm != reference)
    }
    arms = [arm for arm in arms if arm in set(rows["arm"])]
    plain = [arm for arm in arms[BEST:-WORST] if arm != reference] if len(arms) > NAMED_UP_TO else []
    for arm in [*plain, *(arm for arm in arms if arm not in plain)]:  # those without names lie below
        own = rows[rows["arm"] == arm].groupby("step")[column].agg(["mean", "min", "max"])
        ends[arm] = float(own["mean"].iloc[-1])
        style = {"color": GREY, "dash": "dash"} if arm == reference else colours[arm]
        style = {"color": CATEGORICAL[5]} if arm in plain else style
        if len(arms) <= BANDS_UP_TO:
            data += band(own, style["color"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{arm} (reference)" if arm == reference else "other arms" if arm in plain else arm,
                "showlegend": arm not in plain[1:],
                "opacity": 0.45 if arm in plain else 1.0,
                "x": own.index.to_numpy(),
                "y": own["mean"].to_numpy(float),
                "line": {**style, "width": 3 if arm == reference else 1 if arm in plain else 2},
                "hovertemplate": f"{arm}<br>step %{{x}}<br>%{{y:.4g}}<extra></extra>",
            }
        )
    return data, ends


def between(what: str, ends: dict[str, float], words: Callable[[float], str] = number) -> str:
    """ "What ends between 0.1 (this) and 0.3 (that)"."""
    low, high = min(ends, key=lambda arm: ends[arm]), max(ends, key=lambda arm: ends[arm])
    if words(ends[low]) == words(ends[high]):
        return f"{what} ends at {words(ends[low])} in all arms"
    return f"{what} ends between {words(ends[low])} ({low}) and {words(ends[high])} ({high})"


def shading(arms: list[str]) -> str:
    return "Means over seeds" + (
        "; shaded: from the lowest seed to the highest." if len(arms) <= BANDS_UP_TO else "."
    )


def height(arms: list[str]) -> int:
    return 380 + 16 * max(min(len(arms), NAMED_UP_TO) - 4, 0)  # room for the legend on a small screen


def curves(tables: Tables, column: str) -> Figure:
    """The column over the steps, the reference arm in grey.

    Dotted what routing gives that looks at nothing.
    """
    axis, beside = CURVES[column]
    reference, arms = reference_of(tables["study_comparisons"]), ordered_arms(tables["study_comparisons"])
    data, ends = mean_lines(finished(tables, column), column, arms, reference)
    chance = chances(tables, column)
    data += [
        grey_line(steps.to_numpy(), values.to_numpy(float), f"{beside}{suffix}", "dot")
        for suffix, (steps, values) in chance.items()
    ]
    words = loss_words if column == "validation_loss" else number
    title = between(capital(axis.split(" (")[0]), ends, words)
    if column == "validation_loss":
        title += f"; at {words(ends[reference])} for {reference}, the reference" if reference in ends else ""
    elif chance:
        last = sorted(round(float(values.iloc[-1]), 6) for _, values in chance.values())
        span = (
            number(last[0])
            if number(last[0]) == number(last[-1])
            else f"{number(last[0])} to {number(last[-1])}"
        )
        title += (
            f"; {span} for "
            f"{'a router that knows nothing' if column == 'routing_entropy' else 'random routing'}"
        )
    caption = f"{shading(arms)} Grey: the reference arm" + (
        "." if column == "validation_loss" else ", and dotted what routing gives that looks at nothing."
    )
    columns = (column if column in ("load_cv", "unused_share") else f"study_curves.{column}",)
    yaxis = {} if column == "validation_loss" else {"rangemode": "tozero"}
    layout = base_layout("step", axis, legend={"traceorder": "normal"}, yaxis=yaxis)
    return Figure(f"{column}_by_step", title, caption, columns, data, layout, height=height(arms))


def difference_by_step(tables: Tables) -> Figure:
    """Validation loss less the reference's with the same seed at the same step.

    What the plain curves are too steep to show.
    """
    reference, arms = reference_of(tables["study_comparisons"]), ordered_arms(tables["study_comparisons"])
    rows = finished(tables, "validation_loss")
    beside = rows[rows["arm"] == reference].set_index(["seed", "step"])["validation_loss"].rename("beside")
    pairs = rows[rows["arm"] != reference].join(beside, on=["seed", "step"]).dropna(subset=["beside"])
    pairs = pairs.assign(difference=pairs["validation_loss"] - pairs["beside"])
    data, ends = mean_lines(pairs, "difference", arms, reference)
    steps = [int(pairs["step"].min()), int(pairs["step"].max())]
    data.append(grey_line(steps, [0.0, 0.0], f"{reference} (reference)"))
    title = between(f"The difference from {reference}", ends) + ", in nats a token; below 0 is better"
    caption = (
        f"{shading([*ends])} Validation loss less that of {reference} with the same seed at the same step. "
        "Nothing is tested here: the endpoint is the end."
    )
    layout = base_layout("step", "difference (nats a token)", legend={"traceorder": "normal"})
    return Figure("difference_by_step", title, caption, ("difference",), data, layout, height=height(arms))


def can_draw(spec: FigureSpec, tables: Tables) -> bool:
    """Whether there are at least two steps to draw.

    For the differences, of the reference too and of another arm.
    """
    if not {"study_curves", "study_runs"} <= set(tables):
        return False
    column = spec.name.removesuffix("_by_step")
    rows = finished(tables, column if column in CURVES else "validation_loss")
    if column in CURVES:
        return rows["step"].nunique() > 1
    reference = reference_of(tables["study_comparisons"])
    own, others = rows[rows["arm"] == reference], rows[rows["arm"] != reference]
    return len(own.merge(others, on=["seed", "step"])["step"].unique()) > 1


def band(own: pd.DataFrame, color: str) -> list[Trace]:
    edge: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": own.index.to_numpy(),
        "line": {"width": 0, "color": color},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return [
        {**edge, "y": own["min"].to_numpy(float)},
        {
            **edge,
            "y": own["max"].to_numpy(float),
            "fill": "tonexty",
            "fillcolor": f"rgba({red},{green},{blue},0.16)",
        },
    ]


def chances(tables: Tables, column: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """What routing that looks at nothing gives at each step; one line for each pair of numbers of experts and
    choices among the arms.

    CV: √((n − k)/(N k)), N the tokens since the row before. Unused: (1 − k/n)^N. Entropy: log n.
    """
    if column == "validation_loss" or "study_arms" not in tables:
        return {}
    rows = finished(tables, column)
    arms = tables["study_arms"][tables["study_arms"]["arm"].isin(rows["arm"])]
    found = {}
    for (experts, chosen, tokens), own in arms.groupby(["experts", "top_k", "tokens_a_step"]):
        steps = pd.Series(sorted(rows.loc[rows["arm"].isin(own["arm"]), "step"].unique()))
        n, k = float(experts), float(chosen)
        seen = steps.diff().fillna(steps.iloc[0]).clip(lower=1) * tokens
        value = {
            "routing_entropy": steps * 0 + math.log(n),
            "load_cv": np.sqrt((n - k) / (seen * k)),
            "unused_share": (1 - k / n) ** seen,
        }[column]
        found[f", {k:.0f} of {n:.0f}"] = (steps, value)
    lines = {
        tuple(number(each) for each in (*steps, *values)): (steps, values) for steps, values in found.values()
    }
    return {"": next(iter(lines.values()))} if len(lines) == 1 else found


COURSE = [
    curves_of("validation_loss"),
    FigureSpec("difference_by_step", ("study_curves", "study_comparisons"), difference_by_step, wide=True),
    *(curves_of(column) for column in CURVES if column != "validation_loss"),
]
