"""EAGLE-3 drafting, as a chain: a one-layer network steps token by token on its own output (arXiv 2503.01840, 3.1).

After each verification it first reads the committed tokens again with the target's real features, which overwrites the
features that it made up itself, then proposes `num_drafts` tokens greedily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dflash_bench.core.methods import Method
from dflash_bench.engine.cache import rotations, to_device
from dflash_bench.engine.drafter import Committed, Kept
from dflash_bench.engine.drafters.base import CachedDrafter, DraftSampler, joined
from dflash_bench.engine.forward.choice import why_not_layers
from dflash_bench.engine.forward.native_drafts import Eagle3Network, NativeEagle3, StepNetwork
from dflash_bench.engine.graphs import Function
from dflash_bench.engine.lengths import Seen, placed_lengths
from dflash_bench.engine.masks import causal_mask, pairs_mask
from dflash_bench.engine.target import Target, part_size
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.eagle3 import Eagle3Draft


def build(models: Models, target: Target, method: Method) -> Eagle3Drafter:
    return Eagle3Drafter(models.draft_of(method), target.embedding, method.number("n"))


class StepDrafter(CachedDrafter):
    """A drafter whose network reads pairs of a token and a feature, and steps on its own output.

    Subclasses set `network` and `embedding`, and define how the target's features become the network's (`fuse`).
    """

    network: StepNetwork
    embedding: Callable[[Tensor], Tensor]
    draft_sampler: DraftSampler

    def __init__(self, draft: Any, num_drafts: int, num_scratch: int) -> None:
        super().__init__(draft, num_scratch)
        self.num_drafts = num_drafts

    def fuse(self, features: Tensor) -> Tensor:
        """Return the network's features [B, N, H] for the target's features [B, N, K * Ht]."""
        raise NotImplementedError

    def allocate(self, num_rows: int, capacity: int) -> None:
        self.rows = torch.arange(num_rows, device=self.device)
        self.hidden = self.weight.new_zeros(num_rows, 1, self.config.hidden_size)
        self.tokens = torch.zeros(num_rows, self.num_drafts, dtype=torch.long, device=self.device)

    def observe(self, committed: Committed) -> None:
        """Read the committed tokens with the target's features [B, M, K * H]; keep the last output of each row."""
        read = self.read_committed(committed)
        last = committed.last
        if min(last) == max(last):  # one row above all: a view, and nothing goes to the device
            hidden = read[:, last[0] : last[0] + 1]
        else:
            hidden = read[self.rows[: len(last)], to_device(last, self.device)][:, None]
        self.hidden[committed.row_slice] = hidden
        self.advance(committed)

    def kept_at(self, num_places: int, kept: Kept) -> None:
        (read,) = self.steady(num_places, kept.tokens, self.fuse(kept.hidden), kept.starts)
        self.hidden.copy_(read.take_along_dim(kept.num_accepted[:, None, None], dim=1))

    def read_committed(self, committed: Committed) -> Tensor:
        """Return the network's output [B, M, H] for all committed tokens, read in parts."""
        assert committed.hidden is not None
        size = part_size(self.device)
        outputs = [
            self.step(
                committed.tokens[:, at : at + size],
                self.fuse(committed.hidden[:, at : at + size]),
                [start + at for start in committed.starts],
                committed.first,
            )
            for at in range(0, committed.tokens.shape[1], size)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def step(self, tokens: Tensor, hidden: Tensor, starts: list[int], first: int = 0) -> Tensor:
        """Read tokens [B, N] and features [B, N, H], x_{t+1} with feature of t at position t; return [B, N, H]."""
        if tokens.shape[1] == 1 and (results := self.replayed(self.steady, starts, tokens, hidden)) is not None:
            return results[0]
        self.cache.place(starts, tokens.shape[1], first)
        return self._through(tokens, hidden)

    def steady(self, num_places: int, tokens: Tensor, hidden: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
        """Run `step`, placed by tensors alone, so that it can be captured."""
        self.cache.place_at(starts, tokens.shape[1], num_places)
        return (self._through(tokens, hidden),)

    def chain(self, logits: Callable[[Tensor], Tensor]) -> Draft:
        """Draft token by token, given the head: from the newest output, then from the output of each step."""

        def step(tokens: Tensor, hidden: Tensor, i: int) -> Tensor:
            return self.step(tokens, hidden, [start + i for start in self.starts])

        return self._chain(logits, step)

    def chain_at(self, num_places: int, starts: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tokens [B, N] of `chain`, placed by tensors alone, so that it can be captured."""

        def step(tokens: Tensor, hidden: Tensor, i: int) -> Tensor:
            return self.steady(num_places, tokens, hidden, starts + i)[0]

        return self._chain(logits, step).tokens

    def _chain(self, logits: Callable[[Tensor], Tensor], step: Callable[[Tensor, Tensor, int], Tensor]) -> Draft:
        """Draft token by token; `step` reads the i-th drafted token [B, 1] with the output [B, 1, H] before it."""
        probs: list[Tensor | None] = []
        hidden = self.hidden
        for i in range(self.num_drafts):
            if i:
                hidden = step(self.tokens[:, i - 1 : i], hidden, i - 1)
            self.tokens[:, i : i + 1], drawn_from = self.draft_sampler.sample(logits(hidden), first=i)
            probs.append(drawn_from)
        return Draft(self.tokens, probs=joined(probs))

    def _through(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Read tokens [B, N] and features [B, N, H] where they were placed; return the network's output [B, N, H]."""
        tables = rotations(self.rotary, self.cache)
        return self.network.forward(self.embedding(tokens), hidden, tables, self._seen(), self.cache)

    def _seen(self) -> Seen:
        """Return the view of the tokens just placed: each sees its row's past and itself."""
        if self.by_lengths:
            return placed_lengths(self.cache)
        alone = self.cache.positions.shape[1] == 1 and not self.cache.is_ragged
        return None if alone else causal_mask(self.cache, self.weight.dtype)


class Eagle3Drafter(StepDrafter):
    """`embedding` is the target's, unless the draft has its own; the head is the draft's."""

    network: Eagle3Network

    def __init__(
        self, draft: Eagle3Draft, embedding: nn.Module, num_drafts: int, num_scratch: int | None = None
    ) -> None:
        super().__init__(draft, num_drafts, num_drafts if num_scratch is None else num_scratch)
        self.network = NativeEagle3(draft)
        self.draft_sampler = DraftSampler("match", draft.target_ids)
        self.embedding = draft.embed_tokens if self.config.own_embedding else embedding

    def compile(self) -> None:
        network = self.network
        if not isinstance(network, NativeEagle3) or why_not_layers([network.layer, *network.further]):
            return
        from dflash_bench.engine.forward.compiled import lookup_of
        from dflash_bench.engine.forward.compiled_drafts import CompiledEagle3, compiled_once

        self.network = compiled_once(self.draft, lambda: CompiledEagle3(network))
        self.embedding = lookup_of(self.embedding)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.newest: Tensor | None = None
        if self.config.window is not None:
            self.by_lengths = False

    def replayed(self, function: Function, starts: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...] | None:
        return None if self.config.window is not None else super().replayed(function, starts, *inputs)

    def fuse(self, features: Tensor) -> Tensor:
        return self.network.fuse(features)

    def _seen(self) -> Seen:
        if self.config.window is None:
            return super()._seen()
        return pairs_mask(self.cache, self.weight.dtype, self.hidden_to(self.cache.positions, self.config.window))

    def hidden_to(self, read_at: Tensor, window: int) -> Tensor:
        """Return the last place [B, N] that a window hides from tokens read at these places [B, N].

        As in training, the window of drafted tokens ends at the newest pair, `newest` [B, 1].
        """
        return (read_at if self.newest is None else read_at.minimum(self.newest)) - window

    @property
    def is_steady(self) -> bool:
        return self.config.window is None and self.draft_sampler.is_steady

    def drafted_at(self, num_places: int, _anchor: Tensor, starts: Tensor) -> Tensor:
        return self.chain_at(num_places, starts, self.network.logits)

    def propose(self) -> Draft:
        if self.config.window is not None:
            self.newest = to_device(self.starts, self.device)[:, None] - 1
        draft = self.chain(self.network.logits)
        self.newest = None
        return draft
