"""Figures of a study's training curves: loss and routing over steps, one line per arm."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from moescope.lab.figures_results import RESULT_FIGURES
from moescope.lab.figures_study import ARM_FIGURES, StudyFigure, format_loss, ordered_arms, reference_of
from moescope.plotting.style import CATEGORICAL, GREY, base_layout, category_style, grey_line, number
from moescope.verb import Figure, FigureSpec, Tables, Trace

MAX_BANDS = 5  # arms; more bands hide each other
MAX_NAMED = 10  # arms; of more, only the best and worst have names and colours
BEST, WORST = 4, 2
NEEDS = ("study_curves", "study_runs", "study_comparisons")
CURVES = {  # column -> axis title, name of the chance level, figure title
    "validation_loss": ("validation loss (nats per token)", "", "Validation loss by step"),
    "routing_entropy": ("routing entropy (nats)", "uniform router", "Routing entropy by step"),
    "load_cv": ("load CV", "balanced random routing", "Load CV by step"),
    "unused_share": ("share of experts unused", "balanced random routing", "Unused experts by step"),
}


def curves_of(column: str) -> StudyFigure:
    """Return the figure of a column over the steps."""

    def draw(tables: Tables) -> Figure:
        return curves(tables, column)

    def possible(tables: Tables) -> bool:
        return bool(finished(tables, column)["step"].nunique() > 1)

    name, line = f"arms_{column}_by_step", f"{CURVES[column][2]}: means over seeds, one line per arm."
    return StudyFigure(name, NEEDS, draw, wide=True, description=line, possible=possible)


def finished(tables: Tables, column: str) -> pd.DataFrame:
    """Return rows with that number of finished trainings: a mean must not change when one seed stops."""
    runs, rows = tables["study_runs"], tables["study_curves"]
    done = runs.loc[runs["status"] == "done", ["arm", "seed"]]
    return rows[rows[column].notna()].merge(done, on=["arm", "seed"])


def mean_lines(
    rows: pd.DataFrame, column: str, arms: list[str], reference: str
) -> tuple[list[Trace], dict[str, float]]:
    """Return (one line per arm: mean over seeds, with a min-max band for few arms; final value per arm)."""
    ends: dict[str, float] = {}
    data: list[Trace] = []
    # An arm has the same colour in all figures, even if other arms lack this number.
    colours = {
        arm: category_style(place) for place, arm in enumerate(arm for arm in arms if arm != reference)
    }
    arms = [arm for arm in arms if arm in set(rows["arm"])]
    unnamed = [arm for arm in arms[BEST:-WORST] if arm != reference] if len(arms) > MAX_NAMED else []
    for arm in [*unnamed, *(arm for arm in arms if arm not in unnamed)]:  # unnamed below named
        values = rows[rows["arm"] == arm].groupby("step")[column].agg(["mean", "min", "max"])
        ends[arm] = float(values["mean"].iloc[-1])
        style = {"color": GREY, "dash": "dash"} if arm == reference else colours[arm]
        style = {"color": CATEGORICAL[5]} if arm in unnamed else style
        if len(arms) <= MAX_BANDS:
            data += band(values, style["color"])
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{arm} (reference)" if arm == reference else "other arms" if arm in unnamed else arm,
                "showlegend": arm not in unnamed[1:],
                "opacity": 0.45 if arm in unnamed else 1.0,
                "x": values.index.to_numpy(),
                "y": values["mean"].to_numpy(float),
                "line": {**style, "width": 3 if arm == reference else 1 if arm in unnamed else 2},
                "hovertemplate": f"{arm}<br>step %{{x}}<br>%{{y:.4g}}<extra></extra>",
            }
        )
    return data, ends


def final_range(ends: dict[str, float], format_value: Callable[[float], str] = number) -> str:
    """Describe the final values: "Final values: 0.1 (this) to 0.3 (that)"."""
    low, high = min(ends, key=lambda arm: ends[arm]), max(ends, key=lambda arm: ends[arm])
    if format_value(ends[low]) == format_value(ends[high]):
        return f"Final value: {format_value(ends[low])} in all arms"
    return f"Final values: {format_value(ends[low])} ({low}) to {format_value(ends[high])} ({high})"


def height(arms: list[str]) -> int:
    return 380 + 16 * max(min(len(arms), MAX_NAMED) - 4, 0)  # room for the legend on a small screen


def curves(tables: Tables, column: str) -> Figure:
    """The column over the steps, means over seeds; the reference arm in grey, the chance level dotted."""
    axis, chance_name, title = CURVES[column]
    reference, arms = reference_of(tables["study_comparisons"]), ordered_arms(tables["study_comparisons"])
    data, ends = mean_lines(finished(tables, column), column, arms, reference)
    chance = chances(tables, column)
    data += [
        grey_line(steps.to_numpy(), values.to_numpy(float), f"{chance_name}{suffix}", "dot")
        for suffix, (steps, values) in chance.items()
    ]
    is_loss = column == "validation_loss"
    caption = final_range(ends, format_loss if is_loss else number)
    if is_loss and reference in ends:
        caption += f"; reference {reference}: {format_loss(ends[reference])}"
    elif chance:
        last = sorted(round(float(values.iloc[-1]), 6) for _, values in chance.values())
        span = " to ".join(dict.fromkeys((number(last[0]), number(last[-1]))))
        caption += f"; {chance_name}: {span}"
    columns = (column if column in ("load_cv", "unused_share") else f"study_curves.{column}",)
    yaxis = {} if is_loss else {"rangemode": "tozero"}
    layout = base_layout("step", axis, legend={"traceorder": "normal"}, yaxis=yaxis)
    return Figure(f"arms_{column}_by_step", title, f"{caption}.", columns, data, layout, height=height(arms))


def difference_by_step(tables: Tables) -> Figure:
    """Validation loss minus the reference's under the same seed at the same step."""
    reference, arms = reference_of(tables["study_comparisons"]), ordered_arms(tables["study_comparisons"])
    rows = finished(tables, "validation_loss")
    losses = rows[rows["arm"] == reference].set_index(["seed", "step"])["validation_loss"].rename("other")
    pairs = rows[rows["arm"] != reference].join(losses, on=["seed", "step"]).dropna(subset=["other"])
    pairs = pairs.assign(difference=pairs["validation_loss"] - pairs["other"])
    data, ends = mean_lines(pairs, "difference", arms, reference)
    steps = [int(pairs["step"].min()), int(pairs["step"].max())]
    data.append(grey_line(steps, [0.0, 0.0], f"{reference} (reference)"))
    caption = f"{final_range(ends)} nats per token; below 0 is better than {reference}. Not tested."
    layout = base_layout("step", "difference (nats per token)", legend={"traceorder": "normal"})
    title = "Difference from the reference by step"
    return Figure("difference_by_step", title, caption, ("difference",), data, layout, height=height(arms))


