"""Marks: one small dataclass per kind of picture, a table in, a figure out.

A spec says which columns go where. All else a mark asks of the column (`Column`): its label, its chance
level and noise, its bounds, its interval, its scale. So chance lines, colour scales, axes, captions and
hatching are the same in every figure, and a figure is one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from moescope.errors import unknown_name
from moescope.plotting.colour import BOUND, colours, distance, signal
from moescope.plotting.log_axis import log_axis
from moescope.plotting.style import (
    BLUE,
    CATEGORICAL,
    CATEGORIES,
    DASHES,
    GREY,
    LINES_UP_TO,
    PALE,
    base_layout,
    capital,
    category_style,
    counted,
    grey_line,
    k_axis,
    layer_axis,
    layer_colorbar,
    layer_colors,
    number,
    span,
)
from moescope.tables import Column, Table
from moescope.verb import Figure, Slider, Tables, Trace

QUANTITY = "quantity"  # pages=QUANTITY: one page per column instead of one line per column
DASH_WORDS = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "dash-dotted"}
BANDS_UP_TO = 5  # lines with a band each; more bands hide each other
EXACT_CELLS = 64 * 64  # larger maps carry no values for hovering: they would double the page
MOST_HEIGHT = 800  # pixels of the rows of dots: many stand closer
DIGITS_UP_TO = 16  # columns of a map whose cells show their value
ROUNDED_CELLS = 32 * 32  # larger maps are rounded, or their digits would hardly compress:
SHADES = 250  # colours, and three digits
SMALL = 260  # height of a figure among many
CLUSTERED_FROM = 32  # experts from which on a map has related ones side by side
NO_DOMAIN = "no token"  # in the place of a domain: of an expert that none uses
ADDED = ("view", "run", "series")  # columns that a page adds where it puts runs or views side by side
NUMBERED = ("layer", "expert", "router", "step", "seed", "k")  # keys whose values are numbers: "layer 3"
PATTERNS = dict(zip(DASHES, ("", ".", "\\", "x"), strict=True))  # of bars; / is of a second run
SHAPES = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")
RING = {"symbol": "circle-open", "color": "#111111", "size": 9, "line": {"width": 2}}
BESIDE_DIGITS = {"size": 5, "standoff": 16, "angle": 250}  # of a ring: it must not cover a cell's digits
CROSS = {"symbol": "x", "color": "#FFFFFF", "size": 7, "line": {"width": 1, "color": "#1A1D21"}}
HATCH = {"symbol": "line-ne-open", "color": GREY, "size": 9}
TURNS = {"dead": ("dies", "comes back")}  # bool column -> words where it begins and ends
QUIET: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip"}
REFERENCES = ("chance", "noise", "least", "most")


def standard_rows(frame: pd.DataFrame, table: Table, name: str) -> pd.DataFrame:
    """Return the rows where a quantity is known, with what its column refers to.

    The columns _value, _chance, _noise, _least, _most, _low, _high and _few stand beside the frame's own; for
    findings also _corrected, _corrected_chance, _extreme and _limit.
    """
    column = table.quantity(name)
    frame, source = known_rows(frame, table, name)
    frame = whole_numbers(frame.reset_index(drop=True), table)

    def of(reference: str | float | None) -> Any:
        if isinstance(reference, str):
            return frame[reference].astype(float) if reference in frame else np.nan
        return np.nan if reference is None else reference

    low, high = column.interval or (None, None)
    corrected, corrected_chance = column.corrected or (None, None)
    extreme, limit = column.extreme or (None, None)
    known = {f"_{word}": of(getattr(column, word)) for word in REFERENCES}
    known |= {
        f"_chance_{end}": of(name) for end, name in enumerate(column.chance_range or (column.chance,) * 2)
    }
    known |= {"_corrected": of(corrected), "_corrected_chance": of(corrected_chance)}
    known |= {"_extreme": of(extreme), "_limit": of(limit)}
    few = flags(frame[column.few]) if column.few in frame else False
    return frame.assign(_value=frame[source].astype(float), **known, _low=of(low), _high=of(high), _few=few)


def known_rows(frame: pd.DataFrame, table: Table, name: str) -> tuple[pd.DataFrame, str]:
    """Return the rows where a quantity is known, and the column that holds it."""
    source = "value" if name in table.terms else name
    if name in table.terms:
        frame = frame[frame["metric"] == name]
    if source not in frame:
        return frame.iloc[:0].assign(**{source: np.nan}), source
    known = frame[source].notna()
    return (frame if known.all() else frame[known]), source


def whole_numbers(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Return the frame with whole numbers as such: a column that may be null is read as one of floats."""
    columns = [name for name in frame if name in table.columns and table.column(str(name)).kind == "int"]
    floats = [name for name in columns if frame[name].dtype == float and frame[name].notna().all()]
    return frame.astype(dict.fromkeys(floats, int)) if floats else frame


def flags(values: pd.Series) -> pd.Series:
    """Return a bool column with False where it is unknown."""
    return values.eq(True)


def no_flag(frame: pd.DataFrame) -> pd.Series:
    return pd.Series(False, index=frame.index)


def chosen(frame: pd.DataFrame, where: str, table: Table) -> pd.DataFrame:
    """Return the rows that a query selects; an unknown flag counts as false."""
    if not where:
        return frame
    if where in frame:
        return frame[flags(frame[where])]
    unsure = {
        name: flags(frame[name])
        for name in re.findall(r"\w+", where)
        if name in frame and name in table.columns and table.column(name).kind == "bool"
    }
    return frame[frame.assign(**unsure).eval(where, engine="python")]


# --- marks


@dataclass(frozen=True)
class Page:
    """One page of a figure: its traces, what it shows in words, its layout, how far it is from chance."""

    traces: list[Trace]
    caption: str
    layout: dict[str, Any]
    surprise: float = 0.0
    order: list[str] = field(default_factory=list)  # another order of the categories, for a reader to choose


