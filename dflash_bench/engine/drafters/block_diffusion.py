"""Block diffusion: a language model that fills in blocks of masks by itself, without a target (arXiv 2509.26328).

Every pass predicts all tokens of a block that are still masked, and fixes the confident ones, at least the most
confident. A finished block is committed as it is: nothing verifies it, so the output is this model's own, and lossy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import Committed, StandAlone
from dflash_bench.engine.drafters.sdar import SDARDrafter, SDARReader, sure_enough
from dflash_bench.engine.sampling import Sampler, inverse_cdf
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.block_models import ALIGNED, SEES_ALL
from dflash_bench.models.loading import Models


def build(models: Models, _target: Target, method: Method) -> StandAlone:
    model = models.draft_of(method)
    known = model.config.block_diffusion
    if known.get(SEES_ALL):
        raise UserError(
            f"method {method.label}: this model has no blocks to answer in by itself; let it draft: diffuspec"
        )
    block_size = known["block_size"] if method.option("block") is None else method.number("block")
    if block_size > known["block_size"]:
        raise UserError(
            f"method {method.label}: the model was trained on blocks of {known['block_size']}; give no larger one"
        )
    settings = (Target(model), block_size, known["mask_token_id"], float(method.option("threshold") or 0))
    if not known.get(ALIGNED):
        return BlockDiffusionDrafter(*settings)
    return SDARDrafter(SDARReader(*settings))


class BlockDiffusionDrafter:
    """Fills blocks of masks; a prediction is fixed from the probability `threshold` on.

    Slot k of a block predicts token k + 1, as in any causal LM: a block of K slots reads the anchor and K - 1 tokens,
    and predicts K.
    """

    taps: tuple[int, ...] = ()

    def __init__(self, reader: Target, block_size: int, mask_token_id: int, threshold: float) -> None:
        self.reader, self.block_size, self.mask_token_id = reader, block_size, mask_token_id
        self.threshold = threshold
        self.num_drafts = block_size - 1
        self.num_passes = 0
        """Number of passes over blocks, since the drafter was made, without the passes that read finished blocks."""

    def begin(self, num_rows: int, capacity: int) -> None:
        self.starts = [0] * num_rows
        self.block = torch.zeros(num_rows, self.block_size, dtype=torch.long, device=self.reader.device)

    def observe(self, committed: Committed) -> None:
        self.sampler: Sampler | None = committed.sampler
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            self.starts[row] = start + count
        if committed.anchor is not None:
            self.block[committed.row_slice, 0] = committed.anchor

    def propose(self) -> Draft:
        self.block[:, 1:] = self.mask_token_id
        answer = torch.zeros_like(self.block)
        missing = torch.ones_like(self.block, dtype=torch.bool)
        for _ in range(self.block_size):
            guesses, sureness = self._guess()
            kept = missing & sure_enough(sureness.where(missing, -1.0), self.threshold)
            answer = guesses.where(kept, answer)
            missing &= ~kept
            self.block[:, 1:] = answer.masked_fill(missing, self.mask_token_id)[:, :-1]
            # The number of passes depends on the tokens, so the host waits after each pass to check if it was the last.
            if not missing.any():
                break
        return Draft(answer[:, :-1], following=answer[:, -1])

    def _guess(self) -> tuple[Tensor, Tensor]:
        """Run one pass over the block; return a token for each slot [B, K], and its probability [B, K]."""
        self.num_passes += 1
        logits = self.reader.forward(self.block, self.starts, whole_block=True).logits
        if self.sampler is None or self.sampler.greedy:
            best = logits.float().softmax(dim=-1).max(dim=-1)
            return best.indices, best.values
        probs = self.sampler.probabilities(self.sampler.penalise(logits))
        places = self.sampler.places(self.block_size)
        assert places is not None
        drawn = inverse_cdf(probs, self.sampler.numbers("draft", places))
        return drawn, probs.gather(-1, drawn[..., None])[..., 0]
