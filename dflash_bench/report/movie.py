"""A looping picture of one answer, plain and drafted side by side, typed at their measured times, in one SVG file.

It needs no script, so that a README or a talk can show it. The default answer is not the fastest: its speed-up is
nearest to the whole run's.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from dflash_bench.analysis.metrics import BASELINE
from dflash_bench.core.errors import UserError, unknown
from dflash_bench.core.labels import visible
from dflash_bench.core.methods import shown
from dflash_bench.report.answers import load_tokenizer, pieces
from dflash_bench.report.document import Document, require_answers
from dflash_bench.report.words import facts

COLUMNS_READ = tuple(
    """
    suite prompt_id turn repeat method token_ids text error accepted emitted round_s decode_s
    """.split()
)
COLUMNS, MOST_LINES = 46, 18
"""Most characters per line, and lines per answer; the rest is cut."""
CHARACTER, LINE, MARGIN, HEAD = 7.8, 18, 14, 34
"""Pixels."""
TYPING_S, HOLD_S = 5.0, 2.5
"""Seconds of typing the slower answer, and seconds that both then stay."""
STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1b2530; white-space: pre; }
.head { font-weight: 600; } .small { font-size: 11px; fill: #5a6877; }
.drafted { fill: #00734f; } .box { fill: #ffffff; stroke: #dde3ea; }
@media (prefers-color-scheme: dark) {
  text { fill: #dfe6ed; } .small { fill: #93a1b0; } .drafted { fill: #4fd0a0; }
  .box { fill: #151b22; stroke: #2b3541; }
}
"""


@dataclass(frozen=True, slots=True)
class TypedPart:
    """Text from character `first` to `last` of the answer, and its time after the first token."""

    first: int
    last: int
    at_s: float
    is_drafted: bool


@dataclass(frozen=True, slots=True)
class FilmedAnswer:
    method: str
    text: str
    parts: tuple[TypedPart, ...]
    seconds: float


def movie(
    document: Document, method: str | None = None, answer: str | None = None, tokenizer: Path | None = None
) -> str:
    """Return the SVG of one answer (SUITE/PROMPT), by one of the run's methods; by default the fastest.

    Raises UserError for a method or an answer that the run does not have, for an answer whose rounds are hidden, and if
    the target's tokenizer, which maps characters to tokens, is not on this disk.
    """
    method = method or require_answers(document).fastest()[0].method
    if method not in document.methods:
        raise unknown("method of this run", method, document.methods)
    if any(cell.forbidden for cell in document.cells if cell.method == method):
        line = next(line for line in document.lines if line.method == method)
        raise UserError(f"{document.folder} has no speed-up of {method} to show: {document.why_no_speedup(line)}")
    decoder = load_tokenizer(document.results.info, tokenizer)
    if decoder is None:
        raise UserError("the target's tokenizer was not found: give --tokenizer FOLDER")
    plain, drafted = _chosen(document, method, answer)
    both = [_filmed(row, decoder) for row in (plain, drafted)]
    about = facts(document.results.info)
    model = Path(str(document.results.info.identity.model)).name
    return _svg(both, f"{plain['suite']}/{plain['prompt_id']} · {model} · {about['machine']}")


Row = dict[str, Any]


def _chosen(document: Document, method: str, answer: str | None) -> tuple[Row, Row]:
    """Return an answer of plain decoding, and the method's answer to the same question."""
    plain: dict[tuple[Any, ...], Row] = {}
    drafted: dict[tuple[Any, ...], Row] = {}
    for batch, numbers in document.results.stored.batches(COLUMNS_READ):
        for row, number in zip(batch.select(COLUMNS_READ).to_pylist(), numbers, strict=True):
            wanted = answer is None or answer == f"{row['suite']}/{row['prompt_id']}"
            if wanted and row["error"] is None and row["round_s"] and row["method"] in (BASELINE, method):
                key = row["suite"], row["prompt_id"], row["turn"], row["repeat"], int(number)
                (plain if row["method"] == BASELINE else drafted)[key] = row
    shared = [key for key in plain if key in drafted]
    if not shared:
        which = f"answer {answer}" if answer else "answer"
        raise UserError(f"{document.folder} has no {which} of both plain decoding and {method} whose rounds are known")
    whole = sum(plain[key]["decode_s"] for key in shared) / sum(drafted[key]["decode_s"] for key in shared)

    def distance(key: tuple[Any, ...]) -> float:
        return abs(float(plain[key]["decode_s"] / drafted[key]["decode_s"] - whole))

    best = min(shared, key=distance)
    return plain[best], drafted[best]


