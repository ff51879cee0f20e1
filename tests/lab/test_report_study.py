"""A study's part of the page.

What may be said is said with its numbers, what may not is not, and every cell has a run or a reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from lab.study_runs import more_arms, router_arms, study_run
from moescope.errors import BadInput
from moescope.lab.report_study import settings, study_tables
from moescope.lab.study_statistics import compare
from moescope.lab.tables import TABLES
from moescope.reporting.page import page_content
from moescope.reporting.verb import report
from moescope.run import Run, write_table
from moescope.verb import Section, Selection


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five seeds: routers, ablations against spectra, a sweep, scaling.

    One training failed, one arm was not run.
    """
    return study_run(
        tmp_path_factory.mktemp("study") / "everything",
        arms=[*router_arms(), *more_arms()],
        failed=(("hash", 2),),
        not_run=("switch_top1",),
        references={"ablation": "spectra"},
    )


def findings(run: Run) -> list[str]:
    return run.verb.summary(run).findings


def sections(run: Run) -> list[Section]:
    return run.verb.sections(run, Selection())


# --- findings


def test_a_claim_names_difference_interval_p_arms_and_seeds(run: Run):
    row = run.table("study_comparisons").query("question == 'main' and arm == 'loss_free'").iloc[0]
    assert findings(run)[0] == (
        f"loss_free minus top2 = −{-row['difference']:.3g} [−{-row['difference_low']:.3g}, "
        f"−{-row['difference_high']:.3g}] nats per token: better (Holm-corrected for 3 arms: "
        f"p {row['p_adjusted']:.2g}; 5 seeds)."
    )


def test_an_arm_that_cannot_be_told_comes_with_the_difference_that_would_have_been_seen(run: Run):
    row = run.table("study_comparisons").query("question == 'main' and arm == 'spectra'").iloc[0]
    sentence = findings(run)[1]
    assert sentence.startswith("Not distinguishable from top2 with 5 seeds: spectra; ")
    assert sentence.endswith(f": {row['detectable_difference']:.3g} nats.")


def test_no_arm_is_said_where_none_differs(tmp_path: Path):
    arms = [{**arm, "shift": 0.0} for arm in router_arms()]
    (said,) = findings(study_run(tmp_path / "run", arms=arms, seed=3))
    assert said.startswith("Not distinguishable from top2 with 5 seeds: ")


def test_arms_that_agree_in_every_seed_are_told_without_a_detectable_difference(tmp_path: Path):
    arms = [{**arm, "shift": 0.0, "spread": 0.0} for arm in router_arms(["top2", "no router"])]
    (sentence,) = findings(study_run(tmp_path / "run", arms=arms))
    assert sentence.endswith("top2 with 5 seeds: no router.")


def test_an_arm_with_a_failed_seed_says_on_how_many_it_was_compared(run: Run):
    told = " ".join(findings(run))
    assert "4 seeds: too few to claim anything about hash." in told
    assert "Missing seeds of top2: hash, compared on 4 seeds" in told
    assert (
        "1 of 85 trainings failed; the first, hash with seed 2: loss is not a number at step 40, layer 1."
        in told
    )
    assert "5 of 85 trainings were not run." in told


def test_ablations_are_told_against_their_own_reference(run: Run):
    start = "Ablation: spectra-GRU minus spectra = "
    assert any(said.startswith(start) and "nats per token: worse" in said for said in findings(run))


def test_a_sweep_says_how_many_settings_reach_the_load_that_is_aimed_at(run: Run):
    assert any(
        "Sweep: 2 of 4 settings end with a load CV below the target 0.1" in said for said in findings(run)
    )


def test_with_few_seeds_nothing_is_claimed(tmp_path: Path):
    (said,) = findings(study_run(tmp_path / "run", seeds=4))
    assert "4 seeds: too few to claim anything" in said
    assert "better" not in said
    assert "worse" not in said


