"""What the report shows of merged experts: dendrogram, sizes, distances, and their tables."""

from __future__ import annotations

import pandas as pd
import pytest

import moescope
from moescope.compression.report import experts_section
from moescope.decoder.routers import router_class
from moescope.verb import Selection
from report_payloads import glossary_terms, payloads


def test_groups_and_distances_are_drawn_and_every_column_is_explained(merged_run, tmp_path):
    page = moescope.report(merged_run, out=tmp_path / "report.html").read_text(encoding="utf-8")
    names = set(payloads(page))
    for name in ("experts-0-dendrogram", "experts-1-group_sizes", "distances-0-expert_distance"):
        assert any(place.endswith(name) for place in names), name
    for name in ("merges", "geometry_layers"):
        for column in set(merged_run.verb.tables[name].columns) - {"matched_l2", "matched_sv"}:
            assert {column, f"{name}.{column}"} & glossary_terms(page)


def test_the_words_say_what_became_of_the_router_and_how_large_groups_are(merged_run):
    section = next(
        section
        for section in merged_run.verb.sections(merged_run, Selection())
        if section.anchor == "experts"
    )
    assert section.text.startswith("Router rows are fitted again")
    settings = merged_run.info["setup"]["plan_settings"]
    for name in ("router_kl_of_mean_rows", "router_kl", "router_kl_held_out"):
        assert f"{settings[name]:.3g}" in section.text
    sizes = merged_run.table("clusters").groupby(["layer", "cluster"]).size()
    assert f"{(sizes > 1).sum()} groups of {sizes[sizes > 1].min()} to {sizes.max()} members" in section.text


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


def test_a_merging_run_holds_its_steps_and_distances_as_tables(merged_run):
    assert merged_run.tables == [
        name
        for name in merged_run.verb.tables
        if name in {"clusters", "merges", "group_sizes", "saliency", "damage", "geometry", "geometry_layers"}
    ]
    steps = merged_run.table("merges")
    assert steps.groupby("layer")["done"].sum().tolist() == [2, 2, 2]
    assert steps.groupby("layer").size().tolist() == [3, 3, 3]
    assert (steps["chance_height"] > 0).all()


def test_the_command_names_token_ids_as_such(merged_run):
    words = merged_run.info["command"].split()
    assert words[words.index("--token-ids") + 1].endswith("ids.npy")
    assert "--text" not in words


def test_a_plan_without_steps_has_no_dendrogram(merged_run, tmp_path):
    run = moescope.compress(
        merged_run.path.parent / "model", method="random_merge", keep=2, out=tmp_path / "run", quiet=True
    )
    assert "merges" not in run.tables
    drawn = [spec.name for section in run.verb.sections(run, Selection()) for spec, _ in section.figures]
    assert "dendrogram" not in drawn
    assert "group_sizes" in drawn


@pytest.mark.parametrize(
    ("router", "lab", "said"),
    [
        ("slice", None, "are removed."),
        ("slice", "hash", "reassigned to the remaining experts in turn."),
        ("slice", "expert_choice", "take more tokens."),
        ("join", "hash", "gets the token ids of all its members"),
        ("join", "spectra", "keeps its dominant member's part of the router"),
        ("fold", "some", "fitted on the queries they meet."),
    ],
)
def test_what_becomes_of_the_router_is_said_for_each_kind(router: str, lab: str | None, said: str):
    clusters = pd.DataFrame(
        {"layer": 0, "expert": [0, 1], "kept": True, "cluster": [0, 1], "dominant": True, "weight": 1.0}
    ).assign(chance_alone=2.0, members=1)
    effects = {} if lab is None else router_class(lab).compression_effects
    section = experts_section({"clusters": clusters}, {"router": router, "router_effects": effects})
    assert said in section.text
