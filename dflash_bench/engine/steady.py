"""Rounds of greedy chains as three captured passes: draft, verify, keep. Their state stays on the device.

The passes hand their results to each other at fixed addresses, and the last one moves each row's start and anchor. The
host launches them, and reads one packed tensor after the second; it copies starts and anchors to the device only where
its own differ, after a prefill or for a row that has ended. The clock's marks stand between the passes, so each phase
is timed as in any other round. Until the passes are captured (`graphs.py`), they are computed one operation at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine.cache import on_host
from dflash_bench.engine.drafter import Captures, Drafter, Kept, NoDrafter, SteadyDrafter
from dflash_bench.engine.graphs import ANY, Fixed, Function, GraphCache
from dflash_bench.engine.sampling import Sampler
from dflash_bench.engine.target import Steady, Target
from dflash_bench.engine.verify import Draft, greedy_outcome


@dataclass(frozen=True, slots=True)
class RoundBuffers:
    """Tensors at fixed addresses, for B rows and N drafted tokens."""

    starts: Tensor
    """[B], where each row's block begins."""
    block: Tensor
    """[B, N + 1], the anchor and the drafted tokens."""
    read_at: Tensor
    """[B], where the verified block began."""
    hidden: Tensor
    """[B, N + 1, K * H], the taps' outputs at its places."""
    outcome: Tensor
    """[B, n], `greedy_outcome` and the drafted tokens."""
    parts: Mapping[str, Tensor]
    """Its parts by name."""
    anchor: Tensor
    """[B], the first place of the block."""

    @classmethod
    def of(cls, target: Target, width: int, num_taps: int) -> RoundBuffers:
        """Return the buffers of blocks [B, width] of this target, the same each time."""
        num_rows = target.cache.num_rows
        key = (num_rows, width, num_taps)
        if key not in target.fixed:
            block = torch.zeros(num_rows, width, dtype=torch.long, device=target.device)
            starts, read_at = block.new_zeros(num_rows), block.new_zeros(num_rows)
            hidden = block.new_zeros(num_rows, width, num_taps * target.config.hidden_size, dtype=target.model.dtype)
            widths = {"accepted": 1, "next": 1, "choices": width, "tokens": width, "broken": width}
            widths["drafted"] = width - 1
            outcome = block.new_zeros(num_rows, sum(widths.values()))
            parts = dict(zip(widths, outcome.split([*widths.values()], dim=1), strict=True))
            target.fixed[key] = cls(starts, block, read_at, hidden, outcome, parts, block[:, 0])
        buffers: RoundBuffers = target.fixed[key]
        return buffers


