"""The sections of a run's report, each built once. `render` shows them in every form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dflash_bench.analysis.cells import Cell
from dflash_bench.analysis.concurrency import LEAST, Crossing, Curve, Level, Ranges, by_context, context_curves
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweep import LENGTH, SPEEDUP, Point, Sweep, SweepCurve
from dflash_bench.core import labels
from dflash_bench.core.measurement import measurements
from dflash_bench.core.methods import Value, shown
from dflash_bench.core.types import context_name
from dflash_bench.report import columns, perf
from dflash_bench.report.columns import RESULTS, ROUNDS
from dflash_bench.report.document import Document
from dflash_bench.report.findings import Finding
from dflash_bench.report.tables import (
    Badge,
    Column,
    Entry,
    ListItem,
    ReportTable,
    Section,
    TableRow,
    number,
    with_interval,
)
from dflash_bench.results.rounds import edges_of
from dflash_bench.results.run_info import RunInfo

WRONG = tuple(
    """
    mismatch plain_drafts failed no_baseline lossy imposed near_tie nothing_drafted dead_draft unknown_text slower
    """.split()
)
"""Findings that a reader must not miss; all others are about weak numbers."""


ONLY_IN_FULL = ("rounds", "width_curve", "formulas")
"""Sections that a terminal shows only in the full report."""


def of_document(document: Document) -> list[Section]:
    """Return the sections of a run's report in order, or the reason if all answers failed."""
    if document.why_empty:
        return [Section("empty", sentences=[f"{document.why_empty}."]), findings(document.findings)]
    info = document.results.info
    return [
        *of_cells(document.cells, document.findings),
        Section("width_curve", sentences=perf.sentences(info)),
        *concurrency(document.loads),
        *contexts(document.cells),
        *sweeps(document.sweeps, info),
        *(section for one in measurements() for section in one.sections(document)),
        findings(document.findings),
    ]


def of_cells(cells: Sequence[Cell], findings: Sequence[Finding]) -> list[Section]:
    """Return the two tables that every run has."""
    return [
        Section(
            "results",
            table=columns.main_table(cells, RESULTS, findings),
            legend=[*columns.legend(cells, findings), *columns.notes(cells)],
        ),
        Section("rounds", "Time per round", columns.main_table(cells, ROUNDS, findings), columns.counted(cells)),
    ]


def findings(several: Sequence[Finding]) -> Section:
    items = [ListItem(one.text, one.remedy, one.kind, one.kind in WRONG) for one in several]
    return Section("findings", "Findings", items=tuple(items))


def formulas() -> Section:
    return Section("formulas", "Formulas", terms=columns.formulas(*RESULTS, *ROUNDS))


# Several answers at a time: a table by concurrency, and up to which speculation pays.


LOAD_COLUMNS = (
    Column("num_answers", "answers"),
    Column("tps.total", "tps.total"),
    Column("over_plain", "/ plain"),
    Column("tps.decode", "tps.decode", is_spare=True),
    Column("ttft_ms", "ttft ms", is_spare=True),
    Column("tpot_ms", "tpot ms", is_spare=True),
    Column("speedup.decode", "speedup.decode [95 %]"),
)
LOAD_LEGEND = (
    "tps.total = tokens of all answers per second, in which any was being decoded; tps.decode = of single answers, the "
    "slowest/median/fastest; ttft = from having a place to the first token, tpot = per token after it: "
    f"p50/p90/p99, of which p90 is shown from {LEAST[90]} answers on, p99 from {LEAST[99]}; goodput = answers within "
    "--slo per second of the method's own time, and their share of all."
)


