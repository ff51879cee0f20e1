"""How SoME's keys organise themselves in the middle layer.

Who gets how much, over the steps and at the end, and where keys lie.
"""

from __future__ import annotations

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    HEAT,
    Figure,
    FigureSpec,
    Tables,
    base_layout,
    grey_line,
    number,
)
from moescope.routing.figures_steps import step_axis
from moescope.routing.metrics import METRICS


def usage_by_decade(tables: Tables) -> Figure:
    """How many experts have how many tokens, on a logarithmic scale; grey.

    Random balanced routing of the same tokens.
    """
    rows = tables["key_histogram"]
    seen = (rows["experts"] + rows["expected"]).to_numpy(float)
    rows = rows[(rows.index == 0) | (seen.cumsum() - seen[0] > 0)]  # no empty bins between none and the first
    names = [
        f"{number(left)} to {number(right)}" for left, right in zip(rows["left"], rows["right"], strict=True)
    ]
    data = [
        {
            "type": "bar",
            "name": "experts",
            "x": names,
            "y": rows["experts"].to_numpy(),
            "marker": {"color": CATEGORICAL[0]},
            "hovertemplate": "%{x} tokens<br>%{y} experts<extra></extra>",
        },
        {
            "type": "bar",
            "name": "random routing",
            "x": names,
            "y": rows["expected"].to_numpy(float),
            "marker": {"color": GREY},
            "hovertemplate": "%{x} tokens<br>random routing: %{y:.3g} experts<extra></extra>",
        },
    ]
    busiest = int(rows["experts"].to_numpy().argmax())
    by_chance = int(rows["expected"].to_numpy().argmax())
    title = (
        f"Most experts, {int(rows['experts'].iloc[busiest])} of {int(rows['experts'].sum())}, "
        f"have {names[busiest]} tokens; "
        f"with random routing most would have {names[by_chance]}"
    )
    caption = (
        "Experts of the middle layer by how many tokens chose them in the last stretch of training, "
        "four bins a decade; the first bin holds those without any."
    )
    layout = base_layout("tokens", "experts", xaxis={"type": "category"}, barmode="group")
    return Figure("usage_by_decade", title, caption, ("tokens",), data, layout)


def key_places(tables: Tables) -> Figure:
    """Keys on their two first principal axes, coloured by load."""
    rows, shares = tables["key_map"], tables["key_shares"].iloc[0]
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
                "colorbar": {
                    "title": {"text": "tokens", "side": "right"},
                    "thickness": 12,
                    "outlinewidth": 0,
                },
            },
            "hovertemplate": "expert %{customdata[0]}<br>%{customdata[1]} tokens<extra></extra>",
        }
    ]
    title = (
        f"Two axes show {number(100 * shares['shown'])} % of how keys differ; of random keys they "
        f"show {number(100 * shares['by_chance'])} %"
    )
    caption = (
        "Directions of the middle layer's keys on their first two principal components, coloured by "
        "tokens. Keys that lie together are chosen together."
    )
    layout = base_layout("first component", "second component", yaxis={"scaleanchor": "x"})
    return Figure("key_places", title, caption, ("tokens",), data, layout, height=420)


def usage_by_step(metric: str, axis: str, complement: bool = False) -> FigureSpec:
    """A metric of the middle layer's load at every stretch of steps, beside random routing; `complement`.

    1 less it.
    """

    def draw(tables: Tables) -> Figure:
        rows = tables["routing_layers"]
        layers = sorted(rows["layer"].unique())
        middle = layers[len(layers) // 2]
        rows = rows[
            (rows["metric"] == metric) & (rows["domain"] == "") & (rows["layer"] == middle)
        ].sort_values("step")
        columns = rows[["value", "chance", "collapse"]].to_numpy(float)
        value, chance, collapse = (1 - columns if complement else columns).T
        steps = rows["step"].to_numpy()
        data = [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"layer {middle}",
                "x": steps,
                "y": value,
                "line": {"color": CATEGORICAL[0], "width": 2},
                "marker": {"size": 6},
                "hovertemplate": "step %{x}<br>%{y:.4g}<extra></extra>",
            },
            grey_line(steps, chance, "random routing"),
            grey_line(steps, collapse, "collapse", "dot"),
        ]
        title = (
            f"{axis[0].upper()}{axis[1:]} in layer {middle}, the middle one, goes from "
            f"{number(value[0])} (step {steps[0]}) to {number(value[-1])} "
            f"(step {steps[-1]}); {number(chance[-1])} with random routing, "
            f"{number(collapse[-1])} at collapse"
        )
        about = (
            "The share of experts that any token chose" if complement else METRICS[metric].meaning.rstrip(".")
        )
        caption = (
            f"{about}, over a stretch of steps. Dashed: random routing; dotted: all tokens take the "
            "same experts."
        )
        layout = base_layout("step", axis, xaxis=step_axis(rows["step"]), yaxis={"rangemode": "tozero"})
        return Figure(
            f"middle_{metric}_by_step", title, caption, (metric, "chance", "collapse"), data, layout
        )

    return FigureSpec(f"middle_{metric}_by_step", ("routing_layers",), draw, metrics=(metric,))


USAGE_BY_STEP = [
    usage_by_step("gini", "Gini of the load"),
    usage_by_step("load_entropy_bits", "entropy of the load (bits)"),
    usage_by_step("unused", "share of experts used", complement=True),
]
KEYS = [
    FigureSpec("usage_by_decade", (), usage_by_decade),
    FigureSpec("key_places", (), key_places),
]
