"""Text that somebody else wrote, made fit to be shown: nothing in it moves a cursor, turns a line or breaks a file."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, marks that turn the direction of writing, and halves of characters, which no encoding has."""


def visible(text: str, keep: str = "") -> str:
    r"""What cannot be seen becomes an escape that JSON has too, such as \u001b, but for the characters in `keep`."""
    return _UNSEEN.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def shortened(text: str, most: int) -> str:
    """At most so many characters and a mark where the middle was left out: what is at the end is often the remedy."""
    if len(text) <= most:
        return text
    head = most * 2 // 3
    return f"{text[:head]} [...] {text[len(text) - (most - head) :]}"


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"
