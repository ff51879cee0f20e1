"""The page as a workbench, in a real browser: one selection drives every view, and every state is a link."""

import io
import re

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect
from scipy.cluster.hierarchy import fcluster, linkage

from browsing import NO_WIDER, PAINTED, bring, click_cell, scroll_through


def state(page):
    return page.evaluate("M.state.get()")


def boxes(page, what=".card, canvas, .findings-box"):
    return page.locator(what).evaluate_all(
        "all => all.map((element) => { const box = element.getBoundingClientRect();"
        " return [box.x, box.y, box.width, box.height]; })"
    )


# --- drawer


def test_the_drawer_moves_nothing_and_closing_it_clears_what_it_selected(opened):
    page = opened("train")
    expect(page.locator("canvas")).to_be_visible()
    before = boxes(page)
    click_cell(page, 1, 2, 2, 4)
    expect(page.locator("#drawer h2")).to_have_text("L1 · E2")
    assert boxes(page) == before
    edge = page.locator("#drawer").bounding_box()["x"]
    assert all(
        x + width <= edge for x, _, width, _ in boxes(page, ".card, canvas")
    )  # it covers the findings only
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()
    assert boxes(page) == before
    assert "layer" not in state(page)
    page.locator("#top select[data-state=layer]").select_option("0")  # selected by hand: it stays
    click_cell(page, 1, 0, 2, 4)
    expect(page.locator("#drawer h2")).to_have_text("L1 · E0")
    page.locator("#drawer a[aria-label=Close]").click()
    expect(page.locator("#drawer")).to_be_hidden()
    assert state(page)["layer"] == 0


def test_a_pinned_expert_stands_beside_the_opened_one_and_never_twice(opened):
    page = opened("trace")
    click_cell(page, 1, 2, 3, 4)
    heads = page.locator("#drawer h2")
    page.locator("#drawer a", has_text="Pin").click()
    expect(heads).to_have_text(["L1 · E2"])
    page.locator("#drawer a[aria-label='Next expert']").click()
    expect(heads).to_have_text(["L1 · E3", "L1 · E2"])
    first, second = page.locator("#drawer .expert-column").all()
    assert first.bounding_box()["y"] == second.bounding_box()["y"]
    assert first.bounding_box()["x"] < second.bounding_box()["x"]
    expect(page.locator("#drawer a[aria-label='Next expert']")).to_have_count(0)  # layer 1 has four experts
    click_cell(page, 0, 0, 3, 4)
    expect(heads).to_have_text(["L0 · E0", "L1 · E2"])
    link = page.evaluate("location.hash").replace("overview", "experts")
    page.locator("#drawer a", has_text="Unpin").click()
    expect(heads).to_have_text(["L0 · E0"])
    page = opened("trace", link)
    expect(page.locator(".expert-column h2")).to_have_text(["L0 · E0", "L1 · E2"])


# --- layers

# Per drawn figure that has layers: the layers that it marks, draws strongly or has slid to.
LAYERS_SHOWN = """() => {
  const visible = [...document.querySelectorAll(".figure-slot")].filter((slot) => slot.offsetParent);
  return visible.map((slot) => {
    const plot = slot.querySelector(".plot");
    const axes = Object.keys(plot.layout).filter((key) => /^[xy]axis/.test(key)
      && plot.layout[key].title?.text === "layer");
    const lines = plot.data.filter((trace) => /^layer \\d+$/.test(trace.name ?? ""));
    const labels = [...slot.querySelectorAll(".controls label")];
    const slider = labels.find((label) => label.textContent.startsWith("layer"));
    if (!axes.length && !lines.length && !slider) return null;
    const layerAt = (axis, at) => {
      const { ticktext, tickvals, _categories: names } = plot._fullLayout[axis];
      return Number(ticktext?.[Array.from(tickvals).indexOf(at)] ?? (names?.length ? names[at] : at));
    };
    const marks = (plot.layout.shapes ?? []).filter((shape) => shape.name === "selected layer");
    const shown = axes.flatMap((axis) => marks.map((shape) =>
      layerAt(axis, (shape[axis[0] + "0"] + shape[axis[0] + "1"]) / 2)));
    const strong = lines.filter((trace) => (trace.opacity ?? 1) === 1);
    if (strong.length < lines.length || lines.length === 1) {
      shown.push(...strong.map((trace) => Number(trace.name.slice(6))));
    }
    if (slider) shown.push(Number(slider.querySelector("output").textContent));
    return [slot.dataset.figure, [...new Set(shown)]];
  }).filter(Boolean);
}"""


