"""The page "Results": rows and columns as published, every cell with a number or a reason."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import expect
from scipy import stats

from lab.shared_results import losses_of_five_seeds, study
from lab.study_runs import more_arms, router_arms, study_run, write_table
from moescope.lab.report_results import bases_section, stability_section
from moescope.lab.report_scaling import sizes_section, sweep_section
from moescope.lab.report_study import overlay, study_tables
from moescope.lab.results import Results
from moescope.reporting.page import page_content
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.verb import Section

PARTS = ("-Expression", "-GRU", "-SpecialityPenalty", "-Ortho", "-Repulsion", "-Quota", "-All")


def main_arms() -> list[dict]:
    arms = router_arms(["top2", "spectra", "switch_top1", "expert_choice", "hash", "dense", "dense_total"])
    arms[-1] |= {"shift": -0.2, "overrides": {"model": {"router": "dense"}}}
    return arms


def ablation_arms() -> list[dict]:
    spectra = {"question": "ablation", "overrides": {"model": {"router": "spectra"}}, "axes": {}}
    return [{**spectra, "name": f"spectra{part}", "shift": 0.01 * at} for at, part in enumerate(PARTS)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All parts but base models and sizes; hash was not run."""
    scaling = [arm for arm in more_arms() if arm["question"] == "scaling"]
    arms = [*main_arms(), *ablation_arms(), *scaling]
    folder = tmp_path_factory.mktemp("study") / "run"
    return study_run(folder, arms=arms, references={"ablation": "spectra"}, not_run=("hash",))


@functools.lru_cache(maxsize=4)
def page(*paths: Path) -> list[Section]:
    return overlay([Run.load(path) for path in paths])


def tables(*runs: Run) -> dict[str, dict]:
    """Table name -> its payload."""
    sections = page(*(run.path for run in runs))
    return {table["name"]: table for section in sections for table in section.tables}


def studies_text(*runs: Run) -> str:
    """Which studies there are, and how they were trained."""
    return page(*(run.path for run in runs))[-1].text


def text_of(name: str, *runs: Run) -> str:
    sections = page(*(run.path for run in runs))
    return next(one.text for one in sections if any(table["name"] == name for table in one.tables))


def test_answers_come_first_then_tables_in_the_papers_order(run: Run):
    found = [table["title"].split(":")[0] for section in page(run.path) for table in section.tables]
    assert found == [
        *(
            "6.10 Hypotheses",
            "H1 to H3 elsewhere",
            "Claims",
            "Claims",
            "Table 13",
            "6.1 Task performance",
            "6.1 Tasks of lm-eval",
            "Table 7",
            "Table 9",
            "Table 10",
            "Table 11",
        ),
        *("Sizes", "Options of SPECTRA and load balance", "Table 12", "6.7 Case studies"),
        "6.8 Failure modes",
        *("Effect of removing experts", "SoME's runs"),
    ]
    drawn = [spec.name for section in page(run.path) for spec, _ in section.figures]
    assert drawn == [
        *("expert_maps", "arms_validation_loss_by_step", "usage_areas", "arms_routing_entropy_by_step"),
        "quota_loads",
    ]


def test_a_study_has_the_tab_only_with_the_papers_method(run: Run, tmp_path: Path):
    def has_tab(of: Run) -> bool:
        names = page_content([of])["data"].split('"name":"')[1:]
        return any(name.startswith("results") for name in names)

    assert has_tab(run)
    assert not has_tab(study_run(tmp_path / "other", arms=router_arms(["top2", "loss_free"])))


def test_table_7_has_the_published_rows_and_chance_levels(run: Run):
    table = tables(run)["results_variants"]
    assert [row[0] for row in table["rows"]] == [
        *("SPECTRA-Full", "-Expression", "-GRU", "-SpecialityPenalty", "-OrthoConstraint"),
        *("-Repulsion", "-Quota", "-All"),
    ]
    for row in table["rows"]:
        assert row[1].endswith(f"({math.log(8):.3f})")
        assert row[2].endswith(f"({100 / 13:.1f})")  # (k − 1)/(2 (n − 1) − (k − 1)), k 2 of n 8
        assert row[4].endswith("of 10)")  # 5 seeds, 2 layers