def _filmed(row: Row, decoder: Any) -> FilmedAnswer:
    texts = pieces(decoder, row["token_ids"], row["text"])
    if texts is None:
        raise UserError("this tokenizer does not decode the answer's tokens to its text: give --tokenizer FOLDER")
    # Nobody reads control tokens, such as the one that ends an answer.
    texts = [text if decoder.decode([token]) else "" for token, text in zip(row["token_ids"], texts, strict=True)]
    ends = [0, *accumulate(map(len, texts))]
    parts = [TypedPart(0, ends[1], 0.0, False)]
    at, now_s = 1, 0.0
    for accepted, emitted, seconds in zip(row["accepted"], row["emitted"], row["round_s"], strict=True):
        now_s += seconds
        middle, last = at + min(accepted, emitted), at + emitted
        parts += [TypedPart(ends[at], ends[middle], now_s, True), TypedPart(ends[middle], ends[last], now_s, False)]
        at = last
    text = "".join(texts)
    return FilmedAnswer(row["method"], text, tuple(part for part in parts if part.first < part.last), now_s)


def _places(text: str) -> list[tuple[int, int]]:
    """Return the line and the column of each character; lines break between words."""
    places, line, column = [], 0, 0
    words = {match.start(): _width(match[0]) for match in re.finditer(r"\S+", text)}
    for at, letter in enumerate(text):
        word = words.get(at, 0)
        if column + min(word, COLUMNS) > COLUMNS or column + _width(letter) > COLUMNS:
            line, column = line + 1, 0
        places.append((line, column))
        line, column = (line + 1, 0) if letter == "\n" else (line, column + _width(letter))
    return places


def _width(text: str) -> int:
    """Return the columns of a text: a Chinese character takes two, a combining mark none."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


# Text from right to left is placed here, letter by letter: a line is typed in parts, which no browser can put in order.


def _levels(line: str, base: int) -> list[int]:
    """Return the embedding level of each letter: odd is leftward, 2 a number within leftward text.

    The Unicode algorithm (UAX 9) without explicit embeddings, which are shown as escapes; `base` is 1 if the paragraph
    is leftward.
    """
    kinds = [unicodedata.bidirectional(letter) for letter in line]
    levels: list[int | None] = []
    after_leftward = bool(base)
    for kind in kinds:
        if kind in ("L", "R", "AL"):
            after_leftward = kind != "L"
        is_number = kind in ("EN", "AN")
        known = kind in ("L", "R", "AL") or is_number
        rightward = 2 if base or (is_number and after_leftward) else 0
        levels.append(
            (1 if kind in ("R", "AL") else rightward) if known else levels[-1] if kind == "NSM" and levels else None
        )
    return [level if level is not None else _between(levels, kinds, at, base) for at, level in enumerate(levels)]


def _is_leftward(text: str) -> bool:
    """Return whether a paragraph is written from right to left, by its first letter that has a direction."""
    strong = (kind for kind in map(unicodedata.bidirectional, text) if kind in ("L", "R", "AL"))
    return next(strong, "L") != "L"


def _between(levels: Sequence[int | None], kinds: Sequence[str], at: int, base: int) -> int:
    """Return the level of a space or a mark: its neighbours' if they agree, else the line's."""
    before = next((place for place in range(at, -1, -1) if levels[place] is not None), None)
    after = next((place for place in range(at, len(levels)) if levels[place] is not None), None)
    sides = [base if place is None else int(levels[place] or 0) for place in (before, after)]
    numbers = ("EN", "AN")
    if before == at - 1 and after == at + 1 and kinds[at] in ("CS", "ES") and kinds[before] == kinds[after] in numbers:
        return sides[0]
    is_leftward = [
        level % 2 or (place is not None and level == 2 and kinds[place] in numbers)
        for place, level in zip((before, after), sides, strict=True)
    ]
    if all(is_leftward):
        return 1
    return base if any(is_leftward) else 2 * base


def _in_order(text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Return each letter's line, its first column from the left, and whether it is leftward."""
    ordered: list[tuple[int, int, bool]] = []
    for line, members in groupby(range(len(text)), key=lambda at: places[at][0]):
        letters = [at for at in members if text[at] != "\n"]
        begin = text.rfind("\n", 0, letters[0] if letters else 0) + 1
        is_leftward = _is_leftward(text[begin:].partition("\n")[0])
        levels = _levels("".join(text[at] for at in letters), int(is_leftward))
        shown = list(range(len(letters)))
        for level in range(max(levels, default=0), 0, -1):
            shown = [
                place
                for is_high, run in groupby(shown, key=lambda place: levels[place] >= level)
                for place in (reversed(list(run)) if is_high else run)
            ]
        wide = [_width(text[at]) for at in letters]
        column = COLUMNS - sum(wide) if is_leftward else 0
        columns = {}
        for place in shown:
            columns[place] = column
            column += wide[place]
        ordered += [(line, columns[place], levels[place] % 2 == 1) for place in range(len(letters))]
        ordered += [(line, column, False)] * (len(ordered) < len(text) and text[len(ordered)] == "\n")
    return ordered


