"""A training's part of the report: losses, load balance, router gradients, keys, speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.lab.figures import BASE_LOSSES, LOAD_BY_RUN, LOSS_BY_RUN, LOSS_GAP, LOSSES, SPEED
from moescope.lab.tables import TRAIN_TABLES
from moescope.plotting.style import byte_size, counted, listed, number
from moescope.reporting.pack import plain, table_payload
from moescope.reporting.page import run_names
from moescope.reporting.untrusted import plot_words
from moescope.reporting.views import drawable
from moescope.routing.report_monitor import (
    STEP_COLUMNS,
    alert_findings,
    diagnostic_sections,
    gradient_sections,
    key_numbers,
    load_figures,
    load_findings,
    load_section,
    load_verdict,
)
from moescope.run import Run
from moescope.verb import (
    Drawable,
    Finding,
    KeyNumber,
    LayerCards,
    Section,
    Selection,
    Summary,
    Tables,
    all_rows,
)

SHOWN_TASKS = 5  # in the summary
BASE_COLUMNS = (
    *("model", "domain", "documents", "tokens", "loss"),
    *("difference", "difference_low", "difference_high"),
    *("trained_minus", "trained_minus_low", "trained_minus_high"),
)
BASE_SECTION = (
    *("base", "Against the untouched model"),
    "Loss on held-out documents, by domain, against the untouched model.",
)
TASK_SECTION = "tasks", "Tasks", "Results of lm-eval for the base and the trained model."
LOSS_SECTION = "losses", "Training curves", "Loss on held-out text, by step and by domain."
KEY_SECTION = "keys", "Keys", "Load and keys of the middle layer; chance: random routing, random keys."
KEY_COLUMNS = ("layer", "metric", "value", "chance", "chance_spread", "collapse")


def guide(run: Run) -> list[str]:
    return [
        "The validation loss is compared with two baselines: uniform (every token equally likely) and "
        "unigram (token frequencies). Load balance and routing decisions are counted in the training "
        "passes, one point per window of steps; their chance level is random routing."
    ]


def select(run: Run, selection: Selection) -> Tables:
    """Return the tables with names of domains that are safe in figures.

    Losses between two logged steps, and of an earlier version baselines and gains, follow from evaluations.
    """
    tables = all_rows(run, selection)
    for frame in tables.values():
        if "domain" in frame:
            frame["domain"] = frame["domain"].map(plot_words)
    if {"steps", "evaluations"} <= set(tables):
        rows = tables["evaluations"].astype({"gain": float})
        whole = all_domains(rows).set_index("step").rename(columns={"loss": "validation_loss"})
        known = whole[["validation_loss", "unigram_loss", "uniform_loss"]]
        steps = tables["steps"].astype(dict.fromkeys(known, float)).set_index("step").combine_first(known)
        tables["steps"] = steps.reset_index()[list(tables["steps"])]
        gain = rows["gain"].fillna(rows["unigram_loss"] - rows["loss"])
        tables["evaluations"] = rows.assign(gain=gain)
    return tables


def all_domains(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the evaluations of all domains together, in order of steps."""
    return evaluations[evaluations["domain"] == ""].sort_values("step")


def summary(run: Run) -> Summary:
    """Return validation loss against its baselines, load balance and alerts."""
    if "evaluations" not in run.tables or not len(run.table("evaluations")):
        return Summary(coverage(run), ["No evaluation yet.", *status(run)])
    rows = run.table("evaluations")
    first, last = all_domains(rows).iloc[[0, -1]].to_dict("records")
    loss, unigram = float(last["loss"]), float(last["unigram_loss"])
    worse = "worse than at the start" if loss > first["loss"] else ""
    text = (
        f"Validation loss: {number(loss)} nats per token after {int(last['step']):,} steps"
        f"{worse and f', {worse}'}; {number(first['loss'])} before training (unigram baseline: "
        f"{number(unigram)}, uniform: {number(last['uniform_loss'])}).{other_sample(run)}"
    )
    findings: list[str] = [Finding(text, figure="loss_by_step")]
    final = rows[(rows["step"] == last["step"]) & (rows["domain"] != "")]
    behind = final.loc[final["loss"] >= final["unigram_loss"], "domain"]
    if len(behind):
        text = f"No better than the unigram baseline: {listed(list(behind))}."
        findings.append(Finding(text, figure="gain_by_domain"))
    findings = [*base_findings(run), *task_findings(run), *findings, *status(run)]
    word = worse or ("learned" if loss < unigram else "no better")
    numbers = [KeyNumber("Validation loss", loss, unigram, "nats per token", word, "unigram baseline")]
    if is_routed(run):
        chosen = run.info["router_facts"]["experts_choose"]
        findings += load_findings(run, ", by construction: experts choose tokens" if chosen else "")
        numbers += key_numbers(run)
    verdict = " ".join(filter(None, (verdict_words(first, last), load_verdict(run))))
    tables = select(run, Selection())
    figures = [*drawable(LOSSES[:1], tables), *load_figures(run)]
    lead = [Section("lead", "", figures=figures)] if figures else []
    steps = tables["steps"]["tokens_per_second"].dropna() if "steps" in tables else pd.Series()
    if len(steps):
        numbers.append(KeyNumber("Training speed", float(steps.iloc[-1]), unit="tokens/s"))
    found = [*findings, *alert_findings(run)]
    return Summary(coverage(run), found, numbers, verdict=Finding(verdict, figure="loss_by_step"), lead=lead)


