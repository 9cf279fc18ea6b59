"""An estimate of a training before it starts: time from trying a little of each stage, disk space from counting."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from dflash_bench.models.architecture import final_norm
from dflash_bench.training import answers, prepare, session
from dflash_bench.training.answers import AnswerRequest
from dflash_bench.training.config import TrainRequest, check
from dflash_bench.training.data import PackedRows, stored
from dflash_bench.training.prepare import PreparedTraining, Tell

TRIED_TOKENS = 8
TRIED_STEPS = 2
"""Steps that are timed, after a first one, which is slower."""
LIKELY_SHARE = 0.75
"""Mean length of answers as a share of the longest one allowed: a guess."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated seconds and bytes; `memory_bytes` is the peak while trying."""

    num_answers: int
    num_tokens: int
    answers_s: float
    num_steps: int
    training_s: float
    disk_bytes: int
    memory_bytes: int


def perform(request: TrainRequest, tell: Tell) -> Estimate:
    """Try a little of each stage; only prompts that the target makes up are kept.

    Raises UserError as `session.perform` does.
    """
    check(request)
    prepared = prepare.prepare(request, tell)
    with TemporaryDirectory() as folder:
        tell("trying a batch of answers")
        token_s = _try_answers(prepared, Path(folder))
        tell("trying a few steps")
        step_s, num_rows_tried, tokens_tried = _try_steps(prepared, Path(folder))
    num_answers = len(prepared.requests) + prepared.num_later
    num_tokens = round(num_answers * prepared.plan.max_new_tokens * LIKELY_SHARE)
    all_tokens = num_tokens + sum(len(one.ids) for one in prepared.requests)
    num_rows = max(1, round(all_tokens * num_rows_tried / tokens_tried))
    num_steps = session.num_steps(request, num_rows)
    unit = 1 if sys.platform == "darwin" else 1024
    return Estimate(
        num_answers, num_tokens, num_tokens * token_s, num_steps, num_steps * step_s,
        prepare.disk_bytes(prepared), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )  # fmt: skip


def _try_answers(prepared: PreparedTraining, folder: Path) -> float:
    """Return the seconds per token of answers that are decoded in batches, and leave these in `folder`."""
    short = replace(prepared.plan, max_new_tokens=TRIED_TOKENS)
    first: Sequence[AnswerRequest] = [
        prepared.requests[row] for row in answers.batches(prepared.requests, short.batch_size, short.seed)[0]
    ]
    start = time.perf_counter()
    answers.collect(prepared.target, frozenset(), first, short, folder, lambda _: None)
    whole_s = time.perf_counter() - start
    start = time.perf_counter()
    answers.collect(
        prepared.target, frozenset(), first, replace(short, max_new_tokens=1), folder / "prompts", lambda _: None
    )
    prompts_s = time.perf_counter() - start
    step_s = max(0.0, whole_s - prompts_s) / (TRIED_TOKENS - 1)
    # All rows of a batch wait for the longest, and every batch reads its prompts once.
    longest = prepared.plan.max_new_tokens
    return (prompts_s + longest * step_s) / (len(first) * longest * LIKELY_SHARE)


def _try_steps(prepared: PreparedTraining, folder: Path) -> tuple[float, int, int]:
    """Return the seconds of a step, and for the answers in `folder` their number of rows and of tokens."""
    items = stored([folder])
    model = prepared.models.target
    norm, pad = final_norm(model), prepare.pad_id(prepared.models)
    length, layers = prepare.ROW_LENGTH, prepared.layers
    packed = PackedRows(items, layers, norm, length, pad)
    device = prepared.target.device
    rows = PackedRows(items * session.ROWS, layers, norm, length, pad, device=device, compute=prepared.compute)
    objective = session.new_objective(prepared, rows)
    index = list(range(min(session.ROWS, len(rows.ids))))
    seconds = []
    for step in range(1 + TRIED_STEPS):
        start = time.perf_counter()
        objective.loss(index, step + 1).backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]), len(packed.ids), sum(len(item.ids) for item in items)


def text(estimate: Estimate) -> str:
    """Return the estimate as a table."""
    answers_h, training_h = _duration(estimate.answers_s), _duration(estimate.training_s)
    return (
        f"answers   {estimate.num_answers:,}, about {estimate.num_tokens:,} tokens: {answers_h}\n"
        f"training  {estimate.num_steps:,} steps: {training_h}\n"
        f"disk      up to {estimate.disk_bytes / 1e9:.1f} GB for the target's states\n"
        f"memory    {estimate.memory_bytes / 1e9:.1f} GB"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
