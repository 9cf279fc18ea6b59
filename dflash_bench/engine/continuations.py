"""Prompts continued by the loop, and what was known of each token before it was drawn: its place, and its draft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dflash_bench.engine.clock import HostClock
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.forcing import Favourites, Guide, Proposal, forced
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import Limits, Round
from dflash_bench.engine.target import Target


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a token stood in the draft of its round; all but `is_kept` is known before the target draws it."""

    depth: int = 0
    """Tokens of the draft down to this one, itself included; 0 where nothing was drafted."""
    is_bonus: bool = False
    """The draft ended before it."""
    is_forced: bool = False
    """The draft knew the token."""
    favourites: Mapping[int, float] | None = None
    """Tokens that the draft favours here, as `forcing.Favourites`; None where it says nothing that could be tested."""
    is_kept: bool = False
    """Was the drafted token kept?"""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One answer of the loop, each token with its spot."""

    tokens: tuple[int, ...]
    spots: tuple[Spot, ...]


def drawn(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    length: int,
    sampling: Sampling,
    seeds: Sequence[int],
    guide: Guide | None = None,
) -> list[Continuation]:
    """One continuation of `length` tokens for each prompt and its seed, decoded together; nothing ends one early.

    With a guide drafts are changed (`forcing.py`).
    """
    limits, clock = Limits(length), HostClock()
    if guide is None:
        rounds = list(decode(target, drafter, prompts, limits, sampling, clock, seeds))
        proposals = [Proposal([0] * len(seeds), None)] * (len(rounds) - 1)
    else:
        with forced(drafter, guide) as proposals:
            rounds = list(decode(target, drafter, prompts, limits, sampling, clock, seeds))
    return [_continuation(rounds, proposals, row) for row in range(len(seeds))]


def _continuation(rounds: Sequence[Round], proposals: Sequence[Proposal], row: int) -> Continuation:
    tokens, spots = list(rounds[0].emitted[row] or ()), [Spot()]
    for step, proposal in zip(rounds[1:], proposals, strict=True):
        new = step.emitted[row]
        if new is not None:
            tokens += new
            spots += _spots(new, step, proposal, row)
    return Continuation(tuple(tokens), tuple(spots))


def _spots(new: Sequence[int], step: Round, proposal: Proposal, row: int) -> Iterator[Spot]:
    drafted = step.drafted_ids[row]
    if not drafted:
        yield from (Spot() for _ in new)
        return
    parents = range(-1, len(drafted) - 1) if step.drafted_parents is None else step.drafted_parents[row]
    # Two siblings may be the same token: the nodes that stand for what has been said so far.
    here = {-1}
    for depth, token in enumerate(new, start=1):
        below = [node for node, parent in enumerate(parents) if parent in here]
        yield Spot(
            depth, is_bonus=not below and depth > proposal.forced[row], is_forced=depth <= proposal.forced[row],
            favourites=_favourites([drafted[node] for node in below], proposal, row, depth),
            is_kept=depth <= step.accepted[row],
        )  # fmt: skip
        here = {node for node in below if drafted[node] == token}


def _favourites(children: Sequence[int], proposal: Proposal, row: int, depth: int) -> Favourites | None:
    if not children or proposal.is_drawn_tree or depth <= proposal.forced[row]:
        return None
    if proposal.favourites is None:
        return dict.fromkeys(children, 1.0)
    return proposal.favourites[row][depth - 1]
