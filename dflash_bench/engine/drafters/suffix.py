"""Suffix decoding (arXiv 2411.04975): drafts from suffix trees over a row's own text and the run's earlier answers.

For every suffix of the text that occurred before, in either tree, the most frequent continuation is followed as long as
its estimated probability, the product of its tokens' frequencies, is at least `threshold`, and for at most `factor`
tokens for each token that matched (the paper's alpha). The one with the highest expected number of accepted tokens is
drafted, as a chain; the paper's tree of several continuations is left out.

With earlier answers the acceptance depends on which prompts came before, and in which order; the tokens at temperature
0 do not. A prompt's answers are never in the tree while it is decoded again (warm-up, repeats, other settings), nor are
answers to a prompt that it begins with or that begins with it. Of each prompt the last answer is kept. A run starts
with no earlier answers, and so does the rest of a run that is resumed. Reading them is on the clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dflash_bench.engine.drafters.hosted import HostDrafter, Text
from dflash_bench.engine.drafters.suffix_tree import Place, SuffixTree
from dflash_bench.engine.target import Target
from dflash_bench.methods import Method
from dflash_bench.models.loading import Models


class Earlier:
    """Answers by prompt, in one tree, but for those that would tell a row its own answer."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.answers: dict[tuple[int, ...], Text] = {}
        self._places: dict[tuple[int, ...], range] = {}

    def keep(self, prompt: Text, answer: Text) -> None:
        self._take_out(tuple(prompt))
        self.answers[tuple(prompt)] = answer

    def prepare(self, prompts: Iterable[Text]) -> None:
        """The tree holds every answer that these prompts may draw on together, and no other."""
        prompts = list(prompts)
        hidden = {known for known in self.answers for prompt in prompts if _alike(known, tuple(prompt))}
        for known in hidden:
            self._take_out(known)
        for known, answer in self.answers.items():
            if known not in hidden and known not in self._places:
                self._places[known] = self.tree.add(answer)

    def _take_out(self, prompt: tuple[int, ...]) -> None:
        if (places := self._places.pop(prompt, None)) is not None:
            self.tree.remove(places)


def _alike(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Does one begin with the other? A chat's next turn does, and in some templates the same question with thinking."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]


class _Row:
    """A text being decoded: the tree of itself, and where its suffixes lie in that of earlier answers."""

    def __init__(self, depth: int, earlier: SuffixTree | None) -> None:
        self.tree = SuffixTree(depth)
        self.earlier = earlier
        self.match_again()

    def match_again(self) -> None:
        """The tree of earlier answers is another."""
        self.matches: list[Place] = [self.earlier.root] if self.earlier else []
        if self.earlier:
            for token in self.tree.tokens:
                self.matches = self.earlier.follow(self.matches, token)

    def read(self, text: Text) -> None:
        for token in text[len(self.tree.tokens) :]:
            self.tree.append(token)
            if self.earlier:
                self.matches = self.earlier.follow(self.matches, token)

    def candidates(self) -> Iterable[tuple[SuffixTree, int, Place]]:
        """Every suffix that occurred before, with its length, the longest of each tree first."""
        for tree, suffixes in ((self.tree, self.tree.suffixes), (self.earlier, self.matches)):
            if tree is not None:
                for length in range(len(suffixes) - 1, 0, -1):
                    yield tree, length, suffixes[length]


class SuffixDrafter(HostDrafter):
    """`earlier` says whether answers of this run to other prompts are drawn on."""

    def __init__(
        self, num_drafts: int, threshold: float, depth: int, factor: float, earlier: bool, device: torch.device
    ) -> None:
        super().__init__(num_drafts, device)
        self.threshold, self.depth, self.factor = threshold, depth, factor
        self.earlier = Earlier(depth) if earlier else None
        self._decoded: dict[int, tuple[Text, Text]] = {}
        self.rows: dict[int, _Row] = {}

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        for row in list(self._decoded):
            self._keep(row)
        self.rows.clear()

    def start(self, row: int, prompt: Text) -> None:
        if self.earlier:
            self._keep(row)
            self._decoded[row] = (prompt, self.texts[row])
            self.earlier.prepare(known for known, _ in self._decoded.values())
            for other in self.rows.values():
                other.match_again()
        self.rows[row] = _Row(self.depth, self.earlier.tree if self.earlier else None)

    def _keep(self, row: int) -> None:
        """The list of the row's last answer, which the loop went on writing to, holds all of it by now."""
        if self.earlier and row in self._decoded:
            prompt, text = self._decoded.pop(row)
            self.earlier.keep(prompt, text[len(prompt) :])

    def read(self, row: int, text: Text) -> None:
        self.rows[row].read(text)

    def continuation(self, row: int) -> Text:
        best: list[int] = []
        best_score = 0.0
        for tree, length, place in self.rows[row].candidates():
            tokens, score = self._speculate(tree, length, place)
            if score > best_score:
                best, best_score = tokens, score
            if best_score >= self.num_drafts:
                break
        return best

    def _speculate(self, tree: SuffixTree, length: int, place: Place) -> tuple[list[int], float]:
        """Tokens, and how many of them one may expect to be accepted."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        limit = min(self.num_drafts, int(self.factor * length), self.depth - length)
        for token, share in tree.likely(place):
            probability *= share
            if len(tokens) >= limit or probability < self.threshold:
                break
            tokens.append(token)
            score += probability
        return tokens, score


def build(models: Models, target: Target, method: Method) -> SuffixDrafter:
    return SuffixDrafter(
        method.number("n"), method.real("threshold"), method.number("depth"), method.real("factor"),
        method.option("earlier") == "yes", target.device,
    )  # fmt: skip
