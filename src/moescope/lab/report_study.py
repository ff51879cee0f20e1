"""The study's part of the report: arms against their reference per question, curves, balance, cost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pandas as pd

from moescope.errors import BadInput
from moescope.lab.figures import ALONG, ARMS, CURVES, OVERALL, OVERHEAD
from moescope.lab.study_statistics import UNTRAINED, of_question, with_arm_tables
from moescope.lab.tables import TABLES
from moescope.plotting.style import capital, counted, listed, number
from moescope.reporting.pack import table_payload
from moescope.reporting.untrusted import plot_words
from moescope.reporting.views import drawable, shown_table
from moescope.run import Run
from moescope.verb import Drawable, Finding, KeyNumber, Payload, Section, Selection, Summary, Tables

GUIDE = (
    "Arms are trained under the same seeds and compared with the reference seed by seed, by one endpoint, "
    "validation loss, with a paired t per arm. Better and worse are stated from five seeds on, if p ≤ 0.05 "
    "after Holm's correction for all arms of the question; else the page states the detectable difference. "
    "Noise over validation documents is shown separately and used in no test."
)
QUESTIONS = {
    "main": ("Router comparison", "Validation loss of each arm against {reference} under the same seed."),
    "ablation": ("Ablations", "One part removed at a time; {reference} is complete. Above 0: worse."),
    "sweep": ("Option sweeps", "One option varied, all else fixed; compared with {reference}."),
    "scaling": (
        "Scaling",
        "Several sizes; compared with {reference}, so differences include the effect of size alone.",
    ),
}
COMPARED = (
    *("arm", "verdict", "seeds", "mean", "low", "high", "difference", "difference_low", "difference_high"),
    *("difference_std", "statistic", "degrees_of_freedom", "p_value", "p_adjusted", "hedges_g", "rank_p"),
    "detectable_difference",
)
TRAINED = (
    *("arm", "seed", "question", "status", "validation_loss", "noise_low", "noise_high", "load_cv"),
    *("max_over_mean", "routing_entropy", "unused_share", "dropped_share", "consistency", "usage_sigma"),
    *("kendall_tau", "tokens_per_second", "peak_memory_bytes", "seconds", "message"),
)
BALANCE = (
    *("load_cv", "load_cv_chance", "max_over_mean", "routing_entropy", "routing_entropy_chance"),
    *("unused_share", "dropped_share"),
)
STABILITY = ("consistency", "consistency_chance", "k_of_n", "usage_sigma", "kendall_tau")
COST = (
    *("parameters_total", "parameters_trainable", "parameters_active", "flops_per_token"),
    *("tokens_per_second", "relative_speed", "peak_memory_gb", "seconds"),
)
UNTRUSTED = ("arm", "reference", "router", "domain", "axis", "label", "line")
TARGET_CV = 0.1
MAX_CLAIMS, MAX_OTHER_CLAIMS = 8, 3  # sentences about single arms, of the main and of other questions


def study_tables(run: Run) -> Tables:
    """Return the study's tables with names safe for figures, the rows of the study's reference first.

    What follows from the trainings is made here for a study that was written before these tables existed.
    """
    if "study_comparisons" not in run.tables:
        raise BadInput(f"{run.path}: no comparison in this study yet; repeat its command to finish it")
    tables = {name: run.table(name) for name in run.tables}
    if "study_arms" not in tables:
        tables = with_arm_tables(tables, run.info["reference"])
    for frame in tables.values():
        for column in UNTRUSTED:
            if column in frame:
                frame[column] = frame[column].map(plot_words, na_action="ignore")
    comparisons = tables["study_comparisons"]
    first = comparisons["reference"] == plot_words(run.info["reference"])
    tables["study_comparisons"] = pd.concat([comparisons[first], comparisons[~first]])
    return tables


def select(run: Run, selection: Selection) -> Tables:
    """Return the tables of one question and axis, by default the first ones."""
    tables = study_tables(run)
    question = selection.values.get("question", next(iter(compared_questions(tables)), "main"))
    selected = of_question(tables, question)
    if "study_values" in selected:
        along = selected["study_values"]
        axis = selection.values.get("axis", next(iter(along["axis"]), ""))
        selected["study_values"] = along[along["axis"] == axis]
    return {**selected, **{name: tables[name] for name in ("overhead",) if name in tables}}


def compared_questions(tables: Tables) -> dict[str, Tables]:
    """Return the tables of each question with at least two arms."""
    by_question = {name: of_question(tables, name) for name in questions_of(tables)}
    return {name: part for name, part in by_question.items() if len(part["study_comparisons"]) > 1}


def questions_of(tables: Tables) -> list[str]:
    there = set(tables["study_comparisons"]["question"])
    return [*(name for name in QUESTIONS if name in there), *sorted(there - set(QUESTIONS))]


def reference_of(comparisons: pd.DataFrame) -> str:
    return str(comparisons["reference"].iloc[0])


# --- sections


def sections(run: Run, selection: Selection) -> list[Section]:
    """Return the page's sections: each question, curves, balance and stability, cost."""
    tables = study_tables(run)
    by_question = compared_questions(tables)
    if not by_question:
        raise BadInput(f"{run.path}: a study of one arm has nothing to compare; add an arm")
    first = next(iter(by_question))
    parts = [question_section(part, name, name == first) for name, part in by_question.items()]
    if figures := drawable(CURVES, by_question[first]):
        text = "Loss on held-out text, and routing in training, by step."
        parts.append(Section("curves", "Training curves", text, figures))
    text = "Means over seeds at the end of training, with balanced random routing for comparison."
    payloads = [
        arm_table(tables, BALANCE, "Load at the end of training"),
        arm_table(tables, STABILITY, "Stability over the last checkpoints"),
        table_payload(TABLES["study_runs"], tables["study_runs"], TRAINED, "All trainings"),
    ]
    parts.append(Section("balance", "Load balance and stability", text, [], payloads))
    payloads = [arm_table(tables, COST, "Size, speed and memory")]
    if len(overhead := tables.get("overhead", pd.DataFrame())):
        columns = ("router", "component", "milliseconds", "flops", "share")
        payloads.append(table_payload(TABLES["overhead"], overhead, columns, "All components"))
    text = "Cost of a training, and time of one block. Parallel trainings slow each other down."
    return [*parts, Section("cost", "Cost", text, drawable(OVERHEAD, tables), payloads)]


