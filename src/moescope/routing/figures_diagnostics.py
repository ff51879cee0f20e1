"""What a router of the lab says of itself, over the steps of a training.

One panel a note, one line a layer, its reference in grey.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import Figure, FigureSpec, Tables, base_layout, grey_line, layer_lines, number
from moescope.routing.figures_metrics import between
from moescope.routing.figures_steps import step_axis
from moescope.routing.metrics import DIAGNOSTICS

NOTICEABLE = 0.002  # of a reference: a note that is never farther from it is told and not drawn


@dataclass(frozen=True)
class Panel:
    """How one note is drawn.

    `chance` and `collapse` follow the references' values in sentences; legends take their names from them.
    """

    metric: str
    subject: str  # opens the title
    axis: str
    chance: str
    collapse: str
    draws_collapse: bool = False  # where it is no bound far off but something to be compared with
    log: bool = False
    from_zero: bool = True

    def spec(self) -> FigureSpec:
        return FigureSpec(f"{self.metric}_by_step", ("routing_layers",), self.draw, metrics=(self.metric,))

    def draw(self, tables: Tables) -> Figure:
        rows = rows_of(tables, self.metric)
        means = rows.groupby("step")[["value", "chance", "collapse"]].mean()
        steps = means.index.to_numpy()
        data = [
            *layer_lines(rows, "step", "value"),
            grey_line(steps, means["chance"].to_numpy(float), legend(self.chance)),
        ]
        stray = spread_of(tables) if self.metric == "key_cosine" else None
        if stray is not None:
            for end in (2 * stray, -2 * stray):
                data.append(
                    {
                        **grey_line([steps[0], steps[-1]], [end, end], "twice their spread", "dot"),
                        "showlegend": end > 0,
                    }
                )
        if self.draws_collapse:
            data.append(grey_line(steps, means["collapse"].to_numpy(float), legend(self.collapse), "dot"))
        last = rows[rows["step"] == steps[-1]]
        chance = between(last["chance"]) + (f" ± {number(stray)}" if stray is not None else "")
        title = (
            f"{self.subject}, mean over layers, goes from {number(means['value'].iloc[0])} (step "
            f"{steps[0]}) to "
            f"{number(means['value'].iloc[-1])} (step {steps[-1]}); {chance} {self.chance}"
        ) + (f", {between(last['collapse'])} {self.collapse}" if last["collapse"].notna().any() else "")
        shown = [
            trace for trace in data if trace["x"][0] is not None
        ]  # a colour bar is a trace without points
        yaxis = (plain_log(shown) if self.log else None) or {
            "rangemode": "tozero" if self.from_zero else "normal"
        }
        caption = (
            f"{DIAGNOSTICS[self.metric].meaning} Mean over the passes of a stretch of steps, one line "
            f"a layer; dashed: {legend(self.chance)}, mean over layers"
        ) + (f"; dotted: {legend(self.collapse)}." if self.draws_collapse else ".")
        layout = base_layout("step", self.axis, xaxis=step_axis(means.index), yaxis=yaxis)
        return Figure(
            f"{self.metric}_by_step", title, caption, (self.metric, "chance", "collapse"), data, layout
        )


PANELS = [
    Panel(
        "column_error",
        "What Sinkhorn leaves uneven",
        "column error",
        "without Sinkhorn",
        "when one expert has all",
        log=True,
    ),
    Panel(
        "direction_overlap",
        "Overlap of experts' directions",
        "mean cos²",
        "for random directions",
        "when all are one",
        log=True,
    ),
    Panel("key_cosine", "Cosine of two keys", "mean cosine", "for random keys", "when all are one"),
    Panel(
        "key_strength",
        "Strength of the keys",
        "mean strength",
        "before the decay",
        "when no key is heard",
        from_zero=False,
    ),
    Panel(
        "weakened_keys",
        "The share of weakened keys",
        "share of keys",
        "by the percentile alone",
        "when all are weak",
    ),
    Panel(
        "bias_spread",
        "Spread of the biases for choosing",
        "std of the bias",
        "for even scores",
        "for a token's own scores",
        draws_collapse=True,
    ),
    Panel(
        "tokens_without_expert",
        "The share of tokens without an expert",
        "share of tokens",
        "for independent experts",
        "when all take the same tokens",
    ),
    Panel("experts_per_token", "Experts a token", "experts", "by capacity alone", ""),
    Panel(
        "experts_per_token_spread",
        "How far tokens differ in their number of experts",
        "std over tokens",
        "for independent experts",
        "when all take the same tokens",
    ),
]


def legend(reference: str) -> str:
    """A reference's name without the word that ties it to a sentence."""
    return reference.removeprefix("for ").removeprefix("by ").removeprefix("when ")


def rows_of(tables: Tables, metric: str) -> pd.DataFrame:
    rows = tables["routing_layers"]
    found: pd.DataFrame = rows[(rows["metric"] == metric) & (rows["domain"] == "") & rows["value"].notna()]
    return found


def spread_of(tables: Tables) -> float | None:
    """How far the mean cosine of n random keys of width D strays from 0, sqrt(2/(n(n - 1)D)).

    None where the model's shape is not known.
    """
    if "shape" not in tables:
        return None
    n, width = (int(tables["shape"].iloc[0][name]) for name in ("experts", "d_model"))
    return float(np.sqrt(2 / (n * (n - 1) * width))) if n > 1 else None


def told_and_drawn(tables: Tables) -> tuple[list[Panel], list[Panel]]:
    """(diagnostics that never left their reference, or have a single step.

    Notes worth a figure), in the order of PANELS.
    """
    told: list[Panel] = []
    drawn: list[Panel] = []
    for panel in PANELS:
        rows = rows_of(tables, panel.metric)
        if len(rows):
            off = (rows["value"] - rows["chance"]).abs() > NOTICEABLE * rows["chance"].abs()
            (drawn if off.any() and rows["step"].nunique() > 1 else told).append(panel)
    return told, drawn


def in_words(panel: Panel, tables: Tables) -> str:
    """The note at the last step, beside its reference, for a sentence."""
    rows = rows_of(tables, panel.metric)
    last = rows[rows["step"] == rows["step"].max()]
    chance = f"({between(last['chance'])} {panel.chance})"
    return f"{DIAGNOSTICS[panel.metric].title} {between(last['value'])} {chance}"
