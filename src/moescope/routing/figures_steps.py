"""Figures over steps: load, decisions and router diagnostics in training; stability of routing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from moescope.plotting.log_axis import plain_log
from moescope.plotting.style import (
    CATEGORICAL,
    CATEGORIES,
    GREY,
    RANDOM,
    UNIFORM,
    base_layout,
    blend,
    capital,
    from_to,
    grey_line,
    heatmap,
    layer_lines,
    lines_or_map,
    number,
    ratio_heatmap,
    ratio_range,
    span,
    step_axis,
)
from moescope.routing.figures_experts import DOMAINS, MAPS, SEPARATION
from moescope.routing.figures_load import LOAD
from moescope.routing.figures_metrics import DECISIONS, VOCABULARY, heading
from moescope.routing.metrics import DIAGNOSTICS
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

AREAS = 12  # experts with an area each; the others share one
STEPS_NAMED = 10  # ticks on an axis whose steps are categories
NOTICEABLE = 0.002  # of the chance level: a diagnostic that never differs by more is not drawn


def all_steps(tables: Tables, name: str) -> pd.DataFrame:
    """Return the rows of every step, also for a view that is narrowed to one step."""
    return tables.get(f"{name} of all steps", tables[name])


def rows_of(tables: Tables, metric: str) -> pd.DataFrame:
    """Rows of one metric at every step and layer, all domains together."""
    rows = all_steps(tables, "routing_layers")
    return rows[(rows["metric"] == metric) & (rows["domain"] == "") & rows["value"].notna()]


def points_of(data: list[Trace]) -> list[Trace]:
    """The traces without a colour bar's, which has no points."""
    return [trace for trace in data if trace["x"][0] is not None]


def legend(reference: str) -> str:
    """A reference's name for a legend: "for a uniform router" is "uniform router"."""
    for word in ("for ", "by ", "when ", "a "):
        reference = reference.removeprefix(word)
    return reference


@dataclass(frozen=True)
class StepMetric:
    """How a metric or diagnostic is drawn against the step: one line per layer, its references in grey.

    `chance` and `collapse` follow the references' values in captions.
    """

    metric: str
    title: str
    axis: str
    chance: str = f"for {RANDOM}"
    collapse: str = "at collapse"
    draw_collapse: bool = False
    log: bool = False
    from_zero: bool = True

    @property
    def spec(self) -> FigureSpec:
        def draw(tables: Tables) -> Figure:
            return self.draw(tables)

        draw.__doc__ = f"{self.title} of each layer over the steps, with its chance level."
        name = f"{self.metric.removesuffix('_share')}_by_step"
        return FigureSpec(name, ("routing_layers",), draw, metrics=(self.metric,))

    def draw(self, tables: Tables) -> Figure:
        rows = rows_of(tables, self.metric)
        means = rows.groupby("step")[["value", "chance", "collapse"]].mean()
        steps = means.index.to_numpy()
        data = [
            *layer_lines(rows, "step", "value"),
            grey_line(steps, means["chance"].to_numpy(float), legend(self.chance)),
        ]
        last = rows[rows["step"] == steps[-1]]
        chance = span(last["chance"])
        if "chance_spread" in last and last["chance_spread"].notna().any():
            spread = float(last["chance_spread"].mean())
            level = float(last["chance"].mean())
            chance += f" ± {number(spread)}"
            for end in (level + 2 * spread, level - 2 * spread):
                line = grey_line([steps[0], steps[-1]], [end, end], "two standard deviations", "dot")
                data.append({**line, "showlegend": end > level})
        if self.draw_collapse:
            data.append(grey_line(steps, means["collapse"].to_numpy(float), legend(self.collapse), "dot"))
        first, final = means["value"].iloc[0], means["value"].iloc[-1]
        caption = (
            f"Mean over layers: {number(first)} (step {steps[0]}) to {number(final)} (step {steps[-1]}); "
            f"{chance} {self.chance}"
        ) + (f", {span(last['collapse'])} {self.collapse}." if last["collapse"].notna().any() else ".")
        yaxis = plain_log(points_of(data)) if self.log else None
        layout = base_layout(
            "step",
            self.axis,
            xaxis=step_axis(steps),
            yaxis=yaxis or {"rangemode": "tozero" if self.from_zero else "normal"},
        )
        columns = (self.metric, "routing_layers.chance", "collapse")
        details = (
            "One line per layer; in training each point is a mean over the steps since the previous one."
        )
        name, title = self.spec.name, f"{self.title} by step"
        return lines_or_map(Figure(name, title, caption, columns, data, layout, details=details))