@pytest.mark.parametrize(("tab", "least"), [("weights", 8), ("routing", 11)])
def test_a_click_on_the_map_changes_every_figure_that_has_layers(opened, tab, least):
    page = opened("train")
    click_cell(page, 1, 2, 2, 4)
    page.locator(f"#tabs a[data-tab={tab}]").click()
    expect(page.locator(f"#tab-{tab} .figure-slot").first).to_be_visible()
    scroll_through(page)
    shown = page.evaluate(LAYERS_SHOWN)
    assert len(shown) >= least
    assert [name for name, layers in shown if layers != [1]] == []
    page.evaluate("M.state.set({ layer: 0, expert: 2 })")
    expect(page.locator("#drawer h2")).to_have_text("L0 · E2")
    scroll_through(page)  # sections of layer 0 are new
    shown = page.evaluate(LAYERS_SHOWN)
    assert len(shown) >= least
    assert [name for name, layers in shown if layers != [0]] == []


def test_without_a_selected_layer_every_slider_starts_at_the_first_and_a_section_says_so(opened):
    page = opened("train", "#/routing")
    expect(page.locator("#tab-routing .figure-slot").first).to_be_visible()
    scroll_through(page)
    sliders = page.locator("#tab-routing .controls label:has-text('layer') output:visible")
    assert sliders.count() >= 3
    assert set(sliders.all_text_contents()) == {"0"}
    marked = page.evaluate(LAYERS_SHOWN)
    assert all(layers in ([], [0]) for name, layers in marked)
    layer = page.locator("section[data-section=layer-0]:visible")
    expect(layer.locator(".hint")).to_be_visible()
    page.locator("#top select[data-state=layer]").select_option("0")
    expect(layer.locator(".hint")).to_be_hidden()


# --- domain and phase


def test_domain_and_phase_are_selected_once_and_obeyed_everywhere(opened, traced_run):
    page = opened("trace")
    page.locator("select[aria-label='Colour of the map']").select_option("domain_affinity")
    expect(page.locator("#top select[data-state=domain]")).to_have_value("other")
    page.locator("#top select[data-state=domain]").select_option("plain")
    expect(page.locator(".map h2")).to_have_text("Domain affinity: plain")
    expect(page.locator(".verdicts p")).to_contain_text("plain: load is ")
    expect(page.locator(".findings-box li").first).to_contain_text("Load balance")
    rows = traced_run.table("routing_layers").query("metric == 'cv' and step == 200 and phase == 'prefill'")
    worst = rows.query("domain == 'plain'")["value"].max()
    assert worst != rows.query("domain == ''")["value"].max()
    card = page.locator(".card", has_text="Worst load CV").locator(".value")
    expect(card).to_have_text(f"{worst:.3g}")
    lifts = traced_run.table("domains").query("step == 200 and domain == 'plain'")
    wanted = lifts.pivot(index="layer", columns="expert", values="affinity").to_numpy()
    np.testing.assert_allclose(np.array(page.evaluate("M.map.shown().value"), float), wanted, rtol=1e-3)
    click_cell(page, 1, 2, 3, 4)
    drawer = page.locator("#drawer")
    expect(drawer.locator(".bar-row.here bdi").first).to_have_text("plain")
    expect(drawer.locator("tr[data-measure=domain_affinity] th")).to_have_text("Domain affinity: plain")
    titles = drawer.locator(".context").evaluate_all("all => all.map((line) => line.title)")
    assert all(", plain," in title for title in titles)
    page.keyboard.press("Escape")
    page.locator("#tabs a[data-tab=routing]").click()
    slot = bring(page, "by_domain")
    strong = "plot => Object.fromEntries(plot.data.map((trace) => [trace.name, trace.opacity ?? 1]))"
    by_domain = slot.locator(".plot").evaluate(strong)
    assert by_domain["plain"] == 1
    assert by_domain["other"] < 0.5
    slot = page.locator("[data-figure=affinity_heatmap]:visible")
    slot.scroll_into_view_if_needed()
    expect(slot.locator(".plot.drawn")).to_be_visible()
    marks = "plot => plot.layout.shapes.filter((shape) => shape.name === 'selected domain').length"
    assert slot.locator(".plot").evaluate(marks) == 1
    table = page.locator("#tab-routing section[data-section=domains]:visible details.table-block")
    table.locator("summary").click()
    heads = table.locator("th").all_text_contents()
    cells = table.locator(f"tbody tr:visible td:nth-child({heads.index('domain') + 1})").all_text_contents()
    assert set(cells) == {"plain"}
    assert len(cells) == len(lifts)
    page.locator("#top select[data-state=phase]").select_option("decode")
    page.locator("#top select[data-state=step]").select_option(label="100")
    page = opened("trace", page.evaluate("location.hash"))
    expect(page.locator("#top select[data-state=domain]")).to_have_value("plain")
    expect(page.locator("#top select[data-state=phase]")).to_have_value("decode")
    assert page.evaluate("M.map.candidates().every((measure) => measure.view === 'step 100, decode')")


