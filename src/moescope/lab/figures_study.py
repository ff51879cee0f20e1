"""A study's arms beside their reference: differences seed by seed, losses, and noise.

Tables hold the arms of one question and its reference; names in them are fit for plotting. Arms stand from
top to bottom, the best first.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from moescope.plotting.style import (
    CATEGORICAL,
    GREY,
    Figure,
    FigureSpec,
    Tables,
    Trace,
    base_layout,
    category_style,
    counted,
    grey_line,
    heatmap,
    listed,
    number,
)

VERDICTS = {  # colour and shape: a picture in grey must say as much
    "better": (CATEGORICAL[2], "circle"),
    "worse": (CATEGORICAL[1], "square"),
    "not distinguishable": (CATEGORICAL[0], "diamond"),
    "too few seeds to say": (CATEGORICAL[6], "x"),
    "no spread over seeds": (CATEGORICAL[3], "cross"),
}
REFERENCE = "reference"


def loss_words(value: float) -> str:
    """A loss in nats, to the fourth decimal: what studies differ in."""
    return f"{value:.4f}" if math.isfinite(value) else "undefined"


def ordered_arms(comparisons: pd.DataFrame) -> list[str]:
    """The question's arms by mean loss, the best first; those that were not run come last."""
    return [
        str(arm) for arm in comparisons.sort_values(["mean", "arm"], na_position="last", kind="stable")["arm"]
    ]


def reference_of(comparisons: pd.DataFrame) -> str:
    return str(comparisons["reference"].iloc[0])


def arm_axis(arms: list[str]) -> dict[str, object]:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": arms[::-1],
        "range": [-0.6, len(arms) - 0.4],
        "showgrid": False,
    }


def arm_height(arms: int) -> int:
    return 180 + 27 * max(arms, 3)


def upright(x: float, arms: list[str], name: str, dash: str = "dash") -> Trace:
    """A grey line from the first arm to the last."""
    line = grey_line([x] * len(arms), arms, name, dash)
    return {**line, "hovertemplate": f"{name}: %{{x:.4g}}<extra></extra>"}


def reference_shape(x: float) -> list[dict[str, object]]:
    """The same line from edge to edge, faint.

    Between categories alone it would be a point where there is one arm.
    """
    edge = {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "layer": "below",
    }
    return [{**edge, "line": {"color": GREY, "width": 1}, "opacity": 0.5}] if math.isfinite(x) else []


def told(comparisons: pd.DataFrame) -> pd.DataFrame:
    """The rows of arms that were compared: with a difference."""
    return comparisons[comparisons["difference"].notna()]


def paired(runs: pd.DataFrame, reference: str) -> pd.DataFrame:
    """arm, seed, difference from the reference with the same seed; one row a pair of finished trainings."""
    done = runs[(runs["status"] == "done") & runs["validation_loss"].notna()]
    beside = done[done["arm"] == reference].set_index("seed")["validation_loss"]
    others = done[(done["arm"] != reference) & done["seed"].isin(beside.index)]
    return others.assign(difference=others["validation_loss"] - others["seed"].map(beside))


# --- arms against the reference


