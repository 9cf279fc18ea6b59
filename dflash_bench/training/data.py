"""Training rows: stored answers packed to one length, batches of rows, and their rotary tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.models.nets.dflash import DFlashConfig
from dflash_bench.models.nets.eagle3 import Eagle3Config
from dflash_bench.models.nets.layers import Rotary


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows [R, N]: `document` numbers the samples of a row, and `position` restarts with each sample.

    `weights` are above 0 at the tokens of answers; `document` is -1 behind the last sample.
    """

    ids: Tensor
    weights: Tensor
    document: Tensor
    position: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.weights, self.document, self.position

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self.tensors()))

    @classmethod
    def filled(cls, rows: Sequence[Sequence[tuple[Tensor, Tensor]]], length: int, pad: int) -> Batch:
        """Concatenate the samples of each row; a sample is a pair of ids [T] and weights [T]."""
        shape = (len(rows), length)
        ids, weights = torch.full(shape, pad), torch.zeros(shape)
        document, position = torch.full(shape, -1), torch.arange(length).repeat(len(rows), 1)
        for row, samples in enumerate(rows):
            at = 0
            for number, (tokens, weight) in enumerate(samples):
                place = slice(at, at + len(tokens))
                ids[row, place], weights[row, place], document[row, place] = tokens, weight, number
                position[row, place] = torch.arange(len(tokens))
                at = place.stop
        return cls(ids, weights, document, position)

    def select(self, index: Sequence[int]) -> Batch:
        """Return these rows."""
        return Batch(*(tensor[torch.tensor(index)] for tensor in self.tensors()))


class Data(Protocol):
    """Packed rows: ids [R, N], answer flags [R, N], and the target's states at each token."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def answer(self) -> Tensor: ...

    @property
    def num_held_out(self) -> int:
        """Return the number of rows at the end that are never trained on."""
        ...

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """Return a batch and its features [R, N, len(layers) * H]: the outputs of these layers, side by side."""
        ...

    def final(self, index: Sequence[int]) -> Tensor:
        """Return the target's last states [R, N, H], ready for its head."""
        ...


CPU = torch.device("cpu")
Compute = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]
"""Returns the target's states on texts, like `answers.ComputedStates`."""
FIRSTS = ("firsts", "first_ends")
"""Additional tensors of a batch of later turns: the first turns of their chats."""
OPEN_ROWS = 64
"""Number of last rows that may still be filled: more would pack tighter, and take longer."""


class Stored:
    """One stored batch of answers; its states stay on disk."""

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(path, framework="pt")
        self.ids = file.get_tensor("ids").long()
        self.ends = file.get_tensor("ends").tolist()
        self.prompt_lengths = file.get_tensor("prompt_lengths").tolist()
        self.prompt_numbers = file.get_tensor("prompts").tolist()
        self._firsts = [file.get_tensor(name).tolist() for name in FIRSTS if name in file.keys()]  # noqa: SIM118
        self._states = file.get_slice("states") if "states" in file.keys() else None  # noqa: SIM118 (no mapping)

    def conversations(self) -> Iterator[TrainingChat]:
        begin = first_begin = 0
        for number, (end, length) in enumerate(zip(self.ends, self.prompt_lengths, strict=True)):
            chat = self.ids[begin : begin + length].tolist()
            if self._firsts:
                tokens, ends = self._firsts
                chat, first_begin = tokens[first_begin : ends[number]], ends[number]
            yield TrainingChat(self, begin, end, length, self.prompt_numbers[number], tuple(chat))
            begin = end

    def states(self, begin: int, end: int) -> Tensor:
        """Read [T, K, H] in bfloat16."""
        assert self._states is not None, "states were not stored"
        states: Tensor = self._states[begin:end]
        return states


