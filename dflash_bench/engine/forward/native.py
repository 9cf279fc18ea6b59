"""The target's forward pass by our own code: the usual decoder layer with little between its matrix products.

The layers are those of `layers.py`; some architectures have experts (`experts.py`) or recurrent states (`delta.py`).
The model itself stays usable.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.delta import DeltaStates, recurrent_layer_of
from dflash_bench.engine.forward.experts import experts_of, why_not_experts
from dflash_bench.engine.forward.hf import PassInputs
from dflash_bench.engine.forward.layers import (
    ACTIVATIONS,
    Attention,
    Layer,
    Linear,
    NativeFeedForward,
    Product,
    Tables,
    gated_of,
    head_norm_of,
    linear_of,
    norm_of,
)
from dflash_bench.engine.lengths import Seen, pass_lengths
from dflash_bench.engine.masks import PassMask, fold_kinds
from dflash_bench.models.architecture import decoder_layers, final_norm, recurrent_layers
from dflash_bench.models.configs import optional
from dflash_bench.models.quantization import Int8Linear
from dflash_bench.models.weights import lay_out


def layer_of(
    layer: Any,
    kind: str,
    num_heads: int,
    num_kv: int,
    activation: str,
    scale: float | None = None,
    qkv: Linear | None = None,
    rotary_size: int | None = None,
) -> Layer:
    """Lay out a module's layer. `scale` applies to attention scores (default: D^-0.5); give `qkv` if it is joined.

    `rotary_size` is the number of rotated values at the front of each head; None rotates all.
    """
    attention, mlp = layer.self_attn, layer.mlp
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    head_dim = attention.k_proj.weight.shape[0] // num_kv
    mixing = Attention(
        qkv=qkv or linear_of(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=head_norm_of(attention, num_heads, num_kv) if hasattr(attention, "q_norm") else None,
        output=linear_of(attention.o_proj),
        num_heads=num_heads,
        num_kv=num_kv,
        head_dim=head_dim,
        scale=scale or head_dim**-0.5,
        sinks=attention.sinks.detach() if hasattr(attention, "sinks") else None,
        is_gated=attention.q_proj.weight.shape[0] == 2 * num_heads * head_dim,
        rotary_size=rotary_size,
    )
    return Layer(
        kind=kind,
        input_norm=norm_of(layer.input_layernorm),
        attention=mixing,
        after_attention=norm_of(layer.post_attention_layernorm) if is_sandwich else None,
        feed_norm=norm_of(layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm),
        feed=feed_of(mlp, activation),
        after_feed=norm_of(layer.post_feedforward_layernorm) if is_sandwich else None,
    )


def feed_of(mlp: Any, activation: str) -> NativeFeedForward:
    return gated_of(mlp, activation) if hasattr(mlp, "gate_proj") else experts_of(mlp, activation)


def rotary_size(config: Any) -> int | None:
    """Return how much of each head is rotated, or None if all of it is."""
    factor = (optional(config, "rope_parameters") or {}).get("partial_rotary_factor", 1.0)
    return None if factor == 1 else int(config.head_dim * factor)


COVERED = (
    *("gemma", "gemma3_text", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
)
TABLES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary angles that depend on the position alone, and not on the length of the text."""
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def why_not(model: Any) -> str | None:
    """Return why `model` cannot be computed by this code, or None if it can."""
    if reason := why_not_config(model.config):
        return reason
    if len({weight.device for weight in model.parameters()}) > 1:
        return "its layers are on several devices"
    linears = [module for layer in decoder_layers(model) for name, module in layer.named_modules() if "_proj" in name]
    plain = (nn.Linear, Int8Linear)
    if any(type(module) not in plain or type(module.weight.data) is not Tensor for module in linears):
        return "its weights are quantised"
    mixtures = [layer.mlp for layer in decoder_layers(model) if hasattr(layer.mlp, "experts")]
    return next(filter(None, map(why_not_experts, mixtures)), None)


def why_not_config(config: Any) -> str | None:
    """Return why a model with this config cannot be computed by this code, or None if it can."""
    if config.model_type.removesuffix("_text") == "gemma4":
        return "gemma 4 has heads that differ by layer, keys used as values or shared by layers, and inputs per layer"
    if config.model_type not in COVERED:
        return f"{config.model_type} is not among {', '.join(COVERED)}"
    if _activation(config) not in ACTIVATIONS:
        return f"its activation is {_activation(config)}"
    if optional(config, *SOFT_CAPS) is not None:
        return "it caps its logits softly"
    for kind in _rope_types(config):
        if kind not in TABLES:
            return f"its rotary angles are {kind}"
    return None


def _activation(config: Any) -> str:
    return str(optional(config, "hidden_activation") or config.hidden_act)


def _rope_types(config: Any) -> set[str]:
    """Return the model's kinds of rotary angles: a config has one, or one per kind of layer."""
    parameters = optional(config, "rope_parameters", default={})
    several = [entry for entry in parameters.values() if isinstance(entry, Mapping)] or [parameters]
    return {entry.get("rope_type", "default") for entry in several}


