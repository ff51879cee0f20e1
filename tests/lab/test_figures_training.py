"""Figures of a training.

Validated by plotly, captions and references from the tables' numbers.
"""

from __future__ import annotations

import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from lab.tiny_training import tiny_config, tiny_training, trained
from moescope.lab.figures_training import (
    expert_usage_histogram,
    gain_by_domain,
    gradient_by_step,
    key_map,
    loss_by_step,
    speed_by_step,
)
from moescope.plotting.style import GREY
from moescope.routing.figures_steps import router_gradient_by_step
from moescope.routing.report_monitor import diagnostic_sections
from moescope.verb import Figure, Tables


@pytest.fixture
def tables() -> Tables:
    steps = pd.DataFrame(
        {
            "step": [0, 10, 20],
            "lm_loss": [None, 4.0, 3.0],
            "validation_loss_published": [None, None, None],
            "gradient_norm": [None, 2.0, 0.5],
            "gradient_clip": [None, 1.0, 1.0],
            "tokens_per_second": [None, 100.0, 300.0],
            "peak_memory_bytes": [None, 1e9, 2e9],
        }
    ).astype(float)
    evaluations = pd.DataFrame(
        {
            "step": [0, 20] * 3,
            "domain": [""] * 2 + ["code"] * 2 + ["prose"] * 2,
            "loss": [5.5, 2.5, 5.5, 2.0, 5.5, 3.6],
            "unigram_loss": [3.5, 3.5, 3.0, 3.0, 3.4, 3.4],
            "uniform_loss": 5.6,
        }
    )
    gradients = pd.DataFrame(
        {
            "step": [10, 10, 20, 20],
            "layer": [0, 1, 0, 1],
            "lm_gradient_norm": [0.1, 0.2, 0.3, 0.05],
            "aux_gradient_norm": [0.01, 0.03, 0.02, 0.04],
        }
    )
    return {"steps": steps, "evaluations": evaluations, "router_gradients": gradients}


def checked(figure: Figure) -> Figure:
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    return figure


def grey(figure: Figure) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["y"]) for trace in figure.data if trace["line"]["color"] == GREY}


def test_losses_are_drawn_with_their_baselines(tables: Tables):
    figure = checked(loss_by_step(tables))
    assert grey(figure) == {"uniform baseline": [5.6, 5.6], "unigram baseline": [3.5, 3.5]}
    assert all(value in figure.caption for value in ("5.5", "2.5", "3.5", "5.6"))
    assert len(figure.data) == 4


def test_the_published_loss_is_drawn_where_there_is_one_and_called_by_its_name(tables: Tables):
    tables["steps"].loc[2, "validation_loss_published"] = 1.1
    figure = checked(loss_by_step(tables))
    assert list(figure.data[-1]["y"]) == [1.1]


def test_domains_are_compared_by_their_gain_over_the_unigram_baseline(tables: Tables):
    figure = checked(gain_by_domain(tables))
    assert list(figure.data[0]["y"]) == [-2.5, 1.0]
    assert "Code gains most: 1 nats per token; prose least: −0.2" in figure.caption
    assert grey(figure) == {"unigram baseline": [0, 0]}


def test_a_loss_above_the_unigram_baseline_is_a_negative_gain(tables: Tables):
    tables["evaluations"]["unigram_loss"] = 1.5
    assert "Code gains most: −0.5 nats per token; prose least: −2.1" in gain_by_domain(tables).caption
    alone = tables["evaluations"][lambda rows: rows["domain"] == "code"]
    assert "least" not in gain_by_domain({**tables, "evaluations": alone}).caption


def test_the_smallest_router_gradient_is_named_with_the_auxiliary_losss(tables: Tables):
    figure = checked(router_gradient_by_step(tables))
    assert "layer 1, 0.05; auxiliary loss 0.03" in figure.caption


def test_a_router_without_gradient_is_drawn_on_a_plain_axis(tables: Tables):
    tables["router_gradients"]["lm_gradient_norm"] = 0.0
    assert "type" not in checked(router_gradient_by_step(tables)).layout["yaxis"]


def test_gradient_and_speed_have_their_references(tables: Tables):
    assert "50 % of the points exceed the limit 1" in checked(gradient_by_step(tables)).caption
    speed = checked(speed_by_step(tables))
    assert grey(speed) == {"median": [200.0, 200.0]}
    assert "200 tokens per second" in speed.caption
    assert "2 GB" in speed.caption


KEY_TABLES = {
    "key_histogram": pd.DataFrame(
        {
            "bin_left": [0, 1, 10],
            "bin_right": [1, 10, 100],
            "experts": [1, 5, 2],
            "expected_experts": [0.0, 1.5, 6.5],
        }
    ),
    "key_map": pd.DataFrame(
        {"expert": [0, 1], "x": [0.0, 1.0], "y": [0.5, -0.5], "tokens": [3, 9], "strength": [1.0, 0.9]}
    ).assign(variance_share=0.8, variance_share_chance=0.3),
}


def test_usage_stands_beside_random_routing():
    figure = expert_usage_histogram(KEY_TABLES)
    checked(figure)
    assert "5 of 8 experts have 1 to 10 tokens" in figure.caption
    assert "random routing: mostly 10 to 100" in figure.caption
    assert list(figure.data[1]["y"]) == [0.0, 1.5, 6.5]


def test_the_map_says_what_random_keys_would_show():
    figure = key_map(KEY_TABLES)
    checked(figure)
    assert "80 % of the variance (random keys: 30 %)" in figure.caption


@pytest.mark.parametrize("router", ["dense", "hash"])
def test_a_model_without_a_learned_router_draws_every_figure_that_its_run_lists(router, tmp_path):
    run = trained(tiny_training(tiny_config(router, steps=8)), tmp_path, gradients_every=4)
    assert "router_gradients" in run.tables
    listed = run.figures()
    assert "loss_by_step" in listed
    assert "router_gradient_by_step" not in listed
    for name in listed:
        checked(run.draw(name))


def test_the_cosine_of_keys_has_the_same_figure_in_the_report_and_alone(tmp_path):
    run = trained(tiny_training(tiny_config("some", steps=8)), tmp_path)
    rows = run.table("routing_layers").set_index("metric")["chance_spread"]
    assert rows["key_cosine"].to_numpy() == pytest.approx((2 / (4 * 3 * 32)) ** 0.5)
    assert rows.drop("key_cosine").isna().all()
    (section,) = diagnostic_sections(run)
    reported = {spec.name: spec.draw(tables) for spec, tables in section.figures}
    figure = checked(run.draw("key_cosine_by_step"))
    assert "0 ± 0.0722 for random keys" in figure.caption
    assert reported["key_cosine_by_step"].caption == figure.caption
    assert len(reported["key_cosine_by_step"].data) == len(figure.data)
