"""Claims of results.toml on the page: verdicts with a forest plot, and the tables and figures it names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd

from moescope.arguments import one_of
from moescope.decoder.config import check_table
from moescope.errors import BadInput, unknown_name
from moescope.lab.claims import (
    OF_QUANTITY,
    VERDICTS,
    ClaimsFile,
    Studies,
    changed,
    estimate,
    judge,
    read_claims,
    words,
)
from moescope.lab.config import load_function
from moescope.lab.figures import CLAIMS
from moescope.lab.study_statistics import of_question, probe_tables
from moescope.lab.tables import TABLES
from moescope.plotting.marks import QUANTITY, Bars, Distribution, Dots, Grid, Lines, Mark, Matrix, Scatter
from moescope.plotting.style import counted, listed, number
from moescope.reporting.pack import plain_table, table_payload
from moescope.reporting.views import drawable
from moescope.run import Run
from moescope.tables import Column, Table, define_tables
from moescope.verb import Drawable, Section, Tables

OF_TABLE = {
    **{"title": str, "text": str, "rows": dict[str, Any], "columns": tuple[Any, ...]},
    **OF_QUANTITY,
}
OF_COLUMN = {"title": str, "decimals": int, "scale": float, **OF_QUANTITY}
OF_FIGURE = dict.fromkeys(("title", "text", "study", "name", "question"), str)
MARKS: dict[str, type[Mark]] = {
    mark.__name__: mark for mark in (Lines, Grid, Matrix, Bars, Dots, Scatter, Distribution)
}
NOT_OF_FILE = ("name", "was", "schema", "KEYS", "COLUMNS", "VALUE")
COLUMNS = (
    *("claim", "text", "check", "verdict", "estimate", "low", "high", "p", "p_holm", "seeds"),
    *("study", "arm", "than", "column", "estimand", "expect", "hedges_g", "failed", "why"),
)


def claims_page(
    files: Sequence[str | Path], runs: Sequence[Run], studies: Studies
) -> tuple[pd.DataFrame, list[Section]]:
    """Return the judged claims of these files, and their sections of the page."""
    read = [read_claims(file) for file in files]
    for place, file in enumerate(read):
        if file.title in [other.title for other in read[:place]]:
            raise BadInput(f"{file.path}: another file has the title {file.title!r}; give each its own")
    judged = judge(read, studies)
    return judged, [part for file in read for part in file_sections(file, judged, runs, studies)]


def file_sections(
    file: ClaimsFile, judged: pd.DataFrame, runs: Sequence[Run], studies: Studies
) -> list[Section]:
    rows = judged[judged["file"] == file.title]
    tests = int(judged.loc[judged["check"] == "", "p_holm"].notna().sum())
    family = f"Holm-corrected for all claims on the page ({counted(tests, 'test')})." if tests else ""
    own = rows[rows["check"] == ""]
    counts = f" {verdict_counts(own)}." if len(own) else ""
    text = f"{file.text}{counts} New minus reference, 95 % intervals over seeds. {family}"
    parts = [Section(anchor("claims", file.title), file.title, text.strip(), tab="results")]
    for group in dict.fromkeys(rows["group"]):
        of_group = rows[rows["group"] == group].reset_index(drop=True)
        figures = drawable([CLAIMS], {"study_claims": of_group})
        payload = table_payload(TABLES["study_claims"], of_group, COLUMNS, f"Claims: {group or file.title}")
        name, text = anchor("claims", file.title, group or "others"), file.groups.get(group, "")
        parts.append(Section(name, group or "Claims", text, figures, [payload], tab="results"))
    for place, content in enumerate(file.tables):
        parts.append(table_section(file, place, content, studies))
    for place, content in enumerate(file.figures):
        parts.append(figure_section(file, place, content, runs, studies))
    if file.sections:
        function = load_function(file.sections, file.path.parent, f"{file.path}: sections")
        try:
            parts += function(studies, judged)
        except Exception as error:
            where = f"{file.path}: sections: {file.sections}"
            raise BadInput(f"{where} failed ({type(error).__name__}: {error})") from error
    return parts


def anchor(*parts: Any) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, parts)).lower())


def verdict_counts(claims: pd.DataFrame) -> str:
    """Return "1 refuted, 5 undecided and 1 not testable"."""
    counts = Counter(verdict.split(":")[0] for verdict in claims["verdict"])
    return listed([f"{counts[name]} {name}" for name in VERDICTS if counts[name]])


# --- tables and figures that the file names


def table_section(file: ClaimsFile, place: int, content: dict[str, Any], studies: Studies) -> Section:
    """One row per arm, one column per quantity: mean ± half of its interval, in brackets the chance level."""
    where = f"{file.path}: table {content.get('title', place + 1)!r}"
    check_table(content, OF_TABLE, where)
    columns = [{"column": one} if isinstance(one, str) else one for one in content.get("columns", [])]
    if not columns or not content.get("rows"):
        raise BadInput(f"{where}: give rows = {{title = arm}} and columns = [...]")
    for one in columns:
        if "column" not in check_table(one, OF_COLUMN, f"{where}: columns"):
            raise BadInput(f'{where}: a column without name; write column = "validation_loss"')
    for one in content["rows"].values():
        check_table({"arm": one} if isinstance(one, str) else one, OF_QUANTITY, f"{where}: rows")
    shared = {key: content[key] for key in OF_QUANTITY if key in content}
    heads = [("arm", "", "text")]
    heads += [
        ("study_claims.estimate", one.get("title", one["column"].replace("_", " ")), "text")
        for one in columns
    ]
    cells = [
        [title, *(cell(studies, shared, arm, one, where) for one in columns)]
        for title, arm in content["rows"].items()
    ]
    title = content.get("title", f"Table {place + 1}")
    payload = plain_table(f"table_{file.title}_{place}", title, heads, cells)
    return Section(
        anchor("table", file.title, place), title, content.get("text", ""), tables=[payload], tab="results"
    )


def cell(studies: Studies, shared: dict[str, Any], row: Any, column: dict[str, Any], where: str) -> str:
    of_row = {"arm": row} if isinstance(row, str) else row
    given = {**shared, **of_row, **{key: column[key] for key in OF_QUANTITY if key in column}}
    of_arm = of_row["arm"] if isinstance(of_row.get("arm"), str) else ""
    for key in ("arm", "than"):  # of a column: "{arm}" is the arm of the row
        if key in column:
            given[key] = [one.replace("{arm}", of_arm) for one in words(column[key])]
    found = estimate(studies, changed(None, given, where))
    if found is None:
        return "not run"
    parts = (("{}", found.value), (" ± {}", found.half), (" ({})", found.chance))
    scaled = [(words, part * float(column.get("scale", 1))) for words, part in parts if math.isfinite(part)]
    digits = column.get("decimals")
    return "".join(
        words.format(number(part) if digits is None else f"{part:.{digits}f}".replace("-", "−"))
        for words, part in scaled
    )


def figure_section(
    file: ClaimsFile, place: int, content: dict[str, Any], runs: Sequence[Run], studies: Studies
) -> Section:
    """Return a figure of a study: one that it draws anyway, by name, or a mark of the file's own."""
    where = f"{file.path}: figure {content.get('title', place + 1)!r}"
    spec: Drawable | None = None
    kind = MARKS[one_of(f"mark in {where}", content["mark"], MARKS)] if "mark" in content else None
    check_table(content, of_mark(kind) if kind else OF_FIGURE, where)
    study = content.get("study", "")
    tables = of_question(studies.get(study, {}), content.get("question", ""))
    if kind is None:
        name = content.get("name", "")
        spec = next((found for run in runs if (found := run.verb.figure(name))), None)
        if spec is None:
            known = [spec.name for run in runs for spec in run.verb.figures]
            raise unknown_name(f"name in {where}", name, known)
    elif tables:
        spec, tables = own_mark(kind, content, where, tables)
    try:
        figures = [(spec, tables)] if spec and tables and spec.can_draw(tables) and spec.draw(tables) else []
    except Exception as error:  # a query of the file, or columns that do not suit the mark
        raise BadInput(f"{where}: cannot be drawn ({type(error).__name__}: {error})") from error
    text = content.get("text", "") if figures else f"Not run: the study {study} has no such numbers."
    title = content.get("title", spec.line.rstrip(".") if spec else f"Figure {place + 1}")
    return Section(anchor("figure", file.title, place), title, text, figures, tab="results")


