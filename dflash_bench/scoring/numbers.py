"""Answers that are numbers, compared by value: GSM8K's last number and AIME's integer."""

from __future__ import annotations

import re
from fractions import Fraction

from dflash_bench.errors import UserError
from dflash_bench.records import Prompt
from dflash_bench.scoring.answers import Score, last_box, reference

_MINUS = r"(?:(?<![\w)}])-)?"  # not the minus of a difference
_INTEGER = re.compile(rf"(?<![\d.]){_MINUS}\d+(?!\.?\d)", re.ASCII)
_NUMBER = re.compile(rf"{_MINUS}(?:\d+/0*[1-9]\d*|\d+(?:\.\d+)?|\.\d+)", re.ASCII)
_MAX_NUMBER_CHARS = 100  # no answer is longer, and Python refuses to convert thousands of digits


def gsm8k(prompt: Prompt, text: str) -> Score:
    answer = _final_number(text)
    return Score(answer, _same_number(answer, right_number(prompt)))


def aime(prompt: Prompt, text: str) -> Score:
    box = last_box(text)
    integers = _INTEGER.findall(_plain_number(text if box is None else box))
    answer = integers[-1] if integers else None
    return Score(answer, _same_number(answer, right_number(prompt)))


def _final_number(text: str) -> str | None:
    """From the last box, else from behind the last `####`, else the last of the text."""
    box = last_box(text)
    plain = _plain_number(text if box is None else box)
    marked = re.findall(rf"####\s*({_NUMBER.pattern})", plain, re.ASCII)
    numbers = marked or _NUMBER.findall(plain)
    return numbers[-1] if numbers else None


def _plain_number(text: str) -> str:
    text = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    text = re.sub(r"\\[!,;$ ]|[$%]", "", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    return re.sub(r"(?<=[A-Za-z}])\^\{?\d\}?", "", text)  # the power of a unit


def _same_number(answer: str | None, right: str) -> bool:
    if answer is None or len(answer) > _MAX_NUMBER_CHARS:
        return False
    return Fraction(answer) == Fraction(right)


def right_number(prompt: Prompt) -> str:
    text = reference(prompt)
    number = _final_number(text)
    if number is None or len(number) > _MAX_NUMBER_CHARS:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where}: its reference {text[:40]!r} holds no number; correct that row")
    return number
