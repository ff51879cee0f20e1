"""Compare the arms of a study with their reference, and derive what its figures and sentences read.

The comparison is a paired t per arm, Holm-corrected for the number of arms.

A seed fixes initial weights and text order and shifts all arms together, so arms are compared within seeds.
Each arm is tested by its own differences: one variance for all arms makes false claims where arms scatter
differently, and five seeds are too few to check that first. Evaluation noise (other documents) enters no
test: it says how precisely one model was measured, not how another training of it would end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput, unknown_name
from moescope.lab.tables import OVER_SEEDS, TABLES
from moescope.statistics import LEVEL, detectable_errors, holm, paired_t_test, signed_rank_p, t_test
from moescope.verb import Tables

MIN_SEEDS = 5  # with fewer, numbers are reported and nothing is claimed

BETTER, WORSE, ALIKE = "better", "worse", "not distinguishable"
TOO_FEW, NO_SPREAD = "too few seeds to say", "no spread over seeds"
NOT_RUN, FAILED, REFERENCE = "not run", "failed", "reference"
UNTRAINED = "does not beat the unigram baseline"

NAMED_PARTS, OTHER_PARTS = 6, "other parts"  # the most expensive parts have names
BEFORE = ("parameters_total", "parameters_trainable", "parameters_active", "flops_per_token", "k_of_n")
OF_QUESTION = ("study_comparisons", "study_pairs", "study_domains", "study_means", "study_values")
NORMAL = 1.96  # standard deviations of a 95 % interval where the standard deviation is known


def compare(runs: pd.DataFrame, reference: str, references: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the table `study_comparisons`: one row per question and arm, including the reference.

    `references` names another reference for single questions, such as the complete router for its ablations.
    Each question is its own family of tests. An arm that lacks seeds of the reference is compared on those
    they share, which favours an arm that fails where it does badly: read `study_runs.status` with it.
    """
    chosen = {
        str(one): (references or {}).get(str(one), reference) for one in dict.fromkeys(runs["question"])
    }
    names = [*dict.fromkeys(runs["arm"])]
    for name in (reference, *chosen.values()):
        if name not in names:
            raise unknown_name("reference arm", name, [str(arm) for arm in names])
    if runs.duplicated(["arm", "seed"]).any():
        raise BadInput("study_runs: two rows of one arm and seed; give each arm its own name")
    counted = runs.assign(validation_loss=final_losses(runs).where(enters_comparisons(runs)))
    losses = counted.pivot(index="arm", columns="seed", values="validation_loss")
    # why an arm has no result, if it has none
    reasons = dict.fromkeys(runs.loc[runs["status"] == "done", "arm"], UNTRAINED)
    reasons |= dict.fromkeys(runs.loc[runs["status"] == "failed", "arm"], FAILED)
    parts = []
    for question, named in chosen.items():
        arms = dict.fromkeys([named, *runs.loc[runs["question"] == question, "arm"]])
        parts.append(question_rows(question, losses.loc[[*arms]], reasons))
    frame = pd.concat(parts, ignore_index=True)
    return frame.astype({"seeds": "int64", "degrees_of_freedom": "Int64"})


def final_slope(rows: pd.DataFrame, steps: int) -> float | None:
    """Return the slope of the validation loss over the last fifth of the steps, in nats per 1,000 steps.

    Least squares over the evaluations of that part, or the last two; None if fewer followed the first step.
    """
    evaluated = rows[["step", "validation_loss"]].dropna().astype(float).sort_values("step")
    evaluated = evaluated[evaluated["step"] > 0]
    last = evaluated.tail(max(2, int((evaluated["step"] >= 0.8 * steps).sum())))
    if len(last) < 2:
        return None
    return 1000 * float(np.polyfit(last["step"], last["validation_loss"], 1)[0])


def final_losses(runs: pd.DataFrame) -> pd.Series:
    """Return the validation loss of each training; the column is absent if nothing ran."""
    return runs.get("validation_loss", runs["seed"] * np.nan).astype(float)


