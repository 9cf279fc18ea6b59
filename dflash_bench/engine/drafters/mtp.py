"""MTP drafting: one layer of the target's kind steps token by token, as multi-token prediction trained it.

After each verification it first reads the committed tokens with the target's states, taken after the target's final
norm, which overwrites the entries of its own states; then it proposes `num_drafts` tokens with the target's head.
Several modules draft one token each, in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.cache import rotations, to_device
from dflash_bench.engine.drafter import Committed
from dflash_bench.engine.drafters.base import DraftSampler, joined
from dflash_bench.engine.drafters.eagle3 import StepDrafter
from dflash_bench.engine.forward.choice import why_not_layers
from dflash_bench.engine.forward.layers import Product
from dflash_bench.engine.forward.native_drafts import MTPNetwork, NativeMTP, PublishedMTP, network_of
from dflash_bench.engine.graphs import Function
from dflash_bench.engine.lengths import Seen
from dflash_bench.engine.masks import causal_mask
from dflash_bench.engine.target import Target, part_size
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models
from dflash_bench.models.nets.layers import Rotary
from dflash_bench.models.nets.mtp import INDEXED, KINDS, MTPDraft


def build(models: Models, target: Target, method: Method) -> MTPDrafter:
    draft: MTPDraft = models.draft_of(method)
    kind = ModulesDrafter if draft.config.num_layers > 1 else MTPDrafter
    return kind(draft, target.embedding, target.head, method.number("n"), str(method.option("rule")))


class MTPDrafter(StepDrafter):
    """`embedding` and `head` are the target's."""

    network: MTPNetwork

    def __init__(
        self,
        draft: MTPDraft,
        embedding: nn.Module,
        head: Product,
        num_drafts: int,
        rule: str = "match",
    ) -> None:
        super().__init__(draft, num_drafts, num_scratch=num_drafts)
        self.network = network_of(draft)
        self.embedding, self.head = embedding, head
        self.draft_sampler = DraftSampler(rule, lambda ids: ids)

    def compile(self) -> None:
        network, head = self.network, self.head
        if not isinstance(network, NativeMTP) or why_not_layers([network.layer]):
            return
        from dflash_bench.engine.forward.compiled import CompiledLinear, lookup_of
        from dflash_bench.engine.forward.compiled_drafts import CompiledMTP, compiled_once

        self.network = compiled_once(self.draft, lambda: CompiledMTP(network))
        self.embedding = lookup_of(self.embedding)
        if isinstance(head, nn.Linear):
            self.head = CompiledLinear.of(head)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        if isinstance(self.network, PublishedMTP):
            self.by_lengths = False

    def rotary_of(self, length: int) -> Rotary:
        return self.network.tables(length, self.weight.dtype, self.device)

    def replayed(self, function: Function, starts: Sequence[int], *inputs: Tensor) -> tuple[Tensor, ...] | None:
        return super().replayed(function, starts, *inputs) if self.network.is_steady else None

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's states [B, N, H], tapped behind its final norm."""
        return features.to(self.device)

    def _seen(self) -> Seen:
        """Return the view of the tokens just placed; DeepSeek's index needs a mask even if all are seen."""
        config = self.config
        if config.window is None and KINDS[config.text.model_type] != INDEXED:
            return super()._seen()
        return causal_mask(self.cache, self.weight.dtype, window=config.window)

    def observe(self, committed: Committed) -> None:
        self.draft_sampler.sampler = committed.sampler
        super().observe(committed)

    @property
    def is_steady(self) -> bool:
        return self.network.is_steady and self.draft_sampler.is_steady

    def drafted_at(self, num_places: int, _anchor: Tensor, starts: Tensor) -> Tensor:
        return self.chain_at(num_places, starts, self.head)

    def propose(self) -> Draft:
        return self.chain(self.head)


