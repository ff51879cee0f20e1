"""A study along its axes: loss and load against an option's value or a size.

And what routers cost beside their experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from moescope.lab.figures_study import arm_axis, arm_height, loss_words, reference_of, upright
from moescope.plotting.style import (
    CATEGORICAL,
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    category_style,
    grey_line,
    number,
)

TARGET_CV = 0.1
PARTS_NAMED, OTHER_PARTS = 6, "other parts"  # of routers: the costliest have names, all stand in the table
WIDE = 8.0  # largest over smallest value from which an axis is logarithmic


def along(tables: Tables) -> pd.DataFrame:
    """The finished trainings that lie on the axis.

    Arm, seed, value, line (where other axes put the arm), and their numbers.
    """
    runs, places = tables["study_runs"], tables["study_axes"]
    done = runs[(runs["status"] == "done") & runs["validation_loss"].notna()]
    return done.merge(places, on="arm")


def axis_name(tables: Tables) -> str:
    """The axis' last word: epsilon of model.router_options.epsilon."""
    return str(tables["study_axes"]["axis"].iloc[0]).split(".")[-1].replace("_", " ")


def value_axis(values: Sequence[float], name: str) -> dict[str, object]:
    rungs = sorted(set(values))
    if (rungs[0] > 0 and rungs[-1] / rungs[0] >= WIDE) or name == "experts":
        return {"type": "log", "tickvals": rungs, "ticktext": [f"{value:g}" for value in rungs]}
    return {"tickvals": rungs, "ticktext": [f"{value:g}" for value in rungs]} if len(rungs) <= 10 else {}


def by_value(tables: Tables, column: str) -> tuple[pd.DataFrame, list[Trace]]:
    """(mean over seeds by line and value, traces: seeds as dots, means connected)."""
    rows = along(tables)
    rows = rows[rows[column].notna()]
    means = rows.groupby(["line", "value"], sort=True)[column].mean().reset_index()
    data: list[Trace] = []
    for index, (line, own) in enumerate(means.groupby("line", sort=False)):
        style = category_style(index)
        seeds = rows[rows["line"] == line]
        name = str(line) or "mean over seeds"
        data += [
            {
                "type": "scatter",
                "mode": "markers",
                "name": "one seed",
                "showlegend": index == 0,
                "x": seeds["value"].to_numpy(float),
                "y": seeds[column].to_numpy(float),
                "customdata": seeds["seed"].to_numpy(),
                "marker": {"size": 5, "color": style["color"], "opacity": 0.5},
                "hovertemplate": f"{name}<br>%{{x}}, seed %{{customdata}}<br>%{{y:.4g}}<extra></extra>",
            },
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": own["value"].to_numpy(float),
                "y": own[column].to_numpy(float),
                "line": {**style, "width": 2},
                "marker": {"size": 8},
                "hovertemplate": f"{name}<br>%{{x}}<br>%{{y:.4g}}<extra></extra>",
            },
        ]
    return means, data


def missing_words(tables: Tables, column: str) -> str:
    """Which values have no result."""
    places = tables["study_axes"]
    there = set(along(tables).dropna(subset=[column])["arm"])
    gone = sorted(places.loc[~places["arm"].isin(there), "value"].unique())
    return f" Not run, or without this number: {', '.join(f'{value:g}' for value in gone)}." if gone else ""


def loss_by_value(tables: Tables) -> Figure:
    """Validation loss against the axis, the reference's mean in grey."""
    comparisons, name = tables["study_comparisons"], axis_name(tables)
    reference = reference_of(comparisons)
    means, data = by_value(tables, "validation_loss")
    level = float(comparisons.set_index("arm")["mean"].get(reference, math.nan))
    values = [float(value) for value in means["value"]]
    if math.isfinite(level):
        data.append(grey_line([min(values), max(values)], [level, level], f"mean of {reference}"))
    best = means.loc[means["validation_loss"].idxmin()]
    where = f" ({best['line']})" if best["line"] else ""
    title = (
        f"The lowest mean loss along {name} is {loss_words(best['validation_loss'])} nats a token, at "
        f"{best['value']:g}{where}"
    )
    title += f"; {reference}, the reference, has {loss_words(level)}" if math.isfinite(level) else ""
    caption = (
        "Validation loss at the end of training: dots are seeds, lines means over them. The lowest of "
        "several means is low by luck, too: what may be said of single values stands in the differences."
    ) + missing_words(tables, "validation_loss")
    layout = base_layout(name, "validation loss (nats a token)", xaxis=value_axis(values, name))
    return Figure(
        f"loss_by_{slug(name)}", title, caption, ("study_runs.validation_loss",), data, layout, height=400
    )


