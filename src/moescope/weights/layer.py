"""Analyse the weights of one layer: LayerWeights in, rows of the scan tables out."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from moescope.arguments import choose_device, names
from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.source import in_memory
from moescope.errors import BadInput, UnusableExpert
from moescope.families import MoeCheckpoint, read_moe
from moescope.run import timed
from moescope.spectral import alignment
from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.decompose import make_k_grid, spectrum_statistics
from moescope.spectral.pairing import PairingTest, pairing_test
from moescope.spectral.parallel import decompose_each, layer_stream, matrix_readers
from moescope.spectral.subspaces import expert_pairs, make_subspace_grid, orthogonality, similarities
from moescope.statistics import false_discovery_rates
from moescope.types import Array
from moescope.weights.ambiguity import (
    CHANCE,
    DEFAULT_WEIGHTS,
    ambiguity_ranking,
    chance_at_k_star,
    choose_k_star,
)
from moescope.weights.tables import VIEW
from moescope.weights.views import (
    MATRICES,
    ROUTERS,
    centered_share,
    expert_matrix,
    norm_scale,
    normalised_rows,
    router_rows,
    stand_in_rows,
    stored_bits,
    unusable_rows,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from moescope.types import LayerWeights

EVERY_PAIR_UP_TO = 32  # experts; beyond, the pairs table holds a few ks only
FEW_KS = (1, 16, 128)
DENSITY_KS = (32, 128, 512, 2048)
NULL_BINS = 60
Timer = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class ScanSettings:
    """What is computed per layer. Every field changes a number, so run.json stores all of them."""

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
    """All that the analyses need of a layer's decomposed experts; far smaller than the weights."""

    experts: list[int]  # the usable ones, by their number in the layer
    matrices: dict[str, AlignmentMatrix]  # router variant -> M(k)
    leading_EDK: list[Array | Tensor]
    singular_values: list[Array]
    fallback: list[bool]


@dataclass(frozen=True)
class LayerResult:
    frames: dict[str, pd.DataFrame]
    setup: dict[str, Any]
    warnings: list[str]


# --- one layer as a task


@dataclass(frozen=True)
class LayerTask:
    """A layer to analyse, described by values, so that any process that sees the checkpoint can do it."""

    step: int
    layer: int
    location: str
    header_hash: str
    settings: ScanSettings
    keep_going: bool

    @property
    def name(self) -> str:
        """The task's name in the run folder."""
        return f"step{self.step}-layer{self.layer}"

    def label(self, n_steps: int) -> str:
        """The task's name in the progress bar."""
        return f"layer {self.layer}" + (f", step {self.step}" if n_steps > 1 else "")


@dataclass(frozen=True)
class AnalysedLayer(LayerResult):
    """A layer's result, with its duration and the seconds per stage."""

    seconds: float
    timings: dict[str, float]


def analyse_here(
    opened: Mapping[int, MoeCheckpoint], device: str, task: LayerTask, tick: Callable[[], None]
) -> AnalysedLayer:
    """Do the task with this process's open checkpoints (step -> checkpoint)."""
    moe = opened[task.step]
    timings: dict[str, float] = {}
    start = time.perf_counter()
    timer = functools.partial(timed, timings)
    try:
        with layer_stream(device):
            result = analyse_layer(
                moe.layers[task.layer], task.settings, device, task.keep_going, timer, tick
            )
    finally:
        moe.checkpoint.release()
    seconds = round(time.perf_counter() - start, 4)
    return AnalysedLayer(result.frames, result.setup, result.warnings, seconds, timings)


def analyse_elsewhere(device: str, task: LayerTask, tick: Callable[[], None]) -> AnalysedLayer:
    """Do the task in a process that has only its description, and perhaps another device."""
    opened = {task.step: opened_once(task.location, task.header_hash)}
    return analyse_here(opened, choose_device(device), task, tick)


@functools.lru_cache(maxsize=4)
def opened_once(location: str, header_hash: str) -> MoeCheckpoint:
    """The checkpoint, opened by the first task that needs it; its header must be the scan's."""
    machine = f"as the worker on {platform.node()} sees it"
    try:
        moe = read_moe(open_checkpoint(location))
    except BadInput as error:
        raise BadInput(
            f"{error} ({machine}; all machines must find the checkpoint under this path)"
        ) from None
    if moe.checkpoint.header_hash() != header_hash:
        raise BadInput(
            f"{location}: another checkpoint, {machine}, than where the scan started; give a path that all "
            "machines share"
        )
    return moe


