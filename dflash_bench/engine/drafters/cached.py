"""What drafters share that keep keys and values of their own: the cache, its places, and when it is made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.replays import Function, Replays, room_for
from dflash_bench.models.common import Rotary


class CachedDrafter:
    """`num_scratch` places in the cache are what a proposal writes to behind what is committed."""

    def __init__(self, draft: Any, num_scratch: int) -> None:
        self.draft, self.config = draft.eval(), draft.config
        self.num_scratch = num_scratch
        self.taps = self.config.target_layer_ids
        self.weight, self.device = draft.fc.weight, draft.fc.weight.device
        self.cache = KVCache(0, 0, self.device)
        self.replays: Replays | None = None
        self.starts: list[int] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.starts = [0] * num_rows
        capacity += self.num_scratch
        if self.replays is not None:
            capacity = room_for(capacity)
        if self.cache.serves(num_rows, capacity):
            return
        config = self.config
        # Like the last one, so that all layers share one buffer even where a captured pass writes first.
        self.cache = KVCache(num_rows, capacity, self.device, like=self.cache)
        if self.replays is not None:
            self.replays.moved(capacity)
        self.rotary = Rotary(
            config.head_dim, config.rope_theta, capacity, self.device, self.weight.dtype, config.rope_scaling
        )
        self.allocate(num_rows, capacity)

    def capture(self, shortest: int, longest: int) -> None:
        """Passes that have been asked for before; see `replays.py`."""
        if self.replays is not None:
            longest = min(longest + self.num_scratch, self.cache.capacity)
            if self.replays.prepare(self.cache.num_rows, shortest, longest, lambda _key: True):
                self.cache.clear()

    def replayed(self, function: Function, starts: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """`function` of places, inputs and starts, for all rows, from a capture; None where there is none."""
        if self.replays is None or len(starts) != self.cache.num_rows:
            return None
        key, num_places = tuple(one.shape[1:] for one in inputs), max(starts) + inputs[0].shape[1]
        return self.replays.run(key, function, num_places, *inputs, torch.tensor(starts))

    def allocate(self, num_rows: int, capacity: int) -> None:
        """Tensors of a drafter's own, as many rows and places as the cache has."""
        raise NotImplementedError

    def advance(self, committed: Committed) -> None:
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            self.starts[row] = start + count
