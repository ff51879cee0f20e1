"""One layer through every analysis of its weights: LayerWeights in, rows of tables out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moescope.errors import BadInput, UnusableExpert
from moescope.spectral import alignment
from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.decompose import make_k_grid, spectrum_statistics
from moescope.spectral.pairing import PairingTest, pairing_test
from moescope.spectral.parallel import decompose_each, matrix_readers
from moescope.spectral.subspaces import expert_pairs, make_subspace_grid, orthogonality, similarities
from moescope.types import Array
from moescope.weights import views as readings
from moescope.weights.ambiguity import DEFAULT_WEIGHTS, choose_k_star

if TYPE_CHECKING:
    from torch import Tensor

    from moescope.types import LayerWeights

EVERY_PAIR_UP_TO = 32  # experts; beyond, the pairs table keeps a few ks only
FEW_KS = (1, 16, 128)
DENSITY_KS = (32, 128, 512, 2048)
NULL_BINS = 60


@dataclass(frozen=True)
class ScanSettings:
    """What is computed of each layer.

    Every field changes some number, so all of them are written to run.json.
    """

    matrix: tuple[str, ...] = ("gate",)
    router: tuple[str, ...] = ("raw",)
    fold_norm: bool = False
    k: tuple[int, ...] = ()
    precision: str = "fast"
    null: str = "closed"
    n_shuffles: int = 200
    seed: int = 0
    k_star: str | int = "max_margin"
    allow_full_rank: bool = False
    ambiguity_weights: tuple[float, float, float] = DEFAULT_WEIGHTS


@dataclass(frozen=True)
class DecomposedLayer:
    """What is kept of a layer's experts once each has been decomposed.

    Enough for every analysis, far less than the weights.
    """

    experts: list[int]  # those that could be used, by their numbers in the layer
    matrices: dict[str, AlignmentMatrix]  # router reading -> M(k)
    leading_EDK: list[Array | Tensor]
    singular_values: list[Array]
    fallback: list[bool]


@dataclass(frozen=True)
class LayerResult:
    frames: dict[str, pd.DataFrame]
    setup: dict[str, Any]
    warnings: list[str]


def analyse_layer(
    weights: LayerWeights,
    settings: ScanSettings,
    device: str = "cpu",
    keep_going: bool = False,
    timed: Callable[[str], AbstractContextManager[None]] | None = None,
    on_expert: Callable[[], None] = lambda: None,
) -> LayerResult:
    """Every scan table's rows for one layer, and the setup they were made under.

    A router without a row for each expert leaves the tables that are of experts alone; one expert alone
    leaves its spectrum.
    """
    from contextlib import nullcontext

    timed = timed or (lambda stage: nullcontext())
    if (weights.n_experts < 2 and weights.router_ED is not None) or weights.d_model < 2:
        small = "one expert only" if weights.n_experts < 2 else "d_model is 1"
        raise BadInput(
            f"{weights.layer_name}: {small}; there is nothing to pair or compare, scan other layers"
        )
    with timed("read"):
        rows_ED = readings.router_rows(weights, settings.fold_norm)
    marked = {} if rows_ED is None else readings.unusable_rows(weights, rows_ED)
    if marked and not keep_going:
        raise next(iter(marked.values()))
    left_out = dict(marked)
    collected: dict[str, list[pd.DataFrame]] = {}
    setup: dict[str, Any] = {
        "layer": weights.layer,
        "layer_name": weights.layer_name,
        "n_experts": weights.n_experts,
        "d_model": weights.d_model,
        "d_ff": weights.d_ff,
        "dtype": weights.gate_EFD.dtype,
        "router_dtype": weights.router_ED.dtype if weights.router_ED else None,
        "top_k": weights.top_k,
        "scoring": weights.scoring,
        "null": settings.null,
        "n_shuffles": settings.n_shuffles if settings.null == "shuffle" else None,
        "seed": settings.seed,
        "centered_share": {} if rows_ED is None else readings.centered_share(rows_ED, left_out),
        "matrices": {},
    }
    for matrix in settings.matrix:
        decomposed, unusable = decompose_layer(
            weights, matrix, rows_ED, marked, settings, device, keep_going, timed, on_expert
        )
        with timed("statistics"):
            tests = {reading: pairing_test(M, settings.seed) for reading, M in decomposed.matrices.items()}
            frames = matrix_frames(decomposed, tests, unusable, matrix, weights.d_model, settings)
        for name, frame in frames.items():
            frame.insert(0, "layer", weights.layer)
            frame.insert(1, "layer_name", weights.layer_name)
            collected.setdefault(name, []).append(frame)
        setup["matrices"][matrix] = {
            "k": next((M.ks for M in decomposed.matrices.values()), []),
            "fallbacks": int(sum(decomposed.fallback)),
            "experts_left_out": sorted(unusable),
            "readings": {reading: reading_facts(test, decomposed.experts) for reading, test in tests.items()},
        }
        left_out |= unusable
    return LayerResult(
        frames={name: pd.concat(parts, ignore_index=True) for name, parts in collected.items()},
        setup=setup,
        warnings=[
            f"layer {weights.layer}: expert {expert} left out: {str(error).split(';')[0]}"
            for expert, error in sorted(left_out.items())
        ],
    )


def reading_facts(test: PairingTest, experts: list[int]) -> dict[str, Any]:
    """What the report says of one reading beyond the tables.

    Chance of the best accuracy, and another order if one was found.
    """
    found = test.other_order
    named = [experts[place] if place >= 0 else None for place in found.experts] if found else []
    order = {"k": found.k, "p": found.p, "routers": experts, "experts": named} if found else None
    return {"chance_accuracy": test.chance_accuracy, "other_order": order}


def decompose_layer(
    weights: LayerWeights,
    matrix: str,
    rows_ED: Tensor | None,
    marked: dict[int, UnusableExpert],
    settings: ScanSettings,
    device: str,
    keep_going: bool,
    timed: Callable[[str], AbstractContextManager[None]],
    on_expert: Callable[[], None],
) -> tuple[DecomposedLayer, dict[int, UnusableExpert]]:
    """Read and decompose the layer's experts one by one.

    All router rows, in all readings, are projected in one go.
    """
    import torch

    unusable = dict(marked)
    usable_rows = [expert for expert in range(weights.n_experts) if expert not in marked]
    routers = () if rows_ED is None else settings.router
    unit_rows = torch.cat(
        [readings.stand_in_rows(weights)]
        if rows_ED is None
        else [readings.normalised_rows(weights, rows_ED[usable_rows], reading) for reading in routers]
    ).to(device)
    scale_D = readings.norm_scale(weights).to(device) if settings.fold_norm else None
    ladder = make_k_grid(min(weights.d_ff * (2 if matrix == "gate_up" else 1), weights.d_model), settings.k)
    energies: dict[int, Array] = {}
    ranks, leading, values, fallback = [], [], [], []
    for _ in marked:
        on_expert()  # progress counts every expert, looked at or not

    def read(expert: int) -> Tensor:
        return readings.expert_matrix(weights, matrix, expert, scale_D, device)

    def readable() -> Iterator[tuple[int, Tensor]]:
        for expert, get in matrix_readers(read, usable_rows, device):
            try:
                with timed("read"):
                    W_FD = get()
            except UnusableExpert as error:
                if not keep_going:
                    raise
                unusable[expert] = error
                on_expert()
                continue
            yield expert, W_FD

    for expert, result in decompose_each(
        readable(),
        len(usable_rows),
        unit_rows,
        ladder,
        settings.precision,
        device,
        lambda: timed("decompose"),
    ):
        energies[expert] = alignment.cumulative_energy(result.energy_ER, ladder)
        ranks.append(result.rank)
        leading.append(result.leading_DK)
        values.append(result.singular_values_R)
        fallback.append(result.fallback)
        on_expert()
    if len(energies) < (1 if rows_ED is None else 2):
        raise BadInput(
            f"{weights.layer_name}: fewer than two experts can be used ({len(unusable)} are "
            "marked); mend the checkpoint"
        )
    experts = list(energies)
    matrices = {}
    for index, reading in enumerate(routers):
        rows = [index * len(usable_rows) + usable_rows.index(expert) for expert in experts]
        matrices[reading] = alignment.cumulate(
            [energies[expert][rows] for expert in experts], ranks, weights.d_model, ladder
        )
    return DecomposedLayer(experts, matrices, leading, values, fallback), unusable


def matrix_frames(
    layer: DecomposedLayer,
    tests: dict[str, PairingTest],
    unusable: dict[int, UnusableExpert],
    matrix: str,
    d_model: int,
    settings: ScanSettings,
) -> dict[str, pd.DataFrame]:
    """All tables of one layer and matrix, keyed but for step and layer."""
    frames: dict[str, list[pd.DataFrame]] = {}
    for reading, M in layer.matrices.items():
        test = tests[reading]
        per_expert, per_layer = alignment_frames(M, test, layer.experts, unusable, settings)
        k_star = choose_k_star(per_layer, settings.k_star, settings.allow_full_rank)
        for name, frame in {
            "alignment": per_expert,
            "alignment_layers": per_layer,
            "alignment_tests": test_frame(test),
            "pairs": pairs_frame(M, layer.experts, test.best_k, k_star),
            "nulls": nulls_frame(M, test),
        }.items():
            keys = {"matrix": matrix, "router": reading, "fold_norm": settings.fold_norm}
            frames.setdefault(name, []).append(frame.assign(**keys))
    if len(layer.experts) > 1:
        smallest_rank = min(len(values) for values in layer.singular_values)
        ks = make_subspace_grid(len(layer.experts), smallest_rank, d_model)
        similarity, statistics = similarity_frames(layer, ks, d_model)
        frames["similarity"] = [similarity.assign(matrix=matrix)]
        frames["orthogonality"] = [statistics.assign(matrix=matrix)]
    frames["spectra"] = [spectra_frame(layer, unusable).assign(matrix=matrix)]
    return {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}


def alignment_frames(
    M: AlignmentMatrix,
    test: PairingTest,
    experts: list[int],
    unusable: dict[int, UnusableExpert],
    settings: ScanSettings,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row an expert and k, one row a k).

    Experts left out get rows without values: they are marked, not forgotten.
    """
    align_KEE, ks, n = M.align_KEE, M.ks, M.n_experts
    align_KE, margin_KE = alignment.diagonal(align_KEE), alignment.margins(align_KEE)
    chance_KE = alignment.random_expectation(ks, M.rank_E, M.d_model)
    if settings.null == "shuffle":
        mean_K, std_K = alignment.sampled_shuffle_null(align_KEE, settings.n_shuffles, settings.seed)
    else:
        mean_K, std_K = alignment.shuffle_null(align_KEE)
    delta_KE = align_KE - mean_K[:, None]
    at_one_K = np.where(np.array(ks) == 1, 1.0, np.nan)  # cos_squared is null, never 0, at other ks
    values_KE = {
        "align": align_KE,
        "random_expectation": chance_KE,
        "effect_over_random": align_KE - chance_KE,
        "delta_vs_shuffle": delta_KE,
        "z_vs_shuffle": alignment.z_scores(delta_KE, std_K),
        "cos_squared": align_KE * at_one_K[:, None],
        "margin": margin_KE,
    }
    per_expert = pd.DataFrame({name: values.ravel() for name, values in values_KE.items()})
    per_expert.insert(0, "k", np.repeat(ks, n))
    per_expert.insert(1, "expert", np.tile(experts, len(ks)))
    per_expert["shuffle_mean"], per_expert["shuffle_std"] = np.repeat(mean_K, n), np.repeat(std_K, n)
    per_expert["identified"] = pd.array(margin_KE.ravel() > alignment.TIE, dtype="boolean")
    if unusable:
        left_out = pd.DataFrame(
            {"k": np.repeat(ks, len(unusable)), "expert": np.tile(sorted(unusable), len(ks))}
        )
        per_expert = pd.concat([per_expert, left_out], ignore_index=True)

    per_layer = pd.DataFrame(
        {"k": ks, **{name: values.mean(axis=1) for name, values in values_KE.items() if name != "margin"}}
    )
    per_layer["shuffle_mean"], per_layer["shuffle_std"] = mean_K, std_K
    per_layer["argmax_accuracy"] = alignment.argmax_accuracy(align_KEE)
    per_layer["assignment_accuracy"] = alignment.assignment_accuracy(align_KEE)
    per_layer["alignment_margin"] = margin_KE.mean(axis=1)
    per_layer["positive_margin_share"] = (margin_KE > alignment.TIE).mean(axis=1)
    per_layer["z_ceiling"] = alignment.z_ceiling(n)
    per_layer["perm_z"], per_layer["p_adjusted"] = test.perm_z_K, test.p_adjusted_K
    per_layer["degenerate"] = M.degenerate_K
    return per_expert, per_layer


