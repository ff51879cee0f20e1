"""Pages made of the results of studies: no number is typed in, and every page has the same verdicts."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from lab.shared_results import NOISE, sizes_at_one_rate, study
from lab.study_runs import more_arms, router_arms, study_run, write_table
from moescope.lab.report_study import overlay
from moescope.run import Run

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("findings.md", "results.md", "routers.md")
# digits in names: hypotheses, published routers, arms, option names
NAMES = re.compile(r"\bH\d\b|\b[AB]\d\b|\bTop-\d\b|\btop2\w*|\bx4\b|`[^`]*`")


def load(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    return load(DOCS / "findings.py")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies as studies/run.py stores them, some claims near the level."""
    folder = tmp_path_factory.mktemp("studies")
    results = load(DOCS.parent / "studies" / "run.py").results
    ablations = [{**arm, "question": "main"} for arm in router_arms(["spectra", "top2"])]
    for name, shift in (("Expression", 0.006), ("GRU", 0.007), ("SpecialityPenalty", 0.02), ("Ortho", 0.05)):
        ablations.append({**more_arms()[0], "name": f"spectra-{name}", "shift": shift})
    designs = {
        "main": router_arms(["top2", "spectra", "hash", "switch_top1", "dense"]),
        "ablation": ablations,
    }
    for name, arms in designs.items():
        (folder / name).mkdir()
        run = study_run(folder / name / "run", arms, seeds=8, seed=len(name))
        runs = run.table("study_runs")
        generator = np.random.default_rng(3)
        method = runs["arm"] == "spectra"
        runs["consistency"] = 0.8 + 0.01 * method + 0.01 * generator.standard_normal(len(runs))
        runs.loc[method, "flops_per_token"] *= 2
        runs["unigram_loss"] = 2.5
        write_table("study_runs", runs, run.path / "study_runs.parquet")
        results(name, folder / name / "run").to_parquet(folder / name / "results.parquet")
    return folder


