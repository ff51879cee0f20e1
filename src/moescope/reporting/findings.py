"""Findings and key numbers as specs: which rows, which of them, which words.

A text's fields are the leading row's columns, and: value, interval, chance (with its label), place (layer 3,
expert 5), span (over all rows), count and total (rows that it is about, of all), count_of_total ("all 3", or
"2 of 3"), rows (their layers, or the first places), groups (the leading row per group), first and last (the
value there, with its step). A number prints with three digits.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from moescope.plotting.colour import BOUND
from moescope.plotting.marks import chosen, flags, place, standard_rows, value_text
from moescope.plotting.style import capital, listed, named_layers, number, span
from moescope.tables import Table
from moescope.verb import Finding, KeyNumber, Tables

NAMED = 5  # rows that a sentence spells out
KEYS = ("layer", "expert", "expert_a", "expert_b", "domain")  # that say where a row is
Schema = Mapping[str, Table]


@dataclass(frozen=True)
class Rows:
    """Rows of one quantity: what a sentence or a key number is about.

    Parameters
    ----------
    table, column
        The quantity.
    where
        Rows that are looked at, as a pandas query.
    pick
        The row that leads; worst and best follow from the column, the median is that of the rows.
    only
        Rows that count: those of a bool column, or "beyond": outside the interval at chance.
    """

    table: str
    column: str
    _: KW_ONLY
    where: str = ""
    pick: Literal["worst", "best", "largest", "smallest", "median", "furthest", "first", "last"] = "worst"
    only: str = ""

    def found(self, tables: Tables, schema: Schema) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return (rows that count, the leading one first; all rows), without those of too little data."""
        if self.table not in tables:
            return pd.DataFrame(), pd.DataFrame()
        table, frame = schema[self.table], tables[self.table]
        for key, whole in table.whole.items():
            if key in frame and key not in self.where:
                frame = frame[frame[key].isna() if whole is None else frame[key] == whole]
        rows = standard_rows(chosen(frame, self.where, table), table, self.column)
        rows = rows[~rows["_few"]]
        counted = rows
        if self.only not in ("", "beyond") and rows[self.only].isna().all():  # unknown, as in older runs
            return rows.iloc[:0], rows.iloc[:0]
        if self.only:
            counted = rows[beyond(rows) if self.only == "beyond" else flags(rows[self.only])]
        if self.pick in ("first", "last"):
            return counted.iloc[:: -1 if self.pick == "last" else 1], rows
        if self.pick == "furthest":
            away = (counted["_value"] - counted["_chance"]).abs()
            return counted.loc[away.sort_values(ascending=False, kind="stable").index], rows
        if self.pick == "median":
            away = (counted["_value"] - counted["_value"].median()).abs()
            return counted.loc[away.sort_values(kind="stable").index], rows
        up = {"largest": False, "smallest": True}.get(self.pick)
        if up is None:
            up = (table.quantity(self.column).better == "higher") != (self.pick == "best")
        return counted.sort_values("_value", ascending=up, kind="stable"), rows


@dataclass(frozen=True)
class Said(Rows):
    """A sentence about the leading row; `otherwise` where no row counts, "" for silence.

    Each value of the key `group` has a leading row; `figure`, or `tab` with the `colour` of its map, is where
    the page shows it.
    """

    _: KW_ONLY
    text: str
    otherwise: str = ""
    figure: str = ""
    tab: str = ""
    colour: str = ""
    group: str = ""


@dataclass(frozen=True)
class Number(Rows):
    """A key number: the leading row's value, or with `of` how many rows count; `name` may hold fields."""

    _: KW_ONLY
    name: str
    of: str = ""  # noun of what is counted


def beyond(rows: pd.DataFrame) -> pd.Series:
    """Return whether a value lies outside chance: by its own interval, else by the noise at chance."""
    by_interval = (rows["_low"] > rows["_chance"]) | (rows["_high"] < rows["_chance"])
    by_noise = (rows["_value"] - rows["_chance"]).abs() > BOUND * rows["_noise"]
    return by_interval.where(rows["_low"].notna(), by_noise)


def place_of(row: pd.Series, table: Table) -> str:
    keys = [key for key in KEYS if key in row and not pd.isna(row[key]) and row[key] != ""]
    return place(row, table, *keys)