def question_section(tables: Tables, question: str, first: bool) -> Section:
    title, text = QUESTIONS.get(question, (capital(question), "Each arm against {reference}."))
    comparisons = tables["study_comparisons"]
    figures: list[tuple[Drawable, Tables]] = drawable([*ARMS, *(OVERALL if first else [])], tables)
    for axis, along in tables["study_values"].groupby("axis", sort=False) if "study_values" in tables else ():
        named = [
            replace(cast(Any, spec), title=f"Loss and load by {axis_words(str(axis))}") for spec in ALONG
        ]
        figures += drawable(named, {**tables, "study_values": along})
    text = f"{text.format(reference=reference_of(comparisons))} Paired t per arm, Holm-corrected."
    table = table_payload(
        TABLES["study_comparisons"], comparisons, COMPARED, "All arms against the reference"
    )
    return Section(f"question-{question}", title, text, figures, [table])


def axis_words(axis: str) -> str:
    """Return the axis' last part: epsilon of model.router_options.epsilon."""
    return axis.split(".")[-1].replace("_", " ")


def arm_table(tables: Tables, columns: Sequence[str], title: str) -> Payload:
    """Return means per arm, with how many trainings they are of, or why there are none."""
    names = ("arm", "trainings", "done", "state", *columns)
    return shown_table(TABLES["study_arms"], tables["study_arms"], names, title)


# --- claims


