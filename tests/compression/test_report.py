"""A compression's part of the report: what it says and draws of pruned and of merged experts."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

import moescope
from moescope.compression.report import FINDINGS, NUMBERS
from moescope.compression.rows import beside_controls
from moescope.compression.tables import TABLES
from moescope.compression.verb import compress
from moescope.reporting.findings import key_numbers, say_all
from moescope.reporting.verb import report
from moescope.verb import Selection, all_rows
from report_payloads import glossary_terms, payloads


@pytest.fixture(scope="module")
def page(compressed_run, tmp_path_factory):
    return report(compressed_run, out=tmp_path_factory.mktemp("report") / "report.html")


def said(tables, start):
    return [text for text in say_all(FINDINGS, tables, TABLES) if text.startswith(start)]


def test_findings_put_every_number_beside_original_and_chance(compressed_run):
    found = compressed_run.verb.summary(compressed_run).findings
    whole = compressed_run.table("damage").query("layer.isna()").set_index("method")
    plan, controls = whole.loc["reap"], whole.drop("reap")
    assert "reap: 4 experts per layer become 2 in 3 layers (6 experts dropped)" in found[0]
    assert "37.9 % less than the original's 73.9 kB" in found[1]
    for value in plan[["loss_increase", "loss_increase_low", "loss_increase_high"]]:
        assert f"{abs(value):.3g}" in found[2]
    assert found[3].startswith("Random controls: the plan beats")
    perplexity, random = (text for text in found if text.startswith("Perplexity"))
    for value in (plan["perplexity"], plan["perplexity_original"]):
        assert f"{value:.3g}" in perplexity
    assert f"{controls['perplexity'].min():.3g} to {controls['perplexity'].max():.3g} " in random
    (divergence,) = (text for text in found if text.startswith("Next-token"))
    assert f"{plan['js_divergence']:.3g} [" in divergence
    assert "0.693 nats" in divergence
    (error,) = (text for text in found if text.startswith("Measured error"))
    rows = compressed_run.table("damage").query("layer.notna()")
    top = rows[rows["method"] == "reap"].set_index("layer")["measured_error"]
    random = rows[(rows["method"] != "reap") & (rows["layer"] == top.idxmax())]["measured_error"]
    assert f"layer {top.idxmax():.0f}, {top.max():.3g} (random controls: {random.mean():.3g})" in error
    assert "of 12 keep/drop decisions could flip" in found[-1]


@pytest.mark.parametrize(
    ("intervals", "better", "worse"),
    [
        ([(0.1, 0.3), (0.2, 0.4)], "beats all 2;", None),
        ([(-0.3, -0.1), (-0.4, -0.2)], "beats none of 2", "2 of 2"),
        ([(-0.1, 0.9), (-0.4, 0.0)], "beats none of 2", None),
        ([(-0.1, 0.9), (-0.4, -0.1)], "beats none of 2", "1 of 2"),
        ([(-0.1, 0.9), (0.1, 0.2)], "beats 1 of 2", None),
        ([(0.1, 0.9), (-0.3, -0.2)], "beats 1 of 2", "1 of 2"),
        ([(0.1, float("nan")), (0.1, 0.2)], "beats 1 of 1", None),
    ],
)
def test_a_claim_about_the_controls_follows_from_the_intervals(compressed_run, intervals, better, worse):
    tables = all_rows(compressed_run, Selection())
    damage = tables["damage"].copy()
    at = damage.index[damage["layer"].isna() & (damage["method"] != "reap")]
    damage.loc[at, ["loss_above_plan_low", "loss_above_plan_high"]] = intervals
    damage.loc[at, "perplexity"] = 1.0  # below the plan's: no claim follows from it
    changed = {**tables, "damage": beside_controls(damage)}
    (claim,) = said(changed, "Random controls: ")
    assert better in claim
    lost = said(changed, "Random controls that beat the plan")
    assert [worse in text for text in lost] == ([] if worse is None else [True])
    key = next(key for key in key_numbers(NUMBERS, changed, TABLES) if key.name.startswith("Random controls"))
    assert f"{key.value:.0f} {key.unit.split(' random')[0]}" in claim.replace("none", "0").replace(
        "all 2", "2 of 2"
    )


@pytest.mark.parametrize("limit", ["loss_increase_low", "loss_increase_high"])
def test_no_interval_of_the_plan_is_stated_without_both_limits(compressed_run, limit):
    tables = all_rows(compressed_run, Selection())
    damage = tables["damage"].copy()
    damage.loc[damage["layer"].isna() & (damage["method"] == "reap"), limit] = float("nan")
    changed = {**tables, "damage": damage}
    (claim,) = said(changed, "Loss above")
    assert "no claim" in claim
    assert "[" not in claim


def test_the_page_has_every_figure_and_explains_every_column(page, compressed_run):
    html = page.read_text(encoding="utf-8")
    names = set(payloads(html))
    for name in (
        "damage-0-damage_by_model",
        "damage-1-damage_by_layer",
        "saliency-0-saliency_heatmap",
        "saliency-1-rank_intervals",
    ):
        assert any(place.endswith(name) for place in names), name
    for name in compressed_run.tables:
        for column in set(TABLES[name].columns) - {"dropped"}:
            assert {column, f"{name}.{column}"} & glossary_terms(html), column


def test_a_run_without_text_says_that_nothing_was_judged(compressed_run, tmp_path):
    model = compressed_run.path.parent / "model"
    run = compress(model, method="random", keep=3, out=tmp_path / "run", quiet=True)
    sections = run.verb.sections(run, Selection())
    assert [section.anchor for section in sections] == ["damage", "experts"]
    assert sections[0].text.startswith("Not judged")
    assert sections[0].figures == []
    done, size = run.verb.summary(run).findings
    assert "4 experts per layer become 3 in 3 layers (3 experts dropped)" in done
    assert "59.9 kB, 19 % less than the original's 73.9 kB" in size
    report(run, out=tmp_path / "report.html")


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_every_figure_is_drawn_in_a_browser_and_nothing_is_wider_than_the_page(opened, page, width, scheme):
    from browsing import NO_WIDER, scroll_through

    shown = opened(page, "#/compression", width, scheme)
    expect(shown.locator("#tab-compression .section").first).to_be_visible()
    scroll_through(shown)
    expect(shown.locator(".figure-slot:visible .plot.drawn")).to_have_count(4)
    assert shown.evaluate(NO_WIDER)


# --- merged experts


def test_groups_and_distances_are_drawn_and_every_column_is_explained(merged_run, tmp_path):
    page = moescope.report(merged_run, out=tmp_path / "report.html").read_text(encoding="utf-8")
    names = set(payloads(page))
    for name in ("experts-0-dendrogram", "experts-1-group_sizes", "distances-0-expert_distance"):
        assert any(place.endswith(name) for place in names), name
    for name in ("merges", "geometry_layers"):
        for column in set(merged_run.verb.tables[name].columns) - {"matched_l2", "matched_sv"}:
            assert {column, f"{name}.{column}"} & glossary_terms(page)


def test_the_overview_counts_the_experts_that_are_left_and_shows_the_groups(merged_run):
    groups = merged_run.table("clusters").groupby(["layer", "cluster"]).size()
    merged, alone = groups[groups > 1], (groups == 1).sum()
    counts = f"{len(groups)} groups: {len(merged)} merged from {merged.sum()} experts, {alone} unchanged"
    assert counts in merged_run.verb.summary(merged_run).findings[0]
    (left,) = (key for key in merged_run.verb.summary(merged_run).key_numbers if key.name == "Experts left")
    assert (left.value, left.unit) == (len(groups), f"of {groups.sum()} experts")
    first, *others = merged_run.verb.measures(merged_run)
    assert first.name == "cluster_size"
    shown = first.frame.set_index(["layer", "cluster"])["value"]
    assert all((shown.loc[place] == size).all() for place, size in groups.items())
    assert not any("Crossed out" in measure.caption for measure in (first, *others))


def test_a_plan_without_steps_has_no_dendrogram(merged_run, tmp_path):
    run = moescope.compress(
        merged_run.path.parent / "model", method="random_merge", keep=2, out=tmp_path / "run", quiet=True
    )
    assert "merges" not in run.tables
    drawn = [spec.name for section in run.verb.sections(run, Selection()) for spec, _ in section.figures]
    assert "dendrogram" not in drawn
    assert "group_sizes" in drawn