def fields(spec: Said, counted: pd.DataFrame, rows: pd.DataFrame, table: Table) -> dict[str, Any]:
    """Return what a sentence may name."""
    column = table.quantity(spec.column)
    top = counted.iloc[0] if len(counted) else rows.iloc[0]
    low, high = top["_low"], top["_high"]
    names = [place_of(row, table) for _, row in counted.head(NAMED).iterrows()]
    more = [f"{len(counted) - NAMED} more"] if len(counted) > NAMED else []
    layers = (
        "layer" in counted and counted["layer"].notna().all() and not {"expert", "expert_a"} & set(counted)
    )
    groups = []
    for _, row in counted.drop_duplicates(spec.group).iterrows() if spec.group else ():
        words = value_text(table.quantity(spec.group), row[spec.group])
        where = place_of(row.drop(spec.group), table)
        groups.append(f"{words} {number(row['_value'])}{f' ({where})' if where else ''}")
    steps = {}
    if "step" in rows:
        means = rows.groupby("step")["_value"].mean()
        ends = {"first": means.index[0], "last": means.index[-1]}
        steps = {name: f"{number(means.loc[step])} (step {step:,})" for name, step in ends.items()}
    return {
        **in_words(top, table),
        **steps,
        "value": top["_value"],
        "chance": f"{column.chance_label}: {number(top['_chance'])}",
        "interval": f" [{number(low)}, {number(high)}]" if pd.notna(low) else "",
        "place": place_of(top, table),
        "span": span(rows["_value"]),
        "count": len(counted),
        "count_of_total": f"all {len(rows):,}"
        if len(counted) == len(rows) > 1
        else f"{len(counted):,} of {len(rows):,}",
        "total": len(rows),
        "rows": named_layers(counted["layer"]) if layers else listed([*names, *more]) if names else "none",
        "groups": ", ".join(groups),
    }


def in_words(row: pd.Series, table: Table) -> dict[str, Any]:
    """Return a row's values by column, whole numbers without a point, named values by their names."""
    values = {str(name): value for name, value in row.items()}
    for name, value in values.items():
        column = table.quantity(name)
        if column.names or (column.kind == "int" and isinstance(value, float) and value.is_integer()):
            values[name] = value_text(column, value)
    return values


class Words(string.Formatter):
    """Format with numbers of three digits."""

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, float | np.floating) and not spec:
            return number(float(value))
        return str(super().format_field(value, spec))


def say(spec: Said, tables: Tables, schema: Schema) -> Finding | None:
    """Return the sentence with its place on the page.

    None where the run has nothing to say, or not the chance level that the sentence names.
    """
    counted, rows = spec.found(tables, schema)
    text = spec.text if len(counted) else spec.otherwise
    if rows.empty or not text or ("{chance}" in text and rows["_chance"].isna().all()):
        return None
    words = Words().format(text, **fields(spec, counted, rows, schema[spec.table]))
    top: Mapping[str, Any] = counted.iloc[0].to_dict() if len(counted) else {}
    where = {key: int(top[key]) for key in ("layer", "expert") if key in top and str(top[key]).isdigit()}
    at = {key: value for key in ("figure", "tab", "colour") if (value := getattr(spec, key))}
    if isinstance(top.get("domain"), str) and top["domain"]:
        at["domain"] = top["domain"]
    return Finding(capital(words), **at, **where)


def say_all(specs: Iterable[Said], tables: Tables, schema: Schema) -> list[str]:
    return [said for spec in specs if (said := say(spec, tables, schema)) is not None]


def key_number(spec: Number, tables: Tables, schema: Schema) -> KeyNumber | None:
    """Return the number with its chance level, bound and a word; None where the run does not have it."""
    counted, rows = spec.found(tables, schema)
    if rows.empty or (counted.empty and not spec.of):
        return None
    column = schema[spec.table].quantity(spec.column)
    top = counted.iloc[0] if len(counted) else rows.iloc[0]
    name = Words().format(spec.name, **in_words(top, schema[spec.table]))
    if spec.of:
        expected = 0.05 * len(rows) if spec.only == "beyond" else None
        of = f"of {len(rows):,} {spec.of}"
        return KeyNumber(name, len(counted), expected, of, reference="by chance", most=float(len(rows)))
    known = pd.notna(top["_chance"]) and (pd.notna(top["_low"]) or pd.notna(top["_noise"]))
    word = ("beyond chance" if beyond(counted.iloc[:1]).iloc[0] else "at chance") if known else ""
    keys = [key for key in ("layer", "expert") if pd.notna(top.get(key))]
    where = place(top, schema[spec.table], *keys) if len(rows) > 1 else ""
    level, most = (None if pd.isna(top[name]) else float(top[name]) for name in ("_chance", "_most"))
    words = ", ".join(filter(None, (word, where)))
    return KeyNumber(name, float(top["_value"]), level, column.unit, words, column.chance_label, most)


def key_numbers(specs: Iterable[Number], tables: Tables, schema: Schema) -> list[KeyNumber]:
    return [number for spec in specs if (number := key_number(spec, tables, schema)) is not None]
