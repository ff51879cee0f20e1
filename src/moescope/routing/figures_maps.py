"""Maps of a layer's experts.

Near means alike, by the company they keep, by router rows, by what they give on average.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import pandas as pd

from moescope.plotting.maps import (
    FEWEST,
    LAYOUTS,
    Cloud,
    Layout,
    kept_neighbours,
    plane_of_directions,
    principal_plane,
)
from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    Figure,
    FigureSpec,
    Slider,
    Tables,
    Trace,
    base_layout,
    number,
)
from moescope.routing.figures_load import FOLD, total_load
from moescope.routing.figures_metrics import can_draw
from moescope.routing.figures_separation import lift_over_chance

UNUSED = "no token"  # in the place of a domain
LAYERS_LAID_OUT = 8  # so many layers are laid out by UMAP and t-SNE, which take their time; PCA is of all


@dataclass(frozen=True)
class Subject:
    """What of experts is mapped.

    How their points come from the tables, and what chance leaves on two axes.
    """

    name: str
    title: str
    needs: str  # the table
    points: Callable[
        [Tables, int], tuple[np.ndarray, Cloud, float]
    ]  # (experts, their points, share of two axes by chance)
    chance: str  # what that chance is of
    caption: str
    columns: tuple[str, ...]
    missing: str
    metrics: tuple[str, ...] = ()


# --- company


def company(over: np.ndarray) -> np.ndarray:
    """Each expert's profile: doublings of lift over chance with every other.

    Pairs that cannot be compared count as chance.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        profile = np.clip(np.log2(over), -np.log2(FOLD), np.log2(FOLD))
    profile[np.isnan(profile)] = 0.0
    return with_own_company(profile)


def with_own_company(profile: np.ndarray) -> np.ndarray:
    """An expert keeps company with itself as with its best partner.

    Without that two twins would look different.
    """
    kept = profile.copy()
    np.fill_diagonal(kept, -np.inf)
    np.fill_diagonal(kept, kept.max(axis=1, initial=0.0))
    return kept


@lru_cache
def plane_by_chance(n: int) -> float:
    """The share of variance that two axes hold of n profiles without any structure.

    Mean of 20 seeded symmetric normal matrices.
    """
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        noise = generator.standard_normal((n, n))
        shares.append(principal_plane(Cloud.of_rows(with_own_company(noise + noise.T)))[1].sum())
    return float(np.mean(shares))


def company_points(tables: Tables, layer: int) -> tuple[np.ndarray, Cloud, float]:
    rows = tables["coactivation"]
    matrix = lift_over_chance(rows[rows["layer"] == layer])
    return (
        matrix.index.to_numpy(),
        Cloud.of_rows(company(matrix.to_numpy(float))),
        plane_by_chance(len(matrix)),
    )


# --- directions


def direction_points(of: str, tables: Tables, layer: int) -> tuple[np.ndarray, Cloud, float]:
    """Unit vectors, by their cosines; an expert whose vector is not known has no place."""
    rows = tables["expert_cosines"]
    rows = rows[(rows["layer"] == layer) & (rows["of"] == of)]
    n = int(rows["expert_b"].max()) + 1
    gram = np.eye(n)
    a, b = rows["expert_a"].to_numpy(), rows["expert_b"].to_numpy()
    gram[a, b] = gram[b, a] = rows["cosine"].to_numpy(float)
    known = np.isfinite(gram).sum(axis=1) > 1
    experts = np.flatnonzero(known)
    width = max(round(2 / (np.pi * float(rows["chance"].iloc[0]) ** 2)), 1)
    return experts, Cloud(gram[np.ix_(experts, experts)]), plane_of_directions(len(experts), width)


SUBJECTS = [
    Subject(
        "router",
        "router rows",
        "expert_cosines",
        partial(direction_points, "router"),
        "random directions",
        "Directions of router rows: near means that the router asks for nearly the same of a token.",
        ("expert_cosines.cosine", "of"),
        (
            "no router rows are known: of a router without rows, an imported trace, or one made by "
            "an older version"
        ),
    ),
    Subject(
        "coactivation",
        "co-activation profiles",
        "coactivation",
        company_points,
        "profiles of noise",
        (
            "Each expert's profile: log₂(lift / chance lift) with every other expert. Near means the "
            "same company."
        ),
        ("lift", "chance_lift"),
        "each token chooses one expert",
        ("expert_overlap",),
    ),
    Subject(
        "outputs",
        "mean outputs",
        "expert_cosines",
        partial(direction_points, "outputs"),
        "random directions",
        (
            "Directions of what experts gave on average, each over its own tokens among up to 1,024: "
            "near means that they push the residual stream the same way."
        ),
        ("expert_cosines.cosine", "of"),
        "no outputs are known: of a model of the lab, an imported trace, or one made by an older version",
    ),
]


# --- drawing


def main_domains(tables: Tables, layer: int) -> pd.Series:
    """expert -> its domain of highest affinity; empty without domains."""
    rows = tables.get("domains", pd.DataFrame())
    rows = rows[(rows["layer"] == layer) & rows["affinity"].notna()] if len(rows) else rows
    if not len(rows):
        return pd.Series(dtype=object)
    found: pd.Series = rows.loc[rows.groupby("expert")["affinity"].idxmax()].set_index("expert")["domain"]
    return found


def layers_of(subject: Subject, tables: Tables) -> list[int]:
    """The layers that have points."""
    rows = tables[subject.needs]
    if "of" in rows:
        rows = rows[(rows["of"] == subject.name) & rows["cosine"].notna()]
    return sorted(int(layer) for layer in rows["layer"].unique())


