"""A training's part of the report: losses, load balance, router gradients, keys, speed."""

from __future__ import annotations

import shlex
from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.lab.figures_training import KEYS, LOSSES, SPEED
from moescope.plotting.style import Tables, byte_size, counted, listed, number
from moescope.reporting.pack import table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.reporting.untrusted import plot_words
from moescope.routing.report_monitor import (
    STEP_COLUMNS,
    TABLES,
    diagnostic_sections,
    gradient_sections,
    load_findings,
    load_section,
)
from moescope.run import Run

VIEW = (
    "The validation loss is compared with two baselines: uniform (every token equally likely) and unigram "
    "(token frequencies). Load balance and routing decisions come from the training passes, one point per "
    "window of steps; the chance level is random routing."
)


def sections(run: Run) -> list[Section]:
    """Return the sections: losses, load balance, diagnostics, router gradients, keys, speed."""
    if "steps" not in run.tables or not run.info.get("evaluations"):
        raise BadInput(f"{run.path}: this training has not written anything yet; wait, or repeat its command")
    steps = run.table("steps")
    tables: Tables = {"steps": steps, "references": references(run), "domain_losses": domain_losses(run)}
    found = [
        Section(
            "losses",
            "Training curves",
            "Loss on held-out text, by step and by domain.",
            [(spec, tables) for spec in LOSSES],
            [table_payload("steps", steps, STEP_COLUMNS, "All steps")],
        )
    ]
    if {"load", "routing_layers"} <= set(run.tables) and len(run.table("load")) and is_routed(run):
        found += [load_section(run, []), *diagnostic_sections(run)]
    found += gradient_sections(run)
    if "keys" in run.info:
        found.append(key_section(run))
    speed = [(spec, tables) for column, spec in SPEED.items() if steps[column].notna().any()]
    if speed:
        found.append(Section("speed", "Gradient norm and speed", "Measured during training.", speed))
    return found


def key_section(run: Run) -> Section:
    """Return SoME's section: usage of the middle layer's experts and a map of its keys."""
    keys = run.info["keys"]
    tables = {
        "key_histogram": pd.DataFrame(keys["histogram"]),
        "key_map": pd.DataFrame(keys["map"]),
        "key_shares": pd.DataFrame([keys["shares"]]),
    }
    metrics = [
        f"{METRIC_WORDS[row['metric']]} {number(row['value'])} (random routing: {number(row['chance'])}, "
        f"collapse: {number(row['collapse'])})"
        for row in keys["metrics"]
    ]
    cosine = keys["cosine"]
    words = (
        f"Layer {keys['layer']}, the middle one: {listed(metrics)}. Mean cosine of two keys: "
        f"{number(cosine['mean'])} (random keys: 0 ± {number(cosine['random_spread'])}; 1: all equal)."
    )
    return Section("keys", "Keys", words, [(spec, tables) for spec in KEYS])


METRIC_WORDS = {
    "gini": "Gini",
    "load_entropy_bits": "entropy of the load in bits",
    "used": "share of experts used",
}


def references(run: Run) -> pd.DataFrame:
    losses = run.info["references"]
    values = {
        "uniform": losses["uniform"],
        "unigram": losses["unigram"][""],
        "clip": run.info["arguments"]["train"]["clip"],
    }
    return pd.DataFrame({"name": list(values), "value": list(values.values())})


def domain_losses(run: Run) -> pd.DataFrame:
    """Return loss and unigram baseline of every domain at every evaluation."""
    unigram = run.info["references"]["unigram"]
    return pd.DataFrame(
        [
            {"step": one["step"], "domain": plot_words(domain), "loss": loss, "unigram": unigram[domain]}
            for one in run.info["evaluations"]
            for domain, loss in one["domains"].items()
        ]
    )


