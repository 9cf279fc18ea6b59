"""The processes of one training, one for each GPU: each takes its share of the work, and all end with the same draft.

`accelerate launch --multi_gpu -m dflash_bench.cli train ...` or torchrun starts them. Gradients are averaged after each
step, which is what data-parallel training comes to where a step's forward pass has several parts.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed, nn

from dflash_bench.core.errors import UserError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Crew:
    """`size` processes, of which this is number `rank`; the first one writes and speaks."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's part."""
        return list(items[self.rank :: self.size])

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            distributed.barrier()

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients, in place."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
                parameter.grad /= self.size

    def mean(self, value: float, device: torch.device) -> float:
        """Of all processes; no number if it is none in any of them."""
        if self.size == 1:
            return value
        total = torch.tensor(value, device=device, dtype=torch.float64)
        distributed.all_reduce(total)
        return float(total) / self.size

    def told(self, value: Item) -> Item:
        """What the first process has."""
        if self.size == 1:
            return value
        held = [value]
        distributed.broadcast_object_list(held)
        return held[0]


ALONE = Crew()


def assembled(device: str) -> tuple[Crew, str]:
    """This process's place among those that were started together, and its device. Raises UserError without accelerate.

    Without a launcher it is alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE, device
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise UserError("several processes need accelerate: pip install accelerate") from error
    state = PartialState(cpu=device == "cpu")
    atexit.register(_leave)
    return Crew(state.process_index, state.num_processes), str(state.device)


def _leave() -> None:
    """Ends the threads that talk to the others: one that outlives the interpreter aborts the process."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
