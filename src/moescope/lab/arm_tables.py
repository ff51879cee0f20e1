"""What follows from the trainings of a study, for its figures and sentences: single seeds, domains, means.

A study writes these tables; of one that was written before they existed they are made when it is opened.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from moescope.lab.tables import OVER_SEEDS, TABLES
from moescope.statistics import t_test
from moescope.verb import Tables

NAMED_PARTS, OTHER_PARTS = 6, "other parts"  # the most expensive parts have names
BEFORE = ("parameters_total", "parameters_trainable", "parameters_active", "flops_per_token", "k_of_n")
OF_QUESTION = ("study_comparisons", "study_pairs", "study_domains", "study_means", "study_values")
NORMAL = 1.96  # standard deviations of a 95 % interval where the standard deviation is known


def with_arm_tables(tables: Tables, reference: str) -> Tables:
    """Return the tables with all that follows from them; `reference` is the arm of relative speeds."""
    runs, comparisons = tables["study_runs"], tables["study_comparisons"]
    done = finished_runs(runs)
    found = {
        "study_comparisons": with_spread(comparisons, done),
        "study_arms": arms(runs, reference),
        "study_pairs": paired(comparisons, done),
        "study_domains": domains(comparisons, tables.get("study_documents")),
        "study_means": means(comparisons, runs, tables.get("study_curves")),
        "study_values": values(comparisons, done, runs, tables.get("study_axes")),
    }
    if "overhead" in tables:
        found["overhead"] = with_parts(tables["overhead"])
    return {**tables, **{name: frame for name, frame in found.items() if len(frame) or name in tables}}


def of_question(tables: Tables, question: str) -> Tables:
    """Return the tables with only the question's arms and its reference; all of them without a question."""
    if not tables or not question:
        return tables
    found = {name: tables[name] for name in OF_QUESTION if name in tables}
    found = {name: frame[frame["question"] == question] for name, frame in found.items()}
    arms = set(found["study_comparisons"]["arm"])
    others = {name: frame[frame["arm"].isin(arms)] for name, frame in tables.items() if "arm" in frame}
    return {**others, **found}


