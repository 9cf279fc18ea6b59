"""What disturbs a run's times: slow starts, drift, machines that differ, rounds slower than their passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.analysis import metrics, roofline, stats
from dflash_bench.analysis.findings.case import Case, Seen, answers
from dflash_bench.analysis.roofline import SLOW_PLAIN
from dflash_bench.core.types import SHARED_WEIGHTS

# What went wrong while the run went on: a slow start, answers held up, a machine that drifts.


SLOW_FIRST = 1.5
DRIFT = 0.10
MIN_ANSWERS_OVER_TIME = 8
"""Fewer say nothing about the first of them, or about the first and last quarter."""


def first_is_slow(case: Case) -> Seen | None:
    if not case.opens_run:
        return None
    steps = _seconds_per_step(case.good.sort_values("order", kind="stable"))
    known = steps[~np.isnan(steps)]
    if len(known) < MIN_ANSWERS_OVER_TIME or not steps[0] > SLOW_FIRST * np.median(known):
        return None
    times = steps[0] / np.median(known)
    text = f"the first answer took {1000 * steps[0]:.3g} ms per step, {times:.1f} times the median"
    remedy = "the warm-up was too short; a higher --repeats gives this answer less weight"
    return case.seen("slow_first", text, remedy, over_median=float(times))


def outliers(case: Case) -> Seen | None:
    # The first of the run has a finding of its own.
    over_time = case.good.sort_values("order", kind="stable").iloc[int(case.opens_run) :]
    steps = _seconds_per_step(over_time)
    known = ~np.isnan(steps)
    if known.sum() < MIN_ANSWERS_OVER_TIME:
        return None
    slow = known & stats.outliers(np.where(known, steps, np.median(steps[known])))
    if not slow.any():
        return None
    worst = int(np.argmax(np.where(slow, steps, 0)))
    times = steps[worst] / np.median(steps[known])
    where = f"prompt {over_time['prompt_id'].iloc[worst]} turn {over_time['turn'].iloc[worst]}"
    text = f"{slow.sum()} of {answers(case.good)} took far longer per step; worst {where}, {times:.1f} times the median"
    remedy = "the numbers include them; keep the machine free of other work and run again"
    counts = {"num_answers": int(slow.sum()), "num_all": len(case.good)}
    return case.seen("outliers", text, remedy, over_median=float(times), **counts)


def _seconds_per_step(good: Any) -> Any:
    """Seconds per round, since prompts differ in tokens per round; per token if the backend hides rounds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        by_round = (good["round_s"] / good["num_rounds"]).to_numpy(dtype=np.float64)
        by_token = (good["decode_s"] / good["decode_tokens"]).to_numpy(dtype=np.float64)
    seconds = np.where(by_round > 0, by_round, by_token)
    return np.where(np.isfinite(seconds), seconds, np.nan)


def drift(case: Case) -> Seen | None:
    if not case.is_first or len(case.good) < MIN_ANSWERS_OVER_TIME:
        return None
    over_time = case.good.sort_values("order", kind="stable")
    quarter = len(over_time) // 4
    first = metrics.seconds_per_token(over_time.iloc[:quarter])
    last = metrics.seconds_per_token(over_time.iloc[-quarter:])
    if not first or not last or abs(last / first - 1) <= DRIFT:
        return None
    change = f"from {1000 * first:.3g} to {1000 * last:.3g} ms per token ({last / first - 1:+.0%})"
    text = f"the machine's speed drifted from the first to the last quarter, {change}"
    remedy = "let the machine cool, stop other work, set --threads, and run again"
    return case.seen_in_suite("drift", text, remedy, first_s_per_token=first, last_s_per_token=last)


# What this machine did to the run: workers that disturbed each other, too little memory for a judge of its own, and a
# target for which the engine's own code would not do.


def shared_machine(case: Case) -> Seen | None:
    number = case.identity.workers.on_one_machine if case.identity.workers else 1
    if not case.is_baseline or number < 2:
        return None
    text = (
        f"{number} workers measured on one machine at the same time and shared its memory and caches: times are longer "
        "than alone, and not equally so for all methods; tokens, acceptance and verdicts are the same"
    )
    remedy = "for speeds leave --workers out, or use one worker a machine"
    return case.seen_in_suite("shared_machine", text, remedy, num_workers=number)


def unlike_machines(case: Case) -> Seen | None:
    kinds = case.identity.workers.kinds if case.identity.workers else []
    if not case.is_baseline or len(kinds) < 2:
        return None
    text = (
        f"workers ran on {len(kinds)} kinds of machines ({'; '.join(kinds)}): times and speeds are a mixture; each "
        "prompt's speed-up compares times of one machine"
    )
    return case.seen_in_suite(
        "unlike_machines", text, "for absolute speeds use machines of one kind", num_kinds=len(kinds)
    )


def shared_weights(case: Case) -> Seen | None:
    """Of the judge with the engine."""
    if not case.is_first or case.identity.judge is None or case.identity.judge.weights != SHARED_WEIGHTS:
        return None
    text = (
        "there was no memory for weights of the judge's own: it read the engine's, which were the same when they "
        "had been loaded, when they had been laid out and when the run ended"
    )
    remedy = "a fault in loading them is not found; free memory, or use a smaller --dtype or model"
    return case.seen_in_suite("shared_weights", text, remedy)


def fallback(case: Case) -> Seen | None:
    reason = case.identity.fallback
    if not case.is_first or not reason:
        return None
    text = f"the target was computed by transformers' code, because the engine's own {reason}"
    remedy = (
        "plain decoding is slower in this way, and speed-ups over it are higher; --engine transformers if wanted so"
    )
    return case.seen_in_suite("fallback", text, remedy, reason=str(reason))


# Is plain decoding as fast as its own forward passes allow? A slow baseline flatters every method.


def slow_plain(case: Case) -> Seen | None:
    if not case.is_baseline or case.cell.settings.is_shared:
        return None
    pace = roofline.pace_of(case.info, case.good)
    if pace is None or pace.ratio <= SLOW_PLAIN:
        return None
    text = (
        "plain decoding is slower than its own forward passes allow: speed-ups are flattered; a round takes "
        f"{1000 * pace.round_s:.3g} ms, and a pass over one token {1000 * pace.pass_s:.3g} ms"
    )
    remedy = "keep the machine free of other work, and run again; if it stays, find out what the rest of a round is"
    return case.seen_in_suite("slow_plain", text, remedy, round_s=pace.round_s, pass_s=pace.pass_s)
