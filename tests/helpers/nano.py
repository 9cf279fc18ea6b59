"""Nano and its prompts, as its own decoding reads them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dflash_bench.models import loading, presets


@cache
def models() -> loading.Models:
    if not (presets.NANO / "dflash" / "model.safetensors").exists():
        pytest.skip("the nano draft is not trained yet")
    return loading.load("nano", ["dflash"], "cpu", torch.float32)


def encoded(question: str) -> list[int]:
    tokenizer = models().tokenizer
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
