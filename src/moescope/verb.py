"""What a verb gives the command line and the report: one `Verb` record per verb and its values.

A verb's options are defined once, in the signature and the numpydoc text of its public function. The command
line, the identity by which a run is resumed and the command under "Reproduce this run" follow from them.
"""

from __future__ import annotations

import inspect
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moescope.checkpoint.location import hide_credentials

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure as PlotlyFigure

    from moescope.run import Run
    from moescope.tables import Table

Tables = dict[str, "pd.DataFrame"]
Trace = dict[str, Any]
Payload = dict[str, Any]  # what the page's script draws, as plain data

# Options that change no number: they may differ when a run is resumed.
INCIDENTAL = frozenset({"out", "device", "engine", "address", "jobs", "quiet", "overwrite", "resume"})


# --- figures


@dataclass(frozen=True)
class Slider:
    """A choice that a reader slides through: of its traces, `per_value` in a row belong to each value."""

    label: str
    values: list[str]
    start: int = 0
    per_value: int = 1
    captions: list[str] = field(default_factory=list)  # the figure's caption at each value
    orders: list[list[str]] = field(default_factory=list)  # another order of the categories per value
    domain_captions: dict[str, list[str]] = field(default_factory=dict)  # those of a selected domain


@dataclass(frozen=True)
class Figure:
    """Traces and layout for plotly, with words: title (what is plotted), caption (what this run shows).

    `columns` are the glossary entries that define its terms; `details` stands with them behind a click.
    """

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    data: list[Trace]
    layout: dict[str, Any]
    slider: Slider | None = None
    height: int = 340
    details: str = ""

    def to_plotly(self, **layout: Any) -> PlotlyFigure:
        """Return the figure as a plotly Figure; of a slider's traces only those of its starting value."""
        from plotly.graph_objects import Figure as PlotlyFigure

        data = self.data
        if self.slider is not None:
            count = len(self.slider.values) * self.slider.per_value
            first = self.slider.start * self.slider.per_value
            data = [*data[first : first + self.slider.per_value], *data[count:]]
        return PlotlyFigure({"data": data, "layout": {"height": self.height, **self.layout, **layout}})


@dataclass(frozen=True)
class FigureSpec:
    """A figure that can be drawn: its name, the tables it reads, and the function that draws it from them."""

    name: str
    needs: tuple[str, ...]
    draw: Callable[[Tables], Figure]
    wide: bool = False
    metrics: tuple[str, ...] = ()  # routing metrics it cannot do without
    description: str = ""  # one line; by default the first line of the function's docstring
    condition: Callable[[Tables], bool] = lambda tables: True  # what the tables must hold besides

    @property
    def line(self) -> str:
        """One line that says what the figure shows."""
        return self.description or (inspect.getdoc(self.draw) or self.name).splitlines()[0]

    def can_draw(self, tables: Tables) -> bool:
        """Return whether the tables hold what the figure needs."""
        if not all(name in tables and len(tables[name]) for name in self.needs):
            return False
        if not self.metrics:
            return self.condition(tables)
        rows = tables["routing_layers"]
        return set(self.metrics) <= set(rows["metric"][rows["value"].notna() & (rows["domain"] == "")])


# --- the page


@dataclass(frozen=True)
class Selection:
    """What a reader has selected: column -> value, such as layer=3; absent: the verb's default."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the frame's rows of the selected values; columns it does not have are ignored."""
        for column, value in self.values.items():
            if column in frame:
                frame = frame[frame[column] == value]
        return frame


@dataclass(frozen=True)
class Section:
    """One part of the page: text, figures, tables, then sections inside it.

    Of sections with a `view` or a `layer`, the page shows those of the selected view and layer. A widget is
    drawn by the page's script: (name of its function, its data).
    """

    anchor: str  # its id in the page, unique within a run
    title: str
    text: str = ""
    figures: list[tuple[FigureSpec, Tables]] = field(default_factory=list)
    tables: list[Payload] = field(default_factory=list)
    widget: tuple[str, Any] | None = None
    view: str = ""
    findings: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)  # a small table: name -> value
    sections: list[Section] = field(default_factory=list)
    folded: bool = False  # one line until it is opened
    line: str = ""  # what a folded section says when it is closed, after its title otherwise
    badge: tuple[str, str] | None = None  # (kind, word) after its title
    tab: str = ""  # of the page; empty: the verb's
    layer: int | None = None  # None: a section on all layers


class Finding(str):
    """A sentence of a summary that knows where the page shows it: tab, layer, expert, colour of the map."""

    place: dict[str, Any]

    def __new__(cls, text: str, **place: Any) -> Finding:
        finding = super().__new__(cls, text)
        finding.place = place
        return finding


@dataclass(frozen=True)
class KeyNumber:
    """A number that leads the overview, with its chance level or baseline and a word for how it compares."""

    name: str
    value: float
    chance: float | None = None
    unit: str = ""
    word: str = ""
    reference: str = "chance"  # what `chance` is
    most: float | None = None  # the end of its bar, such as the value at collapse


