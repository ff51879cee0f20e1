"""What a verb gives the command line and the report: one `Verb` record per verb and its values.

A verb's options are defined once, in the signature and the numpydoc text of its public function. The command
line, the identity by which a run is resumed and the command under "Reproduce this run" follow from them.
"""

from __future__ import annotations

import inspect
import operator
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from moescope.checkpoint.location import hide_credentials
from moescope.errors import BadInput, unknown_name

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure as PlotlyFigure

    from moescope.run import Run
    from moescope.tables import Table

Tables = dict[str, "pd.DataFrame"]
Trace = dict[str, Any]
Payload = dict[str, Any]  # what the page's script draws, as plain data
Kind = Literal["flag", "text", "int", "float"]  # of an option

# Options that change no number: they may differ when a run is resumed.
INCIDENTAL = frozenset({"out", "device", "engine", "address", "jobs", "quiet", "overwrite", "resume"})

# Texts of options that several verbs share; a verb's own text of one replaces it.
COMMON = """
Parameters
----------
text : PATH, repeatable
    Text to read: file, folder, .jsonl, hf://datasets/OWNER/NAME, or - for standard input.
domain : NAME=PATH, repeatable
    Text of a named domain, such as code=src.
token_ids : FILE
    Token ids instead of text: .npy, or .jsonl with one list per line.
max_tokens : int >= 1, <= 1e15, default all
    Tokens to read at most, shared evenly by domains and documents.
layers : LAYERS, default all
    Layers, such as 0,5,9-12.
out : DIR, default a new one in runs/
    Run folder.
device : DEVICE
    auto, cpu, cuda or cuda:0; mps means cpu.

Other Parameters
----------------
revision : REVISION, default main
    Branch, tag or commit of a hub id.
dtype : DTYPE
    Precision; auto: as stored.
batch_size : int >= 1, <= 1e6
    Documents per batch.
chat_template : bool
    Read documents as user messages.
trust_remote_code : bool
    Run the Python code that the checkpoint brings with it.
execution : WAY
    Run whole, sharded, or by layer.
memory : SIZE, default 80 % of free
    Most memory, of each worker: 8GB.
engine : ENGINE
    Run here, or on Ray (extra `ray`).
address : ADDRESS
    Ray cluster: auto or HOST:PORT.
jobs : N >= 1, <= 1024, default as many as fit
    Parts of the text on Ray.
seed : int >= 0, < 1e18
    Seed of random draws.
overwrite : bool
    Replace the run in --out.
quiet : bool
    Print nothing but errors.
"""
SIGNS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
SIGN_WORDS = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}
KINDS: dict[Kind, set[type]] = {"flag": {bool}, "int": {int}, "float": {float, int}}
# of numpydoc texts: title of a section, parameter with kind and help, bounds and default within the kind
SECTION = re.compile(r"^(\S[^\n]*)\n-{3,}$", re.MULTILINE)
PARAMETER = re.compile(r"^(\S.*?)(?: : (.*))?$((?:\n(?: .*)?$)*)", re.MULTILINE)
BOUND = re.compile(r"([<>]=?) *([-\w.]+)")
DEFAULT = re.compile(r"(?:^|, *)default ([^,]+)")


# --- figures


@dataclass(frozen=True)
class Slider:
    """A choice that a reader slides through: of its traces, `per_value` in a row belong to each value."""

    label: str
    values: list[str]
    start: int = 0
    per_value: int = 1
    captions: list[str] = field(default_factory=list)  # the figure's caption at each value
    layouts: list[dict[str, Any]] = field(default_factory=list)  # its layout at each value, where it changes
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


