"""Tiny targets of each class that our own forward passes know, and passes of every shape through them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from dflash_bench.engine.target import Output, Target
from helpers.tiny_architectures import EXPERTS, SHAPE
from helpers.toy import tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 32,
}
ALTERNATING = ["full_attention", "sliding_attention"] * 2


def qwen2(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        bos_token_id=0,
        eos_token_id=1,
        **changes,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(10) if parameter.ndim > 1 else parameter.add_(0.1)
    return model


def biased(kind: str, **changes: Any) -> Any:
    """Fresh biases are 0, and would hide that one is forgotten."""
    model = copy.deepcopy(tiny(kind, **changes))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    return model


def of_class(name: str, config_name: str, **changes: Any) -> Any:
    """Norms and biases are not left as they are made: fresh ones hide what is forgotten."""
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": 4, **changes}
    model = getattr(transformers, name)(getattr(transformers, config_name)(**shape)).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            is_drawn = parameter.ndim > 1 and bool(parameter.any())
            parameter.mul_(10) if is_drawn else parameter.add_(0.2 * torch.randn_like(parameter))
    return model


GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "layer_types": ALTERNATING,
    "attention_bias": True,
    "rope_parameters": YARN,
}
GEMMA3 = {"sliding_window": 6, "layer_types": ALTERNATING, "query_pre_attn_scalar": 12}
KINDS: dict[str, Any] = {
    "gemma": lambda: of_class("GemmaForCausalLM", "GemmaConfig"),
    "gemma 3, windows, two tables of angles": lambda: of_class("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA3),
    "gpt-oss, experts, sinks, windows": lambda: of_class("GptOssForCausalLM", "GptOssConfig", **GPT_OSS),
    "qwen3, experts": lambda: of_class("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS),
    "qwen3, experts in every other layer": lambda: of_class(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **EXPERTS, decoder_sparse_step=2
    ),
    "llama": lambda: tiny("llama"),
    "llama, one head of keys": lambda: tiny("llama", num_key_value_heads=1),
    "llama, as many keys as queries": lambda: tiny("llama", num_key_value_heads=4),
    "llama, biases": lambda: biased("llama", attention_bias=True, mlp_bias=True),
    "llama 3 angles": lambda: tiny.__wrapped__("llama", rope_parameters=LLAMA3),
    "yarn angles": lambda: tiny.__wrapped__("llama", rope_parameters=YARN),
    "qwen2, biases": qwen2,
    "qwen2, some windows": lambda: qwen2(use_sliding_window=True, sliding_window=6, layer_types=ALTERNATING),
    "qwen3, normed heads": lambda: tiny("qwen3"),
    "mistral": lambda: tiny("mistral"),
    "mistral, window": lambda: tiny("mistral", sliding_window=6),
}
PROMPTS: list[list[int]] = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12], list(range(2, 40)), [90, 1, 90]]


def passes(target: Target, num_rows: int, taps: tuple[int, ...] = (2, 0)) -> list[Output]:
    """A prefill, one token, a block, a tree and a whole block."""
    prompts = PROMPTS[-num_rows:] if num_rows > 1 else PROMPTS[2:3]
    target.tap(taps)
    target.begin(num_rows, 64)
    starts = [len(prompt) for prompt in prompts]
    block = torch.tensor([[7, 8, 9, 10, 11]] * num_rows)
    parents = torch.tensor([[-1, -1, 0, 2]] * num_rows)
    later = [start + 1 for start in starts]
    return [
        target.prefill(prompts),
        target.forward(block[:, :1], starts),
        target.forward(block, later),
        target.forward(block, later, parents),
        target.forward(block, later, whole_block=True),
    ]