def concurrency(loads: Sequence[Curve]) -> list[Section]:
    """Return the table by concurrency, with goodput for a run with an objective; empty for single answers."""
    if not loads:
        return []
    levels = [level for load in loads for level in load.levels]
    is_open, has_goodput = any(level.rate for level in levels), any(level.goodput for level in levels)
    level = Column("rate", "rate /s", "left") if is_open else Column("concurrency", "concurrency", "left")
    goodput = [Column("goodput", "goodput /s")] if has_goodput else []
    rows = []
    for load in loads:
        rates = labels.number_words(level.rate for level in load.levels if level.rate is not None)
        group = f"{load.label} · {shown(load.method)}"
        rows += [
            TableRow([*_level(level, rates), *([_goodput(level)] if has_goodput else [])], group, load.key)
            for level in load.levels
        ]
    table = ReportTable([level, *LOAD_COLUMNS, *goodput], rows, "suite · method")
    return [Section("concurrency", "Concurrency", table, [LOAD_LEGEND], crossings(loads))]


def _level(level: Level, rates: Mapping[float, str]) -> list[Any]:
    return [
        str(level.concurrency) if level.rate is None else rates[level.rate],
        level.num_answers,
        number(level.tokens_per_s, 1),
        "" if level.over_plain is None else level.over_plain,
        "/".join(number(speed, 1) for speed in (level.slowest, level.median, level.fastest)),
        _milliseconds(level.ttft_s),
        _milliseconds(level.tpot_s),
        level.speedup or "",
    ]


def _goodput(level: Level) -> str:
    return "" if level.goodput is None else f"{number(level.goodput.per_s)} ({level.goodput.share:.0%})"


def _milliseconds(percentiles: Mapping[int, float | None]) -> str:
    """Return the percentiles for which there are enough answers."""
    return "/".join(number(1000 * seconds, 1) for seconds in percentiles.values() if seconds is not None)


def crossings(loads: Sequence[Curve]) -> list[str]:
    """Return the concurrency up to which each method pays, on each suite."""
    return [
        f"{load.method} on {load.label} {_pays_at(load.levels, load.crossing)}."
        for load in loads
        if load.method != BASELINE and load.levels[-1].rate is None
    ]


def _pays_at(levels: Sequence[Level], crossing: Crossing | None) -> str:
    unknown = [str(level.concurrency) for level in levels if level.speedup is None]
    if unknown:
        return f"has no speed-up at a concurrency of {' and '.join(unknown)}, so where it pays is not known"
    return _pays(crossing, (levels[0].concurrency, levels[-1].concurrency), levels[-1].speedup)


def paying_contexts(cells: Sequence[Cell]) -> list[Section]:
    """Return the context up to which each method pays, from cells sliced by it."""
    said = []
    for curve in context_curves(cells):
        first, last = curve.cells[0], curve.cells[-1]
        ends = edges_of(first.slice)[0], edges_of(last.slice)[1]
        pays = _pays(curve.crossing, ends, last.figures[SPEEDUP], CONTEXT)
        said.append(f"{curve.method} on {curve.label} {pays}.")
    return [Section("paying_contexts", sentences=said)] if said else []


class GrowingLoad(NamedTuple):
    """The words for a load that grows until a draft stops paying."""

    name: str
    unit: str = ""
    digits: int = 1


CONCURRENCY, CONTEXT = GrowingLoad("concurrency"), GrowingLoad("context", " tokens", 0)


def _pays(
    crossing: Crossing | None, ends: tuple[int, int], at_last: Interval | None, load: GrowingLoad = CONCURRENCY
) -> str:
    """Return where a draft pays; `ends` are the least and the greatest load, `at_last` the speed-up at the latter."""
    name, unit, digits = load
    first, last = (f"{end:,}{unit}" for end in ends)
    if crossing is None:
        return f"has too few answers, or levels, to say up to which {name} it pays"
    if not crossing.maybe:
        return f"does not pay at any {name} from {first} up"
    if not crossing.surely:
        return f"is not shown to pay at any {name} from {first} to {last}; at {last} it is {with_interval(at_last)}"
    if len(crossing.pays) != 1 or crossing.pays[0][0] is not None:
        return f"pays {_ranges(crossing.pays, load)}; at {last} it is {with_interval(at_last)}"
    if crossing.surely == ((None, None),):
        return f"pays at every {name} measured, up to {last} ({with_interval(at_last)})"
    if crossing.value is None:
        return f"pays {_ranges(crossing.surely, load)} at least; at {last} it is {with_interval(at_last)}"
    low = number(crossing.low, digits)
    high = f"more than {ends[1]}" if crossing.high is None else number(crossing.high, digits)
    return f"stops paying at a {name} of about {number(crossing.value, digits)}{unit} [{low}, {high}]"