def laid_out(layout: Layout, layers: list[int]) -> list[int]:
    """All layers, or some from the first to the last where the layout takes its time."""
    if not layout.package or len(layers) <= LAYERS_LAID_OUT:
        return layers
    return [layers[place] for place in np.linspace(0, len(layers) - 1, LAYERS_LAID_OUT).round().astype(int)]


def expert_map(subject: Subject, layout: Layout, tables: Tables) -> Figure:
    """Experts of a layer on a plane, sized by load, coloured by their main domain."""
    loads = total_load(tables)
    domains = sorted(tables["domains"]["domain"].unique()) if len(tables.get("domains", ())) else []
    groups = [*domains, UNUSED] if 1 < len(domains) <= len(CATEGORICAL) else [""]
    data: list[Trace] = []
    titles, clear = [], []
    every = layers_of(subject, tables)
    layers = laid_out(layout, every)
    for layer in layers:
        experts, cloud, by_chance = subject.points(tables, layer)
        at = layout.place(cloud)
        mine = loads[loads["layer"] == layer].set_index("expert")["tokens"]
        counts = mine.reindex(experts, fill_value=0).to_numpy(float)
        times = counts / (mine.mean() or 1.0)
        main = main_domains(tables, layer).reindex(experts).fillna(UNUSED)
        for index, group in enumerate(groups):
            own = np.ones(len(experts), bool) if group == "" else (main == group).to_numpy()
            color = GREY if group == UNUSED else CATEGORICAL[index]
            trace = points(experts[own], at[own], times[own], group, color, len(experts))
            data.append(trace if own.any() or group != UNUSED else {**trace, "showlegend": False})
        kept, by_luck, nearest = kept_neighbours(cloud, at)
        title = f"Layer {layer}, {subject.title} by {layout.title}{layout.setting(len(experts))}: "
        share = float(principal_plane(cloud)[1].sum())
        if layout.name == "pca":
            title += (
                f"two axes hold {number(100 * share)} % of the variance, {number(100 * by_chance)} % "
                f"for {subject.chance}; "
            )
        title += (
            (
                f"{number(100 * kept)} % of each expert’s {nearest} nearest stay nearest, "
                f"{number(100 * by_luck)} % by luck"
            )
            if np.isfinite(kept)
            else "too few experts to tell who is near"
        )
        titles.append(title)
        clear.append(share - by_chance)  # by every layout, so that they open at one layer
    start = int(np.argmax(clear))
    left_out = f" Laid out are {len(layers)} of {len(every)} layers." if len(layers) < len(every) else ""
    return Figure(
        f"expert_map_{subject.name}_{layout.name}",
        titles[start],
        f"{subject.caption} Size: load; colour: the domain of highest affinity, where there are domains. "
        f"Axes have no unit, and layers cannot be compared.{left_out}",
        (*subject.columns, "affinity") if len(groups) > 1 else subject.columns,
        data,
        base_layout(f"{layout.title} 1", f"{layout.title} 2"),
        Slider("layer", [str(layer) for layer in layers], start, len(groups), titles),
        400,
    )


def points(experts: np.ndarray, at: np.ndarray, times: np.ndarray, group: str, color: str, n: int) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers+text" if n <= 32 else "markers",
        "name": group or "experts",
        "showlegend": bool(group),
        "x": at[:, 0],
        "y": at[:, 1] if at.shape[1] > 1 else np.zeros(len(at)),
        "text": [str(expert) for expert in experts],
        "textposition": "top center",
        "cliponaxis": False,
        "textfont": {"size": 10},
        "customdata": np.round(times, 3),
        "marker": {
            "color": color,
            "size": np.clip(11 * np.sqrt(times), 4, 40).tolist(),
            "opacity": 0.8,
            "line": {"color": GREY, "width": 0.5},
        },
        "hovertemplate": f"expert %{{text}}<br>%{{customdata}} of an even share<extra>{group}</extra>",
    }


def map_spec(subject: Subject, layout: Layout) -> FigureSpec:
    name = f"expert_map_{subject.name}_{layout.name}"
    return FigureSpec(
        name, (subject.needs, "load"), partial(expert_map, subject, layout), metrics=subject.metrics
    )


MAPS = [map_spec(subject, layout) for subject in SUBJECTS for layout in LAYOUTS]


def drawable_maps(tables: Tables, every_layout: bool = True) -> tuple[list[FigureSpec], list[str]]:
    """(the maps that can be drawn, what is missing and how to get it).

    UMAP and t-SNE need the extra, and eight experts a layer.
    """
    specs, notes = [], []
    subjects = []
    for subject in SUBJECTS:
        spec = map_spec(subject, LAYOUTS[0])
        if can_draw(spec, tables) and layers_of(subject, tables):
            subjects.append(subject)
        else:
            notes.append(f"No map of {subject.title}: {subject.missing}.")
    few = int(tables["load"].groupby("layer")["expert"].nunique().min()) < FEWEST
    absent = [layout.title for layout in LAYOUTS if not layout.installed]
    if subjects and few:
        notes.append(f"UMAP and t-SNE are drawn from {FEWEST} experts a layer on; PCA for fewer.")
    elif subjects and absent:
        notes.append(
            f"Drawn by PCA; {' and '.join(absent)} would need pip install 'moescope[maps]', then "
            "the report made anew."
        )
    elif subjects and not every_layout:
        notes.append("Drawn by PCA here; UMAP and t-SNE are drawn of the last step.")
    for subject in subjects:
        specs += [
            map_spec(subject, layout)
            for layout in LAYOUTS
            if not layout.package or (layout.installed and every_layout and not few)
        ]
    return specs, notes
