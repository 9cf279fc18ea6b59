"""A target's own tokenizer, loaded apart from the one that an engine decodes with, to say what tokens mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dflash_bench.models import gguf, hub, targets

Decoder = Callable[[Sequence[Sequence[int]]], list[str]]
"""The texts of answers by their tokens, without special tokens."""


def decoder(folder: Path, trust_remote_code: bool = False) -> Decoder:
    """Raises UserError for a folder without a tokenizer that can be read."""
    tokenizer = targets.tokenizer_of(folder, trust_remote_code)
    return lambda answers: [str(tokenizer.decode(list(one), skip_special_tokens=True)) for one in answers]


def decoder_of(target: str, trust_remote_code: bool = False) -> Decoder | None:
    """The same of a target by its folder, GGUF file or hub id; None where its files are not on this disk."""
    place = str(gguf.converted(Path(target))) if gguf.is_file(target) else target
    if not hub.is_here(place):
        return None
    return decoder(hub.folder_of(place) or hub.cached_folder(place), trust_remote_code)
