"""Multiple-choice questions with four options: the letter given at the end of an answer."""

from __future__ import annotations

import re

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt
from dflash_bench.tasks.scorers.base import Score, Scorer, last_box, reference

_SAID = (
    re.compile(r"(?:(?i:answer)(?:(?i:\s+is)|\W{0,8}[:=：\u2013\u2014])|答案[是为选]?)\W{0,8}([A-D])(?![A-Za-z0-9_'])"),
    re.compile(r"(?i:answer)\W{0,8}([A-D])(?![A-Za-z0-9_'])"),
    re.compile(r"(?:(?i:choice|option)(?i:\s+is)?|选[项择]?)\W{0,8}([A-D])(?![A-Za-z0-9_'])"),
    re.compile(r"(?<![\w'])([A-D])(?![\w'])(?! [a-z])"),
)
"""Patterns of a letter given as the answer, surest first; "A" before a lower-case word is an article."""
_LETTER = re.compile(r"\W*([A-D])\W*")


def choice(prompt: Prompt, text: str) -> Score:
    """Score the last letter in a box, or else the last that is stated as the answer, or that stands alone."""
    boxed = _LETTER.fullmatch(last_box(text) or "")
    letters = next(filter(None, (said.findall(text) for said in _SAID)), [])
    letter = boxed[1] if boxed else letters[-1] if letters else None
    return Score(letter, letter == right_letter(prompt))


def right_letter(prompt: Prompt) -> str:
    """Return the correct letter. Raises UserError for a reference other than A to D."""
    match = _LETTER.fullmatch(reference(prompt).upper())
    if match is None:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where}: its reference '{reference(prompt)[:40]}' is none of A, B, C and D")
    return match[1]


SCORER = Scorer(choice, check=right_letter)
