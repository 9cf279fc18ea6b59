"""What `compare` prints, and its JSON. Time-free figures stand apart from timings, and ids above every column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dflash_bench import labels
from dflash_bench.analysis.agreement import Agreement
from dflash_bench.analysis.changes import EQUAL, MIN_EFFECT, Versus, over_suites, verdict
from dflash_bench.analysis.metrics import FIGURES, Cell
from dflash_bench.analysis.stats import Interval
from dflash_bench.methods import is_lossy
from dflash_bench.report.tables import ABSENT, aligned, number, p_value, with_interval

TIME_FREE = ("al.pooled", "al.request_mean", "accept_rate", "forwards_per_token")
TIMINGS = ("tps.decode", "tps.e2e", "speedup.decode", "speedup.decode.geometric", "speedup.e2e")
NO_CHANGE = (
    "better, worse = p < 0.05 (Holm, over all lines), the interval does not contain 1, and the change is at least "
    f"{MIN_EFFECT:.0%}\nsame = the whole interval is within {EQUAL:.0%} of 1; unclear = neither\n"
    "ratios are always over the same prompts"
)


def cells_text(cells: Sequence[Cell], *, with_means: bool = True) -> str:
    """The figures of one run, and the geometric mean over its suites."""
    tallies = [["lossy" if is_lossy(cell.method) else _tally(cell.exact), _tally(cell.passed)] for cell in cells]
    free = _table(cells, TIME_FREE, ("exact", "passed"), tallies)
    timed = _table(cells, TIMINGS)
    means = over_suites(cells, "speedup.decode") if with_means and not any(cell.slice for cell in cells) else {}
    lines = [f"  {method}  {with_interval(mean)}" for method, mean in means.items()]
    over = ["", "speedup.decode, geometric mean over suites [95 %]", *lines] if lines else []
    return "\n".join(["time-free", free, "", "timings", timed, *over])


def _table(
    cells: Sequence[Cell], ids: Sequence[str], more: Sequence[str] = (), extra: Sequence[Sequence[str]] | None = None
) -> str:
    known_ids = [name for name in ids if any(name in cell.figures for cell in cells)]
    is_sliced = any(cell.slice for cell in cells)
    rows = [
        [
            *_place(cell, is_sliced),
            f"{cell.num_prompts:,}",
            *(with_interval(cell.figures.get(name)) for name in known_ids),
            *rest,
        ]
        for cell, rest in zip(cells, extra or [[]] * len(cells), strict=True)
    ]
    names = _names(is_sliced, "method")
    return aligned([*names, "prompts", *known_ids, *more], rows, left=len(names))


def _names(is_sliced: bool, *methods: str) -> list[str]:
    """Heads of the columns that say what a row is about; slices only where there are any."""
    return ["suite", *(["slice"] if is_sliced else []), *methods]


def _place(cell: Cell, is_sliced: bool) -> list[str]:
    return [labels.under(cell.label, cell.setting), *([cell.slice or "-"] if is_sliced else []), cell.method]


def _tally(tally: tuple[int, int] | None) -> str:
    return ABSENT if tally is None else f"{tally[0]}/{tally[1]}"


def versus_text(comparisons: Sequence[Versus]) -> str:
    """After over before: a line for each figure, the time-free ones first."""
    parts = []
    is_sliced = any(versus.slice for versus in comparisons)
    names = _names(is_sliced, "before", "after")
    for title, is_timing in (("time-free, after / before", False), ("timings, after / before", True)):
        rows = [
            [*_sides(versus, is_sliced), name, with_interval(change.ratio, 3), p_value(change.p), verdict(name, change)]
            for versus in comparisons
            for name, change in versus.changes.items()
            if FIGURES[name].is_timing == is_timing
        ]
        if rows:
            heads = [*names, "figure", "ratio [95 %]", "p (Holm)", ""]
            parts += [f"{title}\n{aligned(heads, rows, left=len(names) + 1)}"]
    return "\n\n".join([*parts, *_answered_right(comparisons, is_sliced), NO_CHANGE])


def _answered_right(comparisons: Sequence[Versus], is_sliced: bool) -> list[str]:
    """Did answers get worse? A line where any changed between right and wrong, and what can be said of the others."""
    scored = [versus for versus in comparisons if versus.num_scored]
    changed = [versus for versus in scored if versus.lost or versus.gained]
    names = _names(is_sliced, "before", "after")
    rows = [
        [*_sides(v, is_sliced), f"{v.num_scored:,}", str(v.lost), str(v.gained), points(v.passed), p_value(v.p_passed),
         v.passed_verdict]
        for v in changed
    ]  # fmt: skip
    heads = [*names, "scored", "lost", "gained", "points [95 %]", "p (McNemar, Holm)", ""]
    parts = [f"prompts answered right\n{aligned(heads, rows, left=len(names))}"] if rows else []
    unchanged = [versus for versus in scored if versus not in changed and not versus.is_exact]
    if unchanged:
        fewest = min(unchanged, key=lambda versus: versus.num_scored)
        where = f"in {len(unchanged)} {'other ' if changed else ''}comparison{'s' * (len(unchanged) > 1)}"
        parts.append(
            f"{where} the same prompts were answered right; {fewest.num_scored:,} scored prompts do not rule out a "
            f"change of {points(fewest.passed)} points"
        )
    return parts


def points(change: Interval | None) -> str:
    """`-2.5 [-6.1, +1.1]`: a difference of percentages."""
    if change is None:
        return ABSENT
    if change.low is None or change.high is None:
        return f"{100 * change.value:+.1f} (n = {change.too_few})"
    return f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def _sides(versus: Versus, is_sliced: bool) -> list[str]:
    return [versus.label, *([versus.slice or "-"] if is_sliced else []), versus.before, versus.after]


def agreements_text(agreements: Sequence[Agreement]) -> str:
    """How far the target's own answers are the same in two runs."""
    rows = [
        [one.label, one.before, one.after, f"{one.num_equal}/{one.num_answers}", number(one.in_common, 1)]
        for one in agreements
    ]
    table = aligned(["suite", "before", "after", "equal", "tokens in common"], rows, left=3)
    return (
        f"plain decoding's answers to first turns\n{table}\n\nequal = token for token; tokens in common = before the "
        "first difference, mean over the answers that differ"
    )


