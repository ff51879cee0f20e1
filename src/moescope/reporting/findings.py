"""Findings and key numbers as specs: which rows, which of them, which words.

A text's fields are the leading row's columns, and: value, interval, chance (with its label), size (a word,
the share of the largest possible value and "; ", but first of all whether it is distinguishable from
chance), place (layer 3, expert 5), span and most (over all rows), count and total (rows that it is about,
of all), count_of_total ("all 3", or "2 of 3"), rows (their layers, or the first places), groups (the
leading row per group), first and last (the value there, with its step). A number prints with three digits.
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
from moescope.tables import Column, Table
from moescope.verb import Finding, KeyNumber, Tables

EXTREMES = ("worst", "largest", "smallest")  # rows that lead because no other is further out
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
        if self.only == "beyond" and not judged(rows).any():  # no claim either way
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
    """Return whether a value lies outside chance: by its own interval, else by the noise at chance.

    The interval of a corrected value is compared with the chance level of corrected ones. Where it is known
    what the most extreme of all rows reaches by chance, a value must lie beyond that too.
    """
    level = rows["_corrected_chance"].fillna(rows["_chance"])
    by_interval = (rows["_low"] > level) | (rows["_high"] < level)
    by_noise = (rows["_value"] - rows["_chance"]).abs() > BOUND * rows["_noise"]
    alone = by_interval.where(rows["_low"].notna(), by_noise | rows["_noise"].isna())
    up = rows["_limit"] >= rows["_extreme"]
    past = (rows["_value"] > rows["_limit"]).where(up, rows["_value"] < rows["_limit"])
    unknown = rows["_low"].isna() & rows["_noise"].isna()
    return (alone & past).where(rows["_limit"].notna(), alone & ~unknown)


def judged(rows: pd.DataFrame) -> pd.Series:
    """Return whether it is known if a value lies outside chance."""
    return rows["_chance"].notna() & rows[["_low", "_noise", "_limit"]].notna().any(axis=1)


def level_of(spec: Rows, top: pd.Series, rows: pd.DataFrame) -> tuple[float, str]:
    """Return the chance level of the leading row, of an extreme one that of the extreme and of how many."""
    if spec.pick in EXTREMES and len(rows) > 1 and pd.notna(top["_extreme"]):
        return float(top["_extreme"]), f"extreme of {len(rows):,}"
    return float(top["_chance"]), ""


def size_of(row: pd.DataFrame, column: Column) -> str:
    """Return whether a row is distinguishable from chance, and if so how large its value is.

    "not distinguishable from chance", or "weak (7 % of the maximum)".
    """
    if judged(row).iloc[0] and not beyond(row).iloc[0]:
        return "not distinguishable from chance"
    value, most = row["_value"].iloc[0], row["_most"].iloc[0]
    word, percent = column.size(value, most), 100 * column.share(value, most)
    shown = f"{percent:.2g}" if percent >= 0.1 else "under 0.1"
    return f"{word} ({shown} % of {column.most_label})" if word else ""


def place_of(row: pd.Series, table: Table) -> str:
    keys = [key for key in KEYS if key in row and not pd.isna(row[key]) and row[key] != ""]
    return place(row, table, *keys)


def fields(spec: Said, counted: pd.DataFrame, rows: pd.DataFrame, table: Table) -> dict[str, Any]:
    """Return what a sentence may name."""
    column = table.quantity(spec.column)
    lead = (counted if len(counted) else rows).iloc[:1]
    top = lead.iloc[0]
    level, of = level_of(spec, top, rows)
    label, size = ", ".join(filter(None, (column.chance_label, of))), size_of(lead, column)
    interval = f" [{number(top['_low'])}, {number(top['_high'])}]" if pd.notna(top["_low"]) else ""
    if pd.notna(top["_corrected_chance"]):
        words = f"{number(top['_corrected'])}{interval}, even: {number(top['_corrected_chance'])}"
        interval = f" (without the bias of few documents {words})" if interval else ""
    names = [place_of(row, table) for _, row in counted.head(NAMED).iterrows()]
    more = [f"{len(counted) - NAMED} more"] if len(counted) > NAMED else []
    layers = (
        "layer" in counted and counted["layer"].notna().all() and not {"expert", "expert_a"} & set(counted)
    )
    groups = []
    for _, row in counted.drop_duplicates(spec.group).iterrows() if spec.group else ():
        words, rest = value_text(table.quantity(spec.group), row[spec.group]), row.drop(spec.group)
        at = [rest.get(key) for key in ("layer", "expert")]
        where = place_of(rest, table) if pd.isna(at).any() else f"L{at[0]:.0f} E{at[1]:.0f}"
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
        "chance": f"{label}: {number(level)}",
        "interval": interval,
        "size": f"{size}; " if size else "",
        "degree": size or "as measured",
        "percent": f"{number(100 * top['_value'])} %",
        "chance_percent": f"{label}: {number(100 * level)} %",
        "place": place_of(top, table),
        "span": span(rows["_value"]),
        "most": rows["_value"].max(),
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


def verdict_of(specs: Iterable[Said], tables: Tables, schema: Schema) -> Finding:
    """Return the sentences as one, with the place of the first; empty where nothing is said."""
    said = [finding for spec in specs if (finding := say(spec, tables, schema)) is not None]
    return Finding(" ".join(said), **(said[0].place if said else {}))


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
    lead = counted.iloc[:1] if len(counted) else rows.iloc[:1]
    word = ""
    if judged(lead).iloc[0]:
        word = (size_of(lead, column) or "beyond chance") if beyond(lead).iloc[0] else "at chance"
    keys = [key for key in ("layer", "expert") if pd.notna(top.get(key))]
    where = place(top, schema[spec.table], *keys) if len(rows) > 1 else ""
    chance, of = level_of(spec, top, rows)
    label = f"{column.chance_label} ({of})" if of else column.chance_label
    level, most = (None if pd.isna(bound) else float(bound) for bound in (chance, top["_most"]))
    words = ", ".join(filter(None, (word, where)))
    return KeyNumber(name, float(top["_value"]), level, column.unit, words, label, most)


def key_numbers(specs: Iterable[Number], tables: Tables, schema: Schema) -> list[KeyNumber]:
    return [number for spec in specs if (number := key_number(spec, tables, schema)) is not None]
