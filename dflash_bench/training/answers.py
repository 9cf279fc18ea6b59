"""The target's own answers to training prompts, and its hidden states on them, the training data (paper, 4.2).

Answers are decoded many at a time and stored batch by batch. A stored batch is never decoded again, so that an
interrupted training resumes there. Batches are drawn at random: the first few are a fair sample of all.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dflash_bench.core import files
from dflash_bench.engine.drafter import Committed, Drafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.training.distributed import ALONE, ProcessGroup

PLAN = "answers.json"
ENDS = 2
"""Number of tokens at the end of an answer that the decoding loop reads in no round, or for no drafter."""
GROUP = 16
"""Number of batches cut from one sample of prompts, sorted by length: rows of a batch wait for each other."""


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A chat's tokens, as rendered by the template, and the temperature of the answer.

    `first` holds the tokens of the chat's first turn if this is a later turn.
    """

    ids: tuple[int, ...]
    temperature: float = 0.0
    first: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """The settings that determine the answers. The outputs of `layers` are stored; without layers, only tokens are."""

    revision: str
    layers: tuple[int, ...]
    max_new_tokens: int
    batch_size: int
    seed: int = 0


class Recorder:
    """A drafter that proposes nothing and keeps the outputs of the target's layers: plain decoding with its states."""

    num_drafts = 0

    def __init__(self, taps: Sequence[int], hidden_size: int) -> None:
        self.taps, self.hidden_size = tuple(taps), hidden_size

    def begin(self, num_rows: int, capacity: int) -> None:
        """Allocate states [rows, capacity, K, H] of K layers."""
        shape = (num_rows, capacity, len(self.taps), self.hidden_size)
        self.states = torch.zeros(shape, dtype=torch.bfloat16)

    def observe(self, committed: Committed) -> None:
        if committed.hidden is None:  # no layer is tapped
            return
        hidden = committed.hidden.unflatten(-1, self.states.shape[2:]).to("cpu", torch.bfloat16)
        for row, (start, count) in enumerate(zip(committed.starts, committed.counts, strict=True)):
            self.states[row, start : start + count] = hidden[row, :count]

    def propose(self) -> None:
        return None


def collect(
    target: Target,
    stop_ids: frozenset[int],
    requests: Sequence[AnswerRequest],
    plan: AnswerPlan,
    folder: Path,
    report: Callable[[str], object],
    group: ProcessGroup = ALONE,
    enough: int | None = None,
) -> None:
    """Store the answers to all requests in `folder`; the processes of a group share the work.

    With `enough`, end once the answers have so many tokens.

    Raises UserError if the folder holds answers of another plan or to other requests.
    """
    # First turns are written as in earlier versions, so that stored answers stay valid.
    written = [{name: value for name, value in asdict(one).items() if value != ()} for one in requests]
    prompts = zlib.crc32(repr(written).encode())
    described = asdict(plan) | {"prompts": prompts}
    group.from_first(f"{folder}", lambda: files.check_same_options(folder / PLAN, described, "answers"))
    parts = batches(requests, plan.batch_size, plan.seed)
    taken, num_tokens = group.counter(f"{folder} batches"), group.counter(f"{folder} tokens")
    while enough is None or num_tokens(0) < enough:
        # Whoever is free takes the next batch, so that no process waits for another longer than for one batch.
        number = taken(1) - 1
        if number >= len(parts):
            break
        path = part(folder, number)
        if not path.exists():
            report(f"answers: batch {number + 1} of {len(parts)}")
            batch = [requests[row] for row in parts[number]]
            tensors = _answer(target, stop_ids, batch, plan)
            write(path, {**tensors, **_first_turns(batch), "prompts": torch.tensor(parts[number])})
        num_tokens(num_answer_tokens(path))
    group.wait()


def _first_turns(requests: Sequence[AnswerRequest]) -> dict[str, Tensor]:
    """Return the first turn of each chat, concatenated; nothing if all requests are first turns."""
    if not any(one.first for one in requests):
        return {}
    return {
        "firsts": torch.tensor([token for one in requests for token in one.first], dtype=torch.int32),
        "first_ends": torch.tensor([len(one.first) for one in requests]).cumsum(0),
    }


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    files.write_whole(path, lambda file: file.write(save(tensors)))


