"""Findings about times: slow starts, drift, machines that differ, rounds slower than their forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dflash_bench.analysis import metrics, roofline, stats
from dflash_bench.analysis.findings.base import CellContext, Observation, answers
from dflash_bench.analysis.metrics import prompt_sums
from dflash_bench.analysis.roofline import SLOW_PLAIN
from dflash_bench.core.types import SHARED_WEIGHTS

SLOW_FIRST = 1.5
DRIFT = 0.10
MIN_ANSWERS_OVER_TIME = 8
"""With fewer answers neither the first one nor the first and last quarter say anything."""


def first_is_slow(context: CellContext) -> Observation | None:
    if not context.is_first_suite:
        return None
    steps = _seconds_per_step(context.succeeded.sort_values("order", kind="stable"))
    known = steps[~np.isnan(steps)]
    if len(known) < MIN_ANSWERS_OVER_TIME or not steps[0] > SLOW_FIRST * np.median(known):
        return None
    times = steps[0] / np.median(known)
    text = f"the first answer took {1000 * steps[0]:.3g} ms per step, {times:.1f} times the median"
    remedy = "the warm-up was too short; a higher --repeats gives this answer less weight"
    return context.observe("slow_first", text, remedy, over_median=float(times))


def outliers(context: CellContext) -> Observation | None:
    # The first answer of the run has a finding of its own.
    over_time = context.succeeded.sort_values("order", kind="stable").iloc[int(context.is_first_suite) :]
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
    tally = f"{slow.sum()} of {answers(context.succeeded)}"
    text = f"{tally} took far longer per step; worst {where}, {times:.1f} times the median"
    remedy = "the numbers include them; keep the machine free of other work and run again"
    counts = {"num_answers": int(slow.sum()), "num_all": len(context.succeeded)}
    return context.observe("outliers", text, remedy, over_median=float(times), **counts)


def _seconds_per_step(good: Any) -> Any:
    """Return seconds per round, since prompts differ in tokens per round; per token if the backend hides rounds."""
    with np.errstate(divide="ignore", invalid="ignore"):
        by_round = (good["round_s"] / good["num_rounds"]).to_numpy(dtype=np.float64)
        by_token = (good["decode_s"] / good["decode_tokens"]).to_numpy(dtype=np.float64)
    seconds = np.where(by_round > 0, by_round, by_token)
    return np.where(np.isfinite(seconds), seconds, np.nan)


def drift(context: CellContext) -> Observation | None:
    if not context.represents_suite or len(context.succeeded) < MIN_ANSWERS_OVER_TIME:
        return None
    over_time = context.succeeded.sort_values("order", kind="stable")
    quarter = len(over_time) // 4
    first = metrics.seconds_per_token(over_time.iloc[:quarter])
    last = metrics.seconds_per_token(over_time.iloc[-quarter:])
    if not first or not last or abs(last / first - 1) <= DRIFT:
        return None
    change = f"from {1000 * first:.3g} to {1000 * last:.3g} ms per token ({last / first - 1:+.0%})"
    text = f"the machine's speed drifted from the first to the last quarter, {change}"
    remedy = "let the machine cool, stop other work, set --threads, and run again"
    return context.observe_suite("drift", text, remedy, first_s_per_token=first, last_s_per_token=last)


# The machine: workers that disturb each other, too little memory for a second copy of the target, a slow forward.


def shared_machine(context: CellContext) -> Observation | None:
    number = context.identity.workers.on_one_machine if context.identity.workers else 1
    if not context.is_baseline or number < 2:
        return None
    text = (
        f"{number} workers measured on one machine at the same time and shared its memory and caches: times are longer "
        "than alone, and not equally so for all methods; tokens, acceptance and verdicts are the same"
    )
    remedy = "to measure speed leave --workers out, or use one worker per machine"
    return context.observe_suite("shared_machine", text, remedy, num_workers=number)


def unlike_machines(context: CellContext) -> Observation | None:
    kinds = context.identity.workers.kinds if context.identity.workers else []
    if not context.is_baseline or len(kinds) < 2:
        return None
    text = (
        f"workers ran on {len(kinds)} kinds of machines ({'; '.join(kinds)}): times and speeds are a mixture; each "
        "prompt's speed-up compares times of the same machine"
    )
    return context.observe_suite(
        "unlike_machines", text, "for absolute speeds use machines of one kind", num_kinds=len(kinds)
    )


def shared_weights(context: CellContext) -> Observation | None:
    """Look for a judge that shares the engine's weights."""
    judge = context.identity.judge
    if not context.represents_suite or judge is None or judge.weights != SHARED_WEIGHTS:
        return None
    text = (
        "there was no memory for a second copy of the weights: the judge read the engine's, which were the same after "
        "loading, after packing and when the run ended"
    )
    remedy = "a fault in loading them cannot be found; free memory, or use a smaller --dtype or model"
    return context.observe_suite("shared_weights", text, remedy)


