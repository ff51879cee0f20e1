"""Analyse the weights of one layer: LayerWeights in, rows of the scan tables out."""

from __future__ import annotations

import functools
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import bdtrc

from moescope.arguments import choose_device, names
from moescope.checkpoint import open_checkpoint
from moescope.checkpoint.source import in_memory
from moescope.errors import BadInput, UnusableExpert
from moescope.families import MoeCheckpoint, read_moe
from moescope.run import timed
from moescope.spectral import alignment
from moescope.spectral.alignment import AlignmentMatrix
from moescope.spectral.decompose import Decomposition, make_k_grid, random_rank, spectrum_statistics
from moescope.spectral.pairing import (
    ALPHA,
    IDENTIFYING,
    IDENTIFYING_ACCURACY,
    NON_RANDOM,
    PairingTest,
    false_call_rate,
    null_moments,
    pairing_test,
    verdict,
)
from moescope.spectral.pairing import CHANCE as AT_CHANCE
from moescope.spectral.parallel import decompose_each, layer_stream, matrix_readers
from moescope.spectral.subspaces import (
    make_subspace_grid,
    nearest_experts,
    orthogonality,
    overlap_std,
    similarities,
)
from moescope.statistics import false_discovery_rates
from moescope.types import Array
from moescope.weights.ambiguity import CHANCE, ambiguity_ranking, chance_at_k_star, choose_k_star
from moescope.weights.tables import VIEW
from moescope.weights.views import (
    MATRICES,
    centered_share,
    choose_routers,
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
SPECTRUM_POINTS = 60  # of the table spectrum
TEST_COLUMNS = (
    *("best_k", "best_accuracy", "chance_accuracy", "p_value", "p_lower", "p_accuracy"),
    *("n_pairings", "exact", "verdict", "p_order"),
)
Timer = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class ScanSettings:
    """What is computed per layer. Every field changes a number, so run.json stores all of them."""

    matrix: tuple[str, ...] = ("gate",)
    router: tuple[str, ...] = ("raw",)
    fold_norm: bool = False
    k: tuple[int, ...] = ()
    precision: str = "fast"
    seed: int = 0


class DecomposedLayer(NamedTuple):
    """All that the analyses need of a layer's experts; far smaller than the weights."""

    experts: dict[int, Decomposition]  # the usable ones, by number; energies up to each k of the grid
    matrices: dict[str, AlignmentMatrix]  # router variant -> M(k)
    unusable: dict[int, UnusableExpert]


@dataclass(frozen=True)
class LayerResult:
    frames: dict[str, pd.DataFrame]
    setup: dict[str, Any]  # with warnings, and seconds of the whole task
    timings: dict[str, float] = field(default_factory=dict)  # seconds per stage


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


def analyse_here(
    opened: Mapping[int, MoeCheckpoint], device: str, task: LayerTask, tick: Callable[[], None]
) -> LayerResult:
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
    result.setup["seconds"] = round(time.perf_counter() - start, 4)
    return replace(result, timings=timings)


def analyse_elsewhere(device: str, task: LayerTask, tick: Callable[[], None]) -> LayerResult:
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
    model: nn.Module, step: int, matrix: str | Iterable[str] = "gate", router: str | Iterable[str] = "auto"
) -> dict[str, pd.DataFrame]:
    """Alignment, tests, orthogonality and ambiguity of a running model's layers, as tables of that step."""
    layers = read_moe(in_memory(model, "the model in training")).layers.values()
    routers, _ = choose_routers(router, layers)
    settings = ScanSettings(names("matrix", matrix, MATRICES), routers)
    device = next(model.parameters()).device
    place = str(device) if device.type == "cuda" else "cpu"
    results = [analyse_layer(weights, settings, place, keep_going=True).frames for weights in layers]
    tables = ("alignment", "alignment_layers", "alignment_tests", "orthogonality", "ambiguity")
    parts = {name: [result[name] for result in results if name in result] for name in tables}
    joined = {name: pd.concat(of, ignore_index=True).assign(step=step) for name, of in parts.items() if of}
    return compare_layers(joined)  # a router without rows has the tables of experts alone


