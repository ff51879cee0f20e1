"""The loop: it learns, it goes on exactly where it stopped, it stops at NaN and says where."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.tiny_training import LOSSES, tiny_config, tiny_training, trained
from moescope.decoder.model import LabModel
from moescope.decoder.routers import ROUTERS, Routed
from moescope.decoder.saving import save_model
from moescope.decoder.vocabulary import Bytes
from moescope.errors import BadInput
from moescope.lab.batches import Batch, TokenRows
from moescope.lab.training import (
    Data,
    Diverged,
    FiniteWatch,
    Training,
    clip_gradients,
    learning_rate,
    load_state,
    make_optimiser,
)
from moescope.routing.metrics import DIAGNOSTICS
from moescope.routing.monitor import LoopMonitor, Thresholds
from moescope.verbs import load_verb

# Keys that weaken at once and begin anew in every step, at random queries: the one router that draws while it
# trains.
DRAWING = {"respawn": True, "decay": 0.95, "decay_after": 0, "decay_percentile": 60.0}


@pytest.mark.parametrize(("router", "options"), [*((name, {}) for name in ROUTERS), ("some", DRAWING)])
def test_a_training_taken_up_at_a_checkpoint_is_the_uninterrupted_one_bit_for_bit(
    router: str, options: dict[str, Any], tmp_path: Path
):
    config = tiny_config(router, options, steps=6, checkpoint_every=3, evaluate_every=3)
    whole = tiny_training(config)
    run = trained(whole, tmp_path / "whole")

    class Killed(Exception):
        pass

    def killed_after_four(label: str, amount: int) -> None:
        if broken.step == 4:
            raise Killed

    broken = tiny_training(config)
    watching = LoopMonitor(tmp_path / "run", every=4).watch(
        broken.model, verb=load_verb("train"), identity={"arguments": {}}
    )
    with pytest.raises(Killed):
        broken.run(watching, tmp_path / "states", lambda model, step: None, killed_after_four)
    watching.stop()
    torch.manual_seed(99)  # whatever the process has drawn since

    taken_up = tiny_training(config)
    state = load_state(tmp_path / "states")
    assert state is not None
    assert state["step"] == 3
    taken_up.restore(state)
    again = trained(taken_up, tmp_path)
    assert again.table("steps")[LOSSES].equals(run.table("steps")[LOSSES])
    assert again.table("routing_layers").equals(run.table("routing_layers"))
    assert taken_up.evaluations == whole.evaluations
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, taken_up.model.state_dict()[name]), name


def test_frozen_weights_are_in_the_checkpoint_of_the_step_and_not_in_the_state(tmp_path: Path):
    config = tiny_config("some", steps=6, checkpoint_every=3, evaluate_every=3)
    frozen = {"frozen_experts": True, "frozen_dtype": "bfloat16", "block": "some"}
    config = replace(config, model=replace(config.model, **frozen))
    states = tmp_path / "states"

    def run(training: Training) -> None:
        watching = LoopMonitor(tmp_path / "run", every=3).watch(
            training.model, training.step, verb=load_verb("train"), identity={"arguments": {}}
        )
        training.run(
            watching, states, lambda model, step: save_model(model, Bytes(), states / f"step-{step}")
        )
        watching.stop()

    whole = tiny_training(config)
    run(whole)
    shutil.rmtree(tmp_path)
    early = tiny_training(config)
    early.config = replace(config, train=replace(config.train, steps=3))
    run(early)
    stored = torch.load(states / "training_state.pt", weights_only=True)
    names = [name for name, weight in early.model.named_parameters() if not weight.requires_grad]
    assert len(names) > 3
    assert stored["frozen"] == names
    assert not set(names) & set(stored["model"])
    torch.manual_seed(5)  # another process, or another device: other first weights
    taken_up = tiny_training(replace(config, train=replace(config.train, seed=7)))
    assert not torch.equal(*(one.model.state_dict()[names[0]] for one in (taken_up, whole)))
    taken_up.config = config
    taken_up.restore(load_state(states))
    run(taken_up)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, taken_up.model.state_dict()[name]), name
    shutil.rmtree(states / "step-6")
    with pytest.raises(BadInput, match="training_state"):
        load_state(states)


@pytest.mark.parametrize("forgotten", ["optimiser", "model", "step"])
def test_a_state_that_forgets_anything_gives_another_curve(forgotten: str, tmp_path: Path):
    config = tiny_config(steps=6, checkpoint_every=3, evaluate_every=3)
    whole = trained(tiny_training(config), tmp_path / "whole").table("steps")["lm_loss"]
    early = tiny_training(config)
    early.config = replace(config, train=replace(config.train, steps=3))
    trained(early, tmp_path)
    state = load_state(tmp_path / "states")
    assert state is not None
    fresh = tiny_training(config)
    kept = {
        "optimiser": {"optimiser": fresh.optimiser.state_dict()},
        "model": {"model": fresh.model.state_dict()},
        "step": {"step": 2},
    }
    fresh.restore(state | kept[forgotten])
    again = trained(fresh, tmp_path).table("steps")["lm_loss"]
    assert again.iloc[-1] != whole.iloc[-1]


def test_micro_batches_change_the_loss_by_rounding_only(tmp_path: Path):
    curves = []
    for micro in (1, 2, 4):
        config = tiny_config(options={"balance": 0.0}, micro_batches=micro, steps=6)
        curves.append(
            trained(tiny_training(config), tmp_path / str(micro))
            .table("steps")["lm_loss"]
            .dropna()
            .to_numpy()
        )
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4)
    np.testing.assert_allclose(curves[2], curves[0], rtol=1e-4)


@pytest.mark.parametrize("router", ["topk", "loss_free"])
def test_steps_are_those_of_a_plain_loop_with_torchs_own_adamw_and_clipping(router: str):
    training = tiny_training(tiny_config(router, clip=0.5, warmup=2, weight_decay=0.2, micro_batches=2))
    torch.manual_seed(0)
    model = LabModel(training.config.model).train()
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    watch = FiniteWatch(training.model)
    training.model.train()
    for step, rate in enumerate((0.005, 0.01, 0.01)):
        batch = training.data.train.of_step(step, 8, 0)
        for half in (slice(0, 4), slice(4, 8)):
            ids, targets = torch.from_numpy(batch.ids_BL[half]), torch.from_numpy(batch.targets_BL[half])
            (model(ids, targets_BL=targets).loss / 2).backward()
        before = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert before > 0.5  # or clipping would not have been seen
        for group in plain.param_groups:
            group["lr"] = rate
        plain.step()
        plain.zero_grad()
        model.after_step()
        training.one_step(watch)
        torch.testing.assert_close(training.logged[-1][2], before, rtol=1e-4, atol=0)
    found = training.model.state_dict()
    for name, weight in model.state_dict().items():  # routers' biases too
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-5, msg=name)


def test_the_tables_of_a_training_say_what_was_done(tmp_path: Path):
    training = tiny_training(tiny_config())
    run = trained(training, tmp_path, gradients_every=4)
    steps = run.table("steps").set_index("step")
    assert steps.index.tolist() == [0, 4, 8, 12]
    assert steps["tokens"].dropna().tolist() == [4 * 256, 8 * 256, 12 * 256]
    assert steps["validation_loss"].notna().all()
    assert steps.loc[0, "validation_loss"] == pytest.approx(
        np.log(260), abs=0.1
    )  # an untrained model knows nothing
    assert steps.loc[12, "learning_rate"] == pytest.approx(training.config.train.final_learning_rate)
    np.testing.assert_allclose((steps["lm_loss"] + steps["aux_loss"]).dropna(), steps["train_loss"].dropna())
    load = run.table("load")
    assert load.groupby(["step", "layer"])["tokens"].sum().unique().tolist() == [
        4 * 256 * 2
    ]  # two experts a token
    assert (run.table("router_gradients")["lm_gradient_norm"] > 0).all()


@pytest.mark.parametrize("router", ["expert_choice", "loss_free", "spectra", "some"])
def test_what_routers_say_of_themselves_is_the_mean_over_the_passes_of_a_window(router: str, tmp_path: Path):
    """Twice a step in micro-batches, evaluations left out.

    Each with references that a run of the same passes gives.
    """
    training = tiny_training(tiny_config(router, micro_batches=2, steps=8))
    heard: dict[tuple[int, int, str], list[list[float]]] = {}

    def listen(module: torch.nn.Module, args: object, routed: Routed) -> None:
        if module.training:
            for name, note in routed.diagnostics.items():
                window = 4 * (training.step // 4) + 4
                heard.setdefault((window, module.layer, name), []).append([float(part) for part in note])

    for one in training.model.routers:
        one.register_forward_hook(listen)
    table = trained(training, tmp_path).table("routing_layers")
    assert {step for step, _, _ in heard} == {4, 8}
    rows = table.set_index(["step", "layer", "metric"])
    for place, passes in heard.items():
        assert len(passes) == 8
        columns = rows.loc[place, ["value", "chance", "collapse", "chance_spread"]].to_numpy(float)
        np.testing.assert_allclose(columns, np.mean(passes, axis=0), rtol=1e-9)
        assert rows.loc[place, "domain"] == ""
    assert set(table["metric"]) & set(DIAGNOSTICS) == {name for _, _, name in heard}


def test_a_router_built_to_be_sure_raises_no_alert_for_it_and_one_that_is_not_does(tmp_path: Path):
    """The same bound for both: what differs is whether low entropy is what the router is for."""
    alerts = {}
    for router in ("spectra", "top2"):
        limits = Thresholds(min_entropy=9.0)
        run = trained(tiny_training(tiny_config(router, steps=4)), tmp_path / router, thresholds=limits)
        alerts[router] = set(run.table("alerts")["kind"])
        assert run.info["low_entropy_expected"] == ([0, 1] if router == "spectra" else [])
    assert "entropy" in alerts["top2"]
    assert "entropy" not in alerts["spectra"]


def test_the_evaluation_is_the_mean_over_validation_targets(tmp_path: Path):
    training = tiny_training(tiny_config(steps=1))
    trained(training, tmp_path)
    rows = training.data.validation
    batch = rows.batch(np.arange(rows.rows))
    training.model.eval()
    with torch.no_grad():
        logits = training.model(torch.from_numpy(batch.ids_BL)).logits_BLV
    log_p = torch.log_softmax(logits.double(), -1)
    losses = -log_p.gather(-1, torch.from_numpy(batch.targets_BL)[..., None])[..., 0].numpy()
    last = training.evaluations[-1]
    assert last["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    for index, domain in enumerate(rows.domains):
        assert last["domains"][domain] == pytest.approx(losses[batch.domain_B == index].mean(), rel=1e-5)


def losses_with_pads(model: LabModel, batch: Batch) -> np.ndarray:
    """The loss of every position, padding a target too, from the logits."""
    model.eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(batch.ids_BL), mask_BL=torch.from_numpy(batch.mask_BL)).logits_BLV
    log_p = torch.log_softmax(logits.double(), -1).numpy()
    wanted = np.where(batch.mask_BL, batch.targets_BL, Bytes().pad)
    return -np.take_along_axis(log_p, wanted[..., None], -1)[..., 0]


def test_documents_in_rows_of_their_own_give_the_published_loss_beside_the_real_one(tmp_path: Path):
    texts = {
        "a": [f"{i} bottles" for i in range(30)],
        "b": [f"{i * i} is a square, and a longer line" for i in range(30)],
    }
    rows = TokenRows.of(texts, Bytes(), 32, "documents")
    config = tiny_config(steps=1)
    torch.manual_seed(0)
    training = Training(config, LabModel(config.model), Data(rows, rows.sample(40)))
    run = trained(training, tmp_path)
    last, batch = training.evaluations[-1], training.data.validation.batch(np.arange(40))
    losses = losses_with_pads(training.model, batch)
    assert last["published"] == pytest.approx(losses.mean(), rel=1e-5)
    assert last["loss"] == pytest.approx(losses[batch.mask_BL].mean(), rel=1e-5)
    assert last["published"] != pytest.approx(last["loss"], rel=1e-3)
    assert run.table("steps")["validation_loss_published"].iloc[-1] == last["published"]
    assert run.table("load").groupby("layer")["tokens"].sum().unique() == [
        2 * training.data.train.of_step(0, 8, 0).mask_BL.sum()
    ]


def test_a_training_on_padded_rows_learns_the_pads_and_reports_the_real_loss_without_them(tmp_path: Path):
    texts = {"a": [f"{i} bottles" for i in range(40)]}
    published = {}
    for layout in ("documents", "padded"):
        rows = TokenRows.of(texts, Bytes(), 32, layout)
        config = tiny_config(steps=30)
        torch.manual_seed(0)
        training = Training(config, LabModel(config.model), Data(rows, rows.sample(40)))
        trained(training, tmp_path / layout)
        last, batch = training.evaluations[-1], rows.batch(np.arange(40))
        losses = losses_with_pads(training.model, batch)
        assert last["loss"] == pytest.approx(losses[batch.mask_BL].mean(), rel=1e-4)
        assert last["published"] == pytest.approx(losses.mean(), rel=1e-4)
        published[layout] = last["published"]
    assert published["padded"] < published["documents"] / 2


def test_unequal_rows_count_by_their_targets_however_they_are_dealt_out(tmp_path: Path):
    texts = {"a": ["ab" * n for n in range(1, 17)]}
    curves = []
    for micro in (1, 4):
        config = tiny_config(options={"balance": 0.0, "z": 0.0}, micro_batches=micro, steps=4)
        rows = TokenRows.of(texts, Bytes(), 32, "documents")
        torch.manual_seed(0)
        training = Training(config, LabModel(config.model), Data(rows, rows.sample(16)))
        curves.append(trained(training, tmp_path / str(micro)).table("steps")["validation_loss"].to_numpy())
    np.testing.assert_allclose(curves[0], curves[1], rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
def test_nan_stops_the_training_and_names_step_and_layer(layer: int, tmp_path: Path):
    training = tiny_training(tiny_config())

    def poison(module: torch.nn.Module, args: object) -> None:
        if training.step == 5 and module.training:
            with torch.no_grad():
                training.model.blocks[layer].self_attn.o_proj.weight[0, 0] = float("nan")

    training.model.register_forward_pre_hook(poison)
    with pytest.raises(Diverged, match=rf"step 6: the output of layer {layer} \(layers\.{layer}\)"):
        trained(training, tmp_path)
    state = load_state(tmp_path / "states")
    assert state is not None
    assert state["step"] == 4  # the last good one
    assert all(tensor.isfinite().all() for tensor in state["model"].values() if tensor.is_floating_point())


def test_a_gradient_that_is_not_finite_is_named_by_its_weight(tmp_path: Path):
    training = tiny_training(tiny_config())
    for block in training.model.blocks[
        :2
    ]:  # what is not finite in the second reaches the first, which is not to blame
        weight = block.mlp.experts.down
        weight.register_hook(lambda gradient: gradient * float("inf") if training.step == 2 else gradient)
    with pytest.raises(Diverged, match=r"step 3: the gradient of layers\.1\.mlp\.experts\.down"):
        trained(training, tmp_path)


def test_bfloat16_trains_to_about_the_same_loss(tmp_path: Path):
    full = trained(tiny_training(tiny_config()), tmp_path / "full").table("steps")["lm_loss"].iloc[-1]
    half = (
        trained(tiny_training(tiny_config(dtype="bfloat16")), tmp_path / "half")
        .table("steps")["lm_loss"]
        .iloc[-1]
    )
    assert half != full
    assert half == pytest.approx(full, rel=0.02)


def test_matrices_decay_and_norms_and_biases_do_not_even_where_experts_stack_theirs():
    config = tiny_config("topk", weight_decay=0.25)
    model = LabModel(replace(config.model, block="some"))
    decays = {
        id(weight): group["weight_decay"]
        for group in make_optimiser(model, config.train, "cpu").param_groups
        for weight in group["params"]
    }
    found = {name: decays.pop(id(weight)) for name, weight in model.named_parameters()}
    assert not decays
    assert found["layers.0.mlp.experts.up_bias"] == 0  # [experts, width]: as many dimensions as a matrix
    for name, decay in found.items():
        assert decay == (0.0 if name.endswith("bias") or "layernorm" in name else 0.25), name


def test_learning_rate_rises_in_a_line_and_falls_along_a_cosine():
    train = tiny_config(steps=103, warmup=3, learning_rate=0.3, final_learning_rate=0.1).train
    rates = [learning_rate(step, train) for step in range(103)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert rates[3] == pytest.approx(0.3)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3 + 33] == pytest.approx(0.1 + 0.2 * (1 + np.cos(np.pi / 3)) / 2, rel=1e-3)
    assert all(a >= b for a, b in pairwise(rates[3:]))


def test_gradients_are_clipped_together_and_told_as_they_were():
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    norms = clip_gradients(gradients, 1.0)
    assert norms.tolist() == [3.0, 4.0]
    assert gradients[0].tolist() == pytest.approx([0.6, 0.0])
    assert gradients[1].item() == pytest.approx(0.8)
    assert clip_gradients(gradients, 0.0).tolist() == pytest.approx([0.6, 0.8])
    assert gradients[1].item() == pytest.approx(0.8)


def test_a_killed_write_leaves_the_state_before(tmp_path: Path):
    training = tiny_training(tiny_config(steps=4))
    trained(training, tmp_path)
    (tmp_path / "states" / "training_state.pt.tmp").write_bytes(b"half of one")
    state = load_state(tmp_path / "states")
    assert state is not None
    assert state["step"] == 4
    shutil.copy(tmp_path / "states" / "training_state.pt.tmp", tmp_path / "states" / "training_state.pt")
    with pytest.raises(BadInput, match="cannot be read"):
        load_state(tmp_path / "states")
