"""Two trainings with different routers in one page: lines together, maps as differences."""

from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import expect

from browsing import bring
from lab.tiny_training import TOML
from moescope.lab.train import train
from moescope.reporting.verb import report
from moescope.run import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(trained_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "tiny.toml").write_text(TOML.format(steps=12))
    other = train(folder / "tiny.toml", out=folder / "other", router="spectra", device="cpu", quiet=True)
    return report(trained_run, other, out=folder / "two.html"), other


@pytest.fixture(scope="module")
def tuned(trained_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A training that starts from the checkpoint of the first: its experts are the same ones, moved."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tiny.toml").write_text(TOML.format(steps=12))
    start = trained_run.info["checkpoints"][-1]["path"]
    other = train(folder / "tiny.toml", out=folder / "tuned", from_=start, device="cpu", quiet=True)
    return report(trained_run, other, out=folder / "tuned.html"), other


@pytest.fixture
def page(opened, two):
    return opened(two[0])


@pytest.fixture
def related(opened, tuned):
    return opened(tuned[0])


def test_key_numbers_stand_side_by_side(page, two, trained_run: Run):
    losses = [
        run.table("evaluations").query("domain == ''")["loss"].iloc[-1] for run in (trained_run, two[1])
    ]
    row = page.locator(".dumbbells tr", has_text="Validation loss")
    expect(row).to_be_in_viewport(ratio=1)
    cells = row.locator("td").all_inner_texts()[1:]
    assert cells[:2] == [f"{loss:.3g}" for loss in losses]
    assert float(cells[2].replace("−", "-")) == pytest.approx(losses[1] - losses[0], rel=0.01)
    dots, low, high = row.locator(".dot"), *sorted(losses)
    places = [dot.bounding_box()["x"] for dot in dots.all()]
    assert (places[0] < places[1]) == (losses[0] == low != high)


def test_the_first_screen_says_which_loss_is_lower_and_claims_nothing_from_one_seed(page, two, trained_run):
    losses = {
        run.name: run.table("evaluations").query("domain == ''")["loss"].iloc[-1]
        for run in (trained_run, two[1])
    }
    low, high = sorted(losses, key=losses.get)
    first = page.locator(".verdicts p")
    expect(first).to_be_in_viewport(ratio=1)
    expect(first).to_contain_text(f"{losses[low]:.3g} ({low}) vs {losses[high]:.3g} ({high})")
    expect(first).to_contain_text("no claim")
    expect(page.locator(".findings-box > ol > li")).to_have_count(5)
    figure = page.locator("#tab-overview .figure-slot[data-figure=loss_by_run]")
    expect(figure).to_be_in_viewport(ratio=0.95)
    expect(figure.locator(".plot.drawn")).to_be_visible()
    lines = figure.locator(".plot").evaluate(
        "plot => plot.data.map((trace) => [trace.name, Array.from(trace.y).at(-1)])"
    )
    assert dict(lines)[low] == pytest.approx(losses[low], rel=1e-5)
    assert dict(lines)[high] == pytest.approx(losses[high], rel=1e-5)


def test_what_both_runs_say_is_said_once_with_both_names(page, two, trained_run: Run):
    notice = page.locator(".notice")
    expect(notice).to_have_count(1)
    expect(notice.locator(".run-tag")).to_have_text(f"{trained_run.name}, {two[1].name}")
    page.locator(".findings-box details > summary", has_text="more").click()
    items = page.locator(".findings-box li", has_text="Routing entropy")
    expect(items).to_have_count(1)
    expect(items.locator(".run-tag")).to_have_text([trained_run.name, two[1].name])


def test_a_comparison_is_switched_off_by_a_link_that_keeps_it_off(page):
    page.locator("#top select[data-state=vs]").select_option("none")
    expect(page.locator(".card .value").first).not_to_have_text("")
    expect(page.locator(".dumbbells")).to_have_count(0)
    page.reload()
    expect(page.locator("#top select[data-state=vs]")).to_have_value("none")
    expect(page.locator(".card").first).to_be_visible()
    expect(page.locator(".dumbbells")).to_have_count(0)


def test_losses_share_one_axis(page, two):
    page.locator("#tabs a[data-tab=training]").click()
    figure = bring(page, "loss_by_step")
    traces = figure.locator(".plot").evaluate(
        "plot => plot.data.map((trace) => [trace.name, Array.from(trace.y)])"
    )
    mine = dict(traces)
    rows = two[1].table("evaluations").query("domain == ''").sort_values("step")
    (other,) = [values for name, values in mine.items() if name.startswith("validation loss · ")]
    assert other == pytest.approx(rows["loss"].tolist(), rel=1e-5)
    assert "validation loss" in mine


