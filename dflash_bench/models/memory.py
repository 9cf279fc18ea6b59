"""How much memory a run will take, from configs and headers alone: weights, and the caches of keys and values.

What passes through the layers while they compute comes on top: it depends on engine, attention and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.methods import Method
from dflash_bench.models import formats, loading, quantization, targets
from dflash_bench.models import weights as models_weights
from dflash_bench.models.formats import medusa
from dflash_bench.models.hub import read_config
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config
from dflash_bench.models.weights import is_large, may_be_held_twice

HEAD = "lm_head.weight"
MOST_NODES = 63
"""As many as `ddtree:nodes=auto` chooses from."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one model in bytes."""

    weights_bytes: int
    place_bytes: int
    """Keys and values of one token in all layers."""
    config: DFlashConfig | Eagle3Config | Mapping[str, Any] | None = None
    """Of a draft for the target's features; of a block-diffusion model how it reads blocks; None of other models."""
    loading_bytes: int = 0
    """Weights as the checkpoint has them, where they are quantised on loading."""
    layout_bytes: int = 0
    """What a second layout of large weights takes at most, on a CPU (`engine/forward/packed.py`); 0 where there is
    none."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a run whose longest row, with its answers, has so many tokens."""

    target_weights_bytes: int
    target_cache_bytes: int
    draft_weights_bytes: int = 0
    draft_cache_bytes: int = 0

    @property
    def total(self) -> int:
        return self.target_weights_bytes + self.target_cache_bytes + self.draft_weights_bytes + self.draft_cache_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What a target and its drafts need: each method has a cache of its own, and drafts are held once."""

    target: Footprint
    drafts: Mapping[str, Footprint]
    methods: Sequence[Method]
    """With the numbers of tokens that a preset sets."""
    rows: int = 1

    def held(self, longest: int) -> Held:
        rounds = [(method, *self._round(method)) for method in self.methods]
        places = longest + 1 + max((drafted for _, drafted, _ in rounds), default=0)
        caches = [
            self.drafts[method.draft].place_bytes * (longest + 1 + drafted + scratch)
            for method, drafted, scratch in rounds
            if method.draft is not None
        ]
        return Held(
            self.target.weights_bytes, self.rows * places * self.target.place_bytes,
            sum(draft.weights_bytes for draft in self.drafts.values()), self.rows * sum(caches),
        )  # fmt: skip

    def longest_within(self, num_bytes: int) -> int:
        """Tokens of the longest row that fits; 0 or less where the weights alone do not."""
        none, one = self.held(0).total, self.held(1).total
        return (num_bytes - none) // (one - none)

    def most_rows_within(self, num_bytes: int, longest: int) -> int:
        """How many rows of so many tokens fit; 0 or less where the weights alone do not."""
        none, one = (replace(self, rows=rows).held(longest).total for rows in (0, 1))
        return (num_bytes - none) // (one - none)

    def packed(self, free_bytes: int) -> Demand:
        """With a second layout of the target's weights, and then of the drafts', where there is room for that."""
        drafts = list(self.drafts.values())
        left = free_bytes - self.target.weights_bytes - sum(draft.weights_bytes for draft in drafts)
        of_target, of_drafts = self.target.layout_bytes, sum(draft.layout_bytes for draft in drafts)
        if not of_target or not may_be_held_twice(of_target, left):
            return self
        has_room = may_be_held_twice(of_drafts, left - of_target)
        return replace(
            self,
            target=_with_layout(self.target),
            drafts={name: _with_layout(one) for name, one in self.drafts.items()} if has_room else self.drafts,
        )

    def without_drafts(self) -> Demand:
        return Demand(self.target, {}, [method for method in self.methods if method.draft is None], self.rows)

    def _round(self, method: Method) -> tuple[int, int]:
        return round_of(method, self.drafts[method.draft].config if method.draft else None)


def _with_layout(footprint: Footprint) -> Footprint:
    return replace(footprint, weights_bytes=footprint.weights_bytes + footprint.layout_bytes)


def round_of(method: Method, config: DFlashConfig | Eagle3Config | Mapping[str, Any] | None) -> tuple[int, int]:
    """The most tokens that the method drafts in a round, and what a proposal takes in the draft's own cache."""
    given = {option.name: method.option(option.name) for option in method.kind.options}
    number = {name: value for name, value in given.items() if isinstance(value, int)}
    nodes = MOST_NODES if given.get("nodes") == "auto" else number.get("nodes")
    if isinstance(config, DFlashConfig):
        block = config.block_for(number["n"]) if "n" in number else number.get("block", config.block_size)
        return nodes or max(config.num_drafts(block), number.get("copy", 0)), block
    if isinstance(config, Mapping):
        return int(number.get("block") or config["block_size"]) - 1, 0
    if isinstance(config, Eagle3Config) and nodes:
        width = min(number["top_k"], nodes, config.draft_vocab_size or config.vocab_size)
        levels = min(number["depth"], nodes) - 1
        return min(nodes, width + levels * width * width), levels * width
    if "guesses" in number:
        return (number["window"] + number["guesses"]) * (number["ngram"] - 1), 0
    if "rates" in given:
        return str(given["rates"]).count("/") + 1, 0
    drafted = nodes or number.get("n", 0)
    return drafted, 0 if method.draft is None or nodes else drafted


