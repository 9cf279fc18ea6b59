"""What is shown to people: names of suites with their source, and text by others made safe to show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import PurePosixPath

# Makes text by others safe to show: nothing in it moves the cursor, reverses a line or breaks a file.


_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, marks that change the direction of writing, and halves of characters, which cannot be encoded."""


def visible(text: str, keep: str = "") -> str:
    r"""The text with invisible characters as JSON escapes, such as \u001b, except for those in `keep`."""
    return _UNSEEN.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def shortened(text: str, most: int) -> str:
    """Cut the middle out of a text longer than `most` characters; the end stays, as it often says what to do."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} [...] {text[len(text) - (most - head) :]}"


def in_common(one: Sequence[object], other: Sequence[object]) -> int:
    """With how many same items, letters of texts for instance, both begin."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


# How a suite is named for people: with the source of its prompts, because `gsm8k (embedded)` is not GSM8K.
#
# Output for programs keeps the bare name, and has the source in a separate field.


EMBEDDED = "embedded"
EMBEDDED_NOTE = (
    "(embedded) = prompts written for this project, by the rules that also made the texts on which nano and its drafts "
    "were trained: other questions, the same templates. They are not the public suites of these names"
)
"""Without its full stop."""
LONGEST = 24
"""How many letters of a folder's or file's name are shown."""


def named(suite: str, *sources: str) -> str:
    """`gsm8k (embedded)`; for several runs with different sources `gsm8k (embedded and hub)`."""
    kinds = list(dict.fromkeys(filter(None, map(_kind, sources))))
    return visible(f"{suite} ({' and '.join(kinds)})" if kinds else suite)


def notes(sources: Iterable[str]) -> list[str]:
    """What a reader must know of where prompts came from, in a sentence."""
    return [EMBEDDED_NOTE] if EMBEDDED in map(_kind, sources) else []


def under(name: str, setting: str) -> str:
    """A suite or a method, already for people, under settings: `gsm8k (embedded; temperature 1)`."""
    if not setting:
        return name
    return f"{name[:-1]}; {setting})" if name.endswith(")") else f"{name} ({setting})"


def number_words(values: Iterable[float]) -> dict[float, str]:
    """Each number with six digits; those that would print alike with as many as tell them apart."""
    short = {value: f"{value:g}" for value in values}
    times = Counter(short.values())
    return {value: text if times[text] == 1 else repr(value).removesuffix(".0") for value, text in short.items()}


def listed(suites: Iterable[tuple[str, str]]) -> str:
    """Pairs of suite and source as text, each source once, after its suites: `gsm8k, math500 (embedded)`."""
    groups = [(kind, [suite for suite, _ in members]) for kind, members in groupby(suites, lambda pair: _kind(pair[1]))]
    return visible(", ".join(f"{', '.join(members)}{f' ({kind})' if kind else ''}" for kind, members in groups))


def _kind(source: str) -> str:
    """`folder data` for "folder /sets/data"; the full path is in the run's identity."""
    kind, _, place = source.partition(" ")
    if kind not in ("folder", "file"):
        return kind
    name = PurePosixPath(place).name or place
    return f"{kind} {name if len(name) <= LONGEST else f'{name[: LONGEST - 1]}…'}"
