"""A training's part of the report: losses, load while it learned, what taught the routers.

Its scan and trace follow as their own parts.
"""

from __future__ import annotations

import shlex
from typing import Any

import pandas as pd

from moescope.errors import BadInput
from moescope.figures import OVER_STEPS
from moescope.lab.figures_keys import KEYS, USAGE_BY_STEP
from moescope.lab.figures_training import COURSE, DROPPED, LOSSES, PULL
from moescope.plotting.style import FigureSpec, Tables, byte_size, counted, listed, named_layers, number
from moescope.reporting.pack import table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.reporting.untrusted import plot_words
from moescope.routing.figures_diagnostics import in_words, told_and_drawn
from moescope.run import Run

TABLES = ("steps", "load", "routing_layers", "router_gradients", "alerts")
STEP_COLUMNS = [
    "step",
    "tokens",
    "train_loss",
    "lm_loss",
    "aux_loss",
    "validation_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
]
ALERT_COLUMNS = ["step", "layer", "expert", "kind", "value", "threshold", "message"]
VIEW = (
    "A training is judged by its validation loss, beside two models without skill: one that "
    "gives every token the same chance, and one that knows how "
    "often each occurs. Load and decisions are of the training's own passes, each point a "
    "stretch of steps; chances are those of random routing."
)


def sections(run: Run) -> list[Section]:
    """The parts of the page, in the order one asks.

    Did it learn, did experts share the work, what taught the routers, how did it go.
    """
    if "steps" not in run.tables or not run.info.get("evaluations"):
        raise BadInput(
            f"{run.path}: nothing of this training is on disk yet; wait a while, or give its command again"
        )
    steps = run.table("steps")
    tables: Tables = {"steps": steps, "references": references(run), "domain_losses": domain_losses(run)}
    found = [
        Section(
            "losses",
            "What it learned",
            "Loss on text the model has not seen, over the steps and by domain.",
            [(spec, tables) for spec in LOSSES],
            [table_payload("steps", steps, STEP_COLUMNS, "Every point")],
        )
    ]
    if {"load", "routing_layers"} <= set(run.tables) and len(run.table("load")) and is_routed(run):
        watched = {"load": run.table("load"), "routing_layers": run.table("routing_layers")}
        drawable = load_figures(watched)
        alerts = (
            run.table("alerts") if "alerts" in run.tables else pd.DataFrame()
        )  # none yet in a training under way
        told = [table_payload("alerts", alerts, ALERT_COLUMNS, "Alerts")] if len(alerts) else []
        found.append(Section("load", "Load while it learned", load_words(run), drawable, told))
        found += note_sections(run)
    gradients = run.table("router_gradients") if "router_gradients" in run.tables else pd.DataFrame()
    if len(gradients) and gradients["lm_gradient_norm"].notna().any():
        words = "A router learns from the text through its gates alone; here is how strongly."
        found.append(
            Section("routers", "What taught the routers", words, [(PULL, {"router_gradients": gradients})])
        )
    if "keys" in run.info:
        found.append(key_section(run))
    words = "Gradient and speed, from the run itself."
    course = [(spec, tables) for column, spec in COURSE.items() if steps[column].notna().any()]
    if course:
        found.append(Section("course", "How it went", words, course))
    return found


def load_figures(watched: Tables) -> list[tuple[FigureSpec, Tables]]:
    """Figures over steps that can be drawn; what capacity turned away only where it did."""
    rows = watched["routing_layers"]
    dropped = (rows["metric"] == "dropped") & (rows["value"] > 0)
    specs = [*OVER_STEPS, *([DROPPED] if dropped.any() else [])]
    return [(spec, watched) for spec in specs if can_draw(spec, watched)]


def load_words(run: Run) -> str:
    words = (
        "How evenly and how surely tokens were sent while the model learned, counted in every training pass."
    )
    if sure := run.info.get("low_entropy_expected"):
        words += (
            " This router is built to be sure of every token, so low routing entropy in "
            f"{named_layers(sure)} raises no alert; uneven load and "
            "experts without a token do."
        )
    return words


