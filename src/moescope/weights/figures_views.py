"""Several readings side by side: runs, steps, matrices or router readings, one line each.

Tables carry a `reading` column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from moescope.plotting.style import (
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    category_style,
    grey_line,
    layer_axis,
    layer_lines,
    number,
)
from moescope.weights.figures_identification import score_at_chance


def reading_lines(frame: pd.DataFrame, column: str) -> list[Trace]:
    """One line a reading."""
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": str(reading),
            "x": rows.sort_values("layer")["layer"].to_numpy(),
            "y": rows.sort_values("layer")[column].to_numpy(),
            "line": {**category_style(index), "width": 2},
            "hovertemplate": f"{reading}<br>layer %{{x}}<br>%{{y:.4g}}<extra></extra>",
        }
        for index, (reading, rows) in enumerate(frame.groupby("reading", sort=False))
    ]


def without_router(frame: pd.DataFrame) -> pd.DataFrame:
    """Readings that differ in the router alone share these numbers.

    Keep the first of them, without the router in its name.
    """
    kept = frame.drop_duplicates(
        [key for key in ("run", "step", "layer", "matrix", "k", "expert") if key in frame]
    )
    return kept.assign(reading=kept["reading"].str.replace(r", (raw|centered) router", "", regex=True))


Reference = Callable[[Tables], pd.Series]


def per_layer(tables: Tables, table: str, column: str) -> pd.Series:
    """(reading, layer) -> the column's largest value."""
    found: pd.Series = tables[table].groupby(["reading", "layer"], sort=False)[column].max()
    return found


def one_over_n(tables: Tables) -> pd.Series:
    """1/n, from the ceiling sqrt(n - 1) of z."""
    return 1 / (per_layer(tables, "alignment_layers", "z_ceiling") ** 2 + 1)


def stated_chance(tables: Tables) -> pd.Series:
    first = tables["orthogonality"]
    return per_layer({"orthogonality": first[first["k"] == 1]}, "orthogonality", "chance")


def zero(tables: Tables) -> pd.Series:
    return per_layer(tables, "alignment_layers", "z_ceiling") * 0.0


def full_rank(tables: Tables) -> pd.Series:
    return per_layer(tables, "spectra", "rank").astype(float)


def nothing_told(tables: Tables) -> pd.Series:
    """The absolute score of a layer at chance, each reading with its run's own weights."""
    layers = dict(tuple(tables["alignment_layers"].groupby("reading", sort=False)))
    scores = tables["ambiguity"].groupby("reading", sort=False)
    return pd.concat({reading: score_at_chance(rows, layers[reading]) for reading, rows in scores})


@dataclass(frozen=True)
class Compared:
    """A number that is compared over layers or steps.

    Where it stands, what it is called, and its reference.
    """

    name: str
    needs: tuple[str, ...]  # the first holds the column
    column: str
    what: str
    reference: Reference
    reference_name: str


def rows_of(compared: Compared, tables: Tables) -> pd.DataFrame:
    """One row a reading, step and layer."""
    frame = tables[compared.needs[0]]
    if compared.needs[0] == "orthogonality":
        return without_router(frame[frame["k"] == 1])
    if compared.needs[0] == "spectra":
        grouped = (
            without_router(frame).groupby(["reading", "step", "layer"], sort=False)[compared.column].median()
        )
        return grouped.reset_index()
    return frame


