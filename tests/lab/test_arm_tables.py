"""What follows from a study's trainings, against planted studies, numbers by hand and scipy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab.study_runs import more_arms, router_arms, study_run
from moescope.lab.report_study import study_tables
from moescope.lab.study_statistics import (
    NORMAL,
    OTHER_PARTS,
    axis_frames,
    of_question,
    with_arm_tables,
    with_parts,
)
from moescope.lab.tables import TABLES
from moescope.run import Run, write_table
from moescope.verb import Tables

MADE = ("study_arms", "study_pairs", "study_domains", "study_means", "study_values")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return study_run(tmp_path_factory.mktemp("study") / "run", arms=[*router_arms(), *more_arms()])


@pytest.fixture(scope="module")
def stored(whole: Run) -> Tables:
    """The tables as they were written before those that follow from them existed."""
    return {name: whole.table(name) for name in whole.tables}


@pytest.fixture(scope="module")
def made(stored: Tables) -> Tables:
    return with_arm_tables(stored, "top2")


def again(stored: Tables, **changed: pd.DataFrame) -> Tables:
    return with_arm_tables({**stored, **changed}, "top2")


def main(frame: pd.DataFrame, **keys: object) -> pd.DataFrame:
    frame = frame[frame["question"] == "main"]
    for key, value in keys.items():
        frame = frame[frame[key] == value]
    return frame


def test_a_study_of_before_is_read_as_one_that_has_the_tables(whole: Run, made: Tables, tmp_path: Path):
    assert not set(MADE) & set(whole.tables)
    opened = study_tables(whole)
    assert set(MADE) <= set(opened)
    assert not set(MADE) & set(Run.load(whole.path).tables)  # nothing is written into the run
    for name in (*MADE, "study_comparisons", "overhead"):
        write_table(TABLES[name], made[name], tmp_path / f"{name}.parquet")  # fits the table, keys are unique


def test_pairs_are_differences_within_seeds(stored: Tables, made: Tables):
    losses = stored["study_runs"].set_index(["arm", "seed"])["validation_loss"]
    rows = main(made["study_pairs"])
    assert len(rows) == 4 * 5
    for row in rows.itertuples():
        assert row.difference == pytest.approx(losses[row.arm, row.seed] - losses["top2", row.seed])
    assert "top2" not in set(rows["arm"])


def test_noise_of_the_evaluation_stands_apart_from_the_spread_over_seeds(stored: Tables, made: Tables):
    losses = stored["study_runs"].pivot(index="seed", columns="arm", values="validation_loss")
    rows = main(made["study_comparisons"]).set_index("arm")
    for arm in rows.index:
        assert rows.loc[arm, "seed_std"] == pytest.approx(losses[arm].std())
    assert rows["noise_std"].to_numpy() == pytest.approx(np.full(5, 0.025))
    assert rows["difference_std"]["hash"] == pytest.approx((losses["hash"] - losses["top2"]).std())
    runs = stored["study_runs"].assign(noise_std=np.nan)
    assert again(stored, study_runs=runs)["study_comparisons"]["noise_std"].isna().all()


def test_domains_show_where_a_difference_comes_from(stored: Tables, made: Tables):
    losses = stored["study_runs"].set_index(["arm", "seed"])["validation_loss"]
    apart = np.array([losses["hash", seed] - losses["top2", seed] for seed in range(5)])
    rows = main(made["study_domains"], arm="hash").set_index("domain")
    assert rows["difference"].to_dict() == pytest.approx(
        {"code": apart.mean() + 0.09, "prose": apart.mean() - 0.09}
    )
    interval = stats.t.interval(0.95, 4, apart.mean(), stats.sem(apart))
    assert rows["noise"].to_numpy() == pytest.approx((interval[1] - apart.mean()) / NORMAL)


def test_documents_weigh_by_their_tokens(stored: Tables, made: Tables):
    rows = stored["study_documents"].copy()
    rows.loc[(rows["arm"] == "hash") & (rows["document"] == 0), "loss"] += (
        4.0  # 100 of the domain's 400 tokens
    )
    after = again(stored, study_documents=rows)
    before, now = (main(one["study_domains"], arm="hash", domain="code") for one in (made, after))
    assert float(now["difference"].iloc[0] - before["difference"].iloc[0]) == pytest.approx(1.0)


def test_one_domain_or_no_reference_has_no_rows(stored: Tables):
    rows = stored["study_documents"]
    assert "study_domains" not in again(stored, study_documents=rows[rows["domain"] == "code"])
    without = again(stored, study_documents=rows[~rows["arm"].isin(["top2", "spectra"])])
    assert "study_domains" not in without


# --- over the steps


def last(tables: Tables, arm: str) -> pd.Series:
    return main(tables["study_means"], arm=arm, step=300).iloc[0]


def test_curves_are_means_over_seeds_with_the_range_of_seeds(stored: Tables, made: Tables):
    rows = stored["study_curves"]
    own = rows[(rows["arm"] == "hash") & (rows["step"] == 300)]["validation_loss"]
    found = last(made, "hash")
    ends = (own.mean(), own.min(), own.max())
    columns = ["validation_loss", "validation_loss_low", "validation_loss_high"]
    assert tuple(found[columns]) == pytest.approx(ends)


def test_routing_over_steps_stands_beside_routing_that_looks_at_nothing(made: Tables):
    tokens = 50 * 16 * 128  # a stretch of steps
    assert last(made, "top2")["routing_entropy_chance"] == pytest.approx(math.log(8))
    assert last(made, "top2")["load_cv_chance"] == pytest.approx(math.sqrt(6 / (2 * tokens)))
    assert last(made, "switch_top1")["load_cv_chance"] == pytest.approx(math.sqrt(7 / tokens))


@pytest.mark.parametrize("seeds", [range(5), range(1, 5)])
def test_differences_over_steps_are_within_the_seeds_that_both_have(stored: Tables, seeds: range):
    rows = stored["study_curves"]
    kept = rows[(rows["arm"] != "top2") | rows["seed"].isin(seeds)]
    losses = rows.set_index(["arm", "seed", "step"])["validation_loss"]
    expected = [losses["hash", seed, 300] - losses["top2", seed, 300] for seed in seeds]
    found = last(again(stored, study_curves=kept), "hash")
    assert found["difference"] == pytest.approx(np.mean(expected))
    assert math.isnan(last(again(stored, study_curves=kept), "top2")["difference"])


def test_a_training_that_failed_is_not_in_the_mean(stored: Tables):
    runs = stored["study_runs"].copy()
    runs.loc[(runs["arm"] == "hash") & (runs["seed"] == 0), "status"] = "failed"
    rows = stored["study_curves"]
    own = rows[(rows["arm"] == "hash") & (rows["seed"] != 0) & (rows["step"] == 300)]["validation_loss"]
    assert last(again(stored, study_runs=runs), "hash")["validation_loss"] == pytest.approx(own.mean())


# --- along axes


def test_a_sweep_stands_beside_its_reference(stored: Tables, made: Tables):
    rows = made["study_values"].query("question == 'sweep'")
    assert rows["value"].to_list() == [0.02, 0.051, 0.2, 0.5]
    assert set(rows["line"]) == {"spectra"}
    runs = stored["study_runs"].set_index("arm")["validation_loss"]
    assert rows["validation_loss"].to_list() == pytest.approx(
        [runs[f"spectra epsilon={value:g}"].mean() for value in rows["value"]]
    )
    assert rows["validation_loss_high"].iloc[0] == runs["spectra epsilon=0.02"].max()
    assert rows["reference_loss"].to_list() == pytest.approx([runs["top2"].mean()] * 4)


def test_a_value_without_a_result_is_null(stored: Tables):
    runs = stored["study_runs"].copy()
    runs.loc[runs["arm"] == "spectra epsilon=0.2", "status"] = "not run"
    rows = again(stored, study_runs=runs)["study_values"].query("question == 'sweep'")
    assert rows["validation_loss"].isna().to_list() == [False, False, True, False]


def test_scaling_has_a_line_a_router(made: Tables):
    rows = made["study_values"].query("question == 'scaling'")
    assert {line: part["value"].to_list() for line, part in rows.groupby("line")} == {
        "top2": [4, 16, 32],
        "spectra": [4, 16, 32],
    }


def test_sizes_with_names_lie_at_their_active_parameters(tmp_path: Path):
    arms = [
        {
            "name": name,
            "question": "scaling",
            "overrides": {"model": {"router": "top2"}},
            "axes": {"size": name, "router": "top2"},
            "shift": shift,
        }
        for name, shift in (("S", 0.0), ("L", -0.1))
    ]
    run = study_run(tmp_path / "run", arms=arms)
    runs = run.table("study_runs")
    runs.loc[runs["arm"] == "L", "parameters_active"] = 180_000
    (places,) = axis_frames(run.table("study_axes"), runs, "scaling")
    assert sorted(places[["axis", "value", "line"]].to_numpy().tolist()) == [
        ["active parameters (size)", 90_000, "top2"],
        ["active parameters (size)", 180_000, "top2"],
    ]


# --- means of arms, costs


def test_arms_without_a_training_have_their_sizes_and_a_reason(tmp_path: Path):
    failed = tuple(("hash", seed) for seed in range(5))
    run = study_run(tmp_path / "run", failed=failed, not_run=("switch_top1",))
    rows = study_tables(run)["study_arms"].set_index("arm")
    assert rows["state"].to_dict() == {
        **dict.fromkeys(("top2", "loss_free", "spectra"), "done"),
        **{"hash": "failed", "switch_top1": "not run"},
    }
    assert rows.loc["switch_top1", ["trainings", "done", "parameters_total"]].tolist() == [5, 0, 200_000]
    assert math.isnan(rows.loc["switch_top1", "load_cv"])
    assert (rows.loc["top2", "relative_speed"], rows.loc["top2", "k_of_n"]) == (1.0, 2 / 8)


def test_means_of_arms_are_over_finished_trainings(stored: Tables, made: Tables):
    rows, tokens = made["study_arms"].set_index("arm"), 50 * 16 * 128
    runs = stored["study_runs"].groupby("arm")["load_cv"].mean()
    assert rows["load_cv"].to_dict() == pytest.approx(runs.to_dict())
    assert rows.loc["top2 experts=32", "load_cv_chance"] == pytest.approx((30 / (2 * tokens)) ** 0.5)


def test_lesser_parts_of_a_router_have_one_name():
    shares = {"experts": 0.4, **{f"part{index}": 0.02 * (index + 1) for index in range(7)}, "rest": 0.04}
    rows = pd.DataFrame({"component": list(shares), "share": list(shares.values())}).assign(router="spectra")
    found = with_parts(rows).set_index("component")["part"]
    assert {name for name in found.index if found[name] == OTHER_PARTS} == {"part0", "rest"}
    assert found["experts"] == "experts"
    seven = with_parts(rows[rows["component"] != "rest"])
    assert OTHER_PARTS not in set(seven["part"])  # one alone keeps its name


def test_a_question_has_its_own_rows(made: Tables):
    part = of_question(made, "ablation")
    assert set(part["study_means"]["question"]) == {"ablation"}
    assert set(part["study_runs"]["arm"]) == set(part["study_comparisons"]["arm"])
