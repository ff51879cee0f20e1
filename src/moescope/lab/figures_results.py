"""Figures of the page "Results": expert maps, usage over steps, load before and after the quota."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.lab.results import BASELINE, METHOD, VARIANTS, layer_values
from moescope.plotting.style import CATEGORICAL, base_layout, blend, grey_line, number
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

AREA = ("#30308C", "#2A7FB8", "#38A89D", "#9CC65A", "#F2C14E", "#E4713B", "#A32B4E")


def middle_layer(rows: pd.DataFrame) -> int:
    layers = sorted(rows["layer"].unique())
    return int(layers[len(layers) // 2])


def first_seed(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["seed"] == rows["seed"].min()]


def expert_maps(tables: Tables) -> Figure:
    """Experts of the middle layer on two principal axes of their outputs, Switch Top-2 beside SPECTRA."""
    rows = tables["study_experts"]
    rows = first_seed(rows[rows["layer"] == middle_layer(rows)])
    data: list[Trace] = []
    parts, chance = [], ""
    for place, (arm, title) in enumerate(((BASELINE, "Switch Top-2"), (METHOD, "SPECTRA"))):
        mine = rows[rows["arm"] == arm]
        axis = "" if place == 0 else "2"
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": title,
                "x": mine["x"].to_numpy(float),
                "y": mine["y"].to_numpy(float),
                "text": [str(expert) for expert in mine["expert"]],
                "textposition": "top center",
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "marker": {"size": 10, "color": CATEGORICAL[place]},
                "hovertemplate": f"{title}, expert %{{text}}<extra></extra>",
            }
        )
        layer = layer_values(tables, arm, "output_orthogonality")
        layer = layer[layer["layer"] == middle_layer(rows)]
        words = f"{title} {number(layer['value'].mean())}" if len(layer) else title
        parts.append(words)
        chance = f" (random directions: {number(layer['chance'].mean())})" if len(layer) else ""
    limit = 1.15 * float(np.abs(rows[["x", "y"]].to_numpy(float)).max() or 1.0)
    both = {"range": [-limit, limit], "zeroline": True}
    layout = base_layout(
        "first axis",
        "second axis",
        xaxis={**both, "domain": [0, 0.44]},
        yaxis=both,
        xaxis2={**both, "domain": [0.56, 1], "title": {"text": "first axis"}, "anchor": "y2"},
        yaxis2={**both, "anchor": "x2", "title": {"text": "second axis"}},
        legend={"traceorder": "normal"},
    )
    shown = rows.loc[rows["arm"].isin([BASELINE, METHOD]), "variance_share"].mean()
    caption = f"Orthogonality of outputs: {', '.join(parts)}{chance}. Variance shown: {100 * shown:.0f} %."
    details = (
        "Principal axes of the mean cosines of two experts' outputs for the same tokens; middle layer, first "
        "seed. Distances on the map are those of unit outputs, as far as two axes show them."
    )
    columns = ("study_experts.x", "study_experts.variance_share")
    title = "Expert maps, Switch Top-2 and SPECTRA"
    return Figure("expert_maps", title, caption, columns, data, layout, height=380, details=details)


def has_both_maps(tables: Tables) -> bool:
    return {BASELINE, METHOD} <= set(tables["study_experts"]["arm"])


def variant_arms(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return title and arm of the variants that these rows have, else of all arms."""
    there = dict.fromkeys(rows["arm"])
    named = [(title, arm) for title, arm, _ in VARIANTS if arm in there]
    return named if len(named) > 1 else [(arm, arm) for arm in there]