def _ranges(pays: Ranges, load: GrowingLoad) -> str:
    """Return `from a concurrency of about 2.3 on`, `up to a concurrency of about 2.0 and from about 8.0 on`."""
    said: list[str] = []
    for low, high in pays:
        of = f" a {load.name} of" if not said else ""
        start, end = (None if place is None else f"{number(place, load.digits)}{load.unit}" for place in (low, high))
        if start is None:
            said.append(f"up to{of} about {end}")
        else:
            said.append(f"from{of} about {start} {'on' if end is None else f'to {end}'}")
    return " and ".join(said)


# Sweeps: a table by the values of each option, and which value was the best on this engine and machine.


BEST = Badge("*", "best", f"highest {SPEEDUP}")
RIVAL = Badge("~", "as good", "not distinguishable from it")
SWEEP_LEGEND = (
    f"{BEST.mark} = {BEST.meaning}; {RIVAL.mark} = {RIVAL.meaning}: on the same prompts, the interval of their ratio "
    "contains 1, or p >= 0.05 (Holm, over all pairs)."
)


def sweeps(several: Sequence[Sweep], info: RunInfo) -> list[Section]:
    """Return a section for each option; the last section also explains the marks and names the best values."""
    made = [Section("sweep", f"Sweep over {option_name(sweep)}", _sweep_table(sweep)) for sweep in several]
    if made:
        made[-1] = replace(made[-1], legend=[SWEEP_LEGEND], sentences=best_values(several, info))
    return made


def best_values(sweeps: Sequence[Sweep], info: RunInfo) -> list[str]:
    """Return a sentence for each swept method, and one on the engine and machine that this holds for."""
    sentences = [_best_value(sweep, curve) for sweep in sweeps for curve in sweep.summaries]
    return [*sentences, f"This holds for {engine(info)}. On a faster or slower engine another value may be the best."]


def engine(info: RunInfo) -> str:
    """Name the engine and machine that the best value holds for: `this engine (local, ...) and this machine (...)`."""
    identity, env = info.identity, info.environment
    packages = env.packages
    software = [f"{name} {packages[name]}" for name in ("transformers", "torch") if packages.get(name)]
    threads = identity.threads
    types = [identity.dtype, *([identity.quantize] if identity.quantize else [])]
    how = [str(identity.device or "cpu"), *types, *([f"threads {threads}"] if threads else [])]
    machine = env.one_line().partition(";")[0]
    return f"this engine ({', '.join([identity.engine or 'local', *software, *how])}) and this machine ({machine})"


def option_name(sweep: Sweep) -> str:
    return f"{sweep.option} ({sweep.unit})" if sweep.unit else sweep.option


def value_texts(option: str, values: Iterable[Value]) -> dict[Value, str]:
    """Return the values of a swept option in words, no two alike."""
    several = list(dict.fromkeys(values))
    numbers = labels.number_words(value for value in several if isinstance(value, float))
    return {
        value: numbers[value]
        if isinstance(value, float)
        else context_name(value)
        if option == "context" and isinstance(value, int)
        else str(value)
        for value in several
    }


def _texts_of(option: str, curve: SweepCurve) -> list[str]:
    words = value_texts(option, (point.value for point in curve.points))
    return [words[point.value] for point in curve.points]


def _suites_of(curve: SweepCurve) -> str:
    return curve.suites[0] if len(curve.suites) == 1 else f"geometric mean over {len(curve.suites)} suites"