class SteadyRounds:
    """The passes of a round. `drafter` is None for plain decoding."""

    def __init__(self, target: Target, drafter: SteadyDrafter | None) -> None:
        graphs = target.graph_cache if drafter is None else drafter.graph_cache
        assert target.graph_cache is not None and graphs is not None
        self.target, self.drafter, self.verifying, self.drafting = target, drafter, target.graph_cache, graphs
        self.width, self.taps = (1, ()) if drafter is None else (drafter.num_drafts + 1, drafter.taps)
        self.held: list[int] = []
        """The starts that the device holds."""

    @classmethod
    def of(cls, target: Target, drafter: Drafter, sampler: Sampler) -> SteadyRounds | None:
        """Return the rounds of a drafter, or None if they need the host or cannot be captured."""
        if not sampler.greedy or sampler.penalises or not _captures(target):
            return None
        if type(drafter) is NoDrafter:
            rounds = cls(target, None)
        elif isinstance(drafter, SteadyDrafter) and _is_steady(drafter) and _captures(drafter):
            rounds = cls(target, drafter)
        else:
            return None
        return rounds if rounds._may_run() else None

    @property
    def buffers(self) -> RoundBuffers:
        return RoundBuffers.of(self.target, self.width, len(self.taps))

    def propose(self, starts: list[int], anchor: Tensor) -> Draft | None:
        """Draft behind each row's anchor [B], which the target will read at its start."""
        buffers = self.buffers
        if self.held != starts:
            buffers.starts.copy_(on_host(starts, self.target.device), non_blocking=True)
            self.held = list(starts)
        if anchor is not buffers.anchor:
            buffers.anchor.copy_(anchor)
        if self.drafter is None:
            return None
        self._run(self.drafting, "draft", self._draft, self.drafter.reach(starts), self._drafted)
        return Draft(buffers.block[:, 1:])

    def verify(self, starts: Sequence[int]) -> tuple[Mapping[str, Tensor], Tensor]:
        """Verify the draft; return what the host needs by name, and as one tensor."""
        self.target.begin_pass(self.width)
        self._run(self.verifying, "verify", self._verify, self.target.reach(starts, self.width), self._all)
        return self.buffers.parts, self.buffers.outcome

    def keep(self, starts: Sequence[int], accepted: Sequence[int]) -> Tensor:
        """Hand the verified tokens to the drafter, accepted[b] + 1 of row b, and move all rows; return the anchors."""
        num_places = ANY if self.drafter is None else self.drafter.reach(starts)
        self._run(self.drafting, "keep", self._keep, num_places, self._all)
        self.held = [start + count + 1 for start, count in zip(starts, accepted, strict=True)]
        return self.buffers.anchor

    def _key(self, name: str) -> tuple[object, ...]:
        return name, self.width, self.taps

    def _may_run(self) -> bool:
        names = ((self.drafting, "draft"), (self.verifying, "verify"), (self.drafting, "keep"))
        return all(graphs.may_try(self._key(name)) for graphs, name in names)

    def _run(self, graphs: GraphCache, name: str, function: Function, num_places: int, fixed: Fixed) -> None:
        if graphs.replay(self._key(name), function, num_places, *fixed(), fixed=fixed) is None:
            function(graphs.bucket(num_places), *fixed())

    # Each pass leaves what it reads as it is, so that it may run again, as it does while it is captured.

    def _drafted(self) -> tuple[Tensor, ...]:
        return self.buffers.starts, self.buffers.block

    def _draft(self, num_places: int, starts: Tensor, block: Tensor) -> tuple[Tensor, ...]:
        assert self.drafter is not None
        block[:, 1:] = self.drafter.drafted_at(num_places, block[:, 0], starts)
        return (block,)

    def _all(self) -> tuple[Tensor, ...]:
        buffers = self.buffers
        return buffers.starts, buffers.block, buffers.read_at, buffers.hidden, buffers.outcome

    def _verify(
        self, num_places: int, starts: Tensor, block: Tensor, read_at: Tensor, hidden: Tensor, outcome: Tensor
    ) -> tuple[Tensor, ...]:
        assert isinstance(self.target.network, Steady)
        last, *tapped = self.target.steady(num_places, block, starts)
        features = self.target.features(tapped)
        if features is not None:
            hidden.copy_(features)
        read_at.copy_(starts)
        outcome.copy_(torch.cat([greedy_outcome(self.target.network.logits(last), block), block[:, 1:]], dim=1))
        return outcome, *([hidden] if tapped else [])

    def _keep(
        self, num_places: int, starts: Tensor, block: Tensor, read_at: Tensor, hidden: Tensor, outcome: Tensor
    ) -> tuple[Tensor, ...]:
        parts = self.buffers.parts
        accepted, anchor = parts["accepted"], parts["next"]
        if self.drafter is not None:
            before = block.gather(1, accepted)
            newest = torch.cat([before, anchor], dim=1)
            self.drafter.kept_at(num_places, Kept(hidden, parts["tokens"], read_at, accepted[:, 0], newest))
        starts.copy_(read_at + accepted[:, 0] + 1)
        block[:, :1] = anchor
        return starts, block


def _captures(reader: object) -> bool:
    graphs = reader.graph_cache if isinstance(reader, Captures) else None
    return graphs is not None and graphs.captures_small


def _is_steady(drafter: SteadyDrafter) -> bool:
    """Return whether the passes are those of the drafter's own `propose` and `observe`, which subclasses override."""
    kind = type(drafter)
    owner: Any = next(one for one in kind.__mro__ if "drafted_at" in vars(one))
    is_own = kind.propose is owner.propose and kind.observe is owner.observe
    return is_own and drafter.is_steady
