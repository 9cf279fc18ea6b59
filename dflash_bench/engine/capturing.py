"""Captures passes on a GPU and fuses their small operations, and reports why if it cannot.

Passes are captured as CUDA graphs by default on a GPU, and compiled only on request (`graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import Captures, Drafter
from dflash_bench.engine.drafters.draft_model import ModelDrafter
from dflash_bench.engine.forward.hf import HFForward
from dflash_bench.engine.forward.layers import Gated, Layer, Norm, Tables
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.forward.native_drafts import NativeDFlash, NativeEagle3, NativeMTP
from dflash_bench.engine.graphs import (
    NO_COMPILER,
    NO_HEADERS,
    TOLERANCES,
    GraphCache,
    cuda_graph,
    inductor,
    keep_compiled,
    why_uncompiled,
    why_unlike,
)
from dflash_bench.engine.lengths import is_for
from dflash_bench.engine.target import Steady, Target
from dflash_bench.models.presets import cache_folder

OFF = "off"
PROBED = 8
"""Number of tokens in the pass that tests whether passes can be captured."""


def capture_passes(target: Target, drafters: Iterable[Drafter], how: str | None) -> str:
    """Capture passes of the target and of capable drafters from now on; return the mode, for the run's identity.

    `how` is "graph", "inductor", "off", or None to decide by the device. Raises UserError if `how` is impossible here.
    """
    if how == "inductor":
        _refuse_compiling(target)
        keep_compiled(cache_folder() / "compiled")
        compiled = partial(GraphCache, inductor, is_whole=True, must=True, tolerances=TOLERANCES)
        return _set(target, drafters, how, compiled)
    if how == OFF or (how is None and target.device.type != "cuda"):
        return OFF
    if target.device.type != "cuda":
        raise UserError("--graph on needs a CUDA device; leave it out")
    _set(target, drafters, "graph", lambda: GraphCache(cuda_graph))
    reason = target.why_uncaptured = _probe(target)
    if reason is None:
        target.why_unfused = _fuse(target, drafters)
        for model in (drafter.model for drafter in drafters if isinstance(drafter, ModelDrafter)):
            if isinstance(model.network, HFForward):
                model.graph_cache = GraphCache(cuda_graph)
                model.graph_cache = model.graph_cache if _probe(model) is None else None
        return "graph"
    if how == "graph":
        raise UserError(f"--graph on: this target's passes cannot be captured here ({reason}); leave it out")
    _set(target, drafters, OFF, lambda: None)
    return f"{OFF}, as a capture failed ({reason})"


def _fuse(target: Target, drafters: Iterable[Drafter]) -> str | None:
    """Fuse small operations of captured passes, which are dominated by launch overhead.

    Return why some are not fused, or None.
    """
    network = target.network
    why_not = fuse(network)
    if (problem := _probe(target)) is not None:
        if isinstance(network, NativeForward):
            network.fused = None
        target.graph_cache = GraphCache(cuda_graph)
        return f"fused passes cannot be captured ({problem})"
    if why_not in (NO_COMPILER, NO_HEADERS):
        return why_not
    return next(filter(None, [why_not, *(fuse(getattr(drafter, "network", None)) for drafter in drafters)]), None)


def gpu_paths(target: Target, captured: str) -> dict[str, dict[str, str | None]]:
    """Return how a GPU computes the target's passes, with reasons for slow paths, for the run's identity.

    `captured` is the mode that `capture_passes` returned. Empty on a CPU.
    """
    if target.device.type != "cuda":
        return {}
    network, dtype = target.network, target.model.dtype
    without = "" if torch.backends.cuda.cudnn_sdp_enabled() else ", without cuDNN"
    if isinstance(network, NativeForward):
        reason = network.layers[0].attention.why_masked(target.device, dtype)
        attention = "flash attention by lengths" if reason is None else f"masked attention{without}"
    else:
        reason, attention = None, f"{target.config._attn_implementation}{without}"
    passes = {"graph": "CUDA graphs", "inductor": "compiled by inductor"}.get(captured, "launched one by one")
    paths = {
        "attention": _path(attention, reason if is_for(target.device, dtype) else None),
        "passes": _path(passes, target.why_uncaptured),
    }
    if captured == "graph" and isinstance(network, NativeForward):
        paths["small operations"] = _path("separate" if target.why_unfused else "fused", target.why_unfused)
    return paths


def _path(used: str, why_slow: str | None) -> dict[str, str | None]:
    return {"used": used, "why_slow": why_slow}


def _refuse_compiling(target: Target) -> None:
    if target.device.type != "cuda":
        raise UserError("--compile needs a CUDA device; on a CPU, --kernels numba compiles passes")
    if not isinstance(target.network, NativeForward):
        raise UserError("--compile compiles passes of --engine native only, which does not compute this target")


def _set(target: Target, drafters: Iterable[Drafter], how: str, graphs: Callable[[], GraphCache | None]) -> str:
    target.graph_cache = graphs()
    for drafter in drafters:
        if isinstance(drafter, Captures):
            drafter.graph_cache = graphs()
    return how


@torch.inference_mode()
def _probe(target: Target) -> str | None:
    """Return why a pass cannot be captured, or None if it can."""
    network = target.network
    assert target.graph_cache is not None and isinstance(network, Steady)
    if network.why_unsteady is not None:
        return network.why_unsteady
    target.begin(1, 2 * PROBED)
    block = torch.arange(PROBED, device=target.device)[None] % target.vocab_size
    usual = [target.forward(block, [start]).logits for start in (0, PROBED)]
    target.capture(PROBED, PROBED)
    reasons = [target.graph_cache.why_not]
    if isinstance(network, HFForward):
        # What its code asks the host, such as the length of the cache, is the same in all captured passes.
        again = [target.forward(block, [start]).logits.clone() for start in (0, PROBED)]
        unlike = [why_unlike(*pair, TOLERANCES) for pair in zip(usual, again, strict=True)]
        reasons += [f"captured passes {one} from others" for one in unlike if one is not None]
    target.release()
    return next(filter(None, reasons), None)


def capture_stats(target: Target, drafters: Iterable[Drafter]) -> dict[str, float | int]:
    """Return how many passes have been captured and replayed, and how long capturing took [s]."""
    several = [target.graph_cache, *(drafter.graph_cache for drafter in drafters if isinstance(drafter, Captures))]
    captured = [graphs for graphs in several if graphs is not None]
    return {
        "captured": sum(graphs.num_captured for graphs in captured),
        "seconds": round(sum(graphs.spent_s for graphs in captured), 3),
        "replayed": sum(graphs.num_replayed for graphs in captured),
        "not_captured": sum(graphs.why_not is not None for graphs in captured),
    }


# Fewer launches: the operations between two matrix products of a layer are fused into one kernel, or two.
#
# In a captured step of one token a small operation costs about as much as its launch, and a layer has a dozen of them.
# Inductor fuses norm, rotation and their product with the angles into one kernel, and activation and product into
# another. A norm alone is one operation, but torch's took 6.5 us for a row of 4,096 on an H200, where inductor's
# kernel of norm and rotation took 2. Residuals are added by the products themselves, in place, so a kernel for residual
# and norm would save no launch. Kernels are compiled when a run begins, and compared with the usual operations, which
# stay in use if that fails.
#
# A target's passes that are not captured, such as those over prompts, use the usual operations: on an H200's host,
# calling a compiled function took 0.16 ms, three to five times as long as launching what it replaces.


Compile = Callable[..., Any]
TRIED = (1, 5)
"""Numbers of tokens to test: code is compiled for one token, and for any larger number."""

MOST_COMPILED = 64
"""Maximum number of shapes that a function is compiled for."""


def turn_by_copying(heads: Tensor, norm: Norm | None, tables: Tables) -> None:
    """Compute `layers.rotate` by copying, the only way in which a compiler can write into a part of a tensor."""
    normed, size = heads if norm is None else norm(heads), tables[0].shape[-1]
    turned = normed[..., :size]
    turned = torch.addcmul(turned * tables[0], turned.roll(size // 2, -1), tables[1])
    heads.copy_(turned if size == heads.shape[-1] else torch.cat([turned, normed[..., size:]], dim=-1))


def gate(wide: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return activation(gate) * up [T, I] for gate and up side by side [T, 2 * I]."""
    left, right = wide.chunk(2, dim=-1)
    return activation(left) * right