def note_sections(run: Run) -> list[Section]:
    """Router diagnostics that move in figures, the others in a sentence.

    SoME's usage beside them.
    """
    rows = run.table("routing_layers")
    tables: Tables = {"routing_layers": rows}
    model = run.info["arguments"].get("model")
    if model is not None:
        tables["shape"] = pd.DataFrame([{name: model[name] for name in ("experts", "d_model")}])
    still, moving = told_and_drawn(tables)
    specs = [panel.spec() for panel in moving]
    if (rows["metric"] == "key_cosine").any():
        specs += [spec for spec in USAGE_BY_STEP if can_draw(spec, tables)]
    if not specs and not still:
        return []
    words = (
        "Numbers that only this kind of router has, from its training passes, each beside what "
        "chance, or nothing done, would give."
    )
    if still:
        words += (
            " At their reference all the time, so not drawn: "
            f"{listed([in_words(panel, tables) for panel in still])}."
        )
    return [
        Section("diagnostics", "What the router says of itself", words, [(spec, tables) for spec in specs])
    ]


def key_section(run: Run) -> Section:
    """SoME: usage of the middle layer's experts, and a map of its keys."""
    keys = run.info["keys"]
    tables = {
        "key_histogram": pd.DataFrame(keys["histogram"]),
        "key_map": pd.DataFrame(keys["map"]),
        "key_shares": pd.DataFrame([keys["shares"]]),
    }
    told = [
        (
            f"{METRIC_WORDS[row['metric']]} {number(row['value'])} ({number(row['chance'])} with "
            f"random routing, {number(row['collapse'])} at collapse)"
        )
        for row in keys["metrics"]
    ]
    cosine = keys["cosine"]
    words = (
        f"Layer {keys['layer']}, the middle one: {listed(told)}. Two keys have a cosine of "
        f"{number(cosine['mean'])} on average; of random keys that mean is 0, "
        f"give or take {number(cosine['random_spread'])}. Near 1 all keys are one."
    )
    return Section("keys", "How the keys organised themselves", words, [(spec, tables) for spec in KEYS])


METRIC_WORDS = {
    "gini": "Gini",
    "load_entropy_bits": "entropy of the load in bits",
    "used": "share of experts used",
}


def can_draw(spec: FigureSpec, tables: Tables) -> bool:
    """Whether the figure's tables are there with rows at more than one step, and its metrics among them."""
    if not set(spec.needs) <= set(tables):
        return False
    metrics = set(tables["routing_layers"]["metric"].unique())
    return set(spec.metrics) <= metrics and all(tables[name]["step"].nunique() > 1 for name in spec.needs)


def references(run: Run) -> pd.DataFrame:
    told = run.info["references"]
    values = {
        "uniform": told["uniform"],
        "unigram": told["unigram"][""],
        "clip": run.info["arguments"]["train"]["clip"],
    }
    return pd.DataFrame({"name": list(values), "value": list(values.values())})


def domain_losses(run: Run) -> pd.DataFrame:
    """Validation loss of every domain at every evaluation, with the unigram model's beside it."""
    unigram = run.info["references"]["unigram"]
    return pd.DataFrame(
        [
            {
                "step": evaluation["step"],
                "domain": plot_words(domain),
                "loss": loss,
                "unigram": unigram[domain],
            }
            for evaluation in run.info["evaluations"]
            for domain, loss in evaluation["domains"].items()
        ]
    )


