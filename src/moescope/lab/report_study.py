"""The study's part of the report: arms against their reference per question, curves, balance, cost."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.lab.figures_study import (
    ALONG,
    ARMS,
    OVERALL,
    OVERHEAD,
    TARGET_CV,
    compared,
    detectable_text,
    reference_of,
)
from moescope.lab.figures_study_curves import CURVE_FIGURES
from moescope.lab.report_results import results_sections
from moescope.lab.results_conditions import settings
from moescope.lab.tables import TABLES
from moescope.plotting.style import capital, counted, listed, number
from moescope.reporting.pack import plain_table, table_payload
from moescope.reporting.untrusted import plot_words
from moescope.run import Run
from moescope.verb import FigureSpec, Finding, KeyNumber, Section, Selection, Summary, Tables

GUIDE = (
    "Arms are trained under the same seeds and compared with the reference seed by seed, by one endpoint, "
    "validation loss, with a paired t per arm. Better and worse are stated from five seeds on, if p ≤ 0.05 "
    "after Holm's correction for all arms of the question; else the page states the detectable difference. "
    "Noise over validation documents is shown separately and used in no test."
)
QUESTIONS = {
    "main": ("Router comparison", "Validation loss of each arm against {reference} under the same seed."),
    "ablation": (
        "Ablations",
        "One part removed at a time; {reference} is complete. Above 0: worse.",
    ),
    "sweep": ("Option sweeps", "One option varied, all else fixed; compared with {reference}."),
    "scaling": (
        "Scaling",
        "Several sizes; compared with {reference}, so differences include the effect of size alone.",
    ),
}
COMPARED = [
    "arm", "verdict", "seeds", "mean", "low", "high", "difference", "difference_low", "difference_high",
    "difference_std", "statistic", "degrees_of_freedom", "p_value", "p_adjusted", "hedges_g", "rank_p",
    "detectable_difference",
]  # fmt: skip
TRAINED = [
    "arm", "seed", "question", "status", "validation_loss", "noise_low", "noise_high", "load_cv",
    "max_over_mean", "routing_entropy", "unused_share", "dropped_share", "consistency", "usage_sigma",
    "kendall_tau", "tokens_per_second", "peak_memory_bytes", "seconds", "message",
]  # fmt: skip
MAX_CLAIMS, MAX_OTHER_CLAIMS = 8, 3  # sentences about single arms, of the main and of other questions
Heads = list[tuple[str, str, str]]  # glossary entry or name, what stands in the head, kind


def study_tables(run: Run) -> Tables:
    """Return the study's tables with names safe for figures, the rows of the study's reference first."""
    if "study_comparisons" not in run.tables:
        raise BadInput(f"{run.path}: no comparison in this study yet; repeat its command to finish it")
    tables = {name: run.table(name) for name in run.tables}
    for frame in tables.values():
        for column in ("arm", "reference", "router", "domain", "axis", "label"):
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
    frames = {str(frame["axis"].iloc[0]): frame for frame in axis_frames(selected, question)}
    axis = selection.values.get("axis", next(iter(frames), ""))
    selected.pop("study_axes", None)
    others = {"study_axes": frames[axis]} if axis in frames else {}
    return {**selected, **others, **{name: tables[name] for name in ("overhead",) if name in tables}}


def questions_of(tables: Tables) -> list[str]:
    there = set(tables["study_comparisons"]["question"])
    return [*(name for name in QUESTIONS if name in there), *sorted(there - set(QUESTIONS))]


def of_question(tables: Tables, question: str) -> Tables:
    """Return the tables with only the question's arms and its reference."""
    comparisons = tables["study_comparisons"]
    rows = comparisons[comparisons["question"] == question]
    arms = set(rows["arm"])
    others = {name: frame[frame["arm"].isin(arms)] for name, frame in tables.items() if "arm" in frame}
    return {**others, "study_comparisons": rows}


