"""How a trained model treats held-out documents in evaluation: routing and activations by layer, loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.special import erf, ndtri
from torch import Tensor

from moescope.decoder.model import LabModel, MoE
from moescope.lab.evaluation import DocumentSample, window_batches
from moescope.routing.decision import routing_entropy
from moescope.routing.load_balance import Setting
from moescope.routing.metrics import METRICS
from moescope.routing.separation import gram_chance, gram_collapse
from moescope.types import Array, Routing

if TYPE_CHECKING:
    import pandas as pd

LOADS = ("cv", "max_violation", "gini", "unused", "load_entropy")
SMALL = 0.01  # of the root mean square: what counts as no activation
OUTPUT_TOKENS = 512  # about, from all windows, whose outputs of all experts are compared

Row = dict[str, Any]


@dataclass(frozen=True)
class LayerCount:
    """One layer's decisions: M domains, E experts."""

    counts_ME: Array
    tokens_M: Array
    entropy_M: Array  # sums over tokens; NaN for a router without probabilities
    pairs_EE: Array  # tokens of the trained domains that chose both


class Counter:
    """Counts of every layer on the device, over all passes."""

    def __init__(self, n_domains: int, trained_M: Tensor):
        self.n_domains, self.trained_M = n_domains, trained_M
        self.sums: dict[int, tuple[Tensor, ...]] = {}

    def add(self, routing: Routing, domain_T: Tensor) -> None:
        """Count one layer's decisions; the domain of padding is `n_domains`."""
        n, device = routing.n_experts, routing.chosen_TK.device
        member_TE = torch.zeros(len(routing.chosen_TK), n + 1, device=device)
        member_TE.scatter_(1, torch.where(routing.chosen_TK < 0, n, routing.chosen_TK), 1.0)
        of_domain_TM = torch.nn.functional.one_hot(domain_T, self.n_domains + 1)[:, :-1].float()
        chosen_TE = member_TE[:, :-1]
        trained_TE = chosen_TE * (of_domain_TM @ self.trained_M.float())[:, None]
        entropy_T = torch.full_like(domain_T, torch.nan, dtype=torch.float32)
        if routing.scores_TE is not None:
            entropy_T = routing_entropy(routing).float()
        parts = (
            of_domain_TM.T @ chosen_TE,
            of_domain_TM.sum(0),
            of_domain_TM.T @ torch.where(domain_T < self.n_domains, entropy_T, 0.0),
            trained_TE.T @ chosen_TE,
        )
        before = self.sums.get(routing.layer)
        added = [part.double() for part in parts]
        if before is not None:
            added = [old + part for old, part in zip(before, added, strict=True)]
        self.sums[routing.layer] = tuple(added)

    def layers(self) -> dict[int, LayerCount]:
        return {layer: LayerCount(*(part.cpu().numpy() for part in of)) for layer, of in self.sums.items()}