def test_one_seed_is_told_without_an_interval(tmp_path: Path):
    run = study_run(tmp_path / "run", seeds=1)
    (said,) = findings(run)
    assert said.startswith("1 seed: too few")
    assert "[" not in said
    (training,) = [
        tab for tab in json.loads(page_content([run])["data"])["tabs"] if tab["name"] == "training"
    ]
    assert training["sections"]


def test_a_study_in_which_nothing_ran_says_so_and_draws_nothing(tmp_path: Path):
    run = study_run(tmp_path / "run", not_run=tuple(arm["name"] for arm in router_arms()))
    assert findings(run) == ["No arm can be compared with top2 yet.", "25 of 25 trainings were not run."]
    assert [len(section.figures) for section in sections(run)][:2] == [0, 0]


@pytest.mark.parametrize("worse", ["every arm", "hash"])
def test_an_arm_that_is_not_compared_has_its_loss_and_the_reason(tmp_path: Path, worse: str):
    run = study_run(tmp_path / "run", arms=router_arms(["top2", "spectra", "hash"]))
    runs = run.table("study_runs").assign(unigram_loss=9.0)
    runs.loc[(runs["arm"] == worse) | (worse == "every arm"), "unigram_loss"] = 0.0
    for name, frame in (("study_runs", runs), ("study_comparisons", compare(runs, "top2"))):
        write_table(TABLES[name], frame, run.path / f"{name}.parquet")
    said = " ".join(findings(run))
    assert ("No arm can be compared with top2; " in said) == (worse == "every arm")
    assert "yet" not in said
    assert f"unigram baseline {runs['unigram_loss'].mean():.3g}" in said
    for arm, losses in runs.groupby("arm")["validation_loss"]:
        words = f"{arm} {losses.mean():.3g} (does not beat the unigram baseline)"
        assert (words in said) == (worse in ("every arm", arm))


def test_a_study_that_is_not_done_warns_of_stopping_where_it_looks_best(run: Run):
    assert findings(Run(run.path, {**run.info, "status": "running"}))[0].startswith("This study is running")


# --- sections


def test_every_question_has_a_section_then_course_balance_and_cost(run: Run):
    found = sections(run)
    questions = ["question-main", "question-ablation", "question-sweep", "question-scaling"]
    assert [section.anchor for section in found] == [*questions, "curves", "balance", "cost"]
    figures = {section.anchor: [spec.name for spec, _ in section.figures] for section in found}
    assert figures["question-main"] == ["differences", "noise_and_spread", "difference_by_domain"]
    assert figures["question-sweep"] == ["differences", "by_value"]
    assert figures["cost"] == ["overhead_shares"]
    assert figures["curves"] == ["arms_by_step"]


def test_the_page_holds_every_figure_and_explains_every_column(run: Run):
    page = page_content([run])
    assert page["title"] == "everything: a study of 17 arms against top2"
    glossary = page["payloads"]["glossary"]
    explained = {entry["key"] for section in glossary for entry in section["entries"]}
    assert {"detectable_difference", "study_comparisons.p_adjusted", "noise_low", "component"} <= explained


def rows_of(run: Run, title: str) -> dict[str, dict[str, object]]:
    """The rows of a table of the page: arm -> head -> value."""
    tables = [table for section in sections(run) for table in section.tables]
    (table,) = [table for table in tables if table["title"] == title]
    heads = [column["name"] for column in table["columns"]]
    return {row[0]: dict(zip(heads, row, strict=True)) for row in table["rows"]}


def test_cells_without_a_run_say_so_and_what_is_known_before_stays(run: Run):
    rows = rows_of(run, "Load at the end of training")
    assert (rows["switch_top1"]["state"], rows["switch_top1"]["load_cv"]) == ("not run", None)
    assert (rows["hash"]["done"], rows["hash"]["trainings"]) == (4, 5)
    costs = rows_of(run, "Size, speed and memory")
    known = ("parameters_total", "parameters_trainable", "parameters_active", "flops_per_token")
    assert [costs["switch_top1"][name] for name in known] == [200_000, 200_000, 90_000, 250_000]
    assert costs["top2"]["relative_speed"] == 1.0
    assert "peak_memory_gb" not in costs["top2"]  # no GPU
    assert rows_of(run, "Stability over the last checkpoints")["top2"]["k_of_n"] == 2 / 8


