"""Finding about answers that repeat themselves: they are easy to draft, and their speed-up holds for no other text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dflash_bench.analysis import metrics
from dflash_bench.analysis.findings.base import CellContext, Observation
from dflash_bench.analysis.metrics import prompt_sums

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