def template(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def typed_numbers(text: str) -> list[str]:
    return re.findall(r".{0,20}\d.{0,20}", NAMES.sub("", text))


# --- no number is typed in


@pytest.mark.parametrize("page", PAGES)
def test_no_number_stands_in_a_page(page: str):
    assert typed_numbers(template(page)) == []


@pytest.mark.parametrize("page", ["findings.md", "routers.md"])
def test_without_results_a_page_has_no_number(findings: ModuleType, page: str):
    text = findings.render(template(page), findings.read_results(Path("no such folder")))
    assert typed_numbers(text) == []
    assert "not run" in text
    assert "confirmed |" not in text


def test_without_results_every_figure_and_cell_says_so(findings: ModuleType):
    page = findings.render(template("results.md"), findings.read_results(Path("no such folder")))
    page += findings.render(template("findings.md"), findings.read_results(Path("no such folder")))
    assert (
        page.count("*Figure: not run.*") == len(sys.modules["findings_figures"].CHARTS) + 1
    )  # significance is on both
    assert "<svg" not in page
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith(("| Ideal", "| ---", "| not run |")):  # published
            assert not re.search(r"\| [−\d.]+( ±|  ?\|)", line.split("|", 2)[2]), line


@pytest.mark.parametrize("typed", ["better by 0.02 nats", '{{ "5 seeds" }}', "{{ 0.02 }}"])
def test_a_number_that_was_typed_in_is_found(typed: str):
    assert typed_numbers(f"{template('findings.md')}\n{typed}\n")


# --- one p and one verdict per claim


def hypotheses_of(page: str) -> dict[str, tuple[str, ...]]:
    """Return verdict, number and p of each hypothesis on the page."""
    found = {}
    for line in html.unescape(page).replace("\u00a0", " ").splitlines():
        if re.match(r"\| H\d", line):
            claim, verdict, evidence = line.strip("| ").split(" | ")
            number = re.search(
                r"−?\d\.\d{4} ± \d\.\d{4}|not run|FLOPs \S+ times(?:, block time \S+ times)?", evidence
            ).group()
            p = re.search(r"p \(Holm\) ([^,]+),", evidence)
            found[claim[:2]] = (verdict, number, p.group(1) if p else "")
    return found


def test_the_report_and_the_site_judge_every_claim_alike(findings: ModuleType, store: Path):
    page = hypotheses_of(findings.render(template("findings.md"), findings.read_results(store)))
    runs = [Run.load(folder / "run") for folder in sorted(store.iterdir())]
    sections = {section.anchor: section for section in overlay(runs)}
    rows = sections["results-answers"].tables[0]["rows"]
    assert page == {row[0][:2]: tuple(row[1:4]) for row in rows}
    assert {verdict for verdict, *_ in page.values()} == {"undecided", "confirmed", "refuted", "not testable"}
    # H1 is a row of the significance table too
    (same,) = (row for row in sections["results-significance"].tables[0]["rows"] if "Switch Top-2" in row[0])
    assert (same[1], same[3]) == page["H1"][1:]


def test_claims_rest_on_the_stored_results(findings: ModuleType, store: Path, tmp_path: Path):
    changed = pd.read_parquet(store / "main" / "results.parquet")
    better = (changed["arm"] == "spectra") & (changed["metric"] == "validation_loss")
    (tmp_path / "main").mkdir()
    changed["value"] -= 0.3 * better
    changed.to_parquet(tmp_path / "main" / "results.parquet")
    before = hypotheses_of(findings.render(template("findings.md"), findings.read_results(store)))
    after = hypotheses_of(findings.render(template("findings.md"), findings.read_results(tmp_path)))
    assert after["H1"][0] == "confirmed"
    moved = [float(one["H1"][1].split(" ")[0].replace("−", "-")) for one in (before, after)]
    assert moved[1] - moved[0] == pytest.approx(0.3, abs=2e-4)


# --- figures


def test_every_table_of_the_results_has_a_figure_and_its_points_are_in_place(
    findings: ModuleType, store: Path
):
    studies = findings.read_results(store)
    page = findings.render(template("results.md"), studies)
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page)]
    titles = [drawing.get("aria-label") for drawing in drawings]
    for word in (
        "minus SPECTRA",
        "loss",
        "overlap",
        "block",
        "consistency",
        "Rare",
        "outputs",
        "slots",
    ):
        assert any(word in title for title in titles), word
    (overall,) = (one for one in drawings if one.get("aria-label").startswith("All trained domains"))
    runs = studies[1]["study_runs"]
    runs = runs[runs["validation_loss"] < runs["unigram_loss"]]
    assert len(runs) < 5 * 8
    means = runs.groupby("arm")["validation_loss"].mean().sort_values()
    names = [one.text for one in overall.iter("text") if one.text in means.index]
    assert names == list(means.index)
    places = np.array([float(one.get("cx")) for one in overall.iter("circle")])
    ticks = [one for one in overall.iter("text") if re.fullmatch(r"\d\.\d+", one.text)]
    line = np.polyfit([float(one.text) for one in ticks], [float(one.get("x")) for one in ticks], 1)
    assert places == pytest.approx(np.polyval(line, means.to_numpy()), abs=1.0)


def test_charts_of_a_single_seed_and_of_equal_values_are_drawn(findings: ModuleType):
    charts = sys.modules["charts"]
    one = findings.Estimate(2.0, float("nan"), 1)
    svg = charts.Dots("a < b", [("top2", one), ("hash", one), ("some", None)]).svg()
    assert len(ElementTree.fromstring(svg).findall("circle")) == 2
    assert "not run" in svg
    assert charts.Dots("none", [("some", None)]).svg() == ""


