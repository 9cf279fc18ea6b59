"""Mistakes that leave every answer plausible and its distribution wrong, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from faults import Pair, around_writes, stale
from torch import Tensor

from dflash_bench.engine import decoding, verify
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafters.picking import Picker
from dflash_bench.engine.sampling import probabilities
from dflash_bench.engine.verify import Draft, Verdict, verify_chain, verify_sampled, verify_tree

REJECTION, MATCH, TREE = "dflash:n=4,rule=rejection", "dflash:4", "eagle3-tree:nodes=8"


@dataclass(frozen=True)
class WrongRule:
    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    methods: tuple[str, ...] = (REJECTION, MATCH, TREE)
    """Those whose distribution it changes."""


def _keeps_too_much(patch: pytest.MonkeyPatch) -> None:
    """One drafted token in ten is kept whatever the target says of it."""
    generator = torch.Generator().manual_seed(0)

    def let_through(tokens: Tensor) -> Tensor:
        return torch.rand(tokens.shape, generator=generator) < 0.1

    def sampled(tokens: Tensor, p: Tensor, q: Tensor, accept: Tensor, *rest: Any) -> Verdict:
        return verify_sampled(tokens, p, q, accept.masked_fill(let_through(tokens), -1), *rest)

    def chain(tokens: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        choices = choices.clone()
        choices[:, :-1] = torch.where(let_through(tokens), tokens, choices[:, :-1])
        return verify_chain(tokens, choices, *rest)

    def tree(tokens: Tensor, parents: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        choices = choices.clone()
        choices[:, :1] = torch.where(let_through(tokens[:, :1]), tokens[:, :1], choices[:, :1])
        return verify_tree(tokens, parents, choices, *rest)

    for name, faulty in (("verify_sampled", sampled), ("verify_chain", chain), ("verify_tree", tree)):
        patch.setattr(decoding, name, faulty)


def _residual_of_p(patch: pytest.MonkeyPatch) -> None:
    """What takes a refused token's place is drawn from p, not from p - q."""
    patch.setattr(verify, "_residual", lambda p, q: p)


def _blocks_verified_with(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Of blocks, and of nothing else, the target's distribution is made with other settings."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = decoding._State._verify

        def faulty(self: Any, draft: Draft | None, logits: Tensor) -> Verdict:
            if draft is None:
                return sound(self, draft, logits)
            kept = self.sampler.sampling
            self.sampler.sampling = replace(kept, **changes)
            try:
                return sound(self, draft, logits)
            finally:
                self.sampler.sampling = kept

        patch.setattr(decoding._State, "_verify", faulty)

    return plant


def _draft_says_without_top_p(patch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn with top-p, and said to be drawn without."""
    pick = Picker.pick

    def faulty(self: Picker, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        tokens, probs = pick(self, logits, first)
        assert self.sampler is not None
        return tokens, None if probs is None else probabilities(logits, replace(self.sampler.sampling, top_p=1.0))

    patch.setattr(Picker, "pick", faulty)


def _stale_anchor(patch: pytest.MonkeyPatch) -> None:
    """What a refused draft left in the cache is not overwritten by the token that took its place."""

    def keep(cache: KVCache, layer: int, width: int, write: Callable[[], Pair]) -> Pair:
        if layer not in cache._layers or width < 2:
            return write()
        rows, at = torch.arange(cache.num_rows), cache.positions[:, 0].expand(cache.num_rows)
        before = [buffer[rows, :, at].clone() for buffer in cache._layers[layer]]
        result = write()
        for buffer, old in zip(cache._layers[layer], before, strict=True):
            new = buffer[rows, :, at]
            # Places that were never written hold zeros.
            buffer[rows, :, at] = torch.where((old != 0).any(dim=-1, keepdim=True), old, new)
        return result

    around_writes(patch, keep)


WRONG_RULES = (
    WrongRule("accepts too much: one draft in ten unseen", _keeps_too_much),
    WrongRule("residual drawn from p", _residual_of_p, (REJECTION,)),
    WrongRule("temperature ignored in verification", _blocks_verified_with(temperature=1.0)),
    WrongRule("top-p for the draft only", _blocks_verified_with(top_p=1.0)),
    WrongRule("stale cache: drafted tokens are not written", stale()),
    WrongRule("stale cache: a refused token stays", _stale_anchor),
)
SUBTLE = WrongRule("top-p not in what the draft says it drew from", _draft_says_without_top_p, (REJECTION,))
"""With top-p 0.9 it keeps a tenth too much at most."""
FAINT = WrongRule("stale cache: the first drafted token is not written", stale(1), (TREE,))
"""Of a tree's nodes the first is one of several that are kept, and its own entry matters little to it here."""
