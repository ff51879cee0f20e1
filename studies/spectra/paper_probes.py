"""Probes of a trained model: expert map, load before and after the quota, documents that switch domain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from moescope.lab.batches import IGNORED, Ids, TokenRows
from moescope.types import Array, Integers, Routing

if TYPE_CHECKING:
    import pandas as pd

    from moescope.decoder.model import LabModel
    from moescope.decoder.vocabulary import Vocabulary
    from moescope.lab.config import TrainConfig

MAP_TOKENS = 256  # on which all experts of a layer are run
MIXED = 48  # documents that switch domain, at most
SHOWN = 4  # of them in the span table
SPANS = 8  # per document
LISTED = 3  # experts per span
LETTERS = 60  # of a span's text

Frames = dict[str, "pd.DataFrame"]


def probe(model: LabModel, rows: TokenRows, vocabulary: Vocabulary, train: TrainConfig) -> Frames:
    """Return rows of study_experts, study_mixed and study_spans; nothing for a model that does not route."""
    if not model.routers[0].routes:
        return {}
    model.eval()
    device, batch_size = str(next(model.parameters()).device), max(train.batch_size // train.micro_batches, 1)
    probes = Probes(model, batch_size, device, train.dtype)
    frames = {"study_experts": probes.experts(rows)}
    swaps = switching_documents(rows, MIXED)
    if swaps:
        frames["study_mixed"], frames["study_spans"] = probes.mixed(swaps, vocabulary)
    return {name: frame for name, frame in frames.items() if len(frame)}


@dataclass(frozen=True)
class Swap:
    """The second half of one row after three first halves: its own, one of its domain, one of another."""

    first_domain: str
    domain: str
    own: Ids  # with the last target
    same: Ids
    other: Ids


def switching_documents(rows: TokenRows, most: int) -> list[Swap]:
    """Return documents over all ordered pairs of domains in turn; empty where no domain has two full rows."""
    full = [
        [begin for begin, size in zip(starts, sizes, strict=True) if size == rows.length + 1]
        for starts, sizes in zip(rows.starts, rows.lengths, strict=True)
    ]
    domains = [at for at, begins in enumerate(full) if len(begins) > 1]
    half = rows.length // 2
    pairs = [(a, b) for shift in range(1, len(domains)) for a, b in shifted(domains, shift)]
    swaps: list[Swap] = []
    for number in range(most if pairs else 0):
        turn, at = divmod(number, len(pairs))
        first, second = pairs[at]
        if turn >= min(len(full[first]), len(full[second]) - 1):
            break

        def row(domain: int, place: int) -> Ids:
            begin = full[domain][place]
            return rows.streams[domain][begin : begin + rows.length + 1].astype(np.int64)

        own = row(second, turn)
        contexts = (row(second, turn + 1), row(first, turn))
        same, other = (np.concatenate([context[:half], own[half:]]) for context in contexts)
        swaps.append(Swap(rows.domains[first], rows.domains[second], own, same, other))
    return swaps


def shifted(domains: list[int], shift: int) -> list[tuple[int, int]]:
    return [(domain, domains[(at + shift) % len(domains)]) for at, domain in enumerate(domains)]


class Probes:
    """Passes of one model, and what they find."""

    def __init__(self, model: LabModel, batch_size: int, device: str, dtype: str) -> None:
        self.model, self.batch_size, self.device, self.dtype = model, batch_size, device, dtype

    @torch.no_grad()
    def run(
        self, ids_BL: Ids, mask_BL: Any, targets_BL: Ids | None, consume: Callable[[Routing], None]
    ) -> Array:
        """Run one batch and return the losses [B, L], zeros without targets."""
        ids, mask = (torch.from_numpy(part).to(self.device) for part in (ids_BL, mask_BL))
        targets = None if targets_BL is None else torch.from_numpy(targets_BL).to(self.device)
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.dtype == "bfloat16"):
            output = self.model(ids, mask, targets, consume)
        if output.token_losses_BL is None:
            return np.zeros(ids_BL.shape)
        return np.asarray(output.token_losses_BL.double().cpu().numpy())

    # --- experts

    def experts(self, rows: TokenRows) -> pd.DataFrame:
        """Return one row per layer and expert: its place on the map, its load before and after the quota."""
        import pandas as pd

        places = np.linspace(0, rows.rows - 1, min(rows.rows, self.batch_size)).astype(np.int64)
        batch = rows.batch(np.unique(places))
        inputs: list[Tensor] = []
        hooks = [
            block.mlp.experts.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
            for block in self.model.blocks
        ]
        self.run(batch.ids_BL, batch.mask_BL, None, lambda routing: None)
        for hook in hooks:
            hook.remove()
        self.model.train()  # quotas act in training only; nothing is updated without after_step
        quotas: dict[int, tuple[Array, Array]] = {}
        real_T = torch.from_numpy(batch.mask_BL.reshape(-1)).to(self.device)
        if not self.model.routers[0].experts_choose:
            self.run(batch.ids_BL, batch.mask_BL, None, lambda routing: quota_loads(routing, real_T, quotas))
        self.model.eval()
        frames = []
        for layer, block in enumerate(self.model.blocks):
            n = block.mlp.n_experts
            x_TD = inputs[layer][real_T]
            x_TD = x_TD[torch.linspace(0, len(x_TD) - 1, min(len(x_TD), MAP_TOKENS)).long()]
            cosines_EE = mean_cosines(all_outputs(block.mlp.experts, x_TD))
            at_E2, shares_2 = plane(cosines_EE)
            before_E, after_E = quotas.get(layer, (np.full(n, np.nan), np.full(n, np.nan)))
            columns: dict[str, Any] = {"layer": layer, "layer_name": f"layers.{layer}.mlp"}
            columns |= {"expert": range(n), "x": at_E2[:, 0], "y": at_E2[:, 1]}
            columns |= {"variance_share": shares_2.sum(), "before_quota": before_E, "after_quota": after_E}
            frames.append(pd.DataFrame(columns))
        return pd.concat(frames, ignore_index=True)

    # --- documents that switch domain

    def mixed(self, swaps: list[Swap], vocabulary: Vocabulary) -> tuple[pd.DataFrame, pd.DataFrame]:
        import pandas as pd

        own, same, other = (
            self.read([getattr(swap, name) for swap in swaps]) for name in ("own", "same", "other")
        )
        half = (len(swaps[0].own) - 1) // 2
        k = own.kept_by(own)[:, :, half:].sum((0, 2))  # choices in the second half, per document
        columns: dict[str, Any] = {
            "document": range(len(swaps)),
            "first_domain": [swap.first_domain for swap in swaps],
            "domain": [swap.domain for swap in swaps],
            "tokens": len(swaps[0].own) - 1 - half,
        }
        for name, read in (("own", own), ("same", same), ("other", other)):
            columns[f"loss_{name}"] = read.losses_BL[:, half:].mean(1)
            columns[f"entropy_{name}"] = read.entropy_LBL[:, :, half:].mean((0, 2))
        for name, read in (("same", same), ("other", other)):
            kept = own.kept_by(read)[:, :, half:].sum((0, 2))
            columns[f"kept_{name}"] = np.divide(kept, k, out=np.full(len(k), np.nan), where=k > 0)
        spans = span_rows(swaps[:SHOWN], other, half, vocabulary)
        return pd.DataFrame(columns), pd.DataFrame(spans)

    def read(self, documents: list[Ids]) -> ReadDocuments:
        losses, layers = [], []
        for first in range(0, len(documents), self.batch_size):
            rows = np.stack(documents[first : first + self.batch_size])
            found: list[Decision] = []
            shape = (len(rows), rows.shape[1] - 1)
            losses.append(
                self.run(
                    rows[:, :-1],
                    np.ones(shape, dtype=np.bool_),
                    np.where(rows[:, 1:] < 0, IGNORED, rows[:, 1:]),
                    lambda routing, found=found, shape=shape: found.append(decision(routing, shape)),  # type: ignore[misc]
                )
            )
            layers.append(found)
        chosen = [np.concatenate([part[at].chosen for part in layers]) for at in range(len(layers[0]))]
        entropy = [np.concatenate([part[at].entropy for part in layers]) for at in range(len(layers[0]))]
        return ReadDocuments(np.concatenate(losses), np.stack(chosen), np.stack(entropy))


@dataclass(frozen=True)
class Decision:
    chosen: NDArray[np.bool_]  # [B, L, E], whether the expert was chosen
    entropy: Array  # [B, L]


def decision(routing: Routing, shape: tuple[int, int]) -> Decision:
    chosen_TE = membership(routing.chosen_TK, routing.n_experts).cpu().numpy().astype(np.bool_)
    entropy_T = np.full(len(chosen_TE), np.nan)
    if routing.scores_TE is not None:
        scores = routing.scores_TE.double()
        entropy_T = -torch.special.xlogy(scores, scores).sum(-1).cpu().numpy()
    return Decision(chosen_TE.reshape(*shape, -1), entropy_T.reshape(shape))


@dataclass(frozen=True)
class ReadDocuments:
    losses_BL: Array
    chosen_LBLE: NDArray[np.bool_]  # layers, documents, tokens, experts
    entropy_LBL: Array

    def kept_by(self, other: ReadDocuments) -> Integers:
        """Return how many of each token's experts the other reading chose as well [layers, B, L]."""
        return np.asarray((self.chosen_LBLE & other.chosen_LBLE).sum(-1))


