"""Several answers at a time in words: a table by concurrency, and up to where speculation pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash_bench import labels
from dflash_bench.analysis.load import LEAST, Crossing, Level, Load
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.report.tables import aligned, markdown, number, with_interval

TITLE = "several answers at a time"
HEADS = [
    "concurrency", "answers", "tps.total", "/ plain", "tps.decode", "ttft ms", "tpot ms", "speedup.decode [95 %]",
]  # fmt: skip
OPEN = "rate /s"
GOODPUT = "goodput /s"
LEGEND = (
    "tps.total = tokens of all answers per second, in which any was being decoded; tps.decode = of single answers, the "
    "slowest/median/fastest; ttft = from having a place to the first token, tpot = per token after it: "
    f"p50/p90/p99, of which p90 is told from {LEAST[90]} answers on, p99 from {LEAST[99]}; goodput = answers within "
    "--slo per second of the method's own time, and their share of all."
)


def lines(loads: Sequence[Load]) -> Iterator[str]:
    """For a terminal."""
    yield TITLE
    yield from aligned(*table(loads)).splitlines()


def paragraphs(loads: Sequence[Load]) -> list[str]:
    """Its paragraphs in Markdown."""
    if not loads:
        return []
    items = "\n".join(f"- {sentence}" for sentence in sentences(loads))
    return ["## Several answers at a time", markdown(*table(loads)), LEGEND, items]


def table(loads: Sequence[Load]) -> tuple[list[str], list[list[str]]]:
    """With goodput where the run has an objective."""
    levels = [level for load in loads for level in load.levels]
    is_open, has_goodput = (any(known) for known in zip(*((one.rate, one.goodput) for one in levels), strict=True))
    heads = [OPEN if is_open else HEADS[0], *HEADS[1:], *([GOODPUT] if has_goodput else [])]
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


def sentences(loads: Sequence[Load]) -> list[str]:
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


def as_json(loads: Sequence[Load]) -> list[dict[str, Any]]:
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