def compared_questions(tables: Tables) -> dict[str, Tables]:
    """Return the tables of each question with at least two arms."""
    by_question = {name: of_question(tables, name) for name in questions_of(tables)}
    return {name: part for name, part in by_question.items() if len(part["study_comparisons"]) > 1}


def sections(run: Run, selection: Selection) -> list[Section]:
    """Return the page's sections: each question, curves, balance and stability, cost."""
    tables = study_tables(run)
    by_question = compared_questions(tables)
    if not by_question:
        raise BadInput(f"{run.path}: a study of one arm has nothing to compare; add an arm")
    first = next(iter(by_question))
    parts = [question_section(part, name, name == first) for name, part in by_question.items()]
    if parts[0].figures:
        parts.insert(0, Section("overview", parts[0].title, figures=parts[0].figures[:1], tab="overview"))
    figures = [(spec, by_question[first]) for spec in CURVE_FIGURES if spec.can_draw(by_question[first])]
    if figures:
        text = "Loss on held-out text, and routing in training, by step."
        parts.append(Section("curves", "Training curves", text, figures))
    text = "Means over seeds at the end of training, with balanced random routing for comparison."
    trainings = table_payload(TABLES["study_runs"], tables["study_runs"], TRAINED, "All trainings")
    payloads = [balance_table(tables), stability_table(tables), trainings]
    parts.append(Section("balance", "Load balance and stability", text, [], payloads))
    figures, payloads = [], [cost_table(tables)]
    if OVERHEAD.can_draw(tables):
        figures = [(OVERHEAD, tables)]
        columns = ["router", "component", "milliseconds", "flops", "share"]
        payloads.append(table_payload(TABLES["overhead"], tables["overhead"], columns, "All components"))
    text = "Cost of a training, and time of one block. Parallel trainings slow each other down."
    parts.append(Section("cost", "Cost", text, figures, payloads))
    return parts


def overlay(runs: list[Run]) -> list[Section]:
    """Return the page "Results", from all studies together."""
    return results_sections([described(study_tables(run), run) for run in runs])


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


def question_section(tables: Tables, question: str, first: bool) -> Section:
    title, text = QUESTIONS.get(question, (capital(question), "Each arm against {reference}."))
    comparisons = tables["study_comparisons"]
    figures: list[tuple[FigureSpec, Tables]] = []
    figures += [(spec, tables) for spec in (*ARMS, *(OVERALL if first else [])) if spec.can_draw(tables)]
    for places in axis_frames(tables, question):
        along = {**tables, "study_axes": places}
        figures += [(spec, along) for spec in ALONG if spec.can_draw(along)]
    text = f"{text.format(reference=reference_of(comparisons))} Paired t per arm, Holm-corrected."
    table = table_payload(
        TABLES["study_comparisons"], comparisons, COMPARED, "All arms against the reference"
    )
    return Section(f"question-{question}", title, text, figures, [table])


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
            found += question_findings(part["study_comparisons"], question)
        if question == "sweep":
            found += target_findings(part["study_runs"])
        sentences += [Finding(text, section=f"question-{question}") for text in found]
    unfinished = unfinished_findings(tables["study_runs"])
    sentences += [Finding(text, section="balance") for text in unfinished]
    return Summary(coverage(run), sentences, key_numbers(tables))


