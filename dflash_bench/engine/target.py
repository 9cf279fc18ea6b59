"""The target: any causal language model with full attention, on our cache, with taps on its layers.

The model is used as it is published; only its cache, its positions and its mask are ours, which is what lets rows of
different lengths share one forward pass and rejected tokens be forgotten for free.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_bench.engine.cache import KVCache, ancestors, causal_mask
from dflash_bench.errors import UserError


@dataclass(frozen=True, slots=True)
class Output:
    """`logits` [B, N, V] (after prefill: [B, 1, V], at each prompt's end); `hidden` [B, N, K * H] of the taps."""

    logits: Tensor
    hidden: Tensor | None


class Target:
    """One forward pass at a time over B rows; `begin` once per batch of prompts."""

    def __init__(self, model: Any, taps: Sequence[int] = ()) -> None:
        refuse_unsupported(model)
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.device: torch.device = model.device
        self.context_length = context_length(self.config)
        self._layers = decoder_layers(model)
        self._keeps_some_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._tapped: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.taps: tuple[int, ...] = ()
        self.tap(taps)
        self._cache: KVCache | None = None

    def tap(self, taps: Sequence[int]) -> None:
        """Record the outputs of these layers (0-based) from now on."""
        for hook in self._hooks:
            hook.remove()
        self._tapped.clear()
        self.taps = tuple(taps)
        self._hooks = [self._layers[i].register_forward_hook(self._recorder(i)) for i in self.taps]

    def _recorder(self, index: int) -> Any:
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._tapped[index] = output[0] if isinstance(output, tuple) else output

        return record

    @property
    def embedding(self) -> nn.Module:
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def head(self) -> nn.Module:
        module: nn.Module = self.model.get_output_embeddings()
        return module

    @torch.inference_mode()
    def begin(self, num_rows: int, capacity: int) -> None:
        """Room for `capacity` tokens in each of `num_rows` rows; buffers that are large enough are used again."""
        if self._cache is not None and self._cache.num_rows == num_rows and self._cache.capacity >= capacity:
            self._cache.clear()
            return
        self._cache = KVCache(num_rows, capacity, self.device)
        self._model_cache = Cache(layers=[_Layer(self._cache, i) for i in range(len(self._layers))])
        dtype = self.model.dtype
        # For rows that start together, the mask of any pass is a window into this one.
        width = min(capacity, 64)
        beyond = torch.full((width, width), torch.finfo(dtype).min, dtype=dtype, device=self.device).triu(1)
        self._window = torch.cat([beyond.new_zeros(width, capacity), beyond], dim=1)[None, None]

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "begin comes first"
        return self._cache

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Output:
        """Read whole prompts, padded on the right; padding lies beyond each row's length and is overwritten."""
        width = max(len(prompt) for prompt in prompts)
        rows = [[*prompt, *([prompt[-1]] * (width - len(prompt)))] for prompt in prompts]
        last = [len(prompt) - 1 for prompt in prompts]
        # The head is run where some row ends, and not over whole prompts, if the model can be told so.
        kept = sorted(set(last)) if self._keeps_some_logits else list(range(width))
        output = self.forward(
            torch.tensor(rows, device=self.device), [0] * len(rows), keep_logits=torch.tensor(kept, device=self.device)
        )
        place = torch.tensor([kept.index(i) for i in last], device=self.device)
        return Output(output.logits[torch.arange(len(rows), device=self.device), place][:, None], output.hidden)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        starts: Sequence[int],
        parents: Tensor | None = None,
        keep_logits: int | Tensor = 0,
    ) -> Output:
        """Read tokens [B, N] from each row's start on; with `parents` they are an anchor and a tree below it."""
        cache, width = self.cache, tokens.shape[1]
        cache.place(starts, width)
        positions = cache.positions
        if parents is not None:
            depths = ancestors(parents).sum(dim=-1) - 1
            positions = positions[:, :1] + depths
        # Tokens past the context are cut off later and seen by no other, but a position table still looks them up.
        positions = positions.clamp(max=self.context_length - 1)
        options: dict[str, Any] = {"logits_to_keep": keep_logits} if self._keeps_some_logits else {}
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._mask(starts, width, parents),
            past_key_values=self._model_cache,
            use_cache=True,
            **options,
        )
        hidden = torch.cat([self._tapped[i] for i in self.taps], dim=-1) if self.taps else None
        return Output(out.logits, hidden)

    def _mask(self, starts: Sequence[int], width: int, parents: Tensor | None) -> Tensor:
        cache = self.cache
        if parents is None and not cache.is_ragged and width <= self._window.shape[2]:
            left = cache.capacity - starts[0]
            return self._window[:, :, :width, left : cache.capacity + width].expand(cache.num_rows, -1, -1, -1)
        return causal_mask(cache, self.model.dtype, parents)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers sees of our cache: one layer that writes where the cache was placed."""

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self.cache, self.index, self.is_initialized = cache, index, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.visible, 0

    def get_seq_length(self) -> int:
        return self.cache.visible

    def get_max_length(self) -> int:
        return self.cache.capacity

    # The same under its name in older releases of transformers 5.
    get_max_cache_shape = get_max_length


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it."""
    depth = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and name.split(".")[-1] in ("layers", "h"):
            return module
    raise UserError(
        f"cannot find the {depth} decoder layers of {type(model).__name__}; it is not supported as a target"
    )


def context_length(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise UserError(f"a {config.model_type} target does not say how long its context is; it is not supported")
    return int(length)


def refuse_unsupported(model: Any) -> None:
    """Name what this engine cannot roll back or place, rather than answer wrongly."""
    config = model.config.get_text_config()
    name = config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model; the target must be a causal language model")
    kinds = other_attention(config)
    if kinds:
        raise UserError(f"a {name} target with {', '.join(kinds)} layers is not supported: full attention only")
    if getattr(model, "_is_stateful", False):
        raise UserError(f"a {name} target keeps a recurrent state, which cannot be rolled back: full attention only")
    needs = ("position_ids", "attention_mask", "past_key_values")
    missing = [need for need in needs if need not in inspect.signature(model.forward).parameters]
    if missing or getattr(config, "alibi", False):
        lacks = missing[0] if missing else "position_ids (it uses ALiBi)"
        raise UserError(f"a {name} target is not supported: its forward pass takes no {lacks}")


def other_attention(config: Any) -> list[str]:
    """The kinds of layers that do not see the whole past."""
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    kinds -= {"full_attention", "attention", "global"}
    window = getattr(config, "sliding_window", None)
    if not kinds and window and getattr(config, "use_sliding_window", True) and context_length(config) > window:
        kinds = {"sliding_attention"}
    return sorted(kinds)