class Drawable(Protocol):
    """A figure that tables can be drawn as: a mark of `plotting.marks`, or a FigureSpec."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> tuple[str, ...]: ...
    @property
    def wide(self) -> bool: ...
    @property
    def opens(self) -> str: ...
    @property
    def was(self) -> Mapping[str, str]: ...
    @property
    def line(self) -> str: ...
    def bound(self, tables: Mapping[str, Table]) -> Drawable: ...
    def can_draw(self, tables: Tables) -> bool: ...
    @property
    def draw(self) -> Callable[[Tables], Figure]: ...


@dataclass(frozen=True)
class FigureSpec:
    """A figure that no mark can say: its name, the tables it reads, and the function that draws it."""

    name: str
    needs: tuple[str, ...]
    draw: Callable[[Tables], Figure]
    wide: bool = False
    condition: Callable[[Tables], bool] = lambda tables: True  # what the tables must hold besides
    opens: str = ""  # the page it opens with
    was: Mapping[str, str] = field(default_factory=dict)  # earlier figures that it replaces -> their page

    @property
    def line(self) -> str:
        """One line that says what the figure shows."""
        return (inspect.getdoc(self.draw) or self.name).splitlines()[0]

    def bound(self, tables: Mapping[str, Table]) -> FigureSpec:
        return self

    def can_draw(self, tables: Tables) -> bool:
        """Return whether the tables hold what the figure needs."""
        return all(name in tables and len(tables[name]) for name in self.needs) and self.condition(tables)


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
    figures: Sequence[tuple[Drawable, Tables]] = ()
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
    verdict: str = ""  # one sentence that answers the verb's question
    passages: list[str] = field(default_factory=list)  # of text, printed in full
    lead: Sequence[Section] = ()  # the picture that leads the overview; none: the map does
    view: str = ""  # of the page, that all this is about; "" where there is one
    views: dict[str, Summary] = field(default_factory=dict)  # of the other views
    domains: dict[str, Summary] = field(default_factory=dict)  # of one domain of the text


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
    most: float | None = None  # the end of its bars; by default the largest value


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
    kind: Kind
    help: str
    default: Any = None
    positional: bool = False
    repeated: bool = False  # *models, or an option that may be given several times
    required: bool = False
    choices: tuple[str, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()  # sign and number
    metavar: str = ""
    shown_default: str = ""
    more: bool = False  # stands in the help's second panel

    @property
    def flag(self) -> str:
        """Its spelling on the command line; a flag that is on by default is switched off with --no-..."""
        word = self.name.rstrip("_").replace("_", "-")
        return f"--no-{word}" if self.kind == "flag" and self.default else f"--{word}"

    def check(self, value: Any) -> None:
        """Raise an error if the value is none of the choices, not a number, or outside the bounds."""
        if self.repeated or (value is None and not (self.choices and self.default)):
            return
        if self.choices and str(value) not in self.choices:
            raise unknown_name(self.name, value, list(self.choices))
        if self.kind in ("flag", "text"):
            return
        if isinstance(value, bool) or not isinstance(value, Integral if self.kind == "int" else Real):
            raise BadInput(f"{self.name} {value!r}: must be a {'whole ' * (self.kind == 'int')}number")
        if not all(SIGNS[sign](value, bound) for sign, bound in self.bounds):
            bounds = [bound for bound in self.bounds if abs(bound[1]) != inf or abs(value) == inf]
            limits = " and ".join(f"{SIGN_WORDS[sign]} {bound:g}" for sign, bound in bounds)
            raise BadInput(f"{self.name} {value}: must be {limits}")


def options_of(function: Callable[..., Any]) -> list[Option]:
    """Return the options of a verb function, from its signature and its numpydoc text.

    The text gives each parameter as `name : METAVAR >= 1, <= 9, repeatable, default words` with its help
    below; parameters under "Other Parameters" stand in the help's second panel. One without text has that
    of COMMON.
    """
    documented = documented_parameters(COMMON) | documented_parameters(function)
    scope = inspect.unwrap(function).__globals__
    options = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in documented:
            raise TypeError(f"{function.__qualname__}: parameter {name!r} is not documented")
        kind_text, help_text, more = documented[name]
        words = [word.strip() for word in kind_text.split(",")]
        annotation = parameter.annotation
        annotation = eval(annotation, dict(scope)) if isinstance(annotation, str) else annotation
        members = union_members(annotation)
        literals = [typing.get_args(member) for member in members if typing.get_origin(member) is Literal]
        several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        options.append(
            Option(
                name,
                next((kind for kind, known in KINDS.items() if members <= known), "text"),
                help_text,
                default,
                positional=parameter.kind is not inspect.Parameter.KEYWORD_ONLY,
                repeated=several or "repeatable" in words,
                required=parameter.default is inspect.Parameter.empty and not several,
                choices=tuple(map(str, chain(*literals))) if len(literals) == len(members) else (),
                bounds=tuple((sign, float(bound)) for sign, bound in BOUND.findall(kind_text)),
                metavar=metavar if (metavar := words[0].partition(" ")[0]).isupper() else "",
                shown_default="".join(DEFAULT.findall(kind_text)),
                more=more,
            )
        )
    return options


def union_members(annotation: Any) -> set[Any]:
    """Return the types of a union, None aside; a generic such as Iterable[str] counts as itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(union_members(member) for member in typing.get_args(annotation)))
    return {annotation} - {type(None)}