def claims(files: Sequence[Any], runs: list[Run]) -> tuple[list[dict[str, Any]], list[Section]]:
    """Judge the claims of these files by these studies; also return their sections of the page."""
    from moescope.lab.report_claims import claims_page

    tables = [described(study_tables(run), run) for run in runs]
    judged, sections = claims_page(
        files, runs, {str(one["study_name"]["name"].iloc[0]): one for one in tables}
    )
    return json.loads(judged.to_json(orient="records", double_precision=15)), sections


def described(tables: Tables, run: Run) -> Tables:
    """Add the study's name, settings, and the domains that have validation text and no training text."""
    folder = run.path.resolve()
    name = folder.parent.name if folder.name == "run" else folder.name
    data = run.info.get("base", {}).get("data", {})
    trained = set(data.get("domains") or {})
    unseen = [plot_words(domain) for domain in data.get("validation") or {} if domain not in trained]
    return {
        **tables,
        "study_name": pd.DataFrame({"name": [plot_words(name)]}),
        "unseen_domains": pd.DataFrame({"domain": unseen}),
        "study_settings": settings(run.info),
    }


def settings(info: dict[str, Any]) -> pd.DataFrame:
    """Return arm, name, value: steps, tokens per step, checkpoints, learning rate, width, options of the
    router, and whether padding is to be predicted.
    """
    rows = []
    base = info.get("base", {})
    for arm in info.get("arms", []):
        model, train, data = (
            {**base.get(part, {}), **arm.get("overrides", {}).get(part, {})}
            for part in ("model", "train", "data")
        )
        names = ("steps", "sequence_length", "learning_rate", "checkpoint_every")
        values = {name: train.get(name) for name in names} | (model.get("router_options") or {})
        values["d_model"] = model.get("d_model")
        values["tokens_per_step"] = train.get("batch_size", 1) * train.get("sequence_length", 1)
        values["pad_targets"] = int(data.get("layout") == "padded")
        rows += [
            {"arm": plot_words(arm["name"]), "name": name, "value": float(value)}
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        ]
    return pd.DataFrame(rows, columns=["arm", "name", "value"])


# --- words


def guide(run: Run) -> list[str]:
    return [GUIDE]


def page_title(run: Run) -> str:
    return f"{run.name}: a study of {counted(len(run.info['arms']), 'arm')} against {run.info['reference']}"


def coverage(run: Run) -> list[str]:
    runs = run.table("study_runs")
    seeds = sorted(int(seed) for seed in runs["seed"].unique())
    done = int((runs["status"] == "done").sum())
    lines = [
        f"{counted(runs['arm'].nunique(), 'arm')} under {counted(len(seeds), 'seed')} "
        f"({', '.join(map(str, seeds))}): {done} of {counted(len(runs), 'training')} done; reference "
        f"{run.info['reference']}"
    ]
    if base := run.info.get("base", {}):
        model, train = base["model"], base["train"]
        duration = f"{train['steps']:,} steps" if train["steps"] else f"{train['epochs']} epochs in steps"
        lines.append(
            f"base: {counted(model['layers'], 'layer')} of {counted(model['experts'], 'expert')}, width "
            f"{model['d_model']}, {duration} of {train['batch_size'] * train['sequence_length']:,} tokens; "
            f"corpus {run.info.get('corpus', 'unknown')}"
        )
    return lines


def summary(run: Run) -> Summary:
    """Return coverage, key numbers, and what the comparisons support per question."""
    tables = study_tables(run)
    sentences: list[str] = []
    if run.info["status"] != "done":
        sentences.append(
            f"This study is {run.info['status']}: numbers are of the trainings so far. Stopping where it "
            "looks best makes false claims."
        )
    for question in questions_of(tables):
        part = of_question(tables, question)
        found: list[str] = []
        if len(part["study_comparisons"]) > 1:
            found += question_findings(part["study_comparisons"], part["study_runs"], question)
        if question == "sweep":
            found += target_findings(part["study_arms"])
        sentences += [Finding(text, section=f"question-{question}") for text in found]
    sentences += [Finding(text, section="balance") for text in unfinished_findings(tables["study_runs"])]
    first = next(iter(compared_questions(tables).values()), None)
    lead = [Section("lead", "", figures=drawable(ARMS, first))] if first else []
    return Summary(coverage(run), sentences, key_numbers(tables), verdict=verdict(first, tables), lead=lead)


