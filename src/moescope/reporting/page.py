"""The content of the page as data: tabs with sections, key numbers, findings, map and expert pages."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import pandas as pd

from moescope.errors import BadInput
from moescope.plotting.style import CATEGORICAL, listed
from moescope.reporting.joint import expert_base, joint_sections
from moescope.reporting.pack import figure_payload, pack_text, packed, plain, script_json
from moescope.reporting.untrusted import visible
from moescope.run import Run
from moescope.storage import without_absolute_paths
from moescope.tables import Column
from moescope.verb import (
    Drawable,
    Figure,
    Finding,
    Measure,
    Section,
    Selection,
    Strip,
    Summary,
    Tables,
)

DIGITS = 4  # of numbers in the map
FIRST_SCREEN = 280  # height of a figure beside the map: it is seen without scrolling


class Tab(NamedTuple):
    """A tab of the page, and the command that fills it."""

    name: str
    title: str
    command: str = ""


TABS = (
    Tab("overview", "Overview"),
    Tab("results", "Results"),
    Tab("weights", "Weights", "moescope scan {model}"),
    Tab("routing", "Routing", "moescope trace {model} {text} --save-tokens"),
    Tab("experts", "Experts"),
    Tab("text", "Text", "moescope trace {model} {text} --save-tokens"),
    Tab("training", "Training", "moescope train CONFIG.toml"),
    Tab(
        "compression",
        "Compression",
        "moescope compress {model} --method reap --keep 0.5 {text} --apply NEW",
    ),
    Tab("interventions", "Interventions", "moescope intervene {model} --sweep experts {text}"),
    Tab("deployment", "Deployment", "moescope deploy {trace}"),
    Tab("methods", "Methods"),
)


def page_content(runs: list[Run], more: Sequence[Section] = (), anonymous: bool = False) -> dict[str, Any]:
    """Return what the template needs: the page's data, and payloads that are unpacked when needed."""
    page = Page(runs, more)
    overview = page.map_data()
    tabs = page.tabs()
    layers = {layer for measure in overview["measures"] for layer in measure["layers"]}
    name = page_title(page.runs) if len(page.roots) == 1 else first_names(page.side_names())
    sides: dict[int, list[Run]] = {}
    for run in page.runs:
        sides.setdefault(page.root[run.path.resolve()], []).append(run)
    words = {model_words(side) for side in sides.values()}
    data = {
        "title": ": ".join(filter(None, [*(words if len(words) == 1 else []), name])),
        "runs": [page.run_data(run) for run in page.runs],
        "roots": page.side_names(),
        "tabs": [tab for tab in tabs if tab["sections"] or tab["name"] in filled(layers)],
        "add": page.add(tab["name"] for tab in tabs if not tab["sections"]),
        "report": shlex.join(["moescope", "report", *(str(run.path) for run in page.roots), "NEW_RUN"]),
        "map": page.keep("map", overview),
        "layers": sorted(layers),
        "palette": list(CATEGORICAL),
        "domains": sorted({measure["domain"] for measure in overview["measures"] if measure["domain"]}),
        "experts": page.expert_data(),
        "views": page.selectors(),
        "run_views": page.run_views,
        "glossary": page.keep("glossary", glossary_sections(page.runs)),
        "guide": list(dict.fromkeys(line for run in page.runs for line in run.verb.guide(run))),
        "together": page.together,
        "notices": [{"text": text, "runs": numbers} for text, numbers in page.notices.items()],
    }
    data = spelled_out(data, anonymous)
    payloads = {name: spelled_out(value, anonymous, "\n") for name, value in page.payloads.items()}
    return {"title": data["title"], "data": script_json(data), "payloads": payloads}


@dataclass
class HeldRun(Run):
    """A run whose tables are read once, for as long as a page is built."""

    frames: dict[str, pd.DataFrame] = field(default_factory=dict, compare=False)

    def table(self, name: str) -> pd.DataFrame:
        if name not in self.frames:
            self.frames[name] = super().table(name)
        return self.frames[name].copy(deep=False)


