"""The loop that decodes: draft, verify, accept; and how much of a draft it accepts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_bench.core.types import NOBODY, Listener
from dflash_bench.engine.drafter import Captures, Committed, Drafter, StandAlone
from dflash_bench.engine.rows import Clock, DecodingError, HostClock, Limits, Lists, Round, Row, to_host
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import (
    Draft,
    Verdict,
    take_unverified,
    verify_chain,
    verify_children,
    verify_sampled,
    verify_tree,
)

# The one decoding loop: draft, verify, commit. Plain decoding is the drafter that proposes nothing.
#
# Every method shares prefill, cache, stop rules and clock, so that a speed-up compares drafts and nothing else. Each
# round moves one small tensor to the host; everything else stays where the model is.


PART = 256
"""Tokens of prompts that are read between two rounds, so that those who decode do not wait long."""


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    clock: Clock,
    seeds: Sequence[int] | None = None,
    num_rows: int | None = None,
    listener: Listener = NOBODY,
) -> Iterator[Round]:
    """Decode prompts together, round by round, until each has ended.

    The listener is told of every token as soon as the host has it, before anything is made of the round.

    With `num_rows` so many at a time: the others wait, and each takes the place of one that has ended. `seeds` are the
    prompts' own, in place of the one of `sampling`: with it a row draws what it would draw alone.

    Raises DecodingError for an empty prompt, one that leaves no room in the context, and NaN or infinite logits.
    """
    if isinstance(drafter, StandAlone):
        # Its passes are no rounds: it reads several times in each.
        target = drafter.reader
    else:
        target.listener = listener
    seeds = seeds or [sampling.seed] * len(prompts)
    rows = [
        Row(prompt, _room(target, prompt, limits), request, seed)
        for request, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    num_rows = min(num_rows or len(rows), len(rows))
    # A block may reach past a row's limit; what lies there is cut off, but needs its place in the cache.
    capacity = max(len(row.prompt) + row.limit for row in rows) + drafter.num_drafts + 1
    target.tap(drafter.taps)
    try:
        target.begin(num_rows, capacity)
        drafter.begin(num_rows, capacity)
        shortest = min(len(row.prompt) for row in rows) + 1
        for reader in (target, drafter):
            if isinstance(reader, Captures):
                reader.capture(shortest, capacity)
        num_places = limits.max_new_tokens + drafter.num_drafts + 1
        sampler = Sampler(sampling, num_rows, num_places, target.device)
        yield from _State(target, drafter, rows, num_rows, limits, sampler, clock, listener).rounds()
    finally:
        target.listener = NOBODY
        # The model may be shared: taps must not slow down, or hold memory for, whoever uses it next.
        target.tap(())


def _room(target: Target, prompt: Sequence[int], limits: Limits) -> int:
    if not prompt:
        raise DecodingError("an empty prompt")
    room = min(limits.max_new_tokens, target.context_length - len(prompt))
    if room < 1:
        raise DecodingError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {target.context_length}")
    return room


class _State:
    """`rows` are those being decoded; a row that has ended stands still until another takes its place."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        rows: list[Row],
        num_rows: int,
        limits: Limits,
        sampler: Sampler,
        clock: Clock,
        listener: Listener,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.rows, self.waiting = rows[:num_rows], deque(rows[num_rows:])
        self.stop_ids, self.sampler, self.clock, self.listener = limits.stop_ids, sampler, clock, listener
        self.starts = [0] * num_rows
        self.anchor = torch.zeros(num_rows, dtype=torch.long, device=target.device)

    @property
    def ended(self) -> bool:
        return not self.waiting and all(row.finish for row in self.rows)

    def rounds(self) -> Iterator[Round]:
        self.clock.settle()
        begin = self._begin([row.request for row in self.rows])
        for row in self.rows:
            row.began = begin
        yield from self._read(0, self.rows)
        while not self.ended:
            yield from self._fill()
            if any(row.is_decoding for row in self.rows):
                yield self.round()

    def _begin(self, requests: Sequence[int]) -> object:
        for request in requests:
            self.listener.began(request)
        begin = self.clock.mark()
        self.listener.marked()
        return begin

    def _tell(self, emitted: Sequence[list[int] | None], rows: Sequence[Row]) -> None:
        for row, tokens in zip(rows, emitted, strict=True):
            if tokens is not None:
                self.listener.heard(row.request, tokens)

    def _fill(self) -> Iterator[Round]:
        """Rows that have ended give way to prompts that wait; of these PART tokens are read, or one part more."""
        num_read = 0
        for place in range(len(self.rows)):
            if self.rows[place].finish and self.waiting:
                self.rows[place], self.starts[place] = self.waiting.popleft(), 0
                self.rows[place].began = self._begin([self.rows[place].request])
            row = self.rows[place]
            if row.is_reading and num_read < PART:
                before = row.num_read
                yield from self._read(place, [row], PART if self.target.reads_in_parts else None)
                num_read += row.num_read - before

    def _read(self, first: int, rows: Sequence[Row], most: int | None = None) -> Iterator[Round]:
        """Prompts of the rows from number `first` on, or up to `most` tokens of the only one's; at the end, a round."""
        starts = [row.num_read for row in rows]
        parts = [row.prompt[row.num_read :][:most] for row in rows]
        for row, part in zip(rows, parts, strict=True):
            row.num_read += len(part)
        output = self.target.prefill(parts, starts, first)
        if rows[0].is_reading:
            following = [list(rows[0].prompt[starts[0] + 1 : rows[0].num_read + 1])]
            self._keep_prompt(first, rows, starts, output.hidden, following, None)
            return
        emitted = self._first_tokens(first, rows, output.logits)
        self._tell(emitted, rows)
        seen = self.clock.mark()
        self.listener.marked()
        if not self.ended:
            following = [[*part[1:], *tokens] for part, tokens in zip(parts, emitted, strict=True)]
            self._keep_prompt(first, rows, starts, output.hidden, following, self.anchor[first : first + len(rows)])
        none = [0] * len(self.rows)
        given: list[list[int] | None] = [None] * len(self.rows)
        given[first : first + len(rows)] = emitted
        marks = (rows[0].began, seen, seen, seen, self.clock.mark())
        yield Round(given, none, none, [[] for _ in none], None, marks, *self._whose())

    def _first_tokens(self, first: int, rows: Sequence[Row], logits: Tensor) -> list[list[int]]:
        """One for each of these rows, by logits [b, 1, V]."""
        self.sampler.begin([row.prompt for row in rows], [row.seed for row in rows], logits.shape[-1], first)
        tokens = self.sampler.first_tokens(logits, first)
        self.anchor[first : first + len(rows)] = tokens
        host = to_host({"tokens": tokens[:, None], "broken": _broken(logits)})
        _refuse_broken(rows, host["broken"], [0] * len(rows), first)
        return [row.emit(new, self.stop_ids) for row, new in zip(rows, host["tokens"], strict=True)]

    def _keep_prompt(
        self,
        first: int,
        rows: Sequence[Row],
        starts: list[int],
        hidden: Tensor | None,
        following: Sequence[list[int]],
        anchor: Tensor | None,
    ) -> None:
        counts = [len(tokens) for tokens in following]
        padded = [[*tokens, *[0] * (max(counts) - len(tokens))] for tokens in following]
        tokens = torch.tensor(padded, device=self.target.device)
        self.drafter.observe(
            Committed(
                hidden, tokens, anchor, starts, counts, [row.text for row in rows], self.sampler,
                first=first, is_prompt=True, requests=[row.request for row in rows],
            )
        )  # fmt: skip
        for place, row in enumerate(rows, start=first):
            self.starts[place] = row.num_read

    def _whose(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Which prompt each row is at, and whether its answer has ended."""
        return tuple(row.request for row in self.rows), tuple(row.finish is not None for row in self.rows)

    def round(self) -> Round:
        begin = self.clock.mark()
        draft = self.drafter.propose()
        drafted = self.clock.mark()
        block = self.anchor[:, None] if draft is None else torch.cat([self.anchor[:, None], draft.tokens], dim=1)
        tree = draft.parents if draft else None
        output = self.target.forward(block, self.starts, tree)
        verdict = self._verify(draft, self.sampler.penalise(output.logits, block, tree))
        tokens = following_tokens(block, verdict)
        self.sampler.commit(tokens, verdict.num_accepted)
        host = to_host(_parts(draft, verdict, tokens, output.logits))
        kept = [count for (count,) in host["accepted"]]
        alive = [row.is_decoding for row in self.rows]
        _refuse_broken(self.rows, host["broken"], kept)
        accepted = [count * live for count, live in zip(kept, alive, strict=True)]
        moved = any(live and last > count for (last,), count, live in zip(host["last"], kept, alive, strict=True))
        # What it costs a target to forget the rest belongs to verifying.
        self.target.commit([(count + 1) * live for count, live in zip(accepted, alive, strict=True)])
        verified = self.clock.mark()
        emitted = [
            row.emit(new[: count + 1], self.stop_ids) if live else None
            for row, count, new, live in zip(self.rows, kept, host["tokens"], alive, strict=True)
        ]
        self._tell(emitted, self.rows)
        self.anchor = verdict.next_token
        observing = self.clock.mark()
        if not self.ended:
            counts = [count + 1 if row.is_decoding else 0 for row, count in zip(self.rows, accepted, strict=True)]
            self._keep(verdict, output.hidden, tokens, counts, moved, host.get("choices", ()))
        lengths = (draft.lengths or [draft.width] * len(alive)) if draft else [0] * len(alive)
        end = self.clock.mark()
        self.listener.marked()
        drafts = [length * live for length, live in zip(lengths, alive, strict=True)]
        ids = _first(host.get("drafted", [[]] * len(drafts)), drafts)
        parents = _first(host["parents"], drafts) if "parents" in host else None
        marks = (begin, drafted, verified, observing, end)
        return Round(emitted, drafts, accepted, ids, parents, marks, *self._whose())

    def _verify(self, draft: Draft | None, logits: Tensor) -> Verdict:
        """By penalised logits."""
        if draft is not None and draft.following is not None:
            return take_unverified(draft.tokens, draft.following)
        sampler = self.sampler
        if draft is None:
            choices = sampler.choose(logits, sampler.places(1))
            return verify_chain(choices[:, :0], choices)
        padding, parents = draft.padding, draft.parents
        places = sampler.places(logits.shape[1], parents)
        # At temperature 0 p is one-hot, and rejection sampling is the match rule: the draft's q changes nothing.
        if draft.probs is not None and places is not None:
            p = sampler.probabilities(logits)
            accept, draw = sampler.numbers("accept", places), sampler.numbers("draw", places)
            if parents is not None:
                return verify_children(draft.tokens, parents, p, draft.probs, accept, draw, padding)
            return verify_sampled(draft.tokens, p, draft.probs, accept[:, :-1], draw, padding)
        choices = sampler.choose(logits, places)
        if parents is not None:
            return verify_tree(draft.tokens, parents, choices, padding)
        return verify_chain(draft.tokens, choices, padding)

    def _keep(
        self,
        verdict: Verdict,
        hidden: Tensor | None,
        tokens: Tensor,
        counts: list[int],
        moved: bool,
        choices: Sequence[list[int]],
    ) -> None:
        """Rows that have ended, or read their prompts, stand still: their count is 0.

        What is computed for them is thrown away, over the same places until another row takes these; they must not
        move past what the cache holds.
        """
        longest = max(*counts, 1)
        if verdict.path is not None and moved:
            path = verdict.path[:, :longest]
            self.target.cache.keep_path(self.starts, path)
            hidden = hidden if hidden is None else hidden.take_along_dim(path[..., None], dim=1)
        hidden = None if hidden is None else hidden[:, :longest]
        texts = [row.text for row in self.rows]
        self.sampler.emitted([len(row.tokens) for row in self.rows])
        self.drafter.observe(
            Committed(
                hidden, tokens[:, :longest], self.anchor, list(self.starts), counts, texts, self.sampler, choices,
                requests=[row.request for row in self.rows],
            )
        )  # fmt: skip
        self.starts = [start + count for start, count in zip(self.starts, counts, strict=True)]


def _refuse_broken(rows: Sequence[Row], broken: Lists, accepted: list[int], first: int = 0) -> None:
    """Broken logits at one of a row's first accepted + 1 places end the generation."""
    for place, (row, flags, count) in enumerate(zip(rows, broken, accepted, strict=True), start=first):
        if (row.is_decoding or not row.tokens) and not row.is_reading and any(flags[: count + 1]):
            raise DecodingError(f"NaN or infinite logits after {len(row.tokens)} tokens (row {place})")


def _parts(draft: Draft | None, verdict: Verdict, tokens: Tensor, logits: Tensor) -> dict[str, Tensor]:
    """What the host wants to know of a round, each [B, n]."""
    parts = {
        "accepted": verdict.num_accepted[:, None],
        "last": verdict.last[:, None],
        "tokens": tokens,
        "broken": _broken(logits, verdict.path),
    }
    if draft is not None:
        parts["drafted"] = draft.tokens
        if draft.parents is not None:
            parts["parents"] = draft.parents
        if draft.wants_choices and verdict.choices is not None:
            parts["choices"] = verdict.choices
    return parts


def _first(rows: Lists, counts: list[int]) -> Lists:
    """Of each row so many values: without what pads them."""
    return [values[:count] for values, count in zip(rows, counts, strict=True)]


def following_tokens(block: Tensor, verdict: Verdict) -> Tensor:
    """[B, N + 1]: along the kept path the token after each place, the next token in place of the last."""
    path, last = verdict.path, verdict.next_token[:, None]
    tokens = torch.cat([block[:, 1:] if path is None else block.gather(1, path[:, 1:]), last], dim=1)
    return tokens.scatter(1, verdict.num_accepted[:, None], last)


def _broken(logits: Tensor, path: Tensor | None = None) -> Tensor:
    """[B, N]: where, along the path, is the best logit NaN or infinite? A maximum carries NaN along."""
    best = logits.amax(dim=-1)
    # Of finite numbers alone is the difference to themselves 0.
    broken = (best - best).ne(0)
    return broken if path is None else broken.gather(1, path)


# What a target accepts of a drafter: prompts decoded together at temperature 0, for that number alone.


@dataclass(frozen=True, slots=True)
class Accepted:
    """One answer: its tokens, and how many drafted ones each round accepted."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]


@torch.inference_mode()
def accepted(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], limits: Limits) -> list[Accepted]:
    """One for each prompt."""
    prefill, *rounds = decode(target, drafter, prompts, limits, Sampling(), HostClock())
    return [
        Accepted(
            tuple(token for step in (prefill, *rounds) for token in step.emitted[row] or ()),
            tuple(step.accepted[row] for step in rounds if step.emitted[row] is not None),
        )
        for row in range(len(prompts))
    ]


def al_pooled(answers: Sequence[Accepted]) -> float:
    """sum(a_i + 1) / sum(S), over all rounds of all answers; 1 where there was no round."""
    counts = [count for answer in answers for count in answer.counts]
    return 1.0 + sum(counts) / len(counts) if counts else 1.0


def by_position(answers: Sequence[Accepted]) -> list[float]:
    """The share of rounds that accepted at least 1, 2, ... drafted tokens, as far as any did."""
    counts = [count for answer in answers for count in answer.counts]
    return [sum(count > place for count in counts) / len(counts) for place in range(max(counts, default=0))]
