"""Fewer launches on a GPU: the operations between two matrix products of a layer are fused into one kernel, or two.

In a captured step of one token a small operation costs about as much as its launch, and a layer has a dozen of them.
Inductor fuses norm, rotation and their product with the angles into one kernel, and activation and product into
another; the residual is added by the product itself, in place. Kernels are compiled when a run begins, and compared
with the usual operations, which stay in use if that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import first_line
from dflash_bench.engine.forward.native import Gated, Layer, NativeForward, Norm, Tables
from dflash_bench.engine.forward.native_drafts import NativeDFlash, NativeEagle3, NativeMTP
from dflash_bench.engine.graphs import TOLERANCES

Compile = Callable[..., Any]
TRIED = (1, 5)
"""Numbers of tokens to test: code is compiled for one token, and for any larger number."""

MOST_COMPILED = 64
"""Maximum number of shapes that a function is compiled for."""


def turn_by_copying(heads: Tensor, norm: Norm | None, tables: Tables) -> None:
    """Compute `native.rotate` by copying, the only way in which a compiler can write into a part of a tensor."""
    normed = heads if norm is None else norm(heads)
    heads.copy_(torch.addcmul(normed * tables[0], normed.roll(heads.shape[-1] // 2, -1), tables[1]))


def gate(wide: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(gate) * up [T, I] for gate and up side by side [T, 2 * I]."""
    left, right = wide.chunk(2, dim=-1)
    return activation(left) * right


@dataclass(frozen=True, slots=True)
class FusedGated:
    """Computes `native.Gated`, down(activation(gate(x)) * up(x)), and adds it to the stream in place."""

    usual: Gated
    gate: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]

    def __call__(self, normed: Tensor) -> Tensor:
        return self.usual.down(self._wide(normed))

    def added_to(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return x [T, H] plus the feed-forward, in place: x, attention's output plus the stream, has no other user.

        Out of place, the product would begin with a copy of x.
        """
        down = self.usual.down
        if down.bias is not None:
            x += down.bias
        return x.addmm_(self._wide(normed), down.weight)

    def _wide(self, normed: Tensor) -> Tensor:
        return self.gate(self.usual.gate_up(normed), self.usual.activation)


class Fused:
    """The compiled functions. The results of `compile_function`, torch's, take any number of tokens."""

    def __init__(self, compile_function: Compile = torch.compile) -> None:
        self._turn = compile_function(turn_by_copying, dynamic=False)
        self._gate = compile_function(gate, dynamic=False)

    def rotate(self, heads: Tensor, norm: Norm | None, tables: Tables) -> None:
        """Compute `native.rotate` for heads [B, N, heads, D]; the compiler sees rows and tokens as one dimension."""
        rows, width = heads.shape[:2]
        cos, sin = (_any_number(table.expand(rows, width, -1, -1).flatten(0, 1)) for table in tables)
        self._turn(_any_number(heads.view(rows * width, *heads.shape[2:])), norm, (cos, sin))

    def gate(self, wide: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        gated: Tensor = self._gate(_any_number(wide), activation)
        return gated

    def layer(self, usual: Layer) -> Layer:
        """Return the layer with fused operations; mixtures of experts stay unfused."""
        feed = usual.feed
        if isinstance(feed, Gated) and feed.down.scale is None:
            feed = FusedGated(feed, self.gate)
        return replace(usual, attention=replace(usual.attention, rotate=self.rotate), feed=feed)


def _any_number(x: Tensor) -> Tensor:
    """Mark the first dimension as dynamic, unless its size is 1, for which code is compiled separately."""
    if len(x) > 1:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def fuse(network: object, compile_function: Compile = torch.compile) -> list[Layer]:
    """Fuse the operations of a target's or a draft's network, if it is ours; return its previous layers."""
    if isinstance(network, NativeEagle3):
        usual = [network.layer, *network.further]
        network.layer, *network.further = fused_layers(usual, compile_function)
        return usual
    if isinstance(network, NativeMTP):
        usual = [network.layer]
        (network.layer,) = fused_layers(usual, compile_function)
        return usual
    if isinstance(network, NativeDFlash):
        usual = network.plain_layers
        network.use(fused_layers(usual, compile_function))
        return usual
    if isinstance(network, NativeForward):
        usual, network.layers = network.layers, fused_layers(network.layers, compile_function)
        return usual
    return []


def unfuse(network: object, usual: list[Layer]) -> None:
    """Restore the previous layers of a target's network."""
    if isinstance(network, NativeForward):
        network.layers = usual


@torch.inference_mode()
def fused_layers(layers: list[Layer], compile_function: Compile = torch.compile) -> list[Layer]:
    """Return the layers with fused operations, or unchanged if compiling fails here or the results differ."""
    fused = Fused(compile_function)
    made = [fused.layer(layer) for layer in layers]
    alike = {_kind(layer): (layer, new) for layer, new in zip(layers, made, strict=True)}
    try:
        # The same functions are compiled for every network.
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILED):
            for usual, new in alike.values():
                for num_tokens in TRIED:
                    _refuse_unlike(usual, new, num_tokens)
    except (ImportError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as problem:
        reason = first_line(problem)
        logging.getLogger(__name__).warning("small operations are not fused: %s: %s", type(problem).__name__, reason)
        return layers
    return made


def _kind(layer: Layer) -> tuple[object, ...]:
    """Return the properties that the compiled code of a layer depends on."""
    attention = layer.attention
    return attention.num_heads, attention.num_kv, attention.head_dim, attention.head_norm is None, type(layer.feed)


def _refuse_unlike(usual: Layer, fused: Layer, num_tokens: int) -> None:
    """Raise ValueError unless rotated heads and the feed-forward agree, on random numbers."""
    attention, weight = usual.attention, usual.attention.output.weight
    numbers = torch.Generator().manual_seed(num_tokens)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(weight.device, weight.dtype)

    num_turned = attention.num_heads + attention.num_kv
    heads = drawn(1, num_tokens, num_turned + attention.num_kv, attention.head_dim)
    angles = drawn(1, num_tokens, 1, attention.head_dim)
    pair = [heads.clone(), heads.clone()]
    for layer, mine in zip((usual, fused), pair, strict=True):
        layer.attention.rotate(mine[:, :, :num_turned], attention.head_norm, (angles.cos(), angles.sin()))
    _refuse_difference(*pair)
    x = drawn(num_tokens, usual.feed_norm.weight.shape[-1])
    _refuse_difference(usual.feed.added_to(x.clone(), x), fused.feed.added_to(x.clone(), x))


def _refuse_difference(usual: Tensor, fused: Tensor) -> None:
    difference = float((usual.float() - fused.float()).abs().max() / usual.float().abs().max())
    if not difference <= TOLERANCES.get(usual.dtype, TOLERANCES[torch.float32]):
        raise ValueError(f"results differ by {difference:.1e}")
