"""Estimate of a training before it starts: disk space by counting, time by a few passes and steps over made-up answers.

Nothing is decoded: a batch of answers takes as long as its longest one, and passes over its width are quickly timed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from dflash_bench.models.architecture import final_norm
from dflash_bench.training import answers, session
from dflash_bench.training.config import TrainRequest, check
from dflash_bench.training.data import PackedRows, stored
from dflash_bench.training.prepare import ROW_LENGTH, PreparedTraining, Tell, disk_bytes, pad_id, prepare

LIKELY_SHARE = 0.6
"""Mean length of answers as a share of the maximum length: a guess."""
PART = 64
"""Number of tokens of the pass that tells the time of reading prompts."""
QUICK_S = 2.0
"""A step over one row that takes longer stands for a step over all rows."""


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

    def __str__(self) -> str:
        return (
            f"answers   {self.num_answers:,}, about {self.num_tokens:,} tokens: {_duration(self.answers_s)}\n"
            f"training  {self.num_steps:,} steps: {_duration(self.training_s)}\n"
            f"disk      up to {self.disk_bytes / 1e9:.1f} GB for the target's states\n"
            f"memory    {self.memory_bytes / 1e9:.1f} GB"
        )


def estimate(request: TrainRequest, tell: Tell) -> Estimate:
    """Time a little of each stage, and keep only prompts that the target invents. Raises UserError as in `perform`."""
    check(request)
    prepared = prepare(request, tell)
    num_answers = len(prepared.requests) + prepared.num_later
    num_tokens = round(num_answers * prepared.plan.max_new_tokens * LIKELY_SHARE)
    prompt_tokens = sum(len(one.ids) for one in prepared.requests)
    if request.answer_tokens is not None and request.answer_tokens < num_tokens:
        share = request.answer_tokens / num_tokens
        num_answers, num_tokens = round(num_answers * share), request.answer_tokens
        prompt_tokens = round(prompt_tokens * share)
    tell("timing forward passes")
    token_s, step_s = _passes_s(prepared)
    num_batches = -(-num_answers // prepared.plan.batch_size)
    answers_s = prompt_tokens * token_s + num_batches * prepared.plan.max_new_tokens * step_s
    tell("timing a step")
    steps = session.num_steps(prepared.request, max(1, round((num_tokens + prompt_tokens) / ROW_LENGTH)))
    tried = 0.0 if request.rate else len(session.RATES) / session.SEARCH_SHARE
    unit = 1 if sys.platform == "darwin" else 1024
    return Estimate(
        num_answers,
        num_tokens,
        answers_s,
        steps,
        (1 + tried) * steps * _step_s(prepared),
        disk_bytes(prepared),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _passes_s(prepared: PreparedTraining) -> tuple[float, float]:
    """Return the seconds per token of reading prompts, and of a pass over a batch of answers."""
    target, rows, device = prepared.target, prepared.plan.batch_size, prepared.target.device
    context = min(prepared.plan.max_new_tokens, ROW_LENGTH // 2)
    tokens = torch.arange(max(rows, PART), device=device) * 7919 % target.vocab_size
    target.begin(rows, context + 2)
    step_s = min(_seconds(lambda: target.forward(tokens[:rows, None], [context] * rows), device) for _ in range(3))

    def read() -> None:
        target.begin(1, PART + 1)
        target.prefill([tokens[:PART].tolist()])

    token_s = min(_seconds(read, device) for _ in range(2)) / PART
    target.release()
    return token_s, step_s


def _step_s(prepared: PreparedTraining) -> float:
    """Return the seconds of a training step."""
    with TemporaryDirectory() as folder:
        _write_made_up(prepared, Path(folder))
        rows = PackedRows(
            stored([Path(folder)]),
            prepared.layers,
            final_norm(prepared.models.target),
            ROW_LENGTH,
            pad_id(prepared.models),
            device=prepared.target.device,
            compute=prepared.compute,
        )
        objective = session.new_objective(prepared, rows)

        def step(num_rows: int) -> float:
            return _seconds(lambda: objective.loss(list(range(num_rows)), 1).backward(), prepared.target.device)

        step(1)
        one_s = step(1)
        every = min(session.ROWS, len(rows.ids))
        return every * one_s if one_s > QUICK_S else min(step(every) for _ in range(2))


def _write_made_up(prepared: PreparedTraining, folder: Path) -> None:
    """Store conversations of likely lengths that fill the rows of a step: prompts, each followed by prompts' tokens."""
    length, size = round(prepared.plan.max_new_tokens * LIKELY_SHARE), prepared.target.config.hidden_size
    prompts = cycle([one.ids for one in prepared.requests])
    words = cycle(token for one in prepared.requests for token in one.ids)
    texts: list[list[int]] = []
    lengths: list[int] = []
    states: list[Tensor] = []
    while sum(map(len, texts)) < session.ROWS * ROW_LENGTH:
        ids = next(prompts)
        texts.append([*ids, *(next(words) for _ in range(max(2, length)))])
        lengths.append(len(ids))
        states += [torch.randn(len(texts[-1]), len(prepared.layers), size).bfloat16()] if prepared.plan.layers else []
    made_up = answers.joined(texts, lengths, states)
    answers.write(answers.part(folder, 0), {**made_up, "prompts": torch.arange(len(texts))})


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