class TrainingChat:
    """Tokens `begin` to `end` of a stored batch; the answer starts at `prompt_length`.

    `prompt_number` is the index of its request, and `chat` holds the tokens of the chat's first turn, which all turns
    and answers of a chat share.
    """

    def __init__(
        self, home: Stored, begin: int, end: int, prompt_length: int, prompt_number: int, chat: tuple[int, ...]
    ) -> None:
        self.home, self.begin, self.prompt_length = home, begin, prompt_length
        self.prompt_number, self.chat = prompt_number, chat
        self.ids = home.ids[begin:end]

    @property
    def is_later_turn(self) -> bool:
        return tuple(self.ids[: self.prompt_length].tolist()) != self.chat

    def cut(self, length: int) -> TrainingChat:
        """Return the chat up to its first `length` tokens."""
        end = self.begin + min(length, len(self.ids))
        return TrainingChat(self.home, self.begin, end, self.prompt_length, self.prompt_number, self.chat)

    @property
    def states(self) -> Tensor:
        return self.home.states(self.begin, self.begin + len(self.ids))

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Return ids [T] and weights [T]: 1 for the answer, 0 for the prompt."""
        return self.ids, (torch.arange(len(self.ids)) >= self.prompt_length).float()


def stored(folders: Sequence[Path], enough: int | None = None) -> list[TrainingChat]:
    """Open all conversations in these folders, ordered by batch. Raises UserError if there are none.

    With `enough`, those of a folder's first batches whose answers have so many tokens together.
    """
    items: list[TrainingChat] = []
    for folder in folders:
        num_tokens = 0
        for path in sorted(folder.glob("answers-*.safetensors")):
            if enough is None or num_tokens < enough:
                found = list(Stored(path).conversations())
                num_tokens += sum(len(item.ids) - item.prompt_length for item in found)
                items += found
    if not items:
        raise UserError(f"no answers in {', '.join(map(str, folders))}; train again with another --out")
    return items


class PackedRows:
    """Conversations packed into rows of one length; the target's states are read from disk row by row.

    The stored states are the outputs of `layers`, of which the last is the target's last layer; `norm` is the target's
    norm between that layer and its head. The last rows hold `held_out`, which is never trained on. Rows stay on the
    host until they are moved to `device`, where the norm is. States that are not stored come from `compute`.
    """

    def __init__(
        self,
        items: Sequence[TrainingChat],
        layers: Sequence[int],
        norm: nn.Module,
        length: int,
        pad: int,
        seed: int = 0,
        held_out: Sequence[TrainingChat] = (),
        device: torch.device = CPU,
        compute: Compute | None = None,
    ) -> None:
        self.device, self.compute = device, compute
        self.layers, self.norm, self.length = tuple(layers), norm, length
        kept, test = (packed([item.cut(length) for item in some], length, seed) for some in (items, held_out))
        self.packed, self.num_held_out = kept + test, len(test)
        self._latest: tuple[tuple[int, ...], Tensor] | None = None
        self.batch = Batch.filled([[item.sample for item in row] for row in self.packed], length, pad)
        self.ids, self.answer = self.batch.ids, self.batch.weights > 0

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """Return a batch and its features [R, N, len(layers) * H]."""
        return self.batch.select(index).to(self.device), self._states(
            index, [self.layers.index(layer) for layer in layers]
        ).flatten(2)

    @torch.no_grad()
    def final(self, index: Sequence[int]) -> Tensor:
        """Return the target's last states [R, N, H], ready for its head."""
        states = self._states(index, [len(self.layers) - 1])[:, :, 0]
        normed: Tensor = self.norm(states)
        return normed

    def _states(self, index: Sequence[int], which: list[int]) -> Tensor:
        # A step needs features and last states of the same rows: they are read from disk once.
        if self._latest is None or self._latest[0] != tuple(index):
            self._latest = (tuple(index), self._read(index))
        return self._latest[1][:, :, which].to(self.device, torch.float32)

    def _read(self, index: Sequence[int]) -> Tensor:
        """Read [R, N, K, H] in bfloat16, with zeros where a row is empty."""
        by_row = [torch.cat(list(states)) for states in self._of_items(index)]
        states = torch.zeros(len(index), self.length, *by_row[0].shape[1:], dtype=by_row[0].dtype)
        for row, stored_states in enumerate(by_row):
            states[row, : len(stored_states)] = stored_states
        return states

    def _of_items(self, index: Sequence[int]) -> Iterator[Sequence[Tensor]]:
        """Yield, for each row, the states [T, K, H] of its conversations."""
        rows = [self.packed[number] for number in index]
        if self.compute is None:
            yield from ([item.states for item in row] for row in rows)
            return
        computed = iter(self.compute([item.ids.tolist() for row in rows for item in row]))
        yield from ([next(computed) for _ in row] for row in rows)


def packed(items: Sequence[TrainingChat], length: int, seed: int) -> list[list[TrainingChat]]:
    """Shuffle, then put each conversation into the first of the last OPEN_ROWS rows with enough space, or a new row."""
    order = list(items)
    Random(seed).shuffle(order)
    rows: list[list[TrainingChat]] = []
    room: list[int] = []
    for item in order:
        open_rows = range(max(0, len(rows) - OPEN_ROWS), len(rows))
        row = next((row for row in open_rows if room[row] >= len(item.ids)), None)
        if row is None:
            rows.append([item])
            room.append(length - len(item.ids))
        else:
            rows[row].append(item)
            room[row] -= len(item.ids)
    return rows


BEYOND = 64
"""Positions behind the end of a row that a block or a chain may reach."""


def tables(config: DFlashConfig | Eagle3Config, rows: Data, device: torch.device) -> Rotary:
    """Return the draft's rotary tables for all positions in rows of this length."""
    length = rows.ids.shape[1] + BEYOND
    return Rotary(config.head_dim, config.rope_theta, length, device, torch.float32, config.rope_scaling)
