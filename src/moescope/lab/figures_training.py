"""Figures of a training: losses with their baselines, gradients, speed, and the keys of SoME."""

from __future__ import annotations

import math

import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    HEAT,
    base_layout,
    capital,
    category_style,
    grey_line,
    number,
)
from moescope.verb import Figure, FigureSpec, Tables, Trace

UNIFORM, UNIGRAM = "uniform baseline", "unigram baseline"


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


# --- losses


def all_domains(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations of all domains together, in order of steps."""
    return evaluations[evaluations["domain"] == ""].sort_values("step")


def loss_by_step(tables: Tables) -> Figure:
    """Draw training and validation loss with the uniform and the unigram baseline."""
    steps, evaluated = tables["steps"], all_domains(tables["evaluations"])
    trained, baselines = steps[steps["lm_loss"].notna()], evaluated.iloc[-1]
    ends = [int(steps["step"].min()), int(steps["step"].max())]
    data = [
        line(trained["step"], trained["lm_loss"], "training", CATEGORICAL[5]),
        line(evaluated["step"], evaluated["loss"], "validation", CATEGORICAL[0], "lines+markers"),
        grey_line(ends, [baselines["uniform_loss"]] * 2, UNIFORM, "dot"),
        grey_line(ends, [baselines["unigram_loss"]] * 2, UNIGRAM),
    ]
    published = steps[steps["validation_loss_published"].notna()]
    if len(published):
        losses = published["validation_loss_published"]
        data.append(
            line(published["step"], losses, "validation, padding counted", CATEGORICAL[3], dash="dash")
        )
    first, last = evaluated["loss"].iloc[[0, -1]]
    caption = (
        f"Validation loss: {number(first)} before training, {number(last)} nats per token at the end "
        f"(unigram baseline: {number(baselines['unigram_loss'])}, "
        f"uniform: {number(baselines['uniform_loss'])})."
    )
    details = "Loss of the text without auxiliary losses; training: mean since the previous point."
    if len(published):
        details += " Padding counted: as in SoME's published comparison; it lowers the loss."
    layout = base_layout("step", "loss (nats per token)")
    columns = ("lm_loss", "evaluations.loss", "unigram_loss", "uniform_loss")
    title = "Training and validation loss"
    return Figure("loss_by_step", title, caption, columns, data, layout, height=400, details=details)


def loss_by_run(tables: Tables) -> Figure:
    """Draw the validation loss of several trainings with the unigram baseline; `run` names them."""
    rows = all_domains(tables["evaluations"])
    data, last = [], {}
    for index, (run, group) in enumerate(rows.groupby("run", sort=False)):
        style = category_style(index)
        data.append(
            line(group["step"], group["loss"], str(run), style["color"], "lines+markers", style["dash"])
        )
        last[str(run)] = float(group["loss"].iloc[-1])
    ends, baseline = [int(rows["step"].min()), int(rows["step"].max())], float(rows["unigram_loss"].iloc[-1])
    data.append(grey_line(ends, [baseline] * 2, UNIGRAM))
    first, *others = sorted(last, key=lambda run: last[run])
    caption = f"Lowest at the end: {first}, {number(last[first])} nats per token"
    caption += f"; highest: {others[-1]}, {number(last[others[-1]])}" if others else ""
    caption += f" (unigram baseline: {number(baseline)})."
    layout = base_layout("step", "validation loss (nats per token)")
    columns = ("evaluations.loss", "unigram_loss")
    return Figure("loss_by_run", "Validation loss of every run", caption, columns, data, layout)


def gain_by_domain(tables: Tables) -> Figure:
    """Draw the unigram baseline's loss minus the validation loss of each domain."""
    rows = tables["evaluations"]
    rows = rows[rows["domain"] != ""]
    data: list[Trace] = []
    for index, (domain, group) in enumerate(rows.groupby("domain", sort=False)):
        ordered, style = group.sort_values("step"), category_style(index)
        gain = ordered["unigram_loss"] - ordered["loss"]
        data.append(line(ordered["step"], gain, str(domain), style["color"], "lines+markers", style["dash"]))
    steps = sorted(rows["step"].unique())
    data.append(grey_line([steps[0], steps[-1]], [0, 0], UNIGRAM))
    last = rows[rows["step"] == steps[-1]].assign(gain=lambda frame: frame["unigram_loss"] - frame["loss"])
    last = last.sort_values("gain")
    worst, best = last.iloc[0], last.iloc[-1]
    caption = f"{capital(str(best['domain']))} gains most: {number(best['gain'])} nats per token"
    if len(last) > 1:
        caption += f"; {worst['domain']} least: {number(worst['gain'])}"
    caption += " (0: the unigram baseline; below 0 nothing is learned yet)."
    layout = base_layout("step", "gain over the unigram baseline (nats per token)")
    title = "Gain over the unigram baseline by domain"
    return Figure(
        "gain_by_domain", title, caption, ("evaluations.loss", "unigram_loss"), data, layout, height=400
    )


def base_losses(tables: Tables) -> Figure:
    """Draw every model's loss minus the untouched model's, by domain, with intervals."""
    rows = tables["base_losses"]
    rows = rows[rows["model"] != "untouched"].assign(domain=rows["domain"].replace("", "all domains"))
    data: list[Trace] = []
    for index, (model, group) in enumerate(rows.groupby("model", sort=False)):
        known = group["difference_low"].notna()
        down = (group["difference"] - group["difference_low"]).where(known, 0)
        up = (group["difference_high"] - group["difference"]).where(known, 0)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": str(model),
                "x": group["difference"].to_numpy(float),
                "y": group["domain"].tolist(),
                "marker": {"size": 9, "color": category_style(index)["color"]},
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": up.to_numpy(float),
                    "arrayminus": down.to_numpy(float),
                },
                "hovertemplate": f"{model}, %{{y}}<br>%{{x:.4g}} nats per token<extra></extra>",
            }
        )
    places = list(dict.fromkeys(rows["domain"]))
    data.append(grey_line([0, 0], [places[0], places[-1]], "untouched model"))
    total = rows[(rows["domain"] == "all domains") & (rows["model"] == "trained")].iloc[0]
    caption = (
        f"Trained minus untouched, all domains: {number(total['difference'])} nats per token (equal: 0)."
    )
    layout = base_layout("loss difference (nats per token)", "domain")
    layout["yaxis"] |= {"type": "category", "autorange": "reversed", "automargin": True}
    layout["yaxis"]["title"] = {"text": "domain", "standoff": 12}
    columns = ("base_losses.difference", "base_losses.difference_low")
    details = "Bars: 95 % over documents, paired; none under 20 documents. One training, so no other seeds."
    title = "Loss against the untouched model"
    return Figure("base_losses", title, caption, columns, data, layout, height=360, details=details)


