"""Two runs compared row by row: what changed most, in words and as a table."""

from __future__ import annotations

from typing import Any

from moescope.plotting.style import counted, number
from moescope.reporting.pack import plain
from moescope.reporting.run_kind import Section
from moescope.run import Run

TOLD = 6


def change_findings(run: Run) -> list[str]:
    """The columns that changed most, measured by their own spread over rows.

    And how many did not change at all.
    """
    changes = [change for change in run.info["changes"] if change["rows"]]
    numbers = ranked(changes)
    words = [change for change in changes if "largest" not in change and change["changed"]]
    still = [change for change in changes if not change["changed"]]
    found = [f"{counted(len(changes), 'column')} compared; {len(still)} did not change"]
    found += [
        (
            f"{change['table']}, {change['column']}: {change['changed']:,} of {change['rows']:,} "
            f"rows differ, such as {place(change)}: "
            f"{change['a']} to {change['b']}"
        )
        for change in words[:TOLD]
    ]
    found += [
        (
            f"{change['table']}, {change['column']}: most at {place(change)}, {number(change['a'])} "
            f"to {number(change['b'])}; "
            f"median change {number(change['median'])}, spread over rows {number(change['spread'])}"
        )
        for change in numbers[:TOLD]
    ]
    return found


def ranked(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Columns of numbers that changed, by their largest change in units of the column's own spread."""
    numbers = [change for change in changes if change.get("largest") and change["rows"]]
    return sorted(numbers, key=lambda change: -in_spreads(change))


def in_spreads(change: dict[str, Any]) -> float:
    spread = float(change["spread"])
    return abs(float(change["largest"])) / spread if spread > 0 else float("inf")


def place(change: dict[str, Any]) -> str:
    """ "layer 3, matrix gate"."""
    return (
        ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in change["where"].items())
        or "the only row"
    )


def change_sections(run: Run) -> list[Section]:
    changes = [change for change in run.info["changes"] if change["rows"]]
    order = [*ranked(changes), *(change for change in changes if not change.get("largest"))]
    heads = [
        ("table", "table", "text"),
        ("column", "column", "text"),
        ("rows", "rows", "int"),
        ("changed", "differ", "int"),
        ("where", "most at", "text"),
        ("a", "in A", "text"),
        ("b", "in B", "text"),
        ("median", "median change", "float"),
        ("spread", "spread over rows of A", "float"),
        ("spreads", "largest, in spreads", "float"),
    ]
    body = []
    for change in order:
        of_numbers = "largest" in change
        shown = [shown_value(change.get(role)) for role in ("a", "b")]
        size = in_spreads(change) if of_numbers and change["largest"] else (0.0 if of_numbers else None)
        body.append(
            [
                change["table"],
                change["column"],
                change["rows"],
                change["changed"],
                place(change) if "where" in change else "",
                *shown,
                change.get("median"),
                change.get("spread"),
                size,
            ]
        )
    columns = [{"name": name, "title": title, "kind": kind} for name, title, kind in heads]
    words = (
        "Every row that both runs have, column by column. A change is read beside the column's "
        "median change and beside its spread over the rows of the first run: "
        "a largest change of many spreads stands out."
    )
    table = {"name": "changes", "title": "Every column", "columns": columns, "rows": plain(body)}
    return [Section("changes", "What changed", words, [], [table])]


def shown_value(value: Any) -> str:
    if value is None:
        return ""
    return (
        number(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    )