def compare_layers(frames: dict[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Add what needs all layers: p values and verdicts corrected for layers and views, the k of comparison,
    the ambiguity ranking."""
    if "spectra" in frames:
        cells = frames["spectra"].groupby(["step", "matrix"])["nearest_p"].transform("count")
        frames["spectra"]["nearest_beyond"] = frames["spectra"]["nearest_p"] * cells <= ALPHA
    if "alignment_tests" in frames:
        view = ["step", *VIEW]
        tests, layers = frames["alignment_tests"], frames["alignment_layers"]
        correct_tests(tests)
        looks = layers.groupby("step").size()  # corrected for experts in the layer's task, here for ks too
        tests["hub_p"] = (tests["hub_p"] * tests["step"].map(looks)).clip(upper=1.0)
        per_view = layers.groupby(view)
        at = per_view[["k", "degenerate"]].apply(reference_k).rename("at")
        for frame in (frames["alignment"], layers):
            frame["reference"] = frame["k"] == frame[view].join(at, on=view)["at"]
        rankings = [
            ambiguity_ranking(rows).assign(**dict(zip(view, keys, strict=True))) for keys, rows in per_view
        ]
        keys = [*view, "layer"]
        chance = frames["ambiguity"][[*keys, *CHANCE]]  # all that a layer's task could say
        beats = tests[keys].assign(beats_chance=tests["verdict"].isin([IDENTIFYING, NON_RANDOM]))
        ranking = pd.concat(rankings, ignore_index=True).merge(chance, on=keys, how="left")
        frames["ambiguity"] = ranking.merge(beats, on=keys, how="left")
    return frames


def correct_tests(tests: pd.DataFrame) -> None:
    """Correct p values for the layers and views of a step (Benjamini-Hochberg), and judge by them."""
    for q, p in (("q_value", "p_value"), ("q_lower", "p_lower"), ("q_order", "p_order")):
        tests[q] = tests.groupby("step")[p].transform(lambda p: false_discovery_rates(p.to_numpy()))
    tests["suggested"] = tests["verdict"] != AT_CHANCE
    tests["verdict"] = [
        verdict(row.q_value, row.q_order, row.verdict == IDENTIFYING) for row in tests.itertuples()
    ]


def reference_k(rows: pd.DataFrame) -> int:
    """Return the k at which experts are compared: 128 where the k grid has it, else the grid's median.

    Degenerate ks count only where all are.
    """
    usable = rows[~rows["degenerate"].astype(bool)]
    grid = sorted(set((usable if len(usable) else rows)["k"]))
    return 128 if 128 in grid else grid[len(grid) // 2]


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
    collected: dict[str, list[pd.DataFrame]] = defaultdict(list)
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
        "seed": settings.seed,
        "centered_share": {} if rows_ED is None else centered_share(rows_ED, skipped),
        "matrices": {},
    }
    for matrix in settings.matrix:
        decomposed = decompose_layer(
            weights, matrix, rows_ED, bad_rows, settings, device, keep_going, timed, on_expert
        )
        experts, unusable = list(decomposed.experts), decomposed.unusable
        with timed("statistics"):
            tests = {router: pairing_test(M, settings.seed) for router, M in decomposed.matrices.items()}
            for name, frame in matrix_frames(decomposed, tests, matrix, weights, settings):
                collected[name].append(frame)
        setup["matrices"][matrix] = {
            "k": next((M.ks for M in decomposed.matrices.values()), []),
            "fallbacks": sum(result.fallback for result in decomposed.experts.values()),
            "skipped_experts": sorted(unusable),
            "routers": {
                router: {"other_order": order_facts(test, experts)} for router, test in tests.items()
            },
        }
        skipped |= unusable
    joined = {name: pd.concat(parts, ignore_index=True) for name, parts in collected.items()}
    for frame in joined.values():
        frame.insert(0, "layer", weights.layer)
        frame.insert(1, "layer_name", weights.layer_name)
    if "alignment_tests" in joined:
        joined["alignment_tests"] = joined["alignment_tests"].assign(**common_vector(setup))
    setup["warnings"] = [
        f"layer {weights.layer}: expert {expert} skipped: {str(error).split(';')[0]}"
        for expert, error in sorted(skipped.items())
    ]
    return LayerResult(joined, setup)


def common_vector(setup: dict[str, Any]) -> dict[str, float]:
    """Return the part of a router row that all rows share, and that of random rows.

    Null for two rows, which always share half, and where no softmax ignores it.
    """
    shares = list(setup["centered_share"].values())
    if setup["scoring"] != "softmax" or len(shares) < 3:
        return {"common_share": np.nan, "common_share_chance": np.nan}
    return {"common_share": 1 - float(np.median(shares)) ** 2, "common_share_chance": 1 / len(shares)}


def order_facts(test: PairingTest, experts: list[int]) -> dict[str, Any] | None:
    """Another order of the experts, if one fits, which the report needs beyond the tables."""
    if (order := test.other_order) is None:
        return None
    fits = [experts[place] if place >= 0 else None for place in order.experts]
    return {"k": order.k, "p": order.p, "routers": experts, "experts": fits}


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
) -> DecomposedLayer:
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

    experts: dict[int, Decomposition] = {}
    bits = stored_bits(weights, matrix)
    for expert, result in decompose_each(
        readable(), len(usable), unit_rows, ks, settings.precision, bits, device, lambda: timed("decompose")
    ):
        experts[expert] = replace(result, energy_ER=alignment.cumulative_energy(result.energy_ER, ks))
        on_expert()
    if len(experts) < (1 if rows_ED is None else 2):
        raise BadInput(
            f"{weights.layer_name}: fewer than two experts can be used ({len(unusable)} are unusable); "
            "fix the checkpoint"
        )
    ranks, matrices = [result.rank for result in experts.values()], {}
    for index, router in enumerate(routers):
        rows = [index * len(usable) + usable.index(expert) for expert in experts]
        energies: list[Any] = [result.energy_ER[rows] for result in experts.values()]
        matrices[router] = alignment.cumulate(energies, ranks, weights.d_model, ks)
    return DecomposedLayer(experts, matrices, unusable)


# --- tables


def matrix_frames(
    layer: DecomposedLayer,
    tests: dict[str, PairingTest],
    matrix: str,
    weights: LayerWeights,
    settings: ScanSettings,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield rows of all tables for one layer and matrix, without the keys step and layer."""
    experts = list(layer.experts)
    for router, M in layer.matrices.items():
        test, keys = tests[router], {"matrix": matrix, "router": router, "fold_norm": settings.fold_norm}
        per_expert, per_layer = alignment_frames(M, test, experts, layer.unusable)
        for name, frame in {
            "alignment": per_expert,
            "alignment_layers": per_layer,
            "alignment_tests": tests_frame(M, test, experts),
            "ambiguity": pd.DataFrame([chance_at_k_star(M, settings.seed)]),
            "pairs": pairs_frame(M, experts, test.best_k, choose_k_star(per_layer)),
            "nulls": nulls_frame(M, test),
        }.items():
            yield name, frame.assign(**keys)
    nearest: dict[str, Any] = {}
    if len(experts) > 1:
        similarity, statistics, nearest = similarity_frames(layer.experts, weights.d_model)
        yield "similarity", similarity.assign(matrix=matrix)
        yield "orthogonality", statistics.assign(matrix=matrix)
    shape = (weights.d_ff * (2 if matrix == "gate_up" else 1), weights.d_model)
    random = random_rank(shape, stored_bits(weights, matrix))
    for name, frame in spectra_frames(layer, nearest, min(shape), random).items():
        yield name, frame.assign(matrix=matrix)


def alignment_frames(
    M: AlignmentMatrix, test: PairingTest, experts: list[int], unusable: dict[int, UnusableExpert]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(one row per expert and k, one row per k); skipped experts get rows without values."""
    align_KEE, ks, n = M.align_KEE, M.ks, M.n_experts
    align_KE, margin_KE = alignment.diagonal(align_KEE), alignment.margins(align_KEE)
    chance_KE = alignment.random_expectation(ks, M.rank_E, M.d_model)
    spread_K = random_spread(chance_KE.mean(axis=1), M.d_model)
    mean_K, std_K = alignment.shuffle_null(align_KEE)
    delta_KE, delta_std_K = align_KE - mean_K[:, None], null_moments(align_KEE)[1]
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
            "best": pd.array(np.repeat(ks, n) == (test.best_k or 0), dtype="boolean"),
            "random_spread": random_spread(chance_KE, M.d_model).ravel(),
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
            "accuracy_chance": 1 / n,
            "random_spread": spread_K,
            "random_std": spread_K / np.sqrt(n),
            "delta_std": delta_std_K,
            "accuracy_std": np.sqrt(1 - 1 / n) / n,
            "z_std": alignment.z_scores(delta_std_K[:, None], std_K)[:, 0],
        }
    )
    return per_expert, per_layer


def random_spread(mean: Array, d_model: int) -> Array:
    """Return the standard deviation of a random direction's alignment: Beta(k/2, (d - k)/2), mean k/d."""
    return np.sqrt(2 * mean * np.maximum(1 - mean, 0) / (d_model + 2))


def tests_frame(M: AlignmentMatrix, test: PairingTest, experts: list[int]) -> pd.DataFrame:
    """Return the layer's tests, and at which k and expert something is unusual.

    A hub is the best match of most router rows at the best k; at chance, rows choose experts at random.
    """
    n, ks, usable_K = M.n_experts, np.array(M.ks), ~M.degenerate_K
    row: dict[str, Any] = {name: getattr(test, name) for name in TEST_COLUMNS}
    row["false_calls"] = false_call_rate(n, int(usable_K.sum()))
    if test.best_k is not None:
        M_EE = M.align_KEE[M.ks.index(test.best_k)]
        second, first = np.partition(M_EE, -2, axis=1)[:, -2:].T
        wins = np.bincount(M_EE.argmax(axis=1)[first - second > alignment.TIE], minlength=n)
        most = int(wins.max())
        accuracy_K = alignment.argmax_accuracy(M.align_KEE)
        good = ks[usable_K & (accuracy_K >= IDENTIFYING_ACCURACY)]
        row |= {
            "hub_expert": experts[int(wins.argmax())],
            "hub_rows": most,
            "hub_p": min(1.0, n * float(bdtrc(most - 1, n, 1 / n))) if most else 1.0,
            "lowest_k": int(ks[np.where(usable_K, test.perm_z_K, np.inf).argmin()]),
            "last_good_k": int(good.max()) if len(good) else None,
            "last_k": int(ks[usable_K][-1]),
            "last_accuracy": float(accuracy_K[usable_K][-1]),
        }
    whole = ("best_k", "hub_expert", "hub_rows", "lowest_k", "last_good_k", "last_k")
    frame = pd.DataFrame([row]).reindex(columns=[*dict.fromkeys([*row, *whole, "hub_p", "last_accuracy"])])
    return frame.astype({**dict.fromkeys(whole, "Int64"), "hub_p": float, "last_accuracy": float})


def pairs_frame(
    M: AlignmentMatrix, experts: list[int], best_k: int | None, k_star: int | None
) -> pd.DataFrame:
    n = M.n_experts
    ks = M.ks if n <= EVERY_PAIR_UP_TO else [k for k in M.ks if k in {*FEW_KS, best_k, k_star}]
    chance_KE = alignment.random_expectation(ks, M.rank_E, M.d_model)
    return pd.DataFrame(
        {
            "k": np.repeat(ks, n * n),
            "router_index": np.tile(np.repeat(experts, n), len(ks)),
            "expert": np.tile(experts, n * len(ks)),
            "align": M.align_KEE[[M.ks.index(k) for k in ks]].ravel(),
            "random_expectation": np.repeat(chance_KE, n, axis=0).ravel(),
            "random_spread": np.repeat(random_spread(chance_KE, M.d_model), n, axis=0).ravel(),
            "best": np.repeat(ks, n * n) == (best_k or 0),
        }
    )


def nulls_frame(M: AlignmentMatrix, test: PairingTest) -> pd.DataFrame:
    """The null distribution of the mean diagonal in bins, at DENSITY_KS or else the largest usable k."""
    usable = np.array(M.ks)[~M.degenerate_K].tolist()
    columns = ("k", "bin", "left", "right", "density", "observed", "expected", "expected_std", "share_above")
    mean_K, std_K = null_moments(M.align_KEE)
    frames = []
    for k in [k for k in usable if k in DENSITY_KS] or usable[-1:]:
        index = M.ks.index(k)
        null_P = test.null_means_KP[index]
        if np.ptp(null_P) <= 1e-12:  # all pairings agree up to rounding: too narrow for bins
            null_P = np.full_like(null_P, null_P.mean())
        density, edges = np.histogram(null_P, bins=NULL_BINS, density=True)
        observed = float(alignment.diagonal(M.align_KEE)[index].mean())
        above = float((null_P >= observed - 1e-12).mean())
        bins = (k, range(NULL_BINS), edges[:-1], edges[1:], density)
        values = (*bins, observed, float(mean_K[index]), float(std_K[index]), above)
        frames.append(pd.DataFrame(dict(zip(columns, values, strict=True))))
    empty = pd.DataFrame({name: pd.Series(dtype=float) for name in columns})
    return pd.concat(frames, ignore_index=True) if frames else empty


def similarity_frames(
    experts: dict[int, Decomposition], d_model: int
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """(one row per pair of experts and k, statistics per k, the nearest expert of each)."""
    numbers, (first, second) = np.array(list(experts)), np.triu_indices(len(experts), k=1)
    ks = make_subspace_grid(len(experts), min(result.rank for result in experts.values()), d_model)
    per_k = similarities([result.leading_DK for result in experts.values()], ks)
    nearest = nearest_experts(np.asarray(per_k[0].cosine_P), len(experts), d_model)
    pairs = [
        pd.DataFrame(
            {
                "k": at.k,
                "expert_a": numbers[first],
                "expert_b": numbers[second],
                "cosine": np.nan if at.cosine_P is None else at.cosine_P,
                "overlap": at.overlap_P,
                "largest_principal_cosine": at.largest_principal_cosine_P,
                "place_a": nearest["place"][first],
                "place_b": nearest["place"][second],
                "cosine_std": d_model**-0.5,
                "overlap_chance": at.k / d_model,
                "overlap_std": overlap_std(at.k, d_model),
            }
        )
        for at in per_k
    ]
    statistics = [{"k": at.k, **orthogonality(at, d_model), "d_model": d_model} for at in per_k]
    counts = {"n_pairs_above_0_3": "Int64", "n_pairs_above_0_7": "Int64"}
    nearest["nearest"] = numbers[nearest["nearest"]]
    return pd.concat(pairs, ignore_index=True), pd.DataFrame(statistics).astype(counts), nearest


def spectra_frames(
    layer: DecomposedLayer, nearest: dict[str, Any], side: int, random: float
) -> dict[str, pd.DataFrame]:
    """Return one row per expert, one for all of them, and one per expert and drawn singular value.

    `side` is the largest possible rank, `random` the expected one of a random matrix. An expert is deficient
    that lost more directions than that, by three deviations of a Poisson count.
    """
    rows: list[dict[str, Any]] = [
        {
            "expert": expert,
            "singular_values": result.singular_values_R.astype(np.float32),
            **spectrum_statistics(result.singular_values_R),
            "fallback": result.fallback,
        }
        for expert, result in layer.experts.items()
    ]
    usable = pd.DataFrame(rows).assign(**nearest, random_rank=random)
    lost = side - random
    usable["deficient"] = side - usable["rank"] > lost + 3 * lost**0.5
    skipped = pd.DataFrame({"expert": sorted(layer.unusable)})
    kinds = {"rank": "Int64", **dict.fromkeys(("fallback", "deficient"), "boolean")}
    kinds |= dict.fromkeys({"nearest", "place"} & set(nearest), "Int64")
    whole = {
        f"{name}_{word}": getattr(usable[name], how)()
        for name in ("effective_rank", "stable_rank")
        for word, how in (("median", "median"), ("least", "min"), ("most", "max"))
    }
    spectra = [np.asarray(values, float) for values in usable["singular_values"]]
    places = [np.unique(np.geomspace(1, len(s), SPECTRUM_POINTS).round().astype(int)) for s in spectra]
    spectrum = {
        "expert": np.repeat(usable["expert"].to_numpy(), list(map(len, places))),
        "place": np.concatenate(places),
        "singular_value": np.concatenate([s[at - 1] for s, at in zip(spectra, places, strict=True)]),
    }
    return {
        "spectra": pd.concat([usable, skipped], ignore_index=True).astype(kinds),
        "spectra_layers": pd.DataFrame([{**whole, "rank": usable["rank"].max(), "n_experts": len(usable)}]),
        "spectrum": pd.DataFrame(spectrum),
    }
