"""The pull of each loss on each router equals what autograd gives for that loss alone.

And shows a starved router.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moescope.routing.monitor import LoopMonitor
from routing.tiny_training import batch, documents, model_of


def measured(folder, model, rows, micro: int = 1, **settings):
    monitor = LoopMonitor(folder, every=1, gradients_every=1, **settings).watch(model)
    for part in range(micro):
        size = len(rows) // micro
        (model(**batch(rows[part * size : (part + 1) * size])).loss / micro).backward()
    monitor.step()
    return monitor.close().table("router_gradients")


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_norms_are_those_of_each_loss_differentiated_alone(tmp_path, kind):
    def strong(kind: str):
        model = model_of(kind)
        model.router_aux_loss_coef = model.config.router_aux_loss_coef = (
            2.0  # so that neither loss hides the other
        )
        return model

    table = measured(tmp_path / "run", strong(kind), documents(4))
    for column, alone in (("lm_gradient_norm", False), ("aux_gradient_norm", True)):
        model = strong(kind)
        output = model(**batch(documents(4)))
        logits = output.logits[:, :-1].flatten(0, 1).float()  # the usual shifted cross-entropy, by hand
        loss = torch.nn.functional.cross_entropy(logits, batch(documents(4))["labels"][:, 1:].flatten())
        (model.config.router_aux_loss_coef * output.aux_loss if alone else loss).backward()
        norms = [
            layer.mlp.gate.weight.grad.norm().item()
            for layer in model.model.layers
            if hasattr(layer.mlp, "gate")
        ]
        np.testing.assert_allclose(table[column], norms, rtol=1e-3)


def test_micro_batches_average_to_the_whole_batch(tmp_path):
    rows = [row for row in documents(20) if int(row["attention_mask"].sum()) == 12]
    assert len(rows) == 4  # of one length, so that each half weighs the same
    whole, halves = (measured(tmp_path / str(n), model_of(), rows, micro=n) for n in (1, 2))
    np.testing.assert_allclose(whole["lm_gradient_norm"], halves["lm_gradient_norm"], rtol=1e-4)


def test_a_renormalised_top_1_gate_starves_the_router_of_the_text_but_not_of_the_auxiliary_loss(tmp_path):
    model = model_of()
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1  # Mixtral divides the chosen gates by their sum, which is then 1
    model.num_experts_per_tok = 1
    table = measured(tmp_path / "run", model, documents(4))
    assert (table["lm_gradient_norm"] < 1e-6).all()
    assert (table["aux_gradient_norm"] > 1e-6).all()
    assert (measured(tmp_path / "two", model_of(), documents(4))["lm_gradient_norm"] > 1e-3).all()


def test_a_model_without_auxiliary_loss_has_none_not_zero(tmp_path):
    model = model_of()
    model.config.output_router_logits = False
    table = measured(tmp_path / "run", model, documents(4))
    assert table["aux_gradient_norm"].isna().all()
    assert (table["lm_gradient_norm"] > 0).all()


def test_only_sampled_steps_are_measured_and_training_gradients_are_untouched(tmp_path):
    model, plain = model_of(), model_of()
    monitor = LoopMonitor(tmp_path / "run", every=6, gradients_every=3).watch(model)
    for _ in range(6):
        model(**batch(documents(4))).loss.backward()
        plain(**batch(documents(4))).loss.backward()
        monitor.step()
    assert monitor.close().table("router_gradients")["step"].unique().tolist() == [3, 6]
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_a_loop_with_losses_of_its_own_hands_them_over(tmp_path):
    model = model_of()
    monitor = LoopMonitor(tmp_path / "run", every=1, gradients_every=1).watch(model)
    rows = batch(documents(4))
    output = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
    loss = output.logits.square().mean()
    monitor.measure_gradients(loss, 0.5 * output.aux_loss)
    loss.backward()
    expected = [layer.mlp.gate.weight.grad.norm().item() for layer in model.model.layers]
    monitor.step()
    table = monitor.close().table("router_gradients")
    np.testing.assert_allclose(table["lm_gradient_norm"], expected, rtol=1e-5)
    assert table["aux_gradient_norm"].notna().all()


def test_where_gradients_cannot_be_taken_it_is_said_and_training_goes_on(tmp_path, caplog):
    model = model_of()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    table = measured(tmp_path / "run", model, documents(4))
    assert table.empty
    assert "router gradients cannot be measured here" in caplog.text
    assert model.model.layers[0].mlp.gate.weight.grad is not None


def test_frozen_routers_have_no_gradient(tmp_path):
    model = model_of()
    model.model.layers[1].mlp.gate.weight.requires_grad_(False)
    table = measured(tmp_path / "run", model, documents(4)).set_index("layer")
    assert np.isnan(table.loc[1, "lm_gradient_norm"])
    assert table.loc[[0, 2], "lm_gradient_norm"].notna().all()