def load_by_value(tables: Tables) -> Figure:
    """Load CV against the axis, with the CV that is aimed at."""
    name = axis_name(tables)
    means, data = by_value(tables, "load_cv")
    values = [float(value) for value in means["value"]]
    data.append(grey_line([min(values), max(values)], [TARGET_CV] * 2, f"aimed at: {TARGET_CV}"))
    reached = means[means["load_cv"] < TARGET_CV]
    best = means.loc[means["load_cv"].idxmin()]
    if len(reached):
        named = ", ".join(f"{value:g}" for value in sorted(reached["value"].unique()))
        title = f"Load CV is below {TARGET_CV} at {name} {named}"
    else:
        title = (
            f"Load CV stays above {TARGET_CV}: lowest at {name} {best['value']:g}, {number(best['load_cv'])}"
        )
    caption = (
        "Coefficient of variation of experts' loads at the end of training, mean over layers; dots are "
        "seeds. Dashed: the value that is aimed at."
    ) + missing_words(tables, "load_cv")
    layout = base_layout(name, "load CV", xaxis=value_axis(values, name), yaxis={"rangemode": "tozero"})
    return Figure(f"load_by_{slug(name)}", title, caption, ("load_cv",), data, layout, height=400)


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def overhead_shares(tables: Tables) -> Figure:
    """Each router's time by component, experts first, as shares of the block's."""
    rows, reference = tables["overhead"], str(tables["study_comparisons"]["reference"].iloc[0])
    experts = rows[rows["component"] == "experts"].set_index("router")["share"]
    whole = rows.groupby("router")["milliseconds"].sum()
    routers = list(experts.reindex(whole.index).fillna(0.0).sort_values(ascending=False).index)
    named = (
        rows[rows["component"] != "experts"]
        .groupby("component")["share"]
        .max()
        .sort_values(ascending=False, kind="stable")
    )
    few = list(named.index[: PARTS_NAMED if len(named) > PARTS_NAMED + 1 else PARTS_NAMED + 1])
    parts = rows.assign(
        component=rows["component"].where(rows["component"].isin(["experts", *few]), OTHER_PARTS)
    )
    parts = parts.groupby(["router", "component"])[["share", "milliseconds", "flops"]].sum()
    data: list[Trace] = []
    for index, component in enumerate(["experts", *few, *([OTHER_PARTS] if len(few) < len(named) else [])]):
        own = parts.xs(component, level="component").reindex(routers)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": component,
                "x": own["share"].to_numpy(float),
                "y": routers,
                "customdata": own[["milliseconds", "flops"]].to_numpy(float),
                "marker": {"color": CATEGORICAL[index]},
                "hovertemplate": (
                    f"%{{y}}: {component}<br>%{{x:.1%}} of the block<br>%{{customdata[0]:.3g}} ms, "
                    "%{customdata[1]:.3g} FLOPs<extra></extra>"
                ),
            }
        )
    if reference in experts.index:
        data.append(upright(float(experts[reference]), routers, f"experts' share under {reference}"))
    costly = routers[-1]
    title = (
        f"{costly} spends most on routing: {number(100 * (1 - experts.get(costly, 0.0)))} % of a block's "
        "time goes elsewhere than to experts"
    )
    title += (
        f", under {reference} {number(100 * (1 - experts[reference]))} %"
        if reference in experts.index and reference != costly
        else ""
    )
    caption = (
        "Forward passes of one block in training mode, medians; experts, then what each router does "
        "besides, its lesser parts together. Where only routers differ, a longer bar of experts is a "
        "cheaper router."
    )
    layout = base_layout(
        "share of the block's time",
        "",
        barmode="stack",
        legend={"traceorder": "normal"},
        xaxis={"range": [0, 1], "tickformat": ".0%"},
        yaxis=arm_axis(routers),
    )
    return Figure(
        "overhead_shares",
        title,
        caption,
        ("component", "milliseconds", "overhead.share"),
        data,
        layout,
        height=arm_height(len(routers)) + 80,
    )


ALONG = [
    FigureSpec("loss_by_value", ("study_runs", "study_comparisons", "study_axes"), loss_by_value, wide=True),
    FigureSpec("load_by_value", ("study_runs", "study_comparisons", "study_axes"), load_by_value, wide=True),
]
OVERHEAD = FigureSpec("overhead_shares", ("overhead", "study_comparisons"), overhead_shares, wide=True)
