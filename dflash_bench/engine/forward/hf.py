"""The target's forward pass by its publisher's code in transformers, over our cache.

Any architecture that takes positions, a mask and a cache is read in this way; hooks on its layers are the taps.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.recurrent import Recurrence
from dflash_bench.engine.masks import PassMask, seen_by
from dflash_bench.models.architecture import cache_argument, decoder_layers, recurrent_layers
from dflash_bench.models.weights import lay_out


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What a network reads in one pass, over B rows that have their places in the cache."""

    tokens: Tensor
    """[B, N]"""
    positions: Tensor
    """[B, N]"""
    mask: PassMask
    keep_logits: int | Tensor
    """Which places' logits are needed: this many from the end (0: all), or an index."""
    counts: Sequence[int] | None
    """How many tokens each row keeps; None where `commit` will say."""
    rows: slice | None
    """The rows of the cache that are read, if not all."""


class HFForward:
    """Computes a model by its publisher's code; its layers may be spread over devices.

    It uses modules of its own that share the model's parameters, so that no hook of ours is on the model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model = lay_out(model)
        self.head = model.get_output_embeddings()
        self.keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model)
        self._layers = decoder_layers(model)
        self._recurrent = recurrent_layers(model.config.get_text_config())
        self._recurrence: Recurrence | None = None
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._taps: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        """Record the outputs of these layers (0-based) from now on."""
        for hook in self._hooks:
            hook.remove()
        self._tapped.clear()
        self._taps = tuple(taps)
        self._hooks = [self._layers[i].register_forward_hook(self._recorder(i)) for i in self._taps]

    def _recorder(self, index: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[index] = output[0] if isinstance(output, tuple) else output

        return record

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on."""
        kinds = getattr(self.model.config.get_text_config(), "layer_types", None) or [""] * len(self._layers)
        layers: list[Any] = [CachedLayer(cache, i, kind) for i, kind in enumerate(kinds)]
        if self._recurrent:
            self._recurrence = Recurrence(self._layers, self._recurrent, device)
            for index, state in self._recurrence.states.items():
                layers[index] = state
        self._cache = Cache(layers=layers)

    def clear(self) -> None:
        if self._recurrence is not None:
            self._recurrence.clear()

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N or fewer, V] and the output of each tapped layer [B, N, H]."""
        options: dict[str, Any] = {self._cache_argument: self._cache}
        if self.keeps_some_logits:
            options["logits_to_keep"] = inputs.keep_logits
        width, recurrence = inputs.tokens.shape[1], self._recurrence
        masks = inputs.mask.build()
        for layer in self._cache.layers:
            if isinstance(layer, CachedLayer):
                layer.mask = masks if isinstance(masks, Tensor) else masks[layer.kind]
        begins = not any(inputs.mask.starts)
        with recurrence.reading(width, inputs.counts, inputs.rows, begins) if recurrence else nullcontext():
            out = self.model(
                input_ids=inputs.tokens, position_ids=inputs.positions, attention_mask=masks, use_cache=True,
                **options,
            )  # fmt: skip
        return out.logits, [self._tapped[i] for i in self._taps]

    def commit(self, counts: Sequence[int]) -> None:
        """Roll back recurrent states; keys and values beyond a row's end are simply overwritten."""
        if self._recurrence is not None:
            self._recurrence.commit(counts)


class CachedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of our cache in the form that transformers expects; it writes where the tokens were placed.

    It returns as many places as the pass's mask for this kind of layer has columns.
    """

    def __init__(self, cache: KVCache, index: int, kind: str) -> None:
        super().__init__()
        self.cache, self.index, self.kind, self.is_initialized = cache, index, kind, True
        self.mask: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.write(self.index, key_states, value_states)
        return seen_by(self.mask, keys), seen_by(self.mask, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.visible, 0

    def get_seq_length(self) -> int:
        return self.cache.visible

    def get_max_length(self) -> int:
        return self.cache.capacity

    # The name in older releases of transformers 5.
    get_max_cache_shape = get_max_length
