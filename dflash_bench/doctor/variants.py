"""A draft with one thing changed, as a drafter of its own; the original stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.drafters import dflash
from dflash_bench.engine.drafters.dflash import DFlashDrafter
from dflash_bench.engine.drafters.eagle3 import Eagle3Drafter
from dflash_bench.engine.target import Target
from dflash_bench.methods import Method
from dflash_bench.models.common import Rotary
from dflash_bench.models.dflash import DFlashDraft
from dflash_bench.models.eagle3 import Eagle3Draft

Draft = DFlashDraft | Eagle3Draft


def changed(draft: Draft, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> Draft:
    """A copy with these tensors, by their names in its state, and with these values in its config.

    Where the config asks for a tensor that the draft does not have, `tensors` must hold it.
    """
    weight = draft.fc.weight
    with torch.device("meta"):
        network: Any = type(draft)
        copy = network(replace(draft.config, **config))
    state = {**draft.state_dict(), **(tensors or {})}
    copy = copy.to(weight.dtype).to_empty(device=weight.device)
    copy.load_state_dict({name: state[name] for name in copy.state_dict()})
    made: Draft = copy.eval()
    return made


def drafter(
    draft: Draft, target: Target, num_drafts: int, offset: int = 0, embedding: nn.Module | None = None
) -> Drafter:
    """It proposes so many tokens a round, and reads the target's embedding unless it has its own or is given one.

    `offset` moves the positions of a block.
    """
    embedding = embedding or target.embedding
    if isinstance(draft, Eagle3Draft):
        return Eagle3Drafter(draft, embedding, num_drafts)
    options = (draft, embedding, target.head, draft.config.block_for(num_drafts))
    return MovedDFlashDrafter(*options, offset=offset) if offset else DFlashDrafter(*options)


def num_drafts_of(draft: Draft, method: Method) -> int:
    """Tokens of a round, as the method's options say or the draft was trained."""
    if isinstance(draft, Eagle3Draft):
        return method.number("n")
    if method.option("block") == "auto":
        return draft.config.num_drafts(draft.config.block_size)
    return draft.config.num_drafts(dflash.block_size(draft, method))


class MovedDFlashDrafter(DFlashDrafter):
    """Its block lies `offset` places behind where it should, and its context where it is."""

    def __init__(self, *options: Any, offset: int) -> None:
        super().__init__(*options)
        self.offset = offset

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity + abs(self.offset))

    def _read_block(self) -> Tensor:
        kept, self.rotary = self.rotary, Moved(self.rotary, self.offset)  # type: ignore[assignment]
        try:
            return super()._read_block()
        finally:
            self.rotary = kept


class Moved:
    """Rotary tables of places further on; the first place has none before it."""

    def __init__(self, rotary: Rotary, offset: int) -> None:
        self.rotary, self.offset = rotary, offset

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary.at((positions + self.offset).clamp(min=0))

    def between(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        places = max(0, begin + self.offset)
        return self.rotary.between(places, places + end - begin)


class Scaled(nn.Module):
    """An embedding whose rows are all multiplied."""

    def __init__(self, embedding: nn.Module, factor: float) -> None:
        super().__init__()
        self.embedding, self.factor = embedding, factor

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding(ids)
        return rows * self.factor
