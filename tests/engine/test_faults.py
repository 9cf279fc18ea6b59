"""Every planted engine fault that changes a token ends in a mismatch and exit status 1; a sound engine never does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from dflash_bench.core.types import Answer, Generation
from dflash_bench.engine.backend import LocalBackend
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.judge import Judge
from dflash_bench.engine.rows import Limits
from helpers.each import each
from helpers.faults import matrix
from helpers.faults.in_engine import ASKED, FAULTS, OUR_STATES, RAGGED, SINKS, STATES, WINDOWS, Fault
from helpers.faults.matrix import Part, Way
from helpers.tiny_architectures import ATTENTION, HYBRID, OURS, made, opened
from helpers.toy import Letters, Scripted, sometimes_wrong

Sound = Callable[[Way], Sequence[Answer]]
SUITE = matrix.SUITES[:1]
"""The first answer of this suite shows every fault in each method that it changes, and `scripts/study faults` takes two
of both suites."""
MOST = 24
"""Tokens of an answer."""
SLOW_TO_SHOW = (
    "a drafted token leaves its cache row stale",
    "rollback one too short",
    "rollback one too long",
    "decoding goes on behind a stop token",
)
"""Faults that need room for whole drafts, or an answer's end, which is at the 42nd token."""


def part_of(fault: Fault, way: Way) -> Part:
    most = matrix.MOST if fault.name in SLOW_TO_SHOW else MOST
    return Part(_limit(way), most, SUITE, methods_of(fault, way))


def methods_of(fault: Fault, way: Way) -> tuple[str, ...]:
    methods = tuple(method for method in matrix.METHODS if method.partition(":")[0] in fault.methods)
    return methods if way in ALL_METHODS else methods[FAULTS.index(fault) % len(methods) :][:1]


def sound_part_of(way: Way) -> Part:
    """Common fields of those parts."""
    parts = [part_of(fault, where) for fault, where in PLANTED if where == way]
    methods = tuple(method for method in matrix.METHODS if any(method in part.methods for part in parts))
    return Part(_limit(way), max(part.most for part in parts), SUITE, methods)