class Page:
    """One page: its runs with their parts, its payloads, and the numbers of views."""

    def __init__(self, runs: list[Run], more: Sequence[Section] = ()) -> None:
        self.more = more  # sections that no single run has
        runs = [HeldRun(run.path, run.info) for run in runs]
        self.runs: list[Run] = with_parts(runs)
        self.names = run_names(self.runs)
        parts = {run.path: list(run.parts.values()) if run.verb.parts else [] for run in runs}
        inner = {part.path.resolve() for inside in parts.values() for part in inside}
        self.roots = [run for run in runs if run.path.resolve() not in inner] or runs
        self.sides = sides_of(self.roots)
        self.root = {
            run.path.resolve(): index
            for index, side in enumerate(self.sides)
            for root in side
            for run in (root, *parts[root.path])
        }
        self.payloads: dict[str, Any] = {}
        self.views: dict[str, list[str]] = {}  # verb -> labels of its views
        self.run_views: dict[int, list[str]] = {}  # run -> labels of its views
        self.notices: dict[str, list[int]] = {}  # text -> the runs it speaks of
        self.together: list[dict[str, Any]] = []  # findings on several runs of a verb
        self.summaries = {run.path: summary_of(run) for run in self.runs}
        self.bases = [expert_base(run) for run in self.runs]  # those of one base have the same experts
        for run in self.runs:  # in the order of the summary: not every view has a lead picture
            for section in self.summaries[run.path].sections:
                if section.view:
                    self.view(run, section.view)

    def keep(self, name: str, value: Any) -> str:
        """Keep a payload and return its name."""
        self.payloads[name] = value
        return name

    def side_names(self) -> list[str]:
        """Name every side after its run; one of several runs after their folder or model if those differ."""
        names = [" + ".join(self.names[run.path] for run in side) for side in self.sides]
        folders = [{run.path.resolve().parent.name for run in side} for side in self.sides]
        models = [{Path(path).name for run in side for path in model_of(run)} for side in self.sides]
        for known in (folders, models):
            shared = [next(iter(names_)) for names_ in known if len(names_) == 1]
            if all(len(side) > 1 for side in self.sides) and len(set(shared)) == len(self.sides):
                return shared
        return names

    def number(self, run: Run) -> int:
        return self.runs.index(run)

    def view(self, run: Run, label: str) -> str:
        """Note a view of the run's verb; views of several runs with the same label are one choice."""
        for known in (
            self.views.setdefault(run.verb.name, []),
            self.run_views.setdefault(self.number(run), []),
        ):
            if label not in known:
                known.append(label)
        return label

    # --- runs

    def run_data(self, run: Run) -> dict[str, Any]:
        """Return a run's summary and provenance."""
        summary = self.summaries[run.path]
        for line in summary.notices:
            self.notices.setdefault(line, []).append(self.number(run))
        prefix = f"summary{self.number(run)}"
        return {
            "name": self.names[run.path],
            "verb": run.verb.name,
            "tab": run.verb.tab,
            "root": self.root[run.path.resolve()],
            "base": self.bases.index(expert_base(run)),
            "coverage": list(dict.fromkeys(summary.coverage)),
            **shown_first(summary),
            "warnings": run.info.get("warnings", []),
            "info": self.keep(f"{prefix}-info", run.info),
        }

    # --- tabs

    def tabs(self) -> list[dict[str, Any]]:
        """Return every tab with its sections, in the order of the runs; what compares runs comes first."""
        sections: dict[str, list[dict[str, Any]]] = {tab.name: [] for tab in TABS}
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.verb.name, []).append(run)
        for group in groups.values():
            verb = group[0].verb
            overlays = []
            for section in verb.overlay(group):
                tab = section.tab or verb.tab or "overview"
                if tab == "overview":  # what compares runs stands with the first findings
                    self.together += [
                        {"verb": verb.name, "tab": verb.tab, **finding}
                        for finding in placed(section.findings)
                    ]
                    section = replace(section, findings=[])
                overlays.append((tab, self.entry(section, f"{verb.name}-overlay")))
            for tab, entry in overlays if len(group) > 1 else ():
                sections[tab].append(entry)
            compared = any(tab == "overview" for tab, _ in overlays)
            for run in group:
                summary = self.summaries[run.path]
                for section in [
                    *summary.sections,
                    *verb.sections(run, Selection()),  # their order is that of the views
                    *self.leads(run, summary),
                ]:
                    tab = section.tab or verb.tab or "overview"
                    if tab != "overview" or not compared:
                        sections[tab].append(self.entry(section, f"{verb.name}{self.number(run)}", run))
            for tab, entry in overlays if len(group) == 1 else ():
                sections[tab].append(entry)
        for section in joint_sections(self.runs):
            sections[section.tab or "overview"].append(self.entry(section, "joint"))
        for section in self.more:
            sections[section.tab or "results"].append(self.entry(section, "results"))
        return [{"name": tab.name, "title": tab.title, "sections": sections[tab.name]} for tab in TABS]

    def add(self, missing: Iterable[str]) -> list[dict[str, str]]:
        """Return the commands that fill missing tabs, each once, with the model and text of these runs."""
        infos, commands = [run.info for run in self.runs], {tab.name: tab.command for tab in TABS}
        models = [item["path"] for info in infos for item in info.get("checkpoints") or []]
        texts = [word for info in infos for word in text_words(info.get("command") or "")]
        traces = [str(run.path) for run in self.runs if run.verb.name == "trace"]
        known = {
            "model": shlex.quote(models[-1]) if models else "MODEL",
            "text": shlex.join(dict.fromkeys(texts)) or "--text FILE",
            "trace": shlex.quote(traces[0]) if traces else "TRACE",
        }
        titles = {tab.name: tab.title for tab in TABS}
        found: dict[str, str] = {}
        for name in missing:
            if commands[name]:
                found.setdefault(commands[name].format(**known), titles[name])
        return [{"title": title, "command": command} for command, title in found.items()]

    def leads(self, run: Run, summary: Summary) -> list[Section]:
        """Return what leads the overview, of every view; of a run inside another that one's picture leads."""
        if run not in self.roots:
            return []
        return [
            replace(section, tab="overview", view=shown.view)
            for shown in (summary, *summary.views.values())
            for section in shown.lead
        ]

    def entry(self, section: Section, prefix: str, run: Run | None = None, view: str = "") -> dict[str, Any]:
        """Return a section as data; one of a layer, or folded, is a single payload, unpacked when shown."""
        if run is not None and section.view:
            view = self.view(run, section.view)
        place = "-".join(part for part in (prefix, slug(view), section.anchor) if part)
        head = {
            "id": section.anchor,
            "title": section.title,
            "view": view,
            "verb": run.verb.name if run is not None else "",
            "run": self.number(run) if run is not None else None,
            "layer": section.layer,
            "folded": section.folded,
            "line": section.line,
            "badge": section.badge,
        }
        if section.folded or section.layer is not None:
            content = section_payload(section, place)
            return {**head, "payload": self.keep(place, content), "figures": figure_index(content)}
        return {
            **head,
            "text": section.text,
            "findings": [str(line) for line in section.findings],
            "facts": section.facts,
            "figures": [
                self.figure_entry(f"{place}-{count}-{spec.name}", drawn(spec, tables, place), section.tab)
                for count, (spec, tables) in enumerate(section.figures)
            ],
            "tables": [
                {"payload": self.keep(f"{place}-table{count}", table), "title": table["title"]}
                for count, table in enumerate(section.tables)
            ],
            "widget": section.widget
            and {"name": section.widget[0], "payload": self.keep(f"{place}-widget", section.widget[1])},
            "sections": [self.entry(inner, place, run, view) for inner in section.sections],
        }

    def figure_entry(self, place: str, figure: dict[str, Any], tab: str) -> dict[str, Any]:
        """Keep a figure's payload and return what a section tells of it."""
        lower = tab == "overview" and figure["height"] == Figure.height
        return {
            "payload": self.keep(place, figure),
            **{name: figure[name] for name in ("name", "title", "wide")},
            "height": FIRST_SCREEN if lower else figure["height"],
        }

    def selectors(self) -> list[dict[str, Any]]:
        """Return one selector per verb that has several views on this page."""
        selectors = []
        for name, labels in self.views.items():
            if len(labels) > 1:
                verb = next(run.verb for run in self.runs if run.verb.name == name)
                first = len(labels) - 1 if verb.opens_last else 0
                selectors.append({"verb": name, "label": verb.view_label, "views": labels, "first": first})
        return selectors

    # --- map and experts

    def map_data(self) -> dict[str, Any]:
        """Return measures and strips of every run, as layers x experts and as layers."""
        measures, strips = [], []
        for index, run in enumerate(self.runs):
            for measure in run.verb.measures(run):
                measures.append({"run": index, "verb": run.verb.name, **measure_payload(measure)})
            for strip in run.verb.strips(run):
                strips.append({"run": index, "verb": run.verb.name, **strip_payload(strip)})
        return {"measures": measures, "strips": strips}

    def expert_data(self) -> list[dict[str, Any]]:
        """Return where the expert pages of every run, view and layer are."""
        entries = []
        for index, run in enumerate(self.runs):
            for cards in run.verb.experts(run):
                name = f"cards{index}-{slug(cards.view)}-{cards.layer}"
                self.keep(name, {str(expert): plain(blocks) for expert, blocks in cards.cards.items()})
                place = {"run": index, "verb": run.verb.name, "view": cards.view, "layer": cards.layer}
                entries.append({**place, "payload": name})
        return entries


