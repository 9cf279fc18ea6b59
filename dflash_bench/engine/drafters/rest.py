"""REST (arXiv 2311.08252, section 3): drafts a tree of continuations found in a datastore of other texts.

The longest suffix of prompt and answer that occurs in the datastore, from `max` tokens down to `min`, is looked up by
binary search in its suffix array. The most frequent continuations of its occurrences make the tree, as in the paper,
each node before its children.

A datastore that holds answers to the measured prompts already contains the tokens to predict: the acceptance then does
not carry over to other prompts. Build it from other texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

import numpy as np
import torch

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.base import HostDrafter, Trie, trees
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models import datastore
from dflash_bench.models.datastore import END, Datastore, Places
from dflash_bench.models.loading import Models

MOST_OCCURRENCES = 4096
"""Maximum number of counted occurrences; of more, this many are sampled evenly."""


class RestDrafter(HostDrafter):
    """Drafts trees of up to `nodes` nodes and `depth` levels."""

    def __init__(
        self, store: Datastore, nodes: int, depth: int, longest: int, shortest: int, device: torch.device
    ) -> None:
        super().__init__(nodes, device)
        self.store, self.depth, self.longest, self.shortest = store, depth, longest, shortest

    def propose(self) -> Draft | None:
        return trees([self._tree(row) if alive else Trie() for row, alive in enumerate(self.is_alive)], self.device)

    def _tree(self, row: int) -> Trie:
        ends = self.store.longest(self.texts[row], self.longest, self.shortest)
        return most_frequent(self.store, _spread(ends), self.num_drafts, self.depth)


def most_frequent(store: Datastore, ends: Places, num_nodes: int, depth: int) -> Trie:
    """Return the continuations at these places as a tree, the most frequent first; shorter ones first if equal."""
    trie, numbers = Trie(), count()
    # (-count, level, number, parent, token, places where its occurrences continue)
    heap: list[tuple[int, int, int, int, int, Places]] = []

    def push(parent: int, level: int, places: Places) -> None:
        for token, times, after in _following(store, places):
            heappush(heap, (-times, level, next(numbers), parent, token, after))

    push(-1, 1, ends)
    while heap and len(trie.tokens) < num_nodes:
        _, level, _, parent, token, after = heappop(heap)
        node = trie.child(parent, token)
        if level < depth:
            push(node, level + 1, after)
    return trie


def _following(store: Datastore, places: Places) -> Iterator[tuple[int, int, Places]]:
    """Yield each token at these places, its count, and the places after it."""
    there = store.tokens[places]
    for token, times in zip(*(values.tolist() for values in np.unique(there, return_counts=True)), strict=True):
        if token != END:
            yield token, times, places[there == token] + 1


def _spread(places: Places) -> Places:
    return places[:: -(-len(places) // MOST_OCCURRENCES) or 1]


def build(models: Models, target: Target, method: Method) -> RestDrafter:
    """Build the drafter. Raises UserError without a datastore, or if it does not fit the model."""
    if (path := method.option("datastore")) is None:
        raise UserError(
            f"method {method.label} needs a datastore; write rest:datastore=FILE, which build-datastore makes"
        )
    nodes, depth, longest, shortest = (method.number(name) for name in ("nodes", "depth", "max", "min"))
    if longest < shortest:
        raise UserError(f"method {method.label}: max={longest} is less than min={shortest}")
    store = datastore.read(Path(str(path)), models.tokenizer, target.vocab_size)
    return RestDrafter(store, nodes, depth, longest, shortest, target.device)
