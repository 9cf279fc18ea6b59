"""Makes text by others safe to show: nothing in it moves the cursor, reverses a line or breaks a file."""

from __future__ import annotations

import re
from collections.abc import Sequence

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
