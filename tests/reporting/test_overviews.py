"""The first screen of every kind of run: key numbers, chart or map, findings; every finding is a link."""

from __future__ import annotations

import contextlib

import pytest
from playwright.sync_api import TimeoutError, expect

from browsing import NO_WIDER
from moescope.reporting.verb import report
from moescope.weights.verb import scan
from planted import write_planted

TWO = pytest.param("scans", marks=pytest.mark.slow)
KINDS = ("scan", "trace", "compare", "compress", "merge", "train", "study", TWO)
# where a link leads: whether the present state shows all that it names
ARRIVED = """() => {
  const state = M.state.get();
  const panel = document.getElementById(`tab-${state.tab}`);
  const visible = (selector) => [...panel.querySelectorAll(selector)].some((item) => item.offsetParent);
  const lacks = [];
  if (!panel || panel.hidden) return ['tab ' + state.tab];
  if (state.figure && !visible(`[data-figure="${state.figure}"]`)) lacks.push('figure ' + state.figure);
  if (state.section && !visible(`[data-section="${state.section}"]`)) lacks.push('section ' + state.section);
  if (state.layer !== undefined && !M.data.layers.includes(state.layer)) lacks.push('layer ' + state.layer);
  if (state.expert !== undefined && document.getElementById('drawer').hidden) lacks.push('expert');
  if (state.colour && M.map.shown()?.name !== state.colour) lacks.push('colour ' + state.colour);
  return lacks;
}"""


@pytest.fixture(scope="module")
def place_of(page_of, tmp_path_factory):
    """Kind -> its report; of "scans", two scans in one page."""
    folder = tmp_path_factory.mktemp("scans")

    def build(kind):
        if kind != "scans":
            return page_of(kind)
        if not (folder / "scans.html").exists():
            models = [folder / f"planted-{seed}" for seed in (0, 1)]
            for seed, model in enumerate(models):
                write_planted(model, seed=seed)
            runs = [scan(model, out=folder / f"run-{model.name}", quiet=True) for model in models]
            report(*runs, out=folder / "scans.html")
        return folder / "scans.html"

    return build


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_screen_has_key_numbers_a_picture_and_findings(opened, place_of, kind):
    page = opened(place_of(kind))
    expect(page.locator(".findings-box li").first).to_be_visible()
    expect(page.locator(".verdicts p").first).to_be_in_viewport(ratio=1)
    cards = page.locator(
        "#tab-overview .dumbbells tbody tr" if kind == "scans" else ".overview-row > .cards .card"
    )
    assert 3 <= cards.count() <= (10 if kind == "scans" else 5)
    for card in cards.all():
        expect(card).to_be_in_viewport(ratio=1)
    rows = {round(card.bounding_box()["y"]) for card in page.locator(".overview-row > .cards .card").all()}
    assert len(rows) == (0 if kind == "scans" else 1)
    assert len({card.text_content() for card in cards.all()}) == cards.count()  # each quantity once
    pictures = page.locator("#tab-overview canvas:visible, #tab-overview .figure-slot:visible")
    expect(pictures.first).to_be_in_viewport(ratio=0.95)
    for part in page.locator("#tab-overview canvas:visible, .map .legend:visible").all():
        expect(part).to_be_in_viewport(ratio=1)
    shown = page.locator(".findings-box > ol > li")
    assert 1 <= shown.count() <= 5
    expect(shown.first).to_be_in_viewport(ratio=1)
    assert page.evaluate(NO_WIDER)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_finding_leads_to_a_place_that_exists(opened, place_of, kind):
    page = opened(place_of(kind))
    expect(page.locator(".findings-box li").first).to_be_visible()
    for details in page.locator(".findings-box > details").all():
        details.evaluate("details => { details.open = true; }")
    items = page.locator(".findings-box ol > li")
    links = items.locator("a").evaluate_all("all => all.map((link) => link.getAttribute('href'))")
    assert len(links) >= items.count()
    for link in dict.fromkeys(links):
        assert any(f"{key}=" in link for key in ("figure", "section", "colour")), link
        page.evaluate("link => { location.hash = link; }", link)
        with contextlib.suppress(TimeoutError):
            page.wait_for_function(f"() => ({ARRIVED})().length === 0")
        assert page.evaluate(ARRIVED) == [], link
