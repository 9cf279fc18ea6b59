"""Attention masks of decoding: which places each token of a pass attends to.

All masks are built here, for the target, for drafts and for both forwards. Additive masks hold 0 where a token is seen
and the dtype's lowest number where it is not; boolean masks are true where it is seen. The columns of a mask are the
places of the cache (`cache.py`); places beyond a row's own length hold stale tokens and are always hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.models.nets.bodies import WHOLE, BlockView

Masks = Tensor | Mapping[str, Tensor]
"""One mask for all layers, or one for each kind of layer."""
READY_WIDTH = 64
"""Passes of up to this many tokens per row use a slice of a mask that is built once."""


def ancestors(parents: Tensor) -> Tensor:
    """Return [B, N + 1, N + 1], true where a column is an ancestor of the row or the row itself.

    `parents` [B, N] holds the parent of each tree node (-1: the anchor, which is row and column 0 of the result).
    """
    num_rows, width = parents.shape
    reach = torch.eye(width + 1, device=parents.device).repeat(num_rows, 1, 1)
    reach[:, 1:].scatter_(2, parents[..., None] + 1, 1.0)
    # Each product doubles the number of levels upwards that are covered.
    for _ in range(width.bit_length()):
        reach = torch.bmm(reach, reach).clamp_(max=1)
    return reach.bool()


def depths(parents: Tensor) -> Tensor:
    """Return the depth of each node [B, N + 1], 0 for the anchor, given the tree's parents [B, N]."""
    return ancestors(parents).sum(dim=-1) - 1


def causal_mask(
    cache: KVCache,
    dtype: torch.dtype,
    parents: Tensor | None = None,
    window: int | None = None,
    whole_block: bool = False,
    first: int = 0,
) -> Tensor:
    """Return an additive mask [B, 1, width, visible] for the tokens just placed: each sees its row's past and itself.

    With `whole_block` each token also sees the tokens placed after it.
    With `parents` [B, width - 1] the tokens are an anchor and a tree, and each sees only its ancestors among them.
    With a `window` a token sees only that many tokens back, itself included; in a tree, depth is the distance.
    Places before `first`, which no window reaches, are omitted: [B, 1, width, visible - first].
    """
    columns = torch.arange(first, cache.visible, device=cache.device)
    # Chains that start at the same place share one mask.
    read_at = cache.positions if cache.is_ragged or parents is not None else cache.positions[:1]
    stored_at = columns[None]
    seen_to = read_at[:, -1:].expand_as(read_at) if whole_block else read_at
    allowed = columns <= seen_to[..., None]
    if parents is not None:
        start = cache.positions[:, :1]
        is_ancestor = ancestors(parents)
        inside = (columns - start).clamp(0, parents.shape[1])
        in_tree = is_ancestor.gather(2, inside[:, None].expand(-1, parents.shape[1] + 1, -1))
        allowed &= (columns < start)[:, None] | in_tree
        read_at = start + is_ancestor.sum(dim=-1) - 1
        stored_at = torch.where(columns < start, columns, read_at.gather(1, inside))
    if window is not None:
        allowed &= stored_at[:, None] > read_at[..., None] - window
    return _additive(~allowed, dtype)[:, None].expand(len(cache.positions), -1, -1, -1)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


