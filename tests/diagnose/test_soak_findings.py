"""Findings of a soak, by answers made up: what changed is named at its answer, and noise is not."""

from __future__ import annotations

from random import Random
from typing import Any

from dflash_bench.diagnose.soak_findings import (
    CONSTRAINED,
    REFERENCE,
    SAMPLED,
    SoakAnswer,
    changed_at,
    findings,
)
from helpers.each import each


def references(num: int, **figures: Any) -> list[SoakAnswer]:
    """Return answers to two references in turn; figures are values, or functions of the number."""
    return [
        SoakAnswer(
            number,
            number / 10,
            REFERENCE,
            ("code", "chat")[number % 2],
            is_same=True,
            **{name: value(number) if callable(value) else value for name, value in figures.items()},
        )
        for number in range(1, num + 1)
    ]


def codes(answers: list[SoakAnswer]) -> dict[str, int]:
    return {one.code: one.number for one in findings(answers)}


@each("place", [10, 60, 110])
def test_a_fall_is_found_at_its_place(place: int) -> None:
    random = Random(place)
    noisy = references(120, tokens_per_s=lambda number: random.gauss(100 if number < place else 60, 3))
    assert list(codes(noisy)) == ["speed"] and abs(codes(noisy)["speed"] - place) <= 5
    fewer = references(120, tokens_per_round=lambda number: 4.0 if number < place else 3.5)
    assert codes(fewer) == {"acceptance": place}


def test_many_answers_are_judged_in_a_moment() -> None:
    random = Random(0)
    answers = references(
        6000, tokens_per_s=lambda number: random.gauss(100 if number < 4321 else 60, 3), resident_bytes=1_000_000_000
    )
    found = codes(answers)
    assert list(found) == ["speed"] and abs(found["speed"] - 4321) <= 5


def test_noise_and_small_changes_are_no_findings() -> None:
    for seed in range(20):
        random = Random(seed)
        answers = references(
            80, tokens_per_s=lambda _, r=random: r.gauss(100, 10), tokens_per_round=lambda _, r=random: r.gauss(4, 0.05)
        )
        assert codes(answers) == {}, seed
    assert changed_at([1.0] * 30 + [0.9] * 30, 0.2) is None
    assert changed_at([1.0, 1.0, 0.1, 0.1], 0.2) is None, "too few to tell"


def test_throttling_is_told_from_a_draft_that_accepts_less() -> None:
    slow = references(80, tokens_per_s=lambda number: 100 if number < 40 else 50, tokens_per_round=4.0)
    assert "with the same tokens per round" in findings(slow)[0].what
    both = references(80, tokens_per_s=lambda n: 100 if n < 40 else 50, tokens_per_round=lambda n: 4 if n < 40 else 2)
    assert codes(both) == {"speed": 40, "acceptance": 40}
    assert all("same tokens" not in one.what for one in findings(both))


def test_drafts_that_are_off_are_named_by_their_reference() -> None:
    answers = references(60, tokens_per_round=lambda number: 1.0 if number % 2 and number > 20 else 4.0)
    (found,) = findings(answers)
    assert (found.code, found.number) == ("draft-off", 21) and "chat" in found.what and "code" in found.what
    assert codes(references(60, tokens_per_round=1.0)) == {}, "never drafted"
    assert codes(references(60, tokens_per_round=lambda number: 1.0 if number > 58 else 4.0)) == {}, "too few to tell"


def test_cancelled_answers_that_cost_acceptance_for_a_while_are_named() -> None:
    answers = references(
        96,
        after_cancel=lambda number: number // 4 % 2 == 1,
        tokens_per_round=lambda number: 3.0 if number // 4 % 2 == 1 else 4.0,
    )
    assert codes(answers) == {"cancel": 4}


def test_memory_has_to_grow_on() -> None:
    grows = references(60, resident_bytes=lambda number: 1_000_000_000 + 5_000_000 * number)
    assert list(codes(grows)) == ["memory"]
    fills = references(60, resident_bytes=lambda number: 1_000_000_000 + 50_000_000 * min(number, 5))
    assert codes(fills) == {}


def test_wrong_answers_counters_and_constraints() -> None:
    answers = references(20, total_rounds=lambda number: number if number < 9 else number - 8)
    answers[11] = SoakAnswer(12, 1.2, REFERENCE, "code", is_same=False, borrowed="chat")
    answers[14] = SoakAnswer(15, 1.5, REFERENCE, "chat", is_same=False)
    answers += [SoakAnswer(number, 2.1, CONSTRAINED, fits=number < 23) for number in (21, 22, 23, 24)]
    assert codes(answers) == {"counters": 9, "context": 12, "exactness": 15, "constraint": 23}


def test_errors_and_a_server_that_is_gone() -> None:
    answers = references(20)
    some = [*answers, SoakAnswer(21, 2.1, SAMPLED, error="HTTP 500"), *references(40)[21:]]
    assert codes(some) == {"errors": 21} and "most sampled answers" in findings(some)[0].what
    errors = ["HTTP 500", None, None, None, None] * 4
    constrained = [SoakAnswer(number, 3.0, CONSTRAINED, error=error) for number, error in enumerate(errors, start=21)]
    assert "4 of 20 constrained answers" in findings([*answers, *constrained])[0].what
    gone = [*answers, SoakAnswer(21, 2.1, SAMPLED, error="cannot connect", is_gone=True)]
    assert codes(gone) == {"stopped": 21}
