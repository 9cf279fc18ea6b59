"""Continue a few prompts many times under each method, so that what is drawn can be held against the model's own.

A prompt proves something only where the model hesitates, and the draft is sometimes right and sometimes wrong. So short
questions are answered by plain decoding, and answers cut where the next two tokens are neither certain nor quite open.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from dflash_bench import methods
from dflash_bench.bars import late
from dflash_bench.errors import UserError, unknown
from dflash_bench.models import presets
from dflash_bench.records import Cell, Draws, Message, Settings

if TYPE_CHECKING:
    from dflash_bench.engine.continuations import Continuation
    from dflash_bench.engine.local import LocalBackend

METHODS = ("dflash", "dflash:rule=rejection")
NUM_DRAWS = 2048
"""Answers to each prompt by each method. `results/distribution.md` says what so many find."""
QUESTIONS = ("Add 3 and 4.", "Write a Python function.", "Tell me a story.", "Who is older?")
"""Short ones, because every draw reads them again."""
LENGTH = 3
"""Tokens drawn: one from prefill, and two that pass through verification, in one round or in two."""
REACH = 12
"""An answer is cut after so many tokens at most."""
ENTROPY = 1.5
"""Nats: where an answer is cut, the next two tokens are to be about this open."""
ROWS = 256
"""Continuations decoded together."""


@dataclass(frozen=True, slots=True)
class Request:
    """The options of `verify-distribution`; None is "not given"."""

    methods: tuple[str, ...]
    settings: Settings
    num_draws: int
    seed: int = 0
    model: str | None = None
    target: str | None = None
    drafts: tuple[str, ...] = ()
    device: str | None = None
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Place:
    """A prompt, as text for people and as tokens for the model."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """Continuations of one prompt by one method, one for each of these seeds, decoded together."""

    method: str
    place: Place
    seeds: range


@dataclass(slots=True)
class _Tally:
    counts: Counter[Cell] = field(default_factory=Counter)
    num_drafted: int = 0
    num_kept: int = 0
    num_refused: int = 0

    def add(self, continuation: Continuation, cell: Cell) -> None:
        self.counts[cell] += 1
        if continuation.num_drafted:
            self.num_drafted += 1
            self.num_kept += continuation.num_accepted > 0
            self.num_refused += continuation.num_accepted == 0


def perform(request: Request) -> list[Draws]:
    """Raises UserError for what cannot be measured."""
    settings, chosen = request.settings, [methods.parse(text) for text in request.methods]
    if settings.greedy:
        raise UserError("at temperature 0 nothing is drawn: 'run' checks answers token for token; give --temperature")
    backend = _open(request, chosen)
    places = cut(backend, settings, request.seed)
    return measure(backend, [method.label for method in chosen], settings, places, request.num_draws, request.seed)


def measure(
    backend: LocalBackend,
    labels: Sequence[str],
    settings: Settings,
    places: Sequence[Place],
    num_draws: int,
    seed: int = 0,
) -> list[Draws]:
    """`num_draws` continuations of each place by each method."""
    from dflash_bench.engine.continuations import cell_of, drawn, expected
    from dflash_bench.engine.sampling import Sampling

    model, sampling = backend.target.model, Sampling.of(settings)
    cells = {
        place: expected(model, place.tokens, LENGTH, settings, num_draws)
        for place in late(places, "asking the published model")
    }
    tallies = {(label, place): _Tally() for label in labels for place in places}
    for job in late(list(_jobs(labels, places, num_draws, seed)), "drawing"):
        drafter = backend.drafters[job.method]
        for continuation in drawn(backend.target, drafter, job.place.tokens, LENGTH, sampling, job.seeds):
            cell = cell_of(continuation.tokens, cells[job.place])
            tallies[job.method, job.place].add(continuation, cell)
    return [
        Draws(
            method=label,
            prompt=place.text,
            expected=cells[place],
            counts=tally.counts,
            num_kept=tally.num_kept if tally.num_drafted else None,
            num_refused=tally.num_refused if tally.num_drafted else None,
        )
        for (label, place), tally in tallies.items()
    ]


def _jobs(labels: Sequence[str], places: Sequence[Place], num_draws: int, seed: int) -> Iterator[Job]:
    """Every draw of the whole command has a seed of its own: tests of one method say nothing about another's."""
    pairs = [(label, place) for label in labels for place in places]
    for number, (label, place) in enumerate(pairs):
        first = (seed * len(pairs) + number) * num_draws
        for start in range(0, num_draws, ROWS):
            yield Job(label, place, range(first + start, first + min(start + ROWS, num_draws)))


def cut(backend: LocalBackend, settings: Settings, seed: int, questions: Sequence[str] = QUESTIONS) -> list[Place]:
    """Each question with the beginning of an answer, up to where the model is about as open as wanted."""
    from dflash_bench.engine.continuations import drawn, entropies
    from dflash_bench.engine.decoding import NoDrafter
    from dflash_bench.engine.sampling import Sampling

    places = []
    for question in questions:
        tokens = backend.encode([Message("user", question)])
        (plain,) = drawn(backend.target, NoDrafter(), tokens, REACH, Sampling.of(settings), [seed])
        text = [*tokens, *plain.tokens]
        open_by = entropies(backend.target.model, text, settings, REACH + 1)
        off = [abs(first - ENTROPY) + abs(second - ENTROPY) for first, second in pairwise(open_by)]
        end = len(tokens) + off.index(min(off))
        start = backend.tokenizer.decode(text[len(tokens) : end])
        places.append(Place(f"{question} > {start}", tuple(text[:end])))
    return places


def _open(request: Request, chosen: Sequence[methods.Method]) -> LocalBackend:
    # Read when torch is imported: waiting threads that spin take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from dflash_bench.engine.local import open_backend
    from dflash_bench.engine.sampling import Sampling
    from dflash_bench.models.loading import load

    drafts, needed = presets.parse_drafts(request.drafts), list(dict.fromkeys(m.draft for m in chosen if m.draft))
    for draft in drafts:
        if draft not in needed:
            raise UserError(f"--draft {draft}= has no effect: none of the methods uses it")
    model = presets.combine(request.model, request.target, drafts)
    presets.require_drafts(model, needed)
    if request.dtype not in ("float32", "bfloat16", "float16"):
        raise unknown("dtype", request.dtype, ["float32", "bfloat16", "float16"])
    device = request.device or ("cuda" if torch.cuda.device_count() and request.model not in (None, "nano") else "cpu")
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", device):
        raise unknown("device", device, ["cpu", "cuda", "cuda:N"])
    if device == "cpu":
        torch.set_num_threads(1)
    models = load(model, needed, device, getattr(torch, request.dtype))
    return open_backend(models, model, chosen, LENGTH, Sampling.of(request.settings))
