"""Tables: what identifies a row, what a row holds, and what each column means; parquet in and out.

Each subject defines its tables in its own `tables.py`; the columns that several subjects share stand here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moescope.errors import BadInput, one_line, reject_if

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq

SCHEMA_VERSION = 2
FEWEST_DOCUMENTS = 20  # of an interval over documents: with fewer its columns are empty
COLUMNS = b"moescope.columns"  # of a parquet file's metadata: the columns that it was written with
MOST_VALUES, VALUES_READ = 100, 3 * 10**7  # of a parquet file: per byte, and how many are read anyway

Reference = str | float | None  # a column's name, or a number


@dataclass(frozen=True)
class Column:
    """A column: its kind (int, float, bool, text, floats, ints) and what a reader needs to judge a number.

    Words for the glossary first. Then the same for a machine: figures, captions, tables, key numbers and
    findings draw a column's chance level, noise, bounds and interval from here.
    """

    kind: str
    meaning: str
    formula: str = ""
    at_worst: str = ""
    at_chance: str = ""
    at_best: str = ""
    misleads: str = ""
    label: str = ""  # how figures and tables spell it; the column's name where empty
    unit: str = ""
    _: KW_ONLY
    chance: Reference = None
    chance_label: str = "chance"
    chance_range: tuple[str, str] | None = None  # columns of the range of several values at chance
    noise: Reference = None  # standard deviation of the value at chance
    least: Reference = None  # possible bounds: a number ends the axis, a column is a dotted line
    most: Reference = None
    most_label: str = "collapse"
    sizes: Mapping[float, str] = field(default_factory=dict)  # least share of `most` -> word for the size
    interval: tuple[str, str] | None = None  # columns of its 95 % interval
    corrected: tuple[str, str] | None = None  # of the estimate that the interval is of, and its chance level
    # columns of what the most extreme of all rows read has by chance: its median, and what 5 % lie beyond
    extreme: tuple[str, str] | None = None
    scale: Literal["linear", "log", "ratio"] = "linear"  # ratio: relative to chance, in doublings
    better: Literal["", "higher", "lower"] = ""
    few: str = ""  # a bool column: too little data to judge
    names: Mapping[str, str] = field(
        default_factory=dict
    )  # of a key: value -> words; its place is its colour
    guides: Mapping[float, str] = field(default_factory=dict)  # published thresholds -> words

    @property
    def words(self) -> dict[str, str]:
        """What the glossary shows of it."""
        names = (
            "kind",
            "meaning",
            "formula",
            "at_worst",
            "at_chance",
            "at_best",
            "misleads",
            "label",
            "unit",
        )
        return {name: getattr(self, name) for name in names}

    def share(self, value: float, most: float) -> float:
        """Return the value's share of the way to the most, from the least or 0; of a ratio from chance."""
        start = self.chance if self.scale == "ratio" else self.least
        least = float(start) if isinstance(start, int | float) else 0.0
        return (value - least) / (most - least) if most > least else float("nan")

    def size(self, value: float, most: float) -> str:
        """Return the word for a value of this size; "" where the column has none or `most` is not known."""
        share = self.share(value, most)
        return next((word for least, word in sorted(self.sizes.items(), reverse=True) if share >= least), "")

    def axis(self, name: str) -> str:
        """Return the title of an axis that shows it: label and unit."""
        label = self.label or name.replace("_", " ")
        return f"{label} ({self.unit})" if self.unit else label


UNDESCRIBED = Column("float", "")
SHARED: dict[str, Column] = {
    "step": Column(
        "int",
        (
            "Which checkpoint of a training run, or the optimiser step that ends a stretch of it; 0 "
            "for a model looked at once."
        ),
    ),
    "layer": Column("int", "The layer's number in the model, from 0."),
    "layer_name": Column("text", "The MoE block's name in the checkpoint."),
    "expert": Column("int", "The expert's number in its layer, from 0."),
    "expert_a": Column("int", "The first expert of a pair; always the smaller number."),
    "expert_b": Column("int", "The second expert of a pair."),
    "domain": Column(
        "text",
        (
            "The name a text was given with, train for what a training run read; in routing_layers "
            "empty for all domains together."
        ),
    ),
    "train_loss": Column("float", "The loss as trained, mean over the steps since the row before."),
}


