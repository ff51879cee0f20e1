"""The content of the page: every run's summary and sections, as its verb gives them, for the template."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from moescope.errors import BadInput
from moescope.plotting.style import listed, number
from moescope.reporting.joint import joint_sections
from moescope.reporting.pack import figure_payload, script_json
from moescope.run import Run
from moescope.tables import Column
from moescope.verb import FigureSpec, Section, Selection, Tables


def page_content(runs: list[Run]) -> dict[str, Any]:
    """Return everything the template needs. Payloads are JSON, drawn by the page when they come into view."""
    runs = with_parts(runs)
    page = Page(run_names(runs))
    summaries = [page.summary(run) for run in runs]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.verb.name, []).append(run)
    sections = [entry for group in groups.values() for entry in page.sections(group)]
    joint = [
        {"anchor": section.anchor, "title": section.title, "parts": [page.entry(section, "all")]}
        for section in joint_sections(runs)
    ]
    guides = [paragraph for run in runs for paragraph in run.verb.guide(run)]
    glossary = glossary_sections(runs)
    entries = {entry["key"]: entry for section in glossary for entry in section["entries"]}
    return {
        "title": page_title(runs),
        "notices": list(dict.fromkeys(line for entry in summaries for line in entry["notices"])),
        "runs": summaries,
        "selectors": page.selectors(groups),
        "guide": list(dict.fromkeys(guides)),
        "glossary": glossary,
        "glossary_json": script_json(entries),
        "sections": [*sections, *joint],
        "first": page.first,
        "payloads": page.payloads,
    }


class Page:
    """The payloads of one page, and the views that its sections belong to."""

    def __init__(self, names: dict[Path, str]) -> None:
        self.names = names
        self.payloads: dict[str, str] = {}
        self.views: dict[str, dict[tuple[Path, str], int]] = {}  # verb -> (run, view) -> number
        self.first: list[str] = []  # payloads of the summary, which the page shows at once

    def keep(self, name: str, value: Any) -> str:
        """Keep a payload and return its name."""
        self.payloads[name] = script_json(value)
        return name

    def view_number(self, run: Run, view: str) -> int | None:
        """Return the number of a view among all views of its verb on this page."""
        if not view:
            return None
        known = self.views.setdefault(run.verb.name, {})
        return known.setdefault((run.path, view), len(known))

    def summary(self, run: Run) -> dict[str, Any]:
        """Return a run's part of the summary, and what its provenance shows."""
        if run.verb.summary is None:
            raise BadInput(f"{run.path}: a run of {run.verb.name!r} has no report; give another folder")
        summary = run.verb.summary(run)
        before = set(self.payloads)
        prefix = f"summary-{len(self.first)}-{len(before)}"
        sections = [self.entry(section, prefix, run) for section in summary.sections]
        self.first += [name for name in self.payloads if name not in before]
        return {
            "name": self.names[run.path],
            "verb": run.verb.name,
            "info": run.info,
            "coverage": list(dict.fromkeys(summary.coverage)),
            "key_numbers": [asdict(key) for key in summary.key_numbers],
            "findings": summary.findings,
            "notices": summary.notices,
            "sections": sections,
            "warnings": run.info.get("warnings", []),
            "seconds": number(sum(run.info["timings"].values())),
        }

    def sections(self, group: list[Run]) -> list[dict[str, Any]]:
        """Return the sections of all runs of one verb; those with the same anchor share one heading."""
        verb = group[0].verb
        merged: dict[str, dict[str, Any]] = {}
        for index, run in enumerate(group):
            for section in verb.sections(run, Selection()):
                entry = self.entry(section, f"{verb.name}{index}", run)
                entry["run"] = self.names[run.path] if len(self.names) > 1 else ""
                top = merged.setdefault(
                    section.anchor,
                    {"anchor": f"{verb.name}-{section.anchor}", "title": section.title, "parts": []},
                )
                top["parts"].append(entry)
        for section in verb.overlay(group):
            entry = self.entry(section, f"{verb.name}-overlay")
            top = {"anchor": f"{verb.name}-{section.anchor}", "title": section.title, "parts": [entry]}
            merged[f"overlay {section.anchor}"] = top
        return list(merged.values())

    def entry(
        self, section: Section, prefix: str, run: Run | None = None, view: int | None = None
    ) -> dict[str, Any]:
        """Return a section as data for the template; a folded one is a single payload, drawn when opened."""
        if run is not None and section.view:
            view = self.view_number(run, section.view)
        place = f"{prefix}-{section.anchor}" if view is None else f"{prefix}-v{view}-{section.anchor}"
        head = {
            "id": place if run is None or view is None else f"{run.verb.name}-v{view}-{section.anchor}",
            "title": section.title,
            "view": view,
            "group": run.verb.name if run is not None else "",
            "label": self.label(run, section.view) if run is not None and section.view else "",
            "folded": section.folded,
            "line": section.line,
            "badge": section.badge,
            "run": "",
        }
        if section.folded:
            return {**head, "payload": self.keep(place, folded_payload(section, place))}
        where = str(head["label"] or section.title)
        return {
            **head,
            "text": section.text,
            "findings": section.findings,
            "facts": section.facts,
            "figures": [
                self.keep(f"{place}-{count}-{spec.name}", drawn(spec, tables, where))
                for count, (spec, tables) in enumerate(section.figures)
            ],
            "tables": [
                self.keep(f"{place}-table{count}", table) for count, table in enumerate(section.tables)
            ],
            "widget": section.widget
            and {"name": section.widget[0], "payload": self.keep(f"{place}-widget", section.widget[1])},
            "sections": [self.entry(inner, place, run, view) for inner in section.sections],
        }

    def label(self, run: Run, view: str) -> str:
        return f"{self.names[run.path]} · {view}" if len(self.names) > 1 else view

    def selectors(self, groups: dict[str, list[Run]]) -> list[dict[str, Any]]:
        """Return one selector per verb that has several views on this page."""
        found = []
        for name, views in self.views.items():
            runs = {run.path: run for run in groups[name]}
            labels = [self.label(runs[path], view) for path, view in views]
            verb = groups[name][0].verb
            own = [index for (path, _), index in views.items() if path == groups[name][0].path]
            chosen = own[-1] if verb.opens_last else own[0]
            found.append({"group": name, "label": verb.view_label, "views": labels, "first": chosen})
        return found


