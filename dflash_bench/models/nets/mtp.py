"""Heads for multi-token prediction: a decoder layer of the target's kind, over pairs of a token and a state.

The target's state of position t, after its final norm, is paired with token x_{t+1}:

    x = fc([norm(embedding of x_{t+1}); norm(state of t)])

goes through one full-attention layer at position t and a norm, and the target's own head then predicts x_{t+2}. The
next step does the same with the layer's own normed output in place of the state. The layer is built by transformers
from the target's config, so it has that model's norms, gates, rotary positions and experts.
(DeepSeek-V3, arXiv 2412.19437, section 2.2, with a single module for all depths, as Qwen3-Next and Qwen3.5 have it.
DeepSeek and GLM publish one module, and SGLang and transformers step it so; vLLM steps on its output before the norm.)
MiMo-V2 publishes several modules, one for each depth, as in that section: module k reads x_{t+1+k} beside the output of
the module before it at position t, and predicts x_{t+2+k}.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.models.architecture import attention_windows, cache_argument, decoder_layers, final_norm
from dflash_bench.models.configs import Heads, optional
from dflash_bench.models.nets.layers import DraftShape

FULL = "full_attention"
INDEXED = "indexed_attention"
KINDS = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), FULL),
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), FULL),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), INDEXED),
    "mimo_v2_flash": "sliding_attention",
}
"""The kind of attention in the heads' layer, by the kind of target."""

PREFIX = "mtp."
"""The prefix of heads in Qwen's layout."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout with a number for each module. `pattern` matches prefix, number, and the name within the module."""

    pattern: re.Pattern[str]
    parts: Mapping[str, str]
    """The network's names, by the stored names, of what lies around the layer or is called otherwise in it."""


_PARTS = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
BEHIND = Layout(re.compile(r"((?:(?:model|language_model)\.)*layers\.)(\d{1,4})\.(.+)"), _PARTS)
"""DeepSeek's layout: the heads are the layer after the target's last."""
MIMO = Layout(
    re.compile(r"((?:model\.)?mtp_layers\.)(\d{1,4})\.(.+)"),
    {
        "token_layernorm": "pre_fc_norm_embedding",
        "hidden_layernorm": "pre_fc_norm_hidden",
        "input_proj": "fc",
        "final_layernorm": "norm",
    },
)
MIMO_V2 = Layout(
    re.compile(r"((?:model\.)?mtp\.layers\.)(\d{1,4})\.(.+)"),
    {
        **_PARTS,
        "final_layernorm": "norm",
        "pre_mlp_layernorm": "layers.0.post_attention_layernorm",
        "self_attn.attention_sink_bias": "layers.0.self_attn.sinks",
    },
)
LAYOUTS = (BEHIND, MIMO, MIMO_V2)


def numbered(name: str) -> tuple[Layout, re.Match[str]] | None:
    """Return the layout that numbers the module of a stored tensor, and the match of its pattern, or None."""
    matches = ((layout, layout.pattern.fullmatch(name)) for layout in LAYOUTS)
    return next(((layout, match) for layout, match in matches if match), None)


def own_name(name: str, depth: int) -> str | None:
    """Return the network's name for a stored tensor, or None if the tensor is not part of heads.

    `depth` is the target's number of layers.
    """
    if (found := numbered(name)) is None:
        return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None
    layout, match = found
    number = int(match[2]) - (depth if layout is BEHIND else 0)
    # A scalar or bias has no ending, or one that is not `weight`.
    whole, (part, _, kind) = layout.parts.get(match[3]), match[3].rpartition(".")
    own = whole or (f"{layout.parts[part]}.{kind}" if part in layout.parts else f"layers.0.{match[3]}")
    return None if number < 0 else module_prefix(number) + own


def module_prefix(number: int) -> str:
    """Return the prefix of a module's names in the network, by its number."""
    return f"further.{number - 1}." if number else ""


def heads_among(names: Iterable[str], depth: int) -> dict[str, str]:
    """Return the stored names of the heads' tensors, by the network's names.

    A layer after the last one counts only with its projection: otherwise config.json belongs to other weights.
    """
    found = {own: name for name in names if (own := own_name(name, depth))}
    is_behind = any(map(BEHIND.pattern.fullmatch, found.values()))
    return {} if is_behind and "fc.weight" not in found else found


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPConfig(DraftShape):
    """The heads' shape. `text` is transformers' config of a module's layer: the target's text config, cut to it."""

    text: Any = field(hash=False)
    num_layers: int = 1
    """The number of modules, each with a layer."""

    @property
    def window(self) -> int | None:
        """Return the number of places that the layer sees, or None if it sees all."""
        return next(iter(attention_windows(self.text).values()))

    @classmethod
    def of(cls, config: Any, is_dense: bool = False, num_layers: int = 1) -> MTPConfig:
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
            text.layer_types = [KINDS[config.model_type]]
        if optional(text, "indexer_types"):
            text.indexer_types = ["full"]
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
            num_layers=num_layers,
        )


class MTPDraft(nn.Module):
    """Parameter names are those of published checkpoints after `mtp.`; `further` modules are named as the first is."""

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
        single = replace(config, num_layers=1)
        self.further = nn.ModuleList(MTPDraft(single) for _ in range(config.num_layers - 1))

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
            self.pair(embedded, hidden),
            position_embeddings=angles,
            attention_mask=mask,
            **{cache_argument(self.layer): cache},
        )
        normed: Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return normed


def _shell(text: Any) -> Any:
    """Return a causal LM with this config on the `meta` device, for its parts."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(text, dtype=torch.float32)
