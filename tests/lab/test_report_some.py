"""SoME's runs beside the published ones."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest

from moescope.lab.report_some import RUNS, epoch_losses, some_section, some_studies, steps_to_learn
from moescope.lab.results import Results

GOLDEN = Path(__file__).parents[1] / "golden" / "some_runs.csv"  # the published table


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
    section = some_section(Results.of([some_tables(320.0), some_tables(768.0)]))
    rows = {(row[0], row[1]): row[2:] for row in section.tables[0]["rows"]}
    assert next(iter(rows)) == ("some 768", "A4")
    published = rows["some 768", "A4"]
    assert published[:2] == [64, "0 of 2"]
    assert published[2].startswith("2.0500 ± ")
    assert published[3].startswith("0.9500 ± ")
    assert published[4] == "0.7126"
    assert published[5:11] == [
        "0.500 ± 0.000 (0.100)",
        "0.851",
        "3.000 ± 0.000 (6.000)",
        "3.413",
        "75.0 ± 0.0 (100.0)",
        "100.0",
    ]
    assert rows["some 320", "A4"][3:5] == ["none", "none"]
    assert rows["some 320", "A4"][5:11] == published[5:11]  # use of experts
    assert rows["some 768", "A4 frozen keys"][4] == "none"
    assert epoch_losses(some_tables(768.0), "A4") == [
        (1.0, pytest.approx(1 / 312 + 0.5)),
        (2.0, pytest.approx(1 / 624 + 0.5)),
        (4.0, pytest.approx(1 / 1248 + 0.5)),
    ]


def test_a_model_that_did_not_learn_pads_has_no_loss_with_pads():
    tables = some_tables(768.0, pads=0.0)
    row = some_section(Results.of([tables])).tables[0]["rows"][0]
    assert row[4].startswith("2.0500 ± ")
    assert row[5] == "none"
    assert epoch_losses(tables, "A4")[0] == (1.0, pytest.approx(1 / 312 + 1.5))


def test_stalled_trainings_are_counted_and_left_out_of_every_other_number():
    tables = some_tables(768.0)
    losses = {("A4", 0): 2.0, ("A4", 1): 5.9, ("A4 frozen keys", 0): 5.9, ("A4 frozen keys", 1): 6.1}
    runs = tables["study_runs"].assign(unigram_loss=6.0)
    runs["validation_loss"] = [losses[pair] for pair in zip(runs["arm"], runs["seed"], strict=True)]
    tables = {**tables, "study_runs": runs}
    tables["study_layers"].loc[tables["study_layers"]["seed"] == 1, "value"] = 0.9
    results = Results.of([tables])
    rows = {row[1]: row for row in some_section(results).tables[0]["rows"]}
    assert rows["A4"][2:7] == [64, "1 of 2", "2.0000", "0.9000", "0.7126"]
    assert rows["A4"][7] == "0.500 (0.100)"
    assert rows["A4 frozen keys"][3:6] == ["2 of 2", "stalled", "none"]
    assert epoch_losses(some_studies(results)[0], "A4")[0] == (1.0, pytest.approx(1 / 312))


def test_an_arm_has_learned_at_the_first_step_that_is_clearly_below_the_unigram_baseline():
    rows = {
        ("A4", 0): (6.1, 5.8, 5.6, 2.0),
        ("A4", 1): (6.1, 5.9, 5.8, 2.0),
        ("A4 dense", 0): (6.1, 3.0, 5.8, 2.0),
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
    assert steps_to_learn({"study_curves": curves, "study_runs": runs}) == {"A4": 25.0, "A4 dense": 10.0}
    assert steps_to_learn({"study_runs": runs}) == {}


def test_without_runs_the_published_ones_stand_alone():
    section = some_section(Results({}, {}, {}, {}, {}))
    assert "Not run" in section.text
    assert [row[1] for row in section.tables[0]["rows"]] == list(RUNS)
    assert len({len(row) for row in section.tables[0]["rows"]}) == 1
