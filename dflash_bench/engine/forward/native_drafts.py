"""The forward passes of DFlash and EAGLE-3 drafts by our own code, laid out like the target's (`layers.py`).

Up to rounding, they return the results of the networks in `models/nets` that they are made from, which stay usable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.forward.hf import CachedLayer
from dflash_bench.engine.forward.layers import (
    ACTIVATIONS,
    Layer,
    Linear,
    Norm,
    Product,
    Tables,
    linear_of,
    norm_of,
    rotate,
)
from dflash_bench.engine.forward.native import angles, layer_of, rotary_tables
from dflash_bench.engine.lengths import Lengths, Seen
from dflash_bench.engine.masks import fold_heads
from dflash_bench.models.nets.bodies import BlockConvolution, BlockView, Mixing, filtered
from dflash_bench.models.nets.dflash import DFlashDraft
from dflash_bench.models.nets.eagle3 import Eagle3Draft
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.models.nets.mtp import FULL, KINDS, MTPDraft
from dflash_bench.models.weights import join_weights, lay_out

Views = Seen | Mapping[str, Seen | BlockView]
"""The view of the tokens of a pass in all layers, or in each kind of layer."""


class DFlashNetwork(Protocol):
    """A DFlash draft's passes: `context` for the target's features, `forward` for a block."""

    reads_views: bool
    """Whether it takes views instead of masks."""

    def context(self, features: Tensor, tables: Tables) -> Tensor:
        """Return keys and values of features [B, N, K * Ht] as the cache stores them [layers, 2, B, kv_heads, N, D].

        Equal to `DFlashDraft.context`: c = norm(fc(features)), per layer k = RoPE(norm(W_k c)), v = W_v c (paper, 4.1).
        """
        ...

    def forward(self, embedded: Tensor, tables: Tables, seen: Views, cache: KVCache) -> Tensor:
        """Compute `DFlashDraft.forward`, [B, N, H] -> [B, N, H], over a cache; masks: [B or 1, 1, N or 1, visible].

        It may overwrite `embedded`.
        """
        ...


class StepNetwork(Protocol):
    """A network that reads pairs of a token and a feature: `Eagle3Draft`, `MTPDraft`."""

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        """Compute the draft's `forward`, twice [B, N, H] -> [B, N, H], over a cache; a mask is [B, 1, N, visible]."""
        ...


class Eagle3Network(StepNetwork, Protocol):
    """An EAGLE-3 draft's passes: `fuse` for the target's features, `forward` for a step, `logits` for its head."""

    def fuse(self, features: Tensor) -> Tensor:
        """Compute `Eagle3Draft.fuse`: features [B, N, K * Ht] -> [B, N, H]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute `Eagle3Draft.logits`: [..., H] -> [..., Vd]."""
        ...