def test_frame(test: PairingTest) -> pd.DataFrame:
    names = ("best_k", "best_accuracy", "p_value", "p_lower", "p_accuracy", "n_pairings", "exact", "verdict")
    return pd.DataFrame([{name: getattr(test, name) for name in names}]).astype({"best_k": "Int64"})


def pairs_frame(
    M: AlignmentMatrix, experts: list[int], best_k: int | None, k_star: int | None
) -> pd.DataFrame:
    n = M.n_experts
    wanted = M.ks if n <= EVERY_PAIR_UP_TO else [k for k in M.ks if k in {*FEW_KS, best_k, k_star}]
    rungs = [M.ks.index(k) for k in wanted]
    return pd.DataFrame(
        {
            "k": np.repeat(wanted, n * n),
            "router_index": np.tile(np.repeat(experts, n), len(wanted)),
            "expert": np.tile(experts, n * len(wanted)),
            "align": M.align_KEE[rungs].ravel(),
        }
    )


def nulls_frame(M: AlignmentMatrix, test: PairingTest) -> pd.DataFrame:
    """The exact (or drawn) null of the mean diagonal, at the density figure's ks.

    Or the largest usable k where none exists.
    """
    usable = [k for k, degenerate in zip(M.ks, M.degenerate_K, strict=True) if not degenerate]
    frames = []
    for k in [k for k in usable if k in DENSITY_KS] or usable[-1:]:
        rung = M.ks.index(k)
        null_P = test.null_means_KP[rung]
        if np.ptp(null_P) <= 1e-12:  # all pairings agree but for rounding, too narrow to be cut into bins
            null_P = np.full_like(null_P, null_P.mean())
        density, edges = np.histogram(null_P, bins=NULL_BINS, density=True)
        observed = float(alignment.diagonal(M.align_KEE)[rung].mean())
        frames.append(
            pd.DataFrame(
                {
                    "k": k,
                    "bin": range(NULL_BINS),
                    "left": edges[:-1],
                    "right": edges[1:],
                    "density": density,
                    "observed": observed,
                }
            )
        )
    empty = pd.DataFrame(
        {name: pd.Series(dtype=float) for name in ("k", "bin", "left", "right", "density", "observed")}
    )
    return pd.concat(frames, ignore_index=True) if frames else empty


