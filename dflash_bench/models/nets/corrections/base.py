"""The interface between a block's pass and the head that corrects it (`engine/drafters/dflash.py` calls it)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

LARGEST = 1 << 16
"""More than any size of a head; a damaged number must not make us allocate huge memory."""


class Pick(Protocol):
    """Chooses or draws tokens by the run's rule, and keeps the distributions that it draws from.

    `first` and `place` are indices of drafted tokens: 0 follows the anchor. Each place is picked once, in order.
    """

    def __call__(self, logits: Tensor, first: int) -> Tensor:
        """Return target ids [B, n] for the draft's logits [B, n, Vd]."""
        ...

    def among(self, ids: Tensor, scores: Tensor, place: int) -> Tensor:
        """Return which [B] of the candidates, target ids [B, C] with scores [B, C], is taken."""
        ...

    def best(self, logits: Tensor) -> Tensor:
        """Return the likeliest target ids [B, n] for the draft's logits [B, n, Vd]: a guess, which drafts nothing."""
        ...


@dataclass(frozen=True, slots=True)
class BlockPass:
    """A pass over blocks of K slots, of which N draft: the slots of `logits` are the ones in `slots` of all K."""

    hidden: Tensor
    """[B, K, H], the last layer's normed outputs."""
    logits: Tensor
    """[B, N, Vd], the body's own."""
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
    """Does anyone read the confidences of heads that have them?"""

    @property
    def drafting(self) -> Tensor:
        """Return the outputs [B, N, H] of the slots that draft."""
        return self.hidden[:, self.slots]

    @property
    def num_drafts(self) -> int:
        return self.logits.shape[1]


@dataclass(frozen=True, slots=True)
class Corrected:
    """The drafted tokens [B, N] as target ids, and how likely [B, N] each is to be accepted if all before it are."""

    tokens: Tensor
    confidence: Tensor | None = None


class CorrectionHead(Protocol):
    def correct(self, block: BlockPass, pick: Pick) -> Corrected: ...


class Branches(Protocol):
    """What a head says of a block where the tokens before a slot may be any of several, as in a tree of drafts."""

    @property
    def state(self) -> Tensor:
        """Return [B, 1, S], what it knows before the first slot; S may be 0."""
        ...

    def after(self, last: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Return logits [B, P, C] of the slot's candidates, and states [B, P, S], after tokens [B, P] and states."""
        ...

    def ids(self, candidates: Tensor, slot: int) -> Tensor:
        """Return the target ids of candidates [B, N], indices of C."""
        ...


@runtime_checkable
class BranchingHead(CorrectionHead, Protocol):
    """A head that looks at the tokens before a slot one by one, so that it can score several of them at once."""

    def branches(self, block: BlockPass) -> Branches: ...


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of the body that a head sits on; `num_ids` is the number of rows of the draft's own head."""

    hidden_size: int
    vocab_size: int
    num_ids: int
    block_size: int
    shifted_labels: bool
    rms_norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """A head's sizes and variants. Its fields have the names of the publisher's keys."""

    kind: ClassVar[str]
    """What the publisher calls drafts with this head."""
    reads_before: ClassVar[bool] = False
    reads_context: ClassVar[bool] = False
    is_of_slots: ClassVar[bool] = False
    """Do its weights belong to slots? Then no block may be larger than the one that it was trained with."""

    lookups: ClassVar[tuple[str, ...]] = ()
    """Parameters that are tables, of which a token reads a row, by their names in their module."""

    def modules(self, sizes: HeadSizes) -> dict[str, nn.Module]:
        """Return the head's modules, by the names that their tensors begin with in the publisher's files."""
        raise NotImplementedError

    def head(self, draft: Any) -> CorrectionHead:
        """Return the head of a draft that has these modules."""
        raise NotImplementedError

    def passes(self, num_drafts: int) -> tuple[int, int]:
        """Return how many tokens of a row a pass of the head reads, and how many passes it takes for so many drafts."""
        return 1, num_drafts

    @property
    def has_confidence(self) -> bool:
        """Whether it predicts how likely each token is to be accepted."""
        return False

    def unsound(self, sizes: HeadSizes) -> Iterator[tuple[str, object]]:
        """Yield names and values of fields that no head can have."""
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
