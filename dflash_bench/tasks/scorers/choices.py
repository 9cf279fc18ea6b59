"""Questions with four answers to choose from: the letter that an answer ends with."""

from __future__ import annotations

import re

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score, last_box, reference

_SAID = (
    re.compile(r"(?:(?i:answer)(?:(?i:\s+is)|\W{0,8}[:=：\u2013\u2014])|答案[是为选]?)\W{0,8}([A-D])(?![A-Za-z0-9_'])"),
    re.compile(r"(?i:answer)\W{0,8}([A-D])(?![A-Za-z0-9_'])"),
    re.compile(r"(?:(?i:choice|option)(?i:\s+is)?|选[项择]?)\W{0,8}([A-D])(?![A-Za-z0-9_'])"),
    re.compile(r"(?<![\w'])([A-D])(?![\w'])(?! [a-z])"),
)
"""How a letter is said to be the answer, surest first; alone, "A" before a word in small letters is an article."""
_LETTER = re.compile(r"\W*([A-D])\W*")


def choice(prompt: Prompt, text: str) -> Score:
    """The answer is the last letter in a box, or else the last that is said to be the answer, or that stands alone."""
    boxed = _LETTER.fullmatch(last_box(text) or "")
    letters = next(filter(None, (said.findall(text) for said in _SAID)), [])
    letter = boxed[1] if boxed else letters[-1] if letters else None
    return Score(letter, letter == right_letter(prompt))


def right_letter(prompt: Prompt) -> str:
    """Return the letter that is right. Raises UserError for a reference that is none of the four."""
    match = _LETTER.fullmatch(reference(prompt).upper())
    if match is None:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where}: its reference '{reference(prompt)[:40]}' is none of A, B, C and D")
    return match[1]
