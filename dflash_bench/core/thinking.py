"""The boundary between a model's thinking and its answer: one rule for scorers, kinds of text and pages.

It reads the marks that templates and models write. Where marks are special tokens, which decoded text does not show,
`models.chat` applies it to the text with them and counts tokens.
"""

from __future__ import annotations

import re

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss: the closing mark begins the answer
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)
_CLOSES = dict(MARKS)
_OPENED = re.compile(rf"\s*({'|'.join(map(re.escape, _CLOSES))})")
_CLOSED = re.compile("|".join(map(re.escape, _CLOSES.values())))
_MARK = re.compile(rf"{_OPENED.pattern}|{_CLOSED.pattern}")


def answer_start(text: str, opening: str | None = None) -> int:
    """Return the index at which the answer begins: 0 without thinking, the end of the text if thinking is never closed.

    `opening` is the mark that the prompt ends with, "" without one. None: the prompt is unknown, and a closing mark
    without any opening closes thinking, too.
    """
    begin = 0
    while (opened := _OPENED.match(text, begin)) or opening != "":
        mark = opened[1] if opened else opening
        closing = re.compile(re.escape(_CLOSES[mark])) if mark else _CLOSED
        closed = closing.search(text, opened.end() if opened else begin)
        if closed is None:
            return len(text) if mark else begin
        begin, opening = closed.end(), ""
    return begin


def answer_of(text: str, num_thinking: int | None = None) -> str:
    """Return the text after `num_thinking` characters of thinking (None: found by its marks) and empty lines."""
    begin = answer_start(text) if num_thinking is None else num_thinking
    return text[begin:].lstrip("\r\n") if begin else text


def opening_of(prompt: str) -> str:
    """Return the opening mark that a prompt, the text with its special tokens, ends with; "" without one."""
    return next((opened for opened in _CLOSES if prompt.rstrip().endswith(opened)), "")


def unmarked(thinking: str) -> str:
    """Return thinking without its marks, as chat templates take it."""
    return _MARK.sub("", thinking).strip()


def marked(thinking: str, answer: str) -> str:
    """Join thinking and answer that a server sends separately, so that `answer_start` finds the answer."""
    opened, closed = MARKS[0]
    return f"{opened}{thinking}{closed}{answer}" if thinking.strip() else answer
