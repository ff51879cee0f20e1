"""A study's part of the report: arms against their reference, question by question.

How trainings went, how even and how steady, at what cost.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.lab.figures_study import ARMS, BY_DOMAIN, NOISE, can_show, power_words, reference_of, told
from moescope.lab.figures_study_axes import ALONG, OVERHEAD, TARGET_CV
from moescope.lab.figures_study_curves import COURSE, can_draw
from moescope.lab.report_study_tables import (
    arms_frame,
    axes_frames,
    balance_table,
    cost_table,
    stability_table,
)
from moescope.plotting.style import FigureSpec, Tables, capital, counted, listed, number
from moescope.reporting.pack import table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.tables import LAB_TABLES, STUDY_TABLES

VIEW = (
    "A study is read by differences: arms are trained under the same seeds, so each is compared with the "
    "reference seed by seed, by one endpoint, the validation loss. Better and worse are said from five "
    "seeds on and where p ≤ 0.05 after Holm's correction for all arms of the question; else the page says "
    "what size of difference would have been seen. Drawing other validation documents is another thing than "
    "training again: that noise is shown apart and used in no test."
)
QUESTIONS = {
    "main": (
        "Which router",
        "The arms by their validation loss, each against {reference} with the same seed.",
    ),
    "ablation": (
        "What each part is worth",
        "One part taken away at a time; {reference} is the whole. Above 0 the part was worth having.",
    ),
    "sweep": (
        "Options at several values",
        "One option moved, all else held; {reference} is what they are compared with.",
    ),
    "scaling": (
        "More experts, larger models",
        (
            "The same at several sizes; {reference} is what they are compared with, so differences hold "
            "what size alone brings."
        ),
    ),
}
COMPARED = [
    "arm",
    "verdict",
    "seeds",
    "mean",
    "low",
    "high",
    "difference",
    "difference_low",
    "difference_high",
    "statistic",
    "degrees_of_freedom",
    "p_value",
    "p_adjusted",
    "test",
    "equal_variances_p",
    "hedges_g",
    "rank_p",
    "detectable_difference",
]
TRAINED = [
    "arm",
    "seed",
    "question",
    "status",
    "validation_loss",
    "noise_low",
    "noise_high",
    "load_cv",
    "max_over_mean",
    "routing_entropy",
    "unused_share",
    "dropped_share",
    "consistency",
    "usage_sigma",
    "kendall_tau",
    "tokens_per_second",
    "peak_memory_bytes",
    "seconds",
    "message",
]
CLAIMS_NAMED = {"main": 8}  # so many sentences at most about single arms of a question
OTHERS_NAMED = 3


# --- tables


def tables_of(run: Run) -> Tables:
    """The study's tables, names of arms fit for figures; and what run.json says of the arms."""
    if "study_comparisons" not in run.tables:
        raise BadInput(
            f"{run.path}: nothing has been compared in this study yet; give its command again to finish it"
        )
    found = {name: run.table(name) for name in (*STUDY_TABLES, *LAB_TABLES) if name in run.tables}
    for frame in found.values():
        for column in ("arm", "reference", "router", "domain"):
            if column in frame:
                frame[column] = frame[column].map(plot_words, na_action="ignore")
    found["study_arms"] = arms_frame(run)
    named = found["study_comparisons"]["reference"] == plot_words(run.info["reference"])
    found["study_comparisons"] = pd.concat([found["study_comparisons"][rows] for rows in (named, ~named)])
    return found  # the study's own reference first: what is not of one question is told beside it


def questions_of(tables: Tables) -> list[str]:
    there = set(tables["study_comparisons"]["question"])
    return [*(name for name in QUESTIONS if name in there), *sorted(there - set(QUESTIONS))]


def of_question(tables: Tables, question: str) -> Tables:
    """The tables with the question's arms and its reference alone."""
    comparisons = tables["study_comparisons"]
    own = comparisons[comparisons["question"] == question]
    arms = set(own["arm"])
    found = {name: frame[frame["arm"].isin(arms)] for name, frame in tables.items() if "arm" in frame}
    return {**found, "study_comparisons": own}


# --- sections


def sections(run: Run) -> list[Section]:
    """The parts of the page.

    Each question, then how trainings went, how even and steady routing was, and the price.
    """
    tables = tables_of(run)
    asked = [name for name in questions_of(tables) if len(of_question(tables, name)["study_comparisons"]) > 1]
    found = [question_section(run, of_question(tables, name), name, first=name == asked[0]) for name in asked]
    if not asked:
        raise BadInput(f"{run.path}: a study of one arm has nothing to compare; add an arm")
    found += course_section(of_question(tables, asked[0]))
    found.append(
        Section(
            "balance",
            "How even, and how steady",
            (
                "Means over seeds at the end of training, random routing beside them. Every cell comes from "
                "a run, or says that there was none."
            ),
            [],
            [
                balance_table(tables),
                stability_table(tables),
                table_payload("study_runs", tables["study_runs"], TRAINED, "Every training"),
            ],
        )
    )
    figures: list[tuple[FigureSpec, Tables]] = []
    if "overhead" in tables and len(tables["overhead"]):
        figures = [(OVERHEAD, tables)]
        columns = ["router", "component", "milliseconds", "flops", "share"]
        payloads = [
            cost_table(tables),
            table_payload("overhead", tables["overhead"], columns, "Every component"),
        ]
    else:
        payloads = [cost_table(tables)]
    words = (
        "What a training takes, and where a block's time goes. Trainings that ran side by side slowed each "
        "other down."
    )
    found.append(Section("cost", "What it costs", words, figures, payloads))
    return found


