"""Continue a few prompts many times under each method, so that what is drawn can be held against the model's own.

A prompt proves something only where the model hesitates, and the draft is sometimes right and sometimes wrong. So a few
answers are drawn by plain decoding, and cut where that is so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_bench import methods
from dflash_bench.bars import with_bar
from dflash_bench.errors import UserError, unknown
from dflash_bench.models import presets
from dflash_bench.records import Cell, Draws, Message, Settings
from dflash_bench.run.opening import Wanted, opened
from dflash_bench.run.resolving import drafts_of

if TYPE_CHECKING:
    from dflash_bench.engine.continuations import Continuation
    from dflash_bench.engine.local import LocalBackend

METHODS = ("dflash", "dflash:rule=rejection")
NUM_DRAWS = 1024
"""Answers to each prompt by each method. `results/distribution.md` says what so many find."""
QUESTIONS = ("Add 3 and 4.", "Write a Python function.", "Tell me a story.", "Who is older?")
"""Short ones, because every draw reads them again."""
LENGTH = 3
"""Tokens drawn: one from prefill, and two that pass through verification, in one round or in two."""
REACH = 8
"""An answer is cut before one of its first so many tokens."""
NUM_PLACES = 3
"""Prompts for each method: the best of all questions and places to cut."""
PILOT, PILOT_SEEDS = 8, 2**40
"""Draws that tell how good a place is, and where their seeds begin."""
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
    entropy: float
    """Nats, of the token that comes next."""


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

    def draws(self, method: str, prompt: str, expected: Mapping[Cell, float]) -> Draws:
        decided = (self.num_kept, self.num_refused) if self.num_drafted else (None, None)
        return Draws(method, prompt, expected, self.counts, *decided)


def perform(request: Request) -> list[Draws]:
    """Raises UserError for what cannot be measured."""
    settings, chosen = request.settings, [methods.parse(text) for text in request.methods]
    if settings.greedy:
        raise UserError("at temperature 0 nothing is drawn: 'run' checks answers token for token; give --temperature")
    for method in chosen:
        if method.kind.is_probe:
            raise UserError(f"--method {method.label} measures the engine: there are no draws to test")
    backend = _open(request, chosen)
    labels = [method.label for method in chosen]
    places = {label: chosen_places(backend, label, settings, request.seed) for label in labels}
    return measure(backend, places, settings, request.num_draws, request.seed)


def measure(
    backend: LocalBackend, places: Mapping[str, Sequence[Place]], settings: Settings, num_draws: int, seed: int = 0
) -> list[Draws]:
    """Each method's places, continued `num_draws` times."""
    from dflash_bench.engine.continuations import cell_of, drawn, expected
    from dflash_bench.engine.sampling import Sampling

    model, sampling = backend.target.model, Sampling.of(settings)
    distinct = list(dict.fromkeys(place for some in places.values() for place in some))
    cells = {
        place: expected(model, place.tokens, LENGTH, settings, num_draws)
        for place in with_bar(distinct, "asking the published model")
    }
    tallies = {(label, place): _Tally() for label, some in places.items() for place in some}
    for job in with_bar(list(_jobs(list(tallies), num_draws, seed)), "drawing"):
        prompts = [job.place.tokens] * len(job.seeds)
        for answer in drawn(backend.target, backend.drafters[job.method], prompts, LENGTH, sampling, job.seeds):
            tallies[job.method, job.place].add(answer, cell_of(answer.tokens, cells[job.place]))
    return [tally.draws(label, place.text, cells[place]) for (label, place), tally in tallies.items()]


def _jobs(pairs: Sequence[tuple[str, Place]], num_draws: int, seed: int) -> Iterator[Job]:
    """Every draw of the whole command has a seed of its own: tests of one method say nothing about another's."""
    for number, (label, place) in enumerate(pairs):
        first = (seed * len(pairs) + number) * num_draws
        for start in range(0, num_draws, ROWS):
            yield Job(label, place, range(first + start, first + min(start + ROWS, num_draws)))


def chosen_places(backend: LocalBackend, label: str, settings: Settings, seed: int) -> list[Place]:
    """Where the method's first draft is sometimes kept and sometimes not, and its rule has something to decide.

    A few draws at every place tell; they have seeds of their own, and are not counted later.
    """
    from dflash_bench.engine.continuations import drawn
    from dflash_bench.engine.sampling import Sampling

    places, drafter, sampling = _candidates(backend, settings, seed), backend.drafters[label], Sampling.of(settings)
    prompts = [place for place in places for _ in range(PILOT)]
    kept: Counter[Place] = Counter()
    for start in with_bar(range(0, len(prompts), ROWS), "choosing prompts"):
        batch = prompts[start : start + ROWS]
        seeds = range(PILOT_SEEDS + start, PILOT_SEEDS + start + len(batch))
        for place, answer in zip(
            batch, drawn(backend.target, drafter, [p.tokens for p in batch], 2, sampling, seeds), strict=True
        ):
            kept[place] += answer.num_accepted > 0

    def worth(place: Place) -> tuple[float, float]:
        undecided = min(kept[place], PILOT - kept[place]) / PILOT
        return undecided * min(1.0, place.entropy), -abs(place.entropy - 1)

    return sorted(places, key=worth, reverse=True)[:NUM_PLACES]


def _candidates(backend: LocalBackend, settings: Settings, seed: int) -> list[Place]:
    """Each question with each beginning of an answer to it, as plain decoding draws it."""
    from dflash_bench.engine.continuations import drawn, entropies
    from dflash_bench.engine.drafter import NoDrafter
    from dflash_bench.engine.sampling import Sampling

    places = []
    for question in QUESTIONS:
        tokens = backend.encode([Message("user", question)])
        (plain,) = drawn(backend.target, NoDrafter(), [tokens], REACH, Sampling.of(settings), [seed])
        text = [*tokens, *plain.tokens]
        open_by = entropies(backend.target.model, text, settings, REACH)
        for length, entropy in enumerate(open_by):
            start = backend.tokenizer.decode(plain.tokens[:length])
            places.append(Place(f"{question} {start}".rstrip(), tuple(text[: len(tokens) + length]), entropy))
    return places


def _open(request: Request, chosen: Sequence[methods.Method]) -> LocalBackend:
    drafts, needed = presets.parse_drafts(request.drafts), drafts_of(chosen)
    for draft in drafts:
        if draft not in needed:
            raise UserError(f"--draft {draft}= has no effect: none of the methods uses it")
    model = presets.combine(request.model, request.target, drafts)
    presets.require_drafts(model, needed)
    if request.dtype not in ("float32", "bfloat16", "float16"):
        raise unknown("dtype", request.dtype, ["float32", "bfloat16", "float16"])
    is_nano = (request.model or request.target or "nano") == "nano"
    return opened(model, chosen, Wanted(request.device, request.dtype, is_small=is_nano), LENGTH, request.seed)