def test_a_run_of_one_domain_and_phase_offers_neither(opened):
    page = opened("compress")
    expect(page.locator("#top select[data-state=layer]")).to_be_visible()
    expect(page.locator("#top select[data-state=domain], #top select[data-state=phase]")).to_have_count(0)


# --- map


def test_the_strips_beside_the_map_are_about_its_colour(opened):
    page = opened("train", "#/overview?colour=alignment&vs=none")
    strips = "M.map.layout().strips.map((strip) => strip.name)"
    expect(page.locator("canvas")).to_be_visible()
    assert page.evaluate(strips)[0] == "best_accuracy"
    for colour, first in (("load", "cv"), ("domain_affinity", "domain_information")):
        page.locator("select[aria-label='Colour of the map']").select_option(colour)
        page.wait_for_function(f"M.map.shown().name === '{colour}' && {strips}[0] === '{first}'")


def shown_orders(page):
    return page.evaluate("M.map.layout().orders")


def test_the_map_sorts_by_load_and_by_cluster_and_a_link_keeps_the_order(opened, planted_run, traced_run):
    page = opened("trace")
    expect(page.locator("canvas")).to_be_visible()
    page.locator("select[aria-label='Order of experts']").select_option("load")
    load = traced_run.table("load").query("step == 200 and phase == 'prefill'")
    for layer, order in enumerate(shown_orders(page)):
        tokens = load[load["layer"] == layer].groupby("expert")["tokens"].sum()
        assert tokens[order].is_monotonic_decreasing
    page.locator("label:has-text('highlight: beyond chance') input").check()
    orders = shown_orders(page)
    page = opened("trace", page.evaluate("location.hash"))
    expect(page.locator("select[aria-label='Order of experts']")).to_have_value("load")
    expect(page.locator("label:has-text('highlight: beyond chance') input")).to_be_checked()
    assert shown_orders(page) == orders

    page = opened("scan", "#/overview?sort=cluster")
    expect(page.locator("canvas")).to_be_visible()
    pairs = planted_run.table("similarity").query("k == 1")
    for layer, order in enumerate(shown_orders(page)):
        rows = pairs[pairs["layer"] == layer]
        cosine = np.eye(8)
        cosine[rows["expert_a"], rows["expert_b"]] = cosine[rows["expert_b"], rows["expert_a"]] = rows[
            "cosine"
        ]
        tree = linkage((1 - np.abs(cosine))[np.triu_indices(8, 1)], "average")
        for count in (2, 3, 4):  # every cut of the tree is a run of neighbours
            groups = fcluster(tree, count, "maxclust")[order]
            assert np.count_nonzero(np.diff(groups)) == len(set(groups)) - 1


def test_pointing_at_a_cell_shows_value_and_chance_and_a_row_selects_its_layer(opened, traced_run):
    page = opened("trace")
    expect(page.locator("canvas")).to_be_visible()
    layout = page.evaluate("M.map.layout()")
    y = layout["top"] + 1.5 * layout["cellHeight"]
    page.locator("canvas").hover(position={"x": layout["left"] + 2.5 * layout["cellWidth"], "y": y})
    load = traced_run.table("load").query("step == 200 and phase == 'prefill' and layer == 1")
    tokens = load.groupby("expert")["tokens"].sum()
    tip = page.locator(".map .tip")
    expect(tip).to_contain_text(f"{tokens[2] / tokens.mean():.3g} × even share")
    expect(tip).to_contain_text("chance 1")
    page.locator("canvas").click(position={"x": 12, "y": y})
    expect(page.locator("#top select[data-state=layer]")).to_have_value("1")
    expect(page.locator("#drawer")).to_be_hidden()


def test_cells_beyond_chance_are_outlined_and_the_others_fade(opened, traced_run):
    page = opened("trace", "#/overview?colour=load")
    expect(page.locator("canvas")).to_be_visible()
    beyond = [bool(cell) for row in page.evaluate("M.map.shown().beyond") for cell in row]
    layout = page.evaluate("M.map.layout()")
    before = pixels(page.locator("canvas"))
    page.locator("label:has-text('highlight: beyond chance') input").check()
    expect(page.locator("label:has-text('highlight: beyond chance') input")).to_be_checked()
    after = pixels(page.locator("canvas"))
    outlined = []
    for row in range(3):
        y = int(layout["top"] + (row + 0.5) * layout["cellHeight"])
        for column in range(4):
            x = round(layout["left"] + column * layout["cellWidth"])
            darker = before[y, x - 1 : x + 3].sum(axis=1) - after[y, x - 1 : x + 3].sum(axis=1)
            outlined.append(bool(darker.max() > 200))
    assert any(beyond)
    assert outlined == beyond


