"""Lookahead decoding (arXiv 2402.02057, section 3): the target itself guesses several places ahead.

Beside its next token, each pass works on a window of guesses: W columns, each one place further on than the last, and
N - 1 levels, each a Jacobi step on the one before. A guess sees the first level up to its column and its own column up
to its level. The N-grams along the columns go into a pool; those that begin with the anchor, at most G, are verified in
the same pass.

The paper's mask is a tree: the first level is a chain below the anchor, and each column's other levels hang off its
place in that chain. So the window is verified like any draft, and correct guesses are accepted where they stand, which
the paper leaves to the next round. Two more things differ: above temperature 0 guesses are drawn as the answer is,
where the paper takes the best tokens, and N-grams of the pool share prefixes in the tree. As in the authors' code the
window moves by one place per round, however many tokens were accepted, and begins with tokens of the prompt.
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
    """The most recent N-grams, at most `size` for each first token."""

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
    """The guesses of one row. `levels[0]` has no column for the anchor, which is known; the other levels do.

    Each round adds a level until all exist; the first level begins longer, because each such round shortens it.
    """

    def __init__(self, prompt: Text, width: int, size: int, pool: NgramPool) -> None:
        self.size, self.pool = size, pool
        self.levels = [generator(0, prompt).choices(prompt, k=width + size - 3)]
        self.ends: list[int] = []

    def hang_into(self, trie: Trie) -> None:
        """Add the window to a tree, and record the last node of each column."""
        place, self.ends = -1, []
        for column in range(len(self.levels[0]) + 1):
            if column:
                place = trie.child(place, self.levels[0][column - 1])
            node = place
            for level in self.levels[1:]:
                node = trie.child(node, level[column])
            self.ends.append(node)

    def advance(self, anchor: int, choices: Text) -> None:
        """Move the window, given the target's choices after its old anchor and after each node of the tree."""
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
    """`width`, `size` and `num_guesses` are the paper's W, N and G: window, length of N-grams, N-grams verified."""

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
    """Return the largest size of a tree: N-grams and window, which may be largest while it is being filled."""
    window = max(levels * (width + size - 1 - levels) - 1 for levels in range(1, size))
    return num_guesses * (size - 1) + window


def build(models: Models, target: Target, method: Method) -> LookaheadDrafter:
    return LookaheadDrafter(method.number("window"), method.number("ngram"), method.number("guesses"), target.device)
