"""Records the drafts of every position, or ranks: each finished answer is decoded once more, outside its timing.

Positions: the loop decodes the answer token by token; the drafter observes each token like any committed token, and
its draft there is recorded and never accepted. Where a draft depends on the committed text alone, a round at that
position would have made the same draft, whatever the rounds before it (`MethodSpec.is_recorded` is true for such
methods). Other lengths, cuts and controllers replay exactly from it. Costs are measured as well: the time to the first
tokens of a draft, and verification with passes over 1, 2, ... N + 1 tokens in turn. Each round has one pass of the
target, as in any run: a second pass would find the weights in the processor's caches.

Ranks: the loop decodes the answer in the same rounds again, and the scores from which each token was chosen give the
rank of the right token. If a draft is made in one pass, a place's scores do not depend on the tokens chosen before it;
token by token they are valid up to the first wrong token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_bench.core.types import Generation
from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import Clock, DecodingError, HostClock, Limits, Round, clock_for
from dflash_bench.engine.sampling import Sampling, likeliest
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft


@dataclass(frozen=True, slots=True)
class Recorded:
    """The drafts at the P positions of an answer of P + 1 tokens: position i follows token i, the anchor there."""

    ids: tuple[int, ...]
    """[P * N], N drafted tokens per position."""
    accepted: tuple[int, ...]
    """[P], how many leading drafted tokens are the target's own choices, beyond the answer's end too."""
    scores: tuple[float, ...] | None
    """[P * N], the draft's estimate that a token is accepted if all before it are: from its confidence head, or else
    the token's probability. None for drafts without probabilities."""
    draft_s: tuple[float, ...] | None
    """[N], seconds until 1, 2, ... N tokens of a draft existed, medians over positions; None unless made one by one."""
    verify_s: tuple[float, ...] | None
    """[N + 1], seconds of target passes over 1, 2, ... N + 1 tokens; None for fewer positions."""


Span = tuple[object, object]
"""Two marks of a clock."""


class PositionRecorder:
    """Wraps a drafter: records its drafts of a single row, and has none of them accepted."""

    def __init__(self, drafter: Any, clock: Clock) -> None:
        self.drafter, self.taps, self.clock = drafter, drafter.taps, clock
        self.num_drafts: int = drafter.num_drafts
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.drafts: list[list[Span]] = []
        """Spans of each draft: the whole draft, then this listener's own work at the choice of each token."""

    def begin(self, num_rows: int, capacity: int) -> None:
        self.drafter.begin(num_rows, capacity)

    def observe(self, committed: Committed) -> None:
        self.drafter.observe(committed)

    def propose(self) -> Draft | None:
        """Return as many tokens of the draft as the target shall read at this position, all of them padding."""
        self.heard: list[Tensor] = []
        self.listening: list[Span] = []
        begin = self.clock.mark()
        draft = self.drafter.propose().all_drafted
        self.drafts.append([(begin, self.clock.mark()), *self.listening])
        self.tokens.append(draft[0].clone())
        if self.heard:
            self.scores.append(torch.cat(self.heard, dim=1)[0])
        width = self.width_of(len(self.tokens) - 1)
        return Draft(draft[:, :width], lengths=[0]) if width else None

    def width_of(self, position: int) -> int:
        """Return how many drafted tokens the target reads at this position."""
        return position % (self.num_drafts + 1)

    def choosing(self, scores: Tensor, _ids: Tensor | None) -> None:
        begin = self.clock.mark()
        self.heard.append(torch.softmax(scores.float(), dim=-1).amax(dim=-1))
        self.listening.append((begin, self.clock.mark()))

    def trusting(self, confidence: Tensor) -> None:
        self.heard = [confidence]

    def draft_s(self) -> tuple[float, ...] | None:
        """Return the seconds until each token of a draft was chosen; None if it is not made token by token."""
        if any(len(spans) != self.num_drafts + 1 for spans in self.drafts):
            return None
        times = []
        for (begin, end), *listening in self.drafts:
            own = np.cumsum([0.0, *(self.clock.seconds(*span) for span in listening)])
            until = np.array([self.clock.seconds(begin, mark) for mark, _ in listening]) - own[:-1]
            times.append(until + self.clock.seconds(begin, end) - own[-1] - until[-1])
        return (*np.median(times, axis=0).tolist(),)

    def verify_s(self, steps: Sequence[Round]) -> tuple[float, ...] | None:
        """Return the seconds of verifying with a pass over each number of tokens; None if any was not measured."""
        times: list[list[float]] = [[] for _ in range(self.num_drafts + 1)]
        for position, step in enumerate(steps):
            times[self.width_of(position)].append(self.clock.seconds(step.marks[1], step.marks[2]))
        return tuple(map(median, times)) if all(times) else None


