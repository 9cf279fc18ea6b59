"""What drafters share: caches of draft networks, texts held on the host, and how drafts are drawn."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.graphs import Function, Replays, room_for
from dflash_bench.engine.sampling import Sampler, inverse_cdf
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.layers import Rotary

# What drafters share that keep keys and values of their own: the cache, its places, and when it is made anew.


class CachedDrafter:
    """`num_scratch` places in the cache are what a proposal writes to behind what is committed."""

    def __init__(self, draft: Any, num_scratch: int) -> None:
        self.draft, self.config = draft.eval(), draft.config
        self.num_scratch = num_scratch
        self.taps = self.config.target_layer_ids
        self.weight, self.device = draft.fc.weight, draft.fc.weight.device
        self.cache = KVCache(0, 0, self.device)
        self.replays: Replays | None = None
        self.starts: list[int] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.starts = [0] * num_rows
        capacity += self.num_scratch
        if self.replays is not None:
            capacity = room_for(capacity)
        if self.cache.serves(num_rows, capacity):
            return
        config = self.config
        # Like the last one, so that all layers share one buffer even where a captured pass writes first.
        self.cache = KVCache(num_rows, capacity, self.device, like=self.cache)
        if self.replays is not None:
            self.replays.moved(capacity)
        self.rotary = Rotary(
            config.head_dim, config.rope_theta, capacity, self.device, self.weight.dtype, config.rope_scaling
        )
        self.allocate(num_rows, capacity)

    def capture(self, shortest: int, longest: int) -> None:
        """Passes that have been asked for before; see `engine/graphs.py`."""
        if self.replays is not None:
            longest = min(longest + self.num_scratch, self.cache.capacity)
            if self.replays.prepare(self.cache.num_rows, shortest, longest, lambda _key: True):
                self.cache.clear()

    def replayed(self, function: Function, starts: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """`function` of places, inputs and starts, for all rows, from a capture; None where there is none."""
        if self.replays is None or len(starts) != self.cache.num_rows:
            return None
        key, num_places = tuple(one.shape[1:] for one in inputs), max(starts) + inputs[0].shape[1]
        return self.replays.run(key, function, num_places, *inputs, torch.tensor(starts))

    def allocate(self, num_rows: int, capacity: int) -> None:
        """Tensors of a drafter's own, as many rows and places as the cache has."""
        raise NotImplementedError

    def advance(self, committed: Committed) -> None:
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            self.starts[row] = start + count


# What drafters share that think on the host: they read each row's tokens, and hand over chains or trees as lists.


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


# From a draft's logits to the tokens it proposes, by the rule that will judge them.
#
# `match`: the likeliest tokens, kept while they are what the target draws. `rejection`: tokens drawn from the draft's
# own probabilities, at the run's temperature and with its filters, kept with probability min(1, p / q) (Leviathan et
# al. 2023, algorithm 1). At temperature 0 both are the same.


RULES = ("match", "rejection")


class Picker:
    """Of a draft whose ids are the target's, or a few of those: `target_ids` translates `num_ids` of them.

    Whoever uses it under the rule `rejection` hands it each `Committed.sampler` first.
    """

    def __init__(self, rule: str, target_ids: Callable[[Tensor], Tensor], num_ids: int | None = None) -> None:
        assert rule in RULES
        self.samples, self.target_ids, self.num_ids = rule == "rejection", target_ids, num_ids
        self.sampler: Sampler | None = None

    def pick(self, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, N] of the target for the draft's logits [B, N, V]; and, where they are drawn, what from.

        `first` numbers the drafted token that logits[:, 0] are of: 0 stands behind the anchor. The probabilities
        [B, N, V] are over the target's vocabulary.
        """
        sampler = self.sampler
        if not self.samples or (sampler is not None and sampler.greedy):
            return self.target_ids(logits.argmax(dim=-1)), None
        assert sampler is not None, "rejection draws tokens, and needs the run's sampler"
        # What was drafted before a place counts as unseen to it: q may be anything, as long as tokens are drawn from q.
        probs = sampler.probabilities(sampler.penalise(self._spread(logits, sampler.vocab_size)))
        places = sampler.places(first + logits.shape[1])
        assert places is not None
        return inverse_cdf(probs, sampler.numbers("draft", places[:, first:])), probs

    def _spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Over the target's vocabulary: -inf for what the draft cannot say; what the target cannot say is left out."""
        if self.num_ids is None and logits.shape[-1] == vocab_size:
            return logits
        ids = torch.arange(min(logits.shape[-1], vocab_size), device=logits.device)
        spread = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return spread.index_copy_(-1, self.target_ids(ids), logits[..., : len(ids)])