def test_table_12_ends_with_the_ideal_and_says_what_was_not_run(run: Run):
    rows = {row[0]: row[1:] for row in tables(run)["results_stability"]["rows"]}
    assert list(rows)[-1] == "Ideal"
    assert rows["Ideal"] == ["100", "0", "1"]
    assert rows["Hash"] == ["not run"] * 3
    assert rows["SPECTRA"][0].endswith("(30.0)")
    assert "Hash: not run" in text_of("results_stability", run)


def with_layers(run: Run, metric: str, values: dict[tuple[str, int, int], float]) -> dict[str, pd.DataFrame]:
    """The run's tables with a metric of study_layers by arm, seed and layer; its chance level is 3."""
    rows = [
        {
            "arm": arm,
            "seed": seed,
            "layer": layer,
            "metric": metric,
            "domain": "",
            "value": value,
            "chance": 3.0,
        }
        for (arm, seed, layer), value in values.items()
    ]
    found = study_tables(run)
    return {**found, "study_layers": pd.concat([found["study_layers"], pd.DataFrame(rows)])}


def test_table_12_has_the_statistics_of_ffn_outputs_where_they_were_measured(run: Run):
    values = {("spectra", seed, layer): 4.0 + seed + 2 * layer for seed in range(2) for layer in range(2)}
    (table,) = stability_section(with_layers(run, "ffn_kurtosis", values)).tables
    place = [column["title"] for column in table["columns"]].index("FFN output, kurtosis")
    rows = {row[0]: row[place] for row in table["rows"]}
    half = stats.t.ppf(0.975, 1) * 0.5  # seeds have 5 and 6
    assert rows["SPECTRA"] == f"5.500 ± {half:.3f} (3.000)"
    assert rows["Switch Top-2"] == "not measured"
    assert rows["Hash"] == "not run"
    assert len(tables(run)["results_stability"]["columns"]) == 4
    assert "FFN outputs: not measured" in text_of("results_stability", run)


def test_a_sweep_reaches_its_target_by_the_worst_layer(tmp_path: Path):
    arms = [arm for arm in more_arms() if arm["question"] == "sweep"]
    run = study_run(tmp_path / "sweep", [*router_arms(["spectra"]), *arms], seeds=2)
    names = [arm["name"] for arm in arms]
    worst = dict(zip(names, (0.05, 0.099, 0.11, 0.3), strict=True))
    values = {
        (name, seed, layer): value - 0.04 * layer
        for name, value in worst.items()
        for seed in range(2)
        for layer in range(2)
    }
    (table,) = sweep_section(with_layers(run, "cv", values)).tables
    found = {row[0]: (row[1].split(" ")[0], row[2]) for row in table["rows"]}
    reached = {name: (f"{value:.3f}", "yes" if value < 0.1 else "no") for name, value in worst.items()}
    assert found == reached


def test_perplexity_is_the_exponential_of_the_loss(run: Run):
    rows = {row[0]: row[1:] for row in tables(run)["results_performance"]["rows"]}
    loss = run.table("study_runs").query("arm == 'top2'")["validation_loss"].mean()
    assert rows["top2"][:2] == [rows["top2"][0], f"{math.exp(loss):.2f}"]
    assert rows["top2"][0].startswith(f"{loss:.4f} ± ")
    assert rows["hash"][0] == "not run"
    assert "spectra-GRU" not in rows


def test_table_9_adds_up(run: Run):
    rows = tables(run)["results_overhead"]["rows"]
    *parts, total, _ = rows
    assert sum(row[1] for row in parts) == pytest.approx(total[1])
    assert sum(float(row[3].split()[0]) for row in parts) == pytest.approx(100, abs=0.3)


def test_table_11_has_a_slope_per_doubling(run: Run):
    *rows, trend = tables(run)["results_experts"]["rows"]
    assert [row[0] for row in rows] == ["4", "16", "32"]
    means = run.table("study_runs").groupby("arm")["validation_loss"].mean()
    y = [means[f"top2 experts={count}"] for count in (4, 16, 32)]
    # least squares at 2, 4 and 5 doublings, by hand: Σ (x − 11/3) y / Σ (x − 11/3)²
    slope = (-5 / 3 * y[0] + 1 / 3 * y[1] + 4 / 3 * y[2]) / (25 / 9 + 1 / 9 + 16 / 9)
    assert trend[1] == f"{slope:+.4f}".replace("-", "−")


