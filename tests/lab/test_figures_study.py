"""Figures of a study: drawn from planted studies, validated by plotly.

References, words and titles from their numbers.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure as PlotlyFigure

from lab.study_runs import more_arms, router_arms, study_run
from moescope.lab.figures_results import RESULT_FIGURES
from moescope.lab.figures_study import (
    ARM_FIGURES,
    OVERALL,
    by_domain,
    detectable_text,
    difference_by_domain,
    differences,
    load_by_value,
    loss_by_value,
    losses,
    noise_and_spread,
    overhead_shares,
    paired,
)
from moescope.lab.figures_study_curves import CURVE_FIGURES, STUDY_FIGURES, curves, difference_by_step
from moescope.lab.report_study import axis_frames, of_question, study_tables
from moescope.lab.tables import COLUMNS
from moescope.plotting.style import GREY
from moescope.verb import Figure, Tables


def checked(figure: Figure) -> Figure:
    PlotlyFigure({"data": figure.data, "layout": figure.layout})
    return figure


def grey(figure: Figure) -> dict[str, dict]:
    return {
        trace["name"]: trace
        for trace in figure.data
        if "name" in trace and (trace.get("line") or {}).get("color") == GREY
    }


def named(figure: Figure, name: str) -> dict:
    (trace,) = [trace for trace in figure.data if trace.get("name") == name]
    return trace


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    """Five routers under five seeds; loss_free planted better, hash and switch_top1 worse, spectra alike."""
    return of_question(study_tables(study_run(tmp_path_factory.mktemp("study") / "run")), "main")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    return study_run(tmp_path_factory.mktemp("study") / "run", arms=[*router_arms(), *more_arms()])


# --- arms against the reference


def test_the_reference_is_the_grey_line_at_zero_and_arms_are_called_by_their_verdict(main: Tables):
    figure = checked(differences(main))
    assert grey(figure)["top2 (reference)"]["x"] == [0.0] * 4
    assert named(figure, "better")["y"] == ["loss_free"]
    assert named(figure, "worse")["y"] == ["hash", "switch_top1"]
    assert named(figure, "not distinguishable")["y"] == ["spectra"]
    assert "*" not in str(figure.data)
    assert "better: loss_free; worse: hash and switch_top1; not distinguishable: spectra" in figure.caption


def test_each_arm_that_cannot_be_told_has_a_difference_of_its_own_that_would_have_been_seen():
    arms = pd.DataFrame({"arm": ["topk", "spectra"], "detectable_difference": [0.0187, 0.275]})
    assert detectable_text(arms).endswith("0.0187 to 0.275 nats")
    assert detectable_text(arms.head(1)).endswith(": 0.0187 nats")
    assert detectable_text(arms.assign(detectable_difference=math.nan)) == ""


def test_an_arm_has_one_colour_in_every_figure_even_where_others_have_no_number(main: Tables):
    first = main["study_comparisons"].set_index("arm")["mean"].idxmin()
    rows = main["study_curves"]
    lacking = {**main, "study_curves": rows.assign(load_cv=rows["load_cv"].where(rows["arm"] != first))}
    found = [
        {trace["name"]: trace["line"]["color"] for trace in figure.data if trace.get("showlegend", True)}
        for figure in (curves(main, "validation_loss"), curves(lacking, "load_cv"), difference_by_step(main))
    ]
    assert first not in found[1]
    for others in found[1:]:
        shared = [arm for arm in others if arm in found[0]]
        assert len(shared) >= 3
        assert {arm: others[arm] for arm in shared} == {arm: found[0][arm] for arm in shared}


def test_one_arm_alone_has_a_line_to_stand_beside(tmp_path: Path):
    tables = of_question(
        study_tables(study_run(tmp_path / "run", arms=router_arms(["top2", "hash"]))), "main"
    )
    figure = checked(differences(tables))
    (shape,) = figure.layout["shapes"]
    assert (shape["x0"], shape["x1"], shape["y0"], shape["y1"], shape["yref"]) == (0, 0, 0, 1, "paper")
    assert named(figure, "worse")["y"] == ["hash"]


def test_intervals_are_those_of_the_table(main: Tables):
    row = main["study_comparisons"].set_index("arm").loc["loss_free"]
    bar = named(differences(main), "better")
    assert bar["x"][0] - bar["error_x"]["arrayminus"][0] == pytest.approx(row["difference_low"])
    assert bar["x"][0] + bar["error_x"]["array"][0] == pytest.approx(row["difference_high"])


def test_dots_are_differences_within_seeds(main: Tables):
    runs = main["study_runs"].set_index(["arm", "seed"])["validation_loss"]
    dots = named(differences(main), "one seed")
    assert len(dots["x"]) == 4 * 5
    for x, arm, seed in zip(dots["x"], dots["y"], dots["customdata"], strict=True):
        assert x == pytest.approx(runs[arm, seed] - runs["top2", seed])
    assert "top2" not in set(paired(main["study_runs"], "top2")["arm"])


def test_with_few_seeds_the_caption_claims_nothing(tmp_path: Path):
    figure = checked(differences(of_question(study_tables(study_run(tmp_path / "run", seeds=3)), "main")))
    assert figure.caption.startswith("3 seeds: no claim. Largest difference from top2: hash, +0.0")
    assert {trace["name"] for trace in figure.data} == {
        "top2 (reference)",
        "one seed",
        "too few seeds to say",
    }


def test_an_arm_without_a_run_says_so_in_its_row(tmp_path: Path):
    tables = of_question(study_tables(study_run(tmp_path / "run", not_run=("hash",))), "main")
    figure = checked(differences(tables))
    (words,) = [trace for trace in figure.data if trace["mode"] == "text"]
    assert (words["y"], words["text"]) == (["hash"], ["not run"])
    assert figure.layout["yaxis"]["categoryarray"][0] == "hash"  # at the bottom


def test_where_no_arm_differs_the_detectable_difference_is_told(tmp_path: Path):
    arms = [{**arm, "shift": 0.0} for arm in router_arms()]
    tables = of_question(study_tables(study_run(tmp_path / "run", arms=arms, seed=3)), "main")
    seen = tables["study_comparisons"]["detectable_difference"]
    assert differences(tables).caption.endswith(f": {seen.min():.3g} to {seen.max():.3g} nats.")


def test_losses_connect_seeds_and_show_the_references_mean(main: Tables):
    figure = checked(losses(main))
    runs = main["study_runs"].set_index(["arm", "seed"])["validation_loss"]
    assert grey(figure)["mean of top2"]["x"][0] == pytest.approx(runs["top2"].mean())
    lines = [trace for trace in figure.data if trace["name"] == "one line per seed"]
    assert len(lines) == 5
    for seed, line in enumerate(lines):
        assert list(line["x"]) == pytest.approx([runs[arm, seed] for arm in line["y"]])
    assert lines[0]["y"][0] == "loss_free"  # the best on top
    assert figure.caption.startswith(f"Lowest mean: loss_free, {runs['loss_free'].mean():.4f} nats")


def test_noise_of_the_evaluation_stands_apart_from_the_spread_over_seeds(main: Tables):
    figure = checked(noise_and_spread(main))
    runs = main["study_runs"]
    spread = dict(zip(named(figure, "over seeds")["y"], named(figure, "over seeds")["x"], strict=True))
    assert spread["hash"] == pytest.approx(runs[runs["arm"] == "hash"]["validation_loss"].std())
    assert named(figure, "over documents")["x"] == pytest.approx(np.full(5, 0.025))
    losses = runs.pivot(index="seed", columns="arm", values="validation_loss")
    within = named(figure, "of differences from the reference")
    assert dict(zip(within["y"], within["x"], strict=True)) == pytest.approx(
        {arm: (losses[arm] - losses["top2"]).std() for arm in losses if arm != "top2"}
    )


def test_noise_that_was_not_measured_is_not_drawn(main: Tables):
    runs = main["study_runs"].assign(noise_std=np.nan)
    figure = checked(noise_and_spread({**main, "study_runs": runs}))
    assert "over documents" not in [trace["name"] for trace in figure.data]
    assert figure.caption.endswith("too few documents.")


def test_domains_show_where_a_difference_comes_from(main: Tables):
    figure = checked(difference_by_domain(main))
    (trace,) = figure.data
    runs = main["study_runs"].set_index(["arm", "seed"])["validation_loss"]
    apart = np.mean([runs["hash", seed] - runs["top2", seed] for seed in range(5)])
    row = dict(zip(trace["x"], trace["z"][trace["y"].index("hash")], strict=True))
    assert row == pytest.approx({"code": apart + 0.09, "prose": apart - 0.09})  # as planted
    assert trace["zmin"] == -trace["zmax"]
    assert "hash in code, +0.18" in figure.caption


def test_documents_weigh_by_their_tokens(main: Tables):
    rows = main["study_documents"].copy()
    first = (rows["arm"] == "hash") & (rows["document"] == 0)
    rows.loc[first, "loss"] += 4.0  # 100 of the domain's 400 tokens
    before, after = by_domain(main), by_domain({**main, "study_documents": rows})
    assert after.loc["hash", "code"] - before.loc["hash", "code"] == pytest.approx(1.0)


def test_one_domain_or_one_seed_is_not_drawn(main: Tables, tmp_path: Path):
    rows = main["study_documents"]
    noise, domains = OVERALL
    assert domains.can_draw(main)
    assert not domains.can_draw({**main, "study_documents": rows[rows["domain"] == "code"]})
    assert not domains.can_draw({**main, "study_documents": rows[rows["arm"] != "top2"]})
    assert noise.can_draw(main)
    assert not noise.can_draw(of_question(study_tables(study_run(tmp_path / "run", seeds=1)), "main"))


# --- over the steps


def test_curves_have_a_line_an_arm_with_a_band_and_the_reference_in_grey(main: Tables):
    figure = checked(curves(main, "validation_loss"))
    rows = main["study_curves"]
    own = rows[(rows["arm"] == "hash") & (rows["step"] == 300)]["validation_loss"]
    assert named(figure, "hash")["y"][-1] == pytest.approx(own.mean())
    assert "top2 (reference)" in grey(figure)
    fills = [trace for trace in figure.data if trace.get("fill")]
    assert len(fills) == 5
    assert max(trace["y"][-1] for trace in fills) == pytest.approx(own.max())


def test_routing_over_steps_stands_beside_routing_that_looks_at_nothing(main: Tables):
    tokens = 50 * 16 * 128  # a stretch of steps
    entropy = grey(checked(curves(main, "routing_entropy")))["uniform router"]
    assert entropy["y"] == pytest.approx(np.full(6, math.log(8)))
    cv = grey(checked(curves(main, "load_cv")))
    chance = "balanced random routing"
    assert cv[f"{chance}, 2 of 8"]["y"] == pytest.approx(np.full(6, math.sqrt(6 / (2 * tokens))))
    assert cv[f"{chance}, 1 of 8"]["y"] == pytest.approx(np.full(6, math.sqrt(7 / tokens)))  # switch_top1
    assert grey(checked(curves(main, "unused_share")))[chance]["y"] == pytest.approx(np.zeros(6))


def test_differences_over_steps_are_within_seeds_and_around_zero(main: Tables):
    figure = checked(difference_by_step(main))
    rows = main["study_curves"].set_index(["arm", "seed", "step"])["validation_loss"]
    expected = np.mean([rows["hash", seed, 300] - rows["top2", seed, 300] for seed in range(5)])
    assert named(figure, "hash")["y"][-1] == pytest.approx(expected)
    assert grey(figure)["top2 (reference)"]["y"] == [0.0, 0.0]


def test_a_seed_that_the_reference_lacks_is_left_out_of_differences_over_steps(main: Tables):
    rows = main["study_curves"]
    without = rows[(rows["arm"] != "top2") | (rows["seed"] != 0)]
    losses_of = rows.set_index(["arm", "seed", "step"])["validation_loss"]
    expected = np.mean([losses_of["hash", seed, 300] - losses_of["top2", seed, 300] for seed in range(1, 5)])
    assert named(difference_by_step({**main, "study_curves": without}), "hash")["y"][-1] == pytest.approx(
        expected
    )


def test_a_training_that_failed_is_not_in_the_mean(main: Tables):
    runs = main["study_runs"].copy()
    runs.loc[(runs["arm"] == "hash") & (runs["seed"] == 0), "status"] = "failed"
    rows = main["study_curves"]
    own = rows[(rows["arm"] == "hash") & (rows["seed"] != 0) & (rows["step"] == 300)]["validation_loss"]
    assert named(curves({**main, "study_runs": runs}, "validation_loss"), "hash")["y"][-1] == pytest.approx(
        own.mean()
    )


def test_of_sixteen_arms_those_that_stand_out_have_names(tmp_path: Path):
    names = ["top2", *(f"arm{index}" for index in range(15))]
    tables = of_question(study_tables(study_run(tmp_path / "run", arms=router_arms(names))), "main")
    figure = checked(curves(tables, "load_cv"))
    shown = [trace["name"] for trace in figure.data if trace.get("showlegend", True)]
    assert len(shown) <= 9
    assert "top2 (reference)" in shown
    assert shown.count("other arms") == 1
    assert sum(trace.get("name") == "other arms" for trace in figure.data) >= 9
    assert not any(trace.get("fill") for trace in figure.data)
    assert checked(differences(tables)).height > 500


def test_curves_without_two_steps_are_not_drawn(main: Tables):
    rows = main["study_curves"]
    first = {**main, "study_curves": rows[rows["step"] == 50]}
    assert all(spec.can_draw(main) for spec in CURVE_FIGURES)
    assert not any(spec.can_draw(first) for spec in CURVE_FIGURES)
    alone = {**main, "study_curves": rows[rows["arm"] != "top2"]}
    assert [spec.name for spec in CURVE_FIGURES if not spec.can_draw(alone)] == ["difference_by_step"]


# --- along axes, and costs


def along(whole, question: str) -> Tables:
    tables = of_question(study_tables(whole), question)
    (places,) = axis_frames(tables, question)
    return {**tables, "study_axes": places}


def test_a_sweep_shows_loss_beside_the_reference_and_load_beside_its_aim(whole):
    tables = along(whole, "sweep")
    loss, load = checked(loss_by_value(tables)), checked(load_by_value(tables))
    assert list(named(loss, "spectra")["x"]) == [0.02, 0.051, 0.2, 0.5]
    reference = tables["study_comparisons"].set_index("arm").loc["top2", "mean"]
    assert grey(loss)["mean of top2"]["y"] == [reference] * 2
    assert loss.layout["xaxis"]["type"] == "log"
    assert f"at 0.051 (spectra) (reference top2: {reference:.4f})" in loss.caption
    assert grey(load)["target: 0.1"]["y"] == [0.1, 0.1]
    assert "at 0.02, 0.051;" in load.caption


def test_a_sweep_that_misses_its_aim_says_how_near_it_came(whole):
    tables = along(whole, "sweep")
    runs = tables["study_runs"].assign(load_cv=lambda frame: frame["load_cv"] + 1)
    assert "lowest 1.02 at 0.02" in load_by_value({**tables, "study_runs": runs}).caption


def test_a_value_without_a_result_is_named(whole):
    tables = along(whole, "sweep")
    runs = tables["study_runs"].copy()
    runs.loc[runs["arm"] == "spectra epsilon=0.2", "status"] = "not run"
    figure = checked(loss_by_value({**tables, "study_runs": runs}))
    assert figure.caption.endswith("No result: 0.2.")
    assert list(named(figure, "spectra")["x"]) == [0.02, 0.051, 0.5]


def test_scaling_has_a_line_a_router_over_doublings_of_experts(whole):
    figure = checked(loss_by_value(along(whole, "scaling")))
    assert list(named(figure, "top2")["x"]) == list(named(figure, "spectra")["x"]) == [4, 16, 32]
    assert figure.layout["xaxis"]["tickvals"] == [4, 16, 32]
    assert figure.layout["xaxis"]["type"] == "log"


def test_overhead_is_stacked_to_the_whole_with_the_references_experts_beside(main: Tables, whole):
    tables = {**main, "overhead": study_tables(whole)["overhead"]}
    figure = checked(overhead_shares(tables))
    bars = [trace for trace in figure.data if trace["type"] == "bar"]
    assert np.nansum([trace["x"] for trace in bars], axis=0) == pytest.approx(np.ones(5))
    assert bars[0]["name"] == "experts"
    assert grey(figure)["experts' share with top2"]["x"][0] == pytest.approx(2 / 2.2)
    assert figure.caption == "Highest routing share: spectra, 28.6 % of the block (top2: 9.09 %)."


def test_lesser_parts_of_a_router_are_drawn_together(main: Tables):
    shares = {"experts": 0.4, **{f"part{index}": 0.02 * (index + 1) for index in range(7)}, "rest": 0.04}
    rows = pd.DataFrame(
        [
            {"router": "spectra", "component": name, "milliseconds": share, "flops": 1, "share": share}
            for name, share in shares.items()
        ]
    )
    figure = checked(overhead_shares({**main, "overhead": rows}))
    assert [trace["name"] for trace in figure.data] == [
        "experts",
        "part6",
        "part5",
        "part4",
        "part3",
        "part2",
        "part1",
        "other parts",
    ]
    assert sum(trace["x"][0] for trace in figure.data) == pytest.approx(1.0)
    assert figure.data[-1]["x"][0] == pytest.approx(0.02 + 0.04)
    assert len({trace["marker"]["color"] for trace in figure.data}) == 8


@pytest.fixture(scope="module")
def every_figure(whole, tmp_path_factory: pytest.TempPathFactory) -> list[Figure]:
    published = study_run(tmp_path_factory.mktemp("study") / "run", arms=router_arms(["top2", "spectra"]))
    tables = {**study_tables(whole), **along(whole, "sweep"), "overhead": study_tables(whole)["overhead"]}
    drawn = []
    for spec in STUDY_FIGURES:
        of = study_tables(published) if spec in RESULT_FIGURES else tables
        assert spec.can_draw(of), spec.name
        drawn.append(spec.draw(of))
    return drawn


def test_every_glossary_entry_of_the_figures_exists(every_figure):
    assert {column for figure in every_figure for column in figure.columns} <= set(COLUMNS)


def test_titles_have_at_most_8_words_and_captions_25(main: Tables, every_figure):
    for figure in [*every_figure, *(spec.draw(main) for spec in (*ARM_FIGURES[:4], *CURVE_FIGURES))]:
        assert len(figure.title.split()) <= 8, figure.title
        assert len(figure.caption.split()) <= 25, figure.caption


def test_an_axis_of_few_close_values_is_linear(whole):
    tables = along(whole, "sweep")
    places = tables["study_axes"].assign(value=lambda frame: 1 + frame["value"])
    assert "type" not in loss_by_value({**tables, "study_axes": places}).layout["xaxis"]
    assert isinstance(places, pd.DataFrame)