def folded_payload(section: Section, where: str) -> dict[str, Any]:
    """Return a folded section's content, with the sections inside it."""
    return {
        "title": section.title,
        "text": section.text,
        "findings": section.findings,
        "facts": section.facts,
        "figures": [drawn(spec, tables, where) for spec, tables in section.figures],
        "tables": section.tables,
        "widget": section.widget,
        "sections": [folded_payload(inner, where) for inner in section.sections],
    }


def drawn(spec: FigureSpec, tables: Tables, where: str) -> dict[str, Any]:
    """Return the figure as data; one that cannot be drawn fails the report, with its name and place."""
    try:
        return figure_payload(spec.draw(tables), spec.wide)
    except Exception as error:
        raise RuntimeError(
            f"figure {spec.name} of {where} cannot be drawn: {type(error).__name__}: {error}"
        ) from error


def with_parts(runs: list[Run]) -> list[Run]:
    """Return the runs and, after them, those inside them that the same page shows; each once."""
    shown = {run.path.resolve(): run for run in runs}
    for run in runs:
        parts = run.parts if run.verb.parts else {}
        for name in run.verb.parts:
            if name in parts:
                shown.setdefault(parts[name].path.resolve(), parts[name])
    return list(shown.values())


def run_names(runs: list[Run]) -> dict[Path, str]:
    """Return a short name per run: its folder's, with the parent's where two runs share it."""
    plain = [run.name for run in runs]
    if len(set(plain)) < len(plain):
        return {run.path: f"{run.path.resolve().parent.name}/{run.name}" for run in runs}
    return {run.path: run.name for run in runs}


def page_title(runs: list[Run]) -> str:
    """Return what the runs call themselves, else the names of their models."""
    titles = [run.verb.title(run) for run in runs if run.verb.title is not None]
    if titles:
        return listed(titles)
    paths = [item["path"] for run in runs for item in run.info.get("checkpoints", [])]
    names = list(dict.fromkeys(Path(path).name for path in paths)) or [run.name for run in runs]
    return listed(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more checkpoints"


def glossary_sections(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the glossary by table, each entry once, where it first appears; terms follow their table."""
    tables = {name: run.verb.tables[name] for run in runs for name in run.tables}
    seen: set[str] = set()
    sections = []

    def entries(columns: dict[str, Column]) -> list[dict[str, Any]]:
        new = {key: column for key, column in columns.items() if key not in seen}
        seen.update(new)
        return [{"key": key, "name": key.rpartition(".")[2], **asdict(column)} for key, column in new.items()]

    for name, table in tables.items():
        columns = {table.key(column): table.column(column) for column in table.columns}
        sections.append({"table": name, "meaning": table.meaning, "entries": entries(columns)})
        if table.terms:
            sections.append(
                {
                    "table": f"{name}: terms",
                    "meaning": "The names in its rows.",
                    "entries": entries(dict(table.terms)),
                }
            )
    return sections