@dataclass(frozen=True)
class Table:
    """A table's name, what identifies a row, and what a row holds.

    `layer_name` follows `layer` on disk, and is no key.
    """

    name: str
    meaning: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    optional: tuple[str, ...] = ()  # keys that may be null: what the row is about has none
    terms: Mapping[str, Column] = field(default_factory=dict)  # names in its column `metric`, as columns
    whole: Mapping[str, Any] = field(default_factory=dict)  # key -> its value in rows for all together
    meanings: Mapping[str, Column] = field(default_factory=dict, repr=False)  # glossary key -> column

    @property
    def columns(self) -> tuple[str, ...]:
        names = [*self.keys, *self.values]
        if "layer" in names:
            names.insert(names.index("layer") + 1, "layer_name")
        return tuple(names)

    def key(self, name: str) -> str:
        """Return the glossary's key for a column: table.column where the table has a meaning of its own."""
        return f"{self.name}.{name}" if f"{self.name}.{name}" in self.meanings else name

    def column(self, name: str) -> Column:
        return self.meanings[self.key(name)]

    def quantity(self, name: str) -> Column:
        """Return a column, or a term in its rows; one that nobody described for any other name."""
        return self.terms.get(name) or self.meanings.get(self.key(name)) or UNDESCRIBED

    def label(self, name: str) -> str:
        """Return a column, or a term in its rows, in words."""
        return self.quantity(name).label or name.replace("_", " ")

    @property
    def glossary(self) -> dict[str, Column]:
        """Glossary key -> meaning, of its columns and of the terms in its rows."""
        return {self.key(name): self.column(name) for name in self.columns} | dict(self.terms)


def define_tables(columns: Mapping[str, Column], *tables: Table) -> dict[str, Table]:
    """Return the tables by name, each with the meanings of its columns."""
    meanings = {**SHARED, **columns}
    return {table.name: replace(table, meanings=meanings) for table in tables}


def arrow_schema(table: Table) -> pa.Schema:
    """Return the parquet schema of a table; keys are never null, except those a table calls optional."""
    import pyarrow as pa

    kinds = {
        "int": pa.int64(),
        "float": pa.float64(),
        "bool": pa.bool_(),
        "text": pa.string(),
        "floats": pa.list_(pa.float32()),
        "ints": pa.list_(pa.int32()),
    }
    required = set(table.keys) - set(table.optional)
    return pa.schema(
        [pa.field(name, kinds[table.column(name).kind], name not in required) for name in table.columns],
        metadata={
            "moescope.schema_version": str(SCHEMA_VERSION),
            "moescope.table": table.name,
            COLUMNS: ",".join(table.columns),
        },
    )


def conform(table: Table, frame: pd.DataFrame) -> pa.Table:
    """Return the frame as an arrow table of exactly the schema's columns, in order.

    Absent columns are null; an unknown column, a null key and a repeated key are errors.
    """
    import pyarrow as pa

    unknown = sorted(set(frame.columns) - set(table.columns))
    if unknown:
        known = ", ".join(table.columns)
        raise ValueError(f"table {table.name} has no column {', '.join(unknown)}; known: {known}")
    absent = [name for name in table.columns if name not in frame.columns]
    full = frame.assign(**dict.fromkeys(absent)).reindex(columns=list(table.columns))
    missing = [key for key in table.keys if key not in table.optional and full[key].isna().any()]
    if missing:
        raise ValueError(f"table {table.name}: key {', '.join(missing)} may not be null")
    if full.duplicated(list(table.keys)).any():
        raise ValueError(f"table {table.name}: rows with equal keys {', '.join(table.keys)}")
    return pa.Table.from_pandas(full, schema=arrow_schema(table), preserve_index=False)


