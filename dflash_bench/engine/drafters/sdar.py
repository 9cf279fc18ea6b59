"""SDAR: a language model that fills in blocks at multiples of their size (arXiv 2510.06303), alone and unverified.

A block sees itself and all blocks before it. Its masks are filled in over several passes, in which every guess above a
threshold is kept, at least the surest; then a pass over the finished block stores its keys and values. The prompt is
read in the same blocks, and the first block to fill begins with the prompt's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.target import Output, Target
from dflash_bench.engine.verify import Draft

NEVER = -1e4
"""The logit of every token but the chosen one: finite, and its probability is 0."""


class SDARReader:
    """SDAR's passes as the loop asks a target for them: a prompt's end is its first filled block.

    Rows have a queue each of tokens that were filled in and not yet emitted.
    """

    reads_in_parts = False

    def __init__(self, model: Target, block_size: int, mask_token_id: int, threshold: float) -> None:
        self.model, self.block_size, self.threshold = model, block_size, threshold
        self.mask_token_id = mask_token_id
        self.context_length, self.device, self.vocab_size = model.context_length, model.device, model.vocab_size
        self.rule, self.listener = None, model.listener
        self.num_passes = 0
        """Number of passes that filled in tokens."""

    def tap(self, taps: Sequence[int]) -> None:
        assert not taps, "a draft that reads features has another target"

    def begin(self, num_rows: int, capacity: int) -> None:
        self.model.begin(num_rows, capacity + 2 * self.block_size)
        self.read = [0] * num_rows
        """Tokens of finished blocks in each row's cache."""
        self.queues: list[list[int]] = [[] for _ in range(num_rows)]
        self.has_ended = [False] * num_rows

    def prefill(self, prompts: Sequence[Sequence[int]], starts: Sequence[int] | None = None, first: int = 0) -> Output:
        """Read the prompts' whole blocks, fill in the blocks of their ends, and return logits [b, 1, V] after them."""
        assert not any(starts or ()), "prompts are read whole"
        size, rows = self.block_size, range(first, first + len(prompts))
        whole = [len(prompt) // size for prompt in prompts]
        for block in range(max(whole)):
            tokens = [
                [*prompt[block * size : (block + 1) * size]] if block < count else [self.mask_token_id] * size
                for prompt, count in zip(prompts, whole, strict=True)
            ]
            places = [size * min(block, count) for count in whole]
            counts = [size * (block < count) for count in whole]
            self._pass(torch.tensor(tokens, device=self.device), places, first, counts)
        for row, count in zip(rows, whole, strict=True):
            self.read[row], self.has_ended[row] = size * count, False
        ends = [[*prompt[size * count :]] for prompt, count in zip(prompts, whole, strict=True)]
        for row, end, filled in zip(rows, ends, self.filled(first, ends), strict=True):
            self.queues[row] = filled[len(end) :]
        chosen = torch.tensor([self.queues[row].pop(0) for row in rows], device=self.device)
        logits = torch.full((len(prompts), 1, self.vocab_size), NEVER, device=self.device)
        return Output(logits.scatter_(2, chosen[:, None, None], 0.0), None)

    @torch.inference_mode()
    def filled(self, first: int, beginnings: Sequence[Sequence[int]]) -> list[list[int]]:
        """Fill in the next block of the rows `first` ..., which begin with these tokens, and store it."""
        size, mask = self.block_size, self.mask_token_id
        rows = [[*begin, *[mask] * (size - len(begin))] for begin in beginnings]
        block = torch.tensor(rows, device=self.device)
        missing = torch.tensor([[at >= len(begin) for at in range(size)] for begin in beginnings], device=self.device)
        starts = self.read[first : first + len(beginnings)]
        nothing = [0] * len(beginnings)
        while missing.any():
            self.num_passes += 1
            best = self._pass(block, starts, first, nothing).float().softmax(dim=-1).max(dim=-1)
            kept = missing & sure_enough(best.values.where(missing, -1.0), self.threshold)
            block = best.indices.where(kept, block)
            missing &= ~kept
        self._pass(block, starts, first, [size] * len(beginnings))
        for row in range(first, first + len(beginnings)):
            self.read[row] += size * (not self.has_ended[row])
        filled: list[list[int]] = block.tolist()
        return filled

    def _pass(self, tokens: Tensor, starts: Sequence[int], first: int, counts: Sequence[int]) -> Tensor:
        """Read a block [b, B] of each row, and keep its first counts[b] tokens; return logits [b, B, V]."""
        logits: Tensor = self.model.forward(tokens, starts, counts=counts, whole_block=True, first=first).logits
        return logits

    def forward(self, tokens: Tensor, _starts: Sequence[int], _parents: Tensor | None = None) -> Output:
        """Return logits without meaning: what is emitted was read when it was filled in."""
        return Output(torch.zeros(1, 1, 1, device=self.device).expand(*tokens.shape, self.vocab_size), None)

    def commit(self, counts: Sequence[int]) -> None:
        """Note which rows have ended: their blocks are filled in beside the others', and forgotten."""
        self.has_ended = [count == 0 for count in counts]


class SDARDrafter:
    """Emits a block's worth of tokens a round, while it fills in one block."""

    taps: tuple[int, ...] = ()

    def __init__(self, reader: SDARReader) -> None:
        self.reader = reader
        self.num_drafts = reader.block_size - 1

    @property
    def num_passes(self) -> int:
        return self.reader.num_passes

    def begin(self, num_rows: int, capacity: int) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        if committed.sampler is not None and not committed.sampler.greedy:
            raise UserError("SDAR is decoded here at temperature 0 alone; leave --temperature out")

    def propose(self) -> Draft:
        reader, size = self.reader, self.reader.block_size
        for queue, filled in zip(reader.queues, reader.filled(0, [()] * len(reader.queues)), strict=True):
            queue += filled
        emitted = torch.tensor([queue[:size] for queue in reader.queues], device=reader.device)
        reader.queues = [queue[size:] for queue in reader.queues]
        return Draft(emitted[:, :-1], following=emitted[:, -1])


def sure_enough(sureness: Tensor, threshold: float) -> Tensor:
    """Return [B, K], true where probabilities [B, K] reach the threshold or are their row's highest."""
    return (sureness >= threshold) | (sureness == sureness.amax(dim=1, keepdim=True))
