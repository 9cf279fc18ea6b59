"""A key-value cache that is allocated once. Each row has its own length, and rolling back only shortens it.

Before a forward pass, `place` says where its tokens go; then the layers write. The token at position t of a row is
stored at index t, so anything beyond a row's length is stale: it is masked, and overwritten by the next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_bench.models.nets.layers import Rotary


class KVCache:
    """Keys and values [B, heads, capacity, D] per layer, allocated at a layer's first write.

    A layer's buffers are on the device of its keys, as the layers of one model may be spread over devices. If made
    `like` another cache that every layer has written to, buffers of the same shape and device share one tensor, so that
    they can be moved together.
    """

    def __init__(self, num_rows: int, capacity: int, device: torch.device, like: KVCache | None = None) -> None:
        self.num_rows, self.capacity, self.device = num_rows, capacity, device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._stacks: list[Tensor] = []
        self._pairs: dict[int, Tensor] = {}
        self._rows = torch.arange(num_rows, device=device)[:, None]
        self._steps = torch.arange(capacity, device=device)
        self._start: int | None = 0
        self._slots: slice | None = None
        self._visible = 0
        self.positions = self._steps[None, :0]
        self._elsewhere: dict[torch.device, tuple[Tensor, Tensor]] = {}
        if like is not None:
            self._allocate(like._layers)

    def place(self, starts: Sequence[int], width: int, first: int = 0) -> None:
        """Say that the next writes are `width` tokens per row, from each row's start on.

        They are for as many rows as there are starts, from row `first` on; what is written and seen is of these alone.
        """
        self._slots = None if len(starts) == self.num_rows else slice(first, first + len(starts))
        self._visible = max(starts) + width
        if self._visible > self.capacity:
            raise IndexError(f"{self._visible} tokens do not fit into a cache of {self.capacity}")
        # If all rows start at the same place (a single row always does), we can write a slice, without an index.
        self._start = starts[0] if min(starts) == max(starts) else None
        if self._start is not None:
            self.positions = self._steps[None, self._start : self._visible].expand(len(starts), -1)
        else:
            self.positions = to_device(starts, self.device)[:, None] + self._steps[:width]
        self._elsewhere.clear()

    def place_at(self, starts: Tensor, width: int, num_places: int) -> None:
        """`place` for all rows by starts [B] on the device, which the host does not know; all see `num_places`."""
        self._slots, self._start, self._visible = None, None, num_places
        self.positions = starts[:, None] + self._steps[:width]
        self._elsewhere.clear()

    def serves(self, num_rows: int, capacity: int) -> bool:
        """Clear the cache and return True if it can be used again for this size, else return False."""
        if self.num_rows != num_rows or self.capacity < capacity:
            return False
        self.clear()
        return True

    @torch.inference_mode()
    def clear(self) -> None:
        """Set everything to zero. A mask does not stop NaN (0 * NaN), so nothing of a broken generation may stay."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer.zero_()

    @property
    def visible(self) -> int:
        """How many tokens every row can see; those beyond a row's own length must be masked."""
        return self._visible

    @property
    def is_ragged(self) -> bool:
        return self._start is None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, heads, width, D] where `place` said; returns everything visible, as views."""
        if layer not in self._layers:
            self._allocate({layer: (keys, values)})
        stored = [self._of_slots(buffer) for buffer in self._layers[layer]]
        for buffer, new in zip(stored, (keys, values), strict=True):
            if self._start is not None:
                buffer[:, :, self._start : self._visible] = new
            else:
                rows, positions = self.places_on(buffer.device)
                buffer[rows, :, positions] = new.transpose(1, 2)
        return stored[0][:, :, : self._visible], stored[1][:, :, : self._visible]

    def write_pair(self, layer: int, pair: Tensor) -> tuple[Tensor, Tensor]:
        """`write` for keys and values of one shape, side by side [2, B, heads, width, D]: one copy instead of two."""
        if layer not in self._layers:
            self._allocate({layer: (pair[0], pair[1])})
        visible = self._store(self._pairs[layer], pair)
        return visible[0], visible[1]

    def write_all(self, layers: Tensor) -> None:
        """`write_pair` for all layers at once [layers, 2, B, heads, width, D], which share one buffer from then on."""
        if not self._layers:
            self._allocate({layer: (pair[0], pair[1]) for layer, pair in enumerate(layers)})
        self._store(self._stacks[0].unflatten(0, (-1, 2)), layers)

    def _store(self, buffers: Tensor, new: Tensor) -> Tensor:
        """Put [..., B, heads, width, D] where `place` said; returns everything visible, as a view."""
        stored = buffers if self._slots is None else buffers[..., self._slots, :, :, :]
        if self._start is not None:
            stored[..., self._start : self._visible, :] = new
        else:
            rows, positions = self.places_on(stored.device)
            # Indices that stand apart come first: [B, width, ..., heads, D].
            stored[..., rows, :, positions, :] = new.movedim((-4, -2), (0, 1))
        return stored[..., : self._visible, :]

    def _of_slots(self, buffer: Tensor) -> Tensor:
        return buffer if self._slots is None else buffer[self._slots]

    def places_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows [B, 1], counted from the first one placed, and positions [B, width]; moved to each device only once."""
        rows = self._rows[: len(self.positions)]
        if device == self.device:
            return rows, self.positions
        if device not in self._elsewhere:
            self._elsewhere[device] = (rows.to(device), self.positions.to(device, non_blocking=True))
        return self._elsewhere[device]

    def keep_path(self, starts: Sequence[int], path: Tensor) -> None:
        """Move the tokens of a tree path [B, M], indices counted from each row's start, to the start of that row.

        If every path is 0, 1, 2, ... nothing has to move, and there is no need to call this (`Verdict.last`).
        """
        width = path.shape[1]
        start = to_device(starts, self.device)[:, None]
        source, target = start + path, start + self._steps[:width]
        for stack in self._stacks:
            rows, to, where = (x.to(stack.device, non_blocking=True) for x in (self._rows, target, source))
            # The right side is gathered before anything is written, so the two may overlap.
            if self.num_rows == 1:
                stack[:, :, :, starts[0] : starts[0] + width] = stack.index_select(3, where[0])
            else:
                stack[:, rows, :, to] = stack[:, rows, :, where]

    def _allocate(self, like: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Buffers for layers with such keys and values; those of the same shape and device share one tensor."""
        alike: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for layer, pair in like.items():
            for i, x in enumerate(pair):
                alike.setdefault((x.shape[1], x.shape[3], x.dtype, x.device), []).append((layer, i))
        parts: dict[tuple[int, int], Tensor] = {}
        for (heads, size, dtype, device), places in alike.items():
            # Zeros, not uninitialised memory: masked positions are still multiplied, and NaN would spread.
            shape = (len(places), self.num_rows, heads, self.capacity, size)
            self._stacks.append(torch.zeros(shape, dtype=dtype, device=device))
            parts.update(zip(places, self._stacks[-1], strict=True))
            self._pairs |= {
                layer: self._stacks[-1][at : at + 2]
                for at, (layer, i) in enumerate(places)
                if i == 0 and (layer, 1) in places[at + 1 : at + 2]
            }
        self._layers.update({layer: (parts[layer, 0], parts[layer, 1]) for layer in like})


def rotations(rotary: Rotary, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Tables for the tokens just placed, [B or 1, width, 1, D]."""
    if cache.is_ragged:
        cos, sin = rotary.at(cache.positions)
    else:
        cos, sin = rotary.between(cache.visible - cache.positions.shape[1], cache.visible)
    return cos.transpose(1, 2), sin.transpose(1, 2)


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Integers on the device, without waiting for the work that is queued there."""
    return torch.tensor(values).to(device, non_blocking=True)