def model_of(run: Run) -> list[str]:
    return [item["path"] for item in run.info.get("checkpoints") or []]


def folder_of(run: Run) -> list[str]:
    return [str(run.path.resolve().parent)]


def sides_of(runs: list[Run]) -> list[list[Run]]:
    """Return what is compared with each other: single runs; where several verbs have equally many runs, one
    run per verb, those of one folder or model together, else in the order given."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.verb.name, []).append(run)
    first, *others = groups.values()
    if not others or len(first) == 1 or any(len(group) != len(first) for group in others):
        return [[run] for run in runs]
    for group in others:
        for key in (folder_of, model_of):
            wanted, keys = [key(run) for run in first], [key(run) for run in group]
            if sorted(keys) == sorted(wanted) and all(wanted.count(item) == 1 for item in wanted):
                group[:] = [group[keys.index(item)] for item in wanted]
                break
    return [list(side) for side in zip(first, *others, strict=True)]


def summary_of(run: Run) -> Summary:
    if run.verb.summary is None:
        raise BadInput(f"{run.path}: a run of {run.verb.name!r} has no report; give another folder")
    return run.verb.summary(run)


def shown_first(summary: Summary) -> dict[str, Any]:
    """Return what leads the overview, also of the summary's other views and of its domains."""
    return {
        "verdict": placed([summary.verdict] if summary.verdict else []),
        "key_numbers": [plain(asdict(key)) for key in summary.key_numbers],
        "findings": placed(summary.findings),
        "views": {view: shown_first(other) for view, other in summary.views.items()},
        "domains": {domain: shown_first(of) for domain, of in summary.domains.items()},
    }


