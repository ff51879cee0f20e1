"""Pages made of the results of studies: no number is typed in, and the stored claims are what they were."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import charts
import findings
import numpy as np
import pandas as pd
import pytest
from paper_results import Estimate

STUDIES = Path(__file__).parents[1]
DOCS = STUDIES.parent / "docs"
PAGES = ("findings.md", "results.md", "routers.md")
# digits in names: hypotheses, published routers, arms, option names
NAMES = re.compile(r"\bH\d\b|\b[AB]\d\b|\bTop-\d\b|\btop2\w*|\bx4\b|`[^`]*`")


pytestmark = pytest.mark.timeout(1200)  # tables of all stored studies


@pytest.fixture(scope="module")
def results():
    return findings.judged_results(findings.read_results())


def template(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def typed_numbers(text: str) -> list[str]:
    return re.findall(r".{0,20}\d.{0,20}", NAMES.sub("", text))


@pytest.mark.parametrize("page", PAGES)
def test_no_number_stands_in_a_page(page: str):
    assert typed_numbers(template(page)) == []


@pytest.mark.parametrize("typed", ["better by 0.02 nats", '{{ "5 seeds" }}', "{{ 0.02 }}"])
def test_a_number_that_was_typed_in_is_found(typed: str):
    assert typed_numbers(f"{template('findings.md')}\n{typed}\n")


def test_stored_claims_have_the_numbers_and_verdicts_that_they_had(results):
    golden = pd.read_csv(Path(__file__).parent / "claims.csv", keep_default_na=False, na_values=["nan"])
    found = results.judged[golden.columns].reset_index(drop=True)
    for column in ("estimate", "low", "high", "p", "p_holm"):
        np.testing.assert_allclose(found[column], golden[column], rtol=1e-12, atol=1e-12)
    for column in ("file", "claim", "check", "seeds", "verdict"):
        assert found[column].to_list() == golden[column].to_list()


def test_every_page_is_made_of_the_stored_studies():
    studies = findings.read_results()
    for page in PAGES:
        text = findings.render(template(page), studies)
        assert "<svg" in text
        assert "*Figure: not run.*" not in text
        assert "| not run |" not in text
    headline = findings.headline(findings.judged_results(studies))
    assert "1 refuted and 6 undecided" in headline
    assert headline in (STUDIES / "README.md").read_text()


def test_without_results_a_page_says_so():
    for page in PAGES:
        text = findings.render(template(page), findings.read_results(Path("no such folder")))
        assert "<svg" not in text
        assert "not run" in text.lower()
        assert "| confirmed |" not in text


def test_charts_of_a_single_seed_and_of_equal_values_are_drawn():
    one = Estimate(2.0, float("nan"), 1)
    svg = charts.Dots("a < b", [("top2", one), ("hash", one), ("some", None)]).svg()
    assert len(ElementTree.fromstring(svg).findall("circle")) == 2
    assert "not run" in svg
    assert charts.Dots("none", [("some", None)]).svg() == ""


def test_a_value_far_from_all_others_is_written_at_the_edge():
    values = [3.70, 3.72, 3.73, 3.75, 3.77, 3.96]
    rows = [(f"arm {value}", Estimate(value, 0.001, 5)) for value in values]
    drawn = ElementTree.fromstring(charts.Dots("loss", rows).svg())
    places = [float(one.get("cx")) for one in drawn.iter("circle")]
    assert len(places) == 5
    assert places[-1] - places[0] > 150  # of 325 pixels
    assert [one.text for one in drawn.iter("text") if "→" in one.text] == ["3.96 →"]


def test_a_far_value_for_which_the_line_makes_room_is_drawn():
    values = [0.70, 0.72, 0.73, 0.75, 0.77, 1.0]
    rows = [(f"arm {value}", Estimate(value, 0.001, 5)) for value in values]
    drawn = ElementTree.fromstring(charts.Dots("consistency", rows, 1.0).svg())
    places = [float(one.get("cx")) for one in drawn.iter("circle")]
    assert len(places) == len(values)
    assert places[-1] == max(places)