# --- gradients and speed


def gradient_by_step(tables: Tables) -> Figure:
    """Draw the norm of the full gradient and the norm at which it is clipped."""
    rows = tables["steps"][tables["steps"]["gradient_norm"].notna()]
    norms, clip = rows["gradient_norm"], float(rows["gradient_clip"].iloc[-1])  # NaN without clipping
    data = [line(rows["step"], norms, "gradient", CATEGORICAL[1])]
    caption = f"Before clipping: from {number(norms.iloc[0])} to {number(norms.iloc[-1])}"
    if not math.isnan(clip):
        data.append(grey_line([rows["step"].iloc[0], rows["step"].iloc[-1]], [clip, clip], "clipped above"))
        caption += (
            f"; {number(100 * float((norms > clip).mean()))} % of the points exceed the limit {number(clip)}"
        )
    layout = base_layout("step", "gradient norm", yaxis=plain_log(data) or {})
    return Figure(
        "gradient_by_step", "Gradient norm", f"{caption}.", ("gradient_norm", "gradient_clip"), data, layout
    )


def speed_by_step(tables: Tables) -> Figure:
    """Draw tokens per second and their median."""
    rows = tables["steps"][tables["steps"]["tokens_per_second"].notna()]
    median = float(rows["tokens_per_second"].median())
    data = [
        line(rows["step"], rows["tokens_per_second"], "speed", CATEGORICAL[2]),
        grey_line([rows["step"].iloc[0], rows["step"].iloc[-1]], [median] * 2, "median"),
    ]
    memory = rows["peak_memory_bytes"].dropna()
    caption = f"Median {number(median)} tokens per second, evaluations excluded"
    caption += f"; peak memory {number(float(memory.max()) / 1e9)} GB." if len(memory) else "."
    layout = base_layout("step", "tokens per second", yaxis={"rangemode": "tozero"})
    columns = ("tokens_per_second", "peak_memory_bytes")
    return Figure("speed_by_step", "Training speed", caption, columns, data, layout)