def membership(chosen_TK: Tensor, n_experts: int) -> Tensor:
    """Return [T, E] with 1 where the token chose the expert; -1 is an empty slot."""
    marks_TE = torch.zeros(len(chosen_TK), n_experts + 1, device=chosen_TK.device)
    marks_TE.scatter_(1, torch.where(chosen_TK < 0, n_experts, chosen_TK), 1.0)
    return marks_TE[:, :-1]


def quota_loads(routing: Routing, real_T: Tensor, found: dict[int, tuple[Array, Array]]) -> None:
    """Note the shares of slots that each expert would get, and gets after the quota, if there is one."""
    if routing.dropped_T is None or routing.selection_TE is None:
        return
    k, n = routing.chosen_TK.shape[1], routing.n_experts
    wanted_TK = routing.selection_TE.topk(k, -1).indices
    slots = int(real_T.sum()) * k
    before_E, after_E = (
        membership(chosen, n)[real_T].sum(0).double().cpu().numpy() / slots
        for chosen in (wanted_TK, routing.chosen_TK)
    )
    found[routing.layer] = (before_E, after_E)


def all_outputs(experts: Any, x_TD: Tensor) -> Tensor:
    """Return the output of every expert for every token [E, T, D]."""
    n, (tokens, width) = experts.n_experts, x_TD.shape
    numbers = torch.arange(n, device=x_TD.device)
    ends_E = ((numbers + 1) * tokens).to(torch.int32)
    with torch.no_grad():
        y_SD = experts.project(x_TD.repeat(n, 1), numbers.repeat_interleave(tokens), ends_E)
    return y_SD.view(n, tokens, width)


