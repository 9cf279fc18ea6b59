"""A KV cache that is allocated once. Each row has its own length, and rolling back only shortens it.

Before a forward pass, `place` sets where its tokens go; then the layers write. The token at position t of a row is
stored at index t, so everything beyond a row's length is stale: it is masked (`masks.py`), and overwritten by the next
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_bench.models.nets.layers import Rotary


class KVCache:
    """Keys and values [B, heads, capacity, D] per layer, allocated at a layer's first write.

    A layer's buffers are on the device of its keys, as a model's layers may be spread over devices. If the cache is
    made `like` a cache that every layer has written to, buffers of the same shape and device share one tensor, so that
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
        self._row_slice: slice | None = None
        self._visible = 0
        self.starts: Sequence[int] = ()
        """The placed rows' starts; empty if only the device holds them."""
        self.positions = self._steps[None, :0]
        self._elsewhere: dict[torch.device, tuple[Tensor, Tensor]] = {}
        if like is not None:
            self._allocate(like._layers)

    def place(self, starts: Sequence[int], width: int, first: int = 0) -> None:
        """Place the next writes: `width` tokens per row, from each row's start on.

        Only the len(starts) rows from row `first` on are written and visible. Raises IndexError if they do not fit.
        """
        self._row_slice = None if len(starts) == self.num_rows else slice(first, first + len(starts))
        self.starts, self._visible = starts, max(starts) + width
        if self._visible > self.capacity:
            raise IndexError(f"{self._visible} tokens do not fit into a cache of {self.capacity}")
        # If all rows start at the same place (as a single row always does), we write a slice, without an index.
        self._start = starts[0] if min(starts) == max(starts) else None
        if self._start is not None:
            self.positions = self._steps[None, self._start : self._visible].expand(len(starts), -1)
        else:
            self.positions = to_device(starts, self.device)[:, None] + self._steps[:width]
        self._elsewhere.clear()

    def place_at(self, starts: Tensor, width: int, num_places: int) -> None:
        """Place writes of all rows by starts [B] that only the device holds; all rows see `num_places` places."""
        self._row_slice, self._start, self._visible, self.starts = None, None, num_places, ()
        self.positions = starts[:, None] + self._steps[:width]
        self._elsewhere.clear()

    def serves(self, num_rows: int, capacity: int) -> bool:
        """Clear the cache and return True if it can be reused for this size, else return False."""
        if self.num_rows != num_rows or self.capacity < capacity:
            return False
        self.clear()
        return True

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero all buffers: a mask does not stop NaN (0 * NaN), so NaN from a broken generation must not stay."""
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer.zero_()

    @property
    def visible(self) -> int:
        """Return how many places every row can see; places beyond a row's own length must be masked."""
        return self._visible

    @property
    def is_ragged(self) -> bool:
        return self._start is None

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, heads, width, D] where they were placed; return views [B, heads, visible, D]."""
        if layer not in self._layers:
            self._allocate({layer: (keys, values)})
        stored = [self._placed_rows(buffer) for buffer in self._layers[layer]]
        for buffer, new in zip(stored, (keys, values), strict=True):
            if self._start is not None:
                buffer[:, :, self._start : self._visible] = new
            else:
                rows, positions = self.places_on(buffer.device)
                buffer[rows, :, positions] = new.transpose(1, 2)
        return stored[0][:, :, : self._visible], stored[1][:, :, : self._visible]

    def write_pair(self, layer: int, pair: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of one shape [2, B, heads, width, D], as `write` does, in one copy instead of two."""
        if layer not in self._layers:
            self._allocate({layer: (pair[0], pair[1])})
        visible = self._store(self._pairs[layer], pair)
        return visible[0], visible[1]

    def write_all(self, layers: Tensor) -> None:
        """Store all layers [layers, 2, B, heads, width, D] at once, as in `write_pair`; they then share one buffer."""
        if not self._layers:
            self._allocate({layer: (pair[0], pair[1]) for layer, pair in enumerate(layers)})
        self._store(self._stacks[0].unflatten(0, (-1, 2)), layers)

    def _store(self, buffers: Tensor, new: Tensor) -> Tensor:
        """Store [..., B, heads, width, D] where it was placed; return a view [..., B, heads, visible, D]."""
        stored = buffers if self._row_slice is None else buffers[..., self._row_slice, :, :, :]
        if self._start is not None:
            stored[..., self._start : self._visible, :] = new
        else:
            rows, positions = self.places_on(stored.device)
            # Separated index tensors move to the front: [B, width, ..., heads, D].
            stored[..., rows, :, positions, :] = new.movedim((-4, -2), (0, 1))
        return stored[..., : self._visible, :]

    def _placed_rows(self, buffer: Tensor) -> Tensor:
        return buffer if self._row_slice is None else buffer[self._row_slice]

    def places_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return rows [B, 1], counted from the first placed row, and positions [B, width], copied once per device."""
        rows = self._rows[: len(self.positions)]
        if device == self.device:
            return rows, self.positions
        if device not in self._elsewhere:
            self._elsewhere[device] = (rows.to(device), self.positions.to(device, non_blocking=True))
        return self._elsewhere[device]

    def stack(self, num_layers: int, heads: int, size: int, dtype: torch.dtype) -> Tensor:
        """Return the buffers of all layers [2 * layers, B, heads, capacity, D], allocating them if necessary.

        A layer's keys come before its values. All layers must be of one shape.
        """
        if not self._layers:
            shape = torch.empty(1, heads, 0, size, dtype=dtype, device=self.device)
            self._allocate(dict.fromkeys(range(num_layers), (shape, shape)))
        assert len(self._stacks) == 1 and self._stacks[0].dtype == dtype
        return self._stacks[0]

    @property
    def first_row(self) -> int:
        """Return the index of the first placed row."""
        return 0 if self._row_slice is None else int(self._row_slice.start)

    def keep_path(self, starts: Sequence[int], path: Tensor) -> None:
        """Move the tokens of an accepted tree path [B, M], counted from each row's start, to that start.

        Paths 0, 1, 2, ... need no move, and hence no call (`Verdict.last`).
        """
        width = path.shape[1]
        start = to_device(starts, self.device)[:, None]
        source, target = start + path, start + self._steps[:width]
        for stack in self._stacks:
            rows, to, where = (x.to(stack.device, non_blocking=True) for x in (self._rows, target, source))
            # The right side is gathered before anything is written, so both may overlap.
            if self.num_rows == 1:
                stack[:, :, :, starts[0] : starts[0] + width] = stack.index_select(3, where[0])
            else:
                stack[:, rows, :, to] = stack[:, rows, :, where]

    def _allocate(self, like: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Allocate buffers for layers with keys and values as in `like`; equal shapes on a device share a tensor."""
        alike: dict[tuple[int, int, torch.dtype, torch.device], list[tuple[int, int]]] = {}
        for layer, pair in like.items():
            for i, x in enumerate(pair):
                alike.setdefault((x.shape[1], x.shape[3], x.dtype, x.device), []).append((layer, i))
        parts: dict[tuple[int, int], Tensor] = {}
        for (heads, size, dtype, device), places in alike.items():
            # Zeros, not uninitialised memory: masked places are still multiplied, and NaN would spread.
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
    """Return the rotary tables of the tokens just placed, [B or 1, width, 1, D] each."""
    if cache.is_ragged:
        cos, sin = rotary.at(cache.positions)
    else:
        cos, sin = rotary.between(cache.visible - cache.positions.shape[1], cache.visible)
    return cos.transpose(1, 2), sin.transpose(1, 2)


def on_host(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return integers on the host, pinned for a GPU: copying from other memory would make the host wait."""
    return torch.tensor(values, pin_memory=device.type == "cuda")


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return integers [B] or [B, N] on the device, without waiting for the work that is queued there."""
    return on_host(values, device).to(device, non_blocking=True)