@dataclass(frozen=True, slots=True)
class FilteredLayer:
    """A layer whose sublayers' inputs and outputs are filtered over the slots of a block (DFlash 2)."""

    layer: Layer
    attention_conv: BlockConvolution
    mlp_conv: BlockConvolution

    @property
    def kind(self) -> str:
        return self.layer.kind

    def __call__(self, index: int, x: Tensor, shape: torch.Size, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        """Return the residual stream [B * N, H] after this layer; arguments as in `Attention`."""
        layer = self.layer

        def attended(read: Tensor) -> Tensor:
            return layer.attention.output(layer.attention(index, read, shape, tables, seen, cache))

        x = x + self._through(self.attention_conv, layer.input_norm(x), shape, attended)
        return x + self._through(self.mlp_conv, layer.feed_norm(x), shape, layer.feed)

    @staticmethod
    def _through(
        conv: BlockConvolution, normed: Tensor, shape: torch.Size, sublayer: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return a sublayer's update [B * N, H], given its normed input."""
        normed = normed.view(*shape, -1)
        before, after = conv.coefficients(normed)
        added = sublayer(filtered(normed, before).flatten(0, 1))
        return filtered(added.view(*shape, -1), after).flatten(0, 1)


class NativeDFlash(DFlashNetwork):
    """A draft of the DFlash family by our own code."""

    reads_views = False

    def __init__(self, draft: DFlashDraft) -> None:
        config, layers = draft.config, list[Any](draft.layers)
        self.draft = draft
        self.num_layers, self.head_dim = config.num_layers, config.head_dim
        attention = [layer.self_attn for layer in layers]
        # Keys and values of the context are one product for all layers, so their weights are contiguous.
        projections = [[a.q_proj, a.k_proj, a.v_proj] for a in attention]
        num_queries = config.num_heads * config.head_dim
        weights = join_weights([[linear.weight for linear in group] for group in projections])
        self.kv_weight, self.kv_bias = weights[:, num_queries:].mT, None
        biases: Sequence[Tensor | None] = [None] * len(layers)
        if config.attention_bias:
            joined_biases = join_weights([[linear.bias for linear in group] for group in projections])
            self.kv_bias, biases = joined_biases[:, None, num_queries:], list(joined_biases)
        k_norms = torch.stack([a.k_norm.weight for a in attention])[:, None, None, None]
        self.key_norm = Norm(k_norms, config.rms_norm_eps)
        self.is_joined = config.body.mixing is Mixing.JOINED and not config.body.own_context_weights
        if self.is_joined:
            self.fc, self.context_norm = linear_of(draft.fc), norm_of(draft.hidden_norm)
        self.norm, self.value_scale = norm_of(draft.norm), config.body.value_scale
        plain = [
            with_sinks(
                layer_of(
                    layer,
                    config.body.view(index).name,
                    config.num_heads,
                    config.num_kv_heads,
                    "silu",
                    qkv=Linear(weight.t(), bias),
                ),
                layer,
                self.value_scale,
            )
            for index, (layer, weight, bias) in enumerate(zip(layers, weights, biases, strict=True))
        ]
        self.use(plain)

    def use(self, plain: list[Layer]) -> None:
        """Compute with these layers, with sublayers filtered as in the draft."""
        self.plain_layers, self.layers = plain, list[Layer | FilteredLayer](plain)
        if self.draft.config.body.conv_kernel_size is not None:
            modules: list[Any] = [*self.draft.layers]
            self.layers = [
                FilteredLayer(layer, module.attention_conv, module.mlp_conv)
                for layer, module in zip(plain, modules, strict=True)
            ]

    def context(self, features: Tensor, tables: Tables) -> Tensor:
        if not self.is_joined:
            cos, sin = tables
            pairs = self.draft.context(features, (cos.transpose(1, 2), sin.transpose(1, 2)))
            return torch.stack([torch.stack(pair) for pair in pairs])
        rows, width = features.shape[:2]
        context = self.context_norm(self.fc(features.flatten(0, 1))).expand(self.num_layers, -1, -1)
        bias, weight = self.kv_bias, self.kv_weight
        both = torch.bmm(context, weight) if bias is None else torch.baddbmm(bias, context, weight)
        both = both.view(self.num_layers, rows, width, 2, -1, self.head_dim)
        rotate(both[:, :, :, 0], self.key_norm, tables)
        if self.value_scale != 1:
            both[:, :, :, 1] *= self.value_scale
        return both.permute(0, 3, 1, 4, 2, 5)

    def forward(self, embedded: Tensor, tables: Tables, seen: Views, cache: KVCache) -> Tensor:
        shape, x = embedded.shape[:2], embedded.flatten(0, 1)
        views = views_by_kind(seen, (layer.kind for layer in self.layers))
        group = self.plain_layers[0].attention.group
        folded = {kind: folded_mask(view, group) for kind, view in views.items()}
        for index, layer in enumerate(self.layers):
            x = layer(index, x, shape, tables, folded[layer.kind], cache)
        return self.norm(x).view(embedded.shape)


def with_sinks(usual: Layer, module: Any, value_scale: float) -> Layer:
    """Return a layer whose attention has the sinks of a draft's layer, and scales values."""
    sinks = getattr(module.self_attn, "attention_sink_bias", None)
    own = None if sinks is None else sinks.detach()
    return replace(usual, attention=replace(usual.attention, sinks=own, value_scale=value_scale))


def folded_mask(view: Seen | BlockView, group: int) -> Seen:
    assert not isinstance(view, BlockView), "views are for kernels"
    return fold_heads(view, group) if isinstance(view, Tensor) else view


def views_by_kind(seen: Views, kinds: Iterable[str]) -> Mapping[str, Seen | BlockView]:
    """Return the view in each kind of layer, given a mapping or one view for all kinds."""
    return seen if isinstance(seen, Mapping) else dict.fromkeys(kinds, seen)


class NativeEagle3(Eagle3Network):
    """An EAGLE-3 draft by our own code; P-EAGLE has `further` layers above the first."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.config = config = draft.config
        heads = config.num_heads, config.num_kv_heads
        self.layer = layer_of(draft.midlayer, "full", *heads, "silu")
        self.further = [layer_of(layer, "full", *heads, "silu") for layer in draft.further_layers]
        self.hidden_norm, self.norm = norm_of(draft.midlayer.hidden_norm), norm_of(draft.norm)
        self.head: Product = lay_out(draft.lm_head)
        self.fc = linear_of(draft.fc)
        self.input_norm = norm_of(draft.input_norm) if config.norm_before_fc else None
        self.fc_norms = [norm_of(norm) for norm in draft.fc_norm] if config.fc_norm else []

    def fuse(self, features: Tensor) -> Tensor:
        return self.fc(self.normed_features(features.flatten(0, 1))).view(*features.shape[:2], -1)

    def normed_features(self, flat: Tensor) -> Tensor:
        """Return features [T, K * Ht] after the norms that some drafts have before `fc`."""
        if self.input_norm is not None:
            flat = self.input_norm(flat)
        if not self.fc_norms:
            return flat
        parts = flat.chunk(len(self.fc_norms), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        layer, shape = self.layer, hidden.shape[:2]
        x, pair = self.inputs(embedded, hidden)
        if isinstance(seen, Tensor):
            seen = fold_heads(seen, layer.attention.group)
        attended = layer.attention(0, pair, shape, tables, seen, cache)
        x = layer.fed(layer.mixed(x, attended))
        for index, further in enumerate(self.further, start=1):
            x = further(index, x, shape, tables, seen, cache)
        return (self.norm(x) if self.config.norm_output else x).view(hidden.shape)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream [B * N, H], a copy of its own, and attention's input [B * N, 2 * H]."""
        flat = hidden.flatten(0, 1)
        normed = self.hidden_norm(flat)
        pair = torch.cat([self.layer.input_norm(embedded.flatten(0, 1)), normed], dim=-1)
        return normed if self.config.norm_before_residual else flat.clone(), pair

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden if self.config.norm_output else self.norm(hidden))


# The forward passes of MTP heads over our cache: by our own code if it supports the layer, else by transformers' layer.


COVERED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Kinds of layers that our own code computes."""


class MTPNetwork(StepNetwork, Protocol):
    """The passes of MTP heads."""

    is_steady: bool
    """Whether its passes can be captured."""

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary: ...


def network_of(draft: MTPDraft) -> PublishedMTP | NativeMTP:
    """Return our own code for heads that it supports, else transformers' code."""
    text = draft.config.text
    turns_whole_heads = (text.rope_parameters or {}).get("partial_rotary_factor", 1.0) == 1.0
    covers = text.model_type in COVERED and text.hidden_act in ACTIVATIONS and turns_whole_heads
    return NativeMTP(draft) if covers else PublishedMTP(draft)


class PublishedMTP(MTPNetwork):
    """Computes heads by the layer of transformers, whose masks are additive."""

    is_steady = False

    def __init__(self, draft: MTPDraft, place: int = 0) -> None:
        """`place` is the index of the layer in the cache."""
        self.draft, self.place = lay_out(draft), place
        self.kind = KINDS[draft.config.text.model_type]
        self._kv: KVCache | None = None

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return cosines and sines of `length` positions, without the signs that our own code needs."""
        return Rotary.of(*angles(self.draft.rotary().to(device), self.kind, length, dtype, device))

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        assert not isinstance(seen, Lengths), "transformers' layers take masks"
        if self._kv is not cache:
            self._kv, self._layers = cache, Cache(layers=[CachedLayer(cache, self.place, self.kind)])
        cos, sin = (table[:, :, 0].expand(len(hidden), -1, -1) for table in tables)
        out: Tensor = self.draft(embedded, hidden, (cos, sin), seen, self._layers)
        return out


class NativeMTP(MTPNetwork):
    """Computes heads by our own code, laid out like the target's layers (`layers.py`)."""

    is_steady = True

    def __init__(self, draft: MTPDraft) -> None:
        config = draft.config
        self.draft = draft
        self.layer = layer_of(draft.layer, FULL, config.num_heads, config.num_kv_heads, config.text.hidden_act)
        self.embedding_norm, self.hidden_norm = norm_of(draft.pre_fc_norm_embedding), norm_of(draft.pre_fc_norm_hidden)
        self.fc, self.norm = linear_of(draft.fc), norm_of(draft.norm)

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return cosines and signed sines of `length` positions."""
        return Rotary.of(*rotary_tables(self.draft.rotary().to(device), [FULL], length, dtype, device)[FULL])

    def forward(self, embedded: Tensor, hidden: Tensor, tables: Tables, seen: Seen, cache: KVCache) -> Tensor:
        parts = [self.embedding_norm(embedded.flatten(0, 1)), self.hidden_norm(hidden.flatten(0, 1))]
        x = self.fc(torch.cat(parts, dim=-1))
        if isinstance(seen, Tensor):
            seen = fold_heads(seen, self.layer.attention.group)
        x = self.layer(0, x, hidden.shape[:2], tables, seen, cache)
        return self.norm(x).view(hidden.shape)
