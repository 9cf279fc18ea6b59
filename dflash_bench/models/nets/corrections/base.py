"""The interface between a block's pass and its correction head (called by `engine/drafters/dflash.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

LARGEST = 1 << 16
"""Above any size of a head: a damaged number must not make us allocate huge memory."""


class Pick(Protocol):
    """Chooses or samples tokens by the run's rule, and stores the distributions that it samples from.

    `first` and `place` are indices of drafted tokens: 0 follows the anchor. Each place is picked once, in order.
    """

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        """Return target ids [B, n] for the draft's logits [B, n, Vd]."""
        ...

    def among(self, ids: Tensor, scores: Tensor, place: int) -> Tensor:
        """Return the index [B] of the chosen candidate, among target ids [B, C] with scores [B, C]."""
        ...

    def best(self, logits: Tensor) -> Tensor:
        """Return the likeliest target ids [B, n] for the draft's logits [B, n, Vd], without drafting them."""
        ...


@dataclass(frozen=True, slots=True)
class BlockPass:
    """A pass over blocks of K slots, of which N draft: `slots` are the slots of `logits` among all K."""

    hidden: Tensor
    """[B, K, H], the last layer's normed outputs."""
    logits: Tensor
    """[B, N, Vd], the body's own logits."""
    slots: slice
    anchor: Tensor
    """[B], the token of slot 0."""
    embed: Callable[[Tensor], Tensor]
    """Looks up raw embedding rows [..., H] of target ids [...]."""
    to_target: Callable[[Tensor], Tensor]
    """Translates ids of the draft's head to target ids."""
    before: Tensor | None = None
    """[B], the tokens before the anchors, for heads that read them (`reads_before`)."""
    context: Tensor | None = None
    """[B, H], fused and normed features of the positions before the anchors (`reads_context`)."""
    wants_confidence: bool = True
    """Whether the caller uses the confidences, for heads that have them."""

    @property
    def drafting(self) -> Tensor:
        """Return the outputs [B, N, H] of the slots that draft."""
        return self.hidden[:, self.slots]

    @property
    def num_drafts(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, slots=True)
class Corrected:
    """The drafted target ids [B, N], and each one's probability [B, N] of acceptance if its predecessors are."""

    tokens: Tensor
    confidence: Tensor | None = None


class CorrectionHead(Protocol):
    def correct(self, block: BlockPass, pick: Pick) -> Corrected: ...


class Branches(Protocol):
    """A head's scores for a block with several alternatives for the tokens before a slot, as in a tree of drafts."""

    @property
    def state(self) -> Tensor:
        """Return the state [B, 1, S] before the first slot; S may be 0."""
        ...

    def after(self, last: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return logits [B, P, C] of the slot's candidates, and states [B, P, S], after tokens [B, P] and states."""
        ...

    def ids(self, candidates: Tensor, slot: int) -> Tensor:
        """Return the target ids of candidates [B, N], which are indices of C."""
        ...


@runtime_checkable
class BranchingHead(CorrectionHead, Protocol):
    """A head that reads the tokens before a slot one by one, so that it can score several alternatives at once."""

    def branches(self, block: BlockPass) -> Branches: ...


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of a head's body; `num_ids` is the number of rows of the draft's own head."""

    hidden_size: int
    vocab_size: int
    num_ids: int
    block_size: int
    shifted_labels: bool
    rms_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """A head's sizes and variants. Fields are named like the publisher's keys."""

    kind: ClassVar[str]
    """The publisher's name for drafts with this head."""
    reads_before: ClassVar[bool] = False
    reads_context: ClassVar[bool] = False
    is_of_slots: ClassVar[bool] = False
    """Whether its weights belong to slots, so that no block may be larger than in training."""

    lookups: ClassVar[tuple[str, ...]] = ()
    """Parameters that are lookup tables, of which a token reads one row, by their names in their module."""

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        """Return the head's modules, by the prefix of their tensors in the publisher's files."""
        raise NotImplementedError

    def head(self, draft: Any) -> CorrectionHead:
        """Return the head of a draft that has these modules."""
        raise NotImplementedError

    def passes(self, num_drafts: int) -> tuple[int, int]:
        """Return the tokens per row that a pass of the head reads, and the passes for `num_drafts` drafts."""
        return 1, num_drafts

    @property
    def has_confidence(self) -> bool:
        """Return whether it predicts each token's probability of acceptance."""
        return False

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        """Yield names and values of impossible fields."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not _is_sound(str(field.type), value):
                yield field.name, value


def _is_sound(kind: str, value: object) -> bool:
    if kind == "bool":
        return type(value) is bool
    if kind == "str":
        return type(value) is str
    if kind == "float":
        return type(value) in (int, float) and 0 < value < LARGEST  # type: ignore[operator]
    return type(value) is int and 1 <= value <= LARGEST
