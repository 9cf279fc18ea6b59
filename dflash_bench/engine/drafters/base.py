"""Base classes of drafters, with a draft network and a KV cache or on the host, and sampling from draft logits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_bench.engine.cache import KVCache, on_host, to_device
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.graphs import WHOLE, Function, GraphCache, bucket_of
from dflash_bench.engine.lengths import attends_by_lengths
from dflash_bench.engine.sampling import Sampler, inverse_cdf, likeliest
from dflash_bench.engine.verify import Draft
from dflash_bench.models.nets.layers import Rotary


class CachedDrafter:
    """A drafter whose network has its own KV cache, with an entry for each committed token.

    A proposal writes to `num_scratch` places of the cache behind the committed ones.
    """

    num_drafts: int

    def __init__(self, draft: Any, num_scratch: int) -> None:
        self.draft, self.config = draft.eval(), draft.config
        self.num_scratch = num_scratch
        self.taps = self.config.taps
        self.weight, self.device = draft.norm.weight, draft.norm.weight.device
        self.cache = KVCache(0, 0, self.device)
        self.graph_cache: GraphCache | None = None
        self.starts: list[int] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.starts = [0] * num_rows
        capacity += self.num_scratch
        if self.graph_cache is not None:
            capacity = bucket_of(capacity)
        if self.cache.serves(num_rows, capacity):
            return
        config = self.config
        # `like` the last cache, so that all layers share one buffer even if a captured pass writes first.
        self.cache = KVCache(num_rows, capacity, self.device, like=self.cache)
        if self.graph_cache is not None:
            self.graph_cache.reset(capacity)
        self.rotary = self.rotary_of(capacity)
        self.by_lengths = attends_by_lengths(
            self.device, self.weight.dtype, config.head_dim, config.num_heads, config.num_kv_heads
        )
        self.allocate(num_rows, capacity)

    def capture(self, shortest: int, longest: int) -> None:
        """Capture passes that have been run before, over `shortest` to `longest` places (`engine/graphs.py`)."""
        if self.graph_cache is not None:
            longest = min(longest + self.num_scratch, self.cache.capacity)
            if self.graph_cache.capture(self.cache.num_rows, shortest, longest, lambda _key: True):
                self.cache.clear()

    def replayed(self, function: Function, starts: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...] | None:
        """Return the results of a captured `function` of inputs [B, ...] and starts, or None if there is no capture."""
        if self.graph_cache is None or len(starts) != self.cache.num_rows:
            return None
        key = tuple(value.shape[1:] for value in inputs)
        num_places = WHOLE if self.by_lengths else max(starts) + inputs[0].shape[1]
        return self.graph_cache.replay(key, function, num_places, *inputs, on_host(starts, self.device))

    def reach(self, starts: Sequence[int]) -> int:
        """Return how many places of the cache a round's passes cover, given the rows' starts; or WHOLE."""
        return WHOLE if self.by_lengths else max(starts) + max(self.num_scratch, self.num_drafts + 1)

    def rotary_of(self, length: int) -> Rotary:
        """Return the rotary tables of `length` positions."""
        config = self.config
        return Rotary(config.head_dim, config.rope_theta, length, self.device, self.weight.dtype, config.rope_scaling)

    def allocate(self, num_rows: int, capacity: int) -> None:
        """Allocate the drafter's own tensors, for the cache's rows and places."""
        raise NotImplementedError

    def advance(self, committed: Committed) -> None:
        """Move each row's start behind the committed tokens."""
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            self.starts[row] = start + count


Text = Sequence[int]


class HostDrafter:
    """A drafter that reads token ids on the host, and proposes a chain per row; it needs no features of the target."""

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
                # The text is the prompt and the anchor.
                self.start(row, self.texts[row][:-1])
        for row in committed.rows:
            if self.is_alive[row]:
                self.read(row, self.texts[row])

    def propose(self) -> Draft | None:
        return chains([self.continuation(row) if alive else () for row, alive in enumerate(self.is_alive)], self.device)

    def start(self, row: int, prompt: Text) -> None:
        """Begin a generation in this row. Its time counts as the draft's own prefill."""

    def read(self, row: int, text: Text) -> None:
        """Read the row's text, prompt, answer and anchor, which has grown since the last call."""

    def continuation(self, row: int) -> Text:
        """Return up to `num_drafts` tokens that may follow the row's text, or none."""
        raise NotImplementedError


