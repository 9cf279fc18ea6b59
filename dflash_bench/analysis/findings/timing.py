"""Findings about times: slow starts, drift, machines that differ, rounds slower than their forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_bench.analysis import metrics, roofline, stats
from dflash_bench.analysis.cells import seconds_per_token, without_errors
from dflash_bench.analysis.findings.base import CellContext, Observation, place_of
from dflash_bench.analysis.metrics import prompt_sums
from dflash_bench.analysis.roofline import SLOW_PLAIN
from dflash_bench.core.forwards import Rates, Size
from dflash_bench.core.methods import is_probe
from dflash_bench.core.types import NOT_COVERED, SHARED_WEIGHTS
from dflash_bench.results.row_arrays import numbered

SLOW_FIRST = 1.5
DRIFT = 0.10
MIN_ANSWERS_OVER_TIME = 8
"""With fewer answers neither the first answer nor the first and last quarter are informative."""


def first_is_slow(context: CellContext) -> Observation | None:
    if not context.is_first_suite:
        return None
    steps = _seconds_per_step(context.succeeded.sort_values("order", kind="stable"))
    known = steps[~np.isnan(steps)]
    if len(known) < MIN_ANSWERS_OVER_TIME or not steps[0] > SLOW_FIRST * np.median(known):
        return None
    return context.observe("slow_first", step_s=float(steps[0]), over_median=float(steps[0] / np.median(known)))


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
    times = float(steps[worst] / np.median(steps[known]))
    counts = {"over_median": times, **context.tally(over_time[slow])}
    return context.observe("outliers", **counts, **place_of(over_time.iloc[worst]))


def _seconds_per_step(good: Any) -> Any:
    """Return seconds per round, since acceptance differs by prompt; per token if the backend hides rounds."""
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
    first = seconds_per_token(over_time.iloc[:quarter])
    last = seconds_per_token(over_time.iloc[-quarter:])
    if not first or not last or abs(last / first - 1) <= DRIFT:
        return None
    return context.observe_suite("drift", first_s_per_token=first, last_s_per_token=last)


# The machine: workers that disturb each other, too little memory for a second copy of the target, a slow forward.


def shared_machine(context: CellContext) -> Observation | None:
    number = context.identity.workers.on_one_machine if context.identity.workers else 1
    if not context.is_baseline or number < 2:
        return None
    return context.observe_suite("shared_machine", num_workers=number)


def unlike_machines(context: CellContext) -> Observation | None:
    kinds = context.identity.workers.kinds if context.identity.workers else []
    if not context.is_baseline or len(kinds) < 2:
        return None
    return context.observe_suite("unlike_machines", num_kinds=len(kinds), machines=list(kinds))


def shared_weights(context: CellContext) -> Observation | None:
    """Look for a judge that shares the engine's weights."""
    judge = context.identity.judge
    if not context.represents_suite or judge is None or judge.weights != SHARED_WEIGHTS:
        return None
    return context.observe_suite("shared_weights")


def fallback(context: CellContext) -> Observation | None:
    """Look for a target computed by slower code than ours, though ours may cover it."""
    reason = context.identity.fallback
    if not context.represents_suite or not reason:
        return None
    return context.observe_suite("fallback", "not_covered" if is_uncovered(reason) else "disagrees", reason=reason)


def is_uncovered(fallback: str) -> bool:
    """Return whether our forward does not cover the target, rather than disagrees with its publisher's."""
    return fallback.startswith(NOT_COVERED)


def torch_kernels(context: CellContext) -> Observation | None:
    """Look for a target that torch's kernels had to compute in place of numba's."""
    reason = context.identity.why_torch
    return context.observe_suite("torch_kernels", reason=reason) if context.represents_suite and reason else None


def slow_paths(context: CellContext) -> Observation | None:
    """Look for passes for which a GPU could not use the engine's fastest way."""
    reasons = [f"{part}: {path.why_slow}" for part, path in context.identity.paths.items() if path.why_slow]
    if not context.represents_suite or not reasons:
        return None
    return context.observe_suite("slow_paths", reason="; ".join(reasons))


# A baseline slower than its own forward passes flatters every method.


def slow_plain(context: CellContext) -> Observation | None:
    if not context.is_baseline or context.cell.settings.is_shared:
        return None
    pace = roofline.pace_of(context.info, context.succeeded)
    if pace is None or not pace.exceeds(SLOW_PLAIN):
        return None
    return context.observe_suite("slow_plain", round_s=pace.round_s, pass_s=pace.pass_s)


LAUNCH_BOUND = 0.5
"""Minimum share of a plain pass's time that goes into launching its operations to be reported."""


def launch_bound(context: CellContext) -> Observation | None:
    """Look for plain passes that a GPU spends waiting for launches, which verifying many tokens does not repeat."""
    measured = context.info.forwards if context.info else None
    if not context.is_baseline or measured is None or measured.num_launches is None or measured.launch_s is None:
        return None
    pass_s, launching_s = measured.seconds.get("1"), measured.num_launches * measured.launch_s
    if pass_s is None or launching_s < LAUNCH_BOUND * pass_s:
        return None
    size, rates = Size.read(measured.size.to_json()), Rates(measured.bandwidth, measured.products)
    floor_s = roofline.least_s(roofline.work(size, measured.rows, 1, measured.context), rates)
    return context.observe_suite(
        "launch_bound",
        num_launches=measured.num_launches,
        share=min(1.0, launching_s / pass_s),
        pass_s=pass_s,
        floor_s=floor_s,
    )


