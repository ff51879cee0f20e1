"""Identification of experts: accuracy and margin over k, ambiguity of layers, and several views compared.

Tables of the comparisons carry a column `view` with the view's label.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    base_layout,
    capital,
    category_style,
    chance_words,
    counted,
    grey_line,
    layer_axis,
    layer_lines,
    lines_or_map,
    listed,
    named_layers,
    number,
)
from moescope.verb import Figure, FigureSpec, Tables, Trace
from moescope.weights.ambiguity import HIGH, MEDIUM
from moescope.weights.figures_alignment import by_k, constant, line, usable

VERDICT_WORDS = {
    "identifying": ("identifies its experts", "identify their experts"),
    "non_random": (
        "beats chance without identifying its experts",
        "beat chance without identifying their experts",
    ),
    "permuted": ("fits one to one, but in another order", "fit one to one, but in another order"),
    "chance": ("is not distinguishable from chance", "are not distinguishable from chance"),
    "untested": ("has too few experts to be tested", "have too few experts to be tested"),
}
SHORT_VERDICTS = {
    "identifying": "identifying",
    "non_random": "beyond chance",
    "permuted": "in another order",
    "chance": "at chance",
    "untested": "too few experts",
}
FEWEST_TESTED = 4  # experts: 3 have 6 pairings, so that no p can be below 1/6


# --- one view


def experts_by_layer(tables: Tables) -> pd.Series:
    """Layer -> number of experts that took part."""
    counts: pd.Series = tables["alignment_layers"].groupby("layer")["n_experts"].first()
    return counts


def shown_verdict(verdict: str, n_experts: int) -> str:
    """The verdict, or "untested" where too few experts make every layer look like chance."""
    return "untested" if verdict == "chance" and n_experts < FEWEST_TESTED else verdict


def layers_by_verdict(tables: Tables) -> dict[str, list[int]]:
    """Verdict as shown -> its layers."""
    counts = experts_by_layer(tables)
    layers: dict[str, list[int]] = {}
    for row in tables["alignment_tests"].itertuples():
        layers.setdefault(shown_verdict(row.verdict, counts[row.layer]), []).append(row.layer)
    return layers


def verdict_list(tables: Tables) -> str:
    """ "Identifying: layers 9 to 30; at chance: layer 0"."""
    layers = layers_by_verdict(tables)
    parts = [f"{word}: {named_layers(layers[key])}" for key, word in SHORT_VERDICTS.items() if key in layers]
    return capital("; ".join(parts))


def verdict_sentence(tables: Tables) -> str:
    """ "Layers 9 to 30 identify their experts; layer 0 is not distinguishable from chance"."""
    layers = layers_by_verdict(tables)
    parts = [
        f"{named_layers(layers[verdict])} {words[0] if len(layers[verdict]) == 1 else words[1]}"
        for verdict, words in VERDICT_WORDS.items()
        if verdict in layers
    ]
    return capital("; ".join(parts))


def accuracy_by_k(tables: Tables) -> Figure:
    """Share of router rows whose best match is their own expert, by k."""
    counts = sorted(set(experts_by_layer(tables)))
    levels = [f"1/{n}" for n in counts]
    best = tables["alignment_tests"]["chance_accuracy"].median()  # unknown in older runs
    reached = "" if pd.isna(best) else f"; best k: {number(best)}"
    return by_k(
        "accuracy_by_k",
        "Experts identified by their router row",
        f"{verdict_list(tables)} (chance: {listed(levels)}{reached}).",
        tables,
        ("argmax_accuracy", "p_accuracy", "verdict"),
        [constant(tables, 1 / n, f"chance {level}") for n, level in zip(counts, levels, strict=True)],
        yaxis={"range": [-0.04, 1.04]},
    )


def margin_by_k(tables: Tables) -> Figure:
    """Mean margin of the own expert over the best other one, by k."""
    best = usable(tables).groupby("layer")["alignment_margin"].max()
    positive = sorted(best.index[best > 0])
    caption = (
        f"The mean margin is positive at some k in {named_layers(positive)}, at most {number(best.max())} "
        f"(layer {best.idxmax()})"
        if positive
        else "No layer has a positive mean margin at any k"
    )
    return by_k(
        "margin_by_k",
        "Mean margin over the best other expert",
        f"{caption} (chance: below 0).",
        tables,
        ("alignment_margin", "positive_margin_share"),
        [constant(tables, 0, "no preference")],
    )


def ranked_layers(tables: Tables) -> pd.DataFrame:
    """Rows of `ambiguity` of the layers whose stored pairing beats chance, highest absolute score first."""
    verdicts = tables["alignment_tests"].set_index("layer")["verdict"]
    beat_chance = verdicts.index[verdicts.isin(["identifying", "non_random"])]
    rows = tables["ambiguity"]
    rows = rows[rows["layer"].isin(beat_chance) & rows["absolute_score"].notna()]
    return rows.sort_values(["absolute_score", "layer"], ascending=[False, True])


def ambiguity_by_layer(tables: Tables) -> Figure:
    """Ambiguity score and its three terms at each layer's k*."""
    frame = tables["ambiguity"].sort_values("layer")
    layers = frame["layer"].to_numpy()
    data: list[Trace] = [
        {
            "type": "bar",
            "x": layers,
            "y": frame[f"{name}_term"].to_numpy(),
            "name": name,
            "marker": {"color": color},
            "hovertemplate": f"layer %{{x}}<br>{name} term %{{y:.3g}}<extra></extra>",
        }
        for name, color in zip(("accuracy", "margin", "z"), CATEGORICAL, strict=False)
    ]
    ends = [float(layers.min()) - 0.5, float(layers.max()) + 0.5]
    data += [
        grey_line(ends, [b, b], f"{level} above {b}") for b, level in ((HIGH, "high"), (MEDIUM, "medium"))
    ]
    if frame["ambiguity_score"].isna().all():
        caption = (
            "Undefined: the score compares layers, and these have equal margin or z, or there is one only."
        )
    else:
        high = sorted(frame.loc[frame["level"] == "high", "layer"])
        top = frame.loc[frame["ambiguity_score"].idxmax()]
        caption = (
            f"High ambiguity: {named_layers(high)}; highest in layer {top['layer']:.0f} "
            f"({number(top['ambiguity_score'])}), normalised over these {len(frame)} layers."
        )
    layout = base_layout(
        "layer",
        "ambiguity score",
        barmode="stack",
        legend={"traceorder": "normal"},
        xaxis=layer_axis(frame["layer"]),
        yaxis={"range": [0, 1.02]},
    )
    columns = ("ambiguity_score", "absolute_score", "k_star")
    return Figure(
        "ambiguity_by_layer", "Per-layer normalised ambiguity at k*", caption, columns, data, layout
    )


