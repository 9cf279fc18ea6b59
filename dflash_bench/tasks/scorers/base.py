"""The result of a scorer, and helpers shared by several scorers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from dflash_bench.core.errors import UserError
from dflash_bench.core.types import Prompt

_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<brace>[{}])", re.DOTALL)
_JOINT = re.compile(
    r"(?:[\s$]|\\[()\[\],;:! ]|\\q?quad(?![a-z]))*(?:,|;|&|and|or|\\(?:text|mbox)\{[\s,]*(?:and|or)\s*\})"
)
_JOINTS = re.compile(rf"(?:{_JOINT.pattern})+(?:[\s$]|\\[()\[\],;:! ])*")
"""The text between the boxes of one list: "$\boxed{1}$ and $\boxed{2}$"."""
_UNFILLED = re.compile(
    r"(?:[\s.?…{}]|\\[,;:! ~]|\\(?:[lc]?dots|q?quad|text\w*|math\w+)(?![a-z])|(?:your|the|final|an?|answer|here)\b)*",
    re.IGNORECASE,
)
_IN_A_SENTENCE = re.compile(
    r"(?:\b(?:in|into|inside|within|with|using|use|by|the|an?|as|to|of)\s+[$`'\"]*|`)$", re.IGNORECASE
)
MENTION = re.compile(rf"\\(?:boxed|fbox)\s*\{{{_UNFILLED.pattern}\}}", re.IGNORECASE)
"""A box without an answer in it, as in a text that describes its own format."""


@dataclass(frozen=True, slots=True)
class Score:
    """The part of a text taken as the answer, and whether it is correct; `passed` is None if not scored."""

    answer: str | None
    passed: bool | None
    value: float | None = None
    """The value of a metric that does not judge answers right or wrong."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """How answers are scored, and what that needs of prompts and of this machine."""

    score: Callable[..., Score]
    """Scores a prompt's answer: a text and, for code, the sandbox."""
    columns: Mapping[str, type] = field(default_factory=dict)
    """Columns of a prompt's row that it reads."""
    check: Callable[[Prompt], object] | None = None
    """Raises UserError for a reference or columns that it cannot use."""
    unscored: Callable[[Prompt], str] | None = None
    """Returns why the answers to a prompt cannot be scored; empty if they can."""
    module: str | None = None
    """The package that it needs."""


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    content: str
    is_closed: bool

    @property
    def is_filled(self) -> bool:
        return _UNFILLED.fullmatch(self.content) is None


def last_box(text: str) -> str | None:
    r"""Return the content of the last \boxed{} that holds an answer, which may contain braces.

    Boxes of one list, as in "\boxed{1} and \boxed{2}", are joined by commas. The result is empty if the last box is
    never closed or no box is filled, and None without a box or if a sentence only mentions an empty one.
    """
    boxes = sorted(_boxes(text), key=lambda box: box.start)
    filled = [box for box in boxes if box.is_filled]
    closed = [box for box in filled if box.is_closed]
    if not filled:
        return (
            ""
            if any(_IN_A_SENTENCE.search(text[max(0, box.start - 40) : box.start]) is None for box in boxes)
            else None
        )
    if not closed or not (filled[-1].is_closed or closed[-1].content.startswith(filled[-1].content)):
        return ""
    parts = [closed[-1]]
    for box in reversed(closed[:-1]):
        if not _JOINTS.fullmatch(text[box.end : parts[0].start]):
            break
        parts.insert(0, box)
    return ", ".join(dict.fromkeys(box.content for box in parts))


def _boxes(text: str) -> Iterator[_Box]:
    """Yield all boxes, inner ones before outer ones and unclosed ones last."""
    opened: list[re.Match[str]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == "}" and opened:
            start = opened.pop()
            if start["box"]:
                yield _Box(start.start(), token.end(), text[start.end() : token.start()].strip(), True)
        elif token["box"] or token[0] == "{":
            opened.append(token)
    yield from (_Box(start.start(), len(text), text[start.end() :].strip(), False) for start in opened if start["box"])


EVALUATED = "evaluate:"
"""Begins the names of scorers that are metrics of the evaluate library."""


def is_evaluated(name: str) -> bool:
    return name.startswith(EVALUATED)


def otherwise_right(prompt: Prompt) -> Iterator[Prompt]:
    """Return the prompt with each of its alternatives as its reference."""
    return (replace(prompt, reference=right, alternatives=()) for right in prompt.alternatives)


def reference(prompt: Prompt) -> str:
    """Return a prompt's reference. Raises UserError if it is missing."""
    if prompt.reference is None:
        where = f"prompt {prompt.prompt_id} of suite {prompt.suite}"
        raise UserError(f"{where} has no reference to compare with; add one, or omit --score")
    return prompt.reference


def require_module(module: str) -> None:
    """Raise UserError if a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{module} is not installed; run: pip install {module.replace('_', '-')}")
