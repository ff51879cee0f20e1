"""Figures of intervene: effects of changes with their intervals, beside controls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from moescope.intervention.tables import ALL, FEW_EXPERTS
from moescope.plotting.style import (
    ANCHORED,
    CATEGORICAL,
    CATEGORIES,
    base_layout,
    capital,
    category_style,
    counted,
    grey_line,
    heatmap,
    k_axis,
    layer_axis,
    number,
)
from moescope.verb import Figure, FigureSpec, Slider, Tables, Trace

MOST_CHANGES = 12  # rows or lines of a figure
CLAIMED = 0.05  # q below which a change costs more than its controls
NATS = "nats per token"
PROJECTION, TOP_K = "project_out", "top_k"
RING = {"size": 8, "color": "#FFFFFF", "line": {"color": "#111111", "width": 2}}  # seen on every colour
CONTROL_STYLES: dict[str, dict[str, Any]] = {
    "random subspace": {"name": "random subspace, equal rank", "color": CATEGORICAL[5], "dash": "dash"},
    "random direction": {"name": "random direction, equal change", "color": CATEGORICAL[4], "dash": "dot"},
    "other expert": {"name": "another expert's directions", "color": CATEGORICAL[3], "dash": "dashdot"},
}
JACKKNIFE = (
    "Whiskers and brackets: 95 % intervals over documents (jackknife of the ratio of sums, t quantiles of "
    "the effective number of documents); none under 10 documents."
)


def changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of what was asked for, without controls."""
    return rows[rows["role"] == "change"]


