"""One prompt continued many times: what the loop draws, and what the published model says it should draw.

What should come is asked of transformers' code alone: its forward pass without any cache, and its own logits
processors. Nothing of what is being tested has a say in what is right.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

from dflash_bench.engine.clock import HostClock
from dflash_bench.engine.decoding import decode
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.sequences import Limits
from dflash_bench.engine.target import Target
from dflash_bench.records import OTHER, Cell, Settings

EXPANDED = 5.0
"""A beginning that is expected this often is followed further; what it goes on with could not be tested otherwise."""
LISTED = 0.05
"""A token that is expected this often has a cell of its own; cells are added up before they are tested."""
EDGE = 1e-4
"""Probabilities that differ by less than this share may be told apart in another order by another forward pass."""
BATCH = 64
"""Texts that the published model reads at once."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """One answer of the loop, and what became of the first draft made for it."""

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int


def drawn(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    length: int,
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[Continuation]:
    """One continuation of `length` tokens, at least 2, for each prompt and its seed, decoded together.

    Nothing ends one early.
    """
    rounds = list(decode(target, drafter, prompts, Limits(length), sampling, HostClock(), seeds))
    first = rounds[1]
    return [
        Continuation(
            tokens=tuple(token for step in rounds for token in step.emitted[row] or ()),
            num_drafted=first.drafted[row],
            num_accepted=first.accepted[row],
        )
        for row in range(len(seeds))
    ]


@torch.inference_mode()
def expected(model: Any, prompt: Sequence[int], length: int, settings: Settings, num_draws: int) -> dict[Cell, float]:
    """How likely the published model goes on in which way: cells that exclude each other, and sum to 1.

    A cell is a beginning of at most `length` tokens. Where it ends in `OTHER`, it is any token that its elder
    siblings are not; where it is shorter without that, it is too seldom to be followed further, or rounding decides
    which tokens the filters leave after it.
    """
    cells: dict[Cell, float] = {}
    level: dict[Cell, float] = {(): 1.0}
    for depth in range(1, length + 1):
        following: dict[Cell, float] = {}
        for start, share, p, on_edge in _next_tokens(model, prompt, level, settings):
            if on_edge:
                cells[start or (OTHER,)] = share
                continue
            listed = (p * share * num_draws >= LISTED).nonzero()[:, 0]
            for token, q in zip(listed.tolist(), p[listed].tolist(), strict=True):
                followed = depth < length and q * share * num_draws >= EXPANDED
                (following if followed else cells)[*start, token] = q * share
            p[listed] = 0
            cells[*start, OTHER] = float(p.sum()) * share
        level = following
    return cells


def cell_of(tokens: Sequence[int], cells: Mapping[Cell, float]) -> Cell:
    """The one of the expected cells that this continuation falls into."""
    for end in range(1, len(tokens) + 1):
        cell = tuple(tokens[:end])
        if cell in cells:
            return cell
        if (*cell, OTHER) not in cells:  # it was not followed either
            return (*cell[:-1], OTHER)
    raise AssertionError("the cells are those of longer continuations")


@torch.inference_mode()
def entropies(model: Any, text: Sequence[int], settings: Settings, num_places: int) -> list[float]:
    """Of the next token, in nats, after each of the text's last places."""
    row = torch.tensor([list(text)], device=model.get_input_embeddings().weight.device)
    logits = model(row, use_cache=False).logits[0, -num_places:].float()
    starts = [row[:, : len(text) - num_places + 1 + i] for i in range(num_places)]
    log_p = torch.cat([_processed(start, one[None], settings) for start, one in zip(starts, logits, strict=True)])
    given: list[float] = torch.special.entr(log_p.exp()).sum(dim=-1).tolist()
    return given


def _next_tokens(
    model: Any, prompt: Sequence[int], level: Mapping[Cell, float], settings: Settings
) -> Iterator[tuple[Cell, float, Tensor, bool]]:
    """Each beginning with its probability, those of what follows it, [V] on the CPU, and is it on a filter's edge?"""
    starts = list(level)
    device = model.get_input_embeddings().weight.device
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for first in range(0, len(starts), BATCH):
        batch = starts[first : first + BATCH]
        texts = torch.tensor([[*prompt, *start] for start in batch], device=device)
        logits = model(texts, use_cache=False, **options).logits[:, -1].float()
        p = _processed(texts, logits, settings).exp().cpu()
        edges = _on_edge(texts, logits, settings).tolist()
        for start, row, on_edge in zip(batch, p, edges, strict=True):
            yield start, level[start], row, on_edge


def _on_edge(texts: Tensor, logits: Tensor, settings: Settings) -> Tensor:
    """[N], true where filters that are stricter or laxer by `EDGE` leave other tokens."""
    stricter = replace(settings, top_p=max(0.0, settings.top_p - EDGE), min_p=settings.min_p * (1 + EDGE))
    laxer = replace(settings, top_p=min(1.0, settings.top_p + EDGE), min_p=settings.min_p * (1 - EDGE))
    if settings.top_p >= 1:
        stricter = replace(stricter, top_p=1.0)
    left = [_processed(texts, logits, each).isfinite() for each in (stricter, laxer)]
    differ: Tensor = (left[0] != left[1]).any(dim=-1)
    if 0 < settings.top_k < logits.shape[-1]:
        unfiltered = _processed(texts, logits, replace(settings, top_k=0, top_p=1.0, min_p=0.0))
        best = unfiltered.topk(settings.top_k + 1, dim=-1).values
        differ |= best[:, -2] - best[:, -1] < EDGE
    return differ


def _processed(texts: Tensor, logits: Tensor, settings: Settings) -> Tensor:
    """Log-probabilities [N, V] in float64 after transformers' processors, in the order in which generate() has them."""
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
    scores: Tensor = processors(texts.to(logits.device), logits)
    return torch.log_softmax(scores.double(), dim=-1)