def scan_model(
    model: nn.Module, step: int, matrix: str | Iterable[str] = "gate", router: str | Iterable[str] = "raw"
) -> dict[str, pd.DataFrame]:
    """Alignment, tests, orthogonality and ambiguity of a running model's layers, as tables of that step."""
    settings = ScanSettings(names("matrix", matrix, MATRICES), names("router", router, ROUTERS))
    device = next(model.parameters()).device
    place = str(device) if device.type == "cuda" else "cpu"
    results = [
        analyse_layer(weights, settings, place, keep_going=True).frames
        for weights in read_moe(in_memory(model, "the model in training")).layers.values()
    ]
    frames = {}
    for name in ("alignment", "alignment_layers", "alignment_tests", "orthogonality", "ambiguity"):
        parts = [result[name] for result in results if name in result]
        if parts:  # a router without rows has the tables of experts alone
            frames[name] = pd.concat(parts, ignore_index=True).assign(step=step)
    return compare_layers(frames, settings)


def compare_layers(frames: dict[str, pd.DataFrame], settings: ScanSettings) -> dict[str, pd.DataFrame]:
    """Add what needs all layers of a view: q values (Benjamini-Hochberg) and the ambiguity ranking."""
    if "alignment_tests" in frames:
        view = ["step", *VIEW]
        tests = frames["alignment_tests"]
        tests["q_value"] = tests.groupby(view)["p_value"].transform(
            lambda p: false_discovery_rates(p.to_numpy())
        )
        rankings = [
            ambiguity_ranking(
                rows, settings.k_star, settings.allow_full_rank, settings.ambiguity_weights
            ).assign(**dict(zip(view, keys, strict=True)))
            for keys, rows in frames["alignment_layers"].groupby(view, sort=True)
        ]
        keys = [*view, "layer"]
        chance = frames["ambiguity"][[*keys, *CHANCE]]  # all that a layer's task could say
        frames["ambiguity"] = pd.concat(rankings, ignore_index=True).merge(chance, on=keys, how="left")
    return frames


# --- the analysis


def analyse_layer(
    weights: LayerWeights,
    settings: ScanSettings,
    device: str = "cpu",
    keep_going: bool = False,
    timed: Timer = lambda stage: nullcontext(),
    on_expert: Callable[[], None] = lambda: None,
) -> LayerResult:
    """Rows of every scan table for one layer, and the setup that produced them.

    Without router rows only the tables about experts alone are made; for a single expert, its spectrum.
    """
    if (weights.n_experts < 2 and weights.router_ED is not None) or weights.d_model < 2:
        small = "one expert only" if weights.n_experts < 2 else "d_model is 1"
        raise BadInput(
            f"{weights.layer_name}: {small}, so there is nothing to pair or compare; scan other layers"
        )
    with timed("read"):
        rows_ED = router_rows(weights, settings.fold_norm)
    bad_rows = {} if rows_ED is None else unusable_rows(weights, rows_ED)
    if bad_rows and not keep_going:
        raise next(iter(bad_rows.values()))
    skipped = dict(bad_rows)
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
        "centered_share": {} if rows_ED is None else centered_share(rows_ED, skipped),
        "matrices": {},
    }
    for matrix in settings.matrix:
        decomposed, unusable = decompose_layer(
            weights, matrix, rows_ED, bad_rows, settings, device, keep_going, timed, on_expert
        )
        with timed("statistics"):
            tests = {router: pairing_test(M, settings.seed) for router, M in decomposed.matrices.items()}
            frames = matrix_frames(decomposed, tests, unusable, matrix, weights.d_model, settings)
        for name, frame in frames.items():
            frame.insert(0, "layer", weights.layer)
            frame.insert(1, "layer_name", weights.layer_name)
            collected.setdefault(name, []).append(frame)
        setup["matrices"][matrix] = {
            "k": next((M.ks for M in decomposed.matrices.values()), []),
            "fallbacks": int(sum(decomposed.fallback)),
            "skipped_experts": sorted(unusable),
            "routers": {router: test_facts(test, decomposed.experts) for router, test in tests.items()},
        }
        skipped |= unusable
    return LayerResult(
        frames={name: pd.concat(parts, ignore_index=True) for name, parts in collected.items()},
        setup=setup,
        warnings=[
            f"layer {weights.layer}: expert {expert} skipped: {str(error).split(';')[0]}"
            for expert, error in sorted(skipped.items())
        ],
    )


