"""Which experts serve which domain, and whether that is more than documents dealt at random would show."""

from __future__ import annotations

import numpy as np

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
from moescope.routing.figures_load import CATEGORIES, fold_of, ratio_heatmap
from moescope.routing.figures_metrics import by_layer, interval_words, references, span, value_line, values_of
from moescope.weights.figures_alignment import layer_axis

NAMED_FROM = 5  # tokens a domain, on average


def affinity_heatmap(tables: Tables) -> Figure:
    data: list[Trace] = []
    titles, layers, strongest = [], [], []
    fold = fold_of([tables["domains"]["affinity"].to_numpy(float)])
    for layer, rows in tables["domains"].groupby("layer", sort=True):
        grid = rows.pivot(index="domain", columns="expert", values="affinity")
        values = grid.to_numpy(float)
        data.append(
            ratio_heatmap(
                values,
                [str(expert) for expert in grid.columns],
                [str(domain) for domain in grid.index],
                ("expert", "domain"),
                "of the mean use",
                "affinity",
                fold,
            )
        )
        layers.append(str(layer))
        # an expert with a handful of tokens is of one domain by luck: it is drawn, but not named
        often = rows.groupby("expert")["tokens"].sum().reindex(grid.columns) >= NAMED_FROM * len(grid)
        named = np.where(often.to_numpy(), values, np.nan)
        if np.isfinite(named).any():
            d, e = np.unravel_index(np.nanargmax(named), values.shape)
            strongest.append(float(named[d, e]))
            titles.append(
                f"Layer {layer}: expert {grid.columns[e]} is used {number(strongest[-1])} times "
                f"as much by {grid.index[d]} as by "
                f"domains on average; chance is 1, the most possible {len(grid)}"
            )
        else:
            strongest.append(0.0)
            titles.append(f"Layer {layer}: too few tokens to name an expert")
    start = int(np.argmax(strongest))
    n_domains = tables["domains"]["domain"].nunique()
    return Figure(
        "affinity_heatmap",
        titles[start],
        (
            "Affinity P(i | d)/P(i) of every domain and expert, every domain counted alike, in "
            "doublings; white is 1. Slide to change the layer. "
            "Few documents make it stray by themselves: read it beside I(expert; domain)."
        ),
        ("affinity", "share", "domain_information"),
        data,
        base_layout(
            "expert", "domain", xaxis=CATEGORIES, yaxis={"type": "category", "autorange": "reversed"}
        ),
        Slider("layer", layers, start, titles=titles),
        min(200 + 34 * n_domains, 620),
    )


def purity_bars(tables: Tables) -> Figure:
    """Purity of each layer as bars, with what documents dealt to domains at random give."""
    rows = values_of(tables, "purity")
    line = value_line(rows, "purity", 0)
    bars: Trace = {
        "type": "bar",
        "name": "purity",
        "x": line["x"],
        "y": line["y"],
        "marker": {"color": CATEGORICAL[0]},
        "hovertemplate": "layer %{x}<br>purity %{y:.4g}<extra></extra>",
        **({"error_y": {**line["error_y"], "color": GREY}} if "error_y" in line else {}),
    }
    chance: Trace = {
        "type": "scatter",
        "mode": "markers",
        "name": "documents’ labels dealt anew",
        "x": line["x"],
        "y": rows["chance"].to_numpy(float),
        "marker": {
            "symbol": "line-ew-open",
            "size": float(np.clip(300 / max(len(rows), 1), 5, 24)),
            "color": GREY,
            "line": {"width": 2.5, "color": GREY},
        },
        "hovertemplate": "dealt anew: %{y:.4g}<extra></extra>",
    }
    return Figure(
        "purity_bars",
        f"Purity {span(rows)}; {references(rows, 'labels dealt anew')}",
        (
            "Mean over experts of their main domain's share, every domain counted alike. Grey: the "
            f"same with documents' labels dealt anew. {interval_words(rows)}"
        ),
        ("purity", "share", "share_chance"),
        [bars, chance],
        base_layout("layer", "purity", xaxis=layer_axis(rows["layer"]), yaxis={"range": [0, 1]}),
    )


DOMAINS = [
    FigureSpec("affinity_heatmap", ("domains",), affinity_heatmap, wide=True),
    FigureSpec("purity_bars", ("routing_layers",), purity_bars, metrics=("purity",)),
    by_layer(
        "domain_information_by_layer",
        ["domain_information"],
        "nats",
        floor_name="labels dealt anew",
        draw_collapse=False,
    ),
]