def verdict(first: Tables | None, tables: Tables) -> Finding:
    """Say which arms of the first question differ from the reference, the best one first."""
    rows = tables["study_comparisons"] if first is None else first["study_comparisons"]
    rows = rows[rows["difference"].notna()].sort_values("difference")
    if rows.empty:
        return Finding("No arm can be compared yet.", section="balance")
    reference, claimed = reference_of(rows), rows[rows["verdict"].isin(["better", "worse"])]
    text = f"None of {counted(len(rows), 'arm')} differs from {reference} beyond seeds."
    if len(claimed):
        named = [
            f"{row.arm} {row.verdict} ({number(row.difference)})" for row in claimed.head(4).itertuples()
        ]
        named += [f"{len(claimed) - 4} more"] if len(claimed) > 4 else []
        text = f"{len(claimed)} of {counted(len(rows), 'arm')} differ from {reference}, in nats per token: "
        text += f"{listed(named)}."
    return Finding(text, figure="differences")


def key_numbers(tables: Tables) -> list[KeyNumber]:
    """Return the first question's best difference and its load CV, the detectable difference, progress."""
    runs = tables["study_runs"]
    comparisons = next(iter(compared_questions(tables).values()), tables)["study_comparisons"]
    known = comparisons[comparisons["difference"].notna()]
    done = KeyNumber("Trainings done", int((runs["status"] == "done").sum()), unit=f"of {len(runs)}")
    if known.empty:
        return [done]
    best = known.loc[known["difference"].idxmin()]
    detectable = float(known["detectable_difference"].astype(float).median())
    most = detectable if math.isfinite(detectable) else None
    name, unit = f"{best['arm']} minus {best['reference']}", "nats/token"
    numbers = [KeyNumber(name, best["difference"], 0.0, unit, best["verdict"], "no difference", most)]
    if most is not None:
        numbers.append(KeyNumber("Detectable difference", most, None, unit, "80 % power"))
    means = tables["study_arms"].set_index("arm").loc[best["arm"]]
    cv, chance = (float(means[name]) for name in ("load_cv", "load_cv_chance"))
    if math.isfinite(cv):
        level = chance if math.isfinite(chance) else None
        numbers.append(KeyNumber(f"Load CV of {best['arm']}", cv, level))
    return [*numbers, done]


def question_findings(comparisons: pd.DataFrame, runs: pd.DataFrame, question: str) -> list[str]:
    """State each arm that is better or worse, and for the others the detectable difference."""
    reference, known = reference_of(comparisons), comparisons[comparisons["difference"].notna()]
    label = "" if question == "main" else f"{capital(question)}: "
    limit = MAX_CLAIMS if question == "main" else MAX_OTHER_CLAIMS
    untold = comparisons["verdict"] == UNTRAINED
    without = loss_words(comparisons if known.empty else comparisons[untold], runs)
    if known.empty:
        losses = f"; mean losses: {without} nats per token" if without else " yet"
        return [f"{label}No arm can be compared with {reference}{losses}."]
    claimed = known[known["verdict"].isin(["better", "worse"])]
    claimed = claimed.sort_values("difference", key=abs, ascending=False)
    said = [
        f"{label}{difference_words(row)} nats per token: {row['verdict']} (Holm-corrected for "
        f"{counted(len(known), 'arm')}: {p_words(row['p_adjusted'])}; {counted(int(row['seeds']), 'seed')})."
        for row in claimed.head(limit).sort_values("difference").to_dict("records")
    ]
    if len(claimed) > limit:
        rest = [f"{row.arm} ({row.verdict})" for row in claimed.iloc[limit:].itertuples()]
        said.append(f"{label}Also different from {reference}: {listed(rest)}.")
    most = comparisons.loc[comparisons["arm"] == reference, "seeds"].max()
    groups = {
        verdict: rows for verdict, rows in known.groupby("verdict") if verdict not in ("better", "worse")
    }
    if (rows := groups.get("not distinguishable")) is not None:
        detectable = rows["detectable_difference"].astype(float).dropna()
        ends = dict.fromkeys((number(detectable.min()), number(detectable.max())))
        power = f"; detectable (80 % power): {' to '.join(ends)} nats" if len(detectable) else ""
        said.append(f"{label}Not distinguishable from {reference} with {of_arms(rows)}{power}.")
    if (rows := groups.get("too few seeds to say")) is not None:
        largest = rows.loc[rows["difference"].abs().idxmax()].to_dict()
        said.append(
            f"{label}{of_arms(rows, 'too few to claim anything about ')}. Largest difference: "
            f"{difference_words(largest)} nats per token."
        )
    if (rows := groups.get("no spread over seeds")) is not None:
        said.append(
            f"{label}Every seed gave the same difference from {reference} for {names(rows)}: no test."
        )
    if without:
        said.append(f"{label}Not compared with {reference}: {without} nats per token.")
    if len(rows := known[known["seeds"] < most]):
        said.append(
            f"{label}Missing seeds of {reference}: {names(rows)}, compared on {seeds(rows)}; an arm "
            "that fails where it does badly looks better than it is."
        )
    return said