class TargetMasks:
    """The masks of a target's passes over one cache.

    `windows` holds the number of tokens that each kind of layer sees, the current token included (None: all).
    """

    def __init__(self, windows: Mapping[str, int | None], cache: KVCache, dtype: torch.dtype):
        self.cache, self.capacity, self.dtype = cache, cache.capacity, dtype
        # A window as large as the cache is the same as no window.
        self.windows = {kind: None if w is None or w >= self.capacity else w for kind, w in windows.items()}
        self._ready = {window: self._ready_mask(window) for window in {*self.windows.values()}}

    def _ready_mask(self, window: int | None) -> Tensor:
        """Return [1, 1, width, capacity + width]; if all rows start together, the mask of any pass is a slice of it."""
        width = min(self.capacity, READY_WIDTH)
        steps = torch.arange(width, device=self.cache.device)[:, None]
        columns = torch.arange(-self.capacity, width, device=self.cache.device)
        hidden = columns > steps if window is None else (columns > steps) | (columns <= steps - window)
        return _additive(hidden, self.dtype)[None, None]

    def build(self, described: PassMask) -> Masks:
        """Return the masks of `PassMask.build`."""
        masks = {window: self._mask(described, window) for window in self._ready}
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {kind: masks[window] for kind, window in self.windows.items()}

    def _mask(self, described: PassMask, window: int | None) -> Tensor:
        ready, starts, width = self._ready[window], described.starts, described.width
        first = 0 if window is None or not starts else max(0, min(starts) - window + 1)
        if described.is_plain and not self.cache.is_ragged and width <= ready.shape[2]:
            left = self.capacity - starts[0] + first
            mask = ready[:, :, :width, left : self.capacity + width]
            # Attention on a GPU reads 16 bytes at once, and torch does not check a mask's alignment: a misaligned
            # slice is a fault ("misaligned address"). A copy is aligned.
            mask = mask if mask.device.type == "cpu" else mask.clone(memory_format=torch.contiguous_format)
            return mask.expand(len(starts), -1, -1, -1)
        return causal_mask(self.cache, self.dtype, described.parents, window, described.whole_block, first)


@dataclass(frozen=True, slots=True)
class PassMask:
    """A description of the places of the cache that the tokens of a pass see; a mask is built only on request.

    Row b's `width` tokens have been placed from starts[b] on. Each token sees its row's past, the tokens before it in
    this pass and itself; in layers with a window only the last `windows[kind]` of these.
    """

    masks: TargetMasks
    starts: Sequence[int]
    """Empty if only the device holds the starts (a captured pass)."""
    width: int
    parents: Tensor | None = None
    """[B, width - 1]: the tokens are an anchor and a tree, and see only their ancestors among them."""
    whole_block: bool = False
    """Whether each token also sees the tokens placed after it."""

    @property
    def windows(self) -> Mapping[str, int | None]:
        """Return how many tokens each kind of layer sees, the current token included (None: all)."""
        return self.masks.windows

    @property
    def is_plain(self) -> bool:
        """Return True if each token sees all tokens placed before it, and none after it."""
        return self.parents is None and not self.whole_block

    @property
    def sees_all(self) -> bool:
        """Return True if each row's token sees the whole visible cache, so that no mask is needed."""
        return self.width == 1 and not self.masks.cache.is_ragged and not any(self.windows.values())

    def build(self) -> Masks:
        """Return an additive mask [B, 1, width, seen], or one per kind if windows differ; call before the next pass.

        The columns are the last `seen` of the visible places: with a window, places in front of all rows' windows are
        omitted (`seen_by`). A mask may be a view of a kept mask: it must not be changed.
        """
        return self.masks.build(self)


def fold_heads(mask: Tensor | None, group: int) -> Tensor | None:
    """Repeat a mask [B, 1, N or 1, visible] for the `group` query heads that share a key head.

    These heads are rows of one attention problem in `forward/layers.py`: [B, 1, group * N or 1, visible].
    """
    if mask is None or mask.shape[2] == 1 or group == 1:
        return mask
    # Rows that share a mask (stride 0) go on sharing it.
    own = mask[:1] if mask.stride(0) == 0 else mask
    return own.repeat(1, 1, group, 1).expand(len(mask), -1, -1, -1)


def fold_kinds(masks: Masks | None, kinds: Iterable[str], group: int) -> dict[str, Tensor | None]:
    """Return the folded mask of each kind of layer (`fold_heads`)."""
    if isinstance(masks, Mapping):
        return {kind: fold_heads(masks[kind], group) for kind in kinds}
    return dict.fromkeys(kinds, fold_heads(masks, group))


