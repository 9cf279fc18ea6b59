"""Forged runs: a run measured on nano, changed with care for everything that a reader checks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_bench.core.types import Answer, Generation
from dflash_bench.results import integrity, parts, plan, run_info, store

Rows = Callable[[list[Answer]], Sequence[Answer]]
Info = Callable[[dict[str, Any]], object]


def forge(run: Path, out: Path, rows: Rows, info: Info) -> Path:
    """Write the run again with other rows and another `run.json`, with the checksums and sums that belong to them."""
    about, answers = store.load(run)
    content = about.to_json()
    forged = rows(sorted(answers, key=lambda one: one.order))
    span_s = max(float(about.span_s or 0), *(one.end_s or 0.0 for one in forged))
    content |= integrity.of_run(span_s, forged)
    info(content)
    content["identity"]["plan"] = plan.sha256(content["plan"])
    out.mkdir()
    (out / run_info.FILE).write_text(json.dumps(content))
    carried = run_info.carried(run_info.read_info(out))
    parts.write(parts.to_table(forged, carried), out / parts.name(0, 0), carried)
    return out


def each(change: Callable[[Answer], Answer], method: str | None = None) -> Rows:
    """Change every answer, or every answer of a method."""
    return lambda rows: [change(one) if method in (None, one.method) else one for one in rows]


def of_generation(change: Callable[[Generation], Generation], method: str | None = None) -> Rows:
    return each(lambda row: replace(row, generation=change(row.generation)), method)


def one_after_another(rows: Rows) -> Rows:
    """Change the answers, and put them one after another on the run's clock, each for as long as it says it took."""

    def change(given: list[Answer]) -> list[Answer]:
        at, found = 0.0, []
        for row in rows(given):
            took = row.generation.prefill_s + row.generation.decode_s + 1e-3
            found.append(replace(row, start_s=at, end_s=at + took, clock_s=took))
            at += took + 1e-3
        return found

    return change


def scaled(row: Answer, factor: float) -> Answer:
    """The answer with all its own times scaled; not its place on the run's clock."""
    own = row.generation

    def times(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else tuple(factor * value for value in values)

    generation = replace(
        own,
        prefill_s=factor * own.prefill_s,
        decode_s=factor * own.decode_s,
        draft_prefill_s=None if own.draft_prefill_s is None else factor * own.draft_prefill_s,
        draft_s=times(own.draft_s),
        verify_s=times(own.verify_s),
        round_s=times(own.round_s),
    )
    return replace(row, generation=generation, clock_s=None if row.clock_s is None else factor * row.clock_s)


def perfect(own: Generation) -> Generation:
    """The answer as if every draft token had been right: fewer rounds, each with as much time as the mean round."""
    assert own.drafted is not None and own.round_s is not None
    block, rest = max(own.drafted), len(own.token_ids) - 1
    emitted, at = [], 0
    while at < rest:
        emitted.append(min(block + 1, rest - at))
        at += emitted[-1]
    num, tokens = len(emitted), own.token_ids
    drafts, position = [], 1
    for count in emitted:
        right = list(tokens[position : position + block])
        drafts += right + [0] * (block - len(right))
        position += count

    def times(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
        return None if values is None else (sum(values) / num,) * num

    return replace(
        own,
        drafted=(block,) * num,
        drafted_ids=tuple(drafts),
        accepted=tuple(min(block, count) for count in emitted),
        emitted=tuple(emitted),
        draft_s=times(own.draft_s),
        verify_s=times(own.verify_s),
        round_s=times(own.round_s),
        verified=None,
    )
