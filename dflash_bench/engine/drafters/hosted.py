"""What drafters share that think on the host: they read each row's tokens, and hand over chains or trees as lists."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.verify import Draft

Text = Sequence[int]


class HostDrafter:
    """One chain a row and round, as long as the row gives reason for; needs nothing of the target's inside."""

    taps: tuple[int, ...] = ()

    def __init__(self, num_drafts: int, device: torch.device) -> None:
        self.num_drafts, self.device = num_drafts, device

    def begin(self, num_rows: int, capacity: int) -> None:
        self.texts: list[Text] = [()] * num_rows
        self.requests: list[int] = [*range(num_rows)]
        self.is_alive = [False] * num_rows

    def observe(self, committed: Committed) -> None:
        if committed.anchor is None:
            return
        for row, text, count in zip(committed.rows, committed.texts, committed.counts, strict=True):
            self.texts[row], self.is_alive[row] = text, count > 0
        if committed.is_prompt:
            for row, request in zip(committed.rows, committed.requests, strict=True):
                self.requests[row] = request
                # Behind the prompt stands one token so far, the anchor.
                self.start(row, self.texts[row][:-1])
        for row in committed.rows:
            if self.is_alive[row]:
                self.read(row, self.texts[row])

    def propose(self) -> Draft | None:
        return chains([self.continuation(row) if alive else () for row, alive in enumerate(self.is_alive)], self.device)

    def start(self, row: int, prompt: Text) -> None:
        """A generation begins in this row. What is done here counts as the draft's own prefill."""

    def read(self, row: int, text: Text) -> None:
        """The row's text has grown: prompt, answer and anchor."""

    def continuation(self, row: int) -> Text:
        """At most `num_drafts` tokens that may follow the row's text; none is an answer too."""
        raise NotImplementedError


class Trie:
    """Continuations of one row that share what they begin with: a draft tree whose nodes are in order of adding."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """The node for `token` below `parent` (-1: the anchor), made where it is missing."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
        return node

    def add(self, path: Text) -> None:
        node = -1
        for token in path:
            node = self.child(node, token)


def generator(seed: int, prompt: Text) -> Random:
    """Random numbers that belong to the prompt: what it is decoded with, and after what, changes nothing."""
    return Random(zlib.crc32(repr((seed, list(prompt))).encode()))


def chains(rows: Sequence[Text], device: torch.device) -> Draft | None:
    """One chain a row; None where no row has any."""
    lengths = [len(row) for row in rows]
    if not any(lengths):
        return None
    return Draft(_padded(rows, max(lengths), 0, device), lengths=lengths)


def trees(tries: Sequence[Trie], device: torch.device) -> Draft | None:
    """One tree a row; trees of one branch are sent as the chains they are, which need no mask and no moving."""
    if all(trie.parents == list(range(-1, len(trie.parents) - 1)) for trie in tries):
        return chains([trie.tokens for trie in tries], device)
    lengths = [len(trie.tokens) for trie in tries]
    tokens = _padded([trie.tokens for trie in tries], max(lengths), 0, device)
    parents = _padded([trie.parents for trie in tries], max(lengths), -1, device)
    return Draft(tokens, parents, lengths=lengths)


def _padded(rows: Sequence[Text], width: int, filling: int, device: torch.device) -> Tensor:
    padded = [[*row, *[filling] * (width - len(row))] for row in rows]
    return torch.tensor(padded).to(device, non_blocking=True)
