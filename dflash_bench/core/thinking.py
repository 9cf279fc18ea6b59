"""Where the answer begins behind a model's thinking: the one rule, for scorers, kinds of text and pages.

It reads the marks that templates and models write. Where marks are special tokens, which decoded text does not show,
`models.chat` applies it to the text with them and counts tokens.
"""

from __future__ import annotations

import re

MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),  # gpt-oss: what ends it begins the answer
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),  # Kimi-VL
)
_OPENED = re.compile(rf"\s*(?:{'|'.join(re.escape(opened) for opened, _ in MARKS)})")
_CLOSED = re.compile("|".join(re.escape(closed) for _, closed in MARKS))


def answer_start(text: str, is_open: bool = False) -> int:
    """Return the index at which the answer begins in a text: 0 without thinking, its end if thinking is never closed.

    `is_open`: the prompt ended with the opening mark. A closing mark without any opening closes thinking, too, since
    the prompt may not be known.
    """
    begin = 0
    while (opened := _OPENED.match(text, begin)) or begin == 0:
        closed = _CLOSED.search(text, opened.end() if opened else begin)
        if closed is None:
            return len(text) if opened or is_open else begin
        begin, is_open = closed.end(), False
    return begin


def answer_of(text: str, num_thinking: int | None = None) -> str:
    """Return the text after `num_thinking` characters of thinking (None: found by its marks) and empty lines."""
    begin = answer_start(text) if num_thinking is None else num_thinking
    return text[begin:].lstrip("\r\n") if begin else text


def is_opened_by(prompt: str) -> bool:
    """Return whether a prompt, the text with its special tokens, ends with an opening mark."""
    return any(prompt.rstrip().endswith(opened) for opened, _ in MARKS)


def marked(thinking: str, answer: str) -> str:
    """Join what a server sends apart, so that `answer_start` finds the answer; an empty thought is none."""
    opened, closed = MARKS[0]
    return f"{opened}{thinking}{closed}{answer}" if thinking.strip() else answer
