"""Figures of trainings, studies and claims, drawn from planted tables and validated by plotly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from lab.study_runs import more_arms, router_arms, study_run
from lab.tiny_training import tiny_config, tiny_training, trained
from moescope.lab.figures import STUDY_FIGURES, TRAIN_FIGURES
from moescope.lab.report_study import study_tables
from moescope.lab.study_statistics import of_question
from moescope.plotting.style import GREY
from moescope.run import Run
from moescope.verb import Drawable, Figure, Tables


def drawn(name: str, tables: Tables, page: str = "") -> Figure:
    """Draw a figure by its name of now or before."""
    specs: list[Drawable] = [*STUDY_FIGURES, *TRAIN_FIGURES]
    spec = next(one for one in specs if name == one.name or name in one.was)
    figure = replace(spec, opens=page or spec.was.get(name, "")).draw(tables)
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    if figure.slider:
        first = figure.slider.start * figure.slider.per_value
        figure = replace(figure, data=figure.data[first : first + figure.slider.per_value])
    return figure


def named(figure: Figure, name: str) -> dict:
    (trace,) = [trace for trace in figure.data if trace.get("name") == name]
    return trace


def grey(figure: Figure) -> dict[str, list[float]]:
    lines = [trace for trace in figure.data if (trace.get("line") or {}).get("color") == GREY]
    return {trace["name"]: list(trace["y"]) for trace in lines}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Routers: loss_free planted better, hash and switch_top1 worse; ablations, a sweep, scaling."""
    return study_run(tmp_path_factory.mktemp("study") / "run", arms=[*router_arms(), *more_arms()])


@pytest.fixture(scope="module")
def main(whole: Run) -> Tables:
    tables = study_tables(whole)
    return {**of_question(tables, "main"), "overhead": tables["overhead"]}


# --- arms against the reference


def test_arms_are_called_by_their_verdict_and_the_best_is_on_top(main: Tables):
    figure = drawn("differences", main)
    assert named(figure, "better")["y"] == ["loss_free"]
    assert sorted(named(figure, "worse")["y"]) == ["hash", "switch_top1"]
    assert named(figure, "not distinguishable")["y"] == ["spectra"]
    assert figure.layout["yaxis"]["categoryarray"][-1] == "loss_free"
    assert len(named(figure, "single values")["x"]) == 4 * 5
    assert set(named(figure, "reference")["x"]) == {0.0}


def test_curves_have_a_line_per_arm_with_a_band_and_one_colour_on_every_page(main: Tables):
    figure = drawn("arms_validation_loss_by_step", main)
    means = main["study_means"].set_index(["arm", "step"])["validation_loss"]
    assert named(figure, "hash")["y"][-1] == pytest.approx(means["hash", 300])
    assert len([trace for trace in figure.data if trace.get("fill")]) == 5
    other = drawn("difference_by_step", main)
    for arm in ("hash", "loss_free", "spectra"):
        assert named(other, arm)["line"] == named(figure, arm)["line"]
    assert set(grey(other)["reference"]) == {0.0}
    cv = drawn("arms_load_cv_by_step", main)
    assert "balanced random routing" in grey(cv)


def test_many_arms_are_a_map(tmp_path: Path):
    names = ["top2", *(f"arm{index}" for index in range(15))]
    tables = of_question(study_tables(study_run(tmp_path / "run", arms=router_arms(names))), "main")
    assert drawn("arms_by_step", tables).data[0]["type"] == "heatmap"
    assert drawn("differences", tables).height > 500


def test_every_figure_of_a_study_is_drawn_with_few_words(whole: Run):
    tables = study_tables(whole)
    for question in ("main", "sweep"):
        part = {**of_question(tables, question), "overhead": tables["overhead"]}
        for spec in STUDY_FIGURES:
            if spec.can_draw(part):
                figure = drawn(spec.name, part)
                assert len(figure.title.split()) <= 8, figure.title
                assert len(figure.caption.split()) <= 25, figure.caption
    assert [spec.name for spec in STUDY_FIGURES if not spec.can_draw(part)] == []


def test_earlier_names_of_figures_answer(whole: Run):
    assert whole.draw("losses").name == "differences"
    assert whole.draw("arms_unused_share_by_step").slider.values[4] == "unused experts"
    assert whole.draw("load_by_value", question="sweep").slider.start == 1
    assert whole.draw("differences", question="ablation").name == "differences"


# --- trainings


@pytest.fixture
def tables() -> Tables:
    steps = pd.DataFrame(
        {
            "step": [0, 10, 20],
            "lm_loss": [None, 4.0, 3.0],
            "validation_loss": [5.5, None, 2.5],
            "validation_loss_published": [None, None, None],
            "unigram_loss": [3.5, None, 3.5],
            "uniform_loss": [5.6, None, 5.6],
            "gradient_norm": [None, 2.0, 0.5],
            "gradient_clip": [None, 1.0, 1.0],
            "tokens_per_second": [None, 100.0, 300.0],
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
    return {
        "steps": steps,
        "evaluations": evaluations.assign(gain=lambda rows: rows["unigram_loss"] - rows["loss"]),
    }


def test_a_base_is_drawn_against_the_untouched_model():
    rows = pd.DataFrame(
        {
            "model": ["untouched", "untouched", "trained", "trained"],
            "domain": ["", "code"] * 2,
            "difference": [0.0, 0.0, -0.5, -0.25],
            "difference_low": [None, None, -0.75, None],
            "difference_high": [None, None, -0.25, None],
        }
    )
    trace = named(drawn("base_losses", {"base_losses": rows}), "trained")
    assert (list(trace["x"]), trace["y"]) == ([-0.5, -0.25], ["all domains", "code"])
    assert trace["error_x"]["array"][0] == 0.25


@pytest.mark.parametrize("router", ["dense", "hash"])
def test_a_model_without_a_learned_router_draws_every_figure_that_its_run_lists(router, tmp_path):
    run = trained(tiny_training(tiny_config(router, steps=8)), tmp_path, gradients_every=4)
    assert "router_gradients" in run.tables
    listed = run.figures()
    assert "loss_by_step" in listed
    assert "router_gradient_by_step" not in listed
    for name in listed:
        figure = run.draw(name)
        PlotlyFigure({"data": figure.data, "layout": figure.layout})


def test_a_training_writes_gains_and_baselines(tmp_path):
    run = trained(tiny_training(tiny_config("top2", steps=8)), tmp_path)
    rows, steps = run.table("evaluations"), run.table("steps").dropna(subset="validation_loss")
    assert rows["gain"].isna().all() == rows["unigram_loss"].isna().all()
    np.testing.assert_allclose(
        rows["gain"].astype(float), (rows["unigram_loss"] - rows["loss"]).astype(float)
    )
    assert steps["uniform_loss"].to_numpy() == pytest.approx(np.log(260))


def test_the_cosine_of_keys_has_the_spread_of_random_keys(tmp_path):
    run = trained(tiny_training(tiny_config("some", steps=8)), tmp_path)
    rows = run.table("routing_layers").set_index("metric")["chance_spread"]
    assert rows["key_cosine"].to_numpy() == pytest.approx((2 / (4 * 3 * 32)) ** 0.5)
    assert rows.drop("key_cosine").isna().all()
