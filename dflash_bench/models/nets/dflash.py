"""The DFlash draft network: a few transformer layers that fill a block of masks in one pass (arXiv 2602.06036).

The K tapped features of the target are fused once, H_t = RMSNorm(W_c [H^(l1); ...; H^(lK)]), and enter every layer as
keys and values only: Q = W_Q H_d, K = [W_K H_t; W_K H_d], V = [W_V H_t; W_V H_d] along the sequence (section 4.1, KV
injection), with q and k normed per head and rotated. Context has no queries, output projection or feed-forward. The
network is independent of caches: the caller passes `attend`, which gets the block's queries, keys and values and
returns attention over context and block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.models.nets.bodies import PLAIN, BlockConvolution, DraftBody, Mixing, filtered, mixed_features
from dflash_bench.models.nets.corrections.base import CorrectionConfig, CorrectionHead, HeadSizes
from dflash_bench.models.nets.layers import (
    DraftLayer,
    DraftNetwork,
    DraftShape,
    RMSNorm,
    Tables,
    merge_heads,
    rotate,
    split_heads,
)

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [B, heads, N, D], k [B, kv_heads, N, D], v like k) -> [B, heads, N, D]; it includes the layer's sinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DraftShape):
    """The network's shape and variants."""

    num_layers: int
    block_size: int
    mask_token_id: int
    shifted_labels: bool = False
    """Slot k predicts the token after slot k, so all slots draft; otherwise it predicts its own, and slot 0 is idle."""
    last_slot_idle: bool = False
    """With shifted labels: the last slot is attended to by the others, but drafts nothing itself."""
    own_head: bool = False
    draft_vocab_size: int | None = None
    """Number of rows of a reduced head; None for the target's whole vocabulary."""
    body: DraftBody = PLAIN
    """How the body differs from the first DFlash drafts."""
    correction: CorrectionConfig | None = None
    """A head that corrects the block's own predictions; None: their likeliest tokens are drafted."""

    @property
    def kind(self) -> str:
        """Return the publisher's name for this kind of draft."""
        return self.body.kind if self.correction is None else self.correction.kind

    @property
    def num_idle(self) -> int:
        """Return the number of slots of a block that draft nothing."""
        return 0 if self.shifted_labels and not self.last_slot_idle else 1

    def num_drafts(self, block_size: int) -> int:
        """Return the number of tokens that a block of this size proposes."""
        return block_size - self.num_idle

    def block_for(self, num_drafts: int) -> int:
        """Return the block size that proposes this many tokens."""
        return num_drafts + self.num_idle

    def slots(self, block_size: int) -> slice:
        """Return the slots of a block that draft."""
        first = 0 if self.shifted_labels else 1
        return slice(first, first + self.num_drafts(block_size))

    @property
    def has_fixed_slots(self) -> bool:
        """Whether the head has weights per slot, which fit neither a larger block nor other labels."""
        return self.correction is not None and self.correction.is_of_slots

    @property
    def head_sizes(self) -> HeadSizes:
        """Return the sizes that a correction head must fit."""
        return HeadSizes(
            self.hidden_size,
            self.vocab_size,
            self.draft_vocab_size or self.vocab_size,
            self.block_size,
            self.shifted_labels,
            self.rms_norm_eps,
        )


