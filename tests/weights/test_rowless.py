"""Lab models whose router has no row for each expert, through the verbs that look at weights.

What is computed, and what is said instead of the rest.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from decoder.tiny_lab import tiny
from moescope.cli import app
from moescope.comparison.verb import compare
from moescope.decoder.model import LabModel
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.plotting.style import number
from moescope.reporting.page import page_content
from moescope.reporting.verb import report
from moescope.routing.report import trace_coverage
from moescope.routing.trace import trace
from moescope.run import Run
from moescope.verb import Selection
from moescope.weights.verb import scan

WITHOUT = {"hash", "spectra", "dense"}
ALONE = {"spectra", "spectra_layers", "spectrum", "similarity", "orthogonality"}


def model(router: str, seed: int = 0) -> LabModel:
    torch.manual_seed(seed)
    made = LabModel(tiny(router, vocabulary=258, layers=2))
    with torch.no_grad():
        for block in made.blocks:  # norms begin as ones, which would hide that they are folded in
            block.post_attention_layernorm.weight.uniform_(0.5, 2.0)
    return made


def saved(lab: LabModel, folder: Path) -> Path:
    save_model(lab, Bytes(), folder)
    return folder


def scanned(folder: Path, out: Path, **options: object) -> Run:
    return scan(folder, out=out, device="cpu", quiet=True, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rowless")
    return {router: saved(model(router), folder / router) for router in sorted(WITHOUT)}


@pytest.fixture(scope="module")
def runs(places) -> dict[str, Run]:
    return {router: scanned(place, place.parent / f"run-{router}") for router, place in places.items()}


@pytest.mark.parametrize(("router", "fold_norm"), [("hash", False), ("spectra", True)])
def test_tables_of_experts_are_bit_equal_to_those_of_the_same_experts_under_a_top2_router(
    router, fold_norm, tmp_path
):
    lab, rows = model(router), model("top2", seed=1)
    own = {name: tensor for name, tensor in lab.state_dict().items() if "router" not in name}
    left = rows.load_state_dict(own, strict=False)
    assert {name.rsplit(".", 2)[1] for name in left.missing_keys} == {"router"}
    options = {"matrix": "gate,down", "fold_norm": fold_norm}
    alone = scanned(saved(lab, tmp_path / "alone"), tmp_path / "a", **options)
    routed = scanned(saved(rows, tmp_path / "routed"), tmp_path / "b", **options)
    assert set(alone.tables) == ALONE
    assert set(routed.tables) > ALONE
    for name in ALONE:
        found, expected = (run.table(name).drop(columns="layer_name") for run in (alone, routed))
        assert len(found)
        pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_a_dense_model_has_the_spectra_of_its_blocks_and_nothing_else(places, runs):
    run = runs["dense"]
    assert run.tables == ["spectra", "spectra_layers", "spectrum"]
    lab = model("dense")
    for row in run.table("spectra").itertuples():
        gate = lab.blocks[row.layer].mlp.experts.state_dict()["gate_up"][0].double().numpy()[:32]
        values = np.linalg.svd(gate, compute_uv=False)
        np.testing.assert_allclose(row.singular_values, values, rtol=1e-6)
        assert (row.expert, row.rank) == (0, 32)


def test_a_rank_deficient_expert_falls_back_without_router_rows_too(tmp_path):
    lab = model("hash")
    gate_up = lab.blocks[1].mlp.experts.state_dict()["gate_up"]
    gate_up[3, :16] = gate_up[3, :1] * 2.0 ** (torch.arange(16) % 4)[:, None]  # without rounding
    run = scanned(saved(lab, tmp_path / "lab"), tmp_path / "run")
    spectra = run.table("spectra").set_index(["layer", "expert"])
    assert spectra.loc[(1, 3), "rank"] == 1
    assert spectra.index[spectra["fallback"]].tolist() == [(1, 3)]
    assert any(
        "lowest layer 1, expert 3, rank 1 (random" in finding for finding in run.verb.summary(run).findings
    )


def test_an_expert_that_holds_nan_is_rejected_or_marked(tmp_path):
    lab = model("hash")
    lab.blocks[0].mlp.experts.state_dict()["gate_up"][5, 0, 0] = torch.nan
    place = saved(lab, tmp_path / "lab")
    with pytest.raises(BadInput, match=r"gate_up\[5\] holds NaN"):
        scanned(place, tmp_path / "refused")
    run = scanned(place, tmp_path / "run", keep_going=True)
    similar = run.table("similarity").query("layer == 0 and k == 1")
    assert len(similar) == 7 * 6 / 2
    assert 5 not in {*similar["expert_a"], *similar["expert_b"]}
    assert any("expert 5 skipped" in warning for warning in run.info["warnings"])


@pytest.mark.parametrize("router", ["dense", "hash"])
def test_run_json_summary_and_terminal_say_why_there_is_no_alignment(router, places, runs, tmp_path):
    run = runs[router]
    assert [item["rowless_router"] for item in run.info["coverage"]] == [router]
    assert run.info["warnings"] == []
    why = "Nothing is routed (router dense)" if router == "dense" else f"Router {router} has no row"
    summary = run.verb.summary(run)
    assert summary.findings[0].startswith(why)
    (view,) = summary.details["views"]
    assert (view["verdicts"], view["most_ambiguous"]) == ({}, [])
    assert json.loads(json.dumps(summary.details)) == summary.details
    command = ["scan", str(places[router]), "--out", str(tmp_path / "run")]
    command += ["--device", "cpu", "--layers", "0", "--no-report"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    assert why in printed.output


@pytest.mark.parametrize("router", ["dense", "hash"])
def test_the_report_has_only_what_has_something_to_show(router, runs):
    run = runs[router]
    sections = run.verb.sections(run, Selection())
    across = [section for section in sections if section.layer is None]
    of_pairs = ["cosine_heatmap", "orthogonality_by_layer", "overlap_by_k"] if router != "dense" else []
    names = [spec.name for section in across for spec, _ in section.figures]
    assert sorted(names) == sorted([*of_pairs, "ranks_by_layer"])
    tables = [table["name"] for section in across for table in section.tables]
    assert tables == (["orthogonality"] if router != "dense" else [])
    assert run.verb.overlay([run]) == []
    glossary = [section["table"] for section in page_content([run])["payloads"]["glossary"]]
    spectra = ["spectra", "spectra_layers", "spectrum"]
    assert glossary == (["similarity", "orthogonality", *spectra] if router != "dense" else spectra)
    opened = [section for section in sections if section.layer is not None][1]
    pairs = ["overlap_heatmap", "expert_spectra", "overlap_by_k"]
    assert [spec.name for spec, _ in opened.figures] == (pairs if of_pairs else ["expert_spectra"])
    assert (opened.sections, len(opened.tables), opened.badge) == ([], 1, None)
    assert "router" not in " ".join([*opened.facts, opened.facts["dtype"]])
    (table,) = run.verb.summary(run).sections[0].tables
    rows = run.table("spectra").groupby("layer")["effective_rank"].median()
    at = [column["name"] for column in table["columns"]].index("effective_rank_median")
    assert [row[at] for row in table["rows"]] == pytest.approx(rows.tolist(), rel=1e-5)


def test_reports_of_runs_with_and_without_rows_stand_in_one_page(runs, tmp_path):
    routed = scanned(saved(model("expert_choice"), tmp_path / "routed"), tmp_path / "run", router="raw")
    all_runs = [runs["hash"], routed, runs["dense"]]
    (side_by_side,) = routed.verb.overlay(all_runs)
    names = [spec.name for spec, _ in side_by_side.sections[0].figures]
    assert names == ["orthogonality_by_layer", "ranks_by_layer"]
    page = report(*all_runs, out=tmp_path / "all.html")
    assert "has no row" in page.read_text()


def test_steps_of_one_training_are_one_run_and_two_routers_are_not(places, tmp_path):
    first, second = (saved(model("hash", seed), tmp_path / f"step-{seed}") for seed in (1, 2))
    run = scan(first, second, out=tmp_path / "run", device="cpu", quiet=True)
    assert sorted(run.table("similarity")["step"].unique()) == [1, 2]
    (side_by_side,) = run.verb.overlay([run])
    assert [spec.name for spec, _ in side_by_side.sections[0].figures] == ["orthogonality_by_step"]
    with pytest.raises(BadInput, match="another family"):
        scan(first, places["spectra"], out=tmp_path / "no", device="cpu", quiet=True)


def test_a_missing_table_is_damage_and_not_a_router_without_rows(places, tmp_path):
    run = scanned(places["hash"], tmp_path / "run")
    (run.path / "similarity.parquet").unlink()
    with pytest.raises(BadInput, match="table similarity is missing"):
        report(Run.load(run.path))


@pytest.mark.parametrize("router", ["dense", "hash"])
def test_two_such_checkpoints_are_compared_expert_by_expert(router, places, tmp_path):
    other = saved(model(router, seed=7), tmp_path / "other")
    run = compare(places[router], other, out=tmp_path / "run", device="cpu", quiet=True)
    geometry = run.table("geometry")
    assert sorted(geometry["matrix"].unique()) == ["down", "gate", "up"]
    assert len(geometry) == 2 * 3 * (1 if router == "dense" else 8)
    before, after = (
        lab.blocks[1].mlp.experts.state_dict()["down"][0].double()
        for lab in (model(router), model(router, 7))
    )
    found = geometry.query("layer == 1 and matrix == 'down' and expert_a == 0")["relative_l2"].item()
    assert found == pytest.approx(float((before / before.norm() - after / after.norm()).norm()), abs=1e-6)
    (warning,) = run.info["warnings"]
    assert f"router {router} has no row" in warning
    assert warning in report(run).read_text()
    with pytest.raises(BadInput, match=r"its router has no row .* --matrix"):
        compare(places[router], other, matrix="gate,router", out=tmp_path / "no", device="cpu", quiet=True)
    assert not (tmp_path / "no").exists()


def test_experts_of_a_model_with_rows_and_of_one_without_are_compared(places, tmp_path):
    routed = saved(model("expert_choice"), tmp_path / "routed")
    run = compare(
        routed, places["hash"], out=tmp_path / "run", matrix="down", skip="sv", device="cpu", quiet=True
    )
    assert len(run.table("geometry")) == 16


def test_where_experts_choose_a_trace_says_how_many_a_token_has_on_average(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words that experts may choose or leave, as they like")
    chosen, plain = (saved(model(router), tmp_path / router) for router in ("expert_choice", "top2"))
    run = trace(chosen, text=text, out=tmp_path / "run", device="cpu", quiet=True)
    load = run.table("load")
    (line,) = trace_coverage(run)
    tokens = sum(run.info["coverage"][0]["tokens"].values()) * load["layer"].nunique()
    assert f"up to {run.info['coverage'][0]['k'][0]}" in line
    assert f"{number(load['tokens'].sum() / tokens)} on average" in line
    other = trace(plain, text=text, out=tmp_path / "run2", device="cpu", quiet=True)
    assert ", 2 per token" in trace_coverage(other)[0]