def absolute_ambiguity_by_layer(tables: Tables) -> Figure:
    """Absolute and normalised ambiguity score by layer."""
    frame = tables["ambiguity"].sort_values("layer")
    layers = frame["layer"].to_numpy()
    ranked = ranked_layers(tables)
    caption = "No layer beats chance"
    if len(ranked):
        top, low = ranked.iloc[0], ranked.iloc[-1]
        caption = (
            f"{counted(len(ranked), 'layer')} beyond chance, highest in layer {top['layer']:.0f} "
            f"({number(top['absolute_score'])})"
        )
        if len(ranked) > 1:
            caption += f", lowest in layer {low['layer']:.0f} ({number(low['absolute_score'])})"
    chance = frame["absolute_chance"]
    hover = "layer %{x}<br>absolute %{y:.3g}"
    data = [
        line(layers, frame["absolute_score"], "absolute score", CATEGORICAL[0], hover),
        line(layers, frame["ambiguity_score"], "normalised score", GREY, "layer %{x}<br>normalised %{y:.3g}"),
        grey_line(layers, chance.to_numpy(), "a layer at chance"),
    ]
    return Figure(
        "absolute_ambiguity_by_layer",
        "Absolute ambiguity at k*",
        f"{caption}{chance_words(chance.mean(), 'a layer at chance')}.",
        ("absolute_score", "ambiguity_score"),
        data,
        base_layout("layer", "score", xaxis=layer_axis(frame["layer"]), yaxis={"range": [0, 1.04]}),
    )


