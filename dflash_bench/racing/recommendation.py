"""A recommendation in words, as Markdown and as JSON: a decision per load, why others lost, and commands to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from dflash_bench.analysis.concurrency import SpeedPoint
from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import methods
from dflash_bench.core.labels import WIDTH
from dflash_bench.core.types import context_name
from dflash_bench.measurements.server_memory import MemoryBySize
from dflash_bench.racing.race import MEASURED, WORTH, Candidate, ContextFit, Decision
from dflash_bench.report.data import json_value
from dflash_bench.report.html import escape
from dflash_bench.report.render import markdown, terminal
from dflash_bench.report.tables import Column, ReportTable, Section, TableRow, Value, number

OUTCOMES = {
    "baseline": "plain decoding",
    "leads": "the fastest",
    "level": "may be the fastest",
    "behind": "not in the faster half",
    "slower": "slower than the best",
    "no_gain": f"within {100 * WORTH:.0f} % of the best",
    "below_plain": "slower than plain decoding",
    "wrong": "out: wrong answers",
    "failed": "out: failed",
    "drifted": "out: faster than possible",
    "no_time": "no time",
    "waiting": "not measured",
}
WHYS = {
    "wrong": "is out: its answers are not the model's own",
    "failed": "failed",
    "drifted": "was sped up by more than its tokens per round, which is impossible: the machine's speed drifted",
}
LEGEND = (
    "vs. best: the speed-up divided by that of the fastest draft, on the prompts that both answered. tokens/s "
    "of all answers together, and ms per token of one, are plain decoding's times the ratio to plain decoding in the "
    "same runs. The fastest is chosen by these figures, so its own are slightly optimistic."
)


@dataclass(frozen=True, repr=False)
class Recommended:
    """Methods to serve a model with, load by load. `str` is the text of `dflash-bench recommend`, `data` its JSON."""

    model: str
    machine: str
    decisions: tuple[Decision, ...]
    """A decision per load, each with `load` (concurrency, context), `choice` (a method, or "ar"), `speedup` (value,
    low, high) and `verdict`: faster, plain, unclear, too_few, drifted or no_time."""
    folder: Path
    """The races' runs, with recommendation.md, recommendation.json and frontier.svg."""
    runs: tuple[Path, ...]
    spent_s: float
    programs: Mapping[str, Sequence[tuple[str, Sequence[str], Sequence[str]]]]
    """Server programs by chosen method, each with its arguments and those of a dflash-bench command that is needed
    first."""
    rooms: Mapping[str, ContextFit]
    """Context lengths by chosen method; empty for servers that run already, whose memory is unknown."""
    held: Mapping[str, MemoryBySize]
    """Memory of servers launched on a CPU, by chosen method and plain decoding's label."""
    served: tuple[str, ...] = ()
    """Methods of servers that run already."""

    @property
    def is_wrong(self) -> bool:
        """Whether some method gave answers that are not the model's own."""
        return any(candidate.verdict == "wrong" for one in self.decisions for candidate in one.candidates)

    @property
    def flags(self) -> dict[str, dict[str, list[str]]]:
        """The server arguments by chosen method and by program."""
        return {method: {name: list(words) for name, words, _ in some} for method, some in self.programs.items()}

    @cached_property
    def data(self) -> dict[str, Any]:
        """The recommendation as codes and numbers, as `--json` prints it; intervals are [value, low, high]."""
        return as_json(self)

    @cached_property
    def table(self) -> Any:
        """A tidy pandas DataFrame with a row per load and measured method, plain decoding ("ar") first.

        Columns: concurrency, context (tokens; 0: prompts as they are), method, verdict (leads, level, slower, ...),
        prompts, speedup, low, high (its 95 % interval, or NaN), al_pooled, tokens_per_s (of all answers together),
        ms_per_token (of a single answer).
        """
        import pandas as pd

        rows = [
            (
                one.load.concurrency,
                one.load.context,
                tried.method,
                tried.verdict,
                tried.num_prompts,
                *(getattr(tried.speedup, name, None) for name in ("value", "low", "high")),
                getattr(tried.length, "value", None),
                tried.tokens_per_s,
                tried.ms_per_token,
            )
            for one in self.decisions
            for tried in one.candidates
        ]
        numbers = ["speedup", "low", "high", "al_pooled", "tokens_per_s", "ms_per_token"]
        columns = ["concurrency", "context", "method", "verdict", "prompts", *numbers]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def title(found: Recommended) -> str:
    is_unnamed = found.model == "server"
    whose = " (the servers' model is unknown; name it with --target)" if is_unnamed else f" for {found.model}"
    return f"Recommendation{whose}"


