"""What went wrong while the run went on: a slow start, answers held up, a machine that drifts."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.analysis import metrics, stats
from dflash_bench.analysis.findings.case import Case, Seen, answers

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