@dataclass(frozen=True)
class Mark:
    """What all marks share. `draw` splits the rows into pages, which a reader slides through.

    Parameters
    ----------
    name
        Name of the figure: `run.figure(name)`.
    table
        Table that it reads.
    title
        What is plotted, in at most eight words; by default the column's label and its first key.
    where
        Rows that are drawn, as a pandas query.
    pages
        Key with one page per value, or QUANTITY: one page per column.
    one
        Key of which one value is shown: the one selected, else the first.
    details
        How to read it, behind a click.
    wide
        Whether it takes the page's whole width.
    small
        Whether it is drawn low: one of many side by side.
    opens
        The page it opens with; by default the first quantity, else the value with rows of its bool column
        `best`, else the value furthest from chance.
    was
        Names of earlier figures that it replaces, each with the page (or "") that shows the same.
    """

    name: str
    table: str
    _: KW_ONLY
    title: str = ""
    where: str = ""
    pages: str = ""
    one: str = ""
    details: str = ""
    wide: bool = False
    small: bool = False
    opens: str = ""
    was: Mapping[str, str] = field(default_factory=dict)
    schema: Table | None = field(default=None, repr=False, compare=False)

    VALUE: ClassVar[str] = "y"  # the argument that names what is drawn
    KEYS: ClassVar[tuple[str, ...]] = ("x", "by")  # the arguments that name keys, on axes and in the legend
    COLUMNS: ClassVar[tuple[str, ...]] = ()  # further arguments that name columns

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.table,)

    @property
    def values(self) -> tuple[str, ...]:
        names = getattr(self, self.VALUE)
        return (names,) if isinstance(names, str) else names

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(filter(None, (getattr(self, argument) for argument in self.KEYS)))

    @property
    def described(self) -> Table:
        if self.schema is None:
            raise ValueError(f"figure {self.name}: not bound to table {self.table}; see define_figures")
        return self.schema

    @property
    def heading(self) -> str:
        first = self.described.label(self.values[0])
        return self.title or f"{capital(first)} by {(*self.keys, self.table)[0].replace('_', ' ')}"

    @property
    def line(self) -> str:
        """One line that says what the figure shows."""
        labels = [self.described.label(name) for name in self.values]
        return f"{self.heading}: {', '.join(labels)}." if self.pages == QUANTITY else f"{self.heading}."

    def bound(self, tables: Mapping[str, Table]) -> Mark:
        """Return the mark with what its table knows of its columns; an unknown column is an error."""
        if self.table not in tables:
            raise unknown_name("table", self.table, list(tables))
        table = tables[self.table]
        known = [*table.columns, *table.terms]
        further = [getattr(self, argument) for argument in self.COLUMNS]
        keys = [*self.keys, *further, self.one, self.pages]
        for name in (*self.values, *(key for key in keys if key and key not in (*ADDED, QUANTITY))):
            if name not in known:
                raise unknown_name(f"column of {table.name}", name, known)
        return replace(self, schema=table)

    def selected(self, tables: Tables) -> pd.DataFrame:
        """Return the rows that are drawn; where a key is on no axis, rows of all its values together."""
        table, frame = self.described, tables[self.table]
        if "step" in self.keys:  # a view of one step also holds the rows of all steps
            frame = tables.get(f"{self.table} of all steps", frame)
        frame = self.slim(frame)
        for key, whole in table.whole.items():
            if key in frame and key not in self.where:
                same = frame[key].isna() if whole is None else frame[key] == whole
                frame = frame[~same if key in (*self.keys, self.pages) else same]
        frame = chosen(frame, self.where, table)
        if self.one in frame and len(frame):
            first = frame[self.one] == frame[self.one].min()
            frame = frame if first.all() else frame[first]
        return frame

    def rows(self, tables: Tables) -> dict[str, pd.DataFrame]:
        """Return column name -> its rows."""
        frame = self.selected(tables)
        found = {name: standard_rows(frame, self.described, name) for name in self.values}
        return {name: rows for name, rows in found.items() if self.enough(rows) and not rows["_few"].all()}

    def slim(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the columns that the spec names or its columns refer to: copies of all of them are slow."""
        given = (value for value in vars(self).values() if isinstance(value, str | tuple))
        names = {word for value in given for word in re.findall(r"\w+", str(value))}
        names |= {"reference", "best", "metric", "value", re.sub("_a$", "_b", str(vars(self).get("order")))}
        names |= set(self.described.whole)
        for column in map(self.described.quantity, (*self.values, *getattr(self, "told", ()))):
            references = (getattr(column, word) for word in (*REFERENCES, "few"))
            names |= {
                name
                for name in (*references, *(column.interval or ()), *(column.chance_range or ()))
                if isinstance(name, str)
            }
        return frame[[name for name in frame if name in names]]

    def enough(self, rows: pd.DataFrame) -> bool:
        return len(rows) > 0

    def page(self, rows: dict[str, pd.DataFrame], table: Table) -> Page:
        raise NotImplementedError

    def can_draw(self, tables: Tables) -> bool:
        """Return whether the tables hold values of one of its columns."""
        if any(name not in tables or not len(tables[name]) for name in self.needs):
            return False
        frame = self.selected(tables)
        known = {name: known_rows(frame, self.described, name)[0] for name in self.values}
        few = {name: self.described.quantity(name).few for name in known}
        return any(
            self.enough(rows) and not (few[name] in rows and flags(rows[few[name]]).all())
            for name, rows in known.items()
        )

    def split(self, rows: dict[str, pd.DataFrame]) -> Iterator[tuple[str, dict[str, pd.DataFrame]]]:
        if self.pages == QUANTITY:
            yield from ((name, {name: part}) for name, part in rows.items())
        elif self.pages and all(self.pages in part for part in rows.values()):
            values = sorted({value for part in rows.values() for value in part[self.pages].dropna().unique()})
            for value in values:
                parts = {name: part[part[self.pages] == value] for name, part in rows.items()}
                judged = {
                    name: part for name, part in parts.items() if not part.get("_few", no_flag(part)).all()
                }
                if parts := {name: part for name, part in judged.items() if self.enough(part)}:
                    yield str(value), parts
        else:
            yield "", rows

    def draw(self, tables: Tables) -> Figure:
        """Return the figure, with all its pages."""
        rows = self.rows(tables)
        by = getattr(self, "by", "") or getattr(self, "hue", "")
        table = with_names(self.described, by, categories(tables, by), rows)
        names, parts = zip(*self.split(rows), strict=True)
        pages = [self.page(part, table) for part in parts]
        start = 0 if self.pages == QUANTITY else int(np.argmax([drawn.surprise for drawn in pages]))
        best = [any("best" in rows and flags(rows["best"]).any() for rows in part.values()) for part in parts]
        if self.pages != QUANTITY and any(best):
            start = best.index(True)
        if self.opens in names:
            start = names.index(self.opens)
        slider, first = None, pages[start]
        data, height = first.traces, first.layout.pop("height", 340)
        if len(pages) > 1:
            widest = max(len(drawn.traces) for drawn in pages)
            blank = points("", [None], [None], **QUIET)
            data = [
                trace for drawn in pages for trace in drawn.traces + [blank] * (widest - len(drawn.traces))
            ]
            height = max(height, *(drawn.layout.pop("height", 340) for drawn in pages))
            labels = [table.label(name) if self.pages == QUANTITY else name for name in names]
            slider = Slider(
                self.pages.replace("_", " "),
                labels,
                start,
                widest,
                [drawn.caption for drawn in pages],
                [drawn.layout for drawn in pages],
                [drawn.order for drawn in pages if drawn.order],
            )
        return Figure(
            self.name,
            self.heading,
            first.caption,
            tuple(map(table.key, self.values)),
            data,
            first.layout,
            slider,
            SMALL if self.small else height,
            self.details,
        )


def define_figures(tables: Mapping[str, Table], *marks: Mark) -> list[Mark]:
    """Return the marks with what the tables know of their columns."""
    return [mark.bound(tables) for mark in marks]


@dataclass(frozen=True, kw_only=True)
class Lines(Mark):
    """A line per column of `y` and value of `by`, where rows have it, against `x`; over twelve become a Grid.

    With several columns and values, a value has a colour and a column a dash. `stacked` draws areas on top of
    each other, of any number of lines and without chance.

    Chance is dashed, a varying bound dotted, the chance level's 95 % band grey; intervals are bands of up to
    five lines, else bars.
    """

    y: str | tuple[str, ...]
    x: str = "layer"
    by: str = ""
    stacked: bool = False

    def enough(self, rows: pd.DataFrame) -> bool:
        """A line has two points; of layers, one is enough to be seen."""
        return len(rows) > 0 and (self.x == "layer" or rows[self.x].nunique() > 1)

    def page(self, rows: dict[str, pd.DataFrame], table: Table) -> Page:
        name, frame = next(iter(rows.items()))
        first = table.quantity(name)
        by = self.by if self.by in frame else ""
        lines = [
            (name, value, line.sort_values(self.x))
            for name, part in rows.items()
            for value, line in grouped(part, by, table)
        ]
        shown = list(dict.fromkeys(line[1] for line in lines)) if by else list(range(len(lines)))
        if len(shown) > LINES_UP_TO and not self.stacked:
            return Grid(self.name, self.table, z=name, x=self.x, y=by).page({name: frame}, table)
        key = table.quantity(by)
        both = len(rows) > 1 and bool(by)  # colour says the value, dash the column
        styles = dict(zip(shown, styles_of(key, by, shown), strict=True))
        dashes = dict(zip(rows, DASHES, strict=False))
        traces: list[Trace] = []
        for place, (quantity, value, line) in enumerate(lines):
            label, style = table.label(quantity), styles[value if by else place]
            name_of = value_words(key, by, value) if by else label
            if not self.stacked:
                traces += interval_traces(line, self.x, style["color"], len(lines) <= BANDS_UP_TO)
            hover = f"{name_of}<br>{words_of(self.x)} %{{x}}<br>{label} %{{y:.4g}}<extra></extra>"
            line_of: dict[str, Any] = {
                "line": {**style, "width": 2},
                "marker": {"size": 5},
                "hovertemplate": hover,
            }
            if both:
                line_of["line"]["dash"] = dashes[quantity]
                line_of |= {"legendgroup": name_of, "showlegend": quantity == name}
            mode = "lines" if self.stacked else "lines+markers"
            if self.stacked:
                line_of |= {"stackgroup": "all", "showlegend": len(lines) <= LINES_UP_TO}
                line_of["line"] = {"color": style["color"], "width": 1}
            traces.append(points(name_of, line[self.x], line["_value"], mode, **line_of))
        if not self.stacked:
            traces += reference_traces(rows, self.x, table, named=not both)
        axes = {"xaxis": x_axis(self.x, frame, table), "yaxis": y_axis(first, traces)}
        along = first.axis(name) if len(rows) == 1 else ", ".join(map(table.label, rows))
        if both:
            along = ", ".join(f"{table.label(y)} ({DASH_WORDS[dash]})" for y, dash in dashes.items())
        elif len(rows) > 1 and first.unit and {table.quantity(y).unit for y in rows} == {first.unit}:
            words = [re.findall(r"[\w-]+", table.label(y)) for y in rows]
            shared = [word for word in words[0] if all(word in others for others in words)]
            along = f"{' '.join(shared) or along} ({first.unit})"  # the legend names each
        layout = base_layout(table.quantity(self.x).axis(self.x), along, **axes)
        caption = caption_of(frame, table, name, self.x, by)
        if self.stacked:
            last = frame[frame[self.x] == frame[self.x].max()]
            end = f"At {table.label(self.x)} {number(last[self.x].iloc[0])}, {table.label(name)}"
            caption = f"{end}{extremes(last, table, by or self.x)}."
        return Page(traces, caption, layout, surprise(frame, first))


@dataclass(frozen=True, kw_only=True)
class Grid(Mark):
    """A map with a cell per value of `x` and `y`. Its colour is what lies outside a cell's own null interval.

    `ring` and `cross` name bool columns that mark cells; `order` names a column of places that put related
    values of `x` side by side, from 32 values on. With `hue`, a column of names, the colour says the name and
    its strength how far the value is above chance. `label` names a column that stands in cells for values.

    `panels` names a key with a small map per value, side by side with one scale. `turns` names a bool column:
    a cross stands where it becomes true along `x`, a ring where it ends.
    """

    z: str | tuple[str, ...]
    x: str = "expert"
    y: str = "layer"
    ring: str = ""
    cross: str = ""
    order: str = ""
    hue: str = ""
    label: str = ""
    panels: str = ""
    turns: str = ""

    VALUE, KEYS = "z", ("x", "y")
    COLUMNS = ("ring", "cross", "order", "hue", "label", "panels", "turns")

    def enough(self, rows: pd.DataFrame) -> bool:
        """One step is no course."""
        return len(rows) > 0 and ("step" not in self.keys or rows["step"].nunique() > 1)

    def page(self, rows: dict[str, pd.DataFrame], table: Table, whole: pd.DataFrame | None = None) -> Page:
        ((name, frame),) = rows.items()
        if whole is None and self.panels in frame and frame[self.panels].nunique() > 1:
            return self.side_by_side(name, frame, table)
        column = table.quantity(name)
        drawn, ends, ticks = signal(frame if whole is None else whole, column)
        drawn = drawn if whole is None else drawn[whole.index.get_indexer(frame.index)]
        frame = frame.assign(_drawn=np.where(frame["_few"], np.nan, drawn))
        xs, ys = self.places(frame)
        z, values = (
            frame.pivot(index=self.y, columns=self.x, values=word)
            .reindex(index=ys, columns=xs)
            .to_numpy(float)
            for word in ("_drawn", "_value")
        )
        label = column.axis(name)
        exact = z.size <= EXACT_CELLS or (column.scale == "log" and column.chance is None)
        shown = (
            f"%{{customdata:{'.3g' if z.size > ROUNDED_CELLS else '.4g'}}}"
            if exact
            else "beyond chance: %{z:.3g}"
            if column.chance is not None
            else "%{z:.4g}"
        )
        x_words, y_words = table.quantity(self.x), table.quantity(self.y)
        trace: Trace = {
            "type": "heatmap",
            "z": z,
            "x": [value_text(x_words, value) for value in xs],
            "y": [value_text(y_words, value) for value in ys],
            "zmin": ends[0],
            "zmax": ends[1],
            "colorscale": colours(*ends, column),
            "xgap": int(len(xs) <= 32),
            "ygap": int(len(ys) <= 32),
            "colorbar": {
                "title": {"text": "" if self.small else label, "side": "right"},
                "thickness": 12,
                "outlinewidth": 0,
                **ticks,
            },
            "hovertemplate": f"{words_of(self.x)} %{{x}}<br>{words_of(self.y)} %{{y}}<br>"
            f"{table.label(name)} {shown}<extra></extra>",
            "hoverongaps": False,
        }
        if exact:
            trace["customdata"] = values
            trace |= {"meta": {"ratio": True}} if column.scale == "ratio" else {}  # two runs: a ratio again
        if column.scale != "ratio" and frame["_noise"].notna().any():
            trace["meta"] = {"noise": float(frame["_noise"].median())}  # for the difference of two runs
        if z.size > ROUNDED_CELLS:
            if exact:
                trace["customdata"] = values.astype(np.float32)
                trace["customdata"].view(np.int32)[...] &= -(1 << 12)  # three digits are shown
            step = (ends[1] - ends[0]) / SHADES or 1.0
            trace["z"] = np.round(z / step) * step
        if len(xs) <= DIGITS_UP_TO and len(ys) <= DIGITS_UP_TO and not self.small:
            text = [["" if np.isnan(value) else f"{value:.2f}" for value in row] for row in values]
            trace |= {"text": text, "texttemplate": "%{text}", "textfont": {"size": 10}}
        marks = [("too little data", frame["_few"], HATCH)]
        marks += [
            (table.label(flag), flags(frame[flag]), style)
            for flag, style in ((self.ring, RING), (self.cross, CROSS))
            if flag in frame
        ]
        if self.turns in frame:
            is_on = flags(frame.sort_values(self.x)[self.turns])
            change = is_on.astype(int).groupby(frame[self.y]).diff().reindex(frame.index)
            begun, ended = TURNS.get(self.turns, (f"{self.turns} from here", "no longer"))
            marks += [(begun, change == 1, CROSS), (ended, change == -1, RING)]
        traces = [trace, *self.coloured(trace, frame, table, (xs, ys), ends)] if self.hue else [trace]
        for words, mask, style in marks:
            if mask.any():
                style = {**style, **BESIDE_DIGITS} if style is RING and "text" in trace else style
                x, y = (
                    [value_text(table.quantity(axis), value) for value in frame.loc[mask, axis]]
                    for axis in (self.x, self.y)
                )
                traces.append(points(words, x, y, marker=style, hoverinfo="skip"))
        axes = {"xaxis": CATEGORIES, "yaxis": {**CATEGORIES, "autorange": "reversed", "automargin": True}}
        layout = base_layout(x_words.axis(self.x), y_words.axis(self.y), **axes)
        layout["height"] = min(max(300, 110 + 20 * len(ys)), 760)
        caption = grid_caption(frame, table, name, (self.y, self.label or self.x))
        return Page(traces, caption, layout, surprise(frame, column))

    def side_by_side(self, name: str, frame: pd.DataFrame, table: Table) -> Page:
        """Return a small map per value of `panels`, in rows of three or four."""
        parts = list(frame.groupby(self.panels))
        across = min(len(parts), 3 if len(parts) <= 12 else 4)
        down = -(-len(parts) // across)
        traces: list[Trace] = []
        layout = base_layout(table.quantity(self.x).axis(self.x), table.quantity(self.y).axis(self.y))
        titles = {end: layout[f"{end}axis"]["title"] for end in "xy"}
        layout |= {"annotations": [], "height": 90 + 130 * down}
        named: set[str] = set()
        for place, (value, part) in enumerate(parts):
            row, column = divmod(place, across)
            left, top = column / across, 1 - row / down
            page = replace(self, small=True).page({name: part}, table, frame)
            words = value_words(table.quantity(self.panels), self.panels, value)
            axis = str(place + 1) if place else ""
            for trace in page.traces:
                trace |= {"xaxis": f"x{axis}", "yaxis": f"y{axis}"}
                if trace["type"] == "heatmap":
                    trace |= {"name": words, "showscale": not place, "xgap": 0, "ygap": 0}
                else:
                    trace |= {"showlegend": trace["name"] not in named, "legendgroup": trace["name"]}
                    named.add(trace["name"])
            traces += page.traces
            spans = {"x": [left, left + 0.92 / across], "y": [top - 0.82 / down, top - 0.08 / down]}
            for end, domain in spans.items():
                own = {**page.layout[f"{end}axis"], "domain": domain, "nticks": 4}
                own["anchor"] = f"{'y' if end == 'x' else 'x'}{axis}"
                outer = column == 0 if end == "y" else place + across >= len(parts)
                own["title"] = titles[end] if outer else {"text": ""}
                own["showticklabels"] = end == "x" or outer
                layout[f"{end}axis{axis}"] = own
            note = {"text": words, "x": left, "y": top - 0.08 / down, "xref": "paper", "yref": "paper"}
            more = {"xanchor": "left", "yanchor": "bottom", "showarrow": False, "font": {"size": 11}}
            layout["annotations"].append({**note, **more})
        caption = grid_caption(frame, table, name, (self.panels, self.y, self.x))
        return Page(traces, caption, layout, surprise(frame, table.quantity(name)))

    def coloured(
        self, trace: Trace, frame: pd.DataFrame, table: Table, at: tuple[list[Any], list[Any]], ends: Any
    ) -> list[Trace]:
        """Colour the cells by name, each as strongly as it is above chance; return the legend."""
        names = list(table.quantity(self.hue).names)
        styles, n = styles_of(table.quantity(self.hue), self.hue, names), len(names)
        xs, ys = at

        def matrix(values: pd.Series) -> np.ndarray:
            rows = frame.assign(_cell=values).pivot(index=self.y, columns=self.x, values="_cell")
            return rows.reindex(index=ys, columns=xs).to_numpy()

        place = matrix(frame[self.hue].map({name: place for place, name in enumerate(names)})).astype(float)
        strength = np.clip(np.asarray(trace["z"], float) / (ends[1] or 1.0), 0, 1)
        trace |= {"z": place + 0.001 + 0.998 * strength, "zmin": 0, "zmax": n, "showscale": False}
        stops = [[(i, PALE), (i + 1, style["color"])] for i, style in enumerate(styles)]
        trace["colorscale"] = [[end / n, color] for pair in stops for end, color in pair]
        words = frame[self.label].astype(str) if self.label else frame["_value"].map("{:.2f}".format)
        trace |= {"text": matrix(words), "hovertext": matrix(frame[self.hue]), "meta": {"categories": True}}
        first = f"{self.label} %{{text}}" if self.label else f"{words_of(self.x)} %{{x}}"
        value = f"{table.label(self.values[0])} %{{customdata:.3g}}"
        trace["hovertemplate"] = (
            f"{words_of(self.y)} %{{y}}, {first}<br>%{{hovertext}}<br>{value}<extra></extra>"
        )
        squares = [{"color": style["color"], "symbol": "square", "size": 11} for style in styles]
        return [
            points(name, [None], [None], marker=square) for name, square in zip(names, squares, strict=True)
        ]

    def places(self, frame: pd.DataFrame) -> tuple[list[Any], list[Any]]:
        """Return the values of both axes in their order."""
        if self.order in frame and frame[self.x].nunique() >= CLUSTERED_FROM:
            frame = frame.sort_values(self.order, kind="stable")
            return list(dict.fromkeys(frame[self.x])), list(dict.fromkeys(frame[self.y]))

        def values(key: str) -> list[Any]:
            seen = list(dict.fromkeys(frame[key]))
            return seen if isinstance(seen[0], str) else sorted(seen)  # names: as the table has them

        return values(self.x), values(self.y)


@dataclass(frozen=True, kw_only=True)
class Matrix(Grid):
    """A Grid of pairs that the table lists once; `x` and `y` are the two of a pair, the diagonal stays empty.

    `order` names the place of the first of a pair; the place of the second stands in the same column of the
    mirrored row, or in a column that ends in _b where the first ends in _a.
    """

    x: str = "expert_a"
    y: str = "expert_b"

    def page(self, rows: dict[str, pd.DataFrame], table: Table, whole: pd.DataFrame | None = None) -> Page:
        ((name, frame),) = rows.items()
        swapped = {self.x: self.y, self.y: self.x}
        if self.order.endswith("_a") and (other := f"{self.order[:-1]}b") in frame:
            swapped |= {self.order: other, other: self.order}
        both = pd.concat([frame, frame.rename(columns=swapped)[frame.columns]], ignore_index=True)
        page = super().page({name: both.drop_duplicates([self.x, self.y])}, table)
        caption = grid_caption(frame, table, name, (self.y, self.x))
        order: list[str] = []
        if self.order in both and both[self.x].nunique() < CLUSTERED_FROM:
            order = [str(value) for value in dict.fromkeys(both.sort_values(self.order)[self.x])]
        return replace(page, caption=caption, layout={**page.layout, "height": 420}, order=order)

    def places(self, frame: pd.DataFrame) -> tuple[list[Any], list[Any]]:
        xs, ys = super().places(frame)
        values = list(dict.fromkeys([*xs, *ys]))
        return (
            (values, values)
            if self.order in frame and len(values) >= CLUSTERED_FROM
            else (sorted(values),) * 2
        )


@dataclass(frozen=True, kw_only=True)
class Bars(Mark):
    """A bar per value of `x` and column of `y` or value of `by`, or stacked; chance is a grey tick."""

    y: str | tuple[str, ...]
    x: str = "layer"
    by: str = ""
    stacked: bool = False

    def page(self, rows: dict[str, pd.DataFrame], table: Table) -> Page:
        name, frame = next(iter(rows.items()))
        first = table.quantity(name)
        by = self.by if self.by in frame else ""
        bars = [
            (quantity, value, part)
            for quantity, whole in rows.items()
            for value, part in grouped(whole, by, table)
        ]
        flat = not pd.api.types.is_numeric_dtype(frame[self.x])  # names are read along the line: bars lie
        key, places = table.quantity(by), table.quantity(self.x)

        def at(where: Iterable[Any], values: Any) -> Trace:
            x = [value_text(places, value) for value in where] if flat else np.asarray(list(where))
            y = np.asarray(values, float)
            return {"x": y, "y": x} if flat else {"x": x, "y": y}

        styles = styles_of(key, by, [bar[1] if by else place for place, bar in enumerate(bars)])
        traces: list[Trace] = []
        for (quantity, value, part), style in zip(bars, styles, strict=True):
            words = table.label(quantity) if value is None else value_words(key, by, value)
            hover = "%{y}<br>%{x:.4g}" if flat else f"{words_of(self.x)} %{{x}}<br>%{{y:.4g}}"
            trace: Trace = {
                "type": "bar",
                "name": words,
                "marker": {
                    "color": style["color"],
                    "pattern": {"shape": PATTERNS[style.get("dash", "solid")]},
                },
                **at(part[self.x], part["_value"]),
            }
            traces.append(
                {
                    **trace,
                    "orientation": "h" if flat else "v",
                    "hovertemplate": f"{words}<br>{hover}<extra></extra>",
                }
            )
            if not self.stacked and part["_low"].notna().any():
                traces[-1]["error_x" if flat else "error_y"] = error_bars(part)
        levels = frame[frame["_chance"].notna()].groupby(self.x, sort=False)["_chance"]
        if levels.ngroups:
            level = levels.sum() if self.stacked else levels.first()
            symbol = "line-ns-open" if flat else "line-ew-open"
            tick = {"symbol": symbol, "color": GREY, "size": 14, "line": {"width": 2.5}}
            traces.append(points(first.chance_label, **at(level.index, level), marker=tick))
        ends = sorted(frame[self.x].unique())
        traces += [
            grey_line(**at(ends, [level] * len(ends)), name=words, dash="dot")
            for level, words in first.guides.items()
        ]
        across, along = places.axis(self.x), first.axis(name)
        if self.stacked and len(rows) > 1:
            along = " + ".join(map(table.label, rows))
        if flat:
            layout = base_layout(
                along, across, yaxis={"type": "category", "autorange": "reversed", "automargin": True}
            )
            layout["height"] = 150 + 26 * max(3, frame[self.x].nunique())
        else:
            layout = base_layout(across, along, xaxis=x_axis(self.x, frame, table))
        layout["barmode"] = "stack" if self.stacked else "group"
        caption = caption_of(frame, table, name, self.x, by)
        if self.stacked and len(rows) > 1:
            sums = pd.concat(rows.values()).groupby(self.x, as_index=False)["_value"].sum()
            caption = f"The sum{extremes(sums, table, self.x)}."
        return Page(traces, caption, layout, surprise(frame, first))


@dataclass(frozen=True, kw_only=True)
class Dots(Mark):
    """A dot with its interval per row of `y`, the best on top; a column or value of `by` has its own look.

    `each` is (table, column) of the single values behind a row's mean, drawn small.
    """

    x: str | tuple[str, ...]
    y: str
    by: str = ""
    each: tuple[str, str] | None = None

    VALUE, KEYS = "x", ("y", "by")

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.table, self.each[0]) if self.each else (self.table,)

    def rows(self, tables: Tables) -> dict[str, pd.DataFrame]:
        found = super().rows(tables)
        if self.each and found:
            name, column = self.each
            single = tables[name].dropna(subset=column)
            return {**found, "": single.assign(_value=single[column])}
        return found

    def page(self, rows: dict[str, pd.DataFrame], table: Table) -> Page:
        each = rows.get("")
        rows = {name: part for name, part in rows.items() if name}
        name, frame = next(iter(rows.items()))
        first, key, named = table.quantity(name), table.quantity(self.by), table.quantity(self.y)
        by = self.by if self.by in frame else ""
        order = (
            frame.sort_values("_value", ascending=first.better != "higher")[self.y].drop_duplicates().tolist()
        )
        traces: list[Trace] = []
        if each is not None:
            each = each[each[self.y].isin(order)]
            traces.append(dots(each, self.y, named, "single values", CATEGORICAL[5], "circle", 5))
        parts = (
            list(frame.groupby(by, sort=False))
            if by
            else [(table.label(name), part) for name, part in rows.items()]
        )
        styles = styles_of(key, by, [value for value, _ in parts])
        for place, ((value, part), style) in enumerate(zip(parts, styles, strict=True)):
            words = value_words(key, by, value) if by else value
            traces.append(dots(part, self.y, named, words, style["color"], SHAPES[place % len(SHAPES)], 9))
        traces += bound_ticks(frame, self.y, table, name)
        rows_text = [value_text(named, value) for value in order]
        for level in sorted(frame["_chance"].dropna().unique())[:2]:
            traces.append(grey_line([level] * len(order), rows_text, first.chance_label))
        yaxis = {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": rows_text[::-1],
            "automargin": True,
        }
        layout = base_layout(
            first.axis(name),
            named.axis(self.y),
            yaxis=yaxis,
            height=150 + min(27 * max(len(order), 3), MOST_HEIGHT),
        )
        if first.scale == "log" and (axis := log_axis(frame["_value"])):
            layout["xaxis"] |= axis
        return Page(traces, caption_of(frame, table, name, self.y), layout, surprise(frame, first))


@dataclass(frozen=True, kw_only=True)
class Distribution(Mark):
    """How a column is spread: ridges of stored bins per value of `by`, the value on them, or a histogram.

    `bins` names the columns left, right and density of a stored null distribution.
    """

    x: str
    by: str = ""
    bins: tuple[str, str, str] | None = None

    VALUE, KEYS = "x", ("by",)

    def page(self, rows: dict[str, pd.DataFrame], table: Table) -> Page:
        ((name, frame),) = rows.items()
        column = table.quantity(name)
        if self.bins:
            traces, ticks = ridges(frame, self.by, *self.bins)
            height = max(340, 90 + 26 * frame[self.by].nunique())
            layout = base_layout(column.axis(name), words_of(self.by), yaxis=ticks, height=height)
            rows = frame.drop_duplicates(self.by)
            caption = grid_caption(rows, table, name, (self.by,))
            return Page(traces, caption, layout, surprise(rows, column))
        bins: Any = max(8, min(40, len(frame) // 3))
        axis: dict[str, Any] = {}
        places, hover = frame["_value"], "around %{x:.3g}<br>%{y} rows<extra></extra>"
        if column.scale == "log" and (places > 0).any():
            places, bins, axis = in_decades(places)
            hover = "%{y} rows<extra></extra>"
        counts, edges = np.histogram(places, bins=bins)
        bars = {"width": np.diff(edges) * 0.94, "marker": {"color": CATEGORICAL[0]}}
        middles, below = (edges[:-1] + edges[1:]) / 2, np.full(len(frame), -0.07 * counts.max())
        rug = {"symbol": "line-ns-open", "color": CATEGORICAL[1]}
        traces = [
            {"type": "bar", "name": "rows", "x": middles, "y": counts, **bars, "hovertemplate": hover},
            points(
                "each row",
                places,
                below,
                marker=rug,
                customdata=frame["_value"].to_numpy(),
                hovertemplate="%{customdata:.4g}<extra></extra>",
            ),
        ]
        level = frame["_chance"].dropna()
        words = f"{capital(table.label(name))} of {counted(len(frame), 'row')}: {span(frame['_value'])}."
        if len(level):
            at = float(level.iloc[0])
            line = math.log10(at) if axis and at > 0 else at
            traces.append(grey_line([line, line], [0, int(counts.max())], column.chance_label))
            under = int((frame["_value"] <= at).sum())
            words = f"{under} of {len(frame)} at or below {number(at)} ({column.chance_label})."
        ticks = {"tick0": 0, "dtick": max(1, -(-int(counts.max()) // 5))}
        layout = base_layout(column.axis(name), "rows", xaxis=axis, yaxis=ticks)
        return Page(traces, words, layout, surprise(frame, column))


@dataclass(frozen=True, kw_only=True)
class Scatter(Mark):
    """A point per row in the colour of `by` or of the number `colour`, with area `size` and text `label`.

    `told` names columns with one value per page, which the caption gives with their chance levels.
    """

    y: str
    x: str
    by: str = ""
    size: str = ""
    label: str = ""
    colour: str = ""
    told: tuple[str, ...] = ()

    KEYS, COLUMNS = ("by", "label"), ("x", "size", "colour")

    def page(self, rows: dict[str, pd.DataFrame], table: Table) -> Page:
        ((name, frame),) = rows.items()
        by = self.by if self.by in frame and frame[self.by].notna().any() else ""
        column, key = table.quantity(name), table.quantity(by)
        parts = grouped(frame, by, table)
        traces: list[Trace] = []
        for (value, part), style in zip(
            parts, styles_of(key, by, [value for value, _ in parts]), strict=True
        ):
            size: Any = 8
            if self.size in part:
                size = np.clip(11 * np.sqrt(part[self.size].fillna(0).to_numpy(float)), 4, 40)
            symbol = SHAPES[DASHES.index(style.get("dash", "solid"))]
            marker: dict[str, Any] = {"color": style["color"], "size": size, "opacity": 0.8, "symbol": symbol}
            if self.colour in part:
                title = {"text": table.label(self.colour), "side": "top"}
                bar = {"title": title, "thickness": 12, "outlinewidth": 0}
                marker |= {"color": part[self.colour].to_numpy(float), "colorscale": BLUE, "colorbar": bar}
            text = part[self.label].astype(str).tolist() if self.label else []
            hover = f"{words_of(self.label)} %{{text}}<br>" if self.label else ""
            traces.append(
                points(
                    value_words(key, by, value) if by else table.label(name),
                    part[self.x].astype(float),
                    part["_value"],
                    "markers+text" if self.label and len(frame) <= 32 else "markers",
                    marker=marker,
                    text=text,
                    textposition="top center",
                    cliponaxis=False,
                    hovertemplate=f"{hover}%{{x:.4g}}, %{{y:.4g}}<extra></extra>",
                )
            )
        if by == "layer" and len(parts) > LINES_UP_TO:
            traces = [{**trace, "showlegend": False} for trace in traces]
            traces.append(layer_colorbar([value for value, _ in parts]))
        ends = [float(frame[self.x].min()), float(frame[self.x].max())]
        levels = frame["_chance"].dropna().unique()[:2]
        traces += [grey_line(ends, [float(level)] * 2, column.chance_label) for level in levels]
        layout = base_layout(table.quantity(self.x).axis(self.x), column.axis(name))
        words = [counted(len(frame), "point")]
        for told in self.told:
            row = standard_rows(frame.head(1), table, told)
            words += [
                f"{table.label(told)}: {number(value)}{chance_of(row, table.quantity(told))}"
                for value in row["_value"]
            ]
        return Page(traces, f"{'; '.join(words)}.", layout, surprise(frame, column))


# --- what marks share


def grouped(frame: pd.DataFrame, by: str, table: Table) -> list[tuple[Any, pd.DataFrame]]:
    """Return (value of `by`, its rows), named values in their names' order; (None, all) without `by`."""
    if not by:
        return [(None, frame)]
    known = {value: place for place, value in enumerate(table.quantity(by).names)}
    parts = list(frame.groupby(by, sort=True, dropna=False))
    return sorted(parts, key=lambda part: known.get(part[0], len(known)))


def categories(tables: Tables, by: str) -> set[str]:
    """Return the values of a key in all tables of a run: a domain has one colour in all of its figures."""
    if not by.endswith("domain"):
        return set()
    seen = (frame[name] for frame in tables.values() for name in ("domain", "main_domain") if name in frame)
    return {value for column in seen for value in column.dropna().unique() if value not in ("", NO_DOMAIN)}


def with_names(table: Table, by: str, known: set[str], rows: dict[str, pd.DataFrame]) -> Table:
    """Return the table with the values of `by` named: each keeps its colour on every page."""
    column = table.quantity(by)
    if not by or column.names or by in NUMBERED or any(by not in part for part in rows.values()):
        return table
    found = {str(value) for part in rows.values() for value in part[by].dropna()}
    values = [*sorted(known), *sorted(found - known)]
    named = replace(column, names=dict(zip(values, values, strict=True)))
    return replace(table, meanings={**table.meanings, table.key(by): named})


def points(name: Any, x: Any, y: Any, mode: str = "markers", **more: Any) -> Trace:
    """Return a trace of points or lines."""
    x, y = (np.asarray(values) if isinstance(values, pd.Series) else values for values in (x, y))
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **more}


