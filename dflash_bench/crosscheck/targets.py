"""A target as servers change it: computed in another type, or with weights that were rounded to few bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_bench.models.quantizing import linear_layers

GROUP = 32
"""Weights that share a scale, as in the simplest formats of llama.cpp (Q8_0, Q4_0)."""


@torch.no_grad()
def round_weights(model: Any, bits: int) -> None:
    """Rounds the weights of the decoder's linear layers in place, symmetrically and to nearest."""
    decoder = model.get_decoder() or model
    for name in linear_layers(model):
        weight = decoder.get_submodule(name).weight.data
        weight.copy_(rounded(weight, bits))


def rounded(weight: Tensor, bits: int) -> Tensor:
    """[rows, columns] with a scale for every 32 columns, or one a row where these do not come out even."""
    groups = weight.float().unflatten(1, (-1, GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]))
    most = 2 ** (bits - 1) - 1
    scale = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / most
    near: Tensor = (groups / scale).round() * scale
    return near.flatten(1).to(weight.dtype)
