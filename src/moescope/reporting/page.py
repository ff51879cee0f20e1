"""The report's content, put together: summary, glossary, figures and layers, as data for the template."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from moescope.comparison.report import charts_together
from moescope.errors import BadInput
from moescope.figures import ACROSS_LAYERS, ACROSS_STEPS, ACROSS_VIEWS, FigureSpec
from moescope.glossary import COLUMNS
from moescope.plotting.style import Tables, listed, number
from moescope.reporting.joint import joint_entries, joint_missing
from moescope.reporting.pack import glance_payload, script_json, table_payload
from moescope.reporting.run_kind import RunKind, Section
from moescope.reporting.run_kinds import kind_of
from moescope.routing.metrics import DIAGNOSTICS, METRICS
from moescope.routing.report import (
    SECTIONS,
    step_sections,
    text_notice,
    trace_command,
    trace_coverage,
    view_entry,
)
from moescope.routing.report_summary import trace_findings, which_findings
from moescope.routing.report_views import TraceTables, first_shown, load_trace, routing_views, steps_left_out
from moescope.run import Run
from moescope.tables import ROUTING_TABLES, SCAN_TABLES, TABLES, VIEW
from moescope.weights.report import coverage_lines, drawn, experts_glance, layer_entry, verdict_name
from moescope.weights.report_findings import View, findings, headline, run_names, view_words
from moescope.weights.report_findings import views as scan_views

WHOLE_TABLES = {  # shown across layers, besides the figures
    "alignment_tests": "Tests and verdicts of every layer",
    "ambiguity": "Ambiguity ranking",
    "orthogonality": "Redundancy of experts over k",
    "alignment_layers": "Every layer and k",
}
KEY_COLUMNS = {"step", "layer_name", *VIEW}


def page_content(runs: list[Run]) -> dict[str, Any]:
    """Everything the template needs.

    Payloads are strings of JSON, drawn by the page when they come into view.
    """
    others = [(run, kind) for run in runs if (kind := kind_of(run)) is not None]
    given = {run.path.resolve() for run in runs}
    parts = [part for run, kind in others for part in kind.parts(run)]
    runs = [*runs, *(part for part in parts if part.path.resolve() not in given)]
    scans, traced = by_verb(runs)
    found = scan_views(scans, len(runs) > 1) if scans else []
    traces, names = [load_trace(run) for run in traced], run_names(runs)
    views = routing_views(traces, names)
    payloads: dict[str, str] = {}

    def keep(name: str, value: Any) -> str:
        payloads[name] = script_json(value)
        return name

    across, layers, glance = [], [], []
    for index, reading in enumerate(found):
        drawable = reading.drawable(ACROSS_LAYERS)
        figures = [
            keep(f"r{index}-{spec.name}", drawn(spec, reading.tables, reading.label)) for spec in drawable
        ]
        whole = {name: title for name, title in WHOLE_TABLES.items() if name in reading.tables}
        tables = [
            keep(f"r{index}-t-{name}", whole_table(reading, name, title)) for name, title in whole.items()
        ]
        across.append({"figures": figures, "tables": tables})
        at_a_glance = glance_table(reading) if reading.has_rows else experts_glance(reading)
        glance.append(keep(f"r{index}-glance", at_a_glance))
        for layer, rows in reading.by_layer():
            entry, payload = layer_entry(reading, layer, rows)
            layers.append({"reading": index, **entry, "payload": keep(f"r{index}-l{layer}", payload)})
    entries = [view_entry(view, index, keep) for index, view in enumerate(views)]
    together = joint_entries(found, views, keep)
    told = [
        entry for index, (run, kind) in enumerate(others) for entry in section_entries(run, kind, index, keep)
    ]
    told += [
        section_entry(part, "all runs", part.anchor, keep)
        for part in charts_together([run for run, _ in others])
    ]
    return {
        "title": page_title(runs),
        "text_notice": text_notice(traces, [entry["excerpt"] for entry in entries]),
        "runs": [
            *(kind_entry(run, kind) for run, kind in others),
            *(run_entry(run) for run in scans),
            *(trace_entry(trace) for trace in traces),
        ],
        "headline": [
            *(
                {"run": names[run.path] if len(names) > 1 else "", "findings": kind.findings(run)}
                for run, kind in others
            ),
            *scan_headlines(scans, found, names),
            *trace_headlines(traces, names),
        ]
        + ([{"run": "Together", "findings": together[0]["words"]}] if together else []),
        "readings": [{"label": reading.label, "findings": findings(reading)} for reading in found],
        "across": across,
        "glance": glance,
        "with_rows": any(reading.has_rows for reading in found),
        "with_pairs": any("similarity" in reading.tables for reading in found),
        "compare": [
            keep(f"c-{spec.name}", drawn(spec, stacked(alike, spec), "all readings"))
            for spec in ACROSS_VIEWS
            if len(alike := [reading for reading in found if reading.drawable([spec])]) > 1
        ],
        "steps": step_figures(found, keep),
        "layers": layers,
        "views": entries,
        "first_view": first_shown(views) if views else 0,
        "routing_sections": [
            {"name": name, "title": title, "words": words} for name, title, _, words, _ in SECTIONS
        ],
        "over_steps": step_sections(traces, names, keep),
        "together": together,
        "together_missing": "" if together else joint_missing(found, views),
        "told": told,
        "how_to_read": list(dict.fromkeys(kind.reading for _, kind in others if kind.reading)),
        "glossary": glossary_sections(
            [
                *dict.fromkeys(name for _, kind in others for name in kind.tables),
                *(name for name in SCAN_TABLES if any(name in reading.tables for reading in found)),
                *(ROUTING_TABLES if traces else ()),
            ]
        ),
        "glossary_json": script_json(
            {
                name: asdict(column)
                for name, column in (
                    COLUMNS | {name: metric.column for name, metric in (METRICS | DIAGNOSTICS).items()}
                ).items()
            }
        ),
        "payloads": payloads,
    }


def by_verb(runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """(scans, traces); a run of a kind the page knows nothing of is refused."""
    for run in runs:
        if run.info["verb"] not in ("scan", "trace") and kind_of(run) is None:
            raise BadInput(
                f"{run.path}: a run of {run.info['verb']!r}, of which there is no report; give another folder"
            )
    return [run for run in runs if run.info["verb"] == "scan"], [
        run for run in runs if run.info["verb"] == "trace"
    ]


def scan_headlines(scans: list[Run], found: list[View], names: dict[Any, str]) -> list[dict[str, Any]]:
    return [
        {
            "run": names[run.path] if len(names) > 1 else "",
            "findings": headline([reading for reading in found if reading.run is run]),
        }
        for run in scans
    ]


def trace_headlines(traces: list[TraceTables], names: dict[Any, str]) -> list[dict[str, Any]]:
    """Each trace's findings at its last step in its main phase, and what changed over its steps."""
    found = []
    for trace in traces:
        where = [names[trace.run.path]] if len(names) > 1 else []
        where += [of] if (of := which_findings(trace)) else []
        found.append({"run": ", ".join(where), "findings": trace_findings(trace)})
    return found


