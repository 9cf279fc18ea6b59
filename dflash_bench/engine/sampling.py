"""From logits to tokens: greedy, or sampled with a random number that belongs to the token's place.

Place t of a row always uses the same uniform number, so plain and speculative decoding with the same seed draw the
same tokens at any temperature: sampling is as checkable as greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_bench.records import is_greedy


@dataclass(frozen=True, slots=True)
class Sampling:
    """`records.is_greedy` says up to which temperature the best token is taken."""

    temperature: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return is_greedy(self.temperature)


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) in float32."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def inverse_cdf(p: Tensor, uniform: Tensor) -> Tensor:
    """The token where the cumulative sum of p [..., V] passes uniform [...]: a draw from p without a device sync."""
    cumulative = p.cumsum(dim=-1)
    # Scaling by the sum keeps rounding from ever pointing past the last token.
    threshold = (uniform * cumulative[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=p.shape[-1] - 1)


class Sampler:
    """Chooses the target's token for places of B rows.

    `uniform` and `acceptance` [B, num_places] are random numbers per place, the first for the target's own draws, the
    second for keeping or refusing a sampled draft. A place of which nothing is emitted leaves its numbers unused for
    the next round, so using them by place does not make draws depend on each other.
    """

    def __init__(self, sampling: Sampling, num_rows: int, num_places: int, device: torch.device) -> None:
        self.sampling = sampling
        self.uniform = self.acceptance = torch.empty(num_rows, 0, device=device)
        if not sampling.greedy:
            seed = sampling.seed * 1_000_003
            self.uniform = _uniform(seed, num_rows, num_places).to(device)
            self.acceptance = _uniform(seed + 0x9E3779B9, num_rows, num_places).to(device)

    @property
    def greedy(self) -> bool:
        return self.sampling.greedy

    def choose(self, logits: Tensor, places: Tensor | None) -> Tensor:
        """Tokens [B, N] for logits [B, N, V]; places [B, N] number the tokens a row has emitted before each.

        Greedy choices need no places.
        """
        if places is None:
            return logits.argmax(dim=-1)
        return inverse_cdf(probabilities(logits, self.sampling.temperature), self.uniform.gather(1, places))


def _uniform(seed: int, num_rows: int, num_places: int) -> Tensor:
    """[num_rows, num_places], row by row from seeds of their own: what a row is batched with changes nothing."""
    seeds = [(seed + row) % 2**63 for row in range(num_rows)]
    return torch.stack([torch.rand(num_places, generator=torch.Generator().manual_seed(s)) for s in seeds])