def differences(tables: Tables) -> Figure:
    """Every arm less the reference.

    Seeds as dots, the mean with its interval, coloured by what may be said of it.
    """
    comparisons = tables["study_comparisons"]
    reference = reference_of(comparisons)
    arms = [arm for arm in ordered_arms(comparisons) if arm != reference]
    pairs = paired(tables["study_runs"], reference)
    data: list[Trace] = [
        upright(0.0, arms, f"{reference} (reference)"),
        {
            "type": "scatter",
            "mode": "markers",
            "name": "one seed",
            "x": pairs["difference"].to_numpy(float),
            "y": pairs["arm"].tolist(),
            "customdata": pairs["seed"].to_numpy(),
            "marker": {"size": 5, "color": CATEGORICAL[5], "opacity": 0.65},
            "hovertemplate": "%{y}, seed %{customdata}<br>%{x:.4f}<extra></extra>",
        },
    ]
    known = told(comparisons)
    for verdict, (color, symbol) in VERDICTS.items():
        own = known[known["verdict"] == verdict]
        if len(own):
            data.append(with_interval(own, verdict, color, symbol))
    missing = [arm for arm in arms if arm not in set(known["arm"])]
    if missing:
        data.append(
            {
                "type": "scatter",
                "mode": "text",
                "x": [0.0] * len(missing),
                "y": missing,
                "text": comparisons.set_index("arm")["verdict"].loc[missing].tolist(),
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    caption = (
        f"Validation loss less that of {reference} with the same seed, in nats a token: left of the grey "
        "line the arm is better. Dots are seeds; bars are 95 % intervals of the mean over seeds, each of "
        "one arm by itself. Better and worse are said where p ≤ 0.05 after Holm's correction for all arms, "
        "from five seeds on."
    )
    layout = base_layout("difference (nats a token)", "", yaxis=arm_axis(arms), shapes=reference_shape(0.0))
    columns = ("difference", "difference_low", "study_comparisons.p_adjusted", "study_comparisons.verdict")
    return Figure(
        "differences",
        difference_title(comparisons),
        caption,
        columns,
        data,
        layout,
        height=arm_height(len(arms)),
    )


def with_interval(rows: pd.DataFrame, name: str, color: str, symbol: str) -> Trace:
    middle = rows["difference"].to_numpy(float)
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": middle,
        "y": rows["arm"].tolist(),
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": rows["difference_high"].to_numpy(float) - middle,
            "arrayminus": middle - rows["difference_low"].to_numpy(float),
            "color": color,
            "thickness": 2,
            "width": 5,
        },
        "marker": {"size": 10, "color": color, "symbol": symbol},
        "customdata": rows[["p_adjusted", "seeds"]].to_numpy(float),
        "hovertemplate": (
            f"%{{y}}: {name}<br>%{{x:.4f}} nats<br>p %{{customdata[0]:.3g}} after Holm, %{{customdata[1]}} "
            "seeds<extra></extra>"
        ),
    }


def difference_title(comparisons: pd.DataFrame) -> str:
    """What may be said of the arms together."""
    reference, known = reference_of(comparisons), told(comparisons)
    if known.empty:
        return f"Nothing can be compared with {reference} yet"
    judged = known[known["verdict"].isin(["better", "worse", "not distinguishable"])]
    if judged.empty:
        far = known.loc[known["difference"].abs().idxmax()]
        seeds = int(known["seeds"].max())
        return (
            f"With {counted(seeds, 'seed')} nothing is claimed; {far['arm']} lies farthest from {reference}, "
            f"{signed(far['difference'])} nats, and 0 is no difference"
        )
    words = [
        (
            f"{listed(list(own['arm'])) if len(own) <= 3 else f'{len(own)} arms'} "
            f"{'is' if len(own) == 1 else 'are'} {verdict} than {reference}"
        )
        for verdict in ("better", "worse")
        if len(own := judged[judged["verdict"] == verdict])
    ]
    alike = judged[judged["verdict"] == "not distinguishable"]
    if len(alike) == len(judged):
        words.append(f"No arm can be told from {reference}")
    elif len(alike):
        words.append(
            f"{listed(list(alike['arm'])) if len(alike) <= 3 else f'{len(alike)} others'} cannot be told "
            "from it"
        )
    return "; ".join(words) + power_words(alike)


def power_words(alike: pd.DataFrame) -> str:
    """How large a difference would have shown in arms that cannot be told from the reference.

    "" where that is not known.
    """
    known = alike[np.isfinite(alike["detectable_difference"].astype(float))].sort_values(
        "detectable_difference"
    )
    if known.empty:
        return ""
    low, high = (number(known["detectable_difference"].iloc[place]) for place in (0, -1))
    if low == high:
        return f"; a difference of {high} nats would have been seen with probability 80 %"
    first, last = (known["arm"].iloc[place] for place in (0, -1))
    return f"; {low} nats ({first}) to {high} nats ({last}) would have been seen with probability 80 %"


def signed(value: float) -> str:
    return number(value) if value < 0 else f"+{number(value)}"