def usage(tables: Tables) -> Figure:
    """Shares of the load per expert over the steps, one variant at a time."""
    rows = tables["study_usage"]
    rows = first_seed(rows[rows["layer"] == middle_layer(rows)])
    arms = variant_arms(rows)
    rows = rows[rows["arm"].isin([arm for _, arm in arms])]
    experts = sorted(rows["expert"].unique())
    data: list[Trace] = []
    captions = []
    for title, arm in arms:
        mine = rows[rows["arm"] == arm]
        wide = mine.pivot_table(index="step", columns="expert", values="share").reindex(columns=experts)
        for place, expert in enumerate(experts):
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "stackgroup": "usage",
                    "name": f"expert {expert}",
                    "showlegend": False,
                    "x": wide.index.to_numpy(),
                    "y": wide[expert].to_numpy(float),
                    "line": {"width": 0.5, "color": blend(AREA, place / max(len(experts) - 1, 1))},
                    "hovertemplate": f"expert {expert}<br>step %{{x}}<br>%{{y:.1%}}<extra></extra>",
                }
            )
        last = wide.iloc[-1].dropna()
        captions.append(
            f"{title}: at the end {number(100 * last.min())} to {number(100 * last.max())} % per expert "
            f"(even: {number(100 / max(len(last), 1))} %)."
        )
    layout = base_layout("step", "share of the load", yaxis={"range": [0, 1], "tickformat": ".0%"})
    slider = Slider("variant", [title for title, _ in arms], per_value=len(experts), captions=captions)
    details = "In training, since the previous logged step; middle layer, first seed. One colour per expert."
    title, columns = "Expert usage over training", ("study_usage.share",)
    return Figure("usage_areas", title, captions[0], columns, data, layout, slider, 380, details)


def quota(tables: Tables) -> Figure:
    """Load of SPECTRA's experts before and after its quota, one layer at a time."""
    rows = tables["study_experts"]
    rows = first_seed(rows[(rows["arm"] == METHOD) & rows["before_quota"].notna()])
    data: list[Trace] = []
    captions, layers = [], sorted(rows["layer"].unique())
    for layer in layers:
        mine = rows[rows["layer"] == layer].sort_values("before_quota", ascending=False)
        places = [f"E{expert}" for expert in mine["expert"]]
        for column, name, color in (
            ("before_quota", "before", CATEGORICAL[4]),
            ("after_quota", "after", CATEGORICAL[0]),
        ):
            data.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": places,
                    "y": mine[column].to_numpy(float),
                    "marker": {"color": color},
                    "hovertemplate": f"%{{x}}, {name}<br>%{{y:.2%}} of slots<extra></extra>",
                }
            )
        even = 1 / len(mine)
        data.append(grey_line(places, [even] * len(places), "even load"))
        captions.append(
            f"Layer {layer}: the busiest expert has {number(mine['before_quota'].max() / even)} times the "
            f"even load before and {number(mine['after_quota'].max() / even)} after; "
            f"{number(100 * (1 - mine['after_quota'].sum()))} % of slots are dropped."
        )
    layout = base_layout(
        "expert", "share of slots", barmode="group", xaxis={"type": "category"}, yaxis={"tickformat": ".0%"}
    )
    start = len(layers) // 2
    slider = Slider("layer", [str(layer) for layer in layers], start, 3, captions)
    details = "One training-mode pass over validation rows; experts sorted by load. First seed."
    title, columns = "Load before and after the quota", ("before_quota", "after_quota")
    return Figure("quota_loads", title, captions[start], columns, data, layout, slider, 360, details)


def has_quota(tables: Tables) -> bool:
    rows = tables["study_experts"]
    return bool(rows.loc[rows["arm"] == METHOD, "before_quota"].notna().any())


EXPERT_MAPS = FigureSpec("expert_maps", ("study_experts",), expert_maps, wide=True, condition=has_both_maps)
USAGE = FigureSpec("usage_areas", ("study_usage", "study_comparisons"), usage, wide=True)
QUOTA = FigureSpec("quota_loads", ("study_experts",), quota, wide=True, condition=has_quota)
RESULT_FIGURES = [EXPERT_MAPS, USAGE, QUOTA]