def mean_cosines(y_ETD: Tensor) -> Array:
    """Return the mean over tokens of the cosine of two experts' outputs for the same token [E, E]."""
    unit_ETD = functional.normalize(y_ETD.double(), dim=-1)
    flat = unit_ETD.flatten(1)
    return np.asarray((flat @ flat.T / y_ETD.shape[1]).cpu().numpy())


def plane(cosines_EE: Array) -> tuple[Array, Array]:
    """Return the experts' places on two principal axes of those cosines, and the axes' variance shares."""
    centre_EE = np.eye(len(cosines_EE)) - 1 / len(cosines_EE)
    values, vectors = np.linalg.eigh(centre_EE @ cosines_EE @ centre_EE)
    values, vectors = np.maximum(values[:-3:-1], 0.0), vectors[:, :-3:-1]
    spread = max(float(np.trace(centre_EE @ cosines_EE)), 1e-12)
    return vectors * np.sqrt(values), values / spread


def span_rows(
    swaps: list[Swap], read: ReadDocuments, half: int, vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """Return the most used experts of every span of the first documents, in the middle layer."""
    layer = len(read.chosen_LBLE) // 2
    length = read.losses_BL.shape[1]
    edges = sorted(
        {*np.linspace(0, half, SPANS // 2 + 1).astype(int)}
        | {*np.linspace(half, length, SPANS // 2 + 1).astype(int)}
    )
    rows: list[dict[str, Any]] = []
    for document, swap in enumerate(swaps):
        for first, end in pairwise(edges):
            counts_E = read.chosen_LBLE[layer, document, first:end].sum(0)
            shares_E = counts_E / max(counts_E.sum(), 1)
            text = vocabulary.decode(int(token) for token in swap.other[first:end])
            span = {
                "document": document,
                "first": int(first),
                "last": int(end) - 1,
                "layer": layer,
                "layer_name": f"layers.{layer}.mlp",
                "domain": swap.first_domain if end <= half else swap.domain,
                "text": " ".join(text.split())[:LETTERS],
            }
            best = np.argsort(-shares_E, kind="stable")[:LISTED]
            rows += [
                {**span, "expert": int(expert), "share": float(shares_E[expert])}
                for expert in best
                if shares_E[expert] > 0
            ]
    return rows