def shares_steps(tables: Tables) -> bool:
    """Return whether the reference and another arm share at least two steps of a seed."""
    rows, reference = finished(tables, "validation_loss"), reference_of(tables["study_comparisons"])
    references, others = rows[rows["arm"] == reference], rows[rows["arm"] != reference]
    return len(references.merge(others, on=["seed", "step"])["step"].unique()) > 1


def band(values: pd.DataFrame, color: str) -> list[Trace]:
    edge: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": values.index.to_numpy(),
        "line": {"width": 0, "color": color},
        "showlegend": False,
        "hoverinfo": "skip",
    }
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return [
        {**edge, "y": values["min"].to_numpy(float)},
        {
            **edge,
            "y": values["max"].to_numpy(float),
            "fill": "tonexty",
            "fillcolor": f"rgba({red},{green},{blue},0.16)",
        },
    ]


def chances(tables: Tables, column: str) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Return the chance level per step: one line per expert count, top-k and batch among the arms."""
    level = f"{column}_chance"
    if level not in tables["study_curves"]:
        return {}
    sizes = ["n_experts", "top_k", "tokens_per_step"]
    runs = tables["study_runs"][["arm", "seed", *sizes]].dropna()
    rows = finished(tables, level).merge(runs, on=["arm", "seed"])
    levels = {}
    for (n, k, tokens), group in rows.groupby(sizes):
        by_step = group.groupby("step")[level].mean()
        batch = f", {tokens:,} tokens per step" if rows["tokens_per_step"].nunique() > 1 else ""
        levels[f", {k:.0f} of {n:.0f}{batch}"] = (by_step.index.to_series(), by_step)
    lines = {
        tuple(number(each) for each in (*steps, *values)): (steps, values)
        for steps, values in levels.values()
    }
    return {"": next(iter(lines.values()))} if len(lines) == 1 else levels


CURVE_FIGURES: list[FigureSpec] = [
    curves_of("validation_loss"),
    StudyFigure("difference_by_step", NEEDS, difference_by_step, wide=True, possible=shares_steps),
    *(curves_of(column) for column in CURVES if column != "validation_loss"),
]
STUDY_FIGURES = [*ARM_FIGURES, *CURVE_FIGURES, *RESULT_FIGURES]