def documented_parameters(source: Any) -> dict[str, tuple[str, str, bool]]:
    """Return (kind, help, whether it is an other parameter) per parameter of a numpydoc text or its owner."""
    text = (source if isinstance(source, str) else inspect.getdoc(source)) or ""
    parts = SECTION.split(text)  # what comes before the first section, then title and body of each
    return {
        name.strip().lstrip("*"): (kind.strip(), " ".join(help_text.split()), title != "Parameters")
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
        if title in ("Parameters", "Other Parameters")
        for names, kind, help_text in PARAMETER.findall(body)
        for name in names.split(",")
    }


def summary_of(function: Callable[..., Any]) -> str:
    """Return a verb function's text up to its first numpydoc section: the command's help."""
    return SECTION.split(inspect.getdoc(function) or "")[0].strip()


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


def all_rows(run: Run, selection: Selection) -> Tables:
    """Return every table of the run, narrowed to the selection."""
    return {name: selection.rows(run.table(name)) for name in run.tables}


@dataclass(frozen=True)
class Verb:
    """A verb: its public function, what it writes, and what the terminal and the page show of its runs."""

    name: str
    run: Callable[..., Any] | None = None  # None: its runs are made otherwise, as Monitor's are
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Sequence[Drawable] = ()
    summary: Callable[[Run], Summary] | None = None
    sections: Callable[[Run, Selection], list[Section]] = lambda run, selection: []
    select: Callable[[Run, Selection], Tables] = all_rows  # tables of the selected or the default view
    tab: str = ""  # of the page, for sections that name none; empty: overview
    measures: Callable[[Run], list[Measure]] = lambda run: []  # what the layers x experts map can show
    strips: Callable[[Run], list[Strip]] = lambda run: []  # numbers per layer beside the map
    experts: Callable[[Run], Iterable[LayerCards]] = lambda run: ()  # its part of the expert pages
    overlay: Callable[[list[Run]], list[Section]] = lambda runs: []  # all runs of this verb on one page
    joint: Callable[[list[Run]], list[Section]] = lambda runs: []  # its runs beside all runs of the page
    # files of claims, and runs that decide them -> the judged claims, and their sections of the page
    claims: Callable[[Sequence[Any], list[Run]], tuple[list[dict[str, Any]], list[Section]]] | None = None
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
    # of a command that returns no run: its value and the options given -> what --json prints
    json_facts: Callable[[Any, dict[str, Any]], Any] = lambda made, given: made
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

    def settle(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options given to the verb's function; raise an error for one that cannot be."""
        for option in self.options:
            value = given.get(option.name)
            check_utf8(option.name, value)
            option.check(value)
        return dict(given)

    def figure(self, name: str) -> Drawable | None:
        """Return a figure by its name, or by that of an earlier one that it replaces, opened at its page."""
        for spec in self.figures:
            if spec.name == name:
                return spec
        for spec in self.figures:
            if name in spec.was:
                return replace(cast(Any, spec), opens=spec.was[name])
        return None

    def identity(self, given: Mapping[str, Any], **parsed: Any) -> dict[str, Any]:
        """Return the options that change a number, as stored: those given, with what was parsed from them."""
        names = [option.name for option in self.options if not option.positional]
        stored = [name for name in names if name not in INCIDENTAL | self.incidental]
        return {name: canonical({**given, **parsed}[name]) for name in stored}

    def command(self, given: Mapping[str, Any]) -> str:
        """Return the command line that gives these options; passwords in URLs are left out."""
        words = ["moescope", self.name]
        for option in self.options:
            value = given.get(option.name, option.default)
            if value is None or (value == option.default and not option.required) or value in ((), []):
                continue
            several = option.repeated and not isinstance(value, str | Path)
            if option.kind == "flag":
                words += [option.flag]
                continue
            for item in value if several else [value]:
                words += [option_word(item)] if option.positional else [option.flag, option_word(item)]
        return shlex.join(words)


def check_utf8(name: str, value: Any) -> None:
    """Reject a text or path, or one in a list, that is not UTF-8: run.json and the report are."""
    for part in value if isinstance(value, list | tuple) else (value,):
        try:
            str(part if isinstance(part, str | Path) else "").encode()
        except UnicodeEncodeError:
            raise BadInput(f"{name} {part}: its name is not UTF-8; rename it") from None


def option_word(value: Any) -> str:
    """Return one value as it is written on the command line."""
    if isinstance(value, Iterable) and not isinstance(value, str | Path):
        return ",".join(map(str, value))
    text = str(value)
    name, _, address = text.partition("=")
    if "://" in address and "://" not in name:  # NAME=URL
        return f"{name}={hide_credentials(address)}"
    return hide_credentials(text) if "://" in text else text
