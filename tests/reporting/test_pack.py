"""What is packed comes back, to the precision promised."""

import base64
import json

import numpy as np
import pandas as pd
import pytest

from moescope.reporting.pack import plain, plain_table, script_json, table_payload, typed_array
from moescope.reporting.page import run_names
from moescope.routing.tables import TRACE_TABLES
from moescope.run import Run
from moescope.weights.tables import TABLES


def unpacked(packed):
    flat = np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])
    return flat.reshape([int(size) for size in packed["shape"].split(",")]) if "shape" in packed else flat


def test_a_matrix_comes_back_as_float32_with_what_is_missing():
    matrix = np.random.default_rng(0).normal(size=(40, 30))
    matrix[3, 4] = np.nan
    packed = typed_array(matrix)
    assert packed["dtype"] == "f4"
    np.testing.assert_allclose(unpacked(packed), matrix, rtol=1e-7)


def test_long_lines_and_whole_numbers_come_back():
    line = np.geomspace(1e-9, 1e3, 100)
    np.testing.assert_allclose(unpacked(typed_array(line)), line, rtol=1e-7)
    np.testing.assert_array_equal(unpacked(typed_array(np.arange(1000))), np.arange(1000))


def test_small_arrays_and_missing_values_are_written_out():
    assert typed_array(np.array([1.23456789, np.nan])) == [1.23457, None]
    values = [np.int64(3), np.float64("inf"), pd.NA, np.True_, None, "x"]
    assert plain(values) == [3, None, None, True, None, "x"]


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--", "\u2028"])
def test_no_text_can_end_the_script_element_it_stands_in(text):
    written = script_json({"name": text})
    assert "<" not in written
    assert "\u2028" not in written
    assert json.loads(written) == {"name": text}


def test_a_table_keeps_its_columns_names_and_nulls():
    frame = pd.DataFrame({"k": [1, 2], "cos_squared": [0.5, np.nan]})
    payload = table_payload(TABLES["alignment"], frame, ["k", "cos_squared"], "title")
    assert [column["name"] for column in payload["columns"]] == ["k", "cos_squared"]
    assert payload["rows"] == [[1, 0.5], [2, None]]


def test_a_table_made_by_hand_has_heads_and_plain_rows():
    heads = [("layer", "layer", "int"), ("cv", "CV", "float")]
    payload = plain_table("glance", "At a glance", heads, [[0, 0.5]])
    assert payload["columns"][1] == {"name": "cv", "title": "CV", "kind": "float"}
    assert payload["rows"] == [[0, 0.5]]


def test_many_numbers_are_rounded_as_each_alone_is_written():
    generator = np.random.default_rng(0)
    values = generator.standard_normal(20_000) * 10.0 ** generator.integers(-30, 30, 20_000)
    values = [*values.tolist(), 0.0, -0.0, 0.1, 999999.5, 123456.5, 1e-300, 5e-324, 1e300]
    assert plain(values) == [float(f"{value:.6g}") for value in values]
    assert plain([*values, float("nan"), float("inf")])[-2:] == [None, None]


def test_names_of_metrics_are_shown_in_words_and_saved_as_they_are():
    frame = pd.DataFrame({"metric": ["gate_weight_cv", "load_entropy_share"], "value": [0.5, 0.9]})
    table = table_payload(TRACE_TABLES["routing_layers"], frame, ["metric", "value"], "Every metric")
    assert [row[0] for row in table["rows"]] == ["gate_weight_cv", "load_entropy_share"]
    words = table["columns"][0]["terms"]
    assert words["gate_weight_cv"] == "CV of gate weight"
    assert not [name for name in words.values() if "_" in name]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (("studies/main/run", "studies/ablation/run"), ["main", "ablation"]),
        (("x/a/run", "y/a/run"), ["x/a", "y/a"]),
        (("x/run", "y/run", "scan"), ["x/run", "y/run", "scan"]),
        (("x/scan",), ["scan"]),
    ],
)
def test_runs_are_named_by_what_tells_them_apart(tmp_path, folders, names):
    runs = [Run(tmp_path / folder, {}) for folder in folders]
    assert list(run_names(runs).values()) == names
