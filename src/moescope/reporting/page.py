"""The report's content, put together: summary, glossary, figures and layers, as data for the template."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from moescope.figures import ACROSS_LAYERS, ACROSS_READINGS, ACROSS_STEPS, COMPLETE_VIEW, ONE_LAYER, FigureSpec
from moescope.figures.identification import VERDICT_WORDS
from moescope.figures.style import Tables, listed, number
from moescope.glossary import COLUMNS
from moescope.reporting.findings import coverage_lines, findings, headline, most_ambiguous, stored_hidden_order
from moescope.reporting.pack import figure_payload, plain, script_json, table_payload
from moescope.reporting.readings import Reading, readings
from moescope.run import Run
from moescope.spectral.pairing import ALPHA
from moescope.tables import READING, TABLES

K_TABLE = [
    "k",
    "align",
    "random_expectation",
    "effect_over_random",
    "shuffle_mean",
    "shuffle_std",
    "delta_vs_shuffle",
    "z_vs_shuffle",
    "z_ceiling",
    "argmax_accuracy",
    "assignment_accuracy",
    "alignment_margin",
    "positive_margin_share",
    "perm_z",
    "p_adjusted",
    "degenerate",
]
EXPERT_TABLE = [
    "expert",
    "align",
    "random_expectation",
    "shuffle_mean",
    "delta_vs_shuffle",
    "z_vs_shuffle",
    "margin",
    "identified",
]
WHOLE_TABLES = {  # shown across layers, besides the figures
    "alignment_tests": "Tests and verdicts of every layer",
    "ambiguity": "Ambiguity ranking",
    "orthogonality": "Redundancy of experts over k",
    "alignment_layers": "Every layer and k",
}
KEY_COLUMNS = {"step", "layer_name", *READING}
VERDICT_NAMES = {
    "identifying": "identifies its experts",
    "non_random": "not random",
    "permuted": "another order",
    "chance": "at chance",
}


def drawn(spec: FigureSpec, tables: Tables, where: str) -> dict[str, Any]:
    """The figure as data; one that cannot be drawn fails the report, with its name and place."""
    try:
        return figure_payload(spec.draw(tables), spec.wide)
    except Exception as error:
        raise RuntimeError(f"figure {spec.name} of {where} cannot be drawn: {type(error).__name__}: {error}") from error


def page_content(runs: list[Run]) -> dict[str, Any]:
    """Everything the template needs. Payloads are strings of JSON, drawn by the page when they come into view."""
    found = readings(runs)
    payloads: dict[str, str] = {}

    def keep(name: str, value: Any) -> str:
        payloads[name] = script_json(value)
        return name

    across, layers, glance = [], [], []
    for index, reading in enumerate(found):
        figures = [keep(f"r{index}-{spec.name}", drawn(spec, reading.tables, reading.label)) for spec in ACROSS_LAYERS]
        tables = [keep(f"r{index}-t-{name}", whole_table(reading, name, title)) for name, title in WHOLE_TABLES.items()]
        across.append({"figures": figures, "tables": tables})
        glance.append(keep(f"r{index}-glance", glance_table(reading)))
        for layer, rows in reading.by_layer():
            layers.append(
                {
                    "reading": index,
                    **layer_entry(reading, layer, rows, lambda value, i=index, n=layer: keep(f"r{i}-l{n}", value)),
                }
            )
    return {
        "title": page_title(runs),
        "runs": [run_entry(run) for run in runs],
        "headline": [
            {"run": run.name if len(runs) > 1 else "", "findings": headline([r for r in found if r.run is run])}
            for run in runs
        ],
        "readings": [
            {"label": reading.label, "findings": findings(reading), "ambiguous": most_ambiguous(reading)}
            for reading in found
        ],
        "across": across,
        "glance": glance,
        "compare": [
            keep(f"c-{spec.name}", drawn(spec, stacked(found, spec), "all readings")) for spec in ACROSS_READINGS
        ]
        if len(found) > 1
        else [],
        "steps": step_figures(found, keep),
        "layers": layers,
        "glossary": glossary_sections(),
        "glossary_json": script_json({name: asdict(column) for name, column in COLUMNS.items()}),
        "payloads": payloads,
    }


def page_title(runs: list[Run]) -> str:
    """The models' names, or how many there are."""
    names = list(dict.fromkeys(Path(item["path"]).name for run in runs for item in run.info["checkpoints"]))
    return listed(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more checkpoints"


def stacked(found: list[Reading], spec: FigureSpec) -> Tables:
    """The tables a comparison needs, all readings in one frame with a `reading` column."""
    return {
        name: pd.concat(
            [reading.tables[name].assign(reading=reading.label, run=str(reading.run.path)) for reading in found],
            ignore_index=True,
        )
        for name in spec.needs
    }


def step_figures(found: list[Reading], keep: Any) -> list[dict[str, Any]]:
    """Figures against the step, for every run and reading that has several steps."""
    groups: dict[tuple[Any, ...], list[Reading]] = {}
    for reading in found:
        groups.setdefault((reading.run.path, *(reading.keys[key] for key in READING)), []).append(reading)
    sections = []
    for number_, group in enumerate(group for group in groups.values() if len(group) > 1):
        label = f"{group[0].run.name} · {group[0].keys['matrix']}, {group[0].keys['router']} router"
        names = [keep(f"s{number_}-{spec.name}", drawn(spec, stacked(group, spec), label)) for spec in ACROSS_STEPS]
        sections.append({"label": label, "figures": names})
    return sections


def whole_table(reading: Reading, name: str, title: str) -> dict[str, Any]:
    columns = [column for column in TABLES[name].columns if column not in KEY_COLUMNS]
    frame = reading.tables[name]
    if name == "ambiguity":
        frame = frame.sort_values(["rank", "layer"])
        columns = ["rank", "layer", *(column for column in columns if column not in ("rank", "layer"))]
    return table_payload(name, frame, columns, title)


def glance_table(reading: Reading) -> dict[str, Any]:
    """The one table of the summary: a row a layer, every number with its chance level beside it."""
    tables = reading.tables
    first = tables["orthogonality"].query("k == 1").set_index("layer")
    ambiguity = tables["ambiguity"].set_index("layer")
    rows = []
    for test in tables["alignment_tests"].sort_values("layer").to_dict("records"):
        layer = test["layer"]
        setup = reading.setup(layer)
        rows.append(
            [
                layer,
                VERDICT_NAMES[test["verdict"]],
                test["best_k"],
                test["best_accuracy"],
                1 / setup["n_experts"],
                test["p_value"],
                test["q_value"],
                ambiguity.loc[layer, "ambiguity_score"],
                ambiguity.loc[layer, "level"],
                first.loc[layer, "mean_abs"],
                first.loc[layer, "chance"],
                first.loc[layer, "n_pairs_above_0_7"],
            ]
        )
    heads = [
        ("layer", "layer", "int"),
        ("verdict", "verdict", "text"),
        ("best_k", "best k", "int"),
        ("best_accuracy", "accuracy", "float"),
        ("argmax_accuracy", "chance", "float"),
        ("p_value", "p", "float"),
        ("q_value", "q", "float"),
        ("ambiguity_score", "ambiguity", "float"),
        ("level", "level", "text"),
        ("mean_abs", "mean |cos|", "float"),
        ("chance", "chance", "float"),
        ("n_pairs_above_0_7", "collapsed pairs", "int"),
    ]
    columns = [{"name": name, "title": title, "kind": kind} for name, title, kind in heads]
    return {
        "name": "layers_at_a_glance",
        "title": "Layers at a glance",
        "columns": columns,
        "rows": plain(rows),
        "links": True,
    }


def layer_entry(reading: Reading, layer: int, tables: Tables, keep: Any) -> dict[str, Any]:
    """One layer: what its closed line says, and the payload drawn when it is opened."""
    test = tables["alignment_tests"].iloc[0].to_dict()
    best = tables["alignment"][tables["alignment"]["k"] == test["best_k"]]
    where = f"layer {layer}, {reading.label}"
    payload = {
        "verdict": verdict_words(reading, layer, test),
        "setup": setup_rows(reading, layer, tables),
        "tables": [
            table_payload("alignment_layers", tables["alignment_layers"], K_TABLE, "Every k (means over experts)"),
            table_payload("alignment", best, EXPERT_TABLE, f"Every expert at k = {test['best_k']}"),
        ],
        "figures": [drawn(spec, tables, where) for spec in ONE_LAYER],
        "complete": [drawn(spec, tables, where) for spec in COMPLETE_VIEW],
    }
    return {
        "layer": layer,
        "verdict": test["verdict"],
        "verdict_name": VERDICT_NAMES[test["verdict"]],
        "line": f"accuracy {number(test['best_accuracy'])} at k = {test['best_k']} (chance 1/{reading.setup(layer)['n_experts']}), p = {number(test['p_value'])}",
        "payload": keep(payload),
    }


def verdict_words(reading: Reading, layer: int, test: dict[str, Any]) -> list[str]:
    """The identification verdict of one layer in words, with chance beside every number."""
    n = reading.setup(layer)["n_experts"]
    against = f"all {test['n_pairings']:,} pairings" if test["exact"] else f"{test['n_pairings']:,} drawn pairings"
    words = [
        f"Layer {layer} {VERDICT_WORDS[test['verdict']][0]}: the best argmax accuracy is {number(test['best_accuracy'])}, at k = {test['best_k']}; "
        f"chance is 1/{n} = {number(1 / n)} at a given k. A random pairing does as well at its own best k with p = {number(test['p_accuracy'])}.",
        f"Mean alignment over all k: p = {number(test['p_value'])} against {against} "
        f"(q = {number(test['q_value'])} over the layers scanned); lower tail p = {number(test['p_lower'])}.",
    ]
    if test["p_lower"] <= ALPHA:
        words.append("The lower tail is small: at some k routers avoid their own experts.")
    if test["verdict"] == "permuted" and (hidden := stored_hidden_order(reading, layer)):
        mapped = ", ".join(f"{router} → {'?' if expert is None else expert}" for router, expert in hidden[1].items())
        words.append(f"The order in which they do fit, at k = {hidden[0]} (router → expert): {mapped}.")
    return words


def setup_rows(reading: Reading, layer: int, tables: Tables) -> list[list[str]]:
    """How the layer's numbers were made; never empty."""
    setup, info = reading.setup(layer), reading.run.info
    of_matrix = setup["matrices"][reading.keys["matrix"]]
    model = next(item for item in info["checkpoints"] if item["step"] == reading.keys["step"])
    own = pd.Series(setup["centered_share"], dtype=float)
    null = "closed form" if setup["null"] == "closed" else f"{setup['n_shuffles']} sampled shuffles"
    rows = {
        "model": model["path"],
        "block": setup["layer_name"],
        "step": reading.keys["step"],
        "matrix": reading.keys["matrix"],
        "router reading": reading.keys["router"] + (", norm folded in" if reading.keys["fold_norm"] else ""),
        "dtype": f"{setup['dtype']} experts, {setup['router_dtype']} router; fp64 from the Gram matrix on",
        "d_model": setup["d_model"],
        "d_ff": setup["d_ff"],
        "experts (n)": setup["n_experts"],
        "top_k, scoring": f"{setup['top_k'] or 'not stated'}, {setup['scoring']}",
        "k ladder": ", ".join(map(str, of_matrix["k"])),
        "shuffle null": null,
        "pairing null": f"{tables['alignment_tests']['n_pairings'].iloc[0]:,} pairings, {'all there are' if tables['alignment_tests']['exact'].iloc[0] else 'drawn'}",
        "seed": setup["seed"],
        "precision": f"{info['arguments']['precision']}; {of_matrix['fallbacks']} of {setup['n_experts']} experts fell back to SVD",
        "row share not common to all routers": f"{number(own.min())} to {number(own.max())} (‖rᵢ − mean‖/‖rᵢ‖)",
        "experts left out": ", ".join(map(str, of_matrix["experts_left_out"])) or "none",
        "time": f"{number(setup['seconds'])} s on {info['device']}",
    }
    return [[name, str(value)] for name, value in rows.items()]


def run_entry(run: Run) -> dict[str, Any]:
    """A run in the head and the foot of the page: what was scanned, how to do it again."""
    arguments = run.info["arguments"]
    command = ["moescope", "scan", *(item["path"] for item in run.info["checkpoints"])]
    defaults = {
        "matrix": ["gate"],
        "router": ["raw"],
        "k": [],
        "fold_norm": False,
        "precision": "fast",
        "null": "closed",
        "n_shuffles": 200,
        "seed": 0,
        "k_star": "max_margin",
        "allow_full_rank": False,
        "ambiguity_weights": [0.4, 0.3, 0.3],
    }
    if arguments.get("layers"):
        command += ["--layers", ",".join(map(str, arguments["layers"][0]))]
    for word, default in defaults.items():
        value = arguments[word]
        if value != default:
            flag = f"--{word.replace('_', '-')}"
            command += (
                [flag]
                if value is True
                else [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
            )
    return {
        "name": run.name,
        "info": run.info,
        "coverage": coverage_lines(run),
        "command": shlex.join([*command, *(["--keep-going"] if run.info.get("keep_going") else [])]),
        "warnings": run.info.get("warnings", []),
        "seconds": number(sum(run.info["timings"].values())),
    }


def glossary_sections() -> list[dict[str, Any]]:
    """The glossary by table, each entry once, where it first appears."""
    seen: set[str] = set()
    sections = []
    for name, spec in TABLES.items():
        entries = []
        for column in spec.columns:
            key = f"{name}.{column}" if f"{name}.{column}" in COLUMNS else column
            if key not in seen:
                seen.add(key)
                entries.append({"key": key, "name": column, **asdict(spec.column(column))})
        sections.append({"table": name, "meaning": spec.meaning, "entries": entries})
    return sections
