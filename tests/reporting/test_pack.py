"""What is packed comes back, to the precision promised."""

import base64
import json

import numpy as np
import pandas as pd
import pytest

from moescope.reporting.pack import pack_array, plain, script_json, table_payload


def unpack_matrix(packed):
    levels = np.frombuffer(base64.b64decode(packed["u16"]), "<u2").reshape(packed["shape"]).astype(float)
    return np.where(
        levels == 65535, np.nan, packed["low"] + levels * (packed["high"] - packed["low"]) / 65534
    )


def test_a_matrix_comes_back_within_half_a_level():
    matrix = np.random.default_rng(0).normal(size=(40, 30))
    matrix[3, 4] = np.nan
    back = unpack_matrix(pack_array(matrix))
    assert np.isnan(back[3, 4])
    assert (
        np.nanmax(np.abs(back - matrix)) <= np.nanmax(np.ptp(matrix[~np.isnan(matrix)])) / 65534 / 2 * 1.001
    )


def test_a_constant_matrix_comes_back():
    np.testing.assert_array_equal(unpack_matrix(pack_array(np.full((10, 10), 0.25))), 0.25)


def test_a_long_line_comes_back_as_float32():
    line = np.geomspace(1e-9, 1e3, 100)
    back = np.frombuffer(base64.b64decode(pack_array(line)["f32"]), "<f4")
    np.testing.assert_allclose(back, line, rtol=1e-7)


def test_small_arrays_and_missing_values_are_written_out():
    assert pack_array(np.array([1.23456789, np.nan])) == [1.23457, None]
    assert plain([np.int64(3), np.float64("inf"), pd.NA, np.True_, None, "x"]) == [
        3,
        None,
        None,
        True,
        None,
        "x",
    ]


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "<!--", "\u2028"])
def test_no_text_can_end_the_script_element_it_stands_in(text):
    written = script_json({"name": text})
    assert "<" not in written
    assert "\u2028" not in written
    assert json.loads(written) == {"name": text}


def test_a_table_keeps_its_columns_names_and_nulls():
    frame = pd.DataFrame({"k": [1, 2], "cos_squared": [0.5, np.nan]})
    payload = table_payload("alignment", frame, ["k", "cos_squared"], "title")
    assert [column["name"] for column in payload["columns"]] == ["k", "cos_squared"]
    assert payload["rows"] == [[1, 0.5], [2, None]]
