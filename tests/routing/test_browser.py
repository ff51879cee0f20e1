"""The routing part of the page in a real browser.

What a reader does works, and what a text holds does nothing.
"""

import pytest
from playwright.sync_api import expect

from moescope.reporting.verb import report
from moescope.routing.figures_experts import MAPS
from moescope.routing.figures_steps import FIGURES
from reporting.test_browser import scroll_through
from routing.routing_runs import EVIL, evil_run


@pytest.fixture(scope="module")
def pages(traced_run, tmp_path_factory):
    """Two reports: of two steps in both phases, and of a text that is all attack."""
    folder = tmp_path_factory.mktemp("pages")
    return {
        "traced": report(traced_run, out=folder / "traced.html"),
        "evil": report(evil_run(folder / "evil"), out=folder / "evil.html"),
    }


@pytest.fixture
def opened(browser, pages):
    """Opens a report; afterwards nothing may have been said, asked for or carried out."""
    found, troubles, requests = [], [], []

    def open_page(name="traced", width=1400, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(pages[name].as_uri())
        found.append((context, page))
        return page

    yield open_page
    for context, page in found:
        assert page.evaluate("window.hacked") is None
        context.close()
    assert troubles == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def text_of(page):
    page.locator("#trace-text").scroll_into_view_if_needed()
    body = page.locator("#trace-text .tokens:visible")
    expect(body).to_be_visible()
    return body


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_routing_figure_is_drawn_and_nothing_is_wider_than_the_page(opened, width, scheme):
    page = opened("traced", width, scheme)
    scroll_through(page)
    slots = page.locator(".figure-slot:visible")
    count = len([spec for spec in FIGURES if spec not in MAPS]) + 3  # maps of four experts by PCA alone
    assert slots.count() == count
    expect(page.locator(".figure-slot:visible .plot.drawn")).to_have_count(count)
    text_of(page)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_reader_points_at_a_token_and_sees_its_experts_and_gates(opened, traced_run):
    page = opened()
    body = text_of(page)
    row = (
        traced_run.table("tokens")
        .query("step == 200 and layer == 0 and document == 0 and position == 1")
        .iloc[0]
    )
    body.locator(".token").nth(1).hover()
    tip = page.locator("#trace-text .tip:visible")
    expect(tip).to_contain_text(f"word{row['token_id'] - 4}")
    expect(tip).to_contain_text(f"expert {row['experts'][0]} gate {row['gates'][0]:.3g}")
    expect(tip).to_contain_text(f"expert {row['experts'][1]}")
    body.focus()
    page.keyboard.press("ArrowRight")
    expect(body.locator(".token").nth(2)).to_have_class("token current")


def test_colours_follow_layer_document_and_expert(opened, traced_run):
    page = opened()
    body = text_of(page)
    first = "all => all.map((span) => Number(span.dataset.expert))"
    tokens = traced_run.table("tokens").query("step == 200 and document == 0").sort_values("position")
    assert body.locator(".token").evaluate_all(first) == [e[0] for e in tokens.query("layer == 0")["experts"]]
    page.locator("#trace-text .controls:visible input[type=range]").fill("2")
    assert body.locator(".token").evaluate_all(first) == [e[0] for e in tokens.query("layer == 2")["experts"]]
    page.locator("#trace-text select[aria-label=expert]:visible").select_option("3")
    coloured = body.locator(".token").evaluate_all(
        "all => all.map((span) => span.style.getPropertyValue('--hue') !== 'transparent')"
    )
    assert coloured == [3 in experts for experts in tokens.query("layer == 2")["experts"]]
    expect(page.locator("#trace-text h4:visible")).to_contain_text(
        f"expert 3 is chosen at {sum(coloured)} of {len(coloured)} tokens"
    )
    page.locator("#trace-text select[aria-label=document]:visible").select_option(label="document 30, other")
    other = (
        traced_run.table("tokens")
        .query("step == 200 and document == 30 and layer == 2")
        .sort_values("position")
    )
    assert body.locator(".token").all_text_contents() == [f"word{token - 4}" for token in other["token_id"]]


def test_the_glance_table_leads_to_a_layers_experts(opened, traced_run):
    page = opened()
    page.locator("#summary .table-block:visible td a").nth(1).click()
    layer = page.locator("#trace-v3-layer-1")
    expect(layer).to_have_attribute("open", "")
    expect(layer.locator(".card")).to_have_count(4)
    load = (
        traced_run.table("load")
        .query("step == 200 and phase == 'prefill' and layer == 1")
        .groupby("expert")["tokens"]
        .sum()
    )
    expect(layer.locator(".card").nth(2)).to_contain_text(
        f"{load[2] / load.mean():.3g}".rstrip("0") + " × an even share"
    )
    token = layer.locator(".card").nth(2).locator(".chip").first.text_content()
    layer.locator("input[type=search]").fill(token)
    expect(layer.locator(".card").nth(2)).to_be_visible()
    layer.locator("input[type=search]").fill("no such token")
    expect(layer.locator(".card:visible")).to_have_count(0)


def test_a_reader_changes_the_view_and_sees_only_that_one(opened):
    page = opened()
    expect(page.locator("#trace-load [data-view='3']")).to_be_visible()
    page.locator("select[data-selects=trace]").select_option(label="step 100, decode")
    expect(page.locator("#trace-load [data-view='3']")).to_be_hidden()
    expect(page.locator("#trace-separation [data-view='0']")).to_contain_text("the other phase only")
    page.evaluate("location.hash = '#trace-v2-layer-0'")
    expect(page.locator("#trace-v2-layer-0 .card").first).to_be_visible()


def test_tokens_that_are_markup_are_shown_as_text_and_do_nothing(opened):
    page = opened("evil")
    scroll_through(page)
    body = text_of(page)
    words = body.locator(".token").all_text_contents()
    assert words[:9] == EVIL[:9]
    assert words[10:12] == ["[U+202E]gnp.exe[U+2066]", "[U+200B]"]
    for layer in range(3):
        page.locator(f"#trace-v0-layer-{layer} > summary").click()
        expect(page.locator(f"#trace-v0-layer-{layer} .chip").first).to_be_visible()
        page.locator(f"#trace-v0-layer-{layer} .card details > summary").first.click()
        expect(page.locator(f"#trace-v0-layer-{layer} .context mark").first).to_be_visible()
    contexts = page.locator(".context").all_text_contents()
    assert any("<script>window.hacked=1</script>" in line for line in contexts)
    assert any("[U+202E]gnp.exe[U+2066]" in line for line in contexts)
    assert not [line for line in contexts if set(line) & set("\u202e\u2066\u200b")]
    for index in range(len(EVIL)):
        body.locator(".token").nth(index).hover()
        expect(page.locator("#trace-text .tip strong")).to_have_text(words[index])
    assert page.locator("main img").count() == 0
    assert page.locator("main script").count() == 0
    chips = set(page.locator(".chip").all_text_contents())
    assert {"-->", "<b>bold</b>", "<script>window.hacked=1</script>"} <= chips
