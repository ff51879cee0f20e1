"""The routing part of the page in a real browser.

What a reader does works, and what a text holds does nothing.
"""

import pytest
from playwright.sync_api import expect

from browsing import NO_WIDER, click_cell, scroll_through
from moescope.reporting.verb import report
from moescope.routing.figures import FIGURES
from routing.routing_runs import EVIL, evil_run


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """The report of a text that is all attack."""
    folder = tmp_path_factory.mktemp("evil")
    return report(evil_run(folder / "run"), out=folder / "evil.html")


def text_of(page):
    body = page.locator("#tab-text .tokens:visible")
    expect(body).to_be_visible()
    return body


def open_more(page):
    more = page.locator("#tab-routing details.folded:visible", has_text="More")
    more.locator("> summary").click()
    expect(more.locator("details.inner").first).to_be_visible()
    for part in more.locator("details.inner > summary").all():
        part.click()
    return more


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_routing_figure_is_drawn_and_nothing_is_wider_than_the_page(opened, width, scheme):
    page = opened("trace", "#/routing?layer=1", width, scheme)
    expect(page.locator("#tab-routing .figure-slot").first).to_be_visible()
    open_more(page)
    scroll_through(page)
    slots = page.locator(".figure-slot:visible")
    count = len(FIGURES) - 1  # two checkpoints have no curve of saturation
    assert slots.count() == count
    expect(page.locator(".figure-slot:visible .plot.drawn")).to_have_count(count)
    assert page.evaluate(NO_WIDER)


def test_a_reader_points_at_a_token_and_sees_its_experts_and_gates(opened, traced_run):
    page = opened("trace", "#/text")
    body = text_of(page)
    row = (
        traced_run.table("tokens")
        .query("step == 200 and layer == 0 and document == 0 and position == 1")
        .iloc[0]
    )
    body.locator(".token").nth(1).hover()
    tip = page.locator("#tab-text .tip:visible")
    expect(tip).to_contain_text(f"word{row['token_id'] - 4}")
    expect(tip).to_contain_text(f"expert {row['experts'][0]} gate {row['gates'][0]:.3g}")
    expect(tip).to_contain_text(f"expert {row['experts'][1]}")
    body.focus()
    page.keyboard.press("ArrowRight")
    expect(body.locator(".token").nth(2)).to_have_class("token current")


def test_colours_follow_layer_document_and_expert(opened, traced_run):
    page = opened("trace", "#/text")
    body = text_of(page)
    first = "all => all.map((span) => Number(span.dataset.expert))"
    tokens = traced_run.table("tokens").query("step == 200 and document == 0").sort_values("position")
    assert body.locator(".token").evaluate_all(first) == [e[0] for e in tokens.query("layer == 0")["experts"]]
    page.locator("#top select[data-state=layer]").select_option("2")
    expect(page.locator("#tab-text .controls output:visible")).to_have_text("2")
    assert body.locator(".token").evaluate_all(first) == [e[0] for e in tokens.query("layer == 2")["experts"]]
    page.locator("#tab-text select[aria-label=expert]:visible").select_option("3")
    coloured = body.locator(".token").evaluate_all(
        "all => all.map((span) => span.style.getPropertyValue('--hue') !== 'transparent')"
    )
    assert coloured == [3 in experts for experts in tokens.query("layer == 2")["experts"]]
    expect(page.locator("#tab-text .caption:visible")).to_contain_text(
        f"expert 3 is chosen at {sum(coloured)} of {len(coloured)} tokens"
    )
    page.locator("#tab-text select[aria-label=document]:visible").select_option(label="document 30, other")
    other = (
        traced_run.table("tokens")
        .query("step == 200 and document == 30 and layer == 2")
        .sort_values("position")
    )
    assert body.locator(".token").all_text_contents() == [f"word{token - 4}" for token in other["token_id"]]


def test_an_expert_has_one_colour_in_every_layer_and_document_and_a_key(opened):
    page = opened("trace", "#/text")
    body = text_of(page)
    colours = "all => all.map((span) => [span.dataset.expert, span.style.getPropertyValue('--hue')])"
    keys = "all => all.map((key) => [key.dataset.expert, key.style.getPropertyValue('--hue')])"
    seen = set()
    for layer in ("0", "1", "2"):
        for document in ("0", "30"):
            page.evaluate(f"M.state.replace({{ layer: {layer}, document: '{document}' }})")
            pairs = {tuple(pair) for pair in body.locator(".token").evaluate_all(colours)}
            assert {tuple(pair) for pair in page.locator("#tab-text .key").evaluate_all(keys)} == pairs
            seen |= pairs
    assert len(seen) == len({expert for expert, _ in seen}) == len({hue for _, hue in seen}) == 4


def test_a_token_shows_its_first_choice_in_every_layer_and_the_keyboard_reaches_it(opened, traced_run):
    page = opened("trace", "#/text?layer=1")
    body = text_of(page)
    body.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    row = traced_run.table("tokens").query("step == 200 and document == 0 and position == 2")
    first = row.sort_values("layer")["experts"].map(lambda experts: str(experts[0])).tolist()
    expect(page.locator("#tab-text .tip .strip i")).to_have_text(first)
    page.keyboard.press("ArrowDown")
    expect(page.locator("#tab-text .controls output")).to_have_text("2")
    page.keyboard.press("Enter")
    expect(page.locator("#drawer h2")).to_have_text(f"L2 · E{first[2]}")
    link = page.evaluate("location.hash")
    page.evaluate("M.state.set({ domain: 'other', expert: null })")
    expect(page.locator("#tab-text select[aria-label=document]")).to_have_value("30")
    page = opened("trace", link)
    expect(page.locator("#drawer h2")).to_have_text(f"L2 · E{first[2]}")
    expect(page.locator("#tab-text select[aria-label=document]")).to_have_value("0")