class DFlashLayer(DraftLayer):
    """A layer over the block; context and block share the same key and value weights (paper, section 4.1).

    DFlare's context has its own key and value weights, and DFlash 2 filters the inputs and outputs of attention and
    feed-forward over the block.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config, config.hidden_size, qk_norm=True)
        body, attention = config.body, self.self_attn
        if body.own_context_weights:
            keys = config.num_kv_heads * config.head_dim
            width = config.target_hidden_size or config.hidden_size
            attention.k_proj_target = nn.Linear(width, keys, bias=config.attention_bias)
            attention.v_proj_target = nn.Linear(width, keys, bias=config.attention_bias)
        self.value_scale = body.value_scale
        if body.has_sinks:
            attention.attention_sink_bias = nn.Parameter(torch.zeros(config.num_heads))
        self.is_filtered = body.conv_kernel_size is not None
        if body.conv_kernel_size is not None:
            for name in ("attention_conv", "mlp_conv"):
                conv = BlockConvolution(config.hidden_size, body.conv_kernel_size, body.conv_group_size)
                self.add_module(name, conv)

    def context(self, features: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, kv_heads, N, D] of this layer's context [B, N, H]."""
        attention: Any = self.self_attn
        if not hasattr(attention, "k_proj_target"):
            return self._key_value(features, tables)
        heads = split_heads(attention.k_proj_target(features), attention.head_dim)
        key = rotate(attention.k_norm(heads), tables)
        return key, self._scaled(split_heads(attention.v_proj_target(features), attention.head_dim))

    def _key_value(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        key, value = self.self_attn.key_value(x, tables)
        return key, self._scaled(value)

    def _scaled(self, value: Tensor) -> Tensor:
        return value if self.value_scale == 1 else value * self.value_scale

    def forward(self, index: int, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Return the residual stream [B, N, H] after this layer, given the stream x [B, N, H]."""
        if self.is_filtered:
            return self._filtered(index, x, tables, attend)
        normed = self.input_layernorm(x)
        key, value = self._key_value(normed, tables)
        mixed = attend(index, self.self_attn.query(normed, tables), key, value)
        return self.add_outputs(x, mixed)

    def _filtered(self, index: int, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        convolutions: Any = (self.attention_conv, self.mlp_conv)
        normed = self.input_layernorm(x)
        before, after = convolutions[0].coefficients(normed)
        read = filtered(normed, before)
        mixed = attend(index, self.self_attn.query(read, tables), *self._key_value(read, tables))
        x = x + filtered(self.self_attn.o_proj(merge_heads(mixed)), after)
        normed = self.post_attention_layernorm(x)
        before, after = convolutions[1].coefficients(normed)
        out: Tensor = x + filtered(self.mlp(filtered(normed, before)), after)
        return out


class DFlashDraft(DraftNetwork):
    """Parameter names are those of z-lab checkpoints: 11 tensors per layer and three others.

    Some publishers add an embedding and a head, which may be reduced as in EAGLE-3.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        body, width = config.body, config.target_hidden_size or config.hidden_size
        if body.mixing in (Mixing.JOINED, Mixing.AT_INPUT):
            self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        elif body.mixing is not Mixing.ABSENT:
            weights = torch.zeros(config.num_layers, len(config.target_layer_ids))
            self.layer_fusion_weights = nn.Parameter(weights)
            if body.mixing is Mixing.BY_LAYER:
                self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
            else:
                norms = (RMSNorm(width, config.rms_norm_eps) for _ in range(config.num_layers))
                self.fusion_norms = nn.ModuleList(norms)
        if body.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size or config.vocab_size, bias=False)
        if config.draft_vocab_size is not None:
            self.add_vocabulary_map(config.draft_vocab_size, config.vocab_size)
        if config.correction is not None:
            for name, module in config.correction.modules(config.head_sizes).items():
                self.add_module(name, module)

    @property
    def correction(self) -> CorrectionHead | None:
        """Return the head that corrects its predictions, or None."""
        return None if self.config.correction is None else self.config.correction.head(self)

    def context(self, features: Tensor, tables: Tables) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values per layer [B, kv_heads, N, D] for the features [B, N, K * Ht] of committed tokens."""
        layers: list[Any] = [*self.layers]
        return [layer.context(own, tables) for layer, own in zip(layers, self.contexts(features), strict=True)]

    def contexts(self, features: Tensor) -> Sequence[Tensor]:
        """Return each layer's input [B, N, H] from features [B, N, K * Ht]."""
        mixing = self.config.body.mixing
        if mixing is Mixing.JOINED:
            return [self.hidden_norm(self.fc(features))] * self.config.num_layers
        mixed = mixed_features(self.layer_fusion_weights, features)
        if mixing is Mixing.BY_LAYER:
            return [self.hidden_norm(own) for own in mixed]
        return [norm(own) for norm, own in zip(self.fusion_norms, mixed, strict=True)]

    def context_inputs(self, embedded: Tensor, features: Tensor | None) -> Tensor:
        """Return the input [B, N, H] of a context that passes through the layers, given its embeddings [B, N, H]."""
        if features is None or self.config.body.mixing is Mixing.ABSENT:
            return embedded
        fused: Tensor = self.hidden_norm(self.fc(features))
        return embedded + fused

    def embed_block(self, block: Tensor, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the layers' input [B, N, H] for a block of token ids [B, N]; `embed` looks up raw embedding rows."""
        body = self.config.body
        embedded = embed(block)
        if body.own_mask:
            is_mask = (block == self.config.mask_token_id)[..., None]
            embedded = torch.where(is_mask, self.mask_embedding.to(embedded.dtype), embedded)
        return embedded if body.embedding_scale == 1 else embedded * body.embedding_scale

    def forward(self, embedded: Tensor, tables: Tables, attend: Attend) -> Tensor:
        """Return normed hidden states [B, N, H] for the head, given embeddings [B, N, H] of [anchor, mask, ...]."""
        x = embedded
        for index, layer in enumerate(self.layers):
            x = layer(index, x, tables, attend)
        out: Tensor = self.norm(x)
        return out


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Return layers spaced evenly from the second to the third-to-last, z-lab's default if a config names none."""
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (count - 1)) for i in range(count))


def initialise(draft: nn.Module, seed: int) -> None:
    """Fill matrices with small normal weights from a generator with this seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02, generator=generator)
