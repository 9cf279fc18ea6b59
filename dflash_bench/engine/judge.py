"""The judge checks that an answer is the published model's own, with transformers' code and nothing of this engine.

No cache, mask, tap, forward pass or penalty of ours is involved: the model reads tokens in one pass, or a few at a time
with the cache that transformers makes for it. The difference between the two forms is rounding, the only deviation that
is excused; it does not depend on the engine being judged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from dflash_bench.core import types
from dflash_bench.core.types import Divergence

CEILINGS = {getattr(torch, name): logits for name, logits in types.CEILINGS.items()}
STEPS = 64
"""Number of places, the one in question last, that are read in both forms to measure how far rounding moves logits."""
MARGIN = 3.0
"""A gap may be this many times the difference between the judge's forms, as two engines round differently, at a few
places more than usual. Sound answers in bfloat16 need up to 1.5 (results/exactness/rounding.md)."""


class Judge:
    """Compares answers with the greedy choices of `model`, a causal language model of transformers.

    With `stop_ids` and `max_new_tokens` an answer must also end where it should: behind its first stop token, or full.
    The model's choices include the repetition penalty with which the answer was made.
    """

    def __init__(self, model: Any, stop_ids: frozenset[int] = frozenset(), max_new_tokens: int | None = None) -> None:
        self.model, self.stop_ids, self.max_new_tokens = model, stop_ids, max_new_tokens
        self.context_length: int = model.config.get_text_config().max_position_embeddings
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.ceiling = CEILINGS.get(model.dtype, CEILINGS[torch.float32])
        parameters = inspect.signature(model.forward).parameters
        self._keeps_some_logits = "logits_to_keep" in parameters
        self._cache = "cache" if "cache" in parameters else "past_key_values"
        """Its name in transformers, which changed in 5.24."""
        # The audit of an answer, and other methods, ask for the same place again.
        self._rounding = lru_cache(maxsize=16)(self._between_forms)

    def audit(self, prompt: Sequence[int], answer: Sequence[int], repetition_penalty: float = 1.0) -> Divergence | None:
        """Return where the model's own choice is furthest ahead of the answer; None if every token is its choice."""
        end = self._end(prompt, answer)
        if end != len(answer):
            return Divergence(min(end, len(answer)))
        if not answer:
            return None
        text = [*prompt, *answer[:-1]]
        logits = _penalised(self._in_one_pass(text, len(answer)), text, repetition_penalty)
        tokens = torch.tensor(answer, device=self.device)[:, None]
        best = logits.max(dim=-1)
        gaps = (best.values - logits.gather(1, tokens)[:, 0]).float()
        # argmax takes NaN for the largest value, so NaN counts as a gap.
        index = int(gaps.argmax())
        if not gaps[index]:
            return None
        text, pair = [*prompt, *answer[:index]], (answer[index], int(best.indices[index]))
        return self._divergence(text, index, float(gaps[index]), pair, repetition_penalty)

    def _end(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Return how many tokens the answer should have: one more than it has if it is cut short."""
        stops = [place for place, token in enumerate(answer) if token in self.stop_ids]
        if self.max_new_tokens is None:
            return len(answer)
        room = min(self.max_new_tokens, self.context_length - len(prompt))
        return min(stops[0] + 1 if stops else len(answer) + 1, room)

    def divergence(
        self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], repetition_penalty: float = 1.0
    ) -> Divergence:
        """Judge whether, where two answers diverge, both tokens are the model's choice up to rounding."""
        shorter = min(len(plain), len(other))
        index = next((i for i in range(shorter) if plain[i] != other[i]), shorter)
        if index == shorter:
            return Divergence(index)
        text = [*prompt, *plain[:index]]
        logits = _penalised(self._in_one_pass(text, 1), text, repetition_penalty)[0].float()
        worse = min(plain[index], other[index], key=lambda token: float(logits[token]))
        pair = (worse, int(logits.argmax()))
        return self._divergence(text, index, float(logits.max() - logits[worse]), pair, repetition_penalty)

    def _divergence(
        self, text: Sequence[int], index: int, gap: float, pair: tuple[int, int], penalty: float
    ) -> Divergence:
        """Return the divergence after this text, where the first token of the pair stands instead of the second."""
        if not math.isfinite(gap):
            return Divergence(index)
        if gap > self.ceiling:
            # Never excused, so rounding, which takes several passes, need not be measured.
            return Divergence(index, gap, self.ceiling)
        rounding = self._rounding(tuple(text), pair, penalty)
        # NaN in one of the forms excuses nothing.
        return Divergence(index, gap, min(self.ceiling, MARGIN * rounding) if math.isfinite(rounding) else 0.0)

    def _between_forms(self, text: Sequence[int], pair: tuple[int, int], penalty: float) -> float:
        """Return how far the gap between two tokens' logits depends on the form of the pass, near the text's end."""
        places = min(STEPS, len(text))
        forms = [_penalised(form(text, places), text, penalty) for form in (self._in_one_pass, self._in_steps)]
        differences = [logits[:, pair[0]].float() - logits[:, pair[1]].float() for logits in forms]
        return float((differences[0] - differences[1]).abs().max())

    @torch.inference_mode()
    def _in_one_pass(self, text: Sequence[int], places: int) -> Tensor:
        """Return the logits [places, V] after each of the last tokens, from one pass."""
        return self._logits(self.model(self._row(text), use_cache=False, **self._kept(places)), places)

    @torch.inference_mode()
    def _in_steps(self, text: Sequence[int], places: int) -> Tensor:
        """Return the same logits, with all places but the first read in passes of few tokens (`step_widths`)."""
        start = len(text) - places + 1
        output = self.model(self._row(text[:start]), use_cache=True, **self._kept(1))
        logits = [self._logits(output, 1)]
        for width in step_widths(places - 1):
            tokens = self._row(text[start : start + width])
            output = self.model(tokens, **{self._cache: getattr(output, self._cache)}, use_cache=True)
            logits.append(self._logits(output, width))
            start += width
        return torch.cat(logits)

    def _row(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)

    def _kept(self, places: int) -> dict[str, int]:
        return {"logits_to_keep": places} if self._keeps_some_logits else {}

    def _logits(self, output: Any, places: int) -> Tensor:
        logits: Tensor = output.logits[0, -places:].to(self.device)
        return logits


def step_widths(num_tokens: int) -> Iterator[int]:
    """Yield the widths of the passes over a text's last tokens: 1, 2, 4 and so on, as far as they fit, and the last 1.

    Engines round in these widths: of one token in plain decoding, and of few to verify a draft. They move logits as far
    as steps of a single token do (results/exactness/rounding.md), in 7 passes for 63 tokens.
    """
    width, left = 1, num_tokens
    while left > 1:
        yield min(width, left - 1)
        left -= min(width, left - 1)
        width *= 2
    yield from [1] * left


def _penalised(logits: Tensor, text: Sequence[int], penalty: float) -> Tensor:
    """Return logits [N, V] after each of the text's last tokens with the penalty, as transformers applies it."""
    if penalty == 1:
        return logits
    processor, ids = RepetitionPenaltyLogitsProcessor(float(penalty)), torch.tensor([text], device=logits.device)
    first = len(text) - len(logits) + 1
    rows = [processor(ids[:, : first + i], row[None].float()) for i, row in enumerate(logits)]
    return torch.cat(rows)
