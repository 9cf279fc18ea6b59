"""Our engine beside another that serves the same weights: their answers one by one, and whether their counts agree.

Tokens must equal those of our plain decoding. Acceptance must agree within sampling error, position by position
(two-proportion intervals, 95 % over all positions together) and as a whole (the ratio of both al.pooled, resampled over
prompts, which is much sharper because both answered the same prompts).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from dflash_bench.analysis import stats
from dflash_bench.engine.local import LocalBackend
from dflash_bench.records import Generation, Message
from dflash_bench.tasks import suites

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Counts:
    """One answer's tokens, its number of rounds, and how many rounds accepted each position of the draft."""

    tokens: tuple[int, ...]
    num_rounds: int
    accepted_at: tuple[int, ...]

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt under one method; `verdict` is None if its tokens equal those of our plain decoding."""

    ours: Counts
    theirs: Counts
    verdict: str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """`excused`, if not empty, is a measured fault of the other engine; then acceptance may differ, but not tokens."""

    method: str
    engine: str
    num_drafts: int
    answers: tuple[Answer, ...]
    excused: str = ""

    @property
    def equal(self) -> list[Answer]:
        """The answers with the same text; only their acceptance is compared."""
        return [answer for answer in self.answers if answer.verdict is None]

    @property
    def num_identical(self) -> int:
        return sum(answer.ours == answer.theirs for answer in self.equal)

    def positions(self) -> list[tuple[int, float, float, float]]:
        """(position counted from 1, our share of rounds, theirs, the allowed difference)."""
        mine, other = ([getattr(answer, side) for answer in self.equal] for side in ("ours", "theirs"))
        n, m = (sum(counts.num_rounds for counts in side) for side in (mine, other))
        z = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * self.num_drafts))
        rows = []
        for k in range(self.num_drafts):
            x, y = (sum(counts.accepted_at[k] for counts in side) for side in (mine, other))
            both = (x + y) / (n + m)
            rows.append((k + 1, x / n, y / m, z * (both * (1 - both) * (1 / n + 1 / m)) ** 0.5))
        return rows

    def ratio(self) -> stats.Interval:
        """Their al.pooled over ours."""
        both = [(answer.theirs, answer.ours) for answer in self.equal]
        columns = [[float(n) for c in sides for n in (c.num_rounds + c.num_accepted, c.num_rounds)] for sides in both]
        (interval,) = stats.intervals(np.array(columns), [stats.ratio([0, 3], [1, 2])])
        assert interval is not None, "every answer has rounds"
        return interval

    def mismatches(self) -> list[str]:
        return [
            f"prompt {i}: {answer.verdict}"
            for i, answer in enumerate(self.answers)
            if answer.verdict is not None and "mismatch" in answer.verdict
        ]

    def problems(self) -> list[str]:
        problems = self.mismatches()
        if not any(answer.theirs.num_accepted for answer in self.equal):
            return [*problems, f"{self.engine} accepted no draft at all"]
        problems += [
            f"position {k}: {ours:.3f} here, {theirs:.3f} in {self.engine}, more than {bound:.3f} apart"
            for k, ours, theirs, bound in self.positions()
            if abs(ours - theirs) > bound
        ]
        ratio = self.ratio()
        if ratio.low is None or ratio.high is None or not ratio.low <= 1 <= ratio.high:
            bounds = "none" if ratio.low is None else f"[{ratio.low:.4f}, {ratio.high:.4f}]"
            problems.append(f"al.pooled of {self.engine} is {ratio.value:.4f} of ours, interval {bounds}")
        return problems


def prompts(limit: int) -> list[list[Message]]:
    """The first turns of embedded prompts, equally many from every suite."""
    known = suites.expand(["paper"])
    per_suite = -(-limit // len(known))
    loaded = [suites.load_prompts(suite, "embedded", per_suite).prompts for suite in known]
    mixed = [suite_prompts[i] for i in range(per_suite) for suite_prompts in loaded if i < len(suite_prompts)]
    return [[*prompt.opening, Message("user", prompt.turns[0])] for prompt in mixed[:limit]]


def answers(backend: LocalBackend, method: str, messages: Sequence[list[Message]]) -> list[Generation]:
    out = []
    for i, message in enumerate(messages):
        out.append(backend.generate(method, message))
        show(f"ours {method}", i + 1, len(messages))
        if out[-1].error:
            raise SystemExit(f"our {method} failed: {out[-1].error}")
    return out


def counts(generation: Generation, num_drafts: int) -> Counts:
    accepted = generation.accepted or ()
    at = tuple(sum(count > k for count in accepted) for k in range(num_drafts))
    return Counts(generation.token_ids, len(accepted), at)


def verdict(backend: LocalBackend, message: list[Message], plain: Generation, theirs: Counts) -> str | None:
    if theirs.tokens == plain.token_ids:
        return None
    divergence = backend.divergence(message, plain.token_ids, theirs.tokens)
    return f"{divergence.verdict} at {divergence}"


def show(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done % 16 == 0 or done == total:
        print(f"{what} {done}/{total}", file=sys.stderr, flush=True)


def summary_rows(comparison: Comparison) -> list[str]:
    rows = []
    for engine, side in (("here", "ours"), (comparison.engine, "theirs")):
        all_counts = [getattr(answer, side) for answer in comparison.equal]
        num_rounds = sum(c.num_rounds for c in all_counts)
        pooled = 1 + sum(c.num_accepted for c in all_counts) / num_rounds
        emitted = sum(len(c.tokens) - 1 for c in all_counts) / num_rounds
        equal = f"{len(comparison.equal)}/{len(comparison.answers)}"
        rows.append(
            f"| {comparison.method} | {comparison.num_drafts} | {engine} | {len(comparison.answers)} | {equal} "
            f"| {num_rounds} | {pooled:.4f} | {emitted:.4f} |"
        )
    return rows


def agreement(compared: Sequence[Comparison]) -> list[str]:
    lines = []
    for comparison in compared:
        ratio = comparison.ratio()
        problems = comparison.problems()
        why = f" A known fault: {comparison.excused}." if comparison.excused else ""
        lines.append(
            f"- {comparison.method}, {comparison.engine}: its al.pooled is {ratio.value:.4f} of ours, "
            f"[{ratio.low:.4f}, {ratio.high:.4f}] (95 %, over prompts); "
            f"all counts are the same in {comparison.num_identical} of {len(comparison.equal)} answers; "
            f"{'they agree' if not problems else 'THEY DISAGREE: ' + '; '.join(problems)}.{why}"
        )
        lines += [
            f"- {comparison.method}, {comparison.engine}, prompt {i}: {a.verdict}"
            for i, a in enumerate(comparison.answers)
            if a.verdict
        ]
    return lines


def positions(comparison: Comparison, engine: str, title: str) -> Iterator[str]:
    """A table; `engine` heads the column of the other one."""
    yield from ("", f"## {title}: share of rounds that accept the draft at a position", "")
    yield from (f"| position | here | {engine} | difference | allowed |", "| ---: | ---: | ---: | ---: | ---: |")
    for k, ours, theirs, bound in comparison.positions():
        yield f"| {k} | {ours:.4f} | {theirs:.4f} | {theirs - ours:+.4f} | {bound:.4f} |"


def write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
    print(f"wrote {path}", file=sys.stderr)