# --- keys of SoME


def expert_usage_histogram(tables: Tables) -> Figure:
    """Draw how many experts have how many tokens, with random balanced routing in grey."""
    rows = tables["key_histogram"]
    seen = (rows["experts"] + rows["expected_experts"]).to_numpy(float)
    rows = rows[(rows.index == 0) | (seen.cumsum() - seen[0] > 0)]  # no empty bins between 0 and the first
    bins = [
        f"{number(left)} to {number(right)}"
        for left, right in zip(rows["bin_left"], rows["bin_right"], strict=True)
    ]
    data = [
        {
            "type": "bar",
            "name": name,
            "x": bins,
            "y": rows[column].to_numpy(float),
            "marker": {"color": color},
            "hovertemplate": f"%{{x}} tokens<br>{name}: %{{y:.3g}}<extra></extra>",
        }
        for column, name, color in (
            ("experts", "experts", CATEGORICAL[0]),
            ("expected_experts", "random routing", GREY),
        )
    ]
    busiest, expected = (int(rows[column].to_numpy().argmax()) for column in ("experts", "expected_experts"))
    caption = (
        f"{int(rows['experts'].iloc[busiest])} of {int(rows['experts'].sum())} experts have {bins[busiest]} "
        f"tokens in the last window (random routing: mostly {bins[expected]})."
    )
    layout = base_layout("tokens", "experts", xaxis={"type": "category"}, barmode="group")
    title = "Tokens per expert in the middle layer"
    return Figure(
        "expert_usage_histogram", title, caption, ("key_histogram.experts", "expected_experts"), data, layout
    )


def key_map(tables: Tables) -> Figure:
    """Draw the keys on their first two principal axes, coloured by tokens."""
    rows = tables["key_map"]
    shown, by_chance = (100 * rows[name].iloc[0] for name in ("variance_share", "variance_share_chance"))
    color_bar = {"title": {"text": "tokens", "side": "right"}, "thickness": 12, "outlinewidth": 0}
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "showlegend": False,
            "x": rows["x"].to_numpy(float),
            "y": rows["y"].to_numpy(float),
            "customdata": rows[["expert", "tokens"]].to_numpy(),
            "marker": {
                "size": 9,
                "color": rows["tokens"].to_numpy(float),
                "colorscale": HEAT,
                "showscale": True,
                "colorbar": color_bar,
            },
            "hovertemplate": "expert %{customdata[0]}<br>%{customdata[1]} tokens<extra></extra>",
        }
    ]
    caption = (
        f"Two principal components of the middle layer's keys show {number(shown)} % of the variance "
        f"(random keys: {number(by_chance)} %)."
    )
    layout = base_layout("first component", "second component", yaxis={"scaleanchor": "x"})
    return Figure(
        "key_map", "Map of the keys", caption, ("key_map.tokens", "variance_share"), data, layout, height=420
    )


LOSSES = [
    FigureSpec("loss_by_step", ("steps", "evaluations"), loss_by_step, wide=True),
    FigureSpec("gain_by_domain", ("evaluations",), gain_by_domain, wide=True),
]
SPEED = {  # required column of steps -> figure
    "gradient_norm": FigureSpec("gradient_by_step", ("steps",), gradient_by_step),
    "tokens_per_second": FigureSpec("speed_by_step", ("steps",), speed_by_step),
}
KEYS = [
    FigureSpec("expert_usage_histogram", ("key_histogram",), expert_usage_histogram),
    FigureSpec("key_map", ("key_map",), key_map),
]
LOSS_BY_RUN = FigureSpec("loss_by_run", ("evaluations",), loss_by_run)
BASE_LOSSES = FigureSpec("base_losses", ("base_losses",), base_losses, wide=True)
TRAIN_FIGURES = [*LOSSES, BASE_LOSSES, *SPEED.values(), *KEYS]
