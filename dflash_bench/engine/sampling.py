"""From logits to tokens: greedy, or sampled with a random number that belongs to the token's place.

Place t of a row always uses the same uniform number, so plain and speculative decoding with the same seed draw the
same tokens at any temperature: sampling is as checkable as greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature 0 is greedy."""

    temperature: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


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
    """Chooses the target's token for places of B rows."""

    def __init__(self, sampling: Sampling, num_rows: int, num_places: int, device: torch.device) -> None:
        self.sampling = sampling
        self.uniform: Tensor | None = None
        if not sampling.greedy:
            # Row by row from seeds of their own: a row's numbers do not depend on what it is batched with.
            rows = [
                torch.rand(num_places, generator=torch.Generator().manual_seed(sampling.seed * 1_000_003 + row))
                for row in range(num_rows)
            ]
            self.uniform = torch.stack(rows).to(device)

    def choose(self, logits: Tensor, places: Tensor) -> Tensor:
        """Tokens [B, N] for logits [B, N, V]; places [B, N] number the tokens a row has emitted before each."""
        if self.uniform is None:
            return logits.argmax(dim=-1)
        p = probabilities(logits, self.sampling.temperature)
        return inverse_cdf(p, self.uniform.gather(1, places))
