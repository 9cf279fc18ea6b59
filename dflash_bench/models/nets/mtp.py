"""Heads for multi-token prediction: a decoder layer of the target's kind, over pairs of a token and a state.

The target's state of position t, after its final norm, is paired with token x_{t+1}:

    x = fc([norm(embedding of x_{t+1}); norm(state of t)])

goes through one full-attention layer at position t and a norm, and the target's own head then predicts x_{t+2}. The
next step does the same with the layer's own normed output in place of the state. The layer is built by transformers
from the target's config, so it has that model's norms, gates, rotary positions and experts.
(DeepSeek-V3, arXiv 2412.19437, section 2.2, with a single module for all depths, as Qwen3-Next and Qwen3.5 have it.
DeepSeek and GLM publish one module, and SGLang and transformers step it so; vLLM steps on its output before the norm.)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.models.architecture import cache_argument, decoder_layers, final_norm
from dflash_bench.models.configs import Heads, optional
from dflash_bench.models.nets.layers import DraftShape

FULL = "full_attention"
KINDS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v3", "glm4_moe",
    "glm4_moe_lite",
)  # fmt: skip
"""Kinds of targets whose layer the heads can have."""

PREFIX = "mtp."
"""The prefix of heads in Qwen's layout."""
LAYER_BEHIND = re.compile(r"((?:(?:model|language_model)\.)*layers\.)(\d{1,4})\.(.+)")
"""A layer's tensor; in DeepSeek's layout the heads are the layer after the target's last."""
MIMO = re.compile(r"((?:model\.)?mtp_layers\.)(\d{1,4})\.(.+)")
PARTS = (
    {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"},
    {
        "token_layernorm": "pre_fc_norm_embedding", "hidden_layernorm": "pre_fc_norm_hidden", "input_proj": "fc",
        "final_layernorm": "norm",
    },
)  # fmt: skip
"""DeepSeek's and MiMo's names for the parts around the layer."""


def own_name(name: str, depth: int) -> str | None:
    """Return the network's name for a stored tensor, or None if the tensor is not part of heads.

    `depth` is the target's number of layers.
    """
    if name.startswith(PREFIX):
        return name.removeprefix(PREFIX)
    match, first = LAYER_BEHIND.fullmatch(name), depth
    if match is None:
        match, first = MIMO.fullmatch(name), 0
    if match is None or int(match[2]) < first:
        return None
    part, _, kind = match[3].rpartition(".")
    number, parts = int(match[2]) - first, PARTS[first == 0]
    return f"{parts[part]}.{kind}" if part in parts and not number else f"layers.{number}.{match[3]}"


def heads_among(names: Iterable[str], depth: int) -> dict[str, str]:
    """Return the stored names of the heads' tensors, by the network's names.

    A layer after the last one counts only with its projection: otherwise config.json belongs to other weights.
    """
    found = {own: name for name in names if (own := own_name(name, depth))}
    is_behind = any(map(LAYER_BEHIND.fullmatch, found.values()))
    return {} if is_behind and "fc.weight" not in found else found


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(DraftShape):
    """The heads' shape. `text` is transformers' config of their one layer: the target's text config, cut to it."""

    text: Any = field(hash=False)

    @classmethod
    def of(cls, config: Any, is_dense: bool = False) -> MTPConfig:
        """Return the config of heads for a target with this text config.

        `is_dense` uses a plain feed-forward where the target's layers have experts. Raises UserError for a kind of
        target whose layer the heads cannot have.
        """
        if config.model_type not in KINDS:
            known = ", ".join(KINDS)
            raise UserError(f"MTP heads of a {config.model_type} target are not supported; only those of {known} are")
        text, heads = copy.deepcopy(config), Heads.of_first(config)
        text.num_hidden_layers = 1
        if optional(text, "layer_types"):
            text.layer_types = [FULL]
        if optional(text, "mlp_only_layers") is not None:
            text.mlp_only_layers, text.decoder_sparse_step = [0] if is_dense else [], 1
        if optional(text, "first_k_dense_replace") is not None:
            text.first_k_dense_replace = int(is_dense)
        if optional(text, "mlp_layer_types"):
            text.mlp_layer_types = ["dense" if is_dense else "sparse"]
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=optional(config, "intermediate_size", "moe_intermediate_size"),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.key_size,
            vocab_size=config.vocab_size,
            target_layer_ids=(config.num_hidden_layers - 1,),
            num_target_layers=config.num_hidden_layers,
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            text=text,
        )


class MTPDraft(nn.Module):
    """Parameter names are those of published checkpoints after `mtp.`."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.config = config
        model = _shell(config.text)
        norm, size = final_norm(model), config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False, device="meta")
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = copy.deepcopy(norm), copy.deepcopy(norm)
        self.layers = decoder_layers(model)
        self.norm = norm
        # Has no weights: created where it is needed, since moving to a device would lose its angles.
        self._rotary_type = type(model.get_decoder().rotary_emb)

    @property
    def layer(self) -> Any:
        return self.layers[0]

    @property
    def has_experts(self) -> bool:
        return not hasattr(self.layer.mlp, "gate_proj")

    def rotary(self) -> nn.Module:
        """Return the module of the layer's rotary angles, on the CPU."""
        with torch.device("cpu"):
            module: nn.Module = self._rotary_type(config=self.config.text)
        return module

    def pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's input [B, N, H], for the tokens' embeddings and the states before them [B, N, H]."""
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        out: Tensor = self.fc(torch.cat(both, dim=-1))
        return out

    def forward(
        self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, cache: Any = None
    ) -> Tensor:
        """Return the input of the target's head, and the next step's states [B, N, H].

        `angles` are cosines and sines [B or 1, N, D] of the positions, `mask` is additive [B, 1, N, visible], or None
        for a single token that sees everything, and `cache` is transformers' or None.
        """
        out = self.layer(
            self.pair(embedded, hidden), position_embeddings=angles, attention_mask=mask,
            **{cache_argument(self.layer): cache},
        )  # fmt: skip
        normed: Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return normed


def _shell(text: Any) -> Any:
    """Return a causal LM with this config on the `meta` device, for its parts."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(text, dtype=torch.float32, attn_implementation="sdpa")
