"""`verify-distribution`: continue a few prompts many times with each method, to test the draws against the model.

Unmodified drafts are seldom accepted up to their far places. So plain decoding draws the answers first, and drafts are
cut short, or begin with the tokens that the target will draw (`diagnose/forcing.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash_bench.core import methods
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.types import Message, Settings
from dflash_bench.diagnose.forcing import FAVOURITES, Favourites, Guide, Proposal, forced
from dflash_bench.diagnose.goodness_of_fit import COLUMNS, SCORED, Columns, Draws
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import Drafter, NoDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits, Round
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import model_of
from dflash_bench.runner.setup import open_engine

# Continuations by the decoding loop, and what was known about each token before it was drawn.


@dataclass(frozen=True, slots=True)
class Spot:
    """A token's place in the draft of its round. Everything but `is_kept` is known before the target draws it."""

    depth: int = 0
    """The number of draft tokens up to and including this token; 0 if nothing was drafted."""
    is_bonus: bool = False
    """Whether the draft ended before it."""
    is_forced: bool = False
    """Whether the token was forced into the draft."""
    favourites: Mapping[int, float] | None = None
    """The draft's likeliest tokens at this place, with their probability; None if they cannot be tested."""
    is_kept: bool = False
    """Whether the drafted token was accepted."""

    @property
    def is_refusal(self) -> bool:
        """Whether the token replaces a drafted, unforced token that was rejected."""
        return self.depth > 0 and not (self.is_bonus or self.is_forced or self.is_kept)


@dataclass(frozen=True, slots=True)
class Continuation:
    """An answer of the loop, with a spot for every token."""

    tokens: tuple[int, ...]
    spots: tuple[Spot, ...]
    refused: Mapping[int, Tensor] = field(default_factory=dict)
    """The distribution [V] that a rejected token was drawn from, by the index of its replacement."""


def continue_prompts(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    length: int,
    sampling: Sampling,
    seeds: Sequence[int],
    guide: Guide | None = None,
) -> list[Continuation]:
    """Decode continuations of `length` tokens in a batch, for prompts with a seed each; no token ends them early.

    With a guide, drafts are changed (`forcing.py`).
    """
    limits, clock = Limits(length), HostClock()
    if guide is None:
        rounds = list(decode(target, drafter, prompts, limits, sampling, clock, seeds))
        proposals = [Proposal([0] * len(seeds), None)] * (len(rounds) - 1)
    else:
        rounds = []
        with forced(drafter, guide) as proposals:
            for step in decode(target, drafter, prompts, limits, sampling, clock, seeds):
                rounds.append(step)
                if proposals:
                    proposals[-1] = proposals[-1].settled(step.accepted)
    return [_continuation(rounds, proposals, row) for row in range(len(seeds))]


def _continuation(rounds: Sequence[Round], proposals: Sequence[Proposal], row: int) -> Continuation:
    tokens, spots, refused = list(rounds[0].emitted[row] or ()), [Spot()], {}
    for step, proposal in zip(rounds[1:], proposals, strict=True):
        new = step.emitted[row]
        if new is not None:
            tokens += new
            spots += _spots(new, step, proposal, row)
            if proposal.refused is not None and len(new) == step.accepted[row] + 1 and spots[-1].is_refusal:
                refused[len(tokens) - 1] = proposal.refused[row]
    return Continuation(tuple(tokens), tuple(spots), refused)


def _spots(new: Sequence[int], step: Round, proposal: Proposal, row: int) -> Iterator[Spot]:
    drafted = step.drafted_ids[row]
    if step.verified is not None:
        drafted = drafted[: step.verified[row]]
    if not drafted:
        yield from (Spot() for _ in new)
        return
    parents = range(-1, len(drafted) - 1) if step.drafted_parents is None else step.drafted_parents[row]
    # The nodes of the tokens so far; siblings may hold the same token.
    here = {-1}
    for depth, token in enumerate(new, start=1):
        below = [node for node, parent in enumerate(parents) if parent in here]
        yield Spot(
            depth,
            is_bonus=not below and depth > proposal.forced[row],
            is_forced=depth <= proposal.forced[row],
            favourites=_favourites_at([drafted[node] for node in below], proposal, row, depth),
            is_kept=depth <= step.accepted[row],
        )
        here = {node for node in below if drafted[node] == token}


