"""Data-parallel training: one process per GPU, with its share of the work; all end with the same draft.

`torchrun --nproc-per-node N -m dflash_bench.cli train ...`, or accelerate's launcher, starts the processes on one
machine or several. Gradients are averaged after each step rather than by DistributedDataParallel, because a step's
forward pass has several parts.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed, nn

from dflash_bench.core.errors import UserError, first_line
from dflash_bench.models import parallel

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """`size` processes, of which this is number `rank`; only the first writes files and reports progress."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return this process's part of the items."""
        return list(items[self.rank :: self.size])

    def wait(self) -> None:
        """Wait until all processes arrive here."""
        if self.size > 1:
            distributed.barrier()

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average the gradients of all processes, in place."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def mean(self, value: float, device: torch.device) -> float:
        """Return the mean of all processes' values: NaN if any value is."""
        if self.size == 1:
            return value
        total = torch.tensor(value, device=device, dtype=torch.float64)
        distributed.all_reduce(total)
        return float(total) / self.size

    def broadcast(self, value: Item) -> Item:
        """Return the value of the first process."""
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]


ALONE = ProcessGroup()


def init_distributed(device: str) -> tuple[ProcessGroup, str]:
    """Return the group of processes that were started together, and this process's device.

    Without a launcher this process is alone. Raises UserError if the processes cannot be connected, or if this machine
    has fewer GPUs than processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE, device
    if device != "cpu":
        device = _own_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        parallel.connect()
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} processes of this training cannot be connected: {first_line(error)}; "
            "start them with torchrun"
        ) from error
    atexit.register(_leave)
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size()), device


def _own_gpu(local_rank: int) -> str:
    """Return the GPU of the process with this number on its machine, and make it torch's default."""
    if local_rank >= (num_gpus := torch.cuda.device_count()):
        raise UserError(
            f"process {local_rank} of this machine has no GPU: there are {num_gpus}; start as many processes as there "
            "are GPUs, or give --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"


def _leave() -> None:
    """End the threads that communicate with other processes: a thread that outlives the interpreter aborts it."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
