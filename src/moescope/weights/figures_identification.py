"""Can experts be told from the weights alone? Accuracy and margin over k, and the ambiguity of layers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    Figure,
    Tables,
    Trace,
    base_layout,
    capital,
    grey_line,
    k_axis,
    layer_axis,
    layer_lines,
    named_layers,
    number,
)
from moescope.weights.figures_alignment import usable

DEFAULT_ACCURACY_WEIGHT = 0.4
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
FEWEST_TESTED = 4  # experts: 3 have 6 pairings, so that no p can be below 1/6


def verdict_sentence(tables: Tables) -> str:
    """ "Layer 0 is at chance; layers 9 to 30 identify their experts" from the tests' verdicts."""
    tests = tables["alignment_tests"]
    experts = experts_by_layer(tables["alignment_layers"])
    told = [told_verdict(row.verdict, experts[row.layer]) for row in tests.itertuples()]
    parts = []
    for verdict, (one, many) in VERDICT_WORDS.items():
        layers = sorted(layer for layer, word in zip(tests["layer"], told, strict=True) if word == verdict)
        if layers:
            parts.append(f"{named_layers(layers)} {one if len(layers) == 1 else many}")
    return capital("; ".join(parts))


def told_verdict(verdict: str, experts: int) -> str:
    """The verdict as it is told.

    Where no test could have found anything, that nothing was found is not told.
    """
    return "untested" if verdict == "chance" and experts < FEWEST_TESTED else verdict


def experts_by_layer(frame: pd.DataFrame) -> dict[int, int]:
    """layer -> its number of experts, from the ceiling sqrt(n - 1) of z."""
    ceilings = frame.groupby("layer")["z_ceiling"].first()
    return {int(layer): round(float(ceiling) ** 2 + 1) for layer, ceiling in ceilings.items()}


def expert_counts(frame: pd.DataFrame) -> list[int]:
    return sorted(set(experts_by_layer(frame).values()))


def accuracy_by_k(tables: Tables) -> Figure:
    frame = tables["alignment_layers"]
    ks = np.sort(frame["k"].unique())
    data = layer_lines(frame, "k", "argmax_accuracy")
    for n in expert_counts(frame):
        data.append(grey_line(ks, np.full(len(ks), 1 / n), f"chance 1/{n}"))
    caption = (
        "Share of routers whose own expert is their best match. At k = d all are tied, which counts 1/n."
    )
    return Figure(
        "accuracy_by_k",
        verdict_sentence(tables),
        caption,
        ("argmax_accuracy", "p_accuracy", "verdict"),
        data,
        base_layout("k", "argmax accuracy", xaxis=k_axis(frame["k"]), yaxis={"range": [-0.04, 1.04]}),
    )


def margin_by_k(tables: Tables) -> Figure:
    frame, kept = tables["alignment_layers"], usable(tables)
    best = kept.groupby("layer")["alignment_margin"].max()
    positive = sorted(best.index[best > 0])
    title = (
        f"The mean margin is positive at some k in {named_layers(positive)}"
        if positive
        else "No layer has a positive mean margin at any k"
    )
    if positive:
        title += f", at most {number(best.max())} (layer {best.idxmax()})"
    ks = np.sort(frame["k"].unique())
    data = [*layer_lines(frame, "k", "alignment_margin"), grey_line(ks, np.zeros(len(ks)), "no preference")]
    caption = (
        "Alignment with the own expert less that with the best other one, mean over routers. Chance "
        "lies below zero."
    )
    return Figure(
        "margin_by_k",
        title,
        caption,
        ("alignment_margin", "positive_margin_share"),
        data,
        base_layout("k", "alignment margin", xaxis=k_axis(frame["k"])),
    )


def score_at_chance(ambiguity: pd.DataFrame, layers: pd.DataFrame) -> pd.Series:
    """Layer -> a (1 - 1/n) + b + g, the absolute score at a given k of a layer that tells nothing; a + b + g
    = 1.

    a is read off the scores themselves, so that a run's own weights count; where every layer is right they
    cannot tell.
    """
    wrong = 1 - ambiguity["argmax_accuracy"]
    told = (ambiguity["accuracy_term"] / wrong)[wrong > 1e-9]
    a = float(told.max()) if len(told) else DEFAULT_ACCURACY_WEIGHT
    return 1 - a / (layers.groupby("layer")["z_ceiling"].max() ** 2 + 1)


