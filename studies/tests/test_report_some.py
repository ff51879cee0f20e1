"""SoME's runs beside the published ones."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest
from paper_results import Results, counted
from paper_some import RUNS, epoch_losses, some_section, some_studies, steps_to_learn

GOLDEN = Path(__file__).parents[2] / "tests" / "golden" / "some_runs.csv"  # the published table


def test_the_published_runs_are_the_published_ones():
    with GOLDEN.open() as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == sum(len(one.losses) for one in RUNS.values())
    for row in rows:
        one, epoch = RUNS[row["run"]], int(row["epoch"]) - 1
        assert one.experts == int(row["experts"])
        found = (one.losses[epoch], one.gini[epoch], one.bits[epoch])
        assert found == tuple(float(row[name]) for name in ("val_loss", "gini", "entropy_bits"))
        assert row["experts_used"] in ("", str(one.used))


def of(*studies: dict[str, pd.DataFrame]) -> Results:
    return Results(pd.DataFrame(), others=tuple(counted(one) for one in studies))


def some_tables(length: float, pads: float = 1.0) -> dict[str, pd.DataFrame]:
    runs = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "question": "main", "status": "done", "n_experts": 64}
            | {"validation_loss": 2.0 + 0.1 * seed, "validation_loss_published": 0.9 + 0.1 * seed}
            for arm in ("A4", "A4 frozen keys")
            for seed in range(2)
        ]
    )
    metrics = {"key_gini": (0.5, 0.1), "key_load_entropy_bits": (3.0, 6.0), "key_used": (0.75, 1.0)}
    layers = pd.DataFrame(
        [
            {
                "arm": "A4",
                "seed": seed,
                "layer": 5,
                "metric": name,
                "domain": "",
                "value": value,
                "chance": chance,
            }
            for name, (value, chance) in metrics.items()
            for seed in range(2)
        ]
    )
    settings = [("A4", "sequence_length", length), ("A4", "pad_targets", pads)]
    settings = pd.DataFrame(settings, columns=["arm", "name", "value"])
    curves = [(step, seed, 1.0 / step + seed) for step in (312, 624, 1248) for seed in range(2)]
    frame = pd.DataFrame(curves, columns=["step", "seed", "validation_loss_published"])
    frame = frame.assign(arm="A4", validation_loss=frame["validation_loss_published"] + 1)
    name = pd.DataFrame({"name": [f"some {length:g}"]})
    return {
        **{"study_runs": runs, "study_layers": layers, "study_settings": settings},
        **{"study_curves": frame, "study_name": name},
    }


def test_published_losses_stand_beside_trainings_on_the_pads_of_such_rows_only():
    section = some_section(of(some_tables(320.0), some_tables(768.0)))
    rows = {(row[0], row[1]): row[2:] for row in section.tables[0]["rows"]}
    assert next(iter(rows)) == ("some 768", "A4")
    published = rows["some 768", "A4"]
    assert published[:2] == [64, "not measured"]
    assert published[2].startswith("2.0500 ± ")
    assert published[3] == "–"
    assert published[4].startswith("0.9500 ± ")
    assert published[5] == "0.7126"
    assert published[6:12] == [
        "0.500 ± 0.000 (0.100)",
        "0.851",
        "3.000 ± 0.000 (6.000)",
        "3.413",
        "75.0 ± 0.0 (100.0)",
        "100.0",
    ]
    assert rows["some 320", "A4"][4:6] == ["–", "–"]
    assert rows["some 320", "A4"][6:12] == published[6:12]  # use of experts
    assert rows["some 768", "A4 frozen keys"][5] == "–"
    assert epoch_losses(some_tables(768.0), "A4") == [
        (1.0, pytest.approx(1 / 312 + 0.5)),
        (2.0, pytest.approx(1 / 624 + 0.5)),
        (4.0, pytest.approx(1 / 1248 + 0.5)),
    ]


def test_a_model_that_did_not_learn_pads_has_no_loss_with_pads():
    tables = some_tables(768.0, pads=0.0)
    row = some_section(of(tables)).tables[0]["rows"][0]
    assert row[4].startswith("2.0500 ± ")
    assert row[6] == "–"
    assert epoch_losses(tables, "A4")[0] == (1.0, pytest.approx(1 / 312 + 1.5))


def test_stalled_trainings_are_counted_and_left_out_of_every_other_number():
    tables = some_tables(768.0)
    losses = {("A4", 0): 2.0, ("A4", 1): 5.9, ("A4 frozen keys", 0): 5.9, ("A4 frozen keys", 1): 6.1}
    runs = tables["study_runs"].assign(unigram_loss=6.0, n_experts=16, loss_slope=-0.25)
    runs["validation_loss"] = [losses[pair] for pair in zip(runs["arm"], runs["seed"], strict=True)]
    tables = {**tables, "study_runs": runs}
    tables["study_layers"].loc[tables["study_layers"]["seed"] == 1, "value"] = 0.9
    results = of(tables)
    rows = {row[1]: row for row in some_section(results).tables[0]["rows"]}
    assert rows["A4"][2:8] == [16, "1 of 2", "2.0000", "−0.25", "0.9000", "0.7126"]
    assert rows["A4"][8] == "0.500 (0.100)"
    assert rows["A4 frozen keys"][2:7] == [16, "2 of 2", "stalled", "–", "–"]
    assert epoch_losses(some_studies(results)[0], "A4")[0] == (1.0, pytest.approx(1 / 312))


@pytest.mark.parametrize("status", ["failed", "not run"])
def test_an_arm_that_stalled_where_it_ended_is_called_stalled_and_others_stay(status: str):
    tables = some_tables(768.0)
    runs = tables["study_runs"].assign(unigram_loss=6.0)
    runs.loc[runs["arm"] == "A4", "validation_loss"] = 6.2  # no better than the baseline
    runs.loc[runs["arm"] == "A4 frozen keys", "validation_loss"] = [2.0, 2.1]
    runs.loc[1, ["status", "validation_loss"]] = (status, None)
    rows = {row[1]: row for row in some_section(of({**tables, "study_runs": runs})).tables[0]["rows"]}
    assert rows["A4"][3:5] == ["1 of 1", "stalled"]
    assert rows["A4 frozen keys"][3] == "none"
    assert rows["A4 frozen keys"][4].startswith("2.0")


def test_an_arm_has_learned_at_the_first_step_that_is_clearly_below_the_unigram_baseline():
    rows = {
        ("A4", 0): (6.1, 5.8, 5.6, 2.0, 2.0, 2.0),
        ("A4", 1): (6.1, 5.9, 5.8, 2.0, 2.0, 2.0),
        ("A4", 2): (6.1, 5.9, 5.8, 5.8, 5.8, 2.0),
        ("A4", 3): (6.1, 5.9, 5.8, 5.8, 5.8, 5.8),
        ("A4 dense", 0): (6.1, 3.0, 5.8, 2.0, 2.0, 2.0),
        ("B3", 0): (6.1, 6.0, 6.0, 6.0, 6.0, 6.0),
    }
    curves = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "step": 10 * at, "train_loss": loss}
            for (arm, seed), losses in rows.items()
            for at, loss in enumerate(losses)
        ]
    )
    runs = pd.DataFrame(list(rows), columns=["arm", "seed"])
    runs = runs.assign(status="done", question="main", validation_loss=2.0, unigram_loss=6.0)
    assert steps_to_learn({"study_curves": curves, "study_runs": runs}) == {
        "A4": "30 (20 to 50, 1 never)",
        "A4 dense": "10",
        "B3": "none (1 never)",
    }
    assert steps_to_learn({"study_runs": runs}) == {}


def test_without_runs_the_published_ones_stand_alone():
    section = some_section(of())
    assert "Not run" in section.text
    assert [row[1] for row in section.tables[0]["rows"]] == list(RUNS)
    assert len({len(row) for row in section.tables[0]["rows"]}) == 1
