"""Turns tasks into rows of tokens: rendered with the suite's prompt and the chat template, packed to a fixed length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

import torch

from dflash_bench.training.data import Batch
from nano.corpus import mixture
from nano.corpus.task import Task
from nano.prompts import turns_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT_ONE_IN = 32
PROMPT_WEIGHT = 0.1
"""Loss weight of a prompt token; an answer token weighs 1."""


def is_held_out(task: Task) -> bool:
    """Is this task in the share of all questions that is never trained on? The shipped prompts come from it."""
    digest = hashlib.sha256(str(mixture.question(task)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def training_tasks(seed: int) -> Iterator[Task]:
    return (task for task in mixture.tasks(seed) if not is_held_out(task))


def held_out_tasks(seed: int) -> Iterator[Task]:
    return (task for task in mixture.tasks(seed) if is_held_out(task))


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: token ids and the loss weight of predicting each of them."""

    ids: list[int]
    weights: list[float]


def segments(task: Task, thinking: bool = False) -> list[tuple[str, float]]:
    """The rendered conversation in pieces of (text, weight); answers end with the stop token."""
    pieces: list[tuple[str, float]] = []
    for turn, answer in zip(turns_of(task), task.answers, strict=True):
        pieces.append((f"<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n", PROMPT_WEIGHT))
        steps, _, final = answer.rpartition("\n")
        if thinking and final.startswith("The answer is"):
            pieces.append((f"<think>\n{steps}\n</think>\n\n{final}<|im_end|>", 1.0))
        else:
            pieces += [("<think>\n\n</think>\n\n", 0.0), (f"{answer}<|im_end|>", 1.0)]
        pieces.append(("\n", 0.0))
    return pieces


def history(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """What the chat template keeps of earlier turns: everything but their empty think blocks."""
    last = max(i for i, (text, _) in enumerate(pieces) if text.startswith("<think>"))
    return [piece for i, piece in enumerate(pieces) if i == last or piece[0] != "<think>\n\n</think>\n\n"]


def encode(task: Task, tokenizer: PreTrainedTokenizerFast, thinking: bool = False) -> list[Sample]:
    """One sample per turn: a second turn sees the first answer as the template renders it."""
    samples = []
    pieces = segments(task, thinking)
    starts = [i for i, (text, _) in enumerate(pieces) if text.startswith("<|im_start|>user")]
    for turn in range(len(starts)):
        # Up to the stop token of this turn's answer; the newline after it belongs to the next turn.
        end = (starts[turn + 1] if turn + 1 < len(starts) else len(pieces)) - 1
        ids: list[int] = []
        weights: list[float] = []
        for text, weight in history(pieces[:end]):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            ids += tokens
            weights += [weight] * len(tokens)
        samples.append(Sample(ids, weights))
    return samples


def pack(samples: Iterator[Sample], num_rows: int, length: int, pad: int) -> Batch:
    """Fill rows with whole samples, each into the first row with room; a sample that fits nowhere ends the batch."""
    filled: list[list[Sample]] = [[] for _ in range(num_rows)]
    room = [length] * num_rows
    for sample in samples:
        if len(sample.ids) > length:
            continue
        row = next((r for r in range(num_rows) if room[r] >= len(sample.ids)), None)
        if row is None:
            break
        filled[row].append(sample)
        room[row] -= len(sample.ids)
    rows = [[(torch.tensor(sample.ids), torch.tensor(sample.weights)) for sample in row] for row in filled]
    return Batch.filled(rows, length, pad)


def sample_stream(
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    tasks: Callable[[int], Iterator[Task]] = training_tasks,
    extra: Sequence[Task] = (),
) -> Iterator[Sample]:
    """Endless samples; one task in sixteen is rendered with thinking, and one in eight is from `extra` if given."""
    rng = Random(seed)
    for i, task in enumerate(tasks(seed)):
        next_task = rng.choice(extra) if extra and i % 8 == 7 else task
        yield from encode(next_task, tokenizer, thinking=i % 16 == 0)


def corpus_text(seed: int, count: int) -> Iterator[str]:
    """Text to train the tokenizer on."""
    for task in islice(training_tasks(seed), count):
        yield "".join(text for text, _ in segments(task)[:-1])
