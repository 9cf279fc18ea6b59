"""What the loop and its drafters say to each other: what was committed, and what is proposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from dflash_bench.engine.graphs import Replays
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.sampling import Sampler, Sampling
from dflash_bench.engine.target import Target
from dflash_bench.engine.verify import Draft


@dataclass(frozen=True, slots=True)
class Committed:
    """What the target has read since last time, for B rows; row b has counts[b] valid places.

    They are of all rows, or of a few that read their prompts while the others stand still.

    hidden [B, M, K * H] belongs to positions starts[b] ..., tokens [B, M] are those that *follow* each of them, and
    anchor [B] is the last of these: committed, but not yet read; None while the rest of a prompt is to come. `texts`
    are the rows as the host knows them, prompt, answer and anchor; a drafter reads them, and must not change them. They
    are the lists that the loop itself appends to: kept, they show the whole answer once the generation is over. With
    the sampler it draws tokens, if it does (`drafters/base.py`). `choices` are there if the draft wanted them: per
    row what the target chose after the anchor and after each token of the draft, those it did not accept too.
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
    """The number of the first of these rows among all that are decoded together; the others follow it."""
    is_prompt: bool = False
    """Do these rows read their prompts? A long prompt comes in parts, of which only the last one has an anchor."""
    requests: Sequence[int] = ()
    """Of each row, which of the prompts it decodes."""

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.starts))

    @property
    def slots(self) -> slice:
        """`rows`, to index tensors with."""
        return slice(self.first, self.first + len(self.starts))


class Drafter(Protocol):
    taps: tuple[int, ...]
    """Target layers (0-based) whose outputs it wants."""
    num_drafts: int
    """The most tokens it proposes in a round."""

    def begin(self, num_rows: int, capacity: int) -> None: ...

    def observe(self, committed: Committed) -> None: ...

    def propose(self) -> Draft | None: ...


@runtime_checkable
class Foresees(Protocol):
    """A drafter that must know the requests before they are decoded; what it does then is not on the clock."""

    def foresee(
        self, prompts: Sequence[Sequence[int]], limits: Limits, sampling: Sampling, seeds: Sequence[int] | None
    ) -> None: ...


@runtime_checkable
class Captures(Protocol):
    """A drafter whose passes can be captured (`graphs.py`)."""

    replays: Replays | None

    def capture(self, shortest: int, longest: int) -> None: ...


@runtime_checkable
class Packs(Protocol):
    """A drafter whose large weights can get a second layout (`forward/packed.py`)."""

    def pack(self) -> None: ...


@runtime_checkable
class StandAlone(Drafter, Protocol):
    """One whose own model reads in the target's place. What it proposes is committed unverified: it is lossy."""

    reader: Target


class NoDrafter:
    """Plain decoding."""

    taps: tuple[int, ...] = ()
    num_drafts = 0

    def begin(self, num_rows: int, capacity: int) -> None:
        pass

    def observe(self, committed: Committed) -> None:
        pass

    def propose(self) -> Draft | None:
        return None