class Activations:
    """Statistics of every block's FFN output on the device, over all passes, tokens and channels."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}  # count and sums of the powers 1 to 4
        self.largest: dict[int, Tensor] = {}
        self.histograms: dict[int, Tensor] = {}

    def add(self, layer: int, output_TD: Tensor) -> None:
        values = output_TD.flatten()
        if not len(values):
            return
        x = values.double()
        square = x * x
        count = torch.full_like(x[0], len(x))
        sums = torch.stack([count, x.sum(), square.sum(), (square * x).sum(), (square * square).sum()])
        size = values.float().abs()
        # The upper half of a float32 are the bits of a bfloat16: bins 1/128 of a power of two wide.
        histogram = torch.bincount(size.view(torch.int32) >> 16, minlength=1 << 15)
        if layer not in self.sums:
            self.sums[layer], self.largest[layer], self.histograms[layer] = sums, size.max(), histogram
            return
        self.sums[layer] += sums
        self.largest[layer] = torch.maximum(self.largest[layer], size.max())
        self.histograms[layer] += histogram

    def rows(self, layer: int) -> Iterator[Row]:
        """Yield metrics with the values of independent Gaussian outputs."""
        n, *powers = self.sums[layer].tolist()
        mean, second, third, fourth = (power / n for power in powers)
        rms, variance = np.sqrt(second), second - mean**2
        central = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        yield levels("ffn_rms", float(rms), np.nan, np.nan)
        yield levels("ffn_kurtosis", central / variance**2 if variance > 0 else np.nan, 3.0, np.nan)
        median = -float(ndtri(-np.expm1(np.log(0.5) / n) / 2))  # of the largest of n
        yield levels("ffn_peak", self.largest[layer].item() / max(rms, 1e-300), median, np.nan)
        share = self.count_below(layer, SMALL * rms) / n
        yield levels("ffn_sparsity", share, float(erf(SMALL / np.sqrt(2))), np.nan)

    def count_below(self, layer: int, bound: float) -> float:
        """Return how many values are smaller, to a part of the bound's bin."""
        counts = self.histograms[layer].cpu().numpy()
        place = int(np.float32(bound).view(np.int32))
        whole, part = place >> 16, (place & 0xFFFF) / 0x10000
        return float(counts[:whole].sum() + part * counts[whole])


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
    import pandas as pd

    domains = list(dict.fromkeys(sample.domains))
    numbers = np.array([domains.index(name) for name in sample.domains])
    in_loss_M = np.array([name in trained for name in domains])
    counter, activations = Counter(len(domains), torch.from_numpy(in_loss_M).to(device)), Activations()
    inputs: dict[int, list[Tensor]] = {}  # of every block: tokens from all documents
    spread_W = spread_tokens([len(window.tokens) - 1 for window in sample.windows])
    model.eval()
    for first, batch in zip(count(0, batch_size), window_batches(sample, batch_size), strict=False):
        domain_BL = np.where(batch.mask_BL, numbers[batch.document_B][:, None], len(domains))
        domain_T = torch.from_numpy(domain_BL.reshape(-1)).to(device)
        counts_T = torch.from_numpy(np.append(in_loss_M, False)[domain_BL.reshape(-1)]).to(device)
        ids_BL, mask_BL = (torch.from_numpy(part).to(device) for part in (batch.ids_BL, batch.mask_BL))
        length = ids_BL.shape[1]
        kept = [
            row * length + place
            for row, places in enumerate(spread_W[first : first + batch_size])
            if in_loss_M[numbers[batch.document_B[row]]]
            for place in places
        ]
        kept_S = torch.tensor(kept, dtype=torch.long, device=device)

        def consume(routing: Routing, domain_T: Tensor = domain_T) -> None:
            counter.add(routing, domain_T)

        def keep_input(block: torch.nn.Module, args: tuple[Any, ...], kept_S: Tensor = kept_S) -> None:
            assert isinstance(block, MoE)
            inputs.setdefault(block.layer, []).append(args[0][kept_S].float())

        def add_output(
            block: torch.nn.Module, _: Any, output: tuple[Tensor, Any], counts_T: Tensor = counts_T
        ) -> None:
            assert isinstance(block, MoE)
            activations.add(block.layer, output[0][counts_T])

        hooks = [block.mlp.register_forward_pre_hook(keep_input) for block in model.blocks]
        hooks += [block.mlp.register_forward_hook(add_output) for block in model.blocks]
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=dtype == "bfloat16"):
            model(ids_BL, mask_BL, consume=consume)
        for hook in hooks:
            hook.remove()
    layers, loads = [], []
    blocks = {block.mlp.layer: block.mlp for block in model.blocks}
    for layer, counts in counter.layers().items():
        place = {"layer": layer, "layer_name": f"layers.{layer}.mlp"}
        layers += [{**place, "domain": "", **row} for row in activations.rows(layer)]
        if counts.counts_ME.shape[1] < 2:  # dense
            continue
        rows = [
            *load_rows(counts, in_loss_M, domains),
            *similarity_rows(blocks[layer], torch.cat(inputs[layer])),
        ]
        layers += [{**place, "domain": "", **row} for row in rows]
        loads += [
            {**place, "domain": domain, "expert": expert, "tokens": int(tokens)}
            for domain, counts_E in zip(domains, counts.counts_ME, strict=True)
            for expert, tokens in enumerate(counts_E)
        ]
    return pd.DataFrame(layers), pd.DataFrame(loads)


def spread_tokens(lengths: list[int]) -> list[list[int]]:
    """Return evenly spaced places in each window, equally many as far as it has them, at least one."""
    each = max(OUTPUT_TOKENS // max(len(lengths), 1), 1)
    parts = [min(each, length) for length in lengths]
    return [
        [int((place + 0.5) * length / part) for place in range(part)]
        for length, part in zip(lengths, parts, strict=True)
    ]


def load_rows(counts: LayerCount, in_loss_M: Array, domains: list[str]) -> Iterator[Row]:
    """Yield load, overlap and entropy with their chance levels and values at collapse."""
    load_E = counts.counts_ME[in_loss_M].sum(0)
    tokens, n = int(counts.tokens_M[in_loss_M].sum()), len(load_E)
    k = float(load_E.sum() / max(tokens, 1))
    pairs = float((counts.pairs_EE.sum() - counts.pairs_EE.trace()) / max(tokens, 1))
    setting = Setting(tokens, n, k, pairs=pairs)
    for name in LOADS:
        metric = METRICS[name]
        assert metric.function is not None
        yield levels(name, float(metric.function(load_E)), metric.chance(setting), metric.collapse(setting))
    least = setting.mean_draw(lambda load: load.min(-1) / load.mean(-1))
    yield levels("min_over_mean", float(load_E.min() / max(load_E.mean(), 1e-300)), least, 0.0)
    overlap = METRICS["expert_overlap"]
    assert overlap.function is not None
    value = overlap.function(counts.pairs_EE)
    yield levels("expert_overlap", value, overlap.chance(setting), overlap.collapse(setting))
    entropy = counts.entropy_M[in_loss_M].sum() / max(tokens, 1)
    yield levels("routing_entropy", float(entropy), float(np.log(n)), 0.0)
    for domain, total, of_domain in zip(domains, counts.entropy_M, counts.tokens_M, strict=True):
        row = levels("routing_entropy", float(total / max(of_domain, 1)), float(np.log(n)), 0.0)
        yield {**row, "domain": domain}


def similarity_rows(block: MoE, x_TD: Tensor) -> Iterator[Row]:
    """Yield how orthogonal router rows and the outputs of the experts are."""
    n, width = block.n_experts, x_TD.shape[1]
    view = block.router.linear_view()
    rows = getattr(block.router, "weight", None) if view is None else view.rows_ED
    if isinstance(rows, Tensor) and rows.dim() == 2 and len(rows) == n:
        metric = METRICS["gram_orthogonality"]
        assert metric.function is not None
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
