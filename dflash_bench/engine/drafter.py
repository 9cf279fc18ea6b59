"""The interface between the loop and its drafters: the loop passes committed tokens, a drafter proposes new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.verify import Draft


@dataclass(frozen=True, slots=True)
class Committed:
    """The places that the target has read since the last call, for B rows; row b has counts[b] valid places.

    The rows are all rows, or a few rows in prefill while the others stand still.

    `hidden` [B, M, K * H] are the outputs of the K tapped layers at positions starts[b] ..., `tokens` [B, M] are the
    tokens that *follow* these positions, and `anchor` [B] is the last of them: committed, but not yet read by the
    target (slot 0 of a DFlash block); None while the rest of a prompt is still to come. `texts` hold each row's prompt,
    answer and anchor on the host. They are the lists that the loop itself appends to: a drafter must not change them,
    and if it keeps them they hold the whole answer in the end. Drafters that draw tokens use `sampler`
    (`drafters/base.py`). `choices` are present if the draft asked for them: per row, the target's choice after the
    anchor and after each drafted token, accepted or not.
    """

    hidden: Tensor | None
    tokens: Tensor
    anchor: Tensor | None
    starts: list[int]
    counts: list[int]
    texts: Sequence[Sequence[int]] = ()
    sampler: Sampler | None = None
    choices: Sequence[Sequence[int]] = ()
    first: int = 0
    """The index of the first row among all rows of the batch; the others follow it."""
    is_prompt: bool = False
    """Whether these are prompt tokens. A long prompt comes in parts; only the last part has an anchor."""
    requests: Sequence[int] = ()
    """The index of each row's prompt."""

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.starts))

    @property
    def last(self) -> list[int]:
        """Return the index of each row's last valid place; 0 for a row that stands still."""
        return [max(count, 1) - 1 for count in self.counts]

    @property
    def row_slice(self) -> slice:
        """Return `rows` as an index of tensors."""
        return slice(self.first, self.first + len(self.starts))


class Drafter(Protocol):
    """Proposes tokens. The loop calls `begin` once, and then `observe` and `propose` in turn, once per round.

    `begin` prepares buffers: it is not timed, so a run allows it a few milliseconds (`runner/stopwatch.py`).
    """

    taps: tuple[int, ...]
    """The target's layers (0-based) whose outputs it needs."""
    num_drafts: int
    """The maximum number of tokens proposed per round."""

    def begin(self, num_rows: int, capacity: int) -> None: ...

    def observe(self, committed: Committed) -> None: ...

    def propose(self) -> Draft | None: ...


@runtime_checkable
class Foresees(Protocol):
    """A probe that must read all requests before they are decoded; this work is not timed."""

    def foresee(
        self, prompts: Sequence[Sequence[int]], limits: Limits, sampling: Sampling, seeds: Sequence[int] | None
    ) -> None: ...


@runtime_checkable
class Captures(Protocol):
    """A drafter whose passes can be captured (`graphs.py`)."""

    graph_cache: GraphCache | None

    def capture(self, shortest: int, longest: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """A verified chain of N drafted tokens, held by the device alone, for B rows; see `Committed`."""

    hidden: Tensor
    """[B, N + 1, K * H] at the places starts[b] ..., of which the first num_accepted[b] + 1 count."""
    tokens: Tensor
    """[B, N + 1], the tokens that follow these places."""
    starts: Tensor
    num_accepted: Tensor
    newest: Tensor
    """[B, 2], the new anchor and the token before it, which is first."""


@runtime_checkable
class SteadyDrafter(Drafter, Captures, Protocol):
    """A drafter of chains that needs nothing but shapes from the host for a round (`steady.py`).

    `drafted_at` does the work of `propose`, and `kept_at` that of `observe` after a round; prompts come to `observe`.
    Both write to tensors that stay where they are until the drafter allocates a new cache.
    """

    @property
    def is_steady(self) -> bool:
        """Whether this holds for its options and the current sampler."""
        ...

    def reach(self, starts: Sequence[int]) -> int:
        """Return how many places of its cache both passes cover, given the rows' starts; or `graphs.WHOLE`."""
        ...

    def drafted_at(self, num_places: int, anchor: Tensor, starts: Tensor) -> Tensor:
        """Return the tokens [B, N] drafted behind anchors [B], which stand at these starts [B]."""
        ...

    def kept_at(self, num_places: int, kept: Kept) -> None: ...


@runtime_checkable
class Compiles(Protocol):
    """A drafter whose network can be computed by compiled kernels (`forward/compiled.py`)."""

    def compile(self) -> None: ...


@runtime_checkable
class StandAlone(Drafter, Protocol):
    """A drafter whose own model takes the target's place. Its proposals are committed unverified, so it is lossy."""

    reader: Any
    """A `Target`, or what reads prompts and commits in its place."""


class NoDrafter:
    """Plain decoding: proposes nothing."""

    taps: tuple[int, ...] = ()
    num_drafts = 0

    def begin(self, num_rows: int, capacity: int) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        pass

    def propose(self) -> Draft | None:
        return None
