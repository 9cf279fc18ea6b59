"""Mistakes that leave every answer plausible and its distribution wrong, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_bench.engine import loop, verify
from dflash_bench.engine.cache import KVCache
from dflash_bench.engine.drafters.base import DraftSampler
from dflash_bench.engine.forward.compiled import CompiledForward
from dflash_bench.engine.forward.hf import PassInputs
from dflash_bench.engine.masks import ancestors
from dflash_bench.engine.sampling import Sampler, probabilities
from dflash_bench.engine.verify import Draft, Verdict, verify_chain, verify_sampled, verify_tree
from helpers.faults.in_engine import READ, Pair, around_writes, stale

REJECTION, MATCH, TREE = "dflash:rule=rejection", "dflash", "eagle3-tree:nodes=8"
SERIOUS = 4
"""The depth from which on a draft is believed, where it is."""
LATE = 8
"""The token from which on the temperature is another, where it is."""


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
        patch.setattr(loop, name, faulty)


def _residual(share: float) -> Callable[[pytest.MonkeyPatch], None]:
    """The replacement of a refused token is drawn from max(p - share * q, 0), not from max(p - q, 0)."""
    sound = verify._residual
    return lambda patch: patch.setattr(verify, "_residual", lambda p, q: sound(p, share * q))


def _blocks_verified_with(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """The target's distribution has other settings for blocks alone."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound = loop._State._verify

        def faulty(self: Any, draft: Draft | None, logits: Tensor) -> Verdict:
            if draft is None:
                return sound(self, draft, logits)
            kept = self.sampler.sampling
            self.sampler.sampling = replace(kept, **changes)
            try:
                return sound(self, draft, logits)
            finally:
                self.sampler.sampling = kept

        patch.setattr(loop._State, "_verify", faulty)

    return plant