def test_speed_and_overhead_stand_beside_the_studys_own_reference_though_ablations_have_another(run: Run):
    tables = study_tables(run)
    assert tables["study_comparisons"]["reference"].iloc[0] == "top2"
    assert "spectra" in set(tables["study_comparisons"]["reference"])


def test_names_of_arms_and_domains_do_not_act_in_figures(tmp_path: Path):
    evil = "<b>%{x}"
    arms = [*router_arms(["top2", "hash"]), {**router_arms(["x"])[0], "name": evil}]
    run = study_run(tmp_path / "run", arms=arms)
    documents = run.table("study_documents").replace({"domain": {"prose": evil}})
    write_table(TABLES["study_documents"], documents, run.path / "study_documents.parquet")
    for section in sections(run):
        for spec, tables in section.figures:
            figure = spec.draw(tables)
            assert "<b>%{x}" not in str(figure.data) + figure.caption + str(figure.layout)


def test_figures_are_drawn_by_question_and_axis(run: Run):
    assert {"differences", "arms_by_step", "overhead_shares"} <= set(run.figures())
    assert "by_value" not in run.figures()  # the first question has no axis
    assert run.draw("by_value", question="sweep").name == "by_value"
    sweep = next(section for section in sections(run) if section.anchor == "question-sweep")
    assert [spec.draw(tables).title for spec, tables in sweep.figures][1] == "Loss and load by epsilon"
    assert "spectra" not in run.draw("differences", question="ablation").layout["yaxis"]["categoryarray"]


def test_key_numbers_lead_with_the_best_arm(run: Run):
    first, *_ = numbers = run.verb.summary(run).key_numbers
    row = run.table("study_comparisons").query("arm == 'loss_free'").iloc[0]
    assert (first.name, first.value, first.chance) == ("loss_free minus top2", row["difference"], 0.0)
    assert first.word == "better"
    assert [number.value for number in numbers if number.name == "Trainings done"] == [79]


def test_coverage_says_what_was_trained(run: Run):
    first, second = run.verb.summary(run).coverage
    assert first == "17 arms under 5 seeds (0, 1, 2, 3, 4): 79 of 85 trainings done; reference top2"
    assert "2 layers of 8 experts, width 16, 300 steps of 2,048 tokens" in second


def test_a_study_without_comparisons_is_refused_with_a_remedy(run: Run, tmp_path: Path):
    import shutil

    shutil.copytree(run.path, tmp_path / "young")
    (tmp_path / "young" / "study_comparisons.parquet").unlink()
    with pytest.raises(BadInput, match=r"young: no comparison in this study yet; repeat its command"):
        report(tmp_path / "young")


# --- in a browser


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_page(opened, tmp_path: Path, width, scheme):
    from browsing import NO_WIDER, scroll_through

    arms = [
        *router_arms(["top2", "spectra", "hash"]),
        *(arm for arm in more_arms() if arm["question"] == "sweep"),
    ]
    path = report(study_run(tmp_path / "run", arms=arms, not_run=("hash",)), out=tmp_path / "report.html")
    page = opened(path, "#/training", width, scheme)
    scroll_through(page)
    expect(page.locator(".figure-slot:visible .plot.drawn")).to_have_count(3 + 2 + 1 + 1)
    assert page.evaluate(NO_WIDER)
    expect(page.locator("table", has_text="balanced random routing").first).to_contain_text("not run")
    head = page.locator("th a", has_text="verdict").first
    assert head.get_attribute("href").endswith("term=study_comparisons.verdict")  # not of a scan


def test_micro_batches_share_the_rows_of_a_step():
    train = {"steps": 10, "batch_size": 32, "micro_batches": 4, "sequence_length": 256, "learning_rate": 0.1}
    found = settings({"base": {"train": train}, "arms": [{"name": "top2", "overrides": {}}]})
    assert found.set_index("name")["value"].to_dict()["tokens_per_step"] == 8192
