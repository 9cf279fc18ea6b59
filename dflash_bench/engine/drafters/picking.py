"""From a draft's logits to the tokens it proposes, by the rule that will judge them.

`match`: the likeliest tokens, kept while they are what the target draws. `rejection`: tokens drawn from the draft's
own probabilities, at the run's temperature and with its filters, kept with probability min(1, p / q) (Leviathan et al.
2023, algorithm 1). At temperature 0 both are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_bench.engine.sampling import Sampler, inverse_cdf

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
