"""What the rounds of one prompt come to: a generation with its times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dflash_bench.engine.clock import Clock
from dflash_bench.engine.sequences import Round
from dflash_bench.records import FinishReason, Generation


@dataclass(slots=True)
class Decoded:
    """The rounds of one prompt, each with the row that it was in, the same one in all."""

    prompt: Sequence[int]
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    has_ended: bool = False

    def add(self, row: int, step: Round) -> None:
        if step.emitted[row] is not None:
            self.rounds.append((row, step))
            self.has_ended = step.ended[row]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for row, step in self.rounds for token in step.emitted[row] or ())

    @property
    def begin(self) -> object:
        return self.rounds[0][1].marks[0]

    def span(self, clock: Clock, since: object) -> tuple[float, float]:
        """Seconds from `since` to its begin and to its end; of what never began, none."""
        if not self.rounds:
            return 0.0, 0.0
        _, first = self.rounds[0]
        _, last = self.rounds[-1]
        end = last.marks[4] if len(self.rounds) > 1 else first.marks[1]
        return clock.seconds(since, self.begin), clock.seconds(since, end)

    def generation(
        self, clock: Clock, text: str, stop_ids: frozenset[int], peak_memory_bytes: int | None
    ) -> Generation:
        """Of an answer that has ended."""
        _, prefill = self.rounds[0]
        begin, first, _, _, draft_ready = prefill.marks
        steps = self.rounds[1:]
        last = steps[-1][1].marks[4] if steps else first
        stopped = self.tokens[-1] in stop_ids
        finish: FinishReason = "stop" if stopped else "length"
        marks = [step.marks for _, step in steps]
        ends = [draft_ready, *(m[4] for m in marks)]
        seconds = clock.seconds
        return Generation(
            token_ids=self.tokens,
            text=text,
            finish_reason=finish,
            num_prompt_tokens=len(self.prompt),
            prefill_s=seconds(begin, first),
            decode_s=seconds(first, last),
            draft_prefill_s=seconds(first, draft_ready) if steps else 0.0,
            drafted=tuple(step.drafted[row] for row, step in steps),
            drafted_ids=tuple(token for row, step in steps for token in step.drafted_ids[row]),
            drafted_parents=self._parents(),
            accepted=tuple(step.accepted[row] for row, step in steps),
            emitted=tuple(len(step.emitted[row] or ()) for row, step in steps),
            draft_s=tuple(seconds(m[0], m[1]) + seconds(m[3], m[4]) for m in marks),
            verify_s=tuple(seconds(m[1], m[2]) for m in marks),
            # Each from the end of the one before, so that nothing that decoding took is outside of its rounds.
            round_s=tuple(seconds(before, end) for before, end in pairwise(ends)),
            peak_memory_bytes=peak_memory_bytes,
        )

    def failed(self, text: str, error: str) -> Generation:
        return Generation(self.tokens, text, "error", len(self.prompt), 0.0, 0.0, error=error)

    def _parents(self) -> tuple[int, ...] | None:
        """None where every round drafted a chain."""
        if all(step.drafted_parents is None for _, step in self.rounds[1:]):
            return None
        return tuple(
            parent
            for row, step in self.rounds[1:]
            for parent in (
                range(-1, step.drafted[row] - 1) if step.drafted_parents is None else step.drafted_parents[row]
            )
        )