@dataclass(frozen=True)
class Summary:
    """What a run shows first: the same in the terminal, in --json and at the top of the page."""

    coverage: list[str]
    findings: list[str]
    key_numbers: list[KeyNumber] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)  # tables below the findings, on the page only
    notices: list[str] = field(default_factory=list)  # what a reader must know before passing the page on
    details: dict[str, Any] = field(default_factory=dict)  # more for --json
    # view -> key numbers and findings, of views that differ from the one above
    views: dict[str, tuple[list[KeyNumber], list[str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """A colour of the layers x experts map: one value per layer and expert, with its chance level.

    `frame` has the columns layer, expert, value; where they apply also chance, low and high (an interval of
    the value), noise (its standard deviation by chance), beyond (whether it exceeds chance), mark (experts to
    cross out) and cluster (an expert's place in an order of its layer that puts related ones side by side).
    """

    name: str
    title: str
    frame: pd.DataFrame
    unit: str = ""
    caption: str = ""  # what the map shows, with its chance level
    middle: float | None = None  # the centre of a diverging scale
    logarithmic: bool = False
    limits: tuple[float, float] | None = None  # of the colour scale; by default those of the values
    view: str = ""
    domain: str = ""  # of the text that it is about
    outline: tuple[str, str] = ("beyond chance", "within chance")  # of a cell whose `beyond` is true, false


@dataclass(frozen=True)
class Strip:
    """One number per layer, drawn beside the map. Columns of `frame`: layer, value; chance, word if any."""

    name: str
    title: str
    frame: pd.DataFrame
    view: str = ""
    measure: str = ""  # of the map, which it stands beside first


@dataclass(frozen=True)
class LayerCards:
    """A verb's part of the pages of one layer's experts: expert -> blocks that the page's script draws."""

    layer: int
    cards: Mapping[int, list[Payload]]
    view: str = ""


# --- options


@dataclass(frozen=True)
class Option:
    """One parameter of a verb function as the command line offers it."""

    name: str  # of the parameter; a trailing underscore is dropped on the command line
    kind: Literal["flag", "text", "int", "float"]
    help: str
    default: Any = None
    positional: bool = False
    repeated: bool = False  # *models, or an option that may be given several times
    required: bool = False
    choices: tuple[str, ...] = ()
    metavar: str = ""
    shown_default: str = ""
    more: bool = False  # stands in the help's second panel

    @property
    def flag(self) -> str:
        """Its spelling on the command line; a flag that is on by default is switched off with --no-..."""
        word = self.name.rstrip("_").replace("_", "-")
        return f"--no-{word}" if self.kind == "flag" and self.default else f"--{word}"


def options_of(function: Callable[..., Any]) -> list[Option]:
    """Return the options of a verb function, from its signature and its numpydoc text.

    The text gives each parameter as `name : METAVAR, repeatable, default words` with its help below;
    parameters under "Other Parameters" stand in the help's second panel.
    """
    documented = documented_parameters(function)
    scope = inspect.unwrap(function).__globals__
    options = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in documented:
            raise TypeError(f"{function.__qualname__}: parameter {name!r} is not documented")
        kind_text, help_text, more = documented[name]
        words = [word.strip() for word in kind_text.split(",")]
        shown = next((word[len("default ") :] for word in words if word.startswith("default ")), "")
        annotation = parameter.annotation
        annotation = eval(annotation, dict(scope)) if isinstance(annotation, str) else annotation
        members = union_members(annotation)
        literals = [value for member in members for value in literal_values(member)]
        several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        kind: Literal["flag", "text", "int", "float"] = "text"
        if bool in members:
            kind = "flag"
        elif members <= {int}:
            kind = "int"
        elif members <= {float, int}:
            kind = "float"
        options.append(
            Option(
                name,
                kind,
                help_text,
                None if parameter.default is inspect.Parameter.empty else parameter.default,
                positional=parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
                repeated=several or "repeatable" in words,
                required=parameter.default is inspect.Parameter.empty and not several,
                choices=tuple(map(str, literals)) if members == literal_members(members) else (),
                metavar=words[0] if words[0].isupper() else "",
                shown_default=shown,
                more=more,
            )
        )
    return options


def union_members(annotation: Any) -> set[Any]:
    """Return the types of a union, None aside; a generic such as Iterable[str] counts as itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = set().union(*(union_members(member) for member in typing.get_args(annotation)))
    else:
        members = {annotation}
    return members - {type(None)}


def literal_members(members: Iterable[Any]) -> set[Any]:
    return {member for member in members if typing.get_origin(member) is Literal}


def literal_values(member: Any) -> tuple[Any, ...]:
    return typing.get_args(member) if typing.get_origin(member) is Literal else ()


def documented_parameters(function: Callable[..., Any]) -> dict[str, tuple[str, str, bool]]:
    """Return (kind, help, whether it is an other parameter) per parameter of a numpydoc text."""
    found: dict[str, tuple[str, str, bool]] = {}
    lines = (inspect.getdoc(function) or "").splitlines()
    section = ""
    names: list[str] = []
    for index, line in enumerate(lines):
        if index + 1 < len(lines) and lines[index + 1] and set(lines[index + 1]) == {"-"}:
            section, names = line.strip(), []
        elif section in ("Parameters", "Other Parameters") and set(line) != {"-"} and line:
            if not line.startswith(" "):
                head, _, kind = line.partition(" : ")
                names = [name.strip().lstrip("*") for name in head.split(",")]
                found |= {name: (kind.strip(), "", section.startswith("Other")) for name in names}
            else:
                for name in names:
                    kind, text, more = found[name]
                    found[name] = kind, f"{text} {line.strip()}".strip(), more
    return found


def summary_of(function: Callable[..., Any]) -> str:
    """Return a verb function's text up to its first numpydoc section: the command's help."""
    return re.split(r"\n\S[^\n]*\n-{3,}", inspect.getdoc(function) or "")[0].strip()


def canonical(value: Any) -> Any:
    """Return an option's value as run.json holds it: paths as text, sequences as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [canonical(item) for item in value]
    return value


# --- the record


def no_sections(run: Run, selection: Selection) -> list[Section]:
    return []


def all_rows(run: Run, selection: Selection) -> Tables:
    """Return every table of the run, narrowed to the selection."""
    return {name: selection.rows(run.table(name)) for name in run.tables}


@dataclass(frozen=True)
class Verb:
    """A verb: its public function, what it writes, and what the terminal and the page show of its runs."""

    name: str
    run: Callable[..., Any] | None = None  # None: its runs are made otherwise, as Monitor's are
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Sequence[FigureSpec] = ()
    summary: Callable[[Run], Summary] | None = None
    sections: Callable[[Run, Selection], list[Section]] = no_sections
    select: Callable[[Run, Selection], Tables] = all_rows  # tables of the selected or the default view
    tab: str = ""  # of the page, for sections that name none; empty: overview
    measures: Callable[[Run], list[Measure]] = lambda run: []  # what the layers x experts map can show
    strips: Callable[[Run], list[Strip]] = lambda run: []  # numbers per layer beside the map
    experts: Callable[[Run], Iterable[LayerCards]] = lambda run: ()  # its part of the expert pages
    overlay: Callable[[list[Run]], list[Section]] = lambda runs: []  # all runs of this verb on one page
    guide: Callable[[Run], list[str]] = lambda run: []  # paragraphs on how to read it
    # of the page, where checkpoint names do not say what it is about; "" where they do
    title: Callable[[Run], str] | None = None
    parts: tuple[str, ...] = ()  # folders of runs inside a run that the same page shows
    view_label: str = "View"  # what the selector of views is called
    opens_last: bool = False  # whether the page opens with the last view, such as the last step
    incidental: frozenset[str] = frozenset()  # options that change no number, besides INCIDENTAL
    grows: bool = False  # whether its tables can be read before it is done: training may take weeks
    continues: bool = False  # whether a finished run may be continued: the states of its tasks stay
    files: tuple[str, ...] = ()  # what it writes besides tables
    lines: Callable[[Any], list[str]] | None = None  # of a command without tables: its value for a person
    dry_run: Callable[..., Any] | None = None  # called with the same options by --dry-run
    dry_run_lines: Callable[[Any], list[str]] | None = None  # what it returns, for a person
    unknown_option: Callable[[str], str] = lambda name: ""  # what to do instead of giving --name

    @cached_property
    def options(self) -> list[Option]:
        return options_of(self.run) if self.run is not None else []

    @property
    def returns_run(self) -> bool:
        """Whether its function returns a Run, so that the command line writes a report of it."""
        return self.run is not None and inspect.signature(self.run).return_annotation == "Run"

    def figure(self, name: str) -> FigureSpec | None:
        return next((spec for spec in self.figures if spec.name == name), None)

    def identity(self, given: Mapping[str, Any], **parsed: Any) -> dict[str, Any]:
        """Return the options that change a number, as stored: those given, with what was parsed from them."""
        outside = INCIDENTAL | self.incidental
        values = {**given, **parsed}
        names = [option.name for option in self.options if not option.positional]
        return {name: canonical(values[name]) for name in names if name not in outside}

    def command(self, given: Mapping[str, Any]) -> str:
        """Return the command line that gives these options; passwords in URLs are left out."""
        words = ["moescope", self.name]
        for option in self.options:
            value = given.get(option.name, option.default)
            if value is None or (value == option.default and not option.required) or value in ((), []):
                continue
            several = option.repeated and not isinstance(value, str | Path)
            values = [option_word(item) for item in value] if several else [option_word(value)]
            if option.positional:
                words += values
            elif option.kind == "flag":
                words += [option.flag]
            else:
                words += [word for item in values for word in (option.flag, item)]
        return shlex.join(words)


def option_word(value: Any) -> str:
    """Return one value as it is written on the command line."""
    if isinstance(value, Iterable) and not isinstance(value, str | Path):
        return ",".join(map(str, value))
    text = str(value)
    name, _, address = text.partition("=")
    if "://" in address and "://" not in name:  # NAME=URL
        return f"{name}={hide_credentials(address)}"
    return hide_credentials(text) if "://" in text else text
