"""Test that the witnesses of a run can object: copies of its own answers are spoiled, and each must be rejected.

A judge that always agrees, a clock that is never read and a scorer that finds everything right look, from a run in
which nothing is wrong, as sound ones do. So a copy gets another token, another end, one round less, half its time or
other numbers, and goes through the same code as the answers. Only the outcome is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dflash_bench.core.types import CODE_SCORERS, Answer, Divergence, Generation, Prompt, TimedGeneration
from dflash_bench.results.run_info import CanaryEntry
from dflash_bench.runner.stopwatch import Objection
from dflash_bench.tasks import scorers

Outcome = Literal["objected", "silent", "untried"]
Audit = Callable[[Sequence[int]], Divergence | None]
"""Audits an answer by its tokens."""
NOT_PLACED = "no_answer"
"""Reason for an untried kind: no answer could be spoiled in this way."""
MOST_TRIES = 3
"""A spoiled copy may happen to be right; this many in a row are not."""
SHORTEST_S = 0.005
"""For a shorter time, half of it is within the tolerance of clocks."""


@dataclass(frozen=True, slots=True)
class Canary:
    """The outcome of one kind of spoiled copy; `why` it was not tried is a key of `report.findings.WHY_UNTRIED`."""

    witness: str
    spoiled: str
    outcome: Outcome = "untried"
    why: str | None = NOT_PLACED


KINDS = tuple(
    Canary(*kind)
    for kind in (
        ("judge", "token"), ("judge", "end"), ("counter", "token"), ("counter", "count"), ("clock", "time"),
        ("scorer", "numbers"), ("text", "order"),
    )
)  # fmt: skip


class Canaries:
    """The canaries of one process; each kind is tried on the answers offered, until it is rejected or often enough."""

    def __init__(self) -> None:
        self._known = {(one.witness, one.spoiled): one for one in KINDS}
        self._tries: dict[tuple[str, str], int] = {}

    def outcomes(self) -> list[Canary]:
        return list(self._known.values())

    def _wants(self, *kind: str) -> bool:
        """Whether this kind is still to be tried."""
        witness, spoiled = kind
        known = self._known[witness, spoiled]
        return known.outcome == "untried" or (known.outcome == "silent" and self._tries[witness, spoiled] < MOST_TRIES)

    def _note(self, witness: str, spoiled: str, objects: bool) -> None:
        kind = witness, spoiled
        self._tries[kind] = self._tries.get(kind, 0) + 1
        self._known[kind] = Canary(*kind, "objected" if objects else "silent", None)

    def _excuse(self, why: str, witness: str, *spoiled: str) -> None:
        for kind, known in self._known.items():
            if kind[0] == witness and (not spoiled or kind[1] in spoiled) and known.outcome == "untried":
                self._known[kind] = replace(known, why=why)

    def timed(
        self,
        served: TimedGeneration,
        call_s: float,
        object_to: Callable[[TimedGeneration], Objection | None],
        *,
        tells_rounds: bool,
    ) -> None:
        """Offer an answer of a call of so many seconds, with which the runner's clock and counter agreed."""
        if served.generation.error is not None:
            return
        for kind, spoiled in _mistold(served.generation, call_s, tells_rounds):
            if not self._wants(*kind):
                continue
            if spoiled is None:
                self._excuse("short" if tells_rounds else "served", *kind)
            else:
                objection = object_to(replace(served, generation=spoiled))
                self._note(*kind, objection is not None and objection.witness == kind[0])

    def judged(self, record: Answer, audit: Audit) -> None:
        """Offer an answer after the judge read it, or did not."""
        generation = record.generation
        if generation.error is not None or record.audit == "mismatch":
            return
        if record.audit is None:
            hidden = "no_tokens" if generation.hides_tokens else "not_asked"
            self._excuse(hidden if record.settings.greedy else "sampled", "judge")
            return
        if len(generation.token_ids) < MOST_TRIES:
            self._excuse("short", "judge")
            return
        if self._wants("judge", "token"):
            self._note("judge", "token", any(_denied(audit(one)) for one in _other_tokens(generation.token_ids)))
        if self._wants("judge", "end"):
            self._note("judge", "end", all(_denied(audit(one)) for one in _other_ends(generation.token_ids)))

    def scored(self, record: Answer, prompt: Prompt, scorer: str) -> None:
        """Offer an answer after it was scored, or was not."""
        if scorer == "none" or scorer in CODE_SCORERS:
            self._excuse("code" if scorer in CODE_SCORERS else "no_scorer", "scorer")
        elif record.passed is None:
            self._excuse("no_verdict", "scorer")
        elif scorer not in scorers.BY_NUMBERS:
            self._excuse("not_by_numbers", "scorer")
        elif not record.passed:
            self._excuse("none_passed", "scorer")
        elif self._wants("scorer", "numbers"):
            text = record.generation.answer_text
            spoiled = other_numbers(text)
            if spoiled == text:
                self._excuse("no_numbers", "scorer")
            else:
                self._note("scorer", "numbers", not scorers.score(scorer, prompt, spoiled, None, 0).passed)

    def read(self, record: Answer | None, denied: Callable[[Answer], str | None] | None) -> None:
        """Offer an answer whose text was checked against its tokens, if there is a tokenizer."""
        if denied is None:
            self._excuse("no_tokenizer", "text")
        elif record is not None and self._wants("text", "order"):
            spoiled = replace(record, generation=replace(record.generation, text=record.generation.text[::-1]))
            self._note("text", "order", denied(spoiled) is not None)


