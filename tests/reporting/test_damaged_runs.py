"""Damaged runs: whatever field, column or file is missing or of another kind, one line names it."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from checkpoints import tiny_checkpoint
from moescope.errors import BadInput
from moescope.reporting.page import page_content
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.weights.verb import scan

Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    return scan(tiny_checkpoint(folder / "model", layers=2), out=folder / "run", quiet=True).path


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Every field, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*place, key)
        yield from places(item, (*place, key))


def spelled(place: Place) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")


def damaged(info: dict[str, Any], place: Place, how: str) -> dict[str, Any]:
    changed = copy.deepcopy(info)
    holder: Any = changed
    for key in place[:-1]:
        holder = holder[key]
    if how == "missing":
        del holder[place[-1]]
    else:
        holder[place[-1]] = 7 if isinstance(holder[place[-1]], str) else "seven"
    return changed


@pytest.mark.parametrize("how", ["missing", "mistyped"])
def test_every_field_of_run_json_is_named_when_it_is_missing_or_mistyped(run, how, tmp_path):
    info = json.loads((run / "run.json").read_text())
    cases = 0
    for place in places({key: value for key, value in info.items() if key != "fields"}):
        (tmp_path / "run.json").write_text(json.dumps(damaged(info, place, how)))
        with pytest.raises(BadInput) as caught:
            Run.load(tmp_path)
        line = str(caught.value)
        assert str(tmp_path / "run.json") in line
        # of a list that has lost an item, the list is named
        named = spelled(place[:-1] if how == "missing" and isinstance(place[-1], int) else place)
        assert f"field {named} is" in line
        cases += 1
    assert cases > 100


def test_every_column_is_named_when_it_is_dropped_or_of_another_type(run, tmp_path):
    whole = Run.load(run)
    shutil.copytree(run, tmp_path / "run")
    for name in whole.tables:
        file = tmp_path / "run" / f"{name}.parquet"
        arrow = pq.read_table(run / file.name)
        for at, column in enumerate(arrow.schema.names):
            for changed, words in (
                (arrow.drop_columns([column]), "is missing"),
                (arrow.set_column(at, column, pa.nulls(len(arrow), pa.date32())), "holds date32"),
            ):
                pq.write_table(changed.replace_schema_metadata(arrow.schema.metadata), file)
                with pytest.raises(BadInput, match=f"{file.name}: column {column} {words}"):
                    Run.load(tmp_path / "run").table(name)
        shutil.copyfile(run / file.name, file)


SLOWER = [pytest.param(how, marks=pytest.mark.slow) for how in ("truncated", "garbled")]


@pytest.mark.parametrize("how", ["emptied", "removed", *SLOWER])
def test_a_report_names_the_table_that_is_damaged(run, how, tmp_path):
    for name in Run.load(run).tables:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(run, tmp_path / "run")
        file = tmp_path / "run" / f"{name}.parquet"
        if how == "emptied":
            pq.write_table(pq.read_table(file).slice(0, 0), file)
        elif how == "truncated":
            os.truncate(file, file.stat().st_size // 2)
        elif how == "garbled":
            content = bytearray(file.read_bytes())
            content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
            file.write_bytes(content)
        else:
            file.unlink()
        try:
            page_content([Run.load(tmp_path / "run")])
        except BadInput as error:
            assert name in str(error)
            assert "\n" not in str(error)
        else:
            assert how == "removed" or not Run.load(run).info["rows"][name]


def test_a_report_of_a_damaged_run_leaves_nothing_behind(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(damaged(info, ("timings",), "mistyped")))
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(BadInput, match="field timings is not an object"):
        report(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