def key_numbers(tables: Tables) -> list[KeyNumber]:
    """Return the first question's best difference and its load CV, the detectable difference, progress."""
    runs, questions = tables["study_runs"], compared_questions(tables)
    comparisons = next(iter(questions.values()), tables)["study_comparisons"]
    reference, known = reference_of(comparisons), compared(comparisons)
    done = KeyNumber("Trainings done", int((runs["status"] == "done").sum()), unit=f"of {len(runs)}")
    if known.empty:
        return [done]
    best = known.loc[known["difference"].idxmin()]
    detectable = float(known["detectable_difference"].astype(float).median())
    numbers = [
        KeyNumber(
            f"{best['arm']} minus {reference}",
            best["difference"],
            0.0,
            "nats/token",
            best["verdict"],
            "no difference",
            detectable if math.isfinite(detectable) else None,
        )
    ]
    if math.isfinite(detectable):
        numbers.append(KeyNumber("Detectable difference", detectable, None, "nats/token", "80 % power"))
    means = arm_means(tables).loc[best["arm"]]
    if math.isfinite(means["load_cv"]):
        chance = means["load_cv_chance"] if math.isfinite(means["load_cv_chance"]) else None
        numbers.append(KeyNumber(f"Load CV of {best['arm']}", means["load_cv"], chance))
    return [*numbers, done]


def guide(run: Run) -> list[str]:
    return [GUIDE]


def question_findings(comparisons: pd.DataFrame, question: str) -> list[str]:
    """State each arm that is better or worse, and for the others the detectable difference."""
    reference, known = reference_of(comparisons), compared(comparisons)
    label = "" if question == "main" else f"{capital(question)}: "
    limit = MAX_CLAIMS if question == "main" else MAX_OTHER_CLAIMS
    if known.empty:
        return [f"{label}No arm can be compared with {reference} yet."]
    sentences = []
    claimed = known[known["verdict"].isin(["better", "worse"])]
    claimed = claimed.sort_values("difference", key=abs, ascending=False)
    for row in claimed.head(limit).sort_values("difference").to_dict("records"):
        sentences.append(
            f"{label}{row['arm']} is {number(abs(row['difference']))} nats per token {row['verdict']} than "
            f"{reference} (95 % {format_interval(row)}; Holm-corrected for {counted(len(known), 'arm')}: "
            f"{format_p(row['p_adjusted'])}; {counted(int(row['seeds']), 'seed')})."
        )
    if len(claimed) > limit:
        rest = [f"{row.arm} ({row.verdict})" for row in claimed.iloc[limit:].itertuples()]
        sentences.append(f"{label}also different from {reference}: {listed(rest)}.")
    alike = known[known["verdict"] == "not distinguishable"]
    if len(alike):
        seeds, detectable = seed_range(alike), detectable_text(alike)
        sentences.append(
            f"{label}not distinguishable from {reference} with {seeds}: {arm_list(alike)}{detectable}."
        )
    few = known[known["verdict"] == "too few seeds to say"]
    if len(few):
        largest = few.loc[few["difference"].abs().idxmax()]
        interval = f" (95 % {format_interval(largest)})" if math.isfinite(largest["difference_low"]) else ""
        sentences.append(
            f"{label}{seed_range(few)}: too few to claim anything about {arm_list(few)}. Largest difference "
            f"from {reference}: {largest['arm']}, {number(largest['difference'])} nats{interval}."
        )
    flat = known[known["verdict"] == "no spread over seeds"]
    if len(flat):
        sentences.append(
            f"{label}every seed gave the same difference from {reference} for {arm_list(flat)}: no test."
        )
    partial = known[known["seeds"] < comparisons.loc[comparisons["arm"] == reference, "seeds"].max()]
    if len(partial):
        sentences.append(
            f"{label}missing seeds of {reference}: {arm_list(partial)}, compared on {seed_range(partial)}; "
            "an arm that fails where it does badly looks better than it is."
        )
    # a sentence begins with a capital letter, unless it begins with the name of an arm
    arms = tuple(f"{arm} is " for arm in known["arm"])
    return [sentence if sentence.startswith(arms) else capital(sentence) for sentence in sentences]


def format_p(p: float) -> str:
    return f"p {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def format_interval(row: Any) -> str:
    return f"{number(row['difference_low'])} to {number(row['difference_high'])}"


def arm_list(rows: pd.DataFrame) -> str:
    return listed(list(rows["arm"])) if len(rows) <= 4 else counted(len(rows), "arm")