def _favourites_at(children: Sequence[int], proposal: Proposal, row: int, depth: int) -> Favourites | None:
    if not children or proposal.is_drawn_tree or depth <= proposal.forced[row]:
        return None
    if proposal.favourites is None:
        return dict.fromkeys(children, 1.0)
    return proposal.favourites[row][depth - 1]


# The published model's probabilities, by transformers' code alone: a forward pass without a cache, and its logits
# processors. It reads the drawn answers, so every place has its exact distribution, independent of the tested code.


EDGES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Relative differences of probabilities below which another forward pass may order them differently."""
LOGITS = 2**24
"""The number of logits processed at a time."""
LEAST_LEFT = 10
"""The least residual of a tested rejection, as a multiple of the largest shift by rounding."""
CERTAIN = 0.98
"""If a token is at least this likely, the draw carries little information."""


@dataclass(frozen=True, slots=True)
class Odds:
    """The published model's distribution of each token of equally long answers."""

    log_p: Tensor
    """[B, L, V] in float32, -inf for tokens that the filters leave out."""
    on_edge: Tensor
    """[B, L], true where rounding decides which tokens the filters leave out."""
    edge: float = EDGES[torch.float32]
    """Like `EDGES`, for the model's logits."""

    def with_rows(self, rows: Sequence[int], new: Odds) -> Odds:
        """Return a copy with other answers in these rows."""
        log_p, on_edge = self.log_p.clone(), self.on_edge.clone()
        log_p[rows], on_edge[rows] = new.log_p, new.on_edge
        return replace(self, log_p=log_p, on_edge=on_edge)


