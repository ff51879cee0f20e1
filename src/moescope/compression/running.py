"""The experts of a running model, replaced in place and put back.

A plan can be tried before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moescope.checkpoint.source import in_memory
from moescope.compression.applying import PARTS
from moescope.families import read_moe
from moescope.families.writing import stacks_of
from moescope.types import ExpertWeights, LayerWeights


class RunningExperts:
    """A model's experts as its family reads them. What is put in place is what the model then runs with."""

    def __init__(self, model: nn.Module):
        self.tensors: dict[str, Tensor] = dict(model.state_dict())
        self.layers: dict[int, LayerWeights] = read_moe(in_memory(model, "the running model")).layers

    def places(self, layer: int, expert: int) -> dict[str, Tensor]:
        """Views of the model's own memory, in [out, in], by the names of `ExpertWeights`."""
        found = {}
        weights = self.layers[layer]
        for name, stack in stacks_of(weights).items():
            parts = stack.stored
            assert parts is not None
            tensor = self.tensors[parts.tensor_name(expert)]
            if parts.whole is not None:
                tensor = tensor.view(weights.n_experts, *parts.shape)[expert]
            found[PARTS[name]] = parts.view(tensor)
        return found

    @torch.no_grad()
    def put(self, layer: int, expert: int, new: ExpertWeights) -> None:
        for name, place in self.places(layer, expert).items():
            place.copy_(getattr(new, name))

    @contextmanager
    def replaced(self, layer: int, new: Mapping[int, ExpertWeights]) -> Iterator[None]:
        """Those experts in place while inside; the model's own again afterwards."""
        own = {
            expert: {name: place.clone() for name, place in self.places(layer, expert).items()}
            for expert in new
        }
        try:
            for expert, weights in new.items():
                self.put(layer, expert, weights)
            yield
        finally:
            for expert, parts in own.items():
                self.put(layer, expert, ExpertWeights(**parts))