def finished_runs(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[(runs["status"] == "done") & runs["validation_loss"].notna()]


def rows_of(name: str, parts: list[pd.DataFrame]) -> pd.DataFrame:
    """Return the rows of a table as one frame."""
    columns = list(TABLES[name].columns)
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def with_spread(comparisons: pd.DataFrame, done: pd.DataFrame) -> pd.DataFrame:
    """Add the standard deviation over seeds of each arm's loss, and its noise over documents."""
    by_arm = done.astype({"validation_loss": float}).groupby("arm")
    noise = done["noise_std"].astype(float) if "noise_std" in done else done["seed"] * np.nan
    stds = {"seed_std": by_arm["validation_loss"].std(), "noise_std": noise.groupby(done["arm"]).mean()}
    return comparisons.assign(
        **{name: comparisons["arm"].map(std).astype(float) for name, std in stds.items()}
    )


def with_parts(overhead: pd.DataFrame) -> pd.DataFrame:
    """Name the most expensive components, and sort: routers with the cheapest routing first."""
    experts = overhead["component"] == "experts"
    most = overhead[~experts].groupby("component")["share"].max().sort_values(ascending=False, kind="stable")
    named = ["experts", *most.index[: NAMED_PARTS + (len(most) == NAMED_PARTS + 1)]]
    part = overhead["component"].where(overhead["component"].isin(named), OTHER_PARTS)
    order = overhead["router"].map(overhead[experts].set_index("router")["share"]).fillna(0.0)
    return overhead.assign(part=part, order=-order).sort_values("order", kind="stable").drop(columns="order")


def arms(runs: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Return means over finished trainings by arm; sizes also of arms without one."""
    runs = runs.assign(k_of_n=runs["top_k"].astype(float) / runs["n_experts"].astype(float))
    names = list(dict.fromkeys(runs["arm"]))
    numbers = [name for name in TABLES["study_arms"].values if name in runs and name != "question"]
    numbers += ["peak_memory_bytes"] if "peak_memory_bytes" in runs else []
    runs = runs.astype(dict.fromkeys(numbers, float))
    found = runs[runs["status"] == "done"].groupby("arm")[numbers].mean().reindex(names)
    before = [name for name in BEFORE if name in numbers]
    found[before] = runs.groupby("arm")[before].first()
    by_arm = runs.groupby("arm")["status"]
    found["question"] = runs.groupby("arm")["question"].first()
    found["trainings"] = by_arm.size()
    found["done"] = by_arm.agg(lambda status: int((status == "done").sum()))
    failed = by_arm.agg(lambda status: bool((status == "failed").any()))
    found["state"] = np.where(found["done"] > 0, "done", np.where(failed.reindex(names), "failed", "not run"))
    if "peak_memory_bytes" in found:
        found["peak_memory_gb"] = found["peak_memory_bytes"] / 1e9
    if "tokens_per_second" in found:
        found["relative_speed"] = found["tokens_per_second"] / found["tokens_per_second"].get(
            reference, np.nan
        )
    return found.rename_axis("arm").reset_index().reindex(columns=list(TABLES["study_arms"].columns))


def paired(comparisons: pd.DataFrame, done: pd.DataFrame) -> pd.DataFrame:
    """Return each training's loss minus that of its question's reference with the same seed."""
    losses = done.set_index(["arm", "seed"])["validation_loss"].astype(float)
    parts = []
    for row in comparisons[comparisons["arm"] != comparisons["reference"]].itertuples():
        if {row.arm, row.reference} <= set(done["arm"]):
            apart = (losses[row.arm] - losses[row.reference]).dropna().rename("difference").reset_index()
            parts.append(apart.assign(question=row.question, arm=row.arm))
    return rows_of("study_pairs", parts)


def domains(comparisons: pd.DataFrame, documents: pd.DataFrame | None) -> pd.DataFrame:
    """Return each arm minus its reference by domain: means over seeds of losses weighted by tokens."""
    if documents is None or documents["domain"].nunique() < 2:
        return rows_of("study_domains", [])
    rows = documents.assign(nats=documents["loss"] * documents["tokens"])
    sums = rows.groupby(["arm", "domain", "seed"])[["nats", "tokens"]].sum()
    loss = (sums["nats"] / sums["tokens"]).unstack("seed")
    parts = []
    for row in comparisons[comparisons["arm"] != comparisons["reference"]].itertuples():
        if {row.arm, row.reference} <= set(documents["arm"]):
            apart = (loss.loc[row.arm] - loss.loc[row.reference]).dropna(how="all")
            found = t_test(apart.to_numpy(float))
            noise = (found.interval()[1] - found.value) / NORMAL
            columns = {"seeds": found.count, "difference": found.value, "noise": noise}
            parts.append(
                pd.DataFrame({"domain": apart.index, "question": row.question, "arm": row.arm, **columns})
            )
    return rows_of("study_domains", parts)


def means(comparisons: pd.DataFrame, runs: pd.DataFrame, curves: pd.DataFrame | None) -> pd.DataFrame:
    """Return the training curves of each arm: a mean must not change when one seed stops early."""
    if curves is None or curves.empty:
        return rows_of("study_means", [])
    done = curves.merge(runs.loc[runs["status"] == "done", ["arm", "seed"]], on=["arm", "seed"])
    names = [name for name in TABLES["study_means"].values if name in done]
    done = done.astype(dict.fromkeys(names, float))
    losses = done.set_index(["arm", "seed", "step"])["validation_loss"]
    parts = []
    for row in comparisons.itertuples():
        rows = done[done["arm"] == row.arm].assign(difference=np.nan)
        if row.arm != row.reference and row.reference in set(done["arm"]):
            at = pd.MultiIndex.from_frame(rows[["seed", "step"]])
            rows["difference"] = rows["validation_loss"] - losses[row.reference].reindex(at).to_numpy()
        by_step = rows.groupby("step")
        found = by_step[[name for name in names if name.endswith("_chance")]].mean()
        for name in OVER_SEEDS:
            ends = by_step[name].agg(["mean", "min", "max"])
            found[[name, f"{name}_low", f"{name}_high"]] = ends.to_numpy(float)
        parts.append(found.reset_index().assign(question=row.question, arm=row.arm))
    return rows_of("study_means", parts)


def values(
    comparisons: pd.DataFrame, done: pd.DataFrame, runs: pd.DataFrame, axes: pd.DataFrame | None
) -> pd.DataFrame:
    """Return loss and load of each question's arms along its axes; null at values without a result."""
    parts = []
    for question, rows in comparisons.groupby("question", sort=False):
        reference = str(rows["reference"].iloc[0])
        level = rows.loc[rows["arm"] == reference, "mean"].astype(float).mean()
        for places in (
            [] if axes is None else axis_frames(axes[axes["arm"].isin(rows["arm"])], runs, str(question))
        ):
            of_axis = places.merge(done, on="arm", how="left").groupby(["axis", "line", "value"])
            found = of_axis[["load_cv", "load_cv_chance"]].agg(lambda column: column.astype(float).mean())
            for name in ("validation_loss", "load_cv"):
                ends = of_axis[name].agg(["mean", "min", "max"])
                found[[name, f"{name}_low", f"{name}_high"]] = ends.to_numpy(float)
            parts.append(found.reset_index().assign(question=question, reference_loss=level))
    return rows_of("study_values", parts)


def axis_frames(axes: pd.DataFrame, runs: pd.DataFrame, question: str) -> list[pd.DataFrame]:
    """Return one frame (arm, axis, value, line) per numeric axis; `line` is the position on the other axes.

    Named sizes are placed at their active parameters.
    """
    active = runs.groupby("arm")["parameters_active"].first().astype(float)
    frames = []
    for axis, on_axis in axes.groupby("axis", sort=False):
        named = on_axis["value"].isna().any()
        if named and (question != "scaling" or axis == "router"):
            continue
        others = axes[axes["axis"] != axis]
        labels = others["label"].where(others["axis"] == "router", others["axis"] + " " + others["label"])
        lines = labels.groupby(others["arm"]).agg(", ".join)
        columns = {
            "arm": on_axis["arm"],
            "axis": f"active parameters ({axis})" if named else axis,
            "value": on_axis["arm"].map(active) if named else on_axis["value"].astype(float),
            "line": on_axis["arm"].map(lines).fillna(""),
        }
        frame = pd.DataFrame(columns)
        if frame["value"].nunique() > 1:
            frames.append(frame.dropna().reset_index(drop=True))
    return frames
