"""Drafts that are cut short, and that begin with what the target is about to draw: so that every place is reached.

By itself a block is seldom accepted to its end where the model hesitates, and a mistake at its far end, or in the bonus
token behind it, is never seen. Any draft leaves the target's distribution as it is, as long as what it depends on is
known before the token is drawn that is tested: a cut is decided by numbers of its own, and a token that was forced by
knowing the target's number is never tested for its place in the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from torch import Tensor

from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.verify import Draft

WHOLE = 0.5
"""Share of rounds whose drafts are not cut, while they are forced."""
NARROW, SELDOM = 3, 0.1
"""Where nothing is forced, drafts are seldom kept far: they are cut to at most so many tokens, all but this share."""
FREE = 0.25
"""Share of rows that a round forces nothing of."""
DOUBTFUL = 0.05
"""A rule has something to decide where what the draft favours is drawn at least so often, and not drawn so often."""
FAVOURITES = 16
"""Of what a draft draws from, so many of the likeliest tokens are noted."""

Favourites = dict[int, float]
"""Tokens that a draft favours, with their probability by it; 1 where they were chosen."""


@dataclass(frozen=True, slots=True)
class Guide:
    """Answers [B] that plain decoding draws with the rows' own seeds, and what each token of them was drawn from.

    `log_p` [B, L, V]. Drafts that bring probabilities are forced in the first round alone: what replaces a token that
    they refuse is no longer the guide's.
    """

    answers: Sequence[Sequence[int]]
    log_p: Tensor
    seed: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """What became of one round's drafts: how deep each row's was forced, and the favourites of each place [B][N].

    No favourites where the draft says no probabilities: they are the drafted tokens then.
    """

    forced: Sequence[int]
    favourites: Sequence[Sequence[Favourites]] | None
    is_drawn_tree: bool = False
    """Siblings were drawn: which tokens they are is chance, and not known beforehand."""


@contextmanager
def forced(drafter: Drafter, guide: Guide) -> Iterator[list[Proposal]]:
    """While it lasts, the drafter proposes changed drafts; one Proposal for each round."""
    changing = _Changing(drafter, guide)
    # On the instance: the loop asks what else a drafter can do, and a wrapper would hide it.
    own = vars(drafter)
    own |= {"propose": changing.propose, "observe": changing.observe}
    try:
        yield changing.proposals
    finally:
        del own["propose"], own["observe"]


@dataclass(slots=True)
class _Changing:
    drafter: Drafter
    guide: Guide
    proposals: list[Proposal] = field(default_factory=list)
    random: Random = field(init=False)
    own: tuple[Any, Any] = field(init=False)
    texts: Sequence[Sequence[int]] = ()
    prompt_lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.random = Random(self.guide.seed)
        self.own = (self.drafter.propose, self.drafter.observe)

    def observe(self, committed: Committed) -> None:
        if committed.is_prompt:
            # The loop's own lists, which grow; behind each prompt stands one token so far.
            self.texts = committed.texts
            self.prompt_lengths = [len(text) - 1 for text in self.texts]
        self.own[1](committed)

    def propose(self) -> Draft | None:
        draft: Draft | None = self.own[0]()
        depths = [0] * len(self.texts)
        if draft is not None and draft.wants_choices:
            # Guesses that the target drew with its numbers for these places: none of them is a test of a draft.
            depths = [draft.width + 1] * len(self.texts)
        elif draft is not None and draft.following is None:
            forces = draft.probs is None or (draft.parents is None and not self.proposals)
            draft = self._cut(draft, forces)
            if forces:
                draft, depths = self._forced(draft)
        is_drawn_tree = draft is not None and draft.probs is not None and draft.parents is not None
        self.proposals.append(Proposal(depths, None if is_drawn_tree else _favourites(draft), is_drawn_tree))
        return draft

    def _cut(self, draft: Draft, forces: bool) -> Draft:
        whole, most = (WHOLE, draft.width - 1) if forces else (SELDOM, min(NARROW, draft.width - 1))
        if most < 1 or self.random.random() < whole:
            return draft
        width = self.random.randint(1, most)
        return replace(
            draft, tokens=draft.tokens[:, :width],
            # Parents come before their children.
            parents=None if draft.parents is None else draft.parents[:, :width],
            probs=None if draft.probs is None else draft.probs[:, :width],
            lengths=None if draft.lengths is None else [min(length, width) for length in draft.lengths],
        )  # fmt: skip

    def _forced(self, draft: Draft) -> tuple[Draft, list[int]]:
        """The same draft, of which rows have a way from the anchor down that the target is going to follow."""
        tokens, depths = draft.tokens.tolist(), []
        favoured = draft.tokens if draft.probs is None else draft.probs.argmax(dim=-1)
        parents = None if draft.parents is None else draft.parents.tolist()
        probs = None if draft.probs is None else draft.probs.clone()
        for row, favourites in enumerate(favoured.tolist()):
            below = range(-1, draft.width - 1) if parents is None else parents[row]
            length = draft.width if draft.lengths is None else draft.lengths[row]
            start, coming = self._coming(row)
            way = self._way(below, length)[: len(coming)]
            depth = self._depth(row, start, way, below[:length], favourites)
            for node, token in zip(way[:depth], coming, strict=False):
                tokens[row][node] = token
            depths.append(depth)
            if probs is not None:
                probs[row, :depth] = self.guide.log_p[row, start : start + depth].exp()
        return replace(draft, tokens=draft.tokens.new_tensor(tokens), probs=probs), depths

    def _way(self, parents: Sequence[int], length: int) -> list[int]:
        """The nodes from the anchor down to one of a row's; none of some rows."""
        if length == 0 or self.random.random() < FREE:
            return []
        way = [self.random.randrange(length)]
        while parents[way[-1]] >= 0:
            way.append(parents[way[-1]])
        return way[::-1]

    def _depth(
        self, row: int, start: int, way: Sequence[int], parents: Sequence[int], favourites: Sequence[int]
    ) -> int:
        """How many nodes of the way to force: to where the rule next has something to decide, or all of them.

        What the guide says beyond that place must have no say in it.
        """
        if not way:
            return 0
        for depth in range(self.random.randrange(len(way) + 1), len(way)):
            node = way[depth - 1] if depth else -1
            children = sorted({favourites[child] for child, parent in enumerate(parents) if parent == node})
            share = float(self.guide.log_p[row, start + depth, children].exp().sum())
            if DOUBTFUL <= share <= 1 - DOUBTFUL:
                return depth
        return len(way)

    def _coming(self, row: int) -> tuple[int, Sequence[int]]:
        """How many tokens the row has, and what the target is going to draw, where it has kept to its guide."""
        answer = self.texts[row][self.prompt_lengths[row] :]
        guide = self.guide.answers[row]
        return len(answer), guide[len(answer) :] if list(guide[: len(answer)]) == list(answer) else ()


def _favourites(draft: Draft | None) -> list[list[Favourites]] | None:
    if draft is None or draft.probs is None:
        return None
    top = draft.probs.topk(min(FAVOURITES, draft.probs.shape[-1]), dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return [
        [dict(zip(*place, strict=True)) for place in zip(ids_of_row, values_of_row, strict=True)]
        for ids_of_row, values_of_row in zip(ids, values, strict=True)
    ]
