"""How often a scan claims a layer of random weights, and how often it finds what is planted."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest

from checkpoints import tiny_checkpoint
from moescope.run import Run
from moescope.spectral.pairing import CHANCE, pairing_test
from moescope.types import LayerWeights
from moescope.weights import layer as layer_module
from moescope.weights.layer import ScanSettings, correct_tests, decompose_layer
from moescope.weights.report import differing_layers
from moescope.weights.verb import scan
from moescope.weights.views import router_rows
from spectral.builders import layer_weights, random_weights

pytestmark = pytest.mark.slow
LAYERS, EXPERTS, HIDDEN, WIDTH = 4, 6, 12, 16
HEADLINE = ("gate", "centered")  # the first view of a softmax router
SETTINGS = ScanSettings(matrix=("gate", "up", "down"), router=("centered", "raw"))
AT_MOST = 16  # of 200: 5 %, and two standard deviations
PLANTED = 0.3  # of a router row's squared length in the first direction of its expert; random rows have 1/16


def claimed(model: list[LayerWeights]) -> pd.DataFrame:
    """The layers' tests that a scan of these layers reports, with a column that says which are claims."""
    rows = []
    for layer, weights in enumerate(model):
        for matrix in SETTINGS.matrix:
            rows_ED = router_rows(weights, SETTINGS.fold_norm)
            decomposed = decompose_layer(
                weights,
                matrix,
                rows_ED,
                {},
                SETTINGS,
                "cpu",
                False,
                lambda stage: nullcontext(),
                lambda: None,
            )
            for router, M in decomposed.matrices.items():
                found = layer_module.tests_frame(M, pairing_test(M, SETTINGS.seed), [*decomposed.experts])
                rows.append(found.assign(step=0, layer=layer, matrix=matrix, router=router))
    tests = pd.concat(rows, ignore_index=True)
    correct_tests(tests)
    return tests.assign(claimed=tests["verdict"] != CHANCE)


def in_headline(tests: pd.DataFrame) -> pd.DataFrame:
    return tests[(tests["matrix"] == HEADLINE[0]) & (tests["router"] == HEADLINE[1])]


def test_random_models_claim_a_layer_in_one_of_twenty():
    """By p, without the correction for layers and views, most models would claim one."""
    headline = anywhere = suggested = differing = 0
    for seed in range(200):
        layers = [random_weights(LAYERS * seed + layer, EXPERTS, HIDDEN, WIDTH) for layer in range(LAYERS)]
        tests = claimed(layers)
        assert len(tests) == LAYERS * 6
        headline += bool(in_headline(tests)["claimed"].any())
        anywhere += bool(tests["claimed"].any())
        suggested += bool(tests["suggested"].any())
        views = [tests.query("matrix == 'gate' and router == @router") for router in SETTINGS.router]
        differing += bool(differing_layers(*views))
    assert headline <= AT_MOST
    assert anywhere <= AT_MOST
    assert differing <= AT_MOST
    assert suggested > 3 * AT_MOST


def test_planted_alignment_is_claimed_in_nine_of_ten_layers():
    """In the gate matrices alone, so that four of the six views stay random."""
    found = []
    for seed in range(30):
        layers = [planted(LAYERS * seed + layer) for layer in range(LAYERS)]
        found += in_headline(claimed(layers))["claimed"].tolist()
    assert len(found) == 30 * LAYERS
    assert np.mean(found) >= 0.9


def planted(seed: int) -> LayerWeights:
    """Random weights; router rows have PLANTED of their squared length in their experts' first direction."""
    weights = random_weights(seed, EXPERTS, HIDDEN, WIDTH)
    gates, ups, downs = (
        [stack.read(expert).numpy() for expert in range(EXPERTS)]
        for stack in (weights.gate_EFD, weights.up_EFD, weights.down_EDF)
    )
    first_ED = np.stack([np.linalg.svd(gate)[2][0] for gate in gates])
    rest_ED = weights.router_ED.read().numpy()
    rest_ED = rest_ED - (rest_ED * first_ED).sum(1, keepdims=True) * first_ED
    rest_ED /= np.linalg.norm(rest_ED, axis=1, keepdims=True)
    return layer_weights(PLANTED**0.5 * first_ED + (1 - PLANTED) ** 0.5 * rest_ED, gates, ups, downs)


MAPS = (
    "alignment_by_expert",
    "alignment_by_expert_and_k",
    "pair_matrix",
    "cosine_heatmap",
    "overlap_heatmap",
)


def coloured_cells(run: Run, name: str) -> np.ndarray:
    """Whether each cell that has a chance level is coloured, on all pages of a map."""
    figure = run.draw(name)
    cells = [np.ravel(trace["z"]) for trace in figure.data if trace["type"] == "heatmap"]
    known = np.concatenate([part[~np.isnan(part)] for part in cells])
    return known != 0


def test_of_random_models_at_most_6_percent_of_the_cells_of_any_map_are_coloured(tmp_path):
    found: dict[str, list[np.ndarray]] = {name: [] for name in MAPS}
    for seed in range(20):
        model = tiny_checkpoint(tmp_path / str(seed), layers=3, experts=8, d_model=32, d_ff=48, seed=seed)
        run = scan(model, out=tmp_path / f"run{seed}", router="raw", quiet=True)
        for name, cells in found.items():
            cells.append(coloured_cells(run, name))
    rates = {name: float(np.concatenate(cells).mean()) for name, cells in found.items()}
    print(rates)
    assert max(rates.values()) <= 0.06
    assert min(rates.values()) > 0


def test_planted_cells_of_a_scan_are_coloured(planted_run):
    """Experts 2 and 5 of layer 3 are nearly the same; every row of layer 1 is aligned with its expert."""
    figure = planted_run.draw("cosine_heatmap", layer=3)
    assert figure.data[0]["z"][2, 5] > 0
    aligned = planted_run.draw("alignment_by_expert", quantity="z_vs_shuffle")
    page = aligned.slider.start * aligned.slider.per_value
    layers = list(aligned.data[page]["y"])
    assert (aligned.data[page]["z"][layers.index("1")] > 0).mean() >= 0.7