def clock_doubt(context: CellContext) -> Observation | None:
    """Look for answers on a GPU whose times the runner's clock contradicts, though their counts agree."""
    doubts = context.succeeded["clock_doubt"].dropna()
    if doubts.empty:
        return None
    counts = context.tally(context.succeeded.loc[doubts.index])
    return context.observe("clock_doubt", **counts, reason=str(doubts.iloc[0]))


HIDDEN_S, HIDDEN_SHARE = 1e-3, 0.05
"""Tolerance for a call beyond its answer's times and the excess of plain calls: seconds, and a share of these times."""
HIDDEN_OFTEN = 0.75
"""Share of calls that must take longer: a busy machine lengthens some, and hidden work all."""
MIN_CALLS = 5


def hidden_time(context: CellContext) -> Observation | None:
    """Look for calls that work outside their answers' times, by the runner's clock, more than plain calls do."""
    is_served = context.identity.engine == "server"
    if context.is_baseline or is_probe(context.cell.method) or is_served or context.cell.settings.is_shared:
        return None
    own, plain = context.succeeded, context.succeeded_plain
    if min(len(own), len(plain)) < MIN_CALLS or len(more_s := _beside_plain(own, plain)) < MIN_CALLS:
        return None
    took_s = float((own["prefill_s"] + own["decode_s"]).median())
    if np.quantile(more_s, 1 - HIDDEN_OFTEN) <= HIDDEN_S + HIDDEN_SHARE * took_s:
        return None
    return context.observe("hidden_time", num_answers=len(more_s), more_s=float(np.median(more_s)), took_s=took_s)


def _beside_plain(own: Any, plain: Any) -> Any:
    """Return the seconds of each call in `own` outside its answer's time, minus those of the plain call for the same
    question. Unknown differences are left out."""
    import pandas as pd

    columns = [*QUESTION, "clock_s", "prefill_s", "decode_s"]
    both = pd.concat([own[columns], plain[columns]])
    beside_s = (both["clock_s"] - both["prefill_s"] - both["decode_s"]).to_numpy()
    question, num = numbered(both, QUESTION), len(own)
    plain_s = np.full(len(both), np.nan)
    plain_s[question[num:]] = beside_s[num:]
    more_s = beside_s[:num] - plain_s[question[:num]]
    return more_s[~np.isnan(more_s)]


# Finding about answers that repeat themselves: they are easy to draft, and their speed-up holds for no other text.


LEAST_SHARE = 0.02
"""Share of a suite's tokens in looping answers below which metrics are hardly affected."""
SHOWN = ("al.pooled", "speedup.decode")
QUESTION = ["prompt_id", "turn", "repeat"]


def loops(context: CellContext) -> Observation | None:
    """Observe a suite with each method's metrics, with and without the questions whose answer loops by any method."""
    if not context.represents_suite or not context.run["is_loop"].any():
        return None
    here = without_errors(_of_suite(context))
    looping = here["is_loop"].to_numpy(dtype=bool)
    if not looping.any() or here["num_tokens"][looping].sum() < LEAST_SHARE * here["num_tokens"].sum():
        return None
    prompts = list(dict.fromkeys(here["prompt_id"][looping].astype(str)))
    return context.observe_suite(
        "loops", num_answers=int(looping.sum()), num_all=len(here), prompts=prompts, methods=_of_methods(here, looping)
    )


def _of_suite(context: CellContext) -> Any:
    """Return the rows of all methods under the same settings."""
    names = ("suite", "slice", "settings_id")
    return context.run[np.logical_and.reduce([context.run[name] == getattr(context.cell.key, name) for name in names])]


def _of_methods(here: Any, looping: Any) -> dict[str, dict[str, Any]]:
    """Return each method's number of looping answers, and its metrics with and without their questions."""
    question = here.groupby(QUESTION, observed=True, sort=False).ngroup().to_numpy()
    kept = here[~np.isin(question, question[looping])]
    before, after = (_values(rows) for rows in (here, kept))
    methods = here["method"].astype(str).to_numpy()
    return {
        method: {
            "num_answers": int(looping[methods == method].sum()),
            "num_all": int((methods == method).sum()),
            "metrics": {
                name: {"all": value, "without": without}
                for name, value in values.items()
                if np.isfinite(value) and np.isfinite(without := after.get(method, {}).get(name, np.nan))
            },
        }
        for method, values in before.items()
    }


def _values(rows: Any) -> dict[str, dict[str, float]]:
    """Return the metrics `SHOWN` by method, the baseline first; NaN for missing values."""
    sums = prompt_sums(rows)
    methods = dict.fromkeys([metrics.BASELINE, *sums.index.get_level_values("method").astype(str)])
    by_method = dict(iter(sums.groupby(level="method", observed=True)))
    return {
        method: {
            name: float(
                metrics.statistic_of(metrics.METRICS[name])(by_method[method].to_numpy(dtype=np.float64).sum(axis=0))
            )
            for name in SHOWN
        }
        for method in methods
        if method in by_method
    }