def _limit(way: Way) -> int:
    # A pass is replayed from the second answer on.
    return way.concurrency if way.concurrency > 1 else 1 + way.captured


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Rows of a sound run; a run per way."""
    runs: dict[Way, Sequence[Answer]] = {}

    def rows_of(way: Way) -> Sequence[Answer]:
        if way not in runs:
            out = tmp_path_factory.mktemp("sound") / "run"
            runs[way] = matrix.decoded(None, way, out, sound_part_of(way))
            assert {row.audit for row in runs[way]} <= {"exact", "near_tie"}
        return runs[way]

    return rows_of


ALONE, TOGETHER, BY_TORCH, THEIRS = Way(), Way(concurrency=3), Way(kernels="torch"), Way("transformers", "bfloat16")
CAPTURED, CAPTURED_TOGETHER = Way(captured=True), Way(captured=True, concurrency=3)
ALL_METHODS = (ALONE, TOGETHER)
"""Elsewhere a fault is planted in one method, and all methods take turns."""
BETWEEN_ROWS = ("rollback one too short", "bonus token of the last row", "kept path not moved in the cache")
"""Work of each row at its own place, which may fail differently beside other rows."""
PLANTED = [
    *((fault, ALONE) for fault in FAULTS),
    # The loop is the same in another type and over other networks: only what a network is asked may go wrong in other
    # ways. `scripts/study faults` plants all in every way.
    *((fault, way) for fault in FAULTS if fault.name in ASKED for way in (BY_TORCH, THEIRS)),
    *((fault, way) for fault in FAULTS if fault.name in BETWEEN_ROWS for way in (TOGETHER, CAPTURED_TOGETHER)),
    # For the others a capture of one row is what a capture of several is; `test_replays.py` compares both.
    *((fault, CAPTURED) for fault in FAULTS if fault.name == BETWEEN_ROWS[1]),
]


@pytest.mark.parametrize(("fault", "way"), PLANTED, ids=str)
def test_a_fault_is_found_in_every_answer_that_it_made_wrong(
    fault: Fault, way: Way, sound: Sound, tmp_path: Path
) -> None:
    part, right = part_of(fault, way), sound(way)
    rows = matrix.decoded(fault, way, tmp_path / "run", part)
    outcomes = matrix.outcomes(rows, right, way.dtype, part.most)
    for outcome in outcomes:
        assert outcome.num_found == outcome.num_wrong, outcome
    # A fault that changes nothing would prove nothing.
    changed = {outcome.method.partition(":")[0] for outcome in outcomes if outcome.num_changed}
    planted = {method.partition(":")[0] for method in part.methods} | {"ar"}.intersection(fault.methods)
    assert changed == planted or way.dtype != "float32"


def test_no_sound_answer_is_called_wrong_in_bfloat16(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """The number of answers: 20, or 200 with `--in-full`."""
    part = Part(25, most=40) if pytestconfig.getoption("in_full") else Part(5, 40, SUITE)
    # Together they are decoded in a third of the time, and round in more ways.
    rows = matrix.decoded(None, Way(dtype="bfloat16", concurrency=5), tmp_path / "run", part)
    assert len(rows) == (part.limit or 0) * len(part.suites) * 4
    assert {row.audit for row in rows} <= {"exact", "near_tie"}
    assert {row.exactness for row in rows if row.method != "ar"} <= {"exact", "near_tie"}


# Faults that nano's architecture, and a run of one row at a time, cannot have.

PROMPT = tuple((7 * place + 2) % 60 + 2 for place in range(20))


def judged(kind: str, prompts: Sequence[tuple[int, ...]]) -> tuple[list[Generation], list[bool]]:
    """Answers of a drafter that is often wrong, and whether the judge calls each the model's own."""
    target = opened(kind)
    judge = Judge(target.model, frozenset(), 24)
    texts = [[*prompt, *_greedy(kind, prompt)] for prompt in prompts]
    drafters = {"ar": NoDrafter(), "drafts": Scripted(texts, 5, sometimes_wrong(0.7, 97))}
    backend = LocalBackend(target, Letters(), drafters, Limits(24))
    answers = backend.generate_ids("drafts", prompts)
    assert not any(answer.error for answer in answers)
    departures = [judge.audit(prompt, answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    return answers, [departure is None or departure.verdict != "mismatch" for departure in departures]


@cache
def _greedy(kind: str, prompt: tuple[int, ...]) -> list[int]:
    text = list(prompt)
    with torch.inference_mode():
        while len(text) < len(prompt) + 24:
            text.append(int(made(kind)(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@cache
def _sound(kind: str, prompts: tuple[tuple[int, ...], ...]) -> list[Generation]:
    answers, good = judged(kind, prompts)
    assert all(good)
    return answers


def assert_found(fault: Fault, kind: str, *prompts: tuple[int, ...]) -> None:
    answers = _sound(kind, prompts)
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        faulty, good = judged(kind, prompts)
    changed = [now.token_ids != then.token_ids for now, then in zip(faulty, answers, strict=True)]
    assert any(changed)
    assert good == [not one for one in changed]


@each("fault", WINDOWS)
@each("kind", [kind for kind in (*ATTENTION, *OURS) if "window" in kind])
def test_a_window_of_the_wrong_width_is_found(fault: Fault, kind: str) -> None:
    assert_found(fault, kind, PROMPT)


@each("fault", SINKS)
@each("kind", [kind for kind in OURS if "sinks" in kind])
def test_sinks_that_are_left_out_are_found(fault: Fault, kind: str) -> None:
    assert_found(fault, kind, PROMPT)


@each(
    ("fault", "kind"),
    [(fault, kind) for fault in STATES for kind in HYBRID]
    + [(fault, kind) for fault in OUR_STATES for kind in OURS if OURS[kind] in HYBRID],
)
def test_a_recurrent_state_that_is_not_taken_back_is_found(fault: Fault, kind: str) -> None:
    assert_found(fault, kind, PROMPT)


@pytest.mark.parametrize("fault", RAGGED, ids=lambda fault: fault.name)
def test_faults_between_the_rows_of_a_batch_are_found(fault: Fault) -> None:
    assert_found(fault, "mixture of experts", PROMPT, PROMPT[:7], PROMPT[3:16])
