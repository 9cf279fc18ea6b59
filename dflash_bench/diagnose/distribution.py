"""Continue a few prompts many times under each method, so that what is drawn can be held against the model's own.

By itself a method seldom comes to the far places of its drafts. So plain decoding draws the answers first, and drafts
are cut short, or begin with what the target is about to draw (`diagnose/forcing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.terminal import with_bar
from dflash_bench.core.types import COLUMNS, Columns, Draws, Message, Settings
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import model_of
from dflash_bench.runner.setup import machine_of, open_engine

if TYPE_CHECKING:
    from dflash_bench.diagnose.forcing import Guide
    from dflash_bench.diagnose.odds import Odds
    from dflash_bench.engine.backend import LocalBackend

METHODS = ("dflash", "dflash:rule=rejection")
NUM_DRAWS = 128
"""Answers to each prompt by each method. `results/distribution.md` says what so many find."""
QUESTIONS = ("Add 3 and 4.", "Write a Python function.", "Tell me a story.", "Who is older?")
"""Short ones, because every draw reads them again."""
LENGTH = 31
"""Tokens drawn of each answer; more where a method drafts more, so that a whole draft fits in."""
ROWS = 32
"""Continuations decoded together."""
DTYPES = ("float32", "bfloat16", "float16")
ENTRIES = 2**27
"""At most so many probabilities are held for one draft or answer of all rows: else fewer are decoded together."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """`of_run` has what `run` knows as well: methods, model, device and type."""

    of_run: RunRequest
    settings: Settings
    num_draws: int
    length: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PromptDraws:
    """Continuations of one prompt by all methods, one for each of these seeds, decoded together."""

    prompt: tuple[int, ...]
    seeds: range


def perform(request: DrawRequest) -> list[Draws]:
    """Raises UserError for what cannot be measured."""
    settings, chosen = request.settings, [methods.parse(text) for text in request.of_run.methods]
    if settings.greedy:
        raise UserError("at temperature 0 nothing is drawn: 'run' checks answers token for token; give --temperature")
    for method in chosen:
        if method.kind.is_probe:
            raise UserError(f"--method {method.label} measures the engine: there are no draws to test")
    backend = _open(request.of_run, chosen, request.seed)
    prompts = [tuple(backend.encode([Message("user", question)])) for question in QUESTIONS]
    labels = [method.label for method in chosen]
    length = request.length or length_for(backend, chosen)
    return measure(backend, labels, prompts, settings, request.num_draws, length, request.seed)


def length_for(backend: LocalBackend, chosen: Sequence[methods.Method]) -> int:
    """A first token, the longest chain that is drafted, and what follows it."""
    chains = [method.label for method in chosen if method.kind.shape == "chain"]
    return max(LENGTH, *(backend.drafters[label].num_drafts + 2 for label in chains), 0)


def measure(
    backend: LocalBackend,
    labels: Sequence[str],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    num_draws: int,
    length: int = LENGTH,
    seed: int = 0,
) -> list[Draws]:
    """Each prompt continued `num_draws` times by each of these methods."""
    jobs = list(_jobs(prompts, num_draws, seed, _rows(backend, labels, length)))
    parts: dict[str, list[Columns]] = {label: [] for label in labels}
    plain: tuple[PromptDraws, Guide, Odds] | None = None
    for job, label in with_bar([(job, label) for job in jobs for label in labels], "drawing"):
        if plain is None or plain[0] != job:
            plain = (job, *_plain(backend, job, settings, length))
        parts[label].append(_drawn(backend, label, job, *plain[1:], settings, length))
    return [Draws(label, num_draws * len(prompts), _joined(some)) for label, some in parts.items()]


def _plain(backend: LocalBackend, job: PromptDraws, settings: Settings, length: int) -> tuple[Guide, Odds]:
    """What plain decoding draws, which guides the drafts of every method, and its odds."""
    from dflash_bench.diagnose.forcing import Guide
    from dflash_bench.diagnose.odds import drawn, odds_of
    from dflash_bench.engine.drafter import NoDrafter
    from dflash_bench.engine.sampling import Sampling

    prompts = [job.prompt] * len(job.seeds)
    answers = drawn(backend.target, NoDrafter(), prompts, length, Sampling.of(settings), job.seeds)
    tokens = [answer.tokens for answer in answers]
    odds = odds_of(backend.judge.model, job.prompt, tokens, settings)
    return Guide(tokens, odds.log_p, job.seeds[0]), odds


def _drawn(
    backend: LocalBackend, label: str, job: PromptDraws, guide: Guide, odds: Odds, settings: Settings, length: int
) -> Columns:
    from dflash_bench.diagnose.odds import drawn, judged, odds_of
    from dflash_bench.engine.sampling import Sampling

    prompts = [job.prompt] * len(job.seeds)
    answers = drawn(backend.target, backend.drafters[label], prompts, length, Sampling.of(settings), job.seeds, guide)
    # The odds of the same answer are the same. With its seed most methods draw what plain decoding draws.
    other = [row for row, answer in enumerate(answers) if answer.tokens != guide.answers[row]]
    if other:
        tokens = [answers[row].tokens for row in other]
        odds = odds.replaced(other, odds_of(backend.judge.model, job.prompt, tokens, settings))
    return judged(answers, odds, seed=job.seeds[0])


def _jobs(prompts: Sequence[Sequence[int]], num_draws: int, seed: int, rows: int) -> Iterator[PromptDraws]:
    """Every answer has a seed of its own, which is the same under all methods."""
    for number, prompt in enumerate(prompts):
        first = (seed * len(prompts) + number) * num_draws
        for start in range(0, num_draws, rows):
            yield PromptDraws(tuple(prompt), range(first + start, first + min(start + rows, num_draws)))


def _rows(backend: LocalBackend, labels: Sequence[str], length: int) -> int:
    widest = max(length, *(backend.drafters[label].num_drafts + 1 for label in labels))
    return max(1, min(ROWS, ENTRIES // (widest * len(backend.target.model.get_input_embeddings().weight))))


def _joined(parts: Sequence[Mapping[str, Any]]) -> Columns:
    import numpy as np

    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def _open(request: RunRequest, chosen: Sequence[methods.Method], seed: int) -> LocalBackend:
    model = model_of(request, chosen)
    if request.dtype not in (None, *DTYPES):
        raise unknown("dtype", str(request.dtype), list(DTYPES))
    return open_engine(model, chosen, machine_of(request), LENGTH, seed)