def accuracy_and_margin_by_layer(tables: Tables) -> Figure:
    """Accuracy and margin at each layer's k*."""
    frame = tables["ambiguity"].sort_values("layer")
    layers = frame["layer"].to_numpy()
    perfect = sorted(frame.loc[frame["argmax_accuracy"] >= 1 - 1e-9, "layer"])
    found = (
        f"Every expert is identified in {named_layers(perfect)}" if perfect else "No layer finds every expert"
    )
    chance = chance_words(frame["accuracy_chance"].mean(), "accuracy at chance")
    hover = "layer %{x}, k* %{customdata}<br>accuracy %{y:.3g}"
    k_star = frame["k_star"].astype(float).tolist()
    data = [
        line(layers, frame["argmax_accuracy"], "argmax accuracy", CATEGORICAL[0], hover, customdata=k_star),
        line(
            layers,
            frame["alignment_margin"],
            "alignment margin",
            CATEGORICAL[1],
            "layer %{x}<br>margin %{y:.3g}",
        ),
        *(
            grey_line(layers, frame[f"{name}_chance"].to_numpy(), f"{name} at chance", dash)
            for name, dash in (("accuracy", "dash"), ("margin", "dot"))
        ),
    ]
    return Figure(
        "accuracy_and_margin_by_layer",
        "Accuracy and margin at k*",
        f"{found}{chance}.",
        ("argmax_accuracy", "alignment_margin", "k_star"),
        data,
        base_layout("layer", "value at k*", xaxis=layer_axis(frame["layer"])),
    )


# --- several views


def view_lines(frame: pd.DataFrame, column: str) -> list[Trace]:
    """One line per view."""
    return [
        line(rows["layer"], rows[column], str(view), "", f"{view}<br>layer %{{x}}<br>%{{y:.4g}}")
        | {"line": {**category_style(index), "width": 2}}
        for index, (view, group) in enumerate(frame.groupby("view", sort=False))
        for rows in [group.sort_values("layer")]
    ]


def without_router(frame: pd.DataFrame) -> pd.DataFrame:
    """The first of the views that differ in the router alone, and so share these numbers; router unnamed."""
    keys = [key for key in ("run", "step", "layer", "matrix", "k", "expert") if key in frame]
    rows = frame.drop_duplicates(keys)
    return rows.assign(view=rows["view"].str.replace(r", (raw|centered) router", "", regex=True))


def per_layer(tables: Tables, table: str, column: str) -> pd.Series:
    """(view, layer) -> the column's largest value."""
    values: pd.Series = tables[table].groupby(["view", "layer"], sort=False)[column].max()
    return values


def orthogonality_chance(tables: Tables) -> pd.Series:
    return per_layer({"orthogonality": tables["orthogonality"].query("k == 1")}, "orthogonality", "chance")


@dataclass(frozen=True)
class Compared:
    """A number compared over layers or steps: table, column, name and reference."""

    name: str
    needs: tuple[str, ...]  # the first holds the column
    column: str
    label: str
    reference: Callable[[Tables], pd.Series]
    reference_name: str

    def rows(self, tables: Tables) -> pd.DataFrame:
        """One row per view, step and layer."""
        frame = tables[self.needs[0]]
        if self.needs[0] == "orthogonality":
            return without_router(frame[frame["k"] == 1])
        if self.needs[0] == "spectra":
            grouped = without_router(frame).groupby(["view", "step", "layer"], sort=False)
            return grouped[self.column].median().reset_index()
        return frame