def test_what_was_not_run_says_why(run: Run, tmp_path: Path):
    assert "Not run: no study on this page trains routers of existing models" in text_of("results_bases", run)
    assert {cell for row in tables(run)["results_bases"]["rows"] for cell in row[1:]} == {"not run"}
    bare = study_run(tmp_path / "bare", arms=router_arms(["spectra", "loss_free"]))
    for name in ("results_variants", "results_significance", "results_stability", "results_experts"):
        table = tables(bare)[name]
        assert "ot run" in text_of(name, bare)
        assert any("not run" in row for row in table["rows"])


def test_no_cell_of_text_is_empty_without_a_reason(run: Run):
    for name, table in tables(run).items():
        kinds = [column["kind"] for column in table["columns"]]
        allowed = {"results_significance": 6, "results_experts": 3, "results_hypotheses": 3}
        allowed |= {"results_hash": 3, "results_some": 3, "results_effects": 3}
        for row in table["rows"]:
            for at, (kind, cell) in enumerate(zip(kinds, row, strict=True)):
                if kind == "text" and at < allowed.get(name, len(row)) and "baseline" not in str(row[0]):
                    assert cell or (name == "results_performance" and row[1] == "not run"), (name, row)


def test_studies_of_separate_runs_make_one_page(run: Run, tmp_path: Path):
    main = study_run(tmp_path / "main", arms=main_arms())
    full = {**ablation_arms()[0], "name": "spectra", "shift": 0.0}
    ablation = study_run(tmp_path / "ablation", arms=[full, *ablation_arms()])
    found = tables(main, ablation)
    assert all("not run" not in row for row in found["results_variants"]["rows"])
    assert all("not run" not in row for row in found["results_stability"]["rows"])
    assert (
        "main (35 of 35 trainings: routers, pairs of arms); ablation (40 of 40 trainings: ablations)"
        in studies_text(main, ablation)
    )
    verdicts = {row[0][:2]: row[1] for row in found["results_hypotheses"]["rows"]}
    assert list(verdicts) == [f"H{place}" for place in range(1, 8)]
    assert set(verdicts.values()) <= {"confirmed", "refuted", "undecided", "not testable"}


def test_an_unfinished_study_has_no_stars_and_table_7_has_only_shared_seeds(tmp_path: Path):
    full = {**ablation_arms()[0], "name": "spectra", "shift": 0.0}
    ablation = study_run(tmp_path / "ablation", arms=[full, *ablation_arms()], seeds=8)
    runs = ablation.table("study_runs")
    waiting = (runs["seed"] == 7) & (runs["arm"] != "spectra") | (runs["seed"] == 6) & (
        runs["arm"] == "spectra-GRU"
    )
    runs.loc[waiting, "status"] = "not run"
    write_table("study_runs", runs, ablation.path / "study_runs.parquet")
    found = tables(ablation)
    rows = {row[0]: row for row in found["results_significance"]["rows"]}
    assert rows["SPECTRA-Full vs. -GRU"][4] == "unfinished: 6 of 8 seeds"
    assert rows["SPECTRA-Full vs. -All"][3:5] == ["none", "unfinished: 7 of 8 seeds"]
    assert rows["SPECTRA-Full vs. -All"][8] == 7
    losses = runs[runs["seed"] < 7].pivot(index="seed", columns="arm", values="validation_loss")
    gain = (losses["spectra-All"] - losses["spectra"]).mean()
    assert rows["SPECTRA-Full vs. -All"][1].startswith(f"{gain:.4f} ± ".replace("-", "−"))
    assert found["results_hypotheses"]["rows"][4][1].startswith("unfinished: ")
    assert all(row[4].endswith("of 12)") for row in found["results_variants"]["rows"])  # 6 seeds, 2 layers
    assert f"{64 - 8} of 64 trainings" in studies_text(ablation)


