"""Texts and targets that repeat themselves, and ways to run a drafter that reads the host's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.masks import causal_mask
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Output
from dflash_bench.engine.verify import Draft
from helpers.toy import Decoded, TableTarget, run

CPU = torch.device("cpu")
VOCAB = 23
STOP = 4
PROMPTS = [
    [1, 2, 3, 1, 2, 3, 1],
    [5],
    [i % 7 for i in range(40)],
    [9, 9, 9, 9],
    [(3 * i + 1) % 19 for i in range(17)],
    [i % 5 for i in range(25)],
    [2, 2],
    [(i * i) % 11 for i in range(33)],
]


class Repeating(TableTarget):
    """Says mostly what its last two tokens call for, so that answers run into loops; now and then something else.

    What else, and when, follows from all that it sees: a row that is rolled back wrongly says something else.
    """

    def __init__(self, vocab_size: int = VOCAB, context_length: int = 64) -> None:
        super().__init__(vocab_size, context_length)
        generator = torch.Generator().manual_seed(1)
        self.after = 4 * torch.randn(2, vocab_size, vocab_size, generator=generator)

    def logits_after(self, history: Sequence[int]) -> Tensor:
        before = history[-2] if len(history) > 1 else 0
        return super().logits_after(history) + self.after[before % 2, history[-1]]

    def forward(self, tokens: Tensor, starts: Sequence[int], parents: Tensor | None = None, first: int = 0) -> Output:
        out = super().forward(tokens, starts, parents, first)
        seen = self.cache._layers[0][0][:, 0, None, : self.cache.visible, 0]
        allowed = causal_mask(self.cache, torch.float32, parents)[:, 0] == 0
        last = allowed.sum(dim=-1, keepdim=True)
        before = (seen * (allowed & (allowed.cumsum(dim=-1) == last - 1))).sum(dim=-1)
        return Output(out.logits + self.after[before % 2, tokens], out.hidden)


def table(context_length: int = 64) -> TableTarget:
    return Repeating(VOCAB, context_length)


def tell(drafter: Any, texts: Sequence[list[int]], num_new: Sequence[int] | None = None) -> None:
    """The loop's state after a pass: the rows, whose last `num_new` tokens are new."""
    counts = list(num_new) if num_new is not None else [1] * len(texts)
    nothing = torch.zeros(len(texts), 0, dtype=torch.long)
    is_prompt = not any(getattr(drafter, "lookup", drafter).texts)
    requests = range(len(texts))
    drafter.observe(
        Committed(None, nothing, nothing, [0] * len(texts), counts, texts, is_prompt=is_prompt, requests=requests)
    )


def chains_of(draft: Draft | None, num_rows: int = 1) -> list[list[int]]:
    """The real tokens of each row's chain."""
    if draft is None:
        return [[] for _ in range(num_rows)]
    assert draft.parents is None and draft.lengths is not None
    assert draft.width == max(draft.lengths), "no wider than the longest row"
    return [row[:length] for row, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def drafted_after(drafter: Any, text: Sequence[int]) -> list[int]:
    """The chain that a row of this text alone is given, told to the drafter token by token."""
    drafter.begin(1, len(text) + 64)
    row = list(text[:1])
    for token in text[1:]:
        row.append(token)
        tell(drafter, [row])
    return chains_of(drafter.propose())[0]


def accepted(out: Decoded, row: int = 0) -> list[int]:
    return [step.accepted[row] for step in out.own(row)]


def sampled(drafter: Any, temperature: float = 1.0, seed: int = 3) -> list[list[int]]:
    return run(table(), drafter, PROMPTS, sampling=Sampling(temperature, seed)).tokens
