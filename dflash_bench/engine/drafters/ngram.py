"""Prompt lookup: if the text's last tokens occurred in it before, draft the tokens that followed them there.

After Saxena's prompt lookup decoding (2023) and vLLM's `ngram`: the longest suffix of prompt and answer, from `max`
tokens down to `min`, at its latest earlier occurrence. It has no weights and no network; it pays where an answer
repeats its prompt or itself.
"""

from __future__ import annotations

import torch

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.base import HostDrafter, Text
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models


class NGramIndex:
    """The last occurrence of each n-gram in a growing text, for n from `longest` down to `shortest`.

    What follows an occurrence begins at the text's token `first` or later.
    """

    def __init__(self, longest: int, shortest: int, first: int = 0) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_read = max(0, first - 1)

    def read(self, text: Text) -> None:
        """Add the new n-grams of a text, except at its very end, where nothing follows yet."""
        for end in range(self._num_read + 1, len(text)):
            for size in self.sizes:
                if size <= end:
                    self._ends[tuple(text[end - size : end])] = end
        self._num_read = len(text) - 1

    def continuation(self, text: Text, limit: int) -> Text:
        """Return up to `limit` tokens that followed an earlier occurrence of the longest suffix, or none."""
        for size in self.sizes:
            end = self._ends.get(tuple(text[-size:]))
            if end is not None:
                return text[end : end + limit]
        return ()


class NGramDrafter(HostDrafter):
    def __init__(
        self, num_drafts: int, longest: int, shortest: int, device: torch.device, copies_prompt: bool = True
    ) -> None:
        super().__init__(num_drafts, device)
        self.longest, self.shortest, self.copies_prompt = longest, shortest, copies_prompt
        self.indices: dict[int, NGramIndex] = {}

    def start(self, row: int, prompt: Text) -> None:
        self.indices[row] = NGramIndex(self.longest, self.shortest, 0 if self.copies_prompt else len(prompt))

    def read(self, row: int, text: Text) -> None:
        self.indices[row].read(text)

    def continuation(self, row: int) -> Text:
        return self.indices[row].continuation(self.texts[row], self.num_drafts)


def build(models: Models, target: Target, method: Method) -> NGramDrafter:
    """Build the drafter. Raises UserError if the longest n-gram is shorter than the shortest."""
    num_drafts, longest, shortest = (method.number(name) for name in ("n", "max", "min"))
    if longest < shortest:
        raise UserError(f"method {method.label}: max={longest} is less than min={shortest}")
    return NGramDrafter(num_drafts, longest, shortest, target.device, method.option("prompt") == "yes")