def test_table_13_counts_failed_trainings_and_names_collapsed_layers(tmp_path: Path):
    failed = (("switch_top1", 1), ("switch_top1", 4), ("spectra", 0))
    run = study_run(tmp_path / "main", arms=main_arms(), seeds=8, failed=failed)
    layers = run.table("study_layers")
    hit = (layers["arm"] == "switch_top1") & (layers["metric"] == "min_over_mean")
    layers.loc[hit & (layers["layer"] == 1), "value"] = 0.0
    write_table("study_layers", layers, run.path / "study_layers.parquet")
    runs = run.table("study_runs")
    runs["flops_per_token"] = runs["arm"].map({"spectra": 200.0}).fillna(100.0)
    write_table("study_runs", runs, run.path / "study_runs.parquet")
    page.cache_clear()
    assert {row[6] for row in tables(run)["results_significance"]["rows"][:4]} == {0.5}
    rows = {row[0]: row[8:] for row in tables(run)["results_significance"]["rows"]}
    assert rows["SPECTRA vs. Switch Top-1"] == [5, 3, "6 of 12 layers of switch_top1 collapsed"]
    assert rows["SPECTRA vs. Switch Top-2"] == [7, 1, ""]


def test_a_baseline_of_equal_flops_is_named_with_its_parameters(tmp_path: Path):
    wide = {**main_arms()[0], "name": "top2_flops"}
    full = {**ablation_arms()[0], "name": "spectra", "shift": 0.0}
    run = study_run(tmp_path / "ablation", arms=[full, *ablation_arms(), wide])
    runs = run.table("study_runs")
    runs.loc[runs["arm"] == "top2_flops", "parameters_total"] = 378_000  # spectra: 200,000
    write_table("study_runs", runs, run.path / "study_runs.parquet")
    titles = [row[0] for row in tables(run)["results_significance"]["rows"]]
    assert "SPECTRA vs. Top-2 of equal FLOPs (1.89 times the parameters)" in titles


def test_a_study_of_another_kind_may_be_called_tuning(tmp_path: Path):
    named = {**main_arms()[0], "name": "top2 act=gelu"}
    run = study_run(tmp_path / "tuning", arms=[*main_arms(), named])
    assert "has 300 steps of 2,048 tokens" in studies_text(run)
    assert "were tuned" not in studies_text(run)


def test_figure_3_begins_at_a_fifth_of_the_steps(run: Run):
    (drawn,) = (
        spec.draw(frames)
        for section in page(run.path)
        for spec, frames in section.figures
        if spec.name == "arms_validation_loss_by_step"
    )
    assert min(min(trace["x"]) for trace in drawn.data) == 100  # logged at 0, 50, ..., 300


def test_every_figure_is_drawn_with_its_numbers(run: Run):
    for section in page(run.path):
        for spec, frames in section.figures:
            figure = spec.draw(frames)
            assert figure.data
            assert len(figure.title.split()) <= 8
    usage = run.draw("usage_areas", question="ablation")
    experts = 8
    assert usage.slider.values[0] == "SPECTRA-Full"
    assert len(usage.data) == experts * len(usage.slider.values)
    assert sum(trace["y"][-1] for trace in usage.data[:experts]) == pytest.approx(1)


# --- in a browser


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_the_page_draws_all_its_figures_and_fits_its_width(browser, run: Run, tmp_path: Path, width, scheme):
    from reporting.test_browser import scroll_through

    path = report(run, out=tmp_path / "report.html")
    troubles: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    window = context.new_page()
    window.on("console", lambda message: troubles.append(message.text))
    window.on("pageerror", lambda error: troubles.append(str(error)))
    window.goto(path.as_uri() + "#/results")
    scroll_through(window)
    expect(window.locator(".figure-slot:visible .plot.drawn")).to_have_count(5)
    expect(window.locator(".section:visible h2").first).to_have_text("Hypotheses")
    assert window.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    context.close()
    assert troubles == []


def made_up(losses: dict[str, list[float]], **more: pd.DataFrame) -> Results:
    return Results.of([{**study(losses, "scaling"), **more}])


