"""SpecDiff-2's self-selection: several drafts from one pass of a diffusion language model (arXiv 2511.00606).

One pass predicts all positions after the text. Drafts are sampled from these distributions, each position
independently, and merged into a tree that the target verifies in one pass; the longest accepted prefix is kept. This
follows the authors' code. Streak distillation, the paper's training objective, does not affect decoding.
"""

from __future__ import annotations

from itertools import islice
from random import Random

import torch
from torch import Tensor

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.base import HostDrafter, Text, Trie, generator, trees
from dflash_bench.engine.drafters.guesser import Guesses
from dflash_bench.engine.sampling import draws
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models


def build(models: Models, target: Target, method: Method) -> SpecDiff2Drafter:
    return SpecDiff2Drafter(Guesses.of(models, target, method), method)


class SpecDiff2Drafter(HostDrafter):
    """Draws `samples` drafts of each row's next tokens, and proposes them as a tree."""

    def __init__(self, guesses: Guesses, method: Method) -> None:
        self.guesses, self.samples = guesses, method.number("samples")
        self.temperature, self.seed = method.real("temperature"), method.number("seed")
        super().__init__(guesses.most * self.samples, guesses.device)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.guesses.guesser.begin(num_rows, capacity + self.guesses.most)
        self.randoms = [Random()] * num_rows

    def start(self, row: int, prompt: Text) -> None:
        self.guesses.guesser.start(row)
        self.randoms[row] = generator(self.seed, prompt)

    @torch.inference_mode()
    def propose(self) -> Draft | None:
        """Guess for every row, and wait for all draws at once."""
        drawn = {row: self._drawn(row) for row, alive in enumerate(self.is_alive) if alive}
        if not drawn:
            return None
        tokens = iter(torch.cat([drafts.flatten() for drafts in drawn.values()]).tolist())
        tries = [Trie() for _ in self.is_alive]
        for row, drafts in drawn.items():
            for _ in range(len(drafts)):
                tries[row].add(self._until_stop([*islice(tokens, drafts.shape[1])]))
        return trees(tries, self.device)

    def _until_stop(self, path: Text) -> Text:
        ends = [at for at, token in enumerate(path) if token in self.guesses.stop_ids]
        return path[: ends[0] + 1] if ends else path

    def _drawn(self, row: int) -> Tensor:
        """Return drafts [samples, n] of the tokens after a row's text."""
        logits = self.guesses.logits(row, self.texts[row], self.guesses.most)
        if not self.temperature:
            return logits.argmax(dim=-1)[None]
        numbers = torch.tensor([[self.randoms[row].random() for _ in range(self.samples)] for _ in logits])
        probs = (logits / self.temperature).softmax(dim=-1)
        return draws(probs, numbers.to(probs.device, non_blocking=True)).T
