"""Data-parallel training: one process per GPU, with its share of the work; all end with the same draft.

`torchrun --nproc-per-node N -m dflash_bench.cli train ...`, or accelerate's launcher, starts the processes on one
machine or several. Gradients are averaged after each step rather than by DistributedDataParallel, because a step's
forward pass has several parts.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import distributed, nn
from torch.distributed.distributed_c10d import Store

from dflash_bench.core.errors import UserError, first_line
from dflash_bench.models import parallel

Item = TypeVar("Item")
LIMIT = timedelta(minutes=30)
"""How long a process waits for the others in a step. A process that dies is noticed at once; a machine that is cut off
is not."""
POLL_S = 0.2


class Counter:
    """A sum of numbers."""

    def __init__(self) -> None:
        self.sum = 0

    def __call__(self, number: int) -> int:
        self.sum += number
        return self.sum


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """`size` processes, of which this is number `rank`; only the first writes files and reports progress."""

    rank: int = 0
    size: int = 1
    store: Store | None = None
    """Keys and values that the processes share; None for a process that is alone."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return this process's part of the items."""
        return list(items[self.rank :: self.size])

    def counter(self, name: str) -> Callable[[int], int]:
        """Return a function that adds to a number, which starts at 0 and is shared by all processes, and returns it."""
        return partial(self.store.add, name) if self.store is not None else Counter()

    def wait(self) -> None:
        """Wait until all processes arrive here, which none may do much later than another."""
        if self.size > 1:
            distributed.barrier()

    def from_first(self, name: str, work: Callable[[], Item]) -> Item:
        """Return what `work` returns in the first process, for which the others wait, however long it takes.

        The name must be new. If the first process dies, its launcher ends the others.
        """
        if self.store is None:
            return work()
        value: Any = None
        if self.is_first:
            value = work()
            self.store.set(name, "done")
        while not self.store.check([name]):
            time.sleep(POLL_S)
        result: Item = self.broadcast(value)
        return result

    def require_same(self, folder: Path) -> None:
        """Raise UserError, in every process, unless all of them see the same folder."""
        if self.size == 1:
            return
        mark = folder / f"seen-by-all-{self.broadcast(uuid4().hex)}"
        if self.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        self.wait()
        share = self.mean(float(mark.exists()), torch.device("cpu"))
        if self.is_first:
            mark.unlink()
        if share < 1:
            raise UserError(
                f"{round((1 - share) * self.size)} of {self.size} processes do not see the files that the first one "
                f"writes into {folder}; give an --out on a disk that all machines share"
            )

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
        store = parallel.connect(LIMIT)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} processes of this training cannot be connected: {first_line(error)}; "
            "start them with torchrun"
        ) from error
    atexit.register(_leave)
    return ProcessGroup(distributed.get_rank(), distributed.get_world_size(), store), device


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