def test_base_models_without_own_rows_have_none_drawn_anew():
    five = losses_of_five_seeds()
    names = {"top2": "spectra", "spectra": "top2", "top2, new rows": "dense"}
    losses = {f"existing MoE: {router}": five[of] for router, of in names.items()}
    losses |= {f"dense small: {router}": five["dense"] for router in ("top2", "spectra")}
    section = bases_section(made_up(losses).bases)
    heads = [column["title"] for column in section.tables[0]["columns"]]
    rows = {row[0]: dict(zip(heads, row, strict=True)) for row in section.tables[0]["rows"]}
    assert rows["existing MoE"]["top2, new rows, loss"].startswith(f"{np.mean(five['dense']):.4f}")
    gain = np.mean([(one - other) / one for one, other in zip(five["spectra"], five["top2"], strict=True)])
    column = next(head for head in heads if head.startswith("improvement"))
    assert rows["existing MoE"][column].startswith(f"−{-100 * gain:.2f} ± ")  # over Top-2 that was kept
    assert rows["dense small"]["top2, new rows, loss"] == "as Top-2"
    assert "dense small: top2, new rows" not in section.text


def test_every_arm_of_a_size_has_a_row_in_order_and_worse_ones_are_named():
    five = losses_of_five_seeds()
    losses = {"top2 L": five["dense"], "spectra S": five["top2"], "top2 S": five["spectra"]}
    places = [(arm, "size", None, arm[-1]) for arm in losses]
    axes = pd.DataFrame(places, columns=["arm", "axis", "value", "label"])
    found = made_up(losses, study_axes=axes)
    tables = found.sizes
    active = tables["study_runs"]["arm"].str[-1].map({"S": 1e6, "L": 2.5e6})
    tables["study_runs"]["parameters_active"] = active
    section = sizes_section(found)
    rows = {row[0]: row for row in section.tables[0]["rows"]}
    assert list(rows) == ["spectra S *", "top2 S *", "top2 L *"]
    assert rows["top2 L *"][1] == "2.5"
    assert rows["top2 L *"][3].startswith(f"{np.mean(five['dense']):.4f} ± ")
    assert section.text.endswith("top2 L.")
    tables["study_runs"].loc[tables["study_runs"]["arm"] == "top2 L", "validation_loss"] = 1.0
    assert "top2 L" not in sizes_section(found).text


def test_the_method_at_the_rates_of_the_baseline_stands_below_the_sizes():
    def sizes(**arms: float) -> dict[str, pd.DataFrame]:
        rates = {arm.replace("_", " "): rate for arm, rate in arms.items()}
        axes = [(arm, "size", None, arm.split()[1]) for arm in rates]
        return {
            **study({arm: losses_of_five_seeds()["top2"] for arm in rates}),
            "study_axes": pd.DataFrame(axes, columns=["arm", "axis", "value", "label"]),
            "study_settings": pd.DataFrame(
                [(arm, "learning_rate", rate) for arm, rate in rates.items()],
                columns=["arm", "name", "value"],
            ),
        }

    own = sizes(top2_S=0.002, top2_L=0.001, spectra_S=0.004, spectra_L=0.002)
    found = Results.of([own, sizes(spectra_L_low=0.001, dense_L_low=0.001)])
    rows = [row[:3] for row in sizes_section(found).tables[0]["rows"]]
    assert [row[0] for row in rows[:4]] == ["top2 S *", "top2 L *", "spectra S *", "spectra L *"]
    assert rows[4:] == [["spectra L low (size L)", "0.0", "0.001"]]


def test_a_wide_study_stands_below_the_sizes(tmp_path: Path):
    main = study_run(tmp_path / "main", router_arms(["top2", "spectra"]), 5)
    arms = router_arms(["topk", "spectra"])
    for arm in arms:
        arm["overrides"]["model"]["d_model"] = 512
    other = study_run(tmp_path / "wide", arms, 5)
    found = tables(main, other)
    (first, second) = found["results_sizes"]["rows"]
    assert first[0].startswith("topk, width 512 with ")
    assert second[0].startswith("spectra, width 512 with ")
    losses = other.table("study_runs").groupby("arm")["validation_loss"].mean()
    assert second[3].startswith(f"{losses['spectra']:.4f} ± ")
