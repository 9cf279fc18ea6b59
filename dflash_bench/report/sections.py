"""Sections of a report: figures by concurrency, along sweeps, and by length of context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_bench.analysis.concurrency import LEAST, ConcurrencyCurve, Crossing, Level
from dflash_bench.analysis.metrics import BASELINE, Cell
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweep import LENGTH, SPEEDUP, Point, Sweep, SweepCurve
from dflash_bench.core import labels
from dflash_bench.core.methods import Value
from dflash_bench.core.types import CellKey, context_name
from dflash_bench.report.tables import aligned, markdown, number, with_interval
from dflash_bench.results.identity import short_names
from dflash_bench.results.run_info import RunInfo

# Several answers at a time in words: a table by concurrency, and up to where speculation pays.


LOAD_TITLE = "several answers at a time"
LOAD_HEADS = [
    "concurrency", "answers", "tps.total", "/ plain", "tps.decode", "ttft ms", "tpot ms", "speedup.decode [95 %]",
]  # fmt: skip
OPEN = "rate /s"
GOODPUT = "goodput /s"
LOAD_LEGEND = (
    "tps.total = tokens of all answers per second, in which any was being decoded; tps.decode = of single answers, the "
    "slowest/median/fastest; ttft = from having a place to the first token, tpot = per token after it: "
    f"p50/p90/p99, of which p90 is told from {LEAST[90]} answers on, p99 from {LEAST[99]}; goodput = answers within "
    "--slo per second of the method's own time, and their share of all."
)


def lines(loads: Sequence[ConcurrencyCurve]) -> Iterator[str]:
    """For a terminal."""
    yield LOAD_TITLE
    yield from aligned(*load_table(loads)).splitlines()


def load_paragraphs(loads: Sequence[ConcurrencyCurve]) -> list[str]:
    """Its paragraphs in Markdown."""
    if not loads:
        return []
    items = "\n".join(f"- {sentence}" for sentence in sentences(loads))
    return ["## Several answers at a time", markdown(*load_table(loads)), LOAD_LEGEND, items]


def load_table(loads: Sequence[ConcurrencyCurve]) -> tuple[list[str], list[list[str]]]:
    """With goodput where the run has an objective."""
    levels = [level for load in loads for level in load.levels]
    is_open, has_goodput = (any(known) for known in zip(*((one.rate, one.goodput) for one in levels), strict=True))
    heads = [OPEN if is_open else LOAD_HEADS[0], *LOAD_HEADS[1:], *([GOODPUT] if has_goodput else [])]
    rows = []
    for load in loads:
        rows.append([f"{labels.under(load.suite, load.setting)} · {load.method}", *[""] * (len(heads) - 1)])
        rates = labels.number_words(level.rate for level in load.levels if level.rate is not None)
        rows += [[*_row(level, rates), *([_goodput(level)] if has_goodput else [])] for level in load.levels]
    return heads, rows


def _goodput(level: Level) -> str:
    return "" if level.goodput is None else f"{number(level.goodput.per_s)} ({level.goodput.share:.0%})"


def _row(level: Level, rates: Mapping[float, str]) -> list[str]:
    return [
        f"  {level.concurrency if level.rate is None else rates[level.rate]}", f"{level.num_answers:,}",
        number(level.tokens_per_s, 1),
        "" if level.over_plain is None else number(level.over_plain),
        "/".join(number(speed, 1) for speed in (level.slowest, level.median, level.fastest)),
        _milliseconds(level.ttft_s), _milliseconds(level.tpot_s), with_interval(level.speedup) if level.speedup else "",
    ]  # fmt: skip


def _milliseconds(percentiles: Any) -> str:
    """Those that can be told."""
    return "/".join(number(1000 * seconds, 1) for seconds in percentiles.values() if seconds is not None)


def sentences(loads: Sequence[ConcurrencyCurve]) -> list[str]:
    """Up to which concurrency each method pays, on each suite."""
    return [
        f"{load.method} on {labels.under(load.suite, load.setting)} {_answer(load.crossing, load.levels)}."
        for load in loads
        if load.method != BASELINE and load.levels[-1].rate is None
    ]


def _answer(crossing: Crossing | None, levels: Sequence[Level]) -> str:
    last = levels[-1]
    if crossing is None:
        return "has too few answers, or levels, to say up to which concurrency it pays"
    if crossing.high is not None and crossing.high <= levels[0].concurrency:
        return f"does not pay at any concurrency from {levels[0].concurrency} up"
    if crossing.low is None:
        return f"pays at every concurrency measured, up to {last.concurrency} ({with_interval(last.speedup)})"
    low = number(crossing.low, 1)
    high = f"more than {last.concurrency}" if crossing.high is None else number(crossing.high, 1)
    if crossing.value is None:
        at_last = f"at {last.concurrency} it is {with_interval(last.speedup)}"
        return f"pays up to a concurrency between {low} and {high}; {at_last}"
    return f"stops paying at a concurrency of about {number(crossing.value, 1)} [{low}, {high}]"


def load_as_json(loads: Sequence[ConcurrencyCurve]) -> list[dict[str, Any]]:
    return [
        {
            "suite": load.suite, "method": load.method, "setting": load.setting,
            "stops_paying_at": load.crossing and {
                "value": load.crossing.value, "low": load.crossing.low, "high": load.crossing.high,
            },
            "levels": [_level_json(level) for level in load.levels],
        }
        for load in loads
    ]  # fmt: skip


def _level_json(level: Level) -> dict[str, Any]:
    return {
        "concurrency": level.concurrency, "rate": level.rate, "num_answers": level.num_answers,
        "goodput": level.goodput and {"per_s": level.goodput.per_s, "share": level.goodput.share},
        "tps_total": level.tokens_per_s,
        "over_plain": level.over_plain,
        "tps_decode": {"min": level.slowest, "median": level.median, "max": level.fastest},
        "ttft_s": {f"p{percent}": seconds for percent, seconds in level.ttft_s.items()},
        "tpot_s": {f"p{percent}": seconds for percent, seconds in level.tpot_s.items()},
        "speedup_decode": level.speedup,
    }  # fmt: skip


# A sweep in words: a table by the values of an option, and which value was the best on this engine and machine.


BEST, RIVAL = "*", "~"
SWEEP_LEGEND = (
    f"{BEST} = highest {SPEEDUP}; {RIVAL} = cannot be told apart from it: on the same prompts, the interval of their "
    "ratio contains 1, or p >= 0.05 (Holm, over all pairs)"
)


def tables(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """For a terminal, a table for each option."""
    for sweep in sweeps:
        yield from [f"sweep over {heading(sweep)}", *aligned(*sweep_table(sweep)).splitlines(), ""]


def sweep_paragraphs(sweeps: Sequence[Sweep], info: RunInfo) -> list[str]:
    """Its paragraphs."""
    tables = [part for sweep in sweeps for part in (f"## Sweep over {heading(sweep)}", markdown(*sweep_table(sweep)))]
    items = "\n".join(f"- {text}" for text in best_values(sweeps, info))
    return [*tables, f"{SWEEP_LEGEND}.".replace("*", r"\*"), items] if sweeps else []


def best_values(sweeps: Sequence[Sweep], info: RunInfo) -> list[str]:
    """A sentence for each method that was swept, and on what all that was measured."""
    sentences = [_sweep_answer(sweep, curve) for sweep in sweeps for curve in sweep.summaries]
    return [*sentences, f"This holds for {engine(info)}. On a faster or slower engine another value may be the best."]


def engine(info: RunInfo) -> str:
    """What decides which value is the best: `this engine (local, ...) and this machine (...)`."""
    identity, env = info.identity, info.environment
    packages = env.packages
    software = [f"{name} {packages[name]}" for name in ("transformers", "torch") if packages.get(name)]
    threads = identity.threads
    types = [identity.dtype, *([identity.quantize] if identity.quantize else [])]
    how = [str(identity.device or "cpu"), *types, *([f"threads {threads}"] if threads else [])]
    machine = env.one_line().partition(";")[0]
    return f"this engine ({', '.join([identity.engine or 'local', *software, *how])}) and this machine ({machine})"


def heading(sweep: Sweep) -> str:
    return f"{sweep.option} ({sweep.unit})" if sweep.unit else sweep.option


def value_texts(option: str, values: Iterable[Value]) -> dict[Value, str]:
    """The values of a sweep in words, no two alike."""
    several = list(dict.fromkeys(values))
    numbers = labels.number_words(value for value in several if isinstance(value, float))
    return {
        value: numbers[value] if isinstance(value, float)
        else context_name(value) if option == "context" and isinstance(value, int) else str(value)
        for value in several
    }  # fmt: skip


def _texts_of(option: str, curve: SweepCurve) -> list[str]:
    words = value_texts(option, (point.value for point in curve.points))
    return [words[point.value] for point in curve.points]


def where(curve: SweepCurve) -> str:
    """The suites of a curve."""
    return curve.suites[0] if len(curve.suites) == 1 else f"geometric mean over {len(curve.suites)} suites"


def sweep_table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """A suite's name once, and below it the values."""
    several = len(sweep.summaries) > 1
    rows = []
    for curve in sweep.curves:
        name = f"{where(curve)} · {curve.series}" if several else where(curve)
        rows.append([name, "", "", "", ""])
        texts = _texts_of(sweep.option, curve)
        rows += [_sweep_row(texts[number], curve, number, point) for number, point in enumerate(curve.points)]
    return [sweep.option, "prompts", f"{LENGTH} [95 %]", f"{SPEEDUP} [95 %]", "best / this [95 %]"], rows


