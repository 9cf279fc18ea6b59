"""The result of a run on one screen: a line for each method, its meaning in a sentence, and next steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

from dflash_bench.analysis.cells import Cell, Share
from dflash_bench.analysis.metrics import BASELINE, METRICS, statistic_of
from dflash_bench.analysis.stats import Interval
from dflash_bench.core import labels
from dflash_bench.core.labels import clipped, visible
from dflash_bench.core.methods import PLAIN, draft_of, has_draft, is_lossy
from dflash_bench.core.types import Settings
from dflash_bench.report.document import Document, Mean, MethodLine, over_all
from dflash_bench.report.sections import WRONG, best_values, crossings
from dflash_bench.report.tables import ABSENT, bounds, few, number
from dflash_bench.report.words import num_as_text, tally, why_not_faster
from dflash_bench.results.identity import NAMES, value_words

if TYPE_CHECKING:
    from rich.text import Text

WIDTH = 80
"""Columns that the screen is made for; a narrower terminal gets fewer columns of the table."""
BAR = 11
"""Characters of an interval's bar, with its ends."""
LONGEST_NAME = 24
MOST_NAMED = 48
"""Characters of a list of suites in a sentence; for a longer list, their number is given."""
LEAVES_OUT = ("bar", "tps", "al", "interval", "exact")
"""The columns that a narrow terminal leaves out, in this order."""
FAULTS = (
    *(kind for kind in WRONG if kind != "mismatch"),
    "worse_answers",
    "other_target",
    "other_servers",
    "reused_prompts",
    "unjudged",
)
"""Findings to show, the worst first; those that forbid a speed-up stand above them, in sentences."""
WEAKNESSES = (
    "no_decode_speed",
    "clock_doubt",
    "slow_plain",
    "launch_bound",
    "fallback",
    "shared_machine",
    "drift",
    "loops",
    "truncated",
    "few_prompts",
)
HEADS = {
    "name": "",
    "speedup": "speed-up",
    "bar": "",
    "interval": "95 %",
    "al": "tokens\nper round",
    "tps": "tokens/s",
    "exact": "exact",
}
LEFT = ("name", "bar", "interval")
MARKS = {"exact": "✓", "wrong": "✗", "alike": "≈", "text": "as text", "unjudged": "?"}
"""Marks of methods by their answers: all plain decoding's tokens, some wrong, all alike up to rounding, compared as
text alone, or some different for no known reason."""


@dataclass(frozen=True, slots=True)
class ScreenRow:
    """A method over all suites, as text by the ids of `HEADS`, and its standing."""

    texts: dict[str, str]
    is_best: bool = False
    standing: str = ""
    """A key of `MARKS`."""


def screen(document: Document, width: int = WIDTH) -> Text:
    """Return the screen. Nothing on it is shown by colour alone."""
    from rich.text import Text

    means = document.means()
    table = [] if document.why_empty else _table(_rows(document, means), width)
    said = [Text(_filled(text, "", width), "bold") for text in answers(document, means)]
    warnings = [Text(_filled(f"! {text}", "  ", width), "yellow") for text in warnings_of(document)]
    shown = Text("\n").join([*table, *([Text()] if table else []), *said, *warnings])
    shown.append("\n\n")
    return shown


def named(document: Document, width: int = WIDTH) -> str:
    """Return a line on what was measured: the model, and on what machine."""
    info = document.results.info
    machine = info.environment.one_line().partition(";")[0]
    return clipped(f"{info.identity.target or info.identity.model} on {machine}", width)


def _filled(text: str, indent: str, width: int) -> str:
    from textwrap import fill

    return fill(visible(text), width, subsequent_indent=indent, break_on_hyphens=False)


# The table.


def _rows(document: Document, means: Sequence[Mean]) -> list[ScreenRow]:
    """Return rows for the drafting methods, the fastest marked, and last for plain decoding under each settings."""
    known = [speedup for _, speedup, _ in means if speedup]
    best = max((speedup.value for speedup in known), default=None)
    scale = _scale(known)
    settings = _in_columns(document.cells)
    rows = [
        ScreenRow(
            _texts(line, speedup, al, speed_text(line.cells_of(document.cells)), scale)
            | {"exact": exact_text(document, line)}
            | settings[line.settings],
            speedup is not None and speedup.value == best and speedup.value > 1,
            standing(document, line),
        )
        for line, speedup, al in means
    ]
    return [*rows, *_plain_rows(document, settings)]