def agreements_json(agreements: Sequence[Agreement]) -> list[dict[str, Any]]:
    return [asdict(one) for one in agreements]


def cells_json(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "suite": cell.suite, "source": cell.source or None, "settings_id": cell.settings.id,
            "settings": asdict(cell.settings),
            "slice": cell.slice or None, "method": cell.method,
            "num_prompts": cell.num_prompts, "time_free": _figures(cell, is_timing=False), "exact": cell.exact,
            "passed": cell.passed, "timings": _figures(cell, is_timing=True),
        }
        for cell in cells
    ]  # fmt: skip


def _figures(cell: Cell, *, is_timing: bool) -> dict[str, Any]:
    tallies = ("exact", "passed")
    return {
        name: interval_json(interval)
        for name, interval in cell.figures.items()
        if FIGURES[name].is_timing == is_timing and name not in tallies
    }


def interval_json(interval: Interval) -> list[float | None]:
    return [None if value is None else float(f"{value:.6g}") for value in (interval.value, interval.low, interval.high)]


def versus_json(comparisons: Sequence[Versus]) -> list[dict[str, Any]]:
    return [
        {
            "suite": versus.suite, "settings_id": versus.settings_id, "setting": versus.setting or None,
            "sources": versus.sources,
            "slice": versus.slice or None, "before": versus.before, "after": versus.after,
            "num_prompts": versus.num_prompts, "lost": versus.lost, "gained": versus.gained,
            "num_scored": versus.num_scored, "p_passed": versus.p_passed, "passed_verdict": versus.passed_verdict,
            "passed_change": None if versus.passed is None else interval_json(versus.passed),
            "ratios": {
                name: {"ratio": interval_json(change.ratio), "p": change.p, "verdict": verdict(name, change)}
                for name, change in versus.changes.items()
            },
        }
        for versus in comparisons
    ]  # fmt: skip
