"""A vLLM plugin that norms a DFlash draft's context keys with each layer's own weight.

vLLM hands its RMSNorm kernel the keys of all layers at once, [layers, tokens, heads, head_dim], and one weight per
layer. Its CPU kernel reads the first weight only, so every further layer sees wrong keys: fewer drafts are accepted,
the tokens stay right. Run as a program it measures that kernel and prints its largest error.
"""

from typing import Any

import torch

EPSILON = 1e-6


def register() -> None:
    """vLLM calls this in each of its processes, before a model is built."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = norm_per_layer


def norm_per_layer(self: Any, keys: torch.Tensor) -> torch.Tensor:
    """Keys [L, N, heads, head_dim] of L layers -> the same, normed."""
    return rms_norm(keys, self._k_norm_weights, self._rms_norm_eps)


def rms_norm(keys: torch.Tensor, weights: torch.Tensor, epsilon: float) -> torch.Tensor:
    scale = torch.rsqrt(keys.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (keys * scale).to(keys.dtype) * weights[:, None, None]


def kernel_error() -> float:
    """How far vLLM's kernel is from the formula, on keys of three layers with three weights."""
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    torch.manual_seed(0)
    keys, weights = torch.randn(3, 4, 2, 64), torch.rand(3, 64) + 0.5
    normed = torch.empty_like(keys)
    _custom_ops.rms_norm(normed, keys, weights, EPSILON)
    return (normed - rms_norm(keys, weights, EPSILON)).abs().max().item()


if __name__ == "__main__":
    print(kernel_error())