@pytest.mark.parametrize("by_rank", [False, True])
def test_the_map_shows_the_ratio_of_loads_of_the_same_expert_or_of_the_same_rank(
    opened, two, tuned, trained_run: Run, by_rank
):
    """Expert j of two separate trainings is not the same expert: their sorted loads are compared."""
    place, other = two if by_rank else tuned
    page = opened(place)
    page.locator("select[aria-label='Colour of the map']").select_option("load")
    title = "Load by rank: change" if by_rank else "Load per expert: change"
    expect(page.locator(".map h2")).to_have_text(title)
    times = []
    for run in (trained_run, other):
        load = run.parts["trace"].table("load")
        load = load[load["step"] == load["step"].max()]
        counts = load.groupby(["layer", "expert"])["tokens"].sum().unstack(fill_value=0)
        even = counts.div(counts.mean(axis=1), axis=0).to_numpy()
        times.append(-np.sort(-even, axis=1) if by_rank else even)
    shown = np.array(page.evaluate("M.map.shown().value"), float)
    np.testing.assert_allclose(shown, times[0] / times[1], rtol=2e-3)


def test_strips_of_a_difference_show_the_difference(page, two, trained_run: Run):
    page.locator("select[aria-label='Colour of the map']").select_option("load")
    expect(page.locator(".map h2")).to_have_text("Load by rank: change")
    strip = page.evaluate("M.map.layout().strips[0]")
    values = []
    for run in (trained_run, two[1]):
        rows = run.parts["trace"].table("routing_layers").query("metric == 'cv' and domain == ''")
        values.append(rows[rows["step"] == rows["step"].max()].set_index("layer")["value"])
    assert strip["value"] == pytest.approx((values[0] - values[1])[strip["layer"]].tolist(), rel=1e-4)
    assert strip.get("chance") is None
    expect(page.locator(".map .legend")).to_contain_text(f"where {trained_run.name} has more")


def test_a_figure_of_two_runs_has_a_line_of_caption_each_and_ticks_over_both(page, two, trained_run: Run):
    page.locator("#tabs a[data-tab=routing]").click()
    figure = bring(page, "balance_by_layer")
    lines = figure.locator(".caption").text_content().split("\n")
    assert [line.split(":")[0] for line in lines] == [trained_run.name, f"{two[1].name} (dotted)"]
    ends = figure.locator(".plot").evaluate(
        "plot => [plot.data.filter((trace) => trace.visible !== false && trace.name).map((trace) => "
        "Array.from(trace.y)).flat(), Array.from(plot.layout.yaxis.tickvals)]"
    )
    values, ticks = (np.array(part, float) for part in ends)
    values = values[values > 0]
    assert ticks.min() <= 2.5 * np.nanmin(values)
    assert ticks.max() >= np.nanmax(values) / 2.5
    grey = (
        "plot => plot.data.filter((trace) => trace.visible !== false && trace.line?.color === '#8A9099')"
        ".map((trace) => trace.name)"
    )
    drawn = bring(page, "specialisation_by_layer").locator(".plot").evaluate(grey)
    assert drawn == ["permuted labels", "the maximum"]


def test_a_table_says_whose_it_is_and_bars_of_two_runs_stand_together(page, two, trained_run: Run):
    page.locator("#tabs a[data-tab=routing]").click()
    caption = bring(page, "usage_by_expert").locator(".caption")
    expect(caption).to_contain_text(f"{two[1].name} (hatched): Load")
    expect(page.locator("#tab-routing .table-head h3").first).to_contain_text(trained_run.name)


def test_another_run_is_selected_with_its_parts(page, two):
    page.locator("#top select[data-state=run]").select_option("1")
    page.locator("#top select[data-state=vs]").select_option("none")
    loss = two[1].table("evaluations").query("domain == ''")["loss"].iloc[-1]
    expect(page.locator(".card", has_text="Validation loss")).to_contain_text(f"{loss:.3g}")
    runs = page.evaluate("['train', 'scan', 'trace'].map((verb) => M.data.runs[M.selected.run(verb)].root)")
    assert runs == [1, 1, 1]


