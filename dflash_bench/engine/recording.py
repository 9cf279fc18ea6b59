"""A draft at every position of a finished answer, from which other lengths, cuts and controllers replay exactly.

The loop decodes the answer once more, plainly: the drafter observes each token as it would any committed ones and is
asked for a draft at each, which is kept and not verified. Where a draft depends on the committed text alone, that is
the draft that a round would have begun with there, whatever the rounds before it were
(`MethodSpec.is_recorded` says for which methods that holds). Nothing here is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import DecodingError, HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target


@dataclass(frozen=True, slots=True)
class Recorded:
    """The drafts at the P positions of an answer of P + 1 tokens: position i follows token i, the anchor there."""

    ids: tuple[int, ...]
    """[P * N], N drafted tokens at each."""
    accepted: tuple[int, ...]
    """[P], how many of them in a row are the target's own choices, beyond the answer's end too."""
    scores: tuple[float, ...] | None
    """[P * N], how likely the draft holds each to be accepted if all before it are: its confidence head's word, or else
    the probability of the drafted token. None for drafts without probabilities."""


class PositionRecorder:
    """A drafter for the loop that asks another one for drafts of a single row, and proposes nothing itself."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.num_drafts, self.taps = drafter, drafter.num_drafts, drafter.taps
        self.sampler = getattr(drafter, "draft_sampler", None)
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.drafter.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.drafter.observe(committed)

    def propose(self) -> None:
        heard = self.sampler.listen() if self.sampler is not None else []
        self.tokens.append(self.drafter.propose().all_drafted[0].clone())
        if heard:
            self.scores.append(torch.cat(heard, dim=1)[0])


def record_positions(
    target: Target, drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> Recorded | None:
    """Draft at each position of a greedy answer to a prompt; None if it has none, or if it is not decoded again."""
    num, recorder = len(answer) - 1, PositionRecorder(drafter)
    if num < 1:
        return None
    # It goes on behind the answer's end, where the last drafts reach.
    limits = Limits(len(answer) + drafter.num_drafts)
    try:
        steps = list(decode(target, recorder, [prompt], limits, sampling, HostClock()))
    except DecodingError:
        return None
    finally:
        if recorder.sampler is not None:
            recorder.sampler.heard = None
    text = [token for step in steps for token in step.emitted[0] or ()]
    if text[: len(answer)] != list(answer):
        return None
    drafts = torch.stack(recorder.tokens[:num]).tolist()
    accepted = [_num_right(draft, text[place + 1 :]) for place, draft in enumerate(drafts)]
    scores = torch.cat(recorder.scores[:num]).tolist() if recorder.scores else None
    return Recorded(
        tuple(token for draft in drafts for token in draft), tuple(accepted), None if scores is None else tuple(scores)
    )


def _num_right(draft: Sequence[int], following: Sequence[int]) -> int:
    pairs = zip(draft, following, strict=False)
    return next((place for place, (own, due) in enumerate(pairs) if own != due), min(len(draft), len(following)))