def sections(found: Recommended) -> list[Section]:
    made = found.decisions
    drafting = list(dict.fromkeys(one.choice for one in made if one.verdict == "faster"))
    parts = [
        Section("decision", title(found), sentences=[*by_load(made)]),
        Section("changes", "When this changes", sentences=[*_changes(made)]),
        Section("flags", "Server flags", sentences=[line for one in drafting for line in flags(one, found)]),
        Section("memory", "Memory", sentences=[line for one in drafting for line in _memory(one, found)]),
        _sliced(made),
        _tried(made),
    ]
    runs = f"{len(found.runs)} run{'' if len(found.runs) == 1 else 's'}"
    about = f"{runs} in {found.folder}, {found.spent_s / 60:.1f} minutes on {found.machine}."
    return [*(one for one in parts if one.sentences or one.table), Section("about", "Measured", sentences=[about])]


def text(found: Recommended, width: int | None = WIDTH) -> str:
    # Commands to paste are not wrapped.
    widths = {"flags": None}
    return "\n\n".join(terminal(one, widths.get(one.id, width)) for one in sections(found)) + "\n"


def page(found: Recommended, plot: str | None) -> str:
    """Return the recommendation as Markdown; `plot` is the file name of its plot."""
    parts = []
    for section in sections(found):
        if section.id == "flags":
            parts.append(f"## {section.title}\n\n```\n" + "\n".join(section.sentences) + "\n```")
        else:
            parts.append(markdown(section))
        if section.id == "tried" and plot is not None:
            parts.append(f"![throughput against latency]({plot})")
    return "\n\n".join(parts) + "\n"