@torch.inference_mode()
def odds_of(model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]], settings: Settings) -> Odds:
    weights = model.get_input_embeddings().weight
    texts = torch.tensor([[*prompt, *answer] for answer in answers], device=weights.device)
    length, parts = len(answers[0]), []
    for part in texts.split(max(1, LOGITS // (length * max(1, len(weights))))):
        logits, seen = _logits(model, part, length, settings)
        log_p = torch.log_softmax(_scores(seen, logits, settings).double(), dim=-1).float()
        on_edge = _on_edge(seen, logits, settings, EDGES[logits.dtype])
        parts.append((log_p.unflatten(0, (len(part), length)), on_edge.unflatten(0, (len(part), length))))
    log_p, on_edge = (torch.cat(both) for both in zip(*parts, strict=True))
    return Odds(log_p, on_edge, EDGES[logits.dtype])


@torch.inference_mode()
def score_answers(answers: Sequence[Continuation], odds: Odds, seed: int) -> Columns:
    """Return the columns of `Draws`, a row per token, answer by answer.

    `seed` fixes the random numbers that place a token within its share of [0, 1).
    """
    random, (_, length, size) = torch.Generator().manual_seed(seed), odds.log_p.shape
    step, parts = max(1, LOGITS // (length * size)), []
    for first in range(0, len(answers), step):
        batch = answers[first : first + step]
        log_p = odds.log_p[first : first + step].flatten(0, 1).double()
        tokens = torch.tensor([answer.tokens for answer in batch], device=log_p.device).flatten()
        ids, favour = _favourites(batch, log_p)
        uniform = torch.rand(len(log_p), generator=random, dtype=torch.float64).to(log_p.device)
        on_edge = odds.on_edge[first : first + step].flatten()
        columns = score_tokens(log_p, tokens, ids, favour, uniform, on_edge)
        parts.append({name: column.cpu().numpy() for name, column in columns.items()} | _spot_columns(batch))
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


@torch.inference_mode()
def score_replacements(answers: Sequence[Continuation], odds: Odds, seed: int) -> Columns:
    """Return the columns of `Draws.replaced`, of the replacements of rejected tokens drawn from q.

    Rejection sampling draws a replacement from max(p - q, 0), normalised.
    """
    generator, size = torch.Generator().manual_seed(seed), odds.log_p.shape[-1]
    places = [(row, at, q) for row, answer in enumerate(answers) for at, q in answer.refused.items()]
    number = sum(len(answer.tokens) for answer in answers)
    found = {name: np.zeros(number, bool) if name.startswith("is_") else np.full(number, np.nan) for name in SCORED}
    step = max(1, LOGITS // size)
    for first in range(0, len(places), step):
        rows, ats, qs = (list(column) for column in zip(*places[first : first + step], strict=True))
        p = odds.log_p[rows, ats].double().exp()
        q = torch.stack(qs).to(p)
        tokens = torch.tensor([answers[row].tokens[at] for row, at in zip(rows, ats, strict=True)], device=p.device)
        left = (p - q).clamp(min=0)
        rest = left.sum(dim=1, keepdim=True)
        # If the residual is small, or p is close to q, rounding decides it.
        is_close = ((p - q).abs() <= odds.edge * p).gather(1, tokens[:, None])[:, 0]
        on_edge = odds.on_edge[rows, ats] | is_close | (rest[:, 0] < LEAST_LEFT * odds.edge)
        favour, ids = q.topk(min(FAVOURITES, size), dim=-1)
        uniform = torch.rand(len(p), generator=generator, dtype=torch.float64).to(p.device)
        columns = score_tokens((left / rest).log(), tokens, ids, favour, uniform, on_edge)
        at = np.array(rows) * odds.log_p.shape[1] + np.array(ats)
        for name, column in columns.items():
            found[name][at] = column.cpu().numpy()
    return found


def score_tokens(
    log_p: Tensor, tokens: Tensor, ids: Tensor, favour: Tensor, uniform: Tensor, on_edge: Tensor
) -> dict[str, Tensor]:
    """Return columns [N] from log-probabilities [N, V], drawn tokens [N], and the draft's favourites.

    `ids` and `favour` [N, K] are the favourites and their probability by the draft.
    """
    p, drawn = log_p.exp(), tokens[:, None]
    p_drawn, possible = p.gather(1, drawn), p > 0
    # The mass before the token, by rank and by id, where the token's share of [0, 1) begins.
    by_id = torch.arange(p.shape[1], device=p.device) < drawn
    ranks = (p * ((p > p_drawn) | ((p == p_drawn) & by_id))).sum(dim=1)
    before = (p * by_id).sum(dim=1)
    share = p_drawn[:, 0] * uniform
    is_possible = p_drawn[:, 0] > 0
    columns = {
        "is_open": (p.amax(dim=1) < CERTAIN) & ~on_edge,
        "is_impossible": ~is_possible & ~on_edge,
        "rank": ranks + share,
        "by_id": before + share,
    }
    scores = log_p.masked_fill(~possible, 0)
    columns |= _moments("likelihood", p, scores, scores.gather(1, drawn)[:, 0])
    p_liked = p.gather(1, ids) * (favour > 0)
    # Many errors of a verify rule make this grow with the draft's share. It never exceeds 1.
    leaning = torch.where(favour > 0, favour / (favour + p_liked), 0)
    columns |= _moments("leaning", p_liked, leaning, (leaning * (ids == drawn)).sum(dim=1))
    for name, column in columns.items():
        if column.dtype == torch.float64:
            columns[name] = column.masked_fill(on_edge | ~is_possible, torch.nan)
    return columns


def _moments(name: str, p: Tensor, score: Tensor, drawn: Tensor) -> dict[str, Tensor]:
    """Return a score's value for the drawn tokens [N], its mean, variance and third central moment under p [N, K].

    p may leave out tokens whose score is 0.
    """
    mean = (p * score).sum(dim=1)
    rest = (1 - p.sum(dim=1)).clamp(min=0)
    off = score - mean[:, None]
    second = (p * off**2).sum(dim=1) + rest * mean**2
    third = (p * off**3).sum(dim=1) - rest * mean**3
    return {name: drawn, f"{name}_mean": mean, f"{name}_variance": second, f"{name}_third": third}


def _favourites(answers: Sequence[Continuation], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the draft's favourites [N, K] and their probability, 0 where there are fewer."""
    places = [spot.favourites or {} for answer in answers for spot in answer.spots]
    most = max(1, *map(len, places))
    ids = torch.zeros(len(places), most, dtype=torch.long)
    favour = torch.zeros(len(places), most, dtype=like.dtype)
    filled = torch.arange(most) < torch.tensor([len(favourites) for favourites in places])[:, None]
    ids[filled] = torch.tensor([token for favourites in places for token in favourites], dtype=torch.long)
    listed = [share for favourites in places for share in favourites.values()]
    favour[filled] = torch.tensor(listed, dtype=like.dtype)
    return ids.to(like.device), favour.to(like.device)


def _spot_columns(answers: Sequence[Continuation]) -> dict[str, Any]:
    spots = [spot for answer in answers for spot in answer.spots]
    return {
        "place": np.concatenate([np.arange(1, len(answer.tokens) + 1) for answer in answers]),
        "depth": np.array([spot.depth for spot in spots]),
        "is_bonus": np.array([spot.is_bonus for spot in spots]),
        "is_forced": np.array([spot.is_forced for spot in spots]),
        "is_kept": np.array([spot.is_kept for spot in spots]),
    }


def _logits(model: Any, texts: Tensor, length: int, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return logits [B * length, V] of the last tokens of texts [B, T], and the tokens before each of them [..., T].

    Later tokens are masked by the text's first token: a penalty depends only on which tokens occur.
    """
    options = {"logits_to_keep": length} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(texts[:, :-1], use_cache=False, **options).logits[:, -length:].flatten(0, 1)
    if settings.repetition_penalty == 1:
        return logits, texts[:1, :1].expand(len(logits), 1)
    ends = torch.arange(texts.shape[1] - length, texts.shape[1], device=texts.device)
    was_read = torch.arange(texts.shape[1], device=texts.device) < ends[:, None]
    return logits, torch.where(was_read, texts[:, None], texts[:, :1, None]).flatten(0, 1).to(logits.device)


def _on_edge(texts: Tensor, logits: Tensor, settings: Settings, edge: float) -> Tensor:
    """Return a mask [N] of places where filters stricter or laxer by `edge` would keep other tokens."""
    differ = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if settings.top_p < 1:
        # The mass of all tokens no likelier than the given token: tokens are dropped while it is at most 1 - top_p.
        before = _scores(texts, logits, replace(settings, top_p=1.0, min_p=0.0)).sort(dim=-1).values
        differ |= ((before.softmax(dim=-1).cumsum(dim=-1) - (1 - settings.top_p)).abs() < edge).any(dim=-1)
    if settings.min_p > 0:
        stricter = replace(settings, min_p=settings.min_p * (1 + edge))
        laxer = replace(settings, min_p=settings.min_p * (1 - edge))
        left = [_scores(texts, logits, each).isfinite() for each in (stricter, laxer)]
        differ |= (left[0] != left[1]).any(dim=-1)
    if 0 < settings.top_k < logits.shape[-1]:
        unfiltered = _scores(texts, logits, replace(settings, top_k=0, top_p=1.0, min_p=0.0)).log_softmax(dim=-1)
        best = unfiltered.topk(settings.top_k + 1, dim=-1).values
        differ |= best[:, -2] - best[:, -1] < edge
    return differ


def _scores(texts: Tensor, logits: Tensor, settings: Settings) -> Tensor:
    """Apply transformers' processors to logits [N, V], in the order of its generate()."""
    processors = LogitsProcessorList()
    if settings.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(float(settings.repetition_penalty)))
    processors.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k:
        processors.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        processors.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        processors.append(MinPLogitsWarper(settings.min_p))
    scores: Tensor = processors(texts.to(logits.device), logits.float())
    return scores


METHODS = ("dflash", "dflash:rule=rejection")
NUM_DRAWS = 128
"""Answers per prompt and method. `results/exactness/distribution.md` shows their power."""
QUESTIONS = ("Add 3 and 4.", "Write a Python function.", "Tell me a story.", "Who is older?")
"""Short, because every draw reads them again."""
LENGTH = 31
"""Tokens drawn per answer; more for longer drafts, so that a whole draft fits."""
ROWS = 32
"""Continuations decoded together."""
DTYPES = ("float32", "bfloat16", "float16")
ENTRIES = 2**27
"""The most probabilities held for a draft or answer of all rows; it limits the batch."""


@dataclass(frozen=True, slots=True)
class DrawRequest:
    """`of_run` holds the options shared with `run`: methods, model, device and dtype."""

    of_run: RunRequest
    settings: Settings
    num_draws: int
    length: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PromptDraws:
    """A batch of continuations of the same prompt, one per seed."""

    prompt: tuple[int, ...]
    seeds: range


Tell = Callable[[str], None]
"""A callable that takes a line of progress."""


def draw(request: DrawRequest, tell: Tell) -> list[Draws]:
    """Draw with all methods of a request. Raises UserError for a request that cannot be measured."""
    settings, chosen = request.settings, [methods.parse(text) for text in request.of_run.methods]
    if settings.greedy:
        raise UserError("at temperature 0 nothing is drawn: 'run' checks answers token for token; give --temperature")
    for method in chosen:
        if method.kind.is_probe:
            raise UserError(f"--method {method.label} measures the engine: there are no draws to test")
    tell("loading the models")
    backend = open_backend(request.of_run, chosen, request.seed)
    prompts = [tuple(backend.encode([Message("user", question)])) for question in QUESTIONS]
    # A first token, the longest drafted chain, and the token after it.
    chains = [backend.drafters[method.label].num_drafts + 2 for method in chosen if method.kind.shape == "chain"]
    length = request.length or max(LENGTH, *chains, 0)
    labels = [method.label for method in chosen]
    return measure(backend, labels, prompts, settings, request.num_draws, length, request.seed, tell)


def open_backend(request: RunRequest, chosen: Sequence[methods.Method], seed: int) -> LocalBackend:
    model = model_of(request, chosen)
    if request.dtype not in (None, *DTYPES):
        raise unknown("dtype", str(request.dtype), list(DTYPES))
    return open_engine(model, chosen, replace(request, seed=seed), LENGTH)


def measure(
    backend: LocalBackend,
    labels: Sequence[str],
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    num_draws: int,
    length: int = LENGTH,
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> list[Draws]:
    """Continue each prompt `num_draws` times with each of these methods."""
    jobs = list(_jobs(prompts, num_draws, seed, _rows(backend, labels, length)))
    parts: dict[str, list[tuple[Columns, Columns]]] = {label: [] for label in labels}
    guided: tuple[PromptDraws, Guide, Odds] | None = None
    for number, (job, label) in enumerate(product(jobs, labels)):
        tell(f"drawing: {number}/{len(jobs) * len(labels)}, {label}")
        if guided is None or guided[0] != job:
            guided = (job, *_draw_guide(backend, job, settings, length))
        parts[label].append(_draw_guided(backend, label, *guided, settings, length))
    number = num_draws * len(prompts)
    return [
        Draws(label, number, _join([one for one, _ in some]), _join([replaced for _, replaced in some]))
        for label, some in parts.items()
    ]


def _draw_guide(backend: LocalBackend, job: PromptDraws, settings: Settings, length: int) -> tuple[Guide, Odds]:
    """Draw with plain decoding; return its answers as the guide for all methods' drafts, with their odds."""
    prompts = [job.prompt] * len(job.seeds)
    answers = continue_prompts(backend.target, NoDrafter(), prompts, length, Sampling.of(settings), job.seeds)
    tokens = [answer.tokens for answer in answers]
    odds = odds_of(backend.judge.model, job.prompt, tokens, settings)
    return Guide(tokens, odds.log_p, job.seeds[0]), odds


def _draw_guided(
    backend: LocalBackend, label: str, job: PromptDraws, guide: Guide, odds: Odds, settings: Settings, length: int
) -> tuple[Columns, Columns]:
    """Return the columns of `Draws`: of all tokens, and of replacements."""
    prompts, drafter, sampling = [job.prompt] * len(job.seeds), backend.drafters[label], Sampling.of(settings)
    answers = continue_prompts(backend.target, drafter, prompts, length, sampling, job.seeds, guide)
    # With the same seed most methods draw the same tokens as plain decoding, whose odds are known.
    other = [row for row, answer in enumerate(answers) if answer.tokens != guide.answers[row]]
    if other:
        tokens = [answers[row].tokens for row in other]
        odds = odds.with_rows(other, odds_of(backend.judge.model, job.prompt, tokens, settings))
    return score_answers(answers, odds, job.seeds[0]), score_replacements(answers, odds, job.seeds[0])


def _jobs(prompts: Sequence[Sequence[int]], num_draws: int, seed: int, rows: int) -> Iterator[PromptDraws]:
    """Yield batches of answers to draw, with a seed per answer that all methods share."""
    for number, prompt in enumerate(prompts):
        first = (seed * len(prompts) + number) * num_draws
        for start in range(0, num_draws, rows):
            yield PromptDraws(tuple(prompt), range(first + start, first + min(start + rows, num_draws)))


def _rows(backend: LocalBackend, labels: Sequence[str], length: int) -> int:
    widest = max(length, *(backend.drafters[label].num_drafts + 1 for label in labels))
    return max(1, min(ROWS, ENTRIES // (widest * len(backend.target.model.get_input_embeddings().weight))))


def _join(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