def pixels(locator):
    """[height, width, 3] of an element as it is on the screen."""
    return np.asarray(Image.open(io.BytesIO(locator.screenshot())).convert("RGB"), int)


# --- contrast

# Every visible text of the page, HTML and SVG: where its middle is, its colour, its opacity.
TEXTS = """() => {
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own.length || node.closest("script, style, option, noscript, .button.off")) continue;
    const range = document.createRange();
    range.selectNodeContents(own[0]);
    const box = range.getBoundingClientRect();
    if (!box.width || box.top < 0 || box.left < 0) continue;
    if (box.bottom > innerHeight || box.right > innerWidth) continue;
    const seen = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
    if (!node.closest("svg") && !(node.contains(seen) || seen?.contains(node))) continue;
    let opacity = 1;
    for (let up = node; up; up = up.parentElement) opacity *= Number(getComputedStyle(up).opacity);
    const style = getComputedStyle(node);
    const svg = node instanceof SVGElement;
    found.push([node.textContent.slice(0, 30), box.x, box.y, box.width, box.height,
      svg ? style.fill : style.color, opacity * (svg ? Number(style.fillOpacity) : 1)]);
  }
  return found;
}"""
NO_INK = """* { color: transparent !important; text-shadow: none !important; }
text, tspan { fill: transparent !important; }"""


