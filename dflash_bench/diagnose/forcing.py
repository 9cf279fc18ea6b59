"""Cut drafts short, or make them begin with the tokens that the target will draw, so that every place is reached.

Where the model hesitates, a block is seldom accepted to its end, so an error at its far end, or in the bonus token,
stays hidden. Any draft leaves the target's distribution unchanged as long as it depends only on what is known before
the tested token is drawn: cuts use separate random numbers, and a token forced by knowledge of the target's random
number is never tested for its place in the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.verify import Draft

WHOLE = 0.5
"""The share of rounds with forced drafts that are not cut."""
NARROW, SELDOM = 3, 0.1
"""Unforced drafts are seldom accepted far: they are cut to at most NARROW tokens, except for the share SELDOM."""
FREE = 0.25
"""The share of rows in which a round forces nothing."""
DOUBTFUL = 0.05
"""A rule is undecided where the draft's favourites have between this probability and 1 minus it."""
FAVOURITES = 16
"""The number of likeliest tokens to keep of a draft's distribution."""

Favourites = dict[int, float]
"""A draft's likeliest tokens with the draft's probability; 1 for chosen tokens."""


@dataclass(frozen=True, slots=True)
class Guide:
    """Answers [B] drawn by plain decoding with the rows' seeds, and the distribution of each token, [B, L, V].

    Drafts with probabilities are forced only in the first round: after a rejection the answer leaves the guide.
    """

    answers: Sequence[Sequence[int]]
    log_p: Tensor
    seed: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """The drafts of a round: the forced depth of each row, and the favourites at each place [B][N].

    Without favourites the draft has no probabilities, and the drafted tokens are the favourites.
    """

    forced: Sequence[int]
    favourites: Sequence[Sequence[Favourites]] | None
    is_drawn_tree: bool = False
    """Whether siblings were drawn at random, so that their tokens are not known beforehand."""
    probs: Tensor | None = None
    """[B, N, V], the distributions that a chain was drawn from, during its round."""
    refused: Tensor | None = None
    """[B, V], after the round: the distribution that each row's first rejected token was drawn from."""

    def settled(self, accepted: Sequence[int]) -> Proposal:
        """Return the proposal after a round that `accepted` [B] tokens; it keeps a single distribution per row."""
        if self.probs is None:
            return self
        at = self.probs.new_tensor(accepted, dtype=torch.long).clamp(max=self.probs.shape[1] - 1)
        return replace(self, probs=None, refused=self.probs[torch.arange(len(at), device=at.device), at])


@contextmanager
def forced(drafter: Drafter, guide: Guide) -> Iterator[list[Proposal]]:
    """Make the drafter propose changed drafts; yields a list that grows by one Proposal per round."""
    changing = _ForcedDrafter(drafter, guide)
    # Patch the instance: a wrapper would hide the drafter's other abilities from the loop.
    own = vars(drafter)
    own |= {"propose": changing.propose, "observe": changing.observe}
    try:
        yield changing.proposals
    finally:
        del own["propose"], own["observe"]


@dataclass(slots=True)
class _ForcedDrafter:
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
            # The loop's lists, which grow; prompts are followed by a single token so far.
            self.texts = committed.texts
            self.prompt_lengths = [len(text) - 1 for text in self.texts]
        self.own[1](committed)

    def propose(self) -> Draft | None:
        draft: Draft | None = self.own[0]()
        depths = [0] * len(self.texts)
        if draft is not None and draft.wants_choices:
            # These guesses use the target's random numbers for their places, so none of them tests a draft.
            depths = [draft.width + 1] * len(self.texts)
        elif draft is not None and draft.following is None:
            # Only the verified part of a cut draft matters here.
            lengths = draft.lengths.tolist() if isinstance(draft.lengths, Tensor) else draft.lengths
            draft = replace(draft, drafted=None, lengths=lengths)
            forces = draft.probs is None or (draft.parents is None and not self.proposals)
            draft = self._cut(draft, forces)
            if forces:
                draft, depths = self._forced(draft)
        is_drawn_tree = draft is not None and draft.probs is not None and draft.parents is not None
        probs = None if draft is None or draft.parents is not None else draft.probs
        self.proposals.append(Proposal(depths, None if is_drawn_tree else _favourites(draft), is_drawn_tree, probs))
        return draft

    def _cut(self, draft: Draft, forces: bool) -> Draft:
        whole, most = (WHOLE, draft.width - 1) if forces else (SELDOM, min(NARROW, draft.width - 1))
        if most < 1 or self.random.random() < whole:
            return draft
        width = self.random.randint(1, most)
        return replace(
            draft,
            tokens=draft.tokens[:, :width],
            # Parents come before their children.
            parents=None if draft.parents is None else draft.parents[:, :width],
            probs=None if draft.probs is None else draft.probs[:, :width],
            lengths=None if draft.lengths is None else [min(length, width) for length in draft.lengths],
        )

    def _forced(self, draft: Draft) -> tuple[Draft, list[int]]:
        """Replace tokens along a path from the anchor by those that the target will draw, in some rows."""
        tokens, depths = draft.tokens.tolist(), []
        favoured = draft.tokens if draft.probs is None else draft.probs.argmax(dim=-1)
        parents = None if draft.parents is None else draft.parents.tolist()
        probs = None if draft.probs is None else draft.probs.clone()
        for row, favourites in enumerate(favoured.tolist()):
            below = range(-1, draft.width - 1) if parents is None else parents[row]
            length = draft.num_verified()[row]
            start, upcoming = self._upcoming(row)
            path = self._path(below, length)[: len(upcoming)]
            depth = self._depth(row, start, path, below[:length], favourites)
            for node, token in zip(path[:depth], upcoming, strict=False):
                tokens[row][node] = token
            depths.append(depth)
            if probs is not None:
                probs[row, :depth] = self.guide.log_p[row, start : start + depth].exp()
        return replace(draft, tokens=draft.tokens.new_tensor(tokens), probs=probs), depths

    def _path(self, parents: Sequence[int], length: int) -> list[int]:
        """Return the nodes from the anchor down to a random node of a row; empty for some rows."""
        if length == 0 or self.random.random() < FREE:
            return []
        path = [self.random.randrange(length)]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        return path[::-1]

    def _depth(
        self, row: int, start: int, path: Sequence[int], parents: Sequence[int], favourites: Sequence[int]
    ) -> int:
        """Return the number of nodes of the path to force: up to the next place where the rule is undecided, or all.

        The guide beyond that place must not influence the result.
        """
        if not path:
            return 0
        for depth in range(self.random.randrange(len(path) + 1), len(path)):
            node = path[depth - 1] if depth else -1
            children = sorted({favourites[child] for child, parent in enumerate(parents) if parent == node})
            share = float(self.guide.log_p[row, start + depth, children].exp().sum())
            if DOUBTFUL <= share <= 1 - DOUBTFUL:
                return depth
        return len(path)

    def _upcoming(self, row: int) -> tuple[int, Sequence[int]]:
        """Return the row's number of tokens, and the tokens the target will draw, if it has followed its guide."""
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