def _runs(
    filmed: FilmedAnswer, placed: Sequence[tuple[int, int, bool]]
) -> Iterator[tuple[TypedPart, str, int, int, bool]]:
    """Yield parts typed at once: text that stands together in one direction, its line, and its start."""
    for part in filmed.parts:
        first = part.first
        for at in range(part.first, part.last):
            if at + 1 == part.last or not _go_on(filmed.text, placed, at):
                words = filmed.text[first : at + 1].rstrip("\n")
                line, column, is_leftward = placed[first]
                if words.strip():
                    yield part, words, line, column + is_leftward * _width(words[0]), is_leftward
                first = at + 1


def _go_on(text: str, placed: Sequence[tuple[int, int, bool]], at: int) -> bool:
    """Return whether the next letter stands beside this one, in its direction."""
    line, column, is_leftward = placed[at]
    beside = column - _width(text[at + 1]) if is_leftward else column + _width(text[at])
    return placed[at + 1] == (line, beside, is_leftward)


def _svg(both: Sequence[FilmedAnswer], below: str) -> str:
    slowest = max(filmed.seconds for filmed in both)
    factor = max(1.0, TYPING_S / slowest)
    length_s = slowest * factor + HOLD_S
    laid = [_places(filmed.text) for filmed in both]
    lines = min(MOST_LINES, max(line for places in laid for line, _ in places) + 1)
    panel = round(COLUMNS * CHARACTER) + 2 * MARGIN
    width, height = 2 * panel + MARGIN, HEAD + lines * LINE + MARGIN
    speed = f"{both[0].seconds / both[1].seconds:.2f} times as fast"
    drawn = []
    for at, (filmed, places) in enumerate(zip(both, laid, strict=True)):
        left = at * (panel + MARGIN)
        name = "plain decoding" if filmed.method == BASELINE else filmed.method
        head = f"{name}: {filmed.seconds:.2f} s{f', {speed}' if at else ''}"
        drawn.append(f'<rect class="box" x="{left + 0.5}" y="0.5" width="{panel - 1}" height="{height - 1}" rx="8"/>')
        drawn.append(_text(head, left + MARGIN, 22, "head"))
        for part, words, line, column, is_leftward in _runs(filmed, _in_order(filmed.text, places)):
            if line < MOST_LINES:
                x, y = left + MARGIN + column * CHARACTER, HEAD + (line + 1) * LINE - 4
                kind = "drafted" if part.is_drafted else ""
                more = ' direction="rtl"' * is_leftward
                if not words.isascii():
                    # Letters that the type lacks are as far apart as its own.
                    more += f' textLength="{_width(words) * CHARACTER:.1f}"'
                drawn.append(_text(words, x, y, kind, part.at_s * factor / length_s, length_s, more))
    slower = f"slowed down {factor:.0f}x" if factor >= 1.5 else "at the measured speed"
    notes = [f"green: drafted, and accepted by the target · {slower}", below]
    drawn += [_text(note, 0, height + 16 * number, "small") for number, note in enumerate(notes, start=1)]
    size = f'width="{width}" height="{height + 40}" viewBox="0 0 {width} {height + 40}"'
    label = escape(
        visible(f"The same answer by {shown(both[0].method)} and by {shown(both[1].method)}, which is {speed}"),
        {'"': "&quot;"},
    )
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _text(
    words: str, x: float, y: float, kind: str, share: float | None = None, length_s: float = 0.0, more: str = ""
) -> str:
    """Return a text that appears at this share of the loop; `more` are attributes."""
    name = f' class="{kind}"' if kind else ""
    appears = ""
    if share is not None and share > 0:
        appears = (
            f'<animate attributeName="opacity" calcMode="discrete" values="0;1" keyTimes="0;{min(share, 0.999):.4f}" '
            f'dur="{length_s:.2f}s" repeatCount="indefinite"/>'
        )
    return f'<text x="{x:.1f}" y="{y:.1f}"{name}{more} xml:space="preserve">{escape(visible(words))}{appears}</text>'