def read_parquet(path: str, table: Table | None = None) -> pd.DataFrame:
    """Return the table as a pandas frame; a damaged file or another schema version is an error.

    With `table` also a file that has lost one of its columns, or has one of another type. Columns that did
    not exist when the file was written are null.
    """
    with opened_parquet(path) as opened:
        arrow = opened.read()
        written = (arrow.schema.metadata or {}).get(b"moescope.schema_version", b"none").decode()
        if written != str(SCHEMA_VERSION):
            raise BadInput(
                f"{path}: schema version {written}, this moescope uses {SCHEMA_VERSION}; "
                "run its command again"
            )
        if wrong := wrong_column(arrow.schema, table):
            raise BadInput(f"{path}: column {wrong}; run its command again with --overwrite")
        frame: pd.DataFrame = arrow.to_pandas()
    return frame if table is None else frame.reindex(columns=list(table.columns))


@contextmanager
def opened_parquet(path: str | Path) -> Iterator[pq.ParquetFile]:
    """Open a parquet file; a damaged one is an error, and one whose values are far more than its bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = (pa.ArrowException, OSError, ValueError, TypeError, KeyError)
    damaged = one_line(f"{path}: damaged parquet file", "run its command again with --overwrite", kinds)
    with damaged, pq.ParquetFile(os.path.abspath(path)) as opened:  # "s3:x" looks like a URL
        check_values(opened, path)
        yield opened


def check_values(opened: pq.ParquetFile, path: str | Path) -> None:
    """Reject a file whose values take far more memory than its bytes: equal ones take nearly none there."""
    groups = [opened.metadata.row_group(at) for at in range(opened.num_row_groups)]
    values = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
    most = max(VALUES_READ, MOST_VALUES * os.path.getsize(path))
    reject_if(values > most, f"{path}: {values:,} values in a file of few bytes; write it again")


def wrong_column(schema: pa.Schema, table: Table | None) -> str | None:
    """Return the first column that a file has lost or that has another type than in the table, and why."""
    types = {column.name: column.type for column in schema}
    written = (schema.metadata or {}).get(COLUMNS, b"").decode(errors="replace").split(",")
    for column in [] if table is None else arrow_schema(table):
        stored = types.get(column.name)
        if stored is None and column.name in written:
            return f"{column.name} is missing"
        if stored is not None and stored != column.type:
            return f"{column.name} holds {stored}, not {column.type}"
    return None


# --- fields of run.json: their types are stored with them, so that a damaged one can be named

# the kind of a value, or of each field of an object; of a list its length, then the shape of its items
Shape = str | dict[str, Any] | list[Any]
KINDS = {str: "text", bool: "flag", int: "number", float: "number", type(None): "nothing"}


def shape_of(value: Any) -> Shape:
    """Return the fields of a JSON value and the kinds of their values."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        shapes = [shape_of(item) for item in value]
        return [len(value), *(shapes[:1] if all(shape == shapes[0] for shape in shapes) else shapes)]
    return KINDS[type(value)]


def damaged_field(value: Any, shape: Shape, place: str = "") -> str | None:
    """Return what is wrong with the first field that has not its shape; None where all have."""
    if shape == "any":
        return None
    where = place or "its content"
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is not an object"
        dot = f"{place}." if place else ""
        if missing := [key for key in shape if key not in value]:
            return f"{dot}{missing[0]} is missing"
        damages = (damaged_field(value[key], part, f"{dot}{key}") for key, part in shape.items())
        return next(filter(None, damages), None)
    if isinstance(shape, list):
        if not isinstance(value, list) or [len(value)] != shape[:1]:
            return f"{where} is not a list of the length that was written"
        shapes = shape[1:] if len(shape) > 2 else shape[1:] * shape[0]  # one for all items where they agree
        pairs = enumerate(zip(value, shapes, strict=False))
        damages = (damaged_field(item, part, f"{place}[{at}]") for at, (item, part) in pairs)
        return next(filter(None, damages), None)
    kind = KINDS.get(type(value), "another")
    return None if kind == shape else f"{where} is {kind}, not {shape}"
