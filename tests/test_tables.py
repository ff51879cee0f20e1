"""The tables' schema.

Fixed by a copy kept apart, explained in full, and enforced when a frame is written or read.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moescope import tables
from moescope.comparison import tables as comparison
from moescope.compression import tables as compression
from moescope.errors import BadInput
from moescope.lab import tables as lab
from moescope.routing import tables as routing
from moescope.run import write_table
from moescope.tables import SCHEMA_VERSION, SHARED, Table, arrow_schema, conform, read_parquet
from moescope.weights import tables as weights

SUBJECTS = (weights, comparison, compression, routing, lab)
TABLES: dict[str, Table] = {name: table for subject in SUBJECTS for name, table in subject.TABLES.items()}
ORTHOGONALITY = TABLES["orthogonality"]
GOLDEN = tomllib.loads((Path(__file__).parent / "golden" / "tables.toml").read_text())
KINDS = {
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
    "floats": pa.list_(pa.float32()),
    "ints": pa.list_(pa.int32()),
}


def row(**changes: object) -> pd.DataFrame:
    keys = {"step": 0, "layer": 1, "layer_name": "model.layers.1.mlp", "matrix": "gate", "k": 1}
    return pd.DataFrame([{**keys, "mean": 0.5, "n_pairs_above_0_3": 2, **changes}])


# --- schema


def test_the_tables_are_those_of_the_golden_copy_each_in_one_subject():
    assert set(TABLES) == set(GOLDEN)
    assert sum(len(subject.TABLES) for subject in SUBJECTS) == len(TABLES)


@pytest.mark.parametrize("name", GOLDEN)
def test_keys_and_values_equal_the_golden_copy(name):
    assert list(TABLES[name].keys) == GOLDEN[name]["keys"]
    assert list(TABLES[name].values) == GOLDEN[name]["values"]


@pytest.mark.parametrize("name", GOLDEN)
def test_layer_name_follows_layer_and_is_no_key(name):
    columns = list(TABLES[name].columns)
    of_layers = "layer" in GOLDEN[name]["keys"] + GOLDEN[name]["values"]
    assert ("layer_name" in columns) == ("layer" in columns) == of_layers
    assert "layer" not in columns or columns[columns.index("layer") + 1] == "layer_name"
    assert [column for column in columns if column != "layer_name"] == GOLDEN[name]["keys"] + GOLDEN[name][
        "values"
    ]
    assert "layer_name" not in TABLES[name].keys


@pytest.mark.parametrize("name", GOLDEN)
def test_the_arrow_schema_has_the_columns_kinds_and_forbids_null_keys(name):
    schema = arrow_schema(TABLES[name])
    assert schema.names == list(TABLES[name].columns)
    for field in schema:
        assert field.type == KINDS[TABLES[name].column(field.name).kind]
        a_key = field.name in TABLES[name].keys and (name, field.name) not in {
            ("alerts", "expert"),
            ("damage", "layer"),
        }
        assert field.nullable == (not a_key)
    assert schema.metadata == {
        b"moescope.schema_version": str(SCHEMA_VERSION).encode(),
        b"moescope.table": name.encode(),
        b"moescope.columns": ",".join(schema.names).encode(),
    }


# --- glossary


def test_every_column_has_a_meaning_and_a_known_kind():
    for spec in TABLES.values():
        assert spec.meaning.endswith(".")
        for column in spec.columns:
            entry = spec.column(column)
            assert entry.kind in KINDS, f"{spec.name}.{column}"
            assert len(entry.meaning) > 10, f"{spec.name}.{column}"
            assert entry.meaning.endswith("."), f"{spec.name}.{column}"


def test_every_meaning_is_used():
    for subject in SUBJECTS:
        used = {table.key(column) for table in subject.TABLES.values() for column in table.columns}
        assert set(subject.COLUMNS) <= used, subject.__name__
    everywhere = {table.key(column) for table in TABLES.values() for column in table.columns}
    assert set(SHARED) <= everywhere


def test_a_table_s_own_entry_outweighs_the_common_one():
    assert TABLES["spectra"].column("rank") is weights.COLUMNS["spectra.rank"]
    assert TABLES["ambiguity"].column("rank") is weights.COLUMNS["rank"]
    assert TABLES["spectra"].column("layer") is SHARED["layer"]


# --- writing


def test_columns_come_out_in_the_schema_s_order_whatever_the_frame_s():
    frame = row()[["n_pairs_above_0_3", "mean", "k", "matrix", "layer_name", "layer", "step"]]
    assert conform(ORTHOGONALITY, frame).column_names == list(ORTHOGONALITY.columns)


def test_a_column_that_is_absent_is_null_never_zero():
    arrow = conform(ORTHOGONALITY, row())
    assert arrow["mean"].to_pylist() == [0.5]
    for column in ("mean_abs", "max", "chance", "n_pairs_above_0_7"):
        assert arrow[column].to_pylist() == [None]


@pytest.mark.parametrize("absent", [np.nan, None, pd.NA])
def test_a_value_that_is_absent_is_null_on_disk_and_back(tmp_path, absent):
    rows = [row(), row(k=2, mean=absent, n_pairs_above_0_3=absent)]
    frame = pd.DataFrame([part.to_dict("records")[0] for part in rows])
    write_table(ORTHOGONALITY, frame, tmp_path / "orthogonality.parquet")
    arrow = pq.read_table(tmp_path / "orthogonality.parquet")
    assert arrow["mean"].to_pylist() == [0.5, None]
    assert arrow["n_pairs_above_0_3"].to_pylist() == [2, None]
    back = read_parquet(str(tmp_path / "orthogonality.parquet"))
    assert back["mean"].isna().tolist() == [False, True]


def test_an_unknown_column_is_refused_by_name():
    with pytest.raises(ValueError, match="table orthogonality has no column surprise; known: step, layer"):
        conform(ORTHOGONALITY, row(surprise=1))


@pytest.mark.parametrize("key", ORTHOGONALITY.keys)
def test_a_null_key_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"key {key} may not be null"):
        conform(ORTHOGONALITY, row(**{key: None}))


@pytest.mark.parametrize("key", ORTHOGONALITY.keys)
def test_a_missing_key_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"key {key} may not be null"):
        conform(ORTHOGONALITY, row().drop(columns=key))


def test_an_alert_about_a_layer_has_no_expert_and_is_still_told_from_its_like():
    alert = {"step": 3, "layer": 1, "expert": None, "kind": "unused", "value": 0.5}
    assert conform(TABLES["alerts"], pd.DataFrame([alert, {**alert, "kind": "nan"}]))[
        "expert"
    ].to_pylist() == [
        None,
        None,
    ]
    with pytest.raises(ValueError, match="rows with equal keys step, layer, expert, kind"):
        conform(TABLES["alerts"], pd.DataFrame([alert, alert]))


def test_rows_with_equal_keys_are_refused():
    with pytest.raises(ValueError, match="rows with equal keys step, layer, matrix, k"):
        conform(ORTHOGONALITY, pd.concat([row(), row(mean=0.7, layer_name="another")]))
    assert conform(ORTHOGONALITY, pd.concat([row(), row(k=2)])).num_rows == 2


def test_a_number_of_the_wrong_kind_is_refused():
    with pytest.raises(pa.ArrowInvalid):
        conform(ORTHOGONALITY, row(k=1.5))
    with pytest.raises(pa.ArrowException):
        conform(ORTHOGONALITY, row(mean="much"))


def test_lists_of_singular_values_survive_the_round_trip(tmp_path):
    values = np.array([3.0, 2.0, 0.5], dtype=np.float32)
    frame = pd.DataFrame(
        [
            {
                "step": 0,
                "layer": 0,
                "matrix": "up",
                "expert": 2,
                "singular_values": values,
                "rank": 3,
                "fallback": False,
            }
        ]
    )
    write_table(TABLES["spectra"], frame, tmp_path / "spectra.parquet")
    back = read_parquet(str(tmp_path / "spectra.parquet"))
    assert back["singular_values"][0].tolist() == [3.0, 2.0, 0.5]
    assert bool(back["fallback"][0]) is False


# --- reading


def test_another_schema_version_is_refused_with_both_numbers(tmp_path, monkeypatch):
    path = tmp_path / "orthogonality.parquet"
    monkeypatch.setattr(tables, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    write_table(ORTHOGONALITY, row(), path)
    monkeypatch.undo()
    with pytest.raises(
        BadInput,
        match=f"schema version {SCHEMA_VERSION + 1}, this moescope uses {SCHEMA_VERSION}",
    ):
        read_parquet(str(path))


def test_a_parquet_file_of_someone_else_s_is_refused(tmp_path):
    path = tmp_path / "orthogonality.parquet"
    pq.write_table(pa.table({"step": [0]}), path)
    with pytest.raises(BadInput, match="schema version none"):
        read_parquet(str(path))


def test_a_damaged_parquet_file_is_refused_by_name(tmp_path):
    path = tmp_path / "orthogonality.parquet"
    write_table(ORTHOGONALITY, row(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"orthogonality\.parquet: damaged"):
        read_parquet(str(path))
