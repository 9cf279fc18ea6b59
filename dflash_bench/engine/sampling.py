"""From logits to tokens: greedy, or sampled with a random number that belongs to a request and a place in its answer.

Place t of an answer always uses the same uniform number, so plain and speculative decoding with the same seed draw the
same tokens at any temperature: sampling is as checkable as greedy decoding. What is drawn from is what transformers'
own logits processors make of the logits, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dflash_bench.core.types import Settings, is_greedy
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.masks import ancestors, depths

Purpose = Literal["draw", "accept", "draft"]
"""What a random number is for: the target's own draw, keeping or refusing a drafted token, and drawing that token."""
PURPOSES: tuple[Purpose, ...] = ("draw", "accept", "draft")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen. The defaults leave the model's distribution as it is.

    `records.is_greedy` says up to which temperature the best token is taken; of the rest only the repetition penalty
    then has an effect. `seed` is a request's own.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    """Tokens that may be drawn; 0 is all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, settings: Settings, seed: int = 0) -> Sampling:
        s = settings
        return cls(s.temperature, seed, s.top_k, s.top_p, s.min_p, s.repetition_penalty)

    @property
    def greedy(self) -> bool:
        return is_greedy(self.temperature)


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [..., V] in float32; those of tokens that were `seen` [..., V] are made smaller (CTRL, section 4.1)."""
    logits = logits.float()
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What tokens are drawn from, float32: logits [..., V] by temperature, then top-k, top-p and min-p."""
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if sampling.top_p < 1:
        scores = _nucleus(scores, sampling.top_p)
    if sampling.min_p > 0:
        p = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(p < sampling.min_p * p.amax(dim=-1, keepdim=True), -torch.inf)
    return torch.softmax(scores, dim=-1)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Without the least likely tokens that together hold no more than 1 - top_p; the likeliest always stays."""
    ascending, order = scores.sort(dim=-1, stable=True)
    tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    tail[..., -1] = False
    return scores.masked_fill(tail.scatter(-1, order, tail), -torch.inf)


def inverse_cdf(p: Tensor, uniform: Tensor) -> Tensor:
    """The token where the cumulative sum of p [..., V] passes uniform [...]: a draw from p without a device sync."""
    # In float64: the parallel sum of a GPU may fall by a rounding, which must not open a gap for a token of p 0.
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)
    # Scaling by the sum keeps rounding from ever pointing past the last token.
    threshold = (uniform * cumulative[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=p.shape[-1] - 1)


class Sampler:
    """Chooses tokens for places of B rows, and knows what choosing depends on: what was emitted, and what was seen.

    Random numbers [B, num_places] belong to a row's seed and a place. A place of which nothing is emitted leaves its
    numbers unused for the next round, so using them by place does not make draws depend on each other.
    """

    def __init__(self, sampling: Sampling, num_rows: int, num_places: int, device: torch.device) -> None:
        self.sampling, self.device = sampling, device
        self.num_rows, self.num_places = num_rows, num_places
        self.vocab_size = 0
        self._emitted = torch.zeros(num_rows, 1, dtype=torch.long, device=device)
        self._seen: Tensor | None = None
        self._numbers = torch.empty(0)
        if not sampling.greedy:
            self._numbers = torch.empty(len(PURPOSES), num_rows, num_places, device=device)

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    @property
    def penalises(self) -> bool:
        return self.sampling.repetition_penalty != 1

    def begin(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], vocab_size: int, first: int = 0) -> None:
        """Answers to these prompts begin, in as many rows, from row `first` on: nothing of them has been emitted."""
        self.vocab_size = vocab_size
        rows = slice(first, first + len(prompts))
        if not self.greedy:
            drawn = [[uniform(seed, purpose, self.num_places) for seed in seeds] for purpose in PURPOSES]
            self._numbers[:, rows] = torch.stack([torch.stack(row) for row in drawn]).to(self.device)
        if self.penalises:
            if self._seen is None:
                self._seen = torch.zeros(self.num_rows, vocab_size, dtype=torch.bool, device=self.device)
            width = max(map(len, prompts))
            padded = [[*prompt, *[prompt[0]] * (width - len(prompt))] for prompt in prompts]
            self._seen[rows] = False
            self._seen[rows].scatter_(1, torch.tensor(padded, device=self.device), True)

    def first_tokens(self, logits: Tensor, first: int = 0) -> Tensor:
        """What stands first in the answers that begin in rows `first` ...: tokens [b], for logits [b, 1, V]."""
        rows = slice(first, first + len(logits))
        if self._seen is not None:
            logits = penalised(logits, self._seen[rows, None], self.sampling.repetition_penalty)
        if self.greedy:
            tokens = logits.argmax(dim=-1)
        else:
            tokens = inverse_cdf(self.probabilities(logits), self._numbers[PURPOSES.index("draw"), rows, :1])
            self._emitted[rows] = 1
        if self._seen is not None:
            self._seen[rows].scatter_(1, tokens, True)
        return tokens[:, 0]

    def commit(self, tokens: Tensor, num_accepted: Tensor) -> None:
        """Of tokens [B, N + 1] the first num_accepted [B] + 1 have been said; what stands there last, for certain."""
        if self._seen is not None:
            last = tokens.gather(1, num_accepted[:, None])
            kept = torch.arange(tokens.shape[1], device=self.device) <= num_accepted[:, None]
            self._seen.scatter_(1, torch.where(kept, tokens, last), True)

    def emitted(self, counts: Sequence[int]) -> None:
        """So many tokens each row has emitted by now."""
        if not self.greedy:
            self._emitted = to_device(counts, self.device)[:, None]

    def penalise(self, logits: Tensor, block: Tensor | None = None, parents: Tensor | None = None) -> Tensor:
        """Logits [B, N, V] after the repetition penalty, for all that stands before each of N places.

        With a block [B, N] (anchor first), place i stands behind row i of it and all above that; without, the places
        know only what is committed.
        """
        if self._seen is None:
            return logits
        seen = self._seen[:, None]
        if block is not None and block.shape[1] > 1:
            width = block.shape[1]
            above = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
            above = above.expand(len(block), -1, -1) if parents is None else ancestors(parents)
            # The anchor has been seen, and so may stand for all that has not.
            tokens = torch.where(above, block[:, None], block[:, :1, None])
            seen = seen.repeat(1, width, 1).scatter_(2, tokens, True)
        return penalised(logits, seen, self.sampling.repetition_penalty)

    def probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.sampling)

    def choose(self, logits: Tensor, places: Tensor | None) -> Tensor:
        """Tokens [B, N] for penalised logits [B, N, V] and the places [B, N] that they are for.

        Greedy choices need no places.
        """
        if places is None:
            return logits.argmax(dim=-1)
        return inverse_cdf(self.probabilities(logits), self.numbers("draw", places))

    def places(self, width: int, parents: Tensor | None = None) -> Tensor | None:
        """Which of its tokens [B, width] each row would emit after each row of a block; None where none is drawn."""
        if self.greedy:
            return None
        if parents is None:
            return self._emitted + torch.arange(width, device=self.device)
        return self._emitted + depths(parents)

    def numbers(self, purpose: Purpose, places: Tensor) -> Tensor:
        """Uniform in [0, 1), [B, N] for places [B, N]."""
        return self._numbers[PURPOSES.index(purpose)].gather(1, places)


def uniform(seed: int, purpose: Purpose, num_places: int) -> Tensor:
    """[num_places] numbers of a request; how many there are changes none of them."""
    # In this order: a large seed takes two words, and must not spill over into the purpose.
    generator = np.random.default_rng([PURPOSES.index(purpose), seed % 2**64])
    return torch.from_numpy(generator.random(num_places, dtype=np.float32))