def loss_words(comparisons: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return the mean loss of each arm that was trained and why it enters no comparison, and the baseline."""
    done = runs[runs["status"] == "done"]
    losses = done["validation_loss"].astype(float).groupby(done["arm"]).mean()
    rows = [row for row in comparisons.itertuples() if row.arm in losses]
    words = ", ".join(f"{row.arm} {number(losses[row.arm])} ({row.verdict})" for row in rows)
    baseline = done["unigram_loss"].astype(float).mean()
    return f"{words}; unigram baseline {number(baseline)}" if words and math.isfinite(baseline) else words


def difference_words(row: dict[str, Any]) -> str:
    """ "spectra minus top2 = −0.049 [−0.055, −0.042]"."""
    low, high = row["difference_low"], row["difference_high"]
    interval = f" [{number(low)}, {number(high)}]" if math.isfinite(low) else ""
    return f"{row['arm']} minus {row['reference']} = {number(row['difference'])}{interval}"


def p_words(p: float) -> str:
    return f"p {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def names(rows: pd.DataFrame) -> str:
    return listed(list(rows["arm"])) if len(rows) <= 4 else counted(len(rows), "arm")


def seeds(rows: pd.DataFrame) -> str:
    low, high = int(rows["seeds"].min()), int(rows["seeds"].max())
    return counted(low, "seed") if low == high else f"{low} to {high} seeds"


def of_arms(rows: pd.DataFrame, words: str = "") -> str:
    return f"{seeds(rows)}: {words}{names(rows)}"


def target_findings(arms: pd.DataFrame) -> list[str]:
    """Count the settings of a sweep that reach the target load CV."""
    cv = arms[arms["question"] == "sweep"].set_index("arm")["load_cv"].astype(float).dropna()
    if cv.empty:
        return []
    return [
        f"Sweep: {int((cv < TARGET_CV).sum())} of {counted(len(cv), 'setting')} "
        f"{'ends' if len(cv) == 1 else 'end'} with a load CV below the target {TARGET_CV}; lowest "
        f"{number(cv.min())} ({cv.idxmin()})."
    ]


def unfinished_findings(runs: pd.DataFrame) -> list[str]:
    said = []
    failed, left = runs[runs["status"] == "failed"], runs[runs["status"] == "not run"]
    total = counted(len(runs), "training")
    if len(failed):
        first = failed.iloc[0]
        why = f": {plot_words(str(first['message']))}" if first["message"] else ""
        said.append(
            f"{len(failed)} of {total} failed; the first, {first['arm']} with seed {first['seed']}{why}."
        )
    if len(left):
        said.append(f"{len(left)} of {total} were not run.")
    return said