def test_a_value_far_from_all_others_is_written_at_the_edge(findings: ModuleType):
    values = [3.70, 3.72, 3.73, 3.75, 3.77, 3.96]
    rows = [(f"arm {value}", findings.Estimate(value, 0.001, 5)) for value in values]
    drawn = ElementTree.fromstring(sys.modules["charts"].Dots("loss", rows).svg())
    places = [float(one.get("cx")) for one in drawn.iter("circle")]
    assert len(places) == 5
    assert places[-1] - places[0] > 150  # of 325 pixels
    assert [one.text for one in drawn.iter("text") if "→" in one.text] == ["3.96 →"]


def test_a_far_value_for_which_the_line_makes_room_is_drawn(findings: ModuleType):
    values = [0.70, 0.72, 0.73, 0.75, 0.77, 1.0]
    rows = [(f"arm {value}", findings.Estimate(value, 0.001, 5)) for value in values]
    drawn = ElementTree.fromstring(sys.modules["charts"].Dots("consistency", rows, 1.0).svg())
    places = [float(one.get("cx")) for one in drawn.iter("circle")]
    assert len(places) == len(values)
    assert places[-1] == max(places)


def test_the_routers_page_lists_losses_paired_with_the_reference(findings: ModuleType, store: Path):
    studies = findings.read_results(store)
    page = findings.render(template("routers.md"), studies).replace("\u00a0", " ")
    runs = studies[1]["study_runs"]
    counted = runs[runs["validation_loss"] < runs["unigram_loss"]]
    losses = counted.pivot(index="seed", columns="arm", values="validation_loss")
    row = next(line for line in page.splitlines() if line.startswith("| hash |"))
    assert f"{losses['hash'].mean():.4f} ±" in row
    assert f"{(losses['hash'] - losses['top2']).mean():.4f} ±" in row


def test_a_task_of_lm_eval_and_an_existing_model_are_shown(findings: ModuleType):
    rows = [("dense, upcycled: top2", seed, 3.0 + 0.1 * seed, 0.5) for seed in range(3)]
    rows += [("dense, upcycled: spectra", seed, 2.7 + 0.1 * seed, 0.75) for seed in range(3)]
    keys = {"study": "existing", "question": "main", "status": "done", "layer": None, "domain": ""}
    long = pd.DataFrame(
        [
            {**keys, "arm": arm, "seed": seed, "metric": metric, "value": value, "chance": np.nan}
            for arm, seed, loss, _ in rows
            for metric, value in (("validation_loss", loss), ("parameters_active", 2e6))
        ]
    )
    tables = findings.numbers.from_long(long)
    scores = [{"arm": arm, "seed": seed, "value": accuracy} for arm, seed, _, accuracy in rows]
    tables["study_tasks"] = pd.DataFrame(scores).assign(
        task="brackets", metric="acc", documents=40, chance=0.25
    )
    page = findings.render(template("results.md"), [tables])
    page = page.replace("\u00a0", " ")
    (base,) = (line for line in page.splitlines() if line.startswith("| dense, upcycled |"))
    gain = np.mean([0.3 / (3.0 + 0.1 * seed) for seed in range(3)])
    assert f"| {100 * gain:.2f} ±" in base
    assert "| not run | 3.1000 ± " in base  # untouched
    assert "dense, upcycled: untouched" in page.replace("SPECTRA", "spectra")
    assert "| dense, upcycled: spectra | 0.750 ± 0.000 (0.250) |" in page
    assert "2.00 million active parameters, 40 documents" in page
    assert "lm-eval: not run" not in page
    assert re.search(r"SPECTRA vs. Top-2, dense, upcycled \| 0.3000 ± 0.0000 .* too few seeds", page)


# --- the first lines


