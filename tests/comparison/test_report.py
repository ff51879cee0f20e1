"""The report of two checkpoints, and of two runs: what it says, and what a reader sees in a real browser."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import expect

from moescope.comparison.figures import drift_caption
from moescope.comparison.report import change_finding, expert_changes, overlay, summary
from moescope.comparison.verb import compare
from moescope.errors import BadInput
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.verb import Selection
from report_payloads import figures_in, payloads
from reporting.test_browser import scroll_through

SIZES = {"layers": 3, "experts": 4, "d_model": 16, "d_ff": 12}


@pytest.fixture(scope="module")
def run(compared_run) -> Run:
    """Layer 2, expert 1 changed ten times as far as the rest."""
    return compared_run


@pytest.fixture(scope="module")
def runs_compared(run) -> Run:
    return compare(*run.parts.values(), out=run.path.parent / "runs")


@pytest.fixture(scope="module")
def page_of(run, runs_compared):
    return {
        "checkpoints": report(run),
        "runs": report(runs_compared),
        "both": report(run, runs_compared, out=run.path.parent / "both.html"),
    }


def test_the_table_of_experts_that_changed_most_is_in_order_with_its_references(run, page_of):
    shown = next(
        item
        for item in payloads(page_of["checkpoints"].read_text()).values()
        if item.get("name") == "changed_experts"
    )
    titles = [column["title"] for column in shown["columns"]]
    experts = expert_changes(run.table("geometry"))
    assert [row[:2] for row in shown["rows"]] == experts[["layer", "expert_a"]].to_numpy().tolist()
    assert shown["rows"][0][:2] == [2, 1]
    first = dict(zip(titles, shown["rows"][0], strict=True))
    rows = (
        run.table("geometry")
        .query("series == 'b_base_to_tuned' and layer == 2 and expert_a == 1")
        .set_index("matrix")
    )
    assert first["L2 of up"] == pytest.approx(rows.loc["up", "relative_l2"], rel=1e-5)
    assert first["relative L2, mean"] == pytest.approx(rows.drop("router")["relative_l2"].mean(), rel=1e-5)
    assert first["lowest R"] == pytest.approx(rows["sv_alignment"].min(), rel=1e-5)
    assert first["cosine of its router row"] == pytest.approx(rows.loc["router", "cosine"], rel=1e-5)
    assert first["times the median of all"] == pytest.approx(
        experts["relative_l2"][0] / experts["relative_l2"].median(), rel=1e-5
    )
    assert first["unrelated"] == pytest.approx(2**0.5, rel=1e-5)


def test_sections_hold_chart_drift_and_alignment(run):
    sections = run.verb.sections(run, Selection())
    found = {section.anchor: [spec.name for spec, _ in section.figures] for section in sections}
    assert found == {
        "distances": ["expert_distance_gate", "expert_distance_up", "expert_distance_down"],
        "drift": ["drift_heatmap", "router_cosines", "norm_ratios"],
        "alignment": ["compare_accuracy", "compare_margin", "compare_ambiguity"],
    }


def test_every_figure_of_the_page_can_be_drawn_by_name(run, runs_compared):
    for spec, tables in (item for section in run.verb.sections(run, Selection()) for item in section.figures):
        assert spec in run.verb.figures
        drawn = run.draw(spec.name)
        assert (drawn.title, drawn.caption) == (spec.draw(tables).title, spec.draw(tables).caption)
    assert set(run.figures()) == {spec.name for spec in figures_in(run.verb.sections(run, Selection()))}
    one_layer = run.draw("compare_accuracy", layer=1)
    assert {tuple(trace["x"]) for trace in one_layer.data} == {(1,)}
    assert set(runs_compared.figures()) == {"largest_changes"}


def test_without_scans_their_figures_are_left_out(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "scan-b")
    copy = Run.load(tmp_path / "run")
    assert "compare_accuracy" not in copy.figures()
    assert "drift_heatmap" in copy.figures()
    with pytest.raises(BadInput, match="nothing to draw in figure compare_accuracy"):
        copy.draw("compare_accuracy")


def test_several_runs_share_one_chart_and_series_of_one_name_name_their_run(run, runs_compared, tmp_path):
    paths = [item["path"] for item in run.info["checkpoints"]]
    other = compare(*paths[::-1], out=tmp_path / "back", series="back", skip="scan", quiet=True)
    (section,) = overlay([run, other, runs_compared])
    drawn = section.figures[0][1]["geometry_layers"]
    assert set(drawn["series"]) == {"b_base_to_tuned", "b_base_to_tuned_permuted", "back"}
    assert len(drawn) == len(run.table("geometry_layers")) + len(other.table("geometry_layers"))
    twice = overlay([other, other])[0].figures[0][1]["geometry_layers"]
    assert set(twice["series"]) == {"back (back)"}
    assert overlay([run, runs_compared]) == []
    html = report(run, other, out=tmp_path / "all.html").read_text(encoding="utf-8")
    assert any("distances-of-all-0" in name for name in payloads(html))


def test_the_command_shown_makes_the_run_again(run):
    paths = [item["path"] for item in run.info["checkpoints"]]
    assert run.info["command"].startswith(f"moescope compare '{paths[0]}' {paths[1]} ")
    assert " --matched" in run.info["command"]


def test_the_report_of_two_runs_lists_every_column(runs_compared, page_of):
    shown = next(
        item for item in payloads(page_of["runs"].read_text()).values() if item.get("name") == "changes"
    )
    compared = [change for change in runs_compared.info["changes"] if change["rows"]]
    assert len(shown["rows"]) == len(compared)
    titles = [column["title"] for column in shown["columns"]]
    place = titles.index("largest, in spreads")
    sizes = [row[place] for row in shown["rows"] if row[place] is not None]
    finite = [size for size in sizes if size]
    assert finite == sorted(finite, reverse=True)
    assert finite[0] > 0


def test_a_column_without_spread_is_no_largest_change(runs_compared):
    """A column that is constant in the first run changes by no finite number of spreads."""
    flat = {"table": "t", "column": "flat", "rows": 3, "changed": 3, "largest": 0.5, "spread": 0.0}
    flat |= {"median": 0.5, "a": 0.0, "b": 0.5, "where": {"layer": 1}}
    changed = replace(runs_compared, info=runs_compared.info | {"changes": [flat]})
    assert [key.name for key in summary(changed).key_numbers] == ["Columns changed"]
    changed = replace(
        runs_compared, info=runs_compared.info | {"changes": [*runs_compared.info["changes"], flat]}
    )
    assert summary(changed).key_numbers == [
        replace(key, value=key.value + 1, unit=f"of {int(key.unit[3:]) + 1}", most=key.most + 1)
        if key.name == "Columns changed"
        else key
        for key in summary(runs_compared).key_numbers
    ]


def test_the_page_of_two_runs_is_named_for_them_and_their_figure_is_exported(runs_compared, page_of):
    names = [Path(item["path"]).name for item in runs_compared.info["runs"]]
    assert f"<title>{' and '.join(names)}" in page_of["runs"].read_text(encoding="utf-8")
    assert "largest_changes" in runs_compared.figures()
    (bars,) = runs_compared.draw("largest_changes").data
    sizes = [
        abs(change["largest"]) / change["spread"]
        for change in runs_compared.info["changes"]
        if change.get("largest") and change["spread"]
    ]
    assert max(bars["x"]) == pytest.approx(max(sizes))


@pytest.mark.parametrize(
    ("name", "figures", "width", "scheme"),
    [("checkpoints", 9, 1400, "light"), ("both", 9, 390, "dark"), ("runs", 0, 390, "light")],
)
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_page(
    browser, page_of, name, figures, width, scheme
):
    troubles: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(page_of[name].as_uri() + "#/weights")
    expect(page.locator("#tab-weights .section").first).to_be_visible()
    scroll_through(page)
    expect(page.locator(".figure-slot:visible .plot.drawn")).to_have_count(figures)
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    if figures:
        heat = page.locator("figure[data-name=drift_heatmap]")
        expect(heat).to_contain_text("gate: layer 2, expert 1")
        heat.locator("input[type=range]").focus()
        page.keyboard.press("End")
        expect(heat).to_contain_text("router row: layer")
        legends = page.locator("figure[data-name=expert_distance_gate] .plot")
        expect(legends.locator(".legendtext")).to_have_count(2)
        expect(legends.locator(".legend2text")).to_have_text(["b_base_to_tuned", "b_base_to_tuned_permuted"])
    context.close()
    assert troubles == []


def changes(l2_LE) -> pd.DataFrame:
    """One row of `geometry` per layer and expert."""
    rows = [
        {"series": "base_to_ift", "layer": layer, "expert_a": expert, "relative_l2": float(value)}
        for layer, values in enumerate(l2_LE)
        for expert, value in enumerate(values)
    ]
    return pd.DataFrame(rows).assign(matrix="gate", matched=False)


@pytest.mark.parametrize(
    ("l2", "named", "whole"),
    [
        ([[0.05, 0.06, 0.05, 0.04], [0.30, 0.33, 0.31, 0.29], [0.05] * 4], "layer 1", True),
        ([[0.05, 0.06, 0.05, 0.04], [0.05, 0.33, 0.06, 0.05], [0.05] * 4], "layer 1, expert 1", False),
        ([[0.0] * 4, [0.0] * 4, [0.2, 0.3, 0.2, 0.1]], "layer 2", True),
        ([[0.0] * 4, [0.0, 0.0, 0.0, 0.4], [0.0] * 4], "layer 1, expert 3", False),
        # a layer that moved, and an expert in it that moved far more than its layer
        ([[0.05] * 4, [0.06, 0.9, 0.07, 0.06], [0.05] * 4], "layer 1, expert 1", False),
        ([[0.1, 0.2, 0.3, 0.25]], "layer 0, expert 2", False),
    ],
)
def test_the_largest_change_names_the_layer_where_the_whole_layer_moved(l2, named, whole):
    (finding,) = change_finding(changes(l2))
    for words in (finding, drift_caption("gate", changes(l2))):
        assert f"{named} as a whole" in words if whole else f"{named}, relative L2" in words
