"""A sweep in words: a table by the values of an option, and which value was the best on this engine and machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash_bench import environment, labels
from dflash_bench.analysis.stats import Interval
from dflash_bench.analysis.sweeps import LENGTH, SPEEDUP, Curve, Point, Sweep
from dflash_bench.kinds import Value
from dflash_bench.records import context_name
from dflash_bench.report.tables import aligned, markdown, number, with_interval

BEST, RIVAL = "*", "~"
LEGEND = (
    f"{BEST} = highest {SPEEDUP}; {RIVAL} = cannot be told apart from it: on the same prompts, the interval of their "
    "ratio contains 1, or p >= 0.05 (Holm, over all pairs)"
)


def tables(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """For a terminal, a table for each option."""
    for sweep in sweeps:
        yield from [f"sweep over {heading(sweep)}", *aligned(*table(sweep)).splitlines(), ""]


def sweep_paragraphs(sweeps: Sequence[Sweep], info: Mapping[str, Any]) -> list[str]:
    """Its paragraphs."""
    tables = [part for sweep in sweeps for part in (f"## Sweep over {heading(sweep)}", markdown(*table(sweep)))]
    items = "\n".join(f"- {text}" for text in best_values(sweeps, info))
    return [*tables, f"{LEGEND}.".replace("*", r"\*"), items] if sweeps else []


def best_values(sweeps: Sequence[Sweep], info: Mapping[str, Any]) -> list[str]:
    """A sentence for each method that was swept, and on what all that was measured."""
    sentences = [_answer(sweep, curve) for sweep in sweeps for curve in sweep.answers]
    return [*sentences, f"This holds for {engine(info)}. On a faster or slower engine another value may be the best."]


def engine(info: Mapping[str, Any]) -> str:
    """What decides which value is the best: `this engine (local, ...) and this machine (...)`."""
    identity, env = info["identity"], info["environment"]
    packages = env.get("packages", {})
    software = [f"{name} {packages[name]}" for name in ("transformers", "torch") if packages.get(name)]
    threads = identity.get("threads")
    types = [identity["dtype"], *([identity["quantize"]] if identity.get("quantize") else [])]
    how = [str(identity.get("device") or "cpu"), *types, *([f"threads {threads}"] if threads else [])]
    machine = environment.one_line(env).partition(";")[0]
    return (
        f"this engine ({', '.join([identity.get('engine') or 'local', *software, *how])}) and this machine ({machine})"
    )


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


def _texts_of(option: str, curve: Curve) -> list[str]:
    words = value_texts(option, (point.value for point in curve.points))
    return [words[point.value] for point in curve.points]


def where(curve: Curve) -> str:
    """The suites of a curve."""
    return curve.suites[0] if len(curve.suites) == 1 else f"geometric mean over {len(curve.suites)} suites"


def table(sweep: Sweep) -> tuple[list[str], list[list[str]]]:
    """A suite's name once, and below it the values."""
    several = len(sweep.answers) > 1
    rows = []
    for curve in sweep.curves:
        name = f"{where(curve)} · {curve.series}" if several else where(curve)
        rows.append([name, "", "", "", ""])
        texts = _texts_of(sweep.option, curve)
        rows += [_row(texts[number], curve, number, point) for number, point in enumerate(curve.points)]
    return [sweep.option, "prompts", f"{LENGTH} [95 %]", f"{SPEEDUP} [95 %]", "best / this [95 %]"], rows


def _row(value: str, curve: Curve, number: int, point: Point) -> list[str]:
    mark = BEST if number == curve.best else RIVAL if number in curve.rivals else " "
    ratio = curve.over[number].ratio if number in curve.over else None
    return [
        f"  {value}", f"{point.num_prompts:,}", with_interval(point.length),
        f"{with_interval(point.speedup)} {mark}", with_interval(ratio) if ratio else "",
    ]  # fmt: skip


def _answer(sweep: Sweep, curve: Curve) -> str:
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


def as_json(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    return [
        {"option": sweep.option, "unit": sweep.unit or None, "curves": [_curve_json(curve) for curve in sweep.curves]}
        for sweep in sweeps
    ]


def _curve_json(curve: Curve) -> dict[str, Any]:
    """`ratio` is the best one's speed-up over this one's."""
    return {
        "series": curve.series,
        "suites": list(curve.suites),
        "best": None if curve.best is None else curve.points[curve.best].value,
        "not_told_apart": [curve.points[number].value for number in curve.rivals],
        "points": [_point_json(curve, number, point) for number, point in enumerate(curve.points)],
    }


def _point_json(curve: Curve, number: int, point: Point) -> dict[str, Any]:
    over = curve.over.get(number)
    return {
        "value": point.value, "method": point.method, "num_prompts": point.num_prompts, "al_pooled": point.length,
        "speedup_decode": point.speedup, "best_over_this": over and over.ratio, "p": over and over.p,
    }  # fmt: skip