def apply_norm(norm: Norm, x: Tensor) -> Tensor:
    return norm(x)


class FusedNorm(Norm):
    """Computes `layers.Norm` [T, D] as one kernel for rows, compiled as `apply`."""

    def __init__(self, usual: Norm, apply: Callable[[Norm, Tensor], Tensor]) -> None:
        super().__init__(usual.weight, usual.eps)
        self.usual, self.apply = usual, apply

    def __call__(self, x: Tensor) -> Tensor:
        return self.apply(self.usual, _any_number(x))


@dataclass(frozen=True, slots=True)
class FusedGated(Gated):
    """Computes `layers.Gated` with activation and product fused."""

    gate: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]

    def _wide(self, normed: Tensor) -> Tensor:
        return self.gate(self.gate_up(normed), self.activation)


class Fused:
    """The compiled functions. The results of `compile_function`, torch's, take any number of tokens."""

    def __init__(self, compile_function: Compile = torch.compile) -> None:
        self._turn = compile_function(turn_by_copying, dynamic=False)
        self._gate = compile_function(gate, dynamic=False)
        self._norm = compile_function(apply_norm, dynamic=False)

    def rotate(self, heads: Tensor, norm: Norm | None, tables: Tables) -> None:
        """Compute `layers.rotate` for heads [B, N, heads, D]; the compiler sees rows and tokens as one dimension."""
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
            feed = FusedGated(feed.gate_up, feed.down, feed.activation, self.gate)
        after = (None if norm is None else self.norm(norm) for norm in (usual.after_attention, usual.after_feed))
        return replace(
            usual,
            attention=replace(usual.attention, rotate=self.rotate),
            feed=feed,
            input_norm=self.norm(usual.input_norm),
            feed_norm=self.norm(usual.feed_norm),
            after_attention=next(after),
            after_feed=next(after),
        )

    def norm(self, usual: Norm) -> Norm:
        return FusedNorm(usual, self._norm)


