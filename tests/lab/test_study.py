"""The verb.

Many real trainings, one of them hopeless, killed and taken up, in this process, in several, and on Ray.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from lab.tiny_study import SEEDS, write_study
from moescope.decoder.model import LabModel
from moescope.decoder.saving import load_model
from moescope.decoder.vocabulary import make_vocabulary
from moescope.errors import BadInput
from moescope.lab.config import config_from, preset_config
from moescope.lab.corpus import corpus_of_sides, read_corpus, training_vocabulary
from moescope.lab.evaluation import mean_loss
from moescope.lab.study import plan_lines, plan_study, study, timed_models
from moescope.lab.study_config import read_study, study_from
from moescope.lab.study_task import load_text, measure, prune, run_task, save_text
from moescope.lab.train import run_training, train
from moescope.lab.training import Data, initial_model
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.storage import only_writer
from report_payloads import page_sections, page_text

OF_THE_CLOCK = ["tokens_per_second", "seconds"]
TABLES = [
    *("study_runs", "study_documents", "study_curves", "study_comparisons"),
    *("study_layers", "study_loads", "study_usage"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))


def words_of(out: Path, *words: str) -> list[str]:
    """The arguments of a study on the command line."""
    return ["moescope", "study", *words, "--out", str(out), "--device", "cpu"]


def in_a_process(out: Path, *words: str) -> Run:
    """The study as the command line runs it."""
    subprocess.run([sys.executable, "-m", *words_of(out, *words), "--quiet"], check=True, timeout=300)
    return Run.load(out)


@pytest.fixture(scope="module")
def whole(config: Path) -> Run:
    """The study run through; not to be changed."""
    return in_a_process(config.parent / "whole", str(config))


def assert_equal_tables(one: Run, other: Run) -> None:
    for name in TABLES:
        left, right = (run.table(name).drop(columns=OF_THE_CLOCK, errors="ignore") for run in (one, other))
        pd.testing.assert_frame_equal(left, right, check_exact=True)


def training(run: Run, arm: str, seed: int) -> Run:
    return Run.load(run.path / "trainings" / f"{arm}-seed-{seed}")


def test_every_arm_and_seed_has_a_row_that_a_run_has_filled(whole: Run):
    runs = whole.table("study_runs").set_index(["arm", "seed"])
    assert sorted(runs.index) == [(arm, seed) for arm in ("broken", "top2", "unbalanced") for seed in SEEDS]
    assert runs["status"].to_dict() == {key: "failed" if key[0] == "broken" else "done" for key in runs.index}
    assert runs.loc["unbalanced", "question"].eq("sweep").all()
    done = runs[runs["status"] == "done"]
    unfilled = [column for column in done if done[column].isna().any()]
    padded = "validation_loss_published"  # of padded rows alone; packed ones have none
    assert set(unfilled) <= {"message", "peak_memory_bytes", "kendall_tau", padded}
    assert done["validation_loss"].between(2, 6).all()
    assert (done["noise_low"] < done["validation_loss"]).all()
    assert (done["validation_loss"] < done["noise_high"]).all()
    assert (done["max_over_mean"] >= 1).all()
    assert done["consistency"].between(0.25, 1).all()


def test_a_training_that_diverges_is_a_row_with_its_reason_and_the_others_go_on(whole: Run):
    failed = whole.table("study_runs").query("arm == 'broken'")
    assert failed["message"].str.match(r"step \d+: .* is not finite; training stopped").all()
    assert failed["validation_loss"].isna().all()
    assert (failed["parameters_total"] > 0).all()
    assert "broken" not in set(whole.table("study_documents")["arm"])
    assert any("broken seed 3 failed: step" in warning for warning in whole.info["warnings"])
    assert whole.info["status"] == "done"


def test_values_are_those_of_the_training_s_own_tables(whole: Run):
    own = training(whole, "top2", 5)
    row = whole.table("study_runs").query("arm == 'top2' and seed == 5").iloc[0]
    layers = own.table("routing_layers")
    by_metric = layers[(layers["step"] == 6) & (layers["domain"] == "")].groupby("metric")
    last, chance = by_metric["value"].mean(), by_metric["chance"].mean()
    named = {
        "load_cv": "cv",
        "max_over_mean": "max_over_mean",
        "routing_entropy": "routing_entropy",
        "unused_share": "unused",
        "dropped_share": "dropped",
    }
    assert {column: row[column] for column in named} == pytest.approx(
        {column: last[metric] for column, metric in named.items()}
    )
    documents = whole.table("study_documents").query("arm == 'top2' and seed == 5")
    assert row["validation_loss"] == mean_loss(documents)
    curves = whole.table("study_curves").query("arm == 'top2' and seed == 5").set_index("step")
    steps = own.table("steps").set_index("step")
    assert curves["validation_loss"].to_dict() == pytest.approx(
        steps["validation_loss"].to_dict(), nan_ok=True
    )
    assert curves.loc[6, "load_cv"] == pytest.approx(last["cv"])
    for column, metric in (
        ("load_cv", "cv"),
        ("routing_entropy", "routing_entropy"),
        ("unused_share", "unused"),
    ):
        assert curves.loc[6, f"{column}_chance"] == pytest.approx(chance[metric])
    assert (row["load_cv_chance"], row["routing_entropy_chance"]) == pytest.approx((chance["cv"], np.log(4)))
    assert row["parameters_total"] == own.info["parameters_total"]


def test_every_arm_is_judged_by_the_same_documents(whole: Run):
    documents = whole.table("study_documents")
    shapes = [
        tuple(map(tuple, own[["document", "domain", "tokens"]].to_numpy()))
        for _, own in documents.groupby(["arm", "seed"])
    ]
    assert len(set(shapes)) == 1
    assert len(shapes) == 4
    assert documents["loss"].nunique() > len(shapes[0])


def test_arms_of_one_seed_read_the_same_text_in_the_same_order_from_the_same_weights(whole: Run):
    """Two arms that differ in the weight of a loss have one language-model loss in their first step.

    Another seed has another.
    """
    first = {
        (arm, seed): training(whole, arm, seed).table("steps").set_index("step").loc[1, "lm_loss"]
        for arm in ("top2", "unbalanced")
        for seed in SEEDS
    }
    for seed in SEEDS:
        assert first["top2", seed] == first["unbalanced", seed]
    assert first["top2", 3] != first["top2", 5]
    last = {
        arm: training(whole, arm, 3).table("steps").set_index("step").loc[6, "lm_loss"]
        for arm in ("top2", "unbalanced")
    }
    assert last["top2"] != last["unbalanced"]


def test_routers_that_draw_other_weights_still_share_every_part_of_equal_shape():
    from lab.tiny_training import tiny_config

    models = {
        router: initial_model(tiny_config(router, paired_weights=True, seed=4), None, "cpu")
        for router in ("top2", "spectra", "some", "dense")
    }
    reference = models["top2"].state_dict()
    for router, model in models.items():
        state = model.state_dict()
        same = {name for name in state if name in reference and state[name].shape == reference[name].shape}
        assert {"embed_tokens.weight", "layers.1.self_attn.o_proj.weight", "lm_head.weight"} <= same
        assert ("layers.1.mlp.experts.down" in same) == (router != "dense")
        assert all(torch.equal(state[name], reference[name]) for name in same if ".router." not in name)
    other = initial_model(tiny_config("top2", paired_weights=True, seed=5), None, "cpu").state_dict()
    assert not torch.equal(other["layers.0.mlp.experts.down"], reference["layers.0.mlp.experts.down"])
    parts = [reference[f"layers.{layer}.mlp.experts.down"] for layer in (0, 1)]
    assert not torch.equal(*parts), "layers must not begin as copies of each other"


def test_each_training_is_a_run_that_reports_are_made_of(whole: Run, tmp_path: Path):
    page = report(training(whole, "top2", 3), out=tmp_path / "page.html", quiet=True).read_text()
    assert page_sections(page, "training")
    assert f"moescope study --resume --out {whole.path}" in page_text(page)
    assert not (whole.path / "trainings" / "top2-seed-3" / "scan").exists()


@pytest.mark.slow
def test_a_training_of_a_study_can_be_repeated_alone(whole: Run, config: Path, tmp_path: Path):
    arm = read_study(config).arms[0]
    alone = train(arm.of_seed(5), out=tmp_path / "alone", device="cpu", quiet=True)
    assert isinstance(alone, Run)
    assert alone.table("load").equals(training(whole, "top2", 5).table("load"))


def test_the_study_says_what_it_compared(whole: Run):
    assert whole.info["reference"] == "top2"
    assert whole.info["seeds"] == list(SEEDS)
    assert [arm["name"] for arm in whole.info["arms"]] == ["top2", "unbalanced", "broken"]
    assert whole.info["arms"][1]["overrides"]["model"]["router_options"] == {"balance": 0.0}
    assert (whole.path / whole.info["arms"][1]["trainings"]["5"] / "run.json").exists()
    assert not whole.info["claims_significance"]
    assert any("fewer than five" in warning for warning in whole.info["warnings"])
    assert set(whole.table("overhead")["router"]) == {"top2", "broken"}, "one arm a router"
    verdicts = whole.table("study_comparisons").set_index("arm")["verdict"]
    assert verdicts["unbalanced"] == "does not beat the unigram baseline"  # after six steps
    assert verdicts["broken"] == "failed"


def test_the_same_command_again_computes_nothing(whole: Run, config: Path):
    before = {file: file.stat().st_mtime_ns for file in whole.path.rglob("*") if file.is_file()}
    assert isinstance(study(config, out=whole.path, device="cpu", quiet=True), Run)
    assert {file: file.stat().st_mtime_ns for file in whole.path.rglob("*") if file.is_file()} == before


@pytest.mark.slow
@pytest.mark.timeout(900)  # processes that train, on a machine that may be busy
def test_two_processes_give_the_same_numbers_and_none_outlives_an_interruption(
    whole: Run, config: Path, tmp_path: Path
):
    import psutil

    out = tmp_path / "run"
    ready = (
        "import signal, sys, runpy; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv = sys.argv[1:]; runpy.run_module('moescope', run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", ready, *words_of(out, str(config)), "--jobs", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 200
    while not list(out.glob("parts/*-seed-?")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len([child for child in children if "spawn_main" in " ".join(child.cmdline())]) == 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "interrupted; give the same command again to resume" in said
    assert "Traceback" not in said
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    done = in_a_process(out, str(config))
    assert done.info["tasks_resumed"] >= 1
    assert_equal_tables(done, whole)


@pytest.mark.slow
@pytest.mark.timeout(900)  # processes that train, on a machine that may be busy
def test_workers_die_with_a_parent_that_is_killed(config: Path, tmp_path: Path):
    import psutil

    out = tmp_path / "run"
    command = [sys.executable, "-m", *words_of(out, str(config)), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 200
    while not list(out.glob("trainings/*/run.json")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.slow
def test_ray_gives_the_same_tables(connected: str, whole: Run, config: Path, tmp_path: Path):
    run = study(config, out=tmp_path / "run", engine="ray", device="cpu", quiet=True)
    assert isinstance(run, Run)
    assert run.info["engine"] == "ray"
    assert_equal_tables(run, whole)


@pytest.mark.slow
def test_progress_goes_over_the_steps_of_all_trainings(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from contextlib import contextmanager

    from moescope.lab import study as module

    seen: list[Any] = []

    @contextmanager
    def shown(total: int, done: int, what: str, quiet: bool) -> Any:
        seen.append((total, done, what))
        yield lambda label, amount=1: seen.append(label)

    monkeypatch.setattr(module, "progress", shown)
    few = {**tomlized(config), "arms": {name: {"model": {"router": name}} for name in ("top2", "hash")}}
    study(few, out=tmp_path / "run", device="cpu")
    assert seen[0] == (24, 0, "steps")
    assert seen[1:] == [f"{arm} seed {seed}" for seed in SEEDS for arm in ("top2", "hash") for _ in range(6)]


def tomlized(config: Path) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(config.read_text())


def test_dry_run_counts_everything_and_touches_nothing(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    facts = plan_study(config)
    assert not list(tmp_path.iterdir())
    assert facts["trainings"] == 6
    assert facts["tokens"] == 6 * 6 * 4 * 16
    arm = facts["arms"][0]
    assert (arm["arm"], arm["question"]) == ("top2", "main")
    assert arm["parameters_active"] < arm["parameters_total"]
    assert facts["flops"] == sum(3 * one["flops_per_token"] * one["tokens"] * 2 for one in facts["arms"])
    said = "\n".join(plan_lines(facts))
    assert "6 trainings: 3 arms, seeds 3, 5" in said
    assert "no significance" in said


def test_epochs_of_a_study_are_steps_by_each_arms_batch(config: Path):
    content = tomlized(config)
    content["base"]["train"] |= {"steps": 0, "epochs": 2}
    content["arms"]["unbalanced"]["train"] = {"batch_size": 8}
    content["arms"]["broken"]["train"]["steps"] = 5
    base = study_from(content).base
    corpus = read_corpus(base.data)
    rows = Data.of(base, corpus, training_vocabulary(base, corpus)).train.rows
    tokens = {arm["arm"]: arm["tokens"] for arm in plan_study(content)["arms"]}
    assert tokens == {
        "top2": 2 * (rows // 4) * 4 * 16,
        "unbalanced": 2 * (rows // 8) * 8 * 16,
        "broken": 5 * 4 * 16,
    }
    assert study_from(study_from(content).as_dict()) == study_from(content)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "no study given"),
        ({"config": "nowhere.toml"}, r"nowhere\.toml: No such file"),
        ({"config": {"reference": "top2"}}, "0 arm; a study compares at least two"),
        ({"resume": True}, "no unfinished study"),
        ({"resume": True, "config": "x.toml"}, "--resume takes its options from the run"),
        ({"jobs": 0}, "jobs 0: must be at least 1"),
        ({"engine": "ray", "jobs": 2}, "--jobs 2: Ray starts as many"),
        ({"engine": "dask"}, "unknown engine 'dask'"),
        ({"address": "auto"}, "only Ray has an address"),
        (
            {
                "config": {
                    "reference": "a",
                    "arms": {"a": {"model": {"layers": 1}}, "b": {}},
                    "base": {"data": {"text": ["nowhere.txt"]}},
                }
            },
            r"nowhere\.txt: no such file",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    words: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=message):
        study(**words, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_folder_of_another_study_is_refused_and_overwrite_replaces_it(
    whole: Run, config: Path, tmp_path: Path
):
    out = tmp_path / "run"
    shutil.copytree(whole.path, out)
    (out / "trainings" / "mine.txt").write_text("kept")
    few = {**tomlized(config), "arms": {name: {"model": {"router": name}} for name in ("top2", "dense")}}
    with pytest.raises(BadInput, match=r"other arguments \(arms\)"):
        study(few, out=out, device="cpu", quiet=True)
    (out / "run.json").write_text("{")  # damaged: overwrite replaces it all the same
    run = study(few, out=out, device="cpu", quiet=True, overwrite=True)
    assert isinstance(run, Run)
    assert sorted(path.name for path in (out / "trainings").iterdir()) == [
        "dense-seed-3",
        "dense-seed-5",
        "mine.txt",
        "top2-seed-3",
        "top2-seed-5",
    ]
    dense = run.table("study_runs").query("arm == 'dense'")
    assert dense[["load_cv", "consistency", "kendall_tau"]].isna().all(axis=None), "nothing is routed"
    assert dense["validation_loss"].notna().all()


def test_a_study_that_another_process_writes_loses_nothing_to_overwrite(
    whole: Run, config: Path, tmp_path: Path
):
    out = tmp_path / "run"
    shutil.copytree(whole.path, out)
    before = sorted(out.rglob("*"))
    with (
        only_writer(out, out / ".lock", "this run", ""),
        pytest.raises(BadInput, match="another moescope process"),
    ):
        study(config, out=out, device="cpu", quiet=True, overwrite=True)
    assert sorted(out.rglob("*")) == before


def test_the_reference_is_timed_for_its_router_wherever_it_stands():
    arms = {
        name: {"model": {"router": router, "layers": layers}}
        for name, router, layers in (("thin", "top2", 1), ("hash", "hash", 2), ("plain", "top2", 2))
    }
    assert set(timed_models(study_from({"reference": "plain", "arms": arms}))) == {"plain", "hash"}


def test_torchrun_is_refused(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(BadInput, match="without torchrun"):
        study(config, quiet=True)


@pytest.mark.parametrize(
    ("keep", "left"), [("all", ["step-2", "step-4", "training_state.pt"]), ("last", ["step-4"]), ("none", [])]
)
def test_what_is_kept_of_checkpoints_is_as_asked_for(keep: str, left: list[str], tmp_path: Path):
    for name in ("step-2", "step-4"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "config.json").write_text("{}")
        save_file({"a": torch.zeros(1)}, tmp_path / "checkpoints" / name / "model.safetensors")
    (tmp_path / "checkpoints" / "training_state.pt").write_text("")
    (tmp_path / "run.json").write_text(json.dumps({"verb": "train", "checkpoints": ["both"]}))
    prune(tmp_path, keep)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == left


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_processes_map_the_tokens_that_the_study_encoded_once(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
):
    sides = [
        {"ä": ["Ein Satz mit Ümlauten. " * 9, "<pad> und <end>", "kurz"], "b": ["1 + 2 = 3\n" * 20]},
        {"ä": ["Noch ein Satz. " * 7], "b": ["4 + 5 = 9\n" * 8], "neu": ["Новый текст. " * 5]},
    ]
    corpus = corpus_of_sides(*sides)
    vocabulary = make_vocabulary("bpe", 300, (text for texts in corpus.train.values() for text in texts))
    config = config_from(
        {"data": {"layout": layout}, "train": {"sequence_length": 16}}, preset_config("nano")
    )
    save_text(tmp_path, corpus, vocabulary)

    def encode(*_):
        raise AssertionError("encoded again")

    monkeypatch.setattr(type(vocabulary), "encode", encode)
    monkeypatch.setattr(type(vocabulary), "encode_all", encode)
    text = load_text(tmp_path, corpus.identity, config)
    monkeypatch.undo()
    for rows, texts in ((text.data.train, corpus.train), (text.data.validation, corpus.validation)):
        assert rows.domains == tuple(texts)
        for stream, documents in zip(rows.streams, texts.values(), strict=True):
            expected = [
                token for document in documents for token in [*vocabulary.encode(document), vocabulary.end]
            ]
            assert stream.tolist() == expected
            assert isinstance(stream.base, np.memmap)
    documents = [document for side in (corpus.validation, corpus.unseen) for document in side.values()]
    begins = [window.tokens[:5].tolist() for window in text.documents.windows]
    for document in (document for texts in documents for document in texts):
        assert vocabulary.encode(document)[:5].tolist() in begins
    if layout == "documents":
        assert text.data.train.rows == 4


@pytest.mark.slow
def test_padded_rows_have_a_loss_that_counts_pads_as_published_ones_do(tmp_path: Path):
    texts = [f"number {number} and {number * number}" for number in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    model = {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 16, "experts": 4, "max_positions": 40}
    train = {"steps": 2, "batch_size": 4, "sequence_length": 40, "evaluate_every": 1, "checkpoint_every": 2}
    data = {"layout": "documents", "domains": {"text": str(tmp_path / "text.jsonl")}}
    design = {"seeds": 2, "base": {"model": model, "data": data, "train": train}, "reference": "top2"}
    arms = {"top2": {"model": {"router": "top2"}}, "dense": {"model": {"router": "dense"}}}
    run = study({**design, "arms": arms}, out=tmp_path / "run", device="cpu", quiet=True)
    row = run.table("study_runs").query("arm == 'dense' and seed == 1").iloc[0]
    trained, vocabulary = load_model(tmp_path / "run/trainings/dense-seed-1/checkpoints/step-2", "cpu")
    corpus = json.loads((tmp_path / "run/text/corpus.json").read_text())
    losses = []
    for text in corpus["validation"]["text"]:
        tokens = [*vocabulary.encode(text), vocabulary.end]
        real = torch.arange(40)[None] < len(tokens) - 1
        ids, targets = (part + [vocabulary.pad] * (40 - len(part)) for part in (tokens[:-1], tokens[1:]))
        logits = trained.eval()(torch.tensor([ids]), real).logits_BLV[0]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none").tolist()
    assert row["validation_loss_published"] == pytest.approx(np.mean(losses), abs=1e-5)
    curve = run.table("study_curves").query("arm == 'dense' and seed == 1")
    assert curve["validation_loss_published"].iloc[-1] == row["validation_loss_published"]


def test_the_text_is_read_once_and_kept_with_the_study(whole: Run, config: Path):
    settled = read_study(config)
    corpus = read_corpus(settled.base.data)
    assert whole.info["corpus"] == corpus.identity
    kept = json.loads((whole.path / "text" / "corpus.json").read_text())
    assert kept["validation"] == corpus.validation
    rows = Data.of(settled.base, corpus, training_vocabulary(settled.base, corpus)).train
    batches = [rows.of_step(step, 4, 3).ids_BL for step in range(2)]
    assert not np.array_equal(*batches)


@pytest.mark.slow
def test_a_training_leaves_no_model_in_memory_when_it_is_measured_nor_afterwards(
    config: Path, tmp_path: Path, monkeypatch
) -> None:
    """Python does not collect garbage because a GPU is full: the next training would run out of memory."""
    measured: list[int] = []
    left: list[int] = []

    def models() -> int:
        return sum(type(thing) is LabModel for thing in gc.get_objects())

    def measure_counted(*given: Any) -> Any:
        measured.append(models() - before)
        return measure(*given)

    def counted(*given: Any) -> Any:
        result = run_task(*given)
        left.append(models() - before)
        return result

    monkeypatch.setattr("moescope.lab.study_task.measure", measure_counted)
    monkeypatch.setattr("moescope.lab.study.run_task", counted)
    gc.collect()
    before = models()
    gc.disable()
    try:
        study(config, out=tmp_path / "study", device="cpu", quiet=True)
    finally:
        gc.enable()
    assert measured == [0] * 4
    assert left == [0] * 6  # also after the two that diverge


@pytest.mark.slow
def test_trainings_without_memory_are_one_line_and_the_same_command_repeats_them(
    config: Path, tmp_path: Path, monkeypatch
) -> None:
    said = (
        "CUDA out of memory. Tried to allocate 80.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
        "54.56 MiB is free. Process 512 has 66.00 MiB memory in use. Of the allocated memory 10.30 GiB is "
        "allocated by PyTorch. If reserved but unallocated memory is large try setting something."
    )

    def full(job: Any) -> Run | None:
        if job.config.model.router_options == {"balance": 0.0}:
            raise torch.OutOfMemoryError(said)
        return run_training(job)

    given = {"out": tmp_path / "study", "device": "cpu", "quiet": True}
    with monkeypatch.context() as limited:
        limited.setattr("moescope.lab.study_task.run_training", full)
        with pytest.raises(BadInput, match="repeat the command with fewer --jobs") as raised:
            study(config, **given)
    assert "2 of 6 trainings ran out of memory, the first unbalanced seed 3 (CUDA" in str(raised.value)
    assert "54.56 MiB is free); repeat" in str(raised.value)
    runs = Run.load(tmp_path / "study").table("study_runs").set_index("arm")["status"]
    assert set(runs["unbalanced"]) == {"not run"}
    assert set(runs["top2"]) == {"done"}
    runs = study(config, **given).table("study_runs").set_index("arm")["status"]
    assert set(runs["unbalanced"]) == {"done"}
