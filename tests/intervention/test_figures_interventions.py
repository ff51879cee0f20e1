"""Figures of interventions: what they draw, claim and leave out."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from intervention.intervention_runs import projection_tables, single_tables, sweep_tables, top_k_tables
from moescope.intervention.estimates import MOST_CHANGES
from moescope.intervention.figures import FIGURES
from moescope.intervention.tables import ALL

SPECS = {spec.name: spec for spec in FIGURES}
OF_SWEEP = ["effect_map", "effect_by_domain", "effect_predictors", "effect_against"]


def drawn(tables: dict[str, pd.DataFrame]) -> list[str]:
    return [spec.name for spec in FIGURES if spec.can_draw(tables)]


def test_every_kind_of_run_draws_its_own_figures_and_no_others():
    assert drawn(sweep_tables()) == OF_SWEEP
    assert drawn(projection_tables()) == ["projection_curve"]
    assert drawn(top_k_tables()) == ["effect_by_domain", "top_k_curve"]
    assert drawn(single_tables()) == ["effects_compared"]
    assert drawn(single_tables(3, layer=[0, 1, np.nan])) == ["effects_compared"]
    assert drawn(single_tables(3, layer=[0, 1, 2])) == ["effects_by_layer"]


def test_titles_and_captions_are_short_axes_are_named_and_lines_are_few():
    runs = (sweep_tables(), projection_tables(layers=2), projection_tables(beyond=0), top_k_tables())
    for tables in (*runs, single_tables(5), single_tables(5, layer=np.arange(5))):
        for figure in (SPECS[name].draw(tables) for name in drawn(tables)):
            assert len(figure.title.split()) <= 8, figure.title
            for caption in (figure.caption, *(figure.slider.captions if figure.slider else ())):
                words = re.sub(
                    r"layer \d+, expert \d+", "place", re.sub(" < | = | × 10", "", caption)
                ).split()
                assert len(words) <= 25, caption
            assert all(figure.layout[axis]["title"]["text"] for axis in ("xaxis", "yaxis")), figure.name
            assert (figure.slider.per_value if figure.slider else len(figure.data)) <= 12
            figure.to_plotly()


def test_the_map_has_every_effect_at_its_place_and_rings_the_planted_expert():
    tables = sweep_tables()
    figure = SPECS["effect_map"].draw(tables)
    effects, rings = figure.data[:2]
    rows = tables["intervention_experts"].set_index(["layer", "expert"])
    assert effects["customdata"][2, 3] == pytest.approx(rows.loc[(2, 3), "loss_difference"])
    assert (rings["x"], rings["y"]) == (["5"], ["1"])
    assert figure.slider.values == ["loss difference", "excess"]
    excess = figure.data[figure.slider.per_value]
    assert excess["customdata"][1, 5] == pytest.approx(rows.loc[(1, 5), "excess"])
    assert excess["z"][1, 5] == excess["z"].max()


def test_an_expert_without_any_effect_is_pale_and_no_hole():
    tables = sweep_tables()
    effects = tables["intervention_experts"]
    effects.loc[9, ["loss_difference", "loss_difference_std"]] = 0.0
    assert SPECS["effect_map"].draw(tables).data[0]["z"][1, 1] == 0


def test_domains_are_columns_and_the_planted_expert_is_ringed_in_its_own():
    figure = SPECS["effect_by_domain"].draw(sweep_tables())
    trace, rings = figure.data[:2]
    assert trace["x"] == ["code", "prose", "records"]
    assert len(trace["y"]) == MOST_CHANGES
    assert (rings["x"], rings["y"]) == (["code"], ["L1 E5"])


def test_a_projection_stands_beside_the_mean_and_range_of_its_controls():
    tables = projection_tables()
    assert SPECS["projection_curve"].draw(projection_tables(layers=3)).slider.values == ["0", "1", "2"]
    figure = SPECS["projection_curve"].draw(tables)
    lines = {trace["name"]: trace for trace in figure.data if trace["name"]}
    assert list(lines) == [
        "own expert's directions",
        "random direction, equal change",
        "random subspace, equal rank",
        "no effect",
    ]
    rows = tables["interventions"]
    draws = rows[(rows["role"] == "random subspace") & (rows["k"] == 4)]["loss_difference"]
    assert lines["random subspace, equal rank"]["y"][1] == pytest.approx(np.mean(draws))
    band = figure.data[[trace["name"] for trace in figure.data].index("random subspace, equal rank") - 1]
    assert sorted(np.asarray(band["y"])[np.asarray(band["x"]) == 4]) == pytest.approx(
        [draws.min(), draws.max()]
    )
    own = rows[rows["role"] == "change"].sort_values("k")
    assert lines["own expert's directions"]["y"] == pytest.approx(own["loss_difference"])


def test_the_curve_over_experts_per_token_has_one_line_per_domain():
    tables = top_k_tables()
    figure = SPECS["top_k_curve"].draw(tables)
    page = figure.data[: figure.slider.per_value]
    lines = {trace["name"]: trace for trace in page if trace["name"]}
    assert set(lines) == {"all documents", "code", "prose", "no effect"}
    rows = tables["interventions"]
    expected = rows[rows["domain"] == ALL].sort_values("k")["loss_difference"]
    assert lines["all documents"]["y"] == pytest.approx(expected.to_numpy())


def test_one_change_in_every_layer_is_a_line_and_single_changes_are_dots():
    tables = single_tables(5, layer=np.arange(5))
    line = SPECS["effects_by_layer"].draw(tables)
    values = next(trace for trace in line.data if trace["name"] == "loss difference")
    assert values["x"].tolist() == [0, 1, 2, 3, 4]
    figure = SPECS["effects_compared"].draw(single_tables(5))
    rows = single_tables(5)["interventions"].set_index("change")["loss_difference"]
    assert dict(zip(figure.data[0]["y"], figure.data[0]["x"], strict=True)) == pytest.approx(rows.to_dict())
    assert "error_x" in figure.data[0]