def enters_comparisons(runs: pd.DataFrame) -> pd.Series:
    """Return which trainings count: done, with a finite loss that beats the unigram baseline.

    Runs without a baseline, of an older version, count.
    """
    losses = final_losses(runs)
    baseline = runs.get("unigram_loss", runs["seed"] * np.nan).astype(float).fillna(np.inf)
    return (runs["status"] == "done") & np.isfinite(losses) & (losses < baseline)


def question_rows(question: str, losses: pd.DataFrame, reasons: Mapping[str, str]) -> pd.DataFrame:
    """Return one question's rows, the reference first; `reasons` say why an arm may have no result."""
    arms, losses_RS = [*losses.index], losses.to_numpy(float)
    each, compared = t_test(losses_RS), paired_t_test(losses_RS)
    (low_R, high_R), between, p_R = each.interval(), compared.interval(), compared.p_value
    tests = max(int(np.isfinite(p_R).sum()), 1)
    of_arms: dict[str, Any] = {
        "difference": compared.value,
        "difference_low": between[0],
        "difference_high": between[1],
        "difference_std": compared.spread,
        "statistic": compared.statistic,
        "degrees_of_freedom": np.where(compared.degrees > 0, compared.degrees, np.nan),
        "p_value": p_R,
        "p_adjusted": holm(p_R),
        "hedges_g": compared.hedges_g,
        "rank_p": holm(np.array([signed_rank_p(row - losses_RS[0]) for row in losses_RS[1:]])),
        "detectable_difference": [
            detectable_errors(int(df), tests) * error if df > 0 and not flat else np.nan
            for df, error, flat in zip(compared.degrees, compared.error, compared.flat, strict=True)
        ],
    }
    columns = {name: np.append(np.nan, values) for name, values in of_arms.items()}
    seeds = np.append(each.count[:1], compared.count)
    verdicts: list[tuple[Any, Any]] = [
        (each.count == 0, [reasons.get(arm, NOT_RUN) for arm in arms]),
        (np.arange(len(arms)) == 0, REFERENCE),
        (seeds < MIN_SEEDS, TOO_FEW),
        (np.isnan(columns["p_adjusted"]), NO_SPREAD),
        (columns["p_adjusted"] > LEVEL, ALIKE),
        (columns["difference"] < 0, BETTER),
    ]
    verdict = np.select([at for at, _ in verdicts], [name for _, name in verdicts], WORSE)
    names = {"question": question, "arm": arms, "reference": arms[0]}
    means = {"mean": each.value, "low": low_R, "high": high_R}
    return pd.DataFrame({**names, **means, "seeds": seeds, **columns, "verdict": verdict})


# --- tables that follow from those of trainings; of older studies they are made when they are opened


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


