"""What the page shows of a run's tables: figures that can be drawn, tables without empty columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from moescope.reporting.pack import table_payload
from moescope.tables import Table
from moescope.verb import Drawable, Payload, Tables


def drawable(specs: Iterable[Drawable], tables: Tables) -> list[tuple[Drawable, Tables]]:
    """Return the figures that the tables can be drawn as, with the tables."""
    return [(spec, tables) for spec in specs if spec.can_draw(tables)]


def shown_table(table: Table, frame: pd.DataFrame, columns: Sequence[str], title: str) -> Payload:
    """Return a table for the page without columns that have no value."""
    return table_payload(table, frame, [name for name in columns if frame[name].notna().any()], title)
