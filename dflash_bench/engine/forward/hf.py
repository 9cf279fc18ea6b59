"""The target's forward by transformers' code, and which architectures that covers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_bench.core.errors import UserError
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.recurrent import Recurrence
from dflash_bench.engine.masks import Masks
from dflash_bench.models.weights import laid_out

# What the engine must know about a target's architecture: its layers, their windows, and what is not supported.


RECURRENT = ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Hybrids of attention and the gated delta rule, whose state `engine/forward/recurrent.py` can roll back."""

FULL = {"full_attention", "attention", "global"}
MASKABLE = ("eager", "sdpa")
"""Attention implementations of transformers that accept any mask we give them."""


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of decoder layers, wherever the architecture keeps it."""
    depth = model.config.get_text_config().num_hidden_layers
    # A model with vision has several lists of layers; we want those of its decoder.
    for root in (model.get_decoder() or model, model):
        for name, module in root.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) == depth and name.split(".")[-1] in ("layers", "h"):
                return module
    raise UserError(
        f"cannot find the {depth} decoder layers of {type(model).__name__}; it is not supported as a target"
    )


FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
"""What architectures call the norm between the last layer and the output head."""


def final_norm(model: Any) -> nn.Module:
    """Raises UserError for an architecture that has none by a known name."""
    decoder = model.get_decoder() or model
    for name in FINAL_NORMS:
        if isinstance(norm := getattr(decoder, name, None), nn.Module):
            return norm
    raise UserError(f"cannot find the last norm of {type(model).__name__}; Medusa heads cannot read this target")


def context_length(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if length is None:
        raise UserError(f"a {config.model_type} target does not say how long its context is; it is not supported")
    return int(length)


def recurrent_layers(config: Any) -> list[int]:
    """Indices of the layers that keep a state instead of keys and values."""
    kinds = getattr(config, "layer_types", None) or ()
    return [i for i, kind in enumerate(kinds) if kind == "linear_attention"]


def attention_windows(config: Any) -> dict[str, int | None]:
    """How many tokens each kind of attention layer sees, the current one included (None: all).

    A model with several kinds of layers takes one mask per kind, under the names of `transformers.masking_utils`. A
    model whose config lists no kinds takes one mask; if it has a window, all its layers do (Mistral).
    """
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    layer_types = getattr(config, "layer_types", None)
    default = {"sliding_attention" if window else "full_attention"}
    kinds = {*layer_types} - {"linear_attention"} if layer_types else default
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def refuse_unsupported(model: Any) -> None:
    """Raise UserError for a model that this engine cannot roll back or mask, rather than give wrong answers."""
    config = model.config.get_text_config()
    name = config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{name} is an encoder-decoder model; the target must be a causal language model")
    kinds = other_layers(config)
    if kinds:
        raise UserError(
            f"a {name} target with {', '.join(kinds)} layers is not supported: "
            f"only full and sliding attention are, and linear attention in {', '.join(RECURRENT)}"
        )
    if getattr(model, "_is_stateful", False) and name not in RECURRENT:
        raise UserError(
            f"a {name} target keeps a recurrent state that cannot be rolled back; only {', '.join(RECURRENT)} can"
        )
    needs = ("position_ids", "attention_mask", cache_argument(model))
    missing = [need for need in needs if need not in inspect.signature(model.forward).parameters]
    if missing or getattr(config, "alibi", False):
        lacks = missing[0] if missing else "position_ids (it uses ALiBi)"
        raise UserError(f"a {name} target is not supported: its forward pass takes no {lacks}")
    if getattr(config, "use_bidirectional_attention", None) is True:
        raise UserError(f"a {name} target with use_bidirectional_attention is not a causal language model")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in MASKABLE:
        raise UserError(
            f"{attention} attention does not accept our masks; load the target with one of: {', '.join(MASKABLE)}"
        )


def cache_argument(model: Any) -> str:
    """What its forward pass calls the cache: `cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def other_layers(config: Any) -> list[str]:
    """The kinds of layers that this engine does not support."""
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "attention_layers", None) or ())}
    kinds -= {*FULL, "sliding_attention"}
    if config.model_type in RECURRENT:
        kinds -= {"linear_attention"}
    return sorted(kinds)


# The target's network as its publisher's code computes it: transformers' forward pass, over our cache.
#
# Any architecture that takes positions, a mask and a cache is read in this way; hooks on its layers are the taps.


class HFForward:
    """`model` may be spread over devices. It is computed by modules of our own, so that no hook of ours is on its."""

    needs_masks = True

    def __init__(self, model: Any) -> None:
        self.model = model = laid_out(model)
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
        layers: list[Any] = [_Layer(cache, i) for i in range(len(self._layers))]
        if self._recurrent:
            self._recurrence = Recurrence(self._layers, self._recurrent, device)
            for index, state in self._recurrence.states.items():
                layers[index] = state
        self._cache = Cache(layers=layers)

    def clear(self) -> None:
        if self._recurrence is not None:
            self._recurrence.clear()

    def read(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Masks | None,
        keep: int | Tensor,
        counts: Sequence[int] | None,
        rows: slice | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, N or fewer, V], and what each tapped layer said [B, N, H].

        With `rows` it is of these alone, whose prompts begin here.
        """
        options: dict[str, Any] = {self._cache_argument: self._cache}
        if self.keeps_some_logits:
            options["logits_to_keep"] = keep
        with self._recurrence.reading(tokens.shape[1], counts, rows) if self._recurrence else nullcontext():
            out = self.model(
                input_ids=tokens, position_ids=positions, attention_mask=masks, use_cache=True, **options,
            )  # fmt: skip
        return out.logits, [self._tapped[i] for i in self._taps]

    def commit(self, counts: Sequence[int]) -> None:
        """Keys and values need no work: what lies beyond a row's end is overwritten. Recurrent states roll back."""
        if self._recurrence is not None:
            self._recurrence.commit(counts)


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of our cache, in the form that transformers expects; it writes where `place` said."""

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

    # Its name in older releases of transformers 5.
    get_max_cache_shape = get_max_length
