"""How much of a draft is verified: the best by brute force, by costs learnt from noisy rounds; exact at any width."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from itertools import accumulate, count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_bench.engine.adaptive import WIDTHS, AdaptiveLength, WidthCosts, best_width, expected_tokens
from dflash_bench.engine.drafter import NoDrafter
from dflash_bench.engine.drafters.ddtree import AutoDDTreeDrafter
from dflash_bench.engine.drafters.dflash import AutoDFlashDrafter
from dflash_bench.engine.sampling import Sampling
from dflash_bench.engine.target import Target
from dflash_bench.models.nets.dflash import DFlashDraft
from helpers.decoding import PROMPTS as RAGGED
from helpers.decoding import STOP, answers, table, texts
from helpers.drafts.ddtree import ddtree_drafter, noisy_ddtree
from helpers.drafts.tiny import DFLASH, PROMPTS, enlarged
from helpers.each import each
from helpers.plain_answers import plain_answers
from helpers.toy import plain, run, tiny

probability = st.floats(0.001, 1)


@given(
    st.lists(st.lists(probability, min_size=6, max_size=6), min_size=1, max_size=3),
    st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    st.floats(0.25, 4),
)
def test_the_width_chosen_has_the_most_expected_tokens_per_second(
    rows: list[list[float]], seconds: list[float], calibration: float
) -> None:
    """The definition: a row gets one token, and drafted token k if it and those before it are kept."""
    widths = (1, 2, 4, 6)
    rates = []
    for width, cost in zip(widths, seconds, strict=True):
        tokens = 0.0
        for row in rows:
            tokens += 1 + sum(math.prod(p**calibration for p in row[: k + 1]) for k in range(width))
        rates.append(tokens / cost)
    scores = np.array([list(accumulate(map(math.log, row))) for row in rows])
    chosen = best_width(expected_tokens(scores, widths, calibration), np.array(seconds))
    assert rates[chosen] == pytest.approx(max(rates))


def test_of_widths_that_pay_the_same_the_narrowest_is_chosen() -> None:
    assert best_width(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0])) == 0


def test_with_a_margin_the_widest_is_chosen_that_is_hardly_slower() -> None:
    expected, seconds = np.array([2.0, 4.0, 6.0, 7.0]), np.array([1.0, 1.9, 2.9, 4.0])
    assert [best_width(expected, seconds, margin) for margin in (0.0, 0.01, 0.02, 0.05, 0.2)] == [1, 1, 2, 2, 3]


def measured(fixed: float, slope: float, num_rounds: int, seed: int = 0) -> WidthCosts:
    """Rounds of random widths, each a tenth longer or shorter than it should be, some held up for ten times as long."""
    chance, costs = random.Random(seed), WidthCosts((1, 3, 7, 15, 31))
    for _ in range(num_rounds):
        index = chance.randrange(5)
        seconds = (fixed + slope * costs.widths[index]) * chance.uniform(0.9, 1.1)
        costs.add(index, seconds * (10 if chance.random() < 0.02 else 1))
    return costs


@pytest.mark.parametrize(("fixed", "slope"), [(10.0, 0.0), (10.0, 0.15), (0.5, 0.15)])
def test_costs_are_learnt_from_rounds_that_vary(fixed: float, slope: float) -> None:
    learnt = measured(fixed, slope, 128).seconds()
    expected = fixed + slope * np.array([1, 3, 7, 15, 31])
    assert np.abs(learnt[2:] / expected[2:] - 1).max() < 0.15
    assert (np.diff(learnt) >= 0).all() and (learnt > 0).all()


def test_old_rounds_are_forgotten() -> None:
    costs = measured(10, 0.1, 200)
    for index in range(5):
        for _ in range(40):
            costs.add(index, 3.0)
    assert costs.seconds() == pytest.approx(np.full(5, 3.0))


def test_two_widths_take_turns_at_the_start_and_another_is_looked_at_now_and_then() -> None:
    costs = WidthCosts((1, 3, 7, 15, 31))
    looks = []
    for chosen in [4] * 100 + [0] * 100:
        first = costs.explore_first()
        looks.append(costs.explore(chosen) if first is None else first)
        costs.add(looks[-1], 1.0)
    assert looks[:9] == [4, 2, 4, 2, 4, 2, 4, 2, 4]
    assert [looks[8:100].count(index) for index in range(5)] == [0, 0, 2, 0, 90]
    assert [looks[100:].count(index) for index in range(5)] == [98, 0, 2, 0, 0]


class Machine:
    """A clock that a simulated round moves on, and rounds whose drafts are right as often as q ** power says."""

    def __init__(self, fixed: float, slope: float, power: float = 1.0, lags: bool = False) -> None:
        self.time, self.fixed, self.slope, self.power = 0.0, fixed, slope, power
        self.adaptive = AdaptiveLength(15, lags, lambda: self.time)
        self.chance = random.Random(0)

    def round(self) -> tuple[int, int, list[float]]:
        """The width chosen, the tokens got, and what the draft said of each place."""
        sure = self.chance.choice([0.5, 0.97])
        scores = [math.log(sure) * (k + 1) for k in range(15)]
        self.adaptive.start()
        width = self.adaptive.choose(torch.tensor([scores]))
        kept = 0
        while kept < width and self.chance.random() < sure**self.power:
            kept += 1
        self.time += self.fixed + self.slope * width
        self.adaptive.learn([kept + 1])
        return width, kept + 1, scores


def run_rounds(machine: Machine, num_rounds: int) -> list[tuple[int, int, list[float]]]:
    rounds = []
    for i in range(num_rounds):
        if i % 20 == 0:
            machine.adaptive.begin(1)
            # Between two answers anything may happen, and none of it is a round.
            machine.time += 1000
        rounds.append(machine.round())
    return rounds


@each("lags", [False, True])
@each(("fixed", "slope"), [(1.0, 0.0), (1.0, 0.01), (0.5, 0.05), (0.1, 0.1)])
def test_a_chosen_width_is_hardly_ever_worse_than_the_best_fixed_one(fixed: float, slope: float, lags: bool) -> None:
    rounds = run_rounds(Machine(fixed, slope, lags=lags), 2000)
    rate = sum(tokens for _, tokens, _ in rounds) / sum(fixed + slope * width for width, _, _ in rounds)
    best = 0.0
    for width in range(1, 16):
        tokens = np.mean([(1 + np.exp(scores[:width]).sum()) for _, _, scores in rounds])
        best = max(best, float(tokens) / (fixed + slope * width))
    assert rate > 0.97 * best


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_trust_finds_how_much_the_draft_is_too_sure_of_itself(power: float) -> None:
    machine = Machine(1.0, 0.02, power)
    run_rounds(machine, 4000)
    assert machine.adaptive.calibration == pytest.approx(power, rel=0.3)


def test_an_expensive_width_is_cut_and_a_free_one_is_not() -> None:
    for slope, low, high in ((0.0, 15, 15), (0.5, 1, 5)):
        widths = [width for width, _, _ in run_rounds(Machine(0.1, slope), 300)[20:]]
        assert low <= np.median(widths) <= high


def test_a_width_is_one_of_few_and_the_whole_draft_among_them() -> None:
    for num_drafts in (1, 4, 15, 63, 255):
        widths = AdaptiveLength(num_drafts, lags=False).widths
        assert widths[-1] == num_drafts and sorted({*widths}) == widths
        assert {*widths[:-1]} <= {*WIDTHS}


def test_other_numbers_of_rows_have_costs_of_their_own() -> None:
    pace = AdaptiveLength(15, lags=False)
    for rows in (1, 3, 1):
        pace.begin(rows)
        for _ in range(5):
            pace.start()
            pace.choose(torch.zeros(rows, 15))
            pace.learn([2] * rows)
    # The duration of a generation's last round is unknown.
    assert {rows: costs.num_rounds for rows, costs in pace.costs.items()} == {1: 8, 3: 4}


def test_rows_that_have_ended_do_not_count() -> None:
    pace = AdaptiveLength(3, lags=False, now=lambda: 0.0)
    pace.begin(2)
    pace.learn([4, 0])
    pace.start()
    pace.choose(torch.tensor([[math.log(0.5)] * 3, [0.0] * 3]))
    assert pace.expected is not None
    assert pace.expected.tolist() == pytest.approx([1.5, 2.0, 2.5])


# In the loop.


def erratic() -> Callable[[], float]:
    """A clock by which rounds take long or short without any reason."""
    chance = random.Random(0)
    times = accumulate(chance.random() for _ in count())
    return lambda: next(times)


def auto_dflash(target: Target, **options: Any) -> AutoDFlashDrafter:
    return AutoDFlashDrafter(enlarged(DFlashDraft(DFLASH)), target.embedding, target.head, **options)


def auto_ddtree(target: Target) -> AutoDDTreeDrafter:
    return AutoDDTreeDrafter(enlarged(DFlashDraft(DFLASH)), target.embedding, target.head, 40)


@each("lags", [False, True])
@each("num_rows", [1, 3, 8])
@each("make", [auto_dflash, auto_ddtree])
def test_whatever_width_is_chosen_the_tokens_are_the_plain_ones(make: Any, num_rows: int, lags: bool) -> None:
    target, prompts = Target(tiny("qwen3")), RAGGED[:num_rows]
    drafter = make(target)
    drafter.adaptive = AdaptiveLength(drafter.num_drafts, lags, erratic())
    drafted = set()
    for _ in range(2):
        out = run(target, drafter, prompts, 16)
        assert out.tokens == plain_answers(target, prompts, 16)
        drafted |= {max(step.drafted) for step in out.rounds}
    assert len(drafted) > 1


@each("lags", [False, True])
@each("num_rows", [1, 3, 8])
def test_drafts_that_are_often_right_are_cut_anywhere_and_stay_exact(num_rows: int, lags: bool) -> None:
    prompts = RAGGED[:num_rows]
    drafter = noisy_ddtree(AutoDDTreeDrafter, texts(prompts), 24)
    drafter.adaptive = AdaptiveLength(drafter.num_drafts, lags, erratic())
    for _ in range(4):
        out = run(table(), drafter, prompts, stop_ids=frozenset({STOP}))
        assert out.tokens == answers(prompts)
    assert any(count > 2 for step in out.rounds for count in step.accepted)


@pytest.mark.parametrize("make", [auto_dflash, auto_ddtree])
def test_equal_seeds_draw_equal_tokens_whatever_is_cut(make: Any) -> None:
    target, sampling = Target(tiny("qwen3")), Sampling(0.8, seed=5)
    alone = run(target, NoDrafter(), PROMPTS, 16, sampling=sampling)
    assert run(target, make(target), PROMPTS, 16, sampling=sampling).tokens == alone.tokens


@pytest.mark.parametrize("make", [auto_dflash, auto_ddtree])
def test_a_broken_draft_costs_speed_and_not_exactness(make: Any) -> None:
    target = Target(tiny("qwen3"))
    drafter = make(target)
    with torch.no_grad():
        next(drafter.draft.parameters()).fill_(torch.nan)
    for _ in range(3):
        assert run(target, drafter, PROMPTS, 12).tokens == plain_answers(target, PROMPTS, 12)
    assert math.isfinite(drafter.adaptive.calibration)


def test_few_nodes_below_each_other_are_sent_as_a_chain() -> None:
    target = Target(copy.deepcopy(tiny("llama")))  # whose weights are changed below
    drafter = auto_ddtree(target)
    drafter.adaptive = AdaptiveLength(drafter.num_drafts, False, erratic())
    assert ddtree_drafter(target, 1).top_k == 1
    with torch.no_grad():
        # A draft that is certain: its best tree is a chain, as long as the block is.
        target.head.weight.data.mul_(1000)
    proposed = []
    original = drafter.propose
    drafter.propose = lambda: proposed.append(original()) or proposed[-1]
    assert run(target, drafter, PROMPTS[:1], 40).tokens == plain(target, PROMPTS[:1], 40)
    assert {draft.parents is None for draft in proposed} == {True, False}
