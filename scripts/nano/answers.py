"""The training data of drafts: the target's own answers to training prompts, and its hidden states on them.

The generator's worked answer is checked in a single forward pass: if the target would choose all its tokens, it *is*
the greedy answer. Only the other greedy answers and all sampled answers are generated. States are stored on disk once,
for all epochs and drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models.architecture import decoder_layers
from dflash_bench.training import trainer
from dflash_bench.training.answers import decode_all
from dflash_bench.training.data import Batch
from dflash_bench.training.masks import additive, causal
from nano.data import Sample, encode, pack, training_tasks

MAX_NEW_TOKENS = 140


@dataclass(frozen=True, slots=True)
class Conversation:
    """Token ids; the answer, stop token included, starts at `prompt_length`."""

    ids: list[int]
    prompt_length: int


def prompts(seed: int, tokenizer: Any, max_length: int) -> Iterator[Conversation]:
    """Yield training prompts with the generator's answers."""
    for i, task in enumerate(training_tasks(seed)):
        for sample in encode(task, tokenizer, thinking=i % 16 == 0):
            start = len(sample.weights) - next(
                (i for i, w in enumerate(reversed(sample.weights)) if w != 1.0), len(sample.weights)
            )
            if len(sample.ids) <= max_length:
                yield Conversation(sample.ids, start)


@torch.inference_mode()
def confirmed(model: Any, batch: Sequence[Conversation], pad: int) -> list[bool]:
    """Return which answers equal greedy decoding's, by a single forward pass over the batch."""
    width = max(len(item.ids) for item in batch)
    ids = torch.tensor([[*item.ids, *([pad] * (width - len(item.ids)))] for item in batch])
    choices = model(ids).logits[:, :-1].argmax(dim=-1)
    same = choices == ids[:, 1:]
    return [bool(same[b, item.prompt_length - 1 : len(item.ids) - 1].all()) for b, item in enumerate(batch)]


def generate(
    target: Target, batch: Sequence[Conversation], temperature: float, seed: int, stop: int, max_length: int
) -> list[Conversation]:
    """Decode answers to a batch of prompts, without conversations that get too long."""
    heads = [item.ids[: item.prompt_length] for item in batch]
    limits = Limits(MAX_NEW_TOKENS, frozenset({stop}))
    seeds = [seed * 1_000_003 + i for i in range(len(batch))]
    answers = decode_all(target, NoDrafter(), heads, limits, Sampling(temperature), seeds)
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
    """Return greedy answers to `num_greedy` prompts, and answers at temperature 1 to `num_sampled` others."""
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
    """Yield batches of similar lengths, because rows that end early wait for the others."""
    items = sorted(items, key=lambda item: len(item.ids))
    yield from (items[i : i + size] for i in range(0, len(items), size))


NUM_TEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows [R, N] and the target's states on them [R, N, K, H].

    The states are the outputs of `layers`; the last state is the final, normed state.
    """

    batch: Batch
    states: Any
    layers: tuple[int, ...]

    @property
    def ids(self) -> Tensor:
        return self.batch.ids

    @property
    def answer(self) -> Tensor:
        return self.batch.weights > 0

    @property
    def num_held_out(self) -> int:
        return NUM_TEST_ROWS

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """Return a batch and its features [R, N, len(layers) * H]."""
        states = self._states(index, [self.layers.index(layer) for layer in layers])
        return self.batch.select(index), states.flatten(2)

    def final(self, index: Sequence[int]) -> Tensor:
        """Return the target's last hidden states [R, N, H], ready for its head."""
        return self._states(index, [len(self.layers)])[:, :, 0]

    def _states(self, index: Sequence[int], which: list[int]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.states[list(index)][:, :, which])).float()


def pack_rows(items: list[Conversation], length: int, pad: int, seed: int) -> list[Batch]:
    """Shuffle conversations, and pack a few hundred of them at a time."""
    items = list(items)
    Random(seed).shuffle(items)
    samples = [Sample(c.ids, [float(i >= c.prompt_length) for i in range(len(c.ids))]) for c in items]
    batches = []
    while samples:
        batch = pack(iter(samples), 64, length, pad)
        used = sum(int(document.max()) + 1 for document in batch.document)
        samples = samples[used:]
        filled = (batch.document[:, 0] >= 0).nonzero().flatten().tolist()
        batches.append(batch if samples else batch.select(filled))
    return batches


def compute(
    model: Any,
    items: list[Conversation],
    layers: tuple[int, ...],
    folder: Path,
    length: int,
    pad: int,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """Store the packed rows, and the outputs of `layers` and the final states on them, in `folder`."""
    batches = pack_rows(items, length, pad, seed)
    for layer in model.model.layers:
        layer.compile()
    count = sum(len(batch.ids) for batch in batches)
    hidden = model.config.hidden_size
    states = np.lib.format.open_memmap(
        folder / "states.tmp.npy", mode="w+", dtype=np.float16, shape=(count, length, len(layers) + 1, hidden)
    )
    tapped: dict[int, Tensor] = {}
    hooks = [
        decoder_layers(model)[i].register_forward_hook(lambda _m, _a, out, i=i: tapped.__setitem__(i, out))
        for i in layers
    ]
    at = 0
    for batch in batches:
        with torch.inference_mode():
            final = model.model(
                batch.ids, attention_mask=additive(causal(batch)), position_ids=batch.position
            ).last_hidden_state
        stacked = torch.stack([*(tapped[i] for i in layers), final], dim=2)
        states[at : at + len(batch.ids)] = stacked.half().numpy()
        at += len(batch.ids)
        report(f"features: {at}/{count} rows")
    for hook in hooks:
        hook.remove()
    states.flush()
    (folder / "states.tmp.npy").replace(folder / "states.npy")
    fields = [torch.cat(tensors) for tensors in zip(*map(Batch.tensors, batches), strict=True)]
    trainer.save_whole(folder / "rows.pt", {"batch": fields, "layers": list(layers)})


def load(folder: Path) -> Rows:
    """Open stored rows; their states stay on disk."""
    saved = torch.load(folder / "rows.pt", weights_only=True)
    return Rows(Batch(*saved["batch"]), np.load(folder / "states.npy", mmap_mode="r"), tuple(saved["layers"]))