def seed_range(rows: pd.DataFrame) -> str:
    low, high = int(rows["seeds"].min()), int(rows["seeds"].max())
    return counted(low, "seed") if low == high else f"{low} to {high} seeds"


def target_findings(runs: pd.DataFrame) -> list[str]:
    """Count the settings of a sweep that reach the target load CV."""
    done = runs[(runs["status"] == "done") & (runs["question"] == "sweep")]
    cv = done.groupby("arm")["load_cv"].mean().dropna()
    if cv.empty:
        return []
    return [
        f"Sweep: {int((cv < TARGET_CV).sum())} of {counted(len(cv), 'setting')} "
        f"{'ends' if len(cv) == 1 else 'end'} with a load CV below the "
        f"target {TARGET_CV}; lowest {number(cv.min())} ({cv.idxmin()})."
    ]


def unfinished_findings(runs: pd.DataFrame) -> list[str]:
    sentences = []
    failed, left = runs[runs["status"] == "failed"], runs[runs["status"] == "not run"]
    total = counted(len(runs), "training")
    if len(failed):
        first = failed.iloc[0]
        why = f": {plot_words(str(first['message']))}" if first["message"] else ""
        sentences.append(
            f"{len(failed)} of {total} failed; the first, {first['arm']} with seed {first['seed']}{why}."
        )
    if len(left):
        sentences.append(f"{len(left)} of {total} were not run.")
    return sentences


def coverage(run: Run) -> list[str]:
    runs = run.table("study_runs")
    seeds = sorted(int(seed) for seed in runs["seed"].unique())
    done = int((runs["status"] == "done").sum())
    lines = [
        f"{counted(runs['arm'].nunique(), 'arm')} under {counted(len(seeds), 'seed')} "
        f"({', '.join(map(str, seeds))}): {done} of {counted(len(runs), 'training')} done; reference "
        f"{run.info['reference']}"
    ]
    base = run.info.get("base", {})
    if base:
        model, train = base["model"], base["train"]
        duration = f"{train['steps']:,} steps" if train["steps"] else f"{train['epochs']} epochs in steps"
        lines.append(
            f"base: {counted(model['layers'], 'layer')} of "
            f"{counted(model['experts'], 'expert')}, width {model['d_model']}, {duration} of "
            f"{train['batch_size'] * train['sequence_length']:,} tokens; corpus "
            f"{run.info.get('corpus', 'unknown')}"
        )
    return lines


def page_title(run: Run) -> str:
    return f"{run.name}: a study of {counted(len(run.info['arms']), 'arm')} against {run.info['reference']}"


# --- tables of arms


def axis_frames(tables: Tables, question: str) -> list[pd.DataFrame]:
    """Return one frame (arm, axis, value, line) per numeric axis; `line` is the position on the other axes.

    Named sizes are placed at their active parameters.
    """
    rows = tables.get("study_axes")
    if rows is None or rows.empty:
        return []
    active = tables["study_runs"].groupby("arm")["parameters_active"].first().astype(float)
    frames = []
    for axis, on_axis in rows.groupby("axis", sort=False):
        named = on_axis["value"].isna().any()
        if named and (question != "scaling" or axis == "router"):
            continue
        others = rows[rows["axis"] != axis]
        labels = others["label"].where(others["axis"] == "router", others["axis"] + " " + others["label"])
        lines = labels.groupby(others["arm"]).agg(", ".join)
        frame = pd.DataFrame(
            {
                "arm": on_axis["arm"],
                "axis": f"active parameters ({axis})" if named else axis,
                "value": on_axis["arm"].map(active) if named else on_axis["value"].astype(float),
                "line": on_axis["arm"].map(lines).fillna(""),
            }
        )
        if frame["value"].nunique() > 1:
            frames.append(frame.dropna().reset_index(drop=True))
    return frames


