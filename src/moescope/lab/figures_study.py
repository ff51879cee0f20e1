"""Figures of a study's arms: differences from the reference, losses, noise, domains, axes, overhead.

Tables hold the arms of one question and its reference. Arms are listed from best to worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from moescope.plotting.style import (
    ANCHORED,
    CATEGORICAL,
    GREY,
    base_layout,
    category_style,
    counted,
    grey_line,
    heatmap,
    listed,
    number,
)
from moescope.verb import Figure, FigureSpec, Tables, Trace

VERDICTS = {  # colour and shape: readable without colour
    "better": (CATEGORICAL[2], "circle"),
    "worse": (CATEGORICAL[1], "square"),
    "not distinguishable": (CATEGORICAL[0], "diamond"),
    "too few seeds to say": (CATEGORICAL[6], "x"),
    "no spread over seeds": (CATEGORICAL[3], "cross"),
}
JUDGED = ("better", "worse", "not distinguishable")
TARGET_CV = 0.1
NAMED_PARTS, OTHER_PARTS = 6, "other parts"  # the most expensive parts have names, all are in the table
LOG_RATIO = 8.0  # largest over smallest value from which an axis is logarithmic


@dataclass(frozen=True)
class StudyFigure(FigureSpec):
    """A figure with a further condition on its tables."""

    possible: Callable[[Tables], bool] = lambda tables: True

    def can_draw(self, tables: Tables) -> bool:
        return super().can_draw(tables) and self.possible(tables)


def format_loss(value: float) -> str:
    """Return a loss in nats to four decimals: studies differ in those."""
    return f"{value:.4f}" if math.isfinite(value) else "undefined"


def signed(value: float) -> str:
    return number(value) if value < 0 else f"+{number(value)}"


def ordered_arms(comparisons: pd.DataFrame) -> list[str]:
    """Return the question's arms by mean loss, the best first; those without a result come last."""
    order = comparisons.sort_values(["mean", "arm"], na_position="last", kind="stable")
    return [str(arm) for arm in order["arm"]]


def reference_of(comparisons: pd.DataFrame) -> str:
    return str(comparisons["reference"].iloc[0])


def compared(comparisons: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with a difference."""
    return comparisons[comparisons["difference"].notna()]


def finished_runs(tables: Tables) -> pd.DataFrame:
    runs = tables["study_runs"]
    return runs[(runs["status"] == "done") & runs["validation_loss"].notna()]


def paired(runs: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return finished runs with their difference from the reference under the same seed."""
    done = finished_runs({"study_runs": runs})
    losses = done[done["arm"] == reference].set_index("seed")["validation_loss"]
    others = done[(done["arm"] != reference) & done["seed"].isin(losses.index)]
    return others.assign(difference=others["validation_loss"] - others["seed"].map(losses))


def markers(name: str, x: Any, y: Any, hover: str, mode: str = "markers", **more: Any) -> Trace:
    template = f"{hover}<extra></extra>"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "hovertemplate": template, **more}


def arm_axis(arms: list[str]) -> dict[str, object]:
    order = {"type": "category", "categoryorder": "array", "categoryarray": arms[::-1]}
    return {**order, "range": [-0.6, len(arms) - 0.4], "showgrid": False}


def arm_height(arms: int) -> int:
    return 180 + 27 * max(arms, 3)


def vertical_line(x: float, arms: list[str], name: str, dash: str = "dash") -> Trace:
    line = grey_line([x] * len(arms), arms, name, dash)
    return {**line, "hovertemplate": f"{name}: %{{x:.4g}}<extra></extra>"}


