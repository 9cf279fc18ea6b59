"""Fewer rows than prompts: each takes the place of one that has ended, and says what it would say alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from dflash_bench.core.methods import parse
from dflash_bench.core.types import Generation
from dflash_bench.engine import loop
from dflash_bench.engine.backend import LocalBackend, open_backend
from dflash_bench.engine.drafter import Drafter, NoDrafter
from dflash_bench.engine.drafters.base import CachedDrafter
from dflash_bench.engine.loop import decode
from dflash_bench.engine.rows import HostClock, Limits, Round
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models import presets
from helpers.each import each
from helpers.nano import encoded, models
from helpers.tiny_architectures import HYBRID, made, opened
from helpers.toy import Scripted, TableTarget, Tree, generated, plain, sometimes_wrong

VOCAB, STOPS = 23, frozenset({3})
PROMPTS: list[list[int]] = [
    [1],
    [8, 11, 14, 17, 0],
    [15, 18, 1],
    [2] * 9,
    [9, 12, 15, 18, 1, 4, 7],
    [16, 19],
    [5, 5, 5],
    [20, 1, 2, 9],
    list(range(14)),
    [4],
    [7, 21],
]


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that many prompts come in several parts."""
    monkeypatch.setattr(loop, "PART", 4)


def rounds_of(
    target: Any, drafter: Drafter, num_rows: int, prompts: Sequence[Sequence[int]] = PROMPTS, **sampling: Any
) -> list[Round]:
    seeds = list(range(len(prompts)))
    limits = Limits(24, STOPS)
    return list(decode(target, drafter, prompts, limits, Sampling(**sampling), HostClock(), seeds, num_rows))


def tokens_of(rounds: Sequence[Round], num_prompts: int = len(PROMPTS)) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(num_prompts)]
    for step in rounds:
        for emitted, request in zip(step.emitted, step.requests, strict=True):
            tokens[request] += emitted or ()
    return tokens


@cache
def expected() -> list[list[int]]:
    answers = [TableTarget(VOCAB).answer(prompt, 24, STOPS) for prompt in PROMPTS]
    assert len({len(answer) for answer in answers}) > 3, "rows end at different times"
    return answers


def texts() -> list[list[int]]:
    return [[*prompt, *TableTarget(VOCAB).answer(prompt, 40)] for prompt in PROMPTS]


@each("num_rows", [1, 2, 3, 7, 11, 20])
@each("kind", ["plain", "right", "often wrong", "tree"])
def test_every_answer_is_the_one_alone(kind: str, num_rows: int) -> None:
    drafters: dict[str, Drafter] = {
        "plain": NoDrafter(),
        "right": Scripted(texts(), 5),
        "often wrong": Scripted(texts(), 5, sometimes_wrong(0.6, VOCAB)),
        "tree": Tree(texts(), 3, "late", VOCAB),
    }
    rounds = rounds_of(TableTarget(VOCAB), drafters[kind], num_rows)
    assert tokens_of(rounds) == expected()
    # Every prompt has one prefill and one end, in one row, and never are more decoded than there are rows.
    places: dict[int, set[int]] = {}
    for step in rounds:
        assert len(step.requests) == len(step.ended) == len(step.emitted) == min(num_rows, len(PROMPTS))
        for place, request in enumerate(step.requests):
            if step.emitted[place] is not None:
                places.setdefault(request, set()).add(place)
    assert all(len(rows) == 1 for rows in places.values()) and len(places) == len(PROMPTS)


def test_waiting_prompts_begin_in_order_as_soon_as_a_row_is_free() -> None:
    rounds = rounds_of(TableTarget(VOCAB), NoDrafter(), 3)
    begun = list(dict.fromkeys(request for step in rounds for request in step.requests))
    assert begun == sorted(begun)
    for before, after in pairwise(rounds):
        if max(before.requests) < len(PROMPTS) - 1:
            for place, ended in enumerate(before.ended):
                assert not ended or after.requests[place] != before.requests[place] or after.emitted[place] is None


def test_a_long_prompt_holds_up_nobody_for_more_than_a_part() -> None:
    """Between two parts of it every other row has its round."""
    reads: list[str] = []

    class Noting(TableTarget):
        def prefill(self, prompts: Any, starts: Any = None, first: int = 0) -> Any:
            reads.append(f"part {len(prompts[0])}" if len(prompts) == 1 else "all")
            return super().prefill(prompts, starts, first)

        def forward(self, tokens: Any, starts: Any, parents: Any = None, first: int = 0) -> Any:
            if len(starts) == 2 and tokens.shape[1] == 1:
                reads.append("round")
            return super().forward(tokens, starts, parents, first)

    target = Noting(97, context_length=80)
    prompts = [list(range(1, 20)), [1, 2], list(range(18)) * 2]
    first, second = (target.answer(prompt, 24) for prompt in prompts[:2])
    # The second row ends early, and the first one goes on while the third prompt is read.
    stop = next(token for token in second[2:8] if token not in first)
    list(decode(target, NoDrafter(), prompts, Limits(24, frozenset({stop})), Sampling(), HostClock(), None, 2))
    at = [place for place, read in enumerate(reads) if read.startswith("part")]
    assert reads[at[0] : at[-1] + 1] == [*["part 4", "round"] * 8, "part 4"], reads