METRICS_BY_STEP = [
    StepMetric("cv", heading("cv"), "coefficient of variation", log=True),
    StepMetric("max_violation", heading("max_violation"), "max violation", log=True),
    StepMetric("load_entropy_share", heading("load_entropy_share"), "load entropy / log n", from_zero=False),
    StepMetric("routing_entropy", heading("routing_entropy"), "entropy (nats)", f"for {UNIFORM}"),
]
DROPPED = StepMetric("dropped", heading("dropped"), "share of slots", "for unlimited capacity").spec
DIAGNOSTIC_PANELS = [
    StepMetric(
        "column_error",
        "Imbalance left by Sinkhorn",
        "column error",
        "without Sinkhorn",
        "when one expert has all",
        log=True,
    ),
    StepMetric(
        "direction_overlap",
        "Overlap of expert directions",
        "mean cos²",
        "for random directions",
        "when all are equal",
        log=True,
    ),
    StepMetric("key_cosine", "Cosine of two keys", "mean cosine", "for random keys", "when all are equal"),
    StepMetric(
        "key_strength",
        "Strength of the keys",
        "mean strength",
        "before the decay",
        "when all have decayed",
        from_zero=False,
    ),
    StepMetric(
        "weakened_keys",
        "Share of weakened keys",
        "share of keys",
        "by the percentile alone",
        "when all are weak",
    ),
    StepMetric(
        "bias_spread",
        "Spread of the selection biases",
        "std of the bias",
        "for even scores",
        "for a token's own scores",
        draw_collapse=True,
    ),
    StepMetric(
        "tokens_without_expert",
        "Share of tokens without an expert",
        "share of tokens",
        "for independent experts",
        "when all take the same tokens",
    ),
    StepMetric("experts_per_token", "Experts per token", "experts", "by capacity alone", ""),
    StepMetric(
        "experts_per_token_spread",
        "Spread of experts per token",
        "std over tokens",
        "for independent experts",
        "when all take the same tokens",
    ),
]


def split_diagnostics(tables: Tables) -> tuple[list[StepMetric], list[StepMetric]]:
    """(diagnostics that stay at their chance level or have one step, diagnostics worth a figure)."""
    constant: list[StepMetric] = []
    varying: list[StepMetric] = []
    for panel in DIAGNOSTIC_PANELS:
        rows = rows_of(tables, panel.metric)
        if len(rows):
            off = (rows["value"] - rows["chance"]).abs() > NOTICEABLE * rows["chance"].abs()
            (varying if off.any() and rows["step"].nunique() > 1 else constant).append(panel)
    return constant, varying


def last_value(panel: StepMetric, tables: Tables) -> str:
    """ "key strength 1 (1 before the decay)": a diagnostic at the last step with its chance level."""
    rows = rows_of(tables, panel.metric)
    last = rows[rows["step"] == rows["step"].max()]
    title = DIAGNOSTICS[panel.metric].title
    return f"{title} {span(last['value'])} ({span(last['chance'])} {panel.chance})"