def rows_of(name: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the table's columns of a frame."""
    return frame.reindex(columns=list(TABLES[name].columns))


def against_reference(
    comparisons: pd.DataFrame, values: pd.DataFrame, column: str, keys: list[str]
) -> pd.DataFrame:
    """Return `difference`: each arm's value minus that of its question's reference at the same keys."""
    values = values[["arm", *keys, column]].astype({column: float})
    arms = comparisons.loc[comparisons["arm"] != comparisons["reference"], ["question", "arm", "reference"]]
    before = values.rename(columns={"arm": "reference", column: "before"})
    both = arms.merge(values, on="arm").merge(before, on=["reference", *keys])
    return both.assign(difference=both[column] - both["before"]).dropna(subset="difference")


def over_seeds(groups: Any, names: Sequence[str]) -> pd.DataFrame:
    """Return mean, least and largest of each column by group."""
    ends = {"": "mean", "_low": "min", "_high": "max"}
    return pd.DataFrame(
        {f"{name}{end}": groups[name].agg(how).astype(float) for name in names for end, how in ends.items()}
    )


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
    return rows_of("study_pairs", against_reference(comparisons, done, "validation_loss", ["seed"]))


def domains(comparisons: pd.DataFrame, documents: pd.DataFrame | None) -> pd.DataFrame:
    """Return each arm minus its reference by domain: means over seeds of losses weighted by tokens."""
    if documents is None or documents["domain"].nunique() < 2:
        return rows_of("study_domains", pd.DataFrame())
    keys = ["arm", "domain", "seed"]
    rows = documents.assign(nats=documents["loss"] * documents["tokens"])
    sums = rows.groupby(keys)[["nats", "tokens"]].sum()
    losses = (sums["nats"] / sums["tokens"]).rename("loss").reset_index()
    apart = against_reference(comparisons, losses, "loss", ["domain", "seed"])
    wide = apart.pivot(index=["question", "arm", "domain"], columns="seed", values="difference")
    found = t_test(wide.to_numpy(float))
    noise = (found.interval()[1] - found.value) / NORMAL
    columns = {"seeds": found.count, "difference": found.value, "noise": noise}
    return rows_of("study_domains", pd.DataFrame(columns, wide.index).reset_index())


def means(comparisons: pd.DataFrame, runs: pd.DataFrame, curves: pd.DataFrame | None) -> pd.DataFrame:
    """Return the training curves of each arm: a mean must not change when one seed stops early."""
    if curves is None or curves.empty:
        return rows_of("study_means", pd.DataFrame())
    done = curves.merge(runs.loc[runs["status"] == "done", ["arm", "seed"]], on=["arm", "seed"])
    names = [name for name in TABLES["study_means"].values if name in done]
    done = done.astype(dict.fromkeys(names, float))
    apart = against_reference(comparisons, done, "validation_loss", ["seed", "step"])
    apart = apart[["question", "arm", "seed", "step", "difference"]]
    rows = comparisons[["question", "arm"]].merge(done, on="arm")
    by_step = rows.merge(apart, how="left").groupby(["question", "arm", "step"], sort=False)
    chance = by_step[[name for name in names if name.endswith("_chance")]].mean()
    return rows_of("study_means", chance.join(over_seeds(by_step, OVER_SEEDS)).reset_index())


def values(
    comparisons: pd.DataFrame, done: pd.DataFrame, runs: pd.DataFrame, axes: pd.DataFrame | None
) -> pd.DataFrame:
    """Return loss and load of each question's arms along its axes; null at values without a result."""
    parts: list[pd.DataFrame] = []
    if axes is None:
        return rows_of("study_values", pd.DataFrame())
    for question, rows in comparisons.groupby("question", sort=False):
        level = rows.loc[rows["arm"] == rows["reference"], "mean"].astype(float).mean()
        for places in axis_frames(axes[axes["arm"].isin(rows["arm"])], runs, str(question)):
            numbers = done.astype(dict.fromkeys(("load_cv", "load_cv_chance"), float))
            of_axis = places.merge(numbers, on="arm", how="left").groupby(["axis", "line", "value"])
            found = over_seeds(of_axis, ("validation_loss", "load_cv"))
            found["load_cv_chance"] = of_axis["load_cv_chance"].mean()
            parts.append(found.reset_index().assign(question=question, reference_loss=level))
    return rows_of("study_values", pd.concat(parts, ignore_index=True) if parts else pd.DataFrame())


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


# --- tables of a probe


def long_rows(frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the tables of a probe as rows of study_probes, one per value."""
    parts = []
    for name, frame in frames.items():
        frame = frame.reset_index(drop=True)
        for column in frame:
            numeric = pd.api.types.is_numeric_dtype(frame[column])
            values = {"value" if numeric else "text": frame[column].astype(float if numeric else str)}
            parts.append(pd.DataFrame({"table": name, "row": frame.index, "column": column, **values}))
    empty = pd.DataFrame(columns=["table", "row", "column", "value", "text"])
    return pd.concat(parts, ignore_index=True).reindex(columns=empty.columns) if parts else empty


def probe_tables(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the tables of a probe again from study_probes, with arm and seed; whole numbers as integers."""
    found = {}
    for name, of_table in rows.groupby("table", sort=False):
        columns = {}
        for column, cells in of_table.groupby("column", sort=False):
            cells = cells.set_index(["arm", "seed", "row"])
            values = cells["value"] if cells["text"].isna().all() else cells["text"]
            whole = values.dtype == float and values.notna().all() and (values % 1 == 0).all()
            columns[column] = values.astype("int64") if whole else values
        found[str(name)] = pd.DataFrame(columns).reset_index().drop(columns="row")
    return found