def reference_shape(x: float) -> list[dict[str, object]]:
    """Return a faint line over the full height: between categories one arm would make it a point."""
    edge = {"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1}
    style = {"layer": "below", "line": {"color": GREY, "width": 1}, "opacity": 0.5}
    return [{**edge, **style}] if math.isfinite(x) else []


def differences(tables: Tables) -> Figure:
    """Loss of every arm minus the reference: one dot per seed, mean with 95 % interval, verdict as colour."""
    comparisons = tables["study_comparisons"]
    reference = reference_of(comparisons)
    arms = [arm for arm in ordered_arms(comparisons) if arm != reference]
    pairs = paired(tables["study_runs"], reference)
    seeds = markers(
        "one seed",
        pairs["difference"].to_numpy(float),
        pairs["arm"].tolist(),
        "%{y}, seed %{customdata}<br>%{x:.4f}",
        customdata=pairs["seed"].to_numpy(),
        marker={"size": 5, "color": CATEGORICAL[5], "opacity": 0.65},
    )
    data: list[Trace] = [vertical_line(0.0, arms, f"{reference} (reference)"), seeds]
    known = compared(comparisons)
    for verdict, (color, symbol) in VERDICTS.items():
        rows = known[known["verdict"] == verdict]
        if len(rows):
            data.append(with_interval(rows, verdict, color, symbol))
    missing = [arm for arm in arms if arm not in set(known["arm"])]
    if missing:
        text = comparisons.set_index("arm")["verdict"].loc[missing].tolist()
        hidden = {"text": text, "showlegend": False, "hoverinfo": "skip"}
        data.append({"type": "scatter", "mode": "text", "x": [0.0] * len(missing), "y": missing, **hidden})
    layout = base_layout(
        "difference (nats per token)", "arm", yaxis=arm_axis(arms), shapes=reference_shape(0.0)
    )
    columns = ("difference", "difference_low", "study_comparisons.p_adjusted", "study_comparisons.verdict")
    title, height = "Difference from the reference per arm", arm_height(len(arms))
    details = (
        "Validation loss minus that of the reference under the same seed; left of 0 is better. Dots: seeds; "
        "bars: 95 % intervals of the mean over seeds, per arm. Better and worse: p ≤ 0.05 after Holm's "
        "correction for all arms, from five seeds on."
    )
    caption = describe_differences(comparisons)
    return Figure("differences", title, caption, columns, data, layout, height=height, details=details)


def with_interval(rows: pd.DataFrame, name: str, color: str, symbol: str) -> Trace:
    middle = rows["difference"].to_numpy(float)
    return markers(
        name,
        middle,
        rows["arm"].tolist(),
        f"%{{y}}: {name}<br>%{{x:.4f}} nats<br>Holm p %{{customdata[0]:.3g}}, %{{customdata[1]}} seeds",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": rows["difference_high"].to_numpy(float) - middle,
            "arrayminus": middle - rows["difference_low"].to_numpy(float),
            "color": color,
            "thickness": 2,
            "width": 5,
        },
        marker={"size": 10, "color": color, "symbol": symbol},
        customdata=rows[["p_adjusted", "seeds"]].to_numpy(float),
    )


def describe_differences(comparisons: pd.DataFrame) -> str:
    """State what the comparisons support."""
    reference, known = reference_of(comparisons), compared(comparisons)
    if known.empty:
        return f"No arm can be compared with {reference} yet."
    judged = known[known["verdict"].isin(JUDGED)]
    if judged.empty:
        largest = known.loc[known["difference"].abs().idxmax()]
        return (
            f"{counted(int(known['seeds'].max()), 'seed')}: no claim. Largest difference from {reference}: "
            f"{largest['arm']}, {signed(largest['difference'])} nats (no difference: 0)."
        )
    parts = [
        f"{verdict}: {listed(list(rows['arm'])) if len(rows) <= 3 else f'{len(rows)} arms'}"
        for verdict in JUDGED
        if len(rows := judged[judged["verdict"] == verdict])
    ]
    alike = judged[judged["verdict"] == "not distinguishable"]
    return f"Relative to {reference} (0), {'; '.join(parts)}{detectable_text(alike)}."


def detectable_text(alike: pd.DataFrame) -> str:
    """State which difference would have been detected in arms not distinguishable; "" if unknown."""
    known = alike["detectable_difference"].astype(float).dropna()
    if known.empty:
        return ""
    span = " to ".join(dict.fromkeys((number(known.min()), number(known.max()))))
    return f"; detectable (80 % power): {span} nats"