def similarity_frames(
    layer: DecomposedLayer, ks: list[int], d_model: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    first, second = expert_pairs(len(layer.experts))
    experts = np.array(layer.experts)
    pairs, statistics = [], []
    for similarity in similarities(layer.leading_EDK, ks):
        nothing = np.full(len(first), np.nan)
        pairs.append(
            pd.DataFrame(
                {
                    "k": similarity.k,
                    "expert_a": experts[first],
                    "expert_b": experts[second],
                    "cosine": nothing if similarity.cosine_P is None else similarity.cosine_P,
                    "overlap": similarity.overlap_P,
                    "largest_principal_cosine": similarity.largest_principal_cosine_P,
                }
            )
        )
        statistics.append({"k": similarity.k, **orthogonality(similarity, d_model)})
    counts = {"n_pairs_above_0_3": "Int64", "n_pairs_above_0_7": "Int64"}
    return pd.concat(pairs, ignore_index=True), pd.DataFrame(statistics).astype(counts)


def spectra_frame(layer: DecomposedLayer, unusable: dict[int, UnusableExpert]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = [
        {
            "expert": expert,
            "singular_values": values.astype(np.float32),
            **spectrum_statistics(values),
            "fallback": fallback,
        }
        for expert, values, fallback in zip(layer.experts, layer.singular_values, layer.fallback, strict=True)
    ]
    rows += [{"expert": expert} for expert in sorted(unusable)]
    return pd.DataFrame(rows).astype({"rank": "Int64", "fallback": "boolean"})
