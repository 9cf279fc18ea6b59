"""`verify-distribution`: continue a few prompts many times with each method, to test the draws against the model.

By itself a method seldom reaches the far places of its drafts. So plain decoding draws the answers first, and drafts
are cut short, or begin with what the target is about to draw (`diagnose/forcing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.terminal import with_bar
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose.forcing import Guide
from dflash_bench.diagnose.goodness_of_fit import COLUMNS, Columns, Draws
from dflash_bench.diagnose.odds import Odds, continue_prompts, odds_of, score_answers
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import model_of
from dflash_bench.runner.setup import machine_of, open_engine

METHODS = ("dflash", "dflash:rule=rejection")
NUM_DRAWS = 128
"""Answers to each prompt by each method. `results/distribution.md` says what so many find."""
QUESTIONS = ("Add 3 and 4.", "Write a Python function.", "Tell me a story.", "Who is older?")
"""Short, because every draw reads them again."""
LENGTH = 31
"""Tokens drawn per answer; more where a method drafts more, so that a whole draft fits in."""
ROWS = 32
"""Continuations decoded together."""
DTYPES = ("float32", "bfloat16", "float16")
ENTRIES = 2**27
"""The most probabilities held at a time for one draft or answer of all rows; beyond it fewer are decoded together."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """`of_run` holds the options that `run` has, too: methods, model, device and dtype."""

    of_run: RunRequest
    settings: Settings
    num_draws: int
    length: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PromptDraws:
    """Continuations of one prompt, one for each of these seeds, decoded together."""

    prompt: tuple[int, ...]
    seeds: range


def draw(request: DrawRequest) -> list[Draws]:
    """Draw with all methods of a request. Raises UserError for what cannot be measured."""
    settings, chosen = request.settings, [methods.parse(text) for text in request.of_run.methods]
    if settings.greedy:
        raise UserError("at temperature 0 nothing is drawn: 'run' checks answers token for token; give --temperature")
    for method in chosen:
        if method.kind.is_probe:
            raise UserError(f"--method {method.label} measures the engine: there are no draws to test")
    backend = open_backend(request.of_run, chosen, request.seed)
    prompts = [tuple(backend.encode([Message("user", question)])) for question in QUESTIONS]
    # A first token, the longest chain that is drafted, and the token after it.
    chains = [backend.drafters[method.label].num_drafts + 2 for method in chosen if method.kind.shape == "chain"]
    length = request.length or max(LENGTH, *chains, 0)
    labels = [method.label for method in chosen]
    return measure(backend, labels, prompts, settings, request.num_draws, length, request.seed)


def open_backend(request: RunRequest, chosen: Sequence[methods.Method], seed: int) -> LocalBackend:
    model = model_of(request, chosen)
    if request.dtype not in (None, *DTYPES):
        raise unknown("dtype", str(request.dtype), list(DTYPES))
    return open_engine(model, chosen, machine_of(request), LENGTH, seed)


def measure(
    backend: LocalBackend,
    labels: Sequence[str],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    num_draws: int,
    length: int = LENGTH,
    seed: int = 0,
) -> list[Draws]:
    """Continue each prompt `num_draws` times with each of these methods."""
    jobs = list(_jobs(prompts, num_draws, seed, _rows(backend, labels, length)))
    parts: dict[str, list[Columns]] = {label: [] for label in labels}
    guided: tuple[PromptDraws, Guide, Odds] | None = None
    for job, label in with_bar([(job, label) for job in jobs for label in labels], "drawing"):
        if guided is None or guided[0] != job:
            guided = (job, *_draw_guide(backend, job, settings, length))
        parts[label].append(_draw_guided(backend, label, *guided, settings, length))
    return [Draws(label, num_draws * len(prompts), _join(some)) for label, some in parts.items()]


def _draw_guide(backend: LocalBackend, job: PromptDraws, settings: Settings, length: int) -> tuple[Guide, Odds]:
    """Draw with plain decoding, which guides the drafts of every method; return it with its odds."""
    prompts = [job.prompt] * len(job.seeds)
    answers = continue_prompts(backend.target, NoDrafter(), prompts, length, Sampling.of(settings), job.seeds)
    tokens = [answer.tokens for answer in answers]
    odds = odds_of(backend.judge.model, job.prompt, tokens, settings)
    return Guide(tokens, odds.log_p, job.seeds[0]), odds


def _draw_guided(
    backend: LocalBackend, label: str, job: PromptDraws, guide: Guide, odds: Odds, settings: Settings, length: int
) -> Columns:
    prompts, drafter, sampling = [job.prompt] * len(job.seeds), backend.drafters[label], Sampling.of(settings)
    answers = continue_prompts(backend.target, drafter, prompts, length, sampling, job.seeds, guide)
    # With the same seed most methods draw what plain decoding draws, whose odds are known.
    other = [row for row, answer in enumerate(answers) if answer.tokens != guide.answers[row]]
    if other:
        tokens = [answers[row].tokens for row in other]
        odds = odds.with_rows(other, odds_of(backend.judge.model, job.prompt, tokens, settings))
    return score_answers(answers, odds, seed=job.seeds[0])


def _jobs(prompts: Sequence[Sequence[int]], num_draws: int, seed: int, rows: int) -> Iterator[PromptDraws]:
    """Every answer has a seed of its own, the same for all methods."""
    for number, prompt in enumerate(prompts):
        first = (seed * len(prompts) + number) * num_draws
        for start in range(0, num_draws, rows):
            yield PromptDraws(tuple(prompt), range(first + start, first + min(start + rows, num_draws)))


def _rows(backend: LocalBackend, labels: Sequence[str], length: int) -> int:
    widest = max(length, *(backend.drafters[label].num_drafts + 1 for label in labels))
    return max(1, min(ROWS, ENTRIES // (widest * len(backend.target.model.get_input_embeddings().weight))))


def _join(parts: Sequence[Mapping[str, Any]]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}