def _sweep_table(sweep: Sweep) -> ReportTable:
    has_several = len(sweep.summaries) > 1
    rows = []
    for curve in sweep.curves:
        group = f"{_suites_of(curve)} · {curve.series}" if has_several else _suites_of(curve)
        texts = _texts_of(sweep.option, curve)
        rows += [TableRow(_point(texts[at], curve, at, point), group) for at, point in enumerate(curve.points)]
    columns = [
        Column(sweep.option, sweep.option, "left"),
        Column("num_prompts", "prompts"),
        Column(LENGTH, f"{LENGTH} [95 %]"),
        Column(SPEEDUP, f"{SPEEDUP} [95 %]", "left"),
        Column("best_over_this", "best / this [95 %]"),
    ]
    return ReportTable(columns, rows, "suite · method" if has_several else "suite")


def _point(text: str, curve: SweepCurve, at: int, point: Point) -> list[Any]:
    badges = [BEST] if at == curve.best else [RIVAL] if at in curve.rivals else []
    ratio = curve.over[at].ratio if at in curve.over else ""
    return [text, point.num_prompts, point.length, Entry(point.speedup, badges=badges), ratio]


def _best_value(sweep: Sweep, curve: SweepCurve) -> str:
    if curve.best is None:
        return f"{curve.series}: no speed-up over plain decoding is known, so no {sweep.option} can be called the best."
    best = curve.points[curve.best]
    assert best.speedup is not None
    texts = _texts_of(sweep.option, curve)
    parts = [
        f"{curve.series}: {SPEEDUP} is highest at {sweep.option} {texts[curve.best]}, "
        f"{with_interval(best.speedup)} ({_suites_of(curve)})"
    ]
    rivals = [texts[at] for at in curve.rivals]
    if len(rivals) == 1:
        parts.append(f"{texts[curve.best]} and {rivals[0]} are not distinguishable")
    elif rivals:
        parts.append(f"it is not distinguishable from {_and(rivals)}")
    slower = [
        f"{texts[at]} ({number(change.ratio.value)}x)" for at, change in curve.over.items() if at not in curve.rivals
    ]
    if slower:
        parts.append(f"it is faster than {_and(slower)}")
    if best.speedup.low is None or best.speedup.low <= 1:
        parts.append("it has no measurable speed-up over plain decoding")
    return "; ".join(parts) + "."


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


# The effect of a longer context on each method: a table by suite, method and context.


CONTEXT_LEGEND = (
    "Prompt tokens: mean, with what stands before the prompt; draft prefill: the draft reads the prompt, once per "
    "answer; plain step: a token of plain decoding; below break_even_al speculation loses."
)
CONTEXT_COLUMNS = (
    Column("context", "context", "left"),
    Column("prompt_tokens", "prompt\ntokens", digits=0, has_interval=False),
    Column("num_prompts", "prompts"),
    Column("al.pooled", "al.\npooled [95 %]"),
    Column("break_even_al", "break_even_al", has_interval=False),
    Column("draft_prefill_ms", "draft\nprefill ms", has_interval=False),
    Column("draft_ms", "draft\nms", has_interval=False),
    Column("verify_ms", "verify\nms", has_interval=False),
    Column("plain_ms", "plain\nstep ms", has_interval=False),
    Column("speedup.decode", "speedup.\ndecode [95 %]"),
)


def contexts(cells: Sequence[Cell]) -> list[Section]:
    """Return the table by context; empty for a run with a single context."""
    rows = [
        TableRow(
            [
                context_name(cell.settings.context),
                *(columns.value_of(column.id, cell) for column in CONTEXT_COLUMNS[1:]),
            ],
            f"{curve.label} · {shown(curve.method)}",
            cell.key,
        )
        for curve in by_context(cells)
        for cell in curve.cells
    ]
    table = ReportTable(CONTEXT_COLUMNS, rows, "suite · method")
    return [Section("contexts", "By context", table, [CONTEXT_LEGEND])] if rows else []