def placed(findings: list[str]) -> list[dict[str, Any]]:
    """Return findings with the place where the page shows them; empty: the verb's tab."""
    return [
        {"text": str(line), "place": line.place if isinstance(line, Finding) else {}} for line in findings
    ]


def measure_payload(measure: Measure) -> dict[str, Any]:
    """Return a measure as matrices with one row per layer; what a layer does not have is null."""
    frame = measure.frame
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    width = int(frame["expert"].max()) + 1 if len(frame) else 0
    rows = np.searchsorted(layers, frame["layer"].to_numpy(int))
    columns = frame["expert"].to_numpy(int)

    def matrix(values: pd.Series) -> list[list[Any]]:
        cells = np.full((len(layers), width), np.nan)
        cells[rows, columns] = pd.to_numeric(values, errors="coerce").to_numpy(float)
        return [[None if np.isnan(cell) else float(f"{cell:.{DIGITS}g}") for cell in row] for row in cells]

    names = ("value", "chance", "low", "high", "noise", "beyond", "mark", "cluster")
    return {
        **{name: value for name, value in vars(measure).items() if name != "frame"},
        "layers": layers,
        "experts": width,
        **{name: matrix(frame[name].astype(float)) for name in names if name in frame},
    }


def strip_payload(strip: Strip) -> dict[str, Any]:
    """Return a strip as lists with one value per layer."""
    columns = [name for name in ("layer", "value", "chance", "word") if name in strip.frame]
    return {
        **{name: value for name, value in vars(strip).items() if name != "frame"},
        **{name: plain(strip.frame[name].tolist()) for name in columns},
    }


