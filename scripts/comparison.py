"""Our engine beside another that serves the same weights: their answers one by one, and whether their counts agree.

Tokens must equal those of our plain decoding. Acceptance must agree within sampling error, position by position and as
a whole; `dflash_bench/analysis/crosscheck.py` says how that is told.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_bench.analysis import crosscheck
from dflash_bench.analysis.conventions import Convention, Counts, Decoded
from dflash_bench.analysis.crosscheck import Answer, Checked, Pair
from dflash_bench.crosscheck import session
from dflash_bench.crosscheck.request import Asked
from dflash_bench.engine.local import LocalBackend
from dflash_bench.records import Generation, Message
from dflash_bench.report.tables import with_interval
from dflash_bench.run.request import Request
from dflash_bench.tasks import suites

CROSSCHECKED = 3
"""Prompts of each suite that `dflash-bench crosscheck` asks."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`excused`, if not empty, is a measured fault of the other engine; then acceptance may differ, but not tokens."""

    method: str
    engine: str
    num_drafts: int
    pairs: tuple[Pair, ...]
    excused: str = ""

    @property
    def compared(self) -> crosscheck.Comparison:
        return crosscheck.Comparison(self.pairs)

    @property
    def counted(self) -> list[tuple[Counts, Counts]]:
        """Ours and theirs, of the answers with the same text; only their acceptance is compared."""
        return self.compared.counted

    def mismatches(self) -> list[str]:
        return [f"prompt {i}: {words(pair)}" for i, pair in enumerate(self.pairs) if i in self.compared.mismatches]

    def problems(self) -> list[str]:
        problems = self.mismatches()
        if not any(theirs.accepted for _, theirs in self.counted):
            return [*problems, f"{self.engine} accepted no draft at all"]
        problems += [
            f"position {one.place}: {one.ours:.3f} here, {one.theirs:.3f} in {self.engine}, {one.allowed:.3f} allowed"
            for one in self.compared.positions()
            if one.is_far
        ]
        ratio = self.compared.ratio()
        if ratio is None or ratio.low is None or ratio.high is None or not ratio.low <= 1 <= ratio.high:
            problems.append(f"al.pooled of {self.engine} over ours: {with_interval(ratio, 4)}")
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


def paired(
    backend: LocalBackend,
    message: list[Message],
    plain: Generation,
    ours: Generation,
    convention: Convention,
    num_drafts: int,
    theirs: Answer,
) -> Pair:
    """One answer of both, ours counted by the other engine's convention, and the judge's word where they differ."""
    decoded = Decoded(len(ours.token_ids), ours.accepted or (), num_drafts, backend.limits.max_new_tokens)
    departure = None
    if theirs.tokens != plain.token_ids:
        departure = backend.divergence(message, plain.token_ids, theirs.tokens)
    return Pair(Answer(ours.token_ids, "", convention(decoded)), theirs, departure)


def words(pair: Pair) -> str:
    return "" if pair.departure is None else f"{pair.departure.verdict} at {pair.departure}"


def crosschecked(address: str, method: str, num_drafts: int, max_new_tokens: int) -> Checked:
    """What `dflash-bench crosscheck` says of this server."""
    ours = Request(
        suites=("paper",), methods=(f"{method}:{num_drafts}",), limit=CROSSCHECKED, max_new_tokens=max_new_tokens
    )
    theirs = Request(suites=(), methods=(), servers=(f"{method}={address}",))
    (checked,) = session.perform(Asked(ours, theirs), lambda _: None)
    return checked


def show(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{what} {done}/{total} ", end="\n" if done == total else "", file=sys.stderr, flush=True)
    elif done % 16 == 0 or done == total:
        print(f"{what} {done}/{total}", file=sys.stderr, flush=True)


def summary_rows(comparison: Comparison) -> list[str]:
    rows = []
    equal = [pair for pair in comparison.pairs if pair.counts is not None]
    num_tokens = sum(len(pair.ours.tokens) - 1 for pair in equal)
    for side, engine in enumerate(("here", comparison.engine)):
        num_rounds = sum(counts[side].rounds for counts in comparison.counted)
        pooled = 1 + sum(counts[side].accepted for counts in comparison.counted) / num_rounds
        rows.append(
            f"| {comparison.method} | {comparison.num_drafts} | {engine} | {len(comparison.pairs)} "
            f"| {len(equal)}/{len(comparison.pairs)} | {num_rounds} | {pooled:.4f} | {num_tokens / num_rounds:.4f} |"
        )
    return rows


def agreement(compared: Sequence[Comparison]) -> list[str]:
    lines = []
    for comparison in compared:
        ratio, problems = comparison.compared.ratio(), comparison.problems()
        why = f" A known fault: {comparison.excused}." if comparison.excused else ""
        bounds = "" if ratio is None else f"[{ratio.low:.4f}, {ratio.high:.4f}]"
        lines.append(
            f"- {comparison.method}, {comparison.engine}: its al.pooled is {ratio and ratio.value:.4f} of ours, "
            f"{bounds} (95 %, over prompts); "
            f"all counts are the same in {comparison.compared.num_identical} of {len(comparison.counted)} answers; "
            f"{'they agree' if not problems else 'THEY DISAGREE: ' + '; '.join(problems)}.{why}"
        )
        lines += [
            f"- {comparison.method}, {comparison.engine}, prompt {i}: {words(pair)}"
            for i, pair in enumerate(comparison.pairs)
            if pair.departure is not None
        ]
    return lines


def positions(comparison: Comparison, engine: str, title: str) -> Iterator[str]:
    """A table; `engine` heads the column of the other one."""
    yield from ("", f"## {title}: share of rounds that accept the draft at a position", "")
    yield from (f"| position | here | {engine} | difference | allowed |", "| ---: | ---: | ---: | ---: | ---: |")
    for one in comparison.compared.positions():
        difference = one.theirs - one.ours
        yield f"| {one.place} | {one.ours:.4f} | {one.theirs:.4f} | {difference:+.4f} | {one.allowed:.4f} |"


def write(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
    print(f"wrote {path}", file=sys.stderr)
