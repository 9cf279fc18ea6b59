"""Compares runs with a baseline, on the prompts that all of them answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dflash_bench.analysis import changes, spread, stats
from dflash_bench.analysis.gate.baselines import ABSOLUTE, Baseline, Limit, Runs, cell_name
from dflash_bench.analysis.gate.outcome import Check
from dflash_bench.analysis.metrics import BASELINE, FIGURES, Cell
from dflash_bench.analysis.spread import METHOD_NOISE, RunNoise
from dflash_bench.analysis.terms import COLUMN
from dflash_bench.errors import UserError
from dflash_bench.results.frame import Results

DEVICE = "device"
"""The kind of difference that is another machine."""
COUNTED = {"exact": ("exact", "compared"), "passed": ("passed", "scored")}


def unlike(runs: Sequence[Results], baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """Notes on what differs. Another machine is not refused: fewer figures are judged then, and a note says so."""
    pairs = [changes.refuse_unlike(baseline.as_results(), run, (*allow, DEVICE)) for run in runs]
    allowed_differences = list(dict.fromkeys(difference for of_run in pairs for difference in of_run))
    other = [difference for difference in allowed_differences if difference.kind == DEVICE]
    notes = [str(difference) for difference in allowed_differences if difference not in other]
    ratios = "only time-free figures and speed-up ratios are judged"
    return [*notes, *(f"the baseline is from another machine: {ratios} ({difference})" for difference in other[:1])]


def thinner(name: str, cells: Runs, baseline: Baseline, allow: Sequence[str]) -> list[str]:
    """A note if runs have fewer prompts than the baseline. Raises UserError if they have fewer than half of them."""
    counts = [
        (cell_name(then[0]), len(changes.on_common_prompts(*then, *cells[key])[0]), then[0].num_prompts)
        for key, then in baseline.cells.items()
        if key in cells
    ]
    fewer = [f"{cell} {number} of {wanted}" for cell, number, wanted in counts if number < wanted]
    more = f" and {len(fewer) - 4} more cells" if len(fewer) > 4 else ""
    few = ", ".join(fewer[:4]) + more
    if any(2 * number < wanted for _, number, wanted in counts) and "prompts" not in allow:
        raise UserError(f"{name} has too few of the baseline's prompts: {few}; run them all, or --allow prompts")
    return [f"fewer prompts are judged than the baseline has: {few}"] if few else []


def against(
    runs: Sequence[Results], cells: Runs, baseline: Baseline, limits: Mapping[str, Limit], allow: Sequence[str]
) -> list[Check]:
    name = runs[0].name
    missing = [cell_name(of_runs[0]) for key, of_runs in baseline.cells.items() if key not in cells]
    if missing and ("cells" not in allow or len(missing) == len(baseline.cells)):
        raise UserError(
            f"the baseline has cells that {name} does not have: {', '.join(missing)}; --allow cells skips them"
        )
    then = baseline.as_results()
    same_machine = not any(one.kind == DEVICE for run in runs for one in changes.differences(then, run))
    exact = all(run.info["identity"]["dtype"] == "float32" for run in runs)
    kinds = [kind for kind in limits if _is_judged(kind, baseline.with_timings, same_machine)]
    return [
        check
        for key, before in baseline.cells.items()
        if key in cells
        for check in against_cell(
            before, cells[key], kinds, limits, run_names(runs), exact and before[0].settings.greedy
        )
    ]


def run_names(runs: Sequence[Results]) -> list[str]:
    """The names of runs in checks; a single run needs none."""
    return [run.name for run in runs] if len(runs) > 1 else [""]


def _is_judged(kind: str, with_timings: bool, same_machine: bool) -> bool:
    return not FIGURES[kind].is_timing or (with_timings and (same_machine or kind not in ABSOLUTE))


def against_cell(
    before: Sequence[Cell], after: Sequence[Cell], kinds: Sequence[str], limits: Mapping[str, Limit],
    names: Sequence[str], fixed: bool,
) -> Iterator[Check]:  # fmt: skip
    """Checks of one suite, settings and method, with a cell for each run on either side.

    `fixed` says that nothing is random except times.
    """
    sums = np.array(changes.on_common_prompts(*before, *after))
    suite, method, sides = after[0].suite, after[0].method, (sums[: len(before)], sums[len(before) :])
    if not sums.shape[1]:
        raise UserError(f"{suite} {method} shares no prompt with the baseline that both answered equally often")
    for kind in kinds:
        if method == BASELINE and kind not in ("passed", *ABSOLUTE):
            continue
        is_random = FIGURES[kind].is_timing or not fixed
        # Where nothing is random, each run is judged by itself.
        parts = [("", sides[1])] if is_random else [(n, sides[1][at : at + 1]) for at, n in enumerate(names)]
        for run, after_sums in parts:
            place = {
                "suite": suite, "settings_id": after[0].settings.id, "setting": after[0].setting, "method": method,
                "kind": kind, "run": run,
            }  # fmt: skip
            yield from _judged(place, sides[0], after_sums, limits[kind], is_random)


def _judged(place: Mapping[str, Any], before: Any, after: Any, limit: Limit, is_random: bool) -> Iterator[Check]:
    kind = place["kind"]
    expected, actual = value(kind, before), value(kind, after)
    if expected is None:
        return
    if actual is None:
        raise UserError(f"{place['suite']} {place['method']} has no {kind}, but the baseline has one")
    # The small term lets a fall of exactly the tolerance pass in spite of rounding.
    short = actual < expected * (1 - limit.fall) - 1e-12
    random = _random(kind, before, after, limit) if is_random else {}
    yield Check(
        **place, found=actual, expected=expected, tolerance=limit.fall, failed=short,
        code="below_baseline" if short else "", reason="below the baseline" if short else "", **random,
    )  # fmt: skip


def value(kind: str, runs: Any) -> float | None:
    """A figure over runs, [runs, prompts, terms]: for timings the geometric mean over runs, else from pooled counts."""
    statistic = FIGURES[kind].statistic
    over = spread.value(runs, statistic) if FIGURES[kind].is_timing else float(statistic(runs.sum(axis=(0, 1))))
    return over if np.isfinite(over) else None


def _random(kind: str, before: Any, after: Any, limit: Limit) -> dict[str, Any]:
    """The probability of so large a difference by chance, and the noise between runs that it allows for."""
    if kind in COUNTED:
        tallies = [side[..., COLUMN[kind]] for side in (before, after)]
        # Differences of the means over runs, multiplied by both numbers of runs to stay whole numbers.
        differences = tallies[1].sum(axis=0) * len(before) - tallies[0].sum(axis=0) * len(after)
        return {"p": stats.mcnemar(int((differences < 0).sum()), int((differences > 0).sum()))}
    statistic, noise = FIGURES[kind].statistic, None
    if FIGURES[kind].is_timing:
        noise = spread.run_noise([before, after], statistic, allowed(kind), limit.run_noise)
    difference = spread.difference(after, before, statistic, noise)
    # With a few prompts nothing can be proven, so p is 1, and a note says so.
    return {"p": 1.0 if difference is None else difference.p} | of_noise(noise)


def allowed(kind: str) -> float:
    """The noise between runs assumed for a figure; a ratio has the noise of two methods."""
    return METHOD_NOISE if kind in ABSOLUTE else METHOD_NOISE * 2**0.5


def of_noise(noise: RunNoise | None) -> dict[str, Any]:
    return {"run_noise": noise.sd, "run_noise_source": noise.source} if noise else {}