class Trie:
    """A draft tree of one row, built from continuations that may share prefixes; nodes are in the order of adding."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        """Return the node for `token` below `parent` (-1: the anchor), added if it is missing."""
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
    """Return a generator that depends on seed and prompt alone, not on prompts decoded before or beside it."""
    return Random(zlib.crc32(repr((seed, list(prompt))).encode()))


def chains(rows: Sequence[Text], device: torch.device) -> Draft | None:
    """Return a chain per row as a draft, or None if all are empty."""
    lengths = [len(row) for row in rows]
    if not any(lengths):
        return None
    return Draft(_padded(rows, max(lengths), 0, device), lengths=lengths)


def trees(tries: Sequence[Trie], device: torch.device) -> Draft | None:
    """Return a tree per row as a draft; trees of one branch become chains, which need no mask and no cache moves."""
    if all(trie.parents == list(range(-1, len(trie.parents) - 1)) for trie in tries):
        return chains([trie.tokens for trie in tries], device)
    lengths = [len(trie.tokens) for trie in tries]
    tokens = _padded([trie.tokens for trie in tries], max(lengths), 0, device)
    parents = _padded([trie.parents for trie in tries], max(lengths), -1, device)
    return Draft(tokens, parents, lengths=lengths)


def _padded(rows: Sequence[Text], width: int, filling: int, device: torch.device) -> Tensor:
    padded = [[*row, *[filling] * (width - len(row))] for row in rows]
    return to_device(padded, device)


RULES = ("match", "rejection")
"""`match`: the likeliest tokens, accepted while they equal the target's choices. `rejection`: tokens drawn from the
draft's own probabilities, at the run's temperature and with its filters, accepted with probability min(1, p / q)
(Leviathan et al., arXiv 2211.17192, algorithm 1). At temperature 0 both are the same."""


def joined(probs: Sequence[Tensor | None]) -> Tensor | None:
    """Return the distributions [B, N, V] of tokens drafted one by one, or None if the tokens were chosen, not drawn."""
    drawn = [one for one in probs if one is not None]
    return torch.cat(drawn, dim=1) if drawn else None


class DraftListener(Protocol):
    """Receives the scores from which greedy drafts are chosen, while it is set as a sampler's `listener`."""

    def choosing(self, scores: Tensor, ids: Tensor | None) -> None:
        """Receive the scores [B, n, C] of n tokens, for target ids [B, n, C] or, if None, all ids of the draft."""

    def trusting(self, confidence: Tensor) -> None:
        """Receive the acceptance probabilities [B, N] of a round's N tokens, from the draft's own head."""


class DraftSampler:
    """Chooses or draws the drafted tokens from a draft's logits, to suit the rule that will verify them.

    `target_ids` translates the draft's ids to the target's; `num_ids` is the size of a reduced draft vocabulary. Under
    the rule `rejection`, set `sampler` to each `Committed.sampler` first.
    """

    def __init__(self, rule: str, target_ids: Callable[[Tensor], Tensor], num_ids: int | None = None) -> None:
        assert rule in RULES
        self.samples, self.target_ids, self.num_ids = rule == "rejection", target_ids, num_ids
        self.sampler: Sampler | None = None
        self.listener: DraftListener | None = None

    @property
    def draws(self) -> bool:
        """Return True if tokens are drawn, not chosen greedily."""
        return self.samples and not (self.sampler is not None and self.sampler.greedy)

    @property
    def is_steady(self) -> bool:
        """Return True if tokens are chosen by the device alone."""
        return not self.draws and self.listener is None

    def sample(self, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Return target ids [B, N] for draft logits [B, N, Vd], and the distributions [B, N, V] if they were drawn.

        `first` is the index of the drafted token that logits[:, 0] predict: 0 follows the anchor. The distributions are
        over the target's vocabulary.
        """
        if not self.draws:
            if self.listener is not None:
                self.listener.choosing(logits, None)
            return self.target_ids(likeliest(logits)), None
        sampler = self._sampler
        # Tokens drafted before a place count as unseen there: q may be anything, as long as tokens are drawn from q.
        probs = sampler.probabilities(sampler.penalise(self._spread(logits, sampler.vocab_size)))
        places = sampler.places(first + logits.shape[1])
        assert places is not None
        return inverse_cdf(probs, sampler.numbers("draft", places[:, first:])), probs

    def sample_among(self, ids: Tensor, scores: Tensor, place: int) -> tuple[Tensor, Tensor | None]:
        """Return the index [B] of a candidate, given target ids [B, C] and scores [B, C], and q [B, 1, V] if drawn.

        The temperature applies to the scores; filters and penalty apply to the target's distribution alone.
        """
        if not self.draws:
            if self.listener is not None:
                self.listener.choosing(scores[:, None], ids[:, None])
            return likeliest(scores), None
        sampler = self._sampler
        scores = scores.float().masked_fill(ids >= sampler.vocab_size, -torch.inf)
        shares = torch.softmax(scores / sampler.sampling.temperature, dim=-1)
        places = sampler.places(place + 1)
        assert places is not None
        index = inverse_cdf(shares, sampler.numbers("draft", places[:, place:])[:, 0])
        probs = shares.new_zeros(len(ids), sampler.vocab_size)
        return index, probs.scatter_add_(1, ids.clamp(max=sampler.vocab_size - 1), shares)[:, None]

    @property
    def _sampler(self) -> Sampler:
        assert self.sampler is not None, "rejection draws tokens, and needs the run's sampler"
        return self.sampler

    def _spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return logits over the target's vocabulary: -inf for ids that the draft lacks; drop ids beyond it."""
        if self.num_ids is None and logits.shape[-1] == vocab_size:
            return logits
        ids = torch.arange(min(logits.shape[-1], vocab_size), device=logits.device)
        spread = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return spread.index_copy_(-1, self.target_ids(ids), logits[..., : len(ids)])
