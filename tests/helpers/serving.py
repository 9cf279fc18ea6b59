"""A fake server that says what our engine decodes with a fault planted in it, and the command that checks it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dflash_bench.core.dialects import WHOLE, AcceptanceCounts, Conversion, DecodedAnswer
from dflash_bench.core.methods import parse
from dflash_bench.core.types import Message
from dflash_bench.diagnose import conform_server
from dflash_bench.diagnose.compare_counts import CrosscheckResult
from dflash_bench.engine.backend import LocalBackend, build_drafter
from dflash_bench.engine.drafter import Drafter
from dflash_bench.engine.selection import compile_like
from dflash_bench.models import presets
from dflash_bench.models.loading import Models, load, with_draft
from dflash_bench.runner.config import RunRequest
from dflash_bench.runner.plan import RunPlan
from dflash_bench.runner.setup import open_engine, open_local
from dflash_bench.tasks import suites
from helpers import cached_target
from helpers.servers import plainly
from helpers.servers.fake_server import Count, FakeServer
from helpers.servers.nano_words import nano_text

plainly.apply()
PROMPTS, LENGTH = 8, 24
WORDS = ("--suite", "gsm8k", "--model", "nano", "--limit", PROMPTS, "--max-new-tokens", LENGTH)


@dataclass(frozen=True)
class Said:
    """One answer of the server."""

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    num_drafts: int

    def counts(self, conversion: Conversion) -> AcceptanceCounts:
        return conversion.convert(DecodedAnswer(len(self.tokens), self.accepted, self.num_drafts, LENGTH))


def chats(limit: int = PROMPTS) -> list[list[Message]]:
    (gsm8k,) = suites.expand(["gsm8k"])
    return [chat for _, chat in suites.chats(suites.load_prompts(gsm8k, "embedded", limit))]


def engine(
    method: str = "dflash", draft: Path | None = None, target: Path | None = None, **wanted: Any
) -> LocalBackend:
    chosen = [parse("ar"), parse(method)]
    drafts = {} if draft is None else {method.partition(":")[0]: str(draft)}
    model = presets.combine("nano", None if target is None else str(target), drafts)
    return open_engine(model, chosen, RunRequest(**wanted), LENGTH)


shared_engine = cache(engine)
"""For tests that plant their fault in what it is asked, or in how it goes about it."""


def decoded(backend: LocalBackend, method: str, rows: int = PROMPTS) -> dict[str, Said]:
    """Its answers, this many prompts together, by the ids of our prompt as JSON."""
    ours = [backend.encode(chat) for chat in chats()]
    method = parse(method).label
    drafts = backend.drafters[method].num_drafts
    answers = backend.generate_ids(method, ours, num_rows=rows)
    assert all(answer.error is None for answer in answers)
    return {
        json.dumps(prompt): Said(answer.token_ids, answer.accepted or (), drafts)
        for prompt, answer in zip(ours, answers, strict=True)
    }


def drafted(draft: Path, method: str, kernels: str | None = None) -> dict[str, Said]:
    """Return the answers of a server with nano's target and this draft."""
    backend, chosen = shared_engine(method, kernels=kernels), parse(method)
    preset = presets.combine("nano", None, {str(chosen.draft): str(draft)})
    drafter = build_drafter(with_draft(_models(), preset, str(chosen.draft)), backend.target, chosen, preset)
    compile_like(backend.target, [drafter])
    return recalled(backend, drafter)


@cache
def _models() -> Models:
    return load("nano", [], "cpu", torch.float32)


def recalled(backend: LocalBackend, drafter: Drafter, prompts: list[list[int]] | None = None) -> dict[str, Said]:
    """Return the same as `decoded`, with a target that recalls nano's tokens: only the draft computes."""
    ours = [backend.encode(chat) for chat in chats()]
    answers = cached_target.accepted(backend.target, drafter, prompts or ours, backend.limits)
    return {
        json.dumps(prompt): Said(answer.token_ids, answer.counts, drafter.num_drafts)
        for prompt, answer in zip(ours, answers, strict=True)
    }


def by_method(method: str = "dflash", prompts: list[list[int]] | None = None) -> dict[str, Said]:
    """Return the answers of a server that drafts by this method."""
    backend = shared_engine(method)
    return recalled(backend, backend.drafters[parse(method).label], prompts)


OPENED: dict[str, LocalBackend] = {}


def open_once(resolved: RunPlan) -> LocalBackend:
    """Our own side of a comparison, whose answers are the same in all tests."""
    key = f"{[one.label for one in resolved.methods]} {resolved.request.drafts} {resolved.request.quantize}"
    if key not in OPENED:
        OPENED[key] = backend = open_local(resolved)
        backend.generate = cache(backend.generate)  # type: ignore[method-assign]
    return OPENED[key]


@contextmanager
def server(
    answers: Mapping[str, Said], conversion: Conversion = WHOLE, by_chat: bool = False, **does: Any
) -> Iterator[FakeServer]:
    """Gives these answers, and counts them in this way. `by_chat`: it is sent chats, in the same order."""
    if by_chat:
        names = [json.dumps([{"role": m.role, "content": m.content} for m in chat]) for chat in chats()]
        answers = dict(zip(names, answers.values(), strict=True))
    ends = frozenset(said.tokens[-1] for said in answers.values() if len(said.tokens) < LENGTH)

    def count(prompt: str) -> Count:
        counts = answers[prompt].counts(conversion)
        return Count(counts.rounds, counts.drafted or 0, counts.accepted, list(counts.at or ()))

    behaviour: dict[str, Any] = {
        "answer": lambda prompt, _: answers[prompt].tokens,
        "ends": ends,
        "block": 1,
        "text": nano_text,
    }
    with FakeServer(**{**behaviour, "counts": count, **does}) as running:
        yield running


def checked(url: str, method: str = "dflash", sends_chats: bool = False, **changes: Any) -> CrosscheckResult:
    """The command's result before it is printed."""
    options: dict[str, Any] = {"model": "nano", "limit": PROMPTS, "max_new_tokens": LENGTH, **changes}
    request = RunRequest(
        suites=("gsm8k",),
        methods=() if ":" not in method else (method,),
        servers=(f"{method.partition(':')[0]}={url}",),
        **options,
    )
    (found,) = conform_server.crosscheck(request, lambda _: None, sends_chats)
    return found


def names(found: Sequence[Any]) -> list[str]:
    return [one.cause.name for one in found]
