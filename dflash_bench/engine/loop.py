"""The one decoding loop: draft, verify, commit. Plain decoding is the drafter that proposes nothing.

Every method shares prefill, cache, stop rules and clock, so that a speed-up compares drafts and nothing else. In terms
of the DFlash paper (section 3): a round takes T_draft + T_verify and emits tau tokens, the accepted drafts and one
token of the target's own. Each round moves one small tensor to the host; everything else stays where the model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_bench.core.types import NOBODY, Listener
from dflash_bench.engine.drafter import Captures, Committed, Drafter, StandAlone
from dflash_bench.engine.rows import Clock, DecodingError, HostClock, Limits, Lists, Round, Slot, to_host
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.steady import SteadyRounds
from dflash_bench.engine.target import Rule, Target
from dflash_bench.engine.verify import (
    Draft,
    Outcome,
    Verdict,
    broken_places,
    greedy_outcome,
    take_unverified,
    verify_chain,
    verify_children,
    verify_sampled,
    verify_tree,
)

PART = 256
"""Number of prompt tokens read between two rounds, so that decoding slots do not wait long."""


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
    """Decode prompts together, round by round, until all have ended; yield the rounds, the prefills first.

    With `num_rows`, at most this many prompts are decoded at a time: the others wait for the slot of a finished prompt.
    `seeds` holds a seed per prompt, in place of the seed in `sampling`, so that a prompt draws the same numbers as it
    would alone. The listener receives every token as soon as the host has it.

    Raises DecodingError for an empty prompt, a prompt that leaves no room in the context, and NaN or infinite logits.
    """
    if isinstance(drafter, StandAlone):
        target = drafter.reader
    seeds = seeds or [sampling.seed] * len(prompts)
    rows = [
        Slot(prompt, _room(target, prompt, limits), request, seed)
        for request, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    num_rows = min(num_rows or len(rows), len(rows))
    # A block may reach past a row's limit: those tokens are cut off, but need their places in the cache.
    capacity = max(len(row.prompt) + row.limit for row in rows) + drafter.num_drafts + 1
    target.tap(drafter.taps)
    try:
        target.begin(num_rows, capacity)
        if not isinstance(drafter, StandAlone):
            # A stand-alone drafter's passes are not reported, because each round takes several.
            target.listener = listener
        drafter.begin(num_rows, capacity)
        shortest = min(len(row.prompt) for row in rows) + 1
        captures = [reader for reader in (target, drafter) if isinstance(reader, Captures)]
        spent_s = _spent_s(captures)
        for reader in captures:
            reader.capture(shortest, capacity)
        listener.captured(_spent_s(captures) - spent_s)
        num_places = limits.max_new_tokens + drafter.num_drafts + 1
        sampler = Sampler(sampling, num_rows, num_places, target.device)
        yield from _State(target, drafter, rows, num_rows, limits, sampler, clock, listener).rounds()
    finally:
        target.listener, target.rule = NOBODY, None
        # The model may be shared: taps must not slow down its next user, or keep holding memory.
        target.tap(())


def _spent_s(captures: Sequence[Captures]) -> float:
    """Return the seconds spent on capturing so far."""
    return sum(reader.graph_cache.spent_s for reader in captures if reader.graph_cache is not None)


def _room(target: Target, prompt: Sequence[int], limits: Limits) -> int:
    if not prompt:
        raise DecodingError("an empty prompt")
    room = min(limits.max_new_tokens, target.context_length - len(prompt))
    if room < 1:
        raise DecodingError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {target.context_length}")
    return room


class _State:
    """The state of one call of `decode`. A slot whose answer has ended stands still until a waiting one replaces it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        slots: list[Slot],
        num_rows: int,
        limits: Limits,
        sampler: Sampler,
        clock: Clock,
        listener: Listener,
    ) -> None:
        self.target, self.drafter = target, drafter
        self.slots, self.waiting = slots[:num_rows], deque(slots[num_rows:])
        self.stop_ids, self.sampler, self.clock, self.listener = limits.stop_ids, sampler, clock, listener
        self.starts = [0] * num_rows
        self.anchor = torch.zeros(num_rows, dtype=torch.long, device=target.device)
        self.none_accepted = torch.zeros_like(self.anchor)
        self.steady: SteadyRounds | None = None

    @property
    def ended(self) -> bool:
        return not self.waiting and all(slot.finish for slot in self.slots)

    def rounds(self) -> Iterator[Round]:
        self.clock.settle()
        begin = self._begin([slot.request for slot in self.slots])
        # An idle device may reach the mark late if other processes use it.
        self.clock.settle()
        self.listener.marked()
        for slot in self.slots:
            slot.began = begin
        yield from self._read(0, self.slots)
        self.steady = SteadyRounds.of(self.target, self.drafter, self.sampler)
        while not self.ended:
            yield from self._fill()
            if any(slot.is_decoding for slot in self.slots):
                yield self.round()

    def _begin(self, requests: Sequence[int]) -> object:
        for request in requests:
            self.listener.began(request)
        return self.clock.mark()

    def _tell(self, emitted: Sequence[list[int] | None], slots: Sequence[Slot]) -> None:
        for slot, tokens in zip(slots, emitted, strict=True):
            if tokens is not None:
                self.listener.received(slot.request, tokens)

    def _admit(self) -> None:
        """Give the slots of finished answers to waiting prompts."""
        for place, slot in enumerate(self.slots):
            if slot.finish and self.waiting:
                self.slots[place], self.starts[place] = self.waiting.popleft(), 0
                self.slots[place].began = self._begin([self.slots[place].request])
                if not self.clock.runs_ahead:
                    # Waiting for an event would stall the other rows: its moment stays open until the next read.
                    self.listener.marked()

    def _fill(self) -> Iterator[Round]:
        """Admit waiting prompts, and read about PART tokens of unread prompts; yield their prefills."""
        self._admit()
        num_read = 0
        for place in range(len(self.slots)):
            slot = self.slots[place]
            if slot.is_reading and num_read < PART:
                before = slot.num_read
                yield from self._read(place, [slot], PART if self.target.reads_in_parts else None)
                num_read += slot.num_read - before
                # A prompt's first token may have been its last.
                self._admit()

    def _read(self, first: int, slots: Sequence[Slot], most: int | None = None) -> Iterator[Round]:
        """Read the prompts of slots `first` ..., or up to `most` tokens of a single prompt; finally yield a round."""
        starts = [slot.num_read for slot in slots]
        parts = [slot.prompt[slot.num_read :][:most] for slot in slots]
        for slot, part in zip(slots, parts, strict=True):
            slot.num_read += len(part)
        output = self.target.prefill(parts, starts, first)
        if slots[0].is_reading:
            following = [list(slots[0].prompt[starts[0] + 1 : slots[0].num_read + 1])]
            self._keep_prompt(first, slots, starts, output.hidden, following, None)
            return
        emitted = self._first_tokens(first, slots, output.logits)
        self._tell(emitted, slots)
        seen = self.clock.mark()
        self.clock.settle()
        self.listener.marked()
        if not self.ended:
            following = [[*part[1:], *tokens] for part, tokens in zip(parts, emitted, strict=True)]
            self._keep_prompt(first, slots, starts, output.hidden, following, self.anchor[first : first + len(slots)])
        none = [0] * len(self.slots)
        given: list[list[int] | None] = [None] * len(self.slots)
        given[first : first + len(slots)] = emitted
        marks = (slots[0].began, seen, seen, seen, self.clock.mark())
        yield Round(given, none, none, [[] for _ in none], None, marks, *self._whose())

    def _first_tokens(self, first: int, slots: Sequence[Slot], logits: Tensor) -> list[list[int]]:
        """Choose and emit the first token of each slot, given logits [b, 1, V]."""
        self.sampler.begin([slot.prompt for slot in slots], [slot.seed for slot in slots], logits.shape[-1], first)
        tokens = self.sampler.first_tokens(logits, first)
        self.anchor[first : first + len(slots)] = tokens
        host = to_host({"tokens": tokens[:, None], "broken": broken_places(logits)})
        _refuse_broken(slots, host["broken"], [0] * len(slots), first)
        return [slot.emit(new, self.stop_ids) for slot, new in zip(slots, host["tokens"], strict=True)]

    def _keep_prompt(
        self,
        first: int,
        slots: Sequence[Slot],
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
                hidden,
                tokens,
                anchor,
                starts,
                counts,
                [slot.text for slot in slots],
                self.sampler,
                first=first,
                is_prompt=True,
                requests=[slot.request for slot in slots],
            )
        )
        for place, slot in enumerate(slots, start=first):
            self.starts[place] = slot.num_read

    def _whose(self) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """Return the request of each slot, and whether its answer has ended."""
        return tuple(slot.request for slot in self.slots), tuple(slot.finish is not None for slot in self.slots)

    def round(self) -> Round:
        begin, steady = self.clock.mark(), self.steady
        draft = self.drafter.propose() if steady is None else steady.propose(self.starts, self.anchor)
        drafted = self.clock.mark()
        if steady is None:
            outcome, hidden = self._verified(draft)
            self.sampler.commit(outcome.tokens, outcome.verdict.num_accepted)
            host = to_host(_parts(draft, outcome))
        else:
            host = to_host(*steady.verify(self.starts))
        if draft is not None and "lengths" in host:
            draft = replace(draft, lengths=[length for (length,) in host["lengths"]])
        kept = [count for (count,) in host["accepted"]]
        alive = [slot.is_decoding for slot in self.slots]
        _refuse_broken(self.slots, host["broken"], kept)
        accepted = [count * live for count, live in zip(kept, alive, strict=True)]
        lasts = host.get("last", host["accepted"])
        moved = any(live and last > count for (last,), count, live in zip(lasts, kept, alive, strict=True))
        # Rolling the target back to the accepted tokens counts as verification time.
        self.target.commit([(count + 1) * live for count, live in zip(accepted, alive, strict=True)])
        verified = self.clock.mark()
        emitted = [
            slot.emit(new[: count + 1], self.stop_ids) if live else None
            for slot, count, new, live in zip(self.slots, kept, host["tokens"], alive, strict=True)
        ]
        self._tell(emitted, self.slots)
        observing = self.clock.mark()
        if not self.ended:
            counts = [count + 1 if slot.is_decoding else 0 for slot, count in zip(self.slots, accepted, strict=True)]
            if steady is None:
                self._keep(outcome, hidden, counts, moved, host.get("choices", ()))
            else:
                self.anchor = steady.keep(self.starts, kept)
            self._advance(counts)
        end = self.clock.mark()
        self.listener.marked()
        drafts = _of_living(draft.num_drafted() if draft else [0] * len(alive), alive)
        cut = None if draft is None or draft.drafted is None else _of_living(draft.num_verified(), alive)
        ids = _first(host.get("drafted", [[]] * len(drafts)), drafts)
        parents = _first(host["parents"], drafts) if "parents" in host else None
        marks = (begin, drafted, verified, observing, end)
        return Round(emitted, drafts, accepted, ids, parents, marks, *self._whose(), cut)

    def _verified(self, draft: Draft | None) -> tuple[Outcome, Tensor | None]:
        """Read the draft; return the outcome, and the taps' outputs [B, N + 1, K * H]."""
        block = self.anchor[:, None] if draft is None else torch.cat([self.anchor[:, None], draft.tokens], dim=1)
        tree = draft.parents if draft else None
        self.target.rule = self._rule(draft)
        output = self.target.forward(block, self.starts, tree)
        if output.ruled is not None:
            return Outcome.opened(output.ruled, block.shape[1]), output.hidden
        verdict = self._verify(draft, self.sampler.penalise(output.logits, block, tree))
        return Outcome.of(verdict, block, output.logits), output.hidden

    def _rule(self, draft: Draft | None) -> Rule | None:
        """Return the verify rule in a form that can be captured, or None if it needs more than the logits."""
        if not self.sampler.greedy or self.sampler.penalises:
            return None
        if draft is not None and (draft.following is not None or draft.is_padded):
            return None
        return greedy_outcome

    def _verify(self, draft: Draft | None, logits: Tensor) -> Verdict:
        """Apply the verify rule that fits the draft, to penalised logits [B, N + 1, V] (`verify.py`)."""
        if draft is not None and draft.following is not None:
            return take_unverified(draft.tokens, draft.following)
        sampler = self.sampler
        if draft is None:
            choices = sampler.choose(logits, sampler.places(1))
            return Verdict(None, self.none_accepted, choices[:, 0], choices)
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
        outcome: Outcome,
        hidden: Tensor | None,
        counts: list[int],
        moved: bool,
        choices: Sequence[list[int]],
    ) -> None:
        """Keep counts[b] tokens of row b in the target's cache and hand them to the drafter.

        Rows that have ended or are in prefill stand still: their count is 0. Their results are discarded and written to
        the same places every round, so that they never move past the end of the cache.
        """
        verdict, longest = outcome.verdict, max(*counts, 1)
        self.anchor = verdict.next_token
        if verdict.path is not None and moved:
            path = verdict.path[:, :longest]
            self.target.keep_path(self.starts, path)
            hidden = hidden if hidden is None else hidden.take_along_dim(path[..., None], dim=1)
        hidden = None if hidden is None else hidden[:, :longest]
        texts = [slot.text for slot in self.slots]
        self.sampler.emitted([len(slot.tokens) for slot in self.slots])
        self.drafter.observe(
            Committed(
                hidden,
                outcome.tokens[:, :longest],
                self.anchor,
                list(self.starts),
                counts,
                texts,
                self.sampler,
                choices,
                requests=[slot.request for slot in self.slots],
            )
        )

    def _advance(self, counts: Sequence[int]) -> None:
        """Move each row's start behind its kept tokens."""
        self.starts = [start + count for start, count in zip(self.starts, counts, strict=True)]


