"""Is a text what its tokens say? By a tokenizer that whoever asks brings along, as results know no models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dflash_bench.results.validity import lengths_of

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""The texts of these answers' tokens, without special tokens. Raises OverflowError for an id that cannot be one."""
COLUMNS = ("token_ids", "text", "error")
OTHER = "its text is not what its tokens say"


def other(batch: Any, decode: Decode) -> list[int]:
    """The rows of an Arrow batch whose text is another; those without tokens have none to be held against."""
    told = batch.column("error").is_null().to_numpy(zero_copy_only=False) & (lengths_of(batch.column("token_ids")) > 0)
    rows = np.flatnonzero(told).tolist()
    tokens = [batch.column("token_ids")[row].as_py() for row in rows]
    said: Sequence[str | None]
    try:
        said = decode(tokens)
    except OverflowError:
        said = [_said(decode, one) for one in tokens]
    stored = batch.column("text").to_pylist()
    return [row for row, text in zip(rows, said, strict=True) if stored[row] != text]


def _said(decode: Decode, tokens: Sequence[int]) -> str | None:
    try:
        return decode([tokens])[0]
    except OverflowError:
        return None