def page_title(runs: list[Run]) -> str:
    """What the runs call it themselves, else the models' names, or how many there are."""
    told = [kind.title(run) for run in runs if (kind := kind_of(run)) is not None and kind.title is not None]
    if told:
        return listed(told)
    names = list(
        dict.fromkeys(Path(item["path"]).name for run in runs for item in run.info.get("checkpoints", []))
    )
    names = names or [run.name for run in runs]  # a trace may be imported without its model
    return listed(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more checkpoints"


def stacked(found: list[View], spec: FigureSpec) -> Tables:
    """The tables a comparison needs, all views in one frame with a `view` column."""
    return {
        name: pd.concat(
            [reading.tables[name].assign(view=reading.label, run=str(reading.run.path)) for reading in found],
            ignore_index=True,
        )
        for name in spec.needs
    }


def step_figures(found: list[View], keep: Any) -> list[dict[str, Any]]:
    """Figures against the step, for every run and reading that has several steps."""
    groups: dict[tuple[Any, ...], list[View]] = {}
    for reading in found:
        groups.setdefault((reading.run.path, *(reading.keys[key] for key in VIEW)), []).append(reading)
    sections = []
    for number_, group in enumerate(group for group in groups.values() if len(group) > 1):
        label = f"{group[0].run.name} · {view_words({**group[0].keys, 'fold_norm': False})}"
        specs = group[0].drawable(ACROSS_STEPS)
        names = [keep(f"s{number_}-{spec.name}", drawn(spec, stacked(group, spec), label)) for spec in specs]
        sections += [{"label": label, "figures": names}] if names else []
    return sections


def whole_table(reading: View, name: str, title: str) -> dict[str, Any]:
    columns = [column for column in TABLES[name].columns if column not in KEY_COLUMNS]
    frame = reading.tables[name]
    if name == "ambiguity":
        frame = frame.sort_values(["rank", "layer"])
        columns = ["rank", "layer", *(column for column in columns if column not in ("rank", "layer"))]
    return table_payload(name, frame, columns, title)


def glance_table(reading: View) -> dict[str, Any]:
    """The one table of the summary: a row a layer, every number with its chance level beside it."""
    tables = reading.tables
    first = tables["orthogonality"].query("k == 1").set_index("layer")
    ambiguity = tables["ambiguity"].set_index("layer")
    rows = []
    for test in tables["alignment_tests"].sort_values("layer").to_dict("records"):
        layer = test["layer"]
        facts = reading.facts(layer)
        rows.append(
            [
                layer,
                verdict_name(reading, layer, test["verdict"]),
                facts["other_order"]["p"] if facts["other_order"] else test["p_accuracy"],
                test["best_k"],
                test["best_accuracy"],
                facts["chance_accuracy"],
                test["p_value"],
                test["q_value"],
                ambiguity.loc[layer, "ambiguity_score"],
                first.loc[layer, "mean_abs"],
                first.loc[layer, "chance"],
                first.loc[layer, "n_pairs_above_0_7"],
            ]
        )
    heads = [
        ("layer", "layer", "int"),
        ("verdict", "verdict", "text"),
        ("p_accuracy", "verdict p", "float"),
        ("best_k", "best k", "int"),
        ("best_accuracy", "accuracy", "float"),
        ("chance_accuracy", "by chance", "float"),
        ("p_value", "alignment p", "float"),
        ("q_value", "q", "float"),
        ("ambiguity_score", "ambiguity", "float"),
        ("mean_abs", "mean |cos|", "float"),
        ("chance", "by chance", "float"),
        ("n_pairs_above_0_7", "collapsed", "int"),
    ]
    return glance_payload(heads, rows)


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


def trace_entry(trace: TraceTables) -> dict[str, Any]:
    run = trace.run
    return {
        "name": run.name,
        "info": run.info,
        "coverage": [*trace_coverage(run), *steps_left_out(trace)],
        "command": trace_command(trace),
        "warnings": run.info.get("warnings", []),
        "seconds": number(sum(run.info["timings"].values())),
    }


def section_entries(run: Run, kind: RunKind, index: int, keep: Any) -> list[dict[str, Any]]:
    """A run's own sections, drawn."""
    return [
        section_entry(section, run.name, f"o{index}-{section.anchor}", keep) for section in kind.sections(run)
    ]


def section_entry(section: Section, run: str, prefix: str, keep: Any) -> dict[str, Any]:
    figures = [
        keep(f"{prefix}-{number_}-{spec.name}", drawn(spec, tables, section.title))
        for number_, (spec, tables) in enumerate(section.figures)
    ]
    tables = [keep(f"{prefix}-t{number_}", payload) for number_, payload in enumerate(section.tables)]
    return {
        "anchor": prefix,
        "run": run,
        "title": section.title,
        "words": section.words,
        "figures": figures,
        "tables": tables,
    }


def kind_entry(run: Run, kind: RunKind) -> dict[str, Any]:
    return {
        "name": run.name,
        "info": run.info,
        "coverage": kind.coverage(run),
        "command": kind.command(run),
        "warnings": run.info.get("warnings", []),
        "seconds": number(sum(run.info["timings"].values())),
    }


def glossary_sections(names: list[str]) -> list[dict[str, Any]]:
    """The glossary by table, each entry once, where it first appears.

    Routing metrics after the table that holds them.
    """
    seen: set[str] = set()
    sections = []
    for name in dict.fromkeys(names):
        spec = TABLES[name]
        entries = []
        for column in spec.columns:
            key = f"{name}.{column}" if f"{name}.{column}" in COLUMNS else column
            if key not in seen:
                seen.add(key)
                entries.append({"key": key, "name": column, **asdict(spec.column(column))})
        sections.append({"table": name, "meaning": spec.meaning, "entries": entries})
        if name == "routing_layers":
            metrics = [
                {"key": name, "name": name, **asdict(metric.column)} for name, metric in METRICS.items()
            ]
            sections.append(
                {"table": "routing_layers.metric", "meaning": "Every routing metric.", "entries": metrics}
            )
            if "steps" in names:  # of a training
                diagnosed = [
                    {"key": name, "name": name, **asdict(metric.column)}
                    for name, metric in DIAGNOSTICS.items()
                ]
                meaning = "What single routers of the lab say of themselves in training."
                sections.append(
                    {
                        "table": "routing_layers.metric, of one router",
                        "meaning": meaning,
                        "entries": diagnosed,
                    }
                )
    return sections
