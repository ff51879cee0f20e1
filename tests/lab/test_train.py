"""The verb: a run folder with everything in it, taken up after a real kill, shared by real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.test_train_parts import damage
from lab.tiny_training import LOSSES, SHAPE, STEPS, TOML
from moescope.decoder.config import ModelConfig
from moescope.errors import BadInput
from moescope.lab.config import DataConfig, LabConfig, config_from, preset_config, settle
from moescope.lab.corpus import EMBEDDED, Corpus, read_corpus, training_vocabulary
from moescope.lab.train import bytes_on_disk, count_parameters, lock_training, size_lines, train
from moescope.reporting.page import page_content
from moescope.reporting.verb import report
from moescope.run import Run
from moescope.verb import Selection


def config_file(folder: Path, steps: int = 12, more: str = "") -> Path:
    path = folder / "tiny.toml"
    path.write_text(TOML.format(steps=steps) + more)
    return path


def test_a_training_leaves_tables_checkpoints_scan_and_trace(trained_run: Run):
    assert trained_run.info["status"] == "done"
    assert {"steps", "load", "routing_layers", "router_gradients", "alerts"} <= set(trained_run.tables)
    assert [item["step"] for item in trained_run.info["checkpoints"]] == [4, 8, 12]
    assert "alignment" in Run.load(trained_run.path / "scan").tables
    traced = Run.load(trained_run.path / "trace")
    assert sorted(traced.table("load")["domain"].unique()) == sorted(trained_run.info["domains"])
    assert sorted(traced.table("stability")["step_b"].unique()) == [8, 12]
    assert not list(trained_run.path.glob(".*"))  # no lock is left


def test_evaluations_have_their_baselines(trained_run: Run):
    rows = trained_run.table("evaluations")
    assert (rows["uniform_loss"] == np.log(260)).all()  # of all entries that an untrained model spreads over
    assert set(rows["domain"]) == {"", *trained_run.info["domains"]}
    assert sorted(rows["step"].unique()) == [0, 4, 8, 12]
    total = rows[rows["domain"] == ""]
    assert total["loss"].iloc[0] == pytest.approx(np.log(260), abs=0.1)
    assert total["unigram_loss"].between(2, np.log(260)).all()
    steps = trained_run.table("steps").dropna(subset="validation_loss")
    assert steps["validation_loss"].tolist() == total["loss"].tolist()


def test_the_room_a_training_needs_is_what_it_takes(trained_run: Run):
    states = trained_run.path / "checkpoints"
    kept = states / "training_state.pt"
    taken = sum(file.stat().st_size for file in states.rglob("*.safetensors")) + 2 * kept.stat().st_size
    settled = settle(trained_run.path.parent / "tiny.toml", None, None, None, None)
    assert bytes_on_disk(settled) == pytest.approx(taken, rel=0.15)


def test_a_training_that_no_disk_can_hold_is_refused_before_anything_is_written(tmp_path: Path):
    given = {"train": {"steps": 10**11, "checkpoint_every": 1}}
    with pytest.raises(BadInput, match=r"MB needed; raise \[train\] checkpoint_every"):
        train(given, out=tmp_path / "run", device="cpu", quiet=True)
    assert not list(tmp_path.iterdir())


def test_the_same_command_again_computes_nothing(trained_run: Run):
    before = (trained_run.path / "steps.parquet").stat().st_mtime_ns
    config = trained_run.path.parent / "tiny.toml"
    again = train(config, out=trained_run.path, device="cpu", quiet=True)
    assert isinstance(again, Run)
    with pytest.raises(BadInput, match="other arguments"):
        train(config, seed=7, out=trained_run.path, device="cpu", quiet=True)
    assert (trained_run.path / "steps.parquet").stat().st_mtime_ns == before


def test_a_folder_that_another_training_holds_is_left_alone_even_with_overwrite(
    trained_run: Run, tmp_path: Path
):
    """Its lock covers scan and trace after the last step too, and comes before anything is cleared."""
    folder = shutil.copytree(trained_run.path, tmp_path / "copy")
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with lock_training(folder), pytest.raises(BadInput, match="another moescope process is writing this run"):
        train(config_file(tmp_path, steps=13), out=folder, device="cpu", overwrite=True, quiet=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_small_limit_of_bytes_is_not_taken_for_none():
    config = config_from({"data": {"max_bytes": 3}})
    assert sum(len(texts) for texts in read_corpus(config.data).train.values()) <= len(EMBEDDED)


@pytest.mark.slow
def test_a_scan_and_trace_that_do_not_fit_the_training_are_made_anew(trained_run: Run, tmp_path: Path):
    folder = shutil.copytree(trained_run.path, tmp_path / "run")
    damage(folder / "scan", "other arguments")
    damage(folder / "trace", "older version")
    run = train(out=folder, resume=True, device="cpu", quiet=True)
    assert isinstance(run, Run)
    assert run.info["warnings"] == trained_run.info["warnings"]
    for part, table in (("scan", "alignment"), ("trace", "load")):
        made, first = Run.load(folder / part), Run.load(trained_run.path / part)
        assert made.info["status"] == "done"
        assert made.table(table).equals(first.table(table))
        assert made.info["checkpoints"][-1]["path"] == str(
            folder / "checkpoints" / "step-12"
        )  # where the run is now


@pytest.mark.slow
def test_a_part_given_beside_its_training_is_shown_once(trained_run: Run):
    parts = [Run.load(trained_run.path / part) for part in ("scan", "trace")]
    alone, beside = (
        json.loads(page_content(runs)["data"]) for runs in ([trained_run], [trained_run, *parts])
    )
    assert beside["runs"] == alone["runs"]
    assert beside["roots"] == alone["roots"]


@pytest.mark.parametrize("damaged", ["", "run.json", "checkpoints/step-12/config.json"])
def test_overwrite_begins_anew_and_leaves_other_peoples_files(trained_run: Run, tmp_path: Path, damaged: str):
    shutil.copytree(trained_run.path, tmp_path / "run")
    if damaged:
        (tmp_path / "run" / damaged).write_text("junk")
    mine = [tmp_path / "run" / name / "mine.txt" for name in ("checkpoints", "model", "trainer")]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("kept")
    run = train(
        config_file(tmp_path, steps=4), out=tmp_path / "run", overwrite=True, device="cpu", quiet=True
    )
    assert isinstance(run, Run)
    assert [item["step"] for item in run.info["checkpoints"]] == [4]
    assert run.table("steps")["step"].tolist() == [0, 4]
    assert Run.load(run.path / "scan").info["checkpoints"][0]["path"].endswith("step-4")
    assert [file.read_text() for file in mine] == ["kept"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("router", ["some", "spectra", "dense"])
def test_every_kind_of_router_ends_in_a_report(router: str, tmp_path: Path):
    model = {**SHAPE, "router": router}
    settings = {**STEPS, "checkpoint_every": 1, "warmup": 1}
    run = train(
        {"model": model, "data": {"max_bytes": 20_000}, "train": settings},
        out=tmp_path / "run",
        device="cpu",
        quiet=True,
    )
    assert isinstance(run, Run)
    assert report(run, out=tmp_path / "report.html").exists()
    assert (run.path / "trace").exists() == (router != "dense")
    assert ("key_map" in run.tables) == (router == "some")
    assert not [said for said in run.info["warnings"] if "one document" not in said]
    tables = {
        "dense": {"spectra", "spectra_layers", "spectrum"},
        "spectra": {"spectra", "spectra_layers", "spectrum", "similarity", "orthogonality"},
    }  # SoME's keys are router rows
    scanned = set(Run.load(run.path / "scan").tables)
    assert scanned == tables[router] if router in tables else "alignment" in scanned
    sections = {section.anchor for section in run.verb.sections(run, Selection())}
    assert ("load" in sections) == (router != "dense")
    assert ("keys" in sections) == (router == "some")
    if router == "some":
        metrics = set(run.table("key_metrics")["metric"])
        assert metrics == {"gini", "load_entropy_bits", "used", "cosine"}
        assert run.table("key_histogram")["experts"].sum() == 4


@pytest.mark.slow
def test_two_processes_give_the_loss_curve_of_one(trained_run: Run, tmp_path: Path):
    config = config_file(tmp_path)
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m moescope train"
    command = [sys.executable, *launch.split(), config, "--out", tmp_path / "run", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    both = Run.load(tmp_path / "run")
    assert both.info["processes"] == 2
    ours, alone = both.table("steps")[LOSSES], trained_run.table("steps")[LOSSES]
    assert not ours.equals(alone)  # sums in another order: equal bits would mean that one process did it all
    np.testing.assert_allclose(ours.to_numpy(float), alone.to_numpy(float), rtol=2e-4)
    counted = [run.table("load").groupby(["step", "layer"])["tokens"].sum() for run in (both, trained_run)]
    assert counted[0].equals(counted[1])  # every token of both processes


def test_a_training_that_diverges_stops_with_one_line_and_its_report_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_file(tmp_path, 40, "clip = 0.0\n")
    config.write_text(config.read_text().replace("learning_rate = 0.01", "learning_rate = 1e30"))
    with pytest.raises(BadInput, match=r"step \d+: the .* is not finite; training stopped"):
        train(config, out=tmp_path / "run", device="cpu", quiet=True)
    run = Run.load(tmp_path / "run")
    assert run.info["status"] == "failed"
    assert "is not finite" in run.info["error"]
    assert len(run.table("alerts"))
    assert not caplog.records  # alerts are printed unless one asked for quiet
    assert "This training is failed" in report(run, quiet=True).read_text()


def test_a_training_without_a_step_on_disk_has_no_report_yet(trained_run: Run, tmp_path: Path):
    info = {**trained_run.info, "status": "running"}
    (tmp_path / "run.json").write_text(json.dumps(info))
    with pytest.raises(BadInput, match="has not written anything yet"):
        report(tmp_path, quiet=True)


def test_counting_parameters_needs_the_texts_to_exist():
    with pytest.raises(BadInput, match=r"nowhere\.txt: no such file"):
        count_parameters({"data": {"domains": {"a": "nowhere.txt"}}})


def test_counting_parameters_allocates_and_touches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    facts = count_parameters(preset="some_a4")
    assert (round(facts["parameters_total"] / 1e6, 2), round(facts["parameters_trainable"] / 1e6, 2)) == (
        701.50,
        29.42,
    )
    assert not list(tmp_path.iterdir())


def test_a_training_that_cannot_fit_the_machine_is_rejected_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moescope.lab.cost.memory_of", lambda device: 10**10)
    # 1,025.85 M trained parameters with gradient and two moments: 16.4 GB
    with pytest.raises(BadInput, match=r"at least (16|17|18)\.\d GB of memory, cpu has 10\.0; lower"):
        train(preset="medium", device="cpu", quiet=True)
    assert count_parameters(preset="medium")["parameters_total"] == 1_025_845_760  # for another machine
    assert not list(tmp_path.iterdir())


def test_epochs_are_as_many_steps_as_the_training_documents_make(tmp_path: Path):
    lines = [json.dumps({"text": f"{number} " * 8}) for number in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    config = {
        "model": {"d_model": 16, "layers": 1, "heads": 2, "d_ff": 8, "experts": 4},
        "data": {"text": [str(tmp_path / "text.jsonl")], "layout": "documents", "validation_share": 0.2},
        "train": {"epochs": 2, "batch_size": 4, "sequence_length": 16, "warmup": 2},
    }
    run = train(config, out=tmp_path / "run", device="cpu", quiet=True)
    documents = run.info["domains"]["text"]["train_documents"]
    assert run.info["arguments"]["train"]["steps"] == 2 * (documents // 4) == run.table("steps")["step"].max()
    assert count_parameters(config)["steps"] == 2 * (documents // 4)
    again = train(config, out=tmp_path / "run", device="cpu", quiet=True)
    assert again.info["finished"] == run.info["finished"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"preset": "huge"}, "unknown preset 'huge'"),
        ({"router": "oracle"}, "unknown router 'oracle'"),
        ({"resume": True}, "no unfinished training"),
        ({"resume": True, "preset": "nano"}, "--resume takes its options from the run"),
        ({"resume": True, "seed": 5}, "--resume takes its options from the run"),
        ({"from_": "nowhere"}, "nowhere: not a lab checkpoint"),
        ({"config": {"train": {"stepz": 3}}}, "did you mean 'steps'"),
        ({"config": {"data": {"domains": {"a": "nowhere.txt"}}}}, r"nowhere\.txt: no such file"),
        ({"config": {"data": {"text": ["nowhere.txt"]}}}, r"nowhere\.txt: no such file"),
        ({"seed": -1}, "^seed -1: must be at least 0"),
        ({"config": {"model": {"vocabulary": 100}}}, "bytes needs at least 258 entries"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(
    words: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=message):
        train(**words, device="cpu", quiet=True)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_model_trained_further_keeps_its_vocabulary_whatever_the_new_text_says(tmp_path: Path):
    settings = {**STEPS, "evaluate_every": 2}
    shape = {**SHAPE, "vocabulary": 300, "layers": 1, "max_positions": 32}
    for name, line in (("old", "{} green bottles"), ("new", "there are {} more rows here")):
        (tmp_path / f"{name}.txt").write_text("".join(line.format(i) + "\n" for i in range(300)))
    first, further = ({"text": [str(tmp_path / f"{name}.txt")]} for name in ("old", "new"))
    train(
        {"model": shape, "data": {**first, "vocabulary": "bpe"}, "train": settings},
        out=tmp_path / "first",
        device="cpu",
        quiet=True,
    )
    origin = tmp_path / "first" / "checkpoints" / "step-2"
    run = train(
        {"data": further, "train": settings}, from_=origin, out=tmp_path / "run", device="cpu", quiet=True
    )
    assert isinstance(run, Run)
    kept = run.path / "checkpoints" / "step-2" / "tokenizer.json"
    assert json.loads(kept.read_text()) == json.loads((origin / "tokenizer.json").read_text())
    assert run.info["arguments"]["data"]["vocabulary"] == "bpe"
    assert run.info["vocabulary_size"] > 258
    with pytest.raises(
        BadInput, match=r"config: \[data\] vocabulary is bytes, but .*step-2 has bpe; remove it"
    ):
        count_parameters({"data": {**further, "vocabulary": "bytes"}}, from_=origin)


def test_a_vocabulary_that_the_text_cannot_fill_and_a_text_cut_in_two_are_said(tmp_path: Path):
    (tmp_path / "a.txt").write_text("row of many\n" * 100)
    shape = {**SHAPE, "vocabulary": 4096, "layers": 1, "experts": 1, "top_k": 1, "router": "topk"}
    settings = {**STEPS, "batch_size": 2}
    data = {"text": [str(tmp_path / "a.txt")], "vocabulary": "bpe"}
    run = train(
        {"model": shape, "data": data, "train": settings}, out=tmp_path / "run", device="cpu", quiet=True
    )
    assert isinstance(run, Run)
    warmup, entries, cut, scanned = run.info["warnings"]
    assert warmup.startswith("[train] warmup 20 exceeds steps 2: the learning rate ends at 10% of 0.003")
    assert entries.startswith(
        f"the vocabulary has {run.info['vocabulary_size']} entries, not the 4,096 of [model] vocabulary"
    )
    assert run.info["vocabulary_size"] < 300
    assert cut.startswith("domain text is one document")
    first = run.table("evaluations").iloc[0]
    assert first["uniform_loss"] == pytest.approx(np.log(4096))
    assert first["loss"] == pytest.approx(np.log(4096), abs=0.2)
    assert not len(run.table("alerts"))  # one expert is sure of every token
    assert not (run.path / "trace").exists()
    assert "one expert only" in scanned
    assert report(run, out=tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"experts": 8},
            (r"\[model\] experts is 8, but .*step-12 has 4; remove it, or train without --from"),
        ),
        ({"router": "spectra"}, r"\[model\] router is spectra, but .*step-12 has top2"),
        (
            {"router_options": {"balance": 0.5}},
            r"\[model\] router_options.balance is 0.5, but .*step-12 has 0.01",
        ),
        ({"vocabulary": 300}, r"\[model\] vocabulary is 300, but .*step-12 has 260"),
        ({"qk_norm": True}, r"\[model\] qk_norm is true, but .*step-12 has false"),
    ],
)
def test_a_config_that_contradicts_the_checkpoint_it_begins_with_is_refused_by_key(
    model: dict[str, object], message: str, trained_run: Run, tmp_path: Path
):
    origin = trained_run.path / "checkpoints" / "step-12"
    with pytest.raises(BadInput, match=message):
        count_parameters({"model": model}, from_=origin)


def test_what_a_config_repeats_of_its_checkpoint_or_leaves_to_a_preset_is_no_contradiction(trained_run: Run):
    origin, said = trained_run.path / "checkpoints" / "step-12", trained_run.info["arguments"]["model"]
    for config in (said, {"experts": 4, "qk_norm": False, "router_options": {"balance": 0.01}}, {}):
        changed = {"model": config, "train": {"sequence_length": 32}}
        facts = count_parameters(changed, preset="small", from_=origin)
        assert facts["parameters_total"] == trained_run.info["parameters_total"]
        assert size_lines(facts)[1] == f"starts from {origin} with its model and vocabulary"
    other = replace(preset_config("nano"), model=replace(preset_config("nano").model, layers=3))
    with pytest.raises(BadInput, match=r"config: \[model\] layers is 3, but"):
        count_parameters(other, from_=origin)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"router": "some"}, "frozen: nothing; SoME's experts"),
        (
            {"config": {"model": {"router": "some", "frozen_experts": True}}},
            "frozen: the experts keep their initial weights",
        ),
        ({"preset": "some_a4"}, "frozen: the experts keep their initial weights"),
        ({}, "300 steps"),
    ],
)
def test_dry_run_says_what_is_frozen(words: dict[str, object], line: str):
    facts = count_parameters(**words)  # type: ignore[arg-type]
    assert size_lines(facts)[2].startswith(line)


def test_a_warm_up_longer_than_the_training_is_said_before_it_begins():
    for steps, said in ((20, 0), (19, 1)):
        lines = size_lines(count_parameters({"train": {"steps": steps}}))
        assert sum(line.startswith("warning: [train] warmup 20 exceeds") for line in lines) == said


def test_pairs_are_learned_from_training_texts_alone():
    corpus = Corpus(("a",), {"a": ["the cat sat\n" * 50]}, {"a": ["qxqxqxqx\n" * 50]}, identity="")
    vocabulary = training_vocabulary(
        LabConfig(ModelConfig(vocabulary=300), DataConfig(vocabulary="bpe")), corpus
    )
    assert len(vocabulary.encode("the cat")) < 4
    assert len(vocabulary.encode("qxqxqxqx")) == 8


def test_files_are_domains_and_weights_may_come_from_a_checkpoint(trained_run: Run, tmp_path: Path):
    (tmp_path / "a.txt").write_text("".join(f"{i} green bottles\n" for i in range(300)))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"row {i} of many, many rows"}) + "\n" for i in range(60))
    )
    domains = {"a": str(tmp_path / "a.txt"), "b": str(tmp_path / "b.jsonl")}
    settings = STEPS
    run = train(
        {"data": {"domains": domains}, "train": settings},
        from_=trained_run.path / "checkpoints" / "step-12",
        out=tmp_path / "run",
        device="cpu",
        quiet=True,
    )
    assert isinstance(run, Run)
    assert set(run.info["domains"]) == {"a", "b"}
    assert run.table("evaluations")["loss"].iloc[0] < 4.5  # not that of an untrained model, 5.6
    assert run.info["parameters_total"] == trained_run.info["parameters_total"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_compiled_training_says_nothing_of_gradients_instead_of_failing_at_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    shape = {**SHAPE, "vocabulary": 258, "layers": 1, "experts": 2, "router": "top2"}
    settings = {**STEPS, "batch_size": 2, "warmup": 1}
    for compile in (False, True):
        config = {"model": shape, "data": {"max_bytes": 50_000}, "train": {**settings, "compile": compile}}
        run = train(config, out=tmp_path / str(compile), device="cpu")
        assert isinstance(run, Run)
        assert (len(run.table("router_gradients")) > 0) == (not compile)
    assert "cannot be taken" not in caplog.text