def losses(tables: Tables) -> Figure:
    """Validation loss of every arm and seed, connected by seed; the mean per arm with its t interval."""
    comparisons = tables["study_comparisons"]
    reference, arms = reference_of(comparisons), ordered_arms(comparisons)
    done = finished_runs(tables)
    means = comparisons[comparisons["mean"].notna()].set_index("arm")
    data: list[Trace] = []
    if reference in means.index:
        data.append(vertical_line(float(means.loc[reference, "mean"]), arms, f"mean of {reference}"))
    for index, seed in enumerate(sorted(done["seed"].unique())):
        values = done[done["seed"] == seed].set_index("arm")["validation_loss"].reindex(arms)
        data.append(
            markers(
                "one line per seed",
                values.to_numpy(float),
                arms,
                f"%{{y}}, seed {seed}<br>%{{x:.4f}}",
                "lines+markers",
                showlegend=index == 0,
                line={**category_style(index), "width": 1},
                marker={"size": 5},
                opacity=0.7,
            )
        )
    half = (means["high"] - means["mean"]).to_numpy(float)
    bar = {"type": "data", "array": half, "color": CATEGORICAL[6], "thickness": 1.5, "width": 4}
    dash = {"size": 11, "color": CATEGORICAL[6], "symbol": "line-ns-open", "line": {"width": 3}}
    values, hover = means["mean"].to_numpy(float), "%{y}, mean over seeds<br>%{x:.4f}"
    data.append(markers("mean and 95 % interval", values, list(means.index), hover, error_x=bar, marker=dash))
    caption = "No training is done yet."
    if len(means):
        best = means["mean"].idxmin()
        caption = f"Lowest mean: {best}, {format_loss(means.loc[best, 'mean'])} nats per token"
        if reference in means.index and best != reference:
            caption += f" (reference {reference}: {format_loss(means.loc[reference, 'mean'])})"
        caption += "."
    columns = ("study_runs.validation_loss", "study_comparisons.mean", "study_comparisons.low")
    layout = base_layout("validation loss (nats per token)", "arm", yaxis=arm_axis(arms))
    title, height = "Validation loss per arm and seed", arm_height(len(arms))
    details = (
        "Validation loss at the end of training. Parallel lines mean that seeds shift all arms together: "
        "differences are more precise than the t intervals of the means suggest. An arm without dots has no "
        "result."
    )
    return Figure("losses", title, caption, columns, data, layout, height=height, details=details)


def noise_and_spread(tables: Tables) -> Figure:
    """Standard deviation of the loss over seeds and over validation documents, per arm."""
    comparisons, done = tables["study_comparisons"], finished_runs(tables)
    values = done.groupby("arm").agg(spread=("validation_loss", "std"), noise=("noise_std", "mean"))
    arms = [arm for arm in ordered_arms(comparisons) if arm in values.index]
    values = values.reindex(arms)
    paired_std = comparisons.set_index("arm")["difference_std"].astype(float).reindex(arms).dropna()
    measured = bool(values["noise"].notna().any())
    data = [dots(values["spread"], "over seeds", CATEGORICAL[0], "circle")]
    if measured:
        data.append(dots(values["noise"], "over documents", CATEGORICAL[4], "diamond"))
    if len(paired_std):
        data.append(dots(paired_std, "of differences from the reference", CATEGORICAL[2], "square"))
    caption = f"Medians over arms: {number(values['spread'].median())} nats over seeds"
    caption += f", {number(values['noise'].median())} over documents" if measured else ""
    caption += f"; differences from the reference {number(paired_std.median())}." if len(paired_std) else "."
    caption += "" if measured else " Noise over documents: too few documents."
    layout = base_layout(
        "standard deviation (nats per token)", "arm", xaxis={"rangemode": "tozero"}, yaxis=arm_axis(arms)
    )
    title = "Spread over seeds and evaluation noise"
    columns = ("study_runs.validation_loss", "noise_std", "difference_std")
    details = (
        "Over seeds: of an arm's trainings. Over documents: of one model's loss under resampled validation "
        "documents, the same for all arms and used in no test. Of differences: over the seeds that arm and "
        "reference share, which the tests use."
    )
    height = arm_height(len(arms))
    return Figure("noise_and_spread", title, caption, columns, data, layout, height=height, details=details)


