"""P-EAGLE drafting: one pass reads the committed pairs and drafts all tokens of a round (parallel EAGLE).

A row's block is [pairs committed since the last round, masks]: pairs hold tokens and the target's features, masks a
mask token and a learned feature. Positions continue from the pairs to the masks, and each place of the block sees the
places before it, so one causal pass gives the state after the newest pair, and behind it one per mask. The masks'
entries in the cache are overwritten by the pairs of the next round.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_bench.core.methods import Method
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.p_eagle import PEagleDraft


def build(models: Models, target: Target, method: Method) -> PEagleDrafter:
    draft: PEagleDraft = models.draft_of(method)
    wanted = None if method.option("n") is None else method.number("n")
    rule = str(method.option("rule"))
    return PEagleDrafter(draft, target.embedding, draft.config.num_drafts(wanted), rule)


class PEagleDrafter(Eagle3Drafter):
    """Keeps the committed pairs, and reads them when it drafts. Prompts are read at once.

    `pending` holds the start and the number of each row's pairs: none for a row that stands still.
    """

    def __init__(self, draft: PEagleDraft, embedding: nn.Module, num_drafts: int, rule: str = "match") -> None:
        # Behind a row that kept little lie as many masks as the widest row has pairs.
        super().__init__(draft, embedding, num_drafts, num_scratch=2 * num_drafts)
        self.draft_sampler = DraftSampler(rule, draft.target_ids, self.config.draft_vocab_size)

    def allocate(self, num_rows: int, capacity: int) -> None:
        self.most_pairs = self.num_drafts + 1
        width = self.most_pairs + self.num_drafts - 1
        self.rows = torch.arange(num_rows, device=self.device)[:, None]
        self.places = torch.arange(width, device=self.device)
        self.tokens = torch.zeros(num_rows, width, dtype=torch.long, device=self.device)
        self.features = self.weight.new_zeros(num_rows, self.most_pairs, self.config.num_features)
        self.pending = [(0, 0)] * num_rows
        self.mask = self.network.fuse(self.draft.mask_hidden.detach())

    def observe(self, committed: Committed) -> None:
        """Keep the committed pairs until the next draft; prompts are read here, except for their last pair."""
        assert committed.hidden is not None
        self.draft_sampler.sampler = committed.sampler
        tokens, features, starts, counts = committed.tokens, committed.hidden, committed.starts, committed.counts
        if committed.is_prompt or tokens.shape[1] > self.most_pairs:
            self.read_committed(committed)
            last = committed.last
            place = to_device(last, self.device)[:, None]
            tokens = tokens.gather(1, place)
            features = features.take_along_dim(place[..., None], dim=1)
            starts = [start + at for start, at in zip(starts, last, strict=True)]
            counts = [min(count, 1) for count in counts]
        self.tokens[committed.row_slice, : tokens.shape[1]] = tokens
        self.features[committed.row_slice, : tokens.shape[1]] = features
        for row, start, count in zip(committed.rows, starts, counts, strict=True):
            self.pending[row] = start, count
        self.advance(committed)

    def propose(self) -> Draft:
        tokens, probs = self.draft_sampler.sample(self.network.logits(self._read_block()))
        return Draft(tokens, probs=probs)

    def hidden_to(self, read_at: Tensor, window: int) -> Tensor:
        """Return hidden places as in EAGLE-3, but end masks' windows at the mask: their round and pair stay visible."""
        hidden_to = read_at - window
        return hidden_to if self.newest is None else hidden_to.minimum(self.newest - 1)

    def _read_block(self) -> Tensor:
        """Return the outputs [B, num_drafts, H] after each row's newest pair and after the masks behind it."""
        starts, counts = [start for start, _ in self.pending], [count for _, count in self.pending]
        num_pairs = max(*counts, 1)
        width = num_pairs + self.num_drafts - 1
        ends = to_device(counts, self.device)[:, None]
        is_pair = self.places[:width] < ends
        tokens = torch.where(is_pair, self.tokens[:, :width], self.config.mask_token_id)
        fused = self.fuse(self.features[:, :num_pairs])
        masks = self.mask.expand(len(starts), width - num_pairs, -1)
        if self.config.window is not None:
            self.newest = to_device(starts, self.device)[:, None] + ends - 1
        hidden = torch.where(is_pair[..., None], torch.cat([fused, masks], dim=1), self.mask)
        if (results := self.replayed(self.steady, starts, tokens, hidden)) is not None:
            (read,) = results
        else:
            self.cache.place(starts, width)
            read = self._through(tokens, hidden)
        self.newest = None
        if min(counts) == max(counts):
            return read[:, num_pairs - 1 :]
        drafting = (ends - 1).clamp(min=0) + self.places[: self.num_drafts]
        return read[self.rows, drafting]
