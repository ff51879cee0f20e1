"""A training as it went.

Losses beside what no skill would lose, the pull on the routers, and the course of the steps.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
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

UNIFORM, UNIGRAM = "every token alike", "frequencies alone"


def line(
    x: pd.Series, y: pd.Series, name: str, color: str, mode: str = "lines", dash: str = "solid"
) -> Trace:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": x.to_numpy(),
        "y": y.to_numpy(float),
        "line": {"color": color, "width": 2, "dash": dash},
        "marker": {"size": 6},
        "hovertemplate": f"{name}<br>step %{{x}}<br>%{{y:.4g}}<extra></extra>",
    }


def loss_by_step(tables: Tables) -> Figure:
    """Training and validation loss, with the losses of a uniform and of a unigram model."""
    steps, references = tables["steps"], tables["references"].set_index("name")["value"]
    trained, judged = steps[steps["lm_loss"].notna()], steps[steps["validation_loss"].notna()]
    ends = [int(steps["step"].min()), int(steps["step"].max())]
    data = [
        line(trained["step"], trained["lm_loss"], "training", CATEGORICAL[5]),
        line(judged["step"], judged["validation_loss"], "validation", CATEGORICAL[0], "lines+markers"),
        grey_line(ends, [references["uniform"]] * 2, UNIFORM, "dot"),
        grey_line(ends, [references["unigram"]] * 2, UNIGRAM),
    ]
    published = steps[steps["validation_loss_published"].notna()]
    if len(published):
        data.append(
            line(
                published["step"],
                published["validation_loss_published"],
                "validation, padding counted",
                CATEGORICAL[3],
                dash="dash",
            )
        )
    first, last = judged.iloc[0], judged.iloc[-1]
    title = (
        f"Validation loss goes from {number(first['validation_loss'])} (step "
        f"{int(first['step'])}) to {number(last['validation_loss'])} nats a token "
        f"(step {int(last['step'])}); {number(references['unigram'])} by {UNIGRAM}, "
        f"{number(references['uniform'])} with {UNIFORM}"
    )
    caption = (
        "Loss of the text alone, without routers' own losses. Training is the mean since the "
        "point before. Dashed: a model that knows how often "
        "each token occurs and nothing else; dotted: one that knows nothing."
    ) + (
        " Padding counted: as published comparisons of SoME do, which makes losses look smaller."
        if len(published)
        else ""
    )
    layout = base_layout("step", "loss (nats a token)")
    return Figure("loss_by_step", title, caption, ("lm_loss", "validation_loss"), data, layout, height=400)


def beside_unigram(saved: float) -> str:
    """How far a loss lies from the unigram model's, in words."""
    if saved == 0:
        return f"at the loss of {UNIGRAM}"
    far = number(abs(saved))
    return f"{far} {'nat' if far == '1' else 'nats'} a token {'below' if saved > 0 else 'above'} {UNIGRAM}"


def saved_by_domain(tables: Tables) -> Figure:
    """How far below the unigram model's loss each domain's validation loss lies."""
    rows = tables["domain_losses"]
    data: list[Trace] = []
    for index, (domain, own) in enumerate(rows.groupby("domain", sort=False)):
        ordered = own.sort_values("step")
        style = category_style(index)
        data.append(
            line(
                ordered["step"],
                ordered["unigram"] - ordered["loss"],
                str(domain),
                style["color"],
                "lines+markers",
                style["dash"],
            )
        )
    steps = sorted(rows["step"].unique())
    data.append(grey_line([steps[0], steps[-1]], [0, 0], UNIGRAM))
    last = (
        rows[rows["step"] == steps[-1]]
        .assign(saved=lambda frame: frame["unigram"] - frame["loss"])
        .sort_values("saved")
    )
    worst, best = last.iloc[0], last.iloc[-1]
    title = f"{capital(str(best['domain']))} is learned best, {beside_unigram(best['saved'])}"
    least = f"; {worst['domain']} least, {beside_unigram(worst['saved'])}"
    if best["saved"] <= 0:
        nearest = str(best["domain"])
        title = (
            f"No domain is learned yet: nearest comes {nearest}, {beside_unigram(best['saved'])}"
            if len(last) > 1
            else f"{capital(nearest)} is not learned yet: {beside_unigram(best['saved'])}"
        )
        least = f"; farthest is {worst['domain']}, {beside_unigram(worst['saved'])}"
    title += least if len(last) > 1 else ""
    caption = (
        "Unigram model's loss minus validation loss, by domain: 0 is a model that knows frequencies "
        "alone, below it one that does not even know those."
    )
    return Figure(
        "saved_by_domain",
        title,
        caption,
        ("validation_loss",),
        data,
        base_layout("step", "nats a token below frequencies alone"),
        height=400,
    )


def gradient_by_step(tables: Tables) -> Figure:
    """Norm of the whole gradient, and the norm at which it is clipped."""
    steps = tables["steps"]
    rows = steps[steps["gradient_norm"].notna()]
    clip = float(tables["references"].set_index("name")["value"].get("clip", np.nan))
    data = [line(rows["step"], rows["gradient_norm"], "gradient", CATEGORICAL[1])]
    title = (
        f"The gradient's norm goes from {number(rows['gradient_norm'].iloc[0])} to "
        f"{number(rows['gradient_norm'].iloc[-1])}"
    )
    if clip > 0:
        data.append(grey_line([rows["step"].iloc[0], rows["step"].iloc[-1]], [clip, clip], "clipped above"))
        title += (
            f"; {number(100 * float((rows['gradient_norm'] > clip).mean()))} % of the points lie "
            f"above {number(clip)}, where it is clipped"
        )
    yaxis = plain_log(data) or {}
    return Figure(
        "gradient_by_step",
        title,
        "Mean since the point before, before clipping.",
        ("gradient_norm",),
        data,
        base_layout("step", "norm of the gradient", yaxis=yaxis),
    )


def speed_by_step(tables: Tables) -> Figure:
    """Tokens a second, and their median."""
    steps = tables["steps"]
    rows = steps[steps["tokens_per_second"].notna()]
    median = float(rows["tokens_per_second"].median())
    data = [
        line(rows["step"], rows["tokens_per_second"], "speed", CATEGORICAL[2]),
        grey_line([rows["step"].iloc[0], rows["step"].iloc[-1]], [median] * 2, "median"),
    ]
    memory = rows["peak_memory_bytes"].dropna()
    title = f"{number(median)} tokens a second (median)" + (
        f", {number(float(memory.max()) / 1e9)} GB of memory at most" if len(memory) else ""
    )
    caption = (
        "Tokens trained on a second, evaluations left out. Memory is the process's on a CPU, torch's "
        "on a GPU."
    )
    return Figure(
        "speed_by_step",
        title,
        caption,
        ("tokens_per_second", "peak_memory_bytes"),
        data,
        base_layout("step", "tokens a second", yaxis={"rangemode": "tozero"}),
    )


LOSSES = [
    FigureSpec("loss_by_step", ("steps",), loss_by_step, wide=True),
    FigureSpec("saved_by_domain", (), saved_by_domain, wide=True),
]
COURSE = {  # by the column of steps that it cannot do without
    "gradient_norm": FigureSpec("gradient_by_step", ("steps",), gradient_by_step),
    "tokens_per_second": FigureSpec("speed_by_step", ("steps",), speed_by_step),
}
