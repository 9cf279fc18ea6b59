"""How often every piece of some texts occurs, up to a length: a suffix tree that grows token by token.

A node is a piece; its children are the pieces that are one token longer. A piece that occurs once has no node: in its
parent stands the place of its last token, and what follows it is read from the text. So the tree is about as large as
the texts, and a new token costs as many steps as there are suffixes that have occurred before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

END = -1
"""Stands behind each text; no piece goes over it."""


class Node:
    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0
        self.children: dict[int, Node | int] = {}


Place: TypeAlias = Node | int
"""A piece of the texts: its node, or the place of its last token where it occurs once."""


class SuffixTree:
    """Pieces of at most `depth` tokens. `suffixes[k]` is the last k tokens of the text that is being read, for every
    k for which these occurred before."""

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
        """The node of a piece that occurs for the second time; the first time it ended `at` this place."""
        node = Node()
        node.count = 1
        if length < self.depth and self.tokens[at + 1] != END:
            node.children[self.tokens[at + 1]] = at + 1
        return node

    def add(self, text: Sequence[int]) -> range:
        """A text of its own; returns its places, by which it can be taken out again."""
        first = len(self.tokens)
        for token in text:
            self.append(token)
        self.tokens.append(END)
        self.suffixes = [self.root]
        return range(first, first + len(text))

    def remove(self, places: range) -> None:
        """As if the text had never been added."""
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
        """The piece that is longer by this token, if it occurs."""
        if isinstance(place, Node):
            return place.children.get(token)
        following = place + 1
        return following if following < len(self.tokens) and self.tokens[following] == token else None

    def follow(self, suffixes: Sequence[Place], token: int) -> list[Place]:
        """`suffixes` of some other text, after its next token."""
        longer: list[Place] = [self.root]
        for place in suffixes[: self.depth]:
            following = self.after(place, token)
            if following is None:
                # What is longer ends with this piece, and does not occur either.
                break
            longer.append(following)
        return longer

    def likely(self, place: Place) -> Iterator[tuple[int, float]]:
        """The most frequent continuation: each token with its share of what follows there. Of equals, the latest."""
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