class NativeForward:
    """Computes a `model` that `why_not` accepts. A token that sees the whole cache needs no mask."""

    keeps_some_logits = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self.embedding: Any = model.get_input_embeddings()
        head = model.get_output_embeddings()
        self.head: Product = head if head.weight is self.embedding.weight else lay_out(head)
        self.norm, self.rotary = norm_of(final_norm(model)), model.get_decoder().rotary_emb
        layers = decoder_layers(model)
        window = "sliding_attention" if optional(config, "sliding_window") else "full_attention"
        kinds = optional(config, "layer_types") or [window] * len(layers)
        heads = config.num_attention_heads, config.num_key_value_heads
        scalar = optional(config, "query_pre_attn_scalar")
        scale = None if scalar is None else scalar**-0.5
        activation, places = _activation(config), recurrent_layers(config)
        self.layers = [
            layer_of(layer, kind, *heads, activation, scale, rotary_size=rotary_size(config))
            for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True))
            if index not in places
        ]
        """The layers with attention."""
        self.fused: list[Layer] | None = None
        """The same with fused operations, for captured passes alone: on a host, compiled functions cost more than the
        launches that they save."""
        self.recurrent = {
            index: recurrent_layer_of(layers[index], place, len(places), feed_of(layers[index].mlp, activation))
            for place, index in enumerate(places)
        }
        """The other layers, by index."""
        self.states: DeltaStates | None = None
        self.by_lengths, self.why_unsteady = False, None
        self._taps: frozenset[int] = frozenset()
        self._order: tuple[int, ...] = ()

    def tap(self, taps: Sequence[int]) -> None:
        self._order, self._taps = tuple(taps), frozenset(taps)

    def serve(self, cache: KVCache, device: torch.device) -> None:
        """Write into this cache from now on; prepare rotary tables for all of its places."""
        kinds, dtype = dict.fromkeys(layer.kind for layer in self.layers), self.embedding.weight.dtype
        self.cache, self._tables = cache, rotary_tables(self.rotary, kinds, cache.capacity, dtype, device)
        self.states = None
        self.by_lengths = self.layers[0].attention.why_masked(device, dtype) is None
        for layer in self.recurrent.values():
            self.states = self.states or DeltaStates(layer.delta.sizes, cache.num_rows, dtype, device)

    def clear(self) -> None:
        if self.states is not None:
            self.states.clear()

    def commit(self, counts: Sequence[int], width: int) -> None:
        """Advance recurrent states; keys and values beyond a row's end are simply overwritten."""
        if self.states is not None:
            self.states.commit(counts, width)

    def read(self, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """Return logits [B, N or fewer, V] and the output of each tapped layer [B, N, H]; the cache holds the rows."""
        if self.states is None:
            x, tapped = self._through(self.layers, inputs.tokens, inputs.positions, inputs.mask)
        else:
            with self.states.expecting(inputs.counts, inputs.rows, begins=not any(inputs.mask.starts)):
                x, tapped = self._through(self.layers, inputs.tokens, inputs.positions, inputs.mask)
        keep = inputs.keep_logits
        return self.logits(x[:, -keep:] if isinstance(keep, int) else x[:, keep]), tapped

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [B, N, V] for outputs [B, N, H] of the last layer."""
        return self.head(self.norm(x))

    def through(self, tokens: Tensor, positions: Tensor, mask: PassMask) -> tuple[Tensor, list[Tensor]]:
        """Return outputs [B, N, H] of the last and of each tapped layer; needs nothing but shapes from the host."""
        return self._through(self.fused or self.layers, tokens, positions, mask)

    def _through(
        self, attending: Sequence[Layer], tokens: Tensor, positions: Tensor, mask: PassMask
    ) -> tuple[Tensor, list[Tensor]]:
        shape = tokens.shape
        tables = {
            kind: (cos[positions][:, :, None], sin[positions][:, :, None]) for kind, (cos, sin) in self._tables.items()
        }
        seen = self._seen(mask)
        # All tokens of all rows in one dimension, [B * N, H]; only attention needs their rows.
        x, tapped = self.embedding(tokens).flatten(0, 1), {}
        layers = iter(attending)
        for index in range(len(self.layers) + len(self.recurrent)):
            if index in self.recurrent and self.states is not None:
                x = self.recurrent[index](x, shape, self.states)
            else:
                layer = next(layers)
                x = layer(index, x, shape, tables[layer.kind], seen[layer.kind], self.cache)
            if index in self._taps:
                tapped[index] = x.clone().view(*shape, -1)
        return x.view(*shape, -1), [tapped[i] for i in self._order]

    def _seen(self, mask: PassMask) -> Mapping[str, Seen]:
        """Return the masks or lengths of the pass for each kind of layer."""
        if self.by_lengths and mask.parents is None:
            return pass_lengths(mask)
        masks = None if mask.sees_all else mask.build()
        return fold_kinds(masks, self._tables, self.layers[0].attention.group)


def rotary_tables(
    rotary: Any, kinds: Iterable[str], length: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tables]:
    """Return the tables [length, D] of each kind of layer, by a model's own module of rotary angles."""
    return {kind: _signed(*angles(rotary, kind, length, dtype, device)) for kind in kinds}


def angles(rotary: Any, kind: str, length: int, dtype: torch.dtype, device: torch.device) -> Tables:
    """Return cosines and sines [length, D] of a kind of layer, without signs, by a model's own module."""
    positions = torch.arange(length, device=device)[None]
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device), positions, *([kind] if by_kind else []))
    is_half = not by_kind and cos.shape[-1] == rotary.inv_freq.shape[-1]  # gpt-oss: both halves of a head share them
    return (torch.cat([cos[0]] * 2, dim=-1), torch.cat([sin[0]] * 2, dim=-1)) if is_half else (cos[0], sin[0])


def _signed(cos: Tensor, sin: Tensor) -> Tables:
    """Return the tables with the minus sign of (left, right) -> (-right, left) in the first half of the sines."""
    left, right = sin.chunk(2, dim=-1)
    return cos, torch.cat([-left, right], dim=-1)