def _refuse_broken(slots: Sequence[Slot], broken: Lists, accepted: list[int], first: int = 0) -> None:
    """Raise DecodingError for broken logits at one of a slot's first accepted + 1 places."""
    for place, (slot, flags, count) in enumerate(zip(slots, broken, accepted, strict=True), start=first):
        if (slot.is_decoding or not slot.tokens) and not slot.is_reading and any(flags[: count + 1]):
            raise DecodingError(f"NaN or infinite logits after {len(slot.tokens)} tokens (row {place})")


def _parts(draft: Draft | None, outcome: Outcome) -> dict[str, Tensor]:
    """Return the parts of a round that the host needs, each [B, n], by name."""
    verdict = outcome.verdict
    parts = {"accepted": verdict.num_accepted[:, None], "tokens": outcome.tokens, "broken": outcome.broken}
    if verdict.path is not None:
        parts["last"] = verdict.last[:, None]
    if draft is not None:
        parts["drafted"] = draft.all_drafted
        if draft.parents is not None:
            parts["parents"] = draft.parents
        if isinstance(draft.lengths, Tensor):
            parts["lengths"] = draft.lengths[:, None]
        if draft.wants_choices and verdict.choices is not None:
            parts["choices"] = verdict.choices
    return parts


def _of_living(counts: list[int], alive: Sequence[bool]) -> list[int]:
    return [count * live for count, live in zip(counts, alive, strict=True)]