def section_payload(section: Section, where: str) -> dict[str, Any]:
    """Return a section's content in one piece, with the sections inside it."""
    return {
        "title": section.title,
        "text": section.text,
        "findings": [str(line) for line in section.findings],
        "facts": section.facts,
        "figures": [drawn(spec, tables, where) for spec, tables in section.figures],
        "tables": section.tables,
        "widget": section.widget,
        "sections": [section_payload(inner, where) for inner in section.sections],
    }


def figure_index(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return name and title of every figure in a section's content, for search and links."""
    own = [{"name": figure["name"], "title": figure["title"]} for figure in content["figures"]]
    return own + [entry for inner in content["sections"] for entry in figure_index(inner)]


def drawn(spec: Drawable, tables: Tables, where: str) -> dict[str, Any]:
    """Return the figure as data; one that cannot be drawn fails the report, with its name and place."""
    try:
        return figure_payload(spec.draw(tables), spec.wide)
    except Exception as error:
        raise RuntimeError(
            f"figure {spec.name} of {where} cannot be drawn: {type(error).__name__}: {error}"
        ) from error


def filled(layers: Iterable[int]) -> tuple[str, ...]:
    """Return the tabs that need no section: experts are shown where a map has layers."""
    return ("overview", "methods", *(["experts"] if layers else []))


def text_words(command: str) -> list[str]:
    """Return the options of a command that name its text, each as one word: --text=FILE."""
    words = shlex.split(command)
    pairs = itertools.pairwise(words)
    return [f"{flag}={value}" for flag, value in pairs if flag in ("--text", "--domain", "--token-ids")]


def slug(words: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in words)


def spelled_out(value: Any, anonymous: bool, shown: str = "") -> Any:
    """Return the data with invisible characters of every text spelled out, but for those that are shown.

    Names are not trusted. If anonymous, also without absolute paths.
    """
    if isinstance(value, str):
        text = without_absolute_paths(value) if anonymous else value
        return shown.join(map(visible, text.split(shown))) if shown else visible(text)
    if isinstance(value, dict):
        return {
            key: item if key == "bdata" else spelled_out(item, anonymous, shown)  # numbers in base64
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [spelled_out(item, anonymous, shown) for item in value]
    return value


def with_parts(runs: list[Run]) -> list[Run]:
    """Return the runs and, after them, those inside them that the same page shows; each once."""
    shown = {run.path.resolve(): run for run in runs}
    for run in runs:
        parts = run.parts if run.verb.parts else {}
        for name in run.verb.parts:
            if name in parts:
                part = HeldRun(parts[name].path, parts[name].info)
                shown.setdefault(part.path.resolve(), part)
    return list(shown.values())


def run_names(runs: list[Run]) -> dict[Path, str]:
    """Return a short name per run: its folder's, with those above it where several runs share the name."""
    names = {run.path: run.name for run in runs}
    for above in range(1, max((len(path.resolve().parts) for path in names), default=1)):
        times = Counter(names.values())
        shared = [path for path, name in names.items() if times[name] > 1]
        names |= {path: "/".join(path.resolve().parts[-1 - above :]) for path in shared}
    stems = {path: name.rpartition("/")[0] for path, name in names.items()}
    same_end = len({name.rpartition("/")[2] for name in names.values()}) == 1
    return stems if same_end and all(stems.values()) else names  # main/run, ablation/run: main, ablation


def page_title(runs: list[Run]) -> str:
    """Return what the runs call themselves, else the names of their models."""
    titles = [title for run in runs if run.verb.title is not None and (title := run.verb.title(run))]
    if titles:
        return listed(titles)
    paths = [item["path"] for run in runs for item in run.info.get("checkpoints", [])]
    names = list(dict.fromkeys(Path(path).name for path in paths)) or [run.name for run in runs]
    return first_names(names)


def first_names(names: list[str]) -> str:
    return listed(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"


def model_words(runs: list[Run]) -> str:
    """ "mixtral, 26 layers × 64 experts, top 6", as far as the runs know it; "" where they know no shape."""
    models: list[dict[str, Any]] = []
    trained = [run.info.get("arguments", {}).get("model") for run in runs]
    for run in runs:
        setup = run.info.get("setup") or {}
        models += [item for item in run.info.get("coverage") or [] if isinstance(item, dict)]
        trained.append(setup[0] if isinstance(setup, list) else setup)
    models += [item for item in trained if isinstance(item, dict)]
    names = {
        "type": ("model_type", "family", "router"),
        "layers": ("layers_found", "layers"),
        "experts": ("experts_per_layer", "experts"),
        "top": ("k", "top_k"),
    }
    known = {
        key: next((item[name] for item in models for name in of if item.get(name)), None)
        for key, of in names.items()
    }
    if not known["experts"] or not isinstance(known["layers"], int):
        return ""
    lists = [value if isinstance(value, list) else [value] for value in (known["experts"], known["top"])]
    experts, top = ("/".join(map(str, value)) for value in lists)
    name = f"{known['type']}, " if isinstance(known["type"], str) else ""
    routed = f", top {top}" if known["top"] else ""
    return f"{name}{known['layers']} layers × {experts} experts{routed}"


def glossary_sections(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the glossary by table, each entry once, where it first appears; terms follow their table."""
    tables = {name: run.verb.tables[name] for run in runs for name in run.tables}
    seen: set[str] = set()
    sections = []

    def add(title: str, meaning: str, columns: Mapping[str, Column]) -> None:
        new = {key: column for key, column in columns.items() if key not in seen}
        seen.update(new)
        words = [{"key": key, "name": key.rpartition(".")[2], **column.words} for key, column in new.items()]
        sections.append({"table": title, "meaning": meaning, "entries": words})

    for name, table in tables.items():
        add(name, table.meaning, {table.key(column): table.column(column) for column in table.columns})
        if table.terms:
            add(f"{name}: terms", "The names in its rows.", table.terms)
    return sections


# --- the page's content through the template into one file that opens offline


SCRIPTS = (
    *("core", "state", "versus", "figures", "sections", "strips", "map"),
    *("experts", "text", "continuations", "slots", "methods", "overview", "search", "frame"),
)


def render(content: dict[str, Any]) -> str:
    """Return the whole HTML document: style, scripts and plotly.js inside it, each once."""
    here = files("moescope.reporting") / "assets"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (here / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        title=content["title"],
        data=content["data"],
        payloads={name: packed(value) for name, value in content["payloads"].items()},
        style=(here / "style.css").read_text(encoding="utf-8"),
        scripts=[(here / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS],
        plotly=packed_plotly(),
    )


@cache
def packed_plotly() -> str:
    from plotly.offline import get_plotlyjs

    return pack_text(get_plotlyjs())
