"""REST (arXiv 2311.08252): drafts a tree of what followed the text's last tokens in a datastore of other texts.

The longest suffix of prompt and answer that occurs in the datastore, from `max` tokens down to `min`, is looked up by
binary search in its suffix array. Of what follows its occurrences the most frequent pieces make the tree, as the paper
builds it, each node before its children.

A datastore that holds answers to the prompts it is measured with knows what it is to predict: acceptance then says
nothing about other prompts. Build it from other texts.
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
"""Of a piece that occurs more often, so many occurrences are counted, spread evenly."""


class RestDrafter(HostDrafter):
    """`nodes` in a tree, which is at most `depth` deep."""

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
    """The continuations at these places, the most frequent first; of equals the shorter, then the lesser token."""
    trie, numbers = Trie(), count()
    # Below each node in the heap: how often it occurs, and where its occurrences go on.
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
    """Each token that stands at these places, how often, and the places behind it."""
    there = store.tokens[places]
    for token, times in zip(*(values.tolist() for values in np.unique(there, return_counts=True)), strict=True):
        if token != END:
            yield token, times, places[there == token] + 1


def _spread(places: Places) -> Places:
    return places[:: -(-len(places) // MOST_OCCURRENCES) or 1]


def build(models: Models, target: Target, method: Method) -> RestDrafter:
    """Raises UserError without a datastore, and for one that does not fit."""
    if (path := method.option("datastore")) is None:
        raise UserError(
            f"method {method.label} needs a datastore; write rest:datastore=FILE, which build-datastore makes"
        )
    nodes, depth, longest, shortest = (method.number(name) for name in ("nodes", "depth", "max", "min"))
    if longest < shortest:
        raise UserError(f"method {method.label}: max={longest} is less than min={shortest}")
    store = datastore.read(Path(str(path)), models.tokenizer, target.vocab_size)
    return RestDrafter(store, nodes, depth, longest, shortest, target.device)
