"""The target's states on texts that are known already, by one pass over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_bench.engine.target import Target


class Computed:
    """What is not stored: the outputs of these layers on texts, whenever they are asked for."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """[T, K, H] in bfloat16, on the host, for each text of T tokens."""
        self.target.begin(len(texts), max(map(len, texts)))
        self.target.tap(self.layers)
        try:
            hidden = self.target.prefill(texts).hidden
        finally:
            self.target.tap(())
        assert hidden is not None
        states = hidden.unflatten(-1, (len(self.layers), -1)).to("cpu", torch.bfloat16)
        return [states[row, : len(text)] for row, text in enumerate(texts)]
