"""Verdicts of comparing a server with our engine, and the causes named, for made-up counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dflash_bench.core.dialects import AcceptanceCounts
from dflash_bench.core.types import Divergence
from dflash_bench.diagnose.compare_counts import (
    Cause,
    CauseTrial,
    CountComparison,
    CountedAnswer,
    CrosscheckResult,
    Pair,
    drafts_per_round,
    fit,
    fitting_causes,
)
from dflash_bench.diagnose.conform_server import needs_causes
from dflash_bench.diagnose.show import sentence
from helpers.each import each

Rounds = tuple[int, int]
"""Rounds and accepted drafts of an answer, with 4 tokens drafted per round."""
WRONG, TIE = Divergence(3, 5.0, 0.001), Divergence(3, 0.0005, 0.001)


def compared(
    ours: Sequence[Rounds], theirs: Sequence[Rounds | None], departures: Sequence[Divergence | None] = ()
) -> CountComparison:
    pairs = []
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        departure = departures[number] if number < len(departures) else None
        said = (9,) if departure else (1,)
        pairs.append(
            Pair(CountedAnswer((1,), "", counts(mine)), CountedAnswer(said, "", other and counts(other)), departure)
        )
    return CountComparison(tuple(pairs))


def counts(of: Rounds) -> AcceptanceCounts:
    return AcceptanceCounts(of[0], of[1], 4 * of[0])


def checked(base: CountComparison, all_tried: Sequence[CauseTrial] = (), **changes: object) -> CrosscheckResult:
    options: dict[str, object] = {"uncounted": None, "trials": tuple(all_tried), **changes}
    return CrosscheckResult("dflash", {}, base, "vllm.counters", None, **options)  # type: ignore[arg-type]


def tried(base: CountComparison, cause: Cause, comparison: CountComparison) -> CauseTrial:
    return CauseTrial(cause, comparison, fit(base, comparison))


OURS = [(10, 30), (12, 30), (8, 25), (11, 20), (9, 27), (10, 22), (10, 28), (9, 26)]
LOW = [(20, 20), (23, 19), (16, 17), (21, 10), (19, 17), (20, 12), (20, 16), (18, 15)]


def test_the_same_counts_agree() -> None:
    assert checked(compared(OURS, OURS)).verdict == "agree"


def test_one_answer_in_ten_may_be_rounded_otherwise() -> None:
    ours = [*OURS, *OURS]
    assert compared(ours, [*ours[:-1], (11, 21)]).state == "same"
    assert compared(ours, [*ours[:-2], (10, 26), (11, 21)]).state == "alike"


def test_counts_that_differ_within_chance_agree_unless_a_cause_has_all_of_them() -> None:
    theirs = [(10, 31), (11, 31), (9, 24), (11, 20), (8, 28), (11, 21), (10, 28), (9, 26)]
    base = compared(OURS, theirs)
    assert base.state == "alike" and checked(base).verdict == "agree"
    cause = tried(base, Cause("it", "is"), compared(theirs, theirs))
    assert cause.how == "same counts" and checked(base, [cause]).verdict == "differ"
    # Two answers more are luck.
    lucky = [theirs[0], theirs[1], *OURS[2:]]
    base = compared(OURS, lucky)
    assert tried(base, Cause("it", "is"), compared(lucky, lucky)).how is None


def test_counts_beyond_chance_differ() -> None:
    base = compared(OURS, LOW)
    assert (base.state, checked(base).verdict) == ("differ", "differ")
    ratio = base.ratio()
    assert ratio is not None and ratio.value == pytest.approx((1 + 126 / 157) / (1 + 208 / 79))


def test_of_causes_those_with_the_same_counts_come_before_those_within_chance() -> None:
    base = compared(OURS, LOW)
    near = tried(
        base,
        Cause("near", ""),
        compared([(19, 21), (23, 19), (17, 16), (20, 11), (20, 16), (19, 13), (19, 16), (19, 15)], LOW),
    )
    same = tried(base, Cause("same", ""), compared(LOW, LOW))
    none = tried(base, Cause("none", ""), compared(OURS, LOW))
    assert [one.how for one in (near, same, none)] == ["within chance", "same counts", None]
    assert fitting_causes([near, none]) == [near] and fitting_causes([near, same, none]) == [same]
    assert fitting_causes([none]) == [] and min([none, near], key=lambda one: one.comparison.nearness) == near


def test_an_answer_that_is_not_the_models_differs_and_must_be_explained() -> None:
    base = compared(OURS, OURS, [None, WRONG])
    assert base.state == "same" and base.mismatches == [1] and checked(base).verdict == "differ"
    # The very same counts on the other answers explain nothing.
    assert tried(base, Cause("draft", ""), compared(OURS, OURS, [None, WRONG])).how is None
    assert tried(base, Cause("target", ""), compared(OURS, OURS)).how == "same counts"


def test_a_near_tie_is_no_difference() -> None:
    base = compared(OURS, OURS, [None, TIE])
    assert base.mismatches == [] and len(base.counted) == 7 and checked(base).verdict == "agree"


def test_hidden_counts_tell_nothing_but_answers_do() -> None:
    hidden = compared(OURS, [None] * 8)
    assert (hidden.state, checked(hidden).verdict) == ("unknown", "cannot tell")
    wrong = compared(OURS, [None] * 8, [WRONG] * 8)
    assert checked(wrong).verdict == "differ"
    assert tried(wrong, Cause("template", ""), hidden).how == "same answers"


def test_two_answers_that_differ_are_too_few() -> None:
    assert checked(compared(OURS[:2], LOW[:2])).verdict == "cannot tell"
    assert checked(compared(OURS[:2], OURS[:2])).verdict == "agree"


def test_a_failed_answer_is_no_agreement() -> None:
    assert checked(compared(OURS, OURS), failed=("hung up",)).verdict == "differ"


def test_the_number_of_drafts_is_told_by_the_most_of_any_answer() -> None:
    def drafting(ours: int, theirs: Sequence[int], at: tuple[int, ...] | None = None) -> tuple[int | None, int | None]:
        pairs = tuple(
            Pair(
                CountedAnswer((1,), "", AcceptanceCounts(5, 4, 5 * ours)),
                CountedAnswer((1,), "", AcceptanceCounts(5, 4, drafted, at)),
            )
            for drafted in theirs
        )
        return drafts_per_round(CountComparison(pairs))

    assert drafting(7, [35, 33, 35]) == (7, 7)
    assert drafting(7, [15, 13]) == (7, 3)
    assert drafting(7, [33, 32]) == (7, 7)
    assert drafting(15, [35], (3, 1, 0, 0, 0, 0, 0)) == (15, 7)


@each("nothing", [AcceptanceCounts(0, 0, 0), AcceptanceCounts(12, 0, 0)])
@each("num", [1, 4, 6])
def test_a_server_that_does_not_draft_differs_however_few_the_prompts(nothing: AcceptanceCounts, num: int) -> None:
    pairs = tuple(Pair(CountedAnswer((1,), "", counts(one)), CountedAnswer((1,), "", nothing)) for one in OURS[:num])
    found = checked(CountComparison(pairs))
    assert found.verdict == "differ" and not needs_causes(found.base)
    assert "drafts nothing" in sentence(found)


def test_few_drafts_that_are_not_accepted_or_not_reported_prove_nothing() -> None:
    for unclear in (AcceptanceCounts(30, 0, 120), AcceptanceCounts(30, 0, None)):
        pairs = tuple(Pair(CountedAnswer((1,), "", counts(one)), CountedAnswer((1,), "", unclear)) for one in OURS[:2])
        assert not CountComparison(pairs).server_drafts_nothing
    ours = CountedAnswer((1,), "", AcceptanceCounts(10, 0, 0))
    assert not CountComparison((Pair(ours, ours),)).server_drafts_nothing
    other = CountedAnswer((2,), "", AcceptanceCounts(0, 0, 0))
    assert not CountComparison((Pair(CountedAnswer((1,), "", counts(OURS[0])), other),)).server_drafts_nothing


def test_positions_are_compared_with_what_chance_allows() -> None:
    ours, theirs = AcceptanceCounts(40, 70, 160, (40, 20, 10, 0)), AcceptanceCounts(50, 76, 200, (40, 22, 14))
    pairs = tuple(Pair(CountedAnswer((1,), "", ours), CountedAnswer((1,), "", theirs)) for _ in range(4))
    first, second, _, last = CountComparison(pairs).positions()
    assert (first.place, first.reference, first.server) == (1, 1.0, 0.8) and first.is_far
    assert (second.reference, second.server, second.is_far) == (0.5, 0.44, False)
    assert (last.reference, last.server, last.allowed) == (0, 0, 0) and not last.is_far