def test_the_first_lines_say_what_longer_trainings_change(findings: ModuleType):
    noise = np.array([0.01, -0.02, 0.015, 0.0, -0.01])
    losses = {"top2": 2.5 + noise, "hash": 2.0 - noise, "spectra": 2.6 - 2 * noise}
    losses |= {"top2 x4": 2.0 + noise, "hash x4": 2.25 - 2 * noise}
    text = first_lines(findings, {arm: list(values) for arm, values in losses.items()})
    difference = 3 * noise - 0.25
    half = stats.t.ppf(0.975, 4) * difference.std(ddof=1) / np.sqrt(5)
    assert f"worse by {-difference.mean():.3f} ± {half:.3f} in `main` (refuted)" in text


def test_the_choices_that_a_longer_training_keeps_stand_beside_those_of_a_short_one(findings: ModuleType):
    rows = [
        {"arm": arm, "seed": seed, "metric": metric, "value": value + 0.1 * seed}
        for arm, kept in (("top2", 0.6), ("top2 x4", 0.7), ("hash x4", 1.0))
        for seed in range(2)
        for metric, value in (("validation_loss", 2.0), ("consistency", kept))
    ]
    long = pd.DataFrame(rows).assign(study="mine", question="main", status="done", layer=None, domain="")
    results = findings.Results.of([findings.numbers.from_long(long.assign(chance=np.nan))])
    assert findings.moving_choices(results) == "65 %, after four times the steps 75 % (`mine`)"


def first_lines(findings: ModuleType, losses: dict[str, list[float]]) -> str:
    runs = [
        {"study": "main", "arm": arm, "seed": seed, "status": "done", "layer": None}
        | {
            "question": "scaling" if "x4" in arm else "main",
            "domain": domain,
            "metric": "validation_loss",
            "value": loss,
            "chance": np.nan,
        }
        for arm, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
        for domain in ("", "code")
    ]
    return findings.headline(findings.Results.of([findings.numbers.from_long(pd.DataFrame(runs))]))


@pytest.mark.parametrize(
    ("gain", "seeds", "words"),
    [
        (0.3, 5, "predicts better than `top2` (better by 0.30"),
        (-0.3, 5, "predicts worse than `top2` (worse by 0.299"),
        (0.0, 5, "is not distinguishable from `top2`"),
        (0.3, 2, "(not testable) against `top2`"),
    ],
)
def test_the_first_lines_say_what_the_verdict_says(findings: ModuleType, gain: float, seeds: int, words: str):
    noise = np.array([0.01, -0.02, 0.015, 0.0, -0.01])[:seeds]
    base = np.array([2.5, 2.4, 2.6, 2.55, 2.45])[:seeds]
    losses = {"top2": base, "spectra": base - gain + noise, "hash": base - 0.5 + noise[::-1]}
    text = first_lines(findings, {arm: list(values) for arm, values in losses.items()})
    assert words in text
    best = f"`hash`, {losses['hash'].mean():.3f} nats per token, against {base.mean():.3f} of `top2` "
    assert f"{best}(better by 0.50" in text


def test_claims_close_to_the_level_are_named(findings: ModuleType, store: Path, monkeypatch):
    results = findings.Results.of(findings.read_results(store))
    claims = {one.name: one.number for one in findings.hypotheses(results) if one.number}
    h1 = claims["H1"].p_adjusted
    monkeypatch.setattr(findings, "LEVEL", 1.2 * h1)
    assert "H1: " in findings.close_claims(results)
    monkeypatch.setattr(findings, "LEVEL", 1.3 * h1)
    assert "H1: " not in findings.close_claims(results)


# --- what limits the claims


