import dataclasses

import numpy as np
import pytest
import torch

from moescope.errors import BadInput, UnusableExpert
from moescope.weights.views import (
    centered_share,
    expert_matrix,
    norm_scale,
    normalised_rows,
    router_rows,
    unusable_rows,
)
from spectral.builders import layer_weights, random_weights


def gates(n: int, width: int) -> list[np.ndarray]:
    return list(np.random.default_rng(9).standard_normal((n, 6, width)))


# --- router rows


def test_raw_rows_keep_their_direction_and_have_unit_length():
    weights = layer_weights(np.array([[3.0, 4.0], [0.0, -2.0]]), gates(2, 2))
    rows = normalised_rows(weights, router_rows(weights, fold_norm=False), "raw")
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0, -1]])


def test_centered_rows_are_less_their_mean_then_of_unit_length():
    weights = random_weights(1)
    router = weights.router_ED.read().numpy()
    expected = router - router.mean(axis=0)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(
        normalised_rows(weights, router_rows(weights, False), "centered"), expected, atol=1e-14
    )


def test_centered_rows_of_a_simplex_have_the_chance_cosine_of_centered_rows():
    n = 5
    weights = layer_weights(np.eye(n), gates(n, n))
    rows = normalised_rows(weights, router_rows(weights, False), "centered").numpy()
    np.testing.assert_allclose((rows @ rows.T)[~np.eye(n, dtype=bool)], -1 / (n - 1))


def test_centering_is_rejected_for_gates_that_are_no_softmax():
    weights = random_weights(0, scoring="sigmoid")
    with pytest.raises(BadInput, match=r"model\.layers\.3\.moe.*sigmoid.*--router raw"):
        normalised_rows(weights, router_rows(weights, False), "centered")


def test_centering_is_rejected_where_a_row_equals_the_mean():
    generator = np.random.default_rng(0)
    one, mean = generator.standard_normal((2, 12))
    weights = layer_weights(np.stack([one, mean, 2 * mean - one]), gates(3, 12))
    with pytest.raises(BadInput, match="equals the mean row"):
        normalised_rows(weights, router_rows(weights, False), "centered")


def test_the_centered_share_is_what_is_left_of_each_row_without_the_mean():
    rows = torch.tensor([[3.0, 0.0], [3.0, 4.0], [3.0, -4.0]])  # mean (3, 0)
    assert centered_share(rows) == pytest.approx({0: 0, 1: 0.8, 2: 0.8})


def test_the_centered_share_leaves_marked_experts_out_of_the_mean():
    rows = torch.tensor([[3.0, 0.0], [torch.nan, 4.0], [3.0, 4.0], [3.0, -4.0]])
    assert centered_share(rows, {1}) == pytest.approx({0: 0, 2: 0.8, 3: 0.8})


@pytest.mark.parametrize(("value", "reason"), [(np.nan, "NaN or Inf"), (0.0, "all zeros")])
def test_a_row_that_cannot_be_normalised_is_named_with_file_tensor_and_remedy(value, reason):
    router = np.ones((4, 12))
    router[2] = value
    weights = random_weights(0, router=router)
    found = unusable_rows(weights, router_rows(weights, False))
    assert list(found) == [2]
    assert isinstance(found[2], UnusableExpert)
    assert found[2].expert == 2
    for part in ("shard-router", "row 2", "router.weight", reason, "--keep-going"):
        assert part in str(found[2])


# --- the norm in front of the block


def test_folding_multiplies_router_and_expert_inputs_by_the_norm():
    weights = random_weights(0)
    scale = weights.norm_D.read().numpy()
    np.testing.assert_allclose(router_rows(weights, True), weights.router_ED.read().numpy() * scale)
    np.testing.assert_allclose(
        expert_matrix(weights, "gate", 1, norm_scale(weights)), weights.gate_EFD.read(1).numpy() * scale
    )


def test_a_norm_that_multiplies_by_one_plus_its_weight_is_folded_as_such():
    weights = random_weights(0, norm=np.zeros(12), norm_offset=1.0)
    np.testing.assert_array_equal(norm_scale(weights), np.ones(12))


def test_folding_is_rejected_where_the_checkpoint_has_no_norm():
    weights = random_weights(0, norm=None)
    with pytest.raises(BadInput, match=r"model\.layers\.3\.moe.*without --fold-norm"):
        router_rows(weights, fold_norm=True)


# --- expert matrices


def test_each_matrix_is_read_from_its_own_tensor_with_d_model_along_the_rows():
    weights = random_weights(0, hidden=20, width=12)
    np.testing.assert_array_equal(expert_matrix(weights, "gate", 3, None), weights.gate_EFD.read(3))
    np.testing.assert_array_equal(expert_matrix(weights, "up", 3, None), weights.up_EFD.read(3))
    np.testing.assert_array_equal(expert_matrix(weights, "down", 3, None), weights.down_EDF.read(3).T)
    assert expert_matrix(weights, "gate_up", 3, None).shape == (40, 12)


def test_right_singular_vectors_of_what_down_reads_are_left_ones_of_w2():
    weights = random_weights(0)
    left = np.linalg.svd(weights.down_EDF.read(0).numpy(), full_matrices=False)[0]
    right = np.linalg.svd(expert_matrix(weights, "down", 0, None).numpy(), full_matrices=False)[2]
    np.testing.assert_allclose(np.abs(np.diag(left.T @ right.T)), 1)


def test_the_norm_is_not_folded_into_the_output_side():
    weights = random_weights(0)
    np.testing.assert_array_equal(
        expert_matrix(weights, "down", 0, norm_scale(weights)), weights.down_EDF.read(0).T
    )


@pytest.mark.parametrize("folded", [False, True])
def test_the_halves_of_gate_up_have_unit_norm_each(folded):
    weights = random_weights(0, ups=list(100 * np.random.default_rng(5).standard_normal((5, 20, 12))))
    scale = norm_scale(weights) if folded else None
    stacked = expert_matrix(weights, "gate_up", 2, scale).numpy()
    assert np.linalg.norm(stacked[:20]) == pytest.approx(1)
    assert np.linalg.norm(stacked[20:]) == pytest.approx(1)
    factor = 1 if scale is None else scale.numpy()
    for half, read in ((stacked[:20], weights.gate_EFD.read(2)), (stacked[20:], weights.up_EFD.read(2))):
        plain = read.numpy() * factor
        np.testing.assert_allclose(half, plain / np.linalg.norm(plain))


@pytest.mark.parametrize(("value", "reason"), [(-np.inf, "NaN or Inf"), (0.0, "all zeros")])
@pytest.mark.parametrize(("matrix", "tensor"), [("gate", "w1"), ("gate_up", "w3"), ("down", "w2")])
def test_an_expert_that_says_nothing_is_named_with_file_tensor_and_remedy(matrix, tensor, value, reason):
    weights = random_weights(0)
    field = {"w1": "gate_EFD", "w3": "up_EFD", "w2": "down_EDF"}[tensor]
    stack = getattr(weights, field)
    spoiled = dataclasses.replace(
        stack, read=lambda expert: torch.full(stack.shape[1:], value, dtype=torch.float64)
    )
    with pytest.raises(UnusableExpert) as caught:
        expert_matrix(dataclasses.replace(weights, **{field: spoiled}), matrix, 4, None)
    assert caught.value.expert == 4
    for part in ("shard-4", f"experts.4.{tensor}", reason, "--keep-going"):
        assert part in str(caught.value)
