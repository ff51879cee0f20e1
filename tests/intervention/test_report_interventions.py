"""The report on interventions: key numbers, findings with places, map, expert pages, sections."""

from __future__ import annotations

import pandas as pd
import pytest

from intervention.intervention_runs import projection_tables, sweep_tables, top_k_tables, write_run
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
    assert "1 of 24 experts costs more" in overall
    assert code.startswith("Domain code: layer 1, expert 5")
    assert (code.place["layer"], code.place["expert"], code.place["tab"]) == (1, 5, "interventions")
    effect = sweep.table("interventions").query("layer == 1 and expert == 5 and domain == 'code'").iloc[0]
    assert f"{effect['excess']:.3g} [{effect['excess_low']:.3g}, {effect['excess_high']:.3g}]" in code
    assert len(others) == 1, "prose and records share one sentence: no expert stands out"
    numbers = {key.name: key for key in summary.key_numbers}
    assert numbers["Experts above controls"].value == 1
    assert numbers["Loss of the untouched model"].value == pytest.approx(3.0)


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


def test_projections_are_told_with_their_controls(tmp_path):
    run = write_run(tmp_path / "k", projection_tables(layers=2))
    lines = words_of(run)
    assert len(lines) == 2
    assert all("random direction" in line and "random subspace" in line for line in lines)
    many = write_run(tmp_path / "many", projection_tables(layers=5))
    (line,) = words_of(many)
    assert "15 of 15 layers and ks" in line


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
