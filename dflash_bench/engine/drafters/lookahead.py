"""Lookahead decoding (arXiv 2402.02057): the target guesses several places ahead by itself, and its guesses are drafts.

Beside its next token, each pass works on a window of guesses: W columns, one a place further on than the other, and
N - 1 levels, each a Jacobi step on the one before. A guess sees the first level up to its column and its own column up
to its level. The N-grams that come out of the columns go into a pool; those that begin with the anchor, at most G, are
verified in the same pass.

The paper's mask is a tree: the first level is a chain below the anchor, and each column's other levels hang off its
place in that chain. So the window is verified like any draft, and what it guessed right is accepted where it stands,
which the paper leaves to the next round. Two more things differ: above temperature 0 guesses are drawn as the answer
is, where the paper's are the best tokens, and the pool's N-grams share what they begin with. As in the authors' code
the window moves by one place a round, however many tokens were accepted, and begins with tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import HostDrafter, Text, Trie, generator, trees
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models


class NgramPool:
    """By first token, the rests of the N-grams that were seen last, at most `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        known = self._rests.setdefault(first, {})
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self.size:
            del known[next(iter(known))]

    def starting_with(self, first: int) -> list[tuple[int, ...]]:
        return list(self._rests.get(first, ()))


class Window:
    """Guesses of one row. `levels[0]` has no column for the anchor, which is known; the others have.

    Until all levels are there each round adds one; the first begins as much longer, since a round costs it a place.
    """

    def __init__(self, prompt: Text, width: int, size: int, pool: NgramPool) -> None:
        self.size, self.pool = size, pool
        self.levels = [generator(0, prompt).choices(prompt, k=width + size - 3)]
        self.ends: list[int] = []

    def hang_into(self, trie: Trie) -> None:
        """Add the window to a tree; of each column the last node stays known."""
        place, self.ends = -1, []
        for column in range(len(self.levels[0]) + 1):
            if column:
                place = trie.child(place, self.levels[0][column - 1])
            node = place
            for level in self.levels[1:]:
                node = trie.child(node, level[column])
            self.ends.append(node)

    def advance(self, anchor: int, choices: Text) -> None:
        """By what the target chose after the anchor that the window hung off, and after each node of the tree."""
        guesses = [choices[node + 1] for node in self.ends]
        if len(self.levels) < self.size - 1:
            self.levels = [level[1:] for level in (*self.levels, guesses)]
            return
        firsts = [anchor, *self.levels[0]]
        for first, *rest in zip(firsts, *self.levels[1:], guesses, strict=True):
            self.pool.add(first, tuple(rest))
        moved = [*self.levels[1:], guesses]
        self.levels = [moved[0][1:], *moved[1:]]


class LookaheadDrafter(HostDrafter):
    """W, N and G of the paper: the window's width, the length of its N-grams, and how many of them are tried."""

    def __init__(self, width: int, size: int, num_guesses: int, device: torch.device) -> None:
        self.width, self.size, self.num_guesses = width, size, num_guesses
        self.windows: dict[int, Window] = {}
        self.anchors: dict[int, int] = {}
        super().__init__(max_nodes(width, size, num_guesses), device)

    def start(self, row: int, prompt: Text) -> None:
        self.windows[row] = Window(prompt, self.width, self.size, NgramPool(self.num_guesses))

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        for row, choices in enumerate(committed.choices):
            if self.is_alive[row]:
                self.windows[row].advance(self.anchors[row], choices)
        self.anchors = {row: text[-1] for row, text in enumerate(self.texts) if text}

    def propose(self) -> Draft | None:
        draft = trees([self._tree(row) if alive else Trie() for row, alive in enumerate(self.is_alive)], self.device)
        return draft and replace(draft, wants_choices=True)

    def _tree(self, row: int) -> Trie:
        window, trie = self.windows[row], Trie()
        for rest in window.pool.starting_with(self.anchors[row]):
            trie.add(rest)
        window.hang_into(trie)
        return trie


def max_nodes(width: int, size: int, num_guesses: int) -> int:
    """Of a tree: the N-grams, and the window, which may be largest while it is being filled."""
    window = max(levels * (width + size - 1 - levels) - 1 for levels in range(1, size))
    return num_guesses * (size - 1) + window


def build(models: Models, target: Target, method: Method) -> LookaheadDrafter:
    return LookaheadDrafter(method.number("window"), method.number("ngram"), method.number("guesses"), target.device)
