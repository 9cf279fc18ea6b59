"""DFlash with prompt lookup: where a long piece of text repeats, its continuation is drafted without a pass.

If the last `match` tokens of every row that is still being decoded occurred in its text before, up to `copy` tokens
that followed them are drafted, and the draft network rests; otherwise it drafts its block for all rows. Either way it
reads all committed tokens, so that its context is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import Text, chains
from dflash_bench.engine.drafters.dflash import DFlashDrafter, block_size, refuse_autoregressive
from dflash_bench.engine.drafters.ngram import NGramDrafter
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.dflash import DFlashDraft


class DFlashNGramDrafter:
    def __init__(self, block: DFlashDrafter, match: int, copy: int) -> None:
        self.block, self.lookup = block, NGramDrafter(copy, match, match, block.device)
        self.taps = block.taps
        self.num_drafts = max(block.num_drafts, copy)

    def compile(self) -> None:
        self.block.compile()

    def begin(self, num_rows: int, capacity: int) -> None:
        self.block.begin(num_rows, capacity)
        self.lookup.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.block.observe(committed)
        self.lookup.observe(committed)

    def propose(self) -> Draft | None:
        alive = self.lookup.is_alive
        copies: Sequence[Text] = [self.lookup.continuation(row) if live else () for row, live in enumerate(alive)]
        if all(copy or not live for copy, live in zip(copies, alive, strict=True)):
            return chains(copies, self.block.device)
        return self.block.propose()


def build(models: Models, target: Target, method: Method) -> DFlashNGramDrafter:
    draft: DFlashDraft = models.draft_of(method)
    refuse_autoregressive(draft, method)
    block = DFlashDrafter(draft, target.embedding, target.head, block_size(draft, method))
    return DFlashNGramDrafter(block, method.number("match"), method.number("copy"))
