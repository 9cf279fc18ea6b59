"""Rows to train on: answers packed to one length, batches of them, and their rotary tables."""

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

# What a training step reads: a batch of packed rows, and where such rows come from.


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows [R, N]: `document` numbers the samples in a row, `position` restarts with each sample."""

    ids: Tensor
    weights: Tensor
    document: Tensor
    position: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device) for tensor in (self.ids, self.weights, self.document, self.position)))

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Additive [R, 1, N, N]: causal, and never across samples."""
        same = self.document[:, :, None] == self.document[:, None, :]
        allowed = same & (self.position[:, :, None] >= self.position[:, None, :])
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


class Data(Protocol):
    """Packed rows: ids [R, N], answer flags [R, N], and the target's states at each place."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def answer(self) -> Tensor: ...

    @property
    def num_held_out(self) -> int:
        """How many of the last rows are never trained on."""
        ...

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """A batch and its features [R, N, len(layers) * H]: the outputs of these layers, side by side."""
        ...

    def final(self, index: Sequence[int]) -> Tensor:
        """The target's last states [R, N, H], ready for its head."""
        ...


# Conversations packed into rows of one length, with the target's states read from disk as they are needed.


CPU = torch.device("cpu")
Compute = Callable[[Sequence[Sequence[int]]], Sequence[Tensor]]
"""Texts to the target's states on them, as `states.Computed`."""
FIRSTS = ("firsts", "first_ends")
"""What a batch of later turns has besides: how their chats began."""
OPEN_ROWS = 64
"""How many rows may still be filled up: more would pack tighter, and take longer."""


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
        """[T, K, H] in bfloat16"""
        assert self._states is not None, "they were not stored"
        states: Tensor = self._states[begin:end]
        return states


class TrainingChat:
    """Tokens `begin` to `end` of a stored batch; the answer starts at `prompt_length`.

    `prompt_number` is its place among what was asked, and `chat` are the tokens that the first turn was asked with: all
    turns of a chat, and all its answers, have the same.
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
        """Its first `length` tokens."""
        end = self.begin + min(length, len(self.ids))
        return TrainingChat(self.home, self.begin, end, self.prompt_length, self.prompt_number, self.chat)

    @property
    def states(self) -> Tensor:
        return self.home.states(self.begin, self.begin + len(self.ids))


def stored(folders: Sequence[Path]) -> list[TrainingChat]:
    """All conversations in these folders, in the order of their batches. Raises UserError if there are none."""
    paths = [path for folder in folders for path in sorted(folder.glob("answers-*.safetensors"))]
    items = [item for path in paths for item in Stored(path).conversations()]
    if not items:
        raise UserError(f"no answers in {', '.join(map(str, folders))}")
    return items


class PackedRows:
    """Packed rows: ids, document and position [R, N], answer flags [R, N]; states are read row by row.

    `layers` names the layer whose output each of the stored states is; the last of them is the target's last layer, and
    `norm` the target's, which stands between that and the head. The last rows hold what is never trained on. All stays
    on the host; what is taken comes to `device`, where the norm is. States that are not stored come from `compute`.
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
        shape = (len(self.packed), length)
        self.ids, self.document = torch.full(shape, pad), torch.full(shape, -1)
        self.position = torch.arange(length).repeat(len(self.packed), 1)
        self.answer = torch.zeros(shape, dtype=torch.bool)
        for row, members in enumerate(self.packed):
            at = 0
            for number, item in enumerate(members):
                place = slice(at, at + len(item.ids))
                self.ids[row, place], self.document[row, place] = item.ids, number
                self.position[row, place] = torch.arange(len(item.ids))
                self.answer[row, at + item.prompt_length : place.stop] = True
                at = place.stop

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """A batch and its features [R, N, len(layers) * H]."""
        rows = torch.tensor(index)
        batch = Batch(self.ids[rows], self.answer[rows].float(), self.document[rows], self.position[rows])
        return batch.to(self.device), self._states(index, [self.layers.index(layer) for layer in layers]).flatten(2)

    @torch.no_grad()
    def final(self, index: Sequence[int]) -> Tensor:
        """The target's last states [R, N, H], ready for its head."""
        states = self._states(index, [len(self.layers) - 1])[:, :, 0]
        normed: Tensor = self.norm(states)
        return normed

    def _states(self, index: Sequence[int], which: list[int]) -> Tensor:
        # A step asks for features and for last states of the same rows: they are read from disk once.
        if self._latest is None or self._latest[0] != tuple(index):
            self._latest = (tuple(index), self._read(index))
        return self._latest[1][:, :, which].to(self.device, torch.float32)

    def _read(self, index: Sequence[int]) -> Tensor:
        """[R, N, K, H] in bfloat16, zeros where a row holds nothing."""
        by_row = [torch.cat(list(states)) for states in self._of_items(index)]
        states = torch.zeros(len(index), self.length, *by_row[0].shape[1:], dtype=by_row[0].dtype)
        for row, stored_states in enumerate(by_row):
            states[row, : len(stored_states)] = stored_states
        return states

    def _of_items(self, index: Sequence[int]) -> Iterator[Sequence[Tensor]]:
        """Of each conversation in each row."""
        rows = [self.packed[number] for number in index]
        if self.compute is None:
            yield from ([item.states for item in row] for row in rows)
            return
        computed = iter(self.compute([item.ids.tolist() for row in rows for item in row]))
        yield from ([next(computed) for _ in row] for row in rows)


def packed(items: Sequence[TrainingChat], length: int, seed: int) -> list[list[TrainingChat]]:
    """Shuffled, then each into the first of the last few rows with room for it."""
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


# Rotary tables of a draft for rows of a given length.


BEYOND = 64
"""Places behind the end of a row that a block or a chain may reach."""


def tables(config: DFlashConfig | Eagle3Config, rows: Data, device: torch.device) -> Rotary:
    length = rows.ids.shape[1] + BEYOND
    return Rotary(config.head_dim, config.rope_theta, length, device, torch.float32, config.rope_scaling)
