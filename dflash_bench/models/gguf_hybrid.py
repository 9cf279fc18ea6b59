"""A Qwen3.5 target for llama.cpp: layers of linear attention, and MTP heads as an additional layer.

According to llama.cpp's converter, norms are stored with the 1 that Qwen adds to them, decays as -exp(A_log), and the
value heads of linear attention in the order in which ggml repeats the fewer key heads: the first head of each group,
then the second of each, where publishers' files go group by group. A head block is the layer after the last one; it has
the target's embedding and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.models import mtp_heads
from dflash_bench.models.nets.mtp import PREFIX

MODEL_TYPE, ARCHITECTURE = "qwen3_5_text", "qwen35"
FULL = "full_attention"
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
BARE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
HEADS = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
OF_IMAGES, OF_TEXT = "visual.", "language_model."


def text_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the text model's tensors by their short names, and its MTP heads', if any.

    Raises UserError for incomplete heads.
    """
    kept = {name.removeprefix(OF_TEXT): tensor for name, tensor in tensors.items() if not name.startswith(OF_IMAGES)}
    heads = {name: tensor for name, tensor in kept.items() if name.startswith(PREFIX)}
    if heads:
        mtp_heads.read(folder, headers_only=True)
    return {name: tensor for name, tensor in kept.items() if name not in heads}, heads


def settings(config: Any, has_heads: bool) -> dict[str, Any]:
    """Return the differences from a dense target's settings. Raises UserError for an unsupported order of layers."""
    interval = config.layer_types.index(FULL) + 1 if FULL in config.layer_types else 0
    if any((kind == FULL) != ((layer + 1) % interval == 0) for layer, kind in enumerate(config.layer_types)):
        raise UserError(
            "llama.cpp has full attention in every n-th layer, and this target's layers are in another order"
        )
    rope = config.rope_parameters
    rotated = int(config.head_dim * rope.get("partial_rotary_factor", 0.25))
    return {
        "block_count": config.num_hidden_layers + has_heads,
        **({"nextn_predict_layers": 1} if has_heads else {}),
        "rope.dimension_count": rotated,
        "rope.dimension_sections": [*rope.get("mrope_section", [rotated // 2, 0, 0]), 0],
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": interval,
    }


@dataclass(frozen=True, slots=True)
class _ValueHeads:
    """The value heads of linear attention: `each` of them per group, which has one key head."""

    groups: int
    each: int
    size: int
    first: int
    """The row of queries, keys and values at which the values begin."""

    @classmethod
    def of(cls, config: Any) -> _ValueHeads:
        groups, size = config.linear_num_key_heads, config.linear_value_head_dim
        first = 2 * groups * config.linear_key_head_dim
        return cls(groups, config.linear_num_value_heads // groups, size, first)

    def tiled(self, x: Tensor, size: int, dim: int = 0) -> Tensor:
        """Reorder the heads, of `size` rows each, along a dimension."""
        apart: Tensor = x.unflatten(dim, (self.groups, self.each, size))
        return apart.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()

    def stored(self, part: str, x: Tensor) -> Tensor:
        """Return a tensor of a layer as llama.cpp stores it."""
        match part.removeprefix("linear_attn."):
            case "A_log":
                return self.tiled(-x.float().exp(), 1)
            case "dt_bias":
                return self.tiled(x.float(), 1)
            case "in_proj_a" | "in_proj_b":
                return self.tiled(x, 1)
            case "in_proj_z":
                return self.tiled(x, self.size)
            case "out_proj":
                return self.tiled(x, self.size, dim=1)
            case "in_proj_qkv":
                return torch.cat([x[: self.first], self.tiled(x[self.first :], self.size)])
            case "conv1d":
                return self.stored("in_proj_qkv", x.squeeze(1).float())
        return x


def named(config: Any, trunk: Mapping[str, Tensor], heads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors by llama.cpp's names."""
    values, last, found = _ValueHeads.of(config), config.num_hidden_layers, dict[str, Tensor]()
    for name, tensor in trunk.items():
        stem, _, _ = name.rpartition(".")
        if stem in OUTSIDE:
            found[f"{OUTSIDE[stem]}.weight"] = tensor.float() + 1 if stem == "norm" else tensor
        else:
            _, number, part = name.split(".", 2)
            found |= _of_layer(values, int(number), part, tensor)
    for name, tensor in heads.items():
        stem = name.removeprefix(PREFIX).removesuffix(".weight")
        if stem in HEADS:
            found[f"blk.{last}.{HEADS[stem]}.weight"] = tensor if stem == "fc" else tensor.float() + 1
        else:
            found |= _of_layer(values, last, name.removeprefix(f"{PREFIX}layers.0."), tensor)
    return found


def _of_layer(values: _ValueHeads, number: int, part: str, tensor: Tensor) -> dict[str, Tensor]:
    stem = part.removesuffix(".weight")
    if stem in BARE:
        return {f"blk.{number}.{BARE[stem]}": values.stored(stem, tensor)}
    is_centred = stem.endswith("norm") and stem != "linear_attn.norm"
    return {f"blk.{number}.{IN_LAYER[stem]}.weight": tensor.float() + 1 if is_centred else values.stored(stem, tensor)}