def test_facts(test: PairingTest, experts: list[int]) -> dict[str, Any]:
    """What the report needs beyond the tables: another order, if one fits."""
    order = test.other_order
    return {
        "other_order": order
        and {
            "k": order.k,
            "p": order.p,
            "routers": experts,
            "experts": [experts[place] if place >= 0 else None for place in order.experts],
        },
    }


def decompose_layer(
    weights: LayerWeights,
    matrix: str,
    rows_ED: Tensor | None,
    bad_rows: dict[int, UnusableExpert],
    settings: ScanSettings,
    device: str,
    keep_going: bool,
    timed: Timer,
    on_expert: Callable[[], None],
) -> tuple[DecomposedLayer, dict[int, UnusableExpert]]:
    """Read and decompose the layer's experts; project all router rows, in all variants, at once."""
    import torch

    unusable = dict(bad_rows)
    usable = [expert for expert in range(weights.n_experts) if expert not in bad_rows]
    routers = () if rows_ED is None else settings.router
    unit_rows = torch.cat(
        [stand_in_rows(weights)]
        if rows_ED is None
        else [normalised_rows(weights, rows_ED[usable], router) for router in routers]
    ).to(device)
    scale_D = norm_scale(weights).to(device) if settings.fold_norm else None
    ks = make_k_grid(min(weights.d_ff * (2 if matrix == "gate_up" else 1), weights.d_model), settings.k)
    for _ in bad_rows:
        on_expert()  # progress counts every expert, analysed or not

    def read(expert: int) -> Tensor:
        return expert_matrix(weights, matrix, expert, scale_D, device)

    def readable() -> Iterator[tuple[int, Tensor]]:
        for expert, get in matrix_readers(read, usable, device):
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

    energies: dict[int, Array] = {}
    ranks, leading, values, fallback = [], [], [], []
    bits = stored_bits(weights, matrix)
    for expert, result in decompose_each(
        readable(), len(usable), unit_rows, ks, settings.precision, bits, device, lambda: timed("decompose")
    ):
        energies[expert] = alignment.cumulative_energy(result.energy_ER, ks)
        ranks.append(result.rank)
        leading.append(result.leading_DK)
        values.append(result.singular_values_R)
        fallback.append(result.fallback)
        on_expert()
    if len(energies) < (1 if rows_ED is None else 2):
        raise BadInput(
            f"{weights.layer_name}: fewer than two experts can be used ({len(unusable)} are unusable); "
            "fix the checkpoint"
        )
    experts = list(energies)
    matrices = {}
    for index, router in enumerate(routers):
        rows = [index * len(usable) + usable.index(expert) for expert in experts]
        matrices[router] = alignment.cumulate(
            [energies[expert][rows] for expert in experts], ranks, weights.d_model, ks
        )
    return DecomposedLayer(experts, matrices, leading, values, fallback), unusable


# --- tables


def matrix_frames(
    layer: DecomposedLayer,
    tests: dict[str, PairingTest],
    unusable: dict[int, UnusableExpert],
    matrix: str,
    d_model: int,
    settings: ScanSettings,
) -> dict[str, pd.DataFrame]:
    """All tables of one layer and matrix, without the keys step and layer."""
    frames: dict[str, list[pd.DataFrame]] = {}
    ambiguity_settings = settings.k_star, settings.allow_full_rank, settings.ambiguity_weights
    for router, M in layer.matrices.items():
        test = tests[router]
        per_expert, per_layer = alignment_frames(M, test, layer.experts, unusable, settings)
        k_star = choose_k_star(per_layer, settings.k_star, settings.allow_full_rank)
        for name, frame in {
            "alignment": per_expert,
            "alignment_layers": per_layer,
            "alignment_tests": test_frame(test),
            "ambiguity": pd.DataFrame([chance_at_k_star(M, *ambiguity_settings, settings.seed)]),
            "pairs": pairs_frame(M, layer.experts, test.best_k, k_star),
            "nulls": nulls_frame(M, test),
        }.items():
            keys = {"matrix": matrix, "router": router, "fold_norm": settings.fold_norm}
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
    """(one row per expert and k, one row per k); skipped experts get rows without values."""
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
    per_expert = pd.DataFrame(
        {
            "k": np.repeat(ks, n),
            "expert": np.tile(experts, len(ks)),
            **{name: values.ravel() for name, values in values_KE.items()},
            "shuffle_mean": np.repeat(mean_K, n),
            "shuffle_std": np.repeat(std_K, n),
            "identified": pd.array(margin_KE.ravel() > alignment.TIE, dtype="boolean"),
        }
    )
    if unusable:
        keys = {"k": np.repeat(ks, len(unusable)), "expert": np.tile(sorted(unusable), len(ks))}
        per_expert = pd.concat([per_expert, pd.DataFrame(keys)], ignore_index=True)
    per_layer = pd.DataFrame(
        {
            "k": ks,
            **{name: values.mean(axis=1) for name, values in values_KE.items() if name != "margin"},
            "shuffle_mean": mean_K,
            "shuffle_std": std_K,
            "argmax_accuracy": alignment.argmax_accuracy(align_KEE),
            "assignment_accuracy": alignment.assignment_accuracy(align_KEE),
            "alignment_margin": margin_KE.mean(axis=1),
            "positive_margin_share": (margin_KE > alignment.TIE).mean(axis=1),
            "z_ceiling": alignment.z_ceiling(n),
            "perm_z": test.perm_z_K,
            "p_adjusted": test.p_adjusted_K,
            "degenerate": M.degenerate_K,
            "n_experts": n,
            "d_model": M.d_model,
        }
    )
    return per_expert, per_layer


