"""Several processes that train one model, as torchrun starts them: who this one is, and sums over all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from moescope.errors import BadInput


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together; alone it is the first of one."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, amount: Tensor) -> Tensor:
        """The sum over all ranks; without gradients."""
        if self.world == 1:
            return amount
        total = amount.detach().clone()
        dist.all_reduce(total)
        return total

    def told(self, value: Any) -> Any:
        """What the first rank says; every rank must ask."""
        if self.world == 1:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The process group while it is open: NCCL on GPUs, gloo elsewhere."""
    if not started_by_torchrun():
        yield Ranks()
        return
    try:
        ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
    except (KeyError, ValueError):
        raise BadInput("WORLD_SIZE is set but RANK is not; start several processes with torchrun") from None
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(ranks.local)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks
    finally:
        if ours:
            dist.destroy_process_group()