def dots(values: pd.Series, name: str, color: str, symbol: str) -> Trace:
    marker = {"size": 9, "color": color, "symbol": symbol}
    hover = f"%{{y}}, {name}<br>%{{x:.4g}}"
    return markers(name, values.to_numpy(float), list(values.index), hover, marker=marker)


def differences_by_seed(tables: Tables) -> pd.DataFrame:
    """Return (arm, seed) by domain: token-weighted loss minus the reference's with that seed."""
    reference = reference_of(tables["study_comparisons"])
    rows = tables["study_documents"].assign(nats=lambda frame: frame["loss"] * frame["tokens"])
    sums = rows.groupby(["arm", "seed", "domain"])[["nats", "tokens"]].sum()
    loss = (sums["nats"] / sums["tokens"]).unstack("domain")
    if reference not in loss.index.get_level_values("arm"):
        return loss.iloc[:0]
    reference_loss = loss.xs(reference, level="arm")
    others = loss.drop(reference, level="arm")
    return others - reference_loss.reindex(others.index.get_level_values("seed")).to_numpy()


def by_domain(tables: Tables) -> pd.DataFrame:
    """Return arm by domain: the mean over seeds of those differences."""
    return differences_by_seed(tables).groupby(level="arm").mean().dropna(how="all")


def difference_by_domain(tables: Tables) -> Figure:
    """Loss minus the reference's per arm and domain; white is no difference."""
    reference, values = reference_of(tables["study_comparisons"]), by_domain(tables)
    arms = [arm for arm in ordered_arms(tables["study_comparisons"]) if arm in values.index]
    values = values.reindex(arms)
    axes, label = ("domain", "arm"), "nats per token"
    errors = differences_by_seed(tables).groupby(level="arm").sem().stack()
    noise = float(errors.median()) if len(errors) else 0.0
    trace = heatmap(
        values.to_numpy(float),
        list(values.columns),
        arms,
        diverging=True,
        noise=noise,
        label=label,
        axes=axes,
    )
    arm, domain = values.stack().abs().idxmax()
    caption = (
        f"Largest difference from {reference}: {arm} in {domain}, {signed(values.loc[arm, domain])} nats per "
        "token (no difference: 0). Not tested."
    )
    layout = base_layout(
        "domain", "arm", yaxis={"type": "category", "autorange": "reversed"}, xaxis={"type": "category"}
    )
    title, columns = "Difference from the reference by domain", ("study_documents.loss", "difference")
    return Figure(
        "difference_by_domain",
        title,
        caption,
        columns,
        [trace],
        layout,
        height=arm_height(len(arms)),
        details=f"{ANCHORED} a mean over seeds, in the median cell.",
    )


def has_result(tables: Tables) -> bool:
    return bool(tables["study_comparisons"]["mean"].notna().any())


def has_spread(tables: Tables) -> bool:
    return bool((finished_runs(tables).groupby("arm")["seed"].nunique() > 1).any())


def has_domains(tables: Tables) -> bool:
    return tables["study_documents"]["domain"].nunique() > 1 and not by_domain(tables).empty


def has_values(column: str) -> Callable[[Tables], bool]:
    """Return whether at least two values of the axis have that number."""

    def possible(tables: Tables) -> bool:
        rows = finished_runs(tables).merge(tables["study_axes"], on="arm")
        return bool(rows[rows[column].notna()]["value"].nunique() > 1)

    return possible


# --- along one axis: `study_axes` has arm, axis, value, and line (the arm's position on the other axes)