def _denied(departure: Divergence | None) -> bool:
    return departure is not None and departure.verdict == "mismatch"


def _other_tokens(tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the answer with another token in its middle: one from elsewhere in it, or a neighbouring id."""
    at = len(tokens) // 2
    others = dict.fromkeys([*(one for one in tokens[:at] if one != tokens[at]), tokens[at] ^ 1])
    for other in list(others)[:MOST_TRIES]:
        yield (*tokens[:at], other, *tokens[at + 1 :])


def _other_ends(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the answer without its last token, and with one more."""
    return [tuple(tokens[:-1]), (*tokens, tokens[0])]


def _mistold(
    generation: Generation, call_s: float, tells_rounds: bool
) -> Iterator[tuple[tuple[str, str], Generation | None]]:
    """Yield the answer with a false count or time that must be rejected; None if it cannot be falsified."""
    at, tokens, emitted = len(generation.token_ids) // 2, generation.token_ids, generation.emitted or ()
    other = (*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]) if tells_rounds and tokens else None
    yield ("counter", "token"), None if other is None else replace(generation, token_ids=other)
    merged = (emitted[0] + emitted[1], *emitted[2:]) if tells_rounds and len(emitted) > 1 else None
    yield ("counter", "count"), None if merged is None else replace(generation, emitted=merged)
    if not tells_rounds:
        yield ("clock", "time"), replace(generation, decode_s=2 * call_s + 1)
    else:
        yield (
            ("clock", "time"),
            replace(generation, decode_s=generation.decode_s / 2) if generation.decode_s > SHORTEST_S else None,
        )


def other_numbers(text: str) -> str:
    """Return the text with every number replaced by another."""
    return re.sub(r"\d+", lambda number: str(7 * int(number[0][-9:]) + 13), text)


def together(stored: Iterable[CanaryEntry], processes: Iterable[Sequence[Canary]]) -> list[Canary]:
    """Return the worst outcome of each kind over several processes and what `run.json` holds already."""
    worst: dict[tuple[str, str], Canary] = {}
    ranks = ("untried", "objected", "silent")
    known = [Canary(one.witness, one.spoiled, one.outcome, one.why) for one in stored]
    for one in (*known, *(canary for some in processes for canary in some)):
        kind = one.witness, one.spoiled
        if kind not in worst or ranks.index(one.outcome) > ranks.index(worst[kind].outcome):
            worst[kind] = one
    return list(worst.values())


def silent(outcomes: Iterable[Canary]) -> list[str]:
    """Return the witnesses that passed a spoiled copy."""
    return list(dict.fromkeys(one.witness for one in outcomes if one.outcome == "silent"))
