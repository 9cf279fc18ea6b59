"""A target that is read once: what it says along its own answers is kept, and drafts are verified against that.

At temperature 0 a target's tokens do not depend on the draft, and nothing that is behind the first rejected token
counts: so drafts that are tried by the dozen need no pass of the target each time. `test_doctor.py` holds it against
the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash_bench.engine import loop
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.judge_weights import checksums
from dflash_bench.engine.loop import AcceptedAnswer
from dflash_bench.engine.rows import Limits
from dflash_bench.engine.target import Output, Target

Prompts = Sequence[Sequence[int]]
KNOWN: dict[Any, dict[str, Any]] = {}
"""Outputs of targets by weights, code, type, prompts and length: most tests ask the same of nano."""


def accepted(target: Target, drafter: Drafter, prompts: Prompts, limits: Limits) -> list[AcceptedAnswer]:
    """Like `engine.loop.measure_acceptance`, with kept answers."""
    length = limits.max_new_tokens + drafter.num_drafts + 2
    if "_weights" not in target.__dict__:
        target.__dict__["_weights"] = tuple(checksums(target.model).values())
    key = (target.__dict__["_weights"], type(target.network), target.model.dtype, tuple(map(tuple, prompts)), length)
    if key not in KNOWN:
        said = vars(Recalled(target, prompts, length))
        del said["_target"]  # Which would keep a model for each length and list of prompts.
        KNOWN[key] = said
    recalled: Any = Recalled.__new__(Recalled)
    vars(recalled).update(KNOWN[key], _target=target, taps=())
    return loop.measure_acceptance(recalled, drafter, prompts, limits)


class Recalled:
    """Decode these prompts together; every answer has `length` tokens, continuing after a stop token."""

    @torch.inference_mode()
    def __init__(self, target: Target, prompts: Prompts, length: int) -> None:
        self._target = target
        self.taps: tuple[int, ...] = ()
        self.ends = [len(prompt) for prompt in prompts]
        layers = target.config.num_hidden_layers - 1
        target.tap(range(layers))
        try:
            target.begin(len(prompts), max(self.ends) + length + 1)
            read = target.prefill(prompts)
            assert read.hidden is not None
            rows, width, size = read.hidden.shape
            self.logits = torch.zeros(rows, width + length, read.logits.shape[-1])
            self.hidden = torch.zeros(rows, width + length, layers, size // layers)
            self.hidden[:, :width] = read.hidden.unflatten(-1, (layers, -1))
            at, row = torch.tensor(self.ends) - 1, torch.arange(rows)
            self.logits[row, at] = read.logits[:, 0].float()
            for _ in range(length):
                at = at + 1
                tokens = self.logits[row, at - 1].argmax(dim=-1, keepdim=True)
                read = target.forward(tokens, at.tolist(), counts=[1] * rows)
                assert read.hidden is not None
                self.logits[row, at] = read.logits[:, 0].float()
                self.hidden[row, at] = read.hidden[:, 0].unflatten(-1, (layers, -1)).float()
        finally:
            target.tap(())
            target.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def tap(self, taps: Sequence[int]) -> None:
        self.taps = tuple(taps)

    def begin(self, num_rows: int, capacity: int) -> None:
        assert num_rows == len(self.ends)

    def capture(self, shortest: int, longest: int) -> None:
        pass

    def commit(self, counts: Sequence[int]) -> None:
        pass

    def prefill(self, prompts: Prompts, starts: Sequence[int], first: int) -> Output:
        assert [len(prompt) for prompt in prompts] == self.ends and not any(starts)
        whole = torch.arange(max(self.ends)).expand(len(self.ends), -1)
        ends = torch.tensor(self.ends)[:, None] - 1
        return Output(self._at(ends).logits, self._at(whole).hidden)

    def forward(self, tokens: Tensor, starts: Sequence[int], parents: Tensor | None = None) -> Output:
        """A token that is not its own answer's is the first rejected one, or behind it."""
        assert parents is None
        places = torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])
        return self._at(places.clamp(max=self.logits.shape[1] - 1))

    def _at(self, places: Tensor) -> Output:
        rows = torch.arange(len(places))[:, None]
        dtype, logits = self._target.model.dtype, self.logits[rows, places]
        if not self.taps:
            return Output(logits.to(dtype), None)
        hidden = self.hidden[rows[..., None], places[..., None], torch.tensor(self.taps)]
        return Output(logits.to(dtype), hidden.flatten(-2).to(dtype))
