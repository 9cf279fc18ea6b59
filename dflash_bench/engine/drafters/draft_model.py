"""A small causal LM drafts token by token, as in the original speculative decoding (arXiv 2211.17192, section 2).

It runs on the same engine as the target (`engine/target.py`), with the same cache, positions and masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dflash_bench.core.errors import UserError
from dflash_bench.core.methods import Method
from dflash_bench.engine.cache import to_device
from dflash_bench.engine.drafter import Committed, Kept
from dflash_bench.engine.drafters.base import DraftSampler, joined
from dflash_bench.engine.forward.native import NativeForward
from dflash_bench.engine.graphs import GraphCache
from dflash_bench.engine.selection import target_like
from dflash_bench.engine.target import Network, Steady, Target
from dflash_bench.engine.verify import Draft
from dflash_bench.models.loading import Models


def build(models: Models, target: Target, method: Method) -> ModelDrafter:
    model = target_like(target, models.draft_of(method))
    if not model.reads_trees:
        kind = model.config.model_type
        raise UserError(f"--draft {method.draft}: a {kind} model has recurrent layers and cannot draft; use another")
    vocab_size = target.model.get_input_embeddings().weight.shape[0]
    return ModelDrafter(model, vocab_size, method.number("n"), str(method.option("rule")))


class ModelDrafter:
    """Drafts with a second `Target`. `vocab_size` is the target's: same tokenizer, but perhaps padded differently."""

    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, vocab_size: int, num_drafts: int, rule: str = "match") -> None:
        self.model, self.num_drafts = model, num_drafts
        self.num_ids = min(vocab_size, model.model.get_input_embeddings().weight.shape[0])
        self.draft_sampler = DraftSampler(rule, lambda ids: ids)
        self.starts: list[int] = []

    def begin(self, num_rows: int, capacity: int) -> None:
        self.model.begin(num_rows, capacity + self.num_drafts)
        if len(self.starts) != num_rows:
            # Captured passes read and write them where they are.
            self.tokens = torch.zeros(num_rows, self.num_drafts, dtype=torch.long, device=self.model.device)
            self.last = torch.zeros(num_rows, 2, dtype=torch.long, device=self.model.device)
        self.starts = [0] * num_rows

    @property
    def network(self) -> Network:
        return self.model.network

    @property
    def graph_cache(self) -> GraphCache | None:
        """Return the model's own cache; it is set here only if our own code computes the model."""
        return self.model.graph_cache

    @graph_cache.setter
    def graph_cache(self, graphs: GraphCache | None) -> None:
        self.model.graph_cache = graphs if isinstance(self.model.network, NativeForward) else None

    def capture(self, shortest: int, longest: int) -> None:
        self.model.capture(shortest, longest + self.num_drafts)

    def observe(self, committed: Committed) -> None:
        if committed.anchor is None:
            return
        self.draft_sampler.sampler = committed.sampler
        if committed.is_prompt:
            prompts = [text[:-1] for text in committed.texts]
            self.model.prefill(
                [[min(token, self.num_ids - 1) for token in prompt] for prompt in prompts], first=committed.first
            )
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            self.starts[row] = start + count
        self.last[committed.row_slice] = self._last(committed)

    def _last(self, committed: Committed) -> Tensor:
        """Return each row's anchor and the token before it [B, 2].

        After a fully accepted draft the model has not read the token before the anchor yet; otherwise reading it again
        changes nothing.
        """
        flat = [token for text in committed.texts for token in (text[max(len(text) - 2, 0)], text[-1])]
        return to_device(flat, self.model.device).view(-1, 2)

    @property
    def is_steady(self) -> bool:
        return self.draft_sampler.is_steady

    def reach(self, starts: Sequence[int]) -> int:
        return self.model.reach(starts, self.num_drafts)

    def drafted_at(self, num_places: int, _anchor: Tensor, starts: Tensor) -> Tensor:
        network = self.model.network
        assert isinstance(network, Steady)
        block, begins = self.last, (starts - 1).clamp(min=0)
        for i in range(self.num_drafts):
            last, *_ = self.model.steady(num_places, block.clamp(max=self.num_ids - 1), begins)
            block, _ = self.draft_sampler.sample(network.logits(last[:, -1:])[..., : self.num_ids], first=i)
            self.tokens[:, i : i + 1], begins = block, starts + (i + 1)
        return self.tokens

    def kept_at(self, _num_places: int, kept: Kept) -> None:
        self.last.copy_(kept.newest)

    def propose(self) -> Draft:
        probs: list[Tensor | None] = []
        # A row that has not begun writes where its prompt will.
        block, starts = self.last, [max(start, 1) - 1 for start in self.starts]
        for i in range(self.num_drafts):
            logits = self.model.forward(block.clamp(max=self.num_ids - 1), starts).logits
            tokens, drawn_from = self.draft_sampler.sample(logits[:, -1:, : self.num_ids], first=i)
            self.tokens[:, i : i + 1] = block = tokens
            probs.append(drawn_from)
            starts = [start + i + 1 for start in self.starts]
        return Draft(self.tokens, probs=joined(probs))
