"""Races: who leaves after which round, and what is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_bench.analysis.concurrency import SpeedPoint, frontier
from dflash_bench.core.types import Settings
from dflash_bench.racing import race as races
from dflash_bench.racing.race import Decision, Load, Race, decisions, slices
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.table import RunTable
from helpers.each import each
from helpers.rows import drafted, plain
from helpers.runs import about, changed, failing, frame_of, in_time

STEPS = 20


def measured(
    speeds: Mapping[str, float],
    first: int = 0,
    num: int = 8,
    noise: float = 0.01,
    load: Load | None = None,
    spoil: Any = lambda records: records,
    **place: Any,
) -> RunTable:
    """A run in which each method is so many times as fast as plain decoding, give or take the noise of each answer."""
    load = load or Load()
    settings = Settings(thinking=False, concurrency=load.concurrency, context=load.context or None)
    rng, records = np.random.default_rng(first), []
    for at in range(first, first + num):
        base = plain(f"p{at:03}", STEPS, exactness="exact", settings=settings, **place)
        for method, speed in {"ar": 1.0, **speeds}.items():
            seconds = base.generation.decode_s / speed * float(rng.lognormal(0, noise) if method != "ar" else 1)
            begin = 10.0 * len(records)
            own = in_time(base.generation if method == "ar" else drafted("p", [4] * 4, 4).generation, seconds)
            records.append(
                replace(base, method=method, generation=own, start_s=begin, end_s=begin + own.prefill_s + seconds)
            )
    methods = {name: {"name": name, "num_drafts": 0 if name == "ar" else 4} for name in ("ar", *speeds)}
    identity = {"methods": methods, "settings": settings_to_json([settings])}
    return RunTable("run", about(identity=identity), frame_of(spoil(records)))


def raced(*tables: RunTable, methods: tuple[str, ...], load: Load | None = None) -> Race:
    race = Race(load or Load(), methods)
    for table in tables:
        race.add([table], {})
    return race


def verdicts(decision: Decision) -> dict[str, str]:
    return {candidate.method: candidate.verdict for candidate in decision.candidates}


@each("num, beside", [(3, 1), (8, 1), (9, 1), (32, 1), (100, 1), (64, 8), (33, 16), (40, 32)])
def test_rounds_double_and_use_every_prompt_once(num: int, beside: int) -> None:
    found = slices(num, beside)
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == num
    sizes = [end - begin for begin, end in found]
    assert len(sizes) == 1 or min(sizes) >= max(5, beside)
    assert all(end <= 2 * begin for begin, end in found[1:-1])


def test_after_a_round_those_leave_that_are_slower_and_what_is_left_leads() -> None:
    speeds = {"dflash": 2.0, "dflash:8": 2.0, "eagle3": 1.2, "ngram": 0.6}
    race = raced(measured(speeds, noise=0.1), methods=tuple(speeds))
    assert race.racing == ["dflash", "dflash:8"] and not race.is_decided
    assert race.left == {"eagle3": ("slower", ""), "ngram": ("below_plain", "")}
    decision = race.decision()
    assert decision.verdict == "faster" and decision.choice in ("dflash", "dflash:8")
    (level,) = decision.level
    assert level.beside is not None and level.beside.contains(1)
    assert decision.of("eagle3").beside is not None and decision.of("eagle3").beside.high < 0.9  # type: ignore[union-attr]


def test_rounds_are_put_together_by_prompt_and_narrow_the_interval() -> None:
    speeds = {"dflash": 2.0, "eagle3": 2.0}
    first, second = (measured(speeds, 8 * at, noise=0.15) for at in range(2))
    one, both = raced(first, methods=tuple(speeds)), raced(first, second, methods=tuple(speeds))
    assert one.racing == ["dflash", "eagle3"]
    narrow, wide = both.speedup("dflash"), one.speedup("dflash")
    assert both.decision().of("dflash").num_prompts == 16
    assert narrow and wide and narrow.high - narrow.low < wide.high - wide.low  # type: ignore[operator]


def test_a_gain_that_is_not_worth_more_measuring_ends_the_race() -> None:
    speeds = {"dflash": 2.0, "dflash:8": 1.999}
    race = raced(measured(speeds, noise=0.005), methods=tuple(speeds))
    assert len(race.racing) == 1 and race.is_decided
    assert "no_gain" in verdicts(race.decision()).values()


def test_the_faster_half_goes_on_where_no_interval_tells() -> None:
    race = Race(Load(), tuple(f"dflash:{number}" for number in range(1, 9)))
    for first, num, most in ((0, 8, 4), (8, 8, 2), (16, 16, 1)):
        before = race.racing
        race.add([measured(dict.fromkeys(before, 2.0), first, num, noise=0.4)], {})
        speeds = {method: speed.value for method in before if (speed := race.speedup(method))}
        slower = [speeds[method] for method in before if race.left.get(method) == ("behind", "")]
        assert max(slower, default=0.0) < min(speeds[method] for method in race.racing)
        assert 1 <= len(race.racing) <= most
    assert ("behind", "") in race.left.values()


def test_two_go_on_until_enough_is_measured_and_of_one_wave_all() -> None:
    pair = {"dflash": 2.0, "eagle3": 2.0}
    assert len(raced(measured(pair, noise=0.4), methods=tuple(pair)).racing) == 2
    assert len(raced(measured(pair, num=32, noise=0.4), methods=tuple(pair)).racing) == 1
    several = {f"dflash:{number}": 2.0 for number in range(1, 9)}
    waves = Load(concurrency=4)
    assert len(raced(measured(several, noise=0.1, load=waves), methods=tuple(several), load=waves).racing) == 8


def test_of_one_wave_only_those_leave_that_are_far_behind() -> None:
    """A disturbance slows all answers of a wave, which no interval over prompts shows."""
    load, speeds = Load(concurrency=4), {"dflash": 2.0, "eagle3": 1.8, "ngram": 1.2}
    first, second = (measured(speeds, 8 * at, load=load) for at in range(2))
    race = raced(first, methods=tuple(speeds), load=load)
    assert race.racing == ["dflash", "eagle3"] and not race.is_decided
    race.add([second], {})
    assert race.racing == ["dflash"] and race.is_decided


def test_wrong_and_failed_answers_put_a_method_out_however_fast_it_is() -> None:
    speeds = {"dflash": 3.0, "eagle3": 2.5, "ngram": 1.5}

    def spoil(records: Any) -> Any:
        return failing(changed(records, "dflash", 1, exactness="mismatch"), "eagle3")

    race = raced(measured(speeds, spoil=spoil), methods=tuple(speeds))
    assert race.left == {"dflash": ("wrong", ""), "eagle3": ("failed", "boom")}
    assert race.decision().choice == "ngram"


@each("speed, verdict", [(2.0, "faster"), (1.0, "unclear"), (0.5, "plain")])
def test_drafting_pays_if_the_interval_says_so(speed: float, verdict: str) -> None:
    decision = raced(measured({"dflash": speed}, noise=0.05), methods=("dflash",)).decision()
    assert decision.verdict == verdict
    assert decision.choice == ("ar" if verdict == "plain" else "dflash")


def test_more_prompts_are_asked_for_where_they_would_tell() -> None:
    decision = raced(measured({"dflash": 1.05}, noise=0.12), methods=("dflash",)).decision()
    assert decision.verdict == "unclear" and decision.more_prompts and 1 <= decision.more_prompts < 10_000


def test_few_prompts_and_none_decide_nothing() -> None:
    few = raced(measured({"dflash": 2.0}, num=3), methods=("dflash",)).decision()
    assert few.verdict == "too_few" and few.speedup is not None and few.speedup.low is None
    none = Race(Load(), ("dflash",)).decision()
    assert none.verdict == "no_time" and verdicts(none) == {"ar": "waiting", "dflash": "no_time"}


def test_a_choice_is_kept_under_the_next_load_if_nothing_there_is_better() -> None:
    several = {
        1: {"dflash": 2.0, "dflash:8": 1.5},
        4: {"dflash": 1.59, "dflash:8": 1.6},
        16: {"dflash": 0.7, "dflash:8": 0.6},
    }
    held = []
    for beside, speeds in several.items():
        load = Load(concurrency=beside)
        tables = [measured(speeds, 16 * at, 16, 0.1, load) for at in range(2)]
        held.append(raced(*tables, methods=("dflash", "dflash:8"), load=load))
    made = decisions(held[::-1])
    assert [one.load.concurrency for one in made] == [1, 4, 16]
    assert [(one.choice, one.verdict) for one in made] == [("dflash", "faster"), ("dflash", "faster"), ("ar", "plain")]
    assert made[0].loses_from is not None and 4 < made[0].loses_from < 16


def test_a_speedup_above_the_tokens_per_round_is_no_result() -> None:
    """Five tokens per round cannot be six times as fast: plain decoding ran on a slower machine, beside all methods."""
    speeds = {"dflash": 6.0, "eagle3": 2.0}
    assert races.drifted(measured(speeds)) == ["dflash"] and not races.drifted(measured({"dflash": 4.9}))
    race = raced(measured(speeds), methods=tuple(speeds))
    assert race.left == {"dflash": ("drifted", "")} and race.racing == ["eagle3"] and race.measured == []
    decision = race.decision()
    assert decision.verdict == "drifted" and decision.of("dflash").speedup is None
    race.add([measured({"eagle3": 2.0}, 8)], {})
    assert race.decision().choice == "eagle3" and race.measured == ["eagle3"]


def test_a_draft_that_pays_from_a_load_on_does_not_stop_paying_below_it() -> None:
    for curve, last in (
        ({1: 0.7, 4: 1.41, 16: 1.6}, None),
        ({1: 2.0, 4: 0.5, 16: 2.0}, None),
        ({1: 0.5, 4: 2, 16: 0.5}, 8),
    ):
        held = []
        for beside, speed in curve.items():
            load = Load(concurrency=beside)
            held.append(raced(measured({"dflash": speed}, 0, 32, 0.05, load), methods=("dflash",), load=load))
        at_four = [one for one in decisions(held) if one.verdict == "faster"]
        assert at_four[-1].loses_from == (last and pytest.approx(last, rel=0.1)), curve
        if curve[1] > 1:
            assert at_four[0].loses_from == pytest.approx(2.0, rel=0.1)


def test_categories_are_slices_of_the_choice() -> None:
    tables = [
        measured({"dflash": speed}, first, category=name)
        for name, speed, first in (("code", 3.0, 0), ("prose", 1.4, 8))
    ]
    (decision,) = decisions([raced(*tables, methods=("dflash",))])
    assert [(name, num) for name, num, _ in decision.slices] == [("code", 8), ("prose", 8)]
    assert [round(speedup.value, 1) for _, _, speedup in decision.slices] == [3.0, 1.4]


def test_the_frontier_holds_what_no_point_beats() -> None:
    points = [SpeedPoint("a", 1, 1.0, 100), SpeedPoint("b", 1, 2.0, 90), SpeedPoint("c", 8, 4.0, 300)]
    assert [point.method for point in frontier(points)] == ["a", "c"]
    assert races.WORTH < 0.05, "what leaves as not worth it may be as much faster as the study allows"
