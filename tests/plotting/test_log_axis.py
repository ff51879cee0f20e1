"""Logarithmic axes: readable ticks."""

from __future__ import annotations

import pytest

from moescope.plotting.log_axis import log_axis


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([660, 850], ["700", "750", "800", "850"]),
        ([3.0, 3.0], ["2", "5"]),
        ([0.01, float("nan"), 0.5], ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1"]),
    ],
)
def test_a_logarithmic_axis_names_its_ticks(values, ticks):
    assert log_axis(values)["ticktext"] == ticks


def test_over_three_decades_only_powers_of_ten_are_named():
    assert log_axis([1e-6, 10.0])["ticktext"][-3:] == ["0.1", "1", "10"]


def test_there_is_no_logarithmic_axis_for_zeros():
    assert log_axis([0.0, 0.5]) is None
    assert log_axis([]) is None
