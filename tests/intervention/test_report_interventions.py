"""The report on interventions: key numbers, findings with places, map, expert pages, sections."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from intervention.intervention_runs import (
    projection_tables,
    single_tables,
    sweep_tables,
    top_k_tables,
    write_run,
)
from moescope.cli import run_lines
from moescope.reporting.page import page_content
from moescope.verb import Selection


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "sweep", sweep_tables())


def words_of(run) -> list[str]:
    return [str(line) for line in run.verb.summary(run).findings]


def test_findings_name_the_planted_expert_its_domain_and_its_place(sweep):
    summary = sweep.verb.summary(sweep)
    overall, code, *others = summary.findings
    assert "1 of 24; most layer 1, expert 5" in overall
    assert code.startswith("Domain code needs layer 1, expert 5 most")
    assert [(line.place["layer"], line.place["expert"]) for line in (overall, code)] == [(1, 5)] * 2
    effect = sweep.table("interventions").query("layer == 1 and expert == 5 and domain == 'code'").iloc[0]
    assert f"{effect['excess']:.3g} [{effect['excess_low']:.3g}, {effect['excess_high']:.3g}]" in code
    assert len(others) == 1, "prose and records share one sentence: no expert stands out"
    assert "prose and records" in others[0]
    numbers = {key.name: key for key in summary.key_numbers}
    assert numbers["Experts above controls"].value == 1
    assert numbers["Loss of the untouched model"].value == pytest.approx(3.0)
    assert numbers["Largest loss without one expert"].value == pytest.approx(
        sweep.table("intervention_experts")["loss_difference"].max()
    )


def test_domains_with_few_documents_are_named_and_not_judged(tmp_path):
    tables = sweep_tables()
    rows = tables["interventions"]
    rows.loc[rows["domain"] == "prose", ["p", "q", "excess_low", "excess_high"]] = None
    words = words_of(write_run(tmp_path / "run", tables))
    assert any(line.startswith("Not tested: prose") for line in words)


def test_the_map_is_the_loss_when_removed_and_marks_what_is_above_controls(sweep):
    (measure,) = sweep.verb.measures(sweep)
    assert measure.title == "Loss when removed"
    frame = measure.frame.set_index(["layer", "expert"])
    expected = sweep.table("intervention_experts").set_index(["layer", "expert"])["loss_difference"]
    pd.testing.assert_series_equal(frame["value"], expected, check_names=False)
    assert frame.index[frame["beyond"] == 1].tolist() == [(1, 5)]


def test_an_expert_s_page_has_its_effect_by_domain(sweep):
    cards = {cards.layer: cards.cards for cards in sweep.verb.experts(sweep)}
    (block,) = cards[1][5]
    assert [row[0] for row in block["rows"]] == ["code", "prose", "records"]
    code = block["rows"][0]
    assert code[2] < code[1] < code[3]
    assert code[1] == pytest.approx(0.42, abs=0.03)


def test_projections_are_claimed_only_beyond_both_controls(tmp_path):
    run = write_run(tmp_path / "k", projection_tables(layers=2))
    (line,) = words_of(run)
    assert "6 of 6 layers and k" in line
    best = run.table("interventions").query("role == 'change'").nlargest(1, "loss_difference").iloc[0]
    assert f"layer {best['layer']:.0f}, k = {best['k']:.0f}: {best['loss_difference']:.3g} [" in line
    (line,) = words_of(write_run(tmp_path / "none", projection_tables(beyond=0.0)))
    assert "none of 3 layers and k" in line
    (key,) = (key for key in run.verb.summary(run).key_numbers if key.name.startswith("Projections"))
    assert (key.value, key.most) == (6, 6)


def test_a_single_change_is_told_with_what_is_known(tmp_path):
    tables = single_tables(2)
    first = words_of(write_run(tmp_path / "run", tables))[0]
    row = tables["interventions"].nlargest(1, "loss_difference").iloc[0]
    assert first.startswith(f"Effect of {row['change']}: loss 3 changes by {row['loss_difference']:.3g} [")
    assert first.endswith(f"KL divergence {row['kl']:.3g} [{row['kl_low']:.3g}, {row['kl_high']:.3g}].")
    rows = tables["interventions"]
    rows[[name for name in rows if name.endswith(("_low", "_high", "_std", "choices_changed"))]] = np.nan
    for line in words_of(write_run(tmp_path / "few", tables)):
        assert "undefined" not in line


def test_continuations_stand_side_by_side_and_say_where_they_part(tmp_path):
    text = pd.DataFrame(
        {
            "intervention": 1,
            "prompt": "once",
            "position": range(3),
            "token": [" upon", " a", " time"],
            "token_changed": [" upon", " the", None],
        }
    )
    run = write_run(tmp_path / "text", {**top_k_tables(), "intervention_text": text})
    assert (
        words_of(run)[-1] == "Generated text: 1 of 1 continuation with a difference, the earliest at token 1."
    )
    printed = run_lines(run, verbose=False)
    assert printed[-3:] == ["once (top_k k=2)", "  untouched: upon a time", "  changed:   upon the"]
    section = run.verb.sections(run, Selection())[-1]
    name, (pair,) = section.widget
    assert name == "continuations"
    assert pair == {
        "change": "top_k k=2",
        "prompt": "once",
        "before": [" upon", " a", " time"],
        "after": [" upon", " the", None],
    }


def test_the_page_has_the_tab_and_asks_what_predicts_the_effect(sweep):
    content = page_content([sweep])
    assert '"name":"interventions","title":"Interventions"' in content["data"]
    assert "What predicts the effect of an expert" in content["data"]
    assert "No claim about predictors: 3 layers, 12 are needed." in content["data"]