def demand_of(
    target: Path,
    drafts: Mapping[str, Path],
    methods: Sequence[Method],
    dtype: torch.dtype | None,
    trusted: bool = False,
    quantize: str | None = None,
) -> Demand:
    """Folders of checkpoints; `dtype` None is the target's own; drafts are never quantised.

    Raises UserError for what cannot be read.
    """
    if dtype is None:
        stored = getattr(targets.config_of(target, trusted), "dtype", None)
        dtype = stored if isinstance(stored, torch.dtype) else torch.float32
    shape = targets.shape_of(target)
    footprints = {name: _of_draft(name, folder, shape, dtype) for name, folder in drafts.items()}
    return Demand(_of_language_model(target, dtype, trusted, quantize), footprints, methods)


def footprint_of(folder: Path, dtype: torch.dtype, trusted: bool = False, quantize: str | None = None) -> Footprint:
    """Of a target. Raises UserError for what cannot be read."""
    return _of_language_model(folder, dtype, trusted, quantize)


def _of_draft(name: str, folder: Path, shape: formats.TargetShape, dtype: torch.dtype) -> Footprint:
    weights = name.partition("@")[0]
    if weights == "medusa":
        return Footprint(_weights(medusa.read(folder, headers_only=True)[1], dtype), 0)
    if weights in loading.LANGUAGE_MODELS:
        return replace(_of_language_model(folder, dtype), config=read_config(folder).get("block_diffusion"))
    checkpoint = formats.read_checkpoint(folder, shape, headers_only=True)[1]
    config = checkpoint.config
    layers = config.num_layers if isinstance(config, DFlashConfig) else 1
    tensors = _weights(checkpoint.tensors, dtype)
    if checkpoint.target_head:
        # Its rows of the target's head are copied out of that.
        tensors += (config.draft_vocab_size or 0) * config.hidden_size * dtype.itemsize
    place = _place(layers, config.num_kv_heads, config.head_dim, dtype)
    return Footprint(tensors, place, config, layout_bytes=_layout(checkpoint.tensors, tensors))


def _of_language_model(
    folder: Path, dtype: torch.dtype, trusted: bool = False, quantize: str | None = None
) -> Footprint:
    config = targets.config_of(folder, trusted)
    tensors = models_weights.read_tensors(folder, models_weights.only_maps)
    if getattr(config, "tie_word_embeddings", False):
        tensors.pop(HEAD, None)
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    # Layers with a recurrent state keep no keys, and as much for a short text as for a long one.
    layers = sum(kind != "linear_attention" for kind in kinds)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    place, weights = _place(layers, heads, head_dim, dtype), _weights(tensors, dtype)
    if quantize is None:
        return Footprint(weights, place, layout_bytes=_layout(tensors, weights))
    return Footprint(_quantized(tensors, dtype, quantize), place, loading_bytes=weights)


def _place(layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return 2 * layers * heads * head_dim * dtype.itemsize


def _weights(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Packed integers are held as they are stored."""
    return sum(
        tensor.numel() * (dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)
        for tensor in tensors.values()
    )


def _layout(tensors: Mapping[str, Tensor], weights_bytes: int) -> int:
    return weights_bytes if any(is_large(tensor.shape) for tensor in tensors.values()) else 0


def _quantized(tensors: Mapping[str, Tensor], dtype: torch.dtype, kind: str) -> int:
    sizes = {name: quantization.predicted_bytes(name, tensor.shape, kind) for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in tensors.items() if sizes[name] is None}
    return _weights(plain, dtype) + sum(size for size in sizes.values() if size is not None)