def test_both_losses_their_difference_and_loads_lead_and_a_tab_shows_the_findings_beyond_five(page, two):
    figures = page.locator("#tab-overview .figure-slot")
    assert [slot.get_attribute("data-figure") for slot in figures.all()] == [
        "loss_by_run",
        "loss_gap",
        "load_by_run",
    ]
    gap = "plot => Array.from(plot.data.find((line) => line.name?.includes(' minus ')).y).at(-1)"
    drawn = bring(page, "loss_gap").locator(".plot").evaluate(gap)
    by_run = bring(page, "loss_by_run").locator(".plot")
    ends = dict(by_run.evaluate("plot => plot.data.map((line) => [line.name, Array.from(line.y).at(-1)])"))
    first, second = page.evaluate("M.data.roots")
    assert drawn == pytest.approx(ends[second] - ends[first], abs=2e-5)
    assert page.locator("details.warnings[open], details.notice[open]").count() == 0
    page.locator("#tabs a[data-tab=routing]").click()
    more = page.locator("#tab-routing details.tab-findings")
    shown = int(more.locator("summary").inner_text().split()[0])
    assert shown == more.locator("ul > li").count() > 0


def test_no_figure_or_map_subtracts_experts_of_separate_trainings(page, two, trained_run: Run):
    page.locator("select[aria-label='Colour of the map']").select_option("gate_weight")
    expect(page.locator(".map .caption")).to_contain_text("do not correspond")
    rows = (
        trained_run.table("load_totals")
        .query("layer == 0")
        .pivot(index="expert", columns="step", values="times_even")
    )
    page.goto(page.url.split("#")[0] + "#/training")
    figure = bring(page, "load_by_step")
    expect(figure.locator(".caption")).to_contain_text("do not correspond")
    shown = figure.locator(".plot").evaluate("plot => plot.data[0].customdata.map((row) => Array.from(row))")
    assert np.array(shown, float) == pytest.approx(rows.to_numpy(), rel=1e-3)
    page.goto(page.url.split("#")[0] + "#/weights?layer=1")
    expect(bring(page, "cosine_heatmap").locator(".caption")).to_contain_text("do not correspond")


def test_a_scale_of_differences_is_anchored_to_the_noise(related, trained_run: Run):
    """Of a cosine between random directions the standard deviation is 1/√d."""
    page = related
    page.goto(page.url.split("#")[0] + "#/weights?layer=1")
    figure = bring(page, "cosine_heatmap")
    trace = figure.locator(".plot").evaluate("plot => ({ end: plot.data[0].zmax, z: plot.data[0].z })")
    width = int(trained_run.parts["scan"].table("spectra")["rank"].max())  # d_ff exceeds d_model
    noise = np.sqrt(2 / width)
    largest = np.nanmax(np.abs(np.array(trace["z"], float)))
    assert trace["end"] == pytest.approx(max(largest, 3 * noise), rel=1e-4)
    expect(figure.locator(".caption")).to_contain_text(f"noise ({noise:.3g})")


def test_the_difference_of_two_maps_of_ratios_is_a_ratio(related, tuned, trained_run: Run):
    page = related
    page.locator("#tabs a[data-tab=training]").click()
    figure = bring(page, "load_by_step")
    shown = figure.locator(".plot").evaluate("plot => plot.data[0].customdata.map((row) => row.at(-1))")
    times = []
    for run in (trained_run, tuned[1]):
        load = run.table("load")
        last = (
            load[(load["layer"] == 0) & (load["step"] == load["step"].max())]
            .groupby("expert")["tokens"]
            .sum()
        )
        times.append(last / last.mean())
    ratios = (times[0] / times[1]).to_numpy()
    assert np.array(shown, float) == pytest.approx(ratios, rel=0.01)
    ticks = figure.locator(".plot").evaluate("plot => plot.data[0].colorbar.ticktext")
    assert "1" in ticks
    expect(figure.locator(".caption")).to_contain_text("divided by")


def test_runs_of_several_verbs_are_paired_verb_by_verb(opened, two, trained_run: Run, tmp_path):
    pairs = [[run.parts[verb] for run in (trained_run, two[1])] for verb in ("scan", "trace")]
    report(*pairs[0], *reversed(pairs[1]), out=tmp_path / "four.html")  # the second pair in another order
    page = opened(tmp_path / "four.html")
    expect(page.locator("canvas")).to_be_in_viewport(ratio=1)
    for run, name in enumerate((trained_run.name, two[1].name)):
        page.locator("#top select[data-state=run]").select_option(str(run))
        sides = page.evaluate(
            "['scan', 'trace'].map((verb) => ['run', 'vs'].map((key) => M.selected.run(verb, key)))"
        )
        names = page.evaluate("M.data.runs.map((run) => run.name)")
        assert [names[mine].split("/")[0] for mine, _ in sides] == [name, name]
        assert all(mine != other is not None for mine, other in sides)
