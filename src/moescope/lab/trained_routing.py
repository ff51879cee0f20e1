"""How a trained model routes: by layer on held-out documents, over checkpoints, and by its router's keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.special import erf, ndtri
from torch import Tensor

from moescope.decoder.model import LabModel, MoE
from moescope.decoder.saving import load_model
from moescope.lab.batches import TokenRows
from moescope.lab.evaluation import DocumentSample, window_batches
from moescope.routing.counts import Counts, LayerCounts
from moescope.routing.load_balance import Setting, divide
from moescope.routing.metrics import METRICS
from moescope.routing.separation import gram_chance, gram_collapse
from moescope.routing.stability import layer_stability
from moescope.run import Run
from moescope.types import Array, Integers, Routing, Tokens

LOADS = ("cv", "max_violation", "gini", "unused", "load_entropy")
SMALL = 0.01  # of the root mean square: what counts as no activation
OUTPUT_TOKENS = 512  # about, from all windows, whose outputs of all experts are compared
CHECKPOINTS = 4  # last ones, compared for stability
STABILITY_TOKENS = 4096  # of text, about
BINS_PER_DECADE = 4  # of the tokens per expert of a router with keys

Row = dict[str, Any]


class Activations:
    """Statistics of every block's FFN output on the device, over all passes, tokens and channels."""

    def __init__(self) -> None:
        # by layer: count and sums of the powers 1 to 4, largest size, histogram of sizes
        self.layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def add(self, layer: int, output_TD: Tensor) -> None:
        values = output_TD.flatten()
        if not len(values):
            return
        x = values.double()
        square, size = x * x, values.float().abs()
        sums = torch.stack(
            [part.sum() for part in (torch.ones_like(x), x, square, square * x, square * square)]
        )
        # The upper half of a float32 are the bits of a bfloat16: bins 1/128 of a power of two wide.
        histogram = torch.bincount(size.view(torch.int32) >> 16, minlength=1 << 15)
        if layer in self.layers:
            before, largest, counts = self.layers[layer]
            self.layers[layer] = (before + sums, torch.maximum(largest, size.max()), counts + histogram)
        else:
            self.layers[layer] = (sums, size.max(), histogram)

    def rows(self, layer: int) -> Iterator[Row]:
        """Yield metrics with the values of independent Gaussian outputs."""
        sums, largest, histogram = self.layers[layer]
        n, *powers = sums.tolist()
        mean, second, third, fourth = (power / n for power in powers)
        rms, variance = np.sqrt(second), second - mean**2
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        yield levels("ffn_rms", float(rms), np.nan, np.nan)
        yield levels("ffn_kurtosis", central / variance**2 if variance > 0 else np.nan, 3.0, np.nan)
        median = -float(ndtri(-np.expm1(np.log(0.5) / n) / 2))  # of the largest of n
        yield levels("ffn_peak", largest.item() / max(rms, 1e-300), median, np.nan)
        # smaller values, to a part of the bound's bin
        counts, place = histogram.cpu().numpy(), int(np.float32(SMALL * rms).view(np.int32))
        below = counts[: place >> 16].sum() + (place & 0xFFFF) / 0x10000 * counts[place >> 16]
        yield levels("ffn_sparsity", float(below) / n, float(erf(SMALL / np.sqrt(2))), np.nan)


