"""The report of a scan in a real browser: no error, no request, and what a reader does works."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from browsing import NO_WIDER, bring, click_cell, scroll_through
from moescope.reporting.export import export_figures
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.weights.figures import FIGURES, STEPS

# --- overview


def test_a_link_reopens_the_same_state_and_back_works(opened):
    page = opened("scan")
    click_cell(page, 2, 1, 5, 8)
    expect(page.locator("#drawer h2")).to_have_text("L2 · E1")
    page.locator("#tabs a[data-tab=weights]").click()
    expect(page.locator("#tab-weights")).to_be_visible()
    link = page.evaluate("location.hash")
    page.go_back()
    expect(page.locator("#tab-overview")).to_be_visible()
    page.go_back()
    expect(page.locator("#drawer")).to_be_hidden()
    page = opened("scan", link)
    expect(page.locator("#tab-weights")).to_be_visible()
    expect(page.locator("#drawer h2")).to_have_text("L2 · E1")


def test_the_keyboard_reaches_tabs_map_and_drawer(opened):
    page = opened("scan")
    expect(page.locator("canvas")).to_be_visible()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.dataset.tab ?? document.activeElement.tagName.toLowerCase()"
            )
        )
        if "canvas" in reached:
            break
    assert {"overview", "weights", "canvas"} <= reached
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator("#drawer h2")).to_have_text("L1 · E1")
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()


def test_key_numbers_and_findings_are_of_the_selected_view(opened, planted_run):
    page = opened("scan")
    page.locator("#top select[data-state=scan]").select_option("gate, centered router")
    centered = planted_run.verb.summary(planted_run).views["gate, centered router"]
    keys, findings = centered.key_numbers, centered.findings
    expect(page.locator(".verdicts p")).to_have_text(centered.verdict)
    card = page.locator(".card", has_text=keys[1].name)
    expect(card.locator(".value")).to_contain_text(f"{keys[1].value:.3g}")
    expect(page.locator(".findings-box li").first).to_have_text(str(findings[0]))


def test_a_link_to_an_expert_that_does_not_exist_opens_nothing(opened):
    page = opened("scan", "#/overview?layer=9&expert=24")
    expect(page.locator("canvas")).to_be_visible()
    expect(page.locator("#drawer")).to_be_hidden()


def test_the_header_stays_usable_beside_the_drawer(opened):
    page = opened("scan", "#/overview?layer=1&expert=1")
    expect(page.locator("#drawer h2")).to_have_text("L1 · E1")
    page.locator("#theme").click()  # fails if the drawer covers it
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


# --- tabs and figures


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_page(opened, width, scheme):
    page = opened("scan", "#/weights?layer=3", width, scheme)
    expect(page.locator("#tab-weights .figure-slot").first).to_be_visible()
    scroll_through(page)  # first: what is drawn while a reader points at a summary may move it
    for details in page.locator("details.folded:visible, details.inner:visible").all():
        details.locator("summary").first.click()
        expect(details).to_have_attribute("open", "")
        scroll_through(page)
    expect(page.locator("details[open] .figure-slot").first).to_be_visible()
    names = page.locator(".figure-slot:visible").evaluate_all("all => all.map((slot) => slot.dataset.figure)")
    wanted = {spec.name for spec in FIGURES} - {spec.name for spec in STEPS}
    assert wanted <= set(names)
    drawn = page.locator(".figure-slot:visible:has(.plot.drawn .main-svg)")
    expect(drawn).to_have_count(len(names))
    assert page.evaluate(NO_WIDER)


def test_a_click_in_a_figure_selects_the_layer(opened):
    page = opened("scan", "#/weights")
    figure = bring(page, "orthogonality_by_layer")
    figure.locator(".plot").evaluate(
        "plot => plot.emit('plotly_click', { points: [{ x: 2, y: 0.1, data: plot.data[0] }] })"
    )
    expect(page.locator("#top select[data-state=layer]")).to_have_value("2")


def test_the_numbers_in_the_page_are_the_tables_numbers(opened, planted_run):
    page = opened("scan", "#/weights?layer=3")
    figure = bring(page, "pair_matrix")
    rows = "Array.from(trace.customdata, (row) => Array.from(row))"
    drawn = figure.evaluate(f"slot => slot.querySelector('.plot').data.map((trace) => {rows})")
    pairs = (
        planted_run.table("pairs")
        .query("layer == 3 and router == 'raw' and k < 256")
        .sort_values(["k", "router_index", "expert"])
    )
    flat = [cell for matrix in drawn for row in matrix for cell in row]
    assert flat == pytest.approx(pairs["align"].tolist(), abs=2e-5)


def test_the_k_slider_moves_matrix_and_caption(opened):
    page = opened("scan", "#/weights?layer=1")
    figure = bring(page, "pair_matrix")
    figure.locator("input[type=range]").fill("0")
    expect(figure.locator("output")).to_have_text("1")
    expect(figure.locator(".caption")).to_contain_text("(random direction: 0.00391)")
    shown = "slot => slot.querySelector('.plot').data.findIndex((trace) => trace.visible === true)"
    assert figure.evaluate(shown) == 0


def test_a_reader_downloads_a_table_and_a_figures_data_as_csv(opened, planted_run):
    page = opened("scan", "#/weights")
    page.locator("section[data-section=layer-table]:visible").scroll_into_view_if_needed()
    with page.expect_download() as download:
        page.locator("section[data-section=layer-table]:visible button.csv").click()
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert download.value.suggested_filename == "moescope-layers_at_a_glance.csv"
    assert len(lines) == 1 + 5
    best = planted_run.table("alignment_tests").query("layer == 2 and router == 'raw'")["best_k"].iloc[0]
    heads = lines[0].split(",")
    assert lines[3].split(",")[heads.index("best_k")] == str(best)
    figure = bring(page, "identification_by_k")
    figure.locator(".menu > summary").click()
    with page.expect_download() as download:
        figure.locator(".menu button", has_text="CSV").click()
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "trace,x,y,value"
    rows = planted_run.table("alignment_layers").query("router == 'raw' and not degenerate")
    assert sum(line.startswith("layer ") for line in lines) == len(rows)


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


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers(opened):
    """Python's csv reads the page's text as a spreadsheet would."""
    text = opened("scan").evaluate("cells => M.csv(['cell'], cells.map((cell) => [cell]))", HOSTILE)
    cells = [row[0] for row in csv.reader(io.StringIO(text, newline=""))][1:]
    assert cells == [f"'{cell}" for cell in HOSTILE[:6]] + [*map(str, HOSTILE[6:])]


def test_a_column_head_leads_to_the_glossary(opened):
    page = opened("scan", "#/weights")
    page.locator("section[data-section=layer-table]:visible").scroll_into_view_if_needed()
    page.locator("section[data-section=layer-table]:visible th a", has_text="ambiguity").first.click()
    expect(page.locator("[id='term-absolute_score']")).to_be_in_viewport()


def test_the_theme_button_repaints_figures_and_map(opened):
    page = opened("scan", "#/weights")
    bring(page, "identification_by_k")
    color = "document.querySelector('.plot.drawn').layout.font.color"
    light = page.evaluate(color)
    page.locator("#theme").click()
    assert page.evaluate(color) != light


def test_experts_can_be_ordered_by_similarity(opened):
    page = opened("scan", "#/weights?layer=3")
    figure = bring(page, "cosine_heatmap")
    figure.locator(".controls input[type=checkbox]").check()
    order = figure.evaluate("slot => slot.querySelector('.plot').layout.xaxis.categoryarray")
    assert abs(order.index("2") - order.index("5")) == 1


def test_the_definition_of_a_figure_is_one_click_away(opened):
    page = opened("scan", "#/weights")
    figure = bring(page, "identification_by_k")
    opacity = "plot => plot.data.map((trace) => trace.opacity ?? 1)"
    assert set(figure.locator(".plot").evaluate(opacity)) == {1}  # no layer is selected: no line fades
    figure.locator(".ask").click()
    expect(figure.locator(".definition")).to_contain_text("chance 1/n")


def test_a_figure_is_saved_on_white_with_its_title_even_from_a_dark_page(opened):
    page = opened("scan", "#/weights", scheme="dark")
    figure = bring(page, "identification_by_k")
    title = figure.locator("h4").text_content()
    figure.locator(".menu > summary").click()
    with page.expect_download() as download:
        figure.locator(".menu button", has_text="SVG, single column").click()
    picture = Path(download.value.path()).read_text(encoding="utf-8")
    assert title in picture
    assert "background: rgb(255, 255, 255)" in picture or "fill: rgb(255, 255, 255)" in picture
    assert "85mm" in download.value.suggested_filename


def test_pictures_of_the_menu_are_as_large_as_those_of_the_command_and_their_digits_readable(opened):
    page = opened("scan", "#/weights?layer=1")
    figure = bring(page, "pair_matrix")
    figure.locator(".menu > summary").click()
    with page.expect_download() as download:
        figure.locator(".menu button", has_text="SVG, single column").click()
    picture = Path(download.value.path()).read_text(encoding="utf-8")
    (width,) = re.findall(r'<svg[^>]* width="([\d.]+)"', picture)[:1]
    (inner,) = re.findall(r'<svg[^>]* viewBox="0 0 ([\d.]+)', picture)[:1]
    assert float(width) * 25.4 / 96 == pytest.approx(85, abs=0.2)
    assert float(inner) / float(width) == pytest.approx(1.3, rel=0.01)
    assert "font-size: 13px" in picture
    digits = set(re.findall(r"annotation-text[^>]*fill: (rgb[^;]*);[^>]*>\d\.\d\d</text>", picture))
    assert digits <= {"rgb(0, 0, 0)", "rgb(255, 255, 255)"}
    assert digits


@pytest.mark.parametrize(("width", "digits"), [(1400, 64), (390, 0)])
def test_cells_too_narrow_for_digits_have_none(opened, width, digits):
    page = opened("scan", "#/weights?layer=1", width=width)
    assert bring(page, "pair_matrix").locator(".heatmap-label text").count() == digits


@pytest.mark.parametrize(("width", "pinned"), [(820, ""), (1000, ""), (1400, "&pinned=0.1")])
def test_the_drawer_leaves_the_selected_cell_visible(opened, planted_run, width, pinned):
    last = int(planted_run.table("alignment")["expert"].max())
    page = opened("scan", f"#/overview?layer=1&expert={last}{pinned}", width=width)
    expect(page.locator("#drawer")).to_be_visible()
    page.wait_for_function(
        """last => {
          const box = (selector) => document.querySelector(selector).getBoundingClientRect();
          const { left, cellWidth } = M.map.layout();
          const right = box("canvas").x + left + (last + 1) * cellWidth;
          return right <= box("#drawer").x && right <= box(".map-frame").right + 1;
        }""",
        arg=last,
    )


def test_what_a_report_lacks_is_added_by_commands_filled_in_from_its_run(opened, planted_run):
    page = opened("scan", "#/routing")
    expect(page.locator("#tab-overview .card").first).to_be_visible()  # a link to a tab that is not there
    expect(page.locator("#tabs a[data-tab=routing]")).to_have_count(0)
    page.locator("#tabs .add > summary").click()
    model = planted_run.info["checkpoints"][0]["path"]
    commands = page.locator("#tabs .add .command")
    expect(commands.first).to_have_text(f"moescope trace {model} --text FILE --save-tokens")
    expect(commands.filter(has_text="intervene")).to_have_text(
        f"moescope intervene {model} --sweep experts --text FILE"
    )
    expect(page.locator("#tabs .add p")).to_contain_text(f"moescope report {planted_run.path} NEW_RUN")


def test_the_experts_tab_opens_on_an_expert_of_a_finding_and_says_why(opened, traced_run):
    page = opened("trace", "#/experts")
    why = page.locator("#tab-experts .why")
    expect(why).to_contain_text("Shown first: ")
    summary = traced_run.verb.summary(traced_run)
    said = why.inner_text().removeprefix("Shown first: ")
    places = {str(text): text.place for text in summary.findings if hasattr(text, "place")}
    place = places.get(said)
    if place:  # else the map's most extreme expert
        expect(page.locator("#tab-experts h2").first).to_have_text(f"L{place['layer']} · E{place['expert']}")
    names = page.locator("#tab-experts h2").first.inner_text().split(" · ")
    layer, expert = (int(name[1:]) for name in names)
    load = traced_run.table("load_totals").set_index(["step", "layer", "expert"])
    assert load.loc[(200, layer, expert), "tokens"].min() > 0


@pytest.fixture
def few_figures(planted_run, monkeypatch):
    """A run whose sections have two figures across layers per view, one of a layer: half a second each."""

    own = planted_run.verb

    def sections(run, selection):
        first = own.sections(run, selection)
        across = [replace(part, figures=part.figures[:2]) for part in first if part.anchor == "alignment"]
        layer = next(part for part in first if part.layer == 0)
        return [*across, replace(layer, figures=layer.figures[:1], sections=[])]

    verb = replace(own, sections=sections, overlay=lambda runs: [])
    monkeypatch.setattr(Run, "verb", verb)
    return planted_run


def test_figures_are_written_as_pictures(browser, few_figures, tmp_path):
    report(few_figures, out=tmp_path / "report.html", figures=tmp_path / "figures", format="svg", quiet=True)
    written = sorted(file.name for file in (tmp_path / "figures").iterdir())
    assert len(written) == 2 * 2 + 1
    assert "run-alignment-gate_raw_router-identification_by_k.svg" in written
    assert "run-layer-0-gate_raw_router-pair_matrix.svg" in written
    picture = (tmp_path / "figures" / "run-alignment-gate_raw_router-identification_by_k.svg").read_text(
        encoding="utf-8"
    )
    assert picture.lstrip().startswith("<svg")
    assert "accuracy" in picture
    (width,) = re.findall(r'<svg[^>]* width="([\d.]+)"', picture)[:1]
    assert float(width) * 25.4 / 96 == pytest.approx(175, abs=0.2)  # 96 CSS pixels are an inch


def test_a_pdf_is_as_wide_as_a_column_and_has_no_title(browser, few_figures, tmp_path):
    folder = tmp_path / "figures"
    report(few_figures, out=tmp_path / "r.html", figures=folder, format="pdf", width=85, title=False)
    assert len(list(folder.iterdir())) == 2 * 2 + 1
    for file in folder.iterdir():
        content = file.read_bytes()
        assert content.startswith(b"%PDF-")
        assert content.count(b"/Type /Page\n") == 1
        (width,) = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ", content)
        assert float(width) * 25.4 / 72 == pytest.approx(85, abs=0.4)  # points; whole pixels


def test_a_picture_that_cannot_be_written_fails_the_export(browser, few_figures, tmp_path, monkeypatch):
    monkeypatch.setattr("moescope.reporting.export.check_export", lambda folder: None)
    with pytest.raises(Exception, match="missing"):
        export_figures([few_figures], tmp_path / "missing", "svg", quiet=True)


def test_on_a_phone_a_long_legend_leaves_room_for_its_figure(opened):
    page = opened("scan", width=390)
    expect(page.locator("canvas")).to_be_visible()
    page.evaluate(
        """() => {
          const line = (at) => ({ type: 'scatter', mode: 'lines', name: `a line of a long name, number ${at}`,
            x: [0, 1], y: [0, at] });
          const layout = { xaxis: { title: { text: 'x' } }, yaxis: { title: { text: 'y' } } };
          const figure = { name: 'many', title: 'Many lines', caption: 'Ten.', columns: [], height: 320,
            data: [...Array(10).keys()].map(line), layout };
          document.querySelector('#tab-overview').append(M.figures.element(figure));
        }"""
    )
    plot = page.locator("figure[data-name=many] .plot.drawn")
    expect(plot).to_be_visible()
    over, height = plot.evaluate(
        """plot => { const legend = plot.querySelector('.legend').getBoundingClientRect();
          const { t, h } = plot._fullLayout._size;
          return [legend.bottom - plot.getBoundingClientRect().top - t, h]; }"""
    )
    assert over <= 4
    assert height >= 120
