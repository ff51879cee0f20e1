"""Figures of a monitored training: router gradients, dropped tokens, usage of the middle layer."""

from __future__ import annotations

import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
    Figure,
    FigureSpec,
    Tables,
    base_layout,
    capital,
    grey_line,
    layer_lines,
    number,
)
from moescope.routing.figures_steps import metric_by_step, step_axis


def router_gradient_by_step(tables: Tables) -> Figure:
    """Draw the gradient norm of the language-model loss into each router, the auxiliary loss's in grey."""
    rows = tables["router_gradients"]
    reached = rows[rows["lm_gradient_norm"].notna()]
    aux = rows[rows["aux_gradient_norm"].notna()].groupby("step")["aux_gradient_norm"].mean()
    data = layer_lines(reached.rename(columns={"lm_gradient_norm": "norm"}), "step", "norm")
    if len(aux) and (aux > 0).any():
        data.append(grey_line(aux.index.to_numpy(), aux.to_numpy(float), "auxiliary loss, mean over layers"))
    last = reached[reached["step"] == reached["step"].max()]
    weakest = last.loc[last["lm_gradient_norm"].idxmin()]
    caption = (
        f"Smallest at step {int(weakest['step'])} in layer {int(weakest['layer'])}: "
        f"{number(weakest['lm_gradient_norm'])}"
    )
    caption += f"; auxiliary loss {number(aux.iloc[-1])} on average" if len(aux) else ""
    caption += " (0: the router learns nothing from the text)."
    points = [trace for trace in data if trace["x"][0] is not None]  # a colour bar is a trace without points
    layout = base_layout(
        "step",
        "gradient norm",
        yaxis=plain_log(points) or {},
        xaxis=step_axis(pd.Index(sorted(reached["step"].unique()))),
    )
    columns = ("lm_gradient_norm", "aux_gradient_norm")
    title = "Gradient norm of the language-model loss per router"
    return Figure("router_gradient_by_step", title, caption, columns, data, layout)


def usage_by_step(metric: str, axis: str, complement: bool = False) -> FigureSpec:
    """Return a figure of the middle layer's load metric per window of steps; `complement`: 1 minus it."""

    def draw(tables: Tables) -> Figure:
        rows = tables["routing_layers"]
        layers = sorted(rows["layer"].unique())
        middle = layers[len(layers) // 2]
        chosen = (rows["metric"] == metric) & (rows["domain"] == "") & (rows["layer"] == middle)
        rows = rows[chosen].sort_values("step")
        columns = rows[["value", "chance", "collapse"]].to_numpy(float)
        value, chance, collapse = (1 - columns if complement else columns).T
        steps = rows["step"]
        data = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"layer {middle}",
                "x": steps.to_numpy(),
                "y": value,
                "line": {"color": CATEGORICAL[0], "width": 2},
                "marker": {"size": 6},
                "hovertemplate": "step %{x}<br>%{y:.4g}<extra></extra>",
            },
            grey_line(steps.to_numpy(), chance, "random routing"),
            grey_line(steps.to_numpy(), collapse, "collapse", "dot"),
        ]
        caption = (
            f"From {number(value[0])} to {number(value[-1])} (random routing: {number(chance[-1])}, "
            f"collapse: {number(collapse[-1])})."
        )
        layout = base_layout("step", axis, xaxis=step_axis(steps), yaxis={"rangemode": "tozero"})
        name, title = f"middle_{metric}_by_step", f"{capital(axis)}, middle layer"
        return Figure(name, title, caption, (metric, "chance", "collapse"), data, layout)

    return FigureSpec(f"middle_{metric}_by_step", ("routing_layers",), draw, metrics=(metric,))


DROPPED = metric_by_step("dropped_by_step", "dropped", "share of slots", "experts without a capacity")
ROUTER_GRADIENT = FigureSpec(
    "router_gradient_by_step", ("router_gradients",), router_gradient_by_step, wide=True
)
USAGE_BY_STEP = [
    usage_by_step("gini", "Gini of the load"),
    usage_by_step("load_entropy_bits", "entropy of the load (bits)"),
    usage_by_step("unused", "share of experts used", complement=True),
]