def losses(tables: Tables) -> Figure:
    """Validation loss of every arm and seed, seeds connected; the mean of each arm with its t interval."""
    comparisons, runs = tables["study_comparisons"], tables["study_runs"]
    reference, arms = reference_of(comparisons), ordered_arms(comparisons)
    done = runs[(runs["status"] == "done") & runs["validation_loss"].notna()]
    middle = comparisons[comparisons["mean"].notna()].set_index("arm")
    data: list[Trace] = []
    if reference in middle.index:
        data.append(upright(float(middle.loc[reference, "mean"]), arms, f"mean of {reference}"))
    seeds = sorted(done["seed"].unique())
    for index, seed in enumerate(seeds):
        own = done[done["seed"] == seed].set_index("arm")["validation_loss"].reindex(arms)
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "one seed a line",
                "showlegend": index == 0,  # the legend of all seeds would leave no room on a small screen
                "x": own.to_numpy(float),
                "y": arms,
                "line": {**category_style(index), "width": 1},
                "marker": {"size": 5},
                "opacity": 0.7,
                "hovertemplate": f"%{{y}}, seed {seed}<br>%{{x:.4f}}<extra></extra>",
            }
        )
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "mean and 95 % interval",
            "x": middle["mean"].to_numpy(float),
            "y": list(middle.index),
            "error_x": {
                "type": "data",
                "array": (middle["high"] - middle["mean"]).to_numpy(float),
                "color": CATEGORICAL[6],
                "thickness": 1.5,
                "width": 4,
            },
            "marker": {"size": 11, "color": CATEGORICAL[6], "symbol": "line-ns-open", "line": {"width": 3}},
            "hovertemplate": "%{y}, mean over seeds<br>%{x:.4f}<extra></extra>",
        }
    )
    if middle.empty:
        title = "No training is done yet"
    else:
        best = middle["mean"].idxmin()
        title = f"{best} has the lowest mean loss, {loss_words(middle.loc[best, 'mean'])} nats a token"
        title += (
            f"; {reference}, the reference, {loss_words(middle.loc[reference, 'mean'])}"
            if reference in middle.index and best != reference
            else ""
        )
    caption = (
        "Validation loss at the end of training. A line is a seed: where lines run side by side, seeds move "
        "all arms together, and differences are surer than the intervals of means, which are t intervals "
        "over seeds, suggest. An arm without a dot was not run or failed."
    )
    columns = ("study_runs.validation_loss", "study_comparisons.mean", "study_comparisons.low")
    return Figure(
        "losses",
        title,
        caption,
        columns,
        data,
        base_layout("validation loss (nats a token)", "", yaxis=arm_axis(arms)),
        height=arm_height(len(arms)),
    )


def noise_and_spread(tables: Tables) -> Figure:
    """How far seeds scatter an arm's loss, beside how far the choice of documents does."""
    comparisons, runs = tables["study_comparisons"], tables["study_runs"]
    done = runs[(runs["status"] == "done") & runs["validation_loss"].notna()]
    own = done.groupby("arm").agg(spread=("validation_loss", "std"))
    own["noise"] = ((done["noise_high"] - done["noise_low"]) / (2 * 1.96)).groupby(done["arm"]).mean()
    arms = [arm for arm in ordered_arms(comparisons) if arm in own.index]
    own = own.reindex(arms)
    wide = done.pivot(index="arm", columns="seed", values="validation_loss").dropna(axis=1)
    left = wide.sub(wide.mean(axis=1), axis=0)
    left = left - left.mean(axis=0)
    degrees = (wide.shape[0] - 1) * (wide.shape[1] - 1)
    within = float(np.sqrt((left.to_numpy() ** 2).sum() / degrees)) if degrees > 0 else math.nan
    data = [dots(own["spread"], "over seeds", CATEGORICAL[0], "circle")]
    if own["noise"].notna().any():
        data.append(dots(own["noise"], "over documents", CATEGORICAL[4], "diamond"))
    if math.isfinite(within):
        data.append(upright(within, arms, "within seeds, all arms"))
    title = f"Another seed moves the loss by {number(own['spread'].median())} nats"
    title += f", other documents by {number(own['noise'].median())}" if own["noise"].notna().any() else ""
    title += (
        f" (medians over arms); with arm and seed taken out {number(within)} is left"
        if math.isfinite(within)
        else " (medians over arms)"
    )
    caption = (
        "Standard deviations of the loss. Over seeds: of an arm's trainings. Over documents: of one trained "
        "model's loss if other validation documents of the kind had been drawn, a quarter of its 95 % "
        "interval; it is the same text for all arms and has no part in any test. Dashed: what is left when "
        "arm and seed are taken out, which is what tests go by."
    ) + (
        ""
        if own["noise"].notna().any()
        else " Noise over documents was not measured: there are too few of them."
    )
    columns = ("study_runs.validation_loss", "noise_low")
    return Figure(
        "noise_and_spread",
        title,
        caption,
        columns,
        data,
        base_layout("spread (nats a token)", "", xaxis={"rangemode": "tozero"}, yaxis=arm_axis(arms)),
        height=arm_height(len(arms)),
    )


