"""Logarithmic axes: readable ticks, and whiskers that end inside."""

from __future__ import annotations

import numpy as np

from moescope.plotting.log_axis import cut_whiskers, cut_words, log_axis, log_colours, plain_log
from moescope.plotting.style import heatmap


def test_a_logarithmic_axis_names_its_ticks_and_does_not_exist_for_zeros():
    axis = plain_log([{"y": [0.01, 0.5]}])
    assert axis["ticktext"][:4] == ["0.005", "0.01", "0.02", "0.05"]
    assert plain_log([{"y": [0.0, 0.5]}]) is None
    assert plain_log([{"y": [1e-6, 10.0]}])["ticktext"][-1] == "10"
    assert plain_log([{"y": [660, 850]}])["ticktext"] == ["700", "750", "800", "850"]
    assert plain_log([{"y": [3.0, 3.0]}])["ticktext"] == ["2", "5"]


def test_colours_of_a_logarithmic_map_are_evenly_spaced_over_tenfold_steps():
    values = np.array([[0.01, 0.1], [1.0, np.nan]])
    plain = heatmap(values, ["1", "2"], ["0", "1"], low=0.01, high=1.0, label="spread")
    drawn = log_colours(plain)
    colour = (drawn["z"] - drawn["zmin"]) / (drawn["zmax"] - drawn["zmin"])
    np.testing.assert_allclose(colour, [[0, 0.5], [1, np.nan]], atol=1e-12)
    named = dict(zip(drawn["colorbar"]["ticktext"], drawn["colorbar"]["tickvals"], strict=True))
    np.testing.assert_allclose([named["0.01"], named["0.1"], named["1"]], drawn["z"].ravel()[:3])
    np.testing.assert_array_equal(drawn["customdata"], values)
    assert log_colours({**plain, "z": values - 0.01})["zmin"] == 0.01


def whiskered(y: list[float], low: list[float], high: list[float]) -> dict[str, object]:
    return {"y": y, "error_y": {"arrayminus": np.subtract(y, low), "array": np.subtract(high, y)}}


def test_the_axis_reaches_as_far_as_the_whiskers():
    assert plain_log([whiskered([0.5, 0.5], [0.011, 0.4], [0.6, 40.0])])["ticktext"][0] == "0.01"  # type: ignore[index]
    assert plain_log([whiskered([0.5], [0.0], [0.6])]) is None
    assert log_axis([0.01, 0.5]) == plain_log([{"y": [0.01, 0.5]}])


def test_an_error_bar_that_no_logarithmic_axis_can_show_is_cut_and_the_caption_says_so():
    other = {"y": [0.3]}
    made, bottom = cut_whiskers([whiskered([0.6, 0.6, 0.9], [-0.2, 1e-9, 0.5], [0.7, 0.8, 1.0]), other])
    assert bottom == 0.3 / 3
    ends = np.asarray(made[0]["y"]) - made[0]["error_y"]["arrayminus"]
    np.testing.assert_allclose(ends, [0.1, 0.1, 0.5])
    assert made[1] is other
    assert plain_log(made)["ticktext"][0] == "0.05"  # type: ignore[index]
    assert "0.1" in cut_words(bottom)


def test_an_estimate_of_zero_stands_where_a_logarithmic_axis_ends():
    estimate = {**whiskered([0.0, 0.4], [0.0, 0.2], [0.5, 0.6]), "mode": "markers"}
    made, bottom = cut_whiskers([estimate, {"y": [0.3]}])
    np.testing.assert_allclose(made[0]["y"], [0.1, 0.4])
    ends = [made[0]["y"] - made[0]["error_y"]["arrayminus"], made[0]["y"] + made[0]["error_y"]["array"]]
    np.testing.assert_allclose(ends, [[0.1, 0.2], [0.5, 0.6]])
    assert bottom == 0.3 / 3


def test_whiskers_that_fit_stay_as_they_are():
    whole = whiskered([0.6, np.nan], [0.4, np.nan], [0.7, np.nan])
    made, bottom = cut_whiskers([whole])
    assert bottom is None
    assert cut_words(bottom) == ""
    np.testing.assert_array_equal(made[0]["error_y"]["arrayminus"], whole["error_y"]["arrayminus"])  # type: ignore[index]