def whole(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of all documents together."""
    return rows[rows["domain"] == ALL]


def place_words(row: Any) -> str:
    """ "layer 3, expert 5" of a single expert, else the change as it was given."""
    if pd.notna(row["layer"]) and pd.notna(row["expert"]):
        return f"layer {int(row['layer'])}, expert {int(row['expert'])}"
    return str(row["change"])


def interval_words(row: Any, column: str) -> str:
    """ "0.12 [0.1, 0.14]": an estimate and, where there is one, its interval."""
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    ends = f" [{number(low)}, {number(high)}]" if pd.notna(low) and np.isfinite(low) else ""
    return number(row[column]) + ends


def whiskers(rows: pd.DataFrame, column: str) -> dict[str, Any]:
    """Error bars of an estimate; {} where no row has an interval."""
    value, low, high = (
        rows[name].to_numpy(float, na_value=np.nan) for name in (column, f"{column}_low", f"{column}_high")
    )
    if not np.isfinite(low).any():
        return {}
    bars = {"array": high - value, "arrayminus": value - low}
    return {"error_y": {"type": "data", "symmetric": False, "thickness": 1, "width": 3, **bars}}


def claimed(rows: pd.DataFrame) -> pd.Series:
    """Whether a change costs something, and more than its controls, corrected over the sweep."""
    return rows["q"].notna() & (rows["q"] < CLAIMED) & (rows["loss_difference_low"] > 0)


def control_words(rows: pd.DataFrame) -> str:
    """What experts are compared with: where layers are small, nothing is left to match by load."""
    few = rows.groupby("layer")["expert"].nunique().min() < FEW_EXPERTS
    return "other experts of the layer" if few else "load-matched experts"


# --- every expert


def matrix_of(rows: pd.DataFrame, column: str) -> tuple[np.ndarray, list[int]]:
    """Values as layers x experts, and the layers."""
    layers = sorted(int(layer) for layer in rows["layer"].unique())
    z = np.full((len(layers), int(rows["expert"].max()) + 1), np.nan)
    z[np.searchsorted(layers, rows["layer"]), rows["expert"].to_numpy(int)] = rows[column]
    return z, layers


def sampling_noise(rows: pd.DataFrame, column: str) -> float:
    """Typical standard error of a column; 0 without intervals."""
    half = (rows[f"{column}_high"] - rows[f"{column}_low"]) / 2
    return float(half.median() / 1.96) if half.notna().any() else 0.0


def most_words(rows: pd.DataFrame) -> str:
    """How many experts cost more than their controls, and which of these has the largest effect."""
    found, controls = rows[claimed(rows)], control_words(rows)
    if rows["q"].isna().all():
        top = rows.loc[rows["loss_difference"].idxmax()]
        return (
            f"largest in {place_words(top)}: {interval_words(top, 'loss_difference')} {NATS}; no test "
            "against controls"
        )
    if found.empty:
        return f"none of {counted(len(rows), 'expert')} costs more than {controls} (q < {CLAIMED})"
    top = found.loc[found["loss_difference"].idxmax()]
    cost = "costs" if len(found) == 1 else "cost"
    return (
        f"{len(found):,} of {counted(len(rows), 'expert')} {cost} more than {controls} (q < {CLAIMED}); "
        f"most: {place_words(top)}, {interval_words(top, 'loss_difference')} {NATS}"
    )


def effect_map(tables: Tables) -> Figure:
    """Loss difference of every expert of every layer, and its excess over load-matched controls."""
    rows = tables["intervention_experts"]
    words = most_words(rows)
    captions = [f"{capital(words)}."] * 2
    marked = rows[claimed(rows)]
    data: list[Trace] = []
    for column, label in (("loss_difference", "loss difference"), ("excess", "excess")):
        z, layers = matrix_of(rows, column)
        data.append(
            heatmap(
                z,
                range(z.shape[1]),
                layers,
                diverging=True,
                noise=sampling_noise(rows, column),
                label=f"{label}, {NATS}",
                axes=("expert", "layer"),
            )
        )
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "more than controls",
                "x": [str(expert) for expert in marked["expert"]],
                "y": [str(layer) for layer in marked["layer"]],
                "marker": RING,
                "hoverinfo": "skip",
                "showlegend": False,
            }
        )
    layout = base_layout("expert", "layer", xaxis=CATEGORIES, yaxis={**CATEGORIES, "autorange": "reversed"})
    return Figure(
        "effect_map",
        "Loss difference per expert",
        captions[0],
        ("loss_difference", "excess", "q", "intervention_experts.load"),
        data,
        layout,
        Slider("shown", ["loss difference", "excess over controls"], 0, 2, captions),
        max(300, 22 * rows["layer"].nunique() + 110),
        f"Circles: more than {control_words(rows)}, q < {CLAIMED} over the sweep. "
        f"{ANCHORED} an estimate over documents.",
    )


def has_several_domains(tables: Tables) -> bool:
    return bool((changes(tables["interventions"])["domain"] != ALL).any())


def effect_by_domain(tables: Tables) -> Figure:
    """Excess (loss difference where there are no controls) per domain, of the changes that stand out."""
    rows = changes(tables["interventions"])
    rows = rows[rows["domain"] != ALL]
    column = "excess" if rows["excess"].notna().any() else "loss_difference"
    largest = rows.groupby("intervention")[column].max().nlargest(MOST_CHANGES)
    rows = rows[rows["intervention"].isin(largest.index)]
    domains = sorted(rows["domain"].unique())
    first = rows.drop_duplicates("intervention").set_index("intervention").loc[largest.index]
    names = [
        place_words(row).replace("layer ", "L").replace(", expert ", " E") for _, row in first.iterrows()
    ]
    by_place = rows.set_index(["intervention", "domain"])
    grid = [[by_place.loc[(number_, domain)] for domain in domains] for number_ in largest.index]
    z = np.array([[float(cell[column]) for cell in line] for line in grid])
    label = "excess over controls" if column == "excess" else "loss difference"
    trace = heatmap(z, domains, names, diverging=True, noise=sampling_noise(rows, column), label=NATS)
    trace["customdata"] = [[interval_words(cell, column) for cell in line] for line in grid]
    trace["hovertemplate"] = f"%{{y}}<br>%{{x}}<br>{label} %{{customdata}} {NATS}<extra></extra>"
    marks = [
        (domain, names[at])
        for at, line in enumerate(grid)
        for domain, cell in zip(domains, line, strict=True)
        if pd.notna(cell["q"]) and cell["q"] < CLAIMED and cell["loss_difference_low"] > 0
    ]
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": [domain for domain, _ in marks],
        "y": [name for _, name in marks],
        "marker": RING,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    tested = changes(tables["interventions"])
    title = {"text": "change", "standoff": 8}
    names_axis = {"type": "category", "autorange": "reversed", "automargin": True, "title": title}
    return Figure(
        "effect_by_domain",
        f"{label.capitalize()} by domain",
        domain_words(tested[tested["domain"] != ALL], column),
        (column, "q", "interventions.domain"),
        [trace, dots],
        base_layout("domain", "change", xaxis=CATEGORIES, yaxis=names_axis),
        height=max(260, 26 * len(names) + 110),
        details=f"The {counted(len(names), 'change')} with the largest value in any domain. Circles: q < "
        f"{CLAIMED}, corrected over all changes and domains. A domain with fewer than 10 judged documents "
        f"has no interval and no test. {ANCHORED} an estimate over documents.",
    )


def domain_words(rows: pd.DataFrame, column: str) -> str:
    """The largest effect that is claimed; how many domains could be tested."""
    tested = sorted(rows.loc[rows["q"].notna(), "domain"].unique())
    if not tested:
        top = rows.loc[rows[column].idxmax()]
        value = f"{interval_words(top, column)} {NATS}"
        return f"Largest in {top['domain']}: {value}, {place_words(top)} (not tested)."
    found = rows[claimed(rows)]
    if found.empty:
        return f"No change costs more than its controls (q < {CLAIMED}; tested: {', '.join(tested)})."
    top = found.loc[found["loss_difference"].idxmax()]
    return (
        f"Largest in {top['domain']}, {place_words(top)}: {interval_words(top, 'loss_difference')} {NATS}, "
        f"{interval_words(top, 'excess')} more than controls ({counted(len(tested), 'domain')} tested)."
    )


# --- single changes and layers


def single_changes(rows: pd.DataFrame) -> pd.DataFrame:
    """Changes that no other figure compares: neither experts of a sweep nor a grid of k."""
    rows = whole(changes(rows))
    swept = rows["k"].notna() & rows["name"].isin([PROJECTION, TOP_K])
    many = rows["expert"].notna().sum() > MOST_CHANGES
    return rows[~swept & ~(rows["expert"].notna() & many)]


def effects_compared(tables: Tables) -> Figure:
    """Loss difference of every change with its interval; by layer where each changes one layer."""
    rows = single_changes(tables["interventions"])
    by_layer = len(rows) > 2 and rows["layer"].notna().all() and rows["layer"].is_unique
    top = rows.loc[rows["loss_difference"].idxmax()]
    rows = rows.sort_values("layer") if by_layer else rows.nlargest(MOST_CHANGES, "loss_difference")
    x = rows["layer"].tolist() if by_layer else [place_words(row) for _, row in rows.iterrows()]
    line: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if by_layer else "markers",
        "name": str(rows["name"].iloc[0]) if by_layer else "loss difference",
        "x": x,
        "y": rows["loss_difference"].to_numpy(float),
        "line": {"color": CATEGORICAL[0], "width": 2},
        "marker": {"size": 8, "color": CATEGORICAL[0]},
        "hovertemplate": f"%{{x}}<br>%{{y:.4g}} {NATS}<extra></extra>",
        **whiskers(rows, "loss_difference"),
    }
    ends = [x[0], x[-1]] if len(rows) > 1 else [x[0]]
    where = f"layer {int(top['layer'])}" if by_layer else place_words(top)
    return Figure(
        "effects_compared",
        "Loss difference per layer" if by_layer else "Loss difference per change",
        f"{where.capitalize() if by_layer else where}: {interval_words(top, 'loss_difference')} {NATS} (no "
        "effect: 0).",
        ("loss_difference", "interventions.kl", "interventions.predictions_changed"),
        [line, grey_line(ends, [0.0] * len(ends), "no effect")],
        base_layout(
            "layer" if by_layer else "change",
            f"loss difference, {NATS}",
            xaxis=layer_axis(rows["layer"]) if by_layer else {"type": "category", "automargin": True},
        ),
        details=JACKKNIFE,
    )


# --- grids of k


def grid_rows(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Rows of a grid of k of one kind of change; its controls with it."""
    asked = changes(rows)
    asked = asked[(asked["name"] == name) & asked["k"].notna()]
    return rows[rows["intervention"].isin(asked["intervention"]) | rows["of"].isin(asked["intervention"])]


def has_grid(name: str) -> Callable[[Tables], bool]:
    return lambda tables: len(grid_rows(tables["interventions"], name)) > 0


def band(rows: pd.DataFrame, style: dict[str, Any]) -> list[Trace]:
    """The mean of a control over its draws as a line, their range as a band."""
    by_k = rows.groupby("k")["loss_difference"].agg(["min", "mean", "max"]).sort_index()
    ks = by_k.index.to_numpy(float)
    red, green, blue = (int(style["color"][at : at + 2], 16) for at in (1, 3, 5))
    area = {
        "type": "scatter",
        "mode": "lines",
        "x": np.concatenate([ks, ks[::-1]]),
        "y": np.concatenate([by_k["max"], by_k["min"].iloc[::-1]]).astype(float),
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.2)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": style["name"],
        "x": ks,
        "y": by_k["mean"].to_numpy(float),
        "line": {"color": style["color"], "dash": style["dash"], "width": 2},
        "marker": {"size": 5, "color": style["color"]},
        "hovertemplate": f"{style['name']}<br>k = %{{x}}<br>%{{y:.4g}} {NATS}<extra></extra>",
    }
    return [area, line]


