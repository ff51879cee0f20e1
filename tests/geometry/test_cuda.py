"""The same numbers from a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from checkpoints import tiny_checkpoint
from geometry.experts import random_expert, shuffled
from moescope.checkpoint import open_checkpoint
from moescope.families import read_moe
from moescope.geometry.distances import polar_factor
from moescope.geometry.matching import match_neurons
from moescope.geometry.pairs import layer_geometry
from spectral.builders import STORED_BITS, stored_low_rank

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [(768, 2048), (2048, 768), (512, 512)])
def test_polar_factors_are_those_of_the_cpu(shape):
    for _ in range(3):
        weight = torch.randn(shape)
        found, expected = polar_factor(weight, "cuda"), polar_factor(weight)
        assert found.rank == expected.rank
        np.testing.assert_allclose(found.matrix.cpu().numpy(), expected.matrix.numpy(), atol=2e-4)


@pytest.mark.parametrize("shape", [(256, 512), (512, 256), (768, 2048)], ids=str)
@pytest.mark.parametrize("dtype", STORED_BITS, ids=str)
def test_a_low_rank_is_found_in_every_stored_dtype(dtype, shape):
    stored, bits = stored_low_rank(0, shape, 10, dtype).double(), STORED_BITS[dtype]
    found, expected = polar_factor(stored, "cuda", bits), polar_factor(stored, bits=bits)
    assert (found.rank, expected.rank) == (10, 10)
    np.testing.assert_allclose(found.matrix.cpu().numpy(), expected.matrix.numpy(), atol=2e-4)
    full = torch.randn(shape).to(dtype).double()
    assert polar_factor(full, "cuda", bits).rank == polar_factor(full, bits=bits).rank


def test_a_signed_permutation_is_undone():
    dominant = random_expert(0, hidden=256, width=128)
    copy, order, _ = shuffled(dominant, 1, flip=True)
    assert (order[match_neurons(dominant, copy, device="cuda").order_F] == np.arange(256)).all()


def test_a_layer_s_rows_are_those_of_the_cpu(tmp_path):
    layers = read_moe(open_checkpoint(tiny_checkpoint(tmp_path / "model", d_model=128, d_ff=96))).layers
    series = {"stored_order": "none", "matched": "signed"}
    frames = [
        layer_geometry(layers[0], layers[1], [(0, 1), (2, 3)], series, device=device)
        for device in ("cpu", "cuda")
    ]
    for name in frames[0]:
        columns = frames[0][name].select_dtypes("number").columns
        np.testing.assert_allclose(frames[0][name][columns], frames[1][name][columns], atol=1e-4)