def question_section(run: Run, tables: Tables, question: str, first: bool) -> Section:
    title, words = QUESTIONS.get(question, (capital(question), "The arms, each against {reference}."))
    comparisons = tables["study_comparisons"]
    known = told(comparisons)
    figures: list[tuple[FigureSpec, Tables]] = []
    if len(known) or comparisons["mean"].notna().any():
        figures = [(spec, tables) for spec in ARMS]
        figures += [(spec, tables) for spec in (NOISE, BY_DOMAIN) if first and can_show(spec, tables)]
        for places in axes_frames(run, tables, question):
            along = {**tables, "study_axes": places}
            figures += [
                (spec, along)
                for spec, column in zip(ALONG, ("validation_loss", "load_cv"), strict=True)
                if measured(along, column)
            ]
    return Section(
        f"question-{question}",
        title,
        f"{words.format(reference=reference_of(comparisons))} {how_tested(comparisons)}".strip(),
        figures,
        [table_payload("study_comparisons", comparisons, COMPARED, "Every arm against the reference")],
    )


def measured(tables: Tables, column: str) -> bool:
    """Whether the axis has at least two values with that number."""
    runs = tables["study_runs"]
    done = runs[(runs["status"] == "done") & runs[column].notna()]
    return tables["study_axes"].merge(done, on="arm")["value"].nunique() > 1


def how_tested(comparisons: pd.DataFrame) -> str:
    """Which test was used, and why."""
    known = told(comparisons)
    equal = comparisons["equal_variances_p"].dropna()
    if known["test"].isna().all():
        return ""
    if (known["test"] == "blocked").any():
        return (
            f"All arms share one residual variance within seeds ({number(known['degrees_of_freedom'].max())} "
            f"degrees of freedom); the hypothesis that they scatter alike has p {number(equal.iloc[0])}, and "
            "would be given up below 0.1."
        )
    if (known["test"] == "paired t, shared seeds").all():
        return (
            "No arm has all of the reference's seeds, so each is compared by a paired t on those it shares."
        )
    if len(equal):
        return (
            f"Arms scatter differently within seeds (p {number(equal.iloc[0])}), so each is compared with "
            "the reference by a paired t of its own."
        )
    return "With two arms the test is a paired t."


def course_section(tables: Tables) -> list[Section]:
    """Curves of the first question's trainings."""
    figures = [(spec, tables) for spec in COURSE if can_draw(spec, tables)]
    words = "Loss on text the models have not seen, and routing in the training's own passes, over the steps."
    return [Section("course", "How the trainings went", words, figures)] if figures else []


# --- findings


def findings(run: Run) -> list[str]:
    """What may be said of the arms, and what may not."""
    tables = tables_of(run)
    found = []
    if run.info["status"] != "done":
        found.append(
            f"This study is {run.info['status']}: what is said here is of the trainings so far. Stopping a "
            "study where it looks best makes false claims; judge it by its end."
        )
    for question in questions_of(tables):
        own = of_question(tables, question)
        if len(own["study_comparisons"]) > 1:
            found += question_findings(own["study_comparisons"], question)
        if question == "sweep":
            found += target_findings(own["study_runs"])
    return [*found, *unfinished_findings(tables["study_runs"])]


