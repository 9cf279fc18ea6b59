"""From logits to tokens: greedily, or with a random number that belongs to a request and a place in its answer.

Place t of an answer always uses the same uniform number, so plain and speculative decoding with the same seed draw the
same tokens at any temperature: sampling is as checkable as greedy decoding. The distribution is that of transformers'
logits processors, applied in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dflash_bench.core.types import Settings, is_greedy
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.masks import ancestors, depths

Purpose = Literal["draw", "accept", "draft"]
"""The use of a random number: the target's own draw, accepting a drafted token, or drawing that token."""
PURPOSES: tuple[Purpose, ...] = ("draw", "accept", "draft")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings. The defaults leave the model's distribution unchanged.

    Up to a small temperature (`core.types.is_greedy`) the best token is taken, and only the repetition penalty among
    the other settings has an effect. `seed` belongs to a request.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    """Number of likeliest tokens that may be drawn; 0 means all."""
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


def likeliest(logits: Tensor) -> Tensor:
    """Return the best token [...] of logits [..., V], the first among equal logits."""
    if _is_numpys(logits):
        return torch.from_numpy(np.asarray(logits.detach().numpy().argmax(axis=-1)))
    return logits.max(dim=-1).indices


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return logits [..., V] in float32, lowered for tokens `seen` [..., V] (CTRL, arXiv 1909.05858, section 4.1)."""
    logits = logits.float()
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the float32 distribution [..., V] to draw from: temperature, then top-k, top-p and min-p."""
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
    """Drop the least likely tokens whose total probability is at most 1 - top_p; the likeliest always stays."""
    ascending = _sorted(scores)
    tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    tail[..., -1] = False
    num_dropped = tail.sum(dim=-1, keepdim=True)
    # Of tokens as likely as the likeliest dropped one, the first are dropped; sorting indices, too, takes eight times
    # as long.
    edge = ascending.gather(-1, (num_dropped - 1).clamp(min=0))
    below, equal = scores < edge, scores == edge
    num_equal = num_dropped - below.sum(dim=-1, keepdim=True)
    dropped = below | (equal & (equal.cumsum(dim=-1) <= num_equal))
    return scores.masked_fill(dropped & (num_dropped > 0), -torch.inf)


def _sorted(scores: Tensor) -> Tensor:
    if _is_numpys(scores):
        return torch.from_numpy(np.sort(scores.detach().numpy(), axis=-1))
    return scores.sort(dim=-1).values


def _is_numpys(scores: Tensor) -> bool:
    """Return whether numpy can compute these, in a tenth of torch's time. A capture records torch's operations only."""
    return scores.device.type == "cpu" and scores.dtype == torch.float32 and not is_in_torch_dispatch_mode()


def inverse_cdf(p: Tensor, uniform: Tensor) -> Tensor:
    """Return where the cumulative sum of p [..., V] passes uniform [...]: a draw from p without a device sync."""
    return draws(p, uniform.unsqueeze(-1)).squeeze(-1)


def draws(p: Tensor, uniform: Tensor) -> Tensor:
    """Return where the cumulative sum of p [..., V] passes each uniform [..., n]: n draws from p."""
    # In float64: a GPU's parallel sum may decrease by rounding, which must not open a gap for a token with p = 0.
    cumulative = p.cumsum(dim=-1, dtype=torch.float64)
    # Scaling by the sum keeps rounding from ever pointing past the last token.
    threshold = uniform * cumulative[..., -1:]
    return torch.searchsorted(cumulative, threshold, right=True).clamp_(max=p.shape[-1] - 1)


class Sampler:
    """Chooses tokens for places of B rows, given the number of tokens that each row has emitted and the seen tokens.

    Random numbers [B, num_places] belong to a row's seed and a place. If a round emits nothing at a place, the next
    round uses its numbers again, so draws stay independent of each other.
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
        """Begin the answers to these prompts in rows `first` ..., with nothing emitted yet."""
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
        """Return the first tokens [b] of the answers in rows `first` ..., given logits [b, 1, V]."""
        rows = slice(first, first + len(logits))
        if self._seen is not None:
            logits = penalised(logits, self._seen[rows, None], self.sampling.repetition_penalty)
        if self.greedy:
            tokens = likeliest(logits)
        else:
            tokens = inverse_cdf(self.probabilities(logits), self._numbers[PURPOSES.index("draw"), rows, :1])
            self._emitted[rows] = 1
        if self._seen is not None:
            self._seen[rows].scatter_(1, tokens, True)
        return tokens[:, 0]

    def commit(self, tokens: Tensor, num_accepted: Tensor) -> None:
        """Record the first num_accepted [B] + 1 of tokens [B, N + 1] as seen, for the repetition penalty."""
        if self._seen is not None:
            last = tokens.gather(1, num_accepted[:, None])
            kept = torch.arange(tokens.shape[1], device=self.device) <= num_accepted[:, None]
            self._seen.scatter_(1, torch.where(kept, tokens, last), True)

    def emitted(self, counts: Sequence[int]) -> None:
        """Set the number of tokens that each row has emitted so far."""
        if not self.greedy:
            self._emitted = to_device(counts, self.device)[:, None]

    def penalise(self, logits: Tensor, block: Tensor | None = None, parents: Tensor | None = None) -> Tensor:
        """Return logits [B, N, V] after the repetition penalty for all tokens before each of N places.

        With a block [B, N] (anchor first), the tokens before place i include token i of the block and its predecessors,
        or its ancestors in a tree with `parents` [B, N - 1]; without a block only committed tokens count.
        """
        if self._seen is None:
            return logits
        seen = self._seen[:, None]
        if block is not None and block.shape[1] > 1:
            width = block.shape[1]
            above = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
            above = above.expand(len(block), -1, -1) if parents is None else ancestors(parents)
            # The anchor has been seen already, so it can replace tokens that have not.
            tokens = torch.where(above, block[:, None], block[:, :1, None])
            seen = seen.repeat(1, width, 1).scatter_(2, tokens, True)
        return penalised(logits, seen, self.sampling.repetition_penalty)

    def probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.sampling)

    def choose(self, logits: Tensor, places: Tensor | None) -> Tensor:
        """Return tokens [B, N] for penalised logits [B, N, V] at places [B, N], chosen greedily if places is None."""
        if places is None:
            return likeliest(logits)
        return inverse_cdf(self.probabilities(logits), self.numbers("draw", places))

    def places(self, width: int, parents: Tensor | None = None) -> Tensor | None:
        """Return the place [B, width] in its answer that each row's next token would have after each token of a block.

        Return None at temperature 0; `parents` [B, width - 1] if the block is a tree.
        """
        if self.greedy:
            return None
        if parents is None:
            return self._emitted + torch.arange(width, device=self.device)
        return self._emitted + depths(parents)

    def numbers(self, purpose: Purpose, places: Tensor) -> Tensor:
        """Return uniform numbers [B, N] in [0, 1) for places [B, N]."""
        return self._numbers[PURPOSES.index(purpose)].gather(1, places)


def uniform(seed: int, purpose: Purpose, num_places: int) -> Tensor:
    """Return a request's uniform numbers [num_places]; a larger num_places does not change the first numbers."""
    # The purpose comes first: a large seed takes two words, which must not run into it.
    generator = np.random.default_rng([PURPOSES.index(purpose), seed % 2**64])
    return torch.from_numpy(generator.random(num_places, dtype=np.float32))
