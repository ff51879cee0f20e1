"""Several processes that train one model, as torchrun starts them: who this one is, and what all of them hold
together.

Every rank must call what talks to the others equally often and in the same order. Alone, nothing is copied
and nothing waits.
"""

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
    """This process among those that train together; alone it is the first of one.

    A batch's rows lie on the ranks one after the other, as many on each, so that `gathered` rows stand where
    one process would have them.
    """

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

    def sum_with_gradients(self, amount: Tensor) -> Tensor:
        """The sum over all ranks.

        What every rank's loss has for a gradient into it comes back to every rank.
        """
        return amount if self.world == 1 else SumOverRanks.apply(amount)  # type: ignore[no-untyped-call]

    def gathered(self, rows_T: Tensor) -> Tensor:
        """The rows of all ranks; without gradients."""
        if self.world == 1:
            return rows_T
        own_T = rows_T.detach().contiguous()
        whole_T = own_T.new_empty(self.world * len(own_T), *own_T.shape[1:])
        taken = [part.view(torch.uint8) if part.dtype == torch.bool else part for part in (whole_T, own_T)]
        dist.all_gather(list(taken[0].chunk(self.world)), taken[1])  # gloo knows no bool
        return whole_T

    def own(self, whole_T: Tensor) -> Tensor:
        """This rank's part of what was made of gathered rows, row by row."""
        return whole_T if self.world == 1 else whole_T.view(self.world, -1, *whole_T.shape[1:])[self.rank]

    def picked(self, rows_T: Tensor, numbers_N: Tensor) -> Tensor:
        """The rows of those numbers among all ranks' rows; without gradients.

        Whoever has a row sends it, so that all get the same.
        """
        if self.world == 1:
            return rows_T[numbers_N].detach()
        place_N = numbers_N - self.rank * len(rows_T)
        here_N = (place_N >= 0) & (place_N < len(rows_T))
        found_N = rows_T[place_N.clamp(0, len(rows_T) - 1)]
        return self.sum(torch.where(here_N.view(-1, *[1] * (rows_T.dim() - 1)), found_N, 0))

    def tokens_a_rank(self, mask_T: Tensor) -> Tensor:
        """The real tokens of all ranks over the number of ranks; never 0.

        A rank's sum over its own tokens divided by this is its part of the mean over all tokens: ranks'
        losses count by their
        mean, since DDP averages gradients, and the mean of these parts is that mean, however the padding
        lies.
        """
        tokens = self.sum(mask_T.sum()).clamp(min=1)
        return tokens if self.world == 1 else tokens / self.world

    def of_first(self, amount: Tensor) -> Tensor:
        """The first rank's tensor, on all."""
        if self.world > 1:
            dist.broadcast(amount, 0)
        return amount

    def told(self, value: Any) -> Any:
        """What the first rank says; every rank must ask."""
        if self.world == 1:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0)
        return said[0]


ALONE = Ranks()


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks, forwards and backwards: each rank's amount acts on every rank's loss."""

    @staticmethod
    def forward(ctx: Any, amount: Tensor) -> Tensor:
        total = amount.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def check_gpus(local: int, there: int) -> None:
    """Every process has a GPU of its own: NCCL takes no two on one."""
    if local >= there:
        raise BadInput(
            f"torchrun started more processes than this machine's {there} "
            f"GPU{'s' * (there != 1)}; give --nproc-per-node {there}, or --device cpu"
        )


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The process group while it is open: NCCL on GPUs, gloo elsewhere."""
    if not started_by_torchrun():
        yield Ranks()
        return
    try:
        ranks = Ranks(
            int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
        )
    except (KeyError, ValueError):
        raise BadInput("WORLD_SIZE is set but RANK is not; start several processes with torchrun") from None
    on_gpu = device.startswith("cuda")
    if on_gpu:
        check_gpus(ranks.local, torch.cuda.device_count())
        torch.cuda.set_device(ranks.local)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks
    finally:
        if ours:
            dist.destroy_process_group()