def surprise(frame: pd.DataFrame, column: Column) -> float:
    """Return the largest distance from chance of rows with enough data: the page that a figure opens with."""
    away = np.abs(distance(frame, column)[0])[~frame["_few"].to_numpy(bool)]
    return float(np.max(away[np.isfinite(away)], initial=0.0)) if column.chance is not None else 0.0


def styles_of(key: Column, by: str, values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a style per value: layers take a sequence of colours, named values always the same one."""
    if by == "layer" and len(set(values)) == len(values):
        colors = layer_colors(values)
        return [{"color": colors[value]} for value in values]
    known = list(key.names)
    return [
        {"color": GREY} if value == "" else category_style(known.index(value) if value in known else place)
        for place, value in enumerate(values)
    ]


def words_of(name: str) -> str:
    return name.replace("_", " ")


def value_text(key: Column, value: Any) -> str:
    """Return a value on an axis: as its column names it, whole numbers without a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return key.names.get(value, str(value))


def value_words(key: Column, by: str, value: Any) -> str:
    """ "layer 3", the words of a value that its column names, or the value."""
    return f"{by} {value_text(key, value)}" if by in NUMBERED else value_text(key, value)


def interval_traces(line: pd.DataFrame, x: str, color: str, band: bool) -> list[Trace]:
    """The interval as a band, or as bars from end to end: it may lie beside a biased value."""
    known = line[line["_low"].notna() & line["_high"].notna()]
    if known.empty:
        return []
    at, low, high = (known[name].to_numpy() for name in (x, "_low", "_high"))
    if band:
        red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
        fill = {"fill": "toself", "fillcolor": f"rgba({red},{green},{blue},0.16)", "line": {"width": 0}}
        edge = np.concatenate([at, at[::-1]]), np.concatenate([high, low[::-1]])
        return [points("", edge[0], edge[1], "lines", **QUIET, **fill)]
    gap = np.full(len(at), np.nan)
    bars = np.column_stack([at, at, gap]).ravel(), np.column_stack([low, high, gap]).ravel()
    return [points("", bars[0], bars[1], "lines", **QUIET, line={"color": color, "width": 1.2})]


def error_bars(rows: pd.DataFrame) -> dict[str, Any]:
    up, down = rows["_high"] - rows["_value"], rows["_value"] - rows["_low"]
    ends = {"array": up.clip(lower=0).to_numpy(), "arrayminus": down.clip(lower=0).to_numpy()}
    return {"type": "data", "symmetric": False, **ends}


def dots(rows: pd.DataFrame, y: str, key: Column, name: str, color: str, symbol: str, size: int) -> Trace:
    trace = points(name, rows["_value"], [value_text(key, value) for value in rows[y]])
    trace["marker"] = {"size": size, "color": color, "symbol": symbol}
    trace["hovertemplate"] = f"%{{y}}<br>{name} %{{x:.4g}}<extra></extra>"
    if "_low" in rows and rows["_low"].notna().any():
        trace["error_x"] = error_bars(rows)
    return trace


def bound_ticks(frame: pd.DataFrame, y: str, table: Table, name: str) -> list[Trace]:
    """Grey, per row: the ends of the null interval, and a bound that differs from row to row."""
    column, key = table.quantity(name), table.quantity(y)
    ends = [frame["_chance"] + side * BOUND * frame["_noise"] for side in (-1, 1)]
    most = [frame["_most"]] if isinstance(column.most, str) else []
    traces = []
    for words, levels, symbol in (
        (f"{column.chance_label}, 95 %", ends, "line-ns-open"),
        (column.most_label, most, "triangle-down-open"),
    ):
        at = pd.concat([frame[[y]].assign(_at=level) for level in levels] or [frame[[y]].assign(_at=np.nan)])
        if len(at := at.dropna(subset="_at")):
            marker = {"symbol": symbol, "color": GREY, "size": 12, "line": {"width": 2}}
            hover = f"%{{y}}<br>{words} %{{x:.4g}}<extra></extra>"
            text = [value_text(key, value) for value in at[y]]
            traces.append(points(words, at["_at"], text, marker=marker, hovertemplate=hover))
    return traces


def reference_traces(rows: dict[str, pd.DataFrame], x: str, table: Table, named: bool = True) -> list[Trace]:
    """Grey: chance dashed with its 95 % band, a varying bound and guides dotted; equal levels once.

    Of several columns each names its own, or with `named` off one name in the legend stands for all.
    """
    traces: list[Trace] = []
    seen: list[np.ndarray] = []
    for name, frame in rows.items():
        column = table.quantity(name)
        for word, label, dash in (
            ("chance", column.chance_label, "dash"),
            ("most", column.most_label, "dot"),
        ):
            if frame[f"_{word}"].isna().all() or (word == "most" and not isinstance(column.most, str)):
                continue
            levels = frame.groupby(x)[f"_{word}"].agg(["mean", "min", "max"])
            at, level = levels.index.to_numpy(), levels["mean"].to_numpy(float)
            if any(len(level) == len(other) and np.allclose(level, other, equal_nan=True) for other in seen):
                continue
            seen.append(level)
            noise = frame.groupby(x)["_noise"].mean().fillna(0).to_numpy(float) * BOUND
            low, high = levels["min"].to_numpy(float), levels["max"].to_numpy(float)
            if word == "chance":
                by_x = frame.groupby(x)
                low = by_x["_chance_0"].min().to_numpy(float) - noise
                high = by_x["_chance_1"].max().to_numpy(float) + noise
            if not np.allclose(low, high, equal_nan=True):
                edge = pd.DataFrame({x: at, "_low": low, "_high": high})
                traces += interval_traces(edge, x, GREY, band=True)
            once = not named and any(trace["name"] == label for trace in traces)
            line = grey_line(
                at, level, f"{label}, {table.label(name)}" if named and len(rows) > 1 else label, dash
            )
            traces.append({**line, "showlegend": False} if once else line)
        at = np.sort(frame[x].unique())
        traces += [
            grey_line(at, np.full(len(at), float(level)), words, "dot")
            for level, words in column.guides.items()
        ]
    return traces


def in_decades(values: pd.Series) -> tuple[pd.Series, np.ndarray, dict[str, Any]]:
    """Return log10 of the values, the edges of four bins per decade and the axis; 0 has the bin below all."""
    logs = np.log10(values.where(values > 0))
    low, high = np.floor(4 * logs.min()) / 4, np.floor(4 * logs.max()) / 4
    edges = np.arange(low - 0.25, high + 0.3, 0.25)
    decades = range(int(np.ceil(low)), int(np.floor(high + 0.25)) + 1)
    ticks = {low - 0.125: "0"} if logs.isna().any() else {}
    ticks |= {float(decade): number(10.0**decade) for decade in decades}
    axis = {"tickvals": [*ticks], "ticktext": [*ticks.values()]}
    return logs.fillna(low - 0.125), edges, axis


def ridges(
    frame: pd.DataFrame, by: str, left: str, right: str, density: str
) -> tuple[list[Trace], dict[str, Any]]:
    """One grey ridge per value of `by`, the first on top, and a diamond at its value."""
    values = sorted(frame[by].unique())
    colors = layer_colors(values)
    x: list[float] = []
    y: list[float] = []
    marks = []
    for row, value in enumerate(reversed(values)):
        part = frame[frame[by] == value].sort_values(left)
        height = part[density] / part[density].max() * 0.85
        x += [
            part[left].iloc[0],
            *(part[left] + part[right]) / 2,
            part[right].iloc[-1],
            part[left].iloc[0],
            np.nan,
        ]
        y += [row, *(row + height), row, row, np.nan]
        marks.append((float(part["_value"].iloc[0]), row + 0.2, value))
    filled = {"fill": "toself", "fillcolor": "rgba(138,144,153,0.35)", "line": {"color": GREY, "width": 1}}
    null = points("at chance", x, y, "lines", **filled, hoverinfo="skip")
    at, rows, places = zip(*marks, strict=True)
    marker = {"color": [colors[value] for value in places], "size": 10, "symbol": "diamond"}
    stored = points("observed", at, rows, marker=marker, hovertemplate="%{x:.4g}<extra></extra>")
    every = max(1, -(-len(values) // 24))
    ticks = {
        "tickvals": list(range(len(values) - 1, -1, -every)),
        "ticktext": [str(v) for v in values[::every]],
    }
    return [null, stored], ticks


def x_axis(key: str, frame: pd.DataFrame, table: Table) -> dict[str, Any]:
    values = sorted(frame[key].unique())
    if key == "k":
        return k_axis(values)
    if key in ("layer", "expert", "step", "step_a"):
        return layer_axis(values)
    if (
        table.quantity(key).scale == "log"
        and len(values) <= 10
        and min(values) > 0
        and max(values) >= 8 * min(values)
    ):
        return {"type": "log", "tickvals": values, "ticktext": [number(value) for value in values]}
    numbers = pd.api.types.is_numeric_dtype(frame[key]) and min(values) > 0
    return (log_axis(values) or {}) if numbers and max(values) > 30 * min(values) else {}


def y_axis(column: Column, traces: list[Trace]) -> dict[str, Any]:
    """Logarithmic where the column says so and something is above 0; else from bound to bound."""
    drawn = np.concatenate([np.asarray(trace["y"], float) for trace in traces])
    if column.scale == "log" and (axis := log_axis(drawn[drawn > 0])):
        return axis
    low, high = (end if isinstance(end, int | float) else None for end in (column.least, column.most))
    if low is not None and high is not None:
        return {"range": [low - 0.04 * (high - low), high + 0.04 * (high - low)]}
    return {"rangemode": "tozero"} if low == 0 else {}


# --- captions from columns


def caption_of(frame: pd.DataFrame, table: Table, name: str, x: str, by: str = "") -> str:
    """ "At k = 8, alignment: 0.25 (layer 0) to 0.56 (layer 3) (random direction: 0.1)."

    Over steps: the mean at the first and last; elsewhere the range, at the k at which experts are compared.
    """
    column, label = table.quantity(name), table.label(name)
    frame, start = frame[~frame["_few"]], ""
    if frame.empty:
        return "Too little data."
    if x in ("step", "step_a") and frame[x].nunique() > 1:
        means = frame.groupby(x)["_value"].mean()
        ends = means.iloc[[0, -1]]
        first, last = (f"{number(value)} (step {step:,})" for step, value in ends.items())
        mean = f", mean over {by}s" if by and frame[by].nunique() > 1 else ""
        level = chance_of(frame[frame[x] == means.index[-1]], column)
        return f"{capital(label)}{mean}: {first} to {last}{level}."
    if "reference" in frame and flags(frame["reference"]).any() and x in ("k", "rank_share"):
        frame = frame[flags(frame["reference"])]
        start = f"At {table.label(x)} = {number(frame[x].iloc[0])}, "
    key = by if by and frame[by].nunique() > 1 else x
    return f"{capital(f'{start}{label}')}{extremes(frame, table, key)}{chance_of(frame, column)}."


def extremes(frame: pd.DataFrame, table: Table, *keys: str) -> str:
    """ ": 0.1 (layer 0) to 0.9 (layer 4)", or " is 0.1"."""
    low, high = frame.loc[frame["_value"].idxmin()], frame.loc[frame["_value"].idxmax()]
    least, most = number(low["_value"]), number(high["_value"])
    if least == most:
        return f" is {least}{' throughout' if len(frame) > 1 else ''}"
    return f": {least} ({place(low, table, *keys)}) to {most} ({place(high, table, *keys)})"


def place(row: pd.Series, table: Table, *keys: str) -> str:
    """ "layer 3, expert 5"."""
    words = {key: value_text(table.quantity(key), row[key]) for key in keys}
    stems = {key: key.split("_")[0] for key in keys}
    return ", ".join(
        f"{stems[key]} {value}" if stems[key] in NUMBERED else value for key, value in words.items()
    )


def chance_of(frame: pd.DataFrame, column: Column) -> str:
    levels = frame["_chance"].dropna()
    return f" ({column.chance_label}: {span(levels)})" if len(levels) else ""


def grid_caption(frame: pd.DataFrame, table: Table, name: str, keys: tuple[str, ...]) -> str:
    """The smallest and largest cell, and how many lie outside their null interval."""
    column, enough = table.quantity(name), frame[~frame["_few"]]
    if enough.empty:
        return "Too little data in every cell."
    outside = ""
    if enough["_noise"].notna().any():
        away, bound = distance(enough, column)
        beyond = int((np.abs(np.nan_to_num(away)) > bound).sum())
        expected = f" (expected: {number(0.05 * len(enough))})" if len(keys) < 3 else ""
        outside = f"; {beyond:,} of {len(enough):,} beyond chance{expected}"
    words = f"{extremes(enough, table, *keys)}{chance_of(enough, column)}"
    return f"{capital(table.label(name))}{words}{outside}."
