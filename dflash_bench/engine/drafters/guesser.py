"""Diffusion language models as drafts: predict all positions after a text in one pass.

Dream and LLaDA attend to the whole text in both directions, so every round reads it anew; models with blocks keep a KV
cache of finished text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.base import Text
from dflash_bench.engine.selection import target_like
from dflash_bench.engine.target import Target
from dflash_bench.models.block_models import ALIGNED, SEES_ALL
from dflash_bench.models.loading import Models


class Guesser(Protocol):
    """Reads a row's text, which ends with the anchor, and masks behind it."""

    def begin(self, num_rows: int, capacity: int) -> None: ...

    def start(self, row: int) -> None:
        """Forget a row's text."""

    def guess(self, row: int, text: Text, count: int) -> Tensor:
        """Return logits [n, V] of the tokens after the text, n at most `count`."""
        ...


class WholeTextGuesser:
    """A model that sees the whole text in both directions: Dream, whose slot k predicts token k + 1.

    If `is_aligned`, every slot predicts its own token: LLaDA.
    """

    def __init__(self, reader: Target, mask_token_id: int, is_aligned: bool = False) -> None:
        self.reader, self.mask_token_id, self.is_aligned = reader, mask_token_id, is_aligned

    def begin(self, num_rows: int, capacity: int) -> None:
        self.reader.begin(1, capacity)

    def start(self, row: int) -> None:
        pass

    def guess(self, row: int, text: Text, count: int) -> Tensor:
        tokens = torch.tensor([[*text, *[self.mask_token_id] * count]], device=self.reader.device)
        first = len(text) - (not self.is_aligned)
        some = torch.arange(first, first + count)
        output = self.reader.forward(tokens, [0], keep_logits=some, counts=[0], whole_block=True)
        return output.logits[0]


class BlockGuesser:
    """A model that sees the text before its block, and the block in both directions.

    Blocks begin at the anchor and slot k predicts token k + 1; or, if `is_aligned`, at multiples of their size, and
    every slot predicts itself.
    """

    def __init__(self, reader: Target, block_size: int, mask_token_id: int, is_aligned: bool) -> None:
        self.reader, self.block_size, self.mask_token_id = reader, block_size, mask_token_id
        self.is_aligned = is_aligned

    def begin(self, num_rows: int, capacity: int) -> None:
        self.reader.begin(num_rows, capacity + self.block_size)
        self.num_read = [0] * num_rows

    def start(self, row: int) -> None:
        self.num_read[row] = 0

    def guess(self, row: int, text: Text, count: int) -> Tensor:
        size = self.block_size
        # The text before the block: whole blocks of it, or all but the anchor.
        end = (len(text) // size) * size if self.is_aligned else len(text) - 1
        step = size if self.is_aligned else end
        while self.num_read[row] < end:
            at = self.num_read[row]
            part = text[at : min(end, at + step)]
            self._pass(row, part, at, len(part), self.is_aligned)
            self.num_read[row] += len(part)
        block = [*text[end:], *[self.mask_token_id] * (size - len(text) + end)]
        logits = self._pass(row, block, end, 0, True)
        return logits[len(text) - end :][:count] if self.is_aligned else logits[:count]

    def _pass(self, row: int, tokens: Text, start: int, kept: int, is_whole: bool) -> Tensor:
        given = torch.tensor([list(tokens)], device=self.reader.device)
        logits: Tensor = self.reader.forward(given, [start], counts=[kept], whole_block=is_whole, first=row).logits[0]
        return logits


@dataclass(frozen=True, slots=True)
class Guesses:
    """A guesser of at most `most` tokens, with the ids below `vocab_size` that the target has, too."""

    guesser: Guesser
    most: int
    vocab_size: int
    stop_ids: frozenset[int]
    device: torch.device

    @classmethod
    def of(cls, models: Models, target: Target, method: Method) -> Guesses:
        model: Any = models.draft_of(method)
        known = model.config.block_diffusion
        reader = target_like(target, model)
        is_aligned = bool(known.get(ALIGNED))
        guesser: Guesser
        most = method.number("n")
        if known.get(SEES_ALL):
            guesser = WholeTextGuesser(reader, known["mask_token_id"], is_aligned)
        else:
            guesser = BlockGuesser(reader, known["block_size"], known["mask_token_id"], is_aligned)
            most = min(most, known["block_size"])
        stops = target.model.generation_config.eos_token_id
        stop_ids = frozenset(stops if isinstance(stops, list) else [] if stops is None else [stops])
        sizes = (one.get_input_embeddings().weight.shape[0] for one in (target.model, model))
        return cls(guesser, most, min(sizes), stop_ids, reader.device)

    def logits(self, row: int, text: Text, count: int) -> Tensor:
        """Return float32 logits [n, V] of the tokens after a row's text, n at most `count`."""
        known = [min(token, self.vocab_size - 1) for token in text]
        return self.guesser.guess(row, known, count)[:, : self.vocab_size].float()