def test_the_paragraph_on_conditions_is_made_of_the_stored_studies(findings: ModuleType):
    """Against the study files and tuned.json, which the pages do not read."""
    studies = DOCS.parent / "studies"
    tuned = json.loads((studies / "tuned.json").read_text())
    results = findings.Results.of(findings.read_results())
    conditions = sys.modules["moescope.lab.results_conditions"]
    left = {
        router: {name: tuned["best"][router][name] for name in of}
        for router, of in tuned["edges_left"].items()
    }
    assert conditions.at_edge(results) == left
    files = [tomllib.loads(file.read_text()) for file in sorted(studies.glob("tuning_*/study.toml"))]
    arms = {name: arm for file in files for name, arm in file["arms"].items()}
    counts = [sum(name.startswith(f"{router} ") for name in arms) for router in tuned["best"]]
    combined = []
    for router, best in tuned["best"].items():
        same = [
            arm
            for name, arm in arms.items()
            if name.startswith(f"{router} ")
            and arm["train"]["learning_rate"] == best["learning_rate"]
            and best.items() <= {**DEFAULTS.get(router, {}), **arm["train"], **options(arm)}.items()
        ]
        combined += [] if same else [router]
    assert conditions.untrained_combinations(results) == sorted(combined)
    train = tomllib.loads((studies / "main" / "study.toml").read_text())["base"]["train"]
    long = pd.read_parquet(studies / "main" / "results.parquet")
    slopes = -long[long["metric"] == "loss_slope"].groupby("arm")["value"].mean()
    paragraph = conditions.conditions(results)
    for name in ("sweep", "causal", "tasks"):
        steps = tomllib.loads((studies / name / "study.toml").read_text())["base"]["train"]["steps"]
        assert f"{name} {steps}" in paragraph
    for words in (
        f"{train['steps']:,} steps of {train['batch_size'] * train['sequence_length']:,} tokens",
        f"{slopes.min():.2f} to {slopes.max():.2f} nats",
        f"{len(files[0]['seeds'])} seeds of {files[0]['base']['train']['steps']} steps",
        f"{min(counts)} to {max(counts)} values",
    ):
        assert words in paragraph
    for page in PAGES:
        shown = findings.render(template(page), findings.read_results())
        assert findings.cell(paragraph) in shown, page


DEFAULTS = {"loss_free": {"rate": 0.001}}  # of the routers whose default won


def options(arm: dict) -> dict:
    return arm["model"].get("router_options", {})


def test_trainings_without_any_number_are_read_from_the_run(findings: ModuleType, tmp_path: Path):
    (tmp_path / "main").mkdir()
    failed, waiting = (("hash", 3),), ("dense",)
    run = study_run(tmp_path / "main" / "run", router_arms(["top2", "spectra", "hash", "dense"]), 6)
    runs = run.table("study_runs")
    long = load(DOCS.parent / "studies" / "run.py").results("main", run.path)
    lost = (runs["arm"] == "dense") | (runs["arm"] == "hash") & (runs["seed"] == 3)
    keys = pd.MultiIndex.from_frame(runs.loc[lost, ["arm", "seed"]])
    long = long[~pd.MultiIndex.from_frame(long[["arm", "seed"]]).isin(keys)]
    long.to_parquet(tmp_path / "main" / "results.parquet")
    runs.loc[runs["arm"] == waiting[0], "status"] = "not run"
    runs.loc[(runs["arm"] == failed[0][0]) & (runs["seed"] == failed[0][1]), "status"] = "failed"
    write_table("study_runs", runs, run.path / "study_runs.parquet")
    page = findings.render(template("routers.md"), findings.read_results(tmp_path))
    assert "18 of 24 trainings" in page
    rows = {line.split(" | ")[0]: line.strip("| ").split(" | ") for line in page.splitlines() if "|" in line}
    assert rows["| hash"][-2:] == ["5", "1"]
    assert rows["| top2"][-2:] == ["6", "0"]
    assert rows["| hash"][3] == "unfinished: 5 of 6 seeds"