def _any_number(x: Tensor) -> Tensor:
    """Mark the first dimension as dynamic, unless its size is 1, for which code is compiled separately."""
    if len(x) > 1:
        torch._dynamo.mark_dynamic(x, 0)
    return x


def fuse(network: object, compile_function: Compile = torch.compile) -> str | None:
    """Fuse the operations of a target's or a draft's network, if it is ours; return the reason if that fails."""
    why_not = None
    if isinstance(network, NativeEagle3):
        (network.layer, *network.further), why_not = fused_layers([network.layer, *network.further], compile_function)
    elif isinstance(network, NativeMTP):
        (network.layer,), why_not = fused_layers([network.layer], compile_function)
    elif isinstance(network, NativeDFlash):
        layers, why_not = fused_layers(network.plain_layers, compile_function)
        network.use(layers)
    elif isinstance(network, NativeForward):
        network.fused, why_not = fused_layers(network.layers, compile_function)
    return why_not


@torch.inference_mode()
def fused_layers(layers: list[Layer], compile_function: Compile = torch.compile) -> tuple[list[Layer], str | None]:
    """Return layers with fused operations; if compiling fails or results differ, the given layers and the reason."""
    try:
        fused = Fused(compile_function)
        made = [fused.layer(layer) for layer in layers]
        alike = {_kind(layer): (layer, new) for layer, new in zip(layers, made, strict=True)}
        # All networks share these functions, and later passes compile them for more shapes. Beyond its limit, dynamo
        # stops compiling without an error.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILED)
        for usual, new in alike.values():
            for num_tokens in TRIED:
                _refuse_unlike(usual, new, num_tokens)
    except (ImportError, OSError, RuntimeError, SubprocessError, TypeError, ValueError, AttributeError) as problem:
        return layers, why_uncompiled(problem)
    return made, None


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
    angles = drawn(1, num_tokens, 1, attention.rotary_size or attention.head_dim)
    pair = [heads.clone(), heads.clone()]
    for layer, mine in zip((usual, fused), pair, strict=True):
        layer.attention.rotate(mine[:, :, :num_turned], attention.head_norm, (angles.cos(), angles.sin()))
    _refuse_difference(*pair)
    x = drawn(num_tokens, usual.feed_norm.weight.shape[-1])
    _refuse_difference(usual.feed.added_to(x.clone(), x), fused.feed.added_to(x.clone(), x))
    _refuse_difference(usual.feed_norm(x), fused.feed_norm(x))


def _refuse_difference(usual: Tensor, fused: Tensor) -> None:
    difference = float((usual.float() - fused.float()).abs().max() / usual.float().abs().max())
    if not difference <= TOLERANCES.get(usual.dtype, TOLERANCES[torch.float32]):
        raise ValueError(f"results differ by {difference:.1e}")
