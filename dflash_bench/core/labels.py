"""Labels for display: suites with the source of their prompts, and foreign text made safe to show."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePosixPath
from typing import NamedTuple

_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, marks that change the writing direction, and halves of characters, which cannot be encoded."""


def visible(text: str, keep: str = "") -> str:
    r"""Replace invisible characters, except those in `keep`, by JSON escapes such as \u001b.

    The result moves no cursor, reverses no line and breaks no file.
    """
    return _UNSEEN.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def shortened(text: str, most: int) -> str:
    """Cut the middle out of a text longer than `most` characters; the end stays, since it often holds the remedy."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} [...] {text[len(text) - (most - head) :]}"


def clipped(text: str, most: int) -> str:
    """Return a text of at most `most` visible characters; a longer one ends in " ..."."""
    text = visible(text)
    return text if len(text) <= most else f"{text[: most - 4]} ..."


WIDTH = 100
"""Columns of text for people if no terminal reports its width."""


def wrapped(text: str, width: int | None = WIDTH, first: str = "", others: str = "  ") -> str:
    """Return a paragraph whose first line begins with `first`, and all others with `others`.

    It is a single line if `width` is None, else at most `WIDTH` wide; words, such as ids and paths, are never broken.
    """
    if width is None:
        return first + visible(text)
    return textwrap.fill(
        visible(text),
        min(width, WIDTH),
        initial_indent=first,
        subsequent_indent=others,
        break_on_hyphens=False,
        break_long_words=False,
    )


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of leading items, such as characters of texts, that are equal."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


# Suites are shown with the source of their prompts, because `gsm8k (embedded)` is not GSM8K. Machine-readable output
# has the bare name and the source in separate fields.


EMBEDDED = "embedded"
EMBEDDED_NOTE = (
    "(embedded) = synthetic prompts from the generator that also produced the training text of nano and its drafts: "
    "new questions, same templates. They are not the public suites of these names"
)
"""A sentence without its full stop."""
LONGEST = 24
"""Longest folder or file name shown, in characters."""


class PromptSource(NamedTuple):
    """The origin of prompts, as recorded by runs: embedded, shipped, hub ID@COMMIT, folder PATH or file PATH."""

    kind: str
    place: str

    @classmethod
    def read(cls, source: str) -> PromptSource:
        kind, _, place = source.partition(" ")
        return cls(kind, place)


def suite_label(suite: str, *sources: str) -> str:
    """Return `gsm8k (embedded)`, or for runs with different sources `gsm8k (embedded and hub)`."""
    kinds = list(dict.fromkeys(filter(None, map(source_label, sources))))
    return visible(f"{suite} ({' and '.join(kinds)})" if kinds else suite)


def is_embedded(source: str) -> bool:
    return PromptSource.read(source).kind == EMBEDDED


def notes(sources: Iterable[str]) -> list[str]:
    """Return the notes on the sources of prompts that readers need."""
    return [EMBEDDED_NOTE] if any(map(is_embedded, sources)) else []


def with_settings(name: str, setting: str) -> str:
    """Add settings to the label of a suite or method: `gsm8k (embedded; temperature 1)`."""
    if not setting:
        return name
    return f"{name[:-1]}; {setting})" if name.endswith(")") else f"{name} ({setting})"


def number_words(values: Iterable[float]) -> dict[float, str]:
    """Return each number with six digits, or with all its digits if it would otherwise print like another."""
    short = {value: f"{value:g}" for value in values}
    times = Counter(short.values())
    return {value: text if times[text] == 1 else repr(value).removesuffix(".0") for value, text in short.items()}


def suite_list(suites: Iterable[tuple[str, str]]) -> str:
    """Join pairs of suite and source, with each source once, after its suites: `gsm8k, math500 (embedded)`."""
    groups = [
        (kind, [suite for suite, _ in members]) for kind, members in groupby(suites, lambda pair: source_label(pair[1]))
    ]
    return visible(", ".join(f"{', '.join(members)}{f' ({kind})' if kind else ''}" for kind, members in groups))


def source_label(source: str) -> str:
    """Shorten "folder /sets/data" to "folder data", and a hub commit to "hub"; the run's identity has the whole."""
    kind, place = PromptSource.read(source)
    if kind not in ("folder", "file"):
        return kind
    name = PurePosixPath(place).name or place
    return f"{kind} {name if len(name) <= LONGEST else f'{name[: LONGEST - 1]}…'}"


def dtype_name(dtype: object) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