def test_a_click_on_the_map_opens_the_expert_with_the_tables_numbers(opened, traced_run):
    page = opened("trace")
    click_cell(page, 1, 2, 3, 4)
    drawer = page.locator("#drawer")
    expect(drawer.locator("h2")).to_have_text("L1 · E2")
    load = (
        traced_run.table("load")
        .query("step == 200 and phase == 'prefill' and layer == 1")
        .groupby("expert")["tokens"]
        .sum()
    )
    row = drawer.locator("tr[data-measure=load]")
    assert float(row.locator("b").text_content()) == pytest.approx(load[2] / load.mean(), rel=5e-3)
    rank = int((load > load[2]).sum()) + 1
    expect(row).to_contain_text(f"rank {rank} of 4")
    lifts = traced_run.table("domains").query("step == 200 and layer == 1 and expert == 2")
    for domain, value in lifts.set_index("domain")["affinity"].items():
        shown = drawer.locator(f".bar-row[data-name='{domain}'] .amount").text_content()
        assert float(shown) == pytest.approx(value, rel=5e-3)
    token = drawer.locator(".chip").first.text_content()
    drawer.locator("a[aria-label=Close]").click()
    search = page.locator("#top input[type=search]")
    search.fill(token)
    expect(page.locator(".results a", has_text="layer 1, expert 2").first).to_be_visible()


def test_a_finding_opens_the_figure_that_shows_it(opened):
    page = opened("trace")
    page.locator(".findings-box a", has_text="Load balance").last.click()
    expect(
        page.locator("#tab-routing .figure-slot[data-figure=balance_by_layer]:visible")
    ).to_be_in_viewport()
    assert page.evaluate("M.state.get().layer") is not None


def test_two_experts_are_compared_on_the_experts_tab(opened):
    page = opened("trace", "#/experts?layer=1&expert=2")
    expect(page.locator(".expert-column h2")).to_have_text(["L1 · E2"])
    page.locator(".expert-column a", has_text="Pin").click()
    page.locator(".expert-column input[type=number]").fill("0")
    page.locator(".expert-column input[type=number]").press("Enter")
    expect(page.locator(".expert-column h2")).to_have_text(["L1 · E0", "L1 · E2"])


def test_a_reader_changes_the_view_and_sees_only_that_one(opened):
    page = opened("trace", "#/routing")
    loads = page.locator("section[data-section=load]:visible")
    expect(loads).to_have_count(1)
    page.locator("#top select[data-state=phase]").select_option("decode")
    page.locator("#top select[data-state=step]").select_option("step 100")
    expect(loads).to_have_count(1)
    expect(open_more(page)).to_contain_text("the other phase only")
    page.locator("#tabs a[data-tab=overview]").click()
    assert page.evaluate("M.map.candidates().every((measure) => measure.view === 'step 100, decode')")


def test_a_run_without_the_selected_view_shows_its_own(opened, traced_run, tmp_path):
    """Two traces with different steps and phases in one page: each has a map."""
    other = evil_run(tmp_path / "evil")
    page = opened(report(traced_run, other, out=tmp_path / "both.html"))
    for run in ("0", "1"):
        page.locator("#top select[data-state=run]").select_option(run)
        expect(page.locator("canvas")).to_be_visible()
        assert page.evaluate("M.map.candidates().map((measure) => measure.name)").count("load") == 1


def test_tokens_that_are_markup_are_shown_as_text_and_do_nothing(opened, evil):
    page = opened(evil, "#/text")
    body = text_of(page)
    words = body.locator(".token").all_text_contents()
    assert words[:9] == EVIL[:9]
    assert words[10:12] == ["[U+202E]gnp.exe[U+2066]", "[U+200B]"]
    for index in range(len(EVIL)):
        body.locator(".token").nth(index).hover()
        expect(page.locator("#tab-text .tip strong")).to_have_text(words[index])
    page.locator("#tabs a[data-tab=routing]").click()
    expect(page.locator("#tab-routing .figure-slot").first).to_be_visible()
    scroll_through(page)
    page.locator("#tabs a[data-tab=experts]").click()
    contexts, chips = [], set()
    for expert in range(4):
        page.evaluate(f"M.state.set({{ layer: 1, expert: {expert} }})")
        expect(page.locator(".expert-column h2")).to_have_text([f"L1 · E{expert}"])
        contexts += page.locator(".context").all_text_contents()
        chips |= set(page.locator(".chip").all_text_contents())
    assert any("<script>window.hacked=1</script>" in line for line in contexts)
    assert any("[U+202E]gnp.exe[U+2066]" in line for line in contexts)
    assert not [line for line in contexts if set(line) & set("\u202e\u2066\u200b")]
    assert page.locator("main img").count() == 0
    assert page.locator("main script").count() == 0
    assert page.evaluate("window.hacked") is None
    assert {"-->", "<b>bold</b>", "<script>window.hacked=1</script>"} <= chips
