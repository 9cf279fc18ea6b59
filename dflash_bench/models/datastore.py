"""Datastores: a file of tokenised texts with their suffix array, in which REST looks up continuations.

The file is safetensors, which holds no code and is memory-mapped: `tokens`, the concatenated texts, each followed by
END, and `order`, the places of `tokens` sorted by the tokens from there on. It records its tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dflash_bench.core import files
from dflash_bench.core.errors import UserError

Tokens = NDArray[np.int32]
Places = NDArray[np.int64]

END = -1
"""Follows each text; no match crosses it."""
FORMAT = "dflash-bench datastore 1"
SORTED_TO = 64
"""Places are sorted by this many tokens, the longest sequence that can be looked up."""


@dataclass(frozen=True, slots=True)
class Datastore:
    tokens: Tokens
    order: Places

    def ends_of(self, piece: Sequence[int]) -> Places:
        """Return the places after each occurrence of a sequence of at most SORTED_TO tokens."""
        piece, length = list(piece), len(piece)

        def there(place: int) -> list[int]:
            at: list[int] = self.tokens[place : place + length].tolist()
            return at

        first = bisect_left(self.order, piece, key=there)
        last = bisect_right(self.order, piece, lo=first, key=there)
        return self.order[first:last] + length

    def longest(self, text: Sequence[int], most: int, least: int) -> Places:
        """Return `ends_of` the longest suffix of the text that occurs, of `least` to `most` tokens, or nothing."""
        ends = self.order[:0]
        # All suffixes of an occurring sequence occur, so the longest is found by bisection.
        low, high = least, min(most, len(text))
        while low <= high:
            length = (low + high) // 2
            longer = self.ends_of(text[-length:])
            if len(longer):
                ends, low = longer, length + 1
            else:
                high = length - 1
        return ends


def of_texts(texts: Iterable[Sequence[int]]) -> Datastore:
    tokens = np.array([token for text in texts if text for token in (*text, END)], dtype=np.int32)
    return Datastore(tokens, suffix_order(tokens))


def suffix_order(tokens: Tokens) -> Places:
    """Return the places sorted by their first SORTED_TO tokens: ranks by 1, 2, 4 ... tokens, each from the last."""
    rank = np.unique(tokens, return_inverse=True)[1]
    length = 1
    while length < SORTED_TO and len(rank) and rank.max() < len(rank) - 1:
        # Equal prefixes are ranked by the tokens `length` places further on; the end of the texts ranks first.
        further = np.concatenate([rank[length:] + 1, np.zeros(min(length, len(rank)), dtype=rank.dtype)])
        rank = np.unique(rank * (len(rank) + 1) + further, return_inverse=True)[1]
        length *= 2
    return np.argsort(rank, kind="stable")


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer's tokens and ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def write(path: Path, store: Datastore, tokenizer: Any, sources: Sequence[str]) -> None:
    tensors = {"tokens": torch.from_numpy(store.tokens), "order": torch.from_numpy(store.order)}
    metadata = {"format": FORMAT, "tokenizer": fingerprint(tokenizer), "sources": json.dumps(list(sources))}
    files.write_whole(path, lambda file: file.write(save(tensors, metadata)))


def read(path: Path, tokenizer: Any, vocab_size: int) -> Datastore:
    """Map a datastore into memory. Raises UserError for another file, an empty one, or another tokenizer's."""
    files.require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path} is not a datastore; make one with 'dflash-bench build-datastore'")
            tokens, order = file.get_tensor("tokens"), file.get_tensor("order")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or not a datastore ({error}); build it again") from error
    if metadata.get("tokenizer") != fingerprint(tokenizer):
        raise UserError(f"{path} was built for another tokenizer; build one with --model set to this model")
    _check(path, tokens, order, vocab_size)
    return Datastore(tokens.numpy(), order.numpy())


def _check(path: Path, tokens: torch.Tensor, order: torch.Tensor, vocab_size: int) -> None:
    if tokens.dtype != torch.int32 or order.dtype != torch.int64 or tokens.ndim != 1 or tokens.shape != order.shape:
        raise UserError(f"{path} is damaged: its tokens and their order do not go together; build it again")
    if not len(tokens):
        raise UserError(f"{path} is empty; build a datastore from texts")
    in_range = tokens.min() >= END and tokens.max() < vocab_size and order.min() >= 0 and order.max() < len(order)
    if not in_range or tokens[-1] != END:
        raise UserError(f"{path} is damaged: it holds tokens or places that cannot be; build it again")