def balance_table(tables: Tables) -> dict[str, Any]:
    """Load at the end of training, with the level of balanced random routing over as many tokens."""
    heads: Heads = [
        ("load_cv", "load CV", "load_cv"),
        ("load_cv_chance", "balanced random routing", "load_cv_chance"),
        ("study_runs.max_over_mean", "max/mean", "max_over_mean"),
        ("study_runs.routing_entropy", "routing entropy", "routing_entropy"),
        ("routing_entropy_chance", "uniform router", "routing_entropy_chance"),
        ("unused_share", "unused experts", "unused_share"),
        ("dropped_share", "dropped", "dropped_share"),
    ]
    return arm_table("balance", "Load at the end of training", tables, heads)


def stability_table(tables: Tables) -> dict[str, Any]:
    heads: Heads = [
        ("consistency", "consistency", "consistency"),
        ("k_of_n", "chance level k/n", "k_of_n"),
        ("study_runs.usage_sigma", "usage σ", "usage_sigma"),
        ("study_runs.kendall_tau", "Kendall τ (chance level 0)", "kendall_tau"),
    ]
    return arm_table("stability_of_arms", "Stability over the last checkpoints", tables, heads)


def cost_table(tables: Tables) -> dict[str, Any]:
    heads: Heads = [
        ("parameters_total", "parameters", "parameters_total"),
        ("parameters_trainable", "trained", "parameters_trainable"),
        ("parameters_active", "active", "parameters_active"),
        ("flops_per_token", "FLOPs per token", "flops_per_token"),
        ("study_runs.tokens_per_second", "tokens/s", "tokens_per_second"),
        ("relative_speed", "times the reference", "relative_speed"),
        ("study_runs.peak_memory_bytes", "peak memory, GB", "peak_gb"),
        ("seconds", "seconds", "seconds"),
    ]
    return arm_table("cost_of_arms", "Size, speed and memory", tables, heads)


KNOWN_BEFORE = (
    "parameters_total", "parameters_trainable", "parameters_active", "flops_per_token", "k_of_n",
)  # fmt: skip


def arm_table(name: str, title: str, tables: Tables, heads: Heads) -> dict[str, Any]:
    """Return one row per arm: means over its finished trainings, or why there is none."""
    runs = tables["study_runs"]
    means = arm_means(tables)
    rows = []
    for arm in dict.fromkeys(runs["arm"]):
        trainings = runs[runs["arm"] == arm]
        done = int((trainings["status"] == "done").sum())
        why = "" if done else "failed" if (trainings["status"] == "failed").any() else "not run"
        cells = [
            why if why and column not in KNOWN_BEFORE else means.loc[arm].get(column, math.nan)
            for _, _, column in heads
        ]
        rows.append([arm, f"{done} of {len(trainings)}", *cells])
    columns = [("arm", "arm", "text"), ("study_runs.status", "seeds done", "text")]
    columns += [(entry, head, "float") for entry, head, _ in heads]
    return plain_table(name, title, columns, rows)


def arm_means(tables: Tables) -> pd.DataFrame:
    """Return means over finished trainings by arm."""
    runs = tables["study_runs"]
    numbers = [
        column for column in runs.columns if column not in ("arm", "seed", "question", "status", "message")
    ]
    runs = runs.astype(dict.fromkeys(numbers, float))
    means = runs[runs["status"] == "done"].groupby("arm")[numbers].mean().reindex(runs["arm"].unique())
    before = [column for column in KNOWN_BEFORE if column in numbers]
    means[before] = runs.groupby("arm")[before].first()
    sizes = runs.groupby("arm")[["top_k", "n_experts"]].first().reindex(means.index)
    means["k_of_n"] = sizes["top_k"] / sizes["n_experts"]
    means["peak_gb"] = means["peak_memory_bytes"] / 1e9
    reference = str(tables["study_comparisons"]["reference"].iloc[0])
    means["relative_speed"] = means["tokens_per_second"] / means["tokens_per_second"].get(reference, math.nan)
    return means