def seen_by(mask: Tensor | None, stored: Tensor) -> Tensor:
    """Return the stored keys or values [..., visible, D] that belong to the columns of a mask."""
    return stored if mask is None or mask.shape[-1] == stored.shape[-2] else stored[..., -mask.shape[-1] :, :]


def block_mask(cache: KVCache, columns: Tensor, view: BlockView = WHOLE) -> Tensor | None:
    """Return the mask of a DFlash block just placed [B or 1, 1, N or 1, visible], or None if all rows see everything.

    By default every slot sees its row's whole context and the whole block (DFlash, section 4.1), so only rows of
    different lengths need a mask. `columns` are the places of the cache, 0, 1, 2, ... on its device.
    """
    places, slots = columns[: cache.visible], cache.positions[..., None]
    if view == WHOLE:
        return (places <= slots[:, -1:])[:, None] if cache.is_ragged else None
    if not cache.is_ragged:
        slots = slots[:1]
    seen = places <= (slots if view.is_causal else slots[:, -1:])
    if view.window is not None and view.from_anchor:
        seen = seen & (places >= slots[:, :1] - view.window)
    elif view.window is not None:
        seen = seen & (places > slots - view.window)
        if not view.is_causal:
            seen = seen & (places < slots + view.window)
    return seen[:, None]


def pairs_mask(cache: KVCache, dtype: torch.dtype, hidden_to: Tensor) -> Tensor:
    """Return an additive mask [B, 1, N, visible] for the pairs just placed: each pair sees its row's past and itself.

    Places up to `hidden_to` [B, N] are hidden.
    """
    columns = torch.arange(cache.visible, device=cache.device)
    seen = (columns <= cache.positions[..., None]) & (columns > hidden_to[..., None])
    return _additive(~seen, dtype)[:, None]


class FrontierMask:
    """The mask of an EAGLE-3 tree that grows level by level: each node sees its row's past, its ancestors and itself.

    Each level (the frontier) has `top_k` nodes per row. Level i is written to scratch places i * top_k ... behind the
    longest row, the same for all rows. Buffers are allocated once, in the dtype and on the device of `like`.
    """

    def __init__(self, num_rows: int, top_k: int, num_scratch: int, capacity: int, like: Tensor):
        hides = torch.finfo(like.dtype).min
        self.top_k = top_k
        self._mask = like.new_zeros(num_rows, 1, top_k, capacity)
        self._unseen = like.new_full((num_rows, 1, num_scratch), hides)
        self._itself = torch.full_like(self._mask[0, 0, :, :top_k], hides).fill_diagonal_(0)
        self._columns = torch.arange(capacity, device=like.device)

    def open(self, starts: Sequence[int], start: Tensor, window: int | None = None) -> None:
        """Begin a tree: show each row its past, and hide the places from its end to the end of the longest row.

        `start` [B, 1] are the starts on the device. With a `window` only the last `window` places are shown.
        """
        self._end, self._seen = max(starts), self._unseen
        past = self._mask[..., : self._end].zero_()
        if min(starts) < self._end:
            behind = self._columns[: self._end] >= start
            past.masked_fill_(behind[:, None, None], torch.finfo(past.dtype).min)
        if window is not None:
            before = self._columns[: self._end] < start - window
            past.masked_fill_(before[:, None, None], torch.finfo(past.dtype).min)

    def grow(self, parent: Tensor, level: int, visible: int) -> Tensor:
        """Return the mask [B, 1, top_k, visible] of the frontier at this level.

        `parent` [B, top_k, 1] is the index of each node's parent in the previous frontier.
        """
        first = level * self.top_k
        self._seen = self._seen.take_along_dim(parent, dim=1)
        self._seen[..., first : first + self.top_k] = self._itself
        mask = self._mask[..., :visible]
        mask[:, 0, :, self._end :] = self._seen[..., : visible - self._end]
        return mask
