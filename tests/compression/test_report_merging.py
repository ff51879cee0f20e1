"""What the report shows of merged experts: dendrogram, sizes, distances, and their tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import moescope
from families.tiny_models import tiny_model
from moescope.compression.report import cluster_section, compression_command, compression_sections
from moescope.decoder.routers import router_class
from moescope.run import Run
from moescope.tables import TABLES
from report_payloads import payloads


@pytest.fixture(scope="module")
def merged_run(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("merged")
    model = tiny_model("mixtral").save(folder / "model", "saved")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 60, (30, 20)))
    return moescope.compress(
        model,
        method="hc_smoe",
        keep=2,
        token_ids=folder / "ids.npy",
        out=folder / "run",
        quiet=True,
        controls=1,
    )


def test_groups_and_distances_are_drawn_and_every_column_is_explained(merged_run, tmp_path):
    page = moescope.report(merged_run, out=tmp_path / "report.html").read_text(encoding="utf-8")
    names = set(payloads(page))
    for name in (
        "experts-after-0-dendrogram",
        "experts-after-1-group_sizes",
        "experts-after-t0",
        "experts-after-t1",
        "distances-0-expert_distance_gate",
        "distances-2-expert_distance_down",
        "distances-t0",
    ):
        assert f"o0-{name}" in names
    for name in ("merges", "geometry_layers"):
        for column in TABLES[name].columns:
            assert f'id="g-{column}"' in page or f'id="g-{name}.{column}"' in page


def test_the_words_say_what_became_of_the_router_and_how_large_groups_are(merged_run):
    section = next(
        section for section in compression_sections(merged_run) if section.anchor == "experts-after"
    )
    assert section.words.startswith("Router rows are fitted anew, one for each merged expert.")
    settings = merged_run.info["setup"]["plan_settings"]
    assert (
        f"{settings['router_kl_of_mean_rows']:.3g} nats for the members' mean rows, "
        f"{settings['router_kl']:.3g} for those taken"
    ) in section.words
    assert "on states that the fit did not see" in section.words
    sizes = merged_run.table("clusters").groupby(["layer", "cluster"]).size()
    assert f"{(sizes > 1).sum()} groups of {sizes[sizes > 1].min()} to {sizes.max()} members" in section.words


def test_a_merging_run_holds_its_steps_and_distances_as_tables(merged_run):
    assert merged_run.tables == [
        name
        for name in TABLES
        if name in {"clusters", "merges", "saliency", "damage", "geometry", "geometry_layers"}
    ]
    steps = merged_run.table("merges")
    assert steps.groupby("layer")["done"].sum().tolist() == [2, 2, 2]
    assert steps.groupby("layer").size().tolist() == [3, 3, 3]
    assert (steps["chance_height"] > 0).all()


def test_the_command_names_token_ids_as_such(merged_run):
    words = compression_command(merged_run).split()
    assert words[words.index("--token-ids") + 1].endswith("ids.npy")
    assert "--text" not in words


def test_a_plan_without_steps_has_no_dendrogram(merged_run, tmp_path):
    run = moescope.compress(
        merged_run.path.parent / "model", method="random_merge", keep=2, out=tmp_path / "run", quiet=True
    )
    assert "merges" not in run.tables
    drawn = [spec.name for section in compression_sections(run) for spec, _ in section.figures]
    assert "dendrogram" not in drawn
    assert "group_sizes" in drawn


@pytest.mark.parametrize(
    ("router", "lab", "said"),
    [
        ("slice", None, "is taken out of it."),
        ("slice", "hash", "reassigned to the remaining experts in turn."),
        ("slice", "expert_choice", "take more tokens."),
        ("join", "hash", "gets the token ids of all its members"),
        ("join", "spectra", "takes over its dominant member's part of the router"),
        ("fold", "some", "fitted on the queries they meet."),
    ],
)
def test_what_becomes_of_the_router_is_said_for_each_kind(router: str, lab: str | None, said: str):
    clusters = pd.DataFrame(
        {"layer": 0, "expert": [0, 1], "kept": True, "cluster": [0, 1], "dominant": True, "weight": 1.0}
    )
    effects = {} if lab is None else router_class(lab).compression_effects
    section = cluster_section({"clusters": clusters}, {"router": router, "router_effects": effects})
    assert said in section.words