def findings(run: Run) -> list[str]:
    """What the training came to, in sentences."""
    if not run.info.get("evaluations"):
        return ["Nothing has been evaluated yet."]
    told = run.info["references"]
    first, last = run.info["evaluations"][0], run.info["evaluations"][-1]
    found = [
        (
            f"Validation loss {number(last['loss'])} nats a token after {last['step']:,} steps, "
            f"{number(first['loss'])} before the first; "
            f"{number(told['unigram'][''])} by token frequencies alone, {number(told['uniform'])} "
            "with every token alike."
        )
    ]
    behind = [domain for domain, loss in last["domains"].items() if loss >= told["unigram"][domain]]
    if behind:
        found.append(f"No better than token frequencies alone: {listed(behind)}.")
    if run.info["status"] != "done":
        stopped = f": {run.info['error']}" if run.info.get("error") else ""
        found.append(f"This training is {run.info['status']}{stopped}.")
    found += load_findings(run)
    alerts = run.table("alerts") if "alerts" in run.tables else pd.DataFrame()
    if len(alerts):
        first_alert = alerts.sort_values("step").iloc[0]
        found.append(
            f"{counted(len(alerts), 'alert')} while it learned, none in a training without "
            f"trouble; the first: {first_alert['message']}."
        )
    return found


def load_findings(run: Run) -> list[str]:
    """The last stretch of training: how even the load was, and how that compares with random routing."""
    if "routing_layers" not in run.tables or not is_routed(run):
        return []
    rows = run.table("routing_layers")
    rows = rows[(rows["step"] == rows["step"].max()) & (rows["domain"] == "")]
    even = rows[rows["metric"] == "cv"]
    if not len(even) or not even["value"].notna().any():
        return []
    worst = even.loc[even["value"].idxmax()]
    if worst["value"] == 0:
        why = (
            " by construction: experts choose the tokens, each as many"
            if router_facts(run).get("experts_choose")
            else ""
        )
        return [
            (
                f"At the end of training load is even in every layer{why}; random routing gives a CV "
                f"of {number(worst['chance'])}."
            )
        ]
    found = [
        (
            f"At the end of training load is least even in {named_layers([worst['layer']])}: CV "
            f"{number(worst['value'])}, random routing gives {number(worst['chance'])}."
        )
    ]
    unused = rows[(rows["metric"] == "unused") & (rows["value"] > 0)]
    if len(unused):
        found.append(f"Experts without a token at the end of training in {named_layers(unused['layer'])}.")
    return found


def is_routed(run: Run) -> bool:
    """Whether there is anything to choose: of one block a layer every load is even, and says nothing.

    The Monitor watches MoE layers only.
    """
    model = run.info["arguments"].get("model")
    return not model or (router_facts(run)["routes"] and int(model["experts"]) > 1)


def router_facts(run: Run) -> dict[str, Any]:
    """Facts about the lab's router; none for a training that the Monitor watched, of any model."""
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
    begins = f"begins with {info['arguments']['from']}: model and vocabulary are its own"
    return [
        (
            f"{model['router']} router, {counted(model['layers'], 'layer')} of "
            f"{experts_in_words(run)}; {info['parameters_total']:,} parameters, "
            f"{info['parameters_trainable']:,} of them trained"
        ),
        *([begins] if info["arguments"].get("from") else []),
        *([info["frozen"]] if info.get("frozen") else []),
        f"text: {listed(list(sizes))}, {byte_size(read)} to train on; {entries}; corpus {info['corpus']}",
    ]


def experts_in_words(run: Run) -> str:
    model = run.info["arguments"]["model"]
    if router_facts(run)["routes"]:
        return counted(model["experts"], "expert")
    return f"one block, as wide as the {counted(model['top_k'], 'expert')} that a token would meet"


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
    return f"{run.name}: a training with {run.info['arguments']['model']['router']}"


def parts(run: Run) -> list[Run]:
    """The scan and the trace of what was trained, as far as they are there."""
    found = []
    for name in ("scan", "trace"):
        try:
            found.append(Run.load(run.path / name))
        except BadInput:
            continue
    return found


TRAINING = RunKind("train", TABLES, findings, sections, command, coverage, VIEW, title, parts)
