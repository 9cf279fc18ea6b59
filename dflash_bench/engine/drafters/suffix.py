"""Suffix decoding: drafts from suffix trees over a row's own text and the run's earlier answers (arXiv 2411.04975)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from dflash_bench.core.methods import Method
from dflash_bench.engine.drafters.base import HostDrafter, Text
from dflash_bench.engine.target import Target
from dflash_bench.models.loading import Models

# The suffix tree: counts every piece of some texts, up to a length, and grows token by token.
#
# A node is a piece; its children are the pieces that are one token longer. A piece that occurs once has no node: its
# parent holds the place of its last token, and its continuation is read from the text. So the tree is about as large as
# the texts, and a new token costs as many steps as there are suffixes that have occurred before.


END = -1
"""Follows each text; no piece extends across it."""


class Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node | int] = {}


Place: TypeAlias = Node | int
"""A piece of the texts: its node, or the place of its last token where it occurs once."""


class SuffixTree:
    """Pieces of at most `depth` tokens.

    `suffixes[k]` is the last k tokens of the text being read, for every k for which they occurred before.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tokens: list[int] = []
        self.root = Node()
        self.suffixes: list[Place] = [self.root]

    def append(self, token: int) -> None:
        at = len(self.tokens)
        self.tokens.append(token)
        suffixes: list[Place] = [self.root]
        for length, node in enumerate(self.suffixes[: self.depth], start=1):
            assert isinstance(node, Node)
            child = node.children.get(token)
            if child is None:
                node.children[token] = at
                continue
            if isinstance(child, int):
                child = node.children[token] = self._grown(child, length)
            child.count += 1
            suffixes.append(child)
        self.suffixes = suffixes

    def _grown(self, at: int, length: int) -> Node:
        """Return a node for a piece that occurs for the second time; its first occurrence ended at place `at`."""
        node = Node()
        node.count = 1
        if length < self.depth and self.tokens[at + 1] != END:
            node.children[self.tokens[at + 1]] = at + 1
        return node

    def add(self, text: Sequence[int]) -> range:
        """Add a separate text; return its places, for `remove`."""
        first = len(self.tokens)
        for token in text:
            self.append(token)
        self.tokens.append(END)
        self.suffixes = [self.root]
        return range(first, first + len(text))

    def remove(self, places: range) -> None:
        """Remove the text at these places, as if it had never been added."""
        for first in places:
            node = self.root
            for at in range(first, min(first + self.depth, places.stop)):
                token = self.tokens[at]
                child = node.children[token]
                if isinstance(child, int) or child.count == 1:
                    del node.children[token]
                    break
                child.count -= 1
                node = child

    def after(self, place: Place, token: int) -> Place | None:
        """Return the piece extended by this token, or None if it does not occur."""
        if isinstance(place, Node):
            return place.children.get(token)
        following = place + 1
        return following if following < len(self.tokens) and self.tokens[following] == token else None

    def follow(self, suffixes: Sequence[Place], token: int) -> list[Place]:
        """Return the `suffixes` of another text after its next token."""
        longer: list[Place] = [self.root]
        for place in suffixes[: self.depth]:
            following = self.after(place, token)
            if following is None:
                # Longer suffixes end with this piece, and do not occur either.
                break
            longer.append(following)
        return longer

    def likely(self, place: Place) -> Iterator[tuple[int, float]]:
        """Yield the most frequent continuation, token by token, with each token's share of the continuations there.

        Among equally frequent tokens the latest wins.
        """
        while True:
            if isinstance(place, int):
                place += 1
                if place >= len(self.tokens) or self.tokens[place] == END:
                    return
                yield self.tokens[place], 1.0
                continue
            total, most, token = 0, 0, END
            for following, child in place.children.items():
                count = 1 if isinstance(child, int) else child.count
                total += count
                if count >= most:
                    most, token = count, following
            if not total:
                return
            yield token, most / total
            place = place.children[token]


# The drafter. For every suffix of the text that occurred before, in either tree, the most frequent continuation is
# followed as long as its estimated probability, the product of its tokens' frequencies, is at least `threshold`, and
# for at most `factor` tokens per matched token (the paper's alpha). The continuation with the highest expected number
# of accepted tokens is drafted, as a chain; the paper's tree of several continuations is left out.
#
# With earlier answers the acceptance depends on which prompts came before, and in which order; the tokens at
# temperature 0 do not. A prompt's own answers are never in the tree while it is decoded again (warm-up, repeats, other
# settings), nor are answers to a prompt that is a prefix of it or that it is a prefix of. The last answer to each
# prompt is kept. A run starts without earlier answers, and so does the rest of a resumed run. Reading them is timed.


class Earlier:
    """Answers by prompt, in one tree, without those that would reveal a row's own answer."""

    def __init__(self, depth: int) -> None:
        self.tree = SuffixTree(depth)
        self.answers: dict[tuple[int, ...], Text] = {}
        self._places: dict[tuple[int, ...], range] = {}

    def keep(self, prompt: Text, answer: Text) -> None:
        self._take_out(tuple(prompt))
        self.answers[tuple(prompt)] = answer

    def prepare(self, prompts: Iterable[Text]) -> None:
        """Update the tree to hold exactly the answers that all of these prompts may draw on."""
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
    """Return True if one is a prefix of the other, as with a chat's next turn or the same question with thinking."""
    length = min(len(first), len(second))
    return first[:length] == second[:length]


class _Row:
    """A text being decoded: its own tree, and where its suffixes are in the tree of earlier answers."""

    def __init__(self, depth: int, earlier: SuffixTree | None) -> None:
        self.tree = SuffixTree(depth)
        self.earlier = earlier
        self.match_again()

    def match_again(self) -> None:
        """Find the suffixes in a tree of earlier answers that has changed."""
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
        """Yield every suffix that occurred before as (tree, length, piece), per tree in order of decreasing length."""
        for tree, suffixes in ((self.tree, self.tree.suffixes), (self.earlier, self.matches)):
            if tree is not None:
                for length in range(len(suffixes) - 1, 0, -1):
                    yield tree, length, suffixes[length]


class SuffixDrafter(HostDrafter):
    """Drafts from a row's own text and, if `earlier`, from this run's answers to other prompts."""

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
        """Keep the row's last answer: the loop has appended all of it to the list by now."""
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
        """Return a continuation and its expected number of accepted tokens."""
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
        method.number("n"),
        method.real("threshold"),
        method.number("depth"),
        method.real("factor"),
        method.option("earlier") == "yes",
        target.device,
    )
