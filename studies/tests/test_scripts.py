"""The scripts of studies/: every design is a valid study, shards continue, the tuning picks what is best."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from argparse import Namespace
from pathlib import Path
from typing import Any

import causal
import continuations
import designs
import existing
import numpy as np
import pandas as pd
import pytest
import report
import run
import torch

import moescope
from decoder.tiny_lab import tiny, trained
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.lab.study import VERB
from moescope.lab.study_config import read_study, study_from
from moescope.lab.tables import TABLES
from moescope.run import RunWriter, write_table
from moescope.tables import read_parquet

STUDIES = Path(__file__).parents[1]


def test_every_design_is_a_study_at_both_sizes_and_survives_toml():
    for name, design in designs.designs({}).items():
        for each in (design, designs.shrink(design)):
            assert tomllib.loads(designs.toml(each)) == json.loads(json.dumps(each)), name
            plan = study_from(each, name, STUDIES / name)
            assert len(plan.arms) == len(each["arms"])


def test_the_wider_top2_costs_what_spectra_costs():
    from moescope.lab.study_task import costs

    arms = {arm.name: arm for arm in study_from(designs.ablation({}), folder=STUDIES / "ablation").arms}
    top2, spectra = (costs(arms[name].config)["flops_per_token"] for name in ("top2_flops", "spectra"))
    assert top2 == pytest.approx(spectra, rel=0.005)


def write_runs(store: Path, name: str, losses: dict[str, list[float | None]]) -> None:
    rows = [
        {"arm": arm, "seed": seed, "status": "done" if loss else "failed", "validation_loss": loss}
        for arm, of_seeds in losses.items()
        for seed, loss in enumerate(of_seeds)
    ]
    (store / name / "run").mkdir(parents=True)
    write_table(TABLES["study_runs"], pd.DataFrame(rows), store / name / "run" / "study_runs.parquet")


def test_the_tuning_takes_the_lowest_mean_and_goes_on_where_an_edge_wins(tmp_path: Path):
    rates = {}
    for router in designs.ROUTERS:
        rates |= {f"{router} learning_rate={value:g}": [3.0 + value] * 2 for value in designs.RATES}
    rates["top2 learning_rate=0.002"] = [2.0, 2.2]
    rates["hash learning_rate=0.004"] = [2.0, 2.1]
    rates["some learning_rate=0.001"] = [1.0, None]  # it failed once
    write_runs(tmp_path, "tuning_rate", rates)
    tuned = run.after_rates(tmp_path, {})
    assert tuned["rates"]["top2"] == 0.002
    assert "top2" not in tuned["more"]
    assert (tuned["rates"]["hash"], tuned["more"]["hash"]) == (0.004, 0.008)
    assert (tuned["rates"]["dense"], tuned["more"]["dense"]) == (0.001, 0.0005)
    assert tuned["rates"]["some"] == 0.002
    options = {
        f"{router} {option}={value:g}": [9.0, 9.0]
        for router, (option, values) in designs.OPTIONS.items()
        for value in values[::2]
    }
    options |= {"spectra epsilon=0.02": [1.0, 1.0], "hash learning_rate=0.008": [1.0, 1.0]}
    write_runs(tmp_path, "tuning_option", options)
    best = run.after_options(tmp_path, tuned)["best"]
    assert best["spectra"] == {"learning_rate": 0.001, "epsilon": 0.02}
    assert best["top2"] == {"learning_rate": 0.002, "balance": 0.01}  # the default, tried with the rates
    assert best["hash"] == {"learning_rate": 0.008}
    arms = designs.main_study(best)["arms"]
    assert arms["spectra"]["model"]["router_options"] == {"epsilon": 0.02}
    assert arms["hash"]["train"] == {"learning_rate": 0.008, "final_learning_rate": 0.0008}


def test_effects_are_correlated_within_layers_plain_and_given_load():
    draw = np.random.default_rng(0)
    rows = pd.DataFrame({"layer": np.repeat([0, 3], 12), "expert": np.tile(np.arange(12), 2)})
    for name in ("loss_difference", "half_a", "half_b", "load", "alignment", "ambiguity"):
        rows[name] = draw.normal(size=24)
    rows["loss_difference"] += rows["load"] + 10 * rows["layer"]
    found = causal.correlation_rows(rows).set_index(["metric", "layer"])["value"]
    assert len(found) == 10
    for layer, part in rows.groupby("layer"):
        r = part[["loss_difference", "alignment", "load"]].corr("spearman").to_numpy()
        assert found["effect_alignment", layer] == pytest.approx(r[0, 1])
        assert found["effect_load", layer] == pytest.approx(r[0, 2])
        partial = (r[0, 1] - r[0, 2] * r[1, 2]) / np.sqrt((1 - r[0, 2] ** 2) * (1 - r[1, 2] ** 2))
        assert found["effect_alignment_given_load", layer] == pytest.approx(partial)
    without_rows = causal.correlation_rows(rows.drop(columns=["alignment", "ambiguity"]))
    assert set(without_rows["metric"]) == {"effect_load"}


@pytest.mark.parametrize("router", ["dense", "topk"])
def test_a_base_of_the_lab_predicts_the_same_in_transformers(tmp_path: Path, router: str):
    from transformers import AutoModelForCausalLM

    config = tiny(router, vocabulary=258, qk_norm=False, **({"top_k": 2} if router == "topk" else {}))
    model = trained(config)
    save_model(model, Bytes(), tmp_path / "lab")
    existing.write_for_transformers(tmp_path / "lab", tmp_path / "base")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(theirs).__name__ == {"dense": "LlamaForCausalLM", "topk": "MixtralForCausalLM"}[router]
    ids = torch.arange(40).reshape(2, 20) * 3
    with torch.no_grad():
        assert torch.allclose(theirs(input_ids=ids).logits, model.eval()(ids).logits_BLV, atol=1e-5)


def run_in_seconds(store: Path, name: str, design: dict, arms: tuple[str, ...]) -> None:
    """Run these arms of a shrunk study for four steps."""
    design["arms"] = {arm: design["arms"][arm] for arm in arms}
    design["base"]["train"] |= {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "sequence_length": 32}
    design["base"]["data"]["max_bytes"] = 100_000
    design["probe"] = str((STUDIES / name / designs.PROBE).resolve())
    (store / name).mkdir()
    (store / name / "study.toml").write_text(designs.toml(design))
    given = Namespace(jobs=1, device="cpu", again=None, shared=False)
    assert run.run_study(name, store, store / "work", 300, given)


def test_a_study_at_nano_size_runs_as_the_large_one_does(tmp_path: Path):
    design = designs.shrink(designs.causal({}))
    run_in_seconds(tmp_path, "causal", design, ("top2", "spectra"))
    first = pd.read_parquet(tmp_path / "causal" / "results.parquet")
    metrics = {arm: set(rows["metric"]) for arm, rows in first.groupby("arm")}
    common = {"validation_loss", "cv", "ffn_rms", "effect_load"}
    assert all(common <= found for found in metrics.values())
    assert {"effect_alignment", "effect_ambiguity_given_load"} <= metrics["top2"]
    assert "effect_alignment" not in metrics["spectra"]  # its router has no rows
    effects = read_parquet(str(tmp_path / "causal" / "run" / "study_effects.parquet"))
    assert effects.groupby(["arm", "seed", "layer"])["expert"].nunique().tolist() == [8] * 8


def test_a_study_of_some_stores_keys_and_their_use(tmp_path: Path):
    design = designs.shrink(designs.some(320))
    run_in_seconds(tmp_path, "some", design, ("A4", "A4 dense"))
    keys = read_parquet(str(tmp_path / "some" / "run" / "study_keys.parquet"))
    assert set(keys["arm"]) == {"A4"}
    assert (keys.groupby("seed")["expert"].nunique() == 8).all()
    layers = read_parquet(str(tmp_path / "some" / "run" / "study_layers.parquet"))
    of_keys = layers[layers["metric"].str.startswith("key_")].pivot(
        index="seed", columns="metric", values="value"
    )
    for seed, of in keys.groupby("seed"):
        shares = of["tokens"] / of["tokens"].sum()
        bits = -(shares[shares > 0] * np.log2(shares[shares > 0])).sum()
        assert of_keys["key_load_entropy_bits"][seed] == pytest.approx(bits)
        assert of_keys["key_used"][seed] == pytest.approx((shares > 0).mean())


def test_the_continuations_are_choices_of_the_domain_and_one_of_them_follows():
    words = [" ".join(f"{letter}{at}" for at in range(200)) for letter in "abc"]
    found = continuations.items(words, random.Random(0))
    assert len(found) == continuations.ITEMS
    for one in found:
        choices = one["choices"]
        assert len(set(choices)) == continuations.CHOICES
        follows = [any(f"{one['context']} {choice}" in text for text in words) for choice in choices]
        assert follows[one["label"]]
        assert sum(follows) == 1
    places = np.bincount([one["label"] for one in found])
    assert places.min() > continuations.ITEMS / continuations.CHOICES / 2


def test_the_readmes_are_those_of_the_stored_studies(tmp_path: Path):
    copy = tmp_path / "studies"
    shutil.copytree(STUDIES, copy, ignore=shutil.ignore_patterns("text", "__pycache__"))
    for file in copy.glob("*/README.md"):
        file.unlink()
    report.write_readmes(copy)
    for file in STUDIES.glob("**/README.md"):
        assert (copy / file.relative_to(STUDIES)).read_text() == file.read_text(), file.name
    assert set(designs.QUESTIONS) == set(designs.designs({}))


STORED = sorted(file.parent.parent for file in STUDIES.glob("*/run/run.json"))


@pytest.mark.parametrize("folder", STORED, ids=[folder.name for folder in STORED])
def test_stored_results_follow_from_the_stored_tables_and_the_next_shard_continues_them(folder: Path):
    stored = pd.read_parquet(folder / "results.parquet")
    pd.testing.assert_frame_equal(run.results(folder.name, folder / "run"), stored, check_dtype=False)
    info = json.loads((folder / "run" / "run.json").read_text())
    plan = read_study(folder / "study.toml")
    assert json.loads(json.dumps(plan.as_dict())) == info["arguments"]
    done = run.finished(folder / "run")
    shards = json.loads((folder / "environment.json").read_text())["shards"]
    again = sum(len(shard.get("again", ())) for shard in shards) * len(plan.seeds)
    assert len(done) == sum(shard["trainings"] for shard in shards) - again
    losses = stored[(stored["metric"] == "validation_loss") & (stored["domain"] == "")]
    assert set(zip(losses["arm"], losses["seed"], strict=True)) <= done


def test_a_shard_continues_from_tables_alone(tmp_path: Path):
    folder = next(folder for folder in STORED if (folder / "run" / "study_layers.parquet").exists())
    copy = tmp_path / "run"
    shutil.copytree(folder / "run", copy)
    info = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**info, "status": "interrupted"}))
    run.unpack(copy, tmp_path / "work", folder / "study.toml")
    writer = RunWriter(tmp_path / "work", VERB, info)
    assert len(writer.done_tasks()) == len(run.finished(copy))
    for name in ("study_runs", "study_layers", "study_loads"):
        table = TABLES[name]
        before = read_parquet(str(copy / f"{name}.parquet"), table)
        before = before[before["status"] != "not run"] if "status" in before else before
        one, other = (
            frame.sort_values(list(table.keys), ignore_index=True) for frame in (before, writer.joined(name))
        )
        pd.testing.assert_frame_equal(one, other, check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize("folder", STORED, ids=[folder.name for folder in STORED])
def test_every_stored_study_is_read_and_one_of_its_arms_can_be_trained_again(folder: Path, tmp_path: Path):
    stored = moescope.open(folder / "run")
    assert {"study_runs", "study_comparisons"} <= set(stored.tables)
    for name in stored.tables:
        assert list(stored.table(name)) == list(stored.verb.tables[name].columns)
    assert VERB.summary is not None
    summary = VERB.summary(stored)
    assert summary.coverage
    assert summary.findings
    target = tmp_path / folder.name
    shutil.copytree(folder, target)
    plan, done = read_study(target / "study.toml"), run.finished(target / "run")
    arm = next(arm for arm in plan.arms if (arm.name, plan.seeds[0]) in done)
    run.forget(target, tmp_path / "work", [arm.name])
    run.unpack(target / "run", tmp_path / "work", target / "study.toml")
    names = {each.name: each for each in plan.arms}
    kept = {names[name].training_name(seed) for name, seed in done if name != arm.name}
    assert RunWriter(tmp_path / "work", VERB, {}).done_tasks() == kept
    assert (arm.name, plan.seeds[0]) not in run.finished(target / "run")


def small_study(store: Path, *arms: str) -> None:
    design = designs.shrink(designs.main_study({}))
    design["arms"] = {arm: design["arms"][arm] for arm in arms}
    design["base"]["train"] |= {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "sequence_length": 32}
    design["base"]["data"]["max_bytes"] = 100_000
    design["probe"] = str((STUDIES / "main" / designs.PROBE).resolve())
    (store / "main").mkdir(exist_ok=True)
    (store / "main" / "study.toml").write_text(designs.toml(design))


def shard(store: Path, work: str, **options: Any) -> dict[str, Any]:
    given = {"jobs": 1, "device": "cpu", "again": None, "shared": False, **options}
    assert run.run_study("main", store, store / work, 300, Namespace(**given))
    last: dict[str, Any] = json.loads((store / "main" / "environment.json").read_text())["shards"][-1]
    return last


def test_a_stored_study_gains_an_arm_and_trains_another_again_beside_other_work(tmp_path: Path):
    small_study(tmp_path, "top2", "hash")
    assert shard(tmp_path, "first")["trainings"] == 4
    stored, timed = tmp_path / "main" / "run", tmp_path / "main" / "run" / "overhead.parquet"
    before, times = pd.read_parquet(stored / "study_runs.parquet"), timed.read_bytes()
    small_study(tmp_path, "top2", "hash", "dense")
    last = shard(tmp_path, "second", again=["hash"], shared=True)
    assert (last["trainings"], last["again"]) == (4, ["hash"])  # dense for the first time, hash again
    after = pd.read_parquet(stored / "study_runs.parquet")
    assert set(after["arm"]) == {"top2", "hash", "dense"}
    seconds = [runs.set_index(["arm", "seed"])["seconds"] for runs in (before, after)]
    for seed in (0, 1):
        assert seconds[1]["top2", seed] == seconds[0]["top2", seed]
        assert seconds[1]["hash", seed] != seconds[0]["hash", seed]
    assert timed.read_bytes() == times  # measured while nothing else ran
    plan = study_from(tomllib.loads((tmp_path / "main" / "study.toml").read_text()))
    assert json.loads((stored / "run.json").read_text())["arguments"] == json.loads(
        json.dumps(plan.as_dict())
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("settings", "other settings"),
        ("removed", "other settings"),
        ("unknown", "no stored arm"),
        ("not run", "was not run yet"),
        ("work", "remove it"),
    ],
)
def test_what_a_stored_study_cannot_do_is_one_line_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, change: str, words: str
):
    folder = next(folder for folder in STORED if folder.name == "controls")
    shutil.copytree(folder, tmp_path / "controls")
    file, again = tmp_path / "controls" / "study.toml", ["top2"]
    if change in ("settings", "removed"):
        design = tomllib.loads(file.read_text())
        name = next(name for name in design["arms"] if name.startswith("switch"))
        if change == "removed":
            del design["arms"][name]
        else:
            design["arms"][name]["train"]["learning_rate"] = 0.5
        file.write_text(designs.toml(design))
        again = None
        info = json.loads((tmp_path / "controls" / "run" / "run.json").read_text())
        (tmp_path / "controls" / "run" / "run.json").write_text(json.dumps({**info, "status": "interrupted"}))
    elif change == "unknown":
        again = ["top3"]
    elif change == "not run":
        shutil.rmtree(tmp_path / "controls" / "run")
    else:
        (tmp_path / "work" / "controls").mkdir(parents=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = Namespace(jobs=1, device="cpu", again=again, shared=False)
    with pytest.raises(SystemExit) as stopped:
        run.run_study("controls", tmp_path, tmp_path / "work", 300, given)
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert words in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_new_rows_are_drawn_for_every_router_and_nothing_else_changes(tmp_path: Path):
    from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4},
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    existing.with_new_rows(tmp_path / "base", tmp_path / "new", seed=3)
    existing.with_new_rows(tmp_path / "base", tmp_path / "other", seed=4)
    base, new, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for name in ("base", "new", "other")
    )
    changed = {name for name in base if not torch.equal(base[name], new[name])}
    assert len(changed) == 2
    assert all(name.endswith("gate.weight") for name in changed)
    assert not any(torch.equal(new[name], other[name]) for name in changed)
