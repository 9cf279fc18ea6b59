"""What transformers raises for files that make no sense, told apart from bugs, in one line."""

from __future__ import annotations

import struct
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from dflash_bench.errors import UserError

UNREADABLE = (
    OSError, ValueError, ImportError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError,
    AssertionError, StrictDataclassError, struct.error,
)  # fmt: skip


def is_unreadable(error: BaseException) -> bool:
    """Is it what a damaged file brings about, and not a bug? tokenizers, which is Rust, raises bare Exceptions."""
    return isinstance(error, UNREADABLE) or type(error) is Exception


def cannot_load(folder: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return UserError(f"{folder} needs code of its own, which runs only in a run with --trust-remote-code")
    return UserError(f"cannot load a causal language model from {folder}: {reason or type(error).__name__}")
