"""What a training step reads: a batch of packed rows, and where such rows come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows [R, N]: `document` numbers the samples in a row, `position` restarts with each sample."""

    ids: Tensor
    weights: Tensor
    document: Tensor
    position: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in (self.ids, self.weights, self.document, self.position)))

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Additive [R, 1, N, N]: causal, and never across samples."""
        same = self.document[:, :, None] == self.document[:, None, :]
        allowed = same & (self.position[:, :, None] >= self.position[:, None, :])
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


class Data(Protocol):
    """Packed rows: ids [R, N], answer flags [R, N], and the target's states at each place."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def answer(self) -> Tensor: ...

    @property
    def num_held_out(self) -> int:
        """How many of the last rows are never trained on."""
        ...

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """A batch and its features [R, N, len(layers) * H]: the outputs of these layers, side by side."""
        ...

    def final(self, index: Sequence[int]) -> Tensor:
        """The target's last states [R, N, H], ready for its head."""
        ...
