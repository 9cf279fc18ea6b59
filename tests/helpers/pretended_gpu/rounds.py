"""Rounds of decoding on the pretended device: each is watched, and one place may read the device once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dflash_bench.engine import cache, lengths, loop, steady, target
from dflash_bench.engine.drafters import base, dflash
from dflash_bench.engine.forward import layers
from helpers.pretended_gpu.pretend import Device
from helpers.pretended_gpu.varlen import flash_attention


@contextmanager
def watched_rounds() -> Iterator[Device]:
    """Enter a device on which a round that makes the host wait, but for its single read, fails."""
    device = Device()
    usual = loop._State.round

    def watched(state: Any) -> Any:
        with device.watched():
            return usual(state)

    with ExitStack() as stack:
        stack.enter_context(patch.object(loop._State, "round", watched))
        stack.enter_context(patch.object(loop, "to_host", device.may_read(loop.to_host)))
        for module in (cache, base, dflash, steady, target):
            stack.enter_context(patch.object(module, "on_host", device.on_host))
        stack.enter_context(device.entered())
        stack.enter_context(torch.inference_mode())
        yield device


@contextmanager
def attention_by_lengths(attention: Any = flash_attention) -> Iterator[None]:
    """Let passes attend by lengths, as they do on a GPU with flash attention."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(lengths, "flash_attention", attention))
        stack.enter_context(patch.object(layers, "why_masked", lambda *_: None))
        stack.enter_context(patch.object(base, "attends_by_lengths", lambda *_: True))
        yield