def question_findings(comparisons: pd.DataFrame, question: str) -> list[str]:
    """One sentence for every arm that may be called better or worse, one for those that may not.

    With the difference that would have been seen.
    """
    reference, known = reference_of(comparisons), told(comparisons)
    label, most = (
        "" if question == "main" else f"{capital(question)}: ",
        CLAIMS_NAMED.get(question, OTHERS_NAMED),
    )
    if known.empty:
        return [f"{label}Nothing can be compared with {reference} yet."]
    found = []
    claimed = known[known["verdict"].isin(["better", "worse"])].sort_values(
        "difference", key=abs, ascending=False
    )
    for row in claimed.head(most).sort_values("difference").to_dict("records"):
        found.append(
            f"{label}{row['arm']} is {number(abs(row['difference']))} nats a token {row['verdict']} than "
            f"{reference} (95 % {interval_words(row)}; {p_words(row['p_adjusted'])} after Holm for "
            f"{counted(len(known), 'arm')}, {counted(int(row['seeds']), 'seed')})."
        )
    if len(claimed) > most:
        rest = claimed.iloc[most:]
        found.append(
            f"{label}told from {reference}, too: "
            f"{listed([f'{row.arm} ({row.verdict})' for row in rest.itertuples()])}."
        )
    alike = known[known["verdict"] == "not distinguishable"]
    if len(alike):
        several = len(alike) > 1 or not len(claimed)
        who = (
            f"{'no' if label else 'No'} {'other ' if len(claimed) else ''}arm can"
            if several
            else f"{alike['arm'].iloc[0]} cannot"
        )
        found.append(f"{label}{who} be told from {reference} with {seeds_words(alike)}{power_words(alike)}.")
    few = known[known["verdict"] == "too few seeds to say"]
    if len(few):
        near = few.loc[few["difference"].abs().idxmax()]
        found.append(
            (
                f"{label}{seeds_words(few)} {'is' if few['seeds'].max() == 1 else 'are'} too few to say "
                f"anything of {arms_words(few)}: nothing is claimed. The largest difference from {reference} "
                f"is {near['arm']}'s, {number(near['difference'])} nats"
            )
            + (f" (95 % {interval_words(near)})." if math.isfinite(near["difference_low"]) else ".")
        )
    flat = known[known["verdict"] == "no spread over seeds"]
    if len(flat):
        found.append(
            f"{label}every seed gave the same difference from {reference} for {arms_words(flat)}: there is "
            "nothing to test with."
        )
    part = known[known["test"] == "paired t, shared seeds"]
    if len(part):
        found.append(
            f"{label}{arms_words(part)} {'lacks' if len(part) == 1 else 'lack'} seeds of {reference} and "
            f"{'is' if len(part) == 1 else 'are'} compared on {seeds_words(part)}; an arm that fails where "
            "it does badly looks better than it is."
        )
    return found


def p_words(p: float) -> str:
    return f"p {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def interval_words(row: Any) -> str:
    return f"{number(row['difference_low'])} to {number(row['difference_high'])}"


def arms_words(rows: pd.DataFrame) -> str:
    return listed(list(rows["arm"])) if len(rows) <= 4 else counted(len(rows), "arm")


def seeds_words(rows: pd.DataFrame) -> str:
    low, high = int(rows["seeds"].min()), int(rows["seeds"].max())
    return counted(low, "seed") if low == high else f"{low} to {high} seeds"


def target_findings(runs: pd.DataFrame) -> list[str]:
    """How many settings of a sweep reach the load CV that is aimed at."""
    own = (
        runs[(runs["status"] == "done") & (runs["question"] == "sweep")]
        .groupby("arm")["load_cv"]
        .mean()
        .dropna()
    )
    if own.empty:
        return []
    reached = own[own < TARGET_CV]
    return [
        (
            f"Sweep: {len(reached)} of {counted(len(own), 'setting')} end with a load CV below {TARGET_CV}, "
            f"which is aimed at; the lowest is {number(own.min())} ({own.idxmin()})."
        )
    ]


def unfinished_findings(runs: pd.DataFrame) -> list[str]:
    found = []
    failed, left = runs[runs["status"] == "failed"], runs[runs["status"] == "not run"]
    if len(failed):
        first = failed.iloc[0]
        why = f": {plot_words(str(first['message']))}" if first["message"] else ""
        found.append(
            f"{len(failed)} of {counted(len(runs), 'training')} failed; the first, {first['arm']} with seed "
            f"{first['seed']}{why}."
        )
    if len(left):
        found.append(f"{len(left)} of {counted(len(runs), 'training')} were not run.")
    return found


# --- the rest of the page


def coverage(run: Run) -> list[str]:
    runs = run.table("study_runs")
    seeds = sorted(int(seed) for seed in runs["seed"].unique())
    done = int((runs["status"] == "done").sum())
    lines = [
        (
            f"{counted(runs['arm'].nunique(), 'arm')} under {counted(len(seeds), 'seed')} "
            f"({', '.join(map(str, seeds))}): {done} of {counted(len(runs), 'training')} done; reference "
            f"{run.info['reference']}"
        )
    ]
    base = run.info.get("base", {})
    if base:
        model, train = base["model"], base["train"]
        lines.append(
            f"unless an arm says otherwise: {counted(model['layers'], 'layer')} of "
            f"{counted(model['experts'], 'expert')}, width {model['d_model']}, {train['steps']:,} steps of "
            f"{train['batch_size'] * train['sequence_length']:,} tokens; corpus "
            f"{run.info.get('corpus', 'unknown')}"
        )
    return lines


def command(run: Run) -> str:
    """The command that makes the study again; its own folder holds all of it where there was no file."""
    config = (run.info.get("asked") or {}).get("config")
    return shlex.join(
        ["moescope", "study", config] if config else ["moescope", "study", "--resume", "--out", str(run.path)]
    )


def title(run: Run) -> str:
    return f"{run.name}: a study of {counted(len(run.info['arms']), 'arm')} against {run.info['reference']}"


STUDY = RunKind("study", (*STUDY_TABLES, *LAB_TABLES), findings, sections, command, coverage, VIEW, title)