def _draft_says_without_top_p(patch: pytest.MonkeyPatch) -> None:
    """Tokens are drawn with top-p, and said to be drawn without."""
    pick = DraftSampler.sample

    def faulty(self: DraftSampler, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        tokens, probs = pick(self, logits, first)
        assert self.sampler is not None
        return tokens, None if probs is None else probabilities(logits, replace(self.sampler.sampling, top_p=1.0))

    patch.setattr(DraftSampler, "sample", faulty)


def _stale_anchor(patch: pytest.MonkeyPatch) -> None:
    """A refused draft's cache entry is not overwritten by the token that replaced it."""

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

    def kept(layers: CompiledForward, inputs: PassInputs) -> tuple[Tensor, list[Tensor]]:
        """The same where compiled kernels write: what they wrote is taken back after their pass."""
        cache = layers.cache
        if inputs.mask.width < 2:
            return READ(layers, inputs)
        (stack,) = cache._stacks
        num_rows = len(cache.positions)
        rows = cache.first_row + torch.arange(num_rows)
        at = cache.positions[:, 0].expand(num_rows)
        old = stack[:, rows, :, at].clone()
        result = READ(layers, inputs)
        stack[:, rows, :, at] = torch.where((old != 0).any(dim=-1, keepdim=True), old, stack[:, rows, :, at])
        return result

    around_writes(patch, keep)
    patch.setattr(CompiledForward, "read", kept)


def _bonus_from_draft(patch: pytest.MonkeyPatch) -> None:
    """Behind a draft that is kept whole stands once more what the draft says of its own last place."""

    def sampled(tokens: Tensor, p: Tensor, q: Tensor, *rest: Any) -> Verdict:
        return verify_sampled(tokens, torch.cat([p[:, :-1], q[:, -1:]], dim=1), q, *rest)

    def chain(tokens: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        bonus = tokens[:, -1:] if tokens.shape[1] else choices[:, -1:]
        return verify_chain(tokens, torch.cat([choices[:, :-1], bonus], dim=1), *rest)

    def tree(tokens: Tensor, parents: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        nodes = torch.arange(tokens.shape[1])
        is_leaf = (parents[:, None] != nodes[:, None]).all(dim=-1)
        own = torch.where(is_leaf, tokens, choices[:, 1:])
        return verify_tree(tokens, parents, torch.cat([choices[:, :1], own], dim=1), *rest)

    for name, faulty in (("verify_sampled", sampled), ("verify_chain", chain), ("verify_tree", tree)):
        patch.setattr(loop, name, faulty)


def _kept_from_depth(patch: pytest.MonkeyPatch) -> None:
    """No draft token at depth SERIOUS or deeper is refused."""

    def sampled(tokens: Tensor, p: Tensor, q: Tensor, accept: Tensor, *rest: Any) -> Verdict:
        accept = accept.clone()
        accept[:, SERIOUS - 1 :] = -1
        return verify_sampled(tokens, p, q, accept, *rest)

    def chain(tokens: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        believed = torch.cat([choices[:, : SERIOUS - 1], tokens[:, SERIOUS - 1 :], choices[:, -1:]], dim=1)
        return verify_chain(tokens, believed if tokens.shape[1] >= SERIOUS else choices, *rest)

    def tree(tokens: Tensor, parents: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        choices, depths = choices.clone(), ancestors(parents).sum(dim=-1)[:, 1:] - 1
        # The eldest of several children is believed.
        for node in reversed(range(tokens.shape[1])):
            at = parents[:, node : node + 1] + 1
            token = torch.where(depths[:, node] >= SERIOUS, tokens[:, node], choices.gather(1, at)[:, 0])
            choices.scatter_(1, at, token[:, None])
        return verify_tree(tokens, parents, choices, *rest)

    for name, faulty in (("verify_sampled", sampled), ("verify_chain", chain), ("verify_tree", tree)):
        patch.setattr(loop, name, faulty)


def _cold_when_late(patch: pytest.MonkeyPatch) -> None:
    """From token LATE on the target's temperature is half of what it should be."""
    sound = loop._State._verify

    def faulty(self: Any, draft: Draft | None, logits: Tensor) -> Verdict:
        places = self.sampler.places(logits.shape[1], draft.parents if draft else None)
        return sound(self, draft, torch.where(places[..., None] >= LATE - 1, 2 * logits, logits))

    patch.setattr(loop._State, "_verify", faulty)


def _numbers(change: Callable[[str, Tensor], tuple[str, Tensor]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Other random numbers are used than those that were asked for."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        sound: Any = Sampler.numbers
        patch.setattr(Sampler, "numbers", lambda self, purpose, places: sound(self, *change(purpose, places)))

    return plant


WRONG_RULES = (
    WrongRule("accepts too much: one draft in ten unseen", _keeps_too_much),
    WrongRule("residual drawn from p", _residual(0), (REJECTION,)),
    WrongRule("residual drawn from p - q/2", _residual(0.5), (REJECTION,)),
    WrongRule("residual drawn from p - 2q", _residual(2), (REJECTION,)),
    WrongRule("temperature ignored in verification", _blocks_verified_with(temperature=1.0)),
    WrongRule("top-p for the draft only", _blocks_verified_with(top_p=1.0)),
    WrongRule("stale cache: drafted tokens are not written", stale()),
    WrongRule("stale cache: a refused token stays", _stale_anchor),
    WrongRule("bonus token from the draft", _bonus_from_draft),
    WrongRule("everything kept from depth 4 on", _kept_from_depth),
    WrongRule("half the temperature from token 8 on", _cold_when_late),
)
NUMBERS = (
    WrongRule("one random number for two tokens", _numbers(lambda name, at: (name, at // 2 * 2)), (MATCH, TREE)),
    WrongRule(
        "one random number for refusing and drawing",
        _numbers(lambda name, at: ("draw" if name == "accept" else name, at)),
        (REJECTION,),
    ),
)
"""Random numbers used twice. On nano the first takes all of the draws, the second more, or a better draft."""
SUBTLE = WrongRule("top-p not in what the draft says it drew from", _draft_says_without_top_p, (REJECTION,))
"""With top-p 0.9 it keeps a tenth too much at most."""
FAINT = WrongRule("stale cache: the first drafted token is not written", stale(1), (TREE,))
"""The first node of a tree is one of several that are kept, and its own entry matters little here."""