def verdict_words(first: dict[str, Any], last: dict[str, Any]) -> str:
    """Say whether the model learned: loss before and after, and the unigram baseline."""
    loss, unigram = float(last["loss"]), float(last["unigram_loss"])
    learned = loss < unigram and loss < first["loss"]
    base = f"unigram baseline {number(unigram)}"
    change = f"validation loss {number(first['loss'])} → {number(loss)} nats per token"
    after = f"in {int(last['step']):,} steps" if last["step"] else "before training"
    return f"{'It learned' if learned else 'It has not learned'}: {change} {after} ({base})."


def base_findings(run: Run) -> list[str]:
    """Compare a base after training with the untouched model, on the same held-out documents."""
    if "base_losses" not in run.tables:
        return []
    rows = run.table("base_losses").query("domain == '' and model != 'untouched'").set_index("model")
    reference = "untouched dense model" if "upcycled" in rows.index else "untouched model"
    findings: list[str] = []
    for name, row in rows.drop("upcycled", errors="ignore").iterrows():
        named = "Trained model" if name == "trained" else f"Control ({name})"
        text = (
            f"{named}: {number(row['loss'])} nats per token on "
            f"{counted(row['documents'], 'held-out document')}; minus the {reference} "
            f"{difference_words(row, 'difference')}"
        )
        if name != "trained":
            text += f"; the trained model minus this control {difference_words(row, 'trained_minus')}"
        findings.append(Finding(f"{text} (one training).", figure="base_losses"))
    return findings


def difference_words(row: Any, column: str) -> str:
    """Return a difference of losses with its interval: "= −0.05 [−0.07, −0.03]: better"."""
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    few = " (no interval: it needs 20 documents and two per domain)"
    interval = f" [{number(low)}, {number(high)}]" if low == low else few
    word = ": better" if high < 0 else ": worse" if low > 0 else ""
    return f"= {number(row[column])}{interval}{word}"


def task_findings(run: Run) -> list[str]:
    """Give the first metric of each of the first tasks, after training and before."""
    if "task_results" not in run.tables:
        return []
    rows = run.table("task_results").drop_duplicates("task").head(SHOWN_TASKS)
    return [
        f"{row.task}: {row.metric} {number(row.value)}, of the base {number(row.base_value)} (difference "
        f"{number(row.difference)}"
        + (f", paired standard error {number(row.difference_error)}" if row.difference_error >= 0 else "")
        + ")."
        for row in rows.itertuples()
    ]


def other_sample(run: Run) -> str:
    """Of a base: how its validation loss differs from its loss on held-out documents."""
    if "base_losses" not in run.tables:
        return ""
    train = run.info["arguments"]["train"]
    return (
        f" Its text: at most {train['evaluation_rows']} rows of {train['sequence_length']} tokens, cut as in "
        "training; the loss on documents reads each document alone."
    )