def test_frame(test: PairingTest) -> pd.DataFrame:
    columns = (
        "best_k",
        "best_accuracy",
        "chance_accuracy",
        "p_value",
        "p_lower",
        "p_accuracy",
        "n_pairings",
        "exact",
        "verdict",
    )
    return pd.DataFrame([{name: getattr(test, name) for name in columns}]).astype({"best_k": "Int64"})


def pairs_frame(
    M: AlignmentMatrix, experts: list[int], best_k: int | None, k_star: int | None
) -> pd.DataFrame:
    n = M.n_experts
    ks = M.ks if n <= EVERY_PAIR_UP_TO else [k for k in M.ks if k in {*FEW_KS, best_k, k_star}]
    return pd.DataFrame(
        {
            "k": np.repeat(ks, n * n),
            "router_index": np.tile(np.repeat(experts, n), len(ks)),
            "expert": np.tile(experts, n * len(ks)),
            "align": M.align_KEE[[M.ks.index(k) for k in ks]].ravel(),
        }
    )


def nulls_frame(M: AlignmentMatrix, test: PairingTest) -> pd.DataFrame:
    """The null distribution of the mean diagonal in bins, at DENSITY_KS or else the largest usable k."""
    usable = [k for k, degenerate in zip(M.ks, M.degenerate_K, strict=True) if not degenerate]
    columns = ("k", "bin", "left", "right", "density", "observed")
    frames = []
    for k in [k for k in usable if k in DENSITY_KS] or usable[-1:]:
        index = M.ks.index(k)
        null_P = test.null_means_KP[index]
        if np.ptp(null_P) <= 1e-12:  # all pairings agree up to rounding: too narrow for bins
            null_P = np.full_like(null_P, null_P.mean())
        density, edges = np.histogram(null_P, bins=NULL_BINS, density=True)
        observed = float(alignment.diagonal(M.align_KEE)[index].mean())
        values = (k, range(NULL_BINS), edges[:-1], edges[1:], density, observed)
        frames.append(pd.DataFrame(dict(zip(columns, values, strict=True))))
    empty = pd.DataFrame({name: pd.Series(dtype=float) for name in columns})
    return pd.concat(frames, ignore_index=True) if frames else empty


def similarity_frames(
    layer: DecomposedLayer, ks: list[int], d_model: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per pair of experts and k, statistics per k)."""
    first, second = expert_pairs(len(layer.experts))
    experts = np.array(layer.experts)
    pairs, statistics = [], []
    for similarity in similarities(layer.leading_EDK, ks):
        cosine = np.full(len(first), np.nan) if similarity.cosine_P is None else similarity.cosine_P
        pairs.append(
            pd.DataFrame(
                {
                    "k": similarity.k,
                    "expert_a": experts[first],
                    "expert_b": experts[second],
                    "cosine": cosine,
                    "overlap": similarity.overlap_P,
                    "largest_principal_cosine": similarity.largest_principal_cosine_P,
                }
            )
        )
        statistics.append({"k": similarity.k, **orthogonality(similarity, d_model), "d_model": d_model})
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
