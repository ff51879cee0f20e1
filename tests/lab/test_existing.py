"""train --base: models built by transformers are trained further, and compared with themselves."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from functools import cached_property

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import moescope
from lab.existing_models import DENSE, SPARSE, ids, saved, tiny
from moescope.decoder.config import ModelConfig
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks
from moescope.execution.capture import Capture
from moescope.execution.models import load_model
from moescope.execution.replaced import replace_routers
from moescope.lab import tuning
from moescope.lab.config import settle_existing
from moescope.lab.figures import BASE_LOSSES
from moescope.lab.train import size_lines
from moescope.lab.tuning import chosen_by_layer, compared_losses

TRAIN = {
    "steps": 4,
    "batch_size": 4,
    "sequence_length": 32,
    "learning_rate": 3e-3,
    "warmup": 1,
    "weight_decay": 0.1,
    "evaluate_every": 2,
    "evaluation_rows": 10,
    "checkpoint_every": 2,
}
DATA = {"max_bytes": 60_000}


def settings(**base):
    train = {key: base.pop(key) for key in list(base) if key in TRAIN}
    return {"base": base, "data": DATA, "train": {**TRAIN, **train}}


def tensors(folder):
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def changed_names(before, after):
    assert sorted(before) == sorted(after)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for trainings that are neither scanned nor traced afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moescope.lab.train.analyse_run", lambda *given: None)
    return tmp_path


@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_a_dry_run_is_about_the_base_and_writes_nothing(here, family):
    base = saved(family, here / "base")
    facts = moescope.count_parameters(settings(), base=base, router="loss_free")
    lines = size_lines(facts)
    sizes = {name: value.numel() for name, value in tensors(base).items()}
    copies = 7 * sum(size for name, size in sizes.items() if ".mlp." in name) if family == "llama" else 0
    assert facts["parameters_total"] == sum(sizes.values()) + copies
    assert "loss_free" in lines[0]
    assert facts["trained"] == ("routers+experts" if family == "llama" else "routers")
    assert "4 steps of 128 tokens" in lines[-1]
    assert [item.name for item in here.iterdir()] == ["base"]
    with pytest.raises(BadInput, match="--preset is for models of the lab"):
        moescope.count_parameters(preset="nano", base=base)
    padded = {**settings(), "data": {**DATA, "layout": "padded"}}
    with pytest.raises(BadInput, match="'padded' is for models of the lab"):
        moescope.count_parameters(padded, base=base)
    with pytest.raises(BadInput, match=r"\[train\] must be a table, not 3"):
        moescope.count_parameters({"train": 3}, base=base)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_training_routers_changes_no_other_tensor(family, here):
    base = saved(family, here / "base")
    run = moescope.train(settings(), base=base, out=here / "run", quiet=True)
    changed = changed_names(tensors(base), tensors(here / "run" / "model"))
    layers = len(find_blocks(tiny(family)))
    assert len(changed) == layers
    assert all(name.endswith("gate.weight") for name in changed)
    rows = run.table("base_losses").set_index(["model", "domain"])
    assert rows.loc[("untouched", ""), "difference"] == 0
    assert run.info["parameters_trainable"] == layers * SPARSE[family].hidden_size * (
        4 if family == "mixtral" else 8
    )


def test_the_balance_loss_reaches_the_routers_through_the_model_s_loss():
    gradients = {}
    for weight in (0.0, 0.5):
        model = tiny("mixtral")
        assert tuning.use_balance_loss(model, weight)
        output = model(ids(), labels=ids())
        output.loss.backward()
        gradients[weight] = [block.weight_ED.grad for block in find_blocks(model)]
    alone = tiny("mixtral")
    aux = alone(ids(), output_router_logits=True).aux_loss
    wanted = torch.autograd.grad(0.5 * aux, [block.weight_ED for block in find_blocks(alone)])
    for zero, half, extra in zip(gradients[0.0], gradients[0.5], wanted, strict=True):
        assert torch.allclose(half - zero, extra, atol=1e-7)
        assert float(extra.norm()) > 1e-5


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_fused_experts_of_fp32_weights_compute_in_bf16_within_autocast(family):
    outputs, dtypes, original = {}, [], torch.nn.functional.grouped_mm

    def note(x, weight, **more):
        dtypes.append(weight.dtype)
        return original(x, weight, **more)

    for way in ("eager", "ours"):  # transformers' own loop of F.linear follows autocast
        model = tiny(family)
        if way == "eager":
            model.set_experts_implementation("eager")
        else:
            tuning.use_autocast_experts(model)
        with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "grouped_mm", note)
            loss = model(ids(), labels=ids()).loss
            loss.backward()
        gradients = [block.experts.down_proj.grad for block in find_blocks(model)]
        outputs[way] = [loss.detach().reshape(1), *gradients]
    assert set(dtypes) == {torch.bfloat16}
    for theirs, ours in zip(*outputs.values(), strict=True):
        assert ours.dtype == torch.float32
        assert float((theirs - ours).norm() / theirs.norm()) < 0.03
    saved_config = model.config.to_dict()
    assert "autocast" not in json.dumps(saved_config, default=str)


def trainer_of(model, tmp_path, micro):
    arguments = tuning.training_arguments(
        settle_existing(settings(), None, None).train, tmp_path / "trainer", "cpu", 1
    )
    arguments.gradient_accumulation_steps = micro
    return tuning.make_trainer(model, arguments, None)


@pytest.mark.parametrize("micro", [1, 4])
def test_the_losses_of_a_new_router_reach_the_trainer_s_loss(micro, tmp_path):
    model = tiny("mixtral")
    replace_routers(model, ModelConfig(router="topk", top_k=0, router_options={"balance": 0.5, "z": 0.0}))
    model.train()
    batch = {"input_ids": ids(), "labels": ids(), "attention_mask": torch.ones_like(ids())}
    items = torch.tensor(2 * 19)
    loss, output = trainer_of(model, tmp_path, micro).compute_loss(model, batch, True, items)
    own = sum(value for one in model.routers_instead for value in one.losses.values())
    assert own.item() > 0.5  # two layers, each at least about 0.5
    assert loss.item() == pytest.approx(output.loss.item() + own.item() / micro, rel=1e-6)
    rows = [one.router.weight for one in model.routers_instead]
    together, alone, added = (
        torch.autograd.grad(value, rows, retain_graph=True) for value in (loss, output.loss, own / micro)
    )
    for whole, model_part, router_part in zip(together, alone, added, strict=True):
        assert torch.allclose(whole, model_part + router_part, atol=1e-7)
        assert float(router_part.norm()) > 1e-5


@pytest.mark.parametrize(("micro", "processes"), [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_the_family_s_balance_loss_counts_once_per_step(micro, processes, tmp_path, monkeypatch):
    model = tiny("mixtral").train()
    tuning.use_balance_loss(model, 0.5)
    batch = {"input_ids": ids(), "labels": ids(), "attention_mask": torch.ones_like(ids())}
    items = torch.tensor(micro * processes * 2 * 19)  # all micro-batches of all processes are alike
    trainer = trainer_of(model, tmp_path, micro)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", processes)
    loss = trainer.compute_loss(model, batch, num_items_in_batch=items)
    output = model(**batch)
    rows = [block.weight_ED for block in find_blocks(model)]
    # a step sums micro-batches and averages processes
    step, wanted = (torch.autograd.grad(value, rows) for value in (micro * loss, output.loss))
    for ours, theirs in zip(step, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    aux = torch.autograd.grad(0.5 * model(**batch).aux_loss, rows)
    assert min(float(part.norm()) for part in aux) > 1e-4


def test_one_process_trains_on_one_gpu_where_there_are_more(tmp_path, monkeypatch):
    class FourGpus(tuning.TrainingArguments):
        @cached_property
        def _setup_devices(self):
            self._n_gpu = 4  # with more than one the Trainer splits every batch with nn.DataParallel
            return torch.device("cpu")

    monkeypatch.setattr(tuning, "TrainingArguments", FourGpus)
    train = settle_existing(settings(), None, None).train
    assert tuning.training_arguments(train, tmp_path / "trainer", "cpu", 1).n_gpu == 1


@pytest.mark.parametrize(("router", "low", "high"), [("loss_free", 0.98, 1.0), ("spectra", 0.2, 0.8)])
def test_a_replaced_router_is_trained_saved_scanned_and_traced(router, low, high, tmp_path):
    base = saved("mixtral", tmp_path / "base")
    run = moescope.train(
        settings(learning_rate=0.3), base=base, router=router, out=tmp_path / "run", quiet=True
    )
    assert run.info["warnings"] == []
    assert set(run.parts) == {"scan", "trace"}
    assert len(run.parts["trace"].table("load")) > 0
    # of the router at step 0; loss_free has the same rows, sigmoid instead of softmax: the same order
    agreement = run.info["routing_agreement"]
    assert sorted(agreement) == ["0", "1"]
    assert low < min(agreement.values()) <= max(agreement.values()) <= high
    old, new = (routed_experts(str(tmp_path / name)) for name in ("base", "run/model"))
    assert float((old[..., None] == new[:, None]).any(-1).float().mean()) < 0.8  # training moved it far
    parts = {name.split("mlp.")[-1].split(".")[0] for name in trained_names(base, run.path / "model")}
    assert parts <= {"gate", "moescope_shared_router"}


def trained_names(base, result):
    """Names of tensors of the result that no tensor of the base equals."""
    hashes = {hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in tensors(base).values()}
    model = AutoModelForCausalLM.from_pretrained(base)
    hashes |= {hashlib.sha256(value.numpy().tobytes()).hexdigest() for value in model.state_dict().values()}
    found = tensors(result)
    return [
        name
        for name, value in found.items()
        if hashlib.sha256(value.numpy().tobytes()).hexdigest() not in hashes
    ]


def routed_experts(folder):
    """The experts that the first layer chooses for some tokens."""
    model, routing = load_model(folder, "auto", "cpu").model, []
    with Capture(model, routing.append), torch.no_grad():
        model(input_ids=ids(), attention_mask=torch.ones_like(ids()))
    return routing[0].chosen_TK


def test_the_control_of_a_new_router_is_the_kept_one_trained_alike(here):
    base = saved("mixtral", here / "base")
    config = settings(trained="routers+experts", learning_rate=1e-2)
    kept = moescope.train(config, base=base, out=here / "kept", quiet=True).table("base_losses")
    config["base"]["controls"] = True
    run = moescope.train(config, base=base, router="spectra", out=here / "run", quiet=True)
    rows = run.table("base_losses").set_index(["model", "domain"])
    control = rows.loc["kept router, trained"]
    wanted = kept.set_index(["model", "domain"]).loc["trained"]
    pd.testing.assert_series_equal(control["loss"], wanted["loss"])  # the same training, as its own run
    pd.testing.assert_series_equal(control["difference_low"], wanted["difference_low"])
    assert control.loc["", "difference"] < -1e-3
    apart = rows.loc["trained", "loss"] - control["loss"]
    pd.testing.assert_series_equal(control["trained_minus"], apart, check_names=False)


@pytest.mark.slow
def test_every_control_reads_the_batches_of_the_training(here, monkeypatch):
    read, before = {}, tuning.PartTrainer.training_step

    def note(self, model, inputs, *more, **named):
        read.setdefault(self.args.output_dir, []).append(inputs["input_ids"].clone())
        return before(self, model, inputs, *more, **named)

    monkeypatch.setattr(tuning.PartTrainer, "training_step", note)
    config = settings(router="loss_free", experts=3, controls=True)
    moescope.train(config, base=saved("llama", here / "base"), out=here / "run", quiet=True)
    training, dense, kept = read.values()
    assert len(training) == 4
    for control in (dense, kept):
        assert len(control) == 4
        assert all(torch.equal(one, other) for one, other in zip(training, control, strict=True))


@pytest.mark.parametrize("router", ["kept", "loss_free"])
def test_padding_has_no_part_in_the_routing_agreement(router):
    model = tiny("mixtral")
    if router != "kept":
        replace_routers(model, ModelConfig(router=router, top_k=0))
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, 12:] = False
    padded = torch.where(real, ids(), 257)
    together = chosen_by_layer(model, padded, real)
    alone = chosen_by_layer(model, ids()[1:, :12], real[1:, :12])
    for layer, chosen in alone.items():
        assert len(together[layer]) == 32
        assert torch.equal(together[layer][20:].sort(-1).values, chosen.sort(-1).values)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen3")) for name in DENSE]
)
def test_a_dense_model_is_upcycled_trained_and_compared_with_the_dense_control(family, here):
    base = saved(family, here / "base")
    config = settings(trained="routers+experts", experts=3, controls=True)
    run = moescope.train(config, base=base, out=here / "run", quiet=True)
    rows = run.table("base_losses").set_index(["model", "domain"])["difference"]
    assert abs(rows[("upcycled", "")]) < 1e-5
    assert rows[("trained", "")] < -1e-3
    assert rows[("dense, trained on", "")] < -1e-3
    drawn = {
        trace["name"]: trace["x"]
        for trace in BASE_LOSSES.draw({"base_losses": run.table("base_losses")}).data
    }
    for name in ("upcycled", "trained", "dense, trained on"):
        np.testing.assert_array_equal(drawn[name], rows[name])
    model = AutoModelForCausalLM.from_pretrained(here / "run" / "model")
    assert model.config.model_type in ("mixtral", "qwen3_moe")
    assert run.info["model"]["top_k"] == 2


def test_routers_over_equal_copies_are_rejected(here):
    base = saved("llama", here / "base")
    with pytest.raises(BadInput, match="nothing to learn"):
        moescope.train(settings(trained="routers"), base=base, out=here / "run", quiet=True)
    assert not (here / "run").exists()


def test_a_dense_base_has_no_old_router_and_both_held_out_losses_name_their_text(here):
    config = settings(trained="routers+experts", experts=3, router="loss_free", warmup=9)
    base = saved("llama", here / "base")
    run = moescope.train(config, base=base, out=here / "run", quiet=True)
    (warning,) = run.info["warnings"]
    assert "warmup 9 exceeds steps 4" in warning
    assert any(warning in line for line in size_lines(moescope.count_parameters(config, base=base)))
    assert run.info["routing_agreement"] is None
    summary = run.verb.summary(run)
    assert not any("old router" in line for line in summary.coverage)
    assert any("dense" in line for line in summary.coverage)
    rows = run.table("base_losses").set_index(["model", "domain"])
    documents = sum(len(file.read_text().splitlines()) for file in (here / "run/validation").glob("*.jsonl"))
    assert rows.loc[("trained", ""), "documents"] == documents
    of_documents, of_rows = summary.findings[:2]
    assert f"{documents} held-out documents" in of_documents
    assert "10 rows of 32 tokens" in of_rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"trained": "everything", "router": "loss_free"}, {"trained": "routers+experts"}]
)
def test_an_interrupted_training_ends_with_the_same_numbers(changes, here, monkeypatch):
    base = saved("mixtral", here / "base")
    config = settings(**changes, steps=5)
    whole = moescope.train(config, base=base, out=here / "whole", quiet=True)

    class Killed(BaseException):
        pass

    before = tuning.TrainingMonitor.on_step_end

    def die(self, args, state, control, **more):
        if state.global_step == 3:
            raise Killed
        before(self, args, state, control, **more)

    monkeypatch.setattr(tuning.TrainingMonitor, "on_step_end", die)
    with pytest.raises(Killed):
        moescope.train(config, base=base, out=here / "cut", quiet=True)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    resumed, train = [], tuning.PartTrainer.train_from

    def note(self, folder):
        resumed.append(folder)
        train(self, folder)

    monkeypatch.setattr(tuning.PartTrainer, "train_from", note)
    cut = moescope.train(config, base=base, out=here / "cut", quiet=True)
    assert [str(folder).rpartition("-")[2] for folder in resumed] == ["2"]
    for name in ("evaluations", "base_losses", "load"):
        pd.testing.assert_frame_equal(whole.table(name), cut.table(name))
    assert not changed_names(tensors(here / "whole" / "model"), tensors(here / "cut" / "model"))


@pytest.mark.slow
def test_a_training_killed_within_a_control_ends_with_the_same_numbers(here, monkeypatch):
    base = saved("llama", here / "base")
    config = settings(router="loss_free", experts=3, controls=True)  # two controls: dense, kept router
    whole = moescope.train(config, base=base, out=here / "whole", quiet=True)

    class Killed(BaseException):
        pass

    before = tuning.PartTrainer.training_step

    def die(self, *arguments, **named):
        if self.args.output_dir.endswith("kept") and self.state.global_step == 3:
            raise Killed
        return before(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(tuning.PartTrainer, "training_step", die)
        with pytest.raises(Killed):
            moescope.train(config, base=base, out=here / "cut", quiet=True)
    trained = []

    def note(self, *arguments, **named):
        trained.append((self.args.output_dir.rpartition("/")[2], self.state.global_step))
        return before(self, *arguments, **named)

    monkeypatch.setattr(tuning.PartTrainer, "training_step", note)
    cut = moescope.train(config, base=base, out=here / "cut", quiet=True)
    assert trained == [("kept", 2), ("kept", 3)]  # nothing that was done is done again
    assert not {"trainer", "control"} & {item.name for item in (here / "cut").iterdir()}
    for name in ("steps", "evaluations", "base_losses", "load"):
        drop = [
            c for c in whole.table(name) if c in ("step_seconds", "tokens_per_second", "peak_memory_bytes")
        ]
        pd.testing.assert_frame_equal(
            whole.table(name).drop(columns=drop), cut.table(name).drop(columns=drop)
        )
    assert not changed_names(tensors(here / "whole" / "model"), tensors(here / "cut" / "model"))


def test_differences_are_paired_and_weighted_by_tokens():
    tokens = [10, 30] * 15
    frame = pd.DataFrame({"document": range(30), "domain": ["a", "b"] * 15, "tokens": tokens, "loss": 2.0})
    better = frame.assign(loss=frame["loss"] - np.where(frame["domain"] == "a", 0.4, 0.0))
    control = better.assign(loss=better["loss"] + 0.1)
    losses = {"untouched": frame, "trained": better, "control": control}
    rows = pd.DataFrame(compared_losses(losses, 0)).set_index(["model", "domain"])
    columns = ["trained_minus", "trained_minus_low", "trained_minus_high"]
    assert rows.loc[("control", ""), columns].tolist() == pytest.approx([-0.1] * 3)  # alike in all documents
    assert rows.loc[("control", ""), "difference"] == pytest.approx(0.1 - 0.4 * 150 / 600)
    assert rows.loc[("trained", ""), "difference"] == pytest.approx(-0.4 * 150 / 600)
    assert rows.loc[("trained", "a"), "difference"] == pytest.approx(-0.4)
    assert rows.loc[("trained", "b"), "difference"] == 0
    assert math.isnan(rows.loc[("trained", "a"), "difference_low"])  # 15 documents


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trained": "attention"}, "unknown trained 'attention'"),
        ({"trained": "experts"}, "unknown trained 'experts'"),
        ({"lora": 8}, r"\[base\] lora was removed"),
        ({"expert_list": "list.json"}, r"\[base\] expert_list was removed"),
        ({"router": "dense"}, "no experts to choose from"),
        ({"router_options": {"z": 0.1}}, "name it with"),
        ({"balance": -1.0}, "balance must be 0 or more"),
        ({"steps": 0}, "give steps, above 0"),
        ({"controls": True, "trained": "routers+experts"}, "name a new"),
        ({"experts": 3}, "has experts already"),
        ({"noise": 0.1}, "has experts already"),
        ({"top_k": 3}, "top_k is of a new router"),
        ({"router": "hash"}, "no weights to train"),
    ],
)
def test_bad_settings_are_one_line_and_leave_nothing(change, said, here):
    base = saved("mixtral", here / "base")
    with pytest.raises(BadInput, match=said):
        moescope.train(settings(**change), base=base, out=here / "run", quiet=True)
    assert not (here / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("router", ["loss_free", "hash", "spectra", "expert_choice", "some"])
def test_the_other_verbs_work_on_a_model_with_another_router(router, here):
    base = saved("mixtral", here / "base")
    config = settings(trained="routers+experts", router=router)
    model = moescope.train(config, base=base, out=here / "run", quiet=True).path / "model"
    texts = [json.dumps({"text": f"document {number} has words of its own. " * 12}) for number in range(40)]
    (here / "text.jsonl").write_text("\n".join(texts))
    text = [str(here / "text.jsonl")]
    assert moescope.compare(base, model, out=here / "compare", quiet=True).info["status"] == "done"
    written = here / "pruned"
    run = moescope.compress(model, keep=2, text=text, apply=written, out=here / "compress", quiet=True)
    assert run.info["status"] == "done"
    pruned = load_model(str(written), "auto", "cpu").model
    assert {block.n_experts for block in find_blocks(pruned)} == {2}
    assert torch.isfinite(pruned(ids()).logits).all()


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# --multi_gpu is accelerate's flag for several processes, here on the CPU; port 0: any that is free
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
ACCELERATE += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "family", "lines"),
    [
        (ACCELERATE, "mixtral", 'trained = "everything"'),
        (TORCHRUN, "llama", 'controls = true\nexperts = 3\nrouter = "loss_free"'),
    ],
    ids=["accelerate-mixtral", "torchrun-llama"],
)
def test_two_processes_train_the_model_of_one(launch, family, lines, here):
    base = saved(family, here / "base")
    (here / "config.toml").write_text(
        f"[base]\n{lines}\n[data]\nmax_bytes = 60000\n[train]\n"
        + "".join(f"{key} = {value}\n" for key, value in TRAIN.items())
    )
    one = moescope.train("config.toml", base=base, out=here / "one", quiet=True)
    words = "-m moescope train config.toml --base base --out two --device cpu"
    command = [sys.executable, "-m", *launch, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    two = moescope.Run.load(here / "two")
    assert two.info["processes"] == 2
    assert np.allclose(one.table("evaluations")["loss"], two.table("evaluations")["loss"], atol=2e-3)
    assert one.table("load")["tokens"].sum() == two.table("load")["tokens"].sum()
    pd.testing.assert_frame_equal(
        *(run.table("base_losses")[["model", "domain", "loss"]] for run in (one, two)), atol=2e-3, rtol=0
    )