def projection_words(rows: pd.DataFrame) -> str:
    """At which k removing the aligned component costs more than both random controls."""
    asked = changes(rows).sort_values("k")
    found = asked[claimed(asked)]
    at = found.loc[found["excess"].idxmax()] if len(found) else asked.loc[asked["loss_difference"].idxmax()]
    controls = rows[rows["of"] == at["intervention"]].groupby("role")["loss_difference"].mean()
    beside = ", ".join(f"{role} {number(value)}" for role, value in controls.items())
    words = f"k = {int(at['k'])}: {interval_words(at, 'loss_difference')} {NATS} ({beside or 'no controls'})"
    if asked["q"].isna().all():
        return f"{words}; not tested."
    if found.empty:
        return f"At no k more than both random controls (q < {CLAIMED}); {words}."
    return f"More than both random controls at {counted(len(found), 'k')} of {len(asked)}; {words}."


def projection_layers(rows: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The grid of every layer, or the one that changes several layers together."""
    grid = whole(grid_rows(rows, PROJECTION))
    known = sorted(int(layer) for layer in grid["layer"].dropna().unique())
    parts = [(str(layer), grid[grid["layer"] == layer]) for layer in known]
    return parts + ([("several", grid[grid["layer"].isna()])] if grid["layer"].isna().any() else [])


def projection_curve(tables: Tables) -> Figure:
    """Loss difference of removing the aligned component over k, with random controls as bands."""
    parts = projection_layers(tables["interventions"])
    roles = [role for role in CONTROL_STYLES if any((part["role"] == role).any() for _, part in parts)]
    data: list[Trace] = []
    for _, part in parts:
        for role in roles:
            data += band(part[part["role"] == role], CONTROL_STYLES[role])
        asked = changes(part).sort_values("k")
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "own expert's directions",
                "x": asked["k"].to_numpy(float),
                "y": asked["loss_difference"].to_numpy(float),
                "line": {"color": CATEGORICAL[0], "width": 2.5},
                "marker": {"size": 7, "color": CATEGORICAL[0]},
                "hovertemplate": f"own expert<br>k = %{{x}}<br>%{{y:.4g}} {NATS}<extra></extra>",
                **whiskers(asked, "loss_difference"),
            }
        )
        data.append(grey_line(asked["k"].to_numpy(float), np.zeros(len(asked)), "no effect"))
    captions = [projection_words(part) for _, part in parts]
    ks = [int(k) for k in pd.concat([part["k"] for _, part in parts]).dropna().unique()]
    layers = [name for name, _ in parts]
    slider = Slider("layer", layers, 0, len(data) // len(parts), captions) if len(parts) > 1 else None
    where = "" if len(parts) > 1 else f", layer {layers[0]}" if layers[0] != "several" else ", several layers"
    return Figure(
        "projection_curve",
        f"Removing router directions{where}",
        captions[0],
        ("loss_difference", "excess", "role", "interventions.k"),
        data,
        base_layout("directions removed, k", f"loss difference, {NATS}", xaxis=k_axis(ks)),
        slider,
        400,
        "Every router row loses its component in the span of its own expert's k leading directions. Bands: "
        "range over draws. A random subspace of equal rank removes k/d of a row; a random direction changes "
        "the row by the same length. Only an effect beyond both is claimed, and its test adds the spread "
        f"over draws. {JACKKNIFE}",
    )


def top_k_words(rows: pd.DataFrame) -> str:
    """The number of experts per token with the least loss, and the cost of one."""
    asked = whole(rows).sort_values("k")
    best, fewest = asked.loc[asked["loss_difference"].idxmin()], asked.iloc[0]
    fewer = f"with {int(fewest['k'])}: {interval_words(fewest, 'loss_difference')} {NATS} more"
    if best["kl"] == 0:
        return f"Least loss as configured, with {counted(int(best['k']), 'expert')} per token; {fewer}."
    return (
        f"Least loss with {counted(int(best['k']), 'expert')} per token, against as configured "
        f"{interval_words(best, 'loss_difference')}; {fewer}."
    )


def top_k_curve(tables: Tables) -> Figure:
    """Loss difference against the number of experts per token, overall and per domain."""
    rows = changes(grid_rows(tables["interventions"], TOP_K)).sort_values("k")
    domains = [ALL, *sorted(domain for domain in rows["domain"].unique() if domain != ALL)][:MOST_CHANGES]
    data: list[Trace] = []
    for index, domain in enumerate(domains):
        part, style = rows[rows["domain"] == domain], category_style(index)
        name = "all documents" if domain == ALL else str(domain)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name,
                "x": part["k"].to_numpy(float),
                "y": part["loss_difference"].to_numpy(float),
                "line": {**style, "width": 3 if domain == ALL else 1.5},
                "marker": {"size": 6 if domain == ALL else 4, "color": style["color"]},
                "hovertemplate": f"{name}<br>%{{x}} experts<br>%{{y:.4g}} {NATS}<extra></extra>",
                **(whiskers(part, "loss_difference") if domain == ALL else {}),
            }
        )
    ks = sorted(int(k) for k in rows["k"].unique())
    data.append(grey_line([ks[0], ks[-1]], [0.0, 0.0], "as configured"))
    return Figure(
        "top_k_curve",
        "Loss against experts per token",
        top_k_words(rows),
        ("loss_difference", "interventions.k"),
        data,
        base_layout("experts per token", f"loss difference, {NATS}", xaxis=layer_axis(ks)),
        height=380,
        details=f"Gates follow the model's own rule for the experts that remain. {JACKKNIFE}",
    )


def has_single_changes(tables: Tables) -> bool:
    return len(single_changes(tables["interventions"])) > 0


EXPERTS: list[FigureSpec] = [
    FigureSpec("effect_map", ("intervention_experts",), effect_map, wide=True),
    FigureSpec("effect_by_domain", ("interventions",), effect_by_domain, condition=has_several_domains),
]
CHANGES: list[FigureSpec] = [
    FigureSpec("effects_compared", ("interventions",), effects_compared, condition=has_single_changes),
]
GRIDS: list[FigureSpec] = [
    FigureSpec("projection_curve", ("interventions",), projection_curve, condition=has_grid(PROJECTION)),
    FigureSpec("top_k_curve", ("interventions",), top_k_curve, condition=has_grid(TOP_K)),
]
FIGURES = [*EXPERTS, *CHANGES, *GRIDS]