def _in_columns(cells: Sequence[Cell]) -> dict[Settings, dict[str, str]]:
    """Return the fields in which settings differ, in words: each is a column of its own, so that none is cut."""
    several = list(dict.fromkeys(cell.settings for cell in cells))
    words = {
        name: value_words(name, values)
        for name in NAMES
        if len(set(values := [getattr(settings, name) for settings in several])) > 1
    }
    return {settings: {name: those[getattr(settings, name)] for name, those in words.items()} for settings in several}


def _plain_rows(document: Document, settings_texts: Mapping[Settings, dict[str, str]]) -> Iterator[ScreenRow]:
    cells = [cell for cell in document.cells if cell.method == BASELINE and cell.num_prompts]
    for settings, setting in dict.fromkeys((cell.settings, cell.setting) for cell in cells):
        line = MethodLine(BASELINE, settings, setting)
        own = line.cells_of(cells)
        speedup = ABSENT if any(cell.forbidden for cell in own) else "1.00x"
        texts = {"name": PLAIN, **settings_texts[settings], "speedup": speedup, "al": number(over_all(own, line)[1])}
        yield ScreenRow(texts | {"tps": speed_text(own)})


def _texts(
    line: MethodLine, speedup: Interval | None, al: float | None, speed: str, scale: tuple[float, float]
) -> dict[str, str]:
    interval, bar = "", ""
    if speedup and speedup.low is not None and speedup.high is not None:
        interval = bounds(speedup)
        bar = _bar(speedup.low, speedup.value, speedup.high, scale) if speedup == speedup.drawn else ""
    elif speedup and speedup.too_few:
        interval = f"({few(speedup)})"
    return {
        "name": line.method,
        "speedup": f"{number(speedup.value)}x" if speedup else "n/a",
        "bar": bar,
        "interval": interval,
        "al": number(al),
        "tps": speed,
    }


def judged(document: Document, line: MethodLine) -> Share | None:
    """Return the number of answers that equal the plain output or are the published model's own, whichever is lower."""
    known = [share for name in ("exact", "audit") if (share := tally(document, name, line))]
    return min(known, key=lambda share: share[0] / share[1]) if known else None


def standing(document: Document, line: MethodLine) -> str:
    """Return a key of `MARKS`; empty where nothing was judged."""
    share = judged(document, line)
    if num_of(document, "mismatch", line.method, line.settings.id):
        return "wrong"
    if num_of(document, "unjudged", line.method, line.settings.id):
        return "unjudged"
    if share and num_as_text(document, line) and tally(document, "audit", line) is None:
        return "text"
    return "" if share is None else "exact" if share[0] == share[1] else "alike"


def exact_text(document: Document, line: MethodLine) -> str:
    """Return the number of answers that are the target's own, with a mark."""
    if is_lossy(line.method):
        return "lossy"
    share = judged(document, line)
    if share is None:
        return "n/a"
    return f"{share[0]:,}/{share[1]:,} {MARKS[standing(document, line)]}"


def speed_text(cells: Sequence[Cell]) -> str:
    """Return the tokens of all answers over the seconds that decoding them took."""
    sums = [cell.sums.sum(axis=0) for cell in cells if cell.num_prompts]
    if not sums:
        return "n/a"
    value = float(statistic_of(METRICS["tps.decode"])(sum(sums)))
    return number(value, 0 if value >= 100 else 1) if value == value else "n/a"


def _scale(speedups: Sequence[Interval]) -> tuple[float, float]:
    """Return the least and the largest bound of all intervals that are drawn."""
    ends = [bound for one in speedups for bound in (one.drawn.low, one.drawn.high) if bound is not None and bound > 0]
    return (min(ends), max(ends)) if ends else (1.0, 1.0)