class ModulesDrafter(MTPDrafter):
    """Drafts the first token by the first module, the second by the second, and so on.

    Module k reads, at each position, the token k + 1 positions further, which for a row's last k positions is a drafted
    one. So each proposal reads these positions again, and the target's newest states and the tokens that follow them
    are kept: `states` [B, W, H] and `following` [B, W] end with each row's newest.
    """

    def __init__(
        self, draft: MTPDraft, embedding: nn.Module, head: Product, num_drafts: int, rule: str = "match"
    ) -> None:
        if num_drafts > draft.config.num_layers:
            most = draft.config.num_layers
            raise UserError(f"{most} MTP modules draft at most {most} tokens per round; give --method mtp:{most}")
        super().__init__(draft, embedding, head, num_drafts, rule)
        modules = [draft, *draft.further][:num_drafts]
        self.networks = [PublishedMTP(module, place) for place, module in enumerate(modules)]
        self.network = self.networks[0]

    def allocate(self, num_rows: int, capacity: int) -> None:
        super().allocate(num_rows, capacity)
        # Positions that are read again, and those that a round adds.
        self.again, width = self.num_drafts - 1, 2 * self.num_drafts
        self.places = torch.arange(width, device=self.device)
        self.states = self.weight.new_zeros(num_rows, width, self.config.hidden_size)
        self.following = self.tokens.new_zeros(num_rows, width)

    def begin(self, num_rows: int, capacity: int) -> None:
        super().begin(num_rows, capacity)
        self.num_new = 1

    def observe(self, committed: Committed) -> None:
        """Keep the newest states and tokens; read prompts, whose last positions the proposal reads again."""
        assert committed.hidden is not None
        self.draft_sampler.sampler = committed.sampler
        rows, counts = committed.row_slice, committed.counts
        states = torch.cat([self.states[rows], self.fuse(committed.hidden)], dim=1)
        following = torch.cat([self.following[rows], committed.tokens], dim=1)
        newest = to_device(counts, self.device)[:, None] + self.places
        self.states[rows] = states.take_along_dim(newest[..., None], dim=1)
        self.following[rows] = following.take_along_dim(newest, dim=1)
        if committed.is_prompt:
            kept = len(self.places) - self.again
            skipped = [max(0, self.again - start) for start in committed.starts]
            starts = [max(0, start - self.again) for start in committed.starts]
            self._read(states[:, kept:], following[:, kept:], starts, skipped, committed.first)
        else:
            self.num_new = max(self.num_new, *counts)
        self.advance(committed)

    def propose(self) -> Draft:
        width = self.again + self.num_new
        self.num_new = 1
        skipped = [max(0, width - end) for end in self.starts]
        starts = [max(0, end - width) for end in self.starts]
        last = to_device([width - skip - 1 for skip in skipped], self.device)
        probs = self._read(self.states[:, -width:], self.following[:, -width:], starts, skipped, last=last)
        return Draft(self.tokens, probs=joined(probs))

    def _read(
        self,
        states: Tensor,
        tokens: Tensor,
        starts: Sequence[int],
        skipped: Sequence[int],
        first: int = 0,
        last: Tensor | None = None,
    ) -> list[Tensor | None]:
        """Read states [B, W, H] and the tokens [B, W] that follow them, each row from `starts` on, by all modules.

        A row's first `skipped` entries are of no position. With `last` [B], the index of each row's newest entry among
        the others, draft a token there by each module; return the distributions [B, 1, V], None for choices.
        """
        if any(skipped):
            columns = torch.arange(tokens.shape[1], device=self.device)
            moved = (to_device(skipped, self.device)[:, None] + columns).clamp(max=len(columns) - 1)
            states, tokens = states.take_along_dim(moved[..., None], dim=1), tokens.gather(1, moved)
            states, tokens = states[:, : len(columns) - min(skipped)], tokens[:, : len(columns) - min(skipped)]
        probs: list[Tensor | None] = []
        for place, network in enumerate(self.networks):
            states = self._pass(network, tokens, states, starts, first)
            tokens = tokens.roll(-1, dims=1)
            if last is not None:
                logits = self.head(states[self.rows, last][:, None])
                self.tokens[:, place : place + 1], drawn_from = self.draft_sampler.sample(logits, first=place)
                tokens[self.rows, last] = self.tokens[:, place]
                probs.append(drawn_from)
        return probs

    def _pass(self, network: PublishedMTP, tokens: Tensor, states: Tensor, starts: Sequence[int], first: int) -> Tensor:
        """Return a module's output [B, W, H]; long prompts are read in parts."""
        size, outputs = part_size(self.device), list[Tensor]()
        for at in range(0, tokens.shape[1], size):
            part = tokens[:, at : at + size]
            self.cache.place([start + at for start in starts], part.shape[1], first)
            tables = rotations(self.rotary, self.cache)
            outputs.append(
                network.forward(self.embedding(part), states[:, at : at + size], tables, self._seen(), self.cache)
            )
        return torch.cat(outputs, dim=1)
