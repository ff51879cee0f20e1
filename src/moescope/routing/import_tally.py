"""An imported trace counted.

The same tally, sample and tables as of a model that ran here, as far as the trace tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from moescope.errors import BadInput
from moescope.execution.documents import Window, fingerprint
from moescope.execution.recorded import Shape, Stretch
from moescope.routing.collect import Traced
from moescope.routing.rows import Corpus
from moescope.routing.sample import Sample
from moescope.routing.tally import Tally
from moescope.types import Integers, Routing, Tokens


@dataclass
class Counting:
    """What is known of the trace while it is read."""

    shape: Shape
    domains: list[str] = field(default_factory=list)
    seen: dict[int, int] = field(default_factory=dict)  # document -> its domain
    hashes: dict[int, int] = field(default_factory=dict)  # document -> its content
    layers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def domain(self, stretch: Stretch) -> int:
        if stretch.domain not in self.domains:
            self.domains.append(stretch.domain)
        index = self.domains.index(stretch.domain)
        self.seen.setdefault(stretch.document, index)
        return index

    def settle_layers(self, stretch: Stretch) -> Integers:
        """Which of the trace's layers are MoE layers, as indices.

        Their numbers are kept for all that follows.
        """
        given = stretch.chosen_TLK.shape[1]
        kept = np.flatnonzero((stretch.chosen_TLK >= 0).any((0, 2)))
        if stretch.layers:
            numbers = stretch.layers
        elif self.shape.moe_layers and given == self.shape.all_layers:
            kept, numbers = np.array(self.shape.moe_layers), tuple(range(given))
        elif self.shape.moe_layers and given == len(self.shape.moe_layers):
            kept, numbers = np.arange(given), self.shape.moe_layers
        else:
            numbers = tuple(range(given))
        self.layers = tuple(numbers[index] for index in kept)
        self.names = tuple(
            (stretch.layer_names or [f"layer {number}" for number in numbers])[index] for index in kept
        )
        return kept


def count_trace(stretches: Iterable[Stretch], shape: Shape) -> Traced:
    """Counts and sample of a trace.

    Without gates the first slot counts as the first choice, as servers write it.
    """
    counting, gates_known = Counting(shape), True
    stretches = list(stretches)
    names = list(dict.fromkeys(stretch.domain for stretch in stretches))
    counting.domains, tally = names, Tally(len(names))
    kept: Integers | None = None
    sample: Sample | None = None
    phases = {stretch.phase for stretch in stretches}
    main = "prefill" if "prefill" in phases else "decode"
    for stretch in stretches:
        if kept is None:
            kept = counting.settle_layers(stretch)
            sample = Sample(list(counting.layers))
            width = stretch.chosen_TLK.shape
        if stretch.chosen_TLK.shape[1:] != width[1:]:
            raise BadInput(
                f"document {stretch.document} has [layers, k] = "
                f"{list(stretch.chosen_TLK.shape[1:])}, the first has {list(width[1:])}; import "
                "traces of one model"
            )
        gates_known &= stretch.gates_TLK is not None
        add_stretch(tally, stretch, kept, counting)
        if sample is not None and stretch.phase == main and stretch.ids_T is not None:
            after = np.append(stretch.ids_T[1:], -1)
            sample.add(
                window_of(stretch, counting),
                stretch.chosen_TLK[:, kept].transpose(1, 0, 2).astype(np.int16),
                after,
                np.full(len(after), -1),
            )
    documents = [list(counting.seen.values()).count(index) for index in range(len(names))]
    probe = sample.probe() if sample is not None and sample.windows else None
    return Traced(
        Corpus(names, documents),
        tally.moved(),
        main,
        dict(zip(counting.layers, counting.names, strict=True)),
        probe,
        gates=gates_known,
        decisions=False,
    )


def window_of(stretch: Stretch, counting: Counting) -> Window:
    ids = stretch.ids_T if stretch.ids_T is not None else stretch.chosen_TLK.reshape(-1)
    return Window(
        stretch.document,
        counting.domain(stretch),
        stretch.start,
        ids,
        -1,
        content_of(stretch, counting),
        fingerprint(ids, stretch.start) / 2**64,
    )


def content_of(stretch: Stretch, counting: Counting) -> int:
    """63 bits of the document's content, the same for all its stretches."""
    if stretch.document not in counting.hashes:
        ids = stretch.ids_T if stretch.ids_T is not None else stretch.chosen_TLK.reshape(-1)
        counting.hashes[stretch.document] = fingerprint(ids) >> 1
    return counting.hashes[stretch.document]


def add_stretch(tally: Tally, stretch: Stretch, kept: Integers, counting: Counting) -> None:
    window = window_of(stretch, counting)
    n = len(stretch.chosen_TLK)
    if not n:
        return
    tokens = Tokens(
        1,
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.bool),
        torch.full((n,), stretch.document),
        torch.arange(stretch.start, stretch.start + n),
        torch.full((n,), window.domain),
        torch.full((n,), window.bucket),
        stretch.phase,
    )
    k = stretch.chosen_TLK.shape[2]
    for index, layer, name in zip(kept, counting.layers, counting.names, strict=True):
        chosen_TK = torch.from_numpy(stretch.chosen_TLK[:, index].copy())
        if stretch.gates_TLK is not None:
            gates_TK = torch.from_numpy(stretch.gates_TLK[:, index].copy())
        else:
            gates_TK = torch.arange(k, 0, -1).expand(n, k).double()  # their order is all that counts
        tally.add(Routing(layer, name, counting.shape.n_experts, chosen_TK, gates_TK, tokens))


def renamed(traced: Traced, names: dict[int, str]) -> Traced:
    """With the checkpoint's names of the layers, where a model was given that has them all."""
    return replace(traced, layer_names=names) if set(traced.layer_names) <= set(names) else traced