def _sweep_row(value: str, curve: SweepCurve, number: int, point: Point) -> list[str]:
    mark = BEST if number == curve.best else RIVAL if number in curve.rivals else " "
    ratio = curve.over[number].ratio if number in curve.over else None
    return [
        f"  {value}", f"{point.num_prompts:,}", with_interval(point.length),
        f"{with_interval(point.speedup)} {mark}", with_interval(ratio) if ratio else "",
    ]  # fmt: skip


def _sweep_answer(sweep: Sweep, curve: SweepCurve) -> str:
    if curve.best is None:
        return f"{curve.series}: no speed-up over plain decoding is known, so no {sweep.option} can be called the best."
    best = curve.points[curve.best]
    assert best.speedup is not None
    texts = _texts_of(sweep.option, curve)
    parts = [
        f"{curve.series}: {SPEEDUP} is highest at {sweep.option} {texts[curve.best]}, "
        f"{with_interval(best.speedup)} ({where(curve)})"
    ]
    rivals = [texts[at] for at in curve.rivals]
    if len(rivals) == 1:
        parts.append(f"{texts[curve.best]} and {rivals[0]} cannot be told apart")
    elif rivals:
        parts.append(f"it cannot be told apart from {_and(rivals)}")
    slower = [
        f"{texts[at]} ({number(change.ratio.value)}x)" for at, change in curve.over.items() if at not in curve.rivals
    ]
    if slower:
        parts.append(f"it is faster than {_and(slower)}")
    if not _is_faster(best.speedup):
        parts.append("it is not shown to be faster than plain decoding")
    return "; ".join(parts) + "."


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _is_faster(speedup: Interval) -> bool:
    return speedup.low is not None and speedup.low > 1