def findings(run: Run) -> list[str]:
    """Return the training's results in sentences."""
    if not run.info.get("evaluations"):
        return ["No evaluation yet."]
    baselines = run.info["references"]
    first, last = run.info["evaluations"][0], run.info["evaluations"][-1]
    found = [
        f"Validation loss: {number(last['loss'])} nats per token after {last['step']:,} steps, "
        f"{number(first['loss'])} before training (unigram baseline: {number(baselines['unigram'][''])}, "
        f"uniform: {number(baselines['uniform'])})."
    ]
    behind = [domain for domain, loss in last["domains"].items() if loss >= baselines["unigram"][domain]]
    if behind:
        found.append(f"No better than the unigram baseline: {listed(behind)}.")
    if run.info["status"] != "done":
        stopped = f": {run.info['error']}" if run.info.get("error") else ""
        found.append(f"This training is {run.info['status']}{stopped}.")
    if is_routed(run):
        equal = ", by construction: experts choose tokens" if router_facts(run).get("experts_choose") else ""
        found += load_findings(run, equal)
    alerts = run.table("alerts") if "alerts" in run.tables else pd.DataFrame()
    if len(alerts):
        first_alert = alerts.sort_values("step").iloc[0]
        found.append(f"{counted(len(alerts), 'alert')} in training; the first: {first_alert['message']}.")
    return found


def is_routed(run: Run) -> bool:
    """Return whether tokens have a choice. The Monitor's own runs, without a config, always do."""
    model = run.info["arguments"].get("model")
    return not model or (router_facts(run)["routes"] and int(model["experts"]) > 1)


def router_facts(run: Run) -> dict[str, Any]:
    """Return the facts about the lab's router; none for a training outside the lab, which has no config."""
    facts: dict[str, Any] | None = run.info.get("router_facts")
    if facts is None and (model := run.info["arguments"].get("model")):  # a run of an earlier version
        from moescope.decoder.routers import facts_of_model

        facts = facts_of_model(model)
    return facts or {}


def coverage(run: Run) -> list[str]:
    info, model = run.info, run.info["arguments"]["model"]
    sizes = info["domains"]
    read = sum(size["train_bytes"] for size in sizes.values())
    entries = f"{info['vocabulary_size']:,} tokens in the vocabulary"
    if info["vocabulary_size"] < model["vocabulary"]:
        entries += f", {model['vocabulary']:,} entries in the model's head"
    starts = f"starts from {info['arguments']['from']} with its model and vocabulary"
    return [
        f"{model['router']} router, {counted(model['layers'], 'layer')} of {experts_in_words(run)}; "
        f"{info['parameters_total']:,} parameters, {info['parameters_trainable']:,} trained",
        *([starts] if info["arguments"].get("from") else []),
        *([info["frozen"]] if info.get("frozen") else []),
        f"text: {listed(list(sizes))}, {byte_size(read)} for training; {entries}; corpus {info['corpus']}",
    ]


def experts_in_words(run: Run) -> str:
    model = run.info["arguments"]["model"]
    if router_facts(run)["routes"]:
        return counted(model["experts"], "expert")
    return f"one block as wide as {counted(model['top_k'], 'expert')}"


def command(run: Run) -> str:
    asked = run.info.get("asked", {})
    if "study" in asked:
        return shlex.join(["moescope", "study", "--resume", "--out", asked["study"]])
    words = ["moescope", "train", *([asked["config"]] if asked.get("config") else [])]
    for name in ("preset", "router", "from"):
        words += [f"--{name}", str(asked[name])] if asked.get(name) else []
    seed = run.info["arguments"]["train"]["seed"]
    return shlex.join([*words, *(["--seed", str(seed)] if seed else [])])


def title(run: Run) -> str:
    return f"{run.name}: training with {run.info['arguments']['model']['router']}"


def parts(run: Run) -> list[Run]:
    """Return the scan and the trace of the trained model, as far as they exist."""
    found = []
    for name in ("scan", "trace"):
        try:
            found.append(Run.load(run.path / name))
        except BadInput:
            continue
    return found


TRAINING = RunKind("train", TABLES, findings, sections, command, coverage, VIEW, title, parts)
