"""The report in a real browser: no error, no request, and what a reader does works."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from moescope.reporting.export import export_figures
from moescope.reporting.verb import report
from moescope.run import Run
from report_payloads import payloads

expect.set_options(timeout=30_000)  # a busy machine takes longer than five seconds


@pytest.fixture(scope="module")
def planted_report(planted_run, tmp_path_factory):
    return report(planted_run, out=tmp_path_factory.mktemp("report") / "report.html")


@pytest.fixture
def opened(browser, planted_report):
    """Opens the report at a width and colour scheme.

    Afterwards no error may have been said and nothing asked for.
    """
    contexts, troubles, requests = [], [], []

    def open_page(width=1400, scheme="light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(planted_report.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def scroll_through(page):
    """To every figure that is not hidden, as a reader would.

    Waiting for each to be drawn when it is in view.
    """
    page.evaluate(
        """async () => {
             for (const slot of document.querySelectorAll(".figure-slot")) {
               if (!slot.offsetParent) continue;
               slot.scrollIntoView({ block: "center" });
               for (let wait = 0; wait < 100 && !slot.querySelector(".plot.drawn .main-svg"); wait++)
                 await new Promise((resolve) => setTimeout(resolve, 50));
             }
           }"""
    )


def bring(page, name):
    """Scroll to one figure across layers and wait until it is drawn; all others stay undrawn."""
    page.evaluate(
        f"document.querySelector(\"#scan-across [data-view='0'] [data-payload$='-{name}']\")"
        ".scrollIntoView({ block: 'center' })"
    )
    figure = page.locator(f"#scan-across [data-view='0'] figure[data-name={name}]")
    expect(figure.locator(".plot.drawn .main-svg").first).to_be_visible()
    return figure


def open_layer(page, layer, view=0):
    page.locator(f"#scan-v{view}-layer-{layer} > summary").click()
    body = page.locator(f"#scan-v{view}-layer-{layer} .body")
    expect(body.locator("figure").first).to_be_visible()
    return body


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_page(opened, width, scheme):
    page = opened(width, scheme)
    scroll_through(page)
    slots = page.locator("#scan-across [data-view='0'] .figure-slot, #scan-side-by-side .figure-slot")
    assert slots.count() == 23 + 6
    for index in range(slots.count()):
        expect(slots.nth(index).locator(".plot.drawn .main-svg").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme


def test_every_figure_of_an_opened_layer_is_drawn(opened):
    page = opened()
    body = open_layer(page, 3)
    scroll_through(page)
    expect(body.locator(".plot.drawn .main-svg:first-child")).to_have_count(5 + 12)


def test_a_reader_opens_a_layer_and_moves_the_k_slider(opened):
    page = opened()
    body = open_layer(page, 1)
    figure = body.locator("figure[data-name=pair_matrix]")
    shown = "figure => figure.querySelector('.plot').data.findIndex((trace) => trace.visible === true)"
    expect(figure.locator(".main-svg").first).to_be_visible()
    before = figure.evaluate(shown)
    names = ["1", "2", "4", "8", "16", "32", "64", "128", "256"]
    expect(figure.locator("output")).to_have_text(names[before])
    figure.locator("input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(figure.locator("output")).to_have_text(names[before + 1])
    assert figure.evaluate(shown) == before + 1


def test_the_numbers_in_the_page_are_the_tables_numbers(opened, planted_run):
    page = opened()
    figure = open_layer(page, 3).locator("figure[data-name=pair_matrix]")
    expect(figure.locator(".main-svg").first).to_be_visible()
    drawn = figure.evaluate(
        "figure => figure.querySelector('.plot').data.map((trace) => Array.from(trace.z, (row) "
        "=> Array.from(row)))"
    )
    pairs = (
        planted_run.table("pairs")
        .query("layer == 3 and router == 'raw'")
        .sort_values(["k", "router_index", "expert"])
    )
    flat = [cell for matrix in drawn for row in matrix for cell in row]
    assert flat == pytest.approx(pairs["align"].tolist(), abs=2e-5)


def test_a_reader_downloads_a_table_as_csv(opened, planted_run):
    page = opened()
    with page.expect_download() as download:
        page.locator("#summary [data-view='0'] button.csv").click()
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert download.value.suggested_filename == "moescope-layers_at_a_glance.csv"
    assert lines[0].startswith("layer,verdict,p_value,best_k,best_accuracy,chance_accuracy")
    assert len(lines) == 1 + 5
    best = planted_run.table("alignment_tests").query("layer == 2 and router == 'raw'")["best_k"].iloc[0]
    assert lines[3].split(",")[:2] == ["2", "identifies its experts"]
    assert lines[3].split(",")[3] == str(best)


HOSTILE = [
    "=1+1",
    "+1",
    "-cmd|' /C calc'!A0",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    'a "b", c',
    "two\rlines",
    "plain",
    -0.5,
]


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers(browser, planted_report, tmp_path):
    """The cells of a table are replaced in the page; Python's csv reads the file as a spreadsheet would."""
    html = planted_report.read_text(encoding="utf-8")
    name, glance = next(
        (name, value)
        for name, value in payloads(html).items()
        if isinstance(value, dict) and value.get("name") == "layers_at_a_glance"
    )
    glance["rows"] = [[cell, *row[1:]] for cell, row in zip(HOSTILE, 10 * glance["rows"], strict=False)]
    pattern = rf'(<script type="application/json" id="p-{re.escape(name)}">).*?(</script>)'
    changed = re.sub(pattern, lambda at: at[1] + json.dumps(glance) + at[2], html, flags=re.DOTALL)
    (tmp_path / "report.html").write_text(changed, encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    with page.expect_download() as download:
        page.locator("#summary [data-view='0'] button.csv").click()
    text = Path(download.value.path()).read_bytes().decode()
    page.close()
    cells = [row[0] for row in csv.reader(io.StringIO(text, newline=""))][1:]
    assert cells == [f"'{cell}" for cell in HOSTILE[:6]] + [*map(str, HOSTILE[6:])]
    assert [line for line in text.split("\n") if line.startswith("-")] == [text.split("\n")[-2]]  # the number


def test_the_glance_table_fits_a_wide_page(opened):
    page = opened()
    scroll = page.locator("#summary [data-view='0'] .scroll")
    assert scroll.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_a_reader_changes_the_view_and_sees_only_that_one(opened):
    page = opened()
    page.locator("select[data-selects=scan]").select_option("1")
    expect(page.locator("#scan-v0-layer-0")).to_be_hidden()
    expect(page.locator("#scan-v1-layer-0")).to_be_visible()
    open_layer(page, 2, view=1)


def test_the_glance_table_leads_to_a_layer_and_a_heading_to_the_glossary(opened):
    page = opened()
    page.locator("#summary [data-view='0'] td a").nth(2).click()
    expect(page.locator("#scan-v0-layer-2")).to_have_attribute("open", "")
    page.locator("#summary [data-view='0'] th a", has_text="ambiguity").click()
    expect(page.locator("[id='g-absolute_score']")).to_be_in_viewport()


def test_the_theme_button_repaints_the_figures(opened):
    page = opened()
    scroll_through(page)
    color = "document.querySelector('#scan-across .plot.drawn').layout.font.color"
    light = page.evaluate(color)
    page.locator("#theme").click()
    assert page.evaluate(color) != light


def test_experts_can_be_ordered_by_similarity(opened):
    page = opened()
    figure = bring(page, "cosine_heatmap")
    figure.locator("input[type=checkbox]").check()
    order = figure.evaluate("figure => figure.querySelector('.plot').layout.xaxis.categoryarray")
    assert abs(order.index("2") - order.index("5")) == 1


def test_the_definition_of_a_figure_is_one_click_away(opened):
    page = opened()
    figure = bring(page, "accuracy_by_k")
    figure.locator(".definition summary").click()
    expect(figure.locator(".definition")).to_contain_text("chance 1/n")


def test_no_figure_offers_to_upload_itself(opened):
    page = opened()
    scroll_through(page)
    buttons = page.locator("#scan-across .modebar-btn").evaluate_all(
        "all => [...new Set(all.map((b) => b.dataset.title))]"
    )
    assert sorted(buttons) == ["Download as picture", "Pan", "Reset axes", "Zoom"]


def test_a_figure_is_downloaded_on_white_with_its_title_even_from_a_dark_page(opened):
    page = opened(scheme="dark")
    figure = bring(page, "margin_by_k")
    figure.hover()
    with page.expect_download() as download:
        figure.locator(".modebar-btn").first.click(force=True)
    picture = Path(download.value.path()).read_text(encoding="utf-8")
    assert "The mean margin is positive at some k" in picture
    assert "background: rgb(255, 255, 255)" in picture or "fill: rgb(255, 255, 255)" in picture


def test_the_caption_follows_the_slider(opened):
    page = opened()
    figure = open_layer(page, 1).locator("figure[data-name=pair_matrix]")
    expect(figure.locator(".main-svg").first).to_be_visible()
    figure.locator("input[type=range]").fill("0")
    expect(figure.locator(".caption")).to_contain_text("At k = 1,")


def test_tables_of_the_chosen_view_are_shown_and_links_change_the_view(opened):
    page = opened()
    page.locator("select[data-selects=scan]").select_option("1")
    expect(page.locator("#summary .facts", has_text="gate, centered router")).to_be_visible()
    page.evaluate("location.hash = '#scan-v0-layer-2'")
    expect(page.locator("#scan-v0-layer-2")).to_be_visible()


def test_printing_draws_everything_that_is_open(opened):
    page = opened()
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    drawn = page.locator("#scan-across [data-view='0'] .plot.drawn")
    expect(drawn).to_have_count(23)


@pytest.fixture
def few_figures(planted_run, monkeypatch):
    """A run whose sections have two figures across layers per view, one of a layer: half a second each."""

    own = planted_run.verb

    def sections(run, selection):
        first = own.sections(run, selection)
        across = [replace(part, figures=part.figures[:2]) for part in first if part.anchor == "across"]
        layers = next(part for part in first if part.anchor == "layers")
        inner = [replace(layers.sections[0], figures=layers.sections[0].figures[:1], sections=[])]
        return [*across, replace(layers, sections=inner)]

    verb = replace(own, sections=sections, overlay=lambda runs: [])
    monkeypatch.setattr(Run, "verb", verb)
    return planted_run


def test_figures_are_written_as_pictures(browser, few_figures, tmp_path):
    report(few_figures, out=tmp_path / "report.html", figures=tmp_path / "figures", format="svg", quiet=True)
    written = sorted(file.name for file in (tmp_path / "figures").iterdir())
    assert len(written) == 2 * 2 + 1
    assert "scan0-across-gate_raw_router-accuracy_by_k.svg" in written
    assert "scan0-layers-gate_raw_router-layer-0-pair_matrix.svg" in written
    picture = (tmp_path / "figures" / "scan0-across-gate_raw_router-accuracy_by_k.svg").read_text(
        encoding="utf-8"
    )
    assert picture.lstrip().startswith("<svg")
    assert "argmax accuracy" in picture


def test_a_picture_that_cannot_be_written_fails_the_export(browser, few_figures, tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.reporting.export.check_export", lambda folder: None)
    with pytest.raises(Exception, match="missing"):
        export_figures([few_figures], tmp_path / "missing", "svg", quiet=True)
