"""Every printed figure beside its value worked out by hand, from rows in which no two sums are alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dflash_bench.analysis.cells import Cell, summarise
from dflash_bench.analysis.compare import compare_methods, compare_runs, verdict
from dflash_bench.analysis.concurrency import concurrency_curves, context_curves, points_of
from dflash_bench.analysis.metrics import METRICS
from dflash_bench.analysis.stats import Change, Interval
from dflash_bench.core.types import Answer, Generation, Settings
from dflash_bench.measurements.headroom import headroom_of
from dflash_bench.measurements.record import calibration
from dflash_bench.replay.stored_answers import ReplayCell, StoredAnswer
from dflash_bench.report import data, sections
from dflash_bench.results import parts
from dflash_bench.results.identity import settings_to_json
from dflash_bench.results.table import _weights_s
from helpers.each import each
from helpers.rows import record
from helpers.runs import about, frame_of, known


def answered(method: str, prompt: str, accepted: tuple[int, ...], emitted: tuple[int, ...], **place: Any) -> Answer:
    """An answer with these rounds after the token from prefill; whatever is not of `Answer` belongs to the rounds."""
    of_answer = {
        name: place.pop(name) for name in ("exactness", "passed", "score", "energy_j", "ranks") if name in place
    }
    tokens = tuple(range(100, 101 + sum(emitted)))
    generated = Generation(tokens, "", "stop", accepted=accepted, emitted=emitted, **place)
    return record(method, prompt, generated, **of_answer)


def plain(prompt: str, num_steps: int, **place: Any) -> Answer:
    ones = (1,) * num_steps
    shown = {"drafted": (0,) * num_steps, "draft_s": (0.0,) * num_steps, "verify_s": (0.03,) * num_steps}
    return answered("ar", prompt, (0,) * num_steps, ones, round_s=(0.032,) * num_steps, **shown, **place)


ROWS = [
    plain("a", 10, num_prompt_tokens=30, prefill_s=0.02, decode_s=0.50),
    plain("b", 8, num_prompt_tokens=20, prefill_s=0.01, decode_s=0.24),
    plain("c", 0, num_prompt_tokens=13, prefill_s=0.04, decode_s=0.0),
    # Three rounds; of the second draft three tokens are verified, the last round is cut from 4 tokens to 3.
    answered(
        "dflash", "a", (4, 1, 3), (5, 2, 3), drafted=(4, 4, 4), verified=(4, 3, 4), num_prompt_tokens=30,
        prefill_s=0.03, decode_s=0.10, draft_prefill_s=0.002, draft_s=(0.004, 0.005, 0.006),
        verify_s=(0.010, 0.011, 0.012), round_s=(0.016, 0.018, 0.020), ranks=(1, 1, 1, 1, 1, 4, 1, 7, 1, 1, 1, 5),
        energy_j=3.0, exactness="exact", passed=True, score=0.5,
    ),
    answered(
        "dflash", "b", (1, 3), (2, 4), drafted=(4, 4), num_prompt_tokens=20, prefill_s=0.02, decode_s=0.08,
        draft_prefill_s=0.006, draft_s=(0.003, 0.005), verify_s=(0.012, 0.014), round_s=(0.020, 0.022),
        ranks=(1, 17, 1, 1, 1, 1, 1, 16), energy_j=2.0, exactness="near_tie", passed=False, score=0.2,
    ),
    # It ends with the token from prefill.
    answered("dflash", "c", (), (), drafted=(), num_prompt_tokens=13, prefill_s=0.04, decode_s=0.0, exactness="exact"),
    # Plain decoding did not answer it; of its one round only the verifying is known, and no ranks.
    answered(
        "dflash", "d", (2,), (3,), drafted=(4,), num_prompt_tokens=50, prefill_s=0.06, decode_s=0.05,
        verify_s=(0.013,), exactness="exact", score=0.8,
    ),
]  # fmt: skip
BY_HAND = {
    "al.pooled": 20 / 6,  # 5 + 2 + 4, 2 + 4 and 3 tokens in 6 rounds
    "al.request_mean": (11 / 3 + 6 / 2 + 3) / 3,
    "al.emitted": 19 / 6,  # one token was cut off
    "accept_rate": 14 / 24,
    "verified": 11 / 3,  # of the answer that cuts its drafts
    "headroom.1": 17 / 5,
    "headroom.4": (5 + 4 + 4 + 2 + 4) / 5,  # rank 4 is among the 4 likeliest, rank 5 is not; 3 of round 2 are verified
    "headroom.16": (5 + 4 + 5 + 2 + 5) / 5,  # rank 16 is among the 16 likeliest, rank 17 is not
    "forwards_per_token": 6 / 19,
    "exact": 3 / 4,
    "passed": 1 / 2,  # of the two that were scored
    "score": 0.5,
    "tps.decode": 19 / 0.23,
    "tps.e2e": 23 / 0.38,  # 0.13 + 0.10 + 0.04 + 0.11 s
    "speedup.decode": (0.74 / 18) / (0.18 / 16),
    "speedup.decode.geometric": (5 * 2.25) ** 0.5,  # 50 ms against 10 ms a token, 30 ms against 13 1/3
    "speedup.e2e": (0.81 / 21) / (0.27 / 19),
    "draft_ms": 23 / 5,
    "verify_ms": 72 / 6,
    "other_ms": 14 / 5,  # 96 ms of five rounds, less 23 and 59
    "break_even_al": (0.082 / 5) / (0.74 / 18),
    "draft_prefill_ms": 4.0,
    "plain_ms": 740 / 18,
    "joules_per_token": 5 / 18,  # of the answers whose energy is known
    "prompt_tokens": 28.25,
}
OF_PLAIN = {
    "al.pooled": 1.0, "al.request_mean": 1.0, "al.emitted": 1.0, "forwards_per_token": 1.0, "tps.decode": 18 / 0.74,
    "tps.e2e": 21 / 0.81, "speedup.decode": 1.0, "speedup.decode.geometric": 1.0, "speedup.e2e": 1.0,
    "bandwidth_share": 0.18 / 0.74, "draft_ms": 0.0, "verify_ms": 30.0, "other_ms": 2.0, "plain_ms": 740 / 18,
    "prompt_tokens": 21.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def cells() -> dict[str, Cell]:
    frame = frame_of(ROWS)
    # 10 ms to read the weights once, for each of the 18 steps.
    frame["weights_s"] = (frame["num_rounds"] * 0.01).where(frame["method"] == "ar")
    return {cell.method: cell for cell in summarise(frame, known())}


@pytest.mark.parametrize(("method", "by_hand"), [("dflash", BY_HAND), ("ar", OF_PLAIN)])
def test_each_figure_is_the_one_worked_out_by_hand(
    cells: dict[str, Cell], method: str, by_hand: dict[str, float]
) -> None:
    found = {name: interval.value for name, interval in cells[method].figures.items()}
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in by_hand.items()}
    assert METRICS.keys() == BY_HAND.keys() | OF_PLAIN.keys()


def test_counts_of_a_cell_are_those_of_its_rows(cells: dict[str, Cell]) -> None:
    cell = cells["dflash"]
    assert (cell.num_prompts, cell.num_tokens, cell.num_errors, cell.num_near_ties) == (4, 23, 0, 1)
    assert (cell.exact, cell.passed, cell.audit, cell.widest) == ((3, 4), (1, 2), None, 5)


def test_the_weights_of_a_step_are_its_bytes_at_the_measured_bandwidth() -> None:
    """1.5 GB at 60 GB/s are 25 ms a step; several answers at a time share their steps."""
    size = {"weight_bytes": 1_200_000_000, "experts_per_token": 2, "num_experts": 8, "expert_bytes": 150_000_000}
    forwards = {
        "rows": 1, "context": 64, "seconds": {1: 0.03}, "bandwidth": 50e9, "products": 1e12, "read_bandwidth": 60e9,
        "size": size | {"matrix_elements": 1, "attention": []}
    }  # fmt: skip
    frame = pd.DataFrame({"num_rounds": [4.0, 3.0], "quick_round_s": [0.03, None]})
    own, shared = _weights_s(frame, about(forwards=forwards))
    assert own == pytest.approx(0.1) and shared != shared


# Which direction is better.


LESS_IS_BETTER = {
    "forwards_per_token", "draft_ms", "verify_ms", "other_ms", "break_even_al", "draft_prefill_ms", "plain_ms",
    "joules_per_token",
}  # fmt: skip


@each("metric_id", METRICS)
def test_less_is_better_of_times_costs_and_passes_alone(metric_id: str) -> None:
    halved, doubled = (Change(Interval(value, value - 0.1, value + 0.1), 1e-6) for value in (0.5, 2.0))
    words = ("better", "worse") if metric_id in LESS_IS_BETTER else ("worse", "better")
    assert (verdict(metric_id, halved), verdict(metric_id, doubled)) == words


def in_rounds(accepted: int, draft_s: float = 0.005) -> list[Cell]:
    """Twelve prompts, 8 to 19 rounds each that accept the same number of tokens, in 20 ms per round."""
    rows = []
    for number in range(12):
        rounds = 8 + number
        place = {"num_prompt_tokens": 9, "prefill_s": 0.02, "exactness": "exact"}
        steps = rounds * (accepted + 1)
        rows.append(plain(str(number), steps, decode_s=0.05 * steps, **(place | {"exactness": None})))
        shown = {"draft_s": (draft_s,) * rounds, "verify_s": (0.01,) * rounds, "round_s": (0.02,) * rounds}
        ones = (accepted,) * rounds
        rows.append(
            answered(
                "dflash",
                str(number),
                ones,
                tuple(one + 1 for one in ones),
                drafted=(4,) * rounds,
                decode_s=0.02 * rounds,
                **shown,
                **place,
            )
        )
    return summarise(frame_of(rows), known())


def test_fewer_passes_per_token_are_better_on_the_screen_of_two_runs() -> None:
    """Two tokens per round are half a pass per token, four a quarter."""
    for before, after, ratio, word in ((1, 3, 0.5, "better"), (3, 1, 2.0, "worse")):
        (compared,) = [
            one for one in compare_runs(in_rounds(before), in_rounds(after), ("x", "y")) if one.key.method == "dflash"
        ]
        change = compared.changes["forwards_per_token"]
        assert change.ratio.value == pytest.approx(ratio) and verdict("forwards_per_token", change) == word
        assert {verdict(name, one) for name, one in compared.changes.items()} == {word}


def test_a_method_of_a_run_is_divided_by_the_one_before_it() -> None:
    """50 ms a token by plain decoding, 5 ms by rounds of four tokens in 20 ms."""
    (compared,) = compare_methods(in_rounds(3))
    assert (compared.before, compared.after) == ("ar", "dflash")
    assert compared.changes["tps.decode"].ratio.value == pytest.approx(10.0)


# Several answers at a time.


LOADS = [Settings(concurrency=number) for number in (1, 4)]


def loaded(method: str, load: Settings, start: float, end: float, **changes: Any) -> dict[str, Any]:
    usual = {
        "suite": "gsm8k", "method": method, "settings_id": load.id, "error": None, "start_s": start, "end_s": end,
        "prefill_s": 0.2, "decode_s": 1.0, "num_tokens": 11, "decode_tokens": 10, "repeat": 0, "turn": 0
    }  # fmt: skip
    return usual | changes


def cell_of(method: str, load: Settings) -> Cell:
    return Cell(
        suite="gsm8k",
        method=method,
        settings=load,
        num_prompts=1,
        num_tokens=11,
        num_errors=0,
        num_near_ties=0,
        exact=None,
        passed=None,
        figures={},
    )


def test_each_load_is_held_to_plain_decoding_under_that_load() -> None:
    """Plain: 11 tokens in 4 s alone, 22 in 2 s together; drafting: 11 in 1 s alone, 22 in 1 s together."""
    alone, together = LOADS
    rows = [
        loaded("ar", alone, 0.0, 4.0), loaded("ar", together, 4.0, 6.0), loaded("ar", together, 4.0, 6.0),
        loaded("dflash", alone, 6.0, 7.0), loaded("dflash", together, 7.0, 8.0), loaded("dflash", together, 7.0, 8.0)
    ]  # fmt: skip
    cells = [cell_of(method, load) for method in ("ar", "dflash") for load in LOADS]
    plain, drafted = concurrency_curves(pd.DataFrame(rows), cells, known(settings=settings_to_json(LOADS)))
    assert [level.tokens_per_s for level in plain.levels] == [2.75, 11.0]
    assert [level.tokens_per_s for level in drafted.levels] == [11.0, 22.0]
    assert [level.over_plain for level in drafted.levels] == [4.0, 2.0]


def test_goodput_counts_answers_within_the_objective_and_none_beyond() -> None:
    """At 200 ms and 100 ms: one is at both limits, one 5 % later, one 5 % slower, one within, one of a token: in 4 s.

    Another failed after a second, which is a request and takes time.
    """
    (_, load) = LOADS
    rows = [
        loaded("dflash", load, 0.0, 4.0), loaded("dflash", load, 0.0, 4.0, prefill_s=0.21),
        loaded("dflash", load, 0.0, 4.0, decode_s=1.05), loaded("dflash", load, 1.0, 3.0, prefill_s=0.1, decode_s=0.5),
        loaded("dflash", load, 1.0, 1.1, prefill_s=0.1, decode_s=0.0, decode_tokens=0, num_tokens=1),
        loaded("dflash", load, 4.0, 5.0, error="boom", num_tokens=3)
    ]  # fmt: skip
    identity = known(settings=settings_to_json([load]), slo={"ttft_s": 0.2, "tpot_s": 0.1})
    (curve,) = concurrency_curves(pd.DataFrame(rows), [cell_of("dflash", load)], identity)
    goodput, level = curve.levels[0].goodput, curve.levels[0]
    assert goodput is not None and (goodput.per_s, goodput.share) == (3 / 5, 3 / 6)
    written = data._load_json(curve)["levels"][0]
    assert written["tps_decode"] == pytest.approx({"min": 1 / 0.105, "median": 10.0, "max": 20.0})
    assert (written["tps_total"], written["num_answers"]) == (45 / 4, 5)
    assert (written["ttft_s"]["p50"], written["tpot_s"]["p50"]) == (pytest.approx(0.2), pytest.approx(0.1))
    assert sections._milliseconds(level.ttft_s) == "200.0"


def test_a_point_under_load_has_the_median_answers_time_per_token_and_the_throughput_of_all() -> None:
    """Answers of 10 tokens in 0.5, 1.0 and 2.0 s, all within 4 s; one of a single token says nothing of its pace."""
    (_, load) = LOADS
    rows = [loaded("dflash", load, 0.0, 4.0, decode_s=seconds) for seconds in (0.5, 1.0, 2.0)]
    rows.append(loaded("dflash", load, 1.0, 2.0, decode_tokens=0, num_tokens=1, decode_s=0.3))
    identity = known(settings=settings_to_json([load]))
    (point,) = points_of(concurrency_curves(pd.DataFrame(rows), [cell_of("dflash", load)], identity))
    assert (point.concurrency, point.ms_per_token, point.tokens_per_s) == (4, pytest.approx(100.0), 34 / 4)


def test_a_stretch_of_contexts_stands_at_its_geometric_middle() -> None:
    """256 to 1024 is at 512, 4096 to 16384 at 8192: from 2.0 to 0.5 times it crosses 1 halfway, at 2048."""
    cells = [
        replace(
            cell_of("dflash", LOADS[0]), slice=name, figures={"speedup.decode": Interval(value, value, value)}
        ) for name, value in (("4096-16384", 0.5), ("256-1024", 2.0))
    ]  # fmt: skip
    (curve,) = context_curves(cells)
    assert [cell.slice for cell in curve.cells] == ["256-1024", "4096-16384"]
    assert curve.crossing is not None and curve.crossing.value == pytest.approx(2048)


# How good a draft is.


def test_confidence_is_held_to_the_tokens_that_a_round_came_to() -> None:
    """The first of 4 positions accepts 2 tokens, the third 1: six tokens were tested, three of them are right."""
    scores = np.array([[0.9, 1.0], [0.6, 0.4], [0.95, 0.25], [0.15, 0.5]])
    twos = np.array([2, 2])
    answer = StoredAnswer(
        "p", 4, 0.1, twos, np.array([2, 0]), twos, 0.01, 0.05, 0.08, positions=np.array([2, 0, 1, 0]), scores=scores
    )
    found = calibration(ReplayCell("gsm8k", "dflash", Settings(), (answer,), {}))
    assert found is not None
    # 0.1, 0, 0.6, 0.05, 0.25 and 0.15 off.
    assert found.brier == pytest.approx(0.4575 / 6) and found.brier_of_share == pytest.approx(0.25)
    assert [(one.low, one.high, one.num_tokens, one.confidence, one.accepted) for one in found.bins] == [
        (0.1, 0.2, 1, 0.15, 0.0), (0.2, 0.3, 1, 0.25, 0.0), (0.6, 0.7, 1, 0.6, 0.0),
        (0.9, 1.0, 3, pytest.approx(0.95), 1.0)
    ]  # fmt: skip
    cuts = {cut.threshold: (cut.length, cut.verified, cut.saved, cut.more_rounds) for cut in found.cuts}
    assert cuts[0.0] == (2.0, 2.0, 0.0, 0.0)  # two rounds, of positions 1 and 4, verify two tokens each
    assert cuts[0.5] == (2.0, 1.0, 0.5, 0.0)  # that of position 4 verifies nothing
    assert cuts[0.95] == pytest.approx((4 / 3, 1 / 3, 0.75, 0.5))  # positions 1, 2 and 3, of which one is accepted


def test_headroom_looks_where_a_round_first_was_wrong() -> None:
    """At the first wrong token that was verified: rank 4, 5, 17, 16, and one unknown; one answer has no ranks."""
    own = [row for row in ROWS if row.method == "dflash" and row.generation.accepted]
    missed = answered(
        "dflash", "e", (0,), (1,), drafted=(2,), num_prompt_tokens=9, prefill_s=0.1, decode_s=0.1, ranks=(0, 1)
    )
    for last, is_least in ((missed, False), (replace(missed, measured={"ranks": (0, -1)}), True)):
        rows = [*own, last]
        batch = parts.to_table(rows, {}).combine_chunks().to_batches()[0]
        stored = SimpleNamespace(settings=[missed.settings], batches=lambda _: [(batch, np.zeros(len(rows), int))])  # noqa: B023
        run = SimpleNamespace(info=SimpleNamespace(identity=SimpleNamespace(entry=lambda name: 32)), stored=stored)
        (found,) = headroom_of(run, summarise(frame_of(ROWS), known()))  # type: ignore[arg-type]
        assert found.found == ((4, 1 / 5), (16, 3 / 5), (32, 4 / 5))
        assert (found.num_candidates, found.num_absent, found.is_least) == (32, 1, is_least)
