"""The report of two checkpoints: what it says, and what a reader sees in a real browser."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from playwright.sync_api import expect

from browsing import NO_WIDER, scroll_through
from moescope.comparison.report import FINDINGS, overlay
from moescope.comparison.tables import TABLES
from moescope.comparison.verb import compare
from moescope.errors import BadInput
from moescope.geometry.pairs import expert_changes
from moescope.reporting.findings import say_all
from moescope.reporting.joint import distance_sections
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.verb import Selection
from report_payloads import figures_in, payloads

SIZES = {"layers": 3, "experts": 4, "d_model": 16, "d_ff": 12}


@pytest.fixture(scope="module")
def run(compared_run) -> Run:
    """Layer 2, expert 1 changed ten times as far as the rest."""
    return compared_run


@pytest.fixture(scope="module")
def html(run) -> Path:
    return report(run)


def test_the_table_of_experts_that_changed_most_is_in_order_with_its_references(run, html):
    shown = next(
        item
        for item in payloads(html.read_text()).values()
        if item.get("title") == "Experts that changed most"
    )
    names = [column["name"] for column in shown["columns"]]
    experts = run.table("expert_changes").sort_values("relative_l2", ascending=False)
    assert [row[:2] for row in shown["rows"]] == experts[["layer", "expert"]].to_numpy().tolist()
    assert shown["rows"][0][:2] == [2, 1]
    first = dict(zip(names, shown["rows"][0], strict=True))
    geometry = run.table("geometry").query("not matched")
    rows = geometry.query("layer == 2 and expert_a == 1").set_index("matrix")
    l2 = geometry.query("matrix != 'router'").groupby(["layer", "expert_a"])["relative_l2"].mean()
    expected = {
        **{f"{name}_l2": rows.loc[name, "relative_l2"] for name in ("gate", "up", "down", "router")},
        "relative_l2": rows.drop("router")["relative_l2"].mean(),
        "lowest_sv": rows["sv_alignment"].min(),
        "router_cosine": rows.loc["router", "cosine"],
        "of_all": l2[2, 1] / np.median(l2),
        "of_layer": l2[2, 1] / np.median(l2[2]),
    }
    for name, value in expected.items():
        assert first[name] == pytest.approx(value, rel=1e-5), name


def test_means_of_a_series_are_over_all_its_pairs_with_the_range_over_layers(run):
    rows = run.table("geometry_series").set_index(["series", "matrix"])
    geometry, layers = run.table("geometry"), run.table("geometry_layers")
    for series, of_series in geometry.groupby("series"):
        experts = of_series[of_series["matrix"] != "router"]
        row = rows.loc[(series, "")]
        assert row["pairs"] == 3 * 3 * 4
        assert row["relative_l2"] == pytest.approx(experts["relative_l2"].mean())
        assert row["sv_alignment"] == pytest.approx(experts["sv_alignment"].mean())
        means = experts.groupby("layer")["relative_l2"].mean()
        assert (row["l2_least"], row["l2_most"]) == pytest.approx((means.min(), means.max()))
        nulls = layers[(layers["series"] == series) & (layers["matrix"] != "router")]
        matched = series.endswith("_permuted")
        assert row["l2_chance"] == pytest.approx(nulls["null_l2_matched"].mean() if matched else 2**0.5)
        assert row["sv_chance"] == pytest.approx(nulls["null_sv_matched"].mean() if matched else 0)
        assert (nulls["matched"] == matched).all()
        assert (nulls["matched_l2"].notna() == matched).all()
    router = geometry[geometry["matrix"] == "router"]
    row = rows.loc[("b_base_to_tuned", "router")]
    assert row["cosine_median"] == pytest.approx(np.median(router["cosine"]))
    assert row["norm_ratio_most"] == router["norm_ratio"].max()
    of_layer = layers.query("matrix == 'router' and layer == 1").iloc[0]
    ratios = router.query("layer == 1")["norm_ratio"]
    assert of_layer["norm_ratio_median"] == pytest.approx(np.median(ratios))
    assert (of_layer["norm_ratio_least"], of_layer["norm_ratio_most"]) == (ratios.min(), ratios.max())


def test_every_figure_of_the_page_can_be_drawn_by_name(run):
    for spec, tables in (item for section in run.verb.sections(run, Selection()) for item in section.figures):
        assert spec in run.verb.figures
        drawn = run.draw(spec.name)
        assert (drawn.title, drawn.caption) == (spec.draw(tables).title, spec.draw(tables).caption)
    assert set(run.figures()) == {spec.name for spec in figures_in(run.verb.sections(run, Selection()))}
    one_layer = run.draw("compare_accuracy", layer=1)
    assert {x for trace in one_layer.data for x in trace["x"] if x is not None} == {1}


def test_without_scans_their_figures_are_left_out(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "scan-b")
    copy = Run.load(tmp_path / "run")
    assert "identification_by_layer" not in copy.figures()
    assert "drift_heatmap" in copy.figures()
    with pytest.raises(BadInput, match="nothing to draw in figure identification_by_layer"):
        copy.draw("compare_accuracy")


def test_several_runs_share_one_chart_and_series_of_one_name_name_their_run(run, tmp_path):
    paths = [item["path"] for item in run.info["checkpoints"]]
    other = compare(*paths[::-1], out=tmp_path / "back", series="back", skip="scan", quiet=True)
    (section,) = overlay([run, other])
    drawn = section.figures[0][1]["geometry_layers"]
    assert set(drawn["series"]) == {"b_base_to_tuned", "b_base_to_tuned_permuted", "back"}
    assert len(drawn) == len(run.table("geometry_layers")) + len(other.table("geometry_layers"))
    twice = overlay([other, other])[0].figures[0][1]["geometry_layers"]
    assert set(twice["series"]) == {"back (back)"}
    assert overlay([run]) == []
    html = report(run, other, out=tmp_path / "all.html").read_text(encoding="utf-8")
    assert any("distances-of-all-0" in name for name in payloads(html))


def test_a_merge_and_a_comparison_share_one_chart_with_both_levels_of_chance(run, merged_run):
    (section,) = distance_sections([run, merged_run])
    ((spec, tables),) = section.figures
    drawn = spec.draw(tables)
    names = {trace["name"] for trace in drawn.data}
    ours = {"b_base_to_tuned", "b_base_to_tuned_permuted"}
    assert ours | {"hc_smoe", "hc_smoe_permuted", "unrelated experts", "matched rotated experts"} <= names
    assert distance_sections([run]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_figure_is_drawn_and_nothing_is_wider_than_the_page(opened, html, width, scheme):
    page = opened(html, "#/weights", width, scheme)
    expect(page.locator("#tab-weights .section").first).to_be_visible()
    scroll_through(page)
    expect(page.locator(".figure-slot:visible .plot.drawn")).to_have_count(4)
    assert page.evaluate(NO_WIDER)
    heat = page.locator("figure[data-name=drift_heatmap]")
    expect(heat).to_contain_text("(layer 2, expert 1)")
    legend = page.locator("figure[data-name=expert_distance] .plot .legendtext")
    grey = ["unrelated experts", "matched rotated experts"]
    expect(legend).to_have_text(["b_base_to_tuned", "b_base_to_tuned_permuted", *grey])


@pytest.mark.parametrize(
    ("l2", "place", "whole"),
    [
        ([[0.05, 0.06, 0.05, 0.04], [0.30, 0.33, 0.31, 0.29], [0.05] * 4], (1, 1), True),
        ([[0.05, 0.06, 0.05, 0.04], [0.05, 0.33, 0.06, 0.05], [0.05] * 4], (1, 1), False),
        ([[0.0] * 4, [0.0] * 4, [0.2, 0.3, 0.2, 0.1]], (2, 1), True),
        ([[0.0] * 4, [0.0, 0.0, 0.0, 0.4], [0.0] * 4], (1, 3), False),
        # a layer that moved, and an expert in it that moved far more than its layer
        ([[0.05] * 4, [0.06, 0.9, 0.07, 0.06], [0.05] * 4], (1, 1), False),
        ([[0.1, 0.2, 0.3, 0.25]], (0, 2), False),
    ],
)
def test_the_largest_change_names_the_layer_where_the_whole_layer_moved(l2, place, whole):
    rows = [
        {"layer": layer, "layer_name": "", "expert_a": expert, "relative_l2": value}
        for layer, values in enumerate(l2)
        for expert, value in enumerate(values)
    ]
    geometry = pd.DataFrame(rows).assign(series="a_to_b", matrix="gate", matched=False, sv_alignment=0.9)
    tables = {"expert_changes": expert_changes(geometry.assign(cosine=0.9))}
    (words,) = [text for text in say_all(FINDINGS, tables, TABLES) if text.startswith("Largest change")]
    assert (words.place["layer"], words.place["expert"]) == place
    assert (f"layer {place[0]} as a whole" in words) == whole