def axis_name(tables: Tables) -> str:
    """Return the axis' last part: epsilon of model.router_options.epsilon."""
    return str(tables["study_axes"]["axis"].iloc[0]).split(".")[-1].replace("_", " ")


def value_axis(values: Sequence[float], name: str) -> dict[str, object]:
    ticks = sorted(set(values))
    labels = {"tickvals": ticks, "ticktext": [f"{value:g}" for value in ticks]}
    if (ticks[0] > 0 and ticks[-1] / ticks[0] >= LOG_RATIO) or name == "experts":
        return {"type": "log", **labels}
    return labels if len(ticks) <= 10 else {}


def by_value(tables: Tables, column: str) -> tuple[pd.DataFrame, list[Trace], str]:
    """Return (means over seeds by line and value, traces with seeds and means, a note on missing values)."""
    places = tables["study_axes"]
    rows = finished_runs(tables).merge(places, on="arm")
    rows = rows[rows[column].notna()]
    means = rows.groupby(["line", "value"], sort=True)[column].mean().reset_index()
    data: list[Trace] = []
    for index, (line, line_means) in enumerate(means.groupby("line", sort=False)):
        style, seeds = category_style(index), rows[rows["line"] == line]
        name = str(line) or "mean over seeds"
        data += [
            markers(
                "one seed",
                seeds["value"].to_numpy(float),
                seeds[column].to_numpy(float),
                f"{name}<br>%{{x}}, seed %{{customdata}}<br>%{{y:.4g}}",
                showlegend=index == 0,
                customdata=seeds["seed"].to_numpy(),
                marker={"size": 5, "color": style["color"], "opacity": 0.5},
            ),
            markers(
                name,
                line_means["value"].to_numpy(float),
                line_means[column].to_numpy(float),
                f"{name}<br>%{{x}}<br>%{{y:.4g}}",
                "lines+markers",
                line={**style, "width": 2},
                marker={"size": 8},
            ),
        ]
    missing = sorted(places.loc[~places["arm"].isin(set(rows["arm"])), "value"].unique())
    note = f" No result: {', '.join(f'{value:g}' for value in missing)}." if missing else ""
    return means, data, note


def loss_by_value(tables: Tables) -> Figure:
    """Validation loss along an axis of the study, the reference's mean in grey."""
    comparisons, name = tables["study_comparisons"], axis_name(tables)
    reference = reference_of(comparisons)
    means, data, note = by_value(tables, "validation_loss")
    level = float(comparisons.set_index("arm")["mean"].get(reference, math.nan))
    values = [float(value) for value in means["value"]]
    if math.isfinite(level):
        data.append(grey_line([min(values), max(values)], [level, level], f"mean of {reference}"))
    best = means.loc[means["validation_loss"].idxmin()]
    line = f" ({best['line']})" if best["line"] else ""
    caption = f"Lowest mean: {format_loss(best['validation_loss'])} nats per token at {best['value']:g}{line}"
    caption += f" (reference {reference}: {format_loss(level)})." if math.isfinite(level) else "."
    layout = base_layout(name, "validation loss (nats per token)", xaxis=value_axis(values, name))
    columns = ("study_runs.validation_loss",)
    return Figure(
        f"loss_by_{slug(name)}",
        f"Validation loss by {name}",
        caption + note,
        columns,
        data,
        layout,
        height=400,
    )


