"""The target's own answers to training prompts: what drafts learn from.

A greedy answer is first guessed (the generator's worked answer) and checked in one forward pass: if the target would
choose each of its tokens, it *is* the greedy answer. Only the others, and all sampled ones, are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from nano.data import encode, training_tasks

MAX_NEW_TOKENS = 140


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids; the answer, stop token included, starts at `prompt_length`."""

    ids: list[int]
    prompt_length: int


def prompts(seed: int, tokenizer: Any, max_length: int) -> Iterator[Conversation]:
    """Training prompts with the generator's answers."""
    for i, task in enumerate(training_tasks(seed)):
        for sample in encode(task, tokenizer, thinking=i % 16 == 0):
            start = len(sample.weights) - next(
                (i for i, w in enumerate(reversed(sample.weights)) if w != 1.0), len(sample.weights)
            )
            if len(sample.ids) <= max_length:
                yield Conversation(sample.ids, start)


@torch.inference_mode()
def confirmed(model: Any, batch: Sequence[Conversation], pad: int) -> list[bool]:
    """Which answers are what greedy decoding gives, by one forward pass over all of them."""
    width = max(len(item.ids) for item in batch)
    ids = torch.tensor([[*item.ids, *([pad] * (width - len(item.ids)))] for item in batch])
    choices = model(ids).logits[:, :-1].argmax(dim=-1)
    same = choices == ids[:, 1:]
    return [bool(same[b, item.prompt_length - 1 : len(item.ids) - 1].all()) for b, item in enumerate(batch)]


def generate(
    target: Target, batch: Sequence[Conversation], temperature: float, seed: int, stop: int, max_length: int
) -> list[Conversation]:
    heads = [item.ids[: item.prompt_length] for item in batch]
    limits = Limits(MAX_NEW_TOKENS, frozenset({stop}))
    answers: list[list[int]] = [[] for _ in batch]
    seeds = [seed * 1_000_003 + i for i in range(len(batch))]
    for step in decode(target, NoDrafter(), heads, limits, Sampling(temperature), HostClock(), seeds):
        for answer, new in zip(answers, step.emitted, strict=True):
            answer += new or []
    made = [Conversation(head + answer, len(head)) for head, answer in zip(heads, answers, strict=True)]
    return [item for item in made if len(item.ids) <= max_length]


def collect(
    model: Any,
    tokenizer: Any,
    num_greedy: int,
    num_sampled: int,
    seed: int,
    max_length: int,
    report: Callable[[str], None],
) -> list[Conversation]:
    """Greedy answers to `num_greedy` prompts and answers at temperature 1 to `num_sampled` others."""
    stream = prompts(seed, tokenizer, max_length)
    target, stop = Target(model), tokenizer.eos_token_id
    kept: list[Conversation] = []
    missed: list[Conversation] = []
    for batch in _batches(list(islice(stream, num_greedy)), 64):
        flags = confirmed(model, batch, tokenizer.pad_token_id)
        kept += [item for item, flag in zip(batch, flags, strict=True) if flag]
        missed += [item for item, flag in zip(batch, flags, strict=True) if not flag]
    report(f"responses: {len(kept)} of {num_greedy} greedy answers confirmed in one pass")
    for temperature, items in ((0.0, missed), (1.0, list(islice(stream, num_sampled)))):
        for i, batch in enumerate(_batches(items, 96)):
            kept += generate(target, batch, temperature, seed + i, stop, max_length)
            report(f"responses: {len(kept)} collected")
    return kept


def _batches(items: list[Conversation], size: int) -> Iterator[list[Conversation]]:
    """Alike lengths together: rows that end early wait for the others."""
    items = sorted(items, key=lambda item: len(item.ids))
    yield from (items[i : i + size] for i in range(0, len(items), size))