def test_the_routers_page_shows_cost_and_corrected_p(findings: ModuleType, store: Path):
    studies = findings.read_results(store)
    page = findings.render(template("routers.md"), studies).replace("\u00a0", " ")
    rows = {line.split(" | ")[0]: line.split(" | ") for line in page.splitlines() if line.startswith("| ")}
    assert rows["| spectra"][4:6] == ["0.50", "0.09"]  # 2 x 250,000 FLOPs, 90,000 parameters
    tests = findings.Results.of(studies).tests
    p = [one.p_value for one in tests.values() if one and one.seeds >= 5 and one.p_value <= 1]
    dense = next(one for key, one in tests.items() if key == ("routers", "dense"))
    order = sorted(p)
    steps = [(len(p) - at) * value for at, value in enumerate(order) if value <= dense.p_value]
    assert dense.p_adjusted == pytest.approx(min(max(steps), 1.0))
    assert rows["| dense"][3] == findings.p_text(dense.p_adjusted)
    losses = studies[1]["study_runs"].query("validation_loss < unigram_loss")
    losses = losses.pivot(index="seed", columns="arm", values="validation_loss")
    assert rows["| spectra"][2].startswith(
        f"{(losses['spectra'] - losses['top2']).mean():.4f}".replace("-", "−")
    )


def test_collapsed_layers_of_all_routers_are_counted(findings: ModuleType):
    long = pd.read_parquet(DOCS.parent / "studies" / "main" / "results.parquet")
    runs = long[long["layer"].isna()].pivot_table(index="arm", columns="metric", values="value")
    page = findings.counts_table(findings.Results.of(findings.read_results()))
    shown = re.findall(r"([\w\\]+) (\d+)\s+of (\d+)", page)
    found = {arm.replace("\\", ""): (int(hit), int(of)) for arm, hit, of in shown}
    wide = long[long["layer"].notna() & (long["domain"] == "")].pivot_table(
        index=["arm", "seed", "layer"], columns="metric", values="value"
    )
    wide = wide.dropna(subset=["min_over_mean"])  # dense models have none
    limit = 0.5 * (runs["n_experts"] / runs["top_k"] - 1).reindex(wide.index.get_level_values("arm"))
    bad = (wide["min_over_mean"] < 0.01) | (wide["max_violation"] > limit.to_numpy())
    expected = bad.groupby("arm").agg(["sum", "size"])
    assert found == {arm: tuple(row) for arm, row in expected.iterrows()}
    assert {"hash", "some", "switch_top1", "topk"} <= set(found)


def test_the_loss_of_ablations_is_drawn_from_a_fifth_of_the_steps(findings: ModuleType, store: Path):
    (panel,) = sys.modules["findings_figures"].variant_curves(
        findings.Results.of(findings.read_results(store))
    )
    assert min(step for of in panel.series.values() for step, _ in of) == 100  # logged at 0, 50, ..., 300


# --- sentences


def test_the_headline_says_how_larger_models_compare_at_own_and_at_equal_rates(findings: ModuleType):
    sizes, rates, controls = sizes_at_one_rate()
    words = findings.larger_words(findings.Results.of([sizes, rates, controls]))
    own, _, equal = words.partition("; at those of `top2` for both its gain is ")
    assert own.startswith(
        ". In larger models, at learning rates tuned at the smallest, it is worse by 0.050 ± "
    )
    assert "and worse by 0.050 ± " in own
    assert re.fullmatch(r"0.040 ± 0.\d+ \(size M\) and 0.030 ± 0.\d+ \(size L\) \(not corrected\).", equal)
    runs = rates["study_runs"]
    runs.loc[runs["arm"] == "spectra L half", "validation_loss"] = 2.8 + 3 * NOISE
    runs.loc[runs["arm"] == "spectra M half", "validation_loss"] = 2.9 + 3 * NOISE
    words = findings.larger_words(findings.Results.of([sizes, rates, controls]))
    assert words.endswith("(size L): not distinguishable (not corrected).")
    few = {**rates, "study_runs": runs[runs["seed"] < 4]}
    assert "at those of" not in findings.larger_words(findings.Results.of([sizes, few, controls]))


