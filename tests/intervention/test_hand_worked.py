"""Every intervention against the same block computed in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from torch import Tensor

import moescope
from decoder.tiny_lab import run as run_lab
from decoder.tiny_lab import text as token_ids
from decoder.tiny_lab import tiny, trained
from families.tiny_models import own_experts, tiny_model
from intervention.edited_models import blocks_of, logits_of, model_named
from moescope.decoder.routers import ROUTERS
from moescope.errors import BadInput
from moescope.execution.adapters import Block, RouterReads
from moescope.intervention.changes import (
    INTERVENTIONS,
    Change,
    carried_out,
    changed,
    check_changes,
    parse_change,
)
from moescope.intervention.editing import Edit
from moescope.intervention.kinds import MeanOutputs

GOLDEN = Path(__file__).parents[1] / "golden"


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


class Mixed:
    """Mixtral's block in numpy: softmax, the two best, gates divided by their sum."""

    def __init__(self, tokens: int = 24) -> None:
        self.tiny = tiny_model("mixtral")
        self.blocks = blocks_of(self.tiny.model)
        self.block = self.blocks[0]
        self.x = torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(3))
        self.x_TD = self.x[0].double().numpy()
        self.rows = self.block.weight_ED.detach().double().numpy()
        self.experts = [self.own(layer) for layer in (0, 1)]

    def own(self, layer: int) -> dict[str, np.ndarray]:
        parts = own_experts(self.blocks[layer].experts)
        return {part: tensor.double().numpy() for part, tensor in parts.items()}

    def output(self, expert: int, layer: int = 0) -> np.ndarray:
        gate, up = (self.x_TD @ self.experts[layer][part][expert].T for part in ("gate", "up"))
        return (gate / (1 + np.exp(-gate)) * up) @ self.experts[layer]["down"][expert].T

    def directions(self, expert: int, k: int, view: str = "gate") -> np.ndarray:
        """[D, k] the leading right singular vectors, by LAPACK."""
        own = self.experts[0]
        matrix = (
            own[view][expert]
            if view != "gate_up"
            else np.concatenate(
                [own[part][expert] / np.linalg.norm(own[part][expert]) for part in ("gate", "up")]
            )
        )
        return np.linalg.svd(matrix, full_matrices=False)[2][:k].T

    def choice(self, logits: np.ndarray, top_k: int = 2) -> tuple[np.ndarray, np.ndarray]:
        scores = softmax(logits)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        gates = np.take_along_axis(scores, best, 1)
        return best, gates / gates.sum(1, keepdims=True)

    def mix(
        self, logits: np.ndarray, outputs: dict[int, np.ndarray] | None = None, top_k: int = 2
    ) -> np.ndarray:
        best, gates = self.choice(logits, top_k)
        each = {expert: self.output(expert) for expert in range(4)} | (outputs or {})
        total = np.zeros_like(self.x_TD)
        for token in range(len(best)):
            for expert, gate in zip(best[token], gates[token], strict=True):
                total[token] += gate * each[expert][token]
        return total

    def logits(self, rows: np.ndarray | None = None) -> np.ndarray:
        return self.x_TD @ (self.rows if rows is None else rows).T

    def under(self, *texts: str, **more) -> np.ndarray:
        """The running block's output with these changes."""
        with (
            changed(self.blocks, [parse_change(f"layer=0 {text}") for text in texts], **more),
            torch.no_grad(),
        ):
            return self.block.module(self.x)[0].double().numpy()

    def decided(self, *texts: str, **more) -> tuple[np.ndarray, np.ndarray]:
        """The running block's choices and gates with these changes."""
        return decided(self.block, self.x, [f"layer=0 {text}" for text in texts], **more)


def decided(block: Block, x: Tensor, texts: list[str], **more) -> tuple[np.ndarray, np.ndarray]:
    seen = []
    with (
        changed({block.layer: block}, [parse_change(text) for text in texts], **more),
        carried_out({0: Edit(block, see=lambda block, decision: seen.append(decision))}),
        torch.no_grad(),
    ):
        block.module(x)
    return seen[0].chosen_TK.numpy(), seen[0].gates_TK.double().numpy()