def by_layer(compared: Compared) -> FigureSpec:
    """The number against the layer, one line a reading, each reading's reference in grey."""

    def draw(tables: Tables) -> Figure:
        frame = rows_of(compared, tables)
        shared = (
            {name: without_router(rows) for name, rows in tables.items()}
            if frame is not tables[compared.needs[0]]
            else tables
        )
        references = compared.reference(shared)
        lines, notes = [], []
        drawn: dict[tuple[float, ...], str] = {}
        for reading in frame["reading"].unique():
            reference = references[reading].sort_index()
            # a constant is one line however many layers a model has; else the line is the reading's own
            constant = reference.round(9).nunique() == 1
            drawn.setdefault(tuple(reference.round(9))[: 1 if constant else None], str(reading))
            mean = frame.loc[frame["reading"] == reading, compared.column].mean()
            notes.append(f"{number(mean)} for {reading} ({number(reference.mean())})")
        for values, reading in drawn.items():
            reference = references[reading].sort_index()
            if len(values) == 1:
                reference = pd.Series(reference.iloc[0], index=sorted(frame["layer"].unique()))
            name = compared.reference_name if len(drawn) == 1 else f"{compared.reference_name}: {reading}"
            lines.append(grey_line(reference.index.to_numpy(), reference.to_numpy(), name))
        more = f" and {len(notes) - 3} more" if len(notes) > 3 else ""
        title = (
            f"{compared.what}, mean over layers: {', '.join(notes[:3])}{more}; in brackets "
            f"{compared.reference_name}"
        )
        return Figure(
            f"compare_{compared.name}",
            title,
            f"{compared.what} of every layer, one line a reading. Grey: {compared.reference_name}.",
            (compared.column,),
            [*reading_lines(frame, compared.column), *lines],
            base_layout(
                "layer",
                compared.what[:1].lower() + compared.what[1:],
                xaxis=layer_axis(pd.Index(sorted(frame["layer"].unique()))),
            ),
            height=340 + 18 * max(0, len(notes) + len(lines) - 4),
        )

    return FigureSpec(f"compare_{compared.name}", compared.needs, draw)


def by_step(compared: Compared) -> FigureSpec:
    """The number against the training step, one line a layer, the reference in grey.

    For runs of several checkpoints.
    """

    def draw(tables: Tables) -> Figure:
        frame = rows_of(compared, tables)
        data = layer_lines(frame, "step", compared.column)
        level = float(compared.reference(tables).mean())
        data.append(
            grey_line(
                [int(frame["step"].min()), int(frame["step"].max())], [level, level], compared.reference_name
            )
        )
        ends = frame.sort_values("step").groupby("layer")[compared.column].agg(["first", "last"])
        rising, falling = int((ends["last"] > ends["first"]).sum()), int((ends["last"] < ends["first"]).sum())
        title = (
            f"{compared.what} rises from first to last step in {rising} of {len(ends)} layers, "
            f"falls in {falling}; "
            f"{compared.reference_name} is {number(level)}"
        )
        return Figure(
            f"steps_{compared.name}",
            title,
            f"{compared.what} of every layer against the step. Grey: {compared.reference_name}.",
            (compared.column,),
            data,
            base_layout("step", compared.what[:1].lower() + compared.what[1:]),
        )

    return FigureSpec(f"steps_{compared.name}", compared.needs, draw)


ACCURACY = Compared(
    "accuracy",
    ("alignment_tests", "alignment_layers"),
    "best_accuracy",
    "Best argmax accuracy",
    one_over_n,
    "chance at one k, 1/n",
)
MARGIN = Compared(
    "margin",
    ("ambiguity", "alignment_layers"),
    "alignment_margin",
    "Margin at k*",
    zero,
    "no preference (chance lies below)",
)
AMBIGUITY = Compared(
    "ambiguity",
    ("ambiguity", "alignment_layers"),
    "absolute_score",
    "Absolute ambiguity",
    nothing_told,
    "a layer at chance",
)
Z = Compared("z", ("ambiguity", "alignment_layers"), "z_score", "Mean z at k*", zero, "chance")
ORTHOGONALITY = Compared(
    "orthogonality",
    ("orthogonality",),
    "mean_abs",
    "Mean |cos| between experts",
    stated_chance,
    "chance √(2/(πd))",
)
RANK = Compared(
    "effective_rank", ("spectra",), "effective_rank", "Median effective rank", full_rank, "full rank"
)

ACROSS_READINGS = [by_layer(compared) for compared in (ACCURACY, MARGIN, AMBIGUITY, Z, ORTHOGONALITY, RANK)]
ACROSS_STEPS = [by_step(compared) for compared in (ACCURACY, MARGIN, AMBIGUITY, ORTHOGONALITY)]