@pytest.mark.parametrize("num_rows", [2, 5])
def test_random_numbers_and_penalties_belong_to_the_prompt(num_rows: int) -> None:
    for sampling in (
        {"temperature": 0.8},
        {"repetition_penalty": 1.4},
        {"temperature": 1.0, "repetition_penalty": 1.3},
    ):
        alone = tokens_of(rounds_of(TableTarget(VOCAB), NoDrafter(), 1, **sampling))
        assert alone != expected()
        for drafter in (NoDrafter(), Scripted(texts(), 4, sometimes_wrong(0.6, VOCAB))):
            assert tokens_of(rounds_of(TableTarget(VOCAB), drafter, num_rows, **sampling)) == alone


NETWORK_PROMPTS = [[5], [3, 4, 5, 6, 7, 8, 9, 10, 11], list(range(2, 24)), [90, 1, 90], [8] * 7, [17, 3]]


@each("kind", [*HYBRID, "ours: qwen3.5"])
def test_states_of_recurrent_layers_begin_anew_and_the_others_stay(kind: str) -> None:
    model = made(kind)
    answers = [generated(model, prompt, 9) for prompt in NETWORK_PROMPTS]
    known = [[*prompt, *answer, *[0] * 9] for prompt, answer in zip(NETWORK_PROMPTS, answers, strict=True)]
    drafts, limits = Scripted(known, 4, sometimes_wrong(0.7, 97)), Limits(9)
    for drafter, num_rows in ((NoDrafter(), 2), (drafts, 1), (drafts, 4)):
        rounds = list(decode(opened(kind), drafter, NETWORK_PROMPTS, limits, Sampling(), HostClock(), None, num_rows))
        assert tokens_of(rounds, 6) == answers


QUESTIONS = [
    "Write a Python function that says whether a number is prime.",
    "What is 3 + 4?",
    "Tom has 12 apples and gives 5 to Ann. How many apples does Tom have left?",
    "What is 17 - 9?",
]
TYPED = """
    dflash ddtree eagle3 eagle3-tree:nodes=7 medusa draft-model ngram suffix:earlier=no
    lookahead:window=3,ngram=3,guesses=2 oracle random:4 synthetic:rates=0.9/0.5 block-diffusion
    """.split()
TOGETHER = ["dflash:block=auto", "ddtree:nodes=auto", "dflash+ngram:block=6,match=2,copy=4", "suffix"]
"""Methods whose verified tokens depend on the clock, on all rows together, or on earlier answers."""


@cache
def backend() -> LocalBackend:
    from dflash_bench.models import loading

    chosen = [parse(typed) for typed in ("ar", *TYPED, *TOGETHER)]
    kinds = {method.draft for method in chosen if method.draft}
    return open_backend(loading.load("nano", sorted(kinds), "cpu", torch.float32), presets.preset("nano"), chosen, 14)


def counts(given: Generation) -> tuple[Any, ...]:
    return given.token_ids, given.finish_reason, given.drafted_ids, given.accepted, given.emitted


@pytest.mark.parametrize("typed", ["ar", *TYPED, *TOGETHER])
def test_every_method_drafts_and_keeps_what_it_would_alone(typed: str) -> None:
    models()
    label = parse(typed).label
    prompts = [encoded(question) for question in QUESTIONS]
    alone = [backend().generate_ids(label, [prompt])[0] for prompt in prompts]
    beside = backend().generate_ids(label, prompts, num_rows=2)
    assert not any(given.error for given in beside)
    if typed in TOGETHER:
        assert [given.token_ids for given in beside] == [given.token_ids for given in alone]
        return
    assert list(map(counts, beside)) == list(map(counts, alone))


def test_a_drafter_that_forgets_which_row_has_changed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts above would tell: a planted fault in what drafters share changes them."""

    def everywhere(self: CachedDrafter, committed: Any) -> None:
        self.starts = [committed.starts[0] + committed.counts[0]] * len(self.starts)

    models()
    prompts = [encoded(question) for question in QUESTIONS]
    alone = [backend().generate_ids("dflash", [prompt])[0] for prompt in prompts]
    monkeypatch.setattr(CachedDrafter, "advance", everywhere)
    beside = backend().generate_ids("dflash", prompts, num_rows=2)
    assert [given.token_ids for given in beside] == [given.token_ids for given in alone]
    assert [given.accepted for given in beside] != [given.accepted for given in alone]


def test_plain_answers_of_nano_are_those_of_the_published_model() -> None:
    prompts = [encoded(question) for question in QUESTIONS]
    given = backend().generate_ids("ar", prompts, num_rows=3)
    assert [list(one.token_ids) for one in given] == plain(
        Target(models().target), prompts, 14, backend().limits.stop_ids
    )


@pytest.mark.parametrize("fault", ["starts", "numbers", "seen"])
def test_a_loop_that_leaves_something_of_the_row_before_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"starts": {}, "numbers": {"temperature": 0.8}, "seen": {"repetition_penalty": 1.4}}[fault]
    alone = tokens_of(rounds_of(TableTarget(VOCAB), NoDrafter(), 1, **sampling))
    begin = loop.Sampler.begin

    def leaves(self: Any, prompts: Any, seeds: Any, vocab_size: int, first: int = 0) -> None:
        before = self._numbers.clone(), None if self._seen is None else self._seen.clone()
        begin(self, prompts, seeds, vocab_size, first)
        if len(prompts) == 1:
            self._numbers, self._seen = before

    if fault == "starts":
        monkeypatch.setattr(loop, "deque", lambda rows: _Half(rows))
    else:
        monkeypatch.setattr(loop.Sampler, "begin", leaves)
    assert tokens_of(rounds_of(TableTarget(VOCAB), NoDrafter(), 3, **sampling)) != alone


class _Half(list[Any]):
    """A queue whose rows say that their first token has been read."""

    def popleft(self) -> Any:
        row = self.pop(0)
        row.num_read = min(1, len(row.prompt) - 1)
        return row