def by_layer(compared: Compared) -> FigureSpec:
    """The number against the layer, one line per view, references in grey."""

    def draw(tables: Tables) -> Figure:
        frame = compared.rows(tables)
        if frame is not tables[compared.needs[0]]:
            tables = {name: without_router(rows) for name, rows in tables.items()}
        references = compared.reference(tables)
        lines, means = [], []
        drawn: dict[tuple[float, ...], str] = {}
        for view in frame["view"].unique():
            reference = references[view].sort_index()
            mean = frame.loc[frame["view"] == view, compared.column].mean()
            if reference.isna().all():  # of a run that is older than the column
                means.append(f"{view} {number(mean)}")
                continue
            # a constant is one line however many layers a model has; else the line belongs to the view
            single = reference.round(9).nunique() == 1
            drawn.setdefault(tuple(reference.round(9))[: 1 if single else None], str(view))
            means.append(f"{view} {number(mean)} ({number(reference.mean())})")
        for values, view in drawn.items():
            reference = references[view].sort_index()
            if len(values) == 1:
                reference = pd.Series(reference.iloc[0], index=sorted(frame["layer"].unique()))
            name = compared.reference_name if len(drawn) == 1 else f"{compared.reference_name}: {view}"
            lines.append(grey_line(reference.index.to_numpy(), reference.to_numpy(), name))
        more = f" and {len(means) - 2} more" if len(means) > 2 else ""
        layers = layer_axis(pd.Index(sorted(frame["layer"].unique())))
        return Figure(
            f"compare_{compared.name}",
            f"{compared.label} by layer",
            f"Means{f' ({compared.reference_name})' if drawn else ''}: {', '.join(means[:2])}{more}.",
            (compared.column,),
            [*view_lines(frame, compared.column), *lines],
            base_layout("layer", compared.label[:1].lower() + compared.label[1:], xaxis=layers),
            height=340 + 18 * max(0, len(means) + len(lines) - 4),
        )

    description = f"{compared.label} by layer, one line per view."
    return FigureSpec(f"compare_{compared.name}", compared.needs, draw, description=description)


def by_step(compared: Compared) -> FigureSpec:
    """The number against the training step, one line per layer, the reference in grey."""

    def draw(tables: Tables) -> Figure:
        frame = compared.rows(tables)
        level = float(compared.reference(tables).mean())
        steps = [int(frame["step"].min()), int(frame["step"].max())]
        data = layer_lines(frame, "step", compared.column)
        data.append(grey_line(steps, [level, level], compared.reference_name))
        ends = frame.sort_values("step").groupby("layer")[compared.column].agg(["first", "last"])
        rising, falling = int((ends["last"] > ends["first"]).sum()), int((ends["last"] < ends["first"]).sum())
        caption = (
            f"From first to last step it rises in {rising} of {len(ends)} layers and falls in {falling} "
            f"({compared.reference_name}: {number(level)})."
        )
        layout = base_layout("step", compared.label[:1].lower() + compared.label[1:])
        title = f"{compared.label} by step"
        return lines_or_map(
            Figure(f"steps_{compared.name}", title, caption, (compared.column,), data, layout)
        )

    description = f"{compared.label} by training step, one line per layer."
    return FigureSpec(f"steps_{compared.name}", compared.needs, draw, description=description)


ACCURACY = Compared(
    "accuracy",
    ("alignment_tests",),
    "best_accuracy",
    "Best argmax accuracy",
    lambda tables: per_layer(tables, "alignment_tests", "chance_accuracy"),
    "chance at the best k",
)
MARGIN = Compared(
    "margin",
    ("ambiguity",),
    "alignment_margin",
    "Margin at k*",
    lambda tables: per_layer(tables, "ambiguity", "margin_chance"),
    "chance at k*",
)
AMBIGUITY = Compared(
    "ambiguity",
    ("ambiguity",),
    "absolute_score",
    "Absolute ambiguity",
    lambda tables: per_layer(tables, "ambiguity", "absolute_chance"),
    "a layer at chance",
)
Z = Compared(
    "z",
    ("ambiguity",),
    "z_score",
    "Mean z at k*",
    lambda tables: per_layer(tables, "ambiguity", "z_chance"),
    "chance at k*",
)
ORTHOGONALITY = Compared(
    "orthogonality",
    ("orthogonality",),
    "mean_abs",
    "Mean |cos| between experts",
    orthogonality_chance,
    "chance √(2/(πd))",
)
RANK = Compared(
    "effective_rank",
    ("spectra",),
    "effective_rank",
    "Median effective rank",
    lambda tables: per_layer(tables, "spectra", "rank").astype(float),
    "rank",
)

ACROSS_VIEWS = [by_layer(compared) for compared in (ACCURACY, MARGIN, AMBIGUITY, Z, ORTHOGONALITY, RANK)]
ACROSS_STEPS = [by_step(compared) for compared in (ACCURACY, MARGIN, AMBIGUITY, ORTHOGONALITY)]