def of_mark(kind: type[Mark]) -> dict[str, Any]:
    """Return the keys of a figure that is a mark of the file's own."""
    hints = {one: hint for one, hint in get_type_hints(kind).items() if one not in NOT_OF_FILE}
    return {"mark": str, "study": str, "question": str, "text": str, **hints}


def own_mark(kind: type[Mark], content: dict[str, Any], where: str, tables: Tables) -> tuple[Mark, Tables]:
    """Return the mark that a file describes, with the tables and those of the study's probe."""
    probed = probe_tables(tables["study_probes"]) if "study_probes" in tables else {}
    schemas = {**{name: described_table(name, frame) for name, frame in probed.items()}, **TABLES}
    for one in fields(kind):
        needed = one.default is MISSING and one.default_factory is MISSING
        if needed and one.name != "name" and one.name not in content:
            raise BadInput(f"{where}: no {one.name}; a {kind.__name__} needs it: {one.name} = ...")
    if (table := content["table"]) not in schemas:
        raise unknown_name("table", table, list(schemas), where)
    columns = [*schemas[table].columns, *schemas[table].terms]
    for key in (kind.VALUE, *kind.KEYS, *kind.COLUMNS, "one", "pages"):
        for column in words(content.get(key, "")):
            if column not in (*columns, QUANTITY):
                raise unknown_name(f"column of {table}", column, columns, f"{where}: {key}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in content.items()
        if key not in ("mark", "study", "question", "text")
    }
    mark = kind(anchor(content.get("title", table)), **values)
    return mark.bound(schemas), {**probed, **tables}


def described_table(name: str, frame: pd.DataFrame) -> Table:
    """Return a table of a probe: its columns have no more than a kind."""
    kinds = {
        str(column): "int" if kind.kind in "iu" else "float" if kind.kind == "f" else "text"
        for column, kind in frame.dtypes.items()
    }
    columns = {column: Column(kind, "") for column, kind in kinds.items()}
    return define_tables(columns, Table(name, "", (), tuple(columns)))[name]
