"""Estimates of what a change does: paired by document, against controls, corrected over a sweep."""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.intervention.tables import ALL, FEW_EXPERTS, TABLES
from moescope.statistics import LEVEL, Ratio, false_discovery_rates, jackknife_ratio
from moescope.types import Array, Integers

CONTROLS = 4  # experts nearest in load that an expert is compared with
FEWEST_CONTROLS = 3
MOST_CHANGES = 12  # that a figure compares
CHANGE = "change"
Controls = list[tuple[int, str, list[int]]]
RANDOM_ROLES = ("random subspace", "random direction")
MEASURED = ("tokens", "loss", "loss_changed", "kl", "predictions_changed", "choices", "choices_changed")


def nearest_in_load(load_E: Array, count: int) -> Integers:
    """Return, per expert of a layer, the `count` other experts whose load is nearest (fewer if there are)."""
    distance = np.abs(load_E[:, None] - load_E[None, :]).astype(float)
    np.fill_diagonal(distance, np.inf)
    return np.argsort(distance, axis=1, kind="stable")[:, : min(count, len(load_E) - 1)]


def matched_controls(plan: pd.DataFrame) -> Controls:
    """Return interventions, each with a kind of control and the interventions that are those controls.

    An expert that a sweep changes is compared with the experts of its layer that the same sweep changes and
    whose load on calibration documents is nearest, or with all others where these are few. A projection is
    compared with its own random controls.
    """
    own = plan[plan["of"].notna() & plan["role"].isin(RANDOM_ROLES)]
    controls: Controls = [
        (int(of), str(role), rows["intervention"].tolist())
        for (of, role), rows in own.groupby(["of", "role"])
    ]
    single = plan[(plan["role"] == CHANGE) & plan["layer"].notna() & plan["expert"].notna()]
    single = single[~single["intervention"].isin(own["of"]) & single["calibration_load"].notna()]
    for _, rows in single.groupby(["name", "layer"]):
        if rows["expert"].duplicated().any() or len(rows) <= FEWEST_CONTROLS:
            continue
        numbers, load_E = rows["intervention"].to_numpy(), rows["calibration_load"].to_numpy(float)
        count = CONTROLS if len(rows) >= FEW_EXPERTS else len(rows) - 1
        for number, nearest in zip(numbers.tolist(), nearest_in_load(load_E, count), strict=True):
            controls.append((number, "load-matched expert", numbers[nearest].tolist()))
    return controls


def summarise(documents: pd.DataFrame, plan: pd.DataFrame, routing: pd.DataFrame) -> pd.DataFrame:
    """Return the table `interventions`: one row per intervention and domain, "all" first.

    loss_difference, kl and predictions_changed are ratios of sums over documents with jackknife intervals.
    `excess` is the loss difference minus the mean of the controls, taken document by document. p is
    one-sided: the probability of an excess as large if the change hurt no more than its controls. Against
    random controls the error also holds their spread over draws, τ² (1 + 1/m) for m draws, because the
    question is whether the change is unlike another draw; of two kinds of random controls the one with the
    larger p counts, so that a claim holds against both. q is Benjamini and Hochberg's, over all
    interventions for "all", and over all interventions and domains for single domains. claimed is what costs
    something, and more than its controls.

    Parameters
    ----------
    documents : DataFrame
        The table `intervention_documents`; every intervention has the same documents.
    plan : DataFrame
        PLAN_COLUMNS, one row per intervention; calibration_load is null where no single expert is changed.
    routing : DataFrame
        ROUTING_COLUMNS, one row per intervention.
    """
    plan = plan.sort_values("intervention").reset_index(drop=True)
    grids = {
        name: documents.pivot(index="intervention", columns="document", values=name)
        .loc[plan["intervention"]]
        .to_numpy(float)
        for name in MEASURED
    }
    names, domain_D = np.unique(documents.groupby("document")["domain"].first(), return_inverse=True)
    controls = matched_controls(plan)
    parts = [(ALL, np.full(len(domain_D), True))]
    parts += [(name, domain_D == code) for code, name in enumerate(names if len(names) > 1 else ())]
    frames = []
    for name, part_D in parts:
        own = {column: grid_XD[:, part_D] for column, grid_XD in grids.items()}
        frames.append(summarise_documents(own, domain_D[part_D], plan, controls).assign(domain=name))
    rows = pd.concat(frames, ignore_index=True)
    rows["q"] = np.nan
    for family in (rows["domain"] == ALL, rows["domain"] != ALL):
        tested = family & rows["p"].notna()
        if tested.any():
            rows.loc[tested, "q"] = false_discovery_rates(rows.loc[tested, "p"].to_numpy(float))
    rows["claimed"] = (rows["q"] < LEVEL) & (rows["loss_difference_low"] > 0)
    return with_labels(rows).merge(
        routing.assign(domain=ALL), on=["intervention", "domain"], how="left", validate="one_to_one"
    )