@pytest.fixture
def case() -> Mixed:
    return Mixed()


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=3e-4, atol=3e-4)


def test_every_intervention_has_a_hand_worked_case():
    text = Path(__file__).read_text(encoding="utf-8")
    assert not [record.name for record in INTERVENTIONS if f"def test_{record.name}" not in text]


# --- experts


def test_ablate_removes_one_term_and_leaves_the_other_gates(case):
    close(case.under("expert=3 ablate"), case.mix(case.logits(), {3: np.zeros_like(case.x_TD)}))


def test_mean_puts_a_constant_times_the_gate_in_place_of_the_output(case):
    mean = np.linspace(-1, 1, 16)
    expected = case.mix(case.logits(), {3: np.tile(mean, (len(case.x_TD), 1))})
    close(case.under("expert=3 mean", means={(0, 3): torch.tensor(mean)}), expected)


def test_mean_outputs_are_means_over_the_tokens_that_choose_the_expert(case):
    outputs = MeanOutputs([(0, 3), (0, 1)])
    with carried_out({0: Edit(case.block, see=outputs.see)}), torch.no_grad():
        case.block.module(case.x)
    chosen = case.choice(case.logits())[0]
    for expert in (3, 1):
        close(outputs.means[0, expert].numpy(), case.output(expert)[(chosen == expert).any(1)].mean(0))


def test_mean_is_calibrated_on_the_text_given_and_needs_some():
    for name in ("mixtral", "llama4_text", "lab top2"):
        model = model_named(name)
        ids = torch.arange(3, 40)
        plain = logits_of(model)
        with moescope.modified(model, "layer=2 expert=0,1 mean", text=[ids, ids.flip(0)]):
            assert not torch.equal(logits_of(model), plain)
        missing = pytest.raises(BadInput, match="no output of expert 0 of layer 2 to average")
        with missing, moescope.modified(model, "layer=2 expert=0 mean"):
            pass


def test_swap_lets_each_expert_run_for_the_row_of_the_other(case):
    expected = case.mix(case.logits(), {1: case.output(2), 2: case.output(1)})
    close(case.under("expert=1,2 swap"), expected)


@pytest.mark.parametrize("name", ["mixtral", "llama4_text", "switch_transformers", "qwen3_moe", "lab top2"])
def test_swap_with_the_rows_permuted_alike_changes_nothing_but_rounding(name):
    model = model_named(name)
    n_experts = next(iter(blocks_of(model).values())).n_experts
    order = ",".join(map(str, [0, 2, 1, *range(3, n_experts)]))
    plain = logits_of(model)
    with moescope.modified(model, "expert=1,2 swap", f"permute_rows order={order}"):
        torch.testing.assert_close(logits_of(model), plain, rtol=1e-4, atol=1e-4)
    with moescope.modified(model, "expert=1,2 swap"):
        assert not torch.allclose(logits_of(model), plain, rtol=1e-2, atol=1e-2)


def test_transplant_takes_weights_of_another_expert_or_layer_and_rows(case):
    close(case.under("expert=1 transplant from_expert=2"), case.mix(case.logits(), {1: case.output(2)}))
    other_layer = case.mix(case.logits(), {1: case.output(3, layer=1)})
    close(case.under("expert=1 transplant from_layer=1 from_expert=3"), other_layer)
    rows = case.rows.copy()
    rows[1] = case.blocks[1].weight_ED[3].detach().double().numpy()
    close(case.under("expert=1 transplant part=row from_layer=1 from_expert=3"), case.mix(case.logits(rows)))
    both = case.mix(case.logits(rows), {1: case.output(3, layer=1)})
    close(case.under("expert=1 transplant part=both from_layer=1 from_expert=3"), both)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4_text", "dbrx", "switch_transformers"])
