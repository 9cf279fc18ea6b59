"""Conversations packed into rows, with the target's hidden states stored once on disk for all epochs and drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_bench.models.architecture import decoder_layers
from dflash_bench.training.data import Batch
from dflash_bench.training.masks import additive, causal
from nano.data import Sample, pack
from nano.responses import Conversation

NUM_TEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows: ids, document and position [R, N], answer flags [R, N], and states [R, N, K, H] by layer.

    `layers` names the layer whose output each of the K states is; the last state is the final, normed one.
    """

    ids: Tensor
    document: Tensor
    position: Tensor
    answer: Tensor
    states: Any
    layers: tuple[int, ...]

    @property
    def num_held_out(self) -> int:
        return NUM_TEST_ROWS

    def take(self, index: Sequence[int], layers: Sequence[int]) -> tuple[Batch, Tensor]:
        """A batch and its features [R, N, len(layers) * H]."""
        rows = torch.tensor(index)
        batch = Batch(self.ids[rows], self.answer[rows].float(), self.document[rows], self.position[rows])
        return batch, self._states(index, [self.layers.index(layer) for layer in layers]).flatten(2)

    def final(self, index: Sequence[int]) -> Tensor:
        """The target's last hidden states [R, N, H], ready for its head."""
        return self._states(index, [len(self.layers)])[:, :, 0]

    def _states(self, index: Sequence[int], which: list[int]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.states[list(index)][:, :, which])).float()


def pack_rows(items: list[Conversation], length: int, pad: int, seed: int) -> list[Batch]:
    """Shuffled, then packed a few hundred conversations at a time."""
    items = list(items)
    Random(seed).shuffle(items)
    samples = [Sample(c.ids, [float(i >= c.prompt_length) for i in range(len(c.ids))]) for c in items]
    batches = []
    while samples:
        batch = pack(iter(samples), 64, length, pad)
        used = sum(int(document.max()) + 1 for document in batch.document)
        samples = samples[used:]
        batches.append(batch if samples else _without_empty_rows(batch))
    return batches


def _without_empty_rows(batch: Batch) -> Batch:
    return batch.select((batch.document[:, 0] >= 0).nonzero().flatten().tolist())


def compute(
    model: Any, items: list[Conversation], layers: tuple[int, ...], folder: Path, length: int, pad: int, seed: int,
    report: Callable[[str], None],
) -> None:  # fmt: skip
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
    torch.save(
        {
            "ids": torch.cat([b.ids for b in batches]),
            "document": torch.cat([b.document for b in batches]),
            "position": torch.cat([b.position for b in batches]),
            "answer": torch.cat([b.weights > 0 for b in batches]),
            "layers": list(layers),
        },
        folder / "rows.pt",
    )


def load(folder: Path) -> Rows:
    saved = torch.load(folder / "rows.pt", weights_only=True)
    states = np.load(folder / "states.npy", mmap_mode="r")
    return Rows(saved["ids"], saved["document"], saved["position"], saved["answer"], states, tuple(saved["layers"]))
