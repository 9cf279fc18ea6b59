"""Checks on answers made by hand: what rounding may change elsewhere, and which times cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_bench.core.types import Divergence
from dflash_bench.results.run_info import RunInfo
from dflash_bench.results.table import RunTable
from dflash_bench.submissions import checks
from dflash_bench.submissions.checks import Redone
from dflash_bench.tasks.scorers.base import Score
from helpers import runs
from helpers.each import each


def redone(num: int, num_other: int, **changes: Any) -> list[Redone]:
    """Answers drafted again, of which the first so many are drafted with these changes here, or with another token."""
    rows = [row for row in runs.answers(num) if row.method == "dflash"]
    again = [row.generation for row in rows]
    again[:num_other] = [
        replace(one, **(changes or {"drafted_ids": (5, *(one.drafted_ids or ())[1:])})) for one in again[:num_other]
    ]
    return [Redone(row, one, is_judged=True) for row, one in zip(rows, again, strict=True)]


def counted(several: list[Redone], is_alike: bool) -> str:
    """The state of the check of rounds, in a run of no other methods."""
    return checks.counts(several, {checks.cell_of(one.stored) for one in several}, is_alike).state


def shared(several: list[Redone]) -> list[Redone]:
    """The same answers, decoded concurrently where they were measured."""
    return [
        replace(one, stored=replace(one.stored, settings=replace(one.stored.settings, concurrency=4)))
        for one in several
    ]


@each(
    "num_other, is_alike, state",
    [
        (0, True, "confirmed"),
        (0, False, "confirmed"),
        (1, True, "refuted"),
        (1, False, "doubtful"),
        (8, False, "doubtful"),
    ],
)
def test_another_processor_may_draft_otherwise_now_and_then(num_other: int, is_alike: bool, state: str) -> None:
    assert counted(redone(8, num_other), is_alike) == state


def test_other_acceptance_is_refuted_on_any_machine() -> None:
    assert counted(redone(8, 8, accepted=(4, 4, 4, 4)), is_alike=False) == "refuted"


def test_rounding_may_change_what_was_drafted_concurrently() -> None:
    assert counted(shared(redone(8, 1)), is_alike=True) == "doubtful"


@each(
    "num_other, is_alike, state",
    [(0, True, "confirmed"), (2, True, "doubtful"), (8, True, "refuted"), (8, False, "doubtful")],
)
def test_sampled_answers_that_differ_here_are_no_match(num_other: int, is_alike: bool, state: str) -> None:
    unjudged = [replace(one, is_judged=False) for one in redone(8, num_other, token_ids=(1, 2, 3))]
    assert checks.tokens(unjudged, is_alike).state == state
    if num_other == 8:
        assert checks.tokens(shared(unjudged), is_alike).state == "doubtful"


def test_a_method_that_cannot_be_drafted_again_is_no_match_of_another() -> None:
    again = redone(4, 0)
    other = [replace(one, stored=replace(one.stored, method="eagle3"), again=None) for one in again]
    assert counted(again, is_alike=True) == "confirmed"
    assert counted([*again, *other], is_alike=True) == "unchecked"


def test_what_was_not_drawn_is_no_match_of_what_was() -> None:
    again = redone(4, 0)
    cells = {checks.cell_of(one.stored) for one in again}
    assert checks.counts(again, cells | {("ar", "0")}, is_alike=True).state == "confirmed"
    for cell in (("eagle3", again[0].stored.settings.id), ("dflash", "0")):
        assert checks.counts(again, cells | {cell}, is_alike=True).state == "unchecked"


def test_sampled_answers_of_one_method_are_no_match_of_another() -> None:
    sound = [replace(one, is_judged=False) for one in redone(8, 0)]
    other = [replace(one, is_judged=False) for one in redone(4, 4, token_ids=(1, 2, 3))]
    other = [replace(one, stored=replace(one.stored, method="eagle3")) for one in other]
    assert checks.tokens([*sound, *other], is_alike=True).state == "refuted"


def test_an_answer_that_cannot_be_checked_is_no_match_of_others() -> None:
    (first, *rest) = redone(4, 0)
    silent = replace(first, is_judged=False, again=None)
    assert checks.tokens(rest, is_alike=True).state == "confirmed"
    assert checks.tokens([silent, *rest], is_alike=True).state == "unchecked"
    assert checks.texts(0, 3, 1).state == "unchecked"


def test_what_an_answer_of_code_is_taken_for_may_name_another_error() -> None:
    (row, *_) = runs.answers(1)
    told = [(replace(row, passed=False, answer="# timed out"), Score("# killed", False))]
    assert checks.scores(told).state == "refuted"
    assert checks.scores(told, {row.suite}).state == "confirmed"


@each(
    "stored, again, columns, is_alike, state",
    [
        ((1, 2), (1, 2), {"ranks"}, True, "confirmed"),
        ((1, 2), (1, 3), {"ranks"}, True, "refuted"),
        ((1, 2), (1, 3), {"ranks"}, False, "doubtful"),
        ((1, 2), (1, 2), {"ranks", "energy_j"}, True, "unchecked"),
    ],
)
def test_measurements_are_made_again_or_named(
    stored: tuple[int, ...], again: tuple[int, ...], columns: set[str], is_alike: bool, state: str
) -> None:
    (one, *_) = redone(2, 0)
    measured = replace(one, stored=replace(one.stored, measured={"ranks": stored}), measured={"ranks": again})
    assert checks.measurements([measured], columns, is_alike).state == state


def test_what_nothing_can_check_is_unchecked() -> None:
    silent = [replace(one, is_judged=False, again=None) for one in redone(8, 0)]
    plain = [Redone(row, row.generation, is_judged=True) for row in runs.answers(4) if row.method == "ar"]
    assert checks.tokens(silent, is_alike=True).state == "unchecked"
    assert counted([*silent, *plain], is_alike=True) == "unchecked"
    assert checks.texts(0, 0, 0).state == "unchecked"


@each(
    "stored, found, state",
    [
        ("exact", None, "confirmed"),
        ("exact", Divergence(3, 0.0005, 0.001), "confirmed"),
        ("near_tie", None, "confirmed"),
        ("exact", Divergence(3, 1.0, 0.001), "refuted"),
        ("mismatch", Divergence(3, 1.0, 0.001), "doubtful"),
        ("mismatch", None, "refuted"),
    ],
)
def test_tokens_are_what_they_are_stored_as(stored: str, found: Divergence | None, state: str) -> None:
    judged = [
        replace(one, stored=replace(one.stored, audit=stored), departure=found)  # type: ignore[arg-type]
        for one in redone(2, 0)
    ]
    assert checks.tokens(judged, is_alike=True).state == state


def info(weight_bytes: float, least_s: float, *gpus: str) -> RunInfo:
    size = {"weight_bytes": weight_bytes, "matrix_elements": 1, "attention": []}
    forwards = {"rows": 1, "context": 128, "seconds": {"1": least_s}, "bandwidth": 3e12, "products": 1e14, "size": size}
    environment = runs.ENVIRONMENT | {"gpus": [{"name": name} for name in gpus]}
    identity = {"device": "cuda" if gpus else "cpu"}
    return runs.about(forwards=forwards | {"least_s": least_s}, identity=identity).model_copy(
        update={"environment": RunInfo.model_fields["environment"].annotation.model_validate(environment)}  # type: ignore[union-attr]
    )


@each(
    "weight_bytes, least_s, gpus, state",
    [
        (16e9, 0.008, ("NVIDIA H100 80GB HBM3",), "unchecked"),  # 2.0 TB/s
        (16e9, 0.0045, ("NVIDIA H100 80GB HBM3",), "doubtful"),  # 3.6 TB/s
        (16e9, 0.0045, ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), "doubtful"),  # one of them computed
        (16e9, 0.0025, (), "doubtful"),  # 6.4 TB/s, where 3 were measured
        (14e6, 0.000001, (), "unchecked"),  # in a cache
    ],
)
def test_passes_that_read_faster_than_memory_are_doubtful(
    weight_bytes: float, least_s: float, gpus: tuple[str, ...], state: str
) -> None:
    drafted = [row for row in runs.answers(2) if row.method == "dflash"]
    table = RunTable("run", info(weight_bytes, least_s, *gpus), runs.frame_of(drafted))
    assert checks.times(table, None, ["another"]).state == state


@each("factor, state", [(1.0, "unchecked"), (0.8, "unchecked"), (0.34, "doubtful"), (3.0, "doubtful")])
def test_a_method_that_was_faster_beside_plain_decoding_than_here_is_doubtful(factor: float, state: str) -> None:
    again = [Redone(row, row.generation, is_judged=True) for row in runs.answers(4)]
    scaled = [
        replace(one, stored=replace(one.stored, generation=replace(own, decode_s=factor * own.decode_s)))
        if one.stored.method == "dflash"
        else one
        for one in again
        for own in [one.stored.generation]
    ]
    sound = info(14e6, 0.000001)
    table = RunTable("run", sound, runs.frame_of([row for row in runs.answers(2) if row.method == "dflash"]))
    assert checks.times(table, sound.forwards, [], scaled).state == state
    assert checks.times(table, sound.forwards, ["another"], scaled).state == "unchecked"