def test_transplant_from_a_checkpoint_of_the_same_weights_changes_no_bit(kind, tmp_path):
    whole = tiny_model(kind)
    whole.save(tmp_path / "a", "saved")
    before = logits_of(whole.model)
    with moescope.modified(whole.model, f"expert=0-3 transplant part=both checkpoint={tmp_path / 'a'}"):
        assert torch.equal(logits_of(whole.model), before)
    own = own_experts(whole.blocks[0].experts)["down"]
    with torch.no_grad():
        if kind != "switch_transformers":
            own[1] += 1
    if kind != "switch_transformers":
        assert not torch.equal(logits_of(whole.model), before)
        with moescope.modified(whole.model, f"expert=1 transplant checkpoint={tmp_path / 'a'}"):
            assert torch.equal(logits_of(whole.model), before)


# --- logits and choice


def test_skip_takes_the_next_choice_with_gates_that_sum_to_one(case):
    logits = case.logits()
    logits[:, 3] = -np.inf
    close(case.under("expert=3 skip"), case.mix(logits))


def test_force_puts_the_expert_just_above_the_best_or_just_below_the_worst(case):
    plain = case.logits()
    for text, edge in (("expert=3 force", plain.max(1)), ("expert=3 force off", plain.min(1))):
        logits = plain.copy()
        logits[:, 3] = edge + (1e-6 if "off" not in text else -1e-6)
        chosen, gates = case.decided(text)
        best, expected = case.choice(logits)
        assert np.array_equal(np.sort(chosen), np.sort(best))
        np.testing.assert_allclose(np.sort(gates), np.sort(expected), atol=0.005)  # just: 1 % in odds
        assert ((chosen == 3).any(1).all()) if "off" not in text else not (chosen == 3).any()


def test_bias_shifts_the_logit_and_gates_follow(case):
    close(case.under("expert=0,2 bias by=0.7"), case.mix(case.logits() + np.array([0.7, 0, 0.7, 0])))


