"""Mistakes that leave every answer plausible and its distribution wrong, planted one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from faults import _rollback, _stale_row
from torch import Tensor

from dflash_bench.engine import decoding, verify
from dflash_bench.engine.drafters.picking import Picker
from dflash_bench.engine.sampling import Sampler, probabilities
from dflash_bench.engine.verify import Draft, Verdict, verify_chain, verify_sampled, verify_tree

REJECTION, MATCH, TREE = "dflash:n=4,rule=rejection", "dflash:4", "eagle3-tree:nodes=8"


@dataclass(frozen=True)
class WrongRule:
    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    methods: tuple[str, ...] = (REJECTION, MATCH, TREE)
    """Those whose distribution it changes."""


def _keeps_too_much(patch: pytest.MonkeyPatch) -> None:
    """A token drawn from q is kept with probability min(1, 1.5 p / q)."""

    def faulty(tokens: Tensor, p: Tensor, q: Tensor, accept: Tensor, *rest: Any) -> Verdict:
        return verify_sampled(tokens, p, q, accept / 1.5, *rest)

    patch.setattr(decoding, "verify_sampled", faulty)


def _keeps_what_does_not_match(patch: pytest.MonkeyPatch) -> None:
    """One drafted token in ten is kept whatever the target has drawn."""
    generator = torch.Generator().manual_seed(0)

    def lenient(tokens: Tensor, choices: Tensor) -> Tensor:
        kept = torch.rand(tokens.shape, generator=generator) < 0.1
        return torch.cat([torch.where(kept, tokens, choices[:, : tokens.shape[1]]), choices[:, -1:]], dim=1)

    def chain(tokens: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        return verify_chain(tokens, lenient(tokens, choices) if tokens.shape[1] else choices, *rest)

    def tree(tokens: Tensor, parents: Tensor, choices: Tensor, *rest: Any) -> Verdict:
        choices = choices.clone()
        choices[:, :1] = lenient(tokens[:, :1], choices[:, :1])[:, :1]
        return verify_tree(tokens, parents, choices, *rest)

    patch.setattr(decoding, "verify_chain", chain)
    patch.setattr(decoding, "verify_tree", tree)


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


def _same_number_twice(patch: pytest.MonkeyPatch) -> None:
    """What decides on a token is the number that it was drawn with."""
    numbers = Sampler.numbers

    def faulty(self: Sampler, purpose: Any, places: Tensor) -> Tensor:
        if purpose == "accept":
            # A drafted token is for the place that the row above it leads to.
            purpose = "draft"
        return numbers(self, purpose, places)

    patch.setattr(Sampler, "numbers", faulty)


WRONG_RULES = (
    WrongRule("accepts too much: min(1, 1.5 p / q)", _keeps_too_much, (REJECTION,)),
    WrongRule("accepts too much: one in ten unseen", _keeps_what_does_not_match, (MATCH, TREE)),
    WrongRule("residual drawn from p", _residual_of_p, (REJECTION,)),
    WrongRule("temperature ignored in verification", _blocks_verified_with(temperature=1.0)),
    WrongRule("top-p for the draft only", _blocks_verified_with(top_p=1.0)),
    WrongRule("top-p not in what the draft says it drew from", _draft_says_without_top_p, (REJECTION,)),
    WrongRule("one random number for drawing and deciding", _same_number_twice, (REJECTION,)),
    WrongRule("stale cache: a drafted token is not written", _stale_row),
    WrongRule("stale cache: rolled back by one too few", _rollback(1)),
)
