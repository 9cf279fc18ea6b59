"""Texts of nano's tokens, for servers whose answers are compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from dflash_bench.models import targets
from dflash_bench.models.presets import NANO


@cache
def tokenizer() -> Any:
    return targets.tokenizer_of(NANO / "target", False)


def nano_text(tokens: Sequence[int]) -> str:
    return str(tokenizer().decode(list(tokens), skip_special_tokens=True))