def _bar(low: float, value: float, high: float, scale: tuple[float, float]) -> str:
    """Return an interval as ▕ ━━●━ ▏, on a logarithmic scale that all bars share."""
    least, most = scale
    inner = BAR - 2
    span = log(most) - log(least) if 0 < least < most else 0.0
    places = [
        min(inner - 1, max(0, int((log(max(one, least)) - log(least)) / span * inner))) if span else inner // 2
        for one in (low, value, high)
    ]
    first, middle, last = places
    drawn = "".join("●" if at == middle else "━" if first <= at <= last else " " for at in range(inner))
    return f"▕{drawn}▏"


def _table(rows: Sequence[ScreenRow], width: int) -> list[Text]:
    from rich.text import Text

    fields = [name for name in NAMES if any(name in row.texts for row in rows)]
    heads = {"name": "", **{name: name.replace("_", " ") for name in fields}, **HEADS}
    height = max(head.count("\n") for head in heads.values()) + 1
    above = {name: [""] * (height - 1 - head.count("\n")) + head.split("\n") for name, head in heads.items()}
    head_lines = [{name: head[at] for name, head in above.items()} for at in range(height)]
    texts = [*head_lines, *({name: visible(text) for name, text in row.texts.items()} for row in rows)]
    columns = [name for name in heads if any(one.get(name) for one in texts[height:])]
    most = min(LONGEST_NAME, max(8, width - 12))
    texts = [one | {"name": _cut(one["name"], most)} for one in texts]
    widths = {name: max(len(one.get(name, "")) for one in texts) for name in columns}
    for name in (*LEAVES_OUT, *reversed(fields)):
        if 2 + sum(widths.values()) + 2 * (len(widths) - 1) > width:
            widths.pop(name, None)
    lines = []
    for row, one in zip([*(None for _ in head_lines), *rows], texts, strict=True):
        line = Text("  ")
        for name, size in widths.items():
            cell = one.get(name, "")
            padded = cell.ljust(size) if name in LEFT else cell.rjust(size)
            line.append(padded, _style(name, row)).append("  ")
        line.rstrip()
        lines.append(line)
    return lines


def _style(name: str, row: ScreenRow | None) -> str:
    if row is None:
        return "dim"
    if name == "exact":
        return {"exact": "green", "wrong": "bold red"}.get(row.standing, "")
    return "bold" if row.is_best and name in ("name", "speedup") else ""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# The sentences.


def answers(document: Document, means: Sequence[Mean]) -> list[str]:
    """Return the run's result: how fast its best method is, and first of all what forbids a speed-up."""
    if document.why_empty:
        return [f"{document.why_empty}."]
    said = faults(document)
    if document.sweeps:
        return [*said, *best_values(document.sweeps, document.results.info)]
    if document.loads:
        return [*said, *crossings(document.loads)]
    known = [(line, speedup) for line, speedup, _ in means if speedup]
    if known:
        line, speedup = max(known, key=lambda one: one[1].value)
        why = why_not_faster(document, line)
        said.append(f"{_headline(document, line, speedup)}.{f' It has {why}.' if why else ''}")
    elif means and not said:
        said.append(f"There is no speed-up: {document.why_no_speedup()}.")
    return said


def hero(document: Document, means: Sequence[Mean]) -> str:
    """Return the result of the fastest method in at most 16 words; empty without a speed-up."""
    known = [(line, speedup) for line, speedup, _ in means if speedup]
    if not known:
        return ""
    line, speedup = max(known, key=lambda one: one[1].value)
    value = number((document.typical(line) or speedup).value)
    if speedup.low is None:
        return f"{line.name} was {value} times as fast as plain decoding, over too few prompts to trust"
    if speedup.contains(1) or speedup.is_vague:
        return f"{line.name} shows no measurable speed-up: {value} times as fast as plain decoding"
    how = "slower than plain decoding" if speedup.value < 1 else f"{value} times as fast as plain decoding"
    return f"{line.name} is {how}"


