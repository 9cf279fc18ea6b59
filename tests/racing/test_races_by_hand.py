"""Each figure that `recommend` prints, worked out by hand: of methods, of plain decoding beside them, and of loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_bench.analysis.stats import Interval
from dflash_bench.core.types import Answer, Settings
from dflash_bench.racing import race as races
from dflash_bench.racing import recommendation as recommend
from dflash_bench.racing.race import Candidate, Decision, Load, Race
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.table import RunTable
from helpers.each import each
from helpers.rows import drafted, plain
from helpers.runs import about, frame_of, in_time

DRAFTS = {"ar": 0, "dflash": 4, "eagle3": 3}


def cut(rounds: Sequence[int]) -> dict[str, Any]:
    """Seven tokens after the first: one less than the last round had."""
    return {"emitted": (rounds[0] + 1, rounds[1]), "token_ids": tuple(range(8))}


def run(
    prompts: Mapping[str, str],
    seconds: Mapping[str, float],
    joules: Mapping[str, float],
    load: Load | None = None,
    rounds: Sequence[int] = (4, 2),
) -> RunTable:
    """A run of prompts by suite: each method decodes seven tokens after the first in so many seconds, one by one.

    A prefill takes 20 ms, and a round half of its 20 ms and 17 ms in draft and target.
    """
    settings, rows = Settings(thinking=False, concurrency=(load or Load()).concurrency), []
    for prompt, suite in prompts.items():
        for method, own_s in seconds.items():
            row: Answer = plain(prompt, 7) if method == "ar" else drafted(prompt, rounds, 4, cut(rounds))
            generated, begin = in_time(row.generation, own_s), 10.0 * len(rows)
            rows.append(
                replace(
                    row,
                    method=method,
                    suite=suite,
                    settings=settings,
                    generation=generated,
                    start_s=begin,
                    end_s=begin + 0.02 + own_s,
                    category=prompt[0],
                    measured={"energy_j": joules[method]} if method in joules else {},
                    exactness=None if method == "ar" else "exact",
                )
            )
    entries = {method: {"name": method, "num_drafts": DRAFTS[method]} for method in seconds}
    identity = {"methods": entries, "settings": settings_to_json([settings])}
    return RunTable("run", about(identity=identity), frame_of(rows))


@pytest.fixture(scope="module")
def raced() -> Race:
    """Two methods on a suite of two prompts and one of one; then, half as fast, one of them on a third prompt."""
    race = Race(Load(), ("dflash", "eagle3"))
    first = {"ar": 0.14, "dflash": 0.07, "eagle3": 0.10}
    race.add([run({"a": "gsm8k", "b": "gsm8k", "c": "math500"}, first, {"ar": 4.0, "dflash": 1.0, "eagle3": 2.0})], {})
    race.left["dflash"] = ("behind", "")
    second = {"ar": 0.28, "eagle3": 0.14}
    race.add([run({"d": "gsm8k", "e": "math500"}, second, {"ar": 8.0, "eagle3": 2.0}, rounds=(2, 4))], {})
    return race


# 5 answers of 7 tokens after the first, all plain: 0.14 s three times and 0.28 s twice, and 20 ms each.
PLAIN_TPS, PLAIN_J = 5 * 8 / (3 * 0.16 + 2 * 0.30), (3 * 4 + 2 * 8) / 40
# gsm8k takes (2 * 0.14 + 0.28) / 21 s per token, math500 (0.14 + 0.28) / 14: their geometric mean.
PLAIN_MS = 1000 * ((0.56 / 21) * (0.42 / 14)) ** 0.5
EAGLE = ((0.56 / 0.34) * (0.42 / 0.24)) ** 0.5
BY_HAND: dict[str, dict[str, Any]] = {
    "ar": {
        "rounds": 2,
        "num_prompts": 5,
        "speedup": 1.0,
        "length": 1.0,
        "tokens_per_s": PLAIN_TPS,
        "ms_per_token": PLAIN_MS,
        "joules_per_token": PLAIN_J,
    },
    "dflash": {
        # The first run alone, where its tokens per second are 16/9 of plain decoding's, and its joules a quarter.
        "rounds": 1,
        "num_prompts": 3,
        "num_drafts": 4,
        "speedup": 2.0,
        "length": 4.0,
        "tokens_per_s": PLAIN_TPS * 0.16 / 0.09,
        "ms_per_token": PLAIN_MS / 2,
        "joules_per_token": PLAIN_J / 4,
        # Rounds of 35 ms, of which 17 in 20 in draft and target, against steps of 20 ms; over eagle3's 1.4.
        "break_even": 0.85 * 0.035 / 0.02,
        "beside": 2 / 1.4,
    },
    "eagle3": {
        "rounds": 2,
        "num_prompts": 5,
        "num_drafts": 3,
        "speedup": EAGLE,
        "length": 4.0,
        "tokens_per_s": PLAIN_TPS * (3 * 0.16 + 2 * 0.30) / (3 * 0.12 + 2 * 0.16),
        "ms_per_token": PLAIN_MS / EAGLE,
        "joules_per_token": PLAIN_J * (3 * 2 + 2 * 2) / (3 * 4 + 2 * 8),
        # 6 rounds of gsm8k in 0.34 s and 21 steps in 0.56; 4 in 0.24 and 14 in 0.42.
        "break_even": 0.85 * ((0.34 / 6) / (0.56 / 21) * (0.24 / 4) / (0.42 / 14)) ** 0.5,
    },
}


@each("method", BY_HAND)
def test_each_figure_of_a_method_is_the_one_worked_out_by_hand(raced: Race, method: str) -> None:
    found = recommend._candidate_json(raced.decision().of(method))
    values = {name: one[0] if isinstance(one, list) else one for name, one in found.items()}
    kept = {name: one for name, one in values.items() if one not in (None, "") and name not in ("method", "verdict")}
    assert kept == pytest.approx(BY_HAND[method], rel=1e-5)


def test_the_plot_has_the_time_of_a_token_and_the_throughput(raced: Race) -> None:
    (points,) = recommend.points([raced.decision()]).values()
    assert {one.method: (one.ms_per_token, one.tokens_per_s) for one in points} == {
        method: pytest.approx((own["ms_per_token"], own["tokens_per_s"])) for method, own in BY_HAND.items()
    }


def test_a_slice_has_its_own_prompts(raced: Race) -> None:
    """Speed-ups by the first letter of prompts: 2 times plain for d and e, 1.4 times for the others."""
    found = {name: (num, speedup.value) for name, num, speedup in raced.slices("eagle3")}
    assert found == {name: (1, pytest.approx(2.0 if name in "de" else 1.4)) for name in "abcde"}


def test_more_prompts_narrow_an_interval_by_the_root_of_their_number(raced: Race) -> None:
    """From 0.9 to 1.21 is e to the -0.105 and 0.191: half of it is 0.148, three times the 0.049 that 1.05 is off 1."""
    # 5 prompts times (0.14801 / 0.04879) ** 2 are 46.01, of which 5 are there.
    assert raced._more("eagle3", Interval(1.05, 0.9, 1.21)) == 42
    assert raced._more("eagle3", Interval(1.0, 0.9, 1.1)) is None
    # 9,900 and 10,200 in all.
    assert [raced._more("eagle3", Interval(1.01, 0.01, 0.01 * 1.01**width)) for width in (88.99, 90.33)] == [9895, None]


@pytest.mark.parametrize(("times", "found"), [(4.39, []), (4.41, ["dflash"])])
def test_a_speedup_is_impossible_from_a_tenth_above_the_tokens_per_round_on(times: float, found: list[str]) -> None:
    """4 tokens in a round, of which the last was cut: 4.4 times."""
    table = run({"a": "gsm8k"}, {"ar": 0.14, "dflash": 0.14 / times}, {})
    assert races.drifted(table) == found


@each("concurrency, size", [(1, 8), (4, 8), (5, 10), (16, 32)])
def test_a_first_round_keeps_its_places_busy_twice(concurrency: int, size: int) -> None:
    assert races.first_size(concurrency) == size


def test_the_load_at_which_a_choice_stops_paying_lies_between_two() -> None:
    """4 times alone, 2 at 4, half as fast at 16: from 2 to 1/2 in the logarithm, halfway from 4 to 16."""
    made = []
    for beside, speed in ((1, 4.0), (4, 2.0), (16, 0.5)):
        one = Candidate("dflash", "leads", speedup=Interval(speed, speed, speed))
        made.append(Decision(Load(concurrency=beside), "dflash", "faster", one.speedup, (one,)))
    assert [races._loses_from(one, made) for one in made[:2]] == [pytest.approx(8.0)] * 2
    assert races._loses_from(made[0], made[:2]) is None


class KnownRace(Race):
    """A race in which dflash leads at 2 times, and eagle3 is at `high` of both by its upper bounds."""

    high: tuple[float, float]

    def speedup(self, method: str) -> Interval:
        return Interval(2.0, 1.9, 2.1) if method == "dflash" else Interval(0.5, 0.4, self.high[0])

    def beside(self, method: str, leader: str) -> Interval:
        return Interval(0.25, 0.2, 1.0 if method == leader else self.high[1])


@each(
    "load, over_plain, beside, verdict",
    [
        (1, 0.99, 1.5, "below_plain"),
        (1, 1.01, 1.5, "level"),
        (1, 1.01, 1.031, "level"),
        (1, 1.01, 1.029, "no_gain"),
        (1, 1.01, 1.0, "no_gain"),
        (1, 1.01, 0.99, "slower"),
        (4, 0.84, 1.5, "below_plain"),
        (4, 0.86, 0.86, "level"),
        (4, 0.86, 0.84, "slower"),
    ],
)
def test_who_leaves_goes_by_upper_bounds(load: int, over_plain: float, beside: float, verdict: str) -> None:
    race = KnownRace(Load(concurrency=load), ("eagle3", "dflash"))
    race.high = over_plain, beside
    assert race._verdicts() == {"dflash": "leads", "eagle3": verdict}


@pytest.mark.parametrize(("low", "choice"), [(1.01, "dflash"), (0.99, "eagle3")])
def test_a_choice_is_kept_where_it_surely_pays(low: float, choice: str) -> None:
    alone = Candidate("dflash", "leads", speedup=Interval(2.0, 1.9, 2.1))
    best, kept = Candidate("eagle3", "leads", speedup=Interval(1.3, 1.2, 1.4)), replace(alone, verdict="level")
    kept = replace(kept, speedup=Interval(1.2, low, 1.4))
    held: Any = [
        SimpleNamespace(load=one.load, decision=lambda one=one: one, slices=lambda _: ())
        for one in (
            Decision(Load(), "dflash", "faster", alone.speedup, (alone, replace(best, verdict="level"))),
            Decision(Load(concurrency=4), "eagle3", "faster", best.speedup, (best, kept)),
        )
    ]
    assert [one.choice for one in races.decisions(held)] == ["dflash", choice]