def overlay(runs: list[Run]) -> list[Section]:
    """Return the losses of several trainings on one axis, and what can be said of their difference."""
    runs = [run for run in runs if "evaluations" in run.tables and len(run.table("evaluations"))]
    if len(runs) < 2:
        return []
    names = {path: plot_words(name) for path, name in run_names(runs).items()}
    rows = pd.concat([run.table("evaluations").assign(run=names[run.path]) for run in runs])
    tables = {"evaluations": rows, "loss_gaps": loss_gaps(rows)}
    loads = [last_loads(run).assign(run=names[run.path]) for run in runs if "load_totals" in run.tables]
    if len(loads) == len(runs):
        tables["load_totals"] = pd.concat(loads)
    figures = drawable([LOSS_BY_RUN, LOSS_GAP, LOAD_BY_RUN], tables)
    findings = [*loss_differences(rows), *setting_differences(runs)]
    return [
        Section("lead", "", findings=findings, figures=figures, tab="overview"),
        Section("losses-of-all", "Validation loss of all runs", figures=figures),
    ]


def last_loads(run: Run) -> pd.DataFrame:
    rows = run.table("load_totals")
    return rows[rows["step"] == rows["step"].max()]


def loss_gaps(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the second run's loss minus the first one's, by step, with its range over domains."""
    first, *others = evaluations["run"].unique()
    if len(others) != 1:
        return pd.DataFrame()
    losses = evaluations.pivot_table(index=["step", "domain"], columns="run", values="loss")
    gaps = (losses[others[0]] - losses[first]).dropna().reset_index(name="loss_gap")
    parts = gaps[gaps["domain"] != ""].groupby("step")["loss_gap"]
    ends = {"gap_low": parts.min(), "gap_high": parts.max()}
    whole = gaps[gaps["domain"] == ""].set_index("step")[["loss_gap"]]
    return whole.join(pd.DataFrame(ends)).reset_index().assign(run=f"{others[0]} minus {first}")


def loss_differences(rows: pd.DataFrame) -> list[str]:
    """Compare the last validation losses; nothing is claimed from one training per setting."""
    last = all_domains(rows).groupby("run", sort=False).last().sort_values("loss")
    if last[["unigram_loss", "uniform_loss"]].round(6).drop_duplicates().shape[0] > 1:
        values = listed([f"{number(row.loss)} ({row.Index})" for row in last.itertuples()])
        words = f"{values} nats per token, not comparable: the held-out texts or vocabularies differ."
        return [Finding(f"Validation loss: {words}", figure="loss_by_run")]
    named = " vs ".join(f"{number(row.loss)} ({row.Index})" for row in last.itertuples())
    steps = ", ".join(f"{step:,}" for step in sorted(set(last["step"].astype(int))))
    return [
        Finding(
            f"Validation loss {named} nats per token on the same text after {steps} steps; "
            "one seed each, so no claim which is better (moescope study compares seeds).",
            figure="loss_by_run",
        )
    ]


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as name -> value in words."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: str(value)}
    return found


def setting_differences(runs: list[Run]) -> list[str]:
    """Name the settings in which trainings differ, and their sizes where these differ."""
    settings = pd.DataFrame([flat(run.info["arguments"]) for run in runs])
    parts = [
        f"{name.rpartition('.')[2]} ({', '.join(settings[name].fillna('none'))})"
        for name in settings
        if settings[name].nunique(dropna=False) > 1
    ]
    sizes = [run.info.get("parameters_total") for run in runs]
    if len(set(sizes)) > 1:
        parts.append(f"parameters ({', '.join('unknown' if n is None else f'{n:,}' for n in sizes)})")
    words = f"the runs differ in {listed(parts)}" if parts else "equal in all runs"
    return [Finding(f"Settings: {plot_words(words)}.", tab="methods")]


def model_of(run: Run) -> dict[str, Any]:
    """Return the settings of the model; of a base they are known once it was loaded."""
    return {**run.info["arguments"]["model"], **run.info.get("model", {})}


def status(run: Run) -> list[str]:
    if run.info["status"] == "done":
        return []
    error = f": {run.info['error']}" if run.info.get("error") else ""
    return [f"This training is {run.info['status']}{error}."]


def coverage(run: Run) -> list[str]:
    info, model = run.info, model_of(run)
    if "domains" not in info:  # stopped before its first step
        return [f"{model['router']} router"]
    sizes = info["domains"]
    read = sum(size["train_bytes"] for size in sizes.values())
    entries = f"{info['vocabulary_size']:,} tokens in the vocabulary"
    if info["vocabulary_size"] < model["vocabulary"]:
        entries += f", {model['vocabulary']:,} entries in the model's head"
    experts = counted(model["experts"], "expert")
    if not info["router_facts"]["routes"]:
        experts = f"one block as wide as {counted(model['top_k'], 'expert')}"
    origin, base = info["arguments"].get("from"), model.get("base")
    starts = f"starts from {origin} with its model and vocabulary" if origin else f"trained from {base}"
    router = str(model["router"])
    if base:
        starts += ", a dense model: its feed-forward blocks became experts" if model.get("upcycled") else ""
        kept = f"new top-{model['top_k']}" if model.get("upcycled") else "the base's own"
        router = kept if router == "kept" else router
    return [
        f"{router} router, {counted(model['layers'], 'layer')} of {experts}; "
        f"{info['parameters_total']:,} parameters, {info['parameters_trainable']:,} trained",
        *([starts] if origin or base else []),
        *([info["frozen"]] if info.get("frozen") else []),
        *replacement_lines(info, model),
        f"text: {listed(list(sizes))}, {byte_size(read)} for training; {entries}; corpus {info['corpus']}",
    ]


def replacement_lines(info: dict[str, Any], model: dict[str, Any]) -> list[str]:
    """Say how far a new router agreed with the one that it replaced."""
    if not (shares := info.get("routing_agreement")):
        return []
    mean, chance = sum(shares.values()) / len(shares), model["top_k"] / model["experts"]
    return [
        f"before training the new router chose {mean:.1%} of the old router's experts (random: {chance:.1%})"
    ]


def sections(run: Run, selection: Selection) -> list[Section]:
    """Return the sections: losses, load balance, diagnostics, router gradients, keys, speed."""
    if not {"steps", "evaluations"} <= set(run.tables):
        raise BadInput(f"{run.path}: this training has not written anything yet; wait, or repeat its command")
    tables = select(run, selection)
    parts = [
        *of_table(tables, "base_losses", BASE_COLUMNS, "All models", BASE_SECTION, [BASE_LOSSES]),
        *of_table(tables, "task_results", None, "All tasks", TASK_SECTION),
        *of_table(tables, "steps", STEP_COLUMNS, "All steps", LOSS_SECTION, LOSSES),
    ]
    if {"load", "routing_layers"} <= set(tables) and len(tables["load"]) and is_routed(run):
        parts += [load_section(run, []), *diagnostic_sections(run)]
    parts += gradient_sections(run)
    parts += of_table(tables, "key_metrics", KEY_COLUMNS, "At the end of training", KEY_SECTION)
    if speed := drawable(SPEED, tables):
        parts.append(Section("speed", "Gradient norm and speed", "Measured during training.", speed))
    return parts


def of_table(
    tables: Tables,
    name: str,
    columns: Sequence[str] | None,
    title: str,
    words: tuple[str, str, str],
    figures: Sequence[Drawable] = (),
) -> list[Section]:
    """Return the section of a table, with anchor, title and text, if the run has the table."""
    if name not in tables:
        return []
    table = TRAIN_TABLES[name]
    payload = table_payload(table, tables[name], columns or (*table.keys, *table.values), title)
    return [Section(*words, drawable(figures, tables), [payload])]


def experts(run: Run) -> Iterator[LayerCards]:
    """Load of each expert over the steps of training, as a multiple of an even share."""
    if "load" not in run.tables or not is_routed(run):
        return
    for layer, rows in run.table("load").groupby("layer"):
        tokens = rows.pivot_table(index="step", columns="expert", values="tokens", aggfunc="sum").fillna(0)
        even = tokens.mean(axis=1)
        shares = tokens.div(even.where(even > 0), axis=0).dropna()
        if len(shares) < 2:
            continue
        block = {
            "kind": "curve",
            "title": "Load over training (even share: 1)",
            "x": plain(shares.index.tolist()),
            "labels": ["step", "times an even share"],
            "logarithmic": False,
        }
        cards = {int(expert): [{**block, "y": plain(shares[expert].tolist())}] for expert in shares}
        yield LayerCards(int(layer), cards)


def is_routed(run: Run) -> bool:
    """Return whether tokens have a choice of experts."""
    facts: dict[str, Any] = run.info.get("router_facts", {})
    return bool(facts.get("routes")) and int(model_of(run)["experts"]) > 1


def page_title(run: Run) -> str:
    if base := run.info["arguments"]["model"].get("base"):
        return f"{run.name}, trained from {base}"
    return f"{run.name}, trained with {model_of(run)['router']}"