def faults(document: Document) -> list[str]:
    """Return a sentence for each finding that forbids a speed-up, and for each method with wrong answers."""
    said = [f"No speed-up: {one.text}." for one in document.findings if one.forbids and one.kind != "mismatch"]
    for name, cells in _by_method(document):
        wrong = sum(
            num_of(document, "mismatch", *place) for place in dict.fromkeys((c.method, c.settings.id) for c in cells)
        )
        if wrong:
            said.append(f"{name} is NOT exact: {_answers(wrong)} are not the target's own.")
    return said


def _by_method(document: Document) -> Iterator[tuple[str, list[Cell]]]:
    for method in dict.fromkeys(cell.method for cell in document.cells):
        name = "plain decoding" if method == BASELINE else method
        yield name, [cell for cell in document.cells if cell.method == method]


def _answers(number: int) -> str:
    return f"{number:,} answer{'' if number == 1 else 's'}"


def num_of(document: Document, kind: str, method: str, settings_id: str) -> int:
    """Return the number of a method's answers that a kind of finding is about."""
    return sum(
        int(values.get("num_answers", 0))
        for finding in document.findings
        if finding.kind == kind
        for place, values in zip(finding.places, finding.values, strict=True)
        if (place.method, place.settings_id) == (method, settings_id)
    )


def _headline(document: Document, line: MethodLine, speedup: Interval) -> str:
    typical = document.typical(line)
    if typical is None:
        return _sentence(document, line, speedup)
    together = f"{number(speedup.value)} times ({bounds(speedup)})"
    return f"{_sentence(document, line, typical)}, geometric mean over prompts; over all tokens together {together}"


def _sentence(document: Document, line: MethodLine, speedup: Interval) -> str:
    where = _where(document, line.method)
    if speedup.low is None or speedup.high is None:
        of_one = " of a suite" if len({cell.suite for cell in document.cells}) > 1 else ""
        head = f"With {speedup.too_few} prompts{of_one}, too few to trust, " if speedup.too_few else ""
        return f"{head}{line.name} was {number(speedup.value)} times as fast as plain decoding{where}"
    within = f"{number(speedup.low)}, {number(speedup.high)}"
    if speedup.is_vague:
        was = f"{line.name} was {number(speedup.value)} times as fast as plain decoding{where}"
        return f"Inconclusive: {was}, but the prompts vary too much"
    if speedup.contains(1):
        return f"No measurable speed-up for {line.name}{where}: {number(speedup.value)}x [{within}]"
    if speedup.value < 1:
        return f"{line.name} is slower than plain decoding{where}: {number(speedup.value)}x [{within}]"
    return f"{line.name} is {number(speedup.value)} times as fast as plain decoding ({bounds(speedup)}){where}"


def _where(document: Document, method: str) -> str:
    """Name the suites with their sources, and note where the included drafts were trained on this kind of text."""
    suites = dict.fromkeys((cell.suite, cell.source) for cell in document.cells if cell.num_prompts)
    named = labels.suite_list(suites)
    if len(named) > MOST_NAMED:
        sources = filter(None, dict.fromkeys(labels.source_label(source) for _, source in suites))
        named = visible(" ".join([f"{len(suites)} suites", *(f"({source})" for source in sources)]))
    mean = ", geometric mean" if len(suites) > 1 else ""
    known = " (in-distribution prompts: the drafts were trained on this kind of text)"
    return f" on {named}{mean}{known if is_known_text(document, method) else ''}"


def is_known_text(document: Document, method: str) -> bool:
    """Return whether the method's draft was trained on the kind of text that it was measured on."""
    suites = {cell.source for cell in document.cells if cell.num_prompts}
    info = document.results.info
    own = {draft.partition("=")[0] for draft in info.options.drafts}
    is_nanos = str(info.identity.model) == "nano" and has_draft(method) and draft_of(method) not in own
    return is_nanos and all(map(labels.is_embedded, suites))


def warnings_of(document: Document) -> list[str]:
    """Return a line for each finding on a wrong or weak number, the worst first."""
    order = {kind: at for at, kind in enumerate((*FAULTS, *WEAKNESSES))}
    if document.why_empty:
        order.pop("failed")
    shown = (one for one in document.findings if one.kind in order and not one.forbids)
    known = sorted(shown, key=lambda one: order[one.kind])
    return [*document.notes, *(one.text for one in known)]