def luminance(rgb):
    part = np.asarray(rgb, float) / 255
    part = np.where(part <= 0.03928, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
    return part @ [0.2126, 0.7152, 0.0722]


def poor_texts(page):
    """Texts in view whose contrast (WCAG 2) with the pixels behind them is below 4.5."""
    texts = page.evaluate(TEXTS)
    style = page.add_style_tag(content=NO_INK)
    page.evaluate(PAINTED)
    behind = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"), int)
    style.evaluate("element => element.remove()")
    found = []
    for words, x, y, width, height, color, opacity in texts:
        ink = np.array([float(part) for part in re.findall(r"[\d.]+", color)[:3]])
        patch = behind[int(y) : int(y + height) + 1, int(x) : int(x + width) + 1].reshape(-1, 3)
        back = np.median(patch, axis=0)
        light, dark = sorted((luminance(ink * opacity + back * (1 - opacity)), luminance(back)), reverse=True)
        if (light + 0.05) / (dark + 0.05) < 4.5:
            found.append((words, color, back.tolist()))
    return found, len(texts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    ("name", "place", "selector"),
    [
        ("scan", "#/weights?layer=3", "[data-figure=pair_matrix]"),
        ("trace", "#/overview?layer=1&expert=2", "#drawer h2"),
        pytest.param("scan", "#/weights?layer=3", "[data-figure=cosine_heatmap]", marks=pytest.mark.slow),
        pytest.param(
            "trace", "#/routing?layer=1", "[data-figure=coactivation_heatmap]", marks=pytest.mark.slow
        ),
        pytest.param("trace", "#/text?layer=1", ".tokens", marks=pytest.mark.slow),
    ],
)
def test_every_text_has_a_contrast_of_four_and_a_half(opened, name, place, selector, scheme):
    figure = selector.strip("[]").removeprefix("data-") if "data-figure" in selector else ""
    page = opened(name, f"{place}&{figure}", scheme=scheme)
    expect(page.locator(f"{selector}:visible").first).to_be_in_viewport()
    expect(page.locator(f"{selector} .plot:not(.drawn):visible")).to_have_count(0)
    page.evaluate(PAINTED)
    if selector == ".tokens":
        page.locator(".token").nth(3).hover()
    poor, count = poor_texts(page)
    assert count > 20
    assert poor == []


def test_diverging_maps_have_a_dark_midpoint_in_the_dark(opened):
    page = opened("trace", "#/routing?figure=coactivation_heatmap", scheme="dark")
    slot = page.locator("[data-figure=coactivation_heatmap]:visible")
    expect(slot.locator(".plot.drawn")).to_be_visible()
    stops = slot.locator(".plot").evaluate("plot => plot.data[0].colorscale.map(([, color]) => color)")
    lights = [luminance([int(color[at : at + 2], 16) for at in (1, 3, 5)]) for color in stops]
    middle = int(np.argmin(lights))
    assert lights[middle] < 0.1
    assert middle == len(lights) // 2  # and brighter on the way to both ends
    assert np.all(np.diff(lights[: middle + 1]) < 0)
    assert np.all(np.diff(lights[middle:]) > 0)
    page.locator("#tabs a[data-tab=overview]").click()
    expect(page.locator(".gradient")).to_be_visible()
    gradient = pixels(page.locator(".gradient"))
    assert luminance(gradient[gradient.shape[0] // 2, gradient.shape[1] // 2]) < 0.1


# --- search


FOUND = {  # words -> what the first result selects
    "L1 E2": {"layer": 1, "expert": 2},
    "1/2": {"layer": 1, "expert": 2},
    "L2": {"layer": 2},
    "other": {"domain": "other"},
    "Co-activation of expert pairs": {"tab": "routing", "figure": "coactivation_heatmap"},
    "Jaccard": {"tab": "methods"},
}


def test_search_finds_experts_layers_domains_figures_and_terms(opened):
    page = opened("trace")
    expect(page.locator("canvas")).to_be_visible()
    search = page.locator("#top input[type=search]")
    search.fill("L99 E2")
    expect(page.locator(".results")).to_have_text("Nothing found")
    for words, changes in FOUND.items():
        page.evaluate("location.hash = '#/overview'")
        page.wait_for_function("M.state.get().tab === 'overview' && M.state.get().layer === undefined")
        search.fill(words)
        kind = "Glossary" if words == "Jaccard" else ""
        page.locator(".results a", has_text=kind).first.click()
        page.wait_for_function(
            "wanted => Object.keys(wanted).every((key) => M.state.get()[key] === wanted[key])", arg=changes
        )


def test_search_opens_a_figure_that_is_folded(opened):
    page = opened("scan")
    expect(page.locator("canvas")).to_be_visible()
    page.locator("#top input[type=search]").fill("normalised ambiguity")
    page.locator("#top input[type=search]").press("Enter")
    expect(page.locator("[data-figure=ambiguity_by_layer] .plot.drawn")).to_be_in_viewport()


# --- paper and phone


def test_print_has_the_overview_and_the_open_tab_with_captions_on_white(opened):
    page = opened("scan", "#/weights?layer=3", scheme="dark")
    expect(page.locator("#tab-weights .figure-slot").first).to_be_visible()
    count = page.locator("#tab-weights .figure-slot:visible").count()
    page.evaluate("window.print = () => { window.printed = true; }")
    page.keyboard.press("Control+p")  # as the button
    page.wait_for_function("window.printed")
    page.emulate_media(media="print")
    for place in ("#tab-overview .card", "#tab-overview canvas", "#tab-weights h2"):
        expect(page.locator(f"{place}:visible").first).to_be_visible()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    expect(page.locator("#tab-weights .plot.drawn:visible")).to_have_count(count)
    expect(page.locator("#tab-weights figure .caption:visible")).to_have_count(count)
    expect(page.locator(".menu:visible, .ask:visible, #drawer:visible, .search:visible")).to_have_count(0)
    widths = page.locator(".plot.drawn:visible .main-svg").evaluate_all(
        "all => all.map((svg) => svg.getBoundingClientRect().right)"
    )
    assert max(widths) <= 700
    colours = page.locator("#tab-weights .plot.drawn").evaluate_all(
        "all => all.map((plot) => plot.layout.font.color)"
    )
    assert all(luminance([int(color[at : at + 2], 16) for at in (1, 3, 5)]) < 0.1 for color in colours)
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    page.emulate_media(media="screen")
    expect(page.locator("#tab-overview")).to_be_hidden()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_on_a_phone_tabs_are_a_menu_the_map_scrolls_and_the_drawer_fills_the_screen(opened):
    page = opened("train", width=390)
    expect(page.locator("canvas")).to_be_visible()
    expect(page.locator("#tabs a:visible")).to_have_count(0)
    frame = page.locator(".map-frame").bounding_box()
    findings = page.locator(".overview-row > .findings-box").bounding_box()
    assert findings["y"] + findings["height"] <= frame["y"]
    assert frame["x"] + frame["width"] <= 390
    page.evaluate("M.state.set({ layer: 1, expert: 2 })")
    expect(page.locator("#drawer h2")).to_have_text("L1 · E2")
    box = page.locator("#drawer").bounding_box()
    assert (box["x"], box["y"], box["width"], box["height"]) == (0, 0, 390, 900)
    page.locator("#drawer a[aria-label=Close]").click()
    page.locator("#tabs select").select_option("weights")
    expect(page.locator("#tab-weights h2:visible").first).to_be_visible()
    assert page.evaluate(NO_WIDER)
