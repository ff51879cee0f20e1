"""Figures of interventions: what they draw, claim and leave out."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from intervention.intervention_runs import projection_tables, single_tables, sweep_tables, top_k_tables
from moescope.intervention.figures import FIGURES

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


def test_an_expert_without_any_effect_is_pale_and_no_hole():
    tables = sweep_tables()
    effects = tables["intervention_experts"]
    effects.loc[9, ["loss_difference", "loss_difference_std"]] = 0.0
    assert SPECS["effect_map"].draw(tables).data[0]["z"][1, 1] == 0
