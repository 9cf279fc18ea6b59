"""From tasks to training text: prompts in their suites' wording, packed rows of tokens, and the embedded samples."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch

from dflash_bench.core.errors import UserError
from dflash_bench.tasks.rows import from_folder
from dflash_bench.tasks.suites import known_suites, to_prompt
from dflash_bench.training.data import Batch
from nano import corpus
from nano.corpus.task import Task, boxed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUITES = {name: suite for name, suite in known_suites().items() if suite.home == "hub"}
"""The suites that nano is trained for, and that samples are written for."""
FIRST_OF = {"aime": "aime24"}


def turns_of(task: Task) -> tuple[str, ...]:
    """Return the user's turns of a task, exactly as a run sends them."""
    name = FIRST_OF.get(task.suite, task.suite)
    return to_prompt(SUITES[name], "a task", 0, with_id(name, 0, task.row)).turns


def with_id(name: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """Complete a row to all of its suite's columns on the hub."""
    match name:
        case "math500":
            return {**row, "unique_id": f"nano/{row['subject'].lower()}/{number}.json"}
        case "aime24":
            return {"id": number, **row, "url": "", "year": "2024"}
        case "aime25":
            return {"problem": row["problem"], "answer": row["answer"], "id": str(number)}
        case "humaneval":
            return {"task_id": f"Nano/{number}", **row}
        case "mbpp":
            return {**row, "task_id": 11 + number}
        case "mt_bench":
            return {**row, "prompt_id": number}
    return row


HELD_OUT_ONE_IN = 32
PROMPT_WEIGHT = 0.1
"""Loss weight of a prompt token; an answer token weighs 1."""


def is_held_out(task: Task) -> bool:
    """Return whether the task's question is never trained on; the embedded prompts are drawn from these."""
    digest = hashlib.sha256(str(corpus.question(task)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def training_tasks(seed: int) -> Iterator[Task]:
    return (task for task in corpus.tasks(seed) if not is_held_out(task))


def held_out_tasks(seed: int) -> Iterator[Task]:
    return (task for task in corpus.tasks(seed) if is_held_out(task))


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation: token ids, and the loss weight of predicting each token."""

    ids: list[int]
    weights: list[float]


def segments(task: Task, thinking: bool = False) -> list[tuple[str, float]]:
    """Return the rendered conversation as pieces of (text, weight); answers end with the stop token."""
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
    """Return the pieces that the chat template keeps of earlier turns: all except empty think blocks."""
    last = max(i for i, (text, _) in enumerate(pieces) if text.startswith("<think>"))
    return [piece for i, piece in enumerate(pieces) if i == last or piece[0] != "<think>\n\n</think>\n\n"]


def encode(task: Task, tokenizer: PreTrainedTokenizerFast, thinking: bool = False) -> list[Sample]:
    """Return a sample per turn; a second turn follows the first answer as rendered by the template."""
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
    """Fill rows with whole samples, each in the first row with space; a sample that fits nowhere ends the batch."""
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
    """Yield samples endlessly: one task in sixteen with thinking, and one in eight from `extra` if given."""
    rng = Random(seed)
    for i, task in enumerate(tasks(seed)):
        next_task = rng.choice(extra) if extra and i % 8 == 7 else task
        yield from encode(next_task, tokenizer, thinking=i % 16 == 0)


def corpus_text(seed: int, count: int) -> Iterator[str]:
    """Yield text to train the tokenizer on."""
    for task in islice(training_tasks(seed), count):
        yield "".join(text for text, _ in segments(task)[:-1])


# Local files in a suite's columns, with answers, mixed into the target's training text.


Row = Mapping[str, Any]


def _gsm8k(row: Row) -> str:
    steps, _, answer = str(row["answer"]).partition("####")
    return re.sub(r"<<.*?>>", "", steps).strip() + "\n" + boxed(answer.strip())


ANSWERS: dict[str, Callable[[Row], str]] = {
    "gsm8k": _gsm8k,
    "math500": lambda row: str(row["solution"]),
    "aime24": lambda row: str(row["solution"]),
    "humaneval": lambda row: f"```python\n{row['prompt']}{row['canonical_solution']}```",
    "mbpp": lambda row: f"```python\n{row['code']}\n```",
}
"""Extractors of a row's worked answer, for suites whose rows have one."""


def load_extra(folder: Path) -> list[Task]:
    """Load tasks from `folder`/NAME/SPLIT.jsonl or .parquet, for every suite whose rows have answers.

    Raises UserError if there are none, and for a row without its columns.
    """
    tasks = []
    for name, answer in ANSWERS.items():
        suite = known_suites()[name]
        if any((folder / name / f"{suite.split}.{kind}").exists() for kind in ("jsonl", "parquet")):
            for where, row in from_folder(suite.data, folder):
                try:
                    tasks.append(Task(name, dict(row), (answer(row),)))
                except KeyError as error:
                    raise UserError(f"--extra: {where} lacks the column {error}") from error
    if not tasks:
        raise UserError(f"--extra {folder}: no rows; expected NAME/SPLIT.jsonl for one of {', '.join(ANSWERS)}")
    return tasks


# Samples that ship with the suites: held-out tasks in the hub's columns.


PER_SUITE = 32
PER_CATEGORY = 4
SEED = 20260


def samples() -> dict[str, list[dict[str, Any]]]:
    """Return distinct held-out rows for every suite; both AIME years come from the contest tasks."""
    chosen: dict[str, list[Task]] = {name: [] for name in sorted(SUITES)}
    per_category: dict[str, int] = {}
    questions: set[str] = set()
    for task in islice(held_out_tasks(SEED), 60_000):
        question = corpus.question(task)
        name = task.suite
        if name == "aime":
            name = "aime24" if len(chosen["aime24"]) < PER_SUITE else "aime25"
        if question in questions or len(chosen[name]) == PER_SUITE:
            continue
        if name == "mt_bench":
            category = task.row["category"]
            if per_category.setdefault(category, 0) == PER_CATEGORY:
                continue
            per_category[category] += 1
        questions.add(question)
        chosen[name].append(task)
        if len(questions) == PER_SUITE * len(chosen):
            break
    return {name: [with_id(name, n, task.row) for n, task in zip(count(), tasks)] for name, tasks in chosen.items()}


def write_samples(folder: Path) -> None:
    for name, rows in samples().items():
        path = folder / name / f"{SUITES[name].split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
