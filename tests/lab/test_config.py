"""Configs are read whole or refused by name."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict, replace

import pytest

from moescope.cli import main
from moescope.decoder.config import ModelConfig
from moescope.decoder.model import parameter_counts
from moescope.decoder.routers.some import SoME
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.lab.batches import TokenRows
from moescope.lab.config import (
    PRESETS,
    LabConfig,
    check,
    config_from,
    epochs_to_steps,
    read_toml,
    settle_existing,
    with_router,
)
from moescope.lab.cost import training_bytes
from moescope.lab.study import plan_study
from moescope.lab.training import window_length


def test_every_preset_can_be_built_and_survives_json():
    for config in PRESETS.values():
        check(config)
        assert config_from(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize(("name", "experts"), [("a4", 64), ("b1", 128), ("b2", 256), ("b3", 512)])
def test_presets_of_some_are_the_published_runs(name: str, experts: int):
    config = PRESETS[f"some_{name}"]
    model, train = config.model, config.train
    assert (model.d_model, model.layers, model.heads, model.d_ff, model.top_k) == (512, 10, 8, 1024, 4)
    assert (model.experts, model.vocabulary, config.data.layout) == (experts, 8192, "documents")
    assert (train.learning_rate, train.sequence_length, train.steps) == (6e-4, 768, 1248)
    ten_thousand_rows = epochs_to_steps(replace(config, train=replace(train, steps=0, epochs=4)), 10_000)
    assert ten_thousand_rows.train == train
    deviations = {option for option in SoME.OPTIONS if option.startswith("published_")}
    assert {option for option, value in model.router_options.items() if value} == deviations


def test_epochs_replace_the_steps_of_the_preset_and_steps_its_epochs(tmp_path):
    epochs = config_from({"train": {"epochs": 3}})
    assert (epochs.train.steps, epochs.train.epochs) == (0, 3)
    assert config_from(json.loads(json.dumps(asdict(epochs)))) == epochs
    assert config_from({"train": {"steps": 7}}, epochs).train == replace(PRESETS["nano"].train, steps=7)


def test_every_row_is_read_as_often_as_epochs_say():
    rows = TokenRows.of({"a": ["".join(f"{number:04d}" for number in range(250))]}, Bytes(), 25)
    config = config_from({"train": {"epochs": 3, "batch_size": rows.rows // 4, "sequence_length": 25}})
    train = epochs_to_steps(config, rows.rows).train
    read = [rows.of_step(step, train.batch_size, 0).ids_BL for step in range(train.steps)]
    assert list(Counter(tuple(row) for batch in read for row in batch).values()) == [3] * 40
    assert epochs_to_steps(config, 1).train.steps == 3  # fewer rows than a batch


def test_a_file_is_laid_over_the_preset_it_names(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        'preset = "small"\n[model]\nlayers = 2\n[train]\nlearning_rate = 1\n[data.domains]\ncode = "src"\n'
    )
    config = config_from(read_toml(path), where=str(path))
    assert config.model == replace(PRESETS["small"].model, layers=2)
    assert config.train.learning_rate == 1.0
    assert isinstance(config.train.learning_rate, float)
    assert config.data.domains == {"code": "src"}


def test_a_base_that_is_handed_in_goes_before_the_file_s_preset(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('preset = "small"\n')
    assert config_from(read_toml(path), PRESETS["nano"]) == PRESETS["nano"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nlayer = 3", "[model]: unknown key 'layer'; did you mean 'layers'?"),
        ("[modell]\nlayers = 3", "unknown table 'modell'; did you mean 'model'?"),
        ("[train]\nquux = 3", "[train]: unknown key 'quux'; known: steps, epochs, batch_size"),
        ("[train]\nsteps = 9\nepochs = 2", "[train] steps = 9 and epochs = 2; give one of them"),
        ('[model]\nlayers = "3"', "[model]: layers must be an integer, not '3'"),
        ("[data]\ntext = 'a.txt'", "[data]: text must be a list, not 'a.txt'"),
        ("[data]\nmax_bytes = -5", "[data] max_bytes must be 0 or more, not -5"),
        ("[data]\ntext = ['a']\ndomains = { b = 'b' }", "[data] set text for one domain or domains by name"),
        ("[data]\ndomains = { 'a/b' = 'b' }", "[data] domains: 'a/b' cannot be a domain's name"),
        ("[train]\nseed = 9223372036854775807123", "[train] seed must be less than 2**63"),
        ("model = 3", "[model] must be a table, not 3"),
        ("preset = 'huge'", "unknown preset 'huge'; known: nano"),
        ("[train]\nparallel = 'fsdp'", "[train] parallel was removed: processes"),
        ("[train]\ndtype = 'fp8'", "unknown dtype 'fp8'; known: float32, bfloat16"),
        ("[train]\nlearning_rate = nan", "[train] learning_rate must be more than 0, not nan"),
        ("[model]\nd_model = 60\nheads = 8", "d_model 60 must be a multiple of heads, 8"),
        ("[model]\nexpert_init = 'sparse'", "for block = 'some' only"),
        (
            "[model]\nrouter = 'topk'\ntop_k = 9",
            "top_k 9 exceeds the number of experts, 8; lower it to at most 8",
        ),
        (
            "[model]\nrouter_options = {balence = 0.1}",
            "router top2: unknown option 'balence'; did you mean 'balance'?",
        ),
        ("[model]\nrouter_options = {balance = -1}", "router top2: balance must be 0 or more, not -1"),
        ("[model]\nrouter = 'dense'\nrouter_options = {z = 1}", "router dense has no options; remove 'z'"),
        ("[train]\nmicro_batches = 3", "batch_size 16 must be a multiple of micro_batches, 3"),
        ("[data]\nvalidation_share = 1", "validation_share must lie between 0 and 1, not 1.0"),
        ("[model\n", "is not valid TOML"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_that_names_it(tmp_path, text, message):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        config_from(read_toml(path), where=str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


HUGE = [("model", key) for key in ("layers", "d_ff", "experts", "vocabulary", "d_model", "max_positions")]
HUGE += [("train", key) for key in ("steps", "epochs", "batch_size")]


@pytest.mark.parametrize(("part", "key"), HUGE)
@pytest.mark.parametrize("router", ["top2", "hash", "some", "dense"])
def test_absurd_sizes_are_rejected_from_estimates(part, key, router):
    if (router, key) == ("dense", "experts"):
        pytest.skip("it has one block per layer")
    for size in (10**15, 10**400):
        tables = {"model": {"router": router}, "train": {}}
        tables[part][key] = size
        with pytest.raises(BadInput, match=r"this training (needs|reads) more than"):
            epochs_to_steps(config_from(tables), 1000)


@pytest.mark.parametrize("key", ["warmup", "evaluate_every", "evaluation_rows", "checkpoint_every"])
def test_absurd_rhythms_are_rejected(key):
    assert window_length(config_from({"train": {key: 10**9}}).train) <= 10**9
    for value in (10**10, 10**400):
        with pytest.raises(BadInput, match=rf"\[train\] {key} must be at most 1,000,000,000"):
            config_from({"train": {key: value}})


def test_a_study_is_not_planned_with_a_router_that_cannot_be_measured_here(monkeypatch):
    monkeypatch.setattr("moescope.lab.cost.memory_of", lambda device: 10**6)
    arms = {"small": {}, "wide": {"model": {"router": "some", "d_model": 1024}}}  # 4 x 1024^2 weights
    with pytest.raises(BadInput, match=r"some router of one layer needs 0\.0 GB; lower"):
        plan_study({"reference": "small", "arms": arms})


def test_numbers_that_are_no_floats_are_rejected(tmp_path):
    path = tmp_path / "config.toml"
    for digits, message in ((400, "learning_rate is too large"), (5000, "is not valid TOML")):
        path.write_text(f"[train]\nlearning_rate = {'9' * digits}")
        with pytest.raises(BadInput, match=message):
            config_from(read_toml(path), where=str(path))


def test_what_the_presets_need_is_estimated_from_weights_and_moments():
    for config in PRESETS.values():
        counts = parameter_counts(config.model)
        frozen = 2 * (counts.total - counts.trainable)  # bfloat16
        assert training_bytes(config.model, 0) == pytest.approx(16 * counts.trainable + frozen, rel=0.1)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"none\.toml: No such file"):
        read_toml(tmp_path / "none.toml")


def test_another_router_brings_its_own_k_and_leaves_the_old_options_behind():
    before = LabConfig(ModelConfig(router="top2", router_options={"balance": 0.5}))
    assert with_router(before, "top2") == before
    after = with_router(before, "switch_top1").model
    assert (after.top_k, after.router_options) == (1, {})
    assert with_router(before, "expert_choice").model.top_k == 2


def test_a_router_of_a_file_brings_its_own_k_unless_the_file_says_otherwise():
    assert config_from({"model": {"router": "switch_top1"}}).model.top_k == 1
    assert config_from({"model": {"router": "topk", "top_k": 3}}).model.top_k == 3


def test_an_unknown_option_that_names_a_key_of_the_config_says_where_it_is_set(monkeypatch, capsys):
    accepted = {"steps": 7, "batch-size": 8, "learning-rate": 1e-3, "d-ff": 32, "noise": 0.1, "experts": 4}
    for name, value in accepted.items():
        monkeypatch.setattr(sys, "argv", ["moescope", "train", f"--{name}", str(value)])
        with pytest.raises(SystemExit):
            main()
        (line,) = capsys.readouterr().err.splitlines()
        tables = re.findall(r"\[(\w+)\] (\w+)", line)
        assert tables, line
        for table, key in tables:  # what the line says is accepted
            config = {table: {key: value}}
            made = settle_existing(config, None, None) if table == "base" else config_from(config)
            assert getattr(getattr(made, table), key) == value
    for words in (["--stepz", "3"], ["--seed"]):  # no key; a key that is an option too
        monkeypatch.setattr(sys, "argv", ["moescope", "train", *words])
        with pytest.raises(SystemExit):
            main()
        assert "[train]" not in capsys.readouterr().err