def with_labels(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with label, single and shown: how figures name a change, and which they compare."""
    asked, whole = rows["role"] == CHANGE, rows["domain"] == ALL
    of_expert = rows["layer"].notna() & rows["expert"].notna()
    layer, expert = (rows[name].astype("Int64").astype(str) for name in ("layer", "expert"))
    in_grid = rows[asked].groupby(["name", "layer"], dropna=False)["k"].transform("nunique") > 1
    in_sweep = of_expert & ((of_expert & asked & whole).sum() > MOST_CHANGES)
    column = "excess" if rows.loc[~whole, "excess"].notna().any() else "loss_difference"
    largest = rows[asked & ~whole].groupby("intervention")[column].max().nlargest(MOST_CHANGES)
    return rows.assign(
        label=("L" + layer + " E" + expert).where(of_expert, rows["change"]),
        single=asked & ~in_grid.reindex(rows.index, fill_value=False) & ~in_sweep,
        shown=asked & ~whole & rows["intervention"].isin(largest.index),
    )


def projections(interventions: pd.DataFrame) -> pd.DataFrame:
    """Return the table `projections`: per layer and k the change, and the mean and range of its controls."""
    rows = interventions[(interventions["domain"] == ALL) & interventions["k"].notna()]
    keys = ["layer", "layer_name", "k", "role"]
    kept = [*keys, "loss_difference", "loss_difference_low", "loss_difference_high"]
    draws = rows[rows["role"] != CHANGE].groupby(keys, dropna=False)["loss_difference"]
    controls = draws.agg(["mean", "min", "max", "size"]).reset_index().set_axis([*kept, "draws"], axis=1)
    found = pd.concat([rows.loc[rows["role"] == CHANGE, kept], controls], ignore_index=True)
    return found.sort_values(["layer", "k"], kind="stable", ignore_index=True)


def summarise_documents(
    grids: dict[str, Array], domain_D: Integers, plan: pd.DataFrame, controls: Controls
) -> pd.DataFrame:
    """Return the estimates of every intervention over documents; `grids` are of interventions x documents."""
    tokens_D, difference_XD = grids["tokens"][0], grids["loss_changed"] - grids["loss"]
    rows = plan.drop(columns="calibration_load")
    rows["documents"], rows["tokens"] = int((tokens_D > 0).sum()), int(tokens_D.sum())
    rows["loss"] = grids["loss"].sum(1) / tokens_D.sum()
    for name, sums_XD, ends in (
        ("loss_difference", difference_XD, (-np.inf, np.inf)),
        ("kl", grids["kl"], (0, np.inf)),
        ("predictions_changed", grids["predictions_changed"], (0, 1)),
    ):
        ratio = jackknife_ratio(sums_XD, tokens_D, domain_D)
        rows[name] = ratio.value
        rows[f"{name}_low"], rows[f"{name}_high"] = np.clip(ratio.interval(), *ends)
        if name == "loss_difference":
            rows[f"{name}_std"] = ratio.known_error()
    with np.errstate(invalid="ignore"):
        rows["choices_changed"] = grids["choices_changed"].sum(1) / grids["choices"].sum(1)
    return rows.join(excesses(difference_XD, tokens_D, domain_D, plan, controls))


def excesses(
    difference_XD: Array, tokens_D: Array, domain_D: Integers, plan: pd.DataFrame, controls: Controls
) -> pd.DataFrame:
    """Return controls, excess, its interval and p per intervention; null without controls."""
    place = {int(number): at for at, number in enumerate(plan["intervention"])}
    tested = [(place[number], role, [place[one] for one in members]) for number, role, members in controls]
    columns = ["controls", "excess", "excess_low", "excess_high", "excess_std", "p"]
    if not tested:
        return pd.DataFrame(np.nan, index=plan.index, columns=columns)
    excess_XD = np.stack([difference_XD[at] - difference_XD[members].mean(0) for at, _, members in tested])
    ratio = jackknife_ratio(excess_XD, tokens_D, domain_D)
    draws_X, draw_degrees_X = np.zeros(len(tested)), np.full(len(tested), np.inf)
    effects = difference_XD.sum(1) / tokens_D.sum()
    for row, (_, role, members) in enumerate(tested):
        if role in RANDOM_ROLES:  # unknown of a single draw
            m = len(members)
            draws_X[row] = effects[members].var(ddof=1) * (1 + 1 / m) if m > 1 else np.nan
            draw_degrees_X[row] = m - 1
    documents_X = ratio.error**2
    with np.errstate(invalid="ignore", divide="ignore"):  # Satterthwaite 1946
        degrees = (documents_X + draws_X) ** 2 / (
            documents_X**2 / ratio.degrees + draws_X**2 / draw_degrees_X
        )
    degrees = np.where(np.isfinite(degrees), degrees, max(ratio.degrees, 1.0))
    combined = Ratio(ratio.value, np.sqrt(documents_X + draws_X), degrees, ratio.documents)
    rows = pd.DataFrame(
        {
            "at": [at for at, _, _ in tested],
            "controls": [len(members) for _, _, members in tested],
            "excess": combined.value,
            **dict(zip(("excess_low", "excess_high"), combined.interval(), strict=True)),
            "excess_std": combined.known_error(),
            "p": combined.one_sided_p(),
        }
    )
    strictest = rows.sort_values(["p", "excess"], ascending=[False, True]).drop_duplicates("at")
    return strictest.set_index("at")[columns].reindex(range(len(plan))).set_axis(plan.index)


def expert_effects(
    interventions: pd.DataFrame, documents: pd.DataFrame, plan: pd.DataFrame, seed: int
) -> pd.DataFrame:
    """Return the table `intervention_experts`: one row per layer and expert of a sweep over experts.

    load is that of the plan, on calibration documents. half_a and half_b are the loss differences on two
    halves of the documents, drawn within domains by `seed`; domain_most is the domain with the largest
    loss difference, null where the documents have one domain.
    """
    swept = plan[(plan["role"] == CHANGE) & plan["layer"].notna() & plan["expert"].notna()]
    load = swept.set_index("intervention")["calibration_load"]
    rows = interventions[interventions["intervention"].isin(load.index)]
    ranked = rows[rows["domain"] != ALL].sort_values("loss_difference", ascending=False)
    most = ranked.drop_duplicates("intervention").set_index("intervention")["domain"]
    effects = rows[rows["domain"] == ALL].set_index("intervention").assign(load=load, domain_most=most)
    effects = effects.join(half_differences(documents, seed)).astype({"layer": "int64", "expert": "int64"})
    columns = TABLES["intervention_experts"].columns
    return effects[[name for name in columns if name in effects]].reset_index(drop=True)


def half_differences(documents: pd.DataFrame, seed: int) -> pd.DataFrame:
    """Return the loss difference per token of every intervention on two random halves of each domain."""
    generator = np.random.default_rng(seed)
    domains = documents.groupby("document")["domain"].first()  # in the order of documents
    side = pd.Series(0, index=domains.index)
    for _, members in domains.groupby(domains):
        order = generator.permutation(len(members))
        side.loc[members.index] = (order + generator.integers(2)) % 2
    rows = documents.assign(
        half=documents["document"].map(side), difference=documents["loss_changed"] - documents["loss"]
    )
    sums = rows.groupby(["intervention", "half"])[["difference", "tokens"]].sum()
    halves = (sums["difference"] / sums["tokens"]).unstack("half").reindex(columns=[0, 1])
    return halves.set_axis(["half_a", "half_b"], axis=1)