@torch.no_grad()
def measure_routing(
    model: LabModel,
    sample: DocumentSample,
    trained: tuple[str, ...],
    batch_size: int,
    device: str,
    dtype: str,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return a training's rows of study_layers and study_loads.

    Metrics are over the documents of the `trained` domains; loads and entropies are also by domain. A dense
    model has statistics of its activations only.
    """
    domains = list(dict.fromkeys(sample.domains))
    numbers = np.array([domains.index(name) for name in sample.domains])
    in_loss_M = np.array([name in trained for name in domains])
    counts = Counts((len(domains), 1), in_loss_M.tolist(), ["routing_entropy"], False, order=False)
    activations = Activations()
    inputs: dict[int, list[Tensor]] = {}  # of every block: tokens from all documents
    spread_W = spread_tokens([len(window.tokens) - 1 for window in sample.windows])

    def consume(routing: Routing) -> None:
        counts.consume(replace(routing, tokens=tokens))

    def keep(block: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> None:
        assert isinstance(block, MoE)
        inputs.setdefault(block.layer, []).append(args[0][kept_S].float())
        activations.add(block.layer, output[0][counts_T])

    hooks = [block.mlp.register_forward_hook(keep) for block in model.eval().blocks]
    for first, batch in zip(count(0, batch_size), window_batches(sample, batch_size), strict=False):
        ids_BL, mask_BL = (torch.from_numpy(part).to(device) for part in (batch.ids_BL, batch.mask_BL))
        rows, length = ids_BL.shape
        domain_B = numbers[batch.domain_B]
        domain_T = torch.from_numpy(domain_B.repeat(length)).to(device)
        counts_T = torch.from_numpy(in_loss_M).to(device)[domain_T] & mask_BL.view(-1)
        none_T = torch.zeros_like(domain_T)
        tokens = Tokens(rows, ids_BL.view(-1), mask_BL.view(-1), none_T, none_T, domain_T, none_T)
        kept = [
            row * length + place
            for row, places in enumerate(spread_W[first : first + batch_size])
            if in_loss_M[domain_B[row]]
            for place in places
        ]
        kept_S = torch.tensor(kept, dtype=torch.long, device=device)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16"):
            model(ids_BL, mask_BL, consume=consume)
    for hook in hooks:
        hook.remove()
    layers, loads = [], []
    for of_layer in counts.layers():
        layer = of_layer.layer
        place = {"layer": layer, "layer_name": f"layers.{layer}.mlp"}
        found = [*activations.rows(layer)]
        if of_layer.n_experts > 1:
            found += load_rows(of_layer, in_loss_M, domains)
            found += similarity_rows(model.blocks[layer].mlp, torch.cat(inputs[layer]))
            loads += [
                {**place, "domain": domain, "expert": expert, "tokens": int(tokens)}
                for domain, counts_E in zip(domains, of_layer.counts_MBE[:, 0], strict=True)
                for expert, tokens in enumerate(counts_E)
            ]
        layers += [{**place, "domain": "", **row} for row in found]
    return pd.DataFrame(layers), pd.DataFrame(loads)


def spread_tokens(lengths: list[int]) -> list[list[int]]:
    """Return evenly spaced places in each window, equally many as far as it has them, at least one."""
    each = max(OUTPUT_TOKENS // max(len(lengths), 1), 1)
    return [
        [int((place + 0.5) * length / min(each, length)) for place in range(min(each, length))]
        for length in lengths
    ]


def metric_row(name: str, values: Array, setting: Setting) -> Row:
    metric: Any = METRICS[name]
    return levels(name, float(metric.function(values)), metric.chance(setting), metric.collapse(setting))


def load_rows(counts: LayerCounts, in_loss_M: Array, domains: list[str]) -> Iterator[Row]:
    """Yield load, overlap and entropy with their chance levels and values at collapse."""
    load_E = counts.counts_MBE[in_loss_M].sum((0, 1)).astype(float)
    tokens_M, entropy_M = counts.sums("decided")[:, 0], counts.sums("routing_entropy")[:, 0]
    tokens, n = int(counts.sums("tokens")[in_loss_M].sum()), len(load_E)
    pairs_EE: Any = counts.pairs_EE
    pairs = float((pairs_EE.sum() - pairs_EE.trace()) / max(tokens, 1))
    setting = Setting(tokens, n, float(load_E.sum() / max(tokens, 1)), pairs=pairs)
    yield from (metric_row(name, load_E, setting) for name in LOADS)
    least = setting.mean_draw(lambda load: load.min(-1) / load.mean(-1))
    yield levels("min_over_mean", float(load_E.min() / max(load_E.mean(), 1e-300)), least, 0.0)
    yield metric_row("expert_overlap", pairs_EE, setting)
    scopes: list[tuple[str, Any]] = [("", in_loss_M), *((name, at) for at, name in enumerate(domains))]
    for domain, of_domains in scopes:
        entropy = divide(entropy_M[of_domains].sum(), tokens_M[of_domains].sum())
        yield {**levels("routing_entropy", float(entropy), float(np.log(n)), 0.0), "domain": domain}


def similarity_rows(block: MoE, x_TD: Tensor) -> Iterator[Row]:
    """Yield how orthogonal router rows and the outputs of the experts are."""
    n, width = block.n_experts, x_TD.shape[1]
    view = block.router.linear_view()
    rows = getattr(block.router, "weight", None) if view is None else view.rows_ED
    if isinstance(rows, Tensor) and rows.dim() == 2 and len(rows) == n:
        metric: Any = METRICS["gram_orthogonality"]
        value = metric.function(rows.detach().double().cpu().numpy())
        yield levels("gram_orthogonality", value, gram_chance(n, rows.shape[1]), gram_collapse(n))
    value = output_orthogonality(block, x_TD)
    yield levels("output_orthogonality", value, gram_chance(n, width), gram_collapse(n))


def output_orthogonality(block: MoE, x_TD: Tensor) -> float:
    """1 - sqrt(sum over i != j of the mean over tokens of cos^2(E_i(x), E_j(x)))/(n sqrt 2).

    The scale of Gram orthogonality: random directions score 1 - sqrt((n - 1)/(2 n D)), equal outputs
    1 - sqrt((n - 1)/(2 n)). All experts read the same tokens, chosen or not.
    """
    n, tokens = block.n_experts, len(x_TD)
    expert_S1 = torch.arange(n, device=x_TD.device).repeat_interleave(tokens)[:, None]
    outputs_SD = block.experts(x_TD.repeat(n, 1), expert_S1, torch.ones_like(expert_S1, dtype=x_TD.dtype))
    unit_TED = torch.nn.functional.normalize(outputs_SD.view(n, tokens, -1).double(), dim=-1).transpose(0, 1)
    squares_EE = (unit_TED @ unit_TED.mT).square().mean(0)
    off_diagonal = squares_EE.sum() - squares_EE.trace()
    return 1 - float((off_diagonal.sqrt() / (n * np.sqrt(2))).item())


def levels(metric: str, value: float, chance: float, collapse: float) -> Row:
    return {"metric": metric, "value": value, "chance": chance, "collapse": collapse}


# --- stability over checkpoints


STABILITY = {  # column of study_runs -> of the rows of two checkpoints
    "consistency": "routing_consistency",
    "consistency_chance": "routing_consistency_chance",  # of independent choices with the same loads
    "usage_sigma": "usage_sigma",
    "kendall_tau": "kendall_tau",  # NaN where all usages are equal
}


def checkpoint_stability(
    checkpoints: Sequence[tuple[int, Path]], rows: TokenRows, device: str
) -> dict[str, float]:
    """Compare the last few (step, folder); empty for a single one, or where nothing is routed.

    Means over layers; consistency and Kendall's tau of consecutive checkpoints, usage_sigma of all.
    """
    last = sorted(checkpoints)[-CHECKPOINTS:]
    chosen = {step: chosen_experts(folder, rows, device) for step, folder in last if len(last) > 1}
    n_experts = [number for _, number in next(iter(chosen.values()), [])]
    if max(n_experts, default=0) < 2:
        return {}
    steps = [*chosen]
    layers = []
    for layer, number in enumerate(n_experts):
        pairs = pd.DataFrame(layer_stability({step: chosen[step][layer][0] for step in steps}, number))
        pairs = pairs.set_index(["step_a", "step_b"])
        near = pairs.loc[[*pairwise(steps)]].mean()
        layers.append({**near, "usage_sigma": pairs["usage_sigma"][steps[0], steps[-1]]})
    mean = pd.DataFrame(layers).mean()
    return {column: float(mean[name]) for column, name in STABILITY.items()}


@torch.no_grad()
def chosen_experts(folder: Path, rows: TokenRows, device: str) -> list[tuple[Integers, int]]:
    """Return every layer's chosen experts for real tokens of the rows, and its number of experts."""
    model, _ = load_model(folder, device)
    most = max(STABILITY_TOKENS // rows.length, 1)
    batch = rows.batch(np.unique(np.linspace(0, rows.rows - 1, min(rows.rows, most)).astype(np.int64)))
    layers: list[tuple[Integers, int]] = []
    real_T = torch.from_numpy(batch.mask_BL.reshape(-1)).to(device)

    def consume(routing: Routing) -> None:
        layers.append((routing.chosen_TK[real_T].cpu().numpy().astype(np.int64), routing.n_experts))

    ids_BL, mask_BL = (torch.from_numpy(part).to(device) for part in (batch.ids_BL, batch.mask_BL))
    model(ids_BL, mask_BL, consume=consume)
    return layers


# --- routers with keys


def key_tables(run: Run, model: LabModel, step: int) -> dict[str, pd.DataFrame]:
    """Return the key tables of the middle layer: usage in the last window of training, and the final keys."""
    layer, k = model.config.layers // 2, model.config.top_k
    router: Any = model.routers[layer]
    load = run.table("load")
    rows = load[(load["step"] == load["step"].max()) & (load["layer"] == layer)].sort_values("expert")
    counts_E = rows["tokens"].to_numpy(float)
    tokens = round(counts_E.sum() / k)
    key_map, of_keys = router.key_map(counts_E)
    tables = {
        "key_metrics": pd.DataFrame([*usage_metrics(counts_E, tokens, k).to_dict("records"), of_keys]),
        "key_histogram": usage_histogram(counts_E, tokens, k),
        "key_map": key_map,
    }
    place = {"step": step, "layer": layer, "layer_name": rows["layer_name"].iloc[0]}
    return {name: frame.assign(**place) for name, frame in tables.items()}


def usage_metrics(counts_E: Array, tokens: int, top_k: int) -> pd.DataFrame:
    """Return value, chance (random balanced routing) and collapse of gini, load_entropy_bits and used.

    `used` is the share of experts with any token; `counts_E` the tokens per expert of `tokens` with `top_k`.
    """
    setting = Setting(tokens, len(counts_E), top_k)
    rows = [metric_row(name, counts_E, setting) for name in ("gini", "load_entropy_bits", "unused")]
    rows[-1] = levels("used", *(1 - rows[-1][column] for column in ("value", "chance", "collapse")))
    return pd.DataFrame(rows)


def usage_histogram(counts_E: Array, tokens: int, top_k: int) -> pd.DataFrame:
    """Return the histogram of tokens per expert in four bins per decade.

    `expected_experts` is the mean over 200 random balanced routings. The first row, 0 to 1, counts experts
    without a token.
    """
    draws = Setting(tokens, len(counts_E), top_k).draws
    highest = max(float(counts_E.max()), float(draws.max()), 1.0)
    bins = int(np.floor(np.log10(highest) * BINS_PER_DECADE)) + 1
    edges = np.concatenate([[0.0], 10 ** (np.arange(bins + 1) / BINS_PER_DECADE)])
    columns = {"bin_left": edges[:-1], "bin_right": edges[1:], "experts": np.histogram(counts_E, edges)[0]}
    return pd.DataFrame({**columns, "expected_experts": np.histogram(draws, edges)[0] / len(draws)})
