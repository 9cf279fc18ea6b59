"""What a GGUF file says of a network: settings and tensors, by llama.cpp's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_bench.errors import UserError

LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "fc": "fc"}
_IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Network:
    """`settings` stand below the architecture's name in the file; `tensors` have llama.cpp's names."""

    architecture: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Besides the tokenizer's own, by GGUF's names."""


def name_of(tensor: str) -> str:
    """llama.cpp's name of a tensor. Raises UserError if it has none."""
    if match := _IN_LAYER.fullmatch(tensor):
        number, part, kind = match.groups()
        if part in LAYER:
            return f"blk.{number}.{LAYER[part]}.{kind}"
    stem, _, kind = tensor.rpartition(".")
    if stem in OUTSIDE and kind == "weight":
        return f"{OUTSIDE[stem]}.{kind}"
    raise UserError(f"llama.cpp has no place for tensor {tensor}")


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of a query or key projection, [heads * D, ...], for an architecture that rotates neighbours.

    Publishers' Llama files put the two halves of a head one after the other; GGUF alternates between them.
    """
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape).contiguous()


def in_gguf_types(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Matrices in the type that they are stored in; vectors, which are norms and biases, in float32, as llama.cpp
    wants."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype not in DTYPES:
            raise UserError(
                f"tensor {name} holds {tensor.dtype}; only float32, float16 and bfloat16 are written as GGUF"
            )
        yield name, tensor.float() if tensor.ndim == 1 and tensor.is_floating_point() else tensor
