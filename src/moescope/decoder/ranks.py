"""The processes that train one model under torchrun: this one's rank, and collective operations.

Every rank must call the collectives equally often and in the same order. With one process, nothing is copied
and nothing waits.
"""

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
    """This process among those that train together.

    Consecutive equal shares of a batch's rows lie on the ranks, so `gather_rows` returns them in the order of
    a single process.
    """

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, amount: Tensor) -> Tensor:
        """Return the sum over all ranks, without gradients."""
        if self.world == 1:
            return amount
        total = amount.detach().clone()
        dist.all_reduce(total)
        return total

    def sum_with_gradients(self, amount: Tensor) -> Tensor:
        """Return the sum over all ranks; every rank's gradient into it flows back to every rank."""
        return amount if self.world == 1 else SumOverRanks.apply(amount)  # type: ignore[no-untyped-call]

    def gather_rows(self, rows_T: Tensor) -> Tensor:
        """Return the rows of all ranks, without gradients."""
        if self.world == 1:
            return rows_T
        local_T = rows_T.detach().contiguous()
        all_T = local_T.new_empty(self.world * len(local_T), *local_T.shape[1:])
        output, local = (
            part.view(torch.uint8) if part.dtype == torch.bool else part for part in (all_T, local_T)
        )
        dist.all_gather(list(output.chunk(self.world)), local)  # gloo does not support bool
        return all_T

    def local_rows(self, rows_T: Tensor) -> Tensor:
        """Return this rank's part of gathered rows."""
        return rows_T if self.world == 1 else rows_T.view(self.world, -1, *rows_T.shape[1:])[self.rank]

    def select_rows(self, rows_T: Tensor, index_N: Tensor) -> Tensor:
        """Return the rows of these indices among all ranks' rows, on every rank, without gradients."""
        if self.world == 1:
            return rows_T[index_N].detach()
        place_N = index_N - self.rank * len(rows_T)
        here_N = (place_N >= 0) & (place_N < len(rows_T))
        local_N = rows_T[place_N.clamp(0, len(rows_T) - 1)]
        return self.sum(torch.where(here_N.view(-1, *[1] * (rows_T.dim() - 1)), local_N, 0))

    def tokens_per_rank(self, mask_T: Tensor) -> Tensor:
        """Return the real tokens of all ranks over the number of ranks; never 0.

        A rank's sum over its tokens divided by this is its part of the mean over all tokens: DDP averages
        gradients, and the mean of these parts is that mean, however padding is distributed.
        """
        tokens = self.sum(mask_T.sum()).clamp(min=1)
        return tokens if self.world == 1 else tokens / self.world

    def broadcast(self, amount: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank."""
        if self.world > 1:
            dist.broadcast(amount, 0)
        return amount

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective: every rank must call it."""
        if self.world == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until every rank gets here."""
        self.broadcast_object(None)


ALONE = Ranks()


class SumOverRanks(torch.autograd.Function):
    """The sum over ranks, forwards and backwards: each rank's amount enters every rank's loss."""

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


def check_gpus(local: int, gpus: int) -> None:
    """Reject more processes than GPUs: NCCL needs one GPU per process."""
    if local >= gpus:
        raise BadInput(
            f"torchrun started more processes than this machine's {gpus} GPU{'s' * (gpus != 1)}; "
            f"pass --nproc-per-node {gpus}, or --device cpu"
        )


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """Open the process group: NCCL on GPUs, gloo elsewhere."""
    if not started_by_torchrun():
        yield Ranks()
        return
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), local)
    except (KeyError, ValueError):
        raise BadInput("WORLD_SIZE is set but RANK is not; start several processes with torchrun") from None
    on_gpu = device.startswith("cuda")
    if on_gpu:
        check_gpus(ranks.local, torch.cuda.device_count())
        torch.cuda.set_device(ranks.local)
    opened = not dist.is_initialized()
    if opened:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks
    finally:
        if opened:
            dist.destroy_process_group()