def sigmoid_choice(x: Tensor, block: Block, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """DeepSeek V3's choice in numpy: sigmoid, a bias for choosing, gates divided by their sum, scaled."""
    scores = 1 / (1 + np.exp(-(x[0].double().numpy() @ block.weight_ED.detach().double().numpy().T)))
    bias = block.router.e_score_correction_bias.double().numpy() + shift
    best = np.sort(np.argsort(-(scores + bias), axis=1)[:, :2])
    gates = np.take_along_axis(scores, best, 1)
    return best, gates / gates.sum(1, keepdims=True) * block.router.routed_scaling_factor


@pytest.mark.parametrize(
    ("text", "shift"), [("bias by=0.4", 0.4), ("bias by=-0.4", -0.4), ("force", 99.0), ("force off", -99.0)]
)
def test_bias_and_force_leave_gates_where_the_model_has_a_bias_for_choosing(text, shift):
    block = next(iter(blocks_of(tiny_model("deepseek_v3").model).values()))
    x = Mixed().x
    chosen, gates = decided(block, x, [f"expert=1 {text}"])
    best, expected = sigmoid_choice(x, block, np.array([0, shift, 0, 0]))
    assert not np.array_equal(best, sigmoid_choice(x, block, np.zeros(4))[0])
    order = np.argsort(chosen, axis=1)
    assert np.array_equal(np.take_along_axis(chosen, order, 1), best)
    np.testing.assert_allclose(np.take_along_axis(gates, order, 1), expected, rtol=1e-4)


def test_skip_masks_an_expert_that_its_bias_for_choosing_favours():
    block = next(iter(blocks_of(tiny_model("deepseek_v3").model).values()))
    model = trained(tiny("loss_free"), steps=1).eval()
    with torch.no_grad():
        block.router.e_score_correction_bias[1] = 5
        model.blocks[0].mlp.router.bias_E[1] = 5
    x, ids = Mixed().x, token_ids(2, 12)
    assert (decided(block, x, [])[0] == 1).any(1).all()
    assert not (decided(block, x, ["expert=1 skip"])[0] == 1).any()
    assert (run_lab(model, ids).layers[0].chosen_TK == 1).any(1).all()
    with moescope.modified(model, "expert=1 skip"):
        assert not (run_lab(model, ids).layers[0].chosen_TK == 1).any()


def test_temperature_divides_the_logits(case):
    close(case.under("temperature t=2.5"), case.mix(case.logits() / 2.5))


@pytest.mark.parametrize("k", [1, 3, 4])
def test_top_k_uses_the_gate_rule_of_the_model(case, k):
    close(case.under(f"top_k k={k}"), case.mix(case.logits(), top_k=k))
    block = blocks_of(model_named("olmoe"))[0]  # gates are probabilities, not divided by their sum
    scores = softmax(case.x_TD @ block.weight_ED.detach().double().numpy().T)
    _, gates = decided(block, case.x, [f"layer=0 top_k k={k}"])
    np.testing.assert_allclose(np.sort(gates), np.sort(scores)[:, -k:], rtol=1e-4)


def test_top_k_of_a_lab_router_keeps_the_rule_that_it_was_trained_with():
    for router, sums in (("top2", True), ("loss_free", True), ("switch_top1", False)):
        model = trained(tiny(router)).eval()
        for k in (1, 3):
            with moescope.modified(model, f"top_k k={k}"):
                layer = run_lab(model, token_ids(2, 12)).layers[0]
            assert layer.chosen_TK.shape[1] == k
            total = layer.gates_TK.sum(-1)
            assert torch.allclose(total, torch.ones(24)) == sums
            best = layer.selection_TE.topk(k, dim=-1).indices
            assert torch.equal(best.sort(-1).values, layer.chosen_TK.sort(-1).values)


def test_uniform_router_draws_experts_evenly_and_keeps_the_gates():
    case = Mixed(tokens=4000)
    case.x += 2 * case.block.weight_ED[0].detach()  # tokens that prefer expert 0
    case.x_TD = case.x[0].double().numpy()
    chosen, gates = case.decided("uniform_router")
    best, before = case.choice(case.logits())
    np.testing.assert_allclose(np.sort(gates), np.sort(before), rtol=1e-3, atol=1e-5)
    counts = np.bincount(chosen.ravel(), minlength=4)
    # each token takes an expert with probability 1/2: four binomial counts
    assert stats.binomtest(int(counts[0]), 4000, 0.5).pvalue > 1e-4
    assert np.abs(counts - 2000).max() < 4.5 * np.sqrt(1000)
    assert np.abs(np.bincount(best.ravel(), minlength=4) - 2000).max() > 500
    together = np.corrcoef((chosen == 0).any(1), (best == 0).any(1))[0, 1]
    assert abs(together) < 4.5 / np.sqrt(4000)  # nothing of the router's own choice is left
    again, other = case.decided("uniform_router")[0], case.decided("uniform_router", seed=1)[0]
    assert np.array_equal(chosen, again)
    assert not np.array_equal(chosen, other)


@pytest.mark.parametrize("name", ["deepseek_v3", "lab loss_free", "lab spectra", "lab some"])
def test_uniform_router_ignores_a_bias_for_choosing(name):
    block = next(iter(blocks_of(model_named(name)).values()))
    width, generator = 16 if name == "deepseek_v3" else 32, torch.Generator().manual_seed(0)
    n, x_TD = block.n_experts, torch.randn(1, 3000, width, generator=generator)
    if block.hands_out:
        with changed({block.layer: block}, [Change("uniform_router")]):
            chosen = block.decide_alone(RouterReads(x_TD[0])).decision.chosen_TK.numpy()
    else:
        chosen = decided(block, x_TD, ["uniform_router"])[0]
    counts, p = np.bincount(chosen.ravel(), minlength=n), 2 / n
    assert np.abs(counts - 3000 * p).max() < 4.5 * np.sqrt(3000 * p * (1 - p))


# --- rows


def projected(row: np.ndarray, basis: np.ndarray) -> np.ndarray:
    return basis @ (basis.T @ row)


@pytest.mark.parametrize("view", ["gate", "up", "gate_up"])
@pytest.mark.parametrize("strength", [1, 10])
def test_project_out_subtracts_the_component_in_the_experts_leading_directions(case, view, strength):
    rows = np.stack(
        [
            row - strength * projected(row, case.directions(expert, 3, view))
            for expert, row in enumerate(case.rows)
        ]
    )
    ours = case.under(f"project_out k=3 strength={strength} view={view}")
    close(ours, case.mix(case.logits(rows)))
    norms = np.linalg.norm(case.rows, axis=1) / np.linalg.norm(rows, axis=1)
    restored = case.under(f"project_out k=3 strength={strength} view={view} restore_norm")
    close(restored, case.mix(case.logits(rows * norms[:, None])))
    alone = case.rows.copy()
    alone[2] = rows[2]
    close(
        case.under(f"expert=2 project_out k=3 strength={strength} view={view}"), case.mix(case.logits(alone))
    )


def test_project_onto_keeps_that_component_alone(case):
    rows = [projected(row, case.directions(expert, 2)) for expert, row in enumerate(case.rows)]
    close(case.under("project_onto k=2"), case.mix(case.logits(np.stack(rows))))


def test_other_expert_uses_the_directions_of_the_next(case):
    rows = [row - 10 * projected(row, case.directions((i + 3) % 4, 2)) for i, row in enumerate(case.rows)]
    close(case.under("other_expert k=2 strength=10 step=3"), case.mix(case.logits(np.stack(rows))))


def changed_rows(case: Mixed, text: str, seed: int = 0) -> np.ndarray:
    """The rows that the running router multiplies with: its logits for unit vectors."""
    seen = []
    hook = case.block.router.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    try:
        with changed(case.blocks, [parse_change(f"layer=0 {text}")], seed=seed), torch.no_grad():
            case.block.module(torch.eye(16)[None])
    finally:
        hook.remove()
    return seen[0].double().numpy().T


def test_random_direction_of_equal_rank_removes_k_of_d_on_average_and_of_equal_change_as_much(case):
    norms = np.linalg.norm(case.rows, axis=1)
    removed = []
    for draw in range(40):
        rows = changed_rows(case, f"random_direction k=3 draw={draw}")
        # the rest is orthogonal to what was removed, as for any projection
        np.testing.assert_allclose(((case.rows - rows) * rows).sum(1), 0, atol=1e-5)
        removed.append((np.linalg.norm(case.rows - rows, axis=1) / norms) ** 2)
    shares = np.array(removed).mean(1)  # of four rows each, Beta(k/2, (d-k)/2): mean k/d
    assert abs(shares.mean() - 3 / 16) < 4 * shares.std() / np.sqrt(40)
    for strength in (1, 10):
        own = changed_rows(case, f"project_out k=3 strength={strength}") - case.rows
        for draw in range(3):
            text = f"random_direction k=3 strength={strength} match=change draw={draw}"
            rows = changed_rows(case, text)
            lengths = np.linalg.norm(rows - case.rows, axis=1)
            np.testing.assert_allclose(lengths, np.linalg.norm(own, axis=1), rtol=1e-4)
    other_draw = changed_rows(case, "random_direction k=3 draw=1")
    assert not np.allclose(changed_rows(case, "random_direction k=3"), other_draw)
    assert not np.allclose(changed_rows(case, "random_direction k=3", seed=1), other_draw)


def test_replace_is_a_signed_sum_of_directions_orthogonal_to_the_rows_before(case):
    units: list[np.ndarray] = []
    for expert, row in enumerate(case.rows):
        basis = case.directions(expert, 3)
        unit = basis @ (np.sign(basis.T @ row) / np.arange(1, 4))
        units.append(unit / np.linalg.norm(unit))
    q, r = np.linalg.qr(np.stack(units).T)  # Gram-Schmidt, with signs of its own
    rows = (q * np.sign(np.diag(r))).T * np.linalg.norm(case.rows, axis=1)[:, None]
    np.testing.assert_allclose(changed_rows(case, "replace k=3"), rows, atol=1e-5)
    close(case.under("replace k=3"), case.mix(case.logits(rows)))


@pytest.mark.parametrize("source", [0, 1, 2, 3])  # rows with and against the sign that LAPACK gives v_1
def test_hijack_moves_all_other_rows_along_the_first_direction_of_the_source(case, source):
    basis = case.directions(source, 2)
    first = basis[:, 0] * np.sign(basis[:, 0] @ case.rows[source])
    rows = case.rows + 0.5 * np.linalg.norm(case.rows, axis=1)[:, None] * first
    rows[source] = case.rows[source] - projected(case.rows[source], basis)
    np.testing.assert_allclose(
        changed_rows(case, f"expert={source} hijack k=2 strength=0.5"), rows, atol=1e-5
    )


def test_permute_rows_gives_experts_the_rows_of_others(case):
    np.testing.assert_allclose(
        changed_rows(case, "permute_rows order=2,0,3,1"), case.rows[[2, 0, 3, 1]], rtol=1e-6
    )
    orders = {
        tuple(np.abs(changed_rows(case, f"permute_rows draw={draw}")[:, None] - case.rows).sum(-1).argmin(1))
        for draw in range(30)
    }
    assert all(sorted(order) == [0, 1, 2, 3] != list(order) for order in orders)
    assert len(orders) > 8


def experts_of_zeros(block) -> tuple[int, ...]:
    """The experts of a token of zeros: logits all equal, or the router's bias."""
    x_TD = torch.zeros(1, block.weight_ED.shape[1], dtype=block.weight_ED.dtype, device=block.device)
    decisions = []
    if block.decide_alone is not None:
        decisions.append(block.decide_alone(RouterReads(x_TD)).decision)
    else:
        with (
            carried_out({0: Edit(block, see=lambda block, decision: decisions.append(decision))}),
            torch.no_grad(),
        ):
            block.module(x_TD[None])
    return tuple(sorted(expert for expert in decisions[0].chosen_TK[0].tolist() if expert >= 0))


@pytest.mark.parametrize(
    "name", ["mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "lab top2", "lab loss_free"]
)
def test_zero_router_sends_every_token_to_the_experts_of_a_token_of_zeros(name):
    model = model_named(name)
    block = next(iter(blocks_of(model).values()))
    width = block.weight_ED.shape[1]
    x = torch.randn(1, 500, width, generator=torch.Generator().manual_seed(0))
    if block.hands_out:
        with moescope.modified(model, "zero_router"):
            chosen = run_lab(model, token_ids(4, 60)).layers[0].chosen_TK.numpy()
    else:
        chosen = decided(block, x, ["zero_router"])[0]
    assert {tuple(sorted(row)) for row in chosen.tolist()} == {experts_of_zeros(block)}


# --- planted layers


def planted_rows(width: int = 256) -> Block:
    """A lab model whose router rows lie along the first direction of their experts."""
    model = trained(tiny("top2", d_model=width, d_ff=48, layers=1)).eval()
    block = blocks_of(model)[0]
    generator = torch.Generator().manual_seed(5)
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    with torch.no_grad():
        for expert in range(8):
            left = torch.nn.functional.normalize(torch.randn(96, generator=generator), dim=0)
            gate_up = model.blocks[0].mlp.experts.gate_up[expert]
            gate_up.copy_(50 * torch.outer(left, basis[expert]) + 0.1 * gate_up)
            v_1 = torch.linalg.svd(gate_up[:48].double()).Vh[0]
            block.weight_ED[expert] = 3 * v_1.float()
    return block


def test_project_out_of_planted_rows_leaves_a_uniform_router_and_random_directions_leave_it_be():
    block = planted_rows()
    x_TD = torch.randn(2000, 256, generator=torch.Generator().manual_seed(2))

    def routing(*texts: str) -> tuple[Tensor, Tensor]:
        with changed({0: block}, [parse_change(text) for text in texts]):
            asked = block.decide_alone(RouterReads(x_TD))
        p = asked.logits_TE.double().softmax(-1)
        return -(p * p.log()).sum(-1), asked.decision.chosen_TK.sort(-1).values

    entropy, chosen = routing()
    assert entropy.mean() < np.log(8) - 0.7
    removed, _ = routing("project_out k=1")
    assert (removed - np.log(8)).abs().max() < 1e-12
    for draw in range(5):
        random, random_chosen = routing(f"random_direction k=1 draw={draw}")
        assert (random - entropy).mean().abs() < 0.02
        kept = (random_chosen[:, :, None] == chosen[:, None]).any(-1).double().mean()
        assert kept > 0.9  # a direction in 256 carries 1/256 of a row
    other, _ = routing("other_expert k=1")
    assert (other - entropy).mean().abs() < 0.05  # the planted directions are orthogonal


# --- the published procedure


def test_project_out_and_the_others_cover_every_published_run_on_mixtral():
    runs = pd.read_csv(GOLDEN / "mixtral_interventions.csv")
    texts = {
        "svd": "project_out k={k} strength=10 view={view}",
        "random": "random_direction k={k} strength=10 view={view}",
        "replace": "replace k={k} view={view}",
        "zero": "zero_router",
        "shuffle": "permute_rows",
    }
    for run in runs.drop_duplicates(["variation", "k", "matrix"]).itertuples():
        k = int(run.k) if run.k == run.k else 0
        text = texts[run.variation].format(k=k, view={"w1": "gate", "w3": "up"}[run.matrix])
        change = parse_change(f"layer={run.layer} {text}")
        assert change.name == text.split()[0]
        assert change.options.get("k", 0) == k
        assert not change.experts  # all rows of the layer at once


def test_project_out_of_the_whole_space_with_strength_10_is_minus_nine_times_the_row(case):
    for text in ("project_out k=16 strength=10", "random_direction k=16 strength=10"):
        np.testing.assert_allclose(changed_rows(case, text), -9 * case.rows, rtol=1e-4, atol=1e-5)
    assert np.all(changed_rows(case, "project_out k=16") == 0)  # below 1e-5 of its norm: zero
    assert np.all(changed_rows(case, "project_out k=16 restore_norm") == 0)


# --- every router of the lab


@pytest.mark.parametrize(
    "router", [name for name, kind in ROUTERS.items() if kind.has_logits and not kind.experts_choose]
)
def test_skip_force_and_bias_select_by_the_scores_of_a_lab_router(router):
    model = trained(tiny(router)).eval()
    ids = token_ids(3, 20)
    before = run_lab(model, ids).layers[0]
    k, scores = before.chosen_TK.shape[1], before.selection_TE.clone()

    def layer_under(change: str):
        with moescope.modified(model, f"layer=0 expert=4 {change}"):
            return run_lab(model, ids).layers[0]

    def best(selection: Tensor) -> Tensor:
        return selection.topk(k, dim=-1).indices.sort(-1).values

    skipped = layer_under("skip")
    without = scores.index_fill(1, torch.tensor([4]), -torch.inf)
    assert torch.equal(best(without), skipped.chosen_TK.sort(-1).values)
    others = scores.index_fill(1, torch.tensor([4]), torch.inf)
    assert torch.equal(best(others), layer_under("force").chosen_TK.sort(-1).values)
    assert not (layer_under("force off").chosen_TK == 4).any()
    assert ((layer_under("bias by=5").chosen_TK == 4).sum()) > (before.chosen_TK == 4).sum()
    p = skipped.scores_TE[:, 4]
    assert torch.equal(p, torch.zeros_like(p))


def test_a_router_that_does_not_pass_its_logits_on_for_change_is_named():
    model = trained(tiny("top2"), steps=1).eval()
    router = model.blocks[1].mlp.router
    plain = type(router).forward

    class Deaf(type(router)):
        def forward(self, inputs):
            changed, self.adjust_logits = self.adjust_logits, lambda logits: logits
            try:
                return plain(self, inputs)
            finally:
                self.adjust_logits = changed

    router.__class__ = Deaf
    with (
        pytest.raises(BadInput, match=r"the router of layer 1 \(layers.1.mlp\) computes its logits in a way"),
        moescope.modified(model, "expert=1 skip"),
    ):
        run_lab(model, token_ids(1, 5))


def test_skip_with_experts_that_choose_leaves_more_probability_to_the_others():
    model = trained(tiny("expert_choice")).eval()
    before = run_lab(model, token_ids(3, 20)).layers[0]
    with moescope.modified(model, "layer=0 expert=4 skip"):
        after = run_lab(model, token_ids(3, 20)).layers[0]
    p = before.logits_TE.index_fill(1, torch.tensor([4]), -torch.inf).softmax(-1)
    threshold_E = model.blocks[0].mlp.router.threshold_E
    assert torch.equal(after.chosen_TK >= 0, (p >= threshold_E) & (torch.arange(8) != 4))
    with moescope.modified(model, "layer=0 expert=4 force"):
        assert (run_lab(model, token_ids(3, 20)).layers[0].chosen_TK[:, 4] == 4).all()


# --- what cannot be applied, and what excludes each other


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("lab hash", "expert=1 skip", "has no logits, so skip cannot be applied"),
        ("lab hash", "top_k k=1", "no number of experts per token that can change"),
        ("lab hash", "project_out k=1", "no row per expert"),
        ("lab spectra", "zero_router", "no row per expert"),
        ("lab some", "project_out k=1", "no row per expert"),
        ("lab expert_choice", "top_k k=1", "no number of experts per token that can change"),
        ("lab expert_choice", "uniform_router", "no number of experts per token that can change"),
        ("phimoe", "top_k k=3", "no number of experts per token that can change"),
        ("switch_transformers", "top_k k=2", "no number of experts per token that can change"),
        ("switch_transformers", "project_out k=1 view=up", "no up matrix"),
        ("lab hash", "expert=1 transplant part=row", "cannot be applied to layer 0"),
        ("mixtral", "top_k k=5", "layer 0 has 4 experts"),
        ("mixtral", "project_out k=17", "rank 16 at most"),
        ("mixtral", "other_expert k=1 step=4", "leads back to the same expert"),
        ("mixtral", "permute_rows order=0,1,2", "each of 0 to 3 once"),
        ("mixtral", "expert=1 transplant from_layer=9", "no MoE layer 9"),
        ("mixtral", "expert=1 transplant from_expert=9", "experts 0 to 3, not 9"),
        ("mixtral", "expert=1 transplant checkpoint=/nowhere", "/nowhere"),
    ],
)
def test_what_a_router_does_not_have_is_said_in_one_line(name, change, words):
    with pytest.raises(BadInput, match=words) as caught:
        check_changes([parse_change(change)], blocks_of(model_named(name)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("layer=0 zero_router", "layer=0 expert=1 project_out k=1"),
        ("layer=0 expert=1,2 force", "expert=2 skip"),
        ("layer=1 expert=1 force", "layer=1 expert=1 force off"),
        ("expert=1 ablate", "layer=2 expert=1 mean"),
        ("uniform_router", "layer=0 expert=1 skip"),
        ("layer=0 top_k k=1", "top_k k=2"),
    ],
)
def test_changes_that_exclude_each_other_are_rejected_in_either_order_and_pass_in_other_places(first, second):
    blocks = blocks_of(model_named("mixtral"))
    pair = [parse_change(first), parse_change(second)]
    for changes in (pair, pair[::-1]):
        with pytest.raises(BadInput, match="exclude each other in layer"):
            check_changes(changes, blocks)
    if pair[0].layers == (0,):
        moved = Change(pair[1].name, (1,), pair[1].experts, pair[1].options)
        check_changes([pair[0], moved], blocks)


def test_a_matrix_of_low_rank_has_no_more_directions_than_its_rank():
    case = Mixed()
    with torch.no_grad():
        case.block.experts.gate_up_proj[2, :24] = torch.outer(torch.ones(24), torch.arange(1.0, 17))
    with pytest.raises(BadInput, match="expert 2 of layer 0 has rank 1; give at most that"):
        case.under("project_out k=2")
