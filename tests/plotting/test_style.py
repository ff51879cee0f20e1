"""The house style: scales name whole layers, and sizes are said as people say them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from moescope.plotting.style import (
    SEQUENTIAL,
    byte_size,
    layer_colorbar,
    layer_colors,
)


@pytest.mark.parametrize("layers", [range(2), range(11), range(3, 48), [5]])
def test_a_colour_bar_names_whole_layers_at_even_steps_from_the_first(layers):
    marker = layer_colorbar(list(layers))["marker"]
    named = marker["colorbar"]["tickvals"]
    assert set(named) <= set(layers)
    assert named[0] == min(layers)
    assert len({after - before for before, after in pairwise(named)}) <= 1
    assert min(len(layers), 5) <= len(named) <= 8
    assert marker["cmin"] < named[0]  # so that the last name is clear of the title
    assert marker["cmax"] > named[-1]


def test_a_colour_bar_has_every_end_layer_in_its_own_colour():
    marker, colors = layer_colorbar(range(12))["marker"], layer_colors(range(12))
    places = {color: place for place, color in marker["colorscale"][1:-1]}
    for layer in (0, 11):
        assert places[colors[layer]] == pytest.approx(
            (layer - marker["cmin"]) / (marker["cmax"] - marker["cmin"])
        )
    assert [marker["colorscale"][0][1], marker["colorscale"][-1][1]] == [SEQUENTIAL[0], SEQUENTIAL[-1]]


@pytest.mark.parametrize("count", [math.inf, -math.inf, math.nan])
def test_a_size_that_is_no_number_is_undefined(count: float):
    assert byte_size(count) == "undefined"
