"""scan as a whole: arguments in, a run folder out, through interruptions and bad weights."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import scipy.stats
import torch

from checkpoints import (
    edit_json,
    expert_name,
    router_name,
    tiny_checkpoint,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
)
from moescope import Run, scan
from moescope.arguments import choose_device
from moescope.errors import BadInput
from moescope.storage import leftover_name
from moescope.tables import SCHEMA_VERSION
from moescope.weights import layer as layer_module
from moescope.weights import verb as scan_module
from moescope.weights.report import views
from moescope.weights.tables import TABLES


def tables_of(run: Run) -> dict[str, pd.DataFrame]:
    return {name: run.table(name) for name in TABLES}


def assert_equal_tables(left: Run, right: Run) -> None:
    for name, frame in tables_of(left).items():
        pd.testing.assert_frame_equal(frame, right.table(name), check_exact=True)


@pytest.fixture
def analysed(monkeypatch) -> list[int]:
    """The layers that were really worked on, in order."""
    layers: list[int] = []
    real = layer_module.analyse_layer

    def counting(weights, *rest):
        layers.append(weights.layer)
        return real(weights, *rest)

    monkeypatch.setattr(layer_module, "analyse_layer", counting)
    return layers


@pytest.fixture
def model(tmp_path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Run:
    """A scan of every matrix and both router variants; two layers of four experts, k = 1, 2, 3, 4, 8, 16."""
    folder = tmp_path_factory.mktemp("whole")
    model = tiny_checkpoint(folder / "model")
    views = {"matrix": "gate,up,gate_up,down", "router": "raw,centered"}
    return scan(model, out=folder / "run", k="3", seed=7, **views)


# --- what a scan writes


def test_every_table_holds_exactly_the_schema_s_columns(whole):
    assert whole.tables == list(TABLES)
    for name, spec in TABLES.items():
        assert pq.read_schema(whole.path / f"{name}.parquet").names == list(spec.columns)
        frame = whole.table(name)
        assert len(frame) > 0
        assert not frame[list(spec.keys)].isna().any(axis=None)
        assert not frame.duplicated(list(spec.keys)).any()
        assert set(frame["matrix"]) == {"gate", "up", "gate_up", "down"}
        assert set(frame["layer"]) == {0, 1}
        assert set(frame["layer_name"]) == {f"model.layers.{layer}.block_sparse_moe" for layer in (0, 1)}
        if "router" in spec.keys:
            assert set(frame["router"]) == {"raw", "centered"}


def test_every_column_is_filled_somewhere(tmp_path):
    """A column that is null throughout a plain scan of several layers would be a promise not kept."""
    run = scan(
        tiny_checkpoint(tmp_path / "model", layers=3, experts=5, d_model=40, d_ff=48), out=tmp_path / "run"
    )
    for name, spec in TABLES.items():
        frame = run.table(name)
        empty = [column for column in spec.columns if frame[column].isna().all()]
        assert set(empty) <= {"last_good_k"}  # random experts are identified at no k


def test_row_counts_are_what_the_sizes_say(whole):
    layers, experts, ks, matrices, views = 2, 4, 6, 4, 8
    assert len(whole.table("alignment")) == views * layers * experts * ks
    assert len(whole.table("alignment_layers")) == views * layers * ks
    assert len(whole.table("alignment_tests")) == len(whole.table("ambiguity")) == views * layers
    assert len(whole.table("pairs")) == views * layers * ks * experts * experts
    assert len(whole.table("spectra")) == matrices * layers * experts
    similarity_ks = whole.table("similarity")["k"].nunique()
    assert len(whole.table("similarity")) == matrices * layers * similarity_ks * math.comb(experts, 2)
    assert len(whole.table("orthogonality")) == matrices * layers * similarity_ks


def test_singular_values_are_lapack_s(whole):
    spectra = whole.table("spectra").query("matrix == 'gate'").set_index(["layer", "expert"])
    tensors = tiny_tensors()
    assert len(spectra) == 8
    for layer, expert in spectra.index:
        values = torch.linalg.svdvals(tensors[expert_name(layer, expert, "gate")].double()).numpy()
        assert spectra.loc[(layer, expert), "singular_values"] == pytest.approx(values, rel=1e-6)


def test_run_json_has_every_field_of_the_contract(whole):
    info, stored = whole.info, json.loads((whole.path / "run.json").read_text())
    assert stored == {**info, "fields": stored["fields"]}
    assert info["schema_version"] == SCHEMA_VERSION
    assert (info["verb"], info["status"], info["device"]) == ("scan", "done", choose_device("auto"))
    assert info["arguments"] == {
        "layers": None,
        "matrix": ["gate", "up", "gate_up", "down"],
        "router": ["raw", "centered"],
        "fold_norm": False,
        "k": [3],
        "precision": "fast",
        "seed": 7,
    }
    assert {"moescope", "torch", "python"} <= set(info["versions"])
    assert info["git_commit"] is None or len(info["git_commit"]) == 40
    (checkpoint,) = info["checkpoints"]
    model = str(whole.path.parent / "model")
    assert (checkpoint["step"], checkpoint["path"], checkpoint["revision"]) == (0, model, None)
    assert len(checkpoint["header_hash"]) == 64
    assert {"read", "decompose", "statistics", "write", "join"} <= set(info["timings"])
    assert all(seconds >= 0 for seconds in info["timings"].values())
    assert info["coverage"][0]["layers_found"] == 2
    assert info["warnings"] == []
    assert [setup["layer"] for setup in info["setup"]] == [0, 1]


def test_results_do_not_depend_on_sharding(tmp_path):
    """Nor on anything else: a scan repeated gives the same tables."""
    runs = [
        scan(tiny_checkpoint(tmp_path / f"model{shards}", shards), out=tmp_path / f"run{shards}")
        for shards in (1, 3)
    ]
    assert_equal_tables(*runs)


def test_one_layer_s_numbers_do_not_depend_on_which_others_are_scanned(tmp_path, model):
    whole, part = scan(model, out=tmp_path / "whole"), scan(model, out=tmp_path / "part", layers="1")
    for name in ("alignment", "pairs", "spectra", "similarity", "nulls"):
        rows = whole.table(name)
        pd.testing.assert_frame_equal(
            rows[rows["layer"] == 1].reset_index(drop=True), part.table(name), check_exact=True
        )


def test_p_values_are_corrected_over_layers_and_views_and_layers_ranked_within_a_view(tmp_path):
    models = [tiny_checkpoint(tmp_path / f"checkpoint-{step}", layers=4, seed=step) for step in (100, 200)]
    run = scan(*models, out=tmp_path / "run", matrix="gate,down", router="raw,centered")
    tests = run.table("alignment_tests")
    for _, group in tests.groupby("step"):
        assert len(group) == 16
        for q, p in (("q_value", "p_value"), ("q_lower", "p_lower")):
            expected = scipy.stats.false_discovery_control(group[p])
            assert group[q].to_numpy() == pytest.approx(expected, abs=1e-12)
    pooled = scipy.stats.false_discovery_control(tests["p_value"])
    assert tests["q_value"].to_numpy() != pytest.approx(pooled, abs=1e-6)
    for _, group in run.table("ambiguity").groupby(["step", "matrix", "router"]):
        assert sorted(group["rank"]) == [1, 2, 3, 4]


# --- steps


@pytest.mark.parametrize(
    ("folders", "steps"),
    [
        (["step9", "step10"], [9, 10]),
        (["checkpoint-200", "checkpoint-100"], [100, 200]),
        (["checkpoint-100", "final"], [0, 1]),
    ],
)
def test_several_checkpoints_become_the_steps_their_names_end_in(tmp_path, folders, steps):
    models = [
        tiny_checkpoint(tmp_path / folder, layers=1, seed=number) for number, folder in enumerate(folders)
    ]
    run = scan(*models, out=tmp_path / "run")
    assert [checkpoint["step"] for checkpoint in run.info["checkpoints"]] == steps
    for frame in tables_of(run).values():
        assert sorted(set(frame["step"])) == steps
    if steps[0] > 0:  # by number, in whatever order they were given
        models = sorted(models, key=lambda model: int(re.search(r"\d+$", model.name)[0]))
    for step, model in zip(steps, models, strict=True):
        alone = scan(model, out=tmp_path / f"alone{step}").table("pairs")
        together = run.table("pairs")
        assert together[together["step"] == step]["align"].tolist() == alone["align"].tolist()


# --- arguments


def test_apples_gpu_is_replaced_by_the_cpu_and_the_run_says_so(tmp_path, model):
    run = scan(model, out=tmp_path / "run", layers=1, device="mps")
    assert run.info["device"] == "cpu"
    assert run.info["warnings"][-1:] == ["device mps: Apple's GPU has no fp64, so the CPU was used"]


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        ("0", [0]),
        ("1,0", [0, 1]),
        ("0-1", [0, 1]),
        (" 0 - 1 , 3", [0, 1, 3]),
        ([2, 0], [0, 2]),
        (None, [0, 1, 2, 3]),
    ],
)
def test_layers_may_be_given_as_numbers_and_ranges(tmp_path, given, layers):
    moe = scan_module.read_moe(scan_module.open_checkpoint(tiny_checkpoint(tmp_path, layers=4)))
    assert scan_module.choose_layers(given, moe) == layers


def test_only_the_layers_asked_for_are_read(tmp_path, analysed):
    tensors = tiny_tensors(layers=3)
    tensors[router_name(0)].fill_(math.nan)
    tensors[expert_name(2, 0, "gate")].fill_(math.nan)
    run = scan(
        write_checkpoint(tmp_path / "model", tensors, tiny_config(layers=3)), out=tmp_path / "run", layers="1"
    )
    assert analysed == [1]
    assert set(run.table("spectra")["layer"]) == {1}
    assert run.info["arguments"]["layers"] == [[1]]


@pytest.mark.parametrize("layers", ["", "3-1", "1.5", "0-99999999999"])
def test_layers_that_cannot_be_read_are_rejected_with_an_example(tmp_path, model, layers):
    with pytest.raises(BadInput, match="write them as 0,5,9-12"):
        scan(model, out=tmp_path / "run", layers=layers)


@pytest.mark.parametrize("layers", ["0-5", [7]])
def test_layers_that_are_not_there_are_rejected_with_those_that_are(tmp_path, model, layers):
    with pytest.raises(BadInput, match=r"no MoE layer .*; it has 0-1"):
        scan(model, out=tmp_path / "run", layers=layers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matrix": "gate,w1"}, "unknown matrix 'w1'; known: gate, up, gate_up, down"),
        ({"matrix": []}, "no matrix given; known: gate, up, gate_up, down"),
        ({"router": "cosine"}, "unknown router 'cosine'; known: raw, centered, auto"),
        ({"k": "1,x"}, "k '1,x': give whole numbers"),
        ({"seed": -1}, "seed -1: must be at least 0"),
        ({"k": [-3]}, "numbers must be at least 1"),
        ({"precision": "sloppy"}, "unknown precision 'sloppy'; known: fast, exact"),
        ({"device": "tpu"}, "unknown device 'tpu'; did you mean 'cpu'? known: auto, cpu, cuda, cuda:0, mps"),
    ],
    ids=str,
)
def test_an_argument_that_makes_no_sense_is_rejected_and_leaves_no_folder(tmp_path, model, options, message):
    with pytest.raises(BadInput) as caught:
        scan(model, out=tmp_path / "runs" / "run", **options)
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_named_ks_join_the_k_grid_and_those_beyond_the_rank_are_warned_of(tmp_path, model):
    run = scan(model, out=tmp_path / "run", router="raw", k="3,1000,2000")
    assert sorted(set(run.table("alignment")["k"])) == [1, 2, 3, 4, 8, 16]
    assert run.info["warnings"] == ["k = 1000, 2000 skipped: no matrix has a rank above 16"]


def test_one_layer_alone_has_no_relative_ambiguity_and_the_run_says_so(tmp_path, model):
    run = scan(model, out=tmp_path / "run", layers="0")
    assert run.table("ambiguity")["ambiguity_score"].isna().all()
    assert any("ambiguity_score is undefined" in warning for warning in run.info["warnings"])


def test_by_default_a_softmax_router_is_centered_first(tmp_path, model):
    run = scan(model, out=tmp_path / "run", layers="0")
    assert run.info["arguments"]["router"] == ["centered", "raw"]
    assert set(run.table("alignment_tests")["router"]) == {"centered", "raw"}
    assert [view.keys["router"] for view in views(run)] == ["centered", "raw"]


def test_only_raw_rows_are_scanned_where_nobody_knows_that_the_router_is_a_softmax(tmp_path, model):
    edit_json(model / "config.json", model_type="newcomer")
    with pytest.raises(BadInput, match="this one's scoring is unknown; use --router raw"):
        scan(model, out=tmp_path / "run", router="centered")
    for router, warnings in (("auto", 0), ("raw,centered", 1)):
        run = scan(model, out=tmp_path / router, router=router, layers="0,1")
        assert run.info["coverage"][0]["family"] == "mixtral layout, model_type newcomer"
        assert run.info["arguments"]["router"] == ["raw"]
        assert set(run.table("alignment")["router"]) == {"raw"}
        assert sum("scoring is unknown" in line for line in run.info["warnings"]) == warnings


# --- run folders


def test_the_same_arguments_return_the_finished_run_without_work(tmp_path, model, analysed):
    first = scan(model, out=tmp_path / "run", layers=0)
    stamps = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()}
    again = scan(model, out=tmp_path / "run", layers=0)
    assert analysed == [0]
    assert again.info == first.info
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()} == stamps
    scan(model, out=tmp_path / "run", layers=0, overwrite=True)
    assert analysed == [0, 0]


# --- unusable weights


def damaged(folder: Path, **damage: float) -> Path:
    tensors = tiny_tensors()
    for name, value in damage.items():
        kind, layer, expert = name.split("_")
        if kind == "router":
            tensors[router_name(int(layer))][int(expert)] = value
        else:
            tensors[expert_name(int(layer), int(expert), kind)][:] = value
    return write_checkpoint(folder, tensors, tiny_config())


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("gate_0_2", math.nan, f"tensor {expert_name(0, 2, 'gate')} holds NaN or Inf"),
        ("router_1_3", 0.0, f"row 3 of router {router_name(1)} is all zeros"),
    ],
)
def test_unusable_weights_are_rejected_by_name_and_nothing_is_left_behind(tmp_path, name, value, what):
    model = damaged(tmp_path / "model", **{name: value})
    with pytest.raises(BadInput) as caught:
        scan(model, out=tmp_path / "runs" / "run")
    message = str(caught.value)
    assert message.startswith(f"{model / 'model.safetensors'}: {what}")
    assert message.endswith("fix the checkpoint, or pass --keep-going to skip this expert")
    assert not (tmp_path / "runs").exists()


def test_nan_in_a_later_layer_fails_the_run_but_keeps_what_is_done_and_keep_going_resumes(tmp_path, analysed):
    model = damaged(tmp_path / "model", gate_1_2=math.nan)
    with pytest.raises(BadInput, match="holds NaN"):
        scan(model, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    with pytest.raises(BadInput, match="this run is failed"):
        Run.load(tmp_path / "run")
    run = scan(model, out=tmp_path / "run", keep_going=True)
    assert analysed == [0, 1, 1], "layer 0 is not done again"
    assert run.info["status"] == "done"


def test_keep_going_marks_the_expert_and_continues_with_the_others(tmp_path):
    clean_model, model = tiny_checkpoint(tmp_path / "clean"), damaged(tmp_path / "model", router_1_2=math.nan)
    clean = scan(clean_model, out=tmp_path / "clean-run", router="raw").table("alignment")
    run = scan(model, out=tmp_path / "run", router="raw", keep_going=True)
    rows = run.table("alignment")
    assert rows[["layer", "k", "expert"]].equals(clean[["layer", "k", "expert"]]), (
        "the marked expert keeps its rows"
    )
    marked = (rows["layer"] == 1) & (rows["expert"] == 2)
    values = list(TABLES["alignment"].values)
    of_k = ("shuffle", "reference")  # what the other experts say of a k
    assert rows.loc[marked, [value for value in values if not value.startswith(of_k)]].isna().all(axis=None)
    assert rows.loc[~marked, "align"].to_numpy() == pytest.approx(
        clean.loc[~marked, "align"].to_numpy(), abs=1e-12
    )
    assert len(run.info["warnings"]) == 1
    assert run.info["warnings"][0].startswith("layer 1: expert 2 skipped: ")
    assert run.info["setup"][1]["matrices"]["gate"]["skipped_experts"] == [2]
    assert 2 not in set(run.table("pairs").query("layer == 1")["expert"])
    spectra = run.table("spectra").set_index(["layer", "expert"])
    assert pd.isna(spectra.loc[(1, 2), "frobenius"])


def test_keep_going_gives_up_where_fewer_than_two_experts_are_left(tmp_path):
    model = damaged(tmp_path / "model", gate_0_0=math.nan, gate_0_1=math.nan, gate_0_3=math.nan)
    with pytest.raises(BadInput, match="fewer than two experts can be used"):
        scan(model, out=tmp_path / "run", keep_going=True)
    assert not (tmp_path / "run").exists()


# --- interruptions; tests/faults kills scans at every write


def test_an_interrupted_scan_is_resumed_and_a_task_cut_short_by_a_kill_done_again(tmp_path, analysed):
    model = tiny_checkpoint(tmp_path / "model", layers=3)
    whole, out = scan(model, out=tmp_path / "whole"), tmp_path / "cut"
    real = layer_module.analyse_layer

    def stop_at_one(weights, *rest):
        if weights.layer == 1:
            raise KeyboardInterrupt
        return real(weights, *rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layer_module, "analyse_layer", stop_at_one)
        scan(model, out=out)
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert not (out / ".lock").exists()
    half = leftover_name(out / "parts")
    shutil.copytree(out / "parts" / "step0-layer0", half)
    os.truncate(half / "alignment.parquet", 100)
    analysed.clear()
    resumed = scan(model, out=out)
    assert_equal_tables(resumed, whole)
    assert analysed == [1, 2]
    assert (whole.info["tasks_resumed"], resumed.info["tasks_resumed"]) == (0, 1)
    assert not (out / "parts").exists()