def ambiguity_by_layer(tables: Tables) -> Figure:
    frame = tables["ambiguity"].sort_values("layer")
    layers = frame["layer"].to_numpy()
    data: list[Trace] = []
    for index, (column, name) in enumerate(
        [("accuracy_term", "accuracy"), ("margin_term", "margin"), ("z_term", "z")]
    ):
        data.append(
            {
                "type": "bar",
                "x": layers,
                "y": frame[column].to_numpy(),
                "name": name,
                "marker": {"color": CATEGORICAL[index]},
                "hovertemplate": f"layer %{{x}}<br>{name} term %{{y:.3g}}<extra></extra>",
            }
        )
    for bound, name in ((0.7, "high above 0.7"), (0.4, "medium above 0.4")):
        data.append(grey_line([float(layers.min()) - 0.5, float(layers.max()) + 0.5], [bound, bound], name))
    if frame["ambiguity_score"].isna().all():
        title = "Ambiguity is undefined: it compares layers, and these cannot be told apart by it"
    else:
        high = sorted(frame.loc[frame["level"] == "high", "layer"])
        top = frame.loc[frame["ambiguity_score"].idxmax()]
        title = (
            f"{capital(named_layers(high))} {'is' if len(high) == 1 else 'are'} highly ambiguous"
            if high
            else "No layer is highly ambiguous"
        )
        title += (
            f"; layer {top['layer']:.0f} most ({number(top['ambiguity_score'])}), among {len(frame)} compared"
        )
    caption = "Score and its three parts at each layer's k*, relative to the layers of this scan."
    layout = base_layout(
        "layer",
        "ambiguity score",
        barmode="stack",
        legend={"traceorder": "normal"},
        xaxis=layer_axis(frame["layer"]),
        yaxis={"range": [0, 1.02]},
    )
    return Figure(
        "ambiguity_by_layer", title, caption, ("ambiguity_score", "absolute_score", "k_star"), data, layout
    )


def absolute_ambiguity_by_layer(tables: Tables) -> Figure:
    frame = tables["ambiguity"].sort_values("layer")
    layers = frame["layer"].to_numpy()
    top = frame.loc[frame["absolute_score"].fillna(-1).idxmax()]
    low = frame.loc[frame["absolute_score"].fillna(2).idxmin()]
    title = (
        f"Without comparison, layer {top['layer']:.0f} is the most ambiguous "
        f"({number(top['absolute_score'])})"
    )
    title += (
        f", layer {low['layer']:.0f} the least ({number(low['absolute_score'])})" if len(frame) > 1 else ""
    )
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": layers,
            "y": frame["absolute_score"].to_numpy(),
            "name": "absolute score",
            "line": {"color": CATEGORICAL[0]},
            "hovertemplate": "layer %{x}<br>absolute %{y:.3g}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": layers,
            "y": frame["ambiguity_score"].to_numpy(),
            "name": "relative score",
            "line": {"color": GREY},
            "hovertemplate": "layer %{x}<br>relative %{y:.3g}<extra></extra>",
        },
    ]
    chance = score_at_chance(frame, tables["alignment_layers"])
    data.append(grey_line(chance.index.to_numpy(), chance.to_numpy(), "a layer at chance, at one k"))
    caption = (
        "The absolute score needs no other layer; the relative one min-maxes margin and z over the "
        "layers scanned."
    )
    return Figure(
        "absolute_ambiguity_by_layer",
        title,
        caption,
        ("absolute_score", "ambiguity_score"),
        data,
        base_layout("layer", "score", xaxis=layer_axis(frame["layer"]), yaxis={"range": [0, 1.04]}),
    )


def accuracy_and_margin_by_layer(tables: Tables) -> Figure:
    frame = tables["ambiguity"].sort_values("layer")
    layers = frame["layer"].to_numpy()
    perfect = sorted(frame.loc[frame["argmax_accuracy"] >= 1 - 1e-9, "layer"])
    title = (
        f"At k*, {named_layers(perfect)} {'tells' if len(perfect) == 1 else 'tell'} every expert"
        if perfect
        else "At k*, no layer tells every expert"
    )
    data: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": layers,
            "y": frame["argmax_accuracy"].to_numpy(),
            "name": "argmax accuracy",
            "line": {"color": CATEGORICAL[0]},
            "customdata": frame["k_star"].astype(float).tolist(),
            "hovertemplate": "layer %{x}, k* %{customdata}<br>accuracy %{y:.3g}<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": layers,
            "y": frame["alignment_margin"].to_numpy(),
            "name": "alignment margin",
            "line": {"color": CATEGORICAL[1]},
            "hovertemplate": "layer %{x}<br>margin %{y:.3g}<extra></extra>",
        },
    ]
    chance = 1 / (tables["alignment_layers"].groupby("layer")["z_ceiling"].max() ** 2 + 1)
    data.append(grey_line(chance.index.to_numpy(), chance.to_numpy(), "chance accuracy 1/n"))
    return Figure(
        "accuracy_and_margin_by_layer",
        title,
        "Accuracy and margin at each layer's k*.",
        ("argmax_accuracy", "alignment_margin", "k_star"),
        data,
        base_layout("layer", "value at k*", xaxis=layer_axis(frame["layer"])),
    )