def batches(requests: Sequence[AnswerRequest], size: int, seed: int) -> list[list[int]]:
    """Return the indices of requests by batch, deterministically. A batch has one temperature."""
    order = list(range(len(requests)))
    Random(seed).shuffle(order)
    by_batch: list[list[int]] = []
    for temperature in dict.fromkeys(one.temperature for one in requests):
        alike = [row for row in order if requests[row].temperature == temperature]
        for at in range(0, len(alike), GROUP * size):
            group = sorted(alike[at : at + GROUP * size], key=lambda row: len(requests[row].ids))
            by_batch += [group[i : i + size] for i in range(0, len(group), size)]
    Random(seed + 1).shuffle(by_batch)
    return by_batch


def num_answer_tokens(path: Path) -> int:
    """Return the number of tokens in the answers of a stored batch."""
    with safe_open(path, framework="pt") as file:
        return int(file.get_tensor("ends")[-1]) - int(file.get_tensor("prompt_lengths").sum())


def part(folder: Path, number: int) -> Path:
    return folder / f"answers-{number:05d}.safetensors"


def _answer(
    target: Target, stop_ids: frozenset[int], requests: Sequence[AnswerRequest], plan: AnswerPlan
) -> dict[str, Tensor]:
    """Decode the answers to one batch of requests, with states if the plan has layers."""
    recorder = Recorder(plan.layers, target.config.hidden_size)
    seeds = [zlib.crc32(repr((plan.seed, one.ids)).encode()) for one in requests]
    prompts, limits = [one.ids for one in requests], Limits(plan.max_new_tokens, stop_ids)
    answers = decode_all(target, recorder, prompts, limits, Sampling(requests[0].temperature), seeds)
    texts = [[*one.ids, *answer] for one, answer in zip(requests, answers, strict=True)]
    states: list[Tensor] = []
    if plan.layers:
        _read_ends(target, recorder, texts)
        states = [recorder.states[row, : len(text)] for row, text in enumerate(texts)]
    return joined(texts, [len(one.ids) for one in requests], states)


def decode_all(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    sampling: Sampling,
    seeds: Sequence[int],
) -> list[list[int]]:
    """Return the tokens of the answers to all prompts, decoded together."""
    answers: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, drafter, prompts, limits, sampling, HostClock(), seeds):
        for answer, new in zip(answers, step.emitted, strict=True):
            answer += new or []
    return answers


def joined(
    texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], states: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Concatenate whole conversations into the stored tensors; `states` holds [T, K, H] for each, or is empty."""
    tensors = {
        "ids": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
        "ends": torch.tensor([len(text) for text in texts]).cumsum(0),
        "prompt_lengths": torch.tensor(prompt_lengths),
    }
    return {**tensors, "states": torch.cat(list(states))} if states else tensors


@torch.inference_mode()
def _read_ends(target: Target, recorder: Recorder, texts: Sequence[Sequence[int]]) -> None:
    """Record the states of each answer's last two tokens.

    The loop does not need them, but they teach the stop token. The target's cache still holds all tokens before them.
    """
    starts = [len(text) - ENDS for text in texts]
    tokens = torch.tensor([text[-ENDS:] for text in texts], device=target.device)
    target.tap(recorder.taps)
    try:
        hidden = target.forward(tokens, starts).hidden
        recorder.observe(Committed(hidden, tokens, tokens[:, -1], starts, [ENDS] * len(texts)))
    finally:
        target.tap(())


class ComputedStates:
    """Computes the outputs of these layers on demand, by one pass over each text, instead of storing them."""

    def __init__(self, target: Target, layers: Sequence[int]) -> None:
        self.target, self.layers = target, tuple(layers)

    @torch.inference_mode()
    def __call__(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return [T, K, H] in bfloat16, on the host, for each text of T tokens."""
        self.target.begin(len(texts), max(map(len, texts)))
        self.target.tap(self.layers)
        try:
            hidden = self.target.prefill(texts).hidden
        finally:
            self.target.tap(())
        assert hidden is not None
        states = hidden.unflatten(-1, (len(self.layers), -1)).to("cpu", torch.bfloat16)
        return [states[row, : len(text)] for row, text in enumerate(texts)]
