"""What a program is that `--launch` starts: its command line for what is to be served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_bench.methods import Method


@dataclass(frozen=True, slots=True)
class Serving:
    """One server that is wanted; `draft` and `num_drafts` (tokens a round) are None for plain decoding."""

    method: Method
    model: str
    """What it is to call the model."""
    target: str
    draft: str | None
    num_drafts: int | None
    length: int
    """Tokens of the longest prompt and answer."""
    slots: int
    """Answers at a time."""
    dtype: str
    """float32, bfloat16, float16 or auto."""
    memory_share: float
    """The part of a GPU's memory that it may take."""
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    executable: str
    """Looked for on the PATH unless the user names another."""
    wants_gguf: bool
    """Does it take weights as GGUF files, rather than folders?"""
    methods: tuple[str, ...]
    """Methods beside plain decoding that it can draft by."""
    key_variable: str
    """Of the environment, with the key that it then wants."""
    words: Callable[[Serving, int], list[str]]
    """What follows the executable, on this port of 127.0.0.1."""