def middle_layer_by_step(metric: str, axis: str, complement: bool = False) -> FigureSpec:
    """Spec of a load metric of the middle layer over steps; `complement` draws 1 minus it."""

    def draw(tables: Tables) -> Figure:
        rows = all_steps(tables, "routing_layers")
        layers = sorted(rows["layer"].unique())
        middle = layers[len(layers) // 2]
        rows = rows[(rows["metric"] == metric) & (rows["domain"] == "") & (rows["layer"] == middle)]
        rows = rows.sort_values("step")
        columns = rows[["value", "chance", "collapse"]].to_numpy(float)
        value, chance, collapse = (1 - columns if complement else columns).T
        steps = rows["step"].to_numpy()
        data: list[Trace] = [
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
            grey_line(steps, chance, RANDOM),
            grey_line(steps, collapse, "collapse", "dot"),
        ]
        caption = (
            f"Layer {middle}: {number(value[0])} (step {steps[0]}) to {number(value[-1])} (step "
            f"{steps[-1]}); {number(chance[-1])} for {RANDOM}, {number(collapse[-1])} at collapse."
        )
        layout = base_layout("step", axis, xaxis=step_axis(steps), yaxis={"rangemode": "tozero"})
        title = f"{capital(axis)} by step, middle layer"
        return Figure(
            f"middle_{metric}_by_step",
            title,
            caption,
            (metric, "routing_layers.chance", "collapse"),
            data,
            layout,
        )

    draw.__doc__ = f"{capital(axis)} of the middle layer over the steps, with chance level and collapse."
    return FigureSpec(f"middle_{metric}_by_step", ("routing_layers",), draw, metrics=(metric,))


MIDDLE_LAYER = [
    middle_layer_by_step("gini", "Gini of the load"),
    middle_layer_by_step("load_entropy_bits", "entropy of the load (bits)"),
    middle_layer_by_step("unused", "share of experts used", complement=True),
]


def router_gradient_by_step(tables: Tables) -> Figure:
    """Gradient norm of the language-model loss into each router, with the auxiliary loss's mean in grey."""
    rows = tables["router_gradients"]
    lm = rows[rows["lm_gradient_norm"].notna()]
    aux = rows[rows["aux_gradient_norm"].notna()].groupby("step")["aux_gradient_norm"].mean()
    data = layer_lines(lm, "step", "lm_gradient_norm")
    if len(aux) and (aux > 0).any():
        data.append(grey_line(aux.index.to_numpy(), aux.to_numpy(float), "auxiliary loss, mean over layers"))
    last = lm[lm["step"] == lm["step"].max()]
    weakest = last.loc[last["lm_gradient_norm"].idxmin()]
    caption = (
        f"Weakest at step {int(weakest['step'])}: layer {int(weakest['layer'])}, "
        f"{number(weakest['lm_gradient_norm'])}"
    ) + (f"; auxiliary loss {number(aux.iloc[-1])} on average." if len(aux) else ".")
    layout = base_layout(
        "step",
        "gradient norm",
        yaxis=plain_log(points_of(data)) or {},
        xaxis=step_axis(sorted(lm["step"].unique())),
    )
    columns = ("lm_gradient_norm", "aux_gradient_norm")
    title = "Gradient norm of the text loss per router"
    details = "A router that the loss of the text does not reach learns nothing from it."
    return lines_or_map(
        Figure("router_gradient_by_step", title, caption, columns, data, layout, details=details)
    )


@dataclass(frozen=True)
class GradientFigure(FigureSpec):
    """A figure of the text loss's gradients, which a model without learned routers lacks."""

    def can_draw(self, tables: Tables) -> bool:
        return super().can_draw(tables) and bool(tables[self.needs[0]]["lm_gradient_norm"].notna().any())


ROUTER_GRADIENT = GradientFigure(
    "router_gradient_by_step", ("router_gradients",), router_gradient_by_step, wide=True
)

# --- usage of experts


def shares_by_step(tables: Tables, layer: int) -> pd.DataFrame:
    """One layer's shares of the load: expert by step."""
    load = all_steps(tables, "load")
    load = load[load["layer"] == layer]
    counts = load.groupby(["expert", "step"])["tokens"].sum().unstack("step", fill_value=0)
    return counts / counts.sum().clip(lower=1)


def usage_over_steps(tables: Tables) -> tuple[list[str], list[str], list[pd.DataFrame], int]:
    """(layers, their captions, their shares of the load, index of the layer that changed most)."""
    layers = sorted(int(layer) for layer in all_steps(tables, "load")["layer"].unique())
    shares = [shares_by_step(tables, layer) for layer in layers]
    captions, changes = [], []
    for layer, frame in zip(layers, shares, strict=True):
        change = (frame.iloc[:, -1] - frame.iloc[:, 0]).abs()
        expert = change.idxmax()
        changes.append(float(change[expert]))
        captions.append(
            f"Layer {layer}: expert {expert} changes most, from {number(100 * frame.loc[expert].iloc[0])} % "
            f"to {number(100 * frame.loc[expert].iloc[-1])} % of the load (even share: "
            f"{number(100 / len(frame))} %)."
        )
    return [str(layer) for layer in layers], captions, shares, int(np.argmax(changes))


def expert_by_step(tables: Tables) -> Figure:
    """Load of every expert at every step as a multiple of an even share, one layer at a time."""
    layers, captions, shares, start = usage_over_steps(tables)
    times = [frame.to_numpy(float) * len(frame) for frame in shares]
    words = (("step", "expert"), "of an even share", "times an even share", ratio_range(times))
    data = [
        ratio_heatmap(over, frame.columns, frame.index, *words)
        for frame, over in zip(shares, times, strict=True)
    ]
    steps = [str(step) for step in shares[start].columns]
    xaxis = {**CATEGORIES, "tickvals": steps[:: -(-len(steps) // STEPS_NAMED)]}
    layout = base_layout("step", "expert", xaxis=xaxis, yaxis={**CATEGORIES, "autorange": "reversed"})
    return Figure(
        "expert_by_step",
        "Load per expert by step",
        captions[start],
        ("tokens", "usage_sigma"),
        data,
        layout,
        Slider("layer", layers, start, captions=captions),
        440,
    )


def usage_area(tables: Tables) -> Figure:
    """Shares of the load stacked over steps, one area per expert; beyond twelve the smallest share one."""
    layers, captions, shares, start = usage_over_steps(tables)
    widest = max(min(len(frame), AREAS + 1) for frame in shares)
    data: list[Trace] = []
    for frame in shares:
        named = frame.mean(axis=1).sort_values(ascending=False).index[:AREAS].sort_values()
        bands = [(f"expert {expert}", frame.loc[expert]) for expert in named]
        if len(frame) > AREAS:
            bands.append((f"other {len(frame) - AREAS}", frame.drop(index=named).sum()))
        bands += [("", pd.Series(0.0, index=frame.columns))] * (widest - len(bands))
        for index, (name, values) in enumerate(bands):
            color = CATEGORICAL[index % len(CATEGORICAL)]
            if index >= len(CATEGORICAL):  # a lighter shade: neighbours always differ
                color = blend((color, "#FFFFFF"), 0.45)
            color = GREY if name.startswith("other") else color
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "stackgroup": "one",
                    "name": name,
                    "showlegend": bool(name),
                    "x": values.index.to_numpy(),
                    "y": values.to_numpy(float),
                    "line": {"width": 0.6, "color": color},
                    "fillcolor": color,
                    "hovertemplate": f"{name}<br>step %{{x}}<br>%{{y:.1%}} of the load<extra></extra>",
                }
            )
    yaxis = {"range": [0, 1], "tickformat": ".0%"}
    return Figure(
        "usage_area",
        "Shares of the load by step",
        captions[start],
        ("tokens", "usage_sigma"),
        data,
        base_layout("step", "share of the load", xaxis=step_axis(shares[0].columns), yaxis=yaxis),
        Slider("layer", layers, start, widest, captions=captions),
        460,
        f"Stacked shares of a layer's load; up to {AREAS} experts have an area each.",
    )


# --- stability between checkpoints


def saturation_curves(tables: Tables) -> Figure:
    """Share of the final routing that an earlier step already has, with the share due to usage alone."""
    frame = tables["stability"]
    last = int(frame["step_b"].max())
    rows = frame[frame["step_b"] == last]
    topk_chance, top1_chance = "routing_consistency_chance", "top1_chance"
    means = rows.groupby("step_a")[[topk_chance, "saturation_top1", top1_chance]].mean()
    steps = means.index.to_numpy()
    top1 = grey_line(steps, means["saturation_top1"].to_numpy(float), "top-1, mean", "solid")
    data = [
        *layer_lines(rows, "step_a", "saturation_topk", hover="top-k %{y:.3f}"),
        grey_line(steps, means[topk_chance].to_numpy(float), "top-k, usage alone"),
        {**top1, "mode": "lines+markers", "line": {"color": CATEGORICAL[0], "width": 1.5}},
        grey_line(steps, means[top1_chance].to_numpy(float), "top-1, usage alone", "dot"),
    ]
    first = rows[rows["step_a"] == rows["step_a"].min()]
    topk = first["saturation_topk"]
    places = [f"layer {first.loc[row, 'layer']}" for row in (topk.idxmin(), topk.idxmax())]
    caption = (
        f"Agreement of step {steps[0]} with {last} "
        f"{from_to(topk.min(), places[0], topk.max(), places[1])} "
        f"(usage alone: {number(first[topk_chance].mean())}); "
        f"top-1 {number(100 * first['saturation_top1'].mean())} % "
        f"(usage alone: {number(100 * first[top1_chance].mean())} %)."
    )
    axes = {"xaxis": step_axis(steps), "yaxis": {"range": [0, 1.02]}}
    columns = ("saturation_topk", "saturation_top1", "routing_consistency_chance", "top1_chance")
    layout = base_layout("step", f"shared with step {last}", **axes)
    details = f"Share of a token's experts at step {last} that it already has at an earlier step, per layer."
    title = "Routing saturation by step"
    return lines_or_map(Figure("saturation_curves", title, caption, columns, data, layout, details=details))


def consistency_matrix(tables: Tables) -> Figure:
    """Routing consistency beyond chance of every two checkpoints: mean over layers, then each layer."""
    frame, value = tables["stability"], "routing_consistency_corrected"
    steps = sorted({*frame["step_a"], *frame["step_b"]})
    place = {step: index for index, step in enumerate(steps)}
    parts = {"mean": frame.groupby(["step_a", "step_b"], as_index=False)[value].mean()}
    parts |= {str(layer): rows for layer, rows in frame.groupby("layer", sort=True)}
    data: list[Trace] = []
    captions = []
    for name, rows in parts.items():
        matrix = np.eye(len(steps))
        for a, b, shared in rows[["step_a", "step_b", value]].itertuples(index=False):
            matrix[place[a], place[b]] = matrix[place[b], place[a]] = shared
        label, axes = "beyond chance", ("step", "step")
        data.append(heatmap(matrix, steps, steps, low=0.0, high=1.0, label=label, axes=axes, text=True))
        where = "Mean over layers" if name == "mean" else f"Layer {name}"
        captions.append(
            f"{where}: steps {steps[0]} and {steps[-1]} share {number(matrix[0, -1])} of their routing "
            f"beyond chance (0), the last two {number(matrix[-2, -1])}."
        )
    axis = {"type": "category"}
    return Figure(
        "consistency_matrix",
        "Routing consistency between checkpoints",
        captions[0],
        (value, "routing_consistency", "top1_corrected"),
        data,
        base_layout("step", "step", xaxis=axis, yaxis={**axis, "autorange": "reversed"}),
        Slider("layer", list(parts), 0, captions=captions),
        420,
        "(o − e)/(1 − e) of every two checkpoints on the same tokens: o is the share of a token's experts "
        "that both choose, e the share that the experts' usage alone gives.",
    )


OVER_STEPS = [
    *(panel.spec for panel in METRICS_BY_STEP),
    FigureSpec("usage_area", ("load",), usage_area),
    FigureSpec("expert_by_step", ("load",), expert_by_step),
    FigureSpec("saturation_curves", ("stability",), saturation_curves),
    FigureSpec("consistency_matrix", ("stability",), consistency_matrix),
]
MONITOR_FIGURES = [
    DROPPED,
    *(panel.spec for panel in DIAGNOSTIC_PANELS),
    *MIDDLE_LAYER,
    ROUTER_GRADIENT,
]
FIGURES = [*LOAD, *DECISIONS, *SEPARATION, *DOMAINS, *VOCABULARY, *MAPS, *OVER_STEPS]  # of a trace