def record_positions(
    target: Target, drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> Recorded | None:
    """Draft at each position of a greedy answer; None if it has no position or if decoding does not reproduce it."""
    num, sampler = len(answer) - 1, getattr(drafter, "draft_sampler", None)
    clock = clock_for(target.device)
    recorder = PositionRecorder(drafter, clock)
    if num < 1:
        return None
    # Decoding continues beyond the answer's end, as far as the last drafts reach.
    limits = Limits(len(answer) + drafter.num_drafts)
    if sampler is not None:
        sampler.listener = recorder
    try:
        steps = list(decode(target, recorder, [prompt], limits, sampling, clock))
    except DecodingError:
        return None
    finally:
        if sampler is not None:
            sampler.listener = None
    text = [token for step in steps for token in step.emitted[0] or ()]
    if text[: len(answer)] != list(answer):
        return None
    drafts = torch.stack(recorder.tokens[:num]).tolist()
    accepted = [_num_right(draft, text[place + 1 :]) for place, draft in enumerate(drafts)]
    scores = torch.cat(recorder.scores[:num]).tolist() if recorder.scores else None
    return Recorded(
        tuple(token for draft in drafts for token in draft),
        tuple(accepted),
        None if scores is None else tuple(scores),
        recorder.draft_s(),
        recorder.verify_s(steps[1:]),
    )


def _num_right(draft: Sequence[int], following: Sequence[int]) -> int:
    pairs = zip(draft, following, strict=False)
    return next((place for place, (own, due) in enumerate(pairs) if own != due), min(len(draft), len(following)))


class CandidateListener:
    """Keeps the `num` likeliest target ids for each drafted token of a single row; -1 where there are fewer."""

    def __init__(self, sampler: Any, num: int) -> None:
        self.to_target, self.num = sampler.target_ids, num
        self.heard: list[Tensor] = []

    def choosing(self, scores: Tensor, ids: Tensor | None) -> None:
        scores = scores[0].float().nan_to_num(nan=-torch.inf)
        # Among equal scores the first token is chosen; `topk` may order them differently.
        scores = scores.scatter(-1, likeliest(scores)[:, None], torch.inf)
        best = scores.topk(min(self.num, scores.shape[-1])).indices
        found = self.to_target(best) if ids is None else ids[0].gather(-1, best)
        self.heard.append(torch.nn.functional.pad(found, (0, self.num - found.shape[-1]), value=-1))

    def trusting(self, confidence: Tensor) -> None:
        pass


def record_ranks(
    target: Target, drafter: Any, prompt: Sequence[int], answer: Generation, sampling: Sampling, num: int
) -> tuple[int, ...] | None:
    """Return the rank of the right token among the `num` likeliest tokens of the draft in each drafted place.

    [sum(drafted)]: 1 for the likeliest, 0 if not among them, -1 if unknown, as after a wrong token of a draft made
    token by token. None if decoding again drafts or accepts anything else, or if the context ends before the last
    draft does.
    """
    counts = answer.drafted or ()
    listener = CandidateListener(drafter.draft_sampler, num)
    # Decoding continues beyond the answer's end, as far as the last drafts reach.
    limits = Limits(len(answer.token_ids) + drafter.num_drafts)
    drafter.draft_sampler.listener = listener
    try:
        steps = list(decode(target, drafter, [prompt], limits, sampling, HostClock()))
    except DecodingError:
        return None
    finally:
        drafter.draft_sampler.listener = None
    text = [token for step in steps for token in step.emitted[0] or ()]
    rounds = steps[1 : len(counts) + 1]
    again = [(step.drafted[0], step.accepted[0]) for step in rounds]
    ids = [token for step in rounds for token in step.drafted_ids[0]]
    if again != list(zip(counts, answer.accepted or (), strict=True)) or (*ids,) != answer.drafted_ids:
        return None
    if text[: len(answer.token_ids)] != [*answer.token_ids]:
        return None
    due, place = [], 1
    for step in rounds:
        due += text[place : place + step.drafted[0]]
        place += len(step.emitted[0] or ())
    if len(due) < len(ids):
        return None
    # One call per round, unless drafts are made token by token, or a pass depends on tokens that another fixed.
    by_token = len(listener.heard) > len(steps) - 1 or getattr(drafter, "steps", 1) > 1
    candidates = torch.cat(listener.heard)[: len(ids)] if ids else torch.zeros(0, num)
    return tuple(_ranks(candidates, ids, due, counts, by_token))


def _ranks(
    candidates: Tensor, ids: Sequence[int], due: Sequence[int], counts: Sequence[int], by_token: bool
) -> Iterator[int]:
    """Yield the rank of each `due` token among its candidates [D, num]; `counts` are the drafted tokens per round."""
    found = candidates == torch.tensor(due, device=candidates.device)[:, None]
    ranks = torch.where(found.any(dim=1), found.int().argmax(dim=1) + 1, 0).tolist()
    at = 0
    for count in counts:
        is_known = True
        for place in range(at, at + count):
            yield ranks[place] if is_known else -1
            is_known = is_known and not (by_token and ids[place] != due[place])
        at += count
