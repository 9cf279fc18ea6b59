"""What a draft speaks with: the target's embedding and head, and which of its tokens a draft may say."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

UNSPOKEN = -1
"""In place of a token that is not in a reduced vocabulary."""


@dataclass(frozen=True, slots=True)
class Voice:
    """`head` [Vd, H]: the rows of the target's head for `token_ids` [Vd], ascending; `numbers` [V] is the way back."""

    embedding: Tensor
    head: Tensor
    token_ids: Tensor
    numbers: Tensor

    @classmethod
    def of(cls, embedding: Tensor, head: Tensor, counts: Tensor | None = None, size: int | None = None) -> Voice:
        """The target's whole vocabulary, or the `size` tokens that `counts` [V] says are the most frequent."""
        token_ids = torch.arange(len(head))
        if counts is not None and size is not None and size < len(head):
            token_ids = counts.argsort(descending=True, stable=True)[:size].sort().values
        numbers = torch.full((len(head),), UNSPOKEN)
        numbers[token_ids] = torch.arange(len(token_ids))
        token_ids, numbers = token_ids.to(head.device), numbers.to(head.device)
        return cls(embedding.detach(), head.detach()[token_ids], token_ids, numbers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of normed states [..., H], a draft's or the target's last, over this vocabulary [..., Vd]."""
        return hidden @ self.head.to(hidden.dtype).T