def as_json(found: Recommended) -> dict[str, Any]:
    """Return everything as codes and numbers; intervals as [value, low, high]."""
    return {
        "model": found.model,
        "machine": found.machine,
        "spent_s": json_value(found.spent_s),
        "decisions": [
            {
                **asdict(one.load),
                "choice": one.choice,
                "verdict": one.verdict,
                "speedup": json_value(one.speedup),
                "more_prompts": one.more_prompts,
                "slices": [[name, num, json_value(speedup)] for name, num, speedup in one.slices],
                "loses_from": json_value(one.loses_from),
                "tried": [_candidate_json(candidate) for candidate in one.candidates],
            }
            for one in found.decisions
        ],
        "flags": found.flags,
        "longest_context": {method: asdict(fit) for method, fit in found.rooms.items()},
        "server_memory": {
            method: {"free_bytes": memory.free_bytes, "bytes_by_tokens": sorted(map(list, memory.sizes.items()))}
            for method, memory in found.held.items()
        },
        "runs": [str(run) for run in found.runs],
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    intervals = {name: getattr(candidate, name) for name in ("speedup", "beside", "length")}
    measured = {metric.id: candidate.measured.get(metric.id) for metric in MEASURED}
    values = {name: value for name, value in asdict(candidate).items() if name != "measured"}
    return {name: json_value(value) for name, value in (values | intervals | measured).items()}


def points(made: Sequence[Decision]) -> dict[str, list[SpeedPoint]]:
    """Return the points of the plot by context, which names its panels."""
    panels: dict[str, list[SpeedPoint]] = {}
    for one in made:
        panels.setdefault(_context(one), []).extend(
            SpeedPoint(candidate.method, one.load.concurrency, candidate.ms_per_token, candidate.tokens_per_s)
            for candidate in one.candidates
            if candidate.ms_per_token and candidate.tokens_per_s
        )
    return {title: some for title, some in panels.items() if some}


# Decisions in sentences.


def _context(one: Decision) -> str:
    return f"context {context_name(one.load.context)}" if one.load.context else ""


def by_load(made: Sequence[Decision]) -> Iterator[str]:
    """Yield a sentence for each group of neighbouring loads with the same decision."""
    for context, of_context in groupby(made, key=_context):
        several = list(of_context)
        groups = [list(same) for _, same in groupby(several, key=lambda one: (one.verdict, one.choice))]
        for at, same in enumerate(groups):
            where = _where([one.load.concurrency for one in same], at == 0, at == len(groups) - 1)
            said = "; ".join(_said(one, len(same) > 1) for one in same) if same[0].verdict != "plain" else _plain(same)
            yield f"{context + ', ' if context else ''}{where}: {_name(same[0])}{said}"


def _where(loads: Sequence[int], is_first: bool, is_last: bool) -> str:
    if is_first and not is_last:
        return f"up to concurrency {loads[-1]}" if loads[-1] > 1 else "concurrency 1"
    if is_last and not is_first:
        return f"from concurrency {loads[0]} on"
    return f"concurrency {loads[0]} to {loads[-1]}" if len(loads) > 1 else f"concurrency {loads[0]}"


def _name(one: Decision) -> str:
    return f"{described(one.of(one.choice))}, " if one.verdict == "faster" else ""


def described(candidate: Candidate) -> str:
    """Return a method in words: `dflash, 10 drafted tokens`."""
    if candidate.num_drafts is None:
        return candidate.method
    method = methods.parse(candidate.method)
    others = method.options.keys() - {method.kind.count, "n", "block", "nodes"}
    head = candidate.method if others else candidate.method.partition(":")[0]
    unit = "node" if method.kind.shape == "tree" else "drafted token"
    return f"{head}, {candidate.num_drafts} {unit}{'' if candidate.num_drafts == 1 else 's'}"


def _has(candidate: Candidate) -> str:
    """Return `dflash, 10 drafted tokens, has`, or `dflash has`."""
    name = described(candidate)
    return f"{name}{',' if ',' in name else ''} has"


def _said(one: Decision, names_load: bool) -> str:
    where = f" at {one.load.concurrency}" if names_load else ""
    if one.verdict == "faster":
        rivals = ", ".join(other.method for other in one.rivals)
        return f"{_times(one.speedup)}{where}{f', not distinguishable from {rivals}' if rivals else ''}"
    if one.verdict == "drifted":
        return (
            f"cannot tell{where}: the machine's speed drifted during every run; repeat on a quiet machine, with --out"
        )
    if one.verdict == "no_time":
        return f"cannot tell{where}: there was no time to measure; raise --for"
    best = one.of(one.choice)
    if one.verdict == "too_few":
        few = f"too few answered prompts for an interval ({best.num_prompts})"
        return f"cannot tell{where}: {few}; give more of them, or more time"
    more = f"about {one.more_prompts:,} more prompts should" if one.more_prompts else "more prompts are unlikely to"
    return f"cannot tell{where}: {_has(best)} {_times(one.speedup)} the speed of plain decoding; {more} settle it"


def _plain(same: Sequence[Decision]) -> str:
    best = [next((candidate for candidate in one.candidates[1:] if candidate.speedup), None) for one in same]
    known = [f"{_has(one)} {_times(one.speedup)} its speed" for one in best if one]
    return f"plain decoding; the best method, {known[0]}" if known else "plain decoding"


def _times(interval: Interval | None) -> str:
    if interval is None:
        return "an unknown multiple of"
    if interval.low is None or interval.high is None:
        return f"{number(interval.value)}x"
    return f"{number(interval.value)}x [{number(interval.low)}, {number(interval.high)}]"


def _changes(made: Sequence[Decision]) -> Iterator[str]:
    """Yield how far the runner-up is behind, and where the choice would stop paying."""
    for one in made:
        if one.verdict == "plain" and (lacks := _lacks(one)):
            yield f"{_load(one)}: {lacks}"
        if one.verdict != "faster":
            continue
        where = _load(one)
        parts = []
        if one.level:
            same = ", ".join(f"{other.method} ({_times(other.beside)} its speed)" for other in one.level[:3])
            parts.append(f"not distinguishable from {one.leader}: {same}")
        rival = next((other for other in one.candidates[1:] if other.verdict in ("slower", "no_gain")), None)
        if rival and rival.beside and rival.beside.value > 0:
            parts.append(
                f"the runner-up, {rival.method}, would need to be {100 / rival.beside.value - 100:.0f} % faster"
            )
        chosen = one.of(one.choice)
        if chosen.length and chosen.break_even:
            parts.append(
                f"plain decoding wins once al.pooled falls from {number(chosen.length.value)} to "
                f"{number(chosen.break_even)} (break_even_al)"
            )
        if one.loses_from is not None:
            parts.append(f"it stops paying at a concurrency of about {one.loses_from:.0f}")
        if parts:
            yield f"{where}: {'; '.join(parts)}"


def _lacks(one: Decision) -> str | None:
    """Return how far the best method is behind plain decoding; None if none was measured."""
    best = next(
        (candidate for candidate in one.candidates[1:] if candidate.speedup and candidate.speedup.value > 0), None
    )
    if best is None or best.speedup is None:
        return None
    lacks = f"{best.method} would need to be {100 / best.speedup.value - 100:.0f} % faster"
    if best.length and best.break_even and best.length.value < best.break_even:
        lacks += (
            f"; at the cost of its rounds, that takes an al.pooled above {number(best.break_even)} (break_even_al) "
            f"instead of {number(best.length.value)}"
        )
    return lacks


def flags(label: str, found: Recommended) -> Iterator[str]:
    if label in found.served:
        yield f"{label}: as its server was started"
        return
    known = found.programs.get(label, ())
    for program, words, first in known:
        yield f"{label}, {program}: {shlex.join(words)}"
        if first:
            yield f"  first: dflash-bench {shlex.join(first)}"
    if not known:
        yield f"{label}: not available in vLLM, SGLang or llama.cpp; in this engine, --method {label}"


def _memory(label: str, found: Recommended) -> Iterator[str]:
    """Yield the context that fits with the draft and without, as predicted and as launched servers show."""
    if (fit := found.rooms.get(label)) is None:
        return
    least, why = min(fit.with_draft, fit.without), "" if fit.without < fit.limit else _POSITIONS
    if least == fit.without:
        yield f"{label}: the longest context that is predicted to fit is {least:,} tokens, with it or without{why}"
    else:
        yield (
            f"{label}: the longest context that is predicted to fit is {fit.with_draft:,} tokens with it, and "
            f"{fit.without:,} without{why}"
        )
    own, plain = found.held.get(label), found.held.get(BASELINE)
    shared = sorted(own.sizes.keys() & plain.sizes.keys()) if own and plain else []
    if not own or not plain or not shared:
        return
    most = shared[-1]
    measured = f"measured: its server held {_megabytes(own, most)}, and plain decoding's {_megabytes(plain, most)}"
    with_it, without = own.longest(fit.limit), plain.longest(fit.limit)
    if with_it is None or without is None:
        fits = "other contexts or loads in the same call would say how much more fits"
    elif with_it == without:
        fits = f"by what more context took, {with_it:,} tokens fit with it or without"
    else:
        fits = f"by what more context took, {with_it:,} tokens fit with it, and {without:,} without"
    yield f"{measured}, each with {most:,} tokens of context; {fits}"


_POSITIONS = " (all that the model has positions for)"


def _megabytes(memory: MemoryBySize, tokens: int) -> str:
    return f"{memory.sizes[tokens] / 1e6:,.0f} MB"


def _sliced(made: Sequence[Decision]) -> Section:
    """Return the speed-up of each choice by category."""
    heads = ["load", "method", "category", "prompts", "speed-up [95 %]"]
    rows: list[list[Value]] = [
        [_load(one), one.choice, name, num, speedup] for one in made for name, num, speedup in one.slices
    ]
    return Section("slices", "By category", ReportTable.of(heads, rows, left=3) if rows else None)


def _load(one: Decision) -> str:
    return ", ".join(filter(None, [_context(one), f"concurrency {one.load.concurrency}"]))


def outcome(one: Decision, candidate: Candidate) -> str:
    """Return a method's outcome. A leader is only called the fastest if its intervals show it."""
    speedup = candidate.speedup
    if candidate.verdict != "leads":
        return OUTCOMES[candidate.verdict]
    if speedup is None or speedup.low is None or speedup.high is None:
        return "too few prompts to tell"
    if speedup.low <= 1:
        return OUTCOMES["below_plain"] if speedup.high < 1 else "as fast as plain decoding"
    return "ahead, not distinguishable" if one.level else OUTCOMES["leads"]


def _tried(made: Sequence[Decision]) -> Section:
    known = {name for one in made for candidate in one.candidates for name in candidate.measured}
    measured = [metric for metric in MEASURED if metric.id in known]
    columns = [
        Column("method", "method", "left"),
        Column("speedup", "speed-up [95 %]"),
        Column("beside", "vs. best [95 %]", is_spare=True),
        Column("length", "al.pooled", has_interval=False, is_spare=bool(measured)),
        Column("tokens_per_s", "tokens/s", digits=0),
        Column("ms_per_token", "ms/token"),
        *(Column(one.id, one.shown[0].head, digits=one.shown[0].digits) for one in measured),
        Column("prompts", "prompts"),
        Column("outcome", "outcome", "left"),
    ]
    rows = [
        TableRow(
            [
                candidate.method,
                candidate.speedup,
                candidate.beside,
                candidate.length,
                candidate.tokens_per_s,
                candidate.ms_per_token,
                *(candidate.measured.get(one.id) for one in measured),
                candidate.num_prompts,
                outcome(one, candidate),
            ],
            _load(one),
        )
        for one in made
        for candidate in one.candidates
    ]
    whys = {
        f"{candidate.method} {WHYS[candidate.verdict]}{f': {candidate.error}' if candidate.error else ''}": None
        for one in made
        for candidate in one.candidates
        if candidate.verdict in WHYS
    }
    return Section("tried", "All candidates", ReportTable(columns, rows, "load"), [*whys, LEGEND])