def fallback(context: CellContext) -> Observation | None:
    reason = context.identity.fallback
    what = f"transformers' code, because the engine's own {reason}"
    return _slower_code(context, "fallback", reason, what, "--engine transformers")


def torch_kernels(context: CellContext) -> Observation | None:
    reason = context.identity.why_torch
    what = f"torch, because numba's kernels could not: {reason}"
    return _slower_code(context, "torch_kernels", reason, what, "--kernels torch")


def _slower_code(context: CellContext, kind: str, reason: str | None, what: str, option: str) -> Observation | None:
    """Return what follows if slower code than ours had to compute the target, for this reason."""
    if not context.represents_suite or not reason:
        return None
    remedy = f"plain decoding is slower this way, and speed-ups over it are higher; choose it by {option}"
    return context.observe_suite(kind, f"the target was computed by {what}", remedy, reason=reason)


# A baseline slower than its own forward passes flatters every method.


def slow_plain(context: CellContext) -> Observation | None:
    if not context.is_baseline or context.cell.settings.is_shared:
        return None
    pace = roofline.pace_of(context.info, context.succeeded)
    if pace is None or pace.ratio <= SLOW_PLAIN:
        return None
    text = (
        "plain decoding is slower than its own forward passes allow, which flatters speed-ups; a round takes "
        f"{1000 * pace.round_s:.3g} ms, and a pass over one token {1000 * pace.pass_s:.3g} ms"
    )
    remedy = "keep the machine free of other work and run again; if it stays, find out where the rest of a round goes"
    return context.observe_suite("slow_plain", text, remedy, round_s=pace.round_s, pass_s=pace.pass_s)


# Finding about answers that repeat themselves: they are easy to draft, and their speed-up holds for no other text.


LEAST_SHARE = 0.02
"""Share of a suite's tokens in such answers below which metrics are hardly affected."""
SHOWN = ("al.pooled", "speedup.decode")
MOST_NAMED = 5
QUESTION = ["prompt_id", "turn", "repeat"]


def loops(context: CellContext) -> Observation | None:
    """Observe a suite with each method's metrics, with and without the questions whose answer loops by any method."""
    if not context.represents_suite:
        return None
    here = metrics.without_errors(_of_suite(context))
    looping = here["is_loop"].to_numpy(dtype=bool)
    if not looping.any() or here["num_tokens"][looping].sum() < LEAST_SHARE * here["num_tokens"].sum():
        return None
    prompts = list(dict.fromkeys(here["prompt_id"][looping].astype(str)))
    more = f" and {len(prompts) - MOST_NAMED} more" if len(prompts) > MOST_NAMED else ""
    named = f"prompt{'s' * (len(prompts) > 1)} {', '.join(prompts[:MOST_NAMED])}{more}"
    text = (
        f"answers repeat themselves until the limit cut them ({named}), which is easy to draft: "
        f"{'; '.join(_of_methods(context, here, looping))}"
    )
    remedy = "read these answers, check the chat template, --dtype and --repetition-penalty, and use the other answers"
    counts = {"num_answers": int(looping.sum()), "num_all": len(here)}
    return context.observe_suite("loops", text, remedy, is_own=True, **counts)


def _of_suite(context: CellContext) -> Any:
    """Return the rows of all methods under the same settings."""
    names = ("suite", "slice", "settings_id")
    return context.run[np.logical_and.reduce([context.run[name] == getattr(context.cell.key, name) for name in names])]


def _of_methods(context: CellContext, here: Any, looping: Any) -> Iterator[str]:
    """Yield, say, `dflash 5 of 40, without them al.pooled 2.31 (not 6.10), speedup.decode 1.20 (not 2.90)`."""
    question = here.groupby(QUESTION, observed=True, sort=False).ngroup().to_numpy()
    kept = here[~np.isin(question, question[looping])]
    before, after = (_values(rows) for rows in (here, kept))
    methods = here["method"].astype(str).to_numpy()
    for method, values in before.items():
        own = methods == method
        share = f"{method} {int(looping[own].sum())} of {int(own.sum())}"
        if method == metrics.BASELINE:
            yield share
            continue
        changed = [
            f"{name} {after[method][name]:.2f} (not {value:.2f})"
            for name, value in values.items()
            if np.isfinite(value) and np.isfinite(after.get(method, {}).get(name, np.nan))
        ]
        yield f"{share}, without them {', '.join(changed)}" if changed else f"{share}, and without them nothing is left"


def _values(rows: Any) -> dict[str, dict[str, float]]:
    """Return the metrics `SHOWN` by method, the baseline first; NaN where the rows do not give one."""
    sums = prompt_sums(rows)
    methods = dict.fromkeys([metrics.BASELINE, *sums.index.get_level_values("method").astype(str)])
    by_method = dict(iter(sums.groupby(level="method", observed=True)))
    return {
        method: {
            name: float(metrics.METRICS[name].statistic(by_method[method].to_numpy(dtype=np.float64).sum(axis=0)))
            for name in SHOWN
        }
        for method in methods
        if method in by_method
    }