def some_studies(seeds: int = 5) -> list[dict[str, pd.DataFrame]]:
    """A study of SoME's runs with pads and one without, in each of which a training stalls."""
    found = []
    for name, pads, stalled in (("with", 1.0, ("B3", 1)), ("without", 0.0, ("A4", 0))):
        losses = {arm: [2.0 + 0.1 * seed for seed in range(seeds)] for arm in ("A4", "B3")}
        losses[stalled[0]][stalled[1]] = 5.9
        tables = study(losses)
        tables["study_runs"]["unigram_loss"] = 6.0
        values = {"sequence_length": 768.0, "pad_targets": pads}
        settings = [(arm, key, value) for arm in losses for key, value in values.items()]
        tables["study_settings"] = pd.DataFrame(settings, columns=["arm", "name", "value"])
        tables["study_name"] = pd.DataFrame({"name": [name]})
        curves = [
            (arm, seed, step, 2.0 if loss < 5 and step >= 20 + 10 * seed else 6.0, 0.5)
            for arm, of in losses.items()
            for seed, loss in enumerate(of)
            for step in range(0, 100, 10)
        ]
        columns = ["arm", "seed", "step", "train_loss", "validation_loss_published"]
        tables["study_curves"] = pd.DataFrame(curves, columns=columns).assign(validation_loss=2.0)
        points = [(arm, seed, float(seed), 0.0) for arm in losses for seed in range(seeds)]
        tables["study_keys"] = pd.DataFrame(points, columns=["arm", "seed", "x", "y"])
        found.append(tables)
    return found


def test_stalled_trainings_and_steps_until_learned_are_named(findings: ModuleType):
    results = findings.Results.of(some_studies())
    assert findings.stalled_words(results) == "B3 1 of 5 in `with`; A4 1 of 5 in `without`"
    assert findings.plateau_words(results) == "A4 45 (30 to 60, 1 never); B3 40 (20 to 60) (`without`)"
    assert findings.published_words(results).startswith("A4 0.7126, ")
    nothing = findings.Results.of([])
    assert {findings.stalled_words(nothing), findings.plateau_words(nothing)} == {"not run"}


def test_the_page_warns_of_trainings_to_come_only_while_there_are_some(findings: ModuleType):
    first, second = some_studies()
    assert findings.unfinished_words([first, second]) == ""
    waiting = first["study_runs"].iloc[:1].assign(seed=9, status="not run")
    first["study_runs"] = pd.concat([first["study_runs"], waiting])
    assert "still to come" in findings.unfinished_words([first, second])


def test_keys_are_those_of_the_median_training_that_did_not_stall(findings: ModuleType):
    figures = sys.modules["findings_figures"]
    results = findings.Results.of(some_studies())
    name, keys = figures.keys_of(results, "B3")  # seeds 0, 2, 3 and 4 of the first study
    assert name == "with, seed 3"
    assert list(keys["x"]) == [3.0]
    assert figures.keys_of(results, "B1") is None


def test_a_wide_interval_has_its_own_scale_and_equal_rates_their_own_line(findings: ModuleType):
    figures = sys.modules["findings_figures"]
    arms = ("A4", "A4 dense", "A4 frozen keys")
    steady = {arm: list(2.0 + at + NOISE * (1 + at)) for at, arm in enumerate(arms)}
    tables = study({**steady, "B3": [2.0, 2.1, 9.0, 2.2, 2.0]})
    tables["study_name"] = pd.DataFrame({"name": ["s"]})
    panels = figures.pairs_panels(findings.Results.of([tables]), "SoME")
    shown = {panel.title: [name for name, _ in panel.rows] for panel in panels}
    assert shown["Gain in s (nats per token, wide interval)"] == ["B3 over A4"]
    assert shown["Gain in s (nats per token)"] == ["A4 over A4 frozen keys", "A4 over A4 dense"]
    (lines,) = figures.sizes_panels(findings.Results.of(sizes_at_one_rate()))
    equal = [one.mean for _, one in lines.series["SPECTRA, rates of top2"]]
    assert equal == pytest.approx([2.95, 2.9 - 0.05 + 0.02 * np.log2(1.4), 2.77])
