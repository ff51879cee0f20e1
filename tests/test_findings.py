"""docs/findings.md: every number is computed from the results of studies, none is typed in."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

DOCS = Path(__file__).parents[1] / "docs"
# digits in names: hypotheses, arms, option names
NAMES = re.compile(r"\bH\d\b|\btop2\w*|`[^`]*`")


@pytest.fixture(scope="module")
def findings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_findings", DOCS / "findings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def template() -> str:
    return (DOCS / "findings.md").read_text(encoding="utf-8")


def typed_numbers(text: str) -> list[str]:
    return re.findall(r".{0,20}\d.{0,20}", NAMES.sub("", text))


def results(losses: dict[str, list[float]], study: str = "main", **more) -> pd.DataFrame:
    rows = []
    for arm, values in losses.items():
        for seed, value in enumerate(values):
            keys = {"study": study, "question": "main", "arm": arm, "seed": seed, "status": "done"}
            keys |= {"layer": None, "domain": "", "chance": None}
            rows.append({**keys, "metric": "validation_loss", "value": value})
            rows += [
                {**keys, "metric": name, "value": of[arm][seed]} for name, of in more.items() if arm in of
            ]
    return pd.DataFrame(rows)


def test_without_results_the_page_has_no_number(findings: ModuleType):
    page = findings.render(template(), findings.read_results(Path("no such folder")))
    assert typed_numbers(page) == []
    assert "not run" in page
    assert "confirmed |" not in page


@pytest.mark.parametrize("typed", ["better by 0.02 nats", '{{ "5 seeds" }}', "{{ 0.02 }}"])
def test_a_number_that_was_typed_in_is_found(findings: ModuleType, typed: str):
    nothing = findings.read_results(Path("no such folder"))
    assert typed_numbers(findings.render(f"{template()}\n{typed}\n", nothing))


def test_a_difference_is_paired_and_its_interval_scipys(findings: ModuleType):
    losses = {"top2": [2.5, 2.42, 2.61, 2.55, 2.47], "spectra": [2.4, 2.3, 2.52, 2.44, 2.38]}
    page = findings.render(
        '{{ difference("main", "spectra", "top2", "validation_loss") }};{{ seeds("main", "spectra") }}',
        results(losses),
    )
    gaps = np.subtract(losses["spectra"], losses["top2"])
    low, high = stats.t.interval(0.95, 4, gaps.mean(), stats.sem(gaps))
    assert page.replace("−", "-") == f"{gaps.mean():.3g} [{low:.3g}, {high:.3g}];5 seeds"


def test_verdicts_are_corrected_for_all_claims_of_the_page(findings: ModuleType):
    base = np.array([2.5, 2.42, 2.61, 2.55, 2.47])
    noise = np.array([0.02, -0.01, 0.015, -0.02, 0.0])
    losses = {"top2": base, "spectra": base - 0.018 + noise, "hash": base - 0.016 + np.roll(noise, 1)}
    frame = results({arm: list(values) for arm, values in losses.items()})
    names = '"main", "%s", "top2", "validation_loss"'
    claim = f'{{{{ verdict({names}, "below") }}}} {{{{ p({names}) }}}}'
    first, second = (stats.ttest_rel(losses[arm], losses["top2"]).pvalue for arm in ("spectra", "hash"))
    assert min(first, second) < 0.05 or max(first, second) < 0.2  # near the level
    alone = findings.render(claim % ("spectra", "spectra"), frame)
    both = findings.render(claim % ("spectra", "spectra") + "\n" + claim % ("hash", "hash"), frame)
    assert alone.endswith(f"p = {first:.2g}")
    smaller, larger = sorted([first, second])
    holm = {smaller: 2 * smaller, larger: max(larger, 2 * smaller)}
    assert both.split("\n")[0].endswith(f"p = {holm[first]:.2g}")


def test_a_clear_difference_is_confirmed_or_refuted_and_four_seeds_are_neither(findings: ModuleType):
    base = np.array([2.5, 2.42, 2.61, 2.55, 2.47])
    losses = {"top2": list(base), "spectra": list(base - 0.1 + 0.001 * np.arange(5))}
    line = '{{ verdict("main", "spectra", "top2", "validation_loss", "%s") }}'
    assert findings.render(line % "below", results(losses)) == "confirmed"
    assert findings.render(line % "above", results(losses)) == "refuted"
    four = {arm: values[:4] for arm, values in losses.items()}
    assert findings.render(line % "below", results(four)) == "not testable"


def test_an_untuned_study_stands_in_for_the_tuned_one_and_the_page_says_so(findings: ModuleType):
    losses = {"top2": [2.5, 2.4], "spectra": [2.2, 2.1]}
    line = '{{ difference("main", "spectra", "top2", "validation_loss") }}{{ routers_compared }}'
    untuned = results(losses, "untuned")
    page = findings.render(line, untuned)
    assert page.startswith("−0.3")
    assert "`untuned`" in page
    tuned = results({"top2": [2.5, 2.4], "spectra": [2.4, 2.3]})
    assert findings.render(line, pd.concat([untuned, tuned])).startswith("−0.1")
    assert "untuned" not in findings.render(line, pd.concat([untuned, tuned]))


def test_the_gain_per_doubling_by_hand(findings: ModuleType):
    sizes = {"S": (1000, 0.01), "M": (2000, 0.03), "L": (4000, 0.05)}  # 0.02 per doubling
    losses = {f"top2 {size}": [2.5] * 2 for size in sizes}
    losses |= {f"spectra {size}": [2.5 - gain, 2.5 - 3 * gain] for size, (_, gain) in sizes.items()}
    active = {arm: [sizes[arm[-1]][0]] * 2 for arm in losses}
    frame = results(losses, "scaling_size", parameters_active=active)
    page = findings.render('{{ size_trend("scaling_size", "spectra", "top2", "S", "M", "L") }}', frame)
    assert float(page.split(" ")[0]) == pytest.approx((0.02 + 0.06) / 2)


@pytest.mark.parametrize(("speed", "verdict"), [(0.98, "confirmed"), (0.5, "refuted")])
def test_the_cost_is_judged_by_the_speed_of_training(findings: ModuleType, speed: float, verdict: str):
    fast = [1000.0, 1010.0, 990.0, 1005.0, 995.0]
    slow = [speed * one + shift for one, shift in zip(fast, (1, -1, 2, 0, -2), strict=True)]
    losses = {"top2": [2.5] * 5, "spectra": [2.4] * 5}
    frame = results(losses, tokens_per_second={"top2": fast, "spectra": slow})
    assert findings.render('{{ cost_verdict("main", "spectra", "top2") }}', frame) == verdict


def test_a_training_behind_the_unigram_baseline_does_not_count(findings: ModuleType):
    losses = {"top2": [2.5, 2.4], "spectra": [2.2, 3.0]}
    frame = results(losses, unigram_loss={"top2": [2.8, 2.8], "spectra": [2.8, 2.8]})
    page = findings.render('{{ difference("main", "spectra", "top2", "validation_loss") }}', frame)
    assert page == "−0.3"


def test_every_study_and_arm_of_the_page_is_in_a_design():
    called = re.findall(r'\("(\w+)", "([^"]+)"(?:, "([^"]+)")?', template())
    designs = {path.parent.name: path.read_text() for path in DOCS.parent.glob("studies/*/study.toml")}
    for study, arm, _ in called:
        assert study in designs, study
        name = arm.split(" ")[0].split("-")[0]
        assert name in designs[study], (study, arm)
