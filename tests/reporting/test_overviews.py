"""The first screen of every kind of run: key numbers, chart or map, findings; every finding is a link."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from playwright.sync_api import TimeoutError, expect

from lab.study_runs import more_arms, router_arms, study_run
from moescope.reporting.verb import report
from moescope.weights.verb import scan
from planted import write_planted

KINDS = ("scan", "trace", "compare", "compress", "merge", "train", "study", "scans")
# where a link leads: whether the present state shows all that it names
ARRIVED = """() => {
  const state = M.state.get();
  const panel = document.getElementById(`tab-${state.tab}`);
  const visible = (selector) => [...panel.querySelectorAll(selector)].some((item) => item.offsetParent);
  const lacks = [];
  if (!panel || panel.hidden || panel.querySelector('.empty-tab')) return ['tab ' + state.tab];
  if (state.figure && !visible(`[data-figure="${state.figure}"]`)) lacks.push('figure ' + state.figure);
  if (state.section && !visible(`[data-section="${state.section}"]`)) lacks.push('section ' + state.section);
  if (state.layer !== undefined && !M.data.layers.includes(state.layer)) lacks.push('layer ' + state.layer);
  if (state.expert !== undefined && document.getElementById('drawer').hidden) lacks.push('expert');
  if (state.colour && M.map.shown()?.name !== state.colour) lacks.push('colour ' + state.colour);
  return lacks;
}"""


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scans")
    found = []
    for seed in (0, 1):
        write_planted(folder / f"planted-{seed}", seed=seed)
        found.append(scan(folder / f"planted-{seed}", out=folder / f"run-{seed}", quiet=True))
    return found


@pytest.fixture(scope="module")
def built(request, tmp_path_factory):
    """Kind -> its report, built once."""
    folder = tmp_path_factory.mktemp("kinds")
    pages: dict[str, Path] = {}
    fixtures = {
        "scan": "planted_run",
        "trace": "traced_run",
        "compare": "compared_run",
        "train": "trained_run",
    }
    fixtures |= {"compress": "compressed_run", "merge": "merged_run"}

    def build(kind: str) -> Path:
        if kind not in pages:
            if kind in fixtures:
                runs = [request.getfixturevalue(fixtures[kind])]
            elif kind == "study":
                runs = [study_run(folder / "study", arms=[*router_arms(), *more_arms()])]
            else:
                runs = request.getfixturevalue("scans")
            pages[kind] = report(*runs, out=folder / f"{kind}.html")
        return pages[kind]

    return build


@pytest.fixture
def opened(browser, built):
    contexts, troubles = [], []

    def open_page(kind: str):
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(built(kind).as_uri())
        expect(page.locator(".findings-box li").first).to_be_visible()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_screen_has_key_numbers_a_picture_and_findings(opened, kind):
    page = opened(kind)
    cards = page.locator("#tab-overview .card")
    assert 1 <= cards.count() <= 6
    for card in cards.all():
        expect(card).to_be_in_viewport(ratio=1)
    pictures = page.locator("#tab-overview canvas:visible, #tab-overview .figure-slot:visible")
    expect(pictures.first).to_be_in_viewport(ratio=0.95)
    shown = page.locator(".findings-box > ol > li")
    assert 1 <= shown.count() <= 5
    expect(shown.first).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_finding_leads_to_a_place_that_exists(opened, kind):
    page = opened(kind)
    for details in page.locator(".findings-box > details").all():
        details.evaluate("details => { details.open = true; }")
    items = page.locator(".findings-box ol > li")
    links = items.locator("a").evaluate_all("all => all.map((link) => link.getAttribute('href'))")
    assert len(links) >= items.count()
    for link in dict.fromkeys(links):
        assert any(f"{key}=" in link for key in ("figure", "section", "colour")), link
        page.evaluate("link => { location.hash = link; }", link)
        with contextlib.suppress(TimeoutError):
            page.wait_for_function(f"() => ({ARRIVED})().length === 0", timeout=8000)
        assert page.evaluate(ARRIVED) == [], link