def _first(rows: Lists, counts: list[int]) -> Lists:
    """Return the first counts[b] values of row b, without padding."""
    return [values[:count] for values, count in zip(rows, counts, strict=True)]


# Acceptance of a drafter's proposals, measured without timing: prompts decoded together at temperature 0.


@dataclass(frozen=True, slots=True)
class AcceptedAnswer:
    """The tokens of an answer, and the number of accepted drafted tokens per round."""

    token_ids: tuple[int, ...]
    counts: tuple[int, ...]


@torch.inference_mode()
def measure_acceptance(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[AcceptedAnswer]:
    """Decode the prompts together and return an answer for each. Raises DecodingError as `decode`."""
    prefill, *rounds = decode(target, drafter, prompts, limits, Sampling(), HostClock())
    return [
        AcceptedAnswer(
            tuple(token for step in (prefill, *rounds) for token in step.emitted[row] or ()),
            tuple(step.accepted[row] for step in rounds if step.emitted[row] is not None),
        )
        for row in range(len(prompts))
    ]


def al_pooled(answers: Sequence[AcceptedAnswer]) -> float:
    """Return `al.pooled`: sum(a_i + 1) / sum(S) over all rounds of all answers; 1 without any round."""
    counts = [count for answer in answers for count in answer.counts]
    return 1.0 + sum(counts) / len(counts) if counts else 1.0


def by_position(answers: Sequence[AcceptedAnswer]) -> list[float]:
    """Return the share of rounds that accepted at least 1, 2, ... drafted tokens, up to the maximum of any round."""
    counts = [count for answer in answers for count in answer.counts]
    return [sum(count > place for count in counts) / len(counts) for place in range(max(counts, default=0))]
