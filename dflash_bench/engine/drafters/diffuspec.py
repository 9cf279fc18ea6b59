"""DiffuSpec: a diffusion language model of the target's vocabulary drafts in one pass (arXiv 2510.02358).

Masks follow the text; one pass guesses all of them, a left-to-right path through the guesses is searched, and the
target verifies it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import HostDrafter, Text, chains
from dflash_bench.engine.drafters.guesser import Guesses
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models

Guess = tuple[int, float]
"""A token and its log-probability."""
ORDER = 3
BACK_OFF = math.log(0.4)
"""Log-probability penalty for each token dropped from the context (stupid back-off)."""


def build(models: Models, target: Target, method: Method) -> DiffuSpecDrafter:
    return DiffuSpecDrafter(Guesses.of(models, target, method), method)


class DiffuSpecDrafter(HostDrafter):
    """Drafts the best path through each row's guesses."""

    def __init__(self, guesses: Guesses, method: Method) -> None:
        super().__init__(guesses.most, guesses.device)
        self.guesses = guesses
        least = min(guesses.most, method.number("least"))
        self.new_controller: Callable[[], LengthController] = lambda: LengthController(least, guesses.most)
        self.top_k, self.beam = method.number("top_k"), method.number("beam")
        self.mass, self.share = method.real("mass"), method.real("share")

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.guesses.guesser.begin(num_rows, capacity + self.num_drafts)
        self.models = [TextModel(self.guesses.vocab_size) for _ in range(num_rows)]
        self.controllers = [self.new_controller() for _ in range(num_rows)]
        self.drafted = [0] * num_rows

    def start(self, row: int, prompt: Text) -> None:
        self.guesses.guesser.start(row)
        self.models[row], self.controllers[row] = TextModel(self.guesses.vocab_size), self.new_controller()
        self.drafted[row] = 0

    def observe(self, committed: Committed) -> None:
        super().observe(committed)
        if committed.anchor is None or committed.is_prompt:
            return
        for row, count in zip(committed.rows, committed.counts, strict=True):
            if count and self.drafted[row]:
                self.controllers[row].learn(self.drafted[row], count - 1)

    def read(self, row: int, text: Text) -> None:
        self.models[row].read(text[len(self.models[row].text) :])

    @torch.inference_mode()
    def propose(self) -> Draft | None:
        """Guess for every row, and wait for all guesses at once: the host searches the paths."""
        top = {row: self._guessed(row) for row, alive in enumerate(self.is_alive) if alive}
        if not top:
            return None
        ids, scores = (torch.cat(parts).tolist() for parts in zip(*top.values(), strict=True))
        paths: list[Text] = [()] * len(self.is_alive)
        start = 0
        for row, (guessed, _) in top.items():
            places = slice(start, start := start + len(guessed))
            paths[row] = self._path(
                row, [list(zip(*place, strict=True)) for place in zip(ids[places], scores[places], strict=True)]
            )
        return chains(paths, self.device)

    def _guessed(self, row: int) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens of each place behind a row's text [n, k], and their log-probabilities."""
        logits = self.guesses.logits(row, self.texts[row], self.controllers[row].length)
        scores = logits.log_softmax(dim=-1).topk(min(self.top_k, logits.shape[-1]), dim=-1)
        return scores.indices, scores.values

    def _path(self, row: int, guesses: list[list[Guess]]) -> Text:
        likeliest = [place[0][0] for place in guesses]
        ends = [at for at, token in enumerate(likeliest) if token in self.guesses.stop_ids]
        self.drafted[row] = ends[0] if ends else len(likeliest)
        places = [
            kept_guesses(place, self.mass, self.guesses.stop_ids) for place in guesses[: ends[0] + 1 if ends else None]
        ]
        return best_path(places, self.models[row], self.texts[row], self.beam, self.share, self.guesses.stop_ids)


# A left-to-right path through a draft's guesses, and the length of the next draft.
#
# The model guesses every place by itself, so that the likeliest guesses need not follow from each other. The search
# weighs them by a causal model of the text (section 4.2, equations 7 and 8), and the length follows what was accepted
# (section 4.3, equations 9 to 11).


class TextModel:
    """An n-gram model of order `ORDER`, counted over the text so far: prompt and answer.

    The paper fits one to each data set's training texts instead.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.counts: dict[tuple[int, ...], int] = defaultdict(int)
        self.totals: dict[tuple[int, ...], int] = defaultdict(int)
        """Counts of n-grams, and of their contexts with any next token."""
        self.text: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for size in range(ORDER):
                if size <= len(self.text):
                    before = tuple(self.text[len(self.text) - size :])
                    self.counts[*before, token] += 1
                    self.totals[before] += 1
            self.text.append(token)

    def log_prob(self, before: Sequence[int], token: int) -> float:
        """Return the score of a token after the last tokens `before` it."""
        for missing, size in enumerate(range(ORDER - 1, -1, -1)):
            known = tuple(before[len(before) - size :]) if size <= len(before) else None
            if known is not None and (count := self.counts.get((*known, token))):
                return missing * BACK_OFF + math.log(count / self.totals[known])
        return ORDER * BACK_OFF - math.log(self.vocab_size)


def kept_guesses(guesses: Sequence[Guess], mass: float, stop_ids: Collection[int]) -> list[Guess]:
    """Return the likeliest guesses, in order, that hold `mass` together, and any guess that ends the text."""
    kept, total = [], 0.0
    for token, score in guesses:
        if total < mass or token in stop_ids:
            kept.append((token, score))
        total += math.exp(score)
    return kept


def best_path(
    places: Sequence[Sequence[Guess]],
    model: TextModel,
    before: Sequence[int],
    beam: int,
    share: float,
    stop_ids: Collection[int],
) -> list[int]:
    """Return the best of `beam` paths kept from place to place, which may end early by a token of `stop_ids`.

    A token scores `share` times its log-probability and 1 - share times the text model's.
    """
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for guesses in places:
        longer = []
        for score, path in paths:
            if path and path[-1] in stop_ids:
                longer.append((score, path))
                continue
            context = [*before[len(before) - ORDER + 1 :], *path][-(ORDER - 1) :]
            longer += [
                (score + share * own + (1 - share) * model.log_prob(context, token), (*path, token))
                for token, own in guesses
            ]
        paths = sorted(longer, key=lambda one: one[0], reverse=True)[:beam]
    return list(paths[0][1])


@dataclass(slots=True)
class LengthController:
    """Chooses the draft length: the moving average of the drafted length, plus `step` while all of it is accepted."""

    least: int
    most: int
    step: int = 10
    smoothing: float = 0.5
    drafted: float | None = field(default=None, init=False)
    accepted: float = field(default=0.0, init=False)

    @property
    def length(self) -> int:
        if self.drafted is None:
            return self.least
        grown = self.drafted + self.step * (self.accepted >= self.drafted)
        return min(self.most, max(self.least, math.ceil(grown)))

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of a round: tokens drafted before an end, and tokens accepted."""
        if self.drafted is None:
            self.drafted, self.accepted = float(drafted), float(accepted)
            return
        self.drafted += self.smoothing * (drafted - self.drafted)
        self.accepted += self.smoothing * (accepted - self.accepted)