def load_by_value(tables: Tables) -> Figure:
    """Load CV along an axis of the study, with the target CV."""
    name = axis_name(tables)
    means, data, note = by_value(tables, "load_cv")
    values = [float(value) for value in means["value"]]
    data.append(grey_line([min(values), max(values)], [TARGET_CV] * 2, f"target: {TARGET_CV}"))
    reached = means[means["load_cv"] < TARGET_CV]
    best = means.loc[means["load_cv"].idxmin()]
    if len(reached):
        listing = ", ".join(f"{value:g}" for value in sorted(reached["value"].unique()))
        caption = f"Below the target {TARGET_CV} at {listing}; mean over layers and seeds."
    else:
        caption = f"Above the target {TARGET_CV}; lowest {number(best['load_cv'])} at {best['value']:g}."
    layout = base_layout(name, "load CV", xaxis=value_axis(values, name), yaxis={"rangemode": "tozero"})
    return Figure(
        f"load_by_{slug(name)}", f"Load CV by {name}", caption + note, ("load_cv",), data, layout, height=400
    )


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def overhead_shares(tables: Tables) -> Figure:
    """Time of one block by router and component, as shares."""
    rows, reference = tables["overhead"], reference_of(tables["study_comparisons"])
    experts = rows[rows["component"] == "experts"].set_index("router")["share"]
    routers = rows.groupby("router")["milliseconds"].sum().index
    routers = list(experts.reindex(routers).fillna(0.0).sort_values(ascending=False).index)
    parts = rows[rows["component"] != "experts"].groupby("component")["share"].max()
    parts = parts.sort_values(ascending=False, kind="stable")
    named = list(parts.index[: NAMED_PARTS if len(parts) > NAMED_PARTS + 1 else NAMED_PARTS + 1])
    component = rows["component"].where(rows["component"].isin(["experts", *named]), OTHER_PARTS)
    sums = rows.assign(component=component).groupby(["router", "component"])
    sums = sums[["share", "milliseconds", "flops"]].sum()
    data: list[Trace] = []
    for index, part in enumerate(["experts", *named, *([OTHER_PARTS] if len(named) < len(parts) else [])]):
        values = sums.xs(part, level="component").reindex(routers)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "x": values["share"].to_numpy(float),
                "y": routers,
                "customdata": values[["milliseconds", "flops"]].to_numpy(float),
                "marker": {"color": CATEGORICAL[index]},
                "hovertemplate": (
                    f"%{{y}}: {part}<br>%{{x:.1%}} of the block<br>%{{customdata[0]:.3g}} ms, "
                    "%{customdata[1]:.3g} FLOPs<extra></extra>"
                ),
            }
        )
    if reference in experts.index:
        data.append(vertical_line(float(experts[reference]), routers, f"experts' share with {reference}"))
    highest = routers[-1]
    caption = (
        f"Highest routing share: {highest}, {number(100 * (1 - experts.get(highest, 0.0)))} % of the block"
    )
    if reference in experts.index and reference != highest:
        caption += f" ({reference}: {number(100 * (1 - experts[reference]))} %)"
    layout = base_layout(
        "share of the block's time",
        "router",
        barmode="stack",
        legend={"traceorder": "normal"},
        xaxis={"range": [0, 1], "tickformat": ".0%"},
        yaxis=arm_axis(routers),
    )
    title, columns = "Time per block by component", ("component", "milliseconds", "overhead.share")
    return Figure(
        "overhead_shares", title, f"{caption}.", columns, data, layout, height=arm_height(len(routers)) + 80
    )


RUNS = ("study_runs", "study_comparisons")
ARMS = [
    StudyFigure("differences", RUNS, differences, wide=True, possible=has_result),
    StudyFigure("losses", RUNS, losses, wide=True, possible=has_result),
]
OVERALL = [
    StudyFigure("noise_and_spread", RUNS, noise_and_spread, wide=True, possible=has_spread),
    StudyFigure(
        "difference_by_domain",
        ("study_documents", "study_comparisons"),
        difference_by_domain,
        wide=True,
        possible=has_domains,
    ),
]
AXES = (*RUNS, "study_axes")
ALONG = [
    StudyFigure("loss_by_value", AXES, loss_by_value, wide=True, possible=has_values("validation_loss")),
    StudyFigure("load_by_value", AXES, load_by_value, wide=True, possible=has_values("load_cv")),
]
OVERHEAD = StudyFigure("overhead_shares", ("overhead", "study_comparisons"), overhead_shares, wide=True)
ARM_FIGURES: list[FigureSpec] = [*ARMS, *OVERALL, *ALONG, OVERHEAD]
