"""Compare a study's arms with their reference: a paired t per arm, Holm-corrected for the number of arms.

A seed fixes initial weights and text order and shifts all arms together, so arms are compared within seeds.
Each arm is tested by its own differences: one variance for all arms makes false claims where arms scatter
differently, and five seeds are too few to check that first. Evaluation noise (other documents) enters no
test: it says how precisely one model was measured, not how another training of it would end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput, unknown_name
from moescope.statistics import LEVEL, detectable_errors, holm, paired_t_test, signed_rank_p, t_test

MIN_SEEDS = 5  # with fewer, numbers are reported and nothing is claimed

BETTER, WORSE, ALIKE = "better", "worse", "not distinguishable"
TOO_FEW, NO_SPREAD = "too few seeds to say", "no spread over seeds"
NOT_RUN, FAILED, REFERENCE = "not run", "failed", "reference"
UNTRAINED = "does not beat the unigram baseline"


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