def sweep_as_json(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    return [
        {"option": sweep.option, "unit": sweep.unit or None, "curves": [_curve_json(curve) for curve in sweep.curves]}
        for sweep in sweeps
    ]


def _curve_json(curve: SweepCurve) -> dict[str, Any]:
    """`ratio` is the best one's speed-up over this one's."""
    return {
        "series": curve.series,
        "suites": list(curve.suites),
        "best": None if curve.best is None else curve.points[curve.best].value,
        "not_told_apart": [curve.points[number].value for number in curve.rivals],
        "points": [_point_json(curve, number, point) for number, point in enumerate(curve.points)],
    }


def _point_json(curve: SweepCurve, number: int, point: Point) -> dict[str, Any]:
    over = curve.over.get(number)
    return {
        "value": point.value, "method": point.method, "num_prompts": point.num_prompts, "al_pooled": point.length,
        "speedup_decode": point.speedup, "best_over_this": over and over.ratio, "p": over and over.p,
    }  # fmt: skip


# What a longer context does to each method: a table by suite, method and context.


CONTEXT_TITLE = "By context"
CONTEXT_LEGEND = (
    "prompt tokens: mean, with what stands before the prompt; draft prefill: the draft reads the prompt, once an "
    "answer; plain step: a token of plain decoding; below break_even_al speculation loses"
)
CONTEXT_HEADS = (
    "context", "prompt\ntokens", "prompts", "al.\npooled [95 %]", "break_even_al", "draft\nprefill ms", "draft\nms",
    "verify\nms", "plain\nstep ms", "speedup.\ndecode [95 %]",
)  # fmt: skip
"""With line breaks where a narrow column needs them."""


@dataclass(frozen=True, slots=True)
class Series:
    """A method on one suite, with everything else equal: a cell for each context, the shortest first."""

    suite: str
    """For people, with what tells its other settings from those of the run."""
    method: str
    cells: tuple[Cell, ...]
    key: CellKey
    """With the id of the settings without a context."""

    @property
    def name(self) -> str:
        return f"{self.suite} · {self.method}"


def by_context(cells: Sequence[Cell]) -> list[Series]:
    """Those with answers at several contexts; none in a run of one."""
    answered = [cell for cell in cells if cell.num_prompts and cell.method != BASELINE]
    others = short_names(list(dict.fromkeys(replace(cell.settings, context=None) for cell in answered)))
    groups: dict[CellKey, list[Cell]] = {}
    names = {}
    for cell in answered:
        other = replace(cell.settings, context=None)
        key = cell.key._replace(settings_id=other.id)
        groups.setdefault(key, []).append(cell)
        names[key] = labels.under(cell.label, "; ".join(filter(None, [cell.slice, others[other]])))
    return [
        Series(names[key], key.method, tuple(sorted(members, key=lambda cell: cell.settings.context or 0)), key)
        for key, members in groups.items()
        if len(members) > 1
    ]


def context_table(cells: Sequence[Cell]) -> tuple[Sequence[str], list[list[str]]]:
    """The name of a suite and method once, and its contexts below it."""
    heads, rows = [head.replace(".\n", ".").replace("\n", " ") for head in CONTEXT_HEADS], []
    for series in by_context(cells):
        rows.append([series.name, *[""] * (len(CONTEXT_HEADS) - 1)])
        rows += [row(cell) for cell in series.cells]
    return heads, rows


def row(cell: Cell) -> list[str]:
    times = ("draft_prefill_ms", "draft_ms", "verify_ms", "plain_ms")
    return [
        f"  {context_name(cell.settings.context)}", number(cell.value("prompt_tokens"), 0), f"{cell.num_prompts:,}",
        with_interval(cell.figures.get("al.pooled")), number(cell.value("break_even_al")),
        *(number(cell.value(name)) for name in times), with_interval(cell.figures.get("speedup.decode")),
    ]  # fmt: skip


def context_paragraphs(cells: Sequence[Cell]) -> list[str]:
    """In Markdown; none in a run of one context."""
    return [f"## {CONTEXT_TITLE}", markdown(*context_table(cells)), f"{CONTEXT_LEGEND}."] if by_context(cells) else []
