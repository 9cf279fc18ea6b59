"""Changes between two runs or two methods: the verdict in sentences, and the tables below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.comparable import Agreement
from dflash_bench.analysis.compare import EQUAL, JUDGED_BY, MIN_EFFECT, Comparison, over_suites, verdict
from dflash_bench.analysis.metrics import METRICS
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.methods import is_lossy, shown
from dflash_bench.report import charts
from dflash_bench.report.tables import ABSENT, ReportTable, Section, Value, number, p_value, with_interval

# The verdict, above everything else.


MOST_SENTENCES = 8


class ChangeSentence(NamedTuple):
    kind: Literal["worse", "better", "rest"]
    text: str


def verdicts(comparisons: Sequence[Comparison]) -> list[ChangeSentence]:
    """Return a sentence for each change for the better or worse, worst first, and one on the other comparisons."""
    found: dict[str, list[str]] = {"worse": [], "better": [], "unclear": [], "same": []}
    for versus in comparisons:
        where = " ".join(filter(None, [_place(versus), versus.key.slice]))
        name = next((name for name in JUDGED_BY if name in versus.changes), None)
        if name is not None:
            change = versus.changes[name]
            kind = verdict(name, change)
            found.setdefault(kind, []).append(_change(kind, name, versus, where, change.ratio))
        if (kind := versus.passed_verdict) in ("worse", "better"):
            found[kind].append(_change(kind, "accuracy", versus, where, f"{points(versus.passed)} points"))
    told = [
        *(ChangeSentence("worse", text) for text in found.pop("worse")),
        *(ChangeSentence("better", text) for text in found.pop("better")),
    ]
    rest = [f"and {len(told) - MOST_SENTENCES} more, below"] if len(told) > MOST_SENTENCES else []
    counts = {kind: len(texts) for kind, texts in found.items() if texts}
    words = ", ".join(f"{number:,} {REST[kind]}" for kind, number in counts.items())
    if told and counts:
        rest.append(f"Other comparisons: {words}")
    elif {*counts} == {"unknown"}:
        most = max(versus.num_prompts for versus in comparisons)
        rest.append(f"Too few prompts to compare (n = {most:,})")
    elif counts:
        rest.append(f"No significant change: {words}")
    return [*told[:MOST_SENTENCES], *(ChangeSentence("rest", text) for text in rest)]


REST = {"unclear": "inconclusive", "same": "the same", "unknown": "with too few prompts"}
"""Comparisons that show no change, in words."""


def _change(kind: str, name: str, versus: Comparison, where: str, change: Interval | str) -> str:
    """Return a change between two runs, or a difference between two methods of one; `change` is in words, or a ratio.

    Between methods, being slower is no fault, so that only a change between runs is called worse.
    """
    size = change if isinstance(change, str) else f"{number(change.value)}x{_within(change)}"
    if versus.key.method:
        verdict = "WORSE" if kind == "worse" else kind
        return f"{verdict}: {where}, {versus.after} against {versus.before}: {name} {size}"
    low, high = ("slower", "faster") if name in TIMINGS else (f"lower in {name}", f"higher in {name}")
    return f"{versus.after} is {high if kind == 'better' else low} than {versus.before} on {where}: {size}"


def _within(ratio: Interval) -> str:
    known = ratio.low is not None and ratio.high is not None and not ratio.is_vague
    return f" [{number(ratio.low)}, {number(ratio.high)}]" if known else ""


# The tables. Time-free metrics stand apart from timings, and ids above every column.


SHOWN = {name: metric.is_timing for name, metric in METRICS.items() if metric.in_comparison}
TIME_FREE = tuple(name for name, is_timing in SHOWN.items() if not is_timing)
TIMINGS = tuple(name for name, is_timing in SHOWN.items() if is_timing)
SHARES = ("exact", "passed")
NO_CHANGE = (
    "better, worse = p < 0.05 (Holm, over all lines), the interval does not contain 1, and the change is at least "
    f"{MIN_EFFECT:.0%}",
    f"same = the whole interval is within {EQUAL:.0%} of 1; unclear = neither",
    "ratios are always over the same prompts",
)


def cell_sections(cells: Sequence[Cell], *, with_means: bool = True) -> list[Section]:
    """Return the metrics of one run, and the geometric mean over its suites."""
    made = [
        Section("time_free", "time-free", _cell_table(cells, TIME_FREE, SHARES)),
        Section("timings", "timings", _cell_table(cells, TIMINGS)),
    ]
    means = over_suites(cells, "speedup.decode") if with_means and not any(cell.slice for cell in cells) else []
    if means:
        title = "speedup.decode, geometric mean over suites"
        rows: list[list[Value]] = [[labels.with_settings(first.method, first.setting), mean] for first, mean in means]
        made.append(Section("means", title, ReportTable.of(["method", "speedup.decode [95 %]"], rows)))
    return made


def _cell_table(cells: Sequence[Cell], ids: Sequence[str], shares: Sequence[str] = ()) -> ReportTable:
    known_ids = [name for name in ids if any(name in cell.figures for cell in cells)]
    rows: list[list[Value]] = [
        [
            cell.method,
            cell.num_prompts,
            *(cell.figures.get(name) for name in known_ids),
            *("lossy" if name == "exact" and is_lossy(cell.method) else getattr(cell, name) for name in shares),
        ]
        for cell in cells
    ]
    spare = ["prompts", *(name for name in known_ids if name not in JUDGED_BY)]
    return ReportTable.of(
        ["method", "prompts", *known_ids, *shares],
        rows,
        keys=[cell.key for cell in cells],
        spare=spare,
        groups=[cell.heading for cell in cells],
    )


def change_sections(comparisons: Sequence[Comparison]) -> list[Section]:
    """Return tables of after / before with a row for each metric, the time-free ones first."""
    pair, headings = _pair(comparisons), headings_of(comparisons)
    made = []
    for title, is_timing in (("time-free", False), ("timings", True)):
        shown = [
            (versus, heading, name, change)
            for versus, heading in zip(comparisons, headings, strict=True)
            for name, change in versus.changes.items()
            if METRICS[name].is_timing == is_timing
        ]
        rows: list[list[Value]] = [
            [name, with_interval(change.ratio, 3), p_value(change.p), verdict(name, change)]
            for *_, name, change in shown
        ]
        if rows:
            table = ReportTable.of(
                ["figure", "ratio [95 %]", "p (Holm)", ""],
                rows,
                keys=[charts.key_of(versus) for versus, *_ in shown],
                spare=["p (Holm)"],
                groups=[heading for _, heading, *_ in shown],
            )
            made.append(Section("changes", f"{title}, {pair or 'after / before'}", table))
    return [*made, *_answered_right(comparisons, headings), Section("legend", sentences=NO_CHANGE)]


def _pair(several: Sequence[Comparison | Agreement]) -> str:
    """Return `after / before` by name if all are of the same two, else an empty text."""
    pairs = {f"{one.after} / {one.before}" for one in several}
    return pairs.pop() if len(pairs) == 1 else ""


def headings_of(comparisons: Sequence[Comparison], *, with_pair: bool = False) -> list[str]:
    """Return headings of comparisons; `with_pair` also names the two runs or methods, if all have the same."""
    is_told = bool(_pair(comparisons)) and not with_pair
    return [
        " · ".join(filter(None, [_place(versus), versus.key.slice]))
        + ("" if is_told else f": {versus.after} / {versus.before}")
        for versus in comparisons
    ]


def _answered_right(comparisons: Sequence[Comparison], headings: Sequence[str]) -> Iterator[Section]:
    """Yield a row wherever answers changed between right and wrong, and a sentence on the others."""
    scored = [(versus, heading) for versus, heading in zip(comparisons, headings, strict=True) if versus.num_scored]
    changed = [(versus, heading) for versus, heading in scored if versus.lost or versus.gained]
    rows: list[list[Value]] = [
        [heading, v.num_scored, v.lost, v.gained, points(v.passed), p_value(v.p_passed), v.passed_verdict]
        for v, heading in changed
    ]
    if rows:
        heads = ["", "scored", "lost", "gained", "points [95 %]", "p (McNemar, Holm)", ""]
        table = ReportTable.of(heads, rows, spare=["scored", "p (McNemar, Holm)"])
        yield Section("answered_right", "prompts answered right", table)
    unchanged = [versus for versus, _ in scored if not (versus.lost or versus.gained or versus.is_exact)]
    if unchanged:
        fewest = min(unchanged, key=lambda versus: versus.num_scored)
        where = f"in {len(unchanged)} {'other ' if changed else ''}comparison{'s' * (len(unchanged) > 1)}"
        yield Section(
            "unchanged",
            sentences=[
                f"{where} the same prompts were answered right; {fewest.num_scored:,} scored prompts do not rule out a "
                f"change of {points(fewest.passed)} points"
            ],
        )


def points(change: Interval | None) -> str:
    """Format a difference of percentages: `-2.5 [-6.1, +1.1]`."""
    if change is None:
        return ABSENT
    if change.low is None or change.high is None:
        return f"{100 * change.value:+.1f} (n = {change.too_few})"
    return f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def _place(one: Comparison | Agreement) -> str:
    suite, method = (one.key.suite, shown(one.key.method)) if isinstance(one, Comparison) else (one.suite, "")
    where = labels.with_settings(labels.suite_label(suite, *one.sources), one.setting)
    return " ".join(filter(None, [where, method]))


def agreement_section(agreements: Sequence[Agreement]) -> Section:
    """Return the agreement of the target's own answers in two runs."""
    is_told = bool(_pair(agreements))
    rows: list[list[Value]] = [
        [
            _place(one) + ("" if is_told else f": {one.after} / {one.before}"),
            (one.num_equal, one.num_answers),
            number(one.in_common, 1),
        ]
        for one in agreements
    ]
    meaning = (
        "equal = token for token; tokens in common = before the first difference, mean over the answers that differ"
    )
    table = ReportTable.of(["suite", "equal", "tokens in common"], rows)
    return Section("agreements", "plain decoding's answers to first turns", table, sentences=[meaning])