def dots(values: pd.Series, name: str, color: str, symbol: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": values.to_numpy(float),
        "y": list(values.index),
        "marker": {"size": 9, "color": color, "symbol": symbol},
        "hovertemplate": f"%{{y}}, {name}<br>%{{x:.4g}}<extra></extra>",
    }


def by_domain(tables: Tables) -> pd.DataFrame:
    """arm by domain: mean over seeds of the domain's loss less the reference's with the same seed.

    Documents weigh by their tokens.
    """
    reference = reference_of(tables["study_comparisons"])
    rows = tables["study_documents"].assign(nats=lambda frame: frame["loss"] * frame["tokens"])
    sums = rows.groupby(["arm", "seed", "domain"])[["nats", "tokens"]].sum()
    loss = (sums["nats"] / sums["tokens"]).unstack("domain")
    if reference not in loss.index.get_level_values("arm"):
        return pd.DataFrame()
    beside = loss.xs(reference, level="arm")
    others = loss.drop(reference, level="arm")
    pairs = others - beside.reindex(others.index.get_level_values("seed")).to_numpy()
    return pairs.groupby(level="arm").mean().dropna(how="all")


def difference_by_domain(tables: Tables) -> Figure:
    """Where a difference comes from: arms by domains, white where an arm is as good as the reference."""
    reference, found = reference_of(tables["study_comparisons"]), by_domain(tables)
    arms = [arm for arm in ordered_arms(tables["study_comparisons"]) if arm in found.index]
    found = found.reindex(arms)
    trace = heatmap(
        found.to_numpy(float),
        list(found.columns),
        arms,
        diverging=True,
        label="nats a token",
        axes=("domain", "arm"),
    )
    arm, domain = found.stack().abs().idxmax()
    title = (
        f"The largest difference from {reference} in a domain is {arm}'s in {domain}, "
        f"{signed(found.loc[arm, domain])} nats a token; 0 is as good as {reference}"
    )
    caption = (
        "Mean over seeds of the domain's validation loss less the reference's with the same seed. Blue: "
        "better, red: worse, white: alike. Nothing is tested here: the one endpoint is the loss over all "
        "domains."
    )
    layout = base_layout(
        "domain", "", yaxis={"type": "category", "autorange": "reversed"}, xaxis={"type": "category"}
    )
    return Figure(
        "difference_by_domain",
        title,
        caption,
        ("study_documents.loss", "difference"),
        [trace],
        layout,
        height=arm_height(len(arms)),
    )


def can_show(spec: FigureSpec, tables: Tables) -> bool:
    """Noise needs two seeds of some arm; domains, at least two of them and an arm beside the reference."""
    if spec is NOISE:
        runs = tables["study_runs"]
        done = runs[(runs["status"] == "done") & runs["validation_loss"].notna()]
        return bool((done.groupby("arm")["seed"].nunique() > 1).any())
    rows = tables.get("study_documents", pd.DataFrame({"domain": []}))
    return rows["domain"].nunique() > 1 and not by_domain(tables).empty


ARMS = [
    FigureSpec("differences", ("study_runs", "study_comparisons"), differences, wide=True),
    FigureSpec("losses", ("study_runs", "study_comparisons"), losses, wide=True),
]
NOISE = FigureSpec("noise_and_spread", ("study_runs", "study_comparisons"), noise_and_spread, wide=True)
BY_DOMAIN = FigureSpec(
    "difference_by_domain", ("study_documents", "study_comparisons"), difference_by_domain, wide=True
)
