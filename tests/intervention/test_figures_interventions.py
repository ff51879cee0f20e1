"""Figures of interventions: what they draw, claim and leave out."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from intervention.intervention_runs import frames, projection_tables, sweep_tables, top_k_tables
from moescope.intervention.estimates import summarise
from moescope.intervention.figures import FIGURES, MOST_CHANGES
from moescope.intervention.tables import ALL

SPECS = {spec.name: spec for spec in FIGURES}


def drawn(tables: dict[str, pd.DataFrame]) -> list[str]:
    return [spec.name for spec in FIGURES if spec.can_draw(tables)]


def single_tables(changes: int = 1, **plan) -> dict[str, pd.DataFrame]:
    generator, tokens = np.random.default_rng(1), np.full(12, 50.0)
    difference = tokens * (0.1 + 0.02 * generator.standard_normal((changes, 12)))
    plan = {
        "name": "uniform_router",
        "change": [f"layer={at} uniform_router" for at in range(changes)],
        **plan,
    }
    return {"interventions": summarise(*frames(difference, tokens, plan))}


def test_every_kind_of_run_draws_its_own_figures_and_no_others():
    assert drawn(sweep_tables()) == ["effect_map", "effect_by_domain"]
    assert drawn(projection_tables()) == ["projection_curve"]
    assert drawn(top_k_tables()) == ["effect_by_domain", "top_k_curve"]
    assert drawn(single_tables()) == ["effects_compared"]


@pytest.mark.parametrize(
    "tables",
    [
        sweep_tables(),
        projection_tables(layers=2),
        projection_tables(beyond=0),
        top_k_tables(),
        single_tables(5),
    ],
    ids=["sweep", "k", "no effect", "top_k", "changes"],
)
def test_titles_and_captions_are_short_axes_are_named_and_lines_are_few(tables):
    for name in drawn(tables):
        figure = SPECS[name].draw(tables)
        assert len(figure.title.split()) <= 8, figure.title
        for caption in (figure.caption, *(figure.slider.captions if figure.slider else ())):
            assert len(re.sub(" < | = ", "", caption).split()) <= 25, caption
        assert all(figure.layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
        assert figure.columns
        shown = figure.slider.per_value if figure.slider else len(figure.data)
        assert shown <= 12
        figure.to_plotly()


def test_the_map_has_every_effect_at_its_place_and_circles_the_planted_expert():
    tables = sweep_tables()
    figure = SPECS["effect_map"].draw(tables)
    effects, circles = figure.data[:2]
    rows = tables["intervention_experts"].set_index(["layer", "expert"])
    assert effects["z"][2, 3] == pytest.approx(rows.loc[(2, 3), "loss_difference"])
    assert (circles["x"], circles["y"]) == (["5"], ["1"])
    assert "1 of 24 experts" in figure.caption
    assert "layer 1, expert 5" in figure.caption
    assert figure.data[2]["z"][1, 5] == pytest.approx(rows.loc[(1, 5), "excess"])


def test_domains_are_columns_and_the_planted_expert_comes_first():
    figure = SPECS["effect_by_domain"].draw(sweep_tables())
    trace, circles = figure.data
    assert trace["x"] == ["code", "prose", "records"]
    assert trace["y"][0] == "L1 E5"
    assert len(trace["y"]) == MOST_CHANGES
    assert (circles["x"], circles["y"]) == (["code"], ["L1 E5"])


def test_a_projection_is_claimed_only_beyond_both_controls():
    beyond, within = (
        SPECS["projection_curve"].draw(projection_tables(beyond=beyond)) for beyond in (0.2, 0.0)
    )
    assert beyond.caption.startswith("More than both random controls at 3 ks of 3")
    assert within.caption.startswith("At no k more than both")
    names = [trace["name"] for trace in beyond.data if "name" in trace]
    assert names[-2:] == ["own expert's directions", "no effect"]
    assert len(names) == 4


def test_bands_reach_from_the_least_to_the_largest_draw():
    tables = projection_tables()
    figure = SPECS["projection_curve"].draw(tables)
    rows = tables["interventions"]
    draws = rows[(rows["role"] == "random subspace") & (rows["k"] == 4)]["loss_difference"]
    area = figure.data[0]
    at = np.asarray(area["x"]) == 4
    assert sorted(np.asarray(area["y"])[at]) == pytest.approx([draws.min(), draws.max()])


def test_layers_of_a_projection_are_slid_through():
    figure = SPECS["projection_curve"].draw(projection_tables(layers=3))
    assert figure.slider.values == ["0", "1", "2"]
    assert len(figure.data) == 3 * figure.slider.per_value


def test_the_curve_over_experts_per_token_has_one_line_per_domain():
    tables = top_k_tables()
    figure = SPECS["top_k_curve"].draw(tables)
    assert [trace["name"] for trace in figure.data] == ["all documents", "code", "prose", "as configured"]
    rows = tables["interventions"]
    expected = rows[rows["domain"] == ALL].sort_values("k")["loss_difference"]
    assert figure.data[0]["y"] == pytest.approx(expected.to_numpy())
    assert "Least loss with 3 experts per token" in figure.caption


def test_changes_of_single_layers_are_drawn_by_layer():
    figure = SPECS["effects_compared"].draw(single_tables(5, layer=np.arange(5)))
    assert figure.title == "Loss difference per layer"
    assert figure.data[0]["x"] == [0, 1, 2, 3, 4]
    assert "error_y" in figure.data[0]
